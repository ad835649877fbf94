"""Data-parallel traffic of a step: which collectives, in which buckets, and what compute does not hide."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.collectives import all_reduce_s, chain_latency_s, long_ring_pass_s
from meshwright.costmodel.hybrid_context import is_dealt, passes_of_micro_batch
from meshwright.costmodel.kernels import streamed_s
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import Floats, Layout, is_among
from meshwright.costmodel.schedules import has_trait
from meshwright.costmodel.stacks import FrameworkConstants
from meshwright.costmodel.states import (
    layer_parameters_on_gpu,
    optimizer_shards,
    queued_sharding,
    rank_parameters,
    reference_setting,
    table_parameters,
)
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import framework_of_stack

_BACKWARD_SHARE = 2.0 / 3.0
"""Of a micro-batch, beside which gradients alone leave: twice the FLOP of its forward pass."""


class DataParallelTraffic(NamedTuple):
    """Seconds of a step's gradient reductions and parameter gathers, hidden or not."""

    seconds: Floats
    tail_s: Floats
    """Of the last bucket or chunk, which no compute is left to hide, and of copies that compute waits for."""
    moving_s: Floats
    """What the same bytes take where no NIC is slower than in measured runs (`Links.moving_bytes_per_s`)."""


class _Group(NamedTuple):
    """Parameters that are reduced together."""

    parameters: Floats
    """On one GPU, before data-parallel sharding."""
    members: NDArray[np.int64]
    shards: Floats
    """Ranks that share the states of one."""
    bucket: Floats
    """Parameters of one collective."""
    trained: float = 1.0
    """Parameters that have gradients, for each one of the model's own."""
    weight_bytes: float = 2.0
    """Of a frozen parameter."""

    def full(self, c: Context) -> NDArray[np.bool_]:
        """Whether what is reduced fills its bucket."""
        adapters = _trained(c, [self])[0]
        whole = np.asarray(self.parameters >= np.asarray(self.bucket))
        return whole & np.asarray(adapters.parameters >= np.asarray(adapters.bucket))


class _Pass(NamedTuple):
    """One collective over all parameters: seconds, those of its last bucket, and `moving_s` of traffic."""

    seconds: Floats
    bucket_s: Floats
    moving_s: Floats

    def plus(self, other: _Pass) -> _Pass:
        """Both, one after the other."""
        return _Pass(*(own + its for own, its in zip(self, other, strict=True)))

    def where(self, holds: NDArray[np.bool_]) -> _Pass:
        """Nothing where this does not hold."""
        return _Pass(*(np.where(holds, own, 0.0) for own in self))


def data_parallel_traffic(
    c: Context, dense: Floats, expert: Floats, bucket: Floats | None = None
) -> DataParallelTraffic:
    """Gradient reduction and parameter gathering over data-parallel groups in one step.

    ZeRO 0 all-reduces gradients; 1 and 2 reduce-scatter them and gather parameters (Rajbhandari et al. 2020,
    arXiv 1910.02054, section 7); 3 gathers for the forward and the backward pass of each micro-batch. 2 and 3
    reduce after each micro-batch (torchtitan/trainer.py has no no_sync; DeepSpeed stage_1_and_2.py), or once
    (accelerate/accelerator.py, no_sync, unless the run reduces each micro-batch's gradients: accumulate,
    sync_each_batch). PyTorch gathers again for each micro-batch under 2 too, and in a
    pipeline keeps what it gathered and reduces once (torch/distributed/pipelining/stage.py). Megatron-FSDP
    waits for all reductions at the end of each backward pass, and under ZeRO 3 for its first layer at the
    beginning of each pass (megatron-core 0.19.2, megatron_fsdp.py, _root_post_backward). With shard
    groups, passes stay within one, and what is scattered is all-reduced over the groups besides (Zhang et al.
    2022, MiCS, arXiv 2205.00119, section 3.4; PyTorch HSDP). Passes that score gather once more under ZeRO 3;
    a reference that FSDP2 holds as one unit is gathered whole, ahead of its pass and under nothing
    (trl/models/utils.py, prepare_fsdp: fully_shard of the model alone).

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and links.
    dense, expert : float or array
        Parameters on one GPU before data-parallel sharding, at least 0.
    bucket : float or array, optional
        Parameters that are reduced together, above 0, in place of the stack's own number.

    Returns
    -------
    DataParallelTraffic
        Seconds of a step, at least 0, in the common shape of layouts and placements. FSDP2's copies out of
        what it gathers and into what it reduces are among them, and never hidden: they run on the stream of
        the passes (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py,
        foreach_all_gather_copy_out, foreach_reduce_scatter_copy_in).
    """
    return _traffic(c, _groups(c, dense, expert, bucket))


