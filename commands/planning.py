"""Plan, price, check, explain, start."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import click

import meshwright
from meshwright.commands.options import (
    PATH,
    TIME_LIMIT_S,
    calibration_option,
    complete_model,
    cost_flags,
    default_option,
    plan_option,
    plan_options,
    value_option,
)
from meshwright.commands.terminal import (
    ProgressLine,
    common,
    force_option,
    give,
    print_json,
    say,
    show,
    warn,
    warn_of_edits,
    write_plan,
)
from meshwright.errors import ExitCode, InputError, near_miss

READING = "reading model and cluster"
"""What progress says before a search has anything to say."""


@click.command("plan")
@click.argument("model", shell_complete=complete_model)
@plan_options
@click.option(
    "--nodes", metavar="LIST|FILE", help="Use only these nodes (host list); else the Slurm job's."
)
@plan_option(
    "objective",
    "expected: the mean over the posterior of --calibration, else by measured pairs of runs.",
)
@plan_option(
    "max_cut_use", "Share of every cut of the fabric that may be used, by others too.", "X"
)
@value_option(
    "--export-model",
    PATH,
    "FILE",
    "Write the search's last CP-SAT model, as text that OR-Tools reads.",
)
@calibration_option
@click.option("--full", is_flag=True, help="Print all tables, down to the proof.")
@force_option
@common
@click.pass_context
def plan_command(
    ctx: click.Context,
    /,
    *,
    model: str,
    pin: tuple[str, ...],
    sweep: str | None,
    output: Path | None,
    full: bool,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the fastest layout of MODEL on a cluster, with a proof.

    Degrees, pipeline split, recomputation and the GPU of every rank are chosen together. The answer is one
    screen with the plan's closest rivals; --full prints all of it. With -o the plan and the files that start
    it are written to a folder. With --sweep there is a table of many plans instead. A cluster file with parts
    makes it a pipeline through unlike devices.
    """
    options |= {"pin": ",".join(pin), "force": force, "as_json": as_json}
    with ProgressLine(READING):
        from meshwright.cluster_specs.reader import is_mixed_cluster

        show_plan = _show_mixed_plan if is_mixed_cluster(options["cluster"]) else _show_plan
    if sweep is not None:
        _show_sweep(model, sweep, output, **options)
        return
    if options["time_limit_s"] is None and options["method"] == "cp-sat":
        options["time_limit_s"] = TIME_LIMIT_S
    status = show_plan(model, output, full=full, **options)
    exit_codes = {"infeasible": ExitCode.NO_ANSWER, "unknown": ExitCode.NO_TIME}
    ctx.exit(exit_codes.get(status, ExitCode.DONE))


def _show_plan(
    model: str, output: Path | None, *, full: bool, force: bool, as_json: bool, **options: Any
) -> str:
    """Plans on a cluster of like devices and shows what came out: the plan's status comes back."""
    from meshwright.planner.solvers.processes import on_processes

    with ProgressLine(READING) as progress, on_processes():
        from meshwright import api
        from meshwright.planner.launch.plan_files import PLAN_FILES, next_step, plan_files

        _refuse_taken(output, PLAN_FILES, options["export_model"], force=force)
        plan = api.plan(model, progress=progress, **options)
    if as_json:
        from meshwright.planner.plan.texts import plan_document

        print_json(plan_document(plan))
    else:
        from meshwright.planner.report.plan_view import plan_view, short_view

        with ProgressLine("comparing with what is near"):
            view = plan_view(plan) if full else short_view(plan)
        left_out = [] if plan.left_out is None else [plan.left_out]
        warn("warning", [*plan.warnings, *left_out])
        show(view)
    if output is not None and plan.layout is not None:
        write_plan(output, plan_files(plan), force)
    if not as_json:
        say(f"\n{next_step(plan, output)}")
    return plan.status


def _refuse_taken(
    output: Path | None, names: Iterable[str], model_file: Path | None, *, force: bool
) -> None:
    """Raises InputError for files of a plan, or of its search, that are there already."""
    from meshwright.documents import refuse_taken, refuse_taken_file

    if output is not None:
        refuse_taken(output, names, force)
    if model_file is not None:
        refuse_taken_file(model_file, force)


