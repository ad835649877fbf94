"""Scores the cost model on the published runs; writes docs/accuracy.md and costmodel/data/error_bands.yaml.

    python -m benchmarks.accuracy

The tables in the document and the error band on every plan are this script's output and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import yaml

from costmodel.measured import device_class
from planner.prediction import prediction_of
from planner.run_file import Run, read_runs

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "tests" / "data" / "published_runs.yaml"
FEWEST_ROWS = 10


def _scored() -> list[tuple[Run, float, float | None]]:
    """(run, predicted over measured step time, the same for memory) of every row."""
    out = []
    for run in read_runs(RUNS):
        if run.measured is None:
            continue
        found = prediction_of(run)
        memory = (
            found.memory_gib / run.measured.memory_gib
            if run.measured.memory_gib and found.memory_gib
            else None
        )
        out.append((run, found.step_time_s / run.measured.step_time_s, memory))
    return out


def _line(name: str, ratios: Iterable[float]) -> str:
    error = 100.0 * (np.array(list(ratios)) - 1.0)
    size = np.abs(error)
    return (
        f"| {name} | {len(error)} | {size.mean():.1f} | {np.median(size):.1f} | {np.quantile(size, 0.9):.1f} | "
        f"{size.max():.1f} | {error.mean():+.1f} |"
    )


def _bands(scored: list[tuple[Run, float, float | None]]) -> dict[str, dict[str, float | int]]:
    groups: dict[str, list[float]] = {"all": [1.0 / ratio for _, ratio, _ in scored]}
    for run, ratio, _ in scored:
        name = device_class(run.workload.cluster.device.name)
        if name is not None:
            groups.setdefault(name, []).append(1.0 / ratio)
    return {
        name: {
            "low": round(float(np.quantile(values, 0.05)), 3),
            "high": round(float(np.quantile(values, 0.95)), 3),
            "rows": len(values),
        }
        for name, values in groups.items()
        if len(values) >= FEWEST_ROWS
    }


def _document(scored: list[tuple[Run, float, float | None]]) -> str:
    head = "| | rows | mean % | median % | 90th % | worst % | bias % |\n|---|---|---|---|---|---|---|"
    by_device = sorted({run.workload.cluster.device.name for run, _, _ in scored})
    by_stack = sorted({run.workload.framework for run, _, _ in scored})
    kinds = {"dense": False, "MoE": True}
    lines = [_line("all", (ratio for _, ratio, _ in scored))]
    lines += [_line("without suspects", (ratio for run, ratio, _ in scored if run.suspect is None))]
    lines += [
        _line(kind, (r for run, r, _ in scored if (run.workload.model.moe is not None) == moe))
        for kind, moe in kinds.items()
    ]
    lines += [
        _line(name, (r for run, r, _ in scored if run.workload.cluster.device.name == name))
        for name in by_device
    ]
    lines += [_line(name, (r for run, r, _ in scored if run.workload.framework == name)) for name in by_stack]
    memory = [(run, m) for run, _, m in scored if m is not None]
    memory_lines = [_line("all", (m for _, m in memory))] + [
        _line(name, (m for run, m in memory if run.workload.framework == name))
        for name in sorted({run.workload.framework for run, _ in memory})
    ]
    return _TEXT.format(
        rows=len(scored), time="\n".join([head, *lines]), memory="\n".join([head, *memory_lines])
    )


_TEXT = """# How accurate the predictions are

Written by `python -m benchmarks.accuracy` from the {rows} published, measured steps in `tests/data/published_runs.yaml` (every row names
its source; suspects count). The error is predicted over measured, minus 1; mean, median and percentiles are of its size, bias is its mean.
The constants were fitted on these very rows with priors at physical values, so an unseen source does worse: see the limits below.
`meshwright validate tests/data/published_runs.yaml` prints the same by source, with every row and the plan regret.

## Step time
{time}

## Memory
{memory}

What a source reports differs: SimuMax reports the allocator's peak per rank, which is what the model predicts; BLOOM rows are `nvidia-smi` readings,
compared with that peak plus fragments and context; torchtitan rows are what the allocator reserved, and its operator-level recomputation is only approximated.

## The band on a plan
`predicted.error_band` holds the 5th and 95th percentile of measured over predicted on the device's class (`costmodel/data/error_bands.yaml`); a class with
fewer than 10 rows takes that of all rows.

## Limits
- Constants of one framework do not carry over to another (host times above all); `costmodel/data/frameworks.yaml` says which profile a target takes.
- No measured row exists for V100, L40S, MI300X, H200, H800 (H800 takes H100's constants): their constants are assumed, and say so in the YAML.
- Attention with sinks is priced by one factor fitted on gpt-oss, the only such model among the rows.
- A step that nearly fills HBM (over 92 %) was measured 21 to 27 % slower than predicted, because the allocator stalls; plans stay below that.
"""


def main() -> None:
    """Scores, then writes both files."""
    scored = _scored()
    bands = yaml.safe_dump({"bands": _bands(scored)}, sort_keys=True)
    comment = "# Measured over predicted step time, 5th and 95th percentile by device class: `python -m benchmarks.accuracy`.\n"
    (ROOT / "costmodel" / "data" / "error_bands.yaml").write_text(comment + bands, encoding="utf-8")
    (ROOT / "docs" / "accuracy.md").write_text(_document(scored), encoding="utf-8")


if __name__ == "__main__":
    main()
