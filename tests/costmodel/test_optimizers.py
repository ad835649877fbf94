"""What optimizers keep and what their step takes: worked by hand, and beside published steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.collectives import ring_pass_s
from meshwright.costmodel.execution_names import OPTIMIZERS, MuonMode
from meshwright.costmodel.footprint import offloaded_states_gib, stage_memory_parts_gib
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.measured_settings import priced_settings, support_of
from meshwright.costmodel.optimizers import (
    OPTIMIZER_TRAITS,
    moments_bytes,
    newton_schulz_s,
    orthogonalising_s,
    stepping_ranks,
    streamed_bytes,
    tensor_state_bytes,
)
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.rates import calibrated_constants, kernel_rates
from meshwright.costmodel.states import state_bytes
from meshwright.costmodel.step_time import exact_step, make_context
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.adapters import AdapterSpec, counted_matrices
from meshwright.model_specs.parameters import (
    active_matmul_parameters,
    expert_parameters,
    parameter_count,
)
from meshwright.model_specs.reader import load_catalog_model
from meshwright.model_specs.schema import ModelSpec

PUBLISHED = yaml.safe_load(
    (Path(__file__).parents[1] / "data" / "optimizer_steps.yaml").read_text(encoding="utf-8")
)
GIB = 2.0**30

LLAMA = Workload(
    model=load_catalog_model("llama-3-8b"),
    cluster=read_cluster("dgx-h100"),
    gpus=8,
    global_batch=128,
    seq_len=8192,
)
LLAMA_MUON = replace(LLAMA, optimizer="muon")
SHARDED = Layout(dp=8, zero_stage=1, num_micro_batches=16)
STAGES = ((32,),)


def with_optimizer(name: str, framework: str = "megatron", **others: Any) -> Workload:
    return replace(LLAMA, optimizer=name, framework=framework, **others)


def test_plans_with_other_optimizers_are_not_called_measured() -> None:
    measured = [(priced_settings(LLAMA, SHARDED), 10)]
    for optimizer, expected in (("adam", "together"), ("muon", "unmeasured")):
        settings = priced_settings(with_optimizer(optimizer), SHARDED)
        assert support_of(settings, measured)[0] == expected


def test_every_name_has_traits() -> None:
    assert set(OPTIMIZERS) == set(OPTIMIZER_TRAITS)


@pytest.mark.parametrize(
    ("optimizer", "shape", "expected"),
    [
        ("adam", (64, 100), 8 * 6400),
        ("sgd", (64, 100), 4 * 6400),
        ("muon", (64, 100), 4 * 6400),
        ("lion", (64, 100), 4 * 6400),
        # Rows and columns; a vector keeps every number.
        ("adafactor", (64, 100), 4 * 164),
        ("adafactor", (6400,), 4 * 6400),
        # Two bytes each, and two maxima of 4 bytes for 25 blocks of 256.
        ("adam-8bit", (64, 100), 2 * 6400 + 2 * 4 * 25),
        # A block that is not full has its maximum too; 4,095 values are too few.
        ("adam-8bit", (4097,), 2 * 4097 + 2 * 4 * 17),
        ("adam-8bit", (4095,), 8 * 4095),
        ("paged-adam-8bit", (64, 100), 2 * 6400 + 2 * 4 * 25),
    ],
)
def test_states_of_one_tensor(optimizer: str, shape: tuple[int, ...], expected: int) -> None:
    assert tensor_state_bytes(optimizer, shape) == expected


def test_moments_of_a_parameter() -> None:
    """Llama-3 8B: blocks of 256 fit into its matrices without rest, and into its norms of 4,096."""
    assert moments_bytes(with_optimizer("adam")) == 8.0
    assert moments_bytes(with_optimizer("adam", moment_dtype="bf16")) == 4.0
    assert moments_bytes(with_optimizer("sgd")) == 4.0
    assert moments_bytes(with_optimizer("adam-8bit", "fsdp2")) == pytest.approx(2.0 + 8.0 / 256.0)
    assert moments_bytes(with_optimizer("muon"), tables=True) == 8.0
    # Norms: 65 of 4,096 numbers beside 6,979,321,856 in matrices, at 8 bytes of Adam.
    share = 65 * 4096 / (65 * 4096 + 6_979_321_856)
    assert moments_bytes(with_optimizer("muon")) == pytest.approx(4.0 + 4.0 * share, rel=1e-9)


def test_flat_pieces_have_no_rows_and_none_is_small() -> None:
    flat = {name: moments_bytes(with_optimizer(name, "deepspeed")) for name in OPTIMIZERS}
    assert flat["adafactor"] == 4.0
    assert flat["adam-8bit"] == flat["paged-adam-8bit"] == 2.0 + 8.0 / 256.0
    assert flat["lion"] == 4.0
    # 32 layers of 4,096 by 4,096 twice, 1,024 by 4,096 twice, and 14,336 by 4,096 three times.
    kept = 4 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    values = 2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096
    norms = 65 * 4096
    mean = (32 * kept + 4 * norms) / (32 * values + norms)
    assert moments_bytes(with_optimizer("adafactor", "pytorch")) == pytest.approx(mean, rel=1e-2)


def test_the_trainer_keeps_states_of_embeddings_wide() -> None:
    """8 bytes of the table, 2 and a 32nd of the head; a tied head is the table."""
    narrow = 2.0 + 8.0 / 256.0
    trainer = with_optimizer("adam-8bit", "pytorch")
    assert moments_bytes(trainer, tables=True) == pytest.approx((8.0 + narrow) / 2.0)
    tied = replace(trainer, model=load_catalog_model("llama-3.2-1b"))
    assert moments_bytes(tied, tables=True) == 8.0
    assert moments_bytes(with_optimizer("adam-8bit", "fsdp2"), tables=True) == narrow


def test_lion_is_alone_outside_megatron() -> None:
    assert moments_bytes(with_optimizer("lion", "deepspeed"), tables=True) == 4.0
    assert moments_bytes(with_optimizer("lion", "megatron"), tables=True) == 8.0


def test_memory_of_token_tables_under_muon() -> None:
    """Two tables of 128,256 by 4,096 keep 4 bytes a parameter more than matrices of layers, over 8 ranks."""
    muon, adam = (
        stage_memory_parts_gib(with_optimizer(name), SHARDED, STAGES)["optimizer"][0] * GIB
        for name in ("muon", "adam")
    )
    tables = 2 * 128_256 * 4096
    layers = parameter_count(LLAMA.model) - tables
    assert adam == pytest.approx(12 * (tables + layers) / 8)
    norms = 65 * 4096
    assert muon == pytest.approx((12 * (tables + norms) + 8 * (layers - norms)) / 8, rel=1e-6)


def test_paged_states_are_the_hosts() -> None:
    plain, paged = with_optimizer("adam", "deepspeed"), with_optimizer("paged-adam", "deepspeed")
    _, _, on_gpu = state_bytes(paged, SHARDED, 8)
    _, _, of_adam = state_bytes(plain, SHARDED, 8)
    assert of_adam - on_gpu == pytest.approx(8.0 / 8.0)
    held = offloaded_states_gib(paged, SHARDED, STAGES)[0] * GIB
    assert held == pytest.approx(parameter_count(LLAMA.model) * 8.0 / 8.0)
    assert offloaded_states_gib(plain, SHARDED, STAGES)[0] == 0.0
    slower = seconds(paged, SHARDED) - seconds(plain, SHARDED)
    # There and back, at 0.4 of 64 GB/s.
    assert slower == pytest.approx(2.0 * parameter_count(LLAMA.model) / (0.4 * 64e9), rel=1e-6)


@pytest.mark.parametrize(("on_host", "copies"), [(0, 2 * 16 + 1), (100, 2 * 16 - 1)])
def test_shards_on_the_host_go_up_twice_a_micro_batch(on_host: int, copies: int) -> None:
    """2 bytes each, at 0.4 of 64 GB/s; new weights come down once, or need not go up from the host."""
    layout = replace(SHARDED, zero_stage=3, optimizer_offload=on_host)
    plain = with_optimizer("adam", "deepspeed")
    more_s = seconds(replace(plain, parameter_offload="cpu"), layout) - seconds(plain, layout)
    own = parameter_count(LLAMA.model) / 8
    assert more_s == pytest.approx(copies * 2.0 * own / (0.4 * 64e9), rel=1e-6)


@pytest.mark.parametrize(("kind", "passes"), [("pretrain", 2), ("dpo", 3), ("kto", 5)])
def test_frozen_shards_lie_on_the_host_too_and_go_up_for_each_pass(kind: str, passes: int) -> None:
    """2 bytes each; DPO has one pass of the frozen base more, KTO two of it and one of the model."""
    layout, own = replace(SHARDED, zero_stage=3), parameter_count(LLAMA.model) / 8
    plain = with_optimizer("adam", "deepspeed", adapters=AdapterSpec(rank=1), kind=kind)
    moved = replace(plain, parameter_offload="cpu")
    trained = plain.trained_shares[0]
    more_s = seconds(moved, layout) - seconds(plain, layout)
    copies = passes * 16 * (1.0 + trained) + trained
    assert more_s == pytest.approx(copies * 2.0 * own / (0.4 * 64e9), rel=1e-6)
    held = [stage_memory_parts_gib(work, layout, STAGES)["weights"][0] for work in (plain, moved)]
    assert held[0] - held[1] == pytest.approx(2.0 * own * (1.0 + trained) / GIB)
    on_host = offloaded_states_gib(moved, layout, STAGES)[0]
    assert on_host == pytest.approx(2.0 * own * (1.0 + trained) / GIB)
    on_drives = replace(moved, parameter_offload="nvme")
    assert offloaded_states_gib(on_drives, layout, STAGES)[0] == pytest.approx(1e9 / GIB)


def test_states_on_drives_pass_through_buffers_of_what_a_rank_updates() -> None:
    """Of adapters beside the attention of a model with experts nothing for each expert; 16 bytes each."""
    adapters = AdapterSpec(rank=16, targets=("q_proj", "v_proj"))
    work = with_optimizer("adam", "deepspeed", adapters=adapters, optimizer_on_drives=True)
    work = replace(work, model=load_catalog_model("mixtral-8x7b"))
    layout = replace(SHARDED, zero_stage=3, optimizer_offload=100)
    trained = 32 * (2 * 16 * 4096 + 16 * (4096 + 1024))
    held = offloaded_states_gib(work, layout, STAGES)[0] * GIB
    assert held == pytest.approx((16.0 + 4.0) * trained / 8, rel=1e-5)


def seconds(work: Workload, layout: Layout, stages: Any = STAGES) -> float:
    placement = nested_placement(work.cluster, layout)
    return float(exact_step(make_context(work, layout, placement), stages).parts["optimizer"])


@pytest.mark.parametrize(
    ("optimizer", "framework", "expected"),
    [
        ("adam", "megatron", 30.0),
        ("sgd", "megatron", 22.0),
        ("lion", "deepspeed", 22.0),
        ("adam-8bit", "deepspeed", 14.0 + 2.0 * 2.03125),
        ("adafactor", "deepspeed", 78.0 + 2.0 * 4.0),
    ],
)
def test_bytes_that_a_step_streams(optimizer: str, framework: str, expected: float) -> None:
    work = with_optimizer(optimizer, framework)
    assert streamed_bytes(work) == pytest.approx(expected)
    rates = kernel_rates(work, calibrated_constants(work))
    parameters = parameter_count(work.model) / 8
    assert seconds(work, SHARDED) == pytest.approx(expected * parameters / rates.hbm_bytes_per_s)


def test_lion_of_megatron_runs_some_kernels_a_parameter() -> None:
    """34 and its moment twice, of matrices; Adam's 30 of all else."""
    work = with_optimizer("lion", "megatron")
    in_matrices = 6_979_321_856 / parameter_count(work.model)
    assert streamed_bytes(work) == pytest.approx(42.0 * in_matrices + 30.0 * (1.0 - in_matrices))


