"""Export ResNets as ONNX graphs, for programs without JAX.

A graph takes pixels, uint8 [batch, size, size, 3], normalizes them, and returns logits and probabilities; all of it in
float32. Tensors are named and laid out as torchvision's. The stem on 2x2 blocks is written as the 7x7 convolution that
it is equal to.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from podscale.errors import UserError
from podscale.models.resnet import BasicBlock, BottleneckBlock, ResNet
from podscale.models.weights.torchvision import to_torchvision
from podscale.recipe import Data

OPSET, IR_VERSION = 17, 8  # from 2022: every runtime in use reads them


class _Graph:
    """Nodes in the order in which they are added, each named by its output."""

    def __init__(self, onnx: Any, tensors: dict[str, np.ndarray]) -> None:
        self._onnx = onnx
        self.nodes: list[Any] = []
        self.tensors = {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}

    def add(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(self._onnx.helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def constant(self, name: str, value: Any) -> str:
        self.tensors[name] = np.asarray(value, np.float32)
        return name

    def conv_norm(self, x: str, conv: str, norm: str, stride: int = 1, epsilon: float = 1e-5) -> str:
        size = self.tensors[f"{conv}.weight"].shape[2]
        sides = {"kernel_shape": [size] * 2, "strides": [stride] * 2, "pads": [size // 2] * 4}
        y = self.add("Conv", [x, f"{conv}.weight"], conv, **sides)
        parts = [f"{norm}.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
        return self.add("BatchNormalization", [y, *parts], norm, epsilon=epsilon)

    def relu(self, x: str) -> str:
        return self.add("Relu", [x], f"{x}.relu")


def to_onnx(model: nnx.Module, data: Data, metadata: dict[str, str]) -> Any:
    """Return the ONNX model of a ResNet that takes images as `data` says.

    Raises:
        UserError: the model is not a ResNet, or the package onnx is not installed.
    """
    if not isinstance(model, ResNet):
        raise UserError(f"ONNX is written for ResNets, not for a {type(model).__name__}; export to StableHLO instead")
    onnx = _import_onnx()
    graph = _Graph(onnx, to_torchvision(model))
    logits = _add_layers(graph, model, _add_normalization(graph, data))
    graph.add("Softmax", [logits], "probabilities", axis=1)
    classes, kind = len(graph.tensors["fc.bias"]), onnx.TensorProto
    describe = onnx.helper.make_tensor_value_info
    sides = [data.image_size, data.image_size, 3]
    nodes = onnx.helper.make_graph(
        graph.nodes,
        "podscale",
        [describe("images", kind.UINT8, ["batch", *sides])],
        [describe(name, kind.FLOAT, ["batch", classes]) for name in ("logits", "probabilities")],
        [onnx.numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in graph.tensors.items()],
    )
    opset = [onnx.helper.make_opsetid("", OPSET)]
    exported = onnx.helper.make_model(nodes, opset_imports=opset, ir_version=IR_VERSION, producer_name="podscale")
    onnx.helper.set_model_props(exported, metadata)
    onnx.checker.check_model(exported, full_check=True)
    return exported


def _import_onnx() -> Any:
    try:
        import onnx
        import onnx.numpy_helper
    except ImportError:
        raise UserError("writing ONNX needs the package onnx: pip install onnx") from None
    return onnx


def _add_normalization(graph: _Graph, data: Data) -> str:
    """Add nodes from pixels to the model's input: the arithmetic of `augment.normalize`, then channels first."""
    mean, std = np.asarray(data.mean, np.float32), np.asarray(data.std, np.float32)
    x = graph.add("Cast", ["images"], "pixels", to=1)  # to float32
    x = graph.add("Mul", [x, graph.constant("scale", 1 / (255 * std))], "scaled")
    x = graph.add("Sub", [x, graph.constant("shift", mean / std)], "normalized")
    return graph.add("Transpose", [x], "inputs", perm=[0, 3, 1, 2])


def _add_layers(graph: _Graph, model: ResNet, x: str) -> str:
    layers: list[Any] = list(model.layers)
    stem, *blocks, _ = layers
    x = graph.relu(graph.conv_norm(x, "conv1", "bn1", stem.conv.stride, stem.norm.epsilon))
    if not stem.small:
        x = graph.add("MaxPool", [x], "maxpool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    names = [f"layer{stage}.{index}" for stage, count in enumerate(model.stages, 1) for index in range(count)]
    for name, block in zip(names, blocks, strict=True):
        x = _add_block(graph, name, block, x)
    x = graph.add("Flatten", [graph.add("GlobalAveragePool", [x], "avgpool")], "features")
    return graph.add("Gemm", [x, "fc.weight", "fc.bias"], "logits", transB=1)


def _add_block(graph: _Graph, name: str, block: BasicBlock | BottleneckBlock, x: str) -> str:
    depth, y = (3 if isinstance(block, BottleneckBlock) else 2), x
    for number in range(1, depth + 1):
        conv, norm = getattr(block, f"conv{number}"), getattr(block, f"norm{number}")
        y = graph.conv_norm(y, f"{name}.conv{number}", f"{name}.bn{number}", conv.stride, norm.epsilon)
        y = graph.relu(y) if number < depth else y
    if (shortcut := block.shortcut) is not None:
        down = f"{name}.downsample"
        x = graph.conv_norm(x, f"{down}.0", f"{down}.1", shortcut.conv.stride, shortcut.norm.epsilon)
    return graph.relu(graph.add("Add", [y, x], name))
