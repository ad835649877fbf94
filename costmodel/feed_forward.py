"""Seconds of feed-forward blocks, dense and of experts, and of the linear layers that blocks are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.costmodel.adapters import (
    SUMMED_BYTES,
    Outputs,
    adapter_passes_s,
    adapts_experts,
    frozen,
    frozen_passes_s,
    stream_casts_s,
    widening_s,
)
from meshwright.costmodel.collectives import Links, all_to_all_s, members_inside, ring_pass_s
from meshwright.costmodel.kernels import gemm_s, streamed_s, weight_gradient_s
from meshwright.costmodel.layer_context import (
    CastProduct,
    Context,
    LayerTime,
    Parts,
    Passes,
    add,
    block_time,
    cast_passes,
    quantise_bytes,
    scaled,
    streamed_passes_s,
    tensor_parallel_s,
    total,
    unhidden_s,
)
from meshwright.costmodel.layout import Floats, Recompute, recomputes_experts
from meshwright.costmodel.schedules import unpaired_share
from meshwright.costmodel.workload import (
    GATHERS,
    Workload,
    activates_in_products,
    deduplicates,
    gathered_ranks,
    gathering_members,
    pass_bytes,
    sends_routing,
    sent_routing_bytes,
)
from meshwright.model_specs.adapters import LATENT_DOWN, LATENT_UP, expert_adapters


def linear(c: Context, tokens: Floats, n: Floats, k: Floats, outputs: Outputs) -> Passes:
    """The GEMMs of y[tokens, n] = x[tokens, k] W: one forward; input and weight gradient backward.

    A frozen W has no weight gradient, but perhaps adapters beside it (`adapters.frozen_passes_s`
    and `adapters.adapter_passes_s`).

    Parameters
    ----------
    c : Context
        Its rates are used.
    tokens : float or array
        Rows, at least 0.
    n, k : float or array
        Width of the output and of the input on one rank, above 0.
    outputs : mapping of str to float or array
        What n is the sum of, by the name of each matrix.

    Returns
    -------
    Passes
        Seconds, above 0; `kernels.gemm_s` and `kernels.weight_gradient_s` have the formula and its source.
    """
    if frozen(c.workload):
        beside = adapter_passes_s(c, tokens, k, outputs)
        base = frozen_passes_s(c, tokens, n, k, len(outputs))
        casts_s = stream_casts_s(c, tokens, n, k, outputs)
        forward = base.forward + beside.forward + casts_s
        return Passes(forward, base.backward + beside.backward + casts_s)
    forward = gemm_s(tokens, n, k, c.rates)
    backward = gemm_s(tokens, k, n, c.rates)
    by_weight = weight_gradient_s(k, n, tokens, c.rates, sixteen_bit=c.wide_weight_gradients)
    passes = Passes(forward, backward + by_weight)
    if not c.weight_cast_bytes:
        return passes
    # The weight is cast for the forward product and for the gradient of its input: half for each.
    casts_s = streamed_s(0.5 * c.weight_cast_bytes * n * k, c.rates)
    return Passes(passes.forward + casts_s, passes.backward + casts_s)


def dense_mlp(c: Context, width: float, *, norm: bool = True) -> LayerTime:
    """A dense feed-forward with its norm and residual; also the shared experts of a layer, then without.

    Two products (three matrices where it is gated), the activation function between them, and tensor-parallel
    traffic (Shoeybi et al. 2019, arXiv 1909.08053, section 3); docs/cost_model.md, "One layer".

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates.
    width : float
        Of the feed-forward over all tensor ranks, more than 0.
    norm : bool
        Whether norm and residual are its own.

    Returns
    -------
    LayerTime
        Seconds by part of one layer and micro-batch.
    """
    model, tokens = c.workload.model, c.tokens
    matrices = 2 if model.gated else 1
    local = width / c.layout.tp
    up_names = ("gate_proj", "up_proj")[-matrices:]
    up = linear(c, tokens, matrices * local, model.hidden, dict.fromkeys(up_names, local))
    down = linear(c, tokens, model.hidden, local, {"down_proj": model.hidden})
    moved = c.element_bytes
    elements = c.hidden_elements * norm
    activation_f = tokens * local * moved.activation[0]
    activation_b = tokens * local * moved.activation[1]
    shared = Passes(model.hidden + local, matrices * local + model.hidden)
    products = (
        CastProduct(matrices * local, model.hidden, matrices),
        CastProduct(model.hidden, local, 1),
    )
    cast, cast_again = cast_passes(c, tokens, shared, products)
    streamed = Passes(
        moved.around[0] * elements + activation_f + cast.forward,
        moved.around[1] * elements + activation_b + cast.backward,
    )
    gemm = Passes(up.forward + down.forward, up.backward + down.backward)
    further_sums = (matrices - 1) * c.constants.framework.reduces_gate_apart
    block = block_time(
        gemm=gemm,
        memory_bound=streamed_passes_s(c, streamed),
        tp_comm=tensor_parallel_s(c, gemm, 0.5 * up.backward, further_sums),
    )
    norm_bytes = moved.norm[0] * elements
    by_operators = norm_bytes + activation_f + cast_again
    return replace(block, recompute=_recomputed(c, block.forward, up.forward, by_operators))


def _recomputed(c: Context, forward: Parts, up_s: Floats, streamed_bytes: Floats) -> Parts:
    """What selective recomputation runs again of a dense feed-forward.

    Operator-level recomputation runs every second matrix product again: of a gated block the second input;
    else the last, which checkpointing that stops early leaves out.
    """
    mask = np.asarray(c.layout.recompute)
    by_operators = mask & int(Recompute.OPERATORS)
    streamed = np.where(by_operators, streamed_bytes, 0.0)
    gemm = 0.0 * up_s
    if c.workload.model.gated:
        gemm = np.where(by_operators, 0.5 * up_s, 0.0)
    all_of_it = np.where((mask & int(Recompute.MLP)) != 0, 1.0, 0.0)
    parts: Parts = {"memory_bound": streamed_s(streamed, c.rates), "gemm": gemm}
    return add(scaled(forward, all_of_it), parts)


# Seconds of the expert feed-forward: router, permutation, all-to-all, grouped GEMMs, shared experts.


_PERMUTE_BYTES = 8.0
"""Bytes for each copy of a token and element, in and out of the experts' order: a read and a write each
way."""
_PERMUTED_IN_TRANSFERS_BYTES = 4.0
"""The same where transfers of HybridEP write the copies in the experts' order and read them out of it: of the
kernels that did it apart (DeepEP, csrc/hybrid_ep/extension/permute.cu) the reads of what came in and the
writes of what goes out fall away (Megatron-LM, moe_permute_fusion_into_hybridep; megatron/core/transformer/
moe/fused_a2a.py, fuse_permute_dispatch and fuse_unpermute_combine)."""
_SORTED_TWICE_BYTES = 12.0
"""Bytes for each copy and element with NCCL's all-to-all, which sorts by rank, then by expert: before,
between and after its transfers (Megatron-LM, megatron/core/transformer/moe/token_dispatcher.py)."""
_LOOPED_COPY_BYTES = Passes(14.0, 22.0)
"""The same of a loop over experts, operator by operator: forward a gather (4), the product with a weight (4)
and a sum into the output (6); backward a gather of gradients (4), their product with the weight (4), that
with the output and its sum for the gradient of the weight (8), and a sum into the gradient of all tokens (6)
(transformers 4.45, models/mixtral/modeling_mixtral.py, MixtralSparseMoeBlock.forward)."""
_ZEROED_BYTES, _ADDED_BYTES = 2.0, 6.0
"""An element of the output of that loop, and of the gradient of all tokens that each expert's gather has for
itself; and of adding one more of these gradients to the others."""
_BIAS_BYTES, _FROZEN_BIAS_BYTES = Passes(28.0, 40.0), Passes(28.0, 28.0)
"""Of each element behind experts where Megatron adds their biases, times probabilities of 32 bits: forward a
product (writes 4), a sum (6 and 4), slices joined (4 and 4), a cast (4 and 2); backward two casts (2 and 4; 4
and 2), gradients of slices joined (2 and 2), for the probability a product and its sum (4 and 4, 4), and as
much for a trained bias (megatron/core/transformer/moe/experts.py, TEGroupedMLP._apply_bias)."""
_WEIGHTED_BYTES = Passes(12.0, 34.0)
"""Of each element behind the activation function of experts where that runs step by step: forward its product
with a probability of 32 bits (2 and 4) and a cast (4 and 2); backward that cast's (2 and 4), the product's (4
and 4) and its cast (4 and 2), for the probability a product (6 and 4) and its sum (4;
megatron/core/transformer/moe/experts.py, TEGroupedMLP.bias_act_func)."""
_ROUTER_BYTES = 40.0
"""Scores, their sum or softmax, top k and its gradient, bytes a token and expert."""
_WRITTEN_BYTES = 2.0
"""An element that a product returns at 16 bits."""


@dataclass(frozen=True)
class _Local:
    """What one rank computes of an expert layer."""

    tokens: Floats
    """That the rank sends: its share of the micro-batch."""
    mean_copies: Floats
    """Copies of tokens that arrive at a rank's experts, the mean over ranks."""
    copies: Floats
    """Copies of tokens that arrive at the experts of the busiest rank."""
    experts: Floats
    """Experts on the rank."""
    width: Floats
    """Of an expert's feed-forward on the rank."""
    matrices: int
    """Input matrices of an expert: 2 where it is gated."""


