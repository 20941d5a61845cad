"""Compute a step's time budget: time, bytes and FLOPs of every kind of work, and its gap to the machine's ceilings.

A ceiling is the best measured rate of a single operation: bytes per second of a copy, FLOPs per second of a product of
two large matrices. No kind of work can be faster than both ceilings allow; the time beyond that is its gap.
"""

from dataclasses import dataclass

from podscale.bench.profile.program import Program
from podscale.bench.profile.trace import DeviceActivity
from podscale.config.json_types import JsonObject

OTHER = "not in the program"
HEADER = ("kind", "ms", "share", "GB", "GB/s", "TFLOP", "TFLOP/s", "at best, ms")


@dataclass(frozen=True)
class Ceilings:
    """The best rates of the machine."""

    bytes_per_s: float
    flops_per_s: float

    def compute_least_s(self, bytes_: float, flops: float) -> float:
        """Return the least seconds for work with so many bytes and FLOPs."""
        return max(bytes_ / self.bytes_per_s, flops / self.flops_per_s)


def compute_budget(program: Program, activity: DeviceActivity, steps: int, ceilings: Ceilings) -> JsonObject:
    """Return the budget of one of the profiled `steps`, the kinds of work with the most time first."""
    rows: dict[str, dict[str, float]] = {}
    for name, seconds in activity.seconds.items():
        instruction, times = program.instructions.get(name), activity.runs[name] / steps
        row = rows.setdefault(instruction.kind if instruction else OTHER, dict.fromkeys(("s", "bytes", "flops"), 0.0))
        row["s"] += seconds / steps
        if instruction:
            row["bytes"] += times * instruction.bytes
            row["flops"] += times * instruction.flops
    kinds = [
        {"kind": kind, **row, "least_s": ceilings.compute_least_s(row["bytes"], row["flops"])}
        for kind, row in sorted(rows.items(), key=lambda pair: -pair[1]["s"])
    ]
    totals = {"idle_s": activity.idle_s / steps, "whole_s": activity.whole_s / steps}
    return {"kinds": kinds} | totals | _find_gap(kinds, activity, steps)


def _find_gap(kinds: list[JsonObject], activity: DeviceActivity, steps: int) -> JsonObject:
    gaps = {row["kind"]: row["s"] - row["least_s"] for row in kinds} | {"idle": activity.idle_s / steps}
    worst = max(gaps, key=lambda kind: gaps[kind])
    return {
        "gap": worst,
        "gap_s": gaps[worst],
        "verdict": f"the largest gap is {worst}: {1e3 * gaps[worst]:.2f} ms per step beyond what the machine allows",
    }


def format_verdict(budget: JsonObject) -> str:
    """Return the ceilings and the largest gap to them as a sentence."""
    copy, product = budget["copy_bytes_per_s"] / 1e9, budget["matrix_flops_per_s"] / 1e12
    return f"measured ceilings: {copy:.3g} GB/s copied, {product:.3g} TFLOP/s multiplied; {budget['verdict']}"


def format_rows(budget: JsonObject) -> list[list[str]]:
    """Return the rows of the table."""
    whole = budget["whole_s"]
    lines = []
    for row in budget["kinds"]:
        seconds = row["s"] or float("inf")
        numbers = [
            f"{1e3 * row['s']:.2f}",
            f"{row['s'] / whole:.1%}",
            f"{row['bytes'] / 1e9:.3g}",
            f"{row['bytes'] / 1e9 / seconds:.3g}",
            f"{row['flops'] / 1e12:.3g}",
            f"{row['flops'] / 1e12 / seconds:.3g}",
            f"{1e3 * row['least_s']:.2f}",
        ]
        lines.append([row["kind"], *numbers])
    lines.append(["idle", f"{1e3 * budget['idle_s']:.2f}", f"{budget['idle_s'] / whole:.1%}", *["-"] * 5])
    return lines
