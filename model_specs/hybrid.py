"""Layers of hybrid models: Mamba, and which layer has which block."""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshwright.model_specs.numbers import Count, Flag

BLOCK_NAMES = {"M": "Mamba", "*": "attention", "-": "feed-forward", "E": "experts"}
"""What the symbols of a hybrid pattern stand for."""


class Mamba1Spec(BaseModel):
    """Mamba (Gu and Dao 2023, arXiv 2312.00752, section 3): each channel keeps a state of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    title: ClassVar[str] = "Mamba-1"

    channels: Count
    """Width of the scan, as a rule twice the hidden width."""
    step_rank: Count
    """Numbers of a token from which the step sizes of all channels are made."""
    state_dim: Count = 16
    """Numbers of the state of a channel."""
    conv_kernel: Annotated[int, Field(ge=1, le=64, strict=True)] = 4
    """Positions that the convolution over channels sees."""
    conv_bias: Flag = True
    inner_norms: Flag = False
    """Norms with weights on step, B and C (Jamba, arXiv 2403.19887, section 6.3)."""

    @property
    def width(self) -> int:
        """Channels."""
        return self.channels

    @property
    def convolved_width(self) -> int:
        """Elements a token under the convolution: the channels."""
        return self.channels

    @property
    def projected_width(self) -> int:
        """Outputs of the projection into a layer: channels and their gate."""
        return 2 * self.channels

    @property
    def selected_width(self) -> int:
        """What the channels are projected to: rank of the step, B and C."""
        return self.step_rank + 2 * self.state_dim


class Mamba2Spec(BaseModel):
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, section 7): heads that keep a state of fixed size."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    title: ClassVar[str] = "Mamba-2"

    heads: Count
    head_dim: Count
    state_dim: Count
    """Numbers of the state for each channel of a head."""
    groups: Count = 1
    """Sets of B and C, the state's input and output; each serves `heads / groups` heads."""
    conv_kernel: Annotated[int, Field(ge=1, le=64, strict=True)] = 4
    """Positions that the convolution over channels, B and C sees."""
    conv_bias: Flag = True
    chunk: Annotated[int, Field(ge=16, le=4096, strict=True)] = 128
    """Positions that a kernel works on at once."""
    gated_norm: Flag = True
    """Whether a norm with weights follows the gate on the output (Falcon-H1-34B has none)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.groups:
            raise ValueError(f"heads {self.heads} must be a multiple of groups {self.groups}")
        return self

    @property
    def width(self) -> int:
        """Channels of all heads together."""
        return self.heads * self.head_dim

    @property
    def convolved_width(self) -> int:
        """Elements a token under the convolution: channels, B and C."""
        return self.width + 2 * self.groups * self.state_dim

    @property
    def projected_width(self) -> int:
        """Outputs of the projection into a layer: gate, channels, B, C, and a step size of each head."""
        return self.width + self.convolved_width + self.heads


class BlockShares(NamedTuple):
    """Blocks of each kind in a layer, or in the mean of unlike layers. A block has its norm and residual."""

    attention: float
    """Softmax attention, in full or in a window, or linear attention."""
    mamba: float
    feed_forward: float
    """Dense feed-forward."""
    experts: float

    @property
    def total(self) -> float:
        """Blocks of a layer: 2 in a transformer."""
        return self.attention + self.mamba + self.feed_forward + self.experts

    @property
    def tensor_parallel(self) -> float:
        """Blocks with two products that tensor parallelism splits, beside those of experts."""
        return self.attention + self.mamba + self.feed_forward

    def kinds(self) -> tuple[BlockShares, ...]:
        """A layer of each kind: one block alone in a layer pattern, a whole layer in a transformer."""
        if self.total > 1.5:
            if not (self.feed_forward and self.experts):
                return (self,)
            dense = self._replace(feed_forward=1.0, experts=0.0)
            return (dense, self._replace(feed_forward=0.0, experts=1.0))
        present = [number for number, share in enumerate(self) if share]
        return tuple(BlockShares(*(float(i == number) for i in range(4))) for number in present)


def pattern_shares(pattern: str) -> BlockShares:
    """Blocks of the mean layer of a pattern.

    >>> pattern_shares("M-M*")
    BlockShares(attention=0.25, mamba=0.5, feed_forward=0.25, experts=0.0)
    """
    return BlockShares(*(pattern.count(symbol) / len(pattern) for symbol in "*M-E"))
