"""A batch of 1,000 jobs, cold and from a warm cache; a fleet of 50 jobs.

    python -m benchmarks.batch_speed FOLDER [gpu sizes] [batches]

Prints Markdown. Processor seconds are those of all processes: unlike wall seconds they say little of what
else ran on the machine. Peak memory is of the largest process (parent or worker), not of all together.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
MODELS = [
    "gpt2-xl",
    "gpt3-175b",
    "bloom-176b",
    "llama-2-7b",
    "llama-2-13b",
    "llama-2-70b",
    "llama-3-8b",
    "llama-3-70b",
    "llama-3.1-405b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "deepseek-v2",
    "deepseek-v3",
    "qwen3-8b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "nemotron-4-15b",
]
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BATCHES = (256, 512, 1024, 2048, 4096)
FLEET_MODELS = [
    "llama-2-7b",
    "llama-2-13b",
    "llama-2-70b",
    "llama-3-8b",
    "llama-3-70b",
    "mixtral-8x7b",
    "qwen3-8b",
    "qwen3-32b",
    "gpt-oss-20b",
    "nemotron-4-15b",
]


def run(name: str, *arguments: str) -> tuple[float, float, str]:
    """(wall seconds, processor seconds, standard output) of one command."""
    began, before_s = time.monotonic(), _processor_s()
    command = [sys.executable, "cli.py", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"{name} ended with {done.returncode}")
    return time.monotonic() - began, _processor_s() - before_s, done.stdout


def _processor_s() -> float:
    """Of all processes that ended, those that they started included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def batch(folder: Path, gpus: int, batches: int) -> None:
    """Cold, then warm into another folder."""
    matrix = {
        "model": list(MODELS),
        "cluster": "dgx-h100",
        "gpus": list(GPUS[:gpus]),
        "global_batch": list(BATCHES[:batches]),
    }
    jobs = folder / "jobs.yaml"
    jobs.write_text(
        yaml.safe_dump({"matrix": {**matrix, "seq_len": 4096}}, sort_keys=False), encoding="utf-8"
    )
    print(
        "| batch | jobs | s | processor s | jobs/s | from the cache | by status | peak MiB of a process |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name in ("cold", "warm"):
        line = [
            "batch",
            str(jobs),
            "-o",
            str(folder / name),
            "--cache",
            str(folder / "kept"),
            "--workers",
            "2",
            "--json",
        ]
        wall, processor_s, text = run(name, *line)
        document = json.loads(text)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        count = len(document["jobs"])
        print(
            f"| {name} | {count:,} | {wall:.0f} | {processor_s:.0f} | {count / wall:.1f} | {document['cached']:,} | "
            f"{document['summary']} | {peak:.0f} |",
            flush=True,
        )


def fleet(folder: Path) -> None:
    """50 jobs of 10 models on 512 nodes."""
    chance = random.Random(1)
    jobs = [
        {
            "name": f"job{k:02d}",
            "model": chance.choice(FLEET_MODELS),
            "global_batch": chance.choice([256, 512, 1024]),
            "seq_len": 4096,
            "weight": chance.choice([1, 1, 2, 3]),
            "tokens": chance.choice([1, 2, 5, 10, 20]) * 1e9,
            "deadline_h": chance.choice([4, 8, 24]),
            "may_wait": chance.random() < 0.5,
            "max_gpus": chance.choice([64, 128, 256, 512, 1024]),
        }
        for k in range(50)
    ]
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"jobs": jobs}, sort_keys=False), encoding="utf-8")
    print(
        "\n| fleet objective | status | gap | leaves touched (at least) | s with plans from the cache | processor s |\n"
        "|---|---|---|---|---|---|"
    )
    line = [
        "fleet",
        str(path),
        "--cluster",
        "superpod-h100",
        "--gpus",
        "4096",
        "--cache",
        str(folder / "kept"),
        "--json",
    ]
    cold, cold_processor_s, _ = run("plans", *line)
    for objective in ("throughput", "makespan", "deadlines"):
        wall, processor_s, text = run(objective, *line, "--objective", objective)
        document = json.loads(text)
        goal = document["objective"]
        print(
            f"| {objective} | {goal['status']} | {goal['gap']:.4f} | {document['leaves_touched']} "
            f"({document['least_leaves_touched']}) | {wall:.1f} | {processor_s:.1f} |",
            flush=True,
        )
    words = f"{cold:.0f} s, {cold_processor_s:.0f} of the processor"
    print(f"\nThe first fleet, its plans not yet in the cache: {words}.")


def main() -> None:
    """Measures both."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.pop("XDG_CACHE_HOME", None)
    batch(
        folder,
        int(sys.argv[2]) if len(sys.argv) > 2 else 10,
        int(sys.argv[3]) if len(sys.argv) > 3 else 5,
    )
    fleet(folder)


if __name__ == "__main__":
    main()
