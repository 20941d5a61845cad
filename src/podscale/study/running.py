"""Running: the trainings of a study, one after the other. What is done stays done: the same command goes on."""

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
from podscale.run import Run, to_json, write_atomically
from podscale.study import spread
from podscale.study.grid import Case, Study


def run(study: Study, folder: Path, pod: Pod, options: Options, console: Console) -> dict[str, Any]:
    """Trains what is not trained yet, and returns what all cases came to; `folder` gets the table and the plot."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"the study's folder {folder} is a file; choose another with --run")
    found: dict[str, dict[str, Any]] = {case.name: {"values": case.values, "runs": []} for case in study.cases}
    with _programs_kept(folder / "compiled"):
        for number, case, seed in _order(study):
            _say(console, f"{number} of {len(study.cases) * len(study.seeds)}: {case.name}, seed {seed}")
            found[case.name]["runs"].append({"seed": seed} | _one(case, seed, folder, pod, options, console))
            result = spread.summarize(study, found)
            pods.by_the_first(partial(_write, folder, study, result))
    return result


def _order(study: Study) -> Iterator[tuple[int, Case, int]]:
    """Seed by seed, so that every case has a result before any has two."""
    pairs = ((case, seed) for seed in study.seeds for case in study.cases)
    for number, (case, seed) in enumerate(pairs, start=1):
        yield number, case, seed


def _one(case: Case, seed: int, folder: Path, pod: Pod, options: Options, console: Console) -> dict[str, Any]:
    """What a training came to: the part of its summary that studies compare, or one sentence on why it did not."""
    recipe = case.seeded(seed)
    place = folder / f"{recipe.name}-{recipe.digest()}"
    summary = finished(place)
    if summary is None:
        try:
            summary = train.train(recipe, pod=pod, options=options, folder=place, console=console)
        except (UserError, DivergedError) as error:
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
