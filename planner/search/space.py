"""The space of layouts: every combination of choices that a framework can run, as arrays.

Degrees (tp, cp, pp, dp, ep, etp) and a micro-batch come first; variants of them add the ZeRO stage and the
recomputation, layouts the virtual stages and the schedule. How many layers full recomputation covers, how
layers are split and where ranks lie is decided for each layout.

>>> from meshwright.planner.request.reader import read_request
>>> request = read_request(
...     model="llama-3-8b", cluster="dgx-h100", gpus=8, global_batch=16, seq_len=8192
... )
>>> space_of(request).tp
(1, 2, 4, 8)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.megatron import refused_recompute
from meshwright.costmodel.execution import Execution
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.pipeline.schedules import (
    LEAST_BUBBLE_SHARE,
    traits,
)
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import framework_named, planned
from meshwright.frameworks.megatron import MEGATRON
from meshwright.frameworks.record import Axis
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.predicted import RECOMPUTED
from meshwright.planner.search.pipelines import even_virtual_stages, pipelines_of

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

LARGEST_CP = 64


@dataclass(frozen=True, kw_only=True)
class Space:
    """The choices of each axis. `pins` and `forbids` of the request are already taken out of them."""

    workload: Workload
    tp: tuple[int, ...]
    cp: tuple[int, ...]
    pp: tuple[int, ...]
    dp: tuple[int, ...]
    ep: tuple[int, ...]
    etp: tuple[int, ...]
    vpp: tuple[int, ...] | None
    """None where any that deals the layers out evenly will do."""
    interleaving: bool
    micro_batch: int | None
    zero: tuple[int, ...]
    recompute: tuple[int, ...]
    sequence_parallel: bool
    fewest_gpus: int
    schedules: tuple[str, ...] = planned(MEGATRON.schedules)
    """Of pipelines, by name."""

    def micro_batches(self, dp: int) -> list[int]:
        """Sequences per micro-batch for a number of replicas: every divisor of a replica's share."""
        share = self.workload.global_batch // dp
        if self.micro_batch is not None:
            return [self.micro_batch] if share % self.micro_batch == 0 else []
        return divisors(share)

    def virtual_stages(self, pp: int) -> tuple[int, ...]:
        """Virtual stages per rank.

        1, and those that deal the layers out evenly when embedding, head or MTP modules may count as a layer.
        """
        model = self.workload.model
        if pp == 1 or not self.interleaving:
            counts: tuple[int, ...] = (1,)
        elif self.vpp is not None:
            counts = tuple(v for v in self.vpp if pp * v <= model.layers)
        else:
            counts = even_virtual_stages(pp, model.layers, model.mtp_layers)
        return counts if self.vpp is None else tuple(v for v in counts if v in self.vpp)

    def pipelines(self, pp: int) -> tuple[tuple[int, int], ...]:
        """Every (virtual stages, schedule) that a number of pipeline ranks can have."""
        schedules = self.schedules if pp > 1 else tuple(set(self.schedules) & {"1f1b"})
        return pipelines_of(self.virtual_stages(pp), schedules)

    @cached_property
    def _batch_pairs(self) -> tuple[IntArray, IntArray]:
        """Every (dp, micro_batch), sorted by dp."""
        pairs = [(dp, size) for dp in self.dp for size in self.micro_batches(dp)]
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def degrees(
        self, most_gpus: int, more_than: int = 0, on_block: Callable[[], object] | None = None
    ) -> Layout:
        """All degrees that use more than `more_than` and at most `most_gpus` GPUs, arrays of shape [n].

        `on_block` is called again and again meanwhile; what it raises ends the enumeration.
        """
        blocks = []
        for block in self._degree_blocks(most_gpus, max(more_than, self.fewest_gpus - 1)):
            blocks.append(block)
            if on_block is not None:
                on_block()
        if not blocks:
            return _layouts(np.zeros((0, 7), dtype=np.int64), self)
        return _layouts(np.concatenate(blocks), self)

    def _degree_blocks(self, most_gpus: int, more_than: int) -> Iterator[IntArray]:
        """Rows of each (tp, cp); among them pp runs slowest, then etp, ep, and (dp, micro-batch)."""
        dps, sizes = self._batch_pairs
        for tp in self.tp:
            etps = np.array(self.etp, dtype=np.int64)
            for cp in self.cp:
                pps = np.array(
                    [pp for pp in self.scheduled_pp if tp * cp * pp <= most_gpus], dtype=np.int64
                )
                pp, etp, ep, pair = np.ix_(
                    pps, etps, np.array(self.ep, dtype=np.int64), np.arange(len(dps))
                )
                gpus = tp * cp * pp * dps[pair]
                within = (more_than < gpus) & (gpus <= most_gpus)
                index = np.nonzero(within & ((tp * cp * dps[pair]) % (etp * ep) == 0))
                if not len(index[0]):
                    continue
                ones = np.ones(len(index[0]), dtype=np.int64)
                columns = (
                    tp * ones,
                    cp * ones,
                    pps[index[0]],
                    dps[index[3]],
                    np.array(self.ep)[index[2]],
                    etps[index[1]],
                )
                yield np.stack([*columns, sizes[index[3]]], axis=1)

    def shapes(self) -> Layout:
        """Every (tp, cp, ep, etp, micro_batch) once, on as few GPUs as it needs.

        Fields broadcast to [(tp, cp), (ep, etp), micro_batch]: what does not depend on experts is priced for
        the others alone.
        """
        sizes = sorted({size for dp in self.dp for size in self.micro_batches(dp)})
        dense = np.array([(tp, cp) for tp in self.tp for cp in self.cp]).reshape(-1, 2)
        experts = np.array([(ep, etp) for ep in self.ep for etp in self.etp]).reshape(-1, 2)
        tp, cp = dense.T[:, :, None, None]
        ep, etp = experts.T[:, None, :, None]
        return Layout(
            tp=tp,
            cp=cp,
            dp=ep * etp,
            ep=ep,
            etp=etp,
            micro_batch=np.array(sizes, dtype=np.int64),
            sequence_parallel=(tp > 1) & self.sequence_parallel,
        )

    def variants(self, degrees: Layout) -> Layout:
        """Every ZeRO stage and recomputation of the given degrees, without virtual stages; arrays of shape
        [n].
        """
        count = degrees.broadcast_shape()[0]
        zero, recompute = (
            np.array(self.zero, dtype=np.int64),
            np.array(self.recompute, dtype=np.int64),
        )
        grown = degrees.take(np.repeat(np.arange(count), len(zero) * len(recompute)))
        return replace(
            grown,
            zero_stage=np.tile(np.repeat(zero, len(recompute)), count),
            recompute=np.tile(recompute, count * len(zero)),
        )

    def scheduled(self, variants: Layout) -> Layout:
        """Every number of virtual stages and schedule of the given layouts, arrays of shape [n]."""
        pp = np.atleast_1d(np.asarray(variants.pp))
        if not len(pp):
            return variants
        by_pp = {
            int(p): np.array(self.pipelines(int(p)), dtype=np.int64).reshape(-1, 2)
            for p in np.unique(pp)
        }
        options = [by_pp[int(p)] for p in pp]
        rows = np.repeat(np.arange(len(pp)), [len(o) for o in options])
        vpp, schedule = np.concatenate(options).T
        return replace(variants.take(rows), vpp=vpp, schedule=schedule)

    def layouts(self, degrees: Layout) -> Layout:
        """Every layout of the given degrees, arrays of shape [n]."""
        return self.scheduled(self.variants(degrees))

    def layouts_per_degrees(self, degrees: Layout) -> IntArray:
        """How many layouts the given degrees have, shape [n]."""
        pp = np.atleast_1d(np.asarray(degrees.pp))
        return np.asarray(self._layouts_by_pp[pp], dtype=np.int64)

    @cached_property
    def smallest_bubble(self) -> FloatArray:
        """By pp, the least that (ranks' work - the busiest rank's) may be multiplied by for the bubble."""
        return self._by_pp(
            lambda pipelines: min(_bubble_factor(*pipeline) for pipeline in pipelines)
        )

    @cached_property
    def _layouts_by_pp(self) -> IntArray:
        per: int = len(self.zero) * len(self.recompute)
        return np.asarray(self.pipeline_counts * per, dtype=np.int64)

    @cached_property
    def scheduled_pp(self) -> tuple[int, ...]:
        """Values of pp that some number of virtual stages and some schedule go with."""
        return tuple(pp for pp in self.pp if self.pipelines(pp))

    @cached_property
    def single_stage(self) -> IntArray:
        """Values of pp for which one virtual stage is a choice."""
        single = [pp for pp in self.pp if any(vpp == 1 for vpp, _ in self.pipelines(pp))]
        return np.array(single, dtype=np.int64)

    @cached_property
    def pipeline_counts(self) -> IntArray:
        """By pp, how many pairs of virtual stages and schedule there are."""
        return self._by_pp(len).astype(np.int64)

    def _by_pp(self, measure: Callable[[tuple[tuple[int, int], ...]], float]) -> FloatArray:
        table = np.zeros(max(self.pp, default=1) + 1)
        for pp in self.pp:
            options = self.pipelines(pp)
            table[pp] = measure(options) if options else 0
        return table


