"""PyTorch FSDP2 through accelerate: keys of accelerate.yaml."""

from __future__ import annotations

from dataclasses import replace

from meshwright.frameworks.record import (
    AdapterSetting,
    ContextExchange,
    EncoderSetting,
    Framework,
    InputOffload,
    OptimizerOffload,
    OptimizerSetting,
    ReferenceSetting,
    Setting,
    ShardGroups,
    Stack,
    StepKindSetting,
    TokenDispatcher,
)

# What torchtitan and accelerate have in common: PyTorch's FSDP2.


FSDP_OFFLOAD_RULES = (
    "fsdp-offload-zero",
    "fsdp-offload-shards",
    "fsdp-offload-whole",
    "fsdp-offload-adam",
)
"""Rules of parameters, gradients and optimizer states on the host."""


OPTIMIZER_CLASSES = {
    "sgd": "torch.optim.SGD",
    "muon": "torch.optim.Muon",
    "adam-8bit": "torchao.optim.AdamW8bit",
}
"""What a training script makes by itself where it is not AdamW."""
ADAPTER_FILE = "adapter_config.json"
"""PEFT's own file of an adapter (peft/utils/constants.py, CONFIG_NAME)."""
_BITSANDBYTES = "peft and bitsandbytes"


def _of_peft(source: str, *rules: str, installs: str = "peft") -> AdapterSetting:
    """What PEFT trains beside frozen weights, by its file and under its rules."""
    rules = ("peft-degrees", *rules)
    source = f"{source} and peft/utils/constants.py"
    return AdapterSetting(flag=ADAPTER_FILE, source=source, rules=rules, installs=installs)


WHOLE_BASE = "peft-whole-base"
"""Name of the rule that keeps frozen weights of few bits whole."""
PEFT_ADAPTERS = {
    "lora": _of_peft("peft/tuners/lora/config.py"),
    "qlora": _of_peft("transformers/integrations/bitsandbytes.py", installs=_BITSANDBYTES),
    "dora": _of_peft("peft/tuners/lora/dora.py"),
    "qdora": _of_peft("peft/tuners/lora/bnb.py", installs=_BITSANDBYTES),
}
"""What a training script with PEFT trains, whatever shards it (peft/docs/source/accelerate/)."""
EIGHT_BIT_ADAPTERS = {
    "lora-8bit": _of_peft(
        "transformers/quantizers/quantizer_bnb_8bit.py", WHOLE_BASE, installs=_BITSANDBYTES
    ),
    "dora-8bit": _of_peft("peft/tuners/lora/bnb.py", WHOLE_BASE, installs=_BITSANDBYTES),
}
"""Beside weights of 8 bits, which FSDP does not shard (peft, issue 2833)."""


_TRL = "trl/trainer/dpo_trainer.py"
TRL_LOSS = "fused-head"
ASKED_OF_TRL = {"LLaMA-Factory": "trl<=0.24.0", "Axolotl": "trl==1.14.1", "ms-swift": "trl<1.0"}
"""Versions of TRL that other trainers ask for, all older than the fused head: those take all logits
(LLaMA-Factory 0.9.5, pyproject.toml; Axolotl 0.21.0 and ms-swift 4.6.0, METADATA of their wheels)."""
TRL_STEPS = {
    "sft": StepKindSetting(source="trl/trainer/sft_trainer.py"),
    "dpo": StepKindSetting(source=_TRL, rules=("trl-degrees",), installs="trl", loss=TRL_LOSS),
    "kto": StepKindSetting(
        source="trl/trainer/kto_trainer.py",
        rules=("trl-degrees", "trl-kto-batch"),
        installs="trl",
        loss=TRL_LOSS,
    ),
    "orpo": StepKindSetting(
        source="trl/experimental/orpo/orpo_trainer.py", rules=("trl-degrees",), installs="trl"
    ),
    "reward": StepKindSetting(
        source="trl/trainer/reward_trainer.py", rules=("trl-degrees",), installs="trl"
    ),
}
"""What trainers of TRL 1.16.0 run, whatever shards the model; the training script is the user's. Its trainer
of ORPO takes all logits."""
_IMAGES = {
    "qwen2_vl": "qwen2_vl/modeling_qwen2_vl.py",
    "qwen2_5_vl": "qwen2_5_vl/modeling_qwen2_5_vl.py",
    "qwen3_vl": "qwen3_vl/modeling_qwen3_vl.py",
    "siglip": "gemma3/modeling_gemma3.py",
    "mllama": "mllama/modeling_mllama.py",
}
TRANSFORMERS_ENCODERS = {
    kind: EncoderSetting(
        source=f"transformers/models/{file}",
        rules=("encoder-degrees",),
        recomputed=True,
        freezes="requires_grad_(False) of its vision tower and projector",
    )
    for kind, file in _IMAGES.items()
}
"""Models of transformers, whole on every rank but for its shards; their layers are checkpointed alike."""
LIGER_LOSS = Setting(
    flag="use_liger_kernel",
    value="True",
    source="liger_kernel/ops/fused_linear_cross_entropy.py and transformers/training_args.py",
    rules=("whole-head",),
    installs="liger-kernel",
)
"""Of a Trainer's arguments, whatever shards the model. TRL's trainers take Liger's layers alone
(trl/trainer/sft_trainer.py, SFTTrainer.__init__, switches its loss off)."""
AXOLOTL_LIGER, AXOLOTL_LIGER_LOSS = (
    "axolotl.integrations.liger.LigerPlugin",
    "liger_fused_linear_cross_entropy",
)
"""Axolotl's plugin, and its switch of the loss alone (integrations/liger/args.py)."""
TRL_HEAD = Setting(
    source="trl/trainer/utils.py and trl/kernels/chunked_logprob.py",
    rules=("whole-head",),
    installs="trl>=1.15",
)
"""Of TRL's trainers, without a switch; its products have 16 bits whatever shards the model."""
INPUT_OFFLOAD_RULES = ("offload-recomputed", "offloaded-inputs-degrees", "host-inputs")
"""Rules of inputs of recomputed layers on the host."""
SAVED_TENSORS = InputOffload(
    flag="activation_offloading",
    value="True",
    source="trl/models/activation_offloading.py and trl/trainer/sft_config.py",
    hides=True,
    layers_at_hand=5.0,
    rules=INPUT_OFFLOAD_RULES,
    installs="trl",
)
"""Hooks of TRL's trainers, torchtune and Axolotl: copies on one stream of their own, at most five tensors
waiting for it; in the backward pass those of a layer come while the one behind it computes, for the stream
waits for the one before alone (OffloadActivations, max_fwd_stash_size and unpack_tensor_with_streams)."""
PRECOMPUTES = "precompute_ref_log_probs"
"""The switch of TRL, and of stacks that use its trainers."""
PRECOMPUTED = ReferenceSetting(flag=PRECOMPUTES, value="True", source="trl/trainer/dpo_config.py")


