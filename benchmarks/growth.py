"""Seconds and memory of plans as the cluster grows: python -m benchmarks.growth [most GPUs]

Whole processes. The exponent is that of seconds ~ GPUs^a by least squares over the logarithms, above what a
process takes to start; 131,072 GPUs are compared with 1,024.
"""

from __future__ import annotations

import json
import os
import platform
import sys

import numpy as np

from benchmarks.plan_speed import run_once

SIZES = (8, 32, 128, 512, 1_024, 4_096, 16_384, 65_536, 131_072)
JOBS = (("llama-3.1-405b", "dgx-h100", 8_192), ("deepseek-v3", "gb200-nvl72", 4_096))
COMPARED = (1_024, 131_072)


def main() -> None:
    most = int(sys.argv[1]) if len(sys.argv) > 1 else SIZES[-1]
    sizes = [size for size in SIZES if size <= most]
    print(f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    cli = [sys.executable, "cli.py"]
    starts = [run_once([*cli, "--version"])[0] for _ in range(5)]
    imports = [
        run_once([sys.executable, "-c", "import meshwright.planner.plan.make_plan"])[0]
        for _ in range(5)
    ]
    start_s = min(imports)
    print(f"`--version` {min(starts):.2f} s; all that a plan imports {start_s:.2f} s\n")
    print("| model | GPUs | status | layouts | s | MiB |\n|---|---|---|---|---|---|")
    exponents = []
    for model, cluster, seq_len in JOBS:
        seconds: dict[int, float] = {}
        for size in sizes:
            workload = ["--gpus", str(size), "--global-batch", str(max(size, 128))]
            command = [*cli, "plan", model, "--cluster", cluster, *workload]
            wall_s, mib, output = run_once([*command, "--seq-len", str(seq_len), "--json"])
            plan = json.loads(output)
            layouts = plan["solver"]["layouts_considered"]
            print(
                f"| {model} | {size:,} | {plan['status']} | {layouts:,} | {wall_s:.2f} | {mib:.0f} |",
                flush=True,
            )
            if plan["layout"] is not None:
                seconds[size] = wall_s
        exponents.append(_growth(model, seconds, start_s))
    print("\n" + "\n".join(exponents))


def _growth(model: str, seconds: dict[int, float], start_s: float) -> str:
    sizes = np.array(list(seconds))
    own_s = np.maximum(np.array(list(seconds.values())) - start_s, 0.01)
    exponent = (
        float(np.polyfit(np.log(sizes), np.log(own_s), 1)[0]) if len(sizes) > 1 else float("nan")
    )
    words = f"{model}: seconds grow as GPUs^{exponent:.2f}"
    small, large = COMPARED
    if small in seconds and large in seconds:
        words += f"; {large:,} GPUs take {seconds[large] / seconds[small]:.1f} times as long as {small:,}"
    return words + "."


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            names = [
                line.partition(":")[2].strip() for line in stream if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
