"""Blocks of models: ranges of their numbers, kinds of attention, experts, image encoders."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from meshwright.documents import ClosedDocument, left_out_at

Count = Annotated[int, Field(ge=1, le=10_000_000, strict=True)]
CountOrZero = Annotated[int, Field(ge=0, le=10_000_000, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Kernel = Annotated[int, Field(ge=1, le=64, strict=True)]
"""Positions that a convolution sees."""
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


# Kinds of attention beside softmax over all positions: latent, to chosen positions, and linear.


class SparseIndexerSpec(ClosedDocument):
    """Chooses the positions that a query attends to (DeepSeek-V3.2, arXiv 2512.02556, section 2.1)."""

    heads: Count
    head_dim: Count
    top_k: Count
    """Positions that a query attends to, those before it at most."""

    @property
    def width(self) -> int:
        """Elements a token of all its queries."""
        return self.heads * self.head_dim


class BlockSelectionSpec(ClosedDocument):
    """Chooses blocks of positions that a query attends to (MiniMax-M3), in layers whose attention is trained
    in full: the indexers are left as they are and do not run."""

    layers: Count
    """That have an indexer."""
    heads: Count
    head_dim: Count
    block: Count
    """Positions of a block."""
    top_k: Count
    """Blocks that a query attends to: with as many positions in a sequence, attention is that in full."""


class MlaSpec(ClosedDocument):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Head widths are per head."""

    type: Literal["MLA"] = "MLA"
    q_lora_rank: Count | None = None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    indexer: SparseIndexerSpec | None = None
    """Scores all earlier positions for each query, which attends to the best of them alone; None: to all."""


class WindowHeadsSpec(ClosedDocument):
    """Heads of layers with a window, where they are others than those of full attention (Gemma 4)."""

    heads: Count | None = left_out_at(None)
    """Query heads; as many as in full when absent (Step 3.5: 96 beside 64)."""
    kv_heads: Count
    head_dim: Count
    sinks: Flag = left_out_at(False)
    """One learned sink logit per head, which layers in full have none of (MiMo-V2)."""


LinearKind = Literal["gated_delta_net", "kda", "lightning", "short_conv"]
LINEAR_TITLES: dict[LinearKind, str] = {
    "gated_delta_net": "Gated DeltaNet",
    "kda": "Kimi Delta Attention",
    "lightning": "lightning attention",
    "short_conv": "short convolutions",
}


