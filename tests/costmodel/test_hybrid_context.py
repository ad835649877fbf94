"""Samples dealt to ranks one by one: by hand, against a plain simulation, and inside the step."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.hybrid_context import (
    Round,
    deal,
    dealt_steps,
    padded_lengths,
    passes_of_micro_batch,
    ranks_needed,
)
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.lengths import MOST_DEALT, PackedLengths, dealt_lengths, packed_lengths
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.reader import load_catalog_model


def shown(rounds: list[Round]) -> list[list[tuple[int, list[int]]]]:
    return [[(team.ranks, team.samples) for team in teams] for teams in rounds]


# How samples are dealt.


def test_ranks_are_the_least_power_of_two() -> None:
    assert [ranks_needed(length, 100) for length in (1, 100, 101, 200, 201, 400, 401)] == [
        1,
        1,
        2,
        2,
        4,
        4,
        8,
    ]


def test_a_long_sample_takes_several_ranks_and_short_ones_fill_the_others() -> None:
    # 8^2 / 2 = 32 on the first two ranks; each of the others has two of 4.
    assert shown(deal([4, 4, 8, 4, 4], ranks=4, rank_tokens=4)) == [
        [(2, [8]), (1, [4, 4]), (1, [4, 4])]
    ]


def test_teams_grow_into_ranks_that_are_idle() -> None:
    assert shown(deal([5], ranks=8, rank_tokens=10)) == [[(8, [5])]]
    assert shown(deal([9, 5, 5], ranks=4, rank_tokens=10)) == [[(2, [9]), (1, [5]), (1, [5])]]


def test_what_unbalances_a_round_waits_for_the_next() -> None:
    # A ninth sample beside eight equal ones leaves seven ranks idle: it gets a round and all ranks.
    rounds = shown(deal([10] * 9, ranks=8, rank_tokens=10))
    assert rounds == [[(1, [10])] * 8, [(8, [10])]]


def plainly(lengths: list[int], ranks: int, rank_tokens: int) -> list[list[tuple[int, list[int]]]]:
    """Megatron's dealing rank by rank, as its description says, looked through anew in every turn."""

    def needs(length: int) -> int:
        size = 1
        while size * rank_tokens < length:
            size *= 2
        return size

    left, rounds = sorted(lengths, reverse=True), []
    while left:
        work = [length**2 / needs(length) for length in left]
        kinds = len({needs(length) for length in left})
        queues: list[list[int]] = [[]]
        filled, open_kinds = 0.0, kinds
        for index, length in enumerate(left):
            full = filled + work[index] > sum(work) / kinds * 1.1
            if queues[-1] and (full or len(left) - index <= open_kinds - len(queues) + 1):
                queues.append([])
                filled, open_kinds = 0.0, open_kinds - 1
            queues[-1].append(length)
            filled += work[index]
        team_of: list[int | None] = [None] * ranks
        teams: list[tuple[int, list[int]]] = []
        largest = needs(left[0])

        def load(team: tuple[int, list[int]]) -> float:
            return sum(length**2 / team[0] for length in team[1])

        checks = False
        while True:
            found = None
            for queue in queues:
                if queue:
                    size = needs(queue[0])
                    same = [index for index, team in enumerate(teams) if team[0] == size]
                    if same or team_of.count(None) >= size:
                        found = queue, size, same
                        break
            if found is None:
                break
            queue, size, same = found
            if team_of.count(None) >= size:
                teams.append((size, []))
                index = len(teams) - 1
                for _ in range(size):
                    team_of[team_of.index(None)] = index
            else:
                index = min(same, key=lambda each: load(teams[each]))
            teams[index][1].append(queue.pop(0))
            checks |= size < largest
            loads = [0.0 if each is None else load(teams[each]) for each in team_of]
            level = max(loads) - min(loads) <= 0.05 * max(loads)
            if checks and any(queues) and level:
                break
        left = [length for queue in queues for length in queue]
        while None not in team_of:
            loads = [load(team) for team in teams]
            spread = max(loads) - min(loads)
            size, samples = teams[loads.index(max(loads))]
            if spread <= 0.05 * max(loads) or len(samples) == 1:
                break
            last = samples.pop()
            loads = [load(team) for team in teams]
            if max(loads) - min(loads) >= spread:
                samples.append(last)
                break
            left.append(last)
        while sum(size for size, _ in teams) < ranks:
            smallest = min(size for size, _ in teams)
            at = next(index for index, team in enumerate(teams) if team[0] == smallest)
            teams[at] = (2 * smallest, teams[at][1])
        rounds.append(teams)
    return rounds


