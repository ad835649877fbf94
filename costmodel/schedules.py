"""Pipeline schedules in closed form: shapes they exist in, bubbles, activations in flight, copies of weights.

Symbols: p pipeline ranks, v chunks of a rank, m micro-batches; f, i and w seconds of one chunk's forward
pass, its gradients of inputs and of weights, t = f + i + w. The bubble is what the step takes longer than the
m v t of an even rank; on uneven ranks it is the same share of the work of all ranks but the busiest.

| schedule | bubble of even chunks | source |
|---|---|---|
| GPipe | (p - 1) t | Huang et al. 2019, arXiv 1811.06965 |
| 1F1B, interleaved | (p - 1) t | Narayanan et al. 2021, arXiv 2104.04473, section 2.2 |
| breadth-first | (p - 1) t | Lamy-Poirier 2022, arXiv 2211.05953 |
| ZB-H1 | (p - 1) max(f + i - w, f, i) | Qi et al. 2023, arXiv 2401.10241, section 2.3 (w <= f, i there) |
| ZB-V | (p - 1) max(i, 2 (i - w)) | arXiv 2401.10241, section 6, in torch's fixed order (1) |
| DualPipeV | max((p - 1)(2 f + i - w), (p - 1)(f + 2 i - w) - f) | arXiv 2412.19437, Table 2 (2) |
| DualPipe | as DualPipeV on p / 2 ranks | the same; ranks r and p - 1 - r hold the same two stages |

(1) For w <= f <= i. The paper's bubble is 0 at f = i = w because there the ranks end one after the other,
which an optimizer that first sums a norm over all ranks does not allow.
(2) For w <= f <= i, and without a gain from overlap (F&B = F + B). At f = i it is the table's
(p - 1)(F&B + B - 3 W), in which B = i + w.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.execution_names import SCHEDULE_NAMES
from meshwright.costmodel.layout import Floats, Ints, Layout


class Schedule(IntEnum):
    """In which order ranks run their passes; the values of `Layout.schedule`."""

    ONE_F_ONE_B = 0
    """Interleaved where a rank has several chunks."""
    GPIPE = 1
    BREADTH_FIRST = 2
    ZB_H1 = 3
    """Interleaved where a rank has several chunks."""
    ZBV = 4
    DUALPIPE_V = 5
    DUALPIPE = 6


_NAMED = dict(zip(SCHEDULE_NAMES, (Schedule.ONE_F_ONE_B, *Schedule), strict=True))


def schedule_named(name: str) -> Schedule:
    """The schedule of a name.

    Parameters
    ----------
    name : str
        One of `SCHEDULE_NAMES`.

    Returns
    -------
    Schedule
        1F1B for both of its names: whether it is interleaved follows from vpp.

    Raises
    ------
    KeyError
        For any other name.
    """
    schedule: Schedule = _NAMED[name]
    return schedule


def schedule_name(schedule: int, vpp: int) -> str:
    """What a schedule is called.

    Parameters
    ----------
    schedule : int
        A `Schedule`, 0 to 6.
    vpp : int
        Chunks of a rank, at least 1.

    Returns
    -------
    str
        One of `SCHEDULE_NAMES`.
    """
    if schedule != Schedule.ONE_F_ONE_B:
        return SCHEDULE_NAMES[schedule + 1]
    return "interleaved-1f1b" if vpp > 1 else "1f1b"


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a schedule needs, and what shape it gives the pipeline."""

    name: str
    fewest_chunks: int = 1
    """Chunks of a rank (vpp): at least, and at most; None where there is no limit."""
    most_chunks: int | None = None
    least_fill: int = 0
    """Micro-batches per pipeline rank that it needs at least."""
    in_groups: bool = False
    """Whether several chunks take the micro-batches in groups of p, so that p must divide them."""
    pairs_of_ranks: bool = False
    """Whether p and m must be even."""
    splits_backward: bool = False
    """Whether gradients of weights run apart from those of inputs."""
    v_shaped: bool = False
    """Whether chunks run down the ranks and up again: the first and the last chunk share rank 0."""
    in_step: bool = False
    """Whether ranks work on the same chunk number at the same time: the slowest sets the pace of each."""

    def faults(self, pp: int, vpp: int, num_micro_batches: int) -> list[str]:
        """What keeps the schedule from running in a shape.

        Parameters
        ----------
        pp : int
            Pipeline ranks, at least 1.
        vpp : int
            Chunks of a rank, at least 1.
        num_micro_batches : int
            Micro-batches per step and replica, at least 1.

        Returns
        -------
        list of str
            A sentence for each fault; empty where there is none.
        """
        faults = []
        most_chunks = self.most_chunks or vpp
        if not self.fewest_chunks <= vpp <= most_chunks:
            wanted = f"{self.fewest_chunks}"
            if most_chunks != self.fewest_chunks:
                wanted += " or more"
            faults.append(f"vpp: {vpp}, {self.name} takes {wanted} virtual stages")
        micro_batches = f"num_micro_batches: {num_micro_batches}"
        if num_micro_batches < self.least_fill * pp:
            faults.append(f"{micro_batches}, {self.name} needs {self.least_fill * pp}")
        if self.in_groups and vpp > 1 and num_micro_batches % pp:
            faults.append(f"{micro_batches} is not a multiple of pp {pp}, vpp is {vpp}")
        if self.pairs_of_ranks and (pp % 2 or num_micro_batches % 2):
            faults.append(f"pp: {pp} and {micro_batches}, {self.name} needs even ones")
        return faults

    def require(self, pp: int, vpp: int, num_micro_batches: int) -> None:
        """Makes sure that the schedule runs in a shape.

        Parameters
        ----------
        pp : int
            Pipeline ranks, at least 1.
        vpp : int
            Chunks of a rank, at least 1.
        num_micro_batches : int
            Micro-batches per step and replica, at least 1.

        Raises
        ------
        ValueError
            With what keeps the schedule from running.
        """
        faults = self.faults(pp, vpp, num_micro_batches)
        if faults:
            raise ValueError("; ".join(faults))


