"""The dispatcher that gathers every token: what it sends, sums, keeps, and what it does not depend on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel import feed_forward as experts
from meshwright.costmodel.activations import activation_bytes_per_layer, saved_activations
from meshwright.costmodel.buffers import dispatch_buffers, transients
from meshwright.costmodel.collectives import ring_pass_s
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.execution_names import Dispatcher, GraphScope
from meshwright.costmodel.feed_forward import moe_mlp
from meshwright.costmodel.kernels import gemm_s
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import kind_times
from meshwright.costmodel.layout import Floats, Layout, Recompute
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.rates import constants_for
from meshwright.costmodel.stacks import framework_constants
from meshwright.costmodel.step_time import exact_step, make_context
from meshwright.costmodel.volumes import group_traffic
from meshwright.costmodel.workload import (
    Workload,
    activates_in_products,
    deduplicates,
    gathered_ranks,
)
from meshwright.model_specs.reader import load_catalog_model

MODEL = load_catalog_model("mixtral-8x7b")
"""Experts 8, two a token, 4,096 wide."""
PASSES = (2 * 4096 + 4 * 4096 + 4 * 8 + 8, 2 * 4096 + 4 * 4096 + 4 * 8)
"""Bytes a gathered token: tokens and sums, probabilities and choices; backward without the last."""


def workload(**changes: Any) -> Workload:
    base = Workload(
        model=MODEL,
        cluster=read_cluster("dgx-h100"),
        gpus=16,
        global_batch=16,
        seq_len=4096,
        moe_dispatch="allgather",
    )
    return replace(base, **changes)


def context(work: Workload, layout: Layout) -> Context:
    return make_context(work, layout, nested_placement(work.cluster, layout))


@pytest.mark.parametrize(
    ("degrees", "tokens", "ranks"),
    [
        ({"dp": 8, "ep": 8}, 4096, 8),
        ({"dp": 8, "ep": 4}, 4096, 4),
        ({"tp": 2, "dp": 8, "ep": 4, "etp": 2, "sequence_parallel": True}, 2048, 8),
        ({"tp": 2, "dp": 8, "ep": 8, "etp": 2, "sequence_parallel": True}, 2048, 16),
        ({"dp": 8}, 4096, 1),
    ],
)
def test_bytes_by_hand(
    monkeypatch: pytest.MonkeyPatch, degrees: dict[str, Any], tokens: int, ranks: int
) -> None:
    """(P - 1) / P of the tokens of all P = etp ep ranks pass each rank; a second a byte, two nodes or one."""

    def sent(volume: Floats, members: np.ndarray[Any, Any], links: object) -> Floats:
        out: Floats = np.asarray(volume) * (members[..., -1] - 1) / members[..., -1]
        return out

    monkeypatch.setattr(experts, "ring_pass_s", sent)
    layout = Layout(**degrees)
    block = moe_mlp(context(workload(), layout))
    passed = tokens * (ranks - 1)
    assert float(np.asarray(block.forward["ep_comm"])) == pytest.approx(passed * PASSES[0])
    assert float(np.asarray(block.backward["ep_comm"])) == pytest.approx(passed * PASSES[1])


def test_traffic_by_hand() -> None:
    """32 layers, 8 ranks in a node: 7/8 of 8 x 4,096 tokens, forward and backward."""
    layout, work = Layout(dp=16, ep=8), workload()
    place = nested_placement(work.cluster, layout)
    found = estimate_layout(work, layout, place, ((32,),))
    moved = 32 * 7 * 4096 * sum(PASSES)
    assert found.level_traffic[0].by_axis["ep"] == pytest.approx(moved)
    assert "ep" not in found.level_traffic[1].by_axis
    groups = group_traffic(make_context(work, layout, place), ((32,),))
    assert groups.expert_gathers == pytest.approx(moved)
    assert (groups.experts, groups.expert_tensor) == (0, 0)


@pytest.mark.parametrize(
    ("cluster", "dispatch", "beside", "gathered"),
    [
        # A probability for each of 8 experts one way of two, 1 byte each for the tokens of 7 other ranks.
        ("gb200-nvl72", "hybridep", 2 * 8, 7 * 8),
        ("gb200-nvl72", "deduplicated", 2 * 8, 7 * 8),
        ("gb200-nvl72", "alltoall", 0, 0),
        ("dgx-h100", "hybridep", 0, 0),
        ("dgx-h100", "deepep", 0, 0),
    ],
)
def test_hybridep_sends_the_routing_by_hand(
    monkeypatch: pytest.MonkeyPatch,
    cluster: str,
    dispatch: Dispatcher,
    beside: float,
    gathered: float,
) -> None:
    """A second a byte that a rank sends to another, or that passes it in a ring; DeepEP shares its price."""

    def exchanged(volume: Floats, *_: object) -> Floats:
        return np.asarray(volume, dtype=np.float64)

    def passed(volume: Floats, members: np.ndarray[Any, Any], links: object) -> Floats:
        out: Floats = np.asarray(volume) * (members[..., -1] - 1) / members[..., -1]
        return out

    work = workload(cluster=read_cluster(cluster), moe_dispatch=dispatch)
    layout = Layout(dp=8, ep=8)
    monkeypatch.setattr(experts, "all_to_all_s", exchanged)
    monkeypatch.setattr(experts, "ring_pass_s", passed)
    block = moe_mlp(context(work, layout))
    both = 2 * 4096 * (2 * 4096 + beside)
    assert float(np.asarray(block.forward["ep_comm"])) == pytest.approx(both + 4096 * gathered)
    assert float(np.asarray(block.backward["ep_comm"])) == pytest.approx(both)


def test_traffic_of_hybridep_by_hand() -> None:
    """32 layers of four transfers, and the map of the routing once; each of 8 ranks hears of 7/8 of it."""
    layout = Layout(dp=8, ep=8)
    work = workload(cluster=read_cluster("gb200-nvl72"), gpus=8, moe_dispatch="hybridep")
    place = nested_placement(work.cluster, layout)
    groups = group_traffic(make_context(work, layout, place), ((32,),))
    assert groups.expert_gathers == pytest.approx(32 * 7 * 4096 * 8)
    plain = group_traffic(
        make_context(replace(work, moe_dispatch="deepep"), layout, place), ((32,),)
    )
    assert groups.experts == pytest.approx(plain.experts * (2 * 4096 + 2 * 8) / (2 * 4096))


def test_rings_share_the_links_of_a_node() -> None:
    layout, work = Layout(dp=16, ep=16), workload(model=wide(16))
    c = context(work, layout)
    block = moe_mlp(c)
    gathered = 16 * 4096
    members = np.array([8, 16])
    sizes = (2 * 4096, 4 * 4096, 4 * 16, 16)
    expected = sum(float(np.asarray(ring_pass_s(gathered * n, members, c.links))) for n in sizes)
    assert float(np.asarray(block.forward["ep_comm"])) == pytest.approx(expected)


def wide(number: int) -> Any:
    assert MODEL.moe is not None
    return MODEL.model_copy(update={"moe": MODEL.moe.model_copy(update={"experts": number})})


def test_all_tokens_come_however_uneven_the_choices_are() -> None:
    layout = Layout(dp=8, ep=8)
    even, uneven = (
        moe_mlp(context(workload(expert_imbalance=load), layout)).forward for load in (1.0, 2.0)
    )
    assert even["ep_comm"] == uneven["ep_comm"]
    assert float(np.asarray(even["expert_gemm"])) < float(np.asarray(uneven["expert_gemm"]))


def test_a_fused_grouped_mlp_leaves_no_activations_to_read_by_hand() -> None:
    """One expert of 14,336 a rank, 2 x 4,096 copies in MXFP8 (33/32 bytes): what a product returns (2 x 2),
    the activated half (2), its cast (2 + 2 x 33/32), and the gradients of all of that stay inside products,
    which write 8-bit results along rows and columns.
    """
    layout, copies, width = Layout(dp=8, ep=8), 2 * 4096, 14336
    work = workload(cluster=read_cluster("dgx-b200"), precision="mxfp8", moe_dispatch="hybridep")
    apart = context(replace(work, cuda_graph="partial"), layout)
    fused = context(replace(work, cuda_graph="full"), layout)
    before, after = moe_mlp(apart), moe_mlp(fused)
    eight_bits = 2 * 33 / 32
    spared = (6 + 2 + eight_bits, 10 + 2 * (2 + eight_bits))
    for passed, left, bytes_of_element in zip(
        (before.forward, before.backward), (after.forward, after.backward), spared, strict=True
    ):
        moved = (passed["memory_bound"] - left["memory_bound"]) * apart.rates.hbm_bytes_per_s
        assert float(np.asarray(moved)) == pytest.approx(bytes_of_element * copies * width)

    def product_s(columns: int, output_bytes: float) -> float:
        depth = 4096
        return float(
            np.asarray(gemm_s(copies, columns, depth, apart.rates, output_bytes=output_bytes))
        )

    more = product_s(2 * width, 2 + eight_bits / 2) - product_s(2 * width, 2)
    found = after.forward["expert_gemm"] - before.forward["expert_gemm"]
    assert float(np.asarray(found)) == pytest.approx(more)
    more = product_s(width, 2 * (2 + eight_bits)) - product_s(width, 2)
    found = after.backward["expert_gemm"] - before.backward["expert_gemm"]
    assert float(np.asarray(found)) == pytest.approx(more)


@pytest.mark.parametrize("change", [{"precision": "fp8"}, {"cuda_graph": "partial"}])
def test_experts_are_fused_in_mxfp8_and_graphs_of_the_step_alone(change: dict[str, Any]) -> None:
    work = workload(moe_dispatch="hybridep", precision="mxfp8", cuda_graph="full")
    assert activates_in_products(work)
    assert not activates_in_products(replace(work, **change))


@pytest.mark.parametrize(("ep", "summed"), [(1, 0), (8, 8 * 8 + 6)])
def test_copies_are_sorted_once_and_sums_written_for_all(ep: int, summed: int) -> None:
    """8 bytes an element of a copy in place of 12; 8 for each gathered token, 6 for each of a rank's own."""
    layout = Layout(dp=8, ep=ep)
    moved = {}
    for name in ("alltoall", "allgather"):
        c = context(workload(moe_dispatch=name), layout)
        moved[name] = (
            float(np.asarray(moe_mlp(c).forward["memory_bound"])) * c.rates.hbm_bytes_per_s
        )
    elements = 4096 * 4096
    expected = (8 - 12) * 2 * elements + summed * elements
    assert moved["allgather"] - moved["alltoall"] == pytest.approx(expected)


