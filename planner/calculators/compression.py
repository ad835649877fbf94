"""Gradient compression: when fewer bytes pay for the time it takes to make them fewer.

A codec reads and writes gradients at a rate of its own before and after the exchange, so it pays where the
link is slow: t(codec) + t(compressed exchange) < t(exchange of 16-bit gradients).
"""

from __future__ import annotations

from typing import Any

from meshwright.costmodel.collectives.alpha_beta import Link, textbook_s
from meshwright.costmodel.collectives.compression import compressions
from meshwright.errors import InputError


def compression_document(
    gradient_bytes: float,
    ranks: int,
    link: Link,
    *,
    codec_bytes_per_s: float,
    keep: float = 0.01,
    rank: int = 4,
    width: int = 4096,
) -> dict[str, Any]:
    """Exchange of gradients by a ring, plain and by each way to compress them.

    Parameters
    ----------
    gradient_bytes
        16-bit gradients of a rank, above 0.
    ranks
        Of the data-parallel group, at least 2.
    link
        Between its members.
    codec_bytes_per_s
        At which a member packs and unpacks gradients, above 0.
    keep
        Share of the values that top-k sends, above 0 and at most 1.
    rank, width
        Of PowerSGD: columns of its factors, and edge of a gradient taken as square; at least 1.

    Returns
    -------
    dict
        By method: bytes that a rank hands in, seconds of codec and exchange, speed-up, whether it pays, and
        the rate of the link (GB/s) below which it does, start-ups aside.

    Raises
    ------
    InputError
        For sizes out of range.
    """
    if ranks < 2 or not 0 < keep <= 1 or min(rank, width) < 1:
        raise InputError("needs 2 ranks or more, a share up to 1, and sizes of 1 or more")
    plain_s = float(textbook_s("all-reduce", "ring", gradient_bytes, ranks, link))
    methods = []
    for way in compressions(keep, rank, width):
        sent_bytes = gradient_bytes * way.kept
        buffer_bytes = sent_bytes * ranks if way.operation == "all-gather" else sent_bytes
        exchange_s = float(textbook_s(way.operation, "ring", buffer_bytes, ranks, link))
        codec_s = way.passes * gradient_bytes / codec_bytes_per_s
        saved_bytes = (plain_s - exchange_s) * link.bytes_per_s
        methods.append(
            {
                "method": way.name,
                "bytes": sent_bytes,
                "codec_s": codec_s,
                "exchange_s": exchange_s,
                "seconds": codec_s + exchange_s,
                "speed_up": plain_s / (codec_s + exchange_s),
                "pays": codec_s + exchange_s < plain_s,
                "pays_below_gb_per_s": max(saved_bytes, 0.0) / codec_s / 1e9,
            }
        )
    return {"bytes": gradient_bytes, "ranks": ranks, "seconds": plain_s, "methods": methods}
