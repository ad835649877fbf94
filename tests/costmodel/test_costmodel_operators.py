"""Kernels on the roofline, and the FLOP and bytes of a layer counted against independent formulas."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel import attention, feed_forward, textbook
from meshwright.costmodel import feed_forward as experts
from meshwright.costmodel import layer_context as exposed
from meshwright.costmodel import layer_context as layers_context
from meshwright.costmodel import layer_kinds as ends
from meshwright.costmodel import layer_kinds as kinds
from meshwright.costmodel.attention import attention_block, turns_stepwise, window_share
from meshwright.costmodel.collectives import ring_pass_s
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.feed_forward import dense_mlp, moe_mlp, routed_copies
from meshwright.costmodel.kernels import (
    Rates,
    attention_pair_flops,
    cast_bytes_per_element,
    element_bytes,
    gemm_s,
    streamed_s,
    transposed_slower,
    weight_cast_bytes,
    weight_gradient_s,
)
from meshwright.costmodel.layer_context import Context, Parts
from meshwright.costmodel.layer_kinds import KindTime, embedding, head, kind_times
from meshwright.costmodel.layout import Floats, Layout, Recompute
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.rates import constants_for, kernel_rates
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.volumes import LevelBytes, mean_rank_work, tensor_passes
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.parameters import active_matmul_parameters
from meshwright.model_specs.reader import load_catalog_model
from meshwright.model_specs.schema import ModelSpec


def workload(model: ModelSpec | str, gpus: int = 64, **fields: object) -> Workload:
    spec = load_catalog_model(model) if isinstance(model, str) else model
    plain = Workload(
        model=spec,
        cluster=read_cluster("dgx-a100"),
        gpus=gpus,
        global_batch=64,
        seq_len=2048,
        cuda_graph="full",
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


def context(work: Workload, layout: Layout) -> Context:
    return make_context(work, layout, nested_placement(work.cluster, layout))


@pytest.fixture(scope="module")
def rates() -> Rates:
    """Round numbers for the limits; how shapes wear on them stays as calibrated."""
    work = workload("llama-2-7b")
    known = kernel_rates(work, constants_for(work))
    return replace(
        known,
        gemm_flops=1e15,
        head_gemm_flops=5e14,
        hbm_bytes_per_s=1e12,
        operand_bytes=1.0,
        gemm_half_k=0.0,
    )


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 64))
def test_no_gemm_beats_the_roofline(rates: Rates, m: int, n: int, k: int, groups: int) -> None:
    seconds = gemm_s(m, n, k, rates, groups=groups)
    assert seconds >= groups * 2.0 * m * n * k / 1e15 * (1 - 1e-12)
    assert seconds >= groups * (m * k + k * n + 2.0 * m * n) / 1e12 * (1 - 1e-12)


def test_large_gemms_come_near_the_rate_and_thin_ones_stream(rates: Rates) -> None:
    large = 131_072
    assert gemm_s(large, large, large, rates) == pytest.approx(2 * large**3 / 1e15, rel=0.02)
    assert gemm_s(1, 8192, 8192, rates) == pytest.approx(
        (8192 + 8192**2 + 2 * 8192) / 1e12, rel=0.05
    )
    assert np.asarray(gemm_s(large, large, large, rates, sixteen_bit=True)) == pytest.approx(
        2 * np.asarray(gemm_s(large, large, large, rates)), rel=5e-3
    )


def test_compute_and_traffic_of_a_gemm_join_in_a_norm_of_2(rates: Rates) -> None:
    """A start-up of 100 rows at 16 bits is one of 200 at twice the rate: 200 rows reach half of it."""
    round_rates = replace(rates, gemm_half_edge=100.0, gemm_half_k=0.0, wave_weight=0.0)
    columns = 10**9  # so many that their own start-up does not count
    compute = 2.0 * 200 * columns * 1000 / (1e15 / 2)
    traffic = (200 * 1000 + 1000 * columns + 2.0 * 200 * columns) / 1e12
    seconds = gemm_s(200, columns, 1000, round_rates)
    assert seconds == pytest.approx((compute**2 + traffic**2) ** 0.5, rel=1e-6)


def test_a_weight_gradient_pays_for_the_gradient_it_adds_to(rates: Rates) -> None:
    """Over one token a GEMM only moves its result: 8 bytes an element to add to fp32, 2 to write 16 bits."""
    fp32 = replace(rates, weight_gradient_bytes=8.0, gemm_flops=1e30, head_gemm_flops=1e30)
    operands = 2 * 4096 / 1e12
    assert weight_gradient_s(4096, 4096, 1, fp32) == pytest.approx(8.0 * 4096**2 / 1e12 + operands)
    assert gemm_s(4096, 4096, 1, fp32) == pytest.approx(2.0 * 4096**2 / 1e12 + operands)
    grouped = weight_gradient_s(4096, 4096, 1, fp32, groups=8)
    assert grouped == pytest.approx(8 * (8.0 * 4096**2 / 1e12 + operands))


def test_a_weight_is_cast_again_where_scales_are_by_row() -> None:
    """By row and by column; with weight gradients at 16 bits by row, and whole for the gradient of inputs."""
    assert weight_cast_bytes("rowwise", 3.0) == 3.0 + 5.0 * 3.0
    assert weight_cast_bytes("rowwise_with_gw_hp", 3.0) == 3.0 + 2.0 + 3.0 * 3.0
    assert weight_cast_bytes("tensorwise", 3.0) == weight_cast_bytes(None, 3.0) == 0.0


def test_transposing_kernels_are_paced_by_the_sms(rates: Rates) -> None:
    """100 SMs at 6.4 GB/s each against HBM at 1.28 TB/s; never faster than streaming."""
    slow = replace(rates, sms=100, hbm_bytes_per_s=1.28e12)
    assert transposed_slower(slow) == pytest.approx(2.0)
    assert transposed_slower(replace(slow, hbm_bytes_per_s=1e9)) == 1.0


def test_bytes_of_a_cast() -> None:
    """FP8 on Hopper: read 2, write rows and columns; current scaling reads twice; Blackwell needs rows."""
    assert cast_bytes_per_element("fp8", "hopper", current_scaling=False) == 4.0
    assert cast_bytes_per_element("fp8", "hopper", current_scaling=True) == 6.0
    assert cast_bytes_per_element("fp8", "blackwell", current_scaling=True) == 5.0
    by_row = partial(cast_bytes_per_element, "fp8", "hopper", current_scaling=False)
    assert by_row(recipe="rowwise", slower=3.0) == 3.0 + 5.0 * 3.0
    assert by_row(recipe="rowwise_with_gw_hp") == 3.0
    assert by_row(recipe="tensorwise") == 6.0
    assert (
        cast_bytes_per_element("mxfp8", "blackwell", current_scaling=True)
        == 2.0 + 2.0 * 33.0 / 32.0
    )
    assert (
        cast_bytes_per_element("nvfp4", "blackwell", current_scaling=True) == 6.0 + 2.0 * 9.0 / 16.0
    )
    assert cast_bytes_per_element("bf16", "blackwell", current_scaling=True) == 0.0


def test_streaming_and_attention_counts(rates: Rates) -> None:
    assert streamed_s(2e12, rates) == 2.0
    assert attention_pair_flops(10, 20, 3, 4, 5) == 2 * 10 * 20 * 3 * (4 + 5)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMMs take a second a FLOP, collectives a second a byte that a member sends."""

    def flops(
        m: Floats,
        n: Floats,
        k: Floats,
        rates: Rates,
        *,
        sixteen_bit: bool = False,
        groups: Floats = 1.0,
        imbalance: Floats = 1.0,
        output_bytes: float = 2.0,
    ) -> Floats:
        out: Floats = 2.0 * np.asarray(m) * imbalance * n * k * groups
        return out

    def sent(
        buffer: Floats, members: np.ndarray[tuple[int, ...], np.dtype[np.int64]], links: object
    ) -> Floats:
        out: Floats = np.asarray(buffer) * (members[..., -1] - 1) / members[..., -1]
        return out

    def exchanged(
        buffer: Floats,
        members: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        links: object,
        reach: np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None = None,
    ) -> Floats:
        return sent(np.asarray(buffer) * (1.0 if reach is None else reach[..., 0]), members, links)

    for module in (attention, ends, experts, feed_forward, kinds):
        monkeypatch.setattr(module, "gemm_s", flops)
    for module in (ends, experts, feed_forward, kinds):
        monkeypatch.setattr(module, "weight_gradient_s", flops)
    monkeypatch.setattr(
        layers_context, "all_reduce_s", lambda *buffer: 2.0 * np.asarray(sent(*buffer))
    )
    for module in (layers_context, experts, exposed):
        monkeypatch.setattr(module, "ring_pass_s", sent)
    monkeypatch.setattr(exposed, "neighbour_ring_s", sent)
    for module in (experts, exposed):
        monkeypatch.setattr(module, "all_to_all_s", exchanged)


