"""The five jobs that the planner is judged by, and the layouts that experts published for three of them."""

from __future__ import annotations

from functools import cache

import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.model_specs.reader import read_model
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.plan_request import PlanRequest

JOBS: dict[str, tuple[str, str, int, int, int]] = {
    "llama": ("llama-3.1-405b", "llama3-24k", 16_384, 2_048, 8_192),
    "deepseek": ("deepseek-v3", "hgx-h800", 2_048, 15_360, 4_096),
    "gpt3": ("gpt3-175b", "superpod-a100", 1_024, 1_536, 2_048),
    "mixtral": ("mixtral-8x22b", "dgx-h100", 512, 512, 4_096),
    "llama-8b": ("llama-3-8b", "dgx-h100", 8, 128, 8_192),
    "largest": ("llama-3.1-405b", "dgx-h100", 131_072, 16_384, 8_192),
}

# The layouts of arXiv 2407.21783 (table 4), 2412.19437 (section 3.2.1) and 2104.04473 (section 5.1).
PUBLISHED: dict[str, dict[str, int | str]] = {
    "llama": {"tp": 8, "cp": 1, "pp": 16, "dp": 128},
    "deepseek": {"pp": 16, "ep": 64},
    "gpt3": {"tp": 8, "pp": 8},
}


def request(job: str, pins: dict[str, int | str]) -> PlanRequest:
    model, cluster, gpus, batch, seq_len = JOBS[job]
    return PlanRequest(
        model=read_model(model),
        cluster=read_cluster(cluster, gpus),
        gpus=gpus,
        global_batch=batch,
        seq_len=seq_len,
        pins=pins,
    )


@cache
def planned(job: str, pinned: bool = False) -> Plan:
    return fastest_plan(request(job, PUBLISHED[job] if pinned else {}))


@pytest.mark.parametrize(
    "job",
    [
        *(pytest.param(job, marks=pytest.mark.slow) for job in ("llama", "llama-8b")),
        *(
            pytest.param(job, marks=pytest.mark.soak)
            for job in ("gpt3", "deepseek", "mixtral", "largest")
        ),
    ],
)
def test_each_job_is_proven_optimal_and_no_slower_than_what_was_published(job: str) -> None:
    ours = planned(job)
    assert ours.status == "optimal"
    assert ours.objective.gap == 0
    assert ours.objective.step_time_s is not None
    assert ours.objective.lower_bound_s == pytest.approx(ours.objective.step_time_s, rel=1e-8)
    if job not in PUBLISHED:
        return
    experts = planned(job, pinned=True)
    assert experts.status == "optimal"
    assert experts.layout is not None
    for axis, degree in PUBLISHED[job].items():
        assert getattr(experts.layout, axis) == degree
    assert experts.objective.step_time_s is not None
    assert ours.objective.step_time_s <= experts.objective.step_time_s


def test_the_same_request_gives_the_same_plan() -> None:
    asked = request("llama-8b", {"pp": 1, "cp": 1})
    first, second = (
        fastest_plan(asked).model_dump(exclude={"solver": {"wall_s"}}) for _ in range(2)
    )
    assert second == first
