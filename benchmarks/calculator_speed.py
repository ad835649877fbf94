"""Seconds of whole calculator processes: every single-formula command of docs/worked_examples.md.

    python -m benchmarks.calculator_speed [runs]

Each is run with `--json --why`. Prints a Markdown table by calculator: how many of its commands say formula and
source, and the median and the worst of all their runs: of the clock, and of the processor alone, which is what
the clock shows on an idle machine. Nothing in the test suite depends on the seconds.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict

from benchmarks.plan_speed import ROOT

COMMAND = re.compile(r"`meshwright ([^`]+)`")
CALCULATORS = ("collective", "roofline", "pipeline", "overlap", "volumes", "compress", "experts")
MEMORY = "memory docs/examples/megatron_a100.yaml"


def commands_of_page() -> dict[str, list[str]]:
    """By calculator, its commands on the page that need no plan."""
    page = (ROOT / "docs" / "worked_examples.md").read_text(encoding="utf-8")
    commands: dict[str, list[str]] = defaultdict(list)
    for text in dict.fromkeys(COMMAND.findall(page)):
        name = text.split()[0]
        if name in CALCULATORS and ".yaml" not in text.split()[1]:
            commands[name].append(text)
    return {**commands, "memory": [MEMORY]}


def main() -> None:
    """Runs every command so often and prints the table."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print(
        "| calculator | commands | with formula and source | median s | worst s | processor, median s | worst s |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, commands in commands_of_page().items():
        walls_s, busy_s, explained = [], [], 0
        for text in commands:
            words = [sys.executable, "cli.py", *shlex.split(text), "--json", "--why"]
            for _ in range(runs):
                wall_s, processor_s, output = timed(words)
                walls_s.append(wall_s)
                busy_s.append(processor_s)
            formulas = json.loads(output).get("formulas", [])
            explained += bool(formulas) and all(row["source"] for row in formulas)
        figures = [f"{statistics.median(of):.2f} | {max(of):.2f}" for of in (walls_s, busy_s)]
        print(f"| {name} | {len(commands)} | {explained} | {' | '.join(figures)} |", flush=True)


def timed(command: list[str]) -> tuple[float, float, str]:
    """Seconds of the clock and of the processor, and the standard output of one process."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, _, usage = os.wait4(process.pid, 0)
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, output


if __name__ == "__main__":
    main()
