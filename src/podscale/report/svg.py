"""Draw the few shapes that SVG plots are made of."""

from collections.abc import Iterable
from html import escape

INK, FAINT = "#222", "#ddd"


def make_svg(width: int, height: int, shapes: Iterable[str]) -> str:
    """Return an SVG file of these shapes on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *shapes, "</svg>"]) + "\n"


def draw_line(points: Iterable[tuple[float, float]], colour: str, width: float = 1.0, dashed: bool = False) -> str:
    """Return a line through all points."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{format_points(points)}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'


def draw_area(points: Iterable[tuple[float, float]], colour: str, note: str) -> str:
    """Return the area inside the points, with `note` as its tooltip."""
    return f'<polygon points="{format_points(points)}" fill="{colour}"><title>{escape(note)}</title></polygon>'


def draw_dot(x: float, y: float, colour: str, note: str = "") -> str:
    """Return a circle, with `note` as its tooltip."""
    inside = f"><title>{escape(note)}</title></circle>" if note else "/>"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"{inside}'


def draw_text(x: float, y: float, content: str, anchor: str = "middle", size: int = 12, colour: str = INK) -> str:
    """Return text whose start, middle or end (`anchor`) is at x."""
    attributes = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {attributes}>{escape(content)}</text>"


def format_points(points: Iterable[tuple[float, float]]) -> str:
    """Format points as an SVG attribute."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
