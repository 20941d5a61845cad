"""The soak of soak.py, for as long as PODSCALE_SOAK_S says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = os.environ.get("PODSCALE_SOAK_S", "300")


@pytest.mark.slow
def test_a_training_that_is_disturbed_again_and_again_ends_as_one_that_is_not():
    script = Path(__file__).with_name("soak.py")
    done = subprocess.run(
        [sys.executable, str(script), "--seconds", SECONDS, "--epochs", "40"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    print(done.stdout)
    assert "every bit is the same" in done.stdout
