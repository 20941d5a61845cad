"""SIGTERM and Ctrl-C in real processes, from a command's first moment on."""

import signal
import subprocess
import sys

import pytest

TIMEOUT_S = 120
SIGNALS = [(signal.SIGTERM, 75, "stopped on request"), (signal.SIGHUP, 75, "stopped on request")]
SIGNALS += [(signal.SIGINT, 130, "interrupted")]
# A shell in the background makes its children ignore Ctrl-C, and nohup makes them ignore SIGHUP.
DEFAULTS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
DEFAULTS += "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"


def run_program(program, *arguments):
    """Run a program that ends by itself, and return its exit code and what it prints."""
    command = [sys.executable, "-c", DEFAULTS + program, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    return process.returncode, process.stdout, process.stderr


@pytest.mark.parametrize(("number", "code", "text"), SIGNALS)
def test_a_signal_during_the_first_imports_is_one_sentence(number, code, text):
    program = (
        "import sys\n"
        "from podscale.__main__ import run\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == 'podscale.recipe': signal.raise_signal({int(number)})\n"
        "sys.meta_path.insert(0, Finder())\n"
        "run()\n"
    )
    assert run_program(program) == (code, "", f"podscale: {text}\n")


@pytest.mark.parametrize(("number", "code", "text"), SIGNALS)
def test_a_signal_is_not_lost_in_an_import_that_swallows_exceptions(tmp_path, number, code, text):
    """As numpy and jaxlib do; they may even crash."""
    (tmp_path / "careless.py").write_text(f"""
import signal
try:
    signal.raise_signal({int(number)})
except BaseException:
    pass
print("imported")
""")
    program = (
        "import sys, time\n"
        "from podscale.__main__ import run\n"
        "from podscale.cli import main\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "def use_module():\n"
        "    import careless\n"
        "    time.sleep(60)\n"
        "main.main = use_module\n"
        "run()\n"
    )
    assert run_program(program) == (code, "imported\n", f"podscale: {text}\n")


@pytest.mark.parametrize(("number", "code", "text"), SIGNALS)
def test_a_signal_while_a_training_starts_says_what_the_same_command_does(tmp_path, number, code, text):
    program = (
        "from podscale.__main__ import run\n"
        "from podscale.training import loop\n"
        f"loop.train = lambda *_, **__: signal.raise_signal({int(number)})\n"
        "run()\n"
    )
    ending = f"podscale: {text}; there is no checkpoint yet, so the same command starts again\n"
    assert run_program(program, "train", "digits", "--run", str(tmp_path / "run")) == (code, "", ending)


@pytest.mark.parametrize(("number", "code", "text"), SIGNALS)
def test_a_signal_ends_a_command_whose_main_thread_is_busy_in_native_code(number, code, text):
    program = (
        "import ctypes, os, sys, threading\n"
        "from podscale.cli import stopping\n"
        "stopping.GRACE_S = 0.2\n"
        "stopping.handle_stop_signals()\n"
        f"threading.Timer(0.2, os.kill, (os.getpid(), {int(number)})).start()\n"
        "libc = ctypes.CDLL(None); mutex = (ctypes.c_char * 128)()\n"
        "libc.pthread_mutex_lock(mutex); libc.pthread_mutex_lock(mutex)\n"  # waits for itself, forever
    )
    assert run_program(program) == (code, "", f"podscale: {text}\n")


def test_an_ignored_signal_stays_ignored():
    program = (
        "from podscale.cli.stopping import handle_stop_signals\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "handle_stop_signals()\n"
        "signal.raise_signal(signal.SIGHUP)\n"
        "print('goes on')\n"
    )
    assert run_program(program) == (0, "goes on\n", "")


def test_the_grace_is_for_a_main_thread_that_cannot_answer_and_not_for_one_that_cleans_up():
    program = (
        "import time\n"
        "from podscale.cli import stopping\n"
        "stopping.GRACE_S = 0.1\n"
        "stopping.handle_stop_signals()\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "except stopping.TerminatedError:\n"
        "    time.sleep(0.5)\n"  # longer than the grace
        "    print('cleaned up')\n"
    )
    assert run_program(program) == (0, "cleaned up\n", "")


def test_a_signal_during_an_import_leaves_time_to_clean_up(tmp_path):
    slow = "import signal, time; signal.raise_signal(signal.SIGTERM); time.sleep(0.1)"
    (tmp_path / "slow.py").write_text(slow)
    program = (
        "import sys, time\n"
        "from podscale.cli import stopping\n"
        "stopping.GRACE_S = 0.3\n"
        "stopping.handle_stop_signals()\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "try:\n"
        "    import slow\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(1)\n"
        "    print('cleaned up')\n"
    )
    assert run_program(program) == (0, "cleaned up\n", "")
