"""Measured loads inside `plan`: the placement prices the layouts, and the plan carries it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.feed_forward import routed_copies
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import kind_times
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.errors import InputError
from meshwright.model_specs.reader import read_model
from meshwright.planner.experts.inputs import Flows
from meshwright.planner.experts.recorders import token_loads
from meshwright.planner.experts.solve import PlacementEffort
from meshwright.planner.experts.training import (
    AssumedImbalance,
    ExpertLoads,
    JointRouting,
    less_copies,
    place_degree,
    post_placements,
    read_expert_loads,
)
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.texts import plan_document
from meshwright.planner.report.plan_words import space_text
from meshwright.planner.request.choices import WITHOUT
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.search.model import Experts, build_model, price_ns, solve

MIXTRAL = "mixtral-8x7b"


def rank_loads(load: np.ndarray, ep: int) -> list[float]:
    """Every imbalance that a placement of one layer can have."""
    parts = {sum(part) for part in combinations(load.tolist(), len(load) // ep)}
    return sorted(top * ep / load.sum() for top in parts if top * ep >= load.sum() * (1 - 1e-12))


@pytest.mark.slow
def test_one_model_of_layouts_and_placements_has_the_optimum_of_the_priced_sub_problem() -> None:
    chance = np.random.default_rng(11)
    for case in range(24):
        experts = int(chance.choice([4, 6, 8]))
        load = np.floor(chance.lognormal(2, 1, experts)) + 1
        allowed = [ep for ep in (1, 2, 3, 4, 6, 8) if experts % ep == 0]
        degrees = [int(ep) for ep in chance.choice(allowed, 5)]
        fixed, part = chance.uniform(1, 4, 5), chance.uniform(0.1, 3, 5)

        def price(layout: int, imbalance: float) -> float:
            # Not linear, as the cost model is not: what is hidden under compute is free.
            return float(fixed[layout] + max(part[layout] * imbalance, 1.0))  # noqa: B023

        placed = {
            ep: place_degree(load[None, None], ep, PlacementEffort(gap=0.0)) for ep in set(degrees)
        }
        apart = min(price(i, max(placed[ep].imbalance, 1.0)) for i, ep in enumerate(degrees))
        levels = [rank_loads(load, ep) for ep in degrees]
        times = [np.array([price_ns(price(i, x)) for x in mine]) for i, mine in enumerate(levels)]
        asked = [
            [AssumedImbalance(ep=ep, imbalance=x) for x in mine]
            for ep, mine in zip(degrees, levels, strict=True)
        ]
        routing = JointRouting(loads=load[None], placements={})
        built = build_model(times, experts=Experts(routing=routing, asked=asked))
        choice = solve(built, 0, None)
        assert choice.status == "optimal"
        assert choice.value is not None
        assert built.placed is not None
        assert times[choice.layout][choice.mapping] * 1e-9 == pytest.approx(apart, abs=1e-8), case
        ep = degrees[choice.layout]
        slots = built.placed.slots(ep, choice.value)[0]
        assert sorted(slots.ravel().tolist()) == list(range(experts))
        reached = load[slots].sum(axis=1).max() * ep / load.sum()
        assert reached <= levels[choice.layout][choice.mapping] + 1e-5


def test_the_search_states_placements_beside_layouts_where_they_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same plan with the placement in the model and without it; a placement no better than assumed."""
    small = read_model(MIXTRAL).model_copy(update={"layers": 4})
    assert small.moe is not None
    loads = np.random.default_rng(1).lognormal(0, 0.8, (small.moe_layers, small.moe.experts))
    placed = read_expert_loads(Path(written(tmp_path, loads)), small, 16)
    assert placed.routing() is not None
    posted: list[int] = []

    def counted(*arguments: Any) -> Any:
        posted.append(1)
        return post_placements(*arguments)

    monkeypatch.setattr("meshwright.planner.experts.training.post_placements", counted)
    request = PlanRequest(
        model=small, cluster=read_cluster("dgx-h100"), gpus=16, global_batch=32, seq_len=2048,
        expert_loads=placed, pins={"pp": 2, "cp": 1, "etp": 1, "vpp": 1},
        allow=("expert-placement",), without=WITHOUT,
    )  # fmt: skip
    together = fastest_plan(request)
    assert posted
    alone = fastest_plan(replace(request, expert_loads=replace(placed, loads=None)))
    assert together.status == alone.status == "optimal"
    assert together.objective.step_time_s == alone.objective.step_time_s
    assert together.solver.space is not None
    assert "the best placement of each degree" in space_text(together.solver.space)


def context(work: Workload, layout: Layout) -> Context:
    return make_context(work, layout, nested_placement(work.cluster, layout))


