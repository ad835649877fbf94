"""Virtual stages of like layers with uneven heights: prices and the best split against all splits.

Splits are listed and schedules are played here, apart from the planner. What a step has beside its pipeline
is the cost model's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import numpy as np
import pytest

from meshwright.costmodel.estimate import stage_memory_gib
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.layer_kinds import kind_times
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.rank_load import Stages, chunk_passes
from meshwright.costmodel.schedules import Schedule
from meshwright.costmodel.step_time import exact_step, is_fast_in_closed_form
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.exact_cost import (
    LayoutPricing,
    MappingBounds,
    worked_out,
    worked_out_together,
)
from meshwright.planner.bounds.mappings import mappings_of
from tests.planner.search.test_planner_optimum import cluster, model
from tests.soaked import some

FORWARD, BACKWARD = 0, 1
SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.ONE_F_ONE_B, Schedule.BREADTH_FIRST)


def passes_of_rank(
    rank: int, pp: int, vpp: int, m: int, schedule: Schedule
) -> list[tuple[int, int, int]]:
    """(forward or backward, virtual stage, micro-batch) in the order of the rank."""
    if schedule is Schedule.BREADTH_FIRST:
        ahead = [(FORWARD, stage, each) for stage in range(vpp) for each in range(m)]
        return ahead + [(BACKWARD, stage, each) for _, stage, each in reversed(ahead)]
    groups = [range(first, first + pp) for first in range(0, m, pp)]
    down = [(FORWARD, stage, each) for group in groups for stage in range(vpp) for each in group]
    up = [
        (BACKWARD, stage, each)
        for group in groups
        for stage in reversed(range(vpp))
        for each in group
    ]
    ahead_by = min(2 * (pp - 1 - rank) + (vpp - 1) * pp, len(down))
    order = down[:ahead_by]
    for number, backward in enumerate(up):
        order += down[ahead_by + number : ahead_by + number + 1]
        order.append(backward)
    return order


def played_by_hand_s(
    seconds: list[list[list[float]]], pp: int, vpp: int, m: int, schedule: Schedule
) -> float:
    """When all passes are done; seconds are those of [forward or backward][virtual stage][rank]."""
    orders = [passes_of_rank(rank, pp, vpp, m, schedule) for rank in range(pp)]
    done: dict[tuple[int, int, int], float] = {}
    free = [0.0] * pp
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                work, stage, each = order[0]
                chunk = stage * pp + rank
                before = chunk - 1 if work == FORWARD else chunk + 1
                source = (work, before, each)
                if work == BACKWARD and before == pp * vpp:
                    source = (FORWARD, chunk, each)
                if before >= 0 and source not in done:
                    break
                start = max(free[rank], done.get(source, 0.0))
                free[rank] = start + seconds[work][stage][rank]
                done[work, chunk, each] = free[rank]
                order.pop(0)
    return max(free)


def splits_in_step(layers: int, pp: int, vpp: int) -> Iterator[Stages]:
    """Full rows, less some layers of the first chunk, some of the last one, and one each of the last virtual
    stage that is as long as the first in rows of other ranks.
    """
    row = -(-layers // pp)
    for full in (row, row + 1, row + 2):
        heights = [full // vpp + (stage < full % vpp) for stage in range(vpp)]
        if min(heights) < 1:
            continue
        level = max(stage for stage in range(vpp) if heights[stage] == heights[0])
        short = pp * full - layers
        for last in range(heights[-1] + 1):
            for first in range(heights[0] + 1):
                rows = [list(heights) for _ in range(pp)]
                rows[0][0] -= first
                rows[-1][-1] -= last
                free = [r for r in range(pp) if (r, level) not in ((0, 0), (pp - 1, vpp - 1))]
                gaps = short - first - last
                if not 0 <= gaps <= len(free) or (gaps and heights[level] < 2):
                    continue
                for rank in free[:gaps]:
                    rows[rank][level] -= 1
                yield tuple(map(tuple, rows))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout of a small model, which its virtual stages may not divide."""

    work: Workload
    layout: Layout


def case(seed: int) -> Case:
    draw = random.Random(seed)
    pp, vpp = draw.choice([(2, 2), (2, 3), (3, 2), (4, 2), (4, 3), (2, 4)])
    layers = draw.randint(pp * vpp - 2, 3 * pp * vpp)
    spec = model(draw).model_copy(update={"layers": layers})
    m, dp = pp * draw.choice([1, 2, 4]), draw.choice([1, 2, 4])
    schedule = draw.choice(SCHEDULES)
    stack = "torchtitan" if schedule is Schedule.BREADTH_FIRST else "megatron"
    work = Workload(
        model=spec,
        cluster=cluster(draw.choice([12.0, 24.0, 80.0]), pp * dp),
        gpus=pp * dp,
        global_batch=m * dp,
        seq_len=2048,
        framework=stack,
    )
    layout = Layout(
        pp=pp, vpp=vpp, dp=dp, num_micro_batches=m, schedule=int(schedule), zero_stage=0
    )
    return Case(work=work, layout=layout)


