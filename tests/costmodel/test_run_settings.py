"""What a run says of its own kernels, shard groups and flushes, priced: cases worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cluster_specs.reader import load_device, read_cluster
from meshwright.costmodel.activations import activation_bytes_per_layer
from meshwright.costmodel.attention import attention_block
from meshwright.costmodel.collectives import chain_latency_s
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.footprint import GIB, stage_memory_parts_gib
from meshwright.costmodel.layer_kinds import head
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.rates import (
    attends_faster_in_fp8,
    constants_for,
    fabric_links,
    fp8_attention_gains,
    kernel_rates,
)
from meshwright.costmodel.records import fit_probability, memory_band
from meshwright.costmodel.stacks import stack_constants
from meshwright.costmodel.states import optimizer_shards, state_bytes
from meshwright.costmodel.step_time import exact_step, make_context
from meshwright.costmodel.workload import AttentionKernel, Workload
from meshwright.model_specs.reader import read_model

WORK = Workload(
    model=read_model("llama-2-7b"),
    cluster=read_cluster("dgx-a100"),
    gpus=64,
    global_batch=512,
    seq_len=4096,
)
LAYOUT = Layout(dp=64, micro_batch=1, num_micro_batches=8, zero_stage=1)


def step_s(workload: Workload, layout: Layout) -> float:
    placement = nested_placement(workload.cluster, layout)
    chunk = workload.model.layers // int(layout.pp)
    stages = ((chunk,),) * int(layout.pp)
    return float(estimate_layout(workload, layout, placement, stages).step_time_s)


def test_newer_attention_kernels_are_faster() -> None:
    kernels: tuple[AttentionKernel, ...] = ("flash-2", "flash-1", "fused-softmax", "unfused")
    times = [step_s(replace(WORK, attention_kernel=kernel), LAYOUT) for kernel in kernels]
    assert times == sorted(times)
    assert times[0] < times[-1]


@pytest.mark.parametrize("cluster", ["dgx-a100", "dgx-h100"])
def test_the_first_flash_attention_takes_twice_as_long_as_the_second(cluster: str) -> None:
    """Its port to Triton, which llm-foundry ran on, was faster."""
    work = replace(WORK, cluster=read_cluster(cluster))
    first, second = (
        kernel_rates(named, constants_for(named)).attention_forward_flops
        for named in (replace(work, attention_kernel=kernel) for kernel in ("flash-1", "flash-2"))
    )
    in_triton = replace(work, framework="llm-foundry")
    assert second / first == pytest.approx(2.0)
    assert first < kernel_rates(in_triton, constants_for(in_triton)).attention_forward_flops


@pytest.mark.parametrize(
    ("cluster", "later", "pytorch"),
    [
        ("dgx-a100", False, False),
        ("l40s-pcie", False, False),
        ("rtx-pro-6000-pcie", True, False),
        ("dgx-h100", True, True),
        ("dgx-b200", True, True),
    ],
)
def test_attention_is_of_the_newest_generation_that_the_device_runs(
    cluster: str, later: bool, pytorch: bool
) -> None:
    """Heads of 64 wait for exponentials under later kernels alone, so they tell the two apart as well."""
    narrow = WORK.model.model_copy(update={"heads": 64, "kv_heads": 64, "head_dim": 64})
    for model in (WORK.model, narrow):
        work = replace(WORK, cluster=read_cluster(cluster), model=model)
        second = step_s(replace(work, attention_kernel="flash-2"), LAYOUT)
        assert (step_s(work, LAYOUT) != second) == later
        assert (step_s(replace(work, attention_kernel="sdpa"), LAYOUT) != second) == pytorch


def test_scores_that_pytorch_masks_one_operator_at_a_time_pass_hbm_more_often() -> None:
    """33 and 35 bytes a score, where a fused softmax moves 11 and 16; the product before has scaled them."""
    kernels: tuple[AttentionKernel, ...] = ("unfused", "fused-softmax")
    times = []
    for kernel in kernels:
        work = replace(WORK, attention_kernel=kernel)
        c = make_context(work, LAYOUT, nested_placement(work.cluster, LAYOUT))
        times.append(attention_block(c))
    seconds = 32 * 4096**2 / c.rates.hbm_bytes_per_s
    unfused, fused = times
    forward_s = np.asarray(unfused.forward["memory_bound"]) - fused.forward["memory_bound"]
    backward_s = np.asarray(unfused.backward["memory_bound"]) - fused.backward["memory_bound"]
    assert forward_s == pytest.approx((33 - 11) * seconds)
    assert backward_s == pytest.approx((35 - 16) * seconds)


@pytest.mark.parametrize(("kernel", "score_bytes"), [("fused-softmax", 2.0), ("unfused", 6.0)])
def test_scores_stay_where_attention_is_not_fused(
    kernel: AttentionKernel, score_bytes: float
) -> None:
    """Llama has no dropout: 16-bit probabilities, and of PyTorch's softmax its 32-bit output too."""
    kept, _ = activation_bytes_per_layer(
        replace(WORK, attention_kernel=kernel), LAYOUT, experts=False
    )
    flash, _ = activation_bytes_per_layer(WORK, LAYOUT, experts=False)
    assert np.asarray(kept) - flash == pytest.approx(score_bytes * 32 * 4096**2)


