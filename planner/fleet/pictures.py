"""Pictures of a fleet: which nodes each job has, and when it runs. Plain SVG, no scripts, no fonts."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from planner.fleet.floor import Floor

CELL, GAP, ROW = 14, 3, 26
LABEL_WIDTH, CHART_WIDTH = 190, 760
_GOLDEN = 0.618033988749895


def colour(index: int) -> str:
    """Neighbouring indices far apart in hue."""
    hue = (index * _GOLDEN + 0.58) % 1
    red, green, blue = colorsys.hls_to_rgb(hue, (0.52, 0.66, 0.42)[index % 3], 0.55)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def floor_svg(document: Mapping[str, Any], floor: Floor, units: Sequence[Sequence[int]]) -> str:
    """Leaves as rows, units as squares in the colour of their job; idle ones are hollow.

    Where jobs follow each other on a unit, the first one colours it.
    """
    owner = {unit: at for at in reversed(range(len(units))) for unit in units[at]}
    per_row = 48
    parts, y = [], 40
    pods = len({unit.pod for unit in floor.units}) > 1
    for leaf, members in floor.leaves.items():
        name = f"{floor.pod_of[leaf]} {leaf}" if pods else leaf
        parts.append(_text(8, y + 11, name, "end-of-row"))
        for k, unit in enumerate(members):
            x, row = LABEL_WIDTH + (k % per_row) * (CELL + GAP), k // per_row
            at = owner.get(unit)
            fill = "none" if at is None else colour(at)
            title = "idle" if at is None else str(document["jobs"][at]["name"])
            label = escape(f"{floor.units[unit].nodes[0]}: {title}")
            parts.append(
                f'<rect x="{x}" y="{y + row * (CELL + GAP)}" width="{CELL}" height="{CELL}" rx="2" '
                f'fill="{fill}" stroke="#8a8f98"><title>{label}</title></rect>'
            )
        y += ((len(members) - 1) // per_row + 1) * (CELL + GAP) + 6
    width = LABEL_WIDTH + per_row * (CELL + GAP) + 10
    legend, y = _legend(document, y + 14, width)
    words = f"{floor.gpus_per_unit} GPUs a square; leaves are rows"
    return _page(width, y + 10, f"Who has which nodes: {words}", [*parts, *legend])


def gantt_svg(document: Mapping[str, Any], gpus: int) -> str:
    """A bar for each job from its start to its end, as high as its share of the cluster asks."""
    jobs = sorted(document["jobs"], key=lambda job: (job["start_s"], job["name"]))
    order = {job["name"]: at for at, job in enumerate(document["jobs"])}
    end_s = max((job["end_s"] for job in jobs), default=0.0) or 1.0
    unit, size = ("days", 86400.0) if end_s > 3 * 86400 else ("hours", 3600.0) if end_s > 7200 else ("s", 1.0)
    parts, y = [], 44
    step = _tick(end_s / size)
    for k in range(int(end_s / size / step) + 1):
        x = LABEL_WIDTH + k * step * size / end_s * CHART_WIDTH
        parts.append(
            f'<line x1="{x:.1f}" y1="40" x2="{x:.1f}" y2="{44 + ROW * len(jobs)}" stroke="#d5d8dd"/>'
        )
        parts.append(_text(x, 36, f"{k * step:g}", "middle"))
    for job in jobs:
        x = LABEL_WIDTH + job["start_s"] / end_s * CHART_WIDTH
        width = max(1.0, (job["end_s"] - job["start_s"]) / end_s * CHART_WIDTH)
        late = bool(job["late_s"])
        words = f"{job['gpus']} GPUs" + (f", {job['late_s'] / size:.1f} {unit} late" if late else "")
        title = escape(
            f"{job['name']}: {words}, {job['start_s'] / size:.2f} to {job['end_s'] / size:.2f} {unit}"
        )
        parts.append(_text(8, y + 16, job["name"], "label"))
        fill = colour(order[job["name"]])
        edge = ' stroke="#b3261e" stroke-width="2"' if late else ""
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{ROW - 6}" rx="3" '
            f'fill="{fill}"{edge}>'
            f"<title>{title}</title></rect>"
        )
        inside = width > 8 * len(words)
        parts.append(_text(x + 6 if inside else x + width + 4, y + 17, words, "bar" if inside else "label"))
        y += ROW
    return _page(
        LABEL_WIDTH + CHART_WIDTH + 130, y + 16, f"When each job runs, in {unit}, on {gpus} GPUs", parts
    )


def _tick(span: float) -> float:
    """A round step that cuts a span into 4 to 10."""
    step = 1.0
    while span / step > 10:
        step *= 10
    while span / step < 4:
        step /= 2 if span / step >= 2 else 10
    return step


def _legend(document: Mapping[str, Any], y: int, width: int) -> tuple[list[str], int]:
    parts, x = [], 8
    for at, job in enumerate(document["jobs"]):
        if not job["nodes"]:
            continue
        words = f"{job['name']} ({job['gpus']})"
        wide = 24 + 7 * len(words)
        if x + wide > width and x > 8:
            x, y = 8, y + 20
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{colour(at)}"/>')
        parts.append(_text(x + 17, y, words, "label"))
        x += wide
    return parts, y


def _text(x: float, y: float, words: str, kind: str) -> str:
    anchor = ' text-anchor="middle"' if kind == "middle" else ""
    fill = "#ffffff" if kind == "bar" else "#30343b"
    shown = words if len(words) <= 60 else words[:57] + "..."
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}"{anchor}>{escape(shown)}</text>'


def _page(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    )
    back = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    name = f'<text x="8" y="20" font-size="15" font-weight="bold" fill="#1b1e23">{escape(title)}</text>'
    return "\n".join([head, f"<title>{escape(title)}</title>", back, name, *parts, "</svg>"]) + "\n"
