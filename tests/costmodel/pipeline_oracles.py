"""Activations in flight, counted pass by pass, and a schedule whose passes run in pairs, played alone."""

from __future__ import annotations

from meshwright.costmodel.simulator import Timeline, Work


def peak_chunks(line: Timeline) -> tuple[int, ...]:
    """Most chunk activations of each rank at a time; weight gradients need them last."""
    change = {Work.FORWARD: 1, Work.INPUT: 0, Work.BACKWARD: -1, Work.WEIGHT: -1}
    peaks = []
    for order in line.passes:
        # A pass that ends a backward pass frees its chunk before the next forward pass makes one.
        in_flight = peak = 0
        for step in order:
            in_flight += change[step.work]
            peak = max(peak, in_flight)
        peaks.append(peak)
    return tuple(peaks)


Pass = tuple[str, int, int] | None
"""Direction, micro-batch, chunk of the rank."""


def paired_s(
    shape: tuple[int, int, int], forward_s: float, backward_s: float, pair_s: float
) -> float:
    """Seconds of interleaved 1F1B whose forward passes run together with another micro-batch's backward ones.

    By the order of Megatron-LM's combined_1f1b.py; the shape is (pp, vpp, micro-batches).
    """
    pp, vpp, m = shape
    order = [
        (first + i, chunk) for first in range(0, m, pp) for chunk in range(vpp) for i in range(pp)
    ]
    forward: list[Pass] = [("forward", i, chunk) for i, chunk in order]
    backward: list[Pass] = [("backward", i, vpp - 1 - chunk) for i, chunk in order]
    programs = []
    for rank in range(pp):
        ahead = min(2 * (pp - rank - 1) + (vpp - 1) * pp + 1, m * vpp)
        none: list[Pass] = [None] * ahead
        programs.append(list(zip(forward + none, none + backward, strict=True)))
    ends: dict[tuple[str, int, int], float] = {}
    clocks, places = [0.0] * pp, [0] * pp
    lengths = {(True, True): pair_s, (True, False): forward_s, (False, True): backward_s}
    while any(at < len(row) for at, row in zip(places, programs, strict=True)):
        before = list(places)
        for rank, program in enumerate(programs):
            while places[rank] < len(program):
                both = program[places[rank]]
                needs = [_ahead_of(each, rank, pp, vpp) for each in both if each]
                if not all(need is None or need in ends for need in needs):
                    break
                start = max([clocks[rank], *(ends[need] for need in needs if need)])
                clocks[rank] = start + lengths[both[0] is not None, both[1] is not None]
                for each in both:
                    if each:
                        way, i, chunk = each
                        ends[way, i, chunk * pp + rank] = clocks[rank]
                places[rank] += 1
        assert places != before, "deadlock"
    return max(clocks)


def _ahead_of(
    each: tuple[str, int, int], rank: int, pp: int, vpp: int
) -> tuple[str, int, int] | None:
    """What a pass waits for, as direction, micro-batch and virtual stage."""
    way, i, chunk = each
    stage = chunk * pp + rank
    if way == "forward":
        return (way, i, stage - 1) if stage else None
    return (way, i, stage + 1) if stage < pp * vpp - 1 else ("forward", i, stage)
