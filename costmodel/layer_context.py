"""What the operators of a layer need to know, and what they share: seconds by part, exposed collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.costmodel.collectives import (
    Links,
    all_reduce_s,
    all_to_all_s,
    neighbour_ring_s,
    ring_pass_s,
)
from meshwright.costmodel.kernels import (
    GATHERED_SHARE,
    ElementBytes,
    Rates,
    cast_bytes_per_element,
    element_bytes,
    stepwise_cast_bytes,
    streamed_s,
    transposed_slower,
    weight_cast_bytes,
)
from meshwright.costmodel.layout import Floats, Layout, Placement
from meshwright.costmodel.rates import Constants
from meshwright.costmodel.workload import (
    GATHERED,
    HIERARCHICAL,
    Workload,
    activates_in_products,
    inside_and_between,
    rank_tokens,
    sequence_shards,
    swapping_ranks,
)
from meshwright.frameworks.catalog import framework_of_stack


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the operators of a layer need to know; arrays broadcast over layouts and placements."""

    workload: Workload
    layout: Layout
    placement: Placement
    constants: Constants
    rates: Rates
    """What kernels reach on the workload's device."""
    links: Links
    """What collectives reach on each fabric level."""
    forward_only: bool = False
    """Whether layers are priced without their backward pass (`layer_kinds.kind_times`)."""
    experts: KnownExperts | None = None
    """Blocks of experts that are known; None where none are kept."""

    @cached_property
    def tokens(self) -> Floats:
        """Tokens of a micro-batch on one rank."""
        return rank_tokens(self.workload, self.layout)

    @property
    def fp8_recipe(self) -> str | None:
        """How FP8 scales come about; None at other precisions, and for the stack's own way."""
        return self.workload.fp8_recipe if self.workload.precision == "fp8" else None

    @cached_property
    def cast_bytes(self) -> float:
        """Bytes moved per element of a GEMM operand that is cast to the run's precision."""
        return cast_bytes_per_element(
            self.workload.precision,
            self.workload.cluster.device.architecture,
            current_scaling=self.constants.framework.current_scaling,
            transposes_apart=self.constants.framework.transposes_apart,
            recipe=self.fp8_recipe,
            slower=transposed_slower(self.rates),
        )

    @cached_property
    def weight_cast_bytes(self) -> float:
        """Bytes moved per element of a weight that every micro-batch casts again."""
        if self.casts_stepwise:
            return 0.0
        return weight_cast_bytes(self.fp8_recipe, transposed_slower(self.rates))

    @property
    def casts_stepwise(self) -> bool:
        """Whether operands are cast one operator at a time (`kernels.stepwise_cast_bytes`)."""
        return self.workload.precision == "fp8" and self.constants.framework.casts_stepwise

    @property
    def wide_weight_gradients(self) -> bool:
        """Whether products of weight gradients run at 16 bits beside narrower ones."""
        return self.fp8_recipe == "rowwise_with_gw_hp"

    @cached_property
    def element_bytes(self) -> ElementBytes:
        """Bytes that the stack's memory-bound operators move."""
        stack = self.constants.framework
        return element_bytes(
            self.workload,
            fused=stack.fused_elementwise,
            eager=stack.eager_operators,
            fused_norm=stack.fused_norm,
        )

    @property
    def gathered_weight_bytes(self) -> float:
        """Bytes of a parameter in an all-gather; MXFP8 gathers 16 bits: rows and columns are cast apart."""
        narrow = self.constants.framework.narrow_gathers and self.workload.precision == "fp8"
        return 1.0 if narrow else 2.0

    @property
    def gathered_share(self) -> float:
        """Bytes of a gathered activation over those at 16 bits."""
        return GATHERED_SHARE.get(self.workload.precision, 1.0)

    @property
    def tp_overlaps(self) -> bool:
        """Whether GEMMs are cut to run beside their transfers; Megatron-Bridge's never are with NVFP4."""
        cuts = self.constants.framework.overlap_cuts_products
        return cuts and self.workload.tp_overlap and self.workload.precision != "nvfp4"

    @cached_property
    def sequence_shards(self) -> Floats:
        """Ways that norms, residuals and dropout are split: tp with sequence parallelism, else 1."""
        return sequence_shards(self.layout)

    @cached_property
    def activation_bytes(self) -> Floats:
        """Bytes of a micro-batch's activations between layers, T h of 2 bytes, on one rank."""
        return 2.0 * self.tokens * self.workload.model.hidden

    @cached_property
    def hidden_elements(self) -> Floats:
        """Elements of the hidden width on one rank that pass a norm and a residual."""
        return self.tokens * self.workload.model.hidden / self.sequence_shards

    @cached_property
    def tensor_pass_s(self) -> Floats:
        """One gather or scatter of a micro-batch's activations over the tensor group, seconds."""
        return ring_pass_s(self.activation_bytes, self.placement.tp, self.links)

    @cached_property
    def tensor_wait_s(self) -> Floats:
        """Wait at a blocking collective of the tensor group, seconds."""
        wait = self.constants.framework.collective_wait_s
        return np.where(np.asarray(self.layout.tp) > 1, wait, 0.0)

    @cached_property
    def tensor_sum_s(self) -> Floats:
        """After a row-parallel product: an all-reduce; with sequence parallelism a scatter and a gather."""
        reduced = all_reduce_s(self.activation_bytes, self.placement.tp, self.links)
        passes = (1.0 + self.gathered_share) * self.tensor_pass_s
        return self.tensor_wait_s + np.where(self.layout.sequence_parallel, passes, reduced)