def drawn(rng: random.Random, most: int, number: int) -> list[int]:
    spread, middle = rng.uniform(0.3, 1.8), math.log(most) - rng.uniform(0.5, 4.0)
    return [max(1, min(most, int(rng.lognormvariate(middle, spread)))) for _ in range(number)]


@pytest.mark.parametrize("seed", range(40))
def test_dealing_is_that_of_a_plain_simulation(seed: int) -> None:
    rng = random.Random(seed)
    ranks, rank_tokens = 2 ** rng.randint(0, 5), rng.choice([10, 64, 1000])
    lengths = drawn(rng, ranks * rank_tokens, rng.choice([1, 3, 10, 60]))
    rounds = deal(lengths, ranks=ranks, rank_tokens=rank_tokens)
    assert shown(rounds) == plainly(lengths, ranks, rank_tokens)
    dealt = sorted(length for teams in rounds for team in teams for length in team.samples)
    assert dealt == sorted(lengths)
    for teams in rounds:
        assert sum(team.ranks for team in teams) == ranks
        for team in teams:
            assert team.samples
            assert all(team.ranks >= ranks_needed(each, rank_tokens) for each in team.samples)


# Lengths of a file, on few of them.


def test_few_lengths_stay_as_they_are() -> None:
    assert dealt_lengths([30, 10, 20], [1, 1, 2], pack_size=25) == (
        (10, 0.25),
        (20, 0.5),
        (25, 0.25),
    )


@pytest.mark.parametrize("seed", range(8))
def test_many_lengths_keep_mean_longest_and_nearly_their_squares(seed: int) -> None:
    lengths = np.array(drawn(random.Random(seed), 100_000, 5000))
    sizes, counts = np.unique(lengths, return_counts=True)
    kept, shares = np.array(dealt_lengths(sizes, counts, pack_size=100_000)).T
    assert len(kept) <= MOST_DEALT
    assert kept.max() == lengths.max()
    assert kept @ shares == pytest.approx(lengths.mean(), rel=2e-3)
    assert kept**2 @ shares == pytest.approx((lengths.astype(float) ** 2).mean(), rel=1e-2)


# What a step takes.


def workload(lengths: list[int], pack_size: int, **changes: Any) -> Workload:
    sizes, counts = np.unique(lengths, return_counts=True)
    packed = packed_lengths(sizes, counts, pack_size=pack_size)
    dealt = replace(packed, dealt=dealt_lengths(sizes, counts, pack_size=pack_size))
    base = Workload(
        model=load_catalog_model("llama-3-8b"),
        cluster=read_cluster("dgx-h100"),
        gpus=16,
        global_batch=16,
        seq_len=pack_size,
        lengths=dealt,
    )
    return replace(base, **changes)


LAYOUT = Layout(
    tp=2, cp=4, dp=2, micro_batch=1, num_micro_batches=8, sequence_parallel=True, zero_stage=1
)


def step(work: Workload, layout: Layout = LAYOUT) -> dict[str, float]:
    stages = ((work.model.layers,),)
    priced = estimate_layout(work, layout, nested_placement(work.cluster, layout), stages)
    parts = {name: float(np.asarray(part)) for name, part in priced.breakdown_s.items()}
    assert sum(parts.values()) == pytest.approx(float(np.asarray(priced.step_time_s)))
    return parts


def test_samples_as_long_as_packs_are_sequences_to_the_digit() -> None:
    dealt = workload([16_384] * 10, 16_384)
    whole = step(replace(dealt, lengths=None))
    parts = step(dealt)
    assert parts.pop("length_imbalance") == pytest.approx(0.0, abs=1e-12)
    assert parts == pytest.approx(whole, rel=1e-12)


