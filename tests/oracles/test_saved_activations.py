"""Bytes that a layer keeps for its backward pass are those that autograd saves in transformers' Llama.

Runs in `make oracles` only.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.activations import activation_bytes_per_layer
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.schema import ModelSpec
from tests.oracles.ask_saved import ANSWER

pytestmark = pytest.mark.oracle

TOKENS, RANK = 192, 8
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODELS: dict[str, dict[str, Any]] = {
    "grouped": {"hidden": 256, "ffn_hidden": 896, "heads": 8, "kv_heads": 2},
    "plain": {"hidden": 320, "ffn_hidden": 640, "heads": 5, "kv_heads": 5},
}
TRAINED: dict[str, tuple[tuple[str, ...] | None, bool, bool]] = {
    "all": (None, False, False),
    "every matrix": (ALL, False, False),
    "every matrix, autocast": (ALL, False, True),
    "queries and values": (("q_proj", "v_proj"), False, False),
    "queries and values, autocast": (("q_proj", "v_proj"), False, True),
    "output and gate, autocast": (("o_proj", "gate_proj"), False, True),
    "down, autocast": (("down_proj",), False, True),
    "magnitudes": (ALL, True, False),
}
"""Matrices with adapters, whether they have magnitudes, and whether autocast narrows them."""


def counted_bytes(model: dict[str, Any], trained: str) -> float:
    """What the cost model says of the layer."""
    targets, decomposed, autocast = TRAINED[trained]
    adapters = None
    if targets is not None:
        method: Any = "dora" if decomposed else "lora"
        adapters = AdapterSpec(method=method, rank=RANK, targets=targets)
    workload = Workload(
        model=ModelSpec(layers=2, vocab=512, **model),
        cluster=read_cluster("dgx-h100"),
        gpus=1,
        seq_len=TOKENS,
        global_batch=1,
        framework="fsdp2",
        adapters=adapters,
        autocast=autocast,
    )
    saved, _ = activation_bytes_per_layer(workload, Layout(), experts=False)
    return float(saved)


def asked(model: dict[str, Any], trained: str) -> dict[str, Any]:
    """The case in the oracle's words."""
    targets, decomposed, autocast = TRAINED[trained]
    return {
        "model": {
            "hidden_size": model["hidden"],
            "intermediate_size": model["ffn_hidden"],
            "num_attention_heads": model["heads"],
            "num_key_value_heads": model["kv_heads"],
            "head_dim": model["hidden"] // model["heads"],
        },
        "tokens": TOKENS,
        "targets": None if targets is None else list(targets),
        "rank": RANK,
        "dora": decomposed,
        "autocast": autocast,
    }


def test_a_layer_keeps_what_autograd_saves(tmp_path: Path) -> None:
    cases = [(model, trained) for model in MODELS.values() for trained in TRAINED]
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([asked(*case) for case in cases]), encoding="utf-8")
    script = Path(__file__).with_name("ask_saved.py")
    answer = subprocess.run(
        [os.environ["ORACLE_PYTHON"], str(script), str(file)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    lines = [line for line in answer.stdout.splitlines() if line.startswith(ANSWER)]
    assert len(lines) == len(cases), answer.stderr[-2000:]
    for case, line in zip(cases, lines, strict=True):
        model, trained = case
        # Cosines and sines are of every layer; the root of each norm has one number a token.
        beside = TOKENS * (2.0 * 2.0 * model["hidden"] / model["heads"] + 2.0 * 4.0)
        saved = json.loads(line.removeprefix(ANSWER)) - beside
        assert counted_bytes(model, trained) == pytest.approx(saved, rel=0.01), (model, trained)