def test_what_is_kept_by_hand() -> None:
    """A byte and a probability for each of the rank's choices: 5 bytes x 8 experts for 4,096 tokens."""
    layout = Layout(dp=8, ep=8)
    kept = [
        float(
            np.asarray(
                activation_bytes_per_layer(workload(moe_dispatch=name), layout, experts=True)[0]
            )
        )
        for name in ("alltoall", "allgather")
    ]
    assert kept[1] - kept[0] == pytest.approx(5 * 8 * 4096)


@pytest.mark.parametrize(("ep", "more"), [(1, 0.0), (2, 2.0 * 2), (8, 8.0 * 8)])
def test_gathered_tokens_take_memory(ep: int, more: float) -> None:
    """A buffer of 2 bytes that stays; gradients of 6 where they are more than those of experts at work.

    Those are 2 copies of 2 x 2 x 14,336 + 2 x 4,096 = 65,536 bytes a token, 32 bytes an element: more than
    6 x 2 of two ranks, less than 6 x 8 of eight.
    """
    layout = Layout(dp=8, ep=ep)
    at_work = []
    for name in ("alltoall", "allgather"):
        work = workload(moe_dispatch=name)
        at_work.append(
            float(np.asarray(transients(work, layout, saved_activations(work, layout)).layer))
        )
    of_experts = 2 * (2 * 2 * 14_336 + 2 * 4096) / 4096
    expected = more if ep < 8 else more - of_experts
    assert at_work[1] - at_work[0] == pytest.approx(4096 * 4096 * expected)


