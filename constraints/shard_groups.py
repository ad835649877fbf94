"""Groups of replicas that shard among themselves (HSDP): which numbers of groups can be had."""

from __future__ import annotations

from meshwright.constraints.kinds import AtMost, Divides, When, of, takes_whole_matrices
from meshwright.constraints.rule import Rule

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
    sentence="shard_groups <= 1 with muon, whose steps take whole matrices",
    unit="groups",
    binds=takes_whole_matrices,
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
