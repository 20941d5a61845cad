"""Go on when processes of an elastic run are lost or join: the state in host memory, and the next generation.

Every few steps each process copies the whole state to its own memory. When the generation that it trains in ends, it
leaves it, joins the next one with the processes that are there, and goes on from the newest copy that one of them
holds. The samples, crops and batch-norm groups of a step do not depend on the pod, so the training stays the same up to
rounding.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

from podscale import plan as plans
from podscale.config.options import Options
from podscale.errors import PreemptedError, UserError
from podscale.parallel.placement import replicate
from podscale.plan import Plan
from podscale.pod import Pod, shape_cluster
from podscale.processes import group, heartbeat
from podscale.processes.elastic.membership import GenerationEndedError, get_membership
from podscale.runs.startup import clock as start_clock
from podscale.training.program import Program
from podscale.training.step import State

T = TypeVar("T")
MAX_AGE = 5  # steps that are repeated at most, if a call of the compiled program has no more
MAX_PROCESSES = 64  # more are not launched on one machine
CAUSE_S = 2.0  # for which an error waits for the launcher to say that a process is lost


class Snapshots:
    """The newest state that this process holds in its memory, as checkpoints store it."""

    def __init__(self) -> None:
        self.step = -1
        self._state: State | None = None

    def clear(self) -> None:
        """Drop the state: the run rolls back to a checkpoint."""
        self.step, self._state = -1, None

    def is_due(self, call: range) -> bool:
        """Return whether to take a copy after a call, so that none is ever older than a few steps."""
        return self.step < 0 or call.stop - self.step + len(call) > MAX_AGE

    def take(self, step: int, program: Program, state: State) -> None:
        """Copy the state after a step to the host; all processes call this.

        Args:
            step: the updates done.
            program: what computes the state.
            state: after the step.
        """
        whole = program.to_checkpoint(state)
        self._state, self.step = jax.tree.map(lambda leaf: np.array(leaf.addressable_data(0)), whole), step

    def find_step(self) -> int:
        """Return the step of the main process's state, which is the newest; -1: none. All processes call this."""
        return group.broadcast_int(self.step)

    def restore(self, program: Program) -> tuple[State, int]:
        """Return the main process's state on the devices, and its step; all processes call this."""
        step = self.find_step()

        def share(like: State) -> State:
            state = self._state
            if not group.all_agree(self.step == step):  # a process has just joined, or has an older one
                state = group.broadcast_arrays(
                    state if self.step == step else jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), like)
                )
                self._state, self.step = jax.tree.map(np.array, state), step
            placed: State = replicate(self._state, program.mesh)
            return placed

        return program.restore_state(share), step


def run_generations(train: Callable[[], T], snapshots: Snapshots) -> T:
    """Return what `train` returns, called again in the next generation whenever one ends; once if it is not elastic."""
    while True:
        try:
            return train()
        except Exception as error:
            if not _has_lost_peers(error):
                raise
        # Outside of the block: the error's frames hold arrays and programs of the generation that ends.
        start_clock.restart()
        group.leave_generation()
        start_clock.mark("leave")
        group.join_generation(snapshots.step)
        start_clock.mark("join")


def _has_lost_peers(error: Exception) -> bool:
    """Return whether an error may be the consequence of a lost process, or means that others join."""
    member = get_membership()
    if member is None or isinstance(error, PreemptedError):
        return False
    if isinstance(error, GenerationEndedError):
        return True
    if not member.is_broken and heartbeat.is_collective_failure(error):
        member.report_trouble(str(error).partition("\n")[0])
        return True
    return member.is_broken or (not isinstance(error, UserError) and member.await_break(CAUSE_S))


def report_sizes(plan: Plan, options: Options) -> None:
    """Report to the launcher of an elastic run which numbers of processes can train it."""
    if member := get_membership():
        member.report_sizes([size for size in range(1, MAX_PROCESSES + 1) if _fits(plan, options, size)])


def _fits(plan: Plan, options: Options, size: int) -> bool:
    """Return whether the recipe fits this number of processes, each with as many devices as now."""
    now = plan.pod
    rows, cols = shape_cluster(now.rows * now.cols // now.hosts * size, size)
    pod = Pod(now.kind, rows, cols, now.cores, size, memory_bytes=now.memory_bytes)
    try:
        plans.make_plan(plan.recipe, pod, plan.counts, options)
    except UserError:
        return False
    return True
