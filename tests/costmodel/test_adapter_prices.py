"""What adapters change of time, memory and traffic, by hand and by what must hold of any layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.activations import activation_bytes_per_layer
from meshwright.costmodel.adapters import adapter_passes_s, normed_bytes
from meshwright.costmodel.collectives import long_ring_pass_s
from meshwright.costmodel.data_parallel import data_parallel_traffic
from meshwright.costmodel.feed_forward import linear
from meshwright.costmodel.footprint import stage_memory_parts_gib
from meshwright.costmodel.kernels import gemm_s
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import head, kind_times
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.states import rank_parameters, state_bytes
from meshwright.costmodel.step_time import exact_step, make_context, optimizer_s
from meshwright.costmodel.volumes import group_traffic, level_traffic
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.adapters import AdapterSpec, adapter_counts, with_layers_ahead
from meshwright.model_specs.parameters import flops_per_token, parameter_count
from meshwright.model_specs.reader import load_catalog_model
from meshwright.model_specs.schema import ModelSpec

MODEL = load_catalog_model("llama-3-8b")
QV = AdapterSpec(rank=8, targets=("q_proj", "v_proj"))


def workload(adapters: AdapterSpec | None, **changes: Any) -> Workload:
    settings: dict[str, Any] = {
        "model": MODEL,
        "cluster": read_cluster("dgx-h100"),
        "gpus": 8,
        "global_batch": 32,
        "seq_len": 4096,
        "framework": "fsdp2",
        "adapters": adapters,
    }
    return Workload(**settings | changes)


def layout(**changes: Any) -> Layout:
    return Layout(**{"dp": 8, "num_micro_batches": 4, "zero_stage": 3} | changes)


def context(work: Workload, one: Layout) -> Context:
    return make_context(work, one, nested_placement(work.cluster, one))


def test_a_frozen_matrix_has_no_weight_gradient() -> None:
    c = context(workload(QV), layout())
    passes = linear(c, 4096.0, 14336.0, 4096.0, {"up_proj": 14336.0})
    assert passes.forward == gemm_s(4096.0, 14336.0, 4096.0, c.rates)
    assert passes.backward == gemm_s(4096.0, 4096.0, 14336.0, c.rates)


def test_an_adapted_matrix_costs_its_adapter_besides() -> None:
    plain = context(workload(AdapterSpec(targets=("o_proj",))), layout())
    adapted = context(workload(AdapterSpec(targets=("q_proj",))), layout())
    names = {"q_proj": 4096.0}
    without, beside = (linear(c, 4096.0, 4096.0, 4096.0, names) for c in (plain, adapted))
    # Reading x and writing the output once more, scaling and sum: 2 h + 2 h + 10 h bytes a token at least.
    least_s = 4096 * 14.0 * 4096 / plain.rates.hbm_bytes_per_s
    assert beside.forward - without.forward > least_s
    assert beside.forward - without.forward < 2.0 * least_s
    assert beside.backward > without.backward


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_adapters_at_32_bits_by_hand(dropout: float) -> None:
    """Per element of the input: widened 6, dropped 4 + 4 + 1, read 4; backward read and written 4 + 4, the
    same dropout, narrowed 6, added 6. Of the output: written 4, scaled 8, added 10, narrowed 6; backward
    widened 6, narrowed 6, scaled 8 and read twice."""
    wide = AdapterSpec(targets=("q_proj",), rank=1, dropout=dropout, wide=True)
    c = context(workload(wide), layout())
    n, k, tokens = 1024.0, 4096.0, 1e9
    beside = adapter_passes_s(c, tokens, k, {"q_proj": n})
    dropped = 9.0 if dropout else 0.0
    forward = (6 + dropped + 4) * k + (4 + 8 + 10 + 6) * n
    backward = (8 + dropped + 12) * k + (6 + 6 + 8 + 8) * n
    # Of one column, products are a small part of what their operands take to move.
    rate = c.rates.hbm_bytes_per_s
    assert beside.forward == pytest.approx(tokens * forward / rate, rel=0.02)
    assert beside.backward == pytest.approx(tokens * backward / rate, rel=0.02)


def test_dropout_reads_and_writes_inputs_of_16_bits() -> None:
    """Two bytes read and two written, and a mask of one, either way."""
    plain, drops = (
        adapter_passes_s(
            context(workload(AdapterSpec(targets=("q_proj",), dropout=share)), layout()),
            *(4096.0, 4096.0, {"q_proj": 1024.0}),
        )
        for share in (0.0, 0.05)
    )
    rate = context(workload(QV), layout()).rates.hbm_bytes_per_s
    for before, after in zip(plain, drops, strict=True):
        assert after - before == pytest.approx(5.0 * 4096 * 4096 / rate)


def qlora(target: str, *, dropout: float = 0.0, wide_stream: bool) -> Context:
    adapters = AdapterSpec(
        method="qlora", targets=(target,), dropout=dropout, wide_stream=wide_stream
    )
    return context(workload(adapters), layout())


@pytest.mark.parametrize(
    ("name", "of_input", "of_output"), [("gate_proj", 6, 6), ("down_proj", 6, 6), ("o_proj", 0, 0)]
)
def test_products_in_a_wide_stream_cast_what_they_take(
    name: str, of_input: int, of_output: int
) -> None:
    """Input narrowed and output widened, and back (4 and 2 either way); attention returns 16 bits."""
    target = "q_proj"
    plain, wide = (qlora(target, wide_stream=each) for each in (False, True))
    n, k = 1024.0, 4096.0
    before, after = (linear(c, 4096.0, n, k, {name: n}) for c in (plain, wide))
    moved = 4096 * (of_input * k + of_output * n)
    for less, more in zip(before, after, strict=True):
        assert more - less == pytest.approx(moved / plain.rates.hbm_bytes_per_s)


def test_adapters_in_a_wide_stream_by_hand() -> None:
    """Over 16 bits, forward: of the input dropout at 4 + 4 + 1 for 2 + 2 + 1, and a cast (6); of the output a
    sum of 10 for 6. Backward: the same dropout, 6 + 12 for 6; of the output one cast more (6)."""
    plain, wide = (qlora("q_proj", dropout=0.1, wide_stream=each) for each in (False, True))
    n, k = 1024.0, 4096.0
    before, after = (adapter_passes_s(c, 4096.0, k, {"q_proj": n}) for c in (plain, wide))
    rate = plain.rates.hbm_bytes_per_s
    forward = 4096 * ((9 - 5 + 6) * k + 4 * n) / rate
    backward = 4096 * ((9 - 5 + 18 - 6) * k + 6 * n) / rate
    assert after.forward - before.forward == pytest.approx(forward)
    assert after.backward - before.backward == pytest.approx(backward)


def test_a_wide_stream_doubles_what_checkpoints_keep() -> None:
    """A micro-batch of Mistral 7B kept 4.00 GiB more so, 2 bytes of 32 inputs of 16,384 tokens by 4,096
    (fms-acceleration, baseline-peft-bnb against accelerated-peft-bnb); norms move 28 and 60 bytes."""
    plain, wide = (qlora("q_proj", wide_stream=each) for each in (False, True))
    kept = [
        activation_bytes_per_layer(c.workload, c.layout, experts=False)[1] for c in (plain, wide)
    ]
    assert float(np.asarray(kept[1] - kept[0])) == 2 * 4096 * 4096
    moved = wide.element_bytes
    assert [*moved.norm, *moved.activation, *moved.around] == [28, 60, 20, 36, 39, 72]
    full = AdapterSpec(wide_stream=True)
    assert context(workload(full), layout()).element_bytes == plain.element_bytes


@pytest.mark.parametrize(
    ("dropout", "wide", "each"), [(0.0, False, 0), (0.1, False, 3), (0.0, True, 4), (0.1, True, 5)]
)
def test_adapters_keep_inputs_of_their_own(dropout: float, wide: bool, each: int) -> None:
    """Queries and values: two copies of the input in place of one of 16 bits; a mask has a byte."""

    def saved(**fields: Any) -> float:
        adapters = QV.model_copy(update=fields)
        kept, _ = activation_bytes_per_layer(workload(adapters), layout(), experts=False)
        return float(np.asarray(kept)) / 4096

    inner = 2 * 8 * (2 if wide else 0)
    copies = 4096 * (2 * each - 2) if each else 0
    assert saved(dropout=dropout, wide=wide) - saved() == pytest.approx(inner + copies)


def test_weights_of_four_bits_are_read_and_written_in_both_passes() -> None:
    lora, qlora = (
        context(workload(AdapterSpec(method=method, rank=8)), layout())
        for method in ("lora", "qlora")
    )
    names = {"down_proj": 4096.0}
    plain, narrow = (linear(c, 4096.0, 4096.0, 14336.0, names) for c in (lora, qlora))
    widened_s = 4096 * 14336 * (2.0 + 0.515869140625) / lora.rates.hbm_bytes_per_s
    assert narrow.forward - plain.forward == pytest.approx(widened_s)
    assert narrow.backward - plain.backward == pytest.approx(widened_s)


def test_the_head_is_frozen() -> None:
    frozen, trained = (head(context(workload(a), layout())) for a in (QV, None))
    assert frozen.forward == trained.forward
    assert np.all(np.asarray(frozen.backward["gemm"]) < np.asarray(trained.backward["gemm"]))


@pytest.mark.parametrize(("zero", "shards"), [(0, 8), (1, 8), (3, 8)])
def test_states_by_hand(zero: int, shards: int) -> None:
    share = adapter_counts(MODEL, QV).dense / parameter_count(MODEL)
    full = state_bytes(workload(None), layout(zero_stage=zero), shards)
    weights, gradients, states = state_bytes(workload(QV), layout(zero_stage=zero), shards)
    base = 2.0 / (shards if zero == 3 else 1)
    assert float(weights) == pytest.approx(base + share * float(full[0]))
    assert float(gradients) == pytest.approx(share * float(full[1]))
    assert float(states) == pytest.approx(share * float(full[2]))


def test_gradients_of_adapters_alone_are_reduced() -> None:
    one = layout(zero_stage=0)
    work = workload(QV, framework="megatron", dp_overlap=False)
    c = context(work, one)
    dense, expert = rank_parameters(MODEL, one, None)
    sent = data_parallel_traffic(c, dense, expert)
    everything = data_parallel_traffic(context(replace(work, adapters=None), one), dense, expert)
    share = work.trained_shares[0]
    assert float(sent.seconds) < 3.0 * share * float(everything.seconds) + 1e-3
    assert float(optimizer_s(c, dense, expert)) == pytest.approx(
        share * float(optimizer_s(context(replace(work, adapters=None), one), dense, expert))
    )


def test_zero_3_gathers_frozen_weights_in_the_bytes_that_they_are_kept_in() -> None:
    one = layout()
    dense, expert = rank_parameters(MODEL, one, None)
    seconds = {}
    for method in ("lora", "qlora"):
        work = workload(AdapterSpec(method=method, rank=8))
        c = context(work, one)
        gathers = 2.0 * 4  # of four micro-batches, forward and backward
        whole = work.frozen_weight_bytes[0] * float(dense)
        sent_s = float(long_ring_pass_s(whole, c.placement.dp_cp, c.links))
        copied_s = 2.0 * whole / c.rates.hbm_bytes_per_s  # out of the buffer, by FSDP2
        least_s = gathers * (sent_s + copied_s)
        seconds[method] = float(data_parallel_traffic(c, dense, expert).seconds)
        assert least_s < seconds[method] < 1.5 * least_s
    assert seconds["qlora"] < 0.5 * seconds["lora"]


@pytest.mark.parametrize(("framework", "again"), [("fsdp2", True), ("deepspeed", False)])
def test_zero_2_shards_frozen_weights_under_pytorch_alone(framework: str, again: bool) -> None:
    """FSDP2 reshards after each backward pass (torch, _fsdp_param_group.py); DeepSpeed shards none."""
    one = layout(zero_stage=2)
    work = workload(AdapterSpec(rank=8), framework=framework, dp_overlap=False)
    c = context(work, one)
    dense, expert = rank_parameters(MODEL, one, None)
    frozen = work.frozen_weight_bytes[0] * float(dense)
    gathered_s = 4 * float(long_ring_pass_s(frozen, c.placement.dp_cp, c.links))
    sent_s = float(data_parallel_traffic(c, dense, expert).seconds)
    assert again * gathered_s < sent_s < again * 2.0 * gathered_s + 0.3 * gathered_s
    weights, _, _ = state_bytes(work, one, 8)
    trained = work.trained_shares[0] * float(state_bytes(replace(work, adapters=None), one, 8)[0])
    assert float(weights) == pytest.approx(2.0 + again * 2.0 / 8 + trained)


@pytest.mark.parametrize(
    ("framework", "zero", "gathers"),
    [
        ("fsdp2", 2, 4),
        ("fsdp2", 3, 8),
        ("deepspeed", 0, 0),
        ("deepspeed", 2, 0),
        ("deepspeed", 3, 8),
    ],
)
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_traffic_is_of_what_is_gathered_and_of_adapters(
    method: Literal["lora", "qlora"], framework: str, zero: int, gathers: int
) -> None:
    one = layout(zero_stage=zero)
    work = workload(AdapterSpec(method=method, rank=8), framework=framework)
    full, c = context(replace(work, adapters=None), one), context(work, one)
    (sent,) = (level.by_axis["dp"] for level in level_traffic(c, ((32,),), 1.0))
    (everything,) = (level.by_axis["dp"] for level in level_traffic(full, ((32,),), 1.0))
    frozen = work.frozen_weight_bytes[0] * float(rank_parameters(MODEL, one, None)[0])
    expected = gathers * frozen * 7 / 8 + work.trained_shares[0] * everything
    assert sent == pytest.approx(expected)
    assert group_traffic(c, ((32,),)).gradients == pytest.approx(sent)


def test_inputs_of_frozen_matrices_are_not_kept() -> None:
    def saved(adapters: AdapterSpec | None) -> float:
        kept, _ = activation_bytes_per_layer(
            workload(adapters, framework="megatron"), layout(), experts=False
        )
        return float(np.asarray(kept)) / 4096

    everything = saved(AdapterSpec(rank=8))
    inner = 7 * 2 * 8.0  # seven adapters of rank 8 at 16 bits
    assert everything == pytest.approx(saved(None) + inner)
    # Without adapters in the feed-forward: neither its normed input nor the input of the last product.
    expected = saved(None) + 2 * 2 * 8.0 - 2.0 * 4096 - 2.0 * 14336
    assert saved(QV) == pytest.approx(expected)


def test_a_step_is_cheaper_with_adapters_and_dearer_with_wider_ones() -> None:
    one = layout(recompute=Recompute.FULL, recompute_layers=32)
    stages = ((32,),)

    def step_s(adapters: AdapterSpec | None) -> float:
        return float(np.asarray(exact_step(context(workload(adapters), one), stages).seconds))

    times = [step_s(AdapterSpec(rank=rank)) for rank in (4, 64, 512)]
    assert times == sorted(times)
    assert step_s(QV) < min(times[0], step_s(None))


def test_memory_of_qlora_on_one_small_card() -> None:
    # Llama 2 7B with 4-bit weights: 3.1 GiB of matrices and 0.5 of token table and head.
    work = workload(
        AdapterSpec(method="qlora", rank=16), model=load_catalog_model("llama-2-7b"), gpus=1
    )
    one = Layout(num_micro_batches=32, recompute=Recompute.FULL, recompute_layers=32)
    parts = stage_memory_parts_gib(work, one, ((32,),))
    adapters = adapter_counts(work.model, AdapterSpec(rank=16)).total
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    base = matrices * (0.5 + 1 / 64 + 4 / (64 * 256)) + 2.0 * (2 * 32000 * 4096 + 65 * 4096)
    assert float(parts["weights"][0]) * 2**30 == pytest.approx(base + 2.0 * adapters, rel=1e-6)


def test_flops_of_frozen_weights() -> None:
    trained, frozen = (flops_per_token(MODEL, 4096, frozen_weights=flag) for flag in (False, True))
    matrices = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128_256 * 4096
    assert trained - frozen == pytest.approx(2.0 * matrices)


def test_magnitudes_by_hand() -> None:
    """Norms of W + B A forward, and outputs that are scaled, by their bytes and products."""
    lora, dora = (
        context(workload(AdapterSpec(method=m, rank=8)), layout()) for m in ("lora", "dora")
    )
    tokens, n, k = 4096.0, 4096.0, 14336.0
    plain, decomposed = (linear(c, tokens, n, k, {"down_proj": n}) for c in (lora, dora))
    rate = lora.rates.hbm_bytes_per_s
    products = gemm_s(k, 8.0, k, lora.rates) + gemm_s(k, n, 8.0, lora.rates)
    norm_s = products + (12.0 * n * k + 2.0 * k * k) / rate
    assert decomposed.forward - plain.forward == pytest.approx(norm_s + 14 * tokens * n / rate)
    assert decomposed.backward - plain.backward == pytest.approx(30 * tokens * n / rate)
    untouched = linear(dora, tokens, n, k, {"unknown": n})
    assert untouched.forward == gemm_s(tokens, n, k, lora.rates)


def test_what_magnitudes_keep_by_hand() -> None:
    """The frozen output and the adapter's of every adapted matrix, 2 bytes each."""
    one = layout()
    kept = [
        np.asarray(
            activation_bytes_per_layer(workload(AdapterSpec(method=m, rank=8)), one, experts=False)[
                0
            ]
        )
        for m in ("lora", "dora")
    ]
    outputs = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    assert kept[1] - kept[0] == pytest.approx(4096 * 4 * outputs)


