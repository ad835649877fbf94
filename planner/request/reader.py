"""From what a user gives to a request: names and files are read, pins and forbidden choices taken apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from meshwright.cluster_specs.allocation import allocated_gpus
from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.constants.calibration import Calibration
from meshwright.model_specs.reader import read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.request.calibration_file import read_calibration
from meshwright.planner.request.executions import parse_allow, parse_without
from meshwright.planner.request.plan_request import PlanRequest, parse_forbids, parse_pins


def read_request(
    *,
    model: str | PathLike[str] | ModelSpec,
    cluster: str | PathLike[str] | ClusterSpec,
    gpus: int | None,
    pin: Mapping[str, int | str] | str = "",
    forbid: Iterable[str] | str = (),
    without: Iterable[str] | str = (),
    allow: Iterable[str] | str = (),
    moe_dispatch: str | None = None,
    expert_loads: Path | None = None,
    calibration: str | PathLike[str] | Calibration | None = None,
    **options: Any,
) -> PlanRequest:
    """The request for a model and a cluster, each a name, a file or a spec.

    Parameters
    ----------
    gpus
        The first so many GPUs of the cluster; all of them when None.
    pin
        `tp=8,pp=4`, or a mapping.
    forbid
        `cp,full-recompute`, or several such texts.
    without
        `deepep,cuda-graph`, or several such texts: software that is not there.
    allow
        `bf16-grads,fp8-params`, `all`, or several such texts: what may change the numbers of the run.
    moe_dispatch
        The dispatcher, as a pin; chosen when None.
    expert_loads
        File of measured routing.
    calibration
        A stack file, or what one holds.
    options
        Further fields of PlanRequest.

    Raises
    ------
    InputError
        If a name, a file or a field cannot be used.
    """
    cluster_spec = read_cluster(cluster, gpus)
    model_spec = read_model(model)
    gpu_count = allocated_gpus(cluster_spec, gpus)
    measured = None
    if expert_loads is not None:
        from meshwright.planner.experts.training import read_expert_loads

        measured = read_expert_loads(expert_loads, model_spec, gpu_count)
    pins = parse_pins(pin) if isinstance(pin, str) else dict(pin)
    if moe_dispatch is not None:
        pins["moe_dispatch"] = moe_dispatch
    return PlanRequest(
        model=model_spec,
        cluster=cluster_spec,
        gpus=gpu_count,
        expert_loads=measured,
        calibration=read_calibration(calibration),
        pins=pins,
        without=parse_without([without] if isinstance(without, str) else without),
        allow=parse_allow([allow] if isinstance(allow, str) else allow),
        forbids=parse_forbids([forbid] if isinstance(forbid, str) else forbid),
        **options,
    )
