"""Pipelines: the event simulator by hand, and the closed form of the step against it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.estimate import LayerCosts, estimate_layout, layer_costs
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.schedules import Schedule, in_flight
from meshwright.costmodel.simulator import pass_order, simulate
from meshwright.costmodel.step_time import boundary_s, exact_step, make_context
from meshwright.costmodel.textbook import bubble_of_ideal, bubble_of_step
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.blocks import MoeSpec
from meshwright.model_specs.schema import ModelSpec
from tests.costmodel.pipeline_oracles import peak_chunks


def closed_form_s(
    loads: np.ndarray[tuple[int, ...], np.dtype[np.float64]], m: int, vpp: int
) -> float:
    return float(m * loads.max() + (loads.sum() - loads.max()) / vpp)


def test_1f1b_by_hand() -> None:
    """2 ranks, 2 micro-batches, forward 1 s, backward 2 s: the classic picture, 9 s."""
    line = simulate([1.0, 1.0], [2.0, 2.0], pp=2, num_micro_batches=2)
    order = [[(one.micro_batch, one.backward) for one in rank] for rank in line.passes]
    assert order[0] == [(0, False), (1, False), (0, True), (1, True)]
    assert order[1] == [(0, False), (0, True), (1, False), (1, True)]
    assert [list(x) for x in line.starts_s] == [[0, 1, 4, 7], [1, 2, 4, 5]]
    assert [list(x) for x in line.ends_s] == [[1, 2, 6, 9], [2, 4, 5, 7]]
    assert line.seconds == 9
    assert list(line.busy_s) == [6, 6]


def test_transfers_delay_the_receiver() -> None:
    line = simulate([1.0, 1.0], [2.0, 2.0], pp=2, num_micro_batches=1, p2p_s=0.5)
    assert line.seconds == 1 + 0.5 + 1 + 2 + 0.5 + 2
    assert simulate([1.0], [2.0], pp=1, num_micro_batches=1, p2p_s=0.5).seconds == 3


def test_interleaving_takes_pp_micro_batches_through_a_chunk() -> None:
    order = pass_order(0, 2, 2, 4)
    forward = [(one.chunk, one.micro_batch) for one in order if not one.backward]
    backward = [(one.chunk, one.micro_batch) for one in order if one.backward]
    assert forward == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    assert backward == [(2, 0), (2, 1), (0, 0), (0, 1), (2, 2), (2, 3), (0, 2), (0, 3)]


@pytest.mark.parametrize("micro_batches", [4, 8, 64])
def test_transfers_hide_only_between_fill_and_drain(micro_batches: int) -> None:
    """pp 4, vpp 3: 8 of a rank's passes each way fill and drain."""
    layout = Layout(tp=2, pp=4, vpp=3, micro_batch=1, num_micro_batches=micro_batches)
    work = Workload(
        model=ModelSpec(
            name="even", layers=12, hidden=8192, ffn_hidden=32768, heads=64, kv_heads=64, vocab=8192
        ),
        cluster=read_cluster("dgx-h100"),
        gpus=8,
        global_batch=micro_batches,
        seq_len=4096,
        pp_overlap=True,
        framework="nemo",
    )
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    once = 2.0 * float(np.asarray(boundary_s(c)))
    beside = c.constants.framework.dp_interference * once
    by_hand = beside * (3 * micro_batches - 8) + once * (8 + 3)
    step = exact_step(c, ((1, 1, 1),) * 4)
    assert float(np.asarray(step.parts["pipeline_p2p"])) == pytest.approx(by_hand)


@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 4), (4, 8), (8, 32), (4, 2)])
def test_gpipe_and_1f1b_have_the_same_bubble_and_different_peaks(pp: int, m: int) -> None:
    gpipe = simulate([1.0] * pp, [2.0] * pp, pp=pp, num_micro_batches=m, schedule=Schedule.GPIPE)
    one = simulate([1.0] * pp, [2.0] * pp, pp=pp, num_micro_batches=m)
    assert gpipe.seconds == one.seconds == 3 * (m + pp - 1)
    assert peak_chunks(gpipe) == (m,) * pp
    assert peak_chunks(one) == tuple(min(m, pp - r) for r in range(pp))


