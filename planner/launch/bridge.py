"""A plan as overrides of a Megatron-Bridge recipe: `model.*`, `train.*`, `ddp.*` in Hydra's notation.

Names were read in megatron-bridge 0.6.2.
"""

from __future__ import annotations

from meshwright.errors import InfeasibleError
from meshwright.frameworks.megatron import MEGATRON
from meshwright.planner.launch.legal_launch import Launch, legal_launch
from meshwright.planner.launch.megatron import (
    FSDP_CHECKPOINTS,
    SHARDING_STRATEGIES,
    Flags,
    execution_flags,
    recompute_flags,
)
from meshwright.planner.launch.writer import json_file
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.pipeline_notation import layout_string, pattern_chunks

_SIXTEEN_BIT = {"bf16": "bf16_mixed", "fp16": "fp16_mixed"}
_NARROW: dict[str, dict[str, object]] = {
    "fp8": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
}


def bridge_overrides(plan: Plan) -> list[str]:
    """Overrides for a recipe of the same model. Raises InfeasibleError if Megatron or Bridge would refuse it.

    The architecture is the recipe's own: only what the plan decided is set.
    """
    launch = legal_launch(plan, MEGATRON)
    layout, inputs = launch.layout, launch.inputs
    sharded = layout.zero_stage >= 1
    values: dict[str, object] = {
        "model.tensor_model_parallel_size": layout.tp,
        "model.pipeline_model_parallel_size": layout.pp,
        "model.context_parallel_size": layout.cp,
        "model.sequence_parallel": layout.sequence_parallel,
        **_pipeline(launch),
        "model.seq_length": inputs.seq_len,
        "dataset.seq_length": inputs.seq_len,
        "train.micro_batch_size": layout.micro_batch,
        "train.global_batch_size": inputs.global_batch,
        "ddp.use_distributed_optimizer": sharded,
        "optimizer.use_distributed_optimizer": sharded,
        "ddp.overlap_grad_reduce": launch.execution.dp_overlap,
        "ddp.overlap_param_gather": launch.execution.dp_overlap and sharded,
        "ddp.num_distributed_optimizer_instances": layout.shard_groups,
    }
    if inputs.model.moe is not None:
        values["model.expert_model_parallel_size"] = layout.ep
        values["model.expert_tensor_parallel_size"] = layout.etp
    values |= _sharding_values(launch)
    if layout.optimizer_offload > 0:
        values["optimizer.optimizer_cpu_offload"] = True
        values["optimizer.optimizer_offload_fraction"] = layout.optimizer_offload / 100
        values["optimizer.overlap_cpu_optimizer_d2h_h2d"] = True
        values["optimizer.use_precision_aware_optimizer"] = True
    values |= _overlap_values(launch)
    values |= _numeric_values(launch)
    values |= _of_model(recompute_flags(layout))
    values |= _of_model(execution_flags(launch))
    if launch.execution.cuda_graph == "full":
        values["rerun_state_machine.check_for_nan_in_loss"] = False
        values["ddp.check_for_nan_in_grad"] = False
    return [f"{name}={_shown(value)}" for name, value in values.items()]


def bridge_files(plan: Plan) -> dict[str, str]:
    """bridge_overrides.json: a list of overrides for the recipe's command line."""
    return {"bridge_overrides.json": json_file(bridge_overrides(plan))}


def _sharding_values(launch: Launch) -> dict[str, object]:
    """ZeRO 2 and 3 are Megatron FSDP's (docs/training/megatron-fsdp.md, "Stable Requirements")."""
    if launch.layout.zero_stage < 2:
        return {}
    return {
        "dist.use_megatron_fsdp": True,
        "ddp.use_megatron_fsdp": True,
        "ddp.data_parallel_sharding_strategy": SHARDING_STRATEGIES[launch.layout.zero_stage],
        "checkpoint.ckpt_format": FSDP_CHECKPOINTS,
        "model.gradient_accumulation_fusion": False,
    }


