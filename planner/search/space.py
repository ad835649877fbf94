"""The space of layouts: every combination of choices that a framework can run, as arrays.

Degrees (tp, cp, pp, dp, ep, etp) and a micro-batch come first; variants of them add the ZeRO stage and the
recomputation, layouts the virtual stages and the schedule. How many layers full recomputation covers, how
layers are split and where ranks lie is decided for each layout.

The space of layouts that a request spans.

>>> from meshwright.planner.request.reader import read_request
>>> request = read_request(
...     model="llama-3-8b", cluster="dgx-h100", gpus=8, global_batch=16, seq_len=8192
... )
>>> space_of(request).tp
(1, 2, 4, 8)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.megatron import refused_recompute
from meshwright.constraints.pipeline import may_have_empty_ends
from meshwright.costmodel.layout import Ints, Layout, Recompute, is_among
from meshwright.costmodel.schedules import LEAST_BUBBLE_SHARE, schedule_name, schedule_named, traits
from meshwright.costmodel.workload import (
    HIERARCHICAL,
    Execution,
    Workload,
    deduplicates,
    largest_swap,
)
from meshwright.errors import InputError
from meshwright.frameworks.catalog import framework_named, planned
from meshwright.frameworks.megatron import MEGATRON
from meshwright.frameworks.record import Axis
from meshwright.model_specs.parameters import active_parameter_count
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.mappings import divides_into, divisors
from meshwright.planner.mapping.problem import FloatArray, IntArray
from meshwright.planner.request.choices import DEGREES
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.run_terms import RECOMPUTED

# The pipelines that a number of ranks can have: virtual stages and schedules.


@lru_cache(maxsize=4096)
def even_virtual_stages(
    pp: int,
    layers: int,
    mtp_layers: int,
    *,
    empty_ends: bool = False,
    begins: tuple[int, ...] = (),
    head_layers: int = 1,
) -> tuple[int, ...]:
    """One, and the numbers of virtual stages that deal the layers out evenly.

    Embedding and MTP modules may count as a layer each, the head as `head_layers`, as far as the first and
    the last stage have room for them; with `empty_ends` these two may have no other. With `begins`
    (`ModelSpec.stage_begins`) runs of layers from one begin to the next are dealt out, of which shorter ones
    may count as less.

    Parameters
    ----------
    pp
        Pipeline ranks, at least 2.
    layers, mtp_layers
        Of the model.
    head_layers
        Layers that take about as long as the head.

    Returns
    -------
    tuple of int
        Rising; no other stage is without a layer.
    """
    longest = max((after - begin for begin, after in pairwise((*begins, layers))), default=1)
    runs = len(begins) or layers
    totals = range(-(-layers // longest) if begins else runs, runs + 3 + mtp_layers)
    most = (runs + (2 if empty_ends else 0)) // pp
    kept = 0 if empty_ends else 1

    def is_even_but_for_ends(v: int) -> bool:
        """Whether what full stages miss is no more than the ends may lack, in rows that are searched."""
        height = -(-runs // (pp * v))
        may_lack = min(1 + head_layers + mtp_layers, 2 * (height - kept))
        return pp * v * height - runs <= may_lack and v * height <= -(-runs // pp) + 2

    several = (
        v
        for v in range(2, most + 1)
        if any(total % (pp * v) == 0 for total in totals) or is_even_but_for_ends(v)
    )
    return 1, *several


def layers_as_head(model: ModelSpec) -> int:
    """Mean layers that multiply a token with about as many parameters as the head; at least 1.

    >>> from meshwright.model_specs.reader import load_catalog_model
    >>> [layers_as_head(load_catalog_model(name)) for name in ("llama-2-70b", "llama-3.2-3b")]
    [1, 4]
    """
    head = model.vocab * model.hidden
    layers = active_parameter_count(model, input_embedding=False) - head
    return max(1, -(-head * model.layers // layers))


@lru_cache(maxsize=4096)
def pipelines_of(
    virtual_stages: tuple[int, ...], schedules: tuple[str, ...]
) -> tuple[tuple[int, int], ...]:
    """The pairs of a number of virtual stages and a schedule that exist.

    Parameters
    ----------
    virtual_stages
        Of a rank.
    schedules
        Names, as plans have them.

    Returns
    -------
    tuple of (int, int)
        Virtual stages and a `meshwright.costmodel.schedules.Schedule`.
    """
    pairs = []
    for vpp in virtual_stages:
        for name in schedules:
            schedule = schedule_named(name)
            known = traits(schedule)
            most = known.most_chunks or vpp
            if schedule_name(schedule, vpp) == name and known.fewest_chunks <= vpp <= most:
                pairs.append((vpp, int(schedule)))
    return tuple(pairs)


BoolArray = NDArray[np.bool_]


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
    """None where any of `virtual_stages` will do."""
    interleaving: bool
    micro_batch: int | None
    zero: tuple[int, ...]
    shard_groups: tuple[int, ...]
    """Numbers of groups of replicas; each goes with the replicas that it divides."""
    sharded: tuple[int, ...]
    """ZeRO stages that several groups go with."""
    offloads: tuple[tuple[int, int], ...]
    """Every (ZeRO stage, percent of the optimizer's states in the host's memory)."""
    recompute: tuple[int, ...]
    sequence_parallel: bool
    fewest_gpus: int
    schedules: tuple[str, ...] = planned(MEGATRON.schedules)
    """Of pipelines, by name."""
    uneven_virtual_stages: bool = False
    """Whether numbers of virtual stages that do not deal the layers out evenly are searched, too."""

    def has(self, layout: Layout) -> bool:
        """Whether one layout of plain numbers is of the space, however many layers it recomputes.

        Parameters
        ----------
        layout
            Plain numbers.
        """
        axes = (*DEGREES, "shard_groups", "recompute")
        offload = int(layout.zero_stage), int(layout.optimizer_offload)
        pipeline = int(layout.vpp), int(layout.schedule)
        return (
            all(int(getattr(layout, name)) in getattr(self, name) for name in axes)
            and self.fewest_gpus <= int(layout.gpus) <= self.workload.gpus
            and int(layout.micro_batch) in self.micro_batches(int(layout.dp))
            and pipeline in self.pipelines(int(layout.pp))
            and offload in self.offloads
        )

    def covers(self, narrower: Space) -> bool:
        """Whether every layout of another space of the same work is of this one.

        Parameters
        ----------
        narrower
            Of the same model, global batch and kind of step: this is not asked here.
        """
        axes = (*DEGREES, "shard_groups", "sharded", "offloads", "recompute")
        return (
            all(set(getattr(narrower, name)) <= set(getattr(self, name)) for name in axes)
            and self.fewest_gpus <= narrower.fewest_gpus
            and narrower.workload.gpus <= self.workload.gpus
            and self.sequence_parallel == narrower.sequence_parallel
            and self.micro_batch in (None, narrower.micro_batch)
            and all(set(narrower.pipelines(pp)) <= set(self.pipelines(pp)) for pp in narrower.pp)
        )

    def among(self, layouts: Layout) -> BoolArray:
        """Which layouts of a space that covers this one are of this one, [n].

        Parameters
        ----------
        layouts
            Shape [n].
        """
        axes = (*DEGREES, "shard_groups", "recompute")
        kept = [is_among(getattr(layouts, name), getattr(self, name)) for name in axes]
        gpus = np.asarray(layouts.gpus)
        kept.append((self.fewest_gpus <= gpus) & (gpus <= self.workload.gpus))
        if self.micro_batch is not None:
            kept.append(np.asarray(layouts.micro_batch) == self.micro_batch)
        pipelines = {(pp, *pipeline) for pp in self.pp for pipeline in self.pipelines(pp)}
        kept.append(_are_rows_of(pipelines, layouts.pp, layouts.vpp, layouts.schedule))
        kept.append(_are_rows_of(self.offloads, layouts.zero_stage, layouts.optimizer_offload))
        return np.asarray(np.logical_and.reduce(kept))

    def micro_batches(self, dp: int) -> list[int]:
        """Sequences per micro-batch for a number of replicas: every divisor of a replica's share.

        Parameters
        ----------
        dp
            Replicas, a divisor of the global batch.
        """
        share = self.workload.global_batch // dp
        if self.micro_batch is not None:
            return [self.micro_batch] if share % self.micro_batch == 0 else []
        return divisors(share)

    def virtual_stages(self, pp: int) -> tuple[int, ...]:
        """Virtual stages per rank.

        1, and those that deal the layers out evenly when embedding, head or MTP modules may count as a layer;
        or any.

        Parameters
        ----------
        pp
            Pipeline ranks, at least 1.
        """
        model, empty_ends = self.workload.model, may_have_empty_ends(self.workload)
        most = model.most_stages + (2 if empty_ends else 0)
        if pp == 1 or not self.interleaving:
            counts: tuple[int, ...] = (1,)
        elif self.vpp is not None:
            counts = tuple(v for v in self.vpp if v == 1 or pp * v <= most)
        elif self.uneven_virtual_stages:
            counts = tuple(range(1, max(most // pp, 1) + 1))
        else:
            counts = even_virtual_stages(
                pp,
                model.layers,
                model.mtp_layers,
                empty_ends=empty_ends,
                begins=model.stage_begins,
                head_layers=layers_as_head(model),
            )
        return counts if self.vpp is None else tuple(v for v in counts if v in self.vpp)

    def pipelines(self, pp: int) -> tuple[tuple[int, int], ...]:
        """Every (virtual stages, schedule) that a number of pipeline ranks can have.

        Parameters
        ----------
        pp
            Pipeline ranks, at least 1.
        """
        schedules = self.schedules if pp > 1 else tuple(set(self.schedules) & {"1f1b"})
        return pipelines_of(self.virtual_stages(pp), schedules)

    @cached_property
    def _batch_pairs(self) -> tuple[IntArray, IntArray]:
        """Every (dp, micro_batch), sorted by dp."""
        pairs = [(dp, size) for dp in self.dp for size in self.micro_batches(dp)]
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def degrees(
        self,
        most_gpus: int,
        more_than: int = 0,
        on_block: Callable[[], object] | None = None,
        gpu_seconds: FloatArray | None = None,
        below_s: float = inf,
    ) -> Layout:
        """All degrees that use more than `more_than` and at most `most_gpus` GPUs, arrays of shape [n].

        `on_block` is called again and again meanwhile; what it raises ends the enumeration. With
        `gpu_seconds`, what a step of each of `shapes` costs at the least, those are left out whose GPUs take
        `below_s` or longer for it.

        Parameters
        ----------
        most_gpus, more_than
            GPUs in use: above `more_than`, up to `most_gpus`.
        on_block
            Called after each part of the enumeration; None for nothing.
        gpu_seconds
            GPUs times seconds, [shapes].
        below_s
            Seconds of a step.
        """
        look_up = on_block or (lambda: None)
        blocks = [np.zeros((7, 0), dtype=np.int64)]
        for block in self._degree_blocks(most_gpus, more_than, gpu_seconds, below_s):
            blocks.append(block)
            look_up()
        columns = []
        for parts in zip(*blocks, strict=True):
            columns.append(np.concatenate(parts))
            look_up()
        return _layouts(columns, self)

    def _degree_blocks(
        self, most_gpus: int, more_than: int, gpu_seconds: FloatArray | None, below_s: float
    ) -> Iterator[IntArray]:
        """Columns of each (tp, cp); in them pp runs slowest, then etp, ep, and (dp, micro-batch)."""
        dps, sizes = self._batch_pairs
        _, numbers = np.unique(dps, return_inverse=True)
        eps = np.array(self.ep, dtype=np.int64)
        etps = np.array(self.etp, dtype=np.int64)
        more_than = max(more_than, self.fewest_gpus - 1)
        for tp in self.tp:
            for cp in self.cp:
                pps, _, divides = self._of_dense(tp, cp, most_gpus)
                fits = divides[:, :, numbers]
                cost = np.zeros(fits.shape)
                if gpu_seconds is not None:
                    cost = self._cost_of_pairs(tp, cp, gpu_seconds)
                    fits = fits & (cost < below_s * most_gpus)
                etp, ep, pair = np.nonzero(fits)
                gpus = pps[:, None] * (tp * cp * dps[pair])
                within = (more_than < gpus) & (gpus <= most_gpus)
                within &= cost[etp, ep, pair] < below_s * gpus
                pp, triple = np.nonzero(within)
                if not len(triple):
                    continue
                etp, ep, pair = etp[triple], ep[triple], pair[triple]
                ones = np.ones(len(triple), dtype=np.int64)
                columns = (tp * ones, cp * ones, pps[pp], dps[pair], eps[ep], etps[etp])
                yield np.stack([*columns, sizes[pair]])

    def _of_dense(self, tp: int, cp: int, most_gpus: int) -> tuple[IntArray, IntArray, BoolArray]:
        """Of one (tp, cp): pipelines that GPUs are enough for, every dp, and which (etp, ep) divide the ranks
        of its stage, [etp, ep, dp].
        """
        pps = [pp for pp in self.scheduled_pp if tp * cp * pp <= most_gpus]
        dps = np.unique(self._batch_pairs[0])
        groups = np.outer(np.array(self.etp, dtype=np.int64), np.array(self.ep, dtype=np.int64))
        return np.array(pps, dtype=np.int64), dps, (tp * cp * dps) % groups[:, :, None] == 0

    def _cost_of_pairs(self, tp: int, cp: int, gpu_seconds: FloatArray) -> FloatArray:
        """What a step costs at the least, [etp, ep, (dp, micro-batch)]; infinite without a shape."""
        dense, experts, sizes = self._of_shapes
        by_shape = gpu_seconds.reshape(len(dense), len(experts), len(sizes))
        rows = np.flatnonzero((dense == (tp, cp)).all(axis=1))
        cost = np.full((len(self.etp), len(self.ep), len(sizes)), inf)
        if len(rows):
            ep, etp = (
                np.searchsorted(axis, column)
                for axis, column in zip((self.ep, self.etp), experts.T, strict=True)
            )
            cost[etp, ep] = by_shape[rows[0]]
        return cost[:, :, np.searchsorted(sizes, self._batch_pairs[1])]

    def degrees_by_shape(
        self, most_gpus: int, more_than: int = 0, *, of_layouts: bool = False
    ) -> IntArray:
        """How many `degrees` there are of each (tp, cp, ep, etp), or with how many pipelines and shardings
        they go, in the order of the axes' degrees.

        Parameters
        ----------
        most_gpus, more_than
            GPUs in use: above `more_than`, up to `most_gpus`.
        of_layouts
            Whether pipelines and shardings are counted, in place of degrees.

        Returns
        -------
        array of int, shape [tp, cp, ep, etp]
            Counts.
        """
        shape = [len(axis) for axis in (self.tp, self.cp, self.ep, self.etp)]
        counts = np.zeros(shape, dtype=np.int64)
        more_than = max(more_than, self.fewest_gpus - 1)
        _, sizes = np.unique(self._batch_pairs[0], return_counts=True)
        for row, tp in enumerate(self.tp):
            for column, cp in enumerate(self.cp):
                pps, dps, divides = self._of_dense(tp, cp, most_gpus)
                gpus = pps[:, None] * (tp * cp * dps)
                within = (more_than < gpus) & (gpus <= most_gpus)
                pipelines, kinds = np.ones_like(pps), sizes
                if of_layouts:
                    replicas = Layout(dp=dps, cp=np.full(len(dps), cp))
                    pipelines, kinds = self.pipeline_counts[pps], sizes * self.shardings(replicas)
                counts[row, column] = (divides @ (kinds * (pipelines @ within))).T
        return counts

    @cached_property
    def _of_shapes(self) -> tuple[IntArray, IntArray, list[int]]:
        """Every (tp, cp), (ep, etp) and micro-batch of `shapes`."""
        sizes = sorted({size for dp in self.dp for size in self.micro_batches(dp)})
        dense, experts = (
            np.array([(a, b) for a in first for b in second if a * b <= self.workload.gpus])
            for first, second in ((self.tp, self.cp), (self.ep, self.etp))
        )
        return dense.reshape(-1, 2), experts.reshape(-1, 2), sizes

    def shapes(self) -> Layout:
        """Every (tp, cp, ep, etp, micro_batch) that GPUs are enough for once, on as few as it needs.

        Fields broadcast to [(tp, cp), (ep, etp), micro_batch]: what does not depend on experts is priced for
        the others alone.
        """
        dense, experts, sizes = self._of_shapes
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
        """Every ZeRO stage with the least that it offloads, and recomputation of the given degrees, without
        virtual stages; arrays of shape [n].

        Parameters
        ----------
        degrees
            Shape [k].
        """
        count = degrees.broadcast_shape()[0]
        zero = np.array(list(self.shares), dtype=np.int64)
        offload = np.array([shares[0] for shares in self.shares.values()], dtype=np.int64)
        recompute = np.array(self.recompute, dtype=np.int64)
        grown = degrees.take(np.repeat(np.arange(count), len(zero) * len(recompute)))
        return replace(
            grown,
            zero_stage=np.tile(np.repeat(zero, len(recompute)), count),
            optimizer_offload=np.tile(np.repeat(offload, len(recompute)), count),
            recompute=np.tile(recompute, count * len(zero)),
        )

    @cached_property
    def shares(self) -> dict[int, list[int]]:
        """What each ZeRO stage may offload of the optimizer, in percent, rising."""
        shares: dict[int, list[int]] = {}
        for zero, share in sorted(self.offloads):
            shares.setdefault(zero, []).append(share)
        return shares

    @cached_property
    def offloads_several(self) -> bool:
        """Whether some ZeRO stage leaves a choice of what is offloaded."""
        return any(len(shares) > 1 for shares in self.shares.values())

    def share_counts(self, layouts: Layout) -> IntArray:
        """How many shares of the optimizer may be offloaded under the ZeRO stages of some layouts, [n].

        Parameters
        ----------
        layouts
            Shape [n].
        """
        counts = np.zeros(max(self.shares, default=0) + 1, dtype=np.int64)
        for zero, shares in self.shares.items():
            counts[zero] = len(shares)
        return np.asarray(counts[np.asarray(layouts.zero_stage)])

    def most_offloaded(self, layouts: Layout) -> Layout:
        """The given layouts, each with the largest share that it may offload.

        Parameters
        ----------
        layouts
            Shape [n], each with a ZeRO stage of the space.
        """
        most = np.zeros(max(self.shares, default=0) + 1, dtype=np.int64)
        for zero, shares in self.shares.items():
            most[zero] = shares[-1]
        return replace(layouts, optimizer_offload=most[np.asarray(layouts.zero_stage)])

    def offloaded(self, layouts: Layout) -> Layout:
        """The given layouts with every share that they may offload, in their order.

        Parameters
        ----------
        layouts
            Shape [k].
        """
        if not self.offloads_several:
            return layouts
        stages = np.asarray(layouts.zero_stage)
        pairs = np.array(sorted(self.offloads), dtype=np.int64).reshape(-1, 2)
        rows, columns = np.nonzero(stages[:, None] == pairs[:, 0])
        return replace(layouts.take(rows), optimizer_offload=pairs[columns, 1])

    def scheduled(self, variants: Layout) -> Layout:
        """Every number of virtual stages and schedule of the given layouts, arrays of shape [n].

        Parameters
        ----------
        variants
            Shape [k].
        """
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

    def grouped(self, layouts: Layout) -> Layout:
        """The given layouts with every number of shard groups that they go with, in their order.

        Parameters
        ----------
        layouts
            Shape [k].
        """
        groups = np.array(self.shard_groups, dtype=np.int64)
        goes = self._divided(layouts) & is_among(layouts.zero_stage, self.sharded)[:, None]
        rows, columns = np.nonzero(goes | (groups == 1))
        return replace(layouts.take(rows), shard_groups=groups[columns])

    def group_counts(self, layouts: Layout) -> IntArray:
        """How many numbers of shard groups above 1 the given layouts go with, shape [n]."""
        dp, cp = (np.atleast_1d(np.asarray(x)) for x in (layouts.dp, layouts.cp))
        sharded = is_among(layouts.zero_stage, self.sharded)
        return np.asarray(self._several[dp, (cp > 1).astype(np.int64)] * sharded)

    def _divided(self, layouts: Layout) -> NDArray[np.bool_]:
        """Which numbers of groups above 1 divide the replicas into groups of two ranks or more."""
        groups = np.array(self.shard_groups, dtype=np.int64)
        dp = np.atleast_1d(layouts.dp)[:, None]
        divided = divides_into(groups, dp, np.atleast_1d(layouts.cp)[:, None])
        return np.asarray((groups > 1) & divided)

    @cached_property
    def _several(self) -> IntArray:
        """How many numbers of groups above 1 divide dp replicas, [dp, whether cp > 1]."""
        table = np.zeros((max(self.dp, default=1) + 1, 2), dtype=np.int64)
        for dp in self.dp:
            divided = self._divided(Layout(dp=np.full(2, dp), cp=np.array([1, 2])))
            table[dp] = divided.sum(axis=1)
        return table

    def layouts(self, degrees: Layout) -> Layout:
        """Every layout of the given degrees, arrays of shape [n].

        Parameters
        ----------
        degrees
            Shape [k].
        """
        return self.offloaded(self.grouped(self.scheduled(self.variants(degrees))))

    def layouts_per_degrees(self, degrees: Layout) -> IntArray:
        """How many layouts the given degrees have, shape [n].

        Parameters
        ----------
        degrees
            Shape [n].
        """
        pp = np.atleast_1d(np.asarray(degrees.pp))
        kinds = self.shardings(degrees) * len(self.recompute)
        return np.asarray(self.pipeline_counts[pp] * kinds, dtype=np.int64)

    def shardings(self, degrees: Layout) -> IntArray:
        """Triples of a ZeRO stage, an offloaded share and a number of shard groups that the given degrees
        have, shape [n].
        """
        whole = len(self.offloads) if 1 in self.shard_groups else 0
        stages = sum(zero in self.sharded for zero, _ in self.offloads)
        dp, cp = (np.atleast_1d(np.asarray(x)) for x in (degrees.dp, degrees.cp))
        several = self._several[dp, (cp > 1).astype(np.int64)] if stages else 0
        return np.asarray(whole + stages * several, dtype=np.int64)

    def layouts_per_variant(self, variants: Layout) -> IntArray:
        """How many layouts each of some variants has, shape [n]."""
        groups = self.group_counts(variants) + (1 in self.shard_groups)
        kinds = groups * self.share_counts(variants)
        return np.asarray(self.pipeline_counts[np.asarray(variants.pp)] * kinds, dtype=np.int64)

    @cached_property
    def smallest_bubble(self) -> FloatArray:
        """By pp, the least that (ranks' work - the busiest rank's) may be multiplied by for the bubble."""
        return self._by_pp(
            lambda pipelines: min(_bubble_factor(*pipeline) for pipeline in pipelines)
        )

    @cached_property
    def scheduled_pp(self) -> tuple[int, ...]:
        """Values of pp that some number of virtual stages and some schedule go with."""
        return tuple(pp for pp in self.pp if self.pipelines(pp))

    def virtual_rows(self, pp: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
        """Every number of virtual stages that each of some values of pp [n] goes with: which of them it is,
        the number, and the least bubble share of a schedule with as many; three arrays [k].

        Parameters
        ----------
        pp
            Shape [n]; one without a pipeline in the space has no row.
        """
        least: dict[int, dict[int, float]] = {}
        for size in map(int, np.unique(pp)):
            for vpp, schedule in self.pipelines(size):
                share, own = _bubble_factor(vpp, schedule), least.setdefault(size, {})
                own[vpp] = min(share, own.get(vpp, share))
        options = [least.get(int(size), {}) for size in pp]
        rows = np.repeat(np.arange(len(pp)), [len(own) for own in options])
        stages = np.array([vpp for own in options for vpp in own], dtype=np.int64)
        shares = np.array([share for own in options for share in own.values()], dtype=np.float64)
        return rows, stages, shares

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


def _are_rows_of(allowed: Iterable[tuple[int, ...]], *columns: Ints) -> BoolArray:
    """Which rows of some columns, [n] each, are among those that are allowed."""
    table = np.stack(np.broadcast_arrays(*columns), axis=-1)
    kinds, back = np.unique(table, axis=0, return_inverse=True)
    among = set(allowed)
    are_among = [tuple(kind) in among for kind in kinds.tolist()]
    return np.array(are_among, dtype=np.bool_)[back.reshape(-1)]


def _bubble_factor(vpp: int, schedule: int) -> float:
    return (LEAST_BUBBLE_SHARE if traits(schedule).splits_backward else 1.0) / vpp


def _layouts(columns: Sequence[IntArray], space: Space) -> Layout:
    tp, cp, pp, dp, ep, etp, size = columns
    zeros, ones = np.zeros_like(tp), np.ones_like(tp)
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
        shard_groups=ones,
        optimizer_offload=zeros,
        recompute=zeros,
        recompute_layers=zeros,
        schedule=zeros,
    )


LARGEST_CP = 64


def space_of(request: PlanRequest, execution: Execution | None = None) -> Space:
    """The space that a request spans, run as `execution` says or as plainly as can be.

    What an execution never goes with is left out.

    Parameters
    ----------
    request
        With its pins and what it forbids.
    execution
        One of the request's; None for what goes with some execution.
    """
    workload, model = request.workload(execution), request.model
    framework = framework_named(request.framework)
    axes, forbids, pins = planned(framework.axes), request.forbids, request.pins

    def axis(name: Axis, options: list[int]) -> tuple[int, ...]:
        if name not in axes or name in forbids:
            options = [o for o in options if o == 1]
        return tuple(o for o in options if name not in pins or o == pins[name])

    vpp, size = pins.get("vpp"), pins.get("micro_batch")
    experts = divisors(model.moe.experts) if model.moe is not None else [1]
    space = Space(
        workload=workload,
        tp=axis("tp", _within_a_domain(workload, model.heads)),
        cp=axis("cp", _context_degrees(workload)),
        pp=axis("pp", list(range(1, min(model.most_stages, request.gpus) + 1))),
        dp=axis("dp", [d for d in divisors(request.global_batch) if d <= request.gpus]),
        ep=axis("ep", [e for e in experts if e <= request.gpus]),
        etp=axis("etp", _within_a_domain(workload, model.moe.moe_ffn_hidden if model.moe else 1)),
        vpp=None if vpp is None else (int(vpp),),
        interleaving="vpp" in axes and "interleaving" not in forbids,
        micro_batch=None if size is None else int(size),
        zero=request.zero_stages,
        shard_groups=_shard_groups(request),
        sharded=framework.shard_groups.zero_stages if framework.shard_groups else (),
        offloads=request.shardings,
        recompute=_recompute_kinds(request),
        sequence_parallel=framework.sequence_parallel is not None,
        fewest_gpus=request.gpus if "idle-gpus" in forbids else 1,
        schedules=_schedules(request),
        # Layers that are unlike fill no stage evenly by their number: any height may be as long.
        uneven_virtual_stages=bool(request.model.unlike_layers),
    )
    if request.deals_samples:
        space = _dealing(space)
    return space if execution is None else _narrowed(space, request, execution)


def _dealing(space: Space) -> Space:
    """Of a space, what samples can be dealt in: on all GPUs, without a pipeline (`MEGATRON_DEALT_RULES`)."""

    def powers(degrees: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(degree for degree in degrees if degree & (degree - 1) == 0)

    zero = tuple(stage for stage in space.zero if stage <= 1)
    return replace(
        space,
        cp=powers(space.cp),
        dp=powers(space.dp) if space.micro_batch in (None, 1) else (),
        pp=tuple(degree for degree in space.pp if degree == 1),
        ep=tuple(degree for degree in space.ep if degree == 1),
        micro_batch=1,
        zero=zero,
        offloads=tuple(pair for pair in space.offloads if pair[0] in zero),
        fewest_gpus=space.workload.gpus,
    )


def _narrowed(space: Space, request: PlanRequest, execution: Execution) -> Space:
    """The layouts of a space that may have their price from this execution."""
    masks = np.array(space.recompute, dtype=np.int64)
    keep, able = ~refused_recompute(space.workload, masks), request.execution_options.values
    tp, cp, ep, etp = space.tp, space.cp, space.ep, space.etp
    if not execution.tp_overlap and True in able["tp_overlap"]:
        tp = tuple(degree for degree in tp if degree > 1)
    if execution.cuda_graph == "full" and request.model.moe is not None:
        etp = tuple(degree for degree in etp if degree == 1)
    if execution.cp_comm == "a2a" and "p2p" in able["cp_comm"]:
        cp = tuple(degree for degree in cp if degree > 1)
    if (
        execution.cp_comm == HIERARCHICAL
        and "p2p" in able["cp_comm"]
        and execution.cp_inner is None
    ):
        widths, work = np.array(tp, dtype=np.int64), space.workload
        cp = tuple(degree for degree in cp if np.any(largest_swap(work, widths, degree) > 1))
    alone = deduplicates(space.workload) and max(space.etp, default=1) == 1
    if execution.ep_overlap or alone:
        ep = tuple(degree for degree in ep if degree > 1)
    recompute = tuple(int(mask) for mask in masks[keep])
    goes = partial(request.execution_options.goes, execution)
    offloads = tuple(filter(goes, space.offloads))
    return replace(space, tp=tp, cp=cp, ep=ep, etp=etp, recompute=recompute, offloads=offloads)


def _shard_groups(request: PlanRequest) -> tuple[int, ...]:
    """Every number of groups that divides some number of replicas."""
    record, wanted = (
        framework_named(request.framework).shard_groups,
        request.pins.get("shard_groups"),
    )
    is_free = record is not None and record.planned and "shard-groups" not in request.forbids
    groups = [1]
    if is_free:
        groups = [d for d in divisors(request.global_batch) if d <= request.gpus]
    return tuple(number for number in groups if wanted is None or number == wanted)


def _schedules(request: PlanRequest) -> tuple[str, ...]:
    """Of the framework, in which several chunks of a rank are virtual stages like any other."""
    names = planned(framework_named(request.framework).schedules)
    wanted = request.pins.get("schedule")
    if request.model.unlike_layers:
        # A rank then holds parts from both ends of the model, or its mirror's: no split of unlike layers over
        # them is known to be the best.
        shapes = {name: traits(schedule_named(name)) for name in names}
        names = tuple(
            name
            for name, shape in shapes.items()
            if not shape.v_shaped and not shape.pairs_of_ranks
        )
        if wanted in shapes and wanted not in names:
            raise InputError(
                f"--pin schedule: {wanted} puts chunks from both halves of the model on a rank, which is not "
                f"planned where layers differ ({request.model.name}); allowed: {', '.join(names)}"
            )
    return tuple(name for name in names if wanted is None or name == wanted)


def _within_a_domain(workload: Workload, width: int) -> list[int]:
    """Ways to split a width (heads, or an expert's) evenly over the ranks of one scale-up domain."""
    cluster = workload.cluster
    domain = cluster.nvlink_domain if cluster.nvlink_domain > 1 else cluster.gpus_per_node
    return [d for d in divisors(width) if d <= min(domain, workload.gpus)]


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
        sets = map(sum, _subsets(_modules(request.model, modules)))
        kinds += [mask for mask in sets if mask & _ONE_OF_TWO != _ONE_OF_TWO]
    if "full-recompute" not in request.forbids:
        kinds.append(int(Recompute.FULL))
    if "recompute" in request.forbids:
        kinds = [int(Recompute.NONE)]
    wanted = request.pins.get("recompute")
    return tuple(kind for kind in kinds if wanted is None or recompute_name(kind) == wanted)


_ONE_OF_TWO = int(Recompute.EXPERTS | Recompute.MOE_ACTIVATION)
"""Experts that are recomputed whole save no activation of their own."""


def recompute_name(mask: int) -> str:
    """none, selective or full.

    Parameters
    ----------
    mask
        A `Recompute` mask.
    """
    if mask == Recompute.NONE:
        return "none"
    return "full" if mask & Recompute.FULL else "selective"


def _modules(model: ModelSpec, names: tuple[str, ...]) -> list[int]:
    """Masks of those modules, of the names given, that the model has."""
    absent = {
        "moe_act": model.moe is None,
        "moe": model.moe is None,
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
