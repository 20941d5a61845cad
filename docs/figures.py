"""Draw the figures of the three pillars, with the functions that training itself uses.

    python docs/figures.py

They have a background of their own, for light and dark pages.
"""

from pathlib import Path

import numpy as np

from podscale import plan as plans
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.data.order import Order
from podscale.parallel.routes import find_hamiltonian_cycle
from podscale.pod import Pod

HERE = Path(__file__).parent
INK, PAPER = "#22303f", "#ffffff"
TINTS = ("#7fb3ee", "#f0a878", "#8fd0a8", "#c9a5ee")


def make_svg(width, height, label, parts):
    body = "\n".join([f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>', *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{label}">\n{body}\n</svg>\n'
    )


def draw_box(x, y, width, height, fill, more=""):
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" {more}/>'


def draw_text(x, y, text, size=13, anchor="start"):
    style = f'font-family="sans-serif" font-size="{size}" fill="{INK}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{text}</text>'


def draw_norm():
    """Draw a 4x4 torus whose tiles of 2x2 chips normalize together; each chip shows its positions in the batch."""
    recipe = recipes.load_recipe("digits").override({"batch.size": 64, "batch.span": 16})
    pod = Pod("cpu", 4, 4)
    plan = plans.make_plan(recipe, pod, plans.Counts(1437, 360, 10), Options())
    high, wide = plan.tile
    parts, side, gap = [], 78, 14
    for row in range(4):
        for col in range(4):
            tile_row, tile_col = row // high, col // wide
            within = (row % high) * wide + col % wide
            device = (tile_row * (4 // wide) + tile_col) * high * wide + within  # in the order of the batch
            positions = np.sort(plan.positions(device).ravel())
            x, y = 20 + col * (side + gap) + tile_col * 16, 34 + row * (side + gap) + tile_row * 16
            parts.append(draw_box(x, y, side, side, TINTS[(tile_row * 2 + tile_col) % 4], 'fill-opacity="0.55"'))
            parts.append(draw_text(x + 8, y + 22, f"images {positions[0]}-{positions[-1]}", 11))
            parts.append(draw_text(x + 8, y + 44, f"group {positions[0] // recipe.batch.span}"))
    parts.append(draw_text(20, 20, "4 x 4 chips, 64 images, span 16: a tile of 2 x 2 chips is one batch-norm group"))
    return make_svg(480, 440, "Sixteen chips in four tiles, each a batch-norm group", parts)


def draw_lanes():
    """Draw which sample each position of a batch reads, update by update."""
    order = Order(12, 1, 4, 0)
    parts = [draw_text(20, 20, "Each column is an update, each row a position; the number is the sample")]
    updates = [order.get_samples(np.full(4, step), np.arange(4)) for step in range(6)]
    for step, (samples, passes) in enumerate(updates):
        for position, (sample, pass_number) in enumerate(zip(samples.tolist(), passes.tolist(), strict=True)):
            x, y = 90 + step * 56, 40 + position * 42
            parts.append(draw_box(x, y, 48, 34, TINTS[pass_number % 4], 'fill-opacity="0.55"'))
            parts.append(draw_text(x + 24, y + 22, str(sample), anchor="middle"))
    for position in range(4):
        parts.append(draw_text(20, 62 + position * 42, f"position {position}"))
    parts.append(draw_text(20, 232, "Blue: the first pass over 12 samples, each once; orange: the second."))
    return make_svg(450, 246, "Samples by position and update: each pass takes every sample once", parts)


def draw_torus():
    """Draw the hops of a sum over R x C chips: one ring through all, and the two-dimensional algorithm."""
    sides = (2, 4, 8, 16, 32)
    rows = [(n * n, 2 * (len(find_hamiltonian_cycle(n, n)) - 1), 4 * (n - 1)) for n in sides]
    parts = [draw_text(20, 20, "Hops, one after another, until all chips have the sum (log scale)")]
    most = np.log(rows[-1][1])
    for i, (chips, ring, two) in enumerate(rows):
        y = 40 + i * 44
        parts.append(draw_text(20, y + 22, f"{chips} chips"))
        for k, (count, fill) in enumerate(((ring, TINTS[1]), (two, TINTS[0]))):
            width = round(270 * np.log(count) / most, 1)
            parts.append(draw_box(110, y + k * 18, width, 15, fill))
            parts.append(draw_text(116 + width, y + 12 + k * 18, f"{count:,}", 11))
    parts.append(draw_text(20, 276, "Orange: one ring through all chips. Blue: along rows, then along columns."))
    return make_svg(450, 290, "Hops of a ring and of the torus for 4 to 1024 chips", parts)


FIGURES = {"norm.svg": draw_norm, "lanes.svg": draw_lanes, "torus.svg": draw_torus}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (HERE / name).write_text(draw())
