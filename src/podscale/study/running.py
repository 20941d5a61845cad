"""Running: the trainings of a study, one after the other. What is done stays done: the same command goes on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from podscale import pod as pods
from podscale import train
from podscale.errors import DivergedError, UserError
from podscale.options import Options
from podscale.pod import Pod
from podscale.run import Claim, Run, to_json, write_atomically
from podscale.study import spread
from podscale.study.grid import Case, Study

LOOK_AGAIN_S = 1.0  # where all that is left is other processes'


def run(study: Study, folder: Path, pod: Pod, options: Options, console: Console) -> dict[str, Any]:
    """Trains what is not trained yet, and returns what all cases came to; `folder` gets the table and the plot.

    Several processes may do so in one folder: each takes what no other is at, and in the end waits for the others'.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"the study's folder {folder} is a file; choose another with --run")
    left = [(case, seed) for seed in study.seeds for case in study.cases]  # all have a result before any has two
    found: dict[tuple[str, int], dict[str, Any]] = {}
    with _programs_kept(folder / "compiled"):
        while left:
            case, seed = next((one for one in left if _free(folder, *one)), (None, 0))
            if case is None:
                time.sleep(LOOK_AGAIN_S)
                continue
            _say(console, f"{len(found) + 1} of {len(found) + len(left)}: {case.name}, seed {seed}")
            one = _one(case, seed, folder, pod, options, console)
            if one is not None:
                left.remove((case, seed))
                found[case.name, seed] = {"seed": seed} | one
                result = spread.summarize(study, _by_case(study, found))
                pods.by_the_first(partial(_write, folder, study, result))
    return result


def _free(folder: Path, case: Case, seed: int) -> bool:
    """Whether no other process is at it just now. Processes of one pod do everything together, in the same order."""
    return jax.process_count() > 1 or Claim(_place(folder, case, seed)).free()


def _place(folder: Path, case: Case, seed: int) -> Path:
    recipe = case.seeded(seed)
    return folder / f"{recipe.name}-{recipe.digest()}"


def _by_case(study: Study, found: dict[tuple[str, int], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What is there so far, in the study's order."""
    there = {
        case.name: [(case.name, seed) for seed in study.seeds if (case.name, seed) in found] for case in study.cases
    }
    return {
        case.name: {"values": case.values, "runs": [found[one] for one in there[case.name]]} for case in study.cases
    }


def _one(case: Case, seed: int, folder: Path, pod: Pod, options: Options, console: Console) -> dict[str, Any] | None:
    """What a training came to: the part of its summary that studies compare, or one sentence on why it did not; None
    if another process was quicker to take it."""
    place = _place(folder, case, seed)
    summary = finished(place)
    if summary is None:
        try:
            summary = train.train(case.seeded(seed), pod=pod, options=options, folder=place, console=console)
        except (UserError, DivergedError) as error:
            if not _free(folder, case, seed):
                return None
            _say(console, f"no result: {error}")
            return {"run": place.name, "error": str(error)}
    else:
        _say(console, f"done before: {place}")
    return {"run": place.name} | {name: summary.get(name) for name in spread.KEPT}


def finished(folder: Path) -> dict[str, Any] | None:
    """The summary of a training that has come to its end; None if it has not, or never began."""
    if not (folder / "recipe.toml").exists():
        return None
    run = Run.load(folder)
    summary = run.summary()
    return summary if summary and summary["steps"] == run.plan().get("steps") else None


def _write(folder: Path, study: Study, result: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "study.json", to_json(result))
    write_atomically(folder / "study.svg", spread.draw(study, result))


@contextmanager
def _programs_kept(folder: Path) -> Iterator[None]:
    """Cases that differ in their seed alone are compiled once, even by different processes."""
    before = jax.config.values["jax_compilation_cache_dir"]
    if not before:
        jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)
