"""What a GPU cluster is: a device, a node, and the levels of the fabric from the NVLink domain outwards."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from meshwright.documents import ClosedDocument
from meshwright.errors import suggestion

Positive = Annotated[float, Field(gt=0, le=1e9)]
Rate = Annotated[float, Field(ge=0.01, le=1e9)]
"""Gbit/s, GB/s or TFLOP/s. Below, no step ends in a time that the search can count."""
GpuCount = Annotated[int, Field(ge=1, le=1_048_576)]
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}$")]
"""Letters, digits, dot, hyphen and underscore: names end in hostfiles and start scripts."""
LONGEST_BLOCK_NAME = 100
BlockName = Annotated[str, Field(min_length=1, max_length=LONGEST_BLOCK_NAME)]

Background = Annotated[float, Field(ge=0, le=0.99)]

Architecture = Literal[
    "volta", "ampere", "ada", "hopper", "blackwell", "blackwell-rtx", "cdna3", "cdna4"
]  # fmt: skip
XGMI: tuple[Architecture, ...] = ("cdna3", "cdna4")
"""Whose scale-up links are xGMI, a mesh without switches."""
Medium = Literal["nvlink", "pcie", "xgmi", "infiniband", "roce", "efa", "omnipath", "slingshot"]

MOST_DIRECT = 512
"""Blocks that links of their own may join, each with all others."""


class DeviceSpec(ClosedDocument):
    """One accelerator. Rates are dense peaks (no structured sparsity)."""

    name: str = Field(max_length=100)
    architecture: Architecture
    hbm_gib: Positive
    """What the driver reports as total, in GiB (2**30 bytes)."""
    hbm_gb_per_s: Rate
    peak_bf16_tflops: Rate | None = None
    peak_fp16_tflops: Rate
    peak_fp8_tflops: Rate | None = None
    peak_fp4_tflops: Rate | None = None
    scale_up_gb_per_s: Rate | None = None
    """NVLink (or xGMI) bandwidth in one direction, nominal; absent on a PCIe card."""
    pcie_gb_per_s: Rate
    """PCIe in one direction, nominal."""
    sms: Annotated[int, Field(ge=1, le=1024)]
    """Streaming multiprocessors, or compute units."""
    tdp_w: Positive
    lacks: tuple[Literal["peer-access"], ...] = ()
    """Peer access: copies from GPU to GPU that pass the host's memory by, which late GeForce cards lack."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Where each number was read, by field name."""


class FabricLevelSpec(ClosedDocument):
    """One level above the scale-up domain: blocks of `gpus` GPUs, which the next level joins."""

    name: BlockName
    gpus: GpuCount
    """GPUs in one block of this level. The outermost level's block is the whole cluster."""
    oversubscription: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Down-link over up-link bandwidth of the switches that carry traffic *inside* this level's block
    (between blocks of the level below): 1 is non-blocking; 3 leaves each GPU a third of its NIC's rate."""
    latency_us: Positive | None = None
    """One hop of a collective across this level."""
    rails: Annotated[int, Field(ge=1, le=64)] = 1
    """Separate switches in one block: GPU i of every node hangs on rail i modulo `rails`, and what goes from
    one rail to another passes NVLink first (`pxn`) or the first level outside that has no rails."""
    joined: Literal["switches", "direct"] = "switches"
    """direct: the blocks of the level below are joined by links of their own, spread evenly over all of them
    (the groups of a dragonfly); `oversubscription` is then that of these links. The outermost level only."""
    background: Background | None = None
    """Share of the up-links of each of this level's blocks that other jobs use; without it, the share of the
    block's GPUs that are not free."""


class BlockSpec(ClosedDocument):
    """What other jobs do to the up-links of one named block: a leaf, or a pod where no leaf is given."""

    leaf: BlockName | None = None
    pod: BlockName | None = None
    background: Background


class NodeSpec(ClosedDocument):
    """One named node, and where it hangs; for clusters that are partly in use or not regular."""

    name: HostName
    free_gpus: Annotated[int, Field(ge=0, le=1024)] | None = None
    """GPUs that may be used; all of the node's when absent."""
    leaf: BlockName | None = None
    pod: BlockName | None = None
    nic_gbps_per_gpu: Rate | None = None
    """Where it differs from the cluster's. The slowest node that is free paces every collective."""