def space_of(request: PlanRequest, execution: Execution | None = None) -> Space:
    """The space that a request spans, run as `execution` says or as plainly as can be.

    What an execution never goes with is left out.
    """
    workload, model = request.workload(execution), request.model
    framework = framework_named(request.framework)
    axes, forbids, pins = planned(framework.axes), request.forbids, request.pins

    def axis(name: Axis, options: list[int]) -> tuple[int, ...]:
        if name not in axes or name in forbids:
            options = [o for o in options if o == 1]
        return tuple(o for o in options if name not in pins or o == pins[name])

    zero = tuple(z for z in planned(framework.zero_stages) if f"zero-{z}" not in forbids)
    vpp, size = pins.get("vpp"), pins.get("micro_batch")
    experts = divisors(model.moe.experts) if model.moe is not None else [1]
    space = Space(
        workload=workload,
        tp=axis("tp", _tensor_degrees(workload)),
        cp=axis("cp", _context_degrees(workload)),
        pp=axis("pp", list(range(1, min(model.layers, request.gpus) + 1))),
        dp=axis("dp", [d for d in divisors(request.global_batch) if d <= request.gpus]),
        ep=axis("ep", [e for e in experts if e <= request.gpus]),
        etp=axis("etp", _expert_tensor_degrees(workload)),
        vpp=None if vpp is None else (int(vpp),),
        interleaving="vpp" in axes and "interleaving" not in forbids,
        micro_batch=None if size is None else int(size),
        zero=tuple(z for z in zero if pins.get("zero_stage", z) == z),
        recompute=_recompute_kinds(request),
        sequence_parallel=framework.sequence_parallel is not None,
        fewest_gpus=request.gpus if "idle-gpus" in forbids else 1,
        schedules=_schedules(request),
    )
    return space if execution is None else _narrowed(space, request, execution)