def least_by_hand_s(one: Case, pricing: LayoutPricing) -> tuple[float, int]:
    """The fastest of all splits that fit, under all mappings, and how many are priced as played."""
    table = mappings_of(one.work, one.layout)
    placed = pricing.under(table)
    pp, vpp, m = (int(x) for x in (one.layout.pp, one.layout.vpp, one.layout.num_micro_batches))
    schedule = Schedule(int(one.layout.schedule))
    least_s, played = inf, 0
    for stages in splits_in_step(one.work.model.layers, pp, vpp):
        held = stage_memory_gib(one.work, one.layout, stages)
        if float(np.max(held)) > usable_hbm_gib(one.work):
            continue
        unplayed = exact_step(placed.context, stages, placed.times, played=False)
        priced = exact_step(placed.context, stages, placed.times)
        passes = chunk_passes(placed.context, stages, placed.times)
        forward, backward = passes.forward_s, passes.backward_s
        for row in range(len(table["tp"])):
            both = forward[row] + backward[row]
            ranks = both.sum(axis=0)
            closed_s = m * both.max(axis=1).sum() + (ranks.sum() - ranks.max()) / vpp
            pair = [forward[row].tolist(), backward[row].tolist()]
            by_hand_s = played_by_hand_s(pair, pp, vpp, m, schedule)
            of_row = np.asarray(unplayed.seconds)[row]
            scale = of_row / (of_row - np.asarray(unplayed.parts["scale"])[row])
            longer_s = max(by_hand_s - closed_s, 0.0)
            step_s = float(np.asarray(priced.seconds)[row])
            assert step_s >= of_row
            if longer_s > 1e-3 * closed_s:
                played += 1
                assert step_s == pytest.approx(of_row + scale * longer_s, rel=1e-9)
            else:
                assert step_s <= of_row + scale * longer_s * (1 + 1e-9) + 1e-12
            least_s = min(least_s, step_s)
    return least_s, played


def check(seeds: list[int]) -> None:
    played, bests = 0, []
    for seed in seeds:
        one = case(seed)
        pricing = LayoutPricing(one.work, one.layout)
        table = mappings_of(one.work, one.layout)
        if not len(table["tp"]):
            continue
        least_s, number = least_by_hand_s(one, pricing)
        played += number
        bounds = MappingBounds(matrices=table, bound_s=np.zeros(len(table["tp"])))
        best = worked_out(pricing.best(bounds, pricing.under(table), inf))
        if best is None:
            assert least_s == inf
            continue
        assert best.step_time_s == pytest.approx(least_s, rel=1e-9)
        # No better split is passed over where one is only a little slower than it.
        close_s = best.step_time_s * (1 + 1e-6)
        again = LayoutPricing(one.work, one.layout)
        below = worked_out(again.best(bounds, again.under(table), close_s))
        assert below is not None
        assert below.step_time_s == pytest.approx(least_s, rel=1e-9)
        bests.append(least_s)
    assert played
    assert bests


def test_the_best_of_splits_with_uneven_heights() -> None:
    check(list(range(24)))


@pytest.mark.slow
@pytest.mark.parametrize("part", some(range(24)))
def test_the_best_of_many_splits_with_uneven_heights(part: int) -> None:
    check(list(range(100 + 25 * part, 125 + 25 * part)))


def test_layouts_with_unlike_micro_batches_are_played_together() -> None:
    """Two layouts of one split in one array operation cost what each costs alone."""
    one = case(0)
    works = []
    for m in (4, 16):
        layout = Layout(pp=2, vpp=3, dp=2, num_micro_batches=m)
        spec = one.work.model.model_copy(update={"layers": 8, "moe": None})
        work = Workload(
            model=spec,
            cluster=cluster(80.0, 4),
            gpus=4,
            global_batch=32,
            seq_len=2048,
        )
        pricing = LayoutPricing(work, layout)
        table = mappings_of(work, layout)
        bounds = MappingBounds(matrices=table, bound_s=np.zeros(len(table["tp"])))
        works.append((pricing, bounds, pricing.under(table)))
    alone = [worked_out(pricing.best(bounds, placed, inf)) for pricing, bounds, placed in works]
    together = worked_out_together(
        [pricing.best(bounds, placed, inf) for pricing, bounds, placed in works]
    )
    assert [together[0], together[1]] == alone


def test_even_heights_keep_the_closed_form() -> None:
    """Also with ends that lack layers or have more; other heights may be priced as they are played."""
    one = case(0)
    spec = one.work.model.model_copy(update={"layers": 16, "moe": None})
    work = Workload(model=spec, cluster=cluster(80.0, 8), gpus=8, global_batch=32, seq_len=2048)
    layout = Layout(pp=2, vpp=2, dp=4, num_micro_batches=8)
    table = mappings_of(work, layout)
    placed = LayoutPricing(work, layout).under(table)
    times = kind_times(placed.context)
    for stages, may_be_fast in (
        (((4, 4), (4, 4)), False),
        (((3, 5), (5, 3)), False),
        (((4, 5), (5, 2)), False),
        (((3, 4), (4, 5)), False),
        (((4, 3), (4, 5)), True),
        (((5, 3), (5, 3)), True),
    ):
        fast = is_fast_in_closed_form(placed.context, times, stages)
        assert fast.any() == may_be_fast
