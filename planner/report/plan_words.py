"""What a plan is, in the words that every view of it shares: how good, on which hosts, what is trained."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from math import ceil
from typing import Any

from meshwright.costmodel.data_parallel import LEAST_GAIN
from meshwright.costmodel.execution_names import PRETRAINING
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.adapters import adapter_counts
from meshwright.model_specs.parameters import parameter_count
from meshwright.planner.drawing import amount, count, counted, percent, seconds
from meshwright.planner.plan.assemble import WORDS
from meshwright.planner.plan.document import CostDoc, Plan, SolverReport, SpaceReport
from meshwright.planner.report.view import COUNT, Column, decimals, optional
from meshwright.planner.request.choices import DEGREES
from meshwright.planner.request.plan_request import PlanInputs

NEAR_OPTIMAL = 0.001
"""Of the step: a proven gap below it counts as an answer, whatever is missing to the proof."""


def status_words(status: str, gap: float | None) -> str:
    """The status of a plan as people read it.

    Parameters
    ----------
    status
        As documents carry it.
    gap
        Step time minus bound, over the step time, at least 0; None where no bound is known.

    Returns
    -------
    str
        >>> status_words("feasible", 0.00008)
        'within 0.01 % of the best'
        >>> status_words("feasible", 0.03)
        'feasible'
    """
    if status != "feasible" or gap is None or gap >= NEAR_OPTIMAL:
        return status
    return f"within {at_most(gap)} of the best"


def claim_words(status: str, step_time_s: float | None, lower_bound_s: float | None) -> str:
    """What a table says of the search behind a figure.

    Parameters
    ----------
    status
        Of a plan or a search.
    step_time_s
        Of the plan that was found, above 0; None without one.
    lower_bound_s
        No plan is faster; None where nothing is known.

    Returns
    -------
    str
        >>> claim_words("feasible", 1.0001, 1.0)
        'within 0.01 % of the best'
        >>> claim_words("infeasible", None, None)
        'no plan exists'
        >>> claim_words("unknown", None, None)
        'not searched'
    """
    if step_time_s is None:
        return WORDS.get(status, status)
    gap = None if lower_bound_s is None else max(1.0 - lower_bound_s / step_time_s, 0.0)
    return status_words(status, gap)


def status_meaning(status: str, gap: float | None, meanings: Mapping[str, str]) -> str:
    """What a status says, with the gap of a plan that was not proven.

    Parameters
    ----------
    status, gap
        As for `status_words`.
    meanings
        Of each status, without a gap.
    """
    if status != "feasible" or gap is None:
        return meanings[status]
    bound = f"none is proven to save more than {at_most(gap)} of the step"
    if gap < NEAR_OPTIMAL:
        return bound.replace("none", "no layout in this space", 1)
    return f"a plan that works; {bound}"


def at_most(share: float) -> str:
    """A share rounded up to a hundredth of a percent, so that it stays a bound: 0.00008 is 0.01 %.

    Parameters
    ----------
    share
        At least 0.
    """
    return percent(max(ceil(share * 1e4 - 1e-6), 1) / 1e4, 2)


def host_words(
    optimizer_offload: int | None, host_memory_gib: float | None, others: Sequence[str] = ()
) -> str:
    """What of a plan lies in the hosts' memory, and how much of it; empty where nothing does.

    Parameters
    ----------
    optimizer_offload
        Percent of the optimizer's states, 0 to 100.
    host_memory_gib
        Of a node.
    others
        What else lies there, in words.

    Returns
    -------
    str
        >>> host_words(50, 1028.4)
        '1,028 GiB of every host: 50 % of the optimizer'
        >>> host_words(0, 15.3, ["reference"])
        '15 GiB of every host: reference'
    """
    on_hosts = [f"{optimizer_offload} % of the optimizer"] if optimizer_offload else []
    if not on_hosts and not host_memory_gib:
        return ""
    where = "on the hosts"
    if host_memory_gib is not None:
        where = f"{host_memory_gib:,.0f} GiB of every host"
    return ": ".join(filter(None, (where, ", ".join([*on_hosts, *others]))))


def row_host_words(row: Mapping[str, Any]) -> str:
    """The same of a row of results.

    Parameters
    ----------
    row
        With the fields `optimizer_offload` and `host_memory_gib` of a plan's figures, where it has a
        plan.
    """
    return host_words(row.get("optimizer_offload"), row.get("host_memory_gib"))


# What a training takes, as views show it: days, dollars, kWh.


COST_COLUMNS = {
    "days": Column("days", decimals(1), absent="", is_optional=True),
    "dollars": Column("dollars", COUNT, absent="", is_optional=True),
    "kwh": Column("kWh", COUNT, absent="", is_optional=True),
}
"""Of tables whose rows carry a training's cost, by the names of their figures."""


