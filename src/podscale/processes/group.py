"""The process group: join and leave it, agree on values, and let the main process act for all.

The only module that touches JAX's private distributed client."""

import functools
import socket
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from podscale.errors import UserError
from podscale.processes import heartbeat, schedulers

# --- many processes ----------------------------------------------------------------------------------------------

MESSAGE_BYTES = 1000
_place = (0, 1)  # this process, and how many have joined; asking JAX would start its devices


def join(coordinator: str = "", processes: int = 0, process: int = -1, heartbeat_s: float = 60.0) -> None:
    """Joins the other processes of this run, if there are any; must come before anything that touches a device.

    The arguments name them; else a launcher does, if there is one. A process that is not heard of for `heartbeat_s`
    seconds counts as dead, and all end.
    """
    global _place  # noqa: PLW0603
    place = schedulers.by_hand(coordinator, processes, process) if coordinator else schedulers.found()
    if place is None:
        return
    if heartbeat_s < 1:
        raise UserError(f"pod.heartbeat_s must be 1 or more, not {heartbeat_s:g}")
    bind = place.bind_address()
    if bind:
        _listen_on_loopback()
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.process,
            schedulers.gpus_of(place.local, place.here, schedulers.visible_gpus()),
            cluster_detection_method="deactivate",
            coordinator_bind_address=bind,
            heartbeat_timeout_seconds=round(heartbeat_s),
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"{place.told()}, cannot join the others at {place.coordinator}: {_first_line(error)}"
        ) from None
    _place = (place.process, place.processes)
    store = key_value_store()
    if store is not None:
        heartbeat.watch(store, place.process, place.processes, heartbeat_s)


def key_value_store() -> Any:
    """Return JAX's store of keys and values, which all processes share; None where there is only one process."""
    from jax._src import distributed  # it has no public name

    state = distributed.global_state
    return state.client if state.client is not None and (state.num_processes or 1) > 1 else None


def _listen_on_loopback() -> None:
    """Has sums between CPUs listen on loopback alone, and not on whatever address the machine's name stands for."""
    from jax._src.lib import _jax  # nothing public sets it

    make = getattr(_jax, "make_gloo_tcp_collectives", None)
    if make:
        _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=schedulers.LOOPBACK)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def rank_and_size() -> tuple[int, int]:
    """Which process this is, and how many have joined."""
    return _place


def leave() -> None:
    """Parts from the other processes once all of them are here: whoever left alone would look dead to the rest."""
    if jax.process_count() > 1:
        heartbeat.part()
        jax.distributed.shutdown()


def is_main_process() -> bool:
    """Whether this is the process that writes files and talks to people: the first."""
    return bool(jax.process_index() == 0)


def count_local_processes() -> int:
    """How many of the joined processes run on this machine, and share its memory."""
    if jax.process_count() == 1:
        return 1
    name = np.uint32(zlib.crc32(socket.gethostname().encode()))
    return int(np.sum(multihost_utils.process_allgather(name) == name))


def all_agree(agrees: bool) -> bool:
    """Whether all processes agree; all of them must ask."""
    return agrees if jax.process_count() == 1 else bool(np.all(multihost_utils.process_allgather(np.bool_(agrees))))


def broadcast_int(number: int) -> int:
    """The first process's number, in all of them: what each sees of a clock or a shared folder may differ."""
    return number if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def broadcast_arrays(tree: Any) -> Any:
    """The first process's arrays, in all of them: the last bits of what each computes for itself may differ."""
    return tree if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(tree)


def run_on_main_process(work: Callable[[], object]) -> None:
    """Has the first process do `work`; what keeps it from that is a `UserError` in all of them, and nobody waits."""
    message = ""
    if is_main_process():
        try:
            work()
        except (UserError, OSError) as error:
            message = str(error)
    if jax.process_count() > 1:
        letter = np.frombuffer(message.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES), np.uint8)
        message = bytes(multihost_utils.broadcast_one_to_all(letter)).decode(errors="replace").strip()
    if message:
        raise UserError(message)
