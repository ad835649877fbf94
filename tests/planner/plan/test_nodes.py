"""Which nodes a plan takes: against every choice, the first ones, and a leaf left out by hand."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from meshwright.cluster_specs.allocation import check_gpus, of_nodes
from meshwright.cluster_specs.reader import cluster_from_mapping, load_cluster
from meshwright.cluster_specs.schema import BlockSpec, ClusterSpec
from meshwright.costmodel.layout import Layout
from meshwright.errors import InputError
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.plan.assemble import plan_from_outcome
from meshwright.planner.plan.best_plan import search_with_buckets
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.nodes import decide_on_nodes
from meshwright.planner.plan.verify import faults
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import limited_to_nodes, read_request
from meshwright.planner.search.pricing import ALL_PLANS, Certificate, Outcome, Sought
from meshwright.planner.search.space import space_of
from meshwright.planner.solvers.clock import within
from tests.own_buckets import keep_own_buckets
from tests.planner.plan.test_recount import differences
from tests.scattered import scattered_cluster
from tests.soaked import some

SMALL_PINS = "tp=8,cp=1,vpp=1,micro_batch=1,recompute=none,zero_stage=1"


@pytest.fixture(autouse=True)
def own_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are compared as they were searched."""
    keep_own_buckets(monkeypatch)


def small(cluster: ClusterSpec, gpus: int, batch: int, pin: str = SMALL_PINS) -> PlanRequest:
    without = "deepep,hybridep,ep-overlap,cuda-graph,cp-a2a"
    return read_request(
        model="llama-3-8b",
        cluster=cluster,
        gpus=gpus,
        global_batch=batch,
        seq_len=4096,
        pin=pin,
        without=without,
        forbid="idle-gpus",
    )


def seconds(plan: Plan) -> float:
    assert plan.objective.step_time_s is not None
    return plan.objective.step_time_s


def on_nodes(request: PlanRequest, indices: tuple[int, ...]) -> float:
    """The plan on exactly these nodes."""
    nodes = tuple(request.cluster.nodes[index] for index in indices)
    own = request.cluster.model_copy(update={"nodes": nodes, "gpus": 8 * len(nodes)})
    return seconds(fastest_plan(replace(request, cluster=own)))


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in some((2, 3))),
    ],
)
def test_no_choice_of_nodes_is_faster(seed: int) -> None:
    """Four of the nodes of three leaves, all combinations by hand."""
    cluster = scattered_cluster(random.Random(seed), leaves=3, per_leaf=2, free=5)
    request = small(cluster, 32, 32)
    plan = fastest_plan(request)
    brute_s = min(on_nodes(request, chosen) for chosen in combinations(range(5), 4))
    assert seconds(plan) == pytest.approx(brute_s, rel=1e-9)
    bound_s = plan.objective.lower_bound_s
    assert bound_s is not None
    assert bound_s <= brute_s * (1 + 1e-9)
    assert differences(plan) == []


def test_a_leaf_that_others_fill_is_left_out() -> None:
    cluster = scattered_cluster(random.Random(3), leaves=3, per_leaf=3, free=7)
    leaf = cluster.nodes[0].leaf
    busy = cluster.model_copy(update={"blocks": (BlockSpec(leaf=leaf, background=0.99),)})
    rest = tuple(node for node in cluster.nodes if node.leaf != leaf)
    without = cluster.model_copy(update={"nodes": rest, "gpus": 8 * len(rest)})
    plan = fastest_plan(small(busy, without.gpus, 3 * without.gpus))
    assert seconds(plan) <= 1.01 * seconds(
        fastest_plan(small(without, without.gpus, 3 * without.gpus))
    )
    assert plan.mapping is not None
    assert plan.mapping.ranks is not None
    assert all(busy.nodes[node].leaf != leaf for node, _ in plan.mapping.ranks)
    assert plan.left_out is not None
    assert str(leaf) in plan.left_out


