"""What each software stack holds in HBM: counts worked by hand, and the 77 measured peaks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.activations import activation_bytes_per_layer, saved_activations
from meshwright.costmodel.buffers import transients
from meshwright.costmodel.footprint import (
    GIB,
    context_gib,
    stage_memory_gib,
    stage_memory_parts_gib,
)
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.stacks import framework_names, memory_profile, stack_constants
from meshwright.costmodel.states import layer_parameters_on_gpu, table_parameters
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.bounds.paces import MemoryFit
from meshwright.planner.runs.validation import ScoredRow, ValidationReport
from tests.published import published_report

LLAMA_8B_TOKENS = 16384


@pytest.fixture(scope="module")
def report() -> ValidationReport:
    return published_report()


def workload(
    model: str, framework: str, *, seq_len: int = 8192, precision: str = "bf16"
) -> Workload:
    return Workload(
        model=load_catalog_model(model),
        cluster=read_cluster("dgx-h100"),
        gpus=8,
        global_batch=16,
        seq_len=seq_len,
        framework=framework,
        precision=precision,
    )


def memory_errors(report: ValidationReport, source: str) -> list[float]:
    def of(row: ScoredRow) -> bool:
        return row.memory_error_pct is not None and row.run is not None and source in row.run.source

    return [
        row.memory_error_pct for row in report.rows if of(row) and row.memory_error_pct is not None
    ]


@pytest.mark.parametrize(
    ("source", "rows", "mean", "worst"),
    [
        ("", 77, 4.0, 35.0),
        ("SimuMax", 22, 1.0, 2.0),
        ("torchtitan", 12, 3.0, 5.0),
        ("BigScience", 43, 6.0, 35.0),
    ],
)
def test_measured_peaks(
    report: ValidationReport, source: str, rows: int, mean: float, worst: float
) -> None:
    """Two BLOOM rows contradict others: 65 GB where twice the micro-batch took 56; 38 and 44 for one run."""
    errors = np.array(memory_errors(report, source))
    assert len(errors) == rows
    assert np.mean(np.abs(errors)) < mean
    assert np.max(np.abs(errors)) < worst


@pytest.mark.parametrize("framework", ["fsdp2", "torchtitan"])
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_activations_make_room_for_are_the_allocators(
    framework: str, passes: int
) -> None:
    """Of 16 bytes a parameter 4 are gradients: at the loss none, with a second micro-batch all."""
    work = workload("llama-3-8b", framework)
    layout = Layout(dp=8, zero_stage=3, micro_batch=2, num_micro_batches=passes)
    parts = stage_memory_parts_gib(work, layout, ((32,),))
    of_weights = parts["weights"][0]
    of_forward = transients(work, layout, saved_activations(work, layout)).stranded
    stranded = parts["fragmentation"][0] - float(np.asarray(of_forward)) / GIB
    if passes == 1:
        assert parts["gradients"][0] == 0.0
        assert stranded == pytest.approx(of_weights)
    else:
        assert parts["gradients"][0] >= of_weights
        assert stranded == pytest.approx(0.0)


def test_gradients_of_few_tokens_are_all_there_at_the_first_layer() -> None:
    """One sequence of 128 tokens: 16 bytes of 8.03 G parameters, and next to nothing beside them."""
    work = workload("llama-3-8b", "torchtitan", seq_len=128)
    layout = Layout(zero_stage=3, micro_batch=1)
    parts = stage_memory_parts_gib(work, layout, ((32,),))
    names = ("gradients", "activations", "logits", "work")
    held = sum(float(parts[name][0]) for name in names)
    table_gib = 2.0 * 128256 * 4096 / GIB  # a 16-bit gradient of the token table
    assert held == pytest.approx(float(parts["weights"][0]) + table_gib, rel=1e-6)


def test_every_stack_has_a_memory_profile() -> None:
    assert {name: memory_profile(name).stranding for name in framework_names()}[
        "fsdp2"
    ] == "forward"
    with pytest.raises(KeyError, match="no memory profile 'other'"):
        memory_profile("other")


@pytest.mark.parametrize(
    ("framework", "each"), [("torchtitan-compile", 55_424), ("torchtitan-eager", 63_616)]
)
def test_operator_level_recomputation_of_llama_3_8b(framework: str, each: int) -> None:
    """Input 8192, q 8192, v 2048, attention out 8192 and 32 log-sum-exps, w1 28672 bytes a token; eager also
    w2's output. k, the projection of the output and w3 are run again."""
    layout = Layout(dp=8, zero_stage=3, micro_batch=2, recompute=int(Recompute.OPERATORS))
    kept, _ = activation_bytes_per_layer(workload("llama-3-8b", framework), layout, experts=False)
    assert np.asarray(kept) / LLAMA_8B_TOKENS == pytest.approx(each)