def test_imbalance_of_a_degree_prices_layouts_of_that_degree_only() -> None:
    work = Workload(
        model=read_model(MIXTRAL),
        cluster=read_cluster("dgx-a100"),
        gpus=64,
        global_batch=64,
        seq_len=2048,
    )
    uneven = replace(work, expert_imbalance_by_ep=((8, 1.5), (4, 1.2)))
    assert uneven.imbalance(np.array([1, 4, 8])).tolist() == [1.0, 1.2, 1.5]
    for ep, factor in ((8, 1.5), (2, 1.0)):
        layout = Layout(dp=8, ep=ep)
        same = replace(work, expert_imbalance=factor)
        times, expected = (kind_times(context(w, layout)).moe for w in (uneven, same))
        assert times is not None
        assert expected is not None
        assert times.parts["ep_comm"] == pytest.approx(expected.parts["ep_comm"])


def written(folder: Path, loads: np.ndarray) -> str:
    path = folder / "loads.npy"
    np.save(path, loads)
    return str(path)


def answer(**more: Any) -> Plan:
    """A plan on two nodes, without what its choices bring and what becomes of it."""
    pins = "pp=2,tp=2,cp=1,vpp=1,etp=1,zero_stage=1,micro_batch=1,ep=4"
    asked: dict[str, Any] = {"global_batch": 32, "seq_len": 2048, "memory_risk": 0.5, "pin": pins}
    request = read_request(model=MIXTRAL, cluster="dgx-h100", gpus=16, **(asked | more))
    return fastest_plan(request)


def answered(**more: Any) -> dict[str, Any]:
    """Its document."""
    return plan_document(answer(**more))


def planned(*more: str) -> tuple[int, str, str]:
    asked = [
        MIXTRAL,
        "--cluster",
        "dgx-h100",
        "--gpus",
        "16",
        "--global-batch",
        "32",
        "--seq-len",
        "2048",
        "--memory-risk",
        "0.5",
    ]
    done = CliRunner().invoke(
        main,
        [
            "plan",
            *asked,
            "--pin",
            "pp=2,tp=2,cp=1,vpp=1,etp=1,zero_stage=1,micro_batch=1",
            "--json",
            *more,
        ],
    )
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.soak
def test_the_plan_carries_the_placement_and_its_price(tmp_path: Path) -> None:
    model = read_model(MIXTRAL)
    assert model.moe is not None
    loads = np.random.default_rng(0).lognormal(0, 0.8, (model.moe_layers, model.moe.experts))
    path = Path(written(tmp_path, loads))
    plan = answer(expert_loads=path)
    uneven = plan_document(plan)
    even = answered()
    placement = uneven["expert_placement"]
    assert even["expert_placement"] is None
    assert placement["expert_model_parallel_size"] == 4
    slots = np.array(placement["physical_to_logical_map"]).reshape(model.moe_layers, 4, -1)
    balance = [loads[i][row].sum(axis=1).max() * 4 / loads[i].sum() for i, row in enumerate(slots)]
    assert placement["imbalance"] == pytest.approx(np.mean(balance))
    assert uneven["predicted"]["step_time_s"] > even["predicted"]["step_time_s"]
    steps = placement["step_time_s"]
    assert steps["in_order"] == pytest.approx(uneven["predicted"]["step_time_s"], rel=1e-12)
    assert steps["as_placed"] == pytest.approx(steps["by_load"], rel=1e-12)
    assert steps["in_order"] > steps["as_placed"]
    allowed = answered(expert_loads=path, allow="expert-placement")
    placed_s = allowed["expert_placement"]["step_time_s"]["as_placed"]
    assert allowed["objective"]["step_time_s"] == placed_s <= steps["as_placed"] * (1 + 1e-12)
    script = plan_files(plan)["launch.sh"]
    assert "Note: Megatron-LM takes no placement of experts: it deals them out" in script
    fewer: dict[str, Any] = {
        "expert_loads": path,
        "forbid": "shard-groups,selective-recompute,optimizer-offload",
        "without": WITHOUT,
    }
    exhaustive, searched = answered(**fewer, method="exhaustive"), answered(**fewer)
    assert searched["objective"]["step_time_s"] == pytest.approx(
        exhaustive["objective"]["step_time_s"]
    )
    assert searched["status"] == "optimal"


