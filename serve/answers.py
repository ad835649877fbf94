"""The answers to what the page asks. They run in a process of their own, and are plain data.

Each function takes the fields of a question and `say`, which is told how it gets on. It returns a mapping:
`answer` for the page, and `texts`, files by name that can be fetched afterwards; or `error`.
"""

from __future__ import annotations

import base64
import io
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright import api
from meshwright.cluster_specs.reader import read_cluster
from meshwright.documents import finite, json_text
from meshwright.errors import InputError, message_of
from meshwright.planner.drawing import count, counted, percent, rounded_seconds
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.many.jobs import JobDoc
from meshwright.planner.many.recommend import SizeRequest, plan_sizes, read_size_request
from meshwright.planner.many.sweep import SweepReport, sweep
from meshwright.planner.plan.document import Plan, with_digest
from meshwright.planner.plan.texts import plan_document, plan_text, read_plan
from meshwright.planner.plan.training_cost import COST_FIELDS, Budget, with_cost
from meshwright.planner.report.explain_view import compare_view
from meshwright.planner.report.many_view import recommend_view, sweep_files, sweep_view
from meshwright.planner.report.plan_page import plan_page
from meshwright.planner.report.plan_view import layout_line, plan_view
from meshwright.planner.report.plan_words import status_words
from meshwright.planner.report.view import View, block_html, section_html, sections
from meshwright.planner.request.choices import CHOICES
from meshwright.planner.solvers.clock import Shares, within
from meshwright.planner.solvers.processes import Say, on_processes

Fields = Mapping[str, Any]
Answer = dict[str, Any]
Function = Callable[[Fields, Say], Answer]

SIZE_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
"""Of the GPUs that are asked for, in a picture without sizes."""
MOST_STEPS = 12
"""Plans between which a search for the fewest GPUs shares its time: as a bisection of 1,024 nodes takes."""
_NOT_OF_PLAN = {"name", "calibration", "time_limit", "top", *COST_FIELDS}
_ADAPTERS = ("train", "lora_rank", "lora_targets")
_OF_PLAN = tuple(name for name in JobDoc.model_fields if name not in _NOT_OF_PLAN)


class AnsweredBy:
    """A question with the function that answers it, which another process can be handed.

    Parameters
    ----------
    function
        One of this module.
    fields
        Of the question.
    copies
        Copies of itself that the process may work with.
    """

    def __init__(self, function: Function, fields: Fields, copies: int) -> None:
        self._function, self._fields, self._copies = function, dict(fields), copies

    def __call__(self, say: Say) -> Answer:
        """The answer; whatever goes wrong is said in it."""
        try:
            with on_processes(self._copies):
                return self._function(self._fields, say)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the page is told, and the process goes on
            return {"error": error_document(error)}


def error_document(error: Exception) -> dict[str, Any]:
    """What the page is told of an error: the planner's own words, and which field they are about."""
    message, exit_code = message_of(error)
    where = error.where if isinstance(error, InputError) else None
    return {"message": message, "where": where, "exit_code": int(exit_code)}


def answer_plan(fields: Fields, say: Say) -> Answer:
    """The fastest layout, as `meshwright plan` finds it."""
    plan = api.plan(
        **{
            name: fields[name]
            for name in (*_OF_PLAN, *_ADAPTERS, "top", "robustness", *COST_FIELDS)
        },
        time_limit_s=fields["time_limit"],
        progress=lambda words: say({"words": words}),
    )
    return shown_plan(plan)


def shown_plan(plan: Plan) -> Answer:
    """A plan as the page shows it: figures, choices and the sections of `meshwright plan`."""
    (_, first), *others = sections(plan_view(plan))
    layout, inputs = plan.layout, plan.inputs
    choices = {}
    if layout is not None:
        for choice in CHOICES:
            for document in (layout, plan.execution):
                if choice.is_pinned and hasattr(document, choice.name):
                    choices[choice.name] = choice.word(getattr(document, choice.name))
    answer = {
        "title": _title(plan),
        "gpus": inputs.gpus,
        "status": plan.status,
        "proof": status_words(plan.status, plan.objective.gap),
        "layout": None
        if layout is None
        else layout_line(layout, experts=inputs.model.moe is not None),
        "figures": plan_figures_of(plan),
        "cards": _cards(plan),
        "choices": choices,
        "pins": inputs.pins,
        "warnings": list(plan.warnings),
        "first": "".join(block_html(block) for block in first),
        "sections": [
            {"title": title, "html": section_html("", blocks)} for title, blocks in others
        ],
    }
    texts = {"plan.yaml": plan_text(plan), "plan.json": json_text(plan_document(plan))}
    return {"answer": finite(answer), "texts": texts}


def _title(plan: Plan) -> str:
    inputs = plan.inputs
    return f"{inputs.model.name} on {counted(inputs.gpus, 'GPU')} of {inputs.cluster.name}"


def _pinned(plan: Plan) -> list[str]:
    return [f"{name}={value}" for name, value in plan.inputs.pins.items()]


def plan_figures_of(plan: Plan) -> dict[str, Any]:
    """What plans are compared by: seconds, tokens a second, GiB, and days, dollars and kWh where asked."""
    figures = plan.figures()
    cost = {} if plan.cost is None else plan.cost.plan.model_dump()
    names = ("step_time_s", "tokens_per_s", "mfu", "peak_memory_gib", "gap", "message")
    return {**{name: figures.get(name) for name in names}, **cost}


