"""A plan as a torchtitan launch: flags and the registry module (read in torchtitan 0.3.0)."""

from __future__ import annotations

import json
from itertools import islice
from textwrap import dedent, indent

from meshwright.constraints.frameworks import registry_flavor
from meshwright.costmodel.schedules import schedule_named, traits
from meshwright.frameworks.torchtitan import CHECKPOINTING, TORCHTITAN, TORCHTITAN_ARGUMENTS
from meshwright.model_specs.schema import ModelSpec, stated_fields
from meshwright.planner.launch.writer import (
    Launch,
    Program,
    Shortfalls,
    Start,
    Writer,
    flag_words,
    flags_of,
    json_file,
    notes_of,
    said_of_degrees,
)
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.run_terms import LayoutDoc

# The registry module that gives torchtitan a plan's model and pipeline split (torchtitan 0.3.0).
#
# torchtitan takes its model from a Python function, not from flags; degrees and batch are flags.


MODULE = "meshwright_registry"
FUNCTION = "planned"

_HEAD = '''\
"""Model and pipeline split of a plan, for torchtitan: --module meshwright_registry --config planned."""

from functools import partial

import torch.nn as nn
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer

'''

_BUILT = """\
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import {rope_class}, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import (
    get_attention_config, make_ffn_config, make_gqa_config, make_moe_config, make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.param_init import depth_scaled_std, skip_param_init
from torchtitan.models.{family} import {adapter}, {model_class}, {parallelize}
from torchtitan.models.{family} import {block_class}
from torchtitan.protocols.model_spec import ModelSpec

DIM, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = {dim}, {heads}, {kv_heads}, {head_dim}, {vocab}, {layers}
NORMAL = partial(nn.init.trunc_normal_, std=0.02)
LINEAR = {{"weight": NORMAL, "bias": nn.init.zeros_}}


def norm(width):
    return RMSNorm.Config(normalized_shape=width, eps={epsilon}, param_init={{"weight": nn.init.ones_}})


def layer(index):
    scaled = partial(nn.init.trunc_normal_, std=depth_scaled_std(0.02, index))
    deep = {{"weight": scaled, "bias": nn.init.zeros_}}
    return {block_class}.Config(
        attention_norm=norm(DIM),
        ffn_norm=norm(DIM),
        attention=make_gqa_config(
            dim=DIM, n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM, wqkv_param_init=LINEAR,
            wo_param_init=deep, inner_attention=get_attention_config("flex"), fuse_qkv=True,
            rope={rope_class}.Config(dim=HEAD_DIM, max_seq_len={max_seq_len}, {rope}),
            qk_norm={qk_norm},
        ),
{feed_forward}
    )


def model_spec(converters):
    config = {model_class}.Config(
        dim=DIM,
        vocab_size=VOCAB,
        enable_weight_tying={tied},
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB, embedding_dim=DIM, param_init={{"weight": {embedding_init}}}
        ),
        norm=norm(DIM),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB, param_init=LINEAR),
        layers=[layer(index) for index in range(LAYERS)],
    )
    for converter in converters:
        config = converter.build().convert(config)
    return ModelSpec(
        name="{family}", flavor={name}, model=config, parallelize_fn={parallelize},
        pipelining_fn=pipeline_llm, post_optimizer_build_fn=None, state_dict_adapter={adapter},
    )

"""

_DENSE = """\
        feed_forward=make_ffn_config(
            dim=DIM, hidden_dim={ffn}, w1_param_init=LINEAR, w2w3_param_init=deep
        ),"""

_EXPERTS = """\
        moe=make_moe_config(
            num_experts={experts},
            router=make_router_config(
                dim=DIM, num_experts={experts}, gate_param_init=LINEAR, top_k={top_k}, score_func="{score}",
                route_norm={normalized}, route_scale={scale},
            ),
            routed_experts=make_routed_experts_config(
                dim=DIM, hidden_dim={width}, num_experts={experts}, top_k={top_k}, comm_backend="standard",
                param_init={{"w1_EFD": NORMAL, "w2_EDF": NORMAL, "w3_EFD": NORMAL}},
            ),
        ),"""

