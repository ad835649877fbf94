"""What Megatron-LM's offloading of activations does not go with (megatron-core 0.19.2)."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.kinds import Requires, When
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.layout import Recompute
from meshwright.costmodel.memory.offloaded_activations import offloads, offloads_any
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.schema import ModelSpec

_EXPERT_MODULES = ("expert_fc1", "moe_act")


def has_modules(model: ModelSpec, modules: Collection[str]) -> bool:
    """Whether all modules of a list can be offloaded in a model.

    Parameters
    ----------
    model : ModelSpec
        Any.
    modules : collection of str
        Of `meshwright.costmodel.execution_names.OFFLOADED_MODULES`, one by one.

    Returns
    -------
    bool
        False where there are no experts, or where not every layer attends alike.
    """
    of_experts = any(module in _EXPERT_MODULES for module in modules)
    of_attention = any(module not in _EXPERT_MODULES for module in modules)
    alike = model.indexer is None and not model.linear_layers
    return (model.moe is not None or not of_experts) and (alike or not of_attention)


def has_mamba(model: ModelSpec) -> bool:
    """Whether some layer has a Mamba block, or a pattern says what layers are.

    Parameters
    ----------
    model : ModelSpec
        Any.

    Returns
    -------
    bool
    """
    return model.hybrid_pattern is not None or model.mamba_beside_attention


def offload_refuses(workload: Workload) -> int:
    """How many conditions the offloaded modules of a workload break, whatever the layout.

    Parameters
    ----------
    workload : Workload
        With its modules and CUDA graphs.

    Returns
    -------
    int
    """
    if not offloads_any(workload):
        return 0
    model, modules = workload.model, workload.offload_modules.split("+")
    return sum(
        (
            not has_modules(model, [name for name in modules if name in _EXPERT_MODULES]),
            not has_modules(model, [name for name in modules if name not in _EXPERT_MODULES]),
            has_mamba(model),
            workload.cuda_graph == "full",
        )
    )


class MegatronOffloadedModules(Rule):
    """Offloaded are modules of experts where there are experts, and of attention where every layer attends
    alike; no CUDA graph holds the whole step, and no layer is a Mamba block.

    In a graph of the whole step Megatron asks for a cap on copies under way, which has no price here
    (megatron/core/transformer/transformer_config.py, fine_grained_offloading_max_inflight_offloads).
    """

    name = "megatron-offloaded-modules"
    unit = "conditions"
    of_workload = True

    def applies(self, workload: Workload) -> bool:
        return offloads_any(workload)

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        broken = offload_refuses(table.workload)
        return as_excess(np.full_like(column(table, "tp"), broken))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work, model = plan.workload, plan.workload.model
        modules = work.offload_modules.split("+")
        if modules == ["none"]:
            return None
        broken = []
        if model.moe is None and ("expert_fc1" in modules or "moe_act" in modules):
            broken.append("a model without experts")
        if "core_attn" in modules and (model.linear_layers > 0 or model.indexer is not None):
            broken.append("linear or sparse attention")
        if model.hybrid_pattern is not None or model.mamba_beside_attention:
            broken.append("Mamba blocks")
        if work.cuda_graph == "full":
            broken.append("a CUDA graph of the whole step")
        if not broken:
            return None
        return self.finding(
            value=len(broken),
            words=f"offloading {' '.join(modules)} does not go with {' and '.join(broken)}",
            remedy="Offload other modules or nothing, or capture attention and router only.",
        )


def _masks_without(refused: Recompute) -> tuple[int, ...]:
    return tuple(mask for mask in range(2 * int(max(Recompute))) if not mask & int(refused))


MEGATRON_OFFLOAD_RECOMPUTE = Requires(
    name="megatron-offload-recompute",
    sentence="no full recomputation where activations are offloaded",
    unit="settings",
    binds=offloads_any,
    needs=When("recompute", among=_masks_without(Recompute.FULL)),
    words="activations offloaded of layers that are recomputed in full",
    remedy="Recompute single modules, or offload nothing.",
)
"""The forward pass of such a layer saves its input alone, which is no module's."""

MEGATRON_OFFLOAD_UP_PROJECTION = Requires(
    name="megatron-offload-up-projection",
    sentence="MLA's up-projection not recomputed where core_attn is offloaded",
    unit="settings",
    binds=lambda work: offloads(work, "core_attn"),
    needs=When("recompute", among=_masks_without(Recompute.MLA_UP_PROJECTION)),
    words="queries, keys and values offloaded that are recomputed as well",
    remedy="Do not recompute mla_up_proj, or offload other modules.",
)
"""Both would give back the same tensors (megatron/core/transformer/multi_latent_attention.py)."""


def offload_refuses_recompute(workload: Workload, mask: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which recomputation does not go with the modules that a workload offloads.

    Parameters
    ----------
    workload : Workload
        With its modules.
    mask : array of int, shape [n]
        `Recompute` masks.

    Returns
    -------
    array of bool, shape [n]
    """
    refused = 0
    if offloads_any(workload):
        refused |= int(Recompute.FULL)
    if offloads(workload, "core_attn"):
        refused |= int(Recompute.MLA_UP_PROJECTION)
    return np.asarray((mask & refused) > 0)


MEGATRON_ACTIVATION_RULES: tuple[Rule, ...] = (
    MegatronOffloadedModules(),
    MEGATRON_OFFLOAD_RECOMPUTE,
    MEGATRON_OFFLOAD_UP_PROJECTION,
)
