"""What Podscale needs of JAX's private parts is looked for, and what is missing is named."""

from types import SimpleNamespace

import pytest
from jax._src import compilation_cache, compiler
from jax._src.lib import _jax

from podscale.processes import private_jax
from podscale.training import program_cache


@pytest.mark.parametrize("lost", ["connect", "key_value_dir_get_bytes", "key_value_set_bytes"])
def test_a_method_that_elastic_runs_need_and_a_client_lacks_is_named(lost, monkeypatch):
    names = {"connect", "key_value_dir_get_bytes", "key_value_set_bytes"} - {lost}
    monkeypatch.setattr(_jax, "DistributedRuntimeClient", SimpleNamespace(**dict.fromkeys(names)))
    assert private_jax.find_missing_part() == f"jaxlib._jax.DistributedRuntimeClient.{lost}"


@pytest.mark.parametrize(
    ("module", "lost"), [(compilation_cache, "get_file_cache"), (compiler, "distributed.global_state")]
)
def test_a_cache_for_all_processes_that_jax_does_not_allow_is_reported(module, lost, monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "distributed", compiler.distributed)  # put back after the test, as is the next one
    monkeypatch.setattr(compilation_cache, "get_file_cache", compilation_cache.get_file_cache)
    monkeypatch.delattr(module, lost.partition(".")[0])
    monkeypatch.setenv(program_cache.MIN_COMPILE_S, "0")
    before = vars(compiler).get("distributed"), vars(compilation_cache).get("get_file_cache")
    problem = program_cache.enable_program_cache(str(tmp_path))
    assert problem == (
        f"compiled programs are not shared by all processes: this version of JAX lacks {module.__name__}.{lost}"
    )
    assert before == (vars(compiler).get("distributed"), vars(compilation_cache).get("get_file_cache"))