def moe_mlp(c: Context) -> LayerTime:
    """Router, permutation, all-to-all, grouped GEMMs of the local experts, and the shared experts.

    DeepSeek-V3, arXiv 2412.19437, section 3.2; megatron/core/transformer/moe/token_dispatcher.py. Experts on
    a projection of the hidden width have two products around all of it but router and shared experts.

    Parameters
    ----------
    c : Context
        Workload of a model with experts, layouts, placements and rates.

    Returns
    -------
    LayerTime
        Seconds by part of one layer and micro-batch on the busiest expert rank.
    """
    moe = c.workload.model.moe
    assert moe is not None
    block = _routed(c) if c.experts is None else c.experts.block(c, _routed)
    if moe.latent_size is not None:
        block = _beside(block, _latent_projections(c, moe.latent_size))
    if moe.shared_width:
        block = _beside(block, dense_mlp(c, moe.shared_width, norm=False))
    is_recomputed = recomputes_experts(c.layout)
    if not is_recomputed.any():
        return block
    norm_s = streamed_s(c.element_bytes.norm[0] * c.hidden_elements, c.rates)
    behind_norm = {**block.forward, "memory_bound": block.forward["memory_bound"] - norm_s}
    run_again = scaled(behind_norm, np.where(is_recomputed, 1.0, 0.0))
    return replace(block, recompute=add(block.recompute, run_again))