def newton_schulz_flops(rows: int, columns: int, *, gram: bool = False) -> float:
    """By the formulas of `newton_schulz_s`."""
    m, n = sorted((rows, columns))
    if gram and n > m:
        return 8.0 * m * m * n + 28.0 * m**3
    return 5 * (4.0 * m * m * n + 2.0 * m**3)


def test_products_of_newton_schulz() -> None:
    """2 by 3: into the square, the square squared, and back, a multiplication and an addition each."""
    into, squared, back = 2 * 2 * 2 * 3, 2 * 2 * 2 * 2, 2 * 2 * 2 * 3
    assert newton_schulz_flops(2, 3) == newton_schulz_flops(3, 2) == 5 * (into + squared + back)
    # One restart: twice into the square and twice back, and 14 products of squares between.
    assert newton_schulz_flops(2, 3, gram=True) == 2 * into + 2 * back + 14 * squared
    assert newton_schulz_flops(4, 4, gram=True) == newton_schulz_flops(4, 4)
    # DeepSpeed's way pays where one edge is much longer: half at five times.
    ratio = newton_schulz_flops(2048, 10240, gram=True) / newton_schulz_flops(2048, 10240)
    assert ratio == pytest.approx(68 / 110)


def test_large_matrices_take_what_their_flop_take() -> None:
    rates = kernel_rates(LLAMA, calibrated_constants(LLAMA))
    flops = newton_schulz_flops(8192, 28672)
    spent = float(newton_schulz_s(8192, 28672, rates))
    assert flops / rates.head_gemm_flops < spent < 1.25 * flops / rates.head_gemm_flops


