"""What several Hugging Face model families share: decoders, activations, biases, attention windows."""

from __future__ import annotations

from meshwright.model_specs.config_fields import ConfigFields

Fields = dict[str, object]
"""Fields of `ModelSpec`, not yet validated."""

GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_new": "geglu",
    "gelu_fast": "geglu",
    "gelu_pytorch_tanh": "geglu",
}
PLAIN = {
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}


def activation_of(config: ConfigFields, name: str, default: str, names: dict[str, str]) -> str:
    """The schema's name for the activation in this field, which must be one of `names`."""
    written = config.text(name, default)
    if written not in names:
        raise config.fail(name, f"not an activation of this family ({', '.join(names)})", written)
    return names[written]


def gated_decoder(
    config: ConfigFields, *, activation_field: str = "hidden_act", activation: str = "silu"
) -> Fields:
    """What the Llama-like families share: grouped queries, gated feed-forward, rope, RMS norms."""
    heads = config.count("num_attention_heads")
    return {
        "layers": config.layers(),
        "hidden": config.count("hidden_size"),
        "ffn_hidden": config.count("intermediate_size"),
        "heads": heads,
        "kv_heads": config.count("num_key_value_heads", heads),
        "head_dim": config.count("head_dim", optional=True),
        "vocab": config.count("vocab_size"),
        "activation": activation_of(config, activation_field, activation, GATED),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
    }


def attention_biases(config: ConfigFields, default: bool = False) -> Fields:
    """One switch for the biases of all four projections."""
    bias = config.flag("attention_bias", default)
    return {"attention_bias": bias, "attention_output_bias": bias}


def windows(
    config: ConfigFields, window: int | None, every: int, windowed: str = "sliding_attention"
) -> Fields:
    """The window and the layers it covers; `layer_types`, in newer files, overrules the family's `every`.

    There it calls the layers that the window covers `windowed`, and the others "full_attention".
    """
    layers = config.layers()
    kinds = config.entries("layer_types")
    if window is None or not (kinds or every != 1):
        return {}
    if kinds:
        every = _full_every(config, kinds, layers, windowed)
    return {"sliding_window": window, "full_attention_every": every} if every != 1 else {}


def _full_every(config: ConfigFields, kinds: list[object], layers: int, windowed: str) -> int:
    if len(kinds) != layers:
        raise config.fail("layer_types", f"must name all {layers} layers", kinds)
    for kind in kinds:
        if kind not in ("full_attention", windowed):
            raise config.fail("layer_types", f"holds neither full_attention nor {windowed}", kind)
    return one_in(config, "layer_types", kinds.count("full_attention"), layers)


def one_in(config: ConfigFields, name: str, full: int, layers: int) -> int:
    """The n of 'each n-th layer is full' that gives this many full layers."""
    if full == 0:
        return 0
    every = layers // full
    if layers // every != full:
        raise config.fail(
            name,
            f"makes {full} of {layers} layers full, which is no 'one in n': write a model YAML instead",
        )
    return every


def qwen_windows(config: ConfigFields) -> Fields:
    """Qwen: the first `max_window_layers` layers attend in full, and the window is off by default."""
    if not config.flag("use_sliding_window", False):
        return {}
    window = config.count("sliding_window", 4096)
    if config.has("layer_types"):
        return windows(config, window, 1)
    layers = config.layers()
    full = min(config.count("max_window_layers", 28, least=0), layers)
    return windows(config, window, one_in(config, "max_window_layers", full, layers))


def layer_norm_decoder(*, bias: bool) -> Fields:
    """What the GPT-like families share: layer norms, and biases everywhere or nowhere."""
    return {
        "norm": "layernorm",
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
    }