def test_a_run_says_what_it_reduces() -> None:
    assert stack_constants(WORK).gradient_bytes == 4
    sixteen = replace(WORK, gradient_dtype="bf16")
    assert stack_constants(sixteen).gradient_bytes == 2
    assert stack_constants(sixteen).weight_gradient_bytes == 4.0
    assert state_bytes(sixteen, LAYOUT, 64)[1] == 2.0
    assert step_s(sixteen, LAYOUT) < step_s(WORK, LAYOUT)


def test_states_are_divided_by_the_shard_group() -> None:
    grouped = replace(LAYOUT, shard_groups=8)
    assert [int(np.asarray(shards)) for shards in optimizer_shards(grouped)] == [8, 8]
    experts = Layout(dp=64, ep=4, shard_groups=8)
    assert [int(np.asarray(shards)) for shards in optimizer_shards(experts)] == [8, 2]
    assert optimizer_shards(LAYOUT)[0] == 64


def test_beside_layouts_with_groups_a_group_of_all_ranks_keeps_its_price() -> None:
    for zero_stage in (1, 3):
        layout = replace(LAYOUT, zero_stage=zero_stage)
        both = replace(layout, shard_groups=np.array([1, 8]))
        placement = nested_placement(WORK.cluster, both)
        step = exact_step(make_context(WORK, both, placement), ((WORK.model.layers,),))
        seconds = np.asarray(step.seconds)
        assert seconds[0] == pytest.approx(step_s(WORK, layout))
        assert seconds[1] == pytest.approx(step_s(WORK, replace(layout, shard_groups=8)))
        assert seconds[0] != seconds[1]


def test_gathers_within_a_node_spare_a_slow_network() -> None:
    """NICs carry two gathers and a scatter of ZeRO 3, or an all-reduce in 16 bits: 6 or 4 bytes."""
    layout = replace(LAYOUT, zero_stage=3)
    slow = replace(WORK, cluster=read_cluster("jean-zay-a100"), gradient_dtype="bf16")
    assert step_s(slow, replace(layout, shard_groups=8)) < step_s(slow, layout)


def test_each_flush_fills_and_drains_the_pipeline() -> None:
    layout = Layout(dp=16, pp=4, micro_batch=1, num_micro_batches=32, zero_stage=1)
    once, four = (step_s(replace(WORK, flushes=flushes), layout) for flushes in (1, 4))
    placement = nested_placement(WORK.cluster, layout)
    parts = estimate_layout(WORK, layout, placement, ((8,),) * 4).breakdown_s
    assert four - once > 2.9 * float(parts["pipeline_bubble"])


