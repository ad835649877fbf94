"""Groups that a user keeps inside one NVLink domain: mappings, plans, and the answer where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.cluster_specs.reader import cluster_from_mapping
from meshwright.cluster_specs.schema import BlockSpec, ClusterSpec
from meshwright.costmodel.layout import AXES, Layout
from meshwright.errors import InputError
from meshwright.planner.bounds.mappings import matrices, ranks_on
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.mapping import joint
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request

PINS = {"tp": 1, "cp": 1, "pp": 1, "dp": 16, "micro_batch": 1, "zero_stage": 1, "vpp": 1}


def listed(nodes: list[dict[str, Any]]) -> ClusterSpec:
    """DGX H100 of one leaf, with these nodes free."""
    levels = [{"name": "leaf", "gpus": 32}]
    return cluster_from_mapping(
        {"name": "listed", "base": "dgx-h100", "levels": levels, "nodes": nodes}
    )


def asked(pins: dict[str, int | str], **options: Any) -> PlanRequest:
    """A small mixture of experts on two nodes of 8 GPUs."""
    request = read_request(
        model="mixtral-8x7b", cluster="dgx-h100", gpus=16, global_batch=16, seq_len=1024, **options
    )
    model = request.model.model_copy(update={"layers": 4})
    return replace(request, model=model, pins={**PINS, **pins}, without=("deepep", "cuda-graph"))


def groups_leave_a_node(ranks: list[tuple[int, int]], stride: int, members: int) -> bool:
    """Whether a group of ranks `stride` apart has members on several nodes; such groups tile the ranks."""
    for first in range(0, len(ranks), stride * members):
        for offset in range(stride):
            own = range(first + offset, first + stride * members, stride)
            if len({ranks[rank][0] for rank in own}) > 1:
                return True
    return False


@pytest.mark.parametrize("ep", [2, 4, 8])
@pytest.mark.parametrize("degrees", [(1, 2, 4, 4), (2, 2, 4, 2), (1, 4, 8, 1), (2, 4, 4, 1)])
def test_mappings_are_those_whose_ranks_keep_groups_on_a_node(
    degrees: tuple[int, int, int, int], ep: int
) -> None:
    """By arithmetic on rank lists alone: cp groups are tp apart, ep groups of etp 1 are neighbours."""
    tp, cp, dp, pp = degrees
    layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep)
    work = replace(asked({}).workload(), gpus=32)
    every = matrices(layout, (8, 4), inside=("tp",))
    kept = CostModelPricing(replace(work, inside_domain=("cp", "ep"))).mappings(layout)
    expected = set()
    for row in range(len(every["tp"])):
        matrix = {axis: tuple(every[axis][row].tolist()) for axis in AXES}
        ranks = list(ranks_on(work.cluster, matrix))
        if not groups_leave_a_node(ranks, tp, cp) and not groups_leave_a_node(ranks, 1, ep):
            expected.add(tuple(matrix[axis] for axis in AXES))
    rows = zip(*(kept[axis].tolist() for axis in AXES), strict=True)
    assert {tuple(map(tuple, row)) for row in rows} == expected


@pytest.mark.slow
def test_the_plan_keeps_experts_inside_where_it_would_not() -> None:
    free = fastest_plan(asked({"etp": 2}))
    kept = fastest_plan(replace(asked({"etp": 2}), inside_domain=("ep",)))
    assert free.layout is not None
    assert kept.layout is not None
    assert free.layout.ep * free.layout.etp > 8 >= kept.layout.ep * kept.layout.etp
    assert kept.status == "optimal"
    assert kept.objective.step_time_s is not None
    assert free.objective.step_time_s is not None
    assert kept.objective.step_time_s > free.objective.step_time_s
    assert kept.inputs.inside_domain == ("ep",)


@pytest.mark.soak
def test_a_request_that_the_domain_refuses_names_it_and_the_change() -> None:
    request = replace(asked({"etp": 2, "ep": 8}), inside_domain=("tp", "ep"))
    plan = fastest_plan(request)
    assert plan.status == "infeasible"
    assert plan.infeasible is not None
    assert {rule.rule for rule in plan.infeasible.rules} == {"nvlink-domain", "ep", "etp"}
    assert plan.infeasible.conflict[0].startswith("nvlink-domain: groups of tp, ep tie 16 GPUs")
    change = next(each for each in plan.infeasible.changes if each.change == "inside-domain")
    assert (change.field, change.asked) == ("ep", "tp,ep")
    assert fastest_plan(replace(request, inside_domain=("tp",))).layout is not None


@pytest.mark.parametrize(
    ("text", "axes"), [("ep, cp,ep", ("ep", "cp")), (["tp", "ep"], ("tp", "ep"))]
)
def test_axes_are_read_once_each(text: str | list[str], axes: tuple[str, ...]) -> None:
    assert asked({}, inside_domain=text).inside_domain == axes


def test_other_axes_are_refused() -> None:
    with pytest.raises(InputError, match="inside_domain: 'pp' is not known; allowed: tp, cp, ep"):
        asked({}, inside_domain="pp")


@pytest.mark.parametrize(
    "dispatcher", ["deepep", pytest.param("hybridep", marks=pytest.mark.slow), "alltoall"]
)
def test_kernels_that_share_memory_join_no_ranks_of_two_nodes(dispatcher: str) -> None:
    """On two nodes with 7 free GPUs ranks 6 and 7 share experts; all-to-all alone may."""
    nodes = [{"name": "a[0-1]", "leaf": "l0", "free_gpus": 7}]
    plan = fastest_plan(
        read_request(
            model="olmoe-1b-7b",
            cluster=listed(nodes),
            gpus=14,
            global_batch=28,
            seq_len=2048,
            pin=f"tp=1,cp=1,pp=1,ep=2,etp=1,moe_dispatch={dispatcher},micro_batch=1,zero_stage=1",
        )
    )
    assert plan.layout is not None
    assert (plan.layout.dp == 14) == (dispatcher == "alltoall")


@pytest.mark.slow
def test_nodes_where_no_mapping_keeps_experts_inside_have_no_plan() -> None:
    """7 and 5 free GPUs: every mapping of 12 ranks cuts a pair."""
    nodes = [
        {"name": "a0", "leaf": "l0", "free_gpus": 7},
        {"name": "a1", "leaf": "l0", "free_gpus": 5},
    ]
    plan = fastest_plan(
        read_request(
            model="olmoe-1b-7b",
            cluster=listed(nodes),
            gpus=12,
            global_batch=24,
            seq_len=2048,
            pin="tp=1,cp=1,pp=1,dp=12,ep=2,etp=1,micro_batch=1,zero_stage=1,recompute=none",
            without="deepep,hybridep,allgather,ep-overlap,cuda-graph",
            inside_domain="ep",
        )
    )
    assert plan.layout is None
    assert plan.status == "infeasible"


def in_racks(*nodes: int, **options: Any) -> PlanRequest:
    """OLMoE on so many nodes of each rack of GB200, listed without levels; experts stay in their rack."""
    cluster = cluster_from_mapping(
        {
            "name": "racks",
            "base": "gb200-nvl72",
            "nodes": [
                {"name": f"r{rack}-{node}", "leaf": f"r{rack}"}
                for rack, count in enumerate(nodes)
                for node in range(count)
            ],
        }
    )
    return read_request(
        model="olmoe-1b-7b",
        cluster=cluster,
        gpus=4 * sum(nodes),
        seq_len=4096,
        inside_domain="ep",
        without="ep-overlap,tp-overlap,cuda-graph",
        **options,
    )


def test_racks_without_levels_are_domains_of_their_own() -> None:
    """Three nodes of each of two racks: priced as one NVLink domain of 24, an internal error ended it."""
    levels = fabric_levels(in_racks(3, 3, global_batch=24).cluster, 24)
    assert dict(zip(levels.names, levels.blocks.tolist(), strict=True)) == {
        "nvlink": 12,
        "fabric": 24,
    }
    pins = "tp=1,cp=1,pp=1,dp=24,micro_batch=1,zero_stage=1"
    assert fastest_plan(in_racks(3, 3, global_batch=24, pin=f"{pins},ep=4")).status == "optimal"
    refused = in_racks(3, 3, global_batch=24, pin=f"{pins},ep=8")
    assert fastest_plan(refused, explained=False).status == "infeasible"


@pytest.mark.parametrize("method", ["cp-sat", "exhaustive"])
def test_nothing_is_called_infeasible_of_which_no_mapping_was_decided(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 ranks go together into the second rack, in another order than that of hosts; without work to look
    for it, a model of all may still have it.
    """
    request = in_racks(
        3,
        5,
        global_batch=16,
        pin="tp=1,cp=1,pp=1,dp=16,ep=16,micro_batch=1,zero_stage=1,recompute=none",
        method=method,
    )
    plan = fastest_plan(request)
    assert plan.status == "optimal"
    monkeypatch.setattr(joint, "ALL_WORK", 0.0)
    unasked = fastest_plan(request)
    assert unasked.status == ("optimal" if method == "cp-sat" else "unknown")
    assert unasked.predicted is None or unasked.predicted.step_time_s == plan.objective.step_time_s


