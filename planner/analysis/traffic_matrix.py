"""Who sends how much to whom: bytes of a step between blocks of neighbouring nodes.

Rings send their volume to the next member, a member of an all-to-all an equal part to each other one,
neighbours of a pipeline an activation on and a gradient back, as `mapping.crossing.flows` counts them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.planner.mapping.crossing.cuts import MappingUse
from meshwright.planner.mapping.crossing.flows import AxisFlow
from meshwright.planner.mapping.problem import FloatArray, IntArray

MOST_BLOCKS = 32
"""Rows of the matrix."""


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
