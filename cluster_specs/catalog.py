"""The devices, nodes and clusters that are known by name, each number with its source beside it."""

from __future__ import annotations

from functools import cache
from typing import Any

from meshwright.cluster_specs.schema import ClusterSpec, DeviceSpec
from meshwright.documents.reader import packaged_document
from meshwright.errors import InputError, near_miss

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
        raise not_in_catalog("device", name, device_names())
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
        raise not_in_catalog("cluster", name, cluster_names())
    entry = {key: value for key, value in clusters[name].items() if key != "base"}
    base = cluster_fields(clusters[name]["base"])
    sources = {**base["sources"], **entry["sources"]}
    return {**base, "elastic": False, **entry, "name": name, "sources": sources}


def not_in_catalog(where: str, name: object, names: tuple[str, ...]) -> InputError:
    """The error about a name that is none of the catalog's, with the near miss."""
    near = near_miss(name, names)
    return InputError(
        "not in the catalog", where=where, value=name, did_you_mean=near, allowed=names
    )


def node_kind_of(device: str) -> str | None:
    """The kind of node that stands in for what a description of this device leaves out."""
    return next(
        (name for name, entry in _entries("nodes.yaml").items() if entry["device"] == device), None
    )


@cache
def _entries(file: str) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = packaged_document("meshwright.cluster_specs.data", file)
    return entries
