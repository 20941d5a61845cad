"""Run the command line: `podscale`, or `python -m podscale`."""

import os
import sys
from typing import NoReturn


def run() -> NoReturn:
    """Import the commands and run one; a Ctrl-C during the imports ends the process with a sentence, too."""
    try:
        from podscale.cli import main

        main.run()
    except KeyboardInterrupt:
        print("podscale: interrupted", file=sys.stderr, flush=True)
        os._exit(130)


if __name__ == "__main__":
    run()
