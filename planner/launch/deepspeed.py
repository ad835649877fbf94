"""A plan as a DeepSpeed launch: ds_config.json and arguments of Megatron-DeepSpeed's pretrain_gpt.py.

Keys were read in DeepSpeed 0.19.8, arguments in `megatron/arguments.py` of Megatron-DeepSpeed at 4efb479d.
"""

from __future__ import annotations

import json
from typing import Any

from meshwright.errors import InfeasibleError
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK
from meshwright.frameworks.deepspeed import DEEPSPEED
from meshwright.planner.launch.common_env import nccl_env
from meshwright.planner.launch.legality import require_legal
from meshwright.planner.launch.node_script import Program, node_files
from meshwright.planner.launch.rank_files import rank_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.predicted import LayoutDoc


def deepspeed_config(plan: Plan, layout: LayoutDoc, *, autotp: bool = False) -> dict[str, Any]:
    """The document of ds_config.json; `autotp` adds DeepSpeed's own tensor parallelism for HF models.

    With Megatron-DeepSpeed the tensor and pipeline degrees are arguments of the entry script instead.
    """
    zero: dict[str, Any] = {"stage": layout.zero_stage}
    if layout.zero_stage >= 1:
        zero["overlap_comm"] = layout.pp == 1
        zero["contiguous_gradients"] = True
    document: dict[str, Any] = {
        "train_batch_size": plan.inputs.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.num_micro_batches,
        "zero_optimization": zero,
        "bf16": {"enabled": plan.inputs.precision == "bf16"},
        "fp16": {"enabled": plan.inputs.precision == "fp16"},
        "gradient_clipping": 1.0,
    }
    if layout.recompute == "full":
        document["activation_checkpointing"] = {
            "partition_activations": False,
            "number_checkpoints": plan.inputs.model.layers,
        }
    if autotp:
        document["tensor_parallel"] = {"autotp_size": layout.tp}
    return document


def megatron_deepspeed_args(plan: Plan, layout: LayoutDoc) -> list[str]:
    """Arguments of Megatron-DeepSpeed's pretrain_gpt.py; data, tokenizer and learning rate are left out."""
    model, inputs = plan.inputs.model, plan.inputs
    values: dict[str, object] = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.ffn_hidden or (model.moe.moe_ffn_hidden if model.moe else 0),
        "num-attention-heads": model.heads,
        "num-key-value-heads": model.kv_heads,
        "seq-length": inputs.seq_len,
        "max-position-embeddings": max(inputs.seq_len, model.max_positions or 0),
        "micro-batch-size": layout.micro_batch,
        "global-batch-size": inputs.global_batch,
        "zero-stage": layout.zero_stage,
        "normalization": "rmsnorm" if model.norm == "rmsnorm" else "layernorm",
        "hidden-dropout": 0.0,
        "attention-dropout": 0.0,
        "optimizer": inputs.optimizer,
    }
    if model.moe is not None:
        values |= {
            "num-experts": model.moe.experts,
            "moe-expert-parallel-size": layout.ep,
            "topk": model.moe.top_k,
            # Its default puts experts into every second layer.
            "expert-interval": 1,
        }
    switches = {
        inputs.precision: True,
        "swiglu": model.activation == "swiglu",
        "disable-bias-linear": not model.mlp_bias,
        "use-rotary-position-embeddings": model.position == "rope",
        "untie-embeddings-and-output-weights": not model.tied_embeddings,
        "no-pipeline-parallel": layout.pp == 1,
        "deepspeed-activation-checkpointing": layout.recompute == "full",
        "checkpoint-activations": layout.recompute == "full",
    }
    args = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    args += [f"--{name}" for name, on in switches.items() if on]
    return [*args, "--deepspeed"]


def launch_files(plan: Plan) -> dict[str, str]:
    """Texts by file name. Raises InfeasibleError if DeepSpeed would refuse the plan, now or later."""
    layout = require_legal(plan, DEEPSPEED)
    _require_even_stages(plan, layout)
    placed = rank_files(plan, layout, None, None, reorder=False)
    args = megatron_deepspeed_args(plan, layout)
    program = Program(
        framework=DEEPSPEED.title,
        words='"$DEEPSPEED_ENTRY" --deepspeed_config "$here/ds_config.json"',
        usage="Set DEEPSPEED_ENTRY to its pretrain_gpt.py; add data, tokenizer and learning rate.",
        before=': "${DEEPSPEED_ENTRY:?set it to Megatron-DeepSpeed pretrain_gpt.py}"\n',
    )
    files = {
        "ds_config.json": _text(deepspeed_config(plan, layout)),
        "megatron_deepspeed_args.json": json.dumps(args, indent=1) + "\n",
        **node_files(plan, placed, program, args, nccl_env(plan, layout)),
    }
    if layout.tp > 1 and layout.pp == 1 and plan.inputs.model.moe is None:
        files["ds_config_autotp.json"] = _text(deepspeed_config(plan, layout, autotp=True))
    return files


def _require_even_stages(plan: Plan, layout: LayoutDoc) -> None:
    """DeepSpeed takes no list of stages: it deals layers out evenly, what is left over to the first stages.

    That is `partition_balanced` with partition_method type:transformer (DeepSpeed 0.19.8, runtime/utils.py).
    """
    each, left = divmod(plan.inputs.model.layers, layout.pp)
    dealt = [each + (stage < left) for stage in range(layout.pp)]
    if [sum(rank) for rank in layout.stages] != dealt:
        raise InfeasibleError(
            f"{DEEPSPEED.name} cannot start this plan.\ndeepspeed-even-stages: the stages hold "
            f"{[sum(rank) for rank in layout.stages]} layers, DeepSpeed deals out {dealt}. "
            f"Pin a pp that divides the layers, or choose the {DEFAULT_FRAMEWORK} framework."
        )


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"
