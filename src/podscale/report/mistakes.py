"""Collect the mistakes of an evaluation: confused classes, and images worth a look.

They are stored in the run as `findings.json`, thumbnails included, so that a report can be written without the data.
"""

import base64
import io
import itertools
import json
from collections import Counter

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from podscale.config.json_types import JsonObject
from podscale.data.index.dataset import Index
from podscale.data.loader import load_eval_images
from podscale.errors import UserError
from podscale.recipe import Recipe
from podscale.report.metrics import compute_scores
from podscale.runs.folder import Run
from podscale.storage.files import write_atomically

MAX_IMAGES = 12  # of each kind: the most wrong, and the most certain
MAX_PAIRS = 4096  # of confused classes
MAX_SHOWN_PAIRS = 3  # of confused classes, the most frequent ones, of which images are shown
MAX_PAIR_IMAGES = 4  # of each of these
THUMBNAIL_SIZE = 112  # pixels
NO_PREDICTION = -1  # the class of an image that could not be read, or whose output is not finite


def summarize_mistakes(
    step: int, predictions: NDArray[np.float32], labels: NDArray[np.int32], classes: int
) -> JsonObject:
    """Return counts by class, confused classes, and the examples to show.

    Args:
        step: the step of the evaluated state.
        predictions: for each example the predicted class, its probability, and the true class's probability [n, 3].
        labels: the true classes [n].
        classes: how many classes there are.
    """
    predicted, confidence, true_confidence = predictions[:, 0].astype(np.int64), predictions[:, 1], predictions[:, 2]
    right = predicted == labels
    confused = _count_pairs(labels[~right], predicted[~right])
    pairs = [
        _select_examples(
            (labels == a) & (predicted == b), confidence, predicted, true_confidence, labels, MAX_PAIR_IMAGES
        )
        for a, b, count in confused[:MAX_SHOWN_PAIRS]
        if count > 1
    ]
    return {
        "step": step,
        "examples": np.bincount(labels, minlength=classes).tolist(),
        "correct": np.bincount(labels[right], minlength=classes).tolist(),
        "scores": compute_scores(labels, predictions, classes),
        "confused": confused,
        "pairs": pairs,
        "wrong": _select_examples(
            ~right & (predicted != NO_PREDICTION), confidence, predicted, true_confidence, labels
        ),
        "certain": _select_examples(
            right, confidence, predicted, true_confidence, labels, max(1, -(-MAX_IMAGES // classes))
        ),
    }


def _count_pairs(labels: NDArray, predicted: NDArray) -> list[list[int]]:
    """Return [true class, predicted class, count], the most frequent first, without examples that lack a prediction."""
    valid = predicted != NO_PREDICTION
    pairs, counts = np.unique(np.stack([labels[valid], predicted[valid]], axis=1), axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MAX_PAIRS]
    return [[*map(int, pairs[i]), int(counts[i])] for i in order]


def _select_examples(
    candidates: NDArray[np.bool_],
    confidence: NDArray,
    predicted: NDArray,
    true_confidence: NDArray,
    labels: NDArray,
    max_per_class: int = MAX_IMAGES,
) -> list[JsonObject]:
    """Return the candidates with the highest confidence, with a limit per class."""
    samples, per_class = np.flatnonzero(candidates), Counter[int]()
    order: list[int] = []
    for i in samples[np.argsort(-confidence[samples], kind="stable")].tolist():
        if len(order) < MAX_IMAGES and per_class[int(labels[i])] < max_per_class:
            per_class[int(labels[i])] += 1
            order.append(i)
    return [
        {"sample": int(i), "label": int(labels[i]), "chosen": int(predicted[i]), "sure": float(confidence[i])}
        | {"own": float(true_confidence[i])}
        for i in order
    ]


def write_mistakes(run: Run, step: int, predictions: NDArray[np.float32], index: Index, classes: int) -> None:
    """Write the mistakes of an evaluation of `index` to the run's folder."""
    mistakes = summarize_mistakes(step, predictions, index.labels, classes)
    for example in itertools.chain(mistakes["wrong"], mistakes["certain"], *mistakes["pairs"]):
        example["name"] = index.name(example["sample"])
        example["thumbnail"] = _make_thumbnail(index, example["sample"], run.recipe)
    write_atomically(run.folder / "findings.json", json.dumps(mistakes))


def _make_thumbnail(index: Index, sample: int, recipe: Recipe) -> str:
    """Return a small copy of the model's input as a data: URL; empty if the image can no longer be read."""
    try:
        image = Image.fromarray(load_eval_images(index, [sample], recipe)[0])
    except UserError:
        return ""
    image.thumbnail((THUMBNAIL_SIZE, THUMBNAIL_SIZE))
    kind, file = ("png" if image.width < 48 else "jpeg"), io.BytesIO()
    image.save(file, kind, **({"quality": 80} if kind == "jpeg" else {}))
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
