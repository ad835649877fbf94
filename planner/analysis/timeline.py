"""A step of a plan as a timeline: every pass on every pipeline rank, then what follows the pipeline.

Passes are played in the order of the schedule (`costmodel.simulator`) with the times of the cost
model's layers. Pipelines through parts and of unlike layers are priced so; the closed form that priced other
plans may be a little longer on uneven stages, and the document says both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from math import isclose
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.mixed import hand_overs_s
from meshwright.costmodel.rank_load import Stages, chunk_passes, pass_parts
from meshwright.costmodel.schedules import Schedule, traits
from meshwright.costmodel.simulator import Pass, Timeline, Work, simulate
from meshwright.costmodel.step_time import boundary_s, make_context
from meshwright.errors import InputError
from meshwright.planner.mixed.document import AnyPlan, MixedPlan, Pipeline
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import setup_of
from meshwright.planner.runs.run_terms import Predicted, layout_from_document

MOST_PASSES = 100_000
"""In one file: each brings up to ten events, and a viewer takes about a million."""
_AFTERWARDS = ("dp_comm", "optimizer", "step_overhead", "scale")
"""Parts of the step that follow the pipeline, in this order."""
_BEFORE = ("length_imbalance",)
"""Parts that only some plans have, and that lie before all of these: waits of the mean replica for others."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A plan's step, played."""

    timeline: Timeline
    num_micro_batches: int
    """Drawn; the plan may have more."""
    pp: int
    afterwards: tuple[tuple[str, float], ...]
    """(part of the step, seconds) after the last pass."""
    step_time_s: float
    """That the plan predicts."""
    parts_s: dict[Work, dict[str, list[float]]] = field(default_factory=dict)
    """By kind of pass and part of the step, such as `attention`: what one micro-batch takes in each chunk."""
    p2p_s: float = 0.0
    """What a micro-batch takes from one pipeline rank to the next, where nobody but the receiver waits."""
    sent_s: tuple[tuple[float, float], ...] = ()
    """Of each rank, what the end of its forward passes sends on, and of its backward ones, where it waits for
    that itself; empty where it does not."""
    memory_gib: tuple[tuple[float, float], ...] = ()
    """Of each rank: what is there throughout, and the most that activations add."""
    places: tuple[str, ...] = ()
    """The part that each rank runs on; empty on one cluster."""

    @property
    def seconds(self) -> float:
        """From the first pass to the end of the step as it is drawn."""
        return self.timeline.seconds + sum(seconds for _, seconds in self.afterwards)


def trace_of(plan: AnyPlan, num_micro_batches: int | None = None) -> Trace:
    """Plays a plan's step, or its first `num_micro_batches`; through parts, each rank on its own device.

    Raises InputError where the plan has no layout, the schedule needs more micro-batches, or there are more
    passes than a viewer takes.

    Parameters
    ----------
    plan
        With a layout.
    num_micro_batches
        From 1 to the plan's own, which are played where None is given.
    """
    if plan.layout is None or plan.predicted is None:
        raise InputError(f"PLAN: status {plan.status}, there is no layout to draw")
    layout = layout_from_document(plan.layout)
    m = int(layout.num_micro_batches) if num_micro_batches is None else num_micro_batches
    if not 1 <= m <= int(layout.num_micro_batches):
        raise InputError(
            f"--micro-batches: {m}, the plan has {int(layout.num_micro_batches)}; give 1 to that many"
        )
    chunks = int(layout.pp) * int(layout.vpp)
    kinds = 3 if traits(int(layout.schedule)).splits_backward else 2
    if chunks * m * kinds > MOST_PASSES:
        raise InputError(
            f"--micro-batches: {m} of them make {chunks * m * kinds:,} passes, at most {MOST_PASSES:,}; "
            f"draw the first {MOST_PASSES // (chunks * kinds)} or fewer"
        )
    drawn = _drawn_parts(plan) if isinstance(plan, MixedPlan) else _drawn(plan, plan.predicted)
    timeline, parts_s = _played(drawn, layout, m)
    return Trace(
        timeline=timeline,
        parts_s=parts_s,
        p2p_s=drawn.p2p_s,
        sent_s=drawn.sent_s,
        memory_gib=tuple(drawn.memory_gib),
        num_micro_batches=m,
        pp=int(layout.pp),
        afterwards=tuple(_after_passes(plan.predicted.breakdown_s)),
        step_time_s=plan.predicted.step_time_s,
        places=drawn.places,
    )


