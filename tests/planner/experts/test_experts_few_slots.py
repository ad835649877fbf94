"""Few slots on a GPU: replica counts and packing decide together, and the bound by pairs is one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from meshwright.planner.experts.bound import paired_counts
from meshwright.planner.experts.heuristic import shared_counts
from meshwright.planner.experts.packing import Solved
from meshwright.planner.experts.problem import PlacementLimits, SlotShape
from meshwright.planner.experts.solve import PlacementEffort, place_layers


def placed(load: np.ndarray, *, gpus: int, per_gpu: int, limit_s: float = 5.0) -> Solved:
    shape = SlotShape(slots=gpus * per_gpu, gpus=gpus, nodes=gpus // 8)
    effort = PlacementEffort(time_limit_s=limit_s, exact=False)
    return place_layers(load[None, None], shape, PlacementLimits(), effort)


def with_hot(experts: int, *, hot: int, factor: float, sigma: float, seed: int = 3) -> np.ndarray:
    """Log-normal loads around 64, `hot` of them `factor` times the mean of all."""
    load = 64.0 * np.random.default_rng(seed).lognormal(0, sigma, experts)
    load[:hot] = load.mean() * factor
    return load


@pytest.mark.parametrize(("factor", "most"), [(10.0, 1.0138), (20.0, 1.0154)])
def test_one_hot_expert_among_64_on_two_slots_a_gpu(factor: float, most: float) -> None:
    """A piece of the hot expert beside each of the others: what the arithmetic of the case allows."""
    load = with_hot(64, hot=1, factor=factor, sigma=0.0)
    solved = placed(load, gpus=64, per_gpu=2)
    assert solved.value[0] <= most
    assert solved.gap[0] <= 0.015


@pytest.mark.parametrize(
    ("sizes", "hot", "factor", "sigma"),
    [
        ((64, 64, 2), 2, 20.0, 0.0),
        ((64, 64, 2), 4, 20.0, 0.0),
        pytest.param((64, 64, 2), 1, 20.0, 0.5, marks=pytest.mark.soak),
        pytest.param((32, 32, 3), 4, 10.0, 0.0, marks=pytest.mark.soak),
        ((32, 32, 5), 1, 40.0, 0.0),
        ((128, 32, 8), 2, 40.0, 0.5),
        ((128, 64, 2), 1, 40.0, 0.0),
    ],
)
def test_gaps_of_hot_experts_are_as_narrow_as_with_many_slots(
    sizes: tuple[int, int, int], hot: int, factor: float, sigma: float
) -> None:
    experts, gpus, per_gpu = sizes
    load = with_hot(experts, hot=hot, factor=factor, sigma=sigma)
    solved = placed(load, gpus=gpus, per_gpu=per_gpu)
    assert solved.gap[0] <= 0.015


def pairings(items: list[int]) -> Iterator[list[tuple[int, int]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for i, other in enumerate(rest):
        for pairs in pairings(rest[:i] + rest[i + 1 :]):
            yield [(first, other), *pairs]


def best_of_all(load: np.ndarray, gpus: int) -> float:
    """Least largest GPU load over every choice of counts and every pairing without an expert twice."""
    best = np.inf
    for counts in product(range(1, gpus + 1), repeat=len(load)):
        if sum(counts) != 2 * gpus:
            continue
        replicas = [e for e, c in enumerate(counts) for _ in range(c)]
        for pairs in pairings(list(range(2 * gpus))):
            gpu_loads = [
                load[replicas[a]] / counts[replicas[a]] + load[replicas[b]] / counts[replicas[b]]
                for a, b in pairs
                if replicas[a] != replicas[b]
            ]
            if len(gpu_loads) == gpus:
                best = min(best, max(gpu_loads))
    return float(best)


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
)
@pytest.mark.parametrize(("experts", "gpus"), [(3, 3), (4, 4), (5, 4)])
def test_no_limit_that_a_pairing_keeps_is_ruled_out(seed: int, experts: int, gpus: int) -> None:
    chance = np.random.default_rng(seed)
    load = (
        np.round(chance.lognormal(0, 1.2, experts) * 8) + 1 if seed % 2 else chance.random(experts)
    )
    best = best_of_all(load, gpus)
    for above in (1.0, 1 + 1e-6, 1.01, 1.2):
        assert paired_counts(load, 2 * gpus, gpus, best * above, 1.0) is not None


def test_a_limit_that_no_pairing_keeps_is_ruled_out_and_one_that_is_kept_gives_counts() -> None:
    """Four of 1280 and 60 of 64 on 64 GPUs: 144 is the least, 72 / 70 of the mean of 140."""
    load = np.array([1280.0] * 4 + [64.0] * 60)
    assert paired_counts(load, 128, 64, 143.9, 1.0) is None
    answer = paired_counts(load, 128, 64, 144.1, 1.0)
    assert answer
    counts = answer[0]
    assert counts.sum() == 128
    falling = np.sort(np.repeat(load / counts, counts))[::-1]
    assert (falling + falling[::-1]).max() <= 144.1


def test_shares_fill_the_slots_and_keep_within_the_gpus() -> None:
    load = with_hot(32, hot=2, factor=30.0, sigma=0.5)
    fewest = np.ones(32, dtype=np.int64)
    fewest[:2] = 9
    counts = shared_counts(load, 96, 32, fewest)
    assert len(counts) > 50
    assert (counts.sum(axis=1) == 96).all()
    assert counts.min() >= 1
    assert counts.max() <= 32
    assert len(np.unique(counts, axis=0)) == len(counts)
