"""Run the trainings of a study, one after the other. Finished trainings are kept: the same command resumes."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from podscale.config.json_types import JsonObject
from podscale.config.options import Options
from podscale.errors import DivergedError, UserError
from podscale.pod import Pod
from podscale.processes import group
from podscale.runs.folder import Run
from podscale.storage.files import to_json, write_atomically
from podscale.storage.lock import FolderLock
from podscale.storage.paths import require_local
from podscale.study import results
from podscale.study.grid import Case, Study
from podscale.training import loop
from podscale.training.compilation import cache_programs_in
from podscale.training.divergence import BUNDLE

POLL_S = 1.0  # between checks of the trainings of other processes, once nothing else is left


def run_study(study: Study, folder: Path, pod: Pod, options: Options, console: Console) -> JsonObject:
    """Train what is not trained yet, write table and plot to `folder`, and return the results of all cases.

    Several processes may share one folder: each takes a training that no other has claimed, and in the end waits for
    the others.
    """
    require_local(folder, "--run")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"the study's folder {folder} is a file; choose another with --run")
    pending = [
        (case, seed) for seed in study.seeds for case in study.cases
    ]  # every case has a result before any has two
    runs: dict[tuple[str, int], JsonObject] = {}
    waiting = False
    with _cache_programs(folder / "compiled"):
        while pending:
            case, seed, lock = next(_claim_pending(folder, pending), (None, 0, None))
            if case is None or lock is None:
                if not waiting:
                    _log(console, f"waiting for what other processes train: {len(pending)}")
                waiting = True
                time.sleep(POLL_S)
                continue
            with lock:
                _log(console, f"{len(runs) + 1} of {len(runs) + len(pending)}: {case.name}, seed {seed}")
                runs[case.name, seed] = {"seed": seed} | _train_case(case, seed, folder, pod, options, console)
            pending.remove((case, seed))
            result = results.summarize(study, _group_by_case(study, runs))
            group.run_on_main_process(partial(_write, folder, study, result))
    return result


def _claim_pending(folder: Path, pending: list[tuple[Case, int]]) -> Iterator[tuple[Case, int, FolderLock]]:
    """Yield the trainings that no other process has claimed, each claimed. Processes of one pod claim nothing."""
    for case, seed in pending:
        lock = FolderLock(folder / "claims" / _run_folder(folder, case, seed).name)
        try:
            if jax.process_count() == 1:
                lock.acquire()
        except UserError:  # another process has it
            continue
        yield case, seed, lock


def _run_folder(folder: Path, case: Case, seed: int) -> Path:
    recipe = case.with_seed(seed)
    return folder / f"{recipe.name}-{recipe.digest()}"


def _group_by_case(study: Study, runs: dict[tuple[str, int], JsonObject]) -> dict[str, JsonObject]:
    """Return the results so far, in the order of the study."""
    return {
        case.name: {
            "values": case.values,
            "runs": [runs[case.name, seed] for seed in study.seeds if (case.name, seed) in runs],
        }
        for case in study.cases
    }


def _train_case(case: Case, seed: int, folder: Path, pod: Pod, options: Options, console: Console) -> JsonObject:
    """Train a case with a seed; return what studies compare of its summary, or one sentence on why it failed."""
    run_folder = _run_folder(folder, case, seed)
    summary = read_finished_summary(run_folder)
    if summary is None and (run_folder / BUNDLE).exists():
        _log(console, f"diverged before: {run_folder}")
        return {"run": run_folder.name, "error": f"it diverged; {run_folder / BUNDLE} says how"}
    if summary is None:
        try:
            summary = loop.train(case.with_seed(seed), pod=pod, options=options, folder=run_folder, console=console)
        except (UserError, DivergedError) as error:
            _log(console, f"no result: {error}")
            return {"run": run_folder.name, "error": str(error)}
    else:
        _log(console, f"done before: {run_folder}")
    return {"run": run_folder.name} | {name: summary.get(name) for name in results.SUMMARY_KEYS}


def read_finished_summary(folder: Path) -> JsonObject | None:
    """Return the summary of a finished training; None if it has not finished or never started."""
    if not (folder / "recipe.toml").exists():
        return None
    run = Run.load(folder)
    summary = run.summary()
    return summary if summary and summary["steps"] == run.plan().get("steps") else None


def _write(folder: Path, study: Study, result: JsonObject) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "study.json", to_json(result))
        write_atomically(folder / "study.svg", results.draw_plot(study, result))
    except OSError as error:
        raise UserError(f"cannot write the table in {folder}: {error.strerror}; the same command continues") from None


def _cache_programs(folder: Path) -> AbstractContextManager[None]:
    """Cache compiled programs: cases that differ only in `recipe.scalars` and length share one, also over processes."""
    return nullcontext() if jax.config.values["jax_compilation_cache_dir"] else cache_programs_in(folder)


def _log(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)
