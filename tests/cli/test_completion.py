"""Completion of commands: by the parser, and in real shells on a real terminal."""

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
from podscale.cli import completion, parser
from podscale.recipe import presets


def after(*words):
    return completion.candidates(parser.make_parser(), list(words))


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
    code = f"import sys\nsys.path.insert(0, {here!r})\nfrom podscale.cli.main import run\nrun()\n"
    program.write_text(f"#!{sys.executable}\n{code}")
    program.chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], b"source <(podscale completion bash)"),
    "zsh": (["zsh", "-f", "-i"], b"autoload -U compinit; compinit -u -D; source <(podscale completion zsh)"),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_real_shell_completes(shell, path, tmp_path):
    """Types into a shell on a terminal: the beginning of a word, the tab key, and sees the rest appear."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    command, load = SHELLS[shell]
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=os.environ | {"PATH": path, "PS1": "> ", "TERM": "dumb"},
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
        os.write(main, load + b"; echo loa''ded\n")
        until(b"loaded\r\n")
        os.write(main, b"podscale rec\t")
        until(b"recipes ")
        os.write(main, b"\x15podscale train dig\t")
        until(b"train digits ")
        os.write(main, b"\x15podscale train --plan.dete\t")
        until(b"--plan.deterministic ")
    finally:
        process.kill()
        process.wait()
        os.close(main)


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes(path, tmp_path):
    script = tmp_path / "podscale.fish"
    script.write_text(completion.SCRIPTS["fish"])

    def completed(line):
        asked = f"source {script}; complete -C {line!r}"
        environment = os.environ | {"PATH": path, "HOME": str(tmp_path)}
        done = subprocess.run(["fish", "-c", asked], env=environment, capture_output=True, text=True, check=True)
        return [line.split("\t")[0] for line in done.stdout.splitlines()]

    assert completed("podscale rec") == ["recipes"]
    assert completed("podscale train dig") == ["digits"]
    assert completed("podscale train --plan.dete") == ["--plan.deterministic"]