def of_three_nodes(background: float, gpus: int = 24) -> PlanRequest:
    """32B on nodes of A100 of 40 GB, each on a leaf of its own; others use some of the links of one."""
    leaves = ({"name": "leaf", "gpus": 8}, {"name": "core", "gpus": 256})
    cluster = cluster_from_mapping(
        {
            "name": "three leaves",
            "base": "dgx-a100-40gb",
            "levels": list(leaves),
            "nodes": [{"name": f"n-{leaf}", "leaf": leaf} for leaf in "abc"],
            "blocks": [{"leaf": "c", "background": background}],
        }
    )
    return read_request(
        model="qwen3-32b",
        cluster=cluster,
        gpus=gpus,
        global_batch=48,
        seq_len=4096,
        pin="tp=8,micro_batch=1",
        without="tp-overlap",
    )


def test_leaves_that_others_fill_are_not_left_out_where_the_rest_is_too_few() -> None:
    """16 of 24 GPUs took 15.7 s, which was the bound too; all of them take less."""
    plan = fastest_plan(of_three_nodes(0.9))
    on_two = fastest_plan(limited(of_three_nodes(0.9, 16), "n-a,n-b"))
    free = fastest_plan(of_three_nodes(0.0))
    assert seconds(free) < seconds(plan) < 0.8 * seconds(on_two)
    assert plan.inputs.gpus == 24
    assert plan.left_out is None
    bound_s = plan.objective.lower_bound_s
    assert bound_s is not None
    assert bound_s <= seconds(free) * (1 + 1e-9)


def four_nodes(rates: tuple[int, ...], used: tuple[float, ...] = ()) -> ClusterSpec:
    """Each on a leaf of its own, two of these in a pod; `used` is the share of links that others have."""
    nodes = [
        {
            "name": f"n{index}",
            "leaf": f"l{index}",
            "pod": f"p{index // 2}",
            "nic_gbps_per_gpu": rate,
        }
        for index, rate in enumerate(rates)
    ]
    levels = [
        {"name": "leaf", "gpus": 8},
        {"name": "pod", "gpus": 16, "oversubscription": 2},
        {"name": "core", "gpus": 512, "oversubscription": 2},
    ]
    blocks = [{"leaf": f"l{index}", "background": share} for index, share in enumerate(used)]
    return cluster_from_mapping(
        {"base": "dgx-h100", "levels": levels, "nodes": nodes, "blocks": blocks}
    )


def test_nodes_with_slower_adapters_are_left_out_where_that_is_faster() -> None:
    """All nodes that are free counted with the slowest of them: the first two were called optimal."""
    pins = "tp=1,cp=1,pp=1,micro_batch=1"
    asked = small(four_nodes((100, 100, 400, 400)), 16, 32, pins)
    plan = fastest_plan(asked)
    assert plan.status == "optimal"
    assert seconds(plan) == on_nodes(asked, (2, 3)) < on_nodes(asked, (0, 1))
    assert plan.left_out == "slower adapters: n0, n1, left out"
    slow = replace(small(four_nodes((2, 2, 400, 400)), 32, 32, pins), forbids=())
    plan = fastest_plan(slow)
    assert plan.inputs.gpus == 16
    assert plan.left_out is not None
    assert plan.left_out.startswith("planned on 16 of the 32 GPUs asked for; slower adapters: n0")
    assert seconds(fastest_plan(replace(slow, forbids=("idle-gpus",)))) > seconds(plan)


def alone_on(request: PlanRequest, indices: tuple[int, ...]) -> Plan:
    """The plan where nothing else is free; links are as they were."""
    nodes = tuple(
        node.model_copy(update={"free_gpus": 8 * (index in indices)})
        for index, node in enumerate(request.cluster.nodes)
    )
    gpus = 8 * len(indices)
    own = request.cluster.model_copy(update={"nodes": nodes, "gpus": gpus})
    return fastest_plan(replace(request, cluster=own, gpus=gpus))


