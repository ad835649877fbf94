"""Communication beside compute: what can hide, how many chunks hide most, and the buffers that it takes."""

from __future__ import annotations

from typing import Any

from meshwright.costmodel.collectives.alpha_beta import Link, best_chunk_count, chunked_s
from meshwright.costmodel.ratios import (
    overlap_ratio,
    overlapped_step_s,
    ring_attention_buffer_bytes,
)
from meshwright.errors import InputError


def overlap_document(compute_s: float, communication_s: float, sync_s: float) -> dict[str, Any]:
    """R = T_comm / T_comp and the step it makes.

    Parameters
    ----------
    compute_s, communication_s, sync_s
        Seconds of a step: compute, communication that may run beside it, and what cannot; compute above 0.

    Returns
    -------
    dict
        The ratio, whether all can be hidden, the step with and without overlap, and the hidden share.

    Raises
    ------
    InputError
        Where there is no compute.
    """
    if compute_s <= 0:
        raise InputError("must be above 0", where="--compute", value=compute_s)
    step_s = float(overlapped_step_s(compute_s, communication_s, sync_s))
    hidden_s = min(compute_s, communication_s)
    return {
        "compute_s": compute_s,
        "communication_s": communication_s,
        "sync_s": sync_s,
        "overlap_ratio": float(overlap_ratio(communication_s, compute_s)),
        "can_hide": communication_s <= compute_s,
        "step_s": step_s,
        "serial_s": compute_s + communication_s + sync_s,
        "hidden_share": hidden_s / communication_s if communication_s else 1.0,
    }


def chunks_document(
    buffer_bytes: float, link: Link, *, chunks: int | None, passes: int, beside_s: float | None
) -> dict[str, Any]:
    """Time of a gradient exchange in chunks, and the count that leaves least of it exposed.

    Parameters
    ----------
    buffer_bytes
        Gradients of a rank, above 0.
    link
        What they cross; its start-up above 0.
    chunks
        How many are asked about; the best count when None.
    passes
        2 for an all-reduce, 1 for a reduce-scatter.
    beside_s
        Seconds of the backward pass that it runs beside, if known.

    Returns
    -------
    dict
        Seconds in all and exposed, the share of `beside_s`, and the best count with its bucket size.

    Raises
    ------
    InputError
        Where a chunk costs nothing to start, or there is none.
    """
    if link.alpha_s <= 0:
        raise InputError("must be above 0: free chunks have no best count", where="--alpha")
    if chunks is not None and chunks < 1:
        raise InputError("must be at least 1", where="--chunks", value=chunks)
    moved_bytes = passes * buffer_bytes
    best = best_chunk_count(moved_bytes, link)
    count = best if chunks is None else chunks
    in_all_s = float(chunked_s(moved_bytes, count, link))
    return {
        "bytes": buffer_bytes,
        "passes": passes,
        "chunks": count,
        "chunk_bytes": buffer_bytes / count,
        "chunk_s": in_all_s / count,
        "seconds": in_all_s,
        "share_of_compute": None if beside_s is None else in_all_s / beside_s,
        "exposed_s": _exposed_s(moved_bytes, count, link),
        "best_chunks": best,
        "best_chunk_bytes": buffer_bytes / best,
        "best_exposed_s": _exposed_s(moved_bytes, best, link),
    }


def _exposed_s(moved_bytes: float, chunks: int, link: Link) -> float:
    """Start-ups, and the last chunk, which has nothing to hide under."""
    return chunks * link.alpha_s + moved_bytes / chunks / link.bytes_per_s


def ring_attention_document(
    seq_len: int,
    ranks: int,
    width: int,
    element_bytes: float,
    *,
    compute_s: float = 0.0,
    bytes_per_s: float | None = None,
) -> dict[str, Any]:
    """Keys and values on their way round a ring: bytes of a buffer, and a pass with one buffer and with two.

    Parameters
    ----------
    seq_len, ranks, width
        Tokens of a sequence, ranks of the ring, and width of a token's keys; each at least 1.
    element_bytes
        Of a key's element.
    compute_s
        Attention of one rank against all blocks, seconds.
    bytes_per_s
        Of the link to the next rank; None where only the buffer is asked for.

    Returns
    -------
    dict
        `buffer_bytes`, and seconds of a pass one after the other and with double buffering, which takes two.

    Raises
    ------
    InputError
        For sizes below 1.
    """
    if min(seq_len, ranks, width) < 1:
        raise InputError("must be at least 1", where="--seq-len, --cp, --width")
    buffer_bytes = float(ring_attention_buffer_bytes(seq_len, ranks, width, element_bytes))
    sent_s = 0.0 if bytes_per_s is None else (ranks - 1) * buffer_bytes / bytes_per_s
    last_s = compute_s / ranks
    return {
        "seq_len": seq_len,
        "cp": ranks,
        "buffer_bytes": buffer_bytes,
        "double_buffer_bytes": 2.0 * buffer_bytes,
        "communication_s": sent_s,
        "single_buffer_s": compute_s + sent_s,
        "double_buffer_s": max(compute_s - last_s, sent_s) + last_s,
    }
