"""Environment of NCCL that a plan implies, and what is left to the people who know the machines."""

from __future__ import annotations

from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.predicted import LayoutDoc

NOTES = (
    "NCCL_IB_HCA (order of the adapters), NCCL_IB_SL and NCCL_IB_TC (service level, traffic class) depend on "
    "your fabric and are left to you.",
)


def nccl_env(plan: Plan, layout: LayoutDoc) -> dict[str, str]:
    """NCCL settings that the plan's use of the scale-up domain asks for.

    A domain of several nodes (GB200 NVL72) needs multi-node NVLink. Reductions in the NVLink switch (NVLS)
    are there from Hopper on; they are asked for where tensor parallelism would use them.
    """
    cluster = plan.inputs.cluster
    env = {}
    if cluster.nvlink_domain > cluster.gpus_per_node:
        env["NCCL_MNNVL_ENABLE"] = "1"
    if layout.tp >= 4 and cluster.device.architecture in ("hopper", "blackwell"):
        env["NCCL_NVLS_ENABLE"] = "1"
    return env
