"""Model: seconds of a training step, and of the whole training, for a plan on a pod that need not be here.

A step is made of what follows one after the other: computing, the messages of batch norm, and that part of the
gradients' summation that does not hide behind the backward pass. Input is prepared meanwhile; where the hosts are
slower than the devices, these stand idle. Time is counted as published results count it: from the first batch on,
evaluations included, without start-up and compilation.
"""

import math
import os
from dataclasses import dataclass
from typing import Any

from podscale.forecast import network
from podscale.forecast.chips import Chip, chip
from podscale.forecast.compute import FORWARD, Work, best_rate, forward_s, step_s
from podscale.parallel import sharded
from podscale.parallel.summation import STRATEGIES
from podscale.plan import Plan

# Pictures a second that one core brings to 224 px: ImageNet's files as they are, or pixels in memory (docs/results.md).
DECODE_RATE, PIXELS_RATE = 1109.0, 9468.0
DECODED_SIDE = 224
IN_MEMORY = ("digits", "npz")
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Forecast:
    """A plan's predicted times; seconds of one step unless they say otherwise."""

    plan: Plan
    compute_s: float
    batch_norm_s: float
    summation_s: float  # that nothing hides
    input_s: float  # that the hosts need to prepare a step's pictures
    few_images_s: float  # of compute_s, lost because a device has few images
    summations: dict[str, float]  # seconds by strategy, hidden or not
    eval_s: float  # of one evaluation

    @property
    def device_s(self) -> float:
        return self.compute_s + self.batch_norm_s + self.summation_s

    @property
    def step_s(self) -> float:
        return max(self.device_s, self.input_s)

    @property
    def parts(self) -> dict[str, float]:
        """The step, part by part."""
        return {
            "compute": self.compute_s,
            "batch norm": self.batch_norm_s,
            "summation": self.summation_s,
            "idle": self.step_s - self.device_s,
        }

    @property
    def images_per_s(self) -> float:
        return self.plan.recipe.batch.size / self.step_s

    @property
    def epoch_s(self) -> float:
        return self.plan.steps_per_epoch * self.step_s

    @property
    def evals_s(self) -> float:
        return len(self.plan.eval_steps()) * self.eval_s

    @property
    def train_s(self) -> float:
        """The whole training with its evaluations."""
        return self.plan.steps * self.step_s + self.evals_s

    @property
    def chip_hours(self) -> float:
        return self.plan.pod.rows * self.plan.pod.cols * self.train_s / 3600

    @property
    def limit(self) -> str:
        """The largest part, in words."""
        part = max(self.parts, key=self.parts.__getitem__)
        if part == "compute" and self.few_images_s > self.compute_s / 3:
            return f"compute ({self.plan.micro_images} images a device)"
        return {"idle": "input"}.get(part, part)

    @property
    def host_images_per_s(self) -> float:
        """Pictures a second that each host must deliver."""
        return self.plan.recipe.batch.size / self.device_s / self.plan.pod.hosts

    @property
    def host_can(self) -> float:
        """Pictures a second that each host's cores can decode."""
        return self.host_images_per_s * self.device_s / self.input_s


def forecast(plan: Plan, work: Work) -> Forecast:
    """The plan's times, by the row of chips.toml for its pod."""
    row = chip(plan.pod.kind)
    compute_s = plan.micro_batches * step_s(row, work, plan.micro_images)
    ideal_s = plan.images_per_device / best_rate(row, work)
    sums = {name: _summation_s(plan, work, name) for name in (*STRATEGIES, sharded.NAME)}
    return Forecast(
        plan=plan,
        compute_s=compute_s,
        batch_norm_s=_batch_norm_s(plan, work),
        summation_s=_exposed_s(plan, row, work, sums[plan.summation], compute_s),
        input_s=_input_s(plan, row),
        few_images_s=max(compute_s - ideal_s, 0.0),
        summations=sums,
        eval_s=_eval_s(plan, row, work),
    )


def _summation_s(plan: Plan, work: Work, strategy: str) -> float:
    """Gradients in buckets, and the batch-norm moments beside them.

    `sharded` gathers weights as they are, whatever gradients travel as, and sums the norms of both.
    """
    size = float(work.parameters * BYTES[plan.payload])
    buckets, way = _buckets(plan, size), "torus" if strategy == sharded.NAME else strategy
    rest = network.summation_s(plan.pod, way, 2 * 4 * work.norm_channels) if work.norms else 0.0
    if strategy == sharded.NAME:
        rest += network.summation_s(plan.pod, way, 2 * 4 * work.layers)
        size = (size + work.parameters * BYTES["float32"]) / 2
    return buckets * network.summation_s(plan.pod, way, size / buckets) + rest


def _buckets(plan: Plan, size: float) -> int:
    return max(1, math.ceil(size / plan.bucket_bytes)) if plan.bucket_bytes else 1


