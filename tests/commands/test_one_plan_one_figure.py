"""Every command that prints a quantity of a plan prints the one that the plan's document states."""

from __future__ import annotations

import csv
import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from meshwright import cli
from meshwright.planner.drawing import seconds
from tests.soaked import some

LEAVES = """\
name: two-pods
device: h100-sxm-80gb
gpus_per_node: 8
nvlink_domain: 8
nvlink_gb_per_s: 450
nic_gbps_per_gpu: 400
levels:
  - {name: leaf, gpus: 32}
  - {name: pod, gpus: 64, oversubscription: 2}
  - {name: core, gpus: 128, oversubscription: 4}
nodes:
"""
NODES = [("a", 0, 0), ("b", 0, 0), ("c", 0, 0), ("d", 0, 1), ("e", 1, 2), ("f", 1, 2)]
IRREGULAR = LEAVES + "".join(
    f"  - {{name: {name}, leaf: leaf-{leaf}, pod: pod-{pod}}}\n" for name, pod, leaf in NODES
)

PLANS: dict[str, tuple[str, str, int, int, int, str]] = {
    "dense": (
        *("llama-3-8b", "dgx-h100", 16, 64, 4096),
        "--pin pp=2,micro_batch=1",
    ),
    "irregular": (
        *("llama-2-7b", "IRREGULAR", 48, 96, 2048),
        "--pin tp=2,pp=2,cp=1,micro_batch=1,zero_stage=1,recompute=none",
    ),
    "listed": (
        *("gpt2-xl", "IRREGULAR", 48, 96, 1024),
        "--framework fsdp2 --pin micro_batch=1",
    ),
    "experts": (
        *("qwen3-30b-a3b", "dgx-h100", 32, 64, 4096),
        "--pin ep=16,pp=1,tp=1,micro_batch=1",
    ),
    "superpod": (
        *("llama-2-7b", "superpod-a100", 200, 400, 2048),
        "--pin tp=1,pp=1,cp=1,micro_batch=1",
    ),
    "torchtitan": (
        *("llama-3-8b", "dgx-h100", 16, 64, 2048),
        "--framework torchtitan --pin pp=1,micro_batch=1",
    ),
    "deepspeed": (
        *("gpt2-xl", "dgx-a100", 16, 64, 1024),
        "--framework deepspeed --pin pp=1,micro_batch=1",
    ),
    "fsdp2": (
        *("gpt2-xl", "a100-pcie", 16, 64, 1024),
        "--framework fsdp2 --pin micro_batch=1",
    ),
    "context": (
        *("llama-3-8b", "dgx-h100", 16, 16, 32768),
        "--pin cp=4,pp=1",
    ),
    "racks": (
        *("gpt-oss-20b", "gb200-nvl72", 128, 256, 4096),
        "--pin pp=1,ep=8,tp=1,micro_batch=1",
    ),
    "rails": (
        *("llama-3-8b", "superpod-h100", 320, 640, 2048),
        "--pin tp=2,pp=2,cp=1,micro_batch=1",
    ),
    "leaf": (
        *("llama-2-7b", "h100-leaf-3to1", 320, 640, 2048),
        "--pin tp=2,pp=2,cp=1,micro_batch=1",
    ),
    "groups": (
        *("llama-2-7b", "dragonfly-4096", 120, 240, 2048),
        "--pin tp=1,pp=2,cp=1,micro_batch=1",
    ),
    "olmoe": (
        *("olmoe-1b-7b", "dgx-a100", 16, 64, 4096),
        "--pin ep=8,pp=1,tp=1",
    ),
    "titan-pipeline": (
        *("llama-3-8b", "dgx-h100", 16, 64, 2048),
        "--framework torchtitan --pin pp=2,vpp=1,micro_batch=1",
    ),
    "zero3": (
        *("llama-2-13b", "dgx-a100", 16, 32, 2048),
        "--framework deepspeed --pin zero_stage=3,pp=1,micro_batch=1",
    ),
    "fp8": (
        *("llama-3-8b", "dgx-h100", 8, 32, 4096),
        "--precision fp8 --pin pp=1,micro_batch=1",
    ),
    "amd": (
        *("llama-3-8b", "mi300x", 16, 64, 4096),
        "--pin pp=1,micro_batch=1",
    ),
    "recompute": (
        *("llama-2-13b", "dgx-a100-40gb", 16, 32, 2048),
        "--pin pp=2,recompute=full,micro_batch=1",
    ),
    "deep": (
        *("llama-2-13b", "dgx-a100", 32, 64, 2048),
        "--pin pp=4,tp=2,micro_batch=1",
    ),
    "part-node": (
        *("llama-3-8b", "dgx-h100", 4, 16, 2048),
        "--pin micro_batch=1",
    ),
}
"""Model, cluster, GPUs, batch, sequence length, and the rest."""
QUICK = ("listed",)
SHARED = (
    *("level", "bytes_per_step", "by_axis", "busy_s", "utilisation"),
    *("most_bytes_per_step", "mean_busy_s"),
)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli.main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (arguments, result.output[-2000:])
    return result.stdout


