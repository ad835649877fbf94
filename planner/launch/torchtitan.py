"""A plan as a torchtitan launch: flags and the registry module (read in torchtitan 0.3.0)."""

from __future__ import annotations

from meshwright.frameworks.torchtitan import TORCHTITAN
from meshwright.planner.launch.flag_words import flag_words
from meshwright.planner.launch.launch_script import Program
from meshwright.planner.launch.legal_launch import Launch
from meshwright.planner.launch.torchtitan_model import (
    FUNCTION,
    MODULE,
    registry_module,
    torchtitan_notes,
)
from meshwright.planner.launch.writer import Start, Writer, json_file


def torchtitan_args(launch: Launch) -> list[str]:
    """Flags of torchtitan's trainer: module, degrees, batch, recomputation, compilation.

    Its mesh is pp, dp, cp, tp from the outside: the order of the plan's ranks.
    """
    layout, inputs = launch.layout, launch.inputs
    piped = layout.pp > 1
    replicas = layout.shard_groups if layout.zero_stage > 0 else layout.dp
    flags: dict[str, object] = {
        "--module": MODULE,
        "--config": FUNCTION,
        "--parallelism.data-parallel-replicate-degree": replicas,
        "--parallelism.data-parallel-shard-degree": layout.dp // replicas,
        "--parallelism.tensor-parallel-degree": layout.tp,
        "--parallelism.context-parallel-degree": layout.cp,
        "--parallelism.pipeline-parallel-degree": layout.pp,
        "--parallelism.expert-parallel-degree": layout.ep,
        "--parallelism.fsdp-reshard-after-forward": "always" if layout.zero_stage == 3 else "never",
        "--training.local-batch-size": layout.micro_batch
        * (layout.num_micro_batches if piped else 1),
        "--training.global-batch-size": inputs.global_batch,
        "--training.seq-len": inputs.seq_len,
    }
    if piped:
        schedule = TORCHTITAN.schedules[layout.schedule]
        flags[schedule.flag] = schedule.value
        flags["--parallelism.pipeline-parallel-microbatch-size"] = layout.micro_batch
    one_sequence = layout.tp > 1 and not layout.sequence_parallel
    flags["--parallelism.no-enable-sequence-parallel"] = one_sequence
    # torchtitan cannot capture a graph around pipelines, the standard expert dispatcher or the host's sums.
    offloads = layout.optimizer_offload > 0
    flags["--training.disable-cuda-graphs"] = piped or layout.ep > 1 or offloads
    flags["--training.enable-cpu-offload"] = offloads
    flags["--compile.enable"] = launch.execution.compiled
    # The subcommand comes last: what follows it would be read as its own flags.
    checkpointing = "full" if layout.recompute == "full" else "none"
    return [*flag_words(flags), f"activation-checkpoint:{checkpointing}"]


def torchtitan_start(launch: Launch) -> Start:
    """torchtitan's trainer with the plan's flags, and the module that gives it model and stages."""
    args = torchtitan_args(launch)
    program = Program(
        framework=TORCHTITAN.title,
        command="-m torchtitan.train",
        usage="More arguments go ahead of activation-checkpoint in args below, or into the registry module.",
        before='export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"\n',
        notes=torchtitan_notes(launch.inputs.model),
    )
    files = {
        "torchtitan_args.json": json_file(args),
        f"{MODULE}.py": registry_module(launch.plan, launch.layout),
    }
    return Start(program=program, args=args, files=files)


TORCHTITAN_WRITER = Writer(framework=TORCHTITAN, start=torchtitan_start)
