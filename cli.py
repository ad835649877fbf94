"""The command line: parse, call, print, exit code. Nothing else in this project prints.

Heavy modules are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.problem import PlanRequest
    from planner.report.parts import Renderable

DONE, NO_PLAN, BAD_INPUT, NO_TIME, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 70, 130
_JSON, _DEBUG = "meshwright.json", "meshwright.debug"
LONGEST_WORD = 80

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class _Failure(click.ClickException):
    """A message on standard error, and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def show(self, file: Any = None) -> None:
        """Prints the message; with --json a document carries it too, so that there always is one."""
        del file
        click.echo(f"Error: {self.message}", err=True)
        context = click.get_current_context(silent=True)
        if context is not None and context.meta.get(_JSON):
            _print_json({"error": {"message": self.message, "exit_code": self.exit_code}})


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
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if ctx.meta.get(_DEBUG):
                raise
            failure = _failure(error)
            failure.show()
            ctx.exit(failure.exit_code)


def _failure(error: Exception) -> _Failure:
    """What a user reads of an exception: its message where it is about the input, else that this is a fault."""
    from cluster_specs.errors import ClusterError
    from model_specs.errors import SpecError
    from planner.launch.files import LaunchError
    from planner.problem import RequestError

    if isinstance(error, (SpecError, ClusterError, RequestError, LaunchError)):
        return _Failure(str(error), BAD_INPUT)
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return _Failure(f"{place}{error.strerror}", BAD_INPUT)
    kind = type(error).__name__
    return _Failure(
        f"internal error, {kind}: {error}. This is a fault in meshwright, not in your input; "
        "--debug shows where it happened.",
        INTERNAL,
    )


def _print_json(document: dict[str, Any]) -> None:
    from planner.documents import json_text

    click.echo(json_text(document))


def _show(views: Iterable[Renderable]) -> None:
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    for view in views:
        console.print(view)


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
            width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
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
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_remember(_DEBUG),
    help="Show tracebacks.",
)
_output = click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Folder for the files."
)
_force = click.option("--force", is_flag=True, help="Replace files that are already in the folder.")


def _version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    del parameter
    if not value or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        click.echo(f"meshwright {version('meshwright')}")
    except PackageNotFoundError:
        click.echo("meshwright, not installed as a package")
    ctx.exit()


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version."
)
@_debug
def main() -> None:
    """Plan how to train a large model on a GPU cluster.

    MODEL is a name from `meshwright catalog models`, a model YAML or a Hugging Face config.json. CLUSTER is a name
    from `meshwright catalog clusters` or a cluster YAML.

    Exit codes: 0 done, 1 no plan exists or a check failed, 2 bad usage or input, 3 the time limit came before any
    plan, 130 interrupted.
    """


@main.command()
@click.argument("model")
@click.option("--cluster", required=True, help="Catalog name or cluster YAML.")
@click.option("--gpus", type=int, help="Use the first N GPUs; all of the cluster's when absent.", metavar="N")
@click.option("--global-batch", type=int, required=True, metavar="B", help="Sequences per step.")
@click.option("--seq-len", type=int, required=True, metavar="S", help="Tokens per sequence.")
@click.option("--precision", default="bf16", show_default=True, help="bf16, fp16, fp8, mxfp8 or nvfp4.")
@click.option("--optimizer", default="adam", show_default=True, help="adam, sgd or muon.")
@click.option(
    "--framework", default="megatron", show_default=True, help="megatron, torchtitan, deepspeed or fsdp2."
)
@click.option(
    "--pin", "pins", multiple=True, metavar="A=X,B=Y", help="Fix choices: tp=8,pp=4,recompute=none."
)
@click.option("--forbid", "forbids", multiple=True, metavar="A,B", help="Exclude choices: full-recompute,cp.")
@click.option("--reserve-gib", type=float, default=0.0, metavar="G", help="HBM to leave free on every GPU.")
@click.option("--method", default="cp-sat", show_default=True, help="cp-sat or exhaustive.")
@click.option(
    "--top",
    type=int,
    default=1,
    show_default=True,
    metavar="K",
    help="How many of the best layouts to report.",
)
@click.option("--time-limit", type=float, metavar="S", help="Seconds for the search.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of the solver.")
@_output
@_force
@_common
@click.pass_context
def plan(ctx: click.Context, as_json: bool, output: Path | None, force: bool, **options: Any) -> None:
    """Find the fastest layout of MODEL on a cluster, with a proof.

    Degrees, pipeline split, recomputation and the GPU of every rank are chosen together. With -o the plan and the
    files that start it are written to a folder.
    """
    from planner.plan_files import plan_files, refuse_taken
    from planner.service import plan as make_plan

    request = _request(**options)
    if output is not None:
        refuse_taken(output, force)
    progress = _ProgressLine()
    try:
        found = make_plan(request, progress)
    finally:
        progress.clear()
    written: list[Path] = []
    if output is not None and found.layout is not None:
        from planner.launch.files import write_files

        written = write_files(output, plan_files(found), force)
    _print_plan(found, as_json)
    _after_plan(found, output, written)
    ctx.exit({"infeasible": NO_PLAN, "unknown": NO_TIME}.get(found.status, DONE))


def _request(
    *, model: str, cluster: str, gpus: int | None, pins: tuple[str, ...], forbids: tuple[str, ...],
    top: int, time_limit: float | None, **rest: Any,
) -> PlanRequest:  # fmt: skip
    from cluster_specs.allocation import allocated_gpus
    from cluster_specs.reader import read_cluster
    from model_specs.reader import read_model
    from planner.problem import PlanRequest, parse_forbids, parse_pins

    read = read_cluster(cluster, gpus)
    return PlanRequest(
        model=read_model(model),
        cluster=read,
        gpus=allocated_gpus(read, gpus),
        pins=parse_pins(",".join(pins)),
        forbids=parse_forbids(forbids),
        top_k=top,
        time_limit_s=time_limit,
        **rest,
    )


