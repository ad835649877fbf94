"""Reads YAML documents that may be hostile: bounded size and depth, plain data only, errors in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from meshwright.errors import InputError, shown

LARGEST_FILE_BYTES = 16 * 2**20
"""Room for a cluster that names each of 131,072 nodes."""
DEEPEST = 16
LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_mapping(path: Path) -> dict[str, object]:
    """The mapping that a YAML or JSON file holds. Raises InputError, naming the file."""
    return parse_mapping(read_text(path), str(path))


def parse_mapping(text: str, where: str) -> dict[str, object]:
    """The mapping that a YAML or JSON text holds; `where` names the text in errors."""
    with _errors_named(where):
        _refuse_bombs(text, where)
        # Both loaders are safe: plain data only.
        data = yaml.load(text, Loader=LOADER)  # noqa: S506
    if not isinstance(data, dict):
        raise InputError(f"{where}: a cluster must be a mapping of fields, got {shown(data)}")
    for key in data:
        if not isinstance(key, str):
            raise InputError(f"{where}: field names must be texts, got {shown(key)}")
    return data


def compose(text: str, where: str) -> yaml.Node:
    """The nodes of a YAML or JSON text, each with its place in the text; bounded as `parse_mapping` is."""
    with _errors_named(where):
        _refuse_bombs(text, where)
        node: yaml.Node | None = yaml.compose(text, Loader=LOADER)
    if node is None:
        raise InputError(f"{where}: the file is empty")
    return node


@contextmanager
def _errors_named(where: str) -> Iterator[None]:
    """Turns what the YAML reader raises into ClusterErrors that name the text."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(
            f"{where}: not valid YAML: {error.problem or error.context}{place}"
        ) from None
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from None
    except (RecursionError, OverflowError):
        raise InputError(
            f"{where}: the document is nested too deeply or holds too large a number"
        ) from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: a number or date cannot be read") from None


def read_text(path: Path) -> str:
    """The text of a UTF-8 file of bounded size. Raises InputError, naming the file."""
    try:
        if not path.is_file():
            kind = "this is a directory, not a file" if path.is_dir() else "no such file"
            raise InputError(f"{path}: {kind}")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"{shown(str(path))}: cannot be read ({error.strerror or 'system error'})"
        ) from None
    if len(data) > LARGEST_FILE_BYTES:
        raise InputError(
            f"{path}: the file is larger than the {LARGEST_FILE_BYTES} bytes that are read"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: this is not UTF-8 text (byte {error.start})") from None


def _refuse_bombs(text: str, where: str) -> None:
    """Aliases can blow a small file up exponentially, nesting the stack; a repeated key hides the first.

    A frame holds the keys seen so far and whether a key comes next; None stands for a sequence.
    """
    frames: list[tuple[set[str], list[bool]] | None] = []
    for event in yaml.parse(text, Loader=LOADER):
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent):
            raise InputError(
                f"{where}: line {line}: YAML aliases (*name) are not accepted; repeat the value"
            )
        if isinstance(event, yaml.CollectionEndEvent):
            frames.pop()
        if not isinstance(event, yaml.NodeEvent):
            continue
        frame = frames[-1] if frames else None
        if frame is not None:
            keys, key_next = frame
            if key_next[0] and isinstance(event, yaml.ScalarEvent):
                if event.value in keys:
                    raise InputError(
                        f"{where}: line {line}: field {shown(event.value)} is given twice"
                    )
                keys.add(event.value)
            key_next[0] = not key_next[0]
        if isinstance(event, yaml.CollectionStartEvent):
            frames.append((set(), [True]) if isinstance(event, yaml.MappingStartEvent) else None)
            if len(frames) > DEEPEST:
                raise InputError(f"{where}: line {line}: nested more than {DEEPEST} levels deep")