def traffic_by_kind(
    c: Context, dense: Floats, expert: Floats, bucket: Floats | None = None
) -> list[tuple[DataParallelTraffic, NDArray[np.bool_]]]:
    """`data_parallel_traffic` of dense parameters alone, and of those of experts where there are any.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and links.
    dense, expert : float or array
        Parameters on one GPU before data-parallel sharding, at least 0.
    bucket : float or array, optional
        As `data_parallel_traffic` takes it, above 0.

    Returns
    -------
    list of (DataParallelTraffic, array of bool)
        For each kind its traffic, and whether that is in proportion to its parameters from these numbers
        on: they fill their buckets.
    """
    groups = _groups(c, dense, expert, bucket)
    return [(_traffic(c, [group]), group.full(c)) for group in groups]


def _traffic(c: Context, groups: list[_Group]) -> DataParallelTraffic:
    framework, stage = c.constants.framework, np.asarray(c.layout.zero_stage)
    grad, weight = float(framework.gradient_bytes), c.gathered_weight_bytes
    gather = _within(c, groups, weight)
    gathers, reductions = passes_of_a_step(c)
    copied_s = _copied_s(c, groups, gathers, reductions) if framework.copies_shards else 0.0
    if c.workload.adapters is not None:
        whole = _gathered_frozen(c, groups)
        groups = _trained(c, groups)
        gather = whole.where(framework.shards_frozen(stage)).plus(_within(c, groups, weight))
    reduced = _passes(c, groups, all_reduce_s, grad)
    scatter = _scattered(c, groups, grad)
    once = reduced if framework.zero1_all_reduces else scatter
    last_s = once.bucket_s + gather.bucket_s
    if framework.gathers_after_update:
        # What `gather_after_update_s` prices is not beside the reductions.
        gathers, last_s = np.where(stage == 3, gathers, 0.0), once.bucket_s

    def in_a_step(reduced_s: Floats, gather_s: Floats, scatter_s: Floats, once_s: Floats) -> Floats:
        sharded_s = reductions * np.where(stage == 3, scatter_s, once_s)
        return np.where(stage == 0, reduced_s, gathers * gather_s + sharded_s)

    passes = (reduced, gather, scatter, once)
    seconds = in_a_step(*(each.seconds for each in passes))
    moving_s = in_a_step(*(each.moving_s for each in passes))
    tail_s = np.where(stage == 0, reduced.bucket_s, np.where(stage == 3, 0.0, last_s))
    if c.workload.keeps_reference and reference_setting(c.workload).gathers_whole:
        whole_s = np.asarray(c.layout.num_micro_batches) * gather.seconds
        tail_s = tail_s + np.where(stage == 3, c.workload.reference_passes * whole_s, 0.0)
    if queued_sharding(c.workload) is not None and np.any(stage >= 2):
        waits_s = reductions * scatter.bucket_s + gathers * gather.bucket_s
        tail_s = np.where(stage >= 2, waits_s, tail_s)
    tail_s = np.where(_chunk_by_chunk(c), seconds / c.layout.vpp, tail_s)
    return DataParallelTraffic(seconds + copied_s, tail_s + copied_s, moving_s)


