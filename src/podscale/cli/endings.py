"""How a command that fails ends: alone, or together with the other processes."""

import sys
import traceback

# --- endings, of one process or of several ---------------------------------------------------------------------------


def report_failure(error: Exception) -> int:
    """Tells of an error that is none of the user's: where it came up, or which other process is gone."""
    if "podscale.processes.heartbeat" in sys.modules:
        from podscale.processes import heartbeat

        found = heartbeat.settle(error)
        if found:
            heartbeat.say(found)
            return found.code
    traceback.print_exception(error)
    return 1


def exit_code(code: int, why: str) -> int:
    """The exit code of a process that does not end well: that of whoever failed first, if there are several."""
    if "podscale.processes.heartbeat" not in sys.modules:
        return code
    from podscale.processes import heartbeat

    return heartbeat.farewell(code, why)
