"""Kinds of attention beside softmax over all positions: latent, to chosen positions, and linear."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshwright.model_specs.numbers import Count

_FROZEN = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class SparseIndexerSpec(BaseModel):
    """Chooses the positions that a query attends to (DeepSeek-V3.2, arXiv 2512.02556, section 2.1)."""

    model_config = _FROZEN

    heads: Count
    head_dim: Count
    top_k: Count
    """Positions that a query attends to, those before it at most."""

    @property
    def width(self) -> int:
        """Elements a token of all its queries."""
        return self.heads * self.head_dim


class MlaSpec(BaseModel):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Head widths are per head."""

    model_config = _FROZEN

    type: Literal["MLA"] = "MLA"
    q_lora_rank: Count | None = None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    indexer: SparseIndexerSpec | None = None
    """Scores all earlier positions for each query, which attends to the best of them alone; None: to all."""


class GatedDeltaNetSpec(BaseModel):
    """Gated DeltaNet (arXiv 2412.06464, section 3), which keeps a state of fixed size instead of all keys."""

    model_config = _FROZEN

    type: Literal["gated_delta_net"] = "gated_delta_net"
    key_heads: Count
    """Heads of queries and of keys; each serves `value_heads / key_heads` heads of values."""
    value_heads: Count
    key_head_dim: Count
    value_head_dim: Count
    conv_kernel: Annotated[int, Field(ge=1, le=64, strict=True)] = 4
    """Positions that the convolution over queries, keys and values sees."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads {self.value_heads} must be a multiple of key_heads {self.key_heads}"
            )
        return self

    @property
    def key_width(self) -> int:
        """Elements a token of all keys, and of all queries."""
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Elements a token of all values, and of the output gate."""
        return self.value_heads * self.value_head_dim

    @property
    def projected_width(self) -> int:
        """Outputs of the projection into a layer: queries, keys, values, gates of outputs and of heads."""
        return 2 * (self.key_width + self.value_width + self.value_heads)
