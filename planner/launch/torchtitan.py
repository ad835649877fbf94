"""A plan as a torchtitan launch: flags and the registry module (read in torchtitan 0.3.0)."""

from __future__ import annotations

import json

from meshwright.frameworks.torchtitan import TORCHTITAN
from meshwright.planner.launch.common_env import nccl_env
from meshwright.planner.launch.legality import require_legal
from meshwright.planner.launch.node_script import Program, node_files
from meshwright.planner.launch.rank_files import rank_files
from meshwright.planner.launch.torchtitan_model import (
    FUNCTION,
    MODULE,
    registry_module,
    torchtitan_notes,
)
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.predicted import LayoutDoc


def torchtitan_args(plan: Plan, layout: LayoutDoc) -> list[str]:
    """Flags of torchtitan's trainer: module, degrees, batch, recomputation, compilation."""
    sharded = layout.zero_stage > 0
    local = layout.micro_batch * (layout.num_micro_batches if layout.pp > 1 else 1)
    flags: dict[str, object] = {
        "module": MODULE,
        "config": FUNCTION,
        "parallelism.data-parallel-replicate-degree": 1 if sharded else layout.dp,
        "parallelism.data-parallel-shard-degree": layout.dp if sharded else 1,
        "parallelism.tensor-parallel-degree": layout.tp,
        "parallelism.context-parallel-degree": layout.cp,
        "parallelism.pipeline-parallel-degree": layout.pp,
        "parallelism.expert-parallel-degree": layout.ep,
        "parallelism.fsdp-reshard-after-forward": "always" if layout.zero_stage == 3 else "never",
        "training.local-batch-size": local,
        "training.global-batch-size": plan.inputs.global_batch,
        "training.seq-len": plan.inputs.seq_len,
    }
    if layout.pp > 1:
        flags["parallelism.pipeline-parallel-schedule"] = TORCHTITAN.schedules[
            layout.schedule
        ].value
        flags["parallelism.pipeline-parallel-microbatch-size"] = layout.micro_batch
    args = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    if layout.tp > 1 and not layout.sequence_parallel:
        args.append("--parallelism.no-enable-sequence-parallel")
    if layout.pp > 1 or layout.ep > 1:
        # torchtitan cannot capture a graph around pipelines or the standard expert dispatcher.
        args.append("--training.disable-cuda-graphs")
    if plan.inputs.precision != "bf16":
        args.append("--compile.enable")
    # The subcommand comes last: what follows it would be read as its own flags.
    return [*args, "activation-checkpoint:" + ("full" if layout.recompute == "full" else "none")]


def launch_files(plan: Plan) -> dict[str, str]:
    """Texts by file name. Raises InfeasibleError if torchtitan would refuse the plan."""
    layout = require_legal(plan, TORCHTITAN)
    # torchtitan's mesh is pp, dp, cp, tp from the outside: the order of the plan's ranks.
    placed = rank_files(plan, layout, None, None, reorder=False)
    args = torchtitan_args(plan, layout)
    program = Program(
        framework=TORCHTITAN.title,
        words="-m torchtitan.train",
        usage="More arguments go ahead of activation-checkpoint in args below, or into the registry module.",
        before='export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"\n',
        notes=torchtitan_notes(plan.inputs.model),
    )
    return {
        "torchtitan_args.json": json.dumps(args, indent=1) + "\n",
        f"{MODULE}.py": registry_module(plan, layout),
        **node_files(plan, placed, program, args, nccl_env(plan, layout)),
    }
