"""Nodes on a tree of switches: from 'who is below whom' to the blocks of every node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.cluster_specs.importers.facts import (
    MOST_NODES,
    FileFacts,
    PlacedNode,
    SourceText,
    level_names,
)

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
        """A switch. Raises InputError if it is there already."""
        if name in self.lines:
            raise self.source.wrong(
                line, f"{name!r} is described a second time, first on line {self.lines[name]}"
            )
        self.lines[name] = line

    def hang_switch(self, child: str, parent: str, line: int) -> None:
        """Puts a switch under another. Raises InputError if it hangs under one already."""
        if child in self.parents:
            raise self.source.wrong(
                line,
                f"switch {child!r} hangs under {self.parents[child]!r} already; a tree has one way up",
            )
        self.parents[child] = parent

    def hang_node(self, node: str, switch: str, line: int) -> None:
        """Puts a node under a switch. Raises InputError if it hangs under one already."""
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
