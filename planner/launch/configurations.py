"""A plan as configurations: of DeepSpeed, of accelerate with FSDP2, and of fine-tuning stacks around them.

Of DeepSpeed these are ds_config.json and arguments of Megatron-DeepSpeed's pretrain_gpt.py.

Keys were read in DeepSpeed 0.19.8, arguments in `megatron/arguments.py` of Megatron-DeepSpeed at 4efb479d.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from meshwright.costmodel.execution_names import STEP_KINDS
from meshwright.costmodel.losses import ALL_LOGITS, in_chunks
from meshwright.costmodel.workload import has_wide_heads
from meshwright.errors import InfeasibleError
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK, framework_named
from meshwright.frameworks.deepspeed import (
    BUCKET,
    DEEPSPEED,
    DEEPSPEED_ARGUMENTS,
    ENGINE,
    OPTIMIZER_TYPE,
    OVERLAP,
    SCRIPT_OPTIMIZERS,
    TRAINER_FLAG,
    UNTESTED,
)
from meshwright.frameworks.fsdp2 import (
    ACCELERATOR,
    ACCUMULATION,
    ADAPTER_FILE,
    ASKED_OF_TRL,
    AXOLOTL_LIGER,
    AXOLOTL_LIGER_LOSS,
    FSDP2,
    LIGER_LOSS,
    OFFLOADS,
    OFFLOADS_INPUTS,
    OPTIMIZER_CLASSES,
    PRECISION,
    PRECOMPUTES,
    RECOMPUTES,
    RESHARDS,
    SAVED_TENSORS,
    SIZES,
    SYNCS,
    TRL_HEAD,
    TRL_LOSS,
    TRL_STEPS,
)
from meshwright.frameworks.megatron import MEGATRON
from meshwright.frameworks.record import Framework
from meshwright.model_specs.adapters import EXPERTS, AdapterSpec, peft_modules
from meshwright.model_specs.reader import hub_names, read_model
from meshwright.model_specs.schema import ModelSpec, stated_fields
from meshwright.planner.launch.megatron import megatron_env, megatron_swift_fields
from meshwright.planner.launch.writer import (
    Launch,
    Program,
    Shortfalls,
    Start,
    Writer,
    file_notes,
    flag_words,
    flags_of,
    json_file,
    legal_launch,
    model_fields,
    notes_of,
    said_of_degrees,
)
from meshwright.planner.plan.document import Plan
from meshwright.planner.request.choices import DEGREES
from meshwright.planner.request.plan_request import loss_of_trainer
from meshwright.planner.runs.run_terms import balanced

_OTHERWISE = {"activation", "gelu_form", "position", "attention_bias", "attention_output_bias"}
"""Fields that several arguments say together."""
DEEPSPEED_SAYS = {
    *(argument.word for argument in DEEPSPEED_ARGUMENTS),
    "moe.moe_ffn_hidden",
    *_OTHERWISE,
}
"""Fields of a model that arguments carry, unless `deepspeed_shortfalls` has a sentence on them."""


DRIVES_PATH = "/local_nvme"
"""Where drives are in DeepSpeed's examples; the user's own place stands in for it."""
_OPTIMIZER_PARAMETERS = {"lr": 1e-4, "weight_decay": 0.1}
"""Of an optimizer that DeepSpeed makes, to begin with: they change no price."""


def deepspeed_config(launch: Launch, *, autotp: bool = False) -> dict[str, Any]:
    """The document of ds_config.json; `autotp` adds DeepSpeed's own tensor parallelism for HF models.

    With Megatron-DeepSpeed the tensor and pipeline degrees are arguments of the entry script instead.

    Parameters
    ----------
    launch
        Of any framework's plan that DeepSpeed may start.
    autotp
        Whether DeepSpeed parts the layers of a model of transformers by the plan's tp.
    """
    layout, inputs = launch.layout, launch.inputs
    zero: dict[str, Any] = {"stage": layout.zero_stage}
    if layout.zero_stage >= 1:
        zero[OVERLAP] = launch.execution.dp_overlap and layout.pp == 1
        zero["contiguous_gradients"] = True
    buckets = DEEPSPEED.gradient_buckets
    counts = buckets is not None and layout.zero_stage in buckets.zero_stages
    if counts and launch.execution.bucket_mb is not None:
        zero[BUCKET] = launch.bucket_parameters
        zero["allgather_bucket_size"] = launch.bucket_parameters
    if layout.optimizer_offload > 0:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    place = launch.execution.parameter_offload
    if place != "none":
        zero["offload_param"] = {"device": place, "pin_memory": True}
        if place == "nvme":
            zero["offload_param"]["nvme_path"] = DRIVES_PATH
    document: dict[str, Any] = {
        "train_batch_size": inputs.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.num_micro_batches,
        "zero_optimization": zero,
        "bf16": {"enabled": inputs.precision == "bf16"},
        "fp16": {"enabled": inputs.precision == "fp16"},
        "gradient_clipping": 1.0,
    }
    optimizer = DEEPSPEED.optimizers[inputs.optimizer]
    if optimizer.flag == OPTIMIZER_TYPE:
        document["optimizer"] = {"type": optimizer.value, "params": _OPTIMIZER_PARAMETERS}
    elif optimizer.flag == TRAINER_FLAG:
        document[UNTESTED] = True
    if layout.recompute == "full":
        document["activation_checkpointing"] = {
            "partition_activations": False,
            "number_checkpoints": inputs.model.layers,
        }
        if launch.execution.offload_modules == "layer_inputs":
            document["activation_checkpointing"]["cpu_checkpointing"] = True
    if autotp:
        document["tensor_parallel"] = {"autotp_size": layout.tp}
    return document


def megatron_deepspeed_args(launch: Launch) -> list[str]:
    """Arguments of Megatron-DeepSpeed's pretrain_gpt.py; data, tokenizer and learning rate are left out.

    Parameters
    ----------
    launch
        Whose stages DeepSpeed deals out as the plan does.
    """
    layout, inputs, model = launch.layout, launch.inputs, launch.inputs.model
    rotary, recomputes = model.position == "rope", layout.recompute == "full"
    exact_gelu = model.activation == "gelu" and model.gelu_form == "exact"
    said = model_fields(DEEPSPEED_ARGUMENTS, model) | said_of_degrees(
        layout, experts=model.moe is not None
    )
    said |= {
        "head_dim": model.v_head_dim if model.attention else model.qk_head_dim,
        "seq_len": inputs.seq_len,
        "max_positions": max(inputs.seq_len, model.max_positions or 0),
        "global_batch": inputs.global_batch,
        "zero_stage": layout.zero_stage,
        "norm": "rmsnorm" if model.norm == "rmsnorm" else "layernorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "optimizer": inputs.optimizer,
        inputs.precision: True,
        "swiglu": model.activation == "swiglu",
        "squared_relu": model.activation == "squared_relu",
        "bias_gelu_fusion": not (exact_gelu and model.mlp_bias),
        # Prices assume fused attention.
        "flash": True,
        "rotary": rotary,
        "rope.base": int(model.rope.base) if rotary else None,
        "rope.fraction": model.rope.fraction if rotary else None,
        "pipelined": layout.pp > 1,
        "checkpoints": recomputes,
        "offloads_inputs": launch.execution.offload_modules == "layer_inputs",
        "recomputes_all": recomputes,
        "cpu_optimizer": layout.optimizer_offload > 0,
        "deepspeed_engine": True,
    }
    if model.moe is not None:
        # By default experts are in every second layer.
        said |= {"ffn_hidden": model.moe.moe_ffn_hidden, "expert_interval": 1}
    return flag_words(flags_of(DEEPSPEED_ARGUMENTS, said))


def deepspeed_shortfalls(model: ModelSpec) -> Shortfalls:
    """Where the arguments train another network than the specification, for want of a switch.

    Parameters
    ----------
    model
        The model to be trained.
    """
    differing = {"vocab": f"The vocabulary is the tokenizer's: the plan counts on {model.vocab}."}
    if model.activation in ("relu", "geglu", "xielu"):
        differing["activation"] = f"{model.activation} is not available: GELU stands in."
    if model.position == "alibi":
        differing["position"] = "ALiBi is not available: positions are learned."
    if model.rope.base != int(model.rope.base):
        differing["rope.base"] = f"The rope base is a whole number: {int(model.rope.base)}."
    biases = (model.attention_bias, model.attention_output_bias, model.mlp_bias)
    if len(set(biases)) > 1:
        differing["biases"] = (
            "One switch stands for the biases of all linear layers, which the plan has "
            "into attention {}, out of it {}, in the feed-forward part {}.".format(*biases)
        )
    return differing


def deepspeed_start(launch: Launch) -> Start:
    """Megatron-DeepSpeed's pretrain_gpt.py, with a second configuration for HF models where one can be.

    Adapters are those of PEFT, trainers of preferences those of TRL, supervised fine-tuning without model
    parallelism and other optimizers than Adam and SGD DeepSpeed's or the Trainer's: then a script of one's
    own, which takes the configuration.

    Parameters
    ----------
    launch
        A plan that keeps DeepSpeed's rules. InfeasibleError is raised where its stages are not those that
        DeepSpeed deals out.
    """
    inputs = launch.inputs
    is_whole = all(getattr(launch.layout, axis) == 1 for axis in DEGREES if axis != "dp")
    own_script = (
        inputs.adapters is not None,
        STEP_KINDS[inputs.kind].on_preferences,
        inputs.kind == "sft" and is_whole,
        in_chunks(inputs.loss) is not None,
        inputs.model.encoder is not None,
        launch.execution.offload_modules == "saved_tensors",
        inputs.optimizer not in SCRIPT_OPTIMIZERS,
    )
    if any(own_script):
        return _with_trainer(launch)
    _require_even_stages(launch)
    args = megatron_deepspeed_args(launch)
    program = Program(
        framework=DEEPSPEED.title,
        command='"$DEEPSPEED_ENTRY" --deepspeed_config "$here/ds_config.json"',
        usage="Set DEEPSPEED_ENTRY to its pretrain_gpt.py; add data, tokenizer and learning rate.",
        notes=notes_of(
            launch.inputs.model, DEEPSPEED_SAYS, deepspeed_shortfalls(launch.inputs.model)
        ),
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


def _with_trainer(launch: Launch) -> Start:
    """A training script around the Trainer, such as one of transformers' or TRL's, under DeepSpeed."""
    uses = "PEFT" if launch.inputs.adapters is not None else "the Trainer of transformers"
    if STEP_KINDS[launch.inputs.kind].on_preferences:
        uses = "a trainer of TRL"
    optimizer = DEEPSPEED.optimizers[launch.inputs.optimizer]
    by_trainer = optimizer.flag == TRAINER_FLAG
    argument = f" {optimizer.flag} {optimizer.value}" if by_trainer else ""
    by_script = launch.inputs.optimizer == "sgd"
    program = Program(
        framework=f"a training script that uses {uses} under DeepSpeed",
        command=f'"$TRAIN_SCRIPT" {ENGINE} "$here/ds_config.json"{argument}',
        usage=f"Set TRAIN_SCRIPT; it takes {ENGINE} as the Trainer of transformers does.",
        before=_SCRIPT_NEEDED,
        notes=(
            *_script_notes(launch, DEEPSPEED),
            *([_OPTIMIZER_NOTES["sgd"]] if by_script else []),
        ),
    )
    files = {"ds_config.json": json_file(deepspeed_config(launch))}
    return Start(program=program, args=[], files=files | _adapter_files(launch))


def _script_notes(launch: Launch, started: Framework) -> tuple[str, ...]:
    """What the user's own script has to set by itself; the plan may be of another framework."""
    layout, seq_len = launch.layout, launch.inputs.seq_len
    kind = STEP_KINDS[launch.inputs.kind]
    pairs = (" pair" if layout.micro_batch == 1 else " pairs") if kind.has_pairs else ""
    notes = [
        f"The script's own batch size per process is {layout.micro_batch}{pairs}, "
        f"its sequence length {seq_len}.",
        f"It accumulates gradients over {layout.num_micro_batches} of these; a script on the Trainer of "
        f"transformers takes --per_device_train_batch_size {layout.micro_batch} "
        f"--gradient_accumulation_steps {layout.num_micro_batches}.",
        *_sync_notes(launch),
        *_recompute_notes(launch, started),
        *_attention_notes(launch.inputs.model),
        *_kind_notes(launch, started),
        _model_note(launch.inputs.model),
        *file_notes(launch.inputs.model),
    ]
    adapters = launch.inputs.adapters
    if adapters is not None:
        notes.append(
            f"The script trains adapters alone: LoraConfig of PEFT reads them from {ADAPTER_FILE}."
        )
        if adapters.base_bits == 8:
            notes.append("It loads the model with BitsAndBytesConfig(load_in_8bit=True).")
        elif adapters.base_bits == 4:
            notes.append(
                "It loads the model with BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', "
                "bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage=torch.bfloat16)."
            )
        if launch.inputs.model.state_space is not None and adapters.has("out_proj"):
            notes.append(
                "PEFT refuses out_proj of some models with Mamba (nemotron_h, falcon_h1, mamba): leave it "
                f"out of target_modules in {ADAPTER_FILE} there."
            )
    return tuple(notes)


