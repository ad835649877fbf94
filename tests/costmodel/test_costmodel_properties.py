"""What must hold for any model, cluster, layout, split and placement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec, FabricLevelSpec
from meshwright.constraints.memory import has_modules
from meshwright.constraints.pipeline import may_have_empty_ends
from meshwright.costmodel import step_time as step_time_module
from meshwright.costmodel.data_parallel import DataParallelTraffic
from meshwright.costmodel.estimate import estimate_layout, layer_costs
from meshwright.costmodel.execution_names import OFFLOADED_MODULES
from meshwright.costmodel.footprint import mean_states_gib, peak_memory_gib, stage_memory_gib
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import KindTimes, kind_times
from meshwright.costmodel.layout import AXES, Layout, Placement, Recompute
from meshwright.costmodel.placement import level_factors, nested_placement, placement_from_matrix
from meshwright.costmodel.rank_load import Stages
from meshwright.costmodel.rates import Constants, constants_for
from meshwright.costmodel.schedules import traits
from meshwright.costmodel.states import queued_sharding
from meshwright.costmodel.step_time import make_context, optimistic_step
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.model_specs.blocks import MlaSpec, MoeSpec
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds import mappings as packed_module
from meshwright.planner.bounds.layer_split import balanced_stages, level_splits
from meshwright.planner.bounds.mappings import Matrices, matrices, useful_groups
from meshwright.planner.bounds.paces import ChunkTimes, chunk_times, least_level_pace_s
from meshwright.planner.bounds.pricing import CostModelPricing
from tests.soaked import examples

ALL = 10**6
LARGEST = 65_536
FRAMEWORKS = ("megatron", "megatron-2022", "megatron-deepspeed", "torchtitan", "fsdp2", "deepspeed")
SLOWER = 1 + 1e-9
"""Room for rounding."""


@dataclass(frozen=True)
class Case:
    workload: Workload
    layout: Layout
    placement: Placement
    stages: Stages
    constants: Constants

    def seconds(self, placement: Placement | None = None) -> float:
        priced = estimate_layout(
            self.workload, self.layout, placement or self.placement, self.stages, self.constants
        )
        return float(np.asarray(priced.step_time_s))


def one_of(table: Matrices, row: int) -> Matrices:
    """One parallelism matrix of several."""
    return {axis: entries[row] for axis, entries in table.items()}


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    """DGX-like nodes; an oversubscribed spine; NICs faster than PCIe; racks; NVLink bridges between pairs."""
    spine = (
        FabricLevelSpec(name="leaf", gpus=32),
        FabricLevelSpec(name="spine", gpus=LARGEST, oversubscription=draw(st.floats(1, 8))),
    )
    shape: dict[str, Any] = draw(
        st.sampled_from(
            [
                {"gpus_per_node": 8, "nvlink_domain": 8, "nic_gbps_per_gpu": 400},
                {"gpus_per_node": 8, "nvlink_domain": 8, "nic_gbps_per_gpu": 400, "levels": spine},
                {"gpus_per_node": 8, "nvlink_domain": 1, "nic_gbps_per_gpu": 1600},
                {"gpus_per_node": 8, "nvlink_domain": 4, "nic_gbps_per_gpu": 1600},
                {"gpus_per_node": 4, "nvlink_domain": 64, "nic_gbps_per_gpu": 800},
                {
                    "gpus_per_node": 8,
                    "nvlink_domain": 2,
                    "nic_gbps_per_gpu": 100,
                    "nic_medium": "roce",
                },
            ]
        )
    )
    return ClusterSpec(device=read_cluster("dgx-h100").device, gpus=LARGEST, **shape)


@st.composite
def models(draw: st.DrawFn, kind: str) -> ModelSpec:
    """`dense`, `moe` (its first layers dense), `latent` (experts on a projection) or `mla` (latent attention
    and experts)."""
    layers, hidden = draw(st.integers(4, 40)), draw(st.sampled_from([256, 1024, 4096]))
    heads = draw(st.sampled_from([8, 16]))
    fields: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "ffn_hidden": hidden * draw(st.sampled_from([1, 4])),
        "heads": heads,
        "kv_heads": draw(st.sampled_from([1, 2, heads])),
        "head_dim": draw(st.sampled_from([64, 128])),
        "vocab": draw(st.sampled_from([1000, 32_000, 256_000])),
        "tied_embeddings": draw(st.booleans()),
        "mtp_layers": draw(st.integers(0, 2)),
    }
    if kind != "dense":
        limited = draw(st.booleans())
        fields["moe"] = MoeSpec(
            experts=draw(st.sampled_from([16, 64])),
            top_k=draw(st.sampled_from([1, 2, 8])),
            moe_ffn_hidden=draw(st.sampled_from([128, 1024])),
            shared_experts=draw(st.integers(0, 1)),
            dense_layers=draw(st.integers(0, min(4, layers))),
            router_groups=8 if limited else None,
            router_groups_per_token=4 if limited else None,
            latent_size=draw(st.sampled_from([64, 512])) if kind == "latent" else None,
        )
    if kind == "mla":
        fields["attention"] = MlaSpec(
            q_lora_rank=draw(st.sampled_from([None, 512])),
            kv_lora_rank=128,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=64,
        )
    return ModelSpec(**fields)


@st.composite
def layouts(draw: st.DrawFn, model: ModelSpec) -> Layout:
    degree = st.sampled_from([1, 2, 4, 8])
    tp, cp, dp = draw(degree), draw(degree), draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    pp = draw(st.sampled_from([p for p in (1, 2, 3, 4, 8) if p <= model.layers]))
    vpp = (
        draw(st.sampled_from([v for v in (1, 2, 3, 8) if v * pp <= model.layers])) if pp > 1 else 1
    )
    etp = draw(st.sampled_from([1, tp])) if model.moe else 1
    ep = 1
    if model.moe:
        ep = draw(st.sampled_from([e for e in (1, 2, 4, 8, 16) if tp * cp * dp % (e * etp) == 0]))
    full = draw(st.booleans())
    return Layout(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ep=ep,
        etp=etp,
        vpp=vpp,
        micro_batch=draw(st.sampled_from([1, 2])),
        num_micro_batches=draw(st.sampled_from([1, 2, 8, 64])),
        sequence_parallel=draw(st.booleans()),
        zero_stage=draw(st.integers(0, 3)),
        shard_groups=draw(st.sampled_from([n for n in (1, 1, 2, 3, 4, 8) if dp * cp % n == 0])),
        optimizer_offload=draw(st.sampled_from([0, 0, 25, 100])),
        recompute=int(Recompute.FULL) if full else draw(st.integers(0, int(Recompute.FULL) - 1)),
        recompute_layers=draw(st.sampled_from([0, 1, 2, 3, ALL])) if full else 0,
    )


@st.composite
def splits(draw: st.DrawFn, workload: Workload, layout: Layout) -> Stages:
    """Any split with at least one layer in every virtual stage; for ranks in step one that is planned."""
    layers = workload.model.layers
    pp, chunks = int(layout.pp), int(layout.pp) * int(layout.vpp)
    if chunks > pp and traits(int(layout.schedule)).in_step:
        even = balanced_stages(layers, pp, int(layout.vpp))
        if framework_of_stack(workload.framework).uneven_stages:
            ends = may_have_empty_ends(workload)
            level = level_splits(layers, pp, int(layout.vpp), empty_ends=ends)
            assume(level)
            return draw(st.sampled_from(level))
        assume(even is not None)
        return even or ()
    cuts = draw(
        st.lists(
            st.integers(1, max(layers - 1, 1)),
            min_size=chunks - 1,
            max_size=chunks - 1,
            unique=True,
        )
    )
    edges = [0, *sorted(cuts), layers]
    sizes = [end - start for start, end in pairwise(edges)]
    return tuple(tuple(sizes[rank::pp]) for rank in range(pp))


@st.composite
def placements(
    draw: st.DrawFn, cluster: ClusterSpec, layout: Layout, *, tensor_inside: bool
) -> Placement:
    """A nested order, or any parallelism matrix."""
    if draw(st.booleans()):
        orders = [order for order in permutations(AXES) if order[0] == "tp" or not tensor_inside]
        return nested_placement(cluster, layout, draw(st.sampled_from(orders)))
    factors = level_factors(cluster, int(layout.gpus)).tolist()
    table = matrices(layout, factors, inside=("tp",) if tensor_inside else ())
    return placement_from_matrix(layout, one_of(table, draw(st.integers(0, len(table["tp"]) - 1))))


@st.composite
def workloads(draw: st.DrawFn, kind: str) -> Workload:
    on, model = st.booleans(), draw(models(kind))
    sets = [name for name in OFFLOADED_MODULES if has_modules(model, name.split("+"))]
    return Workload(
        model=model,
        cluster=draw(clusters()),
        gpus=8,
        global_batch=64,
        seq_len=draw(st.sampled_from([512, 4096])),
        precision=draw(st.sampled_from(["bf16", "fp8"])),
        framework=draw(st.sampled_from(FRAMEWORKS)),
        dp_overlap=draw(on),
        tp_overlap=draw(on),
        pp_overlap=draw(on),
        ep_overlap=draw(on),
        cuda_graph=draw(st.sampled_from(["none", "partial", "full"])),
        cp_comm=draw(st.sampled_from(["p2p", "a2a", "a2a+p2p"])),
        offload_modules=draw(st.sampled_from(sets)),
        moe_dispatch=draw(st.sampled_from(["deduplicated", "alltoall", "allgather"])),
        expert_imbalance=draw(st.sampled_from([1.0, 1.5])),
    )


KINDS = ("dense", "moe", "mla", "latent")


def legal_recompute(workload: Workload, mask: int) -> int:
    """Without MLA's up-projection where what it gives is offloaded, which a rule forbids."""
    offloaded = "core_attn" in workload.offload_modules
    return mask & ~int(Recompute.MLA_UP_PROJECTION) if offloaded else mask


