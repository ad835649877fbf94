"""States that the plan counts are those that the optimizers' own packages make, byte for byte.

Runs in `make oracles` only. The packages are on a CPU: states are the same tensors there.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.optimizers import (
    BLOCK,
    NEWTON_SCHULZ_STEPS,
    moments_bytes,
    tensor_state_bytes,
)
from meshwright.costmodel.workload import Workload
from meshwright.documents import write_files
from meshwright.frameworks.catalog import planned
from meshwright.frameworks.deepspeed import (
    DEEPSPEED,
    OPTIMIZER_TYPE,
    OWN_OPTIMIZERS,
    TRAINER_FLAG,
    TRAINER_OPTIMIZERS,
)
from meshwright.frameworks.megatron import MEGATRON
from meshwright.model_specs.adapters import counted_matrices
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.launch.plan_files import plan_files
from tests.oracles.test_frameworks import ask as ask_framework
from tests.plans import make_plan

pytestmark = pytest.mark.oracle

ANSWER = "answer "
LEAST = ((4095,), (4096,), (4097,), (64, 64), (63, 65), (71, 97), (1024, 300), (13,))
"""Sizes about the least that has 8 bits, and some that blocks of 256 do not divide."""
PACKAGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bitsandbytes AdamW8bit": ("adam-8bit", "bitsandbytes.optim:AdamW8bit", {}),
    "bitsandbytes Adam8bit": ("adam-8bit", "bitsandbytes.optim:Adam8bit", {}),
    "bitsandbytes PagedAdamW8bit": ("paged-adam-8bit", "bitsandbytes.optim:PagedAdamW8bit", {}),
    "bitsandbytes PagedAdamW": ("paged-adam", "bitsandbytes.optim:PagedAdamW", {}),
    "bitsandbytes Lion": ("lion", "bitsandbytes.optim:Lion", {}),
    "torch AdamW": ("adam", "torch.optim:AdamW", {}),
    "torch SGD": ("sgd", "torch.optim:SGD", {"lr": 0.1, "momentum": 0.9}),
    "transformers Adafactor": (
        "adafactor",
        "transformers.optimization:Adafactor",
        {"lr": 1e-3, "scale_parameter": False, "relative_step": False},
    ),
}


def ask(cases: list[dict[str, Any]], folder: Path) -> list[Any]:
    """The packages' answers, in order."""
    python = os.environ.get("ORACLE_PYTHON")
    assert python, "run `make oracles`: ORACLE_PYTHON names no interpreter"
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    script = Path(__file__).with_name("ask_optimizers.py")
    done = subprocess.run(
        [python, str(script), str(folder / "cases.json")],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    return [json.loads(line.removeprefix(ANSWER)) for line in lines if line.startswith(ANSWER)]


def test_states_are_those_of_the_packages(tmp_path: Path) -> None:
    shapes = [list(shape) for shape in LEAST]
    cases = [
        {"make": make, "settings": settings, "shapes": shapes}
        for _, make, settings in PACKAGES.values()
    ]
    for (name, (optimizer, _, _)), measured in zip(
        PACKAGES.items(), ask(cases, tmp_path), strict=True
    ):
        counted = [tensor_state_bytes(optimizer, shape) for shape in LEAST]
        assert counted == measured, name


def test_states_of_torchao_are_the_same_where_blocks_are_full(tmp_path: Path) -> None:
    """A tensor of another size than a multiple of 256 it leaves in 32 bits."""
    full = [shape for shape in LEAST if math.prod(shape) % BLOCK == 0]
    shapes = [*map(list, full), [71, 97]]
    case = {"make": "torchao.optim:AdamW8bit", "settings": {}, "shapes": shapes}
    *measured, odd = ask([case], tmp_path)[0]
    assert measured == [tensor_state_bytes("adam-8bit", shape) for shape in full]
    assert odd == tensor_state_bytes("adam", (71, 97))


def test_states_of_muon_are_those_of_torch(tmp_path: Path) -> None:
    matrices = [shape for shape in LEAST if len(shape) == 2]
    case = {"make": "torch.optim:Muon", "settings": {}, "shapes": [list(s) for s in matrices]}
    assert ask([case], tmp_path) == [[tensor_state_bytes("muon", shape) for shape in matrices]]


def test_a_whole_model_in_8_bits(tmp_path: Path) -> None:
    """A layer of Qwen2.5 0.5B, whose norms of 896 numbers stay in 32 bits."""
    model = load_catalog_model("qwen2.5-0.5b")
    shapes = [
        [each.matrix.outputs, each.matrix.inputs] for each in counted_matrices(model, fused=False)
    ]
    norms = [[model.hidden], [model.hidden]]
    case = {
        "make": "bitsandbytes.optim:AdamW8bit",
        "settings": {},
        "shapes": shapes + norms,
    }
    measured = sum(ask([case], tmp_path)[0])
    work = Workload(
        model=model,
        cluster=read_cluster("dgx-h100"),
        gpus=8,
        global_batch=8,
        seq_len=2048,
        framework="fsdp2",
        optimizer="adam-8bit",
    )
    values = sum(a * b for a, b in shapes) + 2 * model.hidden
    # The model's own mean has biases of queries, keys and values too, 1,152 of 14.9 million.
    assert moments_bytes(work) * values == pytest.approx(measured, rel=2e-3)


@pytest.mark.parametrize(
    ("shape", "gathers", "reductions"),
    [([256, 512], 3, 0), ([256, 256], 3, 0), ([512, 256], 0, 2)],
)
def test_what_muon_sends_under_fsdp2(
    tmp_path: Path, shape: list[int], gathers: int, reductions: int
) -> None:
    """In each iteration; a norm is reduced once besides."""
    counts = ask([{"sends": shape}], tmp_path)[0]
    sent = {"all_gather_into_tensor": 0, "all_reduce": 0} | counts
    assert sent["all_gather_into_tensor"] == NEWTON_SCHULZ_STEPS * gathers
    assert sent["all_reduce"] == NEWTON_SCHULZ_STEPS * reductions + 1


def test_names_are_those_of_the_frameworks(tmp_path: Path) -> None:
    lists = (
        "transformers.training_args:OptimizerNames",
        "deepspeed.runtime.config:DEEPSPEED_OPTIMIZERS",
    )
    of_trainer, of_deepspeed = ask([{"names": name} for name in lists], tmp_path)
    assert set(TRAINER_OPTIMIZERS) - {"muon"} <= set(of_trainer)
    # What is not DeepSpeed's own it takes from torch.optim (runtime/engine.py).
    assert set(OWN_OPTIMIZERS) - {"adafactor"} <= set(of_deepspeed)
    for setting in DEEPSPEED.optimizers.values():
        if setting.flag == OPTIMIZER_TYPE:
            assert setting.value.lower() in of_deepspeed
        elif setting.flag == TRAINER_FLAG:
            assert setting.value in of_trainer


def test_megatron_takes_what_it_is_told(tmp_path: Path) -> None:
    cases = []
    for optimizer in planned(MEGATRON.optimizers):
        plan = make_plan(dp=8)
        layout = plan.layout and plan.layout.model_copy(update={"zero_stage": 1})
        inputs = plan.inputs.model_copy(update={"optimizer": optimizer})
        files = plan_files(plan.model_copy(update={"inputs": inputs, "layout": layout}))
        write_files(tmp_path / optimizer, files)
        cases.append({"dir": str(tmp_path / optimizer), "world": 8, "arch": 9})
    cases.append(cases[0] | {"also": ["--optimizer", "adam-8bit"]})
    *answers, wrong = ask_framework("megatron", cases, tmp_path)
    assert [answer["ok"] for answer in answers] == [True] * len(answers)
    assert not wrong["ok"]
