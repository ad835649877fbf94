"""Losses that take the head chunk by chunk: by hand, and against Liger's published benchmark."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel import losses
from meshwright.costmodel.estimate import stage_memory_parts_gib
from meshwright.costmodel.kernels import gemm_s
from meshwright.costmodel.layer_context import total
from meshwright.costmodel.layer_kinds import head
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.losses import (
    ALL_LOGITS,
    CHUNKED_LOSSES,
    LOSS_NAMES,
    in_chunks,
    loss_held_bytes,
    rows_of_a_chunk,
)
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.reader import load_catalog_model

LLAMA = load_catalog_model("llama-3-8b")  # h 4096, V 128256, as in the benchmark
WEIGHTS = 4096 * 128256


def workload(loss: str | None, tokens: int, **changes: Any) -> Workload:
    settings: dict[str, Any] = {
        "model": LLAMA,
        "cluster": read_cluster("dgx-a100"),
        "gpus": 1,
        "global_batch": 1,
        "seq_len": tokens,
        "framework": "fsdp2",
        "loss": loss,
    }
    return Workload(**settings | changes)


def head_s(work: Workload) -> float:
    one = Layout()
    times = head(make_context(work, one, nested_placement(work.cluster, one)))
    return float(np.asarray(total(times.forward) + total(times.backward)))


def test_every_word_has_its_loss() -> None:
    assert (*CHUNKED_LOSSES, ALL_LOGITS) == LOSS_NAMES
    assert [in_chunks(name) for name in LOSS_NAMES] == [*CHUNKED_LOSSES, None]


@pytest.mark.parametrize(
    ("loss", "tokens", "rows"),
    # ceil(V / h) is 32: 16,384 tokens make chunks of 512, 17,000 of 1,024.
    [
        ("liger", 16384, 512),
        ("liger", 17000, 1024),
        ("chunked", 16384, 256),
        ("chunked", 100, 100),
        ("fused-head", 16384, 4096),
        ("fused-head", 100, 100),
    ],
)
def test_rows_of_a_chunk(loss: str, tokens: int, rows: int) -> None:
    assert float(np.asarray(rows_of_a_chunk(workload(loss, tokens), tokens))) == rows


MEASURED_MS = {
    "liger": {4096: 121.4, 8192: 166.7, 16384: 277.1, 32768: 511.1},
    None: {4096: 56.0, 8192: 111.5, 16384: 220.8, 32768: 452.5},
}
"""Forward and backward of the head with its loss, h 4096, V 128256, 16 bits, on an A100 of 80 GB
(Liger-Kernel at ead96b6, benchmark/data/all_benchmark_data.csv, fused_linear_cross_entropy, speed, full, of
version 0.4.2)."""


@pytest.mark.parametrize("tokens", [4096, 8192, 16384, 32768])
def test_the_published_benchmark(tokens: int) -> None:
    """Version 0.4.2 added a chunk's gradient within its product, as versions from 0.8.3 on do again."""
    for loss, measured_ms in MEASURED_MS.items():
        assert 1e3 * head_s(workload(loss, tokens)) == pytest.approx(measured_ms[tokens], rel=0.15)


