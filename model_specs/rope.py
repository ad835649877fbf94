"""Rotary position embeddings: base, share of a head that turns, and scaling to longer contexts.

A pair i of a head's d rotated elements turns by position x base^(-2i/d) (RoFormer, arXiv 2104.09864, eq. 15).
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from meshwright.model_specs.numbers import Positive

_FROZEN = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class RopeScaling(BaseModel):
    """How slowly the pairs turn in a context longer than the one first trained in."""

    model_config = _FROZEN

    type: Literal["linear", "llama3", "yarn", "dynamic", "longrope"]
    """linear: all pairs alike; llama3: the slow ones, as Llama 3.1; yarn: a ramp between fast and slow ones
    (arXiv 2309.00071, section 3.2); dynamic: by the length at hand; longrope: each pair by its own factor
    (arXiv 2402.13753), which is not carried further."""
    factor: Positive = 1.0
    original_positions: Annotated[int, Field(ge=1, le=10_000_000, strict=True)] = 8192
    """Tokens of the context first trained in; without meaning for `linear`."""
    low_freq_factor: Positive = 1.0
    """llama3 alone: pairs that turn fewer times than this in the first context are slowed in full ..."""
    high_freq_factor: Positive = 4.0
    """... and those that turn more times than this are not slowed."""
    beta_fast: Positive = 32.0
    """yarn alone: pairs that turn more often than this in the first context are not slowed ..."""
    beta_slow: Positive = 1.0
    """... and those that turn less often than this are slowed in full."""
    whole_range: bool = True
    """yarn alone: whether the ends of the ramp are rounded to whole pairs."""
    mscale: Positive | None = None
    """yarn alone: weight of the temperature on rotated elements; 1 over 0 of the next field when absent."""
    mscale_all_dim: Positive | None = None
    """yarn alone: weight of the temperature on the whole attention score (DeepSeek-V2's code)."""
    attention_factor: Positive | None = None
    """yarn alone: what rotated elements are multiplied by, where factor and weights do not make it."""

    @property
    def temperature(self) -> float:
        """yarn: what rotated elements are multiplied by (transformers, `_compute_yarn_parameters`)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        weights = (
            (self.mscale, self.mscale_all_dim) if self.mscale and self.mscale_all_dim else (1, 0)
        )
        over, under = (0.1 * weight * math.log(self.factor) + 1.0 for weight in weights)
        return over / under


class RopeSpec(BaseModel):
    """Rotary embeddings of one model."""

    model_config = _FROZEN

    base: Positive = 10_000.0
    """`rope_theta` of a config.json."""
    windowed_base: Positive | None = None
    """Base in layers with a sliding window, where it is another (Gemma 3)."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a head's elements that turn (GPT-NeoX 0.25, Nemotron-4 0.5)."""
    scaling: RopeScaling | None = None
