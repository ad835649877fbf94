"""Exact parameter counts of a model, part by part.

Totals leave out the multi-token-prediction modules, as the totals that authors state do (DeepSeek-V3: 671B
without them); add `mtp_parameters` for what is trained. Counts are for the whole model, before any sharding.
"""

from __future__ import annotations

from collections.abc import Callable

from meshwright.model_specs.blocks import Mamba1Spec, MlaSpec, VisionSpec
from meshwright.model_specs.schema import ModelSpec


def parameter_count(model: ModelSpec) -> int:
    """All parameters: embedding, layers with every expert, final norm and head, without the MTP modules.

    Parameters
    ----------
    model
        Layers of each of its kinds count as often as it has them.
    """
    around = embedding_parameters(model) + norm_parameters(model) + head_parameters(model)
    around += block_selection_parameters(model)
    if model.hybrid_pattern is not None:
        return around + _hybrid_layer_parameters(model, model.hybrid_pattern)
    with_experts = len(model.expert_layers)
    return (
        around
        + (model.layers - with_experts) * dense_layer_parameters(model)
        + with_experts * moe_layer_parameters(model)
        + model.linear_layers * (linear_attention_parameters(model) - attention_parameters(model))
        + of_kinds_apart(
            model, lambda kind: attention_parameters(kind) + dense_mlp_parameters(kind)
        )
        + model.mamba_layers * mamba_parameters(model)
    )


def of_kinds_apart(model: ModelSpec, of_layer: Callable[[ModelSpec], int]) -> int:
    """What layers have of something over as many layers that attend in full and reuse nothing.

    Parameters
    ----------
    model
        The model, whose kinds of layers are asked about one by one.
    of_layer
        What attention and dense feed-forward of one layer have of it, in a model of such layers alone.
    """
    if not model.kinds_apart:
        return 0
    letters, of_full = model.attention_letters, of_layer(model)
    kinds = model.kinds_apart.items()
    return sum(letters.count(letter) * (of_layer(kind) - of_full) for letter, kind in kinds)


def _hybrid_layer_parameters(model: ModelSpec, pattern: str) -> int:
    """The layers of a pattern, each of them one block and its norms."""
    of_blocks = {
        "M": mamba_parameters(model),
        "*": attention_parameters(model),
        "-": dense_mlp_parameters(model),
        "E": _experts_and_router(model),
    }
    blocks = sum(pattern.count(symbol) * number for symbol, number in of_blocks.items())
    return blocks + len(pattern) * norm_parameters_per_layer(model)


def active_parameter_count(model: ModelSpec, *, input_embedding: bool = True) -> int:
    """Parameters that one token uses: the total without the experts that it is not routed to.

    The input embedding and position tables count in full, as most authors have it (Mixtral 12.9B, OLMoE
    1.3B); with `input_embedding=False` the token table counts only where the head reuses it (gpt-oss: 5.1B).

    Parameters
    ----------
    model
        Of whose experts `top_k` a layer count.
    input_embedding
        Whether tables count that tokens are looked up in.
    """
    active = parameter_count(model)
    if model.moe is not None:
        idle_experts = model.moe.experts - model.moe.top_k
        active -= len(model.expert_layers) * idle_experts * expert_parameters(model)
    if input_embedding:
        return active
    reused = model.vocab * model.hidden if model.tied_embeddings else 0
    return active - embedding_parameters(model) + reused


def attention_parameters(model: ModelSpec) -> int:
    """Attention of one layer: projections, biases, query and key norms, MLA rank norms, sinks. A gate on its
    output comes from the projection of the queries, biased as they are.

    MLA follows DeepSeek-V2, arXiv 2405.04434, appendix C; its biases lie on the down-projections, as in the
    published implementation. An indexer of positions counts too.

    Parameters
    ----------
    model
        Its layers that attend in full; those of another kind are asked of one of `kinds_apart`.
    """
    mla = model.attention
    if mla is not None:
        norms = mla.kv_lora_rank + (mla.q_lora_rank or 0) + _indexer_norm(model)
        qkv_bias = mla.kv_lora_rank + mla.qk_rope_head_dim + (mla.q_lora_rank or 0)
    else:
        own_keys = 0 if model.reuses else 1
        normed_heads = 1 + own_keys
        if model.qk_norm_full_width:
            normed_heads = model.heads + own_keys * model.kv_heads
        has_weights = model.qk_norm and model.qk_norm_weights
        norms = model.qk_head_dim * normed_heads if has_weights else 0
        gated = 2 if model.attention_output_gate else 1
        qkv_bias = gated * model.heads * model.qk_head_dim
        qkv_bias += model.kv_heads * _projected_of_head(model)
    parameters = attention_matmul_parameters(model) + norms
    if model.attention_bias:
        parameters += qkv_bias
    if model.attention_output_bias:
        parameters += model.hidden
    if model.attention_sinks:
        parameters += model.heads
    return parameters