def test_leaves_whose_links_are_unlike_are_unlike_choices() -> None:
    """Two nodes behind links that others use were called optimal: the next two, as many, counted as alike."""
    asked = small(four_nodes((400,) * 4, (0.6, 0.6)), 16, 32, "tp=1,cp=1,pp=1,micro_batch=1")
    first_s, next_s = (seconds(alone_on(asked, taken)) for taken in ((0, 1), (2, 3)))
    assert seconds(fastest_plan(asked)) == next_s < first_s


def test_nodes_whose_links_others_use_are_left_idle_where_that_is_faster() -> None:
    """All four, paced by the busiest link, were called optimal: two took 17 % less."""
    request = read_request(
        model="llama-2-7b",
        cluster=four_nodes((400,) * 4, (0.3, 0.6)),
        gpus=32,
        global_batch=32,
        seq_len=1024,
        framework="fsdp2",
        pin="tp=1,cp=1,pp=1,micro_batch=1,cuda_graph=none",
    )
    plan, two = fastest_plan(request), alone_on(request, (2, 3))
    assert (plan.status, seconds(plan)) == ("optimal", seconds(two))
    assert seconds(plan) < 0.9 * seconds(fastest_plan(replace(request, forbids=("idle-gpus",))))
    assert plan.inputs.gpus == 16
    assert plan.left_out == "planned on 16 of the 32 GPUs asked for; faster without n0, n1"


def of_alike_leaves(per_leaf: int, gpus: int, batch: int, used: tuple[float, ...]) -> PlanRequest:
    """7B on leaves with as many nodes, behind a core of a quarter of their links."""
    nodes = [
        {"name": f"n{leaf}-{index}", "leaf": f"l{leaf}"}
        for leaf in range(len(used))
        for index in range(per_leaf)
    ]
    size = 8 * per_leaf
    cluster = {
        "base": "dgx-h100",
        "levels": [
            {"name": "leaf", "gpus": size},
            {"name": "core", "gpus": 64 * size, "oversubscription": 4},
        ],
        "nodes": nodes,
        "blocks": [
            {"leaf": f"l{leaf}", "background": share} for leaf, share in enumerate(used) if share
        ],
    }
    return read_request(
        model="llama-2-7b",
        cluster=cluster_from_mapping(cluster),
        gpus=gpus,
        global_batch=batch,
        seq_len=1024,
        framework="fsdp2",
        pin="tp=1,cp=1,pp=1,micro_batch=1,cuda_graph=none",
    )


def test_alike_leaves_need_not_be_taken_in_equal_parts() -> None:
    """40 of 48 GPUs were priced as five nodes on leaves of their own: three and two took 36 % less."""
    request = of_alike_leaves(3, 48, 40, (0.0, 0.0))
    plan, five = fastest_plan(request), alone_on(request, (0, 1, 2, 3, 4))
    assert plan.status == "optimal"
    assert seconds(plan) == pytest.approx(seconds(five), rel=1e-9)
    assert differences(plan) == []


@pytest.mark.slow
def test_a_bound_holds_for_sets_of_nodes_that_were_not_searched() -> None:
    """Of many unlike sets the likely ones are searched; what they leave open is no proof."""
    request = of_alike_leaves(4, 128, 72, (0.0, 0.2, 0.4, 0.6))
    plan = fastest_plan(request)
    bound_s = plan.objective.lower_bound_s
    assert bound_s is not None
    for taken in (
        (*range(8), 8),
        (*range(9), 9)[:9],
        (0, 1, 2, 4, 5, 6, 8, 9, 10),
        tuple(range(8)),
    ):
        step_s = seconds(alone_on(request, taken))
        assert bound_s <= step_s * (1 + 1e-9)
        assert plan.status == "feasible" or seconds(plan) <= step_s * (1 + 1e-9)


