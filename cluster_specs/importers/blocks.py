"""Slurm's blocks: groups of close nodes, joined in the order of the file into larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cluster_specs.importers.facts import (
    MOST_NODES,
    FileFacts,
    PlacedNode,
    SourceText,
    level_names,
)

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

    `sizes` are BlockSizes, in nodes: the base block, then each a power of two times the base; 2**k base
    blocks that follow each other in the file make one joined block (topology.conf(5), topology/block). A
    size that takes in all blocks adds no level.
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
