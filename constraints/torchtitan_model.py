"""Which architectures torchtitan 0.3.0 can build, and over what its experts spread."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.kinds import AtMost, of
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.schema import ModelSpec
from meshwright.model_specs.torchtitan_flavors import Flavor, built_alike

_OWN_REGISTRY = ("deepseek_v3", "gpt_oss")
"""Models of torchtitan that only its own registry builds, at the sizes that it has them in."""


def registry_flavor(model: ModelSpec) -> Flavor | None:
    """What torchtitan's own registry builds of a model's sizes, where nothing else there can build it."""
    alike = (built_alike(model, family) for family in _OWN_REGISTRY)
    return next((flavor for flavor in alike if flavor is not None), None)


def foreign_parts(model: ModelSpec) -> list[str]:
    """What of an architecture torchtitan has no layer for; empty where it can be built."""
    moe = model.moe
    if registry_flavor(model) is not None:
        return []
    parts = {
        f"position {model.position}": model.position != "rope",
        f"activation {model.activation}": model.activation != "swiglu",
        f"norm {model.norm}": model.norm != "rmsnorm",
        f"{model.norms_per_layer} norms per layer": model.norms_per_layer != 2,
        "a norm after the embedding": model.embedding_norm,
        "parallel blocks": model.parallel_block,
        "biases": model.attention_bias or model.attention_output_bias or model.mlp_bias,
        "attention sinks": model.attention_sinks,
        "latent attention of these sizes": model.attention is not None,
        "multi-token prediction": model.mtp_layers > 0,
    }
    if moe is not None:
        parts |= {
            "shared experts": moe.shared_width > 0,
            "dense layers beside those with experts": moe.dense_layers > 0 or moe.every > 1,
            "router or expert biases": moe.router_bias or moe.expert_bias,
            "router groups": (moe.router_groups or 1) > 1,
        }
    return [name for name, present in parts.items() if present]


class TorchtitanArchitecture(Rule):
    """torchtitan's registry builds Llama, Qwen3, Mixtral-like, DeepSeek-V2/V3 and gpt-oss models only."""

    name = "torchtitan-architecture"
    unit = "parts of the model"
    of_workload = True

    def applies(self, workload: Workload) -> bool:
        return bool(foreign_parts(workload.model))

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return as_excess(
            np.full_like(column(table, "tp"), len(foreign_parts(table.workload.model)))
        )

    def check(self, plan: FinishedPlan) -> Finding | None:
        parts = foreign_parts(plan.workload.model)
        if not parts:
            return None
        return self.finding(
            value=len(parts),
            words=f"torchtitan 0.3 has no layer for {', '.join(parts)}",
            remedy="Choose the megatron framework for this model.",
        )


class TorchtitanExpertShards(Rule):
    """(dp_shard cp tp) mod ep = 0: replicas (ZeRO 0, and other shard groups) lend the experts no ranks."""

    name = "torchtitan-expert-shards"
    unit = "ranks left over"

    def applies(self, workload: Workload) -> bool:
        return workload.model.moe is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        group = column(table, "dp") // column(table, "shard_groups")
        shard = np.where(column(table, "zero_stage") > 0, group, 1)
        return as_excess((shard * column(table, "cp") * column(table, "tp")) % column(table, "ep"))

    def check(self, plan: FinishedPlan) -> Finding | None:
        layout = plan.layout
        inner = int(layout.tp) * int(layout.cp)
        group = int(layout.dp) // int(layout.shard_groups)
        ranks = inner * group if int(layout.zero_stage) else inner
        remainder = ranks - ranks // int(layout.ep) * int(layout.ep)
        if remainder == 0:
            return None
        return self.finding(
            value=remainder,
            words=f"{ranks} ranks that share the weights do not divide by ep {layout.ep}",
            remedy=f"Take an ep that divides {ranks}, or shard over more replicas with ZeRO 2 or 3.",
        )


class TorchtitanExpertTensor(Rule):
    """etp = tp where ep = 1, else etp = 1: tp cuts experts that ep does not spread, and no others.

    torchtitan/models/common/moe_sharding.py, `expert_param_placement_dense` and `_sparse`.
    """

    name = "torchtitan-expert-tensor"
    unit = "ranks"

    def applies(self, workload: Workload) -> bool:
        return workload.model.moe is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        follows = np.where(column(table, "ep") == 1, column(table, "tp"), 1)
        return as_excess(np.abs(column(table, "etp") - follows))

    def check(self, plan: FinishedPlan) -> Finding | None:
        layout = plan.layout
        follows = int(layout.tp) if int(layout.ep) == 1 else 1
        if int(layout.etp) == follows:
            return None
        return self.finding(
            value=abs(int(layout.etp) - follows),
            words=f"etp {layout.etp} with tp {layout.tp} and ep {layout.ep}, where torchtitan has {follows}",
            remedy=f"Set etp to {follows}: torchtitan has no setting for it.",
        )


TORCHTITAN_TOKEN_PREDICTION = AtMost(
    name="torchtitan-mtp",
    sentence="pp cp <= 1 with multi-token prediction (DeepSeek-V3), which takes whole sequences on one stage",
    unit="ranks",
    binds=lambda work: work.model.mtp_layers > 0,
    value=of("pp", "cp"),
    words="multi-token prediction on pp {pp} and cp {cp}",
    remedy="Set pp and cp to 1, or train without the multi-token-prediction modules (mtp_layers: 0).",
)
