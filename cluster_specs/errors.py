"""What goes wrong when a cluster is read: the user's input, said so that it can be put right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from meshwright.errors import LONGEST_CHOICE_LIST, LONGEST_VALUE, shown

MOST_MISTAKES = 20


def suggestion(word: object, choices: Iterable[str]) -> str:
    """The end of a message about an unknown word: the near miss, if there is one, and what is allowed."""
    names = sorted(choices)
    plain = word[:100].lower() if isinstance(word, str) else ""
    close = difflib.get_close_matches(plain, names, n=1, cutoff=0.6)
    # A part of a name ("h100") is too short for the ratio above to see it.
    close = close or [name for name in names if len(plain) > 2 and plain in name]
    hint = f"; did you mean {close[0]!r}?" if close else ""
    more = len(names) - LONGEST_CHOICE_LIST
    listed = ", ".join(names[:LONGEST_CHOICE_LIST]) + (f" and {more} more" if more > 0 else "")
    return f"{hint}; allowed: {listed}"


def validation_message(
    error: ValidationError, where: str, fields: Mapping[str, Sequence[str]]
) -> str:
    """A pydantic error, one line per mistake. `fields` has the allowed names by parent ('' is the root)."""
    mistakes = error.errors(include_url=False)
    lines = [_line(dict(mistake), where, fields) for mistake in mistakes[:MOST_MISTAKES]]
    if len(mistakes) > MOST_MISTAKES:
        lines.append(f"{where}: and {len(mistakes) - MOST_MISTAKES} more mistakes")
    return "\n".join(lines)


_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def _line(mistake: dict[str, Any], where: str, fields: Mapping[str, Sequence[str]]) -> str:
    location: tuple[int | str, ...] = mistake["loc"]
    kind, value, context = str(mistake["type"]), mistake["input"], mistake.get("ctx", {})
    place = f"{where}: {_path(location)}" if location else where
    if kind == "missing":
        return f"{place}: this field is required and missing"
    if kind == "extra_forbidden":
        parents = [part for part in location[:-1] if isinstance(part, str)]
        allowed = fields.get(parents[-1] if parents else "", ())
        return f"{place}: unknown field{suggestion(location[-1], allowed)}"
    if kind == "literal_error":
        choices = [
            word.strip("'") for word in str(context["expected"]).replace(" or ", ", ").split(", ")
        ]
        return f"{place}: not a value of this field, got {shown(value)}{suggestion(value, choices)}"
    if kind == "value_error":
        return f"{place}: {context.get('error', mistake['msg'])}"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"{place}: must be {words} {context[key]}, got {shown(value)}"
    message = str(mistake["msg"]).replace("Input should be a valid", "must be a valid")
    return f"{place}: {message[:1].lower()}{message[1:]}, got {shown(value)}"


def _path(location: Sequence[int | str]) -> str:
    """A pydantic location as a user writes it: ('levels', 0, 'gpus') is levels[0].gpus."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            name = part if part.isprintable() and len(part) <= LONGEST_VALUE else shown(part)
            path += f".{name}" if path else name
    return path
