"""The tools of `meshwright mcp`, for programs that speak the Model Context Protocol.

Each tool is a public function with limits: what it takes is checked before anything is worked out, it is
answered in a process of its own (`serve/queue.py`), and files are read from one folder alone.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar, Unpack, get_type_hints

from pydantic import Field

import meshwright
from meshwright import api
from meshwright.documents import finite, json_text, parse_mapping, read_text
from meshwright.errors import InfeasibleError, InputError, MeshwrightError, message_of
from meshwright.model_specs.adapters import AdapterMethod
from meshwright.planner.analysis.neighbours import neighbours, single_choices
from meshwright.planner.audit import audit_document, audit_plan
from meshwright.planner.many.recommend import plan_sizes
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import plan_text
from meshwright.planner.report.explain_view import (
    audit_view,
    compare_view,
    comparison,
    explain_view,
)
from meshwright.planner.report.many_view import recommend_view
from meshwright.planner.report.plan_view import layout_line, plan_view
from meshwright.planner.report.plan_words import explained_term, status_words
from meshwright.planner.report.view import view_text
from meshwright.planner.runs.prediction import run_document
from meshwright.planner.solvers.processes import Say
from meshwright.serve import answers
from meshwright.serve.answers import (
    LONGEST_S,
    USUAL_S,
    Answer,
    AnsweredBy,
    FewestQuestion,
    Fields,
    Function,
    Offer,
    PlanQuestion,
    read_question,
)
from meshwright.serve.queue import PageLimits, QuestionQueue

MOST_RUNS = 500
"""Runs that one question may hold."""
MOST_BYTES = 2**20
"""Of the fields of one question, as JSON, and of a file that it names."""
MOST_CHARACTERS = 40_000
"""Of the words of one answer."""
_EXTRA = "the tools need the package mcp: pip install 'meshwright[mcp]'"
_ABOUT = """\
Plans how to train a large model on a GPU cluster: parallel degrees, micro-batch, ZeRO stage, recomputation
and rank mapping, proven optimal within a cost model whose error is said with each plan. `plan` first: its
answer names the plan (q1, q2, ...) for explain, compare and verify. Models and clusters are names of the
catalog, models of the Hugging Face hub too; a wrong name is answered with the near ones. Figures come from
the planner: quote them with their units, and say what a plan claims and what it does not.
"""

Name = Annotated[str, Field(min_length=1, max_length=300)]
Words = Annotated[list[Annotated[str, Field(max_length=100)]], Field(max_length=100)]
Seconds = Annotated[float, Field(ge=1, le=LONGEST_S)]


class PlanArguments(TypedDict, total=False):
    """What a program may say of a plan; what it must is what `PlanQuestion` has no default for."""

    model: Name
    cluster: Name
    global_batch: int
    seq_len: int
    gpus: int | None
    precision: str
    optimizer: str
    framework: str
    pin: dict[str, int | str] | None
    forbid: Words | None
    without: Words | None
    allow: Words | None
    train: Literal["full", AdapterMethod]
    reserve_gib: float | None
    tokens: float | None
    days: float | None
    gpu_hour_price: float | None
    time_limit_s: Seconds


class FewestArguments(PlanArguments, total=False):
    """Those of the fewest GPUs: a target beside."""

    step_time_s: float | None
    tokens_per_s: float | None


Tool = TypeVar("Tool", bound=Callable[..., dict[str, Any]])


def _with_arguments_of(
    kind: type[PlanQuestion], arguments: type, limit_s: float
) -> Callable[[Tool], Tool]:
    """A decorator: the signature of a tool names each argument, with the default of its question; `limit_s`
    is the default of its time.
    """
    defaults = {name: field.default or None for name, field in kind.model_fields.items()}
    defaults["time_limit_s"] = limit_s
    parameters = [Parameter("self", Parameter.POSITIONAL_ONLY)]
    for name, type_of_value in get_type_hints(arguments, include_extras=True).items():
        is_required = name in kind.model_fields and kind.model_fields[name].is_required()
        default = Parameter.empty if is_required else defaults[name]
        parameters.append(
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=type_of_value)
        )

    shown = Signature(parameters, return_annotation=dict[str, Any])

    def shown_in_full(tool: Tool) -> Tool:
        tool.__signature__ = shown  # type: ignore[attr-defined]
        return tool

    return shown_in_full


class PlannerTools:
    """The tools: their arguments are what a program is told of them, their docstrings what they are for.

    Parameters
    ----------
    offer
        Models and clusters that may be asked about.
    queue
        Where questions are answered.
    folder
        The only folder whose files may be named; no files when None.
    """

    def __init__(self, offer: Offer, queue: QuestionQueue, folder: Path | None = None) -> None:
        self._offer, self._queue = offer, queue
        self._folder = None if folder is None else folder.resolve()

    @_with_arguments_of(PlanQuestion, PlanArguments, USUAL_S)
    def plan(self, **arguments: Unpack[PlanArguments]) -> dict[str, Any]:
        """Find the fastest layout of a model on a cluster, with a proof.

        gpus: the first so many GPUs, all of the cluster's when absent. pin fixes choices, such as {"tp": 8,
        "pp": 4, "recompute": "none"}; forbid leaves out axes and techniques, such as ["cp"]; without says
        what software is not there, such as ["deepep"]; allow permits what changes the numbers of the run,
        such as ["fp8-params"]. tokens, days and gpu_hour_price ask for days, dollars and kWh of the training.
        """
        limit_s = arguments.get("time_limit_s", USUAL_S)
        return self._search(_answer_plan, PlanQuestion, {**arguments, "top": 1}, limit_s)

    @_with_arguments_of(FewestQuestion, FewestArguments, LONGEST_S)
    def recommend(self, **arguments: Unpack[FewestArguments]) -> dict[str, Any]:
        """Find the fewest GPUs, at most gpus, on which a model reaches a target.

        The target is one of: step_time_s, seconds of a step at most; tokens_per_s, at least; or tokens with
        days, in which they are to be trained. What else it takes is said of `plan`.
        """
        stated = {name for name, value in arguments.items() if value is not None}
        by_days = "days" in stated and not stated & {"step_time_s", "tokens_per_s"}
        limit_s = arguments.get("time_limit_s", LONGEST_S)
        fields = {**arguments, "by_days": by_days}
        return self._search(_answer_fewest, FewestQuestion, fields, limit_s)

    def estimate(self, run: dict[str, Any]) -> dict[str, Any]:
        """Price one fully given configuration: step time, its parts, memory of each pipeline rank. No search.

        run is a run file as a mapping: {"model": "llama-3-8b", "cluster": "dgx-h100", "run": {"gpus": 16,
        "seq_len": 8192, "global_batch": 64, "micro_batch": 1, "tp": 4, "pp": 1, "dp": 4, "zero_stage": 1,
        "recompute": "none"}}; {"runs": [...]} holds several. `meshwright schema run` has every field.
        """
        return self._ask(_answer_estimate, {"runs": self._runs(run)}, USUAL_S)

    def validate(self, runs: dict[str, Any] | str) -> dict[str, Any]:
        """Compare predicted with measured steps, row by row and summed up.

        runs is a run file as a mapping, whose rows have {"measured": {"step_time_s": ...}} beside what
        `estimate` takes; or the name of such a file in the folder that the server was started with.
        """
        if isinstance(runs, str):
            runs = parse_mapping(self._file_text(runs), runs)
        return self._ask(_answer_validate, {"runs": self._runs(runs)}, LONGEST_S)

    def explain(self, plan: Name, best: bool = False) -> dict[str, Any]:
        """Say why a plan is as it is and what one change would cost, or what a term or rule means.

        plan is the name of a plan of this session (q1), a plan file or folder in the server's folder, or a
        term such as "memory risk". best searches for the best plan with each single choice, and takes longer.
        """
        term = explained_term(plan)
        if term is not None:
            return term
        return self._ask(_answer_explain, {"plan": self._plan(plan), "best": best}, LONGEST_S)

    def compare(self, first: Name, second: Name) -> dict[str, Any]:
        """Say where two plans differ: figures, parts of the step, choices. Names as for `explain`."""
        fields = {"first": self._plan(first), "second": self._plan(second)}
        return self._ask(_answer_compare, fields, USUAL_S)

    def verify(self, plan: Name) -> dict[str, Any]:
        """Check a plan again without the solver: rules, memory, prices, and ranks and launch files beside it.

        Names as for `explain`; of a plan of this session the document alone is there.
        """
        if self._is_answer(plan):
            return self._ask(_answer_verify, {"plan": self._plan(plan)}, LONGEST_S)
        path = self._path(plan)
        folder = path if path.is_dir() else path.parent
        for each in (*folder.glob("*"), *folder.glob("*/*")):
            # What `verify` reads beside the plan.
            if not each.resolve().is_relative_to(folder):
                raise InputError("is a link out of the plan's folder", where=each.name)
        return self._ask(_answer_verify, {"path": str(path)}, LONGEST_S)

    def _search(
        self, function: Function, kind: type[PlanQuestion], fields: Fields, limit_s: float
    ) -> dict[str, Any]:
        """The answer to a question of this kind; fields that are null have the question's own defaults."""
        said = {name: each for name, each in fields.items() if each is not None}
        said.pop("time_limit_s", None)
        question = read_question(kind, {**said, "time_limit": limit_s})
        return self._ask(function, self._offer.resolved(question), limit_s)

    def _ask(self, function: Function, fields: Fields, limit_s: float) -> dict[str, Any]:
        """The answer to a question; raises InputError with the planner's words where there is none."""
        if len(json_text(dict(fields))) > MOST_BYTES:
            raise InputError(f"the question is larger than {MOST_BYTES} bytes")
        ticket = self._queue.ask(AnsweredBy(function, fields, 1), limit_s)
        ticket.ended.result()
        if ticket.error is not None:
            raise InputError(ticket.error["message"])
        answer: dict[str, Any] = ticket.answer
        if "plan.yaml" in ticket.texts:
            answer = {"plan": ticket.name, **answer}
        if len(answer.get("text", "")) > MOST_CHARACTERS:
            answer["text"] = answer["text"][:MOST_CHARACTERS] + "\n(cut here)"
        return answer

    def _runs(self, document: Mapping[str, Any]) -> str:
        """A run file of what was sent, with names of the catalog alone: a path of this machine is none."""
        rows = document.get("runs", [document])
        if not isinstance(rows, list) or not 1 <= len(rows) <= MOST_RUNS:
            raise InputError(f"must be a run, or a list of 1 to {MOST_RUNS} runs", where="runs")
        for row in rows:
            for kind, names in (("model", self._offer.models), ("cluster", self._offer.clusters)):
                value = row.get(kind) if isinstance(row, Mapping) else None
                if isinstance(value, str) and value not in names:
                    raise InputError(
                        f"not a {kind} of the catalog; write it out as a mapping",
                        where=kind,
                        value=value,
                    )
        # Fields beside a list of runs go along, for the reader to refuse.
        beside = document if "runs" in document else {}
        return json.dumps({**beside, "runs": [self._with_files(row) for row in rows]})

    def _with_files(self, row: Any) -> Any:
        """A run with the files that names stand for."""
        if not isinstance(row, Mapping):
            return row
        named = {"model": self._offer.models, "cluster": self._offer.clusters}
        return {
            key: named[key][value] if key in named and isinstance(value, str) else value
            for key, value in row.items()
        }

    @staticmethod
    def _is_answer(name: str) -> bool:
        return re.fullmatch(r"q\d{1,9}", name) is not None

    def _plan(self, name: str) -> str:
        """The text of a plan of this session or of the folder."""
        if not self._is_answer(name):
            path = self._path(name)
            return self._file_text(str(path / "plan.yaml" if path.is_dir() else path))
        texts = self._queue.ticket(name).texts
        if "plan.yaml" not in texts:
            raise InputError("that question was not answered with a plan", where="plan", value=name)
        return texts["plan.yaml"]

    def _path(self, name: str) -> Path:
        """A file or folder of the folder; raises InputError for any other."""
        if self._folder is None:
            what = "no files may be named: start the server with --folder DIR"
            raise InputError(what, where="plan", value=name)
        try:
            path = (self._folder / name).resolve()
            is_there = path.is_relative_to(self._folder) and path.exists()
        except (OSError, ValueError):
            is_there = False
        if not is_there:
            raise InputError("no such file in the server's folder", where="plan", value=name)
        return path

    def _file_text(self, name: str) -> str:
        return read_text(self._path(name), MOST_BYTES)


