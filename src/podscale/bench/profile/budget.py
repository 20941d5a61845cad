"""Sheet: the budget of a step. For every kind of work its time, bytes and FLOPs, and what the machine's ceilings leave.

A ceiling is what the machine did when asked for nothing else: bytes a second of a copy, FLOPs a second of a product of
two large matrices. No kind of work can be faster than the slower of the two allows; what it takes beyond is its gap.
"""

from dataclasses import dataclass
from typing import Any

from podscale.bench.profile.program import Program
from podscale.bench.profile.trace import Seen

OTHER = "not in the program"
HEAD = ["kind", "ms", "share", "GB", "GB/s", "TFLOP", "TFLOP/s", "at best, ms"]


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do at most."""

    bytes_per_s: float
    flops_per_s: float

    def least_s(self, bytes_: float, flops: float) -> float:
        """No work with so many bytes and FLOPs takes less."""
        return max(bytes_ / self.bytes_per_s, flops / self.flops_per_s)


def of(program: Program, seen: Seen, steps: int, ceilings: Ceilings) -> dict[str, Any]:
    """The budget of one of the `steps` that were seen, kinds with the most time first."""
    found: dict[str, dict[str, float]] = {}
    for name, seconds in seen.seconds.items():
        instruction, times = program.instructions.get(name), seen.runs[name] / steps
        row = found.setdefault(instruction.kind if instruction else OTHER, dict.fromkeys(("s", "bytes", "flops"), 0.0))
        row["s"] += seconds / steps
        if instruction:
            row["bytes"] += times * instruction.bytes
            row["flops"] += times * instruction.flops
    kinds = [
        {"kind": kind, **row, "least_s": ceilings.least_s(row["bytes"], row["flops"])}
        for kind, row in sorted(found.items(), key=lambda pair: -pair[1]["s"])
    ]
    return {"kinds": kinds, "idle_s": seen.idle_s / steps, "whole_s": seen.whole_s / steps} | _gap(kinds, seen, steps)


def _gap(kinds: list[dict[str, Any]], seen: Seen, steps: int) -> dict[str, Any]:
    gaps = {row["kind"]: row["s"] - row["least_s"] for row in kinds} | {"idle": seen.idle_s / steps}
    worst = max(gaps, key=lambda kind: gaps[kind])
    return {
        "gap": worst,
        "gap_s": gaps[worst],
        "verdict": f"the largest gap is {worst}: {1e3 * gaps[worst]:.2f} ms a step beyond what the machine allows",
    }


def told(found: dict[str, Any]) -> str:
    """The ceilings, and the largest gap to them."""
    copy, product = found["copy_bytes_per_s"] / 1e9, found["matrix_flops_per_s"] / 1e12
    return f"measured ceilings: {copy:.3g} GB/s copied, {product:.3g} TFLOP/s multiplied; {found['verdict']}"


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The table's lines."""
    whole = found["whole_s"]
    lines = []
    for row in found["kinds"]:
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
    lines.append(["idle", f"{1e3 * found['idle_s']:.2f}", f"{found['idle_s'] / whole:.1%}", *["-"] * 5])
    return lines
