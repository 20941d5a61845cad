"""What is fixed about a layer before its numbers are known."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A layer of `fused.layer`."""

    groups: int = 1  # batch-norm groups of this device's images
    stride: int = 1
    padding: int = 0
    counts: bool = True  # whether sums of the output are wanted, for the batch norm after it
    keeps: bool = False  # whether the rectified input is wanted too, for a shortcut
    kernels: str = "plain"  # or "hopper", or "interpret": the same kernels, slowly, on any machine