def _overlap_values(launch: Launch) -> dict[str, object]:
    """The overlaps once more, in the section that overrides those of model and ddp where a recipe has it.

    megatron/bridge/training/comm_overlap.py, _apply_cfgs: what it does not name is off for tensor and expert
    parallelism and on for data parallelism, whatever `model` and `ddp` say, and gradients are reduced 128 Mi
    at a time.
    """
    execution, sharded = launch.execution, launch.layout.zero_stage >= 1
    buckets = {}
    if execution.dp_overlap:
        size = launch.bucket_parameters
        buckets = {"ddp.bucket_size": size, "comm_overlap.bucket_size": size}
    return {
        **buckets,
        "comm_overlap.tp_comm_overlap": launch.layout.sequence_parallel and execution.tp_overlap,
        "comm_overlap.overlap_moe_expert_parallel_comm": execution.ep_overlap,
        "comm_overlap.overlap_grad_reduce": execution.dp_overlap,
        "comm_overlap.overlap_param_gather": execution.dp_overlap and sharded,
    }


def _numeric_values(launch: Launch) -> dict[str, object]:
    """Precision, types of gradients, moments and parameters, and the loss.

    Bridge's named precisions fix the types of gradients and parameters. Where the plan has others, the
    fields of the precision are set: the recipe must hold it as a configuration, as performance recipes do.
    """
    execution, precision = launch.execution, launch.inputs.precision
    values: dict[str, object] = {
        "model.cross_entropy_fusion_impl": "te" if execution.te_loss else "native",
    }
    fields: dict[str, object] = dict(_NARROW.get(precision, {}))
    if fields:
        four_bit = precision == "nvfp4"
        fields["fp8_param_gather"] = execution.fp8_params and not four_bit
        fields["fp4_param_gather"] = execution.fp8_params and four_bit
        fields["reuse_grad_buf_for_mxfp8_param_ag"] = execution.fp8_params and precision == "mxfp8"
        fields["fp8_dot_product_attention"] = execution.fp8_attention
        fields["first_last_layers_bf16"] = False
    if precision == "fp8" and execution.fp8_recipe is not None:
        fields["fp8_recipe"] = execution.fp8_recipe
    if fields or execution.gradient_dtype == "bf16":
        fields["grad_reduce_in_fp32"] = execution.gradient_dtype != "bf16"
        values |= {f"mixed_precision.{name}": value for name, value in fields.items()}
    else:
        values["mixed_precision"] = _SIXTEEN_BIT[precision]
    if execution.moment_dtype == "bf16":
        values["optimizer.use_precision_aware_optimizer"] = True
        values["optimizer.exp_avg_dtype"] = "bf16"
        values["optimizer.exp_avg_sq_dtype"] = "bf16"
    return values


def _pipeline(launch: Launch) -> dict[str, object]:
    layout, pattern = launch.layout, launch.inputs.model.hybrid_pattern
    if layout.pp == 1:
        return {}
    if pattern is not None:
        if layout.vpp > 1:
            # megatron/bridge/models/hybrid/hybrid_provider.py, provide, asserts it.
            raise InfeasibleError(
                "Megatron-Bridge runs no virtual stages of hybrid models: launch the plan with --target "
                "megatron, or plan with --forbid interleaving."
            )
        return {"model.hybrid_layer_pattern": f"'{pattern_chunks(pattern, layout.stages)}'"}
    chunk_sizes = {count for rank in layout.stages for count in rank}
    if len(chunk_sizes) > 1:
        split = layout_string(layout.stages, launch.inputs.model.mtp_layers)
        return {"model.pipeline_model_parallel_layout": f"'{split}'"}
    if layout.vpp > 1:
        return {"model.virtual_pipeline_model_parallel_size": layout.vpp}
    return {}


def _of_model(flags: Flags) -> dict[str, object]:
    """Megatron's flags, as fields of the recipe's model."""
    return {f"model.{name[2:].replace('-', '_')}": value for name, value in flags.items()}


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
