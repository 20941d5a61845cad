"""Explain JAX's out-of-memory errors to the user in one sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from podscale.errors import UserError

# XLA's messages about a full device memory. A kernel's own memory and a disk run out under the same status code, and
# are not meant.
OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED: .*([Oo]ut of memory(?! in memory space [sv]mem)|allocating device buffer)", re.S
)


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Turn JAX's out-of-memory errors inside the block into a `UserError`."""
    try:
        yield
    except RuntimeError as error:  # jax.errors.JaxRuntimeError is one; this module does not import JAX
        message = str(error)
        if not OUT_OF_MEMORY.match(message):
            raise
        request = re.search(r"allocat\w+ ([\d.]+ ?\w+)", message)
        raise UserError(
            f"a device is out of memory{f' ({request[1]} more requested)' if request else ''}: a higher "
            "--plan.micro_batches needs less and gives the same training; check that no other program uses the device"
        ) from error
