"""Roofs of compute, memory and network as views: of one product, of data parallelism, of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.planner.drawing.quantities import gigabytes, percent, seconds
from meshwright.planner.report.view import (
    COUNT,
    PERCENT,
    Bullets,
    Column,
    Facts,
    Heading,
    Kind,
    Table,
    View,
    decimals,
)

Document = Mapping[str, Any]
_PLAIN = Kind(lambda value: f"{value:g}")


def roofline_view(document: Document) -> View:
    """A matrix product under the roof of its device, and data parallelism under those of the network."""
    product = [_product(document)] if "m" in document else []
    network = _network_view(document["network"]) if "network" in document else []
    planned = _roofs_of_plan(document["plan"]) if "plan" in document else []
    return [*planned, *product, *network]


def _roofs_of_plan(plan: Document) -> View:
    """The products of a plan under its device's roof, and its gradients under those of the network."""
    ridge = f"{plan['memory_ridge_flop_per_byte']:,.0f} FLOP/byte"
    peak = f"{plan['peak_tflops']:,.1f} TFLOP/s of {plan['precision']}"
    columns = [
        Column("product of a micro-batch"),
        Column("FLOP/byte", COUNT),
        Column("bound by"),
        Column("attainable", COUNT, unit="TFLOP/s"),
        Column("in a step", COUNT, unit="TFLOP/s"),
    ]
    rows = [
        [
            row["what"],
            row["flop_per_byte"],
            row["bound"],
            row["attainable_tflops"],
            row["attained"]["tflops"],
        ]
        for row in plan["products"]
    ]
    facts = [
        ("device", plan["device"]),
        ("peak", peak),
        ("ridge of memory", ridge),
        ("batch of a rank", f"{plan['batch_of_a_rank']:g} sequences a step"),
    ]
    network = plan["network"]
    return [Facts(facts), Table(columns, rows), *(_network_view(network) if network else [])]


def _product(document: Document) -> Facts:
    shape = f"[{document['m']}, {document['k']}] x [{document['k']}, {document['n']}]"
    share = document["attainable_tflops"] / document["peak_tflops"]
    attainable = f"{document['attainable_tflops']:.1f} TFLOP/s, {percent(share)} of the peak"
    return Facts(
        [
            ("product", f"{shape}, {document['precision']}"),
            ("device", document["device"]),
            ("work", f"{document['flop'] / 1e9:,.1f} GFLOP, {gigabytes(document['bytes'])}"),
            ("intensity", f"{document['flop_per_byte']:.1f} FLOP/byte"),
            ("ridge point", f"{document['ridge_flop_per_byte']:.1f} FLOP/byte"),
            ("bound by", document["bound"]),
            ("attainable", attainable),
            ("least time", seconds(document["least_seconds"])),
            ("in a training step", _attained(document["attained"])),
        ]
    )


def _attained(attained: Document) -> str:
    """What training reaches of the roof: rates of a large product and of streaming, and this product's."""
    roof = f"{attained['peak_tflops']:.0f} TFLOP/s and {attained['hbm_gb_per_s']:,.0f} GB/s at best"
    return f"{seconds(attained['seconds'])}, {attained['tflops']:.1f} TFLOP/s; {roof}"


def _network_view(network: Document) -> View:
    """Ridge of every level, and what bounds each batch there."""
    wished = percent(network["efficiency_wished"])
    levels = [
        Column("level"),
        Column("GB/s a GPU", _PLAIN),
        Column("ridge", COUNT, unit="FLOP/byte"),
        Column("critical batch", decimals(2)),
        Column(f"{wished} overlapped", decimals(2)),
        Column(f"{wished} serial", decimals(2)),
    ]
    names = ("level", "gb_per_s", "ridge_flop_per_byte", "critical_batch")
    key = f"batch_{100 * network['efficiency_wished']:.4g}"
    rows = [
        [*(level[name] for name in names), level[key]["overlapped"], level[key]["serial"]]
        for level in network["levels"]
    ]
    view: View = [
        Heading(f"Gradients of data parallelism at {network['peak_tflops']:,.1f} TFLOP/s"),
        Table(levels, rows),
    ]
    batches = {
        "batch": Column("batch", _PLAIN),
        "flop_per_byte": Column("FLOP/byte", COUNT),
        "regime": Column("regime"),
        "efficiency_overlapped": Column("overlapped", PERCENT),
        "efficiency_serial": Column("one after the other", PERCENT),
    }
    for level in network["levels"]:
        rows = [[row[name] for name in batches] for row in level["batches"]]
        advice = {row["regime"]: row["advice"] for row in level["batches"]}
        view += [
            Heading(f"Batches of a rank over {level['level']}"),
            Table(list(batches.values()), rows),
            Bullets([f"{regime}: {words}" for regime, words in advice.items()]),
        ]
    return view
