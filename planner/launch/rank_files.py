"""The files of a mapping, as texts by name: ranks, nodes, schedulers' host files, groups, a picture."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import Any

import numpy as np

from meshwright.cluster_specs.allocation import (
    FabricLevels,
    fabric_levels,
    full_levels,
    names_are_known,
    node_name,
)
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.layout import AXES, EXPERT_AXES
from meshwright.documents import csv_text
from meshwright.errors import InfeasibleError
from meshwright.frameworks.catalog import framework_named
from meshwright.frameworks.record import Framework
from meshwright.planner.bounds.mappings import ranks_on
from meshwright.planner.drawing import (
    Drawing,
    counted,
    flowed,
    ink_on,
    ramp_colour,
    ranges,
    shortened,
    text_width,
)
from meshwright.planner.mapping.slots import (
    Groups,
    Place,
    coordinates,
    megatron_order,
    process_groups,
)
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.run_terms import LayoutDoc

# Where the hosts of a plan hang: the leaf and pod of each, by the cluster file or by the level table.


@dataclass(frozen=True, kw_only=True)
class HostPlace:
    """The smallest and the next larger block of switches around a host; '' where there is none."""

    leaf: str
    pod: str


def host_places(cluster: ClusterSpec, gpus: int, nodes: Sequence[int]) -> list[HostPlace]:
    """Places of nodes, given by their number in the cluster.

    Nodes that the cluster file lists have the leaf and pod that it gives; otherwise they stand in the blocks
    of the machine in turn, of which those count that part an allocation of `gpus` GPUs.

    Parameters
    ----------
    cluster
        Of the plan.
    gpus
        Of the allocation, from 1: levels that do not part it do not count.
    nodes
        Numbers of nodes in the cluster, from 0.
    """
    if cluster.nodes:
        listed = [cluster.nodes[node] for node in nodes]
        return [HostPlace(leaf=entry.leaf or "", pod=entry.pod or "") for entry in listed]
    levels = fabric_levels(cluster, gpus)
    # Levels above the node whose blocks are smaller than the allocation, inside out.
    depths = [
        int(k)
        for k in np.flatnonzero(levels.blocks > cluster.gpus_per_node)
        if k < len(levels.blocks) - 1
    ]
    leaf, pod = (*depths, None, None)[:2]
    return [
        HostPlace(leaf=_block(cluster, levels, leaf, node), pod=_block(cluster, levels, pod, node))
        for node in nodes
    ]


def _block(cluster: ClusterSpec, levels: FabricLevels, depth: int | None, node: int) -> str:
    if depth is None:
        return ""
    full = full_levels(cluster)
    size = int(full.blocks[full.names.index(levels.names[depth])])
    number = node * cluster.gpus_per_node // size
    return f"{levels.names[depth]} {number + 1}"


# Which process runs where: ranks in the framework's order, against the nodes' GPUs.


_TEMPLATE = (
    "# The plan's cluster names no hosts: these lines only count its nodes. Put your hosts in their place\n"
    "# and call the file {file}; or start inside a job, whose hosts are then taken.\n"
)


@dataclass(frozen=True, kw_only=True)
class PlacedRanks:
    """Nodes in the order of their first rank, and the place of every rank among them."""

    hosts: tuple[str, ...]
    places: tuple[Place, ...]
    """`places[rank]` = (index into `hosts`, local GPU)."""
    nodes: tuple[int, ...]
    """`nodes[i]` is the number of `hosts[i]` in the cluster, from 0."""
    pipeline_before_data: bool
    """Ranks count tp, cp, pp, dp from the inside (`--use-tp-pp-dp-mapping`), not tp, cp, dp, pp."""
    names_known: bool = True
    """Whether `hosts` are names of hosts; else they only count the nodes of the cluster."""

    @property
    def gpus_per_host(self) -> int | None:
        """GPUs n of every node if torchrun can start the ranks: node k runs ranks k n to (k + 1) n - 1."""
        size = len(self.places) // len(self.hosts)
        in_turn = tuple((rank // size, rank % size) for rank in range(size * len(self.hosts)))
        return size if in_turn == self.places else None

    @property
    def gpus_of_hosts(self) -> tuple[int, ...]:
        """GPUs to ask for of every host: up to the last one that holds a rank, counted from 0."""
        last = [0] * len(self.hosts)
        for host, gpu in self.places:
            last[host] = max(last[host], gpu + 1)
        return tuple(last)

    @property
    def alike(self) -> list[tuple[int, list[int]]]:
        """(GPUs, hosts with so many) by index, the most GPUs first; hosts in the order of their nodes."""
        gpus_of_hosts = self.gpus_of_hosts
        by_gpus: dict[int, list[int]] = {}
        for host in sorted(range(len(self.hosts)), key=lambda host: self.nodes[host]):
            by_gpus.setdefault(gpus_of_hosts[host], []).append(host)
        return sorted(by_gpus.items(), reverse=True)

    def ranks_of_hosts(self) -> list[list[int]]:
        """Ranks of every host, ascending."""
        ranks: list[list[int]] = [[] for _ in self.hosts]
        for rank, (host, _) in enumerate(self.places):
            ranks[host].append(rank)
        return ranks

    def rankfile(self) -> str:
        """One line per rank: rank, index of the node in the hostfile, local GPU."""
        return "".join(f"{rank} {host} {gpu}\n" for rank, (host, gpu) in enumerate(self.places))

    @property
    def turns(self) -> list[int]:
        """The place of every host among the nodes in use, by their number: its place in an allocation."""
        place = {node: turn for turn, node in enumerate(sorted(self.nodes))}
        return [place[node] for node in self.nodes]

    @property
    def turns_by_gpus(self) -> list[int]:
        """The same in an allocation that lists the hosts of `alike` one after the other."""
        order = [host for _, hosts in self.alike for host in hosts]
        turns = {host: turn for turn, host in enumerate(order)}
        return [turns[host] for host in range(len(self.hosts))]

    def hostfile(self) -> dict[str, str]:
        """By file name: one host a line, in the order of their first ranks.

        A template, which says so, where the names of the hosts are not known.
        """
        return self._by_name("hostfile", self.hosts)

    def slurm_hostfile(self) -> dict[str, str]:
        """By file name: a host per rank, for SLURM_HOSTFILE and `srun --distribution=arbitrary`."""
        return self._by_name("slurm_hostfile", [self.hosts[host] for host, _ in self.places])

    def _by_name(self, file: str, hosts: Sequence[str]) -> dict[str, str]:
        text = "".join(f"{host}\n" for host in hosts)
        if self.names_known:
            return {file: text}
        return {f"{file}.template": _TEMPLATE.format(file=file) + text}

    def openmpi_rankfile(self) -> str:
        """A line per rank for `mpirun --rankfile`: its host, and the slot of its GPU.

        Hosts whose names are not known are counted through the job's: `+n0` is the first (mpirun(1) of
        OpenMPI 4.1, "relative host indices"). Raises InfeasibleError for a host name that the file cannot
        hold.
        """
        names = self.hosts if self.names_known else [f"+n{turn}" for turn in self.turns]
        for name in names:
            if re.search(r"[\s=#;]", name):
                raise InfeasibleError(
                    f"{name!r} cannot stand in an OpenMPI rankfile: no spaces, '=', '#' or ';'."
                )
        return "".join(
            f"rank {rank}={names[host]} slot={gpu}\n"
            for rank, (host, gpu) in enumerate(self.places)
        )


def planned_layout(plan: Plan) -> LayoutDoc:
    """The layout of a plan. Raises InfeasibleError if it has none."""
    if plan.layout is None:
        raise InfeasibleError(
            f"the plan has no layout (status {plan.status}): there is nothing to launch."
        )
    return plan.layout


def placed_ranks(plan: Plan, framework: Framework | None = None) -> PlacedRanks:
    """The places of a plan's ranks, counted as a framework counts them (the plan's own, unless one is named).

    Where Megatron's default order would need a process-by-process start but its other order is legal and does
    not, the ranks are counted in that one.

    Parameters
    ----------
    plan
        With a layout.
    framework
        That starts it; the plan's own when None.

    Raises
    ------
    InfeasibleError
        The plan has no layout, or its mapping does not fit it or the cluster's nodes.
    """
    layout = planned_layout(plan)
    places = _places(plan, layout)
    default = _on_hosts(plan, places, pipeline_before_data=False)
    if framework is None:
        framework = framework_named(plan.inputs.framework)
    if not framework.reorders_ranks or default.gpus_per_host is not None:
        return default
    if not _other_order_is_legal(plan, layout):
        return default
    reordered = _on_hosts(plan, _recounted(places, layout), pipeline_before_data=True)
    return default if reordered.gpus_per_host is None else reordered


def _places(plan: Plan, layout: LayoutDoc) -> list[Place]:
    """(node, local GPU) of every rank in the default order, as the plan maps them."""
    world = layout.gpus
    mapping, cluster = plan.mapping, plan.inputs.cluster
    if mapping is not None and mapping.ranks is not None:
        places = list(mapping.ranks)
    elif mapping is not None and mapping.matrix:
        places = ranks_on(cluster, mapping.matrix)
    else:
        places = [divmod(rank, cluster.gpus_per_node) for rank in range(world)]
    if len(places) != world:
        raise InfeasibleError(f"the mapping places {len(places)} ranks, the layout has {world}.")
    if len(set(places)) != world:
        raise InfeasibleError("the mapping puts two ranks on one GPU.")
    for node, gpu in places:
        if node < 0 or not 0 <= gpu < cluster.gpus_per_node:
            raise InfeasibleError(
                f"the mapping puts a rank on GPU {gpu} of node {node}: both count from 0, and a node has "
                f"{cluster.gpus_per_node} GPUs."
            )
    return places


def _other_order_is_legal(plan: Plan, layout: LayoutDoc) -> bool:
    """Megatron wants as many expert replicas as dense ones; a dense model's expert axes are free to fit."""
    return plan.inputs.model.moe is None or layout.expert_group == layout.tp * layout.cp


