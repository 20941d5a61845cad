"""Claim: with Muon, larger batches lose less than with SGD and LARS, at the same number of epochs.

All are tuned alike. A study of settings (such as studies/imagewoof-peaks.toml) is trained on pictures that are held out
of training. The best setting of each optimizer for each batch is then trained on all training pictures, with several
seeds, and the validation set is read once a run. LARS is trained in its other form too, with the same settings. In the
end it is told which batch is the largest that loses at most so many points, against the best small batch of all and
against its own.

    python benchmarks/large_batch.py studies/imagewoof-peaks.toml imagewoof-128 [--seeds 0,1,2] [--processes 2]
        [--run runs/large-batch] [--points 0.3] [--minutes 25]

Where there is a GPU, one process first compiles a program for each batch: kernels are chosen by timing them, and should
have the GPU to themselves for that. What is done stays done: the same command goes on.
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
    parser.add_argument("data", help="the pictures")
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
    study = settings(arguments.peaks)
    arguments.run.mkdir(parents=True, exist_ok=True)
    arguments.deadline = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    if shutil.which("nvidia-smi"):
        tune(arguments, study)
    train(arguments, arguments.peaks, "peaks")
    chosen = arguments.run / "batch.toml"
    chosen.write_text(batches(arguments.peaks, study, found(arguments.run / "peaks")))
    train(arguments, chosen, "batch", "--seeds", arguments.seeds)
    tell(arguments, grid.load(chosen), found(arguments.run / "batch"))


def settings(peaks: Path) -> Study:
    """The study of settings, if it can be chosen from."""
    study = grid.load(peaks)
    if not all(case.recipe.data.hold_out for case in study.cases):
        raise SystemExit(f"{peaks} chooses by the validation set; give it {HOLD_OUT}")
    tables = tomllib.loads(peaks.read_text())
    own = tables.get("case", [])
    if set(tables) - {"recipe", "seeds", "set", "case"} or not own or any("recipe" in case for case in own):
        raise SystemExit(f"{peaks} must have a [[case]] for every setting, all of one recipe, and no grid")
    tried = {place(case) for case in study.cases}
    for name, size in itertools.product(*map(sorted, map(set, zip(*tried, strict=True)))):
        if (name, size) not in tried:
            raise SystemExit(f"{peaks} has no setting of {name} for batches of {size}")
    return study


def place(case: Case) -> tuple[str, int]:
    """The optimizer and the batch, for which the best setting is looked for."""
    name = case.recipe.optimizer.name
    return NAMES.get(name, name), case.recipe.batch.size


# --- training ------------------------------------------------------------------------------------------------------


def tune(arguments: argparse.Namespace, study: Study) -> None:
    """A few updates with every size of batch, by one process."""
    first = {case.recipe.batch.size: case for case in reversed(study.cases)}
    tables = tomllib.loads(arguments.peaks.read_text())
    tables["case"] = [own for own in tables["case"] if own["name"] in {case.name for case in first.values()}]
    few = arguments.run / "tuning.toml"
    few.write_text(written(tables, {"train.epochs": 0.2}))
    train(arguments, few, "tuning", processes=1)


def train(arguments: argparse.Namespace, study: Path, name: str, *more: str, processes: int = 0) -> None:
    """All trainings of a study, by processes that share its folder."""
    count = processes or arguments.processes
    command = [sys.executable, "-m", "podscale", "study", study, "--run", arguments.run / name]
    command += ["--data.path", arguments.data, *more]
    kept = {"JAX_COMPILATION_CACHE_DIR": str((arguments.run / "compiled").absolute())}
    part = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.85 / count:.2f}"}
    logs = [(arguments.run / f"{name}-{number}.log").open("a") for number in range(count)]
    began = [subprocess.Popen(command, env=os.environ | kept | part, stdout=log, stderr=log) for log in logs]
    print(f"{name}: {count} at a time; they write to {logs[0].name}", flush=True)
    try:
        while any(one.poll() is None for one in began):
            time.sleep(0.2)
            if time.monotonic() > arguments.deadline:
                raise SystemExit("the time is up; the same command goes on")
    finally:  # also where this one is interrupted: none is left behind
        for one in began:
            one.send_signal(signal.SIGTERM)
        for one in began:
            one.wait()
    why = unfinished(arguments.run / name)
    if why:
        raise SystemExit(f"not all of {study} was trained: {why}; {logs[0].name} has more")


def unfinished(folder: Path) -> str:
    """Why a study lacks a result; empty if it does not. That a training diverged is a result."""
    cases = found(folder).values()
    counts = {len(case["runs"]) for case in cases}
    if len(counts) != 1 or 0 in counts:
        return "its processes ended before"
    failed = [run for case in cases for run in case["runs"] if "error" in run]
    return next((run["error"] for run in failed if not (folder / run["run"] / BUNDLE).exists()), "")


def found(folder: Path) -> dict[str, dict[str, Any]]:
    """What the cases of a study came to."""
    file = folder / "study.json"
    return {case["case"]: case for case in json.loads(file.read_text())["cases"]} if file.exists() else {}


# --- choosing ------------------------------------------------------------------------------------------------------


def batches(peaks: Path, study: Study, results: dict[str, dict[str, Any]]) -> str:
    """The study of larger batches: for each optimizer and batch, what was best."""
    best: dict[tuple[str, int], Case] = {}
    for case in study.cases:
        if place(case) not in best or accuracy(results, case) > accuracy(results, best[place(case)]):
            best[place(case)] = case
    tables = tomllib.loads(peaks.read_text())
    own = {case["name"]: grid.flat(case["set"], "set") for case in tables["case"]}
    named = list(dict.fromkeys(name for name, _ in best))
    cases = [{"name": name, "set": {}} for name in named]
    spots = [
        {"case": name, "grid": {SIZE: size}, "set": {field: v for field, v in own[case.name].items() if field != SIZE}}
        for (name, size), case in best.items()
    ]
    if "LARS" in named:
        cases.append({"name": OTHER_FORM, "set": {"optimizer.form": "scaled"}})
        spots += [spot | {"case": OTHER_FORM} for spot in spots if spot["case"] == "LARS"]
    common = {field: value for field, value in grid.flat(tables["set"], "set").items() if field != HOLD_OUT}
    sizes = sorted({size for _, size in best})
    return written({"recipe": tables["recipe"], "set": common, "grid": {SIZE: sizes}, "case": cases, "at": spots})


def accuracy(results: dict[str, dict[str, Any]], case: Case) -> float:
    """Of the pictures that were held out; what diverged is worst."""
    return results[case.name]["mean"] or 0.0


def written(tables: dict[str, Any], changes: dict[str, Any] | None = None) -> str:
    """A study as TOML."""
    common = grid.flat(tables["set"], "set") | (changes or {})
    lines = [f"recipe = {json.dumps(tables['recipe'])}", "seeds = [0]", "", "[set]", *fields(common)]
    if "grid" in tables:
        lines += ["", "[grid]", *fields(tables["grid"])]
    for kind in ("case", "at"):
        for table in tables.get(kind, []):
            lines += ["", f"[[{kind}]]", *fields({key: v for key, v in table.items() if key in ("name", "case")})]
            for part in ("grid", "set"):
                inner = grid.flat(table.get(part, {}), part)
                lines += fields({f"{part}.{field}": value for field, value in inner.items()})
    return "\n".join(lines) + "\n"


def fields(values: dict[str, Any]) -> list[str]:
    return [f"{name} = {json.dumps(value)}" for name, value in values.items()]


# --- telling -------------------------------------------------------------------------------------------------------


def tell(arguments: argparse.Namespace, study: Study, results: dict[str, dict[str, Any]]) -> None:
    """The table, and how far each optimizer goes."""
    table: dict[str, dict[int, dict[str, Any]]] = {}
    for case in study.cases:
        table.setdefault(case.values["case"], {})[case.values[SIZE]] = results[case.name]
    sizes = sorted(next(iter(table.values())))
    print(f"{'':24}" + "".join(f"{size:>16,}" for size in sizes))
    for name, row in table.items():
        print(f"{name:24}" + "".join(f"{percent(row[size]):>16}" for size in sizes))
    small = max(row[sizes[0]]["mean"] or 0.0 for row in table.values())
    for name, row in table.items():
        against_all = largest(row, small, arguments.points)
        against_own = largest(row, row[sizes[0]]["mean"] or 0.0, arguments.points)
        print(f"{name}: the largest batch within {arguments.points} points: {against_all}; of its own: {against_own}")


def percent(case: dict[str, Any]) -> str:
    if case["mean"] is None:
        return "diverged"
    return f"{100 * case['mean']:.2f} ± {100 * (case['deviation'] or 0.0):.2f}"


def largest(row: dict[int, dict[str, Any]], small: float, points: float) -> str:
    """The largest batch whose mean is so near to `small`."""
    near = [size for size, case in row.items() if (case["mean"] or 0.0) >= small - points / 100]
    return f"{max(near):,}" if near else "none"


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        raise SystemExit(str(error)) from None
