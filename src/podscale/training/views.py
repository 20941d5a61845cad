"""Test-time augmentation: evaluate several views of an image and average their logits.

`average_views` is the reference implementation. It computes all views of all images, as one pure expression, which is
what prediction and exported files need. `evaluate_views` computes further views only of the images that need them.
"""

import jax
import jax.numpy as jnp
from jax import lax

from podscale.models.functional import FunctionalModel, Tree
from podscale.recipe import Recipe
from podscale.training.device_input import augment

PARTS = 8  # further views are computed of this part of the images at once


def average_views(net: FunctionalModel, recipe: Recipe, params: Tree, stats: Tree, images: jax.Array) -> jax.Array:
    """Return the logits of images, averaged over the recipe's views of them.

    Images whose first view has a class of at least the probability `data.eval_confidence` keep that view's logits.
    """
    views = augment.make_views(images, recipe.data.eval_views)
    logits = [net.evaluate(params, stats, augment.normalize(recipe, view)) for _, view in views]
    if len(logits) == 1:
        return logits[0]
    average = jnp.stack([share * of_view for (share, _), of_view in zip(views, logits, strict=True)]).sum(0)
    if recipe.data.eval_confidence == 1:
        return average
    return jnp.where(_compute_confidence(logits[0])[:, None] < recipe.data.eval_confidence, average, logits[0])


def evaluate_views(net: FunctionalModel, recipe: Recipe, params: Tree, stats: Tree, images: jax.Array) -> jax.Array:
    """Return the same as `average_views`, computing further views only of images that need them, a part at a time."""
    threshold, count = recipe.data.eval_confidence, recipe.data.eval_views
    if threshold == 1 or count == 1:
        return average_views(net, recipe, params, stats, images)

    def evaluate(images: jax.Array) -> jax.Array:
        return net.evaluate(params, stats, augment.normalize(recipe, images))

    first = evaluate(images)
    confidence, at_once = _compute_confidence(first), max(1, -(-len(images) // PARTS))
    order = jnp.pad(jnp.argsort(confidence), (0, -len(images) % at_once), mode="edge")  # lowest confidence first

    def evaluate_part(i: jax.Array, logits: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(order, i * at_once, at_once)
        (first_share, _), *others = augment.make_views(images[part], count)
        of_views = evaluate(jnp.concatenate([view for _, view in others])).reshape(len(others), at_once, -1)
        shares = jnp.asarray([share for share, _ in others], of_views.dtype)
        average = first_share * first[part] + jnp.tensordot(shares, of_views, 1, precision=lax.Precision.HIGHEST)
        return logits.at[part].set(jnp.where(confidence[part, None] < threshold, average, first[part]))

    unsure = (confidence < threshold).sum()
    return lax.fori_loop(0, -(-unsure // at_once), evaluate_part, first)


def _compute_confidence(logits: jax.Array) -> jax.Array:
    """Return the probability of each image's most probable class."""
    return jax.nn.softmax(logits.astype(jnp.float32)).max(-1)