def _recounted(places: Sequence[Place], layout: LayoutDoc) -> list[Place]:
    """The places in the order tp, cp, pp, dp, from those in the order tp, cp, dp, pp."""
    inner = layout.tp * layout.cp
    return [
        places[part + inner * (replica + layout.dp * stage)]
        for replica in range(layout.dp)
        for stage in range(layout.pp)
        for part in range(inner)
    ]


def _on_hosts(plan: Plan, places: Sequence[Place], *, pipeline_before_data: bool) -> PlacedRanks:
    nodes = list(dict.fromkeys(node for node, _ in places))
    hosts = _host_names(plan, nodes)
    index = {node: position for position, node in enumerate(nodes)}
    return PlacedRanks(
        hosts=hosts,
        nodes=tuple(nodes),
        places=tuple((index[node], gpu) for node, gpu in places),
        pipeline_before_data=pipeline_before_data,
        names_known=names_are_known(plan.inputs.cluster),
    )


def _host_names(plan: Plan, nodes: Sequence[int]) -> tuple[str, ...]:
    cluster, count = plan.inputs.cluster, plan.inputs.cluster.node_count
    if max(nodes) >= count:
        raise InfeasibleError(
            f"the mapping uses node {max(nodes)} (from 0), but only {count} nodes are known."
        )
    names = tuple(checked_host(node_name(cluster, node)) for node in nodes)
    if len(set(names)) != len(names):
        raise InfeasibleError("two nodes of the mapping have the same name.")
    return names


