"""A mapping in tables: what it costs on the fabric, beside hostname order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.planner.drawing.quantities import counted, gigabytes, percent, seconds
from meshwright.planner.report.view import NUMBER, Block, Column, Table, View, line

Document = Mapping[str, Any]
MOST_NODES_NAMED = 8


def mapping_view(document: Document) -> View:
    """The view of what `map --json` prints: size, figures beside hostname order, certificate, idle nodes."""
    slots = document["slots"]
    head = (
        f"{counted(len(document['ranks']), 'rank')} in the order {'-'.join(document['order'])}: "
        f"{counted(slots['stages'], 'stage')} of {counted(slots['per_stage'], 'slot')} of "
        f"{counted(slots['gpus'], 'GPU')}; leaves: {slots['leaves']}, pods: {slots['pods']}"
    )
    return [
        line(head),
        _figures(document),
        line(_step(document)),
        line(_certificate(document)),
        *_idle(document["idle_nodes"]),
    ]


def _step(document: Document) -> str:
    """The step on these places, beside the plan's own."""
    now_s, planned_s = document["step_time_s"], document["planned_step_time_s"]
    planned = "" if planned_s is None else f"; the plan states {seconds(planned_s)}"
    return f"A step of the plan with its ranks here: {seconds(now_s)}{planned}."


def _figures(document: Document) -> Block:
    columns = [Column("a step"), Column("hostname order", NUMBER), Column("this mapping", NUMBER)]
    sides = (document["hostname_order"], document)
    rows: list[list[str]] = []
    for title, key, write in (
        ("up-links busy, all together", "uplinks_busy_s", seconds),
        ("busiest up-link busy", "busiest_uplink_s", seconds),
        ("sent up from leaves", "leaf_bytes_per_step", gigabytes),
        ("sent up from pods", "pod_bytes_per_step", gigabytes),
    ):
        rows.append([title, *(write(side[key]) for side in sides)])
    for blocks in ("leaves", "pods"):
        for words, group in (
            ("a data-parallel group", "data_parallel"),
            ("a pipeline", "pipeline"),
        ):
            touched = [_touched(side["spread"][blocks], group) for side in sides]
            rows.append([f"{blocks} of {words}", *touched])
    return Table(columns, rows)


def _touched(spread: Mapping[str, float], group: str) -> str:
    return f"{spread[f'{group}_max']} at most, {spread[f'{group}_mean']:.1f} mean"


def _certificate(document: Document) -> str:
    """What the solver proved, in a sentence."""
    took = seconds(document["solver"]["wall_s"])
    spread = document["spread_certificate"]
    hostname_s = document["hostname_order"]["price_s"]
    saved = 1.0 - document["price_s"] / hostname_s if hostname_s > 0 else 0.0
    if spread is not None:
        parts = [_reach(name, spread[name]) for name in ("pods", "leaves")]
        change = f"{percent(abs(saved))} {'more' if saved < 0 else 'less'} than hostname order"
        head = "touched at most (a data-parallel group, a pipeline)"
        return f"{head}: {'; '.join(parts)}; busy up-links: {change}; {took}"
    what = "busy up-links" if document["objective"] == "traffic" else "the busiest up-link"
    proof = "proven least within the cost model"
    if document["status"] != "optimal":
        proof = f"bound {seconds(document['lower_bound_s'])}, gap {percent(document['gap'], 2)}"
    return f"{what}: {percent(saved)} less than hostname order; {proof}; {took}"


def _reach(name: str, level: Document) -> str:
    proof = "proven least"
    if level["status"] != "optimal":
        proof = f"none before {_pair(level['lower_bound'])}"
    hostname = _pair(level["hostname_order"])
    return f"{name}: {_pair(level['found'])}, hostname order {hostname}, {proof}"


def _pair(reach: Sequence[int]) -> str:
    return f"({reach[0]}, {reach[1]})"


def _idle(nodes: Sequence[str]) -> View:
    if not nodes:
        return []
    names = ", ".join(nodes[:MOST_NODES_NAMED])
    if len(nodes) > MOST_NODES_NAMED:
        names += ", ..."
    return [line(f"{counted(len(nodes), 'node')} without a rank: {names}")]
