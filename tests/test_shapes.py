"""The shapes that signatures state hold in every training step: jaxtyping's annotations, checked by beartype."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "support" / "checked_shapes.py"


@pytest.mark.heavy
def test_steps_have_the_shapes_that_their_signatures_state():
    """In a process of its own, because modules are checked as they are imported."""
    result = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split() == ["checked", "torus4", "checked", "xla", "checked", "sharded"]


@pytest.mark.heavy
def test_a_wrong_shape_is_found():
    program = """
from jaxtyping import install_import_hook
with install_import_hook(["podscale.parallel"], "beartype.beartype"):
    from podscale.parallel.inputs import crop_picks
import jax.numpy as jnp
crop_picks(jnp.zeros((2, 8, 8, 3), jnp.uint8), jnp.zeros((5, 3), jnp.int32), 8)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "picks" in result.stderr
    assert "jaxtyping.TypeCheckError" in result.stderr
