"""Pipeline schedules played event by event: what closed forms are checked against, and what a trace draws.

A rank runs its passes in the order that its schedule fixes (`orders.pass_order`); each starts when the one
before it on the rank is done and its input has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.costmodel.pipeline.orders import Pass, Work, pass_order
from meshwright.costmodel.pipeline.schedules import Schedule, traits


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
    """Plays a schedule.

    docs/cost_model.md, "Pipeline schedules", has the sources.

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