def _sync_notes(launch: Launch) -> Iterator[str]:
    """How gradients of each micro-batch are reduced, which no setting of a launcher says."""
    if launch.execution.sync_each_batch:
        yield (
            "It reduces the gradients of each of these by itself: whole ones would not fit. Your own loop "
            f"has GradientAccumulationPlugin(num_steps={launch.layout.num_micro_batches}, {SYNCS}=True), and "
            f"launch.sh then goes without --{ACCELERATOR}."
        )


def _recompute_notes(launch: Launch, started: Framework) -> Iterator[str]:
    """Who recomputes layers: where two would, the Trainer refuses to start (transformers/trainer.py)."""
    if launch.layout.recompute == "none":
        yield "It turns gradient checkpointing off, which TRL's trainers have on by themselves."
    elif started.name == FSDP2.name:
        yield (
            f"{RECOMPUTES} recomputes its layers: it turns the Trainer's own gradient checkpointing off, "
            "which TRL's trainers have on by themselves."
        )
    elif launch.execution.offload_modules != "layer_inputs":
        yield "It turns gradient checkpointing on, with use_reentrant=False."


def _attention_notes(model: ModelSpec) -> Iterator[str]:
    """The attention kernel of a model for which there is only one."""
    if has_wide_heads(model):
        yield (
            f"It loads the model with attn_implementation='sdpa': FlashAttention takes no heads of "
            f"{model.qk_head_dim}, and a model has one implementation for all of its layers."
        )


