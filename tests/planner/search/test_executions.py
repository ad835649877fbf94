"""Executions and layouts together against a brute force over both, and what a request may choose."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from meshwright.cluster_specs.reader import load_cluster
from meshwright.constraints.registry import rules_for
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.workload import Execution
from meshwright.errors import InputError
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.plan.make_plan import fastest_plan, make_plan
from meshwright.planner.plan.verify import faults
from meshwright.planner.request.choices import ALLOW, OF_EXECUTION
from meshwright.planner.request.executions import parse_allow, parse_without
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.search import loop
from meshwright.planner.search.loop import branches_of, search_executions, search_exhaustively
from meshwright.planner.search.pricing import Outcome
from meshwright.planner.search.space import Space, space_of
from tests.planner.search.test_planner_optimum import best_by_brute_force
from tests.planner.search.test_planner_optimum import request as small_request
from tests.soaked import some

CASES = 60
SOME = (19,)
QUICK = ("fp8-attention",)
"""Words of `--allow`: one of training's states, one of its products."""


def asked(seed: int) -> PlanRequest:
    """A small problem whose batch and layers are small enough for every execution."""
    draw = random.Random(f"executions {seed}")
    request = small_request(seed)
    gpus = min(request.gpus, 4)
    pins: dict[str, int | str] = {"zero_stage": 1, "micro_batch": 1, "cp": draw.choice([1, 2])}
    if gpus % 2:
        pins["cp"] = 1
    if draw.random() < 0.4:
        pins["recompute"] = draw.choice(["none", "full"])
    without = tuple(
        name
        for name in ("deepep", "ep-overlap", "cp-a2a", "cuda-graph", "full-graph")
        if draw.random() < 0.15
    )
    # Groups of two have one way only, and each more multiplies the work by brute force.
    without = (*without, "cp-hierarchical", *(("allgather",) if seed % 3 else ()))
    without = (*without, *(("tp-overlap",) if seed % 2 else ()))
    layers = draw.choice([2, 3])
    forbids = ("selective-recompute",) if draw.random() < 0.8 and "recompute" not in pins else ()
    # Shares are five times the work by brute force.
    if seed % 6:
        forbids = (*forbids, "optimizer-offload")
    return replace(
        request,
        gpus=gpus,
        model=request.model.model_copy(update={"layers": layers}),
        global_batch=4,
        pins=pins,
        forbids=forbids,
        without=without,
    )


def every_execution(request: PlanRequest) -> list[Execution]:
    """All combinations by plain words, without what the search knows of them."""
    moe, without = request.model.moe is not None, request.without
    dispatchers = ["alltoall"]
    if moe:
        dispatchers += [name for name in ("deepep", "hybridep") if name not in without]
        if request.precision in ("bf16", "fp16") and "allgather" not in without:
            dispatchers.append("allgather")
    overlaps = [False, True] if moe and "ep-overlap" not in without else [False]
    graphs = ["none"] if "cuda-graph" in without else ["none", "partial", "full"]
    if "full-graph" in without:
        graphs = graphs[:2]
    exchanges = ["p2p"] if "cp-a2a" in without else ["p2p", "a2a", "a2a+p2p"]
    if "cp-hierarchical" in without:
        exchanges = exchanges[:2]
    recipes: list[str | None] = ["tensorwise"] if request.precision == "fp8" else [None]
    if request.precision == "fp8" and "delayed-scaling" in request.allow:
        recipes.append("delayed")
    tensor = request.model.attention is None and "tp-overlap" not in without
    values: dict[str, list[Any]] = {
        "moe_dispatch": dispatchers,
        "ep_overlap": overlaps,
        "tp_overlap": [False, True] if tensor else [False],
        "cuda_graph": graphs,
        "cp_comm": exchanges,
        "fp8_recipe": recipes,
    }
    return [
        Execution(**dict(zip(values, one, strict=True)), dp_overlap=True, pp_overlap=True)
        for one in product(*values.values())
    ]


def brute_force(request: PlanRequest) -> float | None:
    """The least step time over every execution and every layout that its rules allow."""
    times = []
    for execution in every_execution(request):
        whole: Space = space_of(request)
        # A price is that of the best size of gradient buckets: tests/costmodel/test_bucket_sizes.py.
        workload = replace(request.workload(execution), chooses_buckets=True)
        best_s = best_by_brute_force(replace(whole, workload=workload))
        if best_s is not None:
            times.append(best_s)
    return min(times, default=None)