def _narrowed(space: Space, request: PlanRequest, execution: Execution) -> Space:
    """The layouts of a space that may have their price from this execution."""
    masks = np.array(space.recompute, dtype=np.int64)
    keep = ~refused_recompute(space.workload, masks)
    cp, ep, etp = space.cp, space.ep, space.etp
    if execution.cuda_graph == "full" and request.model.moe is not None:
        etp = tuple(degree for degree in etp if degree == 1)
    if execution.cp_comm == "a2a" and "p2p" in request.execution_options.cp_comm:
        cp = tuple(degree for degree in cp if degree > 1)
    alone = execution.moe_dispatch != "alltoall" and max(space.etp, default=1) == 1
    if execution.ep_overlap or alone:
        ep = tuple(degree for degree in ep if degree > 1)
    recompute = tuple(int(mask) for mask in masks[keep])
    return replace(space, cp=cp, ep=ep, etp=etp, recompute=recompute)


def _schedules(request: PlanRequest) -> tuple[str, ...]:
    """Of the framework, in which several chunks of a rank are virtual stages like any other."""
    names = planned(framework_named(request.framework).schedules)
    wanted = request.pins.get("schedule")
    return tuple(name for name in names if wanted is None or name == wanted)


def _bubble_factor(vpp: int, schedule: int) -> float:
    return (LEAST_BUBBLE_SHARE if traits(schedule).splits_backward else 1.0) / vpp