def test_eager_casts_leave_magnitudes_to_recomputation() -> None:
    """Of Llama 3 8B each of seven products keeps those of its input, six of 4,096 and one of 14,336, and of
    its weight, 218 M a layer: 32.0 GiB of a step of 8,192 tokens. Eager PyTorch took 34.0 GiB more than
    compiled (pytorch/torchtitan, pull request 812: 81.77 and 47.77 GiB)."""
    layout = Layout(dp=8, zero_stage=3, recompute=int(Recompute.OPERATORS))
    kept = {}
    for framework in ("torchtitan-eager", "torchtitan-compile"):
        for precision in ("fp8", "bf16"):
            work = workload("llama-3-8b", framework, precision=precision)
            bytes_kept, _ = activation_bytes_per_layer(work, layout, experts=False)
            kept[framework, precision] = float(np.asarray(bytes_kept))
    tokens = workload("llama-3-8b", "torchtitan-eager").seq_len
    eager = kept["torchtitan-eager", "fp8"] - kept["torchtitan-eager", "bf16"]
    weights = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert eager == pytest.approx(2.0 * (tokens * (6 * 4096 + 14336) + weights))
    assert kept["torchtitan-compile", "fp8"] == kept["torchtitan-compile", "bf16"]


@pytest.mark.parametrize(("framework", "of_copy"), [("torchtitan", 6), ("fsdp2", 8)])
def test_gates_of_experts_are_kept_where_they_run_apart(framework: str, of_copy: int) -> None:
    """Of each of Mixtral's two copies and each element of an expert: both inputs of the gate and its output,
    and on transformers what its activation function returns."""
    plain = workload("mixtral-8x7b", framework)
    assert plain.model.moe is not None
    width = plain.model.moe.moe_ffn_hidden
    wider = plain.model.moe.model_copy(update={"moe_ffn_hidden": width + 1})
    works = replace(plain, model=plain.model.model_copy(update={"moe": wider})), plain
    more, less = (
        activation_bytes_per_layer(work, Layout(dp=8, zero_stage=3), experts=True)[0]
        for work in works
    )
    assert np.asarray(more) - np.asarray(less) == pytest.approx(2 * of_copy * plain.seq_len)


