"""What a recommendation shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from meshwright.planner.many.recommend.service import Answer, Point
from meshwright.planner.report.batch_view import degrees
from meshwright.planner.report.parts import Renderable, counted, percent, seconds


def recommend_view(answer: Answer) -> list[Renderable]:
    """The recommendation with its proof, then the sweep."""
    shown: list[Renderable] = []
    if answer.wish.target_s is not None:
        shown += [Text(line) for line in _verdict(answer, answer.wish.target_s)]
        if len(answer.reached) > 1:
            shown += [Text(), _table(answer.reached, ())]
    if answer.sweep:
        shown += [
            Text(),
            Text("Sweep; * marks the Pareto front of step time, GPUs and free memory."),
        ]
        shown.append(_table(answer.sweep, answer.front))
    return shown


def _verdict(answer: Answer, target_s: float) -> list[str]:
    lines = []
    for point in answer.reached[:1]:
        below = answer.smaller[point.cluster]
        price = "" if point.usd_per_h is None else f", {point.usd_per_h:,.2f} USD an hour"
        lines.append(f"{counted(point.gpus, 'GPU')} of {point.cluster}{price}: {_speed(point)}.")
        if below is None:
            lines.append("That is the smallest size there is.")
        elif below.row.get("step_time_s"):
            lines.append(
                f"The fewest: {below.gpus} GPUs need {seconds(below.step_time_s)} at best, proven."
            )
        else:
            lines.append(
                f"The fewest: on {below.gpus} GPUs there is no plan ({below.row['message']})."
            )
    for point in answer.missed:
        best = (
            _speed(point) if point.row.get("step_time_s") else f"no plan ({point.row['message']})"
        )
        lines.append(
            f"{point.cluster} misses {seconds(target_s)} with all {point.gpus} GPUs: {best}."
        )
    return lines


def _speed(point: Point) -> str:
    row = point.row
    rate = f"{row['tokens_per_s']:,.0f} tokens/s"
    return f"{seconds(point.step_time_s)} a step, {rate}, MFU {percent(row['mfu'])}, {degrees(row)}"


def _table(points: Sequence[Point], front: Sequence[Point]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    priced = any(point.usd_per_h is not None for point in points)
    table.add_column("cluster", overflow="fold")
    for name in (
        "GPUs",
        "step",
        "tokens/s",
        "MFU",
        "GiB free",
        *(("USD/h", "USD/1e9 tokens") if priced else ()),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for point in points:
        row, mark = point.row, "*" if any(point is other for other in front) else ""
        costs = [] if not priced else [_usd(point.usd_per_h), _usd(point.usd_per_billion_tokens)]
        if point.headroom_gib is None:
            why = str(row["message"]).split(";")[0]
            table.add_row(point.cluster, str(point.gpus), "", "", "", "", *costs, mark, why)
            continue
        numbers = [seconds(point.step_time_s), f"{row['tokens_per_s']:,.0f}", percent(row["mfu"])]
        free = f"{point.headroom_gib:.1f}"
        table.add_row(point.cluster, str(point.gpus), *numbers, free, *costs, mark, degrees(row))
    return table


def _usd(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"