def test_norms_need_room_for_the_largest_matrix() -> None:
    sizes = [normed_bytes(workload(AdapterSpec(method=m))) for m in ("lora", "dora", "dora-8bit")]
    assert sizes == [
        0.0,
        6 * 4096 * 14336 + 2 * 14336**2,
        10 * 4096 * 14336 + 2 * 14336**2,
    ]


def test_weights_of_eight_bits_multiply_as_integers_and_are_widened_backward() -> None:
    work = workload(AdapterSpec(method="lora-8bit", targets=("q_proj",)), framework="deepspeed")
    c = context(work, layout(zero_stage=2))
    tokens, n, k = 8192.0, 4096.0, 14336.0
    passes, wide = linear(c, tokens, n, k, {"down_proj": n}), gemm_s(tokens, n, k, c.rates)
    rate = c.rates.hbm_bytes_per_s
    quantised_s = tokens * (16.0 * k + 10.0 * n) / rate
    assert 0.5 < (passes.forward - quantised_s) / wide < 0.75
    element = work.frozen_weight_bytes[1]
    expected = gemm_s(tokens, k, n, c.rates) + (element + 6.0) * n * k / rate
    assert passes.backward == pytest.approx(expected)
    half = context(replace(work, precision="fp16"), layout(zero_stage=2))
    uncast = linear(half, tokens, n, k, {"down_proj": n})
    assert passes.forward - uncast.forward == pytest.approx(tokens * 4.0 * (k + n) / rate)


