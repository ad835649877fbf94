"""A plan in a notebook: the first screen and one picture, without a script or a style sheet of its own."""

from __future__ import annotations

from html import escape

from meshwright.planner.drawing import FallBar, percent, rounded_seconds, waterfall_svg
from meshwright.planner.plan.document import Plan
from meshwright.planner.report.plan_page import waterfall_figures
from meshwright.planner.report.plan_view import first_screen, infeasible_view
from meshwright.planner.report.view import Facts, block_html

SMALLEST_DRAWN = 0.005
"""Parts of the step below this share are drawn as one."""


def notebook_html(plan: Plan) -> str:
    """What a notebook shows of a plan.

    Parameters
    ----------
    plan
        Of any status.

    Returns
    -------
    str
        HTML: the first screen, the reasons where there is no plan, and a waterfall, of the parts of the step
        or, beside today's run, from today's step to the plan's.
    """
    parts = []
    for block in [*first_screen(plan), *infeasible_view(plan)]:
        if isinstance(block, Facts):
            rows = "".join(
                f'<tr><td style="text-align:left">{escape(name)}</td>'
                f'<td style="text-align:left">{escape(words)}</td></tr>'
                for name, words in block.rows
                if words
            )
            parts.append(f"<table><tbody>{rows}</tbody></table>")
        else:
            parts.append(block_html(block))
    bars, title = _notebook_bars(plan)
    if bars:
        picture = waterfall_svg(bars, title).replace("<svg ", '<svg style="max-width:100%" ', 1)
        parts.append(picture)
    return "<div>" + "\n".join(parts) + "</div>"


def _notebook_bars(plan: Plan) -> tuple[list[FallBar], str]:
    """The bars of a plan's waterfall and their title; none without a prediction."""
    predicted = plan.predicted
    if predicted is None:
        return [], ""
    figures = None if plan.baseline is None else waterfall_figures(plan.baseline)
    if figures is not None:
        bars = [
            FallBar(bar["name"], bar["from_s"], bar["to_s"], bar["label"], bar["whole"])
            for bar in figures["bars"]
        ]
        return bars, "From today's step to the plan's"
    step_s, bars, reached_s, rest_s = predicted.step_time_s, [], 0.0, 0.0
    largest = sorted(predicted.breakdown_s.items(), key=lambda part: -part[1])
    for name, part_s in largest:
        if part_s < SMALLEST_DRAWN * step_s:
            rest_s += part_s
            continue
        label = f"{rounded_seconds(part_s)}, {percent(part_s / step_s)}"
        bars.append(FallBar(name.replace("_", " "), reached_s, reached_s + part_s, label))
        reached_s += part_s
    if rest_s > 0:
        label = f"{rounded_seconds(rest_s)}, {percent(rest_s / step_s)}"
        bars.append(FallBar("everything else", reached_s, reached_s + rest_s, label))
    bars.append(FallBar("step", 0.0, step_s, rounded_seconds(step_s), is_whole=True))
    return bars, "Where the step's time goes"