_FLAVOR = """\
from torchtitan.models.{family} import model_registry


def model_spec(converters):
    return model_registry({flavor}, converters=converters or None{mtp})

"""

_TAIL = '''
STAGES = {stages}


def planned() -> Trainer.Config:
    """The plan's configuration; data, tokenizer and learning rate are flags of the command line."""
{converters}
    spec = model_spec(converters)
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        model_spec=spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        parallelism=ParallelismConfig(module_fqns_per_model_part=STAGES),
    )
'''

_CONVERTERS = {
    "bf16": "converters = []",
    "fp8": """\
from torchtitan.components.quantization import Float8LinearConverter

converters = [Float8LinearConverter.Config(model_compile_enabled=True)]""",
    "mxfp8": """\
from torchtitan.components.quantization import MXFP8LinearConverter

converters = [MXFP8LinearConverter.Config(model_compile_enabled=True)]""",
}


_EPSILON = {"norm_epsilon": "Norms add 1e-05 under the root (torchtitan's own registry)."}
_BALANCE = {
    "moe.router_bias": "Routers have a bias that balances experts (torchtitan's load_balance_coeff)."
}
_REGISTRY_DEVIATIONS: dict[tuple[str, str], dict[str, str]] = {
    ("deepseek_v3", "671B"): _EPSILON,
    ("deepseek_v3", "16B"): _EPSILON | _BALANCE,
    ("deepseek_v3", "debugmodel"): _EPSILON | _BALANCE,
    ("deepseek_v3", "236B"): _EPSILON
    | _BALANCE
    | {"rope.scaling.mscale": "YaRN's mscale is 1 (torchtitan's own registry)."},
    ("gpt_oss", "20b"): _BALANCE,
    ("gpt_oss", "120b"): _BALANCE,
}
"""Where torchtitan/models/deepseek_v3/__init__.py departs from the published configuration."""
_NAMES = """
layers hidden ffn_hidden heads kv_heads head_dim vocab tied_embeddings qk_norm full_attention_every
norm_epsilon rope.base rope.scaling.type rope.scaling.factor rope.scaling.original_positions
rope.scaling.low_freq_factor rope.scaling.high_freq_factor rope.scaling.beta_fast
rope.scaling.beta_slow rope.scaling.whole_range moe.experts moe.top_k moe.moe_ffn_hidden
moe.router_score moe.router_normalized moe.router_scaling_factor
"""
TORCHTITAN_SAYS = frozenset(_NAMES.split())
"""Fields of a model that the registry module carries where it builds the model itself."""


def registry_module(plan: Plan, layout: LayoutDoc) -> str:
    """The text of meshwright_registry.py. Its rules have let the model through.

    Parameters
    ----------
    plan
        For the model, the precision and the length of sequences.
    layout
        Whose pipeline the module splits the model for.
    """
    model = plan.inputs.model
    converters = indent(_CONVERTERS[plan.inputs.precision], "    ")
    stages = pipeline_modules(layout)
    parts = "None"
    if stages is not None:
        parts = "[\n" + "".join(f"    {json.dumps(part)},\n" for part in stages) + "]"
    tail = _TAIL.format(stages=parts, converters=converters)
    return _HEAD + _model_part(model, plan.inputs.seq_len) + tail


def pipeline_modules(layout: LayoutDoc) -> list[list[str]] | None:
    """Module names of every chunk, in the model's order; None without a pipeline.

    Chunk v of rank r is the (v pp + r)-th, or in a V-shaped schedule the second one the (2 pp - 1 - r)-th.

    Parameters
    ----------
    layout
        With the layers of every chunk, and the schedule that says which rank runs which chunk.
    """
    if layout.pp == 1:
        return None
    v_shaped = traits(schedule_named(layout.schedule)).v_shaped
    counts: list[int] = []
    for chunk in range(layout.vpp):
        row = [rank[chunk] for rank in layout.stages]
        counts += reversed(row) if v_shaped and chunk else row
    layers = (f"layers.{index}" for index in range(sum(counts)))
    parts = [list(islice(layers, count)) for count in counts]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