def cost_rows(cost: CostDoc | None) -> list[tuple[str, str]]:
    """Days, dollars and kWh of a training; nothing where it was not asked for.

    Parameters
    ----------
    cost
        Of a plan; None where neither tokens nor days were given.
    """
    if cost is None:
        return []
    plan = cost.plan
    days = f"{plan.days:,.1f} for {amount(cost.tokens)} tokens, {count(plan.gpu_hours)} GPU hours"
    if cost.days_asked is not None:
        days += f"; {cost.days_asked:g} asked: {'in time' if cost.in_time else 'too late'}"
    rows = [("days", days)]
    if plan.dollars is not None:
        price = cost.gpu_hour_price
        rate = "at each part's price" if price is None else f"at {price:g} a GPU hour"
        rows.append(("dollars", f"{count(plan.dollars)} {rate}"))
    if plan.kwh is not None:
        what = f"GPUs at {cost.gpu_power_w:g} W each, without hosts, network, cooling"
        rows.append(("kWh", f"{count(plan.kwh)}: {what}"))
    return rows


# The space, the pruning and the proof of a plan in sentences.


_MAPPINGS = {
    "axes-to-levels": "every mapping of the axes onto the fabric levels with tp inside the innermost",
    "slots-to-leaves": "every assignment of slots (free nodes, equal parts of one, or the nodes of a "
    "tensor group, with axes in them as in Megatron) to leaves",
}
_ANY_STAGES = (
    "every split of the layers (interleaved: those even in every virtual stage but for the ends, which "
    "may be empty)"
)
_EVEN_STAGES = "layers dealt out evenly, as the framework does by itself"
PROVEN_EXPERT_GAP = 1e-6
"""Relative imbalance: below this a placement of experts counts as the best one."""
MOST_LISTED_VALUES = 8


def space_text(space: SpaceReport) -> str:
    """The values of every choice, in one sentence.

    Parameters
    ----------
    space
        That a search could choose from.
    """
    degrees = [
        f"{axis} in {_values_text(values)}"
        for axis in DEGREES
        if (values := getattr(space, axis)) != [1]
    ]
    executions, schedules = len(space.executions), len(space.schedules)
    overlaps = all(choices.get("tp_overlap") for choices in space.executions)
    groups, offloads = _values_text(space.shard_groups), _values_text(space.optimizer_offloads)
    parts = [
        ", ".join(degrees) or "every degree 1",
        "every micro-batch that divides",
        "virtual stages that deal layers evenly (more where layers differ)",
        f"{executions} combinations of execution choices" if executions > 1 else "",
        "tensor-parallel overlap on wherever it may be" if executions and overlaps else "",
        f"{schedules} pipeline schedules" if schedules > 2 else "",
        f"ZeRO stage in {_values_text(space.zero_stages)}",
        f"shard groups in {groups}" if len(space.shard_groups) > 1 else "",
        f"{offloads} % of the optimizer's states offloaded"
        if len(space.optimizer_offloads) > 1
        else "",
        f"{len(space.recompute)} kinds of recomputation",
        f"up to {space.gpus} GPUs",
        _MAPPINGS[space.mapping],
        _EVEN_STAGES if space.even_stages else _ANY_STAGES,
        _buckets_text(space),
        optional(space.expert_gap, _experts_text),
    ]
    return ", ".join(filter(None, parts))