def test_samples_that_fit_a_rank_pay_no_exchange() -> None:
    parts = step(workload([4096] * 10, 16_384))
    assert parts.get("cp_comm", 0.0) == 0.0
    assert step(replace(workload([4096] * 10, 16_384), lengths=None))["cp_comm"] > 0


def test_padding_is_run() -> None:
    # 2 x 16 GPUs: 4,097 tokens are 4,128, and need two ranks of 4,096.
    work = workload([4097] * 12, 16_384)
    assert padded_lengths(work) == ((4128, 1.0),)
    assert work.lengths is not None
    passes = passes_of_micro_batch(work, 4, 1)
    assert passes == pytest.approx(work.lengths.samples_a_pack * 2 / 4)


@pytest.mark.parametrize(
    ("seed", "ranks"),
    [pytest.param(2, 8, marks=pytest.mark.slow), pytest.param(3, 4, marks=pytest.mark.soak)],
)
def test_a_step_takes_the_slowest_rank_of_every_round(seed: int, ranks: int) -> None:
    """Steps drawn and dealt apart, each sample priced as a sequence of its own that runs alone.

    A single step of 109 samples lies 36 % from the mean of all: 1,000 of them tell it to 1 %.
    """
    lengths = [-(-each // 32) * 32 for each in drawn(random.Random(seed), 16_384, 60)]
    work = workload([*lengths, 16_384], 16_384)
    layout = replace(LAYOUT, dp=ranks // 4, num_micro_batches=64 // ranks)
    work = replace(work, gpus=2 * ranks)
    parts = step(work, layout)
    beside = ("dp_comm", "optimizer", "step_overhead", "scale", "pipeline_bubble", "pipeline_p2p")
    rounds_s = sum(seconds for name, seconds in parts.items() if name not in beside)
    alone_s: dict[tuple[int, int], float] = {}

    def sample_s(length: int, size: int) -> float:
        if (length, size) not in alone_s:
            alone = replace(work, seq_len=length, lengths=None)
            one = replace(layout, cp=size, dp=ranks // size, num_micro_batches=1)
            own = step(alone, one)
            seconds = (part for name, part in own.items() if name not in beside)
            alone_s[length, size] = sum(seconds)
        return alone_s[length, size]

    def as_needed_s(length: int) -> float:
        size = ranks_needed(length, 4096)
        return sample_s(length, size) * size / ranks

    assert work.lengths is not None
    sizes, shares = np.array(padded_lengths(work)).T
    number = work.global_batch * work.lengths.samples_a_pack
    mean_s = number * sum(
        share * as_needed_s(int(size)) for size, share in zip(sizes, shares, strict=True)
    )
    rng, slowest_s, worked_s = np.random.default_rng(seed), 0.0, 0.0
    for _ in range(1000):
        samples = rng.choice(sizes.astype(int), round(number), p=shares / shares.sum()).tolist()
        worked_s += sum(map(as_needed_s, samples))
        slowest_s += sum(
            max(sum(sample_s(each, team.ranks) for each in team.samples) for team in teams)
            for teams in deal(samples, ranks=ranks, rank_tokens=4096)
        )
    assert rounds_s == pytest.approx(mean_s * slowest_s / worked_s, rel=0.025)


def test_one_rank_waits_for_no_other() -> None:
    steps = dealt_steps(((10, 0.5), (30, 0.5)), samples_a_step=7, ranks=1, rank_tokens=30)
    seconds = np.array([1.0 + length for length, _ in steps.kinds])
    assert steps.slowest_over_mean(seconds) == pytest.approx(1.0)


def test_lengths_that_are_no_distribution_are_refused() -> None:
    packed = packed_lengths([8], [4], pack_size=8)
    for dealt in (((8, 0.5),), ((8, 0.5), (4, 0.5)), ((0, 1.0),), ((8, -1.0), (9, 2.0))):
        with pytest.raises(ValueError, match="dealt"):
            replace(packed, dealt=dealt)
    assert isinstance(replace(packed, dealt=((8, 1.0),)), PackedLengths)