def torchtitan_notes(model: ModelSpec) -> tuple[str, ...]:
    """Where the module trains another network than the specification.

    Parameters
    ----------
    model
        The model to be trained, from torchtitan's registry or built of its parts.
    """
    flavor = registry_flavor(model)
    if flavor is None:
        return notes_of(model, TORCHTITAN_SAYS, _built_shortfalls(model))
    built, stated = stated_fields(flavor.model), stated_fields(model)
    same = {name for name, value in stated.items() if built.get(name) == value}
    added = {
        name: f"{name} is {value} (torchtitan's own registry)."
        for name, value in built.items()
        if name not in stated and name != "mtp_layers"
    }
    deviations = added | _REGISTRY_DEVIATIONS.get((flavor.family, flavor.name), {})
    return notes_of(model, {*same, "mtp_layers"} - deviations.keys(), deviations)


def _built_shortfalls(model: ModelSpec) -> Shortfalls:
    differing: dict[str, str] = {}
    if model.moe is not None and not model.moe.router_bias:
        differing |= _BALANCE
    if model.norms_after_blocks:
        differing["norms_after_blocks"] = (
            "Norms come before attention and feed-forward, not after them."
        )
    if model.qk_norm_full_width:
        differing["qk_norm_full_width"] = (
            "Query and key norms work head by head, not over all heads together."
        )
    if model.sliding_window is not None:
        differing["sliding_window"] = "Every layer attends in full: the sliding window is left out."
    scaling = model.rope.scaling
    if scaling is not None and not _rope_scaling_arguments(model):
        differing["rope.scaling"] = f"Rope scaling {scaling.type} is left out."
    elif scaling is not None and scaling.type == "yarn":
        differing["rope.scaling"] = "YaRN's temperature on the attention scores is left out."
    return differing


def _rope_scaling_arguments(model: ModelSpec) -> tuple[str, ...]:
    """Arguments of torchtitan's RoPE; none where it cannot scale so (torchtitan/models/common/rope.py)."""
    scaling = model.rope.scaling
    if scaling is not None and scaling.type == "llama3" and not _as_qwen(model):
        return (
            'scaling="llama"',
            f"scaling_factor={scaling.factor}",
            f"low_freq_factor={scaling.low_freq_factor}",
            f"high_freq_factor={scaling.high_freq_factor}",
            f"original_max_position_embeddings={scaling.original_positions}",
        )
    if scaling is not None and scaling.type == "yarn":
        return (
            'scaling="yarn"',
            f"rope_factor={scaling.factor}",
            f"beta_fast={scaling.beta_fast}",
            f"beta_slow={scaling.beta_slow}",
            f"original_seq_len={scaling.original_positions}",
            f"truncate={scaling.whole_range}",
        )
    return ()


def _as_qwen(model: ModelSpec) -> bool:
    """Whether the model is built of Qwen3's parts, whose rope has no Llama scaling; else of Llama 3's."""
    return model.qk_norm or model.moe is not None


def _model_part(model: ModelSpec, seq_len: int) -> str:
    flavor = registry_flavor(model)
    if flavor is None:
        return _built_model(model, seq_len)
    mtp = ""
    if flavor.family == "deepseek_v3" and model.mtp_layers:
        mtp = f", num_mtp_layers={model.mtp_layers}"
    return _FLAVOR.format(family=flavor.family, flavor=json.dumps(flavor.name), mtp=mtp)


