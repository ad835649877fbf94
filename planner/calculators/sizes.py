"""Amounts as people write them."""

from __future__ import annotations

import re

from meshwright.errors import InputError

_UNITS = {"": 1.0, "b": 1.0} | {
    prefix.lower() + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("b", 1e3), ("ib", 1024.0))
}
_AMOUNT = re.compile(r"\s*(\d{1,15}(?:\.\d{1,15})?(?:e\d{1,2})?)\s*([a-z]{0,3})\s*")
MOST_BYTES = 2.0**60
LONGEST_TEXT = 60


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
    match = _AMOUNT.fullmatch(text[:LONGEST_TEXT].lower())
    if match is None or match[2] not in _UNITS:
        raise InputError(
            "no amount of bytes; write a number with B, KB, MB, GB, TB (powers of 1,000) or KiB, MiB, GiB, "
            "TiB (of 1,024), such as 1GiB",
            where=where,
            value=text,
        )
    amount = float(match[1]) * _UNITS[match[2]]
    if not 1 <= amount <= MOST_BYTES:
        raise InputError(
            f"{amount:g} bytes; must be from 1 to {MOST_BYTES:g}", where=where, value=text
        )
    return amount
