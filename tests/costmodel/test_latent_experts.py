"""Experts on a projection of the hidden width: parameters, FLOP, bytes and seconds, worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.activations import activation_bytes_per_layer
from meshwright.costmodel.buffers import dispatch_buffers, graph_bytes
from meshwright.costmodel.feed_forward import moe_mlp
from meshwright.costmodel.kernels import gemm_s, streamed_s, weight_gradient_s
from meshwright.costmodel.layer_context import Context, Parts
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.optimizers import stepping_ranks
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.states import layer_parameters_on_gpu
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.volumes import expert_passes, group_traffic, mean_rank_work, routed_bytes
from meshwright.costmodel.workload import Workload, pass_bytes
from meshwright.model_specs.adapters import (
    AdapterSpec,
    adapter_counts,
    counted_matrices,
    frozen_parameters,
    resolved,
)
from meshwright.model_specs.blocks import BlockShares
from meshwright.model_specs.parameters import (
    active_parameter_count,
    expert_parameters,
    flops_per_token,
    latent_parameters,
    moe_layer_parameters,
    parameter_count,
)
from meshwright.model_specs.reader import read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.analysis.roofline import products_of
from meshwright.planner.runs.calibration.machine import gemm_shapes_of
from tests.places import DATA

SUPER = read_model(DATA / "hf_configs" / "nemotron-3-super-120b-a12b.json")
H, L, F, SHARED = 2048, 512, 1024, 3072
"""Hidden width, latent width, width of an expert, of the shared expert."""
EXPERTS, TOP_K, TOKENS = 16, 4, 4096


def model(latent: int | None = L, **changes: Any) -> ModelSpec:
    """A model of two layers with experts; without gate, so that an expert has two matrices."""
    moe: dict[str, Any] = {
        "experts": EXPERTS,
        "top_k": TOP_K,
        "moe_ffn_hidden": F,
        "shared_experts": 1,
        "shared_ffn_hidden": SHARED,
        "latent_size": latent,
    }
    fields: dict[str, Any] = {
        "layers": 2,
        "hidden": H,
        "ffn_hidden": 0,
        "heads": 16,
        "kv_heads": 4,
        "vocab": 32_000,
        "activation": "squared_relu",
        "moe": moe,
    }
    return ModelSpec.model_validate(fields | changes)


def workload(spec: ModelSpec, **changes: Any) -> Workload:
    base = Workload(
        model=spec, cluster=read_cluster("dgx-h100"), gpus=8, global_batch=64, seq_len=TOKENS
    )
    return replace(base, **changes)


def context(layout: Layout, spec: ModelSpec | None = None, **changes: Any) -> Context:
    work = workload(spec or model(), **changes)
    return make_context(work, layout, nested_placement(work.cluster, layout))


def difference(of: Parts, less: Parts) -> dict[str, float]:
    """What one block has more than another, part by part."""
    return {name: float(np.asarray(of[name] - less[name])) for name in of}


# Parameters and FLOP.


def test_a_tiny_layer_by_hand() -> None:
    moe = {"experts": 4, "top_k": 2, "moe_ffn_hidden": 6, "latent_size": 4, "shared_experts": 1}
    tiny = model(hidden=8, heads=2, kv_heads=2, vocab=10, moe=moe)
    # 4 x 6 up and 6 x 4 down; 8 x 4 and 4 x 8 around them; the shared expert reads all 8.
    assert expert_parameters(tiny) == 24 + 24
    assert latent_parameters(tiny) == 32 + 32
    attention, norms, router, shared = 4 * 64, 2 * 8, 4 * 8, 8 * 6 + 6 * 8
    assert moe_layer_parameters(tiny) == attention + norms + router + shared + 64 + 4 * 48
    around = 2 * 10 * 8 + 8
    assert parameter_count(tiny) == 2 * moe_layer_parameters(tiny) + around
    assert parameter_count(tiny) - active_parameter_count(tiny) == 2 * 2 * 48
    with_biases = tiny.model_copy(update={"mlp_bias": True})
    assert latent_parameters(with_biases) == 64 + 4 + 8
    gated = tiny.model_copy(update={"activation": "swiglu"})
    assert expert_parameters(gated) == 3 * 24


def test_the_published_model_has_its_published_size() -> None:
    # 120.6B, of which 12.7B are active (NVIDIA, Nemotron 3 Super, March 2026).
    assert parameter_count(SUPER) == 120_668_707_840
    assert active_parameter_count(SUPER) == 12_770_237_440
    assert latent_parameters(SUPER) == 2 * 4096 * 1024
    assert expert_parameters(SUPER) == 2 * 1024 * 2688


def test_flops_are_those_of_megatron() -> None:
    """megatron/training/training.py, moe_layer_flops; it leaves the router out."""
    routed = 4 * L * F * TOP_K + 4 * H * L
    without = model(moe=None, ffn_hidden=SHARED)
    router = 2 * EXPERTS * H
    expected = 3 * 2 * (routed + router)
    more = flops_per_token(model(), TOKENS) - flops_per_token(without, TOKENS)
    assert more == pytest.approx(expected)


# Bytes.


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, 1), (2, 4, 1), (4, 2, 2)])
def test_every_tensor_rank_holds_the_projections_whole(tp: int, ep: int, etp: int) -> None:
    layout = Layout(tp=tp, dp=8 // tp, ep=ep, etp=etp, sequence_parallel=tp > 1)
    _, rest, experts = layer_parameters_on_gpu(model(), layout)
    _, rest_without, wide = layer_parameters_on_gpu(model(None), layout)
    assert rest - rest_without == 2 * H * L
    assert experts == EXPERTS * 2 * L * F / (ep * etp)
    assert wide == experts * H / L


@pytest.mark.parametrize("dispatch", ["alltoall", "deepep", "hybridep", "allgather"])
def test_tokens_travel_as_wide_as_the_projection(dispatch: str) -> None:
    layout = Layout(tp=2, dp=4, ep=4, sequence_parallel=True, num_micro_batches=16)
    narrow, wide = (context(layout, model(latent), moe_dispatch=dispatch) for latent in (L, None))
    stages = ((2,),)
    assert routed_bytes(wide, mean_rank_work(wide, stages)) == 2 * TOKENS * H / 2
    assert routed_bytes(narrow, mean_rank_work(narrow, stages)) == 2 * TOKENS * L / 2
    sent, sent_wide = group_traffic(narrow, stages), group_traffic(wide, stages)
    assert sent.experts == pytest.approx(sent_wide.experts * L / H)
    assert sent.tensor == sent_wide.tensor
    forward, backward = pass_bytes(narrow.workload)
    assert list(forward) == [2 * L, 4 * L, 4 * EXPERTS, EXPERTS]
    assert list(backward) == [2 * L, 4 * L, 4 * EXPERTS]
    exchanged = moe_mlp(narrow).forward["ep_comm"]
    assert 0 < exchanged < moe_mlp(wide).forward["ep_comm"]


def test_what_experts_exchange_takes_as_long_as_in_a_model_so_wide() -> None:
    layout = Layout(tp=2, dp=4, ep=4, sequence_parallel=True)
    narrow, small = context(layout), context(layout, model(None, hidden=L, heads=16))
    for part in ("ep_comm", "expert_gemm"):
        for block, other in zip(
            (moe_mlp(narrow).forward, moe_mlp(narrow).backward),
            (moe_mlp(small).forward, moe_mlp(small).backward),
            strict=True,
        ):
            assert block[part] == pytest.approx(other[part])


def test_buffers_of_dispatchers_are_as_wide() -> None:
    layout = Layout(dp=8, ep=8)
    for dispatch in ("deepep", "hybridep"):
        narrow = dispatch_buffers(workload(model(), moe_dispatch=dispatch), layout)
        small = dispatch_buffers(workload(model(None, hidden=L), moe_dispatch=dispatch), layout)
        assert narrow == small > 0


@pytest.mark.parametrize(("tp", "etp"), [(1, 1), (2, 1), (2, 2)])
def test_what_is_kept_by_hand(tp: int, etp: int) -> None:
    layout = Layout(tp=tp, dp=8 // tp, etp=etp, ep=2, sequence_parallel=tp > 1)
    kept, inputs = activation_bytes_per_layer(workload(model()), layout, experts=True)
    wide, wide_inputs = activation_bytes_per_layer(workload(model(None)), layout, experts=True)
    # Copies of tokens are narrower, and the combined ones are kept for the projection behind them.
    copies = TOP_K * 2 * (H - L) * etp
    assert wide - kept == pytest.approx(TOKENS / tp * (copies - 2 * L))
    assert inputs == wide_inputs
    again = replace(layout, recompute=int(Recompute.MOE_ACTIVATION))
    less, _ = activation_bytes_per_layer(workload(model()), again, experts=True)
    assert kept - less == pytest.approx(TOKENS / tp * TOP_K * 2 * F)


@pytest.mark.parametrize("latent", [L, None])
def test_experts_that_run_again_keep_the_input_of_norm_and_router(latent: int | None) -> None:
    """2 H of the layer's input and 2 H behind its norm; none of the copies, nor the shared expert's."""
    layout = Layout(dp=8, ep=2, recompute=int(Recompute.EXPERTS))
    attention, experts = (
        BlockShares(attention=1.0 - share, mamba=0.0, feed_forward=0.0, experts=share)
        for share in (0.0, 1.0)
    )
    kept, _ = activation_bytes_per_layer(
        workload(model(latent)), layout, experts=True, blocks=experts
    )
    assert kept == TOKENS * (2 * H + 2 * H)
    norms_too = replace(layout, recompute=int(Recompute.EXPERTS | Recompute.LAYERNORM))
    kept, _ = activation_bytes_per_layer(
        workload(model(latent)), norms_too, experts=True, blocks=experts
    )
    assert kept == TOKENS * 2 * H
    plain = replace(layout, recompute=0)
    for work in (workload(model(latent)), workload(model(latent), precision="fp8")):
        same = [
            activation_bytes_per_layer(work, each, experts=True, blocks=attention)[0]
            for each in (layout, plain)
        ]
        assert same[0] == same[1]


def test_quantised_inputs_of_the_projections_are_copies_of_their_own() -> None:
    layout = Layout(dp=8, ep=2)
    kept, wide = (
        activation_bytes_per_layer(workload(model(n), precision="fp8"), layout, experts=True)[0]
        for n in (L, None)
    )
    assert wide - kept == pytest.approx(TOKENS * (TOP_K * (H - L) - L - H))


def test_graphs_hold_the_products() -> None:
    layout = Layout(dp=8)
    for scope, kernels in (("full", 6), ("partial", 3), ("none", 0)):
        held, without = (
            graph_bytes(workload(model(n), cuda_graph=scope), layout) for n in (L, None)
        )
        assert held - without == kernels * 10 * 1024 * 2


# Seconds.


@pytest.mark.parametrize("latent", [L, None])
def test_experts_that_run_again_take_their_forward_pass_but_the_norm(latent: int | None) -> None:
    """Transfers among it: the checkpoint is around dispatch and combine."""
    layout = Layout(dp=8, ep=8)
    again = replace(layout, recompute=int(Recompute.EXPERTS))
    plain, run_again = (moe_mlp(context(each, model(latent))) for each in (layout, again))
    assert plain.forward == run_again.forward
    assert plain.backward == run_again.backward
    c = context(layout, model(latent))
    norm_s = streamed_s(c.element_bytes.norm[0] * c.hidden_elements, c.rates)
    expected = {**plain.forward, "memory_bound": plain.forward["memory_bound"] - norm_s}
    for name, seconds in expected.items():
        more = run_again.recompute.get(name, 0.0) - plain.recompute.get(name, 0.0)
        assert more == pytest.approx(seconds), name
    assert expected["ep_comm"] > 0
    stages = ((2,),)
    sent = [
        expert_passes(mean_rank_work(context(each, model(latent)), stages))
        for each in (layout, again)
    ]
    # Dispatch and combine of two layers, forward and backward; and forward once more.
    assert sent == [2 * 4, 2 * 6]


def test_two_products_stand_beside_the_experts() -> None:
    layout = Layout(tp=2, dp=4, ep=4, sequence_parallel=True)
    c = context(layout)
    rows = TOKENS / 2
    down, up = gemm_s(rows, L, H, c.rates), gemm_s(rows, H, L, c.rates)
    forward = difference(moe_mlp(c).forward, moe_mlp(context(layout, model(None))).forward)
    assert forward["gemm"] == pytest.approx(down + up)
    by_weight = weight_gradient_s(H, L, rows, c.rates) + weight_gradient_s(L, H, rows, c.rates)
    backward = difference(moe_mlp(c).backward, moe_mlp(context(layout, model(None))).backward)
    assert backward["gemm"] == pytest.approx(down + up + by_weight)


def test_products_are_listed_with_their_shapes() -> None:
    c = context(Layout(tp=2, dp=4, ep=4, sequence_parallel=True))
    shapes = {each[0]: list(each[1:5]) for each in products_of(c)}
    assert shapes["projection to experts"] == [TOKENS / 2, L, H, 1]
    assert shapes["projection from experts"] == [TOKENS / 2, H, L, 1]
    rows = TOKENS / 2 * TOP_K * 4 / EXPERTS
    assert shapes["experts up"] == [rows, F, L, EXPERTS / 4]
    assert shapes["experts down"] == [rows, L, F, EXPERTS / 4]
    assert {(L, H), (H, L)} <= set(gemm_shapes_of(model()))
    assert not {(L, H), (H, L)} & set(gemm_shapes_of(model(None)))


# Adapters and optimizers.


def test_adapters_beside_the_projections() -> None:
    rank = 8
    named = AdapterSpec(rank=rank, targets=("fc1_latent_proj", "fc2_latent_proj"))
    assert adapter_counts(model(), named).total == 2 * 2 * rank * (H + L)
    assert adapter_counts(model(None), named).total == 0
    experts = resolved(model(), AdapterSpec(rank=rank, targets=("experts",)), fused=True)
    assert adapter_counts(model(), experts).experts == 2 * EXPERTS * 2 * rank * (L + F)
    # PEFT's word for all linear layers finds these two, and beside Mamba not the experts' tensors.
    every = resolved(SUPER, AdapterSpec(), fused=False)
    assert {"fc1_latent_proj", "fc2_latent_proj"} <= set(every.matrices)
    assert "experts" not in every.matrices


def test_projections_of_few_bits_are_counted_with_the_matrices() -> None:
    quarter = AdapterSpec(method="qlora")
    bytes_with, bytes_without = (
        frozen_parameters(model(n), quarter).weight_bytes[0] * dense
        for n, dense in ((L, _dense(model())), (None, _dense(model(None))))
    )
    scale = 1 / 64 + 4 / (64 * 256)
    assert bytes_with - bytes_without == pytest.approx(2 * 2 * H * L * (0.5 + scale))


def _dense(spec: ModelSpec) -> int:
    return parameter_count(spec) - 2 * EXPERTS * expert_parameters(spec)


def test_a_frozen_projection_has_no_gradient_and_keeps_no_input() -> None:
    layout = Layout(dp=8, ep=2)
    attention_alone, around = (
        resolved(model(), AdapterSpec(rank=8, targets=targets), fused=False)
        for targets in (("q_proj",), ("q_proj", "fc2_latent_proj"))
    )
    c = context(layout, adapters=attention_alone)
    gained = difference(
        moe_mlp(c).backward,
        moe_mlp(context(layout, model(None), adapters=attention_alone)).backward,
    )
    by_input = gemm_s(TOKENS, H, L, c.rates) + gemm_s(TOKENS, L, H, c.rates)
    assert gained["gemm"] == pytest.approx(by_input)
    less, more = (
        activation_bytes_per_layer(workload(model(), adapters=each), layout, experts=True)[0]
        for each in (attention_alone, around)
    )
    # The input of the adapter, and the few columns between its products.
    assert more - less == pytest.approx(TOKENS * (2 * L + 2 * 8))


def test_muon_steps_the_projections_whole() -> None:
    named = {each.matrix.name: each for each in counted_matrices(SUPER, fused=True)}
    for name, shape in (("fc1_latent_proj", (4096, 1024)), ("fc2_latent_proj", (1024, 4096))):
        assert (named[name].matrix.inputs, named[name].matrix.outputs) == shape
        # Of 40 layers, and of the prediction module.
        assert (named[name].number, named[name].expert) == (41, False)
    # A model whose largest matrix is a projection: tensor parallelism makes that no smaller.
    narrow = model(L, heads=1, kv_heads=1, head_dim=16, moe=_only_projections())
    work = workload(narrow, optimizer="muon")
    one, two = (stepping_ranks(work, Layout(tp=tp), 64) for tp in (1, 2))
    assert two < one


def _only_projections() -> dict[str, Any]:
    return {"experts": EXPERTS, "top_k": 1, "moe_ffn_hidden": 16, "latent_size": L}
