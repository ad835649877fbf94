"""What compressed gradients would make of a run's step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.costmodel.collectives.compression import Compression, compressions
from meshwright.costmodel.memory.states import rank_parameters
from meshwright.costmodel.step_time import exact_step, make_context
from meshwright.planner.runs.prediction import PricedRun

CODEC_BYTES_PER_S = 500e9
"""Rate at which a GPU packs and unpacks gradients: a few passes over HBM."""


def compressed_steps(
    priced: PricedRun, codec_bytes_per_s: float = CODEC_BYTES_PER_S
) -> list[dict[str, Any]]:
    """The step of a run with its gradients compressed, by each way that there is.

    The reduction's bytes shrink as the way sends fewer; what hides beside compute hides as before; the codec,
    which computes, hides beside nothing. Memory and weights are as they were.

    Parameters
    ----------
    priced
        A run with its price.
    codec_bytes_per_s
        At which a GPU packs and unpacks 16-bit gradients, above 0.

    Returns
    -------
    list of dict
        By `method`: `codec_s`, `step_time_s`, `speed_up` over the run as it is, and whether it `pays`;
        empty where nothing is reduced.
    """
    layout = priced.run.layout
    ranks = int(layout.dp) * int(layout.cp)
    if ranks < 2:
        return []
    plain_s = priced.predicted.step_time_s
    dense, expert = rank_parameters(priced.run.workload.model, layout, None)
    gradient_bytes = 2.0 * float(np.asarray(dense) + np.asarray(expert))
    rows = []
    for way in compressions():
        codec_s = way.passes * gradient_bytes / codec_bytes_per_s
        step_s = codec_s + _exchanged_step_s(priced, way, ranks)
        rows.append(
            {
                "method": way.name,
                "codec_s": codec_s,
                "step_time_s": step_s,
                "speed_up": plain_s / step_s,
                "pays": step_s < plain_s,
            }
        )
    return rows


def _exchanged_step_s(priced: PricedRun, way: Compression, ranks: int) -> float:
    """The step without the codec: the ways compress 16-bit gradients, whatever the run reduces."""
    prediction, workload = priced.prediction, priced.run.workload
    context = make_context(workload, priced.run.layout, prediction.placement)
    sent_bytes = 2.0 * way.traffic_ratio(ranks)
    framework = replace(context.constants.framework, gradient_bytes=sent_bytes)
    thinner = replace(context, constants=replace(context.constants, framework=framework))
    return float(np.asarray(exact_step(thinner, prediction.stages).seconds))
