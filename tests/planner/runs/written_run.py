"""Runs written back as run files: reading one again must give the same run."""

from __future__ import annotations

from typing import Any

from meshwright.costmodel.layout import Recompute
from meshwright.costmodel.schedules import schedule_name
from meshwright.planner.runs.run_file import DRIVER, Run
from meshwright.planner.runs.run_terms import ALL_LAYERS, recompute_words


def run_to_mapping(run: Run) -> dict[str, Any]:
    """The run-file form of a run; reading it back gives the same workload, layout, stages and measurement."""
    work, layout = run.workload, run.layout
    mask = Recompute(int(layout.recompute))
    settings: dict[str, Any] = {
        "seq_len": work.seq_len,
        "global_batch": work.global_batch,
        **{
            name: getattr(layout, name)
            for name in ("micro_batch", "tp", "pp", "vpp", "cp", "dp", "ep", "etp")
        },
        "schedule": schedule_name(int(layout.schedule), int(layout.vpp)),
        "sequence_parallel": bool(layout.sequence_parallel),
        "zero_stage": layout.zero_stage,
        "shard_groups": layout.shard_groups,
        "optimizer_offload": layout.optimizer_offload,
        **_recompute_settings(mask, int(layout.recompute_layers)),
        "precision": work.precision,
        "optimizer": work.optimizer,
        "overlap": {name: getattr(work, f"{name}_overlap") for name in ("dp", "tp", "pp", "ep")},
        "framework": work.framework,
        "cuda_graph": work.cuda_graph,
        "launch_blocking": work.launch_blocking,
        "checked_collectives": work.checked_collectives,
        "first_fp8_kernels": work.first_fp8_kernels,
        "fp8_attention": work.fp8_attention,
        "cp_comm": work.cp_comm,
        **({"fused_loss": work.te_loss} if work.te_loss is not None else {}),
        **({"cp_inner": work.cp_inner} if work.cp_inner is not None else {}),
        "offload_modules": [m for m in work.offload_modules.split("+") if m != "none"],
        "moe_dispatch": work.moe_dispatch,
        "expert_imbalance": work.expert_imbalance,
        "reserve_gib": work.reserve_gib,
    }
    if run.stages is not None:
        settings["stages"] = [list(rank) for rank in run.stages]
    mapping: dict[str, Any] = {
        "id": run.id,
        "source": run.source,
        "model": work.model.model_dump(exclude_none=True),
        "cluster": work.cluster.model_dump(exclude_none=True),
        "run": settings,
        "tags": list(run.tags),
    }
    if run.measured is not None:
        known: dict[str, object] = {
            "step_time_s": run.measured.step_time_s,
            "memory_gib": run.measured.memory_gib,
            "memory_note": DRIVER if run.measured.from_driver else None,
        }
        mapping["measured"] = {key: value for key, value in known.items() if value is not None}
    if run.suspect is not None:
        mapping["suspect"] = run.suspect
    return mapping


def _recompute_settings(mask: Recompute, layers: int) -> dict[str, Any]:
    kind, modules, full_layers = recompute_words(mask, layers)
    settings: dict[str, Any] = {"recompute": kind}
    if kind == "selective":
        settings["recompute_modules"] = list(modules)
    if kind == "full" and full_layers < ALL_LAYERS:
        settings["recompute_layers"] = full_layers
    return settings
