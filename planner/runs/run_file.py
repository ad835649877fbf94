"""Reads run files (`estimate`, `validate`): fully given configurations, with or without a measured step."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.cluster_specs.reader import cluster_from_mapping, read_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import free_of
from meshwright.costmodel.calibration import Calibration
from meshwright.costmodel.execution_names import ParameterOffload
from meshwright.costmodel.layout import AXES, Layout
from meshwright.costmodel.losses import in_chunks
from meshwright.costmodel.schedules import schedule_name, schedule_named, traits
from meshwright.costmodel.stacks import UP_TO_FLASH_2, WITHOUT_FLASH, stack_constants
from meshwright.costmodel.workload import Workload, with_needed_syncs
from meshwright.documents import mapping_of, parse_document, read_text, validation_message
from meshwright.errors import InputError, near_miss, refuse_unknown, shown
from meshwright.frameworks.catalog import (
    STACK_NAMES,
    framework_of_stack,
    nearest_stack,
    stack_in_words,
    stack_named,
)
from meshwright.frameworks.fsdp2 import FSDP2
from meshwright.frameworks.megatron import PYTORCH
from meshwright.frameworks.record import Framework
from meshwright.model_specs.adapters import AdapterMethod, AdapterSpec, resolved
from meshwright.model_specs.blocks import RopeScaling, RopeSpec
from meshwright.model_specs.reader import (
    catalog_names,
    model_from_mapping,
    read_model,
    with_twin_facts,
)
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.request.choices import NUMBERS, NUMERICS, OF_EXECUTION
from meshwright.planner.request.executions import FP8_ATTENTION_ON
from meshwright.planner.request.plan_request import (
    check_loss,
    check_model,
    check_step_of_adapters,
    checked_reference,
    with_images,
)
from meshwright.planner.request.reader import read_images
from meshwright.planner.runs import run_terms
from meshwright.planner.runs.launches.command_line import fields_of, refuse_adapters
from meshwright.planner.runs.run_schema import MeasuredDoc, RunDoc, SettingsDoc

# From the `run` section of a run file to a layout, its stages and the name of a software profile.


Stages = tuple[tuple[int, ...], ...]


def gpus_and_dp(settings: SettingsDoc, cluster: ClusterSpec) -> tuple[int, int]:
    """GPUs in use and the data-parallel degree, one derived from the other where it is absent.

    Raises InputError where they contradict each other or the cluster.

    Parameters
    ----------
    settings
        The `run` section.
    cluster
        That it runs on.
    """
    model_parallel = settings.tp * settings.pp * settings.cp
    degrees = f"tp {settings.tp} * pp {settings.pp} * cp {settings.cp}"
    if settings.dp is None and settings.gpus is None and cluster.elastic:
        raise InputError(
            f"run.dp: needed, since {cluster.name} is a kind of node, not a machine of one size"
        )
    wanted = settings.gpus or cluster.gpus
    dp = settings.dp or wanted // model_parallel
    gpus = model_parallel * dp
    if settings.dp is None and gpus != wanted:
        raise InputError(
            f"run.dp: absent, and {degrees} = {model_parallel} does not divide {wanted} GPUs"
        )
    if settings.gpus is not None and gpus != settings.gpus:
        raise InputError(f"run.gpus: {settings.gpus}, but {degrees} * dp {dp} = {gpus}")
    if gpus > cluster.gpus:
        raise InputError(
            f"run.dp: {degrees} * dp {dp} = {gpus} GPUs, but the cluster has {cluster.gpus}"
        )
    return gpus, dp


def with_whole_domains(cluster: ClusterSpec, gpus: int) -> ClusterSpec:
    """The machine around a run, where its cluster names only the GPUs that the run took.

    Jobs take equal parts of NVLink domains, 64 GPUs of racks of 72: 512 GPUs stand in eight racks, not in
    seven and a piece.

    Parameters
    ----------
    cluster
        As the run file has it.
    gpus
        Of the run.
    """
    domain = cluster.nvlink_domain
    is_whole = cluster.gpus != gpus or gpus <= domain or gpus % domain == 0
    if is_whole or cluster.levels or cluster.nodes:
        return cluster
    part = int(fabric_levels(cluster, gpus).blocks[0])
    return cluster.model_copy(update={"gpus": gpus // part * domain})


def check_fp8_attention(settings: SettingsDoc, cluster: ClusterSpec) -> None:
    """Raises InputError where a run says that attention is in FP8 and its precision or its GPUs are not.

    Parameters
    ----------
    settings
        The `run` section.
    cluster
        That it runs on.
    """
    if not settings.fp8_attention:
        return
    where = "run.fp8_attention"
    if settings.precision in ("bf16", "fp16"):
        narrow = ("fp8", "mxfp8", "nvfp4")
        what = "goes with a run.precision below 16 bits only"
        raise InputError(what, where=where, value=settings.precision, allowed=narrow)
    architecture = cluster.device.architecture
    if architecture not in FP8_ATTENTION_ON:
        what = f"has no kernel on {cluster.device.name}, whose architecture is {architecture}"
        raise InputError(what, where=where, allowed=sorted(FP8_ATTENTION_ON))


_ASK_FOR_AMPERE = ("flash-1", "flash-2", "cudnn-9.0", "flash-3")


def check_attention_kernel(settings: SettingsDoc, cluster: ClusterSpec) -> None:
    """Raises InputError where a run names an attention kernel that its GPUs cannot run.

    Parameters
    ----------
    settings
        The `run` section.
    cluster
        That it runs on.
    """
    kernel, architecture = settings.attention_kernel, cluster.device.architecture
    allowed: tuple[str, ...] = ("fused-softmax", "memory-efficient", "sdpa", "unfused")
    if kernel in _ASK_FOR_AMPERE and architecture in WITHOUT_FLASH:
        why = "FlashAttention and cuDNN's fused attention run from Turing or Ampere on"
    elif kernel == "flash-3" and architecture in UP_TO_FLASH_2:
        why = "FlashAttention-3 is of Hopper alone, and FlashAttention-2 runs here"
        allowed = ("flash-2", "sdpa")
    else:
        return
    what = f"has no kernel on {cluster.device.name}, whose architecture is {architecture}: {why}"
    raise InputError(what, where="run.attention_kernel", value=kernel, allowed=allowed)


def places_on_hosts(
    cluster: ClusterSpec, hosts: Sequence[str], gpus: int
) -> tuple[tuple[int, int], ...]:
    """(node, local GPU) of every rank, where ranks run through some of the cluster's nodes in turn.

    They fill the free GPUs of the hosts, or are equally many on each. Raises InputError for a name that no
    node has, or where the ranks do neither.

    Parameters
    ----------
    cluster
        With listed nodes.
    hosts
        Their names in the order of the ranks.
    gpus
        Ranks in all.
    """
    numbers = {node.name: number for number, node in enumerate(cluster.nodes)}
    for name in hosts:
        if name not in numbers:
            raise InputError(
                "is no node of the cluster",
                where="run.hosts",
                value=name,
                did_you_mean=near_miss(name, numbers),
            )
    free = [free_of(cluster.nodes[numbers[name]], cluster.gpus_per_node) for name in hosts]
    per_host = gpus // len(hosts) if hosts else 0
    if sum(free) == gpus:
        on_each = free
    elif per_host * len(hosts) == gpus and per_host <= min(free, default=0):
        on_each = [per_host] * len(hosts)
    else:
        on_each = []
    if not on_each or len(set(hosts)) < len(hosts):
        have = ", ".join(f"{name} {count}" for name, count in zip(hosts[:8], free, strict=False))
        raise InputError(
            f"{gpus} ranks neither fill the free GPUs of {len(hosts)} hosts, each named once, nor are they "
            f"equally many on each; free are: {have}{', ...' if len(hosts) > 8 else ''}",
            where="run.hosts",
        )
    return tuple(
        (numbers[name], gpu)
        for name, count in zip(hosts, on_each, strict=True)
        for gpu in range(count)
    )


def _shard_groups(settings: SettingsDoc, dp: int) -> int:
    """Groups of replicas. Raises InputError where these do not split so."""
    replicas = dp * settings.cp
    stated = {
        "shard_group": settings.shard_group,
        "shard_groups": settings.shard_groups,
    }
    said = {name: number for name, number in stated.items() if number is not None}
    if len(said) > 1:
        raise InputError("run.shard_groups: run.shard_group says the same; give one of them")
    for name, number in said.items():
        if replicas % number:
            raise InputError(
                f"run.{name}: {number} does not divide the dp {dp} * cp {settings.cp} = "
                f"{replicas} replicas"
            )
    if settings.shard_groups is not None:
        return settings.shard_groups
    ranks = (
        settings.shard_group
        or run_terms.shard_group_size(settings.recipe.get("zero1_group"))
        or replicas
    )
    return max(replicas // ranks, 1)


def with_expert_tensor_degree(
    settings: SettingsDoc, model: ModelSpec, framework: Framework
) -> SettingsDoc:
    """Settings with the etp that the framework has, where it follows from tp and nothing else is said.

    Parameters
    ----------
    settings
        The `run` section.
    model
        With experts or without.
    framework
        Whose experts may follow tp.
    """
    follows = framework.experts_follow_tp and model.moe is not None and settings.ep == 1
    if follows and "etp" not in settings.model_fields_set:
        return settings.model_copy(update={"etp": settings.tp})
    return settings


def run_layout(
    settings: SettingsDoc, model: ModelSpec, dp: int, *, published: bool
) -> tuple[Layout, list[str]]:
    """The layout in plain integers, and remarks. Raises InputError where degrees do not fit together.

    Parameters
    ----------
    settings
        The `run` section.
    model
        That is trained.
    dp
        By `gpus_and_dp`.
    published
        Whether the row was measured by others: unknown modules become remarks then.
    """
    replica_batch = settings.micro_batch * dp
    if settings.global_batch % replica_batch:
        raise InputError(
            f"run.global_batch: {settings.global_batch} is not a multiple of "
            f"micro_batch {settings.micro_batch} * dp {dp} = {replica_batch}"
        )
    expert_group, ranks = settings.etp * settings.ep, settings.tp * settings.cp * dp
    if ranks % expert_group:
        raise InputError(
            f"run.ep: etp {settings.etp} * ep {settings.ep} = {expert_group} "
            f"does not divide tp * cp * dp = {ranks}"
        )
    mask, recompute_layers, remarks = _recompute(settings, model, published=published)
    derived = {"dp": dp, "shard_groups": _shard_groups(settings, dp)}
    layout = Layout(
        **{name: getattr(settings, name) for name in NUMBERS} | derived,
        num_micro_batches=settings.global_batch // replica_batch,
        sequence_parallel=settings.sequence_parallel,
        recompute=mask,
        recompute_layers=recompute_layers,
        schedule=_schedule(settings),
    )
    faults = traits(int(layout.schedule)).faults(
        settings.pp, settings.vpp, int(layout.num_micro_batches)
    )
    if layout.schedule and faults:
        raise InputError(f"run.schedule: {'; '.join(faults)}")
    return layout, remarks


def _schedule(settings: SettingsDoc) -> int:
    """The schedule's code. Raises InputError for a name that does not go with pp and vpp."""
    name = settings.schedule
    if name is None:
        return 0
    if settings.pp == 1 and name != "1f1b":
        raise InputError(f"run.schedule: {name} is a schedule of a pipeline, pp is 1")
    if name != schedule_name(schedule_named(name), settings.vpp):
        raise InputError(f"run.schedule: {name} does not go with vpp {settings.vpp}")
    return int(schedule_named(name))


