"""Bytes by the textbook: model states, activations, and what each kind of parallelism sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from meshwright.costmodel import textbook
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.workload import Workload
from meshwright.errors import InputError

_STAGES = (0, 1, 2, 3)
_LEAST = {"params": 0, "hidden": 0, "heads": 0, "gradient_bytes": 0.5, "gpu_memory_bytes": 1e6}
_MOST = 1e18


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Sizes of a transformer and of the groups that share it; a size of 0 leaves out what needs it."""

    params: float = 0.0
    layers: int = 1
    hidden: int = 0
    heads: int = 0
    seq_len: int = 2048
    micro_batch: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    top_k: int = 1
    shard_group: int = 1
    gradient_bytes: float = 2.0
    gpu_memory_bytes: float = 80e9


def volumes_document(shape: TransformerShape) -> dict[str, Any]:
    """Bytes of one GPU by the textbook formulas.

    Parameters
    ----------
    shape
        The model and the groups; degrees and lengths at least 1.

    Returns
    -------
    dict
        Of 16-bit elements, gradients as wide as asked. Where `params` is given: `states_bytes` and
        `data_parallel_bytes` of a rank by ZeRO stage, each of tp ranks with its part of the weights;
        `states_parts_bytes`, weights, gradients, fp32 weights and moments of the whole model; `gpus`, how
        many hold them, each filled to `gpu_memory_bytes`; `hybrid_sharded` in and between shard groups.
        Where `hidden` is: `tensor_parallel`, `expert_parallel` and `pipeline_boundary_bytes`; where `heads`
        is too `activation_bytes`, with sequence parallelism under tp, and the same without it. Where both
        are, `sent_bytes`, what a rank sends in a step of one micro-batch by axis.

    Raises
    ------
    InputError
        For sizes out of range.
    """
    for name, size in asdict(shape).items():
        low = _LEAST.get(name, 1)
        if not low <= size <= _MOST:
            what = f"must be a number from {low:g} to {_MOST:g}"
            raise InputError(what, where=f"--{name.replace('_', '-')}", value=size)
    document: dict[str, Any] = {"shape": asdict(shape)}
    if shape.params:
        document |= _of_parameters(shape)
    if shape.hidden:
        document |= _of_tokens(shape)
    if shape.params and shape.hidden:
        document["sent_bytes"] = {
            "tp": document["tensor_parallel"]["bytes"],
            "pp_boundary": document["pipeline_boundary_bytes"],
            "ep": document["expert_parallel"]["bytes"],
            "dp": document["data_parallel_bytes"]["zero_0"],
        }
    return document


def _of_parameters(shape: TransformerShape) -> dict[str, Any]:
    """States, and what data parallelism moves, by ZeRO stage; the GPUs that the states fill."""
    of_rank = shape.params / shape.tp
    states = {
        stage: float(textbook.adam_state_bytes(of_rank, stage, shape.dp, shape.gradient_bytes))
        for stage in _STAGES
    }
    parts = {
        "weights": 2.0 * shape.params,
        "gradients": shape.gradient_bytes * shape.params,
        "fp32_weights": 4.0 * shape.params,
        "moments": 8.0 * shape.params,
    }
    document: dict[str, Any] = {
        "states_bytes": {f"zero_{stage}": size for stage, size in states.items()},
        "data_parallel_bytes": {f"zero_{stage}": _sent_bytes(shape, stage) for stage in _STAGES},
        "states_parts_bytes": parts,
        "gpu_memory_bytes": shape.gpu_memory_bytes,
        "gpus": ceil(sum(parts.values()) / shape.gpu_memory_bytes),
    }
    if shape.shard_group > 1:
        inside, between = textbook.hybrid_sharded_elements(of_rank, shape.shard_group)
        # Of the three passes inside a group one scatters gradients and two gather weights.
        inside_bytes = float(inside) / 3.0 * (shape.gradient_bytes + 2 * 2.0)
        between_bytes = shape.gradient_bytes * float(between)
        document["hybrid_sharded"] = {"inside_bytes": inside_bytes, "between_bytes": between_bytes}
    return document


def _sent_bytes(shape: TransformerShape, stage: int) -> float:
    """What data parallelism moves: gradients once scattered, without ZeRO once gathered too; else weights.

    Without ZeRO both passes of the all-reduce carry gradients. ZeRO 1 and 2 scatter gradients and gather
    16-bit weights, ZeRO 3 gathers those twice (Rajbhandari et al. 2020, arXiv 1910.02054, section 7).
    """
    of_rank = shape.params / shape.tp
    of_gradients = (2.0 if stage == 0 else 1.0) * of_rank
    of_weights = float(textbook.data_parallel_elements(of_rank, stage)) - of_gradients
    return shape.gradient_bytes * of_gradients + 2.0 * of_weights