def whole_attention_parameters(model: ModelSpec) -> int:
    """Of `attention_parameters`, those that every tensor-parallel rank holds whole.

    MLA's down-projections and indexer (megatron/core/extensions/transformer_engine.py, TELinear,
    parallel_mode "duplicated"; torchtitan/models/deepseek_v3/sharding.py, replicate_weight), norms and the
    output's bias.

    Parameters
    ----------
    model
        As `attention_parameters` takes it.
    """
    mla = model.attention
    count = model.hidden if model.attention_output_bias else 0
    if mla is not None:
        rank = mla.kv_lora_rank + (mla.q_lora_rank or 0)
        down = rank + mla.qk_rope_head_dim
        count += indexer_matrices(model) + _indexer_norm(model)
        return count + rank + down * (model.hidden + (1 if model.attention_bias else 0))
    if model.qk_norm and model.qk_norm_weights and not model.qk_norm_full_width:
        count += (1 if model.reuses else 2) * model.qk_head_dim
    return count


def linear_attention_parameters(model: ModelSpec) -> int:
    """Linear attention of one layer that has it; 0 in a model without.

    Projections, a convolution over queries, keys and values, two numbers a value head (step and decay) and
    the norm of a head's output (megatron/core/ssm/gated_delta_net/common.py, _GDNBase). Kimi Delta Attention
    has a step for each channel of the keys (transformers 5.23, models/kimi_linear, KimiLinearForgetGate);
    lightning attention neither numbers nor convolution, and one norm over all heads (models/minimax,
    MiniMaxLightningAttention). Between the projections of a short convolution is nothing else (models/lfm2,
    Lfm2ShortConv).

    Parameters
    ----------
    model
        Its layers with linear attention.
    """
    linear = model.linear_attention
    if linear is None:
        return 0
    convolution = linear.conv_kernel * linear.convolved_width
    beside = convolution + linear.numbers + linear.normed_width
    return linear_attention_matmul_parameters(model) + beside


def whole_linear_attention_parameters(model: ModelSpec) -> int:
    """Of `linear_attention_parameters`, those that every tensor-parallel rank holds whole: the norm."""
    return 0 if model.linear_attention is None else model.linear_attention.normed_width


def linear_attention_matmul_parameters(model: ModelSpec) -> int:
    """The projection matrices of one layer with linear attention; 0 in a model without.

    Parameters
    ----------
    model
        Its layers with linear attention.
    """
    linear = model.linear_attention
    if linear is None:
        return 0
    gates = (linear.gate_rank or 0) * (linear.key_width + linear.value_width)
    return model.hidden * (linear.projected_width + linear.value_width) + gates


def mamba_parameters(model: ModelSpec) -> int:
    """Mamba of one layer that has it; 0 in a model without.

    Projections and a convolution. Mamba-2 convolves B and C too and has three numbers a head (step, decay and
    skip) and the weights of the gated norm (megatron/core/ssm/mamba_mixer.py, MambaMixer). Mamba-1 has a
    decay for each number of the state, skip and step of a channel, and perhaps norms (transformers 5.23,
    models/jamba/modeling_jamba.py, JambaMambaMixer).

    Parameters
    ----------
    model
        Its layers with Mamba, of either kind.
    """
    mamba = model.state_space
    if mamba is None:
        return 0
    per_channel = mamba.conv_kernel + (1 if mamba.conv_bias else 0)
    if isinstance(mamba, Mamba1Spec):
        norms = mamba.selected_width if mamba.inner_norms else 0
        inner = (per_channel + mamba.state_dim + 2) * mamba.channels + norms
        return mamba_matmul_parameters(model) + inner
    norm = mamba.width if mamba.gated_norm else 0
    inner = per_channel * mamba.convolved_width + 3 * mamba.heads + norm
    return mamba_matmul_parameters(model) + inner