def test_leaves_of_one_node_are_no_level_of_their_own() -> None:
    """Their pods' block was taken to be that of a leaf: the plan failed its own verification."""
    pins = "tp=1,cp=1,pp=1,micro_batch=1"
    asked = small(four_nodes((400,) * 4, (0.0, 0.6, 0.6, 0.6)), 16, 32, pins)
    assert alone_on(asked, (0, 1)).status == "optimal"


def test_what_the_rest_is_too_small_for_is_not_called_infeasible() -> None:
    """Without the memory of hosts two nodes do not hold it, and three do."""
    request = replace(of_three_nodes(0.9), forbids=("optimizer-offload",))
    on_two = fastest_plan(limited(request, "n-a,n-b"), explained=False)
    assert on_two.status == "infeasible"
    assert fastest_plan(request).status == "feasible"


def test_gpus_that_may_not_idle_are_not_left_out_for_their_links() -> None:
    plan = fastest_plan(replace(of_three_nodes(0.9), forbids=("idle-gpus",)))
    assert plan.layout is not None
    assert plan.inputs.gpus == 24
    assert plan.idle is None


def test_a_limit_on_cuts_leaves_nodes_of_alike_leaves_idle() -> None:
    """The bound of fewer GPUs is asked of nodes at one switch, where there is no such limit."""
    cluster = cluster_from_mapping(
        {
            "base": "dgx-h100",
            "levels": [
                {"name": "leaf", "gpus": 16},
                {"name": "core", "gpus": 1024, "oversubscription": 16},
            ],
            "nodes": [{"name": f"n{index}", "leaf": f"l{index // 2}"} for index in range(4)],
        }
    )
    request = replace(small(cluster, 8, 40), max_cut_use=0.3, forbids=())
    plan, alone = fastest_plan(request), fastest_plan(replace(request, cluster=alone_in(cluster)))
    assert seconds(plan) == seconds(alone)
    assert plan.objective.lower_bound_s is not None
    assert plan.objective.lower_bound_s <= seconds(plan)


def alone_in(cluster: ClusterSpec) -> ClusterSpec:
    """With one node."""
    return cluster.model_copy(update={"nodes": cluster.nodes[:1], "gpus": 8})


def limited(request: PlanRequest, nodes: str) -> PlanRequest:
    """The same on some of the nodes."""
    cluster = limited_to_nodes(request.cluster, nodes)
    return replace(request, cluster=cluster, gpus=cluster.gpus)


def test_only_the_nodes_named_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = scattered_cluster(random.Random(4), leaves=2, per_leaf=3, free=6)
    named = limited_to_nodes(cluster, "n0-[00-01],n1-02")
    free = [node.name for node in named.nodes if node.free_gpus != 0]
    assert free == ["n0-00", "n0-01", "n1-02"]
    assert named.gpus == 24
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert limited_to_nodes(cluster, None) is cluster
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n0-[00-02]")
    assert limited_to_nodes(cluster, None).gpus == 24
    with pytest.raises(InputError, match=r"48 asked for, but .* has 24 free on the nodes to take"):
        check_gpus(limited_to_nodes(cluster, None), 48)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n0-[00-02],elsewhere[1-2]")
    with pytest.raises(
        InputError, match=r"^SLURM_JOB_NODELIST: .*'elsewhere1' .*nor 1 of.*--nodes, or unset"
    ):
        limited_to_nodes(cluster, None)
    assert limited_to_nodes(cluster, "n0-00").gpus == 8
    nameless = cluster.model_copy(update={"nodes": ()})
    assert limited_to_nodes(nameless, None) is nameless
    with pytest.raises(InputError, match="did you mean"):
        limited_to_nodes(cluster, "n0-0O")
    with pytest.raises(InputError, match="no host list"):
        limited_to_nodes(cluster, "n0-[00")
    hosts = tmp_path / "hostfile"
    hosts.write_text(
        "# mine\nn0-00 slots=8\nn1-02\tslots=8 max_slots=8  # both\n", encoding="utf-8"
    )
    assert limited_to_nodes(cluster, str(hosts)).gpus == 16
    hosts.write_text("n0-00 slots=8\nn1-02 slots=4\n", encoding="utf-8")
    with pytest.raises(InputError, match="n1-02 has 8 free GPUs, not 4"):
        limited_to_nodes(cluster, str(hosts))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "((")
    with pytest.raises(InputError, match=r"^SLURM_JOB_NODELIST: no host list: "):
        limited_to_nodes(cluster, None)


