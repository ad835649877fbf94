"""A played step as Chrome's trace events, which Perfetto reads: named tracks and a counter of memory.

The format: complete events (`X`, microseconds), counters (`C`), names of processes and threads (`M`), as in
Google's "Trace Event Format". A process is a pipeline rank; its threads are what it computes, what its layers
wait for, what it sends to other ranks, and what follows the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.costmodel.pipeline.orders import Pass, Work
from meshwright.planner.analysis.timeline import Trace

Event = dict[str, Any]

COMPUTE, WAITS, TRANSFERS, AFTERWARDS = range(4)
"""Threads of a pipeline rank."""
THREADS = {
    COMPUTE: "passes",
    WAITS: "communication of layers",
    TRANSFERS: "to other pipeline ranks",
    AFTERWARDS: "gradients and optimizer",
}
_WORDS = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.INPUT: "backward, inputs",
    Work.WEIGHT: "backward, weights",
}


@dataclass(frozen=True)
class _PlayedPass:
    """One pass and its time."""

    step: Pass
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def trace_document(trace: Trace) -> dict[str, Any]:
    """The trace as Chrome's JSON object format."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "predicted_step_time_s": trace.step_time_s,
            "drawn_s": trace.seconds,
            "micro_batches": trace.num_micro_batches,
        },
        "traceEvents": list(_events(trace)),
    }


class _Chunks:
    """Of every chunk of the model: its rank, and the seconds of one micro-batch there, both ways."""

    def __init__(self, trace: Trace) -> None:
        self.rank: dict[int, int] = {}
        self.seconds: dict[int, float] = {}
        for rank, played in enumerate(_played_passes(trace)):
            for each in played:
                step = each.step
                self.rank[step.chunk] = rank
                if step.micro_batch == 0 and step.work is not Work.WEIGHT:
                    before_s = self.seconds.get(step.chunk, 0.0)
                    self.seconds[step.chunk] = before_s + each.seconds


def _played_passes(trace: Trace) -> Iterator[list[_PlayedPass]]:
    timeline = trace.timeline
    for rank, order in enumerate(timeline.passes):
        times = zip(order, timeline.starts_s[rank], timeline.ends_s[rank], strict=True)
        yield [_PlayedPass(*row) for row in times]


def _events(trace: Trace) -> Iterator[Event]:
    chunks = _Chunks(trace)
    for rank, played in enumerate(_played_passes(trace)):
        yield from _names(rank)
        for each in played:
            yield _pass(trace, rank, each)
            if each.step.work is not Work.WEIGHT:
                yield from _waits(trace, rank, each, chunks)
                yield from _transfer(trace, rank, each, chunks)
        yield from _afterwards(trace, rank)
        yield from _memory_counter(trace, rank, played)


def _names(rank: int) -> Iterator[Event]:
    named = {"name": f"pipeline rank {rank}"}
    yield {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": named}
    order = {"sort_index": rank}
    yield {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": order}
    for thread, name in THREADS.items():
        track: Event = {"ph": "M", "pid": rank, "tid": thread}
        yield {"name": "thread_name", **track, "args": {"name": name}}
        yield {"name": "thread_sort_index", **track, "args": {"sort_index": thread}}


def _pass(trace: Trace, rank: int, played: _PlayedPass) -> Event:
    step = played.step
    return _event(
        f"{step.work.value}{step.micro_batch}",
        _WORDS[step.work],
        (rank, COMPUTE),
        played.start_s,
        played.seconds,
        micro_batch=step.micro_batch,
        chunk=step.chunk,
        virtual_stage=step.chunk // trace.pp,
    )


def _waits(trace: Trace, rank: int, played: _PlayedPass, chunks: _Chunks) -> Iterator[Event]:
    """What the layers of a pass wait for in all, one part after the other up to the end of the pass.

    A micro-batch's waits in a chunk are shared out over its passes by their time, as the prices are.
    """
    step = played.step
    share = played.seconds / chunks.seconds[step.chunk]
    now_s = played.end_s
    for part, by_chunk in trace.waits_s.items():
        seconds = by_chunk[step.chunk] * share
        if seconds > 0:
            now_s -= seconds
            track = (rank, WAITS)
            batch = step.micro_batch
            yield _event(part, "communication", track, now_s, seconds, micro_batch=batch)


def _transfer(trace: Trace, rank: int, played: _PlayedPass, chunks: _Chunks) -> Iterator[Event]:
    """The activations or gradients that a pass sends to the rank of the next chunk."""
    step = played.step
    receiver = chunks.rank.get(step.chunk + (-1 if step.backward else 1), rank)
    if receiver == rank or trace.p2p_s <= 0:
        return
    what = "gradients" if step.backward else "activations"
    name, track = f"{what} to rank {receiver}", (rank, TRANSFERS)
    batch = step.micro_batch
    yield _event(name, "transfer", track, played.end_s, trace.p2p_s, micro_batch=batch)


def _afterwards(trace: Trace, rank: int) -> Iterator[Event]:
    now_s = trace.timeline.seconds
    for part, seconds in trace.afterwards:
        if seconds > 0:
            yield _event(part, "after the pipeline", (rank, AFTERWARDS), now_s, seconds)
        now_s += seconds


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
    most = max(count for _, count in counts)
    for at_s, count in counts:
        amounts = {"static": static_gib, "activations": activations_gib * count / most}
        track: Event = {"ph": "C", "pid": rank, "tid": 0, "ts": at_s * 1e6}
        yield {"name": "memory GiB", **track, "args": amounts}


def _event(
    name: str,
    category: str,
    track: tuple[int, int],
    start_s: float,
    seconds: float,
    **arguments: int,
) -> Event:
    process, thread = track
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": start_s * 1e6,
        "dur": seconds * 1e6,
        "args": arguments,
    }