def test_inputs_of_matrices_of_eight_bits_are_kept() -> None:
    q_only = AdapterSpec(method="lora-8bit", targets=("q_proj",)), AdapterSpec(targets=("q_proj",))
    eight, sixteen = (
        np.asarray(activation_bytes_per_layer(workload(a), layout(), experts=False)[0])
        for a in q_only
    )
    # Inputs of the gate and up projections, and of the last.
    assert eight - sixteen == pytest.approx(4096 * 2 * (4096 + 14336), rel=1e-6)


def hybrid(pattern: str) -> ModelSpec:
    fields = load_catalog_model("nemotron-h-8b").model_dump(exclude_unset=True)
    return ModelSpec.model_validate(fields | {"layers": len(pattern), "hybrid_pattern": pattern})


@pytest.mark.parametrize(
    ("model", "targets", "ahead"),
    [
        (hybrid("M-M*-M"), ("qkv_proj",), 3),
        (hybrid("M-M*-M"), ("down_proj",), 1),
        (hybrid("M-M*-M"), ("all-linear",), 0),
        (hybrid("M-M*-M"), ("q_a_proj",), 0),
        (load_catalog_model("qwen3-next-80b-a3b"), ("q_proj", "v_proj"), 3),
        (load_catalog_model("deepseek-v3"), ("experts",), 3),
        (MODEL, ("down_proj",), 0),
    ],
)
def test_which_layers_are_ahead_of_all_adapters(
    model: ModelSpec, targets: tuple[str, ...], ahead: int
) -> None:
    layers = with_layers_ahead(model, AdapterSpec(targets=targets)).unlike_layers
    assert [symbols.endswith("'") for symbols in layers[:ahead]] == [True] * ahead
    assert not any(symbols.endswith("'") for symbols in layers[ahead:])
    assert [symbols.removesuffix("'") for symbols in layers] in ([], list(model.symbols))


