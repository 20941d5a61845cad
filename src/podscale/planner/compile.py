"""Compile the training step of a plan with the real compiler, for a pod that is not available.

The step that `podscale train` would run is lowered and compiled for described devices. The report contains what the
compiler says: bytes of memory, operations, and the collectives of the optimized program.
"""

import re
import time
from collections import Counter
from dataclasses import dataclass, replace

import jax
import numpy as np

from podscale.errors import UserError
from podscale.plan import Plan
from podscale.planner import topologies
from podscale.training import step as steps
from podscale.training.compilation import make_train_call
from podscale.training.setup import describe_program
from podscale.training.update_rule import describe_scalars


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind, size and group size in the optimized program."""

    kind: str
    count: int
    bytes: int
    group: int  # devices that take part in each
    asynchronous: bool


@dataclass(frozen=True)
class CompilerReport:
    """What the compiler reports about one call of the training program."""

    seconds: float
    argument_bytes: int
    temporary_bytes: int
    code_bytes: int
    limit_bytes: int
    flops: float
    accessed_bytes: float
    collectives: tuple[Collective, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes in all; results need no extra memory, since arguments are donated."""
        return self.argument_bytes + self.temporary_bytes + self.code_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.limit_bytes


def compile_plan(plan: Plan) -> CompilerReport:
    """Compile the plan's training call for its whole pod.

    Raises:
        UserError: the compiler refuses the pod or the plan.
    """
    start = time.perf_counter()
    program = compile_program(plan)
    memory, cost, text = program.memory_analysis(), program.cost_analysis() or {}, program.as_text()
    if memory is None or text is None:
        raise UserError(f"the compiler for {plan.pod.kind} does not say what a program needs")
    return CompilerReport(
        seconds=time.perf_counter() - start,
        argument_bytes=int(memory.argument_size_in_bytes),
        temporary_bytes=int(memory.temp_size_in_bytes),
        code_bytes=int(memory.generated_code_size_in_bytes),
        limit_bytes=plan.pod.memory_bytes,
        flops=float(cost.get("flops", 0.0)),
        accessed_bytes=float(cost.get("bytes accessed", 0.0)),
        collectives=read_collectives(text, plan.pod.size),
    )


# --- the program ---------------------------------------------------------------------------------------------------


def compile_program(plan: Plan) -> jax.stages.Compiled:
    """Return the plan's training call, compiled for its pod, which need not be present.

    Raises:
        UserError: the compiler refuses the pod or the plan.
    """
    plan = replace(plan, pod=topologies.describe_pod(plan.pod))
    options = steps.make_compiler_options(plan) | topologies.get_compiler_options(plan.pod)
    lowered = _lower_program(plan)
    try:
        return lowered.compile(options or None)
    except jax.errors.JaxRuntimeError as error:
        reason = topologies.shorten_reason(error)
        raise UserError(f"the compiler refuses this plan for {plan.pod.kind}:{plan.pod.shape}: {reason}") from None


def _lower_program(plan: Plan) -> jax.stages.Lowered:
    """Lower the plan's training call from shapes alone."""
    program = describe_program(plan)
    batch = steps.describe_call_arguments(plan, program.mesh)
    return make_train_call(program).lower(program.describe_state(), *batch, describe_scalars(plan, program.mesh))


# --- reading the program -------------------------------------------------------------------------------------------

_KINDS = "all-reduce|reduce-scatter|all-gather|collective-permute|all-to-all"
_LINE = re.compile(rf"= (\(.*?\)|\S+) ({_KINDS})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[sufbc]\w*?\d+)\[([\d,]*)\]")


def read_collectives(text: str, devices: int) -> tuple[Collective, ...]:
    """Return the collectives of an optimized program, equal ones counted together, most bytes first.

    >>> text = "  %a = f32[2,64]{1,0} all-reduce(%b), replica_groups={{0,1},{2,3}}, to_apply=%add"
    >>> read_collectives(text, 4)
    (Collective(kind='all-reduce', count=1, bytes=512, group=2, asynchronous=False),)
    """
    counts: Counter[tuple[str, int, int, bool]] = Counter()
    for line in text.splitlines():
        match = _LINE.search(line)
        if match:
            result, kind, start = match.groups()
            counts[kind, _count_bytes(result, bool(start)), _read_group_size(line, devices), bool(start)] += 1
    rows = [Collective(kind, count, size, group, start) for (kind, size, group, start), count in counts.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes * row.count))


def _count_bytes(result: str, start: bool) -> int:
    """Return the bytes of a result's arrays; a `-start` with several arrays returns its operands too."""
    sizes = [
        int(np.prod([int(n) for n in shape.split(",") if n], initial=1)) * _get_element_bytes(kind)
        for kind, shape in _ARRAY.findall(result)
    ]
    return sum(sizes) // (2 if start and len(sizes) > 1 else 1)


def _get_element_bytes(kind: str) -> int:
    return max(1, int(re.sub(r"\D", "", kind)[-2:] or 8) // 8) if kind != "pred" else 1


def _read_group_size(line: str, devices: int) -> int:
    """Return the devices in a group: given one by one, or as [groups,size]<=[...]; without either, all devices."""
    explicit = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if explicit:
        return len(explicit[1].split(","))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    return int(iota[2]) if iota else devices


# --- text ----------------------------------------------------------------------------------------------------------


def format_rows(report: CompilerReport) -> list[tuple[str, str]]:
    """Return the compiler's report as rows of a table: names and values."""
    mib = 2**20
    fits = "fits" if report.fits else "does not fit"
    lines = [
        (
            "compiled",
            f"in {report.seconds:.0f} s: {report.argument_bytes / mib:,.0f} MiB of arguments, "
            f"{report.temporary_bytes / mib:,.0f} of temporaries, {report.code_bytes / mib:,.0f} of code; "
            f"{fits} the {report.limit_bytes / mib:,.0f} MiB of a device",
        ),
    ]
    if report.flops:  # the CUDA compiler reports none
        accessed = f"{report.accessed_bytes / 1e9:,.1f} GB accessed"
        lines.append(("program", f"{report.flops / 1e9:,.0f} GFLOP and {accessed} per device and update"))
    return lines + [("", text) for text in _describe_collectives(report.collectives)]


def _describe_collectives(collectives: tuple[Collective, ...]) -> list[str]:
    """Return a line of text for all collectives of one kind over groups of one size."""
    kinds: dict[tuple[str, int, bool], list[Collective]] = {}
    for collective in collectives:
        kinds.setdefault((collective.kind, collective.group, collective.asynchronous), []).append(collective)
    lines = []
    for (kind, group, asynchronous), rows in kinds.items():
        sizes = sorted(row.bytes / 1024 for row in rows)
        size = f"{sizes[0]:,.1f} to {sizes[-1]:,.1f} KiB" if len(sizes) > 1 else f"{sizes[0]:,.1f} KiB"
        how = "asynchronous" if asynchronous else "synchronous"
        lines.append(f"{sum(row.count for row in rows)} x {kind} of {size} over groups of {group:,}, {how}")
    return lines
