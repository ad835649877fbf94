"""Plans made by hand, without a search."""

from __future__ import annotations

from typing import Any

from meshwright.cluster_specs.reader import load_cluster
from meshwright.model_specs.reader import load_catalog_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.plan.document import Objective, Plan, SolverReport
from meshwright.planner.request.plan_request import PlanInputs
from meshwright.planner.runs.run_terms import LayoutDoc


def make_plan(
    model: str | ModelSpec = "llama-3-8b", cluster: str = "dgx-h100", **changes: Any
) -> Plan:
    """A plan as it might have come out of a search.

    `changes` are fields of its layout (all degrees are 1 unless given, layers are dealt out evenly), its
    precision, optimizer and sequence length, and its mapping.
    """
    spec = load_catalog_model(model) if isinstance(model, str) else model
    fields: dict[str, Any] = {
        **dict.fromkeys(
            ("tp", "cp", "pp", "dp", "ep", "etp", "vpp", "micro_batch", "num_micro_batches"), 1
        ),
        "sequence_parallel": False,
        "zero_stage": 1,
        "recompute": "none",
        "schedule": "1f1b",
    }
    inputs: dict[str, Any] = {"precision": "bf16", "optimizer": "adam", "seq_len": 4096}
    inputs |= {key: changes.pop(key) for key in list(changes) if key in inputs}
    mapping = changes.pop("mapping", None)
    fields |= changes
    if "stages" not in fields:
        n = fields["pp"] * fields["vpp"]
        chunks = [spec.layers // n + (i < spec.layers % n) for i in range(n)]
        fields["stages"] = [chunks[rank :: fields["pp"]] for rank in range(fields["pp"])]
    layout = LayoutDoc(**fields)
    return Plan(
        status="optimal",
        objective=Objective(step_time_s=1.0, lower_bound_s=1.0, gap=0.0),
        layout=layout,
        predicted=None,
        mapping=mapping,
        solver=SolverReport(wall_s=0, bound_rounds=1, workers=1, seed=0, version="test"),
        inputs=PlanInputs(
            model=spec,
            cluster=load_cluster(cluster),
            gpus=layout.tp * layout.cp * layout.pp * layout.dp,
            global_batch=layout.micro_batch * layout.num_micro_batches * layout.dp,
            **inputs,
        ),
    )
