"""Memory: ZeRO by hand, activations against the published count, who holds what, and the bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import mul

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel import activations as activations_module
from meshwright.costmodel import buffers as transients_module
from meshwright.costmodel import states as states_module
from meshwright.costmodel.activations import activation_bytes_per_layer, saved_activations
from meshwright.costmodel.footprint import (
    GIB,
    peak_memory_gib,
    stage_memory_gib,
    stage_memory_parts_gib,
    usable_hbm_gib,
)
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.rank_load import layer_counts
from meshwright.costmodel.schedules import first_chunk_excess, in_flight, least_in_flight
from meshwright.costmodel.stacks import framework_constants
from meshwright.costmodel.states import (
    layer_parameters_on_gpu,
    rank_parameters,
    state_bytes_per_parameter,
)
from meshwright.costmodel.textbook import unfused_activation_bytes
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.blocks import MoeSpec
from meshwright.model_specs.parameters import (
    embedding_parameters,
    mtp_parameters,
    parameter_count,
    whole_attention_parameters,
)
from meshwright.model_specs.reader import load_catalog_model
from meshwright.model_specs.schema import ModelSpec

ALL = 10**6
SetProfile = Callable[..., None]


def workload(model: ModelSpec | str, *, gpus: int = 64, seq_len: int = 2048) -> Workload:
    spec = load_catalog_model(model) if isinstance(model, str) else model
    return Workload(
        model=spec, cluster=read_cluster("dgx-a100"), gpus=gpus, global_batch=64, seq_len=seq_len
    )


def even(layers: int, pp: int, vpp: int = 1) -> tuple[tuple[int, ...], ...]:
    return ((layers // (pp * vpp),) * vpp,) * pp


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> SetProfile:
    """Sets what of a software profile memory depends on, so that no calibrated value enters."""

    def set_profile(*, gradient_bytes: int = 4, flash_attention: bool = True) -> None:
        fixed = replace(
            framework_constants("megatron"),
            gradient_bytes=gradient_bytes,
            flash_attention=flash_attention,
        )
        for module in (
            states_module,
            activations_module,
            transients_module,
        ):
            monkeypatch.setattr(module, "stack_constants", lambda workload: fixed)

    return set_profile


@pytest.mark.parametrize(
    ("zero", "gigabytes"), [(0, 112.0), (1, 14 + 14 + 10.5), (2, 14 + 1.75 + 10.5), (3, 14.0)]
)
def test_zero_on_7b_parameters_and_8_ranks(
    framework: SetProfile, zero: int, gigabytes: float
) -> None:
    """ZeRO (arXiv 1910.02054, figure 1) counts 16 bytes a parameter, gradients in 2 bytes."""
    framework(gradient_bytes=2)
    each = state_bytes_per_parameter(workload("llama-2-7b"), Layout(zero_stage=zero), 8)
    assert 7 * np.asarray(each) == pytest.approx(gigabytes)


@pytest.mark.parametrize(
    ("zero", "ranks", "each"), [(0, 64, 18.0), (1, 1, 18.0), (1, 64, 6 + 12 / 64)]
)
def test_megatron_s_bytes_per_parameter(
    framework: SetProfile, zero: int, ranks: int, each: float
) -> None:
    framework(gradient_bytes=4)
    found = state_bytes_per_parameter(workload("llama-2-7b"), Layout(zero_stage=zero), ranks)
    assert found == pytest.approx(each)


@pytest.mark.parametrize(
    ("billions", "terabytes"), [(7, 0.112), (13, 0.208), (65, 1.04), (175, 2.8), (540, 8.64)]
)
def test_state_of_whole_models(framework: SetProfile, billions: float, terabytes: float) -> None:
    framework(gradient_bytes=2)
    each = state_bytes_per_parameter(workload("llama-2-7b"), Layout(), 1)
    assert billions * np.asarray(each) / 1e3 == pytest.approx(terabytes)


def test_fp8_keeps_quantised_weights() -> None:
    sixteen, eight = (replace(workload("llama-2-7b"), precision=p) for p in ("bf16", "fp8"))
    more = np.asarray(state_bytes_per_parameter(eight, Layout(), 1)) - state_bytes_per_parameter(
        sixteen, Layout(), 1
    )
    assert more == 2.0


@pytest.mark.parametrize("name", ["gpt3-175b", "mt-nlg-530b"])
def test_activations_come_near_the_published_count(framework: SetProfile, name: str) -> None:
    """s b h (34 + 5 a s / h) a layer; ours has log-sum-exps in, 4 bytes of every head and token."""
    framework(flash_attention=False)
    work = workload(name)
    model = work.model
    saved, _ = activation_bytes_per_layer(work, Layout(), experts=False)
    published = unfused_activation_bytes(2048, 2048, model.hidden, model.heads, 1)
    assert saved == pytest.approx(published + 4 * 2048 * model.heads)


def test_recomputing_core_attention_drops_the_scores(framework: SetProfile) -> None:
    framework(flash_attention=False)
    work = workload("gpt3-175b")
    saved, _ = activation_bytes_per_layer(work, Layout(), experts=False)
    mask = Layout(recompute=int(Recompute.CORE_ATTENTION))
    without, _ = activation_bytes_per_layer(work, mask, experts=False)
    assert np.asarray(saved) - without == pytest.approx(5 * 96 * 2048 * 2048)


def test_context_parallel_ranks_hold_scores_of_all_keys(framework: SetProfile) -> None:
    """Regression: scores were divided by cp twice, so 4 ranks held a quarter of what one rank did."""
    framework(flash_attention=False)
    work = workload("gpt3-175b")
    one, four = (activation_bytes_per_layer(work, Layout(cp=cp), experts=False)[0] for cp in (1, 4))
    assert 4 * np.asarray(four) == pytest.approx(one)


def test_full_recomputation_keeps_the_layer_input() -> None:
    work = workload("llama-2-7b")
    for tp, sequence_parallel, shards in ((1, False, 1), (8, False, 1), (8, True, 8)):
        layout = Layout(tp=tp, sequence_parallel=sequence_parallel)
        _, dropped = activation_bytes_per_layer(work, layout, experts=False)
        assert dropped == pytest.approx(2 * 2048 * 4096 / shards)


def test_routed_activations_scale_with_top_k_and_not_with_ep() -> None:
    def kept(top_k: int, ep: int) -> float:
        moe = MoeSpec(experts=64, top_k=top_k, moe_ffn_hidden=1024)
        model = ModelSpec(
            layers=4, hidden=1024, ffn_hidden=4096, heads=8, kv_heads=8, vocab=1000, moe=moe
        )
        layout = Layout(ep=ep, dp=8)
        return float(
            np.asarray(activation_bytes_per_layer(workload(model), layout, experts=True)[0])
        )

    assert kept(2, 1) == kept(2, 8)
    routed = kept(2, 1) - kept(1, 1)
    assert kept(8, 1) == pytest.approx(kept(1, 1) + 7 * routed)
    assert routed == pytest.approx(2048 * (2 * 1024 + 2 * 2 * 1024 + 2 * 1024))


@pytest.mark.parametrize(
    ("pp", "vpp", "m", "chunks"),
    [
        (4, 1, 8, [4, 3, 2, 1]),
        (4, 1, 2, [2, 2, 2, 1]),
        (4, 2, 8, [11, 9, 7, 5]),
        (2, 2, 2, [4, 3]),
        (1, 1, 5, [1]),
    ],
)
def test_micro_batches_in_flight(pp: int, vpp: int, m: int, chunks: list[int]) -> None:
    layout = Layout(pp=pp, vpp=vpp, num_micro_batches=m)
    assert (np.asarray(in_flight(layout, np.arange(pp))) * vpp).tolist() == chunks


@pytest.mark.parametrize(
    "name", ["llama-3-70b", "gpt3-175b", "mixtral-8x7b", "deepseek-v2", "qwen3-30b-a3b"]
)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_ranks_hold_the_model_once(name: str, pp: int) -> None:
    """Up to the final norm, tied tables that both ends hold, and latent norms that TP does not split."""
    model = load_catalog_model(name)
    stages = tuple((len(part),) for part in np.array_split(np.arange(model.layers), pp))
    dense, expert = rank_parameters(model, Layout(pp=pp), stages)
    held = float(np.sum(dense) + np.sum(expert))
    copies = embedding_parameters(model) if model.tied_embeddings and pp > 1 else 0
    extra = 0 if model.tied_embeddings else embedding_parameters(model) - model.vocab * model.hidden
    assert held == pytest.approx(parameter_count(model) + copies + extra, rel=1e-6)
    mean = sum(float(np.asarray(x)) for x in rank_parameters(model, Layout(pp=pp), None))
    assert mean * pp == pytest.approx(held)


def test_mtp_rank_holds_its_module_and_a_token_table() -> None:
    """Regression: the last rank of DeepSeek-V3 lacked the projection and its copy of the token table."""
    with_mtp = load_catalog_model("deepseek-v3")
    assert with_mtp.mtp_layers == 1
    without = with_mtp.model_copy(update={"mtp_layers": 0})
    stages = ((31,), (30,))
    held, plain = (
        np.sum([np.broadcast_to(x, (2,)) for x in rank_parameters(m, Layout(pp=2), stages)], axis=0)
        for m in (with_mtp, without)
    )
    more = held - plain
    assert more[0] == 0
    assert more[1] == pytest.approx(mtp_parameters(with_mtp) + embedding_parameters(with_mtp))
    one, alone = (
        sum(float(np.sum(x)) for x in rank_parameters(m, Layout(), ((61,),)))
        for m in (with_mtp, without)
    )
    assert one - alone == pytest.approx(mtp_parameters(with_mtp))


def test_layers_of_every_kind_by_rank() -> None:
    counts = layer_counts(4, ((3, 2), (3, 2)), 2)
    assert counts.dense.tolist() == [3, 1]
    assert counts.moe.tolist() == [2, 4]
    assert counts.dense_recomputed.tolist() == [2, 1]
    assert counts.moe_recomputed.tolist() == [2, 3]


def test_empty_virtual_stages_hold_nothing() -> None:
    counts = layer_counts(0, ((0, 2), (1, 0)), ALL)
    assert counts.moe.tolist() == counts.moe_recomputed.tolist() == [2, 1]


@pytest.mark.parametrize("name", ["llama-3-70b", "mixtral-8x7b", "deepseek-v2"])
def test_memory_shrinks_with_the_zero_stage(name: str) -> None:
    work = workload(name)
    layers = work.model.layers
    peaks = []
    for zero in range(4):
        layout = Layout(
            tp=4, dp=16, ep=8 if work.model.moe else 1, num_micro_batches=4, zero_stage=zero
        )
        peaks.append(float(np.max(stage_memory_gib(work, layout, even(layers, 1)))))
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


def test_memory_shrinks_with_every_layer_that_is_recomputed() -> None:
    work = workload("llama-3-70b")
    peaks = []
    for again in (0, 1, 5, 9, 10, ALL):
        layout = Layout(
            tp=2,
            pp=8,
            dp=4,
            num_micro_batches=16,
            recompute=int(Recompute.FULL),
            recompute_layers=again,
        )
        peaks.append(float(np.max(stage_memory_gib(work, layout, even(80, 8)))))
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] == peaks[-2] < peaks[-3]


def test_parts_add_up_and_sit_on_their_ranks() -> None:
    work = workload("llama-3-70b")
    layout = Layout(tp=2, pp=4, dp=8, zero_stage=3, num_micro_batches=8)
    parts = stage_memory_parts_gib(work, layout, even(80, 4))
    assert np.sum(list(parts.values()), axis=0) == pytest.approx(
        stage_memory_gib(work, layout, even(80, 4))
    )
    assert np.flatnonzero(parts["logits"]).tolist() == [3]
    assert np.diff(parts["activations"]).max() < 0
    gathered = stage_memory_parts_gib(work, layout, even(80, 4))["buffers"]
    alone = stage_memory_parts_gib(work, replace(layout, zero_stage=2), even(80, 4))["buffers"]
    assert np.all(gathered > alone), "ZeRO-3 gathers layers on every rank, not only on the ends"
    assert parts["fragmentation"].tolist() == [0, 0, 0, 0]


def test_head_of_llama_3_8b_on_one_gpu() -> None:
    work = replace(workload("llama-3-8b", seq_len=8192), gpus=1)
    parts = stage_memory_parts_gib(work, Layout(), even(32, 1))
    assert parts["logits"][0] * GIB == pytest.approx(10 * 8192 * 128_256)
    for name, each in (("weights", 2), ("gradients", 4), ("optimizer", 12)):
        assert parts[name][0] * GIB == pytest.approx(8.03e9 * each, rel=1e-3)


def test_the_loss_of_an_mtp_module_keeps_its_softmax() -> None:
    """10 bytes a logit of the head's loss, and beside it 4 of the module's, which was taken before."""
    work = replace(workload("deepseek-v3", seq_len=4096), gpus=8)
    parts = stage_memory_parts_gib(work, Layout(ep=8, dp=8), even(61, 1))
    assert parts["logits"][0] * GIB == pytest.approx((10 + 4) * 4096 * work.model.vocab)


@pytest.mark.parametrize(("precision", "per_element"), [("bf16", 12), ("mxfp8", 10)])
def test_an_mtp_module_keeps_what_joins_it_to_the_model(precision: str, per_element: int) -> None:
    """Embeddings, states that come in and go out, 2 h that are projected, the head's input: once not counted.

    In MXFP8 the projection reads 2 h of one byte.
    """
    work = replace(workload("deepseek-v3", seq_len=4096), gpus=8, precision=precision)
    layout = Layout(tp=2, sequence_parallel=True, ep=8, dp=4)
    saved = saved_activations(work, layout)
    around = float(np.asarray(saved.module)) - float(np.asarray(saved.main[0]))
    assert around == pytest.approx(per_element * 4096 * work.model.hidden / 2)
    plain = replace(work, model=work.model.model_copy(update={"mtp_layers": 0}))
    more = [
        stage_memory_parts_gib(each, layout, even(61, 1))["activations"][0]
        for each in (work, plain)
    ]
    assert (more[0] - more[1]) * GIB == pytest.approx(float(np.asarray(saved.module)))


def test_usable_memory_leaves_the_reserve_free() -> None:
    work = workload("llama-2-7b")
    kept = replace(work, reserve_gib=5.0)
    assert usable_hbm_gib(work) - usable_hbm_gib(kept) == pytest.approx(5.0)
    assert usable_hbm_gib(work) < work.cluster.device.hbm_gib


@pytest.mark.parametrize("again", [0, 8, ALL])
def test_bound_is_tight_on_even_splits_of_many_equal_layers(again: int) -> None:
    """The best split of 80 equal layers comes near the bound."""
    work = workload("llama-3-70b")
    layout = Layout(tp=2, pp=4, dp=8, zero_stage=1, micro_batch=8, num_micro_batches=32)
    if again:
        layout = replace(layout, recompute=int(Recompute.FULL), recompute_layers=again)
    bound = float(np.asarray(peak_memory_gib(work, layout)))
    best = min(
        float(np.max(stage_memory_gib(work, layout, ((a,), (b,), (c,), (80 - a - b - c,)))))
        for a in range(12, 21, 2)
        for b in range(13, 22, 2)
        for c in range(18, 30, 2)
    )
    assert bound <= best <= 1.08 * bound


@pytest.mark.parametrize("model", ["llama-3-8b", "gpt2-xl", "deepseek-v3", "gpt-oss-20b"])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_the_bound_of_a_single_rank_is_its_memory(model: str, zero_stage: int) -> None:
    """With one stage there is one split; tables may be tied, and stand beside MTP modules."""
    work = workload(model)
    layout = Layout(tp=2, dp=16, zero_stage=zero_stage, num_micro_batches=4)
    (peak,) = stage_memory_gib(work, layout, ((work.model.layers,),))
    assert float(np.asarray(peak_memory_gib(work, layout))) == pytest.approx(peak, rel=3e-9)


def layers_in_flight_of_rank_0(chunks: Sequence[int], pp: int, m: int) -> int:
    """Most layers of which rank 0 holds activations, pass by pass in Megatron's order of chunks."""
    vpp = len(chunks)
    turns = [range(begin, min(begin + pp, m)) for begin in range(0, m, pp)]
    order = [chunk for turn in turns for chunk in range(vpp) for _ in turn]
    warm_up = min((vpp - 1) * pp + 2 * (pp - 1), m * vpp)
    held = [0] * vpp
    most = done = 0
    for passed, chunk in enumerate(order):
        held[chunk] += 1
        most = max(most, sum(map(mul, held, chunks)))
        if passed >= warm_up:
            held[vpp - 1 - order[done]] -= 1
            done += 1
    return most