def _copied_s(c: Context, groups: list[_Group], gathers: Floats, reductions: Floats) -> Floats:
    """Copies on the stream of the passes, whatever hides the collectives beside them.

    Under ZeRO 2 and 3 weights are read where they were gathered and written where they are used; gradients of
    16 bits are read and written to the buffer that is reduced. Where micro-batches are not reduced, also of
    whole replicas, their gradients are added to whole sums, in the type that is reduced (torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_param.py, accumulate_unsharded_grad_if_needed, which replicas of
    distributed/_composable/replicate_with_fsdp.py run too; autograd's own sum where that is 16 bits). What a
    rank without replicas adds is left out.
    """
    stage, m = np.asarray(c.layout.zero_stage), np.asarray(c.layout.num_micro_batches)
    sums = 2.0 + c.constants.framework.gradient_bytes
    unreduced = np.where(
        c.placement.dp_cp.max(axis=-1) > 1, m - np.where(stage == 0, 1.0, reductions), 0.0
    )
    added = unreduced * (2.0 + 2.0 * c.constants.framework.gradient_bytes)
    copied_bytes: Floats = 0.0
    for group, trained in zip(groups, _trained(c, groups), strict=True):
        weights = c.gathered_weight_bytes * np.asarray(trained.parameters)
        if c.workload.adapters is not None:
            frozen_bytes = group.weight_bytes * np.asarray(group.parameters)
            weights = weights + frozen_bytes * c.constants.framework.shards_frozen(stage)
        of_shards = 2.0 * gathers * weights + sums * reductions * np.asarray(trained.parameters)
        is_sharded = (stage >= 2) & (np.asarray(group.shards) > 1)
        copied_bytes = copied_bytes + np.where(is_sharded, of_shards, 0.0)
        copied_bytes = copied_bytes + added * np.asarray(trained.parameters)
    return streamed_s(copied_bytes, c.rates)


def gather_after_update_s(c: Context, dense: Floats, expert: Floats) -> Floats:
    """Gather of the parameters of ZeRO 1 and 2 where it begins when the optimizer has ended, beside nothing.

    InternEvo broadcasts each rank's shard (hybrid_zero_optim.py, broadcast_params): each passes all ranks of
    the shard group one after the other.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and links.
    dense, expert : float or array
        Parameters on one GPU before data-parallel sharding, at least 0.

    Returns
    -------
    float or array
        Seconds of a step under ZeRO 1 and 2, 0 where the stack gathers beside a micro-batch.
    """
    framework, stage = c.constants.framework, np.asarray(c.layout.zero_stage)
    if not framework.gathers_after_update:
        return 0.0
    seconds = _within(c, _groups(c, dense, expert), c.gathered_weight_bytes).seconds
    if framework.broadcasts_shards:
        size = np.asarray(optimizer_shards(c.layout)[0])
        members = np.minimum(c.placement.dp_cp, size[..., None])
        seconds = seconds + size * np.asarray(chain_latency_s(members, c.links))
    return np.where((stage == 1) | (stage == 2), seconds, 0.0)


def passes_of_a_step(c: Context) -> tuple[Floats, Floats]:
    """Parameter gathers and gradient reductions of each parameter in a step.

    Parameters
    ----------
    c : Context
        Workload and layouts.

    Returns
    -------
    tuple of two floats or arrays
        Gathers, which count for ZeRO 1 to 3, and reductions, each at least 1; `data_parallel_traffic` has the
        sources.
    """
    framework, stage = c.constants.framework, np.asarray(c.layout.zero_stage)
    m = np.asarray(c.layout.num_micro_batches)
    whole_step = framework.gathers_each_micro_batch & (np.asarray(c.layout.pp) > 1)
    each = np.where(whole_step, 1, m)
    again = each if framework.gathers_each_micro_batch else 1
    of_a_step = np.where(stage == 2, again, 1)
    scoring = _scoring_gathers(c)
    gathers = np.where(stage == 3, np.where(whole_step, m, 2 * m) + scoring * m, of_a_step)
    often = each if framework.reduces_each_micro_batch else 1
    return gathers, np.where(stage >= 2, often, 1)


