"""A pipeline in three pieces: they are of the timeline, and one period stands for all of the steady state."""

from __future__ import annotations

from itertools import pairwise

import pytest

from meshwright.costmodel.schedules import Schedule
from meshwright.costmodel.simulator import simulate
from meshwright.planner.analysis.timeline import Trace, phases_document


def played(
    pp: int, micro_batches: int, chunks: int = 1, schedule: Schedule = Schedule.ONE_F_ONE_B
) -> Trace:
    timeline = simulate(
        [1.0] * pp * chunks,
        [2.0] * pp * chunks,
        pp=pp,
        num_micro_batches=micro_batches,
        schedule=schedule,
    )
    return Trace(
        timeline=timeline,
        num_micro_batches=micro_batches,
        pp=pp,
        afterwards=(),
        step_time_s=timeline.seconds,
    )


def test_one_forward_one_backward_by_hand() -> None:
    """Four ranks, forward 1 s, backward 2 s: gradients reach rank 0 after 4 forward and 3 backward passes."""
    document = phases_document(played(pp=4, micro_batches=16))
    warm_up, period, cool_down = document["phases"]
    assert document["seconds"] == (16 + 3) * 3.0
    assert (warm_up["begin_s"], warm_up["end_s"]) == (0.0, 4 + 3 * 2.0)
    assert document["period_s"] == 3.0
    assert period["end_s"] - period["begin_s"] == 3.0
    of_rank_0 = [drawn for drawn in period["passes"] if drawn[0] == 0]
    assert sum(end - begin for *_, begin, end in of_rank_0) == 3.0
    assert document["steady_s"] / document["period_s"] == pytest.approx(12)
    assert cool_down["end_s"] == document["seconds"]
    assert document["busy_s"] == [48.0] * 4


@pytest.mark.parametrize(("pp", "micro_batches", "chunks"), [(4, 32, 2), (2, 16, 3), (4, 40, 1)])
def test_every_whole_period_holds_the_same_work(pp: int, micro_batches: int, chunks: int) -> None:
    trace = played(pp, micro_batches, chunks)
    document = phases_document(trace)
    _, period, cool_down = document["phases"]
    turns = round(document["steady_s"] / document["period_s"])
    assert turns >= 3
    assert period["begin_s"] + turns * document["period_s"] == pytest.approx(cool_down["begin_s"])
    for rank in range(pp):
        starts = [
            start_s
            for step, start_s in zip(
                trace.timeline.passes[rank], trace.timeline.starts_s[rank], strict=True
            )
            if step.backward
        ]
        counts = [
            sum(
                period["begin_s"] + turn * document["period_s"] - 1e-9
                <= start_s
                < period["begin_s"] + (turn + 1) * document["period_s"] - 1e-9
                for start_s in starts
            )
            for turn in range(turns)
        ]
        assert len(set(counts)) == 1


def test_a_short_pipeline_is_one_piece() -> None:
    document = phases_document(played(pp=4, micro_batches=4))
    (whole,) = document["phases"]
    assert document["period_s"] is None
    assert (whole["begin_s"], whole["end_s"]) == (0.0, document["seconds"])
    assert len(whole["passes"]) == 4 * 4 * 2
    for rank in range(4):
        drawn = sorted(row[4:] for row in whole["passes"] if row[0] == rank)
        assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(drawn))
