"""Pipeline schedules played event by event: what closed forms are checked against, and what a trace draws.

A rank runs its forward and backward passes in the order that its schedule fixes; each starts when the one
before it on the rank is done and its input has arrived. Orders follow megatron-core
`pipeline_parallel/schedules.py` (1F1B: Narayanan et al. 2021, arXiv 2104.04473, section 2.2; GPipe: Huang et
al. 2019, arXiv 1811.06965).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Schedule = Literal["gpipe", "1f1b"]


class Pass(NamedTuple):
    """One forward or backward pass of a micro-batch through a chunk."""

    chunk: int
    micro_batch: int
    backward: bool


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
        """Most chunk activations that each rank holds at a time: forward passes less backward passes done."""
        return tuple(_peak(order) for order in self.passes)


def _peak(order: Sequence[Pass]) -> int:
    held = most = 0
    for one in order:
        held += -1 if one.backward else 1
        most = max(most, held)
    return most


def rank_order(
    rank: int, pp: int, vpp: int, num_micro_batches: int, schedule: Schedule = "1f1b"
) -> tuple[Pass, ...]:
    """The passes of one pipeline rank in the order in which it runs them.

    1F1B warms up with p - r - 1 forward passes, interleaved (vpp > 1) with 2 (p - r - 1) + (v - 1) p, then
    takes turns. Interleaving runs pp micro-batches through a chunk before the next chunk; raises ValueError
    where pp does not divide the micro-batches.
    """
    work = num_micro_batches * vpp
    if vpp > 1 and num_micro_batches % pp:
        raise ValueError(f"num_micro_batches: {num_micro_batches} is not a multiple of pp {pp}, vpp is {vpp}")
    forward = [_pass(k, rank, pp, vpp, backward=False) for k in range(work)]
    backward = [_pass(k, rank, pp, vpp, backward=True) for k in range(work)]
    if schedule == "gpipe":
        if vpp > 1:
            raise ValueError(f"vpp: {vpp}, GPipe has no virtual stages")
        return (*forward, *reversed(backward))
    warm_up = pp - rank - 1 if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * pp
    warm_up = min(warm_up, work)
    order = forward[:warm_up]
    for ahead, behind in zip(forward[warm_up:], backward, strict=False):
        order += [ahead, behind]
    return (*order, *backward[work - warm_up :])


def _pass(k: int, rank: int, pp: int, vpp: int, *, backward: bool) -> Pass:
    """The k-th forward or backward pass of a rank."""
    if vpp == 1:
        return Pass(rank, k, backward)
    turn, place = divmod(k, pp * vpp)
    stage, offset = divmod(place, pp)
    if backward:
        stage = vpp - 1 - stage
    return Pass(stage * pp + rank, turn * pp + offset, backward)


def simulate(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    pp: int,
    num_micro_batches: int,
    schedule: Schedule = "1f1b",
    p2p_s: float = 0.0,
) -> Timeline:
    """Plays a schedule. `forward_s` and `backward_s` are seconds per chunk, in model order.

    Chunk c runs on rank c mod pp. `p2p_s` passes between neighbouring chunks, and delays the receiver only.
    Raises ValueError where the chunks are not a multiple of pp, or the schedule cannot run.
    """
    chunks = len(forward_s)
    if len(backward_s) != chunks or chunks % pp or not chunks:
        raise ValueError(f"forward_s, backward_s: {chunks} and {len(backward_s)} chunks, pp is {pp}")
    orders = [rank_order(r, pp, chunks // pp, num_micro_batches, schedule) for r in range(pp)]
    starts: list[list[float]] = [[] for _ in range(pp)]
    ends: list[list[float]] = [[] for _ in range(pp)]
    done: dict[Pass, float] = {}
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while len(ends[rank]) < len(order):
                one = order[len(ends[rank])]
                ready = _ready_s(one, done, chunks, p2p_s if pp > 1 else 0.0)
                if ready is None:
                    break
                start = max(ready, ends[rank][-1] if ends[rank] else 0.0)
                done[one] = start + (backward_s if one.backward else forward_s)[one.chunk]
                starts[rank].append(start)
                ends[rank].append(done[one])
                left -= 1
        if left == before:
            raise ValueError(f"the {schedule} schedule waits for itself: pp {pp}, {chunks} chunks")
    return Timeline(tuple(orders), tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _ready_s(one: Pass, done: dict[Pass, float], chunks: int, p2p_s: float) -> float | None:
    """When the input of a pass has arrived; None where it is not known yet."""
    if not one.backward:
        if one.chunk == 0:
            return 0.0
        source, delay_s = Pass(one.chunk - 1, one.micro_batch, False), p2p_s
    elif one.chunk == chunks - 1:
        source, delay_s = Pass(one.chunk, one.micro_batch, False), 0.0
    else:
        source, delay_s = Pass(one.chunk + 1, one.micro_batch, True), p2p_s
    end = done.get(source)
    return None if end is None else end + delay_s
