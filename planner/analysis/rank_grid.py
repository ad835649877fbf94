"""Every GPU of a plan with its rank's place on each axis, in the order of the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.cluster_specs.places import Place
from meshwright.costmodel.layout import Layout
from meshwright.planner.mapping.process_groups import coordinates, process_groups

MOST_GPUS = 16_384
MOST_COLUMNS = 128


def rank_grid(layout: Layout, places: Sequence[Place], *, experts: bool) -> dict[str, Any] | None:
    """The GPUs in rows of whole nodes.

    Parameters
    ----------
    layout
        Whose ranks they run.
    places
        (node, local GPU) of every rank.
    experts
        Whether ranks have a place in groups of experts too.

    Returns
    -------
    dict or None
        `columns` of a row, `rank` of every GPU, `node` of every GPU, and `axes`: its place on every axis of
        more than one rank. None above `MOST_GPUS` GPUs.
    """
    if len(places) > MOST_GPUS:
        return None
    node = np.array([node for node, _ in places])
    gpu = np.array([gpu for _, gpu in places])
    rank = np.lexsort((gpu, node))
    per_node = int(np.bincount(node).max())
    groups = process_groups(layout, experts=experts)
    axes = {}
    for axis in ("pp", "dp", "cp", "tp", "ep"):
        if axis in groups and groups[axis].shape[1] > 1:
            axes[axis] = coordinates(groups, axis)[rank].tolist()
    rows = max(1, round(len(places) ** 0.5 / per_node))
    return {
        "columns": min(per_node * rows, max(MOST_COLUMNS, per_node)),
        "rank": rank.tolist(),
        "node": node[rank].tolist(),
        "axes": axes,
    }
