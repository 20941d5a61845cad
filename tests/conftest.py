"""Sixteen virtual CPU devices for the whole test session, so that one process holds any pod up to 4x4."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
jax.devices()  # starts the backend, so that no test can ask for fewer


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Indexes that the tests keep are not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _programs_kept(tmp_path_factory, request):
    """What one process has compiled, be it pytest's or one that a test starts, the next need not."""
    own = tmp_path_factory.getbasetemp()
    common = own.parent if hasattr(request.config, "workerinput") else own
    settings = {
        "jax_compilation_cache_dir": str(common / "programs"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        yield
