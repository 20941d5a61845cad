"""Settings of all tests: sixteen virtual CPU devices, so that one process can be any pod up to 4x4, and own caches."""

import fcntl
import gc
import os
import uuid

# The tests of a session keep all cores busy, so cutting each program into 32 parts to compile them side by side only
# costs time: a fifth of what compilation takes. Set before jax is imported, and inherited by programs that tests start.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_parallel_codegen_split_count=1".strip()

import jax
import pytest

collect_ignore = ["support/register_small_models.py"]  # what it registers is for the processes that import it

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
jax.devices()  # starts the backend, so that no test can change the number of devices


# Compiled programs leave millions of objects behind that live as long as the session: looking through them for garbage
# again and again takes a twentieth of its time.
gc.set_threshold(100_000, 50, 50)


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="leave out heavy tests, and sample where a test says so")


def pytest_collection_modifyitems(config, items):
    """With --quick, drop tests marked `heavy`; of a test marked `sample(n)` keep n evenly spread parameter sets."""
    if not config.getoption("--quick"):
        return
    families = {}
    for item in items:
        families.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    kept = []
    for family in families.values():
        marker = family[0].get_closest_marker("sample")
        count = min(marker.args[0], len(family)) if marker else len(family)
        kept += [family[i * len(family) // count] for i in range(count)]
    kept = [item for item in kept if not item.get_closest_marker("heavy")]
    selected = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = [item for item in items if item in selected]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Keep the indexes of the tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory, request):
    """A folder that all processes of the session share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(request.config, "workerinput") else base


@pytest.fixture(scope="session", autouse=True)
def _compilation_cache(session_folder):
    """Share compiled programs between all processes of the session, pytest's own and those that tests start."""
    settings = {
        "jax_compilation_cache_dir": str(session_folder / "programs"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        yield


@pytest.fixture(scope="session")
def undisturbed_run(session_folder):
    """The run of `support.processes.SETTINGS` by one process with four devices; made once, and only read."""
    from support.processes import train_in_process

    folder = session_folder / "undisturbed"
    with (session_folder / "undisturbed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "summary.json").exists():
            train_in_process(folder, "2x2")
    return folder


@pytest.fixture(scope="session")
def s3_server():
    """The address of an S3 server, the same for all tests of this process."""
    from support.buckets import serve_s3

    with serve_s3() as address:
        yield address


@pytest.fixture
def bucket(s3_server, monkeypatch):
    """The name of a new bucket; the environment points at its server."""
    from support.buckets import make_bucket, use_store

    name = f"bucket-{uuid.uuid4().hex[:12]}"
    make_bucket(s3_server, name)
    use_store(monkeypatch, s3_server)
    return name


@pytest.fixture(scope="session")
def azure_server():
    """The address of a server of Azure's protocol, the same for all tests of this process."""
    from support.azure import serve_azure

    with serve_azure() as address:
        yield address


@pytest.fixture
def container(azure_server, monkeypatch):
    """The name of a new container; the environment points at its server."""
    from support.azure import make_container, use_azure

    name = f"container-{uuid.uuid4().hex[:12]}"
    make_container(azure_server, name)
    use_azure(monkeypatch, azure_server)
    return name


@pytest.fixture(scope="session")
def ceph_server():
    """The address of Ceph's S3 gateway, the same for all tests of this process."""
    from support.ceph import find_missing, serve_ceph

    if reason := find_missing():
        pytest.skip(reason)
    with serve_ceph() as address:
        yield address


@pytest.fixture
def ceph_bucket(ceph_server, monkeypatch):
    """The name of a new bucket in Ceph; the environment points at its gateway."""
    from support.buckets import use_store
    from support.ceph import make_bucket

    name = f"bucket-{uuid.uuid4().hex[:12]}"
    make_bucket(ceph_server, name)
    use_store(monkeypatch, ceph_server)
    return name
