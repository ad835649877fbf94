"""Every layer of unusual configs, in their order, is what transformers and Megatron make of it.

Runs in `make oracles` only.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from meshwright.documents import write_files
from meshwright.errors import InfeasibleError
from meshwright.model_specs.parameters import parameter_count
from meshwright.model_specs.reader import load_catalog_model, read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.layer_split import balanced_stages, level_splits
from meshwright.planner.launch.plan_files import plan_files
from tests.oracles.random_configs import FAMILIES, random_config
from tests.oracles.test_frameworks import ask
from tests.plans import make_plan

pytestmark = pytest.mark.oracle
CONFIGS, SEED = 111, 28


def drawn(folder: Path) -> list[Path]:
    """The files of all configurations, each family three times."""
    rng = random.Random(SEED)
    paths = []
    for number in range(CONFIGS):
        config = random_config(rng, FAMILIES[number % len(FAMILIES)])
        path = folder / f"{number:02d}-{config['model_type']}.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        paths.append(path)
    return paths


def mixer_weights(model: ModelSpec) -> int:
    """Weights of softmax attention in one layer, by hand."""
    h, n = model.hidden, model.heads
    latent = model.attention
    if latent is not None:
        nope, rope, value = latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim
        query, keys = latent.q_lora_rank, latent.kv_lora_rank
        total = h * n * (nope + rope)
        if query is not None:
            total = h * query + query + query * n * (nope + rope)
        total += h * (keys + rope) + keys + keys * n * (nope + value) + n * value * h
        if model.attention_bias:
            total += (query or 0) + keys + rope
        return total + (h if model.attention_output_bias else 0)
    width = model.qk_head_dim
    outputs = (n + 2 * model.kv_heads) * width
    gate = n * width if model.attention_output_gate else 0
    total = h * (outputs + gate) + n * width * h
    total += (outputs if model.attention_bias else 0) + (h if model.attention_output_bias else 0)
    if model.attention_bias:
        total += gate
    if model.qk_norm and model.qk_norm_weights:
        total += (n + model.kv_heads if model.qk_norm_full_width else 2) * width
    return total + (n if model.attention_sinks else 0)


def feed_forward_weights(model: ModelSpec, *, routed: bool) -> int:
    """Weights of what follows attention in one layer, by hand; experts here have gates."""
    h, moe = model.hidden, model.moe
    if not routed or moe is None:
        f, ways_in = model.ffn_hidden, 2 if model.activation in ("swiglu", "geglu") else 1
        return (ways_in + 1) * h * f + (ways_in * f + h if model.mlp_bias else 0)
    f, count = moe.moe_ffn_hidden, moe.experts
    total = count * 3 * h * f + count * h + 3 * h * moe.shared_width
    if moe.expert_bias:
        total += count * (2 * f + h)
    if moe.router_bias and moe.router_score == "softmax":
        total += count
    return total + (h if moe.shared_expert_gate else 0)


def differences(model: ModelSpec, built: dict[str, Any]) -> list[str]:
    """Where transformers builds something else than was read."""
    if not built["ok"]:
        return [str(built)]
    wrong = []
    counted = built["weights"] + built["balance_biases"]
    if counted != parameter_count(model):
        wrong.append(f"{counted} parameters, not {parameter_count(model)}")
    if built["tied"] != model.tied_embeddings or built["embedding"] != [model.vocab, model.hidden]:
        wrong.append(f"embedding {built['embedding']}, tied {built['tied']}")
    if built["epsilon"] != model.norm_epsilon:
        wrong.append(f"epsilon {built['epsilon']}")
    scaling = model.rope.scaling
    temperature = scaling.temperature if scaling is not None and scaling.type == "yarn" else 1.0
    if built["temperature"] != pytest.approx(temperature):
        wrong.append(f"temperature {built['temperature']}, not {temperature}")
    if len(built["layers"]) != model.layers:
        return [*wrong, f"{len(built['layers'])} layers"]
    for number, (kind, layer) in enumerate(zip(model.layer_kinds, built["layers"], strict=True)):
        wrong += [
            f"layer {number}, {kind}: {text}" for text in layer_differences(model, kind, layer)
        ]
    return wrong


def layer_differences(model: ModelSpec, kind: str, layer: dict[str, Any]) -> list[str]:
    wrong = []
    attends = "linear" if layer["linear"] else "full" if layer["window"] is None else "windowed"
    follows = "experts" if layer["experts"] else "feed-forward"
    if kind != f"{attends} attention and {follows}":
        wrong.append(f"is {attends} attention and {follows}")
    if attends == "windowed" and layer["window"] != model.sliding_window:
        wrong.append(f"window {layer['window']}")
    if model.rope_in_windows_alone and layer["rope"] != (attends == "windowed"):
        wrong.append(f"rope {layer['rope']}")
    if attends != "linear" and layer["mixer"] != mixer_weights(model):
        wrong.append(f"{layer['mixer']} weights of attention, not {mixer_weights(model)}")
    expected = feed_forward_weights(model, routed=layer["experts"])
    if layer["feed_forward"] != expected:
        wrong.append(f"{layer['feed_forward']} weights of its feed-forward, not {expected}")
    if layer["sinks"] != model.attention_sinks:
        wrong.append(f"sinks {layer['sinks']}")
    keys = layer["shapes"].get("k_proj.weight")
    if keys is not None and keys != [model.kv_heads * model.qk_head_dim, model.hidden]:
        wrong.append(f"keys {keys}")
    return wrong


def test_transformers_builds_the_layers_that_are_read_in_their_order(tmp_path: Path) -> None:
    paths = drawn(tmp_path)
    answers = ask("transformers_layers", [{"file": str(path)} for path in paths], tmp_path)
    wrong = {}
    for path, built in zip(paths, answers, strict=True):
        found = differences(read_model(path), built)
        if found:
            wrong[path.stem] = found
    orders = sum(read_model(path).attention_order is not None for path in paths)
    print(
        f"transformers: {CONFIGS - len(wrong)} of {CONFIGS} configs, {orders} orders of their own"
    )
    assert orders >= 15
    assert not wrong, "\n".join(f"{name}: {found[:4]}" for name, found in wrong.items())


def test_megatron_configures_the_layers_that_are_read_in_their_order(tmp_path: Path) -> None:
    """Windows and experts layer by layer, and YaRN's temperature, by Megatron's own functions."""
    asked, cases = [], []
    for path in drawn(tmp_path):
        model = read_model(path)
        folder = tmp_path / path.stem
        try:
            write_files(folder, plan_files(make_plan(model, dp=8), "megatron"))
        except InfeasibleError:
            continue
        asked.append((path.stem, model))
        cases.append({"dir": str(folder), "world": 8, "arch": 9})
    wrong = []
    for (name, model), built in zip(asked, ask("megatron_layers", cases, tmp_path), strict=True):
        scaling = model.rope.scaling
        yarn = scaling is not None and scaling.type == "yarn"
        expected = {
            "ok": True,
            "windowed": [letter == "W" for letter in model.attention_letters],
            "routed": [number in model.expert_layers for number in range(model.layers)],
            "window": model.sliding_window,
            "temperature": pytest.approx(scaling.temperature if yarn and scaling else 1.0),
        }
        if built != expected:
            wrong.append(f"{name}: {built}")
    print(f"megatron: {len(asked) - len(wrong)} of {len(asked)} configs")
    assert len(asked) >= CONFIGS - 4
    assert not wrong, "\n".join(wrong)


def test_megatron_takes_stages_that_begin_at_an_indexer_alone(tmp_path: Path) -> None:
    """GLM-5.2 in even pipelines and in virtual stages; and one layer further, which it must refuse."""
    model = load_catalog_model("glm-5.2")
    begins = model.stage_begins
    splits = [balanced_stages(78, pp, 1, begins) for pp in (2, 8, 16)]
    splits += level_splits(78, 4, 5, empty_ends=True, begins=begins)
    cases = []
    for number, stages in enumerate(splits):
        assert stages is not None
        pp, vpp = len(stages), len(stages[0])
        degrees: dict[str, Any] = {"pp": pp, "vpp": vpp, "ep": 8, "dp": 8, "num_micro_batches": 16}
        schedule = "1f1b" if vpp == 1 else "interleaved-1f1b"
        plan = make_plan(
            model, stages=[list(rank) for rank in stages], schedule=schedule, **degrees
        )
        write_files(tmp_path / str(number), plan_files(plan, "megatron"))
        cases.append({"dir": str(tmp_path / str(number)), "world": 8 * pp, "arch": 9})
    cases.append(cases[0] | {"also": ["--pipeline-model-parallel-layout", "Et*40|t*38L"]})
    *answers, refused = ask("megatron", cases, tmp_path)
    for stages, answer in zip(splits, answers, strict=True):
        assert answer["ok"], answer
        assert stages is not None
        assert answer["stages"] == [list(rank) for rank in stages]
    assert "pipeline split is invalid" in str(refused)
