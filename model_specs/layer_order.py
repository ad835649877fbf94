"""Which layers of a model attend in full: each n-th one, or in an order of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

FULL, WINDOWED, LINEAR = "F", "W", "L"
"""Letters of `ModelSpec.attention_order`."""
ATTENTION_NAMES = {FULL: "full", WINDOWED: "windowed", LINEAR: "linear"}


def one_in(full: Sequence[bool]) -> int | None:
    """The n of 'each n-th layer attends in full'; 0 where none does, None where there is no such n.

    >>> one_in([False, True, False, True, False]), one_in([True, False]), one_in([False])
    (2, None, 0)
    """
    layers, count = len(full), sum(full)
    if count == 0:
        return 0
    every = layers // count
    return every if list(full) == [(i + 1) % every == 0 for i in range(layers)] else None


def order_fields(full: Sequence[bool], other: str) -> dict[str, object]:
    """The fields of a ModelSpec that say which layers attend in full; `other` is the letter of the rest.

    >>> order_fields([False, True], "W"), order_fields([True, False], "W")
    ({'full_attention_every': 2}, {'attention_order': 'FW'})
    """
    every = one_in(full)
    if every is not None:
        return {"full_attention_every": every}
    return {"attention_order": "".join(FULL if is_full else other for is_full in full)}


def letters(layers: int, every: int, other: str) -> str:
    """The order in which each n-th layer attends in full; n = 0: none does.

    >>> letters(5, 2, "W")
    'WFWFW'
    """
    return "".join(FULL if every and (i + 1) % every == 0 else other for i in range(layers))


def runs(kinds: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Kinds of layers in their order, each with how many follow each other.

    >>> list(runs("FFW"))
    [('F', 2), ('W', 1)]
    """
    for kind, alike in groupby(kinds):
        yield kind, sum(1 for _ in alike)


def repeated_part(order: Sequence[str]) -> int:
    """Layers of the shortest part of which the order is made by repetition; all of them where it is not.

    >>> repeated_part("FWWFWW"), repeated_part("FWW")
    (3, 3)
    """
    count = len(order)
    parts = (size for size in range(1, count + 1) if count % size == 0)
    return next(size for size in parts if list(order[:size]) * (count // size) == list(order))
