"""`python -m podscale` is the command line."""

import sys

from podscale.cli import main

sys.exit(main())