TOOLS: Sequence[str] = (
    "plan",
    "recommend",
    "estimate",
    "explain",
    "compare",
    "verify",
    "validate",
)


def serve_tools(offer: Offer, folder: Path | None, limits: PageLimits) -> None:
    """Answer on standard input and output until the other side closes them.

    Parameters
    ----------
    offer
        Models and clusters that may be asked about.
    folder
        The only folder whose files may be named; no files when None.
    limits
        What may be used of this machine.

    Raises
    ------
    InputError
        Where the package mcp is not there.
    """
    _library()
    queue = QuestionQueue(answers.load, limits)
    try:
        tool_server(PlannerTools(offer, queue, folder)).run("stdio")
    finally:
        queue.close()


def tool_server(tools: PlannerTools) -> Any:
    """The server of the tools, not yet connected. Raises InputError where the package mcp is not there.

    Parameters
    ----------
    tools
        Whose methods named in `TOOLS` are offered; their errors are handed on in words.
    """
    server_class, tool_class, tool_error = _library()

    def told(tool: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        @wraps(tool)
        def answer(**arguments: Any) -> dict[str, Any]:
            try:
                return tool(**arguments)
            except MeshwrightError as error:
                raise tool_error(message_of(error)[0]) from None

        answer.__signature__ = signature(tool, eval_str=True)  # type: ignore[attr-defined]
        return answer

    offered = [tool_class.from_function(told(getattr(tools, name))) for name in TOOLS]
    for tool in offered:
        # The package drops arguments that a tool does not have: a misspelt one would change the question.
        tool.fn_metadata.arg_model.model_config["extra"] = "forbid"
        tool.fn_metadata.arg_model.model_rebuild(force=True)
        tool.parameters["additionalProperties"] = False
    version = meshwright.__version__
    about = {"instructions": _ABOUT, "version": version, "log_level": "ERROR"}
    return server_class("meshwright", tools=offered, **about)


def _library() -> tuple[Any, Any, Any]:
    """What is used of the package mcp: its server and tools, and the error whose words a program is told."""
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp.server.mcpserver.tools import Tool
    except ImportError:
        raise InputError(_EXTRA, where="mcp") from None
    return MCPServer, Tool, ToolError


# What runs in the processes that answer, beside `serve/answers.py`.


def _answer_plan(fields: Fields, say: Say) -> Answer:
    shown = answers.answer_plan(fields, say)
    return {**shown, "answer": _summary(answers.plan_of(shown["texts"]["plan.yaml"]))}


def _summary(plan: Plan) -> dict[str, Any]:
    """A plan for a program: its figures, choices, and the screen of `meshwright plan --full` as Markdown."""
    layout = plan.layout
    line = (
        None if layout is None else layout_line(layout, experts=plan.inputs.model.moe is not None)
    )
    summary = {
        "status": plan.status,
        "proof": status_words(plan.status, plan.objective.gap),
        "layout": line,
        "figures": answers.plan_figures_of(plan),
        "warnings": list(plan.warnings),
        "text": view_text(plan_view(plan)),
    }
    document: dict[str, Any] = finite(summary)
    return document


def _answer_fewest(fields: Fields, say: Say) -> Answer:
    recommended = plan_sizes(answers.fewest_request(fields), lambda words: say({"words": words}))
    answer: dict[str, Any] = {
        "reached": bool(recommended.reached),
        "text": view_text(recommend_view(recommended)),
    }
    best = (*recommended.reached, *recommended.missed)[0]
    if not best.has_plan:
        return {"answer": answer, "texts": {}}
    plan = answers.plan_of(best.files["plan.yaml"])
    summary = _summary(plan)
    answer |= {"gpus": plan.inputs.gpus} | {name: summary[name] for name in ("layout", "figures")}
    return {"answer": answer, "texts": {"plan.yaml": plan_text(plan)}}


def _answer_estimate(fields: Fields, _: Say) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        runs = api.estimate(_written(folder, "runs.json", fields["runs"]))
    return {"answer": finite({"runs": [run_document(priced) for priced in runs]}), "texts": {}}


def _answer_validate(fields: Fields, _: Say) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        report = api.validate(_written(folder, "runs.json", fields["runs"]))
    return {"answer": finite(report.as_document()), "texts": {}}


def _answer_explain(fields: Fields, say: Say) -> Answer:
    plan = answers.plan_of(fields["plan"])
    if plan.layout is None:
        raise InfeasibleError(f"the plan has no layout (status {plan.status})")
    changes = neighbours(plan)
    choices = None
    if fields["best"]:
        choices = single_choices(plan, changes, lambda words: say({"words": words}))
    return {"answer": {"text": view_text(explain_view(plan, changes, choices))}, "texts": {}}


def _answer_compare(fields: Fields, _: Say) -> Answer:
    plans = answers.plan_of(fields["first"]), answers.plan_of(fields["second"])
    names = ("first", "second")
    document = finite(comparison(plans))
    return {"answer": {**document, "text": view_text(compare_view(names, plans))}, "texts": {}}


def _answer_verify(fields: Fields, _: Say) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(fields["path"]) if "path" in fields else None
        document = audit_document(audit_plan(path or _written(folder, "plan.yaml", fields["plan"])))
    if path is None:
        document["plan"] = "of this session"
    return {"answer": {**document, "text": view_text(audit_view(document))}, "texts": {}}


def _written(folder: str, name: str, text: str) -> Path:
    path = Path(folder) / name
    path.write_text(text, encoding="utf-8")
    return path
