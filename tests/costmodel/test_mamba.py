"""Mamba-2 and hybrid patterns: products by executing them, price and memory by hand, the mean of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.activations import activation_bytes_per_layer, saved_activations
from meshwright.costmodel.layer_kinds import KindTime, kind_times
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.other_blocks import mamba_block, scan_s
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.states import end_parameters, rank_parameters
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.volumes import (
    context_volumes,
    expert_passes,
    mean_rank_work,
    tensor_passes,
)
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.blocks import Mamba2Spec
from meshwright.model_specs.parameters import (
    attention_flops_per_token,
    flops_per_token,
    mamba_parameters,
    mtp_parameters,
    parameter_count,
)
from meshwright.model_specs.reader import load_catalog_model
from meshwright.model_specs.schema import ModelSpec

SPEC = Mamba2Spec(heads=4, head_dim=8, state_dim=6, groups=2)
WIDE = Mamba2Spec(heads=128, head_dim=64, state_dim=128, groups=8)
EXPERTS = {"experts": 8, "top_k": 2, "moe_ffn_hidden": 1024}


def small(**changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "layers": 4,
        "hidden": 16,
        "ffn_hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 128,
        "activation": "squared_relu",
        "norms_per_layer": 1,
        "hybrid_pattern": "M-M*",
        "mamba": SPEC,
    }
    return ModelSpec.model_validate(fields | changes)


def wide(pattern: str, **changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "hidden": 4096,
        "ffn_hidden": 16_384,
        "heads": 32,
        "kv_heads": 8,
        "vocab": 32_000,
        "layers": len(pattern),
        "hybrid_pattern": pattern,
        "mamba": WIDE if "M" in pattern else None,
        "moe": EXPERTS if "E" in pattern else None,
    }
    return small(**(fields | changes))


def workload(model: ModelSpec, **changes: Any) -> Workload:
    fields: dict[str, Any] = {"gpus": 8, "global_batch": 64, "seq_len": 4096}
    return Workload(model=model, cluster=read_cluster("dgx-h100"), **(fields | changes))


def layer_time(model: ModelSpec, layout: Layout, **changes: Any) -> KindTime:
    work = workload(model, **changes)
    times = kind_times(make_context(work, layout, nested_placement(work.cluster, layout)))
    layer = times.moe if model.moe is not None else times.dense
    assert layer is not None
    return layer


def test_parameters_by_hand() -> None:
    # Gate and channels 32 each, B and C 12 each, 4 step sizes; out 32. Convolution of 56 with a bias, three
    # numbers a head, and the norm.
    assert (SPEC.width, SPEC.convolved_width, SPEC.projected_width) == (32, 56, 92)
    one = 16 * 92 + 32 * 16 + 5 * 56 + 3 * 4 + 32
    assert mamba_parameters(small()) == one
    attention, feed_forward = 16 * (16 + 8 + 8 + 16), 2 * 16 * 64
    around = 2 * 128 * 16 + 16
    assert parameter_count(small()) == around + 2 * one + attention + feed_forward + 4 * 16
    bare = SPEC.model_copy(update={"conv_bias": False, "gated_norm": False})
    assert mamba_parameters(small(mamba=bare)) == one - 56 - 32


def test_every_layer_has_both_beside_attention() -> None:
    plain = small(hybrid_pattern=None, mamba=None, norms_per_layer=2)
    beside = small(hybrid_pattern=None, mamba_beside_attention=True, norms_per_layer=2)
    assert parameter_count(beside) - parameter_count(plain) == 4 * mamba_parameters(beside)
    scans = attention_flops_per_token(beside, 64) - attention_flops_per_token(plain, 64)
    assert scans == 4 * 3 * 7 * 32 * 6


def test_model_flops_are_those_of_megatron() -> None:
    only = small(hybrid_pattern="MMMM", ffn_hidden=0)
    assert attention_flops_per_token(only, 4096) == 4 * 3 * 7 * 32 * 6
    # megatron/training/training.py, hybrid_flops, at 128 heads of 64, which are 2 h wide as it supposes.
    model = load_catalog_model("nemotron-h-8b")
    h, inner, seq = 4096, 8192, 8192
    mamba = 2 * h * (2 * inner + 2 * 8 * 128 + 128) + 7 * inner * 128 + 2 * inner * h
    attention = 4 * h * (32 * 128 / h) * (h + h * 8 / 32) + 4 * (32 * 128) * seq / 2
    feed_forward = 4 * h * 21_504
    forward = 24 * mamba + 4 * attention + 24 * feed_forward + 2 * h * 131_072
    assert flops_per_token(model, seq) == pytest.approx(3 * forward, rel=1e-12)


Matrix = NDArray[np.floating[Any]]


class Products:
    """Matrix products that count their FLOP."""

    def __init__(self) -> None:
        self.flops = 0.0

    def __call__(self, a: Matrix, b: Matrix) -> Matrix:
        self.flops += 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
        return a @ b


def test_products_of_a_chunk_make_the_recurrence_and_are_what_is_priced() -> None:
    """One head of one group: h = a h + b x^T and y = h^T c, token by token and in chunks."""
    rng, size, width, states = np.random.default_rng(5), 16, 5, 3
    x = rng.normal(size=(2 * size, width))
    b, c = rng.normal(size=(2, 2 * size, states))
    decay = rng.uniform(0.5, 1.0, size=2 * size)
    state, expected = np.zeros((states, width)), np.zeros((2 * size, width))
    for t in range(2 * size):
        state = decay[t] * state + np.outer(b[t], x[t])
        expected[t] = c[t] @ state
    times, state, outputs = Products(), np.zeros((states, width)), []
    for part in (slice(0, size), slice(size, 2 * size)):
        total = np.cumsum(np.log(decay[part]))
        within = np.tril(np.exp(total[:, None] - total[None, :]))
        inside = times(within * times(c[part], b[part].T), x[part])
        outputs.append(inside + np.exp(total)[:, None] * times(c[part], state))
        left = np.exp(total[-1] - total)[:, None]
        state = np.exp(total[-1]) * state + times((left * b[part]).T, x[part])
    np.testing.assert_allclose(np.concatenate(outputs), expected, atol=1e-9)
    per_position = 4 * states * width + 2 * size * width + 2 * size * states
    assert times.flops == 2 * size * per_position


@pytest.mark.parametrize("tp", [1, 4])
def test_the_scan_takes_its_products_or_its_bytes(tp: int) -> None:
    work, layout = workload(wide("M-")), Layout(tp=tp, dp=8 // tp)
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    scan = scan_s(c, WIDE)
    flops = 128 * (4 * 8192 + 2 * 128 * 64) + 8 * 2 * 128 * 128
    moved = 128 * (6 * 64 + 12 * 64 + 26) + 8 * (8 * 128 + 8 * 128)
    forward = max(flops / (0.75e12 * c.rates.sms), moved / c.rates.hbm_bytes_per_s)
    assert scan.forward == pytest.approx(4096 / tp * forward)
    assert float(scan.backward) > 2 * float(scan.forward)


@pytest.mark.parametrize(
    ("tokens", "measured"), [(8192, 12.62e6), (16_384, 12.92e6), (32_768, 11.80e6)]
)
def test_the_scan_takes_what_was_measured_on_an_h100(tokens: int, measured: float) -> None:
    """Tokens/s of mamba_ssm's forward kernels, chunks of 256 (vllm-project/vllm pull request 27299)."""
    work, layout = replace(workload(wide("M-")), framework="fsdp2"), Layout(dp=8)
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    scan = scan_s(c, WIDE.model_copy(update={"groups": 1, "chunk": 256}))
    assert tokens / measured == pytest.approx(float(scan.forward) * tokens / 4096, rel=0.1)


