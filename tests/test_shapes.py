"""The shapes that signatures state hold in training steps and kernels: jaxtyping's annotations, checked by beartype."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "support" / "checked_shapes.py"


@pytest.mark.heavy
def test_steps_and_kernels_have_the_shapes_that_their_signatures_state():
    """In a process of its own, because modules are checked as they are imported."""
    result = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    steps = ["torus4", "xla", "sharded", "joint-muon", "sharded-muon", "rmsprop", "lars-optax", "lars-scaled"]
    transformer = ["transformer", "plain", "transformer", "interpret"]
    assert result.stdout.split() == [*steps, "plain", "interpret", *transformer]


WRONG_CALLS = {
    "picks": """
from podscale.parallel.inputs import crop_picks
crop_picks(jnp.zeros((2, 8, 8, 3), jnp.uint8), jnp.zeros((5, 3), jnp.int32), 8)""",
    "kernels": """
from podscale.optim.newton_schulz import orthogonalize_jointly
orthogonalize_jointly([jnp.zeros(3)], 3)""",
    "affine": """
from podscale.kernels.reference import normalize_and_rectify
normalize_and_rectify(jnp.zeros((2, 4, 4, 8)), (jnp.zeros((1, 8)), jnp.zeros((1, 4))), None, ())""",
}


@pytest.mark.heavy
@pytest.mark.parametrize("culprit", WRONG_CALLS)
def test_a_wrong_shape_is_found(culprit):
    program = f"""
from jaxtyping import install_import_hook
import jax.numpy as jnp
with install_import_hook(["podscale.parallel", "podscale.optim", "podscale.kernels"], "beartype.beartype"):
    {"    ".join(WRONG_CALLS[culprit].strip().splitlines(keepends=True))}
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert f"'{culprit}'" in result.stderr
    assert "jaxtyping.TypeCheckError" in result.stderr
