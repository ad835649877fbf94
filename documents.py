"""

Reads YAML and JSON that may be hostile: bounded size and depth, plain data only, errors in words.

>>> parse_mapping("gpus: 8", "cluster.yaml")
{'gpus': 8}
>>> parse_mapping("gpus: 8\\ngpus: 16", "cluster.yaml")
Traceback (most recent call last):
    ...
meshwright.errors.InputError: cluster.yaml: line 2: field 'gpus' is given twice
"""

from __future__ import annotations

import ast
import csv
import inspect
import io
import json
import math
import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata, resources
from itertools import groupby, pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError

from meshwright.errors import InputError, name_text, near_miss, shown

if TYPE_CHECKING:
    import pandas
    from pydantic_core import CoreSchema

SMALL_FILE_BYTES = 2**20
"""Most bytes of a file that describes one thing, such as a model: these have a few kilobytes."""
LARGE_FILE_BYTES = 16 * 2**20
"""Most bytes of a file that lists: a cluster that names each of 131,072 nodes fits."""
DEEPEST = 32
"""Mappings and lists inside one another."""
_TOO_DEEP = f"nested more than {DEEPEST} levels deep"
LONGEST_PATH = 500
_LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""As safe as the other, and six times as fast."""


def read_mapping(path: Path, largest_bytes: int = SMALL_FILE_BYTES) -> dict[str, object]:
    """The mapping that a YAML or JSON file of bounded size holds. Raises InputError, naming the file.

    Parameters
    ----------
    path
        Of the file.
    largest_bytes
        What it may have at most.
    """
    return parse_mapping(read_text(path, largest_bytes), path_text(path))


def read_text(path: Path, largest_bytes: int = SMALL_FILE_BYTES) -> str:
    """The text of a regular UTF-8 file. Raises InputError where there is none, or it is too large.

    Parameters
    ----------
    path
        Of the file.
    largest_bytes
        What it may have at most.
    """
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
    require_file(path, where)
    with path.open("rb") as file:
        return file.read(byte_count)


def require_file(path: Path, where: str) -> None:
    """Raises InputError, with what it is, for a path that is no file: pipes and devices may never end.

    Parameters
    ----------
    path
        That must be a file.
    where
        Its name in messages.
    """
    if path.is_file():
        return
    what = "no such file"
    if str(path) == "-":
        what = "standard input is not read: write it to a file first"
    elif path.is_dir():
        what = "this is a directory, not a file"
    elif path.exists():
        what = "this is a pipe or a device, not a file: write what it gives to a file first"
    raise InputError(what, where=where)


def is_file(text: str) -> bool:
    """Whether a user's text, of any length and content, is the path of a file.

    Parameters
    ----------
    text
        As a user typed it.
    """
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
    """A path as an error names it: quoted and cut where it cannot be printed as it is.

    Parameters
    ----------
    path
        Of any length, with any characters.
    """
    return name_text(str(path), LONGEST_PATH)


def packaged_document(package: str, file: str) -> Any:
    """The plain data of a YAML file that comes with meshwright, which is trusted to be sound.

    Parameters
    ----------
    package
        The package whose folder has the file, or a folder with it: `meshwright.model_specs`.
    file
        Path of the file from there: `data/catalog.yaml`.
    """
    return yaml.load(_packaged_text(package, file), Loader=_LOADER)  # noqa: S506


def _packaged_text(package: str, file: str) -> str:
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")


class PackagedEntries(Mapping[str, Any]):
    """The mapping that such a file holds, each entry read when it is asked for: requests ask for one of many.

    Parameters
    ----------
    package, file
        As `packaged_document` takes them. Entries begin without indent, under names without quotes.
    """

    def __init__(self, package: str, file: str) -> None:
        parts = re.split(r"(?m)^(?=[^\s#])", _packaged_text(package, file))[1:]
        self._texts = {part.partition(":")[0]: part for part in parts}
        self._known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            self._known |= yaml.load(self._texts[name], Loader=_LOADER)  # noqa: S506
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


def parse_mapping(text: str, where: str) -> dict[str, object]:
    """A JSON or YAML document whose root is a mapping with text keys; `where` names it in errors.

    Parameters
    ----------
    text
        The document.
    where
        A path, or what it is.

    Raises
    ------
    InputError
        For any other document, an alias, a key given twice, or nesting deeper than `DEEPEST`.
    """
    return mapping_of(parse_document(text, where), where)


def mapping_of(data: object, where: str) -> dict[str, object]:
    """A parsed document, which must be a mapping with text keys. Raises InputError for any other.

    Parameters
    ----------
    data
        What a parser made of the document.
    where
        Its name in messages.
    """
    if data is None:
        raise InputError("the document is empty", where=where)
    if not isinstance(data, dict):
        raise InputError("the document must be a mapping of fields", where=where, value=data)
    for key in data:
        if not isinstance(key, str):
            raise InputError("field names must be texts", where=where, value=key)
    return data


def parse_document(text: str, where: str) -> object:
    """A JSON or YAML document of any kind, None where it is empty; bounded as `parse_mapping` is.

    Parameters
    ----------
    text
        JSON where it begins with a brace or a bracket, else YAML.
    where
        Its name in messages.
    """
    is_json = text.lstrip()[:1] in ("{", "[")
    return _parse_json(text, where) if is_json else _parse_yaml(text, where)


def compose(text: str, where: str) -> yaml.Node:
    """The nodes of a YAML or JSON text, each with its place in the text; bounded as `parse_mapping` is.

    Parameters
    ----------
    text
        YAML or JSON.
    where
        Its name in messages.
    """
    with _yaml_errors_named(text, where):
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
        data = json.loads(text, object_pairs_hook=without_repeats)
    except InputError:
        raise
    except json.JSONDecodeError as error:
        what = f"not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        if where.endswith(".json"):
            # YAML would take a last comma, and read 1e-06 as a text.
            raise InputError(what, where=where) from None
        try:  # A YAML flow mapping starts with a brace as well.
            return _parse_yaml(text, where)
        except InputError:
            raise InputError(what, where=where) from None
    except RecursionError:
        raise InputError(_TOO_DEEP, where=where) from None
    except ValueError:
        raise InputError("an integer has too many digits", where=where) from None
    # How deep json itself reads differs from one Python to the next.
    level: list[object] = [data]
    for _ in range(DEEPEST):
        level = [
            value
            for each in level
            if isinstance(each, dict | list)
            for value in (each.values() if isinstance(each, dict) else each)
        ]
    if any(isinstance(value, dict | list) for value in level):
        raise InputError(_TOO_DEEP, where=where)
    return data


def _parse_yaml(text: str, where: str) -> object:
    with _yaml_errors_named(text, where):
        _refuse_bombs(text, where)
        # Both are safe loaders: plain data only.
        return yaml.load(text, Loader=_LOADER)  # noqa: S506


@contextmanager
def _yaml_errors_named(text: str, where: str) -> Iterator[None]:
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
        if "nesting depth" in str(error.problem):
            # PyYAML from 6.0.4 on refuses some 1,000 levels before it says where they begin.
            raise InputError(_TOO_DEEP, where=where) from None
        what = f"not valid YAML: {error.problem or error.context}{place}"
        lines = [*text.split("\n"), ""]
        if mark and lines[mark.line].startswith("\t", mark.column):
            what += ": a tab, where lines are indented by spaces"
        raise InputError(what, where=where) from None
    except yaml.YAMLError as error:
        what = f"not valid YAML: {str(error).splitlines()[0]}"
        raise InputError(what, where=where) from None
    except RecursionError:
        raise InputError(_TOO_DEEP, where=where) from None
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
                raise InputError(f"line {line}: {_TOO_DEEP}", where=where)
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


# Documents of fixed fields, and what pydantic finds wrong in them, in the words of someone who writes YAML.


class ClosedDocument(BaseModel):
    """A part of a document: what it holds stays as it was read, and it has no other fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), defer_build=True
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """A field is described by what stands below it in the source."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        texts: dict[str, str] = {}
        for kind in reversed(cls.__mro__):
            texts |= _field_texts(kind.__module__).get(kind.__name__, {})
        for name, field in cls.model_fields.items():
            if name in texts:
                properties.get(field.alias or name, {}).setdefault("description", texts[name])
        return schema


def left_out_at(default: object) -> Any:
    """A field with this default, at which documents say nothing of it, as those from before it was there.

    Parameters
    ----------
    default
        At which the field is not written; compared by ==.
    """
    return Field(default=default, exclude_if=lambda value: bool(value == default))


@cache
def _field_texts(module: str) -> dict[str, dict[str, str]]:
    """What stands below the fields of a module's documents, by class; nothing without its source."""
    try:
        classes = ast.parse(inspect.getsource(sys.modules[module])).body
    except (OSError, TypeError):
        return {}
    return {
        document.name: {
            ast.unparse(field.target): " ".join(str(text.value.value).split())
            for field, text in pairwise(document.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        }
        for document in classes
        if isinstance(document, ast.ClassDef)
    }


MOST_LINES = 20
"""More mistakes of one document than this are only counted."""
_LIMITS = {
    "greater_than_equal": ("ge", "must be at least {}"),
    "greater_than": ("gt", "must be more than {}"),
    "less_than_equal": ("le", "must be at most {}"),
    "less_than": ("lt", "must be less than {}"),
    "too_long": ("max_length", "must have at most {} entries"),
    "too_short": ("min_length", "must have at least {} entries"),
    "string_too_long": ("max_length", "must have at most {} characters"),
    "string_too_short": ("min_length", "must have at least {} characters"),
}
"""By kind of pydantic error, where its limit stands, and what is said of it."""
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
    lines = []
    by_place = groupby(mistakes[:MOST_LINES], lambda mistake: _right_place(mistake, schema))
    for right, misplaced in by_place:
        if right is None:
            lines += [_line(mistake, where, schema, other_fields) for mistake in misplaced]
        else:
            names = ", ".join(name_text(str(mistake["loc"][-1])) for mistake in misplaced)
            lines.append(f"{where}: {names}: {right}")
    if len(mistakes) > MOST_LINES:
        lines.append(f"{where}: and {len(mistakes) - MOST_LINES} more mistakes")
    return "\n".join(lines)


def _right_place(mistake: Mapping[str, Any], schema: type[BaseModel]) -> str | None:
    """Where an unknown field, or all that it holds, would be known; None where it would be nowhere near."""
    if mistake["type"] != "extra_forbidden":
        return None
    *place, name = mistake["loc"]
    inside = set(mistake["input"]) if isinstance(mistake["input"], dict) else set()
    inside = inside or {name}
    around = _class_at(schema, place)
    if inside <= set(_fields_at(around, ())):
        return f"leave it out, and write what it holds under `{field_path(place)}`"
    for beside, field in around.model_fields.items():
        inner = _schema_in(field.annotation)
        fields = set() if inner is None else set(_fields_at(inner, ()))
        right = field_path((*place, field.alias or beside))
        if name in fields:
            return f"must stand under `{right}`"
        if inside <= fields:
            return f"write what it holds under `{right}`"
    return None


Schema = TypeVar("Schema", bound=BaseModel)


def validated(
    schema: type[Schema],
    data: Mapping[str, Any],
    where: str,
    other_fields: Collection[str] = (),
) -> Schema:
    """A document of a schema, from its fields.

    Parameters
    ----------
    schema
        Its pydantic class.
    data
        Fields by name.
    where, other_fields
        As `validation_message` takes them.

    Raises
    ------
    InputError
        A line for each mistake.
    """
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise InputError(validation_message(error, where, schema, other_fields)) from None


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
    if kind in _LIMITS:
        limit, sentence = _LIMITS[kind]
        return sentence.format(context[limit])
    return _WORDS.get(kind, message[:1].lower() + message[1:])


def field_path(location: Sequence[int | str]) -> str:
    """A pydantic location as a user writes it.

    Parameters
    ----------
    location
        Names of fields and positions in lists, from the root.

    >>> field_path(("levels", 0, "gpus"))
    'levels[0].gpus'
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        path += f".{name_text(part)}" if path else name_text(part)
    return path


def _fields_at(schema: type[BaseModel], location: Sequence[int | str]) -> tuple[str, ...]:
    """Names allowed in the mapping at `location`."""
    fields = _class_at(schema, location).model_fields
    return tuple(field.alias or name for name, field in fields.items())


def _class_at(schema: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel]:
    """The pydantic class of the mapping at `location`."""
    current = schema
    for part in location:
        field = current.model_fields.get(part) if isinstance(part, str) else None
        inner = _schema_in(field.annotation) if field is not None else None
        # Indices and union tags name no field: the class reached so far still holds.
        current = inner or current
    return current


def _schema_in(annotation: object) -> type[BaseModel] | None:
    """The pydantic class that an annotation such as `tuple[Level, ...] | None` speaks of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_schema_in(argument) for argument in get_args(annotation))
    return next((schema for schema in inner if schema is not None), None)


