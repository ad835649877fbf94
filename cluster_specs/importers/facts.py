"""What an importer finds in a file, before it becomes a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from meshwright.cluster_specs.schema import Architecture, ClusterSpec, MeasuredLevelSpec
from meshwright.errors import InputError, shown

MOST_NODES = 131_072
"""As many nodes as a cluster file may list."""
LONGEST_SENTENCE = 2000


@dataclass(frozen=True, kw_only=True)
class SourceText:
    """The text of a file and what errors call it."""

    name: str
    text: str

    @property
    def head(self) -> str:
        """The first line that is neither empty nor a comment; empty where there is none."""
        lines = self.text.splitlines()
        return next((line for line in lines if line.strip() and line[0] != "#"), "")

    def expected(self, line: int, what: str, got: object) -> InputError:
        """An error at a line (from 1) of this file.

        Parameters
        ----------
        line
            Its number, from 1.
        what
            Should stand there, in words.
        got
            What stands there.
        """
        return InputError(f"{self.name}:{line}: expected {what}, got {shown(got)}")

    def wrong(self, line: int, what: str) -> InputError:
        """An error at a line (from 1) of this file, in whole words.

        Parameters
        ----------
        line
            From 1.
        what
            The sentence; cut where a name in it has no end.
        """
        end = " ..." if len(what) > LONGEST_SENTENCE else ""
        return InputError(f"{self.name}:{line}: {what[:LONGEST_SENTENCE]}{end}")


@dataclass(frozen=True, kw_only=True)
class PlacedNode:
    """A node and the blocks it hangs under, inside out; the last is the whole fabric."""

    name: str
    blocks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """The facts of one file. Every node has the same number of blocks, one of each level."""

    nodes: tuple[PlacedNode, ...] = ()
    level_names: tuple[str, ...] = ()
    oversubscription: tuple[float, ...] = ()
    """Per level, where the file tells; empty where it does not."""
    rails: int = 1
    """Leaf switches of every leaf block, where each node hangs on all of them; 1 where that is not so."""
    node_fields: Mapping[str, object] = field(default_factory=dict)
    """Fields of a cluster that describe one node."""
    measured: tuple[MeasuredLevelSpec, ...] = ()
    notes: tuple[str, ...] = ()
    """What the user should know: what was left out, what was read how."""


def level_names(count: int) -> tuple[str, ...]:
    """Names of that many switch levels, inside out; the last joins everything.

    Parameters
    ----------
    count
        Levels of switches, from 1.
    """
    few = {1: ("leaf",), 2: ("leaf", "spine"), 3: ("leaf", "pod", "core")}
    return few.get(count) or ("leaf", *(f"tier-{k}" for k in range(2, count - 1)), "pod", "core")


# Slurm host lists: `rack[0-1]node[00-15],login1` to names, with the number of names bounded first.
#
# The grammar is that of Slurm's own parser (`scontrol show hostnames`): commas separate expressions, a
# bracket holds numbers and ranges of numbers whose leading zeros stand for a width, several brackets
# multiply, the rightmost running fastest. Text after the last bracket is read too, as ClusterShell does.
# Brackets inside brackets, which Slurm refuses, are an error.


_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
_PLAIN = re.compile(r"[A-Za-z0-9._-]*")
LONGEST_EXPRESSION = 1 << 20


def expand(text: str, limit: int) -> list[str]:
    """The names in the order in which they are written, repeated ones included.

    Raises InputError if the text is no host list or stands for more than `limit` names.

    Parameters
    ----------
    text
        A host list of Slurm, such as `node[1-3,7]`.
    limit
        Most names that it may stand for.
    """
    if len(text) > LONGEST_EXPRESSION:
        raise InputError(
            f"a host list of {len(text)} characters is longer than {LONGEST_EXPRESSION}"
        )
    names: list[str] = []
    for expression in _split(text):
        names += _expand_one(expression, limit - len(names))
    return names


def _split(text: str) -> Iterator[str]:
    """The expressions between the commas that are outside of brackets."""
    start, inside = 0, False
    for position, letter in enumerate(text):
        if letter == "[":
            if inside:
                raise InputError("a bracket inside a bracket; write the ranges one after the other")
            inside = True
        elif letter == "]":
            if not inside:
                raise InputError("a ']' without its '['")
            inside = False
        elif letter == "," and not inside:
            yield text[start:position]
            start = position + 1
    if inside:
        raise InputError("a '[' without its ']'")
    yield text[start:]


def _expand_one(expression: str, limit: int) -> list[str]:
    if not expression:
        raise InputError("an empty name between commas")
    pieces = _BRACKET.split(expression)
    plain, brackets = pieces[::2], pieces[1::2]
    for piece in plain:
        if not _PLAIN.fullmatch(piece):
            raise InputError(
                f"{expression[:80]!r} is no node name; allowed are letters, digits, dot, hyphen, underscore"
            )
    ranges = [[_bounds(part) for part in bracket.split(",")] for bracket in brackets]
    count = prod(sum(last - first + 1 for first, last, _ in parts) for parts in ranges)
    if count > limit:
        names = shown(count) if count < 10**50 else "too many"
        raise InputError(
            f"{expression[:80]!r} stands for {names} names, more than the {limit} left"
        )
    if not brackets:
        return [expression]
    numbers = [
        [f"{n:0{w}d}" for first, last, w in parts for n in range(first, last + 1)]
        for parts in ranges
    ]
    return [
        plain[0] + "".join(number + after for number, after in zip(chosen, plain[1:], strict=True))
        for chosen in product(*numbers)
    ]


def _bounds(part: str) -> tuple[int, int, int]:
    """(first, last, width) of `5`, `08` or `01-12`."""
    match = _RANGE.fullmatch(part)
    if match is None:
        raise InputError(f"{part[:40]!r} in a bracket is neither a number nor a range like 01-16")
    first, last = match[1], match[2] or match[1]
    if int(last) < int(first):
        raise InputError(f"the range {part[:40]!r} runs backwards")
    return int(first), int(last), len(first)


# Nodes on a tree of switches: from 'who is below whom' to the blocks of every node.


JOINED = "fabric"
"""The block that joins trees that the file leaves apart."""


@dataclass
class SwitchTree:
    """Switches as they are read, each with the line that names it."""

    source: SourceText
    lines: dict[str, int] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    switch_of_node: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, line: int) -> None:
        """A switch. Raises InputError if it is there already.

        Parameters
        ----------
        name
            As the file calls it.
        line
            Where it is described, from 1.
        """
        if name in self.lines:
            raise self.source.wrong(
                line, f"{name!r} is described a second time, first on line {self.lines[name]}"
            )
        self.lines[name] = line

    def hang_switch(self, child: str, parent: str, line: int) -> None:
        """Puts a switch under another. Raises InputError if it hangs under one already.

        Parameters
        ----------
        child
            The lower switch.
        parent
            The upper one.
        line
            That says so, for messages.
        """
        if child in self.parents:
            raise self.source.wrong(
                line,
                f"switch {child!r} hangs under {self.parents[child]!r} already; a tree has one way up",
            )
        self.parents[child] = parent

    def hang_node(self, node: str, switch: str, line: int) -> None:
        """Puts a node under a switch. Raises InputError if it hangs under one already.

        Parameters
        ----------
        node
            Its name.
        switch
            That it is cabled to.
        line
            That says so, for messages.
        """
        if node in self.switch_of_node:
            raise self.source.wrong(
                line,
                f"node {node!r} hangs under {self.switch_of_node[node]!r} already; give it one switch",
            )
        if len(self.switch_of_node) >= MOST_NODES:
            raise self.source.wrong(line, f"more than {MOST_NODES} nodes")
        self.switch_of_node[node] = switch

    def facts(
        self, titles: Mapping[str, str] | None = None, notes: tuple[str, ...] = ()
    ) -> FileFacts:
        """The nodes with their blocks. `titles` are the names to show for switches.

        A node higher up than others is given its own switch at the levels it lacks; trees that nothing joins
        are joined at the top, which a note says. Raises InputError for a switch that is named as a child
        but not described, and for a circle.

        Parameters
        ----------
        titles
            Names to show, by switch; their own when None.
        notes
            Remarks that are handed on.
        """
        for child in self.parents:
            if child not in self.lines:
                line = self.lines[self.parents[child]]
                raise self.source.wrong(
                    line, f"child switch {child!r} is described nowhere in this file"
                )
        if not self.switch_of_node:
            raise self.source.wrong(
                1, "no switch has nodes; the file must say which nodes hang where"
            )
        paths = {
            switch: self._path(switch) for switch in dict.fromkeys(self.switch_of_node.values())
        }
        roots = list(dict.fromkeys(path[-1] for path in paths.values()))
        top: tuple[str, ...] = ()
        if len(roots) > 1:
            top = (JOINED,)
            notes = (*notes, f"{len(roots)} trees that no switch joins; taken as joined at the top")
        depth = max(map(len, paths.values()))
        shown = {
            switch: (*(switch for _ in range(depth - len(path))), *path, *top)
            for switch, path in paths.items()
        }
        named = {
            switch: tuple((titles or {}).get(block, block) for block in path)
            for switch, path in shown.items()
        }
        return FileFacts(
            nodes=tuple(
                PlacedNode(name=node, blocks=named[switch])
                for node, switch in self.switch_of_node.items()
            ),
            level_names=level_names(depth + len(top)),
            notes=notes,
        )

    def _path(self, switch: str) -> tuple[str, ...]:
        path = [switch]
        while path[-1] in self.parents:
            above = self.parents[path[-1]]
            if above in path:
                raise self.source.wrong(self.lines[above], f"switch {above!r} is below itself")
            path.append(above)
        return tuple(path)


# Slurm's blocks: groups of close nodes, joined in the order of the file into larger ones.


WHOLE = "fabric"
"""The block that holds all blocks: Slurm does not name it."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One base block and the line that names it."""

    name: str
    nodes: tuple[str, ...]
    line: int


