"""Loads of GPUs by layer as a picture; needs the plot extra."""

from __future__ import annotations

from pathlib import Path

from meshwright.errors import InputError
from meshwright.planner.experts.problem import Loads


def write_heat_map(path: Path, share: Loads) -> None:
    """Writes load over mean, [layers, gpus], as PNG or SVG by the file's ending. Raises InputError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "heat-map: needs matplotlib, which is not installed: pip install 'meshwright[plot]'"
        ) from None
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    spread = max(float(abs(share - 1).max()), 0.01)
    image = axes.imshow(share, aspect="auto", cmap="RdBu_r", vmin=1 - spread, vmax=1 + spread)
    axes.set_xlabel("GPU")
    axes.set_ylabel("layer")
    figure.colorbar(image, label="load over mean")
    try:
        figure.savefig(
            path, dpi=120, metadata={"Date": None} if path.suffix.lower() == ".svg" else None
        )
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror or 'system error'})"
        ) from None
