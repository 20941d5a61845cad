"""Input: the contract of its kinds, how the devices get a step's images, and two kinds.

`HostFed` batches come from the hosts, image by image. `Resident` images live on every device: a small data set, which
the compiled step crops. The host then loads only a pick per image, four numbers: which sample, the crop's left and
upper edges, and whether it is flipped. They are the same crops that the host would have made (`data/order.py`), so the
step sees the same pixels to the last bit; but an epoch of picks is less than a megabyte, and the host has nothing else
to do.

`input_kinds.py` has all kinds by name; the plan, the loader and the step know the contract `Input` alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt8
from numpy.typing import NDArray

from podscale.recipe import Recipe, find_largest_size

PICK_NUMBERS = 4  # sample, left, top, flip
MAX_STEPS_PER_CALL = 64  # where the input sets no limit: a run that is asked to stop finishes its call first
MAX_CALL_BYTES = 256 << 20  # of a call's images from the host, on each device
IN_MEMORY = ("digits", "npz", "cifar", "mnist")  # data sources whose images are one array

Images = UInt8[Array, "*batch height width 3"]


class ImageBytes(NamedTuple):
    """Bytes on each device: of an image that is in use or prefetched, and of images that stay."""

    per_image: int
    resident: int


@runtime_checkable
class HostBatch(Protocol):
    """What a kind of input may ask of the loader, for one call; missing steps at its end are zeros."""

    def load_images(self) -> tuple[jax.Array, jax.Array]:
        """Return cropped images and labels on the devices."""

    def load_picks(self) -> tuple[jax.Array, jax.Array]:
        """Return which crops of which samples, int32 [..., PICK_NUMBERS], and labels, on the devices."""


@runtime_checkable
class Input(Protocol):
    """A kind of input. A call takes a batch from the host, and `residents`, arrays that stay on the devices."""

    @property
    def name(self) -> str: ...
    @property
    def is_resident(self) -> bool:
        """Whether evaluation batches stay on the devices as well, and calls are worth running once in advance."""

    def explain_obstacle(self, recipe: Recipe) -> str:
        """Return why this recipe's images cannot be fed like this; empty if they can."""

    def count_bytes(self, recipe: Recipe, samples: int) -> ImageBytes:
        """Return the bytes per device, with so many samples in the data set."""

    def choose_steps_per_call(self, recipe: Recipe, devices: int, samples: int) -> int:
        """Return how many updates a call of a GPU or TPU should do, with so many training samples."""

    def describe_batch(self, image_size: int) -> tuple[tuple[int, ...], np.dtype]:
        """Return shape and dtype of what the host sends for each image."""

    def describe_residents(self, image_size: int, samples: int) -> Sequence[tuple[tuple[int, ...], np.dtype]]:
        """Return shapes and dtypes of the arrays that stay on every device, with so many training samples."""

    def place_residents(self, images: NDArray[np.uint8] | None, mesh: Mesh) -> Sequence[jax.Array]:
        """Return these arrays on all devices, from all training images if they are in memory."""

    def load(self, batch: HostBatch) -> tuple[jax.Array, jax.Array]:
        """Return what the host sends for a call, and the labels, on the devices."""

    def get_images(self, batch: Array, residents: Sequence[Array], image_size: int) -> Images:
        """Return the images of one step, inside the step's `shard_map`, from what the host sent for it."""