def facts_of_blocks(source: SourceText, blocks: Sequence[Block], sizes: Sequence[int]) -> FileFacts:
    """The nodes under their block, the joined blocks of `sizes`, and the whole.

    2**k base blocks that follow each other in the file make one joined block (topology.conf(5),
    topology/block).

    Parameters
    ----------
    source
        The file, for messages.
    blocks
        Base blocks in the order of the file.
    sizes
        BlockSizes, in nodes: of the base block, then each a power of two times it. A size that takes in all
        blocks adds no level.
    """
    if not blocks:
        raise source.wrong(1, "expected at least one block with nodes")
    seen: dict[str, int] = {}
    taken: dict[str, str] = {}
    for block in blocks:
        if block.name in seen:
            raise source.wrong(
                block.line,
                f"{block.name!r} is described a second time, first on line {seen[block.name]}",
            )
        seen[block.name] = block.line
        if not block.nodes:
            raise source.wrong(block.line, f"block {block.name!r}: expected Nodes=, got none")
        for node in block.nodes:
            if node in taken:
                raise source.wrong(block.line, f"node {node!r} is in block {taken[node]!r} already")
            taken[node] = block.name
    if len(taken) > MOST_NODES:
        raise source.wrong(blocks[-1].line, f"more than {MOST_NODES} nodes")
    steps = [step for step in _steps(source, sizes) if step < len(blocks)]
    nodes = []
    for index, block in enumerate(blocks):
        path = (block.name, *(_joined(blocks, index, step) for step in steps))
        path = (*path, WHOLE) if len(blocks) > 1 else path
        nodes += [PlacedNode(name=node, blocks=path) for node in block.nodes]
    return FileFacts(nodes=tuple(nodes), level_names=_names(len(steps), len(blocks)))


