"""Typed, bounded access to the fields of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import overload

from meshwright.errors import InputError, near_miss
from meshwright.model_specs.blocks import WINDOWED, order_fields

LARGEST_COUNT = 10_000_000
"""As in the schema: no width, vocabulary or number of anything is larger."""
MOST_LAYERS = 2000


class ConfigFields:
    """One mapping of a config.json; every reader raises InputError naming file and field on a wrong value.

    A field that is absent and one that is null read the same.
    """

    def __init__(self, data: Mapping[str, object], where: str, prefix: str = "") -> None:
        self._data = data
        self.where = where
        self._prefix = prefix
        self._read: set[str] = set()
        self._sections: dict[str, ConfigFields] = {}

    def _value(self, name: str) -> object:
        self._read.add(name)
        return self._data.get(name)

    def passed_over(self, *names: str) -> None:
        """Counts fields as read that say nothing beside what the others say."""
        self._read.update(names)

    def unread(self) -> Iterator[tuple[str, object]]:
        """Dotted names and values of the fields that no reader has asked for, but for those that are null."""
        for name, value in self._data.items():
            if name in self._sections:
                yield from ((f"{name}.{inner}", x) for inner, x in self._sections[name].unread())
            elif value is not None and name not in self._read:
                yield name, value

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._value(name) is not None

    def names(self, name: str) -> bool:
        """Whether the field is there, be it null: where null stands for none, and absence for a default."""
        return name in self._data

    def fail(self, name: str, what: str, value: object = ...) -> InputError:
        """An error about one field, for the caller to raise."""
        return InputError(what, where=f"{self.where}: {self._prefix}{name}", value=value)

    @overload
    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int: ...
    @overload
    def count(
        self, name: str, default: int | None = None, *, least: int = 1, optional: bool
    ) -> int | None: ...
    def count(
        self, name: str, default: int | None = None, *, least: int = 1, optional: bool = False
    ) -> int | None:
        """An integer from `least` to ten million; `default` where absent, else an error unless `optional`."""
        value = self._value(name)
        if value is None:
            if default is None and not optional:
                raise self._missing(name)
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, "must be an integer", value)
        if not least <= value <= LARGEST_COUNT:
            raise self.fail(name, f"must be from {least} to {LARGEST_COUNT}", value)
        return value

    def layers(self, name: str = "num_hidden_layers") -> int:
        """The number of layers, from 1 to 2000 as in the schema, so that loops over them stay short."""
        value = self.count(name)
        if value > MOST_LAYERS:
            raise self.fail(name, f"must be from 1 to {MOST_LAYERS}", value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, "must be true or false", value)
        return value

    @overload
    def number(self, name: str, default: float) -> float: ...
    @overload
    def number(self, name: str, default: None = None) -> float | None: ...
    def number(self, name: str, default: float | None = None) -> float | None:
        """A number; the schema bounds it."""
        value = self._value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(name, "must be a number", value)
        return float(value)

    def section(self, name: str) -> ConfigFields | None:
        """The fields of a mapping inside; None where absent."""
        value = self._value(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(name, "must be a mapping of fields", value)
        if name not in self._sections:
            self._sections[name] = ConfigFields(value, self.where, f"{self._prefix}{name}.")
        return self._sections[name]

    def text(self, name: str, default: str) -> str:
        """A text."""
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(name, "must be a text", value)
        return value

    def is_text(self, name: str) -> bool:
        """Whether a field holds a text."""
        return isinstance(self._value(name), str)

    def entries(self, name: str) -> list[object]:
        """A list; empty where absent."""
        value = self._value(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.fail(name, "must be a list", value)
        return value

    def _missing(self, name: str) -> InputError:
        return InputError(
            "this field is required and missing",
            where=f"{self.where}: {self._prefix}{name}",
            did_you_mean=near_miss(name, [key for key in self._data if isinstance(key, str)]),
        )


# What several Hugging Face model families share: decoders, activations, biases, attention windows.


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


ROPE_SCALINGS = ("linear", "dynamic", "llama3", "yarn", "longrope")
"""Values of `rope_type` that the schema has too."""


def activation_of(config: ConfigFields, name: str, default: str, names: dict[str, str]) -> str:
    """The schema's name for the activation in this field, which must be one of `names`."""
    written = config.text(name, default)
    if written not in names:
        raise config.fail(name, f"not an activation of this family ({', '.join(names)})", written)
    return names[written]


def activation_fields(
    config: ConfigFields, name: str, default: str, names: dict[str, str]
) -> Fields:
    """The activation, and of a GELU how it is computed."""
    fields: Fields = {"activation": activation_of(config, name, default, names)}
    if config.text(name, default) == "gelu":
        fields["gelu_form"] = "exact"
    return fields


def gated_decoder(
    config: ConfigFields,
    *,
    activation_field: str = "hidden_act",
    activation: str = "silu",
    norm_epsilon: float = 1e-6,
    rope_base: float = 10_000.0,
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
        "norm_epsilon": config.number("rms_norm_eps", norm_epsilon),
        "rope": rope_fields(config, base=rope_base),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        **activation_fields(config, activation_field, activation, GATED),
    }


