"""The static properties of a fused layer, known before its arrays are."""

from dataclasses import dataclass
from typing import NamedTuple

import jax


@dataclass(frozen=True)
class Kernels:
    """Who computes the layers of a fused network; the plan chooses.

    Attributes:
        name: what a plan's JSON says.
        are_pallas: whether Pallas kernels for Hopper GPUs compute what they can; else XLA compiles the reference.
        are_interpreted: whether Pallas kernels run in its interpreter: slow, but on any machine.
    """

    name: str
    are_pallas: bool = False
    are_interpreted: bool = False


REFERENCE = Kernels("plain")
HOPPER = Kernels("hopper", are_pallas=True)
INTERPRET = Kernels("interpret", are_pallas=True, are_interpreted=True)
CUDNN = Kernels("cudnn")  # attention as one kernel of cuDNN's


class OutputGradient(NamedTuple):
    """The gradient by a convolution's output z, as factor · values + offset + slope · z.

    Factor, offset and slope are [groups, channels] each; offset and slope are None where no sums of z were used.
    """

    values: jax.Array
    factor: jax.Array
    offset: jax.Array | None
    slope: jax.Array | None


@dataclass(frozen=True)
class LayerSpec:
    """Static arguments of `fused.apply_layer`.

    Attributes:
        groups: batch-norm groups of this device's images.
        stride: of the convolution.
        padding: of the convolution, on every side.
        output_sums: whether to return sums of the output, for the batch norm after it.
        keep_input: whether the rectified input is used as well, for a shortcut, and so has a gradient.
        kernels: who computes the layer.
    """

    groups: int = 1
    stride: int = 1
    padding: int = 0
    output_sums: bool = True
    keep_input: bool = False
    kernels: Kernels = REFERENCE