def mamba_matmul_parameters(model: ModelSpec) -> int:
    """The projection matrices of one layer with Mamba; 0 in a model without.

    Parameters
    ----------
    model
        Its layers with Mamba, of either kind.
    """
    mamba = model.state_space
    if mamba is None:
        return 0
    matrices = model.hidden * (mamba.projected_width + mamba.width)
    if isinstance(mamba, Mamba1Spec):
        matrices += mamba.channels * (mamba.selected_width + mamba.step_rank)
    return matrices


def attention_matmul_parameters(model: ModelSpec) -> int:
    """The projection matrices of one layer's attention, without biases and norms.

    Parameters
    ----------
    model
        As `attention_parameters` takes it.
    """
    if model.attention is not None:
        return _mla_matrices(model, model.attention)
    gates = 1 if model.attention_output_gate else 0
    of_head = (1 + gates) * model.qk_head_dim + model.v_head_dim + model.attention_head_gates
    return model.hidden * (model.heads * of_head + model.kv_heads * _projected_of_head(model))


def _projected_of_head(model: ModelSpec) -> int:
    """Outputs of the projections of a key-value head: keys and values, keys alone that serve as both, or none
    where those of an earlier layer are reused."""
    if model.reuses:
        return 0
    return model.qk_head_dim + (0 if model.values_are_keys else model.v_head_dim)


def _mla_matrices(model: ModelSpec, mla: MlaSpec) -> int:
    query_width = model.heads * model.qk_head_dim
    if mla.q_lora_rank is None:
        queries = model.hidden * query_width
    else:
        queries = mla.q_lora_rank * (model.hidden + query_width)
    down = model.hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    output = model.heads * (mla.v_head_dim + model.attention_head_gates) * model.hidden
    return queries + down + up + output + indexer_matrices(model)


def indexer_matrices(model: ModelSpec) -> int:
    """The projections of one layer's indexer: queries of the latent, one key and weights of the heads; or 0.

    DeepSeek-V3.2, arXiv 2512.02556, section 2.1; transformers, models/deepseek_v32, DeepseekV32Indexer.

    Parameters
    ----------
    model
        As `attention_parameters` takes it; layers that reuse positions have none.
    """
    mla, indexer = model.attention, model.indexer
    if mla is None or indexer is None or model.reuses:
        return 0
    of_hidden = model.hidden * (indexer.head_dim + indexer.heads)
    return (mla.q_lora_rank or model.hidden) * indexer.width + of_hidden


def _indexer_norm(model: ModelSpec) -> int:
    """Scale and shift of the norm on the key of a layer's indexer; 0 without one."""
    return 0 if model.indexer is None or model.reuses else 2 * model.indexer.head_dim


def block_selection_parameters(model: ModelSpec) -> int:
    """The indexers of all layers that choose blocks of positions, which are not trained; 0 without any.

    Queries, one key and a norm on each (transformers 5.24, models/minimax_m3_vl, MiniMaxM3VLIndexer).

    Parameters
    ----------
    model
        With `block_selection`, or without.
    """
    chooses = model.block_selection
    if chooses is None:
        return 0
    return chooses.layers * chooses.head_dim * (model.hidden * (chooses.heads + 1) + 2)


def dense_mlp_parameters(model: ModelSpec) -> int:
    """The feed-forward of one dense layer, with biases; 0 where `ffn_hidden` is 0.

    xIELU has two numbers of its own a layer (Huang and Schlag 2024, arXiv 2411.13010, section 3). What a
    layer reads beside its input counts here too (`layer_input_matrices`).

    Parameters
    ----------
    model
        Its layers that attend in full; those of another kind are asked of one of `kinds_apart`.
    """
    of_activation = 2 if model.activation == "xielu" else 0
    beside = of_activation + layer_input_matrices(model)
    return beside + feed_forward_parameters(model, model.ffn_hidden, bias=model.mlp_bias)


def layer_input_matrices(model: ModelSpec) -> int:
    """The matrices of one layer between the hidden width h and the p elements that it reads besides; or 0.

    3 h p: its share of the projection of the embedding, a gate of those elements and a projection back
    (transformers 5.24, models/gemma4/modeling_gemma4.py, per_layer_model_projection, per_layer_input_gate and
    per_layer_projection).
    """
    return 3 * model.hidden * (model.layer_inputs or 0)


