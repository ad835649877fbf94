"""What a transformer language model is, as far as planning its training needs to know."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from meshwright.documents import ClosedDocument, left_out_at
from meshwright.model_specs.blocks import (
    AHEAD,
    ATTENTION_NAMES,
    BLOCK_NAMES,
    FULL,
    LINEAR,
    WINDOWED,
    AttentionShares,
    BlockSelectionSpec,
    BlockShares,
    Count,
    CountOrZero,
    Flag,
    LayerKind,
    LinearAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
    MoeSpec,
    Positive,
    RopeSpec,
    Share,
    SparseIndexerSpec,
    VisionSpec,
    WindowHeadsSpec,
    letters,
    pattern_shares,
)

Activation = Literal["gelu", "relu", "squared_relu", "swiglu", "geglu", "xielu"]
Position = Literal["rope", "learned", "alibi", "none"]


class ModelSpec(ClosedDocument):
    """One decoder-only transformer. Widths are in elements, counts in units of their name."""

    name: str = Field(default="model", max_length=200)
    layers: Annotated[int, Field(ge=1, le=2000, strict=True)]
    hidden: Count
    ffn_hidden: CountOrZero
    heads: Count
    kv_heads: Count
    head_dim: Count | None = None
    """`hidden / heads` when absent."""
    value_head_dim: Count | None = left_out_at(None)
    """Width of a head's values and of its output, where another than that of its keys (MiMo-V2)."""
    vocab: Count
    activation: Activation = "swiglu"
    gelu_form: Literal["tanh", "exact"] = "tanh"
    """How GELU is computed: by the tanh approximation (GPT-2), or with the error function (GPT-NeoX)."""
    swiglu_alpha: Positive = 1.0
    """The gate of SwiGLU is x sigmoid(alpha x); gpt-oss: 1.702."""
    glu_offset: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Added to the linear half of a gated feed-forward (gpt-oss: 1)."""
    glu_limit: Positive | None = None
    """Both halves of a gated feed-forward are clamped to this (gpt-oss: 7); no limit when absent."""
    tied_embeddings: Flag = False
    position: Position = "rope"
    max_positions: Count | None = None
    """Rows of the learned position table; only for `position: learned`, which counts none when absent."""
    rope: RopeSpec = RopeSpec()
    """Rotary embeddings, under `position: rope`."""
    rope_in_windows_alone: Flag = False
    """Layers that attend in full have no position embedding, windowed ones have (Llama 4)."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_bias: Flag = left_out_at(True)
    """Whether a layer norm has a shift beside its scale; those of Cohere have none."""
    norm_weights: Flag = left_out_at(True)
    """Whether norms over the hidden width have a scale; those of OLMo's first generation have none."""
    norm_epsilon: Share = 1e-5
    """Added to the mean square, or to the variance, under the root."""
    norm_zero_centered: Flag = False
    """Norms multiply by 1 + weight (Gemma, Nemotron-4), so that weight decay pulls to 1."""
    norms_per_layer: Annotated[int, Field(ge=1, le=8, strict=True)] = 2
    """Norms over the hidden width: 2 as a rule, 4 with norms after the blocks (Gemma 2), 7 where these stand
    around experts and a dense feed-forward beside them (Gemma 4), 1 in a parallel block that shares one
    (Falcon-7B)."""
    norms_after_blocks: Flag = False
    """Two norms per layer come after attention and feed-forward, not before them (OLMo 2)."""
    qk_norm: Flag = False
    """Norms on queries and keys, one of `head_dim` each (Qwen3) ..."""
    qk_norm_full_width: Flag = False
    """... or over all heads together: `heads * head_dim` and `kv_heads * head_dim` (OLMoE)."""
    qk_norm_weights: Flag = True
    """Whether those norms have weights; those of Llama 4 have none."""
    value_norm: Flag = left_out_at(False)
    """A norm without weights on the values of each head (Gemma 4)."""
    embedding_norm: Flag = False
    """A norm right after the embedding (BLOOM)."""
    embedding_scale: Positive = 1.0
    """What token embeddings are multiplied by (Gemma: the root of `hidden`)."""
    output_scale: Positive = 1.0
    """What the logits of the head are multiplied by (Grok-1)."""
    output_bias: Flag = left_out_at(False)
    """A bias on the logits, one number per word (Phi-2, Phi-3.5-MoE)."""
    attention_scale: Positive | None = None
    """What attention scores are multiplied by; one over the root of a query head's width when absent."""
    attention_logit_cap: Positive | None = None
    """Attention scores are squeezed into plus and minus this by tanh (Gemma 2: 50); no cap when absent."""
    final_logit_cap: Positive | None = None
    """The head's logits likewise (Gemma 2: 30)."""
    parallel_block: Flag = False
    """Attention and feed-forward read the same input (GPT-NeoX, Falcon)."""
    attention_bias: Flag = False
    """Bias on the query, key and value projections (MLA: on the two down-projections)."""
    attention_output_bias: Flag = False
    mlp_bias: Flag = False
    attention_sinks: Flag = False
    """One learned sink logit per head (gpt-oss)."""
    sliding_window: Count | None = None
    """Positions that a query of a windowed layer sees, its own included; no layer is windowed when absent."""
    full_attention_every: CountOrZero = 1
    """With a window or linear attention: every n-th layer attends in full, so `layers // n` are full.
    1: every layer is full; 0: none is. A window without this field is refused: it would change nothing."""
    attention_order: Annotated[str, Field(pattern=r"^[FWLfw]{1,2000}$")] | None = None
    """In place of `full_attention_every`, for any other order: a letter for each layer, F where it attends in
    full, W where the window covers it, L where it has linear attention. f and w: as F and W, on the keys and
    values of the last layer of that kind that made some (small models of Gemma 4), or, under an indexer, on
    the positions that it chose (GLM-5.2)."""
    reusing_ffn_hidden: Count | None = left_out_at(None)
    """Width of the dense feed-forward in layers that reuse keys and values; `ffn_hidden` when absent."""
    layer_inputs: Count | None = left_out_at(None)
    """Elements of a token that each layer reads beside its input, from a token table of its own and from a
    projection of the embedding (small models of Gemma 4, `hidden_size_per_layer_input`)."""
    chunked_windows: Flag = False
    """Windowed layers cut the sequence into chunks of `sliding_window` positions, and a query sees those of
    its own chunk up to itself (Llama 4), instead of the last `sliding_window` positions."""
    window_heads: WindowHeadsSpec | None = left_out_at(None)
    """Key-value heads and width of heads in layers with a window, where others than `kv_heads` and
    `head_dim`, which are then those of layers that attend in full alone (Gemma 4)."""
    values_are_keys: Flag = left_out_at(False)
    """Layers that attend in full have no projection of values, which are the keys from before their norm and
    rotation. Beside windows it needs `window_heads`."""
    attention: MlaSpec | None = None
    block_selection: BlockSelectionSpec | None = left_out_at(None)
    """Indexers of some layers that are left out of training: attention is priced in full in every layer, as
    Megatron-Bridge trains it (MiniMax-M3)."""
    attention_output_gate: Flag = False
    """What attention returns is multiplied by a gate as wide as the queries (Qwen3-Next)."""
    attention_head_gates: Flag = left_out_at(False)
    """What attention returns is multiplied by one number for each head, made of what the layer reads
    (Step 3.5, Laguna, Ling 3.0)."""
    linear_attention: LinearAttentionSpec | None = None
    """Stands in place of attention in all layers but each n-th, n being `full_attention_every`."""
    mamba: Mamba2Spec | None = None
    """Stands where `hybrid_pattern` says so, or beside attention in every layer."""
    mamba1: Mamba1Spec | None = None
    """Mamba-1 in its place: stands where `hybrid_pattern` says so."""
    hybrid_pattern: Annotated[str, Field(pattern=r"^[M*E-]{1,2000}$")] | None = None
    """One block a layer: M Mamba, * attention, - feed-forward, E experts, a character each (Nemotron-H,
    arXiv 2504.03624, section 2.1; Megatron-LM's `--hybrid-layer-pattern`). None: two blocks a layer."""
    mamba_beside_attention: Flag = False
    """Each layer adds up what attention and Mamba-2 make of one input, ahead of its feed-forward (Falcon-H1,
    arXiv 2507.22448, section 2.1)."""
    attention_note: str | None = Field(default=None, max_length=2000)
    left_out: tuple[Annotated[str, Field(max_length=300)], ...] = Field(default=(), max_length=200)
    """Fields of the file that was read, with their values, which nothing above holds: launches name them."""
    stored_as: Annotated[str, Field(max_length=100)] | None = left_out_at(None)
    """How the checkpoint of the file that was read keeps its matrices, where not in 16 or 32 bits: method and
    bits of `quantization_config` (fp8, mxfp4, awq 4-bit, bitsandbytes 4-bit)."""
    mtp_layers: CountOrZero = 0
    """Multi-token-prediction modules (DeepSeek-V3, 2.2): one extra layer each, and the head once more. They
    are trained, but not part of the totals that authors state."""
    mtp_pattern: Annotated[str, Field(pattern=r"^[*E-]{1,20}$")] | None = left_out_at(None)
    """Blocks of such a module beside `hybrid_pattern` (Nemotron 3: *E, attention and experts)."""
    mtp_shared: Flag = left_out_at(False)
    """Whether the modules are one set of weights that runs `mtp_layers` times (Nemotron 3;
    Megatron-LM's `--mtp-use-repeated-layer`)."""
    moe: MoeSpec | None = None
    vision: VisionSpec | None = left_out_at(None)
    """The image encoder in front of it, which no other field and no count of the language model holds."""
    published_parameters: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Total parameters as published (see `source`), above 0, for the tests."""
    source: str | None = Field(default=None, max_length=2000)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.head_dim is None and self.attention is None and self.hidden % self.heads:
            raise ValueError(
                f"hidden {self.hidden} is not a multiple of heads {self.heads}: give head_dim"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if self.moe is not None and self.moe.dense_layers > self.layers:
            raise ValueError(
                f"moe.dense_layers {self.moe.dense_layers} is more than layers {self.layers}"
            )
        if self.experts_every > 1:
            self._check_every(self.experts_every)
        if self.mamba_beside_attention and self.mamba is None:
            raise ValueError("mamba_beside_attention needs mamba")
        if self.hybrid_pattern is not None or self.state_space is not None:
            self._check_hybrid()
        if self.moe is None and self.ffn_hidden == 0 and self.blocks.feed_forward:
            raise ValueError("ffn_hidden must be at least 1 in a dense model")
        if self.moe is not None and self.moe.dense_layers and self.ffn_hidden == 0:
            raise ValueError("ffn_hidden must be at least 1 when moe.dense_layers is")
        if self.vision is not None and self.vision.out_hidden != self.hidden:
            raise ValueError(
                f"vision.out_hidden {self.vision.out_hidden} must be hidden {self.hidden}"
            )
        self._check_windows()
        self._check_window_heads()
        self._check_reuse()
        self._check_heads()
        if self.linear_attention is not None:
            self._check_linear_attention()
        if self.norms_after_blocks and self.norms_per_layer != 2:
            raise ValueError("norms_after_blocks needs norms_per_layer: 2")
        if self.qk_norm_full_width and not self.qk_norm:
            raise ValueError("qk_norm_full_width needs qk_norm: true")
        self._check_token_prediction()
        return self

    def _check_token_prediction(self) -> None:
        """Raises ValueError where the blocks of prediction modules do not fit the rest of the model."""
        pattern = self.mtp_pattern
        if self.mtp_layers and self.mamba_beside_attention:
            raise ValueError("mamba_beside_attention with mtp_layers is not supported")
        if (pattern is not None) != (self.hybrid_pattern is not None and self.mtp_layers > 0):
            raise ValueError("mtp_pattern and mtp_layers beside hybrid_pattern need each other")
        if pattern is not None and ("E" in pattern) > (self.moe is not None):
            raise ValueError("mtp_pattern has experts, E, and the model has no moe")
        if pattern is not None and ("-" in pattern) > (self.ffn_hidden > 0):
            raise ValueError("ffn_hidden must be at least 1 where mtp_pattern has a -")
        if self.mtp_shared and not self.mtp_layers:
            raise ValueError("mtp_shared has no use without mtp_layers")

    def _check_every(self, every: int) -> None:
        """Raises ValueError where experts in each n-th layer do not fit the rest of the model."""
        if self.layers % every:
            raise ValueError(f"layers {self.layers} must be a multiple of moe.every {every}")
        if self.ffn_hidden == 0:
            raise ValueError("ffn_hidden must be at least 1 when moe.every is more than 1")
        for field in ("hybrid_pattern", "state_space", "mtp_layers"):
            if getattr(self, field):
                raise ValueError(f"moe.every with {field} is not supported")

    def _check_windows(self) -> None:
        """Raises ValueError where it is not said which layers a window covers."""
        if self.chunked_windows and self.sliding_window is None:
            raise ValueError("chunked_windows needs sliding_window, the length of a chunk")
        if self.attention_order is not None:
            self._check_order(self.attention_order)
        elif (
            self.sliding_window is not None and "full_attention_every" not in self.model_fields_set
        ):
            raise ValueError(
                "sliding_window needs full_attention_every: 0 where every layer is windowed, "
                "n where each n-th layer attends in full; or attention_order, a letter for each layer"
            )

    def _check_window_heads(self) -> None:
        """Raises ValueError where heads of windowed layers do not fit the layers or the rest of the model."""
        windowed = self.window_heads
        if windowed is None:
            if self.values_are_keys and (self.windowed_layers or self.attention is not None):
                raise ValueError(
                    "values_are_keys needs window_heads, or layers that all attend in full"
                )
            return
        heads = windowed.heads or self.heads
        if heads % windowed.kv_heads:
            name = "heads" if windowed.heads is None else "window_heads.heads"
            raise ValueError(
                f"{name} {heads} must be a multiple of window_heads.kv_heads {windowed.kv_heads}"
            )
        if not (self.windowed_layers and self.full_attention_layers):
            raise ValueError(
                "window_heads needs layers with a window and layers that attend in full"
            )
        for field in ("attention", "mtp_layers", "hybrid_pattern", "state_space"):
            if getattr(self, field):
                raise ValueError(f"window_heads with {field} is not supported")
        if self.qk_norm_full_width:
            raise ValueError("window_heads with qk_norm_full_width is not supported")

    def _check_reuse(self) -> None:
        """Raises ValueError where layers reuse what no layer makes, or layer inputs do not fit."""
        order = self.attention_order or ""
        reused = {letter for letter in order if letter.islower()}
        for letter in reused:
            if letter.upper() not in order[: order.index(letter)]:
                raise ValueError(
                    f"attention_order has {letter} ahead of any {letter.upper()}, which it would reuse"
                )
        if reused and self.attention is not None and self.indexer is None:
            raise ValueError("f in attention_order with latent attention needs attention.indexer")
        if reused and self.attention is None and self.mtp_layers:
            raise ValueError("f or w in attention_order with mtp_layers is not supported")
        if self.reusing_ffn_hidden is not None and (not reused or self.moe is not None):
            raise ValueError("reusing_ffn_hidden needs f or w in attention_order, and no moe")
        if self.layer_inputs is not None:
            for field in ("moe", "mtp_layers", "hybrid_pattern", "state_space"):
                if getattr(self, field):
                    raise ValueError(f"layer_inputs with {field} is not supported")
            if not self.tied_embeddings:
                raise ValueError("layer_inputs needs tied_embeddings: true")

    def _check_heads(self) -> None:
        """Raises ValueError where widths or gates of heads do not fit the rest of attention."""
        unlike = (
            "values_are_keys",
            "attention_output_gate",
            "mtp_layers",
            "hybrid_pattern",
            "state_space",
        )
        beside_values = ("attention", "linear_attention")
        for name, divisor in (
            ("value_head_dim", beside_values),
            ("attention_head_gates", ("indexer",)),
        ):
            for field in (*divisor, *unlike):
                if getattr(self, name) and getattr(self, field):
                    raise ValueError(f"{name} with {field} is not supported")

    def _check_order(self, order: str) -> None:
        """Raises ValueError where the letters fit neither the layers nor what other fields say of them."""
        if self.full_attention_every != 1:
            raise ValueError("attention_order and full_attention_every exclude each other")
        if len(order) != self.layers:
            raise ValueError(f"attention_order has {len(order)} letters, layers is {self.layers}")
        if (WINDOWED in order.upper()) != (self.sliding_window is not None):
            raise ValueError(
                "sliding_window and layers that it covers, W in attention_order, need each other"
            )
        if (LINEAR in order) != (self.linear_attention is not None):
            raise ValueError(
                "linear_attention and layers that have it, L in attention_order, need each other"
            )
        if set(order) == {FULL}:
            raise ValueError("attention_order without W or L says nothing: leave it out")

    def _check_linear_attention(self) -> None:
        if self.attention_order is None and "full_attention_every" not in self.model_fields_set:
            raise ValueError(
                "linear_attention needs full_attention_every: n where each n-th layer attends in full"
            )
        for field in ("sliding_window", "attention"):
            latent_beside_kda = field == "attention" and self._has_kda
            if getattr(self, field) and not latent_beside_kda:
                raise ValueError(f"linear_attention with {field} is not supported")
        if self.indexer is not None:
            raise ValueError("linear_attention with attention.indexer is not supported")

    @property
    def _has_kda(self) -> bool:
        return self.linear_attention is not None and self.linear_attention.type == "kda"

    def _check_hybrid(self) -> None:
        """Raises ValueError where pattern, Mamba-2 and experts do not fit each other."""
        pattern = self.hybrid_pattern
        if self.mamba is not None and self.mamba1 is not None:
            raise ValueError("mamba, which is Mamba-2, and mamba1 exclude each other")
        if (self.state_space is None) == (pattern is None or "M" in pattern):
            raise ValueError("mamba and layers that have it, M in hybrid_pattern, need each other")
        if pattern is None and self.mamba1 is not None:
            raise ValueError("mamba1 needs hybrid_pattern")
        if pattern is None and not self.mamba_beside_attention:
            raise ValueError("mamba needs hybrid_pattern or mamba_beside_attention: true")
        for field in ("sliding_window", "attention", "linear_attention"):
            if getattr(self, field):
                raise ValueError(f"Mamba or hybrid_pattern with {field} is not supported")
        if pattern is None:
            return
        if len(pattern) != self.layers:
            raise ValueError(f"hybrid_pattern has {len(pattern)} layers, layers is {self.layers}")
        if self.mamba_beside_attention:
            raise ValueError("mamba_beside_attention has no use with hybrid_pattern")
        if (self.moe is None) == ("E" in pattern):
            raise ValueError("moe and layers with experts, E in hybrid_pattern, need each other")
        if self.moe is not None and self.moe.dense_layers:
            raise ValueError("moe.dense_layers has no use with hybrid_pattern, which places them")
        if "-" in pattern and self.ffn_hidden == 0:
            raise ValueError("ffn_hidden must be at least 1 where hybrid_pattern has a -")

    @property
    def blocks(self) -> BlockShares:
        """Blocks of a mean layer: of a layer with experts where the model has them, else of a dense one."""
        return self.blocks_of(experts=self.moe is not None)

    def blocks_of(self, *, experts: bool) -> BlockShares:
        """Blocks of a layer with experts or of a dense one; of unlike layers all are the mean layer.

        Parameters
        ----------
        experts
            Which of them, where the model has layers of both.
        """
        if self.hybrid_pattern is not None:
            return pattern_shares(self.hybrid_pattern)
        if self.experts_every > 1:
            share = 1.0 / self.experts_every
            return BlockShares(1.0, 0.0, 1.0 - share, share)
        beside = 1.0 if self.mamba_beside_attention else 0.0
        return BlockShares(1.0, beside, 0.0 if experts else 1.0, 1.0 if experts else 0.0)

    @property
    def mtp_kind(self) -> LayerKind:
        """One multi-token-prediction module: the blocks of `mtp_pattern`, or a main layer.

        That attends in full where others have linear attention: Megatron-LM builds it as the last layer.
        """
        if self.mtp_pattern is not None:
            blocks = (float(self.mtp_pattern.count(symbol)) for symbol in "*M-E")
            return LayerKind(BlockShares(*blocks), AttentionShares())
        attention = AttentionShares() if self.linear_layers else self.attention_shares
        return LayerKind(self.blocks_of(experts=self.moe is not None), attention)

    @property
    def mtp_weights(self) -> int:
        """Multi-token-prediction modules with weights of their own."""
        return 1 if self.mtp_shared else self.mtp_layers

    @property
    def mtp_differs(self) -> bool:
        """Whether a multi-token-prediction module is unlike a main layer."""
        return self.mtp_layers > 0 and (self.mtp_pattern is not None or self.linear_layers > 0)

    @property
    def has_mean_layers(self) -> bool:
        """Whether layers differ in their blocks all along the model, and are counted by their mean."""
        return self.hybrid_pattern is not None or self.experts_every > 1

    @property
    def experts_every(self) -> int:
        """The n of 'each n-th layer has experts'; 1 in a dense model too."""
        return 1 if self.moe is None else self.moe.every

    @property
    def encoder(self) -> VisionSpec | None:
        """The image encoder that runs; None where text alone is trained on."""
        return None if self.vision is None or self.vision.use is None else self.vision

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate matrix (three matrices, not two)."""
        return self.activation in ("swiglu", "geglu")

    @property
    def latent_size(self) -> int | None:
        """Width that the hidden one is projected to ahead of routed experts; None where they read itself."""
        return None if self.moe is None else self.moe.latent_size

    @property
    def routed_width(self) -> int:
        """Width of what routed experts read and write: the hidden width, or what that is projected to."""
        return self.hidden if self.latent_size is None else self.latent_size

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head."""
        if self.attention is not None:
            return self.attention.qk_nope_head_dim + self.attention.qk_rope_head_dim
        return self.head_dim or self.hidden // self.heads

    @property
    def v_head_dim(self) -> int:
        """Width of one value head."""
        if self.attention is not None:
            return self.attention.v_head_dim
        return self.value_head_dim or self.qk_head_dim

    @property
    def indexer(self) -> SparseIndexerSpec | None:
        """What chooses positions in every layer; None where queries attend to all of them."""
        return None if self.attention is None else self.attention.indexer

    @property
    def dense_layers(self) -> int:
        """Layers with a dense feed-forward (all of them in a dense model); they come first."""
        return self.layers if self.moe is None else self.moe.dense_layers

    @property
    def moe_layers(self) -> int:
        """Layers with experts; every layer, the mean of all, where `has_mean_layers`."""
        return self.layers - self.dense_layers

    @property
    def has_dense_feed_forward(self) -> bool:
        """Whether some layer has a dense feed-forward."""
        if self.hybrid_pattern is not None:
            return "-" in self.hybrid_pattern
        return self.dense_layers > 0 or self.has_mean_layers

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts, from 0; none in a dense model."""
        if self.moe is None:
            return ()
        if self.hybrid_pattern is None:
            first = self.moe.dense_layers or self.moe.every - 1
            return tuple(range(first, self.layers, self.moe.every))
        return tuple(i for i, block in enumerate(self.hybrid_pattern) if block == "E")

    @property
    def state_space(self) -> Mamba1Spec | Mamba2Spec | None:
        """The model's Mamba, of either kind."""
        return self.mamba1 if self.mamba is None else self.mamba

    @property
    def mamba_layers(self) -> int:
        """Layers with Mamba."""
        if self.hybrid_pattern is not None:
            return self.hybrid_pattern.count("M")
        return self.layers if self.mamba_beside_attention else 0

    @property
    def full_attention_layers(self) -> int:
        """Layers whose queries see every earlier position."""
        if self.hybrid_pattern is not None:
            return self.hybrid_pattern.count("*")
        if self.sliding_window is None and self.linear_attention is None:
            return self.layers
        if self.attention_order is not None:
            return self.attention_order.upper().count(FULL)
        return self.layers // self.full_attention_every if self.full_attention_every else 0

    @property
    def attention_letters(self) -> str:
        """How each layer attends, in the layers' order, as in `attention_order`; not of a hybrid pattern."""
        if self.attention_order is not None:
            return self.attention_order
        if self.sliding_window is None and self.linear_attention is None:
            return FULL * self.layers
        narrow_kind = LINEAR if self.linear_attention is not None else WINDOWED
        return letters(self.layers, self.full_attention_every, narrow_kind)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """What each layer is, in their order: how it attends and what follows, or the block of a pattern."""
        if self.hybrid_pattern is not None:
            return tuple(BLOCK_NAMES[block] for block in self.hybrid_pattern)
        routed = set(self.expert_layers)
        return tuple(
            f"{ATTENTION_NAMES[letter]} attention and {'experts' if i in routed else 'feed-forward'}"
            for i, letter in enumerate(self.attention_letters)
        )

    _layers_ahead: int = PrivateAttr(default=0)
    """First layers that run forward alone (`with_layers_ahead`), at least 0."""

    @cached_property
    def unlike_layers(self) -> tuple[str, ...]:
        """Blocks of each layer where parts of a pipeline may hold unlike ones, in the layers' order.

        Entries of `symbols`, with `AHEAD` behind those of layers that run forward alone. Empty where layers
        are alike, but for dense ones in front of those with experts.
        """
        if self._layers_ahead:
            return self._marked(self.symbols)
        if self.hybrid_pattern is not None:
            return self.symbols if len(set(self.symbols)) > 1 else ()
        if len(set(self.attention_letters)) == 1 and not self.has_mean_layers:
            return ()
        return self.symbols

    @cached_property
    def unlike_bytes(self) -> tuple[str, ...]:
        """`unlike_layers` where these differ in their bytes too, a window written as full attention.

        A window with heads of its own stays a window. Empty where all layers behind the dense ones in front
        have as many parameters and save as much.
        """
        if self.hybrid_pattern is not None:
            return self.unlike_layers
        attends = self.attention_letters
        if not self.kinds_apart:
            attends = attends.replace(WINDOWED, FULL)
        layers = self._with_letters(attends)
        if self._layers_ahead:
            return self._marked(layers)
        behind = set(layers[self.dense_layers :]) or set(layers)
        return layers if len(behind) > 1 else ()

    @property
    def symbols(self) -> tuple[str, ...]:
        """A symbol of `hybrid_pattern` for each layer, or how it attends with E for experts and - without."""
        if self.hybrid_pattern is not None:
            return tuple(self.hybrid_pattern)
        return self._with_letters(self.attention_letters)

    def _with_letters(self, attends: str) -> tuple[str, ...]:
        routed = set(self.expert_layers)
        return tuple(letter + ("E" if i in routed else "-") for i, letter in enumerate(attends))

    def _marked(self, layers: tuple[str, ...]) -> tuple[str, ...]:
        ahead = self._layers_ahead
        return (*(symbols + AHEAD for symbols in layers[:ahead]), *layers[ahead:])

    def with_layers_ahead(self, number: int) -> ModelSpec:
        """The model as it is trained where so many of its first layers run forward alone.

        Parameters
        ----------
        number
            From 0 to `layers`.
        """
        model = type(self).model_validate(self.model_dump(exclude_unset=True))
        model._layers_ahead = number
        return model

    def kind_of(self, symbols: str) -> LayerKind:
        """The layer that an entry of `unlike_layers` or `unlike_bytes` names.

        Parameters
        ----------
        symbols
            An entry of `symbols`, with or without `AHEAD`.
        """
        if self.hybrid_pattern is not None:
            return LayerKind(pattern_shares(symbols[:1]), AttentionShares())
        experts = float(symbols[1] == "E")
        attention = self._shares_of(symbols[:1])
        return LayerKind(BlockShares(1.0, 0.0, 1.0 - experts, experts), attention)

    def _shares_of(self, attends: str) -> AttentionShares:
        """How much of the attention of so many layers, a letter each, is of which kind."""
        if not self.kinds_apart:
            attends = attends.replace(WINDOWED, FULL)
        beside = [attends.count(letter) / len(attends) for letter in "WLfw"]
        return AttentionShares(1.0 - sum(beside) if FULL in attends else 0.0, *beside)

    @property
    def in_full(self) -> ModelSpec:
        """The model, were all its layers as those that attend in full; itself where kinds are alike."""
        return self.kinds_apart.get(FULL, self)

    @property
    def in_windows(self) -> ModelSpec:
        """The model, were all its layers as those with a window; itself where kinds are alike."""
        return self.kinds_apart.get(WINDOWED, self)

    @cached_property
    def kinds_apart(self) -> dict[str, ModelSpec]:
        """By letter of `attention_letters` the model, were all its layers of that kind.

        Empty where layers with softmax attention have the same matrices.
        """
        order, windowed = self.attention_order or "", self.window_heads
        reused = {letter for letter in order if letter.islower()}
        if windowed is None and not reused:
            return {}
        no_window = ("sliding_window", "full_attention_every", "chunked_windows", "window_heads")
        kinds = {FULL: self._of_one_kind(*no_window)}
        if windowed is not None:
            kinds[WINDOWED] = self._of_one_kind(
                "values_are_keys",
                heads=windowed.heads or self.heads,
                kv_heads=windowed.kv_heads,
                head_dim=windowed.head_dim,
                attention_sinks=self.attention_sinks or windowed.sinks,
                full_attention_every=0,
            )
        elif WINDOWED in order:
            kinds[WINDOWED] = self._of_one_kind(full_attention_every=0)
        width = self.reusing_ffn_hidden or self.ffn_hidden
        for letter in sorted(reused):
            kinds[letter] = kinds[letter.upper()]._of_one_kind(ffn_hidden=width)
            kinds[letter]._reuses = True
        return kinds

    _reuses: bool = PrivateAttr(default=False)

    @cached_property
    def reuses(self) -> bool:
        """Whether it is one of `kinds_apart` whose layers reuse what an earlier layer made."""
        return self._reuses

    @cached_property
    def stage_begins(self) -> tuple[int, ...]:
        """Layers, from 0, at which a stage of a pipeline may begin; empty where at any.

        What layers reuse of an earlier one does not cross stages: Megatron-LM asks for that of indexers
        (experimental_attention_variant_module_specs.py, _validate_dsa_index_share_pipeline_split).
        """
        order = self.attention_order or ""
        begins = set(range(self.layers))
        for layer, letter in enumerate(order):
            if letter.islower():
                begins -= set(range(order.rindex(letter.upper(), 0, layer) + 1, layer + 1))
        return tuple(sorted(begins)) if len(begins) < self.layers else ()

    @property
    def most_stages(self) -> int:
        """Stages of a pipeline, at the most, of which each has a layer."""
        return len(self.stage_begins) or self.layers

    @property
    def most_heads(self) -> int:
        """Query heads of the kind of layer that has most."""
        return max(kind.heads for kind in self.kinds_apart.values() or (self,))

    @property
    def widest_feed_forward(self) -> int:
        """Width of the dense feed-forward in the kind of layer whose is widest."""
        return max(self.ffn_hidden, self.reusing_ffn_hidden or 0)

    def _of_one_kind(self, *without: str, **fields: int) -> ModelSpec:
        """The model with layers that attend alike, without some fields and with others."""
        left_out = {"window_heads", "attention_order", "reusing_ffn_hidden", *without}
        stated = self.model_dump(exclude_unset=True, exclude=left_out)
        return type(self).model_validate(stated | fields)

    @property
    def further_norms(self) -> int:
        """Norms over the hidden width that a layer has beside one ahead of each block, where they are priced.

        They are where values have a norm too (Gemma 4), that of its router included; those behind the blocks
        of Gemma 2 and 3 are not (docs/limits.md).
        """
        if not self.value_norm:
            return 0
        in_router = self.moe is not None and self.moe.router_scales
        return max(self.norms_per_layer - 2, 0) + in_router

    @property
    def attention_kinds(self) -> tuple[AttentionShares, ...]:
        """A layer of each kind of softmax attention with heads of its own; else the mean layer alone."""
        if not self.kinds_apart:
            return (self.attention_shares,)
        return tuple(self._shares_of(letter) for letter in self.kinds_apart)

    @cached_property
    def attention_shares(self) -> AttentionShares:
        """Attention of each kind in the mean of the layers that have attention."""
        if self.kinds_apart:
            return self._shares_of(self.attention_letters)
        linear = self.linear_fraction
        return AttentionShares(full=1.0 - linear, linear=linear)

    @property
    def indexing_layers(self) -> int:
        """Layers with an indexer of their own; 0 where queries attend to all positions."""
        return 0 if self.indexer is None else self.attention_letters.count(FULL)

    @property
    def windowed_layers(self) -> int:
        """Layers whose queries see at most `sliding_window` positions."""
        return 0 if self.sliding_window is None else self.layers - self.full_attention_layers

    @property
    def linear_layers(self) -> int:
        """Layers with linear attention."""
        return 0 if self.linear_attention is None else self.layers - self.full_attention_layers

    @property
    def linear_fraction(self) -> float:
        """Layers with linear attention over all layers, from 0 to 1."""
        return self.linear_layers / self.layers

    @property
    def full_attention_fraction(self) -> float:
        """Full-attention layers over all layers, from 0 to 1."""
        return self.full_attention_layers / self.layers


# What a model's specification says beyond the defaults, field by field.


_ABOUT_THE_FILE = frozenset(
    ("name", "attention_note", "published_parameters", "source", "left_out", "stored_as")
)
_ABOUT_ADAPTERS = frozenset(("linear_attention.own_gates",))
"""Fields that say how a network is cut into matrices, not what it computes."""


def stated_fields(model: ModelSpec) -> dict[str, object]:
    """The fields that are not at their default and bear on what the language model computes, by dotted name.

    Parameters
    ----------
    model
        As it was read.

    >>> from meshwright.model_specs.reader import load_catalog_model
    >>> stated_fields(load_catalog_model("llama-3-8b"))["rope.base"]
    500000.0
    """
    fields = _differing(model, "")
    return {
        name: value
        for name, value in fields.items()
        if name not in _ABOUT_THE_FILE | _ABOUT_ADAPTERS and not name.startswith("vision.")
    }


def _differing(part: BaseModel, prefix: str) -> dict[str, object]:
    fields: dict[str, object] = {}
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            fields |= _differing(value, f"{prefix}{name}.")
        elif field.is_required() or value != field.default:
            fields[f"{prefix}{name}"] = value
    return fields
