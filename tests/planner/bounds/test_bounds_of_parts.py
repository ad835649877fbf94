"""Bounds of degrees, of variants and of all that may be relieved: below exact prices, and near some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from meshwright.costmodel.footprint import peak_bounds, stage_memory_gib, usable_hbm_gib
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.schedules import has_trait
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.combination_costs import memory_rows
from meshwright.planner.bounds.layer_split import ALL_LAYERS
from meshwright.planner.bounds.mappings import divides_into
from meshwright.planner.bounds.pricing import CostModelPricing, PricingParams
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.branches import Branch
from meshwright.planner.search.loop import LayoutSearch, branch_of
from meshwright.planner.search.space import space_of
from tests.planner.search.test_deepspeed_offload import on_host
from tests.planner.search.test_planner_optimum import cluster, pipelined, request

NEAR = {"degrees": 0.9, "variants": 0.95, "relieved": 0.95, "layouts": 0.95, "GPU-seconds": 0.7}
"""What share of a price the nearest bound of each kind is at the least: one too high is noticed there."""


def bounds_of_pipelines(
    branch: Branch, variants: Layout, own_variant: NDArray[np.int64], layouts: Layout
) -> NDArray[np.float64]:
    """What the search bounds layouts by, each of one of some variants, with their virtual stages."""
    rows, stages, bound_s = branch._pipeline_bounds_s(variants)
    by_stages = np.full((int(rows.max()) + 1, int(stages.max()) + 1), np.nan)
    by_stages[rows, stages] = bound_s
    own_s: NDArray[np.float64] = by_stages[own_variant, np.asarray(layouts.vpp)]
    return own_s


def shares_of_prices(asked: PlanRequest, seed: int) -> Mapping[str, float]:
    """The largest bound of each kind, as a share of the exact price of its layout."""
    space = space_of(asked)
    pricing = CostModelPricing(space.workload)
    branch = branch_of(space, pricing)
    degrees = space.degrees(asked.gpus)
    layouts, variants = space.layouts(degrees), space.variants(degrees)
    rows = np.random.default_rng(seed).permutation(layouts.broadcast_shape()[0])[:25]
    own_degrees, own_variant = (
        np.repeat(np.arange(len(counts)), counts)[rows]
        for counts in (space.layouts_per_degrees(degrees), space.layouts_per_variant(variants))
    )
    all_placed = CostModelPricing(space.workload, PricingParams(worth_placing=0))
    _, recomputed = pricing.least_memory_gib(layouts)
    drawn = replace(layouts, recompute_layers=recomputed).take(rows)
    gpu_seconds = float(LayoutSearch(space, [branch])._gpu_seconds.min())
    bounds_s = {
        "degrees": all_placed.degrees_bound_s(degrees, space.smallest_bubble)[own_degrees],
        "variants": bounds_of_pipelines(branch, variants, own_variant, drawn),
        "relieved": branch.relief_bound_s(drawn),
        "layouts": pricing.lower_bound_s(drawn),
        "GPU-seconds": gpu_seconds / np.asarray(drawn.gpus),
    }
    shares = dict.fromkeys(bounds_s, 0.0)
    for at, bounds in enumerate(pricing.mapping_bounds(drawn)):
        free = replace(bounds, bound_s=np.full_like(bounds.bound_s, -np.inf))
        priced = pricing.exact(drawn.scalar(at), free, np.inf)
        if priced is not None:
            for name, own_s in bounds_s.items():
                shares[name] = max(shares[name], float(own_s[at]) / priced.step_time_s)
    return shares


@pytest.mark.parametrize(
    ("asked_for", "seed"),
    [
        *((request, 1008), (pipelined, 8)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((request, 1002), (request, 2005), (pipelined, 0))
        ),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in ((request, 2001), (request, 2012))
        ),
    ],
)
def test_no_bound_is_above_the_exact_price(
    asked_for: Callable[[int], PlanRequest], seed: int
) -> None:
    shares = shares_of_prices(asked_for(seed), seed)
    assert max(shares.values()) <= 1 + 1e-9, shares
    if (asked_for, seed) == (request, 1008):
        assert {name: share for name, share in shares.items() if share < NEAR[name]} == {}


def deep(ranks: int, layers: int, micro_batches: int) -> PlanRequest:
    """Equal layers in a pipeline that is all of the cluster: hardly anything but its bubble tells schedules
    apart.
    """
    spec = ModelSpec(
        layers=layers,
        hidden=4096,
        ffn_hidden=16_384,
        heads=32,
        kv_heads=8,
        vocab=1024,
        tied_embeddings=False,
    )
    pins: dict[str, int | str] = {"tp": 1, "cp": 1, "pp": ranks, "micro_batch": 1, "zero_stage": 0}
    return PlanRequest(
        model=spec,
        cluster=cluster(80.0, 16),
        gpus=ranks,
        global_batch=micro_batches,
        seq_len=8192,
        framework="torchtitan",
        pins={**pins, "recompute": "none"},
        forbids=("ep", "idle-gpus"),
    )


@pytest.mark.parametrize("shape", [(4, 8, 8), (4, 16, 8), (8, 16, 16)])
def test_bounds_know_what_split_backward_passes_save_of_a_bubble(
    shape: tuple[int, int, int],
) -> None:
    """Schedules of one variant differ by what they wait, each with its number of virtual stages."""
    asked = deep(*shape)
    space = space_of(asked)
    pricing = CostModelPricing(space.workload)
    branch = branch_of(space, pricing)
    degrees = space.degrees(asked.gpus)
    layouts, variants = space.layouts(degrees), space.variants(degrees)
    counts = space.layouts_per_variant(variants)
    own_variant = np.repeat(np.arange(len(counts)), counts)
    variant_s = bounds_of_pipelines(branch, variants, own_variant, layouts)
    relieved_s = branch.relief_bound_s(layouts)
    prices_s = []
    for at, bounds in enumerate(pricing.mapping_bounds(layouts)):
        free = replace(bounds, bound_s=np.full_like(bounds.bound_s, -np.inf))
        priced = pricing.exact(layouts.scalar(at), free, np.inf)
        assert priced is not None
        prices_s.append(priced.step_time_s)
    splits = has_trait(np.asarray(layouts.schedule), "splits_backward")
    assert splits.any()
    assert 0.92 < np.max(variant_s / prices_s) <= 1 + 1e-9
    assert np.argmax(variant_s / prices_s) in np.flatnonzero(splits)
    # What those wait depends on what is recomputed: nothing is said of them.
    assert np.all(relieved_s[splits] == 0)
    assert 0.99 < np.max(relieved_s / prices_s) <= 1 + 1e-9


@pytest.mark.parametrize("seed", [2000, 2013])
def test_no_fewer_layers_need_be_recomputed_than_just_fit(seed: int) -> None:
    space = space_of(request(seed))
    workload = space.workload
    layouts = space.layouts(space.degrees(workload.gpus))
    _, recomputed = CostModelPricing(workload).least_memory_gib(layouts)
    full = (np.asarray(layouts.recompute) & int(Recompute.FULL)) != 0
    fewest = full & (recomputed > 1) & (recomputed < ALL_LAYERS)
    assert fewest.any()
    bounds, limit_gib = peak_bounds(workload, layouts), usable_hbm_gib(workload)
    assert np.all(bounds.peak_gib(recomputed)[fewest] <= limit_gib)
    assert np.all(bounds.peak_gib(recomputed - 1)[fewest] > limit_gib)


@pytest.mark.parametrize(
    ("groups", "dp", "cp", "divides"),
    [(1, 1, 1, True), (2, 4, 1, True), (4, 4, 1, False), (3, 4, 1, False), (2, 2, 2, True)],
)
def test_groups_have_two_ranks_at_the_least(groups: int, dp: int, cp: int, divides: bool) -> None:
    assert bool(divides_into(groups, dp, cp)) == divides


@pytest.mark.parametrize("seed", [2013, pytest.param(2000, marks=pytest.mark.slow)])
def test_what_ranks_hold_is_linear_in_their_layers(seed: int) -> None:
    """Never above their memory; where a rank recomputes one layer and no others lead, its memory itself."""
    space = space_of(request(seed))
    workload = space.workload
    layouts = space.layouts(space.degrees(workload.gpus))
    compared = 0
    for at in range(0, layouts.broadcast_shape()[0], 5):
        layout = layouts.scalar(at)
        pp, main = int(layout.pp), workload.model.layers
        if pp < 2 or int(layout.vpp) > 1 or not int(layout.recompute) & Recompute.FULL:
            continue
        counts = (main - pp + 1, *[1] * (pp - 1))
        for again in range(1, main + 1):
            one = replace(layout, recompute_layers=again)
            held_gib = stage_memory_gib(workload, one, tuple((count,) for count in counts))
            for rank, row in enumerate(memory_rows(workload, layout)):
                leading = min(workload.model.dense_layers, counts[0]) if rank == 0 else 0
                row_gib = row.fixed_gib + row.layer_gib * counts[rank] + row.leading_gib * leading
                row_gib -= row.relief_gib * min(again, counts[rank])
                assert row_gib <= held_gib[rank] * (1 + 1e-9)
                compared += row_gib >= held_gib[rank] * (1 - 1e-9)
    assert compared > 10


def fitting_layouts(asked: PlanRequest) -> int:
    """Layouts with room for some split, none of which `fitting` or `holds_states` leaves out."""
    space = space_of(asked)
    pricing = CostModelPricing(space.workload)
    branch = branch_of(space, pricing)
    degrees = space.degrees(asked.gpus)
    layouts, variants = space.layouts(degrees), space.variants(degrees)
    memory_gib, _ = pricing.least_memory_gib(layouts)
    fits = memory_gib <= usable_hbm_gib(space.workload)
    of_degrees, of_variant = (
        np.repeat(np.arange(len(counts)), counts)[fits]
        for counts in (space.layouts_per_degrees(degrees), space.layouts_per_variant(variants))
    )
    assert np.all(branch.holds_states(degrees)[of_degrees])
    assert np.all(branch.fitting(degrees).ravel()[of_variant])
    return int(fits.sum())


def test_the_least_memory_is_that_of_the_share_that_keeps_least() -> None:
    """What is offloaded passes through buffers: of a large table they take more than the GPU is spared."""
    asked = on_host(1)
    spec = asked.model.model_copy(update={"layers": 2, "vocab": 262_144})
    space = space_of(replace(asked, model=spec, gpus=16, pins={"tp": 1}))
    pricing = CostModelPricing(space.workload)
    variants = space.variants(space.degrees(16))
    nothing, all_of_it = (
        pricing.recomputed_memory_gib(replace(variants, optimizer_offload=share))
        for share in (0, 100)
    )
    may = np.asarray(variants.zero_stage) > 0
    assert set(space.offloads) == {(0, 0), *((z, s) for z in (1, 2, 3) for s in (0, 100))}
    assert np.any(all_of_it[may] > nothing[may])
    assert np.any(all_of_it[may] < nothing[may])
    least_gib = np.where(may, np.minimum(nothing, all_of_it), nothing)
    found = branch_of(space, pricing)._least_memory_gib(variants)
    assert found == pytest.approx(least_gib, rel=1e-12)


@pytest.mark.parametrize("hbm_gib", [4.0, 5.0, 6.0])
@pytest.mark.parametrize(
    ("asked_for", "seeds"), [(request, (2003, 2006, 2007, 2013)), (on_host, (0, 1, 2, 4))]
)
def test_degrees_left_out_for_memory_hold_no_layout_that_fits(
    monkeypatch: pytest.MonkeyPatch,
    asked_for: Callable[[int], PlanRequest],
    seeds: Sequence[int],
    hbm_gib: float,
) -> None:
    """Asked step by step, as of very many."""
    monkeypatch.setattr("meshwright.planner.search.branches.FEW_VARIANTS", 0)
    fitting = 0
    for asked in map(asked_for, seeds):
        device = asked.cluster.device.model_copy(update={"hbm_gib": hbm_gib})
        spec = asked.cluster.model_copy(update={"device": device})
        fitting += fitting_layouts(replace(asked, cluster=spec))
    assert fitting > 0
