"""No pinned number of virtual stages beats a plan, where its stages but the first and the last are alike.

Other heights of like layers are priced too fast and left out (docs/limits.md). `make attack` takes a tenth of
MESHWRIGHT_ATTACK_S for random requests, at least four.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.reader import read_request

ATTACK_S = float(os.environ.get("MESHWRIGHT_ATTACK_S", "30"))
SEED = int(os.environ.get("MESHWRIGHT_ATTACK_SEED", "0"))
FEWEST = 4
ROUNDING = 1e-9
MODELS = (
    "llama-2-7b", "llama-2-13b", "llama-3.2-3b", "llama-3-8b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b",
    "qwen3-8b", "phi-4", "mistral-7b", "olmo-2-7b", "smollm3-3b", "olmoe-1b-7b", "qwen3-30b-a3b",
    "moonlight-16b-a3b", "deepseek-v2-lite", "mixtral-8x7b", "gemma-3-4b", "gpt-oss-20b",
)  # fmt: skip


def beaten(asked: dict[str, Any], most: int = 12) -> Iterator[str]:
    """Pins of `vpp` that are faster than a plan without, in words."""
    request = read_request(**asked)
    plan = fastest_plan(request, explained=False)
    step_s, pp = plan.objective.step_time_s, int(asked["pin"]["pp"])
    if plan.status != "optimal" or step_s is None:
        return
    for vpp in range(2, min(most, (request.model.layers + 2) // pp) + 1):
        pinned = replace(request, pins={**request.pins, "vpp": vpp})
        other = fastest_plan(pinned, explained=False)
        if other.layout is None or other.objective.step_time_s is None:
            continue
        chunks = [rank[chunk] for chunk in range(vpp) for rank in other.layout.stages]
        is_level = bool(request.model.unlike_layers) or len(set(chunks[1:-1])) == 1
        if is_level and other.objective.step_time_s < step_s * (1 - ROUNDING):
            yield f"{asked}: vpp {vpp} takes {other.objective.step_time_s}, the plan {step_s}: {chunks}"


def drawn(number: int) -> dict[str, Any]:
    chance = random.Random(number)
    pp = chance.choice((2, 4, 8))
    gpus = pp * chance.choice((1, 2))
    return {
        "model": chance.choice(MODELS),
        "cluster": chance.choice(("dgx-h100", "l40s-pcie", "dgx-a100-40gb")),
        "gpus": gpus,
        "global_batch": gpus * chance.choice((1, 2, 4)),
        "seq_len": chance.choice((1024, 4096)),
        "framework": chance.choice(("megatron", "megatron", "torchtitan")),
        "pin": {"pp": pp},
    }


def test_a_head_of_several_layers_may_shorten_the_last_stages() -> None:
    """28 layers and a head of four on four ranks: 32 are dealt out evenly, by two and by four a rank."""
    asked = {"model": "llama-3.2-3b", "cluster": "l40s-pcie", "gpus": 8, "pin": {"pp": 4}}
    assert not list(beaten({**asked, "global_batch": 32, "seq_len": 2048}, most=4))


@pytest.mark.soak
def test_no_pin_of_virtual_stages_beats_random_plans() -> None:
    end_s, number = time.monotonic() + ATTACK_S / 10, 1000 + SEED
    faults: list[str] = []
    count = 0
    while time.monotonic() < end_s or count < FEWEST:
        faults += beaten(drawn(number))
        count, number = count + 1, number + 1
    print(f"{count} requests")
    assert not faults, "\n".join(faults)