def search_bound_s(workload: Workload, layout: Layout) -> float:
    """The bound that the search drops layouts by, for one layout."""
    one = Layout(**{name: np.array([value]) for name, value in vars(layout).items()})
    return float(CostModelPricing(workload).lower_bound_s(one)[0])


def pace_of(context: Context, times: KindTimes) -> float:
    """The least pace of the one layout of a context."""
    seconds = chunk_times(context, times)
    assert isinstance(seconds, ChunkTimes)
    one = Layout(**{name: np.array([value]) for name, value in vars(context.layout).items()})
    each = ChunkTimes(*(np.atleast_1d(column) for column in seconds))
    return float(least_level_pace_s(context.workload, one, each)[0])


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, *, tensor_inside: bool = False) -> Case:
    """With `tensor_inside`, tensor groups lie inside the innermost level, as in every plan."""
    workload = draw(workloads(draw(st.sampled_from(kinds))))
    layout = draw(layouts(workload.model))
    batch = int(layout.micro_batch) * int(layout.num_micro_batches) * int(layout.dp)
    workload = replace(workload, gpus=int(layout.gpus), global_batch=batch)
    if tensor_inside:
        assume(level_factors(workload.cluster, workload.gpus)[0] % int(layout.tp) == 0)
    placement = draw(placements(workload.cluster, layout, tensor_inside=tensor_inside))
    return Case(
        workload,
        layout,
        placement,
        draw(splits(workload, layout)),
        constants_for(workload),
    )


