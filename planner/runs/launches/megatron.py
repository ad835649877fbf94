"""A command line of Megatron-LM's or Megatron-DeepSpeed's pretrain_gpt.py as a run."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any, NamedTuple, get_args

from meshwright.costmodel.execution_names import DISPATCHERS
from meshwright.costmodel.layout import AXES
from meshwright.costmodel.workload import Fp8Recipe
from meshwright.errors import InputError
from meshwright.frameworks.deepspeed import DEEPSPEED, MEGATRON_DEEPSPEED
from meshwright.frameworks.megatron import MEGATRON
from meshwright.model_specs.blocks import LINEAR, WINDOWED, order_fields
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.runs.launches.command_line import CommandLine
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.run_terms import (
    cuda_graph_kind,
    layers_of_layout,
    megatron_exchange,
    offloaded_modules,
)

# What Megatron-LM's flags call the sizes of a model: one table for what writes them and what reads them.
#
# Names and defaults were read in megatron-core 0.19.2 (`megatron.training.arguments`).


class SizeFlag(NamedTuple):
    """A whole number of the model."""

    flag: str
    field: str
    """Of the model's schema."""
    default: int = 0
    """Megatron's own, where the flag is absent; 0 where it has none."""


LATENT_ATTENTION = (
    SizeFlag("--q-lora-rank", "q_lora_rank"),
    SizeFlag("--kv-lora-rank", "kv_lora_rank", 32),
    SizeFlag("--qk-head-dim", "qk_nope_head_dim", 128),
    SizeFlag("--qk-pos-emb-head-dim", "qk_rope_head_dim", 64),
    SizeFlag("--v-head-dim", "v_head_dim", 128),
)
"""Multi-head latent attention, fields of `MlaSpec`."""

SPARSE_INDEXER = (
    SizeFlag("--dsa-indexer-n-heads", "heads"),
    SizeFlag("--dsa-indexer-head-dim", "head_dim"),
    SizeFlag("--dsa-indexer-topk", "top_k"),
)
"""What chooses positions for latent attention, fields of `SparseIndexerSpec`."""

LINEAR_ATTENTION = (
    SizeFlag("--linear-num-key-heads", "key_heads", 16),
    SizeFlag("--linear-num-value-heads", "value_heads", 32),
    SizeFlag("--linear-key-head-dim", "key_head_dim", 128),
    SizeFlag("--linear-value-head-dim", "value_head_dim", 128),
    SizeFlag("--linear-conv-kernel-dim", "conv_kernel", 4),
)
"""Gated DeltaNet, fields of `GatedDeltaNetSpec`."""

MAMBA = (
    SizeFlag("--mamba-state-dim", "state_dim", 128),
    SizeFlag("--mamba-head-dim", "head_dim", 64),
    SizeFlag("--mamba-num-groups", "groups", 8),
    SizeFlag("--mamba-num-heads", "heads"),
)
"""Mamba-2, fields of `Mamba2Spec`; without a number of heads they are twice as wide as the model."""
HYBRID_PATTERN = "--hybrid-layer-pattern"
"""The block of each layer, chunks of a pipeline apart by |."""
OLD_HYBRID_PATTERN = "--hybrid-override-pattern"

ACTIVATIONS = {
    "swiglu": "--swiglu",
    "geglu": "--quick-geglu",
    "squared_relu": "--squared-relu",
}
"""Switches of the activations other than GELU, which is Megatron's default."""

POSITIONS = {"rope": "rope", "learned": "learned_absolute", "alibi": "none", "none": "none"}
"""Values of `--position-embedding-type` by the model's; ALiBi is not available."""

QUICK_GELU_ALPHA = 1.702
"""Of x sigmoid(alpha x), which `--quick-geglu` gates with (megatron/core/fusions/fused_bias_geglu.py)."""
LLAMA3_FACTOR = 8.0
"""What `--use-rope-scaling` scales by: `gpt_config_from_args` (megatron/training/argument_utils.py) drops
`--rope-scaling-factor`."""