def _scoring_gathers(c: Context) -> int:
    """Gathers of every parameter in a micro-batch for passes that score, under ZeRO 3.

    A reference that is whole on every rank needs none.
    """
    workload = c.workload
    separate = workload.keeps_reference and not reference_setting(workload).is_sharded
    return workload.step_kind.own_passes if separate else workload.scoring_passes


def exposed_s(
    c: Context,
    traffic: DataParallelTraffic,
    window_s: Floats,
    windows: NDArray[np.float64] | None = None,
) -> Floats:
    """Data-parallel seconds that compute does not hide.

    max(seconds - window, tail) + slow-down x min(moving seconds, window): traffic of each micro-batch,
    gathers or reductions, hides under all of them; else gradients are reduced, and parameters gathered, next
    to one micro-batch, or to what `hiding_windows` says of several chunks, and the last bucket stays exposed.
    Traffic and the compute that runs beside it slow each other down (`FrameworkConstants.dp_interference`;
    docs/cost_model.md, "The step"). What compute loses goes with the bytes that pass its memory (Rashidi et
    al. 2021, arXiv 2007.00156, abstract), which a slower network makes no more.

    Parameters
    ----------
    c : Context
        Workload, layouts and constants.
    traffic : DataParallelTraffic
        Of the same layouts.
    window_s : float or array
        What a rank computes per micro-batch, seconds, at least 0.
    windows : array of float, optional
        `hiding_windows(c)`, where the caller has them.

    Returns
    -------
    float or array
        Seconds of a step, at least 0.
    """
    beside = (hiding_windows(c) if windows is None else windows) * window_s
    longer = np.maximum(traffic.seconds - beside, traffic.tail_s)
    slow_down = c.constants.framework.dp_interference
    exposed: Floats = longer + slow_down * np.minimum(traffic.moving_s, beside)
    return exposed


def largest_useful_window_s(
    c: Context, traffic: DataParallelTraffic, windows: NDArray[np.float64] | None = None
) -> Floats:
    """The window beyond which `exposed_s` no longer falls: there all but the last bucket is hidden.

    Parameters
    ----------
    c : Context
        Workload and layouts.
    traffic : DataParallelTraffic
        Of the same layouts.
    windows : array of float, optional
        `hiding_windows(c)`, where the caller has them.

    Returns
    -------
    float or array
        Seconds that a rank computes per micro-batch, at least 0.
    """
    windows = hiding_windows(c) if windows is None else windows
    window: Floats = (traffic.seconds - traffic.tail_s) / np.where(windows > 0.0, windows, 1.0)
    return window


def hiding_windows(c: Context) -> NDArray[np.float64]:
    """Micro-batches that the traffic of a step can hide under.

    Of several chunks, the last one's gradients leave first, while the chunks before it still work through
    the last group of min(p, m) micro-batches: (v - 1) / v of these (megatron/core/pipeline_parallel/
    schedules.py, forward_backward_pipelining_with_interleaving, grad_sync_func and param_sync_func).

    Parameters
    ----------
    c : Context
        Workload, layouts and constants.

    Returns
    -------
    array of float
        Shaped like the layouts.
    """
    layout = c.layout
    fsdp = np.asarray(layout.zero_stage) == 3
    gathers, reductions = passes_of_a_step(c)
    vpp, m = np.asarray(layout.vpp), np.asarray(layout.num_micro_batches)
    group = np.where(has_trait(layout.schedule, "in_groups"), np.minimum(layout.pp, m), m)
    several = np.maximum(group * (vpp - 1.0) / vpp, 1.0)
    each = np.where(np.asarray(layout.zero_stage) == 2, np.maximum(gathers, reductions), reductions)
    windows = np.where(_chunk_by_chunk(c), several, each)
    overlapped = windows * float(c.workload.dp_overlap)
    if c.constants.framework.gathers_after_update:
        overlapped = overlapped * _BACKWARD_SHARE
    if c.constants.framework.reduces_after_backward:
        alone = (np.asarray(layout.pp) > 1) | (np.asarray(layout.zero_stage) == 0)
        overlapped = np.where(alone, 0.0, overlapped)
    if is_dealt(c.workload):
        # Gradients leave beside the backward pass of a rank's last sample.
        passes = passes_of_micro_batch(c.workload, layout.cp, layout.micro_batch)
        overlapped = overlapped / np.maximum(passes, 1.0)
    return np.where(fsdp, m, overlapped)