def expert_parameters(model: ModelSpec) -> int:
    """One routed expert of one layer, with biases; 0 in a dense model.

    Parameters
    ----------
    model
        Whose routed experts are all alike.
    """
    if model.moe is None:
        return 0
    moe = model.moe
    return feed_forward_parameters(
        model, moe.moe_ffn_hidden, bias=moe.expert_bias, outside=model.routed_width
    )


def latent_parameters(model: ModelSpec) -> int:
    """The two projections of one layer around its routed experts, with biases; 0 where these read h itself.

    2 h l, and l + h biases: transformers 5.24, models/nemotron_h/modeling_nemotron_h.py, NemotronHMoE,
    fc1_latent_proj and fc2_latent_proj.
    """
    biases = model.hidden + model.routed_width if model.mlp_bias else 0
    matrices = latent_matrices(model)
    return matrices + biases if matrices else 0


def latent_matrices(model: ModelSpec) -> int:
    """Of `latent_parameters`, the matrices: 2 h l."""
    return 2 * model.hidden * (model.latent_size or 0)


def shared_expert_parameters(model: ModelSpec) -> int:
    """The shared experts of one layer together, with their gate; 0 without any."""
    if model.moe is None or model.moe.shared_width == 0:
        return 0
    gate = model.hidden if model.moe.shared_expert_gate else 0
    return feed_forward_parameters(model, model.moe.shared_width, bias=model.mlp_bias) + gate


def router_parameters(model: ModelSpec) -> int:
    """The router of one layer, with its bias and scales; 0 in a dense model."""
    if model.moe is None:
        return 0
    scales = model.hidden + model.moe.experts if model.moe.router_scales else 0
    return model.moe.experts * (model.hidden + (1 if model.moe.router_bias else 0)) + scales


def experts_norm_parameters(model: ModelSpec) -> int:
    """The norm behind the experts of one layer; 0 without one.

    Transformers 5.23, models/axk1/modeling_axk1.py, AXK1MoE.
    """
    return norm_parameters(model) if model.moe is not None and model.moe.output_norm else 0


def norm_parameters_per_layer(model: ModelSpec) -> int:
    """Norms over the hidden width in one layer (those on queries, keys and MLA ranks belong to attention)."""
    return model.norms_per_layer * norm_parameters(model)


def norm_parameters(model: ModelSpec) -> int:
    """One norm over the hidden width, such as the final one: a scale, and a shift in most layer norms; OLMo's
    first generation has neither."""
    return model.hidden * (model.norm_weights + (model.norm == "layernorm" and model.norm_bias))


def dense_layer_parameters(model: ModelSpec) -> int:
    """One layer with a dense feed-forward."""
    return (
        attention_parameters(model) + norm_parameters_per_layer(model) + dense_mlp_parameters(model)
    )


def moe_layer_parameters(model: ModelSpec) -> int:
    """One layer with all its experts; 0 in a dense model."""
    if model.moe is None:
        return 0
    return (
        attention_parameters(model) + norm_parameters_per_layer(model) + _experts_and_router(model)
    )


def _experts_and_router(model: ModelSpec) -> int:
    """The feed-forward of one layer with all its experts, their router included; 0 in a dense model."""
    if model.moe is None:
        return 0
    routed = model.moe.experts * expert_parameters(model) + latent_parameters(model)
    beside = router_parameters(model) + experts_norm_parameters(model)
    return beside + shared_expert_parameters(model) + routed


def embedding_parameters(model: ModelSpec) -> int:
    """Token table, learned positions, and the norm after them where there is one; a table for each layer
    too, with one norm for all, where layers read one.

    Parameters
    ----------
    model
        Its vocabulary is counted as it is, without rows that are padded.
    """
    positions = (model.max_positions or 0) if model.position == "learned" else 0
    norm = norm_parameters(model) if model.embedding_norm else 0
    of_layers = (model.layer_inputs or 0) * (model.layers * model.vocab + 1)
    return (model.vocab + positions) * model.hidden + norm + of_layers


