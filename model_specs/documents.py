"""Reads YAML and JSON that may be hostile: bounded size and depth, plain data only, errors in words."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from meshwright.errors import InputError, shown

LARGEST_FILE_BYTES = 1 << 20
"""A model description is a few kilobytes."""
DEEPEST = 32
LONGEST_PATH = 500
_LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_text(path: Path, largest_bytes: int = LARGEST_FILE_BYTES) -> str:
    """The text of a regular UTF-8 file. Raises InputError where there is none, or it is too large."""
    where = path_text(path)
    try:
        if not path.is_file():
            kind = "this is a directory, not a file" if path.is_dir() else "no such file"
            raise InputError(kind, where=where)
        with path.open("rb") as file:
            data = file.read(largest_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot be read ({_reason(error)})", where=where) from None
    if len(data) > largest_bytes:
        raise InputError(
            f"the file is larger than {largest_bytes} bytes, the most that is read", where=where
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"this is not UTF-8 text (byte {error.start})", where=where) from None


def path_text(path: Path) -> str:
    """A path as an error names it: quoted and cut where it cannot be printed as it is."""
    text = str(path)
    return text if text.isprintable() and len(text) <= LONGEST_PATH else shown(text)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror or "system error") if isinstance(error, OSError) else str(error)


def parse_mapping(text: str, where: str) -> dict[str, object]:
    """A JSON or YAML document whose root is a mapping with text keys. Raises InputError on any other."""
    data = _parse_json(text, where) if text.lstrip().startswith("{") else _parse_yaml(text, where)
    if not isinstance(data, dict):
        what = (
            "the document is empty" if data is None else "the document must be a mapping of fields"
        )
        raise InputError(what, where=where, value=... if data is None else data)
    for key in data:
        if not isinstance(key, str):
            raise InputError("field names must be texts", where=where, value=key)
    return data


def _parse_json(text: str, where: str) -> object:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found:
                raise InputError(f"field {shown(key)} is given twice", where=where)
            found[key] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        try:  # A YAML flow mapping starts with a brace as well.
            return _parse_yaml(text, where)
        except InputError:
            what = f"not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
            raise InputError(what, where=where) from None
    except RecursionError:
        raise InputError("the document is nested too deeply", where=where) from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError("an integer has too many digits", where=where) from None


def _parse_yaml(text: str, where: str) -> object:
    try:
        _refuse_bombs(text, where)
        # Both are safe loaders: plain data only.
        return yaml.load(text, Loader=_LOADER)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(
            f"not valid YAML: {error.problem or error.context}{place}", where=where
        ) from None
    except yaml.YAMLError as error:
        raise InputError(f"not valid YAML: {str(error).splitlines()[0]}", where=where) from None
    except RecursionError:
        raise InputError("the document is nested too deeply", where=where) from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError("a number or date cannot be read", where=where) from None


def _refuse_bombs(text: str, where: str) -> None:
    """Aliases blow a small file up exponentially, nesting the stack; a key given twice hides the first."""
    open_nodes: list[_Node] = []
    for event in yaml.parse(text, Loader=_LOADER):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent):
            raise InputError(
                f"line {line}: YAML aliases (*name) are not accepted: repeat the value", where=where
            )
        if isinstance(event, yaml.ScalarEvent) and open_nodes:
            repeated = open_nodes[-1].repeats(event.value)
            if repeated:
                raise InputError(
                    f"line {line}: field {shown(event.value)} is given twice", where=where
                )
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            if open_nodes:
                open_nodes[-1].repeats(None)
            open_nodes.append(_Node(mapping=isinstance(event, yaml.MappingStartEvent)))
            if len(open_nodes) > DEEPEST:
                raise InputError(
                    f"line {line}: nested more than {DEEPEST} levels deep", where=where
                )
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            open_nodes.pop()


class _Node:
    """A mapping or sequence that the parser is inside of; a mapping's children alternate key and value."""

    def __init__(self, *, mapping: bool) -> None:
        self._mapping = mapping
        self._keys: set[str] = set()
        self._next_is_key = mapping

    def repeats(self, scalar: str | None) -> bool:
        """Takes the next child (None: not a scalar) and says whether it is a key seen before."""
        is_key = self._next_is_key
        self._next_is_key = self._mapping and not is_key
        if not is_key or scalar is None:
            return False
        seen = scalar in self._keys
        self._keys.add(scalar)
        return seen