def _chunk_by_chunk(c: Context) -> NDArray[np.bool_]:
    """Whether the traffic of a rank's chunks goes chunk by chunk, each in buckets of its own.

    Then that of the last chunk stays exposed: ranks reduce it together, when the schedule has ended
    (`align_grad_reduce` of megatron/core/distributed/distributed_data_parallel_config.py; NeMo user guide,
    Communication Overlap, has the layers of a virtual stage as its unit).
    """
    chunks = has_trait(c.layout.schedule, "in_step") & (np.asarray(c.layout.vpp) > 1)
    per_layer = not c.constants.framework.bucket_parameters
    return np.asarray(chunks & (np.asarray(c.layout.zero_stage) < 3) & (not per_layer))


def bucket_parameters(workload: Workload, framework: FrameworkConstants, layout: Layout) -> Floats:
    """Parameters whose gradients are reduced together, where buckets are of a set size.

    Parameters
    ----------
    workload : Workload
        Its `bucket_mb` is taken where it has one.
    framework : FrameworkConstants
        Of its software stack.
    layout : Layout
        One layout, or many of shape [n]; dp and cp are used.

    Returns
    -------
    float or array, shape [n]
        What the run says, or the stack's own max(fixed, per rank * dp * cp); 0 where its buckets are not of a
        set size. `costmodel/data/frameworks.yaml` has the sources of the stack's numbers.
    """
    if workload.bucket_mb is not None:
        return framework.gradients_in(workload.bucket_mb)
    ranks = np.asarray(layout.dp) * layout.cp
    size: Floats = np.maximum(
        framework.bucket_parameters, framework.bucket_parameters_per_rank * ranks
    )
    return size


def _groups(
    c: Context, dense: Floats, expert: Floats, bucket: Floats | None = None
) -> list[_Group]:
    """Dense and expert parameters, with their buckets.

    Megatron's hold max(40 M, 1 M dp) parameters, or what `--ddp-bucket-size` says (megatron/core/distributed/
    distributed_data_parallel.py; all of them without overlap; stages behind the first have one, and the slack
    to reduce it), DeepSpeed's 500 M (reduce_bucket_size), PyTorch's and those of Megatron-FSDP under ZeRO 3 a
    layer (megatron/core/distributed/fsdp/mcore_fsdp_adapter.py, fsdp_unit_modules).
    """
    framework = c.constants.framework
    of_dense, of_expert = (np.asarray(x) for x in optimizer_shards(c.layout))
    layer, rest, experts = layer_parameters_on_gpu(c.workload.model, c.layout)
    if bucket is not None:
        size: Floats = bucket
    elif not framework.bucket_parameters:
        size = np.maximum(layer, rest)
    elif framework.bucket_parameters_per_rank and not c.workload.dp_overlap:
        size = np.inf
    else:
        size = bucket_parameters(c.workload, framework, c.layout)
    of_experts = size if framework.bucket_parameters else experts
    by_layer = np.asarray(c.layout.zero_stage) == 3
    if queued_sharding(c.workload) is not None and np.any(by_layer):
        # The pass waits for one layer's own collectives: of unlike layers the largest, not their mean.
        kinds = [
            layer_parameters_on_gpu(c.workload.model, c.layout, blocks)
            for blocks in c.workload.model.blocks.kinds()
        ]
        layer = np.maximum.reduce([np.maximum(dense_layer, rest) for dense_layer, rest, _ in kinds])
        experts = np.maximum.reduce([np.maximum(experts, 1.0) for _, _, experts in kinds])
        of_experts, size = np.where(by_layer, experts, of_experts), np.where(by_layer, layer, size)
    shares, sizes = c.workload.trained_shares, c.workload.frozen_weight_bytes
    groups = [_Group(dense, c.placement.dp_cp, of_dense, size, shares[0], sizes[0])]
    if c.workload.model.moe is not None:
        members = c.placement.edp
        groups.append(_Group(expert, members, of_expert, of_experts, shares[1], sizes[1]))
    return groups