def compare(seed: int) -> None:
    request = asked(seed)
    outcome, best_s = search_executions(request, CostModelPricing), brute_force(request)
    if best_s is None:
        assert outcome.status == "infeasible"
        return
    assert outcome.status == "optimal"
    assert outcome.best[0].step_time_s == pytest.approx(best_s, rel=1e-9)
    assert outcome.lower_bound_s == pytest.approx(best_s, rel=1e-9)


def grouped(seed: int) -> PlanRequest:
    """A small problem of dense layers over four or eight ranks of a context group, on long sequences.

    Of one in four every second layer has a window, which no ring takes.
    """
    draw = random.Random(f"grouped {seed}")
    request = small_request(seed)
    cp = draw.choice([4, 8])
    heads: dict[str, Any] = {"kv_heads": draw.choice([4, 16]), "moe": None, "mtp_layers": 0}
    heads |= {"layers": 2}
    if seed % 4 == 3:
        heads |= {"sliding_window": 512, "full_attention_every": 2}
    return replace(
        request,
        gpus=draw.choice([cp, 2 * cp]) if cp == 4 else cp,
        model=request.model.model_copy(update=heads),
        global_batch=2,
        seq_len=draw.choice([8192, 32_768]),
        pins={"zero_stage": 1, "micro_batch": 1, "cp": cp, "recompute": "none"},
        forbids=("optimizer-offload",),
        without=("full-graph",),
    )


@pytest.mark.parametrize(
    "seed",
    [
        *(0, 1, 5),
        pytest.param(3, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some((*range(6, 16), 2, 4))),
    ],
)
def test_the_best_of_both_ways_of_context_parallelism_is_found(seed: int) -> None:
    request = grouped(seed)
    outcome, best_s = search_executions(request, CostModelPricing), brute_force(request)
    if best_s is None:
        assert outcome.status == "infeasible"
        return
    assert outcome.status == "optimal"
    assert outcome.best[0].step_time_s == pytest.approx(best_s, rel=1e-9)


def exchanges_of(request: PlanRequest) -> dict[str, tuple[int, ...]]:
    """Context degrees of the branches of a request, by how they exchange."""
    return {
        branch.execution.cp_comm: branch.space.cp
        for branch in branches_of(request, CostModelPricing)
    }


def test_groups_that_swap_cost_no_branch_where_there_are_none() -> None:
    """Neither with two ranks, nor without room beside tp in a node, nor under windows."""
    both = grouped(0)
    degrees = replace(both, gpus=8, seq_len=8192, pins={"micro_batch": 1})
    assert exchanges_of(degrees) == {"p2p": (1, 2, 4, 8), "a2a": (2, 4, 8), "a2a+p2p": (4, 8)}
    ring = {"p2p": (1, 2, 4, 8), "a2a": (2, 4, 8)}
    windowed = degrees.model.model_copy(update={"sliding_window": 512, "full_attention_every": 2})
    assert exchanges_of(replace(degrees, model=windowed)) == ring
    assert exchanges_of(replace(degrees, without=("cp-hierarchical",))) == ring
    assert exchanges_of(replace(degrees, pins={"tp": 4})) == ring
    assert exchanges_of(replace(degrees, without=("cp-a2a",))) == {"p2p": (1, 2, 4, 8)}
    assert exchanges_of(replace(degrees, forbids=("cp",))) == {"p2p": (1,)}
    assert exchanges_of(replace(degrees, pins={"cp": 2})) == {"p2p": (2,), "a2a": (2,)}


def overlapping(seed: int) -> PlanRequest:
    """A small model with experts in memory enough for two micro-batches, mostly in a pipeline."""
    draw = random.Random(f"overlap {seed}")
    number = seed
    while (request := small_request(number)).model.moe is None:
        number += 1000
    pins: dict[str, int | str] = {"micro_batch": 1, "cp": 1, "recompute": "none", "zero_stage": 1}
    layers = request.model.layers
    if draw.random() < 0.75:
        pins, layers = {**pins, "pp": 2}, draw.choice([4, 5, 6])
    device = request.cluster.device.model_copy(update={"hbm_gib": 80.0})
    return replace(
        request,
        model=request.model.model_copy(update={"layers": layers}),
        cluster=request.cluster.model_copy(update={"device": device}),
        gpus=4,
        global_batch=draw.choice([4, 8, 16]),
        pins=pins,
        forbids=("selective-recompute", "optimizer-offload"),
        without=("cp-a2a", "cp-hierarchical", "cuda-graph", "tp-overlap", "allgather", "hybridep"),
    )


