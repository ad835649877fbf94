"""Gated DeltaNet: its products by executing them, its price and memory by hand, and who can run it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.activations import activation_bytes_per_layer
from meshwright.costmodel.layer_kinds import kind_times
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.other_blocks import delta_rule_s
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.states import rank_parameters
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.volumes import context_volumes, mean_rank_work
from meshwright.costmodel.workload import Workload
from meshwright.errors import InputError
from meshwright.model_specs.blocks import GatedDeltaNetSpec
from meshwright.model_specs.parameters import (
    attention_flops_per_token,
    attention_parameters,
    linear_attention_parameters,
    parameter_count,
)
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.launch.megatron import MEGATRON_SAYS, megatron_shortfalls, model_flags
from meshwright.planner.launch.writer import flag_words, notes_of
from meshwright.planner.runs.launches.command_line import words_of
from meshwright.planner.runs.launches.megatron import megatron_model

SPEC = GatedDeltaNetSpec(key_heads=2, value_heads=4, key_head_dim=4, value_head_dim=8)
WIDE = GatedDeltaNetSpec(key_heads=16, value_heads=32, key_head_dim=128, value_head_dim=128)


def model(spec: GatedDeltaNetSpec = SPEC, every: int = 4, **changes: Any) -> ModelSpec:
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
def test_delta_rule_takes_its_products_beside_its_bytes(tp: int) -> None:
    work, layout = workload(wide_model()), Layout(tp=tp, dp=8 // tp)
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    rule = delta_rule_s(c, WIDE)
    heads = 4096 * 32 / tp
    rates, flops = c.rates, 81_920 + 4096 / 3 + 98_304
    forward = np.hypot(flops / rates.attention_forward_flops, 5120 / rates.hbm_bytes_per_s)
    products = 3 * flops / rates.attention_backward_flops
    backward = np.hypot(products, 11_008 / rates.hbm_bytes_per_s)
    assert rule.forward == pytest.approx(heads * forward)
    assert rule.backward == pytest.approx(heads * backward)


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
        ({"mtp_layers": 1}, "linear_attention with mtp_layers is not supported"),
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
