"""The pipelines that a number of ranks can have: virtual stages and schedules."""

from __future__ import annotations

from functools import lru_cache

from meshwright.costmodel.pipeline.schedules import schedule_name, schedule_named, traits


@lru_cache(maxsize=4096)
def even_virtual_stages(
    pp: int, layers: int, mtp_layers: int, *, empty_ends: bool = False
) -> tuple[int, ...]:
    """One, and the numbers of virtual stages that deal the layers out evenly.

    Embedding, head or MTP modules may count as a layer each. With `empty_ends` the first and the last stage
    may have no other.

    Parameters
    ----------
    pp
        Pipeline ranks, at least 2.
    layers, mtp_layers
        Of the model.

    Returns
    -------
    tuple of int
        Rising; no other stage is without a layer.
    """
    totals = range(layers, layers + 3 + mtp_layers)
    most = (layers + (2 if empty_ends else 0)) // pp
    several = (v for v in range(2, most + 1) if any(total % (pp * v) == 0 for total in totals))
    return 1, *several


@lru_cache(maxsize=4096)
def pipelines_of(
    virtual_stages: tuple[int, ...], schedules: tuple[str, ...]
) -> tuple[tuple[int, int], ...]:
    """The pairs of a number of virtual stages and a schedule that exist.

    Parameters
    ----------
    virtual_stages
        Of a rank.
    schedules
        Names, as plans have them.

    Returns
    -------
    tuple of (int, int)
        Virtual stages and a `meshwright.costmodel.pipeline.schedules.Schedule`.
    """
    pairs = []
    for vpp in virtual_stages:
        for name in schedules:
            schedule = schedule_named(name)
            known = traits(schedule)
            most = known.most_chunks or vpp
            if schedule_name(schedule, vpp) == name and known.fewest_chunks <= vpp <= most:
                pairs.append((vpp, int(schedule)))
    return tuple(pairs)
