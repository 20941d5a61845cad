"""Imported by `podscale train --import` in processes of their own: they then have the small models of the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import small_models

small_models.register_models()