# Writing the files of a launch: whole files, never over someone's work, never outside the folder.


def refuse_taken(
    directory: str | os.PathLike[str], names: Iterable[str], force: bool = False
) -> None:
    """Says before long work what would stop its files from being written.

    Parameters
    ----------
    directory
        The folder that they will be written to. It need not exist.
    names
        Of files or folders in it.
    force
        Files that are there are replaced.

    Raises
    ------
    InputError
        The folder is a file, or a name is taken.
    """
    folder = Path(directory)
    there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    if there.exists() and not there.is_dir():
        raise InputError(f"{there} is a file, not a folder. Choose another place with -o.")
    if there.exists() and not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{there} may not be written to. Choose another place with -o.")
    taken = [name for name in names if os.path.lexists(folder / name)]
    if taken and not force:
        them = "it" if len(taken) == 1 else "them"
        raise InputError(
            f"{folder}: {_listed(taken)} already there. Choose another place, remove {them}, or say --force."
        )


def refuse_taken_file(path: Path, force: bool = False) -> None:
    """Says before long work what would stop one file from being written.

    Raises InputError for a folder, and for a file that is there.

    Parameters
    ----------
    path
        Of the file that is to be written.
    force
        Whether a file that is there is replaced; a folder never is.
    """
    if not path.name or path.is_dir():
        raise InputError(f"{path} is a folder, not a file. Name a file in it with -o.")
    if os.path.lexists(path) and not force:
        raise InputError(
            f"{path} is already there. Choose another place, remove it, or say --force."
        )
    refuse_taken(path.parent, ())


