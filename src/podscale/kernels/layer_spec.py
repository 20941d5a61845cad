"""The static properties of a fused layer, known before its arrays are, and the shapes of these."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from jaxtyping import Array, Float

Images: TypeAlias = Float[Array, "images height width channels"]
Kernel: TypeAlias = Float[Array, "side side channels outputs"]
Vector: TypeAlias = Float[Array, "groups channels"]  # what belongs to a channel, for each batch-norm group
Sums: TypeAlias = tuple[Vector, ...]  # over each batch-norm group, of several terms
SumAndSquareSum: TypeAlias = tuple[Vector, Vector]  # of values and of their squares; apart, or XLA joins gradients
FactorAndOffset: TypeAlias = tuple[Vector, Vector]  # of each channel
Affine: TypeAlias = FactorAndOffset | tuple[()]  # empty: neither


@dataclass(frozen=True)
class Kernels:
    """Who computes layers, or parts of them; the plan chooses.

    Attributes:
        name: what a plan's JSON says.
        are_pallas: whether Pallas kernels for Hopper GPUs compute what they can; else XLA compiles the reference.
        are_interpreted: whether Pallas kernels run in its interpreter: slow, but on any machine.
        fuse_layers: whether networks are computed as fused layers; else kernels compute parts of the modules' layers.
    """

    name: str
    are_pallas: bool = False
    are_interpreted: bool = False
    fuse_layers: bool = True


REFERENCE = Kernels("plain")
HOPPER = Kernels("hopper", are_pallas=True)
INTERPRET = Kernels("interpret", are_pallas=True, are_interpreted=True)
CUDNN = Kernels("cudnn")  # attention as one kernel of cuDNN's
TRITON = Kernels(
    "triton", are_pallas=True
)  # the same, and a transformer's layer norm and GELU by Pallas, through Triton
BATCH_NORM = Kernels("batch_norm", are_pallas=True, fuse_layers=False)  # the sums of modules' batch norms


class OutputGradient(NamedTuple):
    """The gradient by a convolution's output z, as factor · values + offset + slope · z.

    Offset and slope are None where no sums of z were used.
    """

    values: Images
    factor: Vector
    offset: Vector | None
    slope: Vector | None


class Residuals(NamedTuple):
    """What the backward pass of a layer needs of its forward pass.

    Attributes:
        x: the raw input.
        y: the rectified input.
        shortcut: the raw shortcut; None if it was none.
        z: the convolution's output.
    """

    x: Images
    y: Images
    shortcut: Images | None
    z: Float[Array, "images out_height out_width outputs"]


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
