"""Do the first steps of a training with so many processes, for the programs that they leave in the user's cache.

    python -m podscale.processes.elastic.compile_ahead_worker SIZE FOLDER train digits ...

The processes train, leave their generation, go on in the next one from their snapshots, and save: all that a recovery
does. `Precompiler` starts this, and ends it with its whole process group.
"""

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

from podscale.processes.elastic.compile_ahead import Precompiler
from podscale.processes.elastic.launcher import MAX_FAILURES, Launcher
from podscale.processes.elastic.members import Member, Starter
from podscale.processes.elastic.membership import REGROUP
from podscale.processes.exit_codes import PREEMPTED
from podscale.processes.launch import StopSignals, die_with_parent

NICENESS = 10


class FirstSteps(Launcher):
    """A launch that ends once two generations have trained, or at the first failure."""

    def _advance(self) -> None:
        generation = self._generation
        if generation and generation.is_training and min(generation.calls) >= 0 and not generation.stop:
            if generation.number == 0:
                generation.request_stop(REGROUP)
            else:
                self._signals.received.append(signal.SIGTERM)  # it saves, and ends
        super()._advance()

    def _kill_silent(self) -> None:
        """Kill nobody: at low priority, a process may have to wait for a core."""

    def _note_failure(self, member: Member, *, takes_part: bool) -> None:
        super()._note_failure(member, takes_part=takes_part)
        self._failures = MAX_FAILURES


def precompile(size: int, folder: Path, command: list[str]) -> int:
    """Do the first steps with `size` processes; return 0 if their programs are now in the cache, else an exit code."""
    die_with_parent()
    _lower_priority()
    command = [*command, "--run", str(folder / "run"), "--track", ""]
    starter = Starter(command, [None] * size, folder, {"preexec_fn": die_with_parent})  # in this process's group
    with StopSignals() as signals:
        launcher = FirstSteps(starter, size, (size, size), folder, signals, Precompiler([], folder, is_enabled=False))
        try:
            code = launcher.run()
        finally:
            launcher.close()
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if code == PREEMPTED else code


def _lower_priority() -> None:
    """Let the processes that train go first; Linux may weigh whole sessions against one another, too."""
    os.nice(NICENESS)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS), encoding="ascii")


if __name__ == "__main__":
    sys.exit(precompile(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
