"""A pipeline in three pieces: how it fills, one period of its steady state, and how it drains.

Between filling and draining every rank repeats the same passes; one period says all of it. A short pipeline
is one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import isclose
from typing import Any

from meshwright.costmodel.pipeline.orders import Work
from meshwright.planner.analysis.timeline import Trace

FEWEST_PERIODS = 3
"""Equal ones in a row; below that nothing is left out."""
SAME_PERIOD = 0.01
"""Share by which equal periods may differ."""


def phases_document(trace: Trace) -> dict[str, Any]:
    """The pieces with their passes.

    Parameters
    ----------
    trace
        A step as it was played.

    Returns
    -------
    dict
        `seconds`; `busy_s` of each rank; `phases`, each with `name`, `begin_s`, `end_s` and `passes` as
        [rank, kind, micro-batch, chunk, start in s, end in s], cut off at the piece's ends; kinds are F, B,
        and of a backward pass in two parts I and W. `steady_s` is the time between warm-up and cool-down and
        `period_s` one turn of it; both null where the pipeline is in one piece.
    """
    timeline = trace.timeline
    cuts = _cuts(trace)
    pieces = [("the whole pipeline", 0.0, timeline.seconds)]
    steady_s = period_s = None
    if cuts is not None:
        filled_s, period_s, drained_s = cuts
        steady_s = drained_s - filled_s
        pieces = [
            ("warm-up", 0.0, filled_s),
            ("one period", filled_s, filled_s + period_s),
            ("cool-down", drained_s, timeline.seconds),
        ]
    return {
        "seconds": timeline.seconds,
        "busy_s": list(timeline.busy_s),
        "steady_s": steady_s,
        "period_s": period_s,
        "phases": [
            {
                "name": name,
                "begin_s": begin_s,
                "end_s": end_s,
                "passes": list(_passes(trace, begin_s, end_s)),
            }
            for name, begin_s, end_s in pieces
        ],
    }


def _cuts(trace: Trace) -> tuple[float, float, float] | None:
    """Seconds when the steady state begins, of one period, and when the pipeline begins to drain.

    The backward passes of the first rank are the clock: a period is one of them, or a round of pp
    micro-batches through all of its virtual stages. None where fewer than `FEWEST_PERIODS` repeat.
    """
    clock = _backward_starts_s(trace)
    chunks = len({step.chunk for step in trace.timeline.passes[0]})
    turn = trace.pp * chunks if chunks > 1 else 1
    ticks = clock[::turn]
    periods_s = [after - before for before, after in pairwise(ticks)]
    longest = max(_even_runs(periods_s), key=len, default=range(0))
    if len(longest) < FEWEST_PERIODS:
        return None
    first, last = longest[0], longest[-1] + 1
    return ticks[first], periods_s[first], ticks[last]


def _backward_starts_s(trace: Trace) -> list[float]:
    """Of the first rank, up to the one after its last forward pass."""
    starts_s = []
    waiting: list[float] = []
    for step, start_s in zip(trace.timeline.passes[0], trace.timeline.starts_s[0], strict=True):
        if step.work in (Work.BACKWARD, Work.INPUT):
            waiting.append(start_s)
        elif step.work is Work.FORWARD:
            starts_s += waiting
            waiting = []
    return starts_s + waiting[:1]


def _even_runs(periods_s: list[float]) -> Iterator[range]:
    """Runs of neighbouring periods that are as long as the first of them."""
    begin = 0
    for index in range(1, len(periods_s) + 1):
        if index == len(periods_s) or not isclose(
            periods_s[index], periods_s[begin], rel_tol=SAME_PERIOD
        ):
            yield range(begin, index)
            begin = index


def _passes(trace: Trace, begin_s: float, end_s: float) -> Iterator[list[Any]]:
    timeline = trace.timeline
    for rank, order in enumerate(timeline.passes):
        played = zip(order, timeline.starts_s[rank], timeline.ends_s[rank], strict=True)
        for step, start_s, stop_s in played:
            if start_s < end_s and stop_s > begin_s:
                shown = (max(start_s, begin_s), min(stop_s, end_s))
                yield [rank, step.work.value, step.micro_batch, step.chunk, *shown]