def head_parameters(model: ModelSpec) -> int:
    """The output projection with its bias, without the final norm; no matrix where it is the token table.

    Parameters
    ----------
    model
        Its vocabulary is counted as it is, without rows that are padded.
    """
    bias = model.vocab if model.output_bias else 0
    return bias + (0 if model.tied_embeddings else model.vocab * model.hidden)


def mtp_parameters(model: ModelSpec) -> int:
    """All multi-token-prediction modules: a layer, three norms and a projection each (DeepSeek-V3, 2.2).

    They share the main model's embedding and head, so those do not count again.
    """
    layer = moe_layer_parameters(model) if model.moe_layers else dense_layer_parameters(model)
    if model.mtp_pattern is not None:
        layer = _hybrid_layer_parameters(model, model.mtp_pattern)
    return model.mtp_weights * layer + mtp_join_parameters(model)


def mtp_join_parameters(model: ModelSpec) -> int:
    """Of `mtp_parameters`, what joins the modules to the model: a projection from 2 h to h, three norms."""
    return model.mtp_weights * (2 * model.hidden * model.hidden + 3 * norm_parameters(model))


def feed_forward_parameters(
    model: ModelSpec, width: int, *, bias: bool, outside: int | None = None
) -> int:
    """A feed-forward of `width` columns: gate and up (or up alone) and down; with `bias` their biases too.

    It reads and writes the hidden width, or `outside` where that is given.

    Parameters
    ----------
    model
        For its hidden width, and whether it has a gate.
    width
        Columns of gate and up projection, from 0.
    bias
        Whether each matrix has biases.
    outside
        Elements that are read and written in place of the hidden width, from 1.
    """
    matrices_in = 2 if model.gated else 1
    read = model.hidden if outside is None else outside
    weights = (matrices_in + 1) * read * width
    return weights + (matrices_in * width + read if bias and width else 0)


# The image encoder in front of a language model.


def encoder_layers(vision: VisionSpec) -> ModelSpec:
    """The layers of an image encoder as those of a language model, whose attention is causal there.

    Parameters
    ----------
    vision
        The encoder, whose layers are all alike.
    """
    gated = vision.gated
    return ModelSpec(
        name="image encoder",
        layers=vision.layers,
        hidden=vision.hidden,
        ffn_hidden=vision.ffn_hidden,
        heads=vision.heads,
        kv_heads=vision.heads,
        vocab=1,
        activation="swiglu" if gated else "gelu",
        norm="rmsnorm" if gated else "layernorm",
        position="none" if vision.kind in ("siglip", "mllama") else "rope",
        attention_bias=vision.kind != "mllama",
        attention_output_bias=vision.kind != "mllama",
        mlp_bias=True,
    )


def encoder_parameters(vision: VisionSpec) -> int:
    """Image encoder and projector, as transformers 5.23 builds them.

    Files modeling_qwen2_vl.py, modeling_qwen2_5_vl.py, modeling_qwen3_vl.py, modeling_siglip.py,
    modeling_gemma3.py and modeling_mllama.py of its models. With what the language model has for images
    alone (`VisionSpec.beside`).

    Parameters
    ----------
    vision
        The encoder.
    """
    layers = vision.layers * dense_layer_parameters(encoder_layers(vision))
    return layers + encoder_end_parameters(vision)


def encoder_end_parameters(vision: VisionSpec) -> int:
    """Of `encoder_parameters`, those around the layers: patches, positions, norms, projectors.

    Parameters
    ----------
    vision
        The encoder.
    """
    hidden, out = vision.hidden, vision.out_hidden
    patches = vision.patch_width * hidden + vision.positions * hidden
    if vision.kind == "mllama":
        # Norms ahead of the layers and behind them; the projector has a bias.
        return patches + 4 * hidden + (vision.merged + 1) * out + vision.beside
    if vision.kind == "siglip":
        head = 0
        if vision.pooling_head:
            attention, mlp = 4 * hidden * (hidden + 1), 2 * hidden * vision.ffn_hidden
            head = hidden + attention + 2 * hidden + mlp + vision.ffn_hidden + hidden
        bias_and_norms = hidden + 2 * hidden + hidden
        return patches + bias_and_norms + head + hidden * out
    products = vision.merged * (vision.merged + 1) + (vision.merged + 1) * out
    if vision.kind == "qwen3_vl":
        further = vision.deepstack * (2 * vision.merged + products)
        return patches + hidden + 2 * hidden + products + further
    return patches + (1 if vision.gated else 2) * hidden + products


