"""Mappings that run through the leaves in a regular order: what launchers can do without a rank file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.planner.mapping.problem import IntArray, MappingProblem


def regular_orders(problem: MappingProblem) -> Iterator[IntArray]:
    """Assignments that run through the leaves, pod by pod, with g stages of a replica next to each other.

    g = 1 is Megatron's default order, g = stages its `tp-cp-ep-pp-dp`. Replicas go in whole groups of expert
    and context slots.
    """
    size = max(problem.traffic.expert_slots, problem.traffic.context_slots)
    by_pod = np.argsort(problem.pod_of, kind="stable")
    free = np.array(problem.leaf_slots)[by_pod]
    leaves = np.repeat(by_pod, free)[: problem.needed]
    for together in range(1, problem.stages + 1):
        if problem.stages % together == 0:
            shape = (problem.stages // together, problem.slots // size, together, size)
            turned = leaves.reshape(shape).transpose(0, 2, 1, 3)
            yield turned.reshape(problem.stages, problem.slots)
