"""Processes show each other the job's token, and compare versions and data, before they compute together."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from support.key_values import LocalClient
from support.processes import PROGRAM, find_free_port, make_environment, wait_for_exit

from podscale.errors import UserError
from podscale.processes.handshake import Handshake, make_token
from podscale.processes.job_secret import SECRET
from podscale.processes.key_value_store import KeyValueStore


def shake_hands(*calls):
    """Let each process make its calls; return what each was refused with."""
    client, problems = LocalClient(), [None] * len(calls)

    def run(number):
        try:
            calls[number](Handshake(KeyValueStore(client), number, len(calls)))
        except UserError as error:
            problems[number] = str(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems, client


@pytest.mark.parametrize("secret", ["", "of this job"])
def test_processes_with_the_same_secret_or_none_are_accepted(secret):
    problems, client = shake_hands(*[lambda it: it.show_token(secret)] * 3)
    assert problems == [None] * 3
    assert secret == "" or not any(secret in value for value in client.values.values())


@pytest.mark.parametrize("stranger", [0, 1, 2])
@pytest.mark.parametrize("secret", ["", "guessed"])
def test_a_stranger_is_named_in_every_other_process(stranger, secret):
    calls = [lambda it: it.show_token("of this job")] * 3
    calls[stranger] = lambda it: it.show_token(secret)
    problems, _ = shake_hands(*calls)
    others = [problem for number, problem in enumerate(problems) if number != stranger]
    if stranger == 0:  # it judges the others; they judge it
        assert all("did not show the token of this job" in problem for problem in others)
    else:
        assert all(f"process {stranger} on " in problem and "did not show the token" in problem for problem in others)


@pytest.mark.parametrize(
    "shown", ["nonsense", "[1]", '{"token": "\\u00e9"}', '{"token": 1, "host": "a\\u001b[2J"}', "9" * 9999]
)
@pytest.mark.parametrize("stranger", [0, 1])
def test_whatever_a_stranger_shows_is_no_token(stranger, shown):
    calls = [lambda it: it.show_token("of this job")] * 2
    calls[stranger] = lambda it: show(it, shown)
    problems, _ = shake_hands(*calls)
    assert f"process {stranger} on " in problems[1 - stranger]
    assert "did not show the token of this job" in problems[1 - stranger]
    assert problems[1 - stranger].isprintable()


def show(handshake, text):
    """Show a text in the place of a token, as a stranger may."""
    store, number = handshake._store, handshake._process
    if number == 0:
        store.set_new("podscale/challenge", "a")
        store.set_new("podscale/verdict/1", "")
    store.set_new(f"podscale/values/1/{number}", text)


def test_a_token_is_of_no_use_to_another_number_or_another_start():
    tokens = {make_token("s", challenge, number, 2) for challenge in ("a", "b") for number in range(2)}
    assert len(tokens) == 4


def test_a_value_that_differs_is_named_in_all_processes():
    same, other = {"Python": "3.11", "jax": "0.10.2"}, {"Python": "3.11", "jax": "0.9.1"}
    calls = [lambda it, values=values: it.check_same(values, "install them") for values in (same, same, other)]
    problems, _ = shake_hands(*calls)
    assert len(set(problems)) == 1
    assert "process 2 on " in problems[0]
    assert "has jax 0.9.1, but process 0 on " in problems[0]
    assert problems[0].endswith("has 0.10.2; install them")
    assert shake_hands(*calls[:2])[0] == [None, None]


MEMBER = """
import sys
from importlib import metadata
from podscale.cli import main as cli

number, jax_version = sys.argv.pop(1), sys.argv.pop(1)
if jax_version:
    metadata.version = lambda name, version=metadata.version: jax_version if name == "jax" else version(name)
sys.argv = ["podscale", "bench", "sum", "--coordinator", sys.argv[1], "--processes", "2", "--process", number]
cli.run()
"""


@pytest.mark.heavy
@pytest.mark.processes(2)
@pytest.mark.parametrize(
    ("versions", "secrets", "message"),
    [
        (("", "0.9.1"), ("s", "s"), "has jax 0.9.1, but process 0 on "),
        (("", ""), ("s", "other"), "process 1 on {host} did not show the token of this job"),
    ],
)
def test_real_processes_end_with_the_sentence(versions, secrets, message):
    """Other versions of JAX on the hosts of a run; a stranger in the place of a process."""
    address, pipes = f"127.0.0.1:{find_free_port()}", {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(number), versions[number], address],
            env=make_environment(**{SECRET: secrets[number]}),
            text=True,
            **pipes,
        )
        for number in range(2)
    ]
    codes, outputs = wait_for_exit(started)
    assert codes == [2, 2], outputs
    host = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
    assert all(message.format(host=host) in err for _, err in outputs), outputs
    assert all("Traceback" not in err for _, err in outputs)


@pytest.mark.slow
@pytest.mark.processes(2)
@pytest.mark.parametrize("differs", ["data", "recipe"])
def test_hosts_with_other_data_or_another_recipe_are_refused_by_name(tmp_path, differs):
    """Two hosts, each with a data.npz in its own folder; of one of them a label is another, or the command is."""
    address, started = f"127.0.0.1:{find_free_port()}", []
    labels = np.arange(256) % 10
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        images = np.zeros((256, 8, 8, 3), np.uint8)
        changed = np.where(np.arange(256) == 3, 0, labels) if (differs, number) == ("data", 1) else labels
        arrays = {"train_images": images, "train_labels": changed}
        arrays |= {"val_images": images[:64], "val_labels": labels[:64]}
        np.savez(tmp_path / str(number) / "data.npz", **arrays)
        epochs = "2" if (differs, number) == ("recipe", 1) else "1"
        command = [*PROGRAM, "train", "digits", "--model.width", "4", "--data.source", "npz", "--data.path", "data.npz"]
        command += ["--train.epochs", epochs, "--run", str(tmp_path / "run"), "--coordinator", address]
        command += ["--processes", "2", "--process", str(number)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path / str(number), env=make_environment(), **pipes))
    codes, outputs = wait_for_exit(started)
    assert codes == [2, 2], outputs
    assert all(f" has {differs} " in err and "give all processes the same command" in err for _, err in outputs)
    assert not (tmp_path / "run").exists()
