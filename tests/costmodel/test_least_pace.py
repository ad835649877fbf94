"""The least pace of ranks in step against every split of small pipelines, summed chunk by chunk here."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.layers.kinds import KindTime, KindTimes
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.pipeline.least_pace import least_pace_s
from meshwright.costmodel.pipeline.schedules import Schedule
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.experts import MoeSpec
from meshwright.model_specs.schema import ModelSpec

SECONDS = st.floats(0.05, 4.0)


def of_kind(seconds: float) -> KindTime:
    return KindTime({"gemm": np.array([seconds])}, seconds / 2, {})


def least(
    layers: int,
    leading: int,
    ranks: tuple[int, int],
    seconds: tuple[float, float, float],
    schedule: int = int(Schedule.ONE_F_ONE_B),
) -> float:
    """`least_pace_s` of a model with so many leading dense layers and experts in the others."""
    dense_s, moe_s, end_s = seconds
    moe = MoeSpec(experts=8, top_k=2, moe_ffn_hidden=128, dense_layers=leading)
    fields = {
        "layers": layers,
        "hidden": 256,
        "ffn_hidden": 512,
        "heads": 4,
        "kv_heads": 4,
        "vocab": 1000,
    }
    cluster = read_cluster("dgx-h100", gpus=8)
    workload = Workload(
        model=ModelSpec.model_validate(fields | {"moe": moe.model_dump()}),
        cluster=cluster,
        gpus=8,
        seq_len=512,
        global_batch=16,
    )
    pp, vpp = ranks
    layout = Layout(pp=pp, vpp=vpp, num_micro_batches=8, schedule=schedule)
    context = make_context(
        workload, layout, nested_placement(cluster, layout, ("tp", "cp", "dp", "pp"))
    )
    dense = of_kind(dense_s) if leading else None
    times = KindTimes(dense, of_kind(moe_s), of_kind(0.0), of_kind(end_s), None)
    return float(np.max(least_pace_s(context, times)))


def best_pace_s(
    layers: int, leading: int, ranks: tuple[int, int], seconds: tuple[float, float, float]
) -> float:
    """The slowest chunk of each number, added up, of the best split."""
    dense_s, moe_s, end_s = seconds
    pp, vpp = ranks
    of_layer = [dense_s] * leading + [moe_s] * (layers - leading)
    best = float("inf")
    for cuts in combinations(range(1, layers), pp * vpp - 1):
        edges = [0, *cuts, layers]
        chunks = [sum(of_layer[a:b]) for a, b in pairwise(edges)]
        chunks[-1] += end_s
        best = min(best, sum(max(chunks[v * pp : (v + 1) * pp]) for v in range(vpp)))
    return best


@settings(max_examples=300, deadline=None)
@given(
    ranks=st.sampled_from([(2, 2), (2, 3), (3, 2), (4, 2)]),
    more=st.integers(0, 6),
    leading=st.integers(0, 3),
    seconds=st.tuples(SECONDS, SECONDS, SECONDS),
)
def test_no_split_is_faster(
    ranks: tuple[int, int], more: int, leading: int, seconds: tuple[float, float, float]
) -> None:
    layers = min(ranks[0] * ranks[1] + more, 10)
    bound_s = least(layers, leading, ranks, seconds)
    assert bound_s <= best_pace_s(layers, leading, ranks, seconds) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("layers", "ranks", "end_s", "pace_s"),
    [
        (8, (2, 2), 0.0, 4.0),  # two layers to every chunk
        (8, (2, 2), 1.0, 5.0),  # nine to deal out on two ranks
        (8, (2, 2), 0.5, 4.5),  # the last chunk takes two layers and the end
        (61, (4, 8), 1.5, 16.0),  # 7 x 2 and a last round of 2: room for 62 layers and more
        (59, (4, 8), 1.5, 15.5),  # 7 x 2, then 1 on each rank but the last, which has the end
    ],
)
def test_paces_by_hand(layers: int, ranks: tuple[int, int], end_s: float, pace_s: float) -> None:
    """All layers take a second."""
    assert least(layers, 0, ranks, (1.0, 1.0, end_s)) == pytest.approx(pace_s)


def test_leading_layers_make_room_for_others() -> None:
    """A free layer is no layer; one of half the time stands beside another for half a second more."""
    assert least(9, 1, (2, 2), (0.0001, 1.0, 0.0)) == pytest.approx(4.0, abs=1e-3)
    assert least(9, 1, (2, 2), (0.5, 1.0, 0.0)) == pytest.approx(4.5)
    assert best_pace_s(9, 1, (2, 2), (0.5, 1.0, 0.0)) == pytest.approx(4.5)


def test_ranks_out_of_step_have_no_pace() -> None:
    assert least(8, 0, (2, 1), (1.0, 1.0, 1.0)) == 0.0
    assert least(8, 0, (2, 2), (1.0, 1.0, 1.0), int(Schedule.DUALPIPE)) == 0.0
