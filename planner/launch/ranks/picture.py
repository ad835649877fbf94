"""A picture of the ranks on the fabric: pods hold leaves, leaves hold nodes, nodes hold GPUs.

Colour is the pipeline stage (the data-parallel replica where there is one stage). The more nodes, the less of
each is drawn: GPUs with their ranks, GPUs without, one tile per node, one bar per leaf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.drawing.svg import Drawing, flowed, ramp_colour, shortened, text_width
from meshwright.planner.launch.rank_files import RankFiles
from meshwright.planner.launch.ranks.fabric_places import HostPlace
from meshwright.planner.launch.ranks.node_shapes import (
    EMPTY,
    Host,
    LeafPainter,
    LeafStyle,
    style_for,
)
from meshwright.planner.mapping.process_groups import Groups, coordinates
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.predicted import LayoutDoc

WIDTH, MARGIN, GAP = 1200.0, 28.0, 10.0
POD_TITLE = 28.0
MOST_SWATCHES = 16
_WORDS = {
    "pp": "pipeline stage",
    "dp": "data-parallel replica",
    "cp": "context part",
    "tp": "tensor part",
}
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
    placed: RankFiles,
    places: Sequence[HostPlace],
    groups: Mapping[str, Groups],
    *,
    idle: Sequence[tuple[str, HostPlace]] = (),
) -> str:
    """The SVG text of a plan's ranks; `places` are those of `placed.hosts`. One mapping, one text.

    `idle` are nodes without ranks that are shown beside them.
    """
    axis = next((name for name in ("pp", "dp", "cp", "tp") if getattr(layout, name) > 1), "pp")
    per_node = plan.inputs.cluster.gpus_per_node
    hosts = _hosts(placed, places, groups, axis, per_node)
    hosts += [
        Host(name=n, place=p, gpus=per_node, cells={}, replicas="", tip=f"{n}: not used")
        for n, p in idle
    ]
    scene = _scene(hosts, axis, getattr(layout, axis))
    drawing = Drawing(width=WIDTH)
    title = f"{plan.inputs.model.name} on {plan.inputs.cluster.name}"
    y = _head(drawing, plan, layout, scene, title)
    y = _legend(drawing, scene, y + 24)
    y = _pods(drawing, scene, y + 22)
    y = _reach_table(drawing, placed, places, groups, y + 30)
    return drawing.document(y + MARGIN, title)


def _hosts(
    placed: RankFiles,
    places: Sequence[HostPlace],
    groups: Mapping[str, Groups],
    axis: str,
    gpus_per_node: int,
) -> list[Host]:
    values, replicas = (coordinates(groups, name).tolist() for name in (axis, "dp"))
    cells: list[dict[int, tuple[int, int]]] = [{} for _ in placed.hosts]
    for rank, (host, gpu) in enumerate(placed.places):
        cells[host][gpu] = (rank, values[rank])
    return [
        Host(
            name=name,
            place=place,
            gpus=max(gpus_per_node, 1 + max(own)),
            cells=own,
            replicas=_runs(sorted({replicas[rank] for rank, _ in own.values()})),
            tip=_tip(name, own, axis),
        )
        for name, place, own in zip(placed.hosts, places, cells, strict=True)
    ]


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
    return f"{name}: ranks {_runs(ranks)}; {_WORDS[axis]} {_runs(values)}"


def _runs(numbers: Sequence[int]) -> str:
    """Sorted numbers as ranges: 0-7, 16."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _head(drawing: Drawing, plan: Plan, layout: LayoutDoc, scene: _Scene, title: str) -> float:
    drawing.text(
        MARGIN, 40, shortened(title, WIDTH - 2 * MARGIN, 20), size=20, ink="#0f172a", bold=True
    )
    axes = ("tp", "cp", "dp", "pp", *(("ep", "etp") if plan.inputs.model.moe is not None else ()))
    degrees = ", ".join(f"{axis} {getattr(layout, axis)}" for axis in axes)
    used = [host for host in scene.hosts if host.cells]
    leaves, pods = sum(map(len, scene.pods)), len(scene.pods)
    parts = [f"{sum(len(host.cells) for host in used):,} GPUs", _count(len(used), "node")]
    if leaves > 1:
        parts.append(_count(leaves, "leaf", "leaves"))
    if pods > 1:
        parts.append(_count(pods, "pod"))
    drawing.text(MARGIN, 62, f"{degrees} · {', '.join(parts)}", size=13)
    return 62


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _legend(drawing: Drawing, scene: _Scene, y: float) -> float:
    """What colour and shape stand for: swatches, or a ramp where there are too many."""
    what = {"GPU": "a cell is a GPU", "node": "a square is a node", "leaf": "a bar is a leaf"}[
        scene.style.unit
    ]
    what += ", its number the rank" if scene.style.ranks else ""
    what += (
        ", a frame a leaf" if scene.style.unit != "leaf" and sum(map(len, scene.pods)) > 1 else ""
    )
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
    drawing.text(WIDTH - MARGIN, y + 11, what, size=12, ink="#64748b", anchor="end")
    return y + 14


