"""Settings of all tests: sixteen virtual CPU devices, so that one process can be any pod up to 4x4, and own caches."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
jax.devices()  # starts the backend, so that no test can change the number of devices


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Keep the indexes of the tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _compilation_cache(tmp_path_factory, request):
    """Share compiled programs between all processes of the session, pytest's own and those that tests start."""
    base = tmp_path_factory.getbasetemp()
    common = base.parent if hasattr(request.config, "workerinput") else base
    settings = {
        "jax_compilation_cache_dir": str(common / "programs"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        yield
