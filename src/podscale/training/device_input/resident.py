"""Resident images: a small data set that lives on every device, where the compiled step crops it.

The host then loads only a pick per image, four numbers: which sample, the crop's left and upper edges, and whether it
is flipped. They are the same crops that the host would have made (see `data.order`), so the step sees the same pixels
to the last bit; but an epoch of picks is less than a megabyte, and the host has nothing else to do.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podscale.config.options import Options
from podscale.data.index.dataset import Index, Splits
from podscale.data.order import compute_eval_boxes
from podscale.data.picks import PICK_NUMBERS
from podscale.errors import UserError
from podscale.plan import explain_not_resident
from podscale.pod import Pod
from podscale.recipe import Recipe

AUTO_SHARE = 1 / 16  # share of a device's memory that images may take with plan.cache auto


def resolve_cache(options: Options, recipe: Recipe, pod: Pod, data: Splits) -> Options:
    """Return the options with `cache` "device" if and only if the images are to live on the devices."""
    if options.cache not in ("auto", "device"):
        return options
    images = data.train.images
    obstacle = explain_not_resident(recipe)
    obstacle = obstacle or ("there are none in memory" if images is None else _explain_resize(recipe, data.train))
    if options.cache == "device":
        if obstacle and len(data.train):
            raise UserError(f"plan.cache device: {obstacle}")
        return options if not obstacle else replace(options, cache="none")  # synthetic images are on the devices anyway
    is_accelerator = bool(pod.devices) and pod.devices[0].platform in ("gpu", "tpu")
    if obstacle or images is None or not is_accelerator or images.nbytes > AUTO_SHARE * pod.memory_bytes:
        return options
    return replace(options, cache="device")


def _explain_resize(recipe: Recipe, index: Index) -> str:
    """Return why these images, all of one size, cannot be cropped without resizing; "" if they can."""
    left, top, right, bottom = compute_eval_boxes(recipe.data.eval_fraction, index.sizes[:1])[0].tolist()
    if (right - left, bottom - top) == (recipe.data.image_size,) * 2:
        return ""
    return f"crops of {right - left:.0f} px would have to be resized to data.image_size {recipe.data.image_size}"


def place_images(index: Index, mesh: Mesh) -> jax.Array:
    """Return all images of an index, uint8 [samples, height, width, 3], replicated on all devices."""
    images, everywhere = index.images, NamedSharding(mesh, PartitionSpec())
    assert images is not None
    return jax.make_array_from_callback(images.shape, everywhere, lambda _: images)


def crop_picks(images: jax.Array, picks: jax.Array, size: int) -> jax.Array:
    """Return the crops of picks [..., PICK_NUMBERS], uint8 [..., size, size, 3]; images reflect at their border."""
    sample, left, top, flipped = (picks[..., k, None] for k in range(PICK_NUMBERS))
    across = jnp.arange(size, dtype=jnp.int32)
    rows = _reflect(top + across, images.shape[1])
    columns = _reflect(left + jnp.where(flipped == 1, size - 1 - across, across), images.shape[2])
    indices = (sample[..., None], rows[..., :, None], columns[..., None, :])
    crops = images.at[indices].get(mode="promise_in_bounds")
    # After the barrier the step is compiled as if the crops had been loaded, so that it rounds in the same way.
    return lax.optimization_barrier(crops)


def _reflect(places: jax.Array, n: int) -> Any:
    """Do what `decode.reflect` does, on the device."""
    if n == 1:
        return jnp.zeros_like(places)
    period = 2 * n - 2
    folded = jnp.abs(places) % period
    return jnp.minimum(folded, period - folded)
