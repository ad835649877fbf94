"""Turns what a user gives for MODEL into a ModelSpec: a catalog name, a model YAML, or a config.json."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from meshwright.documents import (
    PackagedEntries,
    is_file,
    packaged_document,
    path_text,
    read_mapping,
    validated,
)
from meshwright.errors import InputError, given_path, near_miss, shown
from meshwright.model_specs.huggingface import is_huggingface_config, model_from_huggingface
from meshwright.model_specs.schema import ModelSpec

# Published models by name.


@cache
def _entries() -> Mapping[str, Any]:
    return PackagedEntries("meshwright.model_specs", "data/catalog.yaml")


@cache
def _hub_names() -> Mapping[str, str]:
    """Catalog names by the hub's names of the same models, in the hub's spelling."""
    table = packaged_document("meshwright.model_specs", "data/hub_ids.yaml")
    return {hub_id: name for name, hub_ids in table.items() for hub_id in hub_ids}


_VARIANTS = ("-instruct", "-base", "-chat", "-chat-hf", "-hf", "-it", "-pt", "-bf16")
"""Ends of the hub's names that say how a model was trained on, not how it is built."""


@cache
def _short_names() -> Mapping[str, str]:
    """Catalog names by what people type, in small letters: themselves, and the hub's names, also without the
    owner and without what was trained on. Two models of one short name have neither.
    """
    full_names: dict[str, set[str]] = {}
    for hub_id, name in _hub_names().items():
        whole = hub_id.lower()
        short = whole.partition("/")[2]
        for typed in (whole, short, *(short.removesuffix(end) for end in _VARIANTS)):
            full_names.setdefault(typed, set()).add(name)
    full_names |= {name.lower(): {name} for name in _entries()}
    return {typed: next(iter(names)) for typed, names in full_names.items() if len(names) == 1}


def catalog_names() -> tuple[str, ...]:
    """Names of all models in the catalog, in its order."""
    return tuple(_entries())


def hub_names() -> tuple[str, ...]:
    """What the Hugging Face hub calls models of the catalog, in its spelling."""
    return tuple(_hub_names())


@cache
def load_catalog_model(name: str) -> ModelSpec:
    """The catalog's model of this name. Raises InputError, with a near miss, where there is none.

    Parameters
    ----------
    name
        One of `catalog_names`, in its spelling.
    """
    entries = _entries()
    if name not in entries:
        raise InputError(
            "no such model in the catalog",
            where="model",
            value=name,
            did_you_mean=near_miss(name, entries),
            allowed=entries,
        )
    return ModelSpec.model_validate({"name": name, **entries[name]})


_WIDTHS = (
    "hidden",
    "ffn_hidden",
    "heads",
    "kv_heads",
    "vocab",
    "activation",
    "qk_head_dim",
    "v_head_dim",
)
_EXPERTS = ("experts", "top_k", "moe_ffn_hidden", "latent_size")


def catalog_twin(model: ModelSpec) -> ModelSpec | None:
    """The catalog's model with the same widths, vocabulary and experts, whatever its number of layers.

    Parameters
    ----------
    model
        Whose widths, vocabulary and experts are compared, and nothing else.
    """
    return _twins().get(_key(model))


@cache
def _twins() -> dict[tuple[object, ...], ModelSpec]:
    """The first model of the catalog with each set of widths."""
    twins: dict[tuple[object, ...], ModelSpec] = {}
    for entry in map(load_catalog_model, _entries()):
        twins.setdefault(_key(entry), entry)
    return twins


def with_twin_facts(model: ModelSpec) -> ModelSpec:
    """The model with what its catalog twin knows and a table of widths leaves out: norms on queries and keys,
    and node-limited routing.

    Parameters
    ----------
    model
        What it states itself stays as it is.
    """
    twin = catalog_twin(model)
    if twin is None:
        return model
    facts: dict[str, object] = {}
    if "qk_norm" not in model.model_fields_set and twin.qk_norm:
        facts |= {"qk_norm": True, "qk_norm_full_width": twin.qk_norm_full_width}
    if (
        model.moe is not None
        and twin.moe is not None
        and "router_groups" not in model.moe.model_fields_set
    ):
        groups = {
            name: getattr(twin.moe, name) for name in ("router_groups", "router_groups_per_token")
        }
        facts["moe"] = model.moe.model_copy(update=groups)
    return model.model_copy(update=facts) if facts else model


