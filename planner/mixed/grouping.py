"""Numbers of shard groups that no pipeline through parts is faster with than with a divisor of them.

More groups hold larger shards: ranks need more memory, and their optimizers take longer. So a number of
groups brings something only where its traffic takes less time on some part than that of each of its divisors,
which are legal wherever it is. A part's ranks hold any number of layers, one at the least: from where a layer
fills its buckets, traffic grows in proportion to parameters, and what is no longer for one layer is no longer
for any number of them. Kinds of parameters (of experts, and all others) are looked at one by one, as ranks
hold any mixture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.data_parallel import traffic_by_kind
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layout import Placement
from meshwright.costmodel.memory.states import layer_parameters_on_gpu

BoolArray = NDArray[np.bool_]


def gains_by_grouping(contexts: Iterable[Context]) -> bool:
    """Whether a layout may be faster than with fewer shard groups.

    Parameters
    ----------
    contexts
        One layout, in plain numbers, as it lies on each part.

    Returns
    -------
    bool
        False where some divisor of its number of groups sends no more on any part.
    """
    no_more: list[BoolArray] = []
    for context in contexts:
        own = int(context.layout.shard_groups)
        if own == 1:
            return True
        divisors = [number for number in range(1, own) if own % number == 0]
        no_more.append(_sends_no_more(context, [*divisors, own]))
    return not bool(np.any(np.all(no_more, axis=0)))


def _sends_no_more(context: Context, numbers: Sequence[int]) -> BoolArray:
    """Which numbers of groups, the last one apart, send no more than that does, whatever ranks hold."""
    placed = {name: np.asarray(row)[None] for name, row in vars(context.placement).items()}
    layouts = replace(context.layout.with_axis(), shard_groups=np.array(numbers))
    grouped = replace(context, layout=layouts, placement=Placement(**placed))
    model = context.workload.model
    dense, rest, experts = layer_parameters_on_gpu(model, context.layout)
    both = ((dense, model.dense_layers), (rest, model.moe_layers))
    least = min(float(np.asarray(own)) for own, layers in both if layers)
    no_more = np.ones(len(numbers) - 1, dtype=np.bool_)
    for traffic, is_full in traffic_by_kind(grouped, least, experts):
        full = np.broadcast_to(is_full, (len(numbers),))
        for seconds in (traffic.seconds, traffic.tail_s):
            each = np.broadcast_to(np.asarray(seconds, dtype=np.float64), (len(numbers),))
            no_more &= each[:-1] <= each[-1]
        no_more &= full[:-1] & full[-1]
    return no_more