# A model from the architecture arguments of Megatron-LM or Megatron-DeepSpeed.


_FROM_CHECKPOINT = "--use-checkpoint-args"
"""Megatron's switch that takes layers and widths from the checkpoint that is loaded."""
_SIZES = ("--num-layers", "--hidden-size", "--num-attention-heads")
GPT2_VOCAB = 50_257
"""Tokens of the tokenizer that most scripts without a vocabulary's size name."""


def megatron_model(line: CommandLine) -> dict[str, Any]:
    """The model as a mapping of a run file. Raises InputError if layers, width or heads are not given."""
    pattern = hybrid_pattern(line)
    layers = len(pattern.replace("|", "")) if pattern else _needed(line, "--num-layers")
    line.integer("--num-layers", 0)
    hidden = _needed(line, "--hidden-size")
    heads = _needed(line, "--num-attention-heads")
    gated = line.has(ACTIVATIONS["swiglu"])
    # Megatron's own defaults: four times the width, two thirds of that for a gated layer.
    default_ffn = int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden
    normalization = line.text("--normalization") or ""
    model: dict[str, Any] = {
        "name": "from launch file",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn_hidden": line.integer("--ffn-hidden-size", default_ffn),
        "kv_heads": _kv_heads(line, heads),
        "vocab": line.integer("--vocab-size", line.integer("--padded-vocab-size", GPT2_VOCAB)),
        "tied_embeddings": not line.has("--untie-embeddings-and-output-weights"),
        "norm": "rmsnorm" if normalization.lower() == "rmsnorm" else "layernorm",
        "norm_epsilon": _norm_epsilon(line),
        "norm_zero_centered": line.has("--apply-layernorm-1p"),
        "qk_norm": line.has("--qk-layernorm"),
        "mtp_layers": line.integer("--mtp-num-layers", 0),
    }
    biases = not line.has("--disable-bias-linear")
    model |= dict.fromkeys(("mlp_bias", "attention_output_bias"), biases)
    model["attention_bias"] = line.has("--add-qkv-bias") or biases
    model |= _activation(line, biases=biases)
    model |= _position(line)
    channels = line.integer("--kv-channels", 0)
    if channels:
        model["head_dim"] = channels
    if line.has("--multi-latent-attention"):
        model["attention"] = _latent_attention(line)
        model["qk_norm"] = False
        model.pop("head_dim", None)
    experts = line.integer("--num-experts", 0)
    if experts > 1:
        model["moe"] = _moe(line, experts, layers, model["ffn_hidden"], biases=biases)
    if line.has("--attention-output-gate"):
        model["attention_output_gate"] = True
    if pattern is not None:
        model |= _hybrid(line, pattern.replace("|", ""), hidden)
        if "E" not in pattern:
            model.pop("moe", None)
    return model | _window(line, layers) | _linear_attention(line, layers)


def names_sizes(line: CommandLine) -> bool:
    """Whether flags give what no default has: width, heads, and layers or their pattern.

    With `--use-checkpoint-args` the checkpoint's sizes win (megatron/training/checkpointing.py,
    load_args_from_checkpoint).
    """
    given = {flag for flag in (*_SIZES, HYBRID_PATTERN, OLD_HYBRID_PATTERN) if line.has(flag)}
    patterned = bool(given & {HYBRID_PATTERN, OLD_HYBRID_PATTERN})
    needed = set(_SIZES[1:]) if patterned else set(_SIZES)
    return needed <= given and not line.has(_FROM_CHECKPOINT)


def leave_model_flags(line: CommandLine) -> None:
    """Takes the flags of a model that is known from elsewhere as read: they do not describe it whole.

    Raises InputError for a size that is no number.
    """
    for flag in _SIZES:
        line.integer(flag, 0)
    told = CommandLine(
        [*line.words, *(word for flag in _SIZES for word in (flag, "1"))], line.where
    )
    with suppress(InputError):
        megatron_model(told)
    line.read_like(told)


