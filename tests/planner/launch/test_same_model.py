"""What a model's specification states is in a framework's launch, or in a note of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from pydantic import ValidationError

from meshwright.errors import InfeasibleError
from meshwright.frameworks.catalog import framework_named
from meshwright.frameworks.record import FrameworkName
from meshwright.model_specs.reader import catalog_names, load_catalog_model, read_model
from meshwright.model_specs.schema import ModelSpec, stated_fields
from meshwright.planner.launch.configurations import deepspeed_start
from meshwright.planner.launch.megatron import (
    MEGATRON_SAYS,
    megatron_shortfalls,
    megatron_start,
    model_flags,
)
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.launch.torchtitan import torchtitan_start
from meshwright.planner.launch.writer import Launch, Start, flag_words, legal_launch, notes_of
from meshwright.planner.runs.launches.reader import read_launch
from tests.places import DATA
from tests.plans import make_plan

COMMON: dict[str, Any] = {
    "layers": 8,
    "hidden": 1024,
    "ffn_hidden": 4096,
    "heads": 8,
    "kv_heads": 4,
    "vocab": 32_000,
}
SLOW = (pytest.mark.slow,)
HAND_MADE: dict[str, dict[str, Any]] = {
    "exact GELU": {
        "activation": "gelu",
        "gelu_form": "exact",
        "mlp_bias": True,
        "attention_bias": True,
        "attention_output_bias": True,
    },
    "interpolated": {"rope": {"scaling": {"type": "linear", "factor": 4}}},
    "the first in full": {"sliding_window": 512, "attention_order": "FFWWWWWW"},
    "full before windowed": {"sliding_window": 512, "attention_order": "FWFWFWFW"},
    "linear in the middle": {
        "linear_attention": {
            "key_heads": 4,
            "value_heads": 8,
            "key_head_dim": 64,
            "value_head_dim": 64,
        },
        "attention_order": "FLLLLLLF",
    },
    "YaRN without temperature": {
        "rope": {"scaling": {"type": "yarn", "factor": 4, "attention_factor": 1.0}}
    },
    "YaRN with a temperature of its own": {
        "rope": {"scaling": {"type": "yarn", "factor": 4, "attention_factor": 0.8}}
    },
    "clamped": {"glu_limit": 5, "glu_offset": 0.5},
    "OLMo 3": {
        "norms_after_blocks": True,
        "qk_norm": True,
        "qk_norm_full_width": True,
        "sliding_window": 512,
        "full_attention_every": 4,
    },
    "Llama 4": {
        "qk_norm": True,
        "qk_norm_weights": False,
        "sliding_window": 512,
        "full_attention_every": 4,
        "chunked_windows": True,
    },
    "Llama 4 Maverick": {
        "moe": {
            "experts": 8,
            "top_k": 1,
            "moe_ffn_hidden": 512,
            "every": 2,
            "router_score": "sigmoid",
        },
    },
    "Gemma": {
        "activation": "geglu",
        "norms_per_layer": 4,
        "norm_zero_centered": True,
        "embedding_scale": 32,
        "attention_scale": 0.0625,
        "attention_logit_cap": 50,
        "final_logit_cap": 30,
        "tied_embeddings": True,
        "sliding_window": 512,
        "full_attention_every": 6,
        "rope": {"base": 1_000_000, "windowed_base": 10_000},
    },
}


def megatron_has_layers_of(model: ModelSpec) -> bool:
    """Whether arguments say more of the model's layers than that they are other ones."""
    windowed, linear = model.window_heads, model.linear_attention
    unlike_heads = windowed is not None and (windowed.heads is not None or windowed.sinks)
    has_kda = linear is not None and linear.type == "kda"
    return not (model.mamba_beside_attention or model.layer_inputs or unlike_heads or has_kda)


def models() -> list[ParameterSet]:
    """The catalog but for what Megatron has no layer for, and models with fields that none of it has."""
    made = [ModelSpec(name=name, **COMMON, **fields) for name, fields in HAND_MADE.items()]
    catalog = map(load_catalog_model, catalog_names())
    known = [model for model in catalog if megatron_has_layers_of(model)]
    return [
        *(
            pytest.param(model, marks=() if at % 4 == 0 else SLOW, id=model.name)
            for at, model in enumerate(known)
        ),
        *(pytest.param(model, id=model.name) for model in made),
    ]


def words(model: ModelSpec) -> list[str]:
    return flag_words(model_flags(model, 4096))


def at_default(model: ModelSpec, name: str) -> ModelSpec:
    """The model with a field, of this dotted name, as if it had not been stated."""
    first, _, rest = name.partition(".")
    part = getattr(model, first)
    value = at_default(part, rest) if rest else type(model).model_fields[first].default
    return model.model_copy(update={first: value})


