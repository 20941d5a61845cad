"""Completion of commands: by the parser, and in a real bash with a real terminal."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import podscale
from podscale import cli, completion
from podscale.recipe import presets


def after(*words):
    return completion.candidates(cli._parser(), list(words))


def test_verbs_recipes_options_and_their_values_are_completed():
    assert "train" in after("")
    assert "complete" not in after("")
    assert after("tr") == ["train"]
    assert {"index", "prepare", "show"} <= set(after("data", ""))
    assert after("train", "") == sorted(presets())
    assert after("train", "digits", "--optimizer.n") == [
        f"--optimizer.{f}" for f in ("name", "nesterov", "newton_schulz")
    ]
    assert after("train", "digits", "--optimizer.name", "") == ["adamw", "lars", "muon", "sgd"]
    assert after("train", "digits", "--optimizer.nesterov", "t") == ["true"]
    assert after("plan", "--plan.summation", "to")[:2] == ["torus", "torus4"]
    assert after("completion", "") == ["bash", "fish", "zsh"]


def test_paths_are_left_to_the_shell():
    for words in (("predict", ""), ("train", "--data.path", ""), ("export", "--to", "x"), ("report", "runs/a", "")):
        assert after(*words) == [completion.FILES]


def test_nonsense_has_no_candidates():
    assert after("--nothing", "--no") == []
    assert after("trian", "--x", "zzz") == []


@pytest.fixture
def path(tmp_path):
    """A folder with the program in it, as `pip install` would leave it."""
    program = tmp_path / "podscale"
    here = str(Path(podscale.__file__).parents[1])
    code = f"import sys\nsys.path.insert(0, {here!r})\nfrom podscale.cli import run\nrun()\n"
    program.write_text(f"#!{sys.executable}\n{code}")
    program.chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_real_bash_completes(path, tmp_path):
    """Types into a bash on a terminal: the beginning of a word, the tab key, and sees the rest appear."""
    environment = os.environ | {"PATH": path, "PS1": "> ", "TERM": "dumb"}
    main, terminal = pty.openpty()
    bash = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        cwd=tmp_path,
        start_new_session=True,
    )
    os.close(terminal)
    seen = b""

    def until(wanted, limit_s=60):
        nonlocal seen
        end = time.monotonic() + limit_s
        while wanted not in seen:
            assert time.monotonic() < end, seen
            if select.select([main], [], [], 0.2)[0]:
                seen += os.read(main, 4096)

    try:
        os.write(main, b"source <(podscale completion bash); echo loa''ded\n")
        until(b"loaded\r\n")
        os.write(main, b"podscale rec\t")
        until(b"recipes ")
        os.write(main, b"\x15podscale train dig\t")
        until(b"train digits ")
        os.write(main, b"\x15podscale train --plan.dete\t")
        until(b"--plan.deterministic ")
    finally:
        bash.kill()
        bash.wait()
        os.close(main)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_scripts(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    script = tmp_path / "script"
    script.write_text(completion.SCRIPTS[shell])
    assert subprocess.run([shell, "-n", str(script)], check=False).returncode == 0