def _cards(plan: Plan) -> list[tuple[str, str, str]]:
    """(figure, its name in words, its value in words)."""
    figures = plan_figures_of(plan)
    write: dict[str, tuple[str, Callable[[Any], str]]] = {
        "step_time_s": ("a step", rounded_seconds),
        "tokens_per_s": ("tokens/s", count),
        "mfu": ("MFU", percent),
        "peak_memory_gib": ("GiB on the fullest GPU", "{:.1f}".format),
        "days": ("days", "{:,.1f}".format),
        "dollars": ("dollars", count),
        "kwh": ("kWh of the GPUs", count),
    }
    return [
        (name, words, written(figures[name]))
        for name, (words, written) in write.items()
        if figures.get(name) is not None
    ]


def answer_sizes(fields: Fields, say: Say) -> Answer:
    """A plan at each of some numbers of GPUs, told one by one: GPUs against time, dollars and kWh."""
    options = {name: fields[name] for name in (*_OF_PLAN, *_ADAPTERS, *COST_FIELDS)}
    for name in ("model", "cluster", "gpus"):
        del options[name]
    sizes = _sizes(fields)
    report = SweepReport(axes={"gpus": sizes})
    with within(fields["time_limit"]):
        shares = Shares(len(sizes))
        for size in sizes:
            say({"words": f"{count(size)} GPUs"})
            planned = sweep(
                fields["model"],
                over={"gpus": (size,)},
                cluster=fields["cluster"],
                time_limit_s=shares.next_s(),
                **options,
            )
            report.rows.extend(planned.rows)
            report.plans.extend(planned.plans)
            say({"row": _row(planned.rows[0])})
    answer = {"rows": [_row(row) for row in report.rows], "html": _html(sweep_view(report))}
    return {"answer": finite(answer), "texts": sweep_files(report)}


def _sizes(fields: Fields) -> tuple[int, ...]:
    """In rising order; those that the question names, or around the GPUs that it asks for."""
    if fields["sizes"]:
        return tuple(sorted(set(fields["sizes"])))
    cluster = read_cluster(fields["cluster"], fields["gpus"])
    sizes = [fields["gpus"] * factor for factor in SIZE_FACTORS]
    return tuple(round(size) for size in sizes if size == round(size) and 1 <= size <= cluster.gpus)


_OF_ROW = (
    *("gpus", "status", "step_time_s", "lower_bound_s", "tokens_per_s", "tokens_per_s_per_gpu"),
    *("mfu", "peak_memory_gib", "days", "gpu_hours", "dollars", "kwh", "message"),
)


def _row(row: Fields) -> dict[str, Any]:
    return {name: row.get(name) for name in _OF_ROW}


def fewest_request(fields: Fields) -> SizeRequest:
    """What is asked of a search for the fewest GPUs, whose plans share the time of the question."""
    plan = {name: fields[name] for name in (*_OF_PLAN, *COST_FIELDS)}
    for name in ("model", "cluster", "gpus"):
        del plan[name]
    return read_size_request(
        model=fields["model"],
        clusters=(fields["cluster"],),
        plan={**plan, "time_limit": fields["time_limit"] / MOST_STEPS},
        gpus=fields["gpus"],
        step_time_s=fields["step_time_s"],
        tokens_per_s=fields["tokens_per_s"],
        days=fields["days"] if fields["by_days"] else None,
        sizes=(),
        reserves_gib=(),
        workers=1,
        cache=None,
    )


def answer_fewest(fields: Fields, say: Say) -> Answer:
    """The fewest GPUs that reach a target, with their plan, as `meshwright recommend` finds them."""
    found = plan_sizes(fewest_request(fields), lambda words: say({"words": words}))
    shown = (*found.reached, *found.missed)[0]
    verdict = {"verdict": _html(recommend_view(found)), "reached": bool(found.reached)}
    if not shown.has_plan:
        return {"answer": verdict, "texts": {}}
    planned = _read(shown.files["plan.yaml"])
    priced = with_cost(planned, Budget.of(fields))
    answer = shown_plan(priced if priced is planned else with_digest(priced))
    return {**answer, "answer": {**answer["answer"], **verdict}}


def answer_comparison(fields: Fields, say: Say) -> Answer:
    """Where two plans differ, as `meshwright compare` says it."""
    del say
    plans = _read(fields["first"]), _read(fields["second"])
    first, second = (", ".join([_title(plan), *_pinned(plan)]) for plan in plans)
    return {"answer": {"html": _html(compare_view((first, second), plans))}, "texts": {}}


def answer_launch(fields: Fields, say: Say) -> Answer:
    """The files that start a plan, as `meshwright launch` writes them, in one archive (base64)."""
    del say
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        for name, text in plan_files(_read(fields["plan"]), fields["target"] or None).items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name.endswith(".sh") else 0o644) << 16
            files.writestr(entry, text)
    return {"answer": {}, "texts": {"launch.zip": base64.b64encode(archive.getvalue()).decode()}}


def answer_report(fields: Fields, say: Say) -> Answer:
    """A plan as the page that `meshwright report` writes."""
    del say
    return {"answer": {}, "texts": {"report.html": plan_page(_read(fields["plan"]))}}


def _read(text: str) -> Plan:
    """The plan of a text that this program wrote before."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(text, encoding="utf-8")
        return read_plan(path)


def _html(view: View) -> str:
    return "".join(map(block_html, view))


def load(say: Say) -> None:
    """Makes a small plan, so that what every plan needs is loaded before somebody waits for it."""
    del say
    small: dict[str, Any] = {"cluster": "dgx-h100", "gpus": 8, "global_batch": 8, "seq_len": 4096}
    api.plan("llama-3-8b", **small, robustness=False)
