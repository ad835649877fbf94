"""The pipeline split in Megatron's own notation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def layout_string(stages: Sequence[Sequence[int]], mtp_layers: int = 0) -> str:
    """Megatron's `--pipeline-model-parallel-layout`.

    `stages[rank][virtual stage]` are layers; chunk v of rank r is the (v * pp + r)-th from the front. E is
    the embedding, t a layer, m a multi-token-prediction module, L the head and loss, | the border of two
    chunks, x*n is x n times, (x|)*n is n chunks x. The first chunk also holds E, the last also m and L.

    >>> layout_string([[3, 2], [2, 2], [2, 1]])
    'Et*3|(tt|)*4tL'
    """
    pp, vpp = len(stages), len(stages[0])
    counts = [stages[rank][chunk] for chunk in range(vpp) for rank in range(pp)]
    last = counts[-1] if len(counts) > 1 else 0
    body = (
        ""
        if len(counts) == 1
        else "".join(_run(n, len(list(run))) for n, run in groupby(counts[1:-1]))
    )
    first = "E" + _layers(counts[0])
    return (
        first
        + ("|" if len(counts) > 1 else "")
        + body
        + _layers(last)
        + _repeat("m", mtp_layers)
        + "L"
    )


def _run(layers: int, chunks: int) -> str:
    chunk = _layers(layers) + "|"
    return chunk if chunks == 1 else f"({chunk})*{chunks}"


def _layers(count: int) -> str:
    return _repeat("t", count)


def _repeat(letter: str, count: int) -> str:
    return letter * count if count <= 2 else f"{letter}*{count}"
