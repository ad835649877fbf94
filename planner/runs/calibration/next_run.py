"""Which run to measure next: the layout that leaves least doubt about all others.

With J the slopes of the log step times of the candidates and C the posterior's covariance, measuring
candidate i with noise s takes (J C J')[j, i]^2 / (s^2 + (J C J')[i, i]) off the variance of candidate j
(Gaussian conditioning; MacKay 1992, Neural Computation 4, section 3). The sum over j decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from meshwright.costmodel.constants.calibration import Calibration
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.planner.runs.calibration.evidence import Evidence
from meshwright.planner.runs.calibration.report import Suggestion
from meshwright.planner.runs.calibration.robust_fit import Fitted, Floats
from meshwright.planner.runs.prediction import predict_run
from meshwright.planner.runs.run_file import Measured, Run
from meshwright.planner.runs.run_terms import ALL_LAYERS

MOST_CANDIDATES = 24
SUGGESTED = 3
_SETTINGS = ("tp", "pp", "dp", "micro_batch", "recompute")


def suggestions(
    evidence: Evidence, fitted: Fitted, calibration: Calibration
) -> tuple[Suggestion, ...]:
    """The `SUGGESTED` runs that would teach most, best first.

    Parameters
    ----------
    evidence : Evidence
        The runs that are there; the largest is varied.
    fitted : Fitted
        Their fit.
    calibration : Calibration
        The stack that came of it.

    Returns
    -------
    tuple of Suggestion
        Empty where there is no step to vary, or no further layout that fits.
    """
    if not evidence.steps:
        return ()
    model = max(evidence.steps, key=lambda run: run.workload.gpus)
    known = {_key(run) for run in evidence.steps}
    varied = [run for run in _varied(model, calibration) if _key(run) not in known]
    spaced = np.linspace(0, len(varied) - 1, min(len(varied), MOST_CANDIDATES))
    chosen = list(_that_fit([varied[round(position)] for position in spaced]))
    if not chosen:
        return ()
    of_candidates = Evidence(chosen, calibration)
    slopes = of_candidates.slopes(fitted.x)[of_candidates.step_rows] * of_candidates.step_noise
    joint = slopes @ np.array(calibration.covariance) @ slopes.T
    seconds = np.exp(of_candidates.step_logs)
    noise = evidence.step_noise
    best = _most_telling(joint, noise)
    return tuple(_suggestion(chosen[i], i, joint, seconds[i], noise) for i in best)


def _most_telling(joint: Floats, noise: float) -> list[int]:
    """Candidates by the variance that measuring them takes off all."""
    taken_off = np.sum(joint**2, axis=0) / (noise**2 + np.diag(joint))
    order = np.argsort(-taken_off, kind="stable")
    return [int(index) for index in order[:SUGGESTED]]


def _suggestion(run: Run, index: int, joint: Floats, seconds: float, noise: float) -> Suggestion:
    variances = np.diag(joint)
    left = variances - joint[:, index] ** 2 / (noise**2 + variances[index])
    layout = {name: int(getattr(run.layout, name)) for name in _SETTINGS[:-1]}
    recomputed = bool(int(run.layout.recompute) & Recompute.FULL)
    return Suggestion(
        layout={**layout, "recompute": "full" if recomputed else "none"},
        step_time_s=float(seconds),
        spread_pct=100.0 * math.sqrt(variances[index]),
        spread_before_pct=100.0 * float(np.sqrt(variances).mean()),
        spread_after_pct=100.0 * float(np.sqrt(np.maximum(left, 0.0)).mean()),
    )


def _key(run: Run) -> tuple[int, ...]:
    layout = run.layout
    return (
        run.workload.gpus,
        *(int(getattr(layout, name)) for name in _SETTINGS),
    )


def _varied(model: Run, calibration: Calibration) -> Iterator[Run]:
    """Runs of the same model, GPUs and batch in other layouts."""
    workload = replace(model.workload, framework=calibration.framework, calibration=calibration)
    for layout in _layouts(model):
        yield replace(model, workload=workload, layout=layout, stages=None)


def _that_fit(runs: Sequence[Run]) -> Iterator[Run]:
    """Those that fit into HBM, with their predicted step as if it were measured."""
    for run in runs:
        try:
            predicted = predict_run(run)
        except (ValueError, ArithmeticError):
            continue
        device = run.workload.cluster.device
        if max(predicted.memory_gib) + predicted.context_gib <= device.hbm_gib:
            seconds = float(predicted.estimate.step_time_s)
            yield replace(run, measured=Measured(step_time_s=seconds))


def _layouts(model: Run) -> Iterator[Layout]:
    """Every tp inside a node, pp, micro-batch and recomputation that divides; other degrees as they are."""
    work, layout = model.workload, model.layout
    for tp in _powers(min(work.cluster.gpus_per_node, work.model.kv_heads)):
        for pp in _powers(min(16, work.model.layers)):
            ranks, rest = divmod(work.gpus, tp * pp * int(layout.cp))
            if rest or not ranks or ranks % int(layout.ep) or work.model.layers % pp:
                continue
            for micro_batch in (1, 2, 4):
                batches, rest = divmod(work.global_batch, ranks * micro_batch)
                if rest or not batches:
                    continue
                for recompute in (Recompute.NONE, Recompute.FULL):
                    yield replace(
                        layout,
                        tp=tp,
                        pp=pp,
                        dp=ranks,
                        vpp=1,
                        schedule=0,
                        micro_batch=micro_batch,
                        num_micro_batches=batches,
                        sequence_parallel=bool(layout.sequence_parallel) and tp > 1,
                        recompute=int(recompute),
                        recompute_layers=ALL_LAYERS if recompute else 0,
                    )


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2
