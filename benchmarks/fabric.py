"""Mapping on fragmented allocations: time, gap and memory by case, and how far groups reach.

python -m benchmarks.fabric [CASE ...]     writes a table; docs/fabric.md holds one.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass

import numpy as np

from meshwright.cluster_specs.reader import load_cluster
from meshwright.cluster_specs.schema import ClusterSpec, FabricLevelSpec, NodeSpec
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.reader import read_model
from meshwright.planner.mapping.least_traffic import least_traffic
from meshwright.planner.mapping.problem import spread_of
from meshwright.planner.mapping.slots import Instance, instance_of
from meshwright.planner.mapping.spread import least_spread
from meshwright.planner.mapping.spread_build import ReachWeights
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.plan_request import PlanRequest


@dataclass(frozen=True, kw_only=True)
class Case:
    """An allocation of whole nodes, scattered over leaves, and a layout that fills it."""

    model: str
    nodes: int
    leaves: int
    leaf_nodes: int
    pods: int
    pp: int
    vpp: int = 1
    micro_batches: int = 32
    shuffled_names: bool = False
    spare: int = 0
    """Nodes that the layout leaves idle."""
    ep: int = 1


CASES = {
    "64 on 9": Case(model="llama-3-70b", nodes=64, leaves=9, leaf_nodes=16, pods=1, pp=4),
    "64 on 9, pp 8": Case(model="llama-3-70b", nodes=64, leaves=9, leaf_nodes=16, pods=1, pp=8),
    "512 on 40": Case(model="gpt3-175b", nodes=512, leaves=40, leaf_nodes=20, pods=1, pp=8),
    "512 on 40, pp 16": Case(model="gpt3-175b", nodes=512, leaves=40, leaf_nodes=20, pods=1, pp=16),
    "2048 on 128": Case(
        model="llama-3.1-405b", nodes=2048, leaves=128, leaf_nodes=24, pods=1, pp=16
    ),
    "2048 on 128, 8 pods": Case(
        model="llama-3.1-405b", nodes=2048, leaves=128, leaf_nodes=24, pods=8, pp=16
    ),
    "9600 GPUs": Case(
        model="gpt3-175b", nodes=1200, leaves=96, leaf_nodes=16, pods=12, pp=8, micro_batches=16
    ),
    "9600 GPUs, names unrelated": Case(
        model="gpt3-175b",
        nodes=1200,
        leaves=96,
        leaf_nodes=16,
        pods=12,
        pp=8,
        micro_batches=16,
        shuffled_names=True,
    ),
    "32 on 6, 2 pods": Case(model="mixtral-8x22b", nodes=32, leaves=6, leaf_nodes=10, pods=2, pp=4),
    "64 on 9, 2 pods": Case(model="deepseek-v3", nodes=64, leaves=9, leaf_nodes=16, pods=2, pp=8),
}


def free_nodes(case: Case, seed: int) -> list[int]:
    """Free nodes of each leaf: uniform from 1 to the leaf's size, then one at a time up or down to the sum."""
    rng = np.random.default_rng(seed)
    free = rng.integers(1, case.leaf_nodes + 1, case.leaves)
    while free.sum() != case.nodes:
        leaf = int(rng.integers(case.leaves))
        if free.sum() < case.nodes and free[leaf] < case.leaf_nodes:
            free[leaf] += 1
        elif free.sum() > case.nodes and free[leaf] > 1:
            free[leaf] -= 1
    return [int(x) for x in free]