_TRAITS = {
    Schedule.ONE_F_ONE_B: Traits(name="1f1b", in_groups=True, in_step=True),
    Schedule.GPIPE: Traits(name="gpipe", most_chunks=1),
    Schedule.BREADTH_FIRST: Traits(name="breadth-first", fewest_chunks=2, least_fill=1, in_step=True),
    Schedule.ZB_H1: Traits(
        name="zb-h1", least_fill=1, in_groups=True, splits_backward=True, in_step=True
    ),
    Schedule.ZBV: Traits(
        name="zbv", fewest_chunks=2, most_chunks=2, least_fill=2, splits_backward=True, v_shaped=True
    ),
    Schedule.DUALPIPE_V: Traits(
        name="dualpipe-v", fewest_chunks=2, most_chunks=2, least_fill=2, splits_backward=True, v_shaped=True
    ),
    Schedule.DUALPIPE: Traits(
        name="dualpipe", most_chunks=1, least_fill=2, pairs_of_ranks=True, splits_backward=True
    ),
}  # fmt: skip

LEAST_BUBBLE_SHARE = 1 / 3
"""Of the chunk's time t, below which no schedule here comes: max(f, i) / t where w is no more than either."""


def traits(schedule: int) -> Traits:
    """What a schedule needs, and what shape it gives the pipeline.

    Parameters
    ----------
    schedule : int
        A `Schedule`, 0 to 6.

    Returns
    -------
    Traits
        Limits on its shape, and truth values.

    Raises
    ------
    ValueError
        For another number.
    """
    return _TRAITS[Schedule(schedule)]


def prices_stages_apart(layout: Layout) -> bool:
    """Whether stages may have layer times of their own, each by where its own expert groups lie.

    Of ranks in step, 1F1B with one virtual stage each among them. Elsewhere the stage that reaches least far
    prices all of them: schedules that run gradients of weights apart fill bubbles by what an average layer
    takes, a DualPipe rank works for two stages, and GPipe keeps no step.

    Parameters
    ----------
    layout : Layout
        One layout.

    Returns
    -------
    bool
    """
    shape = traits(int(layout.schedule))
    in_step = shape.in_step and not shape.splits_backward
    return int(layout.pp) > 1 and int(layout.ep) > 1 and in_step


