"""A cluster whose parts differ in device, node or network, such as old and new nodes side by side.

The file lists its parts, each a cluster by name, by file or in full, and how many GPUs of it there are:

    name: h100-and-a100
    parts:
      - {cluster: dgx-h100, gpus: 64}
      - {cluster: dgx-a100-80gb, gpus: 64}
    between_gbps_per_gpu: 200
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from meshwright.cluster_specs.catalog import cluster_names
from meshwright.cluster_specs.reader import cluster_from_mapping, read_cluster
from meshwright.cluster_specs.schema import XGMI, ClusterSpec
from meshwright.documents.reader import LARGE_FILE_BYTES, is_file, read_mapping, read_text
from meshwright.documents.validation import validation_message
from meshwright.errors import InputError, listed

_FROZEN = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class PartSpec(BaseModel):
    """One part: equal nodes of one kind."""

    model_config = _FROZEN

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


class MixedClusterSpec(BaseModel):
    """Two or three parts, whose nodes have as many GPUs each."""

    model_config = _FROZEN

    name: Annotated[str, Field(max_length=200)] = "mixed"
    parts: Annotated[tuple[PartSpec, ...], Field(min_length=2, max_length=3)]
    between_gbps_per_gpu: Annotated[float, Field(ge=0.01, le=1e6)] | None = None
    """Gigabit per second and direction that a GPU may send to another part; the slower NIC's when absent."""

    @model_validator(mode="after")
    def _parts_go_together(self) -> Self:
        sizes = {part.cluster.gpus_per_node for part in self.parts}
        if len(sizes) > 1:
            raise ValueError(
                f"parts: nodes have {' and '.join(map(str, sorted(sizes)))} GPUs; a launch starts as many "
                "processes on each node, so they must have the same number"
            )
        makers = {part.cluster.device.architecture in XGMI for part in self.parts}
        if len(makers) > 1:
            raise ValueError(
                "parts: GPUs of AMD and of NVIDIA cannot send to each other: RCCL and NCCL do not mix"
            )
        names = [self.name_of(index) for index in range(len(self.parts))]
        if len(set(names)) < len(names):
            raise ValueError(
                f"parts: two are called {names[0]!r} or alike; give each a name of its own"
            )
        return self

    def name_of(self, part: int) -> str:
        """How plans call a part.

        Parameters
        ----------
        part
            Its place in the file, from 0.
        """
        own = self.parts[part]
        return own.name or own.cluster.name

    @property
    def gpus(self) -> int:
        """Of all parts."""
        return sum(part.gpus for part in self.parts)


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
        for index, part in enumerate(parts[:8])
    ]
    try:
        return MixedClusterSpec.model_validate(data)
    except ValidationError as error:
        raise InputError(validation_message(error, str(path), MixedClusterSpec)) from None


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
    return {"gpus": spec.gpus, **part, "cluster": spec}
