"""What a plan sends, in tables: by level and axis, and by cut and phase."""

from __future__ import annotations

from costmodel.phases import axis_pattern
from planner.fabric.levels import PlanTraffic
from planner.report.parts import Renderable, gigabytes, grid, heading, line, percent, seconds


def traffic_view(found: PlanTraffic) -> list[Renderable]:
    """Levels, axes, cuts, and the cut that holds the plan back."""
    axes = sorted({axis for level in found.levels for axis in level.by_axis})
    levels = [
        (
            level.level,
            *(gigabytes(level.by_axis[axis]) if axis in level.by_axis else "-" for axis in axes),
            seconds(level.busy_s),
            percent(level.utilisation),
        )
        for level in found.levels
    ]
    kinds = [
        (axis, str(kind["pattern"]), str(kind["fan_out"]), str(kind["predictability"]), str(kind["incast"]))
        for axis, kind in ((axis, axis_pattern(axis, found.layout)) for axis in axes)
    ]
    cuts = [
        (cut.level, cut.cut, cut.phase, seconds(cut.busy_s), seconds(cut.phase_s), percent(cut.utilisation))
        for cut in found.cuts
    ]
    views: list[Renderable] = [
        heading("Bytes of a step that leave one GPU, by level"),
        grid(("level", *axes, "busy", "of the step"), levels),
        heading("What the axes send"),
        grid(("axis", "pattern", "fan-out", "when", "incast"), kinds, left=(0, 1, 3, 4)),
        heading("Cuts, by phase"),
        grid(("level", "cut", "phase", "busy", "phase takes", "used"), cuts, left=(0, 1, 2)),
    ]
    binding = found.binding
    if binding is not None:
        views.append(
            line(
                f"the {binding.cut} of {binding.level} is used most: "
                f"{percent(binding.utilisation)} of the {binding.phase}"
            )
        )
    if found.uplinks is not None:
        views.append(line(f"busiest up-link of the mapping: {seconds(found.uplinks.busiest_s)} a step"))
    return views
