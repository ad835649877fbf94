"""From the `run` section of a run file to a layout, its stages and the name of a software profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.cluster_specs.fabric import fabric_levels
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.constants.calibration import Calibration
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.pipeline.schedules import schedule_name, schedule_named, traits
from meshwright.errors import InputError, near_miss
from meshwright.frameworks.catalog import STACK_NAMES, nearest_stack, stack_in_words
from meshwright.frameworks.record import Framework
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.request.executions import FP8_ATTENTION_ON
from meshwright.planner.runs.run_schema import SettingsDoc
from meshwright.planner.runs.run_terms import (
    MODULE_NAMES,
    balanced,
    layers_from_words,
    recompute_mask,
    shard_group_size,
)

Stages = tuple[tuple[int, ...], ...]
_SAME_IN_LAYOUT = (
    "tp", "cp", "pp", "ep", "etp", "vpp", "micro_batch", "zero_stage", "sequence_parallel",
    "optimizer_offload",
)  # fmt: skip
"""Settings that a layout holds under the same name and meaning."""


def gpus_and_dp(settings: SettingsDoc, cluster: ClusterSpec) -> tuple[int, int]:
    """GPUs in use and the data-parallel degree, one derived from the other where it is absent.

    Raises InputError where they contradict each other or the cluster.
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
    """
    domain = cluster.nvlink_domain
    whole = cluster.gpus != gpus or gpus <= domain or gpus % domain == 0
    if whole or cluster.levels or cluster.nodes:
        return cluster
    part = int(fabric_levels(cluster, gpus).blocks[0])
    return cluster.model_copy(update={"gpus": gpus // part * domain})


def check_fp8_attention(settings: SettingsDoc, cluster: ClusterSpec) -> None:
    """Raises InputError where a run says that attention is in FP8 and its precision or its GPUs are not."""
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


def places_on_hosts(
    cluster: ClusterSpec, hosts: Sequence[str], gpus: int
) -> tuple[tuple[int, int], ...]:
    """(node, local GPU) of every rank, where ranks run through some of the cluster's nodes in turn.

    Raises InputError for a name that no node has, or another number of GPUs than that of the run.
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
    per_host = gpus // len(hosts) if hosts else 0
    if (
        per_host * len(hosts) != gpus
        or per_host > cluster.gpus_per_node
        or len(set(hosts)) < len(hosts)
    ):
        raise InputError(
            f"{len(hosts)} hosts of up to {cluster.gpus_per_node} GPUs, each named once, cannot have equally "
            f"many of {gpus} ranks",
            where="run.hosts",
        )
    return tuple((numbers[name], gpu) for name in hosts for gpu in range(per_host))


def _shard_groups(settings: SettingsDoc, dp: int) -> int:
    """Groups of replicas. Raises InputError where these do not split so."""
    replicas = dp * settings.cp
    stated = {
        "shard_group": settings.shard_group,
        "shard_groups": settings.shard_groups,
    }
    given = {name: number for name, number in stated.items() if number is not None}
    if len(given) > 1:
        raise InputError("run.shard_groups: run.shard_group says the same; give one of them")
    for name, number in given.items():
        if replicas % number:
            raise InputError(
                f"run.{name}: {number} does not divide the dp {dp} * cp {settings.cp} = "
                f"{replicas} replicas"
            )
    if settings.shard_groups is not None:
        return settings.shard_groups
    ranks = settings.shard_group or shard_group_size(settings.recipe.get("zero1_group")) or replicas
    return max(replicas // ranks, 1)


def with_expert_tensor_degree(
    settings: SettingsDoc, model: ModelSpec, framework: Framework
) -> SettingsDoc:
    """Settings with the etp that the framework has, where it follows from tp and nothing else is said."""
    follows = framework.experts_follow_tp and model.moe is not None and settings.ep == 1
    if follows and "etp" not in settings.model_fields_set:
        return settings.model_copy(update={"etp": settings.tp})
    return settings


def run_layout(
    settings: SettingsDoc, model: ModelSpec, dp: int, *, published: bool
) -> tuple[Layout, list[str]]:
    """The layout in plain integers, and remarks. Raises InputError where degrees do not fit together."""
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
    layout = Layout(
        **{name: getattr(settings, name) for name in _SAME_IN_LAYOUT},
        dp=dp,
        num_micro_batches=settings.global_batch // replica_batch,
        recompute=mask,
        recompute_layers=recompute_layers,
        schedule=_schedule(settings),
        shard_groups=_shard_groups(settings, dp),
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
        if module.lower() in MODULE_NAMES:
            modules.append(module.lower())
        elif published:
            remarks.append(f"recompute_modules {module!r} is not known, left out")
        else:
            raise InputError(
                "not a module that can be recomputed",
                where="run.recompute_modules",
                value=module,
                did_you_mean=near_miss(module, MODULE_NAMES),
                allowed=MODULE_NAMES,
            )
    layers_per_chunk = model.layers // (settings.pp * settings.vpp)
    mask, layers, mask_remarks = recompute_mask(
        settings.recompute, modules, settings.recompute_layers, layers_per_chunk
    )
    return mask, layers, remarks + mask_remarks


def stages_of(settings: SettingsDoc, model: ModelSpec) -> tuple[Stages | None, list[str]]:
    """Layers of each [rank][virtual stage], or None where they divide evenly, and remarks.

    Raises InputError for stages that do not go with pp, vpp or the model's layers.
    """
    pp, chunk_count = settings.pp, settings.pp * settings.vpp
    split = settings.stages or settings.pp_layout
    if isinstance(split, list):
        return _written_stages(split, settings, model), []
    words, remarks = settings.layer_split or split, []
    if words is not None:
        chunks = layers_from_words(words, model.layers, chunk_count)
        if chunks is not None:
            return _by_rank(chunks, pp), []
        remarks.append(f"layer split not understood, layers split evenly: {words}")
    if chunk_count > model.layers:
        raise InputError(
            f"run.pp: pp {pp} * vpp {settings.vpp} = {chunk_count} chunks, but {model.layers} layers"
        )
    if model.layers % chunk_count == 0:
        return None, remarks
    remarks.append(
        f"{model.layers} layers do not divide into {chunk_count} chunks: balanced, larger ones first"
    )
    return _by_rank(balanced(model.layers, chunk_count), pp), remarks


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
    """
    text = settings.framework
    if calibration is not None and text == calibration.name:
        return calibration.framework, []
    stack = stack_in_words(text)
    if stack is not None:
        return stack.name, []
    if not published:
        raise InputError(
            "not a known framework",
            where="run.framework",
            value=text,
            did_you_mean=near_miss(text, STACK_NAMES),
            allowed=STACK_NAMES,
        )
    fallback = nearest_stack(text, settings.zero_stage).name
    return fallback, [f"framework {text!r} is not known, priced as its nearest stack, {fallback}"]
