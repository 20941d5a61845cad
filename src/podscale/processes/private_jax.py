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