def hybrid_pattern(line: CommandLine) -> str | None:
    """The block of each layer, chunks apart by |; None without. Raises InputError for blocks not known."""
    pattern = line.text(HYBRID_PATTERN) or line.text(OLD_HYBRID_PATTERN)
    if pattern is None:
        return None
    if not re.fullmatch(r"[M*E|-]{1,8000}", pattern) or not pattern.replace("|", ""):
        raise InputError(
            "layers of Mamba-2 (M), attention (*), feed-forward (-) and experts (E), with | between "
            "chunks, are all that can be priced",
            where=f"{line.where}: {HYBRID_PATTERN}",
            value=pattern,
        )
    return pattern


def _hybrid(line: CommandLine, pattern: str, hidden: int) -> dict[str, Any]:
    """The pattern, and Mamba-2 where it has any; what the pattern has no block for is left out."""
    fields: dict[str, Any] = {"hybrid_pattern": pattern, "norms_per_layer": 1}
    if "-" not in pattern:
        fields["ffn_hidden"] = 0
    sizes = {size.field: line.integer(size.flag, size.default) for size in MAMBA}
    if "M" in pattern:
        sizes["heads"] = sizes["heads"] or 2 * hidden // max(sizes["head_dim"], 1)
        fields["mamba"] = sizes
    return fields


def _needed(line: CommandLine, flag: str) -> int:
    value = line.integer(flag, 0)
    if value < 1:
        what = "is needed to know the model, or its name: --with model=..."
        if line.has(_FROM_CHECKPOINT):
            what = f"is in the checkpoint that {_FROM_CHECKPOINT} reads: name the model, --with model=..."
        raise InputError(what, where=f"{line.where}: {flag}")
    return value


def _kv_heads(line: CommandLine, heads: int) -> int:
    grouped = line.has("--group-query-attention")
    groups = line.integer("--num-query-groups", 1)
    return groups if grouped else line.integer("--num-key-value-heads", heads)


def _norm_epsilon(line: CommandLine) -> float:
    """Megatron-LM's flag or Megatron-DeepSpeed's, which have one default."""
    return line.number("--norm-epsilon", line.number("--layernorm-epsilon", 1e-5))


def _activation(line: CommandLine, *, biases: bool) -> dict[str, Any]:
    """GELU unless a switch names another; every switch counts as read.

    The gate of `--quick-geglu` is x sigmoid(1.702 x): a GELU by its sigmoid approximation, or a SwiGLU.
    """
    named = [activation for activation, flag in ACTIVATIONS.items() if line.has(flag)]
    activation = named[0] if named else "gelu"
    unfused = line.has("--no-bias-gelu-fusion")
    settings: dict[str, Any] = {"activation": activation}
    if activation == "gelu" and (unfused or not biases):
        settings["gelu_form"] = "exact"
    if activation == "geglu":
        settings |= {"activation": "swiglu", "swiglu_alpha": QUICK_GELU_ALPHA}
    settings["glu_offset"] = line.number("--glu-linear-offset", 0)
    limit = line.number("--activation-func-clamp-value", 0)
    if limit:
        settings["glu_limit"] = limit
    return settings


def _position(line: CommandLine) -> dict[str, Any]:
    kind = line.text("--position-embedding-type", POSITIONS["learned"])
    if line.has("--use-rotary-position-embeddings") or line.has("--use-rotary-embeddings"):
        kind = POSITIONS["rope"]
    rows = line.integer("--max-position-embeddings", 0)
    rope = _rope(line, yarn=kind == "yarn" or line.has("--multi-latent-attention"))
    if kind == POSITIONS["none"]:
        return {"position": "none"}
    if kind != POSITIONS["learned"]:
        return {"position": "rope", "rope": rope}
    return {"position": "learned", "max_positions": rows} if rows else {"position": "learned"}