def has_trait(schedule: Ints, trait: str) -> NDArray[np.bool_]:
    """Which of the given schedules have a trait.

    Parameters
    ----------
    schedule : int or array of int
        Values of `Schedule`, 0 to 6.
    trait : str
        A field of `Traits` that is a truth value.

    Returns
    -------
    array of bool
        Shaped like `schedule`.
    """
    return np.asarray(_having(trait)[np.asarray(schedule)])


@cache
def _having(trait: str) -> NDArray[np.bool_]:
    """By value of `Schedule`, whether it has a trait."""
    return np.array([bool(getattr(_TRAITS[name], trait)) for name in Schedule])


def is_v_shaped(layout: Layout) -> bool:
    """Whether the chunks of a layout, or of any of many, run down the ranks and up again.

    Parameters
    ----------
    layout : Layout
        One layout or many; the schedule is used.

    Returns
    -------
    bool
        True of ZB-V and DualPipeV.
    """
    return bool(has_trait(layout.schedule, "v_shaped").any())


def last_rank(schedule: Ints, pp: Ints) -> Ints:
    """The rank that holds the last chunk: head, loss and multi-token prediction.

    Parameters
    ----------
    schedule : int or array of int
        Values of `Schedule`, 0 to 6.
    pp : int or array of int
        Pipeline ranks, at least 1.

    Returns
    -------
    int or array of int
        0 in V-shaped schedules, else pp - 1.
    """
    rank: Ints = np.where(has_trait(schedule, "v_shaped"), 0, np.asarray(pp) - 1)
    return rank


def bubble_share(
    schedule: Ints, pp: Ints, forward_s: Floats, backward_s: Floats, weight_s: Floats
) -> Floats:
    """The bubble over (ranks' work - the busiest rank's) / v, from the times of an average layer.

    The bubble of even chunks that the table at the head of `costmodel/schedules.py` has for each schedule,
    with its source (1F1B: Narayanan et al. 2021, arXiv 2104.04473, section 2.2), over (p - 1) t. More of w
    than f or i does not fill the waits any further.

    Parameters
    ----------
    schedule : int or array of int
        Values of `Schedule`, 0 to 6.
    pp : int or array of int
        p, pipeline ranks, at least 1.
    forward_s : float or array
        f, seconds, more than 0.
    backward_s : float or array
        i + w, seconds, more than 0.
    weight_s : float or array
        w, the part of `backward_s` that gradients of weights take, at least 0.

    Returns
    -------
    float or array
        Without unit, 0 to 1; 1 where the backward pass is not split.
    """
    names = np.asarray(schedule)
    ranks = np.asarray(pp, dtype=np.float64)
    f, b = np.asarray(forward_s, dtype=np.float64), np.asarray(backward_s, dtype=np.float64)
    w = np.minimum(np.asarray(weight_s), np.minimum(f, b / 2))
    i = b - w
    length = np.where(names == int(Schedule.DUALPIPE), ranks / 2, ranks)
    hops = np.maximum(length - 1, 0.0)
    zb_h1 = np.maximum(f + i - w, i)
    zb_v = np.maximum(i, 2 * (i - w))
    dual_v = np.maximum(2 * f + i - w, f + 2 * i - w - f / np.maximum(hops, 1.0))
    dual = dual_v * hops / np.maximum(ranks - 1, 1.0)
    bubble = np.select(
        [
            names == int(Schedule.ZB_H1),
            names == int(Schedule.ZBV),
            names == int(Schedule.DUALPIPE_V),
        ],
        [zb_h1, zb_v, dual_v],
        np.where(names == int(Schedule.DUALPIPE), dual, f + b),
    )
    share: Floats = bubble / (f + b)
    return share


