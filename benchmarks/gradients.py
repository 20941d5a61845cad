"""Claim: fused layers give the gradient of a whole network as exactly as modules do.

The gradient by every parameter over batches of real photos, computed in three ways from the same weights: modules in
float32, with which the others are compared, modules in bfloat16, and fused layers in bfloat16. Rounding errors differ
from batch to batch and shrink in the mean over many batches; an error of the method would stay. So both are printed:
how far the gradient of a batch is off, and how far that of the mean is (‖g - g32‖ / ‖g32‖, the worst parameter of each
kind). The same for batch-norm statistics.

    python benchmarks/gradients.py PHOTOS [--batches 16] [--batch 256] [--size 128] [--fused on] [--set model.init=RUN]

Weights are randomly initialized unless `model.init` names a run.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from podscale import pod as pods
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.training import compilation, setup

SCALE = 2.0**20  # learning rate of the single update from which a gradient is read: weights are small beside it
METHODS = {"float32": "off", "modules": "off", "fused": ""}  # plan.fused of each; empty: as --fused says
Gradients = dict[str, np.ndarray]  # gradients and statistics by name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--span", type=int, default=64)
    parser.add_argument("--fused", default="on")
    parser.add_argument("--recipe", default="imagefolder")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="other fields of the recipe")
    arguments = parser.parse_args()
    gradients = {
        method: list(compute_gradients(arguments, method, fused or arguments.fused))
        for method, fused in METHODS.items()
    }
    means = {method: [average(batches)] for method, batches in gradients.items()}
    print(
        f"{jax.devices()[0].device_kind}, {arguments.batch} images of {arguments.size} px, {arguments.batches} batches"
    )
    print(f"{'':32}{'a batch':>18}{'':6}{'the mean over all':>18}")
    print(f"{'error relative to the norm':32}" + f"{'modules':>9}{'fused':>9}{'':6}" * 2)
    for kind in sorted({get_kind(name) for name in gradients["float32"][0]}):
        errors = [
            [compute_error(results[method], results["float32"], kind) for method in ("modules", "fused")]
            for results in (gradients, means)
        ]
        print(f"{kind:32}" + "".join(f"{modules:9.4f}{fused:9.4f}{'':6}" for modules, fused in errors), flush=True)


def compute_gradients(arguments: argparse.Namespace, method: str, fused: str) -> Iterator[Gradients]:
    """Yield the gradient by every parameter, and the statistics, of one batch after another."""
    fields = {
        "data.path": arguments.photos,
        "data.image_size": arguments.size,
        "batch.size": arguments.batch,
        "batch.span": arguments.span,
        "model.precision": "float32" if method == "float32" else "bfloat16",
        "train.stats_momentum": 0.0,
        "optimizer.name": "sgd",
        "optimizer.momentum": 0.0,
        "optimizer.nesterov": "false",
        "optimizer.weight_decay": 0.0,
        "schedule.peak": SCALE,
        "schedule.scale_batch": 0,
        "schedule.warmup_epochs": 0,
        "schedule.decay": "constant",
    } | dict(field.split("=", 1) for field in arguments.set)
    recipe = recipes.override_recipe(recipes.load_recipe(arguments.recipe), fields)
    prepared = setup.prepare(recipe, pods.find_pod(), Options(fused=fused, steps_per_call=1, cache="none"))
    prepared = setup.load_initial_weights(prepared)[0] if recipe.model.init else prepared
    prepared = fill_zeros(prepared)
    call = compilation.compile_train_step(prepared)
    before = prepared.weights
    with setup.load_train_batches(prepared, prepared.plan.calls()[: arguments.batches]) as batches:
        for batch in batches:
            state = prepared.init_state()
            state, _ = call(state, batch.images, batch.labels, np.int32(batch.count))
            yield read_gradients(before, jax.device_get((state.params, state.stats)))


def fill_zeros(program: Any) -> Any:
    """Return the program with random kernels where they are zero, as in the heads of some new networks.

    Behind them all gradients would be zero.
    """
    random = np.random.default_rng(0)

    def fill(leaf: Any) -> Any:
        is_zero = leaf.ndim > 1 and not np.asarray(leaf).any()
        return random.normal(0, 0.02, leaf.shape).astype(leaf.dtype) if is_zero else leaf

    return replace(program, weights=program.weights._replace(params=jax.tree.map(fill, program.weights.params)))


def read_gradients(before: Any, after: Any) -> Gradients:
    """Return gradients and statistics by name, from parameters and statistics before and after an update."""
    params = jax.tree.map(lambda old, new: (old.astype(np.float64) - new) / SCALE, before[0], after[0])
    stats = jax.tree.map(lambda new: new.astype(np.float64), after[1])
    leaves = tree_leaves_with_path({"gradient": params, "statistics": stats})
    return {keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def get_kind(name: str) -> str:
    """Return the row of the table that a parameter belongs to."""
    first, *_, last = name.removesuffix(".value").split(".")
    return f"{first}, {last}"


def compute_error(results: list[Gradients], exact: list[Gradients], kind: str) -> float:
    """Return the largest relative error over parameters of the kind, root mean square over batches."""
    names = [name for name in exact[0] if get_kind(name) == kind]
    pairs = list(zip(results, exact, strict=True))
    return max(np.sqrt(np.mean([compute_relative_error(a[name], b[name]) ** 2 for a, b in pairs])) for name in names)


def compute_relative_error(array: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(array - exact) / max(np.linalg.norm(exact), 1e-30))


def average(batches: list[Gradients]) -> Gradients:
    return {name: np.mean([batch[name] for batch in batches], axis=0) for name in batches[0]}


if __name__ == "__main__":
    main()
