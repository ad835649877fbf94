"""The records of `costmodel/data`: every calibrated constant, its value, its source, how far it may move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from meshwright.costmodel.constants.data_files import data_table

FILES = ("devices.yaml", "frameworks.yaml")
PROVENANCE = "calibration"
"""The one section of a file that holds no constants: what the free ones were fitted on."""

ConstantValue = float | int | bool
Overrides = Mapping[str, float]
"""Other values for some constants, by path, as a calibration tries them."""


@dataclass(frozen=True, kw_only=True)
class ConstantRecord:
    """One constant, at a path such as `architectures.hopper.hbm_fraction`."""

    path: str
    file: str
    source: str
    value: ConstantValue | None = None
    """None where another record holds it."""
    same_as: str | None = None
    """Path of the record that holds the value."""
    prior: float | None = None
    """The physical value that a fit starts from; None for a pinned constant."""
    spread: float | None = None
    """Relative width, one standard deviation of the logarithm, that the prior leaves."""

    @property
    def free(self) -> bool:
        """Whether a calibration may move it."""
        return self.prior is not None

    @property
    def spreads_from_prior(self) -> float:
        """Distance of the value from the prior, in spreads; 0 for a pinned constant."""
        if self.prior is None or self.spread is None or self.value is None:
            return 0.0
        return math.log(self.value / self.prior) / self.spread


@cache
def constant_records() -> Mapping[str, ConstantRecord]:
    """Every record of both files by path.

    Returns
    -------
    mapping of str to ConstantRecord

    Raises
    ------
    ValueError
        For a malformed record, with its path.
    """
    records: dict[str, ConstantRecord] = {}
    for file in FILES:
        document = data_table(file)
        sections = {name: node for name, node in document.items() if name != PROVENANCE}
        _collect(records, file, "", sections)
    for record in records.values():
        holder = records.get(record.same_as or record.path)
        if holder is None or holder.value is None:
            raise ValueError(
                f"{record.file}: {record.path} takes its value from {record.same_as}, has none"
            )
    return records


def _collect(records: dict[str, ConstantRecord], file: str, path: str, node: object) -> None:
    """Adds the records below a path of a file."""
    if not isinstance(node, dict):
        raise ValueError(f"{file}: {path} is {node!r}; a record with a source is needed")
    if "source" in node:
        records[path] = _record(file, path, node)
        return
    for name, child in node.items():
        _collect(records, file, f"{path}.{name}" if path else str(name), child)


def _record(file: str, path: str, node: dict[str, Any]) -> ConstantRecord:
    kinds = ({"value", "source"}, {"value", "prior", "spread", "source"}, {"as", "source"})
    if set(node) not in kinds:
        allowed = [sorted(kind) for kind in kinds]
        raise ValueError(f"{file}: {path} has {sorted(node)}; allowed are {allowed}")
    numbers = {name: node[name] for name in ("value", "prior", "spread") if name in node}
    positive = all(isinstance(x, int | float) and x > 0 for x in numbers.values())
    if "prior" in numbers and not positive:
        raise ValueError(
            f"{file}: {path}: value, prior and spread of a free constant are positive numbers"
        )
    same_as = None
    if "as" in node:
        section, _, rest = path.partition(".")
        same_as = f"{section}.{node['as']}.{rest.rpartition('.')[2]}"
    source = str(node["source"])
    return ConstantRecord(path=path, file=file, source=source, same_as=same_as, **numbers)


@cache
def _fields(prefix: str) -> tuple[tuple[str, str, ConstantValue], ...]:
    """(field, path of the record that holds it, value) of every record right below a prefix."""
    records = constant_records()
    rows = []
    for path, record in records.items():
        parent, _, field = path.rpartition(".")
        if parent != prefix:
            continue
        holder = records[record.same_as or path]
        assert holder.value is not None
        rows.append((field, holder.path, holder.value))
    return tuple(rows)


def layered_values(*prefixes: str, overrides: Overrides | None = None) -> dict[str, Any]:
    """The constants below some prefixes, later ones over earlier ones.

    Parameters
    ----------
    *prefixes : str
        Paths such as `architectures.hopper`.
    overrides : mapping of str to float, optional
        Other values, by the path of the record that holds the constant.

    Returns
    -------
    dict of str to float, int or bool
        Values by the last word of their path.
    """
    values: dict[str, Any] = {}
    for prefix in prefixes:
        for field, path, value in _fields(prefix):
            values[field] = overrides.get(path, value) if overrides else value
    return values


def effective_paths(*prefixes: str) -> dict[str, str]:
    """Path of the record behind each constant below some prefixes, later ones over earlier ones.

    Parameters
    ----------
    *prefixes : str
        Paths such as `architectures.hopper`.

    Returns
    -------
    dict of str to str
        Paths by the last word of the constant's own.
    """
    return {field: path for prefix in prefixes for field, path, _ in _fields(prefix)}


def names_in(section: str) -> tuple[str, ...]:
    """Every name of a section, also of those that change nothing.

    Parameters
    ----------
    section : str
        A key at the top of a file, such as `frameworks`.

    Returns
    -------
    tuple of str
        In alphabetical order.
    """
    names: set[str] = set()
    for file in FILES:
        names |= set(data_table(file).get(section, {}))
    return tuple(sorted(names))
