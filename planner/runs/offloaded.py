"""Modules whose activations are offloaded, as run files and launch scripts name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.costmodel.execution_names import OFFLOADED_MODULES
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.memory.offloaded_activations import offloads_any
from meshwright.costmodel.workload import Workload
from meshwright.errors import InputError
from meshwright.frameworks.catalog import framework_of_stack, planned
from meshwright.planner.request.executions import check_names
from meshwright.planner.runs.launches.flags import CommandLine

_OFFLOADED = tuple(OFFLOADED_MODULES[-1].split("+"))
"""Every module that is priced."""
_SWITCH, _MODULES = "--fine-grained-activation-offloading", "--offload-modules"
_NOT_PRICED = (
    "--activation-offload-fraction",
    "--delta-offload-bytes-across-pp-ranks",
    "--min-offloaded-tensor-size",
    "--fine-grained-offloading-max-inflight-offloads",
)
"""Flags that change what is offloaded, or when."""


def offloaded_set(modules: Sequence[str], where: str = "run.offload_modules") -> str:
    """How the cost model calls some modules together.

    >>> offloaded_set(["moe_act", "expert_fc1"])
    'expert_fc1+moe_act'

    Raises
    ------
    InputError
        For a module that has no price, and for attn_proj without core_attn, which Megatron refuses.
    """
    check_names(where, modules, _OFFLOADED, "is not a module whose offloading has a price")
    name = "+".join(module for module in _OFFLOADED if module in modules) or "none"
    if name not in OFFLOADED_MODULES:
        raise InputError("attn_proj goes with core_attn only: name both", where=where, value=name)
    return name


def check_offload(workload: Workload, layout: Layout) -> None:
    """Raises InputError where a run offloads and its framework is not planned to, or cannot."""
    record = framework_of_stack(workload.framework)
    if workload.offload_parameters and (
        "parameters" not in record.offloads or layout.zero_stage != 3
    ):
        raise InputError(
            "is DeepSpeed's under ZeRO 3 only (offload_param); FSDP2's CPU offload is optimizer_offload: 100",
            where="run.parameter_offload",
            value=f"{record.name}, zero_stage {layout.zero_stage}",
        )
    if offloads_any(workload) and "activations" not in planned(record.offloads):
        raise InputError(
            "has a price with Megatron only",
            where="run.offload_modules",
            value=workload.offload_modules,
        )


def offloaded_modules(line: CommandLine) -> dict[str, Any]:
    """`offload_modules` of Megatron's flags; nothing without the switch. Raises InputError for what has no
    price.
    """
    modules = line.several(_MODULES)
    if not line.has(_SWITCH):
        return {}
    for flag in _NOT_PRICED:
        if line.has(flag):
            raise InputError(
                f"has no price beside {_SWITCH}: leave it at its default",
                where=f"{line.where}: {flag}",
            )
    where = f"{line.where}: {_MODULES}"
    return {"offload_modules": offloaded_set(modules, where).split("+")} if modules else {}
