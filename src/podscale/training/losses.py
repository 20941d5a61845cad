"""Losses by name, with class weights (`train.loss`, `train.class_weights`)."""

import jax
import jax.numpy as jnp
import optax

from podscale.errors import UserError
from podscale.recipe import Train


def compute_losses(train: Train, logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the loss of each image, [images].

    Cross-entropy by softmax; or the mean over classes of binary cross-entropies, by which each class is judged for
    itself (Wightman et al. 2021, arXiv 2110.00476). With class weights, the term of each class is multiplied by its
    weight, as torch does for targets that are probabilities.

    Args:
        train: says which loss, and the weights of classes.
        logits: [images, classes].
        targets: probabilities, [images, classes].

    Raises:
        UserError: there are other numbers of weights and classes.
    """
    targets = targets.astype(logits.dtype)
    if not train.class_weights and train.loss == "softmax":
        return optax.softmax_cross_entropy(logits, targets)
    classes = logits.shape[-1]
    if train.class_weights and len(train.class_weights) != classes:
        raise UserError(f"train.class_weights has {len(train.class_weights)} numbers for {classes} classes")
    weights = jnp.asarray(train.class_weights or (1.0,) * classes, logits.dtype)
    if train.loss == "binary":
        return (weights * optax.sigmoid_binary_cross_entropy(logits, targets)).mean(-1)
    return -(weights * targets * jax.nn.log_softmax(logits)).sum(-1)