@pytest.mark.parametrize("model", models())
def test_megatron_says_every_field_or_notes_it(model: ModelSpec) -> None:
    shortfalls = megatron_shortfalls(model)
    notes = notes_of(model, MEGATRON_SAYS, shortfalls)
    for name in stated_fields(model):
        assert name in MEGATRON_SAYS or any(name.startswith(key) for key in shortfalls), notes
        default = at_default(model, name)
        if not has_default(model, name) or name in SAME_EITHER_WAY or alike_anyhow(model, default):
            continue
        said_or_noted = (words(model), megatron_shortfalls(model))
        assert said_or_noted != (words(default), megatron_shortfalls(default)), name


LAYER_TYPES = {"F": "full_attention", "W": "sliding_attention"}


@pytest.mark.parametrize(
    ("order", "flag"),
    [
        ("F" * 7 + "W" * 21, "([0]*7+[1]*21)"),
        ("FW" * 14, "([0,1]*14)"),
        ("WF" * 14, "2"),
        ("W" * 28, None),
        ("FWW" + "F" * 25, "([0]*1+[1]*2+[0]*25)"),
    ],
)
def test_a_config_s_order_of_windows_reaches_the_launch(
    order: str, flag: str | None, tmp_path: Path
) -> None:
    """By transformers' own list: Megatron evaluates the flag as a list with 1 for a windowed layer."""
    config = json.loads((DATA / "hf_configs" / "qwen2.5-7b.json").read_text(encoding="utf-8"))
    config |= {"use_sliding_window": True, "sliding_window": 1024}
    config["layer_types"] = [LAYER_TYPES[letter] for letter in order]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    said = words(read_model(path))
    at = "--window-attn-skip-freq"
    assert (said[said.index(at) + 1] if at in said else None) == flag
    windows: Any = (
        eval(flag) if flag is not None and "[" in flag else [int(x == "W") for x in order]
    )
    assert windows == [int(letter == "W") for letter in order]


@pytest.mark.parametrize("factor", [0.75, 1.0, 1.2, 1.0 + 0.1 * math.log(4)])
@pytest.mark.parametrize("of_all", [None, 0.5])
def test_yarn_s_temperature_is_what_megatron_makes_of_its_flags(
    factor: float, of_all: float | None
) -> None:
    """g(mscale) / g(mscale_all_dim) with g(m) = 0.1 m ln(factor) + 1 (yarn_rotary_pos_embedding.py)."""
    scaling = {"type": "yarn", "factor": 4, "attention_factor": factor, "mscale_all_dim": of_all}
    said = words(ModelSpec.model_validate(COMMON | {"rope": {"scaling": scaling}}))
    given = {"--mscale": 1.0, "--mscale-all-dim": 0.0}
    given |= {flag: float(said[said.index(flag) + 1]) for flag in given if flag in said}
    over, under = (0.1 * weight * math.log(4) + 1 for weight in given.values())
    assert over / under == pytest.approx(factor)
    assert of_all is None or given["--mscale-all-dim"] == of_all


def test_what_a_config_says_beside_is_a_note_of_every_launch(tmp_path: Path) -> None:
    config = json.loads((DATA / "hf_configs" / "llama-3.1-8b.json").read_text(encoding="utf-8"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"attention_dropout": 0.1, "logit_bonus": 3}))
    for framework in ("megatron", "torchtitan", "deepspeed", "fsdp2"):
        stage = 2 if framework in ("torchtitan", "fsdp2") else 1
        plan = make_plan(read_model(path), dp=8, zero_stage=stage)
        script = plan_files(plan, framework)["launch.sh"]
        assert "not part of the launch: attention_dropout 0.1, logit_bonus 3." in script


SAME_EITHER_WAY = (
    "head_dim",
    "max_positions",
    "moe.shared_experts",
    "rope.scaling.original_positions",
)
"""A width that follows from others; a table shorter than the sequence; YaRN's own default; a number of shared
experts whose common width is stated."""


def alike_anyhow(model: ModelSpec, default: ModelSpec) -> bool:
    """Whether the two differ in nothing but what follows anyhow.

    That is a width of shared experts, or how the weights of a token's one expert add up.
    """
    if model.moe is None or default.moe is None:
        return False
    stated = model.moe.shared_ffn_hidden != default.moe.shared_ffn_hidden
    if model.moe.top_k == 1 and model.moe.router_normalized != default.moe.router_normalized:
        return True
    return stated and model.moe.shared_width == default.moe.shared_width