def _beside(routed: LayerTime, other: LayerTime) -> LayerTime:
    """Routed experts, and what runs beside them whatever is recomputed alone."""
    return replace(
        routed,
        forward=add(routed.forward, other.forward),
        backward=add(routed.backward, other.backward),
    )


def _latent_projections(c: Context, latent: int) -> LayerTime:
    """The projections around the routed experts of a layer: h by l ahead of the dispatch, l by h behind it.

    Every tensor rank has them whole and projects its own share of the tokens, so that tokens are dispatched
    and combined l wide (megatron/core/transformer/moe/moe_layer.py, MoELayer.preprocess and postprocess).
    """
    tokens, hidden = c.tokens / c.layout.tp, c.workload.model.hidden
    down = linear(c, tokens, latent, hidden, {LATENT_DOWN: latent})
    up = linear(c, tokens, hidden, latent, {LATENT_UP: hidden})
    # Operands of a pass: what either product reads forward, the gradients of what both return backward.
    cast = quantise_bytes(c, tokens, hidden + latent)
    return block_time(
        gemm=Passes(down.forward + up.forward, down.backward + up.backward),
        memory_bound=streamed_passes_s(c, Passes(cast, cast)),
    )


def _routed(c: Context) -> LayerTime:
    """`moe_mlp` without the shared experts.

    It reads no setting that `layer_context.as_experts_run` makes plain.
    """
    model, layout = c.workload.model, c.layout
    moe = model.moe
    assert moe is not None
    ep, etp = np.asarray(layout.ep), np.asarray(layout.etp)
    tokens = c.tokens / layout.tp
    mean_copies = tokens * moe.top_k * etp
    local = _Local(
        tokens=tokens,
        mean_copies=mean_copies,
        copies=mean_copies * c.workload.imbalance(ep),
        experts=moe.experts / ep,
        width=moe.moe_ffn_hidden / etp,
        matrices=2 if model.gated else 1,
    )
    router = gemm_s(tokens, moe.experts, model.hidden, c.rates, sixteen_bit=True)
    stack = c.constants.framework
    clamps = moe.expert_bias and not stack.adds_biases_by_expert
    unfused = c.constants.shared["expert_bias_bytes_factor"] if clamps else 1.0
    activated = 0.0 if activates_in_products(c.workload) else local.copies * local.width
    weighted = _WEIGHTED_BYTES if c.workload.activates_stepwise else Passes(0.0, 0.0)
    activation_f, activation_b = (
        activated * (of_element * unfused + more)
        for of_element, more in zip(c.element_bytes.activation, weighted, strict=True)
    )
    moved = _moved_bytes(c, local, activation_f, activation_b)
    return block_time(
        {"memory_bound": streamed_s(_recomputed_bytes(c, activation_f), c.rates)},
        gemm=Passes(router, router if frozen(c.workload) else 2.0 * router),
        expert_gemm=_expert_gemms_s(c, local),
        memory_bound=streamed_passes_s(c, moved),
        ep_comm=_exchange_s(c, tokens),
    )


