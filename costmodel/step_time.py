"""Step time of a layout: the pipeline, data-parallel traffic, the optimizer; every part named, all adding up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodel.collectives import all_reduce_s, point_to_point_s, ring_pass_s
from costmodel.constants import Constants, constants_for, fabric_links, kernel_rates
from costmodel.layout import Floats, Layout, Placement
from costmodel.memory import rank_parameters
from costmodel.operators import Context, Parts, total
from costmodel.stage import Stages, even_layout_load, kind_times, rank_counts, rank_parts
from costmodel.workload import Workload


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, in parts that add up."""

    parts: Parts

    @property
    def seconds(self) -> Floats:
        """The step."""
        return total(self.parts)


def make_context(
    workload: Workload, layout: Layout, placement: Placement, constants: Constants | None = None
) -> Context:
    """Joins a workload, layouts and placements with the calibrated rates."""
    known = constants or constants_for(workload)
    return Context(
        workload=workload,
        layout=layout,
        placement=placement,
        constants=known,
        rates=kernel_rates(workload, known),
        links=fabric_links(workload, known),
    )


def exact_step(c: Context, stages: Stages) -> StepTime:
    """The step of one layout under a given split of the layers.

    Pipeline (1F1B, interleaved for vpp > 1; Narayanan et al. 2021, arXiv 2104.04473, section 2.2): the busiest rank
    works through all m micro-batches, and waits for one pass of the others' virtual stages to fill and drain:
    T = m max_r t_r + (sum_r t_r - max_r t_r) / vpp.
    """
    times, counts = kind_times(c), rank_counts(c, stages)
    by_rank = rank_parts(times, counts)
    loads = np.asarray(total(by_rank))
    busiest = np.argmax(loads, axis=-1)
    worst: Parts = {
        name: np.take_along_axis(np.broadcast_to(seconds, loads.shape), busiest[..., None], axis=-1)[..., 0]
        for name, seconds in by_rank.items()
    }
    dense, expert = rank_parameters(c.workload.model, c.layout, stages)
    return _compose(c, worst, np.sum(loads, axis=-1), np.max(dense), np.max(expert))


def optimistic_step(c: Context) -> StepTime:
    """Never above `exact_step` of the same layouts under any split, if the placement is a bound too."""
    times = kind_times(c)
    busiest, whole = even_layout_load(c, times)
    dense, expert = rank_parameters(c.workload.model, c.layout, None)
    return _compose(c, {"ranks": busiest}, whole, dense, expert)


def _compose(c: Context, worst: Parts, whole: Floats, dense: Floats, expert: Floats) -> StepTime:
    layout = c.layout
    m, pp, vpp = (np.asarray(x) for x in (layout.num_micro_batches, layout.pp, layout.vpp))
    busiest = total(worst)
    parts: Parts = {name: seconds * m for name, seconds in worst.items()}
    parts["pipeline_bubble"] = (whole - busiest) / vpp
    parts["pipeline_p2p"] = _pipeline_p2p(c)
    mean = whole / pp
    parts["dp_comm"] = _data_parallel(c, mean, dense, expert)
    parts["optimizer"] = _optimizer(c, dense, expert)
    parts["step_overhead"] = c.constants.framework.step_overhead_s + 0.0 * busiest
    nodes = np.maximum(np.asarray(layout.gpus) / c.workload.cluster.gpus_per_node, 1.0)
    parts["scale"] = total(parts) * c.constants.shared["scale_per_doubling"] * np.log2(nodes)
    return StepTime(parts)


def _pipeline_p2p(c: Context) -> Floats:
    """Boundary transfers on the critical path: T h of 2 bytes, over tp with sequence parallelism.

    Plain 1F1B waits for both directions of every micro-batch; the interleaved schedule hides them under compute
    when asked to, and only the fill and drain stay exposed.
    """
    layout = c.layout
    payload = 2.0 * c.tokens * c.workload.model.hidden / c.sequence_shards
    pp, vpp, m = (np.asarray(x) for x in (layout.pp, layout.vpp, layout.num_micro_batches))
    crossed = c.placement.pp > np.concatenate(
        [np.ones_like(c.placement.pp[..., :1]), c.placement.pp[..., :-1]], axis=-1
    )
    outermost = np.max(np.where(crossed, np.arange(crossed.shape[-1]), 0), axis=-1)
    once = 2.0 * point_to_point_s(payload, outermost, c.links)
    hidden = (vpp > 1) & c.workload.overlap.pp
    steady = np.where(hidden, 0.0, c.constants.framework.p2p_exposed * m * vpp)
    return np.where(pp > 1, once * (steady + pp - 1), 0.0)


def _data_parallel(c: Context, rank_s: Floats, dense: Floats, expert: Floats) -> Floats:
    """Gradient reduction and parameter gathering over data-parallel groups, less what compute hides.

    `dense` and `expert` are parameters on one GPU before data-parallel sharding. ZeRO 0 all-reduces gradients; 1 and
    2 reduce-scatter them and gather parameters (Rajbhandari et al. 2020, arXiv 1910.02054, section 7); 3 gathers
    for the forward and the backward pass of each micro-batch and reduces after each.
    """
    layout, framework = c.layout, c.constants.framework
    grad, weight = float(framework.gradient_bytes), 2.0

    def both(of_dense: float, of_expert: float, function: object) -> Floats:
        run = function
        return run(of_dense * dense, c.placement.dp_cp, c.links) + run(
            of_expert * expert, c.placement.edp, c.links
        )  # type: ignore[operator, no-any-return]

    reduce_s = both(grad, grad, ring_pass_s)
    gather_s = both(weight, weight, ring_pass_s)
    stage = np.asarray(layout.zero_stage)
    m, k = np.asarray(layout.num_micro_batches), framework.dp_interference
    compute = rank_s * m
    fsdp = (2.0 * gather_s + reduce_s) * m
    fsdp_exposed = np.maximum(fsdp - compute, 0.0) + k * np.minimum(fsdp, compute)
    scattered = 2.0 * reduce_s if framework.zero1_all_reduces else reduce_s
    once = np.where(stage == 0, both(grad, grad, all_reduce_s), scattered + gather_s)
    window = rank_s * (1.0 if c.workload.overlap.dp else 0.0)
    tail = once / np.maximum(2.0 * c.workload.model.layers / np.asarray(layout.pp), 1.0)
    once_exposed = np.maximum(once - window, np.minimum(tail, once)) + k * np.minimum(once, window)
    return np.where(stage == 3, fsdp_exposed, once_exposed)


ADAM_BYTES = 30.0
"""Adam on fp32 states: reads parameter, gradient and two moments, writes three of them and the 2-byte weight."""


def _optimizer(c: Context, dense: Floats, expert: Floats) -> Floats:
    layout = c.layout
    sharded = np.asarray(layout.zero_stage) >= 1
    d = np.where(sharded, np.asarray(layout.dp) * np.asarray(layout.cp), 1)
    e = np.where(sharded, layout.edp, 1)
    return ADAM_BYTES * (dense / d + expert / e) / c.rates.hbm_bytes_per_s