@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 4),
    st.floats(0.1, 10.0),
    st.floats(0.1, 10.0),
)
def test_closed_form_is_exact_on_even_stages(
    pp: int, vpp: int, turns: int, f: float, b: float
) -> None:
    vpp, m = (vpp if pp > 1 else 1), pp * turns
    line = simulate([f] * (pp * vpp), [b] * (pp * vpp), pp=pp, num_micro_batches=m)
    loads = np.full(pp, vpp * (f + b))
    assert line.seconds == pytest.approx(closed_form_s(loads, m, vpp), rel=1e-12)
    bubble = line.seconds - m * vpp * (f + b)
    assert bubble / (m * vpp * (f + b)) == pytest.approx(bubble_of_ideal(pp, m, vpp), abs=1e-9)
    assert bubble / line.seconds == pytest.approx(bubble_of_step(pp, m, vpp), abs=1e-9)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4))
def test_activations_in_flight(pp: int, vpp: int, turns: int) -> None:
    vpp, m = (vpp if pp > 1 else 1), pp * turns
    line = simulate([1.0] * (pp * vpp), [2.0] * (pp * vpp), pp=pp, num_micro_batches=m)
    layout = Layout(pp=pp, vpp=vpp, num_micro_batches=m)
    held = np.asarray(in_flight(layout, np.arange(pp))) * vpp
    assert held.tolist() == pytest.approx(list(peak_chunks(line)))


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=8), st.integers(1, 4))
def test_closed_form_of_uneven_1f1b_errs_on_the_slow_side(loads: list[float], turns: int) -> None:
    pp = len(loads)
    m = pp * turns
    line = simulate(
        [load / 3 for load in loads], [2 * load / 3 for load in loads], pp=pp, num_micro_batches=m
    )
    closed = closed_form_s(np.array(loads), m, 1)
    assert m * max(loads) * (1 - 1e-12) <= line.seconds <= closed * (1 + 1e-12)


def test_a_schedule_that_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of pp"):
        simulate([1.0] * 4, [1.0] * 4, pp=2, num_micro_batches=3)
    with pytest.raises(ValueError, match="chunks"):
        simulate([1.0] * 3, [1.0] * 3, pp=2, num_micro_batches=4)
    with pytest.raises(ValueError, match="virtual stages"):
        simulate([1.0] * 4, [1.0] * 4, pp=2, num_micro_batches=4, schedule=Schedule.GPIPE)


def dense_workload(layers: int, *, vocab: int = 32_000) -> Workload:
    model = ModelSpec(
        layers=layers, hidden=4096, ffn_hidden=16_384, heads=32, kv_heads=32, vocab=vocab
    )
    return Workload(
        model=model,
        cluster=read_cluster("dgx-h100"),
        gpus=8,
        global_batch=64,
        seq_len=4096,
        cuda_graph="full",
        dp_overlap=True,
        pp_overlap=True,
    )


