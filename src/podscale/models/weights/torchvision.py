"""Import and export of torchvision's ResNet weights, which timm names alike."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from flax import nnx

from podscale.errors import UserError
from podscale.models.resnet import BottleneckBlock, ResNet
from podscale.models.weights.files import read_tensors
from podscale.models.weights.places import Places, add_counters, fill_places, iterate_places, read_places


def load_torchvision(model: nnx.Module, path: str | Path) -> None:
    """Fill a ResNet with weights from a file, with torchvision's names and shapes.

    Args:
        model: a ResNet, which is changed in place.
        path: a `.safetensors` file, or a `.pth` or `.pt` file that holds a torch state dict.

    Raises:
        UserError: the file cannot be read, or a tensor in it does not fit the model; the model is then unchanged.

    Examples:
        >>> import tempfile
        >>> import safetensors.numpy
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
    fill_places(list_places(model), tensors)


def to_torchvision(model: nnx.Module) -> dict[str, np.ndarray]:
    """Return the parameters and running statistics of a ResNet, named and shaped like torchvision's.

    Args:
        model: a ResNet.

    Returns:
        arrays by name, without torchvision's counters of batches.

    Raises:
        UserError: the model is not a ResNet.

    Examples:
        >>> from podscale import recipe
        >>> from podscale.models.registry import build_model
        >>> model = build_model(recipe.Model(name="resnet8", width=8), classes=10, image_size=32)
        >>> to_torchvision(model)["fc.weight"].shape
        (10, 32)
    """
    return read_places(list_places(model))


def make_state_dict(model: nnx.Module) -> dict[str, np.ndarray]:
    """Return a complete torchvision state dict, with its counters of batches, which neither side needs."""
    return add_counters(to_torchvision(model))


# --- names -------------------------------------------------------------------------------------------------------


def list_places(model: nnx.Module) -> Places:
    """Return the places of torchvision's tensors in a ResNet.

    Raises:
        UserError: the model is not a ResNet.
    """
    if not isinstance(model, ResNet):
        raise UserError(f"torchvision's weights fit a ResNet, not a {type(model).__name__}")
    return dict(iterate_places(model, _iterate_modules(model)))


def _iterate_modules(model: ResNet) -> Iterator[tuple[str, str]]:
    """Yield torchvision's name and our path of each layer with parameters."""
    yield from (("conv1", "layers.0.conv"), ("bn1", "layers.0.norm"))
    layer = 1
    for stage, blocks in enumerate(model.stages, start=1):
        for index in range(blocks):
            theirs, ours, block = f"layer{stage}.{index}", f"layers.{layer}", model.layers[layer]
            for number in (1, 2, 3) if isinstance(block, BottleneckBlock) else (1, 2):
                yield f"{theirs}.conv{number}", f"{ours}.conv{number}"
                yield f"{theirs}.bn{number}", f"{ours}.norm{number}"
            if block.shortcut is not None:  # type: ignore[attr-defined]
                yield f"{theirs}.downsample.0", f"{ours}.shortcut.conv"
                yield f"{theirs}.downsample.1", f"{ours}.shortcut.norm"
            layer += 1
    yield "fc", f"layers.{layer}"
