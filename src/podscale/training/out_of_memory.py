"""Turn JAX's out-of-memory errors into one sentence for the user."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from podscale.errors import UserError

# What XLA says of a device's memory. A kernel's own memory and a disk run out under the same name, and are not meant.
OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED: .*([Oo]ut of memory(?! in memory space [sv]mem)|allocating device buffer)", re.S
)


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """What JAX raises where a device's memory is full becomes a sentence."""
    try:
        yield
    except RuntimeError as error:  # jax.errors.JaxRuntimeError is one; this module does without JAX
        words = str(error)
        if not OUT_OF_MEMORY.match(words):
            raise
        wanted = re.search(r"allocat\w+ ([\d.]+ ?\w+)", words)
        raise UserError(
            f"a device's memory is full{f' ({wanted[1]} more were wanted)' if wanted else ''}: with a higher "
            "--plan.micro_batches training needs less and learns the same; other programs may be on the device, too"
        ) from error
