"""Choose the gradient summation and its bucket size where the user leaves them open ("auto").

On TPU the compiler's own all-reduce is the two-dimensional algorithm and uses all links, so nothing else is tried. For
other chips in chips.toml, the closed forms of `network` say which strategy is fastest. Between processes on several
machines, messages are timed first (`probe`). On one machine without known links there is nothing to choose: XLA's sum.
"""

import math
import os
import socket
import zlib
from dataclasses import replace
from typing import NamedTuple

from podscale.config.json_types import JsonObject
from podscale.config.options import Options, TileSummation, set_summation
from podscale.errors import UserError
from podscale.forecast import chips, network, probe
from podscale.parallel.strategies import STRATEGIES, find_summation, format_by_size, list_replicated
from podscale.parallel.summation import PAYLOADS, Links, Load
from podscale.plan import BUCKET_MIB
from podscale.pod import Pod
from podscale.processes.group import all_agree, broadcast_int, share_bytes

MAX_TIME_RATIO = 0.9  # a strategy replaces XLA's sum if it is predicted to need at most this share of its time
MAX_MEASURED_RATIO = 0.98  # the same, where messages were timed
MAX_EXTRAPOLATED_RATIO = 0.95  # the same, for sums larger than any that was timed
SIZES = tuple(2 ** (i / 2) for i in range(12, 60))  # bytes of sums to choose for: 64 B to 750 MB
NORM_BYTES = 4096  # of a batch norm's message: the sums of 512 channels and of their squares
BUCKETS_MIB = (0, 8, 16, 32, 64, 128)


class Choice(NamedTuple):
    """Options with the summation decided, the predicted seconds of each strategy, and what the prediction is based on.

    `predicted` and `source` are empty where nothing was predicted.
    """

    options: Options
    predicted: dict[str, float]
    source: str


def choose_summation(options: Options, pod: Pod, parameters: int) -> Choice:
    """Choose summation and bucket size for a number of parameters on a pod.

    It may time messages between the processes: all of them must call it, and all get the same choice.
    """
    links, source = _select_links(pod) if options.summation == "auto" else (None, "")
    if links is None:
        name = "xla" if options.summation == "auto" else options.summation
        return Choice(set_summation(options, name, options.bucket_mib), {}, "")
    size = parameters * PAYLOADS[options.payload]
    mib = options.bucket_mib if options.bucket_mib >= 0 else _choose_bucket_mib(links, size, pod)
    predicted = _predict_all(links, size, mib)
    by_size = choose_by_size(links, pod, largest=min(size, mib << 20) if mib else size)
    options = replace(set_summation(options, by_size, mib), tile_summation=_choose_tile_summation(options, links, pod))
    return Choice(options, predicted, source)


def choose_by_size(links: Links, pod: Pod, largest: float = SIZES[-1]) -> str:
    """Return the fastest strategy for sums of any size up to the largest, as `plan.summation` has it.

    Gradients travel in buckets, and a few small arrays beside them: each sum gets the strategy for its own bytes.
    """
    row = chips.find_chip(pod.kind)
    if row and row.is_torus:
        return "xla"

    def pick(size: float) -> str:
        ratio = MAX_MEASURED_RATIO if size <= probe.SUM_BYTES[-1] else MAX_EXTRAPOLATED_RATIO
        ratio = ratio if isinstance(links, probe.Probe) else MAX_TIME_RATIO
        return _pick_fastest({name: _time_sum(links, name, size) for name in list_replicated()}, ratio)

    sizes = [size for size in SIZES if size < largest] + [largest]
    names = [pick(size) for size in sizes]
    parts = [
        (math.sqrt(size * larger), name)  # they change between two sizes
        for name, following, size, larger in zip(names, names[1:], sizes, sizes[1:], strict=False)
        if name != following
    ]
    return format_by_size([*parts, (math.inf, names[-1])])


def _choose_tile_summation(options: Options, links: Links, pod: Pod) -> TileSummation:
    """Return how batch norm sums over tiles: by exchanges between CPUs, if along a row they were timed as faster."""
    if options.tile_summation != "auto" or pod.kind != "cpu" or not isinstance(links, probe.Probe):
        return options.tile_summation
    return "swing_latency" if links.compare_line(NORM_BYTES) < MAX_TIME_RATIO else "xla"


def _time_sum(links: Links, name: str, size: float) -> float:
    return STRATEGIES[name].predict_s(links, Load(size))