def _buckets_text(space: SpaceReport) -> str:
    """Which sizes gradient buckets may have, and what that leaves unproven."""
    usual = "gradient buckets of the framework's own size"
    if not space.gradient_buckets:
        return usual
    *sizes, largest = (f"{times:g}" for times in space.gradient_buckets)
    sizes_text = f"{', '.join(sizes)} or {largest} times that without virtual stages"
    return f"{usual}, or {sizes_text} where the step is {LEAST_GAIN:.2%} faster with it"


def _values_text(values: Sequence[int]) -> str:
    """All values of a choice, or its ends where there are many."""
    if len(values) > MOST_LISTED_VALUES:
        return f"{values[0]}..{values[-1]} ({len(values)} values)"
    return "{" + ", ".join(map(str, values)) + "}"


def _experts_text(gap: float) -> str:
    how = "the best placement of each degree"
    if gap > PROVEN_EXPERT_GAP:
        bound = f"its imbalance at most {gap:.2g} above what is possible"
        how = f"one placement of each degree, {bound}"
    return f"experts where measured loads want them ({how})"


def pruning_text(solver: SolverReport) -> str:
    """How many layouts were left out by what; empty where the plan does not say.

    Parameters
    ----------
    solver
        Of a plan.
    """
    pruning = solver.pruning
    if pruning is None:
        return ""
    text = (
        f"{solver.layouts_considered} layouts: {pruning.by_bound} no faster by their bound, "
        f"{pruning.priced} priced exactly"
    )
    if pruning.by_rule:
        rules = ", ".join(f"{rule} {number}" for rule, number in sorted(pruning.by_rule.items()))
        text += f", ruled out: {rules}"
    if pruning.fewest_gpus > 1:
        text += f"; none on fewer than {pruning.fewest_gpus} GPUs can be faster"
    return text


def proof_text(plan: Plan) -> str:
    """Bound against incumbent, and after how many rounds."""
    objective = plan.objective
    after = f"after {counted(plan.solver.bound_rounds, 'round')}"
    if objective.step_time_s is None:
        nothing = f"nothing found {after}"
        return nothing if plan.status == "unknown" else "a rule excludes every layout"
    incumbent = seconds(objective.step_time_s)
    if objective.lower_bound_s is None:
        return f"step time {incumbent}, no bound known, {after}"
    if plan.status == "optimal":
        return f"bound = incumbent = {incumbent} {after}"
    gap = "" if objective.gap is None else f", gap {percent(objective.gap, 2)}"
    return f"bound {seconds(objective.lower_bound_s)}, incumbent {incumbent}{gap}, {after}"


# The words of messages and documents: docs/glossary.md, which the package holds.


_ROW = re.compile(r"^\| (?P<term>[^|]+?) \| (?P<meaning>.+?) \|$", re.MULTILINE)
_FIGURES = (
    (re.compile(r"^within [\d.]+ ?% of the best$"), "within x % of the best"),
    (re.compile(r"^batch [\d.]+$"), "batch x"),
    (re.compile(r"^[\d.]+ ?% (overlapped|serial)$"), r"\1"),
)
"""Words with a figure in them, and how the glossary has them."""
_HEADS = ("word", "---")
_UNITS = (
    " gb per s",
    " per gpu s",
    " gib",
    " gbps",
    " gbps per gpu",
    " bytes",
    " mb",
    " pct",
    " s",
    " w",
    " h",
)
"""At the end of keys of documents, as `_key` leaves them."""
_STATISTICS = (" mean", " max")


@cache
def meanings() -> dict[str, str]:
    """Every word of the glossary with what it means, in the order of the page."""
    page = resources.files("meshwright").joinpath("docs/glossary.md").read_text(encoding="utf-8")
    rows = [(row["term"].strip("`"), row["meaning"]) for row in _ROW.finditer(page)]
    return {term: meaning for term, meaning in rows if term not in _HEADS}


