"""What a transformer language model is, as far as planning its training needs to know."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1, le=10_000_000)]
CountOrZero = Annotated[int, Field(ge=0, le=10_000_000)]

Activation = Literal["gelu", "relu", "squared_relu", "swiglu", "geglu"]
Position = Literal["rope", "learned", "alibi", "none"]

_FROZEN = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class MlaSpec(BaseModel):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Widths per head unless said."""

    model_config = _FROZEN

    type: Literal["MLA"] = "MLA"
    q_lora_rank: Count | None = None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count


class MoeSpec(BaseModel):
    """Mixture-of-experts feed-forward layers; `dense_layers` first layers stay dense."""

    model_config = _FROZEN

    experts: Count
    top_k: Count
    moe_ffn_hidden: Count
    shared_experts: CountOrZero = 0
    shared_ffn_hidden: Count | None = None
    """Width of all shared experts together; `shared_experts * moe_ffn_hidden` when absent."""
    shared_expert_gate: bool = False
    dense_layers: CountOrZero = 0
    router_groups: Count | None = None
    """Node-limited routing: experts are split into this many groups ..."""
    router_groups_per_token: Count | None = None
    """... and a token chooses from at most this many of them (DeepSeek-V3, arXiv 2412.19437, 2.1.2)."""
    router_bias: bool = False
    expert_bias: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than the {self.experts} experts")
        if self.router_groups is not None and self.experts % self.router_groups:
            raise ValueError(f"experts {self.experts} must divide into router_groups {self.router_groups}")
        return self

    @property
    def shared_width(self) -> int:
        """Feed-forward width of the shared experts together; 0 without any."""
        return self.shared_ffn_hidden or self.shared_experts * self.moe_ffn_hidden


class ModelSpec(BaseModel):
    """One decoder-only transformer. Widths are in elements, counts in units of their name."""

    model_config = _FROZEN

    name: str = Field(default="model", max_length=200)
    layers: Annotated[int, Field(ge=1, le=2000)]
    hidden: Count
    ffn_hidden: CountOrZero
    heads: Count
    kv_heads: Count
    head_dim: Count | None = None
    """`hidden / heads` when absent."""
    vocab: Count
    activation: Activation = "swiglu"
    tied_embeddings: bool = False
    position: Position = "rope"
    max_positions: Count | None = None
    """Rows of the learned position table; only for `position: learned`."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norms_per_layer: Annotated[int, Field(ge=1, le=6)] = 2
    qk_norm: bool = False
    embedding_norm: bool = False
    """A norm right after the embedding (BLOOM)."""
    parallel_block: bool = False
    """Attention and feed-forward read the same input (GPT-NeoX, Falcon)."""
    attention_bias: bool = False
    """Bias on the query, key and value projections."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    attention_sinks: bool = False
    """One learned sink logit per head (gpt-oss)."""
    sliding_window: Count | None = None
    """Tokens that a windowed layer looks back."""
    full_attention_every: Count = 1
    """With a window: one layer in this many attends in full, the others are windowed (0 is written as absent
    window; 1 means that every layer is full)."""
    attention: MlaSpec | None = None
    attention_note: str | None = None
    mtp_layers: CountOrZero = 0
    """Multi-token-prediction modules (DeepSeek-V3, 2.2): one extra layer each, and the head once more."""
    moe: MoeSpec | None = None
    published_parameters: float | None = Field(default=None, gt=0)
    """Total parameters as its authors state them, for the tests."""
    source: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}: give head_dim")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if self.moe is not None and self.moe.dense_layers > self.layers:
            raise ValueError(f"moe.dense_layers {self.moe.dense_layers} is more than layers {self.layers}")
        if self.moe is None and self.ffn_hidden == 0:
            raise ValueError("ffn_hidden must be at least 1 in a dense model")
        return self

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate matrix (three matrices, not two)."""
        return self.activation in ("swiglu", "geglu")

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head."""
        if self.attention is not None:
            return self.attention.qk_nope_head_dim + self.attention.qk_rope_head_dim
        return self.head_dim or self.hidden // self.heads

    @property
    def v_head_dim(self) -> int:
        """Width of one value head."""
        return self.attention.v_head_dim if self.attention is not None else self.qk_head_dim

    @property
    def dense_layers(self) -> int:
        """Layers with a dense feed-forward (all of them in a dense model); they come first."""
        return self.layers if self.moe is None else self.moe.dense_layers

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers
