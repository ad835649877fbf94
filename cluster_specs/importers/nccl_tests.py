"""Logs of nccl-tests: the bus bandwidth and latency that a level of the fabric attains.

Format: NVIDIA/nccl-tests src/common.cu and doc/PERFORMANCE.md. The devices are listed one a line with their
host; every row has size, count, type, redop, root, then time (us), algbw and busbw (GB/s), #wrong out of
place and the same in place. What `mpirun --tag-output` or `srun -l` puts before a line is cut off.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from meshwright.cluster_specs.allocation import FabricLevels, full_levels, leaf_tier
from meshwright.cluster_specs.importers.facts import FileFacts, SourceText
from meshwright.cluster_specs.schema import ClusterSpec, MeasuredLevelSpec

_TAG = re.compile(r"\[\d+,\d+\]<std(?:out|err)>:|(?<!\d)\d+: |\[\d+\] ")
_DEVICE = re.compile(r"#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+(\d+)\s")
_NAMED = re.compile(
    r"\b(all_reduce|all_gather|reduce_scatter|alltoall|sendrecv|broadcast|reduce|gather|scatter|hypercube)_perf"
)
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall")
SMALL_BYTES = 65_536
"""Up to this size the time of a message is taken as that of its hops alone."""
MOST_ROWS = 100_000


@dataclass(frozen=True, kw_only=True)
class _Row:
    size_bytes: int
    operation: str
    time_us: float
    algorithm_gb_per_s: float
    bus_gb_per_s: float
    line: int


@dataclass(frozen=True, kw_only=True)
class LogTimes:
    """What a log of nccl-tests measured: (bytes, seconds) of every size, out of place, the smallest first."""

    collective: str
    """As nccl-tests names it: all_reduce, all_gather, reduce_scatter, alltoall."""
    gpus: int
    rows: tuple[tuple[int, float], ...]


def read_nccl_times(source: SourceText) -> LogTimes:
    """The collective, GPUs and times of a log. Raises InputError with the line that cannot be read.

    Parameters
    ----------
    source
        Text and name of the log; a name such as `all_gather_perf.log` says which test ran where the text does
        not.
    """
    lines = _lines(source)
    gpus = sum(_hosts(source, lines).values())
    rows = _rows(source, lines)
    times = sorted((row.size_bytes, row.time_us * 1e-6) for row in rows if row.size_bytes > 0)
    return LogTimes(collective=_collective(source, lines, rows, gpus), gpus=gpus, rows=tuple(times))


def _lines(source: SourceText) -> list[str]:
    return [_TAG.sub("", line.strip(), count=1).strip() for line in source.text.splitlines()]


def _rows(source: SourceText, lines: Sequence[str]) -> list[_Row]:
    rows = [row for number, line in enumerate(lines, 1) if (row := _row(source, number, line))]
    if not rows or len(rows) > MOST_ROWS:
        raise source.wrong(1, f"expected 1 to {MOST_ROWS} rows of results, found {len(rows)}")
    return rows


def read_nccl_log(source: SourceText, node: ClusterSpec) -> FileFacts:
    """The level that the log's GPUs span, its attained share of the nominal rate and its latency.

    `node` is the cluster that the log was taken on: hosts that it lists are looked up, so that the smallest
    block around all of them is the level; otherwise several hosts span the outermost. Raises InputError
    with the line that cannot be read, or if the log has no rows or does not say where it ran.

    Parameters
    ----------
    source
        The log.
    node
        The cluster.
    """
    lines = _lines(source)
    hosts = _hosts(source, lines)
    rows = _rows(source, lines)
    gpus = sum(hosts.values())
    largest = max(rows, key=lambda row: row.size_bytes)
    if not largest.bus_gb_per_s > 0:
        raise source.wrong(
            largest.line, "the bus bandwidth of the largest message is 0; use larger messages"
        )
    collective = _collective(source, lines, rows, gpus)
    inside = _members(source, node, hosts)
    levels = full_levels(node)
    name = levels.names[len(inside) - 1]
    fraction = _fraction(source, largest, collective, inside, levels)
    notes = []
    if fraction > 1:
        notes.append(
            f"{source.name}: {largest.bus_gb_per_s:g} GB/s is {fraction:.2f} of the nominal rate of {name}, "
            "more than a ring can reach (on two nodes NCCL's trees cross the network less; NVLS and SHARP "
            "reduce on the way): taken as 1; NCCL_ALGO=RING measures the links"
        )
    measured = MeasuredLevelSpec(
        level=name,
        collective=collective,  # type: ignore[arg-type]
        gpus=gpus,
        bus_gb_per_s=largest.bus_gb_per_s,
        attained_fraction=min(1.0, fraction),
        latency_us=_latency_us(
            min(rows, key=lambda row: row.size_bytes), collective, inside, levels
        ),
        source=f"nccl-tests {collective} of {gpus} GPUs on {len(hosts)} nodes, "
        f"{largest.size_bytes} bytes ({source.name.rpartition('/')[2]})",
    )
    return FileFacts(measured=(measured,), notes=tuple(notes))


def _hosts(source: SourceText, lines: Sequence[str]) -> Counter[str]:
    hosts: Counter[str] = Counter()
    ranks: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        device = _DEVICE.match(line)
        if device is None:
            continue
        if device[1] in ranks:
            raise source.wrong(
                number,
                f"rank {device[1]} is listed twice, first on line {ranks[device[1]]}: the log holds several "
                "runs, or one that was started without MPI; give a file of one run",
            )
        ranks[device[1]] = number
        hosts[device[2]] += 1
    if not hosts:
        raise source.wrong(
            1, "expected lines like '#  Rank  0 Group  0 Pid 1 on host device  0 ...', found none"
        )
    if set(ranks) != {str(rank) for rank in range(len(ranks))}:
        raise source.wrong(
            max(ranks.values()), f"expected every rank up to {max(map(int, ranks))} to be listed"
        )
    if len(ranks) < 2:
        raise source.wrong(1, "one GPU alone crosses no level; give a log of two or more")
    return hosts


def _row(source: SourceText, number: int, line: str) -> _Row | None:
    words = line.split()
    if len(words) < 9 or not words[0].isdigit() or not words[1].isdigit():
        return None
    try:
        size, time, algorithm, bus = int(words[0]), *(float(word) for word in words[5:8])
    except ValueError:
        raise source.expected(
            number, "a row: size count type redop root time algbw busbw", line
        ) from None
    if not 0 <= size < 1 << 50 or not 0 < time < 1e12 or not 0 <= bus < 1e6:
        raise source.expected(number, "a size, a time above 0 and a bandwidth", line)
    return _Row(
        size_bytes=size,
        operation=words[3],
        time_us=time,
        algorithm_gb_per_s=algorithm,
        bus_gb_per_s=bus,
        line=number,
    )


def _collective(source: SourceText, lines: Sequence[str], rows: Sequence[_Row], gpus: int) -> str:
    """Which test ran: as the log (or its command line, or the file's name) says, else as its figures tell."""
    named: set[str] = {match for line in (*lines, source.name) for match in _NAMED.findall(line)}
    if len(named) == 1:
        (name,) = named
        if name not in _COLLECTIVES:
            raise source.wrong(
                1, f"{name}_perf says little of a level; use {', '.join(_COLLECTIVES)}"
            )
        return name
    largest = max(rows, key=lambda row: row.size_bytes)
    ratio = largest.bus_gb_per_s / largest.algorithm_gb_per_s if largest.algorithm_gb_per_s else 0.0
    ring = (gpus - 1) / gpus
    if largest.operation != "none" and abs(ratio - 2 * ring) < 0.02 * ratio:
        return "all_reduce"
    if largest.operation != "none" and abs(ratio - ring) < 0.02 * ratio:
        return "reduce_scatter"
    raise source.wrong(
        largest.line,
        "which test ran is not in the log; name the file after it, as all_gather_perf.log",
    )


def _members(source: SourceText, node: ClusterSpec, hosts: Counter[str]) -> list[int]:
    """The job's GPUs in the fullest block of every level, inside out, up to the level that holds them all.

    Where the hosts hang is not known, they are taken to lie far apart: each block of a switch level but the
    outermost holds one host.
    """
    levels = full_levels(node)
    gpus, per_host = sum(hosts.values()), max(hosts.values())
    if len(set(hosts.values())) > 1:
        raise source.wrong(1, "expected as many GPUs on every host, got " + _listed(hosts))
    if per_host > node.gpus_per_node:
        raise source.wrong(
            1, f"{per_host} GPUs on a host, but a node of {node.name} has {node.gpus_per_node}"
        )
    places = {entry.name: (entry.leaf, entry.pod) for entry in node.nodes if entry.name in hosts}
    first = next(k for k, medium in enumerate(levels.media) if medium == node.nic_medium)
    leaves = leaf_tier(node, len(levels.names))
    inside: list[int] = []
    for depth, block in enumerate(levels.blocks.tolist()):
        listed = _in_block(hosts, places, depth - leaves)
        if depth == len(levels.names) - 1:
            members = gpus
        elif listed is not None:
            members = listed
        elif depth >= first:
            members = inside[-1]
        else:
            members = min(block, per_host if block <= node.gpus_per_node else gpus)
        inside.append(members)
        if members == gpus:
            break
    return inside


def _in_block(
    hosts: Counter[str], places: dict[str, tuple[str | None, str | None]], depth: int
) -> int | None:
    """GPUs in the fullest leaf (depth 0) or pod (depth 1); None where that of a host is not known."""
    if (
        depth not in (0, 1)
        or set(places) != set(hosts)
        or any(place[depth] is None for place in places.values())
    ):
        return None
    # Leaves of different pods may have one name.
    gpus_of_block: Counter[tuple[str | None, ...]] = Counter()
    for host, count in hosts.items():
        gpus_of_block[places[host][depth:]] += count
    return max(gpus_of_block.values())


def _fraction(
    source: SourceText, row: _Row, collective: str, inside: Sequence[int], levels: FabricLevels
) -> float:
    """Attained over nominal, as `meshwright.costmodel.collectives` counts.

    A ring's bus bandwidth is nominally the slowest of (GPUs inside the sub-block) x (rate of one GPU); of an
    all-to-all the share (P - inside) / P of what a GPU sends crosses the level at the GPU's own rate.
    """
    below, gpus = [1, *inside[:-1]], inside[-1]
    crossed = [k for k in range(len(inside)) if inside[k] > below[k]]
    if collective == "alltoall":
        attained = row.algorithm_gb_per_s * (gpus - below[crossed[-1]]) / gpus
        nominal = float(levels.gb_per_s[crossed[-1]])
    else:
        attained = row.bus_gb_per_s
        nominal = min(below[k] * float(levels.gb_per_s[k]) for k in crossed)
    fraction = attained / nominal
    if not 0 < fraction <= 2:
        raise source.wrong(
            row.line,
            f"{attained:g} GB/s is {fraction:.2g} of the nominal {nominal:g} GB/s of level "
            f"{levels.names[len(inside) - 1]}: this cannot be the kind of node that was measured",
        )
    return round(fraction, 4)


def _latency_us(
    row: _Row, collective: str, inside: Sequence[int], levels: FabricLevels
) -> float | None:
    """One hop of the outermost level: the smallest message's time less the hops of the levels inside.

    Inverts the cost model's sum over levels of log2(blocks) hops, twice for an all-reduce.
    """
    if collective == "alltoall" or row.size_bytes > SMALL_BYTES:
        return None
    passes = 2 if collective == "all_reduce" else 1
    below = [1, *inside[:-1]]
    inner = sum(
        log2(inside[k] / below[k]) * float(levels.latency_s[k]) * 1e6
        for k in range(len(inside) - 1)
    )
    hops = log2(inside[-1] / below[-1])
    latency_us = (row.time_us / passes - inner) / hops
    return round(latency_us, 3) if latency_us > 0 else None


def _listed(hosts: Counter[str]) -> str:
    return ", ".join(f"{count} on {host}" for host, count in list(hosts.items())[:4])
