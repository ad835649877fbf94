"""How well commands keep a time limit: each on a case that takes far longer by itself.

    python -m benchmarks.time_limits [limit in seconds ...]

Kept means within 20 % + 1 s of the clock. Prints a Markdown table; nothing in the test suite depends on it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml

from benchmarks.plan_speed import ROOT

DEEPSEEK = "plan deepseek-v3 --global-batch 15360 --seq-len 4096"
COMMANDS = {
    "plan": f"{DEEPSEEK} --cluster hgx-h800 --gpus 2048",
    "plan, 131,072 GPUs": f"{DEEPSEEK} --cluster gb200-nvl72 --gpus 131072",
    "plan, scattered and busy": f"{DEEPSEEK} --cluster IN/scattered.yaml",
    "plan, infeasible": f"{DEEPSEEK} --cluster dgx-h100 --gpus 64",
    "plan, experts placed": f"{DEEPSEEK} --cluster hgx-h800 --gpus 512 --expert-loads IN/loads.npz",
    "plan --sweep": f"{DEEPSEEK} --cluster hgx-h800 --gpus 1024 --sweep global-batch=4096+8192+16384",
    "plan, exhaustive": (
        "plan llama-3-70b --cluster dgx-h100 --gpus 64 --global-batch 512 --seq-len 4096 "
        "--method exhaustive --pin tp=8,cp=1 --forbid optimizer-offload,shard-groups"
    ),
    "fleet": "fleet IN/fleet.yaml --cluster superpod-h100 --gpus 4096 --no-cache",
    "fleet --objective deadlines": (
        "fleet IN/fleet.yaml --cluster superpod-h100 --gpus 4096 --no-cache --objective deadlines"
    ),
    "experts": "experts IN/loads.npz --cluster hgx-h800 --gpus 64 --slots 320",
    "experts, traffic": (
        "experts IN/loads.npz --cluster hgx-h800 --gpus 64 --slots 320 --co-activation IN/trace.npz"
    ),
    "map": "map IN/plan/plan.yaml --cluster IN/scattered.yaml",
}


def given(folder: Path) -> None:
    """Writes what the commands read."""
    chance = np.random.default_rng(0)
    np.savez(folder / "loads.npz", loads=chance.zipf(1.6, (58, 256)).clip(max=300) + 20)
    np.savez(folder / "trace.npz", topk_ids=chance.integers(0, 256, (58, 4000, 8)), num_experts=256)
    names = ("deepseek-v2", "llama-3-70b", "mixtral-8x22b", "gpt-oss-120b", "qwen3-235b-a22b")
    job = {"seq_len": 4096, "global_batch": 1024, "tokens": 1e10, "deadline_h": 8}
    jobs = [{**job, "name": f"{name}-{k}", "model": name} for name in names for k in range(4)]
    (folder / "fleet.yaml").write_text(yaml.safe_dump({"jobs": jobs}))
    nodes = [
        {"name": f"n{k:03d}", "leaf": f"l{k % 37:02d}", "pod": f"p{k % 37 // 13}"}
        for k in range(256)
    ]
    levels = [
        {"name": "leaf", "gpus": 64, "background": 0.99},
        {"name": "pod", "gpus": 1024, "background": 0.99, "oversubscription": 3},
        {"name": "core", "gpus": 4096, "oversubscription": 3},
    ]
    scattered = {"base": "hgx-h800", "levels": levels, "nodes": nodes}
    (folder / "scattered.yaml").write_text(yaml.safe_dump(scattered))
    plan = f"{DEEPSEEK} --cluster hgx-h800 --gpus 2048"
    seconds(f"{plan} --pin pp=16,tp=1,cp=1,ep=8,micro_batch=1 --time-limit 20 -o IN/plan", folder)


def seconds(command: str, folder: Path) -> tuple[float, int, str]:
    """(wall seconds, exit code, last line of errors) of one command."""
    words = [word.replace("IN/", f"{folder}/") for word in command.split()]
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "cli.py", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    errors = done.stderr.strip().splitlines()
    return time.monotonic() - began_s, done.returncode, errors[-1] if errors else ""


def main() -> None:
    """Runs every command with every limit and prints the table."""
    limits = [float(word) for word in sys.argv[1:]] or [3.0, 10.0]
    print("| command | limit s | took s | exit code | kept |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given(folder)
        for command, text in COMMANDS.items():
            for limit_s in limits:
                took_s, code, words = seconds(f"{text} --time-limit {limit_s}", folder)
                kept = "yes" if took_s <= 1.2 * limit_s + 1 else "no"
                print(f"| {command} | {limit_s:g} | {took_s:.1f} | {code} | {kept} |", flush=True)
                if code not in (0, 1, 3):
                    print(f"{command}: {words}", file=sys.stderr)


if __name__ == "__main__":
    main()