@pytest.mark.parametrize(
    ("seed", "overlaps"),
    [
        (1, True),
        (6, True),
        *(pytest.param(n, None, marks=pytest.mark.soak) for n in some(range(7, 31))),
    ],
)
def test_overlapped_exchanges_are_the_best_where_brute_force_has_them(
    seed: int, overlaps: bool | None
) -> None:
    """Of virtual stages (1) and without a pipeline (6): how many chunks have a pair depends on both."""
    request = overlapping(seed)
    outcome, best_s = search_executions(request, CostModelPricing), brute_force(request)
    assert outcome.best[0].step_time_s == pytest.approx(best_s, rel=1e-9)
    assert outcome.lower_bound_s == pytest.approx(best_s, rel=1e-9)
    assert overlaps in (None, outcome.best[0].execution.ep_overlap)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SOME)
def test_the_plan_is_the_best_of_all_executions(seed: int) -> None:
    compare(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", some(seed for seed in range(CASES) if seed not in SOME))
def test_the_plan_is_always_the_best_of_all_executions(seed: int) -> None:
    compare(seed)


def scaled(seed: int, hbm_gib: float, seq_len: int | None = None) -> PlanRequest:
    """A small FP8 problem that may delay its scales and recompute single modules."""
    request = asked(seed)
    device = request.cluster.device.model_copy(update={"hbm_gib": hbm_gib})
    pins = {name: value for name, value in request.pins.items() if name != "recompute"}
    return replace(
        request,
        cluster=request.cluster.model_copy(update={"device": device}),
        seq_len=seq_len or request.seq_len,
        precision="fp8",
        pins=pins,
        forbids=("optimizer-offload",),
        without=("deepep", "hybridep", "ep-overlap", "cp-a2a", "cuda-graph"),
        allow=("delayed-scaling",),
    )


def compare_scaled(seed: int, hbm_gib: float, seq_len: int | None = None) -> Outcome:
    request = scaled(seed, hbm_gib, seq_len)
    outcome, best_s = search_executions(request, CostModelPricing), brute_force(request)
    assert best_s is not None
    assert outcome.status == "optimal"
    assert outcome.best[0].step_time_s == pytest.approx(best_s, rel=1e-9)
    assert outcome.lower_bound_s == pytest.approx(best_s, rel=1e-9)
    return outcome


@pytest.mark.parametrize(
    ("seed", "hbm_gib", "recipe"),
    [
        pytest.param(43, *each, marks=pytest.mark.slow)
        for each in ((18.0, "delayed"), (16.1, "tensorwise"))
    ],
)
def test_the_recipe_of_fp8_is_the_best_of_both(seed: int, hbm_gib: float, recipe: str) -> None:
    """Delayed scaling casts in fewer passes; where norms and activations must be run again, it is refused.

    Sequences are long, so that the host, for which checkpoints are work too, does not pace the layers.
    """
    best = compare_scaled(seed, hbm_gib, 16_384).best[0]
    assert best.execution.fp8_recipe == recipe
    again = int(best.layout.recompute) & (Recompute.LAYERNORM | Recompute.MOE_ACTIVATION)
    assert bool(again) == (recipe == "tensorwise")


@pytest.mark.soak
@pytest.mark.parametrize("seed", some([2, 4, 12, 26, 37, 42, 47]))
@pytest.mark.parametrize("hbm_gib", [4.8, 5.0, 6.0])
def test_the_recipe_of_fp8_is_always_the_best_of_both(seed: int, hbm_gib: float) -> None:
    if search_executions(scaled(seed, hbm_gib), CostModelPricing).best:
        compare_scaled(seed, hbm_gib)


def test_the_recipe_of_fp8_is_chosen_only_where_it_is_allowed() -> None:
    request = scaled(21, 8.0)
    assert request.execution_options.values["fp8_recipe"] == ("tensorwise", "delayed")
    settled: tuple[dict[str, Any], ...] = ({"allow": ()}, {"pins": {"fp8_recipe": "tensorwise"}})
    for changes in settled:
        executions = replace(request, **changes).execution_options.executions()
        assert {execution.fp8_recipe for execution in executions} == {"tensorwise"}
    delayed = replace(request, pins={"fp8_recipe": "delayed"})
    executions = delayed.execution_options.executions()
    assert {execution.fp8_recipe for execution in executions} == {"delayed"}
    others: tuple[dict[str, Any], ...] = (
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"framework": "torchtitan"},
    )
    for other in others:
        executions = replace(request, **other).execution_options.executions()
        assert {execution.fp8_recipe for execution in executions} == {None}
    with pytest.raises(InputError, match=r"pin fp8_recipe.*cannot be had.*allowed: tensorwise"):
        replace(delayed, allow=())


