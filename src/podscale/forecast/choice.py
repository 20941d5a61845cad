"""Choice: how gradients are summed where the user leaves it open, and in buckets of what size.

On TPU the compiler's own all-reduce is the two-dimensional algorithm, with all links at work: nothing else is tried. Of
other chips that are known, the closed forms of `network` say which strategy is fastest. Between processes on several
machines, messages are timed first (`probe`). On one machine without known links there is nothing to choose: XLA's.
"""

import math
import os
import socket
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from podscale.config.options import Options
from podscale.forecast import chips, network, probe
from podscale.parallel.summation import STRATEGIES
from podscale.plan import BUCKET_MIB
from podscale.pod import Pod
from podscale.processes.group import all_agree, broadcast_int

WORTH = 0.9  # another strategy than XLA's is taken if it should need at most this share of the time
BUCKETS_MIB = (0, 8, 16, 32, 64, 128)
BYTES = {"float32": 4, "bfloat16": 2}


class Choice(NamedTuple):
    """Options with nothing about summation left open; seconds that each strategy should take, and how that is known."""

    options: Options
    predicted: dict[str, float]
    known_by: str


def settled(options: Options, pod: Pod, parameters: int) -> Choice:
    """The choice for so many parameters on this pod; all processes must ask, and get the same answer."""
    seconds, known_by = _model(pod) if options.summation == "auto" else (None, "")
    if seconds is None:
        return Choice(_with(options, "xla" if options.summation == "auto" else options.summation), {}, "")
    size = parameters * BYTES[options.payload]
    hides = row.hides if (row := chips.known(pod.kind)) else 0.0
    mib = options.bucket_mib if options.bucket_mib >= 0 else _bucket_mib(seconds, size, hides, pod)
    count = _count(size, mib)
    predicted = {name: count * seconds(name, size / count) for name in STRATEGIES}
    return Choice(_with(options, _fastest(predicted, pod), mib), predicted, known_by)


def _with(options: Options, summation: Any, bucket_mib: int | None = None) -> Options:
    return replace(options, summation=summation, bucket_mib=options.bucket_mib if bucket_mib is None else bucket_mib)


def _model(pod: Pod) -> tuple[Callable[[str, float], float] | None, str]:
    row = chips.known(pod.kind)
    if pod.rows * pod.cols == 1:
        return None, ""
    if pod.present and pod.hosts > 1 and not (row and row.torus) and not _one_machine():
        return probe.measured(pod).summation_s, "measured links"
    if row:
        return lambda name, size: network.summation_s(pod, name, size), f"the links of {row.kind}"
    return None, ""


def _one_machine() -> bool:
    """Whether all processes have the same name and network, so that there are no links between them."""
    network_of = (
        os.readlink("/proc/self/ns/net") if os.path.islink("/proc/self/ns/net") else ""
    )  # containers and namespaces have their own
    own = zlib.crc32(f"{socket.gethostname()} {network_of}".encode()) >> 1
    return all_agree(broadcast_int(own) == own)


def _fastest(predicted: dict[str, float], pod: Pod) -> str:
    row = chips.known(pod.kind)
    best = min(predicted, key=predicted.__getitem__)
    return "xla" if (row and row.torus) or predicted[best] > WORTH * predicted["xla"] else best


def _bucket_mib(seconds: Callable[[str, float], float], size: float, hides: float, pod: Pod) -> int:
    """The bucket size that leaves least to wait for after the backward pass; the usual one where it makes no odds.

    Sums that nothing hides are best done at once. Of others, all but the last can hide as far as the chip allows it.
    """
    row = chips.known(pod.kind)
    if row and not hides:
        return BUCKET_MIB

    def exposed(mib: int) -> float:
        count = _count(size, mib)
        total = count * min(seconds(name, size / count) for name in STRATEGIES)
        return total * (1 - hides * (1 - 1 / count))

    return min(BUCKETS_MIB, key=exposed)


def _count(size: float, mib: int) -> int:
    return max(1, math.ceil(size / (mib << 20))) if mib else 1


# --- a run that goes on --------------------------------------------------------------------------------------------


def as_before(options: Options, pod: Pod, plan: dict[str, Any] | None) -> Options:
    """What was chosen when the run began on the same pod: another choice would round otherwise.

    `plan` is what the run's folder says; where only the first process can read it, the others hear from it.
    """
    names = list(STRATEGIES)
    same = plan is not None and options.summation == "auto" and _same_pod(plan, pod)
    number = names.index(plan["summation"]) if plan and same and plan["summation"] in names else -1
    number, mib = broadcast_int(number), broadcast_int((plan["bucket_bytes"] if plan and same else 0) >> 20)
    if number < 0 or options.summation != "auto":
        return options
    return _with(options, names[number], mib if options.bucket_mib < 0 else None)


def _same_pod(plan: dict[str, Any], pod: Pod) -> bool:
    here = {"kind": pod.kind, "rows": pod.rows, "cols": pod.cols, "cores": pod.cores, "hosts": pod.hosts}
    return here.items() <= plan["pod"].items()


# --- words ---------------------------------------------------------------------------------------------------------


def told(choice: Choice) -> list[tuple[str, str]]:
    """A row for the plan: the strategies by their predicted times."""
    if not choice.predicted:
        return []
    times = sorted(choice.predicted.items(), key=lambda item: item[1])
    return [("by " + choice.known_by, ", ".join(f"{name} {s * 1e3:.3g} ms" for name, s in times))]
