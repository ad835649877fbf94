"""Packs of unlike samples: worked by hand, against simulation, and inside the step."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.attention import unlike_attention_s
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.layer_kinds import kind_times
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.lengths import (
    LONGEST,
    MOST_LOADS,
    PACKINGS,
    PackedLengths,
    Packing,
    default_pack_size,
    mean_slowest,
    packed_lengths,
    slowest_over_mean,
)
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.schedules import Schedule
from meshwright.costmodel.simulator import Pass, Work, pass_order
from meshwright.costmodel.step_time import imbalance_s, loaded_step, make_context, waits_by_shards
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.record import FrameworkName
from meshwright.model_specs.reader import load_catalog_model
from tests.soaked import some

COINS = ((0.5, 0.5), (1.5, 0.5))
"""Half of the packs take half of the mean, the others half more."""


def counted(lengths: list[int]) -> tuple[list[int], list[int]]:
    sizes, counts = np.unique(lengths, return_counts=True)
    return sizes.tolist(), counts.tolist()


def packs_of(lengths: list[int], pack_size: int, packing: Packing, **window: Any) -> PackedLengths:
    return packed_lengths(*counted(lengths), pack_size=pack_size, packing=packing, **window)


# How samples are packed.


def test_decreasing_first_fit_by_hand() -> None:
    # 7 | 6 | 5 into packs of 10: 3 goes to the 7, 3 to the 6, 2 to the 5, whose pack the end leaves open.
    packed = packs_of([7, 6, 5, 3, 3, 2], 10, "first-fit-decreasing")
    assert packed.samples_a_pack == pytest.approx(9.5 / (26 / 6))
    assert packed.fill == pytest.approx((10 + 9) / 20)
    assert packed.attended_share == pytest.approx(((49 + 9) + (36 + 9)) / 2 / 100)
    assert np.array(packed.loads) == pytest.approx(np.array([[45 / 51.5, 0.5], [58 / 51.5, 0.5]]))


@pytest.mark.parametrize("packing", ["first-fit", "first-fit-decreasing", "sequential"])
def test_equal_samples_fill_packs_alike(packing: Packing) -> None:
    packed = packs_of([1000] * 18, 4096, packing)
    assert packed.loads == ((1.0, 1.0),)
    assert packed.samples_a_pack == 4.0
    assert packed.fill == pytest.approx(4000 / 4096)
    assert packed.attended_share == pytest.approx(4 * 1000**2 / 4096**2)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("window", [None, 128, 5000])
def test_samples_as_long_as_the_pack_are_sequences(packing: Packing, window: int | None) -> None:
    packed = packs_of([4096] * 7, 4096, packing, window=window, windowed_fraction=0.5)
    assert (packed.fill, packed.attended_share, packed.samples_a_pack) == (1.0, 1.0, 1.0)
    assert packed.alike


def test_padding_is_attended_to() -> None:
    packed = packs_of([100, 300], 400, "padded")
    assert (packed.fill, packed.attended_share, packed.alike) == (0.5, 1.0, True)


def test_longer_samples_are_cut() -> None:
    packed = packs_of([500, 400, 700], 400, "sequential")
    assert (packed.cut_samples, packed.longest, packed.samples) == (2, 700, 3)
    assert (packed.attended_share, packed.fill, packed.samples_a_pack) == (1.0, 1.0, 1.0)


def test_a_window_shortens_long_samples_alone() -> None:
    # One of 16,384 under a window of 4,096 sees 4,096 - 4,096^2 / 32,768 = 3,584 positions in the mean, and
    # half a block of 256 queries at either edge in vain; without the window 8,192.
    packed = packs_of([16384] * 5, 16384, "sequential", window=4096, windowed_fraction=1.0)
    assert packed.windowed_share == pytest.approx((3584 + 256) / 8192)
    packed = packs_of([4096] * 20, 16384, "sequential", window=4096, windowed_fraction=1.0)
    assert packed.windowed_share == pytest.approx(4 * 4096**2 / 16384**2)
    assert packed.windowed_share == packed.attended_share


@pytest.mark.parametrize("seed", range(6))
def test_packs_keep_what_any_packing_keeps(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, draw.choice([50, 900])) for _ in range(3000)]
    best = packs_of(lengths, 1000, "first-fit-decreasing")
    for packing in ("first-fit", "first-fit-decreasing", "sequential"):
        packed = packs_of(lengths, 1000, packing)
        assert 0.0 < packed.attended_share < packed.fill <= 1.0
        assert len(packed.loads) <= MOST_LOADS
        assert packed.fill * 1000 == pytest.approx(
            packed.samples_a_pack * np.mean(lengths), rel=0.02
        )
        assert best.fill >= packed.fill - 0.01
        longest = max(lengths) / 1000
        assert packed.attended_share <= longest * packed.fill + 1e-12


def test_a_histogram_of_a_million_is_its_samples_in_small() -> None:
    sizes = np.arange(1, 2001)
    few = packed_lengths(sizes, np.full(2000, 8), pack_size=4096)
    many = packed_lengths(sizes, np.full(2000, 8000), pack_size=4096)
    assert many.samples == 16_000_000
    assert many.fill == pytest.approx(few.fill, abs=2e-3)
    assert many.attended_share == pytest.approx(few.attended_share, rel=1e-2)


def test_the_order_of_a_histogram_says_nothing() -> None:
    assert packed_lengths([3, 9, 5], [4, 1, 7], pack_size=16) == packed_lengths(
        [9, 5, 3], [1, 7, 4], pack_size=16
    )


def test_the_default_pack_holds_the_longest_sample() -> None:
    assert [default_pack_size(n) for n in (1, 128, 129, 8192, 8193, LONGEST)] == [
        128,
        128,
        256,
        8192,
        8320,
        LONGEST,
    ]


@pytest.mark.parametrize(
    "loads",
    [((1.0, 0.5), (1.0, 0.5)), ((0.5, 1.0),), ((0.5, 0.5), (1.5, 0.6)), ((-1.0, 0.5), (3.0, 0.5))],
)
def test_loads_must_be_a_distribution_about_one(loads: Any) -> None:
    with pytest.raises(ValueError, match="loads"):
        PackedLengths(
            packing="first-fit", samples=1, longest=1, samples_a_pack=1, fill=1, loads=loads
        )


# The slowest of several.


def test_two_coins_by_hand() -> None:
    assert slowest_over_mean(COINS) == 1.0
    assert slowest_over_mean(COINS, replicas=2) == pytest.approx(1.25)  # 1.5 in three of four steps
    assert slowest_over_mean(COINS, in_step=2, turns=5) == pytest.approx(1.25, rel=2e-3)
    # Sums of two: 1, 2, 3 with 1/4, 1/2, 1/4; the larger of two is 1, 2, 3 with 1/16, 8/16, 7/16.
    expected = (1 + 16 + 21) / 16 / 2
    assert slowest_over_mean(COINS, replicas=2, turns=2) == pytest.approx(expected, rel=2e-3)
    assert slowest_over_mean(COINS, replicas=2, packs=2) == pytest.approx(expected, rel=2e-3)
    # With as many replicas as can be, one of them has every long pack.
    assert slowest_over_mean(COINS, replicas=10**6, turns=3) == pytest.approx(1.5, rel=2e-3)


def length_file(seed: int) -> PackedLengths:
    """One of twenty distributions of lengths, as data sets of conversations, code and documents have them."""
    rng = np.random.default_rng(seed)
    kind, number = seed % 5, 6000
    if kind == 0:
        samples = rng.lognormal(rng.uniform(5, 7), rng.uniform(0.4, 1.3), number)
    elif kind == 1:
        samples = np.concatenate([rng.normal(300, 60, number), rng.normal(7000, 300, number // 30)])
    elif kind == 2:
        samples = 150 * (1 + rng.pareto(rng.uniform(1.1, 2.5), number))
    elif kind == 3:
        samples = rng.uniform(1, rng.integers(500, 8000), number)
    else:
        samples = rng.choice([128.0, 512.0, 4096.0], size=number, p=[0.7, 0.25, 0.05])
    lengths = np.clip(samples.astype(int), 1, 16_384)
    sizes, counts = np.unique(lengths, return_counts=True)
    size = default_pack_size(int(sizes[-1])) * int(rng.integers(1, 3))
    return packed_lengths(sizes, counts, pack_size=size, packing=PACKINGS[seed % 3])


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(2, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in some((*range(5, 20), 0, 1, 3, 4))),
    ],
)
def test_expected_maximum_equals_simulation_within_one_percent(seed: int) -> None:
    loads = length_file(seed).loads
    values, shares = np.array(loads).T
    rng = np.random.default_rng(1000 + seed)
    draw = random.Random(seed)
    for _ in range(3):
        replicas, in_step = draw.choice([2, 8, 64]), draw.choice([1, 1, 4])
        turns, packs = draw.choice([1, 4, 16]), draw.choice([1, 2])
        steps = max(400, 3_000_000 // (replicas * in_step * turns * packs))
        totals = np.zeros((steps, replicas))
        for _ in range(turns):
            size = (steps, replicas, in_step)
            once = sum(rng.choice(values, p=shares / shares.sum(), size=size) for _ in range(packs))
            totals += np.max(once, axis=-1)
        slowest = totals.max(axis=-1) / (turns * packs)
        noise = 3 * slowest.std() / np.sqrt(steps)
        expected = slowest_over_mean(
            loads, replicas=replicas, in_step=in_step, turns=turns, packs=packs
        )
        assert noise < 0.02 * slowest.mean()
        assert expected == pytest.approx(slowest.mean(), rel=0.01, abs=noise)


@pytest.mark.parametrize("seed", range(5))
def test_the_kept_distribution_is_that_of_the_packs(seed: int) -> None:
    values, shares = np.array(length_file(seed).loads).T
    assert shares.sum() == pytest.approx(1.0)
    assert values @ shares == pytest.approx(1.0)
    assert (np.diff(values) > 0).all()


def test_dealing_samples_out_evenly_brought_no_more_than_the_slowest_rank_costs() -> None:
    """Mistral-7B under FSDP on 2, 4, 8 A100 (fms-acceleration, refs_orca/a100_80gb_mp.csv): tokens/s a GPU.

    Micro-batches of 8 samples without padding, as they come and dealt out evenly (multipack). Runs with
    padding (a100_80gb_pf.csv) say how the longest of 4 and of 8 samples compare with the mean of 289 tokens.
    """
    points = (np.arange(4000) + 0.5) / 4000
    normal = np.array([NormalDist().inv_cdf(point) for point in points])
    deviation = np.sqrt(np.log(1 + 0.5**2))
    lengths = np.round(289 * np.exp(deviation * normal - deviation**2 / 2)).astype(int)
    sizes, counts = np.unique(lengths, return_counts=True)
    loads = tuple(zip((sizes / lengths.mean()).tolist(), (counts / 4000).tolist(), strict=True))
    assert slowest_over_mean(loads, in_step=4) == pytest.approx(2406.503 / 5.405 / 289, rel=0.01)
    assert slowest_over_mean(loads, in_step=8) == pytest.approx(2933.378 / 5.596 / 289, rel=0.01)
    measured = {2: 2277.158 / 2196.443, 4: 2232.001 / 2081.609, 8: 2239.884 / 1804.189}
    costs = {ranks: slowest_over_mean(loads, in_step=ranks, turns=2, packs=8) for ranks in measured}
    assert all(measured[ranks] < cost < measured[ranks] + 0.13 for ranks, cost in costs.items())


def played_s(pp: int, micro_batch_s: list[float]) -> float:
    """Seconds of 1F1B, event by event, with backward passes that take twice as long as forward ones."""
    number = len(micro_batch_s)
    orders = [pass_order(rank, pp, 1, number) for rank in range(pp)]
    ends: dict[tuple[Work, int, int], float] = {}
    at, clock = [0] * pp, [0.0] * pp
    while any(at[rank] < len(orders[rank]) for rank in range(pp)):
        for rank in range(pp):
            while at[rank] < len(orders[rank]):
                one: Pass = orders[rank][at[rank]]
                k, forward = one.micro_batch, one.work is Work.FORWARD
                needs = (Work.FORWARD, rank - 1, k) if forward else (Work.BACKWARD, rank + 1, k)
                if not forward and rank == pp - 1:
                    needs = (Work.FORWARD, rank, k)
                ready_s = 0.0 if forward and rank == 0 else ends.get(needs)
                if ready_s is None:
                    break
                clock[rank] = max(clock[rank], ready_s) + micro_batch_s[k] * (1 if forward else 2)
                ends[one.work, rank, k] = clock[rank]
                at[rank] += 1
    return max(clock)


LONGER = [pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 32), (8, 8))]


@pytest.mark.parametrize(
    ("pp", "m"), [(2, 8), (4, 8), *LONGER, pytest.param(8, 32, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("replicas", [1, 8])
def test_pipelines_of_unlike_micro_batches_take_what_events_say(
    pp: int, m: int, replicas: int
) -> None:
    loads, attention = length_file(0).loads, 0.3
    values, shares = np.array(loads).T
    rng = np.random.default_rng(pp * m + replicas)
    steps = []
    for _ in range(60):
        packs = rng.choice(values, p=shares / shares.sum(), size=(replicas, m))
        each = (1 - attention) + attention * packs
        steps.append(max(played_s(pp, replica.tolist()) for replica in each))
    slowest = mean_slowest(
        loads, replicas=replicas, in_step=1, in_flight=min(pp, m), micro_batches=m, packs=1
    )
    priced_s = 3 * ((m + pp - 1) + attention * m * (float(slowest) - 1))
    assert priced_s == pytest.approx(np.mean(steps), rel=0.08)
    assert np.mean(steps) > 1.02 * 3 * (m + pp - 1)


# In the step.


def workload(**changes: Any) -> Workload:
    settings: dict[str, Any] = {
        "model": load_catalog_model("llama-3-8b"),
        "cluster": read_cluster("dgx-h100"),
        "gpus": 16,
        "global_batch": 64,
        "seq_len": 8192,
    }
    return Workload(**settings | changes)


def packs(**changes: Any) -> PackedLengths:
    fields: dict[str, Any] = {
        "packing": "first-fit",
        "samples": 1000,
        "longest": 8192,
        "samples_a_pack": 4.0,
        "fill": 0.95,
        "attended_share": 0.25,
        "windowed_share": 0.25,
        "loads": COINS,
    }
    return PackedLengths(**fields | changes)


DEGREES: dict[str, Any] = {
    "tp": 2,
    "dp": 8,
    "num_micro_batches": 8,
    "micro_batch": 1,
    "zero_stage": 1,
}


def priced(work: Workload, layout: Layout, layers: int = 32) -> dict[str, float]:
    stages = tuple((layers // int(layout.pp),) for _ in range(int(layout.pp)))
    parts = estimate_layout(
        work, layout, nested_placement(work.cluster, layout), stages
    ).breakdown_s
    return {name: float(np.asarray(seconds)) for name, seconds in parts.items()}


def test_attention_goes_with_the_squares_of_samples() -> None:
    layout = Layout(**DEGREES)
    sequences, packed = priced(workload(), layout), priced(workload(lengths=packs()), layout)
    assert packed["gemm"] == sequences["gemm"]
    # Rows of queries take as long as some keys more in every sample: all but that is a quarter, and differs.
    of_scores = (sequences["attention"] - packed["attention"]) / 0.75
    of_rows = sequences["attention"] - of_scores
    assert 0 < of_rows < 0.3 * of_scores
    waits = 0.25 * of_scores * (slowest_over_mean(COINS, replicas=8, turns=8) - 1)
    assert packed["length_imbalance"] == pytest.approx(waits)


def test_packs_that_are_sequences_change_no_digit() -> None:
    plain = packs(fill=1.0, attended_share=1.0, windowed_share=1.0, loads=((1.0, 1.0),))
    layout = Layout(**DEGREES)
    assert priced(workload(lengths=plain), layout) == priced(workload(), layout)


@pytest.mark.parametrize(
    ("changes", "meets"),
    [
        ({}, {"replicas": 8, "turns": 8}),
        ({"micro_batch": 2, "num_micro_batches": 4}, {"replicas": 8, "turns": 4, "packs": 2}),
        ({"zero_stage": 3}, {"in_step": 8, "turns": 8}),
        ({"zero_stage": 3, "shard_groups": 2}, {"replicas": 2, "in_step": 4, "turns": 8}),
        ({"ep": 8}, {"replicas": 2, "in_step": 4, "turns": 8}),
        ({"dp": 2, "pp": 4, "num_micro_batches": 32}, {"replicas": 2, "in_step": 4, "turns": 8}),
        ({"dp": 1, "tp": 16}, None),
    ],
)
def test_who_waits_for_whom(changes: dict[str, Any], meets: dict[str, int] | None) -> None:
    layout = Layout(**DEGREES | changes)
    work = workload(lengths=packs())
    context = make_context(work, layout, nested_placement(work.cluster, layout))
    m = int(layout.num_micro_batches)
    longer = 0.0 if meets is None else m * (slowest_over_mean(COINS, **meets) - 1)
    attention_s = float(np.asarray(unlike_attention_s(context)))
    assert float(np.asarray(imbalance_s(context))) == pytest.approx(attention_s * longer)


@pytest.mark.parametrize(
    ("framework", "zero_stage", "micro_batches", "waits"),
    [
        ("megatron", 1, 8, False),  # gathered and reduced once a step
        ("fsdp2", 3, 8, True),  # gathered in each micro-batch, reduced once
        ("fsdp2", 3, 1, False),  # once for both passes of the only one
        ("torchtitan", 2, 8, True),  # reduced in each
    ],
)
def test_who_waits_in_every_micro_batch(
    framework: FrameworkName, zero_stage: int, micro_batches: int, waits: bool
) -> None:
    changes = {"zero_stage": zero_stage, "num_micro_batches": micro_batches}
    layout = Layout(**DEGREES | changes)
    for lengths, wanted in ((packs(), waits), (None, False)):
        work = workload(lengths=lengths, framework=framework)
        context = make_context(work, layout, nested_placement(work.cluster, layout))
        assert waits_by_shards(context) == wanted


def test_forward_passes_first_wait_for_the_slowest_once() -> None:
    layout = Layout(**DEGREES | {"dp": 2, "pp": 4, "schedule": int(Schedule.GPIPE)})
    work = workload(lengths=packs())
    context = make_context(work, layout, nested_placement(work.cluster, layout))
    longer = 8 * (slowest_over_mean(COINS, replicas=2, turns=8) - 1)
    longer += 3 * (slowest_over_mean(COINS, in_step=8) - 1)
    attention_s = float(np.asarray(unlike_attention_s(context)))
    assert float(np.asarray(imbalance_s(context))) == pytest.approx(attention_s * longer)


def test_a_step_of_known_loads_waits_no_longer_than_with_nothing_recomputed() -> None:
    """It is a bound however many layers are recomputed: no wait of theirs counts."""
    work = workload(lengths=packs())
    waits = []
    for changes in ({}, {"recompute": int(Recompute.FULL), "recompute_layers": 32}):
        layout = Layout(**DEGREES | changes)
        context = make_context(work, layout, nested_placement(work.cluster, layout))
        step = loaded_step(context, kind_times(context), 1.0, 1.0)
        waits.append((step.parts["length_imbalance"], imbalance_s(context)))
    (loaded_plain_s, plain_s), (loaded_s, recomputed_s) = waits
    assert loaded_s == loaded_plain_s == pytest.approx(plain_s)
    assert recomputed_s > 1.2 * plain_s


def test_what_is_recomputed_is_unlike_again() -> None:
    work = workload(lengths=packs())

    def seconds(**changes: Any) -> float:
        layout = Layout(**DEGREES | changes)
        context = make_context(work, layout, nested_placement(work.cluster, layout))
        return float(np.asarray(unlike_attention_s(context)))

    once, half, full = (
        seconds(),
        seconds(recompute=int(Recompute.FULL), recompute_layers=16),
        seconds(recompute=int(Recompute.FULL), recompute_layers=32),
    )
    core = seconds(recompute=int(Recompute.CORE_ATTENTION))
    assert once < half < full
    assert full - half == pytest.approx(half - once)
    assert core > once


def test_unfused_attention_masks_what_it_computes() -> None:
    layout = Layout(**DEGREES)
    sequences = workload(attention_kernel="unfused")
    packed = replace(sequences, lengths=packs())
    before, after = priced(sequences, layout), priced(packed, layout)
    assert after["attention"] == before["attention"]
    assert after["length_imbalance"] == 0.0
