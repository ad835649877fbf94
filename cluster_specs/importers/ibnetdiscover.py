"""`ibnetdiscover`: the switches, channel adapters and cables of an InfiniBand subnet.

Format: linux-rdma/rdma-core infiniband-diags/ibnetdiscover.c. A block per switch (`Switch`) and adapter
(`Ca`) holds a line per cabled port: `[port] "GUID"[port] # "description" lid N 4xNDR`. A host's adapters are
named `host device`, and a host hangs on every leaf switch that one of its adapters is cabled to.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.cluster_specs.importers.fabric_blocks import Cabling, placed_on_cables
from meshwright.cluster_specs.importers.facts import MOST_NODES, FileFacts, SourceText
from meshwright.cluster_specs.schema import ClusterSpec

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
