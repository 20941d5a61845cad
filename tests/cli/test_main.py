"""The command line in real processes: one JSON object, and one sentence for every mistake."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from support.command_line import run_json, run_podscale, run_refused

from podscale import recipe as recipes
from podscale.cli.main import main
from podscale.cli.parser import make_parser
from podscale.models.registry import list_models
from podscale.recipe import list_presets

COMMANDS = [
    ("train",),
    ("launch",),
    ("eval",),
    ("predict",),
    ("export",),
    ("report",),
    ("watch",),
    ("doctor",),
    ("completion",),
    ("plan",),
    ("recipes",),
    ("bench",),
    ("bench", "step"),
    ("data",),
]
COMMANDS += [("study",), ("rehearse",), ("bench", "input"), ("bench", "sum")]
COMMANDS += [("data", "index"), ("data", "check"), ("data", "show"), ("data", "prepare")]
DIGITS = ("train", "digits", "--model.width", "4", "--train.epochs", "2", "--run", "run", "--json")


def read_contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def run_refused_unchanged(folder, *arguments):
    """Run a command that is refused and changes nothing, and return its one sentence."""
    before = read_contents(folder)
    sentence = run_refused(folder, *arguments)
    assert read_contents(folder) == before
    return sentence


# --- help ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        "from podscale.cli import parser; parser.make_parser().format_help()",
        "from podscale.processes import launch; launch.launch_processes(['--help'], 1)",
        "import podscale.processes.elastic.launcher",
    ],
    ids=["help", "launch", "launch --elastic"],
)
def test_what_only_helps_or_launches_imports_no_jax(tmp_path, use):
    program = (
        f"import sys; {use}; "
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'jax', 'flax', 'optax', 'orbax', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_mistake_in_the_command_imports_no_jax(tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "podscale", "train", "digits", "--train.epochs", "many"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "podscale.recipe" in done.stderr
    assert not re.search(r"\| +(jax|flax)\b", done.stderr)
    assert not os.listdir(tmp_path)


def test_help_lists_every_command(tmp_path):
    done = run_podscale(tmp_path, "--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for command in COMMANDS:
        assert command[0] in done.stdout
    assert "example: podscale " in done.stdout


@pytest.mark.parametrize("command", [[], ["data"], ["bench"]])
def test_a_command_that_needs_another_prints_its_help(command, capsys):
    assert main(command) == 0
    assert "COMMAND ..." in (output := capsys.readouterr().out) or "WHAT ..." in output


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"podscale {metadata.version('podscale')}\n")


def test_the_help_of_training_starts_with_common_options_and_shows_the_recipes_own_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["train", "imagefolder", "--help"])
    text = capsys.readouterr().out
    lines, words = text.splitlines(), " ".join(text.split())
    assert lines[0] == "usage: podscale train [RECIPE] [options]"
    order = ("--data.path", "--batch.size", "--init", "--allow-changed", "--from-scratch", "--data.source")
    positions = [text.index(option) for option in (*order, "--plan.summation")]
    assert positions == sorted(positions)
    assert "images per update, over the whole pod (default: 64)" in words
    assert "--optimizer.name lars|sgd|adamw|muon|rmsprop the update rule (default: muon)" in words
    assert "--plan.payload float32|bfloat16" in words
    assert "as the recipe says" not in words
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "images per update, over the whole pod (default: 128)" in " ".join(capsys.readouterr().out.split())


def test_the_help_of_training_names_every_kind_of_model(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    words = " ".join(capsys.readouterr().out.split()).partition("--model.name TEXT ")[2].partition(" --")[0]
    for name in list_models():
        family, size = re.fullmatch(r"([a-z]+)_?([a-z]*\d*)", name).groups()
        assert family in words
        assert size in words or re.fullmatch(r"(b|lite)[1-4]", size), name  # those between the first and the last


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as end:
        make_parser().parse_args([*command, "--help"])
    assert end.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"example: podscale {' '.join(command)}" in output


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["data", "prepare", "PHOTOS", "--quailty", "80"], "there is no option --quailty here: did you mean --quality"),
        (["data", "prepare", "PHOTOS", "--to", "PACKED"], "there is no option --to here: "),
        (["train", "digits", "--batch.sise=3"], "there is no option --batch.sise here: did you mean --batch.size"),
    ],
)
def test_suggested_options_are_those_of_the_command(command, words, capsys):
    assert main(command) == 2
    output = capsys.readouterr().err
    assert words in output
    assert "mean --to" not in output


# --- JSON ----------------------------------------------------------------------------------------------------------


def test_recipes_are_listed(tmp_path):
    assert run_json(tmp_path, "recipes", "--json") == list_presets()
    assert "resnet50-imagenet-32k" in run_podscale(tmp_path, "recipes").stdout


@pytest.mark.heavy
def test_a_plan_for_the_papers_pod_needs_neither_pod_nor_data(tmp_path):
    result = run_json(tmp_path, "plan", "resnet50-imagenet-32k", "--pod", "v3:32x32", "--no-compile", "--json")
    assert (result["pod"]["devices"], result["images_per_device"], result["steps"]) == (2048, 16, 2816)
    assert 20e6 * 4 < result["bytes_per_device"]["parameters"] < 300e6
    assert not os.listdir(tmp_path)


@pytest.mark.heavy
def test_the_forecast_is_compared_with_published_trainings(tmp_path):
    result = run_json(tmp_path, "plan", "--published", "--json")
    assert result["median_error"] <= 0.15
    assert result["largest_error"] <= 0.30
    output = run_podscale(tmp_path, "plan", "--published").stdout
    assert "76.97 s" in output
    assert "median error" in output
    half = run_json(tmp_path, "plan", "--published", "first", "--json")
    assert {"0.7/Google/tpu-v3-8192-JAX", "1.1/NVIDIA/dgxa100_n540_ngc21.09_mxnet"} <= {
        run["name"] for run in half["runs"]
    }


@pytest.mark.heavy
def test_a_search_draws_its_plot(tmp_path):
    done = run_podscale(tmp_path, "plan", "resnet50-imagenet-32k", "--search", "v3:256", "--plot", "scaling.svg")
    assert done.returncode == 0, done.stderr
    assert "chip-hours" in done.stdout
    assert (tmp_path / "scaling.svg").read_text().startswith("<svg")


@pytest.mark.heavy
def test_a_plan_on_virtual_devices(tmp_path):
    result = run_json(tmp_path, "plan", "digits", "--pod.virtual", "2x2", "--plan.micro_batches", "2", "--json")
    assert (result["pod"]["devices"], result["micro_batches"], result["tile"]) == (4, 2, [2, 2])


@pytest.mark.heavy
def test_the_step_is_timed(tmp_path):
    result = run_json(tmp_path, "bench", "step", "digits", "--images", "8", "--repeats", "1", "--json")
    assert result["images_per_device"] == 8
    assert result["images_per_s"] == pytest.approx(8e3 / result["step_ms"])
    assert len(result["step_ms_all"]) == 1


# --- a run from beginning to end -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a short run of digits in it, and the summary of the training."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, run_json(folder, *DIGITS)


@pytest.mark.heavy
def test_training_prints_its_summary(trained):
    folder, summary = trained
    assert (summary["run"], summary["recipe"], summary["steps"]) == ("run", "digits", 23)
    assert json.loads((folder / "run" / "summary.json").read_text()) == summary
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "train"] == list(range(1, 24))
    assert sum(line["event"] == "eval" for line in lines) == 1
    for name in ("recipe.toml", "plan.json", "classes.json", "sample.png", "checkpoints", "tensorboard"):
        assert (folder / "run" / name).exists()


@pytest.mark.heavy
def test_the_same_command_again_has_nothing_to_do(trained):
    folder, summary = trained
    checkpoints = read_contents(folder / "run" / "checkpoints")
    metrics = (folder / "run" / "metrics.jsonl").read_bytes()
    assert run_json(folder, *DIGITS) == summary
    assert read_contents(folder / "run" / "checkpoints") == checkpoints
    assert (folder / "run" / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.heavy
def test_evaluation_gives_the_accuracy_of_training(trained):
    folder, summary = trained
    result = run_json(folder, "eval", "--run", "run", "--json")
    assert (result["accuracy"], result["examples"], result["checkpoint"]) == (summary["accuracy"], 360, 23)


@pytest.mark.heavy
def test_prediction_classifies_images(trained):
    folder, _ = trained
    shutil.copy(folder / "run" / "sample.png", folder / "a[red].png")
    result = run_json(folder, "predict", "run/sample.png", "a[red].png", "--run", "run", "--json")
    first, second = result["images"]
    assert (first["image"], second["image"]) == ("run/sample.png", "a[red].png")
    assert first["top"] == second["top"]
    assert len(first["top"]) == 5
    chances = [guess["probability"] for guess in first["top"]]
    assert chances == sorted(chances, reverse=True)
    assert 0 < sum(chances) <= 1 + 1e-6


@pytest.mark.heavy
def test_file_names_are_printed_without_markup(trained):
    folder, _ = trained
    shutil.copy(folder / "run" / "sample.png", folder / "b[red].png")
    assert "b[red].png" in run_podscale(folder, "predict", "b[red].png", "--run", "run").stdout


@pytest.mark.heavy
def test_a_finished_run_without_its_summary_still_prints_one(trained, tmp_path):
    """The process was killed after the last checkpoint and before the summary."""
    folder, summary = trained
    shutil.copytree(folder / "run", tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    result = run_json(tmp_path, *DIGITS)
    assert (result["steps"], result["best_accuracy"]) == (23, summary["best_accuracy"])


@pytest.mark.heavy
def test_a_run_killed_in_the_middle_of_a_line_resumes(trained, tmp_path):
    folder, summary = trained
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"event": "tr')
    result = run_json(tmp_path, *DIGITS, "--from-scratch")
    assert (result["steps"], result["accuracy"]) == (23, summary["accuracy"])


# --- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_another_recipe_is_refused_in_a_run_folder(trained):
    folder, _ = trained
    sentence = run_refused_unchanged(folder, *DIGITS, "--train.epochs", "3")
    assert sentence.startswith("run holds a run of another recipe (train.epochs 2.0, now 3.0)")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("eval", "--run", "run", "--checkpoint", "7"), "run has no checkpoint '7'"),
        (("eval", "--run", "run", "--model.width", "32"), "there is no option --model.width"),
        (("eval", "--run", "nowhere"), "nowhere"),
        (("predict", "nowhere.png", "--run", "run"), "there is no image file nowhere.png"),
        (("predict", "run/plan.json", "--run", "run"), "run/plan.json"),
        (("predict", "run/sample.png", "--run", "run", "--pod.virtual", "zzz"), "pod"),
    ],
)
def test_mistakes_with_a_run_are_sentences(trained, arguments, words):
    assert words in run_refused_unchanged(trained[0], *arguments)


MISTAKES = [
    (("trian",), "there is no command 'podscale trian': did you mean train?"),
    (("data", "indx"), "did you mean index?"),
    (("train", "digit"), "did you mean digits?"),
    (("train", "nowhere.toml"), "nowhere.toml"),
    (("train", "--optimizer.momentm", "0.9"), "did you mean --optimizer.momentum"),
    (("train", "--jsn"), "did you mean --json"),
    (("train", "digits", "more"), "'more'"),
    (("train", "--train.epochs"), "--train.epochs"),
    (("train", "--train.epochs", "many"), "train.epochs must be a number, not 'many'"),
    (("train", "--train.seed", "9" * 25), "train.seed"),
    (("train", "--batch.span", "96"), "nearest that do: 64, 128"),
    (("train", "--model.name", "resnet51"), "did you mean resnet50"),
    (("train", "--pod.shape", "3x3"), "try 4x4"),
    (("train", "--plan.summation", "rings"), "plan.summation cannot be 'rings'"),
    (("train", "--plan.micro_batches", "-2"), "plan.micro_batches"),
    (("train", "--until", "loss=3"), "--until"),
    (("train", "--run", "file.txt"), "file.txt"),
    (("train", "--run", "file.txt/run"), "file.txt"),
    (("plan", "--pod", "v9:2x2"), "'v9'"),
    (("plan", "--pod", "v3:0x2"), "ROWSxCOLUMNS"),
    (("plan", "--search", "v3:none"), "KIND or KIND:CHIPS"),
    (("plan", "digits", "--pod.virtual", "2x2", "--plot", "a.svg"), "--plot needs a kind of chip"),
    (("plan", "--search", "v3", "--chip-hours", "many"), "argument --chip-hours: must be a number, not 'many'"),
    (("study", "file.txt", "--seeds", "a,b"), "argument --seeds: must be whole numbers separated by commas"),
    (("watch", "--port", "http"), "argument --port: must be a whole number, not 'http'"),
    (("eval",), "there is no run under runs"),
    (("bench", "step", "digits", "--images", "8", "--repeats", "0"), "repeats"),
    (("bench", "step", "digits", "--images", "8", "--evaluate", "--profile"), "leave out --evaluate"),
    (("export", "--to", "x.onnx"), "there is no run under runs"),
    (("export", "nowhere", "--to", "x.onnx"), "there is no run in nowhere"),
    (("export", "--run", "nowhere", "--to", "x.onnx"), "there is no run in nowhere"),
    (("export", "nowhere", "--run", "runs/one", "--to", "x.onnx"), "argument --run: not allowed with argument RUN"),
    (("watch", "--run", "nowhere"), "there is no run in nowhere"),
    (("watch",), "there is no run under runs; train one first, or name its folder with --run"),
    (("report",), "there is no run under runs; train one first, or name its folder with --run"),
    (("report", "--run", "nowhere"), "there is no run in nowhere"),
    (("report", "nowhere"), "there is no run in nowhere"),
    (("export",), "--to"),
    (("data", "index"), "PATH"),
    (("data", "index", "nowhere"), "there is no folder nowhere"),
    (("data", "index", "file.txt"), "file.txt is a file"),
    (("data", "index", ".", "--source", "zip"), "invalid choice: 'zip'"),
    (("data", "prepare", ".", "to", "--source", "npz"), "invalid choice: 'npz'"),
    (("data", "prepare", "nowhere"), "DST"),
    (("data", "prepare", "nowhere", "to"), "there is no folder nowhere"),
    (("data", "prepare", ".", "."), "holds no class folders with images; it must hold train/CLASS/FILE"),
    (("data", "prepare", ".", ".", "--source", "tar"), "is the source itself"),
    (("data", "prepare", ".", "to", "--source", "tar"), "is inside "),
    (("data", "prepare", ".", "to", "--longest", "many"), "--longest"),
    (("data", "prepare", ".", "to", "--longest", "0"), "--longest is 0"),
    (("data", "prepare", ".", "to", "--quality", "-3"), "--quality is -3"),
    (("data", "prepare", ".", "to", "--subsampling", "411"), "420 or 444"),
    (("data", "prepare", ".", "to", "--lnogest", "3"), "did you mean --longest"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_one_sentence_and_writes_nothing(tmp_path, monkeypatch, capfd, arguments, words):
    (tmp_path / "file.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert main(list(arguments)) == 2
    output = capfd.readouterr().err
    assert output.startswith("podscale: ")
    assert output.count("\n") == 1
    assert words in output
    assert read_contents(tmp_path) == {"file.txt": b"mine"}


@pytest.mark.parametrize(
    ("error", "code"), [(RuntimeError("DEADLINE_EXCEEDED: nobody is there"), 69), (ValueError("no such port"), 2)]
)
def test_processes_that_cannot_join_each_other_end_with_a_code_that_restarts(error, code, monkeypatch, capfd):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    join = ["--coordinator", "192.0.2.1:4000", "--processes", "2", "--process", "1"]
    assert main(["train", "digits", *join]) == code
    assert "cannot join the others at 192.0.2.1:4000: " in capfd.readouterr().err


def test_a_typo_in_a_recipe_file_is_found(tmp_path):
    (tmp_path / "mine.toml").write_text('[optimizer]\nmomentm = 0.9\nname = "sgd"\n')
    assert "section optimizer has no field 'momentm': did you mean momentum" in run_refused_unchanged(
        tmp_path, "train", "mine.toml", "--run", "run"
    )
    assert not (tmp_path / "run").exists()


# --- folders of images ---------------------------------------------------------------------------------------------

PHOTOS = """
[data]
source = "folder"
path = "photos"
image_size = 16
[model]
width = 8
[batch]
size = 8
span = 8
[train]
epochs = 2
eval_epochs = 1
"""


@pytest.fixture
def photos(tmp_path):
    """Twelve JPEGs of two classes, bright and dark, and a recipe for them."""
    random = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for number in range(count):
            folder = tmp_path / "photos" / split / ("bright", "dark")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 100, (24, 32, 3), dtype=np.uint8) + np.uint8(0 if number % 2 else 150)
            Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=95)
    (tmp_path / "mine.toml").write_text(PHOTOS)
    return tmp_path


@pytest.mark.heavy
def test_a_folder_of_photos_trains(photos):
    before = read_contents(photos / "photos")
    summary = run_json(photos, "train", "mine.toml", "--json")
    assert summary["steps"] == 2
    assert summary["run"] == f"runs/mine-{recipes.load_recipe(photos / 'mine.toml').digest()}"
    result = run_json(photos, "predict", "photos/val/dark/1.jpg", "--json")
    assert {guess["class"] for guess in result["images"][0]["top"]} == {"bright", "dark"}
    assert read_contents(photos / "photos") == before


def read_losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] in ("train", "eval")]


@pytest.mark.slow
def test_prepared_photos_train_to_the_same_numbers(photos):
    before = read_contents(photos / "photos")
    result = run_json(photos, "data", "prepare", "photos", "prepared", "--json")
    assert (result["images"], result["classes"], result["already"]) == ({"train": 8, "val": 4}, 2, False)
    assert result["prepared"] == "prepared"
    again = run_podscale(photos, "data", "prepare", "photos", "prepared")
    assert again.returncode == 0
    assert "already prepared" in again.stdout
    assert "--data.source tar --data.path prepared" in again.stdout
    run_json(photos, "train", "mine.toml", "--run", "one", "--json")
    run_json(photos, "train", "mine.toml", "--run", "two", "--data.source", "tar", "--data.path", "prepared", "--json")
    assert len(read_losses(photos / "one")) == 4  # two updates, two evaluations
    assert read_losses(photos / "one") == read_losses(photos / "two")
    assert read_contents(photos / "photos") == before


def test_the_index_of_photos_is_shown(photos):
    result = run_json(photos, "data", "index", "photos", "--json")
    assert (result["source"], result["classes"], result["kept"]) == ("folder", ["bright", "dark"], False)
    output = run_podscale(photos, "data", "index", "photos").stdout
    assert "2: bright, dark" in output
    assert "8 images, 4 per class" in output
    assert "smallest 32 x 24" in output
    assert "8 .jpg" in output


def test_an_unreadable_image_stops_preparing_and_is_named(photos):
    path = photos / "photos" / "train" / "dark" / "3.jpg"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "photos/train/dark/3.jpg" in run_refused(photos, "data", "prepare", "photos", "prepared")


def test_data_is_indexed_and_prepared_without_jax(photos):
    for command in (["index", "photos"], ["prepare", "photos", "prepared"]):
        program = (
            "import sys; from podscale.cli.main import main; "
            f"main(['data', *{command}]); sys.exit('jax' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", program], cwd=photos, check=False).returncode == 0


def test_a_wrong_path_is_named(photos):
    sentence = run_refused_unchanged(photos, "train", "mine.toml", "--data.path", "nowhere")
    assert "data.path nowhere does not exist" in sentence


def test_an_empty_folder_is_named(photos):
    (photos / "empty").mkdir()
    assert "empty is empty" in run_refused_unchanged(photos, "train", "mine.toml", "--data.path", "empty")


@pytest.mark.heavy
def test_an_empty_class_and_a_broken_file_are_reported_and_training_goes_on(photos):
    (photos / "photos" / "train" / "grey").mkdir()
    (photos / "photos" / "train" / "dark" / "3.jpg").write_bytes(b"")
    done = run_podscale(photos, "train", "mine.toml", "--run", "run")
    assert done.returncode == 0, done.stderr
    assert "warning: class folder photos/train/grey holds no images" in done.stdout
    assert "cannot read photos/train/dark/3.jpg" in done.stdout
    words = " ".join(done.stdout.split())
    assert "warning: 1 image cannot be read: it is replaced in training and counts as wrong in validation;" in words
    assert "`podscale data check photos` lists all" in words
    assert "photos/train/dark/3.jpg" in (photos / "run" / "bad-images-0.txt").read_text()


@pytest.mark.heavy
@pytest.mark.parametrize("victim", ["train/dark/3.jpg", "val/bright/2.jpg"])
def test_a_truncated_jpeg_is_named_where_none_is_tolerated(photos, victim):
    path = photos / "photos" / victim
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = read_contents(photos / "photos")
    sentence = run_refused(photos, "train", "mine.toml", "--run", "run", "--data.bad_share", "0")
    assert f"photos/{victim}" in sentence
    assert read_contents(photos / "photos") == before


def test_more_unreadable_files_than_allowed_are_counted_before_anything_is_written(photos):
    for name in ("1.jpg", "3.jpg"):
        (photos / "photos" / "train" / "dark" / name).write_text("<html>not found</html>")
    sentence = run_refused_unchanged(photos, "train", "mine.toml")
    assert sentence.startswith("2 of 8 training images cannot be read, and data.bad_share 0.001 allows 1; the first: ")
    assert sentence.endswith("`podscale data check photos` lists all, and a larger --data.bad_share tolerates them")
    result = run_json(photos, "data", "index", "photos", "--json")
    assert result["splits"]["train"]["unreadable"] == [f"photos/train/dark/{name}" for name in ("1.jpg", "3.jpg")]
