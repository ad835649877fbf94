"""Reads how long training samples are: one by one, or as a histogram, from files that may be hostile."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.hybrid_context import padding_multiple
from meshwright.costmodel.lengths import (
    LONGEST,
    MULTIPLE,
    PACKINGS,
    UNPACKED,
    PackedLengths,
    Packing,
    dealt_lengths,
    default_pack_size,
    packed_lengths,
)
from meshwright.documents import LARGE_FILE_BYTES, path_text, read_text, require_file
from meshwright.errors import InputError, suggestion
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.experts.inputs import read_arrays

MOST_FILE_BYTES = 2**30
"""Of a file with a sample a line, which is read line by line."""
MOST_LINE_BYTES = 2**24
"""A million tokens as text."""
MOST_COUNT = 10**12
"""Samples of one length."""
MOST_SAMPLES = 10**15
"""Of a file."""
_LENGTH = "length"
_OF_TOKENS = ("input_ids", "tokens")
_READ = ".jsonl or .txt (a length a line), .npy, .csv (length,count) or .json (a list, or {length: count})"
Histogram = dict[int, int]
"""Samples of each length, tokens."""


def read_packed(
    path: Path,
    model: ModelSpec,
    pack_size: int | None,
    packing: str,
    dealt_on: int = 0,
) -> tuple[int, PackedLengths, tuple[PackedLengths, ...]]:
    """The samples of a file in packs.

    Parameters
    ----------
    path
        As `read_lengths` takes it.
    model
        Whose windows decide what a sample attends to.
    pack_size
        Tokens of a pack, 1 to 16,777,216; None for the longest sample, rounded up to a multiple of 128.
    packing
        Any of `PACKINGS`.
    dealt_on
        GPUs whose ranks samples are dealt to one by one (hybrid context parallelism); 0 for whole packs.

    Returns
    -------
    tuple of int, PackedLengths and tuple of PackedLengths
        Tokens of a pack; the samples so packed; and packed in every other way that packs them at all.

    Raises
    ------
    InputError
        If the file or an option cannot be used, or the model has layers whose attention to packs is not
        priced.
    """
    if packing not in PACKINGS:
        raise InputError(
            f"is not known{suggestion(packing, PACKINGS)}", where="packing", value=packing
        )
    if model.indexer is not None:
        raise InputError(
            f"{model.name} chooses the positions that it attends to, which is not priced for packs of "
            "several samples; give --seq-len",
            where="lengths",
        )
    histogram = read_lengths(path)
    sizes = np.array(sorted(histogram), dtype=np.int64)
    counts = np.array([histogram[size] for size in sizes.tolist()], dtype=np.int64)
    multiple = lcm(MULTIPLE, padding_multiple(dealt_on)) if dealt_on else MULTIPLE
    size = default_pack_size(int(sizes[-1]), multiple) if pack_size is None else pack_size
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= LONGEST:
        what = f"must be a whole number of tokens, 1 to {LONGEST}"
        raise InputError(what, where="pack-size", value=size)
    softmax_layers = model.full_attention_layers + model.windowed_layers
    packs = {
        name: packed_lengths(
            sizes,
            counts,
            pack_size=size,
            packing=name,
            window=model.sliding_window,
            chunked=model.chunked_windows,
            windowed_fraction=model.windowed_layers / softmax_layers if softmax_layers else 0.0,
        )
        for name in PACKINGS
        if name in {packing, *_OFFERED}
    }
    if not dealt_on:
        chosen = packs.pop(packing)
        return size, chosen, tuple(packs.values())
    if packing == UNPACKED:
        what = "padded sequences hold no samples to take out; give another --packing"
        raise InputError(what, where="hybrid-cp")
    dealt = dealt_lengths(sizes, counts, pack_size=size)
    return size, replace(packs[packing], dealt=dealt), tuple(packs.values())


_OFFERED: tuple[Packing, ...] = ("first-fit", "first-fit-decreasing")
"""What a plan compares its packing with: frameworks have them, and they fill packs best."""


def read_lengths(path: Path) -> Histogram:
    """How many samples have each length.

    Parameters
    ----------
    path
        By its ending: `.jsonl` and `.txt`, a sample a line, as a number of tokens, `{"length": n}`, or with
        its tokens under `input_ids` or `tokens`; `.npy`, an array of whole numbers; `.csv` with columns
        length and count; `.json`, a list of lengths, or a mapping from length to count.

    Returns
    -------
    dict
        Lengths from 1 to 16,777,216, at least one sample.

    Raises
    ------
    InputError
        If there is no such file, it is too large, or a line or field of it is no length.
    """
    suffix = path.suffix.lower()
    require_file(path, path_text(path))
    if suffix in (".jsonl", ".ndjson", ".txt"):
        histogram = _of_lines(path)
    elif suffix == ".npy":
        histogram = _of_array(path)
    elif suffix == ".csv":
        histogram = _of_csv(path)
    elif suffix == ".json":
        histogram = _of_mapping(path)
    else:
        what = f"a file {f'with {suffix}' if suffix else 'without an ending'} is not read; allowed: {_READ}"
        raise InputError(what, where=path_text(path))
    if sum(histogram.values()) > MOST_SAMPLES:
        what = f"holds more than {MOST_SAMPLES} samples, the most that is read: divide all counts by a number"
        raise InputError(what, where=path_text(path))
    if not histogram:
        raise InputError("holds no sample; at least one is needed", where=path_text(path))
    return histogram


def _of_lines(path: Path) -> Histogram:
    histogram: Counter[int] = Counter()
    for number, line in _lines(path):
        where = f"{path_text(path)}: line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(
                "is not JSON", where=where, value=line[:80].decode("utf-8", "replace")
            ) from None
        histogram[_sample(entry, where)] += 1
    return dict(histogram)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that hold something, with their numbers from 1 on."""
    where = path_text(path)
    if not path.is_file():
        read_text(path)  # says what is there instead
    read_bytes = 0
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MOST_LINE_BYTES + 1):
            number, read_bytes = number + 1, read_bytes + len(line)
            if len(line) > MOST_LINE_BYTES:
                what = f"is longer than {MOST_LINE_BYTES} bytes, the most that is read"
                raise InputError(what, where=f"{where}: line {number}")
            if read_bytes > MOST_FILE_BYTES:
                what = f"the file is larger than {MOST_FILE_BYTES} bytes, the most that is read: give counts"
                raise InputError(what, where=where)
            if line.strip():
                yield number, line


