"""Attention to positions that an indexer chooses: parameters, FLOP, price and memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.activations import activation_bytes_per_layer
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.other_blocks import indexer_block, sparse_core_s, sparse_saved
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.parameters import (
    attended_positions,
    attention_flops_per_token,
    attention_parameters,
    whole_attention_parameters,
)
from meshwright.model_specs.reader import read_model
from meshwright.model_specs.schema import ModelSpec
from tests.places import DATA

SPARSE = read_model(DATA / "hf_configs" / "deepseek-v3.2.json")
FULL = read_model(DATA / "hf_configs" / "deepseek-v3.json").model_copy(update={"mtp_layers": 0})
INDEXER = 1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128


def context(layout: Layout, *, seq_len: int = 8192, model: ModelSpec = SPARSE) -> Context:
    work = Workload(
        model=model, cluster=read_cluster("dgx-h100"), gpus=8, global_batch=64, seq_len=seq_len
    )
    return make_context(work, layout, nested_placement(work.cluster, layout))


def test_the_indexer_stands_whole_on_every_rank() -> None:
    assert attention_parameters(SPARSE) - attention_parameters(FULL) == INDEXER
    assert whole_attention_parameters(SPARSE) - whole_attention_parameters(FULL) == INDEXER


@pytest.mark.parametrize("seq_len", [1024, 131_072])
def test_flops_are_of_the_chosen_positions_and_of_all_scores(seq_len: int) -> None:
    chosen = attended_positions(seq_len, 2048)
    attention = 3 * 2 * 128 * (192 + 128) * chosen
    scores = 2 * 64 * 128 * (seq_len / 2 + 2 * chosen)
    assert attention_flops_per_token(SPARSE, seq_len) == pytest.approx(61 * (attention + scores))
    # Short sequences cost more by the indexer, long ones are a fraction of full attention.
    dearer = attention_flops_per_token(SPARSE, seq_len) > attention_flops_per_token(FULL, seq_len)
    assert dearer is (seq_len == 1024)


@pytest.mark.parametrize(("tp", "heads"), [(1, 128), (2, 64), (8, 64)])
def test_the_core_pads_heads_and_reads_latents_once_for_all(tp: int, heads: int) -> None:
    c = context(Layout(tp=tp, dp=8 // tp, sequence_parallel=tp > 1))
    flops = 2 * heads * (576 + 512) * 2048
    read = 2 * 576 * 2048 / c.rates.hbm_bytes_per_s
    core = sparse_core_s(c)
    forward = np.hypot(flops / c.rates.attention_forward_flops, read)
    backward = np.hypot(2.5 * flops / c.rates.attention_backward_flops, 3 * read)
    assert core.forward == pytest.approx(8192 * forward)
    assert core.backward == pytest.approx(8192 * backward)


def test_fewer_positions_than_are_chosen_are_all_read() -> None:
    short, long = (sparse_core_s(context(Layout(dp=8), seq_len=n)) for n in (1024, 4096))
    # Four times the tokens, each with twice the positions.
    assert long.forward == pytest.approx(8 * short.forward)


def test_the_indexer_is_not_split_and_its_inputs_have_no_gradient() -> None:
    alone = indexer_block(context(Layout(dp=8)))
    split = indexer_block(context(Layout(tp=8, sequence_parallel=True)))
    assert split.forward["gemm"] == alone.forward["gemm"]
    assert alone.backward["gemm"] < 1.5 * alone.forward["gemm"]
    assert alone.forward["tp_comm"] == 0 < split.forward["tp_comm"]
    c = context(Layout(dp=8))
    scored = 2 * 64 * 128 * 8192 / 2
    compared = 2 * 128 * 576 * 2048
    expected = 8192 * (scored + compared) / c.rates.attention_forward_flops
    assert alone.forward["attention"] == pytest.approx(expected)


def test_scores_grow_with_the_sequence_and_the_core_does_not() -> None:
    per_token = []
    for seq_len in (8192, 65_536):
        c = context(Layout(dp=8), seq_len=seq_len)
        scores = indexer_block(c).forward["attention"] / c.tokens
        per_token.append((float(sparse_core_s(c).forward / c.tokens), float(scores)))
    (core, scores), (core_of_long, scores_of_long) = per_token
    assert core_of_long == pytest.approx(core)
    assert scores_of_long > 2 * scores


def test_what_is_kept_by_hand() -> None:
    work = context(Layout(dp=8)).workload
    of_heads = 2 * 128 * (512 + 64 + 128 + 512)
    of_indexer = 2 * (64 * 128 + 128 + 64) + 4 * 2048
    assert sparse_saved(work, 1.0, 1.0) == of_heads + of_indexer
    gathered = 2 * (7168 + 1536)
    assert sparse_saved(work, 4.0, 0.0) == 2 * 32 * 512 + of_indexer + gathered
    dense = dataclasses.replace(work, model=FULL)
    layout = Layout(dp=8)
    kept, _ = activation_bytes_per_layer(work, layout, experts=True)
    before, _ = activation_bytes_per_layer(dense, layout, experts=True)
    expanded = 2 * 128 * (192 + 192 + 128)
    assert kept - before == pytest.approx(8192 * (of_heads + of_indexer - expanded))
    recomputed = Layout(dp=8, recompute=Recompute.MLA_UP_PROJECTION)
    less, _ = activation_bytes_per_layer(work, recomputed, experts=True)
    assert kept - less == pytest.approx(8192 * 2 * 128 * (512 + 64 + 128))
