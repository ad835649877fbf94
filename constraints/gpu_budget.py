"""The GPUs that a layout takes, against those there are."""

from __future__ import annotations

from meshwright.constraints.kinds import AtMost, of

GPU_BUDGET = AtMost(
    name="gpu-budget",
    sentence="tp cp pp dp <= gpus",
    unit="GPUs",
    value=of("tp", "cp", "pp", "dp"),
    limit=of(number=lambda work: work.gpus),
    words="tp {tp} x cp {cp} x pp {pp} x dp {dp} = {value} GPUs, of {limit} there are",
    remedy="Lower one of the degrees, dp first, or give more GPUs.",
)
