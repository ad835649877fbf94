"""One collective alone on a cluster: its time by algorithm and the bandwidths that nccl-tests would print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import FabricLevels, fabric_levels
from meshwright.cluster_specs.importers.facts import SourceText
from meshwright.cluster_specs.importers.nccl_tests import read_nccl_times
from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.calibration import Calibration, Factors
from meshwright.costmodel.collectives import (
    IsolatedFabric,
    all_reduce_s,
    collective_time,
    isolated_fabric,
    long_ring_pass_s,
)
from meshwright.costmodel.rates import calibrated, links_of, named_constants
from meshwright.costmodel.textbook import (
    ALGORITHMS,
    OPERATIONS,
    Link,
    crossover_bytes,
    hierarchical_all_reduce_s,
    textbook_s,
)
from meshwright.documents import read_text
from meshwright.errors import InputError, check_choice
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK


def collective_document(
    operation: str,
    sizes_bytes: Sequence[float],
    ranks: int,
    cluster: str,
    *,
    deduplicated: bool = True,
    calibration: Calibration | None = None,
) -> dict[str, Any]:
    """Times of a collective over the first GPUs of a cluster, every algorithm compared.

    Parameters
    ----------
    operation
        One of `costmodel.textbook.OPERATIONS`, such as `all-reduce`.
    sizes_bytes
        Full buffers as nccl-tests counts them, each above 0; the first is shown in full.
    ranks
        Members of the group, at least 2, packed tightly.
    cluster
        Catalog name or cluster file.
    deduplicated
        Whether an all-to-all sends each token once to a node (DeepEP) or once to a GPU (NCCL).
    calibration
        What the user's own runs and logs say; of links, where the device is the cluster's.

    Returns
    -------
    dict
        Seconds by algorithm, and the two bandwidths that nccl-tests prints, in GB/s. `hierarchical_s` is an
        all-reduce made of three calls, which NCCL does not choose by itself; null where all is one level.
        `sweep` has the same times for every size, `step_seconds` what a training step pays for a ring
        beside its compute; null for operations that a step has no ring of.

    Raises
    ------
    InputError
        For an unknown operation, fewer than two ranks, or a cluster that cannot be read.
    """
    name = next((name for name in OPERATIONS if name == operation), None)
    if name is None:
        raise InputError("no such collective", where="--op", value=operation, allowed=OPERATIONS)
    if ranks < 2:
        raise InputError("a collective needs at least 2 ranks", where="--ranks", value=ranks)
    spec = read_cluster(cluster)
    factors = Factors()
    if calibration is not None:
        factors = calibration.factors_on(spec.device.name, DEFAULT_FRAMEWORK)
    fabric = isolated_fabric(spec, ranks, deduplicated=deduplicated, factors=factors)
    buffer_bytes = sizes_bytes[0]
    sweep = []
    for size_bytes in sizes_bytes:
        times = collective_time(name, size_bytes, fabric).by_algorithm_s
        sweep.append({"bytes": size_bytes, "seconds_by_algorithm": times})
    cost = collective_time(name, buffer_bytes, fabric)
    return {
        "operation": name,
        "bytes": buffer_bytes,
        "ranks": ranks,
        "cluster": spec.name,
        "levels": _level_rows(fabric_levels(spec, ranks), fabric),
        "algorithm": cost.algorithm,
        "seconds": cost.seconds,
        "seconds_by_algorithm": cost.by_algorithm_s,
        "step_seconds": _step_s(name, buffer_bytes, spec, fabric, factors),
        "hierarchical_s": _hierarchy_s(buffer_bytes, fabric) if name == "all-reduce" else None,
        "algorithm_gb_per_s": cost.algorithm_bytes_per_s / 1e9,
        "bus_gb_per_s": cost.bus_bytes_per_s / 1e9,
        "sweep": sweep,
    }


def _level_rows(levels: FabricLevels, fabric: IsolatedFabric) -> list[dict[str, Any]]:
    """What every level is, and the size whose start-up takes as long as its transfer."""
    rows = zip(
        levels.names, levels.media, fabric.members, levels.gb_per_s, levels.latency_s, strict=True
    )
    return [
        {
            "name": level,
            "medium": medium,
            "ranks_inside": int(members),
            "nominal_gb_per_s": float(gb_per_s),
            "crossover_bytes": float(latency_s * gb_per_s * 1e9),
        }
        for level, medium, members, gb_per_s, latency_s in rows
    ]


def _step_s(
    operation: str, size_bytes: float, spec: ClusterSpec, fabric: IsolatedFabric, factors: Factors
) -> float | None:
    """Seconds of a ring at the rates that `estimate` prices a step with."""
    if operation not in ("all-reduce", "all-gather", "reduce-scatter"):
        return None
    device = spec.device
    shipped = named_constants(device.name, device.architecture, DEFAULT_FRAMEWORK, {})
    links = links_of(fabric_levels(spec, int(fabric.members[-1])), calibrated(shipped, factors))
    ring = all_reduce_s if operation == "all-reduce" else long_ring_pass_s
    return float(np.asarray(ring(size_bytes, fabric.members, links)))


def _hierarchy_s(buffer_bytes: float, fabric: IsolatedFabric) -> float | None:
    """Reduce-scatter in the innermost blocks, all-reduce of the shares between them, all-gather inside."""
    in_block = int(fabric.members[0])
    blocks = int(fabric.members[-1]) // in_block
    if in_block < 2 or blocks < 2:
        return None
    inside = replace(fabric, members=np.minimum(fabric.members, in_block))
    between = replace(fabric, members=fabric.members // in_block)
    scatter = collective_time("reduce-scatter", buffer_bytes, inside).seconds
    gather = collective_time("all-gather", buffer_bytes, inside).seconds
    return (
        scatter + collective_time("all-reduce", buffer_bytes / in_block, between).seconds + gather
    )


# Links by name, as guides to distributed training quote them, and their crossover sizes.


LINKS = {
    "nvlink": Link(alpha_s=1e-6, bytes_per_s=450e9),
    "infiniband": Link(alpha_s=1.5e-6, bytes_per_s=200e9),
    "roce": Link(alpha_s=5e-6, bytes_per_s=12.5e9),
    "tcp": Link(alpha_s=50e-6, bytes_per_s=12.5e9),
}
"""NVLink 4 of a GPU, a node's InfiniBand as a guide has it (8 ports of 200 Gb/s), and 100 GbE twice."""