def _exposed_s(plan: Plan, row: Chip, work: Work, summation_s: float, compute_s: float) -> float:
    """Of the summation, what the backward pass does not hide: the last bucket at least, which waits for its end."""
    buckets = _buckets(plan, work.parameters * BYTES[plan.payload])
    backward_s = (1 - FORWARD) * compute_s / plan.micro_batches  # only the last micro-batch's
    hidden_s = min(row.hides * summation_s, backward_s) * (1 - 1 / buckets)
    return summation_s - hidden_s


def _batch_norm_s(plan: Plan, work: Work) -> float:
    """One message a batch norm forward and one backward, in each micro-batch, where groups span devices."""
    if not plan.groups.axes or not work.norms:
        return 0.0
    one = network.group_s(plan.pod, plan.tile, 2 * 4 * work.norm_channels / work.norms)
    return 2 * work.norms * plan.micro_batches * one


def _input_s(plan: Plan, row: Chip) -> float:
    """Seconds that a host's cores need for a step's pictures."""
    data = plan.recipe.data
    pixels = data.image_size**2 / DECODED_SIDE**2
    # A smaller crop saves on the resize, not on most of the decoding.
    cost = pixels / PIXELS_RATE if data.source in IN_MEMORY else max(pixels, 0.25) / DECODE_RATE
    return plan.recipe.batch.size / plan.pod.hosts * cost / _host_cores(plan, row)


def _host_cores(plan: Plan, row: Chip) -> float:
    """This machine's, if the pod is here; else for the pod's share of a host: it may fill only a part of one."""
    if plan.pod.present:
        return float(os.cpu_count() or 1)
    chips = plan.pod.rows * plan.pod.cols
    return row.host_cores * min(1.0, chips / row.chips_per_host)


def _eval_s(plan: Plan, row: Chip, work: Work) -> float:
    calls = math.ceil(plan.counts.val / (plan.eval_images * plan.pod.size))
    return calls * forward_s(row, work, plan.eval_images)


# --- beside a run ----------------------------------------------------------------------------------------------------


def beside(found: Forecast, devices_s: float, waited_s: float) -> dict[str, Any]:
    """The predicted step beside a measured one: seconds that the devices worked, and that they waited for input.

    A run cannot tell computing from the messages between devices; what it can tell apart is compared.
    """
    predicted = {"devices": found.device_s, "input wait": found.step_s - found.device_s}
    measured = {"devices": devices_s, "input wait": waited_s}
    return {
        "predicted_s": found.step_s,
        "measured_s": devices_s + waited_s,
        "differs_most": max(measured, key=lambda part: abs(measured[part] - predicted[part])),
        "predicted_parts_s": predicted,
        "measured_parts_s": measured,
    }


# --- words ---------------------------------------------------------------------------------------------------------


def rows(found: Forecast) -> list[tuple[str, str]]:
    """The forecast as names and values, for people."""
    parts = ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in found.parts.items() if s > 0)
    others = ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in found.summations.items())
    enough = "enough" if found.host_can >= found.host_images_per_s else "too few"
    return [
        ("step", f"{found.step_s * 1e3:.1f} ms predicted: {parts}"),
        ("rate", f"{found.images_per_s:,.0f} images/s predicted, {_efficiency(found):.0%} of what the chips could do"),
        ("epoch", duration(found.epoch_s)),
        (
            "training",
            f"{duration(found.train_s)} with {len(found.plan.eval_steps())} evaluations, "
            f"{found.chip_hours:,.1f} chip-hours",
        ),
        ("limited by", found.limit),
        ("summations", others),
        (
            "host input",
            f"{found.host_images_per_s:,.0f} images/s a host needed, {found.host_can:,.0f} decoded by its "
            f"{_host_cores(found.plan, chip(found.plan.pod.kind)):.0f} cores: {enough}",
        ),
    ]


def to_dict(found: Forecast) -> dict[str, Any]:
    """The forecast as plain values, for programs."""
    return {
        "step_s": found.step_s,
        "parts_s": found.parts,
        "images_per_s": found.images_per_s,
        "efficiency": _efficiency(found),
        "epoch_s": found.epoch_s,
        "eval_s": found.eval_s,
        "train_s": found.train_s,
        "chip_hours": found.chip_hours,
        "limit": found.limit,
        "summations_s": found.summations,
        "host_images_per_s": {"needed": found.host_images_per_s, "possible": found.host_can},
    }


def _efficiency(found: Forecast) -> float:
    """Share of the time that the devices would need with all the images they could wish for and nobody to talk to."""
    return (found.compute_s - found.few_images_s) / found.step_s


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them.

    >>> duration(0.5), duration(200), duration(10_000)
    ('0.50 s', '3.33 min', '2.78 h')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds:.2f} s"