def _show_sweep(
    model: str, over: str, output: Path | None, *, force: bool, as_json: bool, **options: Any
) -> None:
    """Plans every combination of a sweep; a table, a document or files come out."""
    with ProgressLine("starting"):
        from meshwright.documents import refuse_taken, write_files
        from meshwright.planner.many.sweep import combinations_of, read_axes
        from meshwright.planner.report.many_view import SWEEP_FILES, sweep_files, sweep_view

    if output is not None:
        refuse_taken(output, SWEEP_FILES, force)
    for name in ("baseline", "export_model"):
        if options.pop(name) is not None:
            raise InputError("does not go with --sweep", where=f"--{name.replace('_', '-')}")
    options["top_k"] = options.pop("top")
    if options["time_limit_s"] is None and options["method"] == "cp-sat":
        options["time_limit_s"] = TIME_LIMIT_S * sum(1 for _ in combinations_of(read_axes(over)))
    with ProgressLine(READING) as progress:
        report = meshwright.sweep(model, over=over, progress=progress, **options)
    if output is not None:
        write_files(output, sweep_files(report), force)
    give(as_json, report.document(), partial(sweep_view, report))


@click.command("estimate")
@click.argument("run", type=PATH, metavar="RUN.yaml")
@click.option(
    "--from-launch", is_flag=True, help="RUN is a launch file of a framework, not a run file."
)
@click.option(
    "--with",
    "settings",
    multiple=True,
    metavar="A=X",
    help="What it leaves open: cluster=dgx-h100.",
)
@value_option("--measured", PATH, "LOG", "What the run logged: its step and memory are set beside.")
@value_option(
    "-o --output", PATH, "FILE", "Write the run file of a launch file, or of a log, here."
)
@calibration_option
@common
def estimate_command(
    *,
    run: Path,
    from_launch: bool,
    settings: tuple[str, ...],
    measured: Path | None,
    output: Path | None,
    calibration: Path | None,
    as_json: bool,
) -> None:
    """Price one fully given configuration: time, memory, traffic. No search.

    A RUN.yaml: {model: llama-3-8b, cluster: dgx-h100, run: {gpus: 16, seq_len: 8192, global_batch: 128,
    tp: 2, pp: 2, micro_batch: 1, zero_stage: 1}}. `schema run` has every field.

    The ranks lie in Megatron's order: tp, cp, dp, pp from the inside. LOG is text of Megatron or torchtitan,
    a history of Weights & Biases (CSV, JSON), TensorBoard's event files (pip install 'meshwright[logs]'), or
    MLflow's folder of a run.
    """
    if output is not None and not from_launch and measured is None:
        raise InputError("needs --from-launch or --measured: RUN is a run file", where="--output")
    if settings and not from_launch:
        what = "goes with --from-launch: a run file says all itself, so write it there"
        raise InputError(what, where="--with", value=", ".join(settings))
    with ProgressLine("starting"):
        from meshwright import api
        from meshwright.planner.report.run_view import run_view
        from meshwright.planner.request.reader import read_calibration
        from meshwright.planner.runs.launches.reader import price_launch
        from meshwright.planner.runs.logs import price_logged
        from meshwright.planner.runs.prediction import run_document

    documents = []
    if from_launch:
        runs = price_launch(run, settings, output, read_calibration(calibration), measured)
    elif measured is not None:
        runs = iter([price_logged(run, measured, output, read_calibration(calibration))])
    else:
        runs = iter(api.estimate(run, calibration=calibration))
    for priced in runs:
        document = run_document(priced)
        documents.append(document)
        warn("warning", priced.warnings)
        if not as_json:
            warn("note", priced.run.remarks)
            show(run_view(priced))
    if as_json:
        print_json(documents[0] if len(documents) == 1 else {"runs": documents})


