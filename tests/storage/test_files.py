"""Files on disks that take no more: the error names the file."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from podscale.errors import describe_os_error
from podscale.storage.files import name_file


def test_an_error_on_a_full_disk_names_the_file_and_says_what_to_do():
    with pytest.raises(OSError, match="No space left") as caught, name_file(Path("run/recipe.toml")):
        Path("/dev/full").write_text("x")
    assert caught.value.errno == errno.ENOSPC
    assert describe_os_error(caught.value) == (
        "No space left on device: run/recipe.toml; free some disk space, or choose another folder"
    )


# The unchanged command, in a process that may open no more files than it has open already.
NO_DESCRIPTORS_PROGRAM = """
import os, resource, sys
from podscale.cli import main as cli
import podscale.recipe
import podscale.cli.commands.plan, podscale.report.terminal

limit = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
sys.argv = ["podscale", "recipes"]
cli.run()
"""


def test_a_process_out_of_file_descriptors_ends_with_a_sentence():
    done = subprocess.run(
        [sys.executable, "-c", NO_DESCRIPTORS_PROGRAM], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "podscale: Too many open files: " in done.stderr
    assert "ulimit -n" in done.stderr
    assert "Traceback" not in done.stderr