@given(cases())
@settings(max_examples=examples(80, 8))
def test_parts_of_the_breakdown_add_up_and_none_is_negative(case: Case) -> None:
    found = estimate_layout(case.workload, case.layout, case.placement, case.stages)
    parts = {name: float(np.asarray(x)) for name, x in found.breakdown_s.items()}
    assert sum(parts.values()) == pytest.approx(float(np.asarray(found.step_time_s)), rel=1e-12)
    assert all(np.isfinite(x) and x >= 0 for x in parts.values()), parts
    for level in found.level_traffic:
        assert sum(level.by_axis.values()) == pytest.approx(level.bytes_per_step)
        assert level.bytes_per_step >= 0


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_lie_below_every_split_and_placement(kind: str) -> None:
    @given(cases((kind,), tensor_inside=True))
    @settings(max_examples=examples(100, 10))
    def check(case: Case) -> None:
        seconds = case.seconds()
        bound = search_bound_s(case.workload, case.layout)
        context = make_context(case.workload, case.layout, case.placement)
        times = kind_times(context)
        pace_s = pace_of(context, times)
        mapped = float(np.asarray(optimistic_step(context, times, pace_s).seconds))
        assert 0 < bound <= mapped * SLOWER
        assert mapped <= seconds * SLOWER

    check()


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", KINDS)
def test_a_bound_for_any_relief_lies_below_every_step(kind: str) -> None:
    """Whatever is recomputed or offloaded, under the placement that each step has."""

    @given(cases((kind,), tensor_inside=True))
    @settings(max_examples=examples(150, 15))
    def check(case: Case) -> None:
        mask = int(case.layout.recompute)
        assume(legal_recompute(case.workload, mask) == mask)
        layout = replace(case.layout, recompute=0, recompute_layers=0, optimizer_offload=0)
        context = make_context(case.workload, layout, case.placement)
        times = kind_times(context)
        step = optimistic_step(context, times, pace_of(context, times), any_relief=True)
        assert float(np.asarray(step.seconds)) <= case.seconds() * SLOWER

    check()


