"""The command line: parse, call, print, exit code. Nothing else in this project prints.

Heavy modules are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from planner.options import experts_options, plan_options

if TYPE_CHECKING:
    from planner.report.parts import Renderable

DONE, NO_PLAN, BAD_INPUT, NO_TIME, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 70, 130
_JSON, _DEBUG = "meshwright.json", "meshwright.debug"
LONGEST_WORD = 80
_PLAIN = str.maketrans("█·", "#.")

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class _CheckFailedError(Exception):
    """The command worked, and its answer is no."""


class _Commands(click.Group):
    """Says what a mistyped command may have meant, and turns every error into a message and an exit code."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            near = get_close_matches(name[:LONGEST_WORD], self.commands, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"No such command {name[:LONGEST_WORD]!r}.{hint} Commands: {', '.join(self.commands)}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with ctx.scope(cleanup=False):
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        except BrokenPipeError:
            # Whoever read the output has enough; what is still buffered goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(DONE)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)
        except (click.exceptions.Exit, click.Abort):
            raise
        except click.ClickException as error:
            _json_error(ctx, error.format_message(), error.exit_code)
            raise
        except _CheckFailedError as error:
            _fail(ctx, str(error), NO_PLAN)
        except Exception as error:
            if ctx.meta.get(_DEBUG):
                raise
            if isinstance(error, ImportError):
                _fail(ctx, f"the installation is incomplete: {error}", INTERNAL)
            from planner.report.failures import message_of

            message, is_fault = message_of(error)
            _fail(ctx, message, INTERNAL if is_fault else BAD_INPUT)


def _fail(ctx: click.Context, message: str, exit_code: int) -> None:
    click.echo(f"Error: {message}", err=True)
    _json_error(ctx, message, exit_code)
    ctx.exit(exit_code)


def _json_error(ctx: click.Context, message: str, exit_code: int) -> None:
    """With --json there is a document on standard output, whatever happens."""
    if ctx.meta.get(_JSON):
        click.echo(json.dumps({"schema": 1, "error": {"message": message, "exit_code": exit_code}}))


def _print_json(document: dict[str, Any]) -> None:
    """The one JSON document of a command: what goes wrong after it is only said on standard error."""
    from planner.documents import json_text

    click.echo(json_text(document))
    click.get_current_context().meta[_JSON] = False


def _show(views: Iterable[Renderable]) -> None:
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        for view in views:
            console.print(view)
    shown = "\n".join(text.rstrip() for text in captured.get().splitlines())
    encoding = sys.stdout.encoding or "utf-8"
    if not encoding.lower().startswith("utf"):
        shown = shown.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    click.echo(shown)


def _warn(words: str, lines: Iterable[str]) -> None:
    for text in lines:
        click.echo(f"{words}: {text}", err=True)


