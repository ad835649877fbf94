"""From what was imported to a cluster file that the reader reads back."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from meshwright.cluster_specs.importers.facts import (
    MOST_NODES,
    FileFacts,
    PlacedNode,
    SourceText,
    level_names,
    link_fields,
)
from meshwright.cluster_specs.importers.nccl_tests import read_nccl_log
from meshwright.cluster_specs.importers.slurm import read_conf, read_topograph, read_yaml
from meshwright.cluster_specs.reader import cluster_from_mapping, cluster_names, read_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.documents import LARGE_FILE_BYTES, parse_mapping, read_mapping, read_text
from meshwright.errors import InputError, refuse_unknown, shown

# Blocks of a fabric from its cables: which hosts share leaf switches, which of those groups share spines.


Links = list[tuple[str, float]]
"""(other end, Gb/s) of each port."""


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

    Parameters
    ----------
    cabling
        Switches, hosts and the cables between them.
    node_fields
        Fields of a cluster that the file says of one node.
    notes
        What a user should know already; what is found here comes behind.
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
    ports: Links = field(default_factory=list)


def read_ibnetdiscover(source: SourceText, node: ClusterSpec) -> FileFacts:
    """Hosts on groups of leaf switches, and the bandwidth of every tier as it is cabled.

    Adapters without a host name (a bare product name, SHARP's aggregation nodes) and hosts with at most half
    as many ports as is usual (managers, gateways) are left out, which a note says. Raises InputError with
    the line that cannot be read.

    Parameters
    ----------
    source
        What ibnetdiscover printed.
    node
        The cluster that it is about, as far as it is known.
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


def _hosts(elements: dict[str, _Element]) -> tuple[dict[str, Links], int]:
    """Ports of every host as (leaf switch, Gb/s), and how many adapters name no host."""
    hosts: dict[str, Links] = defaultdict(list)
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


def _nic_fields(hosts: dict[str, Links], usual: int, node: ClusterSpec) -> dict[str, object]:
    """The rate of a usual host's ports, spread over its GPUs."""
    rates = Counter(
        sum(gbps for _, gbps in ports) for ports in hosts.values() if len(ports) == usual
    )
    rate = rates.most_common(1)[0][0]
    if not rate:
        return {}
    return {"nic_gbps_per_gpu": rate / node.gpus_per_node, "nic_medium": "infiniband"}


# Which formats can be imported, and the reader of each.


FORMATS = ("slurm", "topograph", "nvidia-smi", "ibnetdiscover", "nccl-tests")


def read_facts(
    form: str, sources: Sequence[SourceText], node: ClusterSpec, topology: str | None = None
) -> FileFacts:
    """What files in one of `FORMATS` say; only nccl-tests takes several, one log of each level.

    Raises InputError with file and line.

    Parameters
    ----------
    form
        Any of `FORMATS`.
    sources
        Texts of the files, at least one.
    node
        What a node is, where the file says less.
    topology
        Name of one in a topology.yaml; None for its default, else its first.
    """
    refuse_unknown([form], FORMATS, where="--from", what="not a format")
    if form == "nccl-tests":
        return _measured(sources, node)
    if len(sources) != 1:
        raise InputError(
            f"--from {form} reads one file, got {len(sources)}; only nccl-tests takes several"
        )
    source = sources[0]
    if form == "slurm":
        # A list, which no line of a topology.conf looks like.
        is_yaml = source.head.startswith(("- ", "---"))
        return read_yaml(source, topology) if is_yaml else read_conf(source)
    if form == "topograph":
        return read_topograph(source, topology)
    reader = {
        "nvidia-smi": read_topo_matrix,
        "ibnetdiscover": read_ibnetdiscover,
    }
    return reader[form](source, node)


def _measured(sources: Sequence[SourceText], node: ClusterSpec) -> FileFacts:
    """The logs in the order given; a latency found first is used to take apart those of wider levels."""
    with_measured = node
    notes: list[str] = []
    for source in sources:
        facts = read_nccl_log(source, with_measured)
        notes += facts.notes
        with_measured = with_measured.model_copy(
            update={"measured": (*with_measured.measured, *facts.measured)}
        )
    return FileFacts(measured=with_measured.measured[len(node.measured) :], notes=tuple(notes))


_DUMPER: type[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@dataclass(frozen=True, kw_only=True)
class ImportedCluster:
    """A cluster file, the cluster that it describes, and what the user should know of it."""

    text: str
    cluster: ClusterSpec
    notes: tuple[str, ...]

    @property
    def words(self) -> str:
        """The size of the cluster in one line."""
        cluster = self.cluster
        levels = ", ".join(f"{level.name} {level.gpus}" for level in cluster.levels)
        if not cluster.nodes:
            return f"a kind of node with {cluster.gpus_per_node} GPUs" + (
                f"; {levels}" if levels else ""
            )
        return f"{len(cluster.nodes)} nodes, {cluster.gpus} GPUs; GPUs in a block: {levels}"


def read_ratios(text: str) -> list[float]:
    """The numbers of `1,3,7`. Raises InputError for what is none, or lies outside of 1 to 1000.

    Parameters
    ----------
    text
        Numbers with commas between them, one for each level of switches, inside out.
    """
    ratios = []
    for part in text.split(","):
        try:
            ratio = float(part)
        except ValueError:
            ratio = 0.0
        if not 1 <= ratio <= 1000:
            raise InputError(
                f"--oversubscription: {shown(part)} is not a number from 1 to 1000; for example 1,3,7"
            )
        ratios.append(ratio)
    return ratios


def import_topology(
    form: str,
    paths: Sequence[Path],
    node: str,
    *,
    oversubscription: Sequence[float] | None = None,
    name: str | None = None,
    topology: str | None = None,
) -> ImportedCluster:
    """The cluster that files in one of `FORMATS` describe, on nodes of a kind.

    Raises InputError, with file and line where there is one.

    Parameters
    ----------
    form
        Any of `FORMATS`.
    paths
        Of the files.
    node
        Catalog name, or a cluster YAML to which what is found is added.
    oversubscription
        A number for each level of switches, inside out; None for what the files say, else 1.
    name
        Of the cluster; that of the first file when None.
    topology
        Name of one in a topology.yaml.
    """
    base = read_cluster(node)
    sources = [SourceText(name=str(path), text=read_text(path, LARGE_FILE_BYTES)) for path in paths]
    facts = read_facts(form, sources, base, topology)
    files = ", ".join(path.name for path in paths)
    data = _base_document(node, base)
    data["name"] = name or paths[0].stem[:200]
    data.update(facts.node_fields)
    # The node as the file has it: block sizes below count its GPUs.
    alone = {"gpus": base.gpus, "levels": None, "nodes": None, "measured": None}
    node_spec = cluster_from_mapping({**data, **alone}, files)
    notes = list(facts.notes)
    if facts.nodes:
        levels, level_notes = _levels(facts, node_spec, oversubscription)
        data |= {
            "levels": levels,
            "nodes": _node_entries(facts, base),
            "gpus": None,
            "elastic": None,
        }
        notes += level_notes
    elif oversubscription is not None:
        _check_count([level.name for level in base.levels], oversubscription)
        data["levels"] = [
            {**level.model_dump(exclude_none=True), "oversubscription": ratio}
            for level, ratio in zip(base.levels, oversubscription, strict=True)
        ]
    changed = sorted({*facts.node_fields, *(["levels", "nodes"] if facts.nodes else [])})
    if changed:
        data["sources"] = {**data.get("sources", {}), **dict.fromkeys(changed, f"{form} {files}")}
    data = {key: value for key, value in data.items() if value is not None}
    notes += _add_measured(data, facts, base, files)
    cluster = cluster_from_mapping(data, files)
    data = _ordered(data, cluster)
    text = f"# Written by `meshwright topology import --from {form}` from {files!a}.\n" + yaml.dump(
        data,
        Dumper=_DUMPER,
        sort_keys=False,
        default_flow_style=None,
        width=110,
        allow_unicode=True,
    )
    if cluster_from_mapping(parse_mapping(text, files), files) != cluster:
        raise InputError(
            f"{files}: the cluster file that would be written does not read back the same"
        )
    return ImportedCluster(text=text, cluster=cluster, notes=tuple(notes))


def _base_document(node: str, base: ClusterSpec) -> dict[str, Any]:
    """The fields to start from: a reference to the catalog with the size and levels that it leaves behind."""
    if node not in cluster_names():
        return dict(read_mapping(Path(node), LARGE_FILE_BYTES))
    data: dict[str, Any] = {"base": node, "gpus": base.gpus, "elastic": base.elastic or None}
    if base.levels:
        data["levels"] = [level.model_dump(exclude_none=True) for level in base.levels]
    return data


def _add_measured(
    data: dict[str, Any], facts: FileFacts, base: ClusterSpec, files: str
) -> list[str]:
    """Joins old and new measurements; those of a level that is gone are left out, which a note says."""
    data.pop("measured", None)
    names = cluster_from_mapping(data, files).level_names
    every = [*base.measured, *facts.measured]
    present = [entry.model_dump(exclude_none=True) for entry in every if entry.level in names]
    if present:
        data["measured"] = present
    missing_levels = sorted({entry.level for entry in every if entry.level not in names})
    return (
        [f"measured values of levels that are gone are left out: {', '.join(missing_levels)}"]
        if missing_levels
        else []
    )


def _node_entries(facts: FileFacts, base: ClusterSpec) -> list[dict[str, object]]:
    """The nodes as a cluster file lists them; the pod is the largest block below the whole."""
    free = {entry.name: entry.free_gpus for entry in base.nodes}
    entries = []
    for node in facts.nodes:
        entry: dict[str, object] = {"name": node.name, "leaf": node.blocks[0][:100]}
        if len(node.blocks) > 2:
            entry["pod"] = node.blocks[-2][:100]
        if free.get(node.name) is not None:
            entry["free_gpus"] = free[node.name]
        entries.append(entry)
    return entries


def _levels(
    facts: FileFacts, node: ClusterSpec, oversubscription: Sequence[float] | None
) -> tuple[list[dict[str, object]], list[str]]:
    """A regular level table around an irregular tree: each level as large as its largest block."""
    notes = []
    unit = max(node.gpus_per_node, node.nvlink_domain)
    counts = _widths(facts.nodes)
    largest = counts[0][1]
    size = -(-largest * node.gpus_per_node // unit) * unit
    sizes = [size]
    for _, widest in counts[1:]:
        sizes.append(sizes[-1] * widest)
    for level, (low, high), what in zip(
        facts.level_names, counts, ("nodes", *facts.level_names), strict=False
    ):
        if low != high:
            notes.append(
                f"a {level} holds {low} to {high} {_plural(what)}; `levels` has the largest, `nodes` all"
            )
    ratios = _ratios(facts, oversubscription)
    if oversubscription is None and not facts.oversubscription and len(sizes) > 1:
        notes.append(
            "the file says nothing of oversubscription: taken as 1 everywhere; see --oversubscription"
        )
    levels: list[dict[str, object]] = []
    for level, gpus, ratio in zip(facts.level_names, sizes, ratios, strict=True):
        levels.append(
            {"name": level, "gpus": gpus} | ({"oversubscription": ratio} if ratio != 1 else {})
        )
    joined = len(levels) > 1 or node.crosses_rails_inside
    if facts.rails > 1 and node.gpus_per_node % facts.rails == 0 and joined:
        levels[0]["rails"] = facts.rails
        notes.append(
            f"every node hangs on all {facts.rails} leaf switches of its leaf: taken as rails, "
            "GPU i on switch i"
        )
    return levels, notes


def _plural(word: str) -> str:
    return {"leaf": "leaves", "nodes": "nodes"}.get(word, f"{word}s")


def _widths(nodes: Sequence[PlacedNode]) -> list[tuple[int, int]]:
    """Per level, the fewest and the most blocks of the level below (nodes, for the first) in one block."""
    depth = len(nodes[0].blocks)
    widths = []
    for level in range(depth):
        inside: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for node in nodes:
            inside[node.blocks[level:]].add(node.name if level == 0 else node.blocks[level - 1])
        counts = [len(members) for members in inside.values()]
        widths.append((min(counts), max(counts)))
    return widths


def _ratios(facts: FileFacts, oversubscription: Sequence[float] | None) -> Sequence[float]:
    if oversubscription is None:
        return facts.oversubscription or [1.0] * len(facts.level_names)
    _check_count(facts.level_names, oversubscription)
    return oversubscription


def _check_count(names: Sequence[str], oversubscription: Sequence[float]) -> None:
    if len(oversubscription) != len(names):
        raise InputError(
            f"--oversubscription: {len(oversubscription)} numbers, but there are {len(names)} levels of "
            f"switches, inside out: {', '.join(names) or 'none'}; give one number for each"
        )


def _ordered(data: Mapping[str, Any], cluster: ClusterSpec) -> dict[str, Any]:
    """The fields in the order of reading, the long list of nodes last.

    Of listed nodes the free GPUs are counted, so that `free_gpus` of one is all that has to be edited.
    """
    first = ("name", "base", "device", "gpus")
    data = {**data, "gpus": None if cluster.nodes else cluster.gpus}
    rest = [key for key in data if key not in (*first, "nodes")]
    return {key: data[key] for key in (*first, *rest, "nodes") if data.get(key) is not None}


# `nvidia-smi topo -m`: how the GPUs and NICs of one node are joined.
#
# Cells (the command's own legend): X itself, NV# that many NVLinks, PIX one PCIe bridge, PXB several, PHB the
# host bridge, NODE within a NUMA node, SYS across sockets.


_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CELL = re.compile(r"X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS")
_NEARNESS = ("PIX", "PXB", "PHB", "NODE", "SYS")
MOST_DEVICES = 1024
_LEGEND = "X, NV#, PIX, PXB, PHB, NODE or SYS"


_Cells = dict[tuple[str, str], str]
"""By (row, column), each the name of a device."""


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    cells: _Cells


def read_topo_matrix(source: SourceText, node: ClusterSpec) -> FileFacts:
    """GPUs of the node, those that NVLink joins, and the NICs at their side.

    Raises InputError with the line that is not part of such a matrix, or whose cells contradict another.

    Parameters
    ----------
    source
        What `nvidia-smi topo -m` printed.
    node
        The cluster whose node it is, as far as it is known.
    """
    matrix = _matrix(source)
    links: dict[str, dict[str, int]] = {gpu: {} for gpu in matrix.gpus}
    for gpu, peer in itertools.product(matrix.gpus, repeat=2):
        cell = matrix.cells[gpu, peer]
        if cell.startswith("NV"):
            links[gpu][peer] = int(cell[2:])
    fields, notes = link_fields(links, node)
    near = {gpu: _nearest(matrix, gpu) for gpu in matrix.gpus if matrix.nics}
    if near:
        words = ", ".join(f"{gpu} {' '.join(nics)} ({how})" for gpu, (how, nics) in near.items())
        used = {nic for how, nics in near.values() if how in ("PIX", "PXB", "PHB") for nic in nics}
        far = [nic for nic in matrix.nics if nic not in used]
        notes = (*notes, f"nearest NICs: {words}")
        if used and far:
            far_words = f"NICs at no GPU's side, taken as storage or management: {', '.join(far)}"
            notes = (*notes, far_words)
    return FileFacts(node_fields=fields, notes=notes)


def _matrix(source: SourceText) -> _Matrix:
    columns: list[str] = []
    cells: _Cells = {}
    lines: dict[str, int] = {}
    for number, raw in enumerate(source.text.splitlines(), start=1):
        words = _ANSI.sub("", raw).split()
        if not words:
            continue
        if not columns:
            columns = _header(source, number, words)
            continue
        if words[0] not in columns:
            if re.fullmatch(r"(GPU|NIC)\d+", words[0]):
                raise source.expected(
                    number, f"a row of one of {columns[0]} to {columns[-1]}", words[0]
                )
            continue
        if words[0] in lines:
            raise source.wrong(
                number, f"a second row of {words[0]}, first on line {lines[words[0]]}"
            )
        if len(words) <= len(columns):
            raise source.wrong(
                number, f"row {words[0]}: expected {len(columns)} cells, got {len(words) - 1}"
            )
        lines[words[0]] = number
        for column, cell in zip(columns, words[1:], strict=False):
            if not _CELL.fullmatch(cell) or (cell == "X") != (column == words[0]):
                raise source.expected(number, f"row {words[0]}, column {column}: {_LEGEND}", cell)
            cells[words[0], column] = cell
    if not columns:
        raise source.wrong(
            1, "expected the matrix of `nvidia-smi topo -m`, whose first row starts with GPU0"
        )
    gpus = tuple(name for name in columns if name.startswith("GPU"))
    for gpu in gpus:
        if gpu not in lines:
            raise source.wrong(
                max(lines.values(), default=1), f"expected a row of {gpu}, the file has none"
            )
    _check_mirror(source, gpus, cells, lines)
    return _Matrix(gpus=gpus, nics=tuple(columns[len(gpus) :]), cells=cells)


def _header(source: SourceText, number: int, words: list[str]) -> list[str]:
    """The columns up to the affinities; empty while the line is not the header."""
    if words[0] != "GPU0":
        return []
    if any(_CELL.fullmatch(word) for word in words):
        raise source.wrong(number, "a row of GPU0 before the header that names the columns")
    end = next((k for k, word in enumerate(words) if word in ("CPU", "NUMA")), len(words))
    columns = words[:end]
    if len(set(columns)) != len(columns) or len(columns) > MOST_DEVICES:
        raise source.wrong(number, f"expected up to {MOST_DEVICES} different devices in the header")
    gpus = [word for word in columns if re.fullmatch(r"GPU\d+", word)]
    if columns[: len(gpus)] != gpus:
        raise source.wrong(number, "expected the GPUs before the NICs in the header")
    return columns


def _check_mirror(
    source: SourceText,
    gpus: tuple[str, ...],
    cells: _Cells,
    lines: dict[str, int],
) -> None:
    for gpu in gpus:
        for peer in gpus:
            if cells[gpu, peer] != cells[peer, gpu]:
                raise source.wrong(
                    lines[gpu],
                    f"{gpu} to {peer} is {cells[gpu, peer]}, but {peer} to {gpu} on line {lines[peer]} "
                    f"is {cells[peer, gpu]}",
                )


def _nearest(matrix: _Matrix, gpu: str) -> tuple[str, list[str]]:
    how = min((matrix.cells[gpu, nic] for nic in matrix.nics), key=_rank)
    return how, [nic for nic in matrix.nics if matrix.cells[gpu, nic] == how]


def _rank(cell: str) -> int:
    return _NEARNESS.index(cell) if cell in _NEARNESS else len(_NEARNESS)
