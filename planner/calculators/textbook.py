"""A collective on a link of one's own by every textbook algorithm: steps, seconds, the fastest by size.

Every algorithm takes A + B n seconds for n bytes, so the fastest by size is the lower envelope of lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.costmodel.collectives.alpha_beta import (
    ALGORITHMS,
    Link,
    crossover_bytes,
    hierarchical_all_reduce_s,
    textbook_s,
)
from meshwright.errors import InputError
from meshwright.planner.calculators.links import tiers

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
    _check(operation, ranks, network)
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


def _check(operation: str, ranks: int, network: Network) -> None:
    if operation not in ALGORITHMS:
        raise InputError("no such collective", where="--op", value=operation, allowed=ALGORITHMS)
    if not 2 <= ranks <= MOST_RANKS:
        raise InputError(f"must be from 2 to {MOST_RANKS}", where="--ranks", value=ranks)
    if network.per_node < 1 or ranks % network.per_node:
        raise InputError(
            f"must divide the {ranks} ranks", where="--per-node", value=network.per_node
        )


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
    name = min(lines, key=lambda other: lines[other])
    changes = [{"algorithm": name, "from_bytes": 0.0}]
    while True:
        start_s, byte_s = lines[name]
        overtaking = {
            other: (other_start_s - start_s) / (byte_s - other_byte_s)
            for other, (other_start_s, other_byte_s) in lines.items()
            if other_byte_s < byte_s
        }
        if not overtaking:
            return changes
        name = min(overtaking, key=lambda other: (overtaking[other], lines[other][1]))
        changes.append({"algorithm": name, "from_bytes": overtaking[name]})
