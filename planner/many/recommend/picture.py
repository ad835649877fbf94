"""The sweep as a picture: GPUs against step time, both logarithmic, the Pareto front joined."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log2
from typing import TYPE_CHECKING

from meshwright.planner.drawing.svg import Drawing, distinct_colour, shortened

if TYPE_CHECKING:
    from meshwright.planner.many.recommend.service import Point

LEFT, TOP, WIDTH, HEIGHT = 80, 50, 640, 380
_MARGIN_RIGHT, _MARGIN_BOTTOM, _GRID = 220, 60, "#e2e5ea"
_TITLE = "Step time by GPUs; filled: on the Pareto front of time, GPUs and free memory"


def sweep_svg(points: Sequence[Point], front: Sequence[Point]) -> str:
    """The SVG text. Points without a plan are left out; an ideal speed-up is a straight line down."""
    drawing = Drawing(LEFT + WIDTH + _MARGIN_RIGHT)
    shown = [point for point in points if point.headroom_gib is not None]
    if shown:
        _chart(drawing, shown, front)
    else:
        drawing.text(LEFT, TOP + 20, "no plan at any size")
    drawing.text(LEFT, 26, _TITLE, size=15, ink="#1b1e23", bold=True)
    drawing.text(LEFT + WIDTH / 2, TOP + HEIGHT + 42, "GPUs", anchor="middle")
    return drawing.document(TOP + HEIGHT + _MARGIN_BOTTOM, _TITLE)


def _chart(drawing: Drawing, shown: Sequence[Point], front: Sequence[Point]) -> None:
    x0, x1 = _span([point.gpus for point in shown])
    y0, y1 = _span([point.step_time_s for point in shown])

    def across(power: float) -> float:
        return LEFT + (power - x0) / (x1 - x0) * WIDTH

    def down(power: float) -> float:
        return TOP + HEIGHT - (power - y0) / (y1 - y0) * HEIGHT

    def place(point: Point) -> tuple[float, float]:
        return across(log2(point.gpus)), down(log2(point.step_time_s))

    for power in range(x0, x1 + 1):
        drawing.path([(across(power), TOP), (across(power), TOP + HEIGHT)], stroke=_GRID)
        drawing.text(across(power), TOP + HEIGHT + 18, f"{2**power}", anchor="middle")
    for power in range(y0, y1 + 1):
        drawing.path([(LEFT, down(power)), (LEFT + WIDTH, down(power))], stroke=_GRID)
        drawing.text(LEFT - 8, down(power) + 4, f"{2.0**power:g} s", anchor="end")
    for k, name in enumerate(dict.fromkeys(point.cluster for point in shown)):
        colour = distinct_colour(k)
        line = sorted(
            (p for p in front if p.cluster == name), key=lambda p: (p.gpus, -p.step_time_s)
        )
        drawing.path([place(point) for point in line], stroke=colour, stroke_width=1.5)
        for point in (p for p in shown if p.cluster == name):
            words = f"{name}, {point.gpus} GPUs: {point.step_time_s:.4g} s, {point.headroom_gib:.1f} GiB free"
            on_front = any(point is other for other in front)
            drawing.circle(
                *place(point), 5, fill=colour if on_front else "#ffffff", stroke=colour, tip=words
            )
        key = TOP + 20 * (k + 1)
        drawing.circle(LEFT + WIDTH + 24, key - 4, 5, fill=colour)
        drawing.text(LEFT + WIDTH + 36, key, shortened(name, _MARGIN_RIGHT - 40, 11))


def _span(values: Sequence[float]) -> tuple[int, int]:
    """Powers of two that enclose the values, at least one apart."""
    low, high = floor(log2(min(values))), ceil(log2(max(values)))
    return low, max(high, low + 1)