def checked_host(name: str) -> str:
    """A node name that fits on a line of a hostfile. Raises InfeasibleError otherwise.

    Parameters
    ----------
    name
        As the cluster file or a host list has it.
    """
    if not name or not name.isprintable() or name != name.strip() or name.startswith(("#", "-")):
        raise InfeasibleError(
            f"{name[:80]!r} cannot be a node name in a hostfile. Correct it in the cluster file."
        )
    return name


# How a leaf and its nodes are drawn at four sizes, from every rank written out to one bar per leaf.


EMPTY, FRAME, PAPER = "#e2e8f0", "#cbd5e1", "#f8fafc"
TITLE_SIZE, GPUS_IN_A_ROW = 10.5, 8
LABEL_LEADING = 1.45
"""Height of a node's label over its font size."""
MOST_TITLED_LEAVES = 160
PAGE_WIDTH = 1128.0


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node with what its GPUs run."""

    name: str
    place: HostPlace
    gpus: int
    """GPUs of the node, used or not."""
    cells: dict[int, tuple[int, int]]
    """(rank, value that colour stands for) by GPU."""
    replicas: str
    """Its data-parallel replicas, in words."""
    tip: str
    """Ranks and groups, for the tip."""


@dataclass(frozen=True, kw_only=True)
class LeafStyle:
    """One of the four sizes. A cell is a GPU, a node or a whole leaf."""

    unit: str
    cell_width: float
    cell_height: float
    gap: float
    """Between cells."""
    between: float
    """Between nodes."""
    label: float = 0
    """Font size of the node's name; 0 for none."""
    ranks: bool = False
    title: float = 17
    """Height of the leaf's title; 0 for none."""
    pad: float = 8
    columns: int = 1
    """Nodes in a row of a leaf."""

    def node_size(self, gpus: int) -> tuple[float, float]:
        """Width and height of a node.

        Parameters
        ----------
        gpus
            Of the node, in use or not, at least 1.
        """
        if self.unit != "GPU":
            return self.cell_width, self.cell_height
        across, down = min(gpus, GPUS_IN_A_ROW), ceil(gpus / GPUS_IN_A_ROW)
        width = across * (self.cell_width + self.gap) - self.gap
        height = down * (self.cell_height + self.gap) - self.gap
        return width, height + self.label * LABEL_LEADING

    def cell_corner(self, gpu: int) -> tuple[float, float]:
        """Left and top of a GPU's cell inside its node.

        Parameters
        ----------
        gpu
            Its number in the node, from 0.
        """
        row, column = divmod(gpu, GPUS_IN_A_ROW)
        x = column * (self.cell_width + self.gap)
        return x, self.label * LABEL_LEADING + row * (self.cell_height + self.gap)