def rank_loads_s(
    costs: LayerCosts, layers: list[int]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    loads = np.array(layers, dtype=np.float64) * costs.dense_layer_s
    loads[0] += costs.embedding_s
    loads[-1] += costs.head_s
    return loads


def pipeline_s(parts: dict[str, float]) -> float:
    """What the ranks compute and wait for each other: the step less its other parts."""
    others = ("pipeline_p2p", "dp_comm", "optimizer", "step_overhead", "scale")
    return sum(parts.values()) - sum(parts[name] for name in others)


@pytest.mark.parametrize(
    ("pp", "vpp", "m"), [(1, 1, 8), (2, 1, 8), (4, 1, 8), (4, 3, 8), (8, 2, 32)]
)
def test_step_is_the_closed_form_of_its_layer_costs(pp: int, vpp: int, m: int) -> None:
    workload = dense_workload(48)
    layout = Layout(pp=pp, vpp=vpp, num_micro_batches=m, dp=8 // pp)
    placement = nested_placement(workload.cluster, layout)
    costs = layer_costs(workload, layout, placement)
    stages = ((48 // (pp * vpp),) * vpp,) * pp
    found = estimate_layout(workload, layout, placement, stages)
    parts = {name: float(np.asarray(x)) for name, x in found.breakdown_s.items()}
    loads = rank_loads_s(costs, [48 // pp] * pp)
    # Ranks in step wait for the embedding in the first virtual stage as for the head in the last.
    lost = float(np.asarray(costs.embedding_s)) if vpp > 1 else 0.0
    assert pipeline_s(parts) == pytest.approx(closed_form_s(loads, m, vpp) + m * lost, rel=1e-12)
    bubble = (loads.sum() - loads.max()) / vpp + m * lost
    assert parts["pipeline_bubble"] == pytest.approx(bubble, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("pp", "vpp", "m"), [(2, 1, 8), (4, 1, 8), (4, 4, 8), (8, 1, 32), (8, 2, 16)]
)
def test_bubble_of_even_stages_is_p_minus_1_over_v_m(pp: int, vpp: int, m: int) -> None:
    """With one word in the vocabulary the ends weigh next to nothing."""
    workload = dense_workload(64, vocab=1)
    layout = Layout(pp=pp, vpp=vpp, num_micro_batches=m, dp=8 // pp)
    stages = ((64 // (pp * vpp),) * vpp,) * pp
    found = estimate_layout(workload, layout, nested_placement(workload.cluster, layout), stages)
    parts = {name: float(np.asarray(x)) for name, x in found.breakdown_s.items()}
    ideal = pipeline_s(parts) - parts["pipeline_bubble"]
    assert parts["pipeline_bubble"] / ideal == pytest.approx(bubble_of_ideal(pp, m, vpp), rel=0.03)


def test_step_agrees_with_the_simulator_on_even_stages() -> None:
    workload = dense_workload(32, vocab=1)
    layout = Layout(pp=4, vpp=2, num_micro_batches=8, dp=2)
    placement = nested_placement(workload.cluster, layout)
    costs = layer_costs(workload, layout, placement)
    chunk = [4 * float(np.asarray(costs.dense_layer_s))] * 8
    chunk[0] += float(np.asarray(costs.embedding_s))
    chunk[-1] += float(np.asarray(costs.head_s))
    line = simulate([x / 3 for x in chunk], [2 * x / 3 for x in chunk], pp=4, num_micro_batches=8)
    found = estimate_layout(workload, layout, placement, ((4, 4),) * 4)
    parts = {name: float(np.asarray(x)) for name, x in found.breakdown_s.items()}
    assert pipeline_s(parts) == pytest.approx(line.seconds, rel=0.02)


def test_dense_layers_first_and_recomputed_layers_count_where_they_lie() -> None:
    """10 layers, 4 of them dense, in chunks of 3, 3, 2 and 2, two layers of each recomputed."""
    moe = MoeSpec(experts=8, top_k=2, moe_ffn_hidden=1024, dense_layers=4)
    model = ModelSpec(
        layers=10, hidden=1024, ffn_hidden=4096, heads=8, kv_heads=8, vocab=1000, moe=moe
    )
    workload = Workload(
        model=model,
        cluster=read_cluster("dgx-h100"),
        gpus=2,
        global_batch=8,
        seq_len=1024,
        cuda_graph="full",
    )
    layout = Layout(pp=2, vpp=2, num_micro_batches=8, recompute=32, recompute_layers=2)
    placement = nested_placement(workload.cluster, layout)
    costs = layer_costs(workload, layout, placement)
    dense, moe_s = float(np.asarray(costs.dense_layer_s)), float(np.asarray(costs.moe_layer_s))
    again, again_moe = (
        float(np.asarray(costs.dense_recompute_s)),
        float(np.asarray(costs.moe_recompute_s)),
    )
    # Model order: rank 0 has layers 0-2 and 6-7, rank 1 has layers 3-5 and 8-9; layers 0-3 are dense.
    first = 3 * dense + 2 * moe_s + 2 * again + 2 * again_moe + float(np.asarray(costs.embedding_s))
    second = dense + 4 * moe_s + again + 3 * again_moe + float(np.asarray(costs.head_s))
    c = make_context(workload, layout, placement)
    parts = {
        name: float(np.asarray(x))
        for name, x in exact_step(c, ((3, 2), (3, 2)), played=False).parts.items()
    }
    # In step, chunk by chunk: (0-2 against 3-5) and (6-7 against 8-9, with the head).
    early = max(
        3 * dense + 2 * again + float(np.asarray(costs.embedding_s)),
        dense + 2 * moe_s + again + again_moe,
    )
    late = 2 * moe_s + 2 * again_moe + float(np.asarray(costs.head_s))
    closed = 8 * (early + late) + min(first, second) / 2
    assert pipeline_s(parts) == pytest.approx(closed, rel=1e-12)