class MeasuredLevelSpec(ClosedDocument):
    """What a benchmark reached across one level of the fabric, of `gpus` GPUs that span it."""

    level: BlockName
    """nvlink, xgmi or node for the scale-up domain and the node; else a name of `levels`, or fabric."""
    collective: Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall"]
    gpus: GpuCount
    bus_gb_per_s: Rate
    """Bus bandwidth at the largest messages, as nccl-tests defines it."""
    attained_fraction: Annotated[float, Field(gt=0, le=1)]
    """Of the level's nominal rate."""
    latency_us: Positive | None = None
    """One hop across this level."""
    source: str = Field(default="", max_length=2000)


class ClusterSpec(ClosedDocument):
    """A cluster of equal nodes. Levels are listed inside out, each a multiple of the one before."""

    name: str = Field(default="cluster", max_length=200)
    device: DeviceSpec
    gpus: GpuCount
    """GPUs in the whole cluster; with `elastic`, the most that may be asked for."""
    elastic: bool = False
    """A kind of node rather than one machine: as many of them as wanted."""
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)]
    nvlink_domain: Annotated[int, Field(ge=1, le=8192)]
    """GPUs that share one scale-up fabric (NVLink switch, xGMI mesh); 1 where there is none."""
    nvlink_gb_per_s: Rate | None = None
    """One direction and GPU; the device's own figure when absent."""
    host_memory_gib: Positive | None = None
    """Of a node, as far as a run may use it for what its GPUs offload; not limited when absent."""
    nvme_gb_per_s: Rate | None = None
    """Of a node's drives together, while all its GPUs read or write; for runs that keep something there."""
    nic_gbps_per_gpu: Rate
    """Gigabit per second and direction: the node's NICs divided by its GPUs."""
    nic_medium: Medium = "infiniband"
    levels: tuple[FabricLevelSpec, ...] = Field(default=(), max_length=8)
    """Levels above the node / NVLink domain; one non-blocking level when empty."""
    pxn: bool = True
    """Whether traffic between rails passes NVLink to the GPU on the receiver's rail first, as NCCL does with
    NVLink unless NCCL_PXN_DISABLE=1; otherwise it crosses a level without rails."""
    blocks: tuple[BlockSpec, ...] = Field(default=(), max_length=131_072)
    """Leaves and pods whose up-links other jobs use otherwise than their level's `background` says."""
    nodes: tuple[NodeSpec, ...] = Field(default=(), max_length=131_072)
    """Every node by name, where they are known; their free GPUs are the cluster's `gpus`. Beside nodes with a
    leaf one without has a leaf of its own, and a pod where pods are named, called as the node."""
    node_name_pattern: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\{(:0?[1-9]d)?\}[A-Za-z0-9._-]{0,99}$")
    ] = "node-{:05d}"
    """Name of the n-th node, counted from 1, where nodes are not listed: one `{}` or `{:05d}` field."""
    usd_per_gpu_hour: Positive | None = None
    """What a GPU costs to rent, where that is known; `recommend` compares clusters by it."""
    fabric: str | None = Field(default=None, max_length=2000)
    """A remark in words."""
    measured: tuple[MeasuredLevelSpec, ...] = Field(default=(), max_length=64)
    """What levels attain, where it was measured; the cost model takes it in place of its own constants."""
    assumed: tuple[str, ...] = ()
    """What was not stated but taken from a reference node."""
    sources: dict[str, str] = Field(default_factory=dict)
    _takes_any_gpus: bool = PrivateAttr(default=False)

    @property
    def takes_any_gpus(self) -> bool:
        """Whether a search may leave out GPUs of any listed node, also where all are whole and alike."""
        return self._takes_any_gpus

    def with_any_gpus(self, *, allowed: bool = True) -> Self:
        """The same cluster for a search that may leave out GPUs of any listed node; no document says so.

        Parameters
        ----------
        allowed
            Whether it may; False takes the permission back.
        """
        copy = self.model_copy()
        copy._takes_any_gpus = allowed
        return copy

    @field_validator("nodes")
    @classmethod
    def _nodes_hang_somewhere(cls, nodes: tuple[NodeSpec, ...]) -> tuple[NodeSpec, ...]:
        alone = [index for index, node in enumerate(nodes) if node.leaf is None]
        if len(alone) in (0, len(nodes)):
            return nodes
        has_pods = any(node.pod is not None for node in nodes)
        taken = {name for node in nodes for name in (node.leaf, node.pod) if name is not None}
        hanging = list(nodes)
        for index in alone:
            name = _own_block(nodes[index], index, taken)
            pod = nodes[index].pod or (name if has_pods else None)
            hanging[index] = nodes[index].model_copy(update={"leaf": name, "pod": pod})
        return tuple(hanging)

    @model_validator(mode="after")
    def _scale_up_fits_the_node(self) -> Self:
        small, large = sorted((self.gpus_per_node, self.nvlink_domain))
        if large % small:
            raise ValueError(
                f"nvlink_domain {self.nvlink_domain} and gpus_per_node {self.gpus_per_node}: "
                "one must be a multiple of the other"
            )
        if self.nvlink_domain > 1 and not (self.nvlink_gb_per_s or self.device.scale_up_gb_per_s):
            raise ValueError(
                f"nvlink_gb_per_s: missing, nvlink_domain is {self.nvlink_domain} and device "
                f"{self.device.name} states no scale_up_gb_per_s; give it, or set nvlink_domain to 1"
            )
        return self

    @model_validator(mode="after")
    def _levels_nest(self) -> Self:
        inner, inner_name = max(self.nvlink_domain, self.gpus_per_node), "the node or NVLink domain"
        seen: set[str] = set()
        for level in self.levels:
            if level.gpus % inner:
                raise ValueError(
                    f"levels: {level.name} has {level.gpus} GPUs, not a multiple of the {inner} of "
                    f"{inner_name}"
                )
            if level.name in seen:
                raise ValueError(f"levels: two levels are called {level.name}")
            seen.add(level.name)
            inner, inner_name = level.gpus, level.name
        if self.levels and self.gpus > inner:
            raise ValueError(
                f"levels: the outermost level, {inner_name}, has {inner} GPUs, but the cluster has "
                f"{self.gpus}; its block must hold the whole cluster"
            )
        return self

    @model_validator(mode="after")
    def _rails_fit(self) -> Self:
        railed = [level for level in self.levels if level.rails > 1]
        for level in railed:
            if self.gpus_per_node % level.rails:
                raise ValueError(
                    f"levels: {level.name} has {level.rails} rails, which do not divide the "
                    f"{self.gpus_per_node} GPUs of a node"
                )
        if len({level.rails for level in railed}) > 1 or railed != list(self.levels[: len(railed)]):
            raise ValueError(
                "levels: rails must be those of the innermost levels, and as many on each: "
                + ", ".join(f"{level.name} {level.rails}" for level in self.levels)
            )
        if railed and len(railed) == len(self.levels) and not self.crosses_rails_inside:
            raise ValueError(
                "levels: all have rails, so nothing joins the rails without NVLink; "
                "leave pxn on, or add a level without rails"
            )
        return self

    @model_validator(mode="after")
    def _direct_links_are_outermost(self) -> Self:
        for depth, level in enumerate(self.levels):
            if level.joined != "direct":
                continue
            if depth == 0 or depth < len(self.levels) - 1:
                raise ValueError(
                    f"levels: {level.name} is joined directly; only the outermost of several levels can be"
                )
            if level.rails > 1 or self.levels[depth - 1].rails > 1:
                raise ValueError(
                    f"levels: {level.name} is joined directly, so neither it nor the blocks that it joins "
                    "can have rails"
                )
            blocks = level.gpus // self.levels[depth - 1].gpus
            if blocks > MOST_DIRECT:
                raise ValueError(
                    f"levels: {level.name} joins {blocks} blocks directly; at most {MOST_DIRECT} can be"
                )
        return self

    @model_validator(mode="after")
    def _background_is_somewhere(self) -> Self:
        if self.levels and self.levels[-1].background is not None:
            raise ValueError(
                f"levels: {self.levels[-1].name} has a background, but the outermost level has no up-links; "
                "say it of the level below"
            )
        pods_of: dict[str | None, set[str | None]] = {}
        for node in self.nodes:
            if node.leaf is not None:
                pods_of.setdefault(node.leaf, set()).add(node.pod)
        pods = {pod for names in pods_of.values() for pod in names if pod is not None}
        named: set[tuple[str | None, str | None]] = set()
        for index, block in enumerate(self.blocks):
            key = _block_key(index, block, pods_of, pods)
            if key in named:
                raise ValueError(f"blocks[{index}]: this block is listed twice")
            named.add(key)
        return self

    @model_validator(mode="after")
    def _nodes_add_up(self) -> Self:
        if not self.nodes:
            return self
        seen: set[str] = set()
        for node in self.nodes:
            if node.name in seen:
                raise ValueError(f"nodes: {node.name} is listed twice")
            seen.add(node.name)
            if (node.free_gpus or 0) > self.gpus_per_node:
                raise ValueError(
                    f"nodes: {node.name} has free_gpus {node.free_gpus}, more than gpus_per_node "
                    f"{self.gpus_per_node}"
                )
        free = self.free_gpus
        if free != self.gpus:
            raise ValueError(
                f"gpus: {self.gpus}, but the nodes listed have {free} free GPUs; leave gpus out, and they "
                "are counted"
            )
        return self

    @model_validator(mode="after")
    def _measured_levels_exist(self) -> Self:
        names = self.level_names
        for entry in self.measured:
            if entry.level not in names:
                raise ValueError(
                    f"measured: level {entry.level!r} is none of this cluster's: {', '.join(names)}"
                )
        return self

    @property
    def crosses_rails_inside(self) -> bool:
        """Whether what goes from rail to rail passes NVLink, so that the network only sees one rail.

        NCCL relays through a GPU of the same node that NVLink joins (NVIDIA/nccl src/graph/paths.cc).
        """
        return self.pxn and self.nvlink_domain >= self.gpus_per_node > 1

    @property
    def level_names(self) -> tuple[str, ...]:
        """The names of all levels, inside out: the scale-up domain, the node over PCIe, the switches."""
        names = []
        if self.nvlink_domain > 1:
            names.append("xgmi" if self.device.architecture in XGMI else "nvlink")
        if self.nvlink_domain < self.gpus_per_node or self.nvlink_domain == 1:
            names.append("node")
        return (*names, *([level.name for level in self.levels] or ["fabric"]))

    @property
    def slowest_nic_gbps_per_gpu(self) -> float:
        """Of the nodes with free GPUs; the cluster's where none states its own."""
        rates = (node.nic_gbps_per_gpu for node in self.nodes if node.free_gpus != 0)
        return min((nic or self.nic_gbps_per_gpu for nic in rates), default=self.nic_gbps_per_gpu)

    @property
    def node_count(self) -> int:
        """Nodes that are listed, or that the GPUs fill where none are."""
        return len(self.nodes) or -(-self.gpus // self.gpus_per_node)

    @property
    def free_gpus(self) -> int:
        """Free GPUs of the nodes listed; all GPUs where none are."""
        if not self.nodes:
            return self.gpus
        return sum(self.gpus_per_node if n.free_gpus is None else n.free_gpus for n in self.nodes)


def _own_block(node: NodeSpec, index: int, taken: set[str]) -> str:
    """A name for the leaf and the pod that a node has to itself, as its own where no block is called so."""
    name = node.name[:LONGEST_BLOCK_NAME]
    while name in taken:
        name = f"{index}-{name}"[:LONGEST_BLOCK_NAME]
    taken.add(name)
    return name


def _block_key(
    index: int, block: BlockSpec, pods_of: dict[str | None, set[str | None]], pods: set[str]
) -> tuple[str | None, str | None]:
    """The (pod, leaf) that a block names. Raises ValueError where there is none, or more than one."""
    if block.leaf is None and block.pod is None:
        raise ValueError(f"blocks[{index}]: names neither a leaf nor a pod")
    if block.leaf is None:
        if block.pod not in pods:
            raise ValueError(
                f"blocks[{index}].pod: no node is in {block.pod!r}{suggestion(block.pod, pods)}"
            )
        return block.pod, None
    pods_of_leaf = pods_of.get(block.leaf, set())
    if not pods_of_leaf or block.pod not in (None, *pods_of_leaf):
        near = suggestion(block.leaf, {leaf for leaf in pods_of if leaf is not None})
        place = f"{block.leaf!r}" + (f" of pod {block.pod!r}" if block.pod else "")
        raise ValueError(f"blocks[{index}].leaf: no node hangs on {place}{near}")
    if block.pod is None and len(pods_of_leaf) > 1:
        raise ValueError(
            f"blocks[{index}].leaf: {block.leaf!r} is in {len(pods_of_leaf)} pods; give the pod too"
        )
    return next(iter(pods_of_leaf)) if block.pod is None else block.pod, block.leaf
