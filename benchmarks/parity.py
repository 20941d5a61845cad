"""Claim: our networks are timm's: the same parameters, and from the same weights the same logits and gradients.

Every parameter is randomized first, so that none is 0 or 1 and no mistake can hide. Both networks then get the same
images in float32 on the CPU. Logits are compared in evaluation; gradients of a random linear function of the logits
with respect to every parameter, in training, where batch norm uses the batch's statistics. A deviation is the largest
difference of a tensor divided by the largest value of timm's; for gradients that of the worst tensor is shown. A bias
whose effect the next batch norm removes has a gradient of 0, of which both have rounding errors: these are divided by
the largest gradient of all. ReLU6 of Lite networks has kinks, where a rounding error changes the gradient: theirs are
compared in float64.

    pip install torch timm
    python benchmarks/parity.py [--models vit_small efficientnet_b0 ...] [--images 4] [--threads 2]

`--record FILE` writes timm's logits and norms of gradients for small images in float64, which tests compare with where
there is no timm.
"""

import argparse
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from podscale import recipe
from podscale.models import registry
from podscale.models.functional import make_functional
from podscale.models.weights.timm import from_timm, list_places, to_timm
from podscale.parallel.batch_norm import Groups

TOLERANCE = 1e-4
CLASSES = 1000
ZERO = 1e-5  # share of the largest gradient below which one counts as 0
RECORD_SIZE, RECORD_CLASSES = 64, 10


class Pair(NamedTuple):
    """A network of ours, timm's name for it, the settings of each, and the side of the images."""

    name: str
    timm_name: str
    config: Mapping[str, Any] = MappingProxyType({})
    timm_settings: Mapping[str, Any] = MappingProxyType({})
    image_size: int = 224


SAME = {"padding": "same", "norm_epsilon": 1e-3}
MEAN = {"class_token": False, "global_pool": "avg", "fc_norm": False}
PAIRS = {
    "vit_tiny": Pair("vit_tiny", "vit_tiny_patch16_224"),
    "vit_small": Pair("vit_small", "vit_small_patch16_224"),
    "vit_small, patches of 32": Pair("vit_small", "vit_small_patch32_224", {"patch": 32}),
    "vit_small, mean": Pair("vit_small", "vit_small_patch16_224", {"pooling": "mean"}, MEAN),
    "vit_small, 160 px": Pair("vit_small", "vit_small_patch16_224", {}, {"img_size": 160}, 160),
    "vit_base": Pair("vit_base", "vit_base_patch16_224"),
    "efficientnet_b0": Pair("efficientnet_b0", "efficientnet_b0"),
    "efficientnet_b0, TensorFlow's": Pair("efficientnet_b0", "tf_efficientnet_b0", SAME),
    "efficientnet_b1": Pair("efficientnet_b1", "efficientnet_b1"),
    "efficientnet_b5": Pair("efficientnet_b5", "efficientnet_b5"),
    "efficientnet_lite0": Pair("efficientnet_lite0", "efficientnet_lite0"),
    "efficientnet_lite0, TensorFlow's": Pair("efficientnet_lite0", "tf_efficientnet_lite0", SAME),
    "efficientnet_lite4": Pair("efficientnet_lite4", "efficientnet_lite4"),
    "convnext_tiny": Pair("convnext_tiny", "convnext_tiny"),
    "convnext_small": Pair("convnext_small", "convnext_small"),
    "convnext_base": Pair("convnext_base", "convnext_base"),
}


class Comparison(NamedTuple):
    """Numbers of parameters, and the largest deviations of logits and gradients."""

    parameters: int
    timm_parameters: int
    logits: float
    gradients: float
    worst: str  # the parameter of the largest deviation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    if arguments.record:
        record = {title: record_timm(PAIRS[title]) for title in arguments.models}
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
        return
    print("| network | timm's name | px | parameters | timm's | logits | gradients |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    failed = []
    for title in arguments.models:
        pair, result = PAIRS[title], compare(PAIRS[title], arguments.images)
        counts = f"{result.parameters:,} | {result.timm_parameters:,}"
        deviations = f"{result.logits:.0e} | {result.gradients:.0e}"
        print(f"| {title} | `{pair.timm_name}` | {pair.image_size} | {counts} | {deviations} |", flush=True)
        if result.parameters != result.timm_parameters or max(result.logits, result.gradients) > TOLERANCE:
            failed.append(f"{title} ({result.worst})")
    if failed:
        raise SystemExit(f"differ: {', '.join(failed)}")


def compare(pair: Pair, images: int = 4) -> Comparison:
    """Return how our network differs from timm's."""
    inputs, direction = sample_inputs(images, pair.image_size, CLASSES)
    expected, expected_gradients = compute_with_timm(pair, inputs, direction)
    model = build_randomized(pair, pair.image_size, CLASSES)
    logits, gradients = compute_with_podscale(model, inputs, direction)
    if "lite" in pair.name:
        wide = inputs.astype(np.float64), direction.astype(np.float64)
        _, expected_gradients = compute_with_timm(pair, *wide)
        with jax.enable_x64(True):
            _, gradients = compute_with_podscale(build_randomized(pair, pair.image_size, CLASSES, "float64"), *wide)
    largest = max(np.abs(gradient).max() for gradient in expected_gradients.values())
    deviations = {
        name: measure_deviation(gradients[name], expected, largest) for name, expected in expected_gradients.items()
    }
    worst = max(deviations, key=deviations.__getitem__)
    return Comparison(
        sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))),
        sum(gradient.size for gradient in expected_gradients.values()),
        measure_deviation(logits, expected),
        deviations[worst],
        worst,
    )


