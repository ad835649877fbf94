"""Small irregular allocations by seed, and every layout on every assignment of slots, priced one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import inf

import numpy as np

from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec, FabricLevelSpec, NodeSpec
from meshwright.constraints.registry import rules_for
from meshwright.costmodel.layout import Layout, Placement
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.bounds.exact_cost import MappingBounds
from meshwright.planner.mapping.counted import counted_placement
from meshwright.planner.mapping.effective import PROFILE, PlacedAs, free_gpus_of
from meshwright.planner.mapping.pricing import MappedPricing
from meshwright.planner.mapping.problem import MappingProblem
from meshwright.planner.mapping.slots import Instance, ranks_of
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.model import Candidates
from meshwright.planner.search.space import space_of

KINDS = ("dense", "dense", "context", "experts")


def random_cluster(rng: np.random.Generator, *, most_nodes: int, halves: bool) -> ClusterSpec:
    """Nodes of 8 on two or three leaves and one or two pods; with `halves`, some of them have 4 GPUs."""
    leaves, pods = int(rng.integers(2, 4)), int(rng.integers(1, 3))
    counts = np.ones(leaves, dtype=np.int64)
    for leaf in rng.integers(0, leaves, int(rng.integers(1, most_nodes - leaves + 1))):
        counts[leaf] += 1
    if len(set(counts.tolist())) == 1:
        counts[0] += 1 if counts.sum() < most_nodes else -1
    nodes = []
    for leaf, count in enumerate(counts):
        pod = f"pod-{min(leaf, pods - 1)}"
        for at in range(count):
            free = 4 if halves and rng.random() < 0.3 else None
            nodes.append(
                NodeSpec(name=f"n{leaf}-{at}", leaf=f"leaf-{leaf}", pod=pod, free_gpus=free)
            )
    rng.shuffle(nodes)
    base = read_cluster("dgx-h100")
    over = [1.0, float(rng.choice([1, 2, 4, 8])), float(rng.choice([2, 8, 16]))]
    sizes = zip(("leaf", "pod", "core"), (32, 64, 256), np.maximum.accumulate(over), strict=True)
    return base.model_copy(
        update={
            "name": "small",
            "elastic": False,
            "levels": tuple(
                FabricLevelSpec(name=n, gpus=g, oversubscription=o) for n, g, o in sizes
            ),
            "nodes": tuple(nodes),
            "gpus": sum(8 if node.free_gpus is None else node.free_gpus for node in nodes),
        }
    )


def random_request(seed: int) -> PlanRequest:
    """A dense model with single-node slots, or one whose context or expert groups span several."""
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    halves = kind != "context" and rng.random() < 0.3  # slots of half a node: twice as many
    cluster = random_cluster(rng, most_nodes=4 if halves else 6, halves=halves)
    pins: dict[str, int | str] = {
        "vpp": 1,
        "micro_batch": 1,
        "recompute": "none",
        "zero_stage": 1,
        "etp": 1,
    }
    model = "llama-3-8b"
    if kind == "dense":
        pins |= {"tp": 4 if halves else 8, "cp": 1}
    elif kind == "context":
        pins |= {"tp": 8, "cp": 2}
    else:
        model = "olmoe-1b-7b"
        pins |= {"tp": 4, "cp": 1, "ep": int(rng.choice([8, 16]))}
    return PlanRequest(
        model=load_catalog_model(model),
        cluster=cluster,
        gpus=cluster.gpus,
        global_batch=int(rng.choice([8, 12, 24, 60])),
        seq_len=int(rng.choice([2048, 4096])),
        pins=pins,
        # Shares are five times the work by brute force.
        forbids=("optimizer-offload",) if seed % 6 else (),
        without=("deepep", "hybridep", "ep-overlap", "cuda-graph", "cp-a2a"),
    )


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Legal layouts, and what prices them."""

    pricing: MappedPricing
    candidates: Candidates

    def layouts(self) -> Iterator[Layout]:
        """One by one."""
        for row in range(len(self.candidates.memory_gib)):
            yield self.candidates.layouts.scalar(row)


def has_parts_of_nodes(request: PlanRequest) -> bool:
    """Whether some nodes are part-filled: mappings are then listed and counted, not asked of CP-SAT."""
    return free_gpus_of(request.cluster).are_part_filled


def legal_layouts(request: PlanRequest) -> Tables:
    """Every layout of the request's space that no rule forbids."""
    space = space_of(request)
    pricing = MappedPricing(space.workload)
    layouts = space.layouts(space.degrees(request.gpus))
    memory_gib, again = pricing.least_memory_gib(layouts)
    layouts = Layout(**{**vars(layouts), "recompute_layers": again})
    table = Candidates(workload=space.workload, layouts=layouts, memory_gib=memory_gib)
    legal = np.ones(len(memory_gib), dtype=bool)
    for rule in rules_for(space.workload):
        legal &= np.asarray(rule.excess(table)) <= 0
    rows = np.flatnonzero(legal)
    table = Candidates(
        workload=space.workload,
        layouts=layouts.take(rows),
        memory_gib=memory_gib[rows],
    )
    return Tables(pricing=pricing, candidates=table)


def assignments(problem: MappingProblem) -> Iterator[np.ndarray]:
    """Every leaf for every slot that the free slots allow, [stages, slots]."""
    room = np.asarray(problem.leaf_slots)
    for leaves in product(range(len(room)), repeat=problem.needed):
        if np.all(np.bincount(leaves, minlength=len(room)) <= room):
            yield np.array(leaves).reshape(problem.stages, problem.slots)


def priced_under(pricing: MappedPricing, layout: Layout, placement: Placement) -> float:
    """The best split of a layout under one placement; infinite where none fits."""
    one = Placement(**{name: np.asarray(m)[None] for name, m in vars(placement).items()})
    table = MappingBounds(
        matrices={PROFILE: np.zeros((1, 1), dtype=np.int64)}, bound_s=np.full(1, -inf)
    )
    found = PlacedAs(pricing.workload, one).exact(layout, table, inf)
    return inf if found is None else found.step_time_s


def enumerated_s(tables: Tables) -> float:
    """The least step time over all layouts and all assignments."""
    best = inf
    for layout in tables.layouts():
        instance = tables.pricing.instance(layout)
        if instance is not None:
            best = min(best, best_assignment_s(tables.pricing, layout, instance))
    return best


def best_assignment_s(pricing: MappedPricing, layout: Layout, instance: Instance) -> float:
    """The least step time of a layout over all assignments; equal placements are priced once."""
    workload = pricing.workload.on(int(layout.gpus))
    found: dict[bytes, Placement] = {}
    for assignment in assignments(instance.problem):
        ranks = ranks_of(instance, assignment)
        placement = counted_placement(workload.cluster, layout, ranks)
        found.setdefault(
            b"".join(np.asarray(m).tobytes() for m in vars(placement).values()), placement
        )
    return min((priced_under(pricing, layout, one) for one in found.values()), default=inf)
