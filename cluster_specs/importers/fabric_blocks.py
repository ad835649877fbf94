"""Blocks of a fabric from its cables: which hosts share leaf switches, which of those groups share spines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.cluster_specs.importers.facts import FileFacts, PlacedNode, level_names

Links = Sequence[tuple[str, float]]


@dataclass(frozen=True, kw_only=True)
class Cabling:
    """Who is cabled to whom; rates in Gb/s and direction."""

    titles: Mapping[str, str]
    """Names to show, by switch."""
    hosts: Mapping[str, Links]
    """Ports of every host: (leaf switch, rate)."""
    links: Mapping[str, Links]
    """Ports of every switch to other switches."""
    down_gbps: Mapping[str, float]
    """Rate of a switch's ports to hosts."""


class _Joined:
    """Sets that grow together (union-find)."""

    def __init__(self, members: Iterable[str]) -> None:
        self._above = {member: member for member in members}

    def top(self, member: str) -> str:
        while self._above[member] != member:
            self._above[member] = self._above[self._above[member]]
            member = self._above[member]
        return member

    def join(self, members: Sequence[str]) -> None:
        for member in members[1:]:
            first, second = sorted((self.top(members[0]), self.top(member)))
            self._above[second] = first

    def tops(self) -> dict[str, str]:
        return {member: self.top(member) for member in self._above}


def placed_on_cables(
    cabling: Cabling, node_fields: Mapping[str, object], notes: tuple[str, ...]
) -> FileFacts:
    """Every host's blocks. Hosts that share a leaf switch are one leaf block (the rails of a rail-optimised
    fabric are its switches); blocks whose switches meet at a switch of the next tier are one larger block.

    The oversubscription of a tier is the rate of the hosts below over the rate of the cables that lead up
    to it, at least 1: as cabled, empty ports do not count.
    """
    tiers = _tiers(cabling)
    joined = _Joined(tiers)
    for ports in cabling.hosts.values():
        joined.join(list(dict.fromkeys(switch for switch, _ in ports)))
    levels = [joined.tops()]
    oversubscription = [1.0]
    for tier in range(2, max(tiers.values()) + 2):
        before = _blocks(levels[-1], cabling)
        for switch in _switches_of(tiers, tier):
            peers = [peer for peer, _ in cabling.links[switch]]
            joined.join([switch, *(peer for peer in peers if tiers.get(peer, tier) < tier)])
        for switch in _switches_of(tiers, tier - 1):
            # Switches of one tier that are cabled to each other: the groups of a dragonfly.
            peers = [peer for peer, _ in cabling.links[switch]]
            joined.join([switch, *(peer for peer in peers if tiers.get(peer) == tier - 1)])
        level = joined.tops()
        if len(_blocks(level, cabling)) < len(before):
            levels.append(level)
            oversubscription.append(_ratio(cabling, tiers, tier))
    blocks = _blocks(levels[-1], cabling)
    if len(blocks) > 1:
        levels.append(dict.fromkeys(tiers, ""))
        oversubscription.append(1.0)
        notes = (*notes, f"{len(blocks)} parts that no cable joins; taken as joined at the top")
    titles = [_titles(level, tiers, cabling) for level in levels]
    nodes = []
    for host, ports in sorted(cabling.hosts.items()):
        switch = ports[0][0]
        names = [title[level[switch]] for title, level in zip(titles, levels, strict=True)]
        nodes.append(PlacedNode(name=host, blocks=tuple(names)))
    return FileFacts(
        nodes=tuple(nodes),
        level_names=level_names(len(levels)),
        oversubscription=tuple(oversubscription),
        rails=_rails(cabling, levels[0]),
        node_fields=node_fields,
        notes=notes,
    )


def _rails(cabling: Cabling, leaf_block: Mapping[str, str]) -> int:
    """Leaf switches of a block, if all blocks have as many and every host hangs on each of its block's."""
    hung = {host: {switch for switch, _ in ports} for host, ports in cabling.hosts.items()}
    of_block: dict[str, set[str]] = defaultdict(set)
    for switches in hung.values():
        for switch in switches:
            of_block[leaf_block[switch]].add(switch)
    counts = {len(switches) for switches in of_block.values()}
    on_all = all(switches == of_block[leaf_block[min(switches)]] for switches in hung.values())
    return counts.pop() if on_all and len(counts) == 1 else 1


def _tiers(cabling: Cabling) -> dict[str, int]:
    """How far above the hosts each switch is: 1 for a leaf. Switches out of their reach are left out."""
    tiers = {switch: 1 for ports in cabling.hosts.values() for switch, _ in ports}
    edge = list(tiers)
    while edge:
        reached = []
        for switch in edge:
            for peer, _ in cabling.links[switch]:
                if peer not in tiers:
                    tiers[peer] = tiers[switch] + 1
                    reached.append(peer)
        edge = reached
    return tiers


def _blocks(level: Mapping[str, str], cabling: Cabling) -> set[str]:
    """The blocks that hold hosts."""
    return {level[ports[0][0]] for ports in cabling.hosts.values()}


def _ratio(cabling: Cabling, tiers: Mapping[str, int], tier: int) -> float:
    """Hosts' rate over the rate of all cables from tier - 1 to `tier`, at least 1."""
    down = sum(cabling.down_gbps[switch] for switch in tiers)
    lower = _switches_of(tiers, tier - 1)
    cables = [cable for switch in lower for cable in cabling.links[switch]]
    up = sum(rate for peer, rate in cables if tiers.get(peer) == tier)
    if not up:
        up = sum(rate for peer, rate in cables if tiers.get(peer) == tier - 1)
    return max(1.0, round(down / up, 3)) if up else 1.0


def _switches_of(tiers: Mapping[str, int], tier: int) -> list[str]:
    return [switch for switch, switch_tier in tiers.items() if switch_tier == tier]


def _titles(level: Mapping[str, str], tiers: Mapping[str, int], cabling: Cabling) -> dict[str, str]:
    """The name of each block: that of its first leaf switch, and how many more there are."""
    members: dict[str, list[str]] = defaultdict(list)
    for switch, top in level.items():
        if tiers[switch] == 1:
            members[top].append(cabling.titles[switch])
    names = {}
    for top, titles in members.items():
        count = f"+{len(titles) - 1}" if len(titles) > 1 else ""
        names[top] = f"{min(titles)[:90]}{count}"
    return names
