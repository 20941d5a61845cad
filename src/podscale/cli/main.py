"""The command line: words to verbs, verbs to functions (`verbs.py`), errors to exit codes; nothing else.

Every field of a recipe is an option, `--section.field VALUE`, and so are the choices about pod and plan.
A mistake of the user's gets one sentence and exit code 2.
"""

import _thread
import errno
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, TextIO, cast

from podscale.cli import completion, endings
from podscale.cli.arguments import is_main_process
from podscale.cli.parser import make_parser, parse
from podscale.cli.safe_stream import SafeStream
from podscale.errors import DivergedError, PreemptedError, UserError
from podscale.storage.files import to_json
from podscale.training.out_of_memory import explain_out_of_memory

USER_ERROR, INTERRUPTED, PREEMPTED = 2, 130, 75  # 75: what sysexits.h calls a temporary failure; start it again
DIVERGED = 65  # what sysexits.h calls bad data; to start it again would not help
OUTSIDE_OUR_POWER = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def run() -> NoReturn:
    """The program: runs a verb and ends the process."""
    _heed_interrupts()
    sys.stderr = cast(TextIO, SafeStream(sys.stderr))
    try:
        code = _complete(sys.argv[2:]) if sys.argv[1:2] == ["complete"] else main()
    except Exception as error:
        code = endings.exit_code(endings.report_failure(error), "")
    sys.stdout.flush()
    sys.stderr.flush()
    if code:  # an ordinary exit would wait for the other processes, which wait for this one, or for a compilation
        os._exit(code)
    sys.exit(0)


def _complete(words: list[str]) -> int:
    """The shell asks what may come next; what it hands over need not parse."""
    print(*completion.candidates(make_parser(), words), sep="\n")
    return 0


def _heed_interrupts() -> None:
    """Ctrl-C is heard again where Python drops it: in the middle of a garbage collection, of which JAX has many."""
    report = sys.unraisablehook

    def heed(dropped: Any) -> None:
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            threading.Timer(0.01, _thread.interrupt_main).start()  # at once, it would be dropped again
        else:
            report(dropped)

    sys.unraisablehook = heed


def main(argv: list[str] | None = None) -> int:
    """Runs one verb; returns the exit code."""
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        with explain_out_of_memory(), _kept_clean() if arguments.json else nullcontext(sys.stdout) as stdout:
            result = arguments.verb(arguments)
            if arguments.json and is_main_process():
                print(to_json(result), file=stdout, flush=True)
        if problem := getattr(arguments, "problem", ""):  # the rest was done, and told
            raise UserError(problem)
    except UserError as error:
        print(f"podscale: {error}", file=sys.stderr)
        return endings.exit_code(USER_ERROR, str(error))
    except (PreemptedError, DivergedError) as error:
        from podscale.processes.group import leave

        leave()
        print(f"podscale: {error}", file=sys.stderr)
        return PREEMPTED if isinstance(error, PreemptedError) else DIVERGED
    except BrokenPipeError:  # the reader went away: `podscale recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in OUTSIDE_OUR_POWER:
            raise
        print(f"podscale: {error.strerror}: {error.filename}", file=sys.stderr)
        return endings.exit_code(USER_ERROR, f"{error.strerror}: {error.filename}")
    except KeyboardInterrupt as error:
        next_time = str(error) or "the same command goes on from the last checkpoint"
        print(f"podscale: interrupted; {next_time}", file=sys.stderr)
        return endings.exit_code(INTERRUPTED, "interrupted")
    return int(getattr(arguments, "code", 0))


@contextmanager
def _kept_clean() -> Iterator[TextIO]:
    """The real stdout; whatever else writes there meanwhile, native libraries included, lands on stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(kept, "w", closefd=False) as stdout:
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
