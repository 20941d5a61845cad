"""A flax module as pure functions on plain nested dicts, which the step, the optimizer and checkpoints handle.

Some of its layers may be frozen: training neither moves their parameters nor updates their batch-norm statistics, and
their batch norms normalize by those statistics, as in evaluation.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.models import folded_resnet, fused_resnet
from podscale.models.resnet import ResNet
from podscale.parallel.batch_norm import BatchNorm, Groups, Moments, distribute

Tree = Any  # nested dicts of arrays
BODY = "body"  # all layers but the head


@dataclass(frozen=True)
class Functional:
    """A model's graph without its numbers."""

    graph: Any
    _params: Any  # nnx.State of shapes, to give numbers their places again
    _stats: Any
    head: str = ""  # where the layer stands that the number of classes shapes; empty if that is not known
    freeze: tuple[str, ...] = ()
    stem: str = ""  # where the first layer stands; empty if that is not known

    def train(
        self, params: Tree, stats: Tree, images: jax.Array, groups: Groups, kernels: str = ""
    ) -> tuple[jax.Array, Tree]:
        """Logits, and the moments each batch norm saw (nested like `stats`).

        With `kernels`, networks that can be a `chain` of fused layers are one.
        """
        model = self.model(params, stats)
        model.train()
        if stats:
            model.set_attributes(BatchNorm, groups=groups)
        for path, module in nnx.iter_modules(model) if self.freeze else ():
            if isinstance(module, BatchNorm) and self.frozen(dotted(path)):
                module.use_running_average = True
        fused = kernels and type(model) is ResNet
        logits = fused_resnet.forward(model, images, kernels) if fused else model(images)
        return logits, nnx.to_pure_dict(nnx.pop(model, Moments)) if stats else {}

    def evaluate(self, params: Tree, stats: Tree, images: jax.Array, kernels: str = "") -> jax.Array:
        """Logits by the running statistics; with `kernels`, those of a ResNet are `folded`."""
        model = self.model(params, stats)
        model.eval()
        return folded_resnet.forward(model, images) if kernels and type(model) is ResNet else model(images)

    def model(self, params: Tree, stats: Tree) -> Any:
        """The flax module with these numbers in it."""
        return nnx.merge(self.graph, _filled(self._params, params), _filled(self._stats, stats))

    def shapes(self) -> Tree:
        """The parameters' shapes and types, as nested dicts."""
        return nnx.to_pure_dict(self._params)

    # --- frozen layers ---

    def frozen(self, name: str) -> bool:
        """Whether training leaves what stands there as it is."""
        return within(name, self.freeze) or (BODY in self.freeze and not within(name, (self.head,)))

    def split(self, params: Tree) -> tuple[Tree, Tree]:
        """What is learnt of a tree like the parameters, and what stays as it is."""
        if not self.freeze:
            return params, {}
        flat = flatten_dict(params)
        still = {path: leaf for path, leaf in flat.items() if self.frozen(dotted(path))}
        learnt = {path: leaf for path, leaf in flat.items() if path not in still}
        return unflatten_dict(learnt), unflatten_dict(still)

    def joined(self, learnt: Tree, still: Tree) -> Tree:
        """The parameters that `split` took apart."""
        return unflatten_dict(flatten_dict(learnt) | flatten_dict(still)) if still else learnt

    def moved(self, params: Tree, updates: Tree) -> Tree:
        """The parameters after updates of what is learnt."""
        learnt, still = self.split(params)
        return self.joined(optax.apply_updates(learnt, updates), still)

    def learner(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """The optimizer of what is learnt, told of all parameters; frozen ones have no state in it."""
        if not self.freeze:
            return optimizer

        def update(gradients: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
            return optimizer.update(gradients, state, self.split(params)[0])

        return optax.GradientTransformation(lambda params: optimizer.init(self.split(params)[0]), update)


def functional(model: nnx.Module, freeze: tuple[str, ...] = ()) -> tuple[Functional, Tree, Tree]:
    """The model as functions, its parameters and its running statistics; flax's batch norms become distributed ones.

    `freeze` names layers by where they stand, such as `layers.0`; `body` is all of them but the head.
    """
    distribute(model)
    graph, params, stats, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)  # type: ignore[misc]
    if jax.tree.leaves(rest):
        kinds = ", ".join(sorted({type(v).__name__ for _, v in nnx.to_flat_state(rest)}))
        raise UserError(f"the model keeps state other than parameters and batch-norm statistics ({kinds})")
    shapes, stats_shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), (params, stats))
    net = Functional(graph, shapes, stats_shapes, _head(model), freeze, _stem(model))
    numbers = nnx.to_pure_dict(params)
    _check_freeze(net, [dotted(path) for path in flatten_dict(numbers)])
    return net, numbers, nnx.to_pure_dict(stats)


def dotted(path: Iterable[Any]) -> str:
    """Where something stands in a model, as a name: `layers.0.conv.kernel`."""
    return ".".join(map(str, path))


def within(name: str, places: Iterable[str]) -> bool:
    """Whether a name is one of `places`, or stands below one.

    >>> within("layers.1.conv", ["layers.1"]), within("layers.11.conv", ["layers.1"])
    (True, False)
    """
    return any(name == place or name.startswith(f"{place}.") for place in places if place)


def _head(model: nnx.Module) -> str:
    """By what a model calls `head`, or the last of its `layers`."""
    if isinstance(getattr(model, "head", None), nnx.Module):
        return "head"
    layers = getattr(model, "layers", None)
    return f"layers.{len(layers) - 1}" if isinstance(layers, nnx.List | list) and layers else ""


def _stem(model: nnx.Module) -> str:
    """By what a model calls `stem`, or the first of its `layers`."""
    if isinstance(getattr(model, "stem", None), nnx.Module):
        return "stem"
    layers = getattr(model, "layers", None)
    return "layers.0" if isinstance(layers, nnx.List | list) and layers else ""


def _check_freeze(net: Functional, names: list[str]) -> None:
    for place in net.freeze:
        if place == BODY and not net.head:
            raise UserError("model.freeze body needs a model with a `head` or a list of `layers`; name layers instead")
        if place != BODY and not any(within(name, (place,)) for name in names):
            parts = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, 1 + name.count("."))}
            raise UserError(f"model.freeze: the model has no layer {place!r}: {suggest_names(place, parts)}")
    if net.freeze and all(net.frozen(name) for name in names):
        raise UserError("model.freeze leaves nothing to learn; leave out a layer, such as the head")


def _filled(state: Any, tree: Tree) -> Any:
    return jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(tree))
