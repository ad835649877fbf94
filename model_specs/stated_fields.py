"""What a model's specification says beyond the defaults, field by field."""

from __future__ import annotations

from pydantic import BaseModel

from meshwright.model_specs.schema import ModelSpec

_ABOUT_THE_FILE = frozenset(
    ("name", "attention_note", "published_parameters", "source", "left_out")
)


def stated_fields(model: ModelSpec) -> dict[str, object]:
    """The fields that are not at their default and bear on what the model computes, by dotted name.

    >>> from meshwright.model_specs.catalog import load_catalog_model
    >>> stated_fields(load_catalog_model("llama-3-8b"))["rope.base"]
    500000.0
    """
    fields = _differing(model, "")
    return {name: value for name, value in fields.items() if name not in _ABOUT_THE_FILE}


def _differing(part: BaseModel, prefix: str) -> dict[str, object]:
    fields: dict[str, object] = {}
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            fields |= _differing(value, f"{prefix}{name}.")
        elif field.is_required() or value != field.default:
            fields[f"{prefix}{name}"] = value
    return fields
