"""Seconds and peak memory of whole `meshwright plan` processes on the jobs that the planner is judged by.

    python -m benchmarks.plan_speed [runs]

Prints a Markdown table: median and worst of the runs. Nothing in the test suite depends on these figures.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOBS = (
    ("llama-3.1-405b", "llama3-24k", 16_384, 2_048, 8_192),
    ("deepseek-v3", "hgx-h800", 2_048, 15_360, 4_096),
    ("gpt3-175b", "superpod-a100", 1_024, 1_536, 2_048),
    ("mixtral-8x22b", "dgx-h100", 512, 512, 4_096),
    ("llama-3-8b", "dgx-h100", 8, 128, 8_192),
    ("llama-3.1-405b", "dgx-h100", 131_072, 16_384, 8_192),
    ("deepseek-v3", "gb200-nvl72", 131_072, 131_072, 4_096),
)


def run_once(command: list[str]) -> tuple[float, float, str]:
    """(wall seconds, peak MiB, standard output) of one process, with modules compiled as in an installation."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=ROOT, text=True, env=environment
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, _, usage = os.wait4(process.pid, 0)
    return time.perf_counter() - started, usage.ru_maxrss / 1024, output


def main() -> None:
    """Measures every job."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    walls = [run_once([sys.executable, "cli.py", "--help"])[0] for _ in range(max(runs, 5))]
    print(f"`--help`: median {statistics.median(walls):.3f} s, worst {max(walls):.3f} s\n")
    print(
        "| job | status | gap | rounds | layouts | median s | worst s | peak MiB |\n|---|---|---|---|---|---|---|---|"
    )
    for model, cluster, gpus, batch, seq_len in JOBS:
        command = [
            sys.executable,
            "cli.py",
            "plan",
            model,
            "--cluster",
            cluster,
            "--gpus",
            str(gpus),
        ]
        command += ["--global-batch", str(batch), "--seq-len", str(seq_len), "--json"]
        run_once(command)  # compiles what this job loads
        seen = [run_once(command) for _ in range(runs)]
        plan = json.loads(seen[0][2])
        solver = plan["solver"]
        times = [wall for wall, _, _ in seen]
        print(
            f"| {model}, {gpus:,} of {cluster}, batch {batch:,}, sequence {seq_len:,} | {plan['status']} | "
            f"{plan['objective']['gap']} | {solver['bound_rounds']} | {solver['layouts_considered']:,} | "
            f"{statistics.median(times):.2f} | {max(times):.2f} | {max(peak for _, peak, _ in seen):.0f} |"
        )


if __name__ == "__main__":
    main()