def write_files(
    directory: str | os.PathLike[str], files: Mapping[str, str], force: bool = False
) -> list[Path]:
    """Writes texts (UTF-8) under a folder, by relative name, and returns their paths; `.sh` is executable.

    The folder is made if need be. Every text is first written beside its place under a temporary name, then
    all are renamed, so a reader never sees half a file, and an interrupt leaves all files or none. Raises
    InputError if a name leads out of the folder (also through a symbolic link), or if a file exists and
    `force` is not set.

    Parameters
    ----------
    directory
        The folder.
    files
        Texts by their names under it.
    force
        Whether files that are there are replaced.
    """
    root = _folder(Path(directory))
    targets = {name: _target(root, name) for name in files}
    refuse_taken(root, files, force)
    for target in targets.values():
        if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
            raise InputError(f"{target} is not a plain file: it is not replaced. Remove it first.")
    with uninterrupted():
        _write_all(root, {targets[name]: text for name, text in files.items()})
    return list(targets.values())


def left_over(
    directory: str | os.PathLike[str], names: Iterable[str], written: Iterable[str]
) -> str | None:
    """Says which files of earlier work still lie beside those that were written; None where none do.

    Parameters
    ----------
    directory
        The folder that was written to.
    names
        Of files or folders that earlier work may have left there.
    written
        Names of the files that were written.
    """
    written_roots = {PurePosixPath(name).parts[0] for name in written}
    folder = Path(directory)
    older = [name for name in names if name not in written_roots and os.path.lexists(folder / name)]
    if not older:
        return None
    return (
        f"{folder}: {_listed(older)} still there from before, and no part of what was written now."
    )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT and SIGTERM wait until what is inside is done. Only the main thread hears them at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda n, _: waiting.append(n)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        for heard in waiting:
            signal.raise_signal(heard)


