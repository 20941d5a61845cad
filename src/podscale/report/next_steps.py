"""Suggest what to do after a run, from its metrics and mistakes."""

import re
import shlex
from html import escape

from podscale.config.json_types import JsonObject
from podscale.report.history import select_by_step
from podscale.report.metrics import describe_baseline
from podscale.report.mistakes_section import CONFUSED
from podscale.runs.folder import Run

IMBALANCE = 2.5  # images of the largest class per image of the smallest
MISCALIBRATED = 0.1
GAP = 0.15  # between training and validation accuracy
Line = JsonObject


def list_next_steps(run: Run, lines: list[Line], mistakes: Line) -> list[str]:
    """Return sentences, the most important first; empty before the first evaluation."""
    evaluated, trained = select_by_step(lines, "eval"), select_by_step(lines, "train")
    if not evaluated or not mistakes:
        return []
    names, scores, steps = run.classes(), mistakes.get("scores", {}), []
    accuracy = evaluated[-1]["accuracy"]
    if scores and (warning := describe_baseline(accuracy, scores, names)):
        steps.append(
            f"{warning[:1].upper()}{warning[1:]}. Train longer, check the labels, or try another learning rate."
        )
    steps += _list_confusions(mistakes, names)
    counts = [count for count in mistakes["examples"] if count]
    if counts and max(counts) >= IMBALANCE * min(counts):
        weak = names[min(range(len(names)), key=lambda c: mistakes["examples"][c] or max(counts))]
        balance = "" if run.recipe.data.balance else ", or sample all classes equally often (`--data.balance true`)"
        steps.append(f"Classes are imbalanced: judge by balanced accuracy, and add images of {weak}{balance}.")
    if run.read_bad_images():
        steps.append(
            f"Some images could not be read: `podscale data check {shlex.quote(run.recipe.data.path)}` lists them."
        )
    recent = [line["accuracy"] for line in trained[-20:] if line.get("accuracy") is not None]
    if recent and sum(recent) / len(recent) - accuracy > GAP:
        steps.append("Training accuracy is far above validation accuracy: add images, augment more, or use `--init`.")
    if (
        len(evaluated) > 1
        and accuracy == max(line["accuracy"] for line in evaluated) > evaluated[-2]["accuracy"] + 0.01
    ):
        steps.append("Accuracy was still rising at the last evaluation: train for more epochs (`--train.epochs`).")
    error = scores.get("calibration", {}).get("expected_error") or 0
    if error > MISCALIBRATED:
        steps.append(f"Probabilities are off by {error:.2f} on average: do not read them as confidence.")
    return steps or [
        "No problem found. Try the model with `podscale predict`, or write it to a file with `podscale export`."
    ]


def _list_confusions(mistakes: Line, names: tuple[str, ...]) -> list[str]:
    pairs = [(a, b, n) for a, b, n in mistakes["confused"][:3] if n > 1]
    if not pairs:
        return []
    listed = "; ".join(f"{names[a]} as {names[b]} ({n:,} of {mistakes['examples'][a]:,})" for a, b, n in pairs)
    # Runs of older versions have no images of the pairs.
    where = f"[these images](#{CONFUSED})" if mistakes.get("pairs") else "the images under “Most wrong” below"
    return [f"Most confused: {listed}. Look at {where} and check their labels."]


def render_next_steps(run: Run, lines: list[Line]) -> str:
    """Return the suggestions as HTML."""
    steps = list_next_steps(run, lines, run.mistakes())
    if not steps:
        return "<p>Suggestions follow the first evaluation.</p>"
    return f"<ul>{''.join(f'<li>{_render_step(step)}</li>' for step in steps)}</ul>"


def _render_step(step: str) -> str:
    """Return a sentence with its commands and links as HTML.

    >>> _render_step("Run `podscale data check PHOTOS`, and look at [these images](#most-confused).")
    'Run <code>podscale data check PHOTOS</code>, and look at <a href="#most-confused">these images</a>.'
    """
    text = re.sub("`([^`]+)`", r"<code>\1</code>", escape(step))
    return re.sub(r"\[([^\]]+)\]\((#[a-z-]+)\)", r'<a href="\2">\1</a>', text)
