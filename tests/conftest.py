"""Settings of all tests: sixteen virtual CPU devices, so that one process can be any pod up to 4x4, and own caches."""

import fcntl
import gc
import os
import sys
import uuid
from collections import Counter
from importlib import metadata
from importlib.util import find_spec

# The tests of a session keep all cores busy, so cutting each program into 32 parts to compile them side by side only
# costs time: a fifth of what compilation takes. XLA's older code generator, which jaxlib 0.11 no longer has, takes two
# thirds of the newer one's time for such small programs; all tests run with the newer one in `make test-slow`, which
# sets PODSCALE_TEST_XLA, and where there is libtpu, which ends a process that has a flag it does not know. Set before
# jax is imported, and inherited by programs that tests start.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_parallel_codegen_split_count=1"]
    + ["--xla_cpu_use_fusion_emitters=false"]
    * (
        metadata.version("jaxlib").startswith("0.10.")
        and find_spec("libtpu") is None
        and os.environ.get("PODSCALE_TEST_XLA") != "newer"
    )
).strip()

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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Return one process more than there are cores: a test that waits for processes or a limit leaves a core idle."""
    from podscale.processes.host import count_usable_cores

    return count_usable_cores() + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        select_quick(config, items)
    yield  # other plugins leave out tests too, such as those marked `slow`
    if hasattr(config, "workerinput"):
        sort_files(items)


def select_quick(config, items):
    """Drop tests marked `heavy`; of a test marked `sample(n)` keep n evenly spread parameter sets."""
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


def sort_files(items):
    """Let files that take long come first: pytest-xdist hands out files in this order, and one that takes a minute and
    comes last would leave the other cores idle.
    """
    seconds = Counter()
    for item in items:
        seconds[item.path] += estimate_seconds(item)
    items.sort(key=lambda item: -seconds[item.path])


def estimate_seconds(item):
    """Return about how long a test takes, by its kind."""
    if item.nodeid.startswith(("tests/integration/", "tests/faults/", "tests/packaging/")):
        return 5
    return 2 if item.get_closest_marker("heavy") else 0.1


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


def train_once(folder, train):
    """Let the first process of the session that needs this run train it; the others wait for it."""
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "summary.json").exists():
            train(folder)
    return folder


@pytest.fixture(scope="session")
def undisturbed_run(session_folder):
    """The run of `support.processes.SETTINGS` by one process with four devices; made once, and only read."""
    from support.processes import train_in_process

    return train_once(session_folder / "undisturbed", lambda folder: train_in_process(folder, "2x2"))


@pytest.fixture(scope="session")
def short_run(session_folder):
    """The run of `support.short_run` by one device; made once, and only read."""
    from support import short_run

    return train_once(session_folder / "short", short_run.train)


@pytest.fixture
def registries(monkeypatch):
    """What the test adds to a registry of the package is gone after it."""
    import podscale.training.loop  # noqa: F401  what a training needs, and thereby every registry
    from podscale.config.registry import Registry

    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "podscale"]
    for value in [value for module in modules for value in vars(module).values() if isinstance(value, Registry)]:
        monkeypatch.setattr(value, "_parts", dict(value))


@pytest.fixture(scope="module")
def small_models():
    """The models of `support.small_models` are available to recipes."""
    from support import small_models

    small_models.register_models()
    yield
    small_models.unregister_models()


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


@pytest.fixture
def google_bucket(s3_server, monkeypatch):
    """The name of a new bucket behind a proxy that speaks Google's protocol, where the environment points."""
    from support.buckets import make_bucket
    from support.google import GoogleProxy, use_google

    name = f"bucket-{uuid.uuid4().hex[:12]}"
    make_bucket(s3_server, name)
    with GoogleProxy(s3_server) as proxy:
        use_google(monkeypatch, proxy.address)
        yield name


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
