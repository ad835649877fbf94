"""Layout and mapping together: the best-first loop and the one CP-SAT model find the same step time."""

from __future__ import annotations

import numpy as np
import pytest

from planner.fabric.assign import assignment_of
from planner.fabric.joint import Candidate, best_first, solve_jointly
from planner.fabric.problem import MappingError, MappingProblem, Traffic, loads_of


def random_candidates(seed: int) -> list[Candidate]:
    """Two to four layouts of 8 or 12 slots on the same leaves, with traffic of their own."""
    rng = np.random.default_rng(seed)
    needed = int(rng.choice([8, 12]))
    leaves, pods = int(rng.integers(2, 6)), int(rng.integers(1, 3))
    free = rng.integers(1, 5, leaves)
    while free.sum() < needed:
        free[int(rng.integers(leaves))] += 1
    pod_of = np.sort(np.append(rng.integers(0, pods, leaves - 1), 0))
    found = []
    for stages in rng.permutation([s for s in (1, 2, 4) if needed % s == 0])[: int(rng.integers(2, 4))]:
        problem = MappingProblem(
            stages=int(stages),
            slots=needed // int(stages),
            traffic=Traffic(ring_bytes=float(rng.integers(0, 9)), hop_bytes=float(rng.integers(0, 9))),
            leaf_slots=tuple(int(x) for x in free),
            leaf_s_per_byte=tuple(float(x) for x in rng.integers(1, 4, leaves)),
            leaf_pod=tuple(int(x) for x in pod_of),
            pod_s_per_byte=tuple(float(x) for x in rng.integers(1, 4, pods)),
        )
        found.append(
            Candidate(
                base_s=float(rng.integers(20, 60)), problem=problem, per_uplink_s=float(rng.integers(1, 3))
            )
        )
    return found


@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 11))])
def test_the_loop_and_the_one_model_agree(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        candidates = random_candidates(seed)
        joint = solve_jointly(candidates)
        looped = best_first(candidates)
        assert joint.proven
        assert looped.bound_s <= joint.price_s * (1 + 1e-6)
        assert looped.price_s == pytest.approx(joint.price_s, rel=1e-6), seed
        one = candidates[joint.candidate]
        loads = loads_of(one.problem, assignment_of(one.problem, joint.counts))
        assert one.price_s(loads.total_s) == pytest.approx(joint.price_s, rel=1e-6)


def test_a_layout_with_a_worse_floor_is_not_evaluated() -> None:
    good, bad = random_candidates(3)[:2]
    good = Candidate(base_s=1.0, problem=good.problem)
    bad = Candidate(base_s=1e9, problem=bad.problem)
    found = best_first([bad, good])
    assert (found.candidate, found.evaluated) == (1, 1)


def test_what_does_not_fit_is_said() -> None:
    crowded = MappingProblem(
        stages=2,
        slots=4,
        traffic=Traffic(ring_bytes=1.0),
        leaf_slots=(3,),
        leaf_s_per_byte=(1.0,),
        leaf_pod=(0,),
        pod_s_per_byte=(0.0,),
    )
    with pytest.raises(MappingError, match="no layout fits"):
        best_first([Candidate(base_s=1.0, problem=crowded)])
    with pytest.raises(MappingError, match="infeasible"):
        solve_jointly([Candidate(base_s=1.0, problem=crowded)])
