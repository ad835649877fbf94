"""Errors about what a user wrote: what is wrong, where, the value, what is allowed, the near miss."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from meshwright.errors import LONGEST_VALUE, InputError, shown

MOST_LINES = 20
"""More errors of one document than this are only counted."""
MOST_COMPARED = 500


def near_miss(word: object, choices: Iterable[str]) -> str | None:
    """The choice that a misspelt word most likely meant, or None."""
    if not isinstance(word, str):
        return None
    # The choices may be the keys of a hostile document.
    bounded = islice((choice for choice in choices if len(choice) <= LONGEST_VALUE), MOST_COMPARED)
    by_plain = {_plain(choice): choice for choice in bounded}
    found = difflib.get_close_matches(_plain(word[:100]), by_plain, n=1, cutoff=0.6)
    return by_plain[found[0]] if found else None


def _plain(word: str) -> str:
    return word.lower().replace("-", "_").replace(" ", "_")


def validation_message(
    error: ValidationError, where: str, allowed_fields: type[BaseModel] | Collection[str] = ()
) -> str:
    """A pydantic error as one line per mistake: `where: field.path: what is wrong, got value; remedy`.

    `where` names the document. `allowed_fields` is its pydantic class, whose nested classes are followed to
    name the fields allowed at each level, or the names of its top-level fields.
    """
    mistakes = error.errors(include_url=False)
    lines = [_line(dict(mistake), where, allowed_fields) for mistake in mistakes[:MOST_LINES]]
    if len(mistakes) > MOST_LINES:
        lines.append(f"{where}: and {len(mistakes) - MOST_LINES} more mistakes")
    return "\n".join(lines)


def _line(
    mistake: dict[str, Any], where: str, allowed_fields: type[BaseModel] | Collection[str]
) -> str:
    location: tuple[int | str, ...] = mistake["loc"]
    kind: str = mistake["type"]
    context: dict[str, Any] = mistake.get("ctx", {})
    value = mistake["input"]
    path = field_path(location)
    full = f"{where}: {path}" if path else where
    if kind == "missing":
        return str(InputError("this field is required and missing", where=full))
    if kind == "extra_forbidden":
        choices = _fields_at(allowed_fields, location[:-1])
        name = location[-1]
        return str(
            InputError(
                "unknown field",
                where=full,
                did_you_mean=near_miss(name, choices),
                allowed=sorted(choices),
            )
        )
    if kind == "literal_error":
        literals = [
            choice.strip("'")
            for choice in str(context["expected"]).replace(" or ", ", ").split(", ")
        ]
        return str(
            InputError(
                "not a value of this field",
                where=full,
                value=value,
                did_you_mean=near_miss(value, literals),
                allowed=literals,
            )
        )
    if kind == "value_error":
        return f"{full}: {context.get('error', mistake['msg'])}"
    return str(InputError(_words(kind, context, str(mistake["msg"])), where=full, value=value))


def _words(kind: str, context: dict[str, Any], message: str) -> str:
    """What the commonest kinds of pydantic error mean, in the words of someone who writes YAML."""
    bounds = {
        "greater_than_equal": ("ge", "at least"),
        "greater_than": ("gt", "more than"),
        "less_than_equal": ("le", "at most"),
        "less_than": ("lt", "less than"),
    }
    if kind in bounds:
        key, words = bounds[kind]
        return f"must be {words} {context[key]}"
    kinds = {
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
    return kinds.get(kind, message[:1].lower() + message[1:])


def field_path(location: Sequence[int | str]) -> str:
    """A pydantic location as a user writes it: ("levels", 0, "gpus") is `levels[0].gpus`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            name = part if part.isprintable() and len(part) <= LONGEST_VALUE else shown(part)
            path += f".{name}" if path else name
    return path


def _fields_at(
    fields: type[BaseModel] | Collection[str], location: Sequence[int | str]
) -> tuple[str, ...]:
    """Names allowed in the mapping at `location`; empty where that cannot be told."""
    if not isinstance(fields, type):
        return tuple(fields) if not location else ()
    current: type[BaseModel] = fields
    for part in location:
        field = current.model_fields.get(part) if isinstance(part, str) else None
        inner = _model_in(field.annotation) if field is not None else None
        # Indices and union tags name no field: the class found so far still holds.
        current = inner or current
    return tuple(field.alias or name for name, field in current.model_fields.items())


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _model_in(argument)
        if found is not None:
            return found
    return None
