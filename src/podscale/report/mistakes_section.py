"""What an evaluation shows, as HTML: classes that are mistaken for one another, pictures worth a look, bad files."""

from html import escape
from typing import Any

from podscale.report.html import scrolling, table

MATRIX = 24  # classes in the confusion matrix; of more, those that are mistaken most
CLASSES = 20  # in the first table of classes
PAIRS = 15
BAD = 100
SHADES = 9  # of the matrix's cells, by the share of a class
Found = dict[str, Any]


def section(found: Found, names: tuple[str, ...], steps_per_epoch: float) -> str:
    """All of it; one sentence where nothing is known."""
    if not found:
        return "<p>Known after the first evaluation.</p>"
    epoch = found["step"] / steps_per_epoch
    return (
        f"<p>By the evaluation after step {found['step']:,}, epoch {epoch:.1f}.</p>"
        f"<h3>Most wrong</h3>{_pictures(found['wrong'], names, 'Every validation picture was named right.')}"
        f"<h3>Most certain, and right</h3>{_pictures(found['certain'], names, 'None was named right.')}"
        f"<h3>Accuracy by class</h3>{_classes(found, names)}"
        f"<h3>What is mistaken for what</h3>{_matrix(found, names)}{_pairs(found, names)}"
    )


def bad_pictures(reasons: list[str]) -> str:
    """The files that could not be read."""
    if not reasons:
        return "<p>Every picture that was asked for could be read.</p>"
    more = f"<p>And {len(reasons) - BAD:,} more: see bad-pictures-*.txt in the run's folder.</p>"
    listed = "".join(f"<li>{escape(reason)}</li>" for reason in reasons[:BAD])
    effect = "In training another took its place; in evaluation it counts as wrong."
    told = f'<p>{len(reasons):,} could not be read. {effect}</p><ul class="bad">{listed}</ul>'
    return told + (more if len(reasons) > BAD else "")


def _pictures(examples: list[Found], names: tuple[str, ...], none: str) -> str:
    if not examples:
        return f"<p>{none}</p>"
    return f'<ul class="pictures">{"".join(_picture(example, names) for example in examples)}</ul>'


def _picture(example: Found, names: tuple[str, ...]) -> str:
    own, chosen, sure = names[example["label"]], names[example["chosen"]], f"{example['sure']:.1%}"
    right = example["label"] == example["chosen"]
    words = f"<b>{escape(chosen)}</b> {sure}" if right else f"<b>{escape(chosen)}</b> {sure}, but it is {escape(own)}"
    if not right:
        words += f" ({example['own']:.1%})"
    source = example["picture"] if example["picture"].startswith("data:image/") else ""
    seen = f'<img src="{escape(source)}" alt="" width="112" height="112">' if source else '<div class="gone"></div>'
    return f'<li>{seen}<p>{words}</p><p class="beside">{escape(example["name"])}</p></li>'


def _classes(found: Found, names: tuple[str, ...]) -> str:
    """The weakest classes first; the rest folded away."""
    rows = [
        (right / count, name, right, count)
        for name, right, count in zip(names, found["correct"], found["examples"], strict=True)
        if count
    ]
    rows.sort(key=lambda row: row[0])
    lines = [
        f'<tr><th scope="row">{escape(name)}</th><td>{share:.1%}</td><td>{_share(share)}</td>'
        f"<td>{right:,} of {count:,}</td></tr>"
        for share, name, right, count in rows
    ]
    names_above = (
        '<th scope="col">class</th>',
        '<th scope="col">accuracy</th>',
        "<td></td>",
        '<th scope="col">right</th>',
    )
    head = f"<thead><tr>{''.join(names_above)}</tr></thead>"

    def shown(part: list[str], about: str) -> str:
        return scrolling(f'<table class="numbers">{head}<tbody>{"".join(part)}</tbody></table>', about)

    first = shown(lines[:CLASSES], "accuracy by class, the weakest first")
    if len(lines) <= CLASSES:
        return first
    rest = shown(lines[CLASSES:], "accuracy of the other classes")
    return f"{first}<details><summary>The other {len(lines) - CLASSES:,} classes</summary>{rest}</details>"


def _share(share: float) -> str:
    return (
        '<svg class="share" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" width="100" height="8"/><rect class="p0" width="{100 * share:.1f}" height="8"/></svg>'
    )


def _matrix(found: Found, names: tuple[str, ...]) -> str:
    """Rows are what a picture is, columns what it is taken for; cells are pictures."""
    chosen = _mistaken_most(found, len(names))
    counts = {(a, b): n for a, b, n in found["confused"]} | {(c, c): found["correct"][c] for c in chosen}
    head = "".join(f'<th scope="col"><span>{escape(names[c])}</span></th>' for c in chosen)
    body = ""
    for a in chosen:
        cells = "".join(_cell(counts.get((a, b), 0), found["examples"][a], a == b) for b in chosen)
        body += f'<tr><th scope="row">{escape(names[a])}</th>{cells}</tr>'
    only = f" Of {len(names):,} classes, those that are mistaken most." if len(chosen) < len(names) else ""
    words = f"<p>A row is what a picture is, a column what it is taken for; a cell counts pictures.{only}</p>"
    corner = '<td class="corner">is \\ taken for</td>'
    grid = f'<table class="matrix"><thead><tr>{corner}{head}</tr></thead><tbody>{body}</tbody></table>'
    return words + scrolling(grid, "confusion matrix")


def _cell(count: int, of: int, right: bool) -> str:
    if not count:
        return "<td></td>"
    shade = min(SHADES, 1 + int(SHADES * count / max(of, 1)))
    return f'<td class="{"right" if right else "wrong"} h{shade}">{count:,}</td>'


def _mistaken_most(found: Found, classes: int) -> list[int]:
    """The classes of the matrix, in their own order.

    >>> _mistaken_most({"confused": [[0, 2, 5]]}, 3)
    [0, 1, 2]
    """
    if classes <= MATRIX:
        return list(range(classes))
    errors = [0] * classes
    for a, b, n in found["confused"]:
        errors[a] += n
        errors[b] += n
    return sorted(sorted(range(classes), key=lambda c: -errors[c])[:MATRIX])


def _pairs(found: Found, names: tuple[str, ...]) -> str:
    rows = [(names[a], names[b], f"{n:,} of {found['examples'][a]:,}") for a, b, n in found["confused"][:PAIRS]]
    if not rows:
        return ""
    shown = table(("is", "taken for", "pictures"), rows, "the most frequent mistakes")
    return f"<details><summary>The most frequent mistakes as a table</summary>{shown}</details>"