def _recompute(
    settings: SettingsDoc, model: ModelSpec, *, published: bool
) -> tuple[int, int, list[str]]:
    modules, remarks = [], []
    for module in settings.recompute_modules:
        if module.lower() in run_terms.MODULE_NAMES:
            modules.append(module.lower())
        elif published:
            remarks.append(f"recompute_modules {module!r} is not known, left out")
        else:
            what = "not a module that can be recomputed"
            refuse_unknown(
                [module], run_terms.MODULE_NAMES, where="run.recompute_modules", what=what
            )
    layers_per_chunk = model.layers // (settings.pp * settings.vpp)
    mask, layers, mask_remarks = run_terms.recompute_mask(
        settings.recompute, modules, settings.recompute_layers, layers_per_chunk
    )
    return mask, layers, remarks + mask_remarks


def stages_of(settings: SettingsDoc, model: ModelSpec) -> tuple[Stages | None, list[str]]:
    """Layers of each [rank][virtual stage], or None where they are the most even ones that the model may
    have (`balanced_stages`), and remarks.

    Raises InputError for stages that do not go with pp, vpp or the model's layers.

    Parameters
    ----------
    settings
        The `run` section.
    model
        That is trained.
    """
    pp, chunk_count = settings.pp, settings.pp * settings.vpp
    split = settings.stages or settings.pp_layout
    if isinstance(split, list):
        return _written_stages(split, settings, model), []
    words, remarks = settings.layer_split or split, []
    if words is not None:
        chunks = run_terms.layers_from_words(words, model.layers, chunk_count)
        if chunks is not None:
            return _by_rank(chunks, pp), []
        remarks.append(f"layer split not understood, layers split evenly: {words}")
    if chunk_count > model.layers:
        raise InputError(
            f"run.pp: pp {pp} * vpp {settings.vpp} = {chunk_count} chunks, but {model.layers} layers"
        )
    if model.layers % chunk_count == 0:
        return None, remarks
    uneven = f"{model.layers} layers do not divide into {chunk_count} chunks"
    if model.stage_begins:
        remarks.append(
            f"{uneven}: balanced, each from a layer on that reuses nothing of one before"
        )
        return None, remarks
    remarks.append(f"{uneven}: balanced, larger ones first")
    return _by_rank(run_terms.balanced(model.layers, chunk_count), pp), remarks


