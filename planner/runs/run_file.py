"""Reads run files (`estimate`, `validate`): fully given configurations, with or without a measured step."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from meshwright.cluster_specs.reader import cluster_from_mapping, read_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.constants.calibration import Calibration
from meshwright.costmodel.constants.stacks import stack_constants
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.workload import Overlap, Workload
from meshwright.documents.reader import parse_mapping, read_text
from meshwright.documents.validation import validation_message
from meshwright.errors import InputError, shown
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.model_specs.catalog import with_twin_facts
from meshwright.model_specs.reader import model_from_mapping, read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.runs.context_groups import check_context_groups
from meshwright.planner.runs.launches.adapters import fields_of, refuse_adapters
from meshwright.planner.runs.offloaded import check_offload, offloaded_set
from meshwright.planner.runs.run_schema import MeasuredDoc, RunDoc, SettingsDoc
from meshwright.planner.runs.run_settings import (
    Stages,
    check_fp8_attention,
    gpus_and_dp,
    places_on_hosts,
    run_layout,
    software_profile,
    stages_of,
    with_expert_tensor_degree,
    with_whole_domains,
)
from meshwright.planner.runs.run_terms import (
    GRADIENT_BYTES,
    attention_kernel_kind,
    cp_comm_kind,
    cuda_graph_kind,
    gradient_bytes_of,
    moe_dispatch_kind,
    recipe_switch,
)

MAX_FILE_BYTES = 16 * 2**20
MAX_RUNS = 20_000
_SAME_IN_WORKLOAD = (
    "global_batch", "seq_len", "precision", "optimizer", "launch_blocking", "fp8_recipe", "expert_imbalance",
    "reserve_gib",
)  # fmt: skip
"""Settings that a workload holds under the same name and meaning."""
SLIP = 0.9
"""An unknown key this similar to a known one is taken for a slip of the pen (difflib ratio)."""


FIRST_RANK = "rank 0"
"""A note on measured memory that says so is of the first pipeline rank, not of the fullest one."""
DRIVER = "nvidia-smi"
"""A note on measured memory that says so was read from the driver."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a source measured: seconds of one optimizer step, peak memory of one GPU in GiB, or neither."""

    step_time_s: float | None
    memory_gib: float | None = None
    out_of_memory: bool = False
    """Whether the run ended out of memory; there is neither step nor peak then."""
    first_rank: bool = False
    """Whether memory is the first pipeline rank's, not the fullest one's."""
    from_driver: bool = False
    """Whether memory is what the driver shows (`nvidia-smi`), not what the allocator handed out."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One fully given configuration."""

    id: str
    source: str
    workload: Workload
    layout: Layout
    """Plain integers."""
    stages: Stages | None
    """Layers of each [pipeline rank][virtual stage]; None where the layers divide evenly."""
    rank_order: tuple[str, ...] = ("tp", "cp", "dp", "pp")
    """Axes as ranks run through them, innermost first."""
    ranks: tuple[tuple[int, int], ...] = ()
    """(node, local GPU) of every rank; empty where ranks are nested in the blocks of the cluster."""
    measured: Measured | None = None
    tags: tuple[str, ...] = ()
    suspect: str | None = None
    """Why the source's row looks odd beside its neighbours."""
    remarks: tuple[str, ...] = ()
    """Where the row says something that the cost model only approximates or leaves out."""
    unread: tuple[str, ...] = ()
    """Settings of a published row that this version does not know."""
    framework_words: str = ""
    """What the file calls the framework."""


@dataclass(frozen=True, kw_only=True)
class UnreadRow:
    """A row that could not be read, and why; `measured` where at least that part could."""

    id: str
    reason: str
    measured: Measured | None = None


def read_runs(path: Path, calibration: Calibration | None = None) -> tuple[Run, ...]:
    """All runs of a file: a single run, or a list under `runs:`. Raises InputError at the first bad row.

    A calibration prices them, and its name may stand for their framework.
    """
    runs = []
    for row in read_rows(path, calibration):
        if isinstance(row, UnreadRow):
            raise InputError(row.reason)
        runs.append(row)
    return tuple(runs)


def read_rows(path: Path, calibration: Calibration | None = None) -> Iterator[Run | UnreadRow]:
    """Yields the rows of a file one by one; a bad row does not keep the others from being read.

    Raises InputError when the file itself cannot be used.
    """
    for name, row in _named_rows(path):
        try:
            yield run_from_mapping(
                row,
                where=f"{path}: {name}",
                base=path.parent,
                default_id=path.stem,
                calibration=calibration,
            )
        except InputError as error:
            yield UnreadRow(id=name, reason=str(error), measured=_measured_if_valid(row))