def test_a_plan_says_what_delayed_scaling_brings() -> None:
    request = scaled(21, 8.0)
    plan = make_plan(request, robustness=False)
    assert plan.choices is not None
    choice = next(choice for choice in plan.choices if choice.choice == "fp8_recipe")
    without = fastest_plan(replace(request, allow=()))
    assert choice.value == "delayed"
    assert choice.proven
    assert choice.step_time_s_without == pytest.approx(without.objective.step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    "seed",
    [
        16,
        pytest.param(0, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some((8, 24, 32))),
    ],
)
def test_plans_verify_with_their_execution(seed: int) -> None:
    request = asked(seed)
    plan = fastest_plan(request)
    assert list(faults(request, plan)) == []


@pytest.mark.slow
def test_no_choice_makes_a_plan_slower() -> None:
    request = asked(12)
    assert request.model.moe is not None
    plan = make_plan(request, robustness=False)
    assert plan.choices is not None
    assert plan.execution is not None
    assert plan.objective.step_time_s is not None
    named = {choice.choice for choice in plan.choices}
    assert named == {
        choice.name
        for choice in OF_EXECUTION
        if getattr(plan.execution, choice.name) not in (None, choice.plain)
    }
    for choice in plan.choices:
        if choice.step_time_s_without is not None:
            assert choice.step_time_s_without >= plan.objective.step_time_s * (1 - 1e-9)
    gains = [choice.step_time_s_without or float("inf") for choice in plan.choices]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.soak
def test_a_plan_does_without_an_overlap_that_costs_more_than_it_hides() -> None:
    request = read_request(
        model="gpt-oss-20b",
        cluster="h100-leaf-3to1",
        gpus=48,
        global_batch=8,
        seq_len=4096,
        precision="fp8",
        optimizer="muon",
    )
    with_overlap = fastest_plan(replace(request, pins={"tp_overlap": "on"}))
    plan = fastest_plan(request)
    assert plan.execution is not None
    assert not plan.execution.tp_overlap
    assert plan.objective.step_time_s is not None
    assert with_overlap.objective.step_time_s is not None
    assert plan.objective.step_time_s < with_overlap.objective.step_time_s


def test_pins_and_without_are_kept() -> None:
    request = replace(asked(12), without=(), pins={"moe_dispatch": "deduplicated", "cp": 1})
    outcome = search_executions(request, CostModelPricing)
    assert {priced.execution.moe_dispatch for priced in outcome.best} <= {"deepep", "hybridep"}
    captured = replace(request, pins={}).execution_options
    assert captured.values["moe_dispatch"] == ("alltoall", "deepep", "hybridep", "allgather")
    uncaptured = replace(request, pins={}, without=("full-graph",)).execution_options
    assert uncaptured.values["moe_dispatch"] == ("alltoall", "deepep", "hybridep", "allgather")
    assert uncaptured.values["cuda_graph"] == ("none", "partial")
    on_alltoall = replace(request, pins={"moe_dispatch": "alltoall"}, without=("ep-overlap",))
    executions = on_alltoall.execution_options.executions()
    assert {execution.moe_dispatch for execution in executions} == {"alltoall"}
    assert {execution.ep_overlap for execution in executions} == {False}
    second = replace(request, pins={}, without=("deepep", "allgather")).execution_options
    assert second.values["moe_dispatch"] == ("alltoall", "hybridep")
    padded = replace(request, pins={}, precision="fp8", without=("deepep",)).execution_options
    assert padded.values["moe_dispatch"] == ("alltoall", "hybridep")