def test_touched_blocks_price_the_all_to_all_of_their_degree() -> None:
    """16 ranks on two nodes of 8: the slower links carry 1.2 copies of a token instead of 1.75 or so."""
    work = Workload(
        model=read_model(MIXTRAL),
        cluster=read_cluster("dgx-h100"),
        gpus=16,
        global_batch=16,
        seq_len=2048,
    )
    layout = Layout(dp=16, ep=8, tp=1)
    wide = replace(work, cluster=read_cluster("l40s-pcie"))
    nodes = int(np.max(nested_placement(wide.cluster, layout).ep[..., -1]))
    assert nodes == 8
    few, many = (
        replace(
            wide,
            expert_copies_by_ep=((8, 1, 1.0), (8, 2, touched), (8, 4, touched), (8, 8, touched)),
        )
        for touched in (1.2, 1.9)
    )
    costs = []
    for one in (
        few,
        many,
        replace(few, moe_dispatch="alltoall"),
        replace(many, moe_dispatch="alltoall"),
    ):
        times = kind_times(context(one, layout)).moe
        assert times is not None
        costs.append(times.parts["ep_comm"])
    assert costs[0] < costs[1]
    # A copy for every chosen expert crosses whatever the others of the token do.
    assert costs[2] == costs[3]
    # Another degree's figures price nothing here.
    plain, other = (
        kind_times(context(one, layout)).moe
        for one in (wide, replace(wide, expert_copies_by_ep=((4, 1, 1.0), (4, 2, 1.1))))
    )
    assert plain is not None
    assert other is not None
    assert plain.parts["ep_comm"] == other.parts["ep_comm"]


def test_copies_in_the_cost_model_are_a_direct_count_of_the_trace() -> None:
    chance = np.random.default_rng(5)
    topic = chance.integers(0, 4, 600)
    score = chance.gumbel(size=(2, 600, 8)) + 2.0 * (np.arange(8) % 4 == topic[:, None])
    tokens = np.argsort(-score, axis=2)[:, :, :2].astype(np.int32)
    loads = token_loads(tokens, 8)[None]
    before = place_degree(loads, 8)
    degree = less_copies(Flows(tokens=tokens), loads, before, time_limit_s=0.5)
    assert degree.imbalance <= before.imbalance + 0.005 + 1e-9
    work = replace(
        Workload(
            model=read_model(MIXTRAL),
            cluster=read_cluster("dgx-h100"),
            gpus=8,
            global_batch=8,
            seq_len=512,
        ),
        expert_copies_by_ep=ExpertLoads(placements=(degree,)).priced(placed=True)[1],
    )
    for blocks in (1, 2, 4, 8):
        total = 0
        for layer, slots in zip(tokens.tolist(), degree.slots, strict=True):
            rank = {expert: r for r, held in enumerate(slots.tolist()) for expert in held}
            total += sum(
                len({rank[expert] // (8 // blocks) for expert in token}) for token in layer
            )
        counted = routed_copies(work, np.array([float(blocks)]), np.array(8))
        assert counted[0] == pytest.approx(total / 1200)
    start = {expert: r for r, held in enumerate(before.slots[0].tolist()) for expert in held}
    apart = np.mean([len({start[e] // 4 for e in token}) for token in tokens[0].tolist()])
    assert dict(degree.copies)[2] < apart


@pytest.mark.soak
def test_a_plan_with_a_trace_carries_and_prices_what_tokens_touch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.planner.experts.training._TRAFFIC_SECONDS", 0.1)
    model = read_model(MIXTRAL)
    assert model.moe is not None
    chance = np.random.default_rng(1)
    together, scattered = tmp_path / "together.npz", tmp_path / "scattered.npz"
    pair = chance.permuted(np.tile(np.arange(0, 8, 2), (model.moe_layers, 100)), axis=1)
    np.savez(together, topk_ids=np.stack([pair, pair + 1], axis=2))
    other = (pair + chance.integers(1, 8, pair.shape)) % 8
    np.savez(scattered, topk_ids=np.stack([pair, other], axis=2))
    near, far = (
        answered(expert_loads=path, moe_dispatch="deduplicated") for path in (together, scattered)
    )
    touched = [
        {
            entry["blocks"]: entry["touched"]
            for entry in plan["expert_placement"]["blocks_per_token"]
        }
        for plan in (near, far)
    ]
    assert touched[0] == {1: 1.0, 2: 1.0, 4: 1.0}
    assert 1.3 < touched[1][2] < touched[1][4] < 2.0
    assert near["execution"]["moe_dispatch"] in ("deepep", "hybridep")
    # Experts 0 and 1, 2 and 3, ... lie together in their own order: it is as good as any.
    steps = near["expert_placement"]["step_time_s"]
    assert steps["in_order"] == near["predicted"]["step_time_s"]
    assert steps["as_placed"] <= steps["by_load"]
    assert steps["in_order"] == pytest.approx(steps["as_placed"])
    code, _, problem = planned("--moe-dispatch", "dedup")
    assert code == 2
    assert "deduplicated" in problem


def test_loads_of_another_model_are_refused(tmp_path: Path) -> None:
    path = Path(written(tmp_path, np.ones((3, 8))))
    with pytest.raises(InputError, match="3 layers x 8 experts"):
        read_expert_loads(path, read_model(MIXTRAL), 16)
    with pytest.raises(InputError, match="has no experts"):
        read_expert_loads(path, read_model("llama-2-7b"), 16)
    code, _, problem = planned("--expert-loads", str(path))
    assert code == 2
    assert "MoE layers" in problem
