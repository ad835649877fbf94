"""A command line of Megatron-LM's or Megatron-DeepSpeed's pretrain_gpt.py as a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, get_args

from meshwright.costmodel.execution_names import DISPATCHERS
from meshwright.costmodel.workload import Fp8Recipe
from meshwright.documents import packaged_document
from meshwright.errors import InputError, check_choice, near_miss
from meshwright.frameworks.deepspeed import DEEPSPEED, MEGATRON_DEEPSPEED, pretrain_arguments
from meshwright.frameworks.megatron import (
    ACTIVATIONS,
    ADAPTED_MODULES,
    ADAPTER_RANK,
    BRIDGE_MODULES,
    BRIDGE_OVERRIDES,
    BRIDGE_RESETS,
    DELTA_NET,
    LLAMA3_FACTOR,
    MEGATRON,
    MEGATRON_ARGUMENTS,
    POSITIONS,
    QUICK_GELU_ALPHA,
    SHARES_EXPERT_ADAPTERS,
    SPARSE,
)
from meshwright.model_specs.adapters import EXPERTS
from meshwright.model_specs.blocks import FULL, LINEAR, WINDOWED, order_fields
from meshwright.model_specs.reader import load_catalog_model, read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.runs.launches.command_line import (
    CommandLine,
    Said,
    has_no_effect,
    number_in,
)
from meshwright.planner.runs.launches.launch_run import LaunchRun, image_fields
from meshwright.planner.runs.run_terms import (
    cuda_graph_kind,
    layers_of_layout,
    megatron_exchange,
    offloaded_modules,
)

ARGUMENTS = pretrain_arguments()
"""What either pretrain_gpt.py takes, by its word."""

# A model from the architecture arguments of Megatron-LM or Megatron-DeepSpeed.


_FROM_CHECKPOINT = "--use-checkpoint-args"
"""Megatron's switch that takes layers and widths from the checkpoint that is loaded."""
_SIZES = ("layers", "hidden", "heads")
_AS_THEY_ARE = (
    "tied_embeddings",
    "norm_epsilon",
    "norm_zero_centered",
    "qk_norm",
    "mtp_layers",
    "glu_offset",
)
"""Fields of the model that arguments say as it has them."""
GPT2_VOCAB = 50_257
"""Tokens of the tokenizer that most scripts without a vocabulary's size name."""


