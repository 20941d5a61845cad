"""End a command that failed: report the error, and agree on the exit code with the other processes of the run.

The heartbeat is asked only if this process has joined others, that is, if its module has been imported.
"""

import sys
import traceback

from podscale.processes.exit_codes import FAILED


def report_failure(error: Exception) -> int:
    """Print an error that is not the user's mistake and return the exit code.

    It prints which other process is lost if that explains the error, else the traceback.
    """
    if "podscale.processes.heartbeat" in sys.modules:
        from podscale.processes import heartbeat

        reason = heartbeat.agree_on_exit(error)
        if reason:
            heartbeat.print_exit(reason)
            return reason.code
    traceback.print_exception(error)
    return FAILED


def agree_on_exit_code(code: int, reason: str) -> int:
    """Return the exit code of a failed process: of several processes, that of the one that failed first."""
    if "podscale.processes.heartbeat" not in sys.modules:
        return code
    from podscale.processes import heartbeat

    return heartbeat.announce_exit(code, reason)
