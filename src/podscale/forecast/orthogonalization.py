"""Predict the seconds that Muon's orthogonalization takes, and choose which devices share it.

Devices of a group share the matrices, so that each is computed once in every group. A larger group has less to compute
and more to gather: the choice is the group with the shortest sum of both. Nothing is measured at the start, so that a
resumed run makes the same choice.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from podscale.config.options import Options
from podscale.forecast import network
from podscale.forecast.chips import Chip, find_chip
from podscale.parallel.shared_matrices import Kind, assign_matrices, count_group_devices, count_temporary_elements
from podscale.parallel.strategies import find_summation
from podscale.pod import Pod

Group = Literal["device", "row", "slice", "pod"]

# Of a chip's peak rate, at which products of matrices of a few hundred rows are assumed to run. Not measured.
SHARE_OF_PEAK = 0.25
PRODUCTS = 3  # of matrices, in each Newton-Schulz iteration
LAUNCH_S = 4e-6  # of a kernel on a GPU, as measured for Muon's (docs/gpu.md)
ELEMENT_BYTES = 4
MATRICES_PER_DEVICE = (
    0.5  # at least, where nothing is known of the chips: results of idle devices would be sent as well
)


def choose_group(options: Options, pod: Pod, kinds: Mapping[str, Kind], steps: int) -> Options:
    """Return the options with `orthogonalize` decided.

    Args:
        options: the options of the run, with the summation decided.
        pod: the devices.
        kinds: the matrices, as `optim.muon_matrices.list_matrices` returns them; none: the optimizer needs none.
        steps: number of Newton-Schulz iterations.
    """
    if not kinds:
        return replace(options, orthogonalize="device")
    if find_summation(options.summation).norms is not None:
        return replace(options, orthogonalize="pod")
    if options.orthogonalize != "auto":
        return options
    groups: list[Group] = ["device", "row", "slice", "pod"]
    row = find_chip(pod.kind)
    if row is None:
        matrices = sum(kind.count for kind in kinds.values())
        fitting = [name for name in groups if count_group_devices(pod, name) * MATRICES_PER_DEVICE <= matrices]
        return replace(options, orthogonalize=max(fitting, key=lambda name: count_group_devices(pod, name)))
    seconds = {name: _predict_group_s(pod, row, kinds, steps, name) for name in groups}
    fastest: Group = min(groups, key=lambda name: seconds[name])
    return replace(options, orthogonalize=fastest)


def predict_orthogonalization_s(options: Options, pod: Pod, kinds: Mapping[str, Kind], steps: int) -> float:
    """Return the seconds of one update's orthogonalization, messages included, on a pod whose chips are known."""
    row = find_chip(pod.kind)
    if not kinds or row is None:
        return 0.0
    if find_summation(options.summation).norms is None:
        decided = choose_group(options, pod, kinds, steps).orthogonalize
        return _predict_group_s(pod, row, kinds, steps, "device" if decided == "auto" else decided)
    parts = assign_matrices(kinds, pod.size, parts=pod.size)
    size = ELEMENT_BYTES * parts.length * pod.size
    compute_s = _predict_compute_s(row, parts.cost, _count_most(kinds, pod.size), steps)
    return compute_s + 2 * network.predict_exchange_s(pod, size)


def count_update_bytes(options: Options, pod: Pod, kinds: Mapping[str, Kind]) -> int:
    """Return the bytes of what a device holds while it orthogonalizes its share, with `orthogonalize` decided."""
    if not kinds:
        return 0
    is_partitioned = find_summation(options.summation).norms is not None
    devices = count_group_devices(pod, options.orthogonalize)
    return ELEMENT_BYTES * count_temporary_elements(kinds, devices, is_partitioned=is_partitioned)


def _predict_group_s(pod: Pod, row: Chip, kinds: Mapping[str, Kind], steps: int, name: Group) -> float:
    """Return the seconds in which groups of this kind orthogonalize all matrices and gather the results."""
    devices = count_group_devices(pod, name)
    assignment = assign_matrices(kinds, devices)
    compute_s = _predict_compute_s(row, assignment.cost, _count_most(kinds, devices), steps)
    gathered = ELEMENT_BYTES * assignment.length * devices
    return compute_s + (network.predict_gather_s(pod, name, gathered) if devices > 1 else 0.0)


def _predict_compute_s(row: Chip, flops: float, matrices: int, steps: int) -> float:
    launch_s = 0.0 if row.is_torus else matrices * steps * PRODUCTS * LAUNCH_S
    return max(flops / (SHARE_OF_PEAK * row.flops / row.cores), launch_s)


def _count_most(kinds: Mapping[str, Kind], devices: int) -> int:
    """Return how many matrices a device has to compute, about."""
    return math.ceil(sum(kind.count for kind in kinds.values()) / devices)
