"""Claim: with Muon, larger batches lose less than with SGD and LARS, at the same number of epochs.

All are tuned alike. A study of settings (such as studies/imagewoof-peaks.toml) is evaluated on images that are held
out of training. The best setting of each optimizer for each batch is then trained on all training images, with several
seeds, and the validation set is read once per run. LARS is trained in its other form too, with the same settings. In
the end the largest batch is reported that loses at most so many points, against the best small batch of all and
against its own.

    python benchmarks/large_batch.py studies/imagewoof-peaks.toml imagewoof-128 [--seeds 0,1,2] [--processes 2]
        [--run runs/large-batch] [--points 0.3] [--minutes 25]

On a GPU, one process first compiles a program for each batch: kernels are chosen by timing them, and should have the
GPU to themselves for that. Finished trainings are kept: the same command resumes.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from podscale.errors import UserError
from podscale.study import grid
from podscale.study.grid import Case, Study
from podscale.training.divergence import BUNDLE

NAMES = {"muon": "Muon", "sgd": "SGD", "lars": "LARS", "adamw": "AdamW"}
OTHER_FORM = "LARS, scaled momentum"
HOLD_OUT = "data.hold_out"
SIZE = "batch.size"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peaks", type=Path, help="the study of settings")
    parser.add_argument("data", help="the images")
    parser.add_argument("--seeds", default="0,1,2", help="of the trainings that count")
    parser.add_argument("--processes", type=int, default=2, help="that train at a time")
    parser.add_argument("--run", type=Path, default=Path("runs/large-batch"))
    parser.add_argument("--points", type=float, default=0.3, help="of accuracy that a larger batch may lose")
    parser.add_argument("--minutes", type=float, default=0, help="after which to stop; 0: never")
    arguments = parser.parse_args()
    if arguments.processes < 1:
        parser.error("--processes must be at least 1")
    if not all(seed.isdecimal() for seed in arguments.seeds.split(",")):
        parser.error(f"--seeds are whole numbers with commas, not {arguments.seeds!r}")
    study = load_settings(arguments.peaks)
    arguments.run.mkdir(parents=True, exist_ok=True)
    arguments.deadline = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    if shutil.which("nvidia-smi"):
        compile_programs(arguments, study)
    train(arguments, arguments.peaks, "peaks")
    batch_study = arguments.run / "batch.toml"
    batch_study.write_text(make_batch_study(arguments.peaks, study, read_results(arguments.run / "peaks")))
    train(arguments, batch_study, "batch", "--seeds", arguments.seeds)
    print_results(arguments, grid.load_study(batch_study), read_results(arguments.run / "batch"))


def load_settings(peaks: Path) -> Study:
    """Return the study of settings; exit if no best setting can be chosen from it."""
    study = grid.load_study(peaks)
    if not all(case.recipe.data.hold_out for case in study.cases):
        raise SystemExit(f"{peaks} chooses by the validation set; give it {HOLD_OUT}")
    tables = tomllib.loads(peaks.read_text())
    case_tables = tables.get("case", [])
    if (
        set(tables) - {"recipe", "seeds", "set", "case"}
        or not case_tables
        or any("recipe" in case for case in case_tables)
    ):
        raise SystemExit(f"{peaks} must have a [[case]] for every setting, all of one recipe, and no grid")
    keys = {get_setting_key(case) for case in study.cases}
    for name, size in itertools.product(*map(sorted, map(set, zip(*keys, strict=True)))):
        if (name, size) not in keys:
            raise SystemExit(f"{peaks} has no setting of {name} for batches of {size}")
    return study


def get_setting_key(case: Case) -> tuple[str, int]:
    """Return the optimizer and the batch for which the best setting is chosen."""
    name = case.recipe.optimizer.name
    return NAMES.get(name, name), case.recipe.batch.size


# --- training ------------------------------------------------------------------------------------------------------


def compile_programs(arguments: argparse.Namespace, study: Study) -> None:
    """Compile a program for every batch, by a few updates in one process."""
    first = {case.recipe.batch.size: case for case in reversed(study.cases)}
    tables = tomllib.loads(arguments.peaks.read_text())
    names = {case.name for case in first.values()}
    tables["case"] = [table for table in tables["case"] if table["name"] in names]
    short_study = arguments.run / "tuning.toml"
    short_study.write_text(to_toml(tables, {"train.epochs": 0.2}))
    train(arguments, short_study, "tuning", process_count=1)


def train(arguments: argparse.Namespace, study: Path, name: str, *more: str, process_count: int = 0) -> None:
    """Run all trainings of a study, in processes that share its folder."""
    count = process_count or arguments.processes
    command = [sys.executable, "-m", "podscale", "study", study, "--run", arguments.run / name]
    command += ["--data.path", arguments.data, *more]
    cache = {"JAX_COMPILATION_CACHE_DIR": str((arguments.run / "compiled").absolute())}
    memory_share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.85 / count:.2f}"}
    logs = [(arguments.run / f"{name}-{number}.log").open("a") for number in range(count)]
    environment = os.environ | cache | memory_share
    processes = [subprocess.Popen(command, env=environment, stdout=log, stderr=log) for log in logs]
    print(f"{name}: {count} at a time; they write to {logs[0].name}", flush=True)
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(0.2)
            if time.monotonic() > arguments.deadline:
                raise SystemExit("the time is up; the same command goes on")
    finally:  # also if this process is interrupted: none is left behind
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait()
    reason = explain_unfinished_study(arguments.run / name)
    if reason:
        raise SystemExit(f"not all of {study} was trained: {reason}; {logs[0].name} has more")


def explain_unfinished_study(folder: Path) -> str:
    """Return why a study lacks a result; "" if it does not. A diverged training counts as a result."""
    cases = read_results(folder).values()
    counts = {len(case["runs"]) for case in cases}
    if len(counts) != 1 or 0 in counts:
        return "its processes ended before"
    failed = [run for case in cases for run in case["runs"] if "error" in run]
    return next((run["error"] for run in failed if not (folder / run["run"] / BUNDLE).exists()), "")


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results of a study by case; none if it has not started."""
    file = folder / "study.json"
    return {case["case"]: case for case in json.loads(file.read_text())["cases"]} if file.exists() else {}


