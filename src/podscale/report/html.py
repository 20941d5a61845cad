"""The parts that pages are made of: text becomes HTML here, escaped, and nowhere else.

A page needs nothing else: no network, no server, no library. It allows its own style and script by their hashes, and
pictures that it carries itself, and nothing besides: what a name smuggles in does not run. The text is plain ASCII
(the rest as references), so that no locale can spoil it.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any


def document(template: str, scripts: Sequence[str], data: Any, *, name: str, **parts: str) -> str:
    """A whole page: a template filled with `name` and `parts`, which are HTML, and with `data` for its scripts."""
    style, script = part("page.css"), "\n".join(part(name) for name in scripts)
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    body = Template(part(template)).substitute(name=name, **parts)
    page = Template(part("frame.html")).substitute(
        name=name, policy=policy, style=style, body=body, script=script, data=embedded(data)
    )
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def part(name: str) -> str:
    """A file of this folder."""
    return resources.files(__package__).joinpath(name).read_text(encoding="ascii")


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def embedded(values: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can close the element or open another."""
    found = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return found.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], about: str = "table") -> str:
    """Text as a table: numbers under a head, or names with their values."""
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    top = f"<thead><tr>{names}</tr></thead>" if head else ""
    body = ""
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body += f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>'
    kind = ' class="numbers"' if head else ""
    return scrolling(f"<table{kind}>{top}<tbody>{body}</tbody></table>", about)


def scrolling(inner: str, about: str = "table") -> str:
    """What may be wider than a phone, in a box that scrolls by itself and can be reached by the keyboard."""
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(about)}">{inner}</div>'


def cards(values: Iterable[tuple[str, str, str]]) -> str:
    """Names, large values, and what is to be said beside them."""
    return "".join(
        f'<div><dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="beside">{escape(beside)}</dd></div>'
        for name, value, beside in values
    )


def number(value: Any) -> float | None:
    """A finite number with as many digits as a drawing needs, or None."""
    return float(f"{value:.6g}") if isinstance(value, int | float) and math.isfinite(value) else None


def cell(value: float | None, form: str = ".4g") -> str:
    """A number in a table."""
    return "not a number" if value is None else format(value, form)


# Parts of the work have their colours on every drawing; those of others follow from their names.
COLOURS = ("train", "input wait", "evaluate", "compile", "check", "start", "checkpoint", "other")


def colour(name: str) -> int:
    """The number of the colour for a part of the work."""
    return COLOURS.index(name) if name in COLOURS else 5 + sum(name.encode()) % 3


def bar(parts: dict[str, float], about: str) -> str:
    """Seconds by part, as a stacked bar and the table that explains it."""
    whole, done, boxes, rows = sum(parts.values()), 0.0, [], []
    for name, s in parts.items():
        fill, left, width = f"p{colour(name)}", 1000 * done / whole, 1000 * s / whole
        gap = min(2, width / 2)  # between parts, so that neighbours are told apart without their colours
        label = f"<title>{escape(name)} {s:,.1f} s, {s / whole:.1%}</title>"
        boxes.append(f'<rect class="{fill}" x="{left:.2f}" width="{width - gap:.2f}" height="40">{label}</rect>')
        box = f'<rect class="{fill}" width="9" height="9"/>'
        swatch = f'<svg class="swatch" viewBox="0 0 9 9" aria-hidden="true">{box}</svg>'
        cells = f"<td>{s:,.1f} s</td><td>{s / whole:.1%}</td>"
        rows.append(f'<tr><th scope="row">{swatch}{escape(name)}</th>{cells}</tr>')
        done += s
    return (
        '<svg class="bar" viewBox="0 0 1000 40" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(about)}, as in the table below">{"".join(boxes)}</svg>'
        + scrolling(f'<table class="numbers"><tbody>{"".join(rows)}</tbody></table>', about)
    )
