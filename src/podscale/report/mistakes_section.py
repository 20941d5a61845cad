"""Render the mistakes of an evaluation as HTML: confused classes, images worth a look, unreadable files."""

from html import escape

from podscale.config.json_types import JsonObject
from podscale.report.html import render_table, wrap_scrolling
from podscale.report.metrics import describe_baseline

MAX_MATRIX_CLASSES = 24  # of the confusion matrix; of more, the most confused
MAX_CLASSES = 20  # of the first table of classes
MAX_PAIRS = 15
MAX_BAD_IMAGES = 100
CONFUSED = "most-confused"  # anchor of the images of confused classes
SHADES = 9  # of the matrix's cells, by the share of a class
Mistakes = JsonObject


def render_mistakes(mistakes: Mistakes, names: tuple[str, ...], steps_per_epoch: float) -> str:
    """Return the section as HTML; one sentence before the first evaluation."""
    if not mistakes:
        return "<p>Known after the first evaluation.</p>"
    epoch = mistakes["step"] / steps_per_epoch
    wrong = _render_images(mistakes["wrong"], names, "All validation images are classified correctly.")
    certain = _render_images(mistakes["certain"], names, "None is classified correctly.")
    return (
        f"<p>From the evaluation after step {mistakes['step']:,}, epoch {epoch:.1f}.</p>"
        f"{_render_scores(mistakes, names)}{_render_confusions(mistakes, names)}"
        f"<h3>Most wrong</h3>{wrong}<h3>Most confident and correct</h3>{certain}"
        f"<h3>Scores by class</h3>{_render_classes(mistakes, names)}"
        f"<h3>Confusion matrix (true \\ predicted)</h3>{_render_matrix(mistakes, names)}"
        f"{_render_pairs(mistakes, names)}{_render_calibration(mistakes)}"
    )


def render_bad_images(reasons: list[str]) -> str:
    """Return a list of the images that could not be read."""
    if not reasons:
        return "<p>All images could be read.</p>"
    more = f"<p>And {len(reasons) - MAX_BAD_IMAGES:,} more: see bad-images-*.txt in the run's folder.</p>"
    items = "".join(f"<li>{escape(reason)}</li>" for reason in reasons[:MAX_BAD_IMAGES])
    effect = "In training each is replaced by another; in evaluation it counts as wrong."
    text = f'<p>{len(reasons):,} could not be read. {effect}</p><ul class="bad">{items}</ul>'
    return text + (more if len(reasons) > MAX_BAD_IMAGES else "")


def _render_images(examples: list[Mistakes], names: tuple[str, ...], empty_text: str) -> str:
    if not examples:
        return f"<p>{empty_text}</p>"
    return f'<ul class="images">{"".join(_render_image(example, names) for example in examples)}</ul>'


def _render_confusions(mistakes: Mistakes, names: tuple[str, ...]) -> str:
    """Return images of the most confused pairs of classes; empty without any, and for runs of older versions."""
    counts = {(a, b): n for a, b, n in mistakes["confused"]}
    parts = []
    for examples in mistakes.get("pairs", []):
        a, b = examples[0]["label"], examples[0]["chosen"]
        text = f"{names[a]} as {names[b]}: {counts[a, b]:,} of {mistakes['examples'][a]:,}"
        parts.append(f"<p>{escape(text)}</p>{_render_images(examples, names, '')}")
    return f'<h3 id="{CONFUSED}">Most confused</h3>{"".join(parts)}' if parts else ""


def _render_image(example: Mistakes, names: tuple[str, ...]) -> str:
    label, predicted = names[example["label"]], names[example["chosen"]]
    text = f"<b>{escape(predicted)}</b> {example['sure']:.1%}"
    if example["label"] != example["chosen"]:
        text += f", but it is {escape(label)} ({example['own']:.1%})"
    source = example["thumbnail"] if example["thumbnail"].startswith("data:image/") else ""
    image = f'<img src="{escape(source)}" alt="" width="112" height="112">' if source else '<div class="missing"></div>'
    return f'<li>{image}<p>{text}</p><p class="beside">{escape(example["name"])}</p></li>'


def _render_scores(mistakes: Mistakes, names: tuple[str, ...]) -> str:
    """Return the model beside the majority baseline; empty for runs of older versions."""
    scores = mistakes.get("scores")
    if not scores:
        return ""
    accuracy = sum(mistakes["correct"]) / max(sum(mistakes["examples"]), 1)
    rows = [
        ("accuracy", f"{accuracy:.2%}"),
        ("majority baseline", f"{scores['majority_baseline']:.2%} (always {names[scores['majority_class']]})"),
        ("balanced accuracy", _format_share(scores["balanced_accuracy"])),
        ("expected calibration error", f"{scores['calibration']['expected_error'] or 0:.3f}"),
    ]
    warning = describe_baseline(accuracy, scores, names)
    return (f'<p class="warning">Warning: {escape(warning)}.</p>' if warning else "") + render_table([], rows, "scores")


