"""What the operators of a layer need to know, and what they share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
)
from meshwright.costmodel.layout import Floats, Layout, Placement
from meshwright.costmodel.rates import Constants
from meshwright.costmodel.workload import (
    GATHERED,
    HIERARCHICAL,
    Workload,
    inside_and_between,
    swapping_ranks,
)
from meshwright.frameworks.catalog import framework_of_stack


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the operators of a layer need to know."""

    workload: Workload
    layout: Layout
    placement: Placement
    constants: Constants
    rates: Rates
    links: Links

    @cached_property
    def tokens(self) -> Floats:
        """Tokens of a micro-batch on one rank."""
        layout = self.layout
        tokens = np.asarray(layout.micro_batch) * self.workload.seq_len
        per_rank: Floats = tokens / layout.cp
        return per_rank

    @cached_property
    def cast_bytes(self) -> float:
        """Bytes moved per element of a GEMM operand that is cast to the run's precision."""
        recipe, current = self.workload.fp8_recipe, self.constants.framework.current_scaling
        if recipe is not None:
            current = recipe == "tensorwise"
        return cast_bytes_per_element(
            self.workload.precision,
            self.workload.cluster.device.architecture,
            current_scaling=current,
            in_blocks=recipe == "blockwise",
            transposes_apart=self.constants.framework.transposes_apart,
        )

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
        """Whether GEMMs run beside their tensor-parallel transfers; Megatron-Bridge never does with NVFP4."""
        return self.workload.tp_overlap and self.workload.precision != "nvfp4"

    @cached_property
    def sequence_shards(self) -> Floats:
        """Ways that norms, residuals and dropout are split: tp with sequence parallelism, else 1."""
        shards: Floats = np.where(self.layout.sequence_parallel, self.layout.tp, 1)
        return shards

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

    docs/cost_model.md, "One layer", has the source.

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
        Bytes read and written; 0 at 16 bits (`precision.cast_bytes_per_element` has the sources).
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


def add(*summands: Parts) -> Parts:
    """Part-wise sum.

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
    """Part-wise product.

    Parameters
    ----------
    parts : dict of str to float or array
        Seconds by part.
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
        Seconds by part, shapes that broadcast.

    Returns
    -------
    float or array
        Seconds; 0 without parts.
    """
    seconds: Floats = sum(parts.values(), start=np.float64(0.0))
    return seconds


def joined(*blocks: LayerTime) -> LayerTime:
    """Blocks run one after the other.

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


def shared_out(first: LayerTime, second: LayerTime, share: float) -> LayerTime:
    """The mean of two blocks of which some layers have one and the others the other.

    Parameters
    ----------
    first, second : LayerTime
        The blocks.
    share : float
        Layers with the first over all, 0 to 1.

    Returns
    -------
    LayerTime
        Part-wise means.
    """
    rest = 1.0 - share
    return LayerTime(
        add(scaled(first.forward, share), scaled(second.forward, rest)),
        add(scaled(first.backward, share), scaled(second.backward, rest)),
        add(scaled(first.recompute, share), scaled(second.recompute, rest)),
    )


