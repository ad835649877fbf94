"""What Megatron-LM asks of attention to positions that an indexer chooses (megatron-core 0.19.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.precision import is_narrow
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.layout import Recompute
from meshwright.costmodel.workload import Workload


class MegatronSparseAttention(Rule):
    """Sparse attention on Hopper or Blackwell, with cp 1, no CUDA graphs, no multi-token prediction.

    cp_comm_type has to be allgather, which is not planned (transformer_config.py). AbsorbedMLA wants sequence
    parallelism beside tp, recomputes no up-projections in FP8 and reads its weights at 16 bits
    (experimental_attention_variant/absorbed_mla.py). pretrain_gpt.py asserts against modules of multi-token
    prediction (megatron/training/models/gpt.py, mtp_block_spec). FlashMLA is for the two architectures
    (dsa_cudnn_kernels.py), and recipes that use it capture no graphs (Megatron-Bridge,
    perf_recipes/glm_moe_dsa).
    """

    name = "megatron-sparse-attention"
    unit = "conditions"

    def applies(self, workload: Workload) -> bool:
        return workload.model.indexer is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        work, tp = table.workload, column(table, "tp")
        if not self.applies(work):
            return as_excess(np.zeros_like(tp))
        narrow = is_narrow(work)
        of_run = int(work.cuda_graph != "none") + int(bool(work.fp8_parameters))
        of_run += int(work.model.mtp_layers > 0)
        of_run += int(work.cluster.device.architecture not in ("hopper", "blackwell"))
        recomputed = (column(table, "recompute") & int(Recompute.MLA_UP_PROJECTION)) != 0
        broken = of_run + (column(table, "cp") > 1) + (recomputed & narrow)
        return as_excess(broken + ((tp > 1) & (column(table, "sequence_parallel") == 0)))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work, layout = plan.workload, plan.layout
        if not self.applies(work):
            return None
        architecture, broken = work.cluster.device.architecture, []
        if work.cuda_graph != "none":
            broken.append(f"CUDA graphs ({work.cuda_graph})")
        if work.fp8_parameters:
            broken.append("parameters in FP8")
        if work.model.mtp_layers:
            broken.append("multi-token prediction")
        if architecture not in ("hopper", "blackwell"):
            broken.append(f"kernels for {architecture}")
        if int(layout.cp) > 1:
            broken.append(f"cp {int(layout.cp)}")
        if int(layout.recompute) & Recompute.MLA_UP_PROJECTION and is_narrow(work):
            broken.append(f"up-projections recomputed in {work.precision}")
        if int(layout.tp) > 1 and not layout.sequence_parallel:
            broken.append("tensor parallelism without sequence parallelism")
        if not broken:
            return None
        return self.finding(
            value=len(broken),
            words=f"sparse attention is planned with no {' and no '.join(broken)}",
            remedy="Set cp to 1 and mtp_layers to 0, on Hopper or Blackwell, without CUDA graphs and FP8 "
            "parameters; or plan the model with full attention, as deepseek_v3.",
        )
