"""Execution choices of a request: what may be chosen, pinned or done without, and every combination."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from meshwright.cluster_specs.allocation import is_irregular
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.constraints.memory import has_mamba, has_modules
from meshwright.costmodel.execution_names import DISPATCHERS, OFFLOADED_MODULES
from meshwright.costmodel.workload import GATHERS, HIERARCHICAL, Execution
from meshwright.errors import InputError, listed, near_miss, shown
from meshwright.frameworks.catalog import RECORDS, planned
from meshwright.frameworks.record import Framework, TokenDispatcher
from meshwright.model_specs.schema import ModelSpec

SWITCH = ("on", "off")
EXECUTION_PINS: Mapping[str, tuple[str, ...]] = {
    "moe_dispatch": DISPATCHERS,
    "ep_overlap": SWITCH,
    "tp_overlap": SWITCH,
    "cuda_graph": ("none", "partial", "full"),
    "cp_comm": ("p2p", "a2a", "a2a+p2p"),
    "compiled": SWITCH,
    "fp8_recipe": ("tensorwise", "delayed"),
    "offload_modules": OFFLOADED_MODULES,
}
"""Execution choices that can be pinned, with their values. `deduplicated` is DeepEP or HybridEP."""

WITHOUT = (
    "deepep",
    "hybridep",
    "allgather",
    "ep-overlap",
    "tp-overlap",
    "cuda-graph",
    "full-graph",
    "cp-a2a",
    "cp-hierarchical",
    "compile",
)
"""What a user may lack, or not want."""

ALLOW = tuple(dict.fromkeys(name for record in RECORDS for name in record.numerics))
"""What changes the numbers of a run, so that a plan chooses it only where it is allowed."""

ALLOW_HOST = ("activation-offload",)
"""What fills the memory of hosts, which no cluster file tells the size of: chosen only where allowed."""

ALLOW_PLACED = ("expert-placement",)
"""What a launch of the framework does not do by itself: experts where measured loads want them."""

FP8_ATTENTION_ON = ("hopper", "blackwell")
"""Architectures on which cuDNN attends in FP8 (cuDNN Frontend, Attention, support matrix of 9.18.1)."""

PLAIN: Mapping[str, object] = {
    "moe_dispatch": "alltoall",
    "ep_overlap": False,
    "tp_overlap": False,
    "cuda_graph": "none",
    "cp_comm": "p2p",
    "compiled": False,
    "fp8_recipe": "tensorwise",
    "offload_modules": "none",
}
"""The value of each choice that asks nothing of the software."""


def choices_made(execution: Execution) -> dict[str, str | bool]:
    """The choices of an execution that differ from plain; none where there was nothing to choose."""
    values = {name: getattr(execution, name) for name in EXECUTION_PINS}
    return {
        name: value for name, value in values.items() if value is not None and value != PLAIN[name]
    }


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """The values that each choice may take, plain ones first."""

    moe_dispatch: tuple[Any, ...]
    ep_overlap: tuple[bool, ...]
    tp_overlap: tuple[bool, ...]
    cuda_graph: tuple[Any, ...]
    cp_comm: tuple[Any, ...]
    compiled: tuple[bool, ...]
    fp8_recipe: tuple[Any, ...]
    offload_modules: tuple[Any, ...]
    dp_overlap: bool
    pp_overlap: bool
    numerics: Mapping[str, Any]
    """Types of gradients, states and parameters, and the loss: what is allowed is never worse, so chosen."""

    def executions(self) -> tuple[Execution, ...]:
        """Every combination, the plainest first."""
        names = tuple(EXECUTION_PINS)
        return tuple(
            Execution(
                **dict(zip(names, values, strict=True)),
                dp_overlap=self.dp_overlap,
                pp_overlap=self.pp_overlap,
                **self.numerics,
            )
            for values in product(*(getattr(self, name) for name in names))
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
) -> ExecutionOptions:
    """What the search may choose.

    DeepEP and HybridEP have the same price, and graphs of the whole step hold the second alone: where both
    run, HybridEP stands for both if such graphs may be chosen, else DeepEP. Overlaps of gradients and of
    pipelines are on wherever they are legal; those of experts and of tensor parallelism are choices.

    Raises
    ------
    InputError
        If a pinned value does not exist in the framework, on the device, or beside `without`.
    """
    hidden = planned(framework.overlaps)
    tensor = "tp" in hidden and model.attention is None and "tp-overlap" not in without
    experts = model.moe is not None
    expert_overlap = "ep" in hidden and experts and "ep-overlap" not in without
    expert_overlap = expert_overlap and model.hybrid_pattern is None
    graphs = _graphs(framework, without)
    dispatchers = _dispatchers(framework, cluster, without) if experts else ()
    gathering = _gathering(framework, cluster, precision, without) if experts else ()
    values: dict[str, tuple[object, ...]] = {
        "moe_dispatch": ("alltoall", *dispatchers, *gathering),
        "ep_overlap": (False, True) if expert_overlap and model.mtp_layers <= 1 else (False,),
        "tp_overlap": (False, True) if tensor else (False,),
        "cuda_graph": graphs,
        "cp_comm": _context_exchanges(framework, model, cluster, without),
        "compiled": _compilations(framework, precision, without),
        "fp8_recipe": _fp8_recipes(framework, precision, allow),
        "offload_modules": _offloads(framework, model, pins, allow),
    }
    chosen: dict[str, tuple[Any, ...]] = {
        name: _pinned(name, options, pins.get(name) if experts or name != "moe_dispatch" else None)
        for name, options in values.items()
    }
    if "moe_dispatch" not in pins and len(dispatchers) > 1:
        captured = "full" in chosen["cuda_graph"]
        chosen["moe_dispatch"] = ("alltoall", dispatchers[-1 if captured else 0], *gathering)
    return ExecutionOptions(
        dp_overlap="dp" in hidden,
        pp_overlap="pp" in hidden,
        numerics=_numerics(
            framework, cluster, pins, allow, precision=precision, optimizer=optimizer
        ),
        **chosen,
    )


def _numerics(
    framework: Framework,
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
    attends = narrow and cluster.device.architecture in FP8_ATTENTION_ON
    if not framework.numerics:
        return {}
    return {
        "gradient_dtype": "bf16" if "bf16-grads" in names else "fp32",
        "moment_dtype": (
            "bf16" if "bf16-moments" in names and optimizer == "adam" and sharded else "fp32"
        ),
        "fp8_params": "fp8-params" in names and narrow and sharded,
        "fp8_attention": "fp8-attention" in names and attends,
        "te_loss": "te-loss" in names,
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
    if not asked or "activations" not in planned(framework.offloads) or has_mamba(model):
        return ("none",)
    some = (name for name in OFFLOADED_MODULES if name != "none")
    return ("none", *(name for name in some if has_modules(model, name.split("+"))))


def _compilations(
    framework: Framework, precision: str, without: tuple[str, ...]
) -> tuple[bool, ...]:
    """Eager, compiled, or either; quantised layers have to be compiled (torchtitan/trainer.py)."""
    if not framework.eager_stack:
        return (False,)
    if precision != "bf16":
        return (True,)
    return (False,) if "compile" in without else (False, True)


def _context_exchanges(
    framework: Framework, model: ModelSpec, cluster: ClusterSpec, without: tuple[str, ...]
) -> tuple[str, ...]:
    """How keys and values may move, the ring first.

    Groups inside rings go without windows, sinks and chosen positions, and not where allocations are
    irregular: the model of slots knows of no groups.
    """
    names = planned(framework.context_exchanges)
    if "cp-a2a" in without or "a2a" not in names:
        return ("p2p",)
    attends_alike = model.sliding_window is None and not model.attention_sinks
    attends_alike = attends_alike and model.indexer is None
    grouped = HIERARCHICAL in names and "cp-hierarchical" not in without
    if grouped and attends_alike and not is_irregular(cluster):
        return ("p2p", "a2a", HIERARCHICAL)
    return ("p2p", "a2a")


def _graphs(framework: Framework, without: tuple[str, ...]) -> tuple[str, ...]:
    """What CUDA graphs may hold, nothing first."""
    names = planned(framework.cuda_graphs)
    if "cuda-graph" in without:
        return names[:1]
    return tuple(name for name in names if name != "full" or "full-graph" not in without)


def _dispatchers(
    framework: Framework, cluster: ClusterSpec, without: tuple[str, ...]
) -> tuple[str, ...]:
    """Dispatchers beside the plain one that the framework has and the device runs."""
    device = cluster.device

    def usable(name: str, dispatcher: TokenDispatcher) -> bool:
        runs = dispatcher.runs_on(device.architecture, device.name)
        return dispatcher.deduplicates and dispatcher.planned and runs and name not in without

    return tuple(name for name, each in framework.dispatchers.items() if usable(name, each))


def _gathering(
    framework: Framework, cluster: ClusterSpec, precision: str, without: tuple[str, ...]
) -> tuple[str, ...]:
    """The dispatcher that gathers all tokens, where it goes; not where allocations are irregular."""
    dispatcher = framework.dispatchers.get(GATHERS)
    planned_here = dispatcher is not None and dispatcher.planned and GATHERS not in without
    goes = planned_here and precision in ("bf16", "fp16") and not is_irregular(cluster)
    return (GATHERS,) if goes else ()


def _pinned(name: str, options: tuple[object, ...], pin: int | str | None) -> tuple[object, ...]:
    """The values that a pin leaves."""
    if pin is None:
        return options
    value: object = pin == "on" if EXECUTION_PINS[name] == SWITCH else pin
    if value == "deduplicated":
        others = tuple(option for option in options if option not in ("alltoall", GATHERS))
        if others:
            return others[:1]
    if value in options:
        return (value,)
    words = tuple(_word(option) for option in options)
    raise InputError(
        f"pin {name}: {shown(pin)} cannot be had with this framework, model, device, precision, --without "
        f"and --allow; allowed: {listed(words)}"
    )


def _word(option: object) -> str:
    if option is None:
        return "none"
    return ("off", "on")[option] if isinstance(option, bool) else str(option)


def parse_without(texts: Iterable[str]) -> tuple[str, ...]:
    """Comma-separated names to do without, checked and without repeats."""
    return _parsed(texts, "without", WITHOUT)


def parse_allow(texts: Iterable[str]) -> tuple[str, ...]:
    """Comma-separated names that are allowed, checked and without repeats.

    `all` stands for each that changes the numbers.
    """
    others = (*ALLOW_HOST, *ALLOW_PLACED)
    names = _parsed(texts, "allow", (*ALLOW, *others, "all"))
    if "all" not in names:
        return names
    return (*ALLOW, *(name for name in names if name in others))


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
