"""Plans whose expert groups are cut into unequal parts: no links are busy for longer than the step."""

from __future__ import annotations

from functools import cache

import pytest

from meshwright.cluster_specs.reader import cluster_from_mapping, load_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.reader import read_request


def free_nodes(*free: int) -> ClusterSpec:
    """DGX H100 of one leaf, with so many free GPUs on each node."""
    nodes = [
        {"name": f"a{index}", "leaf": "l0", "free_gpus": count} for index, count in enumerate(free)
    ]
    return cluster_from_mapping({"name": "listed", "base": "dgx-h100", "nodes": nodes})


@cache
def plan_on(parts: str, overlap: str) -> Plan:
    """A mixture of 64 experts, whose tokens NCCL's all-to-all exchanges; made once for all that is asked."""
    cluster, gpus, ep = CASES[parts]
    asked = read_request(
        model="olmoe-1b-7b",
        cluster=cluster,
        gpus=gpus,
        global_batch=4 * gpus,
        seq_len=4096,
        pin=f"tp=1,cp=1,pp=1,etp=1,moe_dispatch=alltoall,ep_overlap={overlap},dp={gpus},ep={ep},"
        "micro_batch=1,zero_stage=1",
    )
    return fastest_plan(asked)


CASES = {
    "6 + 2": (free_nodes(6, 2), 8, 8),
    "6 + 2, 4 + 4, 2 + 6": (free_nodes(6, 6, 6, 6), 24, 8),
    "7 + 1 and so on": (free_nodes(7, 7, 2), 16, 8),
    "4, 1 + 3": (free_nodes(5, 5, 6), 16, 4),
    "4, 3 + 1, 2 + 2": (free_nodes(7, 7, 6), 20, 4),
    "64 + 8 in racks of 72": (load_cluster("gb200-nvl72"), 576, 64),
    "64 of a rack": (load_cluster("gb200-nvl72"), 192, 64),
}
"""Machine, GPUs, and ranks of an expert group, by the parts that groups lie in."""


QUICK = ("6 + 2", "4, 3 + 1, 2 + 2", "64 + 8 in racks of 72", "64 of a rack")
"""One of each shape."""
EVERY = [pytest.param(parts, marks=() if parts in QUICK else pytest.mark.slow) for parts in CASES]


@pytest.mark.parametrize(
    ("parts", "overlap"),
    [
        *(
            pytest.param(parts, "off", marks=() if parts in QUICK else pytest.mark.slow)
            for parts in CASES
        ),
        *(
            pytest.param(
                parts, "on", marks=pytest.mark.slow if parts in QUICK else pytest.mark.soak
            )
            for parts in CASES
        ),
    ],
)
def test_links_are_no_longer_busy_than_the_step(parts: str, overlap: str) -> None:
    """What the fullest GPU sends, rank by rank, against the price of the step."""
    plan = plan_on(parts, overlap)
    assert plan.predicted is not None
    traffic = plan.predicted.level_traffic
    assert any(level.by_axis.get("ep") for level in traffic)
    assert [level.level for level in traffic if level.utilisation > 1] == []


@pytest.mark.parametrize("parts", EVERY)
def test_nothing_hides_the_busy_links_of_an_exchange_in_the_open(parts: str) -> None:
    """Without overlap the step has the whole exchange as its own part; gradients are the small rest."""
    plan = plan_on(parts, "off")
    assert plan.predicted is not None
    in_the_open_s = sum(plan.predicted.breakdown_s[part] for part in ("ep_comm", "dp_comm"))
    assert [
        level.level for level in plan.predicted.level_traffic if level.busy_s > in_the_open_s
    ] == []
