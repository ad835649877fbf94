"""Measured runs in the words of SimuMax (github.com/MooreThreads/SimuMax).

SimuMax describes a case by three files: model, strategy and system. It ships efficiencies of kernels for one A100, the
PCIe one, whose tensor cores are the SXM one's. The system here has those, and the run's own links in the place
of PCIe, as its `b200_bf16_ceperm.json` writes a node of switched links.
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

DRIVER = Path(__file__).with_name("simumax_driver.py")
SYSTEM = "configs/system/a100_pcie.json"
SWITCHED = "configs/system/b200_bf16_ceperm.json"
"""Its only system of switched links; their shares of the wire's rate and their latencies are taken."""
BITS_PER_BYTE = 8
RECOMPUTATION = {
    int(Recompute.NONE): None,
    int(Recompute.CORE_ATTENTION): "sdp_only",
    int(Recompute.FULL): "full_block",
}


def model_of(run: Run) -> dict[str, Any]:
    """The model as SimuMax's `configs/models/*.json` describe one."""
    model = run.workload.model
    return {
        "model_type": "dense",
        "model_name": "model",
        "hidden_size": model.hidden,
        "head_num": model.heads,
        "kv_head_num": model.kv_heads,
        "head_size": model.head_dim or model.hidden // model.heads,
        "intermediate_size": model.ffn_hidden,
        "layer_num": model.layers,
        "vocab_size": model.vocab,
        "use_swiglu": model.activation in ("swiglu", "geglu"),
    }


def strategy_of(run: Run) -> dict[str, Any]:
    """The layout as SimuMax's `configs/strategy/*.json` describe one. It has no kernel of attention but
    flash, and times virtual stages only where transfers between stages block."""
    workload, layout = run.workload, run.layout
    tp, dp, pp = int(layout.tp), int(layout.dp), int(layout.pp)
    recomputation = RECOMPUTATION[int(layout.recompute)]
    return {
        "seq_len": workload.seq_len,
        "micro_batch_size": int(layout.micro_batch),
        "micro_batch_num": int(layout.num_micro_batches),
        "dtype": "bf16",
        "world_size": tp * dp * pp,
        "tp_size": tp,
        "pp_size": pp,
        "interleaving_size": int(layout.vpp),
        "pp_comm_async": int(layout.vpp) == 1,
        "enable_sequence_parallel": bool(layout.sequence_parallel) and tp > 1,
        "zero_state": int(layout.zero_stage),
        "overlap_grad_reduce": workload.dp_overlap,
        "use_fused_norm": workload.fused_norm is not False,
        "enable_recompute": recomputation is not None,
        "recompute_granularity": recomputation,
        "recompute_layer_num": workload.model.layers if recomputation else 0,
    }


def system_of(run: Run, shipped: dict[str, Any], switched: dict[str, Any]) -> dict[str, Any]:
    """SimuMax's A100 with the run's own links.

    Parameters
    ----------
    run : Run
    shipped : dict
        Its A100, whose kernels are kept.
    switched : dict
        Its system of switched links.
    """
    cluster = run.workload.cluster
    node = cluster.nvlink_domain
    networks = copy.deepcopy(switched["networks"])
    inside = cluster.nvlink_gb_per_s or cluster.device.scale_up_gb_per_s
    for name in ("low_intra_node", "high_intra_node"):
        networks[name]["bandwidth"]["gbps"] = inside
    networks["inter_node"]["bandwidth"]["gbps"] = node * cluster.nic_gbps_per_gpu / BITS_PER_BYTE
    return {
        **copy.deepcopy(shipped),
        "sys_name": "a100_sxm",
        "num_per_node": node,
        "networks": networks,
    }


def ask(runs: Sequence[Run], checkout: Path, python: str) -> list[Answer]:
    """SimuMax's answers to some dense runs on A100 without context parallelism, in their order (`drive.drive`).

    `python` needs what SimuMax imports, as its `requirements.txt` says.
    """
    shipped, switched = (json.loads((checkout / name).read_text()) for name in (SYSTEM, SWITCHED))
    cases = [
        {
            "model": model_of(run),
            "strategy": strategy_of(run),
            "system": system_of(run, shipped, switched),
        }
        for run in runs
    ]
    return drive(DRIVER, cases, checkout, python)