# --- choosing ------------------------------------------------------------------------------------------------------


def make_batch_study(peaks: Path, study: Study, results: dict[str, dict[str, Any]]) -> str:
    """Return the study of larger batches as TOML: for each optimizer and batch, the best setting."""
    best: dict[tuple[str, int], Case] = {}
    for case in study.cases:
        if get_setting_key(case) not in best or accuracy(results, case) > accuracy(
            results, best[get_setting_key(case)]
        ):
            best[get_setting_key(case)] = case
    tables = tomllib.loads(peaks.read_text())
    case_tables = {case["name"]: grid.flatten_fields(case["set"], "set") for case in tables["case"]}
    names = list(dict.fromkeys(name for name, _ in best))
    cases = [{"name": name, "set": {}} for name in names]
    overrides = [
        {
            "case": name,
            "grid": {SIZE: size},
            "set": {field: v for field, v in case_tables[case.name].items() if field != SIZE},
        }
        for (name, size), case in best.items()
    ]
    if "LARS" in names:
        cases.append({"name": OTHER_FORM, "set": {"optimizer.form": "scaled"}})
        overrides += [override | {"case": OTHER_FORM} for override in overrides if override["case"] == "LARS"]
    common = {field: value for field, value in grid.flatten_fields(tables["set"], "set").items() if field != HOLD_OUT}
    sizes = sorted({size for _, size in best})
    return to_toml({"recipe": tables["recipe"], "set": common, "grid": {SIZE: sizes}, "case": cases, "at": overrides})


def accuracy(results: dict[str, dict[str, Any]], case: Case) -> float:
    """Return the accuracy on held-out images; a diverged training has 0."""
    return results[case.name]["mean"] or 0.0


def to_toml(tables: dict[str, Any], changes: dict[str, Any] | None = None) -> str:
    """Return a study as TOML."""
    common = grid.flatten_fields(tables["set"], "set") | (changes or {})
    lines = [f"recipe = {json.dumps(tables['recipe'])}", "seeds = [0]", "", "[set]", *format_fields(common)]
    if "grid" in tables:
        lines += ["", "[grid]", *format_fields(tables["grid"])]
    for kind in ("case", "at"):
        for table in tables.get(kind, []):
            lines += [
                "",
                f"[[{kind}]]",
                *format_fields({key: v for key, v in table.items() if key in ("name", "case")}),
            ]
            for part in ("grid", "set"):
                inner = grid.flatten_fields(table.get(part, {}), part)
                lines += format_fields({f"{part}.{field}": value for field, value in inner.items()})
    return "\n".join(lines) + "\n"


def format_fields(values: dict[str, Any]) -> list[str]:
    return [f"{name} = {json.dumps(value)}" for name, value in values.items()]


# --- reporting -----------------------------------------------------------------------------------------------------


def print_results(arguments: argparse.Namespace, study: Study, results: dict[str, dict[str, Any]]) -> None:
    """Print the table, and the largest batch of each optimizer."""
    table: dict[str, dict[int, dict[str, Any]]] = {}
    for case in study.cases:
        table.setdefault(case.values["case"], {})[case.values[SIZE]] = results[case.name]
    sizes = sorted(next(iter(table.values())))
    print(f"{'':24}" + "".join(f"{size:>16,}" for size in sizes))
    for name, row in table.items():
        print(f"{name:24}" + "".join(f"{format_percent(row[size]):>16}" for size in sizes))
    best_small = max(row[sizes[0]]["mean"] or 0.0 for row in table.values())
    for name, row in table.items():
        against_all = find_largest_batch(row, best_small, arguments.points)
        against_own = find_largest_batch(row, row[sizes[0]]["mean"] or 0.0, arguments.points)
        print(f"{name}: the largest batch within {arguments.points} points: {against_all}; of its own: {against_own}")


def format_percent(case: dict[str, Any]) -> str:
    if case["mean"] is None:
        return "diverged"
    return f"{100 * case['mean']:.2f} ± {100 * (case['deviation'] or 0.0):.2f}"


def find_largest_batch(row: dict[int, dict[str, Any]], best_small: float, points: float) -> str:
    """Return the largest batch whose mean accuracy is within `points` of `best_small`."""
    near = [size for size, case in row.items() if (case["mean"] or 0.0) >= best_small - points / 100]
    return f"{max(near):,}" if near else "none"


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        raise SystemExit(str(error)) from None
