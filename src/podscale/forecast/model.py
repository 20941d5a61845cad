"""Predict the seconds of a training step and of the whole training, for a plan on a pod that need not be available.

A step is a sequence: computing, the messages of batch norm, and the part of the gradient summation that does not
overlap with the backward pass. Hosts prepare the input meanwhile; where they are slower than the devices, the devices
are idle. Time is counted as published results count it: from the first batch on, evaluations included, without start-up
and compilation.
"""

import math
import os
from dataclasses import dataclass

from podscale.config.json_types import JsonObject
from podscale.forecast import network
from podscale.forecast.chips import Chip, get_chip
from podscale.forecast.compute import (
    FORWARD,
    Work,
    predict_best_rate,
    predict_forward_s,
    predict_images_s,
    predict_update_s,
)
from podscale.forecast.orthogonalization import predict_orthogonalization_s
from podscale.forecast.software import PODSCALE, Software
from podscale.parallel.strategies import STRATEGIES
from podscale.parallel.summation import PAYLOADS, Load, Summation
from podscale.plan import Plan
from podscale.recipe import list_size_shares

# Images a second that one core resizes to 224 px: from ImageNet's files, or from pixels in memory (docs/results.md).
DECODE_RATE, PIXELS_RATE = 1109.0, 9468.0
REFERENCE_SIZE = 224
IN_MEMORY = ("digits", "npz")


