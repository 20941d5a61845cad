"""Commands in real processes that start without importing anything: forks of a process that has imported podscale."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

PRELOADED = ["podscale.cli.main", "podscale.training.loop", "podscale.training.restore"]  # all that commands import


def run_forked(folder, arguments, environment, timeout_s):
    """Run a command in a folder and return what `subprocess.run` would.

    Variables that JAX reads when it is imported must be those of the first call.
    """
    context = multiprocessing.get_context("forkserver")
    with mock.patch.dict(os.environ, environment):  # of the server, which the first call starts
        context.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
    output, errors = (Path(folder).parent / f"{os.getpid()}-{name}" for name in ("stdout", "stderr"))
    process = context.Process(target=run_command, args=(str(folder), arguments, environment, str(output), str(errors)))
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        raise subprocess.TimeoutExpired(arguments, timeout_s)
    texts = output.read_text(), errors.read_text()
    output.unlink(), errors.unlink()
    return subprocess.CompletedProcess(arguments, process.exitcode, *texts)


def run_command(folder, arguments, environment, output, errors):
    """Become `podscale ARGUMENTS`, in the fork."""
    for number, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["podscale", *arguments]
    from podscale.__main__ import run

    run()
