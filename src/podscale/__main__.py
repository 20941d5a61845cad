"""`python -m podscale` is the command line."""

from podscale.cli.main import run

run()
