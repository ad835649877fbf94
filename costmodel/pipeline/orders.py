"""In which order each pipeline rank runs its passes, for every schedule.

Orders follow the code that runs them: megatron-core 0.19 `pipeline_parallel/schedules.py` for 1F1B and its
interleaved form (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), torch 2.13
`torch.distributed.pipelining.schedules` for breadth-first (Lamy-Poirier 2022, arXiv 2211.05953), zero-bubble
ZB-H1 and ZB-V (Qi et al. 2023, arXiv 2401.10241, sections 2 and 6; arXiv 2405.15362) and DualPipeV, which is
DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) folded onto half of the ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, Self

from meshwright.costmodel.pipeline.schedules import Schedule, traits


class Work(StrEnum):
    """What a pass computes."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and of weights."""
    INPUT = "I"
    """Gradients of inputs alone: what the chunk before waits for."""
    WEIGHT = "W"
    """Gradients of weights alone: what nobody waits for."""


class Pass(NamedTuple):
    """One pass of a micro-batch through a chunk of the model."""

    chunk: int
    micro_batch: int
    work: Work
    paired: bool = False
    """Whether it is a forward pass that runs together with the backward pass after it: both wait for the
    inputs of both, and hand on their results at the end of both (DualPipe's F&B)."""

    @property
    def backward(self) -> bool:
        """Whether it is a backward pass or a part of one."""
        return self.work is not Work.FORWARD


def pass_order(
    rank: int, pp: int, vpp: int, num_micro_batches: int, schedule: Schedule = Schedule.ONE_F_ONE_B
) -> tuple[Pass, ...]:
    """The passes of one pipeline rank in the order in which it runs them.

    Parameters
    ----------
    rank : int
        Pipeline rank, 0 to pp - 1.
    pp : int
        Pipeline ranks, at least 1.
    vpp : int
        Chunks of a rank, at least 1.
    num_micro_batches : int
        Micro-batches per step and replica, at least 1.
    schedule : Schedule
        The order; the module's text has the source of each.

    Returns
    -------
    tuple of Pass

    Raises
    ------
    ValueError
        Where the schedule has no such shape (`schedules.Traits`).
    """
    traits(schedule).require(pp, vpp, num_micro_batches)
    m = num_micro_batches
    if schedule is Schedule.GPIPE or schedule is Schedule.BREADTH_FIRST:
        return _breadth_first(rank, pp, vpp, m)
    if schedule is Schedule.ZBV:
        return _zero_bubble_v(rank, pp, m)
    if schedule is Schedule.DUALPIPE_V:
        return _dual_pipe_v(rank, pp, m)
    if schedule is Schedule.DUALPIPE:
        return _dual_pipe(rank, pp, m)
    return _one_forward_one_backward(rank, pp, vpp, m, split=schedule is Schedule.ZB_H1)


def _breadth_first(rank: int, pp: int, vpp: int, m: int) -> tuple[Pass, ...]:
    """All micro-batches through a chunk before the next chunk; backward in the reverse order."""
    forward = [Pass(v * pp + rank, k, Work.FORWARD) for v in range(vpp) for k in range(m)]
    return (*forward, *(p._replace(work=Work.BACKWARD) for p in reversed(forward)))


def _one_forward_one_backward(
    rank: int, pp: int, vpp: int, m: int, *, split: bool
) -> tuple[Pass, ...]:
    """1F1B warms up with p - r - 1 forward passes, interleaved (vpp > 1) with 2 (p - r - 1) + (v - 1) p, then
    takes turns. ZB-H1 (`split`) warms up with (p - r - 1) + (v - 1) p, leaves the weight gradients of its
    first r backward passes for later, and so keeps r of them in stock to fill its waits at the end.
    """
    work = m * vpp
    kind = Work.INPUT if split else Work.BACKWARD
    forward = [_turn(k, rank, pp, vpp, Work.FORWARD) for k in range(work)]
    backward = [_turn(k, rank, pp, vpp, kind) for k in range(work)]
    weight = [p._replace(work=Work.WEIGHT) for p in backward]
    hops = pp - rank - 1
    if vpp > 1 and not split:
        hops *= 2
    warm_up = min(hops + (vpp - 1) * pp, work)
    order = forward[:warm_up]
    for k in range(work):
        order += forward[warm_up + k : warm_up + k + 1]
        order.append(backward[k])
        if split and k >= rank:
            order.append(weight[k - rank])
    if split:
        order += weight[max(work - rank, 0) :]
    return tuple(order)


def _turn(k: int, rank: int, pp: int, vpp: int, work: Work) -> Pass:
    """The k-th forward or backward pass of a rank: pp micro-batches through a chunk before the next chunk."""
    if vpp == 1:
        return Pass(rank, k, work)
    turn, place = divmod(k, pp * vpp)
    stage, offset = divmod(place, pp)
    if work is not Work.FORWARD:
        stage = vpp - 1 - stage
    return Pass(stage * pp + rank, turn * pp + offset, work)


