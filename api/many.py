"""The public functions that make many plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING

from meshwright.documents.reader import path_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.planner.many.batch.service import BatchListener, BatchReport
    from meshwright.planner.many.recommend.answer import Recommendation


def plan_batch(
    jobs: str | PathLike[str],
    output: str | PathLike[str],
    *,
    workers: int | None = None,
    engine: str = "local",
    ray_address: str | None = None,
    resume: bool = False,
    strict: bool = False,
    cache: str | PathLike[str] | None = None,
    no_cache: bool = False,
    formats: Sequence[str] = ("csv", "json"),
    calibration: str | PathLike[str] | None = None,
    tokens: float | None = None,
    days: float | None = None,
    gpu_hour_price: float | None = None,
    listener: BatchListener | None = None,
) -> BatchReport:
    """Plan many jobs, each a model on a cluster, in parallel processes.

    Parameters
    ----------
    jobs
        The jobs file (`meshwright schema jobs`).
    output
        Folder for the journal, the plans and the results.
    workers
        Processes, 1 to 1024; one for each core when None.
    engine
        local or ray.
    ray_address
        With ray: auto, or HOST:PORT; None starts a cluster of its own.
    resume
        Go on with the batch in the folder.
    strict
        Start nothing while a job has a mistake.
    cache, no_cache
        Folder of answers that are kept between batches, by default in the user's cache folder; or none.
    formats
        Of the results: csv, json, parquet.
    calibration
        File of what `calibrate` learned, for jobs that name none.
    tokens, days, gpu_hour_price
        As for `plan`, for jobs that name none: rows then have `days`, `gpu_hours`, `dollars`, `kwh`.
    listener
        Hears of every job that is done.

    Returns
    -------
    BatchReport
        `rows`, one for each job, and the sums.

    Raises
    ------
    InputError
        If file, folder or options cannot be used. A job that fails is a row, not an error.
    """
    from meshwright.planner.many.batch.cache import chosen_folder
    from meshwright.planner.many.batch.service import BatchOptions, SilentListener, run_batch
    from meshwright.planner.plan.training_cost import Budget

    options = BatchOptions(
        workers=workers,
        engine=engine,
        ray_address=ray_address,
        resume=resume,
        strict=strict,
        cache=chosen_folder(None if cache is None else path_of(cache, "cache"), no_cache),
        formats=tuple(formats),
        calibration=None if calibration is None else path_of(calibration, "calibration"),
        budget=Budget(tokens=tokens, days=days, gpu_hour_price=gpu_hour_price),
    )
    return run_batch(
        path_of(jobs, "jobs"), path_of(output, "output"), options, listener or SilentListener()
    )


def recommend(
    model: str,
    *,
    cluster: str | Sequence[str],
    gpus: int | None = None,
    global_batch: int,
    seq_len: int,
    step_time_s: float | None = None,
    tokens_per_s: float | None = None,
    tokens: float | None = None,
    days: float | None = None,
    gpu_hour_price: float | None = None,
    precision: str = "bf16",
    optimizer: str = "adam",
    framework: str = "megatron",
    pin: Mapping[str, int | str] | str = "",
    forbid: Sequence[str] = (),
    sizes: Sequence[int] = (),
    reserve_gib: Sequence[float] = (),
    memory_risk: float = 0.05,
    calibration: str | PathLike[str] | None = None,
    workers: int | None = None,
    cache: str | PathLike[str] | None = None,
    no_cache: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Recommendation:
    """Find the fewest GPUs, or the cheapest cluster, on which a model reaches a target.

    Parameters
    ----------
    model, precision, optimizer, framework, pin, forbid, global_batch, seq_len, memory_risk
        As for `plan`.
    cluster
        Name or YAML of one cluster, or of several to compare.
    gpus
        At most so many GPUs; all of the cluster's when None.
    step_time_s
        Target: seconds of a step, at most.
    tokens_per_s
        Target: tokens per second, at least. Without a target, a sweep over sizes is made.
    tokens, days, gpu_hour_price
        As for `plan`. Days are a target: those in which the tokens are to be trained.
    sizes
        GPUs to sweep over.
    reserve_gib
        GiB of HBM to keep free, each value swept over.
    calibration
        File of what `calibrate` learned.
    workers, cache, no_cache
        As for `plan_batch`.
    progress
        Called with a line for every plan.

    Returns
    -------
    Recommendation
        `reached`, the cheapest or smallest first, `missed`, `sweep` and its Pareto `front`.

    Raises
    ------
    InputError
        If an argument or a file cannot be used.
    """
    from meshwright.planner.many.batch.cache import chosen_folder
    from meshwright.planner.many.recommend.request import read_size_request
    from meshwright.planner.many.recommend.service import plan_sizes

    request = read_size_request(
        model=model,
        clusters=(cluster,) if isinstance(cluster, str) else tuple(cluster),
        gpus=gpus,
        step_time_s=step_time_s,
        tokens_per_s=tokens_per_s,
        days=days,
        sizes=sizes,
        reserves_gib=reserve_gib,
        workers=workers,
        cache=chosen_folder(None if cache is None else path_of(cache, "cache"), no_cache),
        plan={
            "global_batch": global_batch,
            "seq_len": seq_len,
            "memory_risk": memory_risk,
            "precision": precision,
            "optimizer": optimizer,
            "framework": framework,
            "tokens": tokens,
            "days": days,
            "gpu_hour_price": gpu_hour_price,
            "pin": pin,
            "forbid": forbid,
            "calibration": None if calibration is None else str(calibration),
        },
    )
    return plan_sizes(request, progress or (lambda line: None))
