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
from podscale.recipe import list_presets


def complete(*words):
    return completion.list_candidates(parser.make_parser(), list(words))


def test_commands_recipes_options_and_their_values_are_completed():
    assert "train" in complete("")
    assert "complete" not in complete("")
    assert complete("tr") == ["train"]
    assert {"index", "prepare", "show"} <= set(complete("data", ""))
    assert complete("train", "") == sorted(list_presets())
    assert complete("train", "digits", "--optimizer.n") == [
        f"--optimizer.{f}" for f in ("name", "nesterov", "newton_schulz")
    ]
    assert complete("train", "digits", "--optimizer.name", "") == ["adamw", "lars", "muon", "rmsprop", "sgd"]
    assert complete("train", "digits", "--optimizer.nesterov", "t") == ["true"]
    assert complete("plan", "--plan.summation", "to")[:2] == ["torus", "torus4"]
    assert complete("completion", "") == ["bash", "fish", "zsh"]


def test_paths_are_left_to_the_shell():
    for words in (("predict", ""), ("train", "--data.path", ""), ("export", "--to", "x"), ("report", "runs/a", "")):
        assert complete(*words) == [completion.FILES]


def test_unknown_words_have_no_candidates():
    assert complete("--nothing", "--no") == []
    assert complete("trian", "--x", "zzz") == []


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
    """Type the beginning of a word and the tab key into a shell on a terminal, and see it completed."""
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
    output = b""

    def wait_for(expected, limit_s=60):
        nonlocal output
        end = time.monotonic() + limit_s
        while expected not in output:
            assert time.monotonic() < end, output
            if select.select([main], [], [], 0.2)[0]:
                output += os.read(main, 4096)

    try:
        os.write(main, load + b"; echo loa''ded\n")
        wait_for(b"loaded\r\n")
        os.write(main, b"podscale rec\t")
        wait_for(b"recipes ")
        os.write(main, b"\x15podscale train dig\t")
        wait_for(b"train digits ")
        os.write(main, b"\x15podscale train --plan.dete\t")
        wait_for(b"--plan.deterministic ")
    finally:
        process.kill()
        process.wait()
        os.close(main)


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes(path, tmp_path):
    script = tmp_path / "podscale.fish"
    script.write_text(completion.SCRIPTS["fish"])

    def complete_in_fish(line):
        script_text = f"source {script}; complete -C {line!r}"
        environment = os.environ | {"PATH": path, "HOME": str(tmp_path)}
        done = subprocess.run(["fish", "-c", script_text], env=environment, capture_output=True, text=True, check=True)
        return [line.split("\t")[0] for line in done.stdout.splitlines()]

    assert complete_in_fish("podscale rec") == ["recipes"]
    assert complete_in_fish("podscale train dig") == ["digits"]
    assert complete_in_fish("podscale train --plan.dete") == ["--plan.deterministic"]
