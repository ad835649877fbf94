"""Step time of a layout: pipeline, data-parallel traffic, optimizer; every part named, all adding up.

With t_r the seconds of rank r and micro-batch, m micro-batches, v virtual stages and x the bubble share of
the schedule,

    T = m max_r t_r + x (sum_r t_r - max_r t_r) / v + m d + P2P + DP + optimizer + overhead,

d being what ranks in step lose on uneven chunks (`schedules.pace_excess_s`), and all of it growing a little
with the number of nodes. Packs of unlike samples add what ranks wait for the slowest (`imbalance_s`).
`exact_step` evaluates it for one split of the layers, `optimistic_step` bounds it from below over all splits.
Where the layers of virtual stages may be unlike, 1F1B and the schedules in step are played in place of the
first two terms and d (`is_played`), and where virtual stages of like layers have uneven heights if that is
longer (`is_fast_in_closed_form`); GPipe takes `schedules.forward_first_s` in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.adapters import frozen
from meshwright.costmodel.attention import unlike_attention_s
from meshwright.costmodel.collectives import members_inside, point_to_point_s
from meshwright.costmodel.data_parallel import (
    LEAST_GAIN,
    DataParallelTraffic,
    data_parallel_traffic,
    exposed_s,
    gather_after_update_s,
    hiding_windows,
    largest_useful_window_s,
    open_traffic,
    passes_of_a_step,
)
from meshwright.costmodel.hybrid_context import context_of_samples, is_dealt, steps_of_layout
from meshwright.costmodel.layer_context import Context, Parts, total
from meshwright.costmodel.layer_kinds import COPY_SHARE, KindTimes, checked_backward_s, kind_times
from meshwright.costmodel.layout import ROUNDING, Floats, Ints, Layout, Placement
from meshwright.costmodel.lengths import mean_slowest
from meshwright.costmodel.optimizers import (
    FP32_BYTES,
    moments_bytes,
    orthogonalising_s,
    pages_states,
    sends_by_shards,
    stepping_ranks,
    streamed_bytes,
)
from meshwright.costmodel.rank_load import (
    Stages,
    cheapest_layer_s,
    chunk_loads,
    chunk_passes,
    distinct_columns,
    even_layout_load,
    layer_bubble_share,
    least_ways_s,
    longer_pass_share,
    split_parts,
)
from meshwright.costmodel.rates import Constants, calibrated_constants, fabric_links, kernel_rates
from meshwright.costmodel.schedules import (
    Schedule,
    forward_first_s,
    has_trait,
    least_waits,
    longest_way_s,
    pace_excess_s,
    shared_by_mirrors,
    traits,
)
from meshwright.costmodel.simulator import played_s
from meshwright.costmodel.stacks import memory_profile
from meshwright.costmodel.states import (
    optimizer_shards,
    rank_parameters,
    reference_setting,
    table_parameters,
)
from meshwright.costmodel.workload import Workload

# Transfers between pipeline stages, and of what two of them hold alike.


def _pipeline_p2p_s(c: Context, chunk_s: Floats) -> Floats:
    """Boundary transfers on the critical path, seconds of a step.

    Plain 1F1B waits for both directions of every micro-batch. The interleaved schedule, when asked to, runs
    them beside the compute of a virtual stage, which holds a layer at the least (`chunk_s`): what that does
    not cover is exposed, and the two slow each other down. Fill and drain are always exposed: pp - 1 hops,
    and under `fill_exposed` (vpp - 1) pp passes of each rank before its first backward pass and after its
    last forward one (megatron/core/pipeline_parallel/schedules.py, num_warmup_microbatches). An infinite
    `chunk_s` stands for transfers that are hidden as far as can be. Passes that score send forward alone.
    What a stack loses at each virtual stage besides (`virtual_stage_s`) is nothing until own runs say
    otherwise.
    """
    layout, framework = c.layout, c.constants.framework
    pp, vpp, m = (np.asarray(x) for x in (layout.pp, layout.vpp, layout.num_micro_batches))
    once, flushes = (2.0 + c.workload.scoring_passes) * boundary_s(c), c.workload.flushes
    beside = np.maximum(once - chunk_s, framework.dp_interference * once)
    hidden = (vpp > 1) & c.workload.pp_overlap
    steady = np.where(hidden, beside, framework.p2p_exposed * once)
    in_turns = hidden & has_trait(layout.schedule, "in_step") & framework.fill_exposed
    alone = np.where(in_turns, np.minimum(m, flushes * pp * (vpp - 1.0) / vpp), 0.0) * vpp
    waits = framework.virtual_stage_s * m * vpp
    sent = steady * (m * vpp - alone) + once * (alone + flushes * (pp - 1))
    return np.where(pp > 1, waits + sent, 0.0)


def tied_tables_s(c: Context) -> Floats:
    """All-reduce of the token table's gradient between the first and the last stage, which both hold it.

    With tied embeddings or MTP modules, after everything else (megatron/core/distributed/
    finalize_model_grads.py, _allreduce_embedding_grad; DeepSpeed runtime/pipe/engine.py, ReduceTiedGrads).

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and links.

    Returns
    -------
    float or array
        Seconds of a step; 0 without a pipeline, or where no stage holds a second table.
    """
    model = c.workload.model
    if frozen(c.workload) or (not model.tied_embeddings and not model.mtp_layers):
        return 0.0
    table = np.asarray(table_parameters(model, c.layout))
    payload = float(c.constants.framework.gradient_bytes) * table
    sent_s = point_to_point_s(payload, _outermost_level(c), c.links)
    return np.where(np.asarray(c.layout.pp) > 1, sent_s, 0.0)


def boundary_s(c: Context) -> Floats:
    """One micro-batch's activations from a stage to the next, over the outermost level that this crosses.

    T h of 2 bytes, 1 / tp of it from each tensor rank (Narayanan et al. 2021, arXiv 2104.04473, section 3.2),
    priced by `collectives.point_to_point_s`.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and links.

    Returns
    -------
    float or array
        Seconds in one direction, in the common shape of layouts and placements.
    """
    payload = c.activation_bytes / c.layout.tp
    return point_to_point_s(payload, _outermost_level(c), c.links)


def _outermost_level(c: Context) -> NDArray[np.int64]:
    """Index of the outermost level that a pipeline group crosses, 0 where it crosses none."""
    crossed = c.placement.pp > members_inside(c.placement.pp)
    return np.asarray(np.max(np.where(crossed, np.arange(crossed.shape[-1]), 0), axis=-1))


# Seconds that the optimizer takes in a step, on the GPU and on the host.


_WEIGHT_BYTES = 2.0
"""Of a 16-bit weight."""
_HOST_BYTES_PER_S = 18.2e9
"""What the update of one rank streams on the host: one thread's work, as torchrun sets OMP_NUM_THREADS to 1.

