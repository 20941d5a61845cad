"""Launch a training whose processes may come and go: `podscale launch --elastic MIN:MAX`.

This process does not train. It starts the others, detects a lost one at once, and lets the survivors continue
together as the next generation, without a restart. A replacement joins them at a step boundary. A process that cannot
leave a broken generation in time is killed and started again; if no process is left that holds the state, all resume
from the last checkpoint.
"""

import select
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from podscale.config.json_types import JsonObject
from podscale.errors import UserError
from podscale.processes import launch
from podscale.processes.elastic.compile_ahead import Precompiler, is_cache_enabled, list_sizes_ahead
from podscale.processes.elastic.coordinator import Coordinator, MissingPartError
from podscale.processes.elastic.members import Generation, Member, Record, Starter, choose_members, choose_size
from podscale.processes.elastic.membership import REGROUP, SAVE
from podscale.processes.exit_codes import FINAL_CODES, PREEMPTED
from podscale.processes.launch import ProcessExit, StopSignals, report

POLL_S = 0.02
SILENCE_S = 10.0  # without a sign of life, after which a process is killed,
STOPPED_S = 1.0  # or stopped by a signal,
QUIET_S = 0.5  # for which the system is asked once nothing was heard for so long
PAUSE_S = 1.0  # in which this process has not listened itself, after which no other one counts as silent
CLOSED_S = 3.0  # in which a process that has closed its connection must end
MAX_DELAY_S = 60.0  # before a process is started again in a slot whose processes end before they have trained
LEAVE_S = 30.0  # in which the survivors must have left a broken generation,
LATE_S, LATE_FACTOR = 3.0, 4.0  # or in this time, and so many times what the first took, once that waits with a state
REGROUP_S = 60.0  # the same, if none is lost: they have to finish a call first
MAX_FAILURES = 20  # lost processes without a new step between them, after which the launcher gives up
MAX_BREAKS = 5  # generations broken without a new step between them; one more, and all processes are started again


def parse_range(text: str, processes: int) -> tuple[int, int]:
    """Return the least and the greatest number of processes that train together.

    Raises:
        UserError: the text has another form, or does not fit the number of processes.

    >>> parse_range("2:4", 5)
    (2, 4)
    """
    least, colon, most = text.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise UserError(f"--elastic takes MIN:MAX, such as 2:4, not {text!r}")
    if processes < int(least):
        raise UserError(f"--elastic {text} needs at least {least} processes, but -n is {processes}")
    return int(least), int(most)


def launch_elastic(command: list[str], processes: int, limits: str, logs: str | None = None) -> int:
    """Run `podscale train` as processes that may come and go, and return the exit code.

    Args:
        command: the arguments of `podscale`.
        processes: how many to keep running; those above the greatest number stand by.
        limits: "MIN:MAX", how many train together.
        logs: folder for what the processes write to stderr; None: a temporary one.

    Raises:
        UserError: the numbers make no sense, the command is not `train`, or there are too few GPUs.
    """
    least, most = parse_range(limits, processes)
    if command[0] != "train":
        raise UserError(f"--elastic works only with train, not with {command[0]}")
    for argument in command:
        if argument.partition("=")[0] in ("--pod.virtual", "--pod.shape"):
            raise UserError(f"--elastic lays the pod out by the processes that are there; leave {argument} out")
    gpus = launch.assign_gpus(command, processes)
    with launch.open_log_folder(logs) as folder, StopSignals() as signals:
        # With GPUs, the processes that train hold all memory.
        precompiler = Precompiler(command, folder, is_enabled=is_cache_enabled() and not any(gpus))
        launcher = Launcher(Starter(command, gpus, folder), processes, (least, most), folder, signals, precompiler)
        try:
            return launcher.run()
        except MissingPartError as error:
            missing = str(error)
        finally:
            launcher.close()
    report(
        f"this version of JAX lacks {missing}, which --elastic needs; so if a process is lost, all are started again "
        f"and resume from the last checkpoint, as with --restarts {MAX_FAILURES}"
    )
    return launch.launch_processes(command, min(processes, most), MAX_FAILURES, logs)


