"""The process group: join and leave it, agree on values, and let the main process act for all."""

import atexit
import errno
import gc
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from podscale.errors import JoinError, UserError, describe_os_error, get_first_line
from podscale.processes import heartbeat, host, private_jax, schedulers
from podscale.processes.elastic import membership
from podscale.processes.exchange import Exchange
from podscale.processes.handshake import Handshake, list_versions
from podscale.processes.job_secret import read_secret
from podscale.processes.key_value_store import KeyValueStore, StoreError
from podscale.processes.monitor import Monitor

MESSAGE_BYTES = 1000
_rank_and_size = (0, 1)  # this process, and how many have joined; asking JAX would start its devices
_store: KeyValueStore | None = None
_monitor: Monitor | None = None
_handshake: Handshake | None = None
_exchanges = 0  # how many exchanges have been opened: all processes open the same ones in the same order


def join(coordinator: str = "", processes: int = 0, process: int = -1, heartbeat_s: float = 60.0) -> None:
    """Join the other processes of this run, if there are any; must come before anything that touches a device.

    Args:
        coordinator: HOST:PORT of the main process; empty: as the launcher says, if there is one.
        processes: how many there are; only with `coordinator`.
        process: this process's number; only with `coordinator`.
        heartbeat_s: seconds without a sign of life after which a process counts as dead, and all end.

    Raises:
        JoinError: the others cannot be reached.
        UserError: the arguments make no sense, one of the others is a stranger, or they run other versions.
    """
    global _rank_and_size, _store, _monitor, _handshake  # noqa: PLW0603
    if membership.join_launcher():
        gc.freeze()  # what is imported stays; generations end with a collection of what came after
        join_generation()
        return
    info: schedulers.ProcessInfo | None
    if coordinator:
        info = schedulers.make_process_info(coordinator, processes, process)
    else:
        info = schedulers.detect_process_info()
    if info is None or info.processes == 1:  # JAX's runtime would ignore SIGTERM from here on
        return
    if heartbeat_s < 1:
        raise UserError(f"pod.heartbeat_s must be 1 or more, not {heartbeat_s:g}")
    bind = info.get_bind_address()
    if info.process == 0:
        _check_port_free(bind or f"[::]:{info.coordinator.rpartition(':')[2]}")
    if bind:
        private_jax.listen_on(schedulers.LOOPBACK)
    try:
        jax.distributed.initialize(
            info.coordinator,
            info.processes,
            info.process,
            schedulers.select_gpus(info),
            cluster_detection_method="deactivate",
            coordinator_bind_address=bind,
            heartbeat_timeout_seconds=round(heartbeat.RUNTIME_HEARTBEATS * heartbeat_s),
        )
    except (ValueError, RuntimeError) as error:
        kind = JoinError if isinstance(error, RuntimeError) else UserError
        raise kind(
            f"{info.describe()}, cannot join the others at {info.coordinator}: {get_first_line(error)}"
        ) from None
    _rank_and_size = (info.process, info.processes)
    _store = KeyValueStore(get_key_value_store())
    _monitor = Monitor(_store)
    heartbeat.start(_monitor, _store, info.process, info.processes, heartbeat_s)
    atexit.register(_stop_monitor)  # before JAX's own handler, so that nobody uses a store that is closed
    _handshake = Handshake(_store, info.process, info.processes)
    _handshake.show_token(read_secret())
    _handshake.check_same(list_versions(), "install the same versions on all hosts")


def join_generation(snapshot: int = -1) -> None:
    """Join the next generation of an elastic run, as soon as the launcher has a place in it for this process.

    Args:
        snapshot: the step of the state that this process holds; -1: none.

    Raises:
        UserError: the processes run other versions.
    """
    member = membership.get_membership()
    assert member
    if not private_jax.find_missing_part():  # else the launcher ends this process, and restarts lost ones
        private_jax.listen_on(membership.DATA_ADDRESS)
    while True:
        try:
            _enter_generation(member, snapshot)
            return
        except (membership.GenerationEndedError, StoreError) as error:  # a process is lost before all are here
            member.report_trouble(get_first_line(error))
        leave_generation()


def _enter_generation(member: membership.Membership, snapshot: int) -> None:
    global _rank_and_size, _store, _monitor, _handshake  # noqa: PLW0603
    place = member.await_assignment(snapshot)
    private_jax.connect(place.address, place.rank, place.size)
    _rank_and_size = place.rank, place.size
    if place.size == 1:
        return
    _store = KeyValueStore(get_key_value_store(), member.check)
    _monitor = Monitor(_store)
    _handshake = Handshake(_store, *_rank_and_size)
    _handshake.check_same(list_versions(), "install the same versions on all hosts")


