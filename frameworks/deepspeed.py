"""DeepSpeed with Megatron-DeepSpeed's entry script: keys of ds_config.json, and arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshwright.frameworks.fsdp2 import (
    EIGHT_BIT_ADAPTERS,
    INPUT_OFFLOAD_RULES,
    LIGER_LOSS,
    PEFT_ADAPTERS,
    PRECOMPUTED,
    SAVED_TENSORS,
    TRANSFORMERS_ENCODERS,
    TRL_HEAD,
    TRL_LOSS,
    TRL_STEPS,
    WHOLE_BASE,
)
from meshwright.frameworks.megatron import MEGATRON_ARGUMENTS
from meshwright.frameworks.record import (
    Argument,
    ContextExchange,
    Framework,
    GradientBuckets,
    InputOffload,
    OptimizerOffload,
    OptimizerSetting,
    ReferenceSetting,
    Setting,
    ShardGroups,
    Stack,
    TokenDispatcher,
)

ENGINE = "--deepspeed"
"""A switch of Megatron-DeepSpeed's script; one on the Trainer of transformers takes a file behind it."""
ZERO = "deepspeed/runtime/zero/config.py"
OFFLOAD = "deepspeed/runtime/zero/offload_config.py"
CONFIG = "deepspeed/runtime/config.py"
ARGUMENTS = "Megatron-DeepSpeed 4efb479, megatron/arguments.py"

FLASH = (
    "--use-flash-attn",
    "--use-flash-attn-v1",
    "--use-flash-attn-v2",
    "--use-flash-attn-triton",
)
"""Switches of fused attention, off by default."""


def _of_megatron(*words: str) -> Iterator[Argument]:
    """Arguments that Megatron-LM has too."""
    return (MEGATRON_ARGUMENTS[word] for word in words)


DEEPSPEED_ARGUMENTS = (
    *_of_megatron("tp", "pp", "layers", "hidden", "ffn_hidden", "heads"),
    Argument("kv_heads", "--num-key-value-heads"),
    *_of_megatron("head_dim", "seq_len", "max_positions", "micro_batch", "global_batch"),
    Argument("zero_stage", "--zero-stage"),
    *_of_megatron("norm"),
    Argument("norm_epsilon", "--layernorm-epsilon", "number"),
    *_of_megatron("hidden_dropout", "attention_dropout", "optimizer", "moe.experts"),
    Argument("ep", "--moe-expert-parallel-size"),
    Argument("moe.top_k", "--topk"),
    Argument("expert_interval", "--expert-interval"),
    *_of_megatron("bf16", "fp16", "swiglu", "squared_relu", "bias_gelu_fusion"),
    *_of_megatron("norm_zero_centered"),
    Argument("flash", FLASH[2], "switch", also=FLASH),
    *_of_megatron("mlp_bias"),
    Argument(
        "rotary", "--use-rotary-position-embeddings", "switch", also=("--use-rotary-embeddings",)
    ),
    Argument("rope.base", "--rotary-position-embeddings-theta"),
    *_of_megatron("rope.fraction", "tied_embeddings"),
    Argument("pipelined", "--no-pipeline-parallel", "switch", True),
    Argument("checkpoints", "--deepspeed-activation-checkpointing", "switch"),
    Argument("offloads_inputs", "--checkpoint-in-cpu", "switch"),
    Argument("recomputes_all", "--checkpoint-activations", "switch"),
    # Else it makes an optimizer of the GPU, with which DeepSpeed offloads nothing.
    Argument("cpu_optimizer", "--cpu-optimizer", "switch"),
    Argument("deepspeed_engine", ENGINE, "switch", also=("--deepspeed_config",)),
)
"""Arguments of its pretrain_gpt.py, in the order in which launch files have them."""
_FLAGS = {argument.word: argument.flag for argument in DEEPSPEED_ARGUMENTS}


def pretrain_arguments() -> dict[str, Argument]:
    """Megatron-LM's arguments and these by their words; what both say is read in either's name."""
    rows = {row.word: row for row in DEEPSPEED_ARGUMENTS}
    for word, row in MEGATRON_ARGUMENTS.items():
        here = rows.get(word, row)
        rows[word] = row if here is row else row._replace(also=(*row.also, here.flag))
    return rows


