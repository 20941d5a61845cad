"""Resident pictures: a small data set that lives on every device, where the compiled step crops it.

What is loaded then is a pick of every picture, four numbers: which sample, where the crop's left and upper edges are,
and whether it is mirrored. They are the very crops that the host would have made (see `order`), so the step sees the
same pixels to the last bit; but an epoch of picks is less than a megabyte, and the host has nothing else to do.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podscale.config.options import Options
from podscale.data.index.dataset import Index, Splits
from podscale.data.order import eval_boxes
from podscale.data.picks import PICK_NUMBERS
from podscale.errors import UserError
from podscale.plan import not_resident
from podscale.pod import Pod
from podscale.recipe import Recipe

LITTLE = 1 / 16  # share of a device's memory that pictures may take without being asked to


def settled(options: Options, recipe: Recipe, pod: Pod, data: Splits) -> Options:
    """The options, with `cache` "device" where the pictures shall live on the devices, and nowhere else."""
    if options.cache not in ("auto", "device"):
        return options
    images = data.train.images
    why = not_resident(recipe) or ("there are none in memory" if images is None else _resized(recipe, data.train))
    if options.cache == "device":
        if why and len(data.train):
            raise UserError(f"plan.cache device: {why}")
        return options if not why else replace(options, cache="none")  # made-up pictures are on the devices anyway
    quick = bool(pod.devices) and pod.devices[0].platform in ("gpu", "tpu")
    if why or images is None or not quick or images.nbytes > LITTLE * pod.memory_bytes:
        return options
    return replace(options, cache="device")


def _resized(recipe: Recipe, index: Index) -> str:
    """Why the crops of these pictures, all of one size, could not be taken as they are."""
    left, top, right, bottom = eval_boxes(recipe.data.eval_fraction, index.sizes[:1])[0].tolist()
    if (right - left, bottom - top) == (recipe.data.image_size,) * 2:
        return ""
    return f"crops of {right - left:.0f} px would have to be resized to data.image_size {recipe.data.image_size}"


def placed(index: Index, mesh: Mesh) -> jax.Array:
    """All pictures of an index, uint8 [samples, height, width, 3], the same on all devices."""
    images, everywhere = index.images, NamedSharding(mesh, PartitionSpec())
    assert images is not None
    return jax.make_array_from_callback(images.shape, everywhere, lambda _: images)


def taken(pictures: jax.Array, picked: jax.Array, size: int) -> jax.Array:
    """The crops that were picked [..., PICK], uint8 [..., size, size, 3]; past its border a picture is reflected."""
    sample, left, top, mirrored = (picked[..., k, None] for k in range(PICK_NUMBERS))
    across = jnp.arange(size, dtype=jnp.int32)
    rows = _reflect(top + across, pictures.shape[1])
    columns = _reflect(left + jnp.where(mirrored == 1, size - 1 - across, across), pictures.shape[2])
    where = (sample[..., None], rows[..., :, None], columns[..., None, :])
    crops = pictures.at[where].get(mode="promise_in_bounds")
    # Behind the barrier the step is compiled as if these had been loaded, so that it rounds as it would have then.
    return lax.optimization_barrier(crops)


def _reflect(places: jax.Array, n: int) -> Any:
    """`decode.reflect` for the device."""
    if n == 1:
        return jnp.zeros_like(places)
    period = 2 * n - 2
    folded = jnp.abs(places) % period
    return jnp.minimum(folded, period - folded)
