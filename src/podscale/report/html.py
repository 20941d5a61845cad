"""Render the elements of pages. All text becomes HTML here and in the section modules, always escaped.

A page is self-contained: no network, no server, no library. Its content security policy allows only its own style and
script, by their hashes, and embedded images, so that markup injected through a name does not run. The text is plain
ASCII (other characters as references), so that it does not depend on the locale.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template

from podscale.config.json_types import Json


def render_document(template: str, scripts: Sequence[str], data: Json, *, name: str, **parts: str) -> str:
    """Return a whole page.

    Args:
        template: the file of the page's body.
        scripts: the files of its scripts, in order.
        data: JSON values for the scripts.
        name: the page's title, as HTML.
        **parts: HTML for the other placeholders of the template.
    """
    style, script = read_asset("page.css"), "\n".join(read_asset(name) for name in scripts)
    hashes = f"style-src {_hash_source(style)}; script-src {_hash_source(script)}"
    policy = f"default-src 'none'; img-src data:; {hashes}; base-uri 'none'"
    body = Template(read_asset(template)).substitute(name=name, **parts)
    page = Template(read_asset("frame.html")).substitute(
        name=name, policy=policy, style=style, body=body, script=script, data=embed_json(data)
    )
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def read_asset(name: str) -> str:
    """Return the text of a file in this folder."""
    return resources.files(__package__).joinpath(name).read_text(encoding="ascii")


def _hash_source(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def embed_json(values: Json) -> str:
    """Return JSON that is safe inside a script element: nothing in it can close the element or open another."""
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def render_table(head: Sequence[str], rows: Iterable[Sequence[str]], label: str = "table") -> str:
    """Return text as an HTML table: numbers under a header, or names with their values if `head` is empty."""
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    top = f"<thead><tr>{names}</tr></thead>" if head else ""
    body = ""
    for first, *others in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        body += f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>'
    kind = ' class="numbers"' if head else ""
    return wrap_scrolling(f"<table{kind}>{top}<tbody>{body}</tbody></table>", label)


def wrap_scrolling(inner: str, label: str = "table") -> str:
    """Wrap HTML that may be wider than a phone in a box that scrolls and can be reached by the keyboard."""
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(label)}">{inner}</div>'


def render_cards(values: Iterable[tuple[str, str, str]]) -> str:
    """Return cards of a name, a large value, and a remark."""
    return "".join(
        f'<div><dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="beside">{escape(remark)}</dd></div>'
        for name, value, remark in values
    )


def round_number(value: Json) -> float | None:
    """Return a finite number with as many digits as a chart needs, or None."""
    return float(f"{value:.6g}") if isinstance(value, int | float) and math.isfinite(value) else None


def format_cell(value: float | None, form: str = ".4g") -> str:
    """Format a number for a table."""
    return "non-finite" if value is None else format(value, form)


# Each of these parts of the work has the same colour in every chart; the colours of others follow from their names.
COLOURS = ("train", "input wait", "evaluate", "compile", "check", "start", "checkpoint", "other")


def get_colour(name: str) -> int:
    """Return the number of the colour for a part of the work."""
    return COLOURS.index(name) if name in COLOURS else 5 + sum(name.encode()) % 3


def render_bar(parts: dict[str, float], label: str) -> str:
    """Return seconds by part as a stacked bar and a table."""
    whole, done, boxes, rows = sum(parts.values()), 0.0, [], []
    for name, s in parts.items():
        fill, left, width = f"p{get_colour(name)}", 1000 * done / whole, 1000 * s / whole
        gap = min(2, width / 2)  # between parts, so that neighbours are distinct without their colours
        title = f"<title>{escape(name)} {s:,.1f} s, {s / whole:.1%}</title>"
        boxes.append(f'<rect class="{fill}" x="{left:.2f}" width="{width - gap:.2f}" height="40">{title}</rect>')
        box = f'<rect class="{fill}" width="9" height="9"/>'
        swatch = f'<svg class="swatch" viewBox="0 0 9 9" aria-hidden="true">{box}</svg>'
        cells = f"<td>{s:,.1f} s</td><td>{s / whole:.1%}</td>"
        rows.append(f'<tr><th scope="row">{swatch}{escape(name)}</th>{cells}</tr>')
        done += s
    return (
        '<svg class="bar" viewBox="0 0 1000 40" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}, as in the table below">{"".join(boxes)}</svg>'
        + wrap_scrolling(f'<table class="numbers"><tbody>{"".join(rows)}</tbody></table>', label)
    )