def link_named(name: str) -> Link:
    """A link of `LINKS`. Raises InputError for another name.

    Parameters
    ----------
    name
        A key of `LINKS`.
    """
    check_choice(name, LINKS, "--link", "no such link")
    return LINKS[name]


def tiers() -> list[dict[str, Any]]:
    """Every link of `LINKS` with n* = alpha / beta, the bytes below which start-ups take most of the time."""
    return [
        {
            "link": name,
            "alpha_s": link.alpha_s,
            "gb_per_s": link.bytes_per_s / 1e9,
            "crossover_bytes": crossover_bytes(link),
        }
        for name, link in LINKS.items()
    ]


# A collective on a link of one's own by every textbook algorithm: steps, seconds, the fastest by size.
#
# Every algorithm takes A + B n seconds for n bytes, so the fastest by size is the lower envelope of lines.


MOST_RANKS = 2**24
_UNIT_BYTES = 1e9


@dataclass(frozen=True, kw_only=True)
class Network:
    """The link that a group has, and the one inside its nodes where there are several ranks in each."""

    link: Link
    """Of a rank; with `per_node`, of a node, whose ranks share it."""
    inside: Link | None = None
    """Of a rank to the others of its node."""
    per_node: int = 1
    """Ranks of a node."""
    in_switch: bool = False
    """Whether the switches reduce."""


def own_network(
    *,
    link: str | None,
    alpha: float | None,
    beta: float | None,
    gamma: float | None,
    inside_alpha: float,
    inside_beta: float,
    per_node: int,
    in_switch: bool,
) -> Network:
    """A link by its name with what is said of it otherwise, and the one inside its nodes.

    Parameters
    ----------
    link
        Of `LINKS`; None for one of which all is said.
    alpha, inside_alpha
        Start-up of a message, seconds.
    beta, inside_beta
        Rate, bytes a second, above 0.
    gamma
        Bytes reduced a second, above 0; None where reduction is free, or as the named link has it.
    per_node
        Ranks of a node.
    in_switch
        Whether the switches reduce.

    Raises
    ------
    InputError
        For an unknown link.
    """
    wire = Link(alpha_s=0.0, bytes_per_s=1.0) if link is None else link_named(link)
    if alpha is not None:
        wire = replace(wire, alpha_s=alpha)
    if beta is not None:
        wire = replace(wire, bytes_per_s=beta)
    if gamma is not None:
        wire = replace(wire, gamma_s_per_byte=1.0 / gamma)
    inside = Link(alpha_s=inside_alpha, bytes_per_s=inside_beta)
    return Network(link=wire, inside=inside, per_node=per_node, in_switch=in_switch)


