"""What new users try first, and get wrong: each gets one true sentence, and nothing is started that cannot work."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from rich.console import Console
from support.command_line import run_json, run_podscale, run_refused

import podscale
from podscale.cli.main import main
from podscale.data import decode
from podscale.data.index.dataset import open_index
from podscale.errors import UserError
from podscale.report.terminal import show_summary
from podscale.runs.folder import Run
from podscale.training.advice import list_warnings

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {"model.width": 4, "train.epochs": 0.2}


@pytest.fixture(scope="module")
def trained(short_run, tmp_path_factory):
    """A folder with a run of digits in runs/done, with one checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(short_run, folder / "runs" / "done")
    shutil.rmtree(folder / "runs" / "done" / "checkpoints" / "12")
    return folder


def add_newer_run(folder):
    """Add a run that is newer and has no checkpoint."""
    newer = folder / "runs" / "stopped-early"
    newer.mkdir(exist_ok=True)
    shutil.copy(folder / "runs" / "done" / "recipe.toml", newer / "recipe.toml")
    os.utime(newer / "recipe.toml", (4e9, 4e9))
    return newer


@pytest.mark.heavy
def test_the_newest_run_with_a_checkpoint_answers_and_is_named(trained, monkeypatch, capsys):
    newer = add_newer_run(trained)
    monkeypatch.chdir(trained)
    assert Run.load_newest().folder.name == newer.name
    assert main(["predict", "runs/done/sample.png"]) == 0
    assert capsys.readouterr().out.startswith("runs/done, checkpoint 23, validation accuracy ")
    assert main(["export", "--to", "model.safetensors"]) == 0
    assert "runs/done, checkpoint 23" in capsys.readouterr().out
    shutil.rmtree(newer)


@pytest.mark.heavy
def test_without_any_checkpoint_the_newest_run_is_named(tmp_path, trained, monkeypatch, capsys):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    shutil.copy(trained / "runs" / "done" / "recipe.toml", tmp_path / "runs" / "one")
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "x.png"]) == 2
    assert capsys.readouterr().err == "podscale: no run under runs has a checkpoint yet; the newest is runs/one\n"


@pytest.mark.heavy
def test_json_of_predict_is_all_that_it_prints(trained):
    done = run_podscale(trained, "predict", "runs/done/sample.png", "--run", "runs/done", "--json")
    assert done.stderr == ""
    assert json.loads(done.stdout)["checkpoint"] == 23


def test_progress_is_no_part_of_a_result(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("podscale.report.counter.LINE_INTERVAL_S", 0.0)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.new("RGB", (8, 8), (i, 0, ord(name[0]))).save(tmp_path / name / f"{i}.png")
    assert main(["data", "check", str(tmp_path)]) == 0
    output = capfd.readouterr()
    assert "checking images" in output.err
    assert "checking images" not in output.out


def test_a_tilde_is_the_home_folder(trained, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(trained))
    assert main(["predict", "--run=~/runs/done", "~/runs/done/sample.png"]) == 0
    shutil.copy(trained / "runs" / "done" / "recipe.toml", trained / "mine.toml")
    assert podscale.load_recipe("~/mine.toml").model.width == 4


def test_finetuning_without_weights_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "finetune", "--data.path", str(tmp_path)]) == 2
    sentence = capsys.readouterr().err
    assert "name initial weights with --init (a run's folder, a .safetensors file, torchvision's" in sentence
    assert not (tmp_path / "runs").exists()


def test_a_batch_that_cannot_fit_is_refused_with_one_that_does(tmp_path):
    recipe = podscale.load_recipe("digits").override(
        {"batch.size": 2**24, "batch.span": 2**10, "data.image_size": 64, "model.width": 4}
    )
    with pytest.raises(UserError, match=r"batch.size 16,777,216 needs about .* GiB of memory per device") as error:
        podscale.train(recipe, pod=podscale.find_pod(virtual="1x1"), folder=tmp_path / "run")
    fitting = int(str(error.value).rpartition("--batch.size ")[2].split()[0])
    assert 128 < fitting < 2**24
    assert not (tmp_path / "run").exists()


