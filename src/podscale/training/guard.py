"""Guard a training: detect what can go wrong between two calls of the compiled step."""

from contextlib import ExitStack
from typing import Self

from podscale.processes import group
from podscale.processes.elastic.membership import REGROUP, GenerationEndedError, get_membership
from podscale.processes.stragglers import StragglerCheck
from podscale.processes.watchdog import Watchdog
from podscale.runs.startup import clock as start_clock
from podscale.training.replicas import ReplicaCheck
from podscale.training.session import OpenRun
from podscale.training.step import Metrics, State


class Guard:
    """Watches for a stuck run, slow processes, replicas that differ and non-finite updates; a context manager."""

    def __init__(self, run: OpenRun) -> None:
        self._run, options = run, run.program.plan.options
        self._watchdog = Watchdog(options.timeout_s, run.events.run.folder)
        self._stragglers, self._replicas = StragglerCheck(), ReplicaCheck(run.program.mesh, options.check_steps)
        self._exits, self._member, self._calls = ExitStack(), get_membership(), 0

    def __enter__(self) -> Self:
        monitor = self._exits.enter_context(group.open_monitor())
        self._exits.enter_context(monitor.watch(self._watchdog))
        self._exits.enter_context(monitor.watch(self._stragglers))
        return self

    def __exit__(self, *error: object) -> None:
        self._exits.__exit__(*error)  # type: ignore[arg-type]

    def watch(self, call: range, part: str) -> None:
        """Record progress: the run is at this part of this call."""
        self._watchdog.record_progress(call.start, part)

    def check(self, call: range, state: State, metrics: Metrics, *, saving: bool) -> None:
        """Check the state after a call; before it is saved, wait for the call and make sure that it may be saved.

        Raises:
            ReplicaMismatchError: devices no longer hold the same state.
            DivergenceError: too many consecutive updates were non-finite.
            GenerationEndedError: other processes want to join, and this one has to join the next generation with them.
        """
        events = self._run.events
        self._stragglers.record_call(events.ledger.seconds["input wait"], metrics)
        self._run.checkpoints.record_completed()
        events.report_stragglers(call.stop, self._stragglers.pop_new())
        if saving:
            with events.phase("train"):
                events.report_pending_call()
        with events.phase("check"):
            self._replicas.check(call.stop, state, now=saving)
        self._run.nonfinite.check(state)
        if self._member:
            self._keep(call, state)
        if saving:
            self.watch(call, "train, evaluate, save")

    def _keep(self, call: range, state: State) -> None:
        """Keep a state to go on from if a process is lost, and stop for processes that want to join."""
        assert self._member
        self._member.step = call.start
        if self._calls == 1:  # the first call is done
            ledger = self._run.events.ledger
            phases = {phase: s for phase, s in ledger.get_phases().items() if phase != "start"}
            self._member.report_parts(start_clock.get_parts() | phases)
        is_last = self._member.find_stop(self._calls) == REGROUP
        self._calls += 1
        snapshots, events = self._run.snapshots, self._run.events
        if is_last or snapshots.is_due(call):
            with events.phase("train"):
                events.report_pending_call()  # the journal of a run that goes on from here has this call
            with events.phase("snapshot"):
                snapshots.take(call.stop, self._run.program, state)
        if is_last:
            raise GenerationEndedError("other processes join")
