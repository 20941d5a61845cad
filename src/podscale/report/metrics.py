"""Measure a classifier beyond its accuracy: the majority baseline, per-class scores and calibration.

Terms are those of scikit-learn: precision is the share of predictions of a class that are right, recall the share of
the class's images that are found, F1 their harmonic mean, balanced accuracy the mean recall. The expected calibration
error is that of Guo et al. 2017, arXiv 1706.04599, section 2, with equal bins of confidence.
"""

import numpy as np
from numpy.typing import NDArray

from podscale.config.json_types import JsonObject

BINS = 10  # of confidence


def compute_scores(labels: NDArray[np.integer], predictions: NDArray[np.float32], classes: int) -> JsonObject:
    """Return the scores of an evaluation, as values that JSON can hold.

    Args:
        labels: true classes [n].
        predictions: predicted class and its probability in the first two columns [n, 2 or more]; class -1: none.
        classes: number of classes.

    Returns:
        `majority_class`, `majority_baseline` (the accuracy of always predicting it), `balanced_accuracy`, lists by
        class `precision`, `recall`, `f1` and `support`, and `calibration`. A class without images has no recall, one
        that is never predicted no precision: None.
    """
    predicted = predictions[:, 0].astype(np.int64)
    right = predicted == labels
    support = np.bincount(labels, minlength=classes)
    correct = np.bincount(labels[right], minlength=classes)
    chosen = np.bincount(predicted[predicted >= 0], minlength=classes)
    precision = [_divide(correct[c], chosen[c]) for c in range(classes)]
    recall = [_divide(correct[c], support[c]) for c in range(classes)]
    f1 = [_divide(2 * correct[c], support[c] + chosen[c]) for c in range(classes)]
    known = [value for value in recall if value is not None]
    return {
        "majority_class": int(support.argmax()),
        "majority_baseline": float(support.max() / max(support.sum(), 1)),
        "balanced_accuracy": sum(known) / len(known) if known else None,
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "support": support.tolist(),
        "calibration": _measure_calibration(right, predictions[:, 1], predicted >= 0),
    }


def _divide(part: np.integer, whole: np.integer) -> float | None:
    return float(part / whole) if whole else None


def _measure_calibration(
    right: NDArray[np.bool_], confidence: NDArray[np.float32], valid: NDArray[np.bool_]
) -> JsonObject:
    """Return the reliability curve, a row per bin that holds images, and the expected calibration error."""
    right, confidence = right[valid], confidence[valid].astype(np.float64)
    numbers = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    rows, error = [], 0.0
    for number in range(BINS):
        inside = numbers == number
        if count := int(inside.sum()):
            accuracy, mean = float(right[inside].mean()), float(confidence[inside].mean())
            rows.append({"from": number / BINS, "images": count, "confidence": mean, "accuracy": accuracy})
            error += count / len(right) * abs(accuracy - mean)
    return {"expected_error": error if rows else None, "bins": rows}


def describe_baseline(accuracy: float, scores: JsonObject, classes: tuple[str, ...]) -> str:
    """Return a warning if the model is no better than always predicting the most frequent class; else empty.

    >>> describe_baseline(0.5, {"majority_baseline": 0.676, "majority_class": 1}, ("cat", "dog"))
    'the model does not beat the baseline: always predicting dog has accuracy 67.60%, the model 50.00%'
    """
    baseline = scores["majority_baseline"]
    if accuracy > baseline:
        return ""
    name = classes[scores["majority_class"]]
    best = f"{baseline:.2%}, the model {accuracy:.2%}"
    return f"the model does not beat the baseline: always predicting {name} has accuracy {best}"
