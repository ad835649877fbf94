"""Which nodes a plan takes, against plans on every set of nodes: adapters, links that others use, idle nodes.

Of a set nothing is left to choose: its nodes have one rate of adapters, the slowest of theirs, and all of
them are asked for. Of part-filled nodes sets are of GPUs: how many of each node. `make attack` takes a tenth
of MESHWRIGHT_ATTACK_S, at least four clusters.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest

from meshwright.cluster_specs.reader import cluster_from_mapping
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import level_rates
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.nodes import KindsOfLinks
from meshwright.planner.request.reader import read_request

ATTACK_S = float(os.environ.get("MESHWRIGHT_ATTACK_S", "30"))
SEED = int(os.environ.get("MESHWRIGHT_ATTACK_SEED", "0"))
FEWEST = 4
PER_NODE = 8
ROUNDING = 1e-9


def drawn(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A cluster of whole nodes as its YAML file has it, and options of a plan on some or all of them."""
    chance = random.Random(number)
    nodes_of_leaf, leaves = chance.choice(((1, 3), (1, 4), (1, 4), (2, 2), (2, 2), (3, 1), (3, 2)))
    pods = chance.choice((0, 2, 2))
    rates = chance.choice(((None,), (400,), (100, 400), (5, 400), (50, 100, 400)))
    nodes, blocks = [], []
    for leaf in range(leaves):
        name, pod = f"l{leaf}", {"pod": f"p{leaf // pods}"} if pods else {}
        used = chance.choice((0.0, 0.0, 0.3, 0.6))
        if used:
            blocks.append({"leaf": name, "background": used})
        for place in range(nodes_of_leaf):
            rate = chance.choice(rates)
            adapter = {} if rate is None else {"nic_gbps_per_gpu": rate}
            nodes.append({"name": f"n{leaf}{place}", "leaf": name, **pod, **adapter})
    thinner = {"oversubscription": chance.choice((1, 2, 4))}
    sizes = [PER_NODE * nodes_of_leaf * each for each in (1, pods, 64)]
    levels: list[dict[str, Any]] = [{"name": "leaf", "gpus": sizes[0]}]
    levels += [{"name": "pod", "gpus": sizes[1], **thinner}] if pods else []
    levels.append({"name": "core", "gpus": sizes[2], **thinner})
    cluster = {"base": "dgx-h100", "levels": levels, "nodes": nodes, "blocks": blocks}
    asked = chance.randint(1, len(nodes))
    options = {
        "model": chance.choice(("gpt2-xl", "llama-2-7b", "llama-3-8b")),
        "gpus": PER_NODE * asked,
        "global_batch": chance.choice((PER_NODE * asked, 2 * PER_NODE * asked, 40)),
        "seq_len": 1024,
        "framework": chance.choice(("megatron", "fsdp2", "fsdp2")),
        "forbid": chance.choice(((), ("idle-gpus",))),
        "pin": "tp=1,cp=1,pp=1,micro_batch=1,cuda_graph=none",
    }
    return cluster, options


def planned(cluster: dict[str, Any], options: dict[str, Any]) -> Plan:
    return fastest_plan(read_request(cluster=cluster, **options), explained=False)


def on_every_set(cluster: dict[str, Any], options: dict[str, Any]) -> Iterator[Plan]:
    """Plans on all sets of as many nodes as are asked for, and of fewer where some may be idle."""
    most = options["gpus"] // PER_NODE
    fewest = most if options["forbid"] else 1
    for count in range(fewest, most + 1):
        for taken in combinations(range(len(cluster["nodes"])), count):
            own = [cluster["nodes"][index].get("nic_gbps_per_gpu", 400) for index in taken]
            nodes = [
                {**node, "nic_gbps_per_gpu": min(own), "free_gpus": PER_NODE * (index in taken)}
                for index, node in enumerate(cluster["nodes"])
            ]
            yield planned({**cluster, "nodes": nodes}, {**options, "gpus": PER_NODE * count})