def flop(kind: KindTime | None) -> float:
    if kind is None:
        return 0.0
    return sum(float(np.asarray(kind.parts.get(name, 0.0))) for name in ("gemm", "expert_gemm"))


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    "name",
    ["gpt3-175b", "llama-3-70b", "mixtral-8x7b", "deepseek-v2", "deepseek-v3", "qwen3-30b-a3b"],
)
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=4, sequence_parallel=True), Layout(cp=2, dp=2, micro_batch=2)]
)
def test_gemm_flop_of_a_step_are_6_per_weight_and_token(name: str, layout: Layout) -> None:
    """Of every rank together, whatever the layout; the router's down to the latents of MLA."""
    work = workload(name)
    model, gpus = work.model, int(layout.gpus)
    times = kind_times(context(replace(work, gpus=gpus), layout))
    done = model.dense_layers * flop(times.dense) + model.moe_layers * flop(times.moe)
    done += flop(times.head) + model.mtp_layers * flop(times.mtp)
    tokens = 2048 * int(layout.micro_batch) * int(layout.dp)
    assert done * gpus == pytest.approx(6 * tokens * active_matmul_parameters(model), rel=2e-3)


@pytest.mark.usefixtures("counted")
def test_experts_do_the_same_work_wherever_they_lie() -> None:
    work = workload("mixtral-8x7b", gpus=8)
    layouts = [
        Layout(dp=8),
        Layout(dp=8, ep=8),
        Layout(tp=4, dp=2, ep=8),
        Layout(tp=4, dp=2, ep=2, etp=4),
    ]
    found = []
    for layout in layouts:
        times = kind_times(context(work, layout))
        assert times.moe is not None
        found.append(float(np.asarray(times.moe.parts["expert_gemm"])) / int(layout.dp))
    assert found == pytest.approx([found[0], found[0], found[0] * 8 / 2 / 4, found[0]])