def fragmented_cluster(case: Case, seed: int) -> ClusterSpec:
    """H100 nodes under leaves (non-blocking inside), pods (2:1 at the leaf) and a core (4:1 at the pod)."""
    free = free_nodes(case, seed)
    per_leaf, per_pod = 8 * case.leaf_nodes, 8 * case.leaf_nodes * (case.leaves // case.pods + 1)
    levels = [
        FabricLevelSpec(name="leaf", gpus=per_leaf),
        FabricLevelSpec(name="pod", gpus=per_pod, oversubscription=2.0),
        FabricLevelSpec(name="core", gpus=per_pod * case.pods, oversubscription=4.0),
    ]
    names = np.arange(case.nodes)
    if case.shuffled_names:
        names = np.random.default_rng(seed + 1000).permutation(names)
    nodes, at = [], 0
    for leaf, count in enumerate(free):
        for _ in range(count):
            pod = leaf * case.pods // case.leaves
            nodes.append(
                NodeSpec(
                    name=f"node-{names[at]:05d}", leaf=f"leaf-{leaf:03d}", pod=f"pod-{pod:02d}"
                )
            )
            at += 1
    fields = load_cluster("dgx-h100").model_dump() | {
        "name": "fragmented", "gpus": 8 * case.nodes, "elastic": False,
        "levels": levels if case.pods > 1 else [*levels[:1], levels[1].model_copy(update={"gpus": per_pod})],
        "nodes": sorted(nodes, key=lambda node: node.name),
    }  # fmt: skip
    return ClusterSpec.model_validate(fields)


def case_instance(case: Case, seed: int) -> Instance:
    """The mapping problem of a case, its traffic by the cost model: tp 8 in every node, ZeRO-1."""
    model, cluster = read_model(case.model), fragmented_cluster(case, seed)
    dp = (case.nodes - case.spare) // case.pp
    layout = Layout(
        tp=8, pp=case.pp, dp=dp, vpp=case.vpp, ep=case.ep, micro_batch=1, num_micro_batches=case.micro_batches,
        zero_stage=1, sequence_parallel=True,
    )  # fmt: skip
    workload = Workload(
        model=model,
        cluster=cluster,
        gpus=8 * (case.nodes - case.spare),
        global_batch=dp * case.micro_batches,
        seq_len=4096,
    )
    stages = tuple(
        (count,)
        for count in np.diff(np.linspace(0, model.layers, case.pp + 1).astype(int)).tolist()
    )
    return instance_of(workload, layout, stages)


def run(name: str, seed: int) -> None:
    """One row of the table."""
    problem = case_instance(CASES[name], seed).problem
    began, cpu = time.monotonic(), time.process_time()
    found = least_traffic(problem)
    wall, cpu = time.monotonic() - began, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    before, after = (spread_of(a) for a in (problem.hostname_assignment(), found.assignment))
    pods_before, pods_after = (
        spread_of(problem.pod_of[a]) for a in (problem.hostname_assignment(), found.assignment)
    )
    state = "proven" if found.proven else f"gap {100 * found.gap:.2f} %"
    print(
        f"{name:28} seed {seed} {found.objective:8} {found.hostname_s:8.3f} s -> {found.price_s:8.3f} s "
        f"({100 * (1 - found.price_s / found.hostname_s):5.1f} % less), {state:12} {wall:6.1f} s wall "
        f"{cpu:6.1f} s CPU {memory:6.0f} MiB | leaves dp {before.data_parallel_max} -> {after.data_parallel_max}, "
        f"pp {before.pipeline_max} -> {after.pipeline_max} | pods dp {pods_before.data_parallel_max} -> "
        f"{pods_after.data_parallel_max}, pp {pods_before.pipeline_max} -> {pods_after.pipeline_max}",
        flush=True,
    )


def run_spread(name: str, seed: int, dp_weight: int) -> None:
    """One row of the table of how far groups reach: (data-parallel groups, pipelines) at most."""
    problem = case_instance(CASES[name], seed).problem
    cpu = time.process_time()
    found = least_spread(problem, weights=ReachWeights(data_parallel=dp_weight))
    cpu = time.process_time() - cpu
    levels = "; ".join(
        f"{level} {reach.hostname} -> {reach.reached}, {'proven' if reach.proven else f'bound {reach.bound}'}"
        for level, reach in (("pods", found.pods), ("leaves", found.leaves))
    )
    print(
        f"{name:28} seed {seed} weight {dp_weight / 1000:.1f}: {levels}; "
        f"{found.hostname_s:8.3f} s -> {found.price_s:8.3f} s, {cpu:6.1f} s CPU",
        flush=True,
    )


def run_plan(name: str, seed: int) -> None:
    """A whole plan on the allocation, nothing pinned: layout and mapping chosen together."""
    case = CASES[name]
    request = PlanRequest(
        model=read_model(case.model),
        cluster=fragmented_cluster(case, seed),
        gpus=8 * case.nodes,
        global_batch=8 * case.nodes,
        seq_len=4096,
        time_limit_s=60.0,
    )
    began, cpu = time.monotonic(), time.process_time()
    found = fastest_plan(request)
    wall, cpu = time.monotonic() - began, time.process_time() - cpu
    layout = found.layout
    assert layout is not None
    degrees = ", ".join(
        f"{axis} {getattr(layout, axis)}" for axis in ("tp", "cp", "pp", "dp", "ep", "vpp")
    )
    gap = found.objective.gap
    print(
        f"{name:28} seed {seed} {case.model}: {found.status}, gap {100 * gap if gap is not None else float('nan'):.2f} %, "
        f"{found.objective.step_time_s:.4g} s with {degrees}; {wall:6.1f} s wall {cpu:6.1f} s CPU",
        flush=True,
    )


def main() -> None:
    """Runs the cases named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--spread", action="store_true")
    parser.add_argument("--plan", action="store_true", help="whole plans, with no layout given")
    parser.add_argument("--dp-weight", type=int, default=500, help="per mille, with --spread")
    arguments = parser.parse_args()
    for name in arguments.cases or CASES:
        for seed in range(arguments.seeds):
            if arguments.plan:
                run_plan(name, seed)
            elif arguments.spread:
                run_spread(name, seed, arguments.dp_weight)
            else:
                run(name, seed)


if __name__ == "__main__":
    main()
