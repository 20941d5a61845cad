"""Paths with a scheme, such as s3://, are refused: nothing may end up in a local folder named `s3:`."""

from pathlib import Path

import pytest

from podscale import load_recipe, train
from podscale.cli.main import main
from podscale.errors import UserError
from podscale.runs.folder import Run
from podscale.storage.paths import require_local

BUCKET, UNKNOWN = "s3://bucket/x", "ftp://host/x"
STUDY = '# podscale study study.toml\nrecipe = "digits"\nseeds = [0]\n[grid]\n"batch.size" = [64]\n'
COMMANDS = [
    (["train", "digits", "--run", "run", "--data.source", "npz", "--data.path", BUCKET], "data.path"),
    (["launch", "-n", "1", "--logs", BUCKET, "train", "digits"], "--logs"),
    (["export", "a", "--to", f"{BUCKET}.onnx"], "--to"),
    (["report", "a", "b", "--to", f"{BUCKET}.html"], "--to"),
    (["study", "study.toml", "--run", BUCKET], "--run"),
    (["plan", "digits", "--pod", "v3:2x2", "--no-compile", "--plot", f"{BUCKET}.svg"], "--plot"),
    (["data", "show", "digits", "--to", f"{BUCKET}.png"], "--to"),
]
RUN_COMMANDS = [  # which read and write runs in buckets
    (["train", "digits", "--run", UNKNOWN], "--run"),
    (["train", "digits", "--run", "run", "--init", UNKNOWN], "--init"),
    (["eval", "--run", UNKNOWN], "run"),
    (["predict", "--run", UNKNOWN, "a.png"], "run"),
    (["export", UNKNOWN, "--to", "model.onnx"], "run"),
    (["report", UNKNOWN], "run"),
]


@pytest.mark.parametrize(("command", "option"), RUN_COMMANDS, ids=lambda value: " ".join(value)[:60])
def test_a_command_on_runs_refuses_an_unknown_scheme_in_one_sentence(command, option, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    expected = f"podscale: {option} {UNKNOWN}: ftp:// is not supported; give a path, or s3://, gs://, az://, ..."
    assert expected in capfd.readouterr().err.splitlines()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "option"), COMMANDS, ids=lambda value: " ".join(value)[:60])
def test_a_command_refuses_a_path_with_a_scheme_in_one_sentence(command, option, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("a", "b"):
        Run.create(Path(name), load_recipe("digits"), {}, ("0", "1"))
    Path("study.toml").write_text(STUDY)
    path = next(argument for argument in command if argument.startswith(BUCKET))
    assert main(command) == 2
    expected = f"podscale: {option} {path}: s3:// is not supported; give a local or mounted path"
    assert expected in capfd.readouterr().err.splitlines()
    assert {entry.name for entry in tmp_path.iterdir()} - {"cache"} == {"a", "b", "study.toml"}


def test_python_refuses_a_run_folder_with_a_scheme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (UNKNOWN, Path(UNKNOWN)):
        with pytest.raises(UserError, match="--run ftp://host/x: ftp:// is not supported"):
            train(load_recipe("digits"), folder=folder)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["s3://b", "gs://b/c", "hdfs:///x", "https://x.org/a.npz", "file:///tmp/x", "s3:/b"])
def test_every_scheme_is_refused(path):
    with pytest.raises(UserError, match="is not supported"):
        require_local(path, "--run")


@pytest.mark.parametrize(
    "path", ["", ".", "runs/a", "/mnt/gcs/run", "/tmp/s3:/x", "a:b", "runs/a:/b", "~/run", "12:/x"]
)
def test_local_paths_are_accepted(path):
    require_local(path, "--run")
    require_local(Path(path), "--run")
