"""The space of layouts that a request spans.

>>> from meshwright.planner.request.reader import read_request
>>> request = read_request(
...     model="llama-3-8b", cluster="dgx-h100", gpus=8, global_batch=16, seq_len=8192
... )
>>> space_of(request).tp
(1, 2, 4, 8)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.constraints.megatron import refused_recompute
from meshwright.costmodel.context_groups import HIERARCHICAL, largest_swap
from meshwright.costmodel.execution import Execution
from meshwright.costmodel.layout import Recompute
from meshwright.costmodel.token_dispatch import deduplicates
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import framework_named, planned
from meshwright.frameworks.record import Axis
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.predicted import RECOMPUTED
from meshwright.planner.search.space import Space, divisors

LARGEST_CP = 64


def space_of(request: PlanRequest, execution: Execution | None = None) -> Space:
    """The space that a request spans, run as `execution` says or as plainly as can be.

    What an execution never goes with is left out.
    """
    workload, model = request.workload(execution), request.model
    framework = framework_named(request.framework)
    axes, forbids, pins = planned(framework.axes), request.forbids, request.pins

    def axis(name: Axis, options: list[int]) -> tuple[int, ...]:
        if name not in axes or name in forbids:
            options = [o for o in options if o == 1]
        return tuple(o for o in options if name not in pins or o == pins[name])

    zero = tuple(z for z in planned(framework.zero_stages) if f"zero-{z}" not in forbids)
    vpp, size = pins.get("vpp"), pins.get("micro_batch")
    experts = divisors(model.moe.experts) if model.moe is not None else [1]
    space = Space(
        workload=workload,
        tp=axis("tp", _tensor_degrees(workload)),
        cp=axis("cp", _context_degrees(workload)),
        pp=axis("pp", list(range(1, min(model.layers, request.gpus) + 1))),
        dp=axis("dp", [d for d in divisors(request.global_batch) if d <= request.gpus]),
        ep=axis("ep", [e for e in experts if e <= request.gpus]),
        etp=axis("etp", _expert_tensor_degrees(workload)),
        vpp=None if vpp is None else (int(vpp),),
        interleaving="vpp" in axes and "interleaving" not in forbids,
        micro_batch=None if size is None else int(size),
        zero=tuple(z for z in zero if pins.get("zero_stage", z) == z),
        shard_groups=_shard_groups(request),
        sharded=framework.shard_groups.zero_stages if framework.shard_groups else (),
        offloads=_offloads(request, tuple(z for z in zero if pins.get("zero_stage", z) == z)),
        recompute=_recompute_kinds(request),
        sequence_parallel=framework.sequence_parallel is not None,
        fewest_gpus=request.gpus if "idle-gpus" in forbids else 1,
        schedules=_schedules(request),
    )
    return space if execution is None else _narrowed(space, request, execution)


def _narrowed(space: Space, request: PlanRequest, execution: Execution) -> Space:
    """The layouts of a space that may have their price from this execution."""
    masks = np.array(space.recompute, dtype=np.int64)
    keep = ~refused_recompute(space.workload, masks)
    tp, cp, ep, etp = space.tp, space.cp, space.ep, space.etp
    if not execution.tp_overlap and True in request.execution_options.tp_overlap:
        tp = tuple(degree for degree in tp if degree > 1)
    if execution.cuda_graph == "full" and request.model.moe is not None:
        etp = tuple(degree for degree in etp if degree == 1)
    if execution.cp_comm == "a2a" and "p2p" in request.execution_options.cp_comm:
        cp = tuple(degree for degree in cp if degree > 1)
    if (
        execution.cp_comm == HIERARCHICAL
        and "p2p" in request.execution_options.cp_comm
        and execution.cp_inner is None
    ):
        widths, work = np.array(tp, dtype=np.int64), space.workload
        cp = tuple(degree for degree in cp if np.any(largest_swap(work, widths, degree) > 1))
    alone = deduplicates(space.workload) and max(space.etp, default=1) == 1
    if execution.ep_overlap or alone:
        ep = tuple(degree for degree in ep if degree > 1)
    recompute = tuple(int(mask) for mask in masks[keep])
    return replace(space, tp=tp, cp=cp, ep=ep, etp=etp, recompute=recompute)


def _shard_groups(request: PlanRequest) -> tuple[int, ...]:
    """Every number of groups that divides some number of replicas."""
    record, wanted = (
        framework_named(request.framework).shard_groups,
        request.pins.get("shard_groups"),
    )
    is_free = record is not None and record.planned and "shard-groups" not in request.forbids
    groups = [1]
    if is_free:
        groups = [d for d in divisors(request.global_batch) if d <= request.gpus]
    return tuple(number for number in groups if wanted is None or number == wanted)


def _offloads(request: PlanRequest, zero_stages: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Every ZeRO stage with each share of the optimizer's states that may lie in the host's memory."""
    record = framework_named(request.framework).optimizer_offload
    wanted = request.pins.get("optimizer_offload")
    is_free = record is not None and "optimizer-offload" not in request.forbids
    shares = [0]
    if record is not None and is_free:
        tried = record.percents if wanted is None else (int(wanted),)
        shares += [share for share in tried if share > 0]
    stages = record.zero_stages if record is not None else ()
    return tuple(
        (zero, share)
        for zero in zero_stages
        for share in shares
        if (share == 0 or zero in stages) and (wanted is None or share == wanted)
    )