@given(cases(tensor_inside=True), st.integers(0, int(Recompute.FULL) - 1), st.floats(0, 1))
@settings(max_examples=examples(400, 16))
def test_no_layout_of_one_virtual_stage_is_faster_with_more_recomputed(
    case: Case, more: int, share: float
) -> None:
    """With several, or under ZeRO 2 and 3, a slower layer may hide more than it costs."""
    plain = replace(
        case.layout, vpp=1, recompute=0, recompute_layers=0, zero_stage=case.layout.dp % 2
    )
    stages = tuple((sum(rank),) for rank in case.stages)
    more = legal_recompute(case.workload, more)
    less = more & int(share * int(Recompute.FULL))
    fewer, longer = (
        replace(case, layout=replace(plain, recompute=mask), stages=stages).seconds()
        for mask in (less, more)
    )
    assert fewer <= longer * SLOWER


@given(cases(tensor_inside=True), st.integers(1, 3))
@settings(max_examples=examples(100, 10))
def test_a_bound_for_any_shard_groups_lies_below_that_of_each(case: Case, zero_stage: int) -> None:
    """And a number that is not useful is no faster than one of its divisors."""
    layout = replace(case.layout, zero_stage=zero_stage, shard_groups=1)
    one = Layout(**{name: np.array([value]) for name, value in vars(layout).items()})
    dp, placed = int(layout.dp), vars(case.placement).items()
    numbers = [n for n in range(1, dp + 1) if dp % n == 0 and (n == 1 or dp * int(layout.cp) > n)]
    times = {n: replace(case, layout=replace(layout, shard_groups=n)).seconds() for n in numbers}
    bound_s = float(CostModelPricing(case.workload).lower_bound_s(one, numbers)[0])
    assert bound_s <= min(times.values()) * SLOWER
    rows = {name: np.asarray(value)[None] for name, value in placed}
    for number in numbers:
        own = replace(one, shard_groups=np.array([number]))
        context = make_context(case.workload, own, Placement(**rows))
        if not useful_groups(context, numbers)[0]:
            fewer = [n for n in numbers if n < number and number % n == 0]
            assert min(times[n] for n in fewer) <= times[number] * SLOWER


@pytest.mark.slow
@given(
    cases(("moe", "mla", "latent")), st.floats(1, 4), st.sampled_from([1e-4, 5e-4, 0.01, 0.1, 0.5])
)
@settings(max_examples=examples(150))
def test_prices_never_fall_when_experts_get_less_even(
    case: Case, imbalance: float, more: float
) -> None:
    """Not a matter of course: a row more per expert begins a tile, and fills waves of tiles better."""
    uneven = [
        replace(case.workload, expert_imbalance=x) for x in (imbalance, imbalance * (1 + more))
    ]
    less_even, least_even = (replace(case, workload=w).seconds() for w in uneven)
    assert less_even <= least_even * SLOWER
    assert case.workload.expert_imbalance > 1 or case.seconds() <= less_even * SLOWER


@given(cases(tensor_inside=True), st.sampled_from([0.0, 0.9]))
@settings(max_examples=examples(60, 6))
def test_bounds_hold_however_much_overlap_slows_compute(case: Case, interference: float) -> None:
    """ZeRO-3 in a pipeline and many virtual stages: more work in all may hide more than it costs."""
    framework = replace(case.constants.framework, dp_interference=interference)
    constants = replace(case.constants, framework=framework)
    case = replace(
        case, constants=constants, workload=replace(case.workload, dp_overlap=True),
        layout=replace(case.layout, zero_stage=3),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_module, "calibrated_constants", lambda workload: constants)
        patch.setattr(step_time_module, "calibrated_constants", lambda workload: constants)
        bound = search_bound_s(case.workload, case.layout)
    assert bound <= case.seconds() * SLOWER


