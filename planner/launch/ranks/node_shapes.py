"""How a leaf and its nodes are drawn at four sizes, from every rank written out to one bar per leaf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt

from meshwright.planner.drawing.svg import Drawing, ink_on, shortened, text_width
from meshwright.planner.launch.ranks.fabric_places import HostPlace

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
        """Width and height of a node."""
        if self.unit != "GPU":
            return self.cell_width, self.cell_height
        across, down = min(gpus, GPUS_IN_A_ROW), ceil(gpus / GPUS_IN_A_ROW)
        width = across * (self.cell_width + self.gap) - self.gap
        height = down * (self.cell_height + self.gap) - self.gap
        return width, height + self.label * LABEL_LEADING

    def cell_corner(self, gpu: int) -> tuple[float, float]:
        """Left and top of a GPU's cell inside its node."""
        row, column = divmod(gpu, GPUS_IN_A_ROW)
        left = column * (self.cell_width + self.gap)
        return left, self.label * LABEL_LEADING + row * (self.cell_height + self.gap)


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
        """Width and height of a leaf with its frame and title."""
        style = self.style
        width, height = style.node_size(max(host.gpus for host in hosts))
        rows = 1 if style.unit == "leaf" else ceil(len(hosts) / style.columns)
        inner_width = style.columns * (width + style.between) - style.between
        inner_height = rows * (height + style.between) - style.between
        return inner_width + 2 * style.pad, inner_height + 2 * style.pad + style.title

    def draw(self, x: float, y: float, hosts: Sequence[Host]) -> None:
        """A leaf with its nodes, its corner at (x, y)."""
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
        self._label(x, y, host)
        for gpu in range(host.gpus):
            left, top = self.style.cell_corner(gpu)
            self._cell(x + left, y + top, host, gpu)

    def _label(self, x: float, y: float, host: Host) -> None:
        """A node's name, and its replicas where both fit."""
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