def _of_tokens(shape: TransformerShape) -> dict[str, Any]:
    """What activations take, and what they make each axis send."""
    tokens, hidden = float(shape.seq_len * shape.micro_batch), shape.hidden
    of_tp = float(textbook.tensor_parallel_layer_bytes(tokens, hidden, shape.tp))
    of_ep = float(textbook.expert_parallel_layer_bytes(tokens, shape.top_k, hidden, shape.ep))
    document: dict[str, Any] = {
        "tensor_parallel": {"layer_bytes": of_tp, "bytes": of_tp * shape.layers},
        "expert_parallel": {"layer_bytes": of_ep, "bytes": of_ep * shape.layers},
        "pipeline_boundary_bytes": float(textbook.pipeline_boundary_bytes(tokens, hidden)),
    }
    if shape.heads:
        sizes = (tokens, shape.seq_len, hidden, shape.heads, shape.layers)
        unsharded = float(textbook.unfused_activation_bytes(*sizes))
        replicated = 10.0 * tokens * hidden * shape.layers
        document["activation_bytes"] = unsharded / shape.tp
        # arXiv 2205.05198, equation 2: 10 s b h of norms, residuals and dropouts are on every rank.
        document["activation_bytes_without_sequence_parallel"] = (
            replicated + (unsharded - replicated) / shape.tp
        )
    return document


# Communication beside compute: what can hide, how many chunks hide most, and the buffers that it takes.


def overlap_document(compute_s: float, communication_s: float, sync_s: float) -> dict[str, Any]:
    """R = T_comm / T_comp and the step it makes.

    Parameters
    ----------
    compute_s, communication_s, sync_s
        Seconds of a step: compute, communication that may run beside it, and what cannot; compute above 0.

    Returns
    -------
    dict
        The ratio, whether all can be hidden, the step with and without overlap, and the hidden share.

    Raises
    ------
    InputError
        Where there is no compute.
    """
    if compute_s <= 0:
        raise InputError("must be above 0", where="--compute", value=compute_s)
    step_s = float(textbook.overlapped_step_s(compute_s, communication_s, sync_s))
    hidden_s = min(compute_s, communication_s)
    return {
        "compute_s": compute_s,
        "communication_s": communication_s,
        "sync_s": sync_s,
        "overlap_ratio": float(textbook.overlap_ratio(communication_s, compute_s)),
        "can_hide": communication_s <= compute_s,
        "step_s": step_s,
        "serial_s": compute_s + communication_s + sync_s,
        "hidden_share": hidden_s / communication_s if communication_s else 1.0,
    }


def chunks_document(
    buffer_bytes: float,
    link: textbook.Link,
    *,
    chunks: int | None,
    passes: int,
    beside_s: float | None,
) -> dict[str, Any]:
    """Time of a gradient exchange in chunks, and the count that leaves least of it exposed.

    Parameters
    ----------
    buffer_bytes
        Gradients of a rank, above 0.
    link
        What they cross; its start-up above 0.
    chunks
        How many are asked about; the best count when None.
    passes
        2 for an all-reduce, 1 for a reduce-scatter.
    beside_s
        Seconds of the backward pass that it runs beside, above 0; None where that is not known.

    Returns
    -------
    dict
        Seconds in all and exposed, the share of `beside_s`, and the best count with its bucket size.

    Raises
    ------
    InputError
        Where a chunk costs nothing to start, or there is none, or nothing that it runs beside.
    """
    if link.alpha_s <= 0:
        raise InputError("must be above 0: free chunks have no best count", where="--alpha")
    if chunks is not None and chunks < 1:
        raise InputError("must be at least 1", where="--chunks", value=chunks)
    if beside_s is not None and beside_s <= 0:
        raise InputError("must be above 0", where="--compute", value=beside_s)
    moved_bytes = passes * buffer_bytes
    best = textbook.best_chunk_count(moved_bytes, link)
    count = best if chunks is None else chunks
    in_all_s = float(textbook.chunked_s(moved_bytes, count, link))
    return {
        "bytes": buffer_bytes,
        "passes": passes,
        "chunks": count,
        "chunk_bytes": buffer_bytes / count,
        "chunk_s": in_all_s / count,
        "seconds": in_all_s,
        "share_of_compute": None if beside_s is None else in_all_s / beside_s,
        "exposed_s": _exposed_s(moved_bytes, count, link),
        "best_chunks": best,
        "best_chunk_bytes": buffer_bytes / best,
        "best_exposed_s": _exposed_s(moved_bytes, best, link),
    }


def _exposed_s(moved_bytes: float, chunks: int, link: textbook.Link) -> float:
    """Start-ups, and the last chunk, which has nothing to hide under."""
    return chunks * link.alpha_s + moved_bytes / chunks / link.bytes_per_s


