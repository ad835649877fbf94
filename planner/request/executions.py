"""Execution choices of a request: what may be chosen, pinned or done without, and every combination."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from meshwright.cluster_specs.allocation import is_irregular
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.constraints.memory import has_mamba, has_modules
from meshwright.costmodel.execution_names import OFFLOADED_INPUTS, OFFLOADED_MODULES
from meshwright.costmodel.rates import attends_faster_in_fp8
from meshwright.costmodel.workload import GATHERS, HIERARCHICAL, Execution
from meshwright.errors import InputError, listed, near_miss, shown
from meshwright.frameworks.catalog import planned
from meshwright.frameworks.record import Framework
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.request.choices import (
    ALLOW,
    BY_NAME,
    NUMERICS,
    OF_EXECUTION,
    PERMISSIONS,
    SWITCH,
    WITHOUT,
    Choice,
    is_excluded,
)

FP8_ATTENTION_ON = ("hopper", "blackwell")
"""Architectures on which cuDNN attends in FP8 (cuDNN Frontend, Attention, support matrix of 9.18.1)."""


def choices_made(execution: Execution) -> dict[str, str | bool]:
    """The choices of an execution that differ from plain; none where there was nothing to choose."""
    values = {choice.name: getattr(execution, choice.name) for choice in OF_EXECUTION}
    return {
        name: value
        for name, value in values.items()
        if value is not None and value != BY_NAME[name].plain
    }


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """What the search may choose beside a layout."""

    values: Mapping[str, tuple[Any, ...]]
    """That each choice of an execution may take, plain ones first, in the order of `OF_EXECUTION`."""
    fixed: Mapping[str, Any]
    """Fields of every execution: overlaps that are on wherever they are legal, and numerics, of which what is
    allowed is never worse, so chosen."""

    def executions(self) -> tuple[Execution, ...]:
        """Every combination, the plainest first."""
        return tuple(
            Execution(**dict(zip(self.values, values, strict=True)), **self.fixed)
            for values in product(*self.values.values())
        )


def execution_options(
    framework: Framework,
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    pins: Mapping[str, int | str],
    without: tuple[str, ...] = (),
    allow: tuple[str, ...] = (),
    precision: str = "bf16",
    optimizer: str = "adam",
    trains_alone: bool = True,
) -> ExecutionOptions:
    """What the search may choose.

    DeepEP and HybridEP have the same price, and graphs of the whole step hold the second alone: where both
    run, HybridEP stands for both if such graphs may be chosen, else DeepEP. Overlaps of gradients and of
    pipelines are on wherever they are legal; those of experts and of tensor parallelism are choices.
    Parameters leave the GPUs only where one language model `trains_alone`: no frozen weights, no images and
    no reference.

    Raises
    ------
    InputError
        If a pinned value does not exist in the framework, on the device, or beside `without`.
    """
    hidden = planned(framework.overlaps)
    experts = model.moe is not None
    overlaps_experts = experts and model.hybrid_pattern is None and model.mtp_layers <= 1
    # User buffers are multicast or IPC handles of other GPUs (NVIDIA/TransformerEngine issues 966 and 1071).
    peers = "peer-access" not in cluster.device.lacks
    overlaps_tensor = model.attention is None and peers
    can_hide = {"ep_overlap": overlaps_experts, "tp_overlap": overlaps_tensor}
    values: dict[str, tuple[Any, ...]] = {
        "moe_dispatch": _dispatchers(framework, cluster, precision) if experts else ("alltoall",),
        **{
            name: (False, True) if can and BY_NAME[name].entry in hidden else (False,)
            for name, can in can_hide.items()
        },
        "cuda_graph": planned(framework.cuda_graphs),
        "cp_comm": _context_exchanges(framework, model, cluster),
        "compiled": _compilations(framework, precision),
        "sync_each_batch": (False,)
        if framework.batch_sync is None or not framework.batch_sync.planned
        else (False, True),
        "fp8_recipe": _fp8_recipes(framework, precision, allow),
        "offload_modules": _offloads(framework, model, pins, allow),
        "parameter_offload": _parameter_offloads(
            framework, cluster, pins, allow, alone=trains_alone
        ),
    }
    binding = {name: pin for name, pin in pins.items() if experts or name != "moe_dispatch"}
    chosen: dict[str, tuple[Any, ...]] = {
        choice.name: _pinned(
            choice, _there(choice, values[choice.name], without), binding.get(choice.name)
        )
        for choice in OF_EXECUTION
    }
    if "moe_dispatch" not in pins:
        chosen["moe_dispatch"] = _one_deduplicates(
            chosen["moe_dispatch"], captured="full" in chosen["cuda_graph"]
        )
    numerics = _numerics(
        framework, model, cluster, pins, allow, precision=precision, optimizer=optimizer
    )
    overlaps = {f"{axis}_overlap": axis in hidden for axis in ("dp", "pp")}
    return ExecutionOptions(values=chosen, fixed={**overlaps, **numerics})


def _there(choice: Choice, values: tuple[Any, ...], without: tuple[str, ...]) -> tuple[Any, ...]:
    """The values that are not done without; all of them where none would be left."""
    for word, excluded in choice.without.items():
        if word in without:
            there = (value for value in values if not is_excluded(choice, excluded, value))
            values = tuple(there) or values
    return values


def _numerics(
    framework: Framework,
    model: ModelSpec,
    cluster: ClusterSpec,
    pins: Mapping[str, int | str],
    allow: tuple[str, ...],
    *,
    precision: str,
    optimizer: str,
) -> dict[str, Any]:
    """Types of what is kept and reduced: the narrowest that the framework has and the request allows."""
    names = [name for name in planned(framework.numerics) if name in allow]
    sharded = pins.get("zero_stage") != 0
    narrow = precision not in ("bf16", "fp16")
    setting = framework.optimizers.get(optimizer)
    device = cluster.device
    attends = narrow and device.architecture in FP8_ATTENTION_ON
    if not framework.numerics:
        return {}
    goes = {
        "bf16-moments": optimizer == "adam" and sharded,
        # Layer-wise optimizers of this version lose updates of FP8 weights (Megatron-LM, pull request 5707).
        "fp8-params": narrow and sharded and not (setting and setting.whole),
        "fp8-attention": attends and attends_faster_in_fp8(device, model, precision),
    }
    taken = {name for name in names if goes.get(name, True)}
    return {
        choice.name: (choice.words[-1] if choice.words else True)
        if choice.allow in taken
        else choice.plain
        for choice in NUMERICS
    }


def _fp8_recipes(
    framework: Framework, precision: str, allow: tuple[str, ...]
) -> tuple[str | None, ...]:
    """How FP8 scales may come about. Delayed scaling casts in fewer passes and recomputes fewer modules."""
    if precision != "fp8" or "delayed-scaling" not in planned(framework.numerics):
        return (None,)
    return ("tensorwise", "delayed") if "delayed-scaling" in allow else ("tensorwise",)


def _offloads(
    framework: Framework,
    model: ModelSpec,
    pins: Mapping[str, int | str],
    allow: tuple[str, ...],
) -> tuple[str, ...]:
    """Sets of modules whose activations may lie in the hosts' memory, none first; a pin is leave enough."""
    asked = "activation-offload" in allow or "offload_modules" in pins
    names = planned(framework.offloads)
    modules: tuple[str, ...] = ()
    if not asked:
        return ("none",)
    inputs = tuple(name for name in OFFLOADED_INPUTS if name in names)
    if "activations" in names and not has_mamba(model):
        modules = tuple(
            name
            for name in OFFLOADED_MODULES
            if name != "none" and has_modules(model, name.split("+"))
        )
    return ("none", *inputs, *modules)