def _recomputed_bytes(c: Context, activation_bytes: Floats) -> Floats:
    """Bytes of the memory-bound operators that selective recomputation runs again."""
    mask = np.asarray(c.layout.recompute)
    of_norm = mask & int(Recompute.LAYERNORM | Recompute.OPERATORS)
    norm_bytes = c.element_bytes.norm[0] * c.hidden_elements
    again = np.where(mask & int(Recompute.MOE_ACTIVATION), activation_bytes, 0.0)
    return again + np.where(of_norm, norm_bytes, 0.0)


def _expert_gemms_s(c: Context, local: _Local) -> Passes:
    """Grouped GEMMs of the experts on a rank, forward and backward.

    Products that apply the activation function write its 8-bit results, along rows and along columns, beside
    what they return forward; backward they read that again, and write its gradients at 8 bits alone
    (`activates_in_products`).
    """
    hidden, groups = c.workload.model.routed_width, local.experts
    imbalance = c.workload.imbalance(c.layout.ep)
    mean_rows, inputs = local.mean_copies / groups, local.matrices * local.width
    rows = mean_rows * imbalance

    grouped_s = partial(gemm_s, mean_rows, rates=c.rates, groups=groups, imbalance=imbalance)
    written, returned = _WRITTEN_BYTES, _WRITTEN_BYTES
    if activates_in_products(c.workload):
        both_ways = 2.0 * c.rates.operand_bytes
        written += both_ways / local.matrices
        returned = (_WRITTEN_BYTES + both_ways) * local.matrices
    up = grouped_s(inputs, hidden, output_bytes=written)
    down = grouped_s(hidden, local.width)
    if frozen(c.workload):
        beside = _expert_adapters_s(c, local, mean_rows, imbalance)
        widened_s = widening_s(c, groups * hidden * (inputs + local.width))
        backward = grouped_s(hidden, inputs) + grouped_s(local.width, hidden)
        return Passes(
            up + down + widened_s + beside.forward, backward + widened_s + beside.backward
        )
    by_weight_s = partial(
        weight_gradient_s, rates=c.rates, sixteen_bit=c.wide_weight_gradients, groups=groups
    )
    backward = (
        grouped_s(hidden, inputs)
        + by_weight_s(hidden, inputs, rows)
        + grouped_s(local.width, hidden, output_bytes=returned)
        + by_weight_s(local.width, hidden, rows)
    )
    return Passes(up + down, backward)


