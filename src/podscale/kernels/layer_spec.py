"""The static properties of a fused layer, known before its arrays are."""

from dataclasses import dataclass

# Who computes a fused layer; a plan's JSON holds these values.
REFERENCE = "plain"  # XLA compiles the reference implementation
HOPPER = "hopper"  # Pallas kernels for Hopper GPUs, where they fit
INTERPRET = "interpret"  # the same kernels, interpreted: slow, but on any machine


@dataclass(frozen=True)
class LayerSpec:
    """Static arguments of `fused.apply_layer`.

    Attributes:
        groups: batch-norm groups of this device's images.
        stride: of the convolution.
        padding: of the convolution, on every side.
        output_sums: whether to return sums of the output, for the batch norm after it.
        keep_input: whether the rectified input is used as well, for a shortcut, and so has a gradient.
        kernels: `REFERENCE`, `HOPPER` or `INTERPRET`.
    """

    groups: int = 1
    stride: int = 1
    padding: int = 0
    output_sums: bool = True
    keep_input: bool = False
    kernels: str = REFERENCE