OVERLAP, BUCKET = "overlap_comm", "reduce_bucket_size"
"""Keys of `zero_optimization`."""
OFFLOAD_RULES = ("deepspeed-offload-zero", "deepspeed-offload-whole", "deepspeed-offload-adam")

OPTIMIZER_TYPE = "optimizer.type"
"""Key with the name of an optimizer that DeepSpeed makes itself (deepspeed/runtime/engine.py,
_configure_basic_optimizer)."""
UNTESTED = "zero_allow_untested_optimizer"
"""Key without which ZeRO takes no others than DeepSpeed's own and PyTorch's Adam (runtime/zero/utils.py)."""
TRAINER, TRAINER_FLAG = "transformers/training_args.py", "--optim"
SCRIPT_OPTIMIZERS = ("adam", "sgd")
"""What Megatron-DeepSpeed's script makes (megatron/arguments.py at 4efb479, --optimizer)."""
_SCRIPT = ("deepspeed-script-optimizer",)
"""Rules of the others: a script of one's own makes them."""


def _stepped(flag: str, value: str, source: str, **fields: Any) -> OptimizerSetting:
    """ZeRO hands every optimizer flat pieces (runtime/zero/stage_1_and_2.py, stage3.py)."""
    return OptimizerSetting(flag=flag, value=value, source=source, flat=True, **fields)


def _of_trainer(name: str, installs: str = "") -> OptimizerSetting:
    """One that the Trainer of transformers makes, and hands to DeepSpeed as its client."""
    return _stepped(TRAINER_FLAG, name, TRAINER, rules=_SCRIPT, installs=installs)


def _own(name: str, made: str, *rules: str, **fields: Any) -> OptimizerSetting:
    """One that DeepSpeed makes, by its name in ds_config.json and the file with its class."""
    source = f"{CONFIG} and {made}"
    return _stepped(OPTIMIZER_TYPE, name, source, rules=(*_SCRIPT, *rules), **fields)


_OPTIMIZERS = {
    "adam": _stepped(_FLAGS["optimizer"], "adam", ARGUMENTS, default=True),
    "sgd": _stepped(_FLAGS["optimizer"], "sgd", ARGUMENTS),
    "muon": _own(
        "Muon",
        "deepspeed/runtime/zero/muon/original_muon.py",
        "deepspeed-muon-zero",
        "deepspeed-muon-experts",
        gram=True,
    ),
    "lion": _own("Lion", "deepspeed/ops/lion/fused_lion.py"),
    "adafactor": _of_trainer("adafactor"),
    "adam-8bit": _of_trainer("adamw_8bit", "bitsandbytes"),
    "paged-adam": _of_trainer("paged_adamw_32bit", "bitsandbytes"),
    "paged-adam-8bit": _of_trainer("paged_adamw_8bit", "bitsandbytes"),
}

OWN_OPTIMIZERS = {
    "adam": "adam",
    "adamw": "adam",
    "lion": "lion",
    "muon": "muon",
    "adafactor": "adafactor",
}
"""Optimizers by what `optimizer.type` calls them, in small letters. SGD has no momentum by default."""
TRAINER_OPTIMIZERS = {
    "lion_32bit": "lion",
    "adafactor": "adafactor",
    "adamw_8bit": "adam-8bit",
    "adamw_bnb_8bit": "adam-8bit",
    "adamw_torch_8bit": "adam-8bit",
    "paged_adamw_32bit": "paged-adam",
    "paged_adamw_8bit": "paged-adam-8bit",
    "muon": "muon",
}
"""Optimizers by the names of transformers' Trainer (training_args.py, OptimizerNames), which LLaMA-Factory,
Axolotl and ms-swift keep to; the last one is their own."""

MEGATRON_DEEPSPEED = Stack(name="megatron-deepspeed", written=r"megatron-deepspeed\b", bound=False)
"""Left Megatron-LM before most of the rules of either record."""