@pytest.mark.parametrize("row", PUBLISHED["bounds"], ids=lambda row: str(row["id"]))
def test_newton_schulz_is_at_most_its_published_share(row: dict[str, Any]) -> None:
    """m T / B, rounded to a digit at the source, is reached where every matrix is much longer than wide."""
    named = isinstance(row["model"], str)
    model = load_catalog_model(row["model"]) if named else ModelSpec(**row["model"])
    of_muon = sum(
        each.number * newton_schulz_flops(each.matrix.outputs, each.matrix.inputs)
        for each in counted_matrices(model, fused=False)
    )
    tables = model.vocab * model.hidden
    own = 6.0 * (active_matmul_parameters(model) - tables) * row["tokens"]
    assert 0.75 * row["share"] < of_muon / own < 1.08 * row["share"]


def test_matrices_are_counted_once() -> None:
    """All but norms, biases and what is no matrix: within a thousandth of a model's layers."""
    for name in ("llama-3-70b", "qwen3-30b-a3b", "kimi-k2", "gpt-oss-20b", "nemotron-h-8b"):
        model = load_catalog_model(name)
        for fused in (False, True):
            counted = counted_matrices(model, fused=fused)
            inside = sum(e.number * e.matrix.inputs * e.matrix.outputs for e in counted)
            tables = model.vocab * model.hidden * (1 if model.tied_embeddings else 2)
            assert inside == pytest.approx(parameter_count(model) - tables, rel=1e-3), name
        experts = sum(e.number * e.matrix.inputs * e.matrix.outputs for e in counted if e.expert)
        if model.moe is not None:
            routed = len(model.expert_layers) * model.moe.experts * expert_parameters(model)
            assert experts == pytest.approx(routed, rel=1e-2), name


