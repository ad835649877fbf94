"""The sweep as a picture: GPUs against step time, both logarithmic, the Pareto front joined."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log2
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from planner.recommend.service import Point

LEFT, TOP, WIDTH, HEIGHT = 80, 50, 640, 380
_COLOURS = ("#2563a8", "#b45309", "#15803d", "#7e22ce", "#be123c", "#0f766e")


def sweep_svg(points: Sequence[Point], front: Sequence[Point]) -> str:
    """Plain SVG. Points without a plan are left out; an ideal speed-up is a straight line down."""
    shown = [point for point in points if point.headroom_gib is not None]
    parts: list[str] = []
    if shown:
        x0, x1 = _span([point.gpus for point in shown])
        y0, y1 = _span([point.step_time_s for point in shown])

        def at(point: Point) -> tuple[float, float]:
            x = LEFT + (log2(point.gpus) - x0) / (x1 - x0) * WIDTH
            return x, TOP + HEIGHT - (log2(point.step_time_s) - y0) / (y1 - y0) * HEIGHT

        for k in range(x0, x1 + 1):
            x = LEFT + (k - x0) / (x1 - x0) * WIDTH
            parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + HEIGHT}" stroke="#e2e5ea"/>')
            parts.append(_text(x, TOP + HEIGHT + 18, f"{2**k}", "middle"))
        for k in range(y0, y1 + 1):
            y = TOP + HEIGHT - (k - y0) / (y1 - y0) * HEIGHT
            parts.append(
                f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + WIDTH}" y2="{y:.1f}" stroke="#e2e5ea"/>'
            )
            parts.append(_text(LEFT - 8, y + 4, f"{2.0**k:g} s", "end"))
        clusters = list(dict.fromkeys(point.cluster for point in shown))
        for k, name in enumerate(clusters):
            colour = _COLOURS[k % len(_COLOURS)]
            line = sorted((p for p in front if p.cluster == name), key=lambda p: (p.gpus, -p.step_time_s))
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, line))
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            for point in (p for p in shown if p.cluster == name):
                x, y = at(point)
                fill = colour if any(point is other for other in front) else "#ffffff"
                words = (
                    f"{name}, {point.gpus} GPUs: {point.step_time_s:.4g} s, {point.headroom_gib:.1f} GiB free"
                )
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" stroke="{colour}">'
                    f"<title>{escape(words)}</title></circle>"
                )
            parts.append(f'<circle cx="{LEFT + WIDTH + 24}" cy="{TOP + 16 + 20 * k}" r="5" fill="{colour}"/>')
            parts.append(_text(LEFT + WIDTH + 36, TOP + 20 + 20 * k, name[:24], "start"))
    else:
        parts.append(_text(LEFT, TOP + 20, "no plan at any size", "start"))
    title = "Step time by GPUs; filled: on the Pareto front of time, GPUs and free memory"
    page = f"{LEFT + WIDTH + 220}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{page}" height="{TOP + HEIGHT + 60}" '
        f'viewBox="0 0 {page} {TOP + HEIGHT + 60}" font-family="sans-serif" font-size="12">'
        f'<title>{title}</title><rect width="100%" height="100%" fill="#ffffff"/>'
    )
    name = f'<text x="{LEFT}" y="26" font-size="15" font-weight="bold" fill="#1b1e23">{title}</text>'
    axis = _text(LEFT + WIDTH / 2, TOP + HEIGHT + 42, "GPUs", "middle")
    return "\n".join([head, name, *parts, axis, "</svg>"]) + "\n"


def _span(values: Sequence[float]) -> tuple[int, int]:
    """Powers of two that enclose the values, at least one apart."""
    low, high = floor(log2(min(values))), ceil(log2(max(values)))
    return low, max(high, low + 1)


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#30343b">{escape(words)}</text>'
