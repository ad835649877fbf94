"""What a launch file says of a run, whichever framework it is for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError


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
    micro_batches: int | None = None
    """Of a step, where the file says so and not how large they are."""
    unread: tuple[str, ...] = ()
    """Flags or keys that were not understood."""
    remarks: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    """What it does not say of its `model`, and what is taken for it."""
    repeats_pipeline: bool = False
    """Whether a pipeline fills and drains several times a step, which the price of a run does not know."""


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
    document: Mapping[str, Any], read: Collection[str], section: str = "", prefix: str = ""
) -> list[str]:
    """Keys of a document that no reader knows, as `section.key`; `read` leaves out their common `prefix`."""
    place = f"{section}." if section else ""
    return [f"{place}{key}" for key in document if str(key).removeprefix(prefix) not in read]
