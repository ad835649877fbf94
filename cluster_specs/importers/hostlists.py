"""Slurm host lists: `rack[0-1]node[00-15],login1` to names, with the number of names bounded first.

The grammar is that of Slurm's own parser (`scontrol show hostnames`): commas separate expressions, a bracket
holds numbers and ranges of numbers whose leading zeros stand for a width, several brackets multiply, the
rightmost running fastest. Text after the last bracket is read too, as ClusterShell does. Brackets inside
brackets, which Slurm refuses, are an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from math import prod

from meshwright.errors import InputError

_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
_PLAIN = re.compile(r"[A-Za-z0-9._-]*")
LONGEST_EXPRESSION = 1 << 20


def expand(text: str, limit: int) -> list[str]:
    """The names in the order in which they are written, repeated ones included.

    Raises InputError if the text is no host list or stands for more than `most` names.
    """
    if len(text) > LONGEST_EXPRESSION:
        raise InputError(
            f"a host list of {len(text)} characters is longer than {LONGEST_EXPRESSION}"
        )
    names: list[str] = []
    for expression in _split(text):
        names += _expand_one(expression, limit - len(names))
    return names


def _split(text: str) -> Iterator[str]:
    """The expressions between the commas that are outside of brackets."""
    start, inside = 0, False
    for position, letter in enumerate(text):
        if letter == "[":
            if inside:
                raise InputError("a bracket inside a bracket; write the ranges one after the other")
            inside = True
        elif letter == "]":
            if not inside:
                raise InputError("a ']' without its '['")
            inside = False
        elif letter == "," and not inside:
            yield text[start:position]
            start = position + 1
    if inside:
        raise InputError("a '[' without its ']'")
    yield text[start:]


def _expand_one(expression: str, most: int) -> list[str]:
    if not expression:
        raise InputError("an empty name between commas")
    pieces = _BRACKET.split(expression)
    plain, brackets = pieces[::2], pieces[1::2]
    for piece in plain:
        if not _PLAIN.fullmatch(piece):
            raise InputError(
                f"{expression[:80]!r} is no node name; allowed are letters, digits, dot, hyphen, underscore"
            )
    ranges = [[_bounds(part) for part in bracket.split(",")] for bracket in brackets]
    count = prod(sum(last - first + 1 for first, last, _ in parts) for parts in ranges)
    if count > most:
        raise InputError(f"{expression[:80]!r} stands for {count} names, more than the {most} left")
    if not brackets:
        return [expression]
    numbers = [
        [f"{n:0{w}d}" for first, last, w in parts for n in range(first, last + 1)]
        for parts in ranges
    ]
    return [
        plain[0] + "".join(number + after for number, after in zip(chosen, plain[1:], strict=True))
        for chosen in product(*numbers)
    ]


def _bounds(part: str) -> tuple[int, int, int]:
    """(first, last, width) of `5`, `08` or `01-12`."""
    match = _RANGE.fullmatch(part)
    if match is None:
        raise InputError(f"{part[:40]!r} in a bracket is neither a number nor a range like 01-16")
    first, last = match[1], match[2] or match[1]
    if int(last) < int(first):
        raise InputError(f"the range {part[:40]!r} runs backwards")
    return int(first), int(last), len(first)
