"""Findings: what an evaluation shows beside its score: classes mistaken for one another, and pictures to look at.

They are kept in the run as `findings.json`, thumbnails included, so that a report can be written without the data.
"""

import base64
import io
import json
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from podscale.data.index.dataset import Index
from podscale.data.loader import eval_pictures
from podscale.errors import UserError
from podscale.recipe import Recipe
from podscale.runs.folder import Run
from podscale.storage.files import write_atomically

PICTURES = 12  # of each kind: the most wrong, and the most certain
MOST_PAIRS = 4096  # of classes that are mistaken for one another
THUMBNAIL = 112  # pixels
NO_ANSWER = -1  # the class of a picture that could not be read, or of which the model says no number


def summarize(step: int, answers: NDArray[np.float32], labels: NDArray[np.int32], classes: int) -> dict[str, Any]:
    """What `answers` [n, 3] (the class chosen, its probability, the right one's) say of examples with these labels."""
    chosen, sure, own = answers[:, 0].astype(np.int64), answers[:, 1], answers[:, 2]
    right = chosen == labels
    return {
        "step": step,
        "examples": np.bincount(labels, minlength=classes).tolist(),
        "correct": np.bincount(labels[right], minlength=classes).tolist(),
        "confused": _pairs(labels[~right], chosen[~right]),
        "wrong": _first(~right & (chosen != NO_ANSWER), sure, chosen, own, labels),
        "certain": _first(right, sure, chosen, own, labels, max(1, -(-PICTURES // classes))),
    }


def _pairs(labels: NDArray, chosen: NDArray) -> list[list[int]]:
    """[class, what it is taken for, how often], the most frequent first; unanswered ones are not among them."""
    known = chosen != NO_ANSWER
    pairs, counts = np.unique(np.stack([labels[known], chosen[known]], axis=1), axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MOST_PAIRS]
    return [[*map(int, pairs[i]), int(counts[i])] for i in order]


def _first(
    among: NDArray[np.bool_], sure: NDArray, chosen: NDArray, own: NDArray, labels: NDArray, of_class: int = PICTURES
) -> list[dict[str, Any]]:
    """The examples of which the model is the surest, so many of a class at most."""
    samples, taken = np.flatnonzero(among), Counter[int]()
    order: list[int] = []
    for i in samples[np.argsort(-sure[samples], kind="stable")].tolist():
        if len(order) < PICTURES and taken[int(labels[i])] < of_class:
            taken[int(labels[i])] += 1
            order.append(i)
    return [
        {"sample": int(i), "label": int(labels[i]), "chosen": int(chosen[i]), "sure": float(sure[i])}
        | {"own": float(own[i])}
        for i in order
    ]


def write(run: Run, step: int, answers: NDArray[np.float32], index: Index, classes: int) -> None:
    """Keeps what an evaluation of `index` shows in the run's folder."""
    found = summarize(step, answers, index.labels, classes)
    for example in found["wrong"] + found["certain"]:
        example["name"] = index.name(example["sample"])
        example["picture"] = _thumbnail(index, example["sample"], run.recipe)
    write_atomically(run.folder / "findings.json", json.dumps(found))


def _thumbnail(index: Index, sample: int, recipe: Recipe) -> str:
    """What the model saw, small, as a data: address; empty where the picture cannot be read any more."""
    try:
        picture = Image.fromarray(eval_pictures(index, [sample], recipe)[0])
    except UserError:
        return ""
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    kind, file = ("png" if picture.width < 48 else "jpeg"), io.BytesIO()
    picture.save(file, kind, **({"quality": 80} if kind == "jpeg" else {}))
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