def _written_stages(rows: list[Any], settings: SettingsDoc, model: ModelSpec) -> Stages:
    """Layers written out: per chunk in model order, or per [rank][virtual stage]."""
    pp, vpp = settings.pp, settings.vpp
    stages: Stages = ()
    if not all(isinstance(row, int) for row in rows):
        stages = tuple(tuple(rank) for rank in rows)
    elif len(rows) == pp * vpp:
        stages = _by_rank(rows, pp)
    if len(stages) != pp or any(len(rank) != vpp for rank in stages):
        raise InputError(
            f"run.stages: must hold {pp} ranks (pp) of {vpp} virtual stages (vpp) each"
        )
    total = sum(map(sum, stages))
    if total != model.layers:
        raise InputError(f"run.stages: {total} layers in all, but the model has {model.layers}")
    return stages


def _by_rank(chunks: Sequence[int], pp: int) -> Stages:
    """Chunk c runs on rank c % pp, as its virtual stage c // pp."""
    return tuple(tuple(chunks[rank::pp]) for rank in range(pp))


def software_profile(
    settings: SettingsDoc, *, published: bool, calibration: Calibration | None = None
) -> tuple[str, list[str]]:
    """Name of the software profile, and remarks; the nearest one for an unknown framework if `published`.

    The name of a calibration stands for the profile that it begins from.

    Parameters
    ----------
    settings
        The `run` section.
    published
        Whether the row was measured by others: an unknown framework is priced as its nearest then.
    calibration
        Whose name may stand for a framework.
    """
    text = settings.framework
    if calibration is not None and text == calibration.name:
        return calibration.framework, []
    stack = stack_in_words(text)
    if stack is not None:
        return stack.name, []
    if not published:
        what = "not a known framework"
        refuse_unknown([text], STACK_NAMES, where="run.framework", what=what)
    fallback = nearest_stack(text, settings.zero_stage).name
    return fallback, [f"framework {text!r} is not known, priced as its nearest stack, {fallback}"]


