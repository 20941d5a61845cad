"""A stream on a full disk: a real one, /dev/full."""

import os
import subprocess
import sys
from contextlib import suppress

import pytest

from podscale.cli.safe_stream import SafeStream

needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")


@needs_full
def test_what_does_not_fit_is_lost_and_nothing_else():
    with suppress(OSError), open("/dev/full", "w", buffering=1) as file:  # the file itself ends in the error
        stream = SafeStream(file)
        assert stream.write("told\n") == 5
        stream.flush()
        assert stream.encoding
        assert not stream.isatty()


def test_other_troubles_are_told():
    reading, writing = os.pipe()
    os.close(reading)
    file = os.fdopen(writing, "w", buffering=1)
    with pytest.raises(BrokenPipeError):
        SafeStream(file).write("told\n")
    with suppress(BrokenPipeError):
        file.close()


@needs_full
def test_a_training_outlives_the_disk_that_its_words_go_to(tmp_path):
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
