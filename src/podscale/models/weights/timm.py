"""Import and export of timm's weights: Vision Transformers, EfficientNets, ConvNeXts, and ResNets.

Each family has one table of timm's module names and our paths; `places.py` says how the tensors of a layer correspond.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from flax import nnx

from podscale.errors import UserError
from podscale.models import convnext, efficientnet, resnet, vit
from podscale.models.weights import torchvision
from podscale.models.weights.files import read_tensors
from podscale.models.weights.places import (
    Place,
    Places,
    add_counters,
    fill_places,
    get_module,
    iterate_places,
    iterate_pointwise_places,
    join_names,
    read_places,
)

# --- tables: timm's names, and ours ----------------------------------------------------------------------------------

VIT_BLOCK = MappingProxyType(
    {
        "norm1": "norm1",
        "attn.qkv": "attention.qkv",
        "attn.proj": "attention.project",
        "norm2": "norm2",
        "mlp.fc1": "mlp.expand",
        "mlp.fc2": "mlp.project",
    }
)
CONVNEXT_BLOCK = MappingProxyType({"conv_dw": "depthwise", "norm": "norm", "mlp.fc1": "expand", "mlp.fc2": "project"})
CONVNEXT_DOWNSAMPLE = MappingProxyType({"0": "norm", "1": "conv"})
EFFICIENTNET_BLOCK = MappingProxyType(
    {  # an inverted bottleneck
        "conv_pw": "expand.conv",
        "bn1": "expand.norm",
        "conv_dw": "depthwise.conv",
        "bn2": "depthwise.norm",
        "conv_pwl": "project.conv",
        "bn3": "project.norm",
    }
)
EFFICIENTNET_FIRST_BLOCK = MappingProxyType(
    {  # one that does not expand
        "conv_dw": "depthwise.conv",
        "bn1": "depthwise.norm",
        "conv_pw": "project.conv",
        "bn2": "project.norm",
    }
)
SQUEEZE_EXCITATION = MappingProxyType(
    {"se.conv_reduce": "squeeze_excitation.squeeze", "se.conv_expand": "squeeze_excitation.excite"}
)


# --- exchange --------------------------------------------------------------------------------------------------------


def load_timm(model: nnx.Module, path: str | Path) -> None:
    """Fill a model with weights from a file, with timm's names and shapes.

    Args:
        model: a Vision Transformer, an EfficientNet, a ConvNeXt or a ResNet, which is changed in place.
        path: a `.safetensors` file, or a `.pth` or `.pt` file that holds a torch state dict.

    Raises:
        UserError: the file cannot be read, or a tensor in it does not fit the model; the model is then unchanged.
    """
    from_timm(model, read_tensors(Path(path)))


def from_timm(model: nnx.Module, tensors: dict[str, np.ndarray]) -> None:
    """Fill a model with tensors named and shaped like timm's.

    Raises:
        UserError: a tensor is missing, has another shape, or belongs to another network; the message names it.
    """
    fill_places(list_places(model), tensors)


def to_timm(model: nnx.Module) -> dict[str, np.ndarray]:
    """Return a complete state dict of timm's with a model's parameters and running statistics.

    Raises:
        UserError: timm has no network of this kind.
    """
    tensors = add_counters(read_places(list_places(model)))
    if isinstance(model, vit.VisionTransformer) and "pos_embed" not in tensors:  # timm learns positions
        embedding = get_module(model, "layers.0")
        width = embedding.patches.kernel.shape[-1]
        tensors["pos_embed"] = np.asarray(embedding.get_positions(width)[None], np.float32)
    return tensors


def has_timm(model: nnx.Module) -> bool:
    """Return whether timm has networks of this kind."""
    return type(model) in _FAMILIES


def list_places(model: nnx.Module) -> Places:
    """Return the places of timm's tensors in a model.

    Raises:
        UserError: timm has no network of this kind.
    """
    if not has_timm(model):
        raise UserError(f"timm has no weights for a {type(model).__name__}")
    return dict(_FAMILIES[type(model)](model))


# --- families --------------------------------------------------------------------------------------------------------


def _iterate_vit(model: vit.VisionTransformer) -> Iterator[tuple[str, Place]]:
    embedding, last = get_module(model, "layers.0"), len(model.layers) - 1
    if embedding.class_token is not None:
        yield "cls_token", Place(embedding.class_token, (0,), before=2)
    if embedding.positions is not None:
        yield "pos_embed", Place(embedding.positions, (0, 1), before=1)
    modules = [("patch_embed.proj", "layers.0.patches")]
    for index in range(last - 2):
        modules += join_names(f"blocks.{index}", f"layers.{index + 1}", VIT_BLOCK)
    modules += [("norm", f"layers.{last - 1}"), ("head", f"layers.{last}")]
    yield from iterate_places(model, modules)


def _iterate_convnext(model: convnext.ConvNeXt) -> Iterator[tuple[str, Place]]:
    modules, scales = [("stem.0", "layers.0.conv"), ("stem.1", "layers.0.norm")], {}
    stage = block = 0
    *body, _, _ = model.layers
    for index, layer in enumerate(body[1:], start=1):
        if isinstance(layer, convnext.Downsample):
            stage, block = stage + 1, 0
            modules += join_names(f"stages.{stage}.downsample", f"layers.{index}", CONVNEXT_DOWNSAMPLE)
        else:
            name = f"stages.{stage}.blocks.{block}"
            modules += join_names(name, f"layers.{index}", CONVNEXT_BLOCK)
            scales[f"{name}.gamma"] = Place(layer.layer_scale, (0,))  # type: ignore[attr-defined]
            block += 1
    last = len(model.layers) - 1
    modules += [("head.norm", f"layers.{last - 1}"), ("head.fc", f"layers.{last}")]
    yield from scales.items()
    yield from iterate_places(model, modules)


def _iterate_efficientnet(model: efficientnet.EfficientNet) -> Iterator[tuple[str, Place]]:
    modules, layer = [("conv_stem", "layers.0.conv"), ("bn1", "layers.0.norm")], 1
    squeezes: list[tuple[str, str]] = []
    for stage, depth in enumerate(model.depths):
        for index in range(depth):
            theirs, ours, block = f"blocks.{stage}.{index}", f"layers.{layer}", get_module(model, f"layers.{layer}")
            modules += join_names(theirs, ours, EFFICIENTNET_BLOCK if block.expand else EFFICIENTNET_FIRST_BLOCK)
            squeezes += join_names(theirs, ours, SQUEEZE_EXCITATION) if block.squeeze_excitation else []
            layer += 1
    modules += [("conv_head", f"layers.{layer}.conv"), ("bn2", f"layers.{layer}.norm")]
    modules += [("classifier", f"layers.{layer + 1}")]
    yield from iterate_places(model, modules)
    yield from iterate_pointwise_places(model, squeezes)


def _iterate_resnet(model: resnet.ResNet) -> Iterator[tuple[str, Place]]:
    yield from torchvision.list_places(model).items()


_FAMILIES: Mapping[type, Callable[[Any], Iterator[tuple[str, Place]]]] = MappingProxyType(
    {
        vit.VisionTransformer: _iterate_vit,
        convnext.ConvNeXt: _iterate_convnext,
        efficientnet.EfficientNet: _iterate_efficientnet,
        resnet.ResNet: _iterate_resnet,
    }
)