@click.command("validate")
@click.argument("runs", type=PATH, metavar="RUNS.yaml")
@click.option("--rows", "every_row", is_flag=True, help="Show every row, not only the worst.")
@click.option("--plot", type=PATH, metavar="FILE", help="Draw predicted against measured: .svg.")
@calibration_option
@common
def validate_command(
    runs: Path, every_row: bool, plot: Path | None, calibration: Path | None, as_json: bool
) -> None:
    """Compare predicted with measured steps, row by row and summed up."""
    with ProgressLine("starting"):
        from meshwright import api
        from meshwright.documents import write_files
        from meshwright.planner.report.run_view import (
            check_picture,
            validation_svg,
            validation_view,
        )

    if plot is not None:
        check_picture(plot)
    with ProgressLine("predicting measured runs"):
        report = api.validate(runs, calibration=calibration)
        if plot is not None:
            write_files(plot.parent, {plot.name: validation_svg(report)}, force=True)
        document = report.as_document()
    give(as_json, document, partial(validation_view, document, every_row=every_row))


@click.command("verify")
@click.argument("plans", type=PATH, nargs=-1, required=True, metavar="PLAN [DIR]")
@click.option(
    "--all", "is_all", is_flag=True,
    help="Every word is a plan, or a folder: all plans below it, each with the files beside it.",
)  # fmt: skip
@common
@click.pass_context
def verify_command(
    ctx: click.Context, /, plans: tuple[Path, ...], is_all: bool, as_json: bool
) -> None:
    """Check a plan and its files again, without the solver.

    Rules, memory, prices, the ranks group by group, and the launch files of DIR (the plan's folder when
    absent). Exit code 1 where anything does not hold, and what.
    """
    with ProgressLine("starting"):
        from meshwright.planner.audit import (
            Audits,
            audit_document,
            audit_plan,
            audit_plans,
            audits_document,
        )
        from meshwright.planner.report.explain_view import audit_view, audits_view

    if len(plans) > 2 and not is_all:
        what = "takes a plan and the folder of its files; several plans are checked with --all"
        raise InputError(what, where="verify", value=" ".join(map(str, plans)))
    with ProgressLine("working the plan out again"):
        audited = audit_plans(plans) if is_all else audit_plan(*plans)
    document = audits_document(audited) if isinstance(audited, Audits) else audit_document(audited)
    give(as_json, document, partial(audits_view if is_all else audit_view, document))
    ctx.exit(ExitCode.DONE if document["passed"] else ExitCode.NO_ANSWER)


@click.command("explain")
@click.argument("words", type=str, nargs=-1, required=True, metavar="PLAN|TERM")
@click.option(
    "--best/--no-best",
    default=None,
    help="Search for the best plan with each single choice; by default where that is quick.",
)
@common
def explain_command(words: tuple[str, ...], best: bool | None, as_json: bool) -> None:
    """Say why a plan is as it is and what one change would cost, or what a term means.

    TERM is a word, or several, of a plan's screen or docs/glossary.md, or the name of a rule: explain
    memory risk.
    """
    with ProgressLine("starting"):
        from meshwright.planner.analysis.neighbours import (
            neighbours,
            searches_at_once,
            single_choices,
        )
        from meshwright.planner.mixed.document import mixed_plan_path
        from meshwright.planner.plan.texts import read_feasible_plan
        from meshwright.planner.report.explain_view import explain_document, explain_view
        from meshwright.planner.report.plan_words import explained_term, meanings
        from meshwright.planner.solvers.processes import on_processes

    plan = Path(" ".join(words))
    if len(words) > 1 and not plan.exists() and Path(words[0]).exists():
        what = "takes a plan, whose choices are all shown, or a term: not both"
        raise InputError(what, where="explain", value=str(plan))
    term = None if plan.exists() else explained_term(str(plan))
    if term is not None:
        if as_json:
            print_json(dict(term))
        else:
            say(f"{term['term']}: {term['meaning']}")
        return
    if not plan.exists() and not plan.suffix and len(plan.parts) == 1:
        near = near_miss(str(plan), [name for term in meanings() for name in term.split(", ")])
        what = "neither a plan's file or folder nor a term of the glossary nor a rule"
        raise InputError(what, where="explain", value=str(plan), did_you_mean=near)
    mixed = mixed_plan_path(plan)
    if mixed is not None:
        explain_mixed_plan(mixed, best, as_json=as_json)
        return
    with ProgressLine("pricing what is near"):
        explained = read_feasible_plan(plan)
        warn_of_edits(explained)
        changes = neighbours(explained)
    choices = None
    if best or (best is None and searches_at_once(explained)):
        with ProgressLine() as progress, on_processes():
            choices = single_choices(explained, changes, progress)
    if as_json:
        print_json(explain_document(explained, changes, choices))
    else:
        warn("warning", explained.warnings)
        show(explain_view(explained, changes, choices))