def _pods(drawing: Drawing, scene: _Scene, y: float) -> float:
    """Pods as blocks of leaves, side by side where they are narrow."""
    painter = LeafPainter(drawing=drawing, style=scene.style, colours=scene.colours)
    gap = GAP if scene.style.title else 3.0
    inside = WIDTH - 2 * MARGIN
    flows = [
        flowed([painter.size(hosts) for hosts in leaves], inside, gap) for leaves in scene.pods
    ]
    named = any(leaves[0][0].place.pod for leaves in scene.pods)
    head = POD_TITLE if named else 0.0
    sizes = [
        (
            max(
                left + painter.size(hosts)[0]
                for hosts, (left, _) in zip(leaves, corners, strict=True)
            ),
            head + height,
        )
        for leaves, (corners, height) in zip(scene.pods, flows, strict=True)
    ]
    places, total = flowed(sizes, inside, 22.0)
    for leaves, (corners, _), (width, _), (x, down) in zip(
        scene.pods, flows, sizes, places, strict=True
    ):
        if named:
            words = f"{leaves[0][0].place.pod} · {_count(sum(map(len, leaves)), 'node')}"
            words = shortened(words, width, 12.5)
            drawing.text(MARGIN + x, y + down + 12, words, size=12.5, bold=True)
            drawing.rect(MARGIN + x, y + down + 18, width, 1, fill="#cbd5e1")
        for hosts, (left, top) in zip(leaves, corners, strict=True):
            painter.draw(MARGIN + x + left, y + down + head + top, hosts)
    return y + total


def reach(placed: RankFiles, places: Sequence[HostPlace], table: Groups) -> tuple[int, int, int]:
    """The most nodes, leaves and pods that one group of an axis touches."""
    host = np.array([host for host, _ in placed.places], dtype=np.int64)
    leaf_number = {key: k for k, key in enumerate(dict.fromkeys((p.pod, p.leaf) for p in places))}
    pod_number = {pod: k for k, pod in enumerate(dict.fromkeys(p.pod for p in places))}
    leaf = np.array([leaf_number[p.pod, p.leaf] for p in places])[host]
    pod = np.array([pod_number[p.pod] for p in places])[host]
    return _most(host[table]), _most(leaf[table]), _most(pod[table])


def _most(values: Groups) -> int:
    """Most different values in a row."""
    ordered = np.sort(values, axis=1)
    return 1 + int((ordered[:, 1:] != ordered[:, :-1]).sum(axis=1).max(initial=0))


def _reach_table(
    drawing: Drawing,
    placed: RankFiles,
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
        row = (axis, *(f"{number:,}" for number in (*table.shape, *reach(placed, places, table))))
        for right, words in zip(rights, row, strict=True):
            drawing.text(right, y, words, size=12, anchor="end")
    return y
