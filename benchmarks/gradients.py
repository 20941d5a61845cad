"""Claim: fused layers give the gradient of a whole network as exactly as modules do.

The gradient by every parameter over batches of real photos, three ways from the same weights: modules in float32, which
the others are compared with, modules in bfloat16, and fused layers in bfloat16. What rounding does differs from batch
to batch and shrinks in the mean over many; an error of the method would stay. So both are told: how far a batch's
gradient is off, and how far the mean's is (‖g - g32‖ / ‖g32‖, the worst parameter of each kind). The same for
batch-norm statistics.

    python benchmarks/gradients.py PHOTOS [--batches 16] [--batch 256] [--size 128] [--fused on] [--set model.init=RUN]

Weights are drawn anew unless `model.init` names a run.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from podscale import pod as pods
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.training import compilation, setup

SCALE = 2.0**20  # learning rate of the one update from which a gradient is read: weights are small beside it
WAYS = {"float32": "off", "modules": "off", "fused": ""}  # which layers: as asked for if nothing else
Found = dict[str, np.ndarray]


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
    found = {way: list(gradients(arguments, way, fused or arguments.fused)) for way, fused in WAYS.items()}
    means = {way: [mean(batches)] for way, batches in found.items()}
    print(
        f"{jax.devices()[0].device_kind}, {arguments.batch} images of {arguments.size} px, {arguments.batches} batches"
    )
    print(f"{'':32}{'a batch':>18}{'':6}{'the mean over all':>18}")
    print(f"{'off by, as a share of its norm':32}" + f"{'modules':>9}{'fused':>9}{'':6}" * 2)
    for kind in sorted({kind_of(name) for name in found["float32"][0]}):
        shares = [[off(some[way], some["float32"], kind) for way in ("modules", "fused")] for some in (found, means)]
        print(f"{kind:32}" + "".join(f"{one:9.4f}{other:9.4f}{'':6}" for one, other in shares), flush=True)


def gradients(arguments: argparse.Namespace, way: str, fused: str) -> Iterator[Found]:
    """The gradient by every parameter, and the statistics, of one batch after another."""
    fields = {
        "data.path": arguments.photos,
        "data.image_size": arguments.size,
        "batch.size": arguments.batch,
        "batch.span": arguments.span,
        "model.precision": "float32" if way == "float32" else "bfloat16",
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
    recipe = recipes.override(recipes.load(arguments.recipe), fields)
    job = setup.prepare(recipe, pods.find(), Options(fused=fused, steps_per_call=1, cache="off"))
    job = setup.begun(job)[0] if recipe.model.init else job
    call = compilation.compile_train_step(job)
    before = jax.device_get((job.state.params, job.state.stats))
    with setup.train_batches(job, job.plan.calls()[: arguments.batches]) as batches:
        for batch in batches:
            state = jax.tree.map(jnp.copy, job.state)
            state, _ = call(state, batch.images, batch.labels, np.int32(batch.count))
            yield named(before, jax.device_get((state.params, state.stats)))


def named(before: Any, after: Any) -> Found:
    params = jax.tree.map(lambda old, new: (old.astype(np.float64) - new) / SCALE, before[0], after[0])
    stats = jax.tree.map(lambda new: new.astype(np.float64), after[1])
    leaves = tree_leaves_with_path({"gradient": params, "statistics": stats})
    return {keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def kind_of(name: str) -> str:
    """What belongs together: one line of the table."""
    first, *_, last = name.removesuffix(".value").split(".")
    return f"{first}, {last}"


def off(found: list[Found], exact: list[Found], kind: str) -> float:
    """The largest share over parameters of the kind, root mean square over batches."""
    names = [name for name in exact[0] if kind_of(name) == kind]
    return max(
        np.sqrt(np.mean([share(f[name], e[name]) ** 2 for f, e in zip(found, exact, strict=True)])) for name in names
    )


def share(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / max(np.linalg.norm(exact), 1e-30))


def mean(batches: list[Found]) -> Found:
    return {name: np.mean([batch[name] for batch in batches], axis=0) for name in batches[0]}


if __name__ == "__main__":
    main()
