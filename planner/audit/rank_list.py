"""`ranks.csv` against the plan: every rank's place, and every group's members counted block by block."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.cluster_specs.fabric import fabric_levels
from meshwright.cluster_specs.naming import node_name
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.recount import blocks_left, recounted_placement
from meshwright.documents.reader import LARGE_FILE_BYTES, path_text, read_text
from meshwright.errors import InputError, shown
from meshwright.planner.bounds.matrices import ranks_on
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.placement import plan_placement, workload_of_plan
from meshwright.planner.runs.predicted import LayoutDoc, layout_from_document

RANKS_FILE = "mapping/ranks.csv"
DENSE = ("tp", "cp", "dp", "pp")
EXPERTS = ("etp", "ep", "edp")
Place = tuple[int, int]
"""(node, local GPU), both from 0."""


@dataclass(frozen=True, kw_only=True)
class ListedRank:
    """A line of the file."""

    rank: int
    place: Place
    coordinates: Mapping[str, int]
    """The rank's position on every axis."""


def rank_list_faults(plan: Plan, path: Path) -> Iterator[str]:
    """Where `ranks.csv` is not what the plan says and prices, in words.

    Raises InputError if the file cannot be read.
    """
    assert plan.layout is not None
    listed = read_rank_list(plan.inputs.cluster, path)
    layout = plan.layout
    world = layout.tp * layout.cp * layout.pp * layout.dp
    if [entry.rank for entry in listed] != list(range(world)):
        yield f"{path.name}: must list the ranks 0 to {world - 1} in turn"
        return
    places = Counter(entry.place for entry in listed)
    for place, count in places.items():
        if count > 1:
            yield f"{path.name}: {count} ranks on GPU {place[1]} of node {place[0]}"
    yield from _coordinate_faults(layout, listed, path.name)
    yield from _place_faults(plan, listed, path.name)
    yield from recount_faults(plan, listed)


def read_rank_list(cluster: ClusterSpec, path: Path) -> list[ListedRank]:
    """The lines of a `ranks.csv`. Raises InputError, naming the line."""
    text = read_text(path, LARGE_FILE_BYTES)
    count = len(cluster.nodes) or -(-cluster.gpus // cluster.gpus_per_node)
    numbers = {node_name(cluster, node): node for node in range(count)}
    return [
        _listed_rank(row, numbers, f"{path_text(path)}: line {line}")
        for line, row in enumerate(csv.DictReader(text.splitlines()), start=2)
    ]


def _listed_rank(row: Mapping[str, str], numbers: Mapping[str, int], where: str) -> ListedRank:
    host = row.get("host") or ""
    if host not in numbers:
        raise InputError("is no node of the plan's cluster", where=f"{where}: host", value=host)
    axes = [axis for axis in (*DENSE, *EXPERTS) if axis in row]
    try:
        return ListedRank(
            rank=int(row["rank"]),
            place=(numbers[host], int(row["gpu"])),
            coordinates={axis: int(row[axis]) for axis in axes},
        )
    except (KeyError, TypeError, ValueError):
        raise InputError("must have a number in every column", where=where, value=row) from None


def _coordinate_faults(layout: LayoutDoc, listed: Sequence[ListedRank], name: str) -> Iterator[str]:
    """Positions on the axes that do not follow from the rank, in either order of the axes."""
    orders = (("tp", "cp", "dp", "pp"), ("tp", "cp", "pp", "dp"))
    wrong = [[rank for rank in listed if not _is_at(layout, rank, order)] for order in orders]
    fewest = min(wrong, key=len)
    for entry in fewest:
        yield f"{name}: rank {entry.rank} cannot be at {dict(entry.coordinates)} of the layout"


def _is_at(layout: LayoutDoc, entry: ListedRank, order: Sequence[str]) -> bool:
    """Whether a rank has the coordinates that counting in an order gives."""
    expected: dict[str, int] = {}
    rest = entry.rank
    for axis in order:
        rest, expected[axis] = divmod(rest, int(getattr(layout, axis)))
    within = expected["tp"] + layout.tp * (expected["cp"] + layout.cp * expected["dp"])
    if "ep" in entry.coordinates:
        rest, expected["etp"] = divmod(within, layout.etp)
        expected["edp"], expected["ep"] = divmod(rest, layout.ep)
    return all(expected[axis] == position for axis, position in entry.coordinates.items())


def _place_faults(plan: Plan, listed: Sequence[ListedRank], name: str) -> Iterator[str]:
    """Ranks that do not run where the plan maps them."""
    assert plan.layout is not None
    layout, mapping = plan.layout, plan.mapping
    if mapping is None or (mapping.ranks is None and not mapping.matrix):
        return
    mapped = mapping.ranks or ranks_on(plan.inputs.cluster, mapping.matrix)
    for entry in listed:
        at = entry.coordinates
        rank = at["tp"] + layout.tp * (at["cp"] + layout.cp * (at["dp"] + layout.dp * at["pp"]))
        if rank >= len(mapped) or tuple(mapped[rank]) != entry.place:
            planned = mapped[rank] if rank < len(mapped) else None
            yield (
                f"{name}: rank {entry.rank} is on (node, GPU) {shown(entry.place)}, the plan maps it "
                f"to {shown(planned)}"
            )


def recount_faults(plan: Plan, listed: Sequence[ListedRank]) -> Iterator[str]:
    """Groups that reach further than their price assumes, counted from the list alone.

    A price says how many members of a group of each axis share the block of each level that paces it.
    """
    assert plan.layout is not None
    layout = layout_from_document(plan.layout)
    workload = workload_of_plan(plan).on(int(layout.gpus))
    _, placement = plan_placement(workload, layout, plan)
    in_turn = sorted(
        listed, key=lambda entry: [entry.coordinates[axis] for axis in reversed(DENSE)]
    )
    ranks, coordinates = [entry.place for entry in in_turn], listed[0].coordinates
    counted = recounted_placement(workload.cluster, layout, ranks)
    yield from blocks_left(workload.cluster, ranks)
    for depth, level in enumerate(fabric_levels(workload.cluster, workload.gpus).names):
        for axis in ("tp", "cp", "dp_cp", *(name for name in EXPERTS if name in coordinates)):
            priced = int(np.broadcast_to(getattr(placement, axis), counted.tp.shape)[depth])
            members = int(getattr(counted, axis)[depth])
            if members < priced:
                yield (
                    f"a group of {axis} has {members} of its ranks in a block of {level}, "
                    f"the price assumes {priced}"
                )