@pytest.mark.slow
def test_experts_of_one_rank_are_dispatched_by_what_sorts_copies_once() -> None:
    """Nothing is sent: the all-gather dispatcher moves 8 bytes an element of a copy, the all-to-all 12."""
    request = replace(
        asked(12),
        gpus=1,
        without=("cuda-graph", "cp-a2a", "ep-overlap"),
        pins={"ep": 1, "micro_batch": 1},
    )
    assert request.model.moe is not None
    outcome = search_executions(request, CostModelPricing)
    assert outcome.status == "optimal"
    assert outcome.best[0].execution.moe_dispatch == "allgather"
    assert outcome.best[0].step_time_s == pytest.approx(brute_force(request), rel=1e-9)


def test_what_changes_numbers_is_chosen_only_where_it_is_allowed() -> None:
    request = replace(asked(12), precision="fp8", without=())
    plain = request.execution_options.executions()[0]
    assert (plain.gradient_dtype, plain.moment_dtype) == ("fp32", "fp32")
    assert (plain.fp8_params, plain.te_loss) == (False, False)
    options = replace(request, allow=parse_allow(["all"])).execution_options
    allowed = options.executions()
    assert {run.gradient_dtype for run in allowed} == {"bf16"}
    numerics = [(run.moment_dtype, run.fp8_params, run.te_loss) for run in allowed]
    narrow, wide = ("bf16", True, True), ("fp32", False, True)
    # FP8 parameters whose scales are delayed go with an offloaded optimizer.
    assert set(numerics) == {narrow, wide, ("fp32", True, True)}
    assert numerics[0] == narrow
    tensorwise = next(run for run in allowed if run.fp8_recipe == "tensorwise")
    assert [options.goes(tensorwise, pair) for pair in ((1, 0), (1, 50))] == [True, False]
    assert {run.fp8_attention for run in allowed} == {False}
    blackwell = replace(request, cluster=load_cluster("dgx-b200"), allow=("fp8-attention",))
    assert {run.fp8_attention for run in blackwell.execution_options.executions()} == {False, True}
    sixteen = replace(request, precision="bf16", allow=("fp8-attention",))
    assert sixteen.execution_options.executions()[0] == replace(plain, fp8_recipe=None)
    ada = replace(request, cluster=load_cluster("l40s-pcie"), allow=("fp8-attention",))
    assert not any(run.fp8_attention for run in ada.execution_options.executions())
    replicated = replace(request, allow=("fp8-params", "bf16-moments"), pins={"zero_stage": 0})
    assert replicated.execution_options.executions()[0] == plain
    with pytest.raises(InputError, match="did you mean 'bf16-grads'"):
        parse_allow(["bf16-grad"])


@pytest.mark.parametrize(
    ("cluster", "overlaps"),
    [("rtx-4090-pcie", {False}), ("rtx-a6000-pcie", {False, True})],
)
def test_user_buffers_need_cards_that_reach_each_other(cluster: str, overlaps: set[bool]) -> None:
    request = read_request(model="qwen3-8b", cluster=cluster, gpus=8, global_batch=32, seq_len=2048)
    assert {run.tp_overlap for run in request.execution_options.executions()} == overlaps


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ALLOW],
)
def test_what_is_allowed_never_makes_a_plan_slower(name: str) -> None:
    request = replace(asked(12), precision="fp8", without=("cuda-graph",))
    assert request.cluster.device.architecture in ("ada", "hopper", "blackwell")
    plain = search_executions(request, CostModelPricing).best
    allowed = search_executions(replace(request, allow=(name,)), CostModelPricing).best
    assert allowed[0].step_time_s <= plain[0].step_time_s


def test_what_cannot_be_had_is_refused() -> None:
    request = asked(12)
    with pytest.raises(InputError, match=r"pin moe_dispatch.*cannot be had"):
        replace(request, pins={"moe_dispatch": "deepep"}, without=("deepep",))
    with pytest.raises(InputError, match="allowed"):
        replace(request, pins={"cuda_graph": "everything"})
    with pytest.raises(InputError, match="did you mean 'deepep'"):
        parse_without(["depep"])
    with pytest.raises(InputError, match="cannot be had"):
        replace(request, framework="torchtitan", pins={"moe_dispatch": "deepep"})


