"""A stream on a full disk: a real one, /dev/full."""

import fcntl
import os
import subprocess
import sys
from contextlib import suppress

import pytest
from support.short_run import OPTIONS

from podscale.cli import safe_stream
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


def test_without_a_reader_output_is_lost_unless_the_command_is_for_its_output():
    reading, writing = os.pipe()
    os.close(reading)
    file = os.fdopen(writing, "w", buffering=1)
    with pytest.raises(BrokenPipeError):
        SafeStream(file, needs_reader=True).write("text\n")
    SafeStream(file).write("text\n")
    file.write("also what goes around it\n")
    file.close()


def test_a_reader_that_stops_reading_is_waited_for_once_and_gets_what_comes_after_it_reads_again(monkeypatch):
    monkeypatch.setattr(safe_stream, "PATIENCE_S", 0.05)
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(writing, "w") as file:
        stream = SafeStream(file)
        for _ in range(5):
            assert stream.write("x" * 3000) == 3000
        assert set(os.read(reading, 1 << 16)) == {ord("x")}
        stream.write("again")
        assert os.read(reading, 1 << 16) == b"again"
    os.close(reading)


@pytest.mark.heavy
@needs_full
def test_training_tolerates_a_full_disk_for_its_output(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "podscale", "train", "digits", *OPTIONS, "--json", "--run", str(tmp_path / "run")],
            stderr=full,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            check=False,
        )
    assert done.returncode == 0
    assert '"steps": 23' in done.stdout
