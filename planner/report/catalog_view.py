"""What the catalogs hold, and what was read of one model: plain data, and renderables of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.cluster_specs.catalog import cluster_names, device_names, load_cluster, load_device
from meshwright.model_specs.catalog import catalog_names, load_catalog_model
from meshwright.model_specs.parameters import (
    active_parameter_count,
    flops_per_token,
    parameter_count,
)
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.report.parts import (
    Renderable,
    amount,
    count,
    counted,
    facts,
    grid,
    heading,
    line,
)

CATALOGS = ("models", "clusters", "devices")


def model_document(model: ModelSpec, seq_len: int) -> dict[str, Any]:
    """What was read of a model: its fields, its parameters, and the FLOP of training it on one token."""
    return {
        **model.model_dump(mode="json", exclude_none=True),
        "head_dim": model.qk_head_dim,
        "parameters": parameter_count(model),
        "active_parameters": active_parameter_count(model),
        "seq_len": seq_len,
        "flops_per_token": flops_per_token(model, seq_len),
    }


def model_view(model: ModelSpec, seq_len: int) -> list[Renderable]:
    """The same, for people."""
    data = model_document(model, seq_len)
    attention = f"{model.heads} heads of {model.qk_head_dim}, {model.kv_heads} key-value heads"
    if model.attention is not None:
        ranks = f"query {model.attention.q_lora_rank or 'none'}, key-value {model.attention.kv_lora_rank}"
        attention = f"{model.heads} heads, multi-head latent attention (ranks: {ranks})"
    rows = [
        ("model", model.name),
        (
            "layers",
            str(model.layers) + (f", {model.dense_layers} of them dense" if model.moe else ""),
        ),
        ("hidden width", count(model.hidden)),
        ("attention", attention),
        *_feed_forward(model),
        ("vocabulary", count(model.vocab) + (", tied embeddings" if model.tied_embeddings else "")),
        ("positions", model.position),
        (
            "multi-token prediction",
            counted(model.mtp_layers, "module") if model.mtp_layers else "none",
        ),
        ("parameters", _parameters(data["parameters"])),
        ("active parameters", _parameters(data["active_parameters"])),
        (
            "FLOP per token",
            f"{data['flops_per_token'] / 1e9:,.2f} GFLOP, both passes, at {count(seq_len)} tokens",
        ),
    ]
    if model.sliding_window is not None:
        windowed = f"{count(model.sliding_window)} positions in {model.windowed_layers} layers"
        rows.insert(4, ("sliding window", windowed))
    return [facts(rows), *([line(("source: ", "dim"), model.source)] if model.source else [])]


def _parameters(number: int) -> str:
    return f"{count(number)} ({amount(number)})"


def _feed_forward(model: ModelSpec) -> list[tuple[str, str]]:
    rows = []
    if model.dense_layers:
        rows.append(("feed-forward width", f"{count(model.ffn_hidden)}, {model.activation}"))
    moe = model.moe
    if moe is not None:
        shared = f", {moe.shared_experts} shared" if moe.shared_experts else ""
        width = f"of width {count(moe.moe_ffn_hidden)}"
        rows.append(
            ("experts", f"{moe.experts} {width}, {moe.top_k} per token{shared}, {model.activation}")
        )
    return rows


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
        "levels": [
            level.model_dump(include={"name", "gpus", "oversubscription", "rails", "joined"})
            for level in cluster.levels
        ],
    }


def _device_row(name: str) -> dict[str, Any]:
    device = load_device(name)
    fields = (
        "architecture",
        "hbm_gib",
        "hbm_gb_per_s",
        "peak_bf16_tflops",
        "peak_fp8_tflops",
        "peak_fp4_tflops",
        "scale_up_gb_per_s",
    )
    return {"name": name, **{field: getattr(device, field) for field in fields}}


def catalog_view(kind: str) -> list[Renderable]:
    """A catalog as a table."""
    rows = catalog_rows(kind)
    if kind == "models":
        return [_models_table(rows)]
    if kind == "clusters":
        words = line("Any size: a kind of node; say how many GPUs with --gpus.")
        return [_clusters_table(rows), line(""), words, *_levels(rows)]
    return [_devices_table(rows)]


def _models_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    return grid(
        ["model", "parameters", "active", "layers", "hidden", "experts"],
        [
            [
                row["name"],
                amount(row["parameters"]),
                amount(row["active_parameters"]),
                str(row["layers"]),
                count(row["hidden"]),
                str(row["experts"] or "-"),
            ]
            for row in rows
        ],
    )


def _clusters_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    return grid(
        ["cluster", "device", "GPUs", "a node", "NVLink", "Gb/s a GPU"],
        [
            [
                row["name"],
                row["device"],
                "any size" if row["elastic"] else count(row["gpus"]),
                str(row["gpus_per_node"]),
                str(row["nvlink_domain"]),
                f"{row['nic_gbps_per_gpu']:g}",
            ]
            for row in rows
        ],
        left=(0, 1),
    )


def _levels(rows: Sequence[Mapping[str, Any]]) -> list[Renderable]:
    """The levels above the node, inside out, where they are more than one non-blocking one."""
    shown = []
    for row in rows:
        levels = [
            f"{level['name']} of {count(level['gpus'])}"
            + (f" (1:{level['oversubscription']:g})" if level["oversubscription"] > 1 else "")
            + (f" on {level['rails']} rails" if level["rails"] > 1 else "")
            + (", joined directly" if level["joined"] == "direct" else "")
            for level in row["levels"]
        ]
        if levels:
            shown.append((row["name"], ", ".join(levels)))
    title = heading("Levels above the node, in GPUs, and their oversubscription where there is any")
    return [title, facts(shown)] if shown else []


def _devices_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    numbers = (
        "hbm_gib",
        "hbm_gb_per_s",
        "peak_bf16_tflops",
        "peak_fp8_tflops",
        "peak_fp4_tflops",
        "scale_up_gb_per_s",
    )
    return grid(
        ["device", "HBM GiB", "HBM GB/s", "bf16 TFLOP/s", "fp8", "fp4", "NVLink GB/s"],
        [
            [row["name"], *("-" if row[name] is None else f"{row[name]:g}" for name in numbers)]
            for row in rows
        ],
    )
