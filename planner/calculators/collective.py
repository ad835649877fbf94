"""One collective alone on a cluster: its time by algorithm and the bandwidths that nccl-tests would print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.cluster_specs.fabric import FabricLevels, fabric_levels
from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.collectives.alpha_beta import OPERATIONS
from meshwright.costmodel.collectives.nccl import (
    IsolatedFabric,
    collective_time,
    isolated_fabric,
)
from meshwright.costmodel.collectives.on_levels import all_reduce_s, long_ring_pass_s
from meshwright.costmodel.constants.calibrated import calibrated
from meshwright.costmodel.constants.calibration import Calibration, Factors
from meshwright.costmodel.constants.rates import links_of, named_constants
from meshwright.errors import InputError
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK


def collective_document(
    operation: str,
    sizes_bytes: Sequence[float],
    ranks: int,
    cluster: str,
    *,
    deduplicated: bool = True,
    calibration: Calibration | None = None,
) -> dict[str, Any]:
    """Times of a collective over the first GPUs of a cluster, every algorithm compared.

    Parameters
    ----------
    operation
        One of `costmodel.collectives.alpha_beta.OPERATIONS`, such as `all-reduce`.
    sizes_bytes
        Full buffers as nccl-tests counts them, each above 0; the first is shown in full.
    ranks
        Members of the group, at least 2, packed tightly.
    cluster
        Catalog name or cluster file.
    deduplicated
        Whether an all-to-all sends each token once to a node (DeepEP) or once to a GPU (NCCL).
    calibration
        What the user's own runs and logs say; of links, where the device is the cluster's.

    Returns
    -------
    dict
        Seconds by algorithm, and the two bandwidths that nccl-tests prints, in GB/s. `hierarchical_s` is an
        all-reduce made of three calls, which NCCL does not choose by itself; null where all is one level.
        `sweep` has the same times for every size, `step_seconds` what a training step pays for a ring
        beside its compute; null for operations that a step has no ring of.

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
    factors = Factors()
    if calibration is not None:
        factors = calibration.factors_on(spec.device.name, DEFAULT_FRAMEWORK)
    fabric = isolated_fabric(spec, ranks, deduplicated=deduplicated, factors=factors)
    buffer_bytes = sizes_bytes[0]
    sweep = []
    for size_bytes in sizes_bytes:
        times = collective_time(name, size_bytes, fabric).by_algorithm_s
        sweep.append({"bytes": size_bytes, "seconds_by_algorithm": times})
    cost = collective_time(name, buffer_bytes, fabric)
    return {
        "operation": name,
        "bytes": buffer_bytes,
        "ranks": ranks,
        "cluster": spec.name,
        "levels": _level_rows(fabric_levels(spec, ranks), fabric),
        "algorithm": cost.algorithm,
        "seconds": cost.seconds,
        "seconds_by_algorithm": cost.by_algorithm_s,
        "step_seconds": _step_s(name, buffer_bytes, spec, fabric, factors),
        "hierarchical_s": _hierarchy_s(buffer_bytes, fabric) if name == "all-reduce" else None,
        "algorithm_gb_per_s": cost.algorithm_bytes_per_s / 1e9,
        "bus_gb_per_s": cost.bus_bytes_per_s / 1e9,
        "sweep": sweep,
    }


def _level_rows(levels: FabricLevels, fabric: IsolatedFabric) -> list[dict[str, Any]]:
    """What every level is, and the size whose start-up takes as long as its transfer."""
    rows = zip(
        levels.names, levels.media, fabric.members, levels.gb_per_s, levels.latency_s, strict=True
    )
    return [
        {
            "name": level,
            "medium": medium,
            "ranks_inside": int(members),
            "nominal_gb_per_s": float(gb_per_s),
            "crossover_bytes": float(latency_s * gb_per_s * 1e9),
        }
        for level, medium, members, gb_per_s, latency_s in rows
    ]


def _step_s(
    operation: str, size_bytes: float, spec: ClusterSpec, fabric: IsolatedFabric, factors: Factors
) -> float | None:
    """Seconds of a ring at the rates that `estimate` prices a step with."""
    if operation not in ("all-reduce", "all-gather", "reduce-scatter"):
        return None
    device = spec.device
    shipped = named_constants(device.name, device.architecture, DEFAULT_FRAMEWORK, {})
    links = links_of(fabric_levels(spec, int(fabric.members[-1])), calibrated(shipped, factors))
    ring = all_reduce_s if operation == "all-reduce" else long_ring_pass_s
    return float(np.asarray(ring(size_bytes, fabric.members, links)))


def _hierarchy_s(buffer_bytes: float, fabric: IsolatedFabric) -> float | None:
    """Reduce-scatter in the innermost blocks, all-reduce of the shares between them, all-gather inside."""
    in_block = int(fabric.members[0])
    blocks = int(fabric.members[-1]) // in_block
    if in_block < 2 or blocks < 2:
        return None
    inside = replace(fabric, members=np.minimum(fabric.members, in_block))
    between = replace(fabric, members=fabric.members // in_block)
    scatter = collective_time("reduce-scatter", buffer_bytes, inside).seconds
    gather = collective_time("all-gather", buffer_bytes, inside).seconds
    return (
        scatter + collective_time("all-reduce", buffer_bytes / in_block, between).seconds + gather
    )
