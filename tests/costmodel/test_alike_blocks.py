"""Expert groups on even blocks, told by a part of one stage, against all ranks counted one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from meshwright.cluster_specs.allocation import allocation_of
from meshwright.cluster_specs.reader import load_cluster
from meshwright.costmodel.layout import AXES, Layout
from meshwright.costmodel.placement import counted_members, level_factors, placement_on
from meshwright.planner.bounds.mappings import divisors, matrices_of
from tests.soaked import examples

SIZES = {
    "gb200-nvl72": [72, 168, 180, 240, 288, 308, 320, 336, 360, 936, 1008, 1440, 1872, 2160],
    "dgx-h100": [16, 24, 40, 48, 56, 72, 120],
    "superpod-a100": [160, 320, 480, 1120, 2240],
    "llama3-24k": [16, 48, 96, 240],
}
"""GPUs by cluster of two to four levels; racks hold 72, and 56, 60 or 64 where 72 do not divide."""


@pytest.mark.parametrize("name", SIZES)
def test_a_part_of_one_stage_tells_what_all_ranks_say(name: str) -> None:
    cluster, drawn = load_cluster(name), random.Random(name)
    asked, unlike = 0, 0
    while asked < examples(400):
        gpus = drawn.choice(SIZES[name])
        tp, cp, pp = (drawn.choice(sizes) for sizes in ([1, 2, 4], [1, 2, 3, 4, 8], [1, 2, 3, 5]))
        if gpus % (tp * cp * pp):
            continue
        dp = gpus // (tp * cp * pp)
        group = drawn.choice(divisors(tp * cp * dp))
        etp = drawn.choice(divisors(group))
        table = matrices_of((tp, cp, dp, pp), level_factors(cluster, gpus))
        row = drawn.randrange(len(table["tp"]))
        matrix = {axis: ways[row] for axis, ways in table.items()}
        layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=group // etp, etp=etp)
        allocation = allocation_of(cluster, gpus)
        assert allocation.even
        placed = placement_on(cluster, layout, matrix)
        rows = tuple(tuple(matrix[axis].tolist()) for axis in AXES)
        counted = counted_members(rows, etp, group // etp, allocation)
        for axis, members in counted.items():
            assert np.array_equal(getattr(placed, axis), members), (gpus, layout, rows, axis)
        asked += 1
        unlike += any(group % size and size % group for size in np.cumprod(matrix["dp"]).tolist())
    assert unlike > asked // 10
