"""Pipeline schedules played event by event: what closed forms are checked against, and what a trace draws.

A rank runs its passes in the order that its schedule fixes (`pass_order`); each starts when the one before it
on the rank is done and its input has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import ROUNDING
from meshwright.costmodel.schedules import Schedule, traits

# In which order each pipeline rank runs its passes, for every schedule.


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

    Orders follow the code that runs them: megatron-core 0.19 `pipeline_parallel/schedules.py` for 1F1B and
    its interleaved form (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), torch 2.13
    `torch.distributed.pipelining.schedules` for breadth-first (Lamy-Poirier 2022, arXiv 2211.05953),
    zero-bubble ZB-H1 and ZB-V (Qi et al. 2023, arXiv 2401.10241, sections 2 and 6; arXiv 2405.15362) and
    DualPipeV, which is DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) folded onto half of the ranks.

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
        Which order; 1F1B by default.

    Returns
    -------
    tuple of Pass
        Every forward and backward pass of the rank once.

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
        self.forwards = [0, 0]
        """Forward passes of each chunk that are queued."""
        self._backwards = [0, 0]
        self._chunks = (rank, 2 * pp - 1 - rank)
        self._owed: deque[Pass] = deque()

    def forward(self, side: int, *, paired: bool = False) -> Self:
        """A forward pass of one chunk."""
        self.passes.append(Pass(self._chunks[side], self.forwards[side], Work.FORWARD, paired))
        self.forwards[side] += 1
        return self

    def backward(self, side: int, *, split: bool = False) -> Self:
        """A whole backward pass, or (`split`) the gradients of inputs, those of weights owed."""
        work = Work.INPUT if split else Work.BACKWARD
        self.passes.append(Pass(self._chunks[side], self._backwards[side], work))
        self._backwards[side] += 1
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


def _zero_bubble_v(rank: int, pp: int, m: int) -> tuple[Pass, ...]:
    """ZB-V, built for equal forward, input and weight times."""
    queue, count = _Queue(rank, pp), max(2 * pp - 1, m)
    _repeat(2 * (pp - rank) - 1, lambda: queue.forward(0))
    _repeat(rank, lambda: queue.forward(1).forward(0))
    _repeat(pp - rank, lambda: queue.forward(1).backward(1, split=True).weight())

    while queue.forwards[1] < queue.forwards[0] or queue.forwards[0] < count:
        if queue.forwards[0] < count:
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

    _repeat(2 * after, lambda: queue.forward(0))
    _repeat(rank + 1, lambda: queue.forward(0).forward(1))
    _repeat(after, lambda: queue.backward(1, split=True).weight().forward(1))
    for k in range(m - 2 * pp + rank + 1):
        # Where the last rank turns round, the two passes would wait for each other.
        queue.forward(0, paired=k > 0 or rank < pp - 1).backward(1)
        queue.forward(1, paired=True).backward(0)
    _repeat(after, lambda: queue.backward(1).forward(1, paired=True).backward(0))
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


@dataclass(frozen=True)
class Timeline:
    """When every pass ran, and what that means."""

    passes: tuple[tuple[Pass, ...], ...]
    """Of each rank, in order."""
    starts_s: tuple[tuple[float, ...], ...]
    """Of the same passes."""
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
    """Plays a schedule event by event; `pass_order` has the source of each order.

    Parameters
    ----------
    forward_s, backward_s : sequence of float, length pp * vpp
        Seconds per chunk and micro-batch, in model order, above 0.
    pp : int
        Pipeline ranks, at least 1.
    num_micro_batches : int
        Micro-batches, at least 1.
    schedule : Schedule
        The order of passes on each rank.
    weight_s : sequence of float, length pp * vpp, optional
        What of `backward_s` weight gradients take, by default half: the schedules that split the backward
        pass run it apart.
    p2p_s : float
        Seconds between chunks on different ranks, at least 0; delays the receiver only.

    Returns
    -------
    Timeline
        Seconds from the start of the first pass.

    Raises
    ------
    ValueError
        Where the chunks are not a multiple of pp, or the schedule cannot run.
    """
    chunks = len(forward_s)
    if len(backward_s) != chunks or chunks % pp or not chunks:
        raise ValueError(
            f"forward_s, backward_s: {chunks} and {len(backward_s)} chunks, pp is {pp}"
        )
    weight = [b / 2 for b in backward_s] if weight_s is None else list(weight_s)
    if len(weight) != chunks:
        raise ValueError(f"weight_s: {len(weight)} chunks, not {chunks}")
    seconds = {
        Work.FORWARD: list(forward_s),
        Work.BACKWARD: list(backward_s),
        Work.INPUT: [b - w for b, w in zip(backward_s, weight, strict=True)],
        Work.WEIGHT: weight,
    }
    orders = [pass_order(r, pp, chunks // pp, num_micro_batches, schedule) for r in range(pp)]
    player = _Player(orders, seconds, p2p_s, v_shaped=traits(schedule).v_shaped)
    player.run()
    if any(len(done) < len(order) for done, order in zip(player.ends, orders, strict=True)):
        raise ValueError(f"the {schedule.name} schedule waits for itself: pp {pp}, {chunks} chunks")
    return Timeline(tuple(orders), tuple(map(tuple, player.starts)), tuple(map(tuple, player.ends)))


# The same recurrence for many times of chunks at once, without a timeline.


class _Step(NamedTuple):
    """A pass, in an order in which the step that each waits for is there."""

    rank: int
    own: int
    """Which of the passes it is: its chunk, plus as many chunks as there are for each kind of `Work` before
    its own."""
    before: int
    """Number of the step before it on its rank. Steps are counted from 1, and 0 is none."""
    source: int
    """Number of the step that makes its input."""


_FEWEST_GROUPS = 12
"""Groups of pp micro-batches that are played at the least before the rest is taken to repeat."""


def played_s(
    forward_s: NDArray[np.float64],
    backward_s: NDArray[np.float64],
    weight_s: NDArray[np.float64],
    *,
    pp: int,
    num_micro_batches: int,
    schedule: Schedule,
) -> NDArray[np.float64]:
    """Seconds of `simulate` for many times of chunks at once, without time between ranks.

    Of many groups of pp micro-batches only some are played: once a group ends every pass of every rank as
    much later as the group before, so does each further one (Baccelli et al. 1992, Synchronization and
    Linearity, section 3.7). That the step grows evenly is not enough: a rank that is slower than the last one
    catches up with it in the end only, and sets the pace from there.

    Parameters
    ----------
    forward_s, backward_s, weight_s : array of float, shape [..., chunks]
        Seconds of each chunk and micro-batch, in model order, above 0; `weight_s` is the part of the backward
        pass that weight gradients take.
    pp : int
        Pipeline ranks, at least 1.
    num_micro_batches : int
        Micro-batches, at least 1: a multiple of pp where a rank has several chunks.
    schedule : Schedule
        One whose chunks run down the ranks alone, and whose passes do not run in pairs.

    Returns
    -------
    array of float, shape [...]
        Seconds from the first start to the last end.
    """
    vpp = forward_s.shape[-1] // pp
    if vpp == 1 and schedule is Schedule.ONE_F_ONE_B:
        return one_f_one_b_s(forward_s, backward_s, num_micro_batches)
    if schedule is Schedule.BREADTH_FIRST:
        return _breadth_first_s(forward_s, backward_s, pp, num_micro_batches)
    of_work = (forward_s, backward_s, backward_s - weight_s, weight_s)
    rows = np.concatenate([each.reshape(-1, pp * vpp) for each in of_work], axis=1).tolist()
    ends = [_repeated_s(row, pp, vpp, num_micro_batches, schedule) for row in rows]
    return np.array(ends).reshape(forward_s.shape[:-1])


def _breadth_first_s(
    forward_s: NDArray[np.float64], backward_s: NDArray[np.float64], pp: int, m: int
) -> NDArray[np.float64]:
    """Seconds of a schedule that takes all micro-batches through a chunk before the next one, [...]."""
    chunks = forward_s.shape[-1]
    free = np.zeros((*forward_s.shape[:-1], pp))
    ready = np.zeros((*forward_s.shape[:-1], m))
    places = np.arange(m)
    for each_s, order in ((forward_s, range(chunks)), (backward_s, reversed(range(chunks)))):
        for chunk in order:
            own_s = each_s[..., chunk, None]
            begun = np.maximum(ready, free[..., chunk % pp, None]) - places * own_s
            ready = np.maximum.accumulate(begun, axis=-1) + (places + 1) * own_s
            free[..., chunk % pp] = ready[..., -1]
        # The backward passes take the micro-batches from the last to the first.
        ready = ready[..., ::-1]
    return np.asarray(free.max(axis=-1))


def _repeated_s(
    seconds: list[float], pp: int, vpp: int, micro_batches: int, schedule: Schedule
) -> float:
    """When the last rank has done its last pass, with the seconds of each pass."""
    played, groups = _FEWEST_GROUPS, micro_batches // pp
    while played < groups and micro_batches % pp == 0:
        ends = _ends(_steps(pp, vpp, played * pp, schedule), seconds)
        of_ranks = np.array(ends)[_middle(pp, vpp, played * pp, schedule)]
        grown = np.diff(of_ranks, axis=-2)
        if np.ptp(grown) <= ROUNDING * grown.max():
            return max(ends) + (groups - played) * float(grown.mean())
        played *= 2
    return max(_ends(_steps(pp, vpp, micro_batches, schedule), seconds))


@lru_cache(maxsize=64)
def _middle(pp: int, vpp: int, micro_batches: int, schedule: Schedule) -> NDArray[np.int64]:
    """Numbers of the steps of three groups late in the steady part, [pp, groups, passes of a group].

    What a pass waits for is less than two groups before it, and ranks warm up with less than a group.
    """
    steps = _steps(pp, vpp, micro_batches, schedule)
    of_ranks = np.argsort([step.rank for step in steps], kind="stable").reshape(pp, -1)
    each = of_ranks.shape[1] * pp // micro_batches
    return 1 + of_ranks[:, -5 * each : -2 * each].reshape(pp, 3, each)


def one_f_one_b_s(
    forward_s: NDArray[np.float64], backward_s: NDArray[np.float64], num_micro_batches: int
) -> NDArray[np.float64]:
    """Seconds of 1F1B with one chunk a rank, for many times of chunks at once.

    Forward pass k of rank r takes turn r + 2k, and backward pass k turn 2p - 1 - r + 2k: that is the order of
    `pass_order`, and what a pass waits for is in the turn before. Once a micro-batch takes every rank as long
    as the one before, so does each further one that all ranks run (Baccelli et al. 1992, Synchronization and
    Linearity, section 3.7).

    Parameters
    ----------
    forward_s, backward_s : array of float, shape [..., pp]
        Seconds of each chunk and micro-batch, in model order, above 0.
    num_micro_batches : int
        m, at least 1.

    Returns
    -------
    array of float, shape [...]
        Seconds from the first start to the last end.
    """
    pp, m = forward_s.shape[-1], num_micro_batches
    each_s = np.stack([forward_s.reshape(-1, pp), backward_s.reshape(-1, pp)])
    ends = np.zeros((each_s.shape[1], pp + 2))  # a rank that never waits on either side
    before = ends
    turn, ranks = 0, np.arange(pp)
    while turn < 2 * (m + pp - 1):
        if turn % 2 == 0:
            grown = ends[:, 1:-1] - before[:, 1:-1]
            if 2 * pp + 2 <= turn < 2 * m - 4 and np.all(
                np.ptp(grown, axis=1) <= ROUNDING * grown[:, 0]
            ):
                skipped = (2 * m - 2 - turn) // 2
                ends[:, 1:-1] += skipped * grown
                turn += 2 * skipped
            before = ends.copy()
        started = []
        for first, number in ((turn % 2, 0), (1 - turn % 2, 1)):
            active = ranks[first::2]
            micro_batch = (turn - active if number == 0 else turn - 2 * pp + 1 + active) // 2
            active = active[(micro_batch >= 0) & (micro_batch < m)]
            if len(active):
                at = slice(int(active[0]) + 1, int(active[-1]) + 2, 2)
                source = slice(at.start + 2 * number - 1, at.stop + 2 * number - 1, 2)
                begin = np.maximum(ends[:, at], ends[:, source])
                started.append((at, begin + each_s[number][:, active]))
        for at, end in started:
            ends[:, at] = end
        turn += 1
    return np.asarray(ends.max(axis=1).reshape(forward_s.shape[:-1]))


def longest_way(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    pp: int,
    num_micro_batches: int,
    schedule: Schedule,
) -> NDArray[np.float64]:
    """How often the longest sequence of passes of which each waits for the one before it runs each chunk.

    With any other times of the chunks these passes wait for one another too: the sum of what they take is a
    bound on the step then.

    Parameters
    ----------
    forward_s, backward_s : sequence of float
        Seconds of each chunk and micro-batch, in model order, above 0.
    pp : int
        Pipeline ranks, at least 1.
    num_micro_batches : int
        Micro-batches, at least 1: a multiple of pp where a rank has several chunks.
    schedule : Schedule
        One whose chunks run down the ranks alone, and whose backward passes are not split.

    Returns
    -------
    array of float, shape [2, chunks]
        Forward passes and backward passes of each chunk.
    """
    steps = _steps(pp, len(forward_s) // pp, num_micro_batches, schedule)
    ends = _ends(steps, [*forward_s, *backward_s])
    passes, at = np.zeros(2 * len(forward_s)), int(np.argmax(ends))
    while at:
        _, own, before, source = steps[at - 1]
        passes[own] += 1
        at = source if ends[source] > ends[before] else before
    return passes.reshape(2, -1)


def _ends(steps: Sequence[_Step], seconds: Sequence[float]) -> list[float]:
    """When each step ends, by its number."""
    ends = [0.0]
    for _, own, before, source in steps:
        free, ready = ends[before], ends[source]
        ends.append((ready if ready > free else free) + seconds[own])
    return ends


@lru_cache(maxsize=256)
def _steps(pp: int, vpp: int, micro_batches: int, schedule: Schedule) -> tuple[_Step, ...]:
    """All passes of all ranks, each behind the one that makes its input."""
    orders = [pass_order(rank, pp, vpp, micro_batches, schedule) for rank in range(pp)]
    made: dict[tuple[int, int, bool] | None, int] = {None: 0}
    steps: list[_Step] = []
    places, latest = [0] * pp, [0] * pp
    first = {work: pp * vpp * number for number, work in enumerate(Work)}
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                own = order[places[rank]]
                source = _source(own, pp * vpp - 1)
                if source not in made:
                    break
                steps.append(_Step(rank, first[own.work] + own.chunk, latest[rank], made[source]))
                latest[rank] = len(steps)
                if own.work is not Work.WEIGHT:
                    made[own.chunk, own.micro_batch, own.backward] = latest[rank]
                places[rank] += 1
                moved = True
    return tuple(steps)


def _source(own: Pass, last: int) -> tuple[int, int, bool] | None:
    """(chunk, micro-batch, backward) of the pass that makes the input of one; None where none does."""
    if own.work is Work.WEIGHT or (own.chunk == 0 and not own.backward):
        return None
    if not own.backward:
        return own.chunk - 1, own.micro_batch, False
    if own.chunk == last:
        return own.chunk, own.micro_batch, False
    return own.chunk + 1, own.micro_batch, True


class _Player:
    """Starts and ends of every rank's passes, as far as the schedule runs without waiting for itself."""

    def __init__(
        self,
        orders: Sequence[Sequence[Pass]],
        seconds: dict[Work, list[float]],
        p2p_s: float,
        *,
        v_shaped: bool,
    ) -> None:
        self.starts: list[list[float]] = [[] for _ in orders]
        self.ends: list[list[float]] = [[] for _ in orders]
        self._orders, self._seconds = orders, seconds
        self._hop_s = p2p_s if len(orders) > 1 else 0.0
        self._last = len(seconds[Work.FORWARD]) - 1
        self._turn = (self._last + 1) // 2 if v_shaped else 0
        """The chunk whose predecessor lies on the same rank (0: none)."""
        self._forward_done: dict[tuple[int, int], float] = {}
        self._backward_done: dict[tuple[int, int], float] = {}

    def run(self) -> None:
        """Runs every rank as far as its inputs allow, until nothing moves any more."""
        moved = True
        while moved:
            moved = False
            for rank in range(len(self._orders)):
                while self._advance(rank):
                    moved = True

    def _advance(self, rank: int) -> bool:
        """Runs the next pass of a rank, or the next two that run together; False where it has to wait."""
        order, ends = self._orders[rank], self.ends[rank]
        if len(ends) == len(order):
            return False
        first = order[len(ends)]
        together = order[len(ends) : len(ends) + 1 + first.paired]
        arrivals = [self._arrival_s(p) for p in together]
        now = ends[-1] if ends else 0.0
        for arrival in arrivals:
            if arrival is None:
                return False
            now = max(now, arrival)
        for p in together:
            self.starts[rank].append(now)
            now += self._seconds[p.work][p.chunk]
            ends.append(now)
        for p in together:
            if p.work is Work.FORWARD:
                self._forward_done[p.chunk, p.micro_batch] = now
            elif p.work is not Work.WEIGHT:
                self._backward_done[p.chunk, p.micro_batch] = now
        return True

    def _arrival_s(self, p: Pass) -> float | None:
        """When the input of a pass is there; None where it is not made yet."""
        if p.work is Work.WEIGHT or (p.work is Work.FORWARD and p.chunk == 0):
            return 0.0
        if p.work is Work.FORWARD:
            end = self._forward_done.get((p.chunk - 1, p.micro_batch))
            local = p.chunk == self._turn
        elif p.chunk == self._last:
            end = self._forward_done.get((p.chunk, p.micro_batch))
            local = True
        else:
            end = self._backward_done.get((p.chunk + 1, p.micro_batch))
            local = p.chunk + 1 == self._turn
        if end is None or local:
            return end
        return end + self._hop_s
