"""Output, terminal, home, folders and limits of a training that go away or are not as usual: it ends well anyway."""

import fcntl
import json
import os
import pty
import shutil
import subprocess
import sys
import time

import pytest

WORDS = "train digits --model.width 4 --train.eval_epochs 1 --pod.virtual 1x1".split()
SHORT, LONG = ["--train.epochs", "2"], ["--train.epochs", "400", "--plan.save_steps", "100000"]
PREEMPTED, USER_ERROR = 75, 2
STEPS = 23
pytestmark = pytest.mark.slow


def make_command(folder, *more):
    return [sys.executable, "-m", "podscale", *WORDS, "--run", str(folder), *map(str, more)]


@pytest.fixture(autouse=True)
def _end_processes():
    """End what a failed test has left."""
    yield
    while started:
        process = started.pop()
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in filter(None, (process.stdout, process.stderr)):
            stream.close()


started = []


def start(folder, *more, **settings):
    settings = {"env": os.environ | {"JAX_PLATFORMS": "cpu"}, "stdin": subprocess.DEVNULL} | settings
    started.append(subprocess.Popen(make_command(folder, *more), **settings))
    return started[-1]


def is_complete(folder):
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["steps"] == STEPS


def wait_for_step(folder, process):
    deadline, journal = time.monotonic() + 300, folder / "metrics.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if journal.exists() and '"train"' in journal.read_text():
            return
        time.sleep(0.02)
    raise AssertionError("it never trained")


# --- output --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_ends_does_not_end_the_training(tmp_path, more):
    """As with `podscale train | head -1`."""
    process = start(tmp_path, *SHORT, *more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(300) == 0
    assert is_complete(tmp_path)


def test_a_reader_that_stops_reading_does_not_stop_the_training(tmp_path):
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    process = start(tmp_path, *SHORT, stdout=writing, stderr=writing)
    assert process.wait(300) == 0
    os.close(writing)
    os.close(reading)
    assert is_complete(tmp_path)


@pytest.mark.parametrize("closed", ["1", "2", "0,1,2"])
def test_a_training_without_standard_streams_writes_only_to_its_files(tmp_path, closed):
    code = f"import os, sys; [os.close(n) for n in ({closed},)]; os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", code, *make_command(tmp_path / "run", *SHORT)]
    done = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert is_complete(tmp_path / "run")
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert b"1x1 torus, 1 host" not in path.read_bytes() or path.suffix in (".html", ".json")


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_is_gone_ends_the_training_saved_or_not_at_all(tmp_path, ignored):
    """With SIGHUP ignored, as by nohup, it goes on, although the terminal takes no output any more."""
    terminal, other_end = pty.openpty()
    code = "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY); "
    handler = "SIG_IGN" if ignored else "SIG_DFL"  # whatever this process was started with
    code += f"signal.signal(signal.SIGHUP, signal.{handler}); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", code, *make_command(tmp_path, *(SHORT if ignored else LONG))]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), other_end)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    os.close(other_end)
    journal = tmp_path / "metrics.jsonl"
    while not (journal.exists() and '"train"' in journal.read_text()):
        os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait(300) == (0 if ignored else PREEMPTED)
    assert is_complete(tmp_path) == ignored
    assert len(list((tmp_path / "checkpoints").glob("[0-9]*"))) >= 1


# --- folders -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file")
@pytest.mark.parametrize("home", [None, "/proc/nowhere", "not/absolute"])
def test_a_user_without_a_home_can_train(tmp_path, home):
    """As in a container whose user no database knows; nothing but the run is written to the working folder."""
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME") and "JAX" not in k}
    environment |= {"JAX_PLATFORMS": "cpu", "TMPDIR": "/nonexistent"} | ({"HOME": home} if home else {})
    alone = ["unshare", "--mount", "sh", "-c", 'mount --bind /dev/null /etc/passwd && exec "$@"', "sh"]
    done = subprocess.run(
        [*alone, *make_command(tmp_path / "run", *SHORT)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert is_complete(tmp_path / "run")
    assert os.listdir(tmp_path) == ["run"]


def test_a_run_folder_that_is_deleted_is_reported_and_the_result_printed(tmp_path):
    """Its disk may come back, so the run goes on; in the end it waits for its last checkpoint only so long."""
    run = tmp_path / "run"
    more = ["--train.epochs", 30, "--plan.timeout_s", 20, "--json"]
    process = start(run, *more, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_step(run, process)
    shutil.rmtree(run)
    out, err = process.communicate(timeout=300)
    assert process.returncode == USER_ERROR, err[-2000:]
    assert json.loads(out)["steps"] == 337
    assert "did not accept the last checkpoint" in err
    assert "Traceback" not in err


def test_a_run_folder_that_moves_and_becomes_a_link_is_trained_to_the_end(tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    process = start(run, *SHORT, "--train.epochs", 30, stderr=subprocess.PIPE, text=True)
    wait_for_step(run, process)
    run.rename(moved)
    run.symlink_to(moved)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-2000:]
    assert (moved / "summary.json").exists()
    assert list((moved / "checkpoints").glob("[0-9]*"))


def test_a_working_folder_that_is_gone_is_reported_by_a_sentence(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.argv[1], sys.argv[1:])"
    for folder, expected in ((tmp_path / "run", 0), ("run", USER_ERROR)):
        gone.mkdir(exist_ok=True)
        command = [sys.executable, "-c", code, *make_command(folder, *SHORT)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=environment, cwd=gone, capture_output=True, text=True, check=False)
        assert done.returncode == expected, done.stderr[-2000:]
        assert "Traceback" not in done.stderr


# --- limits --------------------------------------------------------------------------------------------------------


def test_a_limit_on_the_size_of_files_keeps_training_and_ends_with_the_result(tmp_path):
    """As `ulimit -f` sets it: every file that grows past it is refused, checkpoints too."""
    command = ["prlimit", "--fsize=20000", *make_command(tmp_path, *SHORT, "--json", "--plan.timeout_s", 10)]
    done = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == USER_ERROR, done.stderr[-2000:]
    assert json.loads(done.stdout)["steps"] == STEPS
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_limit_on_memory_ends_the_training_and_without_it_the_same_command_trains(tmp_path):
    command = make_command(tmp_path, *SHORT)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    limited = subprocess.run(["prlimit", "--as=1500000000", *command], env=environment, check=False, timeout=300)
    assert limited.returncode != 0
    assert subprocess.run(command, env=environment, check=False, timeout=300).returncode == 0
    assert is_complete(tmp_path)


@pytest.mark.parametrize("settings", [{"COLUMNS": "1"}, {"COLUMNS": "-5", "LINES": "x"}, {"TERM": "nonsense"}])
def test_odd_settings_of_the_terminal_change_nothing(tmp_path, settings):
    process = start(tmp_path, *SHORT, env=os.environ | {"JAX_PLATFORMS": "cpu"} | settings)
    assert process.wait(300) == 0
    assert is_complete(tmp_path)


def test_a_link_to_nowhere_in_the_place_of_the_run_folder_is_refused_by_a_sentence(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "nowhere" / "at" / "all")
    process = start(tmp_path / "run", *SHORT, stderr=subprocess.PIPE, text=True)
    _, err = process.communicate(timeout=120)
    assert process.returncode == USER_ERROR, err[-2000:]
    assert "Traceback" not in err
