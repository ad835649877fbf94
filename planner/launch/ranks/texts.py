"""The files of a mapping, as texts by name: ranks, nodes, schedulers' host files, groups, a picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence

from meshwright.frameworks.record import Framework
from meshwright.planner.launch.ranks.fabric_places import HostPlace, host_places
from meshwright.planner.launch.ranks.picture import fabric_picture
from meshwright.planner.launch.ranks.placed import PlacedRanks, placed_ranks, planned_layout
from meshwright.planner.mapping.process_groups import (
    DENSE,
    Groups,
    coordinates,
    megatron_order,
    process_groups,
)
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.predicted import LayoutDoc

FOLDER = "mapping"
"""Where `plan -o` and `launch` put these files."""
EXPERT_AXES = ("etp", "ep", "edp")


def mapping_files(plan: Plan, framework: Framework | None = None) -> dict[str, str]:
    """Texts by relative file name, with ranks as the launch files of a framework count them.

    ranks.csv          rank, host, GPU, and the rank's place on every axis
    nodes.csv          hosts in torchrun's order (`--node-rank`), leaf, pod, and CUDA_VISIBLE_DEVICES, whose
                       order makes LOCAL_RANK i the i-th rank of the node
    slurm_hostfile     a host per rank, for SLURM_HOSTFILE and `srun --distribution=arbitrary`, a task each;
                       a template where the names of hosts are not known
    rankfile.openmpi   for `mpirun --rankfile`
    groups.json        the process groups of every axis and of the products of axes that frameworks use
    fabric.svg         a picture of the ranks on the fabric

    Parameters
    ----------
    plan
        A plan with a layout.
    framework
        The one that starts it; the plan's own by default.

    Raises
    ------
    InfeasibleError
        The plan has no layout, or its mapping does not fit it.
    """
    layout, placed = planned_layout(plan), placed_ranks(plan, framework)
    groups = plan_groups(plan, layout, placed)
    places = host_places(plan.inputs.cluster, len(placed.places), placed.nodes)
    idle = _idle(plan, placed, places)
    files = {
        "ranks.csv": _ranks_table(placed, groups),
        "nodes.csv": _nodes_table(placed, places),
        **placed.slurm_hostfile(),
        "rankfile.openmpi": placed.openmpi_rankfile(),
        "groups.json": _groups_text(groups),
        "fabric.svg": fabric_picture(plan, layout, placed, places, groups, idle=idle),
    }
    return {f"{FOLDER}/{name}": text for name, text in files.items()}


def _idle(
    plan: Plan, placed: PlacedRanks, places: Sequence[HostPlace]
) -> list[tuple[str, HostPlace]]:
    """The listed nodes without ranks on leaves that hold some."""
    cluster, touched = plan.inputs.cluster, set(places)
    if not cluster.nodes or HostPlace(leaf="", pod="") in touched:
        return []
    unused = sorted(set(range(len(cluster.nodes))) - set(placed.nodes))
    unused_places = host_places(cluster, len(placed.places), unused)
    return [
        (cluster.nodes[node].name, place)
        for node, place in zip(unused, unused_places, strict=True)
        if place in touched
    ]


def plan_groups(plan: Plan, layout: LayoutDoc, placed: PlacedRanks) -> dict[str, Groups]:
    """The process groups of a plan, its ranks counted as `placed` counts them."""
    order = megatron_order(placed.pipeline_before_data)
    return process_groups(layout, order, experts=plan.inputs.model.moe is not None)


def _ranks_table(placed: PlacedRanks, groups: Mapping[str, Groups]) -> str:
    axes = [*DENSE, *(axis for axis in EXPERT_AXES if axis in groups)]
    columns = [coordinates(groups, axis).tolist() for axis in axes]
    rows = (
        (rank, placed.hosts[host], gpu, *(column[rank] for column in columns))
        for rank, (host, gpu) in enumerate(placed.places)
    )
    return _csv(("rank", "host", "gpu", *axes), rows)


def _nodes_table(placed: PlacedRanks, places: Sequence[HostPlace]) -> str:
    rows = []
    for node_rank, ranks in enumerate(placed.ranks_of_hosts()):
        place = places[node_rank]
        gpus = [placed.places[rank][1] for rank in ranks]
        listed = " ".join(map(str, ranks)), ",".join(map(str, gpus))
        rows.append(
            (node_rank, placed.hosts[node_rank], place.leaf, place.pod, len(ranks), *listed)
        )
    head = ("node_rank", "host", "leaf", "pod", "processes", "ranks", "cuda_visible_devices")
    return _csv(head, rows)


def _groups_text(groups: Mapping[str, Groups]) -> str:
    """One group a line, so that a person can find it and a diff shows it."""
    parts = []
    for name, table in groups.items():
        lines = ",\n  ".join(json.dumps(group, separators=(",", ":")) for group in table.tolist())
        parts.append(f'"{name}": [\n  {lines}\n ]')
    return "{" + ",\n ".join(parts) + "}\n"


def _csv(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()
