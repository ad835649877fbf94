"""The least pace of ranks in step against every split that is looked at, summed chunk by chunk here."""

from __future__ import annotations

from itertools import pairwise
from operator import le

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.footprint import LayerRooms
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.schedules import Schedule
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.blocks import MoeSpec
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.layer_split import balanced_stages, level_splits
from meshwright.planner.bounds.paces import ChunkTimes, least_level_pace_s
from tests.soaked import examples

SECONDS = st.floats(0.0, 4.0)
IN_STEP = (Schedule.ONE_F_ONE_B, Schedule.BREADTH_FIRST, Schedule.ZB_H1)
Seconds = tuple[float, float, float, float]
"""Of a dense layer, one with experts, the embedding, the head."""


def least(
    layers: int,
    leading: int,
    ranks: tuple[int, int],
    seconds: Seconds,
    *,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    framework: str = "megatron",
    rooms: list[int] | None = None,
) -> float:
    """`least_level_pace_s` of a model with so many leading dense layers and experts in the others."""
    moe = MoeSpec(experts=8, top_k=2, moe_ffn_hidden=128, dense_layers=leading)
    fields = {
        "layers": layers,
        "hidden": 256,
        "ffn_hidden": 512,
        "heads": 4,
        "kv_heads": 4,
        "vocab": 1000,
    }
    workload = Workload(
        model=ModelSpec.model_validate(fields | {"moe": moe.model_dump()}),
        cluster=read_cluster("dgx-h100", gpus=8),
        gpus=8,
        seq_len=512,
        global_batch=16,
        framework=framework,
    )
    pp, vpp = ranks
    row = [np.array([value]) for value in (pp, vpp, 8, int(schedule))]
    layouts = Layout(pp=row[0], vpp=row[1], num_micro_batches=row[2], schedule=row[3])
    times = ChunkTimes(*(np.array([each]) for each in seconds))
    table = None
    if rooms is not None:
        most, no_more = np.array([rooms], dtype=np.float64), np.zeros(1)
        table = LayerRooms(most, most[:, 0], no_more, no_more, no_more.astype(np.int64))
    return float(least_level_pace_s(workload, layouts, times, table)[0])


def pace_s(stages: tuple[tuple[int, ...], ...], leading: int, seconds: Seconds) -> float:
    """The slowest chunk of each number, added up."""
    dense_s, moe_s, first_s, last_s = seconds
    pp, vpp = len(stages), len(stages[0])
    sizes = [stages[chunk % pp][chunk // pp] for chunk in range(pp * vpp)]
    edges = np.cumsum([0, *sizes])
    chunks = [
        sum(dense_s if layer < leading else moe_s for layer in range(a, b))
        for a, b in pairwise(edges.tolist())
    ]
    chunks[0] += first_s
    chunks[-1] += last_s
    return sum(max(chunks[v * pp : (v + 1) * pp]) for v in range(vpp))


@settings(max_examples=examples(150), deadline=None)
@given(
    ranks=st.tuples(st.integers(2, 8), st.integers(2, 6)),
    more=st.integers(-2, 20),
    leading=st.integers(0, 4),
    seconds=st.tuples(SECONDS, SECONDS, SECONDS, SECONDS),
    run_as=st.tuples(st.sampled_from(IN_STEP), st.sampled_from(["megatron", "deepspeed"])),
)
def test_it_is_the_pace_of_the_best_split(
    ranks: tuple[int, int],
    more: int,
    leading: int,
    seconds: Seconds,
    run_as: tuple[Schedule, str],
) -> None:
    (pp, vpp), (schedule, framework) = ranks, run_as
    layers = pp * vpp + more
    leading = min(leading, layers)
    splits = level_splits(layers, pp, vpp, empty_ends=True)
    if framework == "deepspeed":  # it deals layers out evenly
        even = balanced_stages(layers, pp, vpp)
        splits = () if even is None else (even,)
    rooms = [-(-layers // pp) + rank % 2 for rank in range(pp)]
    for limit in (None, rooms):
        fitting = [
            stages
            for stages in splits
            if limit is None or all(map(le, main_layers(stages, leading), limit))
        ]
        best_s = min((pace_s(stages, leading, seconds) for stages in fitting), default=np.inf)
        found_s = least(
            layers,
            leading,
            ranks,
            seconds,
            schedule=schedule,
            framework=framework,
            rooms=limit,
        )
        assert found_s == pytest.approx(best_s, rel=1e-9)
        assert found_s <= best_s


def main_layers(stages: tuple[tuple[int, ...], ...], leading: int) -> list[int]:
    """Of each rank, without the leading dense ones."""
    pp, counts, left = len(stages), [0] * len(stages), leading
    for chunk in range(pp * len(stages[0])):
        size = stages[chunk % pp][chunk // pp]
        counts[chunk % pp] += size - min(left, size)
        left -= min(left, size)
    return counts


@pytest.mark.parametrize(
    ("layers", "ranks", "end_s", "expected_s"),
    [
        (8, (2, 2), 0.0, 4.0),  # two layers to every chunk
        (8, (2, 2), 1.0, 5.0),  # one of the chunks is longer by the end
        (7, (2, 2), 1.0, 4.0),  # the last chunk has one layer and the end
        (
            61,
            (4, 8),
            2.1,
            16.1,
        ),  # 7 x 2, then two layers each but for the last rank, which has the end
        (126, (16, 8), 1.0, 8.0),  # embedding and head have a virtual stage each
        (62, (4, 8), 0.5, 16.0),  # the last chunk has one layer less, and the end
    ],
)
def test_paces_by_hand(
    layers: int, ranks: tuple[int, int], end_s: float, expected_s: float
) -> None:
    """All layers take a second."""
    assert least(layers, 0, ranks, (1.0, 1.0, 0.0, end_s)) == pytest.approx(expected_s)


def test_rooms_leave_splits_out() -> None:
    """Nine layers on two ranks of two chunks: five lie on one of them."""
    seconds = (1.0, 1.0, 0.0, 0.0)
    assert least(9, 0, (2, 2), seconds) == pytest.approx(5.0)
    assert least(9, 0, (2, 2), seconds, rooms=[4, 5]) == pytest.approx(5.0)
    assert least(9, 0, (2, 2), seconds, rooms=[4, 4]) == np.inf


def test_ranks_out_of_step_have_no_pace() -> None:
    seconds = (1.0, 1.0, 1.0, 1.0)
    assert least(8, 0, (2, 1), seconds) == 0.0
    assert least(8, 0, (2, 2), seconds, schedule=Schedule.DUALPIPE_V) == 0.0
