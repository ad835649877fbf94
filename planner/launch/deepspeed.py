"""A plan as a DeepSpeed launch: ds_config.json and arguments of Megatron-DeepSpeed's pretrain_gpt.py.

Keys were read in DeepSpeed 0.19.8, arguments in `megatron/arguments.py` of Megatron-DeepSpeed at 4efb479d.
"""

from __future__ import annotations

from typing import Any

from meshwright.errors import InfeasibleError
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK
from meshwright.frameworks.deepspeed import DEEPSPEED
from meshwright.planner.launch.flag_words import flag_words
from meshwright.planner.launch.launch_script import Program
from meshwright.planner.launch.legal_launch import Launch
from meshwright.planner.launch.megatron_model import feed_forward_width
from meshwright.planner.launch.writer import Start, Writer, json_file
from meshwright.planner.runs.run_terms import balanced


def deepspeed_config(launch: Launch, *, autotp: bool = False) -> dict[str, Any]:
    """The document of ds_config.json; `autotp` adds DeepSpeed's own tensor parallelism for HF models.

    With Megatron-DeepSpeed the tensor and pipeline degrees are arguments of the entry script instead.
    """
    layout, inputs = launch.layout, launch.inputs
    zero: dict[str, Any] = {"stage": layout.zero_stage}
    if layout.zero_stage >= 1:
        zero["overlap_comm"] = layout.pp == 1
        zero["contiguous_gradients"] = True
    document: dict[str, Any] = {
        "train_batch_size": inputs.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.num_micro_batches,
        "zero_optimization": zero,
        "bf16": {"enabled": inputs.precision == "bf16"},
        "fp16": {"enabled": inputs.precision == "fp16"},
        "gradient_clipping": 1.0,
    }
    if layout.recompute == "full":
        document["activation_checkpointing"] = {
            "partition_activations": False,
            "number_checkpoints": inputs.model.layers,
        }
    if autotp:
        document["tensor_parallel"] = {"autotp_size": layout.tp}
    return document


def megatron_deepspeed_args(launch: Launch) -> list[str]:
    """Arguments of Megatron-DeepSpeed's pretrain_gpt.py; data, tokenizer and learning rate are left out."""
    layout, inputs, model = launch.layout, launch.inputs, launch.inputs.model
    flags: dict[str, object] = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": feed_forward_width(model),
        "--num-attention-heads": model.heads,
        "--num-key-value-heads": model.kv_heads,
        "--seq-length": inputs.seq_len,
        "--max-position-embeddings": max(inputs.seq_len, model.max_positions or 0),
        "--micro-batch-size": layout.micro_batch,
        "--global-batch-size": inputs.global_batch,
        "--zero-stage": layout.zero_stage,
        "--normalization": "rmsnorm" if model.norm == "rmsnorm" else "layernorm",
        "--hidden-dropout": 0.0,
        "--attention-dropout": 0.0,
        "--optimizer": inputs.optimizer,
    }
    if model.moe is not None:
        flags["--num-experts"] = model.moe.experts
        flags["--moe-expert-parallel-size"] = layout.ep
        flags["--topk"] = model.moe.top_k
        # Its default puts experts into every second layer.
        flags["--expert-interval"] = 1
    return flag_words(
        flags
        | {
            f"--{inputs.precision}": True,
            "--swiglu": model.activation == "swiglu",
            "--disable-bias-linear": not model.mlp_bias,
            "--use-rotary-position-embeddings": model.position == "rope",
            "--untie-embeddings-and-output-weights": not model.tied_embeddings,
            "--no-pipeline-parallel": layout.pp == 1,
            "--deepspeed-activation-checkpointing": layout.recompute == "full",
            "--checkpoint-activations": layout.recompute == "full",
            "--deepspeed": True,
        }
    )


def deepspeed_start(launch: Launch) -> Start:
    """Megatron-DeepSpeed's pretrain_gpt.py, with a second configuration for HF models where one can be."""
    _require_even_stages(launch)
    args = megatron_deepspeed_args(launch)
    program = Program(
        framework=DEEPSPEED.title,
        command='"$DEEPSPEED_ENTRY" --deepspeed_config "$here/ds_config.json"',
        usage="Set DEEPSPEED_ENTRY to its pretrain_gpt.py; add data, tokenizer and learning rate.",
        before=': "${DEEPSPEED_ENTRY:?set it to Megatron-DeepSpeed pretrain_gpt.py}"\n',
    )
    files = {
        "ds_config.json": json_file(deepspeed_config(launch)),
        "megatron_deepspeed_args.json": json_file(args),
    }
    layout = launch.layout
    if layout.tp > 1 and layout.pp == 1 and launch.inputs.model.moe is None:
        files["ds_config_autotp.json"] = json_file(deepspeed_config(launch, autotp=True))
    return Start(program=program, args=args, files=files)


def _require_even_stages(launch: Launch) -> None:
    """DeepSpeed takes no list of stages: it deals layers out evenly, what is left over to the first stages.

    That is `partition_balanced` with partition_method type:transformer (DeepSpeed 0.19.8, runtime/utils.py).
    """
    dealt = list(balanced(launch.inputs.model.layers, launch.layout.pp))
    planned = [sum(rank) for rank in launch.layout.stages]
    if planned != dealt:
        raise InfeasibleError(
            f"{DEEPSPEED.name} cannot start this plan.\ndeepspeed-even-stages: the stages hold "
            f"{planned} layers, DeepSpeed deals out {dealt}. "
            f"Pin a pp that divides the layers, or choose the {DEFAULT_FRAMEWORK} framework."
        )


DEEPSPEED_WRITER = Writer(framework=DEEPSPEED, start=deepspeed_start)