def leave_generation() -> None:
    """Leave a generation of an elastic run: its devices and everything on them are gone afterwards."""
    global _rank_and_size, _store, _handshake, _exchanges
    _stop_monitor()
    _rank_and_size, _store, _handshake, _exchanges = (0, 1), None, None, 0
    private_jax.disconnect()
    host.trim_memory()  # else it grows from generation to generation


def get_key_value_store() -> Any:
    """Return JAX's store of keys and values, which all processes share; None where there is only one process."""
    return private_jax.get_client()


@contextmanager
def open_monitor() -> Iterator[Monitor]:
    """Yield the monitor of this process, which goes on after the block; a process that is alone gets one inside it."""
    if _monitor:
        yield _monitor
        return
    monitor = Monitor()
    try:
        yield monitor
    finally:
        monitor.stop()


def _stop_monitor() -> None:
    """Leave the other processes, if there are any; they do not count this one as dead."""
    global _monitor  # noqa: PLW0603
    if _monitor:
        _monitor.stop()
        _monitor = None
        heartbeat.leave()


def _check_port_free(address: str) -> None:
    """Refuse a port that another program listens on: JAX would listen there too, and clients would find either.

    Raises:
        UserError: it is taken.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not count
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(
                    f"another program listens on port {port} of this host, perhaps process 0 of another run; choose "
                    "another port"
                ) from None


def get_rank_and_size() -> tuple[int, int]:
    """Return this process's number, and how many processes have joined."""
    return _rank_and_size


def leave() -> None:
    """Leave the group once all processes are here: a process that left alone would look dead to the others."""
    if jax.process_count() > 1 and not membership.get_membership():
        _stop_monitor()
        jax.distributed.shutdown()


def is_main_process() -> bool:
    """Return whether this is process 0, which writes files and prints for the user."""
    if membership.get_membership():
        return _rank_and_size[0] == 0  # JAX may be between two generations
    return bool(jax.process_index() == 0)


def count_local_processes() -> int:
    """Return how many of the joined processes run on this machine, and share its memory."""
    if jax.process_count() == 1:
        return 1
    name = np.uint32(zlib.crc32(socket.gethostname().encode()))
    return int(np.sum(multihost_utils.process_allgather(name) == name))


def check_same(values: dict[str, str], advice: str) -> None:
    """Refuse values that are not the same in all processes; all of them must call this.

    Raises:
        UserError: in all processes; the message names the first process whose value differs.
    """
    if _handshake:
        _handshake.check_same(values, advice)


def all_agree(agrees: bool) -> bool:
    """Return whether all processes agree; all of them must call this."""
    return agrees if jax.process_count() == 1 else bool(np.all(multihost_utils.process_allgather(np.bool_(agrees))))


def open_exchange() -> Exchange:
    """Return a channel on which processes report to the main process and get its decision; all must call this."""
    global _exchanges  # noqa: PLW0603
    _exchanges += 1
    return Exchange(_store, *_rank_and_size, _exchanges)


def broadcast_int(number: int) -> int:
    """Return the main process's number in all processes: clocks and shared folders may look different in each."""
    return number if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def broadcast_arrays(tree: PyTree) -> PyTree:
    """Return the main process's arrays in all processes: the last bits of what each computes itself may differ."""
    return tree if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(tree)


def share_bytes(make: Callable[[], bytes]) -> bytes:
    """Call `make` in the main process, and return in all processes what it returned there.

    Raises:
        UserError: in all processes, if `make` raised a UserError or an OSError.
    """
    made: list[bytes] = []
    run_on_main_process(lambda: made.append(make()))
    if jax.process_count() == 1:
        return made[0]
    size = np.array([len(made[0]) if made else 0], np.int64).view(np.int32)  # JAX has no numbers of 64 bits
    length = int(np.asarray(multihost_utils.broadcast_one_to_all(size)).view(np.int64)[0])
    data = np.frombuffer(made[0], np.uint8) if made else np.zeros(length, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(data)).tobytes()


def run_on_main_process(work: Callable[[], object]) -> None:
    """Run `work` in the main process; all processes wait for it.

    Raises:
        UserError: in all processes, if `work` raised a UserError or an OSError.
    """
    message = ""
    if is_main_process():
        try:
            work()
        except UserError as error:
            message = str(error)
        except OSError as error:
            message = describe_os_error(error)
    if jax.process_count() > 1:
        encoded = np.frombuffer(message.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES), np.uint8)
        message = bytes(multihost_utils.broadcast_one_to_all(encoded)).decode(errors="replace").strip()
    if message:
        raise UserError(message)
