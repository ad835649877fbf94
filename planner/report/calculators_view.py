"""The answers of the single-formula calculators as views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.planner.drawing.quantities import count, counted, gigabytes, percent, seconds
from meshwright.planner.report.view import (
    NUMBER,
    SECONDS,
    Column,
    Facts,
    Heading,
    Kind,
    Table,
    View,
    decimals,
)

Document = Mapping[str, Any]
MOST_RANKS_SHOWN = 32
_PLAIN = Kind(lambda value: f"{value:g}")


def collective_view(document: Document) -> View:
    """The time of a collective, the algorithms compared, the levels that the group crosses."""
    facts = [
        ("operation", f"{document['operation']} of {gigabytes(document['bytes'])}"),
        ("group", f"{document['ranks']} ranks of {document['cluster']}"),
        ("time", f"{seconds(document['seconds'])} ({document['algorithm']})"),
        ("bus bandwidth", f"{document['bus_gb_per_s']:.1f} GB/s"),
        ("algorithm bandwidth", f"{document['algorithm_gb_per_s']:.1f} GB/s"),
    ]
    times = sorted(document["seconds_by_algorithm"].items(), key=lambda item: item[1])
    columns = {
        "name": Column("level"),
        "medium": Column("medium"),
        "ranks_inside": Column("ranks inside", NUMBER),
        "nominal_gb_per_s": Column("GB/s a GPU", _PLAIN),
    }
    levels = [[level[name] for name in columns] for level in document["levels"]]
    return [
        Facts(facts),
        Heading("Algorithms"),
        Table([Column("algorithm"), Column("time", SECONDS)], times),
        Heading("Levels"),
        Table(list(columns.values()), levels),
    ]


def roofline_view(document: Document) -> View:
    """A matrix product under the roof of its device."""
    shape = f"[{document['m']}, {document['k']}] x [{document['k']}, {document['n']}]"
    share = document["attainable_tflops"] / document["peak_tflops"]
    attainable = f"{document['attainable_tflops']:.1f} TFLOP/s, {percent(share)} of the peak"
    return [
        Facts(
            [
                ("product", f"{shape}, {document['precision']}"),
                ("device", document["device"]),
                ("work", f"{document['flop'] / 1e9:,.1f} GFLOP, {gigabytes(document['bytes'])}"),
                ("intensity", f"{document['flop_per_byte']:.1f} FLOP/byte"),
                ("ridge point", f"{document['ridge_flop_per_byte']:.1f} FLOP/byte"),
                ("bound by", document["bound"]),
                ("attainable", attainable),
                ("least time", seconds(document["least_seconds"])),
            ]
        )
    ]


def pipeline_view(document: Document) -> View:
    """The step of a schedule, and what each rank holds."""
    shape = f"{counted(document['pp'], 'rank')} of {counted(document['vpp'], 'virtual stage')}"
    bubble = f"{seconds(document['bubble_seconds'])}, {percent(document['bubble_of_step'])}"
    ranks = list(enumerate(document["in_flight"]))[:MOST_RANKS_SHOWN]
    return [
        Facts(
            [
                ("schedule", f"{document['schedule']}, {shape}"),
                ("micro-batches", count(document["num_micro_batches"])),
                ("step", seconds(document["seconds"])),
                ("bubble", bubble),
            ]
        ),
        Heading("Micro-batches whose activations a rank holds"),
        Table([Column("rank"), Column("in flight", _PLAIN)], ranks),
    ]


def memory_view(document: Document) -> View:
    """Components down, stages across: the first, the fullest and the last."""
    peaks, parts = document["memory_gib"], document["memory_parts_gib"]
    fullest = max(range(len(peaks)), key=lambda stage: peaks[stage])
    stages = sorted({0, fullest, len(peaks) - 1})
    columns = [Column("component")]
    for stage in stages:
        mark = " (fullest)" if stage == fullest and len(stages) > 1 else ""
        columns.append(Column(f"stage {stage}{mark}", decimals(2)))
    rows = [[name, *(parts[stage][name] for stage in stages)] for name in parts[0]]
    rows.append(["peak", *(peaks[stage] for stage in stages)])
    outside = f"{document['context_gib']:.2f} GiB of context and NCCL buffers"
    return [
        Facts(
            [
                ("run", document["id"]),
                ("device", f"{document['device']}, {document['hbm_gib']:g} GiB"),
                ("usable", f"{document['usable_gib']:.1f} GiB"),
                ("outside the allocator", outside),
            ]
        ),
        Heading("GiB on one GPU"),
        Table(columns, rows),
    ]
