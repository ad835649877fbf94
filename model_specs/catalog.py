"""Published models by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from pydantic import ValidationError

from meshwright.documents.reader import packaged_document
from meshwright.documents.validation import validation_message
from meshwright.errors import InputError, near_miss
from meshwright.model_specs.schema import ModelSpec

_WHERE = "model catalog"


@cache
def _entries() -> Mapping[str, object]:
    return MappingProxyType(packaged_document("meshwright.model_specs.data", "catalog.yaml"))


def catalog_names() -> tuple[str, ...]:
    """Names of all models in the catalog, in its order."""
    return tuple(_entries())


@cache
def load_catalog_model(name: str) -> ModelSpec:
    """The catalog's model of this name. Raises InputError, with a near miss, where there is none."""
    entries = _entries()
    if name not in entries:
        raise InputError(
            "no such model in the catalog",
            where="model",
            value=name,
            did_you_mean=near_miss(name, entries),
            allowed=entries,
        )
    fields = entries[name]
    if not isinstance(fields, dict):
        raise InputError("must be a mapping of fields", where=f"{_WHERE}: {name}", value=fields)
    try:
        return ModelSpec.model_validate({"name": name, **fields})
    except ValidationError as error:
        raise InputError(validation_message(error, f"{_WHERE}: {name}", ModelSpec)) from None


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
_EXPERTS = ("experts", "top_k", "moe_ffn_hidden")


def catalog_twin(model: ModelSpec) -> ModelSpec | None:
    """The catalog's model with the same widths, vocabulary and experts, whatever its number of layers."""
    return next(
        (entry for entry in map(load_catalog_model, _entries()) if _key(entry) == _key(model)), None
    )


def with_twin_facts(model: ModelSpec) -> ModelSpec:
    """The model with what its catalog twin knows and a table of widths leaves out: norms on queries and keys,
    and node-limited routing."""
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