@given(st.data())
@settings(max_examples=examples(100, 10))
def test_bound_only_grows_with_the_load_of_the_ranks(data: st.DataObject) -> None:
    """What makes it a bound: every split has at least the least sum over ranks and the least busiest rank.

    Not a matter of course, since longer ranks hide more data-parallel traffic: a sum that grows alone would
    otherwise shorten the step where vpp > pp, or under ZeRO-3.
    """
    case, share = data.draw(cases()), st.floats(0, 1)
    framework = replace(case.constants.framework, dp_interference=data.draw(share))
    constants = replace(case.constants, framework=framework)
    context = make_context(case.workload, case.layout, case.placement, constants)
    pp, traffic_s = int(case.layout.pp), data.draw(st.floats(1e-3, 10.0))
    moving_share = data.draw(share)
    tail_share = data.draw(share)

    def seconds(busiest_s: float, whole_s: float) -> float:
        with pytest.MonkeyPatch.context() as patch:
            traffic = DataParallelTraffic(
                traffic_s, tail_share * traffic_s, moving_share * traffic_s
            )
            patch.setattr(
                step_time_module, "data_parallel_traffic", lambda c, dense, expert: traffic
            )
            patch.setattr(
                step_time_module, "even_layout_load", lambda c, times: (busiest_s, whole_s)
            )
            return float(np.asarray(optimistic_step(context).seconds))

    whole_s = data.draw(st.floats(1e-3, 10.0))
    busiest_s = whole_s * (1 / pp + data.draw(share) * (1 - 1 / pp))
    least, more = seconds(busiest_s, whole_s), data.draw(st.floats(1, 3))
    assert least <= seconds(max(busiest_s, more * whole_s / pp), more * whole_s) * SLOWER
    assert least <= seconds(min(more * busiest_s, whole_s), whole_s) * SLOWER


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", KINDS)
def test_memory_bound_lies_below_the_peak_of_every_split(kind: str) -> None:
    @given(cases((kind,)))
    @settings(max_examples=examples(100, 10))
    def check(case: Case) -> None:
        peak = float(np.max(stage_memory_gib(case.workload, case.layout, case.stages)))
        assert 0 < float(np.asarray(peak_memory_gib(case.workload, case.layout))) <= peak * SLOWER
        assert 0 <= float(mean_states_gib(case.workload, case.layout)) <= peak * SLOWER

    check()


@given(cases())
@settings(max_examples=examples(40, 8))
def test_bounds_of_many_layouts_are_the_bounds_of_each(case: Case) -> None:
    """Rows differ in everything that does not change the number of GPUs."""
    rows = [case.layout]
    for change in (
        {"micro_batch": 4},
        {"num_micro_batches": 3, "zero_stage": 2},
        {"recompute": int(Recompute.FULL), "recompute_layers": ALL},
        {"sequence_parallel": not case.layout.sequence_parallel, "zero_stage": 3},
        {"tp": case.layout.cp, "cp": case.layout.tp, "ep": 1, "etp": 1},
    ):
        rows.append(replace(case.layout, **change))
    many = Layout(
        **{name: np.array([vars(row)[name] for row in rows]) for name in vars(case.layout)}
    )
    bounds = CostModelPricing(case.workload).lower_bound_s(many)
    assert bounds.shape == (len(rows),)
    assert bounds == pytest.approx([search_bound_s(case.workload, row) for row in rows], rel=1e-12)
    peaks = np.asarray(peak_memory_gib(case.workload, many))
    assert peaks == pytest.approx(
        [float(np.asarray(peak_memory_gib(case.workload, row))) for row in rows], rel=1e-12
    )


