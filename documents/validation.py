"""What pydantic finds wrong in a document, in the words of someone who writes YAML."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from meshwright.errors import LONGEST_VALUE, InputError, near_miss, shown

MOST_LINES = 20
"""More mistakes of one document than this are only counted."""
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_LENGTHS = {
    "too_long": ("max_length", "at most", "entries"),
    "too_short": ("min_length", "at least", "entries"),
    "string_too_long": ("max_length", "at most", "characters"),
    "string_too_short": ("min_length", "at least", "characters"),
}
_WORDS = {
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a text",
    "model_type": "must be a mapping of fields",
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
}
"""What the commonest kinds of pydantic error mean."""


def validation_message(
    error: ValidationError,
    where: str,
    schema: type[BaseModel],
    other_fields: Collection[str] = (),
) -> str:
    """A pydantic error as one line per mistake: `where: field.path: what is wrong, got value; remedy`.

    Parameters
    ----------
    where
        Names the document.
    schema
        Its pydantic class; nested classes are followed to name the fields allowed at each level.
    other_fields
        Top-level fields that are allowed beside those of `schema`.
    """
    mistakes = error.errors(include_url=False)
    lines = [_line(mistake, where, schema, other_fields) for mistake in mistakes[:MOST_LINES]]
    if len(mistakes) > MOST_LINES:
        lines.append(f"{where}: and {len(mistakes) - MOST_LINES} more mistakes")
    return "\n".join(lines)


def _line(
    mistake: Mapping[str, Any],
    where: str,
    schema: type[BaseModel],
    other_fields: Collection[str],
) -> str:
    location: tuple[int | str, ...] = mistake["loc"]
    kind: str = mistake["type"]
    context: dict[str, Any] = mistake.get("ctx", {})
    value = mistake["input"]
    path = field_path(location)
    place = f"{where}: {path}" if path else where
    if kind == "value_error":
        return f"{place}: {context.get('error', mistake['msg'])}"
    if kind == "missing":
        return str(InputError("this field is required and missing", where=place))
    if kind == "extra_forbidden":
        fields = _fields_at(schema, location[:-1])
        if len(location) == 1:
            fields = (*fields, *other_fields)
        near = near_miss(location[-1], fields)
        unknown = InputError(
            "unknown field", where=place, did_you_mean=near, allowed=sorted(fields)
        )
        return str(unknown)
    if kind == "literal_error":
        expected = str(context["expected"]).replace(" or ", ", ")
        choices = [choice.strip("'") for choice in expected.split(", ")]
        what = "not a value of this field"
        near = near_miss(value, choices)
        return str(InputError(what, where=place, value=value, did_you_mean=near, allowed=choices))
    return str(InputError(_words(kind, context, str(mistake["msg"])), where=place, value=value))


def _words(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"must be {words} {context[key]}"
    if kind in _LENGTHS:
        key, bound, of_what = _LENGTHS[kind]
        return f"must have {bound} {context[key]} {of_what}"
    return _WORDS.get(kind, message[:1].lower() + message[1:])


def field_path(location: Sequence[int | str]) -> str:
    """A pydantic location as a user writes it.

    >>> field_path(("levels", 0, "gpus"))
    'levels[0].gpus'
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        name = part if part.isprintable() and len(part) <= LONGEST_VALUE else shown(part)
        path += f".{name}" if path else name
    return path


def _fields_at(schema: type[BaseModel], location: Sequence[int | str]) -> tuple[str, ...]:
    """Names allowed in the mapping at `location`."""
    current = schema
    for part in location:
        field = current.model_fields.get(part) if isinstance(part, str) else None
        inner = _schema_in(field.annotation) if field is not None else None
        # Indices and union tags name no field: the class reached so far still holds.
        current = inner or current
    return tuple(field.alias or name for name, field in current.model_fields.items())


def _schema_in(annotation: object) -> type[BaseModel] | None:
    """The pydantic class that an annotation such as `tuple[Level, ...] | None` speaks of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_schema_in(argument) for argument in get_args(annotation))
    return next((schema for schema in inner if schema is not None), None)
