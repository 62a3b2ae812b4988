"""A line chart as an SVG document: logarithmic upwards, nothing else to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 30, 50
COLOURS = ("#1f6fb4", "#c4561c", "#3a8a3a")
STEPS = (1, 2, 5)


def lines(curves: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str) -> str:
    """Draw some curves.

    Parameters
    ----------
    curves : mapping
        Name -> points (x, y), y above zero.
    across, up : str
        What the axes mean.
    """
    points = [point for curve in curves.values() for point in curve]
    most_x = max(x for x, _ in points)
    marks = [step * 10**power for power in range(-3, 10) for step in STEPS]
    low = max(mark for mark in marks if mark <= min(y for _, y in points))
    high = min(mark for mark in marks if mark >= max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log(y) - math.log(low)) / (math.log(high) - math.log(low))
        return LEFT + x / most_x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for mark in (mark for mark in marks if low <= mark <= high):
        y = place(0, mark)[1]
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for x in sorted({x for x, _ in points}):
        parts.append(f'<text x="{place(x, low)[0]:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:g}</text>')
    for (name, curve), colour, line in zip(curves.items(), COLOURS, range(len(curves)), strict=False):
        path = "L".join("{:.1f} {:.1f}".format(*place(x, y)) for x, y in curve)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in curve:
            across_px, down_px = place(x, y)
            parts.append(f'<circle cx="{across_px:.1f}" cy="{down_px:.1f}" r="3.5" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT - 8}" y="{TOP + 14 + 16 * line}" text-anchor="end" fill="{colour}">')
        parts.append(f"{escape(name)}</text>")
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(across)}</text>'
    )
    parts.append(f'<text transform="translate(18 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(up)}</text>')
    parts.append("</svg>\n")
    return "\n".join(parts)