def test_layers_ahead_of_all_adapters_run_forward_alone() -> None:
    """Mamba ahead of attention and behind it, so long that the host is never waited for."""
    beside = AdapterSpec(rank=8, targets=("qkv_proj", "o_proj"))
    work = workload(beside, model=hybrid("M-M*-M"), seq_len=32_768)
    c = context(work, layout())
    ahead, _, _, _, behind = kind_times(c).unlike
    assert float(ahead.backward_s) == 0.0
    assert float(ahead.seconds) < 0.5 * float(behind.seconds)
    assert float(ahead.seconds) == pytest.approx(
        float(behind.seconds) - float(behind.backward_s), rel=0.02
    )
    checkpointed = context(work, layout(recompute=int(Recompute.FULL), recompute_layers=6))
    kinds = kind_times(checkpointed).unlike
    assert float(kinds[0].seconds) == pytest.approx(float(kinds[4].seconds), rel=1e-12)


def test_layers_ahead_of_all_adapters_keep_nothing_on_the_first_stage() -> None:
    """M-M ahead of attention; as a second stage their input has a gradient."""
    beside = AdapterSpec(rank=8, targets=("qkv_proj", "o_proj"))
    work = workload(beside, model=hybrid("M-M*-M"), framework="megatron", gpus=2)
    pipeline = Layout(pp=2, num_micro_batches=2)
    kept = {
        first: stage_memory_parts_gib(work, pipeline, ((first,), (6 - first,)))["activations"]
        for first in (1, 2, 3)
    }
    assert [float(kept[first][0]) for first in (1, 2, 3)] == [0.0] * 3
    assert float(kept[1][1]) > float(kept[2][1]) > float(kept[3][1]) > 0.0
    steps = [
        exact_step(context(work, pipeline), ((first,), (6 - first,))).seconds for first in (1, 2, 3)
    ]
    assert float(steps[0]) > float(steps[1]) > float(steps[2])
