"""A flax module as pure functions on plain nested dicts, which the step, the optimizer and checkpoints handle."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from podscale.errors import UserError
from podscale.norm import BatchNorm, Groups, Moments, distribute

Tree = Any  # nested dicts of arrays


@dataclass(frozen=True)
class Functional:
    """A model's graph without its numbers."""

    graph: Any
    _params: Any  # nnx.State of shapes, to give numbers their places again
    _stats: Any

    def train(self, params: Tree, stats: Tree, images: jax.Array, groups: Groups) -> tuple[jax.Array, Tree]:
        """Logits, and the moments each batch norm saw (nested like `stats`)."""
        model = self.model(params, stats)
        model.train()
        if stats:
            model.set_attributes(BatchNorm, groups=groups)
        logits = model(images)
        return logits, nnx.to_pure_dict(nnx.pop(model, Moments)) if stats else {}

    def evaluate(self, params: Tree, stats: Tree, images: jax.Array) -> jax.Array:
        """Logits by the running statistics."""
        model = self.model(params, stats)
        model.eval()
        return model(images)

    def model(self, params: Tree, stats: Tree) -> Any:
        """The flax module with these numbers in it."""
        return nnx.merge(self.graph, _filled(self._params, params), _filled(self._stats, stats))


def functional(model: nnx.Module) -> tuple[Functional, Tree, Tree]:
    """The model as functions, its parameters and its running statistics; flax's batch norms become distributed ones."""
    distribute(model)
    graph, params, stats, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)  # type: ignore[misc]
    if jax.tree.leaves(rest):
        kinds = ", ".join(sorted({type(v).__name__ for _, v in nnx.to_flat_state(rest)}))
        raise UserError(f"the model keeps state other than parameters and batch-norm statistics ({kinds})")
    shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), (params, stats))
    return Functional(graph, *shapes), nnx.to_pure_dict(params), nnx.to_pure_dict(stats)


def _filled(state: Any, tree: Tree) -> Any:
    return jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(tree))