@pytest.mark.parametrize(("pp", "turns"), [(2, 1), (2, 2), (4, 1), (4, 3), (8, 18)])
@pytest.mark.parametrize("chunks", [(3, 3), (1, 2), (0, 2, 2), (1, 2, 2, 2), (1, *[2] * 7)])
def test_a_shorter_first_virtual_stage_is_in_flight_most(
    chunks: tuple[int, ...], pp: int, turns: int
) -> None:
    """Rank 0 holds more micro-batches of it than of its others, each of which counted as much before."""
    m = turns * pp
    layout = Layout(dp=1, pp=pp, vpp=len(chunks), micro_batch=1, num_micro_batches=m)
    least, excess = (
        float(np.asarray(x)) for x in (least_in_flight(layout, 0), first_chunk_excess(layout))
    )
    counted = least * sum(chunks) + excess * chunks[0]
    assert counted == pytest.approx(layers_in_flight_of_rank_0(chunks, pp, m))
    assert least * len(chunks) + excess == pytest.approx(
        float(np.asarray(in_flight(layout, 0))) * len(chunks)
    )


def test_rank_0_saves_what_its_virtual_stages_have_in_flight() -> None:
    """One layer in the first of four virtual stages, two in every other, against two in all."""
    work = workload("llama-3-8b", gpus=8)
    layout = Layout(dp=1, tp=1, pp=4, vpp=4, micro_batch=1, num_micro_batches=64)
    rows = ((2, 2, 2, 2),) * 4
    shorter = ((1, 2, 2, 2), *rows[1:-1], (2, 2, 2, 3))
    full, less = (
        stage_memory_parts_gib(work, layout, stages)["activations"] for stages in (rows, shorter)
    )
    in_flight_of = [layers_in_flight_of_rank_0(stages[0], 4, 64) for stages in (rows, shorter)]
    assert in_flight_of == [38, 31]
    assert less[0] / full[0] == pytest.approx(31 / 38)
    assert less[1:3] == pytest.approx(full[1:3])