_STYLES = (
    (
        24,
        LeafStyle(
            unit="GPU", cell_width=29, cell_height=22, gap=2, between=10, label=11, ranks=True
        ),
    ),
    (160, LeafStyle(unit="GPU", cell_width=11, cell_height=13, gap=1.5, between=10, label=9)),
    (4096, LeafStyle(unit="node", cell_width=13, cell_height=13, gap=2.5, between=2.5)),
)
_SMALLEST = LeafStyle(unit="leaf", cell_width=64, cell_height=14, gap=3, between=3)


def style_for(leaves: Sequence[Sequence[Host]]) -> LeafStyle:
    """The largest style in which all nodes fit a page of some screens; equal for all leaves.

    Leaves as wide as the largest one needs line up in columns. Very many leaves lose their titles.

    Parameters
    ----------
    leaves
        The nodes of each leaf that is drawn; at least one each.
    """
    count, widest = sum(map(len, leaves)), max(map(len, leaves))
    style = _SMALLEST
    for limit, larger in reversed(_STYLES):
        if count <= limit:
            style = larger
    if style.unit == "leaf":
        two_rows = 2 * PAGE_WIDTH / len(leaves)
        return replace(style, cell_width=max(64.0, min(PAGE_WIDTH, two_rows)))
    width, height = style.node_size(leaves[0][0].gpus)
    across, down = width + style.between, height + style.between
    # Leaves a little wider than high.
    columns = ceil(sqrt(widest * down / across * 1.3))
    columns = min(columns, int(PAGE_WIDTH / across))
    if len(leaves) > MOST_TITLED_LEAVES:
        return replace(style, title=0, pad=3, columns=max(1, columns))
    if style.unit == "node":
        # Room for a title.
        return replace(style, columns=max(1, columns, ceil(70 / across)))
    return replace(style, columns=max(1, min(columns, widest)))


