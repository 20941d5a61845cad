"""Private parts of JAX that have no public name, behind functions of ours. No other module of the package uses them."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def get_client() -> Any:
    """Return JAX's distributed client, which holds the key-value store; None where there is only one process."""
    from jax._src import distributed

    state = distributed.global_state
    return state.client if state.client is not None and (state.num_processes or 1) > 1 else None


def listen_on(hostname: str) -> None:
    """Make collectives between CPUs listen on this address, not on the one that the machine's name resolves to."""
    from jax._src.lib import _jax

    make = getattr(_jax, "make_gloo_tcp_collectives", None)
    make = getattr(make, "func", make)  # of an earlier call
    if make:
        _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=hostname)


def replace_program_cache(make_cache: Callable[[str], Any]) -> None:
    """Make JAX keep compiled programs in caches of our own, and let every process write to them.

    JAX lets process 0 alone write. But a program that one process has compiled for CPUs is of no use to another one,
    whose devices have other numbers.

    Args:
        make_cache: takes a folder and returns an object with `get(key)` and `put(key, value)`.
    """
    from jax._src import compilation_cache, compiler

    def make(path: str) -> tuple[Any, str]:
        return make_cache(path), path

    compilation_cache.get_file_cache = make
    compiler.distributed = SimpleNamespace(  # type: ignore[assignment]
        global_state=SimpleNamespace(process_id=0, client=None)
    )


# --- elastic runs: processes leave a group and join the next one without a restart ---------------------------------

SERVICE_HEARTBEAT_S = 600  # the launcher notices sooner that a process is lost; JAX would abort all others
CONNECT_S = 60
BROKEN = b"broken"


def find_missing_part() -> str:
    """Return the name of a part that elastic runs need and this version of JAX lacks; "" if it has all.

    >>> find_missing_part()
    ''
    """
    from jax._src import distributed
    from jax._src.lib import _jax

    parts = ("get_distributed_runtime_service", "get_distributed_runtime_client", "make_gloo_tcp_collectives")
    missing = [f"jaxlib._jax.{name}" for name in parts if not hasattr(_jax, name)]
    attributes = ("client", "process_id", "num_processes")
    state = getattr(distributed, "global_state", None)
    missing += [f"jax._src.distributed.global_state.{name}" for name in attributes if not hasattr(state, name)]
    return missing[0] if missing else ""


def start_service(address: str, processes: int) -> Any:
    """Return a coordination service that goes on when clients are lost. Without it, all its clients abort."""
    from jax._src.lib import _jax

    return _jax.get_distributed_runtime_service(
        address, processes, heartbeat_timeout=SERVICE_HEARTBEAT_S, shutdown_timeout=1, recoverable=True
    )


def make_client(address: str, process: int) -> Any:
    """Return a client of such a service that is connected; it waits until as many as expected have connected."""
    from jax._src.lib import _jax

    client = _jax.get_distributed_runtime_client(
        address,
        process,
        init_timeout=CONNECT_S,
        heartbeat_timeout=SERVICE_HEARTBEAT_S,
        shutdown_timeout=1,
        shutdown_on_destruction=False,
    )
    client.connect()
    return client


def connect(address: str, process: int, processes: int) -> None:
    """Connect JAX to the other processes of a generation; a process that is alone needs no service."""
    from jax._src import distributed

    state = distributed.global_state
    state.client = make_client(address, process) if processes > 1 else None
    state.process_id, state.num_processes = process, processes


def disconnect() -> None:
    """Drop JAX's devices, compiled programs and client. Nothing may hold an array, a mesh or a program any more."""
    import gc

    import jax
    from jax._src import distributed
    from jax.experimental import multihost_utils
    from jax.extend.backend import clear_backends

    for value in vars(multihost_utils).values():  # they hold meshes, and with them the devices
        if clear := getattr(value, "cache_clear", None):
            clear()
    gc.collect()
    jax.clear_caches()
    clear_backends()
    gc.collect()
    state = distributed.global_state
    state.client, state.process_id, state.num_processes = None, 0, 1


def release_waiters(client: Any, processes: int) -> None:
    """Make everything fail that waits for a lost process while devices or connections are set up.

    The processes of a generation exchange their devices and addresses through its key-value store, and wait for minutes
    for a key that does not come. So each key that is missing gets a value that none can use.
    """
    folders = ("cpu:local_topology", "cpu:global_topology", "cpu:gloo")
    present = {key for folder in folders for key, _ in client.key_value_dir_get_bytes(folder)}
    wanted = {"cpu:global_topology/cpu"} | {f"cpu:local_topology/cpu/{number}" for number in range(processes)}
    groups = {key.rpartition("/")[0] for key in present if key.startswith("cpu:gloo/")}  # cpu:gloo/0,2048/1
    wanted |= {f"{group}/{number}" for group in groups for number in range(group.count(",") + 1)}
    for key in wanted - present:
        try:
            client.key_value_set_bytes(key, BROKEN)
        except RuntimeError:
            continue  # it has come meanwhile