def _print_plan(found: Plan, as_json: bool) -> None:
    from planner.documents import plan_document
    from planner.report.plan_view import plan_view

    if as_json:
        _print_json(plan_document(found))
    else:
        _warn("warning", found.warnings)
        _show(plan_view(found))


def _after_plan(found: Plan, output: Path | None, written: list[Path]) -> None:
    """Where the files are and what to do next, on standard error."""
    from planner.plan_files import TARGETS

    if output is None:
        if found.layout is not None:
            click.echo("\nNext: the same command with -o DIR writes the plan and its launch files.", err=True)
    elif not written:
        click.echo(f"\nThere is no layout: nothing was written to {output}.", err=True)
    else:
        click.echo(f"\nWrote {', '.join(path.name for path in written)} to {output}", err=True)
        if found.inputs.framework not in TARGETS:
            click.echo(f"Start files are written for {', '.join(TARGETS)} only.", err=True)
        else:
            click.echo(
                f"Next: bash {output / 'launch.sh'} slurm   (its first lines say what to set)", err=True
            )


@main.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN.yaml")
@_common
def estimate(run: Path, as_json: bool) -> None:
    """Price one fully given configuration: time, memory, traffic. No search.

    The ranks lie in Megatron's order: tp, cp, dp, pp from the inside.
    """
    from planner.prediction import broken_rules, predict_run, run_document
    from planner.report.run_view import run_view
    from planner.run_file import RunFileError, read_runs

    documents = []
    for one in read_runs(run):
        try:
            found = predict_run(one)
        except (ValueError, ArithmeticError) as error:
            raise RunFileError(f"cannot be priced: {error}", where=f"{run}: {one.id}") from error
        broken = broken_rules(one, found)
        documents.append(run_document(one, found, broken))
        _warn("warning", (f"{finding.rule}: {finding.words}. {finding.remedy}" for finding in broken))
        if not as_json:
            _warn("note", one.remarks)
            _show(run_view(one, found))
    if as_json:
        _print_json(documents[0] if len(documents) == 1 else {"runs": documents})


@main.command()
@click.argument("runs", type=click.Path(path_type=Path), metavar="RUNS.yaml")
@click.option("--rows", "every_row", is_flag=True, help="Show every row, not only the worst.")
@_common
def validate(runs: Path, every_row: bool, as_json: bool) -> None:
    """Compare predicted with measured steps, row by row and summed up."""
    from planner.prediction import prediction_of
    from planner.report.run_view import validation_view
    from planner.run_file import RunFileError, UnreadRow, read_rows
    from planner.validation import score

    rows = list(read_rows(runs))
    unread = [row for row in rows if isinstance(row, UnreadRow)]
    if len(unread) == len(rows):
        more = f"\nand {len(rows) - 1} more rows, none of which can be read" if len(rows) > 1 else ""
        raise RunFileError(unread[0].reason + more)
    report = score(rows, prediction_of)
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
        import json

        click.echo(json.dumps(json_schema(kind), indent=2))


@main.command()
@click.argument("model")
@click.option("--seq-len", type=click.IntRange(1, 16_777_216), default=4096, show_default=True, metavar="S",
              help="Tokens per sequence, for the FLOP per token.")  # fmt: skip
@_common
def model(model: str, seq_len: int, as_json: bool) -> None:
    """Show what is read of MODEL: layers, widths, experts, parameters, FLOP per token."""
    from model_specs.reader import read_model
    from planner.report.catalog_view import model_document, model_view

    spec = read_model(model)
    if as_json:
        _print_json(model_document(spec, seq_len))
    else:
        _show(model_view(spec, seq_len))


@main.command()
@click.argument("plan", type=click.Path(path_type=Path), metavar="PLAN")
@click.option(
    "--target", type=click.Choice(["megatron"]), default="megatron", show_default=True, help="What to start."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    required=True,
    help="Folder for the files.",
)
@_force
@_common
def launch(plan: Path, target: str, output: Path, force: bool, as_json: bool) -> None:
    """Write the files that start a plan: arguments, environment, hostfile, start script."""
    from planner.documents import read_plan
    from planner.launch.files import LaunchError, write_files
    from planner.plan_files import plan_files

    found = read_plan(plan)
    try:
        files = plan_files(found, target)
    except LaunchError as error:
        raise _Failure(str(error), NO_PLAN) from error
    written = write_files(output, files, force)
    if as_json:
        _print_json({"target": target, "directory": str(output), "files": [path.name for path in written]})
    else:
        click.echo("\n".join(str(path) for path in written))


@main.command()
@click.argument("plan", type=click.Path(path_type=Path), metavar="PLAN")
@_common
def explain(plan: Path, as_json: bool) -> None:
    """Say why a plan is as it is: what holds it back, what bounds its speed, what else there was."""
    from planner.documents import plan_document, read_plan
    from planner.report.explain_view import bounds_in_words, explain_view

    found = read_plan(plan)
    if as_json:
        document = plan_document(found)
        kept = ("status", "objective", "binding", "infeasible", "warnings", "alternatives")
        _print_json({**{key: document[key] for key in kept}, "bounds": bounds_in_words(found)})
    else:
        _warn("warning", found.warnings)
        _show(explain_view(found))


@main.command()
@click.argument("plans", type=click.Path(path_type=Path), nargs=2, metavar="PLAN PLAN")
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


if __name__ == "__main__":
    main(prog_name="meshwright")
