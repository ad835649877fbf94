"""Bytes by the textbook: model states, activations, and what each kind of parallelism sends."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil, isfinite
from typing import Any

from meshwright.costmodel.ratios import (
    adam_state_bytes,
    data_parallel_elements,
    expert_parallel_layer_bytes,
    hybrid_sharded_elements,
    pipeline_boundary_bytes,
    tensor_parallel_layer_bytes,
    unfused_activation_bytes,
)
from meshwright.errors import InputError

_STAGES = (0, 1, 2, 3)
_LEAST = {"params": 0, "hidden": 0, "heads": 0, "gradient_bytes": 0.5, "gpu_memory_bytes": 1e6}


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
        if not isfinite(size) or size < _LEAST.get(name, 1):
            raise InputError(
                "is no number or too small", where=f"--{name.replace('_', '-')}", value=size
            )
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
    own = shape.params / shape.tp
    states = {
        stage: float(adam_state_bytes(own, stage, shape.dp, shape.gradient_bytes))
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
        inside, between = hybrid_sharded_elements(own, shape.shard_group)
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
    own = shape.params / shape.tp
    of_gradients = (2.0 if stage == 0 else 1.0) * own
    of_weights = float(data_parallel_elements(own, stage)) - of_gradients
    return shape.gradient_bytes * of_gradients + 2.0 * of_weights


def _of_tokens(shape: TransformerShape) -> dict[str, Any]:
    """What activations take, and what they make each axis send."""
    tokens, hidden = float(shape.seq_len * shape.micro_batch), shape.hidden
    of_tp = float(tensor_parallel_layer_bytes(tokens, hidden, shape.tp))
    of_ep = float(expert_parallel_layer_bytes(tokens, shape.top_k, hidden, shape.ep))
    document: dict[str, Any] = {
        "tensor_parallel": {"layer_bytes": of_tp, "bytes": of_tp * shape.layers},
        "expert_parallel": {"layer_bytes": of_ep, "bytes": of_ep * shape.layers},
        "pipeline_boundary_bytes": float(pipeline_boundary_bytes(tokens, hidden)),
    }
    if shape.heads:
        sizes = (tokens, shape.seq_len, hidden, shape.heads, shape.layers)
        whole = float(unfused_activation_bytes(*sizes))
        replicated = 10.0 * tokens * hidden * shape.layers
        document["activation_bytes"] = whole / shape.tp
        # arXiv 2205.05198, equation 2: 10 s b h of norms, residuals and dropouts are on every rank.
        document["activation_bytes_without_sequence_parallel"] = (
            replicated + (whole - replicated) / shape.tp
        )
    return document
