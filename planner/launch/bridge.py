"""A plan as overrides of a Megatron-Bridge recipe: `model.*`, `train.*`, `ddp.*` in Hydra's notation.

Names were read in megatron-bridge 0.6.2.
"""

from __future__ import annotations

import json

from meshwright.costmodel.workload import Overlap
from meshwright.frameworks.megatron import MEGATRON
from meshwright.planner.launch.legality import require_legal
from meshwright.planner.launch.megatron import DEFAULT_OVERLAP
from meshwright.planner.launch.pipeline_layout import layout_string
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.predicted import LayoutDoc

_MIXED_PRECISION = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}


def bridge_overrides(plan: Plan, overlap: Overlap = DEFAULT_OVERLAP) -> list[str]:
    """Overrides for a recipe of the same model. Raises InfeasibleError if Megatron would refuse the plan.

    The architecture is the recipe's own: only what the plan decided is set.
    """
    layout = require_legal(plan, MEGATRON, overlap)
    sharded = layout.zero_stage >= 1
    values: dict[str, object] = {
        "model.tensor_model_parallel_size": layout.tp,
        "model.pipeline_model_parallel_size": layout.pp,
        "model.context_parallel_size": layout.cp,
        "model.sequence_parallel": layout.sequence_parallel,
        **_pipeline(plan, layout),
        "model.seq_length": plan.inputs.seq_len,
        "dataset.seq_length": plan.inputs.seq_len,
        "train.micro_batch_size": layout.micro_batch,
        "train.global_batch_size": plan.inputs.global_batch,
        "ddp.use_distributed_optimizer": sharded,
        "optimizer.use_distributed_optimizer": sharded,
        "ddp.overlap_grad_reduce": overlap.dp,
        "ddp.overlap_param_gather": overlap.dp and sharded,
        "mixed_precision": _MIXED_PRECISION[plan.inputs.precision],
    }
    if plan.inputs.model.moe is not None:
        values["model.expert_model_parallel_size"] = layout.ep
        values["model.expert_tensor_parallel_size"] = layout.etp
    if layout.recompute == "full":
        values |= {
            "model.recompute_granularity": "full",
            "model.recompute_method": "block",
            "model.recompute_num_layers": min(
                layout.recompute_layers, max(map(max, layout.stages))
            ),
        }
    elif layout.recompute == "selective":
        values["model.recompute_granularity"] = "selective"
        values["model.recompute_modules"] = f"[{','.join(layout.recompute_modules)}]"
    return [f"{name}={_shown(value)}" for name, value in values.items()]


def bridge_files(plan: Plan) -> dict[str, str]:
    """bridge_overrides.json: a list of overrides for the recipe's command line."""
    return {"bridge_overrides.json": json.dumps(bridge_overrides(plan), indent=1) + "\n"}


def _pipeline(plan: Plan, layout: LayoutDoc) -> dict[str, object]:
    if layout.pp == 1:
        return {}
    if len({count for rank in layout.stages for count in rank}) > 1:
        text = layout_string(layout.stages, plan.inputs.model.mtp_layers)
        return {"model.pipeline_model_parallel_layout": f"'{text}'"}
    return {"model.virtual_pipeline_model_parallel_size": layout.vpp} if layout.vpp > 1 else {}


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