def meaning_of(words: str) -> tuple[str, str] | None:
    """The glossary's own spelling of a word, and its meaning; None for a word that it does not have.

    Case, dashes and underscores do not matter, nor a plural's s, nor the unit at the end of a key. Of words
    joined by `+` each is explained.

    Parameters
    ----------
    words
        A term, a key of a document, or terms joined by `+`.

    >>> meaning_of("TP")[0]
    'tp'
    >>> meaning_of("step_time_s")[0]
    'step time'
    """
    single = _meaning_of_one(words)
    if single is not None or "+" not in words:
        return single
    parts = [_meaning_of_one(part) for part in words.split("+")]
    explained = [part for part in parts if part is not None]
    if len(explained) < len(parts):
        return None
    return words.strip(), " ".join(f"{term}: {meaning}" for term, meaning in explained)


def _meaning_of_one(words: str) -> tuple[str, str] | None:
    for wanted in _spellings(_key(words)):
        term = _terms().get(wanted)
        if term is not None:
            return term, meanings()[term]
    return None


def _spellings(key: str) -> list[str]:
    """A word as it stands, and without a statistic, a unit and a plural's s behind it."""
    figure = _without(key, _STATISTICS)
    forms = [key, figure, _without(figure, _UNITS)]
    return list(dict.fromkeys(each for form in forms for each in (form, form.removesuffix("s"))))


def _without(key: str, endings: tuple[str, ...]) -> str:
    ending = next((each for each in endings if key.endswith(each)), "")
    return key.removesuffix(ending)


@cache
def _terms() -> dict[str, str]:
    """Every spelling of the glossary's words, the first row first."""
    terms: dict[str, str] = {}
    for term in meanings():
        for name in (term, *term.split(", ")):
            terms.setdefault(_key(name), term)
    return terms


def rule_meaning(name: str) -> tuple[str, str] | None:
    """The rule of this name, and what it says; None where no rule is called so.

    Parameters
    ----------
    name
        As messages and documents call the rule.

    >>> rule_meaning("heads-by-tp")
    ('heads-by-tp', 'heads mod tp = 0')
    """
    from meshwright.constraints.registry import rule_named, sentence_of

    rule = rule_named(name.strip())
    return None if rule is None else (rule.name, sentence_of(rule))


def explained_term(words: str) -> dict[str, str] | None:
    """A word of the glossary or the name of a rule, and what it means; None for others.

    Parameters
    ----------
    words
        As `meaning_of` and `rule_meaning` take them; of what is both, both are said.

    Returns
    -------
    dict or None
        `term` and `meaning`.
    """
    term, rule = meaning_of(words), rule_meaning(words)
    if term is not None and rule is not None:
        term = term[0], f"{term[1]} The rule of this name: {rule[1]}."
    said = term or rule
    return None if said is None else {"term": said[0], "meaning": said[1]}


def _key(words: str) -> str:
    plain = words.strip().lower().replace("-", " ").replace("_", " ")
    for pattern, word in _FIGURES:
        plain = pattern.sub(word, plain)
    return plain


def training_text(inputs: PlanInputs | Workload) -> str:
    """Precision, optimizer and framework, and the kind of step where it is not pretraining.

    Parameters
    ----------
    inputs
        Of a plan, or a workload of a run: both have these fields.
    """
    words: list[str] = [inputs.precision, inputs.optimizer, inputs.framework]
    if inputs.kind != PRETRAINING:
        words.append(inputs.kind)
    if inputs.loss is not None:
        words.append(f"{inputs.loss} loss")
    if inputs.reference is not None:
        words.append(f"reference {inputs.reference}")
    return ", ".join(words)


def trained_line(inputs: PlanInputs | Workload) -> list[tuple[str, str]]:
    """What is trained beside frozen weights, and how much of the model that is.

    Parameters
    ----------
    inputs
        Of a plan, or a workload of a run: both have these fields.
    """
    adapters = inputs.adapters
    if adapters is None:
        return []
    trained = adapter_counts(inputs.model, adapters).total
    share = trained / parameter_count(inputs.model)
    targets = ", ".join(adapters.targets)
    magnitudes = " and magnitudes" if adapters.decomposed else ""
    words = (
        f"adapters of rank {adapters.rank}{magnitudes} on {targets}: {trained:,} parameters, {share:.2%} of "
        f"the model's, beside frozen {adapters.base_bits}-bit weights"
    )
    return [("trained", words)]
