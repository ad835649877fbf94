"""How a leaf and its nodes are drawn at four sizes, from every rank written out to one bar per leaf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt

from meshwright.planner.drawing.svg import Drawing, ink_on, shortened, text_width
from meshwright.planner.launch.ranks.fabric_places import HostPlace

EMPTY, FRAME, PAPER = "#e2e8f0", "#cbd5e1", "#f8fafc"
TITLE_SIZE, GPUS_IN_A_ROW = 10.5, 8
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
        height = down * (self.cell_height + self.gap) - self.gap
        return across * (self.cell_width + self.gap) - self.gap, height + self.label * 1.45


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
    style = next((style for most, style in _STYLES if count <= most), _SMALLEST)
    if style.unit == "leaf":
        return replace(style, cell_width=max(64.0, min(PAGE_WIDTH, 2 * PAGE_WIDTH / len(leaves))))
    width, height = style.node_size(leaves[0][0].gpus)
    columns = ceil(sqrt(widest * (height + style.between) / (width + style.between) * 1.3))
    columns = min(columns, int(PAGE_WIDTH / (width + style.between)))
    if len(leaves) > MOST_TITLED_LEAVES:
        return replace(style, title=0, pad=3, columns=max(1, columns))
    if style.unit == "node":
        # Room for a title.
        columns = max(columns, ceil(70 / (width + style.between)))
    return replace(style, columns=max(1, min(columns, widest) if style.unit == "GPU" else columns))


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
        return (
            style.columns * (width + style.between) - style.between + 2 * style.pad,
            rows * (height + style.between) - style.between + 2 * style.pad + style.title,
        )

    def draw(self, x: float, y: float, hosts: Sequence[Host]) -> None:
        """A leaf with its nodes, its corner at (x, y)."""
        style = self.style
        width, height = self.size(hosts)
        name = hosts[0].place.leaf
        nodes = f"{len(hosts):,} node{'' if len(hosts) == 1 else 's'}"
        tip = f"{name}: {nodes}" if name else None
        self.drawing.rect(
            x, y, width, height, fill=PAPER, stroke=FRAME, radius=min(5, style.pad), tip=tip
        )
        if style.title:
            full = f"{name} · {len(hosts):,}" if name else nodes
            room = width - 2 * style.pad
            words = full if text_width(full, TITLE_SIZE) <= room else name or nodes
            words = shortened(words, room, TITLE_SIZE)
            self.drawing.text(x + style.pad, y + 16, words, size=TITLE_SIZE, ink="#475569")
        left, top = x + style.pad, y + style.pad + style.title
        if style.unit == "leaf":
            first, last = hosts[0].name, hosts[-1].name
            self._strips(left, top, self._shares(hosts), f"{name}: {first} to {last}")
            return
        node_width, node_height = style.node_size(max(host.gpus for host in hosts))
        draw = self._gpus if style.unit == "GPU" else self._tile
        for index, host in enumerate(hosts):
            row, column = divmod(index, style.columns)
            draw(
                left + column * (node_width + style.between),
                top + row * (node_height + style.between),
                host,
            )

    def _gpus(self, x: float, y: float, host: Host) -> None:
        """Name, replicas and GPUs of a node, those it does not use left pale."""
        style = self.style
        width, _ = style.node_size(host.gpus)
        replicas = f"dp {host.replicas}" if host.cells else ""
        room = width - text_width(replicas, style.label - 1) - 6
        if text_width(host.name, style.label) > room:
            replicas, room = "", width
        base = y + style.label
        self.drawing.text(x, base, shortened(host.name, room, style.label), size=style.label)
        if replicas:
            size = style.label - 1
            self.drawing.text(x + width, base, replicas, size=size, ink="#64748b", anchor="end")
        for gpu in range(host.gpus):
            left = x + gpu % GPUS_IN_A_ROW * (style.cell_width + style.gap)
            top = y + style.label * 1.45 + gpu // GPUS_IN_A_ROW * (style.cell_height + style.gap)
            rank, value = host.cells.get(gpu, (None, 0))
            fill = EMPTY if rank is None else self.colours[value]
            tip = f"{host.name} GPU {gpu}: " + ("not used" if rank is None else f"rank {rank}")
            self.drawing.rect(
                left, top, style.cell_width, style.cell_height, fill=fill, radius=2, tip=tip
            )
            if style.ranks and rank is not None:
                size = 10.5 if rank < 1000 else 9
                middle = left + style.cell_width / 2
                self.drawing.text(
                    middle, top + 15, str(rank), size=size, ink=ink_on(fill), anchor="middle"
                )

    def _tile(self, x: float, y: float, host: Host) -> None:
        """A square, cut into strips where the node's GPUs differ."""
        self._strips(x, y, self._shares([host]), host.tip)

    def _shares(self, hosts: Sequence[Host]) -> list[tuple[str, int]]:
        """How many GPUs have each colour; what is not used comes last and pale."""
        counts = Counter(value for host in hosts for _, value in host.cells.values())
        idle = sum(host.gpus - len(host.cells) for host in hosts)
        return [(self.colours[value], counts[value]) for value in sorted(counts)] + (
            [(EMPTY, idle)] if idle else []
        )

    def _strips(self, x: float, y: float, shares: Sequence[tuple[str, int]], tip: str) -> None:
        style = self.style
        radius = 2 if len(shares) == 1 else 0
        for left, width, fill in _cut(shares, style.cell_width):
            self.drawing.rect(
                x + left, y, width, style.cell_height, fill=fill, radius=radius, tip=tip
            )


def _cut(shares: Sequence[tuple[str, int]], width: float) -> Iterator[tuple[float, float, str]]:
    """(left, width, colour) of each share of a width."""
    total, left = sum(count for _, count in shares), 0.0
    for fill, count in shares:
        yield left, width * count / total, fill
        left += width * count / total
