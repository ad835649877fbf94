"""What a launch file says of a run, whichever framework it is for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from meshwright.errors import InputError
from meshwright.planner.runs.launches.flag_effects import has_no_effect


@dataclass(frozen=True, kw_only=True)
class LaunchRun:
    """The parts of a run file that a launch file states."""

    settings: dict[str, Any]
    """The `run` section."""
    model: object = None
    """A mapping, a catalog name, or None where the file does not say."""
    cluster: str | None = None
    """A catalog name, where it says what it runs on."""
    hosts: tuple[str, ...] = ()
    """Where it starts, in the order of the ranks; empty where it does not say."""
    places: tuple[tuple[int, int], ...] = ()
    """(index into `hosts`, local GPU) by rank, where ranks do not run through the hosts in turn."""
    local_batch: int | None = None
    """Sequences of a step on one data-parallel rank, where the global batch is so many times their number."""
    micro_batches: int | None = None
    """Of a step, where the file says so and not how large they are."""
    unread: tuple[str, ...] = ()
    """Flags or keys that were not understood."""
    remarks: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    """What it does not say of its `model`, and what is taken for it."""
    repeats_pipeline: bool = False
    """Whether a pipeline fills and drains several times a step, which the price of a run does not know."""


def with_global_batch(launch: LaunchRun, settings: dict[str, Any], gpus: object) -> dict[str, Any]:
    """Settings with the global batch that a launch's local one comes to on some GPUs.

    Parameters
    ----------
    launch
        With its local batch, or none.
    settings
        Of the run, what a caller adds included.
    gpus
        Of the cluster, where the settings do not say; None if they may be any number.
    """
    if launch.local_batch is None or "global_batch" in settings:
        return settings
    degrees = [settings.get(name, 1) for name in ("tp", "pp", "cp")]
    replicas, gpus = settings.get("dp"), settings.get("gpus", gpus)
    if replicas is None and isinstance(gpus, int) and all(isinstance(n, int) for n in degrees):
        replicas = gpus // prod(degrees)
    if not isinstance(replicas, int) or replicas < 1:
        return settings
    return {**settings, "global_batch": launch.local_batch * replicas}


def section_of(document: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """A mapping inside a document, empty where it is absent. Raises InputError for anything else."""
    value = document.get(key) or {}
    if not isinstance(value, dict):
        raise InputError("must be a mapping", where=f"{where}: {key}", value=value)
    return value


def whole_number(document: Mapping[str, Any], key: str, where: str) -> int | None:
    """A whole number of a document; None where it is absent or `auto`. Raises InputError otherwise."""
    value = document.get(key)
    if value is None or value == "auto":
        return None
    if type(value) is not int:
        raise InputError("must be a whole number", where=f"{where}: {key}", value=value)
    return value


def unread_keys(
    document: Mapping[str, Any], kind: str, read: Collection[str], section: str = ""
) -> list[str]:
    """Keys of a document that no reader takes and that may change the price, as `section.key`.

    Parameters
    ----------
    document
        A mapping, of the whole file or of one section.
    kind
        The program whose configuration it is.
    read
        Keys that a reader takes.
    section
        Where it stands in the file; empty for the whole.
    """
    place = f"{section}." if section else ""
    return [
        f"{place}{key}"
        for key, value in document.items()
        if str(key) not in read and not has_no_effect(kind, f"{place}{key}", _word(value))
    ]


def _word(value: object) -> str:
    """A value as a command line would have it; a section that is off or empty is `none`."""
    if value is None or value in ({}, []):
        return "none"
    if isinstance(value, dict):
        return "none" if value.get("enabled") is False else "true"
    return str(value)
