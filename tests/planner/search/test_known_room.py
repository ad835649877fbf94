"""What fits of degrees is asked once for executions, and for clusters, that need the same memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from meshwright.costmodel.footprint import as_memory_sees
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.rates import peak_memory_band, step_time_band
from meshwright.planner.mapping.pricing import pricing_of
from meshwright.planner.plan.best_plan import search_with_buckets
from meshwright.planner.plan.robustness import changes
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.search import branches
from meshwright.planner.search.branches import Branch, KnownRoom, RoomOfBranches
from meshwright.planner.search.loop import branches_of
from meshwright.planner.search.space import space_of

CASES: dict[str, dict[str, Any]] = {
    "experts": {"model": "qwen3-30b-a3b", "cluster": "dgx-h100", "gpus": 8},
    "latent attention": {"model": "deepseek-v2-lite", "cluster": "h100-leaf-3to1", "gpus": 8},
    "dense": {"model": "llama-3-8b", "cluster": "superpod-a100", "gpus": 4, "reserve_gib": 30.0},
    "torchtitan": {
        "model": "llama-3-8b",
        "cluster": "dgx-h100",
        "gpus": 4,
        "framework": "torchtitan",
        "reserve_gib": 50.0,
    },
    "deepspeed": {
        "model": "qwen3-8b",
        "cluster": "dgx-h100",
        "gpus": 4,
        "framework": "deepspeed",
        "reserve_gib": 40.0,
    },
}


def _request(name: str) -> PlanRequest:
    return read_request(global_batch=16, seq_len=4096, **CASES[name])


def _own_rows(branch: Branch, request: PlanRequest) -> Any:
    degrees = space_of(request).degrees(request.gpus)
    return degrees, np.flatnonzero(branch.has(degrees))[::7]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.slow if name in ("experts", "latent attention") else ()
        )
        for name in CASES
    ],
)
def test_each_branch_hears_what_it_would_find_itself(name: str) -> None:
    request = _request(name)
    own = branches_of(request, pricing_of)
    degrees, _ = _own_rows(own[0], request)
    wanted = [_own_rows(branch, request)[1] for branch in own]
    for _ in range(2):  # the second time all of it is known
        fits = RoomOfBranches(own).among(degrees)
        found = [fits(index, rows) for index, rows in enumerate(wanted)]
        for branch, rows, variants in zip(own, wanted, found, strict=True):
            assert np.array_equal(variants, branch.fitting(degrees.take(rows))), branch.execution
    assert any(each.any() for each in found)
    assert not all(each.all() for each in found)


@pytest.mark.parametrize("name", CASES)
def test_no_byte_depends_on_a_rate(name: str) -> None:
    request = _request(name)
    workload = request.workload()
    bands = step_time_band(workload), peak_memory_band(workload)
    branch = branches_of(request, pricing_of)[0]
    degrees, rows = _own_rows(branch, request)
    variants = branch.space.variants(degrees.take(rows))
    needed_gib = branch.pricing.recomputed_memory_gib(variants)
    seen = as_memory_sees(branch.pricing.workload)
    slower = [change for change in changes(request, *bands) if not change.memory]
    assert slower
    for change in slower:
        other = branches_of(change.applied(request), pricing_of)[0].pricing
        assert as_memory_sees(other.workload) == seen, change.words
        assert np.array_equal(other.recomputed_memory_gib(variants), needed_gib)


def test_less_memory_is_another_question() -> None:
    request = _request("experts")
    bands = step_time_band(request.workload()), peak_memory_band(request.workload())
    seen = as_memory_sees(request.workload())
    other = [change for change in changes(request, *bands) if change.memory]
    assert other
    for change in other:
        assert as_memory_sees(change.applied(request).workload()) != seen


def test_known_degrees_are_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "MOST_KEPT", 60)
    request = _request("dense")
    asked: list[int] = []
    degrees = space_of(request).degrees(request.gpus)
    room = KnownRoom()

    def fitting(some: Any) -> Any:
        asked.append(len(some.tp))
        return np.stack([some.tp > 1, some.pp > 1], axis=1)

    for rows in (np.arange(40), np.arange(20, 70), np.arange(70), np.arange(10)):
        own = degrees.take(rows)
        assert np.array_equal(room.fits(own, fitting), np.stack([own.tp > 1, own.pp > 1], axis=1))
    assert asked == [40, 30, 70, 10]


@pytest.mark.parametrize("name", CASES)
def test_states_that_no_branch_has_room_for_leave_nothing_that_fits(name: str) -> None:
    request = _request(name)
    own = branches_of(request, pricing_of)
    degrees, _ = _own_rows(own[0], request)
    holds = RoomOfBranches(own).for_states(degrees)
    by_branch = [branch.holds_states(degrees) for branch in own]
    assert np.array_equal(holds, np.logical_or.reduce(by_branch))
    for branch in own:
        assert not branch.fitting(degrees.take(~holds)).any()


def _likely(rng: random.Random, request: PlanRequest) -> Layout:
    """Any layout of the space, or one that is not: what a question begins with need not be good."""
    space = space_of(request)
    degrees = space.degrees(request.gpus)
    return degrees.scalar(rng.randrange(degrees.broadcast_shape()[0]))


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2, 3, 4)),
    ],
)
def test_a_question_has_the_same_answer_when_degrees_without_room_are_passed_over(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    pins: tuple[dict[str, int | str], ...] = ({}, {"optimizer_offload": 0}, {"tp_overlap": "off"})
    request = read_request(
        model=rng.choice(["qwen3-30b-a3b", "deepseek-v2-lite", "llama-3-8b", "gpt-oss-20b"]),
        cluster=rng.choice(["dgx-h100", "dgx-a100"]),
        gpus=rng.choice([4, 8, 12]),
        global_batch=rng.choice([24, 48]),
        seq_len=4096,
        reserve_gib=rng.choice([0.0, 25.0, 45.0]),
        pin=rng.choice(pins),
    )
    begin_with = _likely(rng, request)
    passed_over = search_with_buckets(request, begin_with=begin_with)

    def every_degree(self: RoomOfBranches, degrees: Layout) -> Any:
        return np.ones(degrees.broadcast_shape(), dtype=np.bool_)

    monkeypatch.setattr(RoomOfBranches, "for_states", every_degree)
    looked_at = search_with_buckets(request, begin_with=begin_with)
    assert passed_over.status == looked_at.status
    assert passed_over.best == looked_at.best
    assert passed_over.lower_bound_s == looked_at.lower_bound_s
    assert passed_over.certificate.priced == looked_at.certificate.priced
