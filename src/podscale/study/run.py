"""Running: the trainings of a study, one after the other. What is done stays done: the same command goes on."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from podscale.config.options import Options
from podscale.errors import DivergedError, UserError
from podscale.pod import Pod
from podscale.processes import group
from podscale.runs.folder import Run
from podscale.storage.files import to_json, write_atomically
from podscale.storage.lock import FolderLock
from podscale.study import results
from podscale.study.grid import Case, Study
from podscale.training import loop
from podscale.training.compilation import cache_programs_in
from podscale.training.divergence import BUNDLE

LOOK_AGAIN_S = 1.0  # where all that is left is other processes'


def run(study: Study, folder: Path, pod: Pod, options: Options, console: Console) -> dict[str, Any]:
    """Trains what is not trained yet, and returns what all cases came to; `folder` gets the table and the plot.

    Several processes may do so in one folder: each takes what no other is at, and in the end waits for the others'.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"the study's folder {folder} is a file; choose another with --run")
    left = [(case, seed) for seed in study.seeds for case in study.cases]  # all have a result before any has two
    found: dict[tuple[str, int], dict[str, Any]] = {}
    waits = False
    with _programs_kept(folder / "compiled"):
        while left:
            case, seed, claim = next(_claimed(folder, left), (None, 0, None))
            if case is None or claim is None:
                if not waits:
                    _say(console, f"waiting for what other processes train: {len(left)}")
                waits = True
                time.sleep(LOOK_AGAIN_S)
                continue
            with claim:
                _say(console, f"{len(found) + 1} of {len(found) + len(left)}: {case.name}, seed {seed}")
                found[case.name, seed] = {"seed": seed} | _one(case, seed, folder, pod, options, console)
            left.remove((case, seed))
            result = results.summarize(study, _by_case(study, found))
            group.run_on_main_process(partial(_write, folder, study, result))
    return result


def _claimed(folder: Path, left: list[tuple[Case, int]]) -> Iterator[tuple[Case, int, FolderLock]]:
    """Those that no other process is at, each claimed. Processes of one pod do all together, and claim nothing."""
    for case, seed in left:
        claim = FolderLock(folder / "claims" / _place(folder, case, seed).name)
        try:
            if jax.process_count() == 1:
                claim.take()
        except UserError:  # another process has it
            continue
        yield case, seed, claim


def _place(folder: Path, case: Case, seed: int) -> Path:
    recipe = case.seeded(seed)
    return folder / f"{recipe.name}-{recipe.digest()}"


def _by_case(study: Study, found: dict[tuple[str, int], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What is there so far, in the study's order."""
    return {
        case.name: {
            "values": case.values,
            "runs": [found[case.name, seed] for seed in study.seeds if (case.name, seed) in found],
        }
        for case in study.cases
    }


def _one(case: Case, seed: int, folder: Path, pod: Pod, options: Options, console: Console) -> dict[str, Any]:
    """What a training came to: the part of its summary that studies compare, or one sentence on why it did not."""
    place = _place(folder, case, seed)
    summary = finished(place)
    if summary is None and (place / BUNDLE).exists():
        _say(console, f"diverged before: {place}")
        return {"run": place.name, "error": f"it diverged; {place / BUNDLE} tells how"}
    if summary is None:
        try:
            summary = loop.train(case.seeded(seed), pod=pod, options=options, folder=place, console=console)
        except (UserError, DivergedError) as error:
            _say(console, f"no result: {error}")
            return {"run": place.name, "error": str(error)}
    else:
        _say(console, f"done before: {place}")
    return {"run": place.name} | {name: summary.get(name) for name in results.KEPT}


def finished(folder: Path) -> dict[str, Any] | None:
    """The summary of a training that has come to its end; None if it has not, or never began."""
    if not (folder / "recipe.toml").exists():
        return None
    run = Run.load(folder)
    summary = run.summary()
    return summary if summary and summary["steps"] == run.plan().get("steps") else None


def _write(folder: Path, study: Study, result: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "study.json", to_json(result))
        write_atomically(folder / "study.svg", results.draw(study, result))
    except OSError as error:
        raise UserError(f"cannot write the table in {folder}: {error.strerror}; the same command goes on") from None


def _programs_kept(folder: Path) -> AbstractContextManager[None]:
    """Cases that differ in their seed alone are compiled once, even by different processes.

    Not so where pictures are mixed or erased, which is drawn inside the program.
    """
    return nullcontext() if jax.config.values["jax_compilation_cache_dir"] else cache_programs_in(folder)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)