def has_default(model: ModelSpec, name: str) -> bool:
    """Whether the field can be left out."""
    part: Any = model
    *outer, last = name.split(".")
    for step in outer:
        part = getattr(part, step)
    return not type(part).model_fields[last].is_required()


@pytest.mark.parametrize("model", models())
def test_megatron_flags_are_read_back_as_the_same_model(model: ModelSpec, tmp_path: Path) -> None:
    path = tmp_path / "megatron_args.json"
    path.write_text(json.dumps([*words(model), "--micro-batch-size", "1"]), encoding="utf-8")
    run = read_launch(path)
    assert not [flag for flag in run.unread if flag not in ("--num-query-groups",)]
    read = stated_fields(ModelSpec.model_validate(run.model))
    shortfalls = megatron_shortfalls(model)
    planned = stated_fields(model)
    for name in planned.keys() | read.keys():
        if any(name.startswith(key) for key in shortfalls) or name in WRITTEN_OTHERWISE:
            continue
        if name in followers(model, set(shortfalls)):
            continue
        assert read.get(name) == planned.get(name), name


def followers(model: ModelSpec, shortfalls: set[str]) -> set[str]:
    """Fields that are read back otherwise because of another one, or that nothing depends on."""
    fields = {"swiglu_alpha"} if "activation" in shortfalls else set()
    if "biases" in shortfalls:
        fields |= {"attention_bias", "attention_output_bias", "mlp_bias", "moe.expert_bias"}
    if model.moe is not None and model.dense_layers == 0 and not model.moe.shared_width:
        fields.add("mlp_bias")
    if model.moe is not None and model.moe.top_k == 1:
        fields.add("moe.router_normalized")
    return fields


WRITTEN_OTHERWISE = (
    "head_dim",
    "max_positions",
    "ffn_hidden",
    "moe.shared_experts",
    "moe.shared_ffn_hidden",
    "moe.router_groups",
    "moe.router_groups_per_token",
    "rope.scaling.original_positions",
)
"""Sizes that arguments state where a specification leaves them to follow from others."""


def test_gpt_oss_has_the_gate_of_its_scripts() -> None:
    text = " ".join(words(load_catalog_model("gpt-oss-120b")))
    assert "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0" in text
    assert "--swiglu" not in text
    assert "--position-embedding-type yarn" in text
    assert "--rotary-base 150000" in text


TARGETS: dict[str, tuple[FrameworkName, Callable[[Launch], Start]]] = {
    "megatron": ("megatron", megatron_start),
    "torchtitan": ("torchtitan", torchtitan_start),
    "deepspeed": ("deepspeed", deepspeed_start),
}


def said_by(model: ModelSpec, target: str) -> tuple[str, ...] | None:
    """Arguments, files and notes of a one-GPU launch of the model; None where its rules refuse it."""
    framework, start = TARGETS[target]
    try:
        made = start(legal_launch(make_plan(model), framework_named(framework)))
    except (InfeasibleError, ValidationError):
        return None
    return (*made.args, *made.files.values(), *made.program.notes)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", models())
def test_another_value_makes_another_launch_or_note(model: ModelSpec, target: str) -> None:
    """No stated field can change without a change in arguments, files or notes of any target."""
    said = said_by(model, target)
    for name in stated_fields(model):
        if said is None or not has_default(model, name) or name in SAME_EITHER_WAY:
            continue
        default = at_default(model, name)
        assert alike_anyhow(model, default) or said_by(default, target) != said, name


def test_a_field_that_no_list_knows_is_noted() -> None:
    model = load_catalog_model("grok-1")
    assert "rope.base: 5.0 is not part of the launch." in notes_of(
        model.model_copy(update={"rope": model.rope.model_copy(update={"base": 5.0})}), (), {}
    )


def test_megatron_shares_indexers_by_a_frequency() -> None:
    """As `is_dsa_skip_topk_layer` of megatron-core counts: layers 1 to 3 have one, then each fourth."""
    model = load_catalog_model("glm-5.2")
    said = words(model)
    assert said[said.index("--dsa-indexer-topk-freq") + 1] == "4"
    assert said[said.index("--dsa-indexer-skip-topk-offset") + 1] == "3"
    own = [max(number - 3, 0) % 4 == 0 for number in range(1, 79)]
    assert model.attention_order == "".join("F" if each else "f" for each in own)
    assert "--dsa-indexer-topk-freq" not in words(load_catalog_model("glm-5"))


def test_a_note_says_that_chosen_blocks_are_left_out() -> None:
    model = read_model(DATA / "hf_configs" / "minimax-m3.json")
    (sentence,) = megatron_shortfalls(model).values()
    assert "not to 16 chosen blocks of 128" in sentence