def _names(joined: int, blocks: int) -> tuple[str, ...]:
    return level_names(1 + joined + (blocks > 1))


def _steps(source: SourceText, sizes: Sequence[int]) -> list[int]:
    """How many base blocks each larger size joins."""
    steps: list[int] = []
    for size in sizes[1:]:
        step, rest = divmod(size, sizes[0])
        if rest or step < 2 or step & (step - 1) or (steps and step <= steps[-1]):
            raise source.wrong(
                1,
                f"BlockSizes: {size} is not the base size {sizes[0]} times a power of two that grows; "
                f"Slurm accepts {sizes[0] * 2}, {sizes[0] * 4}, ...",
            )
        steps.append(step)
    return steps


def _joined(blocks: Sequence[Block], index: int, step: int) -> str:
    first = index // step * step
    last = min(first + step, len(blocks)) - 1
    return blocks[first].name if first == last else f"{blocks[first].name}..{blocks[last].name}"


# What the NVLinks of a node say of it: the scale-up domain and its bandwidth.


LINK_GB_PER_S: dict[Architecture, float] = {
    "volta": 25.0,
    "ampere": 25.0,
    "ada": 25.0,
    "hopper": 25.0,
    "blackwell": 50.0,
}
"""One NVLink in one direction: 25 GB/s from NVLink 2 to 4, 50 GB/s with NVLink 5 (NVIDIA product briefs)."""
MOST_LINKS: dict[Architecture, int] = {
    "volta": 6,
    "ampere": 12,
    "ada": 0,
    "hopper": 18,
    "blackwell": 18,
}
"""NVLinks of one GPU: V100 6, A100 12, H100 and B200 18 (NVIDIA product briefs)."""


