"""Every choice of a plan, declared once: how it is asked for, what its plain value is, who says it.

Pins, `--forbid`, `--without` and `--allow`, the space of layouts and its report, documents, conflicts, the
literals of the CP-SAT model, neighbours, waterfalls, tables and run files go through this table. Values are
not here: the record of a framework has them (`Choice.setting`), and what a choice costs, keeps in memory and
goes with is said by the cost model and the rules.

>>> [choice.name for choice in CHOICES if "activation-offload" in choice.allow]
['offload_modules']
>>> BY_NAME["zero_stage"].forbids["zero-2"]
(2,)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Literal

from meshwright.costmodel.execution_names import (
    DISPATCHERS,
    OFFLOADED_MODULES,
    PARAMETER_OFFLOADS,
    RECOMPUTE_NAMES,
    SCHEDULE_NAMES,
)

if TYPE_CHECKING:
    from meshwright.frameworks.record import Framework, Setting

SWITCH = ("on", "off")
ALL_BUT_PLAIN: tuple[int | str, ...] = ()
"""Of the values that a word excludes: every one but the plain value."""
Excluded = Mapping[str, tuple[int | str, ...]]
"""By word, the values that it takes out of a choice."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One choice of a plan."""

    name: str
    """Of the field of `Layout` or `Execution`, in documents and in pins."""
    of: Literal["layout", "execution", "numerics"] = "layout"
    """Numerics are fields of an `Execution` that change the numbers of a run: a plan takes them wherever they
    are allowed, and no pin names them."""
    plain: int | str | bool = 1
    """The value that asks nothing of the software beyond what every layout needs."""
    words: tuple[str, ...] = ()
    """What a pin may say; a whole number from `low` to `high` where there are none."""
    low: int = 1
    high: int = 1_048_576
    forbids: Excluded = field(default_factory=dict)
    """Words of `--forbid`."""
    without: Excluded = field(default_factory=dict)
    """Words of `--without`."""
    allow: str = ""
    """The word of `--allow` without which only the plain value is taken."""
    allow_some: str = ""
    """The word of `--allow` for values that the record of a framework marks with it; a pin takes them too."""
    record: str = ""
    """Field of the framework's record that says which flag asks for it; empty where flags say it of many
    choices together."""
    entry: str = ""
    """Key in that field; the value itself where it is empty and the field holds several."""
    searched: str = ""
    """Field of a plan's space with the values that were searched."""
    decided: Literal["degrees", "pipeline", "sharding", "room", ""] = ""
    """When a search decides it: with the degrees, with the pipeline of given degrees, with the ZeRO stage, or
    last, since it makes room in memory and nothing else. Empty beside layouts."""
    doubled: bool = False
    """Whether twice and half its value are its neighbours."""
    pinned_near: bool = False
    """Whether other numbers are tried near a pin that leaves no plan."""
    compared: bool = False
    """Whether a plan says what it brings over its plain value."""
    label: str = ""
    """In sentences, where the name does not do."""
    column: str = ""
    """Title of its column in a table of layouts; without one it has none."""
    unit: str = ""
    """Of a number."""
    shown_for: str = ""
    """Columns of one such word are left out where all of them are plain; others always stand."""
    run_file: str = ""
    """Field of a run file that says it under another name."""

    @property
    def title(self) -> str:
        """How sentences call it."""
        return self.label or self.name.replace("_", " ")

    @property
    def is_pinned(self) -> bool:
        """Whether a pin can name it."""
        return self.of != "numerics"

    def word(self, value: object) -> str:
        """A value as a pin writes it.

        Parameters
        ----------
        value
            Of `Layout` or `Execution`; truth values become on and off.
        """
        if value is None:
            return "none"
        if isinstance(value, float):
            return f"{value:g}"
        return SWITCH[not value] if isinstance(value, bool) else str(value)

    def setting(self, framework: Framework, value: object) -> Setting | None:
        """What a framework's record says of a value; None where it says nothing.

        Parameters
        ----------
        framework
            Whose record is asked.
        value
            As a pin writes it.
        """
        if not self.record:
            return None
        setting: Setting | Mapping[object, Setting] | None = getattr(framework, self.record)
        if isinstance(setting, Mapping):
            return setting.get(value) or setting.get(self.entry)
        return setting


def _degree(name: str, *, forbidden: bool = True, **settings: Any) -> Choice:
    """A degree of parallelism, which is 1 where it is not used."""
    forbids: Excluded = {name: ALL_BUT_PLAIN} if forbidden else {}
    return Choice(
        name=name,
        forbids=forbids,
        record="axes",
        entry=name,
        searched=name,
        decided="degrees",
        column=name,
        **settings,
    )


def _execution(name: str, **settings: Any) -> Choice:
    """A choice of how a layout is run."""
    return Choice(name=name, of="execution", compared=True, **settings)