MAX_FILE_BYTES = 16 * 2**20
MAX_RUNS = 20_000
_SAME_IN_WORKLOAD = (
    "global_batch", "seq_len", "precision", "optimizer", "kind", "launch_blocking", "expert_imbalance",
    "reserve_gib", "muon_tp_mode", "stepwise_loss", "stepwise_rotary", "stepwise_activation",
    "fill_exposed", "optimizer_on_drives", "flushes",
)  # fmt: skip
"""Settings that a workload holds under the same name and meaning."""
SLIP = 0.9
"""An unknown key this similar to a known one is taken for a slip of the pen (difflib ratio)."""


FIRST_RANK = "rank 0"
"""A note on measured memory that says so is of the first pipeline rank, not of the fullest one."""
DRIVER = "nvidia-smi"
"""A note on measured memory that says so was read from the driver."""


ALLOCATED = "peak allocated"
"""A note on measured memory that says so leaves out blocks that the allocator keeps for itself."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a source measured: seconds of one optimizer step, peak memory of one GPU in GiB, or neither."""

    step_time_s: float | None
    memory_gib: float | None = None
    out_of_memory: bool = False
    """Whether the run ended out of memory; there is neither step nor peak then."""
    first_rank: bool = False
    """Whether memory is the first pipeline rank's, not the fullest one's."""
    allocated: bool = False
    """Whether memory is what the allocator handed out, without what it held besides."""
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
    """Layers of each [pipeline rank][virtual stage]; None for the most even ones (`balanced_stages`)."""
    rank_order: tuple[str, ...] = AXES
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

    Parameters
    ----------
    path
        Of the file.
    calibration
        With which they are priced, and whose name may stand for their framework.
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

    Parameters
    ----------
    path
        Of the file.
    calibration
        With which they are priced, and whose name may stand for their framework.
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