@pytest.mark.heavy
def test_a_batch_larger_than_the_data_set_is_warned_of(tmp_path, capsys):
    recipe = podscale.load_recipe("digits").override(TINY | {"batch.size": 2048, "batch.span": 64})
    podscale.train(recipe, pod=podscale.find_pod(virtual="1x1"), folder=tmp_path / "run", console=Console(width=300))
    expected = "warning: batch.size 2,048 exceeds the 1,437 training images; each update repeats some of them"
    assert expected in capsys.readouterr().out


def test_a_decoder_that_was_not_built_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(decode, "native", None)
    monkeypatch.delenv("PODSCALE_DECODER", raising=False)
    recipe = podscale.load_recipe("imagefolder")
    digits = open_index(podscale.load_recipe("digits").data)
    program = SimpleNamespace(data=digits, plan=SimpleNamespace(recipe=recipe))
    (text,) = list_warnings(program, {"decoder": decode.select_decoder()}, is_new=True)
    assert text.startswith("using the slow Pillow decoder; install gcc and libjpeg-dev and reinstall Podscale")
    assert list_warnings(program, {"decoder": decode.select_decoder()}, is_new=False) == []


def test_suggested_commands_quote_paths(tmp_path, capsys):
    recipe = podscale.load_recipe("imagefolder").override({"data.path": "my photos"})
    digits = open_index(podscale.load_recipe("digits").data)
    unreadable = SimpleNamespace(list_unreadable=lambda: [3, 4])
    data = SimpleNamespace(train=digits.train, val=unreadable, warnings=())
    program = SimpleNamespace(data=data, plan=SimpleNamespace(recipe=recipe))
    (text,) = list_warnings(program, {"decoder": "native"}, is_new=True)
    assert text.endswith("`podscale data check 'my photos'` lists all")
    summary = {"run": "my run", "seconds": {}, "accuracy": None, "compile_s": 0, "train_s": 1.0, "images_per_s": 0}
    show_summary(summary, Console(width=200))
    assert "predict 'my run/sample.png' --run 'my run'" in capsys.readouterr().out


def test_a_folder_in_place_of_a_recipe_is_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my photos").mkdir()
    assert main(["train", "my photos"]) == 2
    expected = "train on its images with `podscale train imagefolder --data.path 'my photos'`"
    assert capsys.readouterr().err == f"podscale: my photos is a folder, not a recipe; {expected}\n"


# --- a model of one's own ------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_users_own_model_is_trained_and_used_from_the_command_line(tmp_path):
    shutil.copy(EXAMPLES / "own_model.py", tmp_path / "my_model.py")
    options = ("--model.name", "plain", "--model.width", "4", "--train.epochs", "0.2", "--run", "run")
    assert "--import FILE.py loads your own" in run_refused(tmp_path, "train", "digits", *options)
    code = ("--import", "my_model.py")
    assert run_json(tmp_path, "train", "digits", *options, *code, "--json")["steps"] == 3
    sentence = run_refused(tmp_path, "predict", "run/sample.png", "--run", "run")
    source = tmp_path / "my_model.py"
    assert sentence == f"run has the model 'plain' of {source}; add --import {source}"
    assert len(run_json(tmp_path, "predict", "run/sample.png", "--run", "run", *code, "--json")["images"]) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no such file; check the path"),
        ("import nowhere_at_all", "failed in line 1: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("x = (", "SyntaxError"),
        ("\nraise SystemExit(3)", "failed in line 2: SystemExit: 3"),
    ],
)
def test_what_is_wrong_with_imported_code_is_one_sentence(tmp_path, monkeypatch, capsys, content, words):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("broken.py").write_text(content)
    assert main(["train", "digits", "--import", "broken.py"]) == 2
    output = capsys.readouterr().err
    assert output.startswith("podscale: --import broken.py")
    assert words in output
    assert output.count("\n") == 1
