"""The answers to what the page asks. They run in a process of their own, and are plain data.

Each function takes the fields of a question and `say`, which is told how it gets on. It returns a mapping:
`answer` for the page, and `texts`, files by name that can be fetched afterwards; or `error`.
"""

from __future__ import annotations

import base64
import io
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, Field, model_validator

from meshwright import api
from meshwright.cluster_specs.reader import (
    cluster_names,
    is_mixed_cluster,
    load_cluster,
    not_in_catalog,
    read_cluster,
)
from meshwright.constraints.fabric import INSIDE_DOMAIN
from meshwright.costmodel.execution_names import OPTIMIZERS, PRECISIONS
from meshwright.documents import ClosedDocument, finite, json_text, validated
from meshwright.errors import InputError, message_of, near_miss
from meshwright.frameworks.catalog import FRAMEWORK_NAMES
from meshwright.model_specs.adapters import TRAINED
from meshwright.model_specs.reader import catalog_names, hub_names, read_model
from meshwright.planner.drawing import count, counted, percent, rounded_seconds
from meshwright.planner.launch.plan_files import TARGETS, plan_files
from meshwright.planner.many.jobs import JobDoc
from meshwright.planner.many.recommend import SizeRequest, plan_sizes
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
from meshwright.planner.request.choices import CHOICES, FORBIDS, PERMISSIONS, WITHOUT
from meshwright.planner.solvers.clock import Shares, within
from meshwright.planner.solvers.processes import Say, on_processes

# What the page may ask, checked before anything is planned, and the names that it offers.


LONGEST_S = 60.0
"""Seconds that one search may be asked to take."""
USUAL_S = 30.0
MOST_SIZES = 12
"""Numbers of GPUs in one picture."""


class PlanQuestion(JobDoc):
    """A job without files: the options of `meshwright plan` by their names."""

    name: None = None
    calibration: None = None
    """A file of this machine, which a page cannot name."""
    nodes: tuple[str, ...] | None = None
    """By name: a text may be that of a file."""
    time_limit: Annotated[float, Field(ge=1, le=LONGEST_S)] = USUAL_S
    top: Annotated[int, Field(ge=1, le=20)] = 5
    lora_targets: Annotated[str, Field(max_length=400)] | None = None
    robustness: bool = True
    """Whether the plan is searched again with the cost model off by its measured error."""


class SizesQuestion(PlanQuestion):
    """A plan at each of some numbers of GPUs."""

    sizes: Annotated[
        tuple[Annotated[int, Field(ge=1, le=1_048_576)], ...], Field(max_length=MOST_SIZES)
    ] = ()
    """From an eighth of `gpus` to four times as many when empty."""

    @model_validator(mode="after")
    def _has_a_size(self) -> Self:
        if self.gpus is None and not self.sizes:
            raise ValueError("give gpus or sizes: around which numbers of GPUs?")
        return self


class FewestQuestion(PlanQuestion):
    """The fewest GPUs, at most `gpus`, that reach a target."""

    step_time_s: Annotated[float, Field(gt=0, lt=1e18)] | None = None
    tokens_per_s: Annotated[float, Field(gt=0, lt=1e18)] | None = None
    by_days: bool = False
    """Whether `days` are the target: those in which `tokens` are to be trained."""

    @model_validator(mode="after")
    def _has_a_target(self) -> Self:
        if self.by_days and self.days is None:
            raise ValueError("give days: in how many are the tokens to be trained?")
        if not self.by_days and self.step_time_s is None and self.tokens_per_s is None:
            raise ValueError("give a target: step_time_s, tokens_per_s, or by_days with days")
        return self


ShortName = Annotated[str, Field(max_length=32)]


class FilesQuestion(ClosedDocument):
    """What is made of a plan that was found before."""

    plan: ShortName
    """What the answer with the plan is called."""
    target: ShortName = ""
    """As `meshwright launch --target`; the plan's own framework when empty."""


class CompareQuestion(ClosedDocument):
    """Two plans that were found before."""

    first: ShortName
    second: ShortName


