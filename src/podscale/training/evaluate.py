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
from podscale.training.program import Program
from podscale.training.step import State


class Evaluator:
    """Evaluates a state: every validation example counts exactly once, whatever the number of hosts and devices.

    Attributes:
        unreadable_images: one sentence for each image that the last evaluation could not read.
        predictions: of the last evaluation, float32 [examples, 3]; `step.make_eval_call` says which columns.
    """

    def __init__(self, program: Program, run: Run | None = None) -> None:
        self._program = program
        self.unreadable_images: list[str] = []
        self.predictions = np.zeros((0, 3), np.float32)
        self._compilation, self._arguments = compile_eval_step(program, run)
        self._resident: list[prefetch.Batch] = []  # all batches, where the images live on the devices

    def wait_for_compiler(self) -> None:
        """Return once the evaluation can start at once."""
        call = self._compilation.get()
        if self._program.plan.input.is_resident and not self._resident:
            with self._load_batches() as batches:
                self._resident = list(batches)
            jax.block_until_ready(call(*zeros_like(self._arguments)))  # as in `compilation.compile_train_step`

    def __call__(self, state: State) -> dict[str, float]:
        """Return accuracy, top-5 accuracy and mean loss over all validation examples.

        Uses the averaged weights if the recipe has an average.
        """
        self.wait_for_compiler()
        call = self._compilation.get()
        program, weights = self._program, state.average or {"params": state.params, "stats": state.stats}
        counts, predictions = placement.replicate(steps.zero_counts(), program.mesh), []
        with self._load_batches() if not self._resident else nullcontext(self._resident) as batches:
            for batch in batches:
                counts, predicted = call(weights["params"], weights["stats"], batch.images, batch.labels, counts)
                predictions.append(predicted)
            self.unreadable_images = batches.bad_images.pop_messages() if isinstance(batches, prefetch.Batches) else []
        totals = jax.device_get(counts)
        gathered = np.concatenate([placement.gather_to_host(predicted) for predicted in predictions])
        self.predictions = gathered[: len(program.data.val)]  # without padding
        examples = int(totals.examples)
        return {
            "accuracy": int(totals.correct) / examples,
            "accuracy_top5": int(totals.correct_top5) / examples,
            "loss": float(totals.loss) / examples,
            "examples": examples,
        }

    def _load_batches(self) -> prefetch.Batches:
        plan, sharding = self._program.plan, pods.make_batch_sharding(self._program.mesh)
        return loader.load_eval_batches(self._program.data.val, plan.recipe, sharding, plan.eval_images)