def test_leading_dense_layers_may_fill_the_ranks_with_the_most_in_flight() -> None:
    """Regression: with layers averaged over their kinds the bound lay 7 % above the peak of this split.

    Dense layers with large states and small activations lie where most micro-batches are in flight.
    """
    moe = MoeSpec(experts=16, top_k=16, moe_ffn_hidden=16, dense_layers=20)
    model = ModelSpec(
        layers=40, hidden=4096, ffn_hidden=8192, heads=8, kv_heads=8, head_dim=16, vocab=8, moe=moe
    )
    work, layout = workload(model, seq_len=8192), Layout(pp=2, num_micro_batches=8)
    peak = float(np.max(stage_memory_gib(work, layout, ((14,), (26,)))))
    assert 0.9 * peak <= float(np.asarray(peak_memory_gib(work, layout))) <= peak


def test_bound_of_arrays_is_the_bound_of_each() -> None:
    work = workload("deepseek-v2")
    pp, ep, again = (x.ravel() for x in np.meshgrid([1, 2, 5], [1, 8], [0, 1, ALL]))
    many = Layout(pp=pp, ep=ep, dp=64, recompute=np.where(again > 0, 32, 0), recompute_layers=again)
    bounds = np.asarray(peak_memory_gib(work, many))
    each = [float(np.asarray(peak_memory_gib(work, many.scalar(i)))) for i in range(len(pp))]
    assert bounds == pytest.approx(each, rel=1e-13)
    assert np.asarray(peak_memory_gib(work, Layout())).shape == ()
    square = Layout(pp=pp.reshape(3, 6), ep=ep.reshape(3, 6), dp=64)
    assert np.asarray(peak_memory_gib(work, square)).shape == (3, 6)