def _tensor_degrees(workload: Workload) -> list[int]:
    cluster = workload.cluster
    domain = cluster.nvlink_domain if cluster.nvlink_domain > 1 else cluster.gpus_per_node
    return [d for d in divisors(workload.model.heads) if d <= min(domain, workload.gpus)]


def _expert_tensor_degrees(workload: Workload) -> list[int]:
    """Divisors of the width of an expert, within a scale-up domain."""
    moe, cluster = workload.model.moe, workload.cluster
    if moe is None:
        return [1]
    domain = cluster.nvlink_domain if cluster.nvlink_domain > 1 else cluster.gpus_per_node
    return [d for d in divisors(moe.moe_ffn_hidden) if d <= min(domain, workload.gpus)]


def _context_degrees(workload: Workload) -> list[int]:
    powers = [
        2**k for k in range(LARGEST_CP.bit_length()) if 2**k <= min(LARGEST_CP, workload.gpus)
    ]
    return [cp for cp in powers if cp == 1 or workload.seq_len % (2 * cp) == 0]


def _recompute_kinds(request: PlanRequest) -> tuple[int, ...]:
    """Masks: nothing, sets of modules that the model has, everything. Fused attention is recomputed
    anyway.
    """
    kinds = [int(Recompute.NONE)]
    modules = planned(framework_named(request.framework).recompute_modules)
    if modules and "selective-recompute" not in request.forbids:
        kinds += [sum(parts) for parts in _subsets(_modules(request.model, modules))]
    if "full-recompute" not in request.forbids:
        kinds.append(int(Recompute.FULL))
    if "recompute" in request.forbids:
        kinds = [int(Recompute.NONE)]
    wanted = request.pins.get("recompute")
    return tuple(kind for kind in kinds if wanted is None or recompute_name(kind) == wanted)


def recompute_name(mask: int) -> str:
    """none, selective or full."""
    if mask == Recompute.NONE:
        return "none"
    return "full" if mask & Recompute.FULL else "selective"


def _modules(model: ModelSpec, names: tuple[str, ...]) -> list[int]:
    """Masks of those modules, of the names given, that the model has."""
    absent = {
        "moe_act": model.moe is None,
        "mla_up_proj": model.attention is None,
        "mlp": not model.has_dense_feed_forward,
    }
    return [
        int(mask)
        for name, mask in RECOMPUTED.items()
        if name in names and not absent.get(name, False)
    ]


def _subsets(items: list[int]) -> list[list[int]]:
    return [
        [item for bit, item in enumerate(items) if chosen >> bit & 1]
        for chosen in range(1, 1 << len(items))
    ]


def divisors(number: int) -> list[int]:
    """All divisors, rising."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _layouts(table: IntArray, space: Space) -> Layout:
    tp, cp, pp, dp, ep, etp, size = table.T
    zeros, ones = np.zeros(len(table), dtype=np.int64), np.ones(len(table), dtype=np.int64)
    return Layout(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ep=ep,
        etp=etp,
        vpp=ones,
        micro_batch=size,
        num_micro_batches=space.workload.global_batch // np.maximum(dp * size, 1),
        sequence_parallel=(tp > 1) & space.sequence_parallel,
        zero_stage=zeros,
        recompute=zeros,
        recompute_layers=zeros,
        schedule=zeros,
    )