def portion(block: LayerTime, share: float) -> LayerTime:
    """What the mean layer has of a block that some layers have.

    Parameters
    ----------
    block : LayerTime
        The block.
    share : float
        Layers with it over all, 0 to 1.

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
    c: Context, forward_gemm_s: Floats, backward_gemm_s: Floats, column_gemm_s: Floats
) -> tuple[Floats, Floats]:
    """One all-reduce forward and one backward (or gathers and scatters) of T h, less what compute hides.

    With user buffers that is any GEMM of the pass. Without, Megatron runs the collectives of a
    column-parallel product beside one GEMM of its backward pass each: the all-reduce (or scatter) of the
    input's gradient under the weight gradient, and the gather of the saved input that sequence parallelism
    repeats under the input gradient (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2;
    megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication). Launches that
    block leave nothing to run beside.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates.
    forward_gemm_s, backward_gemm_s : float or array
        Seconds of the block's GEMMs in either pass, at least 0.
    column_gemm_s : float or array
        Seconds of one GEMM of the column-parallel product's backward pass, at least 0.

    Returns
    -------
    tuple of two floats or arrays
        Exposed seconds, forward and backward, of one block and micro-batch.
    """
    stack = c.constants.framework
    beside = stack.async_tensor_backward and not c.workload.launch_blocking
    if c.tp_overlaps or not beside:
        hidden_share = stack.tp_hidden if c.tp_overlaps else 0.0
        return less_hidden(hidden_share, c.tensor_sum_s, forward_gemm_s, backward_gemm_s)

    def exposed(seconds: Floats) -> Floats:
        """What runs longer than one GEMM, and what the two slow each other down."""
        slow_down = stack.dp_interference * np.minimum(seconds, column_gemm_s)
        return np.maximum(seconds - column_gemm_s, 0.0) + slow_down

    gathered = c.gathered_share * c.tensor_pass_s
    scattered = c.tensor_wait_s + gathered + exposed(gathered) + exposed(c.tensor_pass_s)
    reduced = exposed(c.tensor_sum_s)
    return c.tensor_sum_s, np.where(c.layout.sequence_parallel, scattered, reduced)


def less_hidden(
    hidden_share: float, seconds: Floats, forward_s: Floats, backward_s: Floats
) -> tuple[Floats, Floats]:
    """Exposed seconds of a transfer that runs beside compute.

    docs/cost_model.md, "One layer", has the source.

    Parameters
    ----------
    hidden_share : float
        Share of the transfer that can hide, 0 to 1; 0 without overlap.
    seconds : float or array
        Of the transfer, in either pass, at least 0.
    forward_s, backward_s : float or array
        Seconds of the compute beside it, at least 0.

    Returns
    -------
    tuple of two floats or arrays
        Exposed seconds, forward and backward.
    """
    if hidden_share == 0.0:
        return seconds, seconds
    always = seconds * (1.0 - hidden_share)
    return np.maximum(always, seconds - forward_s), np.maximum(always, seconds - backward_s)


def context_parallel_s(
    c: Context, widths: tuple[Floats, Floats, Floats], attention_s: tuple[Floats, Floats]
) -> tuple[Floats, Floats]:
    """Exposed seconds of the transfers of context parallelism.

    Ring attention passes keys and values round the group under the attention of the block before (Liu et al.
    2023, arXiv 2310.01889, section 3), backward with their gradients; all-to-all swaps heads for tokens and
    is exposed (DeepSpeed Ulysses, arXiv 2309.14509), as is a gather of all keys and values before attention
    (Transformer Engine 2.15, AttnFuncWithCPAndKVAllGather). With swaps inside rings, a rank holds A times the
    tokens of 1/A of the heads after the swap, so that the ring of C / A ranks passes as many bytes a step as
    one of C.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates.
    widths : tuple of three floats or arrays
        Elements a token of queries, of keys with values, and of the output, on one rank.
    attention_s : tuple of two floats or arrays
        Seconds of attention itself, forward and backward.

    Returns
    -------
    tuple of two floats or arrays
        Seconds of one layer and micro-batch, forward and backward; 0 where cp is 1.
    """
    query, key_value, output = widths
    token_bytes = 2.0 * c.tokens
    swapped_bytes = token_bytes * (query + key_value + output)
    if c.workload.cp_comm == "a2a":
        once = all_to_all_s(swapped_bytes, c.placement.cp, c.links)
        return once, once
    cp, members = np.asarray(c.layout.cp), c.placement.cp
    if c.workload.cp_comm == GATHERED:
        gathered = ring_pass_s(token_bytes * key_value * cp, members, c.links)
        return gathered, 2.0 * gathered
    once = np.float64(0.0)
    if c.workload.cp_comm == HIERARCHICAL:
        size = swapping_ranks(c.workload, c.layout)
        swapping, members = inside_and_between(members, size)
        once = all_to_all_s(swapped_bytes, swapping, c.links)
        cp = cp // size
    forward_s, backward_s = attention_s
    pass_s = neighbour_ring_s if _sends_step_by_step(c) else ring_pass_s
    ring = pass_s(token_bytes * key_value * cp, members, c.links)
    first_step = ring / cp
    exposed_backward = np.maximum(2.0 * ring - backward_s, first_step)
    return once + np.maximum(ring - forward_s, first_step), once + exposed_backward


def _sends_step_by_step(c: Context) -> bool:
    """Whether ring attention sends from rank to rank itself (Transformer Engine 2.15,
    flash_attn_p2p_communicate).
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
        Ranks of a ring: cp, of `a2a+p2p` its share; 1 where there is none.
    """
    if c.workload.cp_comm in ("a2a", GATHERED):
        return 1.0
    steps = np.asarray(c.layout.cp)
    if c.workload.cp_comm == HIERARCHICAL:
        steps = steps // swapping_ranks(c.workload, c.layout)
    return steps


def merge_bytes(c: Context, q_width: Floats, out_width: Floats) -> tuple[Floats, Floats]:
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
    tuple of two floats or arrays
        Bytes of one layer and micro-batch, forward and backward; 0 where cp is 1.
    """
    steps = ring_steps(c) - 1.0
    return 10.0 * steps * c.tokens * out_width, 10.0 * steps * c.tokens * q_width