_OF_CHOICE = ("name", "title", "of", "words", "low", "high")


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Models and clusters that may be asked about: those of the catalog, and files named at the start."""

    models: Mapping[str, str]
    """By name, what `read_model` takes for it."""
    clusters: Mapping[str, str]
    """By name, what `read_cluster` takes for it."""

    @staticmethod
    def of_files(models: Sequence[Path] = (), clusters: Sequence[Path] = ()) -> Offer:
        """The catalog, and models and clusters of files before it. Raises InputError for a bad file.

        Parameters
        ----------
        models
            Files of models.
        clusters
            Files of clusters, none with parts.
        """
        for cluster in clusters:
            if is_mixed_cluster(cluster):
                what = "a cluster with parts is planned by `meshwright plan` alone"
                raise InputError(what, where="--cluster", value=str(cluster))
        own_models = {read_model(path).name: str(path.absolute()) for path in models}
        own_clusters = {read_cluster(path).name: str(path.absolute()) for path in clusters}
        names = (*catalog_names(), *hub_names())
        return Offer(
            models={**own_models, **{name: name for name in names if name not in own_models}},
            clusters={
                **own_clusters,
                **{name: name for name in cluster_names() if name not in own_clusters},
            },
        )

    def resolved(self, question: PlanQuestion) -> dict[str, Any]:
        """The fields of a question with what its names stand for.

        Parameters
        ----------
        question
            Whose `model` and `cluster` are names of the offer.

        Raises
        ------
        InputError
            For a name that is not offered: a path of this machine is none.
        """
        if question.model not in self.models:
            raise InputError(
                "neither in the catalog nor named at the start (--model FILE)",
                where="model",
                value=question.model,
                did_you_mean=near_miss(question.model, self.models),
            )
        if question.cluster not in self.clusters:
            raise not_in_catalog("cluster", question.cluster, tuple(self.clusters))
        named = {
            "model": self.models[question.model],
            "cluster": self.clusters[question.cluster],
        }
        return {**question.model_dump(), **named}

    def document(self) -> dict[str, Any]:
        """Everything that the page's controls offer."""
        return {
            "models": list(self.models),
            "clusters": [self._cluster(name) for name in self.clusters],
            "frameworks": list(FRAMEWORK_NAMES),
            "precisions": list(PRECISIONS),
            "optimizers": list(OPTIMIZERS),
            "train": list(TRAINED),
            "targets": list(TARGETS),
            "pins": [
                {name: getattr(choice, name) for name in _OF_CHOICE}
                for choice in CHOICES
                if choice.is_pinned
            ],
            "words": {
                "forbid": list(FORBIDS),
                "without": list(WITHOUT),
                "allow": list(PERMISSIONS),
                "inside_domain": list(INSIDE_DOMAIN),
            },
            "limits": {"time_limit": LONGEST_S, "usual_s": USUAL_S, "sizes": MOST_SIZES},
        }

    def _cluster(self, name: str) -> dict[str, Any]:
        spec = self.clusters[name]
        cluster = load_cluster(name) if spec == name else read_cluster(spec)
        return {
            "name": name,
            "device": cluster.device.name,
            "gpus": cluster.gpus,
            "any_size": cluster.elastic,
            "gpus_per_node": cluster.gpus_per_node,
        }


Kind = TypeVar("Kind", bound=BaseModel)


def read_question(kind: type[Kind], fields: Mapping[str, object]) -> Kind:
    """A question as the page sends it. Raises InputError, a line for each mistake.

    Parameters
    ----------
    kind
        The questions of one form.
    fields
        By name, as they come in JSON.
    """
    return validated(kind, fields, "question")


Fields = Mapping[str, Any]
Answer = dict[str, Any]
Function = Callable[[Fields, Say], Answer]

SIZE_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
"""Of the GPUs that are asked for, in a picture without sizes."""
MOST_STEPS = 13
"""Plans among which a search for the fewest GPUs shares its time; of 1,024 nodes it takes 3 to 15."""
_NOT_OF_PLAN = {"name", "calibration", "time_limit", "top", *COST_FIELDS}
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
    """What the page is told of an error: the planner's own words, and which field they are about.

    Parameters
    ----------
    error
        What was raised while a question was answered; `where` is known of an InputError alone.

    Returns
    -------
    dict
        `message`, `where` (None where no field is meant) and `exit_code`.
    """
    message, exit_code = message_of(error)
    where = error.where if isinstance(error, InputError) else None
    return {"message": message, "where": where, "exit_code": int(exit_code)}


def answer_plan(fields: Fields, say: Say) -> Answer:
    """The fastest layout, as `meshwright plan` finds it.

    Parameters
    ----------
    fields
        Of a `PlanQuestion`, with what its names stand for (`Offer.resolved`).
    say
        Is told of every better plan: `{"words": ...}`.
    """
    plan = api.plan(
        **{name: fields[name] for name in (*_OF_PLAN, "top", "robustness", *COST_FIELDS)},
        time_limit_s=fields["time_limit"],
        progress=lambda words: say({"words": words}),
    )
    return shown_plan(plan)


