"""Reads a cluster: a catalog name, a YAML file, or the `cluster` block of a run file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from meshwright.cluster_specs.allocation import check_gpus, only_nodes
from meshwright.cluster_specs.importers.facts import MOST_NODES, expand
from meshwright.cluster_specs.schema import XGMI, ClusterSpec, DeviceSpec, Medium
from meshwright.cluster_specs.tiers import free_by_name
from meshwright.documents import (
    LARGE_FILE_BYTES,
    ClosedDocument,
    PackagedEntries,
    is_file,
    read_mapping,
    read_text,
    validated,
)
from meshwright.errors import (
    InputError,
    check_choice,
    given_path,
    listed,
    near_miss,
    refuse_unknown,
    shown,
    suggestion,
)

# The devices, nodes and clusters that are known by name, each number with its source beside it.


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
    """A device by its catalog name. Raises InputError with the names there are.

    Parameters
    ----------
    name
        One of `device_names`.
    """
    entry = _entries("devices.yaml").get(name)
    if entry is None:
        raise not_in_catalog("device", name, device_names())
    return DeviceSpec.model_validate({"name": name, **entry})


@cache
def load_cluster(name: str) -> ClusterSpec:
    """A kind of node or a cluster by its catalog name. Raises InputError with the names there are.

    Parameters
    ----------
    name
        One of `cluster_names`.
    """
    fields = cluster_fields(name)
    return ClusterSpec.model_validate({**fields, "device": load_device(fields["device"])})


def cluster_fields(name: str) -> dict[str, Any]:
    """The fields of a catalog entry, those of its base included; `device` is a catalog name.

    Parameters
    ----------
    name
        One of `cluster_names`.
    """
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
    """The error about a name that is none of the catalog's, with the near miss.

    Parameters
    ----------
    where
        The field or option that holds the name, for the message.
    name
        As it was typed.
    names
        That there are.
    """
    near = near_miss(name, names)
    return InputError(
        "not in the catalog", where=where, value=name, did_you_mean=near, allowed=names
    )


def node_kind_of(device: str) -> str | None:
    """The kind of node that stands in for what a description of this device leaves out.

    Parameters
    ----------
    device
        Catalog name of a device.

    Returns
    -------
    str or None
        Catalog name of the first kind of node with it; None where no kind has it.
    """
    return next(
        (name for name, entry in _entries("nodes.yaml").items() if entry["device"] == device), None
    )


@cache
def _entries(file: str) -> Mapping[str, dict[str, Any]]:
    return PackagedEntries("meshwright.cluster_specs", f"data/{file}")


_FILE_ENDINGS = (".yaml", ".yml", ".json")
_FILLED = ("gpus_per_node", "nvlink_domain", "nic_gbps_per_gpu")
_MODEL_NUMBER = re.compile(r"(?!\d+(gb|w)$)[a-z]*\d{2,}[a-z]*")
"""A word that names a GPU, as h100 or l40s, and not its memory or power, as 80gb or 500w."""
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
    cluster: str | PathLike[str] | ClusterSpec | Mapping[str, object], gpus: int | None = None
) -> ClusterSpec:
    """The cluster that a catalog name, the path of a YAML file or what such a file holds stands for.

    Parameters
    ----------
    cluster
        Catalog name, path of a cluster YAML, its fields as a mapping, or a spec, which is returned as it is.
        `FILE#PART` is one part of a mixed cluster.
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
    if isinstance(cluster, ClusterSpec):
        spec = cluster
    elif isinstance(cluster, Mapping):
        spec = cluster_from_mapping(cluster)
    else:
        spec = _named_or_in_file(given_path(cluster, "cluster"))
    if gpus is not None:
        check_gpus(spec, gpus)
    return spec