def test_megatron_scans_128_positions_at_once_whatever_the_model_says() -> None:
    longer = WIDE.model_copy(update={"chunk": 256})
    seconds = {}
    for framework in ("megatron", "fsdp2"):
        work, layout = replace(workload(wide("M-")), framework=framework), Layout(dp=8)
        c = make_context(work, layout, nested_placement(work.cluster, layout))
        seconds[framework] = [float(scan_s(c, spec).forward) for spec in (WIDE, longer)]
    assert seconds["megatron"][0] == seconds["megatron"][1]
    assert seconds["fsdp2"][0] != seconds["fsdp2"][1]


def test_layers_of_a_pattern_have_the_mean_time_of_their_blocks() -> None:
    layout = Layout(tp=2, dp=4, sequence_parallel=True)

    def device_s(pattern: str) -> float:
        """Without the host, whose launches hide behind longer layers."""
        layer = layer_time(wide(pattern), layout)
        return float(layer.seconds) - float(layer.parts["host"])

    mean = 0.5 * device_s("MMMM") + 0.25 * device_s("****") + 0.25 * device_s("----")
    assert device_s("MM*-") == pytest.approx(mean)


def test_a_pattern_of_attention_and_feed_forward_is_a_transformer() -> None:
    layout = Layout(tp=2, dp=4, sequence_parallel=True)
    plain = wide("*-", layers=1, hybrid_pattern=None, norms_per_layer=2)
    half, whole = layer_time(wide("*-"), layout), layer_time(plain, layout)
    assert 2 * half.seconds == pytest.approx(whole.seconds)
    assert 2 * half.recompute_s == pytest.approx(whole.recompute_s)
    of_half, _ = activation_bytes_per_layer(workload(wide("*-")), layout, experts=False)
    of_whole, _ = activation_bytes_per_layer(workload(plain), layout, experts=False)
    assert 2 * of_half == of_whole
    assert parameter_count(wide("*-")) == parameter_count(plain)


