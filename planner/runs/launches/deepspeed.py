"""A DeepSpeed configuration as a run; model, sequence length and cluster are not part of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.deepspeed import DEEPSPEED
from meshwright.planner.runs.launches.launch_run import (
    LaunchRun,
    section_of,
    unread_keys,
    whole_number,
)

DEFAULT_BUCKET = 500_000_000
"""`reduce_bucket_size`; under ZeRO 3 prices know no other (deepspeed/runtime/zero/config.py)."""
BATCH, MICRO_BATCH = "train_batch_size", "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_DEEPSPEED_READ = "zero_optimization bf16 fp16 tensor_parallel activation_checkpointing"
_INNER_READ = ("enabled", "number_checkpoints", "autotp_size")
_ZERO_READ = """
stage reduce_bucket_size mics_shard_size offload_optimizer offload_param cpu_offload cpu_offload_param
overlap_comm
"""
_OFFLOAD_READ = ("device", "ratio")
"""Without pinned memory transfers are slower; prices assume that it is pinned, as it is by default."""


def with_configuration(run: LaunchRun, document: dict[str, Any], where: str) -> LaunchRun:
    """A run of Megatron-DeepSpeed's arguments with what only its ds_config.json says.

    Raises InputError for a value of the wrong kind.
    """
    own = from_deepspeed(document, where).settings
    only_here = (
        "overlap",
        "shard_group",
        "bucket_parameters",
        "optimizer_offload",
        "parameter_offload",
    )
    said = {name: own[name] for name in only_here if name in own}
    return replace(run, settings=run.settings | said)


def from_deepspeed(document: dict[str, Any], where: str) -> LaunchRun:
    """The run of a DeepSpeed configuration.

    Parameters
    ----------
    document
        Of a JSON file.
    where
        The file's name, for messages.

    Raises
    ------
    InputError
        No micro-batch, or a value of the wrong kind.
    """
    zero = section_of(document, "zero_optimization", where)
    tensor_parallel = section_of(document, "tensor_parallel", where)
    micro_batch = whole_number(document, MICRO_BATCH, where)
    if micro_batch is None:
        raise InputError("is needed", where=f"{where}: {MICRO_BATCH}")
    steps = whole_number(document, _STEPS, where)
    for name, count in ((MICRO_BATCH, micro_batch), (_STEPS, steps)):
        if count is not None and count < 1:
            raise InputError("must be at least 1", where=f"{where}: {name}", value=count)
    settings: dict[str, Any] = {
        "micro_batch": micro_batch,
        "zero_stage": whole_number(zero, "stage", where) or 0,
        "framework": DEEPSPEED.name,
        "tp": whole_number(tensor_parallel, "autotp_size", where) or 1,
        "overlap": {"dp": bool(zero.get("overlap_comm", False))},
        "moe_dispatch": "alltoall",
    }
    batch = whole_number(document, BATCH, where)
    if batch is not None:
        settings["global_batch"] = batch
        if steps is not None and batch % (micro_batch * steps) == 0:
            settings["dp"] = batch // (micro_batch * steps)
    bucket = zero.get("reduce_bucket_size")
    buckets = DEEPSPEED.gradient_buckets
    counts = buckets is not None and settings["zero_stage"] in buckets.zero_stages
    if counts and type(bucket) is int:
        settings["bucket_parameters"] = bucket
    shard_group = whole_number(zero, "mics_shard_size", where) or -1
    if shard_group > 0:
        settings["shard_group"] = shard_group
    settings |= _offloaded(zero, settings["zero_stage"], where)
    if section_of(document, "fp16", where).get("enabled") is True:
        settings["precision"] = "fp16"
    if section_of(document, "activation_checkpointing", where).get("number_checkpoints"):
        settings["recompute"] = "full"
    unread = _unread(document, zero, where)
    if settings["zero_stage"] == 3 and bucket not in (None, "auto", DEFAULT_BUCKET):
        unread.append("zero_optimization.reduce_bucket_size")
    return LaunchRun(settings=settings, unread=tuple(unread))


def _unread(document: dict[str, Any], zero: dict[str, Any], where: str) -> list[str]:
    """Keys that may change the price and that nothing here reads."""
    unread = unread_keys(
        document, "deepspeed", {BATCH, MICRO_BATCH, _STEPS, *_DEEPSPEED_READ.split()}
    )
    for name in ("bf16", "fp16", "activation_checkpointing", "tensor_parallel"):
        unread += unread_keys(section_of(document, name, where), "deepspeed", _INNER_READ, name)
    unread += unread_keys(zero, "deepspeed", _ZERO_READ.split(), "zero_optimization")
    for name in ("offload_optimizer", "offload_param"):
        inner, place = section_of(zero, name, where), f"zero_optimization.{name}"
        unread += unread_keys(inner, "deepspeed", _OFFLOAD_READ, place)
    return unread


def _offloaded(zero: dict[str, Any], stage: int, where: str) -> dict[str, Any]:
    """What of parameters and of optimizer states lies in the host's memory; empty where nothing does."""
    settings: dict[str, Any] = {}
    if _offloads_parameters(zero, stage, where):
        settings["parameter_offload"] = True
    percent = _offloaded_percent(zero, section_of(zero, "offload_optimizer", where), where)
    if percent:
        settings["optimizer_offload"] = percent
    return settings


def _offloads_parameters(zero: dict[str, Any], stage: int, where: str) -> bool:
    """Whether parameters lie in the host's memory. Raises InputError for drives, whose rate is not known."""
    place = f"{where}: zero_optimization.offload_param"
    device = section_of(zero, "offload_param", where).get("device", "none")
    if device == "nvme":
        what = "has no price: the rate of the drives is not known; put them on the host, device cpu"
        raise InputError(what, where=f"{place}.device", value=device)
    if device not in ("none", "cpu"):
        raise InputError("only none or cpu can be priced", where=f"{place}.device", value=device)
    asked = device == "cpu" or zero.get("cpu_offload_param") is True
    # Below stage 3 parameters are whole on every rank, and DeepSpeed leaves them there.
    return asked and stage == 3


def _offloaded_percent(zero: dict[str, Any], offload: dict[str, Any], where: str) -> int:
    """Of the optimizer's states, to a whole number; `cpu_offload` is the key of old versions.

    Raises InputError for another device than the host's memory, whose price is not known, and for a ratio
    that is no number of 0 to 1.
    """
    place = f"{where}: zero_optimization.offload_optimizer"
    device = offload.get("device", "none")
    if device not in ("none", "cpu"):
        raise InputError("only none or cpu can be priced", where=f"{place}.device", value=device)
    ratio = offload.get("ratio", 1.0)
    is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
    if not is_number or not 0 <= ratio <= 1:
        raise InputError("must be a number of 0 to 1", where=f"{place}.ratio", value=ratio)
    return round(100 * ratio) if device == "cpu" or zero.get("cpu_offload") is True else 0
