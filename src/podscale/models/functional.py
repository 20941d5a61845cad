"""A flax module as pure functions of nested dicts, which the step, the optimizer and checkpoints work with.

Some of its layers may be frozen: training changes neither their parameters nor their batch-norm statistics, and their
batch norms normalize by those statistics, as in evaluation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.kernels.group_sums import KernelSums
from podscale.kernels.layer_spec import BATCH_NORM, Kernels
from podscale.models import folded_resnet, fused_convnext, fused_resnet, fused_vit
from podscale.models.random_layers import KeySource, RandomLayer, name_random_layers, replace_dropouts
from podscale.models.resnet import Conv, ResNet
from podscale.parallel.batch_norm import BatchNorm, Groups, Moments, replace_batch_norms

Tree: TypeAlias = PyTree  # nested dicts of arrays
BODY = "body"  # all layers but the head


@dataclass(frozen=True)
class FunctionalModel:
    """A model's graph without its arrays; methods take these as arguments.

    Attributes:
        graph: the flax graph definition.
        head: path of the layer whose shape depends on the number of classes, such as `layers.9`; empty if not known.
        freeze: paths of the layers that are not trained.
        stem: path of the first layer; empty if not known.
        kernels: who computes the layers of a network that can be fused, or parts of modules; None: XLA, all modules.
        is_random: whether the model has random layers, which need keys in training.
    """

    graph: nnx.GraphDef
    _params: nnx.State  # of shapes; it gives arrays their places
    _stats: nnx.State
    head: str = ""
    freeze: tuple[str, ...] = ()
    stem: str = ""
    kernels: Kernels | None = None
    is_random: bool = False

    def use_kernels(self, kernels: Kernels | None) -> "FunctionalModel":
        """Return the model computed by these kernels; None: layer by layer, as the module says."""
        return replace(self, kernels=kernels)

    def select_kernels(self, kernels: Kernels | None) -> Kernels | None:
        """Return these kernels if they compute anything of the model, or else those of batch norms; None if none do."""
        if kernels is None or self.can_use(kernels):
            return kernels
        return BATCH_NORM if kernels.are_pallas and self.can_use(BATCH_NORM) else None

    def can_use(self, kernels: Kernels) -> bool:
        """Return whether these kernels compute anything of the model."""
        model = self.build_abstract_module()
        if not kernels.fuse_layers:
            return any(isinstance(module, BatchNorm) for _, module in nnx.iter_modules(model))
        is_fusible = fused_vit.can_fuse(model, kernels) or fused_convnext.can_fuse(model, kernels)
        return type(model) is ResNet or is_fusible or hasattr(model, "use_kernels")

    @property
    def fused_kernels(self) -> Kernels | None:
        """The kernels, if they compute fused layers."""
        return self.kernels if self.kernels and self.kernels.fuse_layers else None

    def train(
        self, params: Tree, stats: Tree, images: jax.Array, groups: Groups, keys: jax.Array | None = None
    ) -> tuple[jax.Array, Tree]:
        """Return the logits, and the moments of each batch norm (nested like `stats`).

        Random layers draw from `keys`, one for each image; without them they do nothing.

        With kernels for it, a ResNet is computed as a chain of fused layers (`fused_resnet`), and a Vision Transformer
        or ConvNeXt in fewer passes (`fused_vit`, `fused_convnext`).
        """
        model = self.build_module(params, stats)
        model.train()
        if stats:
            model.set_attributes(BatchNorm, groups=groups)
        if stats and self.kernels and self.kernels.are_pallas:
            model.set_attributes(BatchNorm, sum_kernels=KernelSums(self.kernels))
        if self.kernels and self.kernels.are_pallas:
            model.set_attributes(Conv, multiplies=True, raise_if_not_found=False)
        if keys is not None and self.is_random:
            model.set_attributes(RandomLayer, source=KeySource(keys))
        for path, module in nnx.iter_modules(model) if self.freeze else ():
            if isinstance(module, BatchNorm) and self.is_frozen(join_path(path)):
                module.use_running_average = True
        if self.fused_kernels and type(model) is ResNet:
            logits = fused_resnet.forward(model, images, self.fused_kernels)
        else:
            logits = self.apply(model, images)
        return logits, nnx.to_pure_dict(nnx.pop(model, Moments)) if stats else {}

    def evaluate(self, params: Tree, stats: Tree, images: jax.Array) -> jax.Array:
        """Return the logits by the running statistics; a ResNet with kernels is folded (`folded_resnet`)."""
        model = self.build_module(params, stats)
        model.eval()
        if self.kernels and self.kernels.are_pallas and not self.fused_kernels:
            model.set_attributes(Conv, multiplies=True, raise_if_not_found=False)
        if self.fused_kernels and type(model) is ResNet:
            return folded_resnet.forward(model, images)
        return self.apply(model, images)

    def apply(self, model: Any, images: jax.Array) -> jax.Array:
        """Return the logits of a model that is not a ResNet; one with a method `use_kernels` decides what to use."""
        for fused in (fused_vit, fused_convnext):
            if self.fused_kernels and fused.can_fuse(model, self.fused_kernels):
                return fused.forward(model, images, self.fused_kernels)
        if self.fused_kernels and hasattr(model, "use_kernels"):
            model.use_kernels(self.fused_kernels)
        return model(images)

    def build_module(self, params: Tree, stats: Tree) -> Any:
        """Return the flax module with these parameters and statistics."""
        return nnx.merge(self.graph, _fill(self._params, params), _fill(self._stats, stats))

    def build_abstract_module(self) -> Any:
        """Return the flax module with shapes instead of arrays."""
        return nnx.merge(self.graph, self._params, self._stats)

    def replace_parameters(self, params: Tree, arrays: Mapping[str, jax.Array | np.ndarray]) -> Tree:
        """Return the parameters with some of them replaced, by names such as `layers.0.kernel`.

        Raises:
            UserError: there is no parameter of that name and shape.
        """
        flat = flatten_dict(params)
        paths = {join_path(path): path for path in flat}
        for name, array in arrays.items():
            if name not in paths:
                raise UserError(f"the model has no parameter {name!r}: {suggest_names(name, paths)}")
            old = flat[paths[name]]
            if old.shape != array.shape:
                raise UserError(f"the parameter {name} has shape {old.shape}, not {array.shape}")
            flat[paths[name]] = array.astype(old.dtype)
        return unflatten_dict(flat)

    def get_param_shapes(self) -> Tree:
        """Return the shapes and dtypes of the parameters, as nested dicts."""
        return nnx.to_pure_dict(self._params)

    # --- frozen layers ---

    def is_frozen(self, name: str) -> bool:
        """Return whether training leaves the layer or parameter of this name unchanged."""
        return is_within(name, self.freeze) or (BODY in self.freeze and not is_within(name, (self.head,)))

    def split(self, params: Tree) -> tuple[Tree, Tree]:
        """Split a tree like the parameters into what is trained and what is frozen."""
        if not self.freeze:
            return params, {}
        flat = flatten_dict(params)
        frozen = {path: leaf for path, leaf in flat.items() if self.is_frozen(join_path(path))}
        trained = {path: leaf for path, leaf in flat.items() if path not in frozen}
        return unflatten_dict(trained), unflatten_dict(frozen)

    def join(self, trained: Tree, frozen: Tree) -> Tree:
        """Return the parameters that `split` has split."""
        return unflatten_dict(flatten_dict(trained) | flatten_dict(frozen)) if frozen else trained

    def stop_stem_gradient(self, trained: Tree) -> Tree:
        """Return what is trained, with no gradient through the parameters of the first layer."""
        flat = flatten_dict(trained)
        stem = {path: leaf for path, leaf in flat.items() if is_within(join_path(path), (self.stem,))}
        return unflatten_dict(flat | jax.lax.stop_gradient(stem))

    def apply_updates(self, params: Tree, updates: Tree) -> Tree:
        """Return the parameters after updates of what is trained."""
        trained, frozen = self.split(params)
        return self.join(optax.apply_updates(trained, updates), frozen)

    def wrap_optimizer(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return an optimizer that takes all parameters and updates what is trained; frozen ones have no state."""
        if not self.freeze:
            return optimizer

        def update(gradients: Tree, state: optax.OptState, params: Tree = None) -> tuple[Tree, optax.OptState]:
            return optimizer.update(gradients, state, self.split(params)[0])

        return optax.GradientTransformation(lambda params: optimizer.init(self.split(params)[0]), update)