@click.command("compare")
@click.argument("plan", type=PATH, metavar="PLAN")
@click.argument("other", type=PATH, metavar="FILE")
@cost_flags
@value_option("-o --output", PATH, "FILE", "Write the edits of the script as a patch.")
@force_option
@common
def compare_command(
    *,
    plan: Path,
    other: Path,
    output: Path | None,
    force: bool,
    as_json: bool,
    **cost: Any,
) -> None:
    """Show where two plans differ, or what PLAN brings over what is run today.

    FILE is another plan, or a launch script or run file: then the plan's speed-up comes first, what each
    change brings, and the smallest edit of the script that reaches it.
    """
    with ProgressLine("starting"):
        from meshwright.documents import refuse_taken_file, write_files
        from meshwright.planner.analysis.waterfall import is_plan
        from meshwright.planner.mixed.document import read_any_plan
        from meshwright.planner.plan.training_cost import Budget
        from meshwright.planner.report.explain_view import compare_view, comparison
        from meshwright.planner.report.prediction_view import (
            baseline_document,
            baseline_view,
            patch_of,
        )

    if is_plan(other):
        plans = (read_any_plan(plan), read_any_plan(other))
        warn_of_edits(*plans)
        if as_json:
            print_json(comparison(plans))
        else:
            show(compare_view((str(plan), str(other)), plans))
        return
    if output is not None:
        refuse_taken_file(output, force)
    with ProgressLine("pricing the way from today's run to the plan"):
        compared = meshwright.compare(plan, other, **cost)
    if output is not None:
        write_files(output.parent, {output.name: patch_of(compared)}, force)
    unanswered = Budget.of(cost).unanswered
    if unanswered is not None and compared.cost is None:
        warn("warning", [unanswered])
    give(as_json, baseline_document(compared), partial(baseline_view, compared))


# `plan` for a cluster file with parts, and what reads such plans.


def _show_mixed_plan(
    model: str, output: Path | None, *, full: bool, force: bool, as_json: bool, **options: Any
) -> str:
    """Plans on a mixed cluster and shows what came out: the plan's status comes back."""
    with ProgressLine("starting"):
        from meshwright.api import plan_mixed
        from meshwright.planner.launch.plan_files import (
            MIXED_FILES,
            mixed_files,
            next_step_on_parts,
        )
        from meshwright.planner.mixed.document import mixed_document
        from meshwright.planner.report.mixed_view import mixed_view
        from meshwright.planner.report.plan_view import plan_view, short_view
        from meshwright.planner.solvers.processes import on_processes

    _refuse_taken(output, MIXED_FILES, options["export_model"], force=force)
    with ProgressLine(READING) as progress, on_processes():
        result = plan_mixed(model, progress=progress, robustness=full, **options)
    document = result.document
    if as_json:
        print_json(mixed_document(document))
    else:
        warn("warning", document.warnings)
        show(mixed_view(document, is_full=full))
        if result.alone is not None:
            warn("warning", result.alone.warnings)
            say()
            show(plan_view(result.alone) if full else short_view(result.alone))
    if document.status not in ("infeasible", "unknown") and output is not None:
        write_plan(output, mixed_files(result), force)
    if not as_json:
        say(f"\n{next_step_on_parts(result, output)}")
    return document.status


