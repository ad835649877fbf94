"""Reads YAML and JSON that may be hostile: bounded size and depth, plain data only, errors in words.

>>> parse_mapping("gpus: 8", "cluster.yaml")
{'gpus': 8}
>>> parse_mapping("gpus: 8\\ngpus: 16", "cluster.yaml")
Traceback (most recent call last):
    ...
meshwright.errors.InputError: cluster.yaml: line 2: field 'gpus' is given twice
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from meshwright.errors import InputError, shown

SMALL_FILE_BYTES = 2**20
"""Most bytes of a file that describes one thing, such as a model: these have a few kilobytes."""
LARGE_FILE_BYTES = 16 * 2**20
"""Most bytes of a file that lists: a cluster that names each of 131,072 nodes fits."""
DEEPEST = 32
"""Mappings and lists inside one another."""
LONGEST_PATH = 500
_LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""As safe as the other, and six times as fast."""


def read_mapping(path: Path, largest_bytes: int = SMALL_FILE_BYTES) -> dict[str, object]:
    """The mapping that a YAML or JSON file of bounded size holds. Raises InputError, naming the file."""
    return parse_mapping(read_text(path, largest_bytes), path_text(path))


def read_text(path: Path, largest_bytes: int = SMALL_FILE_BYTES) -> str:
    """The text of a regular UTF-8 file. Raises InputError where there is none, or it is too large."""
    where = path_text(path)
    try:
        data = _bytes_of(path, where, largest_bytes + 1)
    except OSError as error:
        reason = error.strerror or "system error"
        raise InputError(f"cannot be read ({reason})", where=where) from None
    if len(data) > largest_bytes:
        what = f"the file is larger than {largest_bytes} bytes, the most that is read"
        raise InputError(what, where=where)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"this is not UTF-8 text (byte {error.start})", where=where) from None


def _bytes_of(path: Path, where: str, byte_count: int) -> bytes:
    if not path.is_file():
        raise InputError(_why_unreadable(path), where=where)
    with path.open("rb") as file:
        return file.read(byte_count)


def _why_unreadable(path: Path) -> str:
    """What a path is that is no file."""
    if path.is_dir():
        return "this is a directory, not a file"
    if path.exists():
        return "this is a pipe or a device, not a file: write what it gives to a file first"
    return "no such file"