def _expert_adapters_s(
    c: Context, local: _Local, mean_rows: Floats, imbalance: NDArray[np.float64]
) -> Passes:
    """Grouped products of the adapters of experts, and the sums of their outputs."""
    adapters = c.workload.adapters
    none = 0.0 * np.asarray(mean_rows, dtype=np.float64)
    forward: Floats = none
    backward: Floats = none
    if adapters is None or not adapts_experts(c.workload):
        return Passes(forward, backward)
    groups = local.experts
    grouped_s = partial(
        gemm_s, mean_rows, rates=c.rates, groups=groups, imbalance=imbalance, sixteen_bit=True
    )
    rows = mean_rows * imbalance
    model = c.workload.model
    split = np.asarray(local.width) / (model.moe.moe_ffn_hidden if model.moe else 1)
    # Expert-tensor parallelism splits the width of the feed-forward alone: outputs ahead of the activation
    # function, inputs behind it.
    splits: tuple[tuple[Floats, Floats], ...] = ((1.0, split), (split, 1.0))
    of_each = zip(expert_adapters(model, adapters), splits, strict=True)
    for (rank, whole_inputs, whole_outputs), (of_inputs, of_outputs) in of_each:
        inputs, outputs = whole_inputs * of_inputs, whole_outputs * of_outputs
        forward = forward + grouped_s(rank, inputs) + grouped_s(outputs, rank)
        forward = forward + streamed_s(SUMMED_BYTES * local.copies * outputs, c.rates)
        backward = backward + grouped_s(rank, outputs) + grouped_s(inputs, rank)
        for m, n in ((rank, outputs), (inputs, rank)):
            backward = backward + weight_gradient_s(
                m, n, rows, c.rates, groups=groups, sixteen_bit=True
            )
        backward = backward + streamed_s(SUMMED_BYTES * local.copies * inputs, c.rates)
    return Passes(forward, backward)


def _moved_bytes(c: Context, local: _Local, activation_f: Floats, activation_b: Floats) -> Passes:
    """Bytes of the memory-bound operators, forward and backward: norm, router, permutation, casts."""
    model = c.workload.model
    assert model.moe is not None
    permuted = _permuted_bytes(c, local)
    summed = _summed_bytes(c, local)
    biased = _bias_bytes(c, local)
    around_f, around_b = (of_element * c.hidden_elements for of_element in c.element_bytes.around)
    router = _ROUTER_BYTES * local.tokens * model.moe.experts
    apart = 0.0 if activates_in_products(c.workload) else local.width
    cast_f = quantise_bytes(c, local.copies, model.routed_width + apart)
    cast_b = quantise_bytes(c, local.copies, local.matrices * apart + model.routed_width)
    return Passes(
        around_f + router + permuted.forward + summed + biased.forward + activation_f + cast_f,
        around_b
        + 1.2 * router
        + permuted.backward
        + summed
        + biased.backward
        + activation_b
        + cast_b,
    )


