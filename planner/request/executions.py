"""Execution choices of a request: what may be chosen, pinned or done without, and every combination."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from meshwright.cluster_specs.allocation import is_irregular
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.constraints.memory import NARROW_WITHOUT_OFFLOADING, has_mamba, has_modules
from meshwright.costmodel.execution_names import OFFLOADED_INPUTS, OFFLOADED_MODULES
from meshwright.costmodel.rates import attends_faster_in_fp8
from meshwright.costmodel.workload import GATHERS, HIERARCHICAL, Execution
from meshwright.errors import InputError, listed, refuse_unknown, shown
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
    allowed is never worse, so chosen, but as `offloading` says."""
    offloading: Mapping[str, Any]
    """Numerics beside which an optimizer may lie in the hosts' memory, in place of narrow ones that refuse
    that; empty where none does."""

    def executions(self) -> tuple[Execution, ...]:
        """Every combination, the plainest first; then those for offloaded optimizers."""
        combinations = [
            dict(zip(self.values, values, strict=True)) for values in product(*self.values.values())
        ]
        every = [Execution(**values, **self.fixed) for values in combinations]
        if self.offloading:
            every += [replace(each, **self._beside_offloading(each)) for each in every]
        return tuple(dict.fromkeys(every))

    def for_offloading(self, execution: Execution) -> bool:
        """Whether an execution is there for offloaded optimizers; others are as fast with narrow numerics."""
        return any(getattr(execution, name) != self.fixed[name] for name in self.offloading)

    def _beside_offloading(self, execution: Execution) -> dict[str, Any]:
        """FP8 parameters stay where scales are delayed (`megatron-offload-fp8`)."""
        delayed = execution.fp8_recipe == "delayed"
        return {
            name: value
            for name, value in self.offloading.items()
            if not (delayed and name == "fp8_params")
        }


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

    Overlaps of gradients and of pipelines are on wherever they are legal; those of experts and of tensor
    parallelism are choices.
    Parameters leave the GPUs only where one language model `trains_alone`: no frozen weights, no images and
    no reference.

    Raises
    ------
    InputError
        If a pinned value does not exist in the framework, on the device, or beside `without`.
    """
    able = _Able(
        framework=framework,
        model=model,
        cluster=cluster,
        pins=pins,
        allow=allow,
        precision=precision,
        optimizer=optimizer,
        trains_alone=trains_alone,
    )
    experts, values = model.moe is not None, able.values()
    binding = {name: pin for name, pin in pins.items() if experts or name != "moe_dispatch"}
    chosen: dict[str, tuple[Any, ...]] = {
        choice.name: _pinned(
            choice, _there(choice, values[choice.name], without), binding.get(choice.name)
        )
        for choice in OF_EXECUTION
    }
    hidden = planned(framework.overlaps)
    overlaps = {f"{axis}_overlap": axis in hidden for axis in ("dp", "pp")}
    numerics = able.numerics()
    return ExecutionOptions(
        values=chosen, fixed={**overlaps, **numerics}, offloading=able.beside_offloading(numerics)
    )


def _there(choice: Choice, values: tuple[Any, ...], without: tuple[str, ...]) -> tuple[Any, ...]:
    """The values that are not done without; all of them where none would be left."""
    for word, excluded in choice.without.items():
        if word in without:
            there = (value for value in values if not is_excluded(choice, excluded, value))
            values = tuple(there) or values
    return values


@dataclass(frozen=True, kw_only=True)
class _Able:
    """What framework, model and cluster can do under a request's pins and permissions."""

    framework: Framework
    model: ModelSpec
    cluster: ClusterSpec
    pins: Mapping[str, int | str]
    allow: tuple[str, ...]
    precision: str
    optimizer: str
    trains_alone: bool

    def values(self) -> dict[str, tuple[Any, ...]]:
        """That each choice of an execution may take, plain ones first."""
        framework, model = self.framework, self.model
        hidden = planned(framework.overlaps)
        overlaps_experts = model.moe is not None and model.hybrid_pattern is None
        # User buffers are multicast or IPC handles of other GPUs (NVIDIA/TransformerEngine issues 966 and
        # 1071).
        peers = "peer-access" not in self.cluster.device.lacks
        can_hide = {
            "ep_overlap": overlaps_experts and model.mtp_layers <= 1,
            "tp_overlap": model.attention is None and peers,
        }
        syncs = framework.batch_sync is not None and framework.batch_sync.planned
        return {
            "moe_dispatch": ("alltoall",) if model.moe is None else self._dispatchers(),
            **{
                name: (False, True) if can and BY_NAME[name].entry in hidden else (False,)
                for name, can in can_hide.items()
            },
            "cuda_graph": planned(framework.cuda_graphs),
            "cp_comm": self._context_exchanges(),
            "compiled": self._compilations(),
            "sync_each_batch": (False, True) if syncs else (False,),
            "fp8_recipe": self._fp8_recipes(),
            "offload_modules": self._offloads(),
            "parameter_offload": self._parameter_offloads(),
        }

    def numerics(self) -> dict[str, Any]:
        """Types of what is kept and reduced: the narrowest that the framework has and the request allows."""
        framework = self.framework
        names = [name for name in planned(framework.numerics) if name in self.allow]
        sharded = self.pins.get("zero_stage") != 0
        narrow = self.precision not in ("bf16", "fp16")
        setting = framework.optimizers.get(self.optimizer)
        shards = not (setting and setting.whole)
        device = self.cluster.device
        attends = narrow and device.architecture in FP8_ATTENTION_ON
        if not framework.numerics:
            return {}
        goes = {
            "bf16-moments": self.optimizer == "adam" and sharded,
            # Layer-wise optimizers of this version lose updates of FP8 weights (Megatron-LM, pull request
            # 5707). Megatron-Bridge, which alone starts the other two, reduces gradients whole for them.
            "fp8-params": narrow and sharded and shards,
            "fp8-attention": attends
            and shards
            and not self._adds_up_unsaid()
            and attends_faster_in_fp8(device, self.model, self.precision),
            "te-loss": shards and not self._adds_up_unsaid(),
        }
        taken = {name for name in names if goes.get(name, True)}
        return {
            choice.name: (choice.words[-1] if choice.words else True)
            if choice.allow in taken
            else choice.plain
            for choice in NUMERICS
        }

    def beside_offloading(self, numerics: Mapping[str, Any]) -> dict[str, Any]:
        """The plain ones of those that no offloaded optimizer goes with, where one may be offloaded."""
        may = self.framework.optimizer_offload is not None and self.optimizer == "adam"
        if not may or self.pins.get("optimizer_offload") == 0:
            return {}
        return {
            choice.name: choice.plain
            for choice in NUMERICS
            if choice.allow in NARROW_WITHOUT_OFFLOADING
            and numerics.get(choice.name, choice.plain) != choice.plain
        }

    def _adds_up_unsaid(self) -> bool:
        """Whether Megatron-FSDP may add gradients up at 32 bits, which overrides of Megatron-Bridge do not
        say.
        """
        may_shard = "megatron-fsdp" in self.allow or self.pins.get("zero_stage") in (2, 3)
        return may_shard and "bf16-grads" not in self.allow

    def _fp8_recipes(self) -> tuple[str | None, ...]:
        """How FP8 scales may come about. Delayed scaling casts in fewer passes and recomputes fewer
        modules.
        """
        delays = "delayed-scaling" in planned(self.framework.numerics)
        if self.precision != "fp8" or not delays:
            return (None,)
        return ("tensorwise", "delayed") if "delayed-scaling" in self.allow else ("tensorwise",)

    def _offloads(self) -> tuple[str, ...]:
        """Sets of modules whose activations may lie in the hosts' memory, none first; a pin is leave
        enough.
        """
        names = planned(self.framework.offloads)
        modules: tuple[str, ...] = ()
        if "activation-offload" not in self.allow and "offload_modules" not in self.pins:
            return ("none",)
        inputs = tuple(name for name in OFFLOADED_INPUTS if name in names)
        if "activations" in names and not has_mamba(self.model):
            modules = tuple(
                name
                for name in OFFLOADED_MODULES
                if name != "none" and has_modules(self.model, name.split("+"))
            )
        return ("none", *inputs, *modules)

    def _parameter_offloads(self) -> tuple[str, ...]:
        """Where shards of parameters may lie, on the GPUs first; a pin allows it as --allow does."""
        allowed = "parameter-offload" in self.allow or "parameter_offload" in self.pins
        has_it = "parameters" in planned(self.framework.offloads)
        if not (allowed and self.trains_alone and has_it):
            return ("none",)
        return ("none", "cpu") if self.cluster.nvme_gb_per_s is None else ("none", "cpu", "nvme")

    def _compilations(self) -> tuple[bool, ...]:
        """Eager, compiled, or either; quantised layers have to be compiled (torchtitan/trainer.py)."""
        if not self.framework.eager_stack:
            return (False,)
        return (False, True) if self.precision == "bf16" else (True,)

    def _context_exchanges(self) -> tuple[str, ...]:
        """How keys and values may move, the ring first.

        Groups inside rings go without windows, sinks and chosen positions, and not where allocations are
        irregular: the model of slots knows of no groups.
        """
        names, model = planned(self.framework.context_exchanges), self.model
        if "a2a" not in names:
            return ("p2p",)
        attends_alike = model.sliding_window is None and not model.attention_sinks
        attends_alike = attends_alike and model.indexer is None
        if HIERARCHICAL in names and attends_alike and not is_irregular(self.cluster):
            return ("p2p", "a2a", HIERARCHICAL)
        return ("p2p", "a2a")

    def _dispatchers(self) -> tuple[str, ...]:
        """The plain dispatcher, those that deduplicate and run on the device, and the one that gathers all
        tokens, where it goes; not where allocations are irregular.
        """
        device, dispatchers = self.cluster.device, self.framework.dispatchers
        gathers = self.precision in ("bf16", "fp16") and not is_irregular(self.cluster)
        able = [
            name
            for name, each in dispatchers.items()
            if each.planned and each.deduplicates and each.runs_on(device.architecture, device.name)
        ]
        if gathers and GATHERS in planned(dispatchers):
            able.append(GATHERS)
        return ("alltoall", *able)


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
            return others
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


def _parsed(texts: Iterable[str], option: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    refuse_unknown(names, allowed, where=option, what="is not known")
    return tuple(dict.fromkeys(names))
