"""The bars of docs/accuracy.md, as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.planner.drawing import Drawing, distinct_colour

LABEL_WIDTH, CHART_WIDTH, BAR, GAP, TOP = 330.0, 480.0, 11.0, 10.0, 64.0
_GRID = "#e2e5ea"


def group_bars_svg(
    errors: Mapping[str, tuple[float, ...]], series: Sequence[str], title: str
) -> str:
    """Horizontal bars of mean absolute errors in percent: a group a row, a series a colour."""
    drawing = Drawing(LABEL_WIDTH + CHART_WIDTH + 60)
    drawing.text(8, 24, title, size=15, bold=True)
    largest = max(max(row) for row in errors.values())
    scale = CHART_WIDTH / largest
    height = len(series) * BAR + GAP
    bottom = TOP + height * len(errors)
    step = 5.0 if largest <= 50 else 10.0
    for tick in range(int(largest / step) + 1):
        x = LABEL_WIDTH + tick * step * scale
        drawing.path([(x, TOP - 6), (x, bottom)], stroke=_GRID)
        drawing.text(x, bottom + 16, f"{tick * step:g}", anchor="middle")
    words = "mean absolute error of the step time, %"
    drawing.text(LABEL_WIDTH + CHART_WIDTH / 2, bottom + 34, words, anchor="middle")
    for index, name in enumerate(series):
        drawing.rect(LABEL_WIDTH + 120 * index, 36, 12, 12, fill=distinct_colour(index), radius=2)
        drawing.text(LABEL_WIDTH + 120 * index + 17, 46, name)
    for row, (group, values) in enumerate(errors.items()):
        y = TOP + row * height
        drawing.text(LABEL_WIDTH - 8, y + height / 2, group, anchor="end")
        for index, value in enumerate(values):
            tip = f"{group}, {series[index]}: {value:.1f} %"
            drawing.rect(
                LABEL_WIDTH,
                y + index * BAR,
                value * scale,
                BAR - 1,
                fill=distinct_colour(index),
                tip=tip,
            )
    return drawing.document(bottom + 48, title)
