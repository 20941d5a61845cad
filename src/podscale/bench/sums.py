"""Measure gradient summation: every strategy, from a few bytes to a model's gradients, next to the model of time.

Rates follow NCCL's tests: the algorithm's rate is bytes over seconds; the bus rate counts the bytes that each chip must
send, 2(N-1)/N times as many, and is the same for all N where links are the limit.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from podscale.config.json_types import JsonObject
from podscale.config.options import Options
from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.forecast import choice, probe
from podscale.models import registry
from podscale.models.functional import make_functional
from podscale.parallel.strategies import find_summation, list_replicated
from podscale.parallel.summation import PAYLOADS, Load, Transfer
from podscale.plan import BUCKET_MIB
from podscale.pod import Pod
from podscale.recipe import Recipe

SIZES = (64, 4 << 10, 64 << 10, 1_000_000, 10_000_000, 100_000_000)
SECONDS_PER_POINT = 10.0
AUTO = "auto"  # the strategies that `plan.summation` auto uses, by size


def measure_sums(
    recipe: Recipe,
    pod: Pod,
    options: Options = Options(),
    strategies: Sequence[str] = (),
    sizes: Sequence[int] = SIZES,
    tree: bool = True,
    repeats: int = 5,
) -> JsonObject:
    """Time the strategies on payloads of several sizes and on the gradients of the recipe's model.

    Args:
        recipe: its model's gradients are summed.
        pod: at least two devices.
        options: payload and bucket size.
        strategies: which strategies, or "auto" for the choice among all of them; all if empty. A strategy is left out
            at a size at which it is predicted to take over ten seconds and twice as long as the choice.
        sizes: bytes per device.
        tree: whether to sum the model's gradients too.
        repeats: timed repetitions, whose median counts.

    Raises:
        UserError: an unknown strategy, a size or number of repeats that is too small, or a pod of one device.
    """
    known = [AUTO, *list_replicated()]
    for name in strategies:
        if name not in known:
            raise UserError(f"there is no gradient summation {name!r}: {suggest_names(name, known)}")
    if repeats < 1 or min(sizes, default=4) < 4:
        raise UserError("--repeats must be at least 1, and --bytes at least 4")
    if pod.size == 1:
        raise UserError("one device has nothing to sum with; --pod.virtual 2x2 makes four")
    links = probe.measure_links(pod)
    by_size = choice.choose_by_size(links, pod)
    payloads = [(f"{size:,} B", jax.ShapeDtypeStruct((size // 4,), jnp.float32)) for size in sizes]
    payloads += [(recipe.model.name, _make_gradients(recipe))] if tree else []
    texts = {name: by_size if name == AUTO else name for name in strategies or list_replicated()}
    points = [
        _measure_point(pod, options, links, text, label, like, repeats) | {"strategy": name}
        for label, like in payloads
        for name, text in texts.items()
        if not _is_much_slower(links, text, by_size, _count_bytes(like))
    ]
    return {
        "devices": f"{pod.size} x {pod.kind}",
        "pod": {"rows": pod.rows, "cols": pod.cols, "cores": pod.cores, "hosts": pod.hosts},
        "payload": options.payload,
        "links": links.to_dict(),
        "auto": by_size,
        "points": points,
    }


def _is_much_slower(links: probe.Probe, strategy: str, by_size: str, size: int) -> bool:
    """Return whether a point would take long, for a strategy that is predicted to be far from the fastest."""
    seconds, best = (find_summation(text).predict_s(links, Load(size)) for text in (strategy, by_size))
    return seconds > SECONDS_PER_POINT and seconds > 2 * best


def _count_bytes(like: PyTree) -> int:
    return sum(4 * leaf.size for leaf in jax.tree.leaves(like))


def _measure_point(
    pod: Pod, options: Options, links: probe.Probe, strategy: str, label: str, like: PyTree, repeats: int
) -> JsonObject:
    """Time one strategy on one payload and compare the sums with the expected value."""
    leaves, structure, summation = *jax.tree.flatten(like), find_summation(strategy)
    ends = np.cumsum([leaf.size for leaf in leaves])
    transfer = Transfer(options.payload, (BUCKET_MIB if options.bucket_mib < 0 else options.bucket_mib) << 20)

    def body(x: jax.Array) -> jax.Array:
        parts = [part.reshape(leaf.shape) for part, leaf in zip(jnp.split(x, ends[:-1]), leaves, strict=True)]
        total = summation.sum_gradients(jax.tree.unflatten(structure, parts), transfer)
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(total)])

    size = 4 * int(ends[-1])
    seconds, sums = probe.time_on_mesh(pod.mesh(), body, size, repeats, SECONDS_PER_POINT)
    expected = pod.size * (pod.size + 1) / 2
    largest = max(float(np.abs(np.asarray(s.data) - expected).max()) for s in sums.addressable_shards)
    sent = size * PAYLOADS[options.payload] / PAYLOADS["float32"]
    chips = pod.rows * pod.cols
    bus = sent / seconds * 2 * (chips - 1) / chips
    predicted = summation.predict_s(links, Load(sent))
    return {
        "payload": label,
        "bytes": size,
        "ms": seconds * 1e3,
        "algorithm_rate": size / seconds,
        "bus_rate": bus,
        "link_share": bus / links.chip_rate,
        "model_ms": predicted * 1e3,
        "relative_error": largest / expected,
    }


def _make_gradients(recipe: Recipe) -> PyTree:
    """Return the shapes of the gradients of the recipe's model."""
    data = recipe.data
    model = nnx.eval_shape(lambda: registry.build_model(recipe.model, data.classes or 1000, data.image_size))
    net, params, _ = make_functional(model, recipe.model.freeze)
    return net.split(params)[0]


# --- text ----------------------------------------------------------------------------------------------------------

HEADER = ("payload", "strategy", "ms", "MB/s", "bus MB/s", "of the links", "model ms")


def format_rows(result: JsonObject) -> list[list[str]]:
    """Return the measured points as rows of a table."""
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
        for point in result["points"]
    ]
