"""Exact evaluation on all devices of the pod."""

from contextlib import nullcontext

import jax
import numpy as np

from podscale import pod as pods
from podscale.data import loader, prefetch
from podscale.parallel import placement
from podscale.runs.folder import Run
from podscale.training import step as steps
from podscale.training.compilation import compile_eval_step, zeros_like
from podscale.training.setup import Job
from podscale.training.step import State


class Evaluator:
    """Exact evaluation on all devices: every example counts once, whatever the host and device count."""

    def __init__(self, job: Job, run: Run | None = None) -> None:
        self._job = job
        self.unreadable: list[str] = []  # pictures that the last evaluation could not read, in words
        self.answers = np.zeros((0, 3), np.float32)  # of the last evaluation; see steps.eval_call
        self._call, like = compile_eval_step(job, run)
        self._held: list[prefetch.Batch] = []  # where the pictures live on the devices: all of them, batch by batch
        if job.plan.resident:
            with self._loaded() as batches:
                self._held = list(batches)
            jax.block_until_ready(self._call(*zeros_like(like)))  # as in `_warmed`

    def __call__(self, state: State) -> dict[str, float]:
        """Accuracy, top-5 accuracy and mean loss over all validation examples, by the averaged weights if there are."""
        job, numbers = self._job, state.average or {"params": state.params, "stats": state.stats}
        tally, answers = placement.replicate(steps.empty_tally(), job.mesh), []
        with self._loaded() if not self._held else nullcontext(self._held) as batches:
            for batch in batches:
                tally, given = self._call(numbers["params"], numbers["stats"], batch.images, batch.labels, tally)
                answers.append(given)
            self.unreadable = batches.bad.news() if isinstance(batches, prefetch.Batches) else []
        found = jax.device_get(tally)
        self.answers = np.concatenate([placement.gather_to_host(given) for given in answers])[: len(job.data.val)]
        count = int(found.examples)
        return {
            "accuracy": int(found.correct) / count,
            "accuracy_top5": int(found.correct_top5) / count,
            "loss": float(found.loss) / count,
            "examples": count,
        }

    def _loaded(self) -> prefetch.Batches:
        job = self._job
        return loader.eval_batches(job.data.val, job.recipe, pods.batch_sharding(job.mesh), job.plan.eval_images)