def is_file(text: str) -> bool:
    """Whether a user's text, of any length and content, is the path of a file."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def path_of(value: object, where: str) -> Path:
    """The path that a caller in Python gave.

    Parameters
    ----------
    value
        A text or a path.
    where
        The parameter, for messages.

    Raises
    ------
    InputError
        It is something else, or empty.
    """
    if isinstance(value, str | os.PathLike) and str(value):
        return Path(value)
    raise InputError("must be the path of a file or folder", where=where, value=value)


def path_text(path: Path) -> str:
    """A path as an error names it: quoted and cut where it cannot be printed as it is."""
    text = str(path)
    return text if text.isprintable() and len(text) <= LONGEST_PATH else shown(text)


def packaged_document(package: str, file: str) -> Any:
    """The plain data of a YAML file that comes with meshwright, which is trusted to be sound.

    Parameters
    ----------
    package
        The folder as a package: `meshwright.model_specs.data`.
    file
        Name of the file in it.
    """
    text = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    return yaml.load(text, Loader=_LOADER)  # noqa: S506


def parse_mapping(text: str, where: str) -> dict[str, object]:
    """A JSON or YAML document whose root is a mapping with text keys; `where` names it in errors.

    Raises
    ------
    InputError
        For any other document, an alias, a key given twice, or nesting deeper than `DEEPEST`.
    """
    data = _parse_json(text, where) if text.lstrip().startswith("{") else _parse_yaml(text, where)
    if data is None:
        raise InputError("the document is empty", where=where)
    if not isinstance(data, dict):
        raise InputError("the document must be a mapping of fields", where=where, value=data)
    for key in data:
        if not isinstance(key, str):
            raise InputError("field names must be texts", where=where, value=key)
    return data


def compose(text: str, where: str) -> yaml.Node:
    """The nodes of a YAML or JSON text, each with its place in the text; bounded as `parse_mapping` is."""
    with _yaml_errors_named(where):
        _refuse_bombs(text, where)
        node: yaml.Node | None = yaml.compose(text, Loader=_LOADER)
    if node is None:
        raise InputError("the document is empty", where=where)
    return node


def _parse_json(text: str, where: str) -> object:
    def without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields: dict[str, object] = {}
        for key, value in pairs:
            if key in fields:
                raise InputError(f"field {shown(key)} is given twice", where=where)
            fields[key] = value
        return fields

    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except InputError:
        raise
    except json.JSONDecodeError as error:
        try:  # A YAML flow mapping starts with a brace as well.
            return _parse_yaml(text, where)
        except InputError:
            what = f"not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
            raise InputError(what, where=where) from None
    except RecursionError:
        raise InputError("the document is nested too deeply", where=where) from None
    except ValueError:
        raise InputError("an integer has too many digits", where=where) from None


def _parse_yaml(text: str, where: str) -> object:
    with _yaml_errors_named(where):
        _refuse_bombs(text, where)
        # Both are safe loaders: plain data only.
        return yaml.load(text, Loader=_LOADER)  # noqa: S506


@contextmanager
def _yaml_errors_named(where: str) -> Iterator[None]:
    """Turns what the YAML reader raises into an InputError that names the document."""
    try:
        yield
    except InputError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        if where.endswith(".toml"):
            what = "a TOML file, where YAML or JSON is read (launch files: --baseline and --from-launch)"
            raise InputError(what, where=where) from None
        what = f"not valid YAML: {error.problem or error.context}{place}"
        raise InputError(what, where=where) from None
    except yaml.YAMLError as error:
        what = f"not valid YAML: {str(error).splitlines()[0]}"
        raise InputError(what, where=where) from None
    except RecursionError:
        raise InputError("the document is nested too deeply", where=where) from None
    except (ValueError, OverflowError):
        raise InputError("a number or date cannot be read", where=where) from None


def _refuse_bombs(text: str, where: str) -> None:
    """Aliases blow a small file up exponentially, nesting the stack; a key given twice hides the first."""
    parents: list[_Parent] = []
    for event in yaml.parse(text, Loader=_LOADER):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent):
            what = f"line {line}: YAML aliases (*name) are not accepted: repeat the value"
            raise InputError(what, where=where)
        if isinstance(event, yaml.ScalarEvent) and parents:
            if parents[-1].repeats(event.value):
                what = f"line {line}: field {shown(event.value)} is given twice"
                raise InputError(what, where=where)
        elif isinstance(event, yaml.CollectionStartEvent):
            if parents:
                parents[-1].repeats(None)
            parents.append(_Parent(is_mapping=isinstance(event, yaml.MappingStartEvent)))
            if len(parents) > DEEPEST:
                what = f"line {line}: nested more than {DEEPEST} levels deep"
                raise InputError(what, where=where)
        elif isinstance(event, yaml.CollectionEndEvent):
            parents.pop()


class _Parent:
    """A mapping or list that the parser is inside of; a mapping's children are key and value in turn."""

    def __init__(self, *, is_mapping: bool) -> None:
        self._is_mapping = is_mapping
        self._next_is_key = is_mapping
        self._keys: set[str] = set()

    def repeats(self, scalar: str | None) -> bool:
        """Takes the next child (None: not a scalar) and says whether it is a key seen before."""
        is_key = self._next_is_key
        self._next_is_key = self._is_mapping and not is_key
        if not is_key or scalar is None:
            return False
        seen = scalar in self._keys
        self._keys.add(scalar)
        return seen
