"""Measuring gradient summation: every strategy, from a few bytes to a model's whole tree, beside the model of time.

Rates are those of NCCL's tests: the algorithm's is bytes over seconds; the bus's counts what each chip must send for
them, 2(N-1)/N times as much, and is the same for all N where links are the limit.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from podscale.config.options import Options
from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.forecast import probe
from podscale.models import registry
from podscale.models.functional import functional
from podscale.parallel.summation import STRATEGIES, sum_tree
from podscale.plan import BUCKET_MIB
from podscale.pod import Pod
from podscale.recipe import Recipe

SIZES = (64, 4 << 10, 64 << 10, 1_000_000, 10_000_000, 100_000_000)
SECONDS_PER_POINT = 10.0


def measure(
    recipe: Recipe,
    pod: Pod,
    options: Options = Options(),
    strategies: Sequence[str] = (),
    sizes: Sequence[int] = SIZES,
    tree: bool = True,
    repeats: int = 5,
) -> dict[str, Any]:
    """Times of all strategies for payloads of `sizes` bytes a device, and for the gradients of the recipe's model."""
    for name in strategies:
        if name not in STRATEGIES:
            raise UserError(f"there is no gradient summation {name!r}: {suggest_names(name, STRATEGIES)}")
    if repeats < 1 or min(sizes, default=4) < 4:
        raise UserError("--repeats must be at least 1, and --bytes at least 4")
    if pod.size == 1:
        raise UserError("one device has nothing to sum with; --pod.virtual 2x2 makes four")
    links = probe.measured(pod)
    payloads = [(f"{size:,} B", jax.ShapeDtypeStruct((size // 4,), jnp.float32)) for size in sizes]
    payloads += [(recipe.model.name, _gradients(recipe))] if tree else []
    points = [
        _point(pod, options, links, name, label, like, repeats)
        for label, like in payloads
        for name in strategies or STRATEGIES
    ]
    return {
        "devices": f"{pod.size} x {pod.kind}",
        "pod": {"rows": pod.rows, "cols": pod.cols, "cores": pod.cores, "hosts": pod.hosts},
        "payload": options.payload,
        "links": links.to_dict(),
        "points": points,
    }


def _point(
    pod: Pod, options: Options, links: probe.Probe, strategy: str, label: str, like: Any, repeats: int
) -> dict[str, Any]:
    """One strategy on one payload, with the sums compared with what they must be."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])
    bucket_bytes = (BUCKET_MIB if options.bucket_mib < 0 else options.bucket_mib) << 20

    def body(x: jax.Array) -> jax.Array:
        parts = [part.reshape(leaf.shape) for part, leaf in zip(jnp.split(x, ends[:-1]), leaves, strict=True)]
        tree = jax.tree.unflatten(structure, parts)
        total = sum_tree(tree, strategy=strategy, payload=options.payload, bucket_bytes=bucket_bytes)
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(total)])

    size = 4 * int(ends[-1])
    seconds, sums = probe.timed(pod.mesh(), body, size, repeats, SECONDS_PER_POINT)
    expected = pod.size * (pod.size + 1) / 2
    largest = max(float(np.abs(np.asarray(s.data) - expected).max()) for s in sums.addressable_shards)
    sent = size * (0.5 if options.payload == "bfloat16" else 1)
    chips = pod.rows * pod.cols
    bus = sent / seconds * 2 * (chips - 1) / chips
    predicted = links.summation_s(strategy, sent)
    return {
        "strategy": strategy,
        "payload": label,
        "bytes": size,
        "ms": seconds * 1e3,
        "algorithm_rate": size / seconds,
        "bus_rate": bus,
        "link_share": bus / links.chip_rate,
        "model_ms": predicted * 1e3,
        "relative_error": largest / expected,
    }


def _gradients(recipe: Recipe) -> Any:
    """The shapes of what training the recipe's model sums."""
    data = recipe.data
    model = nnx.eval_shape(lambda: registry.build(recipe.model, data.classes or 1000, data.image_size))
    net, params, _ = functional(model, recipe.model.freeze)
    return net.split(params)[0]


# --- words ---------------------------------------------------------------------------------------------------------

HEAD = ["payload", "strategy", "ms", "MB/s", "bus MB/s", "of the links", "model ms"]


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The points as rows of a table."""
    return [
        [
            point["payload"],
            point["strategy"],
            f"{point['ms']:.2f}",
            f"{point['algorithm_rate'] / 1e6:,.2f}",
            f"{point['bus_rate'] / 1e6:,.2f}",
            f"{point['link_share']:.0%}",
            f"{point['model_ms']:.2f}",
        ]
        for point in found["points"]
    ]