def test_what_streams_by_hand() -> None:
    def bytes_of(mamba: Mamba2Spec, micro_batch: int) -> float:
        """Of one token, forward and backward, beside the block's own norm and residual."""
        work = workload(wide("M", mamba=mamba))
        layout = Layout(dp=8, micro_batch=micro_batch)
        c = make_context(work, layout, nested_placement(work.cluster, layout))
        block, around = mamba_block(c), sum(c.element_bytes.around)
        seconds = float(block.forward["memory_bound"]) + float(block.backward["memory_bound"])
        moved = seconds * c.rates.hbm_bytes_per_s / (4096 * micro_batch)
        return moved - around * 4096

    inner, convolved, projected = 8192, 8192 + 2 * 1024, 2 * 8192 + 2 * 1024 + 128
    bare = WIDE.model_copy(update={"gated_norm": False})
    gated = 14 * convolved + 16 * inner
    assert bytes_of(bare, 1) == pytest.approx(gated, rel=1e-6)
    assert bytes_of(WIDE, 1) == pytest.approx(gated + 10 * inner, rel=1e-6)
    assert bytes_of(bare, 2) == pytest.approx(gated + 8 * (projected + inner), rel=1e-6)


def test_the_scan_does_not_slow_with_the_sequence() -> None:
    def attention_s(pattern: str, seq_len: int, micro_batch: int) -> float:
        layout = Layout(dp=8, micro_batch=micro_batch)
        return float(layer_time(wide(pattern), layout, seq_len=seq_len).parts["attention"])

    assert attention_s("M", 4096, 2) == pytest.approx(attention_s("M", 8192, 1))
    assert attention_s("*", 4096, 2) < 0.6 * attention_s("*", 8192, 1)


def test_memory_by_hand() -> None:
    layout = Layout(tp=2, dp=4)
    kept, dropped = activation_bytes_per_layer(workload(wide("MM")), layout, experts=False)
    # Input and its norm; the first projection, output of scan, gate and norm, a number a group.
    whole = 2 * 2 * 4096
    cut = 2 * (2 * 8192 + 2 * 1024 + 128) + 3 * 2 * 8192 + 4 * 8
    assert kept == 4096 * (whole + cut / 2)
    assert dropped == 4096 * 2 * 4096


@pytest.mark.parametrize("pattern", ["M-M*", "MEM*", "MMMM"])
def test_all_parameters_stand_on_some_rank(pattern: str) -> None:
    model = wide(pattern)
    dense, experts = rank_parameters(model, Layout(pp=2, dp=4), ((2,), (2,)))
    # The final norm is left out on ranks.
    total = float(np.sum(dense)) + float(np.sum(experts))
    assert total == parameter_count(model) - model.hidden
    routed = pattern.count("E") * 8 * 2 * 4096 * 1024
    assert float(np.sum(experts)) == routed