def megatron_model(line: CommandLine) -> dict[str, Any]:
    """The model as a mapping of a run file. Raises InputError if layers, width or heads are not given.

    Parameters
    ----------
    line
        Flags of the architecture among others; those that are asked for count as read.
    """
    said = Said(line, ARGUMENTS)
    pattern = hybrid_pattern(said)
    modules: list[str] = []
    if pattern is not None:
        pattern, *modules = pattern.replace("|", "").split("/")
    layers = len(pattern) if pattern else _needed(said, "layers")
    said.get("layers", 0)
    hidden, heads = _needed(said, "hidden"), _needed(said, "heads")
    # Megatron's own defaults: four times the width, two thirds of that for a gated layer.
    default_ffn = int(4 * hidden * 2 / 3) // 64 * 64 if said["swiglu"] else 4 * hidden
    model: dict[str, Any] = {
        "name": "from launch file",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn_hidden": said.get("ffn_hidden", default_ffn),
        "kv_heads": _kv_heads(said, heads),
        "vocab": said.get("vocab", GPT2_VOCAB),
        "norm": "rmsnorm" if said["norm"].lower() == "rmsnorm" else "layernorm",
        **{word: said[word] for word in _AS_THEY_ARE},
    }
    biases = said["mlp_bias"]
    model |= dict.fromkeys(("mlp_bias", "attention_output_bias"), biases)
    model["attention_bias"] = said["attention_bias"] or biases
    model |= _activation(said, biases=biases)
    model |= _position(said)
    present = "head_dim", "attention_output_gate", "mtp_shared"
    model |= {word: said[word] for word in present if said[word]}
    if said["latent"]:
        model["attention"] = _latent_attention(said)
        model["qk_norm"] = False
        model.pop("head_dim", None)
        model |= _shared_indexers(said, layers)
    if said["moe.experts"] > 1:
        model["moe"] = _moe(said, layers, model["ffn_hidden"], biases=biases)
    if pattern is not None:
        model |= _hybrid(said, pattern, hidden)
        if modules:
            # Their number is inferred from the pattern (megatron/training/arguments.py).
            model |= {"mtp_layers": len(modules), "mtp_pattern": modules[0]}
        if "E" not in pattern:
            model.pop("moe", None)
    if said["weightless_qk_norm"]:
        model |= {"qk_norm": True, "qk_norm_weights": False}
    model |= _scales(said, model.get("head_dim") or hidden // heads)
    return model | _window(said, layers) | _linear_attention(said, layers)


def names_sizes(said: Said) -> bool:
    """Whether flags give what no default has: width, heads, and layers or their pattern.

    With `--use-checkpoint-args` the checkpoint's sizes win (megatron/training/checkpointing.py,
    load_args_from_checkpoint).

    Parameters
    ----------
    said
        Flags of Megatron-LM or Megatron-DeepSpeed.
    """
    named = {word for word in (*_SIZES, "hybrid_pattern") if said.has(word)}
    needed = {"hidden", "heads", "hybrid_pattern" if "hybrid_pattern" in named else "layers"}
    return needed <= named and not said.line.has(_FROM_CHECKPOINT)


def leave_model_flags(said: Said) -> None:
    """Takes the flags of a model that is known from elsewhere as read: they do not describe it whole.

    Raises InputError for a size that is no number.

    Parameters
    ----------
    said
        Flags beside a model whose sizes are known without them.
    """
    line = said.line
    for word in _SIZES:
        said.get(word, 0)
    sized = CommandLine(
        [*line.words, *(part for word in _SIZES for part in (said.flag(word), "1"))], line.where
    )
    with suppress(InputError):
        megatron_model(sized)
    line.read_like(sized)


def hybrid_pattern(said: Said) -> str | None:
    """The block of each layer, chunks apart by |, and behind / those of each prediction module; None without.

    Raises InputError for blocks not known, and for modules that differ.

    Parameters
    ----------
    said
        Flags of Megatron; that of the pattern counts as read.
    """
    pattern: str | None = said["hybrid_pattern"]
    if pattern is None:
        return None
    if not re.fullmatch(r"\|*[M*E-][M*E|-]{0,8000}(?:(/[*E-]{1,20})\1{0,20})?", pattern):
        what = (
            "layers of Mamba-2 (M), attention (*), feed-forward (-) and experts (E), with | between chunks "
            "and behind / the blocks of equal prediction modules, are all that can be priced"
        )
        raise said.error("hybrid_pattern", what, pattern)
    return pattern


def _hybrid(said: Said, pattern: str, hidden: int) -> dict[str, Any]:
    """The pattern, and Mamba-2 where it has any; what the pattern has no block for is left out."""
    fields: dict[str, Any] = {"hybrid_pattern": pattern, "norms_per_layer": 1}
    if "-" not in pattern:
        fields["ffn_hidden"] = 0
    sizes = said.part("mamba")
    if "M" in pattern:
        sizes["heads"] = sizes["heads"] or 2 * hidden // max(sizes["head_dim"], 1)
        fields["mamba"] = sizes
    return fields


def _needed(said: Said, word: str) -> int:
    what = "is needed to know the model, or its name: --with model=..."
    if said.line.has(_FROM_CHECKPOINT):
        what = (
            f"is in the checkpoint that {_FROM_CHECKPOINT} reads: name the model, --with model=..."
        )
    return said.needed(word, what)


def _kv_heads(said: Said, heads: int) -> int:
    grouped, groups = said["grouped_queries"], said["query_groups"]
    return int(groups if grouped else said.get("kv_heads", heads))


def _activation(said: Said, *, biases: bool) -> dict[str, Any]:
    """GELU unless a switch names another; every switch counts as read.

    The gate of `--quick-geglu` is x sigmoid(1.702 x): a GELU by its sigmoid approximation, or a SwiGLU.
    """
    named = [activation for activation in ACTIVATIONS if said[activation]]
    activation = named[0] if named else "gelu"
    fused, limit = said["bias_gelu_fusion"], said["glu_limit"]
    settings: dict[str, Any] = {"activation": activation}
    if activation == "gelu" and not (fused and biases):
        settings["gelu_form"] = "exact"
    if activation == "geglu":
        settings |= {"activation": "swiglu", "swiglu_alpha": QUICK_GELU_ALPHA}
    return settings | ({"glu_limit": limit} if limit else {})


def _position(said: Said) -> dict[str, Any]:
    kind = said["position"]
    if said["rotary"]:
        kind = POSITIONS["rope"]
    rows = said["max_positions"]
    rope = _rope(said, yarn=kind == "yarn" or said["latent"])
    if kind == POSITIONS["none"]:
        return {"position": "none"}
    if kind != POSITIONS["learned"]:
        return {"position": "rope", "rope": rope}
    return {"position": "learned", "max_positions": rows} if rows else {"position": "learned"}


def _rope(said: Said, *, yarn: bool) -> dict[str, Any]:
    """Base, share and scaling of rotary embeddings; YaRN at factor 1 is none."""
    rope, kind = said.part("rope"), said["rope_type"]
    yarn_scaling, interpolation = _yarn_scaling(said), said["interpolation"]
    scaled_as_llama = said["llama3_scaling"]
    said["llama3_factor"]
    if yarn and kind != "rope" and yarn_scaling["factor"] > 1:
        rope["scaling"] = yarn_scaling
    elif scaled_as_llama:
        rope["scaling"] = {"type": "llama3", "factor": LLAMA3_FACTOR}
    elif interpolation > 1:
        rope["scaling"] = {"type": "linear", "factor": interpolation}
    return rope


def _scales(said: Said, head_dim: int) -> dict[str, Any]:
    """Factors on embeddings, logits and attention scores: those of a mu-parametrization."""
    scales = {word: said[word] for word in ("embedding_scale", "output_scale")}
    power, width = said["scale_power"], said["scale_width"]
    if not said["scales"]:
        return {}
    if (power, width) != (0.5, 1):
        scales["attention_scale"] = width**0.5 / head_dim**power
    return scales


def _yarn_scaling(said: Said) -> dict[str, Any]:
    scaling: dict[str, Any] = {"type": "yarn", **said.part("rope.scaling")}
    weight, of_all = _mscale(said), said["mscale_all_dim"]
    if of_all > 0:
        scaling["mscale_all_dim"] = of_all
    if of_all > 0 and weight > 0:
        scaling["mscale"] = weight
    elif weight != 1 and scaling["factor"] > 1:
        tenth = 0.1 * math.log(scaling["factor"])
        scaling["attention_factor"] = round((tenth * weight + 1) / (tenth * of_all + 1), 9)
    return scaling


def _mscale(said: Said) -> float:
    """YaRN's mscale, which is below 0 where rotated elements are multiplied by less than 1."""
    text = said["mscale"]
    if not re.fullmatch(r"-?\d{1,6}(\.\d{0,20})?(e-\d{1,2})?", text):
        raise said.error("mscale", "must be a number", text)
    return float(text)


def _latent_attention(said: Said) -> dict[str, Any]:
    latent: dict[str, Any] = {name: size for name, size in said.part("attention").items() if size}
    if said["attention_variant"] == SPARSE:
        sizes = (word for word in ARGUMENTS if word.startswith("attention.indexer."))
        latent["indexer"] = {word.rpartition(".")[2]: _needed(said, word) for word in sizes}
        if said["indexer_kernels"] != "cudnn":
            what = "is cudnn in what is priced: other kernels move every score through memory"
            raise said.error("indexer_kernels", what)
    return latent


def _shared_indexers(said: Said, layers: int) -> dict[str, Any]:
    """Which layers have an indexer of their own (megatron/core/transformer/experimental_attention_variant/
    dsa.py, is_dsa_skip_topk_layer)."""
    every, first = max(said["indexer_every"], 1), max(said["indexer_first"], 1)
    has_indexer = [max(number - first, 0) % every == 0 for number in range(1, layers + 1)]
    if said["attention_variant"] != SPARSE or all(has_indexer):
        return {}
    return {"attention_order": "".join(FULL if each else FULL.lower() for each in has_indexer)}


def _moe(said: Said, layers: int, ffn: int, *, biases: bool) -> dict[str, Any]:
    """The experts; `biases` is Megatron's one switch, which counts for routers and experts too."""
    width, shared = said.get("moe.moe_ffn_hidden", ffn), said["moe.shared_ffn_hidden"]
    moe: dict[str, Any] = {
        "experts": said["moe.experts"],
        "top_k": said["moe.top_k"],
        "moe_ffn_hidden": width,
        **_dense_layers(said, layers),
        "router_bias": said["balancing_bias"] or biases,
        "expert_bias": biases,
    }
    if shared:
        moe |= {"shared_experts": max(1, shared // width), "shared_ffn_hidden": shared}
        moe["shared_expert_gate"] = said["moe.shared_expert_gate"]
    if said["moe.latent_size"]:
        moe["latent_size"] = said["moe.latent_size"]
    groups = said["moe.router_groups"]
    if groups:
        moe["router_groups"] = groups
        moe["router_groups_per_token"] = said.get("moe.router_groups_per_token", groups)
    score, pre_softmax = said["moe.router_score"], said["pre_softmax"]
    moe["router_score"] = score
    moe["router_normalized"] = score == "sigmoid" or not pre_softmax or moe["top_k"] == 1
    moe["router_scaling_factor"] = said["moe.router_scaling_factor"]
    said["padded_experts"]
    return moe


def _dense_layers(said: Said, layers: int) -> dict[str, int]:
    """Which layers are dense, by `--moe-layer-freq`: the first, such as ([0]*3+[1]*58), or all but each n-th.

    A number n gives experts to the first of n layers (megatron/core/models/gpt/gpt_layer_specs.py,
    get_gpt_decoder_layer_specs), a list such as ([0,1]*24) to those with a 1.
    """
    text = said["moe.every"].replace(" ", "")
    pattern = _layer_pattern(text, layers)
    dense = pattern.index(1) if 1 in pattern else layers
    if pattern == [0] * dense + [1] * (layers - dense):
        return {"dense_layers": dense}
    every = dense + 1
    if layers % every == 0 and pattern == ([0] * dense + [1]) * (layers // every):
        return {"every": every}
    what = "experts in every layer, after some dense layers, or in each n-th are all that a run file can say"
    raise said.error("moe.every", what, text)


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


def _linear_attention(said: Said, layers: int) -> dict[str, Any]:
    """Gated DeltaNet and how often a layer attends in full, of `--linear-attention-freq`."""
    variant, frequency = said["attention_variant"], said["linear_every"].replace(" ", "")
    sizes = said.part("linear_attention")
    if variant is None or (variant == SPARSE and said["latent"]):
        return {}
    if variant != DELTA_NET:
        what = f"only {DELTA_NET}, and {SPARSE} with {said.flag('latent')}, can be priced"
        raise said.error("attention_variant", what, variant)
    every = number_in(frequency)
    if every is not None:
        return {"linear_attention": sizes, "full_attention_every": every}
    order = _attention_order(said, "linear_every", frequency, layers, LINEAR)
    return {"linear_attention": sizes, **order}


def _attention_order(
    said: Said, word: str, text: str, layers: int, narrow_kind: str
) -> dict[str, Any]:
    """Which layers attend in full, of a list with a 1 for each of the others."""
    pattern = _layer_pattern(text, layers)
    if not pattern:
        what = "a number, or a list of 0 and 1 such as ([0]*7+[1]*21) with one for each layer, can be read"
        raise said.error(word, what, text)
    return order_fields([not digit for digit in pattern], narrow_kind)


def _window(said: Said, layers: int) -> dict[str, Any]:
    """Attention sinks and sliding windows; the window counts the tokens left of the query, without it.

    A number n leaves each n-th layer without a window, a list those with a 0; without either all have one.
    """
    settings: dict[str, Any] = {"attention_sinks": said["softmax"] == "learnable"}
    skip = said["full_attention_every"].replace(" ", "")
    tokens = re.match(r"\(?(\d{1,9})", said["window"] or "")
    if tokens is None:
        return settings
    if re.fullmatch(r"\d{1,6}", skip):
        order: dict[str, Any] = {"full_attention_every": int(skip)}
    else:
        order = _attention_order(said, "full_attention_every", skip, layers, WINDOWED)
    if order.get("full_attention_every") == 1:
        return settings
    turned = {"rope_in_windows_alone": True} if _unturned(said, layers) == order else {}
    return settings | {"sliding_window": int(tokens[1]) + 1} | order | turned


def _unturned(said: Said, layers: int) -> dict[str, Any]:
    """Layers without position embeddings, as if they attended in full: each n-th, or those with a 1."""
    text = said["unturned"].replace(" ", "")
    every = number_in(text)
    if every:
        return {"full_attention_every": every}
    pattern = _layer_pattern(text, layers)
    return order_fields([digit == 1 for digit in pattern], WINDOWED) if pattern else {}


_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stages by Megatron-FSDP's sharding strategy."""
_END_SLOTS = (
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
"""Switches that count the embedding and the head as a layer each; what one of them alone does is not read."""
_FIRST_OR_LAST = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
_OTHER_SPLITS = (
    *_END_SLOTS,
    *_FIRST_OR_LAST,
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
)
"""What says a split too, beside a layout or a pattern that is cut."""
_OF_PIPELINES = (*_FIRST_OR_LAST, "--defer-embedding-wgrad-compute")
_OF_VIRTUAL_STAGES = ("--overlap-param-gather-with-optimizer-step",)
_OF_TENSOR_GROUPS = ("--distribute-saved-activations",)
_OLD_GRAPHS = ("--enable-cuda-graph", "--external-cuda-graph")
_UNCHECKED = "--no-check-for-nan-in-loss-and-grad"
_DELAYED = ("--delay-wgrad-compute",)
_OF_MEGATRON_FSDP = "fsdp_dtensor"
_AS_RUN_FILES = ("seq_len", "micro_batch", "tp", "pp", "cp", "sequence_parallel")
"""Settings of a run file that arguments say as it has them."""


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
    said = Said(line, ARGUMENTS)
    written = megatron_model(line) if sized and (known is None or names_sizes(said)) else None
    model = known.model_dump(exclude_none=True) if known is not None else written
    assert model is not None
    settings = _settings(said, model, of_recipe=not sized)
    assumed = []
    if written is None:
        leave_model_flags(said)
    elif not said.has("vocab"):
        assumed.append(
            f"no --vocab-size: {GPT2_VOCAB:,} tokens are assumed, as GPT-2 has; --with model=... tells"
        )
    if settings["seq_len"] < 1 and not sized:
        del settings["seq_len"]
    elif settings["seq_len"] < 1:
        raise said.error("seq_len", "is needed for the price of a step")
    dealing = _dealing(said, settings)
    said["token_mean_loss"]
    unread = dealing + tuple(line.unread("megatron"))
    return LaunchRun(
        settings=settings,
        model=model if written is None else written,
        unread=unread,
        remarks=(_DEALT,) if dealing else (),
        assumed=tuple(assumed),
    )


def _settings(said: Said, model: Mapping[str, Any], *, of_recipe: bool) -> dict[str, Any]:
    """The `run` section of a model's run: batch, degrees, numerics, schedule and execution."""
    deepspeed = said["deepspeed_engine"]
    deepspeed_stack = DEEPSPEED if said["flash"] else MEGATRON_DEEPSPEED
    settings: dict[str, Any] = {
        **{word: said[word] for word in _AS_RUN_FILES},
        "framework": deepspeed_stack.name if deepspeed else MEGATRON.name,
        "precision": _precision(said),
        **_optimizer(said),
        "zero_stage": _zero_stage(said),
        **_numerics(said),
        "overlap": said.part("overlap"),
    }
    said["overlaps_gathers"]
    if said["bucket_parameters"] > 0:
        settings["bucket_parameters"] = said["bucket_parameters"]
    if settings["precision"] == "fp8":
        # Megatron's default (megatron/core/transformer/transformer_config.py, fp8_recipe).
        recipe = said["fp8_recipe"]
        settings["fp8_recipe"] = recipe if recipe in get_args(Fp8Recipe) else "delayed"
    settings |= _recompute(said)
    settings |= _stages(said, settings["pp"], model["layers"])
    if not of_recipe and not deepspeed:
        _refuse_together(said, settings)
    if "moe" in model:
        settings |= _experts(said, 1 if deepspeed else settings["tp"])
        if deepspeed:
            settings["moe_dispatch"] = "alltoall"
    if said["global_batch"]:
        settings["global_batch"] = said["global_batch"]
    settings |= megatron_exchange(said, settings["cp"])
    graphs = {"cuda_graph_impl": said["graph_kind"], "cuda_graph_scope": said["graph_modules"]}
    settings["cuda_graph"] = cuda_graph_kind(graphs)
    if said["pipeline_before_data"]:
        settings["rank_order"] = "tp-cp-pp-dp"
    gpus = said.line.torchrun_gpus()
    if gpus:
        settings["gpus"] = gpus
    if said["shard_groups"] > 1:
        settings["shard_groups"] = said["shard_groups"]
    settings |= {} if deepspeed else _loss_and_ends(said, settings, of_recipe=of_recipe)
    settings |= offloaded_modules(said)
    offloaded = _offloaded_percent(said)
    if offloaded:
        settings["optimizer_offload"] = offloaded
    return settings


_DEALT = (
    "hybrid context parallelism deals samples to ranks by their lengths, which the file does not hold: "
    "priced as whole sequences"
)


def _loss_and_ends(said: Said, settings: dict[str, Any], *, of_recipe: bool) -> dict[str, Any]:
    """How cross entropy and rotary embeddings run, and transfers of virtual stages in fill and drain.

    The loss is not fused and transfers are not hidden in Megatron without their flags; a recipe without an
    override has its own.
    """
    loss = said.line.text("--cross-entropy-fusion-impl")
    fused, overlaps_ends = said["loss_fusion"], said["overlaps_ends"]
    kernels: dict[str, Any] = {}
    if fused or not of_recipe:
        kernels["stepwise_loss"] = not fused
    if not said["rope_fusion"]:
        kernels["stepwise_rotary"] = True
    if not said["bias_swiglu_fusion"]:
        kernels["stepwise_activation"] = True
    if fused and loss is not None:
        kernels["fused_loss"] = loss == "te"
    if settings.get("vpp", 1) > 1 and (overlaps_ends or not of_recipe):
        kernels["fill_exposed"] = not overlaps_ends
    return kernels


def _dealing(said: Said, settings: dict[str, Any]) -> tuple[str, ...]:
    """Flags of hybrid context parallelism that the price of whole sequences does not know.

    The tokens of a rank are those of a sequence that cp ranks share, where they are as many.
    """
    switched_on, rank_tokens = said["hybrid_context"], said["rank_tokens"]
    if not switched_on:
        return ()
    shared = rank_tokens * settings["cp"] == settings["seq_len"]
    return tuple(
        said.flag(word) for word in ("hybrid_context", "rank_tokens")[: 1 if shared else 2]
    )


def _experts(said: Said, default_etp: int) -> dict[str, Any]:
    dispatcher, backend = said["dispatcher"], said["flex_backend"]
    if backend not in DISPATCHERS:
        backend = "deduplicated"
    plain = "allgather" if dispatcher == "allgather" else "alltoall"
    return {
        "ep": said["ep"],
        "etp": said.get("etp", default_etp),
        "moe_dispatch": backend if dispatcher == "flex" else plain,
    }


def _numerics(said: Said) -> dict[str, Any]:
    """Types of gradients, moments and parameters. Without a flag gradients are those of the stack.

    Those of Megatron-FSDP have a flag of their own, and without it the type of the parameters
    (megatron_fsdp/param_and_grad_buffer.py, _resolve_group_grad_dtype).
    """
    settings: dict[str, Any] = {}
    sharded, sharded_sums = said["fsdp"], said["fsdp_gradients"]
    if sharded and sharded_sums == "auto":
        sharded_sums = "fp16" if said["fp16"] else "bf16"
    if sharded:
        said["narrow_sums"]
        settings["gradient_dtype"] = sharded_sums
    elif said["narrow_sums"]:
        settings["gradient_dtype"] = "bf16"
    elif said.line.has("--accumulate-allreduce-grads-in-fp32"):
        settings["gradient_dtype"] = "fp32"
    said["precision_aware"]
    moments = {said["moment_dtype"], said["square_dtype"]}
    if moments == {"bf16"}:
        settings["moment_dtype"] = "bf16"
    said["gathers_over_gradients"]
    gathered = [said["fp8_params"], said["fp4_params"]]
    return settings | ({"fp8_params": True} if any(gathered) else {})


def _offloaded_percent(said: Said) -> int:
    """Of the optimizer's states, to a whole number. The share is 1 where the switch stands alone."""
    said["overlaps_offload"]
    share = said["offloaded_share"]
    if said["cpu_optimizer"]:
        return 100
    return round(100 * share) if said["optimizer_offload"] else 0


def _precision(said: Said) -> str:
    recipe, fp16 = said["fp8_recipe"], said["fp16"]
    if said["fp4_format"]:
        said["fp4_recipe"]
        return "nvfp4"
    if said["fp8_format"]:
        return "mxfp8" if recipe == "mxfp8" else "fp8"
    return "fp16" if fp16 else "bf16"


def _optimizer(said: Said) -> dict[str, Any]:
    """The optimizer, and what tensor ranks do under Muon where it is not the default."""
    pieces, default = said["muon_pieces"], ARGUMENTS["muon_pieces"].default
    settings = {"optimizer": str(said["optimizer"]).removeprefix(_LAYER_WISE)}
    return settings if pieces == default else settings | {"muon_tp_mode": pieces}


_LAYER_WISE = "dist_"
"""What older versions put before an optimizer whose states are sharded (megatron/training/arguments.py)."""


def _zero_stage(said: Said) -> int:
    strategy, distributed = said["sharding"], said["distributed_optimizer"]
    distributed = distributed or str(said["optimizer"]).startswith(_LAYER_WISE)
    if said["fsdp"]:
        return _SHARDED.get(strategy, 3)
    if said.line.has("--use-torch-fsdp2"):
        return 2 if said.line.has("--torch-fsdp2-no-reshard-after-forward") else 3
    return int(said.get("zero_stage", 1 if distributed else 0))


def _recompute(said: Said) -> dict[str, Any]:
    switched_on = [said["recomputes_all"], said["checkpoints"]]
    kind = said.get("recompute", "full" if any(switched_on) else "none")
    if said.line.has("--recompute-activations"):
        kind = "selective"
    if kind == "selective":
        return {
            "recompute": kind,
            "recompute_modules": said.get("recompute_modules", ["core_attn"]),
        }
    if kind != "full":
        return {"recompute": "none"}
    layers = said["recompute_layers"]
    if said["recompute_method"] == "block" and layers:
        return {"recompute": kind, "recompute_layers": layers}
    inputs = {"offload_modules": ["layer_inputs"]} if said["offloads_inputs"] else {}
    return {"recompute": kind, **inputs}


def _stages(said: Said, pp: int, layers: int) -> dict[str, Any]:
    """Virtual stages and, where it is not even, the split of the layers."""
    if pp == 1 and said["deepspeed_engine"]:
        said["pipelined"]  # one stage needs no pipeline engine
    line = said.line
    pattern = hybrid_pattern(said)
    if pattern is not None and "|" in pattern:
        chunks = pattern.partition("/")[0].split("|")
        return _chunk_stages(tuple(map(len, chunks)), pp, line.where)
    if said["layout"] is not None:
        return _written_stages(said, pp)
    ends = [flag for flag in _END_SLOTS if line.words.count(flag)]
    vpp = said["vpp"]
    layers_per_chunk = line.integer("--num-layers-per-virtual-pipeline-stage", 0)
    if layers_per_chunk:
        vpp = layers // (pp * layers_per_chunk)
    first = line.integer("--decoder-first-pipeline-num-layers", 0)
    last = line.integer("--decoder-last-pipeline-num-layers", 0)
    if pp > 1 and (first or last):
        return _uneven_stages(_uneven_ends(layers, pp, first, last), max(vpp, 1), line.where)
    settings: dict[str, Any] = {"vpp": vpp} if vpp > 1 else {}
    if len(ends) == len(_END_SLOTS):
        for flag in ends:
            line.has(flag)
        settings["layer_split"] = "embedding and LM head each occupy one layer slot"
    return settings


def _refuse_together(said: Said, settings: Mapping[str, Any]) -> None:
    """Raise InputError for flags that Megatron refuses beside others, or without them.

    megatron/training/arguments.py, validate_args; megatron/core/transformer/transformer_config.py and
    model_parallel_config.py, __post_init__ (megatron-core 0.19.2).
    """
    words = said.line.words
    layout, fsdp = said.flag("layout"), said.flag("fsdp")
    graphs, graph = said.flag("graph_kind"), said["graph_kind"]
    is_cut = layout in words or "|" in (hybrid_pattern(said) or "")
    is_sharded, shards = fsdp in words, said["checkpoint_format"] == _OF_MEGATRON_FSDP

    def needs(word: str) -> tuple[bool, str]:
        return said.flag(word) in words, f"needs {said.flag(word)}"

    rules: tuple[tuple[Sequence[str], tuple[bool, str]], ...] = (
        (_OTHER_SPLITS, (not is_cut, f"stands beside {layout} or a pattern that is cut")),
        (_OF_PIPELINES, (settings["pp"] > 1, "needs several pipeline stages")),
        (_OF_VIRTUAL_STAGES, (settings.get("vpp", 1) > 1, "needs virtual stages")),
        (_OF_TENSOR_GROUPS, (settings["tp"] > 1, "needs tensor parallelism")),
        (_OF_TENSOR_GROUPS, (settings["recompute"] == "full", "needs full recomputation")),
        (
            (*_OF_VIRTUAL_STAGES, said.flag("overlaps_gathers")),
            (settings["zero_stage"] > 0, "needs the distributed optimizer"),
        ),
        (_OLD_GRAPHS, (graph in (None, "none"), f"stands beside {graphs}")),
        (
            ("--cuda-graph-modules",),
            (graph != "full_iteration", f"stands beside {graphs} full_iteration"),
        ),
        (
            (graphs,),
            (
                graph != "full_iteration" or _UNCHECKED in words,
                f"full_iteration needs {_UNCHECKED}",
            ),
        ),
        (_DELAYED, needs("overlap.ep")),
        ((said.flag("overlap.ep"),), (said["ep"] > 1, "needs expert parallelism")),
        ((said.flag("overlaps_gathers"),), needs("overlap.dp")),
        ((said.flag("optimizer_offload"),), needs("precision_aware")),
        ((said.flag("checkpoint_format"),), (is_sharded or not shards, f"needs {fsdp}")),
        ((fsdp,), (shards, f"needs {said.flag('checkpoint_format')} {_OF_MEGATRON_FSDP}")),
    )
    for flags, (holds, what) in rules:
        for flag in flags:
            if flag in words and not holds:
                raise InputError(f"{what}: Megatron refuses it", where=f"{said.line.where}: {flag}")


def _written_stages(said: Said, pp: int) -> dict[str, Any]:
    chunks = layers_of_layout(said["layout"])
    if chunks is None:
        raise said.error("layout", "must be a layout of E, t, m, L and |", said["layout"])
    return _chunk_stages(chunks, pp, said.line.where)


def _chunk_stages(chunks: tuple[int, ...], pp: int, where: str) -> dict[str, Any]:
    """Stages of chunks that are written in the order of the model."""
    if len(chunks) % pp:
        raise InputError(f"has {len(chunks)} stages, which pp {pp} does not divide", where=where)
    stages = [list(chunks[rank::pp]) for rank in range(pp)]
    return {"vpp": len(chunks) // pp, "stages": stages}


def _uneven_stages(ranks: list[int], vpp: int, where: str) -> dict[str, Any]:
    """Stages of ranks whose virtual stages are alike.

    Megatron refuses other numbers of layers (megatron/core/transformer/transformer_block.py,
    get_num_layers_to_build).
    """
    uneven = [count for count in ranks if count % vpp]
    if uneven:
        what = (
            f"has a pipeline stage of {uneven[0]} layers, which {vpp} virtual stages do not divide"
        )
        raise InputError(what, where=where)
    settings: dict[str, Any] = {"stages": [[count // vpp] * vpp for count in ranks]}
    return settings | ({"vpp": vpp} if vpp > 1 else {})


def _uneven_ends(layers: int, pp: int, first: int, last: int) -> list[int]:
    """Layers of each stage; a first or last of 0 is like the stages between."""
    front = [first] if first else []
    back = [last] if last else []
    between = pp - len(front) - len(back)
    size = (layers - first - last) // between if between else 0
    return [*front, *[size] * between, *back]


# Overrides of a Megatron-Bridge recipe, as the flags of Megatron-LM that they stand for.
#
# They set degrees, schedule and execution of a recipe, whose model they do not name (megatron-bridge 0.6.2).


_REPEATED = ("dataset.", "dist.", "checkpoint.")
"""Sections that say once more what others say."""
_ARGUMENTS = {
    name: MEGATRON_ARGUMENTS[word]
    for name, word in BRIDGE_OVERRIDES
    if word in MEGATRON_ARGUMENTS and not name.startswith(_REPEATED)
}
_OVERRIDES = {word: name for name, word in BRIDGE_OVERRIDES}
_LOSS, _ATTENTION = _OVERRIDES["loss"], _OVERRIDES["fp8_attention"]
_SUMS, _PRECISION = _OVERRIDES["wide_sums"], _OVERRIDES["precision"]
FREEZES = ("model.freeze_vision_model", "model.freeze_vision_projection")
"""What leaves the image encoder and its projector as they are (models/qwen_vl/qwen25_vl_provider.py)."""
_OF_ADAPTERS = (ADAPTER_RANK, ADAPTED_MODULES, SHARES_EXPERT_ADAPTERS)
READ_APART = (*FREEZES, *_OF_ADAPTERS)
"""Overrides of what is trained."""
_OF_THE_RECIPE = (
    "what the overrides leave out is priced as Megatron-LM has it: the recipe may have it otherwise"
)
_FEED_FORWARDS = ("linear_fc1", "linear_fc2")
_INSIDE = dict(zip(_FEED_FORWARDS, _FEED_FORWARDS, strict=True)) | {
    f"*.{place}.{name}": EXPERTS if place == "experts" else matrix
    for place in ("mlp", "shared_experts", "experts")
    for name, matrix in zip(_FEED_FORWARDS, ("gate_up_proj", "down_proj"), strict=True)
}
"""Matrices of modules that are named by what they stand in, as those of feed-forwards are alike."""
_READ_OTHERWISE = frozenset((_LOSS, _ATTENTION, _SUMS, _PRECISION))
"""Overrides that are no flag of Megatron, and are read apart."""


def are_overrides(document: object) -> bool:
    """Whether a document is a list of `section.field=value`."""
    return (
        isinstance(document, list)
        and bool(document)
        and all(isinstance(word, str) and "=" in word and word[:1] != "-" for word in document)
    )


def from_overrides(words: Sequence[str], model: ModelSpec | str | None, where: str) -> LaunchRun:
    """The run of a recipe of a model, or of its name, under overrides. Raises InputError without one.

    Parameters
    ----------
    words
        `section.field=value`, the recipe's or the user's.
    model
        Or its name; None where nobody says.
    where
        The file's name, for messages.
    """
    if model is None:
        raise InputError(
            "overrides of a recipe do not say which model it trains: add --with model=...",
            where=where,
        )
    said = dict(word.partition("=")[::2] for word in words)
    adapters = _adapters(said, where)
    overrides = {name: value for name, value in said.items() if name not in READ_APART}
    run = from_megatron(CommandLine(_words(overrides), where), read_model(model), sized=False)
    settings: dict[str, Any] = dict(run.settings)
    if _LOSS in overrides:
        settings["fused_loss"] = overrides[_LOSS] == "te"
    if adapters is not None:
        settings["adapters"] = adapters
    if overrides.get(_ATTENTION) == "true":
        settings["recipe"] = {"fp8_attention": True}
    not_read = (
        name
        for name, value in overrides.items()
        if not _flag_of(name)
        and name not in _READ_OTHERWISE
        and not has_no_effect("bridge", name, value)
    )
    switches = {name: said.get(name) == "true" for name in FREEZES}
    usual = dict.fromkeys(FREEZES, False)
    images = image_fields(switches, usual, (), has_adapters=False)
    unread = (*run.unread, *not_read)
    # Those that a plan writes leave out nothing that it decides.
    remarks = () if BRIDGE_RESETS.keys() <= said.keys() else (_OF_THE_RECIPE,)
    return LaunchRun(
        settings=settings, model=run.model, unread=unread, images=images, remarks=remarks
    )


def _adapters(said: Mapping[str, str], where: str) -> dict[str, Any] | None:
    """LoRA by the overrides of a recipe's `peft`, as a run file has it; None without.

    Raises InputError for a width or a module that is not known, and for one without the other.
    """
    if not {*_OF_ADAPTERS} & said.keys():
        return None
    rank = said.get(ADAPTER_RANK, "")
    if not rank.isdecimal():
        raise InputError(
            "is the width of adapters, a whole number", where=f"{where}: {ADAPTER_RANK}", value=rank
        )
    if ADAPTED_MODULES not in said:
        what = f"adapters of modules that the recipe says: give {ADAPTED_MODULES} too"
        raise InputError(what, where=f"{where}: {ADAPTER_RANK}", value=rank)
    modules = [name.strip() for name in said[ADAPTED_MODULES].strip("[]'\"").split(",")]
    matrices = BRIDGE_MODULES | _INSIDE
    for name in modules:
        place = f"{where}: {ADAPTED_MODULES}"
        check_choice(name, matrices, place, "is no module that plans know")
    targets = [matrices[name] for name in modules]
    return {"method": "lora", "rank": int(rank), "targets": list(dict.fromkeys(targets))}


def _flag_of(name: str) -> str | None:
    """The flag of Megatron; other fields of the model are called like theirs, `model.name` like `--name`."""
    section, _, field = name.partition(".")
    argument = _ARGUMENTS.get(name)
    # A switch that says no has another name where it is a field.
    if argument is not None and argument.default is not True:
        return argument.flag
    return f"--{field.replace('_', '-')}" if section == "model" and name != _LOSS else None


def _words(overrides: Mapping[str, str]) -> Iterator[str]:
    """The command line of Megatron that overrides stand for."""
    flags: dict[str, str] = {}
    for name in sorted(overrides, key=lambda name: name.startswith("comm_overlap.")):
        flag = _flag_of(name)
        if flag is not None:
            flags[flag] = overrides[name].strip("'\"")
    named = overrides.get(_PRECISION, "").removesuffix("_mixed")
    if named in ("bf16", "fp16"):
        flags[MEGATRON_ARGUMENTS[named].flag] = "true"
    if overrides.get(_SUMS) == "false":
        flags[MEGATRON_ARGUMENTS["narrow_sums"].flag] = "true"
    for flag, value in flags.items():
        if value in ("false", "null"):
            continue
        yield flag
        if value != "true":
            yield from value.strip("[]").split(",") if value.startswith("[") else (value,)


# Megatron-Bridge's performance recipes by name, from bridge_recipes.yaml beside this file.


@cache
def recipe_names() -> tuple[str, ...]:
    """The names of the recipes whose model and machine are in the catalog."""
    return tuple(_recipes())


def is_recipe_name(path: Path) -> bool:
    """Whether a path is no file and reads like the name of a recipe."""
    name = str(path)
    return name.endswith("_config") and "gpu_" in name and not path.exists()


def recipe_run(name: str) -> LaunchRun:
    """What a recipe says of its run.

    Parameters
    ----------
    name
        Such as `llama31_405b_pretrain_1024gpu_h100_bf16_config`.

    Raises
    ------
    InputError
        No recipe of that name is known.
    """
    if name not in _recipes():
        raise InputError(
            "no such recipe of Megatron-Bridge is known, nor a file of that name",
            where="--from-launch",
            value=name,
            did_you_mean=near_miss(name, recipe_names()),
        )
    recipe = _recipes()[name]
    model = load_catalog_model(recipe["model"])
    line = CommandLine(recipe["flags"].split(), name)
    run = from_megatron(line, model, sized=False)
    settings = {**run.settings, "gpus": recipe["gpus"]}
    return LaunchRun(settings=settings, model=recipe["model"], cluster=recipe["cluster"])


@cache
def _recipes() -> dict[str, dict[str, Any]]:
    recipes: dict[str, dict[str, Any]] = packaged_document(
        "meshwright.planner.runs.launches", "bridge_recipes.yaml"
    )
    return recipes
