"""Typed, bounded access to the fields of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, overload

from meshwright.errors import InputError, near_miss
from meshwright.model_specs.blocks import WINDOWED, order_fields

LARGEST_COUNT = 10_000_000
"""As in the schema: no width, vocabulary or number of anything is larger."""
MOST_LAYERS = 2000
SAME_FIELDS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_local_experts": ("num_experts", "n_routed_experts"),
    "n_routed_experts": ("num_local_experts", "num_experts"),
    "n_shared_experts": ("num_shared_experts",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
    "hidden_size": ("n_embed",),
    "num_layers": ("num_hidden_layers",),
    "n_layer": ("num_hidden_layers",),
    "n_head": ("num_attention_heads",),
    "layer_norm_epsilon": ("rms_norm_eps",),
    "activation_function": ("hidden_act",),
    "layers_block_type": ("layer_types",),
    "layer_types": ("layers_block_type",),
}
"""Other names of a field: transformers reads either and writes one of them, which it has changed for some
families from one version to the next (`attribute_map` of its configuration classes)."""


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
        name = self._written(name)
        self._read.add(name)
        return self._data.get(name)

    def _written(self, name: str) -> str:
        """The name by which the file holds a field: one of `SAME_FIELDS`, where its own is absent."""
        if name in self._data:
            return name
        return next((same for same in SAME_FIELDS.get(name, ()) if same in self._data), name)

    def passed_over(self, *names: str) -> None:
        """Counts fields as read that say nothing beside what the others say.

        Parameters
        ----------
        names
            Of fields of this mapping, whether they are there or not.
        """
        self._read.update(map(self._written, names))

    def unread(self) -> Iterator[tuple[str, object]]:
        """Dotted names and values of the fields that no reader has asked for, but for those that are null."""
        for name, value in self._data.items():
            if name in self._sections:
                yield from ((f"{name}.{inner}", x) for inner, x in self._sections[name].unread())
            elif value is not None and name not in self._read:
                yield name, value

    def has(self, name: str) -> bool:
        """Whether the field is there and not null.

        Parameters
        ----------
        name
            Of a field; other names of it count (`SAME_FIELDS`).
        """
        return self._value(name) is not None

    def names(self, name: str) -> bool:
        """Whether the field is there, be it null: where null stands for none, and absence for a default.

        Parameters
        ----------
        name
            Of a field; other names of it count (`SAME_FIELDS`).
        """
        return self._written(name) in self._data

    def fail(self, name: str, what: str, value: object = ...) -> InputError:
        """An error about one field, for the caller to raise.

        Parameters
        ----------
        name
            Of the field.
        what
            What is wrong with it, as the end of a sentence.
        value
            What the file says, where that tells anything.
        """
        where = f"{self.where}: {self._prefix}{self._written(name)}"
        return InputError(what, where=where, value=value)

    @overload
    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int: ...
    @overload
    def count(
        self, name: str, default: int | None = None, *, least: int = 1, optional: bool
    ) -> int | None: ...
    def count(
        self, name: str, default: int | None = None, *, least: int = 1, optional: bool = False
    ) -> int | None:
        """An integer from `least` to ten million; `default` where absent, else an error unless `optional`.

        Parameters
        ----------
        name
            Of the field.
        default
            What its absence reads as.
        least
            Smallest value that is taken.
        optional
            Whether absence without a default reads as None.
        """
        value: int | None = self._typed(name, (int,), "must be an integer")
        if value is None:
            if default is None and not optional:
                raise self._missing(name)
            return default
        if not least <= value <= LARGEST_COUNT:
            raise self.fail(name, f"must be from {least} to {LARGEST_COUNT}", value)
        return value

    def layers(self, name: str = "num_hidden_layers") -> int:
        """The number of layers, from 1 to 2000 as in the schema, so that loops over them stay short.

        Parameters
        ----------
        name
            Of the field.
        """
        value = self.count(name)
        if value > MOST_LAYERS:
            raise self.fail(name, f"must be from 1 to {MOST_LAYERS}", value)
        return value

    def dense_layers(self, name: str, default: int) -> int:
        """How many layers in front have no experts, up to all of them.

        Parameters
        ----------
        name
            Of the field.
        default
            What its absence reads as, cut to the number of layers.
        """
        layers = self.layers()
        dense = self.count(name, min(default, layers), least=0)
        if dense > layers:
            what = f"must be at most the {layers} layers, {layers} where none has experts"
            raise self.fail(name, what, dense)
        return dense

    def flag(self, name: str, default: bool) -> bool:
        """A boolean.

        Parameters
        ----------
        name
            Of the field.
        default
            What its absence reads as.
        """
        value = self._typed(name, (bool,), "must be true or false")
        return default if value is None else bool(value)

    @overload
    def number(self, name: str, default: float) -> float: ...
    @overload
    def number(self, name: str, default: float | None = None) -> float | None: ...
    def number(self, name: str, default: float | None = None) -> float | None:
        """A number; the schema bounds it.

        Parameters
        ----------
        name
            Of the field.
        default
            What its absence reads as.
        """
        value = self._typed(name, (int, float), "must be a number")
        return default if value is None else float(value)

    def section(self, name: str) -> ConfigFields | None:
        """The fields of a mapping inside; None where absent.

        Parameters
        ----------
        name
            Of the field with the mapping.

        Returns
        -------
        ConfigFields or None
            The same object each time, so that `unread` knows what was read of it.
        """
        value = self._typed(name, (Mapping,), "must be a mapping of fields")
        if value is None:
            return None
        if name not in self._sections:
            self._sections[name] = ConfigFields(value, self.where, f"{self._prefix}{name}.")
        return self._sections[name]

    def sections(self) -> Iterator[tuple[str, ConfigFields]]:
        """The names of all fields of this mapping, each a mapping itself."""
        for name in self._data:
            inner = self.section(name)
            if inner is None:
                raise self.fail(name, "must be a mapping of fields", None)
            yield name, inner

    def text(self, name: str, default: str) -> str:
        """A text.

        Parameters
        ----------
        name
            Of the field.
        default
            What its absence reads as.
        """
        value = self._typed(name, (str,), "must be a text")
        return default if value is None else str(value)

    def is_text(self, name: str) -> bool:
        """Whether a field holds a text.

        Parameters
        ----------
        name
            Of the field.
        """
        return isinstance(self._value(name), str)

    def is_list(self, name: str) -> bool:
        """Whether a field holds a list.

        Parameters
        ----------
        name
            Of the field.
        """
        return isinstance(self._value(name), list)

    def entries(self, name: str) -> list[object]:
        """A list; empty where absent.

        Parameters
        ----------
        name
            Of the field with the list; what its entries are is for the caller to check.
        """
        value: list[object] | None = self._typed(name, (list,), "must be a list")
        return value or []

    def _typed(self, name: str, kinds: tuple[type, ...], what: str) -> Any:
        """The value, of one of these types; a truth value is no number. None where absent."""
        value = self._value(name)
        is_number_for_bool = isinstance(value, bool) and bool not in kinds
        if value is not None and (is_number_for_bool or not isinstance(value, kinds)):
            raise self.fail(name, what, value)
        return value

    def _missing(self, name: str) -> InputError:
        keys = [key for key in self._data if isinstance(key, str) and key != name]
        return InputError(
            f"this field is required and {'null' if name in self._data else 'missing'}",
            where=f"{self.where}: {self._prefix}{name}",
            did_you_mean=None if name in self._data else near_miss(name, keys),
        )


# Records: which key of a file each field of a ModelSpec is read from, and its default.


Fields = dict[str, object]
"""Fields of `ModelSpec`, not yet validated."""
Reader = Callable[[ConfigFields], object]
"""Reads the value of one field."""
Record = Mapping[str, object]
"""By field of `ModelSpec`: its reader, a value that holds for the whole family, or a record of its own."""
FieldReader = Callable[[ConfigFields], Fields]
"""Reads fields that depend on one another, or refuses a file."""
Part = Record | FieldReader
"""Some fields of a family: a record, or a function where the fields depend on one another."""
Parts = tuple[Part, ...]
"""What is read of a family, the later parts over the earlier ones."""


def read_fields(config: ConfigFields, *parts: Part) -> Fields:
    """What a file says by these parts; of a field in several of them, the last counts.

    Parameters
    ----------
    config
        The file, or a section of it.
    parts
        Of the family, the later over the earlier.

    Returns
    -------
    dict
        By field of `ModelSpec`; values are not yet checked against each other.
    """
    fields: Fields = {}
    for part in parts:
        if callable(part):
            fields |= part(config)
        else:
            fields |= {name: _read(config, value) for name, value in part.items()}
    return fields


def _read(config: ConfigFields, value: object) -> object:
    if isinstance(value, Mapping):
        return read_fields(config, value)
    return value(config) if callable(value) else value


def integer(
    key: str, default: int | Reader | None = None, *, least: int = 1, optional: bool = False
) -> Reader:
    """An integer from `least` on; absent, its default, what the default reads, or None where `optional`.

    Parameters
    ----------
    key
        Name of the field.
    default
        A number, or a reader of another field; None where the field is required or `optional`.
    least
        Smallest value that is taken.
    optional
        Whether absence reads as None.
    """

    def read(config: ConfigFields) -> object:
        usual: Any = _read(config, default)
        return config.count(key, usual, least=least, optional=optional)

    return read


def boolean(key: str, default: bool | Reader) -> Reader:
    """A truth value; absent, its default or what that reads.

    Parameters
    ----------
    key
        Name of the field.
    default
        What its absence reads as, or a reader of another field.
    """
    return lambda config: config.flag(key, bool(_read(config, default)))


def real(key: str, default: float | None = None) -> Reader:
    """A number; None where it is absent and has no default.

    Parameters
    ----------
    key
        Name of the field.
    default
        What its absence reads as.
    """
    return lambda config: config.number(key, default)


def string(key: str, default: str) -> Reader:
    """A text.

    Parameters
    ----------
    key
        Name of the field.
    default
        What its absence reads as.
    """
    return lambda config: config.text(key, default)


def only(key: str, value: bool | int | str, what: str, *, shows_value: bool = True) -> FieldReader:
    """Refuses a file where a key, `value` by default, says something else; `what` is the reason.

    Parameters
    ----------
    key
        Name of the field.
    value
        The one value that is taken, and what absence reads as.
    what
        Why no other is.
    shows_value
        Whether the message repeats what the file says.
    """

    def check(config: ConfigFields) -> Fields:
        written: object
        if isinstance(value, bool):
            written = config.flag(key, value)
        elif isinstance(value, int):
            written = config.count(key, value, least=min(value, 1))
        else:
            written = config.text(key, value)
        if written != value:
            raise config.fail(key, what, written if shows_value else ...)
        return {}

    return check


def absent(key: str, what: str) -> FieldReader:
    """Refuses a file where a key is there and not null; `what` is the reason.

    Parameters
    ----------
    key
        Name of the field.
    what
        Why it may not be there.
    """

    def check(config: ConfigFields) -> Fields:
        if config.has(key):
            raise config.fail(key, what)
        return {}

    return check


# What several Hugging Face model families share: decoders, activations, biases, attention windows.


_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
GATED = {"silu": "swiglu", "swish": "swiglu", **dict.fromkeys(_GELU, "geglu")}
PLAIN = {**dict.fromkeys(_GELU, "gelu"), "relu": "relu", "relu2": "squared_relu"}

ROPE_SCALINGS = ("linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
"""Values of `rope_type` that the schema has too."""


def activation(key: str, default: str, names: Mapping[str, str]) -> Record:
    """The schema's name of the activation in `key`, one of `names`, and of a GELU how it is computed.

    Parameters
    ----------
    key
        Name of the field.
    default
        What its absence reads as.
    names
        By the family's names, those of `ModelSpec.activation`.
    """

    def name(config: ConfigFields) -> str:
        written = config.text(key, default)
        if written not in names:
            what = f"not an activation of this family ({', '.join(names)})"
            raise config.fail(key, what, written)
        return names[written]

    def form(config: ConfigFields) -> str:
        return "exact" if config.text(key, default) == "gelu" else "tanh"

    return {"activation": name, "gelu_form": form}


def rope(base: float = 10_000.0, fraction: float = 1.0) -> Reader:
    """Rotary embeddings of a family that turns by `base` and `fraction` where the file does not say.

    Parameters
    ----------
    base
        Of the angles' geometric sequence (`rope_theta`).
    fraction
        Share of a head's elements that turn, above 0 to 1.
    """
    return lambda config: rope_fields(config, base=base, fraction=fraction)


HEADS = integer("num_attention_heads")
SIZES: Record = {
    "heads": HEADS,
    "layers": ConfigFields.layers,
    "hidden": integer("hidden_size"),
    "ffn_hidden": integer("intermediate_size"),
    "kv_heads": HEADS,
    "vocab": integer("vocab_size"),
    "tied_embeddings": boolean("tie_word_embeddings", False),
}
"""What nearly all families call by these names."""
DECODER: Record = {
    **SIZES,
    "kv_heads": integer("num_key_value_heads", HEADS),
    "head_dim": integer("head_dim", optional=True),
    "norm_epsilon": real("rms_norm_eps", 1e-6),
    "rope": rope(),
    **activation("hidden_act", "silu", GATED),
}
"""What the Llama-like families share: grouped queries, gated feed-forward, rope, RMS norms."""
SMALLER_EPSILON: Record = {"norm_epsilon": real("rms_norm_eps", 1e-5)}
DECODER_1E5: Record = {**DECODER, **SMALLER_EPSILON}
"""Likewise, where norms of a file that says nothing have this epsilon."""


def biases(switch: object) -> Record:
    """Biases on all four projections of attention, as a key says or `switch` itself.

    Parameters
    ----------
    switch
        A truth value, or a reader of one.
    """
    return {"attention_bias": switch, "attention_output_bias": switch}


BIASES = biases(boolean("attention_bias", False))
ALL_BIASES: Record = {**BIASES, "mlp_bias": boolean("mlp_bias", False)}
SIGMOID: Record = {"router_bias": True, "router_score": "sigmoid"}
"""A router as DeepSeek-V3 has it: scores by a sigmoid, and a bias that balances the experts."""


def layer_norms(bias: object) -> Record:
    """What the GPT-like families share: layer norms, and biases everywhere or nowhere.

    Parameters
    ----------
    bias
        Of the feed-forward and all projections of attention: a truth value, or a reader of one.
    """
    return {"norm": "layernorm", "mlp_bias": bias, **biases(bias)}


def routed_experts(
    key: str, number: int | None, top_k: int | None, width: str = "intermediate_size"
) -> Record:
    """Routed experts by the key of their number, with defaults of it and of those of a token.

    Parameters
    ----------
    key
        Name of the field with their number.
    number
        What its absence reads as; None where it is required.
    top_k
        Experts of a token where `num_experts_per_tok` is absent; None where it is required.
    width
        Name of the field with the width of one.
    """
    return {
        "experts": integer(key, number),
        "top_k": integer("num_experts_per_tok", top_k),
        "moe_ffn_hidden": integer(width),
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
    if windowed is not None and windowed.number("rope_theta") != fields["base"]:
        fields["windowed_base"] = windowed.number("rope_theta")
    if scaling is not None:
        fields["scaling"] = rope_scaling(config, scaling)
    return fields


def rope_scaling(config: ConfigFields, scaling: ConfigFields) -> Fields | None:
    """Fields of `RopeScaling` in a section of a file; None for a section that scales nothing.

    Positions of images in three dimensions (Qwen2-VL) turn by the same angles as those of text.

    Parameters
    ----------
    config
        The file, for the length that was trained first.
    scaling
        Its section about scaling.
    """
    scaling.passed_over("mrope_section", "mrope_interleaved", "interleaved")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind in ("default", "mrope"):
        return None
    kind = {"su": "longrope", "deepseek_yarn": "yarn"}.get(kind, kind)
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


def window_length(config: ConfigFields, default: int | None) -> int | None:
    """Positions that a query of a windowed layer sees; `default` where the file is silent, null is none.

    Parameters
    ----------
    config
        The file.
    default
        Positions, from 1; None for no window.

    Returns
    -------
    int or None
        None where no layer has a window.
    """
    named = config.names("sliding_window")
    return config.count("sliding_window", None if named else default, optional=True)


def windows(config: ConfigFields, default: int, every: int) -> Fields:
    """A window over all layers but each n-th; `layer_types`, in newer files, overrules `every`.

    Parameters
    ----------
    config
        The file.
    default
        Length of a window where the file is silent.
    every
        n of 'each n-th layer attends in full', from 1, which leaves no layer a window.
    """
    window = window_length(config, default)
    kinds = config.entries("layer_types")
    if kinds:
        return window_order(config, window, full_layers(config, kinds, "sliding_attention"))
    if every == 1:
        return {}
    if window is None:
        raise config.fail("sliding_window", "is null, and layers of this family have a window")
    return {"sliding_window": window, "full_attention_every": every}


def window_order(
    config: ConfigFields, window: int | None, full: list[bool], name: str = "layer_types"
) -> Fields:
    """The window and which layers attend in full, as field `name` of the file says.

    Parameters
    ----------
    config
        The file, for the message.
    window
        Its length, positions; None where the file gives none.
    full
        Whether each layer attends in full, in the layers' order.
    name
        The field that says so.
    """
    if all(full):
        return {}
    if window is None:
        what = "speaks of layers with a window, whose length the file does not give"
        raise config.fail(name, what)
    return {"sliding_window": window, **order_fields(full, WINDOWED)}


def full_layers(config: ConfigFields, kinds: list[object], windowed: str) -> list[bool]:
    """Whether each layer attends in full, of a list that calls the others `windowed`.

    Parameters
    ----------
    config
        The file, with its number of layers.
    kinds
        As its `layer_types` lists them.
    windowed
        What the family calls a layer that does not attend in full.

    Returns
    -------
    list of bool
        One for each layer.
    """
    layers = config.layers()
    if len(kinds) != layers:
        raise config.fail("layer_types", f"must name all {layers} layers", kinds)
    for kind in kinds:
        if kind not in ("full_attention", windowed):
            raise config.fail("layer_types", f"holds neither full_attention nor {windowed}", kind)
    return [kind == "full_attention" for kind in kinds]


def window_everywhere(config: ConfigFields, window: int | None) -> Fields:
    """A window over all layers, of families whose code knows no other order (Mistral, Mixtral, Phi-3).

    Parameters
    ----------
    config
        The file.
    window
        Its length, positions; None where layers attend in full.
    """
    kinds = config.entries("layer_types")
    expected = "full_attention" if window is None else "sliding_attention"
    for kind in kinds:
        if kind != expected:
            what = "this family's code treats all layers alike and does not read this"
            raise config.fail("layer_types", f"{what}: leave it out, or write a model YAML", kind)
    return {} if window is None else {"sliding_window": window, "full_attention_every": 0}
