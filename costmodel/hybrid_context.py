"""Hybrid context parallelism: samples of unlike lengths dealt to ranks, each to as many as it needs.

Megatron-LM (`--hybrid-context-parallel`) takes the samples of a whole step out of their packs. A sample
longer than `--max-seqlen-per-dp-cp-rank` goes to a power of two of the dp x cp ranks, which share it by
context parallelism; a shorter one goes to a single rank and pays no exchange. Samples are dealt in rounds,
after each of which all ranks meet. What that takes is priced here: the work of the samples in the mean over
ranks, and how long ranks wait for the slowest of a round.

>>> rounds = deal([8, 2, 2, 2, 2], ranks=4, rank_tokens=4)  # one sample on two ranks, two on each other rank
>>> [(team.ranks, team.samples) for team in rounds[0]]
[(2, [8]), (1, [2, 2]), (1, [2, 2])]
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import Floats, Ints
from meshwright.costmodel.lengths import Dealt
from meshwright.costmodel.workload import Workload

_SLACK = 0.05
"""Share of the largest load by which loads may differ for a round to count as balanced (megatron/core/
pipeline_parallel/hybrid_cp_schedule.py, next_hdp_group, delta)."""
_OVERFILL = 1.1
"""Share of its part of the work that a bucket holds at the most (make_buckets_equal there)."""


@dataclass
class Team:
    """Ranks that share samples by context parallelism, one sample after the other."""

    ranks: int
    samples: list[int] = field(default_factory=list)
    """Lengths, tokens, in the order in which they run."""
    load: float = 0.0
    """What Megatron counts: the sum of squares of the lengths over the ranks."""


Round = list[Team]
"""Teams beside one another, of all ranks together."""


def ranks_needed(length: int, rank_tokens: int) -> int:
    """Ranks that share a sample: the least power of two that leaves each of them few enough tokens.

    Parameters
    ----------
    length : int
        Tokens of the sample, at least 1.
    rank_tokens : int
        Most tokens of a sample on one rank, at least 1.

    Returns
    -------
    int
        1, 2, 4 and so on (megatron/core/pipeline_parallel/hybrid_cp_schedule.py, gpus_needed).
    """
    return 1 << max(math.ceil(length / rank_tokens) - 1, 0).bit_length()


def deal(lengths: Sequence[int], *, ranks: int, rank_tokens: int) -> list[Round]:
    """The rounds in which Megatron's scheduler deals the samples of a step to ranks.

    The longest come first, in buckets of about equal work. In each turn the first sample of the first bucket
    that can be placed is placed: on as many idle ranks as it needs, or with the team of that size that has
    least. A round ends where nothing can be placed any more, or, once samples that need fewer ranks than the
    first are placed, where loads are balanced. Samples that only unbalance it wait for the next round, and
    teams grow into ranks that are left idle (megatron/core/pipeline_parallel/hybrid_cp_schedule.py,
    BalancedCPScheduler, megatron-core 0.19.2).

    Parameters
    ----------
    lengths : sequence of int
        Tokens of the samples, each at least 1 and at most `ranks` times `rank_tokens`.
    ranks : int
        Of all replicas and context-parallel groups together: a power of two, at least 1.
    rank_tokens : int
        Most tokens of a sample on one rank, at least 1.

    Returns
    -------
    list of list of Team
        Every sample once; in each round the teams have all ranks.
    """
    waiting = sorted(lengths, reverse=True)
    sizes = {length: ranks_needed(length, rank_tokens) for length in set(waiting)}
    rounds = []
    while waiting:
        dealt, waiting = _one_round(waiting, ranks, sizes)
        rounds.append(dealt)
    return rounds


def _one_round(samples: list[int], ranks: int, sizes: Mapping[int, int]) -> tuple[Round, list[int]]:
    """A round, and the samples that are left for later ones, in the order in which they are looked at."""
    buckets = _buckets(samples, sizes)
    starts, waiting = [0] * len(buckets), len(samples)
    teams: Round = []
    by_size: dict[int, list[tuple[float, int]]] = {}
    idle, first, most_load, balances = ranks, sizes[samples[0]], 0.0, False
    while waiting:
        for index, bucket in enumerate(buckets):
            if starts[index] == len(bucket):
                continue
            length = bucket[starts[index]]
            size = sizes[length]
            if size <= idle or size in by_size:
                break
        else:
            break
        starts[index] += 1
        waiting -= 1
        if size <= idle:
            team = Team(size, [length], length * length / size)
            heapq.heappush(by_size.setdefault(size, []), (team.load, len(teams)))
            teams.append(team)
            idle -= size
        else:
            team = teams[by_size[size][0][1]]
            team.samples.append(length)
            team.load += length * length / size
            heapq.heapreplace(by_size[size], (team.load, by_size[size][0][1]))
        most_load = max(most_load, team.load)
        balances = balances or size < first
        if balances and not idle and waiting:
            least_load = min(heap[0][0] for heap in by_size.values())
            if most_load - least_load <= _SLACK * most_load:
                break
    later = [
        length for start, bucket in zip(starts, buckets, strict=True) for length in bucket[start:]
    ]
    if not idle:
        later += _trimmed(teams)
    _grown(teams, idle, ranks)
    return teams, later


def _buckets(samples: list[int], sizes: Mapping[int, int]) -> list[list[int]]:
    """Samples in their order, in as many parts of about equal work as there are sizes of teams."""
    work = {length: length * length / sizes[length] for length in set(samples)}
    wanted = len({sizes[length] for length in work})
    target = sum(work[length] for length in samples) / wanted
    buckets: list[list[int]] = []
    current: list[int] = []
    filled = 0.0
    for index, length in enumerate(samples):
        # Megatron takes a closed bucket off what is open twice: once from each side.
        still_open = wanted - 2 * len(buckets)
        if current and (
            filled + work[length] > target * _OVERFILL or len(samples) - index <= still_open
        ):
            buckets.append(current)
            current, filled = [], 0.0
        current.append(length)
        filled += work[length]
    return [*buckets, current]


def _trimmed(teams: Round) -> list[int]:
    """Takes the last sample from the team with most while that brings loads nearer together."""
    removed: list[int] = []
    loads = [team.load for team in teams]
    while True:
        most_load, least_load = max(loads), min(loads)
        index = loads.index(most_load)
        busiest = teams[index]
        if most_load - least_load <= _SLACK * most_load or len(busiest.samples) <= 1:
            return removed
        last = busiest.samples[-1]
        loads[index] = most_load - last * last / busiest.ranks
        if max(loads) - min(loads) >= most_load - least_load:
            return removed
        busiest.samples.pop()
        busiest.load = loads[index]
        removed.append(last)


def _grown(teams: Round, idle: int, ranks: int) -> None:
    """Doubles the first of the smallest teams until no rank is idle."""
    while idle:
        team = min(teams, key=lambda each: each.ranks)
        grown = min(2 * team.ranks, ranks)
        idle -= grown - team.ranks
        team.ranks = grown


# What a sample takes: a micro-batch of its own, on as many ranks as it needs.


def is_dealt(workload: Workload) -> bool:
    """Whether samples are dealt to ranks one by one.

    Parameters
    ----------
    workload : Workload
        Its lengths are used.

    Returns
    -------
    bool
        False where ranks run whole sequences or packs.
    """
    return workload.lengths is not None and bool(workload.lengths.dealt)


def padding_multiple(gpus: int) -> int:
    """Tokens to whose multiple samples are padded, so that any team of ranks can share any of them.

    2 dp cp, times tp under sequence parallelism (megatron/core/datasets/gpt_dataset.py, GPTDatasetConfig,
    hybrid_context_parallel); without a pipeline that is twice the GPUs.

    Parameters
    ----------
    gpus : int
        Of the run, at least 1.

    Returns
    -------
    int
        At least 2.
    """
    return 2 * gpus


def padded_lengths(workload: Workload) -> Dealt:
    """Lengths as ranks run them: padded, with the shares of samples.

    Parameters
    ----------
    workload : Workload
        With samples that are dealt.

    Returns
    -------
    tuple of (int, float)
        Rising.
    """
    assert workload.lengths is not None
    multiple, shares = padding_multiple(workload.gpus), dict[int, float]()
    for length, share in workload.lengths.dealt:
        padded = -(-length // multiple) * multiple
        shares[padded] = shares.get(padded, 0.0) + share
    return tuple(shares.items())


def passes_of_micro_batch(workload: Workload, cp: Ints, micro_batch: Ints) -> Floats:
    """Samples that a rank runs in place of a micro-batch of packs, in the mean: those it shares count whole.

    Parameters
    ----------
    workload : Workload
        With samples that are dealt.
    cp : int or array of int, shape [n]
        Ranks that share the longest sample, at least 1.
    micro_batch : int or array of int, shape [n]
        Packs of a micro-batch, at least 1.

    Returns
    -------
    float or array of float
        Above 0.
    """
    assert workload.lengths is not None
    degrees = np.asarray(cp)
    ranks = np.zeros(degrees.shape)
    for length, share in padded_lengths(workload):
        ranks = ranks + share * _ranks_of(workload, length, degrees)
    passes: Floats = micro_batch * workload.lengths.samples_a_pack * ranks / degrees
    return passes


def _ranks_of(workload: Workload, length: int, cp: Ints) -> NDArray[np.int64]:
    """`ranks_needed` for every value of cp, which shares a pack of full size."""
    degrees = np.asarray(cp)
    ranks = np.empty(degrees.shape, dtype=np.int64)
    for degree in np.unique(degrees).tolist():
        most = -(-workload.seq_len // degree)
        ranks[degrees == degree] = ranks_needed(length, most)
    return ranks


def context_of_samples(c: Context, length: int, ranks: Ints) -> Context:
    """The context of a single sample in a micro-batch of its own.

    Teams are neighbouring ranks of dp x cp, cp counted first (megatron/core/parallel_state.py,
    create_hybrid_dp_cp_groups): up to cp ranks lie as a context-parallel group does, more of them as so many
    such groups of neighbouring replicas.

    Parameters
    ----------
    c : Context
        With samples that are dealt.
    length : int
        Tokens of the sample, padded, at least 1.
    ranks : int or array of int, shape [n]
        Ranks that share it, powers of two, at least 1.

    Returns
    -------
    Context
        Of the same layouts, with one sequence in place of packs.
    """
    wanted = np.asarray(ranks)[..., None]
    cp = np.asarray(c.layout.cp)[..., None]
    groups = np.minimum(c.placement.dp, np.maximum(wanted // cp, 1))
    return replace(
        c,
        workload=replace(c.workload, seq_len=length, lengths=None),
        layout=replace(
            c.layout, cp=ranks, micro_batch=np.ones_like(np.asarray(c.layout.micro_batch))
        ),
        placement=replace(c.placement, cp=np.minimum(c.placement.cp * groups, wanted)),
    )


class SampleShare(NamedTuple):
    """Samples of one length, in the mean."""

    context: Context
    """Of one of them."""
    number: Floats
    """Of them that a rank runs in place of a micro-batch of packs."""


def samples_of_micro_batch(c: Context) -> list[SampleShare]:
    """What ranks run in the mean in place of a micro-batch of packs, sample by sample.

    A sample that k ranks share takes k of them as long as it does; a micro-batch has cp ranks for its packs.

    Parameters
    ----------
    c : Context
        With samples that are dealt.

    Returns
    -------
    list of SampleShare
        One for each length.
    """
    workload, layout = c.workload, c.layout
    assert workload.lengths is not None
    a_rank = workload.lengths.samples_a_pack * np.asarray(layout.micro_batch) / layout.cp
    shares = []
    for length, share in padded_lengths(workload):
        ranks = _ranks_of(workload, length, layout.cp)
        context = context_of_samples(c, length, ranks)
        shares.append(SampleShare(context, share * ranks * a_rank))
    return shares


# How long ranks wait for the slowest of a round.


_MOST_DRAWN = 131_072
"""Samples that are dealt in the steps that are tried, or those of four steps where these are more."""
_FEWEST_STEPS, _MOST_STEPS = 4, 4096
_LARGEST_STEP = 131_072
"""Samples of a step that are dealt; a larger step waits no longer for its size."""
_SEED = 20_261_127
"""Of the samples of the steps that are tried: the same file gives the same steps."""


class DealtSteps(NamedTuple):
    """Steps that were tried: which samples run where."""

    kinds: tuple[tuple[int, int], ...]
    """Every (tokens of a sample, ranks that share it) that occurs, or would without idle ranks."""
    samples: NDArray[np.int64]
    """Kinds of the samples of all teams, one team after the other."""
    teams: NDArray[np.int64]
    """Where the samples of each team begin."""
    rounds: NDArray[np.int64]
    """Where the teams of each round begin."""
    as_needed: NDArray[np.float64]
    """Of each kind, how often a rank would run it in the mean if every sample had the ranks that it needs."""

    def slowest_over_mean(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """What all rounds take, over the work of a rank in the mean.

        Parameters
        ----------
        seconds : array of float, shape [kinds, ...]
            Of a sample of each kind, above 0.

        Returns
        -------
        array of float, shape [...]
            At least 1: where nothing is gained by teams that grow into idle ranks, it is exact.
        """
        loads = np.add.reduceat(seconds[self.samples], self.teams)
        slowest = np.maximum.reduceat(loads, self.rounds).sum(axis=0)
        mean = np.tensordot(self.as_needed, seconds, axes=1)
        return np.asarray(np.maximum(slowest / mean, 1.0), dtype=np.float64)


@lru_cache(maxsize=1024)
def dealt_steps(lengths: Dealt, *, samples_a_step: int, ranks: int, rank_tokens: int) -> DealtSteps:
    """Draws the samples of some steps, and deals them.

    Parameters
    ----------
    lengths : tuple of (int, float)
        Tokens of samples, padded, and the share of samples that have them.
    samples_a_step : int
        At least 1.
    ranks, rank_tokens : int
        As `deal` has them.

    Returns
    -------
    DealtSteps
        The same ones for the same numbers.
    """
    drawn = min(samples_a_step, _LARGEST_STEP)
    steps = min(max(_MOST_DRAWN // drawn, _FEWEST_STEPS), _MOST_STEPS)
    sizes = np.array([size for size, _ in lengths])
    shares = np.array([each for _, each in lengths])
    # As an epoch has them: each length as often as its share says, in a shuffled order.
    places = (np.arange(steps * drawn) + 0.5) / (steps * drawn)
    rows = np.searchsorted(np.cumsum(shares / shares.sum())[:-1], places, side="right")
    draws = np.random.default_rng(_SEED).permutation(sizes[rows]).reshape(steps, drawn)
    kinds: dict[tuple[int, int], int] = {}
    needed: dict[int, float] = {}
    samples: list[int] = []
    teams: list[int] = []
    rounds: list[int] = []
    for step in draws.tolist():
        for dealt in deal(step, ranks=ranks, rank_tokens=rank_tokens):
            rounds.append(len(teams))
            for team in dealt:
                teams.append(len(samples))
                samples += [
                    kinds.setdefault((length, team.ranks), len(kinds)) for length in team.samples
                ]
    for length, count in zip(*np.unique(draws, return_counts=True), strict=True):
        size = ranks_needed(int(length), rank_tokens)
        index = kinds.setdefault((int(length), size), len(kinds))
        needed[index] = float(count) * size / ranks
    return DealtSteps(
        kinds=tuple(kinds),
        samples=np.array(samples),
        teams=np.array(teams),
        rounds=np.array(rounds),
        as_needed=np.array([needed.get(index, 0.0) for index in range(len(kinds))]),
    )


def steps_of_layout(c: Context) -> DealtSteps:
    """`dealt_steps` of a single layout.

    Parameters
    ----------
    c : Context
        With samples that are dealt; of one layout, whose dp cp is a power of two.

    Returns
    -------
    DealtSteps
        In a step there are as many samples as its packs hold, to the nearest whole number.
    """
    workload, layout = c.workload, c.layout
    assert workload.lengths is not None
    cp = int(np.ravel(layout.cp)[0])
    samples = workload.global_batch * workload.lengths.samples_a_pack
    return dealt_steps(
        padded_lengths(workload),
        samples_a_step=max(round(samples), 1),
        ranks=int(np.ravel(layout.dp)[0]) * cp,
        rank_tokens=-(-workload.seq_len // cp),
    )
