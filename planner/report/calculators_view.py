"""The answers of the single-formula calculators as views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.planner.drawing.quantities import count, counted, gigabytes, percent, seconds
from meshwright.planner.report.view import (
    BYTES,
    COUNT,
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


def formulas_view(formulas: Sequence[Document]) -> View:
    """What `--why` adds: formula and source of each number; nothing without any."""
    if not formulas:
        return []
    rows = [[row["what"], row["formula"], row["source"]] for row in formulas]
    return [
        Heading("Formulas"),
        Table([Column("what"), Column("formula"), Column("source")], rows),
    ]


def collective_view(document: Document) -> View:
    """The time of a collective, the algorithms compared, the links that the group has."""
    where = f" of {document['cluster']}" if "cluster" in document else ""
    facts = [
        ("operation", f"{document['operation']} of {_size(document['bytes'])}"),
        ("group", f"{document['ranks']} ranks{where}"),
        ("time", f"{seconds(document['seconds'])} ({document['algorithm']})"),
        ("algorithm bandwidth", f"{document['algorithm_gb_per_s']:.1f} GB/s"),
    ]
    if "bus_gb_per_s" in document:
        facts.append(("bus bandwidth", f"{document['bus_gb_per_s']:.1f} GB/s"))
    if document.get("hierarchical_s"):
        facts.append(("by hierarchy, three calls", seconds(document["hierarchical_s"])))
    links = _levels(document["levels"]) if "levels" in document else _own_link(document)
    return [Facts(facts), Heading("Algorithms"), _algorithms(document), *links, *_sweep(document)]


def _algorithms(document: Document) -> Table:
    """Algorithms, the fastest first."""
    times = sorted(document["seconds_by_algorithm"].items(), key=lambda item: item[1])
    steps = document.get("steps_by_algorithm")
    if steps is None:
        return Table([Column("algorithm"), Column("time", SECONDS)], times)
    columns = [
        Column("algorithm"),
        Column("steps"),
        Column("time", SECONDS),
        Column("n / t", decimals(1), unit="GB/s"),
    ]
    rate = document["gb_per_s_by_algorithm"]
    return Table(columns, [[name, _steps(steps[name]), time, rate[name]] for name, time in times])


def _steps(steps: int | Mapping[str, int]) -> str:
    if isinstance(steps, int):
        return count(steps)
    return f"{steps['inside']} inside, {steps['between']} between"


def _levels(levels: Sequence[Document]) -> View:
    columns = {
        "name": Column("level"),
        "medium": Column("medium"),
        "ranks_inside": Column("ranks inside", NUMBER),
        "nominal_gb_per_s": Column("GB/s a GPU", _PLAIN),
        "crossover_bytes": Column("crossover", BYTES),
    }
    rows = [[level[name] for name in columns] for level in levels]
    return [Heading("Levels"), Table(list(columns.values()), rows)]


def _own_link(document: Document) -> View:
    """Which algorithm is fastest from which size on, and the crossover of this link and others."""
    fastest = [[row["algorithm"], row["from_bytes"]] for row in document["fastest_from_bytes"]]
    this = ["this one", document["alpha_s"], document["gb_per_s"], document["crossover_bytes"]]
    columns = {
        "link": Column("link"),
        "alpha_s": Column("start-up", SECONDS),
        "gb_per_s": Column("GB/s", _PLAIN),
        "crossover_bytes": Column("crossover", Kind(_kilobytes)),
    }
    tiers = [[tier[name] for name in columns] for tier in document["tiers"]]
    return [
        Heading("Fastest by size"),
        Table([Column("algorithm"), Column("from", Kind(_kilobytes))], fastest),
        Heading("Size whose start-up takes as long as its transfer"),
        Table(list(columns.values()), [this, *tiers]),
    ]


def _size(number_bytes: float) -> str:
    return gigabytes(number_bytes) if number_bytes >= 1e6 else _kilobytes(number_bytes)


def _kilobytes(number_bytes: float) -> str:
    return f"{number_bytes / 1e3:,.1f} KB"


def _sweep(document: Document) -> View:
    """Times by size, where there are several."""
    sweep = document["sweep"]
    if len(sweep) < 2:
        return []
    names = list(sweep[0]["seconds_by_algorithm"])
    columns = [Column("bytes", COUNT), *(Column(name, SECONDS) for name in names)]
    rows = [[row["bytes"], *row["seconds_by_algorithm"].values()] for row in sweep]
    return [Heading("Sizes"), Table(columns, rows)]


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
