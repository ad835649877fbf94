"""What a GPU cluster is: a device, a node, and the levels of the fabric from the NVLink domain outwards."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0, le=1e9)]
GpuCount = Annotated[int, Field(ge=1, le=1_048_576)]

Architecture = Literal["volta", "ampere", "ada", "hopper", "blackwell", "cdna3"]
Medium = Literal["nvlink", "pcie", "xgmi", "infiniband", "roce", "efa", "omnipath", "slingshot"]

_FROZEN = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class DeviceSpec(BaseModel):
    """One accelerator. Rates are dense peaks (no structured sparsity)."""

    model_config = _FROZEN

    name: str = Field(max_length=100)
    architecture: Architecture
    hbm_gib: Positive
    """What the driver reports as total, in GiB (2**30 bytes)."""
    hbm_gb_per_s: Positive
    peak_bf16_tflops: Positive | None = None
    peak_fp16_tflops: Positive
    peak_fp8_tflops: Positive | None = None
    peak_fp4_tflops: Positive | None = None
    scale_up_gb_per_s: Positive | None = None
    """NVLink (or xGMI) bandwidth in one direction, nominal; absent on a PCIe card."""
    pcie_gb_per_s: Positive
    """PCIe in one direction, nominal."""
    sms: Annotated[int, Field(ge=1, le=1024)]
    tdp_w: Positive
    sources: dict[str, str] = Field(default_factory=dict)
    """Where each number was read, by field name."""


class FabricLevelSpec(BaseModel):
    """One level above the scale-up domain: blocks of `gpus` GPUs, joined to their siblings by the next level."""

    model_config = _FROZEN

    name: str = Field(max_length=60)
    gpus: GpuCount
    """GPUs in one block of this level. The outermost level's block is the whole cluster."""
    oversubscription: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Down-link over up-link bandwidth of the switches that carry traffic *inside* this level's block (between
    blocks of the level below): 1 is non-blocking; 3 leaves a third of the NIC bandwidth to every GPU."""
    latency_us: Positive | None = None
    """One hop of a collective across this level."""


class ClusterSpec(BaseModel):
    """A cluster of equal nodes. Levels are listed from the inside outwards, each a multiple of the one before."""

    model_config = _FROZEN

    name: str = Field(default="cluster", max_length=200)
    device: DeviceSpec
    gpus: GpuCount
    """GPUs in the whole cluster."""
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)]
    nvlink_domain: Annotated[int, Field(ge=1, le=8192)]
    """GPUs that share one scale-up fabric (NVLink switch, xGMI mesh); 1 where there is none."""
    nvlink_gb_per_s: Positive | None = None
    """One direction and GPU; the device's own figure when absent."""
    nic_gbps_per_gpu: Positive
    """Gigabit per second and direction: the node's NICs divided by its GPUs."""
    nic_medium: Medium = "infiniband"
    levels: tuple[FabricLevelSpec, ...] = ()
    """Levels above the node / NVLink domain; one non-blocking level when empty."""
    fabric: str | None = None
    """A remark in words."""
    assumed: tuple[str, ...] = ()
    sources: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        inner, inner_name = max(self.nvlink_domain, self.gpus_per_node), "the node or NVLink domain"
        for level in self.levels:
            if level.gpus % inner or level.gpus < inner:
                raise ValueError(
                    f"levels: {level.name} has {level.gpus} GPUs, not a multiple of the {inner} of {inner_name}"
                )
            inner, inner_name = level.gpus, level.name
        return self