def unpaired_share(layout: Layout, flushes: int = 1) -> Floats:
    """Share of a step's chunks whose passes run beside no pass of another micro-batch.

    Megatron overlaps exchanges of experts by running one micro-batch's forward chunk with another's backward
    one. Warm-up and cool-down have no such pair: W = 2 (p - r - 1) + (v - 1) p + 1 chunks either way on rank
    r (megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches), one micro-batch without a
    pipeline (combined_1f1b.py, combined_1f1b_schedule_for_no_pipelining). Derived here: the last rank waits
    (p - 1) t for the pipeline to fill and drain, runs W = (v - 1) p + 1 chunks of t and the others of t', so
    that T = (m v + p - 1) t' + v p (t - t'), t and t' seconds of a chunk without a pair and with one. That is
    the step of even chunks that take t' + u (t - t') each, u = v p / (m v + p - 1).

    Parameters
    ----------
    layout : Layout
        One layout or many; its pipeline is used.
    flushes : int
        Of the pipeline in a step, at least 1.

    Returns
    -------
    float or array
        u, above 0 to 1 of 1F1B, at least 1 / m; 0 of other schedules, which overlap as published.
    """
    pp, vpp, m = (np.asarray(x) for x in (layout.pp, layout.vpp, layout.num_micro_batches))
    chunks = m / flushes * vpp + pp - 1.0
    in_turns = np.asarray(layout.schedule) == int(Schedule.ONE_F_ONE_B)
    share: Floats = np.where(in_turns, np.minimum(vpp * pp / chunks, 1.0), 0.0)
    return share


def in_flight(layout: Layout, rank: Ints) -> Floats:
    """Micro-batches whose activations a rank holds at the peak, in units of all its virtual stages.

    GPipe and breadth-first: m. 1F1B: min(m, p - r). Interleaved: the warm-up runs 2 (p - r - 1) + (v - 1) p
    chunks ahead, plus the one in work (Narayanan et al. 2021, section 2.2; megatron-core schedules.py). ZB-H1
    and ZB-V: p on every rank, because a pass whose weight gradients wait keeps its activations (Qi et al.
    2023, Table 2). DualPipeV: 2 p + 1 chunks, DualPipe: p + 1 stages (DeepSeek-V3, Table 2: PP + 1 stages).

    Parameters
    ----------
    layout : Layout
        One layout or many, fields of a shape that broadcasts against `rank`.
    rank : int or array of int
        r, pipeline rank, 0 to p - 1.

    Returns
    -------
    float or array
        Micro-batches, above 0, in the common shape.
    """
    pp, vpp, m = (np.asarray(x) for x in (layout.pp, layout.vpp, layout.num_micro_batches))
    schedule = np.asarray(layout.schedule)
    plain = np.minimum(m, pp - rank)
    ahead = 2 * (pp - np.asarray(rank) - 1) + (vpp - 1) * pp + 1
    one_f_one_b: Floats = np.where(vpp > 1, np.minimum(ahead, m * vpp) / vpp, plain)
    if not schedule.any():  # most searches know no other, and ask this of millions of layouts
        return one_f_one_b
    breadth = (schedule == int(Schedule.GPIPE)) | (schedule == int(Schedule.BREADTH_FIRST))
    shaped = 0 * plain
    flying: Floats = np.select(
        [
            schedule == int(Schedule.ONE_F_ONE_B),
            breadth,
            schedule == int(Schedule.DUALPIPE_V),
            schedule == int(Schedule.DUALPIPE),
        ],
        [one_f_one_b, m + shaped, pp + 0.5 + shaped, (pp + 1) / 2 + shaped],
        np.minimum(m, pp) + shaped,
    )
    return flying


def first_chunk_excess(layout: Layout) -> Floats:
    """Micro-batches that the first virtual stage of rank 0 holds at the peak beyond each of its others.

    Virtual stages take turns of p micro-batches. A warm-up of (v + 1) p - 1 passes has every stage take one
    turn, and the first one p - 1 passes more (megatron-core, pipeline_parallel/schedules.py,
    get_schedule_table): derived here.

    Parameters
    ----------
    layout : Layout
        One layout or many.

    Returns
    -------
    float or array
        Micro-batches, at least 0; 0 where ranks do not interleave virtual stages.
    """
    pp, vpp = np.asarray(layout.pp), np.asarray(layout.vpp)
    interleaves = (vpp > 1) & (np.asarray(layout.schedule) == int(Schedule.ONE_F_ONE_B))
    passes = np.asarray(in_flight(layout, 0)) * vpp
    excess: Floats = np.where(interleaves, np.maximum(passes - vpp * pp, 0.0), 0.0)
    return excess