def test_rules_that_bind_an_execution_are_searched_with() -> None:
    request = replace(asked(12), without=())
    names = {
        rule.name
        for execution in request.execution_options.executions()
        for rule in rules_for(request.workload(execution))
    }
    assert {
        "megatron-flex-dispatcher",
        "megatron-expert-overlap",
        "megatron-partial-graphs",
        "megatron-full-graph",
    } <= names


def may_offload(seed: int) -> PlanRequest:
    """A small problem in FP8 or BF16 that may offload its optimizer, run plainly."""
    request = small_request(seed)
    return replace(
        request,
        pins={name: pin for name, pin in request.pins.items() if name != "zero_stage"},
        without=(
            "cuda-graph",
            "cp-a2a",
            "ep-overlap",
            "tp-overlap",
            "deepep",
            "hybridep",
            "allgather",
        ),
        precision="fp8" if seed % 2 else "bf16",
        gpus=min(request.gpus, 8),
    )


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (5008, ("bf16-moments",)),
        (5023, ("fp8-params",)),
        (5023, ("bf16-moments", "fp8-params", "delayed-scaling")),
    ],
)
def test_offloaded_optimizers_are_in_the_space_beside_narrow_numerics(
    seed: int, words: tuple[str, ...]
) -> None:
    """No optimizer with 16-bit moments, or beside FP8 parameters, is offloaded: those words ruled it out.

    With the first no layout fitted, with the others the best was slower than without them.
    """
    request = may_offload(seed)
    allowed = replace(request, allow=words)
    best = search_executions(allowed, CostModelPricing).best[0]
    assert best.layout.optimizer_offload > 0
    assert best.execution.moment_dtype == "fp32"
    one_by_one = search_exhaustively(branches_of(allowed, CostModelPricing)).best[0]
    assert best.step_time_s == pytest.approx(one_by_one.step_time_s, rel=1e-9)
    assert best.step_time_s <= search_executions(request, CostModelPricing).best[0].step_time_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5000, 5016))
def test_what_is_allowed_makes_no_plan_slower(seed: int) -> None:
    request = may_offload(seed)
    plain = search_executions(request, CostModelPricing).best
    for words in (("bf16-moments",), ("fp8-params",), ("bf16-grads", "bf16-moments", "fp8-params")):
        best = search_executions(replace(request, allow=words), CostModelPricing).best
        assert not plain or best[0].step_time_s <= plain[0].step_time_s * (1.0 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fewer", "more", "changes"),
    [
        # Moments of 16 bits want ZeRO 1, FP8 parameters no ZeRO 2: both ended without a plan.
        ("", "bf16-moments", {"forbid": "zero-1"}),
        ("megatron-fsdp", "megatron-fsdp,fp8-params", {"pin": "zero_stage=2", "precision": "fp8"}),
        # ZeRO 2 and 3 beside it took Transformer Engine's loss from ZeRO 0 and 1 too.
        ("te-loss", "te-loss,megatron-fsdp", {}),
        # Casts of 256 tokens take longer than FP8 spares of their attention.
        ("", "fp8-attention", {"cluster": "dgx-b200", "seq_len": 256, "precision": "fp8"}),
    ],
)
def test_more_that_is_allowed_rules_nothing_out(
    fewer: str, more: str, changes: dict[str, Any]
) -> None:
    asked_for: dict[str, Any] = {
        "model": "llama-3.2-1b",
        "cluster": "dgx-h100",
        "gpus": 4,
        "global_batch": 8,
        "seq_len": 4096,
        **changes,
    }
    one, other = (
        search_executions(read_request(**asked_for, allow=words), CostModelPricing).best[0]
        for words in (fewer, more)
    )
    assert other.step_time_s <= one.step_time_s * (1.0 + 1e-9)


def test_exhaustive_search_asks_no_rule_behind_its_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rules of all that was left were asked, which took minutes of a limit of ten seconds."""
    asked_for: list[Layout] = []
    monkeypatch.setattr(loop, "_first_broken", lambda layout, _: asked_for.append(layout))
    branches = branches_of(asked(12), CostModelPricing)
    outcome = search_exhaustively(branches, time_limit_s=0.0)
    assert (outcome.status, asked_for) == ("unknown", [])
