"""The models and configurations of torchtitan's own registry, from data/torchtitan.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from meshwright.documents.reader import packaged_document
from meshwright.model_specs.catalog import load_catalog_model
from meshwright.model_specs.schema import ModelSpec


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
    """A flavor by torchtitan's names, in any case of letters; None where its registry has none."""
    wanted = (_plain(family), _plain(name))
    return next((f for f in flavors() if (_plain(f.family), _plain(f.name)) == wanted), None)


def flavor_of_config(config: str) -> Flavor | None:
    """The flavor whose model and name make up the name of a configuration, such as qwen3_0_6b."""
    return next((f for f in flavors() if _plain(f"{f.family}_{f.name}") == _plain(config)), None)


def named_config(name: str) -> NamedConfig | None:
    """What a configuration of torchtitan's own sets; None for a name that is not in the file."""
    entry = _document()["configs"].get(name)
    if entry is None:
        return None
    return NamedConfig(
        flavor=str(entry["flavor"]),
        words=tuple(entry["flags"].split()),
        precision=entry.get("precision"),
    )


def built_alike(model: ModelSpec, family: str) -> Flavor | None:
    """The flavor of a family that has the layers, heads, widths and experts of a model; None without one."""
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
    document: dict[str, Any] = packaged_document("meshwright.model_specs.data", "torchtitan.yaml")
    return document
