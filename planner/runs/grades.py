"""A plan against the targets that guides to distributed training set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from meshwright.planner.runs.predicted import LayoutDoc, Predicted

Mark = Literal["excellent", "good", "below target"]


class Grade(BaseModel):
    """One figure of a plan beside its target."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: str
    value: float
    target: float
    is_share: bool
    """Whether the figure is a fraction of 1, or else a ratio."""
    mark: Mark


@dataclass(frozen=True, kw_only=True)
class GradeTargets:
    """Targets, as fractions, of the guides to distributed training that docs/worked_examples.md checks."""

    mfu: float = 0.40
    excellent_mfu: float = 0.50
    bubble: float = 0.10
    """Most of the step that a pipeline may idle."""
    hidden: float = 0.80
    """Least of the communication that should run beside compute."""
    micro_batches_a_stage: float = 4.0


def grades(
    layout: LayoutDoc, predicted: Predicted, targets: GradeTargets | None = None
) -> list[Grade]:
    """Figures of a layout with their marks.

    The hidden share is 1 - exposed communication / time that links are busy, over all levels.

    Parameters
    ----------
    layout, predicted
        A layout, and what the cost model expects of it.
    targets
        The usual ones by default.

    Returns
    -------
    list of Grade
        MFU, then bubble and micro-batches a stage of a pipeline, then what is hidden, where anything is sent.
    """
    aims = targets or GradeTargets()
    graded = [_at_least("MFU", predicted.mfu, aims.mfu, excellent=aims.excellent_mfu)]
    if layout.pp > 1:
        bubble = predicted.breakdown_s.get("pipeline_bubble", 0.0) / predicted.step_time_s
        mark: Mark = "good" if bubble < aims.bubble else "below target"
        ratio = layout.num_micro_batches / layout.pp
        graded += [
            Grade(
                what="pipeline bubble", value=bubble, target=aims.bubble, is_share=True, mark=mark
            ),
            _at_least("micro-batches a stage", ratio, aims.micro_batches_a_stage, is_share=False),
        ]
    parts = predicted.breakdown_s.items()
    exposed_s = sum(seconds for name, seconds in parts if name.endswith("_comm"))
    busy_s = sum(level.mean_s for level in predicted.level_traffic)
    if busy_s > 0:
        hidden = 1.0 - min(exposed_s / busy_s, 1.0)
        graded.append(_at_least("communication hidden", hidden, aims.hidden))
    return graded


def _at_least(
    what: str,
    value: float,
    target: float,
    *,
    excellent: float = float("inf"),
    is_share: bool = True,
) -> Grade:
    mark: Mark = "good" if value >= target else "below target"
    if value >= excellent:
        mark = "excellent"
    return Grade(what=what, value=value, target=target, is_share=is_share, mark=mark)