def _bias_bytes(c: Context, local: _Local) -> Passes:
    """Bytes that biases behind experts move by themselves; fused products of experts have them in."""
    model = c.workload.model
    apart = c.constants.framework.adds_biases_by_expert and not activates_in_products(c.workload)
    elements = local.copies * model.routed_width
    if model.moe is None or not model.moe.expert_bias or not apart:
        return Passes(0.0 * elements, 0.0 * elements)
    of_element = _FROZEN_BIAS_BYTES if frozen(c.workload) else _BIAS_BYTES
    return Passes(of_element.forward * elements, of_element.backward * elements)


def _permuted_bytes(c: Context, local: _Local) -> Passes:
    """Bytes that bring copies of tokens into the order of their experts and back, forward and backward."""
    copies = local.copies * c.workload.model.routed_width
    if c.constants.framework.loops_over_experts:
        tokens = local.tokens * c.workload.model.routed_width
        by_expert = local.experts * _ZEROED_BYTES + (local.experts - 1.0) * _ADDED_BYTES
        return Passes(
            _LOOPED_COPY_BYTES.forward * copies + _ZEROED_BYTES * tokens,
            _LOOPED_COPY_BYTES.backward * copies + by_expert * tokens,
        )
    plain = c.workload.moe_dispatch == "alltoall"
    permute_bytes = _SORTED_TWICE_BYTES if plain else _PERMUTE_BYTES
    if c.workload.permutes_in_dispatch and deduplicates(c.workload):
        permute_bytes = _PERMUTED_IN_TRANSFERS_BYTES
    return Passes(permute_bytes * copies, 1.5 * permute_bytes * copies)


def _summed_bytes(c: Context, local: _Local) -> Floats:
    """Bytes of either pass to sum what is scattered, or of gradients of what was gathered, and to cast it.

    Forward the sums of all gathered tokens are written (2) and widened (2, 4), and a rank's own narrowed
    (4, 2); backward its own gradients are widened, the gathered ones narrowed, and the sums of the gradients
    of all gathered tokens written.
    """
    if c.workload.moe_dispatch != GATHERS:
        return 0.0 * local.tokens
    ranks = gathered_ranks(c.layout)
    per_element = np.where(ranks > 1, 8.0 * ranks + 6.0, 0.0)
    summed: Floats = per_element * local.tokens * c.workload.model.routed_width
    return summed


def _exchange_s(c: Context, tokens: Floats) -> Passes:
    """Dispatch and combine, forward and backward."""
    gathered, members = tokens * gathered_ranks(c.layout), gathering_members(c.placement)
    if c.workload.moe_dispatch != GATHERS:
        once = _expert_all_to_all_s(c, tokens)
        if not sends_routing(c.workload):
            return Passes(once, once)
        _, of_token = sent_routing_bytes(c.workload, c.layout)
        return Passes(once + ring_pass_s(gathered * of_token, members, c.links), once)
    seconds = (
        sum(
            (ring_pass_s(gathered * size, members, c.links) for size in sizes),
            start=np.float64(0.0),
        )
        for sizes in pass_bytes(c.workload)
    )
    return Passes(*seconds)


def _expert_all_to_all_s(c: Context, tokens: Floats) -> Floats:
    """Dispatch and combine of one pass, with etp's gather and scatter."""
    model, members = c.workload.model, c.placement.ep
    moe = model.moe
    assert moe is not None
    copies = routed_copies(c.workload, members[..., -1:] / members_inside(members), c.layout.ep)
    arrives = tokens * c.workload.imbalance(c.layout.ep)
    sent = 2.0 * arrives * model.routed_width
    beside, _ = sent_routing_bytes(c.workload, c.layout)
    once = all_to_all_s(sent + arrives * beside, members, dispatch_links(c), copies)
    gathered = ring_pass_s(sent * moe.top_k * c.layout.etp, c.placement.etp, c.links)
    seconds: Floats = 2.0 * (once + gathered)
    return seconds