def explain_mixed_plan(file: Path, best: bool | None, *, as_json: bool) -> None:
    """Shows what a plan on a mixed cluster runs where, against each part alone, and what changes would cost.

    Parameters
    ----------
    file
        The `mixed_plan.yaml`.
    best
        Whether the best plan with each single choice is searched for, which takes a search each.
    as_json
        Whether the document is printed.

    Raises
    ------
    InputError
        If the file cannot be used.
    InfeasibleError
        If it has no plan.
    """
    from meshwright.planner.analysis.neighbours import parts_choices, parts_neighbours
    from meshwright.planner.mixed.document import read_mixed_answer
    from meshwright.planner.report.mixed_view import explain_parts_document, explain_parts_view
    from meshwright.planner.solvers.processes import on_processes

    plan = read_mixed_answer(file)
    warn_of_edits(plan)
    with ProgressLine("pricing what is near"):
        changes = parts_neighbours(plan)
    choices = None
    if best:
        with ProgressLine() as progress, on_processes():
            choices = parts_choices(plan, changes, progress)
    if as_json:
        print_json(explain_parts_document(plan, changes, choices))
    else:
        warn("warning", plan.warnings)
        show(explain_parts_view(plan, changes, choices))


def mixed_page_of(file: Path, *, sweep: str | None, calibration: Path | None) -> str:
    """The page of a plan on a mixed cluster.

    Parameters
    ----------
    file
        The `mixed_plan.yaml`.
    sweep, calibration
        What was asked beside it, which only plans on one kind of device take.

    Raises
    ------
    InputError
        If the file cannot be used, or one of the options is given.
    InfeasibleError
        If it has no plan.
    """
    from meshwright.planner.mixed.document import read_mixed_answer
    from meshwright.planner.report.mixed_view import mixed_page

    for name, value in (("--sweep", sweep), ("--calibration", calibration)):
        if value is not None:
            what = "does not go with a plan on a mixed cluster: plan on one part to ask for this"
            raise InputError(what, where=name)
    plan = read_mixed_answer(file)
    warn_of_edits(plan)
    return mixed_page(plan)


# A plan drawn: as a page, and its step as a timeline.


