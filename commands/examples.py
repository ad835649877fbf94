"""The commands in groups, each with an example that `--help` shows and a test parses."""

from __future__ import annotations

import re
from collections.abc import Mapping

LONGEST_LINE = 70

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Plan": {
        "plan": "plan llama-3-8b --cluster dgx-h100 --gpus 64 --global-batch 256 --seq-len 8192 -o run",
        "recommend": "recommend llama-3-8b --cluster dgx-h100 --gpus 64 --global-batch 256 --seq-len 8192"
        " --step-time 5",
        "batch": "batch jobs.yaml -o plans",
        "fleet": "fleet jobs.yaml --cluster superpod-h100 -o shared",
        "experts": "experts loads.npz --cluster dgx-h100 --gpus 64 --slots 288 --format json -o out.json",
    },
    "Ask about a plan": {
        "compare": "compare run/plan.yaml today.sh --tokens 2e12",
        "explain": "explain run/plan.yaml",
        "report": "report run/plan.yaml -o plan.html",
        "trace": "trace run/plan.yaml -o trace.json",
        "traffic": "traffic run/plan.yaml",
        "map": "map run/plan.yaml --cluster nodes.yaml",
        "verify": "verify run",
    },
    "Start it, and learn from it": {
        "launch": "launch run/plan.yaml --target slurm -o job",
        "estimate": "estimate today.sh --from-launch --with cluster=dgx-h100",
        "validate": "validate runs.yaml",
        "calibrate": "calibrate runs.yaml -o stack.yaml",
    },
    "Single formulas": {
        "collective": "collective --op all-reduce --bytes 1G --ranks 64 --cluster dgx-h100",
        "roofline": "roofline --device h100-sxm-80gb --m 4096 --n 4096 --k 4096",
        "pipeline": "pipeline --pp 8 --micro-batches 32",
        "overlap": "overlap --comm 30ms --compute 100ms",
        "volumes": "volumes --params 7e9 --layers 32 --hidden 4096 --heads 32 --tp 8 --dp 8",
        "compress": "compress --bytes 16GB --ranks 64 --beta 50GB/s",
        "memory": "memory run.yaml",
    },
    "Models, clusters, files": {
        "catalog": "catalog models",
        "model": "model config.json",
        "topology": "topology import topology.conf --from slurm --node dgx-h100 -o cluster.yaml",
        "schema": "schema cluster",
    },
}
"""Title of a group, then commands with an example of each, written without the program's name."""


def example_of(command: str) -> str:
    """The example of a command, in lines that a shell joins; empty where it has none."""
    for examples in GROUPS.values():
        if command in examples:
            return _in_lines(f"meshwright {examples[command]}")
    return ""


def _in_lines(words: str) -> str:
    """A command line cut before options, with a backslash at the end of each line but the last."""
    lines = [""]
    for part in re.split(r" (?=-)", words):
        if len(lines[-1]) + len(part) > LONGEST_LINE:
            lines[-1] += " \\"
            lines.append(f"    {part}")
        else:
            lines[-1] = f"{lines[-1]} {part}" if lines[-1] else part
    return "\n".join(f"  {line}" for line in lines)
