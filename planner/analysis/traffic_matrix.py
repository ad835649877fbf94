"""Who sends how much to whom: bytes of a step between blocks of neighbouring nodes.

Rings send their volume to the next member, a member of an all-to-all an equal part to each other one,
neighbours of a pipeline an activation on and a gradient back, as `mapping.crossing.flows` counts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from meshwright.errors import InputError
from meshwright.planner.mapping.crossing.cuts import MappingUse
from meshwright.planner.mapping.crossing.flows import AxisFlow
from meshwright.planner.mapping.problem import FloatArray, IntArray

MOST_BLOCKS = 32
"""Rows of the matrix."""
MOST_PAIRS = 4_000_000
"""Pairs of ranks, before those of several axes are added up: about 100 MB of CSV."""


def traffic_matrix(use: MappingUse, most_blocks: int = MOST_BLOCKS) -> dict[str, Any]:
    """Bytes of a step from every block to every other.

    Parameters
    ----------
    use
        A mapping with what its groups send.
    most_blocks
        At least 1. More nodes are put together, neighbours first, until there are no more blocks than that.

    Returns
    -------
    dict
        `unit`, GPU where all are on one node; `per_block`, how many of them a block holds; and `bytes`,
        [from][to], with what stays inside a block on the diagonal.
    """
    node = use.positions.node
    is_one_node = int(node.max()) == int(node.min())
    unit = np.arange(len(node)) if is_one_node else np.unique(node, return_inverse=True)[1]
    units = int(unit.max()) + 1
    per_block = -(-units // most_blocks)
    block = unit // per_block
    blocks = -(-units // per_block)
    sent = np.zeros((blocks, blocks))
    for flow in use.axes:
        _add(sent, flow, block)
    return {
        "unit": "GPU" if is_one_node else "node",
        "per_block": per_block,
        "bytes": sent.tolist(),
    }


def rank_matrix_csv(use: MappingUse, most_pairs: int = MOST_PAIRS) -> str:
    """Bytes of a step from rank to rank, as CSV of `source,target,bytes`, one row for each pair that sends.

    Parameters
    ----------
    use
        A mapping with what its groups send.
    most_pairs
        Above so many pairs nothing is written.

    Raises
    ------
    InputError
        Where there are more pairs.
    """
    pairs = sum(
        flow.groups.size * (flow.members - 1 if flow.kind == "all-to-all" else 2)
        for flow in use.axes
    )
    if pairs > most_pairs:
        raise InputError(
            f"{pairs:,} pairs of ranks exchange something, at most {most_pairs:,} are written; the page of "
            "`report` has the matrix by blocks of nodes",
            where="--matrix",
        )
    ranks = len(use.positions.node)
    parts = [part for flow in use.axes for part in _pairs(flow)]
    if not parts:
        return "source,target,bytes\n"
    key = np.concatenate([source * ranks + target for source, target, _ in parts])
    sent = np.concatenate([np.full(len(source), volume) for source, _, volume in parts])
    keys, place = np.unique(key, return_inverse=True)
    total = np.bincount(place, weights=sent)
    rows = (
        f"{pair // ranks},{pair % ranks},{volume:.0f}"
        for pair, volume in zip(keys.tolist(), total.tolist(), strict=True)
        if volume > 0 and pair // ranks != pair % ranks
    )
    return "\n".join(["source,target,bytes", *rows, ""])


def _pairs(flow: AxisFlow) -> Iterator[tuple[IntArray, IntArray, float]]:
    """Who sends to whom in the groups of one axis, and how much each pair."""
    groups = flow.groups
    if flow.kind == "chain":
        ends = [(groups[:, :-1].ravel(), groups[:, 1:].ravel(), flow.volume)]
        if flow.wrap:
            ends.append((groups[:, -1], groups[:, 0], flow.wrap))
        for source, target, volume in ends:
            yield source, target, volume
            yield target, source, volume
    elif flow.kind == "ring":
        yield groups.ravel(), np.roll(groups, -1, axis=1).ravel(), flow.volume
    else:
        for step in range(1, flow.members):
            target = np.roll(groups, -step, axis=1).ravel()
            yield groups.ravel(), target, flow.volume / flow.members


def _add(sent: FloatArray, flow: AxisFlow, block: IntArray) -> None:
    """Adds what the groups of one axis send."""
    where = block[flow.groups]
    if flow.kind == "chain":
        for member in range(flow.members - 1):
            ends = where[:, member], where[:, member + 1]
            np.add.at(sent, ends, flow.volume)
            np.add.at(sent, ends[::-1], flow.volume)
        np.add.at(sent, (where[:, -1], where[:, 0]), flow.wrap)
        np.add.at(sent, (where[:, 0], where[:, -1]), flow.wrap)
        return
    if flow.kind == "ring":
        np.add.at(sent, (where, np.roll(where, -1, axis=1)), flow.volume)
        return
    count = np.zeros((len(where), len(sent)))
    np.add.at(count, (np.arange(len(where))[:, None], where), 1.0)
    pairs = count.T @ count
    pairs -= np.diag(count.sum(axis=0))  # nobody sends to itself
    sent += pairs * flow.volume / flow.members
