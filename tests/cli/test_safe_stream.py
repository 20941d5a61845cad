"""A stream on a full disk: a real one, /dev/full."""

import os
import subprocess
import sys
from contextlib import suppress

import pytest

from podscale.cli.safe_stream import SafeStream

needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")


@needs_full
def test_output_on_a_full_disk_is_lost_without_an_error():
    with suppress(OSError), open("/dev/full", "w", buffering=1) as file:  # the file itself ends in the error
        stream = SafeStream(file)
        assert stream.write("text\n") == 5
        stream.flush()
        assert stream.encoding
        assert not stream.isatty()


def test_other_errors_are_raised():
    reading, writing = os.pipe()
    os.close(reading)
    file = os.fdopen(writing, "w", buffering=1)
    with pytest.raises(BrokenPipeError):
        SafeStream(file).write("text\n")
    with suppress(BrokenPipeError):
        file.close()


@pytest.mark.heavy
@needs_full
def test_training_tolerates_a_full_disk_for_its_output(tmp_path):
    words = "train digits --model.width 8 --train.epochs 1 --pod.virtual 1x1 --json --run".split()
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "podscale", *words, str(tmp_path / "run")],
            stderr=full,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            check=False,
        )
    assert done.returncode == 0
    assert '"steps": 12' in done.stdout