def _predict_all(links: Links, size: float, mib: int) -> dict[str, float]:
    """Return the seconds to sum `size` bytes of gradients, by the strategies that suit every optimizer."""
    load = Load(size, buckets=_count_buckets(size, mib))
    return {name: STRATEGIES[name].predict_s(links, load) for name in list_replicated()}


def _select_links(pod: Pod) -> tuple[Links | None, str]:
    """Return the time model of the pod's links, and its source; None and "" where nothing is known."""
    row = chips.find_chip(pod.kind)
    if pod.rows * pod.cols == 1:
        return None, ""
    if pod.is_present and pod.hosts > 1 and not (row and row.is_torus) and not _is_one_machine():
        return probe.measure_links(pod), "measured links"
    if row:
        return network.PodLinks(pod), f"the links of {row.kind}"
    return None, ""


def _is_one_machine() -> bool:
    """Return whether all processes share a host name and a network namespace: then no links lie between them."""
    namespace = (
        os.readlink("/proc/self/ns/net") if os.path.islink("/proc/self/ns/net") else ""
    )  # containers and network namespaces have their own
    machine = zlib.crc32(f"{socket.gethostname()} {namespace}".encode()) >> 1
    return all_agree(broadcast_int(machine) == machine)


def _pick_fastest(predicted: dict[str, float], ratio: float) -> str:
    best = min(predicted, key=predicted.__getitem__)
    return "xla" if predicted[best] > ratio * predicted["xla"] else best


def _choose_bucket_mib(links: Links, size: float, pod: Pod) -> int:
    """Return the bucket size that leaves the shortest wait after the backward pass; the default if none overlaps.

    A sum that cannot overlap with the backward pass is fastest as one bucket. Otherwise all buckets but the last
    overlap, by the share that the chip allows (`hides`).
    """
    row = chips.find_chip(pod.kind)
    hides = row.hides if row else 0.0
    if row and not hides:
        return BUCKET_MIB

    def predict_exposed_s(mib: int) -> float:
        total = min(_predict_all(links, size, mib).values())
        return total * (1 - hides * (1 - 1 / _count_buckets(size, mib)))

    return min(BUCKETS_MIB, key=predict_exposed_s)


def _count_buckets(size: float, mib: int) -> int:
    return max(1, math.ceil(size / (mib << 20))) if mib else 1


# --- resumed runs --------------------------------------------------------------------------------------------------


def reuse_choice(options: Options, pod: Pod, plan: JsonObject | None) -> Options:
    """Return the options with the choice of the run's first session, if that was on the same pod.

    Another strategy would round differently and change the resumed training.

    Args:
        options: the options of this session; only "auto" is replaced.
        pod: the pod of this session.
        plan: plan.json of the run's folder; None if there is none. Only the main process need be able to read it:
            the others receive the choice from it.
    """
    same = plan is not None and options.summation == "auto" and _is_same_pod(plan, pod)
    text = share_bytes(lambda: plan["summation"].encode() if plan and same else b"").decode()
    mib = broadcast_int((plan["bucket_bytes"] if plan and same else 0) >> 20)
    if not _is_for_every_optimizer(text) or options.summation != "auto":
        return options
    options = set_summation(options, text, mib if options.bucket_mib < 0 else options.bucket_mib)
    by_exchanges = broadcast_int(bool(plan and plan.get("tile_summation") == "swing_latency"))
    return replace(options, tile_summation="swing_latency") if by_exchanges else options


def _is_for_every_optimizer(text: str) -> bool:
    """Return whether a run's summation can be used again; a program may no longer register its own."""
    try:
        return find_summation(text).norms is None
    except UserError:
        return False


def _is_same_pod(plan: JsonObject, pod: Pod) -> bool:
    here = {"kind": pod.kind, "rows": pod.rows, "cols": pod.cols, "cores": pod.cores, "hosts": pod.hosts}
    return here.items() <= plan["pod"].items() and plan["pod"].get("slices", 1) == pod.slices


# --- text ----------------------------------------------------------------------------------------------------------


def format_rows(choice: Choice) -> list[tuple[str, str]]:
    """Return a row for the plan's table: the strategies, fastest first, with their predicted times."""
    if not choice.predicted:
        return []
    times = sorted(choice.predicted.items(), key=lambda item: item[1])
    return [("by " + choice.source, ", ".join(f"{name} {s * 1e3:.3g} ms" for name, s in times))]
