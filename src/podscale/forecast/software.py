"""Describe how the program of a published run differs from Podscale's, where the difference costs or saves time.

A forecast is made for Podscale's own program. Published runs were made by other programs on the same chips: they
prepare the images' layout on the hosts, share out the update, launch fewer kernels, or do not overlap sums with the
backward pass. Each of these is a fact about a program, with a source (`planner/published.toml`), not a number to fit.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Software:
    """A training program, as far as the forecast distinguishes programs.

    Args:
        kernels: that a step of ResNet-50 launches on a GPU; 0: as many as Podscale's.
        host_layout: hosts lay out the images as the first layer needs them; otherwise the device does.
        sums_in_place: the compiler sums every gradient where it lies; otherwise gradients are copied into buckets.
        shards_update: every device updates its own part of the weights, while sums stay those of the compiler.
        overlaps_sums: buckets of gradients travel during the backward pass, as far as the chip allows.
        peer_norms: the kernels of batch norm exchange their sums themselves, without a collective to start.
        start_s: seconds on the published clock before training runs at full speed.
        eval_s: seconds that each evaluation takes besides its forward passes.
    """

    kernels: int = 0
    host_layout: bool = False
    sums_in_place: bool = False
    shards_update: bool = False
    overlaps_sums: bool = True
    peer_norms: bool = False
    start_s: float = 0.0
    eval_s: float = 0.0


PODSCALE = Software()
