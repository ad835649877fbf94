"""What a recommendation shows: the answer with its proof, then the sweep."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.drawing.quantities import amount, counted, percent, seconds
from meshwright.planner.many.recommend.answer import Recommendation, SizedPlan
from meshwright.planner.report.batch_view import row_layout_text
from meshwright.planner.report.cost_words import cost_columns
from meshwright.planner.report.plan_words import status_words
from meshwright.planner.report.view import (
    COUNT,
    NUMBER,
    PERCENT,
    SECONDS,
    Column,
    Table,
    View,
    decimals,
    line,
)


def recommend_view(answer: Recommendation) -> View:
    """The recommendation with its proof, then the sweep."""
    view: View = []
    target_s = answer.request.target_s
    if target_s is not None:
        view += [line(sentence) for sentence in _verdict(answer, target_s)]
        if len(answer.reached) > 1:
            view += [line(), _sizes_table(answer.reached, ())]
    if answer.sweep:
        legend = "Sweep; * marks the Pareto front of step time, GPUs and free memory."
        view += [line(), line(legend), _sizes_table(answer.sweep, answer.front)]
    return view


def _verdict(answer: Recommendation, target_s: float) -> list[str]:
    sentences = []
    if answer.reached:
        best = answer.reached[0]
        price = "" if best.usd_per_h is None else f", {best.usd_per_h:,.2f} USD an hour"
        sentences.append(f"{counted(best.gpus, 'GPU')} of {best.cluster}{price}: {_speed(best)}.")
        sentences += _cost(best)
        sentences.append(_fewest(answer, best))
    for point in answer.missed:
        misses = f"{point.cluster} misses {seconds(target_s)} with all {point.gpus} GPUs"
        proof = "" if answer.misses_for_sure(point) else " (not proven: a faster plan may exist)"
        sentences.append(f"{misses}: {_speed(point)}{proof}.")
    return sentences


def _cost(point: SizedPlan) -> list[str]:
    """What the training takes, where that was asked."""
    row = point.row
    if row.get("days") is None:
        return []
    dollars = "" if row["dollars"] is None else f", {row['dollars']:,.0f} dollars"
    energy = f", {row['kwh']:,.0f} kWh (GPUs at board power, without hosts, network, cooling)"
    return [f"{amount(row['tokens'])} tokens take {row['days']:,.1f} days{dollars}{energy}."]


def _fewest(answer: Recommendation, best: SizedPlan) -> str:
    """Why fewer GPUs do not reach the target, or that this was not proven."""
    smaller = answer.smaller[best.cluster]
    if smaller is None:
        return "That is the smallest size there is."
    is_proven = answer.misses_for_sure(smaller)
    if not smaller.has_plan:
        how = "The fewest" if is_proven else "Not proven to be the fewest"
        return f"{how}: on {smaller.gpus} GPUs there is {_speed(smaller)}."
    fewer = f"{smaller.gpus} GPUs need {seconds(smaller.step_time_s)}"
    if smaller.row["status"] == "optimal":
        return f"The fewest: {fewer} at best, proven."
    words = status_words(smaller.row["status"], smaller.row.get("gap"))
    if is_proven:
        return f"The fewest: {fewer}, {words}, and none reaches it, proven."
    return f"{fewer}, {words}: that they cannot reach it is not proven."


def _speed(point: SizedPlan) -> str:
    row = point.row
    if not point.has_plan:
        return f"no plan ({row['message']})"
    rate = f"{row['tokens_per_s']:,.0f} tokens/s"
    return f"{seconds(point.step_time_s)} a step, {rate}, MFU {percent(row['mfu'])}, {row_layout_text(row)}"


def _sizes_table(points: Sequence[SizedPlan], front: Sequence[SizedPlan]) -> Table:
    columns = [
        Column("cluster"),
        Column("GPUs", NUMBER),
        Column("step", SECONDS, absent=""),
        Column("tokens/s", COUNT, absent=""),
        Column("MFU", PERCENT, absent=""),
        Column("free", decimals(1), unit="GiB", absent=""),
        Column("USD/h", decimals(2), absent=""),
        Column("USD/1e9 tokens", decimals(2), absent=""),
        Column(""),
        Column("layout"),
    ]
    rows = [_cells(point, any(point is best for best in front)) for point in points]
    costs = cost_columns([point.row for point in points])
    columns[-2:-2] = costs.values()
    for cells, point in zip(rows, points, strict=True):
        cells[-2:-2] = [point.row.get(name) for name in costs]
    if all(point.usd_per_h is None for point in points):
        columns = [column for column in columns if not column.title.startswith("USD")]
        rows = [[*row[:6], *row[8:]] for row in rows]
    return Table(columns, rows)


def _cells(point: SizedPlan, on_front: bool) -> list[object]:
    row = point.row
    return [
        point.cluster,
        point.gpus,
        row.get("step_time_s"),
        row.get("tokens_per_s"),
        row.get("mfu"),
        point.headroom_gib,
        point.usd_per_h,
        point.usd_per_billion_tokens,
        "*" if on_front else "",
        row_layout_text(row) if point.has_plan else str(row["message"]).split(";")[0],
    ]
