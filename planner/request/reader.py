"""From what a user types to a request: names and files are read, pins and forbidden choices taken apart."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwright.cluster_specs.allocation import allocated_gpus
from meshwright.cluster_specs.reader import read_cluster
from meshwright.model_specs.reader import read_model
from meshwright.planner.request.plan_request import PlanRequest, parse_forbids, parse_pins


def read_request(
    *,
    model: str,
    cluster: str,
    gpus: int | None,
    pins: Iterable[str] = (),
    forbids: Iterable[str] = (),
    expert_loads: Path | None = None,
    **options: Any,
) -> PlanRequest:
    """The request for a model and a cluster by name or file; `options` are further fields of PlanRequest.

    Each text of `pins` is `tp=8,pp=4`, each of `forbids` `cp,full-recompute`. Raises InputError,
    InputError for `expert_loads`.
    """
    read, spec = read_cluster(cluster, gpus), read_model(model)
    count = allocated_gpus(read, gpus)
    placed = None
    if expert_loads is not None:
        from meshwright.planner.experts.training import read_expert_loads

        placed = read_expert_loads(expert_loads, spec, count)
    return PlanRequest(
        model=spec,
        cluster=read,
        gpus=count,
        expert_loads=placed,
        pins=parse_pins(",".join(pins)),
        forbids=parse_forbids(forbids),
        **options,
    )
