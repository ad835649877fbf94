"""Bytes by the textbook: model states, activations, and what each kind of parallelism sends."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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


def volumes_document(shape: TransformerShape) -> dict[str, Any]:
    """Bytes of one GPU by the textbook formulas.

    Parameters
    ----------
    shape
        The model and the groups; degrees and lengths at least 1.

    Returns
    -------
    dict
        Of 16-bit elements: `states_bytes` and `data_parallel_bytes` by ZeRO stage where `params` is given,
        and `hybrid_sharded` inside and between shard groups where there are some;
        `tensor_parallel`, `expert_parallel` and `pipeline_boundary_bytes` where `hidden` is, and
        `activation_bytes` where `heads` is too.

    Raises
    ------
    InputError
        For sizes out of range.
    """
    for name, size in asdict(shape).items():
        if size < (0 if name in ("params", "hidden", "heads") else 1):
            raise InputError("is too small", where=f"--{name.replace('_', '-')}", value=size)
    document: dict[str, Any] = {"shape": asdict(shape)}
    if shape.params:
        document |= _of_parameters(shape)
    if shape.hidden:
        document |= _of_tokens(shape)
    return document


def _of_parameters(shape: TransformerShape) -> dict[str, Any]:
    """States, and what data parallelism moves in 16 bits, by ZeRO stage."""
    states = {
        stage: float(adam_state_bytes(shape.params, stage, shape.dp, shape.gradient_bytes))
        for stage in _STAGES
    }
    sent = {stage: 2.0 * float(data_parallel_elements(shape.params, stage)) for stage in _STAGES}
    document: dict[str, Any] = {
        "states_bytes": {f"zero_{stage}": size for stage, size in states.items()},
        "data_parallel_bytes": {f"zero_{stage}": size for stage, size in sent.items()},
    }
    if shape.shard_group > 1:
        inside, between = hybrid_sharded_elements(shape.params, shape.shard_group)
        hybrid = {"inside_bytes": 2.0 * float(inside), "between_bytes": 2.0 * float(between)}
        document["hybrid_sharded"] = hybrid
    return document


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
        kept = unfused_activation_bytes(tokens, shape.seq_len, hidden, shape.heads, shape.layers)
        document["activation_bytes"] = float(kept)
    return document
