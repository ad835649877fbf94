"""A plan on a mixed cluster as one page: where the step goes, and what each part runs."""

from __future__ import annotations

from html import escape

from meshwright.planner.drawing.quantities import count, percent, rounded_seconds
from meshwright.planner.mixed.document import MixedPlan
from meshwright.planner.mixed.texts import mixed_text
from meshwright.planner.report.html import Section, page, section_html
from meshwright.planner.report.mixed_view import compared_with_alone, mixed_view
from meshwright.planner.report.page_figures import breakdown_figures
from meshwright.planner.report.plan_words import status_words
from meshwright.planner.report.view import sections


def mixed_page(plan: MixedPlan) -> str:
    """The HTML text.

    Parameters
    ----------
    plan
        With an answer: a pipeline through parts, or a part that is fastest alone.
    """
    inputs = plan.inputs
    words = (
        f"{count(plan.cluster.gpus)} GPUs, {count(inputs.global_batch)} sequences of {count(inputs.seq_len)} "
        f"tokens a step, {inputs.precision}, {inputs.framework}"
    )
    title = f"{inputs.model.name} on {plan.cluster.name}"
    tables = [
        Section(key=f"table-{index}", title=name, more=section_html("", blocks))
        for index, (name, blocks) in enumerate(sections(mixed_view(plan)))
    ]
    text = f"<pre>{escape(mixed_text(plan))}</pre>"
    document = Section(key="document", title="", more=text, folded="The plan's document")
    return page(title, words, _headline(plan), _cards(plan), [*_charts(plan), *tables, document])


def _headline(plan: MixedPlan) -> str:
    runs_on = " then ".join(plan.runs_on)
    if plan.predicted is None:
        return f"Fastest on {runs_on} alone, the other parts idle: its own plan says the rest."
    return f"A pipeline through {runs_on}: {compared_with_alone(plan, plan.predicted)}."


def _cards(plan: MixedPlan) -> list[tuple[str, str]]:
    cards: list[tuple[str, str]] = [("proof", status_words(plan.status, plan.objective.gap))]
    if plan.objective.step_time_s is not None:
        cards.append(("a step", rounded_seconds(plan.objective.step_time_s)))
    if plan.predicted is not None:
        cards.append(("tokens/s", count(plan.predicted.tokens_per_s)))
        cards.append(("MFU", percent(plan.predicted.mfu)))
    return cards


def _charts(plan: MixedPlan) -> list[Section]:
    """Where the step goes; nothing where a part alone is fastest."""
    if plan.predicted is None:
        return []
    parts = breakdown_figures(plan.predicted)
    return [
        Section(
            key="step",
            title="Where the step goes",
            charts=[("breakdown", 50 + 28 * len(parts))],
            figures={"breakdown": parts},
        )
    ]
