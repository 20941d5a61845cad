"""Run soak.py for PODSCALE_SOAK_S seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = os.environ.get("PODSCALE_SOAK_S", "300")


@pytest.mark.slow
def test_a_repeatedly_disturbed_training_ends_bit_identical():
    script = Path(__file__).with_name("soak.py")
    process = subprocess.run(
        [sys.executable, str(script), "--seconds", SECONDS, "--epochs", "40"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    print(process.stdout)
    assert "every bit is the same" in process.stdout
