"""Progressive image size: which side the training images have at which step (`data.train_sizes`)."""

from typing import NamedTuple

from podscale.errors import UserError
from podscale.recipe.recipe import Recipe


class SizeRange(NamedTuple):
    """Steps whose images have one size."""

    steps: range
    size: int


def list_size_ranges(recipe: Recipe, samples: int) -> list[SizeRange]:
    """Return the ranges of steps that share an image size, from the first step to the last.

    Args:
        recipe: its section `data` says which sizes, and after which epochs they change.
        samples: number of training images.

    >>> recipe = Recipe().override({"data.train_sizes": [8, 12], "data.size_epochs": [5], "batch.size": 100,
    ...                             "batch.span": 100})
    >>> list_size_ranges(recipe, 1000)
    [SizeRange(steps=range(0, 50), size=8), SizeRange(steps=range(50, 100), size=12)]
    """
    sizes = recipe.data.train_sizes or (recipe.data.image_size,)
    changes = [recipe.steps(samples, epoch) for epoch in recipe.data.size_epochs]
    edges = zip([0, *changes], [*changes, recipe.steps(samples)], sizes, strict=True)
    return [SizeRange(range(first, last), size) for first, last, size in edges if first < last]


def find_train_size(recipe: Recipe, step: int, samples: int) -> int:
    """Return the side of the training images at a step; after the last step, that of the last."""
    ranges = list_size_ranges(recipe, samples)
    return next((size for steps, size in ranges if step < steps.stop), ranges[-1].size)


def find_largest_size(recipe: Recipe) -> int:
    """Return the largest side of training images, which memory has to hold."""
    return max(recipe.data.train_sizes or (recipe.data.image_size,))


def list_size_shares(recipe: Recipe) -> list[tuple[int, float]]:
    """Return the sizes of training images, and the share of the training that each has.

    >>> list_size_shares(Recipe().override({"data.train_sizes": [8, 12], "data.size_epochs": [2.5]}))
    [(8, 0.25), (12, 0.75)]
    """
    edges = [0.0, *recipe.data.size_epochs, recipe.train.epochs]
    sizes = recipe.data.train_sizes or (recipe.data.image_size,)
    return [
        (size, (last - first) / recipe.train.epochs)
        for first, last, size in zip(edges[:-1], edges[1:], sizes, strict=True)
    ]


def describe_sizes(recipe: Recipe) -> str:
    """Return the sizes of images for people.

    >>> describe_sizes(Recipe())
    '8 px'
    >>> describe_sizes(Recipe().override({"data.train_sizes": [6, 7], "data.size_epochs": [1]}))
    '6, 7 px in training, 8 px in evaluation'
    """
    data = recipe.data
    if not data.train_sizes:
        return f"{data.image_size} px"
    return f"{', '.join(map(str, data.train_sizes))} px in training, {data.image_size} px in evaluation"


def check_any_size(recipe: Recipe, families: tuple[str, ...]) -> None:
    """Refuse training sizes for models whose parameters depend on the image size.

    Args:
        recipe: the recipe.
        families: what the names of such models start with.

    Raises:
        UserError: the model is one of them, and a size differs from `data.image_size`.
    """
    name, size = recipe.model.name, recipe.data.image_size
    if name.startswith(families) and any(other != size for other in recipe.data.train_sizes):
        raise UserError(
            f"data.train_sizes needs a model for images of any size; {name} has positions for {size} px alone"
        )
