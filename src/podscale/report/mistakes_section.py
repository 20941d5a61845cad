"""Render the mistakes of an evaluation as HTML: confused classes, images worth a look, unreadable files."""

from html import escape
from typing import Any

from podscale.report.html import render_table, wrap_scrolling

MAX_MATRIX_CLASSES = 24  # of the confusion matrix; of more, the most confused
MAX_CLASSES = 20  # of the first table of classes
MAX_PAIRS = 15
MAX_BAD_IMAGES = 100
SHADES = 9  # of the matrix's cells, by the share of a class
Mistakes = dict[str, Any]


def render_mistakes(mistakes: Mistakes, names: tuple[str, ...], steps_per_epoch: float) -> str:
    """Return the section as HTML; one sentence before the first evaluation."""
    if not mistakes:
        return "<p>Known after the first evaluation.</p>"
    epoch = mistakes["step"] / steps_per_epoch
    return (
        f"<p>By the evaluation after step {mistakes['step']:,}, epoch {epoch:.1f}.</p>"
        f"<h3>Most wrong</h3>{_render_images(mistakes['wrong'], names, 'Every validation image was named right.')}"
        f"<h3>Most certain, and right</h3>{_render_images(mistakes['certain'], names, 'None was named right.')}"
        f"<h3>Accuracy by class</h3>{_render_classes(mistakes, names)}"
        f"<h3>What is mistaken for what</h3>{_render_matrix(mistakes, names)}{_render_pairs(mistakes, names)}"
    )


def render_bad_images(reasons: list[str]) -> str:
    """Return a list of the images that could not be read."""
    if not reasons:
        return "<p>Every image that was asked for could be read.</p>"
    more = f"<p>And {len(reasons) - MAX_BAD_IMAGES:,} more: see bad-pictures-*.txt in the run's folder.</p>"
    items = "".join(f"<li>{escape(reason)}</li>" for reason in reasons[:MAX_BAD_IMAGES])
    effect = "In training another took its place; in evaluation it counts as wrong."
    text = f'<p>{len(reasons):,} could not be read. {effect}</p><ul class="bad">{items}</ul>'
    return text + (more if len(reasons) > MAX_BAD_IMAGES else "")


def _render_images(examples: list[Mistakes], names: tuple[str, ...], empty_text: str) -> str:
    if not examples:
        return f"<p>{empty_text}</p>"
    return f'<ul class="images">{"".join(_render_image(example, names) for example in examples)}</ul>'


def _render_image(example: Mistakes, names: tuple[str, ...]) -> str:
    label, predicted = names[example["label"]], names[example["chosen"]]
    text = f"<b>{escape(predicted)}</b> {example['sure']:.1%}"
    if example["label"] != example["chosen"]:
        text += f", but it is {escape(label)} ({example['own']:.1%})"
    source = example["picture"] if example["picture"].startswith("data:image/") else ""
    image = f'<img src="{escape(source)}" alt="" width="112" height="112">' if source else '<div class="missing"></div>'
    return f'<li>{image}<p>{text}</p><p class="beside">{escape(example["name"])}</p></li>'


def _render_classes(mistakes: Mistakes, names: tuple[str, ...]) -> str:
    """Return the accuracy by class, the weakest first; classes past the first `MAX_CLASSES` are collapsed."""
    rows = [
        (right / count, name, right, count)
        for name, right, count in zip(names, mistakes["correct"], mistakes["examples"], strict=True)
        if count
    ]
    rows.sort(key=lambda row: row[0])
    lines = [
        f'<tr><th scope="row">{escape(name)}</th><td>{share:.1%}</td><td>{_render_share(share)}</td>'
        f"<td>{right:,} of {count:,}</td></tr>"
        for share, name, right, count in rows
    ]
    header_cells = (
        '<th scope="col">class</th>',
        '<th scope="col">accuracy</th>',
        "<td></td>",
        '<th scope="col">right</th>',
    )
    head = f"<thead><tr>{''.join(header_cells)}</tr></thead>"

    def render_rows(rows: list[str], label: str) -> str:
        return wrap_scrolling(f'<table class="numbers">{head}<tbody>{"".join(rows)}</tbody></table>', label)

    first = render_rows(lines[:MAX_CLASSES], "accuracy by class, the weakest first")
    if len(lines) <= MAX_CLASSES:
        return first
    others = render_rows(lines[MAX_CLASSES:], "accuracy of the other classes")
    return f"{first}<details><summary>The other {len(lines) - MAX_CLASSES:,} classes</summary>{others}</details>"


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
    only = f" Of {len(names):,} classes, those that are mistaken most." if len(classes) < len(names) else ""
    text = f"<p>A row is what an image is, a column what it is taken for; a cell counts images.{only}</p>"
    corner = '<td class="corner">is \\ taken for</td>'
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
    rendered = render_table(("is", "taken for", "images"), rows, "the most frequent mistakes")
    return f"<details><summary>The most frequent mistakes as a table</summary>{rendered}</details>"