def _write_all(root: Path, texts: Mapping[Path, str]) -> None:
    waiting: dict[Path, Path] = {}
    try:
        for target, text in texts.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            waiting[target] = _write_beside(target, text)
        for target, temporary in waiting.items():
            temporary.replace(target)
    except OSError as error:
        raise InputError(f"cannot write to {root}: {error.strerror or error}") from error
    except UnicodeError as error:
        raise InputError(f"cannot write to {root}: a text cannot be encoded as UTF-8") from error
    finally:
        for temporary in waiting.values():
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _folder(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return directory.resolve(strict=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"{path_text(directory)} cannot be used as a folder: {why}. Choose another."
        ) from error


def _target(root: Path, name: str) -> Path:
    parts = PurePosixPath(name).parts
    if (
        not parts
        or name != str(PurePosixPath(*parts))
        or name.startswith("/")
        or ".." in parts
        or "\0" in name
    ):
        raise InputError(f"{name!r} is no file name inside a folder.")
    target = root.joinpath(*parts)
    if not target.parent.resolve().is_relative_to(root):
        raise InputError(f"{name!r} leads out of {root} through a symbolic link.")
    return target


def _write_beside(target: Path, text: str) -> Path:
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    mode = 0o777 if target.suffix == ".sh" else 0o666

    def created(path: str, flags: int) -> int:
        return os.open(path, flags, mode)  # Less what the user's umask takes away.

    try:
        with open(temporary, "x", encoding="utf-8", newline="\n", opener=created) as stream:
            stream.write(text)
    except (OSError, UnicodeError):
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


# Documents as the JSON that commands print.


def finite(value: Any) -> Any:
    """The same plain data with None in place of every number that JSON cannot hold.

    Parameters
    ----------
    value
        Numbers, texts, None, and mappings, lists and tuples of them; tuples become lists.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


def json_text(document: Mapping[str, Any]) -> str:
    """One JSON document on one line, with `"schema": 1` where it names no other schema.

    Parameters
    ----------
    document
        Plain data; what JSON cannot hold becomes null (`finite`).
    """
    return json.dumps(finite({"schema": 1, **document}), ensure_ascii=False, allow_nan=False)


# Tables as text files.


_FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV (RFC 4180) under a header.

    Parameters
    ----------
    columns
        Keys of the rows, in the order of the file.
    rows
        Plain values by column. None, or a column that a row lacks, is an empty cell; a list is its items with
        spaces between them; what a spreadsheet would take for a formula gets an apostrophe before it.

    Returns
    -------
    str
        The text, one row a line.
    """
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(column)) for column in columns])
    return stream.getvalue()


def _cell(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    if isinstance(value, str) and value.startswith(_FORMULA_SIGNS):
        return f"'{value}"
    return value


# Which version of the program writes a document.


def frame_of(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Rows as a table of pandas, a column for each name in the order in which names come up.

    Parameters
    ----------
    rows
        Of one table; a name that a row lacks is a missing value there.

    Raises
    ------
    InputError
        If pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        words = "needs pandas: pip install 'meshwright[notebook]'"
        raise InputError(words, where="to_frame") from None
    table = [dict(row) for row in rows]
    return pandas.DataFrame(
        table, columns=list(dict.fromkeys(name for row in table for name in row))
    )


def program_version() -> str:
    """Such as `meshwright 0.1.0`; without a number where it runs from a folder that is not installed."""
    try:
        return f"meshwright {metadata.version('meshwright')}"
    except metadata.PackageNotFoundError:
        return "meshwright"