def record_timm(pair: Pair) -> dict[str, Any]:
    """Return timm's logits and the norms of some of its gradients for small images."""
    inputs, direction = (array.astype(np.float64) for array in sample_inputs(2, RECORD_SIZE, RECORD_CLASSES))
    settings = {"img_size": RECORD_SIZE} if pair.name.startswith("vit") else {}
    pair = pair._replace(timm_settings={**pair.timm_settings, **settings})
    logits, gradients = compute_with_timm(pair, inputs, direction)
    norms = {name: float(np.linalg.norm(gradient)) for name, gradient in gradients.items() if gradient.ndim > 1}
    chosen = list(norms)[:: max(1, len(norms) // 8)]
    return {"logits": logits.tolist(), "gradient_norms": {name: norms[name] for name in chosen}}


def sample_inputs(images: int, size: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random images [images, size, size, 3] and a gradient of logits [images, classes]."""
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(images, size, size, 3)).astype(np.float32)
    return inputs, rng.normal(size=(images, classes)).astype(np.float32)


def build_randomized(pair: Pair, size: int, classes: int, precision: str = "float32") -> nnx.Module:
    """Return our network with random weights, sampled in float32, that depend on timm's names alone."""
    config = {"name": pair.name, "precision": precision, **pair.config}
    model = registry.build_model(recipe.Model(**config), classes, size)
    from_timm(model, randomize(to_timm(model)))
    return model


def compute_with_timm(
    pair: Pair, inputs: np.ndarray, direction: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return timm's logits in evaluation, and in training the gradients of <logits, direction>."""
    import timm
    import torch

    settings = {"drop_rate": 0.0, "drop_path_rate": 0.0, "num_classes": direction.shape[1], **pair.timm_settings}
    peer = timm.create_model(pair.timm_name, **settings).to(torch.from_numpy(inputs).dtype)
    weights = randomize({name: tensor.numpy() for name, tensor in peer.state_dict().items()})
    peer.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    peer_inputs = torch.from_numpy(inputs.transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        logits = peer.eval()(peer_inputs).numpy()
    (peer.train()(peer_inputs) * torch.from_numpy(direction)).sum().backward()
    return logits, {name: parameter.grad.numpy() for name, parameter in peer.named_parameters()}


def compute_with_podscale(
    model: nnx.Module, inputs: np.ndarray, direction: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return our logits and gradients, by timm's names."""
    net, params, stats = make_functional(model)
    logits = jax.jit(net.evaluate)(params, stats, inputs)

    def compute_loss(params: Any) -> jax.Array:
        return (net.train(params, stats, jnp.asarray(inputs), Groups())[0] * direction).sum()

    gradients = net.build_module(jax.jit(jax.grad(compute_loss))(params), stats)
    return np.asarray(logits), {name: place.read() for name, place in list_places(gradients).items()}


def randomize(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return weights none of which is 0 or 1 and with which outputs stay of order 1."""

    def sample(name: str, old: np.ndarray) -> np.ndarray:
        shape, rng = old.shape, np.random.default_rng(zlib.crc32(name.encode()))
        if name.endswith("num_batches_tracked"):
            return old
        if name.endswith("running_var"):
            return rng.uniform(0.5, 1.5, shape)
        if name.endswith(("cls_token", "pos_embed")):
            return 0.5 * rng.normal(size=shape)
        if len(shape) == 1:
            return rng.uniform(0.2, 0.8, shape) * rng.choice([-1, 1], shape)
        return rng.normal(size=shape) / math.sqrt(math.prod(shape[1:]))

    narrow = {name: sample(name, old).astype(np.float32) for name, old in tensors.items()}
    return {name: array.astype(tensors[name].dtype) for name, array in narrow.items()}


def measure_deviation(ours: np.ndarray, theirs: np.ndarray, largest: float = 0.0) -> float:
    """Return the largest difference, divided by timm's largest value, or by `largest` of which that is a tiny share."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    scale = np.abs(theirs).max()
    return float(np.abs(ours - theirs).max() / (largest if scale < ZERO * largest else scale))


if __name__ == "__main__":
    main()