def test_only_dispatchers_of_single_copies_deduplicate() -> None:
    names = ("alltoall", "allgather", "deduplicated", "deepep", "hybridep")
    assert [deduplicates(workload(moe_dispatch=name)) for name in names] == [
        False, False, True, True, True,
    ]  # fmt: skip
    assert gathered_ranks(Layout(ep=np.array([1, 4]), etp=np.array([1, 2]))).tolist() == [1, 8]  # type: ignore[union-attr]


def test_buffers_of_tokens_by_hand() -> None:
    """DeepSeek-V3's widths on nodes of 8: 4,096 tokens of 7,168 elements on each of 64 ranks, 4 experts each.

    HybridEP has room for all of them, which is why a run that DeepEP fits into ends out of memory with it.
    """
    model = load_catalog_model("deepseek-v3")
    layout = Layout(dp=64, ep=64)

    def of(dispatcher: Dispatcher, layout: Layout, cluster: str = "dgx-h100") -> float:
        work = Workload(
            model=model,
            cluster=read_cluster(cluster),
            gpus=64,
            global_batch=64,
            seq_len=4096,
            moe_dispatch=dispatcher,
        )
        return float(np.asarray(dispatch_buffers(work, layout)))

    all_tokens = 64 * 4096 * (2 * 7168 + 4 * 4 * 8 + 4 * 56)
    own = 4096 * (2 * 7168 + 4 * 4 * 64 + 4 * 56)
    received = 7 * 4096 * (3 * (2 * 7168 + 4 * 4 * 8) + 4 * 56)
    assert of("hybridep", layout) == pytest.approx(all_tokens + own + received)
    # One domain: no RDMA, and each rank's probabilities are those of all 256 experts.
    wide = 64 * 4096 * (2 * 7168 + 4 * 4 * 64 + 4 * 56)
    assert of("hybridep", layout, "gb200-nvl72") == pytest.approx(wide)
    token = 2 * 7168 + 8 + 128 * 12 + 128 * 4
    nvlink, rdma = 10 * 8 * 288 * token, 2 * 10 * 8 * 128 * (token + 16)
    assert of("deepep", layout) == pytest.approx(nvlink + rdma)
    assert of("deepep", Layout(dp=8, ep=8)) == pytest.approx(10 * 8 * 256 * token)
    assert of("alltoall", layout) == of("hybridep", Layout(dp=64)) == 0.0
    assert of("hybridep", replace(layout, micro_batch=2)) == pytest.approx(
        2 * of("hybridep", layout)
    )


