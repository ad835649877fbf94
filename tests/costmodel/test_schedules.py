"""Pipeline schedules: orders by hand, closed forms against the event simulator and the papers' tables."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.estimate import estimate_layout, stage_memory_parts_gib
from meshwright.costmodel.execution_names import SCHEDULE_NAMES
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.rank_load import chunk_counts
from meshwright.costmodel.schedules import (
    Schedule,
    bubble_share,
    in_flight,
    least_by_work,
    least_of_segments_s,
    schedule_name,
    schedule_named,
    traits,
    unpaired_share,
)
from meshwright.costmodel.simulator import Timeline, Work, one_f_one_b_s, pass_order, simulate
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.blocks import MoeSpec
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.layer_split import SplitCosts, default_stages, level_splits
from meshwright.planner.bounds.pricing import CostModelPricing
from tests.costmodel.pipeline_oracles import paired_s, peak_chunks
from tests.planner.bounds.best_split import best_split

SHAPES = (
    (Schedule.ONE_F_ONE_B, 1),
    (Schedule.ONE_F_ONE_B, 3),
    (Schedule.GPIPE, 1),
    (Schedule.BREADTH_FIRST, 2),
    (Schedule.BREADTH_FIRST, 3),
    (Schedule.ZB_H1, 1),
    (Schedule.ZB_H1, 2),
    (Schedule.ZB_H1, 4),
    (Schedule.ZBV, 2),
    (Schedule.DUALPIPE_V, 2),
    (Schedule.DUALPIPE, 1),
)


def play(
    schedule: Schedule, shape: tuple[int, int, int], times: tuple[float, float, float]
) -> Timeline:
    """Even chunks; the shape is (pp, vpp, micro-batches), the times are forward, inputs, weights."""
    (pp, vpp, m), (f, i, w) = shape, times
    chunks = pp * vpp
    return simulate(
        [f] * chunks,
        [i + w] * chunks,
        pp=pp,
        num_micro_batches=m,
        schedule=schedule,
        weight_s=[w] * chunks,
    )


def bubble_s(schedule: Schedule, pp: int, times: tuple[float, float, float]) -> float:
    """Of even chunks."""
    f, i, w = times
    return float(np.asarray(bubble_share(schedule, pp, f, i + w, w))) * (pp - 1) * (f + i + w)


def test_zb_h1_by_hand() -> None:
    """2 ranks, 3 micro-batches, every part 1 s: the weight gradients of rank 1 lag by one."""
    line = play(Schedule.ZB_H1, (2, 1, 3), (1.0, 1.0, 1.0))
    words = ["".join(f"{one.work}{one.micro_batch}" for one in rank) for rank in line.passes]
    assert words == ["F0F1I0W0F2I1W1I2W2", "F0I0F1I1W0F2I2W1W2"]
    assert list(line.starts_s[0]) == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert list(line.starts_s[1]) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert line.seconds == 10 == 3 * 3 + (2 - 1) * (1 + 1 - 1)


def test_dual_pipe_v_by_hand() -> None:
    """2 ranks of a V of 4 chunks, 4 micro-batches (DeepSeek's steps 1 to 8 with one rank below the other)."""
    line = play(Schedule.DUALPIPE_V, (2, 2, 4), (1.0, 1.0, 1.0))
    words = [" ".join(f"{one.work}{one.chunk}" for one in rank) for rank in line.passes]
    assert words[0] == "F0 F0 F0 F3 I3 W3 F3 F0 B3 F3 B0 B3 F3 B0 B3 I0 W0 I0 W0"
    assert words[1] == "F1 F2 F1 F2 F1 B2 F2 B1 F1 B2 F2 B1 B2 B1 I2 I1 W2 W1"
    assert sum(one.paired for one in line.passes[0]) == 3
    assert line.seconds == 4 * 2 * 3 + (2 - 1) * (3 + 2 - 3)


@given(
    st.sampled_from(SHAPES),
    st.integers(1, 4),
    st.integers(0, 3),
    st.tuples(st.floats(0.5, 2.0), st.floats(1.0, 2.5), st.floats(0.1, 1.0)),
)
def test_closed_form_is_the_simulator_on_even_chunks(
    shape: tuple[Schedule, int],
    half: int,
    more: int,
    times: tuple[float, float, float],
) -> None:
    """For weights <= forward <= inputs, as in every transformer."""
    (schedule, vpp), (f, input_over_f, weight_over_f) = shape, times
    pp = 2 * half
    m, i, w = pp * (2 + more), f * input_over_f, f * weight_over_f
    line = play(schedule, (pp, vpp, m), (f, i, w))
    closed = m * vpp * (f + i + w) + bubble_s(schedule, pp, (f, i, w))
    assert line.seconds == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize("pp", [3, 5, 7])
def test_odd_pipelines_agree_too(pp: int) -> None:
    for schedule, vpp in SHAPES:
        if schedule is not Schedule.DUALPIPE:
            line = play(schedule, (pp, vpp, 2 * pp), (1.0, 1.4, 0.7))
            closed = 2 * pp * vpp * 3.1 + bubble_s(schedule, pp, (1.0, 1.4, 0.7))
            assert line.seconds == pytest.approx(closed, rel=1e-12)


@given(st.sampled_from(SHAPES), st.integers(1, 4), st.integers(2, 4))
def test_activations_in_flight_are_those_of_the_simulator(
    shape: tuple[Schedule, int], half: int, turns: int
) -> None:
    schedule, vpp = shape
    pp = 2 * half
    line = play(schedule, (pp, vpp, pp * turns), (1.0, 1.0, 1.0))
    layout = Layout(pp=pp, vpp=vpp, num_micro_batches=pp * turns, schedule=int(schedule))
    # DualPipe's unit is the mean of a rank's two stages, of which it holds both.
    chunks = 2 if schedule is Schedule.DUALPIPE else vpp
    assert (np.asarray(in_flight(layout, np.arange(pp))) * chunks).tolist() == list(
        peak_chunks(line)
    )


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
def test_bubbles_of_the_papers(pp: int) -> None:
    """Zero Bubble (arXiv 2401.10241), section 2.3 and DeepSeek-V3 (arXiv 2412.19437), Table 2, where B is the
    whole backward pass: (PP - 1)(F + B), (PP - 1)(F + B - 2 W), (PP/2 - 1)(F&B + B - 3 W)."""
    f, i, w = 1.0, 1.2, 0.9
    whole = i + w
    assert bubble_s(Schedule.ONE_F_ONE_B, pp, (f, i, w)) == pytest.approx((pp - 1) * (f + whole))
    assert bubble_s(Schedule.ZB_H1, pp, (f, i, w)) == pytest.approx((pp - 1) * (f + i - w))
    assert bubble_s(Schedule.ZB_H1, pp, (f, i, w)) == pytest.approx((pp - 1) * (f + whole - 2 * w))
    f, i, w = 1.0, 1.0, 0.8
    both = f + i + w
    table = (pp / 2 - 1) * (both + (i + w) - 3 * w)
    assert bubble_s(Schedule.DUALPIPE, pp, (f, i, w)) == pytest.approx(table)
    assert bubble_s(Schedule.DUALPIPE_V, pp, (f, i, w)) == pytest.approx(
        (pp - 1) * (both + (i + w) - 3 * w)
    )


def test_activations_of_the_papers() -> None:
    """DeepSeek-V3, Table 2: PP, PP and PP + 1 stages; Zero Bubble, Table 2: p of ZB-H1 as of 1F1B."""

    def most(schedule: Schedule, stages: int) -> float:
        return float(
            np.max(
                np.asarray(
                    in_flight(
                        Layout(pp=8, num_micro_batches=64, vpp=stages, schedule=int(schedule)),
                        np.arange(8),
                    )
                )
            )
        )

    assert most(Schedule.ONE_F_ONE_B, 1) == most(Schedule.ZB_H1, 1) == most(Schedule.ZBV, 2) == 8
    assert 2 * most(Schedule.DUALPIPE, 1) == 8 + 1
    assert most(Schedule.GPIPE, 1) == most(Schedule.BREADTH_FIRST, 2) == 64


def test_dual_pipe_is_two_mirrored_dual_pipe_v() -> None:
    stages = [1.0, 1.3, 0.8, 1.1]
    backward = [2.0 * f for f in stages]
    whole = simulate(stages, backward, pp=4, num_micro_batches=16, schedule=Schedule.DUALPIPE)
    folded = simulate(stages, backward, pp=2, num_micro_batches=8, schedule=Schedule.DUALPIPE_V)
    assert whole.ends_s == (*folded.ends_s, *reversed(folded.ends_s))
    seen = sorted(
        (one.chunk, one.micro_batch) for rank in whole.passes for one in rank if not one.backward
    )
    assert seen == [(chunk, k) for chunk in range(4) for k in range(16)]


@pytest.mark.parametrize(("schedule", "vpp"), SHAPES)
def test_every_pass_runs_once(schedule: Schedule, vpp: int) -> None:
    pp, m = 4, 16
    orders = [pass_order(rank, pp, vpp, m, schedule) for rank in range(pp)]
    passes = [one for order in orders for one in order]
    assert len({(one.chunk, one.micro_batch, one.work) for one in passes}) == len(passes)
    for works in ((Work.FORWARD,), (Work.BACKWARD, Work.INPUT), (Work.BACKWARD, Work.WEIGHT)):
        assert sum(one.work in works for one in passes) == pp * vpp * m


def test_weight_gradients_fill_waits_only_where_the_schedule_splits() -> None:
    plain = play(Schedule.ONE_F_ONE_B, (4, 1, 8), (1.0, 1.0, 1.0)).seconds
    split = play(Schedule.ZB_H1, (4, 1, 8), (1.0, 1.0, 1.0)).seconds
    assert plain - split == (4 - 1) * 2


def test_shapes_that_do_not_exist_are_refused_with_the_number() -> None:
    with pytest.raises(ValueError, match="vpp: 3, zbv takes 2"):
        pass_order(0, 2, 3, 8, Schedule.ZBV)
    with pytest.raises(ValueError, match="num_micro_batches: 7, dualpipe-v needs 8"):
        pass_order(0, 4, 2, 7, Schedule.DUALPIPE_V)
    with pytest.raises(ValueError, match="even"):
        pass_order(0, 3, 1, 9, Schedule.DUALPIPE)
    with pytest.raises(ValueError, match="weight_s"):
        simulate([1.0], [1.0], pp=1, num_micro_batches=1, weight_s=[])


def test_names_and_codes_go_both_ways() -> None:
    for name in SCHEDULE_NAMES:
        schedule = schedule_named(name)
        vpp = 2 if name == "interleaved-1f1b" else traits(schedule).fewest_chunks
        assert schedule_name(schedule, vpp) == name


def test_a_v_lays_chunks_down_and_up() -> None:
    """6 layers, 2 ranks of 2 chunks, 3 dense layers first: rank 0 has layers 0 and 5, rank 1 has 1 to 4."""
    counts = chunk_counts(3, ((1, 1), (2, 2)), 0, v_shaped=True)
    assert counts.dense.tolist() == [[1, 2], [0, 0]]
    assert chunk_counts(4, ((1, 1), (2, 2)), 0, v_shaped=True).dense.tolist() == [[1, 2], [0, 1]]
    assert chunk_counts(4, ((1, 1), (2, 2)), 0).dense.tolist() == [[1, 2], [1, 0]]


# On layers that are not even.


def chunk_times(
    stages: tuple[tuple[int, ...], ...], costs: SplitCosts
) -> tuple[list[float], list[float]]:
    pp, left = len(stages), costs.leading
    forward, backward = [], []
    for chunk in range(pp * len(stages[0])):
        layers = stages[chunk % pp][chunk // pp]
        leading = min(left, layers)
        left -= leading
        seconds = leading * costs.leading_s + (layers - leading) * costs.layer_s
        forward.append(seconds / 3)
        backward.append(2 * seconds / 3)
    forward[0] += costs.first_s
    forward[-1] += costs.last_s / 3
    backward[-1] += 2 * costs.last_s / 3
    return forward, backward


def uneven(draw: random.Random, vpp: int) -> SplitCosts:
    """Embedding, dense-first layers, a head as dear as up to three layers."""
    pp = draw.choice([2, 4, 8])
    layers = pp * vpp * draw.randint(1, max(1, 64 // (pp * vpp))) - draw.choice([0, 1, 2])
    return SplitCosts(
        pp=pp,
        vpp=vpp,
        layers=max(layers, pp * vpp),
        leading=draw.choice([0, 0, 1]),
        num_micro_batches=pp * draw.choice([2, 4, 8]),
        in_step=True,
        layer_s=1.0,
        leading_s=0.6,
        first_s=draw.choice([0.0, 0.1]),
        last_s=draw.choice([0.0, 0.3, 1.0, 3.0]),
    )


@pytest.mark.parametrize("vpp", [1, 2, 4])
def test_closed_form_on_chosen_uneven_splits(vpp: int) -> None:
    """What a plan reports and what the simulator plays: 2 % in the mean, the plan on the slow side."""
    draw, off = random.Random(vpp), []
    for _ in range(40):
        costs = uneven(draw, vpp)
        if vpp == 1:
            split = best_split(costs)
            assert split is not None
            stages, closed = split.stages, split.time_s
        else:
            closed, stages = min(
                (costs.stages_s(s), s) for s in level_splits(costs.layers, costs.pp, vpp)
            )
        line = simulate(
            *chunk_times(stages, costs), pp=costs.pp, num_micro_batches=costs.num_micro_batches
        )
        off.append(closed / line.seconds - 1)
    assert np.mean(np.abs(off)) < 0.02
    assert min(off) > -0.03
    assert max(off) < 0.13


def test_ranks_in_step_wait_for_the_head_in_its_virtual_stage_only() -> None:
    """4 ranks of 2 chunks of 2 s, a head of 2 s: a second less in the other chunk of the last rank saves less
    than half a second a micro-batch."""
    forward = [1.0] * 8
    forward[7] += 1.0
    tail = simulate(forward, forward, pp=4, num_micro_batches=32).seconds
    forward[3] -= 0.5
    spared = simulate(forward, forward, pp=4, num_micro_batches=32).seconds
    costs = SplitCosts(
        pp=4, vpp=2, layers=8, num_micro_batches=32, in_step=True, layer_s=2.0, last_s=2.0
    )
    closed = costs.stages_s(((1, 1),) * 4)
    assert closed == 32 * (2 + 4) + (18 - 6) / 2
    assert tail == pytest.approx(closed, rel=0.03)
    assert tail - 32 / 2 < spared < tail


def test_level_splits_hold_all_layers_and_are_few() -> None:
    for layers, pp, vpp in ((126, 16, 4), (61, 4, 3), (9, 2, 4), (8, 4, 2)):
        splits = level_splits(layers, pp, vpp)
        assert 0 < len(splits) == len(set(splits)) < 60
        for stages in splits:
            assert (sum(map(sum, stages)), len(stages), len(stages[0])) == (layers, pp, vpp)
            assert min(map(min, stages)) >= 1
    assert default_stages(8, 4, 2, in_step=True) == ((1, 1),) * 4
    assert default_stages(7, 4, 2, in_step=True) is None


# In the cost model.


def moe_workload(**changes: object) -> Workload:
    moe = MoeSpec(experts=8, top_k=2, moe_ffn_hidden=2048, dense_layers=1)
    model = ModelSpec(
        layers=16, hidden=2048, ffn_hidden=8192, heads=16, kv_heads=8, vocab=32_000, moe=moe
    )
    base = Workload(
        model=model,
        cluster=read_cluster("dgx-h100"),
        gpus=8,
        global_batch=64,
        seq_len=4096,
        framework="torchtitan",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("schedule", "vpp"), SHAPES)
def test_bound_price_and_parts(schedule: Schedule, vpp: int) -> None:
    """The bound stays below the price of uneven splits, and the parts add up."""
    workload = moe_workload()
    layout = Layout(pp=4, vpp=vpp, dp=2, num_micro_batches=32, schedule=int(schedule))
    placement = nested_placement(workload.cluster, layout)
    arrays = Layout(**{name: np.array([value]) for name, value in vars(layout).items()})
    bound = CostModelPricing(workload).lower_bound_s(arrays)[0]
    even = default_stages(16, 4, vpp, in_step=False)
    assert even is not None
    uneven_stages = (
        (even[0][0] + 1, *even[0][1:]),
        *even[1:-1],
        (*even[-1][:-1], even[-1][-1] - 1),
    )
    for stages in (even, uneven_stages):
        if min(map(min, stages)) < 1:
            continue
        found = estimate_layout(workload, layout, placement, stages)
        assert bound <= float(found.step_time_s) * (1 + 1e-12)
        assert sum(float(x) for x in found.breakdown_s.values()) == pytest.approx(
            float(found.step_time_s)
        )


def test_split_backward_shrinks_the_bubble_and_v_puts_both_ends_on_rank_0() -> None:
    workload = moe_workload()
    plain = Layout(pp=4, vpp=2, dp=2, num_micro_batches=32)
    placement, stages = nested_placement(workload.cluster, plain), ((2, 2),) * 4

    def bubble(schedule: Schedule) -> float:
        layout = replace(plain, schedule=int(schedule))
        return float(
            estimate_layout(workload, layout, placement, stages).breakdown_s["pipeline_bubble"]
        )

    assert bubble(Schedule.ZB_H1) < 0.9 * bubble(Schedule.ONE_F_ONE_B)
    memory = {
        schedule: stage_memory_parts_gib(workload, replace(plain, schedule=int(schedule)), stages)
        for schedule in (Schedule.ONE_F_ONE_B, Schedule.ZBV)
    }
    assert np.flatnonzero(memory[Schedule.ONE_F_ONE_B]["logits"]).tolist() == [3]
    assert np.flatnonzero(memory[Schedule.ZBV]["logits"]).tolist() == [0]
    weights = memory[Schedule.ZBV]["weights"]
    assert weights[0] == max(weights)


def test_dual_pipe_keeps_every_weight_twice() -> None:
    workload = moe_workload()
    one = Layout(pp=4, dp=2, num_micro_batches=32)
    plain = stage_memory_parts_gib(workload, one, ((4,),) * 4)
    dual = stage_memory_parts_gib(
        workload, replace(one, schedule=int(Schedule.DUALPIPE)), ((4,),) * 4
    )
    for name in ("weights", "gradients", "optimizer"):
        assert dual[name].sum() == pytest.approx(2 * plain[name].sum())
        assert dual[name].tolist() == pytest.approx(dual[name][::-1].tolist())


@pytest.mark.parametrize(
    ("pp", "vpp"), [(1, 1), *((pp, vpp) for pp in (2, 3, 4, 8) for vpp in (2, 3, 5))]
)
def test_chunks_without_a_pair_make_a_step_as_long_as_pass_by_pass(pp: int, vpp: int) -> None:
    draw = random.Random(f"{pp} {vpp}")
    for groups in (1, 2, 3, 6):
        m, forward_s = pp * groups, draw.uniform(0.9, 1.1)
        alone_s = forward_s + draw.uniform(1.9, 2.1)
        pair_s = draw.uniform(0.75, 1.0) * alone_s
        share = float(unpaired_share(Layout(pp=pp, vpp=vpp, num_micro_batches=m)))
        chunk_s = pair_s + share * (alone_s - pair_s)
        assert 1.0 / m <= share <= 1.0
        played = paired_s((pp, vpp, m), forward_s, alone_s - forward_s, pair_s)
        assert (m * vpp + pp - 1) * chunk_s == pytest.approx(played, rel=1e-9)


def test_chunks_without_a_pair_are_those_of_each_flush_and_of_1f1b_alone() -> None:
    layout = Layout(pp=4, vpp=2, num_micro_batches=np.array([8, 16, 1024]))
    np.testing.assert_array_equal(
        unpaired_share(layout, flushes=2), [8 / 11, 8 / 19, 8 / (1024 + 3)]
    )
    dual = replace(layout, vpp=1, schedule=int(Schedule.DUALPIPE))
    np.testing.assert_array_equal(unpaired_share(dual), [0.0, 0.0, 0.0])


def test_bounds_by_segments_are_never_above_what_is_played() -> None:
    """Whatever lies on their ranks; some are reached."""
    chance, nearest = np.random.default_rng(3), 0.0
    for _ in range(300):
        ranks = chance.integers(1, 4, chance.integers(1, 4))
        pp, m = int(ranks.sum()), int(chance.integers(1, 12))
        pace = np.repeat(chance.choice([1.0, 2.0, 5.0], len(ranks)), ranks)
        both_s = pace * chance.choice([1.0, 1.0, 1.5], pp)
        share = float(chance.choice([0.5, 0.66, 0.75]))
        played_s = float(one_f_one_b_s((1 - share) * both_s, share * both_s, m))
        ends = np.cumsum(ranks)
        segments = [both_s[end - own : end] for end, own in zip(ends, ranks, strict=True)]
        work_s, busiest_s = (np.array([f(own) for own in segments]) for f in (np.sum, np.max))
        least_s = float(least_of_segments_s(ranks, m, work_s, busiest_s, share))
        lines = least_by_work(pp, m, share)
        of_all_s = max(float(a * work_s.sum() + b * busiest_s.max()) for a, b in lines)
        assert max(least_s, of_all_s) <= played_s * (1 + 1e-12)
        nearest = max(nearest, least_s / played_s)
    assert nearest == pytest.approx(1.0)
