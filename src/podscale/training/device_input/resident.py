"""Decide whether a data set's images live on the devices (`parallel/inputs.py`), by the images themselves."""

from dataclasses import replace

from podscale.config.options import Options
from podscale.data.index.dataset import Index, Splits
from podscale.data.order import compute_eval_boxes
from podscale.errors import UserError
from podscale.parallel.inputs import RESIDENT
from podscale.pod import Pod
from podscale.recipe import Recipe

AUTO_SHARE = 1 / 16  # share of a device's memory that images may take with plan.cache auto


def resolve_cache(options: Options, recipe: Recipe, pod: Pod, data: Splits) -> Options:
    """Return the options with `cache` "device" if and only if the images are to live on the devices."""
    if options.cache not in ("auto", "device"):
        return options
    images = data.train.images
    obstacle = RESIDENT.explain_obstacle(recipe)
    obstacle = obstacle or ("there are none in memory" if images is None else _explain_resize(recipe, data.train))
    if options.cache == "device":
        if obstacle:
            raise UserError(f"plan.cache device: {obstacle}")
        return options
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