@pytest.mark.parametrize(("tp", "copies"), [(1, 0), (2, 3)])
def test_paddle_keeps_an_input_for_each_column_parallel_product(tp: int, copies: int) -> None:
    """q, k and v read one input, gate and up another: three copies beside the two, none without ranks."""
    layout = Layout(tp=tp, dp=8 // tp)
    kept, others = (
        activation_bytes_per_layer(workload("llama-2-7b", name), layout, experts=False)[0]
        for name in ("paddle", "pytorch")
    )
    assert kept - others == pytest.approx(copies * 2.0 * 8192 * 4096)


def test_torchtitan_keeps_no_quantised_weights_and_no_quantised_inputs() -> None:
    layout = Layout(dp=8, zero_stage=3)
    peaks = {
        precision: stage_memory_gib(
            workload("llama-3-8b", "torchtitan", precision=precision), layout, ((32,),)
        )
        for precision in ("bf16", "fp8")
    }
    assert peaks["bf16"] == pytest.approx(peaks["fp8"])


@pytest.mark.parametrize(("tp", "each"), [(1, 14), (8, 18)])
def test_torch_reserves_a_block_for_every_tensor_of_the_loss(tp: int, each: int) -> None:
    layout = Layout(tp=tp, dp=8 // tp, sequence_parallel=tp > 1, zero_stage=3, micro_batch=2)
    parts = stage_memory_parts_gib(workload("llama-3-8b", "torchtitan-compile"), layout, ((32,),))
    assert parts["logits"][0] * GIB == pytest.approx(each * LLAMA_8B_TOKENS * 128_256 / tp)


@pytest.mark.parametrize(("tp", "each"), [(1, 4), (8, 8)])
def test_a_compiled_loss_keeps_logits_and_their_gradient(tp: int, each: int) -> None:
    layout = Layout(tp=tp, dp=8 // tp, sequence_parallel=tp > 1, zero_stage=3, micro_batch=2)
    parts = stage_memory_parts_gib(workload("llama-3-8b", "torchtitan"), layout, ((32,),))
    assert parts["logits"][0] * GIB == pytest.approx(each * LLAMA_8B_TOKENS * 128_256 / tp)


@pytest.mark.parametrize(("tp", "said", "each"), [(1, True, 4), (1, False, 14), (8, True, 18)])
def test_a_run_says_that_its_loss_is_one_kernel(tp: int, said: bool, each: int) -> None:
    layout = Layout(tp=tp, dp=8 // tp, sequence_parallel=tp > 1, zero_stage=3, micro_batch=2)
    compiled = replace(workload("llama-3-8b", "torchtitan-compile"), te_loss=said)
    parts = stage_memory_parts_gib(compiled, layout, ((32,),))
    assert parts["logits"][0] * GIB == pytest.approx(each * LLAMA_8B_TOKENS * 128_256 / tp)


def test_gathered_weights_of_llama_3_8b() -> None:
    """Table and head twice in 16 bits, three layers in 16 bits: 4 x 1.051 GB and 6 x 218 MB."""
    layout = Layout(dp=8, zero_stage=3)
    parts = stage_memory_parts_gib(workload("llama-3-8b", "torchtitan"), layout, ((32,),))
    tables, layer = (
        2 * 128_256 * 4096 + 4096,
        2 * 4096 * (4096 + 1024) + 3 * 4096 * 14_336 + 2 * 4096,
    )
    assert parts["buffers"][0] * GIB == pytest.approx(4 * tables + 6 * layer, rel=1e-4)


def test_forward_blocks_too_small_for_logits() -> None:
    """3 x 14336 in 16 bits round the activation, input and output of the layer: 2 (3 f) + 4 h a token."""
    layout = Layout(dp=8, zero_stage=3, micro_batch=2, num_micro_batches=2)
    parts = stage_memory_parts_gib(workload("llama-3-8b", "torchtitan"), layout, ((32,),))
    each = 2 * 3 * 14_336 + 4 * 4096
    assert parts["fragmentation"][0] * GIB == pytest.approx(LLAMA_8B_TOKENS * each)


@pytest.mark.parametrize(
    ("targets", "more"),
    [
        (("q_proj", "v_proj"), 0.0),
        (("q_proj", "k_proj", "v_proj", "o_proj"), 2.0 * 4096),
        (("gate_proj",), 2.0 * 14_336),
        (("all-linear",), 2.0 * 4096 + 2.0 * 14_336),
    ],
)
def test_forward_blocks_of_adapters(targets: tuple[str, ...], more: float) -> None:
    """A sum beside the frozen output and the adapter's: as wide as the feed-forward, and as the layer."""
    adapters = AdapterSpec(rank=16, targets=targets)
    work = replace(workload("llama-3-8b", "fsdp2"), adapters=adapters)
    layout = Layout(dp=8, zero_stage=3, micro_batch=2, num_micro_batches=2)
    parts = stage_memory_parts_gib(work, layout, ((32,),))
    each = 2 * 3 * 14_336 + 4 * 4096 + more
    assert parts["fragmentation"][0] * GIB == pytest.approx(LLAMA_8B_TOKENS * each)


def test_placeholder_gradients_of_transformer_engine() -> None:
    """One 16-bit tensor of every weight's shape of one layer, split by tensor parallelism."""
    work = workload("llama-3-70b", "megatron-lm", seq_len=4096)
    parts = stage_memory_parts_gib(
        work, Layout(tp=8, sequence_parallel=True, zero_stage=1), ((80,),)
    )
    layer = 2 * 8192 * (8192 + 1024) + 3 * 8192 * 28_672
    assert parts["buffers"][0] * GIB == pytest.approx(2 * layer / 8, rel=1e-3)


def test_loss_and_a_layer_s_way_back_do_not_meet() -> None:
    """The fullest of the two counts: with full recomputation the layer, with a large vocabulary the loss."""
    work = workload("llama-3-8b", "megatron")
    full = Layout(recompute=int(Recompute.FULL), recompute_layers=10**6)
    for layout in (Layout(), full):
        parts = stage_memory_parts_gib(work, layout, ((32,),))
        kept, _ = activation_bytes_per_layer(work, layout, experts=False)
        back = 8192 * (2 * 2 * 14_336 + 2 * 4096) + (
            float(np.asarray(kept)) if layout.recompute else 0.0
        )
        assert (parts["logits"] + parts["work"])[0] * GIB == pytest.approx(
            max(10 * 8192 * 128_256, back)
        )


def test_all_to_all_context_parallelism_keeps_the_output_twice() -> None:
    ring = workload("llama-3-8b", "megatron-lm")
    swapped = replace(ring, cp_comm="a2a")
    one, two = (
        float(np.asarray(activation_bytes_per_layer(work, Layout(cp=8), experts=False)[0]))
        for work in (ring, swapped)
    )
    assert two - one == pytest.approx(1024 * 2 * 4096)


def test_pipeline_outputs_that_deepspeed_keeps() -> None:
    """16-bit s b h for every micro-batch in flight, on all ranks but the last."""
    layout = Layout(
        pp=4, num_micro_batches=8, recompute=int(Recompute.FULL), recompute_layers=10**6
    )
    found = {
        name: stage_memory_parts_gib(workload("llama-3-8b", name), layout, ((8,),) * 4)[
            "activations"
        ]
        for name in ("deepspeed", "megatron")
    }
    more = (found["deepspeed"] - found["megatron"]) * GIB
    assert more == pytest.approx([n * 8192 * 4096 * 2 for n in (4, 3, 2, 0)])


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("stack", ["torchtitan", "torchtitan-compile"])
def test_what_stages_of_pytorch_hand_over_by_hand(stack: str, vpp: int) -> None:
    """16-bit s b h: a buffer for each gradient of 16 micro-batches, and each activation, of which those in
    flight count with the layers; the gradients sent of micro-batches that are done. Outputs stay until their
    backward pass, in torch 2.6 to the end of the step, with 16 chunks of 128,256 logits a token.
    """
    layout = Layout(pp=4, vpp=vpp, num_micro_batches=16)
    stages = ((8 // vpp,) * vpp,) * 4
    flying = (4, 3, 2, 1) if vpp == 1 else (5.5, 4.5, 3.5, 2.5)
    found = {
        name: stage_memory_parts_gib(workload("llama-3-8b", name), layout, stages)
        for name in (stack, "llm-foundry")
    }
    ends = ((1, 0), (0, 0), (0, 0), (0, 1))
    buffers, outputs = [], []
    for k, (first, last) in zip(flying, ends, strict=True):
        handed = 2 * (vpp - first) * (16 - k) + (vpp - last) * 16
        if stack == "torchtitan-compile":
            handed += (vpp - last) * (16 - k) + last * 15 * 128_256 / 4096
        buffers.append(handed * 8192 * 4096 * 2)
        outputs.append((vpp - last) * k * 8192 * 4096 * 2)
    for part, expected in (("buffers", buffers), ("activations", outputs)):
        more = (found[stack][part] - found["llm-foundry"][part]) * GIB
        assert more == pytest.approx(expected), part


def test_what_deepspeed_holds_beside_its_shards_by_hand() -> None:
    """Llama-3 8B, a layer of 218,112,000 with a widest matrix of 2 x 14,336 x 4,096 = 117,440,512.

    Gathered: 500 M that are soon used again, the matrix in use, 50 M and a matrix ahead, and these in their
    buffer too. Reduced: 500 M, and once more in the order of the ranks. All at 16 bits.
    """
    work, layout = workload("llama-3-8b", "deepspeed"), Layout(dp=8, zero_stage=3)
    extra = transients(work, layout, saved_activations(work, layout))
    ahead = 50_000_000 + 117_440_512
    assert extra.gathered == 2 * (500_000_000 + 117_440_512 + ahead + ahead) == 1_904_643_072
    assert extra.bucket == 2 * (500_000_000 + 500_000_000)
    alone = transients(work, Layout(zero_stage=3), saved_activations(work, Layout(zero_stage=3)))
    assert alone.bucket == 2 * 500_000_000
    smaller = replace(work, bucket_mb=stack_constants(work).gradients_mb(10_000_000))
    assert transients(smaller, layout, saved_activations(smaller, layout)).bucket == 4 * 10_000_000


def test_a_small_model_is_held_whole_and_once_more() -> None:
    """gpt2-xl over tp 8 has less than the 500 M of a bucket on a rank: no more than all of it is copied."""
    work, layout = workload("gpt2-xl", "deepspeed"), Layout(tp=8, dp=2, zero_stage=3)
    extra = transients(work, layout, saved_activations(work, layout))
    dense, _, _ = layer_parameters_on_gpu(work.model, layout)
    whole = 48 * float(np.asarray(dense))
    ahead = min(50_000_000 + 6400 * 1600 / 8, whole)
    assert whole < 250_000_000
    assert extra.gathered == pytest.approx(2 * (whole + ahead))
    table = float(np.asarray(table_parameters(work.model, layout)))
    assert extra.bucket == pytest.approx(2 * (500_000_000 + whole + table))


def test_torchtitan_keeps_a_pipeline_stage_whole() -> None:
    """16-bit weights of every parameter of the stage beside the shards, and fp32 gradients in their place."""
    layout = Layout(pp=2, dp=4, zero_stage=3, num_micro_batches=4)
    found = {
        name: stage_memory_parts_gib(workload("llama-3-8b", name), layout, ((16,), (16,)))
        for name in ("torchtitan", "fsdp2")
    }
    parameters = np.asarray(found["fsdp2"]["weights"])  # 4 bytes of each, over 4 ranks
    assert found["torchtitan"]["weights"] == pytest.approx(parameters * (2 + 4 / 4))
    assert found["torchtitan"]["gradients"] == pytest.approx(parameters * 4)
    alone = replace(layout, pp=1, dp=8)
    assert stage_memory_parts_gib(workload("llama-3-8b", "torchtitan"), alone, ((32,),))[
        "weights"
    ] == (
        pytest.approx(
            stage_memory_parts_gib(workload("llama-3-8b", "fsdp2"), alone, ((32,),))["weights"]
        )
    )


def test_context_grows_with_the_communicators() -> None:
    assert context_gib(Layout()) == pytest.approx(1.75)
    assert context_gib(Layout(tp=2, pp=2, dp=2, ep=2)) == pytest.approx(2.75)
    assert context_gib(Layout(cp=2)) == context_gib(Layout(dp=2)) == pytest.approx(2.0)


@pytest.mark.parametrize("framework", ["megatron", "deepspeed", "fsdp2"])
@given(
    pp=st.sampled_from([1, 2, 4]),
    again=st.sampled_from([0, 1, 3, 10**6]),
    zero=st.integers(0, 3),
    cuts=st.lists(st.integers(1, 6), min_size=4, max_size=4),
)
def test_memory_is_linear_in_a_rank_s_layers(
    framework: str, pp: int, again: int, zero: int, cuts: list[int]
) -> None:
    """`MemoryFit` extrapolates from the balanced split; the split search relies on it."""
    model = load_catalog_model("deepseek-v2").model_copy(update={"layers": 8 * pp})
    work = replace(workload("llama-3-8b", framework), model=model)
    layout = Layout(
        pp=pp,
        dp=8,
        ep=8,
        num_micro_batches=8,
        zero_stage=zero,
        recompute=32 if again else 0,
        recompute_layers=again,
    )
    sizes = [*cuts[: pp - 1]]
    sizes.append(8 * pp - sum(sizes))
    found = stage_memory_gib(work, layout, tuple((n,) for n in sizes))
    fit = MemoryFit(work, layout)
    leading, before = [], 0
    for size in sizes:
        leading.append(min(max(model.dense_layers - before, 0), size))
        before += size
    assert [
        fit.rank_gib(r, n, d) for r, (n, d) in enumerate(zip(sizes, leading, strict=True))
    ] == pytest.approx(found.tolist())
