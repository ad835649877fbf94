"""The devices, nodes and clusters that are known by name, each number with its source beside it."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml

from meshwright.cluster_specs.documents import LOADER
from meshwright.cluster_specs.errors import suggestion
from meshwright.cluster_specs.schema import ClusterSpec, DeviceSpec
from meshwright.errors import InputError, shown

ELASTIC_GPUS = 131_072
"""The most GPUs of a kind of node, unless its entry says otherwise."""


def device_names() -> tuple[str, ...]:
    """Devices in the catalog, in the order of the file."""
    return tuple(_entries("devices.yaml"))


def cluster_names() -> tuple[str, ...]:
    """Kinds of nodes, then clusters with levels of their own."""
    return (*_entries("nodes.yaml"), *_entries("clusters.yaml"))


@cache
def load_device(name: str) -> DeviceSpec:
    """A device by its catalog name. Raises InputError with the names there are."""
    entry = _entries("devices.yaml").get(name)
    if entry is None:
        raise InputError(
            f"device: {shown(name)} is not in the catalog{suggestion(name, device_names())}"
        )
    return DeviceSpec.model_validate({"name": name, **entry})


@cache
def load_cluster(name: str) -> ClusterSpec:
    """A kind of node or a cluster by its catalog name. Raises InputError with the names there are."""
    fields = cluster_fields(name)
    return ClusterSpec.model_validate({**fields, "device": load_device(fields["device"])})


def cluster_fields(name: str) -> dict[str, Any]:
    """The fields of a catalog entry, those of its base included; `device` is a catalog name."""
    nodes, clusters = _entries("nodes.yaml"), _entries("clusters.yaml")
    if name in nodes:
        return {"name": name, "gpus": ELASTIC_GPUS, "elastic": True, **nodes[name]}
    if name not in clusters:
        raise InputError(
            f"cluster: {shown(name)} is not in the catalog{suggestion(name, cluster_names())}"
        )
    own = {key: value for key, value in clusters[name].items() if key != "base"}
    base = cluster_fields(clusters[name]["base"])
    sources = {**base["sources"], **own["sources"]}
    return {**base, "elastic": False, **own, "name": name, "sources": sources}


def node_kind_of(device: str) -> str | None:
    """The kind of node that stands in for what a description of this device leaves out."""
    return next(
        (name for name, entry in _entries("nodes.yaml").items() if entry["device"] == device), None
    )


@cache
def _entries(file: str) -> dict[str, dict[str, Any]]:
    text = (
        resources.files("meshwright.cluster_specs.data").joinpath(file).read_text(encoding="utf-8")
    )
    entries: dict[str, dict[str, Any]] = yaml.load(text, Loader=LOADER)  # noqa: S506
    return entries