def run_from_mapping(
    row: object,
    *,
    where: str,
    base: Path | None = None,
    default_id: str = "run",
    calibration: Calibration | None = None,
) -> Run:
    """One run from the mapping of a run file.

    `where` opens every message; model and cluster files are looked for beside `base` too. Published rows
    (those with `measured`) may carry descriptive keys that this version does not know: they become
    remarks. Everywhere else an unknown key is an error. Raises InputError.
    """
    refuse_adapters(_of_the_run(row), where)
    cleaned, unread = _without_unknown_words(_without_nulls(row))
    remarks = [f"{name} is not known to this version, and not used" for name in unread]
    try:
        doc = RunDoc.model_validate(cleaned)
        run = _run(doc, remarks, base, default_id, calibration)
        return replace(run, unread=tuple(name for name in unread if name.startswith("run.")))
    except ValidationError as error:
        raise InputError(validation_message(error, where, RunDoc)) from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _run(
    doc: RunDoc,
    remarks: list[str],
    base: Path | None,
    default_id: str,
    calibration: Calibration | None,
) -> Run:
    model, cluster = _model(doc, base), _cluster(doc, base)
    published = doc.measured is not None
    profile, profile_remarks = software_profile(
        doc.run, published=published, calibration=calibration
    )
    settings = with_expert_tensor_degree(doc.run, model, framework_of_stack(profile))
    gpus, dp = gpus_and_dp(settings, cluster)
    layout, layout_remarks = run_layout(settings, model, dp, published=published)
    stages, stage_remarks = stages_of(settings, model)
    cluster = with_whole_domains(cluster, gpus)
    recipe_dispatch = moe_dispatch_kind(settings.recipe)
    kernel_words = settings.recipe.get("attention_kernel", "")
    gradient_words = settings.gradient_dtype or settings.recipe.get("gradient_sync", "")
    workload = Workload(
        **{name: getattr(settings, name) for name in _SAME_IN_WORKLOAD},
        model=model,
        cluster=cluster,
        gpus=gpus,
        framework=profile,
        overlap=Overlap(**settings.overlap.model_dump()),
        cuda_graph=settings.cuda_graph or cuda_graph_kind(settings.recipe),
        cp_comm=cp_comm_kind(settings.cp_comm),
        cp_inner=settings.cp_inner,
        moe_dispatch=settings.moe_dispatch or recipe_dispatch,
        attention_kernel=settings.attention_kernel or attention_kernel_kind(kernel_words),
        gradient_bytes=gradient_bytes_of(gradient_words),
        fp8_attention=_switch(settings.fp8_attention, settings.recipe, "fp8_attention") is True,
        moment_bytes=GRADIENT_BYTES[settings.moment_dtype],
        fused_norm=recipe_switch(settings.recipe, "fused_rmsnorm"),
        fp8_parameters=_switch(settings.fp8_params, settings.recipe, "fp8_param_gather"),
        fused_loss=settings.fused_loss,
        offload_modules=offloaded_set(settings.offload_modules),
        offload_parameters=settings.parameter_offload,
        keeps_gathered_inputs=settings.keeps_gathered_inputs
        or recipe_switch(settings.recipe, "tp_recompute_allgather") is False,
        flushes=settings.flushes,
        calibration=calibration,
    )
    if settings.bucket_parameters is not None:
        bucket_mb = stack_constants(workload).gradients_mb(settings.bucket_parameters)
        workload = replace(workload, bucket_mb=bucket_mb)
    check_fp8_attention(settings, cluster)
    check_context_groups(workload, layout)
    check_offload(workload, layout)
    return Run(
        id=doc.id or default_id,
        source=doc.source,
        workload=workload,
        layout=layout,
        stages=stages,
        rank_order=tuple(settings.rank_order.split("-")),
        ranks=() if settings.hosts is None else places_on_hosts(cluster, settings.hosts, gpus),
        measured=_measured(doc.measured, workload),
        tags=tuple(doc.tags),
        suspect=doc.suspect,
        remarks=(*remarks, *layout_remarks, *stage_remarks, *profile_remarks, *_plain_remarks(doc)),
        framework_words=settings.framework,
    )


def _switch(stated: bool | None, recipe: dict[str, Any], name: str) -> bool | None:
    """What a run says of a switch, or the flags of its recipe; None where neither says."""
    return recipe_switch(recipe, name) if stated is None else stated


def _named_rows(path: Path) -> list[tuple[str, object]]:
    """The rows of a file with the names that messages call them by."""
    try:
        document = parse_mapping(read_text(path, MAX_FILE_BYTES), str(path))
    except InputError as error:
        raise InputError(str(error)) from error
    if "runs" not in document:
        return [(_row_name(document, path.stem), document)]
    unknown = [key for key in document if key not in ("runs", "schema")]
    if unknown:
        raise InputError(
            "unknown field beside runs", where=f"{path}: {unknown[0]}", allowed=("schema", "runs")
        )
    if document.get("schema", 1) != 1:
        raise InputError("must be 1", where=f"{path}: schema", value=document["schema"])
    rows = document["runs"]
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_RUNS:
        raise InputError(
            f"must be a list of 1 to {MAX_RUNS} runs", where=f"{path}: runs", value=rows
        )
    return [(_row_name(row, f"runs[{index}]"), row) for index, row in enumerate(rows)]


def _row_name(row: object, otherwise: str) -> str:
    name = row.get("id") if isinstance(row, dict) else None
    return name[:300] if isinstance(name, str) else otherwise