@dataclass(frozen=True, kw_only=True)
class LeafPainter:
    """Draws leaves of one style."""

    drawing: Drawing
    style: LeafStyle
    colours: Sequence[str]

    def size(self, hosts: Sequence[Host]) -> tuple[float, float]:
        """Width and height of a leaf with its frame and title.

        Parameters
        ----------
        hosts
            Of the leaf, at least one.
        """
        style = self.style
        width, height = style.node_size(max(host.gpus for host in hosts))
        rows = 1 if style.unit == "leaf" else ceil(len(hosts) / style.columns)
        inner_width = style.columns * (width + style.between) - style.between
        inner_height = rows * (height + style.between) - style.between
        return inner_width + 2 * style.pad, inner_height + 2 * style.pad + style.title

    def draw(self, x: float, y: float, hosts: Sequence[Host]) -> None:
        """A leaf with its nodes, its corner at (x, y).

        Parameters
        ----------
        x, y
            The upper left corner of its frame, in pixels.
        hosts
            Of the leaf, at least one.
        """
        style = self.style
        self._frame(x, y, hosts)
        left, top = x + style.pad, y + style.pad + style.title
        if style.unit == "leaf":
            tip = f"{hosts[0].place.leaf}: {hosts[0].name} to {hosts[-1].name}"
            self._strips(left, top, self._shares(hosts), tip)
            return
        width, height = style.node_size(max(host.gpus for host in hosts))
        draw_node = self._gpus if style.unit == "GPU" else self._tile
        for index, host in enumerate(hosts):
            row, column = divmod(index, style.columns)
            across = column * (width + style.between)
            down = row * (height + style.between)
            draw_node(left + across, top + down, host)

    def _frame(self, x: float, y: float, hosts: Sequence[Host]) -> None:
        """A leaf's frame, with its name and its number of nodes where there is room."""
        style = self.style
        width, height = self.size(hosts)
        name = hosts[0].place.leaf
        nodes = f"{len(hosts):,} node{'' if len(hosts) == 1 else 's'}"
        tip = f"{name}: {nodes}" if name else None
        radius = min(5, style.pad)
        self.drawing.rect(x, y, width, height, fill=PAPER, stroke=FRAME, radius=radius, tip=tip)
        if not style.title:
            return
        room = width - 2 * style.pad
        words = f"{name} · {len(hosts):,}" if name else nodes
        if text_width(words, TITLE_SIZE) > room:
            words = name or nodes
        words = shortened(words, room, TITLE_SIZE)
        self.drawing.text(x + style.pad, y + 16, words, size=TITLE_SIZE, ink="#475569")

    def _gpus(self, x: float, y: float, host: Host) -> None:
        """Name, replicas and GPUs of a node."""
        # A node's name, and its replicas where both fit.
        size = self.style.label
        width, _ = self.style.node_size(host.gpus)
        replicas = f"dp {host.replicas}" if host.cells else ""
        room = width - text_width(replicas, size - 1) - 6
        if text_width(host.name, size) > room:
            replicas, room = "", width
        self.drawing.text(x, y + size, shortened(host.name, room, size), size=size)
        if replicas:
            right = x + width
            self.drawing.text(right, y + size, replicas, size=size - 1, ink="#64748b", anchor="end")
        for gpu in range(host.gpus):
            left, top = self.style.cell_corner(gpu)
            self._cell(x + left, y + top, host, gpu)

    def _cell(self, x: float, y: float, host: Host, gpu: int) -> None:
        """A GPU with its rank, pale where it is not used."""
        style = self.style
        rank, value = host.cells.get(gpu, (None, 0))
        fill = EMPTY if rank is None else self.colours[value]
        use = "not used" if rank is None else f"rank {rank}"
        tip = f"{host.name} GPU {gpu}: {use}"
        self.drawing.rect(x, y, style.cell_width, style.cell_height, fill=fill, radius=2, tip=tip)
        if not style.ranks or rank is None:
            return
        size = 10.5 if rank < 1000 else 9
        middle = x + style.cell_width / 2
        self.drawing.text(middle, y + 15, str(rank), size=size, ink=ink_on(fill), anchor="middle")

    def _tile(self, x: float, y: float, host: Host) -> None:
        """A square, cut into strips where the node's GPUs differ."""
        self._strips(x, y, self._shares([host]), host.tip)

    def _shares(self, hosts: Sequence[Host]) -> list[tuple[str, int]]:
        """How many GPUs have each colour; what is not used comes last and pale."""
        counts = Counter(value for host in hosts for _, value in host.cells.values())
        shares = [(self.colours[value], counts[value]) for value in sorted(counts)]
        idle = sum(host.gpus - len(host.cells) for host in hosts)
        if idle:
            shares.append((EMPTY, idle))
        return shares

    def _strips(self, x: float, y: float, shares: Sequence[tuple[str, int]], tip: str) -> None:
        """One strip for each colour, as wide as its share of the cell."""
        style = self.style
        radius = 2 if len(shares) == 1 else 0
        total = sum(count for _, count in shares)
        left = 0.0
        for fill, count in shares:
            width = style.cell_width * count / total
            height = style.cell_height
            self.drawing.rect(x + left, y, width, height, fill=fill, radius=radius, tip=tip)
            left += width