_SAID_BY_ADAPTERS = (
    "is not how a run file says what is trained: say adapters under run.adapters, such as "
    "{method: qlora, rank: 16} (methods: "
    + ", ".join(get_args(AdapterMethod))
    + "); part of a model, as "
    "frozen layers leave it, has no price yet"
)


def run_from_mapping(
    row: object,
    *,
    where: str,
    base: Path | None = None,
    default_id: str = "run",
    calibration: Calibration | None = None,
) -> Run:
    """One run from the mapping of a run file.

    Published rows (those with `measured`) may carry descriptive keys that this version does not know: they
    become remarks. Everywhere else an unknown key is an error. Raises InputError.

    Parameters
    ----------
    row
        The mapping, as the file has it.
    where
        Opens every message.
    base
        A folder beside which files of model and cluster are looked for.
    default_id
        Of a row without `id`.
    calibration
        With which it is priced, and whose name may stand for its framework.
    """
    refuse_adapters(_of_the_run(row), where, _SAID_BY_ADAPTERS)
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
    check_model(model, doc.run.kind, doc.run.loss)
    settings = with_expert_tensor_degree(doc.run, model, framework_of_stack(profile))
    model = _with_images(settings, model, profile)
    gpus, dp = gpus_and_dp(settings, cluster)
    layout, layout_remarks = run_layout(settings, model, dp, published=published)
    stages, stage_remarks = stages_of(settings, model)
    cluster = with_whole_domains(cluster, gpus)
    workload = Workload(
        **_execution_of(settings),
        **_software_of(settings),
        **{name: getattr(settings, name) for name in _SAME_IN_WORKLOAD},
        adapters=_adapters(settings, model, profile),
        autocast=framework_of_stack(profile).autocasts_whole_weights and settings.zero_stage == 0,
        loss=_loss(settings, profile),
        reference=_reference(settings, profile),
        model=model,
        cluster=cluster,
        gpus=gpus,
        framework=profile,
        checked_collectives=_checks_collectives(settings, cluster, profile, gpus),
        expert_copies_by_ep=run_terms.copies_of_dealt_experts(
            settings.moe_routing, model, int(layout.ep)
        ),
        calibration=calibration,
    )
    if settings.bucket_parameters is not None:
        bucket_mb = stack_constants(workload).gradients_mb(settings.bucket_parameters)
        workload = replace(workload, bucket_mb=bucket_mb)
    workload = with_needed_syncs(workload, layout)
    check_fp8_attention(settings, cluster)
    check_attention_kernel(settings, cluster)
    run_terms.check_context_groups(workload, layout)
    run_terms.check_offload(workload, layout)
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