def rope_fields(config: ConfigFields, *, base: float = 10_000.0, fraction: float = 1.0) -> Fields:
    """Rotary embeddings: fields of `RopeSpec`.

    Parameters
    ----------
    config
        The file. `rope_parameters`, in newer ones, holds both the base and the scaling; of a model with two
        kinds of layers, for each kind.
    base, fraction
        What the family turns by where the file does not say.
    """
    parameters = config.section("rope_parameters")
    windowed = None
    if parameters is not None and parameters.has("full_attention"):
        windowed = parameters.section("sliding_attention")
        parameters = parameters.section("full_attention")
    scaling = parameters or config.section("rope_scaling")
    base = config.number("rope_theta", base)
    fraction = config.number("partial_rotary_factor", fraction)
    fields: Fields = {"base": base, "fraction": fraction}
    if parameters is not None:
        fields["base"] = parameters.number("rope_theta", base)
        fields["fraction"] = parameters.number("partial_rotary_factor", fraction)
    if windowed is not None:
        fields["windowed_base"] = windowed.number("rope_theta")
    if scaling is not None:
        fields["scaling"] = _rope_scaling(config, scaling)
    return fields


def _rope_scaling(config: ConfigFields, scaling: ConfigFields) -> Fields | None:
    """Fields of `RopeScaling`; None for a section that scales nothing."""
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default":
        return None
    kind = {"su": "longrope"}.get(kind, kind)
    if kind not in ROPE_SCALINGS:
        what = f"not a rope scaling that is known ({', '.join(ROPE_SCALINGS)})"
        raise scaling.fail("rope_type", what, kind)
    trained = config.count("original_max_position_embeddings", optional=True)
    fields: Fields = {"type": kind, "factor": scaling.number("factor", 1.0)}
    if kind in ("llama3", "yarn"):
        original = scaling.count("original_max_position_embeddings", trained, optional=True)
        if original is None:
            original = config.count("max_position_embeddings", 8192)
        fields["original_positions"] = original
    names = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    }
    for name in names.get(kind, ()):
        value = scaling.number(name)
        if value:
            fields[name] = value
    if kind == "yarn":
        fields["whole_range"] = scaling.flag("truncate", True)
    return fields


def attention_biases(config: ConfigFields, default: bool = False) -> Fields:
    """One switch for the biases of all four projections."""
    bias = config.flag("attention_bias", default)
    return {"attention_bias": bias, "attention_output_bias": bias}


def window_length(config: ConfigFields, default: int | None) -> int | None:
    """Positions that a query of a windowed layer sees; `default` where the file is silent, null is none."""
    named = config.names("sliding_window")
    return config.count("sliding_window", None if named else default, optional=True)


def windows(
    config: ConfigFields, window: int | None, every: int, windowed: str = "sliding_attention"
) -> Fields:
    """The window and the layers it covers; `layer_types`, in newer files, overrules the family's `every`.

    There it calls the layers that the window covers `windowed`, and the others "full_attention".
    """
    layers = config.layers()
    kinds = config.entries("layer_types")
    if kinds:
        return window_order(config, window, full_layers(config, kinds, layers, windowed))
    if every == 1:
        return {}
    if window is None:
        raise config.fail("sliding_window", "is null, and layers of this family have a window")
    return {"sliding_window": window, "full_attention_every": every}


def window_order(
    config: ConfigFields, window: int | None, full: list[bool], name: str = "layer_types"
) -> Fields:
    """The window and which layers attend in full, as field `name` of the file says."""
    if all(full):
        return {}
    if window is None:
        what = "speaks of layers with a window, whose length the file does not give"
        raise config.fail(name, what)
    return {"sliding_window": window, **order_fields(full, WINDOWED)}


def full_layers(
    config: ConfigFields, kinds: list[object], layers: int, windowed: str
) -> list[bool]:
    """Whether each layer attends in full, of a list that calls the others `windowed`."""
    if len(kinds) != layers:
        raise config.fail("layer_types", f"must name all {layers} layers", kinds)
    for kind in kinds:
        if kind not in ("full_attention", windowed):
            raise config.fail("layer_types", f"holds neither full_attention nor {windowed}", kind)
    return [kind == "full_attention" for kind in kinds]


def window_everywhere(config: ConfigFields, window: int | None) -> Fields:
    """A window over all layers, of families whose code knows no other order (Mistral, Mixtral, Phi-3)."""
    kinds = config.entries("layer_types")
    own = "full_attention" if window is None else "sliding_attention"
    for kind in kinds:
        if kind != own:
            what = "this family's code treats all layers alike and does not read this"
            raise config.fail("layer_types", f"{what}: leave it out, or write a model YAML", kind)
    return {} if window is None else {"sliding_window": window, "full_attention_every": 0}


def layer_norm_decoder(*, bias: bool) -> Fields:
    """What the GPT-like families share: layer norms, and biases everywhere or nowhere."""
    return {
        "norm": "layernorm",
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
    }
