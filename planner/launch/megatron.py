"""A plan as a Megatron-LM launch: arguments of pretrain_gpt.py, environment, hostfile and start script.

Flag names and rules were read in megatron-core 0.19.2 (`megatron.training.arguments`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from meshwright.costmodel.workload import Overlap, planned_overlap
from meshwright.errors import InfeasibleError
from meshwright.frameworks.megatron import MEGATRON
from meshwright.planner.launch.common_env import NOTES, nccl_env
from meshwright.planner.launch.legality import require_legal
from meshwright.planner.launch.megatron_model import linear_bias, model_args, model_notes
from meshwright.planner.launch.pipeline_layout import layout_string
from meshwright.planner.launch.rank_files import RankFiles, RankPlace, checked_host, rank_files
from meshwright.planner.launch.start_script import start_script
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.predicted import LayoutDoc

Dispatcher = Literal["alltoall", "deepep", "hybridep"]

DEFAULT_OVERLAP = planned_overlap(MEGATRON)
"""What the plan was priced with; `--tp-comm-overlap` needs Transformer Engine's user buffers."""


def megatron_args(
    plan: Plan,
    *,
    overlap: Overlap = DEFAULT_OVERLAP,
    dispatcher: Dispatcher | None = None,
    ranks: Sequence[RankPlace] | None = None,
) -> list[str]:
    """Arguments of pretrain_gpt.py for a plan: architecture, parallelism, batch, precision, recomputation.

    Left to the caller: data, tokenizer, learning rate, length of training, checkpoints. `ranks[r]` is the
    (node, local GPU) of rank r, in place of the plan's mapping. Raises InfeasibleError if Megatron would
    refuse.
    """
    layout = require_legal(plan, MEGATRON, overlap)
    return _args(plan, layout, overlap, dispatcher, rank_files(plan, layout, None, ranks))


def launch_files(
    plan: Plan,
    *,
    node_names: Sequence[str] | None = None,
    spares: Sequence[str] = (),
    overlap: Overlap = DEFAULT_OVERLAP,
    dispatcher: Dispatcher | None = None,
    ranks: Sequence[RankPlace] | None = None,
) -> dict[str, str]:
    """Texts by file name: megatron_args.json, env.json, hostfile, launch.sh; where needed rankfile, spares.

    `node_names[i]` is the name of the mapping's node i; the cluster's own names when absent. `spares` are
    nodes held ready: a broken node's line in the hostfile is replaced by one of them.
    """
    layout = require_legal(plan, MEGATRON, overlap)
    placed = rank_files(plan, layout, node_names, ranks)
    used = sorted({checked_host(name) for name in spares} & set(placed.hosts))
    if used:
        raise InfeasibleError(f"spare node {used[0]} already runs ranks.")
    args = _args(plan, layout, overlap, dispatcher, placed)
    env = megatron_env(plan, layout, overlap) | nccl_env(plan, layout)
    files = {
        "megatron_args.json": json.dumps(args, indent=1) + "\n",
        "env.json": json.dumps(env, indent=1, sort_keys=True) + "\n",
        "hostfile": "".join(f"{host}\n" for host in placed.hosts),
        "launch.sh": start_script(
            title=_title(plan, layout),
            notes=[*model_notes(plan.inputs.model), *NOTES],
            args=args,
            env=env,
            hosts=len(placed.hosts),
            gpus_per_host=placed.gpus_per_host,
            world=len(placed.places),
        ),
    }
    if placed.gpus_per_host is None:
        files["rankfile"] = placed.rankfile()
    if spares:
        files["spares"] = "".join(f"{name}\n" for name in spares)
    return files


def megatron_env(
    plan: Plan, layout: LayoutDoc, overlap: Overlap = DEFAULT_OVERLAP
) -> dict[str, str]:
    """Environment variables that the plan needs.

    Before Blackwell, tensor and context parallelism rely on kernels starting in the order they are issued,
    which one hardware queue brings about; FSDP and the expert overlap need several.
    """
    if layout.zero_stage >= 2:
        return {}
    if overlap.ep and layout.ep > 1:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    blackwell = plan.inputs.cluster.device.architecture == "blackwell"
    if (layout.tp > 1 or layout.cp > 1) and not blackwell:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {}


def _args(
    plan: Plan,
    layout: LayoutDoc,
    overlap: Overlap,
    dispatcher: Dispatcher | None,
    placed: RankFiles,
) -> list[str]:
    return [
        "--use-mcore-models",
        *model_args(plan.inputs.model, plan.inputs.seq_len),
        *_parallel_args(plan, layout, overlap, placed.pipeline_before_data),
        *_pipeline_args(plan, layout, overlap),
        *_expert_args(plan, layout, overlap, dispatcher),
        "--micro-batch-size",
        str(layout.micro_batch),
        "--global-batch-size",
        str(plan.inputs.global_batch),
        *_recompute_args(layout),
        *_precision_args(plan),
        *_optimizer_args(plan, layout, overlap),
    ]