def _checks_collectives(
    settings: SettingsDoc, cluster: ClusterSpec, profile: str, gpus: int
) -> bool:
    """What a run says of checked collectives, else what its framework's launcher sets for such a run."""
    if settings.checked_collectives is not None:
        return settings.checked_collectives
    across = settings.pp > 1 and gpus > cluster.gpus_per_node
    return across and stack_named(profile).checks_pipelines_across_nodes


def _software_of(settings: SettingsDoc) -> dict[str, Any]:
    """Kernels of a run, by itself, by the flags of its recipe or by the release that it names."""
    recipe, release = settings.recipe, settings.framework
    gathers_anew = run_terms.recipe_switch(recipe, "tp_recompute_allgather")
    return {
        "attention_kernel": settings.attention_kernel
        or run_terms.attention_kernel_kind(recipe.get("attention_kernel", ""))
        or run_terms.attention_kernel_of_release(release),
        "first_fp8_kernels": _stated(
            settings.first_fp8_kernels, run_terms.has_first_fp8_kernels(release)
        ),
        "fused_norm": run_terms.recipe_switch(recipe, "fused_rmsnorm"),
        "permutes_in_dispatch": bool(
            run_terms.recipe_switch(recipe, "moe_permute_fusion_into_hybridep")
        ),
        "z_loss": bool(run_terms.recipe_switch(recipe, "z_loss")),
        "checks_gradients": bool(run_terms.recipe_switch(recipe, "check_for_nan_in_grad")),
        "keeps_gathered_inputs": settings.keeps_gathered_inputs or gathers_anew is False,
    }


def _execution_of(settings: SettingsDoc) -> dict[str, Any]:
    """How a run says that it is run, or the flags of its recipe, by the names of a workload."""
    recipe = settings.recipe
    fields = {choice.name: choice.run_file or choice.name for choice in (*OF_EXECUTION, *NUMERICS)}
    said = {
        name: getattr(settings, field, None) for name, field in fields.items() if name != "compiled"
    }
    overlaps = {f"{axis}_overlap": on for axis, on in settings.overlap.model_dump().items()}
    return (
        said
        | overlaps
        | {
            "cuda_graph": settings.cuda_graph or run_terms.cuda_graph_kind(recipe),
            "cp_comm": run_terms.cp_comm_kind(settings.cp_comm),
            "cp_inner": settings.cp_inner,
            "moe_dispatch": settings.moe_dispatch or run_terms.moe_dispatch_kind(recipe),
            "gradient_dtype": run_terms.gradient_type_of(
                settings.gradient_dtype or recipe.get("gradient_sync", "")
            ),
            "fp8_params": _stated(
                settings.fp8_params, run_terms.recipe_switch(recipe, "fp8_param_gather")
            ),
            "fp8_attention": _stated(settings.fp8_attention, run_terms.attends_in_fp8(recipe)),
            "te_loss": _stated(
                settings.fused_loss, run_terms.fused_loss_in_words(settings.framework)
            ),
            "offload_modules": run_terms.offloaded_set(settings.offload_modules),
            "parameter_offload": _place_of_parameters(settings),
        }
    )


