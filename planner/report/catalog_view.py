"""What the catalogs hold, and what was read of one model: plain data, and views of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from meshwright.cluster_specs.reader import cluster_names, device_names, load_cluster, load_device
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import check_choice
from meshwright.model_specs.adapters import stored_weights_note
from meshwright.model_specs.blocks import BLOCK_NAMES, repeated_part, runs
from meshwright.model_specs.parameters import (
    active_parameter_count,
    encoder_parameters,
    flops_per_token,
    parameter_count,
)
from meshwright.model_specs.reader import catalog_names, load_catalog_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.drawing import amount, count, counted
from meshwright.planner.many.jobs import JobsDoc
from meshwright.planner.many.sharing import FleetJobDoc
from meshwright.planner.plan.document import Plan
from meshwright.planner.report.view import (
    COUNT,
    NUMBER,
    PLAIN,
    Column,
    Columns,
    Facts,
    Heading,
    Kind,
    View,
    Words,
    line,
    table,
)
from meshwright.planner.runs.run_schema import RunDoc

# JSON Schemas of the files that people write.


SCHEMA_KINDS = ("model", "cluster", "run", "jobs", "plan")


def json_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a kind of file. Raises InputError for a kind that there is not.

    Parameters
    ----------
    kind
        Any of `SCHEMA_KINDS`.
    """
    check_choice(kind, SCHEMA_KINDS, "schema", "not a kind of file")
    documents: dict[str, type[BaseModel]] = {
        "model": ModelSpec,
        "cluster": ClusterSpec,
        "run": RunDoc,
        "plan": Plan,
        "jobs": JobsDoc,
    }
    schema = documents[kind].model_json_schema(by_alias=True)
    if kind == "jobs":
        # Jobs are read one by one, so that a bad one stops no other: here they are spelt out.
        job = FleetJobDoc.model_json_schema(by_alias=True, ref_template="#/$defs/{model}")
        schema.setdefault("$defs", {}).update(job.pop("$defs", {}))
        schema["$defs"]["job"] = job
        schema["properties"]["jobs"]["items"] = {"$ref": "#/$defs/job"}
    if kind == "cluster":
        # A cluster file may name its device or start from a catalog entry, which fills in the rest.
        properties = schema["properties"]
        device = properties["device"]
        properties["device"] = {
            "anyOf": [device, {"type": "string", "description": "A name of `catalog devices`."}]
        }
        properties["base"] = {
            "type": "string",
            "description": "A name of `catalog clusters` to start from.",
        }
        schema.pop("required", None)
        schema["anyOf"] = [{"required": ["device"]}, {"required": ["base"]}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


Row = Mapping[str, Any]
Pairs = list[tuple[str, str]]
CATALOGS = ("models", "clusters", "devices")
_AMOUNT = Kind(amount)
_MODEL_COLUMNS: Columns = {
    "name": "model",
    "parameters": Column("parameters", _AMOUNT),
    "active_parameters": Column("active", _AMOUNT),
    "layers": Column("layers", NUMBER),
    "hidden": Column("hidden", COUNT),
    "experts": Column("experts", NUMBER),
}
_CLUSTER_COLUMNS: Columns = {
    "name": "cluster",
    "device": "device",
    "gpus": Column("GPUs", COUNT),
    "gpus_per_node": Column("a node", NUMBER),
    "nvlink_domain": Column("NVLink", NUMBER),
    "nic_gbps_per_gpu": Column("Gb/s a GPU", PLAIN),
}
_DEVICE_COLUMNS: Columns = {
    "name": "device",
    "hbm_gib": Column("HBM", PLAIN, unit="GiB"),
    "hbm_gb_per_s": Column("HBM", PLAIN, unit="GB/s"),
    "peak_bf16_tflops": Column("bf16", PLAIN, unit="TFLOP/s"),
    "peak_fp8_tflops": Column("fp8", PLAIN),
    "peak_fp4_tflops": Column("fp4", PLAIN),
    "scale_up_gb_per_s": Column("NVLink", PLAIN, unit="GB/s"),
}
_LONGEST_ORDER = 400
_LEVEL_FIELDS = {"name", "gpus", "oversubscription", "rails", "joined"}


def model_document(model: ModelSpec, seq_len: int) -> dict[str, Any]:
    """What was read of a model: its fields, its parameters, and the FLOP of training it on one token.

    Parameters
    ----------
    model
        The model.
    seq_len
        Tokens of the sequence that the FLOP are counted in.
    """
    vision = model.vision
    return {
        **model.model_dump(mode="json", exclude_none=True),
        **({} if vision is None else {"encoder_parameters": encoder_parameters(vision)}),
        "layer_kinds": list(model.layer_kinds),
        "head_dim": model.qk_head_dim,
        "parameters": parameter_count(model),
        "active_parameters": active_parameter_count(model),
        "seq_len": seq_len,
        "flops_per_token": flops_per_token(model, seq_len),
    }


def model_view(model: ModelSpec, seq_len: int) -> View:
    """What was read of a model as facts, with notes on what was not read.

    Parameters
    ----------
    model
        The model.
    seq_len
        Tokens of the sequence that the FLOP are counted in.
    """
    document = model_document(model, seq_len)
    embeddings = ", tied embeddings" if model.tied_embeddings else ""
    prediction = counted(model.mtp_layers, "module") if model.mtp_layers else "none"
    gflop = f"{document['flops_per_token'] / 1e9:,.2f} GFLOP"
    parameters, active = (
        f"{count(number)} ({amount(number)})"
        for number in (document["parameters"], document["active_parameters"])
    )
    rows = [
        ("model", model.name),
        *_layers(model),
        ("hidden width", count(model.hidden)),
        *_blocks(model),
        ("vocabulary", f"{count(model.vocab)}{embeddings}"),
        ("positions", model.position),
        ("multi-token prediction", prediction),
        *_encoder(model),
        ("parameters", parameters),
        ("active parameters", active),
        ("FLOP per token", f"{gflop}, both passes, at {count(seq_len)} tokens"),
    ]
    notes = {
        "note: ": model.attention_note,
        "weights: ": None if model.stored_as is None else stored_weights_note(model.stored_as),
        "not read: ": ", ".join(model.left_out),
        "source: ": model.source,
    }
    return [Facts(rows), *(line(Words(name, "dim"), text) for name, text in notes.items() if text)]


def _encoder(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """The image encoder in front of the language model, which the other rows leave out."""
    vision = model.vision
    if vision is None:
        return
    number = encoder_parameters(vision)
    widths = f"width {count(vision.hidden)}, feed-forward {count(vision.ffn_hidden)}"
    heads = f"{vision.heads} heads, patches of {vision.patch_size}"
    yield "image encoder", f"{vision.kind}, {counted(vision.layers, 'layer')}, {widths}, {heads}"
    together = count(number + parameter_count(model))
    yield "encoder parameters", f"{count(number)} ({amount(number)}); {together} with the model's"


def _layers(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """How many layers, and unlike ones in their order; a part that is repeated, once."""
    kinds, pattern = model.layer_kinds, model.hybrid_pattern
    words = str(model.layers)
    if pattern is not None:
        counts = {name: pattern.count(symbol) for symbol, name in BLOCK_NAMES.items()}
        blocks = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        words += f", one block each: {blocks}"
    elif model.moe is not None:
        words += f", {model.layers - len(model.expert_layers)} of them dense"
    yield "layers", words
    if len(set(kinds)) > 1 and pattern is None:
        part = repeated_part(kinds)
        order = ", then ".join(f"{number} of {kind}" for kind, number in runs(kinds[:part]))
        if model.linear_attention is not None:
            order = order.replace("linear attention", model.linear_attention.title)
        if len(order) > _LONGEST_ORDER:
            order = f"{order[:_LONGEST_ORDER]} ... (--json has all)"
        times = len(kinds) // part
        yield "in their order", order + (f", {times} times over" if times > 1 else "")


def _blocks(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """What layers are made of: attention of every kind, feed-forward blocks, experts."""
    yield "attention", _attention(model)
    if model.sliding_window is not None:
        title = "attention chunks" if model.chunked_windows else "sliding window"
        positions = f"{count(model.sliding_window)} positions"
        yield title, f"{positions} in {model.windowed_layers} layers"
    linear, mamba, moe = model.linear_attention, model.mamba, model.moe
    if linear is not None:
        heads = f"{linear.value_heads} heads of {linear.value_head_dim}, {linear.key_heads} of keys"
        if linear.type == "short_conv":
            heads = f"{linear.conv_kernel} positions of {count(linear.value_width)} channels"
        yield linear.title, f"{heads}, in {model.linear_layers} layers"
    if model.mamba1 is not None:
        states = f"{model.mamba1.channels} channels, states of {model.mamba1.state_dim}"
        yield "Mamba-1", f"{states}, by the pattern"
    elif mamba is not None:
        heads = f"{mamba.heads} heads of {mamba.head_dim}, states of {mamba.state_dim}"
        where = "beside attention" if model.mamba_beside_attention else "by the pattern"
        yield "Mamba-2", f"{heads}, {counted(mamba.groups, 'group')}, {where}"
    if model.has_dense_feed_forward:
        widths = count(model.ffn_hidden)
        if model.reusing_ffn_hidden is not None:
            widths = f"{widths}, {count(model.reusing_ffn_hidden)} in reusing layers"
        yield "feed-forward width", f"{widths}, {model.activation}"
    if model.layer_inputs is not None:
        yield (
            "layer inputs",
            f"{count(model.layer_inputs)} elements of a token table for each layer",
        )
    if moe is not None:
        shared = f", {moe.shared_experts} shared" if moe.shared_experts else ""
        size = f"{moe.experts} of width {count(moe.moe_ffn_hidden)}"
        if moe.latent_size is not None:
            size = f"{size} on a projection to {count(moe.latent_size)}"
        yield "experts", f"{size}, {moe.top_k} per token{shared}, {model.activation}"


def _attention(model: ModelSpec) -> str:
    if not model.blocks.attention:
        return "none"
    gated = " with a gate each" if model.attention_head_gates else ""
    if model.attention is None:
        words = (
            f"{model.heads} heads of {model.qk_head_dim}{gated}, {model.kv_heads} key-value heads"
        )
        if model.value_head_dim is not None:
            words += f", values of {model.v_head_dim}"
        if model.values_are_keys:
            words += " whose keys are the values"
        if model.window_heads is None:
            return words
        windowed = model.in_windows
        width = f"{windowed.heads} of {windowed.qk_head_dim}"
        if windowed.heads == model.heads:
            width = f"of {windowed.qk_head_dim}"
        sinks = ", with sinks" if windowed.attention_sinks > model.attention_sinks else ""
        return f"{words}; under the window {width}, {windowed.kv_heads} key-value heads{sinks}"
    query = model.attention.q_lora_rank or "none"
    ranks = f"query {query}, key-value {model.attention.kv_lora_rank}"
    words = f"{model.heads} heads{gated}, multi-head latent attention (ranks: {ranks})"
    if model.indexer is None:
        return words
    words = f"{words}, {count(model.indexer.top_k)} positions by an indexer"
    return f"{words} in {model.indexing_layers} layers" if model.kinds_apart else words


def catalog_rows(kind: str) -> list[dict[str, Any]]:
    """One mapping per entry of `models`, `clusters` or `devices`.

    Parameters
    ----------
    kind
        Any of `CATALOGS`.
    """
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
    """A catalog as a table.

    Parameters
    ----------
    kind
        Any of `CATALOGS`.
    """
    rows = catalog_rows(kind)
    if kind == "models":
        return [table(rows, _MODEL_COLUMNS)]
    if kind == "devices":
        return [table(rows, _DEVICE_COLUMNS)]
    sized = [{**row, "gpus": "any size" if row["elastic"] else row["gpus"]} for row in rows]
    words = line("Any size: a kind of node; say how many GPUs with --gpus.")
    levels = [(row["name"], ", ".join(map(_level, row["levels"]))) for row in rows]
    title = "Levels above the node, in GPUs, and their oversubscription where there is any"
    return [table(sized, _CLUSTER_COLUMNS), line(), words, Heading(title), Facts(levels)]


def _level(level: Row) -> str:
    words = f"{level['name']} of {count(level['gpus'])}"
    if level["oversubscription"] > 1:
        words += f" (1:{level['oversubscription']:g})"
    if level["rails"] > 1:
        words += f" on {level['rails']} rails"
    if level["joined"] == "direct":
        words += ", joined directly"
    return words
