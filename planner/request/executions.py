"""Execution choices of a request: what may be chosen, pinned or done without, and every combination."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

from meshwright.cluster_specs.allocation import is_irregular
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.constraints.memory import has_mamba, has_modules
from meshwright.constraints.registry import rules_for
from meshwright.constraints.rule import DeclaredRule, FinishedPlan
from meshwright.costmodel.execution_names import OFFLOADED_INPUTS, OFFLOADED_MODULES
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.rates import attends_faster_in_fp8
from meshwright.costmodel.workload import GATHERS, HIERARCHICAL, Execution, Workload
from meshwright.errors import InputError, listed, refuse_unknown, separate_words, shown
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
    """The choices of an execution that differ from plain; none where there was nothing to choose.

    Parameters
    ----------
    execution
        A choice of None was none: the framework or the model has no such thing.
    """
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
    """Fields of every execution: overlaps that are on wherever they are legal, and numerics, as narrow as is
    allowed, which is never worse where rules let a layout have them."""
    sharded: Mapping[tuple[str | None, int, int], Mapping[str, Any]] = field(default_factory=dict)
    """By FP8 recipe, ZeRO stage and percent of the optimizer offloaded: the narrowest numerics that rules let
    such layouts have. Empty where those of `fixed` always go."""

    def executions(self) -> tuple[Execution, ...]:
        """Every combination, the plainest first, with the narrowest numerics; then with wider ones."""
        combinations = [
            dict(zip(self.values, values, strict=True)) for values in product(*self.values.values())
        ]
        every = [Execution(**values, **self.fixed) for values in combinations]
        if self.sharded:
            narrowest_first = sorted(
                self.sharded.items(),
                key=lambda each: sum(
                    value == BY_NAME[name].plain for name, value in each[1].items()
                ),
            )
            every = [
                replace(each, **numerics)
                for (recipe, *_), numerics in narrowest_first
                for each in every
                if each.fp8_recipe == recipe
            ]
        return tuple(dict.fromkeys(every))

    def goes(self, execution: Execution, pair: tuple[int, int]) -> bool:
        """Whether layouts of a ZeRO stage and a percent of the optimizer offloaded are run so: with other
        numerics they are no faster, or refused.

        Parameters
        ----------
        execution
            One of `executions`.
        pair
            The ZeRO stage and the percent of the optimizer offloaded.
        """
        numerics = self.sharded.get((execution.fp8_recipe, *pair), {})
        return all(getattr(execution, name) == value for name, value in numerics.items())


def with_shardings(
    options: ExecutionOptions,
    pairs: Iterable[tuple[int, int]],
    workload_of: Callable[[Execution], Workload],
) -> ExecutionOptions:
    """The options with the narrowest numerics that rules let layouts of each sharding have.

    Parameters
    ----------
    options
        With the narrowest numerics that are allowed.
    pairs
        Every ZeRO stage and percent of the optimizer offloaded that a layout may have.
    workload_of
        From an execution to the workload that is run so.
    """
    names = {choice.name for choice in NUMERICS}
    narrow = {
        name: value
        for name, value in options.fixed.items()
        if name in names and value != BY_NAME[name].plain
    }
    if not narrow:
        return options

    @cache
    def declared(execution: Execution) -> tuple[Workload, tuple[DeclaredRule, ...]]:
        workload = workload_of(execution)
        rules = (rule for rule in rules_for(workload) if isinstance(rule, DeclaredRule))
        return workload, tuple(rules)

    def broken(pair: tuple[int, int], **run: Any) -> set[str]:
        """Rules that a sharding breaks, whatever the layout beside it."""
        workload, rules = declared(Execution(**{**options.fixed, **run}))
        layout = Layout(zero_stage=pair[0], optimizer_offload=pair[1])
        plan = FinishedPlan(workload=workload, layout=layout, stages=((workload.model.layers,),))
        return {rule.name for rule in rules if rule.check(plan) is not None}

    sharded = {}
    for recipe, pair in product(options.values["fp8_recipe"], pairs):
        taken = {name: BY_NAME[name].plain for name in narrow}
        before = broken(pair, fp8_recipe=recipe, **taken)
        for name, value in narrow.items():
            narrower = {**taken, name: value}
            still = broken(pair, fp8_recipe=recipe, **narrower)
            if still <= before:
                taken, before = narrower, still
        sharded[(recipe, *pair)] = taken
    return replace(options, sharded=sharded)


def _there(choice: Choice, values: tuple[Any, ...], without: tuple[str, ...]) -> tuple[Any, ...]:
    """The values that are not done without; all of them where none would be left."""
    for word, excluded in choice.without.items():
        if word in without:
            there = (value for value in values if not is_excluded(choice, excluded, value))
            values = tuple(there) or values
    return values


@dataclass(frozen=True, kw_only=True)
class RunQuestion:
    """What decides which executions there are: framework, model and cluster under pins and permissions."""

    framework: Framework
    model: ModelSpec
    cluster: ClusterSpec
    pins: Mapping[str, int | str]
    """Choices that are given, by name."""
    without: tuple[str, ...] = ()
    """Words of `choices.WITHOUT`."""
    allow: tuple[str, ...] = ()
    """Words of `choices.PERMISSIONS`."""
    precision: str = "bf16"
    optimizer: str = "adam"
    trains_alone: bool = True
    """Whether one language model is trained: no frozen weights, no images and no reference. Only then may
    parameters leave the GPUs."""

    def options(self) -> ExecutionOptions:
        """What the search may choose.

        Overlaps of gradients and of pipelines are on wherever they are legal; those of experts and of tensor
        parallelism are choices.

        Raises
        ------
        InputError
            If a pinned value does not exist in the framework, on the device, or beside `without`.
        """
        experts, values = self.model.moe is not None, self._values()
        chosen: dict[str, tuple[Any, ...]] = {}
        for choice in OF_EXECUTION:
            there = _there(choice, values[choice.name], self.without)
            binds = experts or choice.name != "moe_dispatch"
            chosen[choice.name] = _pinned(
                choice, there, self.pins.get(choice.name) if binds else None
            )
        chosen["fp8_attention"] = (False, True) if self._attends_in_fp8() else (False,)
        hidden = planned(self.framework.overlaps)
        overlaps = {f"{axis}_overlap": axis in hidden for axis in ("dp", "pp")}
        return ExecutionOptions(values=chosen, fixed={**overlaps, **self._numerics()})

    def _values(self) -> dict[str, tuple[Any, ...]]:
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

    def _numerics(self) -> dict[str, Any]:
        """Types of what is kept and reduced: the narrowest that the framework has and the request allows."""
        framework = self.framework
        names = [name for name in planned(framework.numerics) if name in self.allow]
        if not framework.numerics:
            return {}
        goes = {
            "bf16-moments": self.optimizer == "adam",
            # Layer-wise optimizers of this version lose updates of FP8 weights (Megatron-LM, pull request
            # 5707).
            "fp8-params": self._is_narrow and self._shards_optimizer,
            "te-loss": self._shards_optimizer,
        }
        taken = {name for name in names if goes.get(name, True)}
        return {
            choice.name: (choice.words[-1] if choice.words else True)
            if choice.allow in taken
            else choice.plain
            for choice in NUMERICS
            if choice.name != "fp8_attention"
        }

    def _attends_in_fp8(self) -> bool:
        """Whether attention may run in FP8; not always faster, as casts take longer than it spares of short
        sequences.
        """
        device, wanted = self.cluster.device, "fp8-attention"
        return (
            wanted in self.allow
            and wanted in planned(self.framework.numerics)
            and self._is_narrow
            and self._shards_optimizer
            and device.architecture in FP8_ATTENTION_ON
            and attends_faster_in_fp8(device, self.model, self.precision)
        )

    @property
    def _is_narrow(self) -> bool:
        return self.precision not in ("bf16", "fp16")

    @property
    def _shards_optimizer(self) -> bool:
        """Whether the optimizer leaves gradients in shards: Megatron-Bridge, which alone starts FP8 attention
        and Transformer Engine's loss, reduces them whole for others.
        """
        setting = self.framework.optimizers.get(self.optimizer)
        return not (setting and setting.whole)

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
        remaining = tuple(option for option in options if option not in ("alltoall", GATHERS))
        if remaining:
            return remaining
    if value in options:
        return (value,)
    words = tuple(choice.word(option) for option in options)
    raise InputError(
        f"pin {choice.name}: {shown(pin)} cannot be had with this framework, model, device, precision, "
        f"--without and --allow; allowed: {listed(words)}"
    )


def parse_without(texts: Iterable[str] | str) -> tuple[str, ...]:
    """Comma-separated names to do without, checked and without repeats.

    Parameters
    ----------
    texts
        A text such as `deepep,cuda-graph`, or several.
    """
    names = separate_words(texts, "without")
    refuse_unknown(names, WITHOUT, where="without", what="is not known")
    return names


def parse_allow(texts: Iterable[str] | str) -> tuple[str, ...]:
    """Comma-separated names that are allowed, checked and without repeats.

    `all` stands for each that changes the numbers.

    Parameters
    ----------
    texts
        A text such as `bf16-grads,fp8-params`, or several.
    """
    names = separate_words(texts, "allow")
    refuse_unknown(names, (*PERMISSIONS, "all"), where="allow", what="is not known")
    if "all" not in names:
        return names
    rest = (name for name in names if name not in (*ALLOW, "all"))
    return (*ALLOW, *rest)