def _switch(name: str, **settings: Any) -> Choice:
    return _execution(name, plain=False, words=SWITCH, **settings)


def _numerics(name: str, allow: str, words: tuple[str, ...] = (), run_file: str = "") -> Choice:
    """A type, of a plain and a narrow one, or a switch; the record has it under the word of `--allow`."""
    return Choice(
        name=name,
        of="numerics",
        plain=words[0] if words else False,
        words=words,
        allow=allow,
        record="numerics",
        entry=allow,
        run_file=run_file,
    )


_CUDA_GRAPHS: Excluded = {"cuda-graph": ALL_BUT_PLAIN, "full-graph": ("full",)}
_EXCHANGES: Excluded = {"cp-a2a": ("a2a", "a2a+p2p"), "cp-hierarchical": ("a2a+p2p",)}
_RECOMPUTATIONS: Excluded = {
    "recompute": ALL_BUT_PLAIN,
    "selective-recompute": ("selective",),
    "full-recompute": ("full",),
}

CHOICES: tuple[Choice, ...] = (
    _degree("tp", doubled=True, pinned_near=True),
    _degree("cp", doubled=True, pinned_near=True),
    _degree("pp", doubled=True, pinned_near=True),
    _degree("dp", doubled=True, pinned_near=True, forbidden=False),
    _degree("ep", doubled=True, pinned_near=True, shown_for="experts"),
    _degree("etp", shown_for="experts"),
    Choice(
        name="vpp",
        forbids={"interleaving": ALL_BUT_PLAIN},
        record="axes",
        entry="vpp",
        decided="pipeline",
        doubled=True,
        column="vpp",
    ),
    Choice(
        name="micro_batch",
        decided="degrees",
        doubled=True,
        pinned_near=True,
        label="micro-batch",
        column="micro",
    ),
    Choice(
        name="zero_stage",
        plain=0,
        low=0,
        high=3,
        forbids={f"zero-{stage}": (stage,) for stage in range(4)},
        allow_some="megatron-fsdp",
        record="zero_stages",
        searched="zero_stages",
        decided="sharding",
        label="ZeRO stage",
        column="ZeRO",
    ),
    Choice(
        name="shard_groups",
        forbids={"shard-groups": ALL_BUT_PLAIN},
        record="shard_groups",
        searched="shard_groups",
        decided="room",
        compared=True,
        column="groups",
        shown_for="groups",
    ),
    Choice(
        name="optimizer_offload",
        plain=0,
        low=0,
        high=100,
        forbids={"optimizer-offload": ALL_BUT_PLAIN},
        record="optimizer_offload",
        searched="optimizer_offloads",
        decided="room",
        compared=True,
        label="% of the optimizer offloaded",
        column="offload",
        unit="%",
        shown_for="offload",
    ),
    Choice(
        name="schedule",
        plain="1f1b",
        words=SCHEDULE_NAMES,
        record="schedules",
        searched="schedules",
        decided="pipeline",
    ),
    Choice(
        name="recompute",
        plain="none",
        words=RECOMPUTE_NAMES,
        forbids=_RECOMPUTATIONS,
        searched="recompute",
        decided="room",
        column="recompute",
    ),
    _execution(
        "moe_dispatch",
        plain="alltoall",
        words=DISPATCHERS,
        without={name: (name,) for name in ("deepep", "hybridep", "allgather")},
        record="dispatchers",
    ),
    _switch("ep_overlap", without={"ep-overlap": (True,)}, record="overlaps", entry="ep"),
    _switch("tp_overlap", without={"tp-overlap": (True,)}, record="overlaps", entry="tp"),
    _execution(
        "cuda_graph",
        plain="none",
        words=("none", "partial", "full"),
        without=_CUDA_GRAPHS,
        record="cuda_graphs",
    ),
    _execution(
        "cp_comm",
        plain="p2p",
        words=("p2p", "a2a", "a2a+p2p"),
        without=_EXCHANGES,
        record="context_exchanges",
    ),
    _switch("compiled", without={"compile": (True,)}, record="compilation"),
    _switch(
        "sync_each_batch",
        without={"sync-each-batch": (True,)},
        record="batch_sync",
        label="gradients reduced each micro-batch",
    ),
    _numerics("gradient_dtype", "bf16-grads", ("fp32", "bf16")),
    _numerics("moment_dtype", "bf16-moments", ("fp32", "bf16")),
    _numerics("fp8_params", "fp8-params"),
    _execution(
        "fp8_recipe",
        plain="tensorwise",
        words=("tensorwise", "delayed"),
        allow="delayed-scaling",
        record="numerics",
        entry="delayed-scaling",
    ),
    _execution(
        "offload_modules",
        plain="none",
        words=OFFLOADED_MODULES,
        allow="activation-offload",
        record="offloads",
        entry="activations",
    ),
    _execution(
        "parameter_offload",
        plain="none",
        words=PARAMETER_OFFLOADS,
        allow="parameter-offload",
        record="offloads",
        entry="parameters",
    ),
    _numerics("fp8_attention", "fp8-attention"),
    _numerics("te_loss", "te-loss", run_file="fused_loss"),
)
"""In the order of documents and tables; executions are tried in it, plain values first."""

