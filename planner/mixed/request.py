"""What is asked of a mixed cluster: the same training on each of its parts, and what joins them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from meshwright.cluster_specs.allocation import is_irregular
from meshwright.cluster_specs.reader import MixedClusterSpec, read_mixed_cluster
from meshwright.costmodel.step_kinds import PRETRAINING
from meshwright.errors import InputError
from meshwright.frameworks.catalog import RECORDS, planned
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request

MOST_LEADING = 6
"""Dense layers before those with experts: ways to lay them on the first ranks double with each."""
_NOT_MIXED: Mapping[str, object] = {
    "max_cut_use": 1.0,
    "inside_domain": (),
    "objective": "nominal",
    "method": "cp-sat",
    "top": 1,
    "expert_loads": None,
    "nodes": None,
    "train": "full",
    "lora_rank": None,
    "lora_targets": None,
    "image_tokens": 0,
    "images_per_sequence": None,
    "freeze_encoder": False,
    "loss": None,
    "kind": PRETRAINING,
    "reference": None,
    "lengths": None,
    "pack_size": None,
    "packing": None,
}
"""What cannot be asked of a pipeline through several parts, and what stands for not asking it."""


@dataclass(frozen=True, kw_only=True)
class MixedRequest:
    """The same training on each part of a cluster."""

    cluster: MixedClusterSpec
    parts: tuple[PlanRequest, ...]
    """One for each part, on all of its GPUs."""
    time_limit_s: float | None = None
    """Of the whole search."""

    @property
    def gpus(self) -> int:
        """Of all parts."""
        return sum(part.gpus for part in self.parts)

    @property
    def first(self) -> PlanRequest:
        """The request on the first part: model, batch and choices are those of all."""
        return self.parts[0]

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.first.model.layers

    def name_of(self, part: int) -> str:
        """How a part is called: by its own name, or by its cluster's."""
        return self.cluster.name_of(part)


def read_mixed_request(
    *,
    model: str | PathLike[str] | ModelSpec,
    cluster: MixedClusterSpec | str | PathLike[str],
    gpus: int | None = None,
    **options: Any,
) -> MixedRequest:
    """The request for a model on a mixed cluster.

    Parameters
    ----------
    model
        As `read_request` takes it.
    cluster
        The mixed cluster, or the path of its file.
    gpus
        All of its GPUs, or None.
    options
        As `read_request` takes them.

    Raises
    ------
    InputError
        If a name, a file or an option cannot be used, or the model has layers that take turns.
    """
    spec = cluster if isinstance(cluster, MixedClusterSpec) else read_mixed_cluster(cluster)
    if gpus is not None and gpus != spec.gpus:
        raise InputError(
            f"the parts of {spec.name} have {spec.gpus} GPUs together; say in its file how many each has",
            where="gpus",
            value=gpus,
        )
    for name, plain in _NOT_MIXED.items():
        if options.pop(name, plain) not in (plain, None, (), ""):
            raise InputError(
                "not for a mixed cluster: plan on one of its parts to ask for this",
                where=name.replace("_", "-"),
            )
    if "idle-gpus" in str(options.get("forbid", "")):
        raise InputError(
            "a plan on a mixed cluster may leave a part idle: forbid it on one part to ask for this",
            where="forbid",
            value="idle-gpus",
        )
    asked = (options.get("allow", ()), options.get("pin", ()))
    if "activation-offload" in str(asked) or "offload_modules" in str(asked):
        raise InputError(
            "not for a mixed cluster: plan on one of its parts to offload activations",
            where="allow",
            value="activation-offload",
        )
    time_limit_s = options.pop("time_limit_s", None)
    parts = []
    for part in spec.parts:
        own = read_request(model=model, cluster=part.cluster, gpus=part.gpus, **options)
        if is_irregular(own.cluster):
            raise InputError(
                "a part of a mixed cluster has equal nodes, without a list of them and without other jobs",
                where="parts",
                value=part.cluster.name,
            )
        if own.cluster.host_memory_gib is not None:
            raise InputError(
                "is not kept to by plans on a mixed cluster, which say what hosts hold: leave it out",
                where=f"{part.cluster.name}: host_memory_gib",
                value=own.cluster.host_memory_gib,
            )
        parts.append(own)
    _refuse_what_no_pipeline_takes(parts[0])
    return MixedRequest(cluster=spec, parts=tuple(parts), time_limit_s=time_limit_s)


def _refuse_what_no_pipeline_takes(request: PlanRequest) -> None:
    """Raises InputError for models whose layers differ, and for frameworks without uneven pipelines.

    Dense layers before those with experts are taken: their ways over the first ranks are tried one by one.
    """
    model = request.model
    if model.layers_in_group > 1 or model.hybrid_pattern is not None:
        raise InputError(
            "a pipeline through a mixed cluster takes layers that are all alike but for dense ones in front, "
            "and this model's take turns; plan it on one part at a time",
            where="model",
            value=model.name,
        )
    if model.moe_layers and model.dense_layers > MOST_LEADING:
        raise InputError(
            f"a pipeline through a mixed cluster takes up to {MOST_LEADING} dense layers before those with "
            f"experts, and this model has {model.dense_layers}; plan it on one part at a time",
            where="model",
            value=model.name,
        )
    able = [each.name for each in RECORDS if "pp" in planned(each.axes) and each.uneven_stages]
    if request.framework not in able:
        raise InputError(
            "a mixed cluster asks for a pipeline with as many layers on each rank as its device takes, which "
            "this framework has not",
            where="framework",
            value=request.framework,
            allowed=able,
        )