def test_traffic_counts_the_blocks_that_send() -> None:
    def work_of(model: ModelSpec, layout: Layout) -> Any:
        work = workload(model)
        c = make_context(work, layout, nested_placement(work.cluster, layout))
        return c, mean_rank_work(c, ((model.layers,),))

    plain = wide("*-", layers=1, hybrid_pattern=None, norms_per_layer=2)
    layout = Layout(tp=2, dp=4)
    assert tensor_passes(*work_of(wide("*-"), layout)) == tensor_passes(*work_of(plain, layout))
    c, work = work_of(wide("MEM*"), Layout(dp=8, ep=8))
    assert expert_passes(work) == 4
    c, work = work_of(wide("MM"), Layout(cp=8))
    swapped = 2 * (4096 / 8) * (WIDE.projected_width + WIDE.width)
    assert context_volumes(c, work).whole == swapped * 2 * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mtp_layers": 1}, "mtp_pattern and mtp_layers beside hybrid_pattern need each other"),
        ({"mtp_pattern": "*-"}, "mtp_pattern and mtp_layers beside hybrid_pattern need each other"),
        (
            {"mtp_layers": 1, "mtp_pattern": "*E"},
            "mtp_pattern has experts, E, and the model has no",
        ),
        ({"mtp_shared": True}, "mtp_shared has no use without mtp_layers"),
        ({"sliding_window": 64, "full_attention_every": 2}, "with sliding_window"),
        ({"hybrid_pattern": "M-M"}, "has 3 layers, layers is 4"),
        ({"hybrid_pattern": "--**"}, "need each other"),
        ({"mamba": None}, "need each other"),
        ({"hybrid_pattern": "MEM*"}, "moe and layers with experts"),
        ({"moe": EXPERTS}, "moe and layers with experts"),
        ({"hybrid_pattern": "M-MX"}, "String should match pattern"),
        ({"ffn_hidden": 0}, "ffn_hidden must be at least 1"),
        ({"hybrid_pattern": None}, "needs hybrid_pattern or mamba_beside_attention"),
        ({"mamba_beside_attention": True}, "has no use with hybrid_pattern"),
        (
            {"mamba_beside_attention": True, "mamba": None, "hybrid_pattern": None},
            "mamba_beside_attention needs mamba",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        small(**changes)
    with pytest.raises(ValidationError, match="multiple of groups"):
        Mamba2Spec(heads=4, head_dim=8, state_dim=6, groups=3)


@pytest.mark.parametrize(("blocks", "pattern"), [("*-", "*-M"), ("*E", "M*E")])
@pytest.mark.parametrize("layout", [Layout(dp=8, ep=2), Layout(tp=2, pp=2, dp=2)])
def test_a_prediction_module_beside_a_pattern_is_that_of_a_transformer(
    blocks: str, pattern: str, layout: Layout
) -> None:
    experts = EXPERTS if "E" in blocks else None
    plain = wide(
        "****", hybrid_pattern=None, mamba=None, moe=experts, norms_per_layer=2, mtp_layers=2
    )
    hybrid = wide(pattern, mtp_layers=2, mtp_pattern=blocks)
    modules, ends, saved = [], [], []
    for model in (plain, hybrid):
        work = workload(model)
        times = kind_times(make_context(work, layout, nested_placement(work.cluster, layout)))
        assert times.mtp is not None
        modules.append(times.mtp.seconds)
        ends.append(end_parameters(model, layout))
        saved.append(saved_activations(work, layout).module)
    assert modules[1] == pytest.approx(modules[0], rel=1e-12)
    assert saved[1] == pytest.approx(saved[0], rel=1e-12)
    assert [float(part) for part in ends[1]] == pytest.approx([float(part) for part in ends[0]])


def test_modules_of_one_set_of_weights_run_as_often_and_are_held_once() -> None:
    apart = wide("M*E", mtp_layers=3, mtp_pattern="*E")
    shared = apart.model_copy(update={"mtp_shared": True})
    layout = Layout(pp=2, dp=4)
    of_apart, of_shared = (end_parameters(model, layout) for model in (apart, shared))
    assert of_shared[2] == of_apart[2] / 3
    table = 32_000 * 4096
    # The last rank has the head, and a token table to feed the modules.
    assert of_apart[1] - 2 * table == pytest.approx(3 * (of_shared[1] - 2 * table))
    dense, experts = rank_parameters(shared, Layout(dp=8), ((3,),))
    whole = float(np.sum(dense)) + float(np.sum(experts)) + shared.hidden
    assert whole == parameter_count(shared) + mtp_parameters(shared)
    prices = []
    for model in (apart, shared):
        work = workload(model)
        placement = nested_placement(work.cluster, layout)
        prices.append(kind_times(make_context(work, layout, placement)).mtp)
    assert prices[0] is not None
    assert prices[1] is not None
    assert prices[1].seconds == prices[0].seconds