@dataclass(frozen=True)
class Forecast:
    """The predicted times of a plan; seconds of one step unless stated otherwise."""

    plan: Plan
    compute_s: float
    batch_norm_s: float
    summation_s: float  # the part that does not overlap with the backward pass
    orthogonalization_s: float  # of Muon's matrices, messages included
    input_s: float  # that the hosts need to prepare a step's images
    few_images_s: float  # the part of compute_s that is lost because a device has few images
    summations: dict[str, float]  # seconds by strategy, overlapped or not
    eval_s: float  # of one evaluation
    start_s: float = 0.0  # before the training runs at full speed; of the whole training
    update_s: float = (
        0.0  # the part of compute_s in which each device updates parameters; 0 where it is not known apart
    )

    @property
    def device_s(self) -> float:
        return self.compute_s + self.batch_norm_s + self.summation_s + self.orthogonalization_s

    @property
    def step_s(self) -> float:
        return max(self.device_s, self.input_s)

    @property
    def parts(self) -> dict[str, float]:
        """The step's seconds by part."""
        return {
            "compute": self.compute_s,
            "batch norm": self.batch_norm_s,
            "summation": self.summation_s,
            "orthogonalization": self.orthogonalization_s,
            "idle": self.step_s - self.device_s,
        }

    @property
    def divided_update_saves_s(self) -> dict[str, float]:
        """Seconds that each strategy with less of the update on a device saves in a step whose sums hide behind
        nothing; below 0: it costs.
        """
        devices = self.plan.pod.size
        share = _compute_update_share(self.plan.summation, devices)
        shares = {name: _compute_update_share(strategy, devices) for name, strategy in STRATEGIES.items()}
        return {
            name: self.update_s * (1 - other / share) + self.summation_s - self.summations[name]
            for name, other in shares.items()
            if other < share
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
        """The whole training, evaluations included."""
        return self.start_s + self.plan.steps * self.step_s + self.evals_s

    @property
    def chip_hours(self) -> float:
        return self.plan.pod.rows * self.plan.pod.cols * self.train_s / 3600

    @property
    def limit(self) -> str:
        """The name of the largest part."""
        part = max(self.parts, key=self.parts.__getitem__)
        if part == "compute" and self.few_images_s > self.compute_s / 3:
            return f"compute ({self.plan.micro_images} images per device)"
        return {"idle": "input"}.get(part, part)

    @property
    def host_images_per_s(self) -> float:
        """Images per second that each host must deliver."""
        return self.plan.recipe.batch.size / self.device_s / self.plan.pod.hosts

    @property
    def host_capacity(self) -> float:
        """Images per second that each host's cores can decode."""
        return self.host_images_per_s * self.device_s / self.input_s


def make_forecast(plan: Plan, work: Work, software: Software = PODSCALE) -> Forecast:
    """Predict the times of a plan from the figures in chips.toml for its pod.

    Args:
        plan: a recipe on a pod.
        work: what the recipe's model demands, from `compute.count_work`.
        software: the program that trains.

    Raises:
        UserError: chips.toml does not describe the pod's kind of chip.
    """
    row = get_chip(plan.pod.kind)
    images_s = plan.micro_batches * predict_images_s(row, work, plan.micro_images, software)
    devices = plan.pod.size
    share = 1 / devices if software.shards_update else _compute_update_share(plan.summation, devices)
    compute_s = images_s + predict_update_s(row, work, software, share)
    ideal_s = plan.images_per_device / predict_best_rate(row, work)
    load, links = _make_load(plan, work, software), network.PodLinks(plan.pod)
    sums = {name: strategy.predict_s(links, load) for name, strategy in STRATEGIES.items()}
    hides = row.hides if software.overlaps_sums else 0.0
    return Forecast(
        plan=plan,
        compute_s=compute_s,
        batch_norm_s=_predict_batch_norm_s(plan, work, software),
        summation_s=_predict_exposed_s(plan, hides, load, plan.summation.predict_s(links, load), images_s),
        orthogonalization_s=predict_orthogonalization_s(
            plan.options, plan.pod, work.matrices, plan.recipe.optimizer.newton_schulz
        ),
        input_s=_predict_input_s(plan, row),
        few_images_s=max(compute_s - ideal_s, 0.0),
        summations=sums,
        eval_s=_predict_eval_s(plan, row, work, software),
        start_s=software.start_s,
        update_s=predict_update_s(row, work, software, share) - predict_update_s(row, work, software, 0.0),
    )


def _compute_update_share(strategy: Summation, devices: int) -> float:
    """Return the share of the parameters that each device updates."""
    return strategy.count_state_bytes(devices, devices) / devices


def _make_load(plan: Plan, work: Work, software: Software) -> Load:
    """Return what an update sends: gradients, in buckets, and the batch-norm moments.

    Where the compiler's sum is cut in two to shard the update, its second half carries unrounded parameters.
    """
    gradients = float(work.parameters * PAYLOADS[plan.options.payload])
    if software.shards_update:
        gradients = (gradients + work.parameters * PAYLOADS["float32"]) / 2
    bucket_bytes = plan.transfer.bucket_bytes
    return Load(
        gradients=gradients,
        parameters=float(work.parameters * PAYLOADS["float32"]),
        buckets=max(1, math.ceil(gradients / bucket_bytes)) if bucket_bytes else 1,
        moments=2 * 4 * work.norm_channels if work.norms else 0.0,
        arrays=work.layers,
    )


def _predict_exposed_s(plan: Plan, hides: float, load: Load, summation_s: float, images_s: float) -> float:
    """Return the part of the summation that does not overlap with the backward pass: at least the last bucket."""
    backward_s = (1 - FORWARD) * images_s / plan.micro_batches  # only the last micro-batch's
    hidden_s = min(hides * summation_s, backward_s) * (1 - 1 / load.buckets)
    return summation_s - hidden_s


def _predict_batch_norm_s(plan: Plan, work: Work, software: Software) -> float:
    """Return the seconds of batch norm's messages, where groups span devices.

    Each batch norm sends one message forward and one backward in each micro-batch.
    """
    if not plan.groups.axes or not work.norms:
        return 0.0
    message_s = network.predict_group_s(plan.pod, plan.tile, 2 * 4 * work.norm_channels / work.norms)
    message_s -= get_chip(plan.pod.kind).start_s if software.peer_norms else 0.0
    return 2 * work.norms * plan.micro_batches * message_s


def _predict_input_s(plan: Plan, row: Chip) -> float:
    """Return the seconds that a host's cores need to prepare a step's images."""
    data = plan.recipe.data
    pixels = sum(share * size**2 for size, share in list_size_shares(plan.recipe)) / REFERENCE_SIZE**2
    # A smaller crop makes the resize cheaper, but not most of the decoding.
    cost = pixels / PIXELS_RATE if data.source in IN_MEMORY else max(pixels, 0.25) / DECODE_RATE
    return plan.recipe.batch.size / plan.pod.hosts * cost / _count_host_cores(plan, row)


def _count_host_cores(plan: Plan, row: Chip) -> float:
    """Return this machine's cores for a pod that is present, else those of the part of a host that the pod fills."""
    if plan.pod.is_present:
        return float(os.cpu_count() or 1)
    chips = plan.pod.rows * plan.pod.cols
    return row.host_cores * min(1.0, chips / row.chips_per_host)


def _predict_eval_s(plan: Plan, row: Chip, work: Work, software: Software) -> float:
    calls = math.ceil(plan.counts.val / (plan.eval_images * plan.pod.size))
    return software.eval_s + calls * predict_forward_s(row, work, plan.eval_images, software)


# --- comparison with a run -------------------------------------------------------------------------------------------


def compare_step(forecast: Forecast, devices_s: float, waited_s: float) -> JsonObject:
    """Compare the predicted step with a measured one.

    A run cannot separate computing from the messages between devices, so only the parts it can measure are compared.

    Args:
        forecast: the prediction for the run's plan.
        devices_s: measured seconds per step in which the devices worked.
        waited_s: measured seconds per step in which they waited for input.

    Returns:
        The step's predicted and measured seconds, in all and by part, and the part that differs most.
    """
    predicted = {"devices": forecast.device_s, "input wait": forecast.step_s - forecast.device_s}
    measured = {"devices": devices_s, "input wait": waited_s}
    return {
        "predicted_s": forecast.step_s,
        "measured_s": devices_s + waited_s,
        "differs_most": max(measured, key=lambda part: abs(measured[part] - predicted[part])),
        "predicted_parts_s": predicted,
        "measured_parts_s": measured,
    }


# --- text ----------------------------------------------------------------------------------------------------------


def format_rows(forecast: Forecast) -> list[tuple[str, str]]:
    """Return the forecast as rows of a table: names and values."""
    parts = ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in forecast.parts.items() if s > 0)
    others = ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in forecast.summations.items())
    enough = "enough" if forecast.host_capacity >= forecast.host_images_per_s else "too few"
    return [
        ("step", f"{forecast.step_s * 1e3:.1f} ms predicted: {parts}"),
        (
            "rate",
            f"{forecast.images_per_s:,.0f} images/s predicted, "
            f"{_compute_efficiency(forecast):.0%} of what the chips could do",
        ),
        ("epoch", format_duration(forecast.epoch_s)),
        (
            "training",
            f"{format_duration(forecast.train_s)} with {len(forecast.plan.eval_steps())} evaluations, "
            f"{forecast.chip_hours:,.1f} chip-hours",
        ),
        ("limited by", forecast.limit),
        ("summations", others),
        *_format_update(forecast),
        (
            "host input",
            f"{forecast.host_images_per_s:,.0f} images/s per host needed, {forecast.host_capacity:,.0f} decoded by its "
            f"{_count_host_cores(forecast.plan, get_chip(forecast.plan.pod.kind)):.0f} cores: {enough}",
        ),
    ]


