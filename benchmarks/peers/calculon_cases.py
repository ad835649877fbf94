"""Measured runs in the words of Calculon (Isaev et al., SC 2023, doi:10.1145/3581784.3607102).

Calculon describes a case by three files: application, execution and system. Ours are made from a run; the
system begins as the one that Calculon ships for the device.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.drive import Answer, drive
from meshwright.costmodel.layout import Recompute
from meshwright.planner.runs.run_file import Run
from meshwright.planner.runs.run_terms import ALL_LAYERS

DRIVER = Path(__file__).with_name("calculon_driver.py")
SYSTEMS = {
    "a100-sxm-80gb": "systems/a100_80g.json",
    "h100-sxm-80gb": "systems/h100_80g_nvl8.json",
}
"""Calculon's own description of a device, with the efficiencies that its authors chose."""
DATATYPES = {"bf16": "float16", "fp16": "float16", "fp8": "float8"}
"""Its systems name no bfloat16, which runs at the rate of float16."""
RECOMPUTATION = {
    int(Recompute.NONE): "none",
    int(Recompute.CORE_ATTENTION): "attn_only",
    int(Recompute.FULL): "full",
}
GATED_WIDTH = 1.5
"""Its feed-forward has two matrices: one of three, this much wider, has the same parameters and FLOP."""
NO_LIMIT_GIB = 8e10
"""As in its `systems/a100_80e.json`. The runs ran, so its memory model does not judge them here."""
BITS_PER_BYTE = 8


def why_not(run: Run) -> str | None:
    """What of a run Calculon has no words for, or None where it has them all.

    Parameters
    ----------
    run : Run

    Returns
    -------
    str or None
        The first such thing.
    """
    workload, layout, model = run.workload, run.layout, run.workload.model
    every_layer = int(layout.recompute_layers) in (0, ALL_LAYERS)
    refusals = {
        "a device that it has no system for": workload.cluster.device.name not in SYSTEMS,
        "a precision that it does not know": workload.precision not in DATATYPES,
        "experts": model.moe is not None,
        "context parallelism": int(layout.cp) > 1,
        "grouped keys and values": model.kv_heads not in (1, model.heads),
        "sharding beyond the optimizer's states": int(layout.zero_stage) > 1,
        "optimizer states sharded inside a group": int(layout.shard_groups) > 1,
        "recomputation of single modules": int(layout.recompute) not in RECOMPUTATION,
        "recomputation of some layers": not every_layer,
        "several flushes a step": workload.flushes > 1,
        "layers dealt out by hand": run.stages is not None,
    }
    return next((reason for reason, holds in refusals.items() if holds), None)


def application_of(run: Run) -> dict[str, int]:
    """The model as Calculon's `models/*.json` describe one. It has neither vocabulary nor head."""
    model = run.workload.model
    gated = model.activation in ("swiglu", "geglu")
    width = GATED_WIDTH if gated else 1.0
    return {
        "hidden": model.hidden,
        "feedforward": round(width * model.ffn_hidden),
        "seq_size": run.workload.seq_len,
        "attn_heads": model.heads,
        "attn_size": model.head_dim or model.hidden // model.heads,
        "num_blocks": model.layers,
    }


def execution_of(run: Run) -> dict[str, Any]:
    """The layout as Calculon's `examples/*.json` describe one.

    Ranks run through tp, dp, pp as in Megatron; an axis uses the links of a node where it ends inside one, as
    Calculon prices a group on one network only. Sequence parallelism gathers once more in the backward pass
    (Korthikanti et al. 2022, section 4.2.2). Communication of tensor parallelism overlaps by a ring, as
    Transformer Engine's does.
    """
    workload, layout = run.workload, run.layout
    tp, dp, pp = int(layout.tp), int(layout.dp), int(layout.pp)
    node = workload.cluster.nvlink_domain
    recomputation = RECOMPUTATION[int(layout.recompute)]
    sequence_parallel = bool(layout.sequence_parallel) and tp > 1
    overlaps_tp = workload.tp_overlap and tp > 1
    return {
        "num_procs": tp * dp * pp,
        "tensor_par": tp,
        "pipeline_par": pp,
        "data_par": dp,
        "tensor_par_net": int(tp > node),
        "data_par_net": int(tp * dp > node),
        "pipeline_par_net": int(tp * dp * pp > node),
        "batch_size": workload.global_batch,
        "microbatch_size": int(layout.micro_batch),
        "datatype": DATATYPES[workload.precision],
        "fused_activation": True,
        "attention_type": "multihead" if workload.model.kv_heads > 1 else "multiquery",
        "activation_recompute": recomputation,
        "pipeline_interleaving": int(layout.vpp),
        "optimizer_sharding": int(layout.zero_stage) == 1 and dp > 1,
        "tensor_par_comm_type": "rs_ag" if sequence_parallel else "ar",
        "tensor_par_overlap": "ring" if overlaps_tp else "none",
        "seq_par_ag_redo": sequence_parallel and recomputation != "full",
        "data_par_overlap": workload.dp_overlap and dp > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


def system_of(run: Run, shipped: dict[str, Any]) -> dict[str, Any]:
    """Calculon's system of the device with the run's own links, and without its limit of memory.

    Parameters
    ----------
    run : Run
    shipped : dict
        The system as Calculon ships it: two networks, the node's first.
    """
    cluster = run.workload.cluster
    system = copy.deepcopy(shipped)
    inside, between = system["networks"]
    inside["size"] = cluster.nvlink_domain
    inside["bandwidth"] = cluster.nvlink_gb_per_s or cluster.device.scale_up_gb_per_s
    between["bandwidth"] = cluster.nic_gbps_per_gpu / BITS_PER_BYTE
    system["mem1"]["GiB"] = NO_LIMIT_GIB
    return system


def cases_of(runs: Sequence[Run], checkout: Path) -> list[dict[str, Any]]:
    """The runs as Calculon's three files each.

    Parameters
    ----------
    runs : sequence of Run
        Runs of which `why_not` says nothing.
    checkout : Path
        Calculon's source.
    """
    cases = []
    for run in runs:
        shipped = json.loads((checkout / SYSTEMS[run.workload.cluster.device.name]).read_text())
        case = {
            "application": application_of(run),
            "execution": execution_of(run),
            "system": system_of(run, shipped),
        }
        cases.append(case)
    return cases


def ask(runs: Sequence[Run], checkout: Path, python: str) -> list[Answer]:
    """Calculon's answers to some runs of which `why_not` says nothing, in their order (`drive.drive`).

    `python` needs what Calculon imports: numpy, pandas, psutil.
    """
    return drive(DRIVER, cases_of(runs, checkout), checkout, python)
