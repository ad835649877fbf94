"""Reads a cluster: a catalog name, a YAML file, or the `cluster` block of a run file."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from pydantic import ValidationError

from meshwright.cluster_specs.allocation import check_gpus
from meshwright.cluster_specs.catalog import (
    cluster_fields,
    cluster_names,
    load_cluster,
    load_device,
    node_kind_of,
    not_in_catalog,
)
from meshwright.cluster_specs.importers.hostlists import expand
from meshwright.cluster_specs.schema import (
    ClusterSpec,
    DeviceSpec,
    Medium,
)
from meshwright.documents.reader import LARGE_FILE_BYTES, is_file, read_mapping
from meshwright.documents.validation import validation_message
from meshwright.errors import InputError, given_path, near_miss, shown

MOST_NODES = 131_072
_FILE_ENDINGS = (".yaml", ".yml", ".json")
_FILLED = ("gpus_per_node", "nvlink_domain", "nic_gbps_per_gpu")
_MEDIUM_WORDS: tuple[tuple[str, Medium], ...] = (
    ("roce", "roce"),
    ("spectrum-x", "roce"),
    ("omni-path", "omnipath"),
    ("omnipath", "omnipath"),
    ("slingshot", "slingshot"),
    ("efa", "efa"),
    ("infiniband", "infiniband"),
)


def read_cluster(
    cluster: str | PathLike[str] | ClusterSpec, gpus: int | None = None
) -> ClusterSpec:
    """The cluster that a catalog name or the path of a YAML file stands for.

    Parameters
    ----------
    cluster
        Catalog name, path of a cluster YAML, or a spec, which is returned as it is.
    gpus
        How many will be asked for, from 1: only checked against what the cluster has.

    Returns
    -------
    ClusterSpec
        The whole cluster, however many GPUs are asked for.

    Raises
    ------
    InputError
        If there is no such cluster, the file cannot be used, or the cluster has fewer GPUs.

    Examples
    --------
    >>> read_cluster("dgx-h100").gpus_per_node
    8
    """
    spec = (
        cluster
        if isinstance(cluster, ClusterSpec)
        else _named_or_in_file(given_path(cluster, "cluster"))
    )
    if gpus is not None:
        check_gpus(spec, gpus)
    return spec


def _named_or_in_file(text: str) -> ClusterSpec:
    if text in cluster_names():
        return load_cluster(text)
    if text.endswith(_FILE_ENDINGS) or "/" in text or is_file(text):
        return cluster_from_mapping(read_mapping(Path(text), LARGE_FILE_BYTES), text)
    raise InputError(
        "neither a catalog name nor a file",
        where="cluster",
        value=text,
        did_you_mean=near_miss(text, cluster_names()),
        allowed=cluster_names(),
    )


def cluster_from_mapping(data: Mapping[str, object], where: str = "cluster") -> ClusterSpec:
    """A cluster from plain data; `where` names the document in errors.

    `device` is a catalog name or a mapping with all of a device's fields. `base` names a catalog entry whose
    node fields hold where the data has none, and whose size and levels hold where it has no size, nodes or
    levels: a kind of node with another network stays one of any size. Without a base, those that the data
    leaves out or gives as null are taken from the catalog's node with that device and listed in `assumed`;
    `gpus` may be left out where `nodes` lists them.
    """
    stated = {key: value for key, value in data.items() if value is not None}
    if "parts" in stated:
        raise InputError(
            "this is a mixed cluster, which `plan` takes; give one of its parts here",
            where=f"{where}: parts",
        )
    fields: dict[str, object] = {**_base_fields(stated.pop("base", None), where, stated), **stated}
    _refuse_mixed_devices(fields, where)
    _expand_node_ranges(fields, where)
    fields["device"], catalog_device = _device(fields, where)
    _fill_from_node_kind(fields, catalog_device)
    if "nic_medium" not in fields:
        fields["nic_medium"] = _medium(str(fields.get("fabric", "")))
    if "gpus" not in fields:
        _count_free_gpus(fields, where)
    try:
        return ClusterSpec.model_validate(fields)
    except ValidationError as error:
        raise InputError(validation_message(error, where, ClusterSpec, ("base",))) from None


def _refuse_mixed_devices(fields: dict[str, object], where: str) -> None:
    """Raises InputError where nodes name devices of their own: every rank of a plan works as fast as any."""
    nodes = fields.get("nodes")
    for index, node in enumerate(nodes if isinstance(nodes, list) else []):
        if isinstance(node, Mapping) and "device" in node:
            raise InputError(
                "all GPUs of a cluster are of one device; a file with parts holds several, each a cluster "
                "with nodes of one kind",
                where=f"{where}: nodes[{index}].device",
                value=node["device"],
            )


def _expand_node_ranges(fields: dict[str, object], where: str) -> None:
    """Lists every node of entries whose name is a range: n[001-016], with the other fields alike."""
    nodes = fields.get("nodes")
    if not isinstance(nodes, list):
        return
    expanded: list[object] = []
    for index, node in enumerate(nodes):
        name = node.get("name") if isinstance(node, Mapping) else None
        if not isinstance(name, str) or "[" not in name:
            expanded.append(node)
            continue
        try:
            names = expand(name, MOST_NODES - len(expanded))
        except InputError as error:
            raise InputError(f"{where}: nodes[{index}].name: {shown(name)}: {error}") from None
        expanded += [{**node, "name": single_name} for single_name in names]
    fields["nodes"] = expanded


def _base_fields(base: object, where: str, stated: Mapping[str, object]) -> dict[str, object]:
    """The fields of a catalog entry for its nodes; its size and levels too, where the data has none.

    Data with levels but no size or nodes has, of an elastic entry, any size up to its outermost level.
    """
    if base is None:
        return {}
    if not isinstance(base, str) or base not in cluster_names():
        raise not_in_catalog(f"{where}: base", base, cluster_names())
    fields = {key: value for key, value in cluster_fields(base).items() if key != "name"}
    own_size = "gpus" in stated or "nodes" in stated
    own_levels = "levels" in stated
    if not own_size and not own_levels:
        return fields
    if not own_size and fields["elastic"]:
        fields["gpus"] = _outermost(stated["levels"], fields["gpus"])
    else:
        fields = {key: fields[key] for key in fields if key not in ("gpus", "elastic")}
    return {key: fields[key] for key in fields if key not in ("levels", "fabric", "blocks")}


def _outermost(levels: object, otherwise: object) -> object:
    """GPUs of the last level that is listed, where it says so; the schema refuses other levels."""
    last = levels[-1] if isinstance(levels, list) and levels else None
    return last.get("gpus", otherwise) if isinstance(last, Mapping) else otherwise


def _device(fields: Mapping[str, object], where: str) -> tuple[DeviceSpec, str | None]:
    """The device, and its catalog name if it has one."""
    device = fields.get("device")
    if device is None:
        raise InputError(f"{where}: device: required and missing; give a catalog name or a mapping")
    if isinstance(device, DeviceSpec):
        return device, None
    if isinstance(device, str):
        try:
            return load_device(device), device
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    if not isinstance(device, Mapping):
        what = "must be a catalog name or a mapping"
        raise InputError(what, where=f"{where}: device", value=device)
    try:
        return DeviceSpec.model_validate({"name": "device", **device}), None
    except ValidationError as error:
        raise InputError(validation_message(error, f"{where}: device", DeviceSpec)) from None


def _fill_from_node_kind(fields: dict[str, object], catalog_device: str | None) -> None:
    """Takes what is missing of the node from the catalog's node with that device; notes it in `assumed`."""
    kind = node_kind_of(catalog_device) if catalog_device else None
    missing = [name for name in _FILLED if name not in fields]
    if kind is None or not missing:
        return
    reference, stated = cluster_fields(kind), fields.get("assumed", ())
    for name in missing:
        fields[name] = reference[name]
    if "nic_gbps_per_gpu" in missing and "nic_medium" not in fields and "fabric" not in fields:
        fields["nic_medium"] = reference.get("nic_medium", "infiniband")
    if isinstance(stated, list | tuple):
        fields["assumed"] = (*stated, *(f"{name} of {kind}" for name in missing))


def _medium(words: str) -> Medium:
    """The medium that a remark on the fabric names; InfiniBand where it names none."""
    return next((medium for word, medium in _MEDIUM_WORDS if word in words.lower()), "infiniband")


def _count_free_gpus(fields: dict[str, object], where: str) -> None:
    """Sets `gpus` to the free GPUs of the nodes listed."""
    nodes, per_node = fields.get("nodes"), fields.get("gpus_per_node")
    if not isinstance(nodes, list) or not nodes or not isinstance(per_node, int):
        raise InputError(f"{where}: gpus: this field is required and missing (or list the nodes)")
    free = [node.get("free_gpus") if isinstance(node, Mapping) else None for node in nodes]
    fields["gpus"] = sum(count if isinstance(count, int) else per_node for count in free)
