"""Private parts of JAX that have no public name, behind functions of ours. No other module of the package uses them."""

import functools
import importlib
import operator
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from podscale.processes import host

GLOO = "make_gloo_tcp_collectives"


def get_client() -> Any:
    """Return JAX's distributed client, which holds the key-value store; None where there is only one process."""
    from jax._src import distributed

    state = distributed.global_state
    return state.client if state.client is not None and (state.num_processes or 1) > 1 else None


def _find_missing(needed: Mapping[str, Sequence[str]]) -> str:
    """Return the first of these names in these modules that is not there; "" if all are."""
    for module, names in needed.items():
        for name in names:
            try:
                operator.attrgetter(name)(importlib.import_module(module))
            except (ImportError, AttributeError):
                return f"{module}.{name}"
    return ""


def get_trace_settings() -> object:
    """Return all settings of JAX with which this thread traces, to compare with those of another thread.

    >>> get_trace_settings() == get_trace_settings()
    True
    """
    if _find_missing({"jax._src.config": ["trace_context"]}):
        return object()  # equal to no other thread's
    from jax._src import config

    return config.trace_context()


def listen_on(hostname: str) -> None:
    """Make collectives between CPUs listen on this address, not on the one that the machine's name resolves to."""
    from jax._src.lib import _jax

    make = getattr(_jax, GLOO, None)
    make = getattr(make, "func", make)  # of an earlier call
    if make:
        _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=hostname)


def replace_program_cache(make_cache: Callable[[str], Any]) -> str:
    """Make JAX keep compiled programs in caches of our own, which every process reads and writes.

    Returns the name of a part that this version of JAX lacks, with which nothing is replaced; "" if it has all.

    JAX lets process 0 alone write, and keys a program for CPUs by the process too, which the program is independent of.

    Args:
        make_cache: takes a folder and returns an object with `get(key)` and `put(key, value)`.
    """
    needed = {"jax._src.compilation_cache": ["get_file_cache"], "jax._src.compiler": ["distributed.global_state"]}
    if missing := _find_missing(needed):
        return missing
    from jax._src import compilation_cache, compiler

    def make(path: str) -> tuple[Any, str]:
        return make_cache(path), path

    compilation_cache.get_file_cache = make
    compiler.distributed = SimpleNamespace(  # type: ignore[assignment]
        global_state=SimpleNamespace(process_id=0, client=None)
    )
    _key_cpu_programs_by_machine()
    return ""


def _key_cpu_programs_by_machine() -> None:
    """Make the cache's key of a program for CPUs the same in all processes of a pod: by the machine, not the process.

    The key has JAX's fingerprint of the pod as a process sees it, which is another one in each of them.
    """
    from jax._src import cache_key

    fingerprint = getattr(cache_key, "_hash_accelerator_config", None)
    if fingerprint is None:  # in another version of JAX; then each process has programs of its own
        return
    fingerprint = getattr(fingerprint, "keywords", {}).get("fingerprint", fingerprint)  # of an earlier call
    options = {"fingerprint": fingerprint, "machine": host.describe_cpu().encode()}
    cache_key._hash_accelerator_config = functools.partial(_hash_devices, **options)


def _hash_devices(digest: Any, devices: Any, *, fingerprint: Callable[[Any, Any], None], machine: bytes) -> None:
    if all(device.platform == "cpu" for device in devices.flat):
        digest.update(machine)
    else:
        fingerprint(digest, devices)


# --- elastic runs: processes leave a group and join the next one without a restart ---------------------------------

SERVICE_HEARTBEAT_S = 600  # the launcher notices sooner that a process is lost; JAX would abort all others
CONNECT_S = 60
BROKEN = b"broken"
ADDRESS_BYTES = 26  # of what a process publishes, up to the end of its IPv4 address
DEVICES_PER_PROCESS = 2048  # the number of a process's first CPU device, divided by the process's number
CONNECTION_S = 1.0


def find_missing_part() -> str:
    """Return the name of a part that elastic runs need and this version of JAX lacks; "" if it has all.

    >>> find_missing_part()
    ''
    """
    client = ("connect", "key_value_dir_get_bytes", "key_value_set_bytes")
    needed = {
        "jaxlib._jax": (
            *("get_distributed_runtime_service", "get_distributed_runtime_client", GLOO),
            *(f"DistributedRuntimeClient.{name}" for name in client),
        ),
        "jax._src.distributed": ("global_state.client", "global_state.process_id", "global_state.num_processes"),
        "jax.extend.backend": ("clear_backends",),
    }
    if missing := _find_missing(needed):
        return missing
    from jax._src.lib import _jax

    for function, option in (("service", "recoverable"), ("client", "shutdown_on_destruction")):
        name = f"get_distributed_runtime_{function}"
        if option not in (getattr(_jax, name).__doc__ or ""):  # a compiled function has its signature there
            return f"the option {option} of jaxlib._jax.{name}"
    return ""


def start_service(address: str, processes: int) -> Any:
    """Return a coordination service that survives the loss of clients. When it ends, all its clients abort."""
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


class WaiterRelease:
    """Makes everything fail that waits for a lost process while devices or connections are set up.

    The processes of a generation exchange their devices and addresses through its key-value store, and wait for minutes
    for a key that does not come, and half a minute for a connection. So each key that is missing gets a value that none
    can use, and each process that has published its address gets a connection in the name of the lost one that ends.

    Args:
        client: a stand-in for the lost process.
        lost: its number.
        processes: how many there are.
    """

    def __init__(self, client: Any, lost: int, processes: int) -> None:
        self._client, self._lost, self._processes = client, lost, processes
        self._connected = set[str]()

    def release(self) -> None:
        """Release what waits now."""
        folders = ("cpu:local_topology", "cpu:global_topology", "cpu:gloo")
        present = {key: value for folder in folders for key, value in self._client.key_value_dir_get_bytes(folder)}
        wanted = {"cpu:global_topology/cpu"} | {f"cpu:local_topology/cpu/{n}" for n in range(self._processes)}
        addresses = {key: value for key, value in present.items() if key.startswith("cpu:gloo/")}  # .../0,2048/1
        groups = {key.rpartition("/")[0] for key in addresses}
        wanted |= {f"{group}/{number}" for group in groups for number in range(group.count(",") + 1)}
        for key in wanted - present.keys():
            with suppress(RuntimeError):  # it has come meanwhile
                self._client.key_value_set_bytes(key, BROKEN)
        for key in addresses.keys() - self._connected:
            self._connected.add(key)
            self._connect_and_close(key, bytes(addresses[key]))

    def _connect_and_close(self, key: str, value: bytes) -> None:
        """Connect to who has published this address, in the name of the lost process, and close the connection.

        An address is a sockaddr at byte 18; the last eight bytes per device are what each has to send first.
        """
        devices = [int(number) for number in key.split("/")[-2].split(",")]
        if len(value) < ADDRESS_BYTES + 8 * len(devices):
            return  # no address, but BROKEN
        family, port, host = struct.unpack_from("<2s2s4s", value, 18)
        first = len(value) - 8 * len(devices)
        for number, device in enumerate(devices):
            if device // DEVICES_PER_PROCESS == self._lost and family == struct.pack("<H", socket.AF_INET):
                with suppress(OSError):
                    address = socket.inet_ntoa(host), int.from_bytes(port, "big")
                    with socket.create_connection(address, CONNECTION_S) as connection:
                        connection.sendall(value[first + 8 * number : first + 8 * number + 8])