def test_a_checkpoint_that_stops_early_sends_outputs_of_experts_once() -> None:
    """AutoModel's combine saves no tensor: full recomputation ends ahead of it, with half of the traffic."""
    work, layout = (
        workload(moe_dispatch="deepep"),
        Layout(dp=16, ep=8, recompute=Recompute.FULL, recompute_layers=32),
    )
    place = nested_placement(work.cluster, layout)

    def recomputed_s(combines_again: bool) -> float:
        known = constants_for(work)
        stack = replace(known.framework, combines_again=combines_again)
        c = make_context(work, layout, place, replace(known, framework=stack))
        return float(np.asarray(exact_step(c, ((32,),)).parts["recompute"]))

    c = context(work, layout)
    sent_s = float(np.asarray(moe_mlp(c).forward["ep_comm"]))
    expected_s = c.constants.framework.recompute_fraction * 32 * 0.5 * sent_s
    # A shorter pass hides a little less of the host's launches.
    assert recomputed_s(True) - recomputed_s(False) == pytest.approx(expected_s, rel=0.01)
    assert not framework_constants("nemo-automodel").combines_again


def test_transfers_that_sort_write_and_read_every_copy_once() -> None:
    """Of a rank's 8,192 copies, 4,096 wide: 4 bytes an element less forward, 6 backward."""
    layout = Layout(dp=16, ep=8, micro_batch=1)
    apart, together = (
        moe_mlp(context(workload(moe_dispatch="hybridep", permutes_in_dispatch=sorts), layout))
        for sorts in (False, True)
    )
    rates = context(workload(), layout).rates
    spared = 8192 * 4096 / (rates.hbm_bytes_per_s)
    for passes, each in (("forward", 4.0), ("backward", 6.0)):
        before, after = (
            float(np.asarray(getattr(block, passes)["memory_bound"])) for block in (apart, together)
        )
        assert before - after == pytest.approx(each * spared, rel=0.02)


def test_graphs_of_the_router_leave_what_graphs_of_attention_too_would_take() -> None:
    """Seconds of the host where it paces a layer: graphs of router and preparation leave attention's half."""
    work = workload(seq_len=64, moe_dispatch="hybridep", precision="fp8")
    layout = Layout(dp=8, ep=8)

    def host_s(graph: GraphScope) -> float:
        c = context(replace(work, cuda_graph=graph), layout)
        layer = kind_times(c).moe
        assert layer is not None
        return float(np.asarray(layer.parts["host"]))

    constants = context(work, layout).constants
    stack, partial = constants.framework, constants.shared["partial_graph_host_share"]
    spared = (1 - partial) * stack.launch_moe_layer_s - 0.5 * stack.launch_layer_s
    assert host_s("none") - host_s("feed_forward") == pytest.approx(3 * spared, rel=0.02)
