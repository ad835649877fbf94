"""Why there is no plan, as fields and as the sentences made of them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

_DOC = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ConflictingRule(BaseModel):
    """A rule, a pin or a forbidden choice that cannot be kept together with the others of the conflict."""

    model_config = _DOC

    kind: Literal["rule", "pin", "forbid", "without", "layer-split"]
    """`layer-split`: layouts fit in memory on average, but no split of the layers fits on every rank."""
    rule: str
    """Name of the rule, of the pinned field or of the forbidden choice."""
    pinned: int | str | None = None
    """Value of a pin."""
    missed_by: float | None = None
    """The least by which a layout that keeps all other rules misses the limit, in `unit`."""
    limit: float | None = None
    """In `unit`; null where the limit is part of the rule."""
    unit: str | None = None
    words: str | None = None
    """What the rule says of the layout that misses it by least, and what would mend that."""
    allowed: list[str] = Field(default_factory=list)
    """Values that the rule allows, where they can be listed."""


class SmallestChange(BaseModel):
    """A single change to the request with which a plan was found."""

    model_config = _DOC

    change: Literal[
        "pin",
        "drop-pin",
        "allow",
        "do-with",
        "precision",
        "reserve-gib",
        "memory-risk",
        "gpus",
        "device-hbm-gib",
        "host-memory-gib",
        "inside-domain",
        "max-cut-use",
    ]
    field: str | None = None
    """The pin that is changed or dropped, the choice that is allowed, or the axes that may leave a domain."""
    value: int | float | str | None = None
    """What to take: a pin's value, a precision, GiB or GPUs."""
    asked: int | float | str | None = None
    """What the request has in its place."""


class Infeasible(BaseModel):
    """Rules that together leave no layout, and the smallest changes that would."""

    model_config = _DOC

    conflict: list[str]
    """A sentence for each of `rules`."""
    smallest_changes: list[str]
    """A sentence for each of `changes`."""
    rules: list[ConflictingRule] = Field(default_factory=list)
    changes: list[SmallestChange] = Field(default_factory=list)


def rule_sentence(conflicting: ConflictingRule, framework: str, layers: int) -> str:
    """One line for a rule of the conflict; `framework` and `layers` are those of the request."""
    name = conflicting.rule
    if conflicting.kind == "pin":
        return f"pin {name}={conflicting.pinned}"
    if conflicting.kind in ("forbid", "without"):
        return f"{conflicting.kind} {name}"
    if conflicting.kind == "layer-split":
        return (
            f"{name}: layouts fit on average, but no split of the {layers} layers leaves room for the "
            "embedding, head and logits on the first and last stage"
        )
    if conflicting.allowed:
        return f"{name}: {framework} runs {', '.join(conflicting.allowed)}"
    if conflicting.words is not None:
        return f"{name}: {conflicting.words}"
    return name + _missed_text(conflicting)


def _missed_text(conflicting: ConflictingRule) -> str:
    """By how much a rule is missed, where that is known."""
    if conflicting.missed_by is None:
        return ""
    if conflicting.unit == "GiB" and conflicting.limit is not None:
        if conflicting.limit <= 0:
            needed_gib = conflicting.limit + conflicting.missed_by
            return (
                f": the fullest GPU needs at least {needed_gib:.1f} GiB, and nothing is left usable"
            )
        return (
            f": the fullest GPU needs at least {conflicting.missed_by:.1f} GiB beyond the usable "
            f"{conflicting.limit:.1f}"
        )
    return f": missed by at least {conflicting.missed_by:g} {conflicting.unit}"


def change_sentence(change: SmallestChange) -> str:
    """One line for a change, in the imperative."""
    match change.change:
        case "pin":
            words = f"pin {change.field}={change.value}, not {change.asked}"
        case "drop-pin":
            words = f"drop the pin {change.field}={change.asked}"
        case "allow":
            words = f"allow {change.field}"
        case "do-with":
            words = f"take {change.field} out of --without"
        case "precision":
            words = f"train in {change.value}, not {change.asked}"
        case "reserve-gib":
            words = f"reserve {change.value:.1f} GiB or less, not {change.asked:g}"
        case "memory-risk":
            words = (
                f"take a memory risk of {change.value:g} (the prediction as it stands), "
                f"not {change.asked:g}"
            )
        case "gpus":
            words = f"take {change.value} GPUs, not {change.asked}"
        case "device-hbm-gib":
            words = f"take GPUs with at least {change.value:g} GiB"
        case "host-memory-gib":
            words = (
                f"take nodes whose hosts have at least {change.value:g} GiB, not {change.asked:g}"
            )
        case "inside-domain":
            words = f"let the groups of {change.field} leave the NVLink domain"
        case "max-cut-use":
            words = f"let cuts be used to {change.value:g} of their capacity, not {change.asked:g}"
    return words
