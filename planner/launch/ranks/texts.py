"""The files of a mapping, as texts by name: ranks, nodes, schedulers' host files, groups, a picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence

from meshwright.errors import InfeasibleError
from meshwright.frameworks.catalog import framework_named
from meshwright.planner.launch.rank_files import RankFiles, RankPlace, rank_files
from meshwright.planner.launch.ranks.fabric_places import HostPlace, host_places
from meshwright.planner.launch.ranks.picture import fabric_picture
from meshwright.planner.launch.schedulers import openmpi_rankfile
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


def mapping_files(
    plan: Plan,
    *,
    node_names: Sequence[str] | None = None,
    ranks: Sequence[RankPlace] | None = None,
) -> dict[str, str]:
    """Texts by relative file name. Ranks count as in the plan's launch files.

    ranks.csv          rank, host, GPU, and the rank's place on every axis
    nodes.csv          hosts in torchrun's order (`--node-rank`), leaf, pod, and CUDA_VISIBLE_DEVICES, whose
                       order makes LOCAL_RANK i the i-th rank of the node
    slurm_hostfile     a host per rank, for SLURM_HOSTFILE and `srun --distribution=arbitrary`, a task each
    rankfile.openmpi   for `mpirun --rankfile`
    groups.json        the process groups of every axis and of the products of axes that frameworks use
    fabric.svg         a picture of the ranks on the fabric

    `node_names` and `ranks` are as for `megatron.launch_files`. Raises InfeasibleError if the plan has no
    layout or its mapping does not fit it.
    """
    layout = plan.layout
    if layout is None:
        raise InfeasibleError(
            f"the plan has no layout (status {plan.status}): there is nothing to launch."
        )
    framework = framework_named(plan.inputs.framework)
    placed = rank_files(plan, layout, node_names, ranks, reorder=framework.reorders_ranks)
    groups = plan_groups(plan, layout, placed)
    places = host_places(plan.inputs.cluster, len(placed.places), placed.nodes)
    idle = () if node_names else _idle(plan, placed, places)
    files = {
        "ranks.csv": _ranks_table(placed, groups),
        "nodes.csv": _nodes_table(placed, places),
        "slurm_hostfile": "".join(f"{placed.hosts[host]}\n" for host, _ in placed.places),
        "rankfile.openmpi": openmpi_rankfile(placed),
        "groups.json": _groups_text(groups),
        "fabric.svg": fabric_picture(plan, layout, placed, places, groups, idle=idle),
    }
    return {f"{FOLDER}/{name}": text for name, text in files.items()}


def plan_picture(plan: Plan) -> str:
    """`fabric.svg` alone. Raises InfeasibleError as `mapping_files` does."""
    return mapping_files(plan)[f"{FOLDER}/fabric.svg"]


def _idle(
    plan: Plan, placed: RankFiles, places: Sequence[HostPlace]
) -> list[tuple[str, HostPlace]]:
    """The listed nodes without ranks on leaves that hold some."""
    cluster, touched, used = plan.inputs.cluster, set(places), set(placed.nodes)
    if not cluster.nodes or HostPlace(leaf="", pod="") in touched:
        return []
    others = [node for node in range(len(cluster.nodes)) if node not in used]
    hung = host_places(cluster, len(placed.places), others)
    return [
        (cluster.nodes[node].name, place)
        for node, place in zip(others, hung, strict=True)
        if place in touched
    ]


def plan_groups(plan: Plan, layout: LayoutDoc, placed: RankFiles) -> dict[str, Groups]:
    """The process groups of a plan, its ranks counted as `placed` counts them."""
    order = megatron_order(placed.pipeline_before_data)
    return process_groups(layout, order, experts=plan.inputs.model.moe is not None)


def gpus_of_hosts(placed: RankFiles) -> list[list[int]]:
    """GPUs of every host in the order of its ranks."""
    gpus: list[list[int]] = [[] for _ in placed.hosts]
    for host, gpu in placed.places:
        gpus[host].append(gpu)
    return gpus


def _ranks_table(placed: RankFiles, groups: Mapping[str, Groups]) -> str:
    axes = [*DENSE, *(axis for axis in EXPERT_AXES if axis in groups)]
    columns = [coordinates(groups, axis).tolist() for axis in axes]
    rows = (
        (rank, placed.hosts[host], gpu, *(column[rank] for column in columns))
        for rank, (host, gpu) in enumerate(placed.places)
    )
    return _csv(("rank", "host", "gpu", *axes), rows)


def _nodes_table(placed: RankFiles, places: Sequence[HostPlace]) -> str:
    ranks: list[list[int]] = [[] for _ in placed.hosts]
    for rank, (host, _) in enumerate(placed.places):
        ranks[host].append(rank)
    rows = (
        (
            index,
            host,
            place.leaf,
            place.pod,
            len(own),
            " ".join(map(str, own)),
            ",".join(map(str, gpus)),
        )
        for index, (host, place, own, gpus) in enumerate(
            zip(placed.hosts, places, ranks, gpus_of_hosts(placed), strict=True)
        )
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
