"""What the flags of a recipe change in a layer's time: precision, graphs, overlap, dispatcher, loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.attention import attention_block
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import KindTime, head, kind_times
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.rates import constants_for
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.reader import catalog_twin, load_catalog_model, with_twin_facts


def workload(model: str, cluster: str = "gb200-nvl72", **fields: object) -> Workload:
    plain = Workload(
        model=load_catalog_model(model),
        cluster=read_cluster(cluster),
        gpus=64,
        global_batch=64,
        seq_len=4096,
        framework="megatron-bridge",
        cuda_graph="full",
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


def context(work: Workload, layout: Layout, **device: float) -> Context:
    known = constants_for(work)
    known = replace(known, device=replace(known.device, **device)) if device else known  # type: ignore[arg-type]
    return make_context(work, layout, nested_placement(work.cluster, layout), known)


def host_s(kind: KindTime | None) -> float:
    assert kind is not None
    return float(np.asarray(kind.parts["host"]))


def bare_s(kind: KindTime | None) -> float:
    assert kind is not None
    return float(np.asarray(kind.seconds)) - host_s(kind)


def test_pieces_of_overlapped_tensor_parallelism_and_ring_attention_are_launched_one_by_one() -> (
    None
):
    """The slower of GPU and host in a p-norm; six GEMMs in 8 pieces, and 12 pieces for each of 2 steps."""
    work = workload("llama-3-70b", precision="fp8", cuda_graph="none", tp_overlap=True)
    layout = Layout(tp=8, cp=2, dp=4, sequence_parallel=True)
    stack, power = constants_for(work).framework, constants_for(work).shared["launch_norm"]
    dense = kind_times(context(work, layout)).dense
    launched = 3 * stack.launch_layer_s + (6 * 8 + 12 * 2) * stack.piece_launch_s
    gpu = bare_s(dense)
    assert gpu + host_s(dense) == pytest.approx((gpu**power + launched**power) ** (1 / power))
    exchanged = kind_times(context(replace(work, cp_comm="a2a"), layout)).dense
    gpu, launched = bare_s(exchanged), 3 * stack.launch_layer_s + 6 * 8 * stack.piece_launch_s
    assert gpu + host_s(exchanged) == pytest.approx((gpu**power + launched**power) ** (1 / power))


@pytest.mark.parametrize("micro_batch", [1, 16])
def test_launches_that_block_are_hidden_by_nothing(micro_batch: int) -> None:
    """Host and device take turns: launches and late begins of three passes, however long products take."""
    work = workload("gpt3-175b", gpus=8, framework="megatron-deepspeed", cuda_graph="none")
    work = replace(work, launch_blocking=True)
    dense = kind_times(context(work, Layout(tp=8, micro_batch=micro_batch))).dense
    stack = constants_for(work).framework
    assert host_s(dense) == pytest.approx(3 * (stack.launch_layer_s + stack.launch_blocking_s))


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "calls"),
    [(2, True, 10), (8, True, 10), (8, False, 4), (1, False, 0)],
)
def test_collectives_are_launched_as_often_whatever_the_degree(
    tp: int, sequence_parallel: bool, calls: int
) -> None:
    """Two gathers and two scatters forward, six backward; each waits for all ranks where they are checked."""
    work = workload("llama-3-8b", "dgx-h100", framework="nanotron", cuda_graph="none")
    layout = Layout(tp=tp, dp=64 // tp, sequence_parallel=sequence_parallel)
    stack, power = constants_for(work).framework, constants_for(work).shared["launch_norm"]
    for checked in (False, True):
        c = context(replace(work, checked_collectives=checked), layout)
        dense = kind_times(c).dense
        each_s = stack.collective_launch_s + (2.1e-4 * tp if checked else 0.0)
        launched = 3 * stack.launch_layer_s + calls * each_s
        gpu = bare_s(dense)
        assert gpu + host_s(dense) == pytest.approx((gpu**power + launched**power) ** (1 / power))


def test_nanotron_s_overlap_cuts_no_products() -> None:
    work = workload("llama-3-8b", "dgx-h100", framework="nanotron", cuda_graph="none")
    layout = Layout(tp=8, dp=8, sequence_parallel=True)
    beside, apart = (
        kind_times(context(replace(work, tp_overlap=overlap), layout)).dense
        for overlap in (True, False)
    )
    assert bare_s(beside) == bare_s(apart)
    assert host_s(beside) == host_s(apart)


@pytest.mark.parametrize(("kernel", "slower"), [("flash-2", 1.0), ("flash-3", 1.7)])
def test_narrow_heads_slow_kernels_that_wait_for_exponentials(kernel: str, slower: float) -> None:
    work = workload("llama-3-8b", "dgx-h100", attention_kernel=kernel)
    narrow = work.model.model_copy(update={"heads": 64, "kv_heads": 64, "head_dim": 64})
    work = replace(work, model=narrow)
    contexts = (context(work, Layout(dp=64), narrow_head_factor=f) for f in (1.7, 1.0))
    narrow_s, wide_s = (
        float(np.asarray(attention_block(c).forward["attention"])) for c in contexts
    )
    assert narrow_s / wide_s == pytest.approx(slower)


def test_graphs_take_the_host_out_and_attention_in_them_the_wait_for_token_counts() -> None:
    work, layout = workload("qwen3-30b-a3b", precision="mxfp8"), Layout(dp=64, ep=8, micro_batch=8)
    times = {
        graph: kind_times(context(replace(work, cuda_graph=graph), layout)).moe
        for graph in ("none", "feed_forward", "partial", "full")
    }
    assert host_s(times["full"]) == 0.0
    assert host_s(times["feed_forward"]) <= host_s(times["none"])
    assert len({bare_s(times[graph]) for graph in ("none", "feed_forward", "partial")}) == 1
    assert bare_s(times["full"]) < bare_s(times["none"]), "their products take the activation in"
    wait = constants_for(work).framework.moe_sync_s
    assert host_s(times["none"]) == pytest.approx(wait, rel=0.1), (
        "a large micro-batch hides the launches"
    )
    assert host_s(times["partial"]) < 0.01 * wait


def test_nvfp4_does_not_overlap_tensor_parallel_transfers() -> None:
    layout = Layout(tp=4, dp=16, sequence_parallel=True)

    def tp_s(precision: str, *, overlap: bool) -> float:
        work = workload("llama-3.1-405b", precision=precision, tp_overlap=overlap)
        return float(np.asarray(attention_block(context(work, layout)).forward["tp_comm"]))

    assert tp_s("nvfp4", overlap=True) == tp_s("nvfp4", overlap=False)
    assert tp_s("fp8", overlap=True) < tp_s("fp8", overlap=False)
    # A gather of one byte an element and a scatter of two, against two of two.
    assert tp_s("fp8", overlap=False) == pytest.approx(0.75 * tp_s("bf16", overlap=False), rel=1e-6)


def test_norms_of_queries_and_keys_are_paid_for() -> None:
    """4 B an element forward: 32 query and 4 key heads of 128, over 4,096 tokens."""
    work = workload("qwen3-30b-a3b")
    bare = replace(work, model=work.model.model_copy(update={"qk_norm": False}))
    with_norm, without = (context(w, Layout(dp=64), hbm_fraction=1.0) for w in (work, bare))
    extra = np.asarray(attention_block(with_norm).forward["memory_bound"]) - np.asarray(
        attention_block(without).forward["memory_bound"]
    )
    assert extra == pytest.approx(4 * 4096 * (32 + 4) * 128 / 8e12)


def test_latent_attention_run_again_rotates_again() -> None:
    """Per head: 64 in place, and 256 read for 320 written: 352 elements of 4 B."""
    c = context(workload("deepseek-v3"), Layout(dp=64, recompute=int(Recompute.MLA_UP_PROJECTION)))
    again = attention_block(c).recompute
    moved = 4096 * (4 * 128 * (64 + (256 + 320) / 2) + 4 * (1536 + 512))
    assert float(np.asarray(again["memory_bound"])) == pytest.approx(
        moved / c.rates.hbm_bytes_per_s
    )
    assert float(np.asarray(again["gemm"])) > 0


@pytest.mark.parametrize(("framework", "more_bytes"), [("nemo", 20), ("megatron-lm", 42)])
def test_a_loss_that_is_not_one_kernel_moves_more_bytes(framework: str, more_bytes: int) -> None:
    """10 bytes a logit in one kernel, 30 compiled, 52 where each step is a kernel."""
    fused = head(context(workload("llama-3-8b"), Layout(dp=64), hbm_fraction=1.0))
    of_stack = workload("llama-3-8b", framework=framework)
    plain = head(context(of_stack, Layout(dp=64), hbm_fraction=1.0))
    saved = sum(
        float(np.asarray(b["memory_bound"]) - np.asarray(a["memory_bound"]))
        for a, b in ((fused.forward, plain.forward), (fused.backward, plain.backward))
    )
    assert saved == pytest.approx(more_bytes * 4096 * 128_256 / 8e12)


def test_an_all_to_all_of_nccl_sorts_twice() -> None:
    layout, work = Layout(dp=64, ep=8), workload("qwen3-30b-a3b")
    flex, plain = (
        kind_times(context(replace(work, moe_dispatch=kind), layout, hbm_fraction=1.0)).moe
        for kind in ("deduplicated", "alltoall")
    )
    assert flex is not None
    assert plain is not None
    extra = np.asarray(plain.parts["memory_bound"]) - np.asarray(flex.parts["memory_bound"])
    assert extra == pytest.approx(
        2.5 * 4 * 4096 * 8 * 2048 / 8e12
    )  # forward, and 1.5 times that backward


def test_a_row_of_widths_takes_what_its_catalog_twin_knows() -> None:
    known = load_catalog_model("qwen3-235b-a22b")
    told = known.model_dump(exclude_unset=True, exclude={"qk_norm", "name"}) | {"layers": 10}
    row = type(known).model_validate(told)
    assert not row.qk_norm
    assert catalog_twin(row) == known
    assert with_twin_facts(row).qk_norm
    assert not with_twin_facts(row.model_copy(update={"vocab": 1000})).qk_norm
    said = type(known).model_validate(told | {"qk_norm": False})
    assert not with_twin_facts(said).qk_norm, "what a row says stands"
    deepseek = load_catalog_model("deepseek-v3")
    assert deepseek.moe is not None
    moe = deepseek.moe.model_dump(
        exclude_unset=True, exclude={"router_groups", "router_groups_per_token"}
    )
    row = type(known).model_validate(deepseek.model_dump(exclude_unset=True) | {"moe": moe})
    found = with_twin_facts(row).moe
    assert found is not None
    assert (found.router_groups, found.router_groups_per_token) == (8, 4)
