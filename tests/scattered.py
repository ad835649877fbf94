"""Free nodes here and there."""

from __future__ import annotations

import random

from meshwright.cluster_specs.reader import cluster_from_mapping
from meshwright.cluster_specs.schema import ClusterSpec


def scattered_cluster(
    rng: random.Random, leaves: int, per_leaf: int, free: int | None = None
) -> ClusterSpec:
    """Nodes of 8 H100 here and there on leaves of two pods; `free` of them in all, or at random."""
    slots = [(leaf, node) for leaf in range(leaves) for node in range(per_leaf)]
    count = free if free is not None else rng.randint(2 * leaves, len(slots) - 1)
    taken = sorted(rng.sample(slots, count))
    pod = -(-leaves // 2) * per_leaf * 8
    return cluster_from_mapping(
        {
            "name": "scattered",
            "base": "dgx-h100",
            "levels": [
                {"name": "leaf", "gpus": per_leaf * 8},
                {"name": "pod", "gpus": pod, "oversubscription": 2},
                {"name": "core", "gpus": 2 * pod, "oversubscription": 4},
            ],
            "nodes": [
                {"name": f"n{leaf}-{node:02d}", "leaf": f"l{leaf}", "pod": f"p{2 * leaf // leaves}"}
                for leaf, node in taken
            ],
        },
        "scattered",
    )
