"""The formula behind each number of a calculator, and where it is from: what `--why` prints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import floor, log
from typing import Any

from meshwright.costmodel.textbook import ALGORITHMS
from meshwright.documents import packaged_document
from meshwright.errors import InputError

_OF_POINTS, _OF_SWITCHES = (
    "Thakur, Rabenseifner and Gropp 2005, IJHPCA 19(1), sections 3 and 4",
    "NVIDIA NCCL 2.17 release notes; the switch reads n/P of every member and sends n",
)
"""Sources of algorithms of messages between ranks, and of those in switches."""


def formulas(calculator: str, operation: str | None = None) -> list[dict[str, Any]]:
    """Formula and source of every number that a calculator gives.

    Parameters
    ----------
    calculator
        A key of `data/formulas.yaml`.
    operation
        Of a collective: its algorithms come first.

    Returns
    -------
    list of dict
        `what`, `formula` and `source`.
    """
    algorithms = {} if operation is None else ALGORITHMS[operation]
    named = [
        {
            "what": f"{name} {operation}",
            "formula": algorithm.formula,
            "source": _OF_SWITCHES if algorithm.in_switch else _OF_POINTS,
        }
        for name, algorithm in algorithms.items()
    ]
    listed = packaged_document("meshwright.planner.calculators", "data/formulas.yaml")
    return [*named, *listed[calculator]]


# Amounts as people write them.


_UNITS = {"": 1.0, "b": 1.0} | {
    prefix.lower() + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("b", 1e3), ("ib", 1024.0), ("", 1024.0))
}
"""Bytes; a bare K, M, G or T is a power of 1,024, as nccl-tests has it."""
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_RATE_BYTES = {
    prefix + unit: 1000.0**power * size
    for power, prefix in enumerate(("", "k", "m", "g", "t"))
    for unit, size in (("b/s", 1.0), ("bps", 0.125))
}
_RATE_BITS = re.compile(r"[KMGT]b/s")
_NUMBER_AND_UNIT = re.compile(
    r"\s*(\d{1,15}(?:\.\d{1,15})?(?:e[+-]?\d{1,2})?)\s*([A-Za-z/]{0,5})\s*"
)
MOST_BYTES = 2.0**60
LONGEST_TEXT = 60
MOST_SIZES = 400


def read_bytes(text: str, where: str) -> float:
    """Bytes of an amount as people write it.

    Parameters
    ----------
    text
        Such as `1GiB`, `512 MB` or `1e9`.
    where
        The option that it comes from, for the message.

    Returns
    -------
    float
        Bytes, from 1 to `MOST_BYTES`.

    Raises
    ------
    InputError
        With what is allowed.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text[:LONGEST_TEXT].lower())
    if match is None or match[2] not in _UNITS:
        raise InputError(
            "no amount of bytes; write a number with B, KB, MB, GB, TB (powers of 1,000) or KiB, MiB, GiB, "
            "TiB, K, M, G, T (of 1,024), such as 1GiB",
            where=where,
            value=text,
        )
    amount = float(match[1]) * _UNITS[match[2]]
    if not 1 <= amount <= MOST_BYTES:
        raise InputError(
            f"{amount:g} bytes; must be from 1 to {MOST_BYTES:g}", where=where, value=text
        )
    return amount


def sizes_between(first_bytes: float, end_bytes: float | None, factor: float) -> list[float]:
    """The sizes of a sweep in bytes, `factor` apart; the first alone without an end.

    Raises InputError for more than `MOST_SIZES`.

    Parameters
    ----------
    first_bytes
        The smallest, above 0.
    end_bytes
        None is larger; None for the first alone.
    factor
        From one size to the next, above 1.
    """
    if end_bytes is None:
        return [first_bytes]
    count = 1 + floor(log(max(end_bytes / first_bytes, 1.0), factor) + 1e-9)
    if count > MOST_SIZES:
        raise InputError(f"{count} sizes, at most {MOST_SIZES}", where="--end, --factor")
    return [first_bytes * factor**step for step in range(count)]


def read_seconds(text: str, where: str) -> float:
    """Seconds of a duration as people write it.

    Parameters
    ----------
    text
        Such as `1.5us`, `20 ms` or `0`; a number without unit is seconds.
    where
        The option that it comes from, for the message.

    Returns
    -------
    float
        Seconds, 0 or more.

    Raises
    ------
    InputError
        With what is allowed.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text[:LONGEST_TEXT])
    if match is None or (match[2] or "s") not in _SECONDS:
        raise InputError(
            "no duration; write a number with s, ms, us or ns, such as 1.5us",
            where=where,
            value=text,
        )
    return float(match[1]) * _SECONDS[match[2] or "s"]


def read_rate(text: str, where: str) -> float:
    """Bytes a second of a rate as people write it.

    Parameters
    ----------
    text
        Such as `450GB/s`; or of bits, `400Gb/s`, `400Gbps` (a small b behind a large prefix, and every bps);
        or, as beta and gamma are defined, the seconds of one byte, a number without unit such as `2.2e-12`.
    where
        The option that it comes from, for the message.

    Returns
    -------
    float
        Bytes a second, above 0.

    Raises
    ------
    InputError
        With what is allowed.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text[:LONGEST_TEXT])
    number = 0.0 if match is None else float(match[1])
    unit = "" if match is None else match[2]
    if number > 0 and not unit:
        return 1.0 / number
    if number > 0 and unit.lower() in _RATE_BYTES:
        return number * _RATE_BYTES[unit.lower()] / (8.0 if _RATE_BITS.fullmatch(unit) else 1.0)
    raise InputError(
        "no rate; write a number above 0 with GB/s (bytes) or Gb/s (bits), such as 450GB/s, or the seconds "
        "of one byte, such as 2.2e-12",
        where=where,
        value=text,
    )


AMOUNT_READERS: Mapping[str, Callable[[str, str], float]] = {
    "bytes": read_bytes,
    "seconds": read_seconds,
    "rate": read_rate,
}
"""Of each kind of amount: (text, where it stands) -> the number."""
