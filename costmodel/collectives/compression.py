"""Ways to compress gradients before they are exchanged.

Agarwal et al. 2022, arXiv 2103.00543, compares them; each codec reads and writes all gradients at a rate of
its own, before the exchange and after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_ELEMENT_BYTES, _INDEX_BYTES = 2.0, 4.0


@dataclass(frozen=True, kw_only=True)
class Compression:
    """One way, applied to 16-bit gradients."""

    name: str
    operation: Literal["all-reduce", "all-gather"]
    """An all-gather where what ranks send cannot be added up on the way."""
    kept: float
    """Bytes that a rank hands in, over those of its gradients."""
    passes: float
    """Times that the codec goes through all gradients."""

    def traffic_ratio(self, ranks: int) -> float:
        """Bytes that a ring sends, over those of an all-reduce of all gradients.

        From every rank a ring all-reduce of n bytes sends 2 (P-1)/P n, an all-gather of k bytes (P-1) k.

        Parameters
        ----------
        ranks
            P, at least 2.

        Returns
        -------
        float
            Above 0; more than 1 where compressing sends more.
        """
        return self.kept * (ranks / 2.0 if self.operation == "all-gather" else 1.0)


def compressions(keep: float = 0.01, rank: int = 4, width: int = 4096) -> tuple[Compression, ...]:
    """Quantised (Alistarh et al. 2017), top-k (Lin et al. 2018) and low-rank (Vogels et al. 2019) gradients.

    Parameters
    ----------
    keep
        Share of the values that top-k sends, above 0 and at most 1; each with a 4-byte index.
    rank, width
        Of PowerSGD: columns of its two factors, and edge of a gradient taken as square; at least 1.

    Returns
    -------
    tuple of Compression
        8 bits, 4 bits, top-k, PowerSGD.
    """
    indexed = keep * (1.0 + _INDEX_BYTES / _ELEMENT_BYTES)
    low_rank = min(1.0, 2.0 * rank / width)
    return (
        Compression(name="8 bits", operation="all-reduce", kept=0.5, passes=2.0),
        Compression(name="4 bits", operation="all-reduce", kept=0.25, passes=2.0),
        Compression(name="top-k", operation="all-gather", kept=indexed, passes=2.0),
        Compression(name="PowerSGD", operation="all-reduce", kept=low_rank, passes=4.0),
    )
