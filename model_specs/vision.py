"""What the image encoder in front of a language model is, and what a run makes of it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from meshwright.model_specs.blocks import Count, CountOrZero, Flag

VisionKind = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "siglip", "mllama"]
"""Encoder and projector of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Gemma 3 (SigLIP) and Llama 3.2 Vision."""

_FROZEN = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ImageInput(BaseModel):
    """What sequences hold of images, and whether their encoder is trained: as a request says it."""

    model_config = _FROZEN

    tokens: Count
    """Of all images of a sequence, as the language model reads them: after patches are merged. Those of
    cross-attention (Llama 3.2) are beside its tokens, all others are among them."""
    per_sequence: Count | None = None
    """Images that share them evenly; None for one, or for as many as a fixed size of images makes."""
    frozen: Flag = False
    """Whether encoder and projector are left as they are."""


class EncoderUse(BaseModel):
    """What a run makes of an encoder: images of a sequence, and how its framework runs it."""

    model_config = _FROZEN

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


class VisionSpec(BaseModel):
    """An image encoder with the projector behind it. Widths in elements, counts in units of their name."""

    model_config = _FROZEN

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