def test_products_of_gradients_read_the_sum_that_they_add_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2 bytes a weight and chunk, of which there are 32 whatever the tokens."""
    now = head_s(workload("liger", 8192))
    at_once = replace(CHUNKED_LOSSES["liger"], weight_summed=(0.0, 0.0))
    monkeypatch.setattr(losses, "CHUNKED_LOSSES", {**CHUNKED_LOSSES, "liger": at_once})
    one, work = Layout(), workload("liger", 8192)
    rate = make_context(work, one, nested_placement(work.cluster, one)).rates.hbm_bytes_per_s
    assert now - head_s(work) == pytest.approx(32 * 2.0 * WEIGHTS / rate)


def test_what_a_loss_holds() -> None:
    liger = float(np.asarray(loss_held_bytes(workload("liger", 16384), 16384)))
    assert liger == 2.0 * 512 * 128256 + 2.0 * WEIGHTS + 2.0 * 16384 * 4096
    frozen = workload("liger", 16384, adapters=AdapterSpec(rank=8))
    assert float(np.asarray(loss_held_bytes(frozen, 16384))) == liger - 2.0 * WEIGHTS
    chunked = float(np.asarray(loss_held_bytes(workload("chunked", 16384), 16384)))
    assert chunked == 18.0 * 256 * 128256 + 8.0 * WEIGHTS + 6.0 * 16384 * 4096
    # 256 MiB of 16-bit logits, sums of 32 bits and their narrowed copies.
    tile = float(np.asarray(loss_held_bytes(workload("fused-head", 16384), 16384)))
    assert tile == 2.0**28 + 6.0 * WEIGHTS + 6.0 * 16384 * 4096
    frozen = workload("fused-head", 16384, adapters=AdapterSpec(rank=8))
    assert float(np.asarray(loss_held_bytes(frozen, 16384))) == 2.0**28 + 6.0 * 16384 * 4096


def test_tiles_of_logits_by_hand() -> None:
    """16,384 tokens are four chunks, 128,256 words four pieces: 16 tiles, each with four products."""
    work, one = workload("fused-head", 16384), Layout()
    c = make_context(work, one, nested_placement(work.cluster, one))
    products, streamed = losses.head_passes_s(c)
    piece, rows, hidden = 128256 / 4, 4096, 4096
    logits_s = float(gemm_s(rows, piece, hidden, c.rates, sixteen_bit=True))
    by_input = gemm_s(rows, hidden, piece, c.rates, sixteen_bit=True, output_bytes=8.0)
    by_weight = gemm_s(piece, hidden, rows, c.rates, sixteen_bit=True, output_bytes=8.0)
    assert float(np.asarray(products.forward)) == pytest.approx(16 * logits_s)
    backward_s = 16 * (logits_s + float(by_input) + float(by_weight))
    assert float(np.asarray(products.backward)) == pytest.approx(backward_s)
    logits, inputs = 16384 * 128256, 16384 * 4096
    moved = 2.0 * logits + 4.0 * inputs, 4.0 * logits + 16.0 * inputs + 10.0 * WEIGHTS
    for seconds, size in zip(streamed, moved, strict=True):
        assert float(np.asarray(seconds)) == pytest.approx(size / c.rates.hbm_bytes_per_s)


def test_a_frozen_head_has_no_sum_of_its_gradient() -> None:
    work, one = workload("fused-head", 8192, adapters=AdapterSpec(rank=8)), Layout()
    c = make_context(work, one, nested_placement(work.cluster, one))
    _, streamed = losses.head_passes_s(c)
    moved = 4.0 * 8192 * 128256 + 16.0 * 8192 * 4096
    assert float(np.asarray(streamed.backward)) == pytest.approx(moved / c.rates.hbm_bytes_per_s)


def test_a_million_tokens_have_room_for_a_loss_by_chunks() -> None:
    """Qwen3-8B at 1,048,576 tokens on 8 H100 (huggingface/trl, issue 6846): 56 GB with activations offloaded,
    out of memory without. All logits would take 12 bytes each: 223 GiB."""
    settings = {"model": load_catalog_model("qwen3-8b"), "cluster": read_cluster("dgx-h100")}
    one = Layout(cp=8, zero_stage=3, recompute=Recompute.FULL, recompute_layers=36)
    parts = {
        loss: stage_memory_parts_gib(workload(loss, 2**20, gpus=8, **settings), one, ((36,),))
        for loss in (None, "chunked")
    }
    every, some = parts.values()
    assert every["logits"][0] == pytest.approx(12 * 2**17 * 151936 / 2**30)
    assert some["logits"][0] < 10
    peak = float(sum(part[0] for part in some.values()))
    offloaded = peak - float(some["activations"][0])
    assert peak > 75
    assert 40 < offloaded < 56
