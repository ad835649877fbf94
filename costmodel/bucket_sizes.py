"""Sizes of gradient buckets that a planner may set: which there are, and what a layout sends with each.

Few large buckets start few collectives; the last one of a step has nothing left to hide under. So a layout
has a choice of few sizes about the framework's own, each some times as large.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.data_parallel import (
    DataParallelTraffic,
    bucket_parameters,
    data_parallel_traffic,
)
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layout import Floats
from meshwright.costmodel.memory.states import rank_parameters, table_parameters
from meshwright.frameworks.catalog import framework_of_stack

LEAST_GAIN = 5e-4
"""Share of the step that another size must save before it takes the place of the framework's own."""
TIMES_OWN = (0.5, 2.0, 5.0, 10.0, 20.0, 30.0)
"""Sizes that a layout may have, over the framework's own. Steps on 256 to 1,024 GPUs that another size makes
up to 2.7 % faster come within 0.05 % of the best size of a fine grid with one of these."""


class SizeRange(NamedTuple):
    """Which sizes are to choose from, in parameters; arrays shaped like the layouts."""

    is_open: NDArray[np.bool_]
    """Whether there is a choice at all."""
    own: NDArray[np.float64]
    """Of the framework's own bucket."""
    least: NDArray[np.float64]
    most: NDArray[np.float64]

    def rows(self, layouts: NDArray[np.int64]) -> SizeRange:
        """Those of some layouts.

        Parameters
        ----------
        layouts : array of int, shape [k]
            Positions among the layouts [n].

        Returns
        -------
        SizeRange
            Arrays [k].
        """
        own, least, most = (column[layouts] for column in (self.own, self.least, self.most))
        return SizeRange(self.is_open[layouts], own, least, most)

    def others(self) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Sizes beside the framework's own.

        Returns
        -------
        tuple of two arrays, shape [sizes, ...]
            Whether layouts may have each of them, and the parameters, the framework's own where they may not.
        """
        size = np.multiply.outer(np.array(TIMES_OWN), self.own)
        has = self.is_open & (self.least <= size) & (size <= self.most)
        some = has.reshape(len(has), -1).any(axis=1)
        return has[some], np.where(has, size, self.own)[some]


def size_range(c: Context) -> SizeRange | None:
    """The sizes that layouts may have.

    Up to the parameters of the mean rank. A token table is reduced whole and its gradient comes last, so that
    smaller buckets than it would not make the last one smaller. Where the framework keeps room for a bucket,
    none is larger than its own. Of several virtual stages only the first has buckets (megatron/training/
    training.py, per_chunk_bucket_sizes): the price counts on them in all and would promise too much, so that
    these keep the framework's own.

    Parameters
    ----------
    c : Context
        Layouts of shape [...], of a workload with `chooses_buckets` where there is to be a choice.

    Returns
    -------
    SizeRange or None
        None where no layout has a choice.
    """
    layout, framework, workload = c.layout, c.constants.framework, c.workload
    record = framework_of_stack(workload.framework).gradient_buckets
    is_fixed = not workload.chooses_buckets or workload.bucket_mb is not None
    if record is None or is_fixed or not workload.overlap.dp:
        return None
    stage, vpp, pp = (np.asarray(x) for x in (layout.zero_stage, layout.vpp, layout.pp))
    is_open = np.isin(stage, record.zero_stages) & (vpp == 1)
    if framework.reduces_after_backward:
        is_open = is_open & (pp == 1)
    if not framework.bucket_parameters or not np.any(is_open):
        return None
    own = np.asarray(bucket_parameters(workload, framework, layout), dtype=np.float64)
    least = np.minimum(own, np.asarray(table_parameters(workload.model, layout)))
    most = np.maximum(*(np.asarray(x) for x in rank_parameters(workload.model, layout, None)))
    if record.reserved:
        most = np.minimum(most, own)
    sizes = SizeRange(*np.broadcast_arrays(is_open, own, least, most))
    has, _ = sizes.others()
    return sizes._replace(is_open=np.asarray(has.any(axis=0))) if has.any() else None


def open_traffic(c: Context, dense: Floats, expert: Floats) -> tuple[DataParallelTraffic, ...]:
    """What layouts send with the framework's own size of buckets, and with others.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and links.
    dense, expert : float or array
        Parameters on one GPU before data-parallel sharding, at least 0.

    Returns
    -------
    tuple of DataParallelTraffic
        That of the framework's own size, and where some layout has a choice that of the others, arrays of
        shape [sizes, ...].
    """
    sizes, own = size_range(c), data_parallel_traffic(c, dense, expert)
    if sizes is None:
        return (own,)
    _, size = sizes.others()
    axes = c.placement.tp.ndim - size.ndim  # one layout has an axis of placements
    size = size.reshape(*size.shape, *(1,) * axes)
    return own, data_parallel_traffic(c, dense, expert, size)
