"""Megatron's own parser and configuration read every catalog model's flags back as that model.

Runs in `make oracles` only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.documents import write_files
from meshwright.model_specs.reader import catalog_names, load_catalog_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.launch.megatron import linear_bias
from meshwright.planner.launch.plan_files import plan_files
from tests.oracles.test_frameworks import ask
from tests.plans import make_plan

pytestmark = pytest.mark.oracle

ACTIVATIONS = {"swiglu": "silu", "geglu": "quick_gelu", "relu": "gelu"}


def expected(model: ModelSpec) -> dict[str, Any]:
    """What Megatron's configuration has to hold, said by the specification alone."""
    moe, scaling, rope = model.moe, model.rope.scaling, model.position == "rope"
    yarn = scaling if rope and scaling is not None and scaling.type == "yarn" else None
    positions = {"rope": "rope", "learned": "learned_absolute"}
    position = positions.get(model.position, "none")
    if yarn is not None and model.attention is None:
        position = "yarn"
    softmax = moe is not None and moe.router_score == "softmax"
    activation = ACTIVATIONS.get(model.activation, model.activation)
    return {
        "position": position,
        "rope_base": model.rope.base,
        "rope_fraction": model.rope.fraction,
        "llama3": scaling is not None and scaling.type == "llama3",
        "yarn_factor": yarn.factor if yarn else 1.0,
        "mscale_all_dim": (yarn.mscale_all_dim or 0.0) if yarn else 0.0,
        "norm_epsilon": model.norm_epsilon,
        "norm_zero_centered": model.norm_zero_centered,
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "activation": "quick_gelu" if model.swiglu_alpha != 1 else activation,
        "gated": model.gated,
        "glu_offset": model.glu_offset,
        "glu_limit": model.glu_limit,
        "softmax_type": "learnable" if model.attention_sinks else "vanilla",
        "window": [model.sliding_window - 1, 0] if model.sliding_window else None,
        "router_score": moe.router_score if moe else "softmax",
        "pre_softmax": softmax and moe is not None and not moe.router_normalized,
        "router_scale": None if moe is None else _other_than_one(moe.router_scaling_factor),
        "expert_bias": moe is not None and moe.router_bias and not softmax,
        "groups": moe.router_groups if moe else None,
        "biases": linear_bias(model),
        "qkv_bias": model.attention_bias,
        "tied": model.tied_embeddings,
        "mtp": model.mtp_layers,
        "embedding_scale": model.embedding_scale,
        "output_scale": model.output_scale,
        "attention_scale": _attention_scale(model),
        "width_scale": 1.0,
        "unturned": [int(letter in "Ff") for letter in model.attention_letters]
        if model.rope_in_windows_alone
        else None,
        "weightless_qk_norm": model.qk_norm and not model.qk_norm_weights,
        "qk_norm": model.attention is not None or (model.qk_norm and model.qk_norm_weights),
    }


def _attention_scale(model: ModelSpec) -> Any:
    """The factor on attention scores, which follows from the width of heads where nothing scales."""
    if model.attention_scale is not None:
        return pytest.approx(model.attention_scale, rel=1e-12)
    scales = model.embedding_scale != 1 or model.output_scale != 1
    return pytest.approx(model.qk_head_dim**-0.5, rel=1e-12) if scales else None


def _other_than_one(factor: float) -> float | None:
    return None if factor == 1 else factor


def test_megatron_configures_every_catalog_model_as_specified(tmp_path: Path) -> None:
    cases = []
    models = {name: load_catalog_model(name) for name in catalog_names()}
    names = [
        name
        for name, model in models.items()
        if not model.mamba_beside_attention
        and model.window_heads is None
        and (model.linear_attention is None or model.linear_attention.type != "kda")
    ]
    for name in names:
        plan = make_plan(name, dp=8)
        write_files(tmp_path / name, plan_files(plan, "megatron"))
        cases.append({"dir": str(tmp_path / name), "world": 8, "arch": 9})
    answers = ask("model", cases, tmp_path)
    wrong = []
    for name, answer in zip(names, answers, strict=True):
        planned = expected(load_catalog_model(name))
        if not answer.pop("ok"):
            wrong.append(f"{name}: {answer}")
        wrong += [
            f"{name}: {field} {answer.get(field)}, not {value}"
            for field, value in planned.items()
            if answer.get(field) != value
        ]
    assert not wrong, "\n".join(wrong)
