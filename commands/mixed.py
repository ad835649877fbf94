"""`plan` for a cluster file with parts, and what reads such plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from meshwright.commands.terminal import ProgressLine, print_json, show, write_plan
from meshwright.errors import ExitCode, InputError

_NOT_MIXED = ("baseline", "sweep", "export_model")
"""Options that ask for a plan on equal devices."""


def show_mixed_plan(
    model: str, output: Path | None, *, force: bool, as_json: bool, **options: Any
) -> int:
    """Plans on a mixed cluster and shows what came out.

    Parameters
    ----------
    model
        As `plan` takes it.
    output
        Folder for the plan and its launch files.
    force
        Whether files that are there are replaced.
    as_json
        Whether the document is printed.
    options
        The other options of `plan`.

    Returns
    -------
    int
        The exit code.

    Raises
    ------
    InputError
        If an option does not go with a mixed cluster.
    """
    from meshwright.api.mixed import plan_mixed
    from meshwright.documents.output_files import refuse_taken
    from meshwright.planner.launch.mixed_files import MIXED_FILES, mixed_files
    from meshwright.planner.mixed.document import mixed_document
    from meshwright.planner.report.mixed_view import mixed_view
    from meshwright.planner.report.plan_view import plan_view
    from meshwright.planner.solvers.processes import on_processes

    for name in _NOT_MIXED:
        if options.pop(name, None) is not None:
            raise InputError(
                "does not go with a mixed cluster: plan on one of its parts to ask for this",
                where=f"--{name.replace('_', '-')}",
            )
    if output is not None:
        refuse_taken(output, MIXED_FILES, force)
    progress = ProgressLine()
    try:
        with on_processes():
            result = plan_mixed(model, progress=progress, **options)
    finally:
        progress.clear()
    document = result.document
    if as_json:
        print_json(mixed_document(document))
    else:
        show(mixed_view(document))
        if result.alone is not None:
            click.echo()
            show(plan_view(result.alone))
    exit_codes = {"infeasible": ExitCode.NO_ANSWER, "unknown": ExitCode.NO_TIME}
    if document.status not in exit_codes and output is not None:
        write_plan(output, mixed_files(result), force)
    if not as_json:
        click.echo(f"\n{_next_step(document.status in exit_codes, output)}")
    return int(exit_codes.get(document.status, ExitCode.DONE))


def explain_mixed_plan(file: Path, best: bool | None, *, as_json: bool) -> None:
    """Shows what a plan on a mixed cluster runs where, against each part alone, and its proof.

    Parameters
    ----------
    file
        The `mixed_plan.yaml`.
    best
        Whether single choices were to be searched, which only plans on one kind of device are.
    as_json
        Whether the document is printed.

    Raises
    ------
    InputError
        If the file cannot be used, or `best` is asked for.
    InfeasibleError
        If it has no plan.
    """
    from meshwright.planner.mixed.document import mixed_document
    from meshwright.planner.mixed.texts import read_mixed_answer
    from meshwright.planner.report.mixed_view import mixed_view

    if best:
        what = "single choices are searched for plans on one kind of device: plan on one part to ask for this"
        raise InputError(what, where="--best")
    plan = read_mixed_answer(file)
    if as_json:
        print_json(mixed_document(plan))
    else:
        show(mixed_view(plan))


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
    from meshwright.planner.mixed.texts import read_mixed_answer
    from meshwright.planner.report.mixed_page import mixed_page

    for name, value in (("--sweep", sweep), ("--calibration", calibration)):
        if value is not None:
            what = "does not go with a plan on a mixed cluster: plan on one part to ask for this"
            raise InputError(what, where=name)
    return mixed_page(read_mixed_answer(file))


def _next_step(is_without: bool, output: Path | None) -> str:
    """What to do now, in words."""
    if is_without:
        return "Next: change what is asked for, or give it more time with --time-limit."
    if output is None:
        return "Next: the same command with -o DIR writes this plan and the files that start it."
    return f"Next: make {output}/hostfile of hostfile.template, then bash {output}/launch.sh slurm"
