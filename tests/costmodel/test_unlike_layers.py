"""Layers that differ, priced one by one in their order; schedules with unlike chunks, played."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.layer_kinds import KindTimes, kind_times
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.rank_load import chunk_passes, least_busiest_in_order_s
from meshwright.costmodel.schedules import Schedule, least_waits, longest_way_s
from meshwright.costmodel.simulator import one_f_one_b_s, played_s, simulate
from meshwright.costmodel.step_time import (
    exact_step,
    least_played_s,
    loaded_step,
    make_context,
    optimistic_step,
)
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.reader import load_catalog_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.layer_split import (
    ALL_LAYERS,
    BackwardSeconds,
    SplitCosts,
    frontier,
    level_splits,
)
from meshwright.planner.bounds.paces import chunk_times, least_level_pace_s
from tests.soaked import examples


def windowed(layers: int, **changes: Any) -> ModelSpec:
    """A small gpt-oss: every second layer attends in full, the others in a window of 128."""
    own = load_catalog_model("gpt-oss-20b").model_dump(exclude_defaults=True, exclude_unset=True)
    return ModelSpec.model_validate(own | {"layers": layers} | changes)


def hybrid(pattern: str) -> ModelSpec:
    own = load_catalog_model("nemotron-h-8b").model_dump(exclude_defaults=True, exclude_unset=True)
    return ModelSpec.model_validate(own | {"layers": len(pattern), "hybrid_pattern": pattern})


def workload(model: ModelSpec, seq_len: int = 65_536) -> Workload:
    cluster = read_cluster("dgx-h100", gpus=16)
    return Workload(
        model=model,
        cluster=cluster,
        gpus=16,
        seq_len=seq_len,
        global_batch=64,
        framework="megatron-lm",
    )


def context_of(model: ModelSpec, layout: Layout) -> Any:
    own = workload(model)
    return make_context(own, layout, nested_placement(own.cluster, layout))


def in_order_s(model: ModelSpec, times: KindTimes, begin: int, end: int) -> float:
    """Seconds of some layers, added up one by one."""
    kinds = list(dict.fromkeys(model.unlike_layers))
    return sum(
        float(times.unlike[kinds.index(own)].seconds) for own in model.unlike_layers[begin:end]
    )


def test_which_layers_are_unlike() -> None:
    assert windowed(4).unlike_layers == ("WE", "FE", "WE", "FE")
    assert hybrid("M-M*").unlike_layers == ("M", "-", "M", "*")
    assert load_catalog_model("deepseek-v3").unlike_layers == ()
    assert load_catalog_model("llama-3-8b").unlike_layers == ()


@pytest.mark.parametrize("model", [windowed(6), hybrid("M-M*-M")])
def test_a_rank_takes_what_its_layers_take(model: ModelSpec) -> None:
    layout = Layout(tp=2, pp=2, dp=4, sequence_parallel=True, num_micro_batches=16)
    c = context_of(model, layout)
    times = kind_times(c)
    for cut in range(1, model.layers):
        step = exact_step(c, ((cut,), (model.layers - cut,)), times)
        loads = [
            in_order_s(model, times, 0, cut) + float(times.embedding.seconds),
            in_order_s(model, times, cut, model.layers) + float(times.head.seconds),
        ]
        beside = ("pipeline_p2p", "dp_comm", "optimizer", "step_overhead", "scale")
        pipeline_s = sum(
            float(np.asarray(s)) for name, s in step.parts.items() if name not in beside
        )
        passes = chunk_passes(c, ((cut,), (model.layers - cut,)), times)
        each_s = [np.ravel(x).tolist() for x in (passes.forward_s, passes.backward_s)]
        assert np.add(each_s[0], each_s[1]) == pytest.approx(loads)
        played = simulate(*each_s, pp=2, num_micro_batches=16)
        assert pipeline_s == pytest.approx(played.seconds)
        assert pipeline_s <= (16 * max(loads) + min(loads)) * (1 + 1e-9)


@pytest.mark.parametrize("model", [windowed(4), hybrid("M-M*")])
def test_the_mean_layer_is_the_mean_of_the_kinds(model: ModelSpec) -> None:
    times = kind_times(context_of(model, Layout(tp=2, dp=8, num_micro_batches=8)))
    mean = times.moe if model.moe_layers else times.dense
    assert mean is not None
    assert 4 * float(mean.seconds) == pytest.approx(in_order_s(model, times, 0, 4))
    seconds = [float(kind.seconds) for kind in times.unlike]
    assert max(seconds) > 1.2 * min(seconds)


@pytest.mark.hypothesis
@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.BREADTH_FIRST, Schedule.ZB_H1])
def test_the_recurrence_is_the_simulator_on_random_unlike_chunks(schedule: Schedule) -> None:
    chance = random.Random(int(schedule))
    for _ in range(examples(170, 6)):
        pp, vpp = chance.choice([2, 3, 4, 6]), chance.choice([2, 3, 4])
        m = pp * chance.choice([1, 2, 5, 13, 20])
        forward = [chance.choice([1, 1, 4, 15]) * chance.uniform(0.5, 1) for _ in range(pp * vpp)]
        backward = [2 * x * chance.uniform(0.8, 1.2) for x in forward]
        weight = [0.4 * x for x in backward]
        played = simulate(
            forward, backward, pp=pp, num_micro_batches=m, schedule=schedule, weight_s=weight
        )
        rows = [np.array([row, row]) for row in (forward, backward, weight)]
        seconds = played_s(*rows, pp=pp, num_micro_batches=m, schedule=schedule)
        assert seconds == pytest.approx([played.seconds] * 2, rel=1e-9)


def random_sequence(chance: random.Random) -> tuple[int, int, list[float], list[float]]:
    """Ranks, micro-batches, and the forward and backward seconds of some layers, some of them slow."""
    pp = chance.choice([2, 4, 8, 16])
    m = max(pp * chance.choice([1, 2, 4, 8]) + chance.choice([-1, 0, 0, 0, 1]), 1)
    each, slow = chance.choice([2, 4, 6]), chance.uniform(1.5, 12)
    layers = [slow if n % each == 0 else 1.0 for n in range(1, 1 + chance.choice([24, 32, 48]))]
    layers[-1] += chance.uniform(0, 3)
    shares = {own: chance.uniform(0.25, 0.4) for own in layers}
    forward = [own * shares[own] for own in layers]
    return pp, m, forward, [own - part for own, part in zip(layers, forward, strict=True)]


def random_split(chance: random.Random, layers: int, pp: int) -> list[int]:
    return [0, *sorted(chance.sample(range(1, layers), pp - 1)), layers]


def of_parts(seconds: list[float], cuts: list[int]) -> list[float]:
    return [sum(seconds[a:b]) for a, b in itertools.pairwise(cuts)]


@pytest.mark.hypothesis
def test_one_stage_a_rank_is_played_and_no_bound_is_above_it() -> None:
    """On random splits the recurrence is the simulator; the longest way and the least waits are below it."""
    chance, exact, cases = random.Random(11), 0, examples(500, 120)
    for _ in range(cases):
        pp, m, *each_s = random_sequence(chance)
        cuts = random_split(chance, len(each_s[0]), pp)
        forward, backward = (of_parts(seconds, cuts) for seconds in each_s)
        played = simulate(forward, backward, pp=pp, num_micro_batches=m).seconds
        rows = [np.array([row, row]) for row in (forward, backward)]
        both = played_s(
            rows[0], rows[1], rows[1], pp=pp, num_micro_batches=m, schedule=Schedule.ONE_F_ONE_B
        )
        assert both == pytest.approx([played] * 2, rel=1e-9)
        loads = rows[0][0] + rows[1][0]
        ahead_s = np.cumsum(loads) - loads
        ways_s = longest_way_s(
            rows[0][0],
            rows[1][0],
            ahead_s=ahead_s,
            behind_s=loads.sum() - ahead_s - loads,
            warm_up=np.arange(pp)[::-1],
            num_micro_batches=m,
        )
        assert ways_s.max() <= played * (1 + 1e-12)
        exact += bool(ways_s.max() >= played * (1 - 1e-9))
        of_work, of_busiest = least_waits(pp, m)
        waits_s = of_work * loads.sum() - of_busiest * loads.max()
        assert m * loads.max() + waits_s <= played * (1 + 1e-12)
    assert exact > 0.7 * cases


@pytest.mark.parametrize(("pp", "m"), [(4, 2_000), (3, 1_001)])
def test_many_micro_batches_repeat(pp: int, m: int) -> None:
    """Near and far from equal ranks: those left out take what those that are played do."""
    chance = random.Random(pp)
    for spread in (1e-12, 1e-6, 1e-3, 1.0):
        forward = [1.0 + spread * chance.random() for _ in range(pp)]
        backward = [2.0 + spread * chance.random() for _ in range(pp)]
        played = simulate(forward, backward, pp=pp, num_micro_batches=m).seconds
        assert one_f_one_b_s(np.array(forward), np.array(backward), m) == pytest.approx(
            played, rel=1e-9
        )


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "m"),
    [
        (Schedule.ONE_F_ONE_B, 4, 2, 240),
        (Schedule.ONE_F_ONE_B, 2, 2, 400),
        (Schedule.BREADTH_FIRST, 3, 2, 60),
        (Schedule.ZB_H1, 4, 1, 240),
    ],
)
@pytest.mark.parametrize("slower", [0.002, 0.01, 0.03])
def test_a_first_rank_that_is_a_little_slower_sets_the_pace_in_the_end(
    schedule: Schedule, pp: int, vpp: int, m: int, slower: float
) -> None:
    """The last rank begins last and so sets the pace of the first dozens of micro-batches."""
    forward = np.ones(pp * vpp)
    forward[0] += slower
    backward, weight = 2 * forward, 0.8 * forward
    played = simulate(
        list(forward),
        list(backward),
        pp=pp,
        num_micro_batches=m,
        schedule=schedule,
        weight_s=list(weight),
    )
    seconds = played_s(forward, backward, weight, pp=pp, num_micro_batches=m, schedule=schedule)
    assert seconds == pytest.approx(played.seconds, rel=1e-9)


@pytest.mark.hypothesis
@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE])
def test_the_split_that_is_played_is_the_best_of_all_partitions(schedule: Schedule) -> None:
    """Against the simulator on every partition: none is faster than the frontier says, which is mostly exact.

    With and without room on each rank, recomputed layers, layers that run forward alone on the first rank,
    and flushes.
    """
    chance, exact, cases = random.Random(5), 0, examples(240, 60)
    for case in range(cases):
        layers = chance.randint(4, 9)
        pp = chance.randint(2, min(4, layers))
        kinds = [(1.0, 0.3, 0.6), (2.5, 0.7, 1.8), (7.0, 2.0, 4.4)]
        drawn = [chance.choice(kinds) for _ in range(layers)]
        again = chance.choice([0, 0, 1, ALL_LAYERS])
        ahead = chance.choice([0, 0, layers // 2]) if again == 0 else 0
        flushes = chance.choice([1, 1, 2])
        backward = [part for _, _, part in drawn]
        first, last = chance.random(), 3 * chance.random()
        on_first = [0.2 * part for part in backward[:ahead]]
        less = [part - own for part, own in zip(backward[:ahead], on_first, strict=True)]
        on_rank_0 = tuple(
            (own - (less[n] if n < ahead else 0.0), extra)
            for n, (own, extra, _) in enumerate(drawn)
        )
        on_others = tuple((own, extra) for own, extra, _ in drawn)
        costs = SplitCosts(
            pp=pp,
            vpp=1,
            layers=layers,
            num_micro_batches=flushes * chance.choice([pp - 1, pp, pp + 1, 3 * pp]),
            flushes=flushes,
            layer_s=1.0,
            order=on_rank_0,
            order_of_ranks=(on_rank_0, *[on_others] * (pp - 1)) if ahead else (),
            first_s=first,
            last_s=last,
            recompute_layers=again,
            begins=some_begins(case, layers),
            forward_first=schedule is Schedule.GPIPE,
            backward=BackwardSeconds(
                0.5 * first,
                0.7 * last,
                (*on_first, *backward[ahead:]),
                ((*on_first, *backward[ahead:]), *[tuple(backward)] * (pp - 1)) if ahead else (),
            ),
        )
        room = [chance.randint(1, layers) for _ in range(pp)]
        fits = (lambda rank, n, _, room=room: n <= room[rank]) if case % 2 else None
        best = np.inf
        for cuts in itertools.combinations((costs.begins or range(layers))[1:], pp - 1):
            sizes = [b - a for a, b in itertools.pairwise([0, *cuts, layers])]
            if again == 1 and min(sizes) < 1:
                continue
            if fits is None or all(fits(rank, n, 0) for rank, n in enumerate(sizes)):
                best = min(best, _simulated_s(costs, sizes))
        splits = frontier(costs, 0.0, fits)
        assert bool(splits) == np.isfinite(best)
        if splits:
            fastest = splits[0]
            sizes = [sum(rank) for rank in fastest.stages]
            assert _simulated_s(costs, sizes) == pytest.approx(fastest.time_s)
            assert fastest.time_s - fastest.gap_s <= best * (1 + 1e-9)
            exact += fastest.time_s <= best * (1 + 1e-9)
        else:
            exact += 1
    assert exact >= 0.95 * cases


def _simulated_s(costs: SplitCosts, sizes: list[int]) -> float:
    """Of a partition, its flushes one after the other."""
    assert costs.backward is not None
    ends, both, backward = [0, *itertools.accumulate(sizes)], _ranks_s(costs, sizes), list[float]()
    for begin, end in itertools.pairwise(ends):
        own = (
            costs.backward.of_ranks[len(backward)]
            if costs.backward.of_ranks
            else costs.backward.layers
        )
        extra = sum(again for _, again in costs.order[begin:end][: costs.recompute_layers])
        backward.append(sum(own[begin:end]) + extra)
    backward[0] += costs.backward.first_s
    backward[-1] += costs.backward.last_s
    forward = [own - part for own, part in zip(both, backward, strict=True)]
    m = costs.num_micro_batches // costs.flushes
    schedule = Schedule.GPIPE if costs.forward_first else Schedule.ONE_F_ONE_B
    played = simulate(forward, backward, pp=costs.pp, num_micro_batches=m, schedule=schedule)
    return costs.flushes * played.seconds


def test_gpipe_takes_what_the_simulator_does_and_no_bound_is_above_it() -> None:
    """Forward passes may be longest on another rank than backward ones: random splits of 4 ranks."""
    chance, apart = random.Random(7), 0
    models = [load_catalog_model(name) for name in ("llama-3-8b", "gpt-oss-20b")]
    for model, full, _ in itertools.product(models, (False, True), range(10)):
        few = [chance.randint(1, 3) for _ in range(4)]
        sizes = [model.layers // 4 + own - few[rank - 1] for rank, own in enumerate(few)]
        m = chance.choice([1, 3, 12])
        layout = Layout(
            dp=4,
            pp=4,
            num_micro_batches=m,
            schedule=int(Schedule.GPIPE),
            recompute=int(Recompute.FULL) if full else 0,
            recompute_layers=2 if full else 0,
        )
        c, stages = context_of(model, layout), tuple((size,) for size in sizes)
        times = kind_times(c)
        passes = chunk_passes(c, stages, times)
        forward, backward = passes.forward_s.reshape(-1), passes.backward_s.reshape(-1)
        played = simulate(
            forward.tolist(),
            backward.tolist(),
            pp=4,
            num_micro_batches=m,
            schedule=Schedule.GPIPE,
        )
        step = exact_step(c, stages, times)
        beside = ("pipeline_p2p", "dp_comm", "optimizer", "step_overhead", "scale")
        taken_s = sum(float(np.asarray(s)) for part, s in step.parts.items() if part not in beside)
        assert taken_s == pytest.approx(played.seconds, rel=1e-9)
        busiest_s = float(np.max(forward + backward))
        apart += float(forward.max() + backward.max()) > busiest_s * (1 + 1e-9)
        bounds = (
            optimistic_step(c, times, busiest_s),
            loaded_step(c, times, busiest_s, float(np.sum(forward + backward))),
        )
        for bound in bounds:
            assert float(np.asarray(bound.seconds)) <= float(np.asarray(step.seconds)) * (1 + 1e-12)
    assert apart


@pytest.mark.parametrize("model", [windowed(12), hybrid("M-M*-M-M-M*-")])
def test_interleaved_prices_are_played_and_no_bound_is_above_them(model: ModelSpec) -> None:
    layout = Layout(tp=2, pp=2, dp=4, vpp=2, sequence_parallel=True, num_micro_batches=16)
    c = context_of(model, layout)
    times = kind_times(c)
    bound_s = float(np.asarray(optimistic_step(c, times).seconds))
    for stages in level_splits(model.layers, 2, 2, empty_ends=True):
        step = exact_step(c, stages, times)
        passes = chunk_passes(c, stages)
        played = simulate(
            passes.forward_s.ravel().tolist(),
            passes.backward_s.ravel().tolist(),
            pp=2,
            num_micro_batches=16,
        )
        beside = ("pipeline_p2p", "dp_comm", "optimizer", "step_overhead", "scale")
        pipeline_s = sum(
            float(np.asarray(s)) for name, s in step.parts.items() if name not in beside
        )
        assert pipeline_s == pytest.approx(played.seconds, rel=1e-9)
        step_s = float(np.asarray(step.seconds))
        assert bound_s <= step_s
        loads = (passes.forward_s + passes.backward_s).sum(axis=0)
        loaded = loaded_step(c, times, np.max(loads), np.sum(loads))
        assert float(np.asarray(loaded.seconds)) <= step_s


def some_begins(case: int, layers: int) -> tuple[int, ...]:
    """Of each third case layers at which a stage may begin, the first among them; of all others any."""
    draw = random.Random(f"begins {case}")
    return (0, *(n for n in range(1, layers) if draw.random() < 0.5)) if case % 3 == 2 else ()


def test_the_bound_on_partitions_is_close_below_the_best_of_all() -> None:
    """Against every partition of random sequences, added up here; with rooms and recomputed layers too."""
    chance = random.Random(7)
    for case in range(150):
        layers, ranks, amount = (
            chance.randint(3, 9),
            chance.randint(1, 4),
            chance.choice([0, 0, 1, 2]),
        )
        order = [chance.choice([1.0, 1.0, 3.0, 16.0]) for _ in range(layers)]
        again = [0.3 * x for x in order]
        ends = (chance.choice([0.0, 2.0]), chance.choice([0.0, 9.0]))
        rooms = [chance.randint(1, layers) if case % 2 else layers for _ in range(ranks)]
        least_s, begins = np.inf, some_begins(case, layers)
        places = [*(begins or range(layers)), layers]
        for cuts in itertools.combinations_with_replacement(places, ranks - 1):
            parts = list(itertools.pairwise([0, *cuts, layers]))
            if any(
                b - a > room or b - a < amount for (a, b), room in zip(parts, rooms, strict=True)
            ):
                continue
            loads = [sum(order[a:b]) + sum(again[a : a + amount]) for a, b in parts]
            loads[0] += ends[0]
            loads[-1] += ends[1]
            least_s = min(least_s, max(loads))
        before = np.concatenate([[0.0], np.cumsum(order)])
        summed = np.concatenate([[0.0], np.cumsum(again)])
        to = np.minimum(np.arange(layers + 1) + amount, layers)
        bound_s = least_busiest_in_order_s(
            before[None],
            np.array([ends[0]]),
            np.array([ends[1]]),
            ranks,
            rooms=np.array([rooms], dtype=float),
            again_s=(summed[to] - summed)[None] if amount else None,
            begins=begins,
        )
        assert bound_s[0] <= least_s
        if not amount and np.isfinite(least_s):
            assert bound_s[0] == pytest.approx(least_s, rel=2e-3)


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.ZB_H1])
@pytest.mark.parametrize("model", [windowed(24), hybrid("MM-M*-M-M*-MM-M*")])
def test_interleaved_bounds_are_below_every_level_split(
    model: ModelSpec, schedule: Schedule
) -> None:
    """Of each, what the simulator takes; and in all, no looser than a tenth of the best of them."""
    layout = Layout(
        tp=1, pp=2, dp=8, vpp=4, num_micro_batches=8, schedule=int(schedule), recompute_layers=0
    )
    c = context_of(model, layout)
    times = kind_times(c)
    least_s = np.inf
    for stages in level_splits(model.layers, 2, 4, empty_ends=True):
        passes = chunk_passes(c, stages)
        played = simulate(
            passes.forward_s.ravel().tolist(),
            passes.backward_s.ravel().tolist(),
            pp=2,
            num_micro_batches=8,
            schedule=schedule,
            weight_s=passes.weight_s.ravel().tolist(),
        )
        bound_s = float(least_played_s(c, times, stages))
        assert bound_s <= played.seconds * (1 + 1e-12)
        least_s = min(least_s, played.seconds)
    one = Layout(**{name: np.array([value]) for name, value in vars(layout).items()})
    many = make_context(c.workload, one, nested_placement(c.workload.cluster, one))
    pace_s = least_level_pace_s(c.workload, one, chunk_times(many, kind_times(many)))
    assert 0.9 * least_s <= 8 * pace_s[0] <= least_s


@pytest.mark.parametrize("m", [2, 3, 4, 12])
@pytest.mark.parametrize("recomputed", [0, 1, 100])
@pytest.mark.parametrize("model", [windowed(8), hybrid("MM-M*---")])
def test_no_partition_is_below_its_bound(model: ModelSpec, recomputed: int, m: int) -> None:
    """All partitions of the sequence over three ranks."""
    mask = int(Recompute.FULL) if recomputed else 0
    layout = Layout(
        tp=1, pp=3, dp=5, num_micro_batches=m, recompute=mask, recompute_layers=recomputed
    )
    c = context_of(model, layout)
    times = kind_times(c)
    bound_s = float(np.asarray(optimistic_step(c, times).seconds))
    least_s = np.inf
    for first, second in itertools.combinations(range(1, model.layers), 2):
        stages = ((first,), (second - first,), (model.layers - second,))
        step_s = float(np.asarray(exact_step(c, stages, times).seconds))
        least_s = min(least_s, step_s)
        unplayed = exact_step(c, stages, times, played=False)
        assert float(np.asarray(unplayed.seconds)) <= step_s * (1 + 1e-12)
        passes = chunk_passes(c, stages, times)
        loads = (passes.forward_s + passes.backward_s).sum(axis=0)
        loaded = loaded_step(c, times, np.max(loads), np.sum(loads))
        assert float(np.asarray(loaded.seconds)) <= step_s * (1 + 1e-12)
    assert bound_s <= least_s


def test_the_split_of_a_sequence_is_the_best_of_all_partitions() -> None:
    """Against every partition, added up layer by layer here; with and without room on each rank."""
    chance = random.Random(3)
    for case in range(120):
        layers = chance.randint(4, 10)
        pp = chance.randint(1, min(4, layers))
        kinds = [(1.0, 0.3), (2.5, 0.7), (7.0, 2.0)]
        order = tuple(chance.choice(kinds) for _ in range(layers))
        again = chance.choice([0, 1, ALL_LAYERS])
        ahead = chance.choice([0, 0, 1, layers // 2]) if again == 0 else 0
        on_first = tuple((own_s / 3, again_s) for own_s, again_s in order[:ahead])
        of_ranks = (on_first + order[ahead:], *[order] * (pp - 1)) if ahead else ()
        if not ahead and case % 3 == 0:  # stages that lie unlike each other
            slower = [1.0, *(chance.choice([1.0, 1.3]) for _ in range(pp - 1))]
            of_ranks = tuple(
                tuple((own_s * by, again_s) for own_s, again_s in order) for by in slower
            )
        costs = SplitCosts(
            pp=pp,
            vpp=1,
            layers=layers,
            num_micro_batches=8,
            layer_s=1.0,
            order=on_first + order[ahead:],
            order_of_ranks=of_ranks,
            first_s=chance.random(),
            last_s=3 * chance.random(),
            recompute_layers=again,
            layer_load=1.0,
            begins=some_begins(case, layers),
        )
        room = [chance.randint(1, layers) for _ in range(pp)]
        fits = (lambda rank, n, _, room=room: n <= room[rank]) if case % 2 else None
        best = np.inf
        for cuts in itertools.combinations((costs.begins or range(layers))[1:], pp - 1):
            ends = [0, *cuts, layers]
            sizes = [b - a for a, b in itertools.pairwise(ends)]
            if fits is None or all(fits(rank, n, 0) for rank, n in enumerate(sizes)):
                best = min(best, _pipeline_s(costs, sizes))
        splits = frontier(costs, 0.0, fits)
        assert bool(splits) == np.isfinite(best)
        if splits:
            sizes = [sum(rank) for rank in splits[0].stages]
            assert _pipeline_s(costs, sizes) == pytest.approx(best)
            assert splits[0].time_s == pytest.approx(best)


def test_no_partition_is_as_fast_and_lighter_than_all_of_the_frontier() -> None:
    """Of layers with unlike parameters: whatever counts of a partition, some split has no more of it."""
    chance = random.Random(4)
    for _ in range(60):
        layers, pp = chance.randint(4, 7), chance.randint(2, 3)
        kinds = [(1.0, 0.3, 5.0, 0), (1.2, 0.7, 2.0, 1), (2.0, 2.0, 9.0, 0)]
        order = [chance.choice(kinds) for _ in range(layers)]
        costs = SplitCosts(
            pp=pp,
            vpp=1,
            layers=layers,
            num_micro_batches=8,
            layer_s=1.0,
            order=tuple((own_s, again_s) for own_s, again_s, _, _ in order),
            order_loads=tuple((load, experts) for _, _, load, experts in order),
            first_s=chance.random(),
            last_s=2 * chance.random(),
            experts=True,
            first_load=chance.choice([0.0, 7.0]),
            last_load=chance.choice([0.0, 12.0]),
            recompute_layers=chance.choice([0, 1, ALL_LAYERS]),
        )
        slack_s = chance.choice([2.0, 20.0])
        splits = frontier(costs, slack_s)
        found = [_what_counts(costs, [sum(rank) for rank in each.stages]) for each in splits]
        fastest_s = min(own_s for own_s, _, _ in found)
        for cuts in itertools.combinations(range(1, layers), pp - 1):
            other = _what_counts(costs, [b - a for a, b in itertools.pairwise([0, *cuts, layers])])
            if other[0] <= fastest_s + slack_s:
                assert any(
                    all(a <= b * (1 + 1e-9) for a, b in zip(own, other, strict=True))
                    for own in found
                )


def _what_counts(costs: SplitCosts, sizes: list[int]) -> tuple[float, float, int]:
    """Seconds, and the most parameters outside experts, and layers with experts, of a rank."""
    queue, loads, experts = list(costs.order_loads), [], []
    for size in sizes:
        own, queue = queue[:size], queue[size:]
        loads.append(sum(load for load, _ in own))
        experts.append(sum(has for _, has in own))
    loads[0] += costs.first_load
    loads[-1] += costs.last_load
    return _pipeline_s(costs, sizes), max(loads), max(experts)


def _pipeline_s(costs: SplitCosts, sizes: list[int]) -> float:
    """1F1B: all micro-batches on the busiest rank, one on each of the others."""
    seconds = _ranks_s(costs, sizes)
    return (costs.num_micro_batches - 1) * max(seconds) + sum(seconds)


def _ranks_s(costs: SplitCosts, sizes: list[int]) -> list[float]:
    """Seconds of every rank, its layers one after the other."""
    seconds: list[float] = []
    ends = [0, *itertools.accumulate(sizes)]
    for begin, end in itertools.pairwise(ends):
        rank = len(seconds)
        own = (costs.order_of_ranks[rank] if costs.order_of_ranks else costs.order)[begin:end]
        seconds.append(sum(s for s, _ in own) + sum(a for _, a in own[: costs.recompute_layers]))
    seconds[0] += costs.first_s
    seconds[-1] += costs.last_s
    return seconds