def test_the_chance_to_fit_falls_with_what_is_needed() -> None:
    chances = [fit_probability(needed, 77.0) for needed in (40.0, 74.0, 77.0, 80.0, 120.0)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.999
    assert chances[-1] < 0.001
    assert fit_probability(77.0 / memory_band().high, 77.0) == pytest.approx(0.95)


def test_broadcasts_wait_for_every_rank_of_the_group() -> None:
    """Two nodes of 8: each of 16 broadcasts passes 14 hops inside nodes and 1 between."""
    work = replace(WORK, framework="internevo", gpus=16)
    layout = Layout(dp=16, num_micro_batches=8, zero_stage=1)
    placement = nested_placement(work.cluster, layout)
    links = fabric_links(work, constants_for(work))
    hops = 14 * links.latency_s[0] + links.latency_s[1]
    assert chain_latency_s(placement.dp_cp, links) == pytest.approx(hops)
    gathered = replace(work, framework="pytorch")
    assert step_s(work, layout) != step_s(gathered, layout)


@pytest.mark.parametrize(("cluster", "faster"), [("dgx-b200", True), ("dgx-h100", False)])
def test_fp8_attention_is_faster_on_blackwell_alone(cluster: str, *, faster: bool) -> None:
    """On Hopper cuDNN's backward kernel takes as long under a mask as without one."""
    wide = replace(WORK, cluster=read_cluster(cluster), precision="fp8")
    assert (step_s(replace(wide, fp8_attention=True), LAYOUT) < step_s(wide, LAYOUT)) is faster


@pytest.mark.parametrize(
    ("tokens", "forward_ms", "backward_ms"), [(8192, 1.141, 6.392), (16384, 4.357, 29.422)]
)
def test_fp8_attention_on_hopper_beside_its_kernel(
    tokens: int, forward_ms: float, backward_ms: float
) -> None:
    """cuDNN 9.19 on an H200, 64 heads of 128, causal (NVIDIA/cudnn-frontend, h200_919_only_cudnn)."""
    work = replace(
        WORK, cluster=read_cluster("dgx-h200"), precision="fp8", fp8_attention=True, seq_len=tokens
    )
    found = kernel_rates(work, constants_for(work))
    causal_flop = 2.0 * 64 * 128 * tokens**2
    assert 1e3 * causal_flop / found.attention_forward_flops == pytest.approx(forward_ms, rel=0.15)
    backward = 1e3 * 2.5 * causal_flop / found.attention_backward_flops
    assert backward == pytest.approx(backward_ms, rel=0.15)


@pytest.mark.parametrize(
    ("cluster", "framework", "forward", "backward"),
    [
        ("mi355x", "megatron", 1173, 1034),
        ("mi355x", "torchtitan", 630, 224),
        ("mi355x", "torchtitan-compile", 630, 224),
        ("mi355x", "fsdp2", 844, 480),
        ("mi355x", "deepspeed", 844, 480),
    ],
)
def test_attention_of_amd_beside_its_kernels(
    cluster: str, framework: str, forward: float, backward: float
) -> None:
    """Causal heads of 128 at 8,192 tokens, TFLOP/s: AITER, AOTriton (PyTorch's), Composable Kernel.

    HazyResearch/HipKittens, analysis/attn.
    """
    work = replace(WORK, cluster=read_cluster(cluster), framework=framework, seq_len=8192)
    rates = kernel_rates(work, constants_for(work))
    work_s = 1.0 / rates.attention_forward_flops + 2.5 / rates.attention_backward_flops
    assert 1e12 * work_s == pytest.approx(1.0 / forward + 2.5 / backward, rel=0.03)


def test_pytorch_runs_attention_on_amd_in_triton() -> None:
    """MI300X, forward, causal heads of 128 at 8,192 tokens: AITER 446, AOTriton 290 TFLOP/s.

    midiareshadi/attn-dsl-bench, results/raw/sweep_v1.csv. A run that names flash-attn gets its kernels.
    """
    work = replace(WORK, cluster=read_cluster("mi300x"), framework="torchtitan", seq_len=8192)
    flash = kernel_rates(
        replace(work, attention_kernel="flash-2"),
        constants_for(replace(work, attention_kernel="flash-2")),
    )
    pytorch = kernel_rates(work, constants_for(work))
    megatron = replace(work, framework="megatron")
    fused = kernel_rates(megatron, constants_for(megatron))
    assert fused.attention_forward_flops == pytest.approx(446e12, rel=0.05)
    assert pytorch.attention_forward_flops < 290e12
    assert pytorch.attention_forward_flops < flash.attention_forward_flops


@pytest.mark.parametrize(
    ("device", "model", "precision", "forward", "backward"),
    [
        ("gb200", "llama-3-70b", "fp8", 2047 / 1574, 1454 / 1332),
        ("gb200", "llama-3-70b", "mxfp8", 1902 / 1574, 1287 / 1332),
        ("gb300", "llama-3-70b", "mxfp8", 2570 / 1856, 1404 / 1435),
        ("gb200", "deepseek-v3", "fp8", 2397 / 1585, 1959 / 1193),
        ("gb300", "deepseek-v3", "mxfp8", 2829 / 1825, 1780 / 1291),
    ],
)
def test_fp8_attention_on_blackwell_beside_its_kernels(
    device: str, model: str, precision: str, forward: float, backward: float
) -> None:
    """cuDNN 9.22, causal, 8,192 tokens, TFLOP/s in 8 bits over 16 (NVIDIA/cudnn-frontend, April 2026)."""
    found = fp8_attention_gains(load_device(device), read_model(model), precision)
    assert found == pytest.approx((forward, backward), rel=0.05)


@pytest.mark.parametrize(
    ("device", "model", "precision", "faster"),
    [
        ("gb200", "llama-3-70b", "mxfp8", False),
        ("gb300", "llama-3-70b", "mxfp8", False),
        ("gb200", "llama-3-70b", "fp8", True),
        ("gb200", "deepseek-v3", "mxfp8", True),
        ("gb200", "gemma-3-27b", "fp8", False),
        ("h100-sxm-80gb", "llama-3-70b", "fp8", False),
    ],
)
def test_plans_attend_in_fp8_where_both_passes_together_gain(
    device: str, model: str, precision: str, *, faster: bool
) -> None:
    found = attends_faster_in_fp8(load_device(device), read_model(model), precision)
    assert found is faster


def test_a_v100_attends_by_the_memory_efficient_kernel_or_unfused() -> None:
    """It was priced with FlashAttention-2, which asks for compute capability 8.0."""
    work = replace(WORK, cluster=read_cluster("dgx-v100"), precision="fp16")
    of_pytorch = replace(work, framework="fsdp2")
    placement = nested_placement(work.cluster, LAYOUT)
    core = attention_block(make_context(of_pytorch, LAYOUT, placement))
    seconds = core.forward["attention"] + core.backward["attention"]
    flop = 3.5 * 0.5 * 4.0 * 4096**2 * 4096
    assert float(np.asarray(seconds)) == pytest.approx(flop / (80 * 405e9))
    assert not stack_constants(work).flash_attention
    assert stack_constants(of_pytorch).memory_efficient
    scores, _ = activation_bytes_per_layer(work, LAYOUT, experts=False)
    fused, _ = activation_bytes_per_layer(
        replace(work, cluster=WORK.cluster), LAYOUT, experts=False
    )
    assert float(np.asarray(scores - fused)) == pytest.approx(2 * 32 * 4096**2)


def test_the_first_fp8_kernels_of_blackwell_double_its_16_bit_rate() -> None:
    def gemm_flops(cluster: str, precision: str, *, first: bool) -> float:
        on = read_cluster(cluster)
        work = replace(WORK, cluster=on, precision=precision, first_fp8_kernels=first)
        return float(kernel_rates(work, constants_for(work)).gemm_flops)

    first, later = (gemm_flops("gb200-nvl72", "fp8", first=said) for said in (True, False))
    assert first == pytest.approx(2.0 * gemm_flops("gb200-nvl72", "bf16", first=True))
    assert first < later
    of_hopper = [gemm_flops("dgx-h100", "fp8", first=said) for said in (True, False)]
    assert of_hopper[0] == of_hopper[1]


def test_checks_of_gradients_expose_the_launches_of_the_last_backward_pass() -> None:
    def overhead_s(pp: int, *, overlaps: bool, checks: bool = False) -> float:
        work = replace(WORK, framework="nemo", dp_overlap=overlaps, checks_gradients=checks)
        layout = Layout(pp=pp, dp=64 // pp, num_micro_batches=8)
        stages = ((work.model.layers // pp,),) * pp
        priced = estimate_layout(work, layout, nested_placement(work.cluster, layout), stages)
        return float(priced.breakdown_s["step_overhead"])

    launches_s = (
        2 * WORK.model.layers * stack_constants(replace(WORK, framework="nemo")).launch_layer_s
    )
    for pp in (1, 2):
        plain = overhead_s(pp, overlaps=True)
        checked = overhead_s(pp, overlaps=True, checks=True)
        assert checked - plain == pytest.approx(launches_s / pp)
        assert overhead_s(pp, overlaps=False, checks=True) == plain


def test_z_loss_moves_60_bytes_a_logit_and_is_free_in_one_kernel() -> None:
    """24 forward and 36 backward; step by step a loss moves 38 and 14, in one kernel 6 and 4."""

    def seconds(*, fused: bool, squared: bool) -> tuple[float, float]:
        work = replace(WORK, te_loss=fused, stepwise_loss=not fused, z_loss=squared)
        c = make_context(work, Layout(), nested_placement(work.cluster, Layout()))
        priced = head(c)
        return float(priced.forward["memory_bound"]), float(priced.backward["memory_bound"])

    fused, apart = seconds(fused=True, squared=False), seconds(fused=False, squared=False)
    assert seconds(fused=True, squared=True) == fused
    more = np.subtract(seconds(fused=False, squared=True), apart)
    assert more / np.subtract(apart, fused) == pytest.approx([24 / 32, 36 / 10])


@pytest.mark.parametrize("framework", ["aa-scaling", "pytorch"])
def test_eager_stacks_keep_more(framework: str) -> None:
    eager, _ = activation_bytes_per_layer(replace(WORK, framework=framework), LAYOUT, experts=False)
    fused, _ = activation_bytes_per_layer(WORK, LAYOUT, experts=False)
    assert np.asarray(eager) > np.asarray(fused)


def test_weights_kept_in_fp8_need_no_wide_copy() -> None:
    stack = replace(WORK, framework="nemo", precision="fp8", cluster=read_cluster("dgx-h100"))
    wide = replace(stack, fp8_params=False)
    kept = replace(wide, fp8_params=True)
    assert float(np.asarray(state_bytes(wide, LAYOUT, 64)[0])) == 4.0
    assert float(np.asarray(state_bytes(kept, LAYOUT, 64)[0])) == 2.0


def test_fp32_sums_lie_beside_16_bit_gradients() -> None:
    """nanotron: 2 + 4 bytes, whether or not there is anyone to reduce them with."""
    work = replace(WORK, framework="nanotron")
    assert float(np.asarray(state_bytes(work, LAYOUT, 1)[1])) == 6.0


def test_gradients_reduced_at_32_bits_are_kept_at_16() -> None:
    """Aleph Alpha's stack casts a bucket for its all-reduce, and back."""
    work = replace(WORK, framework="aa-scaling")
    assert stack_constants(work).gradient_bytes == 4
    assert float(np.asarray(state_bytes(work, LAYOUT, 64)[1])) == 2.0


def test_gathered_inputs_are_kept_where_the_run_says_so() -> None:
    """Two products of a layer: 2 (1 - 1/8) of 2 bytes an element, whole instead of an eighth."""
    layout = replace(LAYOUT, tp=8, sequence_parallel=True)
    again = replace(WORK, framework="nanotron")
    kept = replace(again, keeps_gathered_inputs=True)
    more, less = (activation_bytes_per_layer(w, layout, experts=False)[0] for w in (kept, again))
    tokens = layout.micro_batch * WORK.seq_len
    extra = 2 * 2 * WORK.model.hidden * tokens * 7 / 8
    assert np.asarray(more) - less == pytest.approx(extra)


@pytest.mark.parametrize(
    ("kernel", "seq_len", "score_bytes"),
    [("unfused", 512, 12.0), ("fused-softmax", 512, 4.0), ("unfused", 4096, 0.0)],
)
def test_forward_scores_strand_where_logits_are_larger(
    kernel: AttentionKernel, seq_len: int, score_bytes: float
) -> None:
    """32 heads: 512 scores each are fewer than 32,000 logits of a token, 4,096 each are more."""
    flash = replace(WORK, framework="aa-scaling", seq_len=seq_len, attention_kernel="flash-2")
    plain = replace(flash, attention_kernel=kernel)
    more, less = (
        stage_memory_parts_gib(work, LAYOUT, ((32,),))["fragmentation"][0] * GIB
        for work in (plain, flash)
    )
    assert more - less == pytest.approx(score_bytes * seq_len * 32 * seq_len)


@pytest.mark.parametrize(("kernel", "score_bytes"), [("unfused", 6 + 8), ("fused-softmax", 2 + 4)])
def test_recomputed_scores_have_gradients(kernel: AttentionKernel, score_bytes: float) -> None:
    """Of a rank without a head: one layer's scores come back, with their gradients of 4 or 2 x 2 bytes."""
    layout = Layout(pp=2, dp=32, num_micro_batches=16, zero_stage=1, recompute=int(Recompute.FULL))
    flash = replace(WORK, framework="aa-scaling", seq_len=8192, attention_kernel="flash-2")
    plain = replace(flash, attention_kernel=kernel)
    more, less = (
        stage_memory_parts_gib(work, layout, ((16,), (16,)))["work"][0] * GIB
        for work in (plain, flash)
    )
    tokens = 8192
    widest = tokens * (2 * 2 * WORK.model.ffn_hidden + 2 * WORK.model.hidden)
    assert more - less == pytest.approx(score_bytes * tokens * 32 * 8192 - widest)


@pytest.mark.parametrize(
    ("cluster", "forward", "backward"),
    [
        ("dgx-h200", (484, 591, 644, 673, 688), (370, 474, 541, 579, 581)),
        ("gb200-nvl72", (1042, 1335, 1598, 1687, 1720), (836, 1132, 1311, 1402, 1473)),
    ],
)
def test_attention_on_short_sequences_is_slower_as_published(
    cluster: str, forward: tuple[float, ...], backward: tuple[float, ...]
) -> None:
    """cuDNN 9.19, one causal sequence of 2,048 to 32,768 tokens, 64 heads of 128, TFLOP/s over the longest's.

    NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results, h200_919 and gb200_919_only_cudnn.
    """
    model = read_model("llama-3-70b")
    on = replace(WORK, model=model, cluster=read_cluster(cluster), gpus=1, global_batch=1)
    told = []
    for tokens in (2048, 4096, 8192, 16384, 32768):
        layout = Layout(micro_batch=1)
        context = make_context(
            replace(on, seq_len=tokens), layout, nested_placement(on.cluster, layout)
        )
        seconds = attention_block(context)
        told.append(
            [tokens**2 / seconds.forward["attention"], tokens**2 / seconds.backward["attention"]]
        )
    shares = np.array(told).T / np.array(told)[-1][:, None]
    assert shares[0] == pytest.approx(np.array(forward) / forward[-1], rel=0.06)
    assert shares[1] == pytest.approx(np.array(backward) / backward[-1], rel=0.1)
