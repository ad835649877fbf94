"""From what a user types to a request: names and files are read, pins and forbidden choices taken apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cluster_specs.allocation import allocated_gpus
from cluster_specs.reader import read_cluster
from model_specs.reader import read_model
from planner.problem import PlanRequest, parse_forbids, parse_pins


def read_request(
    *,
    model: str,
    cluster: str,
    gpus: int | None,
    pins: Iterable[str] = (),
    forbids: Iterable[str] = (),
    **options: Any,
) -> PlanRequest:
    """The request for a model and a cluster by name or file; `options` are further fields of PlanRequest.

    Each text of `pins` is `tp=8,pp=4`, each of `forbids` `cp,full-recompute`. Raises SpecError,
    ClusterError or RequestError.
    """
    read = read_cluster(cluster, gpus)
    return PlanRequest(
        model=read_model(model),
        cluster=read,
        gpus=allocated_gpus(read, gpus),
        pins=parse_pins(",".join(pins)),
        forbids=parse_forbids(forbids),
        **options,
    )
