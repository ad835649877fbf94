"""Loads of GPUs by layer as a picture."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.drawing.charts import value_map


def heat_map_svg(gpu_share: NDArray[np.float64]) -> str:
    """The load of every GPU over the mean of its layer, [layers, gpus], as SVG text."""
    return value_map(
        gpu_share,
        middle=1.0,
        title="Load of each GPU over the mean of its layer",
        across_title="GPU",
        down_title="layer",
    )