def _after_passes(parts_s: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    yield from ((name, parts_s[name]) for name in _BEFORE if name in parts_s)
    yield from ((name, parts_s.get(name, 0.0)) for name in _AFTERWARDS)


class _Drawn(NamedTuple):
    """What a plan's passes are timed by."""

    segments: list[tuple[Context, slice]]
    """The layout where it runs, and the pipeline ranks that run there."""
    stages: Stages
    p2p_s: float
    memory_gib: list[tuple[float, float]]
    places: tuple[str, ...] = ()
    sent_s: tuple[tuple[float, float], ...] = ()


def _drawn(plan: Plan, predicted: Predicted) -> _Drawn:
    setup = setup_of(plan)
    context = make_context(setup.workload, setup.layout, setup.placement)
    parts = zip_longest(predicted.memory_gib, predicted.memory_parts_gib)
    memory_gib = [_memory(peak_gib, by_component) for peak_gib, by_component in parts]
    p2p_s = float(np.asarray(boundary_s(context)))
    return _Drawn([(context, slice(0, int(setup.layout.pp)))], setup.stages, p2p_s, memory_gib)


def _drawn_parts(plan: MixedPlan) -> _Drawn:
    """The same of a pipeline through parts, whose ranks wait for what they send, as its price has it."""
    pipeline = Pipeline.of(plan)
    segments = [(each.part.context, each.own) for each in pipeline.segments]
    sent_s = tuple((out_s, back_s) for out_s, back_s in hand_overs_s(pipeline.segments).T.tolist())
    parts = zip(plan.memory_gib, pipeline.memory_parts_gib, strict=True)
    memory_gib = [_memory(peak_gib, by_component) for peak_gib, by_component in parts]
    places = tuple(rank.part for rank in plan.ranks)
    return _Drawn(segments, pipeline.stages, 0.0, memory_gib, places, sent_s)


def _memory(peak_gib: float, parts: Mapping[str, float] | None) -> tuple[float, float]:
    activations_gib = parts.get("activations", 0.0) if parts else 0.0
    return peak_gib - activations_gib, activations_gib


def _played(
    drawn: _Drawn, layout: Layout, m: int
) -> tuple[Timeline, dict[Work, dict[str, list[float]]]]:
    """The passes of so many micro-batches in time, and `Trace.parts_s`."""
    stages = drawn.stages
    v_shaped = traits(int(layout.schedule)).v_shaped
    passes = [vars(chunk_passes(context, stages)) for context, _ in drawn.segments]
    forward_s, backward_s, weight_s = (
        _in_model_order(_along(drawn, [each[name] for each in passes]), v_shaped)
        for name in ("forward_s", "backward_s", "weight_s")
    )
    parts = [vars(pass_parts(context, stages)) for context, _ in drawn.segments]
    forward, backward, weight = (
        {
            name: _in_model_order(_along(drawn, [each[kind].get(name) for each in parts]), v_shaped)
            for name in dict.fromkeys(name for each in parts for name in each[kind])
        }
        for kind in ("forward_s", "backward_s", "weight_s")
    )
    inputs = {
        name: [both - apart for both, apart in zip(by_chunk, weight[name], strict=True)]
        for name, by_chunk in backward.items()
    }
    for passes_s, by_part, number in ((forward_s, forward, 0), (backward_s, backward, 1)):
        for rank, sent in enumerate(drawn.sent_s):
            passes_s[rank] += sent[number]
        if drawn.sent_s:
            by_part["pipeline_p2p"] = [sent[number] for sent in drawn.sent_s]
    parts_s = {
        Work.FORWARD: forward,
        Work.BACKWARD: backward,
        Work.INPUT: inputs,
        Work.WEIGHT: weight,
    }
    try:
        timeline = simulate(
            forward_s,
            backward_s,
            pp=int(layout.pp),
            num_micro_batches=m,
            schedule=Schedule(int(layout.schedule)),
            weight_s=weight_s,
            p2p_s=drawn.p2p_s,
        )
    except ValueError as error:
        raise InputError(f"--micro-batches: {m} cannot be drawn alone: {error}") from error
    return timeline, parts_s


def _along(drawn: _Drawn, by_segment: Sequence[NDArray[np.float64] | None]) -> NDArray[np.float64]:
    """Chunks [virtual stages, pp], each rank's by its own segment; 0 where that has no such part."""
    chunks = (len(drawn.stages[0]), len(drawn.stages))
    rows = [
        np.zeros(chunks) if each is None else np.broadcast_to(each, chunks) for each in by_segment
    ]
    columns = [row[:, ranks] for row, (_, ranks) in zip(rows, drawn.segments, strict=True)]
    return np.concatenate(columns, axis=1)


def _in_model_order(by_rank: NDArray[np.float64], v_shaped: bool) -> list[float]:
    """Chunks [virtual stages, pp] one after the other: in turns, or down the ranks and up again."""
    rows = [row[::-1] if v_shaped and turn % 2 else row for turn, row in enumerate(by_rank)]
    return [float(seconds) for seconds in np.concatenate(rows)]


# A played step as Chrome's trace events, which Perfetto reads: named tracks, arrows and a counter of memory.
#
# The format: complete events (`X`), flows (`s` to `f`), counters (`C`), names of processes and threads (`M`),
# as in Google's "Trace Event Format". Times are whole microseconds: Perfetto drops a slice that crosses the
# end of another on its track, be it by the last digit of a fraction (src/trace_processor/importers/common/
# slice_tracker.cc). A process is a pipeline rank; its threads are what it computes, what follows the
# pipeline, and what it sends to and receives from other ranks.


Event = dict[str, Any]

RANK = 1000
"""Process of the first pipeline rank, and what lies between the processes of two."""
COMPUTE, AFTERWARDS, SENDS, RECEIVES = 1, 2, 10, 500
"""Threads of a pipeline rank, counted from its process on: Perfetto takes thread 0, and one that is called as
the process, for the process's first, and puts them on one track. What is sent while something else still is
takes the next thread."""
THREADS = {
    COMPUTE: "passes",
    AFTERWARDS: "gradients and optimizer",
    SENDS: "to other pipeline ranks",
    RECEIVES: "from other pipeline ranks",
}
_WORDS = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.INPUT: "backward, inputs",
    Work.WEIGHT: "backward, weights",
}
OPERATORS = "operators"
"""Category of the parts of a pass."""


