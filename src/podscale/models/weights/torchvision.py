"""Import and export of torchvision's ResNet weights.

The architecture is the same, so the exchange changes names and the order of axes; nothing is computed. Every tensor
must be used and every parameter filled, or the model stays unchanged.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from podscale.errors import UserError
from podscale.models.functional import join_path
from podscale.models.resnet import BasicBlock, BottleneckBlock, Conv, Head, ResNet, Stem
from podscale.parallel.batch_norm import BatchNorm


@dataclass(frozen=True)
class _Place:
    """The place of a torchvision tensor: our variable, and the order of its axes that gives torchvision's."""

    variable: nnx.Variable
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.variable.shape[axis] for axis in self.axes)

    def read(self) -> np.ndarray:
        return np.ascontiguousarray(np.asarray(self.variable[...]).transpose(self.axes))

    def write(self, tensor: np.ndarray) -> None:
        transposed = tensor.transpose(np.argsort(self.axes))
        self.variable.set_value(jnp.asarray(transposed, self.variable.dtype))


def load_torchvision(model: nnx.Module, path: str | Path) -> None:
    """Fill a ResNet with weights from a file, with torchvision's names and shapes.

    Args:
        model: a ResNet, which is changed in place.
        path: a `.safetensors` file, or a `.pth` or `.pt` file that holds a torch state dict.

    Raises:
        UserError: the file cannot be read, or a tensor in it does not fit the model; the model is then unchanged.

    Example:
        >>> import tempfile
        >>> from podscale import recipe
        >>> from podscale.models.registry import build_model
        >>> model = build_model(recipe.Model(name="resnet8", width=8), classes=10, image_size=32)
        >>> path = Path(tempfile.mkdtemp()) / "resnet8.safetensors"
        >>> safetensors.numpy.save_file(to_torchvision(model), path)
        >>> load_torchvision(model, path)
    """
    from_torchvision(model, read_tensors(Path(path)))


def from_torchvision(model: nnx.Module, tensors: dict[str, np.ndarray]) -> None:
    """Fill a ResNet with tensors named and shaped like torchvision's.

    Raises:
        UserError: a tensor is missing, has another shape, or belongs to another network; the message names it.
    """
    places = dict(_iterate_places(model))
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("num_batches_tracked")}
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


def to_torchvision(model: nnx.Module) -> dict[str, np.ndarray]:
    """Return the parameters and running statistics of a ResNet, named and shaped like torchvision's.

    Args:
        model: a ResNet.

    Returns:
        arrays by name, without torchvision's counters of batches.

    Raises:
        UserError: the model is not a ResNet.

    Example:
        >>> from podscale import recipe
        >>> from podscale.models.registry import build_model
        >>> model = build_model(recipe.Model(name="resnet8", width=8), classes=10, image_size=32)
        >>> to_torchvision(model)["fc.weight"].shape
        (10, 32)
    """
    return {name: place.read() for name, place in _iterate_places(model)}


def make_state_dict(model: nnx.Module) -> dict[str, np.ndarray]:
    """Return a complete torchvision state dict, with its counters of batches, which neither side needs."""
    tensors = to_torchvision(model)
    counters = [name.replace("running_var", "num_batches_tracked") for name in tensors if name.endswith("running_var")]
    return tensors | {name: np.zeros((), np.int64) for name in counters}


def is_torchvision(tensors: dict[str, np.ndarray]) -> bool:
    """Return whether tensors are named like those of torchvision's ResNets."""
    return "conv1.weight" in tensors and "bn1.running_mean" in tensors


