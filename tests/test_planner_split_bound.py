"""The bound on the slowest rank, against every split that fits."""

from __future__ import annotations

import random
from itertools import product
from math import inf

from planner.split import least_busiest_s
from planner.stages import SplitCosts


def slowest_of_best(costs: SplitCosts, rooms: list[list[int]]) -> float:
    """The least slowest rank over every way to deal the layers out, leading ones first."""
    best = inf
    for counts in product(range(costs.fewest, costs.most + 1), repeat=costs.pp):
        if sum(counts) != costs.layers:
            continue
        left, times = costs.leading, []
        for rank, layers in enumerate(counts):
            leading = min(left, layers)
            left -= leading
            if leading >= len(rooms[rank]) or layers > rooms[rank][leading]:
                break
            times.append(costs.rank_s(rank, layers, leading))
        else:
            best = min(best, max(times))
    return best


def test_never_above_the_best_split_and_often_equal() -> None:
    chance = random.Random(4)
    equal = infeasible = 0
    for _ in range(300):
        pp, layers = chance.randint(1, 4), chance.randint(4, 9)
        leading = chance.choice([0, 0, 1, 2])
        costs = SplitCosts(
            pp=pp,
            vpp=1,
            layers=layers,
            leading=leading,
            num_micro_batches=4,
            layer_s=chance.uniform(1, 3),
            leading_s=chance.uniform(0.2, 3),
            first_s=chance.uniform(0, 2),
            last_s=chance.uniform(0, 4),
        )
        rooms = []
        for rank in range(pp):
            room = chance.randint(1, layers)
            rooms.append([min(layers, room + some) for some in range(leading + 1 if rank < leading else 1)])
        bound, best = least_busiest_s(costs, rooms), slowest_of_best(costs, rooms)
        assert bound <= best
        equal += bound == best < inf
        infeasible += best == inf
    assert equal > 150
    assert infeasible > 10


def test_a_rank_without_room_for_its_layer_leaves_nothing() -> None:
    costs = SplitCosts(pp=2, vpp=1, layers=4, num_micro_batches=1, layer_s=1.0)
    assert least_busiest_s(costs, [[4], [0]]) == inf
    assert least_busiest_s(costs, [[4], [1]]) == 3.0
    assert least_busiest_s(costs, [[4], [4]]) == 2.0