class LinearAttentionSpec(ClosedDocument):
    """Attention that keeps a state of fixed size instead of all keys."""

    type: LinearKind = "gated_delta_net"
    """gated_delta_net: the delta rule with a decay for each head (arXiv 2412.06464, section 3); kda: with one
    for each channel of a key (Kimi Linear, arXiv 2510.26692, section 3); lightning: sums of keys times values
    under a decay that is not trained (MiniMax-01, arXiv 2501.08313, section 2.2); short_conv: no state, but a
    gate ahead of a convolution over the hidden width and one behind it, of one head (LFM2)."""
    key_heads: Count
    """Heads of queries and of keys; each serves `value_heads / key_heads` heads of values."""
    value_heads: Count
    key_head_dim: Count
    value_head_dim: Count
    conv_kernel: Kernel = 4
    """Positions that the convolution over queries, keys and values sees; lightning attention has none."""
    gate_rank: Count | None = left_out_at(None)
    """Under kda: width between the two matrices that make decays, and between the two of the output gate; one
    matrix each when absent (Ling 3.0)."""
    block: Count = left_out_at(256)
    """Under lightning: positions that are worked on at once (`block_size`)."""
    own_gates: Flag = False
    """Gates of the output, steps and decays come from a matrix each (Qwen3.5), not from two for all of what a
    layer projects (Qwen3-Next); adapters stand beside each."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads {self.value_heads} must be a multiple of key_heads {self.key_heads}"
            )
        if self.type != "kda" and self.gate_rank is not None:
            raise ValueError("gate_rank needs type: kda")
        if self.type != "gated_delta_net" and self.value_heads != self.key_heads:
            raise ValueError(
                f"value_heads {self.value_heads} must be key_heads {self.key_heads} under {self.type}"
            )
        return self

    @property
    def title(self) -> str:
        """Its name in sentences."""
        return LINEAR_TITLES[self.type]

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
        """Outputs of the projections into a layer: queries, keys, values, gates of outputs and of heads, or
        under kda what is between the matrices of gates."""
        attended = 2 * self.key_width + self.value_width
        if self.type == "kda":
            width = self.key_width + self.value_width
            gates = width if self.gate_rank is None else 2 * self.gate_rank
            return attended + self.value_heads + gates
        if self.type == "short_conv":
            return attended
        of_heads = 2 * self.value_heads if self.type == "gated_delta_net" else 0
        return attended + self.value_width + of_heads

    @property
    def convolved_width(self) -> int:
        """Elements a token under the convolution: queries, keys and values."""
        if self.type == "short_conv":
            return self.value_width
        return 0 if self.type == "lightning" else 2 * self.key_width + self.value_width

    @property
    def numbers(self) -> int:
        """Weights outside matrices, convolution and norm: decay of a head, and step of it or of a channel."""
        per_layer = {
            "gated_delta_net": 2 * self.value_heads,
            "kda": self.value_heads + self.key_width,
            "lightning": 0,
            "short_conv": 0,
        }
        return per_layer[self.type]

    @property
    def normed_width(self) -> int:
        """Weights of the norm on the output: of a head, or of all heads under lightning; no norm behind a
        short convolution."""
        if self.type == "short_conv":
            return 0
        return self.value_width if self.type == "lightning" else self.value_head_dim


# Feed-forward layers made of experts, of which a token uses a few.


class MoeSpec(ClosedDocument):
    """Mixture-of-experts feed-forward layers; some layers may be dense."""

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
    router_score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    """Function from the router's outputs to scores. With sigmoid, `router_bias` is added for the choice alone
    (DeepSeek-V3); with softmax it belongs to the router's matrix (gpt-oss). SparseMixer draws two experts one
    after the other, each by a softmax of its own (Phi-3.5-MoE, arXiv 2409.12136, section 2.2)."""
    router_normalized: Flag = True
    """Whether the weights of a token's chosen experts are made to add up to 1 (`norm_topk_prob`)."""
    router_scaling_factor: Positive = 1.0
    """What the weights of the chosen experts are multiplied by (DeepSeek-V3: 2.5)."""
    router_scales: Flag = left_out_at(False)
    """Two sets of weights beside the router's matrix: one multiplies what it reads, element by element, the
    other the weight of each chosen expert (Gemma 4)."""
    router_scales_inputs: Flag = False
    """The weight of a chosen expert multiplies the token that it reads, not what it writes (Llama 4)."""
    output_norm: Flag = left_out_at(False)
    """A norm over the hidden width behind the experts, shared ones included (A.X K1)."""
    latent_size: Count | None = left_out_at(None)
    """Width that routed experts read and write, between a projection down from the hidden width and one back
    up, a pair for each layer (Nemotron 3 Super, `moe_latent_size`); None: the hidden width itself. Router and
    shared experts read the hidden width."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.every > 1 and self.dense_layers:
            raise ValueError("dense_layers and every exclude each other: every places dense layers")
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than the {self.experts} experts")
        if self.router_score == "sparsemixer" and (self.top_k != 2 or self.router_normalized):
            raise ValueError(
                f"router_score: sparsemixer needs top_k 2, not {self.top_k}, and router_normalized: false"
            )
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


# Layers of hybrid models: Mamba, and which layer has which block.


BLOCK_NAMES = {"M": "Mamba", "*": "attention", "-": "feed-forward", "E": "experts"}
"""What the symbols of a hybrid pattern stand for."""


class Mamba1Spec(ClosedDocument):
    """Mamba (Gu and Dao 2023, arXiv 2312.00752, section 3): each channel keeps a state of its own."""

    title: ClassVar[str] = "Mamba-1"

    channels: Count
    """Width of the scan, as a rule twice the hidden width."""
    step_rank: Count
    """Numbers of a token from which the step sizes of all channels are made."""
    state_dim: Count = 16
    """Numbers of the state of a channel."""
    conv_kernel: Kernel = 4
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


class Mamba2Spec(ClosedDocument):
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, section 7): heads that keep a state of fixed size."""

    title: ClassVar[str] = "Mamba-2"

    heads: Count
    head_dim: Count
    state_dim: Count
    """Numbers of the state for each channel of a head."""
    groups: Count = 1
    """Sets of B and C, the state's input and output; each serves `heads / groups` heads."""
    conv_kernel: Kernel = 4
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


class AttentionShares(NamedTuple):
    """Attention of each kind in that of a layer, or of the mean of unlike layers: together 1.

    Kinds that differ in their matrices. Under a window with the heads of full attention it counts as full.
    """

    full: float = 1.0
    windowed: float = 0.0
    """Under a window, with heads of its own."""
    linear: float = 0.0
    full_reusing: float = 0.0
    """On what an earlier layer made (`ModelSpec.attention_order`)."""
    windowed_reusing: float = 0.0

    @property
    def softmax(self) -> tuple[tuple[str, float], ...]:
        """Letters of the kinds with softmax attention that there are, each with its share."""
        shares = (self.full, self.windowed, self.full_reusing, self.windowed_reusing)
        return tuple((letter, share) for letter, share in zip("FWfw", shares, strict=True) if share)


AHEAD = "'"
"""Behind the symbols of a layer ahead of all that is trained, which runs forward alone."""


