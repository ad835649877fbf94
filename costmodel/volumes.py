"""Bytes that ranks move in a step: of the mean rank, of each group, and across each fabric level.

Embedding, head and MTP modules are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.costmodel.collectives import Links, cross_rail_bytes, goes_by_tree, members_inside
from meshwright.costmodel.data_parallel import hiding_windows, passes_of_a_step
from meshwright.costmodel.feed_forward import dispatch_links, routed_copies
from meshwright.costmodel.hybrid_context import is_dealt, samples_of_micro_batch
from meshwright.costmodel.layer_context import Context, sends_step_by_step
from meshwright.costmodel.layout import Layout, recomputes_experts
from meshwright.costmodel.rank_load import Stages, rank_counts
from meshwright.costmodel.states import optimizer_shards, rank_parameters
from meshwright.costmodel.workload import (
    GATHERS,
    HIERARCHICAL,
    gathered_ranks,
    gathering_members,
    inside_and_between,
    one_ring,
    pass_bytes,
    sent_routing_bytes,
    swapping_ranks,
)
from meshwright.model_specs.schema import ModelSpec

_TRANSFERS_PER_BLOCK = 4.0
"""Transfers of an activation per block of a layer: in and out, forward and backward."""


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """Layers that the mean pipeline rank runs in a step, each counted once a micro-batch."""

    micro_batches: int
    activation_bytes: float
    """Of one micro-batch between layers, before tensor parallelism splits it."""
    layers: float
    recomputed: float
    """Those that run forward once more: recomputed in full, and once for each pass that scores."""
    moe_layers: float
    """Layers with experts, among the others; of a hybrid pattern those that have them."""
    moe_recomputed: float
    experts_alone: float
    """Layers of which experts alone run forward once more, behind the norm."""

    @property
    def experts_again(self) -> float:
        """Layers whose experts run forward once more, with their layer or alone."""
        return self.moe_recomputed + self.experts_alone


def mean_rank_work(c: Context, stages: Stages, ranks: slice | None = None) -> RankWork:
    """Layers that the mean pipeline rank runs in a step, and the activations between them.

    T h elements of 2 bytes a micro-batch (docs/cost_model.md, "One layer", has the symbols).

    Parameters
    ----------
    c : Context
        Workload and one layout.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].
    ranks : slice, optional
        Pipeline ranks whose mean is taken, 1 or more, of a model whose layers do not take turns; all by
        default.

    Returns
    -------
    RankWork
        Layers, each counted once a micro-batch, and bytes.
    """
    model, counts, chosen = c.workload.model, rank_counts(c, stages), ranks or slice(None)
    m, passes = int(np.asarray(c.layout.num_micro_batches)), c.workload.scoring_passes

    def mean(of_ranks: FloatArray) -> float:
        return m * float(np.sum(of_ranks[chosen])) / len(of_ranks[chosen])

    layers, moe = mean(counts.dense + counts.moe), mean(counts.moe)
    again, moe_again = (
        mean(counts.dense_recomputed + counts.moe_recomputed),
        mean(counts.moe_recomputed),
    )
    if ranks is None:
        # Of a pattern, or where each n-th layer has experts, not every main layer has them.
        moe, moe_again = (
            m * len(model.expert_layers) / len(stages),
            model.blocks.experts * moe_again,
        )
    return RankWork(
        micro_batches=m,
        activation_bytes=2.0 * float(np.asarray(c.tokens)) * model.hidden,
        layers=layers,
        recomputed=again + passes * layers,
        moe_layers=moe,
        moe_recomputed=moe_again + passes * moe,
        experts_alone=moe * float(recomputes_experts(c.layout)),
    )


def tensor_passes(c: Context, work: RankWork) -> float:
    """Ring passes of an activation over the tensor group in a step.

    Two all-reduces of two passes a block (Shoeybi et al. 2019, arXiv 1909.08053, section 3). With sequence
    parallelism Megatron gathers the saved input once more for the weight's gradient (Korthikanti et al. 2022,
    section 4.2.2; megatron/core/tensor_parallel/layers.py,
    LinearWithGradAccumulationAndAsyncCommunication). Where each product that reads one input reduces its
    gradient apart, these count too (`layer_context.tensor_parallel_s`).

    Parameters
    ----------
    c : Context
        Workload and one layout.
    work : RankWork
        Of the same layout.

    Returns
    -------
    float
        Passes at 16 bits, at least 0; a gather of cast values counts less.
    """
    by_sequence = bool(np.all(c.layout.sequence_parallel))
    narrow = float(c.gathered_share) if by_sequence else 1.0
    blocks, recomputed = _tensor_blocks(c, work)
    sums = _TRANSFERS_PER_BLOCK / 2.0 * blocks + recomputed + _sums_apart(c, work, blocks)
    passes = sums * (1.0 + narrow)
    if by_sequence and c.constants.framework.async_tensor_backward:
        passes += blocks * narrow
    return passes


def tensor_all_reduced(c: Context) -> float:
    """Share of a tensor group's ring passes that all-reduces make: all without sequence parallelism.

    Shoeybi et al. 2019, arXiv 1909.08053, section 3; with it Korthikanti et al. 2022, arXiv 2205.05198,
    section 4.2.2.

    Parameters
    ----------
    c : Context
        Workload and one layout.

    Returns
    -------
    float
        0 or 1.
    """
    return float(not np.all(c.layout.sequence_parallel))


def _tensor_blocks(c: Context, work: RankWork) -> tuple[float, float]:
    """Blocks of a step that tensor parallelism splits, and those of them that run forward once more."""
    moe = c.workload.model.moe
    without = 1.0 if moe is not None and not moe.shared_width else 0.0
    # Mamba-2 beside attention shares its gather and its sum.
    beside = 1.0 if c.workload.model.mamba_beside_attention else 0.0
    each = c.workload.model.blocks.total - beside
    blocks = each * work.layers - without * work.moe_layers
    shared_alone = (1.0 - without) * work.experts_alone
    return blocks, each * work.recomputed - without * work.moe_recomputed + shared_alone


def _sums_apart(c: Context, work: RankWork, blocks: float) -> float:
    """All-reduces of a step behind further products of one input: two of attention, one of a gated block."""
    stack = c.constants.framework
    attention = c.workload.model.blocks.attention * work.layers
    gated = float(c.workload.model.gated) * (blocks - attention)
    apart = 2.0 * stack.reduces_each_input * attention + stack.reduces_gate_apart * gated
    return tensor_all_reduced(c) * apart


def expert_passes(work: RankWork) -> float:
    """Transfers of routed tokens in a step: dispatch and combine, forward, backward and recomputed.

    Lepikhin et al. 2020 (GShard), arXiv 2006.16668, has dispatch and combine.

    Parameters
    ----------
    work : RankWork
        Of one layout.

    Returns
    -------
    float
        All-to-alls, at least 0.
    """
    return _TRANSFERS_PER_BLOCK * work.moe_layers + 2.0 * work.experts_again


def gathered_bytes(c: Context, work: RankWork) -> float:
    """Buffers that the all-gather dispatcher gathers or scatters in a step, or HybridEP of the routing.

    `workload.pass_bytes` and `workload.sent_routing_bytes` have the bytes a token and their source.

    Parameters
    ----------
    c : Context
        Workload and one layout.
    work : RankWork
        Of the same layout.

    Returns
    -------
    float
        Bytes of the whole group's tokens, 0 with other dispatchers.
    """
    if c.workload.model.moe is None:
        return 0.0
    forward, backward = float(np.asarray(sent_routing_bytes(c.workload, c.layout)[1])), 0.0
    if c.workload.moe_dispatch == GATHERS:
        forward, backward = (sum(passes) for passes in pass_bytes(c.workload))
    tokens = float(np.asarray(c.tokens / c.layout.tp * gathered_ranks(c.layout)))
    return tokens * (work.moe_layers * (forward + backward) + work.experts_again * forward)


def routed_bytes(c: Context, work: RankWork) -> float:
    """What a rank sends in one transfer to the experts, one copy of each token.

    2 T h / tp bytes (docs/cost_model.md, "One layer") times the measured `Workload.imbalance`; of experts on
    a projection 2 T l / tp.

    Parameters
    ----------
    c : Context
        Workload and one layout.
    work : RankWork
        Of the same layout.

    Returns
    -------
    float
        Bytes of the busiest rank, above 0.
    """
    imbalance = float(c.workload.imbalance(int(np.asarray(c.layout.ep))))
    narrowed = c.workload.model.routed_width / c.workload.model.hidden
    return work.activation_bytes * narrowed / int(np.asarray(c.layout.tp)) * imbalance


def _routing_bytes(c: Context) -> float:
    """What goes beside the tokens of `routed_bytes`, one copy of each."""
    imbalance = float(c.workload.imbalance(int(np.asarray(c.layout.ep))))
    beside, _ = sent_routing_bytes(c.workload, c.layout)
    return float(np.asarray(c.tokens / c.layout.tp * beside)) * imbalance


@dataclass(frozen=True, kw_only=True)
class ContextVolumes:
    """Bytes of a step of context parallelism: of a ring's whole buffer, or what one GPU swaps in all."""

    whole: float
    """Over the whole group, by the ring of p2p or the swap of a2a; in a2a+p2p the swap of layers with linear
    attention or Mamba."""
    swapped: float
    """Among neighbours of a2a+p2p, by all-to-all."""
    ring: float
    """Round the rings of a2a+p2p."""
    neighbours: int
    """Ranks that swap in a2a+p2p."""