def test_ranks_that_share_whole_matrices() -> None:
    """Llama-3 8B has 6,979,321,856 parameters in matrices, the largest 28,672 by 4,096: it goes 59 times."""
    muon = with_optimizer("muon")
    times = 6_979_321_856 / (28_672 * 4096)
    assert float(stepping_ranks(muon, Layout(dp=8), 8)) == 8.0
    assert float(stepping_ranks(muon, Layout(dp=1024), 1024)) == pytest.approx(times)
    assert float(stepping_ranks(muon, Layout(pp=8, dp=128), 128)) == pytest.approx(times / 8)
    # Every element has its rank where nothing is dealt out whole.
    assert float(stepping_ranks(with_optimizer("adam"), Layout(dp=1024), 1024)) == 1024.0
    assert float(stepping_ranks(with_optimizer("muon", "fsdp2"), Layout(dp=1024), 1024)) == 1024.0


def test_who_orthogonalises() -> None:
    """Sharded states divide the work over 8 ranks; without, each does all of it."""
    muon = with_optimizer("muon")
    placement = nested_placement(muon.cluster, SHARDED)
    context = make_context(muon, SHARDED, placement)
    shared, alone = (float(orthogonalising_s(context, ranks, 1)) for ranks in (8, 1))
    assert alone == pytest.approx(8 * shared)
    rates = context.rates
    layer = sum(
        float(newton_schulz_s(rows, columns, rates))
        for rows, columns in (
            (4096, 4096),
            (1024, 4096),
            (1024, 4096),
            (4096, 4096),
            (28672, 4096),
            (4096, 14336),
        )
    )
    assert alone == pytest.approx(32 * layer)
    assert float(orthogonalising_s(make_context(LLAMA, SHARDED, placement), 8, 1)) == 0.0