def textbook_document(
    operation: str, sizes_bytes: Sequence[float], ranks: int, network: Network
) -> dict[str, Any]:
    """A collective of one or more sizes over a group, by every algorithm that can run it.

    Parameters
    ----------
    operation
        Of `ALGORITHMS`.
    sizes_bytes
        Full buffers, each above 0; the first is shown in full, all of them in `sweep`.
    ranks
        Of the group, at least 2.
    network
        With `inside` and `per_node`, an all-reduce is also told by hierarchy.

    Returns
    -------
    dict
        Steps and seconds by algorithm, the fastest from each size on, bandwidths in GB/s, and n* of the link.

    Raises
    ------
    InputError
        For an unknown operation, or ranks that do not fill their nodes.
    """
    check_choice(operation, ALGORITHMS, "--op", "no such collective")
    if not 2 <= ranks <= MOST_RANKS:
        raise InputError(f"must be from 2 to {MOST_RANKS}", where="--ranks", value=ranks)
    if network.per_node < 1 or ranks % network.per_node:
        raise InputError(
            f"must divide the {ranks} ranks", where="--per-node", value=network.per_node
        )
    size_bytes = sizes_bytes[0]
    lines = _lines(operation, ranks, network)
    seconds = _seconds(lines, size_bytes)
    fastest = min(seconds, key=lambda name: seconds[name])
    return {
        "operation": operation,
        "bytes": size_bytes,
        "ranks": ranks,
        "alpha_s": network.link.alpha_s,
        "gb_per_s": network.link.bytes_per_s / 1e9,
        "algorithm": fastest,
        "seconds": seconds[fastest],
        "seconds_by_algorithm": seconds,
        "algorithm_gb_per_s": size_bytes / seconds[fastest] / 1e9,
        "gb_per_s_by_algorithm": {name: size_bytes / s / 1e9 for name, s in seconds.items()},
        "steps_by_algorithm": _steps(operation, ranks, network),
        "fastest_from_bytes": _envelope(lines),
        "crossover_bytes": crossover_bytes(network.link),
        "tiers": tiers(),
        "sweep": [{"bytes": n, "seconds_by_algorithm": _seconds(lines, n)} for n in sizes_bytes],
    }


def _runs(operation: str, ranks: int, network: Network) -> list[str]:
    """The flat algorithms that this group and network can run.

    Halving and doubling have all ranks of a node send at once, so a link that they share is not of one rank.
    """
    is_power = ranks & (ranks - 1) == 0 and network.per_node == 1
    return [
        name
        for name, algorithm in ALGORITHMS[operation].items()
        if (is_power or not algorithm.power_of_two)
        and (network.in_switch or not algorithm.in_switch)
    ]


def _has_hierarchy(operation: str, ranks: int, network: Network) -> bool:
    return operation == "all-reduce" and network.inside is not None and 1 < network.per_node < ranks


def _textbook_hierarchy_s(size_bytes: float, ranks: int, network: Network) -> float:
    """Reduce-scatter inside, all-reduce between, all-gather inside; ranks of a node share its link."""
    assert network.inside is not None
    between = replace(network.link, bytes_per_s=network.link.bytes_per_s / network.per_node)
    nodes = ranks // network.per_node
    seconds = hierarchical_all_reduce_s(
        size_bytes, network.per_node, nodes, inside=network.inside, between=between
    )
    return float(seconds)


def _lines(operation: str, ranks: int, network: Network) -> dict[str, tuple[float, float]]:
    """(seconds of no bytes, seconds of one byte) of each algorithm."""

    def line(without_s: float, with_s: float) -> tuple[float, float]:
        return without_s, (with_s - without_s) / _UNIT_BYTES

    lines = {}
    for name in _runs(operation, ranks, network):
        without_s = float(textbook_s(operation, name, 0.0, ranks, network.link))
        with_s = float(textbook_s(operation, name, _UNIT_BYTES, ranks, network.link))
        lines[name] = line(without_s, with_s)
    if _has_hierarchy(operation, ranks, network):
        lines["hierarchical"] = line(
            _textbook_hierarchy_s(0.0, ranks, network),
            _textbook_hierarchy_s(_UNIT_BYTES, ranks, network),
        )
    return lines


def _seconds(lines: Mapping[str, tuple[float, float]], size_bytes: float) -> dict[str, float]:
    return {name: start_s + size_bytes * byte_s for name, (start_s, byte_s) in lines.items()}


def _steps(operation: str, ranks: int, network: Network) -> dict[str, Any]:
    """Messages one after the other; of a hierarchy, on the fast links and on the slow ones."""
    steps: dict[str, Any] = {
        name: int(ALGORITHMS[operation][name].startups(float(ranks)))
        for name in _runs(operation, ranks, network)
    }
    if _has_hierarchy(operation, ranks, network):
        nodes = ranks // network.per_node
        steps["hierarchical"] = {"inside": 2 * (network.per_node - 1), "between": 2 * (nodes - 1)}
    return steps