def context_volumes(c: Context, work: RankWork) -> ContextVolumes:
    """Keys and values once round the ring forward, and with their gradients backward; or heads for tokens.

    `layer_context.context_parallel_s` says how PyTorch's rings differ.
    Rings as in Liu et al. 2023, arXiv 2310.01889, section 3, swaps as in DeepSpeed Ulysses, arXiv 2309.14509;
    both as in USP, arXiv 2405.07719, section 3.

    Parameters
    ----------
    c : Context
        Workload and one layout.
    work : RankWork
        Of the same layout.

    Returns
    -------
    ContextVolumes
        Bytes of a step, at least 0.
    """
    model = c.workload.model
    tp = int(np.asarray(c.layout.tp))
    cp = int(np.asarray(c.layout.cp))
    token_bytes = 2.0 * float(np.asarray(c.tokens))
    passes = 2.0 * work.layers + work.recomputed
    linear, mamba = model.linear_attention, model.mamba
    swapped = 0.0
    if linear is not None:
        elements = (linear.projected_width + linear.value_width) / tp
        swapped = model.linear_fraction * token_bytes * elements * passes
    if mamba is not None:
        elements = (mamba.projected_width + mamba.width) / tp
        swapped = model.blocks.mamba * token_bytes * elements * passes
    heads_swapped = 0.0
    for share, kind in _softmax_kinds(model):
        heads, width = kind.heads / tp, kind.qk_head_dim + kind.v_head_dim
        heads_swapped += share * token_bytes * (heads + _kv_heads(kind, tp)) * width * passes
    if c.workload.cp_comm == "a2a":
        return ContextVolumes(whole=heads_swapped + swapped, swapped=0.0, ring=0.0, neighbours=1)
    stack = c.constants.framework
    of_gradients = stack.ring_gradient_bytes / 2.0
    if not sends_step_by_step(c):
        of_gradients *= cp / max(cp - 1.0, 1.0)
    ring_passes = (2.0 + of_gradients) * work.layers + work.recomputed
    passed_on = 0.0
    for share, kind in _softmax_kinds(model):
        width = kind.qk_head_dim + kind.v_head_dim
        heads = kind.heads / tp if stack.ring_repeats_keys else _kv_heads(kind, tp)
        passed_on += share * token_bytes * heads * width * ring_passes
    if c.workload.cp_comm == HIERARCHICAL:
        size = int(swapping_ranks(c.workload, c.layout))
        ring = passed_on * (cp // size)
        return ContextVolumes(whole=swapped, swapped=heads_swapped, ring=ring, neighbours=size)
    return ContextVolumes(whole=passed_on * cp + swapped, swapped=0.0, ring=0.0, neighbours=1)


def _softmax_kinds(model: ModelSpec) -> list[tuple[float, ModelSpec]]:
    """Kinds of softmax attention with heads of their own, each with its share of all layers."""
    shares, attending = model.attention_shares.softmax, model.blocks.attention
    kinds = model.kinds_apart
    return [(share * attending, kinds.get(letter, model)) for letter, share in shares]


def _kv_heads(model: ModelSpec, tp: int) -> float:
    """Key-value heads on one tensor rank."""
    return model.heads / tp if model.attention is not None else max(model.kv_heads / tp, 1.0)


def gradient_element_bytes(c: Context) -> tuple[float, float]:
    """Bytes that pass round the data-parallel ring in a step for each parameter, by ZeRO stage.

    Beside adapters, theirs, and under ZeRO 3 frozen weights in the bytes that they are kept in.
    `data_parallel.data_parallel_traffic` has the sources.

    Parameters
    ----------
    c : Context
        Workload and one layout.

    Returns
    -------
    tuple of two floats
        Bytes of all gathers and reductions, for each dense parameter and for each of routed experts, at least
        0; of frozen ones their own gathers, and what their adapters make pass.
    """
    passed, summed = _passed_and_summed(c)
    shares, sizes = c.workload.trained_shares, c.workload.frozen_weight_bytes
    framework, stage = c.constants.framework, int(np.asarray(c.layout.zero_stage))
    gathers = 0.0
    if c.workload.adapters is not None and framework.shards_frozen(stage):
        gathers = float(np.asarray(passes_of_a_step(c)[0]))
    dense, expert = (
        share * (passed + summed) + gathers * size
        for share, size in zip(shares, sizes, strict=True)
    )
    return dense, expert


def gradients_all_reduced(c: Context) -> float:
    """Share of `gradient_element_bytes` that all-reduces move: all without ZeRO, else where a stack has them.

    `data_parallel.data_parallel_traffic` has the sources. No stack that shards frozen parameters all-reduces.

    Parameters
    ----------
    c : Context
        Workload and one layout.

    Returns
    -------
    float
        0 to 1.
    """
    passed, summed = _passed_and_summed(c)
    return summed / (passed + summed)


def _passed_and_summed(c: Context) -> tuple[float, float]:
    """Bytes of a trained parameter that gathers and scatters pass in a step, and those of all-reduces."""
    framework, stage = c.constants.framework, int(np.asarray(c.layout.zero_stage))
    grad, weight = float(framework.gradient_bytes), c.gathered_weight_bytes
    if stage == 0:
        return 0.0, 2.0 * grad
    gathers, reductions = (float(np.asarray(passes)) for passes in passes_of_a_step(c))
    if stage < 3 and framework.zero1_all_reduces:
        return gathers * weight, reductions * 2.0 * grad
    return gathers * weight + reductions * grad, 0.0


def tree_over_ring(members: int, all_reduced: float) -> float:
    """What passes every member of a group in two blocks, over what rings would move.

    A tree between two blocks carries n each way where two ring passes carry 2 (P - 1)/P n; gathers and
    scatters have no tree (`collectives.all_reduce_s` has the sources).

    Parameters
    ----------
    members : int
        P, at least 1.
    all_reduced : float
        Share of the ring passes that are all-reduces, 0 to 1.

    Returns
    -------
    float
        0.5 to 1.
    """
    return 1.0 if members < 3 else 1.0 - all_reduced * 0.5 * (members - 2) / (members - 1)


def reduced_shard_bytes(c: Context) -> tuple[float, float]:
    """Bytes that pass round the ring over the shard groups in a step for each parameter of a rank's shard.

    The all-reduce of HSDP; `data_parallel.data_parallel_traffic` has the sources.

    Parameters
    ----------
    c : Context
        Workload and one layout.

    Returns
    -------
    tuple of two floats
        Bytes for each dense parameter and for each of routed experts, at least 0.
    """
    _, reductions = passes_of_a_step(c)
    each = 2.0 * float(c.constants.framework.gradient_bytes) * float(np.asarray(reductions))
    dense, expert = c.workload.trained_shares
    return dense * each, expert * each


def operations_of_a_step(c: Context, work: RankWork) -> dict[str, float]:
    """Operations that the mean rank starts in a step, by axis.

    `tensor_passes`, `expert_passes` and `data_parallel.passes_of_a_step` have the sources; a boundary carries
    an activation forward and a gradient backward (Narayanan et al. 2021, arXiv 2104.04473, section 3.2).

    Parameters
    ----------
    c : Context
        Workload and one layout.
    work : RankWork
        Of the same layout.

    Returns
    -------
    dict of str to float
        Counts, at least 0. `tp`: gathers and scatters, two an all-reduce. `pp`: sends, forward and backward.
        `ep`: all-to-alls. `dp`: ring passes of all gradients or weights.
    """
    layout = c.layout
    blocks, recomputed = _tensor_blocks(c, work)
    gathers, reductions = (float(np.asarray(passes)) for passes in passes_of_a_step(c))
    is_replicated = int(np.asarray(layout.zero_stage)) == 0
    return {
        "tp": _TRANSFERS_PER_BLOCK * blocks + 2.0 * (recomputed + _sums_apart(c, work, blocks)),
        "pp": (2.0 + c.workload.scoring_passes) * work.micro_batches * int(np.asarray(layout.vpp)),
        "ep": expert_passes(work),
        "dp": 2.0 if is_replicated else gathers + reductions,
    }


# Bytes of a step that one GPU puts into each group it belongs to, wherever the group lies.


@dataclass(frozen=True, kw_only=True)
class GroupTraffic:
    """Bytes of one step, one direction, of one GPU; a ring's are what passes every member of the group."""

    tensor: float
    """Ring passes over the tensor group."""
    context: float
    """Ring passes of keys and values over the context group; with `a2a`, what is sent to the whole group;
    with `a2a+p2p`, what layers with linear attention or Mamba send to it."""
    context_swaps: float
    """What `a2a+p2p` sends to the neighbours that swap heads for tokens, itself among them."""
    context_rings: float
    """Ring passes of `a2a+p2p` over every A-th rank of the context group."""
    gradients: float
    """Ring passes of dense gradients and parameters over the data-parallel group (with context), or over a
    shard group where there are several."""
    gradients_between: float
    """Ring passes of a rank's own dense shard over the shard groups; 0 where there is one."""
    expert_gradients: float
    """As `gradients` of the experts, over the ranks that hold the same ones."""
    expert_gradients_between: float
    """As `gradients_between` of the experts."""
    expert_tensor: float
    """Ring passes of gathered tokens over the expert-tensor group."""
    experts: float
    """All-to-all: sent to the whole expert group, itself among the receivers, one copy a receiver block."""
    expert_gathers: float
    """Ring passes of the all-gather dispatcher over the etp ep ranks of a group, in place of both."""
    boundary: float
    """To the next pipeline rank and back from it, the mean of both; passes that score go forward alone."""
    wrap: float
    """From the last pipeline rank to the first, with virtual stages."""


def group_traffic(
    c: Context, stages: Stages, expert_blocks: int = 1, ranks: slice | None = None
) -> GroupTraffic:
    """Bytes of a step that one GPU puts into each of its groups, wherever these lie.

    `level_traffic` spreads the same bytes over the levels of a regular fabric. Gradients are those of the
    rank with the most parameters, the rest of the mean layer. The functions that count each volume
    (`tensor_passes`, `context_volumes`, `gradient_element_bytes`, `routed_bytes`) have the sources.

    Parameters
    ----------
    c : Context
        Workload and one layout.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].
    expert_blocks : int
        Blocks (slots, nodes) that an expert group spans, at least 1: tokens that go to several experts of a
        block are sent there once.
    ranks : slice, optional
        Pipeline ranks whose GPUs are meant, as `mean_rank_work` takes them; all by default.

    Returns
    -------
    GroupTraffic
        Bytes, one direction, at least 0.
    """
    layout = c.layout
    tp, pp, vpp = (int(np.asarray(x)) for x in (layout.tp, layout.pp, layout.vpp))
    work = mean_rank_work(c, stages, ranks)
    hop = work.activation_bytes / tp * work.micro_batches * vpp if pp > 1 else 0.0
    hop = (1.0 + 0.5 * c.workload.scoring_passes) * hop
    experts, expert_tensor = _expert_bytes(c, work, expert_blocks)
    return GroupTraffic(
        tensor=_ring(work.activation_bytes, tp) * tensor_passes(c, work),
        **_context_bytes(c, work),
        **_gradient_bytes(c, stages, slice(None) if ranks is None else ranks),
        expert_tensor=expert_tensor,
        experts=experts,
        expert_gathers=_ring(gathered_bytes(c, work), int(gathered_ranks(layout))),
        boundary=hop,
        wrap=hop * (vpp - 1) / vpp,
    )


def _gradient_bytes(c: Context, stages: Stages, ranks: slice) -> dict[str, float]:
    """Ring passes over the ranks that shard together, and of the shard of each over their groups."""
    groups = int(np.asarray(c.layout.shard_groups))
    kinds = zip(
        ("gradients", "expert_gradients"),
        rank_parameters(c.workload.model, c.layout, stages),
        (int(np.asarray(size)) for size in optimizer_shards(c.layout)),
        gradient_element_bytes(c),
        reduced_shard_bytes(c),
        strict=True,
    )
    moved = {}
    for name, parameters, shards, element, reduced in kinds:
        most = float(np.max(np.atleast_1d(parameters)[ranks]))
        moved[name] = _ring(most * element, shards)
        moved[f"{name}_between"] = _ring(most / shards * reduced, groups)
    return moved


def _context_bytes(c: Context, work: RankWork) -> dict[str, float]:
    """Ring passes over the context group, or what is sent to all of it, and both of its parts."""
    if is_dealt(c.workload):
        samples = samples_of_micro_batch(c)
        rings = (
            float(np.asarray(each.number))
            * _ring(context_volumes(each.context, work).whole, int(each.context.layout.cp))
            for each in samples
        )
        return {"context": sum(rings), "context_swaps": 0.0, "context_rings": 0.0}
    cp, moved = int(np.asarray(c.layout.cp)), context_volumes(c, work)
    if cp == 1:
        return {"context": 0.0, "context_swaps": 0.0, "context_rings": 0.0}
    share = (cp - 1) / cp if one_ring(c.workload) else 1.0
    return {
        "context": moved.whole * share,
        "context_swaps": moved.swapped,
        "context_rings": _ring(moved.ring, cp // moved.neighbours),
    }


def _expert_bytes(c: Context, work: RankWork, blocks: int) -> tuple[float, float]:
    """Bytes of the expert group's all-to-all, and of the expert-tensor group's rings."""
    moe = c.workload.model.moe
    if moe is None or c.workload.moe_dispatch == GATHERS:
        return 0.0, 0.0
    etp = int(np.asarray(c.layout.etp))
    routed = routed_bytes(c, work) * expert_passes(work)
    expert_tensor = _ring(routed * moe.top_k * etp, etp)
    if int(np.asarray(c.layout.ep)) == 1:
        return 0.0, expert_tensor
    copies = routed_copies(c.workload, np.array([float(blocks)]), c.layout.ep)
    sent = routed + _routing_bytes(c) * expert_passes(work)
    return sent * float(np.max(copies)), expert_tensor


def _ring(volume: float, members: int) -> float:
    """What passes every member in one ring pass of a buffer of `volume` bytes in all."""
    return volume * (members - 1) / members


# Bytes that one GPU sends across each fabric level in a step, by axis, and how long its links are busy.
#
# A mean over the ranks of the pipeline. A ring puts (P-1)/P n
# on every member; of the hops of a group, those between sub-blocks cross the level, shared by the members
# inside.


FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class LevelBytes:
    """Traffic of one fabric level, per GPU and step, one direction."""

    level: str
    """Name of the level, as `fabric_levels` has it."""
    bytes_per_step: float
    """Of the mean GPU."""
    by_axis: dict[str, float]
    """`bytes_per_step` by axis of the layout."""
    busy_s: float
    """Of the GPU that sends most; where only the mean is known, of that."""
    utilisation: float
    """`busy_s` over the step time."""
    most_bytes_per_step: float
    """Of the GPU that sends most."""
    mean_busy_s: float
    """`busy_s` of the mean GPU."""


def level_traffic(c: Context, stages: Stages, step_time_s: float) -> tuple[LevelBytes, ...]:
    """Bytes that one GPU sends over each fabric level in a step, and how long that keeps its links busy.

    `ring_bytes` and `all_to_all_bytes` spread the volumes of `costmodel/volumes.py` over the levels (Thakur,
    Rabenseifner and Gropp 2005, section 4.1; docs/cost_model.md, "Collectives").

    Parameters
    ----------
    c : Context
        Workload, one layout, one placement and links.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].
    step_time_s : float
        Seconds of the step, more than 0.

    Returns
    -------
    tuple of LevelBytes
        One entry per fabric level, inside out.
    """
    names = fabric_levels(c.workload.cluster, c.workload.gpus).names
    axes = {axis: sent for axis, sent in _bytes_by_axis(c, stages).items() if np.any(sent > 0)}
    levels = []
    for level, name in enumerate(names):
        by_axis = {axis: float(sent[level]) for axis, sent in axes.items() if sent[level] > 0}
        sent_bytes = sum(by_axis.values())
        busy_s = sent_bytes / float(c.links.bytes_per_s[level])
        share = busy_s / step_time_s
        levels.append(LevelBytes(name, sent_bytes, by_axis, busy_s, share, sent_bytes, busy_s))
    return tuple(levels)


def ring_bytes(volume: float, members: NDArray[np.int64]) -> FloatArray:
    """Bytes a GPU sends over each level in one ring pass: (P-1)/P of the buffer (Thakur et al. 2005, 4.1).

    Parameters
    ----------
    volume : float
        Bytes of the buffer in all, at least 0.
    members : array of int, shape [levels]
        Members of the group inside one block of each level.

    Returns
    -------
    array of float, shape [levels]
        Bytes, shared by the members inside the sub-block; 0 where the group does not cross the level.
    """
    inside, size = members_inside(members), int(members[-1])
    return np.where(members > inside, volume * (size - 1) / size / inside, 0.0)


def _ring_or_tree_bytes(
    volume: float, members: NDArray[np.int64], all_reduced: float, links: Links
) -> FloatArray:
    """`ring_bytes` with all-reduces, a share of them, by tree where they are priced so."""
    sent = ring_bytes(volume, members)
    if not goes_by_tree(members, links):
        return sent
    return sent * tree_over_ring(int(members[-1]), all_reduced)


def all_to_all_bytes(
    sent: float, members: NDArray[np.int64], copies: FloatArray | float = 1.0
) -> FloatArray:
    """Bytes a GPU sends over each level in an all-to-all: the share (P - inside)/P leaves the sub-block.

    As `collectives.all_to_all_s` counts; docs/cost_model.md, "Collectives".

    Parameters
    ----------
    sent : float
        Bytes that the GPU sends in all, to itself too; at least 0.
    members : array of int, shape [levels]
        Members of the group inside one block of each level.
    copies : float or array, shape [levels]
        How many times over they cross each level, at least 0.

    Returns
    -------
    array of float, shape [levels]
        Bytes, at least 0.
    """
    inside, size = members_inside(members), int(members[-1])
    return np.where(members > inside, copies * sent * (size - inside) / size, 0.0)


def _rail_changes(exchanged: FloatArray, members: NDArray[np.int64], links: Links) -> FloatArray:
    """What an all-to-all also sends over the level that joins rails, to change them; shape [levels]."""
    changes = np.zeros(len(members))
    if links.rails is None or not np.any(links.rails > 1):
        return changes
    joining = int(np.flatnonzero(links.rails > 1)[-1]) + 1
    if joining < len(changes):
        up = float(cross_rail_bytes(exchanged, members, links.rails))
        changes[joining] = up - exchanged[joining]
    return changes


def _bytes_by_axis(c: Context, stages: Stages) -> dict[str, FloatArray]:
    """Bytes over each level by axis; each transfer of a layer runs once more where it is recomputed."""
    place, tp = c.placement, int(np.asarray(c.layout.tp))
    work = mean_rank_work(c, stages)
    sent = {
        "tp": _ring_or_tree_bytes(work.activation_bytes, place.tp, tensor_all_reduced(c), c.links)
        * tensor_passes(c, work),
        "cp": _context_bytes_of_level(c, work),
        "dp": _data_parallel_bytes(c, stages),
        "pp": _pipeline_bytes(c, work.activation_bytes / tp, work.micro_batches),
    }
    moe = c.workload.model.moe
    if c.workload.moe_dispatch == GATHERS:
        sent["ep"] = ring_bytes(gathered_bytes(c, work), gathering_members(place))
    elif moe is not None:
        routed = routed_bytes(c, work)
        passes = expert_passes(work)
        copies = routed_copies(c.workload, place.ep[-1:] / members_inside(place.ep), c.layout.ep)
        gathered = ring_bytes(routed * moe.top_k * int(np.asarray(c.layout.etp)), place.etp)
        exchanged = all_to_all_bytes(routed + _routing_bytes(c), place.ep, copies)
        changes = _rail_changes(exchanged, place.ep, dispatch_links(c))
        of_routing = ring_bytes(gathered_bytes(c, work), gathering_members(place))
        sent["ep"] = (exchanged + changes) * passes + of_routing
        sent["etp"] = gathered * passes
    return sent


def _context_bytes_of_level(c: Context, work: RankWork) -> FloatArray:
    """Rings over the whole context group or every A-th rank of it, and swaps over the group or neighbours."""
    if is_dealt(c.workload):
        samples = samples_of_micro_batch(c)
        rings = (
            float(np.asarray(each.number))
            * ring_bytes(context_volumes(each.context, work).whole, each.context.placement.cp)
            for each in samples
        )
        return np.asarray(sum(rings))
    volumes, members = context_volumes(c, work), c.placement.cp
    neighbours, ring = inside_and_between(members, np.asarray(volumes.neighbours))

    if one_ring(c.workload):
        return ring_bytes(volumes.whole, members)
    sent = _swapped_bytes(c, volumes.whole, members)
    if c.workload.cp_comm == HIERARCHICAL:
        sent = sent + _swapped_bytes(c, volumes.swapped, neighbours)
        sent = sent + ring_bytes(volumes.ring, ring)
    return sent


def _swapped_bytes(c: Context, volume: float, members: NDArray[np.int64]) -> FloatArray:
    """Bytes over each level of an all-to-all that may have to change rails."""
    exchanged = all_to_all_bytes(volume, members)
    return exchanged + _rail_changes(exchanged, members, c.links)


def _data_parallel_bytes(c: Context, stages: Stages) -> FloatArray:
    """Of the rank with the most parameters; over groups of shards each reduces its own once more."""
    kinds = zip(
        (float(np.max(x)) for x in rank_parameters(c.workload.model, c.layout, stages)),
        (c.placement.dp_cp, c.placement.edp),
        gradient_element_bytes(c),
        reduced_shard_bytes(c),
        (int(np.asarray(size)) for size in optimizer_shards(c.layout)),
        strict=True,
    )
    summed, is_grouped = gradients_all_reduced(c), int(np.asarray(c.layout.shard_groups)) > 1
    sent = np.zeros(c.placement.dp_cp.shape)
    for parameters, members, element, reduced, size in kinds:
        within = np.minimum(members, size) if is_grouped else members
        sent = sent + _ring_or_tree_bytes(parameters * element, within, summed, c.links)
        if is_grouped:
            over = np.maximum(members // size, 1)
            sent = sent + _ring_or_tree_bytes(parameters * reduced / size, over, 1.0, c.links)
    return sent


def _pipeline_bytes(c: Context, payload: float, micro_batches: int) -> FloatArray:
    """Every boundary between chunks carries an activation forward and a gradient backward; passes that score
    carry one forward each.

    Of the hops along a group, size / inside - size / members cross a level; with vpp > 1 the last rank also
    feeds the first, across the outermost level that the group spans.
    """
    members, inside = c.placement.pp, members_inside(c.placement.pp)
    size, vpp = int(members[-1]), int(np.asarray(c.layout.vpp))
    if size == 1:
        return np.zeros(members.shape)
    crossed = members > inside
    hops = np.where(crossed, size / inside - size / members, 0.0)
    outermost = np.arange(len(members)) == np.flatnonzero(crossed)[-1]
    crossing = vpp * hops + (vpp - 1) * outermost
    times = 2.0 + c.workload.scoring_passes
    sent: FloatArray = times * payload * micro_batches * crossing / size
    return sent


# Phases of a step, how busy a cut of the fabric is in one, and what kind of traffic an axis makes.


_BESIDE = ("dp_comm", "optimizer", "step_overhead")
"""Parts of a step in which no micro-batch runs."""


@dataclass(frozen=True, kw_only=True)
class CutUse:
    """One cut of one level in one phase."""

    level: str
    cut: str
    """uplink or bisection."""
    phase: str
    """micro-batches or gradients."""
    block: str
    """Whose up-link, or which block's halves: the busiest of the level."""
    bytes_per_gpu: float
    """That cross in a step, one direction: per GPU below the up-link, or per GPU of one half."""
    gb_per_s: float
    """Nominal capacity of the cut, one direction, as far as it is the job's."""
    busy_s: float
    """Seconds of a step in which the cut carries the job's bytes at its capacity."""
    phase_s: float
    """Seconds of the phase."""
    others_share: float = 0.0
    """Share of the cut's links that other jobs use, 0 to 1, where the cluster's levels state it."""

    @property
    def total_use(self) -> float:
        """Share of the whole links that this job and others use in the phase."""
        return self.others_share + (1.0 - self.others_share) * self.utilisation

    @property
    def utilisation(self) -> float:
        """Share of the phase in which the cut is busy; above 1 the phase cannot be kept."""
        if self.phase_s > 0:
            return self.busy_s / self.phase_s
        return float("inf") if self.busy_s else 0.0


def phase_seconds(c: Context, breakdown_s: dict[str, float]) -> dict[str, float]:
    """Seconds of the two phases of a step: micro-batches, and gradients.

    They overlap: gradients are reduced beside as many micro-batches as hide them (`hiding_windows` has the
    source), with ZeRO-3 beside all.

    Parameters
    ----------
    c : Context
        Workload and one layout.
    breakdown_s : dict of str to float
        Parts of the step, seconds, at least 0 (`estimate.Estimate`).

    Returns
    -------
    dict of str to float
        Seconds of `micro-batches` and of `gradients`.
    """
    layout = c.layout
    alone = sum(breakdown_s.get(name, 0.0) for name in _BESIDE)
    working = sum(breakdown_s.values()) - alone - breakdown_s.get("scale", 0.0)
    m, pp, vpp = (int(np.asarray(x)) for x in (layout.num_micro_batches, layout.pp, layout.vpp))
    beside = working
    if int(np.asarray(layout.zero_stage)) != 3:
        beside = float(hiding_windows(c)) * working / (m + (pp - 1) / vpp)
    return {"micro-batches": working, "gradients": breakdown_s.get("dp_comm", 0.0) + beside}


@dataclass(frozen=True, kw_only=True)
class AxisPattern:
    """What kind of traffic an axis makes, for people who plan or watch a network."""

    pattern: str
    fan_out: int
    """Peers that a rank sends to."""
    predictability: str
    incast: str
    """Risk that several senders meet at one receiver."""
    ecmp: str
    """How well hashing flows over equal paths (ECMP) spreads them."""
    suits_network: str
    """What a network engineer's guide says of its load on ECMP and priority flow control (PFC) together."""


_RING_ECMP = "few large flows collide: adaptive routing, or several queue pairs a connection"
_KINDS = {
    "tp": ("ring or in-switch", "every layer, fixed size", "none: one sender a receiver", _RING_ECMP),
    "cp": ("ring", "every layer, fixed size", "none: one sender a receiver", _RING_ECMP),
    "dp": ("ring", "one burst a step, fixed size", "none: one sender a receiver", _RING_ECMP),
    "edp": ("ring", "one burst a step, fixed size", "none: one sender a receiver", _RING_ECMP),
    "pp": ("chain", "every micro-batch, fixed size", "none: one sender a receiver", "few flows may collide"),
    "ep": (
        "all-to-all", "by the router, not known ahead", "hot experts: many senders meet",
        "many flows of unequal size spread well",
    ),
    "etp": ("ring", "every layer, by the router", "none: one sender a receiver", _RING_ECMP),
    "cp-swaps": (
        "all-to-all", "every layer, fixed size", "low: as much from every sender",
        "many flows of equal size spread well",
    ),
    "cp-rings": (
        "rings of groups that swap", "every layer, fixed size", "none: one sender a receiver", _RING_ECMP,
    ),
    "ep-gathers": ("ring", "every layer, fixed size", "none: one sender a receiver", _RING_ECMP),
}  # fmt: skip


_INSIDE = "no hashing inside the scale-up domain"
_GOOD = "good: steady flows of known size, few pauses"
_SUITS = {
    "ep": "poor: hot destinations overload single paths, and their pauses (PFC) spread to other flows",
    "etp": "poor: sizes follow the router",
}
"""By axis; any other is `_GOOD`."""


def axis_pattern(
    axis: str,
    layout: Layout,
    *,
    sent_as: str | None = None,
    inside_scale_up: bool = False,
    burst: bool = True,
) -> AxisPattern:
    """Pattern, fan-out, predictability, incast risk and ECMP suitability of an axis' traffic.

    A ring has one peer, a stage in the middle of a pipeline sends on to one, a member of an all-to-all to all
    others.

    Parameters
    ----------
    axis : str
        tp, cp, dp, edp, pp, ep or etp.
    layout : Layout
        One layout.
    sent_as : str, optional
        Where it is not the axis' usual traffic: cp-swaps (all-to-all), cp-rings (both) or ep-gathers.
    inside_scale_up : bool
        Whether the groups do not leave their NVLink domain, where nothing is hashed.
    burst : bool
        Whether gradients are exchanged once a step; not so with ZeRO-3.

    Returns
    -------
    AxisPattern
        In words; the fan-out is at least 0.

    Raises
    ------
    KeyError
        For an axis or a way of sending that is none of these.
    """
    pattern, when, incast, ecmp = _KINDS[sent_as or axis]
    if axis in ("dp", "edp") and not burst:
        when = "every layer and micro-batch, fixed size"
    if inside_scale_up:
        ecmp = _INSIDE
    size = int(np.asarray(getattr(layout, axis)))
    return AxisPattern(
        pattern=pattern,
        fan_out=size - 1 if pattern == "all-to-all" else 1,
        predictability=when,
        incast=incast,
        ecmp=ecmp,
        suits_network=_INSIDE if inside_scale_up else _SUITS.get(sent_as or axis, _GOOD),
    )
