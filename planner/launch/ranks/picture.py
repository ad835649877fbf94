"""A picture of the ranks on the fabric: pods hold leaves, leaves hold nodes, nodes hold GPUs.

Colour is the pipeline stage (the data-parallel replica where there is one stage). The more nodes, the less of
each is drawn: GPUs with their ranks, GPUs without, one tile per node, one bar per leaf.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.drawing.quantities import counted, ranges
from meshwright.planner.drawing.svg import Drawing, flowed, ramp_colour, shortened, text_width
from meshwright.planner.launch.ranks.fabric_places import HostPlace
from meshwright.planner.launch.ranks.node_shapes import (
    EMPTY,
    Host,
    LeafPainter,
    LeafStyle,
    style_for,
)
from meshwright.planner.launch.ranks.placed import PlacedRanks
from meshwright.planner.mapping.process_groups import Groups, coordinates
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.predicted import LayoutDoc

WIDTH, MARGIN, GAP = 1200.0, 28.0, 10.0
POD_TITLE, POD_GAP = 28.0, 22.0
_INSIDE = WIDTH - 2 * MARGIN
MOST_SWATCHES = 16
_WORDS = {
    "pp": "pipeline stage",
    "dp": "data-parallel replica",
    "cp": "context part",
    "tp": "tensor part",
}
_SHAPES = {"GPU": "a cell is a GPU", "node": "a square is a node", "leaf": "a bar is a leaf"}
_TABLE = ("axis", "groups", "GPUs in each", "nodes", "leaves", "pods")


@dataclass(frozen=True, kw_only=True)
class _Scene:
    pods: list[list[list[Host]]]
    """Hosts by pod and leaf, each in the order of the first rank on it."""
    style: LeafStyle
    axis: str
    """What colour stands for."""
    colours: list[str]

    @property
    def hosts(self) -> list[Host]:
        return [host for leaves in self.pods for hosts in leaves for host in hosts]


def fabric_picture(
    plan: Plan,
    layout: LayoutDoc,
    placed: PlacedRanks,
    places: Sequence[HostPlace],
    groups: Mapping[str, Groups],
    *,
    idle: Sequence[tuple[str, HostPlace]] = (),
) -> str:
    """The SVG text of a plan's ranks; `places` are those of `placed.hosts`. One mapping, one text.

    `idle` are nodes without ranks that are shown beside them.
    """
    axis = _coloured_axis(layout)
    per_node = plan.inputs.cluster.gpus_per_node
    hosts = _hosts(placed, places, groups, axis, per_node)
    for name, place in idle:
        tip = f"{name}: not used"
        hosts.append(Host(name=name, place=place, gpus=per_node, cells={}, replicas="", tip=tip))
    scene = _scene(hosts, axis, getattr(layout, axis))
    drawing = Drawing(width=WIDTH)
    title = f"{plan.inputs.model.name} on {plan.inputs.cluster.name}"
    y = _head(drawing, plan, layout, scene, title)
    y = _legend(drawing, scene, y + 24)
    y = _pods(drawing, scene, y + 22)
    y = _reach_table(drawing, placed, places, groups, y + 30)
    return drawing.document(y + MARGIN, title)


def _coloured_axis(layout: LayoutDoc) -> str:
    """The outermost axis that has more than one part."""
    for axis in ("pp", "dp", "cp", "tp"):
        if getattr(layout, axis) > 1:
            return axis
    return "pp"


def _hosts(
    placed: PlacedRanks,
    places: Sequence[HostPlace],
    groups: Mapping[str, Groups],
    axis: str,
    gpus_per_node: int,
) -> list[Host]:
    values = coordinates(groups, axis).tolist()
    replicas = coordinates(groups, "dp").tolist()
    hosts = []
    for host, ranks in enumerate(placed.ranks_of_hosts()):
        cells = {placed.places[rank][1]: (rank, values[rank]) for rank in ranks}
        name = placed.hosts[host]
        hosts.append(
            Host(
                name=name,
                place=places[host],
                gpus=max(gpus_per_node, 1 + max(cells)),
                cells=cells,
                replicas=ranges(sorted({replicas[rank] for rank in ranks})),
                tip=_tip(name, cells, axis),
            )
        )
    return hosts


def _scene(hosts: Sequence[Host], axis: str, degree: int) -> _Scene:
    pods: dict[str, dict[str, list[Host]]] = {}
    for host in hosts:
        pods.setdefault(host.place.pod, {}).setdefault(host.place.leaf, []).append(host)
    nested = [list(leaves.values()) for leaves in pods.values()]
    return _Scene(
        pods=nested,
        style=style_for([in_leaf for leaves in nested for in_leaf in leaves]),
        axis=axis,
        colours=[ramp_colour(index, degree) for index in range(degree)],
    )


def _tip(name: str, cells: Mapping[int, tuple[int, int]], axis: str) -> str:
    ranks = sorted(rank for rank, _ in cells.values())
    values = sorted({value for _, value in cells.values()})
    return f"{name}: ranks {ranges(ranks)}; {_WORDS[axis]} {ranges(values)}"


def _head(drawing: Drawing, plan: Plan, layout: LayoutDoc, scene: _Scene, title: str) -> float:
    heading = shortened(title, WIDTH - 2 * MARGIN, 20)
    drawing.text(MARGIN, 40, heading, size=20, ink="#0f172a", bold=True)
    axes = ["tp", "cp", "dp", "pp"]
    if plan.inputs.model.moe is not None:
        axes += ["ep", "etp"]
    degrees = ", ".join(f"{axis} {getattr(layout, axis)}" for axis in axes)
    used = [host for host in scene.hosts if host.cells]
    gpus = sum(len(host.cells) for host in used)
    leaves, pods = sum(map(len, scene.pods)), len(scene.pods)
    parts = [f"{gpus:,} GPUs", counted(len(used), "node")]
    if leaves > 1:
        parts.append(counted(leaves, "leaf", "leaves"))
    if pods > 1:
        parts.append(counted(pods, "pod"))
    drawing.text(MARGIN, 62, f"{degrees} · {', '.join(parts)}", size=13)
    return 62


def _legend(drawing: Drawing, scene: _Scene, y: float) -> float:
    """What colour and shape stand for: swatches, or a ramp where there are too many."""
    shapes = _SHAPES[scene.style.unit]
    if scene.style.ranks:
        shapes += ", its number the rank"
    if scene.style.unit != "leaf" and sum(map(len, scene.pods)) > 1:
        shapes += ", a frame a leaf"
    drawing.text(MARGIN, y + 11, f"{_WORDS[scene.axis]}", size=12, bold=True)
    x = MARGIN + text_width(_WORDS[scene.axis], 12) + 24
    count = len(scene.colours)
    if count <= MOST_SWATCHES:
        for index, fill in enumerate(scene.colours):
            drawing.rect(x, y, 14, 14, fill=fill, radius=2)
            drawing.text(x + 19, y + 11, str(index), size=12)
            x += 28 + 7 * len(str(index))
    else:
        for step in range(64):
            drawing.rect(x + step * 4, y, 4.3, 14, fill=scene.colours[step * (count - 1) // 63])
        drawing.text(x - 8, y + 11, "0", size=12, anchor="end")
        drawing.text(x + 264, y + 11, str(count - 1), size=12)
        x += 300
    if any(len(host.cells) < host.gpus for host in scene.hosts):
        drawing.rect(x + 14, y, 14, 14, fill=EMPTY, radius=2)
        drawing.text(x + 33, y + 11, "not used", size=12)
    drawing.text(WIDTH - MARGIN, y + 11, shapes, size=12, ink="#64748b", anchor="end")
    return y + 14


@dataclass(frozen=True, kw_only=True)
class _PodBlock:
    """A pod with the corners of its leaves inside of it, and its size with the title."""

    leaves: list[list[Host]]
    corners: list[tuple[float, float]]
    size: tuple[float, float]


def _pods(drawing: Drawing, scene: _Scene, y: float) -> float:
    """Pods as blocks of leaves, side by side where they are narrow."""
    painter = LeafPainter(drawing=drawing, style=scene.style, colours=scene.colours)
    named = any(leaves[0][0].place.pod for leaves in scene.pods)
    head = POD_TITLE if named else 0.0
    blocks = [_pod_block(painter, leaves, head) for leaves in scene.pods]
    places, height = flowed([block.size for block in blocks], _INSIDE, POD_GAP)
    for block, (x, down) in zip(blocks, places, strict=True):
        left, top = MARGIN + x, y + down
        if named:
            _pod_title(drawing, block, left, top)
        for hosts, (across, below) in zip(block.leaves, block.corners, strict=True):
            painter.draw(left + across, top + head + below, hosts)
    return y + height


def _pod_block(painter: LeafPainter, leaves: list[list[Host]], head: float) -> _PodBlock:
    gap = GAP if painter.style.title else 3.0
    sizes = [painter.size(hosts) for hosts in leaves]
    corners, height = flowed(sizes, _INSIDE, gap)
    rights = [left + width for (left, _), (width, _) in zip(corners, sizes, strict=True)]
    return _PodBlock(leaves=leaves, corners=corners, size=(max(rights), head + height))


def _pod_title(drawing: Drawing, block: _PodBlock, x: float, y: float) -> None:
    width, _ = block.size
    nodes = counted(sum(map(len, block.leaves)), "node")
    words = shortened(f"{block.leaves[0][0].place.pod} · {nodes}", width, 12.5)
    drawing.text(x, y + 12, words, size=12.5, bold=True)
    drawing.rect(x, y + 18, width, 1, fill="#cbd5e1")


def reach(placed: PlacedRanks, places: Sequence[HostPlace], table: Groups) -> tuple[int, int, int]:
    """The most nodes, leaves and pods that one group of an axis touches.

    Parameters
    ----------
    places
        Of `placed.hosts`.
    table
        Ranks of each group, shape [groups, ranks in a group].
    """
    host_of_rank = np.array([host for host, _ in placed.places], dtype=np.int64)
    leaf_of_host = _numbered([(place.pod, place.leaf) for place in places])
    pod_of_host = _numbered([place.pod for place in places])
    hosts = host_of_rank[table]
    return (
        _most_different(hosts),
        _most_different(leaf_of_host[hosts]),
        _most_different(pod_of_host[hosts]),
    )


def _numbered(names: Sequence[Hashable]) -> Groups:
    """A number for each name, equal for equal names."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], dtype=np.int64)


def _most_different(values: Groups) -> int:
    """Most different values in a row."""
    ordered = np.sort(values, axis=1)
    changes = (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)
    return 1 + int(changes.max(initial=0))


def _reach_table(
    drawing: Drawing,
    placed: PlacedRanks,
    places: Sequence[HostPlace],
    groups: Mapping[str, Groups],
    y: float,
) -> float:
    """How far the groups of each axis reach: the most nodes, leaves, pods that one group touches."""
    drawing.text(
        MARGIN, y, "How far groups reach: the most that one group touches", size=12.5, bold=True
    )
    rights = [MARGIN + 40, *(MARGIN + 140 + 110 * k for k in range(5))]
    y += 20
    for right, name in zip(rights, _TABLE, strict=True):
        drawing.text(right, y, name, size=11.5, ink="#64748b", anchor="end")
    for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp"):
        if axis not in groups or groups[axis].shape[1] == 1:
            continue
        y += 17
        table = groups[axis]
        numbers = (*table.shape, *reach(placed, places, table))
        row = (axis, *(f"{number:,}" for number in numbers))
        for right, words in zip(rights, row, strict=True):
            drawing.text(right, y, words, size=12, anchor="end")
    return y