def _kind_notes(launch: Launch, started: Framework) -> Iterator[str]:
    """What the script trains on where that is not text alone, how, and where its reference model is."""
    inputs, record = launch.inputs, started
    kind = STEP_KINDS[inputs.kind]
    loss = in_chunks(inputs.loss)
    if loss is not None:
        setting = record.losses[loss]
        said = f"{setting.flag} {setting.value} of {setting.installs}".strip()
        yield f"Its loss is {loss}: {said}."
        if setting is LIGER_LOSS:
            yield f"It is of the Trainer of transformers: those of {TRL_HEAD.installs} do not use it."
    elif inputs.kind == "sft" or loss_of_trainer(record.name, inputs.kind, inputs.reference):
        yield (
            "Its loss takes all logits, as the Trainer of transformers does by itself; trainers of "
            f"{TRL_HEAD.installs} take none: plan those with --loss fused-head."
        )
    if record.name == DEEPSPEED.name and launch.execution.offload_modules == "layer_inputs":
        yield (
            "Its layers are checkpointed by deepspeed.checkpointing.checkpoint, which ds_config.json tells "
            "to keep inputs on the host; torch's own does not ask it."
        )
    if launch.execution.offload_modules == "saved_tensors":
        hooks = record.offloads["saved_tensors"]
        yield f"Its trainer moves saved tensors to the host: {hooks.flag} {hooks.value}, as TRL's have it."
    vision = inputs.model.encoder
    if vision is not None and vision.use is not None:
        yield (
            f"Its model reads images (AutoModelForImageTextToText), {vision.use.tokens} tokens of each "
            f"sequence in {vision.use.images} of them."
        )
        if not vision.use.trained:
            yield f"It freezes the image encoder: {record.image_encoders[vision.kind].freezes}."
    if not kind.on_preferences:
        return
    yield f"The script's trainer is of {kind.title}, such as that of TRL."
    if not kind.has_vocabulary_head:
        yield "Its model has one output, a score, in place of a head over the vocabulary."
    if inputs.reference is None:
        return
    setting = record.references[inputs.reference]
    said = f": {setting.flag} {setting.value}".rstrip() if setting.flag else ""
    said += f" of {setting.installs}" if setting.installs else ""
    yield f"Its reference model is {inputs.reference}{said}."


