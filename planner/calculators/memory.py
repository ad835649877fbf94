"""HBM of every pipeline stage by component, of a fully given run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.costmodel.memory.footprint import usable_hbm_gib
from meshwright.costmodel.workload import Workload


def memory_document(
    name: str, workload: Workload, parts_gib: Sequence[Mapping[str, float]], context_gib: float
) -> dict[str, Any]:
    """What one GPU of each pipeline stage holds, and what it has to give.

    Parameters
    ----------
    name
        Of the run.
    workload
        What is trained, and on which device.
    parts_gib
        GiB by component, for each pipeline stage.
    context_gib
        GiB that the CUDA context and NCCL take outside the framework's allocator.

    Returns
    -------
    dict
        `memory_gib` is the peak of each stage: the sum of its components. `usable_gib` is what the framework
        may allocate on a GPU.
    """
    device = workload.cluster.device
    return {
        "id": name,
        "device": device.name,
        "hbm_gib": device.hbm_gib,
        "usable_gib": usable_hbm_gib(workload),
        "context_gib": context_gib,
        "memory_gib": [sum(parts.values()) for parts in parts_gib],
        "memory_parts_gib": [dict(parts) for parts in parts_gib],
    }