Qwen3-30B-A3B on 16 H100 with all states offloaded takes 2.88 s more a step than with none, for 1.908e9
parameters a rank (Megatron-Bridge, skills/perf-techniques/cpu-offloading/card.yaml: 996 and 3,877 ms), which
are 18.5e9 bytes a second; Qwen3-0.6B on one H100 takes 0.926 s more for 0.596e9 (NVIDIA-NeMo/RL, pull
request 3628: 0.752 and 1.678 s), which are 18.0e9. Both ran PyTorch's fused Adam, one vectorised pass over
the states, as DeepSpeedCPUAdam is (csrc/includes/cpu_adam.h, Step_AVX)."""
_PCIE_SHARE = COPY_SHARE / 2.0
"""Of PCIe's nominal rate, while all GPUs copy at once: half of what one attains is assumed, as two of them
share the uplink of a switch in DGX A100."""


def optimizer_s(
    c: Context, dense: Floats, expert: Floats, numbers_of_groups: Sequence[int] = ()
) -> Floats:
    """Seconds of the optimizer's step, sharded from ZeRO 1 on; docs/cost_model.md, "Optimizers".

    Adam reads and writes 14 bytes of a parameter and four times the bytes of a moment, others what
    `optimizers.streamed_bytes` says, at HBM's attained rate or at that of the host (`_HOST_BYTES_PER_S`).
    Muon orthogonalises besides (`optimizers.orthogonalising_s`); paged moments come from the host and go
    back. The GPU updates its share of them while the host updates what is offloaded (hybrid_optimizer.py of
    megatron-core, `step`: GPU kernels are launched first); the transfers of one parameter hide under the
    updates of others. DeepSpeed copies gradients down as they are reduced, updates, and copies weights up
    (deepspeed/runtime/zero/stage_1_and_2.py, `step`). Its transfers are priced as hidden under nothing,
    though `overlap_comm` puts those of gradients beside the backward pass. So are those of FSDP2, which
    uploads fp32 shards ahead of each gather and adds up gradients on the host: its uploads run beside other
    layers, its downloads do not where micro-batches accumulate (torch 2.13, `_fsdp_collectives.py`,
    `foreach_reduce`). Under torch's pipelines gradients come down once, and under accelerate unless each
    micro-batch's are reduced. Frozen weights go up as they are, ahead of the same gathers.

    Parameters
    ----------
    c : Context
        Workload, layouts and rates.
    dense, expert : float or array
        Parameters on one GPU before data-parallel sharding, at least 0.
    numbers_of_groups : sequence of int
        Numbers of shard groups of which the least counts, for layouts with the fewest; their own without any.

    Returns
    -------
    float or array
        Seconds of a step, at least 0.
    """
    of_dense, of_expert = c.workload.trained_shares
    numbers = of_dense * np.asarray(dense), of_expert * np.asarray(expert)
    ranks = _sharing_ranks(c.layout)
    parameters = numbers[0] / ranks[0] + numbers[1] / ranks[1]
    offloaded = np.asarray(c.layout.optimizer_offload) / 100.0
    on_gpu_s = _on_gpu_s(c, numbers, ranks, 1.0 - offloaded, numbers_of_groups)
    sizes = c.workload.frozen_weight_bytes
    frozen = sizes[0] * np.asarray(dense) / ranks[0] + sizes[1] * np.asarray(expert) / ranks[1]
    frozen_bytes = frozen if c.workload.adapters is not None else 0.0
    on_host_s = _host_s(c, parameters, frozen_bytes) + _states_on_drives_s(c, parameters)
    on_host_s = offloaded * on_host_s
    states_s: Floats = np.maximum(on_gpu_s, on_host_s)
    if not c.workload.offload_parameters:
        return states_s
    return states_s + _uploads_s(c, parameters, frozen_bytes)


def _on_gpu_s(
    c: Context,
    numbers: Sequence[Floats],
    ranks: Sequence[Ints],
    share: Floats,
    numbers_of_groups: Sequence[int],
) -> Floats:
    """Seconds of the step of a share of all parameters, dense ones and experts: streams, pages, products."""
    workload, kinds = c.workload, (False, True)
    dense, expert = (
        number / stepping_ranks(workload, c.layout, shards, experts=experts)
        for number, shards, experts in zip(numbers, ranks, kinds, strict=True)
    )
    moved, of_expert = (streamed_bytes(workload, experts=experts) for experts in kinds)
    seconds = share * moved * (dense + of_expert / moved * expert) / c.rates.hbm_bytes_per_s
    if pages_states(workload):
        paged, of_expert = (moments_bytes(workload, experts=experts) for experts in kinds)
        pages = 2.0 * (paged * dense + of_expert * expert)
        seconds = seconds + share * pages / _pcie_bytes_per_s(c)
    return seconds + share * _least_orthogonalising_s(c, numbers_of_groups)


def _sharing_ranks(layout: Layout) -> tuple[Ints, Ints]:
    """Ranks that share the states of dense parameters and of experts, 1 where they are not sharded."""
    sharded = np.asarray(layout.zero_stage) >= 1
    dense, experts = (np.where(sharded, shards, 1) for shards in optimizer_shards(layout))
    return dense, experts


def _least_orthogonalising_s(c: Context, numbers_of_groups: Sequence[int]) -> Floats:
    """The least of `orthogonalising_s` over some numbers of shard groups; the layouts' own without any.

    Only a number that divides dp is a layout's; where none does, its own counts.
    """
    own_s = orthogonalising_s(c, *_sharing_ranks(c.layout))
    if not numbers_of_groups or not sends_by_shards(c.workload):
        return own_s
    least_s: Floats = np.inf
    for number in numbers_of_groups:
        ranks = _sharing_ranks(replace(c.layout, shard_groups=number))
        divides = np.asarray(c.layout.dp) % number == 0
        least_s = np.minimum(least_s, np.where(divides, orthogonalising_s(c, *ranks), np.inf))
    return np.where(np.isfinite(least_s), least_s, own_s)


def _pcie_bytes_per_s(c: Context) -> float:
    """What copies of one GPU reach while all of its node copy (`_PCIE_SHARE`)."""
    return 1e9 * _PCIE_SHARE * c.workload.cluster.device.pcie_gb_per_s


def _host_s(c: Context, parameters: Floats, frozen_bytes: Floats) -> Floats:
    """Seconds of updating parameters on the host, and of the transfers that the step waits for, those of
    shards of frozen weights among them.
    """
    framework = c.constants.framework
    update_s = framework.host_update_bytes * np.asarray(parameters) / _HOST_BYTES_PER_S
    layout, stage = c.layout, np.asarray(c.layout.zero_stage)
    micro_batches = np.asarray(layout.num_micro_batches)
    whole = memory_profile(c.workload.framework).unsharded_in_pipeline & (np.asarray(layout.pp) > 1)
    reduced = np.where(whole | (not framework.reduces_each_micro_batch), 1, micro_batches)
    # A pass that scores gathers once, beside the gathers of a forward and a backward pass.
    scoring = 1.0 + 0.5 * c.workload.scoring_passes
    gathers = framework.host_gather_bytes * np.where(stage == 3, micro_batches, 0) * scoring
    moved = (
        framework.host_transfer_bytes
        + framework.host_accumulation_bytes * np.where(stage >= 2, reduced, 0)
        + gathers
    )
    sums_s = framework.host_sum_bytes * (reduced - 1) * parameters / _HOST_BYTES_PER_S
    # What goes up of a trained weight is its fp32 shard.
    copied = moved * parameters + gathers / FP32_BYTES * frozen_bytes
    seconds: Floats = update_s + sums_s + copied / _pcie_bytes_per_s(c)
    return seconds


def _uploads_s(c: Context, parameters: Floats, frozen_bytes: Floats) -> Floats:
    """Seconds of the copies that 16-bit shards on the host cost a step, priced as hidden under nothing.

    They go up ahead of the forward and of the backward pass of every micro-batch, and of each pass that
    scores with them, frozen ones among them (DeepSpeed 0.19.8, deepspeed/runtime/zero/
    partition_parameters.py, _all_gather_dtype). What the optimizer updates on the GPU comes down once; where
    it is the host's, its own upload of new weights falls away (stage3.py, step).
    """
    work = c.workload
    scoring = work.step_kind.own_passes + (0 if work.keeps_reference else work.reference_passes)
    passes = (2.0 + scoring) * np.asarray(c.layout.num_micro_batches)
    on_host = np.asarray(c.layout.optimizer_offload) / 100.0
    read = passes * (_WEIGHT_BYTES * np.asarray(parameters) + frozen_bytes)
    updated = _WEIGHT_BYTES * np.asarray(parameters)
    seconds: Floats = (read + (1.0 - 2.0 * on_host) * updated) / _pcie_bytes_per_s(c)
    if work.parameters_on_drives:
        # Read for each pass, and written once new (runtime/swap_tensor/partitioned_param_swapper.py).
        seconds = seconds + (read + updated) / _drives_bytes_per_s(c)
    return seconds


_STATE_BYTES_ON_DRIVES = 4.0 + (12.0 + 4.0) + 12.0
"""Of a parameter in a step: its fp32 gradient written; fp32 weight, moments and gradient read; weight and
moments written (DeepSpeed 0.19.8, runtime/swap_tensor/optimizer_utils.py and pipelined_optimizer_swapper.py;
runtime/zero/stage3.py, _optimizer_states_and_gradient_swap_in and _out)."""


def _states_on_drives_s(c: Context, parameters: Floats) -> Floats:
    """Seconds of reading and writing the states on drives, sub-group by sub-group around its update.

    Nothing hides them: `pipeline_read` and `pipeline_write` are off by default (DeepSpeed 0.19.8,
    runtime/zero/offload_config.py).
    """
    if not c.workload.optimizer_on_drives:
        return 0.0 * np.asarray(parameters)
    return _STATE_BYTES_ON_DRIVES * np.asarray(parameters) / _drives_bytes_per_s(c)


def _drives_bytes_per_s(c: Context) -> float:
    """Of one GPU, while all of its node read or write at once."""
    cluster = c.workload.cluster
    assert cluster.nvme_gb_per_s is not None
    return 1e9 * cluster.nvme_gb_per_s / min(cluster.gpus_per_node, c.workload.gpus)


_SWAPPED_TIMES = 3.0
"""Weights that pass PCIe for one of a reference that takes the trained model's place once a step: those of
the trained model down and up again, and its own up (NeMo-RL at 7ea279a, nemo_rl/models/policy/workers/
megatron_policy_worker.py, use_reference_model)."""


def reference_copies_s(c: Context, dense: Floats, expert: Floats) -> Floats:
    """Seconds of the copies of an offloaded reference, priced as hidden under nothing.

    Under DeepSpeed's ZeRO 3 its shards go up for each of its passes (OpenRLHF at 3c3be62, openrlhf/cli/
    train_dpo.py, --ref.offload; deepspeed/runtime/zero/partition_parameters.py, _all_gather_dtype); elsewhere
    it takes the trained model's place once a step (`_SWAPPED_TIMES`).

    Parameters
    ----------
    c : Context
        Workload, layouts and rates.
    dense, expert : float or array
        Parameters on one GPU before data-parallel sharding, at least 0.

    Returns
    -------
    float or array
        Seconds of a step; 0 where no reference is offloaded.
    """
    if c.workload.reference != "offloaded":
        return 0.0
    parameters = np.asarray(dense) + np.asarray(expert)
    times: Floats = _SWAPPED_TIMES
    if reference_setting(c.workload).uploads_shards:
        of_dense, of_expert = optimizer_shards(c.layout)
        parameters = dense / np.asarray(of_dense) + expert / np.asarray(of_expert)
        times = c.workload.reference_passes * np.asarray(c.layout.num_micro_batches)
    seconds: Floats = times * _WEIGHT_BYTES * parameters / _pcie_bytes_per_s(c)
    return seconds


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, in parts that add up."""

    parts: Parts

    @property
    def seconds(self) -> Floats:
        """Seconds of the step: the sum of its parts."""
        return total(self.parts)