def _adapter_files(launch: Launch) -> dict[str, str]:
    """PEFT's own file of an adapter, where adapters are trained."""
    adapters = launch.inputs.adapters
    if adapters is None:
        return {}
    if EXPERTS in adapters.targets:
        raise InfeasibleError(
            "PEFT's adapters of experts depend on how transformers keeps them, which the plan does not know: "
            "leave experts out of --lora-targets, or choose the megatron framework."
        )
    kind: dict[str, object] = {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
    return {ADAPTER_FILE: json_file(kind | _peft_fields(adapters, "r", "target_modules"))}


def _peft_fields(adapters: AdapterSpec, rank: str, modules: str) -> dict[str, object]:
    """Arguments of PEFT's LoraConfig, of which programs call two by names of their own."""
    fields: dict[str, object] = {
        rank: adapters.rank,
        "lora_alpha": 2 * adapters.rank,
        "lora_dropout": 0.0,
        modules: peft_modules(adapters),
    }
    return fields | ({"use_dora": True} if adapters.decomposed else {})


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


# A plan as an accelerate launch with PyTorch FSDP2 (keys read in accelerate 1.15.0).


_ACCELERATE_FILE, _PORT = "accelerate.yaml", 29500
_SCRIPT_NEEDED = ': "${TRAIN_SCRIPT:?set it to the training script}"\n'
_ACCELERATE_START = """\
if [ "${{LAUNCHER:-torchrun}}" = accelerate ]; then
  exec accelerate launch --config_file "$here/accelerate.yaml" --machine_rank "$node_rank" \\
    --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" {command} "$@"
fi
"""
_ACCELERATOR_FILE = f"{ACCELERATOR}.json"
_SYNCED = {ACCUMULATION: {SYNCS: True}}
"""Of a Trainer's arguments: gradients of each micro-batch are reduced."""


_OPTIMIZER_WORDS = {
    "sgd": " with a momentum.",
    "muon": " of the matrices of layers, torch.optim.AdamW of token table, head and norms.",
    "adam-8bit": ": the one of bitsandbytes takes no DTensor.",
}
_OPTIMIZER_NOTES = {
    name: f"The script makes {OPTIMIZER_CLASSES[name]}{words}"
    for name, words in _OPTIMIZER_WORDS.items()
}
"""Optimizers that a training script with FSDP2 makes, where it is not AdamW; they are read back from it."""
_HOST_NOTE = (
    "Parameters are on the host: the plan prices the script's Adam or AdamW with fused=True."
)


def accelerate_config(launch: Launch) -> dict[str, Any]:
    """The document of accelerate.yaml; the node's rank and the master's address come on the command line.

    Parameters
    ----------
    launch
        A plan that keeps the rules of FSDP2.
    """
    layout = launch.layout
    inputs = {}
    if launch.execution.offload_modules == "layer_inputs":
        inputs[OFFLOADS_INPUTS] = True
    return {
        **_started(launch, "FSDP", **{PRECISION: launch.inputs.precision}),
        "fsdp_config": {
            "fsdp_version": 2,
            RESHARDS: layout.zero_stage == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            RECOMPUTES: layout.recompute == "full",
            **inputs,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            OFFLOADS: layout.optimizer_offload > 0,
        },
        "parallelism_config": {
            SIZES["dp_replicate"]: layout.shard_groups,
            SIZES["dp_shard"]: layout.dp // layout.shard_groups,
            SIZES["tp"]: layout.tp,
            SIZES["cp"]: layout.cp,
            "parallelism_config_sp_size": 1,
        },
    }


def _started(launch: Launch, distribution: str, **settings: Any) -> dict[str, Any]:
    """How many processes accelerate starts, under which of its kinds of distribution and which settings."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": distribution,
        **settings,
        "num_machines": len(launch.placed.hosts),
        "num_processes": len(launch.placed.places),
        "machine_rank": 0,
        "main_process_port": _PORT,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }


def torchrun_env(launch: Launch, config: dict[str, Any]) -> dict[str, str]:
    """The variables that `accelerate launch` would set from its YAML, for a start with plain torchrun.

    Parameters
    ----------
    launch
        For the precision, and the micro-batches that gradients are added over.
    config
        Of `accelerate_config`, whose settings become variables.
    """
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
    """The user's own training script, told by accelerate.yaml or by the environment.

    Parameters
    ----------
    launch
        A plan that keeps the rules of FSDP2.
    """
    config = accelerate_config(launch)
    before, command, files = _SCRIPT_NEEDED, '"$TRAIN_SCRIPT"', _adapter_files(launch)
    usage = "Set TRAIN_SCRIPT; plain torchrun starts it, or accelerate with LAUNCHER=accelerate."
    if launch.execution.sync_each_batch:
        command += f' --{ACCELERATOR} "$here/{_ACCELERATOR_FILE}"'
        usage += f" It takes --{ACCELERATOR} as the Trainer of transformers does."
        files |= {_ACCELERATOR_FILE: json_file(_SYNCED)}
    if launch.placed.gpus_per_host is not None:
        before += _ACCELERATE_START.format(command=command)
    program = Program(
        framework="a training script that uses accelerate with FSDP2",
        command=command,
        usage=usage,
        before=before,
        notes=(
            *_script_notes(launch, FSDP2),
            *filter(None, [_OPTIMIZER_NOTES.get(launch.inputs.optimizer)]),
            *([_HOST_NOTE] if launch.layout.optimizer_offload > 0 else []),
        ),
    )
    return Start(
        program=program,
        args=[],
        env=torchrun_env(launch, config),
        files={_ACCELERATE_FILE: yaml.safe_dump(config, sort_keys=False)} | files,
    )


def _model_note(model: ModelSpec) -> str:
    """What the model has to be, which a training script builds by itself."""
    fields = ", ".join(f"{name} {value}" for name, value in stated_fields(model).items())
    return f"The script builds the model; the plan's has {fields}."


FSDP2_WRITER = Writer(framework=FSDP2, start=accelerate_start)


# Configurations of fine-tuning stacks beside DeepSpeed's file, or FSDP's settings.


_LLAMA_FACTORY, _AXOLOTL = "llama_factory.yaml", "axolotl.yaml"
_CONFIG_FILE = "deepspeed"
"""Field of both that names the file of DeepSpeed."""
_ANY_CHECKPOINT = (
    "# {} names one checkpoint with the plan's layers and widths: put the one that you train.\n"
)
_START = {
    _LLAMA_FACTORY: "# Start it on each node with llamafactory-cli train (FORCE_TORCHRUN=1), under FSDP2\n"
    "# with accelerate launch --config_file accelerate.yaml src/train.py.\n"
    "# Add dataset, template and learning_rate.\n" + _ANY_CHECKPOINT.format("model_name_or_path"),
    _AXOLOTL: "# Start it on each node with axolotl train; add datasets and learning_rate.\n"
    + _ANY_CHECKPOINT.format("base_model"),
}
_STAGES = {
    "pretrain": "pt",
    "sft": "sft",
    "dpo": "dpo",
    "kto": "kto",
    "orpo": "dpo",
    "reward": "rm",
}
_RL = ("pretrain", "sft", "dpo", "kto", "orpo")
"""Kinds of a step that Axolotl's `rl` says, or its absence."""
_BY_ITSELF = {"muon": "muon", "adam-8bit": "adamw_torch_8bit"}
"""Optimizers that a script with FSDP2 makes, by the Trainer's names and the stacks'."""
_RECOMPUTED = ("none", "full")
_LIGER = "liger"
_OF_LIGER = re.compile(
    r"meta-llama/(?!Llama-4)|(deepseek-ai/DeepSeek-R1-Distill|nvidia)/?-?Llama-|mistralai/Mi[sx]tral-"
    r"|Qwen/(Qwen2\.5-|QwQ|Qwen3-)(?!VL)|openai/gpt-oss|google/gemma-[23]-|allenai/OLMo-2|microsoft/[pP]hi-"
    r"|HuggingFaceTB/SmolLM2"
)
"""Checkpoints of the catalog whose loss Liger-Kernel 0.8.5 takes over, and LLaMA-Factory asks it to; of
others all logits would be held without a word (liger_kernel/transformers/monkey_patch.py)."""
_LIGERS_LAYERS = "# Liger's norms, rotations and gates run too: the plan prices its loss alone.\n"
_WEIGHTS = {"bf16": "bfloat16", "fp16": "float16"}
"""Precisions that the stacks train in, and torch's names of their weights."""
DEEPSPEED_FILE = "ds_config.json"


def llamafactory_files(plan: Plan) -> dict[str, str]:
    """llama_factory.yaml, and the file that shards: DeepSpeed's or accelerate's.

    Names are those of LLaMA-Factory ff6d4d12e (src/llamafactory/hparams). Raises InfeasibleError for what it
    does not have.

    Parameters
    ----------
    plan
        Of DeepSpeed or FSDP2, with a layout.
    """
    launch, files = _of_stack(plan, "LLaMA-Factory", degrees=(), losses=(_LIGER,))
    inputs, layout = launch.inputs, launch.layout
    if inputs.reference not in (None, "resident"):
        raise _not_there(
            "LLaMA-Factory", f"keeps its reference resident, the plan's is {inputs.reference}"
        )
    fields: dict[str, object] = {
        "model_name_or_path": _checkpoint(inputs.model),
        "stage": _STAGES[inputs.kind],
        "do_train": True,
        "finetuning_type": "full",
        "cutoff_len": inputs.seq_len,
        "per_device_train_batch_size": layout.micro_batch,
        "gradient_accumulation_steps": layout.num_micro_batches,
        inputs.precision: True,
        "disable_gradient_checkpointing": layout.recompute == "none",
        "flash_attn": _ATTENTION_WORDS[_attention(launch)],
        "output_dir": "saves",
    }
    _no_offload("LLaMA-Factory", launch, "layer_inputs", "saved_tensors")
    vision = inputs.model.encoder
    if vision is not None and vision.use is not None:
        frozen = not vision.use.trained
        fields |= {"freeze_vision_tower": frozen, "freeze_multi_modal_projector": frozen}
    if inputs.kind == "orpo":
        fields["pref_loss"] = "orpo"
    if not STEP_KINDS[inputs.kind].on_preferences:
        fields["packing"] = True
    if DEEPSPEED_FILE in files:
        fields |= {_CONFIG_FILE: DEEPSPEED_FILE}
    fields |= _syncs(launch)
    optimizer = _trainers_optimizer(launch)
    if optimizer is not None:
        fields |= {"use_muon": True} if optimizer == "muon" else {"optim": optimizer}
    if inputs.adapters is not None:
        fields |= _llamafactory_adapters(inputs.adapters)
    start = _START[_LLAMA_FACTORY]
    if in_chunks(inputs.loss) == _LIGER:
        # Its other kernels have no switch (src/llamafactory/model/model_utils/liger_kernel.py).
        fields["enable_liger_kernel"] = True
        start += _LIGERS_LAYERS
    return files | {_LLAMA_FACTORY: start + yaml.safe_dump(fields, sort_keys=False)}


def _llamafactory_adapters(adapters: AdapterSpec) -> dict[str, object]:
    modules = peft_modules(adapters)
    fields: dict[str, object] = {
        "finetuning_type": "lora",
        "lora_rank": adapters.rank,
        "lora_target": "all" if isinstance(modules, str) else ",".join(modules),
    }
    if adapters.base_bits < 16:
        fields |= {"quantization_bit": adapters.base_bits, "quantization_method": "bnb"}
    return fields | ({"use_dora": True} if adapters.decomposed else {})


def axolotl_files(plan: Plan) -> dict[str, str]:
    """axolotl.yaml, and DeepSpeed's file where the plan has one.

    Names are those of Axolotl 0.21.0 (axolotl/utils/schemas). Raises InfeasibleError for what it does
    not have.

    Parameters
    ----------
    plan
        Of DeepSpeed or FSDP2, with a layout.
    """
    launch, files = _of_stack(plan, "Axolotl", degrees=("tp", "cp"), losses=(_LIGER,))
    inputs, layout = launch.inputs, launch.layout
    if inputs.model.encoder is not None:
        raise _not_there("Axolotl", "is not written for images")
    if inputs.kind not in _RL:
        raise _not_there("Axolotl", f"is not written for {inputs.kind}")
    if inputs.reference not in (None, "resident", "precomputed"):
        raise _not_there("Axolotl", f"has no reference that is {inputs.reference}")
    scores = STEP_KINDS[inputs.kind].on_preferences
    fields: dict[str, object] = {
        "base_model": _checkpoint(inputs.model),
        "sequence_len": inputs.seq_len,
        "sample_packing": not scores,
        "pad_to_sequence_len": not scores,
        "micro_batch_size": layout.micro_batch,
        "gradient_accumulation_steps": layout.num_micro_batches,
        "gradient_checkpointing": layout.recompute == "full",
        "optimizer": _trainers_optimizer(launch) or "adamw_torch_fused",
        inputs.precision: True,
        "attn_implementation": _attention(launch),
        "output_dir": "outputs",
    }
    fields |= _syncs(launch)
    _no_offload("Axolotl", launch, "layer_inputs")
    if launch.execution.offload_modules == "saved_tensors":
        fields[SAVED_TENSORS.flag] = True
    if scores:
        fields["rl"] = inputs.kind
    if inputs.reference == "precomputed":
        fields[PRECOMPUTES] = True
    if DEEPSPEED_FILE in files:
        fields |= {_CONFIG_FILE: DEEPSPEED_FILE}
    else:
        files = {}
        fields |= {
            "fsdp_version": 2,
            "fsdp_config": {
                "reshard_after_forward": layout.zero_stage == 3,
                "offload_params": layout.optimizer_offload > 0,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "state_dict_type": "SHARDED_STATE_DICT",
            },
            "dp_replicate_size": layout.shard_groups,
            "dp_shard_size": layout.dp // layout.shard_groups,
            "tensor_parallel_size": layout.tp,
            "context_parallel_size": layout.cp,
        }
    if in_chunks(inputs.loss) == _LIGER:
        fields |= {"plugins": [AXOLOTL_LIGER], AXOLOTL_LIGER_LOSS: True}
    if inputs.adapters is not None:
        fields |= _axolotl_adapters(inputs.adapters)
    return files | {_AXOLOTL: _START[_AXOLOTL] + yaml.safe_dump(fields, sort_keys=False)}


def _axolotl_adapters(adapters: AdapterSpec) -> dict[str, object]:
    modules, bits = peft_modules(adapters), adapters.base_bits
    fields: dict[str, object] = {
        "adapter": "qlora" if bits == 4 else "lora",
        "load_in_4bit": bits == 4,
        "lora_r": adapters.rank,
        "lora_alpha": 2 * adapters.rank,
    }
    if bits == 8:
        fields["load_in_8bit"] = True
    if adapters.decomposed:
        fields["peft_use_dora"] = True
    if isinstance(modules, str):
        fields["lora_target_linear"] = True
    else:
        fields["lora_target_modules"] = modules
    # The plan prices PEFT's own products.
    return fields | dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)