def least_in_flight(layout: Layout, rank: Ints) -> Floats:
    """`in_flight` of every virtual stage at the least: on rank 0 without what its first one holds beyond.

    Parameters
    ----------
    layout : Layout
        As `in_flight` takes it.
    rank : int or array of int
        Pipeline rank, 0 to p - 1.

    Returns
    -------
    float or array
        Micro-batches, above 0.
    """
    beyond = np.asarray(first_chunk_excess(layout)) / np.asarray(layout.vpp)
    least: Floats = np.asarray(in_flight(layout, rank)) - np.where(np.asarray(rank) == 0, beyond, 0)
    return least


def shared_by_mirrors(values: NDArray[np.float64], schedule: Ints) -> NDArray[np.float64]:
    """Seconds that each rank works, where DualPipe has it do half of its mirror rank's stage as well.

    Ranks r and p - 1 - r hold the same two stages (DeepSeek-V3, arXiv 2412.19437, section 3.2.1).

    Parameters
    ----------
    values : array of float, shape [..., pp]
        Seconds of each rank's stage, at least 0.
    schedule : int
        A `Schedule`, 0 to 6.

    Returns
    -------
    array of float, shape [..., pp]
        Seconds; `values` with any other schedule.
    """
    if int(np.asarray(schedule)) != Schedule.DUALPIPE:
        return values
    return np.asarray((values + values[..., ::-1]) / 2)


def on_both_ranks(values: NDArray[np.float64], schedule: Ints) -> NDArray[np.float64]:
    """What each rank holds, where DualPipe puts the stage of its mirror rank on it too.

    Ranks r and p - 1 - r hold the same two stages (DeepSeek-V3, arXiv 2412.19437, section 3.2.1).

    Parameters
    ----------
    values : array of float, shape [..., pp]
        Amount of each rank's stage, in any unit, at least 0.
    schedule : int
        A `Schedule`, 0 to 6.

    Returns
    -------
    array of float, shape [..., pp]
        In the same unit; `values` with any other schedule.
    """
    if int(np.asarray(schedule)) != Schedule.DUALPIPE:
        return values
    return np.asarray(values + values[..., ::-1])


def longest_way_s(
    forward_s: NDArray[np.float64],
    backward_s: NDArray[np.float64],
    *,
    ahead_s: NDArray[np.float64],
    behind_s: NDArray[np.float64],
    warm_up: Ints,
    num_micro_batches: int,
) -> NDArray[np.float64]:
    """What 1F1B takes at the least, one virtual stage each, by the passes that follow one another at a rank.

    With t = f + b, w = min(warm-up, m - 1): the rank's own passes, m t behind the ranks ahead; all its
    backward passes behind the first micro-batch's way down and back, m b + (m - w) f, or all its forward ones
    ahead of the last one's way, m f + (m - w) b, with the ranks ahead and behind once; both ways, (m - w) t
    with the ranks behind twice, where m - w >= 2. Each is a sequence of passes of which none may start before
    the one before it ends, in the order of Narayanan et al. 2021 (arXiv 2104.04473, section 2.2): derived
    here, and exact for most splits.

    Parameters
    ----------
    forward_s, backward_s : array of float, shape [...]
        f and b, seconds of a rank and micro-batch, above 0.
    ahead_s, behind_s : array of float, shape [...]
        Seconds of all ranks before it, and after it, at least 0.
    warm_up : int or array of int
        Ranks after it, 0 to p - 1: forward passes that it runs before the first one that takes turns.
    num_micro_batches : int
        m, at least 1.

    Returns
    -------
    array of float, shape [...]
        Seconds: the longest of the four.
    """
    m, both_s = num_micro_batches, forward_s + backward_s
    turns = m - np.minimum(warm_up, m - 1)
    through_s = ahead_s + behind_s
    own_s = ahead_s + m * both_s
    down_s = through_s + m * backward_s + turns * forward_s
    back_s = through_s + m * forward_s + turns * backward_s
    twice_s = np.where(turns >= 2, through_s + behind_s + turns * both_s, 0.0)
    return np.maximum(np.maximum(own_s, down_s), np.maximum(back_s, twice_s))


