"""The pipeline split in Megatron's own notation (`--pipeline-model-parallel-layout`), written and read.

E is the embedding, t a layer, m a multi-token-prediction module, L the head and loss, | the border of two
chunks; x*n is x n times, (x|)*n is n chunks x. Chunk v of rank r is the (v * pp + r)-th from the front.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

MOST_CHUNKS = 4096
_MOST_LETTERS = 16 * MOST_CHUNKS
_LONGEST_TEXT = 10_000
_GROUP_REPEATED = re.compile(r"\(([^()]+)\)\*(\d{1,4})")
_LETTER_REPEATED = re.compile(r"([EtmL|])\*(\d{1,4})")


def layout_string(stages: Sequence[Sequence[int]], mtp_layers: int = 0) -> str:
    """A pipeline split in Megatron's notation.

    Parameters
    ----------
    stages
        Layers of each [rank][virtual stage]. The first chunk also holds E, the last also m and L.
    mtp_layers
        Multi-token-prediction modules.

    >>> layout_string([[3, 2], [2, 2], [2, 1]])
    'Et*3|(tt|)*4tL'
    """
    counts = [rank[chunk] for chunk in range(len(stages[0])) for rank in stages]
    first, inner, last = counts[0], counts[1:-1], counts[1:][-1:]
    front = "E" + _repeat("t", first)
    if last:
        runs = ((layers, len(list(run))) for layers, run in groupby(inner))
        middle = "".join(_chunks(layers, number) for layers, number in runs)
        front += f"|{middle}{_repeat('t', last[0])}"
    return front + _repeat("m", mtp_layers) + "L"


def pattern_chunks(pattern: str, stages: Sequence[Sequence[int]]) -> str:
    """A hybrid pattern with | between the chunks of a pipeline split, in the order of the model.

    Parameters
    ----------
    pattern
        The block of each layer, a character each.
    stages
        Layers of each [rank][virtual stage]; they add up to the pattern's.

    >>> pattern_chunks("M-M*M-", [[1, 2], [2, 1]])
    'M|-M|*M|-'
    """
    counts = [rank[chunk] for chunk in range(len(stages[0])) for rank in stages]
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    return "|".join(pattern[end - count : end] for end, count in zip(ends, counts, strict=True))


def layers_of_layout(text: str) -> tuple[int, ...] | None:
    """Layers of each chunk, in model order, of a layout in Megatron's notation; None for anything else.

    >>> layers_of_layout("Et*3|(tt|)*4tL")
    (3, 2, 2, 2, 2, 1)
    """
    letters = text.replace(",", "").replace(" ", "")
    if len(letters) > _LONGEST_TEXT:
        return None
    for repeated in (_GROUP_REPEATED, _LETTER_REPEATED):
        letters = repeated.sub(_written_out, letters)
        if len(letters) > _MOST_LETTERS:
            return None
    letters = letters.replace("(", "").replace(")", "")
    if "E" not in letters or not set(letters) <= set("EtmL|"):
        return None
    return tuple(chunk.count("t") for chunk in letters.split("|"))


def _written_out(repeated: re.Match[str]) -> str:
    return repeated[1] * int(repeated[2])


def _chunks(layers: int, number: int) -> str:
    chunk = _repeat("t", layers) + "|"
    return chunk if number == 1 else f"({chunk})*{number}"


def _repeat(letter: str, count: int) -> str:
    return letter * count if count <= 2 else f"{letter}*{count}"
