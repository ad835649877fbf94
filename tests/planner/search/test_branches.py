"""Degrees that are dropped whole hold no layout that any rule lets through, and all of theirs are counted."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.frameworks.record import FrameworkName
from meshwright.model_specs.reader import read_model
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search import branches
from meshwright.planner.search.branches import LeastFirst, sparing_recompute
from meshwright.planner.search.loop import LayoutSearch, branch_of
from meshwright.planner.search.pricing import Certificate
from meshwright.planner.search.space import space_of
from tests.places import DATA
from tests.planner.search.test_planner_space import rows, space

CASES: dict[str, dict[str, Any]] = {
    "latent attention and experts": {"model": "deepseek-v2", "gpus": 16, "global_batch": 2},
    "experts": {"model": "olmoe-1b-7b", "gpus": 4, "global_batch": 8, "reserve_gib": 60.0},
    "dense": {"model": "llama-3-8b", "gpus": 4, "global_batch": 8, "reserve_gib": 30.0},
    "torchtitan": {"framework": "torchtitan", "gpus": 4, "global_batch": 8, "reserve_gib": 50.0},
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_dropped_whole_has_no_legal_layout(name: str) -> None:
    own = space(**CASES[name])
    branch = branch_of(own, CostModelPricing(own.workload))
    degrees = own.degrees(own.workload.gpus)
    certificate = Certificate()
    kept, _, _ = branch.expanded(degrees, inf, certificate)
    every, _, _ = branch.promising_layouts(own.layouts(degrees), inf, Certificate())
    assert sorted(rows(kept)) == sorted(rows(every))
    dropped = sum(certificate.ruled_out.values())
    assert dropped + len(rows(kept)) == int(own.layouts_per_degrees(degrees).sum())
    assert certificate.ruled_out["hbm"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "latent attention and experts" else ())
        for name in CASES
    ],
)
def test_rules_asked_before_memory_forbid_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branches, "FEW_VARIANTS", 1)
    own = space(**CASES[name])
    branch = branch_of(own, CostModelPricing(own.workload))
    layouts = own.layouts(own.degrees(own.workload.gpus))
    memory_gib, amounts = branch.pricing.least_memory_gib(layouts)
    layouts = replace(layouts, recompute_layers=amounts)
    legal = layouts.take(branch.legal(layouts, memory_gib, Certificate()))
    kept, _, _ = branch.promising_layouts(layouts, inf, Certificate())
    assert sorted(rows(kept)) == sorted(rows(legal))


@pytest.mark.parametrize("name", CASES)
def test_no_recomputation_keeps_less_than_the_sparing_ones(name: str) -> None:
    own = space(**CASES[name])
    pricing = CostModelPricing(own.workload)
    degrees = own.degrees(own.workload.gpus)
    count = degrees.broadcast_shape()[0]
    least_gib, sparing_gib = (
        pricing.recomputed_memory_gib(each.variants(degrees)).reshape(count, -1).min(axis=1)
        for each in (own, replace(own, recompute=sparing_recompute(own)))
    )
    assert np.all(sparing_gib <= least_gib * (1 + 1e-12))


def test_modules_are_joined_and_full_recomputation_stands_alone() -> None:
    own = space("deepseek-v2")
    every_module = Recompute.LAYERNORM | Recompute.MOE_ACTIVATION | Recompute.MLA_UP_PROJECTION
    assert {int(every_module), int(Recompute.FULL)} < set(own.recompute)
    joined, *others = sparing_recompute(own)
    assert joined & every_module == every_module
    assert others == [Recompute.FULL]
    assert sparing_recompute(replace(own, recompute=(int(Recompute.FULL),))) == (Recompute.FULL,)


@pytest.mark.parametrize(
    ("model", "framework"),
    [
        ("jamba", "megatron"),
        ("deepseek-v3.2", "torchtitan"),
        ("qwen3-next", "deepspeed"),
        ("maverick", "torchtitan"),
    ],
)
def test_a_framework_that_cannot_run_a_model_is_refused_before_any_search(
    model: str, framework: FrameworkName
) -> None:
    files = {
        "jamba": "jamba-v0.1",
        "qwen3-next": "qwen3-next-80b-a3b",
        "maverick": "llama-4-maverick",
    }
    path = DATA / "hf_configs" / f"{files[model]}.json" if model in files else model
    asked = PlanRequest(
        model=read_model(str(path)),
        cluster=read_cluster("dgx-h100", gpus=64),
        gpus=64,
        global_batch=64,
        seq_len=4096,
        framework=framework,
    )
    own = space_of(asked)
    outcome = LayoutSearch(own, [branch_of(own, CostModelPricing(own.workload))]).run()
    assert outcome.status == "infeasible"
    assert (outcome.certificate.layouts, outcome.certificate.priced) == (0, 0)


@pytest.mark.parametrize("seed", range(40))
def test_least_first_is_a_stable_sort_however_it_is_asked(seed: int) -> None:
    chance = np.random.default_rng(seed)
    size = int(chance.integers(0, 400))
    values = chance.integers(0, int(chance.choice([2, 30, 10_000])), size).astype(np.float64)
    values[chance.random(size) < 0.1] = inf
    below = float(chance.choice([inf, 1.0, 5_000.0]))
    order = LeastFirst(values, below, together=int(chance.integers(1, 50)))
    wanted = [
        row for row in sorted(range(size), key=lambda row: values[row]) if values[row] < below
    ]
    assert len(order) == len(wanted)
    start = 0
    while start < size:
        stop = start + int(chance.integers(1, 60))
        assert order.take(start, stop).tolist() == wanted[start:stop]
        start = stop
    assert order.take(0, size).tolist() == wanted


def test_what_brought_nothing_is_not_priced_again_ahead_of_further_degrees() -> None:
    """Llama 4 Scout in eight stages on 16 H100 took a minute for such prices, and had bounded few degrees."""
    bounds_s: list[float] = [1.0]
    priced: list[int] = []
    search = cast(
        LayoutSearch,
        SimpleNamespace(
            _remaining_s=lambda: None,
            _first=None,
            _pool=SimpleNamespace(least_s=lambda: bounds_s[-1]),
            _price_s=2.0,
            _in_vain_s=inf,
            _is_promising=lambda: True,
            _improve=priced.append,
        ),
    )
    none = Layout(pp=np.array([], dtype=np.int64))
    for bounds_s[-1] in (1.0, 1.0, 1.5, 0.5, 0.75):
        LayoutSearch._expand(search, 0, none, None, together=128)
    assert len(priced) == 2