def _built_model(model: ModelSpec, seq_len: int) -> str:
    qwen = _as_qwen(model)
    stem = "Qwen3" if qwen else "Llama3"
    moe = model.moe
    if moe is None:
        feed_forward = _DENSE.format(ffn=model.ffn_hidden)
    else:
        feed_forward = _EXPERTS.format(
            experts=moe.experts,
            top_k=moe.top_k,
            width=moe.moe_ffn_hidden,
            score=moe.router_score,
            normalized=moe.router_normalized,
            scale=moe.router_scaling_factor,
        )
    return dedent(_BUILT).format(
        family="qwen3" if qwen else "llama3",
        rope_class="CosSinRoPE" if qwen else "ComplexRoPE",
        adapter=f"{stem}StateDictAdapter",
        model_class=f"{stem}Model",
        block_class=f"{stem}TransformerBlock",
        parallelize="parallelize_qwen3" if qwen else "parallelize_llama",
        dim=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.qk_head_dim,
        vocab=model.vocab,
        layers=model.layers,
        max_seq_len=max(seq_len, 8192),
        epsilon=model.norm_epsilon,
        rope=", ".join((f"theta={model.rope.base}", *_rope_scaling_arguments(model))),
        qk_norm="norm(HEAD_DIM)" if model.qk_norm else "None",
        feed_forward=feed_forward,
        tied=model.tied_embeddings,
        embedding_init="skip_param_init" if model.tied_embeddings else "nn.init.normal_",
        name=json.dumps(model.name),
    )


def torchtitan_args(launch: Launch) -> list[str]:
    """Flags of torchtitan's trainer: module, degrees, batch, recomputation, compilation.

    Its mesh is pp, dp, cp, tp from the outside: the order of the plan's ranks.

    Parameters
    ----------
    launch
        A plan that keeps torchtitan's rules.
    """
    layout, inputs = launch.layout, launch.inputs
    piped, offloads = layout.pp > 1, layout.optimizer_offload > 0
    replicas = layout.shard_groups if layout.zero_stage > 0 else layout.dp
    said = said_of_degrees(layout, experts=True) | {
        "module": MODULE,
        "configuration": FUNCTION,
        "replicas": replicas,
        "shards": layout.dp // replicas,
        "reshard": TORCHTITAN.zero_stages[3 if layout.zero_stage == 3 else 2].value,
        "local_batch": layout.micro_batch * (layout.num_micro_batches if piped else 1),
        "global_batch": inputs.global_batch,
        "seq_len": inputs.seq_len,
        "sequence_parallel": layout.sequence_parallel or layout.tp == 1,
        # Graphs go neither around pipelines nor around the standard expert dispatcher or the host's sums.
        "cuda_graphs": not (piped or layout.ep > 1 or offloads),
        "offloads": offloads,
        "compiled": launch.execution.compiled,
    }
    if piped:
        said["schedule"] = TORCHTITAN.schedules[layout.schedule].value
    else:
        said["micro_batch"] = None
    # The subcommand comes last: what follows it would be read as its own flags.
    checkpointing = "full" if layout.recompute == "full" else "none"
    flags = flags_of(TORCHTITAN_ARGUMENTS.values(), said)
    return [*flag_words(flags), f"{CHECKPOINTING}{checkpointing}"]


def torchtitan_start(launch: Launch) -> Start:
    """torchtitan's trainer with the plan's flags, and the module that gives it model and stages.

    Parameters
    ----------
    launch
        A plan that keeps torchtitan's rules.
    """
    args = torchtitan_args(launch)
    program = Program(
        framework=TORCHTITAN.title,
        command="-m torchtitan.train",
        usage="More arguments go ahead of activation-checkpoint in args below, or into the registry module.",
        before='export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"\n',
        notes=torchtitan_notes(launch.inputs.model),
    )
    files = {
        "torchtitan_args.json": json_file(args),
        f"{MODULE}.py": registry_module(launch.plan, launch.layout),
    }
    return Start(program=program, args=args, files=files)


TORCHTITAN_WRITER = Writer(framework=TORCHTITAN, start=torchtitan_start)
