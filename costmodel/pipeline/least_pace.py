"""The least pace of pipeline ranks in step: what uneven chunks cost under the best split there is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.kinds import KindTimes
from meshwright.costmodel.pipeline.schedules import has_trait


def least_pace_s(c: Context, times: KindTimes) -> NDArray[np.float64]:
    """Never above sum_v max_r t_vr of any split, where ranks are in step with several virtual stages.

    With layers of t seconds and an end of e t, let the chunks of a number take P t together: I whole layers
    and a fraction. Chunks of one number hold as many layers as their pace has room for, so all of them have
    room for p I layers and what the fractions are good for: p I - ceil(e) layers with none, p I - floor(e)
    with frac(e) on the last chunks. Leading dense layers of d t stand in the first chunks. There, j of them
    to a chunk make room for one more layer each floor(D / j) times, with 1 - j (1 - d) added to the pace.
    `schedules.pace_excess_s` has what ranks in step are.

    Parameters
    ----------
    c : Context
        Workload and layouts of shape [n].
    times : KindTimes
        `kind_times(c)`.

    Returns
    -------
    array of float, shape [n]
        Seconds per micro-batch; 0 where ranks are not in step or have one virtual stage.
    """
    model, layout = c.workload.model, c.layout
    main = times.moe if model.moe_layers else times.dense
    assert main is not None
    unit_s = model.layers_in_group * np.asarray(main.seconds, dtype=np.float64)
    end_s = np.asarray(times.head.seconds, dtype=np.float64)
    if times.mtp is not None:
        end_s = end_s + model.mtp_layers * np.asarray(times.mtp.seconds)
    leading = model.dense_layers if model.moe_layers else 0
    spared = np.zeros(())
    if leading and times.dense is not None:
        spared = np.clip(1.0 - np.asarray(times.dense.seconds) / unit_s, 0.0, 1.0)
    pp, vpp = (np.asarray(x, dtype=np.float64) for x in (layout.pp, layout.vpp))
    main_layers = model.moe_layers or model.dense_layers
    units = main_layers / model.layers_in_group + leading - np.floor(leading * spared)
    pace = _least_units(units, pp, end_s / unit_s)
    for together in range(1, leading + 1):
        added = 1.0 - together * spared
        broken = added + _least_units(units - leading // together, pp, end_s / unit_s)
        pace = np.where(added > 0, np.minimum(pace, broken), pace)
    in_step = np.asarray(has_trait(layout.schedule, "in_step")) & (vpp > 1) & (pp >= leading)
    seconds: NDArray[np.float64] = np.where(in_step, pace * unit_s * (1 - 1e-12), 0.0)
    return seconds


def _least_units(
    units: NDArray[np.float64], pp: NDArray[np.float64], end: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Least pace in layers at which chunks have room for some layers and the end, without leading layers."""
    whole = np.ceil((units + np.ceil(end)) / pp)
    broken = np.ceil((units + np.floor(end)) / pp) + (end - np.floor(end))
    least: NDArray[np.float64] = np.minimum(whole, broken)
    return least