# Products of weights and activations that a token takes part in, and the FLOPs of training on it.


BACKWARD_AND_FORWARD = 3
"""FLOPs of a matrix product's forward and backward pass over those of its forward pass."""


def active_matmul_parameters(model: ModelSpec) -> int:
    """Weights that multiply every token's activations, the head (tied or not) and the MTP modules included.

    Lookups, norms and biases do no matrix product and are left out; of the experts only `top_k` count.

    Parameters
    ----------
    model
        Of whose experts `top_k` a layer count.

    Returns
    -------
    int
        Elements of matrices that one token passes.
    """
    head = model.vocab * model.hidden
    joined = 2 * model.hidden * model.hidden + head
    if model.hybrid_pattern is not None:
        of_module = _hybrid_matrices(model, model.mtp_pattern or "") + joined
        matrices = _hybrid_matrices(model, model.hybrid_pattern)
        return head + matrices + model.mtp_layers * of_module
    attention = attention_matmul_parameters(model)
    dense_layer = attention + dense_mlp_matrices(model)
    moe_layer = attention + _active_moe_matrices(model)
    mtp_layer = moe_layer if model.moe_layers else dense_layer
    with_experts = len(model.expert_layers)
    mtp_module = mtp_layer + joined
    linear = linear_attention_matmul_parameters(model) - attention
    return (
        (model.layers - with_experts) * dense_layer
        + with_experts * moe_layer
        + model.linear_layers * linear
        + of_kinds_apart(
            model, lambda kind: attention_matmul_parameters(kind) + dense_mlp_matrices(kind)
        )
        + model.mamba_layers * mamba_matmul_parameters(model)
        + head
        + model.mtp_layers * mtp_module
    )


def dense_mlp_matrices(model: ModelSpec) -> int:
    """Of `dense_mlp_parameters`, the matrices."""
    feed_forward = feed_forward_parameters(model, model.ffn_hidden, bias=False)
    return feed_forward + layer_input_matrices(model)


def _hybrid_matrices(model: ModelSpec, pattern: str) -> int:
    """Of `active_matmul_parameters`, those of the layers of a pattern."""
    of_blocks = {
        "M": mamba_matmul_parameters(model),
        "*": attention_matmul_parameters(model),
        "-": feed_forward_parameters(model, model.ffn_hidden, bias=False),
        "E": _active_moe_matrices(model),
    }
    return sum(pattern.count(symbol) * number for symbol, number in of_blocks.items())


def _active_moe_matrices(model: ModelSpec) -> int:
    if model.moe is None:
        return 0
    moe = model.moe
    chosen = feed_forward_parameters(
        model, moe.top_k * moe.moe_ffn_hidden, bias=False, outside=model.routed_width
    )
    shared = feed_forward_parameters(model, moe.shared_width, bias=False)
    gate = model.hidden if moe.shared_expert_gate and moe.shared_width else 0
    return chosen + shared + latent_matrices(model) + moe.experts * model.hidden + gate


def attended_positions(
    seq_len: float, window: int | None = None, *, chunked: bool = False
) -> float:
    """Mean number of positions that a query attends to under a causal mask: half the sequence.

    With a window w shorter than the sequence s the mean is w - w^2 / 2s, the integral of min(t, w) over s.
    Chunks of w instead of a sliding window leave half a chunk, and less in a last chunk that is shorter.
    The half, and not (s + 1) / 2, is the convention of Megatron-LM's FLOP count.

    Parameters
    ----------
    seq_len
        Tokens of a sequence, from 1; the mean of several need not be whole.
    window
        Positions that a query sees at most, its own included; None for all before it.
    chunked
        Whether sequences are cut into chunks of that length.

    Returns
    -------
    float
        Positions, half the sequence at most.
    """
    if window is None or window >= seq_len:
        return seq_len / 2
    if chunked:
        chunks, last_chunk = divmod(seq_len, window)
        return (chunks * window * window + last_chunk * last_chunk) / (2 * seq_len)
    return window - window * window / (2 * seq_len)


