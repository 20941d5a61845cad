"""Scores of an evaluation, against scikit-learn's, and what is suggested after a run."""

import itertools

import numpy as np
import pytest
from sklearn import metrics as reference

from podscale.report.metrics import BINS, compute_scores, describe_baseline


@pytest.fixture
def evaluation():
    random = np.random.default_rng(0)
    labels = random.choice(4, 500, p=(0.7, 0.2, 0.1, 0.0)).astype(np.int32)
    predicted = np.where(random.random(500) < 0.6, labels, random.integers(0, 3, 500))
    return labels, np.stack([predicted, random.random(500), random.random(500)], axis=1).astype(np.float32)


def test_scores_by_class_are_those_of_scikit_learn(evaluation):
    labels, predictions = evaluation
    scores = compute_scores(labels, predictions, 4)
    precision, recall, f1, support = reference.precision_recall_fscore_support(
        labels, predictions[:, 0], labels=range(3), zero_division=np.nan
    )
    for name, expected in (("precision", precision), ("recall", recall), ("f1", f1), ("support", support)):
        np.testing.assert_allclose(scores[name][:3], expected, rtol=1e-12)
    assert [scores[name][3] for name in ("precision", "recall", "f1")] == [None] * 3  # never seen, never predicted
    assert scores["balanced_accuracy"] == pytest.approx(reference.balanced_accuracy_score(labels, predictions[:, 0]))
    assert scores["majority_baseline"] == (labels == 0).mean()
    assert scores["majority_class"] == 0


def test_the_calibration_error_is_the_mean_gap_of_the_bins(evaluation):
    labels, predictions = evaluation
    calibration = compute_scores(labels, predictions, 4)["calibration"]
    right, confidence = predictions[:, 0] == labels, predictions[:, 1].astype(np.float64)
    edges, expected = np.linspace(0, 1, BINS + 1), 0.0
    for low, high in itertools.pairwise(edges):
        inside = (confidence >= low) & (confidence < high)
        expected += abs(right[inside].sum() - confidence[inside].sum()) / len(labels)
    assert calibration["expected_error"] == pytest.approx(expected, abs=1e-9)
    assert sum(row["images"] for row in calibration["bins"]) == 500


def test_an_image_without_a_prediction_counts_against_recall_only():
    labels = np.array([0, 0, 1], np.int32)
    scores = compute_scores(labels, np.array([[0, 0.95], [-1, np.nan], [1, 1.0]], np.float32), 2)
    assert (scores["recall"], scores["precision"]) == ([0.5, 1.0], [1.0, 1.0])
    assert [row["images"] for row in scores["calibration"]["bins"]] == [2]


def test_a_model_that_only_knows_the_majority_is_warned_of():
    labels = np.array([0] * 67 + [1] * 33, np.int32)
    scores = compute_scores(labels, np.array([[0, 0.7]] * 100, np.float32), 2)
    assert "always predicting cat has accuracy 67.00%" in describe_baseline(0.67, scores, ("cat", "dog"))
    assert scores["balanced_accuracy"] == 0.5
    assert describe_baseline(0.68, scores, ("cat", "dog")) == ""