def _named_or_in_file(text: str) -> ClusterSpec:
    if text in cluster_names():
        return load_cluster(text)
    if text.lower() in cluster_names() and not is_file(text):
        return load_cluster(text.lower())
    file, _, part = text.rpartition("#")
    if file and not is_file(text) and is_mixed_cluster(file):
        return read_mixed_cluster(file).part(part)
    if text.endswith(_FILE_ENDINGS) or "/" in text or is_file(text):
        return cluster_from_mapping(read_mapping(Path(text), LARGE_FILE_BYTES), text)
    if text.partition(",")[0] in cluster_names():
        raise InputError(
            "must be one cluster; commands that compare several take --cluster once for each",
            where="cluster",
            value=text,
        )
    near = near_miss(text, cluster_names())
    by_device: dict[str, str] = {}
    if near is None or text.lower() not in near:
        # A GPU's name stands for the first cluster with it: H100-80GB is dgx-h100, not dgx-a100-40gb.
        by_device = {load_cluster(name).device.name: name for name in reversed(cluster_names())}
        near = near_miss(text, (*cluster_names(), *by_device)) or _device_meant(text, by_device)
    raise InputError(
        "neither a catalog name nor a file",
        where="cluster",
        value=text,
        did_you_mean=by_device.get(near or "", near),
        allowed=cluster_names(),
    )


def _device_meant(text: str, devices: Collection[str]) -> str | None:
    """The device that a driver or a scheduler calls so: NVIDIA H100 80GB HBM3, or gpu:h100:8."""
    words = set(re.findall(r"[a-z0-9]+", text.lower()))

    def alike(device: str) -> set[str]:
        return {word for word in device.split("-") if word in words}

    named = [each for each in devices if any(map(_MODEL_NUMBER.fullmatch, alike(each)))]
    return max(named, key=lambda device: len(alike(device)), default=None)


def _named_parts(parts: object) -> str:
    """Clusters of parts and their GPUs as options say them, behind a colon; empty where none has a name."""
    named = [
        f"--cluster {part['cluster']}" + (f" --gpus {part['gpus']}" if "gpus" in part else "")
        for part in (parts if isinstance(parts, list) else [])
        if isinstance(part, dict) and isinstance(part.get("cluster"), str)
    ]
    return f": {', or '.join(named)}" if named else ""


