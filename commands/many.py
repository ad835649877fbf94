"""Many models at once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from meshwright.commands.options import (
    PATH,
    batch_options,
    calibration_option,
    complete_model,
    fleet_options,
    recommend_options,
)
from meshwright.commands.terminal import (
    ProgressLine,
    common,
    force_option,
    give,
    print_json,
    say,
    show,
)
from meshwright.errors import ExitCode

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import Progress, TaskID


class _Progress:
    """A line per job on standard error, and on a terminal a bar with rate and time left below them."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def start(self, jobs: int, already: int) -> None:
        """Says how much there is to do.

        Parameters
        ----------
        jobs
            Of the file.
        already
            Of these, done by an earlier command with the same folder.
        """
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        if already:
            say(f"{already} of {jobs} jobs were done before", err=True)
        if console.is_terminal:
            rate = TextColumn("{task.fields[rate]}")
            columns = (BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("jobs", total=jobs, completed=already, rate="")
            self._bar.start()

    def done(self, row: Mapping[str, Any], cached: bool, seconds: float) -> None:
        """Says how one job ended.

        Parameters
        ----------
        row
            Of the results, as `BatchReport.rows` has them.
        cached
            Whether the answer was kept from before.
        seconds
            That the job took.
        """
        from meshwright.planner.report.many_view import job_line

        text = job_line(row, cached, seconds)
        if self._bar is None or self._task is None:
            say(text, err=True)
            return
        self._bar.console.print(text, overflow="ellipsis", no_wrap=True)
        speed = self._bar.tasks[0].speed
        self._bar.update(self._task, advance=1, rate=f"{speed:.1f} jobs/s" if speed else "")

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@click.command()
@click.argument("jobs", type=PATH, metavar="JOBS.yaml")
@batch_options
@calibration_option
@common
@click.pass_context
def batch(
    ctx: click.Context,
    /,
    *,
    jobs: Path,
    output: Path,
    formats: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan many jobs, each a model on a cluster; go on after a crash with --resume.

    Exit code 1 if a job has no plan.
    """
    with ProgressLine("starting"):
        from meshwright.api import plan_batch
        from meshwright.planner.report.many_view import batch_view

    names = [name.strip() for name in formats.split(",")]
    progress = _Progress()
    try:
        report = plan_batch(
            jobs,
            output,
            formats=tuple(dict.fromkeys(filter(None, names))),
            listener=progress,
            **options,
        )
    except KeyboardInterrupt:
        progress.stop()
        say(f"What is done is kept: the same command with --resume goes on. ({output})", err=True)
        raise
    finally:
        progress.stop()
    if as_json:
        print_json(
            {
                "summary": report.by_status,
                "cached": report.cached,
                "wall_s": report.wall_s,
                "jobs": report.rows,
            }
        )
    else:
        show(batch_view(report))
    every_job_has_a_plan = set(report.by_status) <= {"optimal", "feasible"}
    ctx.exit(ExitCode.DONE if every_job_has_a_plan else ExitCode.NO_ANSWER)


@click.command("fleet")
@click.argument("jobs", type=PATH, metavar="JOBS.yaml")
@fleet_options
@calibration_option
@force_option
@common
@click.pass_context
def fleet_command(
    ctx: click.Context,
    /,
    jobs: Path,
    output: Path | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Share one cluster among many jobs: how many nodes each gets, which ones, and when.

    The objective is the weighted throughput of jobs that run side by side, or the makespan or the deadlines
    of jobs with `tokens` that may wait for each other. A job without a plan is listed with its reason, the
    others share the cluster without it, and the exit code is 1.
    """
    with ProgressLine("starting"):
        from meshwright.cluster_specs.importers.facts import MOST_NODES, expand
        from meshwright.documents import refuse_taken, write_files
        from meshwright.planner.many.fleet import (
            FLEET_FILES,
            FleetOptions,
            fleet_document,
            fleet_files,
            run_fleet,
        )
        from meshwright.planner.many.jobs import chosen_folder
        from meshwright.planner.report.many_view import fleet_view

    if output is not None:
        refuse_taken(output, FLEET_FILES, force)
    cache = chosen_folder(options.pop("cache"), options.pop("no_cache"))
    busy = [
        name for text in options.pop("busy") if text.strip() for name in expand(text, MOST_NODES)
    ]
    with ProgressLine("reading jobs") as progress:
        chosen = FleetOptions(cache=cache, busy=tuple(busy), **options)
        shared = run_fleet(jobs, chosen, lambda done, of: progress(f"{done} of {of} plans"))
    give(as_json, fleet_document(shared), partial(fleet_view, shared))
    if output is not None:
        write_files(output, fleet_files(shared), force)
        if not as_json:
            say(
                f"Written to {output}: fleet.json, fleet.csv, pictures, a plan for each job under plans/"
            )
    ctx.exit(ExitCode.NO_ANSWER if shared.without_plan else ExitCode.DONE)


@click.command("recommend")
@click.argument("model", shell_complete=complete_model)
@recommend_options
@calibration_option
@force_option
@common
@click.pass_context
def recommend_command(
    ctx: click.Context,
    /,
    *,
    model: str,
    pin: tuple[str, ...],
    output: Path | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the fewest GPUs, or the cheapest cluster, on which MODEL reaches a step time or tokens per second.

    Without a target, or with --sizes, sweep over sizes and show the Pareto front. Clusters with a price
    (`usd_per_gpu_hour` in their file) are compared by it. Exit code 1 if no cluster reaches the target.
    """
    with ProgressLine("starting"):
        from meshwright import api
        from meshwright.documents import refuse_taken, write_files
        from meshwright.planner.many.recommend import (
            RECOMMENDATION_FILES,
            recommendation_document,
            recommendation_files,
        )
        from meshwright.planner.report.many_view import recommend_view

    if output is not None:
        refuse_taken(output, RECOMMENDATION_FILES, force)
    for name in ("sizes", "reserve_gib"):
        options[name] = tuple(itertools.chain.from_iterable(options[name]))
    with ProgressLine("reading model and cluster") as progress:
        answer = api.recommend(model, pin=",".join(pin), progress=progress, **options)
    give(as_json, recommendation_document(answer), partial(recommend_view, answer))
    if output is not None:
        write_files(output, recommendation_files(answer), force)
    missed = answer.request.target_s is not None and not answer.reached
    ctx.exit(ExitCode.NO_ANSWER if missed else ExitCode.DONE)