def _parameter_offloads(
    framework: Framework,
    cluster: ClusterSpec,
    pins: Mapping[str, int | str],
    allow: tuple[str, ...],
    *,
    alone: bool,
) -> tuple[str, ...]:
    """Where shards of parameters may lie, on the GPUs first; a pin allows it as --allow does."""
    asked = "parameter-offload" in allow or "parameter_offload" in pins
    if not (asked and alone and "parameters" in planned(framework.offloads)):
        return ("none",)
    return ("none", "cpu") if cluster.nvme_gb_per_s is None else ("none", "cpu", "nvme")


def _compilations(framework: Framework, precision: str) -> tuple[bool, ...]:
    """Eager, compiled, or either; quantised layers have to be compiled (torchtitan/trainer.py)."""
    if not framework.eager_stack:
        return (False,)
    return (False, True) if precision == "bf16" else (True,)


def _context_exchanges(
    framework: Framework, model: ModelSpec, cluster: ClusterSpec
) -> tuple[str, ...]:
    """How keys and values may move, the ring first.

    Groups inside rings go without windows, sinks and chosen positions, and not where allocations are
    irregular: the model of slots knows of no groups.
    """
    names = planned(framework.context_exchanges)
    if "a2a" not in names:
        return ("p2p",)
    attends_alike = model.sliding_window is None and not model.attention_sinks
    attends_alike = attends_alike and model.indexer is None
    if HIERARCHICAL in names and attends_alike and not is_irregular(cluster):
        return ("p2p", "a2a", HIERARCHICAL)
    return ("p2p", "a2a")