def quantise_bytes(c: Context, tokens: Floats, elements: Floats) -> Floats:
    """Bytes that casting GEMM operands to the run's narrower format moves.

    `kernels.cast_bytes_per_element` has the count and its source.

    Parameters
    ----------
    c : Context
        Workload, layouts and rates.
    tokens : float or array
        Rows of the operands, at least 0.
    elements : float or array
        Elements of all operands in a row, at least 0.

    Returns
    -------
    float or array
        Bytes read and written; 0 at 16 bits.
    """
    return c.cast_bytes * tokens * elements


# Seconds of a layer by named part, and arithmetic on them.


Parts = dict[str, Floats]
"""Seconds by part: gemm, expert_gemm, attention, memory_bound, tp_comm, cp_comm, ep_comm, host, recompute."""


@dataclass(frozen=True)
class LayerTime:
    """Forward and backward seconds of one layer by part, and what selective recomputation runs again."""

    forward: Parts
    backward: Parts
    recompute: Parts


class Passes(NamedTuple):
    """A forward and a backward amount, seconds or bytes."""

    forward: Floats
    backward: Floats


class CastProduct(NamedTuple):
    """Matrices that share an input, each of which casts its operands for itself: widths on one rank."""

    outputs: Floats
    """Of all of them."""
    inputs: Floats
    matrices: int


def cast_passes(
    c: Context, tokens: Floats, shared: Passes, products: Sequence[CastProduct]
) -> tuple[Passes, Floats]:
    """Bytes that the casts of a block's products move, and those that recomputed operators move again.

    Parameters
    ----------
    c : Context
        Workload, layouts and rates.
    tokens : float or array
        Rows of the operands, at least 0.
    shared : Passes
        Elements of all operands in a row, each counted once, where one kernel casts them.
    products : sequence of CastProduct
        The products, each of which casts its own operands where casts are one operator at a time.

    Returns
    -------
    tuple of Passes and float or array
        Bytes read and written; 0 at 16 bits. The second is 0 but of casts one operator at a time.
    """
    if not c.casts_stepwise:
        fused = (quantise_bytes(c, tokens, elements) for elements in shared)
        return Passes(*fused), 0.0 * np.asarray(tokens)
    inputs = tokens * sum(each.matrices * each.inputs for each in products)
    weights = sum(each.outputs * each.inputs for each in products)
    gradients = tokens * sum(each.outputs for each in products)
    forward, backward, again = (
        of.inputs * inputs + of.weights * weights + of.gradients * gradients
        for of in stepwise_cast_bytes(c.fp8_recipe)
    )
    return Passes(forward, backward), again


def as_experts_run(workload: Workload) -> Workload:
    """A workload with plain values of the settings that say nothing of routed experts before any overlap.

    Parameters
    ----------
    workload : Workload
        Run in any way.

    Returns
    -------
    Workload
        Equal for all workloads that run routed experts alike.
    """
    return replace(
        workload,
        ep_overlap=False,
        tp_overlap=False,
        dp_overlap=False,
        pp_overlap=False,
        cuda_graph="full" if activates_in_products(workload) else "none",
        cp_comm="p2p",
        cp_inner=None,
        bucket_mb=None,
    )


