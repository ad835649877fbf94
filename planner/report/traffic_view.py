"""What a plan sends, in tables: by level and axis, by process group, and by cut and phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.planner.drawing.quantities import count, percent, seconds
from meshwright.planner.report.view import (
    BYTES,
    COUNT,
    NUMBER,
    PERCENT,
    SECONDS,
    Block,
    Column,
    Heading,
    Table,
    View,
    decimals,
    line,
)

Document = Mapping[str, Any]


def traffic_view(document: Document) -> View:
    """The view of what `traffic --json` prints: levels, axes, groups, cuts, and the cut that is used most."""
    return [
        Heading("Bytes of a step that leave one GPU, by level"),
        _levels(document["levels"]),
        Heading("What the axes send"),
        *_axes(document["axes"]),
        Heading("Process groups, and what one of them sends in a step"),
        _groups(document["groups"]),
        Heading("Cuts, by phase"),
        *_cuts(document["cuts"]),
        *_verdicts(document),
    ]


def _levels(levels: list[Document]) -> Block:
    axes = sorted({axis for level in levels for axis in level["by_axis"]})
    columns = [
        Column("level"),
        *(Column(axis, BYTES) for axis in axes),
        Column("mean GPU", BYTES),
        Column("fullest", BYTES),
        Column("busy", SECONDS),
        Column("of the step", PERCENT),
        Column("mean busy", SECONDS),
    ]
    rows = [
        [
            level["level"],
            *(level["by_axis"].get(axis) for axis in axes),
            level["bytes_per_step"],
            level["most_bytes_per_step"],
            level["busy_s"],
            level["utilisation"],
            level["mean_busy_s"],
        ]
        for level in levels
    ]
    return Table(columns, rows)


def _axes(axes: Mapping[str, Document]) -> View:
    names = {
        "pattern": Column("pattern"),
        "fan_out": Column("fan-out", NUMBER),
        "operations_per_step": Column("operations", COUNT),
        "predictability": Column("when"),
    }
    columns = [Column("axis"), *names.values()]
    rows = [[axis, *(kind[name] for name in names)] for axis, kind in axes.items()]
    risks = [
        [axis, kind["incast"], kind["ecmp"], kind["suits_network"]] for axis, kind in axes.items()
    ]
    view: View = [
        Table(columns, rows),
        line(),
        Table([Column("axis"), Column("incast"), Column("ECMP"), Column("ECMP and PFC")], risks),
    ]
    imbalance = axes.get("ep", {}).get("busiest_receiver_over_mean", 1.0)
    if imbalance > 1:
        view.append(
            line(f"the rank with the hottest experts receives {imbalance:.2f} times the mean")
        )
    return view


def _groups(groups: Mapping[str, Document]) -> Block:
    columns = [
        Column("axis"),
        Column("level"),
        Column("groups that cross", NUMBER),
        Column("ranks", COUNT),
        Column("the most", BYTES),
        Column("all", BYTES),
    ]
    rows = []
    for axis, group in groups.items():
        for level, sent in group["levels"].items():
            crossing = f"{count(sent['groups'])} of {count(group['count'])}"
            rows.append([axis, level, crossing, group["members"], sent["most"], sent["bytes"]])
    return Table(columns, rows)


def _cuts(cuts: list[Document]) -> View:
    columns = {
        "phase": Column("phase"),
        "level": Column("level"),
        "cut": Column("cut"),
        "block": Column("busiest"),
        "gb_per_s": Column("GB/s", decimals(0)),
        "busy_s": Column("busy", SECONDS),
        "utilisation": Column("used", PERCENT),
    }
    table = Table(list(columns.values()), [[cut[name] for name in columns] for cut in cuts])
    durations = {cut["phase"]: seconds(cut["phase_s"]) for cut in cuts}
    words = "; ".join(f"{phase} take {duration}" for phase, duration in durations.items())
    return [line(words), table] if cuts else [table]


def _verdicts(document: Document) -> View:
    """The cut that is used most, the price of oversubscription, the busiest up-link."""
    view: View = []
    binding = document["binding"]
    if binding is not None:
        cut = f"the {binding['cut']} of {binding['block']} in {binding['level']}"
        used = f"{percent(binding['utilisation'])} of the {binding['phase']}"
        view.append(line(f"{cut} is used most: {used}"))
    oversubscription = document["oversubscription"]
    if oversubscription is not None:
        lost_s, step_s = oversubscription["loss_s"], oversubscription["step_time_s"]
        words = f"{seconds(lost_s)} of the step of {seconds(step_s)} ({percent(lost_s / step_s)})"
        view.append(line(f"oversubscription costs {words}"))
    uplinks = document["uplinks"]
    if uplinks is not None:
        view.append(line(f"busiest up-link of the mapping: {seconds(uplinks['busiest_s'])} a step"))
    return view
