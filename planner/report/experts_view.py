"""An expert placement as tables: sums, then the layers that are furthest from their bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.planner.drawing.quantities import count, counted, percent, seconds
from meshwright.planner.report.view import (
    COUNT,
    NUMBER,
    Block,
    Column,
    Facts,
    Heading,
    Table,
    View,
    decimals,
    line,
    percents,
)

Document = Mapping[str, Any]
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
    "permutation_density_mean": "permutation density",
    "inside_node_share_mean": "choices inside the node",
    "inside_leaf_share_mean": "choices inside the leaf",
}


def experts_view(document: Document) -> View:
    """The view of what `experts --json` prints: balance and bound, traffic, moves, and the widest gaps."""
    rows = _balance(document)
    rows += [
        (words, f"mean {document[name]:.4f}")
        for name, words in _MEANS.items()
        if document[name] is not None
    ]
    rows += _traffic(document)
    if len(document["windows"]) > 1:
        rows.append(("CVaR over windows", f"mean {document['cvar_mean']:.4f}"))
    if document["from"] is not None:
        rows += _moves(document["from"])
    rows += [_drift(window) for window in document["drift"] or ()]
    layers = document["layers"]
    head = f"Layers ({min(MOST_LAYERS, len(layers))} of {len(layers)}, widest gaps)"
    view: View = [Facts(rows), Heading("Against the start"), _compared(document["compared"])]
    view += _groups_cost(document)
    return [*view, Heading(head), _widest_gaps(layers)]


def _compared(rows: list[Document]) -> Block:
    columns = {
        "placement": Column("placement"),
        "balance_mean": Column("balance", decimals(4)),
        "balance_max": Column("worst layer", decimals(4)),
        "moves": Column("moves", COUNT),
        "duplicates": Column("twice on a GPU", COUNT),
    }
    return Table(list(columns.values()), [[row[name] for name in columns] for row in rows])


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
    ]


def _traffic(document: Document) -> Pairs:
    even_s = document["even_all_to_all_s_mean"]
    if even_s is None:
        return []
    waits_s = document["straggler_all_to_all_s_mean"]
    straggler = f"{seconds(even_s)} if even, {seconds(waits_s)} with its busiest GPU"
    return [("all-to-all of a layer", straggler), *_traced(document)]


def _traced(document: Document) -> Pairs:
    """What only a token trace tells."""
    each_expert_s = document["all_to_all_s_mean"]
    if each_expert_s is None:
        return []
    each_node_s = document["all_to_all_deduplicated_s_mean"]
    times = f"mean {seconds(each_expert_s)}; one copy a node {seconds(each_node_s)}"
    crossing = f"{document['cross_node_bytes_mean'] / 1e9:.3f} GB a layer, mean"
    return [("dispatch all-to-all", times), ("bytes between nodes", crossing)]


def _moves(change: Document) -> Pairs:
    limit = ""
    if change["max_moves"] is not None:
        limit = f" of {count(change['max_moves'])} allowed"
    before = f"mean balance was {change['balance_before_mean']:.4f}"
    worst = f"worst layer {change['balance_before_max']:.4f}"
    rows = [("moves", f"{count(change['moves'])}{limit}; {before}, {worst}")]
    if change["balance_bound_mean"] is not None:
        proof = " (optimal)" if change["optimal"] else ""
        bound = f"mean {change['balance_bound_mean']:.4f}{proof}"
        rows.append(("bound within the moves", bound))
    return rows


def _drift(window: Document) -> tuple[str, str]:
    best = min(window["alone_balance_max"].values())
    words = (
        f"{window['balance_max']:.4f}, best of one window alone {best:.4f}: {window['gain']:+.4f} "
        f"better (mean of layers {window['gain_mean']:+.4f})"
    )
    return f"worst layer on {window['window']}", words


def _widest_gaps(layers: list[Document]) -> Block:
    columns = {
        "balance": Column("balance", decimals(4)),
        "bound": Column("bound", decimals(4)),
        "gap": Column("gap", percents(2)),
        "nodes_per_token": Column("nodes/token", decimals(3)),
        "held_out_balance": Column("held out", decimals(3)),
        "moved_share": Column("moved", percents(0)),
    }
    by_gap = sorted(
        range(len(layers)), key=lambda layer: (-layers[layer]["gap"], -layers[layer]["balance"])
    )
    rows = [
        [layer, *(layers[layer][name] for name in columns)]
        for layer in sorted(by_gap[:MOST_LAYERS])
    ]
    return Table([Column("layer", NUMBER), *columns.values()], rows)
