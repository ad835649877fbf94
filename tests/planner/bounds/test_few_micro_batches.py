"""Bounds of pipelines through unlike layers with few micro-batches, against a player of their own.

The player shares no code with the simulator: passes of Megatron's 1F1B and interleaved 1F1B, each as soon as
its rank is free and its input is there.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.constraints.pipeline import may_have_empty_ends
from meshwright.costmodel.layer_kinds import kind_times
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.rank_load import chunk_passes, least_way_in_order_s
from meshwright.costmodel.schedules import Schedule, least_fill, least_waits
from meshwright.costmodel.simulator import longest_way
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.reader import load_catalog_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.layer_split import level_splits
from meshwright.planner.bounds.paces import chunk_times, least_level_pace_s

Passes = list[tuple[int, int, bool]]
"""Chunk, micro-batch, and whether it is the backward pass."""


def passes_of(rank: int, pp: int, vpp: int, m: int) -> Passes:
    """Those of one rank, in Megatron's order."""
    ahead = 2 * (pp - rank - 1) + (vpp - 1) * pp if vpp > 1 else pp - rank - 1
    forward, backward = [], []
    for number in range(m * vpp):
        turn, place = divmod(number, pp * vpp) if vpp > 1 else (number, 0)
        level, within = divmod(place, pp)
        micro_batch = turn * pp + within if vpp > 1 else number
        forward.append((level * pp + rank, micro_batch, False))
        backward.append(((vpp - 1 - level) * pp + rank, micro_batch, True))
    warm_up = min(ahead, m * vpp)
    turns = zip(forward[warm_up:], backward, strict=False)
    return [*forward[:warm_up], *itertools.chain(*turns), *backward[m * vpp - warm_up :]]