def make_functional(model: nnx.Module, freeze: tuple[str, ...] = ()) -> tuple[FunctionalModel, Tree, Tree]:
    """Return a model as functions, its parameters and its running statistics.

    Args:
        model: a flax module; its `nnx.BatchNorm` layers are replaced by distributed ones, and its `nnx.Dropout` layers
            by ones whose choices are the same on every pod, in place.
        freeze: paths of the layers not to train, such as `layers.0`; `body` is all layers but the head.

    Raises:
        UserError: the model has other state than parameters and batch-norm statistics, or `freeze` does not fit it.
    """
    replace_batch_norms(model)
    replace_dropouts(model)
    is_random = name_random_layers(model, join_path)
    graph, params, stats, others = nnx.split(model, nnx.Param, nnx.BatchStat, ...)  # type: ignore[misc]
    if jax.tree.leaves(others):
        kinds = ", ".join(sorted({type(v).__name__ for _, v in nnx.to_flat_state(others)}))
        raise UserError(
            f"the model keeps state other than parameters and batch-norm statistics ({kinds}); a random layer derives "
            "from podscale.models.random_layers.RandomLayer, which gives it its keys"
        )
    shapes, stats_shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), (params, stats))
    net = FunctionalModel(
        graph, shapes, stats_shapes, _find_head(model), freeze, _find_stem(model), is_random=is_random
    )
    arrays = nnx.to_pure_dict(params)
    _check_freeze(net, [join_path(path) for path in flatten_dict(arrays)])
    return net, arrays, nnx.to_pure_dict(stats)