def _parallel_args(
    plan: Plan, layout: LayoutDoc, overlap: Overlap, pipeline_before_data: bool
) -> list[str]:
    args = [
        "--tensor-model-parallel-size",
        str(layout.tp),
        "--pipeline-model-parallel-size",
        str(layout.pp),
        "--context-parallel-size",
        str(layout.cp),
    ]
    if layout.sequence_parallel:
        args.append("--sequence-parallel")
        # The tensor-parallel overlap of Transformer Engine gathers and scatters along the sequence.
        args += ["--tp-comm-overlap"] if overlap.tp else []
    if pipeline_before_data:
        args.append("--use-tp-pp-dp-mapping")
        if plan.inputs.model.moe is None and layout.cp > 1:
            # Megatron builds expert groups for dense models too, and wants as many replicas as dense groups.
            args += ["--expert-tensor-parallel-size", str(layout.tp * layout.cp)]
    return args


def _pipeline_args(plan: Plan, layout: LayoutDoc, overlap: Overlap) -> list[str]:
    if layout.pp == 1:
        return []
    args = []
    chunks = {count for rank in layout.stages for count in rank}
    if len(chunks) > 1:
        args += [
            "--pipeline-model-parallel-layout",
            layout_string(layout.stages, plan.inputs.model.mtp_layers),
        ]
    elif layout.vpp > 1:
        args += ["--num-virtual-stages-per-pipeline-rank", str(layout.vpp)]
    if layout.vpp > 1 and layout.pp > 2 and not overlap.pp:
        args.append("--no-overlap-p2p-communication")
    return args


def _expert_args(
    plan: Plan, layout: LayoutDoc, overlap: Overlap, dispatcher: Dispatcher | None
) -> list[str]:
    if plan.inputs.model.moe is None:
        return []
    if dispatcher is None:
        dispatcher = "deepep" if plan.inputs.moe_dispatch == "deduplicated" else "alltoall"
    args = [
        "--expert-model-parallel-size",
        str(layout.ep),
        "--expert-tensor-parallel-size",
        str(layout.etp),
    ]
    if dispatcher == "alltoall" or layout.ep * layout.etp == 1:
        args += ["--moe-token-dispatcher-type", "alltoall"]
    else:
        args += ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", dispatcher]
    if plan.inputs.precision in ("fp8", "mxfp8", "nvfp4"):
        # Tokens per expert are padded to the tile that the format multiplies.
        args.append("--moe-router-padding-for-quantization")
    if overlap.ep and layout.ep > 1:
        args.append("--overlap-moe-expert-parallel-comm")
    return args


def _recompute_args(layout: LayoutDoc) -> list[str]:
    if layout.recompute == "full" and layout.recompute_layers > 0:
        largest = max(count for rank in layout.stages for count in rank)
        layers = str(min(layout.recompute_layers, largest))
        return [
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "block",
            "--recompute-num-layers",
            layers,
        ]
    if layout.recompute == "selective" and layout.recompute_modules:
        return [
            "--recompute-granularity",
            "selective",
            "--recompute-modules",
            *layout.recompute_modules,
        ]
    return []


def _precision_args(plan: Plan) -> list[str]:
    return {
        "bf16": ["--bf16"],
        "fp16": ["--fp16"],
        # Delayed scaling, Megatron's default recipe, cannot recompute norms or expert activations.
        "fp8": ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
        "mxfp8": ["--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"],
        "nvfp4": ["--bf16", "--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"],
    }[plan.inputs.precision]


def _optimizer_args(plan: Plan, layout: LayoutDoc, overlap: Overlap) -> list[str]:
    args = ["--optimizer", plan.inputs.optimizer]
    if layout.zero_stage >= 1:
        args.append("--use-distributed-optimizer")
    if layout.zero_stage >= 2:
        strategy = "optim_grads" if layout.zero_stage == 2 else "optim_grads_params"
        args += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", strategy]
        args += ["--ckpt-format", "fsdp_dtensor", "--no-gradient-accumulation-fusion"]
    if overlap.dp and layout.dp * layout.cp > 1:
        args.append("--overlap-grad-reduce")
        # Megatron's other optimizers gather parameters by layer, on their own.
        sharded = layout.zero_stage >= 1 and plan.inputs.optimizer != "muon"
        args += ["--overlap-param-gather"] if sharded else []
    return args


def _title(plan: Plan, layout: LayoutDoc) -> str:
    # A name may hold anything: as JSON it stays on one line.
    name = json.dumps(plan.inputs.model.name)
    degrees = " ".join(
        f"{axis} {getattr(layout, axis)}" for axis in ("tp", "cp", "pp", "dp", "ep", "etp", "vpp")
    )
    biases = ", with biases" if linear_bias(plan.inputs.model) else ""
    return f"{name}{biases}: {degrees}, {layout.num_micro_batches} micro-batches of {layout.micro_batch}"
