"""What a plan sends, in tables: by level and axis, by process group, and by cut and phase."""

from __future__ import annotations

import numpy as np

from meshwright.planner.analysis.traffic import PlanTraffic, patterns, receive_imbalance
from meshwright.planner.report.parts import (
    Renderable,
    count,
    gigabytes,
    grid,
    heading,
    line,
    percent,
    seconds,
)


def traffic_view(found: PlanTraffic) -> list[Renderable]:
    """Levels, axes, groups, cuts, and the cut that holds the plan back."""
    views: list[Renderable] = [
        heading("Bytes of a step that leave one GPU, by level"),
        _levels(found),
        heading("What the axes send"),
        *_axes(found),
        heading("Process groups, and what one of them sends in a step"),
        _groups(found),
        heading("Cuts, by phase"),
        *([line(_phases(found))] if found.cuts else []),
        _cuts(found),
    ]
    binding = found.binding
    if binding is not None:
        views.append(
            line(
                f"the {binding.cut} of {binding.block} in {binding.level} is used most: "
                f"{percent(binding.utilisation)} of the {binding.phase}"
            )
        )
    if found.non_blocking_s is not None:
        lost = found.step_time_s - found.non_blocking_s
        views.append(
            line(
                f"oversubscription costs {seconds(lost)} of the step of {seconds(found.step_time_s)} "
                f"({percent(lost / found.step_time_s)})"
            )
        )
    if found.uplinks is not None:
        views.append(
            line(f"busiest up-link of the mapping: {seconds(found.uplinks.busiest_s)} a step")
        )
    return views


def _levels(found: PlanTraffic) -> Renderable:
    axes = sorted({axis for level in found.levels for axis in level.by_axis})
    rows = [
        (
            level.level,
            *(gigabytes(level.by_axis[axis]) if axis in level.by_axis else "-" for axis in axes),
            seconds(level.busy_s),
            percent(level.utilisation),
        )
        for level in found.levels
    ]
    return grid(("level", *axes, "busy", "of the step"), rows)


def _axes(found: PlanTraffic) -> list[Renderable]:
    kinds = patterns(found)
    rows = [
        (axis, kind.pattern, str(kind.fan_out), kind.predictability) for axis, kind in kinds.items()
    ]
    risks = [(axis, kind.incast, kind.ecmp) for axis, kind in kinds.items()]
    views: list[Renderable] = [
        grid(("axis", "pattern", "fan-out", "when"), rows, left=(0, 1, 3)),
        grid(("axis", "incast", "ECMP"), risks, left=(0, 1, 2)),
    ]
    if "ep" in kinds and receive_imbalance(found) > 1:
        views.append(
            line(
                f"the rank with the hottest experts receives {receive_imbalance(found):.2f} times the mean"
            )
        )
    return views


def _groups(found: PlanTraffic) -> Renderable:
    rows = []
    for flow in found.use.axes:
        for level in found.use.levels:
            sent = level.flows[flow.axis].crossing[flow.groups].sum(axis=1)
            if np.any(sent > 0):
                rows.append(
                    (
                        flow.axis,
                        level.standing.level,
                        f"{count(int(np.sum(sent > 0)))} of {count(len(flow.groups))}",
                        count(flow.members),
                        gigabytes(float(sent.max())),
                        gigabytes(float(sent.sum())),
                    )
                )
    return grid(
        ("axis", "level", "groups that cross", "ranks", "the most", "all"), rows, left=(0, 1)
    )


def _cuts(found: PlanTraffic) -> Renderable:
    rows = [
        (
            cut.phase, cut.level, cut.cut, cut.block, f"{cut.gb_per_s:,.0f}", seconds(cut.busy_s),
            percent(cut.utilisation),
        )
        for cut in found.cuts
    ]  # fmt: skip
    return grid(
        ("phase", "level", "cut", "busiest", "GB/s", "busy", "used"), rows, left=(0, 1, 2, 3)
    )


def _phases(found: PlanTraffic) -> str:
    took = {cut.phase: seconds(cut.phase_s) for cut in found.cuts}
    return "; ".join(f"{phase} take {words}" for phase, words in took.items())
