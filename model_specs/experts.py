"""Feed-forward layers made of experts, of which a token uses a few."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from meshwright.model_specs.numbers import Count, CountOrZero, Flag, Positive

_FROZEN = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class MoeSpec(BaseModel):
    """Mixture-of-experts feed-forward layers; some layers may be dense."""

    model_config = _FROZEN

    experts: Count
    top_k: Count
    moe_ffn_hidden: Count
    shared_experts: CountOrZero = 0
    shared_ffn_hidden: Count | None = None
    """Width of all shared experts together; `shared_experts * moe_ffn_hidden` when absent."""
    shared_expert_gate: Flag = False
    dense_layers: CountOrZero = 0
    """So many first layers are dense (DeepSeek-V3: 3)."""
    every: Count = 1
    """Each n-th layer has experts, the n - 1 before it have none (Llama 4 Maverick: 2)."""
    router_groups: Count | None = None
    """Node-limited routing: experts are split into this many groups ..."""
    router_groups_per_token: Count | None = None
    """... and a token chooses from at most this many of them (DeepSeek-V3, arXiv 2412.19437, 2.1.2)."""
    router_bias: Flag = False
    """One number per expert, learned (gpt-oss) or moved to balance the load (DeepSeek-V3)."""
    expert_bias: Flag = False
    """Biases on the matrices of every routed expert."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's outputs to scores. With sigmoid, `router_bias` is added for the choice alone
    (DeepSeek-V3); with softmax it belongs to the router's matrix (gpt-oss)."""
    router_normalized: Flag = True
    """Whether the weights of a token's chosen experts are made to add up to 1 (`norm_topk_prob`)."""
    router_scaling_factor: Positive = 1.0
    """What the weights of the chosen experts are multiplied by (DeepSeek-V3: 2.5)."""
    router_scales_inputs: Flag = False
    """The weight of a chosen expert multiplies the token that it reads, not what it writes (Llama 4)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.every > 1 and self.dense_layers:
            raise ValueError("dense_layers and every exclude each other: every places dense layers")
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than the {self.experts} experts")
        if self.router_groups is not None and self.experts % self.router_groups:
            raise ValueError(
                f"experts {self.experts} must divide into router_groups {self.router_groups}"
            )
        if self.router_groups_per_token is not None:
            if self.router_groups is None:
                raise ValueError("router_groups_per_token needs router_groups")
            if self.router_groups_per_token > self.router_groups:
                raise ValueError(
                    f"router_groups_per_token {self.router_groups_per_token} is more than "
                    f"the {self.router_groups} router_groups"
                )
        return self

    @property
    def shared_width(self) -> int:
        """Feed-forward width of the shared experts together; 0 without any."""
        return self.shared_ffn_hidden or self.shared_experts * self.moe_ffn_hidden