def join_path(path: Iterable[object]) -> str:
    """Return a path in a model as a name: `layers.0.conv.kernel`."""
    return ".".join(map(str, path))


def is_within(name: str, paths: Iterable[str]) -> bool:
    """Return whether a name is one of `paths`, or below one.

    >>> is_within("layers.1.conv", ["layers.1"]), is_within("layers.11.conv", ["layers.1"])
    (True, False)
    """
    return any(name == path or name.startswith(f"{path}.") for path in paths if path)


def _find_head(model: nnx.Module) -> str:
    """Return the path of the model's `head`, or of the last of its `layers`."""
    if isinstance(getattr(model, "head", None), nnx.Module):
        return "head"
    layers = getattr(model, "layers", None)
    return f"layers.{len(layers) - 1}" if isinstance(layers, nnx.List | list) and layers else ""


def _find_stem(model: nnx.Module) -> str:
    """Return the path of the model's `stem`, or of the first of its `layers`."""
    if isinstance(getattr(model, "stem", None), nnx.Module):
        return "stem"
    layers = getattr(model, "layers", None)
    return "layers.0" if isinstance(layers, nnx.List | list) and layers else ""


def _check_freeze(net: FunctionalModel, names: list[str]) -> None:
    for path in net.freeze:
        if path == BODY and not net.head:
            raise UserError("model.freeze body needs a model with a `head` or a list of `layers`; name layers instead")
        if path != BODY and not any(is_within(name, (path,)) for name in names):
            layers = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, 1 + name.count("."))}
            raise UserError(f"model.freeze: the model has no layer {path!r}: {suggest_names(path, layers)}")
    if net.freeze and all(net.is_frozen(name) for name in names):
        raise UserError("model.freeze leaves nothing to learn; leave out a layer, such as the head")


def _fill(state: nnx.State, tree: Tree) -> nnx.State:
    """Return an nnx.State like `state` with the arrays of `tree`."""
    return jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(tree))