class LayerKind(NamedTuple):
    """What a layer consists of."""

    blocks: BlockShares
    attention: AttentionShares


def pattern_shares(pattern: str) -> BlockShares:
    """Blocks of the mean layer of a pattern.

    Parameters
    ----------
    pattern
        Symbols of `hybrid_pattern`, at least one.

    >>> pattern_shares("M-M*")
    BlockShares(attention=0.25, mamba=0.5, feed_forward=0.25, experts=0.0)
    """
    return BlockShares(*(pattern.count(symbol) / len(pattern) for symbol in "*M-E"))


# Rotary position embeddings: base, share of a head that turns, and scaling to longer contexts.
#
# A pair i of a head's d rotated elements turns by position x base^(-2i/d) (RoFormer, arXiv 2104.09864, eq.
# 15).


class RopeScaling(ClosedDocument):
    """How slowly the pairs turn in a context longer than the one first trained in."""

    type: Literal["linear", "llama3", "yarn", "dynamic", "longrope", "proportional"]
    """linear: all pairs alike; llama3: the slow ones, as Llama 3.1; yarn: a ramp between fast and slow ones
    (arXiv 2309.00071, section 3.2); dynamic: by the length at hand; longrope: each pair by its own factor
    (arXiv 2402.13753), which is not carried further; proportional: the share that turns does so at the speeds
    of the first pairs of a whole head (Gemma 4, transformers, `_compute_proportional_rope_parameters`)."""
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


class RopeSpec(ClosedDocument):
    """Rotary embeddings of one model."""

    base: Positive = 10_000.0
    """`rope_theta` of a config.json."""
    windowed_base: Positive | None = None
    """Base in layers with a sliding window, where it is another (Gemma 3)."""
    fraction: Share = 1.0
    """Share of a head's elements that turn (GPT-NeoX 0.25, Nemotron-4 0.5)."""
    windowed_fraction: Share | None = left_out_at(None)
    """Share in layers with a sliding window, where it is another (Gemma 4)."""
    scaling: RopeScaling | None = None


# Which layers of a model attend in full: each n-th one, or in an order of their own.


FULL, WINDOWED, LINEAR = "F", "W", "L"
"""Letters of `ModelSpec.attention_order`."""
ATTENTION_NAMES = {
    FULL: "full",
    WINDOWED: "windowed",
    LINEAR: "linear",
    FULL.lower(): "reusing full",
    WINDOWED.lower(): "reusing windowed",
}


def one_in(full: Sequence[bool]) -> int | None:
    """The n of 'each n-th layer attends in full'; 0 where none does, None where there is no such n.

    Parameters
    ----------
    full
        Whether each layer attends in full, in the layers' order.

    >>> one_in([False, True, False, True, False]), one_in([True, False]), one_in([False])
    (2, None, 0)
    """
    layers, count = len(full), sum(full)
    if count == 0:
        return 0
    every = layers // count
    return every if list(full) == [(i + 1) % every == 0 for i in range(layers)] else None


def order_fields(full: Sequence[bool], other: str) -> dict[str, object]:
    """The fields of a ModelSpec that say which layers attend in full; `other` is the letter of the rest.

    Parameters
    ----------
    full
        Whether each layer attends in full, in the layers' order.
    other
        W or L.

    >>> order_fields([False, True], "W"), order_fields([True, False], "W")
    ({'full_attention_every': 2}, {'attention_order': 'FW'})
    """
    every = one_in(full)
    if every is not None:
        return {"full_attention_every": every}
    return {"attention_order": "".join(FULL if is_full else other for is_full in full)}


def letters(layers: int, every: int, other: str) -> str:
    """The order in which each n-th layer attends in full; n = 0: none does.

    Parameters
    ----------
    layers
        In all, from 1.
    every
        From 0.
    other
        Letter of the layers between, W or L.

    >>> letters(5, 2, "W")
    'WFWFW'
    """
    return "".join(FULL if every and (i + 1) % every == 0 else other for i in range(layers))


def sharing_schedule(order: str) -> tuple[int, int] | None:
    """First layers with something of their own, and the n of 'then each n-th has'; None for other orders.

    Parameters
    ----------
    order
        F for a layer with something of its own, f for one that reuses it; F first.

    >>> sharing_schedule("FFFfffFffF"), sharing_schedule("FfF"), sharing_schedule("FFfFff")
    (None, (1, 2), None)
    >>> sharing_schedule("FFFfffFfffF")
    (3, 4)
    """
    first = len(order) - len(order.lstrip(FULL))
    every = order.find(FULL, first) - first + 1
    if every <= 0:
        every = len(order)
    regular = "".join(
        FULL if layer < first or (layer - first + 1) % every == 0 else FULL.lower()
        for layer in range(len(order))
    )
    return (first, every) if regular == order else None