def _key(model: ModelSpec) -> tuple[object, ...]:
    experts = tuple(getattr(model.moe, name) for name in _EXPERTS) if model.moe is not None else ()
    return (*(getattr(model, name) for name in _WIDTHS), *experts)


_SUFFIXES = (".yaml", ".yml", ".json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
"""What the Hugging Face hub calls a model: its owner and its name."""


def read_model(model: str | PathLike[str] | ModelSpec) -> ModelSpec:
    """The model of a catalog name or a file.

    Parameters
    ----------
    model
        Catalog name, the Hugging Face hub's name of such a model (`Qwen/Qwen3-8B`, or without its owner;
        nothing is fetched), path of a model YAML or of a config.json or of its folder, or a spec, which is
        returned as it is. A catalog name wins over a file of the same name; write `./NAME` for the file.

    Returns
    -------
    ModelSpec
        Layers, widths, experts and what else prices need.

    Raises
    ------
    InputError
        If there is no such model, or the file cannot be used.

    Examples
    --------
    >>> read_model("llama-3-8b").hidden
    4096
    """
    if isinstance(model, ModelSpec):
        return model
    text = given_path(model, "model")
    if text in catalog_names():
        return load_catalog_model(text)
    path = Path(text)
    if text and is_file(f"{text}/config.json"):
        path = path / "config.json"
    meant = _short_names().get(text.lower())
    if meant is not None and not path.exists():
        return load_catalog_model(meant)
    if text and os.path.isdir(path):
        raise InputError("this folder has no config.json", where="model", value=text)
    _refuse_hub_id(text)
    looks_like_path = text.lower().endswith(_SUFFIXES) or "/" in text
    if not text or not (looks_like_path or is_file(str(path))):
        raise InputError(
            "neither a model of the catalog nor a file",
            where="model",
            value=text,
            did_you_mean=near_miss(text, catalog_names()),
            allowed=("a model YAML", "a Hugging Face config.json", *catalog_names()),
        )
    return model_from_mapping(read_mapping(path), path_text(path), name=_file_name(path))


def model_from_mapping(
    data: Mapping[str, object], where: str, name: str | None = None
) -> ModelSpec:
    """The model that a mapping describes: fields of ModelSpec, or those of a config.json.

    `where` names the mapping in errors (a file, and a path inside it); `name` is the model's where the
    mapping itself gives none. Raises InputError.

    Parameters
    ----------
    data
        Fields by name: those of `ModelSpec`, or of a config.json.
    where
        A path, or what the data is.
    name
        What to call a model that does not say; None for `model`.
    """
    if not isinstance(data, Mapping):
        raise InputError("must be a mapping of fields", where=where, value=data)
    if is_huggingface_config(data):
        return model_from_huggingface(data, where, name)
    if data and not _REQUIRED & data.keys():
        raise InputError(_NO_MODEL + _base_model(data), where=where)
    named = {"name": name} if name and "name" not in data else {}
    return validated(ModelSpec, {**named, **data}, where)


_REQUIRED = {name for name, field in ModelSpec.model_fields.items() if field.is_required()} - {
    "name"
}
_NO_MODEL = (
    "describes no model: it has neither `model_type`, as the config.json of transformers has, nor a width "
    "of a model YAML (`schema model`)"
)


def _base_model(data: Mapping[str, object]) -> str:
    """Where a file of adapters or of a fine-tuning run was given, whose to give instead; empty otherwise."""
    if "peft_type" in data:
        return f"; these are adapters: give the config.json of {shown(data.get('base_model_name_or_path'))}"
    # As Axolotl, LLaMA-Factory and TRL, and ms-swift call it.
    for field in ("base_model", "model_name_or_path", "model"):
        if isinstance(data.get(field), str):
            return f"; this is a run's file: give its model, {shown(data[field])}, and the file as --baseline"
    return ""


def _refuse_hub_id(text: str) -> None:
    """Raises InputError for the name of a model on the Hugging Face hub, whose files are not here."""
    if not _HUB_ID.fullmatch(text) or text.lower().endswith(_SUFFIXES):
        return
    owner, name = text.split("/")
    if Path(owner).is_dir():
        return
    raise InputError(
        f"no file or folder of this name, and nothing is fetched from the Hugging Face hub; if it is a model "
        f"there, download its config.json with `hf download {text} config.json --local-dir {name}` "
        f"and give {name}/config.json",
        where="model",
        value=text,
        did_you_mean=_near_hub_id(text),
    )


def _near_hub_id(text: str) -> str | None:
    """The longest name on the hub that the text begins with, as that of a variant does; else the nearest."""
    beginnings = [name for name in hub_names() if text.lower().startswith(name.lower())]
    return max(beginnings, key=len) if beginnings else near_miss(text, hub_names())


def _file_name(path: Path) -> str:
    """What to call a model by its file; a config.json is called by its directory."""
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return name[:200] or "model"


# The models and configurations of torchtitan's own registry, from data/torchtitan.yaml.


@dataclass(frozen=True, kw_only=True)
class Flavor:
    """A model as torchtitan's registry builds it."""

    family: str
    """Of torchtitan/models."""
    name: str
    model: ModelSpec


@dataclass(frozen=True, kw_only=True)
class NamedConfig:
    """A function of a model's config_registry.py."""

    flavor: str
    words: tuple[str, ...]
    """Flags that say what it sets."""
    precision: str | None
    """Of its converters."""


@cache
def flavors() -> tuple[Flavor, ...]:
    """Every flavor, in the order of the file."""
    return tuple(
        Flavor(family=family, name=str(name), model=_model(f"{family} {name}", entry))
        for family, entries in _document()["models"].items()
        for name, entry in entries.items()
    )


def flavor_named(family: str, name: str) -> Flavor | None:
    """A flavor by torchtitan's names, in any case of letters; None where its registry has none.

    Parameters
    ----------
    family
        A folder of torchtitan/models.
    name
        As its registry calls the flavor; dots, hyphens and underscores count alike.
    """
    wanted = (_plain(family), _plain(name))
    return next((f for f in flavors() if (_plain(f.family), _plain(f.name)) == wanted), None)


def flavor_of_config(config: str) -> Flavor | None:
    """The flavor whose model and name make up the name of a configuration, such as qwen3_0_6b.

    Parameters
    ----------
    config
        Name of a function of torchtitan's config_registry.py.
    """
    return next((f for f in flavors() if _plain(f"{f.family}_{f.name}") == _plain(config)), None)


def named_config(name: str) -> NamedConfig | None:
    """What a configuration of torchtitan's own sets; None for a name that is not in the file.

    Parameters
    ----------
    name
        Of a function of torchtitan's config_registry.py.
    """
    entry = _document()["configs"].get(name)
    if entry is None:
        return None
    return NamedConfig(
        flavor=str(entry["flavor"]),
        words=tuple(entry["flags"].split()),
        precision=entry.get("precision"),
    )


def built_alike(model: ModelSpec, family: str) -> Flavor | None:
    """The flavor of a family that has the layers, heads, widths and experts of a model; None without one.

    Parameters
    ----------
    model
        Whose layers, heads, widths and experts are compared; its vocabulary is not.
    family
        A folder of torchtitan/models.
    """
    of_family = (flavor for flavor in flavors() if flavor.family == family)
    return next((f for f in of_family if _sizes(f.model) == _sizes(model)), None)


def _sizes(model: ModelSpec) -> tuple[object, ...]:
    moe, latent = model.moe, model.attention
    experts: tuple[object, ...] = ()
    if moe is not None:
        experts = (
            moe.experts,
            moe.top_k,
            moe.moe_ffn_hidden,
            moe.latent_size,
            moe.shared_width,
            moe.dense_layers,
            moe.every,
        )
    ranks: tuple[object, ...] = ()
    if latent is not None:
        ranks = (
            latent.q_lora_rank,
            latent.kv_lora_rank,
            latent.qk_nope_head_dim,
            latent.qk_rope_head_dim,
            latent.v_head_dim,
        )
    dense = model.ffn_hidden if moe is None or moe.dense_layers else None
    return (model.layers, model.hidden, model.heads, model.kv_heads, dense, ranks, experts)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def _model(name: str, entry: object) -> ModelSpec:
    if isinstance(entry, str):
        return load_catalog_model(entry)
    assert isinstance(entry, dict)
    return ModelSpec.model_validate({"name": name, **entry})


@cache
def _document() -> dict[str, Any]:
    document: dict[str, Any] = packaged_document("meshwright.model_specs", "data/torchtitan.yaml")
    return document
