"""Memory of one process that makes many plans.

    python -m benchmarks.memory_growth [plans]

Plans four dense models on 8 and 16 GPUs for ever other batches, 1,000 plans by default, and prints a Markdown
table of resident memory and processor seconds. What grows after the first plans is what caches keep.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import meshwright

MODELS = ("gpt2-xl", "llama-2-7b", "llama-3-8b", "qwen3-8b")
GPUS = (8, 16)
STEP = 50
"""Plans between two rows."""


def resident_mib() -> float:
    """Resident memory of this process (proc(5), statm)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def main() -> None:
    """Plans so often and prints the table."""
    plans = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print("| plans | resident MiB | processor s |")
    print("|---|---|---|")
    jobs = itertools.cycle(itertools.product(MODELS, GPUS))
    for made, (model, gpus) in enumerate(itertools.islice(jobs, plans), start=1):
        meshwright.plan(
            model,
            cluster="dgx-h100",
            gpus=gpus,
            global_batch=gpus * made,
            seq_len=2048,
            robustness=False,
        )
        if made % STEP == 0:
            print(f"| {made:,} | {resident_mib():.1f} | {time.process_time():.0f} |", flush=True)


if __name__ == "__main__":
    main()