def same(found: Any, stated: Any, where: str) -> None:
    """Equal, numbers to the ninth digit."""
    if isinstance(stated, dict):
        assert set(found) == set(stated), where
        for key, value in stated.items():
            same(found[key], value, f"{where}.{key}")
    elif isinstance(stated, list | tuple):
        assert len(found) == len(stated), where
        for index, value in enumerate(stated):
            same(found[index], value, f"{where}[{index}]")
    elif isinstance(stated, float):
        assert found == pytest.approx(stated, rel=1e-9, abs=1e-9), where
    else:
        assert found == stated, where


def check(name: str, tmp_path: Path) -> None:
    cluster, made = tmp_path / "cluster.yaml", tmp_path / "made"
    cluster.write_text(IRREGULAR, encoding="utf-8")
    model, on, gpus, batch, length, rest = PLANS[name]
    on = str(cluster) if on == "IRREGULAR" else on
    words = [model, "--cluster", on, "--gpus", gpus, "--global-batch", batch, "--seq-len", length]
    words += rest.split()
    plan = json.loads(run("plan", *words, "-o", made, "--json"))
    file, predicted = made / "plan.yaml", plan["predicted"]
    step = predicted["step_time_s"]
    assert sum(predicted["breakdown_s"].values()) == pytest.approx(step, rel=1e-9)
    same(plan["objective"]["step_time_s"], step, "objective")

    stated = [{key: level[key] for key in SHARED} for level in predicted["level_traffic"]]
    for level in stated:
        assert level["mean_busy_s"] <= level["busy_s"] * (1 + 1e-9)
        assert sum(level["by_axis"].values()) == pytest.approx(level["bytes_per_step"])
    same(json.loads(run("traffic", file, "--json"))["levels"], stated, "traffic")

    run("launch", file, "--target", plan["inputs"]["framework"], "-o", tmp_path / "again")
    launched = (tmp_path / "again" / "mapping" / "ranks.csv").read_text("utf-8")
    assert launched == (made / "mapping" / "ranks.csv").read_text("utf-8")
    listed = list(csv.DictReader(launched.splitlines()))
    degrees = [plan["layout"][axis] for axis in ("tp", "cp", "pp", "dp")]
    assert len(listed) == prod(degrees)
    assert [int(row["gpu"]) for row in listed] == [gpu for _, gpu in plan["mapping"]["ranks"]]
    assert len({row["host"] for row in listed}) == len(
        {node for node, _ in plan["mapping"]["ranks"]}
    )

    explained = json.loads(run("explain", file, "--no-best", "--json"))
    if "predicted" in explained:
        same(explained["predicted"], predicted, "explain")
    traced = json.loads(run("trace", file, "-o", tmp_path / "trace.json", "--json"))
    same(traced.get("step_time_s", step), step, "trace")
    run("verify", file, made)
    page = tmp_path / "page.html"
    run("report", file, "-o", page)
    texts = {
        "page": page.read_text(encoding="utf-8"),
        "plan": run("plan", *words, "--full"),
        "compare": run("compare", file, file),
    }
    for where, text in texts.items():
        assert seconds(step) in text, where
    for level in stated:
        if level["bytes_per_step"]:
            for where in ("plan", "page"):
                assert seconds(level["busy_s"]) in texts[where], (where, level)
    assert re.search(re.escape(seconds(step)), run("explain", file, "--no-best"))


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_all_commands_state_one_figure(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", some([name for name in PLANS if name not in QUICK]))
def test_all_commands_state_one_figure_of_twenty_plans(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)