NvLinks = Mapping[str, Mapping[str, int]]
"""By GPU, the number of NVLinks to each other GPU."""


def link_fields(links: NvLinks, node: ClusterSpec) -> tuple[dict[str, object], tuple[str, ...]]:
    """Fields of a cluster from each GPU's NVLinks to each other GPU, and notes on them.

    A GPU with more links to its peers in all than it has ports reaches them through a switch, with all of
    its links. The domain is the largest set of GPUs that links join; sets of different sizes count as the
    smallest, as a group must fit any of them.

    Parameters
    ----------
    links
        Of every GPU of the node, also of one without any.
    node
        The cluster whose node it is; its device says how fast a link is.
    """
    sizes = sorted(_domain_sizes(links))
    gpus, domain = len(links), sizes[0]
    notes = []
    if sizes[0] != sizes[-1]:
        notes.append(
            f"NVLink joins groups of {', '.join(map(str, sizes))} GPUs; the smallest counts"
        )
    if gpus % domain:
        notes.append(f"NVLink groups of {domain} do not divide {gpus} GPUs; NVLink is left out")
        domain = 1
    outside = node.nvlink_domain > node.gpus_per_node == gpus == domain
    fields: dict[str, object] = {"gpus_per_node": gpus}
    # A rack-wide domain (NVL72) is more than one node can see.
    fields["nvlink_domain"] = node.nvlink_domain if outside else domain
    rate = _rate_gb_per_s(links, node)
    if domain > 1 and rate is not None:
        fields["nvlink_gb_per_s"] = rate
    return fields, tuple(notes)


def _rate_gb_per_s(links: NvLinks, node: ClusterSpec) -> float | None:
    architecture = node.device.architecture
    if architecture not in LINK_GB_PER_S:
        return None
    counts = []
    for peers in links.values():
        total = sum(peers.values())
        through_a_switch = total > MOST_LINKS[architecture]
        counts.append(max(peers.values(), default=0) if through_a_switch else total)
    count = min(counts)
    return count * LINK_GB_PER_S[architecture] if count else None


def _domain_sizes(links: NvLinks) -> list[int]:
    unvisited = dict.fromkeys(links)
    sizes = []
    while unvisited:
        gpu, _ = unvisited.popitem()
        edge = [gpu]
        size = 0
        while edge:
            gpu = edge.pop()
            size += 1
            for peer in links[gpu]:
                if peer in unvisited:
                    del unvisited[peer]
                    edge.append(peer)
        sizes.append(size)
    return sizes