@dataclass(frozen=True)
class HostFed:
    """The host sends the cropped images of every step."""

    name: str = "host"
    is_resident: bool = False

    def explain_obstacle(self, recipe: Recipe) -> str:
        return ""

    def count_bytes(self, recipe: Recipe, samples: int) -> ImageBytes:
        return ImageBytes(3 * find_largest_size(recipe) ** 2, 0)

    def choose_steps_per_call(self, recipe: Recipe, devices: int, samples: int) -> int:
        """Return up to 8 updates, with an input of at most `MAX_CALL_BYTES`."""
        step_bytes = recipe.batch.size // devices * self.count_bytes(recipe, samples).per_image
        return max(1, min(8, MAX_CALL_BYTES // step_bytes))

    def describe_batch(self, image_size: int) -> tuple[tuple[int, ...], np.dtype]:
        return (image_size, image_size, 3), np.dtype(np.uint8)

    def describe_residents(self, image_size: int, samples: int) -> Sequence[tuple[tuple[int, ...], np.dtype]]:
        return ()

    def place_residents(self, images: NDArray[np.uint8] | None, mesh: Mesh) -> Sequence[jax.Array]:
        return ()

    def load(self, batch: HostBatch) -> tuple[jax.Array, jax.Array]:
        return batch.load_images()

    def get_images(self, batch: Array, residents: Sequence[Array], image_size: int) -> Images:
        return batch


@dataclass(frozen=True)
class Resident:
    """All images live on every device; the host sends picks of them."""

    name: str = "device"
    is_resident: bool = True

    def explain_obstacle(self, recipe: Recipe) -> str:
        if recipe.data.source not in IN_MEMORY:
            return f"images of data.source {recipe.data.source} are in files; decoded is as far as they can be kept"
        if recipe.augment.crop == "resized":
            return "augment.crop resized needs the host; padded and centre do not"
        if recipe.data.train_sizes:
            return "data.train_sizes needs the host, which resizes images"
        if recipe.augment.randaugment:
            return "augment.randaugment needs the host; leave it out"
        return ""

    def count_bytes(self, recipe: Recipe, samples: int) -> ImageBytes:
        return ImageBytes(4 * PICK_NUMBERS, 3 * recipe.data.image_size**2 * samples)

    def choose_steps_per_call(self, recipe: Recipe, devices: int, samples: int) -> int:
        """Return an epoch."""
        return max(1, min(MAX_STEPS_PER_CALL, round(samples / recipe.batch.size)))

    def describe_batch(self, image_size: int) -> tuple[tuple[int, ...], np.dtype]:
        return (PICK_NUMBERS,), np.dtype(np.int32)

    def describe_residents(self, image_size: int, samples: int) -> Sequence[tuple[tuple[int, ...], np.dtype]]:
        return (((samples, image_size, image_size, 3), np.dtype(np.uint8)),)

    def place_residents(self, images: NDArray[np.uint8] | None, mesh: Mesh) -> Sequence[jax.Array]:
        assert images is not None
        everywhere = NamedSharding(mesh, PartitionSpec())
        return (jax.make_array_from_callback(images.shape, everywhere, lambda _: images),)

    def load(self, batch: HostBatch) -> tuple[jax.Array, jax.Array]:
        return batch.load_picks()

    def get_images(self, batch: Array, residents: Sequence[Array], image_size: int) -> Images:
        (images,) = residents
        return crop_picks(images, batch, image_size)


HOST_FED, RESIDENT = HostFed(), Resident()


# --- crops on the device ---------------------------------------------------------------------------------------------


def crop_picks(images: UInt8[Array, "samples h w 3"], picks: Int[Array, "*batch 4"], size: int) -> Images:
    """Return the crops of picks, uint8 [..., size, size, 3]; images reflect at their border."""
    sample, left, top, flipped = (picks[..., k, None] for k in range(PICK_NUMBERS))
    across = jnp.arange(size, dtype=jnp.int32)
    rows = _reflect(top + across, images.shape[1])
    columns = _reflect(left + jnp.where(flipped == 1, size - 1 - across, across), images.shape[2])
    indices = (sample[..., None], rows[..., :, None], columns[..., None, :])
    crops = images.at[indices].get(mode="promise_in_bounds")
    # After the barrier the step is compiled as if the crops had been loaded, so that it rounds in the same way.
    return lax.optimization_barrier(crops)


def _reflect(places: Int[Array, "*batch size"], n: int) -> Int[Array, "*batch size"]:
    """Do what `decode.reflect` does, on the device."""
    if n == 1:
        return jnp.zeros_like(places)
    period = 2 * n - 2
    folded = jnp.abs(places) % period
    return jnp.minimum(folded, period - folded)