def cluster_from_mapping(data: Mapping[str, object], where: str = "cluster") -> ClusterSpec:
    """A cluster from plain data; `where` names the document in errors.

    `device` is a catalog name or a mapping with all of a device's fields. `base` names a catalog entry whose
    node fields hold where the data has none, and whose size and levels hold where it has no size, nodes or
    levels: a kind of node with another network stays one of any size. Without a base, those that the data
    leaves out or gives as null are taken from the catalog's node with that device and listed in `assumed`;
    `gpus` may be left out where `nodes` lists them.

    Parameters
    ----------
    data
        Fields by name, as a cluster file has them.
    where
        A path, or what the data is.

    Raises
    ------
    InputError
        For a field that there is not, one that is missing, and values that do not fit each other.
    """
    stated = {key: value for key, value in data.items() if value is not None}
    if "parts" in stated:
        raise InputError(
            "this is a mixed cluster, which `plan`, `batch`, `recommend` and `fleet` take alone; give one of "
            "its parts here" + _named_parts(stated["parts"]),
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
    return validated(ClusterSpec, fields, where, ("base",))


_OF_MODELS = frozenset(("model_type", "architectures", "hidden_size", "hidden"))
"""Fields of a config.json, and the width of a model YAML."""


def _refuse_unknown_fields(fields: Mapping[str, object], where: str) -> None:
    """Raises InputError for the first field that no cluster has: what is missing may be meant by it."""
    if not _OF_MODELS.isdisjoint(fields):
        raise InputError(
            "describes a model, no cluster: the model comes first, without an option", where=where
        )
    known = {field.alias or name for name, field in ClusterSpec.model_fields.items()}
    what = "unknown field; twelve nodes of a kind are base: dgx-h100 and gpus: 96"
    refuse_unknown(fields, sorted(known | {"base"}), where=where, what=what)


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
        _refuse_unknown_fields(fields, where)
        what = "required and missing; give a catalog name or a mapping, or a kind of node as base: dgx-h100"
        raise InputError(f"{where}: device: {what}")
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
    return validated(DeviceSpec, {"name": "device", **device}, f"{where}: device"), None


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
        _refuse_unknown_fields(fields, where)
        raise InputError(f"{where}: gpus: this field is required and missing (or list the nodes)")
    free = [node.get("free_gpus") if isinstance(node, Mapping) else None for node in nodes]
    fields["gpus"] = sum(count if isinstance(count, int) else per_node for count in free)


# A cluster whose parts differ in device, node or network, such as old and new nodes side by side.
#
# The file lists its parts, each a cluster by name, by file or in full, and how many GPUs of it there are:
#
#     name: h100-and-a100
#     parts:
#       - {cluster: dgx-h100, gpus: 64}
#       - {cluster: dgx-a100-80gb, gpus: 64}
#     between_gbps_per_gpu: 200


MOST_PIPELINE_PARTS = 3
MOST_PARTS = 8


class PartSpec(ClosedDocument):
    """One part: equal nodes of one kind."""

    cluster: ClusterSpec
    gpus: Annotated[int, Field(ge=1, le=1_000_000)]
    """Of the cluster that the part has."""
    name: Annotated[str, Field(max_length=100)] = ""
    """How plans call it; the cluster's name where it is empty."""

    @model_validator(mode="after")
    def _has_its_gpus(self) -> Self:
        if self.gpus > self.cluster.gpus:
            raise ValueError(
                f"gpus: {self.gpus}, but cluster {self.cluster.name} has {self.cluster.gpus}"
            )
        if self.gpus % self.cluster.gpus_per_node:
            raise ValueError(
                f"gpus: {self.gpus} is no whole number of nodes of {self.cluster.gpus_per_node}"
            )
        return self


class MixedClusterSpec(ClosedDocument):
    """Parts of a cluster: pools of GPUs side by side, through some of which one pipeline may run."""

    name: Annotated[str, Field(max_length=200)] = "mixed"
    parts: Annotated[tuple[PartSpec, ...], Field(min_length=2, max_length=MOST_PARTS)]
    between_gbps_per_gpu: Annotated[float, Field(ge=0.01, le=1e6)] | None = None
    """Gigabit per second and direction that a GPU may send to another part; the slower NIC's when absent."""

    @model_validator(mode="after")
    def _parts_go_together(self) -> Self:
        names = self.names
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"parts: two are called {name!r}; give each a name of its own")
        hosts: set[str] = set()
        for part in self.parts:
            node_names = {node.name for node in part.cluster.nodes}
            if both := hosts & node_names:
                raise ValueError(f"parts: two list node {min(both)!r}: a node is of one part")
            hosts |= node_names
        return self

    @property
    def names(self) -> list[str]:
        """How the parts are called, in their order."""
        return [self.name_of(index) for index in range(len(self.parts))]

    def check_pipeline(self) -> None:
        """Raises InputError where no pipeline runs through the parts: each can only be used alone."""
        sizes = {part.cluster.gpus_per_node for part in self.parts}
        if len(sizes) > 1:
            what = (
                f"nodes have {' and '.join(map(str, sorted(sizes)))} GPUs; a launch starts as many processes "
                "on each node, so they must have the same number"
            )
        elif len({part.cluster.device.architecture in XGMI for part in self.parts}) > 1:
            what = "GPUs of AMD and of NVIDIA cannot send to each other: RCCL and NCCL do not mix"
        elif len(self.parts) > MOST_PIPELINE_PARTS:
            what = f"{len(self.parts)}, but pipelines run through {MOST_PIPELINE_PARTS} at most"
        else:
            return
        alone = ", ".join(self.names)
        remedy = (
            f"plan on one part with --cluster FILE#PART ({alone}); `fleet` shares all of them out"
        )
        raise InputError(f"{self.name}: parts: {what}; {remedy}")

    def name_of(self, part: int) -> str:
        """How plans call a part.

        Parameters
        ----------
        part
            Its place in the file, from 0.
        """
        named_part = self.parts[part]
        return named_part.name or named_part.cluster.name

    def part(self, name: str) -> ClusterSpec:
        """One part as a cluster of its own, with as many GPUs as the part has.

        Parameters
        ----------
        name
            As `name_of` says it.

        Raises
        ------
        InputError
            If no part is called so.
        """
        parts = {self.name_of(index): part for index, part in enumerate(self.parts)}
        check_choice(name, parts, f"parts of {self.name}", "no such part")
        fields = {"gpus": parts[name].gpus, "elastic": False}
        return parts[name].cluster.model_copy(update=fields)

    @property
    def gpus(self) -> int:
        """Of all parts."""
        return sum(part.gpus for part in self.parts)

    @property
    def free_by_name(self) -> dict[str, int]:
        """Free GPUs of the nodes that its parts list."""
        parts = (free_by_name(part.cluster) for part in self.parts)
        return {name: gpus for nodes in parts for name, gpus in nodes.items()}

    def only_nodes(self, names: Collection[str]) -> MixedClusterSpec:
        """The same parts with only the nodes of these names, without parts that none of them is of.

        Parameters
        ----------
        names
            Of nodes that the parts list, each part its own.

        Raises
        ------
        InputError
            Where a part lists no nodes, no part has one of a name, or fewer than two parts are left.
        """
        unlisted = [self.name_of(i) for i, part in enumerate(self.parts) if not part.cluster.nodes]
        if unlisted:
            what = f"part {unlisted[0]!r} of {self.name} lists no nodes to choose from: give them in its file"
            raise InputError(what, where="nodes")
        for name in names:
            if name not in self.free_by_name:
                near = suggestion(name, self.free_by_name)
                what = f"no part of {self.name} has a node {shown(name)}{near}"
                raise InputError(what, where="nodes")
        parts = []
        for part in self.parts:
            of_part = [node.name for node in part.cluster.nodes if node.name in set(names)]
            if of_part:
                cluster = only_nodes(part.cluster, of_part)
                parts.append({"cluster": cluster, "gpus": cluster.gpus, "name": part.name})
        if len(parts) < 2:
            what = f"these nodes are all of one part of {self.name}: plan on its own cluster"
            raise InputError(what, where="nodes")
        return validated(MixedClusterSpec, {**dict(self), "parts": parts}, self.name)