class KnownExperts:
    """Blocks of routed experts of some layouts, kept for executions that run them alike (`as_experts_run`).

    They are most of what a layer with experts takes to price.
    """

    def __init__(self, layout: Layout, placement: Placement) -> None:
        self.layout, self.placement = layout, placement
        self._blocks: list[tuple[Workload, LayerTime]] = []

    def block(self, c: Context, priced: Callable[[Context], LayerTime]) -> LayerTime:
        """The block of a context, from before where it is of these very layouts and placements.

        Parameters
        ----------
        c : Context
            Its constants, rates and links follow from its workload.
        priced : callable
            Prices the block of a context.

        Returns
        -------
        LayerTime
            Seconds by part of one layer and micro-batch.
        """
        if c.layout is not self.layout or c.placement is not self.placement:
            return priced(c)
        workload = as_experts_run(c.workload)
        for known, block in self._blocks:
            if known == workload:
                return block
        self._blocks.append((workload, priced(c)))
        return self._blocks[-1][1]

    def forget(self) -> None:
        """Drops the blocks, whose arrays are large."""
        self._blocks = []


def streamed_passes_s(c: Context, moved_bytes: Passes) -> Passes:
    """Memory-bound kernels of either pass; `kernels.streamed_s` has the formula.

    Parameters
    ----------
    c : Context
        Its rates are used.
    moved_bytes : Passes
        Bytes read and written, at least 0.

    Returns
    -------
    Passes
        Seconds, at least 0.
    """
    return Passes(*(streamed_s(moved, c.rates) for moved in moved_bytes))


def block_time(recompute: Parts | None = None, **passes: Passes) -> LayerTime:
    """The time of a block from the forward and backward seconds of each of its parts.

    Parameters
    ----------
    recompute : dict of str to float or array, optional
        What selective recomputation runs again, seconds by part; nothing by default.
    **passes : Passes
        Seconds by part, at least 0.

    Returns
    -------
    LayerTime
        With the parts in this order.
    """
    forward: Parts = {name: seconds.forward for name, seconds in passes.items()}
    backward: Parts = {name: seconds.backward for name, seconds in passes.items()}
    return LayerTime(forward, backward, recompute or {})


def add(*summands: Parts) -> Parts:
    """Sums of each part.

    Parameters
    ----------
    *summands : dict of str to float or array
        Seconds by part; a missing part counts as 0.

    Returns
    -------
    dict of str to float or array
        Seconds of every part that some summand has.
    """
    result: Parts = {}
    for parts in summands:
        for name, seconds in parts.items():
            result[name] = result[name] + seconds if name in result else seconds
    return result


def scaled(parts: Parts, factor: Floats) -> Parts:
    """Every part times a factor.

    Parameters
    ----------
    parts : dict of str to float or array
        Seconds by part, at least 0.
    factor : float or array
        A number without unit, at least 0.

    Returns
    -------
    dict of str to float or array
        Seconds of the same parts.
    """
    return {name: seconds * factor for name, seconds in parts.items()}


def total(parts: Parts) -> Floats:
    """Sum over the parts.

    Parameters
    ----------
    parts : dict of str to float or array
        Seconds by part, at least 0, of shapes that broadcast.

    Returns
    -------
    float or array
        Seconds; 0 without parts.
    """
    seconds: Floats = sum(parts.values(), start=np.float64(0.0))
    return seconds


def joined(*blocks: LayerTime) -> LayerTime:
    """The time of blocks that run one after the other.

    Parameters
    ----------
    *blocks : LayerTime
        Attention and feed-forward of a layer.

    Returns
    -------
    LayerTime
        Part-wise sums.
    """
    return LayerTime(
        add(*(b.forward for b in blocks)),
        add(*(b.backward for b in blocks)),
        add(*(b.recompute for b in blocks)),
    )


def portion(block: LayerTime, share: float) -> LayerTime:
    """What the mean over all layers has of a block that some of them have.

    Parameters
    ----------
    block : LayerTime
        The block.
    share : float
        Layers with the block over all layers, 0 to 1.

    Returns
    -------
    LayerTime
        The block itself where every layer has it, else its parts times the share.
    """
    if share == 1.0:
        return block
    return LayerTime(
        scaled(block.forward, share), scaled(block.backward, share), scaled(block.recompute, share)
    )