class Launcher:
    """Keeps the processes of an elastic run up, and forms generations of them.

    Args:
        starter: starts them.
        processes: how many to keep running.
        limits: the least and the greatest number that train together.
        folder: for the record of what happens.
        signals: that ask this process to stop.
        precompiler: compiles for other sizes of the pod.
    """

    def __init__(
        self,
        starter: Starter,
        processes: int,
        limits: tuple[int, int],
        folder: Path,
        signals: StopSignals,
        precompiler: Precompiler,
    ) -> None:
        self._starter, self._processes, self._signals = starter, processes, signals
        self._least, self._most = limits
        self._record, self._coordinator = Record(folder / "elastic.jsonl"), Coordinator(**starter.spawn)
        self._precompiler, self._listened_at = precompiler, time.monotonic()
        self._members: list[Member] = []
        self._generation: Generation | None = None
        self._generations = self._failures = self._breaks = 0
        self._furthest = -1  # step that a generation has done
        self._sizes: list[int] = []  # numbers of processes that the batch divides over, once the first have said so
        self._ending: ProcessExit | None = None
        self._start_at, self._starts = dict[int, float](), Counter[int]()  # of slots whose processes did not train
        self._is_finishing = False  # a process has ended as it should, and the main one is about to

    def run(self) -> int:
        """Run the command to its end, and return its exit code."""
        while self._ending is None:
            if self._signals.is_urgent or (self._signals.received and not self._can_save()):
                report("stopped; the same command resumes from the last checkpoint, or starts again if there is none")
                return self._signals.code
            self._keep_up()
            self._read_messages()
            self._reap()
            self._advance()
            self._compile_ahead()
        ending = self._ending
        if ending.status == 0:
            self._await_others()
            return 0
        self._print_log_tail(ending.process)
        if self._signals.received and ending.code == PREEMPTED:
            return self._signals.code
        report(ending.describe())
        return ending.code

    def close(self) -> None:
        """End all processes that are left."""
        self._precompiler.close()
        for member in self._members:
            member.kill()
            member.process.wait()
            member.connection.close()
        self._coordinator.close()
        self._record.close()

    # --- processes ---

    def _keep_up(self) -> None:
        """Start processes in place of lost ones, and the coordinator if it is gone."""
        if not self._coordinator.is_alive:
            self._restart_all("the coordinator is gone")
            self._coordinator.close()
            self._coordinator = Coordinator(**self._starter.spawn)
        if self._is_finishing:
            return
        for slot in sorted(set(range(self._processes)) - {member.slot for member in self._members}):
            if time.monotonic() < self._start_at.get(slot, 0.0):
                continue
            member = self._starter.start(slot)
            self._members.append(member)
            self._record.write("start", process=slot, pid=member.process.pid)

    def _read_messages(self) -> None:
        connected = [member for member in self._members if not member.is_closed]
        readable, _, _ = select.select([member.connection for member in connected], [], [], POLL_S)
        for member in [member for member in connected if member.connection in readable]:
            messages = member.connection.receive()
            member.is_closed, member.last_sign = messages is None, time.monotonic()
            for message in messages or ():
                self._handle(member, message)
        self._kill_silent()

    def _kill_silent(self) -> None:
        """Kill processes that do not answer; what they have sent while this one did not listen has been read."""
        now = time.monotonic()
        was_paused, self._listened_at = now - self._listened_at > PAUSE_S, now
        for member in self._members:
            if was_paused:
                member.last_sign, member.stopped_at = member.last_sign and now, None
            silent_s = now - member.last_sign if member.last_sign is not None else 0.0
            may_be_stopped = silent_s > QUIET_S or member.last_sign is None
            is_stopped = may_be_stopped and not member.is_closed and member.is_stopped
            member.stopped_at = (member.stopped_at or now) if is_stopped else None
            if member.stopped_at is not None and now - member.stopped_at > STOPPED_S:
                self._kill(member, "stopped")
            elif silent_s > (CLOSED_S if member.is_closed else SILENCE_S):
                self._kill(member, "closed" if member.is_closed else "silent")

    def _kill(self, member: Member, reason: str) -> None:
        self._record.write("killed", process=member.slot, reason=reason)
        member.kill()
        member.last_sign = None

    def _handle(self, member: Member, message: JsonObject) -> None:
        kind, generation = message.pop("kind"), self._generation
        if kind == "ready":
            member.is_ready, member.snapshot, member.step = True, message["snapshot"], message["step"]
            member.last_ready = time.monotonic()
            if generation and message["is_connected"]:
                generation.is_held = True
            self._record.write("ready", process=member.slot, **message)
        elif kind == "sizes":
            self._sizes = message["sizes"]
        elif generation and message["generation"] == generation.number and member in generation.members:
            rank = generation.members.index(member)
            if kind == "beat":
                self._note_calls(generation, rank, message)
            elif kind == "parts" and rank == 0:
                self._record.write("parts", generation=generation.number, parts=message["parts"])
            elif kind == "barrier":
                generation.reach_barrier(rank, message["number"])
            elif kind == "passed" and generation.note_passed(rank, message["calls"]) and generation.stop == REGROUP:
                generation.deadline = time.monotonic() + REGROUP_S
            elif kind == "trouble":
                self._break(f"process {member.slot}: {message['reason']}")

    def _note_calls(self, generation: Generation, rank: int, message: JsonObject) -> None:
        generation.calls[rank] = message["calls"]
        if message["calls"] < 1:
            return
        if message["step"] > self._furthest:  # steps that are repeated may end in the same fault again
            self._furthest, self._failures, self._breaks = message["step"], 0, 0
        if not generation.is_training:
            generation.is_training = True
            self._precompiler.note_training(len(generation.members))
            self._record.write("training", generation=generation.number, step=message["step"])
            for member in generation.members:
                member.has_trained = True

    def _reap(self) -> None:
        """Handle processes that have ended."""
        for member in [member for member in self._members if member.process.poll() is not None]:
            self._members.remove(member)
            member.connection.close()
            generation, ending = self._generation, ProcessExit(member.slot, member.process.returncode)
            takes_part = generation is not None and member in generation.members
            is_main = takes_part and generation is not None and generation.members[0] is member
            self._record.write("end", process=member.slot, pid=member.process.pid, status=ending.status)
            is_done = ending.status == 0 or (bool(self._signals.received) and ending.code == PREEMPTED)
            self._is_finishing = is_done and not is_main
            if self._is_finishing:
                continue  # the main process is still writing
            is_final = is_done or ending.code in FINAL_CODES
            self._note_failure(member, takes_part=takes_part)
            if is_final or self._failures >= MAX_FAILURES:
                self._ending = ending
                return
            report(f"{ending.describe()}; a replacement is started{'' if takes_part else ' (it did not train)'}")
            if takes_part:
                self._break(ending.describe())

    def _note_failure(self, member: Member, *, takes_part: bool) -> None:
        """Count a lost process, unless it is one beside those that train; delay its replacement if it did not train."""
        if takes_part or not (self._generation and self._generation.is_training):
            self._failures += 1
        self._starts[member.slot] = 0 if member.has_trained else self._starts[member.slot] + 1
        delay_s = min(2.0 ** (self._starts[member.slot] - 2), MAX_DELAY_S) if self._starts[member.slot] > 1 else 0.0
        self._start_at[member.slot] = time.monotonic() + delay_s

    def _await_others(self) -> None:
        """Wait for the processes that trained with the main one, which has succeeded."""
        assert self._generation
        deadline = time.monotonic() + launch.SUCCESS_GRACE_S
        for member in self._generation.members:
            try:
                member.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def _restart_all(self, reason: str) -> None:
        """Kill all processes: recovery in place has failed, and others resume from the last checkpoint."""
        report(f"{reason}; all processes are started again and resume from the last checkpoint, if there is one")
        self._generation, self._breaks = None, 0
        for member in self._members:
            member.kill()
            member.process.wait()

    # --- generations ---

    def _advance(self) -> None:
        """End a generation that all have left, form the next one, or ask the one that trains to stop."""
        generation, now = self._generation, time.monotonic()
        if generation is None:
            self._form()
        elif generation.deadline is not None:
            late = [member for member in generation.members if member in self._members and not member.is_ready]
            for member in late if now > self._find_deadline(generation) else ():
                report(f"process {member.slot} does not leave its generation, and is started again")
                member.kill()
            if not late:
                if not generation.is_held:
                    self._coordinate("end", generation.number)
                self._generation = None
                self._form()
        elif min(generation.calls) >= 0 and not generation.stop:
            ready = sum(member.is_ready for member in self._members)
            size = choose_size(ready + len(generation.members), self._sizes, self._least, self._most)
            if self._signals.received:
                generation.request_stop(SAVE)
            elif generation.is_training and size is not None and size > len(generation.members):
                generation.request_stop(REGROUP)

    def _find_deadline(self, generation: Generation) -> float:
        """Return when a member that has not left its generation is killed: soon, if others wait with a newer state."""
        assert generation.deadline is not None
        left = [member for member in generation.members if member.is_ready and member.snapshot >= 0]
        if not generation.is_broken or not left:
            return generation.deadline
        broken_at = generation.deadline - LEAVE_S
        first_s = min(member.last_ready for member in left) - broken_at
        return min(generation.deadline, broken_at + max(LATE_S, LATE_FACTOR * first_s))

    def _form(self) -> None:
        """Form a generation of the processes that are ready."""
        ready = [member for member in self._members if member.is_ready]
        first = [min(self._processes, self._most)]  # until it is known what the batch divides over
        size = choose_size(len(ready), self._sizes or first, self._least, self._most)
        if size is None:
            return
        self._precompiler.give_way(size)
        members = choose_members(ready, size)
        address = self._coordinate("start", self._generations, size)
        if not address:
            return
        self._generation = Generation(self._generations, members)
        for rank, member in enumerate(members):
            place = {"generation": self._generations, "rank": rank, "size": size, "address": address}
            member.connection.send("assign", **place)
            member.is_ready = False
        slots, steps = [member.slot for member in members], [member.step for member in members]
        self._record.write(
            "generation", number=self._generations, slots=slots, snapshot=members[0].snapshot, step=max(steps)
        )
        self._generations += 1

    def _break(self, reason: str) -> None:
        """Let the survivors of the generation leave it."""
        generation = self._generation
        if generation is None:
            return
        if lost := generation.find_newly_lost():
            self._coordinate("stand_in", generation.number, lost)
        if generation.is_broken:
            return
        self._record.write("broken", generation=generation.number, reason=reason)
        self._breaks += 1
        generation.is_broken, generation.deadline = True, time.monotonic() + LEAVE_S
        generation.send("broken")
        if self._breaks > MAX_BREAKS:
            self._restart_all(f"{self._breaks} generations in a row have failed, the last one because {reason}")

    def _coordinate(self, command: str, *arguments: Any) -> str:
        """Send a command to the coordinator; if it is gone or hangs, it is started again with all processes."""
        try:
            return getattr(self._coordinator, command)(*arguments) or ""
        except OSError:
            return ""

    def _compile_ahead(self) -> None:
        """Let the programs of other sizes be compiled, while the run trains."""
        is_training = self._generation is not None and self._generation.is_training and not self._is_finishing
        sizes = list_sizes_ahead(self._processes, self._sizes, self._least, self._most) if is_training else []
        if result := self._precompiler.advance(sizes):
            self._record.write("compiled ahead", **result)

    # --- signals and output ---

    def _can_save(self) -> bool:
        """Return whether there is a state that is worth waiting for: a process holds one, or has done a call."""
        calls = self._generation.calls if self._generation else []
        return max(calls, default=-1) >= 0 or any(member.snapshot >= 0 for member in self._members)

    def _print_log_tail(self, slot: int) -> None:
        text = self._starter.get_log_path(slot).read_text(errors="replace")
        launch.print_lines(slot, text.splitlines()[-launch.SHOWN_LINES :])