def _place_of_parameters(settings: SettingsDoc) -> ParameterOffload:
    """Where a run keeps 16-bit shards. Raises InputError for drives that keep what is not offloaded."""
    if settings.parameters_on_drives and not settings.parameter_offload:
        what = "is DeepSpeed's, beside parameter_offload: true"
        raise InputError(what, where="run.parameters_on_drives", value=settings.framework)
    if settings.parameters_on_drives:
        return "nvme"
    return "cpu" if settings.parameter_offload else "none"


def _stated(switch: bool | None, otherwise: bool | None) -> bool | None:
    """What a run says of a switch, else what is said elsewhere."""
    return otherwise if switch is None else switch


_ENDINGS = (".json", ".yaml", ".yml")
_OF_A_LAUNCH = (
    "`estimate FILE --from-launch --with cluster=... -o run.yaml` makes a run file of a launch file, and "
    "`estimate RUN.yaml --measured LOG` reads the log of a run"
)


def _named_rows(path: Path) -> list[tuple[str, object]]:
    """The rows of a file with the names that messages call them by."""
    try:
        text = read_text(path, MAX_FILE_BYTES)
    except InputError as error:
        what = f"{error}; for a model, `plan {path} --cluster ...` says step and memory"
        raise InputError(what if str(path) in catalog_names() else str(error)) from error
    try:
        parsed = parse_document(text, str(path))
    except InputError as error:
        if path.suffix.lower() in _ENDINGS:
            raise
        raise InputError(f"{error}; {_OF_A_LAUNCH}") from error
    if isinstance(parsed, str):
        raise InputError(f"this is text, not a run file; {_OF_A_LAUNCH}", where=str(path))
    if isinstance(parsed, list):
        raise InputError(
            "must be a mapping, with several runs as a list under `runs`", where=str(path)
        )
    document = mapping_of(parsed, str(path))
    if {"status", "solver"} <= set(document):
        what = (
            "this is a plan, not a run; `explain`, `report`, `trace` and `traffic` read plans, and "
            "`estimate DIR/launch.sh --from-launch -o run.yaml` makes a run file of one on one kind of device"
        )
        raise InputError(what, where=str(path))
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


_PRICED_PARTS = ("adapters", "freeze_encoder")
"""Settings that leave part of the parameters as they are, and have a price."""


def _of_the_run(row: object) -> Iterator[tuple[str, str]]:
    """What a row says of its run, the model and the measurements left out."""
    if isinstance(row, dict):
        run = row.get("run")
        said = {key: value for key, value in row.items() if key in ("kind", "run", "train")}
        if isinstance(run, dict):
            said["run"] = {key: value for key, value in run.items() if key not in _PRICED_PARTS}
        yield from fields_of(said)


def _adapters(settings: SettingsDoc, model: ModelSpec, profile: str) -> AdapterSpec | None:
    """What is trained beside frozen weights, as the framework has it."""
    if settings.adapters is None:
        return None
    check_step_of_adapters(framework_of_stack(profile).name, settings.optimizer)
    setting = framework_of_stack(profile).adapters.get(settings.adapters.method)
    # PyTorch's own data parallelism, a stack of Megatron's record, has PEFT's adapters.
    fused = setting is not None and setting.fused and profile != PYTORCH.name
    return resolved(model, settings.adapters, fused=fused)


def _loss(settings: SettingsDoc, profile: str) -> str | None:
    """How the head and its cross-entropy run, where the framework can run them so; None for all logits."""
    reference = _reference(settings, profile)
    check_loss(_trainers_framework(profile), settings.kind, settings.loss, reference)
    return in_chunks(settings.loss)


def _reference(settings: SettingsDoc, profile: str) -> str | None:
    """Where the reference model is, as the framework keeps it."""
    framework, is_frozen = _trainers_framework(profile), settings.adapters is not None
    return checked_reference(framework, settings.kind, settings.reference, is_frozen=is_frozen)