def forward_first_s(
    forward_s: NDArray[np.float64], backward_s: NDArray[np.float64], num_micro_batches: Floats
) -> NDArray[np.float64]:
    """What GPipe takes, whose ranks run all forward passes ahead of all backward ones.

    Derived here, for the order of Huang et al. 2019 (arXiv 1811.06965): either half is a flow shop of equal
    jobs, whose slowest rank works without a break, sum + (m - 1) max. The last rank ends the first half, and
    begins the second when all others wait for it.

    Parameters
    ----------
    forward_s, backward_s : array of float, shape [..., pp]
        Seconds of each rank and micro-batch, above 0.
    num_micro_batches : float or array, shape [...]
        m, at least 1.

    Returns
    -------
    array of float, shape [...]
        Seconds from the first start to the last end.
    """
    halves_s = (
        np.sum(each_s, axis=-1) + (np.asarray(num_micro_batches) - 1) * np.max(each_s, axis=-1)
        for each_s in (forward_s, backward_s)
    )
    return np.asarray(sum(halves_s))


def least_waits(
    pp: Ints | Floats, num_micro_batches: Floats, backward_share: Floats = 0.5
) -> tuple[Floats, Floats]:
    """What 1F1B takes at the least beyond m times the busiest rank, one virtual stage each, however the work
    lies: multiples of all ranks' work and, to be taken off, of the busiest rank's.

    From `longest_way_s` of the busiest rank, which takes t. Where m > p, both ways at it: the ranks ahead
    take r t at most, so that what they and those behind add is 2 (sum - t) - (p - 1) t at the least. Else
    all its passes of the longer kind, of which one takes x t: sum - t - (m - 1) (1 - x) t.

    Parameters
    ----------
    pp : int or array of int
        p, pipeline ranks, at least 1.
    num_micro_batches : float or array
        m, at least 1.
    backward_share : float or array
        x, the share of t that the longer of the two passes takes at the least, 0.5 to 1.

    Returns
    -------
    tuple of two arrays
        Without unit, above 0.
    """
    m, ranks = np.asarray(num_micro_batches), np.asarray(pp)
    fills = m > ranks
    return np.where(fills, 2.0, 1.0), np.where(fills, ranks + 1.0, m - (m - 1) * backward_share)


def least_fill(
    pp: Ints | Floats, num_micro_batches: Floats, backward_share: Floats = 0.5
) -> NDArray[np.float64]:
    """What 1F1B takes at the least beyond the work of all ranks, one virtual stage each, however that lies.

    Derived here from `longest_way_s`, of which X is the longest less the work. Ranks 0 to m - 2 places before
    the last one take X / (m - 1) at most each: so says the way that has the ranks behind twice, of the last
    rank first. All p - m + 1 others, if any, take X / ((m - 1) x), by all their passes of the longer kind.
    Together they take all the work.

    Parameters
    ----------
    pp : int or array of int
        p, pipeline ranks, at least 1.
    num_micro_batches : float or array
        m, at least 1.
    backward_share : float or array
        x, the share of its work that the longer of a rank's two passes takes at the least, 0.5 to 1.

    Returns
    -------
    array of float
        Multiples of the work, at least 0.
    """
    ranks, m = np.asarray(pp), np.asarray(num_micro_batches)
    longer = (m - 1) * backward_share
    few = longer / (longer + np.maximum(ranks - m + 1, 1e-9))
    return np.asarray(np.where(m > ranks, (m - 1) / ranks, few))