def rename_tensors(model: nnx.Module, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return torchvision's tensors by our names and in our order of axes, whatever their sizes.

    Raises:
        UserError: a tensor belongs to another network, or has another number of axes.
    """
    names = {id(node): join_path(path) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)}
    places, result = dict(_iterate_places(model)), {}
    for name, tensor in tensors.items():
        if name.endswith("num_batches_tracked"):
            continue
        if name not in places:
            raise UserError(f"{name} has no place in this model")
        place = places[name]
        if tensor.ndim != len(place.axes):
            raise UserError(f"{name} has shape {tensor.shape}, wanted {place.shape}")
        result[names[id(place.variable)]] = tensor.transpose(np.argsort(place.axes))
    return result


# --- names -------------------------------------------------------------------------------------------------------


def _iterate_places(model: nnx.Module) -> Iterator[tuple[str, _Place]]:
    if not isinstance(model, ResNet):
        raise UserError(f"torchvision's weights fit a ResNet, not a {type(model).__name__}")
    layers: Iterator[Any] = iter(model.layers)
    yield from _iterate_stem(next(layers))
    for stage, blocks in enumerate(model.stages, start=1):
        for index in range(blocks):
            yield from _iterate_block(f"layer{stage}.{index}", next(layers))
    yield from _iterate_head(next(layers))


def _iterate_stem(stem: Stem) -> Iterator[tuple[str, _Place]]:
    yield from _iterate_conv("conv1", stem.conv)
    yield from _iterate_norm("bn1", stem.norm)


def _iterate_block(name: str, block: BasicBlock | BottleneckBlock) -> Iterator[tuple[str, _Place]]:
    for number in (1, 2, 3) if isinstance(block, BottleneckBlock) else (1, 2):
        yield from _iterate_conv(f"{name}.conv{number}", getattr(block, f"conv{number}"))
        yield from _iterate_norm(f"{name}.bn{number}", getattr(block, f"norm{number}"))
    if block.shortcut is not None:
        yield from _iterate_conv(f"{name}.downsample.0", block.shortcut.conv)
        yield from _iterate_norm(f"{name}.downsample.1", block.shortcut.norm)


def _iterate_conv(name: str, conv: Conv) -> Iterator[tuple[str, _Place]]:
    yield f"{name}.weight", _Place(conv.kernel, (3, 2, 0, 1))


def _iterate_norm(name: str, norm: BatchNorm) -> Iterator[tuple[str, _Place]]:
    assert norm.scale is not None  # in a ResNet
    yield f"{name}.weight", _Place(norm.scale, (0,))
    yield f"{name}.bias", _Place(norm.bias, (0,))
    yield f"{name}.running_mean", _Place(norm.mean, (0,))
    yield f"{name}.running_var", _Place(norm.var, (0,))


def _iterate_head(head: Head) -> Iterator[tuple[str, _Place]]:
    yield "fc.weight", _Place(head.kernel, (1, 0))
    yield "fc.bias", _Place(head.bias, (0,))


# --- files -------------------------------------------------------------------------------------------------------


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a `.safetensors` file, or of a `.pth` or `.pt` file with a torch state dict.

    Raises:
        UserError: there is no such file, or it cannot be read as what its suffix says.
    """
    if path.suffix not in _READERS:
        raise UserError(f"weights {path} must be one of {', '.join(_READERS)}")
    if not path.is_file():
        raise UserError(f"there is no weights file {path}")
    return _READERS[path.suffix](path)


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return safetensors.numpy.load_file(path)
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}") from None


def _read_torch(path: Path) -> dict[str, np.ndarray]:
    try:
        import torch
    except ImportError:
        raise UserError(
            f"reading {path} needs PyTorch, which is not installed; install torch or convert the file to safetensors"
        ) from None
    try:
        tensors: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no common base class for the errors of damaged and refused files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is not a readable torch state dict: {reason}") from None
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise UserError(f"{path} must hold a state dict alone, names to tensors")
    return {name: _to_numpy(tensor, torch) for name, tensor in tensors.items()}


def _to_numpy(tensor: Any, torch: Any) -> np.ndarray:
    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor  # NumPy itself has no bfloat16
    return wide.detach().numpy()


_READERS: dict[str, Callable[[Path], dict[str, np.ndarray]]] = {
    ".safetensors": _read_safetensors,
    ".pth": _read_torch,
    ".pt": _read_torch,
}