def _without_nulls(row: object) -> object:
    """`null` is how sources write 'not stated': the same as leaving the key out."""
    if not isinstance(row, dict):
        return row
    stated = {key: value for key, value in row.items() if value is not None}
    settings = stated.get("run")
    if isinstance(settings, dict):
        stated["run"] = {key: value for key, value in settings.items() if value is not None}
    return stated


def _without_unknown_words(row: object) -> tuple[object, list[str]]:
    """A published row without the keys that this version does not know, and these, unless they look like a
    slip.
    """
    if not isinstance(row, dict) or "measured" not in row or not isinstance(row.get("run"), dict):
        return row, []
    cleaned, dropped = _readable_part(row, RunDoc, "")
    cleaned["run"], of_run = _readable_part(cleaned["run"], SettingsDoc, "run.")
    return cleaned, dropped + of_run


def _of_the_run(row: object) -> Iterator[tuple[str, str]]:
    """What a row says of its run, the model and the measurements left out."""
    if isinstance(row, dict):
        yield from fields_of(
            {key: value for key, value in row.items() if key in ("kind", "run", "train")}
        )


def _readable_part(
    section: dict[str, Any], schema: type[BaseModel], place: str
) -> tuple[dict[str, Any], list[str]]:
    """The keys of a section that a schema has or that look like a slip of one, and names of the rest."""
    names = [field.alias or name for name, field in schema.model_fields.items()]
    dropped = [
        key for key in section if not difflib.get_close_matches(str(key), names, n=1, cutoff=SLIP)
    ]
    kept = {key: value for key, value in section.items() if key not in dropped}
    return kept, [f"{place}{shown(key)}" for key in dropped]


def _model(doc: RunDoc, base: Path | None) -> ModelSpec:
    if isinstance(doc.model, ModelSpec):
        return doc.model
    if isinstance(doc.model, str):
        return read_model(_beside(doc.model, base))
    return with_twin_facts(_with_sinks(model_from_mapping(doc.model, "model")))


def _with_sinks(model: ModelSpec) -> ModelSpec:
    """A row that notes attention sinks is a gpt-oss model, whose experts carry biases (arXiv 2508.10925)."""
    if model.moe is None or model.attention_sinks or "sinks" not in (model.attention_note or ""):
        return model
    moe = model.moe.model_copy(update={"expert_bias": True, "router_bias": True})
    return model.model_copy(update={"attention_sinks": True, "moe": moe})


def _cluster(doc: RunDoc, base: Path | None) -> ClusterSpec:
    if isinstance(doc.cluster, ClusterSpec):
        return doc.cluster
    if isinstance(doc.cluster, str):
        return read_cluster(_beside(doc.cluster, base))
    return cluster_from_mapping(doc.cluster, "cluster")


def _beside(name: str, base: Path | None) -> str:
    """A file next to the run file, when there is one of that name; otherwise the name as it is."""
    beside = (base or Path()) / name
    try:
        return str(beside) if beside.is_file() else name
    except (OSError, ValueError):  # for instance longer than a file name may be
        return name


def _measured(doc: MeasuredDoc | None, workload: Workload) -> Measured | None:
    if doc is None:
        return None
    step_time_s = doc.step_time_s
    if step_time_s is None and doc.tokens_per_s_per_gpu is not None:
        tokens = workload.global_batch * workload.seq_len
        step_time_s = tokens / (doc.tokens_per_s_per_gpu * workload.gpus)
    measured = _measurement(doc, step_time_s)
    figures = step_time_s is not None or doc.memory_gib is not None
    if doc.out_of_memory and figures:
        raise InputError("measured: out_of_memory goes with neither a step time nor memory")
    if not doc.out_of_memory and not figures:
        raise InputError(
            "measured: needs step_time_s, tokens_per_s_per_gpu, memory_gib or out_of_memory"
        )
    return measured


def _measurement(doc: MeasuredDoc, step_time_s: float | None) -> Measured:
    return Measured(
        step_time_s=step_time_s,
        memory_gib=doc.memory_gib,
        out_of_memory=doc.out_of_memory,
        first_rank=FIRST_RANK in (doc.memory_note or ""),
        from_driver=DRIVER in (doc.memory_note or ""),
    )


def _measured_if_valid(row: object) -> Measured | None:
    """What was measured of a row that is wrong elsewhere, so that it still counts as failed."""
    if not isinstance(row, dict):
        return None
    try:
        doc = MeasuredDoc.model_validate(row.get("measured"))
    except ValidationError:
        return None
    return _measurement(doc, doc.step_time_s)


def _plain_remarks(doc: RunDoc) -> list[str]:
    """Words of the row that bear on the measurement and that the cost model does not read."""
    remarks = []
    routing = doc.run.moe_routing
    if routing is not None and "balanced" not in routing:
        remarks.append(f"moe_routing {routing}: priced as balanced with dropless experts")
    if doc.measured is not None and doc.measured.memory_note is not None:
        remarks.append(f"memory {doc.measured.memory_note}")
    return remarks
