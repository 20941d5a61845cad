"""`python -m podscale` is the command line."""

from podscale.cli import run

run()
