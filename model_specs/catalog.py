"""Published models by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from pydantic import ValidationError

from model_specs.documents import parse_mapping
from model_specs.errors import SpecError, near_miss, validation_message
from model_specs.schema import ModelSpec

_WHERE = "model catalog"


@cache
def _entries() -> Mapping[str, object]:
    text = files("model_specs.data").joinpath("catalog.yaml").read_text(encoding="utf-8")
    return MappingProxyType(parse_mapping(text, _WHERE))


def catalog_names() -> tuple[str, ...]:
    """Names of all models in the catalog, in its order."""
    return tuple(_entries())


@cache
def load_catalog_model(name: str) -> ModelSpec:
    """The catalog's model of this name. Raises SpecError, with a near miss, where there is none."""
    entries = _entries()
    if name not in entries:
        raise SpecError(
            "no such model in the catalog",
            where="model",
            value=name,
            did_you_mean=near_miss(name, entries),
            allowed=entries,
        )
    fields = entries[name]
    if not isinstance(fields, dict):
        raise SpecError("must be a mapping of fields", where=f"{_WHERE}: {name}", value=fields)
    try:
        return ModelSpec.model_validate({"name": name, **fields})
    except ValidationError as error:
        raise SpecError(validation_message(error, f"{_WHERE}: {name}", ModelSpec)) from None
