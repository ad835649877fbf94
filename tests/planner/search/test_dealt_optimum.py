"""Searches with samples dealt to ranks equal brute force over all degrees."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from meshwright.costmodel import hybrid_context
from meshwright.costmodel.lengths import dealt_lengths, packed_lengths
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.space import space_of
from tests.planner.search import plain_oracle
from tests.planner.search.test_planner_optimum import request, search
from tests.soaked import some


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides deal the same steps: how many tells nothing here."""
    monkeypatch.setattr(hybrid_context, "_MOST_DRAWN", 1024)


def dealt(seed: int) -> PlanRequest:
    """A small problem of a model that it is allowed for."""
    draw, asked = random.Random(seed), request(seed)
    rng = np.random.default_rng(seed)
    size = draw.choice([1024, 2048, 4096])
    sizes = np.array([size // 16, size // 5, size])
    counts = rng.integers(1, 50, 3)
    packs = packed_lengths(sizes, counts, pack_size=size)
    packs = replace(packs, dealt=dealt_lengths(sizes, counts, pack_size=size))
    return replace(
        asked,
        model=asked.model.model_copy(update={"mtp_layers": 0, "attention": None}),
        precision="bf16",
        framework="megatron",
        seq_len=size,
        gpus=draw.choice([2, 4, 8, 8]),
        global_batch=8,
        forbids=(*asked.forbids, "idle-gpus", "optimizer-offload", "shard-groups"),
        lengths=packs,
        pins={"recompute": "none", "zero_stage": draw.choice([0, 1])},
    )


def check(seed: int) -> bool:
    asked = dealt(seed)
    outcome, least_s = search(asked), plain_oracle.least_step_time_s(asked)
    assert bool(outcome.best) == (least_s is not None)
    if least_s is None:
        return False
    assert outcome.best[0].step_time_s == pytest.approx(least_s, rel=1e-9)
    assert outcome.status == "optimal"
    return True


@pytest.mark.slow
def test_searches_equal_an_oracle_without_a_space() -> None:
    assert sum(check(seed) for seed in (1, 2, 6)) >= 3


@pytest.mark.soak
@pytest.mark.parametrize("seed", some([*range(100, 140), 0, 3, 4, 5, 7]))
def test_searches_equal_an_oracle_without_a_space_many(seed: int) -> None:
    check(seed)


def test_layouts_use_all_gpus_without_a_pipeline() -> None:
    space = space_of(dealt(1))
    assert space.pp == space.ep == (1,)
    assert set(space.zero) <= {0, 1}
    assert space.fewest_gpus == space.workload.gpus
    assert all(degree & (degree - 1) == 0 for degree in (*space.dp, *space.cp))