def attention_flops_per_token(model: ModelSpec, seq_len: float) -> float:
    """FLOPs of scores and weighted values, or of states instead of them, of one token in all layers.

    Forward and backward; causal. States are those of linear attention and of Mamba. An indexer scores every
    position forward, and has gradients of those that it chose.

    Parameters
    ----------
    model
        Layers of each of its kinds count as often as it has them, those of prediction modules too.
    seq_len
        Tokens of a sequence, from 1.
    """
    of_full, in_windows = (
        2 * kind.heads * (kind.qk_head_dim + kind.v_head_dim) for kind in (model, model.in_windows)
    )
    full = model.full_attention_layers + model.mtp_layers * model.mtp_kind.blocks.attention
    indexer = model.indexer
    chosen = attended_positions(seq_len, None if indexer is None else indexer.top_k)
    windowed = attended_positions(seq_len, model.sliding_window, chunked=model.chunked_windows)
    if of_full == in_windows:
        scores = of_full * (full * chosen + model.windowed_layers * windowed)
    else:
        scores = of_full * full * chosen + in_windows * model.windowed_layers * windowed
    linear = model.linear_layers * _linear_attention_flops(model)
    scans = model.mamba_layers * _mamba_scan_flops(model)
    attended = BACKWARD_AND_FORWARD * (scores + linear + scans)
    if indexer is None:
        return attended
    indexing = model.indexing_layers + full - model.full_attention_layers
    return attended + indexing * 2 * indexer.width * (attended_positions(seq_len) + 2 * chosen)


def _mamba_scan_flops(model: ModelSpec) -> float:
    """Forward FLOPs of one token in the scan of one layer with Mamba: 7 a channel and number of its state.

    As Megatron-LM counts it for Mamba-2 (megatron/training/training.py, mamba_layer_flops), so that MFU
    compares: it leaves the convolution out and does not depend on the chunk.
    """
    mamba = model.state_space
    return 0.0 if mamba is None else 7.0 * mamba.width * mamba.state_dim


def _linear_attention_flops(model: ModelSpec) -> float:
    """Forward FLOPs of one token in the convolution and the states of one layer with linear attention.

    The delta rule makes four products with a head's state of key by value width, as Megatron-LM counts it
    (megatron/training/training.py, gdn_layer_flops). Lightning attention makes two: keys times values, and
    queries times the state (arXiv 2501.08313, section 2.2.1); a short convolution none.
    """
    linear = model.linear_attention
    if linear is None:
        return 0.0
    convolution = linear.conv_kernel * linear.convolved_width
    products = {"lightning": 2, "short_conv": 0}.get(linear.type, 4)
    return 2.0 * (convolution + products * linear.value_width * linear.key_head_dim)


def flops_per_token(
    model: ModelSpec,
    seq_len: float,
    *,
    frozen_weights: bool = False,
    forward_passes: int = 0,
    has_head: bool = True,
) -> float:
    """Model FLOPs of the forward and backward pass of one token in a sequence of `seq_len` tokens.

    6 per active matrix weight (two forward, four backward) plus attention with the causal mask counted half;
    the head and the MTP modules count; recomputation, norms, softmax and the optimizer do not. For a dense
    GPT this is 72 L h^2 (1 + s / 12h + V / 12Lh): Narayanan et al. 2021, arXiv 2104.04473, without its
    recomputed forward pass and with half its attention. Frozen weights have no gradient: 4 per weight; what
    is trained beside them does not count. Each of `forward_passes` without gradients is 2 per weight and a
    third of the attention more. Without `has_head` those of the head over the vocabulary do not count.

    Raises ValueError for a sequence shorter than one token.

    Parameters
    ----------
    model
        Layers of each of its kinds count as often as it has them.
    seq_len
        Tokens of a sequence, from 1; the mean of several need not be whole.
    frozen_weights
        Whether the model's own weights have no gradient.
    forward_passes
        Passes without gradients beside the trained one, such as of a reference model.
    has_head
        Whether the head over the vocabulary runs.

    Returns
    -------
    float
        FLOP.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len must be at least 1, got {seq_len}")
    products = BACKWARD_AND_FORWARD - 1 if frozen_weights else BACKWARD_AND_FORWARD
    weights = active_matmul_parameters(model) - (0 if has_head else model.vocab * model.hidden)
    matrices = 2 * products * weights
    flops = matrices + attention_flops_per_token(model, seq_len)
    if forward_passes:
        attended = attention_flops_per_token(model, seq_len) / BACKWARD_AND_FORWARD
        flops += forward_passes * (2 * weights + attended)
    return flops