def ring_attention_document(
    seq_len: int,
    ranks: int,
    width: int,
    element_bytes: float,
    *,
    compute_s: float = 0.0,
    bytes_per_s: float | None = None,
) -> dict[str, Any]:
    """Keys and values on their way round a ring: bytes of a buffer, and a pass with one buffer and with two.

    Parameters
    ----------
    seq_len, ranks, width
        Tokens of a sequence, ranks of the ring, and width of a token's keys; each at least 1.
    element_bytes
        Of a key's element, above 0.
    compute_s
        Attention of one rank against all blocks, seconds.
    bytes_per_s
        Of the link to the next rank; None where only the buffer is asked for.

    Returns
    -------
    dict
        `buffer_bytes`, and seconds of a pass one after the other and with double buffering, which takes two.

    Raises
    ------
    InputError
        For sizes below 1.
    """
    if min(seq_len, ranks, width) < 1:
        raise InputError("must be at least 1", where="--seq-len, --cp, --width")
    if not 0 < element_bytes <= _MOST:
        raise InputError("must be a number above 0", where="--element-bytes", value=element_bytes)
    buffer_bytes = float(textbook.ring_attention_buffer_bytes(seq_len, ranks, width, element_bytes))
    sent_s = 0.0 if bytes_per_s is None else (ranks - 1) * buffer_bytes / bytes_per_s
    last_s = compute_s / ranks
    return {
        "seq_len": seq_len,
        "cp": ranks,
        "buffer_bytes": buffer_bytes,
        "double_buffer_bytes": 2.0 * buffer_bytes,
        "communication_s": sent_s,
        "single_buffer_s": compute_s + sent_s,
        "double_buffer_s": max(compute_s - last_s, sent_s) + last_s,
    }


# Gradient compression: when fewer bytes pay for the time it takes to make them fewer.
#
# A codec reads and writes gradients at a rate of its own before and after the exchange, so it pays where the
# link is slow: t(codec) + t(compressed exchange) < t(exchange of 16-bit gradients).


def compression_document(
    gradient_bytes: float,
    ranks: int,
    link: textbook.Link,
    *,
    codec_bytes_per_s: float,
    keep: float = 0.01,
    rank: int = 4,
    width: int = 4096,
) -> dict[str, Any]:
    """Exchange of gradients by a ring, plain and by each way to compress them.

    Parameters
    ----------
    gradient_bytes
        16-bit gradients of a rank, above 0.
    ranks
        Of the data-parallel group, at least 2.
    link
        Between its members.
    codec_bytes_per_s
        At which a member packs and unpacks gradients, above 0.
    keep
        Share of the values that top-k sends, above 0 and at most 1.
    rank, width
        Of PowerSGD: columns of its factors, and edge of a gradient taken as square; at least 1.

    Returns
    -------
    dict
        By method: bytes that a rank hands in, seconds of codec and exchange, speed-up, whether it pays, and
        the rate of the link (GB/s) below which it does, start-ups aside.

    Raises
    ------
    InputError
        For sizes out of range.
    """
    if ranks < 2 or not 0 < keep <= 1 or min(rank, width) < 1:
        raise InputError("needs 2 ranks or more, a share up to 1, and sizes of 1 or more")
    plain_s = float(textbook.textbook_s("all-reduce", "ring", gradient_bytes, ranks, link))
    free = replace(link, alpha_s=0.0)
    plain_moving_s = float(textbook.textbook_s("all-reduce", "ring", gradient_bytes, ranks, free))
    methods = []
    for way in textbook.compressions(keep, rank, width):
        sent_bytes = gradient_bytes * way.kept
        buffer_bytes = sent_bytes * ranks if way.operation == "all-gather" else sent_bytes
        exchange_s = float(textbook.textbook_s(way.operation, "ring", buffer_bytes, ranks, link))
        codec_s = way.passes * gradient_bytes / codec_bytes_per_s
        moving_s = float(textbook.textbook_s(way.operation, "ring", buffer_bytes, ranks, free))
        saved_bytes = (plain_moving_s - moving_s) * link.bytes_per_s
        methods.append(
            {
                "method": way.name,
                "bytes": sent_bytes,
                "codec_s": codec_s,
                "exchange_s": exchange_s,
                "seconds": codec_s + exchange_s,
                "speed_up": plain_s / (codec_s + exchange_s),
                "pays": codec_s + exchange_s < plain_s,
                "pays_below_gb_per_s": max(saved_bytes, 0.0) / codec_s / 1e9,
            }
        )
    return {"bytes": gradient_bytes, "ranks": ranks, "seconds": plain_s, "methods": methods}


# HBM of every pipeline stage by component, of a fully given run.


def memory_document(
    name: str, workload: Workload, parts_gib: Sequence[Mapping[str, float]], context_gib: float
) -> dict[str, Any]:
    """What one GPU of each pipeline stage holds, and what it has to give.

    Parameters
    ----------
    name
        Of the run.
    workload
        What is trained, and on which device.
    parts_gib
        GiB by component, for each pipeline stage.
    context_gib
        GiB that the CUDA context and NCCL take outside the framework's allocator.

    Returns
    -------
    dict
        `memory_gib` is the peak of each stage: the sum of its components. `usable_gib` is what the framework
        may allocate on a GPU.
    """
    device = workload.cluster.device
    return {
        "id": name,
        "device": device.name,
        "hbm_gib": device.hbm_gib,
        "usable_gib": usable_hbm_gib(workload),
        "context_gib": context_gib,
        "memory_gib": [sum(parts.values()) for parts in parts_gib],
        "memory_parts_gib": [dict(parts) for parts in parts_gib],
    }