def test_a_host_file_names_the_nodes_of_a_kind(tmp_path: Path) -> None:
    """Ten whole nodes and two half busy ones were to be written down again as a cluster file."""
    hosts = tmp_path / "hostfile"
    hosts.write_text("node[01-10]\nnode11 slots=4\nnode12 slots=4\n", encoding="utf-8")
    listed = limited_to_nodes(load_cluster("dgx-h100"), str(hosts))
    assert [node.free_gpus for node in listed.nodes] == [8] * 10 + [4] * 2
    assert listed.nodes[10].name == "node11"
    assert (listed.gpus, listed.elastic) == (88, False)
    assert limited_to_nodes(load_cluster("dgx-h100"), ["a", "b"]).gpus == 16
    hosts.write_text("node01 slots=9\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"a node has 8 GPUs, not 9, got 'node01 slots=9'"):
        limited_to_nodes(load_cluster("dgx-h100"), str(hosts))
    hosts.write_text("node01 slots=0\n", encoding="utf-8")
    with pytest.raises(InputError, match="no GPU of these nodes is free"):
        limited_to_nodes(load_cluster("dgx-h100"), str(hosts))
    for placed in ("gb200-nvl72", "superpod-h100"):
        with pytest.raises(InputError, match=f"a cluster file with `base: {placed}` and `nodes`"):
            limited_to_nodes(load_cluster(placed), "a,b")


@pytest.mark.parametrize("fill", [0, 4])
def test_a_plan_on_named_nodes_is_that_on_as_many_without_names(fill: int) -> None:
    def planned(cluster: ClusterSpec, gpus: int | None) -> Plan:
        return fastest_plan(
            read_request(
                model="llama-3-8b", cluster=cluster, gpus=gpus, global_batch=48, seq_len=2048
            )
        )

    kind, names = load_cluster("dgx-h100"), {"a": 8, "b": 8, "c": fill or 8}
    named, plain = planned(of_nodes(kind, names), None), planned(kind, sum(names.values()))
    assert named.layout == plain.layout
    assert named.predicted is not None
    assert plain.predicted is not None
    assert named.predicted.step_time_s == pytest.approx(plain.predicted.step_time_s)


def test_a_plan_on_whole_nodes_alone_says_so() -> None:
    """Time ends before anything is known of part-filled nodes."""
    whole = scattered_cluster(random.Random(4), leaves=2, per_leaf=3, free=6)
    half = whole.nodes[0].model_copy(update={"free_gpus": 4})
    cluster = whole.model_copy(update={"nodes": (half, *whole.nodes[1:]), "gpus": 44})

    def searched(
        request: PlanRequest, /, *, begin_with: Layout | None = None, **_how: object
    ) -> Outcome:
        if request.gpus == 44:
            return Outcome(status="unknown", best=(), lower_bound_s=None, certificate=Certificate())
        return search_with_buckets(request, begin_with=begin_with)

    decision = decide_on_nodes(replace(small(cluster, 44, 80), forbids=()), searched)
    assert decision.request.gpus == 40
    assert decision.note == "planned on 40 of the 44 GPUs asked for, those of whole nodes"


@pytest.mark.parametrize("compares", [True, False])
def test_a_plan_that_whole_nodes_win_is_held_against_all_of_their_gpus(*, compares: bool) -> None:
    """It said that no layout on all of them was found in time, where none was looked for."""
    whole = scattered_cluster(random.Random(4), leaves=2, per_leaf=3, free=6)
    half = whole.nodes[0].model_copy(update={"free_gpus": 4})
    cluster = whole.model_copy(update={"nodes": (half, *whole.nodes[1:]), "gpus": 44})

    def searched(
        request: PlanRequest, /, *, begin_with: Layout | None = None, **_how: object
    ) -> Outcome:
        if request.gpus == 44:
            return Outcome(status="unknown", best=(), lower_bound_s=None, certificate=Certificate())
        on_all = "idle-gpus" in request.forbids
        layout, seconds = Layout(dp=40 if on_all else 32), 1.2 if on_all else 1.0
        fastest = Priced(layout=layout, matrix={}, stages=((1,),), step_time_s=seconds)
        return Outcome(
            status="optimal", best=(fastest,), lower_bound_s=seconds, certificate=Certificate()
        )

    asked = replace(small(cluster, 44, 80), forbids=())
    settled = decide_on_nodes(asked, searched, compares=compares).settled
    assert settled.outcome.best[0].layout.gpus == 32
    on_all_s = [priced.step_time_s for priced in settled.full.best] if settled.full else []
    assert on_all_s == ([1.2] if compares else [])


@pytest.mark.parametrize(("bound_s", "searches"), [(1.0, 1), (0.9, 2)])
def test_whole_nodes_are_searched_where_a_gap_is_left(bound_s: float, searches: int) -> None:
    """Only for what is faster than the plan on everything that is free."""
    whole = scattered_cluster(random.Random(4), leaves=2, per_leaf=3, free=6)
    half = whole.nodes[0].model_copy(update={"free_gpus": 4})
    cluster = whole.model_copy(update={"nodes": (half, *whole.nodes[1:]), "gpus": 44})
    asked_of: list[tuple[int, Sought]] = []

    def searched(request: PlanRequest, /, *, sought: Sought = ALL_PLANS, **_how: object) -> Outcome:
        asked_of.append((request.gpus, sought))
        fastest = Priced(layout=Layout(dp=44), matrix={}, stages=((1,),), step_time_s=1.0)
        found = (fastest,) if request.gpus == 44 else ()
        return Outcome(
            status="optimal" if found and bound_s == 1.0 else "unknown",
            best=found,
            lower_bound_s=bound_s,
            certificate=Certificate(),
        )

    decision = decide_on_nodes(replace(small(cluster, 44, 88), forbids=()), searched)
    assert [gpus for gpus, _ in asked_of] == [44, 40][:searches]
    assert [sought.below_s for _, sought in asked_of[1:]] == [pytest.approx(1.0)] * (searches - 1)
    outcome = decision.settled.outcome
    assert outcome.status == ("optimal" if bound_s == 1.0 else "feasible")
    assert outcome.lower_bound_s == bound_s


def test_the_fullest_rack_is_planned_ahead_of_everything_free() -> None:
    """More GPUs were planned slower than one rack alone, which a search of a minute never reached."""
    racks = {"a": (4, 4, 4), "b": (4, 2), "c": (4,)}
    cluster = cluster_from_mapping(
        {
            "name": "racks",
            "base": "gb200-nvl72",
            "nodes": [
                {"name": f"{rack}{index}", "leaf": rack, "free_gpus": free}
                for rack, nodes in racks.items()
                for index, free in enumerate(nodes)
            ],
        },
        "cluster.yaml",
    )
    fastest = Priced(layout=Layout(dp=12), matrix={}, stages=((1,),), step_time_s=1.0)
    asked_of: list[tuple[int, Layout | None]] = []

    def searched(
        request: PlanRequest, /, *, begin_with: Layout | None = None, **_how: object
    ) -> Outcome:
        asked_of.append((request.gpus, begin_with))
        best = (fastest,) if request.gpus == 12 else ()
        return Outcome(status="feasible", best=best, lower_bound_s=0.5, certificate=Certificate())

    request = replace(small(cluster, 17, 34, "pp=1"), forbids=())
    decision = decide_on_nodes(request, searched, compares=False)
    start = replace(fastest.layout, recompute_layers=0)
    assert asked_of[:2] == [(12, None), (17, start)]
    assert decision.request.gpus == 12
    assert [node.name for node in decision.request.cluster.nodes if node.free_gpus != 0] == [
        "a0",
        "a1",
        "a2",
    ]
    asked_of.clear()
    decide_on_nodes(replace(request, forbids=("idle-gpus",)), searched, compares=False)
    assert asked_of[0] == (17, None)


@pytest.mark.slow
def test_a_mapping_stands_where_time_is_up_for_a_search_on_its_gpus() -> None:
    """Under a limit of a second there was no plan, though one was mapped."""
    whole = scattered_cluster(random.Random(4), leaves=2, per_leaf=3, free=6)
    half = whole.nodes[0].model_copy(update={"free_gpus": 4})
    cluster = whole.model_copy(update={"nodes": (half, *whole.nodes[1:]), "gpus": 44})
    pins = "tp=2,cp=1,vpp=1,micro_batch=1,recompute=none,zero_stage=1"
    request = replace(small(cluster, 22, 22, pins), forbids=())
    mapped: list[float] = []

    def searched(asked: PlanRequest, /, *, sought: Sought = ALL_PLANS, **_how: object) -> Outcome:
        if mapped:
            return Outcome(status="unknown", best=(), lower_bound_s=None, certificate=Certificate())
        found = search_with_buckets(asked, sought=sought)
        mapped.append(found.best[0].step_time_s)
        return replace(found, status="feasible", lower_bound_s=0.5 * mapped[0])

    decision = decide_on_nodes(request, searched)
    outcome, own = decision.settled.outcome, decision.request
    ranks = outcome.best[0].ranks
    assert ranks is not None
    assert own.cluster.gpus == own.gpus == len(ranks)
    assert outcome.status == "feasible"
    assert outcome.best[0].step_time_s <= mapped[0] * (1 + 1e-9)
    plan = plan_from_outcome(own, outcome, space_of(own), 0.0)
    assert list(faults(own, plan)) == []


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2, 3)),
    ],
)
def test_a_search_below_a_price_finds_what_is_faster_or_that_nothing_is(seed: int) -> None:
    cluster = scattered_cluster(random.Random(seed), leaves=2, per_leaf=2, free=3)
    request = small(cluster, 24, 24, "tp=8,cp=1,vpp=1,micro_batch=1")
    open_ = search_with_buckets(request)
    price_s = open_.best[0].step_time_s
    above = search_with_buckets(request, sought=Sought(below_s=price_s * 1.01))
    assert above.best[0].step_time_s == price_s
    assert above.status == open_.status
    below = search_with_buckets(request, sought=Sought(below_s=price_s * 0.99))
    assert (below.status, below.best) == ("unknown", ())
    assert below.lower_bound_s == pytest.approx(price_s * 0.99)


