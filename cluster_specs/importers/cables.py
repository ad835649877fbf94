"""Blocks of a fabric from its cables: which hosts share leaf switches, which of those groups share spines."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.cluster_specs.importers.facts import (
    MOST_NODES,
    FileFacts,
    PlacedNode,
    SourceText,
    level_names,
)
from meshwright.cluster_specs.schema import ClusterSpec

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


# `ibnetdiscover`: the switches, channel adapters and cables of an InfiniBand subnet.
#
# Format: linux-rdma/rdma-core infiniband-diags/ibnetdiscover.c. A block per switch (`Switch`) and adapter
# (`Ca`) holds a line per cabled port: `[port] "GUID"[port] # "description" lid N 4xNDR`. A host's adapters
# are named `host device`, and a host hangs on every leaf switch that one of its adapters is cabled to.


LANE_GBPS = {
    "SDR": 2.5,
    "DDR": 5.0,
    "QDR": 10.0,
    "FDR10": 10.0,
    "FDR": 14.0,
    "EDR": 25.0,
    "HDR": 50.0,
    "NDR": 100.0,
    "XDR": 200.0,
}
"""Data rate of one lane, Gb/s and direction (InfiniBand Trade Association roadmap)."""
MOST_PORTS = 2_000_000
_HEAD = re.compile(r'(Switch|Ca|Rt)\s+(\d+)\s+"([^"]+)"\s*(?:#\s*"([^"]*)".*)?')
_PORT = re.compile(
    r'\[(\d+)\](?:\(\w+\))?(?:\[ext \d+\])?\s+"([^"]+)"\[(\d+)\](?:\(\w+\))?\s*(?:#\s*(.*))?'
)
_SPEED = re.compile(r"\b(\d+)x([A-Z]+\d*)\s*$")
_ASIDE = re.compile(r"(vendid|devid|sysimgguid|switchguid|caguid|rtguid)=|#|DR path|Chassis|\s*$")
_AGGREGATION = re.compile(r"aggregation node|sharp", re.IGNORECASE)
_HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)[ '/](?:\S+)")


@dataclass
class _Element:
    kind: str
    name: str
    description: str
    line: int
    ports: list[tuple[str, float]] = field(default_factory=list)
    """(other end, Gb/s)."""


def read_ibnetdiscover(source: SourceText, node: ClusterSpec) -> FileFacts:
    """Hosts on groups of leaf switches, and the bandwidth of every tier as it is cabled.

    Adapters without a host name (a bare product name, SHARP's aggregation nodes) and hosts with at most half
    as many ports as is usual (managers, gateways) are left out, which a note says. Raises InputError with
    the line that cannot be read.
    """
    elements = {element.name: element for element in _elements(source)}
    switches = {name: element for name, element in elements.items() if element.kind == "Switch"}
    hosts, unnamed = _hosts(elements)
    if not switches or not hosts:
        raise source.wrong(
            1, "expected switches and hosts as ibnetdiscover prints them, found none"
        )
    usual = Counter(len(ports) for ports in hosts.values()).most_common(1)[0][0]
    few = sorted(host for host, ports in hosts.items() if 2 * len(ports) <= usual)
    compute = {host: ports for host, ports in hosts.items() if host not in few}
    if len(compute) > MOST_NODES:
        raise source.wrong(1, f"{len(compute)} hosts, more than {MOST_NODES}")
    cabling = Cabling(
        titles={
            name: _switch_name(element.description) or name for name, element in switches.items()
        },
        hosts=compute,
        links={
            name: [(peer, gbps) for peer, gbps in element.ports if peer in switches]
            for name, element in switches.items()
        },
        down_gbps={
            name: sum(gbps for peer, gbps in element.ports if _is_host_port(elements.get(peer)))
            for name, element in switches.items()
        },
    )
    notes = []
    if unnamed:
        notes.append(f"{unnamed} adapters name no host and are left out")
    if few:
        notes.append(
            f"{len(few)} hosts with at most half of the usual {usual} ports are left out: "
            + ", ".join(few[:5])
            + (", ..." if len(few) > 5 else "")
        )
    return placed_on_cables(cabling, _nic_fields(compute, usual, node), tuple(notes))


def _elements(source: SourceText) -> Iterator[_Element]:
    current: _Element | None = None
    ports = 0
    for number, line in enumerate(source.text.splitlines(), start=1):
        if _ASIDE.match(line):
            continue
        head = _HEAD.fullmatch(line.strip())
        if head:
            if current is not None:
                yield current
            current = _Element(kind=head[1], name=head[3], description=head[4] or "", line=number)
            continue
        port = _PORT.fullmatch(line.strip())
        if port is None:
            raise source.expected(
                number, 'Switch, Ca, or a port like [1] "S-..."[2] # "name" lid 3 4xNDR', line
            )
        if current is None:
            raise source.wrong(number, "a port before the first Switch or Ca line")
        ports += 1
        if ports > MOST_PORTS:
            raise source.wrong(number, f"more than {MOST_PORTS} ports")
        current.ports.append((port[2], _gbps(source, number, port[4] or "")))
    if current is not None:
        yield current


def _gbps(source: SourceText, line: int, remark: str) -> float:
    speed = _SPEED.search(remark)
    if speed is None:
        return 0.0
    if speed[2] not in LANE_GBPS:
        raise source.expected(line, f"a link speed like 4xNDR ({', '.join(LANE_GBPS)})", speed[0])
    return int(speed[1][:4]) * LANE_GBPS[speed[2]]


def _hosts(elements: dict[str, _Element]) -> tuple[dict[str, list[tuple[str, float]]], int]:
    """Ports of every host as (leaf switch, Gb/s), and how many adapters name no host."""
    hosts: dict[str, list[tuple[str, float]]] = defaultdict(list)
    unnamed = 0
    for element in elements.values():
        if element.kind != "Ca" or _AGGREGATION.search(element.description):
            continue
        host = _HOST.fullmatch(element.description)
        if host is None:
            unnamed += 1
            continue
        hosts[host[1]] += [
            (switch, gbps)
            for switch, gbps in element.ports
            if switch in elements and elements[switch].kind == "Switch"
        ]
    return {host: ports for host, ports in hosts.items() if ports}, unnamed


def _is_host_port(element: _Element | None) -> bool:
    return (
        element is not None
        and element.kind == "Ca"
        and not _AGGREGATION.search(element.description)
    )


def _switch_name(description: str) -> str:
    """`MF0;leaf-01:MQM9701/U1` is leaf-01."""
    return description.rpartition(";")[2].partition(":")[0].strip()[:100]


def _nic_fields(
    hosts: dict[str, list[tuple[str, float]]], usual: int, node: ClusterSpec
) -> dict[str, object]:
    """The rate of a usual host's ports, spread over its GPUs."""
    rates = Counter(
        sum(gbps for _, gbps in ports) for ports in hosts.values() if len(ports) == usual
    )
    rate = rates.most_common(1)[0][0]
    if not rate:
        return {}
    return {"nic_gbps_per_gpu": rate / node.gpus_per_node, "nic_medium": "infiniband"}
