"""Questions that users asked in public are answered as it happened to them.

The threads are public; the configurations are as the threads state them, what they leave out is assumed and
said beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

import meshwright
from tests.places import DATA

if TYPE_CHECKING:
    from meshwright.planner.runs.run_terms import Predicted

THREADS = yaml.safe_load((DATA / "threads.yaml").read_text(encoding="utf-8"))
FIGURES = ("tokens_per_s_per_gpu", "tflops_per_gpu")


def predicted_of(run: dict[str, Any]) -> Predicted:
    """What `estimate` predicts of a run of a thread."""
    (priced,) = meshwright.estimate(run)
    return priced.predicted


@pytest.mark.parametrize("thread", THREADS, ids=lambda thread: thread["thread"])
def test_what_happened_is_predicted(thread: dict[str, Any]) -> None:
    of = {name: predicted_of(run) for name, run in thread["runs"].items()}
    for name, (least, most) in thread.get("seconds", {}).items():
        assert least <= of[name].step_time_s <= most
    for name, (least, most) in thread.get("memory_gib", {}).items():
        assert least <= max(of[name].memory_gib) <= most
    for figure in FIGURES:
        for name, (least, most) in thread.get(figure, {}).items():
            assert least <= getattr(of[name], figure) <= most
    if (slower := thread.get("slower")) is not None:
        least, most = slower["times"]
        ratio = of[slower["run"]].step_time_s / of[slower["than"]].step_time_s
        assert least <= ratio <= most


def test_a_70b_on_two_gpus_has_no_plan() -> None:
    """NVIDIA/Megatron-LM#783: it ran out of memory, and nobody said what would do."""
    answer = meshwright.plan(
        "llama-2-70b", cluster="dgx-h100", gpus=2, global_batch=2, seq_len=4096
    )
    assert answer.infeasible is not None
    assert answer.infeasible.smallest_changes[0].startswith("take 8 GPUs, not 2")