def _passes(
    c: Context,
    groups: list[_Group],
    collective: Callable[..., Floats],
    element_bytes: float,
) -> _Pass:
    """One collective over the members of each group, bucket by bucket."""
    total = _Pass(np.float64(0.0), np.float64(0.0), np.float64(0.0))
    moving = c.links.moving
    for group in groups:
        pieces = np.maximum(group.parameters / group.bucket, 1.0)
        size = element_bytes * np.minimum(group.parameters, group.bucket)
        each_s = collective(size, group.members, c.links)
        moving_s = each_s if moving is c.links else collective(size, group.members, moving)
        total = total.plus(_Pass(pieces * each_s, each_s, pieces * moving_s))
    return total


def _trained(c: Context, groups: list[_Group]) -> list[_Group]:
    """What has gradients of each group: the adapters, layer by layer where a layer is a bucket."""
    if c.workload.adapters is None:
        return groups
    by_layer = not c.constants.framework.bucket_parameters
    return [
        group._replace(
            parameters=group.parameters * group.trained,
            bucket=group.bucket * group.trained if by_layer and group.trained else group.bucket,
        )
        for group in groups
    ]


def _gathered_frozen(c: Context, groups: list[_Group]) -> _Pass:
    """One gather of the frozen parameters of each group, in the bytes that they are kept in."""
    first, *others = (_within(c, [group], group.weight_bytes) for group in groups)
    return reduce(_Pass.plus, others, first)


def _in_groups(c: Context) -> bool:
    """Whether some layout shards within groups of replicas."""
    return bool(np.any(np.asarray(c.layout.shard_groups) > 1))


def _within(c: Context, groups: list[_Group], element_bytes: float) -> _Pass:
    """One pass within the shard groups."""
    if not _in_groups(c):
        return _passes(c, groups, long_ring_pass_s, element_bytes)
    inner = [
        group._replace(members=np.minimum(group.members, np.asarray(group.shards)[..., None]))
        for group in groups
    ]
    return _passes(c, inner, long_ring_pass_s, element_bytes)


