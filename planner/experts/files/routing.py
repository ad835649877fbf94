"""Measured routing as every reader of a file hands it on, and the checks that readers share.

Nothing is ever unpickled. Sizes are bounded before anything is decoded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.planner.experts.problem import MOST_ELEMENTS, Loads

LARGEST_FILE_BYTES = 512 * 2**20
LARGEST_TEXT_BYTES = 64 * 2**20
MOST_EXPERTS = 65_536
MOST_LAYERS = 100_000
"""Numbers of layers, far above those of any model."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What was measured. Layers are those with experts, in order."""

    loads: Loads
    """Tokens of each expert, [windows, layers, experts]."""
    windows: tuple[str, ...]
    tokens: NDArray[np.int32] | None = None
    """Experts that each token chose, [layers, tokens, top-k]; -1 for a choice that was dropped."""
    co_activation: Loads | None = None
    """How often two experts were chosen together, [layers, experts, experts], symmetric."""
    affinity: Loads | None = None
    """Tokens from each source rank to each expert, [layers, ranks, experts]."""
    affinity_recorded: bool = False
    """Whether `affinity` is what a recorder's ranks saw: it counts where there are as many GPUs as ranks."""
    groups: int = 1
    """Routing groups that the file states."""
    layer_ids: tuple[int, ...] = field(default=())
    """The model's layer of each row, where the file names it."""


def bounded_bytes(path: Path, largest: int) -> bytes:
    """The file's bytes. Raises InputError if it is no file, cannot be read, or is larger."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        with path.open("rb") as stream:
            data = stream.read(largest + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or 'system error'})") from None
    if len(data) > largest:
        raise InputError(
            f"{path}: larger than the {largest} bytes that are read; sum over steps first"
        )
    return data


def parsed_json(data: bytes, where: str) -> Any:
    """Plain data; NaN and Infinity are refused. Raises InputError with line and column."""

    def refuse(word: str) -> float:
        raise InputError(f"{where}: {word} is not a number that a load can have")

    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({type(error).__name__})") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: a number cannot be read") from None


def number_array(value: object, where: str) -> NDArray[Any]:
    """A nested list of numbers as an array. Raises InputError if it is ragged or holds anything else."""
    try:
        array = np.array(value)
    except (ValueError, OverflowError):
        raise InputError(
            f"{where}: lists of different lengths; every layer needs the same experts"
        ) from None
    if array.dtype.kind not in "iuf":
        raise InputError(f"{where}: must be numbers, got {array.dtype}")
    return array


def window_names(count: int) -> tuple[str, ...]:
    """`all` for one window, else `window 0`, `window 1`, ..."""
    return ("all",) if count == 1 else tuple(f"window {i}" for i in range(count))


def cut_steps(table: NDArray[Any], split: int) -> Loads:
    """Sums steps [steps, layers, experts] to `split` windows, each a run of steps."""
    parts = np.array_split(np.asarray(table, dtype=np.float64), min(split, len(table)))
    return np.stack([part.sum(axis=0) for part in parts])


def to_logical(table: NDArray[Any], mapping: NDArray[Any], where: str) -> Loads:
    """Loads of physical slots [steps, layers, slots] summed by the experts they hold, by [layers, slots]."""
    if table.ndim != 3 or mapping.shape != table.shape[1:] or mapping.dtype.kind not in "iu":
        raise InputError(
            f"{where}: physical_to_logical_map must have the shape {list(table.shape[1:])}, "
            f"got {list(mapping.shape)}"
        )
    if mapping.min() < 0 or mapping.max() >= MOST_EXPERTS:
        raise InputError(
            f"{where}: physical_to_logical_map: experts must be from 0 to {MOST_EXPERTS - 1}"
        )
    by_expert = np.zeros((*table.shape[:2], int(mapping.max()) + 1))
    for layer in range(table.shape[1]):
        np.add.at(
            by_expert[:, layer].T, mapping[layer], np.asarray(table[:, layer], dtype=np.float64).T
        )
    return by_expert


def from_tokens(ids: NDArray[Any], experts: int, where: str, extra: Routing) -> Routing:
    """Routing from the experts that each token chose, [layers, tokens, top-k]."""
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or 0 in ids.shape:
        raise InputError(
            f"{where}: must be integers of shape [layers, tokens, top-k], got {ids.dtype} {list(ids.shape)}"
        )
    if ids.size > MOST_ELEMENTS:
        raise InputError(
            f"{where}: {ids.size} choices, more than the {MOST_ELEMENTS} that are read"
        )
    top = int(ids.max())
    count = experts or top + 1
    if top >= count or count > MOST_EXPERTS or int(ids.min()) < -1:
        raise InputError(
            f"{where}: expert numbers must be from 0 to {min(count, MOST_EXPERTS) - 1} (-1: dropped), got "
            f"{top if top >= count else int(ids.min())}"
        )
    tokens = ids.astype(np.int32)
    return replace(extra, loads=token_loads(tokens, count)[None], tokens=tokens)


def token_loads(tokens: NDArray[np.int32], experts: int) -> Loads:
    """How many tokens chose each expert, [layers, experts]."""
    return np.stack(
        [
            np.bincount(layer[layer >= 0].ravel(), minlength=experts).astype(np.float64)
            for layer in tokens
        ]
    )
