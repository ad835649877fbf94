"""Linear attention: its products by executing them, its price and memory by hand, and who can run it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from meshwright.cluster_specs.reader import read_cluster
from meshwright.constraints.registry import rules_of
from meshwright.costmodel.activations import activation_bytes_per_layer
from meshwright.costmodel.feed_forward import linear
from meshwright.costmodel.layer_context import Passes, streamed_passes_s
from meshwright.costmodel.layer_kinds import kind_times
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.other_blocks import (
    delta_rule_s,
    kda_rule_s,
    lightning_products_s,
    linear_attention_block,
)
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.states import rank_parameters
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.volumes import context_volumes, mean_rank_work
from meshwright.costmodel.workload import Workload
from meshwright.errors import InputError
from meshwright.frameworks.catalog import RECORDS, framework_named
from meshwright.model_specs.adapters import AdapterSpec, adapter_counts, counted_matrices, resolved
from meshwright.model_specs.blocks import LinearAttentionSpec, MlaSpec, SparseIndexerSpec
from meshwright.model_specs.parameters import (
    attention_flops_per_token,
    attention_parameters,
    linear_attention_matmul_parameters,
    linear_attention_parameters,
    parameter_count,
)
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.launch.megatron import MEGATRON_SAYS, megatron_shortfalls, model_flags
from meshwright.planner.launch.writer import flag_words, notes_of
from meshwright.planner.runs.launches.command_line import words_of
from meshwright.planner.runs.launches.megatron import megatron_model

SPEC = LinearAttentionSpec(key_heads=2, value_heads=4, key_head_dim=4, value_head_dim=8)
WIDE = LinearAttentionSpec(key_heads=16, value_heads=32, key_head_dim=128, value_head_dim=128)
SQUARE = {"key_heads": 32, "value_heads": 32, "key_head_dim": 128, "value_head_dim": 128}
KDA = LinearAttentionSpec.model_validate({"type": "kda", "gate_rank": 128, **SQUARE})
WHOLE_GATES = LinearAttentionSpec.model_validate({"type": "kda", **SQUARE})
LIGHTNING = LinearAttentionSpec.model_validate({"type": "lightning", **SQUARE})
CONVOLUTION = LinearAttentionSpec(
    type="short_conv",
    key_heads=1,
    value_heads=1,
    key_head_dim=2304,
    value_head_dim=2304,
    conv_kernel=3,
)


def model(spec: LinearAttentionSpec = SPEC, every: int = 4, **changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "layers": 8,
        "hidden": 16,
        "ffn_hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 128,
        "linear_attention": spec,
        "full_attention_every": every,
    }
    return ModelSpec.model_validate(fields | changes)


def wide_model(every: int = 4) -> ModelSpec:
    return model(WIDE, every, hidden=2048, ffn_hidden=5120, heads=16, kv_heads=2, vocab=32_000)


def other_model(spec: LinearAttentionSpec, every: int = 4) -> ModelSpec:
    return model(spec, every, hidden=2304, ffn_hidden=9216, heads=32, kv_heads=32, vocab=32_000)


def workload(spec: ModelSpec, seq_len: int = 4096) -> Workload:
    return Workload(
        model=spec, cluster=read_cluster("dgx-h100"), gpus=8, global_batch=64, seq_len=seq_len
    )


def test_parameters_by_hand() -> None:
    # In: queries and keys 8 each, values and gate 32 each, two gates for 4 heads; out: 32.
    assert SPEC.projected_width == 88
    assert linear_attention_parameters(model()) == 16 * 88 + 32 * 16 + 4 * 48 + 2 * 4 + 8
    full = model(linear_attention=None)
    difference = linear_attention_parameters(model()) - attention_parameters(full)
    assert parameter_count(model()) - parameter_count(full) == 6 * difference
    gated = full.model_copy(update={"attention_output_gate": True})
    assert attention_parameters(gated) - attention_parameters(full) == 16 * 16


def test_model_flops_follow_the_state_and_not_the_sequence() -> None:
    linear_only = model(every=0)
    # 3 passes of 2 FLOP: convolution 4 x 48, and four products with 4 states of 4 x 8.
    assert attention_flops_per_token(linear_only, 4096) == 3 * 2 * (4 * 48 + 4 * 4 * 4 * 8) * 8
    assert attention_flops_per_token(linear_only, 64) == attention_flops_per_token(linear_only, 8)


Matrix = NDArray[np.floating[Any]]


class Products:
    """Matrix products that count their FLOP."""

    def __init__(self) -> None:
        self.flops = 0.0

    def __call__(self, a: Matrix, b: Matrix) -> Matrix:
        self.flops += 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
        return a @ b


def test_products_of_a_chunk_make_the_recurrence_and_are_what_is_priced() -> None:
    rng, size, keys, values = np.random.default_rng(4), 64, 6, 10
    q, k = rng.normal(size=(2, 2 * size, keys)) / keys
    v, step = rng.normal(size=(2 * size, values)), rng.uniform(size=(2 * size, 1))
    state, expected = np.zeros((keys, values)), np.zeros((2 * size, values))
    for t in range(2 * size):
        state = state + step[t] * np.outer(k[t], v[t] - k[t] @ state)
        expected[t] = q[t] @ state
    times, state, outputs = Products(), np.zeros((keys, values)), []
    for part in (slice(0, size), slice(size, 2 * size)):
        triangle = np.tril(step[part] * times(k[part], k[part].T), -1)
        inverse = np.linalg.inv(np.eye(size) + triangle)
        w, u = times(inverse, step[part] * k[part]), times(inverse, step[part] * v[part])
        new = u - times(w, state)
        scores = np.tril(times(q[part], k[part].T))
        outputs.append(times(q[part], state) + times(scores, new))
        state = state + times(k[part].T, new)
    np.testing.assert_allclose(np.concatenate(outputs), expected, atol=1e-9)
    # Besides the inverse of the triangle, c^3 / 3.
    per_position = 2 * size * (3 * keys + 2 * values) + 6 * keys * values
    assert times.flops == 2 * size * per_position


@pytest.mark.parametrize("tp", [1, 4])
def test_delta_rule_takes_its_products_or_its_bytes(tp: int) -> None:
    work, layout = workload(wide_model()), Layout(tp=tp, dp=8 // tp)
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    rule = delta_rule_s(c, WIDE)
    heads = 4096 * 32 / tp
    rates, flops = c.rates, 81_920 + 4096 / 3 + 98_304
    in_kernels = 0.75e12 * rates.sms
    forward = max(flops / in_kernels, 5120 / rates.hbm_bytes_per_s)
    backward = max(3 * flops / in_kernels, 11_008 / rates.hbm_bytes_per_s)
    assert rule.forward == pytest.approx(heads * forward)
    assert rule.backward == pytest.approx(heads * backward)


@pytest.mark.parametrize(
    ("device", "heads", "forward_ms", "backward_ms"),
    [
        ("h200", 32, 1.890, 5.697),
        ("h200", 48, 2.711, None),
        ("h200", 64, 3.331, None),
        ("gb200", 32, 1.770, 5.714),
        ("gb200", 48, 2.521, None),
        ("gb200", 64, 2.943, None),
    ],
)
def test_delta_rule_takes_what_was_measured(
    device: str, heads: int, forward_ms: float, backward_ms: float | None
) -> None:
    """32,768 tokens in the kernels of flash-linear-attention (QwenLM/FlashQLA, benchmark)."""
    cluster = read_cluster({"h200": "dgx-h200", "gb200": "gb200-nvl72"}[device])
    work = replace(workload(wide_model(), 32_768), cluster=cluster)
    layout = Layout(dp=8)
    c = make_context(work, layout, nested_placement(cluster, layout))
    rule = delta_rule_s(c, WIDE.model_copy(update={"value_heads": heads}))
    assert 1e3 * float(rule.forward) == pytest.approx(forward_ms, rel=0.18)
    if backward_ms is not None:
        assert 1e3 * float(rule.backward) == pytest.approx(backward_ms, rel=0.15)


def test_layers_have_the_mean_time_and_linear_ones_do_not_slow_with_the_sequence() -> None:
    def attention_s(every: int, seq_len: int, micro_batch: int) -> float:
        work, layout = workload(wide_model(every), seq_len), Layout(dp=8, micro_batch=micro_batch)
        c = make_context(work, layout, nested_placement(work.cluster, layout))
        dense = kind_times(c).dense
        assert dense is not None
        return float(dense.parts["attention"])

    full, linear, mixed = (attention_s(every, 8192, 1) for every in (1, 0, 4))
    assert mixed == pytest.approx(0.25 * full + 0.75 * linear)
    assert attention_s(0, 4096, 2) == pytest.approx(linear)
    assert attention_s(1, 4096, 2) < 0.6 * full


def test_context_parallelism_swaps_tokens_for_heads() -> None:
    parts = {}
    for every in (0, 1):
        work, layout = workload(wide_model(every), 32_768), Layout(cp=8)
        c = make_context(work, layout, nested_placement(work.cluster, layout))
        dense = kind_times(c).dense
        assert dense is not None
        parts[every] = float(dense.parts["cp_comm"])
    assert parts[0] > 0
    assert parts[0] != parts[1]


def test_memory_by_hand() -> None:
    layout = Layout(tp=2, dp=4)
    linear, _ = activation_bytes_per_layer(workload(wide_model(0)), layout, experts=False)
    full, _ = activation_bytes_per_layer(workload(wide_model(1)), layout, experts=False)
    mixed, _ = activation_bytes_per_layer(workload(wide_model(4)), layout, experts=False)
    assert mixed == pytest.approx(0.25 * full + 0.75 * linear)
    # Convolution in and out 8,192 each, copied queries and keys 8,192, triangle, gates, three of 4,096.
    kept = 2 * 2 * 8192 + 2 * 8192 + 32 * (2 * 64 + 8) + 3 * 2 * 4096
    # Gates and 64 numbers of heads in the first projection, what the norm returns: not counted before.
    kept += 2 * (4096 + 64) + 2 * 4096
    # Attention: queries and output 2,048 each, keys and values 256 each, log-sum-exp.
    attention = 2 * (2048 + 2 * 256 + 2048) + 4 * 16
    assert linear - full == pytest.approx(4096 * (kept - attention) / 2)


def test_all_parameters_stand_on_some_rank() -> None:
    spec = wide_model()
    dense, experts = rank_parameters(spec, Layout(pp=2, dp=4), ((4,), (4,)))
    # The final norm is left out on ranks.
    assert float(np.sum(dense)) == parameter_count(spec) - spec.hidden
    assert float(np.sum(experts)) == 0
    halves, _ = rank_parameters(spec, Layout(tp=2, dp=4), ((8,),))
    whole = 8 * 2 * 2048 + 6 * 128
    assert 2 * float(np.sum(halves)) - whole == parameter_count(spec) - spec.hidden


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": 64}, "linear_attention with sliding_window is not supported"),
    ],
)
def test_what_cannot_be_priced_beside_it_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        model(**changes)
    fields = model().model_dump()
    del fields["full_attention_every"]
    with pytest.raises(ValidationError, match="linear_attention needs full_attention_every"):
        ModelSpec.model_validate(fields)


def test_windows_still_pass_keys_round_the_ring_in_every_layer() -> None:
    plain = wide_model().model_copy(update={"linear_attention": None, "full_attention_every": 1})
    windowed = plain.model_copy(update={"sliding_window": 512, "full_attention_every": 2})
    sent = []
    for spec in (plain, windowed, wide_model(0)):
        work, layout = workload(spec, 32_768), Layout(cp=8)
        c = make_context(work, layout, nested_placement(work.cluster, layout))
        sent.append(context_volumes(c, mean_rank_work(c, ((8,),))).whole)
    assert sent[0] == sent[1]
    # Of linear attention: 2 bytes of what goes in and out of its heads, forward and backward.
    assert sent[2] == 2 * (32_768 / 8) * (WIDE.projected_width + WIDE.value_width) * 2 * 8


@pytest.mark.parametrize("every", [0, 4])
def test_megatron_flags_are_read_back_as_the_model(every: int) -> None:
    spec = model(WIDE, every, hidden=2048, heads=16, attention_output_gate=True)
    words = flag_words(model_flags(spec, 1024))
    assert "--linear-attention-freq" in words
    read_back = ModelSpec.model_validate(
        megatron_model(words_of(" ".join(map(str, words)), "flags"))
    )
    for field in ("linear_attention", "full_attention_every", "attention_output_gate"):
        assert getattr(read_back, field) == getattr(spec, field)
    assert "linear_attention" not in " ".join(
        notes_of(spec, MEGATRON_SAYS, megatron_shortfalls(spec))
    )


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--experimental-attention-variant", "dsa"), ("--linear-attention-freq", "[1,0]*3")],
)
def test_other_mixtures_in_a_launch_file_are_refused(flag: str, value: str) -> None:
    words = flag_words(model_flags(model(), 1024) | {flag: value})
    quoted = " ".join(f"'{word}'" for word in words)
    with pytest.raises(InputError, match=flag):
        megatron_model(words_of(quoted, "flags"))


# Kimi Delta Attention and lightning attention.


def test_parameters_of_the_other_kinds_by_hand() -> None:
    """What transformers 5.23 builds of a layer: models/kimi_linear and models/minimax."""
    width = 32 * 128
    gates = 2 * (2304 * 128 + 128 * width) + 2304 * 32
    convolution, numbers, norm = 4 * 3 * width, 32 + width, 128
    kda = 4 * 2304 * width + gates + convolution + numbers + norm
    assert linear_attention_parameters(other_model(KDA)) == kda
    lightning = 2304 * 3 * width + 2 * 2304 * width + width
    assert linear_attention_parameters(other_model(LIGHTNING)) == lightning
    assert linear_attention_parameters(other_model(CONVOLUTION)) == 4 * 2304**2 + 3 * 2304
    whole = 6 * 2304 * width + 2304 * 32 + convolution + numbers + norm
    assert linear_attention_parameters(other_model(WHOLE_GATES)) == whole
    for spec in (KDA, WHOLE_GATES, LIGHTNING, CONVOLUTION):
        counted = other_model(spec, every=0)
        projections = sum(
            each.number * each.matrix.inputs * each.matrix.outputs
            for each in counted_matrices(counted, fused=False)
            if each.matrix.name not in ("gate_proj", "up_proj", "down_proj")
        )
        assert projections == 8 * linear_attention_matmul_parameters(counted)


def test_model_flops_of_the_other_kinds() -> None:
    """Forward and backward: four products with a state after a convolution, or two without one."""
    width = 32 * 128
    kda = attention_flops_per_token(other_model(KDA, every=0), 4096)
    assert kda == 3 * 2 * (4 * 3 * width + 4 * width * 128) * 8
    lightning = attention_flops_per_token(other_model(LIGHTNING, every=0), 4096)
    assert lightning == 3 * 2 * 2 * width * 128 * 8
    convolution = attention_flops_per_token(other_model(CONVOLUTION, every=0), 4096)
    assert convolution == 3 * 2 * 3 * 2304 * 8


def test_chunks_of_kimi_delta_attention_make_its_recurrence() -> None:
    """S_t = (1 - b k k') diag(a) S_(t-1) + b k v', arXiv 2510.26692, equation 1: a decay for each channel."""
    rng, size, keys, values = np.random.default_rng(7), 64, 6, 10
    q, k = rng.normal(size=(2, 2 * size, keys)) / keys
    v, step = rng.normal(size=(2 * size, values)), rng.uniform(size=(2 * size, 1))
    decay = np.exp(-0.05 * rng.uniform(size=(2 * size, keys)))
    state, expected = np.zeros((keys, values)), np.zeros((2 * size, values))
    for t in range(2 * size):
        state = decay[t][:, None] * state
        state = state + step[t] * np.outer(k[t], v[t] - k[t] @ state)
        expected[t] = q[t] @ state
    times, state, outputs = Products(), np.zeros((keys, values)), []
    for part in (slice(0, size), slice(size, 2 * size)):
        summed = np.cumsum(np.log(decay[part]), axis=0)
        up, down, last = np.exp(summed), np.exp(-summed), np.exp(summed[-1])
        triangle = np.tril(step[part] * times(k[part] * up, (k[part] * down).T), -1)
        inverse = np.linalg.inv(np.eye(size) + triangle)
        w, u = times(inverse, step[part] * k[part] * up), times(inverse, step[part] * v[part])
        new = u - times(w, state)
        scores = np.tril(times(q[part] * up, (k[part] * down).T))
        outputs.append(times(q[part] * up, state) + times(scores, new))
        state = last[:, None] * state + times((k[part] * down * last).T, new)
    np.testing.assert_allclose(np.concatenate(outputs), expected, atol=1e-9)
    # Of queries by keys and keys by keys, 6 of 16 blocks of 16 positions lie above the diagonal.
    left_out = 2 * 2 * size * keys * 6 / 16
    per_position = 4 * size * keys * 5 / 8 + 2 * size * (keys + 2 * values) + 6 * keys * values
    assert times.flops - 2 * size * left_out == 2 * size * per_position


def test_kimi_delta_attention_takes_its_products_or_its_bytes() -> None:
    work, layout = workload(other_model(KDA)), Layout(dp=8)
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    rule, rates, heads = kda_rule_s(c, KDA), c.rates, 4096 * 32
    # Of 64 positions, 128 wide: 20,480 + 49,152 + 1,365.3 + 98,304 FLOP, and 7,264 bytes with two states.
    flops = 20_480 + 49_152 + 4096 / 3 + 98_304
    moved = 44 * 128 + 12 * 128 + 8 * 64 + 96 + 4 * 256
    in_kernels = 0.75e12 * rates.sms
    forward = max(flops / in_kernels, moved / rates.hbm_bytes_per_s)
    assert rule.forward == pytest.approx(heads * forward)
    flops = 64 * (6 * 128 + 5 * 128 + 10 * 128) + 4 * 4096 + 16 * 16_384
    moved = 96 * 128 + 30 * 128 + 22 * 64 + 8 * 256
    backward = max(flops / in_kernels, moved / rates.hbm_bytes_per_s)
    assert rule.backward == pytest.approx(heads * backward)
    # Finer decays cost more than those of a head (arXiv 2510.26692, section 3.2).
    square = LinearAttentionSpec.model_validate(SQUARE)
    assert rule.forward > delta_rule_s(c, square).forward


def test_blocks_of_lightning_attention_make_its_recurrence() -> None:
    """S_t = a S_(t-1) + k v', o_t = q_t S_t: arXiv 2501.08313, equations 6 and 7, one decay for a head."""
    rng, size, width, decay = np.random.default_rng(8), 32, 6, 0.97
    q, k, v = rng.normal(size=(3, 2 * size, width))
    state, expected = np.zeros((width, width)), np.zeros((2 * size, width))
    for t in range(2 * size):
        state = decay * state + np.outer(k[t], v[t])
        expected[t] = q[t] @ state
    times, state, outputs = Products(), np.zeros((width, width)), []
    steps = np.arange(1, size + 1)
    inside = np.tril(decay ** np.maximum(steps[:, None] - steps, 0))
    for part in (slice(0, size), slice(size, 2 * size)):
        own = times(times(q[part], k[part].T) * inside, v[part])
        outputs.append(own + times(q[part] * decay ** steps[:, None], state))
        state = decay**size * state + times((k[part] * decay ** (size - steps)[:, None]).T, v[part])
    np.testing.assert_allclose(np.concatenate(outputs), expected, atol=1e-9)
    assert times.flops == 2 * size * (2 * size * 2 * width + 4 * width * width)
    work, layout = workload(other_model(LIGHTNING)), Layout(dp=8)
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    products = lightning_products_s(c, LIGHTNING)
    flops = 4096 * 32 * (2 * 256 * 256 + 4 * 128 * 128)
    assert products.forward == pytest.approx(flops / c.rates.head_gemm_flops)
    assert products.backward == pytest.approx(2 * products.forward)


def test_memory_of_the_other_kinds_by_hand() -> None:
    layout, width = Layout(dp=8), 32 * 128
    full, _ = activation_bytes_per_layer(workload(other_model(KDA, 1)), layout, experts=False)
    # Attention of 32 heads of 72: queries, keys, values and output, log-sum-exp.
    attention = 2 * 4 * 2304 + 4 * 32
    # Convolution in and out, decays, triangles and numbers of heads, gates' inner width, three of the output.
    kda_kept = 2 * 2 * 3 * width + 21 * width + 32 * (4 * 64 + 16) + 2 * 2 * 128 + 3 * 2 * width
    # Before and behind SiLU, scores, states, decayed queries and keys, five of the output.
    scores, states = 2 * 32 * 256, 2 * 2 * width * 128 / 256
    lightning_kept = 2 * 2 * 3 * width + scores + states + 2 * 2 * width + 5 * 2 * width
    # Two gates and what they multiply, two of them from the convolution's sides, and the last input.
    convolution_kept = 2 * 3 * 2304 + 3 * 2 * 2304
    for spec, kept in (
        (KDA, kda_kept),
        (WHOLE_GATES, kda_kept - 2 * 2 * 128),
        (LIGHTNING, lightning_kept),
        (CONVOLUTION, convolution_kept),
    ):
        linear, _ = activation_bytes_per_layer(
            workload(other_model(spec, 0)), layout, experts=False
        )
        assert linear - full == pytest.approx(4096 * (kept - attention)), spec.type


def test_a_short_convolution_takes_its_products_and_what_it_streams() -> None:
    """Beside norm and residual: two gates (6 and 10 bytes), convolution (4 and 8) and copy (4 and 4)."""
    work, layout = workload(other_model(CONVOLUTION, 0)), Layout(dp=8)
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    block = linear_attention_block(c)
    elements = 4096 * 2304
    around_f, around_b = (around * elements for around in c.element_bytes.around)
    streamed = streamed_passes_s(
        c, Passes(around_f + (2 * 6 + 4 + 4) * elements, around_b + (2 * 10 + 8 + 4) * elements)
    )
    inputs, output = (
        linear(c, c.tokens, np.float64(n), 2304, {name: n})
        for name, n in (("in_proj", 3 * 2304), ("out_proj", 2304))
    )
    forward = inputs.forward + output.forward + streamed.forward
    backward = inputs.backward + output.backward + streamed.backward
    assert sum(block.forward.values()) == pytest.approx(forward)
    assert sum(block.backward.values()) == pytest.approx(backward)


def test_adapters_stand_beside_both_projections_of_a_short_convolution() -> None:
    counted = other_model(CONVOLUTION, every=0)
    asked = resolved(counted, AdapterSpec(rank=8, targets=("in_proj", "out_proj")), fused=False)
    # 8 layers of rank 8: from the hidden width to three times it, and back from one.
    assert adapter_counts(counted, asked).total == 8 * 8 * (2304 + 3 * 2304 + 2304 + 2304)


def test_the_loop_over_blocks_costs_the_host_its_launches() -> None:
    """Sixteen kernels for each 256 positions, however many sequences a micro-batch has."""

    def host_s(spec: LinearAttentionSpec, seq_len: int) -> float:
        work = replace(workload(other_model(spec, 0), seq_len), framework="fsdp2")
        layout = Layout(dp=8, zero_stage=3)
        c = make_context(work, layout, nested_placement(work.cluster, layout))
        dense = kind_times(c).dense
        assert dense is not None
        return float(dense.parts["host"])

    assert host_s(LIGHTNING, 4096) > 2 * host_s(KDA, 4096)
    assert host_s(LIGHTNING, 8192) > host_s(LIGHTNING, 4096)


def test_frameworks_have_the_kinds_that_their_records_name() -> None:
    """Megatron has no module with either, torchtitan and DeepSpeed have no linear attention at all."""
    for record in RECORDS:
        for spec in (WIDE, KDA, LIGHTNING, CONVOLUTION):
            work = workload(other_model(spec) if spec is not WIDE else wide_model())
            names = [
                rule.name
                for rule in rules_of(record)
                if "-linear-" in rule.name and rule.applies(work)
            ]
            has_none = spec is WIDE and not record.linear_attention
            refusing = f"{record.name}-linear-{'attention' if has_none else 'kinds'}"
            known = spec.type in record.linear_attention
            assert names == ([] if known else [refusing]), (record.name, spec.type)
    kinds = {"gated_delta_net", "kda", "lightning", "short_conv"}
    assert set(framework_named("fsdp2").linear_attention) == kinds


@pytest.mark.parametrize("spec", [KDA, LIGHTNING])
def test_adapters_beside_the_other_kinds_are_refused(spec: LinearAttentionSpec) -> None:
    with pytest.raises(InputError, match=f"adapters beside {spec.title} have no price"):
        resolved(other_model(spec), AdapterSpec(), fused=False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gate_rank": 8}, "gate_rank needs type: kda"),
        ({"type": "lightning", "value_heads": 64}, "must be key_heads 32 under lightning"),
    ],
)
def test_kinds_that_contradict_themselves_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        LinearAttentionSpec.model_validate({**SQUARE, **fields})


def test_latent_attention_may_have_a_gate_on_each_head() -> None:
    latent = MlaSpec(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    plain = other_model(WHOLE_GATES, 1).model_copy(update={"attention": latent})
    gated = plain.model_copy(update={"attention_head_gates": True})
    assert attention_parameters(gated) - attention_parameters(plain) == 2304 * 32
    kept, without = (
        activation_bytes_per_layer(workload(each), Layout(dp=8), experts=False)[0]
        for each in (gated, plain)
    )
    # Gates, and their product with the output, of 16 bits.
    assert kept - without == pytest.approx(4096 * 2 * 32 * (1 + 128))


def test_latent_attention_stands_beside_kimi_delta_attention_alone() -> None:
    latent = MlaSpec(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
    assert model(KDA, attention=latent).linear_layers == 6
    with pytest.raises(ValidationError, match="linear_attention with attention is not supported"):
        model(attention=latent)
    indexed = latent.model_copy(
        update={"indexer": SparseIndexerSpec(heads=4, head_dim=32, top_k=128)}
    )
    with pytest.raises(ValidationError, match=r"attention\.indexer is not supported"):
        model(KDA, attention=indexed)
