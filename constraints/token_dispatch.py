"""What Megatron-LM's dispatchers of tokens do not go with (megatron-core 0.19.2): devices, ranks, formats."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.precision import is_narrow
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.token_dispatch import GATHERS
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.megatron import MEGATRON
from meshwright.frameworks.record import TokenDispatcher


def _flexible(workload: Workload) -> TokenDispatcher | None:
    """The record of DeepEP or HybridEP where the run dispatches with it."""
    dispatcher = MEGATRON.dispatchers.get(workload.moe_dispatch)
    if workload.model.moe is None or dispatcher is None or not dispatcher.deduplicates:
        return None
    return dispatcher


class MegatronDispatcherDevice(Rule):
    """DeepEP and HybridEP run on some devices only."""

    name = "megatron-dispatcher-device"
    unit = "dispatchers"

    def applies(self, workload: Workload) -> bool:
        return _flexible(workload) is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        device, dispatcher = table.workload.cluster.device, _flexible(table.workload)
        missing = 0
        if dispatcher is not None:
            missing = 1 - int(dispatcher.runs_on(device.architecture, device.name))
        return as_excess(np.full_like(column(table, "tp"), missing))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work = plan.workload
        name, device = work.moe_dispatch, work.cluster.device
        if work.model.moe is None or name not in ("deepep", "hybridep"):
            return None
        superchip = name == "deepep" and device.name.lower()[:5] in ("gb200", "gb300")
        old = device.architecture == "ampere" and name == "deepep"
        if (old or device.architecture in ("hopper", "blackwell")) and not superchip:
            return None
        return self.finding(
            value=1,
            words=f"{name} does not run on {device.name}",
            remedy="Dispatch with alltoall, or on Blackwell superchips with hybridep.",
        )


class MegatronDispatcherReach(Rule):
    """ep etp <= GPUs of the scale-up domain with DeepEP before Hopper, whose kernels between nodes need it.

    DeepEP, issues 149 and 234: on Ampere kernels inside a node run, those between nodes are not supported.
    """

    name = "megatron-dispatcher-reach"
    unit = "GPUs"

    def applies(self, workload: Workload) -> bool:
        dispatcher = _flexible(workload)
        architecture = workload.cluster.device.architecture
        return dispatcher is not None and architecture not in dispatcher.between

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        members = column(table, "ep") * column(table, "etp")
        if not self.applies(table.workload):
            return as_excess(0 * members)
        return as_excess(members - table.workload.cluster.nvlink_domain)

    def check(self, plan: FinishedPlan) -> Finding | None:
        work = plan.workload
        name, device, domain = work.moe_dispatch, work.cluster.device, work.cluster.nvlink_domain
        if work.model.moe is None or name not in ("deepep", "hybridep", "ncclep"):
            return None
        members = int(plan.layout.ep) * int(plan.layout.etp)
        if device.architecture in ("hopper", "blackwell") or members <= domain:
            return None
        return self.finding(
            value=members,
            limit=domain,
            words=f"{name} reaches {domain} GPUs of {device.name}, and {members} ranks share the experts",
            remedy=f"Dispatch with alltoall, or lower ep to {domain} or less.",
        )


class MegatronDispatcherRanks(Rule):
    """ep etp is a number that DeepEP has settings for; beyond one domain it fills domains whole.

    Groups that fit into a domain lie in one: `nvlink_domain.dispatcher_reaches` says so of every mapping.

    DeepEP, deep_ep/buffers/legacy.py, get_dispatch_config: 'Unsupported number of EP ranks'; between nodes it
    counts on 8 GPUs joined by NVLink (csrc/legacy/config.hpp, LEGACY_NUM_MAX_NVL_PEERS). HybridEP's branch,
    deep_ep/hybrid_ep_buffer.py: the number of ranks has to be divisible by that of a domain.
    """

    name = "megatron-dispatcher-ranks"
    unit = "groups"

    def applies(self, workload: Workload) -> bool:
        return _flexible(workload) is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        members = column(table, "ep") * column(table, "etp")
        dispatcher, domain = _flexible(table.workload), table.workload.cluster.nvlink_domain
        if dispatcher is None:
            return as_excess(0 * members)
        # One rank alone is another rule's.
        wrong = np.zeros_like(members, dtype=bool)
        if dispatcher.group_sizes:
            wrong = (members > 1) & ~np.isin(members, dispatcher.group_sizes)
        counted = dispatcher.domain_gpus or domain
        unfilled = (members % counted != 0) | (domain % counted != 0)
        return as_excess((wrong | ((members > domain) & unfilled)).astype(np.int64))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work = plan.workload
        name, domain = work.moe_dispatch, int(work.cluster.nvlink_domain)
        members = int(plan.layout.ep) * int(plan.layout.etp)
        if work.model.moe is None or members == 1:
            return None
        words = ""
        if name == "deepep":
            if members not in (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160):
                words = f"DeepEP has no settings for {members} ranks that share the experts"
            elif members > domain and domain % 8:
                words = f"DeepEP counts on 8 GPUs joined by NVLink, and a domain has {domain}"
        elif name == "hybridep" and members > domain and members % domain:
            words = f"{members} ranks that share the experts do not fill domains of {domain} whole"
        inside = plan.spans["ep"][0] if plan.spans else int(plan.layout.ep)
        if name in ("deepep", "hybridep") and members <= domain and inside < int(plan.layout.ep):
            words = (
                f"a group of {members} ranks that share the experts lies across NVLink domains, "
                f"and {name} joins it as one"
            )
        if not words:
            return None
        return self.finding(
            value=1,
            words=words,
            remedy="Take another ep, or dispatch with alltoall.",
        )


class MegatronAllGather(Rule):
    """The all-gather dispatcher goes without overlap of expert communication and in 16 bits.

    megatron/core/transformer/transformer_config.py asserts the first, and refuses tokens padded for FP8 and
    narrower formats (moe_router_padding_for_quantization), as launch files have them.
    """

    name = "megatron-allgather-dispatcher"
    unit = "conditions"
    of_workload = True

    def applies(self, workload: Workload) -> bool:
        return workload.model.moe is not None and workload.moe_dispatch == GATHERS

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        work = table.workload
        broken = int(work.overlap.ep) + int(is_narrow(work)) if self.applies(work) else 0
        return as_excess(np.full_like(column(table, "tp"), broken))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work = plan.workload
        if work.model.moe is None or work.moe_dispatch != "allgather":
            return None
        broken = ["overlap of expert communication"] if work.overlap.ep else []
        if work.precision not in ("bf16", "fp16"):
            broken.append(f"tokens in {work.precision}")
        if not broken:
            return None
        return self.finding(
            value=len(broken),
            words=f"the all-gather dispatcher does not go with {' and with '.join(broken)}",
            remedy="Dispatch with alltoall.",
        )