def _sample(entry: Any, where: str) -> int:
    """The length of the sample that a line holds."""
    if isinstance(entry, dict):
        if _LENGTH in entry:
            return _whole(entry[_LENGTH], f"{where}: {_LENGTH}", LONGEST)
        for name in _OF_TOKENS:
            if name in entry:
                if not isinstance(entry[name], list):
                    raise InputError(
                        "must be a list of tokens", where=f"{where}: {name}", value=entry[name]
                    )
                return _whole(len(entry[name]), f"{where}: tokens of {name}", LONGEST)
        fields = ", ".join((_LENGTH, *_OF_TOKENS))
        what = f"has no length; allowed: a number of tokens, or a mapping with one of {fields}"
        raise InputError(what, where=where)
    return _whole(entry, where, LONGEST)


def _of_array(path: Path) -> Histogram:
    where, arrays = path_text(path), read_arrays(path)
    array: NDArray[Any] = np.zeros(0) if arrays is None else arrays["load"]
    if array.dtype.kind not in "iu":
        what = "must be an array of whole numbers of tokens"
        raise InputError(what, where=where, value=str(array.dtype))
    sizes, counts = np.unique(array, return_counts=True)
    for size in sizes[[0, -1]].tolist() if len(sizes) else ():
        _whole(size, where, LONGEST)
    return dict(zip(sizes.tolist(), counts.tolist(), strict=True))


def _of_csv(path: Path) -> Histogram:
    where, histogram = path_text(path), Counter[int]()
    lines = read_text(path, LARGE_FILE_BYTES).splitlines()
    if not lines or [name.strip() for name in lines[0].split(",")] != ["length", "count"]:
        what = "the first line must name the columns: length,count"
        raise InputError(what, where=where, value=lines[0] if lines else "")
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        row = f"{where}: line {number}"
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != len(("length", "count")):
            raise InputError("must be length,count", where=row, value=line)
        length, count = (_number(part) for part in parts)
        histogram[_whole(length, f"{row}: length", LONGEST)] += _whole(
            count, f"{row}: count", MOST_COUNT
        )
    return dict(histogram)


def _of_mapping(path: Path) -> Histogram:
    where = path_text(path)
    text = read_text(path, LARGE_FILE_BYTES)
    try:
        entries = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError):
        raise InputError("is not JSON", where=where) from None
    histogram: Counter[int] = Counter()
    if isinstance(entries, list) and not any(isinstance(entry, tuple) for entry in entries):
        for index, length in enumerate(entries):
            histogram[_whole(length, f"{where}: [{index}]", LONGEST)] += 1
        return dict(histogram)
    if not isinstance(entries, list):
        raise InputError(
            "must be a list of lengths, or a mapping from length to count", where=where
        )
    for name, count in entries:
        length = _whole(_number(name), f"{where}: {name[:40]}: length", LONGEST)
        histogram[length] += _whole(count, f"{where}: {length}: count", MOST_COUNT)
    return dict(histogram)


def _number(text: str) -> int | str:
    """A whole number as text; anything else as it is, for the message that refuses it."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text


def _whole(value: object, where: str, largest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise InputError(f"must be a whole number, 1 to {largest}", where=where, value=value)
    return value