def least_by_work(
    pp: Ints, num_micro_batches: Floats, backward_share: Floats = 0.5
) -> tuple[tuple[Floats, Floats], ...]:
    """What 1F1B takes at the least, one virtual stage each, by the work of all ranks and of the busiest.

    From `longest_way_s` of the busiest rank, as in `least_waits`: where m > p both ways at it; and all its
    passes of the longer kind, min(p, m) - 1 of the others at the most being left out.

    Parameters
    ----------
    pp : int or array of int
        p, pipeline ranks, at least 1.
    num_micro_batches : float or array
        m, at least 1.
    backward_share : float or array
        The share of its seconds that the longer of a rank's passes takes at the least, 0.5 to 1.

    Returns
    -------
    tuple of pairs
        Of work and of the busiest rank, for one micro-batch, without unit: no step is below any of them.
    """
    m, ranks = np.asarray(num_micro_batches, dtype=np.float64), np.asarray(pp)
    left_out = (np.minimum(ranks, m) - 1.0) * (1.0 - backward_share)
    by_longer = m - 1.0 - left_out
    fills = m > ranks
    both_ways = np.where(fills, 2.0, 1.0), np.where(fills, m - ranks - 1.0, by_longer)
    return both_ways, (1.0, by_longer), (0.0, m)


def least_of_segments_s(
    ranks: NDArray[np.int64],
    num_micro_batches: Floats,
    work_s: NDArray[np.float64],
    busiest_s: NDArray[np.float64],
    backward_share: Floats = 0.5,
) -> NDArray[np.float64]:
    """What 1F1B takes at the least through segments of ranks, however the work of each lies on its ranks.

    Derived here from `longest_way_s` of the busiest rank of a segment, wherever it lies there: behind it are
    the segments behind, and what its own segment's ranks ahead of it, which take no longer, leave.

    Parameters
    ----------
    ranks : array of int, shape [..., segments]
        Pipeline ranks of each, at least 1.
    num_micro_batches : float or array, shape [..., 1]
        m, at least 1.
    work_s, busiest_s : array of float, shape [..., segments]
        Seconds of all ranks of each segment and a micro-batch, and of its busiest rank.
    backward_share : float or array, shape [..., 1]
        As `least_by_work` has it.

    Returns
    -------
    array of float, shape [...]
        Seconds of all micro-batches.
    """
    m, in_all_s = num_micro_batches, np.sum(work_s, axis=-1, keepdims=True)
    from_here_s = np.cumsum(work_s[..., ::-1], axis=-1)[..., ::-1]
    of_ranks = np.cumsum(ranks[..., ::-1], axis=-1)[..., ::-1]
    left_out = (np.minimum(of_ranks, m) - 1.0) * (1.0 - backward_share)
    own_s = in_all_s - from_here_s + m * busiest_s
    longer_s = in_all_s + (m - 1.0 - left_out) * busiest_s
    twice_s = from_here_s + np.maximum((m - of_ranks - 1.0) * busiest_s, 0.0)
    behind_s = from_here_s - work_s + np.maximum((m - of_ranks) * busiest_s, 0.0)
    twice_s = np.where(m > of_ranks, in_all_s + np.maximum(twice_s, behind_s), 0.0)
    return np.asarray(np.max(np.maximum(np.maximum(own_s, longer_s), twice_s), axis=-1))


def pace_excess_s(chunk_s: NDArray[np.float64], schedule: Ints) -> Floats:
    """Seconds that ranks in step lose on uneven chunks.

    Interleaved ranks work on chunks of the same number at the same time, and the slowest of them sets the
    pace of each: sum_v max_r t_vr, against max_r sum_v t_vr where every rank has its own pace. Derived here;
    docs/cost_model.md, "Pipeline schedules", compares it with the event simulator.

    Parameters
    ----------
    chunk_s : array of float, shape [..., virtual stages, pp]
        t_vr, seconds per micro-batch of each chunk.
    schedule : int
        A `Schedule`, 0 to 6.

    Returns
    -------
    float or array, shape [...]
        Seconds per micro-batch, at least 0.
    """
    if not bool(has_trait(schedule, "in_step").all()) or chunk_s.shape[-2] == 1:
        nothing: Floats = 0.0 * chunk_s[..., 0, 0]
        return nothing
    in_step = chunk_s.max(axis=-1).sum(axis=-1)
    free = chunk_s.sum(axis=-2).max(axis=-1)
    return np.asarray(in_step - free)
