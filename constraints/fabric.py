"""How full a plan may make the cuts of the fabric, where the user leaves room for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.constraints.rule import (
    AtMost,
    Divides,
    Equals,
    Finding,
    FinishedPlan,
    LayoutTable,
    Rule,
    When,
    as_excess,
    column,
    of,
)
from meshwright.costmodel.layout import LAYER_AXES, ROUNDING, Layout, Placement
from meshwright.costmodel.optimizers import deals_out_matrices
from meshwright.costmodel.workload import Workload


class Bisection(Rule):
    """Bytes over a cut in a phase, those of other jobs too, <= its capacity x the phase x `--max-cut-use`.

    Overlap hides time, not bytes: what is hidden counts. A layout is judged with its mapping, by the exact
    price; before it is mapped no layout breaks this.
    """

    name = "bisection"
    unit = "share of capacity"

    def applies(self, workload: Workload) -> bool:
        return workload.max_cut_use < 1

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return as_excess(0 * column(table, "tp"))

    def check(self, plan: FinishedPlan) -> Finding | None:
        limit = plan.workload.max_cut_use
        if plan.cut_use is None or plan.cut_use <= limit * (1 + ROUNDING):
            return None
        return self.finding(
            value=plan.cut_use,
            limit=limit,
            words=f"a cut of the fabric is used to {plan.cut_use:.1%}, {limit:.1%} are allowed",
            remedy="Keep talkative groups further inside, or raise --max-cut-use.",
        )


# Groups that the user keeps inside one NVLink domain, where the default lets them leave it.
#
# Only tensor and expert tensor groups stay inside by themselves (`scale_up`). megatron-core advises it of
# experts too ("Communications of EP and TP should remain within the NVLink domain as much as possible, as
# both are communication-intensive": megatron/core/transformer/moe/README.md); who shares a network may
# insist on it.


DomainAxis = Literal["tp", "cp", "ep"]
INSIDE_DOMAIN: tuple[str, ...] = get_args(DomainAxis)
"""Axes whose groups can be asked to stay inside."""


class NvlinkDomain(Rule):
    """Groups of the axes of `--inside-domain` lie in one scale-up domain each, or in one node.

    GPUs that share a group are in the same domain, and so are those that share one with them: tp x cp ranks,
    etp x ep ranks, and where one is no multiple of the other the least common multiple of the two.
    """

    name = "nvlink-domain"
    unit = "GPUs"

    def applies(self, workload: Workload) -> bool:
        return bool(workload.inside_domain)

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        axes = table.workload.inside_domain
        together = column(table, "tp")
        if "cp" in axes:
            together = together * column(table, "cp")
        if "ep" in axes:
            together = np.lcm(together, column(table, "etp") * column(table, "ep"))
        return as_excess(together - domain_gpus(table.workload))

    def check(self, plan: FinishedPlan) -> Finding | None:
        limit, axes = domain_gpus(plan.workload), plan.workload.inside_domain
        for axis in axes:
            members = int(getattr(plan.layout, axis))
            inside = plan.spans[axis][0] if plan.spans else members
            if inside < members:
                return self._outside(f"{axis} groups of {members} leave their domain", members)
        dense = int(plan.layout.tp) * (int(plan.layout.cp) if "cp" in axes else 1)
        experts = int(plan.layout.expert_group) if "ep" in axes else 1
        together = dense
        while together % experts:
            together += dense
        if together <= limit:
            return None
        names = ", ".join(axes)
        return self._outside(f"groups of {names} tie {together} GPUs together", together, limit)

    def _outside(self, words: str, value: int, limit: int = 0) -> Finding:
        if limit:
            words += f", a domain has {limit}"
        remedy = "Lower the degree, or take the axis out of --inside-domain."
        return self.finding(value=value, limit=limit, words=words, remedy=remedy)


def keeps_inside(workload: Workload, layout: Layout, placement: Placement) -> NDArray[np.bool_]:
    """Whether placements keep the groups that the workload's `inside_domain` names in one domain each.

    So with groups of experts whose dispatcher's kernels ask for it: see `dispatcher_reaches`.

    Parameters
    ----------
    workload
        What is placed.
    layout
        Degrees as numbers, or as arrays of the placements' shape.
    placement
        Arrays [..., levels]; level 0 is the scale-up domain.

    Returns
    -------
    array of bool, shape [...]
    """
    keep = np.ones(np.shape(placement.tp)[:-1], dtype=np.bool_)
    for axis in workload.inside_domain:
        keep &= members_in_domain(placement, axis) >= np.asarray(getattr(layout, axis))
    return keep & dispatcher_reaches(workload, layout, placement)


def binds_mappings(workload: Workload) -> bool:
    """Whether some groups of the workload have to lie in one domain each, by wish or for their dispatcher."""
    return bool(workload.inside_domain) or _joins_by_memory(workload)


def dispatcher_reaches(
    workload: Workload, layout: Layout, placement: Placement
) -> NDArray[np.bool_]:
    """Whether ranks that share experts by DeepEP or HybridEP, and fit into one domain, lie in one.

    DeepEP takes up to NUM_MAX_NVL_PEERS = 8 ranks for one NVLink domain and opens each other's memory
    (csrc/deep_ep.cpp, Buffer::sync: cudaIpcOpenMemHandle); HybridEP asks that every domain holds equally many
    of them (deep_ep/hybrid_ep_buffer.py). A group across the edge of a domain starts with neither.

    Parameters
    ----------
    workload
        What is placed.
    layout
        Degrees as numbers, or as arrays of the placements' shape.
    placement
        Arrays [..., levels]; level 0 is the scale-up domain.

    Returns
    -------
    array of bool, shape [...]
    """
    if not _joins_by_memory(workload):
        return np.ones(np.shape(placement.tp)[:-1], dtype=np.bool_)
    ep = np.asarray(layout.ep)
    is_larger = ep * np.asarray(layout.etp) > domain_gpus(workload)
    return np.asarray(is_larger | (members_in_domain(placement, "ep") >= ep))


def _joins_by_memory(workload: Workload) -> bool:
    return workload.model.moe is not None and workload.moe_dispatch in ("deepep", "hybridep")


def members_in_domain(placement: Placement, axis: str) -> NDArray[np.int64]:
    """How many members of a group of one axis share a domain.

    Parameters
    ----------
    placement : Placement
        Arrays [..., levels]; level 0 is the scale-up domain.
    axis : str
        Of `GROUPS`.

    Returns
    -------
    array of int, shape [...]
        1 to the axis' degree.
    """
    return np.asarray(getattr(placement, axis), dtype=np.int64)[..., 0]


def inside_domains(workload: Workload, placement: Placement) -> Mapping[str, NDArray[np.int64]]:
    """How many members share a domain of each kind of groups that the workload wants inside one.

    Parameters
    ----------
    workload : Workload
        Its `inside_domain`.
    placement : Placement
        Arrays [..., levels]; level 0 is the scale-up domain.

    Returns
    -------
    mapping
        By axis, arrays of shape [...].
    """
    return {axis: members_in_domain(placement, axis) for axis in workload.inside_domain}


def domain_gpus(workload: Workload) -> int:
    """GPUs of a scale-up domain of a workload's cluster, or of a node where there is none; at least 1.

    Parameters
    ----------
    workload : Workload
        Its cluster.
    """
    domain, node = workload.cluster.nvlink_domain, workload.cluster.gpus_per_node
    return domain if domain > 1 else node


# The scale-up domain (NVLink switch, xGMI mesh, or the node): which groups may not leave it.
#
# Tensor parallelism communicates in every layer with nothing to hide behind, so its groups stay inside by
# default. Context and expert parallelism do leave it in practice (Llama 3 405B trained at tp 8 and cp 16 on
# nodes of 8 GPUs, arXiv 2407.21783, table 4; DeepSeek-V3 at ep 64, arXiv 2412.19437, 3.2): the fabric prices
# that, and `ScaleUpDomain(("tp", "cp"))` or `ScaleUpDomain(("ep",))` forbids it.


class ScaleUpDomain(Rule):
    """The product of the given degrees <= GPUs of the scale-up domain (of the node where there is none)."""

    unit = "GPUs"

    def __init__(self, axes: Sequence[str]) -> None:
        if not axes or set(axes) - set(LAYER_AXES):
            raise ValueError(f"axes {tuple(axes)}: give one or more of tp, cp, ep, etp")
        self.axes = tuple(axes)
        self.name = "scale-up-" + "-".join(self.axes)

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        members = np.multiply.reduce([column(table, axis) for axis in self.axes])
        cluster = table.workload.cluster
        limit = np.where(cluster.nvlink_domain > 1, cluster.nvlink_domain, cluster.gpus_per_node)
        return as_excess(members - limit)

    def check(self, plan: FinishedPlan) -> Finding | None:
        members = 1
        for axis in self.axes:
            members *= int(getattr(plan.layout, axis))
        limit, domain = _domain(plan.workload.cluster)
        if members <= limit:
            return None
        degrees = " x ".join(f"{axis} {getattr(plan.layout, axis)}" for axis in self.axes)
        return self.finding(
            value=members,
            limit=limit,
            words=f"{degrees} = {members} GPUs do not fit into {domain} of {limit}",
            remedy=f"Lower {' or '.join(self.axes)} to {limit} or less together, or raise pp or dp instead.",
        )


def _domain(cluster: ClusterSpec) -> tuple[int, str]:
    if cluster.nvlink_domain == 1:
        return cluster.gpus_per_node, "a node"
    return cluster.nvlink_domain, "a scale-up domain"


# Groups of replicas that shard among themselves (HSDP): which numbers of groups can be had.


_SEVERAL = (When("shard_groups", least=2),)

REPLICAS_BY_SHARD_GROUPS = Divides(
    name="replicas-by-shard-groups",
    sentence="(dp cp) mod shard_groups = 0",
    unit="replicas left over",
    number=of("dp", "cp"),
    by=of("shard_groups"),
    words="{number} replicas (dp {dp} x cp {cp}) do not divide into {shard_groups} groups",
    remedy="Take a number of groups that divides {number}.",
)

SHARD_GROUPS_NEED_SHARDS = AtMost(
    name="shard-groups-need-zero",
    sentence="shard_groups <= 1 under ZeRO 0: replicas that share nothing have no groups",
    unit="groups",
    when=(When("zero_stage", most=0),),
    value=of("shard_groups"),
    words="{shard_groups} shard groups without ZeRO",
    remedy="Set shard_groups to 1, or shard with ZeRO 1 to 3.",
)

SHARD_GROUPS_OF_SEVERAL = AtMost(
    name="shard-groups-of-several",
    sentence="2 shard_groups <= dp cp where there are several groups: one rank shards nothing",
    unit="replicas",
    when=_SEVERAL,
    value=of("shard_groups", number=2),
    limit=of("dp", "cp"),
    words="{shard_groups} groups of {limit} replicas leave none to shard over",
    remedy="Take fewer groups, or ZeRO 0 where nothing is to be sharded.",
)

MEGATRON_EXPERT_SHARD_GROUPS = Divides(
    name="megatron-expert-shard-groups",
    sentence="(tp cp dp) mod (etp ep shard_groups) = 0: replicas of experts are grouped as others are",
    unit="ranks left over",
    when=_SEVERAL,
    number=of("tp", "cp", "dp"),
    by=of("etp", "ep", "shard_groups"),
    words="{number} ranks of a stage (tp {tp} x cp {cp} x dp {dp}) do not divide into {shard_groups} "
    "groups of etp {etp} x ep {ep}",
    remedy="Take fewer groups, or a lower ep.",
)
"""Asserted as the process groups are made (megatron/core/parallel_state.py)."""

MEGATRON_SHARD_GROUPS_OPTIMIZER = AtMost(
    name="megatron-shard-groups-optimizer",
    sentence="shard_groups <= 1 with muon and lion, whose steps take whole matrices",
    unit="groups",
    binds=deals_out_matrices,
    value=of("shard_groups"),
    words="{shard_groups} groups of shards with the {optimizer} optimizer",
    remedy="Shard over all replicas, or train with adam or sgd.",
)
"""Optimizers that own whole layers refuse it (megatron/core/optimizer/layer_wise_optimizer.py)."""

FSDP2_WHOLE_GROUPS = AtMost(
    name="fsdp2-whole-groups",
    sentence="2 shard_groups <= dp where there are several groups",
    unit="replicas",
    when=_SEVERAL,
    value=of("shard_groups", number=2),
    limit=of("dp"),
    words="{shard_groups} groups of dp {dp} replicas leave none to shard over",
    remedy="Take fewer groups, so that each has two replicas or more.",
)
"""With tp or cp the parser refuses it, without it is another wrapper, DistributedDataParallel (accelerate
1.15.0, parallelism_config.py)."""


def _by_replicas(name: str) -> Rule:
    """The groups divide dp: the mesh has a dimension for them beside that of the shards."""
    return Divides(
        name=name,
        sentence="dp mod shard_groups = 0",
        unit="replicas left over",
        number=of("dp"),
        by=of("shard_groups"),
        words="dp {number} does not divide into {shard_groups} groups",
        remedy="Take a number of groups that divides {number}.",
    )


MEGATRON_GROUP_RULES: tuple[Rule, ...] = (
    MEGATRON_EXPERT_SHARD_GROUPS,
    MEGATRON_SHARD_GROUPS_OPTIMIZER,
)
TORCHTITAN_GROUP_RULES: tuple[Rule, ...] = (_by_replicas("torchtitan-shard-groups"),)
FSDP2_GROUP_RULES: tuple[Rule, ...] = (_by_replicas("fsdp2-shard-groups"), FSDP2_WHOLE_GROUPS)


# The global batch, cut into micro-batches.


BATCH_SPLIT = Equals(
    name="batch-split",
    sentence="micro_batch dp num_micro_batches = global_batch",
    unit="sequences",
    value=of("micro_batch", "dp", "num_micro_batches"),
    to=of(number=lambda work: work.global_batch),
    words="micro_batch {micro_batch} x dp {dp} x {num_micro_batches} micro-batches = "
    "{value} sequences, not the global batch of {limit}",
    remedy="Choose dp and micro_batch so that their product divides {limit}.",
)


# The GPUs that a layout takes, against those there are.


GPU_BUDGET = AtMost(
    name="gpu-budget",
    sentence="tp cp pp dp <= gpus",
    unit="GPUs",
    value=of("tp", "cp", "pp", "dp"),
    limit=of(number=lambda work: work.gpus),
    words="tp {tp} x cp {cp} x pp {pp} x dp {dp} = {value} GPUs, of {limit} there are",
    remedy="Lower one of the degrees, dp first, or give more GPUs.",
)
