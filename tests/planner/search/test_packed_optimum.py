"""Searches for packs of unlike samples equal brute force over all degrees; bounds stay below prices."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from meshwright.cluster_specs.reader import load_cluster
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.lengths import PACKINGS, packed_lengths
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.space import space_of
from tests.planner.search.test_other_optimizers import small_request
from tests.planner.search.test_planner_optimum import (
    best_by_brute_force,
    check_against_brute_force,
    request,
    search,
)
from tests.soaked import some


def packed(seed: int, size: int | None = None) -> PlanRequest:
    """A small problem whose sequences are packs of unlike samples."""
    draw, asked = random.Random(seed), request(seed)
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(draw.uniform(4, 7), draw.uniform(0.5, 1.5), 2000), 1, 10**6)
    sizes, counts = np.unique(lengths.astype(int), return_counts=True)
    pack_size = size or asked.seq_len
    packing = draw.choice(PACKINGS[:3])
    packs = packed_lengths(sizes, counts, pack_size=pack_size, packing=packing)
    return replace(asked, seq_len=pack_size, lengths=packs)


@pytest.mark.parametrize(
    "seed", [1001, *(pytest.param(n, marks=pytest.mark.slow) for n in (1002, 1006))]
)
def test_search_equals_brute_force(seed: int) -> None:
    check_against_brute_force(packed(seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", some([*range(60), 1000, *range(1003, 1006), *range(1007, 1012)]))
def test_search_equals_brute_force_many(seed: int) -> None:
    check_against_brute_force(packed(seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", some(range(2000, 2030), first=9))
def test_the_best_size_of_packs_is_that_of_brute_force(seed: int) -> None:
    """Seconds for a token of a sample, over sizes of packs and all layouts of each."""
    searched, counted = [], []
    for size in (1024, 2048, 4096):
        asked = packed(seed, size)
        assert asked.lengths is not None
        tokens = asked.global_batch * size * asked.lengths.fill
        outcome, best_s = search(asked), best_by_brute_force(space_of(asked))
        searched.append(outcome.best[0].step_time_s / tokens if outcome.best else np.inf)
        counted.append(np.inf if best_s is None else best_s / tokens)
    assert searched == pytest.approx(counted, rel=1e-9)
    assert np.argmin(searched) == np.argmin(counted)


@pytest.mark.soak
def test_many_of_these_problems_have_unlike_packs_that_cost() -> None:
    costs = []
    for seed in range(1000, 1030):
        asked = packed(seed)
        assert asked.lengths is not None
        alike = search(replace(asked, lengths=replace(asked.lengths, loads=((1.0, 1.0),)))).best
        unlike = search(asked).best
        assert bool(alike) == bool(unlike)
        if alike:
            costs.append(unlike[0].step_time_s / alike[0].step_time_s)
        if sum(cost > 1 + 1e-6 for cost in costs) == 10:
            break
    assert min(costs) > 1 - 1e-12
    assert sum(cost > 1 + 1e-6 for cost in costs) >= 10


def in_a_node(seed: int) -> PlanRequest:
    """Replicas in one node that gather or reduce in every micro-batch, over packs that are very unlike."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(draw.uniform(6, 8), draw.uniform(1, 2), 2000), 1, 10**6)
    sizes, counts = np.unique(lengths.astype(int), return_counts=True)
    packing = draw.choice(PACKINGS)
    packs = packed_lengths(sizes, counts, pack_size=16_384, packing=packing)
    return replace(
        small_request(seed, "fsdp2", "adam"),
        cluster=load_cluster("dgx-a100"),
        gpus=8,
        global_batch=8 * draw.choice([4, 8]),
        seq_len=16_384,
        lengths=packs,
        pins={"tp": 1, "cp": 1, "recompute": "none", "zero_stage": draw.choice([2, 3])},
    )


@pytest.mark.parametrize("seed", [1, 13])
def test_smaller_shard_groups_wait_less_and_bounds_know_it(seed: int) -> None:
    asked = in_a_node(seed)
    asked = replace(asked, pins={**asked.pins, "dp": 8, "micro_batch": 1})
    prices, layouts = {}, {}
    for groups in (1, 2, 4):
        found = search(replace(asked, pins={**asked.pins, "shard_groups": groups})).best[0]
        prices[groups], layouts[groups] = found.step_time_s, found.layout
    assert prices[4] < prices[2] < prices[1]
    one = Layout(**{name: np.array([value]) for name, value in vars(layouts[1]).items()})
    pricing = CostModelPricing(space_of(asked).workload)
    for bound in (pricing.lower_bound_s, pricing.relief_bound_s):
        assert bound(one, (1, 2, 4))[0] <= prices[4] * (1 + 1e-9)
        assert bound(one, (1, 2))[0] <= prices[2] * (1 + 1e-9)
    assert search(asked).best[0].step_time_s == pytest.approx(prices[4])


def test_any_number_of_shard_groups_may_be_the_best_where_ranks_wait_by_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under ZeRO 1 in a node several send more, and wait no less: none is bounded."""
    asked = replace(in_a_node(1), framework="megatron", gpus=4)
    space = space_of(replace(asked, pins={"dp": 4, "recompute": "none", "zero_stage": 1}))
    layouts = space.layouts(space.degrees(4))
    several = np.asarray(layouts.shard_groups) > 1
    assert several.any()

    def bounds_s() -> list[float]:
        bounds = CostModelPricing(space.workload).mapping_bounds(layouts, space.shard_groups)
        return [each.least_s for each in bounds]

    assert np.array_equal(np.isfinite(bounds_s()), ~several)

    def all_wait(context: Context) -> NDArray[np.bool_]:
        return np.ones(context.layout.broadcast_shape(), dtype=np.bool_)

    monkeypatch.setattr("meshwright.planner.bounds.mappings.waits_by_shards", all_wait)
    assert np.isfinite(bounds_s()).all()


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_shard_groups_over_unlike_packs_are_those_of_brute_force(seed: int) -> None:
    check_against_brute_force(in_a_node(seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", some(range(3, 27)))
def test_shard_groups_over_unlike_packs_are_those_of_brute_force_many(seed: int) -> None:
    check_against_brute_force(in_a_node(seed))