def is_mixed_cluster(cluster: object) -> bool:
    """Whether a cluster is a file that lists parts, or what was read from one.

    Parameters
    ----------
    cluster
        What a user gave: a name, a path or a spec.
    """
    if isinstance(cluster, MixedClusterSpec):
        return True
    if not isinstance(cluster, str | PathLike) or str(cluster) in cluster_names():
        return False
    path = Path(cluster)
    # The word first: a list of 100,000 nodes takes long to parse, and is parsed again as a cluster.
    if not is_file(str(path)) or "parts" not in read_text(path, LARGE_FILE_BYTES):
        return False
    return "parts" in read_mapping(path, LARGE_FILE_BYTES)


def read_mixed_cluster(path: str | PathLike[str]) -> MixedClusterSpec:
    """The mixed cluster of a file.

    Parameters
    ----------
    path
        YAML or JSON; files that it names lie beside it, or are absolute.

    Raises
    ------
    InputError
        If the file or a part of it cannot be used.
    """
    data = dict(read_mapping(Path(path), LARGE_FILE_BYTES))
    parts = data.get("parts")
    if not isinstance(parts, list):
        raise InputError("must be a list of parts", where=f"{path}: parts", value=parts)
    data["parts"] = [
        _part(part, Path(path).parent, f"{path}: parts[{index}]")
        # One too many is enough for the refusal.
        for index, part in enumerate(parts[: MOST_PARTS + 1])
    ]
    return validated(MixedClusterSpec, data, str(path))


def _part(part: object, folder: Path, where: str) -> object:
    """A part with its cluster read."""
    if not isinstance(part, Mapping):
        raise InputError("must be a mapping with cluster and gpus", where=where, value=part)
    if "cluster" not in part:
        what = "this field is required and missing: a catalog name, a file, or a mapping"
        raise InputError(f"{what}; there is {listed(part)}", where=f"{where}.cluster")
    cluster = part["cluster"]
    if isinstance(cluster, Mapping):
        spec = cluster_from_mapping(cluster, f"{where}.cluster")
    elif isinstance(cluster, str):
        beside = folder / cluster
        named = cluster in cluster_names() or not is_file(str(beside))
        spec = read_cluster(cluster if named else beside)
    else:
        raise InputError(
            "give a catalog name, a file, or a mapping", where=f"{where}.cluster", value=cluster
        )
    stated = {name: value for name, value in part.items() if value is not None}
    if spec.elastic and "gpus" not in stated:
        what = f"this field is required and missing: {spec.name!r} is a kind of node, in any number"
        raise InputError(what, where=f"{where}.gpus")
    return {"gpus": spec.gpus, **stated, "cluster": spec}