DEEPSPEED = Framework(
    name="deepspeed",
    title="Megatron-DeepSpeed",
    package="deepspeed",
    version="0.19.8",
    stacks=(Stack(name="deepspeed", written=r"deepspeed\b"), MEGATRON_DEEPSPEED),
    measured_as=("megatron-deepspeed",),
    axes={
        "tp": Setting(flag=_FLAGS["tp"], source=ARGUMENTS),
        "pp": Setting(flag=_FLAGS["pp"], source=ARGUMENTS),
        "dp": Setting(source="deepspeed/utils/groups.py"),
        "ep": Setting(flag=_FLAGS["ep"], source=ARGUMENTS, rules=("deepspeed-experts",)),
    },
    zero_stages={
        stage: Setting(
            flag="zero_optimization.stage",
            value=str(stage),
            source=ZERO,
            rules=("deepspeed-pipeline-zero",) if stage >= 2 else (),
        )
        for stage in range(4)
    },
    schedules={"1f1b": Setting(source="deepspeed/runtime/pipe/schedule.py")},
    full_recompute=Setting(flag=_FLAGS["recomputes_all"], source=ARGUMENTS),
    precisions={
        "bf16": Setting(flag="bf16.enabled", source=CONFIG),
        "fp16": Setting(flag="fp16.enabled", source=CONFIG),
    },
    optimizers=_OPTIMIZERS,
    dispatchers={"alltoall": TokenDispatcher(source="deepspeed/moe/sharded_moe.py")},
    overlaps={"dp": Setting(flag=f"zero_optimization.{OVERLAP}", source=ZERO)},
    # Without ZeRO its engine reduces 500 M at a time, whatever the configuration says.
    gradient_buckets=GradientBuckets(
        flag=f"zero_optimization.{BUCKET}", source=ZERO, zero_stages=(1, 2), reserved=True
    ),
    context_exchanges={
        "a2a": ContextExchange(
            source="deepspeed/runtime/sequence_parallel/ulysses_sp.py", planned=False
        )
    },
    cuda_graphs={"none": Setting(source=CONFIG)},
    offloads={
        "parameters": Setting(
            flag="zero_optimization.offload_param.device",
            value="cpu",
            source=OFFLOAD,
            rules=("offloaded-parameters-zero",),
        ),
        "layer_inputs": InputOffload(
            flag=_FLAGS["offloads_inputs"],
            source="deepspeed/runtime/activation_checkpointing",
            hides=True,
            layers_at_hand=3.0,
            rules=INPUT_OFFLOAD_RULES,
        ),
        "saved_tensors": SAVED_TENSORS,
    },
    optimizer_offload=OptimizerOffload(
        flag="zero_optimization.offload_optimizer.device",
        value="cpu",
        source=OFFLOAD,
        percents=(100,),
        zero_stages=(1, 2, 3),
        rules=OFFLOAD_RULES,
        installs="a C++ compiler for DeepSpeed's cpu_adam",
    ),
    # Of weights alone; MiCS, which grouped gradients and states too, is gone from this version.
    shard_groups=ShardGroups(
        flag="zero_optimization.zero_hpz_partition_size",
        source=ZERO,
        planned=False,
        zero_stages=(3,),
    ),
    uneven_stages=False,
    attention={"flash": Setting(flag=_FLAGS["flash"], source=ARGUMENTS)},
    rank_orders={"tp-dp-pp": Setting(source="deepspeed/runtime/pipe/topology.py")},
    adapters=PEFT_ADAPTERS
    | EIGHT_BIT_ADAPTERS
    | {
        "qdora": replace(PEFT_ADAPTERS["qdora"], rules=(*PEFT_ADAPTERS["qdora"].rules, WHOLE_BASE)),
    },
    # TRL's chunked loss, up to 1.14, has 32-bit products without autocast, which no rate is known of.
    losses={"liger": LIGER_LOSS, TRL_LOSS: TRL_HEAD},
    step_kinds=TRL_STEPS,
    image_encoders=TRANSFORMERS_ENCODERS,
    references={
        "resident": ReferenceSetting(
            source="trl/models/utils.py", is_sharded=True, shard_bytes=2.0
        ),
        "offloaded": ReferenceSetting(
            flag="--ref.offload",
            source="openrlhf/cli/train_dpo.py",
            rules=("deepspeed-reference",),
            installs="openrlhf",
            kinds=("dpo",),
            is_sharded=True,
            uploads_shards=True,
        ),
        "precomputed": PRECOMPUTED,
    },
    degrees_remedy="ds_config.json has no setting for it: keep cp, etp, vpp and shard_groups at 1 and "
    "sequence parallelism off.",
)
"""Read in DeepSpeed 0.19.8 and Megatron-DeepSpeed at 4efb479."""
