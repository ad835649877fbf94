"""What a plan sends, in tables: by level and axis, by process group, and by cut and phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.drawing import count, counted, gigabytes, percent, seconds, value_map
from meshwright.planner.report.view import (
    BYTES,
    COUNT,
    NUMBER,
    PERCENT,
    SECONDS,
    Block,
    Column,
    Columns,
    Facts,
    Heading,
    Table,
    View,
    decimals,
    line,
    optional,
    percents,
    table,
)

Document = Mapping[str, Any]
_CUTS: Columns = {
    "phase": "phase",
    "level": "level",
    "cut": "cut",
    "block": "busiest",
    "gb_per_s": Column("GB/s", decimals(0)),
    "busy_s": "busy",
    "utilisation": Column("used", PERCENT),
}


_MOST_AXES_IN_ONE_TABLE = 2


_GROUPS: Columns = {
    "axis": "axis",
    "level": "level",
    "crossing": Column("groups that cross", NUMBER),
    "members": Column("ranks", COUNT),
    "most": Column("the most", BYTES),
    "bytes": "all",
}


_AXES: Columns = {
    "axis": "axis",
    "pattern": "pattern",
    "fan_out": Column("fan-out", NUMBER),
    "operations_per_step": Column("operations", COUNT),
    "predictability": "when",
}


_RISKS: Columns = {
    "axis": "axis",
    "incast": "incast",
    "ecmp": "ECMP",
    "suits_network": "ECMP and PFC",
}


_BETWEEN: Columns = {
    "from": "from",
    "to": "to",
    "gpus": Column("GPUs", COUNT),
    "bytes_per_gpu": Column("mean GPU", BYTES),
    "bytes_per_step": Column("all", BYTES),
    "gb_per_s": Column("GB/s", decimals(0)),
    "busy_s": "busy",
    "utilisation": Column("of the step", PERCENT),
}


def traffic_view(document: Document) -> View:
    """The view of what `traffic --json` prints: levels, axes, groups, cuts, and the cut that is used most; of
    a pipeline through parts so for each part, and what parts hand to each other.

    Parameters
    ----------
    document
        What `traffic --json` prints.
    """
    if "parts" in document:
        views: list[View] = [
            [Heading(f"On {part}"), *traffic_view(of_part)]
            for part, of_part in document["parts"].items()
        ]
        between = table(document["between"], _BETWEEN)
        blocks = [block for view in views for block in view]
        return [*blocks, Heading("From part to part, in a step"), between]
    names = sorted({axis for level in document["levels"] for axis in level["by_axis"]})
    by_axis: Columns = {"level": "level", **{axis: Column(axis, BYTES) for axis in names}}
    by_level: Columns = {
        "bytes_per_step": Column("mean GPU", BYTES),
        "most_bytes_per_step": Column("fullest", BYTES),
        "busy_s": "busy",
        "utilisation": Column("of the step", PERCENT),
        "mean_busy_s": "mean busy",
    }
    groups = [
        {
            "axis": axis,
            "level": level,
            "crossing": f"{count(sent['groups'])} of {count(group['count'])}",
            "members": group["members"],
            **sent,
        }
        for axis, group in document["groups"].items()
        for level, sent in group["levels"].items()
    ]
    rows = [{**level, **level["by_axis"]} for level in document["levels"]]
    # All columns in one table would be wider than a terminal.
    is_wide = len(names) > _MOST_AXES_IN_ONE_TABLE
    apart: View = [table(rows, by_axis), line(), table(rows, {"level": "level", **by_level})]
    levels = apart if is_wide else [table(rows, {**by_axis, **by_level})]
    cuts = document["cuts"]
    durations = {cut["phase"]: f"{cut['phase']} take {seconds(cut['phase_s'])}" for cut in cuts}
    return [
        Heading("Bytes of a step that leave one GPU, by level"),
        *levels,
        Heading("What the axes send"),
        *_axes(document["axes"]),
        Heading("Process groups, and what one of them sends in a step"),
        table(groups, _GROUPS),
        Heading("Cuts, by phase"),
        *([line("; ".join(durations.values()))] if cuts else []),
        table(cuts, _CUTS),
        *map(line, _verdicts(document)),
    ]


def _axes(axes: Mapping[str, Document]) -> View:
    rows = [{"axis": axis, **kind} for axis, kind in axes.items()]
    view: View = [table(rows, _AXES), line(), table(rows, _RISKS)]
    imbalances = (kind.get("busiest_receiver_over_mean", 1.0) for kind in axes.values())
    imbalance = max(imbalances, default=1.0)
    if imbalance > 1:
        words = f"the rank with the hottest experts receives {imbalance:.2f} times the mean"
        view.append(line(words))
    return view


def _verdicts(document: Document) -> Iterator[str]:
    """The cut that is used most, the price of oversubscription, the busiest up-link."""
    binding = document["binding"]
    if binding is not None:
        cut = f"the {binding['cut']} of {binding['block']} in {binding['level']}"
        yield f"{cut} is used most: {percent(binding['utilisation'])} of the {binding['phase']}"
    oversubscription = document["oversubscription"]
    if oversubscription is not None:
        lost_s, step_s = oversubscription["loss_s"], oversubscription["step_time_s"]
        words = f"{seconds(lost_s)} of the step of {seconds(step_s)} ({percent(lost_s / step_s)})"
        yield f"oversubscription costs {words}"
    uplinks = document["uplinks"]
    if uplinks is not None:
        yield f"busiest up-link of the mapping: {seconds(uplinks['busiest_s'])} a step"


# A mapping in tables: what it costs on the fabric, beside hostname order.


MOST_NODES_NAMED = 8


def mapping_view(document: Document) -> View:
    """The view of what `map --json` prints: size, figures beside hostname order, certificate, idle nodes.

    Parameters
    ----------
    document
        What `map --json` prints. Seconds and bytes are of a step.
    """
    slots, idle = document["slots"], document["idle_nodes"]
    head = (
        f"{counted(len(document['ranks']), 'rank')} in the order {'-'.join(document['order'])}: "
        f"{counted(slots['stages'], 'stage')} of {counted(slots['per_stage'], 'slot')} of "
        f"{counted(slots['gpus'], 'GPU')}; leaves: {slots['leaves']}, pods: {slots['pods']}"
    )
    view: View = [
        line(head),
        _figures(document),
        line(_step(document)),
        line(_certificate(document)),
    ]
    if idle:
        dots = ["..."] if len(idle) > MOST_NODES_NAMED else []
        names = ", ".join([*idle[:MOST_NODES_NAMED], *dots])
        view.append(line(f"{counted(len(idle), 'node')} without a rank: {names}"))
    return view


def mapped_parts_view(document: Document) -> View:
    """The same of a pipeline through parts, whose ranks run through the nodes of each part in turn.

    Parameters
    ----------
    document
        What `map --json` prints. It is of a plan on a mixed cluster.
    """
    order = ", then ".join(
        f"{counted(nodes, 'node')} of {part}" for part, nodes in document["nodes"]
    )
    columns: Columns = {
        "part": "part",
        "uplinks_busy_s": Column("up-links busy", SECONDS),
        "busiest_uplink_s": Column("busiest", SECONDS),
        "lower_bound_s": Column("least possible", SECONDS),
        "status": "that is",
    }
    rows = [{"part": name, **each} for name, each in document["parts"].items()]
    return [line(f"Ranks run through {order}."), table(rows, columns), line(_step(document))]


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
            spreads = [side["spread"][blocks] for side in sides]
            touched = [
                f"{spread[f'{group}_max']} at most, {spread[f'{group}_mean']:.1f} mean"
                for spread in spreads
            ]
            rows.append([f"{blocks} of {words}", *touched])
    return Table(columns, rows)


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
    of_slots = f"of all ways to lay these slots of {counted(document['slots']['gpus'], 'GPU')}"
    proof = f"proven least {of_slots}"
    if document["status"] != "optimal":
        bound = f"bound {seconds(document['lower_bound_s'])}, gap {percent(document['gap'], 2)}"
        proof = f"{bound} {of_slots}"
    said = f"busy up-links: {percent(saved)} less than hostname order; {proof}; {took}"
    if document["slots"]["gpus"] % document["slots"]["gpus_per_node"]:
        said += (
            ". Slots are parts of nodes: other cuts of the nodes, and the step, are outside this proof; "
            "plan on these nodes looks at both"
        )
    return said


def _reach(name: str, level: Document) -> str:
    proof = "proven least"
    if level["status"] != "optimal":
        proof = f"none before {_pair(level['lower_bound'])}"
    hostname = _pair(level["hostname_order"])
    return f"{name}: {_pair(level['found'])}, hostname order {hostname}, {proof}"


def _pair(reach: Sequence[int]) -> str:
    return f"({reach[0]}, {reach[1]})"


# An expert placement as tables: sums, then the layers that are furthest from their bound.


Pairs = list[tuple[str, str]]
MOST_LAYERS = 12
LEAST_GROUP_COST = 0.005
"""Of balance: what groups cost below that is not worth a line."""
_MEANS = {
    "nodes_per_token_mean": "nodes per token",
    "nodes_per_token_touched_mean": "the same, replicas by touched nodes",
    "leaves_per_token_mean": "leaves per token",
    "pairs_apart_share_mean": "pairs on different nodes",
    "node_balance_mean": "balance of nodes",
    "cross_node_share_mean": "choices that leave the source's node",
    "held_out_balance_mean": "held-out balance",
    "held_out_node_balance_mean": "held-out balance of nodes",
    "held_out_nodes_per_token_mean": "held-out nodes per token",
    "held_out_cross_node_share_mean": "held-out choices that leave the source's node",
    "permutation_density_mean": "permutation density",
    "inside_node_share_mean": "choices inside the node",
    "inside_leaf_share_mean": "choices inside the leaf",
}


def experts_view(document: Document) -> View:
    """The view of what `experts --json` prints: balance and bound, traffic, moves, and the widest gaps.

    Parameters
    ----------
    document
        What `experts --json` prints.
    """
    rows = [*_balance(document), *_traffic(document)]
    if document["from"] is not None:
        rows += _moves(document["from"])
    compared = table(document["compared"], _COMPARED)
    view: View = [Facts(rows), Heading("Against the start"), compared]
    layers = [{"layer": index, **layer} for index, layer in enumerate(document["layers"])]
    widest = sorted(layers, key=lambda layer: (-layer["gap"], -layer["balance"]))[:MOST_LAYERS]
    head = f"Layers ({len(widest)} of {len(layers)}, widest gaps)"
    view += [*_groups_cost(document), Heading(head)]
    return [*view, table(sorted(widest, key=lambda layer: layer["layer"]), _LAYERS)]


_COMPARED: Columns = {
    "placement": "placement",
    "balance_mean": Column("balance", decimals(4)),
    "balance_max": Column("worst layer", decimals(4)),
    "moves": Column("moves", COUNT),
    "duplicates": Column("twice on a GPU", COUNT),
}


_LAYERS: Columns = {
    "layer": Column("layer", NUMBER),
    "balance": Column("balance", decimals(4)),
    "bound": Column("bound", decimals(4)),
    "gap": Column("gap", percents(2)),
    "nodes_per_token": Column("nodes/token", decimals(3)),
    "held_out_balance": Column("held out", decimals(3)),
    "moved_share": Column("moved", percents(0)),
}


def _groups_cost(document: Document) -> View:
    """What whole groups cost in balance, where that is no trifle."""
    balance = {row["placement"]: row["balance_mean"] for row in document["compared"]}
    without = balance.get("without groups")
    if without is None or balance["this placement"] < without * (1 + LEAST_GROUP_COST):
        return []
    cost = percent(balance["this placement"] / without - 1)
    words = (
        f"{count(document['groups'])} groups kept whole cost {cost} of balance: {without:.4f} without them "
        "(--groups 1), at more nodes a token"
    )
    return [line(words)]


def _balance(document: Document) -> Pairs:
    place = f"{counted(document['gpus'], 'GPU')}, {counted(document['nodes'], 'node')}"
    balance = f"mean {document['balance_mean']:.4f}, worst layer {document['balance_max']:.4f}"
    gaps = f"gap mean {percent(document['gap_mean'], 2)}, largest {percent(document['gap_max'], 2)}"
    return [
        ("slots", f"{count(document['slots'])} on {place}"),
        ("balance", balance),
        ("bound", f"mean {document['bound_mean']:.4f}; {gaps}"),
        ("duplicates", str(document["duplicates"])),
        ("time", seconds(document["wall_s"])),
        *(
            (words, optional(document[name], "mean {:.4f}".format))
            for name, words in _MEANS.items()
        ),
    ]


def _traffic(document: Document) -> Pairs:
    """What a layer's exchange takes; the last two only a token trace tells."""
    even_s, each_expert_s = document["even_all_to_all_s_mean"], document["all_to_all_s_mean"]
    if even_s is None:
        return []
    straggler = f"{seconds(document['straggler_all_to_all_s_mean'])} with its busiest GPU"
    rows = [("all-to-all of a layer", f"{seconds(even_s)} if even, {straggler}")]
    if each_expert_s is not None:
        each_node_s = seconds(document["all_to_all_deduplicated_s_mean"])
        crossing = f"{document['cross_node_bytes_mean'] / 1e9:.3f} GB a layer, mean"
        rows += [
            (
                "dispatch all-to-all",
                f"mean {seconds(each_expert_s)}; one copy a node {each_node_s}",
            ),
            ("bytes between nodes", crossing),
        ]
    return rows


def _moves(change: Document) -> Pairs:
    limit = optional(change["max_moves"], lambda moves: f" of {count(moves)} allowed")
    before = f"mean balance was {change['balance_before_mean']:.4f}"
    worst = f"worst layer {change['balance_before_max']:.4f}"
    bound = optional(change["balance_bound_mean"], "mean {:.4f}".format)
    return [
        ("moves", f"{count(change['moves'])}{limit}; {before}, {worst}"),
        ("bound within the moves", f"{bound} (optimal)" if bound and change["optimal"] else bound),
    ]


# Loads of GPUs by layer as a picture.


def heat_map_svg(gpu_share: NDArray[np.float64]) -> str:
    """The load of every GPU over the mean of its layer, [layers, gpus], as SVG text.

    Parameters
    ----------
    gpu_share
        Load of each GPU over the mean of its layer, shape [layers, GPUs].
    """
    return value_map(
        gpu_share,
        middle=1.0,
        title="Load of each GPU over the mean of its layer",
        across_title="GPU",
        down_title="layer",
    )