# A picture of the ranks on the fabric: pods hold leaves, leaves hold nodes, nodes hold GPUs.
#
# Colour is the pipeline stage (the data-parallel replica where there is one stage). The more nodes, the less
# of each is drawn: GPUs with their ranks, GPUs without, one tile per node, one bar per leaf.


WIDTH, MARGIN, GAP = 1200.0, 28.0, 10.0
POD_TITLE, POD_GAP = 28.0, 22.0
_INSIDE = WIDTH - 2 * MARGIN
MOST_SWATCHES = 16
_WORDS = {
    "pp": "pipeline stage",
    "dp": "data-parallel replica",
    "cp": "context part",
    "tp": "tensor part",
    "ep": "expert part",
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
    placed: PlacedRanks
    places: Sequence[HostPlace]
    """Of `placed.hosts`."""
    groups: Mapping[str, Groups]

    @property
    def hosts(self) -> list[Host]:
        return [host for leaves in self.pods for hosts in leaves for host in hosts]


MOST_GPUS_LISTED = 16_384


def fabric_document(plan: Plan) -> dict[str, Any] | None:
    """What `fabric.svg` shows, as plain data for a page that draws it at any width.

    Parameters
    ----------
    plan
        A plan with a layout.

    Returns
    -------
    dict or None
        `unit` of what is drawn (GPU, node or leaf); `ranks` and `titles`, whether every rank and the name of
        every leaf are written out; `pods` with their `leaves` and the `nodes` of these, each [name, rank of
        every GPU, -1 where none is]; and `axes`: of each that has more than one part `words`, the number of
        `parts` and the `places` of all ranks on it, the axis of `fabric.svg` first. None above
        `MOST_GPUS_LISTED` GPUs.

    Raises
    ------
    InfeasibleError
        The plan has no layout, or its mapping does not fit it.
    """
    layout, placed = planned_layout(plan), placed_ranks(plan)
    if len(placed.places) > MOST_GPUS_LISTED:
        return None
    groups = plan_groups(plan, layout, placed)
    places = host_places(plan.inputs.cluster, len(placed.places), placed.nodes)
    scene = _scene(plan, layout, placed, places, groups)
    names = dict.fromkeys((scene.axis, *reversed(AXES), "ep"))
    return {
        "unit": scene.style.unit,
        "ranks": scene.style.ranks,
        "titles": scene.style.title > 0,
        "pods": [
            {
                "name": leaves[0][0].place.pod,
                "leaves": [
                    {"name": hosts[0].place.leaf, "nodes": [_ranks_on(host) for host in hosts]}
                    for hosts in leaves
                ],
            }
            for leaves in scene.pods
        ],
        "axes": {
            name: {
                "words": _WORDS[name],
                "parts": groups[name].shape[1],
                "places": coordinates(groups, name).tolist(),
            }
            for name in names
            if name in groups and groups[name].shape[1] > 1
        },
    }


def _ranks_on(host: Host) -> tuple[str, list[int]]:
    """A node's name, and the rank on each of its GPUs; -1 where there is none."""
    return host.name, [host.cells.get(gpu, (-1, 0))[0] for gpu in range(host.gpus)]


def _coloured_axis(layout: LayoutDoc) -> str:
    """The outermost axis that has more than one part."""
    return next((axis for axis in reversed(AXES) if getattr(layout, axis) > 1), "pp")


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


def _scene(
    plan: Plan,
    layout: LayoutDoc,
    placed: PlacedRanks,
    places: Sequence[HostPlace],
    groups: Mapping[str, Groups],
) -> _Scene:
    """The ranks of a plan where they lie; `places` are those of `placed.hosts`."""
    axis = _coloured_axis(layout)
    degree: int = getattr(layout, axis)
    hosts = _hosts(placed, places, groups, axis, plan.inputs.cluster.gpus_per_node)
    pods: dict[str, dict[str, list[Host]]] = {}
    for host in [*hosts, *_idle_hosts(plan, placed, places)]:
        pods.setdefault(host.place.pod, {}).setdefault(host.place.leaf, []).append(host)
    nested = [list(leaves.values()) for leaves in pods.values()]
    return _Scene(
        pods=nested,
        style=style_for([in_leaf for leaves in nested for in_leaf in leaves]),
        axis=axis,
        colours=[ramp_colour(index, degree) for index in range(degree)],
        placed=placed,
        places=places,
        groups=groups,
    )


def _tip(name: str, cells: Mapping[int, tuple[int, int]], axis: str) -> str:
    ranks = sorted(rank for rank, _ in cells.values())
    values = sorted({value for _, value in cells.values()})
    return f"{name}: ranks {ranges(ranks)}; {_WORDS[axis]} {ranges(values)}"


def _head(drawing: Drawing, plan: Plan, layout: LayoutDoc, scene: _Scene, title: str) -> float:
    """Title, degrees and sizes of a plan; where that ends."""
    heading = shortened(title, WIDTH - 2 * MARGIN, 20)
    drawing.text(MARGIN, 40, heading, size=20, ink="#0f172a", bold=True)
    axes = list(AXES)
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
    drawing.text(MARGIN, y + 11, _WORDS[scene.axis], size=12, bold=True)
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
            width, _ = block.size
            nodes = counted(sum(map(len, block.leaves)), "node")
            words = shortened(f"{block.leaves[0][0].place.pod} · {nodes}", width, 12.5)
            drawing.text(left, top + 12, words, size=12.5, bold=True)
            drawing.rect(left, top + 18, width, 1, fill="#cbd5e1")
        for hosts, (across, below) in zip(block.leaves, block.corners, strict=True):
            painter.draw(left + across, top + head + below, hosts)
    return y + height


def _pod_block(painter: LeafPainter, leaves: list[list[Host]], head: float) -> _PodBlock:
    gap = GAP if painter.style.title else 3.0
    sizes = [painter.size(hosts) for hosts in leaves]
    corners, height = flowed(sizes, _INSIDE, gap)
    rights = [left + width for (left, _), (width, _) in zip(corners, sizes, strict=True)]
    return _PodBlock(leaves=leaves, corners=corners, size=(max(rights), head + height))


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


def _reach_table(drawing: Drawing, scene: _Scene, y: float) -> float:
    """How far the groups of each axis reach: the most nodes, leaves, pods that one group touches."""
    drawing.text(
        MARGIN, y, "How far groups reach: the most that one group touches", size=12.5, bold=True
    )
    rights = [MARGIN + 40, *(MARGIN + 140 + 110 * k for k in range(5))]
    y += 20
    for right, name in zip(rights, _TABLE, strict=True):
        drawing.text(right, y, name, size=11.5, ink="#64748b", anchor="end")
    for axis in (*AXES, *EXPERT_AXES):
        table = scene.groups.get(axis)
        if table is None or table.shape[1] == 1:
            continue
        y += 17
        numbers = (*table.shape, *reach(scene.placed, scene.places, table))
        row = (axis, *(f"{number:,}" for number in numbers))
        for right, words in zip(rights, row, strict=True):
            drawing.text(right, y, words, size=12, anchor="end")
    return y


FOLDER = "mapping"
"""Where `plan -o` and `launch` put these files."""


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
    axes = [*AXES, *(axis for axis in EXPERT_AXES if axis in groups)]
    columns = [coordinates(groups, axis).tolist() for axis in axes]
    rows = (
        (rank, placed.hosts[host], gpu, *(column[rank] for column in columns))
        for rank, (host, gpu) in enumerate(placed.places)
    )
    scene, drawing = _scene(plan, layout, placed, places, groups), Drawing(width=WIDTH)
    title = f"{plan.inputs.model.name} on {plan.inputs.cluster.name}"
    y = _head(drawing, plan, layout, scene, title)
    y = _legend(drawing, scene, y + 24)
    y = _pods(drawing, scene, y + 22)
    y = _reach_table(drawing, scene, y + 30)
    files = {
        "ranks.csv": _csv(("rank", "host", "gpu", *axes), rows),
        "nodes.csv": _nodes_table(placed, places),
        **placed.slurm_hostfile(),
        "rankfile.openmpi": placed.openmpi_rankfile(),
        "groups.json": _groups_text(groups),
        "fabric.svg": drawing.document(y + MARGIN, title),
    }
    return {f"{FOLDER}/{name}": text for name, text in files.items()}


def _idle_hosts(plan: Plan, placed: PlacedRanks, places: Sequence[HostPlace]) -> list[Host]:
    """The listed nodes without ranks on leaves that hold some, which are drawn beside the others."""
    cluster, touched = plan.inputs.cluster, set(places)
    if not cluster.nodes or HostPlace(leaf="", pod="") in touched:
        return []
    unused = sorted(set(range(len(cluster.nodes))) - set(placed.nodes))
    unused_places = host_places(cluster, len(placed.places), unused)
    gpus, names = cluster.gpus_per_node, [cluster.nodes[node].name for node in unused]
    return [
        Host(name=name, place=place, gpus=gpus, cells={}, replicas="", tip=f"{name}: not used")
        for name, place in zip(names, unused_places, strict=True)
        if place in touched
    ]


def plan_groups(plan: Plan, layout: LayoutDoc, placed: PlacedRanks) -> dict[str, Groups]:
    """The process groups of a plan, its ranks counted as `placed` counts them.

    Parameters
    ----------
    plan
        Of which the model says whether there are groups of experts.
    layout
        Of the plan.
    placed
        Its ranks, in either order of Megatron's axes.
    """
    order = megatron_order(placed.pipeline_before_data)
    return process_groups(layout, order, experts=plan.inputs.model.moe is not None)


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


def _csv(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    return csv_text(head, (dict(zip(head, row, strict=True)) for row in rows))