def _rope(line: CommandLine, *, yarn: bool) -> dict[str, Any]:
    """Base, share and scaling of rotary embeddings; YaRN at factor 1 is none."""
    base = line.number("--rotary-base", line.number("--rotary-position-embeddings-theta", 10_000))
    rope: dict[str, Any] = {"base": base, "fraction": line.number("--rotary-percent", 1)}
    kind = line.text("--rope-type")
    yarn_scaling = _yarn_scaling(line)
    interpolation = line.number("--rotary-seq-len-interpolation-factor", 1)
    line.text("--rope-scaling-factor")
    if yarn and kind != "rope" and yarn_scaling["factor"] > 1:
        rope["scaling"] = yarn_scaling
    elif line.has("--use-rope-scaling"):
        rope["scaling"] = {"type": "llama3", "factor": LLAMA3_FACTOR}
    elif interpolation > 1:
        rope["scaling"] = {"type": "linear", "factor": interpolation}
    return rope


def _yarn_scaling(line: CommandLine) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "type": "yarn",
        "factor": line.number("--rotary-scaling-factor", 1),
        "original_positions": line.integer("--yarn-original-max-position-embeddings", 4096),
        "beta_fast": line.number("--yarn-beta-fast", 32),
        "beta_slow": line.number("--yarn-beta-slow", 1),
        "whole_range": not line.has("--no-yarn-correction-range-round-to-int"),
    }
    weight, of_all = _mscale(line), line.number("--mscale-all-dim", 0)
    if of_all > 0:
        scaling["mscale_all_dim"] = of_all
    if of_all > 0 and weight > 0:
        scaling["mscale"] = weight
    elif weight != 1 and scaling["factor"] > 1:
        tenth = 0.1 * math.log(scaling["factor"])
        scaling["attention_factor"] = round((tenth * weight + 1) / (tenth * of_all + 1), 9)
    return scaling


def _mscale(line: CommandLine) -> float:
    """YaRN's mscale, which is below 0 where rotated elements are multiplied by less than 1."""
    text = line.text("--mscale") or "1"
    if not re.fullmatch(r"-?\d{1,6}(\.\d{0,20})?(e-\d{1,2})?", text):
        raise InputError("must be a number", where=f"{line.where}: --mscale", value=text)
    return float(text)


def _latent_attention(line: CommandLine) -> dict[str, Any]:
    sizes = {size.field: line.integer(size.flag, size.default) for size in LATENT_ATTENTION}
    latent: dict[str, Any] = {field: number for field, number in sizes.items() if number}
    if line.text("--experimental-attention-variant") == "dsa":
        latent["indexer"] = {size.field: _needed(line, size.flag) for size in SPARSE_INDEXER}
        if line.integer("--dsa-indexer-topk-freq", 1) > 1:
            what = "only 1 can be priced: an indexer in every layer"
            raise InputError(what, where=f"{line.where}: --dsa-indexer-topk-freq")
        if line.text("--dsa-kernel-backend") != "cudnn":
            what = "is cudnn in what is priced: other kernels move every score through memory"
            raise InputError(what, where=f"{line.where}: --dsa-kernel-backend")
    return latent


