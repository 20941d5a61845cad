"""Run the command line: parse a command, run its function, and turn errors into exit codes.

A mistake of the user is reported in one sentence, with exit code 2.
"""

import _thread
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import NoReturn, TextIO

from podscale.cli import completion, endings
from podscale.cli.arguments import is_main_process
from podscale.cli.parser import make_parser, parse_arguments
from podscale.cli.result import Result
from podscale.cli.safe_stream import open_standard_streams
from podscale.errors import (
    DivergedError,
    JoinError,
    PreemptedError,
    SavedInterruptError,
    TerminatedError,
    UserError,
    describe_os_error,
)
from podscale.processes.exit_codes import DIVERGED, INTERRUPTED, PEER_LOST, PREEMPTED, USER_ERROR
from podscale.processes.process_end import flush_or_discard
from podscale.runs.startup import clock
from podscale.storage.files import to_json
from podscale.training.out_of_memory import explain_out_of_memory

# Of all processes together: exit code, and how it is announced.
ENDINGS: Mapping[type[BaseException], tuple[int, str]] = MappingProxyType(
    {
        PreemptedError: (PREEMPTED, ""),
        DivergedError: (DIVERGED, ""),
        SavedInterruptError: (INTERRUPTED, "interrupted; "),
    }
)
USER_FIXABLE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)


def run() -> NoReturn:
    """Run the command of this process's command line, and end the process with its exit code."""
    clock.mark("interpreter")
    open_standard_streams()
    _forward_interrupts()
    try:
        code = _print_candidates(sys.argv[2:]) if sys.argv[1:2] == ["complete"] else main()
    except Exception as error:
        code = endings.agree_on_exit_code(endings.report_failure(error), "")
    flush_or_discard(sys.stdout)
    flush_or_discard(sys.stderr)
    if code:  # an ordinary exit would wait for the other processes, which wait for this one, or for a compilation
        os._exit(code)
    sys.exit(0)


def _print_candidates(words: list[str]) -> int:
    """Print what a shell may complete the words to; they need not parse."""
    print(*completion.list_candidates(make_parser(), words), sep="\n")
    return 0


def _forward_interrupts() -> None:
    """Raise Ctrl-C or SIGTERM again if Python drops it because it arrives in a garbage collection: JAX has many."""
    default_hook = sys.unraisablehook

    def handle(unraisable: "sys.UnraisableHookArgs") -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            number = signal.SIGTERM if isinstance(unraisable.exc_value, TerminatedError) else signal.SIGINT
            # Without the delay it would be dropped again.
            threading.Timer(0.01, _thread.interrupt_main, (number,)).start()
        else:
            default_hook(unraisable)

    sys.unraisablehook = handle


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the command line without the program's name; this process's own if None.
    """
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        with explain_out_of_memory(), _redirect_stdout() if arguments.json else nullcontext(sys.stdout) as stdout:
            result: Result = arguments.function(arguments)
            if arguments.json and is_main_process():
                print(to_json(result.value), file=stdout, flush=True)
        if result.message:
            print(f"podscale: {result.message}", file=sys.stderr)
        return endings.agree_on_exit_code(result.code, result.message) if result.message else result.code
    except UserError as error:
        print(f"podscale: {error}", file=sys.stderr)
        return endings.agree_on_exit_code(PEER_LOST if isinstance(error, JoinError) else USER_ERROR, str(error))
    except (PreemptedError, DivergedError, SavedInterruptError) as error:
        from podscale.processes.group import leave

        leave()
        code, prefix = ENDINGS[type(error)]
        print(f"podscale: {prefix}{error}", file=sys.stderr)
        return code
    except BrokenPipeError:  # the reader has closed the pipe: `podscale recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in USER_FIXABLE_ERRORS:
            raise
        print(f"podscale: {describe_os_error(error)}", file=sys.stderr)
        return endings.agree_on_exit_code(USER_ERROR, describe_os_error(error))
    except KeyboardInterrupt as error:
        is_request = isinstance(error, TerminatedError)
        text, code = ("stopped on request", PREEMPTED) if is_request else ("interrupted", INTERRUPTED)
        print(f"podscale: {text}{f'; {error}' if str(error) else ''}", file=sys.stderr)
        return endings.agree_on_exit_code(code, text)


@contextmanager
def _redirect_stdout() -> Iterator[TextIO]:
    """Yield the real stdout, and redirect everything else written there to stderr, native libraries included."""
    flush_or_discard(sys.stdout)
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(saved, "w", closefd=False) as stdout:
            yield stdout
    finally:
        flush_or_discard(sys.stdout)
        os.dup2(saved, 1)
        os.close(saved)
