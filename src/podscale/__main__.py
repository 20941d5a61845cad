"""Run the command line: `podscale`, or `python -m podscale`."""

import os
import sys
from typing import NoReturn

from podscale.errors import TerminatedError


def run() -> NoReturn:
    """Import the commands and run one; SIGTERM or Ctrl-C during the imports ends the process with a sentence, too."""
    try:
        from podscale.cli import stopping

        stopping.handle_stop_signals()
        from podscale.cli import main

        stopping.raise_postponed()
        main.run()
    except KeyboardInterrupt as error:
        text, code = ("stopped on request", 75) if isinstance(error, TerminatedError) else ("interrupted", 130)
        print(f"podscale: {text}", file=sys.stderr, flush=True)
        os._exit(code)


if __name__ == "__main__":
    run()