# Exposed seconds of a layer's own collectives: tensor and context parallelism, and what compute hides.


def tensor_parallel_s(
    c: Context, gemm_s: Passes, column_gemm_s: Floats, further_sums: int = 0
) -> Passes:
    """One all-reduce forward and one backward (or gathers and scatters) of T h, less what compute hides.

    With user buffers that is any GEMM of the pass. Without, Megatron runs the collectives of a
    column-parallel product beside one GEMM of its backward pass each: the all-reduce (or scatter) of the
    input's gradient under the weight gradient, and the gather of the saved input that sequence parallelism
    repeats under the input gradient (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2;
    megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication). Launches that
    block leave nothing to run beside. Where products that read one input are modules of their own, some
    stacks reduce its gradient behind each of them (transformers 5.23, distributed/tensor_parallel.py,
    ColwiseParallel; Paddle 2.5, fleet/layers/mpu/mp_ops.py, c_identity_eager), unless sequence parallelism
    gathers it once, behind the norm (Aleph-Alpha/scaling, core/nn/norm/rms_norm.py).

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates.
    gemm_s : Passes
        Seconds of the block's GEMMs, at least 0.
    column_gemm_s : float or array
        Seconds of one GEMM of the column-parallel product's backward pass, at least 0.
    further_sums : int, optional
        Column-parallel modules that read the block's input and reduce its gradient beside the first, at least
        0.

    Returns
    -------
    Passes
        Exposed seconds of one block and micro-batch.
    """
    stack = c.constants.framework
    beside = stack.async_tensor_backward and not c.workload.launch_blocking
    # A frozen weight's product has no weight gradient to run beside: Megatron's own function for it waits
    # (megatron/core/tensor_parallel/layers.py, LinearWithFrozenWeight).
    beside = beside and c.workload.adapters is None
    if c.tp_overlaps or not beside:
        hidden_share = stack.tp_hidden if c.tp_overlaps else 0.0
        sums = unhidden_s(hidden_share, c.tensor_sum_s, gemm_s)
        apart = further_sums * np.where(c.layout.sequence_parallel, 0.0, c.tensor_sum_s)
        return Passes(sums.forward, sums.backward + apart)

    def _exposed(seconds: Floats) -> Floats:
        """What runs longer than one GEMM, and what the two slow each other down."""
        slow_down = stack.tp_interference * np.minimum(seconds, column_gemm_s)
        return np.maximum(seconds - column_gemm_s, 0.0) + slow_down

    gathered = c.gathered_share * c.tensor_pass_s
    scattered = c.tensor_wait_s + gathered + _exposed(gathered) + _exposed(c.tensor_pass_s)
    reduced = _exposed(c.tensor_sum_s)
    return Passes(c.tensor_sum_s, np.where(c.layout.sequence_parallel, scattered, reduced))


def unhidden_s(hidden_share: float, seconds: Floats, beside_s: Passes) -> Passes:
    """Exposed seconds of a transfer that runs beside compute: at least the share that can never hide.

    max((1 - share) t, t - compute). `costmodel/data/frameworks.yaml` has the shares (`tp_hidden`,
    `ep_hidden`) with their sources.

    Parameters
    ----------
    hidden_share : float
        Share of the transfer that can hide, 0 to 1; 0 without overlap.
    seconds : float or array
        Of the transfer, in either pass, at least 0.
    beside_s : Passes
        Seconds of the compute beside it, at least 0.

    Returns
    -------
    Passes
        Exposed seconds.
    """
    if hidden_share == 0.0:
        return Passes(seconds, seconds)
    always = seconds * (1.0 - hidden_share)
    return Passes(*(np.maximum(always, seconds - compute_s) for compute_s in beside_s))


