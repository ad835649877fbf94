"""Time of a collective against its size, a line for each algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.planner.drawing.charts import Chart, LogScale
from meshwright.planner.drawing.svg import distinct_colour

_MARGIN = 1.4
_MICROSECONDS = 1e6


def sweep_picture(document: Mapping[str, Any]) -> str:
    """The sweep of a `collective` document as SVG text. Raises InputError for fewer than two sizes."""
    sweep = document["sweep"]
    if len(sweep) < 2:
        raise InputError("a picture needs two sizes; give --end", where="--picture")
    times_us = [
        _MICROSECONDS * seconds for row in sweep for seconds in row["seconds_by_algorithm"].values()
    ]
    chart = Chart(
        across=LogScale.of_tens([row["bytes"] for row in sweep], _MARGIN),
        down=LogScale.of_tens(times_us, _MARGIN),
        title=f"{document['operation']} over {document['ranks']} ranks",
        across_title="bytes of the full buffer",
        down_title="us",
    )
    for index, algorithm in enumerate(sweep[0]["seconds_by_algorithm"]):
        colour = distinct_colour(index)
        points = [
            (row["bytes"], _MICROSECONDS * row["seconds_by_algorithm"][algorithm]) for row in sweep
        ]
        chart.line(points, colour)
        chart.name(algorithm, colour)
    return chart.document()
