"""A plan as an accelerate launch with PyTorch FSDP2 (keys read in accelerate 1.15.0)."""

from __future__ import annotations

from typing import Any

import yaml

from meshwright.frameworks.fsdp2 import FSDP2
from meshwright.model_specs.schema import ModelSpec
from meshwright.model_specs.stated_fields import stated_fields
from meshwright.planner.launch.launch_script import Program
from meshwright.planner.launch.legal_launch import Launch
from meshwright.planner.launch.model_notes import file_notes
from meshwright.planner.launch.writer import Start, Writer

_SCRIPT_NEEDED = ': "${TRAIN_SCRIPT:?set it to the training script}"\n'
_ACCELERATE_START = """\
if [ "${LAUNCHER:-torchrun}" = accelerate ]; then
  exec accelerate launch --config_file "$here/accelerate.yaml" --machine_rank "$node_rank" \\
    --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" "$TRAIN_SCRIPT" "$@"
fi
"""


_HOST_NOTE = (
    "Parameters are on the host: the plan prices the script's Adam or AdamW with fused=True."
)


def accelerate_config(launch: Launch) -> dict[str, Any]:
    """The document of accelerate.yaml; the node's rank and the master's address come on the command line."""
    layout, placed = launch.layout, launch.placed
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": launch.inputs.precision,
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
            "fsdp_offload_params": layout.optimizer_offload > 0,
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": layout.shard_groups,
            "parallelism_config_dp_shard_size": layout.dp // layout.shard_groups,
            "parallelism_config_tp_size": layout.tp,
            "parallelism_config_cp_size": layout.cp,
            "parallelism_config_sp_size": 1,
        },
    }


def torchrun_env(launch: Launch, config: dict[str, Any]) -> dict[str, str]:
    """The variables that `accelerate launch` would set from its YAML, for a start with plain torchrun."""
    env = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "ACCELERATE_MIXED_PRECISION": launch.inputs.precision,
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(launch.layout.num_micro_batches),
    }
    for name, value in (config["fsdp_config"] | config["parallelism_config"]).items():
        env[name.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
    return env


def accelerate_start(launch: Launch) -> Start:
    """The user's own training script, told by accelerate.yaml or by the environment."""
    config = accelerate_config(launch)
    batch, seq_len = launch.layout.micro_batch, launch.inputs.seq_len
    before = _SCRIPT_NEEDED
    if launch.placed.gpus_per_host is not None:
        before += _ACCELERATE_START
    program = Program(
        framework="a training script that uses accelerate with FSDP2",
        command='"$TRAIN_SCRIPT"',
        usage="Set TRAIN_SCRIPT; plain torchrun starts it, or accelerate with LAUNCHER=accelerate.",
        before=before,
        notes=(
            f"The script's own batch size per process is {batch}, its sequence length {seq_len}.",
            _model_note(launch.inputs.model),
            *file_notes(launch.inputs.model),
            *([_HOST_NOTE] if launch.layout.optimizer_offload > 0 else []),
        ),
    )
    return Start(
        program=program,
        args=[],
        env=torchrun_env(launch, config),
        files={"accelerate.yaml": yaml.safe_dump(config, sort_keys=False)},
    )


def _model_note(model: ModelSpec) -> str:
    """What the model has to be, which a training script builds by itself."""
    fields = ", ".join(f"{name} {value}" for name, value in stated_fields(model).items())
    return f"The script builds the model; the plan's has {fields}."


FSDP2_WRITER = Writer(framework=FSDP2, start=accelerate_start)