def _moe(line: CommandLine, experts: int, layers: int, ffn: int, *, biases: bool) -> dict[str, Any]:
    """The experts; `biases` is Megatron's one switch, which counts for routers and experts too."""
    width = line.integer("--moe-ffn-hidden-size", ffn)
    shared = line.integer("--moe-shared-expert-intermediate-size", 0)
    moe: dict[str, Any] = {
        "experts": experts,
        "top_k": line.integer("--moe-router-topk", line.integer("--topk", 2)),
        "moe_ffn_hidden": width,
        **_dense_layers(line, layers),
        "router_bias": line.has("--moe-router-enable-expert-bias") or biases,
        "expert_bias": biases,
    }
    if shared:
        moe |= {"shared_experts": max(1, shared // width), "shared_ffn_hidden": shared}
        moe["shared_expert_gate"] = line.has("--moe-shared-expert-gate")
    groups = line.integer("--moe-router-num-groups", 0)
    if groups:
        moe["router_groups"] = groups
        moe["router_groups_per_token"] = line.integer("--moe-router-group-topk", groups)
    score = line.text("--moe-router-score-function", "softmax")
    pre_softmax = line.has("--moe-router-pre-softmax")
    moe["router_score"] = score
    moe["router_normalized"] = score == "sigmoid" or not pre_softmax or moe["top_k"] == 1
    moe["router_scaling_factor"] = line.number("--moe-router-topk-scaling-factor", 1)
    line.has("--moe-router-padding-for-quantization")
    return moe


def _dense_layers(line: CommandLine, layers: int) -> dict[str, int]:
    """Which layers are dense, by `--moe-layer-freq`: the first, such as ([0]*3+[1]*58), or all but each n-th.

    A number n gives experts to the first of n layers (megatron/core/models/gpt/gpt_layer_specs.py,
    get_gpt_decoder_layer_specs), a list such as ([0,1]*24) to those with a 1.
    """
    text = (line.text("--moe-layer-freq") or "1").replace(" ", "")
    pattern = _layer_pattern(text, layers)
    dense = pattern.index(1) if 1 in pattern else layers
    if pattern == [0] * dense + [1] * (layers - dense):
        return {"dense_layers": dense}
    every = dense + 1
    if layers % every == 0 and pattern == ([0] * dense + [1]) * (layers // every):
        return {"every": every}
    raise InputError(
        "experts in every layer, after some dense layers, or in each n-th are all that a run file can say",
        where=f"{line.where}: --moe-layer-freq",
        value=text,
    )


def _layer_pattern(text: str, layers: int) -> list[int]:
    """1 for each layer with experts; empty for what is neither a number nor a sum of repeated lists."""
    if re.fullmatch(r"\d{1,4}", text) and int(text):
        return [int(layer % int(text) == 0) for layer in range(layers)]
    term = r"\[[01](?:,[01])*\](?:\*\d{1,4})?"
    if not re.fullmatch(rf"\(?{term}(?:\+{term})*\)?", text) or len(text) > 1000:
        return []
    pattern: list[int] = []
    for listed, times in re.findall(r"\[([01,]+)\](?:\*(\d+))?", text):
        pattern += [int(digit) for digit in listed.split(",")] * min(int(times or 1), layers)
    return pattern if len(pattern) == layers else []


def _linear_attention(line: CommandLine, layers: int) -> dict[str, Any]:
    """Gated DeltaNet and how often a layer attends in full, of `--linear-attention-freq`."""
    variant = line.text("--experimental-attention-variant")
    frequency = (line.text("--linear-attention-freq") or "1").replace(" ", "")
    sizes = {size.field: line.integer(size.flag, size.default) for size in LINEAR_ATTENTION}
    if variant is None or (variant == "dsa" and line.has("--multi-latent-attention")):
        return {}
    if variant != "gated_delta_net":
        raise InputError(
            "only gated_delta_net, and dsa with --multi-latent-attention, can be priced",
            where=f"{line.where}: --experimental-attention-variant",
            value=variant,
        )
    if frequency.isdecimal():
        return {"linear_attention": sizes, "full_attention_every": int(frequency)}
    return {
        "linear_attention": sizes,
        **_attention_order(line, "--linear-attention-freq", frequency, layers, LINEAR),
    }


def _attention_order(
    line: CommandLine, flag: str, text: str, layers: int, other: str
) -> dict[str, Any]:
    """Which layers attend in full, of a list with a 1 for each of the others."""
    pattern = _layer_pattern(text, layers)
    if not pattern:
        raise InputError(
            "a number, or a list of 0 and 1 such as ([0]*7+[1]*21) with one for each layer, can be read",
            where=f"{line.where}: {flag}",
            value=text,
        )
    return order_fields([not digit for digit in pattern], other)


def _window(line: CommandLine, layers: int) -> dict[str, Any]:
    """Attention sinks and sliding windows; the window counts the tokens left of the query, without it.

    A number n leaves each n-th layer without a window, a list those with a 0; without either all have one.
    """
    settings: dict[str, Any] = {"attention_sinks": line.text("--softmax-type") == "learnable"}
    skip = (line.text("--window-attn-skip-freq") or "0").replace(" ", "")
    tokens = re.match(r"\(?(\d{1,9})", line.text("--window-size") or "")
    if tokens is None:
        return settings
    if re.fullmatch(r"\d{1,6}", skip):
        order: dict[str, Any] = {"full_attention_every": int(skip)}
    else:
        order = _attention_order(line, "--window-attn-skip-freq", skip, layers, WINDOWED)
    if order.get("full_attention_every") == 1:
        return settings
    return settings | {"sliding_window": int(tokens[1]) + 1} | order


_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stages by Megatron-FSDP's sharding strategy."""
_OPTIMIZER_INSTANCES = "--num-distributed-optimizer-instances"
_END_SLOTS = (
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
"""Switches that count the embedding and the head as a layer each; what one of them alone does is not read."""
_LAYOUT = "--pipeline-model-parallel-layout"

_DEEPSPEED_FLASH = (
    "--use-flash-attn",
    "--use-flash-attn-v1",
    "--use-flash-attn-v2",
    "--use-flash-attn-triton",
)
"""Megatron-DeepSpeed's switches of fused attention, off by default (4efb479, megatron/arguments.py)."""

_CPU_OPTIMIZER = "--cpu-optimizer"
"""Megatron-DeepSpeed's switch of an offloaded optimizer (4efb479, megatron/optimizer/__init__.py)."""


def from_megatron(
    line: CommandLine, known: ModelSpec | None = None, *, sized: bool = True
) -> LaunchRun:
    """The run of a Megatron command line.

    Parameters
    ----------
    line
        Its words.
    known
        The model, where the caller has one. It is the run's where the flags do not give its sizes; where they
        do, layers and experts are still its own.
    sized
        Whether flags of the model are looked for; those of a recipe say nothing of it.

    Raises
    ------
    InputError
        No sequence length, no sizes and no known model, or a value of the wrong kind.
    """
    deepspeed = line.has("--deepspeed") or line.has("--deepspeed_config")
    flash_flags = [flag for flag in _DEEPSPEED_FLASH if line.has(flag)]
    deepspeed_stack = DEEPSPEED if flash_flags else MEGATRON_DEEPSPEED
    written = megatron_model(line) if sized and (known is None or names_sizes(line)) else None
    model = known.model_dump(exclude_none=True) if known is not None else written
    assert model is not None
    settings: dict[str, Any] = {
        "seq_len": line.integer("--seq-length", 0),
        "micro_batch": line.integer("--micro-batch-size", 1),
        **{
            axis: line.count(setting.flag)
            for axis, setting in MEGATRON.axes.items()
            if axis in AXES and axis != "dp"
        },
        "sequence_parallel": line.has("--sequence-parallel"),
        "optimizer": line.text("--optimizer", "adam"),
        "framework": deepspeed_stack.name if deepspeed else MEGATRON.name,
        "precision": _precision(line),
        "zero_stage": _zero_stage(line),
        **_numerics(line),
        "overlap": _overlap(line),
    }
    bucket = line.integer("--ddp-bucket-size", 0)
    if bucket > 0:
        settings["bucket_parameters"] = bucket
    if settings["precision"] == "fp8":
        # Megatron's default (megatron/core/transformer/transformer_config.py, fp8_recipe).
        recipe = line.text("--fp8-recipe", "delayed")
        settings["fp8_recipe"] = recipe if recipe in get_args(Fp8Recipe) else "delayed"
    settings |= _recompute(line)
    settings |= _stages(line, settings["pp"], model["layers"])
    if "moe" in model:
        settings |= _experts(line, 1 if deepspeed else settings["tp"])
        if deepspeed:
            settings["moe_dispatch"] = "alltoall"
    batch = line.integer("--global-batch-size", 0)
    if batch:
        settings["global_batch"] = batch
    settings |= megatron_exchange(line, settings["cp"])
    settings["cuda_graph"] = _cuda_graph(line)
    if line.has("--use-tp-pp-dp-mapping"):
        settings["rank_order"] = "tp-cp-pp-dp"
    gpus = line.torchrun_gpus()
    if gpus:
        settings["gpus"] = gpus
    instances = line.count(_OPTIMIZER_INSTANCES)
    if instances > 1:
        settings["shard_groups"] = instances
    settings |= offloaded_modules(line)
    offloaded = _offloaded_percent(line)
    if offloaded:
        settings["optimizer_offload"] = offloaded
    assumed = []
    if written is None:
        leave_model_flags(line)
    elif not (line.has("--vocab-size") or line.has("--padded-vocab-size")):
        assumed.append(
            f"no --vocab-size: {GPT2_VOCAB:,} tokens are assumed, as GPT-2 has; --with model=... tells"
        )
    if settings["seq_len"] < 1:
        raise InputError("is needed for the price of a step", where=f"{line.where}: --seq-length")
    unread = tuple(line.unread("megatron"))
    return LaunchRun(
        settings=settings,
        model=model if written is None else written,
        unread=unread,
        assumed=tuple(assumed),
    )


def _cuda_graph(line: CommandLine) -> str:
    # The older name of the same, in releases before 0.19.
    scope = line.several("--cuda-graph-scope")
    modules = line.several("--cuda-graph-modules") or scope or None
    recipe = {"cuda_graph_impl": line.text("--cuda-graph-impl"), "cuda_graph_scope": modules}
    return cuda_graph_kind(recipe)


def _overlap(line: CommandLine) -> dict[str, bool]:
    line.has("--overlap-param-gather")
    return {
        "dp": line.has("--overlap-grad-reduce"),
        "tp": line.has("--tp-comm-overlap"),
        "pp": not line.has("--no-overlap-p2p-communication"),
        "ep": line.has("--overlap-moe-expert-parallel-comm"),
    }


def _experts(line: CommandLine, default_etp: int) -> dict[str, Any]:
    deepspeed_ep = line.integer(DEEPSPEED.axes["ep"].flag, 1)
    dispatcher = line.text("--moe-token-dispatcher-type", "allgather")
    backend = line.text("--moe-flex-dispatcher-backend") or "deepep"
    if backend not in DISPATCHERS:
        backend = "deduplicated"
    plain = "allgather" if dispatcher == "allgather" else "alltoall"
    return {
        "ep": line.integer(MEGATRON.axes["ep"].flag, deepspeed_ep),
        "etp": line.integer(MEGATRON.axes["etp"].flag, default_etp),
        "moe_dispatch": backend if dispatcher == "flex" else plain,
    }


def _numerics(line: CommandLine) -> dict[str, Any]:
    """Types of gradients, moments and parameters. Without a flag gradients are those of the stack."""
    settings: dict[str, Any] = {}
    if line.has("--grad-reduce-in-bf16"):
        settings["gradient_dtype"] = "bf16"
    elif line.has("--accumulate-allreduce-grads-in-fp32"):
        settings["gradient_dtype"] = "fp32"
    line.has("--use-precision-aware-optimizer")
    moments = {line.text("--exp-avg-dtype", "fp32"), line.text("--exp-avg-sq-dtype", "fp32")}
    if moments == {"bf16"}:
        settings["moment_dtype"] = "bf16"
    line.has("--reuse-grad-buf-for-mxfp8-param-ag")
    loss = line.text("--cross-entropy-fusion-impl")
    if loss is not None and line.has("--cross-entropy-loss-fusion"):
        settings["fused_loss"] = loss == "te"
    kept = [line.has(flag) for flag in ("--fp8-param-gather", "--fp4-param-gather")]
    if any(kept):
        settings["fp8_params"] = True
    return settings


def _offloaded_percent(line: CommandLine) -> int:
    """Of the optimizer's states, to a whole number. The share is 1 where the switch stands alone."""
    line.has("--overlap-cpu-optimizer-d2h-h2d")
    share = line.number("--optimizer-offload-fraction", 1.0)
    if line.has(_CPU_OPTIMIZER):
        return 100
    return round(100 * share) if line.has("--optimizer-cpu-offload") else 0


def _precision(line: CommandLine) -> str:
    recipe, fp16 = line.text("--fp8-recipe"), line.has("--fp16")
    if line.text("--fp4-format"):
        line.text("--fp4-recipe")
        return "nvfp4"
    if line.text("--fp8-format"):
        return "mxfp8" if recipe == "mxfp8" else "fp8"
    return "fp16" if fp16 else "bf16"


def _zero_stage(line: CommandLine) -> int:
    strategy = line.text("--data-parallel-sharding-strategy") or "no_shard"
    distributed = line.has("--use-distributed-optimizer")
    if line.has("--use-megatron-fsdp"):
        return _SHARDED.get(strategy, 3)
    if line.has("--use-torch-fsdp2"):
        return 2 if line.has("--torch-fsdp2-no-reshard-after-forward") else 3
    return line.integer("--zero-stage", 1 if distributed else 0)


def _recompute(line: CommandLine) -> dict[str, Any]:
    old_switches = ("--checkpoint-activations", "--deepspeed-activation-checkpointing")
    switched_on = [line.has(flag) for flag in old_switches]
    kind = line.text("--recompute-granularity", "full" if any(switched_on) else "none")
    if line.has("--recompute-activations"):
        kind = "selective"
    if kind == "selective":
        modules = line.several("--recompute-modules") or ["core_attn"]
        return {"recompute": kind, "recompute_modules": modules}
    if kind != "full":
        return {"recompute": "none"}
    layers = line.integer("--recompute-num-layers", 0)
    if line.text("--recompute-method") == "block" and layers:
        return {"recompute": kind, "recompute_layers": layers}
    return {"recompute": kind}


def _stages(line: CommandLine, pp: int, layers: int) -> dict[str, Any]:
    """Virtual stages and, where it is not even, the split of the layers."""
    pattern = hybrid_pattern(line)
    if pattern is not None and "|" in pattern:
        return _chunk_stages(tuple(map(len, pattern.split("|"))), pp, line.where)
    text = line.text(_LAYOUT)
    if text is not None:
        return _written_stages(text, pp, line.where)
    ends = [flag for flag in _END_SLOTS if line.words.count(flag)]
    vpp = line.integer("--num-virtual-stages-per-pipeline-rank", 0)
    layers_per_chunk = line.integer("--num-layers-per-virtual-pipeline-stage", 0)
    if layers_per_chunk:
        vpp = layers // (pp * layers_per_chunk)
    first = line.integer("--decoder-first-pipeline-num-layers", 0)
    last = line.integer("--decoder-last-pipeline-num-layers", 0)
    if pp > 1 and (first or last) and not vpp:
        return {"stages": [[count] for count in _uneven_ends(layers, pp, first, last)]}
    settings: dict[str, Any] = {"vpp": vpp} if vpp > 1 else {}
    if len(ends) == len(_END_SLOTS):
        for flag in ends:
            line.has(flag)
        settings["layer_split"] = "embedding and LM head each occupy one layer slot"
    return settings


def _written_stages(text: str, pp: int, where: str) -> dict[str, Any]:
    chunks = layers_of_layout(text)
    if chunks is None:
        what = "must be a layout of E, t, m, L and |"
        raise InputError(what, where=f"{where}: {_LAYOUT}", value=text)
    return _chunk_stages(chunks, pp, where)


def _chunk_stages(chunks: tuple[int, ...], pp: int, where: str) -> dict[str, Any]:
    """Stages of chunks that are written in the order of the model."""
    if len(chunks) % pp:
        raise InputError(f"has {len(chunks)} stages, which pp {pp} does not divide", where=where)
    stages = [list(chunks[rank::pp]) for rank in range(pp)]
    return {"vpp": len(chunks) // pp, "stages": stages}


def _uneven_ends(layers: int, pp: int, first: int, last: int) -> list[int]:
    """Layers of each stage; a first or last of 0 is like the stages between."""
    front = [first] if first else []
    back = [last] if last else []
    between = pp - len(front) - len(back)
    size = (layers - first - last) // between if between else 0
    return [*front, *[size] * between, *back]
