"""What the catalogs hold, and what was read of one model: plain data, and views of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.cluster_specs.reader import cluster_names, device_names, load_cluster, load_device
from meshwright.model_specs.blocks import BLOCK_NAMES, repeated_part, runs
from meshwright.model_specs.parameters import (
    active_parameter_count,
    flops_per_token,
    parameter_count,
)
from meshwright.model_specs.reader import catalog_names, load_catalog_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.drawing import amount, count, counted
from meshwright.planner.report.view import (
    COUNT,
    NUMBER,
    Column,
    Facts,
    Heading,
    Kind,
    Table,
    View,
    Words,
    line,
)

Row = Mapping[str, Any]
Pairs = list[tuple[str, str]]
CATALOGS = ("models", "clusters", "devices")
_AMOUNT = Kind(amount)
_PLAIN = Kind(lambda value: f"{value:g}")
_MODEL_COLUMNS = {
    "name": Column("model"),
    "parameters": Column("parameters", _AMOUNT),
    "active_parameters": Column("active", _AMOUNT),
    "layers": Column("layers", NUMBER),
    "hidden": Column("hidden", COUNT),
    "experts": Column("experts", NUMBER),
}
_CLUSTER_COLUMNS = {
    "name": Column("cluster"),
    "device": Column("device"),
    "gpus": Column("GPUs", COUNT),
    "gpus_per_node": Column("a node", NUMBER),
    "nvlink_domain": Column("NVLink", NUMBER),
    "nic_gbps_per_gpu": Column("Gb/s a GPU", _PLAIN),
}
_DEVICE_COLUMNS = {
    "name": Column("device"),
    "hbm_gib": Column("HBM", _PLAIN, unit="GiB"),
    "hbm_gb_per_s": Column("HBM", _PLAIN, unit="GB/s"),
    "peak_bf16_tflops": Column("bf16", _PLAIN, unit="TFLOP/s"),
    "peak_fp8_tflops": Column("fp8", _PLAIN),
    "peak_fp4_tflops": Column("fp4", _PLAIN),
    "scale_up_gb_per_s": Column("NVLink", _PLAIN, unit="GB/s"),
}
_LONGEST_ORDER = 400
_LEVEL_FIELDS = {"name", "gpus", "oversubscription", "rails", "joined"}


def model_document(model: ModelSpec, seq_len: int) -> dict[str, Any]:
    """What was read of a model: its fields, its parameters, and the FLOP of training it on one token."""
    return {
        **model.model_dump(mode="json", exclude_none=True),
        "layer_kinds": list(model.layer_kinds),
        "head_dim": model.qk_head_dim,
        "parameters": parameter_count(model),
        "active_parameters": active_parameter_count(model),
        "seq_len": seq_len,
        "flops_per_token": flops_per_token(model, seq_len),
    }


def model_view(model: ModelSpec, seq_len: int) -> View:
    """The same, for people."""
    document = model_document(model, seq_len)
    layers = str(model.layers)
    if model.hybrid_pattern is not None:
        layers += f", one block each: {_pattern(model.hybrid_pattern)}"
    elif model.moe is not None:
        layers += f", {model.layers - len(model.expert_layers)} of them dense"
    embeddings = ", tied embeddings" if model.tied_embeddings else ""
    prediction = counted(model.mtp_layers, "module") if model.mtp_layers else "none"
    gflop = f"{document['flops_per_token'] / 1e9:,.2f} GFLOP"
    rows = [
        ("model", model.name),
        ("layers", layers),
        *_order(model),
        ("hidden width", count(model.hidden)),
        ("attention", _attention(model)),
        *_window(model),
        *_linear_attention(model),
        *_mamba(model),
        *_feed_forward(model),
        ("vocabulary", f"{count(model.vocab)}{embeddings}"),
        ("positions", model.position),
        ("multi-token prediction", prediction),
        ("parameters", _parameters(document["parameters"])),
        ("active parameters", _parameters(document["active_parameters"])),
        ("FLOP per token", f"{gflop}, both passes, at {count(seq_len)} tokens"),
    ]
    view: View = [Facts(rows)]
    if model.attention_note:
        view.append(line(Words("note: ", "dim"), model.attention_note))
    if model.left_out:
        view.append(line(Words("not read: ", "dim"), ", ".join(model.left_out)))
    if model.source:
        view.append(line(Words("source: ", "dim"), model.source))
    return view


def _order(model: ModelSpec) -> Pairs:
    """Unlike layers in their order; a part that is repeated, once."""
    kinds = model.layer_kinds
    if len(set(kinds)) == 1 or model.hybrid_pattern is not None:
        return []
    part = repeated_part(kinds)
    words = ", then ".join(f"{number} of {kind}" for kind, number in runs(kinds[:part]))
    if len(words) > _LONGEST_ORDER:
        words = f"{words[:_LONGEST_ORDER]} ... (--json has all)"
    times = len(kinds) // part
    return [("in their order", words + (f", {times} times over" if times > 1 else ""))]


def _pattern(pattern: str) -> str:
    """How many layers of a hybrid pattern have each kind of block."""
    counts = ((name, pattern.count(symbol)) for symbol, name in BLOCK_NAMES.items())
    return ", ".join(f"{number} {name}" for name, number in counts if number)


def _mamba(model: ModelSpec) -> Pairs:
    if model.mamba1 is not None:
        channels, states = model.mamba1.channels, model.mamba1.state_dim
        return [("Mamba-1", f"{channels} channels, states of {states}, by the pattern")]
    mamba = model.mamba
    if mamba is None:
        return []
    heads = f"{mamba.heads} heads of {mamba.head_dim}, states of {mamba.state_dim}"
    where = "beside attention" if model.mamba_beside_attention else "by the pattern"
    return [("Mamba-2", f"{heads}, {counted(mamba.groups, 'group')}, {where}")]


def _attention(model: ModelSpec) -> str:
    if not model.blocks.attention:
        return "none"
    if model.attention is None:
        return f"{model.heads} heads of {model.qk_head_dim}, {model.kv_heads} key-value heads"
    query = model.attention.q_lora_rank or "none"
    ranks = f"query {query}, key-value {model.attention.kv_lora_rank}"
    words = f"{model.heads} heads, multi-head latent attention (ranks: {ranks})"
    if model.indexer is None:
        return words
    return f"{words}, {count(model.indexer.top_k)} positions by an indexer"


def _window(model: ModelSpec) -> Pairs:
    if model.sliding_window is None:
        return []
    positions = f"{count(model.sliding_window)} positions in {model.windowed_layers} layers"
    return [("attention chunks" if model.chunked_windows else "sliding window", positions)]


def _linear_attention(model: ModelSpec) -> Pairs:
    linear = model.linear_attention
    if linear is None:
        return []
    heads = f"{linear.value_heads} heads of {linear.value_head_dim}, {linear.key_heads} of keys"
    return [("linear attention", f"Gated DeltaNet, {heads}, in {model.linear_layers} layers")]


def _feed_forward(model: ModelSpec) -> Pairs:
    rows = []
    if model.has_dense_feed_forward:
        rows.append(("feed-forward width", f"{count(model.ffn_hidden)}, {model.activation}"))
    moe = model.moe
    if moe is not None:
        shared = f", {moe.shared_experts} shared" if moe.shared_experts else ""
        size = f"{moe.experts} of width {count(moe.moe_ffn_hidden)}"
        rows.append(("experts", f"{size}, {moe.top_k} per token{shared}, {model.activation}"))
    return rows


def _parameters(number: int) -> str:
    return f"{count(number)} ({amount(number)})"


def catalog_rows(kind: str) -> list[dict[str, Any]]:
    """One mapping per entry of `models`, `clusters` or `devices`."""
    if kind == "models":
        return [_model_row(name) for name in catalog_names()]
    if kind == "clusters":
        return [_cluster_row(name) for name in cluster_names()]
    return [_device_row(name) for name in device_names()]


def _model_row(name: str) -> dict[str, Any]:
    model = load_catalog_model(name)
    return {
        "name": name,
        "parameters": parameter_count(model),
        "active_parameters": active_parameter_count(model),
        "layers": model.layers,
        "hidden": model.hidden,
        "experts": model.moe.experts if model.moe is not None else None,
    }


def _cluster_row(name: str) -> dict[str, Any]:
    cluster = load_cluster(name)
    return {
        "name": name,
        "device": cluster.device.name,
        "gpus": cluster.gpus,
        "elastic": cluster.elastic,
        "gpus_per_node": cluster.gpus_per_node,
        "nvlink_domain": cluster.nvlink_domain,
        "nic_gbps_per_gpu": cluster.nic_gbps_per_gpu,
        "levels": [level.model_dump(include=_LEVEL_FIELDS) for level in cluster.levels],
    }


def _device_row(name: str) -> dict[str, Any]:
    device = load_device(name)
    fields = ("architecture", *(field for field in _DEVICE_COLUMNS if field != "name"))
    return {"name": name, **{field: getattr(device, field) for field in fields}}


def catalog_view(kind: str) -> View:
    """A catalog as a table."""
    rows = catalog_rows(kind)
    if kind == "models":
        return [_table(_MODEL_COLUMNS, rows)]
    if kind == "devices":
        return [_table(_DEVICE_COLUMNS, rows)]
    sized = [{**row, "gpus": "any size" if row["elastic"] else row["gpus"]} for row in rows]
    words = line("Any size: a kind of node; say how many GPUs with --gpus.")
    return [_table(_CLUSTER_COLUMNS, sized), line(), words, *_levels(rows)]


def _table(columns: Mapping[str, Column], rows: Sequence[Row]) -> Table:
    return Table(list(columns.values()), [[row[name] for name in columns] for row in rows])


def _levels(rows: Sequence[Row]) -> View:
    """The levels above the node, inside out, where they are more than one non-blocking one."""
    levels = [(row["name"], ", ".join(map(_level, row["levels"]))) for row in rows if row["levels"]]
    title = "Levels above the node, in GPUs, and their oversubscription where there is any"
    return [Heading(title), Facts(levels)] if levels else []


def _level(level: Row) -> str:
    words = f"{level['name']} of {count(level['gpus'])}"
    if level["oversubscription"] > 1:
        words += f" (1:{level['oversubscription']:g})"
    if level["rails"] > 1:
        words += f" on {level['rails']} rails"
    if level["joined"] == "direct":
        words += ", joined directly"
    return words
