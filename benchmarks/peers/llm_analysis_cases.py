"""Measured runs in the words of llm-analysis (Cheng Li, github.com/cli99/llm-analysis).

It prices one micro-batch by FLOP and bytes of each module, three forward passes a step, and knows no bubble of the
pipeline and no transfer between its stages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.drive import Answer, drive
from meshwright.costmodel.layout import Recompute
from meshwright.planner.runs.run_file import Run

DRIVER = Path(__file__).with_name("llm_analysis_driver.py")
GPU = "llm_analysis/gpu_configs/a100-sxm-80gb.json"
FLOPS_EFFICIENCY = 0.5
"""What its README names for the training of large models where nothing was measured; its default, 1, is a bound."""
MEMORY_EFFICIENCY = 0.9
"""Its README's figure for memory."""
RECOMPUTATION = {
    int(Recompute.NONE): 0,
    int(Recompute.CORE_ATTENTION): 1,
    int(Recompute.FULL): 4,
}
"""Values of its `ActivationRecomputation`."""


def case_of(run: Run, shipped: dict[str, Any]) -> dict[str, Any]:
    """A run as arguments of its classes.

    Parameters
    ----------
    run : Run
        Dense, on A100, without context parallelism.
    shipped : dict
        Its A100 and the links that it gives it. With those of the run, 25 GB/s a GPU between nodes, it would gather
        all weights of a layer over them in every pass, whatever the ZeRO stage, and be 3 to 20 times too slow.
    """
    workload, layout = run.workload, run.layout
    model = workload.model
    tp, dp, pp = int(layout.tp), int(layout.dp), int(layout.pp)
    return {
        "model": {
            "name": "model",
            "num_layers": model.layers,
            "n_head": model.heads,
            "num_key_value_heads": model.kv_heads,
            "hidden_dim": model.hidden,
            "vocab_size": model.vocab,
            "max_seq_len": workload.seq_len,
            "ffn_embed_dim": model.ffn_hidden,
            "mlp_gated_linear_units": model.activation in ("swiglu", "geglu"),
        },
        "gpu": shipped,
        "parallelism": {
            "tp_size": tp,
            "pp_size": pp,
            "dp_size": dp,
            "sp_size": tp if layout.sequence_parallel else 1,
        },
        "analysis": {
            "flops_efficiency": FLOPS_EFFICIENCY,
            "hbm_memory_efficiency": MEMORY_EFFICIENCY,
        },
        "training": {
            "batch_size_per_gpu": int(layout.micro_batch),
            "gradient_accumulation_steps": int(layout.num_micro_batches),
            "seq_len": workload.seq_len,
            "recomputation": RECOMPUTATION[int(layout.recompute)],
            "zero_stage": int(layout.zero_stage),
        },
    }


def ask(runs: Sequence[Run], checkout: Path, python: str) -> list[Answer]:
    """The answers of llm-analysis to some dense runs on A100 without context parallelism, in their order (`drive.drive`).

    `python` needs what it imports: fire.
    """
    shipped = json.loads((checkout / GPU).read_text())
    return drive(DRIVER, [case_of(run, shipped) for run in runs], checkout, python)
