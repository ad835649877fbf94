"""An expert placement as tables: sums, then the layers that are furthest from their bound."""

from __future__ import annotations

from typing import Any

from meshwright.planner.experts.service import ExpertPlan
from meshwright.planner.report.parts import (
    Renderable,
    count,
    facts,
    grid,
    heading,
    percent,
    seconds,
)

MOST_LAYERS = 12


def experts_view(found: ExpertPlan) -> list[Renderable]:
    """Balance against bound, traffic where it is known, and the widest gaps by layer."""
    document = found.document
    rows: list[tuple[str, str]] = [
        (
            "slots",
            f"{count(document['slots'])} on {count(document['gpus'])} GPUs, {count(document['nodes'])} nodes",
        ),
        (
            "balance",
            f"mean {document['balance_mean']:.4f}, worst layer {document['balance_max']:.4f}",
        ),
        (
            "bound",
            f"mean {document['bound_mean']:.4f}; gap mean {percent(document['gap_mean'], 2)}, "
            f"largest {percent(document['gap_max'], 2)}",
        ),
        ("duplicates", str(document["duplicates"])),
        ("time", seconds(document["wall_s"])),
    ]
    for key, words in (
        ("nodes_per_token_mean", "nodes per token"),
        ("nodes_per_token_touched_mean", "the same, replicas by touched nodes"),
        ("leaves_per_token_mean", "leaves per token"),
        ("pairs_apart_share_mean", "pairs on different nodes"),
        ("node_balance_mean", "balance of nodes"),
        ("cross_node_share_mean", "choices that leave the source's node"),
        ("held_out_balance_mean", "held-out balance"),
        ("held_out_node_balance_mean", "held-out balance of nodes"),
        ("held_out_nodes_per_token_mean", "held-out nodes per token"),
    ):
        if document[key] is not None:
            rows.append((words, f"mean {document[key]:.4f}"))
    if document["all_to_all_s_mean"] is not None:
        plain, once = (document[f"all_to_all{kind}_s_mean"] for kind in ("", "_deduplicated"))
        rows.append(
            ("dispatch all-to-all", f"mean {seconds(plain)}; one copy a node {seconds(once)}")
        )
        rows.append(
            (
                "bytes between nodes",
                f"{document['cross_node_bytes_mean'] / 1e9:.3f} GB a layer, mean",
            )
        )
    if len(document["windows"]) > 1:
        rows.append(("CVaR over windows", f"mean {document['cvar_mean']:.4f}"))
    change = document["from"]
    if change is not None:
        limit = "" if change["max_moves"] is None else f" of {count(change['max_moves'])} allowed"
        words = (
            f"{count(change['moves'])}{limit}; mean balance was {change['balance_before_mean']:.4f}"
        )
        rows.append(("moves", f"{words}, worst layer {change['balance_before_max']:.4f}"))
        if change["balance_bound_mean"] is not None:
            proof = " (optimal)" if change["optimal"] else ""
            rows.append(
                ("bound within the moves", f"mean {change['balance_bound_mean']:.4f}{proof}")
            )
    for row in document["drift"] or ():
        best = min(row["alone_balance_max"].values())
        words = (
            f"{row['balance_max']:.4f}, best of one window alone {best:.4f}: {row['gain']:+.4f} better "
            f"(mean of layers {row['gain_mean']:+.4f})"
        )
        rows.append((f"worst layer on {row['window']}", words))
    layers = sorted(
        enumerate(document["layers"]), key=lambda item: (-item[1]["gap"], -item[1]["balance"])
    )
    cells = [
        _cells(layer, row) for layer, row in sorted(layers[:MOST_LAYERS], key=lambda item: item[0])
    ]
    head = f"Layers ({min(MOST_LAYERS, len(layers))} of {len(layers)}, widest gaps)"
    columns = ["layer", "balance", "bound", "gap", "nodes/token", "held out", "moved"]
    return [facts(rows), heading(head), grid(columns, cells)]


def _cells(layer: int, row: dict[str, Any]) -> list[str]:
    def known(key: str) -> str:
        return "-" if row[key] is None else f"{row[key]:.3f}"

    return [
        str(layer),
        f"{row['balance']:.4f}",
        f"{row['bound']:.4f}",
        percent(row["gap"], 2),
        known("nodes_per_token"),
        known("held_out_balance"),
        percent(row["permutation_density"], 0),
    ]