def test_tensor_ranks_orthogonalise_pieces_wholes_or_together() -> None:
    """Llama-3 8B over 4 tensor ranks, one layer's down-projection: 4,096 rows of 14,336, inputs split."""
    layout = Layout(tp=4, dp=2, zero_stage=1, num_micro_batches=16, sequence_parallel=True)
    placement = nested_placement(LLAMA.cluster, layout)
    spent = {}
    for mode in get_args(MuonMode):
        work = with_optimizer("muon", muon_tp_mode=mode)
        context = make_context(work, layout, placement)
        spent[mode] = float(orthogonalising_s(context, 1, 1))
        alone = with_optimizer("muon", muon_tp_mode=mode)
        single = make_context(alone, SHARDED, nested_placement(alone.cluster, SHARDED))
        assert float(orthogonalising_s(single, 8, 1)) == pytest.approx(
            float(orthogonalising_s(make_context(LLAMA_MUON, SHARDED, single.placement), 8, 1))
        )
    rates = context.rates
    wholes = sum(
        each.number
        * (
            float(newton_schulz_s(each.matrix.outputs, each.matrix.inputs, rates))
            + float(
                ring_pass_s(
                    4.0 * each.matrix.outputs * each.matrix.inputs, placement.tp, context.links
                )
            )
        )
        for each in counted_matrices(LLAMA.model, fused=True)
    )
    assert spent["duplicated"] == pytest.approx(wholes)
    # Pieces are smaller squares; together a square of the edge that is not split is squared by every rank.
    assert spent["blockwise"] < spent["distributed"] < spent["duplicated"]


def test_fsdp2_sends_in_every_iteration() -> None:
    """On one GPU it sends nothing; on 8 nodes it sends more than it multiplies."""
    muon = with_optimizer("muon", "fsdp2", gpus=64)
    alone = Layout(zero_stage=3)
    wide = Layout(dp=64, zero_stage=3)
    single, spread = (
        float(
            orthogonalising_s(
                make_context(muon, layout, nested_placement(muon.cluster, layout)), layout.dp, 1
            )
        )
        for layout in (alone, wide)
    )
    assert spread > single / 4
    # Wide or square: 2 m n and m^2 elements of 2 bytes gathered five times; tall: m^2 reduced twice.
    gathered = 5 * 2 * (2 * 3 * 4096**2 + 2 * 4096 * 14336 + 4096**2)
    gathered += 5 * 2 * 2 * (2 * 1024 * 4096 + 1024**2)
    gathered += 5 * 2 * 2 * 2 * 4096**2
    node_bytes_per_s = 8 * 50e9
    assert spread > 32 * gathered / node_bytes_per_s


@pytest.mark.parametrize("row", PUBLISHED["rows"], ids=lambda row: str(row["id"]))
def test_steps_with_muon_beside_published_ones(row: dict[str, Any]) -> None:
    """The ratio within 20 %, as was asked, and what is more than 1 of it within a factor of two."""
    model, settings = load_catalog_model(row["model"]), dict(row["layout"])
    micro_batches = row["global_batch"] // (settings["micro_batch"] * settings["dp"])
    layout = Layout(**settings, num_micro_batches=micro_batches)
    pp = int(settings.get("pp", 1))
    chunks = pp * int(settings.get("vpp", 1))
    each = [model.layers // chunks + (k < model.layers % chunks) for k in range(chunks)]
    stages = tuple(tuple(each[rank::pp]) for rank in range(pp))
    steps = {}
    for optimizer in ("adam", "muon"):
        work = Workload(
            model=model,
            cluster=read_cluster(row["cluster"]),
            gpus=row["gpus"],
            global_batch=row["global_batch"],
            seq_len=row["seq_len"],
            precision=row["precision"],
            framework="megatron-bridge",
            optimizer=optimizer,
        )
        placement = nested_placement(work.cluster, layout)
        steps[optimizer] = float(exact_step(make_context(work, layout, placement), stages).seconds)
    predicted, measured = steps["muon"] / steps["adam"], row["adam_tflops"] / row["muon_tflops"]
    assert predicted == pytest.approx(measured, rel=0.2)
    assert 0.5 < (predicted - 1.0) / (measured - 1.0) < 2.0
