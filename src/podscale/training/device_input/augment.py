"""Augment images on the device: normalize, change brightness and contrast, mix, erase.

Random choices are keyed by (seed, step, position), never by the device, so the same position gets the same values on
every pod. Mixing pairs position 2k with 2k+1, which always lie on the same device.
"""

import jax
import jax.numpy as jnp

from podscale.recipe import Augment, Recipe

COLOR = 3  # folded into the key of a step's colors
MIX, ERASE, LAYERS, SWITCH, BOX = 1, 2, 4, 5, 6  # folded into the key of a position


def prepare_batch(
    recipe: Recipe,
    images: jax.Array,
    labels: jax.Array,
    step: jax.Array,
    positions: jax.Array,
    classes: int,
) -> tuple[jax.Array, jax.Array]:
    """Turn uint8 images [n, h, w, 3] and labels [n] at these positions into the inputs of model and loss."""
    images = normalize(recipe, images, _draw_colors(recipe, step, positions))
    targets = smooth_labels(labels, classes, recipe.augment.label_smoothing)
    if recipe.augment.mixup or recipe.augment.cutmix or recipe.augment.erase:
        keys = make_position_keys(recipe.train.seed, step, positions)
        if recipe.augment.erase:
            images = jax.vmap(_erase, in_axes=(0, 0, None))(keys, images, recipe.augment.erase)
        if recipe.augment.mixup or recipe.augment.cutmix:
            images, targets = _mix(keys, images, targets, recipe.augment)
    return images, targets


def normalize(recipe: Recipe, images: jax.Array, colors: tuple[jax.Array, jax.Array] | None = None) -> jax.Array:
    """Turn uint8 images into the compute type, normalized by the recipe's per-channel mean and standard deviation.

    Args:
        recipe: says mean, standard deviation and compute type.
        images: [n, h, w, 3].
        colors: a factor and an offset for each image, [n] each, applied to the normalized pixels.
    """
    wide = jnp.promote_types(recipe.model.precision, jnp.float32)
    mean, std = (jnp.asarray(v, wide) for v in (recipe.data.mean, recipe.data.std))
    scaled = images.astype(wide) * (1 / (255 * std)) - mean / std
    if colors is not None:
        factor, offset = (values[:, None, None, None] for values in colors)
        scaled = scaled * factor + offset
    return scaled.astype(recipe.model.precision)


def _draw_colors(recipe: Recipe, step: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """Return factor and offset of the normalized pixels at these positions; None if the recipe changes no colors.

    A pixel x becomes (x + shift) · factor; the shift is uniform in ±brightness, the factor in 1 ± contrast. The numbers
    of the whole batch are drawn at once, which costs a GPU one small kernel.
    """
    if not (recipe.augment.brightness or recipe.augment.contrast):
        return None
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(recipe.train.seed), step), COLOR)
    uniform = jax.random.uniform(key, (recipe.batch.size, 2), jnp.float32, -1, 1)[positions]
    factor = 1 + recipe.augment.contrast * uniform[:, 1]
    return factor, recipe.augment.brightness * uniform[:, 0] * factor


def make_views(images: jax.Array, count: int) -> list[tuple[float, jax.Array]]:
    """Return `count` views of images [n, h, w, 3] for evaluation, each with its weight in the average.

    Two views are an image and its flip. Six are these, which count for half, and both again shifted by one pixel up and
    to the left and by one pixel down and to the right, with the image reflected at its border.
    """
    if count == 1:
        return [(1.0, images)]
    both = [images, images[:, :, ::-1]]
    if count == 2:
        return [(0.5, view) for view in both]
    height, width = images.shape[1:3]
    wide = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    shifted = [wide[:, :height, :width], wide[:, 2:, 2:]]
    shifted += [view[:, :, ::-1] for view in shifted]
    return [(1 / 4, view) for view in both] + [(1 / 8, view) for view in shifted]


