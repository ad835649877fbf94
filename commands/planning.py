"""Plan, price, check, explain, start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from meshwright.commands.options import plan_options
from meshwright.commands.terminal import (
    PATH,
    ProgressLine,
    common,
    force_option,
    print_json,
    show,
    warn,
)
from meshwright.errors import ExitCode


@click.command()
@click.argument("model")
@plan_options
@force_option
@common
@click.pass_context
def plan(
    ctx: click.Context, /, as_json: bool, output: Path | None, force: bool, **options: Any
) -> None:
    """Find the fastest layout of MODEL on a cluster, with a proof.

    Degrees, pipeline split, recomputation and the GPU of every rank are chosen together. With -o the plan and
    the files that start it are written to a folder.
    """
    from meshwright.documents.output_files import write_files
    from meshwright.planner.launch.plan_files import next_step, plan_files, refuse_taken
    from meshwright.planner.plan.make_plan import make_plan
    from meshwright.planner.plan.texts import plan_document
    from meshwright.planner.report.plan_view import plan_view
    from meshwright.planner.request.reader import read_request

    request = read_request(**options)
    if output is not None:
        refuse_taken(output, force)
    progress = ProgressLine()
    try:
        found = make_plan(request, progress=progress)
    finally:
        progress.clear()
    if as_json:
        print_json(plan_document(found))
    else:
        warn("warning", found.warnings)
        show(plan_view(found))
    if output is not None and found.layout is not None:
        write_files(output, plan_files(found), force)
    if not as_json:
        click.echo(f"\n{next_step(found, output)}")
    ctx.exit(
        {"infeasible": ExitCode.NO_ANSWER, "unknown": ExitCode.NO_TIME}.get(
            found.status, ExitCode.DONE
        )
    )


@click.command()
@click.argument("run", type=PATH, metavar="RUN.yaml")
@click.option(
    "--from-launch", is_flag=True, help="RUN is a launch file of a framework, not a run file."
)
@click.option(
    "--with", "given", multiple=True, metavar="A=X", help="What it leaves open: cluster=dgx-h100."
)
@click.option(
    "-o", "--output", type=PATH, metavar="FILE", help="Write a launch file's run file here."
)
@common
def estimate(
    run: Path, from_launch: bool, given: tuple[str, ...], output: Path | None, as_json: bool
) -> None:
    """Price one fully given configuration: time, memory, traffic. No search.

    The ranks lie in Megatron's order: tp, cp, dp, pp from the inside.
    """
    from meshwright.planner.report.run_view import run_view
    from meshwright.planner.runs.from_launch import price_launch
    from meshwright.planner.runs.prediction import price_runs, run_document

    documents = []
    for priced in price_launch(run, given, output) if from_launch else price_runs(run):
        documents.append(run_document(priced))
        warn("warning", priced.warnings)
        if not as_json:
            warn("note", priced.run.remarks)
            show(run_view(priced))
    if as_json:
        print_json(documents[0] if len(documents) == 1 else {"runs": documents})


@click.command()
@click.argument("runs", type=PATH, metavar="RUNS.yaml")
@click.option("--rows", "every_row", is_flag=True, help="Show every row, not only the worst.")
@click.option(
    "--plot", type=PATH, metavar="FILE", help="Draw predicted against measured: .png or .svg."
)
@common
def validate(runs: Path, every_row: bool, plot: Path | None, as_json: bool) -> None:
    """Compare predicted with measured steps, row by row and summed up."""
    from meshwright.planner.report.run_view import validation_view
    from meshwright.planner.report.validation_plot import check_plot, write_scatter
    from meshwright.planner.runs.prediction import validation_report

    if plot is not None:
        check_plot(plot)
    report = validation_report(runs)
    if plot is not None:
        write_scatter(report, plot)
    if as_json:
        print_json(report.as_document())
    else:
        show(validation_view(report, every_row=every_row))


@click.command()
@click.argument("plan", type=PATH, metavar="PLAN")
@click.option(
    "--target", metavar="T", help="A framework or scheduler; by default the plan's framework."
)
@click.option(
    "-o", "--output", type=PATH, metavar="DIR", required=True, help="Folder for the files."
)
@force_option
@common
def launch(plan: Path, target: str | None, output: Path, force: bool, as_json: bool) -> None:
    """Write the files that start a plan in a framework."""
    from meshwright.documents.output_files import write_files
    from meshwright.planner.launch.plan_files import plan_files
    from meshwright.planner.plan.texts import read_plan

    found = read_plan(plan)
    files = plan_files(found, target)
    written = write_files(output, files, force)
    if as_json:
        print_json(
            {"target": target, "directory": str(output), "files": [path.name for path in written]}
        )
    else:
        click.echo("\n".join(str(path) for path in written))


@click.command()
@click.argument("plan", type=PATH, metavar="PLAN")
@common
def explain(plan: Path, as_json: bool) -> None:
    """Say why a plan is as it is, and what bounds it."""
    from meshwright.planner.analysis.neighbours import neighbours
    from meshwright.planner.plan.texts import read_plan
    from meshwright.planner.report.explain_view import explain_document, explain_view

    changes = neighbours(found := read_plan(plan))
    if as_json:
        print_json(explain_document(found, changes))
    else:
        warn("warning", found.warnings)
        show(explain_view(found, changes))


@click.command()
@click.argument("plans", type=PATH, nargs=2, metavar="PLAN PLAN")
@common
def compare(plans: tuple[Path, Path], as_json: bool) -> None:
    """Show where two plans differ, and what that costs."""
    from meshwright.planner.plan.texts import read_plan
    from meshwright.planner.report.explain_view import compare_view, comparison

    first, second = (read_plan(path) for path in plans)
    if as_json:
        print_json(comparison((first, second)))
    else:
        show(compare_view((str(plans[0]), str(plans[1])), (first, second)))
