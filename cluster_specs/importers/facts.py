"""What an importer finds in a file, before it becomes a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.cluster_specs.schema import MeasuredLevelSpec
from meshwright.errors import InputError, shown

MOST_NODES = 131_072
"""As many nodes as a cluster file may list."""


@dataclass(frozen=True, kw_only=True)
class SourceText:
    """The text of a file and what errors call it."""

    name: str
    text: str

    def expected(self, line: int, what: str, got: object) -> InputError:
        """An error at a line (from 1) of this file."""
        return InputError(f"{self.name}:{line}: expected {what}, got {shown(got)}")

    def wrong(self, line: int, what: str) -> InputError:
        """An error at a line (from 1) of this file, in whole words."""
        return InputError(f"{self.name}:{line}: {what}")


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
    """Names of that many switch levels, inside out; the last joins everything."""
    few = {1: ("leaf",), 2: ("leaf", "spine"), 3: ("leaf", "pod", "core")}
    return few.get(count) or ("leaf", *(f"tier-{k}" for k in range(2, count - 1)), "pod", "core")