BY_NAME: Mapping[str, Choice] = {choice.name: choice for choice in CHOICES}
OF_LAYOUT = tuple(choice for choice in CHOICES if choice.of == "layout")
OF_EXECUTION = tuple(choice for choice in CHOICES if choice.of == "execution")
NUMERICS = tuple(choice for choice in CHOICES if choice.of == "numerics")
NUMBERS = tuple(choice.name for choice in OF_LAYOUT if not choice.words)
"""Choices of a layout that are whole numbers, in documents as in `Layout`."""
DEGREES = tuple(
    choice.name for choice in CHOICES if choice.record == "axes" and choice.decided == "degrees"
)
_AXES = {"tensor": "tp", "pipeline": "pp", "context": "cp", "data": "dp", "expert": "ep"}
_DEGREE = re.compile(
    r"(?P<axis>tp|pp|cp|dp|ep|tensor|pipeline|context|data|expert)"
    r"([-_ ]model)?([-_ ]parallel(ism)?)?([-_ ](size|degree))?"
)


def degree_meant(word: str) -> str | None:
    """The degree that other programs call so, or None.

    Parameters
    ----------
    word
        As a user wrote it.

    >>> degree_meant("tensor_model_parallel_size"), degree_meant("pipeline-parallel"), degree_meant("vpp")
    ('tp', 'pp', None)
    """
    degree = _DEGREE.fullmatch(word.lower())
    return _AXES.get(degree["axis"], degree["axis"]) if degree else None


EXPERT_DEGREES = tuple(name for name in DEGREES if BY_NAME[name].shown_for == "experts")
MAKING_ROOM = tuple(choice.name for choice in OF_LAYOUT if choice.decided == "room")
DOUBLED = tuple(choice.name for choice in CHOICES if choice.doubled)
CHANGED_ALONE = tuple(choice.name for choice in OF_LAYOUT if choice.name not in ("dp", "recompute"))
"""Choices of a layout that can change while all others stay: dp follows from the GPUs, and recomputation is
of so many layers besides."""
PINS = tuple(choice.name for choice in CHOICES if choice.is_pinned)

IDLE_GPUS = "idle-gpus"
"""What can be forbidden and is no value of a choice: GPUs that a layout leaves over."""
_FORBIDDEN = {word: choice for choice in CHOICES for word in choice.forbids}
FORBIDS = (*_FORBIDDEN, IDLE_GPUS)
ALLOW = tuple(choice.allow for choice in CHOICES if choice.record == "numerics")
"""What changes the numbers of a run, so that a plan chooses it only where it is allowed."""
ALLOW_HOST = tuple(
    choice.allow for choice in CHOICES if choice.allow and choice.record != "numerics"
)
"""What fills the memory of hosts, which no cluster file tells the size of: chosen only where allowed."""
ALLOW_PLACED = ("expert-placement",)
"""What a launch of the framework does not do by itself: experts where measured loads want them."""
ALLOW_UNMEASURED = tuple(choice.allow_some for choice in CHOICES if choice.allow_some)
"""What no measured run stands behind: chosen only where allowed or pinned."""
PERMISSIONS = (*ALLOW, *ALLOW_HOST, *ALLOW_PLACED, *ALLOW_UNMEASURED)
WITHOUT = tuple(word for choice in CHOICES for word in choice.without)
"""What a user may lack, or not want."""


def is_forbidden(word: str, value_of: Callable[[str], Any]) -> Any:
    """Whether layouts make the choice that a word of `--forbid` excludes, but for idle GPUs.

    Parameters
    ----------
    word
        One of `FORBIDS`.
    value_of
        From the name of a choice to its value, as a pin writes it; arrays of values give an array.
    """
    choice = _FORBIDDEN[word]
    return is_excluded(choice, choice.forbids[word], value_of(choice.name))


def is_excluded(choice: Choice, excluded: tuple[int | str, ...], value: Any) -> Any:
    """Whether a value of a choice, or each of an array of them, is among those that a word excludes.

    Parameters
    ----------
    choice
        That the value is of.
    excluded
        Values that the word takes out; `ALL_BUT_PLAIN` for every one but the plain value.
    value
        As a pin writes it, or an array of such.
    """
    if excluded == ALL_BUT_PLAIN:
        return value != choice.plain
    return reduce(or_, (value == each for each in excluded))
