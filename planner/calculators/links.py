"""Links by name, as guides to distributed training quote them, and their crossover sizes."""

from __future__ import annotations

from typing import Any

from meshwright.costmodel.collectives.alpha_beta import Link, crossover_bytes
from meshwright.errors import InputError

LINKS = {
    "nvlink": Link(alpha_s=1e-6, bytes_per_s=450e9),
    "infiniband": Link(alpha_s=1.5e-6, bytes_per_s=200e9),
    "roce": Link(alpha_s=5e-6, bytes_per_s=12.5e9),
    "tcp": Link(alpha_s=50e-6, bytes_per_s=12.5e9),
}
"""NVLink 4 of a GPU, a node's InfiniBand as a guide has it (8 ports of 200 Gb/s), and 100 GbE twice."""


def link_named(name: str) -> Link:
    """A link of `LINKS`. Raises InputError for another name."""
    if name not in LINKS:
        raise InputError("no such link", where="--link", value=name, allowed=LINKS)
    return LINKS[name]


def tiers() -> list[dict[str, Any]]:
    """Every link of `LINKS` with n* = alpha / beta, the bytes below which start-ups take most of the time."""
    return [
        {
            "link": name,
            "alpha_s": link.alpha_s,
            "gb_per_s": link.bytes_per_s / 1e9,
            "crossover_bytes": crossover_bytes(link),
        }
        for name, link in LINKS.items()
    ]
