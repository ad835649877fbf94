"""Pipeline schedules played event by event: what closed forms are checked against, and what a trace draws.

A rank runs its passes in the order that its schedule fixes (`schedule_orders`); each starts when the one
before it on the rank is done and its input has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.costmodel.pipeline.orders import Pass, Work, rank_order
from meshwright.costmodel.pipeline.schedules import Schedule, traits

__all__ = ["Pass", "Timeline", "Work", "rank_order", "simulate"]


@dataclass(frozen=True)
class Timeline:
    """When every pass ran, and what that means."""

    passes: tuple[tuple[Pass, ...], ...]
    """Of each rank, in order."""
    starts_s: tuple[tuple[float, ...], ...]
    ends_s: tuple[tuple[float, ...], ...]

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(ends[-1] for ends in self.ends_s)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.starts_s, self.ends_s, strict=True)
        )

    @property
    def peak_chunks(self) -> tuple[int, ...]:
        """Most chunk activations that each rank holds at a time; a pass lets them go when it is done."""
        return tuple(_peak(order) for order in self.passes)


def _peak(order: Sequence[Pass]) -> int:
    held = most = 0
    for one in order:
        held -= one.frees
        most = max(most, held)
    return most


def simulate(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    pp: int,
    num_micro_batches: int,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    weight_s: Sequence[float] | None = None,
    p2p_s: float = 0.0,
) -> Timeline:
    """Plays a schedule. `forward_s` and `backward_s` are seconds per chunk, in model order.

    `weight_s` is what of `backward_s` weight gradients take (by default half): the schedules that split the
    backward pass run it apart. `p2p_s` passes between chunks on different ranks, and delays the receiver
    only. Raises ValueError where the chunks are not a multiple of pp, or the schedule cannot run.
    """
    chunks = len(forward_s)
    if len(backward_s) != chunks or chunks % pp or not chunks:
        raise ValueError(
            f"forward_s, backward_s: {chunks} and {len(backward_s)} chunks, pp is {pp}"
        )
    apart = list(weight_s) if weight_s is not None else [b / 2 for b in backward_s]
    if len(apart) != chunks:
        raise ValueError(f"weight_s: {len(apart)} chunks, not {chunks}")
    seconds = {
        Work.FORWARD: list(forward_s),
        Work.BACKWARD: list(backward_s),
        Work.INPUT: [b - w for b, w in zip(backward_s, apart, strict=True)],
        Work.WEIGHT: apart,
    }
    orders = [rank_order(r, pp, chunks // pp, num_micro_batches, schedule) for r in range(pp)]
    starts, ends = _play(orders, seconds, chunks, p2p_s, traits(schedule).v_shaped)
    if any(len(done) < len(order) for done, order in zip(ends, orders, strict=True)):
        raise ValueError(f"the {schedule.name} schedule waits for itself: pp {pp}, {chunks} chunks")
    return Timeline(tuple(orders), tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _play(
    orders: Sequence[Sequence[Pass]],
    seconds: dict[Work, list[float]],
    chunks: int,
    p2p_s: float,
    v_shaped: bool,
) -> tuple[list[list[float]], list[list[float]]]:
    """Starts and ends of every rank's passes, as far as the schedule runs without waiting for itself."""
    pp = len(orders)
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    forward_done: dict[tuple[int, int], float] = {}
    backward_done: dict[tuple[int, int], float] = {}
    local = chunks // 2 if v_shaped else 0
    """The chunk whose predecessor lies on the same rank (0: none)."""

    def ready_s(one: Pass) -> float | None:
        chunk, micro_batch = one.chunk, one.micro_batch
        if one.work is Work.WEIGHT:
            return 0.0
        if one.work is Work.FORWARD:
            if chunk == 0:
                return 0.0
            end = forward_done.get((chunk - 1, micro_batch))
            hop = pp > 1 and chunk != local
        elif chunk == chunks - 1:
            end, hop = forward_done.get((chunk, micro_batch)), False
        else:
            end = backward_done.get((chunk + 1, micro_batch))
            hop = pp > 1 and chunk + 1 != local
        return None if end is None else end + p2p_s * hop

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            now = ends[rank][-1] if ends[rank] else 0.0
            while len(ends[rank]) < len(order):
                at = len(ends[rank])
                together = order[at : at + 1 + order[at].paired]
                arrivals = [ready_s(one) for one in together]
                if None in arrivals:
                    break
                now = max(now, *(arrival for arrival in arrivals if arrival is not None))
                for one in together:
                    starts[rank].append(now)
                    now += seconds[one.work][one.chunk]
                    ends[rank].append(now)
                for one in together:
                    if one.work is Work.FORWARD:
                        forward_done[one.chunk, one.micro_batch] = now
                    elif one.work is not Work.WEIGHT:
                        backward_done[one.chunk, one.micro_batch] = now
                moved = True
    return starts, ends
