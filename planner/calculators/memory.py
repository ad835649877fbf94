"""HBM of every pipeline stage by component, of a fully given run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.costmodel.memory.footprint import usable_hbm_gib
from meshwright.planner.report.parts import Renderable, facts, grid, heading
from meshwright.planner.runs.prediction import price_runs


def memory_documents(path: Path) -> Iterator[dict[str, Any]]:
    """One document for each run of a file. Raises InputError for one that cannot be read or priced."""
    for priced in price_runs(path):
        work, found = priced.run.workload, priced.found
        yield {
            "id": priced.run.id,
            "device": work.cluster.device.name,
            "hbm_gib": work.cluster.device.hbm_gib,
            "usable_gib": usable_hbm_gib(work),
            "context_gib": found.context_gib,
            "memory_gib": list(found.memory_gib),
            "memory_parts_gib": list(found.memory_parts_gib),
        }


def memory_view(document: dict[str, Any]) -> list[Renderable]:
    """Components down, stages across: the first, the fullest and the last."""
    peaks, parts = document["memory_gib"], document["memory_parts_gib"]
    fullest = max(range(len(peaks)), key=lambda stage: peaks[stage])
    stages = sorted({0, fullest, len(peaks) - 1})
    rows = [[name, *(f"{parts[stage][name]:.2f}" for stage in stages)] for name in parts[0]]
    rows.append(["peak", *(f"{peaks[stage]:.2f}" for stage in stages)])
    heads = [
        f"stage {stage}" + (" (fullest)" if stage == fullest and len(stages) > 1 else "")
        for stage in stages
    ]
    return [
        facts(
            [
                ("run", document["id"]),
                ("device", f"{document['device']}, {document['hbm_gib']:g} GiB"),
                ("usable", f"{document['usable_gib']:.1f} GiB"),
                (
                    "outside the allocator",
                    f"{document['context_gib']:.2f} GiB of context and NCCL buffers",
                ),
            ]
        ),
        heading("GiB on one GPU"),
        grid(["component", *heads], rows),
    ]
