"""A plan as an accelerate launch with PyTorch FSDP2 (keys read in accelerate 1.15.0)."""

from __future__ import annotations

from typing import Any

import yaml

from meshwright.frameworks.fsdp2 import FSDP2
from meshwright.planner.launch.common_env import nccl_env
from meshwright.planner.launch.legality import require_legal
from meshwright.planner.launch.node_script import Program, node_files
from meshwright.planner.launch.rank_files import RankFiles, rank_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.predicted import LayoutDoc


def accelerate_config(plan: Plan, layout: LayoutDoc, placed: RankFiles) -> dict[str, Any]:
    """The document of accelerate.yaml; the node's rank and the master's address come on the command line."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": plan.inputs.precision,
        "num_machines": len(placed.hosts),
        "num_processes": len(placed.places),
        "machine_rank": 0,
        "main_process_port": 29500,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": layout.zero_stage == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": layout.recompute == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_offload_params": False,
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": 1,
            "parallelism_config_dp_shard_size": layout.dp,
            "parallelism_config_tp_size": layout.tp,
            "parallelism_config_cp_size": layout.cp,
            "parallelism_config_sp_size": 1,
        },
    }


def torchrun_env(plan: Plan, layout: LayoutDoc, config: dict[str, Any]) -> dict[str, str]:
    """The variables that `accelerate launch` would set from its YAML, for a start with plain torchrun."""
    env = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "ACCELERATE_MIXED_PRECISION": plan.inputs.precision,
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(layout.num_micro_batches),
    }
    for name, value in config["fsdp_config"].items():
        env[name.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
    for name, value in config["parallelism_config"].items():
        env[name.upper()] = str(value)
    return env


def launch_files(plan: Plan) -> dict[str, str]:
    """Texts by file name. Raises InfeasibleError if accelerate with FSDP2 cannot run the plan."""
    layout = require_legal(plan, FSDP2)
    placed = rank_files(plan, layout, None, None, reorder=False)
    config = accelerate_config(plan, layout, placed)
    env = torchrun_env(plan, layout, config) | nccl_env(plan, layout)
    program = Program(
        framework="a training script that uses accelerate with FSDP2",
        words='"$TRAIN_SCRIPT"',
        usage="Set TRAIN_SCRIPT; plain torchrun starts it, or accelerate with LAUNCHER=accelerate.",
        before=_accelerate_start(placed),
        notes=(
            f"The script's own batch size per process is {layout.micro_batch}, its sequence length "
            f"{plan.inputs.seq_len}.",
        ),
    )
    return {
        "accelerate.yaml": yaml.safe_dump(config, sort_keys=False),
        **node_files(plan, placed, program, [], env),
    }


def _accelerate_start(placed: RankFiles) -> str:
    lines = ': "${TRAIN_SCRIPT:?set it to the training script}"\n'
    if placed.gpus_per_host is None:
        return lines
    return lines + (
        'if [ "${LAUNCHER:-torchrun}" = accelerate ]; then\n'
        '  exec accelerate launch --config_file "$here/accelerate.yaml" --machine_rank "$node_rank" \\\n'
        '    --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" "$TRAIN_SCRIPT" "$@"\n'
        "fi\n"
    )