def _dispatchers(framework: Framework, cluster: ClusterSpec, precision: str) -> tuple[str, ...]:
    """The plain dispatcher, those that deduplicate and run on the device, and the one that gathers all
    tokens, where it goes; not where allocations are irregular.
    """
    device = cluster.device
    gathers = precision in ("bf16", "fp16") and not is_irregular(cluster)
    able = [
        name
        for name, each in framework.dispatchers.items()
        if each.planned and each.deduplicates and each.runs_on(device.architecture, device.name)
    ]
    if gathers and GATHERS in planned(framework.dispatchers):
        able.append(GATHERS)
    return ("alltoall", *able)


def _one_deduplicates(dispatchers: tuple[str, ...], *, captured: bool) -> tuple[str, ...]:
    """The dispatchers with one for all that deduplicate, as these have the same price: the last where graphs
    of the whole step may be chosen.
    """
    alike = [name for name in dispatchers if name not in ("alltoall", GATHERS)]
    unused = alike[:-1] if captured else alike[1:]
    return tuple(name for name in dispatchers if name not in unused)


def _pinned(
    choice: Choice, options: tuple[object, ...], pin: int | str | None
) -> tuple[object, ...]:
    """The values that a pin leaves."""
    if pin is None:
        return options
    value: object = pin == "on" if choice.words == SWITCH else pin
    if value == "deduplicated":
        others = tuple(option for option in options if option not in ("alltoall", GATHERS))
        if others:
            return others[:1]
    if value in options:
        return (value,)
    words = tuple(choice.word(option) for option in options)
    raise InputError(
        f"pin {choice.name}: {shown(pin)} cannot be had with this framework, model, device, precision, "
        f"--without and --allow; allowed: {listed(words)}"
    )


def parse_without(texts: Iterable[str]) -> tuple[str, ...]:
    """Comma-separated names to do without, checked and without repeats."""
    return _parsed(texts, "without", WITHOUT)


def parse_allow(texts: Iterable[str]) -> tuple[str, ...]:
    """Comma-separated names that are allowed, checked and without repeats.

    `all` stands for each that changes the numbers.
    """
    names = _parsed(texts, "allow", (*PERMISSIONS, "all"))
    if "all" not in names:
        return names
    others = (name for name in names if name not in (*ALLOW, "all"))
    return (*ALLOW, *others)


def check_names(
    option: str, names: Iterable[str], allowed: tuple[str, ...], what: str = "is not known"
) -> None:
    """Raises InputError for a name of an option that is not allowed; `what` is said of it."""
    for name in names:
        if name not in allowed:
            raise InputError(
                what,
                where=option,
                value=name,
                did_you_mean=near_miss(name, allowed),
                allowed=allowed,
            )


def _parsed(texts: Iterable[str], option: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    check_names(option, names, allowed)
    return tuple(dict.fromkeys(names))
