"""Strokes: the few marks that pictures in SVG are drawn with."""

from collections.abc import Iterable
from html import escape

INK, FAINT = "#222", "#ddd"


def picture(width: int, height: int, marks: Iterable[str]) -> str:
    """An SVG file of these marks on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *marks, "</svg>"]) + "\n"


def line(spots: Iterable[tuple[float, float]], colour: str, width: float = 1.0, dashed: bool = False) -> str:
    """A line through all of the spots."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{pairs(spots)}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'


def area(spots: Iterable[tuple[float, float]], colour: str, note: str) -> str:
    """The area inside the spots; `note` is shown to who points at it."""
    return f'<polygon points="{pairs(spots)}" fill="{colour}"><title>{escape(note)}</title></polygon>'


def dot(x: float, y: float, colour: str, note: str = "") -> str:
    """A round point."""
    inside = f"><title>{escape(note)}</title></circle>" if note else "/>"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"{inside}'


def text(x: float, y: float, words: str, anchor: str = "middle", size: int = 12, colour: str = INK) -> str:
    """Words whose start, middle or end is at x."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}>{escape(words)}</text>"


def pairs(spots: Iterable[tuple[float, float]]) -> str:
    """Spots as SVG writes them."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