def dispatch_links(c: Context) -> Links:
    """The links of the dispatcher.

    One that sends a copy per node (DeepEP) sends it to the GPU of the own index there and on over NVLink, so
    it never changes rails on the network, whatever NCCL does. Its kernel sends as it sorts and reaches its
    rate between nodes too, 43 to 47 of 50 GB/s at 235 MB (DeepEP, README).

    Parameters
    ----------
    c : Context
        Workload and links.

    Returns
    -------
    Links
        Without rails where the dispatcher relays over NVLink, and as fast with few bytes as with many where
        it has kernels of its own.
    """
    if not deduplicates(c.workload):
        return c.links
    cluster = c.workload.cluster
    over_nvlink = cluster.nvlink_domain >= cluster.gpus_per_node > 1
    rates = c.links.dispatched_bytes_per_s
    full = replace(
        c.links,
        all_to_all_bytes_per_s=c.links.all_to_all_bytes_per_s if rates is None else rates,
        exchange_half_bytes=np.zeros_like(c.links.half_bytes),
    )
    return replace(full, rails=None) if over_nvlink else full


def hide_expert_traffic(c: Context, layer: LayerTime) -> LayerTime:
    """The layer with the all-to-all that compute does not hide, the mean over the chunks of a step.

    With EP overlap the all-to-all of one micro-batch runs under another's layer, in either pass
    (Megatron-LM `--overlap-moe-expert-parallel-comm`; DualPipe, DeepSeek-V3, arXiv 2412.19437, 3.2.1), but
    for the chunks that have no pair (`schedules.unpaired_share`).

    Parameters
    ----------
    c : Context
        Workload and constants.
    layer : LayerTime
        With a part `ep_comm` in both passes.

    Returns
    -------
    LayerTime
        The layer with its `ep_comm` less what is hidden; itself without EP overlap.
    """
    if not c.workload.ep_overlap:
        return layer
    paired = 1.0 - unpaired_share(c.layout, c.workload.flushes)
    hidden_share = c.constants.framework.ep_hidden
    sent_f, sent_b = layer.forward["ep_comm"], layer.backward["ep_comm"]
    compute = Passes(total(layer.forward) - sent_f, total(layer.backward) - sent_b)
    hidden_f = sent_f - unhidden_s(hidden_share, sent_f, compute).forward
    hidden_b = sent_b - unhidden_s(hidden_share, sent_b, compute).backward
    return LayerTime(
        {**layer.forward, "ep_comm": sent_f - paired * hidden_f},
        {**layer.backward, "ep_comm": sent_b - paired * hidden_b},
        layer.recompute,
    )


def routed_copies(
    workload: Workload, blocks: NDArray[np.float64], ep: ArrayLike = 0
) -> NDArray[np.float64]:
    """Copies of a token that are sent, one for each block of the expert group that holds its experts.

    M (1 - (1 - 1/M)^k) under even routing, M the blocks that a token can choose from: all N, or with
    node-limited routing those of its g of G groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). An
    all-to-all without deduplication sends k. Where a trace was placed for a degree, what it counts.

    Parameters
    ----------
    workload : Workload
        Of a model with experts; k is its `top_k`.
    blocks : array of float, shape [..., levels]
        N, equal blocks that the expert-parallel group lies in, at least 1.
    ep : int or array of int, shape [...]
        Expert-parallel degrees, to look up measured traces.

    Returns
    -------
    array of float, shape [..., levels]
        1 to k.
    """
    moe = workload.model.moe
    assert moe is not None
    if workload.moe_dispatch == "alltoall":
        return np.full(blocks.shape, float(moe.top_k))
    choices = blocks
    if moe.router_groups and moe.router_groups_per_token:
        chosen = float(moe.router_groups_per_token)
        choices = np.maximum(np.minimum(blocks, chosen), blocks * chosen / moe.router_groups)
    even = choices * (1.0 - (1.0 - 1.0 / choices) ** moe.top_k)
    return workload.copies(ep, blocks, np.asarray(even))