@click.command("report")
@click.argument("plan", type=PATH, metavar="PLAN")
@click.option("-o", "--output", type=PATH, metavar="FILE", required=True, help="The page, HTML.")
@click.option(
    "--sweep",
    is_flag=False,
    flag_value="",
    metavar="[OPTIONS]",
    help="With controls over other plans: half and twice of everything, or e.g. gpus=256:2048:x2.",
)
@calibration_option
@force_option
@common
def report_command(
    plan: Path,
    *,
    output: Path,
    sweep: str | None,
    calibration: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a plan as one page: charts, what-if controls, figures, reasons. It loads nothing.

    --sweep plans beforehand for other GPUs, batches, sequences, precisions, networks and HBM; the page has
    a control for each.
    """
    with ProgressLine("starting"):
        from meshwright import api
        from meshwright.documents import refuse_taken_file, write_files
        from meshwright.planner.mixed.document import mixed_plan_path
        from meshwright.planner.plan.texts import read_feasible_plan

    refuse_taken_file(output, force)
    mixed = mixed_plan_path(plan)
    with ProgressLine("planning what the page's controls show" if sweep is not None else "drawing"):
        if mixed is not None:
            text = mixed_page_of(mixed, sweep=sweep, calibration=calibration)
        else:
            planned = read_feasible_plan(plan)
            warn_of_edits(planned)
            text = api.report(planned, sweep=sweep, calibration=calibration)
    write_files(output.parent, {output.name: text}, force)
    if as_json:
        print_json({"file": str(output), "bytes": len(text.encode())})
    else:
        say(str(output))


@click.command("trace")
@click.argument("plan", type=PATH, metavar="PLAN")
@click.option("-o", "--output", type=PATH, metavar="FILE", required=True, help="The trace, JSON.")
@value_option("--micro-batches num_micro_batches", int, "N", "Draw the first N; all when absent.")
@force_option
@common
def trace_command(
    plan: Path, output: Path, num_micro_batches: int | None, force: bool, as_json: bool
) -> None:
    """Draw a plan's step: every pass on every pipeline rank, communication, the optimizer and memory.

    FILE is in Chrome's trace format: open it in Perfetto (ui.perfetto.dev) or chrome://tracing.
    """
    import json

    from meshwright.documents import refuse_taken_file, write_files
    from meshwright.planner.analysis.timeline import trace_document, trace_of
    from meshwright.planner.drawing import counted, seconds
    from meshwright.planner.mixed.document import read_any_plan

    refuse_taken_file(output, force)
    with ProgressLine("playing the step"):
        drawn = read_any_plan(plan)
        warn_of_edits(drawn)
        played = trace_of(drawn, num_micro_batches)
        document = trace_document(played)
    write_files(
        output.parent, {output.name: json.dumps(document, separators=(",", ":")) + "\n"}, force
    )
    events = len(document["traceEvents"])
    if as_json:
        print_json({"file": str(output), "events": events, **document["otherData"]})
        return
    micro_batches = counted(played.num_micro_batches, "micro-batch", "micro-batches")
    say(
        f"{output}: {micro_batches} on {counted(played.pp, 'pipeline rank')}, "
        f"{seconds(played.seconds)} drawn, {seconds(played.step_time_s)} predicted"
    )


# The page that asks the planner.


_own_models = value_option(
    "--model models", PATH, "FILE", "A model of your own beside the catalog.", multiple=True
)
_own_clusters = value_option(
    "--cluster clusters", PATH, "FILE", "A cluster of your own beside the catalog.", multiple=True
)
_at_once = value_option(
    "--at-once",
    click.IntRange(1, 64),
    "N",
    "Searches side by side; one for every two cores by default, at most four.",
)


@click.command("serve")
@_own_models
@_own_clusters
@default_option("--port", click.IntRange(0, 65535), 0, "P", "0: any that is free.")
@_at_once
@click.option("--open", "is_opened", is_flag=True, help="Open the page in the browser.")
@common
def serve_command(
    *,
    models: tuple[Path, ...],
    clusters: tuple[Path, ...],
    port: int,
    at_once: int | None,
    is_opened: bool,
    as_json: bool,
) -> None:
    """Answer on a page in the browser: choose, plan, compare, try what-ifs, download.

    The page is for this machine alone: its address, which is printed, has a token. It loads nothing from
    elsewhere. Ctrl-C ends it. Needs pip install 'meshwright[serve]'.
    """
    from meshwright.serve.answers import Offer
    from meshwright.serve.queue import PageLimits
    from meshwright.serve.server import HOST, listening, new_token, serve_page

    offer = Offer.of_files(models, clusters)
    listener, token = listening(port), new_token()
    address = f"http://{HOST}:{listener.getsockname()[1]}/{token}/"

    def say_address() -> None:
        if as_json:
            print_json({"address": address})
        else:
            say(f"{address}\nCtrl-C ends it.")
        if is_opened:
            click.launch(address)

    serve_page(offer, listener, token, PageLimits(at_once=at_once or 0), when_ready=say_address)


# The tools of the Model Context Protocol.


@click.command("mcp")
@_own_models
@_own_clusters
@value_option("--folder", PATH, "DIR", "Plans and run files that may be named; none without.")
@_at_once
@partial(common, is_passed=False)
def mcp_command(
    *,
    models: tuple[Path, ...],
    clusters: tuple[Path, ...],
    folder: Path | None,
    at_once: int | None,
) -> None:
    """Answer programs that speak the Model Context Protocol, over standard input and output.

    Tools: plan, recommend, estimate, explain, compare, verify, validate. Nothing is written and nothing
    listens; it ends when the program closes it. Needs pip install 'meshwright[mcp]'.
    """
    from meshwright.serve.answers import Offer
    from meshwright.serve.queue import PageLimits
    from meshwright.serve.tools import serve_tools

    if folder is not None and not folder.is_dir():
        raise InputError("no such folder", where="--folder", value=str(folder))
    serve_tools(Offer.of_files(models, clusters), folder, PageLimits(at_once=at_once or 0))
