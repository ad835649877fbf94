"""Reads measured routing: load arrays, token traces and what serving and training systems record."""

from __future__ import annotations

import csv
import io
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.planner.experts.problem import MOST_ELEMENTS, Loads, check_loads
from meshwright.planner.experts.recorders import (
    LARGEST_FILE_BYTES,
    LARGEST_TEXT_BYTES,
    MOST_EXPERTS,
    MOST_LAYERS,
    Routing,
    bounded_bytes,
    cut_steps,
    from_tokens,
    number_array,
    parsed_json,
    read_dump_folder,
    read_jsonl,
    read_statistics_folder,
    read_torch,
    to_logical,
    window_names,
)

LARGEST_UNPACKED_BYTES = 8 * MOST_ELEMENTS + 2**20
"""Of the arrays of an npz file: as many numbers of 64 bits as are read, and their headers."""
_PICKLES = (".pkl", ".pickle", ".joblib")
NOT_LOADS = ("num_groups", "topk", "top_k", "seed", "num_experts", "topk_groups", "token_topic")


_DAMAGED_ARRAY = (
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    tokenize.TokenError,
)
"""What numpy raises on a damaged header, which it reads as a Python literal."""
_DAMAGED_ARCHIVE = (
    EOFError,
    NotImplementedError,
    OSError,
    RuntimeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def read_routing(path: Path, *, windows: tuple[str, ...] = (), split: int = 1) -> Routing:
    """The routing in a file or folder; `windows` chooses arrays by name, `split` cuts steps into windows.

    npz, npy, json, csv; jsonl (Megatron); a folder with meta_info.json (TensorRT-LLM); pt, or a folder of
    them (SGLang, needs torch). Raises InputError.
    """
    if split < 1:
        raise InputError(f"windows: must be cut into at least 1, got {split}")
    if path.is_dir():
        dumps = not (path / "meta_info.json").is_file() and any(path.glob("*.pt"))
        return read_dump_folder(path, split) if dumps else read_statistics_folder(path, split)
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise InputError(
            f"{path}: pickles are refused, loading one can run any code; save as npz, npy or json"
        )
    arrays = read_arrays(path)
    if arrays is not None:
        routing = _from_arrays(arrays, path, () if suffix == ".npy" else windows, split)
    else:
        readers: dict[str, Callable[[bytes], Routing]] = {
            ".csv": lambda data: _csv(data, path),
            ".jsonl": lambda data: read_jsonl(data, path, split),
            ".pt": lambda data: read_torch(data, path, split),
        }
        if suffix not in readers:
            raise InputError(
                f"{path}: {suffix or 'no ending'} is not read; allowed: .npz, .npy, .json, "
                f"{', '.join(readers)}, or a folder"
            )
        largest = LARGEST_FILE_BYTES if suffix == ".pt" else LARGEST_TEXT_BYTES
        data = bounded_bytes(path, largest)
        if suffix != ".pt":
            _refuse_pickle(data, path)
        routing = readers[suffix](data)
    check_loads(routing.loads, str(path))
    return routing


def read_arrays(path: Path) -> dict[str, NDArray[Any]] | None:
    """The arrays of an npz, npy (called `load`) or JSON file; None for other endings. Raises InputError."""
    readers: dict[str, Callable[[bytes], dict[str, NDArray[Any]]]] = {
        ".npz": lambda data: _npz(data, path),
        ".npy": lambda data: {"load": _npy(io.BytesIO(data), str(path))},
        ".json": lambda data: _json_arrays(data, path),
    }
    suffix = path.suffix.lower()
    if suffix not in readers or path.is_dir():
        return None
    data = bounded_bytes(path, LARGEST_TEXT_BYTES if suffix == ".json" else LARGEST_FILE_BYTES)
    _refuse_pickle(data, path)
    return readers[suffix](data)


def _refuse_pickle(data: bytes, path: Path) -> None:
    if data[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise InputError(
            f"{path}: this is a pickle; pickles are refused, loading one can run any code"
        )


def _npy(stream: IO[bytes], where: str) -> NDArray[Any]:
    try:
        with warnings.catch_warnings():
            # A header that Python 2 wrote is read as well, only slower.
            warnings.simplefilter("ignore", UserWarning)
            array = np.load(stream, allow_pickle=False)
    except _DAMAGED_ARRAY as error:
        if "allow_pickle" in str(error):
            raise InputError(
                f"{where}: holds pickled objects; pickles are refused, loading one can run any code"
            ) from None
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise InputError(f"{where}: not a numpy array ({reason})") from None
    return np.asarray(array)


def _npz(data: bytes, path: Path) -> dict[str, NDArray[Any]]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > LARGEST_UNPACKED_BYTES:
                raise InputError(f"{path}: unpacks to more than {LARGEST_UNPACKED_BYTES} bytes")
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            arrays = {}
            for name in names[:256]:
                # Unpacked into its array at once: the bytes in between would take as much again.
                with archive.open(name) as stream:
                    arrays[name.removesuffix(".npy")] = _npy(stream, f"{path}: {name}")
            return arrays
    except InputError:
        raise
    except _DAMAGED_ARCHIVE as error:
        raise InputError(f"{path}: not an npz file ({str(error)[:100]})") from None


def _json_arrays(data: bytes, path: Path) -> dict[str, NDArray[Any]]:
    document = parsed_json(data, str(path))
    fields = document if isinstance(document, Mapping) else {"load": document}
    arrays: dict[str, NDArray[Any]] = {}
    for name, value in fields.items():
        if isinstance(value, list | int) and not isinstance(value, bool):
            arrays[str(name)] = number_array(value, f"{path}: {str(name)[:60]}")
    return arrays


def _csv(data: bytes, path: Path) -> Routing:
    """A matrix [layers, experts], or columns layer, expert, load with a head."""
    try:
        rows = [row for row in csv.reader(io.StringIO(data.decode("utf-8-sig"))) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not readable as CSV ({error})") from None
    if not rows:
        raise InputError(f"{path}: empty; give one line of loads per layer")
    head = [cell.strip().lower() for cell in rows[0]]
    named = "layer" in head
    numbers: list[list[float]] = []
    for line, row in enumerate(rows[1:] if named else rows, start=2 if named else 1):
        try:
            numbers.append([float(cell) for cell in row])
        except ValueError:
            raise InputError(
                f"{path}: line {line}: must be numbers, got {','.join(row)[:60]!r}"
            ) from None
    table = number_array(numbers, str(path))
    if not named:
        return Routing(loads=np.asarray(table, dtype=np.float64)[None], windows=("all",))
    if not {"layer", "expert", "load"} <= set(head) or table.ndim != 2:
        raise InputError(
            f"{path}: line 1: columns must be layer, expert, load; got {', '.join(head)[:80]}"
        )
    if table.shape[1] != len(head):
        raise InputError(
            f"{path}: {table.shape[1]} numbers a line, but {len(head)} columns are named"
        )
    layer = _whole(table[:, head.index("layer")], MOST_LAYERS, f"{path}: layer")
    expert = _whole(table[:, head.index("expert")], MOST_EXPERTS, f"{path}: expert")
    ids, index = np.unique(layer, return_inverse=True)
    loads = np.zeros((1, len(ids), int(expert.max()) + 1))
    np.add.at(loads[0], (index, expert), table[:, head.index("load")])
    return Routing(loads=loads, windows=("all",), layer_ids=tuple(int(i) for i in ids))


def _whole(column: NDArray[np.float64], count: int, where: str) -> NDArray[np.int64]:
    """Numbers from 0 to below `count`, as integers. Raises InputError for any other."""
    wrong = ~((column >= 0) & (column < count) & (column == np.floor(column)))
    if wrong.any():
        raise InputError(
            f"must be a whole number from 0 to {count - 1}",
            where=where,
            value=float(column[wrong][0]),
        )
    return column.astype(np.int64)


def _from_arrays(
    arrays: Mapping[str, NDArray[Any]], path: Path, windows: tuple[str, ...], split: int
) -> Routing:
    """Loads by name. A name that is asked for is a window; `load`, `topk_ids` and what systems call them."""
    groups = _count(arrays, "num_groups")
    extra = Routing(
        loads=np.ones((1, 1, 1)),
        windows=("all",),
        groups=groups,
        co_activation=_optional(arrays, "co_activation"),
        affinity=_optional(arrays, "affinity"),
    )
    if windows:
        return replace(extra, loads=_named(arrays, path, windows), windows=windows)
    if "topk_ids" in arrays:
        return from_tokens(
            arrays["topk_ids"], _count(arrays, "num_experts", 0), f"{path}: topk_ids", extra
        )
    for name in ("load", "logical_count", "expert_load_window", "expert_popularity"):
        if name in arrays:
            table = np.asarray(arrays[name])
            if name == "expert_load_window" and "physical_to_logical_map" in arrays:
                table = to_logical(table, arrays["physical_to_logical_map"], str(path))
            steps = name != "load" and table.ndim == 3
            loads = cut_steps(table, split) if steps else _windows(table, f"{path}: {name}")
            return replace(extra, loads=loads, windows=window_names(len(loads)))
    choices = [name for name, array in arrays.items() if array.ndim == 2 and name not in NOT_LOADS]
    if len(choices) == 1:
        return replace(extra, loads=_named(arrays, path, tuple(choices)), windows=tuple(choices))
    raise InputError(
        f"{path}: no array called load, topk_ids or logical_count; choose windows by name with --window: "
        f"{', '.join(choices[:20]) or 'this file has none of shape [layers, experts]'}"
    )


def _count(arrays: Mapping[str, NDArray[Any]], name: str, default: int = 1) -> int:
    value = arrays.get(name)
    return (
        int(value)
        if value is not None and value.size == 1 and value.dtype.kind in "iu"
        else default
    )


def _optional(arrays: Mapping[str, NDArray[Any]], name: str) -> Loads | None:
    value = arrays.get(name)
    return None if value is None else np.asarray(value, dtype=np.float64)


def _windows(table: NDArray[Any], where: str) -> Loads:
    if table.ndim not in (2, 3) or table.dtype.kind not in "iuf":
        raise InputError(
            f"{where}: must be numbers of shape [layers, experts] or [windows, layers, experts], got "
            f"{table.dtype} {list(table.shape)}"
        )
    return np.asarray(table if table.ndim == 3 else table[None], dtype=np.float64)


def _named(arrays: Mapping[str, NDArray[Any]], path: Path, names: tuple[str, ...]) -> Loads:
    from difflib import get_close_matches

    tables = []
    for name in names:
        if name not in arrays:
            near = get_close_matches(name, list(arrays), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(
                f"{path}: no window {name!r}{hint}; it has {', '.join(list(arrays)[:20])}"
            )
        tables.append(_windows(arrays[name], f"{path}: {name}"))
    shapes = {tuple(window.shape) for window in tables}
    if len(shapes) > 1:
        raise InputError(
            f"{path}: windows of different shapes: {', '.join(str(list(s)) for s in sorted(shapes))}"
        )
    # Of one, no copy: the largest file holds its numbers twice already.
    return np.concatenate(tables) if len(tables) > 1 else tables[0]