def _scattered(c: Context, groups: list[_Group], element_bytes: float) -> _Pass:
    """Reduce-scatter within the shard groups, and all-reduce of each rank's shard over those groups."""
    within = _within(c, groups, element_bytes)
    if not _in_groups(c):
        return within
    outer = [
        group._replace(
            parameters=group.parameters / group.shards,
            members=np.maximum(group.members // np.asarray(group.shards)[..., None], 1),
            bucket=group.bucket / group.shards,
        )
        for group in groups
    ]
    return within.plus(_passes(c, outer, all_reduce_s, element_bytes))


# Sizes of gradient buckets that a planner may set: which there are, and what a layout sends with each.


LEAST_GAIN = 5e-4
"""Share of the step that another size must save before it takes the place of the framework's own."""
TIMES_OWN = (0.5, 2.0, 5.0, 10.0, 20.0, 30.0)
"""Sizes that a layout may have, over the framework's own. Steps on 256 to 1,024 GPUs that another size makes
up to 2.7 % faster come within 0.05 % of the best size of a fine grid with one of these."""


class SizeRange(NamedTuple):
    """Which sizes of buckets a layout may choose from, in parameters; arrays shaped like the layouts.

    Few large buckets start few collectives, but the last one of a step has nothing left to hide under.
    """

    is_open: NDArray[np.bool_]
    """Whether there is a choice at all."""
    own: NDArray[np.float64]
    """Of the framework's own bucket."""
    least: NDArray[np.float64]
    """The smallest that may be chosen."""
    most: NDArray[np.float64]
    """The largest that may be chosen."""

    def rows(self, layouts: NDArray[np.int64]) -> SizeRange:
        """The sizes of some of the layouts.

        Parameters
        ----------
        layouts : array of int, shape [k]
            Positions among the n layouts, 0 to n - 1.

        Returns
        -------
        SizeRange
            Arrays [k].
        """
        own, least, most = (column[layouts] for column in (self.own, self.least, self.most))
        return SizeRange(self.is_open[layouts], own, least, most)

    def others(self) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Sizes beside the framework's own: `TIMES_OWN` times as large, those that some layout may have.

        Returns
        -------
        tuple of two arrays, shape [sizes, ...]
            Whether layouts may have each of them, and the parameters, the framework's own where they may not.
        """
        size = np.multiply.outer(np.array(TIMES_OWN), self.own)
        has = self.is_open & (self.least <= size) & (size <= self.most)
        some = has.reshape(len(has), -1).any(axis=1)
        return has[some], np.where(has, size, self.own)[some]


def size_range(c: Context) -> SizeRange | None:
    """The sizes of gradient buckets that layouts may have.

    Up to the parameters of the mean rank. A token table is reduced whole and its gradient comes last, so that
    smaller buckets than it would not make the last one smaller. Where the framework keeps room for a bucket,
    none is larger than its own. Of several virtual stages only the first has buckets (megatron/training/
    training.py, per_chunk_bucket_sizes): the price counts on them in all and would promise too much, so that
    these keep the framework's own.

    Parameters
    ----------
    c : Context
        Layouts of shape [...], of a workload with `chooses_buckets` where there is to be a choice.

    Returns
    -------
    SizeRange or None
        None where no layout has a choice.
    """
    layout, framework, workload = c.layout, c.constants.framework, c.workload
    record = framework_of_stack(workload.framework).gradient_buckets
    is_fixed = not workload.chooses_buckets or workload.bucket_mb is not None
    is_fixed = is_fixed or workload.adapters is not None
    if record is None or is_fixed or not workload.dp_overlap:
        return None
    stage, vpp, pp = (np.asarray(x) for x in (layout.zero_stage, layout.vpp, layout.pp))
    is_open = is_among(stage, record.zero_stages) & (vpp == 1)
    if framework.reduces_after_backward:
        is_open = is_open & (pp == 1)
    if not framework.bucket_parameters or not np.any(is_open):
        return None
    own = np.asarray(bucket_parameters(workload, framework, layout), dtype=np.float64)
    least = np.minimum(own, np.asarray(table_parameters(workload.model, layout)))
    most = np.maximum(*(np.asarray(x) for x in rank_parameters(workload.model, layout, None)))
    if record.reserved:
        most = np.minimum(most, own)
    sizes = SizeRange(*np.broadcast_arrays(is_open, own, least, most))
    has, _ = sizes.others()
    return sizes._replace(is_open=np.asarray(has.any(axis=0))) if has.any() else None


def open_traffic(c: Context, dense: Floats, expert: Floats) -> tuple[DataParallelTraffic, ...]:
    """`data_parallel_traffic` with the framework's own size of buckets, and with others.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and links.
    dense, expert : float or array
        Parameters on one GPU before data-parallel sharding, at least 0.

    Returns
    -------
    tuple of DataParallelTraffic
        That of the framework's own size, and where some layout has a choice that of the others, arrays of
        shape [sizes, ...].
    """
    sizes, own = size_range(c), data_parallel_traffic(c, dense, expert)
    if sizes is None:
        return (own,)
    _, size = sizes.others()
    axes = c.placement.tp.ndim - size.ndim  # one layout has an axis of placements
    size = size.reshape(*size.shape, *(1,) * axes)
    return own, data_parallel_traffic(c, dense, expert, size)
