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

Value = float | int | bool
Overrides = Mapping[str, float]
"""Other values for some constants, by path, as a calibration tries them."""


@dataclass(frozen=True, kw_only=True)
class ConstantRecord:
    """One constant, at a path such as `architectures.hopper.hbm_fraction`."""

    path: str
    file: str
    source: str
    value: Value | None = None
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
    """Every record of both files by path. Raises ValueError, naming the path, for a malformed one."""
    records: dict[str, ConstantRecord] = {}
    for file in FILES:
        document = data_table(file)
        _collect(records, file, "", {k: v for k, v in document.items() if k != PROVENANCE})
    for record in records.values():
        holder = records.get(record.same_as or record.path)
        if holder is None or holder.value is None:
            raise ValueError(
                f"{record.file}: {record.path} takes its value from {record.same_as}, has none"
            )
    return records


def _collect(records: dict[str, ConstantRecord], file: str, path: str, node: object) -> None:
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
        raise ValueError(
            f"{file}: {path} has {sorted(node)}; allowed are {[sorted(k) for k in kinds]}"
        )
    given = {name: node[name] for name in ("value", "prior", "spread") if name in node}
    if "prior" in given and not all(isinstance(x, int | float) and x > 0 for x in given.values()):
        raise ValueError(
            f"{file}: {path}: value, prior and spread of a free constant are positive numbers"
        )
    section, _, rest = path.partition(".")
    same_as = f"{section}.{node['as']}.{rest.rpartition('.')[2]}" if "as" in node else None
    return ConstantRecord(
        path=path, file=file, source=str(node["source"]), same_as=same_as, **given
    )


@cache
def _fields(prefix: str) -> tuple[tuple[str, str, Value], ...]:
    """(field, path of the record that holds it, value) of every record right below a prefix."""
    records, found = constant_records(), []
    for path, record in records.items():
        if path.rpartition(".")[0] == prefix:
            holder = records[record.same_as or path]
            assert holder.value is not None
            found.append((path.rpartition(".")[2], holder.path, holder.value))
    return tuple(found)


def layered_values(*prefixes: str, overrides: Overrides | None = None) -> dict[str, Any]:
    """The constants below some prefixes, later ones over earlier ones."""
    values: dict[str, Any] = {}
    for prefix in prefixes:
        for field, path, value in _fields(prefix):
            values[field] = overrides.get(path, value) if overrides else value
    return values


def effective_paths(*prefixes: str) -> dict[str, str]:
    """Path of the record behind each constant below some prefixes, later ones over earlier ones."""
    return {field: path for prefix in prefixes for field, path, _ in _fields(prefix)}


def names_in(section: str) -> tuple[str, ...]:
    """Every name of a section, also of those that change nothing."""
    return tuple(
        sorted({name for document in map(data_table, FILES) for name in document.get(section, {})})
    )
