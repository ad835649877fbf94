"""The expert axes: the experts are dealt over the GPUs of one pipeline stage as etp * ep * edp."""

from __future__ import annotations

from meshwright.constraints.kinds import AtMost, Divides, of
from meshwright.costmodel.workload import Workload


def has_experts(workload: Workload) -> bool:
    """Whether the model has experts."""
    return workload.model.moe is not None


def is_dense(workload: Workload) -> bool:
    """Whether the model has no experts."""
    return workload.model.moe is None


def experts(workload: Workload) -> int:
    """Routed experts of a layer; 0 where there are none."""
    moe = workload.model.moe
    return 0 if moe is None else moe.experts


EXPERTS_BY_EXPERT_PARALLEL = Divides(
    name="experts-by-ep",
    sentence="experts mod ep = 0",
    unit="experts left over",
    binds=has_experts,
    number=of(number=experts),
    by=of("ep"),
    words="{number} experts do not divide by ep {ep}",
    remedy="Take an ep that divides {number}.",
)

EXPERT_GRID = Divides(
    name="expert-grid",
    sentence="(tp cp dp) mod (etp ep) = 0: whole replicas of the experts fill the stage",
    unit="GPUs left over",
    number=of("tp", "cp", "dp"),
    by=of("etp", "ep"),
    words="etp {etp} x ep {ep} = {divisor} does not divide the {number} GPUs of a stage",
    remedy="Take etp and ep whose product divides tp x cp x dp = {number}.",
)

EXPERT_AXES_NEED_EXPERTS = AtMost(
    name="expert-axes-need-experts",
    sentence="ep etp <= 1 in a dense model",
    unit="ranks",
    binds=is_dense,
    value=of("ep", "etp"),
    words="ep {ep} and etp {etp} on a model without experts",
    remedy="Set ep and etp to 1.",
)
"""Megatron (core 0.19.2, training/arguments.py) refuses ep and takes etp; torchtitan 0.3.0 takes ep;
neither cuts anything. A plan that says so would not be what runs."""