ACCELERATOR = "accelerator_config"
ACCUMULATION = "gradient_accumulation_kwargs"
SYNCS = "sync_each_batch"
"""Field of a Trainer's arguments with a file or a mapping, its section, and the switch there."""


MESH = "accelerate/parallelism_config.py"
PLUGIN = "accelerate/utils/dataclasses.py"
LAUNCH = "accelerate/commands/launch.py"


RESHARDS, RECOMPUTES, OFFLOADS = (
    f"fsdp_{name}"
    for name in ("reshard_after_forward", "activation_checkpointing", "offload_params")
)
"""Switches of `fsdp_config`."""
OFFLOADS_INPUTS = f"{RECOMPUTES}_offload"
PRECISION = "mixed_precision"
SIZES = {
    axis: f"parallelism_config_{axis}_size" for axis in ("dp_replicate", "dp_shard", "tp", "cp")
}
"""Keys of `parallelism_config` by the axis of the mesh."""


def _size(name: str, *rules: str) -> Setting:
    return Setting(flag=f"parallelism_config.{SIZES[name]}", source=LAUNCH, rules=rules)


FSDP2 = Framework(
    name="fsdp2",
    title="accelerate with PyTorch FSDP2",
    package="accelerate",
    version="1.15.0",
    stacks=(
        Stack(name="fsdp2", written=r"(pytorch )?fsdp\b(?! 1\b)"),
        Stack(name="fsdp2-2024"),
        # FullyShardedDataParallel round layers that are compiled, or whose kernels are fused by hand.
        Stack(name="fsdp1-fused", written=r"(pytorch )?fsdp 1\b", bound=False),
        Stack(name="llm-foundry", written=r"llm-foundry\b", bound=False),
        # Pipelines and experts beside it, which accelerate has not.
        Stack(name="nemo-automodel", written=r"nemo automodel\b", bound=False),
    ),
    measured_as=("llm-foundry", "torchtitan-eager"),
    axes={
        "tp": _size("tp", "fsdp2-shards", "fsdp2-kv-heads"),
        "cp": _size("cp"),
        "dp": _size("dp_shard"),
    },
    zero_stages={
        2: Setting(flag=f"fsdp_config.{RESHARDS}", value="false", source=LAUNCH),
        3: Setting(flag=f"fsdp_config.{RESHARDS}", value="true", source=LAUNCH),
    },
    schedules={"1f1b": Setting(source=MESH)},
    full_recompute=Setting(flag=f"fsdp_config.{RECOMPUTES}", source=LAUNCH),
    precisions={
        name: Setting(flag=PRECISION, value=name, source=LAUNCH) for name in ("bf16", "fp16", "fp8")
    },
    # Those of bitsandbytes, and both Adafactors, take no DTensor (bitsandbytes 0.50.2, transformers 5.23).
    optimizers={
        "adam": OptimizerSetting(source="torch/optim/adamw.py"),
        "sgd": OptimizerSetting(source="torch/optim/sgd.py"),
        "muon": OptimizerSetting(
            source="torch/optim/_muon.py",
            on_shards=True,
            rules=("fsdp2-muon-tensor", "fsdp2-muon-experts"),
        ),
        "adam-8bit": OptimizerSetting(source="torchao/optim/adam.py", installs="torchao"),
    },
    dispatchers={"alltoall": TokenDispatcher(source=MESH)},
    overlaps={"dp": Setting(source=PLUGIN)},
    context_exchanges={
        "p2p": ContextExchange(source=MESH, gathers=True, rules=("fsdp2-context-mask",))
    },
    cuda_graphs={"none": Setting(source=LAUNCH)},
    offloads={
        # save_on_cpu copies on the stream that computes (torch/autograd/graph.py).
        "layer_inputs": InputOffload(
            flag=f"fsdp_config.{OFFLOADS_INPUTS}",
            value="true",
            source=f"{LAUNCH} and accelerate/utils/fsdp_utils.py",
            rules=INPUT_OFFLOAD_RULES,
        ),
        "saved_tensors": SAVED_TENSORS,
    },
    # Parameters and gradients go with the states.
    optimizer_offload=OptimizerOffload(
        flag=f"fsdp_config.{OFFLOADS}",
        value="true",
        source=LAUNCH,
        percents=(100,),
        zero_stages=(3,),
        measured=False,
        rules=FSDP_OFFLOAD_RULES,
    ),
    shard_groups=ShardGroups(
        flag=f"parallelism_config.{SIZES['dp_replicate']}",
        source=LAUNCH,
        zero_stages=(2, 3),
        rules=("fsdp2-shard-groups", "fsdp2-whole-groups"),
    ),
    compilation=Setting(flag="dynamo_backend", source=LAUNCH, planned=False),
    # A script with a loop of its own hands the switch to GradientAccumulationPlugin.
    batch_sync=Setting(
        flag=f"{ACCELERATOR}.{ACCUMULATION}.{SYNCS}",
        value="true",
        source=f"{PLUGIN} and transformers/trainer.py",
        rules=("sync-each-batch",),
    ),
    # accelerate/accelerator.py, prepare_model: autocast around the forward pass; FSDP2 casts what it gathers.
    autocasts_whole_weights=True,
    # The kernels are those that Megatron calls too (megatron/core/ssm/gated_delta_net).
    linear_attention={
        "gated_delta_net": Setting(
            source="transformers/models/qwen3_5/modeling_qwen3_5.py",
            installs="flash-linear-attention and causal-conv1d",
            rules=("fsdp2-whole-delta-net",),
        ),
        "kda": Setting(
            source="transformers/models/kimi_linear/modeling_kimi_linear.py",
            installs="flash-linear-attention and causal-conv1d",
            rules=("fsdp2-whole-delta-net",),
        ),
        # Products and sums of PyTorch, block by block.
        "lightning": Setting(
            source="transformers/models/minimax/modeling_minimax.py",
            rules=("fsdp2-whole-delta-net",),
        ),
        "short_conv": Setting(
            source="transformers/models/lfm2/modeling_lfm2.py",
            installs="causal-conv1d",
            rules=("fsdp2-whole-delta-net",),
        ),
    },
    hybrid_layers=Setting(
        source="transformers/models/mamba2/modeling_mamba2.py",
        installs="mamba-ssm and causal-conv1d",
        rules=("fsdp2-mamba",),
    ),
    latent_experts=Setting(
        source="transformers/models/nemotron_h/modeling_nemotron_h.py",
        rules=("fsdp2-latent-experts", "fsdp2-latent-layers"),
    ),
    window_heads=Setting(
        source="transformers/models/gemma4/modeling_gemma4.py", rules=("fsdp2-window-heads",)
    ),
    rank_orders={"tp-cp-dp": Setting(source=MESH)},
    adapters=PEFT_ADAPTERS
    | {name: replace(each, planned=False) for name, each in EIGHT_BIT_ADAPTERS.items()},
    losses={
        "liger": LIGER_LOSS,
        "chunked": Setting(
            flag="loss_type",
            value="chunked_nll",
            source="trl/trainer/sft_config.py",
            rules=("whole-head",),
            installs="trl<1.15",
        ),
        TRL_LOSS: TRL_HEAD,
    },
    step_kinds=TRL_STEPS,
    image_encoders=TRANSFORMERS_ENCODERS,
    references={
        "resident": ReferenceSetting(
            source="trl/models/utils.py", is_sharded=True, shard_bytes=4.0, gathers_whole=True
        ),
        "precomputed": PRECOMPUTED,
    },
    degrees_remedy="Keep pp, vpp, ep and etp at 1 and sequence parallelism off; shard with "
    f"{RESHARDS} false (2) or true (3).",
)
"""Read in accelerate 1.15.0."""