def step_s(seconds: Sequence[Sequence[float]], pp: int, m: int) -> float:
    """When the last pass ends, from the forward and the backward seconds of each chunk."""
    chunks = len(seconds[0])
    waiting = [passes_of(rank, pp, chunks // pp, m) for rank in range(pp)]
    ends: dict[tuple[int, int, bool], float] = {}
    free = [0.0] * pp
    while any(waiting):
        for rank in range(pp):
            while waiting[rank]:
                chunk, micro_batch, is_back = own = waiting[rank][0]
                begin = free[rank]
                if is_back or chunk:
                    after = (chunk - 1, micro_batch, False)
                    if is_back:
                        is_end = chunk == chunks - 1
                        after = (chunk if is_end else chunk + 1, micro_batch, not is_end)
                    if after not in ends:
                        break
                    begin = max(begin, ends[after])
                free[rank] = ends[own] = begin + seconds[is_back][chunk]
                waiting[rank].pop(0)
    return max(free)


def test_no_partition_is_faster_than_the_least_way_and_the_best_hardly_slower() -> None:
    """Every partition of short random sequences; forward passes may be the longer ones."""
    chance, close = random.Random(5), []
    for case in range(150):
        layers, m = chance.randint(2, 8), chance.choice([1, 2, 3, 4, 5, 9])
        pp = chance.randint(2, min(5, layers))
        kinds = [(1.0, chance.uniform(0.5, 3)), (chance.uniform(1, 6), chance.uniform(1, 12))]
        forward, backward = map(list, zip(*chance.choices(kinds, k=layers), strict=True))
        forward[-1], backward[-1] = forward[-1] + 3.0, backward[-1] + chance.choice([2.0, 6.0])
        begins = (0, *(n for n in range(1, layers) if case % 3 or chance.random() < 0.7))
        if len(begins) < pp:
            continue
        best_s = np.inf
        for cuts in itertools.combinations(begins[1:], pp - 1):
            parts = list(itertools.pairwise([0, *cuts, layers]))
            sums = [[sum(each[a:b]) for a, b in parts] for each in (forward, backward)]
            best_s = min(best_s, step_s(sums, pp, m))
        backward_s = np.concatenate([[0.0], np.cumsum(backward)])[None]
        both_s = np.concatenate([[0.0], np.cumsum(forward)])[None] + backward_s
        ways_s = least_way_in_order_s(both_s, backward_s, pp, np.array([m]), begins=begins)
        bound_s = both_s[0, -1] + ways_s[0]
        assert bound_s <= best_s * (1 + 1e-9)
        close.append(bound_s / best_s)
    assert np.mean(close) > 0.98
    assert np.percentile(close, 10) > 0.95


def test_what_follows_from_the_work_and_the_busiest_rank_alone_is_below_every_step() -> None:
    """Any work on any rank; `least_fill` is exact where the work lies as its derivation has it."""
    chance = random.Random(11)
    for case in range(300):
        pp, m, share = chance.randint(1, 6), chance.randint(1, 8), chance.uniform(0.5, 0.8)
        loads = [chance.uniform(0.2, 3) for _ in range(pp)]
        if case % 2 and m > 1:
            loads = [1.0 if rank >= pp - m + 1 else 1 / share for rank in range(pp)]
        backward = [share * load for load in loads]
        forward = [load - part for load, part in zip(loads, backward, strict=True)]
        seconds = step_s((forward, backward), pp, m)
        of_work, of_busiest = least_waits(pp, m, share)
        by_busiest_s = m * max(loads) + of_work * sum(loads) - of_busiest * max(loads)
        by_work_s = (1 + float(least_fill(pp, m, share))) * sum(loads)
        assert max(by_busiest_s, by_work_s) <= seconds * (1 + 1e-8)
        if case % 2 and 1 < m <= pp:
            assert by_work_s == pytest.approx(seconds)


@pytest.mark.parametrize("vpp", [1, 2, 3])
def test_the_longest_way_is_the_step_and_no_longer_with_other_times(vpp: int) -> None:
    chance = random.Random(vpp)
    for _ in range(40):
        pp = chance.choice([2, 3, 4])
        m = pp * chance.choice([1, 2, 3])
        own, other = (
            [
                [chance.choice([1, 1, 4]) * chance.uniform(0.5, 2) for _ in range(pp * vpp)]
                for _ in "fb"
            ]
            for _ in range(2)
        )
        schedule = Schedule.ONE_F_ONE_B
        passes = longest_way(*own, pp=pp, num_micro_batches=m, schedule=schedule)
        assert np.sum(passes * own) == pytest.approx(step_s(own, pp, m))
        assert np.sum(passes * other) <= step_s(other, pp, m) * (1 + 1e-12)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "nemotron-h-8b"])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 12), (3, 8), (2, 4), (4, 2)])
def test_passes_bound_level_splits_closely(name: str, pp: int, vpp: int) -> None:
    """Of layers that ranks get unlike ones of; without the passes the bound was up to 23 % below."""
    own = load_catalog_model(name).model_dump(exclude_defaults=True, exclude_unset=True)
    changes = {"layers": 24} | ({"hybrid_pattern": "M-M*" * 6} if "nemotron" in name else {})
    cluster = read_cluster("dgx-h100", gpus=8 * pp)
    workload = Workload(
        model=ModelSpec.model_validate(own | changes),
        cluster=cluster,
        gpus=8 * pp,
        seq_len=8192,
        global_batch=8 * pp,
        framework="megatron-lm",
    )
    layout = Layout(tp=4, pp=pp, dp=2, vpp=vpp, num_micro_batches=pp)
    context = make_context(workload, layout, nested_placement(cluster, layout))
    least_s = np.inf
    for stages in level_splits(24, pp, vpp, empty_ends=may_have_empty_ends(workload)):
        passes = chunk_passes(context, stages)
        each_s = (passes.forward_s.ravel().tolist(), passes.backward_s.ravel().tolist())
        least_s = min(least_s, step_s(each_s, pp, pp))
    one = Layout(**{field: np.array([value]) for field, value in vars(layout).items()})
    many = make_context(workload, one, nested_placement(cluster, one))
    pace_s = least_level_pace_s(workload, one, chunk_times(many, kind_times(many)), by_passes=True)
    assert 0.96 * least_s <= pp * pace_s[0] <= least_s