@given(cases())
@settings(max_examples=examples(40))
def test_many_placements_cost_what_each_costs(case: Case) -> None:
    """Regression: pricing several placements at once failed where a part did not depend on them."""
    table = matrices(case.layout, level_factors(case.workload.cluster, case.workload.gpus).tolist())
    placement = placement_from_matrix(case.layout, table)
    found = estimate_layout(case.workload, case.layout, placement, case.stages)
    seconds = np.asarray(found.step_time_s)
    count = len(table["tp"])
    assert seconds.shape == (count,)
    assert found.level_traffic == ()
    for row in {0, count // 2, count - 1}:
        alone = case.seconds(placement_from_matrix(case.layout, one_of(table, row)))
        assert seconds[row] == pytest.approx(alone, rel=1e-12)


@given(cases())
@settings(max_examples=examples(40))
def test_layer_costs_of_a_layout_are_plain_numbers(case: Case) -> None:
    costs = layer_costs(case.workload, case.layout, case.placement)
    model = case.workload.model
    assert all(isinstance(x, float) and x >= 0 for x in vars(costs).values())
    assert (costs.dense_layer_s > 0) == (model.dense_layers > 0)
    assert (costs.moe_layer_s > 0) == (
        model.moe is not None and model.moe_layers + model.mtp_layers > 0
    )
    assert (costs.mtp_s > 0) == (model.mtp_layers > 0)


def with_spine(cluster: ClusterSpec, thinner: float) -> tuple[FabricLevelSpec, ...]:
    """The levels, the outermost with its oversubscription times `thinner`, 1 at the least."""
    if not cluster.levels:
        return ()
    *inner, spine = cluster.levels
    worse = max(spine.oversubscription * thinner, 1.0)
    return (*inner, spine.model_copy(update={"oversubscription": worse}))


def faster(cluster: ClusterSpec, what: str, factor: float) -> ClusterSpec:
    device = cluster.device
    if what == "hbm":
        return cluster.model_copy(
            update={
                "device": device.model_copy(update={"hbm_gb_per_s": device.hbm_gb_per_s * factor})
            }
        )
    if what == "peak":
        names = ("peak_bf16_tflops", "peak_fp16_tflops", "peak_fp8_tflops")
        peaks = {name: getattr(device, name) * factor for name in names}
        return cluster.model_copy(update={"device": device.model_copy(update=peaks)})
    if what in ("nic", "nic-behind-the-same-spine"):
        rates: dict[str, object] = {"nic_gbps_per_gpu": cluster.nic_gbps_per_gpu * factor}
        if what != "nic":
            rates["levels"] = with_spine(cluster, factor)
        return cluster.model_copy(update=rates)
    if what == "spine":
        return cluster.model_copy(update={"levels": with_spine(cluster, 1.0 / factor)})
    rate = (cluster.nvlink_gb_per_s or device.scale_up_gb_per_s or 0.0) * factor
    return cluster.model_copy(update={"nvlink_gb_per_s": rate})


@pytest.mark.parametrize(
    "what", ["hbm", "peak", "nic", "nic-behind-the-same-spine", "spine", "nvlink"]
)
def test_a_better_machine_is_never_slower(what: str) -> None:
    """But for ZeRO-3 in a pipeline and vpp > pp: less work to hide behind can cost more than it saves."""

    @given(cases(), st.floats(1.01, 4.0), st.sampled_from([1.0, 0.5, 0.125]))
    @settings(max_examples=examples(40, 8))
    def check(case: Case, factor: float, nic_share: float) -> None:
        cluster = case.workload.cluster
        nics = {"nic_gbps_per_gpu": cluster.nic_gbps_per_gpu * nic_share}
        work = replace(case.workload, cluster=cluster.model_copy(update=nics))
        case = replace(case, workload=work)
        pipelined = int(case.layout.pp) > 1
        assume(not (pipelined and case.layout.zero_stage == 3))
        assume(int(case.layout.vpp) <= int(case.layout.pp))
        better = replace(
            case,
            workload=replace(case.workload, cluster=faster(case.workload.cluster, what, factor)),
        )
        assert better.seconds() <= case.seconds() * SLOWER

    check()


@given(cases())
@settings(max_examples=examples(40))
def test_memory_never_grows_with_the_zero_stage_before_layers_are_gathered(case: Case) -> None:
    """But for Megatron-FSDP, whose whole gradients wait in a queue beside their shards."""
    stages = (0, 1, 2) if queued_sharding(case.workload) is None else (0, 1)
    peaks = [
        float(
            np.max(
                stage_memory_gib(case.workload, replace(case.layout, zero_stage=zero), case.stages)
            )
        )
        for zero in stages
    ]
    assert peaks == sorted(peaks, reverse=True)


@given(cases())
@settings(max_examples=examples(40))
def test_a_gpu_alone_sends_nothing(case: Case) -> None:
    alone = replace(case.layout, tp=1, cp=1, pp=1, dp=1, ep=1, etp=1, vpp=1)
    workload = replace(case.workload, gpus=1)
    placement = nested_placement(workload.cluster, alone)
    found = estimate_layout(workload, alone, placement, ((workload.model.layers,),))
    parts = {name: float(np.asarray(x)) for name, x in found.breakdown_s.items()}
    for name in ("tp_comm", "cp_comm", "ep_comm", "pipeline_p2p", "dp_comm"):
        assert parts.get(name, 0.0) == 0.0, name
    assert parts["pipeline_bubble"] == pytest.approx(0.0, abs=1e-12)
    assert all(level.bytes_per_step == 0 for level in found.level_traffic)