@dataclass(frozen=True)
class _PlayedPass:
    """One pass and its time."""

    step: Pass
    start_s: float
    end_s: float


@dataclass(frozen=True)
class _Transfer:
    """Activations or gradients on their way from one pipeline rank to another."""

    number: int
    what: str
    sender: int
    receiver: int
    start_s: float
    end_s: float
    micro_batch: int


def trace_document(trace: Trace) -> dict[str, Any]:
    """The trace as Chrome's JSON object format.

    Parameters
    ----------
    trace
        A step as it was played; its events are in microseconds.
    """
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "predicted_step_time_s": trace.step_time_s,
            "drawn_s": trace.seconds,
            "micro_batches": trace.num_micro_batches,
        },
        "traceEvents": list(_events(trace)),
    }


def _played_passes(trace: Trace) -> Iterator[list[_PlayedPass]]:
    timeline = trace.timeline
    for rank, order in enumerate(timeline.passes):
        times = zip(order, timeline.starts_s[rank], timeline.ends_s[rank], strict=True)
        yield [_PlayedPass(*row) for row in times]


def _events(trace: Trace) -> Iterator[Event]:
    transfers = list(_transfers(trace))
    for rank, played in enumerate(_played_passes(trace)):
        yield from _process(rank, trace.places[rank] if trace.places else "")
        for thread in (COMPUTE, AFTERWARDS):
            yield from _thread(rank, thread)
        for each in played:
            yield from _pass(trace, rank, each)
        now_s = trace.timeline.seconds
        for part, seconds in trace.afterwards:
            if seconds > 0:
                track, times = (rank, AFTERWARDS), (now_s, now_s + seconds)
                yield _event(part, "after the pipeline", track, times)
            now_s += seconds
        yield from _sent(rank, SENDS, [each for each in transfers if each.sender == rank])
        yield from _sent(rank, RECEIVES, [each for each in transfers if each.receiver == rank])
        yield from _memory_counter(trace, rank, played)


def _process(rank: int, part: str) -> Iterator[Event]:
    place, on = _place(rank, COMPUTE), f" on {part}" if part else ""
    name = {"name": f"pipeline rank {rank}{on}"}
    yield {"name": "process_name", "ph": "M", **place, "args": name}
    yield {"name": "process_sort_index", "ph": "M", **place, "args": {"sort_index": rank}}


def _thread(rank: int, thread: int, lane: int = 0) -> Iterator[Event]:
    number, place = f", {lane + 1}" if lane else "", _place(rank, thread + lane)
    yield {
        "name": "thread_name",
        "ph": "M",
        **place,
        "args": {"name": f"{THREADS[thread]}{number}"},
    }
    yield {"name": "thread_sort_index", "ph": "M", **place, "args": {"sort_index": thread + lane}}


def _place(rank: int, thread: int) -> dict[str, int]:
    """The process and the thread of an event."""
    process = RANK * (rank + 1)
    return {"pid": process, "tid": process + thread}


def _pass(trace: Trace, rank: int, played: _PlayedPass) -> Iterator[Event]:
    """A pass, and inside of it its parts, one after the other, as long as they take in all its layers."""
    step, track = played.step, (rank, COMPUTE)
    yield _event(
        f"{step.work.value}{step.micro_batch}",
        _WORDS[step.work],
        track,
        (played.start_s, played.end_s),
        micro_batch=step.micro_batch,
        chunk=step.chunk,
        virtual_stage=step.chunk // trace.pp,
    )
    by_part = trace.parts_s.get(step.work, {})
    seconds = {name: max(by_chunk[step.chunk], 0.0) for name, by_chunk in by_part.items()}
    scale = (played.end_s - played.start_s) / (sum(seconds.values()) or 1.0)
    begin_s = played.start_s
    for name, part_s in seconds.items():
        end_s = begin_s + part_s * scale
        if _microseconds(end_s) > _microseconds(begin_s):
            yield _event(name, OPERATORS, track, (begin_s, end_s))
        begin_s = end_s