def _schedules(request: PlanRequest) -> tuple[str, ...]:
    """Of the framework, in which several chunks of a rank are virtual stages like any other."""
    names = planned(framework_named(request.framework).schedules)
    wanted = request.pins.get("schedule")
    return tuple(name for name in names if wanted is None or name == wanted)


def _tensor_degrees(workload: Workload) -> list[int]:
    cluster = workload.cluster
    domain = cluster.nvlink_domain if cluster.nvlink_domain > 1 else cluster.gpus_per_node
    return [d for d in divisors(workload.model.heads) if d <= min(domain, workload.gpus)]


def _expert_tensor_degrees(workload: Workload) -> list[int]:
    """Divisors of the width of an expert, within a scale-up domain."""
    moe, cluster = workload.model.moe, workload.cluster
    if moe is None:
        return [1]
    domain = cluster.nvlink_domain if cluster.nvlink_domain > 1 else cluster.gpus_per_node
    return [d for d in divisors(moe.moe_ffn_hidden) if d <= min(domain, workload.gpus)]


def _context_degrees(workload: Workload) -> list[int]:
    powers = [
        2**k for k in range(LARGEST_CP.bit_length()) if 2**k <= min(LARGEST_CP, workload.gpus)
    ]
    return [cp for cp in powers if cp == 1 or workload.seq_len % (2 * cp) == 0]


def _recompute_kinds(request: PlanRequest) -> tuple[int, ...]:
    """Masks: nothing, sets of modules that the model has, everything. Fused attention is recomputed
    anyway.
    """
    kinds = [int(Recompute.NONE)]
    modules = planned(framework_named(request.framework).recompute_modules)
    if modules and "selective-recompute" not in request.forbids:
        kinds += [sum(parts) for parts in _subsets(_modules(request.model, modules))]
    if "full-recompute" not in request.forbids:
        kinds.append(int(Recompute.FULL))
    if "recompute" in request.forbids:
        kinds = [int(Recompute.NONE)]
    wanted = request.pins.get("recompute")
    return tuple(kind for kind in kinds if wanted is None or recompute_name(kind) == wanted)


def recompute_name(mask: int) -> str:
    """none, selective or full."""
    if mask == Recompute.NONE:
        return "none"
    return "full" if mask & Recompute.FULL else "selective"


def _modules(model: ModelSpec, names: tuple[str, ...]) -> list[int]:
    """Masks of those modules, of the names given, that the model has."""
    absent = {
        "moe_act": model.moe is None,
        "mla_up_proj": model.attention is None,
        "mlp": not model.has_dense_feed_forward,
    }
    return [
        int(mask)
        for name, mask in RECOMPUTED.items()
        if name in names and not absent.get(name, False)
    ]


def _subsets(items: list[int]) -> list[list[int]]:
    return [
        [item for bit, item in enumerate(items) if chosen >> bit & 1]
        for chosen in range(1, 1 << len(items))
    ]