def _syncs(launch: Launch) -> dict[str, object]:
    """What stacks on the Trainer hand it, where gradients of each micro-batch are reduced."""
    return {ACCELERATOR: _SYNCED} if launch.execution.sync_each_batch else {}


_TRL_COMMANDS = {"pretrain": "sft", "sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "reward"}
_SWIFT_COMMANDS = {"pretrain": "pt", "sft": "sft", "dpo": "rlhf", "kto": "rlhf", "orpo": "rlhf"}
_FSDP_FILE = "fsdp.json"
_TRL_SCRIPT = """\
#!/bin/bash
# Start it on each node, with NODE_RANK and MASTER_ADDR where there are several; add dataset_name and
# learning_rate to trl.yaml.
{checkpoint}set -euo pipefail
cd "$(dirname "$0")"
exec trl {command} --config trl.yaml --accelerate_config accelerate.yaml {nodes} {master} "$@"
"""
_SWIFT_SCRIPT = """\
#!/bin/bash
# Start it on each node, with NODE_RANK and MASTER_ADDR where there are several; add dataset and
# {rate} to swift.yaml.
{checkpoint}set -euo pipefail
cd "$(dirname "$0")"
export NPROC_PER_NODE={processes} NNODES={hosts} NODE_RANK="${{NODE_RANK:-0}}"
export MASTER_ADDR="${{MASTER_ADDR:-localhost}}" MASTER_PORT="${{MASTER_PORT:-{port}}}"
{exported}exec {program} {command} swift.yaml "$@"
"""


_TRL_NODES = '--num_machines {hosts} --num_processes {processes} --machine_rank "${{NODE_RANK:-0}}"'
_TRL_MASTER = (
    '--main_process_ip "${{MASTER_ADDR:-localhost}}" --main_process_port "${{MASTER_PORT:-{port}}}"'
)


def trl_files(plan: Plan) -> dict[str, str]:
    """trl.sh with trl.yaml, accelerate.yaml, and DeepSpeed's file where the plan has one.

    Names are those of TRL 1.16.0 (trl/trainer/sft_config.py, base_config.py, model_config.py), how it starts
    is trl/cli/accelerate_launcher.py. Raises InfeasibleError for what it does not have.

    Parameters
    ----------
    plan
        Of DeepSpeed or FSDP2, with a layout.
    """
    launch, files = _of_stack(plan, "TRL", degrees=(), losses=(TRL_LOSS, _LIGER))
    inputs, layout = launch.inputs, launch.layout
    command = _command("TRL", _TRL_COMMANDS, launch)
    if inputs.reference not in (None, "resident", "precomputed"):
        raise _not_there("TRL", f"has no reference that is {inputs.reference}")
    loss = TRL_LOSS if command == "sft" else TRL_STEPS[command].loss
    if in_chunks(inputs.loss) != (loss or None):
        alone = loss or ALL_LOGITS
        liger = ", and Liger's layers without its loss" if inputs.loss == _LIGER else ""
        what = f"takes the {alone} loss alone there{liger}: plan with --loss {alone}"
        raise _not_there("TRL", what)
    _no_offload("TRL", launch, "layer_inputs")
    fields: dict[str, object] = {
        "model_name_or_path": _checkpoint(inputs.model),
        "dtype": _WEIGHTS[inputs.precision],
        "max_length": inputs.seq_len,
        **_of_trainer(launch),
        "gradient_checkpointing": layout.recompute == "full",
        "attn_implementation": _attention(launch),
        "output_dir": "output",
    }
    if command == "sft":
        fields["packing"] = True
    if launch.execution.offload_modules == "saved_tensors":
        fields[SAVED_TENSORS.flag] = True
    if inputs.reference == "precomputed":
        fields[PRECOMPUTES] = True
    if inputs.adapters is not None:
        fields |= _trl_adapters(inputs.adapters)
    if DEEPSPEED_FILE in files:
        by_file = {
            "deepspeed_config_file": DEEPSPEED_FILE,
            "zero3_init_flag": layout.zero_stage == 3,
        }
        config = _started(launch, "DEEPSPEED") | {
            "deepspeed_config": by_file | {"deepspeed_multinode_launcher": "standard"}
        }
        files |= {_ACCELERATE_FILE: yaml.safe_dump(config, sort_keys=False)}
    hosts, each = _nodes("TRL", launch)
    script = _TRL_SCRIPT.format(
        checkpoint=_ANY_CHECKPOINT.format("model_name_or_path"),
        command=command,
        nodes=_TRL_NODES.format(hosts=hosts, processes=hosts * each),
        master=_TRL_MASTER.format(port=_PORT),
    )
    return files | {
        "trl.yaml": yaml.safe_dump(fields, sort_keys=False),
        "trl.sh": script,
    }


def _trl_adapters(adapters: AdapterSpec) -> dict[str, object]:
    fields = {"use_peft": True} | _peft_fields(adapters, "lora_r", "lora_target_modules")
    if adapters.base_bits == 8:
        fields["load_in_8bit"] = True
    elif adapters.base_bits == 4:
        # Shards of FSDP have the type that 4-bit weights are stored in.
        storage = {"bnb_4bit_quant_storage": "bfloat16"}
        fields |= {"load_in_4bit": True, "use_bnb_nested_quant": True, **storage}
    return fields


def swift_files(plan: Plan) -> dict[str, str]:
    """swift.sh with swift.yaml, and the file that shards: DeepSpeed's, or ms-swift's of FSDP2.

    Names are those of ms-swift 4.6.0 (swift/arguments, swift/config/fsdp2.json), how it starts is
    swift/cli/main.py. Raises InfeasibleError for what it does not have.

    Parameters
    ----------
    plan
        Of DeepSpeed, FSDP2 or Megatron-LM, with a layout.
    """
    if plan.inputs.framework == MEGATRON.name:
        return _megatron_swift_files(plan)
    launch, files = _of_stack(plan, "ms-swift", degrees=(), losses=(_LIGER,))
    inputs, layout = launch.inputs, launch.layout
    command = _command("ms-swift", _SWIFT_COMMANDS, launch)
    if inputs.reference not in (None, "resident"):
        what = f"keeps its reference resident, the plan's is {inputs.reference}"
        raise _not_there("ms-swift", what)
    if layout.shard_groups > 1:
        raise _not_there("ms-swift", "has no shard_groups: pin shard_groups=1")
    _no_offload("ms-swift", launch, "layer_inputs", "saved_tensors")
    attention, recomputes = _attention(launch), layout.recompute == "full"
    by_fsdp = DEEPSPEED_FILE not in files
    fields: dict[str, object] = {
        "model": _checkpoint(inputs.model),
        "use_hf": True,
        "tuner_type": "full",
        "torch_dtype": _WEIGHTS[inputs.precision],
        "max_length": inputs.seq_len,
        **_of_trainer(launch),
        # FSDP's own checkpoints stand in for the Trainer's.
        "gradient_checkpointing": recomputes and not by_fsdp,
        "attn_impl": attention,
        "output_dir": "output",
    }
    if command == "rlhf":
        fields["rlhf_type"] = inputs.kind
    else:
        # ms-swift packs under FlashAttention alone (swift/arguments/sft_args.py, _check_padding_free).
        fields["packing"] = attention != "sdpa"
    if by_fsdp:
        fields["fsdp"] = _FSDP_FILE
        sharding = {
            "fsdp_version": 2,
            "reshard_after_forward": layout.zero_stage == 3,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_ram_efficient_loading": True,
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": recomputes,
        }
        offload = " offload" if layout.optimizer_offload > 0 else ""
        document = {"fsdp": f"full_shard auto_wrap{offload}", "fsdp_config": sharding}
        files = {_FSDP_FILE: json_file(document)}
    else:
        fields[_CONFIG_FILE] = DEEPSPEED_FILE
    if in_chunks(inputs.loss) == _LIGER:
        # Its parser takes no liger_kernel_config, which would choose among the kernels.
        fields[LIGER_LOSS.flag] = True
    if inputs.adapters is not None:
        fields |= _swift_adapters(inputs.adapters)
    return files | _swift_start(launch, "swift", command, fields)


_NOT_OF_MEGATRON = re.compile(
    r"(ByteDance-Seed|bigscience|ibm-granite|microsoft|mistralai|openai-community|skt|stepfun-ai|tiiuae)/"
    r"|HuggingFaceTB/SmolLM3|XiaomiMiMo/MiMo-V2|allenai/(?i:olmo)-|google/gemma-[23]-"
)
"""Checkpoints that the library under ms-swift's `megatron` commands does not build (mcore-bridge 1.6.5,
mcore_bridge/model/gpts/llm.py and its neighbours)."""


def _megatron_swift_files(plan: Plan) -> dict[str, str]:
    """swift.sh with swift.yaml for `megatron sft`, `pt` or `rlhf`."""
    launch = legal_launch(plan, MEGATRON, own_steps=True)
    inputs = launch.inputs
    checkpoint = _checkpoint(inputs.model)
    if _NOT_OF_MEGATRON.match(checkpoint):
        what = f"builds no {checkpoint} of Megatron-Core: launch the plan with --target megatron"
        raise _not_there("ms-swift", what)
    command = _command("ms-swift", _SWIFT_COMMANDS, launch)
    fields: dict[str, object] = {
        "model": checkpoint,
        "use_hf": True,
        "tuner_type": "full",
        "max_length": inputs.seq_len,
        **megatron_swift_fields(launch),
        "output_dir": "output",
    }
    if command == "rlhf":
        fields["rlhf_type"] = inputs.kind
    else:
        fields["packing"] = True
    if inputs.adapters is not None:
        fields |= _swift_adapters(inputs.adapters)
    return _swift_start(launch, "megatron", command, fields, megatron_env(launch))


def _swift_start(
    launch: Launch,
    program: str,
    command: str,
    fields: Mapping[str, object],
    variables: Mapping[str, str] | None = None,
) -> dict[str, str]:
    hosts, each = _nodes("ms-swift", launch)
    exported = "".join(f"export {name}={value}\n" for name, value in (variables or {}).items())
    by_liger = _LIGERS_LAYERS if LIGER_LOSS.flag in fields else ""
    script = _SWIFT_SCRIPT.format(
        checkpoint=_ANY_CHECKPOINT.format("model") + by_liger,
        program=program,
        command=command,
        hosts=hosts,
        processes=each,
        port=_PORT,
        rate="learning_rate" if variables is None else "lr",
        exported=exported,
    )
    return {
        "swift.yaml": yaml.safe_dump(dict(fields), sort_keys=False),
        "swift.sh": script,
    }


def _swift_adapters(adapters: AdapterSpec) -> dict[str, object]:
    fields = {"tuner_type": "lora"} | _peft_fields(adapters, "lora_rank", "target_modules")
    if adapters.base_bits < 16:
        fields |= {"quant_method": "bnb", "quant_bits": adapters.base_bits}
    if adapters.base_bits == 4:
        fields["bnb_4bit_quant_storage"] = "bfloat16"
    return fields


def _of_trainer(launch: Launch) -> dict[str, object]:
    """Arguments of the Trainer of transformers: batch, precision, and the optimizer where it is named.

    Raises InfeasibleError for one that the Trainer does not make.
    """
    fields: dict[str, object] = {
        "per_device_train_batch_size": launch.layout.micro_batch,
        "gradient_accumulation_steps": launch.layout.num_micro_batches,
        launch.inputs.precision: True,
    }
    optimizer = _trainers_optimizer(launch)
    if optimizer == "muon":
        raise InfeasibleError(
            "The Trainer of transformers makes no Muon: plan with another optimizer."
        )
    named = {} if optimizer is None else {"optim": optimizer}
    return fields | named | _syncs(launch)


def _command(stack: str, commands: Mapping[str, str], launch: Launch) -> str:
    """What a stack calls the training of a plan. Raises InfeasibleError where it has no name for it, or where
    it trains on images.
    """
    if launch.inputs.kind not in commands:
        raise _not_there(stack, f"has no command for {launch.inputs.kind}")
    if launch.inputs.model.encoder is not None:
        raise _not_there(stack, "is not written for images")
    return commands[launch.inputs.kind]


def _nodes(stack: str, launch: Launch) -> tuple[int, int]:
    """Nodes, and the GPUs of each. Raises InfeasibleError where they are not as many on each."""
    each = launch.placed.gpus_per_host
    if each is None:
        raise _not_there(stack, "starts as many ranks on every node, in their order")
    return len(launch.placed.hosts), each


def _no_offload(stack: str, launch: Launch, *refused: str) -> None:
    """Raises InfeasibleError where a stack has no field for what a plan offloads."""
    modules = launch.execution.offload_modules
    if modules in refused:
        raise _not_there(stack, f"has no field for {modules}: pin offload_modules=none")


def _of_stack(
    plan: Plan, stack: str, degrees: tuple[str, ...], losses: tuple[str, ...] = ()
) -> tuple[Launch, dict[str, str]]:
    """A plan as DeepSpeed or FSDP2 starts it, and the file that says how it shards.

    The stack has `degrees` under FSDP2, and `losses` beside that over all logits.
    """
    framework = plan.inputs.framework
    if framework not in (DEEPSPEED.name, FSDP2.name):
        raise _not_there(
            stack, f"starts plans of {DEEPSPEED.name} and {FSDP2.name}, not of {framework}"
        )
    launch = legal_launch(plan, framework_named(framework))
    layout, loss = launch.layout, in_chunks(launch.inputs.loss)
    if loss is not None and loss not in losses:
        what = f"is not written for the {loss} loss"
        if loss == TRL_LOSS and stack in ASKED_OF_TRL:
            what = f"asks for {ASKED_OF_TRL[stack]}, whose trainers take all logits, not the {loss} loss"
        raise _not_there(stack, f"{what}: plan with --loss {ALL_LOGITS}")
    checkpoint = _checkpoint(launch.inputs.model)
    if loss == _LIGER and not _OF_LIGER.match(checkpoint):
        what = f"may not run Liger's loss for {checkpoint}, and hold all logits"
        raise _not_there(stack, f"{what}: plan with --loss {ALL_LOGITS}")
    has = degrees if framework == FSDP2.name else ()
    wide = [
        axis for axis in DEGREES if axis != "dp" and axis not in has and getattr(layout, axis) > 1
    ]
    if wide:
        raise _not_there(stack, f"has no {wide[0]}: pin {wide[0]}=1")
    if layout.recompute not in _RECOMPUTED or launch.inputs.precision not in _WEIGHTS:
        raise _not_there(
            stack, f"cannot say {layout.recompute} recomputation in {launch.inputs.precision}"
        )
    if launch.inputs.optimizer == "sgd":
        # The Trainer of transformers 4 gives it none, and stacks pin various ones.
        raise _not_there(stack, "may run SGD without the momentum that the plan counts on")
    _adapter_files(launch)
    if framework == FSDP2.name:
        config = accelerate_config(launch)
        # The stack wraps layers itself: wrapped twice, they would run forward three times.
        config["fsdp_config"][RECOMPUTES] = False
        return launch, {_ACCELERATE_FILE: yaml.safe_dump(config, sort_keys=False)}
    return launch, {DEEPSPEED_FILE: json_file(deepspeed_config(launch))}


def _not_there(stack: str, what: str) -> InfeasibleError:
    return InfeasibleError(f"{stack} cannot start this plan: it {what}.")


_ATTENTION_WORDS = {"flash_attention_3": "fa3", "flash_attention_2": "fa2", "sdpa": "sdpa"}
"""LLaMA-Factory's words for those of transformers."""


def _attention(launch: Launch) -> str:
    """The attention kernels with a plan's price, in transformers' words.

    FlashAttention-3 runs on Hopper alone (its README), none on Volta; there and on Blackwell plans price
    PyTorch's own attention, and everywhere for models with heads that FlashAttention does not take.
    """
    architecture = launch.inputs.cluster.device.architecture
    if has_wide_heads(launch.inputs.model):
        return "sdpa"
    kernels = {"hopper": "flash_attention_3", "blackwell": "sdpa", "volta": "sdpa"}
    return kernels.get(architecture, "flash_attention_2")


def _checkpoint(model: ModelSpec) -> str:
    """What the hub calls a model of the catalog; another model by its own name."""
    return next((name for name in hub_names() if read_model(name).name == model.name), model.name)


def _trainers_optimizer(launch: Launch) -> str | None:
    """The Trainer's name of the optimizer, None for AdamW and for what DeepSpeed's file says."""
    name = launch.inputs.optimizer
    if launch.inputs.framework == FSDP2.name:
        return _BY_ITSELF.get(name)
    setting = DEEPSPEED.optimizers[name]
    return setting.value if setting.flag == TRAINER_FLAG else None
