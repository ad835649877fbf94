"""Options that the public functions share: their names, their types and what stands for one left out, once.

`meshwright.plan` says what each means. A function that takes them as `**options` shows them one by one:

>>> import inspect, meshwright
>>> inspect.signature(meshwright.plan).parameters["precision"]
<Parameter "precision: 'Precision' = 'bf16'">
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from inspect import Parameter, signature
from os import PathLike
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar

from meshwright.costmodel.execution_names import DEFAULT_MEMORY_RISK, PRETRAINING

if TYPE_CHECKING:
    from meshwright.costmodel.calibration import Calibration
    from meshwright.costmodel.execution_names import (
        Dispatcher,
        Method,
        Optimizer,
        PlanObjective,
        Precision,
        ReferencePlace,
        StepKindName,
    )
    from meshwright.costmodel.losses import LossName
    from meshwright.frameworks.record import FrameworkName

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
FilePath = str | PathLike[str]


class TrainingOptions(TypedDict, total=False):
    """How a model is trained, on whatever it is planned."""

    precision: Precision
    optimizer: Optimizer
    framework: FrameworkName
    pin: Mapping[str, int | str] | str
    forbid: Iterable[str] | str
    memory_risk: float
    train: str
    lora_rank: int | None
    lora_targets: Iterable[str] | str | None
    loss: LossName | None
    kind: StepKindName
    reference: ReferencePlace | None


class PlanOptions(TrainingOptions, total=False):
    """Those of one plan, beside its model, its cluster and its batch."""

    gpus: int | None
    seq_len: int | None
    lengths: FilePath | None
    pack_size: int | None
    packing: str | None
    hybrid_cp: bool
    reserve_gib: float
    expert_loads: FilePath | None
    moe_dispatch: Dispatcher | None
    without: Iterable[str] | str
    allow: Iterable[str] | str
    inside_domain: Iterable[str] | str
    max_cut_use: float
    calibration: FilePath | Calibration | None
    objective: PlanObjective
    method: Method
    top: int
    time_limit_s: float | None
    seed: int
    nodes: Collection[str] | str | None
    image_tokens: int
    images_per_sequence: int | None
    freeze_encoder: bool


PLAIN: Mapping[str, Any] = {
    "precision": "bf16",
    "optimizer": "adam",
    "framework": "megatron",
    "pin": "",
    "memory_risk": DEFAULT_MEMORY_RISK,
    "train": "full",
    "kind": PRETRAINING,
    "hybrid_cp": False,
    "reserve_gib": 0.0,
    "max_cut_use": 1.0,
    "objective": "nominal",
    "method": "cp-sat",
    "top": 1,
    "seed": 0,
    "image_tokens": 0,
    "freeze_encoder": False,
    **dict.fromkeys(("forbid", "without", "allow", "inside_domain"), ()),
}
"""What stands for an option that is left out; None for the others."""


def takes(
    options: type[TrainingOptions],
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """A decorator: the signature of a function with `**options` names each of them.

    Parameters
    ----------
    options
        `TrainingOptions` or `PlanOptions`, as the function's last parameter says for type checkers.
    """
    types = {name: each.__forward_arg__ for name, each in options.__annotations__.items()}

    def shown_in_full(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        short = signature(function)
        own = [each for each in short.parameters.values() if each.kind != Parameter.VAR_KEYWORD]
        more = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=PLAIN.get(name), annotation=annotation)
            for name, annotation in types.items()
        ]
        function.__signature__ = short.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return function

    return shown_in_full
