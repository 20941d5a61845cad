"""Options of XLA's compiler for CPUs: what keeps sums right where jaxlib computes them wrongly."""

from functools import cache

import jax
import jaxlib
import numpy as np

FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
FIRST_WITH_SUMS = (0, 10, 2)  # jaxlib from which YNNPACK computes sums, with the values that are summed
WITHOUT_SUMS = "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION,LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"


def make_cpu_options() -> dict[str, str]:
    """Return the options that leave convolutions and matrix products to YNNPACK, but no sums.

    YNNPACK computes a sum together with the layers before it. In jaxlib 0.11.2 the result is memory that nothing has
    written if two of these operations have the same constant: the zero of two ReLUs in bfloat16, in the evaluation of
    every ResNet. The smallest program is `jnp.maximum(-jnp.maximum(x, 1), 1).sum(0)` for 64x64 numbers. In jaxlib
    0.10.2, sums of matrix products are wrong from 32,768 rows on (https://github.com/jax-ml/jax/issues/39103).
    """
    return {FUSIONS: WITHOUT_SUMS} if _read_version() >= FIRST_WITH_SUMS and _is_known() else {}


@cache
def _is_known() -> bool:
    """Return whether the compiler has the option; one that does not know an option refuses to compile."""
    device = jax.local_devices(backend="cpu")[0]
    argument = jax.ShapeDtypeStruct((), np.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x).lower(argument).compile({FUSIONS: WITHOUT_SUMS})
    except Exception:  # JAX raises one type of error for all that a compiler refuses
        return False
    return True


def _read_version() -> tuple[int, ...]:
    return tuple(int(part) for part in jaxlib.__version__.split(".")[:3] if part.isdecimal())