def context_parallel_s(
    c: Context, widths: tuple[Floats, Floats, Floats], attention_s: Passes
) -> Passes:
    """Exposed seconds of the transfers of context parallelism.

    Ring attention passes keys and values round the group under the attention of the block before (Liu et al.
    2023, arXiv 2310.01889, section 3), backward with their gradients; all-to-all swaps heads for tokens and
    is exposed (DeepSpeed Ulysses, arXiv 2309.14509), as is a gather of all keys and values before attention
    (Transformer Engine 2.15, AttnFuncWithCPAndKVAllGather). With swaps inside rings, a rank holds A times the
    tokens of 1/A of the heads after the swap, so that the ring of C / A ranks passes as many bytes a step as
    one of C. PyTorch sends gradients at 32 bits, one step more than there are others, so that they end where
    they belong (torch 2.6, tensor/experimental/_attention.py, _templated_ring_attention_backward).

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates.
    widths : tuple of three floats or arrays
        Elements a token of queries, of keys with values, and of the output, on one rank.
    attention_s : Passes
        Seconds of attention itself, at least 0.

    Returns
    -------
    Passes
        Seconds of one layer and micro-batch; 0 where cp is 1.
    """
    query, key_value, output = widths
    token_bytes = 2.0 * c.tokens
    swapped_bytes = token_bytes * (query + key_value + output)
    if c.workload.cp_comm == "a2a":
        once = all_to_all_s(swapped_bytes, c.placement.cp, c.links)
        return Passes(once, once)
    cp, members = np.asarray(c.layout.cp), c.placement.cp
    if c.workload.cp_comm == GATHERED:
        gathered = ring_pass_s(token_bytes * key_value * cp, members, c.links)
        return Passes(gathered, 2.0 * gathered)
    once = np.float64(0.0)
    if c.workload.cp_comm == HIERARCHICAL:
        size = swapping_ranks(c.workload, c.layout)
        swapping, members = inside_and_between(members, size)
        once = all_to_all_s(swapped_bytes, swapping, c.links)
        cp = cp // size
    stack = c.constants.framework
    if stack.ring_repeats_keys:
        key_value = query + output
    ring_bytes = token_bytes * key_value * cp
    if sends_step_by_step(c):
        ring = neighbour_ring_s(ring_bytes, members, c.links)
        back = 2.0 * ring
    else:
        ring = ring_pass_s(ring_bytes, members, c.links)
        steps = cp / np.maximum(cp - 1.0, 1.0)
        wider = stack.ring_gradient_bytes / 2.0
        back = ring + steps * neighbour_ring_s(wider * ring_bytes, members, c.links)
    if stack.ring_waits:
        return Passes(once + ring, once + back)
    first_step = ring / cp
    return Passes(
        once + np.maximum(ring - attention_s.forward, first_step),
        once + np.maximum(back - attention_s.backward, first_step),
    )


def sends_step_by_step(c: Context) -> bool:
    """Whether ring attention sends from rank to rank itself (Transformer Engine 2.15,
    flash_attn_p2p_communicate).

    Parameters
    ----------
    c : Context
        Its framework is used.

    Returns
    -------
    bool
        False of rings that gather keys and values by a collective.
    """
    ring = framework_of_stack(c.workload.framework).context_exchanges.get("p2p")
    return ring is not None and not ring.gathers


def ring_steps(c: Context) -> Floats:
    """Steps of ring attention in a pass.

    Parameters
    ----------
    c : Context
        Workload and layouts.

    Returns
    -------
    float or array
        Ranks of a ring, at least 1: cp, with `a2a+p2p` cp / A (`swapping_ranks`); 1 where there is no ring.
    """
    if c.workload.cp_comm in ("a2a", GATHERED):
        return 1.0
    steps = np.asarray(c.layout.cp)
    if c.workload.cp_comm == HIERARCHICAL:
        steps = steps // swapping_ranks(c.workload, c.layout)
    return steps


def merge_bytes(c: Context, q_width: Floats, out_width: Floats) -> Passes:
    """What ring attention moves through HBM to merge the partial results of its steps.

    Each step after the first reads a 2-byte partial output and rescales a 4-byte sum by the new log-sum-exp
    (Liu et al. 2023, arXiv 2310.01889, appendix A); backward the gradient of the queries is summed likewise.

    Parameters
    ----------
    c : Context
        Workload and layouts.
    q_width, out_width : float or array
        Elements a token of queries and of the output, on one rank, above 0.

    Returns
    -------
    Passes
        Bytes of one layer and micro-batch; 0 where cp is 1.
    """
    steps = ring_steps(c) - 1.0
    return Passes(10.0 * steps * c.tokens * out_width, 10.0 * steps * c.tokens * q_width)
