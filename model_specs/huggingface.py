"""Reads a Hugging Face config.json into a ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from meshwright.documents.validation import validation_message
from meshwright.errors import InputError
from meshwright.model_specs.config_fields import ConfigFields
from meshwright.model_specs.huggingface_families import FAMILIES
from meshwright.model_specs.huggingface_refusals import (
    ARCHITECTURES,
    refusal,
    refuse_encoder_decoder,
)
from meshwright.model_specs.left_out import left_out
from meshwright.model_specs.schema import ModelSpec

_TEXT_PARTS = ("text_config", "language_config", "llm_config")
"""Where multimodal wrappers keep their language model."""
_DEEPEST = 4
_NESTED_DEFAULTS = {"gemma3": "gemma3_text", "llama4": "llama4_text", "llava": "llama"}
"""`model_type` of a text part that does not say, by that of its wrapper."""


def is_huggingface_config(data: Mapping[str, object]) -> bool:
    """Whether a mapping looks like a config.json rather than a model description of ours."""
    return "model_type" in data or "architectures" in data


def known_model_types() -> tuple[str, ...]:
    """Values of `model_type` that can be read."""
    return tuple(FAMILIES)


def model_from_huggingface(
    data: Mapping[str, object], where: str, name: str | None = None
) -> ModelSpec:
    """The model that a config.json describes; of a multimodal one, its text part alone.

    `where` names the file in errors; the model is called `name`, or what the file says it was loaded from.
    Raises InputError on an unknown `model_type` and on missing, ill-typed or inconsistent fields.
    """
    config_name = data.get("_name_or_path")
    if not name:
        name = config_name if isinstance(config_name, str) and 0 < len(config_name) <= 200 else None
    part, model_type, prefix = _text_part(data, where)
    config = ConfigFields(part, where, prefix)
    fields = FAMILIES[model_type](config)
    fields["left_out"] = left_out(config)
    fields["name"] = (name or model_type)[:200]
    fields["source"] = f"config.json, {prefix.rstrip('.')} alone" if prefix else "config.json"
    try:
        return ModelSpec.model_validate(fields)
    except ValidationError as error:
        raise InputError(validation_message(error, where, ModelSpec)) from None


def _text_part(data: Mapping[str, object], where: str) -> tuple[Mapping[str, object], str, str]:
    """The language model's own mapping, its model type, and the path to it."""
    prefix = ""
    inherited: str | None = None
    for _ in range(_DEEPEST):
        refuse_encoder_decoder(data, where, prefix)
        model_type = _model_type(data, where, prefix) or inherited
        nested = next((key for key in _TEXT_PARTS if data.get(key) is not None), None)
        if nested is None:
            return data, _known(data, model_type, where, prefix), prefix
        inner = data[nested]
        if not isinstance(inner, dict):
            raise InputError(
                "must be a mapping of fields", where=f"{where}: {prefix}{nested}", value=inner
            )
        tied = data.get("tie_word_embeddings")
        # Wrappers may tie the embeddings of their text part.
        data = (
            inner
            if tied is None or "tie_word_embeddings" in inner
            else inner | {"tie_word_embeddings": tied}
        )
        inherited = _NESTED_DEFAULTS.get(model_type or "")
        prefix += f"{nested}."
    raise InputError(f"text parts are nested more than {_DEEPEST} levels deep", where=where)


def _model_type(data: Mapping[str, object], where: str, prefix: str) -> str | None:
    value = data.get("model_type")
    if value is not None:
        if not isinstance(value, str):
            raise InputError("must be a text", where=f"{where}: {prefix}model_type", value=value)
        return value
    classes = data.get("architectures")
    if isinstance(classes, list) and classes and isinstance(classes[0], str):
        return ARCHITECTURES.get(classes[0], classes[0])
    return None


def _known(data: Mapping[str, object], model_type: str | None, where: str, prefix: str) -> str:
    if model_type is None:
        raise InputError(
            "this field is required and missing",
            where=f"{where}: {prefix}model_type",
            allowed=FAMILIES,
        )
    if model_type not in FAMILIES:
        raise refusal(data, model_type, where, prefix, FAMILIES)
    return model_type