def test_a_model_may_say_that_no_layout_has_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two groups of 16 are in racks of 12 and 20; the model's word for it ended in an internal error."""
    monkeypatch.setattr(joint, "ALL_WORK", 0.0)
    pins = "tp=1,cp=1,pp=1,dp=32,ep=16,micro_batch=1"
    plan = fastest_plan(in_racks(3, 5, global_batch=32, pin=pins), explained=False)
    assert plan.status in ("unknown", "infeasible")


@pytest.mark.parametrize(("nodes", "dp", "etp"), [((1, 1), 8, 8), ((3, 5), 24, 8), ((3, 5), 16, 4)])
def test_tensor_groups_of_experts_stay_in_their_rack(
    nodes: tuple[int, ...], dp: int, etp: int
) -> None:
    """As far as racks have room: eight ranks on two nodes were priced as if in one rack wherever they were,
    an internal error, as what was proven was not what the plan takes.
    """
    pins = f"tp=1,cp=1,pp=1,dp={dp},ep=1,etp={etp},micro_batch=1,zero_stage=1"
    asked_of = in_racks(*nodes, global_batch=dp, pin=pins)
    blocks = (BlockSpec(leaf="r0", background=0.5),)
    cluster = asked_of.cluster.model_copy(update={"blocks": blocks})
    request = replace(asked_of, cluster=cluster, inside_domain=())
    plan = fastest_plan(request, explained=False)
    assert plan.mapping is not None
    assert plan.mapping.ranks is not None
    racks = [cluster.nodes[node].leaf for node, _ in plan.mapping.ranks]
    groups = [racks[first : first + etp] for first in range(0, dp, etp)]
    assert all(len(set(group)) == 1 for group in groups) or max(nodes) * 4 < etp
