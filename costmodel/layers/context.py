"""What the operators of a layer need to know, and what they share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.costmodel.collectives.on_levels import Links, all_reduce_s, ring_pass_s
from meshwright.costmodel.constants.rates import Constants
from meshwright.costmodel.layers.elementwise import ElementBytes, element_bytes
from meshwright.costmodel.layers.kernels import Rates
from meshwright.costmodel.layers.precision import GATHERED_SHARE, cast_bytes_per_element
from meshwright.costmodel.layout import Floats, Layout, Placement
from meshwright.costmodel.workload import Workload


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
        return self.workload.overlap.tp and self.workload.precision != "nvfp4"

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
