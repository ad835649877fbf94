"""How far measured runs that train adapters lie from predictions, and the bands of plans that do.

`python -m benchmarks.post_training` prices tests/data/post_training/runs.yaml, prints the table of docs/post_training.md
and writes costmodel/data/adapter_bands.yaml. No constant is fitted to these rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.error_bands import percentiles
from meshwright.planner.runs.prediction import validation_report

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "tests" / "data" / "post_training" / "runs.yaml"
BANDS = ROOT / "costmodel" / "data" / "adapter_bands.yaml"
BASIS = "runs that train adapters, none of which a fit has seen"
_HEAD = (
    "# Measured over predicted step time and peak memory of runs that train adapters, 5th and 95th percentile:\n"
    "# `python -m benchmarks.post_training`, from tests/data/post_training/runs.yaml.\n"
)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Measured over predicted, of each row that has both."""

    time: tuple[float, ...]
    memory: tuple[float, ...]
    fits: tuple[bool, ...]
    """Of each row whether it is told rightly to fit or not."""


def scores(rows: Iterable[dict[str, Any]]) -> Scores:
    """Of the rows of a validation report."""
    time, memory, fits = [], [], []
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        if measured["step_time_s"] is not None:
            time.append(measured["step_time_s"] / predicted["step_time_s"])
        if measured["memory_gib"] is not None:
            memory.append(measured["memory_gib"] / predicted["memory_gib"])
        fits.append((predicted["fit_probability"] > 0.5) != measured["out_of_memory"])
    return Scores(time=tuple(time), memory=tuple(memory), fits=tuple(fits))


def measured_scores() -> Scores:
    """Of the shipped rows."""
    return scores(validation_report(RUNS).as_document()["rows"])


def within(ratios: Sequence[float], share: float) -> float:
    """Share of rows whose prediction is off by so much at most."""
    errors = np.abs(1.0 / np.array(ratios) - 1.0)
    return float(np.mean(errors <= share))


def bands_document(measured: Scores) -> str:
    """The text of costmodel/data/adapter_bands.yaml."""
    table = {
        name: {
            **dict(zip(("low", "high"), _rounded(ratios), strict=True)),
            "rows": len(ratios),
            "basis": BASIS,
        }
        for name, ratios in (("step_time", measured.time), ("memory", measured.memory))
    }
    return _HEAD + yaml.safe_dump(table, sort_keys=False, default_flow_style=None, width=200)


def _rounded(ratios: Sequence[float]) -> list[float]:
    return [round(float(end), 3) for end in np.exp(percentiles(ratios))]


def summary(measured: Scores) -> str:
    """The table of docs/post_training.md."""
    lines = ["| | rows | median of measured over predicted | share within |", "|---|---|---|---|"]
    for name, ratios, share in (
        ("step time", measured.time, 0.2),
        ("memory", measured.memory, 0.1),
    ):
        median, part = float(np.median(ratios)), within(ratios, share)
        lines.append(f"| {name} | {len(ratios)} | {median:.2f} | {part:.0%} within {share:.0%} |")
    fits = f"{sum(measured.fits)} of {len(measured.fits)}"
    lines.append(f"| fit or not | {len(measured.fits)} | | {fits} told rightly |")
    return "\n".join(lines)


if __name__ == "__main__":
    found = measured_scores()
    BANDS.write_text(bands_document(found), encoding="utf-8")
    print(summary(found))
