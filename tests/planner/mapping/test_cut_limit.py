"""Cuts used at most to a share: mappings by enumeration, plans that change, the answer where none is left."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.allocation import is_irregular
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.volumes import CutUse
from meshwright.costmodel.workload import Workload
from meshwright.errors import InputError
from meshwright.planner.bounds.exact_cost import MappingBounds, Priced
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.mapping.pricing import CutLimitedPricing, cut_uses, pricing_of
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from tests.planner.mapping.irregular import random_request

PINS = "tp=2,pp=2,cp=2,dp=4,micro_batch=1,zero_stage=1,vpp=1,recompute=none"
LAYOUT = Layout(tp=2, cp=2, pp=2, dp=4, num_micro_batches=32, zero_stage=1, sequence_parallel=True)


def _largest_use(work: Workload, priced: Priced) -> float:
    return max(cut_uses(work, priced).values(), default=0.0)


def asked(**options: Any) -> PlanRequest:
    """Llama 2 7B on 32 GPUs under leaves with a third of the links up."""
    return read_request(
        model="llama-2-7b",
        cluster="h100-leaf-3to1",
        gpus=32,
        global_batch=128,
        seq_len=4096,
        without="tp-overlap,cuda-graph,full-graph",
        **options,
    )


def every_mapping(pricing: CostModelPricing) -> MappingBounds:
    table = pricing.mappings(LAYOUT)
    return MappingBounds(matrices=table, bound_s=np.full(len(table["tp"]), -inf))


@pytest.mark.parametrize("limit", [0.9, 0.5, 0.47, 0.3])
def test_the_best_mapping_is_that_of_enumeration(limit: float) -> None:
    work = replace(asked().workload(), max_cut_use=limit)
    free, limited = CostModelPricing(work), CutLimitedPricing(work)
    bounds = every_mapping(free)
    prices = []
    for row in range(len(bounds.bound_s)):
        alone = np.where(np.arange(len(bounds.bound_s)) == row, -inf, inf)
        priced = free.exact(LAYOUT, replace(bounds, bound_s=alone), inf)
        assert priced is not None
        if _largest_use(work, priced) <= limit:
            prices.append(priced.step_time_s)
    chosen = limited.exact(LAYOUT, bounds, inf)
    assert (len(prices) == len(bounds.bound_s)) == (limit == 0.9)
    if not prices:
        assert chosen is None
        return
    assert chosen is not None
    assert chosen.step_time_s == min(prices)
    fastest = free.exact(LAYOUT, bounds, inf)
    assert fastest is not None
    assert (chosen.matrix != fastest.matrix) == (_largest_use(work, fastest) > limit)


@pytest.mark.slow
def test_a_starved_cut_changes_the_plan() -> None:
    free = fastest_plan(asked(pin=PINS))
    starved = fastest_plan(asked(pin=PINS, max_cut_use=0.52))
    assert starved.status == "optimal"
    assert starved.layout is not None
    assert free.layout is not None
    # Two groups send a quarter less out of a node, four less still; one at the limit is 20 % slower.
    assert free.layout.shard_groups == 1 < starved.layout.shard_groups
    one_group = fastest_plan(asked(pin=f"{PINS},shard_groups=1", max_cut_use=0.52))
    assert (one_group.mapping, one_group.execution) != (free.mapping, free.execution)
    assert one_group.objective.step_time_s is not None
    assert starved.objective.step_time_s is not None
    assert one_group.objective.step_time_s > 1.12 * starved.objective.step_time_s
    assert free.objective.step_time_s is not None
    assert starved.objective.step_time_s > free.objective.step_time_s
    used = [each.value / each.limit for each in starved.binding if each.rule == "bisection"]
    assert 0 < max(used) <= 0.52


@pytest.mark.soak
def test_a_cut_without_a_way_out_names_the_rule_and_what_would_do() -> None:
    request = asked(pin=PINS, max_cut_use=0.15)
    plan = fastest_plan(request)
    assert plan.status == "infeasible"
    assert plan.infeasible is not None
    assert plan.infeasible.rules[0].rule == "bisection"
    change = next(each for each in plan.infeasible.changes if each.change == "max-cut-use")
    assert isinstance(change.value, float)
    again = fastest_plan(replace(request, max_cut_use=change.value))
    assert again.layout is not None
    assert "device-hbm-gib" not in {each.change for each in plan.infeasible.changes}


def test_other_jobs_use_the_cut_too() -> None:
    """Of 100 GB/s others use 20: half of the other 80 GB/s make 60 of 100."""
    cut = CutUse(
        level="leaf", cut="uplink", phase="gradients", block="", bytes_per_gpu=1.0,
        gb_per_s=80.0, busy_s=1.0, phase_s=2.0, others_share=0.2,
    )  # fmt: skip
    assert cut.total_use == pytest.approx(0.6)


def test_what_levels_state_of_other_jobs_counts() -> None:
    request = asked()
    pod = request.cluster.model_copy(
        update={
            "levels": (
                request.cluster.levels[0].model_copy(update={"gpus": 16, "background": 0.4}),
                *request.cluster.levels[1:],
            )
        }
    )
    work = replace(request, cluster=pod).workload()
    pricing = CostModelPricing(work)
    priced = pricing.exact(LAYOUT, every_mapping(pricing), inf)
    assert priced is not None
    assert _largest_use(work, priced) >= 0.4


def test_at_one_nothing_is_limited() -> None:
    assert type(pricing_of(asked().workload())) is CostModelPricing
    assert type(pricing_of(asked(max_cut_use=0.99).workload())) is CutLimitedPricing


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_shares_out_of_range_are_refused(share: float) -> None:
    with pytest.raises(InputError, match="max_cut_use"):
        asked(max_cut_use=share)


def test_leaves_that_differ_are_refused() -> None:
    request = next(each for each in map(random_request, range(50)) if is_irregular(each.cluster))
    with pytest.raises(InputError, match="leaves are alike"):
        replace(request, max_cut_use=0.5)


@pytest.mark.slow
def test_without_a_plan_the_least_use_that_was_found_is_said() -> None:
    narrow = {"pin": PINS, "forbid": "optimizer-offload,shard-groups"}
    plan = fastest_plan(asked(max_cut_use=0.15, **narrow), explained=False)
    used = re.search(r"uses some cut to ([\d.]+)% or more, 15.0% are allowed", plan.warnings[0])
    assert used is not None
    least = float(used[1]) / 100
    assert fastest_plan(asked(max_cut_use=least + 0.001, **narrow)).layout is not None