@pytest.mark.usefixtures("counted")
def test_more_ranks_than_key_value_heads_repeat_them() -> None:
    model = ModelSpec(layers=4, hidden=1024, ffn_hidden=4096, heads=16, kv_heads=2, vocab=1000)
    per_head = 6 * 2048 * 1024 * 64
    one, eight = (
        float(
            np.asarray(
                attention_block(
                    context(workload(model, gpus=8), Layout(tp=tp, dp=8 // tp))
                ).forward["gemm"]
            )
        )
        for tp in (1, 8)
    )
    assert 3 * one == pytest.approx(per_head * (2 * 16 + 2 * 2))
    assert 3 * eight == pytest.approx(per_head * (2 * 2 + 2 * 1))


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_volume_of_a_layer(sequence_parallel: bool) -> None:
    """Four all-reduces, or as many gathers and scatters: 352 MB for GPT-3 on 8 ranks, with nothing beside."""
    layout = Layout(tp=8, sequence_parallel=sequence_parallel)
    c = context(replace(workload("gpt3-175b", gpus=8), launch_blocking=True), layout)
    sent = sum(
        float(np.asarray(parts["tp_comm"]))
        for block in (attention_block(c), dense_mlp(c, c.workload.model.ffn_hidden))
        for parts in (block.forward, block.backward)
    )
    assert sent == pytest.approx(textbook.tensor_parallel_layer_bytes(2048, 12_288, 8))
    assert sent == pytest.approx(352e6, rel=2e-3)


def test_blocking_all_reduces_wait_for_the_slowest_rank() -> None:
    """Two all-reduces forward and two backward in a dense layer: four waits, and none on one rank."""
    work = replace(
        workload("gpt3-175b", gpus=8, framework="megatron-deepspeed"), launch_blocking=True
    )

    def comm_s(tp: int, wait_s: float) -> float:
        c = context(work, Layout(tp=tp, dp=8 // tp))
        stack = replace(c.constants.framework, collective_wait_s=wait_s)
        c = replace(c, constants=replace(c.constants, framework=stack))
        return sum(
            float(np.asarray(parts["tp_comm"]))
            for block in (attention_block(c), dense_mlp(c, c.workload.model.ffn_hidden))
            for parts in (block.forward, block.backward)
        )

    assert comm_s(8, 1e-3) - comm_s(8, 0.0) == pytest.approx(4e-3)
    assert comm_s(1, 1e-3) == 0.0


def test_transformers_add_up_the_gradient_of_an_input_behind_each_matrix_that_reads_it() -> None:
    """All-reduces of two passes: two forward, backward three for q, k and v, two for gate and up."""
    layout = Layout(tp=4, dp=2)
    c = context(workload("llama-3-8b", gpus=8, framework="fsdp2"), layout)
    blocks = attention_block(c), dense_mlp(c, c.workload.model.ffn_hidden)
    sum_s = float(np.asarray(c.tensor_sum_s))
    passes = [each for block in blocks for each in (block.forward, block.backward)]
    sent = [float(np.asarray(each["tp_comm"])) for each in passes]
    assert sent == pytest.approx([sum_s, 3 * sum_s, sum_s, 2 * sum_s])
    work = mean_rank_work(c, ((32,),))
    assert tensor_passes(c, work) == pytest.approx(2.0 * work.layers * (2 + 3 + 2))


@pytest.mark.parametrize(("sequence_parallel", "of_gate"), [(False, 2), (True, 1)])
def test_aleph_alpha_has_one_matrix_for_queries_keys_and_values_and_a_gate_apart(
    sequence_parallel: bool, of_gate: int
) -> None:
    """Sequence parallelism gathers an input once, behind the norm, and scatters its gradient there."""
    layout = Layout(tp=4, dp=2, sequence_parallel=sequence_parallel)
    c = context(workload("llama-3-8b", gpus=8, framework="aa-scaling"), layout)
    sum_s = float(np.asarray(c.tensor_sum_s))
    blocks = attention_block(c), dense_mlp(c, c.workload.model.ffn_hidden)
    sent = [float(np.asarray(block.backward["tp_comm"])) for block in blocks]
    assert sent == pytest.approx([sum_s, of_gate * sum_s])
    work = mean_rank_work(c, ((32,),))
    assert tensor_passes(c, work) == pytest.approx(2.0 * work.layers * (2 + 1 + of_gate))


@pytest.mark.parametrize(("tp", "copied"), [(1, (0.0, 0.0)), (4, (8.0, 4.0 / 4))])
def test_a_loss_of_whole_logits_gathers_them(tp: int, copied: tuple[float, float]) -> None:
    """Two bytes a logit round the ring; 12 and 18 of cross entropy, 4 to find the largest, and copies."""
    c = context(workload("llama-3-8b", gpus=8, framework="aa-scaling"), Layout(tp=tp, dp=8 // tp))
    logits = float(c.tokens) * c.workload.model.vocab
    norm = 4.0 * float(np.asarray(c.hidden_elements))
    gathered_s = float(np.asarray(ring_pass_s(2.0 * logits, c.placement.tp, c.links)))
    whole = head(c)
    assert whole.forward["tp_comm"] - c.tensor_pass_s == pytest.approx(gathered_s)
    moved = norm + (12.0 + 4.0 + copied[0]) * logits, 1.5 * norm + (18.0 + copied[1]) * logits
    seconds = [float(np.asarray(each["memory_bound"])) for each in (whole.forward, whole.backward)]
    assert seconds == pytest.approx([float(streamed_s(size, c.rates)) for size in moved])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_backward_collectives_run_beside_the_products(sequence_parallel: bool) -> None:
    """Megatron hides a column-parallel product's backward collectives under its GEMMs, but for interference;
    with sequence parallelism the gather of the output's gradient stays, and a second gather of the input
    joins the hidden ones."""
    work = workload("gpt3-175b", gpus=8, framework="megatron-lm")
    layout = Layout(tp=8, micro_batch=4, sequence_parallel=sequence_parallel)
    c = context(work, layout)
    alone = context(replace(work, launch_blocking=True), layout)
    passed, share = float(np.asarray(c.tensor_pass_s)), c.constants.framework.tp_interference
    forward, backward = (
        float(np.asarray(parts["tp_comm"]))
        for block in (attention_block(c),)
        for parts in (block.forward, block.backward)
    )
    blocked = attention_block(alone)
    assert forward == float(np.asarray(blocked.forward["tp_comm"]))
    whole = float(np.asarray(blocked.backward["tp_comm"]))
    hidden = passed * (1 + 2 * share) if sequence_parallel else share * whole
    assert backward == pytest.approx(hidden)
    assert backward < whole


def test_eager_operators_move_what_their_code_says() -> None:
    """Eager RMSNorm 36 bytes an element forward and 76 backward, residual 6 and 6, rotary 20, gate 10 and 18;
    one kernel each: 4 and 6, 6 and 6, 4, 6 and 10."""
    work = workload("llama-3-8b", gpus=8)
    eager = element_bytes(work, fused=False, eager=True, fused_norm=False)
    fused = element_bytes(work, fused=True, eager=False, fused_norm=True)
    assert (eager.around, eager.rotary, eager.activation) == ((42, 82), (20, 20), (10, 18))
    assert (fused.around, fused.rotary, fused.activation) == ((10, 12), (4, 4), (6, 10))


@pytest.mark.parametrize(
    ("recipe", "backward"),
    [
        # Gradient, input, weight: by tensor cast (33) once, all three copied into the other order (2).
        ("tensorwise", (35, 2, 2)),
        # By row along both orders: the gradient twice and copied, the others once more and copied.
        ("rowwise", (68, 35, 35)),
        # Weight gradients at 16 bits: the gradient once, the weight once more and copied.
        ("rowwise_with_gw_hp", (33, 0, 35)),
    ],
)
def test_eager_casts_are_six_kernels_of_each_product(
    recipe: str, backward: tuple[int, int, int]
) -> None:
    """Three matrices of 4,096 by 14,336 over 2,048 tokens: gate and up each cast the input, down casts its
    own, 33 bytes an element, and each its weight; recomputed without magnitude and maximum (27)."""
    layout = Layout(dp=8, zero_stage=3, recompute=Recompute.OPERATORS)
    settings = {"gpus": 8, "cluster": read_cluster("dgx-h100"), "framework": "torchtitan-eager"}
    narrow, wide = (
        context(workload("llama-3-8b", **settings, **each), layout)  # type: ignore[arg-type]
        for each in ({"precision": "fp8", "fp8_recipe": recipe}, {"precision": "bf16"})
    )
    cast, plain = dense_mlp(narrow, 14336), dense_mlp(wide, 14336)
    inputs, gradients = 2048 * (2 * 4096 + 14336), 2048 * (2 * 14336 + 4096)
    weights = 3 * 4096 * 14336
    of_gradient, of_input, of_weight = backward
    moved = {
        "forward": 33 * (inputs + weights),
        "backward": of_gradient * gradients + of_input * inputs + of_weight * weights,
        "recompute": 27 * (inputs + weights),
    }
    for turn, expected in moved.items():
        more, less = (float(np.asarray(getattr(b, turn)["memory_bound"])) for b in (cast, plain))
        assert more - less == pytest.approx(expected / narrow.rates.hbm_bytes_per_s)


def test_experts_run_the_operators_of_their_stack() -> None:
    """Mixtral on transformers: two experts of 14,336 for a token, gates of 10 and 18 bytes an element where
    one kernel moves 6 and 10, and around them 42 and 82 of the hidden width in place of 10 and 12."""
    layout = Layout(dp=8, zero_stage=3)
    eager, fused = (
        context(workload("mixtral-8x7b", gpus=8, framework=framework), layout)
        for framework in ("fsdp2", "torchtitan")
    )
    blocks = moe_mlp(eager), moe_mlp(fused)
    further = [
        [float(np.asarray(getattr(each, passes)["memory_bound"])) for each in blocks]
        for passes in ("forward", "backward")
    ]
    width, hidden = 2 * 14336, 4096
    for (more, less), moved in zip(
        further, (4 * width + 32 * hidden, 8 * width + 70 * hidden), strict=True
    ):
        assert more - less == pytest.approx(2048 * moved / eager.rates.hbm_bytes_per_s)


def test_a_loop_over_experts_gathers_and_sums_for_each() -> None:
    """Mixtral on transformers 4.45, of each element of a token's hidden width: forward 14 bytes of each of
    two copies and 2 of the zeroed output, in place of 8 a copy; backward 22 a copy, 2 for each of eight
    zeroed gradients and 6 for each of seven sums, in place of 12 a copy."""
    layout = Layout(dp=8, zero_stage=3)
    looped, grouped = (
        context(workload("mixtral-8x7b", gpus=8, framework=framework), layout)
        for framework in ("fsdp2-2024", "fsdp2")
    )
    blocks = moe_mlp(looped), moe_mlp(grouped)
    for passes, moved in (("forward", 2 * 14 + 2 - 2 * 8), ("backward", 2 * 22 + 16 + 42 - 2 * 12)):
        by_loop, by_group = (
            float(np.asarray(getattr(each, passes)["memory_bound"])) for each in blocks
        )
        expected = 2048 * 4096 * moved / looped.rates.hbm_bytes_per_s
        assert by_loop - by_group == pytest.approx(expected)


def test_a_loop_over_experts_is_launched_expert_by_expert() -> None:
    """On a few tokens a layer takes what its host does: three passes of half a layer, ten operators of the
    router and twelve of each of eight experts, and a wait for two of each expert's."""
    work = workload("mixtral-8x7b", gpus=8, framework="fsdp2-2024", cuda_graph="none", seq_len=8)
    small = context(work, Layout(dp=8, zero_stage=3))
    stack = small.constants.framework
    times = kind_times(small)
    assert times.moe is not None
    launches_s = 0.5 * stack.launch_layer_s + (10 + 8 * 12) * stack.operator_launch_s
    waits_s = 8 * 2 * stack.operator_launch_s
    taken_s = sum(float(np.asarray(part)) for part in times.moe.parts.values())
    assert taken_s == pytest.approx(3 * launches_s + waits_s, rel=0.1)


@pytest.mark.parametrize(("train", "of_each"), [("full", 8), ("lora", 4)])
def test_biases_of_experts_are_launched_expert_by_expert(train: str, of_each: int) -> None:
    """gpt-oss-20B on one GPU: on a few tokens its layer takes 32 times a product, a sum and their gradients
    longer than without biases, and three operators that join them."""
    adapters = AdapterSpec(rank=16, targets=("q_proj",)) if train == "lora" else None
    model = load_catalog_model("gpt-oss-20b")
    assert model.moe is not None
    without = model.model_copy(update={"moe": model.moe.model_copy(update={"expert_bias": False})})
    taken = []
    for each in (model, without):
        work = workload(
            each,
            gpus=1,
            framework="megatron-bridge",
            cuda_graph="none",
            seq_len=8,
            adapters=adapters,
        )
        small = context(work, Layout())
        times = kind_times(small)
        assert times.moe is not None
        taken.append(sum(float(np.asarray(part)) for part in times.moe.parts.values()))
    operators = 32 * of_each + 3
    expected = operators * small.constants.framework.operator_launch_s
    assert taken[0] - taken[1] == pytest.approx(expected, rel=0.1)


def test_every_second_product_runs_again() -> None:
    """Operator-level checkpointing of Llama repeats keys, attention's output and the second input: of Llama 3
    8B's 218 million weights a layer, 80 million."""
    c = context(workload("llama-3-8b", gpus=8), Layout(dp=8, recompute=Recompute.OPERATORS))
    blocks = attention_block(c), dense_mlp(c, c.workload.model.ffn_hidden)
    again, forward = (
        sum(float(np.asarray(parts["gemm"])) for parts in kinds)
        for kinds in ([b.recompute for b in blocks], [b.forward for b in blocks])
    )
    assert again / forward == pytest.approx(79.7 / 218.1, rel=0.03)


@pytest.mark.usefixtures("counted")
def test_expert_parallel_volume_of_a_layer() -> None:
    work = replace(workload("mixtral-8x7b", gpus=8), moe_dispatch="alltoall")
    times = kind_times(context(work, Layout(dp=8, ep=8)))
    assert times.moe is not None
    assert times.moe.parts["ep_comm"] == pytest.approx(
        textbook.expert_parallel_layer_bytes(2048, 2, 4096, 8)
    )
    uneven = kind_times(context(replace(work, expert_imbalance=1.5), Layout(dp=8, ep=8)))
    assert uneven.moe is not None
    assert uneven.moe.parts["ep_comm"] == pytest.approx(
        1.5 * np.asarray(times.moe.parts["ep_comm"])
    )


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    ("name", "kv_width"), [("llama-3-70b", 2 * 8 * 128), ("deepseek-v2", 128 * (192 + 128))]
)
def test_ring_attention_passes_keys_and_values_round(name: str, kv_width: int) -> None:
    """With nothing to hide under: forward once, backward with their gradients. MLA passes them unpacked."""
    c = context(workload(name, gpus=4), Layout(cp=4))
    block = attention_block(c)
    once = 3 * (2048 / 4) * kv_width * 2
    core_f, core_b = (
        float(np.asarray(parts["attention"])) for parts in (block.forward, block.backward)
    )
    assert block.forward["cp_comm"] == pytest.approx(max(once - core_f, once / 4))
    assert block.backward["cp_comm"] == pytest.approx(max(2 * once - core_b, once / 4))


def test_copies_of_a_token() -> None:
    work = workload("deepseek-v3")
    assert work.model.moe is not None
    anywhere = work.model.moe.model_copy(
        update={"router_groups": None, "router_groups_per_token": None}
    )
    plain = replace(work, model=work.model.model_copy(update={"moe": anywhere}))
    blocks = np.array([1.0, 2.0, 8.0, 64.0])
    free = routed_copies(plain, blocks)
    assert free == pytest.approx(
        [1, 2 * (1 - 1 / 2**8), 8 * (1 - (7 / 8) ** 8), 64 * (1 - (63 / 64) ** 8)]
    )
    limited = routed_copies(work, blocks)
    assert limited == pytest.approx([1, free[1], 4 * (1 - (3 / 4) ** 8), 32 * (1 - (31 / 32) ** 8)])
    assert routed_copies(replace(work, moe_dispatch="alltoall"), blocks).tolist() == [8, 8, 8, 8]


@given(st.lists(st.floats(1.0, 512.0), min_size=2, max_size=8))
def test_more_blocks_take_more_copies(blocks: list[float]) -> None:
    for name in ("deepseek-v3", "mixtral-8x7b"):
        copies = routed_copies(workload(name), np.sort(np.array(blocks)))
        assert np.all(np.diff(copies) >= -1e-9)
        assert np.all(copies <= 8 + 1e-9)
        assert np.all(copies >= 1 - 1e-9)


def test_windowed_attention_keeps_its_share() -> None:
    model = ModelSpec(
        layers=4,
        hidden=1024,
        ffn_hidden=4096,
        heads=8,
        kv_heads=8,
        vocab=1000,
        sliding_window=128,
        full_attention_every=2,
    )
    # Queries come in blocks of 256, whose diagonal costs half a block and whose window's far edge another.
    windowed = (128 - 128**2 / (2 * 1024) + 256) / 512
    c = context(replace(workload(model, gpus=1), seq_len=1024), Layout())
    assert window_share(c) == pytest.approx(0.5 + 0.5 * windowed)
    assert window_share(context(replace(workload(model, gpus=1), seq_len=128), Layout())) == 1.0
    chunked = model.model_copy(update={"chunked_windows": True})
    in_chunks = replace(workload(chunked, gpus=1), seq_len=1024, framework="torchtitan")
    c = context(in_chunks, Layout())
    assert window_share(c) == pytest.approx(0.5 + 0.5 * (128 / 2 + 128) / 512)
    # Megatron slides a window as long.
    c = context(replace(in_chunks, framework="megatron"), Layout())
    assert window_share(c) == pytest.approx(0.5 + 0.5 * windowed)


@pytest.mark.parametrize(
    ("cluster", "window", "shape", "measured_ms"),
    [
        ("dgx-h200", 1024, (2, 64, 4096), 0.358 + 1.042),
        ("dgx-h200", 1024, (2, 64, 16384), 1.499 + 4.392),
        ("gb200-nvl72", 128, (2, 128, 4096), 0.210 + 0.465),
        ("gb300-nvl72", 128, (2, 128, 8192), 0.397 + 0.862),
    ],
)
def test_windows_take_about_as_long_as_measured_kernels(
    cluster: str, window: int, shape: tuple[int, int, int], measured_ms: float
) -> None:
    # cuDNN 9.19 and 9.22, heads of 64: NVIDIA/cudnn-frontend 3929da2, benchmark/sdpa_benchmark_training,
    # results of gpt_oss. By area alone windows of 128 are priced at 0.26 and 0.28 of these.
    batch, heads, seq_len = shape
    model = ModelSpec(
        layers=1, hidden=64 * heads, ffn_hidden=64, heads=heads, kv_heads=heads, vocab=1000,
        head_dim=64, sliding_window=window, full_attention_every=0,
    )  # fmt: skip
    work = replace(workload(model, gpus=1), seq_len=seq_len, cluster=read_cluster(cluster))
    block = attention_block(context(work, Layout(micro_batch=batch)))
    priced_ms = 1e3 * (seconds(block.forward)["attention"] + seconds(block.backward)["attention"])
    assert priced_ms == pytest.approx(measured_ms, rel=0.29)


def test_biases_behind_experts_move_bytes_of_their_own() -> None:
    model = load_catalog_model("gpt-oss-20b")
    assert model.moe is not None
    moe = model.moe.model_copy(update={"expert_bias": False})
    plain = model.model_copy(update={"moe": moe})
    layout = Layout(ep=4, dp=8, micro_batch=2)
    copies = 2 * 2048 * 4 * 2880  # sequences, tokens, experts of a token, elements
    for graph, precision, moved in (
        ("none", "bf16", (28.0, 40.0)),
        ("full", "bf16", (28.0, 40.0)),
        ("full", "mxfp8", (0.0, 0.0)),  # the fused grouped MLP has them in its products
    ):
        cluster = read_cluster("dgx-b200")
        fields = {"cluster": cluster, "cuda_graph": graph, "precision": precision}
        biased, unbiased = (
            moe_mlp(context(workload(each, gpus=8, **fields), layout)) for each in (model, plain)
        )
        rate = context(workload(model, gpus=8, **fields), layout).rates.hbm_bytes_per_s
        for passes, bytes_of_element in zip(("forward", "backward"), moved, strict=True):
            more_s = (
                seconds(getattr(biased, passes))["memory_bound"]
                - seconds(getattr(unbiased, passes))["memory_bound"]
            )
            assert more_s == pytest.approx(bytes_of_element * copies / rate, rel=1e-6, abs=1e-9)


def seconds(parts: Parts) -> dict[str, float]:
    return {name: float(np.asarray(x)) for name, x in parts.items()}


def test_recomputing_everything_costs_at_most_a_forward_pass_more() -> None:
    for name in ("llama-2-7b", "mixtral-8x7b"):
        times = kind_times(context(workload(name, gpus=8), Layout(dp=8)))
        kind = times.dense or times.moe
        assert kind is not None
        whole, backward = float(np.asarray(kind.seconds)), float(np.asarray(kind.backward_s))
        assert 0 < float(np.asarray(kind.recompute_s)) <= (whole - backward) * 1.001


def test_recomputing_norms_costs_time_where_they_stand_apart() -> None:
    """Transformer Engine fuses the norms of dense layers without MLA: Megatron has IdentityOp for them."""
    norms = Layout(dp=8, recompute=int(Recompute.LAYERNORM))
    more = {}
    for name in ("llama-2-7b", "mixtral-8x7b"):
        work = workload(name, gpus=8)
        plain, chosen = (kind_times(context(work, layout)) for layout in (Layout(dp=8), norms))
        before, after = plain.dense or plain.moe, chosen.dense or chosen.moe
        assert before is not None
        assert after is not None
        more[name] = float(np.asarray(after.seconds)) - float(np.asarray(before.seconds))
    assert more["llama-2-7b"] == 0
    assert more["mixtral-8x7b"] > 0


def test_shared_experts_gather_and_scatter_their_tokens() -> None:
    """Their two products are column- and row-parallel like those of a dense feed-forward."""
    work = workload("deepseek-v2", gpus=8)
    split = Layout(tp=8, ep=8, sequence_parallel=True)
    assert seconds(dense_mlp(context(work, split), 3072, norm=False).forward)["tp_comm"] > 0
    whole = Layout(dp=8, ep=8)
    assert seconds(dense_mlp(context(work, whole), 3072, norm=False).forward)["tp_comm"] == 0


@pytest.mark.parametrize("flag", [Recompute.MLP, Recompute.CORE_ATTENTION])
def test_selective_recomputation_adds_some_time_and_less_than_a_full_one(flag: Recompute) -> None:
    work = workload("llama-2-7b", gpus=8)
    plain, chosen = (
        kind_times(context(work, Layout(dp=8, recompute=int(m)))).dense for m in (0, flag)
    )
    assert plain is not None
    assert chosen is not None
    more = float(np.asarray(chosen.seconds)) - float(np.asarray(plain.seconds))
    assert 0 < more < float(np.asarray(plain.recompute_s))


def test_embedding_without_tensor_parallelism_sends_nothing() -> None:
    c = context(workload("llama-2-7b", gpus=8), Layout(dp=8))
    assert seconds(embedding(c).forward)["tp_comm"] == 0.0


def traffic(
    work: Workload, layout: Layout, stages: tuple[tuple[int, ...], ...]
) -> dict[str, LevelBytes]:
    found = estimate_layout(work, layout, nested_placement(work.cluster, layout), stages)
    return {level.level: level for level in found.level_traffic}


def test_traffic_of_gpt3_by_level() -> None:
    """TP 8 stays in the node: 352 MB a layer and a gather of saved inputs more; PP 8 and DP 8 leave it."""
    work = workload("gpt3-175b", gpus=512)
    layout = Layout(tp=8, pp=8, dp=8, num_micro_batches=8, sequence_parallel=True)
    inside, outside = traffic(work, layout, ((12,),) * 8).values()
    assert inside.by_axis == pytest.approx({"tp": 8 * 12 * 352.3e6 * 5 / 4}, rel=1e-3)
    assert set(outside.by_axis) == {"dp", "pp"}
    boundary = np.asarray(textbook.pipeline_boundary_bytes(2048, 12_288)) / 8
    assert outside.by_axis["pp"] == pytest.approx(8 * boundary * 7 / 8)
    assert outside.busy_s == pytest.approx(outside.utilisation * _step_s(work, layout), rel=1e-9)


def _step_s(work: Workload, layout: Layout) -> float:
    found = estimate_layout(work, layout, nested_placement(work.cluster, layout), ((12,),) * 8)
    return float(np.asarray(found.step_time_s))


def test_full_recomputation_sends_the_forward_pass_again() -> None:
    work = workload("gpt3-175b", gpus=64)
    plain = Layout(tp=8, pp=8, num_micro_batches=8)
    again = replace(plain, recompute=int(Recompute.FULL), recompute_layers=6)
    stages = ((12,),) * 8
    before, after = (
        traffic(work, layout, stages)["nvlink"].by_axis["tp"] for layout in (plain, again)
    )
    assert after == pytest.approx(before * (4 + 2 / 2) / 4)


def test_interleaving_crosses_every_boundary_more_often() -> None:
    """p v - 1 boundaries, and with v > 1 the last rank feeds the first."""
    work = workload("gpt3-175b", gpus=64)
    one, three = (
        Layout(tp=8, pp=8, num_micro_batches=8),
        Layout(tp=8, pp=8, vpp=3, num_micro_batches=8),
    )
    plain = traffic(work, one, ((12,),) * 8)["fabric"].by_axis["pp"]
    interleaved = traffic(work, three, ((4, 4, 4),) * 8)["fabric"].by_axis["pp"]
    assert interleaved / plain == pytest.approx((8 * 3 - 1) / 7)


def test_expert_traffic_counts_what_leaves_the_node() -> None:
    work = replace(workload("mixtral-8x7b", gpus=16), moe_dispatch="alltoall")
    layout = Layout(tp=2, dp=8, ep=8, num_micro_batches=1)
    levels = traffic(work, layout, ((32,),))
    sent = 2048 / 2 * 2 * 4096 * 2 * 4 * 32
    assert levels["nvlink"].by_axis["ep"] == pytest.approx(sent * 7 / 8)
    assert "ep" not in levels["fabric"].by_axis
    wide = traffic(work, Layout(dp=16, ep=16 // 2, cp=1), ((32,),))
    assert wide["nvlink"].by_axis["ep"] == pytest.approx(2 * sent * 7 / 8)
    spread = estimate_layout(
        work, layout, nested_placement(work.cluster, layout, ("dp", "tp", "cp", "pp")), ((32,),)
    )
    assert spread.level_traffic[-1].by_axis["ep"] == pytest.approx(sent * 4 / 8)


def test_rotary_embeddings_step_by_step_move_what_their_operators_do() -> None:
    """Of queries and keys, 5,120 elements a token: 20 bytes more forward, 30 backward."""
    layout = Layout(dp=16, num_micro_batches=4)
    fused, stepwise = (
        context(workload("qwen3-8b", gpus=16, seq_len=4096, stepwise_rotary=said), layout)
        for said in (None, True)
    )
    before, after = attention_block(fused), attention_block(stepwise)
    elements = 4096 * (32 + 8) * 128
    for passes, each in (("forward", 20.0), ("backward", 30.0)):
        more_s = float(
            getattr(after, passes)["memory_bound"] - getattr(before, passes)["memory_bound"]
        )
        assert more_s == pytest.approx(float(streamed_s(each * elements, fused.rates)), rel=0.02)
    latent = workload("deepseek-v3", stepwise_rotary=True)
    assert not turns_stepwise(latent)


@pytest.mark.parametrize(
    ("framework", "stepwise"),
    [("megatron", True), ("megatron-bridge", True), ("torchtitan", False)],
)
def test_megatron_turns_step_by_step_under_yarn(framework: str, stepwise: bool) -> None:
    """`validate_args` takes the fusion off wherever positions are not plain rotary ones."""
    assert turns_stepwise(workload("gpt-oss-20b", framework=framework)) == stepwise
    assert not turns_stepwise(workload("llama-3.1-8b", framework=framework))


def test_operators_of_rotary_embeddings_take_the_host_their_time() -> None:
    """44 operators of 16.7 us where the host paces every layer, 36 of them."""
    layout = Layout(tp=4, dp=1, num_micro_batches=32)
    fused, stepwise = (
        kind_times(
            context(
                workload(
                    "qwen3-8b",
                    gpus=4,
                    seq_len=512,
                    stepwise_rotary=said,
                    framework="megatron-bridge",
                    cuda_graph="none",
                ),
                layout,
            )
        ).dense
        for said in (None, True)
    )
    assert fused is not None
    assert stepwise is not None
    assert float(stepwise.seconds - fused.seconds) == pytest.approx(44 * 16.7e-6, rel=0.05)


@pytest.mark.parametrize(
    ("model", "block", "forward", "backward"),
    [("qwen3-8b", "dense", 8.0, 16.0), ("qwen3-30b-a3b", "experts", 20.0, 50.0)],
)
def test_an_activation_step_by_step_moves_what_its_operators_do(
    model: str, block: str, forward: float, backward: float
) -> None:
    """Silu, a sum with an offset of 0, a product, halves joined backward: 14 and 26 bytes an element for 6
    and 10; of experts also a product with a 32-bit probability and casts, 26 and 60.
    """
    layout = Layout(dp=16, ep=16 if block == "experts" else 1, num_micro_batches=4)
    fused, stepwise = (
        context(workload(model, gpus=16, seq_len=4096, stepwise_activation=said), layout)
        for said in (None, True)
    )
    if block == "dense":
        elements = 4096 * 12288
        before, after = (dense_mlp(c, 12288) for c in (fused, stepwise))
    else:
        elements = 4096 * 8 * 768
        before, after = (moe_mlp(c) for c in (fused, stepwise))
    for passes, each in (("forward", forward), ("backward", backward)):
        more_s = float(
            getattr(after, passes)["memory_bound"] - getattr(before, passes)["memory_bound"]
        )
        assert more_s == pytest.approx(float(streamed_s(each * elements, fused.rates)), rel=0.02)
    assert not workload("gpt3-175b", stepwise_activation=True).activates_stepwise


def test_operators_of_an_activation_take_the_host_their_time() -> None:
    """5 operators more of 16.7 us where the host paces every dense layer."""
    layout = Layout(tp=4, dp=1, num_micro_batches=32)
    seconds = []
    for said in (None, True):
        work = workload(
            "qwen3-8b",
            gpus=4,
            seq_len=512,
            stepwise_activation=said,
            framework="megatron-bridge",
            cuda_graph="none",
        )
        dense = kind_times(context(work, layout)).dense
        assert dense is not None
        seconds.append(float(dense.seconds))
    assert seconds[1] - seconds[0] == pytest.approx(5 * 16.7e-6, rel=0.1)


@pytest.mark.parametrize(
    ("module", "operators"),
    [
        (Recompute.CORE_ATTENTION, 17 + 15),
        (Recompute.LAYERNORM, 2 * (17 + 3)),
        (Recompute.MOE_ACTIVATION, 17 + 2),
        (Recompute.MLA_UP_PROJECTION, 17 + 24),
    ],
)
def test_checkpoints_of_modules_take_the_host_their_time(
    module: Recompute, operators: float
) -> None:
    """Operators of 16.7 us where the host paces a layer: 0.3 to 0.7 ms, where Moonlight on 8 H100 took 0.35
    to 1.5 (Megatron-Bridge, skills/nemo-mbridge-perf-activation-recompute/SKILL.md). Both norms of a
    layer stand apart with MLA. They were free there.
    """
    seconds = []
    for mask in (Recompute.NONE, module):
        layout = Layout(tp=2, dp=4, ep=8, recompute=int(mask), sequence_parallel=True)
        work = workload(
            "moonlight-16b-a3b",
            gpus=8,
            seq_len=512,
            framework="megatron-bridge",
            cuda_graph="none",
        )
        kind = kind_times(context(work, layout)).moe
        assert kind is not None
        seconds.append(float(kind.seconds))
    assert seconds[1] - seconds[0] == pytest.approx(operators * 16.7e-6, rel=0.1)
