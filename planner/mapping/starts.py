"""Mappings to begin with: regular orders through the leaves, and pods filled one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshwright.planner.mapping.problem import IntArray, MappingProblem
from meshwright.planner.mapping.relaxation.columns import counts_of, relax
from meshwright.planner.mapping.relaxation.integer import Effort, whole_mapping


def blocked_orders(problem: MappingProblem) -> Iterator[IntArray]:
    """Assignments that run through the leaves, pod by pod, with g stages of a replica next to each other.

    g = 1 is Megatron's default order, g = stages its `tp-cp-ep-pp-dp`. Replicas go in whole groups of expert
    and context slots.
    """
    size = max(problem.traffic.expert_slots, problem.traffic.context_slots)
    order = sorted(range(len(problem.leaf_slots)), key=lambda leaf: (problem.leaf_pod[leaf], leaf))
    leaves = np.repeat(np.array(order), np.array(problem.leaf_slots)[order])[: problem.needed]
    for together in range(1, problem.stages + 1):
        if problem.stages % together == 0:
            shape = (problem.stages // together, problem.slots // size, together, size)
            turned = leaves.reshape(shape).transpose(0, 2, 1, 3)
            yield turned.reshape(problem.stages, problem.slots)


def pod_by_pod(problem: MappingProblem, held: IntArray, effort: Effort) -> IntArray:
    """Counts [leaves, stages] with the given slots of each stage in each pod, [pods, stages].

    Every pod is a problem of its own; leaves of a pod without a better answer keep the order of the leaves.
    """
    counts = np.zeros((len(problem.leaf_slots), problem.stages), dtype=np.int64)
    for pod in range(problem.pods):
        leaves = np.flatnonzero(problem.pod_of == pod)
        if not held[pod].sum():
            continue
        part = replace(
            problem,
            leaf_slots=tuple(problem.leaf_slots[leaf] for leaf in leaves),
            leaf_s_per_byte=tuple(problem.leaf_s_per_byte[leaf] for leaf in leaves),
            leaf_pod=(0,) * len(leaves),
            pod_s_per_byte=(0.0,),
            host_leaves=(),
        )
        start = _in_turn(part, held[pod])
        found = relax(part, [start], demand=held[pod])
        whole = whole_mapping(part, found.leaves, None, demand=held[pod], effort=effort)
        counts[leaves] = start if whole.counts is None else whole.counts
    return counts


def _in_turn(part: MappingProblem, held: IntArray) -> IntArray:
    """Counts when the stages go through the leaves of a pod one after the other."""
    counts = np.zeros((len(part.leaf_slots), part.stages), dtype=np.int64)
    leaves = np.repeat(np.arange(len(part.leaf_slots)), part.leaf_slots)[: int(held.sum())]
    np.add.at(counts, (leaves, np.repeat(np.arange(part.stages), held)), 1)
    return counts


def pod_counts(problem: MappingProblem, assignment: IntArray) -> IntArray:
    """Slots of each stage in each pod, shape [pods, stages]."""
    held = np.zeros((problem.pods, problem.stages), dtype=np.int64)
    np.add.at(held, problem.pod_of, counts_of(problem, assignment))
    return held
