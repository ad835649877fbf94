"""Bytes and seconds of parameters in FP8, 16-bit moments and a fused loss, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.activations import activation_bytes_per_layer
from meshwright.costmodel.execution_names import StateType
from meshwright.costmodel.footprint import stage_memory_parts_gib
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.stacks import stack_constants
from meshwright.costmodel.states import state_bytes
from meshwright.costmodel.step_time import exact_step, make_context
from meshwright.costmodel.workload import Fp8Recipe, Workload
from meshwright.model_specs.reader import load_catalog_model

HOPPER = Workload(
    model=load_catalog_model("llama-3-8b"),
    cluster=read_cluster("dgx-h100"),
    gpus=8,
    global_batch=128,
    seq_len=8192,
    precision="fp8",
)
BLACKWELL = replace(HOPPER, cluster=read_cluster("dgx-b200"))
LAYOUT = Layout(dp=8, zero_stage=1, num_micro_batches=16)
STAGES = ((32,),)


@pytest.mark.parametrize(
    ("work", "precision", "kept", "wide"),
    [
        (HOPPER, "bf16", 2.0, 2.0),
        (HOPPER, "fp8", 2.0, 4.0),
        (BLACKWELL, "fp8", 1.0, 3.0),
        (BLACKWELL, "mxfp8", 2.0625, 4.0625),
        (BLACKWELL, "nvfp4", 1.125, 3.125),
    ],
)
def test_weights_in_the_narrow_precision(
    work: Workload, precision: str, kept: float, wide: float
) -> None:
    for fp8_params, expected in ((True, kept), (False, wide)):
        asked = replace(work, precision=precision, fp8_params=fp8_params)
        weights, _, _ = state_bytes(asked, LAYOUT, 8)
        assert weights == pytest.approx(expected)


@pytest.mark.parametrize(("moment_dtype", "expected"), [("fp32", 12.0), ("bf16", 8.0)])
def test_moments_of_sixteen_bits(moment_dtype: StateType, expected: float) -> None:
    _, _, states = state_bytes(replace(HOPPER, moment_dtype=moment_dtype), LAYOUT, 8)
    assert states == pytest.approx(expected / 8)


def test_delayed_scaling_keeps_two_inputs_twice() -> None:
    """A byte an element of attention's output (a row of 4,096), and of the input of shared experts."""
    saved = {}
    recipes: tuple[Fp8Recipe, ...] = ("tensorwise", "delayed")
    for recipe in recipes:
        work = replace(HOPPER, fp8_recipe=recipe)
        saved[recipe], _ = activation_bytes_per_layer(work, replace(LAYOUT, tp=2), experts=False)
    assert saved["delayed"] - saved["tensorwise"] == pytest.approx(8192 * 4096 / 2)
    model = load_catalog_model("deepseek-v3")
    for recipe in recipes:
        work = replace(HOPPER, model=model, fp8_recipe=recipe)
        saved[recipe], _ = activation_bytes_per_layer(work, LAYOUT, experts=True)
    assert saved["delayed"] - saved["tensorwise"] == pytest.approx(8192 * (128 * 128 + 7168))


def test_what_stays_at_sixteen_bits_in_fp8() -> None:
    """Of Llama 3 8B the inputs of two norms, queries, keys and values (6,144), attention's output and what
    the gate takes (28,672) at 16 bits; three inputs of products, one 14,336 wide, at 8; 32 log-sum-exps."""
    wide = 2 * (2 * 4096 + 6144 + 4096 + 28_672)
    narrow = 2 * 4096 + 14_336
    saved, _ = activation_bytes_per_layer(HOPPER, LAYOUT, experts=False)
    assert saved == pytest.approx(8192 * (wide + narrow + 4 * 32))


def seconds(work: Workload, part: str) -> float:
    placement = nested_placement(work.cluster, LAYOUT)
    return float(exact_step(make_context(work, LAYOUT, placement), STAGES).parts[part])


def test_what_moves_less_takes_less() -> None:
    optimizer = seconds(HOPPER, "optimizer")
    assert seconds(replace(HOPPER, moment_dtype="bf16"), "optimizer") == pytest.approx(
        optimizer * 22 / 30
    )
    gathered = seconds(replace(HOPPER, fp8_params=True), "dp_comm")
    assert gathered < seconds(replace(HOPPER, fp8_params=False), "dp_comm")


def test_a_fused_loss_holds_sixteen_bit_logits() -> None:
    fused, plain = (replace(HOPPER, te_loss=said) for said in (True, False))
    stepwise = replace(plain, stepwise_loss=True)
    assert stack_constants(fused).fused_loss
    assert not stack_constants(plain).fused_loss
    each = [
        stage_memory_parts_gib(work, LAYOUT, STAGES)["logits"][0] * 2**30
        for work in (fused, stepwise, plain)
    ]
    # Of 8,192 x 128,256 logits: 2 bytes and the 16-bit gradients of logits and head; softmax that becomes the
    # gradient and its 16-bit copy; and a second tensor of 32 bits between them.
    logits, head = 8192 * 128256, 128256 * 4096
    assert each == pytest.approx([2 * logits + 2 * head, 6 * logits, 10 * logits])


def test_a_loss_on_its_own_is_slower_than_a_fused_one() -> None:
    fused, plain = (replace(HOPPER, te_loss=said) for said in (True, False))
    assert seconds(fused, "head") < seconds(plain, "head")
