"""Pictures of a fleet: which nodes each job has, and when it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.planner.drawing.svg import Drawing, distinct_colour, ink_on, shortened, text_width
from meshwright.planner.many.fleet.units import FreeUnits

CELL, GAP, ROW = 14, 3, 26
LABEL_WIDTH, CHART_WIDTH = 190, 760
CHART_TOP = 44
UNITS_IN_A_ROW = 48
_SIZE, _TITLE_SIZE, _LATE, _FRAME = 11, 15, "#b3261e", "#8a8f98"
_CLOCKS = (("days", 86400.0, 3 * 86400.0), ("hours", 3600.0, 7200.0), ("s", 1.0, 0.0))
"""Name, seconds in one, and the seconds from which it is the unit of a chart."""

Document = Mapping[str, Any]


def nodes_svg(document: Document, free: FreeUnits, units: Sequence[Sequence[int]]) -> str:
    """Leaves as rows, units as squares in the colour of their job; idle ones are hollow.

    Parameters
    ----------
    document
        Of the fleet, as `fleet_document` makes it.
    free
        The units that were shared out.
    units
        Those of each job, as indices. Where jobs follow each other on a unit, the first one colours it.
    """
    drawing = Drawing(LABEL_WIDTH + UNITS_IN_A_ROW * (CELL + GAP) + 10)
    job_of = {unit: job for job in reversed(range(len(units))) for unit in units[job]}
    y = 40.0
    has_pods = len(set(free.pod_of.values())) > 1
    for leaf, members in free.by_leaf.items():
        _label(drawing, y + 11, f"{free.pod_of[leaf]} {leaf}" if has_pods else leaf)
        for position, unit in enumerate(members):
            row, column = divmod(position, UNITS_IN_A_ROW)
            job = job_of.get(unit)
            name = "idle" if job is None else document["jobs"][job]["name"]
            drawing.rect(
                LABEL_WIDTH + column * (CELL + GAP),
                y + row * (CELL + GAP),
                CELL,
                CELL,
                fill="none" if job is None else distinct_colour(job),
                stroke=_FRAME,
                radius=2,
                tip=f"{free.units[unit].nodes[0]}: {name}",
            )
        y += ((len(members) - 1) // UNITS_IN_A_ROW + 1) * (CELL + GAP) + 6
    y = _legend(drawing, document, y + 14)
    title = f"Which nodes each job has: {free.gpus_per_unit} GPUs a square; leaves are rows"
    return _page(drawing, y + 10, title)


def gantt_svg(document: Document) -> str:
    """A bar for each job that has a time, from its start to its end, with how many GPUs it has."""
    drawing = Drawing(LABEL_WIDTH + CHART_WIDTH + 130)
    timed = (job for job in document["jobs"] if job["end_s"] is not None)
    jobs = sorted(timed, key=lambda job: (job["start_s"], job["name"]))
    colours = {job["name"]: distinct_colour(k) for k, job in enumerate(document["jobs"])}
    end_s = max((job["end_s"] for job in jobs), default=0.0) or 1.0
    unit, unit_s = next((name, size_s) for name, size_s, from_s in _CLOCKS if end_s > from_s)
    clock = _Clock(unit, unit_s, end_s)
    bottom = CHART_TOP + ROW * len(jobs)
    step = _tick(clock.shown(end_s))
    for tick in range(int(clock.shown(end_s) / step) + 1):
        x = clock.across(tick * step * clock.unit_s)
        drawing.path([(x, CHART_TOP - 4), (x, bottom)], stroke="#d5d8dd")
        drawing.text(x, CHART_TOP - 8, f"{tick * step:g}", size=_SIZE, anchor="middle")
    for row, job in enumerate(jobs):
        _bar(drawing, job, CHART_TOP + row * ROW, colours[job["name"]], clock)
    gpus = document["units"] * document["gpus_per_unit"]
    return _page(drawing, bottom + 16, f"When each job runs, in {clock.unit}, on {gpus} GPUs")


@dataclass(frozen=True)
class _Clock:
    """The time axis of a chart: 0 to `end_s`, read in `unit`s of `unit_s` seconds."""

    unit: str
    unit_s: float
    end_s: float

    def shown(self, time_s: float) -> float:
        return time_s / self.unit_s

    def across(self, time_s: float) -> float:
        return LABEL_WIDTH + time_s / self.end_s * CHART_WIDTH


def _bar(drawing: Drawing, job: Document, y: float, fill: str, clock: _Clock) -> None:
    start_s, end_s, late_s = job["start_s"], job["end_s"], job["late_s"]
    x = clock.across(start_s)
    width = max(1.0, clock.across(end_s) - x)
    words = f"{job['gpus']} GPUs"
    if late_s:
        words += f", {clock.shown(late_s):.1f} {clock.unit} late"
    times = f"{clock.shown(start_s):.2f} to {clock.shown(end_s):.2f} {clock.unit}"
    _label(drawing, y + 16, job["name"])
    drawing.rect(
        x,
        y + 3,
        width,
        ROW - 6,
        fill=fill,
        stroke=_LATE if late_s else None,
        stroke_width=2,
        radius=3,
        tip=f"{job['name']}: {words}, {times}",
    )
    if width > text_width(words, _SIZE) + 12:
        drawing.text(x + 6, y + 17, words, size=_SIZE, ink=ink_on(fill))
    else:
        drawing.text(x + width + 4, y + 17, words, size=_SIZE)


def _tick(span: float) -> float:
    """A round step that cuts a span into 4 to 10."""
    step = 1.0
    while span / step > 10:
        step *= 10
    while span / step < 4:
        step /= 2 if span / step >= 2 else 10
    return step


def _legend(drawing: Drawing, document: Document, y: float) -> float:
    """Draws names and colours of the jobs that run; returns the base line of the last row."""
    x = 8.0
    for index, job in enumerate(document["jobs"]):
        if not job["nodes"]:
            continue
        words = f"{job['name']} ({job['gpus']})"
        width = 24 + text_width(words, _SIZE)
        if x + width > drawing.width and x > 8:
            x, y = 8.0, y + 20
        drawing.rect(x, y - 10, 12, 12, fill=distinct_colour(index), radius=2)
        drawing.text(x + 17, y, words, size=_SIZE)
        x += width
    return y


def _label(drawing: Drawing, y: float, words: str) -> None:
    """The name of a row, left of it."""
    drawing.text(8, y, shortened(words, LABEL_WIDTH - 12, _SIZE), size=_SIZE)


def _page(drawing: Drawing, height: float, title: str) -> str:
    drawing.text(8, 20, title, size=_TITLE_SIZE, ink="#1b1e23", bold=True)
    return drawing.document(height, title)
