"""One collective alone on a cluster: its time by algorithm and the bandwidths that nccl-tests would print."""

from __future__ import annotations

from typing import Any

from meshwright.cluster_specs.fabric import fabric_levels
from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.collectives.nccl import OPERATIONS, collective_time, isolated_fabric
from meshwright.errors import InputError
from meshwright.planner.report.parts import Renderable, facts, gigabytes, grid, heading, seconds


def collective_document(
    operation: str, buffer_bytes: float, ranks: int, cluster: str, *, deduplicated: bool = True
) -> dict[str, Any]:
    """Times of `operation` over the first `ranks` GPUs of a cluster, a catalog name or a file.

    Raises InputError for an unknown operation or fewer than two ranks, InputError for the cluster.
    """
    named = next((one for one in OPERATIONS if one == operation), None)
    if named is None:
        raise InputError(f"--op: {operation[:40]!r}, allowed are {', '.join(OPERATIONS)}")
    if ranks < 2:
        raise InputError(f"--ranks: {ranks}, a collective needs at least 2")
    spec = read_cluster(cluster)
    levels = fabric_levels(spec, ranks)
    fabric = isolated_fabric(spec, ranks, deduplicated=deduplicated)
    found = collective_time(named, buffer_bytes, fabric)
    return {
        "operation": named,
        "bytes": buffer_bytes,
        "ranks": ranks,
        "cluster": spec.name,
        "levels": [
            {
                "name": name,
                "medium": medium,
                "ranks_inside": int(inside),
                "nominal_gb_per_s": float(rate),
            }
            for name, medium, inside, rate in zip(
                levels.names, levels.media, fabric.members, levels.gb_per_s, strict=True
            )
        ],
        "algorithm": found.algorithm,
        "seconds": found.seconds,
        "seconds_by_algorithm": found.by_algorithm_s,
        "algorithm_gb_per_s": found.algorithm_bytes_per_s / 1e9,
        "bus_gb_per_s": found.bus_bytes_per_s / 1e9,
    }


def collective_view(document: dict[str, Any]) -> list[Renderable]:
    """The answer, the algorithms compared, the levels that the group crosses."""
    shown: list[Renderable] = [
        facts(
            [
                ("operation", f"{document['operation']} of {gigabytes(document['bytes'])}"),
                ("group", f"{document['ranks']} ranks of {document['cluster']}"),
                ("time", f"{seconds(document['seconds'])} ({document['algorithm']})"),
                ("bus bandwidth", f"{document['bus_gb_per_s']:.1f} GB/s"),
                ("algorithm bandwidth", f"{document['algorithm_gb_per_s']:.1f} GB/s"),
            ]
        )
    ]
    shown.append(heading("Algorithms"))
    times = sorted(document["seconds_by_algorithm"].items(), key=lambda item: item[1])
    shown.append(grid(["algorithm", "time"], [[name, seconds(value)] for name, value in times]))
    shown.append(heading("Levels"))
    rows = [
        [
            level["name"],
            level["medium"],
            str(level["ranks_inside"]),
            f"{level['nominal_gb_per_s']:g}",
        ]
        for level in document["levels"]
    ]
    shown.append(grid(["level", "medium", "ranks inside", "GB/s a GPU"], rows, left=(0, 1)))
    return shown
