"""Compile: the training step of a plan through the real compiler, for a pod that is not here.

The step that `podscale train` would run is lowered and compiled for described devices. What comes back is the
compiler's own word: bytes of memory, operations, and the collectives of the optimized program.
"""

import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from podscale.errors import UserError
from podscale.models import registry
from podscale.models.functional import functional
from podscale.optim import schedules
from podscale.parallel import sharded
from podscale.plan import Plan
from podscale.planner import described_devices
from podscale.training import step as steps


@dataclass(frozen=True)
class Collective:
    """Sums or exchanges of one kind in the optimized program, all of one size and over groups of one size."""

    kind: str
    count: int
    bytes: int
    group: int  # devices that each one goes over
    asynchronous: bool


@dataclass(frozen=True)
class Report:
    """What the compiler says about one call of the training program."""

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
        """Arguments are donated: results take no memory of their own."""
        return self.argument_bytes + self.temporary_bytes + self.code_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.limit_bytes


def compiled(plan: Plan) -> Report:
    """Compiles the plan's training call for its whole pod; a pod that is refused is the user's to change."""
    began = time.perf_counter()
    here = replace(plan, pod=described_devices.pod(plan.pod))
    program = _compiled(here)
    memory, cost = program.memory_analysis(), program.cost_analysis() or {}
    return Report(
        seconds=time.perf_counter() - began,
        argument_bytes=int(memory.argument_size_in_bytes),
        temporary_bytes=int(memory.temp_size_in_bytes),
        code_bytes=int(memory.generated_code_size_in_bytes),
        limit_bytes=plan.pod.memory_bytes,
        flops=float(cost.get("flops", 0.0)),
        accessed_bytes=float(cost.get("bytes accessed", 0.0)),
        collectives=collectives(program.as_text(), plan.pod.size),
    )


# --- the program ---------------------------------------------------------------------------------------------------


def _compiled(plan: Plan) -> Any:
    options = steps.compiler_options(plan) | described_devices.compiler_options(plan.pod)
    lowered = _lowered(plan)
    try:
        return lowered.compile(options or None)
    except jax.errors.JaxRuntimeError as error:
        words = described_devices.first_line(error)
        raise UserError(f"the compiler refuses this plan for {plan.pod.kind}:{plan.pod.shape}: {words}") from None


def _lowered(plan: Plan) -> Any:
    """The training call of the plan, from shapes alone."""
    recipe = plan.recipe
    net, params, stats = functional(
        nnx.eval_shape(lambda: registry.build(recipe.model, plan.counts.classes, recipe.data.image_size)),
        recipe.model.freeze,
    )
    schedule = schedules.make_schedule(recipe, plan.steps, plan.steps_per_epoch)
    optimizer = steps.learner(net, plan, schedule)
    mesh = plan.pod.mesh(plan.tile)
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = jax.eval_shape(lambda p, s: steps.initial_state(recipe, p, s, optimizer), params, stats)
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), state)
    if plan.summation == sharded.NAME:
        cutter = sharded.Cutter(mesh, optimizer, params)
        state = state._replace(optimizer=cutter.like_parts(state.optimizer))
    batch = steps.call_arguments(plan, mesh)
    return steps.train_call(net, plan, optimizer, schedule, mesh).lower(state, *batch)


# --- reading the program -------------------------------------------------------------------------------------------

_KINDS = "all-reduce|reduce-scatter|all-gather|collective-permute|all-to-all"
_LINE = re.compile(rf"= (\(.*?\)|\S+) ({_KINDS})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[sufbc]\w*?\d+)\[([\d,]*)\]")


def collectives(text: str, devices: int) -> tuple[Collective, ...]:
    """The collectives of an optimized program, alike ones counted together, largest first.

    >>> text = "  %a = f32[2,64]{1,0} all-reduce(%b), replica_groups={{0,1},{2,3}}, to_apply=%add"
    >>> collectives(text, 4)
    (Collective(kind='all-reduce', count=1, bytes=512, group=2, asynchronous=False),)
    """
    found: Counter[tuple[str, int, int, bool]] = Counter()
    for line in text.splitlines():
        match = _LINE.search(line)
        if match:
            result, kind, start = match.groups()
            found[kind, _bytes(result, bool(start)), _group(line, devices), bool(start)] += 1
    rows = [Collective(kind, count, size, group, start) for (kind, size, group, start), count in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes * row.count))


def _bytes(result: str, start: bool) -> int:
    """Bytes of a result's arrays; a start returns its operands too, where it returns more than one array."""
    sizes = [
        int(np.prod([int(n) for n in shape.split(",") if n], initial=1)) * _width(kind)
        for kind, shape in _ARRAY.findall(result)
    ]
    return sum(sizes) // (2 if start and len(sizes) > 1 else 1)


def _width(kind: str) -> int:
    return max(1, int(re.sub(r"\D", "", kind)[-2:] or 8) // 8) if kind != "pred" else 1


def _group(line: str, devices: int) -> int:
    """Devices in a group: listed one by one, or as [groups,size]<=[...]; no list means all of them."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    return int(iota[2]) if iota else devices


# --- words ---------------------------------------------------------------------------------------------------------


def rows(report: Report) -> list[tuple[str, str]]:
    """The compiler's word as names and values, for people."""
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
    if report.flops:  # the CUDA compiler does not say
        accessed = f"{report.accessed_bytes / 1e9:,.1f} GB accessed"
        lines.append(("program", f"{report.flops / 1e9:,.0f} GFLOP and {accessed} a device and update"))
    return lines + [("", words) for words in _kinds(report.collectives)]


def _kinds(found: tuple[Collective, ...]) -> list[str]:
    """The collectives in words: those over the same groups together."""
    kinds: dict[tuple[str, int, bool], list[Collective]] = {}
    for one in found:
        kinds.setdefault((one.kind, one.group, one.asynchronous), []).append(one)
    lines = []
    for (kind, group, asynchronous), rows in kinds.items():
        sizes = sorted(row.bytes / 1024 for row in rows)
        size = f"{sizes[0]:,.1f} to {sizes[-1]:,.1f} KiB" if len(sizes) > 1 else f"{sizes[0]:,.1f} KiB"
        how = "asynchronous" if asynchronous else "synchronous"
        lines.append(f"{sum(row.count for row in rows)} x {kind} of {size} over groups of {group:,}, {how}")
    return lines
