"""Seconds per micro-batch of each kind of layer, with the host's share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.activations import (
    norm_before_attention_apart,
    offloaded_per_layer,
    offloads_any,
)
from meshwright.costmodel.adapters import (
    adapter_launches,
    backward_share,
    frozen,
    gradient_launches,
    layer_launches,
)
from meshwright.costmodel.attention import (
    attention_block,
    full_share,
    one_window_share,
    turns_stepwise,
    window_cuts_rows,
)
from meshwright.costmodel.collectives import ring_pass_s
from meshwright.costmodel.feed_forward import dense_mlp, hide_expert_traffic, linear, moe_mlp
from meshwright.costmodel.hybrid_context import is_dealt, samples_of_micro_batch
from meshwright.costmodel.image_encoder import encoder_context, encoder_of, projections, score_share
from meshwright.costmodel.kernels import gemm_s, weight_gradient_s
from meshwright.costmodel.layer_context import (
    Context,
    LayerTime,
    Parts,
    Passes,
    add,
    block_time,
    joined,
    portion,
    ring_steps,
    scaled,
    streamed_passes_s,
    total,
)
from meshwright.costmodel.layout import (
    GROUPS,
    Floats,
    Placement,
    Recompute,
    StagedPlacement,
    in_shape,
    recomputes_experts,
)
from meshwright.costmodel.losses import head_passes_s
from meshwright.costmodel.other_blocks import (
    block_launches,
    indexer_block,
    layer_inputs_block,
    linear_attention_block,
    mamba1_block,
    mamba_block,
)
from meshwright.costmodel.workload import deduplicates
from meshwright.frameworks.catalog import input_offload
from meshwright.model_specs.blocks import AHEAD, WINDOWED, BlockShares

# Seconds of what stands before and behind the layers: token table, head and loss.


_LOSS_BYTES = (12.0, 18.0)
"""Cross entropy on 32-bit logits, bytes a logit forward (cast, max, exponent-sum, pick) and backward."""
_STEPWISE_LOSS_BYTES = (38.0, 14.0)
"""Cross entropy step by step: cast (6), maximum (4), difference (8), exponential (8), sum (4), quotient (8);
its gradient times that of the loss (8) and cast back (6) (megatron/core/tensor_parallel/cross_entropy.py)."""
_Z_LOSS_BYTES = (24.0, 36.0)
"""Its logarithms of sums once more: maximum (4), difference (8), exponential (8), sum (4); their gradient by
difference (8), exponential (8) and product (8), added to the other (12) (torch, aten/src/ATen/native/
ReduceOps.cpp, logsumexp_out_impl; torch/csrc/autograd/FunctionsManual.cpp, logsumexp_backward)."""
_GATHERED_LOGIT_BYTES = (8.0, 4.0)
"""A logit that tensor-parallel ranks gather: copied out of what came, then behind others; backward a rank's
part of the gradient (Aleph-Alpha/scaling, core/nn/linear/utils.py, _all_concat and _all_shard)."""
_ACCURACY_BYTES = 4.0
"""The largest logit of each token, looked for by itself (transformer/model/losses/cross_entropy.py there)."""
_FUSED_LOSS_BYTES = (6.0, 4.0)
"""Transformer Engine's cross entropy on 16-bit logits: read for the sum, read and replaced by the gradient;
the backward pass scales it (transformer_engine/pytorch/triton/cross_entropy.py)."""


def embedding(c: Context) -> LayerTime:
    """Table look-up and its gradient scatter; with TP the partial rows are reduced.

    Memory-bound, as `kernels.streamed_s`; the reduction is priced as two ring passes
    (`collectives.ring_pass_s`). Tables for each layer are looked up too.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates.

    Returns
    -------
    LayerTime
        Seconds by part of one micro-batch on the first rank: 4 bytes an element forward, 8 backward.
    """
    model = c.workload.model
    elements = c.tokens * (model.hidden + model.layers * (model.layer_inputs or 0))
    reduce = 2.0 * c.tensor_pass_s
    moved = Passes(4.0 * elements, 0.0 * elements if frozen(c.workload) else 8.0 * elements)
    return block_time(
        memory_bound=streamed_passes_s(c, moved), tp_comm=Passes(reduce, 0.0 * reduce)
    )


def head(c: Context) -> LayerTime:
    """Final norm, LM head and vocabulary-parallel cross entropy, at 16 and 32 bits.

    30 bytes a logit in 32 bits, 52 step by step, 10 in one fused kernel
    (transformer_engine/pytorch/triton/cross_entropy.py; docs/cost_model.md, "One layer"). Log-probabilities
    of tokens are their cross-entropies with the sign turned, by the same kernels
    (swift/megatron/trainers/rlhf_mixin.py, get_logps; trl/trainer/utils.py, selective_log_softmax, and
    add_fused_lm_head from 1.15 on).

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates.

    Returns
    -------
    LayerTime
        Seconds by part of one micro-batch on the last rank.
    """
    model, tokens = c.workload.model, c.tokens
    if not c.workload.step_kind.has_vocabulary_head:
        return _score_head(c)
    if c.workload.loss is not None:
        products, streamed = head_passes_s(c)
        of_norm = 4.0 * tokens * model.hidden / c.sequence_shards
        norm_f, norm_b = streamed_passes_s(c, Passes(of_norm, 1.5 * of_norm))
        return block_time(
            gemm=products,
            memory_bound=Passes(norm_f + streamed.forward, norm_b + streamed.backward),
            tp_comm=Passes(0.0 * norm_f, 0.0 * norm_b),
        )
    vocab = model.vocab / c.layout.tp
    gemm_f = gemm_s(tokens, vocab, model.hidden, c.rates, sixteen_bit=True)
    gemm_b = gemm_s(tokens, model.hidden, vocab, c.rates, sixteen_bit=True)
    if not frozen(c.workload):
        gemm_b = gemm_b + weight_gradient_s(model.hidden, vocab, tokens, c.rates, sixteen_bit=True)
    norm = 4.0 * tokens * model.hidden / c.sequence_shards
    logits = tokens * (model.vocab if c.constants.framework.whole_logits else vocab)
    stack = c.constants.framework
    unfused = _STEPWISE_LOSS_BYTES if stack.stepwise_loss else _LOSS_BYTES
    each = _FUSED_LOSS_BYTES if stack.fused_loss else unfused
    loss = Passes(*(c.workload.step_kind.losses * moved for moved in each))
    if c.workload.z_loss and not stack.fused_loss:
        loss = Passes(loss.forward + _Z_LOSS_BYTES[0], loss.backward + _Z_LOSS_BYTES[1])
    gathered_s = 0.0 * c.tensor_pass_s
    if stack.whole_logits:
        gathered_s = ring_pass_s(2.0 * logits, c.placement.tp, c.links)
        loss = _of_whole_logits(c, loss)
    moved = Passes(norm + loss.forward * logits, 1.5 * norm + loss.backward * logits)
    return block_time(
        gemm=Passes(gemm_f, gemm_b),
        memory_bound=streamed_passes_s(c, moved),
        tp_comm=Passes(c.tensor_pass_s + gathered_s, 2.0 * c.tensor_pass_s),
    )


def _of_whole_logits(c: Context, loss: Passes) -> Passes:
    """Bytes a logit of a loss with those of the accuracy, and of copies where ranks gather the logits."""
    forward, backward = _GATHERED_LOGIT_BYTES
    tp = np.asarray(c.layout.tp, dtype=np.float64)
    copied: Passes = Passes(np.where(tp > 1, forward, 0.0), np.where(tp > 1, backward / tp, 0.0))
    return Passes(loss.forward + _ACCURACY_BYTES + copied.forward, loss.backward + copied.backward)


def _score_head(c: Context) -> LayerTime:
    """Final norm and a head of one output, which reads all hidden states: 2 bytes an element."""
    elements = c.tokens * c.workload.model.hidden
    norm_f, norm_b = 4.0 * elements / c.sequence_shards, 6.0 * elements / c.sequence_shards
    moved = streamed_passes_s(c, Passes(norm_f + 2.0 * elements, norm_b + 4.0 * elements))
    none = Passes(0.0 * moved.forward, 0.0 * moved.backward)
    return block_time(gemm=none, memory_bound=moved, tp_comm=none)


# Seconds that copies of activations to the host and back keep a layer waiting.


COPY_SHARE = 0.8
"""Of PCIe's nominal rate that copies between a GPU and pinned memory of its host attain: 52.8 of 64 GB/s on
H100 (NVIDIA/nvbandwidth, issue 24, device to host), 25 of 32 on A100 (ZaidQureshi/bam, issue 54)."""


def with_copies(c: Context, sent: LayerTime, layer: LayerTime, shares: BlockShares) -> LayerTime:
    """The layer with what its own seconds do not hide of the copies of its offloaded tensors.

    `activations.offloaded_per_layer` has what is copied, with its source, and `COPY_SHARE` the rate. Copies
    run on streams of their own, forward to the host and backward from it, and take as long either way. What
    is not on the host when the layer ends is still in HBM; what is not back keeps its backward pass waiting:
    either pass lasts at least as long as its copies. Where experts exchange tokens over the network, those
    pass the same PCIe link between GPU and NIC, whether compute hides them or not. Inputs of recomputed
    layers may be copied on the stream that computes, and hide under nothing (`InputOffload` of the
    framework's record).

    Parameters
    ----------
    c : Context
        Workload, layouts and the cluster's device.
    sent : LayerTime
        The layer with all that experts exchange as `ep_comm`.
    layer : LayerTime
        With what of it nothing hides, and without what the host's launches cost.
    shares : BlockShares
        Blocks of the layer.

    Returns
    -------
    LayerTime
        With a part `offload` in both passes where anything is offloaded.
    """
    if not offloads_any(c.workload):
        return layer
    rate = COPY_SHARE * c.workload.cluster.device.pcie_gb_per_s * 1e9
    copy_s = np.asarray(offloaded_per_layer(c.workload, c.layout, shares).copied) / rate
    setting = input_offload(c.workload.framework, c.workload.offload_modules)
    if setting is not None and not setting.hides:
        return LayerTime(
            {**layer.forward, "offload": copy_s},
            {**layer.backward, "offload": copy_s},
            layer.recompute,
        )
    forward_s, backward_s = total(layer.forward), total(layer.backward) + total(layer.recompute)
    busy_f, busy_b = (copy_s + _over_network_s(c, parts) for parts in (sent.forward, sent.backward))
    return LayerTime(
        {**layer.forward, "offload": np.maximum(busy_f - forward_s, 0.0)},
        {**layer.backward, "offload": np.maximum(busy_b - backward_s, 0.0)},
        layer.recompute,
    )


def _over_network_s(c: Context, parts: Parts) -> Floats:
    """Seconds of the exchange of experts' tokens, 0 where their group lies in one scale-up domain."""
    members, exchanged_s = c.placement.ep, parts.get("ep_comm", 0.0)
    return np.where(members[..., 0] < members[..., -1], exchanged_s, 0.0)


@dataclass(frozen=True)
class KindTime:
    """Seconds of one micro-batch through one layer: parts that add up, and what recomputation would add."""

    parts: Parts
    """Forward, backward and selective recomputation together."""
    backward_s: Floats
    """Of the backward pass, with what it waits for the host."""
    full_recompute: Parts
    """What the layer takes more when it is fully recomputed."""

    @property
    def seconds(self) -> Floats:
        """Forward, backward and selective recomputation."""
        return total(self.parts)

    @property
    def recompute_s(self) -> Floats:
        """Extra seconds when the layer is fully recomputed."""
        return total(self.full_recompute)

    def rows(self, index: NDArray[np.intp], size: int) -> KindTime:
        """The times of some layouts.

        Parameters
        ----------
        index : array of int, shape [k]
            Positions, 0 to size - 1.
        size : int
            Layouts that the times are of, at least 1.

        Returns
        -------
        KindTime
            Arrays of shape [k].
        """
        return self.changed(lambda seconds: _of_layouts(seconds, index, size))

    def changed(self, change: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> KindTime:
        """The same of all seconds changed in one way.

        Parameters
        ----------
        change : callable
            Of an array of seconds, as the times are shaped.

        Returns
        -------
        KindTime
            With the same parts.
        """

        def each(parts: Parts) -> Parts:
            return {name: change(np.asarray(part)) for name, part in parts.items()}

        return KindTime(
            each(self.parts), change(np.asarray(self.backward_s)), each(self.full_recompute)
        )

    def beside(self, other: KindTime) -> KindTime:
        """The times of these layouts, and after them those of further layouts.

        Parameters
        ----------
        other : KindTime
            Seconds of the further layouts, for the same model run the same way, arrays of shape [k].

        Returns
        -------
        KindTime
            Arrays of shape [n + k], for these of shape [n].
        """
        full = other.full_recompute
        return KindTime(
            {name: np.append(part, other.parts[name]) for name, part in self.parts.items()},
            np.append(self.backward_s, other.backward_s),
            {name: np.append(part, full[name]) for name, part in self.full_recompute.items()},
        )


def _of_layouts(seconds: Floats, index: NDArray[np.intp], size: int) -> NDArray[np.float64]:
    """Seconds of the layouts at some positions among `size`, of every stage where they are given by stage."""
    values = np.asarray(seconds, dtype=np.float64)
    return values[index] if values.ndim > 1 else in_shape(values, (size,))[index]


@dataclass(frozen=True)
class KindTimes:
    """All kinds of a model; `moe` and `mtp` are None without such layers."""

    dense: KindTime | None
    moe: KindTime | None
    embedding: KindTime
    head: KindTime
    mtp: KindTime | None
    """Of one multi-token-prediction module."""
    unlike: tuple[KindTime, ...] = ()
    """Of a layer of each kind in `ModelSpec.unlike_layers`, in the order in which kinds first appear; `dense`
    and `moe` are their means then."""
    by_stage: KindTimes | None = None
    """The same on each pipeline stage, arrays [..., pp], where these differ (`StagedPlacement`)."""

    @property
    def layers(self) -> tuple[KindTime, ...]:
        """Every kind of layer, unlike ones apart."""
        means = tuple(kind for kind in (self.dense, self.moe) if kind is not None)
        return self.unlike or means

    def rows(self, index: NDArray[np.intp], size: int) -> KindTimes:
        """The times of some layouts.

        Parameters
        ----------
        index : array of int, shape [k]
            Positions, 0 to size - 1.
        size : int
            Layouts that the times are of, at least 1.

        Returns
        -------
        KindTimes
            Arrays of shape [k].
        """
        return self._each(lambda kind: kind.rows(index, size))

    def _each(self, change: Callable[..., Any], *others: KindTimes) -> KindTimes:
        """Every kind, and all of them by stage, changed by what it makes of them and those of other times."""
        kinds = {
            name: kind and change(kind, *(getattr(times, name) for times in others))
            for name, kind in vars(self).items()
            if name != "unlike"
        }
        unlike = map(change, self.unlike, *(times.unlike for times in others))
        return KindTimes(**kinds, unlike=tuple(unlike))

    def _mapped(self, change: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> KindTimes:
        """The same of all seconds changed in one way, without those by stage."""
        return replace(self, by_stage=None)._each(lambda kind: kind.changed(change))

    def on_best_stage(self) -> KindTimes:
        """Seconds on no stage below these; the times themselves where stages are alike.

        Returns
        -------
        KindTimes
            Shaped like the times, without `by_stage`.
        """
        if self.by_stage is None:
            return self
        return self.by_stage._mapped(lambda seconds: seconds.min(axis=-1))

    def with_own_ends(self) -> KindTimes:
        """The token table as on the first stage, head and MTP modules as on the last one.

        Returns
        -------
        KindTimes
            Themselves where stages are alike.
        """
        if self.by_stage is None:
            return self
        first, last = (self.by_stage._mapped(itemgetter((..., at))) for at in (0, -1))
        return replace(self, embedding=first.embedding, head=last.head, mtp=last.mtp)

    def with_one_stage(self) -> KindTimes:
        """The times with an axis of one stage.

        Returns
        -------
        KindTimes
            Arrays of shape [..., 1].
        """
        return self._mapped(lambda seconds: seconds[..., None])

    def least_of_runs(self, starts: NDArray[np.intp]) -> KindTimes:
        """The least seconds of several layouts in turn, part by part.

        Parameters
        ----------
        starts : array of int, shape [k]
            Where each run of layouts begins, rising from 0.

        Returns
        -------
        KindTimes
            Arrays of shape [k], for times of shape [n].
        """
        return self._mapped(lambda seconds: np.minimum.reduceat(seconds, starts))

    def in_shape(self, shape: tuple[int, ...]) -> KindTimes:
        """The times as arrays of one shape.

        Parameters
        ----------
        shape : tuple of int
            With as many entries as there are layouts.

        Returns
        -------
        KindTimes
            Arrays of this shape.
        """
        size = (int(np.prod(shape)),)
        return self._mapped(lambda seconds: in_shape(seconds, size).reshape(shape))

    def beside(self, other: KindTimes) -> KindTimes:
        """The times of these layouts, and after them those of further layouts.

        Parameters
        ----------
        other : KindTimes
            Seconds of the further layouts, for the same model run the same way, arrays of shape [k].

        Returns
        -------
        KindTimes
            Arrays of shape [n + k], for these of shape [n].
        """
        return self._each(lambda kind, more: kind.beside(more), other)


def kind_times(c: Context) -> KindTimes:
    """Seconds of every kind of layer of the model, with what the host's launches add.

    Layers that differ in their attention, by a window or by linear attention, those of a hybrid pattern and
    those where each n-th has experts are priced kind by kind; `dense` and `moe` are then the means of the
    model's layers of either sort (docs/cost_model.md, "One layer").
    Where a kind of step scores sequences besides (`execution_names.STEP_KINDS`), every layer, the token table
    and the head have a part `scoring`: forward passes, in the step's own micro-batches, as Megatron-SWIFT
    runs them (swift/megatron/trainers/dpo_trainer.py, forward_step). A pipeline that scores a whole batch
    first (NeMo-RL) fills and drains as long: (m + p - 1) forward passes either way.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates.

    Returns
    -------
    KindTimes
        Seconds of one micro-batch, shaped like the layouts broadcast against the placements; where samples
        are dealt to ranks one by one, of what a rank runs in its place in the mean.
    """
    if isinstance(c.placement, StagedPlacement):
        plain = Placement(**{name: getattr(c.placement, name) for name in GROUPS})
        by_stage = kind_times(_stage_by_stage(c, c.placement)).in_shape(
            c.placement.stage_ep.shape[:-1]
        )
        return replace(kind_times(replace(c, placement=plain)), by_stage=by_stage)
    if is_dealt(c.workload):
        samples = samples_of_micro_batch(c)
        return _in_all([(kind_times(each.context), each.number) for each in samples])
    times = _times_of_training(c)
    for scoring, passes in _scoring_contexts(c):
        times = _with_scoring(times, _times_of_training(scoring), float(passes))
    return times


def _stage_by_stage(c: Context, placement: StagedPlacement) -> Context:
    """Every layout once for each of its stages, as that one lies."""
    layout, stages = c.layout, placement.stage_ep.shape[-2]
    if layout.broadcast_shape():
        layout = layout.take(np.repeat(np.arange(layout.broadcast_shape()[0]), stages))
    else:
        layout = replace(
            layout, micro_batch=np.full(len(placement.by_stage().ep), layout.micro_batch)
        )
    return replace(c, layout=layout, placement=placement.by_stage())


def _in_all(samples: Sequence[tuple[KindTimes, Floats]]) -> KindTimes:
    """Seconds of so many of several samples, kind by kind."""
    first, *others = (times for times, _ in samples)
    numbers = [number for _, number in samples]
    return first._each(lambda *kinds: _mean_of(list(zip(kinds, numbers, strict=True))), *others)


def _scoring_contexts(c: Context) -> list[tuple[Context, int]]:
    """Forward passes without gradients, each as the context of a layer, with their number for a sequence.

    No other micro-batch has its backward pass beside them, and nothing is saved that could be offloaded. A
    reference has no adapters: PEFT disables them in the trained model (trl/trainer/dpo_trainer.py,
    _compute_loss, use_adapter; swift/megatron/trainers/rlhf_mixin.py, null_ref_context).
    """
    workload = c.workload
    if not workload.scoring_passes or c.forward_only:
        return []
    plain = replace(workload, ep_overlap=False, offload_modules="none")
    own = replace(c, workload=plain, forward_only=True)
    reference = own
    if workload.adapters is not None:
        base = replace(plain, adapters=workload.adapters.disabled())
        reference = replace(own, workload=base)
    passes = (own, workload.step_kind.own_passes), (reference, workload.reference_passes)
    return [(context, number) for context, number in passes if number]


def _with_scoring(times: KindTimes, scoring: KindTimes, passes: float) -> KindTimes:
    """Every layer with forward passes beside it; multi-token prediction has no part in them."""

    def scored(kind: KindTime, forward: KindTime) -> KindTime:
        """A layer with so many forward passes beside its own."""
        return replace(kind, parts=add(kind.parts, scaled(forward.parts, passes)))

    return replace(replace(times, mtp=None)._each(scored, scoring), mtp=times.mtp)


def _times_of_training(c: Context) -> KindTimes:
    """`kind_times` without the passes that score."""
    model, stack = c.workload.model, c.constants.framework
    if model.unlike_layers:
        dense, moe, kinds = _unlike(c)
    else:
        (dense, moe), kinds = _alike(c), {}
    mtp = None
    loss = head(c)
    if stack.head_factor != 1.0:
        loss = portion(loss, stack.head_factor)
    head_launches_s = stack.launch_layer_s / 2 + _collectives_s(c, _OF_HEAD)
    head_time = _with_host(c, _OnDevice(loss, head_launches_s))
    if model.mtp_layers:
        main = _own_mtp_layer(c) if model.mtp_differs else moe or dense
        assert main is not None
        mtp = _mtp_module(c, main, head_time)
    embedding_s = stack.launch_layer_s / 4 + _collectives_s(c, _OF_EMBEDDING)
    embedding_time = _with_host(c, _OnDevice(embedding(c), embedding_s))
    if encoder_of(c.workload) is not None:
        embedding_time = _with_encoder(c, embedding_time)
    return KindTimes(dense, moe, embedding_time, head_time, mtp, tuple(kinds.values()))


def _alike(c: Context) -> tuple[KindTime | None, KindTime | None]:
    """A layer without experts and one with them, of those that the model has."""
    model, mixers = c.workload.model, _mixers(c, c.workload.model.blocks)
    dense = moe = None
    if model.dense_layers:
        dense = _mean_layer(c, mixers, model.blocks_of(experts=False))
    if model.moe is not None and (model.moe_layers or model.mtp_layers):
        moe = _mean_layer(c, mixers, model.blocks_of(experts=True))
    return dense, moe


def _own_mtp_layer(c: Context) -> KindTime:
    """The blocks of a multi-token-prediction module that is unlike a main layer."""
    blocks = c.workload.model.mtp_kind.blocks
    mixers = (portion(_softmax_attention(c), blocks.attention),) if blocks.attention else ()
    return _with_host(c, _on_device(c, mixers, blocks))


def _layer_of_kind(c: Context, symbols: str) -> _OnDevice:
    """A layer of the blocks that an entry of `ModelSpec.unlike_layers` names."""
    every_pass = _with_all_passes(c, symbols)
    if not symbols.endswith(AHEAD):
        return every_pass
    share, (forward, *backward) = backward_share(c.layout, symbols), vars(every_pass.layer).values()
    layer = LayerTime(forward, *(scaled(parts, share) for parts in backward))
    spared_s = (_launches_s(c, every_pass) - every_pass.launch_s) * (1.0 - share)
    return every_pass._replace(layer=layer, spared_s=spared_s)


def _with_all_passes(c: Context, symbols: str) -> _OnDevice:
    """The same, were something ahead of it trained."""
    model = c.workload.model
    shares, attention = model.kind_of(symbols)
    if symbols[0] in model.kinds_apart:
        c = replace(c, workload=c.workload.of_kind(model.kinds_apart[symbols[0]]))
    if model.hybrid_pattern is not None:
        return _on_device(c, _mixers(c, shares), shares)
    if attention.linear:
        mixer = linear_attention_block(c)
    else:
        is_windowed = symbols[0].upper() == WINDOWED
        share = one_window_share(c) if is_windowed else full_share(c)
        full_rows = 0.0 if is_windowed and window_cuts_rows(c) else 1.0
        mixer = _softmax_attention(c, share, full_rows=full_rows)
    return _on_device(c, (mixer,), shares, attention.linear)


def _mean_of(kinds: Sequence[tuple[KindTime, Floats]]) -> KindTime | None:
    """The mean of some kinds of layers, each with its share of them; None without any."""
    if not kinds:
        return None
    return KindTime(
        add(*(scaled(kind.parts, share) for kind, share in kinds)),
        sum((share * np.asarray(kind.backward_s) for kind, share in kinds), np.float64(0.0)),
        add(*(scaled(kind.full_recompute, share) for kind, share in kinds)),
    )


def _mixers(c: Context, shares: BlockShares) -> tuple[LayerTime, ...]:
    """Attention and Mamba, each by its share of the layers, those of them that there are."""
    model = c.workload.model
    blocks: list[LayerTime] = []
    if shares.attention:
        attention = _softmax_attention(c)
        if model.linear_layers:
            recurrent = portion(linear_attention_block(c), model.linear_fraction)
            attention = joined(recurrent, portion(attention, 1.0 - model.linear_fraction))
        blocks.append(portion(attention, shares.attention))
    if shares.mamba:
        mamba = mamba_block(c) if model.mamba1 is None else mamba1_block(c)
        blocks.append(portion(mamba, shares.mamba))
    return tuple(blocks)


def _softmax_attention(
    c: Context, score_share: float | None = None, *, full_rows: float = 1.0
) -> LayerTime:
    """Attention with what chooses its positions, where an earlier layer has not."""
    attention = attention_block(c, score_share, full_rows=full_rows)
    if c.workload.model.indexer is not None and not c.workload.model.reuses:
        attention = joined(attention, indexer_block(c))
    return attention


_TRANSFORMER = BlockShares(attention=1.0, mamba=0.0, feed_forward=1.0, experts=0.0)


class _OnDevice(NamedTuple):
    """A layer as the device runs it, and what the host does for it."""

    layer: LayerTime
    launch_s: Floats
    """Of launches of one forward pass."""
    sync_s: Floats = 0.0
    """Of waiting for the device, once a micro-batch."""
    shares: BlockShares = _TRANSFORMER
    spared_s: Floats = 0.0
    """Of launches of a backward pass that does not run."""
    hidden_s: Floats = 0.0
    """Of a forward pass's exchange that compute of another micro-batch hides."""


def _mean_layer(c: Context, mixers: tuple[LayerTime, ...], shares: BlockShares) -> KindTime:
    """A layer of these mixers and its share of feed-forward and experts, with the host's work for all."""
    own = _on_device(c, mixers, shares, c.workload.model.linear_fraction)
    return _with_host(c, own)


DENSE_KERNELS = 40.0
"""Kernels of a Transformer Engine layer, forward and backward, at 16 bits: 2 norms, 4 products, rotary
embedding, attention, activation, 2 residual adds and the exchanges of tensor parallelism, and twice that
backward."""
CAST_KERNELS = 40.0
"""More of them where operands are cast: two for each operand of its 12 products, scales and transposes."""
ROUTER_KERNELS = 30.0
"""Of router, its loss and the preparation of the dispatch."""
EXPERT_KERNELS = 50.0
"""Of permutation, dispatch, grouped products, combine and the shared experts."""
_AT_16_BITS = 0.5 * DENSE_KERNELS + ROUTER_KERNELS + EXPERT_KERNELS
_SHARE_WITHOUT_CASTS = _AT_16_BITS / (_AT_16_BITS + CAST_KERNELS)
"""Kernels of a layer of attention and experts at 16 bits over those of one whose operands are cast."""


_LOOP_OPERATORS = 12.0
"""Of PyTorch for each expert of a loop over them: three that find its tokens, a gather of states and one of
weights, three products, activation function, gate, weighting, and the sum into the output (transformers 4.45,
models/mixtral/modeling_mixtral.py, MixtralSparseMoeBlock.forward)."""
_LOOP_ROUTER_OPERATORS = 10.0
"""Ahead of them: product, softmax, choice, its sum and quotient, a cast, the zeroed output, three of the
mask."""
_LOOP_WAITED_OPERATORS = 2.0
"""That the device waits for once an expert's tokens are known: the call's own return and the gather."""


def _local_experts(c: Context) -> Floats:
    """Experts of a rank; 0 of a model without."""
    moe = c.workload.model.moe
    experts: Floats = (moe.experts if moe else 0) / np.asarray(c.layout.ep)
    return experts


def _expert_launches_s(c: Context) -> Floats:
    """Host seconds of one forward pass of a layer of attention and experts.

    `launch_moe_layer_s` was measured with casts, under fused dispatchers. DeepEP and HybridEP dispatch with
    few kernels. What the others launch to count, sort and send tokens is about as much as the casts that they
    lack at 16 bits (megatron/core/transformer/moe/token_dispatcher.py). A loop over experts is counted.
    """
    stack = c.constants.framework
    if stack.loops_over_experts:
        operators = _LOOP_ROUTER_OPERATORS + _LOOP_OPERATORS * _local_experts(c)
        return 0.5 * stack.launch_layer_s + operators * stack.operator_launch_s
    fused = deduplicates(c.workload)
    share = _SHARE_WITHOUT_CASTS if fused and not c.cast_bytes else 1.0
    return stack.launch_moe_layer_s * share


_BIAS_OPERATORS, _FROZEN_BIAS_OPERATORS = 8.0, 4.0
"""Of PyTorch for the bias behind each expert, which comes times a probability to its tokens' slice of the
output: a product and a sum, and backward a product and a sum for the probability; of a trained bias as many
for itself, and gradients of both biases added to those before."""
_JOINED_OPERATORS = 3.0
"""Slices of all experts joined and narrowed; backward their gradients joined."""


def _expert_biases_s(c: Context) -> Floats:
    """Host seconds of all passes of biases that each expert of a layer has added by itself.

    Megatron adds the second so even where products are grouped (megatron/core/transformer/moe/experts.py,
    TEGroupedMLP._apply_bias); the first is part of Transformer Engine's own kernels.
    """
    stack, moe = c.constants.framework, c.workload.model.moe
    if moe is None or not moe.expert_bias or not stack.adds_biases_by_expert:
        return 0.0
    of_each = _FROZEN_BIAS_OPERATORS if frozen(c.workload) else _BIAS_OPERATORS
    return (of_each * _local_experts(c) + _JOINED_OPERATORS) * stack.operator_launch_s


def _token_counts_s(c: Context) -> Floats:
    """What the device waits for in a forward pass while the host learns which tokens an expert has."""
    stack = c.constants.framework
    if stack.loops_over_experts:
        return _LOOP_WAITED_OPERATORS * stack.operator_launch_s * _local_experts(c)
    return stack.moe_sync_s


def _own_launches_s(c: Context, shares: BlockShares) -> Floats:
    """Host seconds of one forward pass of a layer, without adapters, collectives or loops over blocks.

    A layer of attention and experts launches `launch_moe_layer_s`, half a layer of it for attention.
    """
    beside_experts = 0.5 * (shares.tensor_parallel - shares.experts)
    of_blocks = beside_experts * c.constants.framework.launch_layer_s
    return shares.experts * _expert_launches_s(c) + of_blocks


def checked_backward_s(c: Context) -> Floats:
    """Seconds of a step that checks of gradients cost, where each weight's are a bucket of their own.

    A check waits for the device (bool of a tensor), so that in the last backward pass, where buckets are
    reduced, host and device take turns: its launches, twice those of a forward pass, are hidden by nothing
    (megatron-core 0.13.1, distributed/param_and_grad_buffer.py, check_grads and start_grad_sync).

    Parameters
    ----------
    c : Context
        Workload, layouts and rates.

    Returns
    -------
    float or array
        0 where nothing checks, or where gradients are reduced when the backward passes have ended.
    """
    if not (c.workload.checks_gradients and c.workload.dp_overlap):
        return 0.0
    model = c.workload.model
    launches_s = (_PASSES - 1.0) * _own_launches_s(c, model.blocks) * _host_share(c)
    return launches_s * model.layers / np.asarray(c.layout.pp)


def _on_device(
    c: Context, mixers: tuple[LayerTime, ...], shares: BlockShares, linear_share: float = 0.0
) -> _OnDevice:
    """A layer of these mixers and its share of feed-forward and experts.

    A layer of a pattern is one block, half of what a transformer's layer launches. Of the mixers a share is
    linear attention.
    """
    stack = c.constants.framework
    blocks = list(mixers)
    launch_s = _own_launches_s(c, shares)
    beside = adapter_launches(c, shares) + linear_share * block_launches(c) / layer_launches(c)
    beside_s: Floats = beside * stack.launch_layer_s
    if turns_stepwise(c.workload):
        beside_s = (
            beside_s + shares.attention * _ROTARY_OPERATORS / _PASSES * stack.operator_launch_s
        )
    if c.workload.activates_stepwise:
        of_both = zip((shares.feed_forward, shares.experts), _ACTIVATION_OPERATORS, strict=True)
        operators = sum(share * more for share, more in of_both)
        beside_s = beside_s + operators / _PASSES * stack.operator_launch_s
    beside_s = beside_s + shares.tensor_parallel * _collectives_s(c, _OF_BLOCK)
    if c.workload.model.layer_inputs is not None:
        # Launches of a block: two products, an activation, a norm and a residual.
        beside_s = beside_s + 0.5 * stack.launch_layer_s
        blocks.append(layer_inputs_block(c))
    beside_s = beside_s + shares.experts * _expert_biases_s(c) / _PASSES
    if shares.feed_forward:
        blocks.append(portion(dense_mlp(c, c.workload.model.ffn_hidden), shares.feed_forward))
    if not shares.experts:
        layer = joined(*blocks)
        return _OnDevice(with_copies(c, layer, layer, shares), launch_s + beside_s, 0.0, shares)
    blocks.append(portion(moe_mlp(c), shares.experts))
    sent = joined(*blocks)
    layer = with_copies(c, sent, hide_expert_traffic(c, sent), shares)
    waits = np.where(recomputes_experts(c.layout), 2.0, 1.0)
    return _OnDevice(
        layer,
        launch_s + beside_s,
        shares.experts * _token_counts_s(c) * waits,
        shares,
        hidden_s=np.asarray(sent.forward["ep_comm"]) - layer.forward["ep_comm"],
    )


def _unlike(c: Context) -> tuple[KindTime | None, KindTime | None, dict[str, KindTime]]:
    """Layers without experts and with them in the mean, and each kind of them.

    The host runs ahead of the device by more than a layer, so that it is the mean layer that it keeps up with
    or not: each kind has its launches' share of what that costs.
    """
    model = c.workload.model
    order, front = model.unlike_layers, model.dense_layers
    kinds: dict[str, KindTime] = {}
    means: list[KindTime | None] = []
    for part in (order[:front], order[front:]):
        counts = Counter(part)
        shares = {symbols: count / len(part) for symbols, count in counts.items()}
        by_symbols = {symbols: _layer_of_kind(c, symbols) for symbols in counts}
        mean = _mean_on_device([(by_symbols[symbols], share) for symbols, share in shares.items()])
        for symbols, each in by_symbols.items():
            kinds[symbols] = _with_host(c, each, mean)
        means.append(_mean_of([(kinds[symbols], share) for symbols, share in shares.items()]))
    by_kind = {symbols: kinds[symbols] for symbols in dict.fromkeys(order)}
    return means[0], means[1], by_kind


def _with_encoder(c: Context, first: KindTime) -> KindTime:
    """What the first rank runs ahead of its layers, with the image encoder as a part `image_encoder`.

    Layers, and products around them. A frozen encoder runs forward alone; one whose layers are recomputed in
    full runs their forward pass once more. The host waits for the device in every forward pass, as it lays
    images into the sequence, and so has all launches of the encoder's ahead of it; backward it has run ahead
    in the language model (transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py, get_placeholder_mask).
    """
    found = encoder_of(c.workload)
    assert found is not None
    vision, use = found
    own = encoder_context(c, vision, use)
    attention = attention_block(own, score_share(vision, use))
    on_device = _on_device(own, (attention,), _TRANSFORMER)
    layer = _with_host(own, _OnDevice(on_device.layer, 0.0))
    host_s = vision.layers * on_device.launch_s * _host_share(own)
    device_s = vision.layers * total(on_device.layer.forward)
    waits_s = _host_excess_s(device_s, host_s, c.constants.shared["launch_norm"])
    sequences = np.asarray(own.layout.micro_batch, dtype=np.float64) / use.images
    tp = np.asarray(own.layout.tp)
    products = [
        linear(own, rows * sequences, n / tp, k, {}) for rows, n, k in projections(vision, use)
    ]
    backward_s = vision.layers * np.asarray(layer.backward_s)
    seconds = vision.layers * layer.seconds + waits_s + sum(each.forward for each in products)
    if not own.forward_only:
        around_s = sum(each.backward for each in products)
        again = own.layout.recomputes_layers
        again_s = np.where(again, vision.layers * layer.recompute_s, 0.0)
        seconds = seconds + around_s + again_s
        backward_s = backward_s + around_s + again_s
    name = "scoring" if c.forward_only else "image_encoder"
    parts = add(first.parts, {name: seconds})
    return KindTime(parts, first.backward_s + backward_s, first.full_recompute)


def _mean_on_device(kinds: Sequence[tuple[_OnDevice, float]]) -> _OnDevice | None:
    """The mean of some kinds of layers, each with its share of them; None without any."""
    if not kinds:
        return None
    layers = joined(*(portion(blocks.layer, share) for blocks, share in kinds))
    launch_s = sum(blocks.launch_s * share for blocks, share in kinds)
    sync_s = sum(blocks.sync_s * share for blocks, share in kinds)
    columns = zip(*([share * x for x in blocks.shares] for blocks, share in kinds), strict=True)
    shares = BlockShares(*map(sum, columns))
    spared_s, hidden_s = (
        sum(getattr(blocks, name) * share for blocks, share in kinds)
        for name in ("spared_s", "hidden_s")
    )
    return _OnDevice(layers, launch_s, sync_s, shares, spared_s, hidden_s)


def _mtp_module(c: Context, main: KindTime, head_time: KindTime) -> KindTime:
    """A multi-token-prediction module: a main layer, a head, and the GEMM from 2 h to h that joins it."""
    h, n = c.workload.model.hidden, c.workload.model.hidden / c.layout.tp
    backward = gemm_s(c.tokens, 2 * h, n, c.rates)
    if not frozen(c.workload):
        backward = backward + weight_gradient_s(2 * h, n, c.tokens, c.rates)
    join: Parts = {"gemm": gemm_s(c.tokens, n, 2 * h, c.rates) + backward}
    return KindTime(
        add(main.parts, head_time.parts, join),
        main.backward_s + head_time.backward_s + backward,
        main.full_recompute,
    )


_PASSES = 3.0
"""Launches of a layer in forward passes: one forward, and a backward pass that launches twice as much."""
_ROTARY_OPERATORS = 44.0
"""Operators that turn queries and keys, 12 of each forward, among them those of cosine and sine, and 10
backward (`attention.turns_stepwise` has the source)."""
_ACTIVATION_OPERATORS = 5.0, 11.0
"""More of an activation function, of a dense feed-forward and of experts, than of one kernel each way: 2 and
4 forward, 3 and 7 backward (`kernels.element_bytes`, `feed_forward._WEIGHTED_BYTES`)."""
_OVERLAPPED_GEMMS = 3.0
"""GEMMs of a block that overlapped tensor parallelism cuts into tp: two forward, one backward."""
_RING_STEP_LAUNCHES = 12.0
"""Launches of a step of ring attention: a kernel, a transfer and corrections, about six in each direction."""


def _with_host(c: Context, blocks: _OnDevice, mean: _OnDevice | None = None) -> KindTime:
    """Adds what the host costs: the GPU and the host run side by side, and the slower one paces a layer.

    A p-norm of the two stands for their jitter; a CUDA graph of the whole step takes the host out.
    Where launches block, host and device take turns, so that no launch is hidden (CUDA C++ Programming Guide,
    concurrent execution between host and device: CUDA_LAUNCH_BLOCKING makes launches synchronous).
    Once per layer and micro-batch the GPU idles for `sync_s`, unless a graph lets the host run ahead again;
    where the host is the slower one, its launches hide that wait. Where a `mean` layer is given, the host is
    beside that one, and this layer has as much of it as of its launches.
    """
    framework, power = c.constants.framework, c.constants.shared["launch_norm"]
    layer, beside = blocks.layer, mean or blocks
    parts = add(layer.forward, layer.backward, layer.recompute)
    share = _host_share(c)
    waits_share = 0.0
    if c.workload.cuda_graph in ("none", "feed_forward"):
        waits_share = c.constants.device.host_factor
    waits = blocks.sync_s * waits_share
    device_s = total(add(beside.layer.forward, beside.layer.backward, beside.layer.recompute))
    host_s = _launches_s(c, beside) * share
    blocked = c.workload.launch_blocking
    excess = _host_excess_s(device_s + beside.sync_s * waits_share, host_s, power, in_turn=blocked)
    part_of_mean: Floats = 1.0
    if mean is not None:
        part_of_mean = _launches_s(c, blocks) * share / np.maximum(host_s, 1e-12)
        excess = excess * part_of_mean
    gap = framework.serial_launch_s
    if blocked:
        gap += framework.launch_blocking_s
    gap *= 0.5 * blocks.shares.total
    parts = add(parts, {"host": excess + waits + gap * _PASSES * share})
    forward_s, backward_s = total(layer.forward), total(layer.backward)
    again_s = total(_run_again(c, beside))
    forward_excess = _host_excess_s(again_s, beside.launch_s * share, power, in_turn=blocked)
    forward_host = forward_excess * part_of_mean + gap * share
    forward_again = add(_run_again(c, blocks), {"host": forward_host})
    if c.forward_only:
        return KindTime({"scoring": total(forward_again) + waits}, 0.0 * waits, {})
    full = scaled(forward_again, framework.recompute_fraction)
    backward_share = backward_s / np.maximum(forward_s + backward_s, 1e-12)
    return KindTime(parts, total(parts) * backward_share, {"recompute": total(full)})


def _launches_s(c: Context, blocks: _OnDevice) -> Floats:
    """Host seconds of all launches of a layer."""
    launches_s = blocks.launch_s - _replayed_s(c, blocks.shares)
    return launches_s * _PASSES + _further_launches_s(c, blocks.shares) - blocks.spared_s


def _run_again(c: Context, blocks: _OnDevice) -> Parts:
    """A forward pass that runs again, or alone to score: what goes to the host goes there once.

    Checkpoints that stop at the last tensor which the backward pass reads leave out a combine that saves none
    (`FrameworkConstants.combines_again`), half of the all-to-alls. No other micro-batch has a pass beside a
    layer that is replayed ahead of its own backward pass, to hide them (NVIDIA/Megatron-LM, pull requests
    5869 and 6311).
    """
    again = {name: part for name, part in blocks.layer.forward.items() if name != "offload"}
    if "ep_comm" in again:
        stops_early = not (c.forward_only or c.constants.framework.combines_again)
        again["ep_comm"] = (0.5 if stops_early else 1.0) * (again["ep_comm"] + blocks.hidden_s)
    return again


def _replayed_s(c: Context, shares: BlockShares) -> Floats:
    """Host seconds of a forward pass that CUDA graphs of the feed-forward part alone take off.

    They hold a dense feed-forward, half of what a layer launches, or the router and what prepares its
    dispatch: what graphs of these and of attention leave less than attention's half.
    """
    if c.workload.cuda_graph != "feed_forward":
        return 0.0
    stack = c.constants.framework
    of_attention = of_dense = 0.5 * stack.launch_layer_s
    share = 1.0 - c.constants.shared["partial_graph_host_share"]
    of_router = max(0.0, share * stack.launch_moe_layer_s - of_attention)
    return shares.experts * of_router + shares.feed_forward * of_dense


def _host_share(c: Context) -> float:
    """Host work that the run's CUDA graphs leave, times the pace of the device's host."""
    partial = c.constants.shared["partial_graph_host_share"]
    share = {"full": 0.0, "partial": partial}.get(c.workload.cuda_graph, 1.0)
    return share * c.constants.device.host_factor


def _further_launches_s(c: Context, shares: BlockShares) -> Floats:
    """Host seconds of launches that the passes of a layer do not count.

    Experts and modules that selective recomputation runs again, and what a layer is cut into: GEMMs beside
    transfers, steps of ring attention. Gradients of frozen weights, which have no launches, are taken off.
    """
    stack = c.constants.framework
    tp, in_ring = np.asarray(c.layout.tp), ring_steps(c)
    gemms: Floats = 0.0
    if c.tp_overlaps:
        gemms = _OVERLAPPED_GEMMS * shares.total * np.where(tp > 1, tp, 0)
    steps = _RING_STEP_LAUNCHES * shares.attention * np.where(in_ring > 1, in_ring, 0)
    recomputed_experts = shares.experts * recomputes_experts(c.layout)
    behind_attention_s = _expert_launches_s(c) - 0.5 * stack.launch_layer_s
    further_s = stack.piece_launch_s * (gemms + steps) + behind_attention_s * recomputed_experts
    further_s = further_s + _checkpoints(c, shares) * stack.operator_launch_s
    if not frozen(c.workload):
        return further_s
    return further_s - gradient_launches(c) * _own_launches_s(c, shares)


_CHECKPOINT_OPERATORS = 17.0
"""Of a checkpoint beside what runs again: random states of host, device and tracker are read ahead of it and
again behind it (4), set for it and set back (4), an output is dropped, with a hook, and restored (3), inputs
are detached, a graph of its own runs backward, and FP8 contexts open and close twice
(megatron/core/tensor_parallel/random.py, CheckpointWithoutOutput and _fork_rng)."""
_NORM_AGAIN, _ACTIVATION_AGAIN, _SCORE_AGAIN, _UP_PROJECTION_AGAIN = 3.0, 2.0, 15.0, 24.0
"""Operators of modules that run again: a norm, the activation of experts, Transformer Engine's attention, and
MLA's two products, their splits, turns and joins (megatron/core/transformer/multi_latent_attention.py)."""


def _checkpoints(c: Context, shares: BlockShares) -> Floats:
    """Operators of the host that selective recomputation costs, a layer and micro-batch.

    Each module that runs again is a checkpoint of its own; what whole experts launch again is counted beside
    it. Where the host is ahead they cost nothing.
    """
    mask = np.asarray(c.layout.recompute)
    norms = shares.experts + shares.attention * norm_before_attention_apart(c.workload.model)
    of_modules: tuple[tuple[int, float, float], ...] = (
        (int(Recompute.CORE_ATTENTION), shares.attention, _SCORE_AGAIN),
        (int(Recompute.LAYERNORM), norms, _NORM_AGAIN),
        (int(Recompute.MOE_ACTIVATION), shares.experts, _ACTIVATION_AGAIN),
        (int(Recompute.MLA_UP_PROJECTION), shares.attention, _UP_PROJECTION_AGAIN),
        (int(Recompute.MLP), shares.feed_forward, 0.0),
        (int(Recompute.EXPERTS), shares.experts, 0.0),
    )
    operators: Floats = 0.0
    for module, number, again in of_modules:
        of_each = number * (_CHECKPOINT_OPERATORS + again)
        operators = operators + np.where(mask & module, of_each, 0.0)
    return operators


class _Collectives(NamedTuple):
    """Tensor-parallel collectives of a micro-batch, forward and backward together."""

    gathered: float
    """With sequence parallelism."""
    summed: float
    """With all-reduces."""


_OF_BLOCK = _Collectives(5.0, 2.0)
"""Two forward; backward as many, and the gather of a saved input (`layer_context.tensor_parallel_s`)."""
_OF_HEAD = _Collectives(6.0, 4.0)
"""A gather, backward another and a scatter, or a sum backward; three sums of the loss that is split over the
vocabulary (megatron/core/tensor_parallel/cross_entropy.py)."""
_OF_EMBEDDING = _Collectives(2.0, 1.0)
"""A scatter and a gather, or a sum forward."""


_CHECK_S = 2.1e-4
"""Of the host for each rank of a group that checks a collective: a barrier that its first rank monitors and
two gathers, all through Gloo (torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp). Measured on a 16-core
Xeon with PyTorch 2.11: 1.70 ms among 8 processes, 0.89 among 4, 0.65 among 2
(`tests/data/own_runs/h200_host.json`)."""


def _collectives_s(c: Context, number: _Collectives) -> Floats:
    """Host seconds of tensor-parallel collectives for each of the `_PASSES` of a layer's launches."""
    calls = np.where(c.layout.sequence_parallel, number.gathered, number.summed)
    each_s: Floats = c.constants.framework.collective_launch_s
    tp = np.asarray(c.layout.tp)
    if c.workload.checked_collectives:
        each_s = each_s + _CHECK_S * tp
    seconds: Floats = np.where(tp > 1, calls * each_s / _PASSES, 0.0)
    return seconds


def _host_excess_s(
    device_s: Floats, host_s: Floats, power: float, *, in_turn: bool = False
) -> Floats:
    """What both take longer than the device alone: by their p-norm, or all of the host's time `in_turn`."""
    if in_turn:
        return host_s
    larger, smaller = np.maximum(device_s, host_s), np.minimum(device_s, host_s)
    together = larger * (1.0 + (smaller / larger) ** power) ** (1.0 / power)
    excess: Floats = together - device_s
    return excess
