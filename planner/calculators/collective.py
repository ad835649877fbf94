"""One collective alone on a cluster: its time by algorithm and the bandwidths that nccl-tests would print."""

from __future__ import annotations

from typing import Any

from meshwright.cluster_specs.fabric import fabric_levels
from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.collectives.nccl import OPERATIONS, collective_time, isolated_fabric
from meshwright.errors import InputError


def collective_document(
    operation: str, buffer_bytes: float, ranks: int, cluster: str, *, deduplicated: bool = True
) -> dict[str, Any]:
    """Times of a collective over the first GPUs of a cluster, every algorithm compared.

    Parameters
    ----------
    operation
        One of `costmodel.collectives.nccl.OPERATIONS`, such as `all-reduce`.
    buffer_bytes
        The full buffer as nccl-tests counts it, above 0.
    ranks
        Members of the group, at least 2, packed tightly.
    cluster
        Catalog name or cluster file.
    deduplicated
        Whether an all-to-all sends each token once to a node (DeepEP) or once to a GPU (NCCL).

    Returns
    -------
    dict
        Seconds by algorithm, and the two bandwidths that nccl-tests prints, in GB/s.

    Raises
    ------
    InputError
        For an unknown operation, fewer than two ranks, or a cluster that cannot be read.
    """
    name = next((name for name in OPERATIONS if name == operation), None)
    if name is None:
        raise InputError("no such collective", where="--op", value=operation, allowed=OPERATIONS)
    if ranks < 2:
        raise InputError("a collective needs at least 2 ranks", where="--ranks", value=ranks)
    spec = read_cluster(cluster)
    levels = fabric_levels(spec, ranks)
    fabric = isolated_fabric(spec, ranks, deduplicated=deduplicated)
    cost = collective_time(name, buffer_bytes, fabric)
    rows = zip(levels.names, levels.media, fabric.members, levels.gb_per_s, strict=True)
    return {
        "operation": name,
        "bytes": buffer_bytes,
        "ranks": ranks,
        "cluster": spec.name,
        "levels": [
            {
                "name": level,
                "medium": medium,
                "ranks_inside": int(members),
                "nominal_gb_per_s": float(gb_per_s),
            }
            for level, medium, members, gb_per_s in rows
        ],
        "algorithm": cost.algorithm,
        "seconds": cost.seconds,
        "seconds_by_algorithm": cost.by_algorithm_s,
        "algorithm_gb_per_s": cost.algorithm_bytes_per_s / 1e9,
        "bus_gb_per_s": cost.bus_bytes_per_s / 1e9,
    }