def runs(kinds: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Kinds of layers in their order, each with how many follow each other.

    Parameters
    ----------
    kinds
        Of the layers, in their order.

    >>> list(runs("FFW"))
    [('F', 2), ('W', 1)]
    """
    for kind, alike in groupby(kinds):
        yield kind, sum(1 for _ in alike)


def repeated_part(order: Sequence[str]) -> int:
    """Layers of the shortest part of which the order is made by repetition; all of them where it is not.

    Parameters
    ----------
    order
        Kinds of the layers, at least one.

    >>> repeated_part("FWWFWW"), repeated_part("FWW")
    (3, 3)
    """
    count = len(order)
    parts = (size for size in range(1, count + 1) if count % size == 0)
    return next(size for size in parts if list(order[:size]) * (count // size) == list(order))


# What the image encoder in front of a language model is, and what a run makes of it.


VisionKind = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "siglip", "mllama"]
"""Encoder and projector of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Gemma 3 (SigLIP) and Llama 3.2 Vision."""


class ImageInput(ClosedDocument):
    """What sequences hold of images, and whether their encoder is trained: as a request says it."""

    tokens: Count
    """Of all images of a sequence, as the language model reads them: after patches are merged. Those of
    cross-attention (Llama 3.2) are beside its tokens, all others are among them."""
    per_sequence: Count | None = None
    """Images that share them evenly; None for one, or for as many as a fixed size of images makes."""
    frozen: Flag = False
    """Whether encoder and projector are left as they are."""


class EncoderUse(ClosedDocument):
    """What a run makes of an encoder: images of a sequence, and how its framework runs it."""

    tokens: Count
    """Of all images of a sequence, as the language model reads them."""
    images: Count
    """Of a sequence."""
    trained: Flag
    tensor_parallel: Flag = False
    """Whether tensor ranks share its matrices; without, each of them runs the whole encoder."""
    context_parallel: Flag = False
    """Whether it runs beside context parallelism, whole on each of the ranks."""
    recomputed: Flag = False
    """Whether full recomputation of layers recomputes those of the encoder too."""


class VisionSpec(ClosedDocument):
    """An image encoder with the projector behind it. Widths in elements, counts in units of their name."""

    kind: VisionKind
    layers: Count
    hidden: Count
    ffn_hidden: Count
    heads: Count
    out_hidden: Count
    """Width of a token that it hands over: that of the language model."""
    patch_size: Count
    """Pixels along a side of a patch."""
    temporal_patch: Count = 1
    """Frames of a patch; an image is repeated."""
    merge: Count
    """Patches along a side of the square that becomes one token."""
    positions: CountOrZero = 0
    """Rows of a learned table of positions."""
    window: Count | None = None
    """Patches along a side of a window; None where every layer attends to the whole image."""
    full_layers: CountOrZero = 0
    """Layers that attend to the whole image all the same, under a `window`."""
    deepstack: CountOrZero = 0
    """Layers whose output is merged and handed over besides, each by a projector of its own (Qwen3-VL)."""
    pooling_head: Flag = False
    """Whether a pooling head is built that no token passes (SigLIP, `vision_use_head`)."""
    image_tokens: Count | None = None
    """Of every image, where its size is fixed (Gemma 3: 256; four tiles of Llama 3.2: 6,404)."""
    merged_width: Count | None = None
    """Width that the projector reads, where no field above says it (Llama 3.2: layers side by side)."""
    beside: CountOrZero = 0
    """Parameters that the language model has for images alone and no field of its own holds: norms and gates
    of cross-attention, and rows of the token table (Llama 3.2)."""
    use: EncoderUse | None = None
    """In a plan with images; None in a file, and where text alone is trained on."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(
                f"vision.hidden {self.hidden} must be a multiple of vision.heads {self.heads}"
            )
        if self.full_layers > self.layers:
            raise ValueError(f"vision.full_layers must be at most vision.layers {self.layers}")
        return self

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate matrix."""
        return self.kind == "qwen2_5_vl"

    @property
    def merger_products(self) -> int:
        """Matrix products that hand tokens over: two of Qwen's mergers, one behind SigLIP and Llama 3.2's."""
        return 1 if self.kind in ("siglip", "mllama") else 2

    @property
    def crosses(self) -> bool:
        """Whether its tokens are those of cross-attention, beside the tokens of a sequence."""
        return self.kind == "mllama"

    @property
    def patch_width(self) -> int:
        """Numbers of a patch: three colours of its pixels and frames."""
        return 3 * self.temporal_patch * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        """Patches that become one token of the language model."""
        return self.merge**2

    @property
    def merged(self) -> int:
        """Width that the projector reads: of the patches of a token side by side, or pooled to one."""
        beside = 1 if self.kind == "siglip" else self.patches_per_token
        return self.merged_width or beside * self.hidden