def shown_plan(plan: Plan) -> Answer:
    """A plan as the page shows it: figures, choices and the sections of `meshwright plan`.

    Parameters
    ----------
    plan
        With or without a layout.
    """
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
    """What plans are compared by: seconds, tokens a second, GiB, and days, dollars and kWh where asked.

    Parameters
    ----------
    plan
        With or without a layout: figures of one without are None.
    """
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
    """A plan at each of some numbers of GPUs, told one by one: GPUs against time, dollars and kWh.

    Parameters
    ----------
    fields
        Of a `SizesQuestion`, with what its names stand for (`Offer.resolved`).
    say
        Is told of every size: first `words`, then its `row`.
    """
    options = {name: fields[name] for name in (*_OF_PLAN, *COST_FIELDS)}
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
    """What is asked of a search for the fewest GPUs, whose plans share the time of the question.

    Parameters
    ----------
    fields
        Of a `FewestQuestion`, with what its names stand for (`Offer.resolved`).
    """
    plan = {name: fields[name] for name in (*_OF_PLAN, *COST_FIELDS)}
    for name in ("model", "cluster", "gpus"):
        del plan[name]
    return SizeRequest(
        model=fields["model"],
        clusters=(fields["cluster"],),
        plan={**plan, "time_limit": fields["time_limit"] / MOST_STEPS},
        most_gpus=fields["gpus"],
        step_time_s=fields["step_time_s"],
        tokens_per_s=fields["tokens_per_s"],
        days=fields["days"] if fields["by_days"] else None,
        workers=1,
    )


def answer_fewest(fields: Fields, say: Say) -> Answer:
    """The fewest GPUs that reach a target, with their plan, as `meshwright recommend` finds them.

    Parameters
    ----------
    fields
        As `fewest_request` takes them.
    say
        Is told of every plan: `{"words": ...}`.
    """
    recommended = plan_sizes(fewest_request(fields), lambda words: say({"words": words}))
    shown = (*recommended.reached, *recommended.missed)[0]
    verdict = {"verdict": _html(recommend_view(recommended)), "reached": bool(recommended.reached)}
    if not shown.has_plan:
        return {"answer": verdict, "texts": {}}
    planned = plan_of(shown.files["plan.yaml"])
    priced = with_cost(planned, Budget.of(fields))
    answer = shown_plan(priced if priced is planned else with_digest(priced))
    return {**answer, "answer": {**answer["answer"], **verdict}}


def answer_comparison(fields: Fields, say: Say) -> Answer:
    """Where two plans differ, as `meshwright compare` says it.

    Parameters
    ----------
    fields
        `first` and `second`, the texts of two plan files.
    say
        Is told nothing.
    """
    del say
    plans = plan_of(fields["first"]), plan_of(fields["second"])
    first, second = (", ".join([_title(plan), *_pinned(plan)]) for plan in plans)
    return {"answer": {"html": _html(compare_view((first, second), plans))}, "texts": {}}


def answer_launch(fields: Fields, say: Say) -> Answer:
    """The files that start a plan, as `meshwright launch` writes them, in one archive (base64).

    Parameters
    ----------
    fields
        `plan`, the text of a plan file, and `target`, empty for the plan's own framework.
    say
        Is told nothing.
    """
    del say
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        for name, text in plan_files(plan_of(fields["plan"]), fields["target"] or None).items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name.endswith(".sh") else 0o644) << 16
            files.writestr(entry, text)
    return {"answer": {}, "texts": {"launch.zip": base64.b64encode(archive.getvalue()).decode()}}


def answer_report(fields: Fields, say: Say) -> Answer:
    """A plan as the page that `meshwright report` writes.

    Parameters
    ----------
    fields
        `plan`, the text of a plan file.
    say
        Is told nothing.
    """
    del say
    return {"answer": {}, "texts": {"report.html": plan_page(plan_of(fields["plan"]))}}


def plan_of(text: str) -> Plan:
    """The plan of the text of a plan file. Raises InputError for another.

    Parameters
    ----------
    text
        As `plan_text` writes it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(text, encoding="utf-8")
        return read_plan(path)


def _html(view: View) -> str:
    return "".join(map(block_html, view))


def load(say: Say) -> None:
    """Makes a small plan, so that what every plan needs is loaded before somebody waits for it.

    Parameters
    ----------
    say
        Is told nothing.
    """
    del say
    small: dict[str, Any] = {"cluster": "dgx-h100", "gpus": 8, "global_batch": 8, "seq_len": 4096}
    api.plan("llama-3-8b", **small, robustness=False)