class RankParameters(NamedTuple):
    """Parameters of one rank before data-parallel sharding, and where its hand-overs are priced."""

    dense: Floats
    expert: Floats
    crossing: Context | None = None
    """The context of what goes from stage to stage; None for that of everything else."""


# What ranks wait for one another where packs hold unlike samples.


def imbalance_s(c: Context, *, fully_recomputed: bool = True) -> Floats:
    """What a step takes longer than with packs that are all like the mean pack.

    Attention of a pack goes with the squares of its samples, all else with its size. Derived here: replicas
    that meet at the end of a step wait for the one with the most attention in all; those that gather
    parameters or reduce gradients in every micro-batch (ZeRO 2 and 3, `passes_of_a_step`), or exchange tokens
    of experts, wait in each; and so do the micro-batches that a pipeline has under way
    (`lengths.mean_slowest`). Where all forward passes come before all backward ones, a pipeline only fills
    and drains at the pace of its slowest micro-batch: a flow shop with proportionate times, sum + (p - 1)
    max.

    Parameters
    ----------
    c : Context
        Workload and layouts.
    fully_recomputed : bool
        Whether the layers count that are computed again in full; without, the seconds are a lower bound
        whatever their number.

    Returns
    -------
    float or array
        Seconds of a step, at least 0, shaped like the layouts; 0 where packs are alike, and where samples are
        dealt to ranks one by one (`dealt_waits_s`).
    """
    lengths, layout = c.workload.lengths, c.layout
    if lengths is None or is_dealt(c.workload):
        return 0.0
    attention_s = unlike_attention_s(c, fully_recomputed=fully_recomputed)
    if not np.any(attention_s):
        return 0.0
    m, pp, dp = (np.asarray(x) for x in (layout.num_micro_batches, layout.pp, layout.dp))
    sharding = np.maximum(dp // np.asarray(layout.shard_groups), 1)
    of_experts = np.asarray(layout.expert_group) // (np.asarray(layout.tp) * layout.cp)
    together = np.where(waits_by_shards(c), np.maximum(sharding, of_experts), of_experts)
    in_step = np.clip(together, 1, dp)
    schedule = np.asarray(layout.schedule)
    forward_first = (schedule == int(Schedule.GPIPE)) | (schedule == int(Schedule.BREADTH_FIRST))
    packs, loads = layout.micro_batch, lengths.loads
    slowest = mean_slowest(
        loads,
        replicas=dp // in_step,
        in_step=in_step,
        in_flight=np.where(forward_first, 1, np.minimum(pp, m)),
        micro_batches=m,
        packs=packs,
    )
    longer = m * (slowest - 1.0)
    if forward_first.any():
        most = mean_slowest(
            loads, replicas=1, in_step=in_step * m, in_flight=1, micro_batches=1, packs=packs
        )
        longer = longer + np.where(forward_first, (pp - 1) / layout.vpp * (most - 1.0), 0.0)
    waits_s: Floats = attention_s * longer
    return waits_s


def waits_by_shards(c: Context) -> NDArray[np.bool_]:
    """Whether ranks that share parameters wait in every micro-batch for the one with the slowest pack.

    They do where they gather or reduce in each (`passes_of_a_step`): smaller shard groups wait less.

    Parameters
    ----------
    c : Context
        Workload and layouts.

    Returns
    -------
    array of bool
        Shaped like the layouts; False where packs are alike, and where samples are dealt to ranks one by one.
    """
    shape = c.layout.broadcast_shape()
    if c.workload.lengths is None or is_dealt(c.workload):
        return np.zeros(shape, dtype=bool)
    gathers, reductions = passes_of_a_step(c)
    several = (np.asarray(gathers) > 1) | (np.asarray(reductions) > 1)
    each_time = (np.asarray(c.layout.num_micro_batches) > 1) & several
    return np.broadcast_to(each_time, shape)


def _least_imbalance_s(c: Context, numbers_of_groups: Sequence[int]) -> Floats:
    """`imbalance_s` of the number of shard groups whose ranks wait least."""
    by_number = [
        imbalance_s(replace(c, layout=replace(c.layout, shard_groups=number)))
        for number in numbers_of_groups
    ]
    least_s: Floats = np.minimum.reduce(np.broadcast_arrays(*by_number))
    return least_s


def dealt_waits_s(c: Context, stages: Stages, busiest_s: Floats) -> Floats:
    """What a step takes longer than the mean rank's work, where samples are dealt to ranks one by one.

    All ranks meet at the end of a round (megatron/core/pipeline_parallel/hybrid_cp_schedule.py,
    hybrid_context_parallel_forward_backward): a step takes the slowest rank of every round. Rounds are those
    of some steps that are dealt as Megatron deals them (`hybrid_context.dealt_steps`), each sample with its
    own seconds. What they take over the work of a rank in the mean, both of the same draws, is applied to the
    mean of the file.

    Parameters
    ----------
    c : Context
        Workload, one layout without a pipeline, and one or k placements.
    stages : tuple of tuple of int
        All layers, on one rank.
    busiest_s : float or array, shape [k]
        Seconds that a rank runs in place of a micro-batch, in the mean.

    Returns
    -------
    float or array
        Seconds of a step, at least 0.
    """
    steps = steps_of_layout(c)
    each_s = []
    for length, ranks in steps.kinds:
        context = context_of_samples(c, length, ranks)
        parts = split_parts(context, kind_times(context), stages)
        each_s.append(np.sum(np.asarray(total(parts)), axis=-1))
    slowest = steps.slowest_over_mean(np.stack(np.broadcast_arrays(*each_s)))
    waits_s: Floats = busiest_s * c.layout.num_micro_batches * (slowest - 1.0)
    return waits_s


class _Step(NamedTuple):
    """What a step consists of besides the work of the busiest rank."""

    chunk_s: Floats
    """The cheapest layer, which a virtual stage holds at the least."""
    dense: Floats
    """Parameters on the rank that has most, before data-parallel sharding."""
    expert: Floats
    traffic: tuple[DataParallelTraffic, ...]
    """With the framework's own buckets, and where there is a choice with others (`open_traffic`)."""
    after_update_s: Floats
    share: Floats
    """Bubble share of the schedule, of all its flushes."""
    pace_excess_s: Floats = 0.0
    imbalance_s: Floats = 0.0
    crossing: Context | None = None
    """Where what goes from stage to stage is priced; None for where all else is."""
    numbers_of_groups: tuple[int, ...] = ()
    """Numbers of shard groups of which the least counts; the layout's own without any."""


def make_context(
    workload: Workload, layout: Layout, placement: Placement, constants: Constants | None = None
) -> Context:
    """A workload, layouts and placements, joined with the calibrated rates of device, software and fabric.

    Parameters
    ----------
    workload : Workload
        Model, cluster, batch and software.
    layout : Layout
        One layout, or many of shape [n].
    placement : Placement
        Of each layout, arrays of shape [..., levels].
    constants : Constants, optional
        Those of the workload by default.

    Returns
    -------
    Context
        What every price of a layer or a step takes.
    """
    calibrated = constants or calibrated_constants(workload)
    return Context(
        workload=workload,
        layout=layout,
        placement=placement,
        constants=calibrated,
        rates=kernel_rates(workload, calibrated),
        links=fabric_links(workload, calibrated),
    )


def exact_step(
    c: Context, stages: Stages, times: KindTimes | None = None, *, played: bool = True
) -> StepTime:
    """The step of a layout, or of several with one pipeline, under a split of the layers.

    Pipeline: the busiest rank works through all m micro-batches, and waits for the others' virtual stages to
    fill and drain, T = m max_r t_r + x (sum_r t_r - max_r t_r) / vpp, where x is the schedule's bubble share
    (`schedules.bubble_share`; 1 for 1F1B: Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Ranks in
    step lose m times `schedules.pace_excess_s` besides, and what they take longer when they are played
    (`is_fast_in_closed_form`). Where the size of gradient buckets is to choose, one other than the
    framework's own counts if it saves `LEAST_GAIN` of the step.

    Parameters
    ----------
    c : Context
        Workload, one layout, and one or k placements; or k layouts whose ranks, virtual stages, schedule and
        recomputed layers are one number each. Where layers are unlike, the micro-batches are too, and where
        samples are dealt to ranks, the layouts are one.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].
    times : KindTimes, optional
        `kind_times(c)`, where the caller has them.
    played : bool
        Whether a schedule whose waits only its events tell is played; without, they are what they must be at
        the least (`least_played_s`, or the closed form of like layers), and the step is a lower bound.

    Returns
    -------
    StepTime
        Seconds by part, floats or arrays of shape [k].
    """
    times = times or kind_times(c)
    parts = split_parts(c, times, stages)
    by_rank: Parts = {
        name: shared_by_mirrors(np.asarray(seconds), c.layout.schedule)
        for name, seconds in parts.items()
    }
    loads = np.asarray(total(by_rank))
    busiest = np.argmax(loads, axis=-1)
    work = np.sum(loads, axis=-1)
    worst: Parts = {
        name: _of_rank(np.asarray(seconds), busiest) for name, seconds in by_rank.items()
    }
    by_layout = replace(c.layout.with_axis(), schedule=c.layout.schedule)
    parameters = rank_parameters(c.workload.model, by_layout, stages)
    dense, expert = (np.max(x, axis=-1) for x in parameters)
    step = _holding(c, times, dense, expert, open_traffic(c, dense, expert))
    is_forward_first = np.asarray(c.layout.schedule) == int(Schedule.GPIPE)
    if is_forward_first or is_played(c):
        is_exact = is_forward_first or played
        pipeline_s = (_pipeline_s if is_exact else least_played_s)(c, times, stages)
        waits_s = pipeline_s - np.max(loads, axis=-1) * c.layout.num_micro_batches
        step = step._replace(share=0.0, pace_excess_s=waits_s / c.layout.num_micro_batches)
    else:
        chunk_s = chunk_loads(c, times, stages)
        pace_s = pace_excess_s(chunk_s, c.layout.schedule)
        if played:
            longer_s = _longer_when_played_s(c, times, stages, chunk_s)
            pace_s = pace_s + longer_s / c.layout.num_micro_batches
        step = step._replace(pace_excess_s=pace_s)
    if is_dealt(c.workload):
        step = step._replace(imbalance_s=dealt_waits_s(c, stages, np.max(loads, axis=-1)))
    own, *others = (exposed_s(c, sent, work / np.asarray(c.layout.pp)) for sent in step.traffic)
    priced = _compose(c, worst, work, step, own)
    if not others:
        return priced
    least = np.min(others[0], axis=0)
    other = _compose(c, worst, work, step, least)
    pays = np.asarray(other.seconds) <= (1.0 - LEAST_GAIN) * np.asarray(priced.seconds)
    return _compose(c, worst, work, step, np.where(pays, least, own))


def useful_work_s(c: Context, splits: Sequence[Stages]) -> tuple[Floats, Floats]:
    """The work of all ranks and a micro-batch beyond which data-parallel traffic of some splits hides no
    further, for as few parameters on a rank as some have, and for as many.

    Parameters
    ----------
    c : Context
        Workload, one layout, and k placements.
    splits : sequence of tuples
        Layers of each [pipeline rank][virtual stage], at least one.

    Returns
    -------
    tuple of two arrays, shape [k]
        Seconds, whatever the size of gradient buckets.
    """
    by_layout = replace(c.layout.with_axis(), schedule=c.layout.schedule)
    held = [rank_parameters(c.workload.model, by_layout, stages) for stages in splits]
    dense, expert = (
        np.array([np.max(x, axis=-1) for x in kind]) for kind in zip(*held, strict=True)
    )
    bounds = []
    for end in (np.min, np.max):
        sent = open_traffic(c, end(dense, axis=0), end(expert, axis=0))
        useful = np.concatenate([np.atleast_2d(largest_useful_window_s(c, each)) for each in sent])
        bounds.append(end(useful, axis=0) * c.layout.pp)
    return bounds[0], bounds[1]


def is_played(c: Context) -> NDArray[np.bool_]:
    """Whether the ranks of a pipeline in step, or of 1F1B, may hold unlike layers.

    There waits depend on which chunk meets which, and neither the busiest rank nor the slowest chunks say how
    long they are: the schedule is played (`simulator.played_s`).

    Parameters
    ----------
    c : Context
        Workload and layouts.

    Returns
    -------
    array of bool
        Shaped like the layouts' schedules and virtual stages.
    """
    schedule = np.asarray(c.layout.schedule)
    takes_turns = (np.asarray(c.layout.vpp) > 1) | (schedule == int(Schedule.ONE_F_ONE_B))
    in_step = has_trait(schedule, "in_step") & takes_turns & (np.asarray(c.layout.pp) > 1)
    return np.asarray(in_step & bool(c.workload.model.unlike_layers))


def in_step_s(c: Context, times: KindTimes, chunk_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of all micro-batches through ranks in step in closed form, each number of chunks as fast as its
    slowest one: `exact_step` has it in parts, with its source.

    Parameters
    ----------
    c : Context
        Workload and layouts.
    times : KindTimes
        `kind_times(c)`.
    chunk_s : array of float, shape [..., virtual stages, pp]
        Seconds per micro-batch of each chunk, forward and backward.

    Returns
    -------
    array of float, shape [...]
        Seconds, all flushes together.
    """
    ranks_s = chunk_s.sum(axis=-2)
    fill_s = (ranks_s.sum(axis=-1) - ranks_s.max(axis=-1)) / c.layout.vpp
    pace_s = chunk_s.max(axis=-1).sum(axis=-1)
    share = c.workload.flushes * layer_bubble_share(c, times)
    return np.asarray(np.asarray(c.layout.num_micro_batches) * pace_s + share * fill_s)


_UNPLAYED = 1e-3
"""Of the pipeline's seconds: a schedule that cannot take so much longer is not played."""


def is_fast_in_closed_form(c: Context, times: KindTimes, stages: Stages) -> NDArray[np.bool_]:
    """Whether interleaved ranks of like layers may take over a thousandth longer than `in_step_s` says.

    Derived here. A step never takes less where a pass takes longer, so that it takes no longer than one in
    which every chunk is as long as the longest. For such even chunks the closed form was never shorter than
    what is played, whatever embedding and head take beside them; in interleaved 1F1B also where the first and
    the last chunk of the model are shorter or longer (10,000 random pipelines of 2 to 16 ranks and 2 to 10
    virtual stages, not proven). So it may be too short only where other chunks are shorter and it counts on
    that: heights of 2, 1, ..., 1 layers, by up to 9 % in 40 plans.

    Parameters
    ----------
    c : Context
        Workload, one pipeline, and one or k placements.
    times : KindTimes
        `kind_times(c)`.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    array of bool, shape [...]
        False where ranks are not in step or hold one virtual stage each, where layers are unlike
        (`is_played`), and where the schedule has no such shape (`schedules.Traits`).
    """
    chunk_s = chunk_loads(c, times, stages)
    shape = chunk_s.shape[:-2]
    nowhere = np.zeros(shape, dtype=bool)
    if not _may_interleave(c, len(stages), len(stages[0])) or is_played(c):
        return nowhere
    # Where all forward passes go first, or weight gradients run apart, short ends may be waited for too.
    raised = slice(1, -1) if c.layout.schedule == Schedule.ONE_F_ONE_B else slice(None)
    inside_s = chunk_s.reshape(*shape, -1)[..., raised]
    spread_s = np.ptp(inside_s, axis=-1)
    if np.all(spread_s <= ROUNDING * inside_s.max(axis=-1)):
        return nowhere
    passes = chunk_passes(c, stages, times)
    inputs_s = passes.backward_s - passes.weight_s
    most_s = np.zeros_like(chunk_s)
    for each_s in (passes.forward_s, inputs_s, passes.weight_s):
        in_order = each_s.reshape(*shape, -1).copy()
        longest_s = in_order[..., 1:-1].max(axis=-1, keepdims=True)
        in_order[..., raised] = np.maximum(in_order[..., raised], longest_s)
        most_s += in_order.reshape(most_s.shape)
    closed_s = in_step_s(c, times, chunk_s)
    at_most_s = in_step_s(c, times, most_s)
    return np.asarray(at_most_s > (1.0 + _UNPLAYED) * closed_s)


def _may_interleave(c: Context, pp: int, vpp: int) -> bool:
    """Whether ranks in step hold several virtual stages each, in a shape that the schedule has."""
    shapes = traits(int(np.asarray(c.layout.schedule)))
    if not shapes.in_step or vpp == 1 or pp == 1:
        return False
    numbers = np.unique(c.layout.num_micro_batches) // c.workload.flushes
    return all(not shapes.faults(pp, vpp, number) for number in numbers.tolist())


def _longer_when_played_s(
    c: Context, times: KindTimes, stages: Stages, chunk_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Seconds that all micro-batches take longer than in closed form, where they may (`exact_step`)."""
    plays = is_fast_in_closed_form(c, times, stages)
    if not plays.any():
        return np.zeros(plays.shape)
    closed_s = in_step_s(c, times, chunk_s)
    return np.maximum(_pipeline_s(c, times, stages, plays) - closed_s, 0.0)


def _pipeline_s(
    c: Context, times: KindTimes, stages: Stages, plays: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Seconds of all micro-batches through the virtual stages as they are run, all flushes together; 0 where
    `plays` says no.
    """
    passes = chunk_passes(c, stages, times)
    of_passes = np.stack([passes.forward_s, passes.backward_s, passes.weight_s])
    of_passes = of_passes.reshape(*of_passes.shape[:-2], -1)
    flushes = c.workload.flushes
    schedule = Schedule(int(np.asarray(c.layout.schedule)))
    each_m = np.asarray(c.layout.num_micro_batches) // flushes
    if schedule is Schedule.GPIPE:
        return flushes * forward_first_s(of_passes[0], of_passes[1], each_m)
    shape = of_passes.shape[1:-1]
    of_rows = of_passes.reshape(3, -1, of_passes.shape[-1])
    numbers = np.broadcast_to(each_m, shape).reshape(-1)
    pipeline_s = np.zeros(len(numbers))
    rows = np.arange(len(numbers))
    if plays is not None:
        rows = rows[plays.reshape(-1)]
    for number in np.unique(numbers[rows]):
        own = rows[numbers[rows] == number]
        columns = of_rows[:, own].transpose(0, 2, 1)
        first, back = distinct_columns(columns.reshape(-1, len(own)))
        once_s = played_s(
            *of_rows[:, own[first]],
            pp=len(stages),
            num_micro_batches=int(number),
            schedule=schedule,
        )
        pipeline_s[own] = flushes * once_s[back]
    return pipeline_s.reshape(shape)


def least_played_s(c: Context, times: KindTimes, stages: Stages) -> NDArray[np.float64]:
    """What a schedule that is played takes at the least, whatever waits for what.

    Derived here: a rank has its own work, begins when the ranks above it have done the first chunk of the
    first micro-batch, and ends before they do the last backward pass. The latter is left out where weight
    gradients, which run apart, may take its place. With one virtual stage each, the ways of 1F1B that turn
    round at one rank count too (`schedules.longest_way_s`).

    Parameters
    ----------
    c : Context
        Workload, one layout, and one or k placements.
    times : KindTimes
        `kind_times(c)`.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    array of float, shape [...]
        Seconds of all micro-batches, all flushes together; never above those of the simulator.
    """
    chunk_s = chunk_loads(c, times, stages)
    above_s = chunk_s[..., 0, :]
    if chunk_s.shape[-2] == 1:
        backward_s = chunk_passes(c, stages, times).backward_s[..., 0, :]
        ahead_s = np.cumsum(above_s, axis=-1) - above_s
        behind_s = np.sum(above_s, axis=-1, keepdims=True) - ahead_s - above_s
        each_m = int(np.max(c.layout.num_micro_batches)) // c.workload.flushes
        warm_up = np.arange(above_s.shape[-1])[::-1]
        ways_s = longest_way_s(
            above_s - backward_s,
            backward_s,
            ahead_s=ahead_s,
            behind_s=behind_s,
            warm_up=warm_up,
            num_micro_batches=each_m,
        )
        return np.asarray(c.workload.flushes * np.max(ways_s, axis=-1))
    if has_trait(c.layout.schedule, "splits_backward").any():
        above_s = chunk_passes(c, stages, times).forward_s[..., 0, :]
    fill_s = np.cumsum(above_s, axis=-1) - above_s
    work_s = chunk_s.sum(axis=-2) * np.asarray(c.layout.num_micro_batches)[..., None]
    return np.asarray(np.max(work_s + c.workload.flushes * fill_s, axis=-1))


def _of_rank(by_rank: NDArray[np.float64], rank: NDArray[np.int64]) -> Floats:
    """The entry of one rank, `rank` of shape [...] and `by_rank` [pp] or [..., pp]."""
    if by_rank.ndim == 1:
        entry: Floats = by_rank[rank]
        return entry
    return np.take_along_axis(by_rank, rank[..., None], axis=-1)[..., 0]


def optimistic_step(
    c: Context,
    times: KindTimes | None = None,
    busiest_s: Floats = 0.0,
    traffic: tuple[DataParallelTraffic, ...] = (),
    *,
    numbers_of_groups: Sequence[int] = (),
    any_relief: bool = False,
) -> StepTime:
    """A lower bound on `exact_step` of the same layouts under any split, if the placement is a bound too.

    Derived here from the formula of `exact_step`, with the bounds of `rank_load.even_layout_load`. Where the
    size of gradient buckets is to choose, that holds for each: the least counts, however little it saves.

    A split with more work in all than the least hides more data-parallel traffic, which can outweigh what it
    adds to the bubble (vpp > pp, or ZeRO-3 in a pipeline). Up to a mean as large as the busiest rank the time
    falls, then rises, with the work: the least is at the kink or at the end.

    Parameters
    ----------
    c : Context
        Workload, layouts of shape [n] and placements.
    times : KindTimes, optional
        `kind_times(c)`, where the caller has them.
    busiest_s : float or array, shape [n]
        A lower bound on the seconds of the slowest rank and micro-batch, where the caller knows one, at least
        0.
    traffic : tuple of DataParallelTraffic
        In place of the layouts' own, as `data_parallel.open_traffic` has it.
    numbers_of_groups : sequence of int
        Numbers of shard groups of which `traffic` is the least, for layouts with one group: the step is then
        a bound for each of them. More groups only hold larger shards, but for what an optimizer sends
        (`optimizers.sends_by_shards`) and what ranks wait for unlike packs (`waits_by_shards`).
    any_relief : bool
        Whether the step is to be a bound for the same layouts with modules recomputed, or more of the
        optimizer offloaded, too. A slower layer hides more of the transfers between virtual stages: these
        are taken as hidden. What else it hides, it costs: no window is longer than all micro-batches.

    Returns
    -------
    StepTime
        Seconds by part, arrays of shape [n].
    """
    times = times or kind_times(c)
    on_best_stage = times.on_best_stage()
    busiest, least_work = even_layout_load(c, on_best_stage)
    busiest = np.maximum(busiest, busiest_s)
    step = _with_parameters_spread(c, times, traffic)
    if is_played(c).any():
        step = _waiting_least(c, step, busiest, least_work, least_ways_s(c, on_best_stage))
    step = step._replace(numbers_of_groups=tuple(numbers_of_groups))
    if numbers_of_groups and c.workload.lengths is not None:
        step = step._replace(imbalance_s=_least_imbalance_s(c, numbers_of_groups))
    if any_relief:
        step = step._replace(chunk_s=np.inf)
    pp = np.asarray(c.layout.pp)
    waits = step.share / c.layout.vpp
    most_work, windows = np.maximum(busiest * pp, least_work), hiding_windows(c)

    def _least_of(sent: DataParallelTraffic) -> tuple[Any, ...]:
        """What depends on the work of all ranks (the bubble, and the traffic that stays exposed), that work,
        and that traffic.
        """
        useful = largest_useful_window_s(c, sent, windows) * pp
        amounts = (least_work, np.clip(useful, least_work, most_work))
        each = [(work, exposed_s(c, sent, work / pp, windows)) for work in amounts]
        first, second = ((work * waits + exposed, work, exposed) for work, exposed in each)
        is_less = second[0] < first[0]
        return tuple(np.where(is_less, new, old) for new, old in zip(second, first, strict=True))

    least_s, work, exposed = _least_of(step.traffic[0])
    for of_sizes in step.traffic[1:]:
        by_size = _least_of(of_sizes)
        best = np.argmin(by_size[0], axis=0)[None]
        other_s, other_work, other_exposed = (
            np.take_along_axis(x, best, axis=0)[0] for x in by_size
        )
        pays = other_s < least_s
        work, exposed = np.where(pays, other_work, work), np.where(pays, other_exposed, exposed)
    return _compose(c, {"ranks": busiest}, work, step, exposed)


def loaded_step(c: Context, times: KindTimes, busiest_s: Floats, work_s: Floats) -> StepTime:
    """A lower bound on `exact_step` of a split with this busiest rank and this work in all.

    Holds for any size of gradient buckets: parameters are spread evenly over the ranks, and ranks in step
    lose nothing on uneven chunks. Linear in `busiest_s`.

    Parameters
    ----------
    c : Context
        Workload, layouts of shape [n] and placements.
    times : KindTimes
        `kind_times(c)`.
    busiest_s : float or array, shape [n]
        Seconds of the slowest rank and micro-batch, above 0.
    work_s : float or array, shape [n]
        Seconds of all ranks and a micro-batch, at least `busiest_s`.

    Returns
    -------
    StepTime
        Seconds by part, arrays of shape [n].
    """
    step = _with_parameters_spread(c, times)
    if is_played(c).any():
        step = _waiting_least(c, step, busiest_s, backward_share=longer_pass_share(times))
    if c.workload.lengths is not None:
        step = step._replace(imbalance_s=imbalance_s(c, fully_recomputed=False))
    return _compose(c, {"ranks": busiest_s}, work_s, step, _least_exposed_s(c, step, work_s))


def _waiting_least(
    c: Context,
    step: _Step,
    busiest_s: Floats,
    work_s: Floats = np.inf,
    ways_s: Floats | None = None,
    *,
    backward_share: Floats = 0.5,
) -> _Step:
    """The step with only those waits that ranks of a played schedule cannot avoid.

    Waits may be shorter there than between even ones. None are counted where virtual stages interleave, and
    where the busiest rank has so much of the work that none may be. Where a flush takes `ways_s` more than
    the work, that counts if it is more than what follows from the busiest rank (`schedules.least_waits`).
    """
    plays, m, flushes = is_played(c), np.asarray(c.layout.num_micro_batches), c.workload.flushes
    share, of_busiest = least_waits(c.layout.pp, m / flushes, backward_share)
    others_s, beside_s = work_s - busiest_s, (share - of_busiest) * busiest_s
    if ways_s is not None:
        by_ways_s = ways_s - (m / flushes - 1) * busiest_s
        is_more = others_s + by_ways_s > share * others_s + beside_s
        share, beside_s = np.where(is_more, 1.0, share), np.where(is_more, by_ways_s, beside_s)
    waits = (np.asarray(c.layout.vpp) == 1) & (share * others_s + beside_s > 0)
    return step._replace(
        share=np.where(plays, waits * flushes * share, step.share),
        pace_excess_s=np.where(plays, waits * flushes * beside_s / m, step.pace_excess_s),
    )


def _with_parameters_spread(
    c: Context, times: KindTimes, traffic: tuple[DataParallelTraffic, ...] = ()
) -> _Step:
    """A step in which the rank with most parameters has as few as any split allows.

    Traffic that is given stands for all that data parallelism sends.
    """
    dense, expert = rank_parameters(c.workload.model, c.layout, None)
    step = _holding(c, times, dense, expert, traffic or open_traffic(c, dense, expert))
    return step._replace(after_update_s=0.0) if traffic else step


def _holding(
    c: Context,
    times: KindTimes,
    dense: Floats,
    expert: Floats,
    traffic: tuple[DataParallelTraffic, ...] = (),
) -> _Step:
    """A step in which the rank with most parameters has these."""
    return _Step(
        chunk_s=cheapest_layer_s(times),
        dense=dense,
        expert=expert,
        traffic=traffic or (data_parallel_traffic(c, dense, expert),),
        after_update_s=gather_after_update_s(c, dense, expert),
        share=c.workload.flushes * layer_bubble_share(c, times),
        imbalance_s=imbalance_s(c),
    )


def step_of_loads(
    c: Context, times: KindTimes, worst: Parts, work_s: Floats, rank: RankParameters
) -> StepTime:
    """The step of ranks whose loads and parameters are known (docs/cost_model.md, "Mixed clusters").

    Parameters
    ----------
    c : Context
        Workload, one layout and its placement.
    times : KindTimes
        `kind_times(c)`.
    worst : dict of str to float or array, shape [k]
        Seconds of the busiest rank and micro-batch, by part, at least 0.
    work_s : float or array, shape [k]
        Seconds of all ranks and a micro-batch, above 0.
    rank : RankParameters
        Of the rank that has most.

    Returns
    -------
    StepTime
        Seconds by part, floats or arrays of shape [k].
    """
    step = _holding(c, times, rank.dense, rank.expert)._replace(crossing=rank.crossing)
    return _compose(c, worst, work_s, step, _least_exposed_s(c, step, work_s))


def _least_exposed_s(c: Context, step: _Step, work_s: Floats) -> Floats:
    """With the best size of buckets, for work of a shape that the layouts' broadcasts to."""
    window_s = work_s / np.asarray(c.layout.pp)
    own, *others = step.traffic
    least = exposed_s(c, own, window_s)
    for of_sizes in others:
        for columns in zip(*(np.asarray(column) for column in of_sizes), strict=True):
            sent = DataParallelTraffic(*columns)
            least = np.minimum(least, exposed_s(c, sent, window_s))
    return least


def _compose(c: Context, worst: Parts, work: Floats, step: _Step, exposed: Floats) -> StepTime:
    """The step from the parts of the busiest rank and the `work` of all ranks, per micro-batch, with the
    seconds that its data-parallel traffic leaves `exposed`.
    """
    layout, across = c.layout, step.crossing or c
    m, vpp = np.asarray(layout.num_micro_batches), np.asarray(layout.vpp)
    busiest = total(worst)
    parts: Parts = {name: seconds * m for name, seconds in worst.items()}
    parts["pipeline_bubble"] = step.share * (work - busiest) / vpp + m * step.pace_excess_s
    parts["pipeline_p2p"] = _pipeline_p2p_s(across, step.chunk_s)
    parts["dp_comm"] = exposed + tied_tables_s(across)
    parts["dp_comm"] = parts["dp_comm"] + step.after_update_s
    parts["optimizer"] = optimizer_s(c, step.dense, step.expert, step.numbers_of_groups)
    if c.workload.keeps_reference:
        copies_s = reference_copies_s(c, step.dense, step.expert)
        parts["scoring"] = parts.get("scoring", 0.0) + copies_s + 0.0 * busiest
    lengths = c.workload.lengths
    if lengths is not None and (lengths.dealt or not lengths.alike):
        parts["length_imbalance"] = step.imbalance_s + 0.0 * busiest
    overhead_s = c.constants.framework.step_overhead_s + checked_backward_s(c)
    parts["step_overhead"] = overhead_s + 0.0 * busiest
    parts["scale"] = total(parts) * scale_share(c.workload, layout, c.constants)
    return StepTime(parts)


def scale_share(workload: Workload, layout: Layout, constants: Constants) -> Floats:
    """What a step loses on many nodes, beside all its other parts.

    `scale_per_doubling` of `costmodel/data/devices.yaml`, which has its source, times log2 of the NVLink
    domains.

    Parameters
    ----------
    workload : Workload
        Its cluster.
    layout : Layout
        One layout, or many of shape [n]; its number of GPUs is used.
    constants : Constants
        Of the workload.

    Returns
    -------
    float or array
        Share of the other parts, without unit, at least 0: 0.007 per doubling of NVLink domains.
    """
    cluster = workload.cluster
    domain = max(cluster.gpus_per_node, cluster.nvlink_domain)
    nodes = np.maximum(np.asarray(layout.gpus) / domain, 1.0)
    share: Floats = constants.shared["scale_per_doubling"] * np.log2(nodes)
    return share