def drawn_with_parts(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same of few GPUs on part-filled nodes behind links that are unlike; any degrees are allowed."""
    chance = random.Random(f"parts {number}")
    leaves, blocks = chance.choice((2, 2, 3)), []
    nodes: list[dict[str, Any]] = []
    pods = chance.choice((0, 0, 2)) if leaves == 3 else 0
    rates = chance.choice(((None,), (None,), (100, None)))
    for leaf in range(leaves):
        place = {"leaf": f"l{leaf}", **({"pod": f"p{leaf // pods}"} if pods else {})}
        if chance.random() < 0.7:
            blocks.append({"leaf": f"l{leaf}", "background": chance.choice((0.3, 0.7, 0.9))})
        for index in range(chance.choice((1, 1, 2)) if leaves == 2 else 1):
            rate = chance.choice(rates)
            adapter = {} if rate is None else {"nic_gbps_per_gpu": rate}
            free = {"free_gpus": chance.randint(1, 4)}
            nodes.append({"name": f"n{leaf}{index}", **place, **adapter, **free})
    levels: list[dict[str, Any]] = [{"name": "leaf", "gpus": 2 * PER_NODE}]
    if pods:
        levels.append(
            {"name": "pod", "gpus": 4 * PER_NODE, "background": chance.choice((None, 0.5))}
        )
    levels.append(
        {"name": "core", "gpus": 64 * PER_NODE, "oversubscription": chance.choice((1, 4))}
    )
    free_gpus = sum(node["free_gpus"] for node in nodes)
    gpus = chance.choice((free_gpus, free_gpus, max(2, free_gpus - 2)))
    options = {
        "model": chance.choice(("gpt2-xl", "llama-3-8b")),
        "gpus": gpus,
        "global_batch": chance.choice((gpus, 2 * gpus, 12)),
        "seq_len": chance.choice((512, 1024)),
        "framework": chance.choice(("megatron", "fsdp2")),
        "forbid": (),
        "pin": "micro_batch=1,cuda_graph=none",
    }
    return {"base": "dgx-h100", "levels": levels, "nodes": nodes, "blocks": blocks}, options


def on_every_number(cluster: dict[str, Any], options: dict[str, Any]) -> Iterator[Plan]:
    """Plans on as many GPUs of each node as there are ways, all of these in use."""
    free = [node["free_gpus"] for node in cluster["nodes"]]
    for counts in product(*(range(most + 1) for most in free)):
        if 0 < sum(counts) <= options["gpus"]:
            nodes = [
                {**node, "free_gpus": count}
                for node, count in zip(cluster["nodes"], counts, strict=True)
            ]
            asked = {**options, "gpus": sum(counts), "forbid": ("idle-gpus",)}
            yield planned({**cluster, "nodes": nodes}, asked)


def fault(number: int, *, parts: bool = False) -> str | None:
    """What is wrong with the plan of a cluster, in words; None where nothing is."""
    cluster, options = (drawn_with_parts if parts else drawn)(number)
    plan = planned(cluster, options)
    every = (on_every_number if parts else on_every_set)(cluster, options)
    steps = [set_plan.objective.step_time_s for set_plan in every]
    least_s = min((set_s for set_s in steps if set_s is not None), default=None)
    step_s, bound_s = plan.objective.step_time_s, plan.objective.lower_bound_s
    words = f"{number}: {plan.status} {step_s}, bound {bound_s}, a set of nodes {least_s}"
    if least_s is None or step_s is None:
        return None if (least_s is None) == (step_s is None) else words
    is_below = step_s < least_s * (1 - ROUNDING)
    is_beaten = plan.status == "optimal" and least_s < step_s * (1 - ROUNDING)
    is_bound_wrong = bound_s is not None and least_s < bound_s * (1 - ROUNDING)
    return words if is_below or is_beaten or is_bound_wrong else None


def with_free(cluster: ClusterSpec, counts: list[int]) -> ClusterSpec:
    """With so many GPUs free of each node, all in use."""
    nodes = tuple(
        node.model_copy(update={"free_gpus": count})
        for node, count in zip(cluster.nodes, counts, strict=True)
    )
    return cluster.model_copy(update={"nodes": nodes, "gpus": sum(counts)})


def ranges_of(kinds: KindsOfLinks) -> Iterator[KindsOfLinks]:
    """Themselves, and what they are halved into."""
    yield kinds
    for half in kinds.halves:
        yield from ranges_of(half)


def test_every_set_of_gpus_is_of_a_kind_whose_best_links_are_no_slower() -> None:
    """Its rates at each level, from its own GPUs alone, against those that stand for a range of kinds."""
    chance, compared = random.Random(5), 0
    for number in range(60):
        mapping, _ = drawn_with_parts(number)
        if chance.random() < 0.2:
            mapping["nodes"].append({"name": "beside", "free_gpus": chance.randint(1, 8)})
        cluster = cluster_from_mapping({"name": "drawn", **mapping})
        for gbps in {node.nic_gbps_per_gpu or cluster.nic_gbps_per_gpu for node in cluster.nodes}:
            kinds = KindsOfLinks.of_adapters(cluster, gbps)
            free = [int(node.free_gpus or 0) for node in kinds.cluster.nodes]
            counts = [chance.randint(0, most) for most in free]
            if not sum(counts):
                continue
            rates = level_rates(with_free(kinds.cluster, counts))
            stand_for = []
            for each in ranges_of(kinds):
                best, most = each.at_best
                holds = all(
                    count <= (node.free_gpus or 0)
                    for count, node in zip(counts, best.nodes, strict=True)
                )
                pairs = zip(rates, level_rates(best), strict=True)
                is_no_slower = all(own <= other * (1 + ROUNDING) for own, other in pairs)
                if most >= sum(counts) and holds and is_no_slower:
                    stand_for.append(each)
            assert kinds in stand_for
            assert any(not each.halves for each in stand_for)
            compared += 1
    assert compared > 50


@pytest.mark.slow
@pytest.mark.parametrize("number", [0])
def test_no_set_of_nodes_beats_the_nodes_of_a_plan(number: int) -> None:
    assert fault(number) is None


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 3])
def test_no_set_of_gpus_beats_those_of_a_plan_on_part_filled_nodes(number: int) -> None:
    assert fault(number, parts=True) is None


@pytest.mark.soak
@pytest.mark.parametrize("parts", [False, True])
def test_no_set_of_nodes_beats_the_nodes_of_random_plans(parts: bool) -> None:
    end_s, number = time.monotonic() + ATTACK_S / 10, 1000 + SEED
    faults, count = [], 0
    while time.monotonic() < end_s or count < FEWEST:
        faults.append(fault(number, parts=parts))
        count, number = count + 1, number + 1
    print(f"{count} clusters")
    assert not any(faults), "\n".join(filter(None, faults))