class _ProgressLine:
    """One line on standard error that is overwritten; silent where that is not a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._start = time.monotonic()
        self._next = 0.0

    def __call__(self, text: str) -> None:
        now = time.monotonic() - self._start
        if self._terminal and now >= self._next:
            self._next = now + 0.1
            width = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
            click.echo(f"\r\x1b[K{f'{now:6.1f} s  {text}'[:width]}", nl=False, err=True)

    def clear(self) -> None:
        """Removes the line."""
        if self._terminal:
            click.echo("\r\x1b[K", nl=False, err=True)


def _remember(key: str) -> Callable[[click.Context, click.Parameter, bool], bool]:
    def store(ctx: click.Context, parameter: click.Parameter, value: bool) -> bool:
        del parameter
        ctx.meta[key] = ctx.meta.get(key, False) or value
        return value

    return store


def _common(command: Decorated) -> Decorated:
    """--json and --debug, which every command has."""
    words = "Print one JSON document instead of tables."
    command = click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=_remember(_JSON), help=words
    )(command)
    return _debug(command)


_debug = click.option(
    "--debug", is_flag=True, is_eager=True, expose_value=False, callback=_remember(_DEBUG), help="Tracebacks."
)
_force = click.option("--force", is_flag=True, help="Replace files that are already in the folder.")
_PATH = click.Path(path_type=Path)


def _show_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    del parameter
    if not value or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        click.echo(f"meshwright {version('meshwright')}")
    except PackageNotFoundError:
        click.echo("meshwright, not installed as a package")
    ctx.exit()


_version_option = click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version.",
)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@_version_option
@_debug
def main() -> None:
    """Plan how to train a large model on a GPU cluster.

    MODEL is a name from `meshwright catalog models`, a model YAML or a Hugging Face config.json. CLUSTER is a
    name from `meshwright catalog clusters` or a cluster YAML.

    Exit codes: 0 done, 1 no plan exists or a check failed, 2 bad usage or input, 3 the time limit came
    before any plan, 130 interrupted.
    """


@main.command()
@click.argument("model")
@plan_options
@_force
@_common
@click.pass_context
def plan(ctx: click.Context, /, as_json: bool, output: Path | None, force: bool, **options: Any) -> None:
    """Find the fastest layout of MODEL on a cluster, with a proof.

    Degrees, pipeline split, recomputation and the GPU of every rank are chosen together. With -o the plan and
    the files that start it are written to a folder.
    """
    from planner.documents import plan_document
    from planner.launch.files import write_files
    from planner.plan_files import next_step, plan_files, refuse_taken
    from planner.report.plan_view import plan_view
    from planner.request_reader import read_request
    from planner.service import plan as make_plan

    request = read_request(**options)
    if output is not None:
        refuse_taken(output, force)
    progress = _ProgressLine()
    try:
        found = make_plan(request, progress)
    finally:
        progress.clear()
    if as_json:
        _print_json(plan_document(found))
    else:
        _warn("warning", found.warnings)
        _show(plan_view(found))
    if output is not None and found.layout is not None:
        write_files(output, plan_files(found), force)
    if not as_json:
        click.echo(f"\n{next_step(found, output)}")
    ctx.exit({"infeasible": NO_PLAN, "unknown": NO_TIME}.get(found.status, DONE))


@main.command()
@click.argument("run", type=_PATH, metavar="RUN.yaml")
@click.option("--from-launch", is_flag=True, help="RUN is a launch file of a framework, not a run file.")
@click.option("--with", "given", multiple=True, metavar="A=X", help="What it leaves open: cluster=dgx-h100.")
@click.option("-o", "--output", type=_PATH, metavar="FILE", help="Write a launch file's run file here.")
@_common
def estimate(
    run: Path, from_launch: bool, given: tuple[str, ...], output: Path | None, as_json: bool
) -> None:
    """Price one fully given configuration: time, memory, traffic. No search.

    The ranks lie in Megatron's order: tp, cp, dp, pp from the inside.
    """
    from planner.from_launch import price_launch
    from planner.prediction import price_runs, run_document
    from planner.report.run_view import run_view

    documents = []
    for priced in price_launch(run, given, output) if from_launch else price_runs(run):
        documents.append(run_document(priced))
        _warn("warning", priced.warnings)
        if not as_json:
            _warn("note", priced.run.remarks)
            _show(run_view(priced))
    if as_json:
        _print_json(documents[0] if len(documents) == 1 else {"runs": documents})


@main.command()
@click.argument("runs", type=_PATH, metavar="RUNS.yaml")
@click.option("--rows", "every_row", is_flag=True, help="Show every row, not only the worst.")
@_common
def validate(runs: Path, every_row: bool, as_json: bool) -> None:
    """Compare predicted with measured steps, row by row and summed up."""
    from planner.prediction import validation_report
    from planner.report.run_view import validation_view

    report = validation_report(runs)
    if as_json:
        _print_json(report.as_document())
    else:
        _show(validation_view(report, every_row=every_row))


@main.command()
@click.argument("kind", type=click.Choice(["models", "clusters", "devices"]))
@_common
def catalog(kind: str, as_json: bool) -> None:
    """List the models, clusters or devices that are known by name."""
    from planner.report.catalog_view import catalog_rows, catalog_view

    if as_json:
        _print_json({kind: catalog_rows(kind)})
    else:
        _show(catalog_view(kind))


@main.command()
@click.argument("kind", type=click.Choice(["model", "cluster", "run", "plan"]))
@_common
def schema(kind: str, as_json: bool) -> None:
    """Print the JSON Schema of a kind of file, for editors and checks."""
    from planner.documents import json_schema

    if as_json:
        _print_json({"kind": kind, "json_schema": json_schema(kind)})
    else:
        click.echo(json.dumps(json_schema(kind), indent=2))


@main.command()
@click.argument("model")
@click.option("--seq-len", type=click.IntRange(1, 16_777_216), default=4096, metavar="S", help="Tokens.")
@_common
def model(model: str, seq_len: int, as_json: bool) -> None:
    """Show what is read of MODEL: shape, parameters, FLOP."""
    from model_specs.reader import read_model
    from planner.report.catalog_view import model_document, model_view

    spec = read_model(model)
    if as_json:
        _print_json(model_document(spec, seq_len))
    else:
        _show(model_view(spec, seq_len))


@main.command()
@click.argument("plan", type=_PATH, metavar="PLAN")
@click.option("--target", metavar="T", help="A framework or scheduler; by default the plan's framework.")
@click.option("-o", "--output", type=_PATH, metavar="DIR", required=True, help="Folder for the files.")
@_force
@_common
def launch(plan: Path, target: str | None, output: Path, force: bool, as_json: bool) -> None:
    """Write the files that start a plan in a framework."""
    from planner.documents import read_plan
    from planner.launch.files import LaunchError, write_files
    from planner.plan_files import plan_files

    found = read_plan(plan)
    try:
        files = plan_files(found, target)
    except LaunchError as error:
        raise _CheckFailedError(str(error)) from error
    written = write_files(output, files, force)
    if as_json:
        _print_json({"target": target, "directory": str(output), "files": [path.name for path in written]})
    else:
        click.echo("\n".join(str(path) for path in written))


@main.command()
@click.argument("plan", type=_PATH, metavar="PLAN")
@_common
def explain(plan: Path, as_json: bool) -> None:
    """Say why a plan is as it is, and what bounds it."""
    from planner.documents import read_plan
    from planner.neighbours import neighbours
    from planner.report.explain_view import explain_document, explain_view

    changes = neighbours(found := read_plan(plan))
    if as_json:
        _print_json(explain_document(found, changes))
    else:
        _warn("warning", found.warnings)
        _show(explain_view(found, changes))


@main.command()
@click.argument("plans", type=_PATH, nargs=2, metavar="PLAN PLAN")
@_common
def compare(plans: tuple[Path, Path], as_json: bool) -> None:
    """Show where two plans differ, and what that costs."""
    from planner.documents import read_plan
    from planner.report.explain_view import compare_view, comparison

    first, second = (read_plan(path) for path in plans)
    if as_json:
        _print_json(comparison((first, second)))
    else:
        _show(compare_view((str(plans[0]), str(plans[1])), (first, second)))


@main.command()
@click.argument("loads", type=_PATH, metavar="LOADS")
@experts_options
@_common
def experts(as_json: bool, **options: Any) -> None:
    """Place experts on GPUs from measured LOADS: even, with a bound, and with little traffic."""
    from planner.experts.command import NoPlacementError, experts_view, run_experts

    try:
        found = run_experts(**options)
    except NoPlacementError as error:
        raise _CheckFailedError(str(error)) from error
    _warn("warning", found.warnings)
    _print_json(found.document) if as_json else _show(experts_view(found))


if __name__ == "__main__":
    main(prog_name="meshwright")