def _render_classes(mistakes: Mistakes, names: tuple[str, ...]) -> str:
    """Return the scores by class, the lowest recall first; classes past the first `MAX_CLASSES` are collapsed."""
    scores = mistakes.get("scores", {})
    empty = [None] * len(names)
    columns = zip(names, mistakes["correct"], mistakes["examples"], scores.get("precision", empty), strict=False)
    rows = [
        (right / count, name, right, count, precision, f1)
        for (name, right, count, precision), f1 in zip(columns, scores.get("f1", empty), strict=False)
        if count
    ]
    rows.sort(key=lambda row: row[0])
    lines = [
        f'<tr><th scope="row">{escape(name)}</th><td>{recall:.1%}</td><td>{_render_share(recall)}</td>'
        f"<td>{_format_share(precision)}</td><td>{_format_share(f1)}</td><td>{right:,} of {count:,}</td></tr>"
        for recall, name, right, count, precision, f1 in rows
    ]
    header = "".join(
        f'<th scope="col">{name}</th>' if name else "<td></td>"
        for name in ("class", "recall", "", "precision", "F1", "correct")
    )

    def render_rows(rows: list[str], label: str) -> str:
        head = f"<thead><tr>{header}</tr></thead>"
        return wrap_scrolling(f'<table class="numbers">{head}<tbody>{"".join(rows)}</tbody></table>', label)

    first = render_rows(lines[:MAX_CLASSES], "scores by class, the lowest recall first")
    if len(lines) <= MAX_CLASSES:
        return first
    others = render_rows(lines[MAX_CLASSES:], "scores of the other classes")
    return f"{first}<details><summary>The other {len(lines) - MAX_CLASSES:,} classes</summary>{others}</details>"


def _format_share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _render_calibration(mistakes: Mistakes) -> str:
    """Return the reliability curve: confidence against accuracy, a dot per bin, and the same as a table."""
    calibration = mistakes.get("scores", {}).get("calibration", {})
    bins = calibration.get("bins", [])
    if not bins:
        return ""
    points = [(10 + 180 * row["confidence"], 190 - 180 * row["accuracy"]) for row in bins]
    dots = "".join(f'<circle class="p0" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in points)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawing = (
        '<svg class="reliability" viewBox="0 0 200 200" role="img" aria-label="Reliability curve, as in the table">'
        '<rect class="frame" x="10" y="10" width="180" height="180"/><path class="ideal" d="M10,190L190,10"/>'
        f'<polyline class="curve" points="{path}"/>{dots}</svg>'
    )
    rows = [
        [
            f"{row['from']:.1f} to {row['from'] + 0.1:.1f}",
            f"{row['images']:,}",
            f"{row['confidence']:.1%}",
            f"{row['accuracy']:.1%}",
        ]
        for row in bins
    ]
    table = render_table(("confidence", "images", "mean confidence", "accuracy"), rows, "calibration")
    text = (
        "Accuracy (vertical) by confidence (horizontal), one dot per bin. A perfectly calibrated model lies on the "
        "dashed line."
    )
    return f"<h3>Calibration</h3><p>{text}</p>{drawing}<details><summary>As a table</summary>{table}</details>"


def _render_share(share: float) -> str:
    return (
        '<svg class="share" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" width="100" height="8"/><rect class="p0" width="{100 * share:.1f}" height="8"/></svg>'
    )


def _render_matrix(mistakes: Mistakes, names: tuple[str, ...]) -> str:
    """Return the confusion matrix: rows are true classes, columns predicted classes, cells count images."""
    classes = _select_classes(mistakes, len(names))
    counts = {(a, b): n for a, b, n in mistakes["confused"]} | {(c, c): mistakes["correct"][c] for c in classes}
    head = "".join(f'<th scope="col"><span>{escape(names[c])}</span></th>' for c in classes)
    body = ""
    for a in classes:
        cells = "".join(_render_cell(counts.get((a, b), 0), mistakes["examples"][a], a == b) for b in classes)
        body += f'<tr><th scope="row">{escape(names[a])}</th>{cells}</tr>'
    only = f" Of {len(names):,} classes, the most confused." if len(classes) < len(names) else ""
    text = f"<p>Rows are true classes, columns predictions; cells count images.{only}</p>"
    corner = '<td class="corner">true \\ predicted</td>'
    grid = f'<table class="matrix"><thead><tr>{corner}{head}</tr></thead><tbody>{body}</tbody></table>'
    return text + wrap_scrolling(grid, "confusion matrix")


def _render_cell(count: int, total: int, right: bool) -> str:
    if not count:
        return "<td></td>"
    shade = min(SHADES, 1 + int(SHADES * count / max(total, 1)))
    return f'<td class="{"right" if right else "wrong"} h{shade}">{count:,}</td>'


def _select_classes(mistakes: Mistakes, classes: int) -> list[int]:
    """Return the classes of the matrix in their own order: all, or the most confused.

    >>> _select_classes({"confused": [[0, 2, 5]]}, 3)
    [0, 1, 2]
    """
    if classes <= MAX_MATRIX_CLASSES:
        return list(range(classes))
    errors = [0] * classes
    for a, b, n in mistakes["confused"]:
        errors[a] += n
        errors[b] += n
    return sorted(sorted(range(classes), key=lambda c: -errors[c])[:MAX_MATRIX_CLASSES])


def _render_pairs(mistakes: Mistakes, names: tuple[str, ...]) -> str:
    rows = [
        (names[a], names[b], f"{n:,} of {mistakes['examples'][a]:,}") for a, b, n in mistakes["confused"][:MAX_PAIRS]
    ]
    if not rows:
        return ""
    rendered = render_table(("true", "predicted", "images"), rows, "the most frequent mistakes")
    return f"<details><summary>The most frequent mistakes as a table</summary>{rendered}</details>"