def _format_update(forecast: Forecast) -> list[tuple[str, str]]:
    """Return a row on what each device spends on the update, where that is known and could be divided."""
    effects = [
        f"plan.summation {name} {'saves' if saved_s > 0 else 'costs'} {abs(saved_s) * 1e3:.2f} ms a step"
        for name, saved_s in forecast.divided_update_saves_s.items()
    ]
    if not forecast.update_s or not effects:
        return []
    return [("update", f"{forecast.update_s * 1e3:.2f} ms on every device; {', '.join(effects)}")]


def to_dict(forecast: Forecast) -> JsonObject:
    """Return the forecast as a dictionary of plain values, for JSON."""
    return {
        "step_s": forecast.step_s,
        "parts_s": forecast.parts,
        "images_per_s": forecast.images_per_s,
        "efficiency": _compute_efficiency(forecast),
        "epoch_s": forecast.epoch_s,
        "eval_s": forecast.eval_s,
        "train_s": forecast.train_s,
        "chip_hours": forecast.chip_hours,
        "limit": forecast.limit,
        "summations_s": forecast.summations,
        "update_s": forecast.update_s,
        "host_images_per_s": {"needed": forecast.host_images_per_s, "possible": forecast.host_capacity},
    }


def _compute_efficiency(forecast: Forecast) -> float:
    """Return the share of a step that its images would take without communication and with many images per device."""
    return (forecast.compute_s - forecast.few_images_s) / forecast.step_s


def format_duration(seconds: float) -> str:
    """Format seconds in a suitable unit.

    >>> format_duration(0.5), format_duration(200), format_duration(10_000)
    ('0.50 s', '3.33 min', '2.78 h')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds:.2f} s"
