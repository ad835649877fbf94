"""A user's own measured runs."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.commands.terminal import PATH, common, force_option, print_json, show, warn


@click.command("calibrate")
@click.argument("runs", type=PATH, nargs=-1, required=True, metavar="RUNS.yaml... [LOG...]")
@click.option(
    "-o", "--output", type=PATH, metavar="STACK.yaml", required=True, help="The stack to write."
)
@click.option("--name", metavar="NAME", help="Of the stack; by default the runs' framework.")
@click.option("--like", metavar="STACK", help="The known stack to begin from.")
@click.option(
    "--measure", is_flag=True, help="Run micro-benchmarks on the GPUs too; start under torchrun."
)
@force_option
@common
def calibrate_command(
    *,
    runs: tuple[Path, ...],
    output: Path,
    name: str | None,
    like: str | None,
    measure: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Learn the constants of your own stack from a few measured runs.

    RUNS are run files whose rows have `measured`: 3 to 20 runs of one framework on one kind of device. LOGs
    are logs of nccl-tests. `--calibration STACK.yaml` then prices with what was learned.
    """
    from meshwright import api
    from meshwright.documents.output_files import refuse_taken, write_files
    from meshwright.planner.report.calibration_view import calibration_view
    from meshwright.planner.request.calibration_file import calibration_text

    refuse_taken(output.parent, [output.name], force)
    learned = api.calibrate(*runs, name=name, like=like, measure=measure)
    if learned is None:
        return
    text = calibration_text(learned.calibration)
    write_files(output.parent, {output.name: text}, force)
    if as_json:
        print_json(learned.as_document())
        return
    warn("note", learned.notes)
    show(calibration_view(learned))
    click.echo(f"\nWritten to {output}. Price with it: --calibration {output}")