def saved_bytes(work: Workload, layout: Layout) -> float:
    return float(np.asarray(activation_bytes_per_layer(work, layout, experts=True)[0]))


def test_an_uneven_load_of_experts_takes_memory() -> None:
    """At 1.6 times the mean load Mixtral's busiest rank keeps 0.6 of its routed activations more."""
    work = workload("mixtral-8x7b")
    layout = Layout(dp=64, ep=8)
    routed = 2048 * 2 * (2 * 4096 + 2 * 2 * 14_336 + 2 * 14_336)
    uneven = replace(work, expert_imbalance=1.6)
    assert saved_bytes(uneven, layout) - saved_bytes(work, layout) == pytest.approx(0.6 * routed)


def test_expert_tensor_ranks_keep_the_tokens_of_all_of_them() -> None:
    work = workload("mixtral-8x7b")
    plain, split = Layout(tp=2, dp=32, ep=8), Layout(tp=2, dp=32, ep=8, etp=2)
    gathered = 2048 * 2 / 2 * 2 * 4096
    assert saved_bytes(work, split) - saved_bytes(work, plain) == pytest.approx(gathered)


def test_down_projections_of_latent_attention_are_whole_on_every_tensor_rank() -> None:
    """DeepSeek-V3: queries to rank 1,536, keys and values to 512 and 64 shared, out of 7,168."""
    model = load_catalog_model("deepseek-v3")
    whole = 7168 * (1536 + 512 + 64) + 1536 + 512
    assert whole_attention_parameters(model) == whole
    _, one, _ = layer_parameters_on_gpu(model, Layout())
    _, four, _ = layer_parameters_on_gpu(model, Layout(tp=4))
    norms_and_router = 2 * 7168 + 256 * 7169
    assert 4 * four - one == pytest.approx(3 * (whole + norms_and_router))


@pytest.mark.parametrize(
    ("name", "experts", "norms"),
    [("llama-2-7b", False, 0), ("mixtral-8x7b", True, 1), ("deepseek-v3", True, 2)],
)
def test_norms_that_stand_apart_are_what_recomputing_them_saves(
    name: str, experts: bool, norms: int
) -> None:
    """Not those that Transformer Engine fuses into the next product: the gain was two norms everywhere."""
    work = workload(name)
    plain, again = Layout(dp=64), Layout(dp=64, recompute=int(Recompute.LAYERNORM))
    before, after = (
        float(np.asarray(activation_bytes_per_layer(work, layout, experts=experts)[0]))
        for layout in (plain, again)
    )
    assert before - after == norms * 2048 * 2 * work.model.hidden
