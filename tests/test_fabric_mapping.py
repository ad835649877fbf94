"""Mapping on fragmented allocations: against brute force, and what must not change a cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.fabric.assign import assignment_of
from planner.fabric.columns import counts_of, relax
from planner.fabric.patterns import BlockKind, Pricer, pattern_bytes
from planner.fabric.problem import IntArray, MappingError, MappingProblem, Traffic, loads_of, spread_of
from planner.fabric.solve import least_busiest, least_traffic


def random_problem(seed: int, *, experts: bool = False) -> MappingProblem:
    """A few slots on a few uneven leaves, in one or two pods, with or without room to spare."""
    rng = np.random.default_rng(seed)
    stages, slots = [(2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (1, 4)][int(rng.integers(6))]
    if experts:
        stages, slots = 2, 4
    leaves, pods = int(rng.integers(2, 5)), int(rng.integers(1, 3))
    free = rng.integers(1, 4, leaves)
    while free.sum() < stages * slots:
        free[int(rng.integers(leaves))] += 1
    traffic = Traffic(
        ring_bytes=float(rng.integers(0, 20)),
        hop_bytes=float(rng.integers(0, 20)),
        wrap_bytes=float(rng.integers(0, 2) * rng.integers(0, 10)),
        expert_slots=2 if experts else 1,
        expert_bytes=float(rng.integers(1, 20)) if experts else 0.0,
        expert_ring_bytes=float(rng.integers(0, 5)) if experts else 0.0,
    )
    pod_of = np.sort(np.append(rng.integers(0, pods, leaves - 1), 0))
    return MappingProblem(
        stages=stages,
        slots=slots,
        traffic=traffic,
        leaf_slots=tuple(int(x) for x in free),
        leaf_s_per_byte=tuple(float(x) for x in rng.integers(1, 4, leaves)),
        leaf_pod=tuple(int(x) for x in pod_of),
        pod_s_per_byte=tuple(float(x) for x in rng.integers(1, 4, pods)),
        host_leaves=tuple(int(x) for x in rng.permutation(np.repeat(np.arange(leaves), free))),
    )


def every_assignment(problem: MappingProblem) -> Iterator[IntArray]:
    """Every way to give leaves to slots."""

    def fill(left: tuple[int, ...], row: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(row) == problem.needed:
            yield row
            return
        for leaf, free in enumerate(left):
            if free:
                yield from fill((*left[:leaf], free - 1, *left[leaf + 1 :]), (*row, leaf))

    for row in fill(problem.leaf_slots, ()):
        yield np.array(row).reshape(problem.stages, problem.slots)


def brute(problem: MappingProblem) -> tuple[float, float]:
    """Least total and least busiest seconds over all assignments."""
    loads = [loads_of(problem, one) for one in every_assignment(problem)]
    return min(one.total_s for one in loads), min(one.busiest_s for one in loads)


SMALL = [seed for seed in range(400) if random_problem(seed).needed <= 6 or len(random_problem(seed).leaf_slots) < 3]


@pytest.mark.parametrize("block", range(12))
def test_brute_force_agrees(block: int) -> None:
    checked = proven = 0
    for seed in SMALL[block * 10 : block * 10 + 10]:
        problem = random_problem(seed)
        total, busiest = brute(problem)
        found = least_traffic(problem)
        assert found.bound_s <= total * (1 + 1e-9) + 1e-9
        assert found.price_s >= total - 1e-9
        if found.proven:
            assert found.price_s == pytest.approx(total)
            proven += 1
        if problem.pods == 1 and problem.traffic.wrap_bytes == 0:
            assert found.proven, seed
        busy = least_busiest(problem)
        assert busy.bound_s <= busiest * (1 + 1e-9) + 1e-9
        assert busiest - 1e-9 <= busy.price_s <= busy.hostname_s + 1e-9
        checked += 1
    assert checked == 10
    assert proven >= 5
