"""The places of other programs' tensors in our models: a name there, a variable here, and how their axes correspond.

Exchange changes names and the order of axes; nothing is computed. Every tensor must be used and every parameter filled,
or the model stays unchanged.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from podscale.errors import UserError
from podscale.models.functional import join_path
from podscale.models.layers import DenseHead, PatchConv
from podscale.models.resnet import Conv, Head
from podscale.parallel.batch_norm import BatchNorm

COUNTER = "num_batches_tracked"  # torch's batch norms count batches, which neither side needs
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Place:
    """The place of a tensor: our variable, the order of its axes that gives theirs, and unit axes around them."""

    variable: nnx.Variable
    axes: tuple[int, ...]
    before: int = 0
    after: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that the tensor has in the other program."""
        return (1,) * self.before + tuple(self.variable.shape[axis] for axis in self.axes) + (1,) * self.after

    def read(self) -> np.ndarray:
        """Return our variable as the other program's tensor."""
        transposed = np.asarray(self.variable[...]).transpose(self.axes)
        return np.ascontiguousarray(transposed).reshape(self.shape)

    def write(self, tensor: np.ndarray) -> None:
        """Set our variable."""
        self.variable.set_value(jnp.asarray(self.convert(tensor), self.variable.dtype))

    def convert(self, tensor: np.ndarray) -> np.ndarray:
        """Return a tensor of any size with our order of axes."""
        core = tensor.shape[self.before : tensor.ndim - self.after]
        return tensor.reshape(core).transpose(np.argsort(self.axes))

    def fits(self, tensor: np.ndarray) -> bool:
        """Return whether a tensor has the right number of axes, and length 1 where it must."""
        units = (*tensor.shape[: self.before], *tensor.shape[tensor.ndim - self.after :])
        return tensor.ndim == len(self.shape) and all(length == 1 for length in units)


Places = dict[str, Place]


def fill_places(places: Places, tensors: Tensors) -> None:
    """Fill the variables of a model with another program's tensors.

    Raises:
        UserError: a tensor is missing, has another shape, or belongs to another network; the message names it.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(COUNTER)}
    for name, place in places.items():
        if name not in tensors:
            raise UserError(f"the weights lack {name}, which this model needs with shape {place.shape}")
        if tensors[name].shape != place.shape:
            raise UserError(f"{name} has shape {tensors[name].shape}, but this model needs {place.shape}")
    for name in tensors:
        if name not in places:
            raise UserError(f"{name} has no place in this model; are the weights those of another network?")
    for name, place in places.items():
        place.write(tensors[name])


def read_places(places: Places) -> Tensors:
    """Return the variables of a model as another program's tensors."""
    return {name: place.read() for name, place in places.items()}


def add_counters(tensors: Tensors) -> Tensors:
    """Return tensors with the counters of batches that a complete torch state dict has."""
    counters = [name.replace("running_var", COUNTER) for name in tensors if name.endswith("running_var")]
    return tensors | {name: np.zeros((), np.int64) for name in counters}


def rename_tensors(model: nnx.Module, places: Places, tensors: Tensors) -> Tensors:
    """Return another program's tensors by our names and in our order of axes, whatever their sizes.

    Raises:
        UserError: a tensor belongs to another network, or has another number of axes.
    """
    names = {id(node): join_path(path) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)}
    result = {}
    for name, tensor in tensors.items():
        if name.endswith(COUNTER):
            continue
        if name not in places:
            raise UserError(f"{name} has no place in this model")
        if not places[name].fits(tensor):
            raise UserError(f"{name} has shape {tensor.shape}, wanted {places[name].shape}")
        result[names[id(places[name].variable)]] = places[name].convert(tensor)
    return result


# --- layers ----------------------------------------------------------------------------------------------------------


def iterate_places(model: nnx.Module, modules: Iterable[tuple[str, str]]) -> Iterator[tuple[str, Place]]:
    """Yield the places of all tensors of torch modules.

    Args:
        model: our model.
        modules: pairs of a torch module's name and the path of ours.
    """
    for theirs, ours in modules:
        for name, place in _iterate_layer(get_module(model, ours)):
            yield f"{theirs}.{name}", place


def iterate_pointwise_places(model: nnx.Module, modules: Iterable[tuple[str, str]]) -> Iterator[tuple[str, Place]]:
    """Yield the places of all tensors of torch's 1x1 convolutions that are dense layers here; see `iterate_places`."""
    for theirs, ours in modules:
        dense = get_module(model, ours)
        yield f"{theirs}.weight", Place(dense.kernel, (1, 0), after=2)
        yield f"{theirs}.bias", Place(dense.bias, (0,))


def join_names(theirs: str, ours: str, table: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the names of a table under these prefixes.

    >>> join_names("blocks.0", "layers.1", {"fc1": "expand"})
    [('blocks.0.fc1', 'layers.1.expand')]
    """
    return [(f"{theirs}.{a}", f"{ours}.{b}") for a, b in table.items()]


def get_module(model: nnx.Module, path: str) -> Any:
    """Return the part of a model at a path such as `layers.0.conv`."""
    part: Any = model
    for name in path.split("."):
        part = part[int(name)] if name.isdecimal() else getattr(part, name)
    return part


def _iterate_layer(layer: nnx.Module) -> Iterator[tuple[str, Place]]:
    """Yield the tensors of the torch module that corresponds to one of our layers."""
    match layer:
        case nnx.Conv() | PatchConv() | Conv():
            yield "weight", Place(layer.kernel, (3, 2, 0, 1))
        case nnx.Linear() | DenseHead() | Head():
            yield "weight", Place(layer.kernel, (1, 0))
        case nnx.LayerNorm() | BatchNorm():
            assert layer.scale is not None
            yield "weight", Place(layer.scale, (0,))
        case _:
            raise TypeError(f"no torch module corresponds to {type(layer).__name__}")
    if getattr(layer, "bias", None) is not None:
        yield "bias", Place(layer.bias, (0,))  # type: ignore[union-attr,arg-type]
    if isinstance(layer, BatchNorm):
        yield "running_mean", Place(layer.mean, (0,))
        yield "running_var", Place(layer.var, (0,))
