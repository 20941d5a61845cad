"""Recognize the layout of weights by their names: ours, timm's, torchvision's or efficientnet_pytorch's."""

import numpy as np
from flax import nnx

from podscale.models import efficientnet, vit
from podscale.models.weights import efficientnet_pytorch, timm
from podscale.models.weights.places import Places, rename_tensors

TENSORFLOW_PREFIX = "tf_"  # of timm's names of networks whose weights were trained in TensorFlow


def adapt_tensors(model: nnx.Module, tensors: dict[str, np.ndarray], source: str = "") -> dict[str, np.ndarray]:
    """Return weights by our names, where they have those of another layout, and with positions for the model's images.

    Args:
        model: the model that they are for; sizes may differ.
        tensors: named as by timm, by torchvision, by efficientnet_pytorch or by us.
        source: where they come from. timm's weights from TensorFlow are known by their name there alone, such as
            `hub:timm/tf_efficientnet_b0.ns_jft_in1k`: names and shapes of tensors are those of its other weights.

    Raises:
        UserError: a tensor belongs to another network or has another number of axes, or the network is one that
            computes something else with such weights.
    """
    places = _find_places(model, tensors, source.rstrip("/").rpartition("/")[2])
    tensors = rename_tensors(model, places, tensors) if places else tensors
    return vit.adapt_positions(model, tensors) if isinstance(model, vit.VisionTransformer) else tensors


def _find_places(model: nnx.Module, tensors: dict[str, np.ndarray], name: str) -> Places:
    """Return the places of the layout that some of the tensors' names belong to; none if they are ours or unknown."""
    if timm.has_timm(model):
        places = timm.list_places(model)
        if not places.keys().isdisjoint(tensors):
            if isinstance(model, efficientnet.EfficientNet) and name.startswith(TENSORFLOW_PREFIX):
                efficientnet_pytorch.check_style(model, owner=f"timm's {name}")
            return places
    if isinstance(model, efficientnet.EfficientNet):
        places = efficientnet_pytorch.list_places(model)
        if not places.keys().isdisjoint(tensors):
            efficientnet_pytorch.check_style(model)
            return places
    return {}