def smooth_labels(labels: jax.Array, classes: int, smoothing: float) -> jax.Array:
    """Return one-hot targets [n, classes] with a share of `smoothing` spread evenly over all classes."""
    return jax.nn.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes


def make_position_keys(seed: int | jax.Array, step: jax.Array, positions: jax.Array) -> jax.Array:
    """Return one random key per position of the global batch at this step."""
    at_step = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(at_step, positions)


def make_layer_keys(recipe: Recipe, step: jax.Array, positions: jax.Array) -> jax.Array:
    """Return one random key per position for the random layers of a model."""
    keys = make_position_keys(recipe.train.seed, step, positions)
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, LAYERS)


def _mix(keys: jax.Array, images: jax.Array, targets: jax.Array, augment: Augment) -> tuple[jax.Array, jax.Array]:
    """Apply mixup (Zhang et al. 2018) or CutMix (Yun et al. 2019) within pairs, both by the even position's key.

    Where both are on, a pair gets one of them, as in timm. Both images of a pair get the same share of their own.
    """
    keys, height, width = keys[0::2], *images.shape[1:3]

    def draw_share(alpha: float) -> jax.Array:
        return jax.vmap(lambda key: jax.random.beta(jax.random.fold_in(key, MIX), alpha, alpha))(keys)

    share = draw_share(augment.mixup) if augment.mixup else jnp.ones(len(keys))
    pixel_share = share
    if augment.cutmix:
        inside = jax.vmap(_draw_box, in_axes=(0, 0, None, None))(keys, draw_share(augment.cutmix), height, width)
        coin = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, SWITCH)))(keys)
        cuts = coin < augment.cutmix_chance if augment.mixup else jnp.ones(len(keys), bool)
        pixel_share = jnp.where(cuts[:, None, None], 1.0 - inside, share[:, None, None])
        share = jnp.where(cuts, 1 - inside.mean(axis=(1, 2)), share)

    def blend(values: jax.Array, weight: jax.Array) -> jax.Array:
        partners = values.reshape(-1, 2, *values.shape[1:])[:, ::-1].reshape(values.shape)
        weight = jnp.repeat(weight, 2, axis=0)
        weight = weight.reshape(*weight.shape, *[1] * (values.ndim - weight.ndim)).astype(values.dtype)
        return weight * values + (1 - weight) * partners

    return blend(images, pixel_share), blend(targets, share)


def _draw_box(key: jax.Array, share: jax.Array, height: int, width: int) -> jax.Array:
    """Return which pixels come from the partner, bool [height, width]: a box around a random place, cut at the border.

    Its area would be 1 - share of the image if nothing were cut off (Yun et al. 2019, arXiv 1905.04899, equation 2).
    """
    side = jnp.sqrt(1 - share)
    y, x = jnp.floor(jax.random.uniform(jax.random.fold_in(key, BOX), (2,)) * jnp.array([height, width]))

    def cover(center: jax.Array, length: int) -> jax.Array:
        half, places = jnp.floor(length * side) // 2, jnp.arange(length)
        return (places >= center - half) & (places < center + half)

    return cover(y, height)[:, None] & cover(x, width)[None]


def _erase(key: jax.Array, image: jax.Array, chance: float) -> jax.Array:
    """Apply random erasing (Zhong et al. 2017): a rectangle of 2 to 33 % of the area becomes 0, the mean color."""
    height, width, _ = image.shape
    area, aspect, top, left, coin = jax.random.uniform(jax.random.fold_in(key, ERASE), (5,))
    area, aspect = (0.02 + 0.31 * area) * height * width, jnp.exp((2 * aspect - 1) * jnp.log(1 / 0.3))
    h, w = jnp.minimum(jnp.sqrt(area * aspect), height), jnp.minimum(jnp.sqrt(area / aspect), width)
    y, x = jnp.arange(height)[:, None] - top * (height - h), jnp.arange(width)[None] - left * (width - w)
    inside = (y >= 0) & (y < h) & (x >= 0) & (x < w) & (coin < chance)
    return jnp.where(inside[:, :, None], 0, image)