def _transfers(trace: Trace) -> Iterator[_Transfer]:
    """What every pass sends to the rank of the next chunk, forward activations and back gradients."""
    rank_of = {
        each.step.chunk: rank
        for rank, played in enumerate(_played_passes(trace))
        for each in played
    }
    number = 0
    for rank, played in enumerate(_played_passes(trace)):
        for each in played:
            step = each.step
            receiver = rank_of.get(step.chunk + (-1 if step.backward else 1), rank)
            inside_s = trace.sent_s[rank][step.backward] if trace.sent_s else 0.0
            if receiver == rank or trace.p2p_s + inside_s <= 0 or step.work is Work.WEIGHT:
                continue
            number += 1
            what = "gradients" if step.backward else "activations"
            times = each.end_s - inside_s, each.end_s + trace.p2p_s
            yield _Transfer(number, what, rank, receiver, *times, step.micro_batch)


def _sent(rank: int, thread: int, transfers: list[_Transfer]) -> Iterator[Event]:
    """One side of transfers, each with its end of an arrow; those at the same time on several threads."""
    free_us: list[int] = []
    for transfer in sorted(transfers, key=lambda each: each.start_s):
        begin_us, end_us = _microseconds(transfer.start_s), _microseconds(transfer.end_s)
        lane = next(
            (number for number, free in enumerate(free_us) if free <= begin_us), len(free_us)
        )
        if lane == len(free_us):
            free_us.append(0)
            yield from _thread(rank, thread, lane)
        free_us[lane] = end_us
        is_sender = thread == SENDS
        words = f"to rank {transfer.receiver}" if is_sender else f"from rank {transfer.sender}"
        track = (rank, thread + lane)
        yield _event(
            f"{transfer.what} {words}",
            "transfer",
            track,
            (transfer.start_s, transfer.end_s),
            micro_batch=transfer.micro_batch,
        )
        # Ends of arrows bind to the slice around them: they lie inside of it, the far end later.
        third_us = (end_us - begin_us) // 3
        if third_us:
            arrow: Event = {"name": transfer.what, "cat": "transfer", "id": transfer.number}
            arrow |= _place(rank, thread + lane)
            if is_sender:
                yield {**arrow, "ph": "s", "ts": begin_us + third_us}
            else:
                yield {**arrow, "ph": "f", "bp": "e", "ts": begin_us + 2 * third_us}


def _memory_counter(trace: Trace, rank: int, played: list[_PlayedPass]) -> Iterator[Event]:
    """GiB on a GPU of a rank: what stays, and activations in proportion to the micro-batches in flight.

    The most that are in flight make up the predicted peak.
    """
    if not trace.memory_gib:
        return
    last = Work.WEIGHT if any(each.step.work is Work.WEIGHT for each in played) else Work.BACKWARD
    changes = [(each.start_s, 1) for each in played if each.step.work is Work.FORWARD]
    changes += [(each.end_s, -1) for each in played if each.step.work in (last, Work.BACKWARD)]
    counts = [(0.0, 0)]
    for at_s, change in sorted(changes):
        counts.append((at_s, counts[-1][1] + change))
    static_gib, activations_gib = trace.memory_gib[rank]
    peak = max(count for _, count in counts)
    for at_s, count in counts:
        amounts = {"static": static_gib, "activations": activations_gib * count / peak}
        track: Event = {"ph": "C", **_place(rank, COMPUTE), "ts": _microseconds(at_s)}
        yield {"name": "memory GiB", **track, "args": amounts}


def _event(
    name: str,
    category: str,
    track: tuple[int, int],
    times_s: tuple[float, float],
    **arguments: int,
) -> Event:
    """A complete event from one time to another."""
    begin_us, end_us = map(_microseconds, times_s)
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        **_place(*track),
        "ts": begin_us,
        "dur": end_us - begin_us,
        "args": arguments,
    }


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


# A pipeline in three pieces: how it fills, one period of its steady state, and how it drains.
#
# Between filling and draining every rank repeats the same passes; one period says all of it. A short pipeline
# is one piece.


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
    for rank, played in enumerate(_played_passes(trace)):
        for each in played:
            if each.start_s < end_s and each.end_s > begin_s:
                step, shown = each.step, (max(each.start_s, begin_s), min(each.end_s, end_s))
                yield [rank, step.work.value, step.micro_batch, step.chunk, *shown]