class _Queue:
    """Passes of a V-shaped rank in order: chunk 0 on the way down, chunk 1 on the way up."""

    def __init__(self, rank: int, pp: int) -> None:
        self.passes: list[Pass] = []
        self._chunks = (rank, 2 * pp - 1 - rank)
        self._next = {(side, work): 0 for side in (0, 1) for work in Work}
        self._owed: deque[Pass] = deque()

    def count(self, side: int, work: Work) -> int:
        """How many passes of a kind are queued."""
        return self._next[side, work]

    def forward(self, side: int, *, paired: bool = False) -> Self:
        """A forward pass of one chunk."""
        return self._add(side, Work.FORWARD, paired=paired)

    def backward(self, side: int, *, split: bool = False) -> Self:
        """A whole backward pass, or (`split`) the gradients of inputs, those of weights owed."""
        self._add(side, Work.INPUT if split else Work.BACKWARD)
        if split:
            self._owed.append(self.passes[-1]._replace(work=Work.WEIGHT))
        return self

    def weight(self) -> Self:
        """The oldest owed gradients of weights; nothing where none are owed."""
        if self._owed:
            self.passes.append(self._owed.popleft())
        return self

    def weight_of(self, side: int) -> Self:
        """The oldest owed gradients of weights of one chunk."""
        oldest = next(p for p in self._owed if p.chunk == self._chunks[side])
        self._owed.remove(oldest)
        self.passes.append(oldest)
        return self

    def owes(self, side: int) -> bool:
        """Whether gradients of weights of one chunk are owed."""
        return any(p.chunk == self._chunks[side] for p in self._owed)

    def _add(self, side: int, work: Work, *, paired: bool = False) -> Self:
        shared = Work.BACKWARD if work is Work.INPUT else work
        self.passes.append(Pass(self._chunks[side], self._next[side, shared], work, paired))
        self._next[side, shared] += 1
        return self


def _zero_bubble_v(rank: int, pp: int, m: int) -> tuple[Pass, ...]:
    """ZB-V, built for equal forward, input and weight times."""
    queue, count = _Queue(rank, pp), max(2 * pp - 1, m)
    _repeat(2 * (pp - rank) - 1, lambda: queue.forward(0))
    _repeat(rank, lambda: queue.forward(1).forward(0))
    _repeat(pp - rank, lambda: queue.forward(1).backward(1, split=True).weight())

    def started(side: int) -> int:
        return queue.count(side, Work.FORWARD)

    while started(1) < started(0) or started(0) < count:
        if started(0) < count:
            queue.forward(0)
        queue.backward(0, split=True).weight()
        queue.forward(1).backward(1, split=True).weight()
    _repeat(rank, lambda: queue.backward(0, split=True).backward(1, split=True))
    _repeat(pp - rank, lambda: queue.backward(0, split=True).weight_of(0))
    for side in (1, 0):
        while queue.owes(side):
            queue.weight_of(side)
    return tuple(p for p in queue.passes if p.micro_batch < m)


def _dual_pipe_v(rank: int, pp: int, m: int) -> tuple[Pass, ...]:
    """DualPipeV: its eight phases, `after` ranks behind this one."""
    queue, after = _Queue(rank, pp), pp - rank - 1

    def both(forward: int, *, paired: bool = True) -> _Queue:
        return queue.forward(forward, paired=paired).backward(1 - forward)

    _repeat(2 * after, lambda: queue.forward(0))
    _repeat(rank + 1, lambda: queue.forward(0).forward(1))
    _repeat(after, lambda: queue.backward(1, split=True).weight().forward(1))
    for k in range(m - 2 * pp + rank + 1):
        # Where the last rank turns round, the two passes would wait for each other.
        both(0, paired=k > 0 or rank < pp - 1)
        both(1)
    for _ in range(after):
        queue.backward(1)
        both(1)
    half = (rank + 1) // 2
    for k in range(rank + 1):
        # The second half keeps its weight gradients for the waits that follow.
        late = k > half or (k == half and rank % 2 == 1)
        queue.backward(1, split=late).backward(0, split=late or k == half)
    _repeat(after, lambda: queue.weight().backward(0, split=True))
    _repeat(rank + 1, queue.weight)
    return tuple(queue.passes)


def _dual_pipe(rank: int, pp: int, m: int) -> tuple[Pass, ...]:
    """DualPipe: two mirrored DualPipeV on half of the ranks each, which swap places in the middle.

    Rank r runs stages r and p - 1 - r; micro-batches of the second half enter at the last rank. In the middle
    the two halves meet: a rank's second chunk works for the other half's micro-batches.
    """
    half, upper = pp // 2, rank >= pp // 2
    order = []
    for p in _dual_pipe_v(min(rank, pp - 1 - rank), half, m // 2):
        of_second_half = (p.chunk >= half) != upper
        order.append(p._replace(micro_batch=p.micro_batch + (m // 2) * of_second_half))
    return tuple(order)


def _repeat(times: int, run: Callable[[], object]) -> None:
    for _ in range(times):
        run()