def _with_images(settings: SettingsDoc, model: ModelSpec, profile: str) -> ModelSpec:
    """The model with its image encoder, where sequences hold images."""
    number, frozen = settings.images_per_sequence, settings.freeze_encoder
    images = read_images(settings.image_tokens, number, frozen=frozen)
    if images is None:
        return model
    has_adapters = settings.adapters is not None
    framework = _trainers_framework(profile)
    return with_images(model, images, framework, settings.seq_len, has_adapters=has_adapters)


def _trainers_framework(profile: str) -> str:
    """The framework whose trainers run: under plain data parallelism those that run under FSDP2."""
    return FSDP2.name if profile == PYTORCH.name else framework_of_stack(profile).name


def _readable_part(
    section: dict[str, Any], schema: type[BaseModel], place: str
) -> tuple[dict[str, Any], list[str]]:
    """The keys of a section that a schema has or that look like a slip of one, and names of the rest."""
    names = [field.alias or name for name, field in schema.model_fields.items()]
    dropped = [
        key
        for key in section
        if str(key) not in names
        and not difflib.get_close_matches(str(key), names, n=1, cutoff=SLIP)
    ]
    readable = {key: value for key, value in section.items() if key not in dropped}
    return readable, [f"{place}{shown(key)}" for key in dropped]


def _model(doc: RunDoc, base: Path | None) -> ModelSpec:
    if isinstance(doc.model, ModelSpec):
        return doc.model
    if isinstance(doc.model, str):
        return read_model(_beside(doc.model, base))
    written = {**_GPT_LAYERS, **doc.model} if doc.model.get("activation") == "gelu" else doc.model
    return with_twin_facts(_with_sinks(model_from_mapping(written, "model")))


_GPT_LAYERS = {"position": "learned", "norm": "layernorm"}
"""What a row has that states GELU without a gate, and no more: a GPT (Radford et al. 2019, section 2.3), by
Megatron-LM's defaults too (megatron/training/arguments.py, --position-embedding-type, --normalization)."""


def _with_sinks(model: ModelSpec) -> ModelSpec:
    """A row that notes attention sinks is a gpt-oss model (arXiv 2508.10925).

    Its experts carry biases, every other layer attends in a window of 128, and positions are YaRN's, 32 times
    the 4,096 first trained in.
    """
    if model.moe is None or model.attention_sinks or "sinks" not in (model.attention_note or ""):
        return model
    moe = model.moe.model_copy(update={"expert_bias": True, "router_bias": True})
    windows = {"sliding_window": 128, "full_attention_every": 2}
    scaling = RopeScaling(type="yarn", factor=32.0, original_positions=4096, whole_range=False)
    rope = RopeSpec(base=150_000.0, scaling=scaling)
    return model.model_copy(update={"attention_sinks": True, "moe": moe, "rope": rope, **windows})


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
        tokens = workload.tokens_per_step
        step_time_s = tokens / (doc.tokens_per_s_per_gpu * workload.gpus)
    figures = step_time_s is not None or doc.memory_gib is not None
    if doc.out_of_memory and figures:
        raise InputError("measured: out_of_memory goes with neither a step time nor memory")
    if not doc.out_of_memory and not figures:
        raise InputError(
            "measured: needs step_time_s, tokens_per_s_per_gpu, memory_gib or out_of_memory"
        )
    return _measurement(doc, step_time_s)


def _measurement(doc: MeasuredDoc, step_time_s: float | None) -> Measured:
    return Measured(
        step_time_s=step_time_s,
        memory_gib=doc.memory_gib,
        out_of_memory=doc.out_of_memory,
        first_rank=FIRST_RANK in (doc.memory_note or ""),
        from_driver=DRIVER in (doc.memory_note or ""),
        allocated=ALLOCATED in (doc.memory_note or ""),
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
        remarks.append(f"measured memory: {doc.measured.memory_note}")
    return remarks