@pytest.mark.soak
def test_the_best_64_of_100_scattered_nodes() -> None:
    for seed in some(range(50)):
        cluster = scattered_cluster(random.Random(seed), leaves=10, per_leaf=16, free=100)
        request = small(cluster, 512, 512, "tp=8,cp=1,vpp=1,micro_batch=1")
        plan = fastest_plan(request)
        # Mappings of many nodes stop at a gap: one plan was slower by 2e-6 than the first nodes' own.
        assert seconds(plan) <= on_nodes(request, tuple(range(64))) * (1 + 1e-4), seed
        assert differences(plan) == [], seed


def test_a_time_limit_is_spent_on_the_search() -> None:
    """Shares were kept for searches that never came: of a limit half was not used."""
    cluster = scattered_cluster(random.Random(3), leaves=3, per_leaf=3, free=7)
    leaf = cluster.nodes[0].leaf
    busy = cluster.model_copy(update={"blocks": (BlockSpec(leaf=leaf, background=0.99),)})
    gpus = 8 * sum(node.leaf != leaf for node in cluster.nodes)
    limits_s: list[float] = []

    def searched(
        asked: PlanRequest, /, *, begin_with: Layout | None = None, **_how: object
    ) -> Outcome:
        assert begin_with is None
        assert asked.time_limit_s is not None
        limits_s.append(asked.time_limit_s)
        time.sleep(asked.time_limit_s)
        return Outcome(status="unknown", best=(), lower_bound_s=None, certificate=Certificate())

    with within(1.0):
        decide_on_nodes(replace(small(busy, gpus, 3 * gpus), time_limit_s=1.0), searched)
    assert len(limits_s) == 2
    assert sum(limits_s) == pytest.approx(1.0, abs=0.05)


