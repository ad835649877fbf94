"""The public function that plans on a cluster whose parts differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.cluster_specs.mixed import MixedClusterSpec
    from meshwright.costmodel.constants.calibration import Calibration
    from meshwright.model_specs.schema import ModelSpec
    from meshwright.planner.mixed.service import MixedResult


def plan_mixed(
    model: str | PathLike[str] | ModelSpec,
    *,
    cluster: str | PathLike[str] | MixedClusterSpec,
    gpus: int | None = None,
    global_batch: int,
    seq_len: int,
    precision: str = "bf16",
    optimizer: str = "adam",
    framework: str = "megatron",
    pin: Mapping[str, int | str] | str = "",
    forbid: Iterable[str] | str = (),
    reserve_gib: float = 0.0,
    memory_risk: float = 0.05,
    moe_dispatch: str | None = None,
    without: Iterable[str] | str = (),
    allow: Iterable[str] | str = (),
    calibration: str | PathLike[str] | Calibration | None = None,
    time_limit_s: float | None = None,
    seed: int = 0,
    tokens: float | None = None,
    days: float | None = None,
    gpu_hour_price: float | None = None,
    progress: Callable[[str], None] | None = None,
    **others: object,
) -> MixedResult:
    """Find the fastest plan on a mixed cluster: a pipeline through parts of it, or a plan on one part.

    Parameters
    ----------
    model
        As `plan` takes it; its layers must be alike, but for dense ones in front of those with experts.
    cluster
        A cluster file with `parts`, or what `read_mixed_cluster` made of one.
    gpus
        All of the cluster's, or None.
    global_batch, seq_len, precision, optimizer, framework, pin, forbid, reserve_gib, memory_risk
        As `plan` takes them.
    moe_dispatch, without, allow, calibration, seed, progress
        As `plan` takes them.
    time_limit_s
        Seconds for the whole search; None searches until the proof.
    tokens, days, gpu_hour_price
        As `plan` takes them; GPUs of the parts in use are counted, at each part's power.
    others
        Further arguments of `plan`, which must not ask for anything.

    Returns
    -------
    MixedResult
        `document` is what `meshwright plan --json` prints; `alone` is the plan of the part that is fastest
        alone, where one is.

    Raises
    ------
    InputError
        If an argument or a file cannot be used.
    """
    from meshwright.planner.mixed.cost import with_mixed_cost
    from meshwright.planner.mixed.request import read_mixed_request
    from meshwright.planner.mixed.service import make_mixed_plan
    from meshwright.planner.plan.training_cost import Budget

    budget = Budget(tokens=tokens, days=days, gpu_hour_price=gpu_hour_price)
    request = read_mixed_request(
        model=model,
        cluster=cluster,
        gpus=gpus,
        global_batch=global_batch,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        framework=framework,
        pin=pin,
        forbid=forbid,
        reserve_gib=reserve_gib,
        memory_risk=memory_risk,
        moe_dispatch=moe_dispatch,
        without=without,
        allow=allow,
        calibration=calibration,
        time_limit_s=time_limit_s,
        seed=seed,
        **others,
    )
    return with_mixed_cost(make_mixed_plan(request, progress), budget)