def _envelope(lines: Mapping[str, tuple[float, float]]) -> list[dict[str, Any]]:
    """The fastest algorithm from each size on, smallest sizes first."""
    name = min(lines, key=lambda line: lines[line])
    changes = [{"algorithm": name, "from_bytes": 0.0}]
    while True:
        start_s, byte_s = lines[name]
        overtaking = {
            line: (other_start_s - start_s) / (byte_s - other_byte_s)
            for line, (other_start_s, other_byte_s) in lines.items()
            if other_byte_s < byte_s
        }
        if not overtaking:
            return changes
        name = min(overtaking, key=lambda line: (overtaking[line], lines[line][1]))
        changes.append({"algorithm": name, "from_bytes": overtaking[name]})


# Start-up and rate of a link, fitted to a log of nccl-tests: T(n) = a + b n, and what is left over.
#
# A ring takes 2 (P-1) start-ups in an all-reduce and P - 1 in a gather, a scatter or an all-to-all, and
# moves 2 (P-1)/P or (P-1)/P of the buffer (Thakur, Rabenseifner and Gropp 2005, sections 3 and 4), so that
# alpha is a over those start-ups and the rate is bus bandwidth, as nccl-tests counts it (NVIDIA/nccl-tests,
# doc/PERFORMANCE.md). Rows are weighted by one over their time: each counts by its relative error, the
# smallest as much as the largest.


MOST_LOG_BYTES = 16_000_000
Floats = NDArray[np.float64]
_PASSES = {"all_reduce": 2.0}


def log_text(path: Path) -> SourceText:
    """The text of a log, at most `MOST_LOG_BYTES`. Raises InputError where it cannot be read.

    Parameters
    ----------
    path
        Of what nccl-tests printed.
    """
    return SourceText(name=str(path), text=read_text(path, MOST_LOG_BYTES))


def fitted_document(source: SourceText) -> dict[str, Any]:
    """Alpha and beta of a log, and every size measured beside fitted.

    Parameters
    ----------
    source
        The text of one run of all_reduce_perf, all_gather_perf, reduce_scatter_perf or alltoall_perf.

    Returns
    -------
    dict
        `alpha_s`, of a message; `gb_per_s`, 1 / beta, of a rank; the start-ups of the collective; the size
        from which a transfer takes longer than a start-up; the mean of the relative errors; and `rows`.

    Raises
    ------
    InputError
        Where the log cannot be read, has fewer than two sizes, or its times do not grow with size.
    """
    log = read_nccl_times(source)
    size = np.array([row[0] for row in log.rows], dtype=np.float64)
    time_s = np.array([row[1] for row in log.rows])
    if len(np.unique(size)) < 2:
        raise InputError(f"{source.name}: alpha and beta need at least two sizes of messages")
    start_s, byte_s = _line(size, time_s)
    if byte_s <= 0:
        raise InputError(
            f"{source.name}: times do not grow with the size; measure up to 1 GiB (-e 1G)"
        )
    passes = _PASSES.get(log.collective, 1.0)
    startups = passes * (log.gpus - 1)
    beta_s = byte_s / (passes * (log.gpus - 1) / log.gpus)
    fitted_s = start_s + byte_s * size
    return {
        "operation": log.collective.replace("_", "-").replace("alltoall", "all-to-all"),
        "ranks": log.gpus,
        "alpha_s": start_s / startups,
        "beta_s_per_byte": beta_s,
        "gb_per_s": 1e-9 / beta_s,
        "startups": int(startups),
        "crossover_bytes": start_s / startups / beta_s,
        "mean_error_pct": 100.0 * float(np.mean(np.abs(fitted_s / time_s - 1.0))),
        "rows": _rows(size, time_s, fitted_s),
    }


def _line(size: Floats, time_s: Floats) -> tuple[float, float]:
    """Least squares of relative errors: seconds of no bytes, at least 0, and of one byte."""
    columns = np.stack([1.0 / time_s, size / time_s], axis=1)
    scale = columns.max(axis=0)
    (start, byte), *_ = np.linalg.lstsq(columns / scale, np.ones(len(size)), rcond=None)
    if start >= 0:
        return float(start / scale[0]), float(byte / scale[1])
    share = size / time_s
    return 0.0, float(share.sum() / (share**2).sum())


def _rows(size: Floats, time_s: Floats, fitted_s: Floats) -> Sequence[dict[str, float]]:
    return [
        {
            "bytes": float(n),
            "measured_s": float(t),
            "fitted_s": float(f),
            "error_pct": 100 * (f / t - 1),
        }
        for n, t, f in zip(size.tolist(), time_s.tolist(), fitted_s.tolist(), strict=True)
    ]