@pytest.mark.slow
def test_equal_parts_of_nodes_cost_what_they_cost_among_more_free_gpus() -> None:
    """12 of 7 + 8 free GPUs: the search takes 6 and 6, and these listed alone have the same plan."""
    among, alone = (fastest_plan(_twelve_of(free)) for free in ((7, 8), (6, 6)))
    assert among.layout is not None
    assert among.layout.dp == 12
    assert (among.status, alone.status) == ("optimal", "optimal")
    assert seconds(among) == pytest.approx(seconds(alone), rel=1e-9)


def _twelve_of(free: tuple[int, int]) -> PlanRequest:
    leaf = {"name": "leaf", "gpus": 128}
    cluster = {
        "name": "one-leaf",
        "base": "dgx-h100",
        "levels": [leaf, {"name": "core", "gpus": 8192, "oversubscription": 4}],
        "nodes": [{"name": f"n{k}", "leaf": "l0", "free_gpus": n} for k, n in enumerate(free)],
    }
    return read_request(
        model="gpt2-xl",
        cluster=cluster_from_mapping(cluster),
        gpus=12,
        global_batch=48,
        seq_len=1024,
        framework="fsdp2",
        pin="dp=12",
    )


@pytest.mark.parametrize(("batch", "used"), [(15, {"n5": 5}), (16, {"n3": 3, "n5": 5})])
def test_two_nodes_with_three_and_five_gpus(batch: int, used: dict[str, int]) -> None:
    """Both ended in an internal error: ranks on two nodes, priced as if one held them."""
    nodes = [{"name": f"n{free}", "leaf": "l", "free_gpus": free} for free in (3, 5)]
    plan = fastest_plan(
        read_request(
            model="qwen3-1.7b",
            cluster={"base": "dgx-h100", "nodes": nodes},
            gpus=None,
            global_batch=batch,
            seq_len=1024,
            framework="torchtitan",
        )
    )
    assert plan.status == "optimal"
    assert plan.mapping is not None
    assert plan.mapping.ranks is not None
    listed_names = [plan.inputs.cluster.nodes[node].name for node, _ in plan.mapping.ranks]
    assert {name: listed_names.count(name) for name in listed_names} == used


@pytest.mark.parametrize("leaf", [None, "a"])
def test_gpus_stay_idle_on_any_node_of_a_list(leaf: str | None) -> None:
    """20 of 24 GPUs were priced as five times four, and that plan called optimal."""

    def on(*free: int) -> Plan:
        place = {} if leaf is None else {"leaf": leaf}
        nodes = [{"name": f"n{at}", "free_gpus": gpus, **place} for at, gpus in enumerate(free)]
        asked = read_request(
            model="gpt2-xl",
            cluster={"base": "dgx-a100", "nodes": nodes},
            gpus=sum(free),
            global_batch=20,
            seq_len=4096,
            framework="fsdp2",
        )
        return fastest_plan(asked, explained=False)

    whole, part_filled = on(8, 8, 8), on(7, 7, 6)
    assert whole.status == part_filled.status == "optimal"
    assert whole.objective.step_time_s == pytest.approx(part_filled.objective.step_time_s)
    assert whole.left_out is not None
    assert "planned on 20 of the 24" in whole.left_out
    assert "idle: " in whole.left_out
