"""Run the command line: `python -m podscale`."""

from podscale.cli.main import run

run()
