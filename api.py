"""The public functions: what the commands of the same names do, for programs.

Arguments are named as the options of the commands. Models and clusters are catalog names, paths of files, or
specs that were read before:

>>> import meshwright
>>> cluster = meshwright.read_cluster("dgx-h100")
>>> fastest = meshwright.plan("llama-3-8b", cluster=cluster, gpus=8, global_batch=128, seq_len=8192)
>>> fastest.status
'optimal'
>>> fastest.layout.tp * fastest.layout.cp * fastest.layout.pp * fastest.layout.dp
8
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.cluster_specs.schema import ClusterSpec
    from meshwright.model_specs.schema import ModelSpec
    from meshwright.planner.experts.service import ExpertPlan
    from meshwright.planner.many.batch.service import BatchListener, BatchReport
    from meshwright.planner.many.recommend.answer import Recommendation
    from meshwright.planner.plan.document import Plan
    from meshwright.planner.runs.prediction import PricedRun
    from meshwright.planner.runs.validation import ValidationReport

FilePath = str | PathLike[str]
Progress = Callable[[str], None]


def plan(
    model: FilePath | ModelSpec,
    *,
    cluster: FilePath | ClusterSpec,
    gpus: int | None = None,
    global_batch: int,
    seq_len: int,
    precision: str = "bf16",
    optimizer: str = "adam",
    framework: str = "megatron",
    pin: Mapping[str, int | str] | str = "",
    forbid: Iterable[str] | str = (),
    reserve_gib: float = 0.0,
    expert_loads: FilePath | None = None,
    moe_dispatch: str | None = None,
    without: Iterable[str] | str = (),
    allow: Iterable[str] | str = (),
    method: str = "cp-sat",
    top: int = 1,
    time_limit_s: float | None = None,
    seed: int = 0,
    robustness: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Find the fastest layout of a model on a cluster, with a proof.

    Parameters
    ----------
    model
        Catalog name, model YAML, Hugging Face `config.json`, or a spec from `read_model`.
    cluster
        Catalog name, cluster YAML, or a spec from `read_cluster`.
    gpus
        Use the first so many GPUs, from 1; all of the cluster's when None.
    global_batch
        Sequences per step, 1 to 10,000,000.
    seq_len
        Tokens per sequence, 1 to 16,777,216.
    precision
        bf16, fp16, fp8, mxfp8 or nvfp4.
    optimizer
        adam, sgd or muon.
    framework
        megatron, torchtitan, deepspeed or fsdp2: decides what a layout may use, and its launch files.
    pin
        Choices that are fixed: `{"tp": 8, "recompute": "none"}` or `"tp=8,recompute=none"`.
    forbid
        Choices that are excluded, such as `["full-recompute", "cp"]`.
    reserve_gib
        HBM to leave free on every GPU, GiB, 0 to 10,000.
    expert_loads
        File of measured routing: experts are placed too, and their balance prices the layouts.
    moe_dispatch
        Pins the dispatcher of tokens: alltoall, deepep, hybridep, or deduplicated for either of the latter;
        None leaves it to the plan.
    without
        Software that is not there, which the plan must not ask for: any of deepep, hybridep, ep-overlap,
        tp-overlap, cuda-graph, full-graph and cp-a2a.
    allow
        What may change the numbers of the run: any of bf16-grads, bf16-moments, fp8-params and te-loss, or
        all.
    method
        cp-sat, or exhaustive: price every layout.
    top
        How many of the best layouts to prove and list, 1 to 1000.
    time_limit_s
        Seconds for the search; None searches until the proof.
    seed
        Seed of the solver, from 0. The same arguments give the same plan.
    robustness
        Whether to search again with the cost model off by its measured error, which takes about as long as
        the search itself.
    progress
        Called with a line whenever a better plan is found.

    Returns
    -------
    Plan
        The document that `meshwright plan --json` prints. `status` is optimal, feasible, infeasible or
        unknown; `layout` and `predicted` are None without a plan, and `infeasible` says why.

    Raises
    ------
    InputError
        If an argument or a file cannot be used.

    Examples
    --------
    >>> import meshwright
    >>> fastest = meshwright.plan(
    ...     "llama-2-7b", cluster="dgx-a100", gpus=8, global_batch=64, seq_len=4096, robustness=False
    ... )
    >>> fastest.predicted.step_time_s < 10
    True
    """
    from meshwright.planner.plan.make_plan import make_plan
    from meshwright.planner.request.reader import read_request

    request = read_request(
        model=model,
        cluster=cluster,
        gpus=gpus,
        global_batch=global_batch,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        framework=framework,
        pin=pin,
        forbid=forbid,
        reserve_gib=reserve_gib,
        expert_loads=None if expert_loads is None else Path(expert_loads),
        moe_dispatch=moe_dispatch,
        without=without,
        allow=allow,
        method=method,
        top_k=top,
        time_limit_s=time_limit_s,
        seed=seed,
    )
    return make_plan(request, robustness=robustness, progress=progress)


def estimate(run: FilePath | Mapping[str, Any]) -> tuple[PricedRun, ...]:
    """Price fully given configurations: time, memory, traffic. No search.

    Parameters
    ----------
    run
        A run file, or the mapping that one holds (`meshwright schema run`).

    Returns
    -------
    tuple of PricedRun
        One for each run of the file. `predicted` has the figures, `warnings` the rules that the run breaks.

    Raises
    ------
    InputError
        If a run cannot be read or priced.

    Examples
    --------
    >>> import meshwright
    >>> settings = {"seq_len": 4096, "global_batch": 64, "micro_batch": 1, "tp": 2, "dp": 4}
    >>> cluster = {"device": "h100-sxm-80gb", "gpus": 8}
    >>> (priced,) = meshwright.estimate({"model": "llama-2-7b", "cluster": cluster, "run": settings})
    >>> len(priced.predicted.memory_gib)
    1
    """
    from meshwright.planner.runs.prediction import price_run, price_runs
    from meshwright.planner.runs.run_file import run_from_mapping

    if isinstance(run, Mapping):
        return (price_run(run_from_mapping(run, where="run"), Path("run")),)
    return tuple(price_runs(Path(run)))


def validate(runs: FilePath) -> ValidationReport:
    """Compare predicted with measured steps, row by row and summed up.

    Parameters
    ----------
    runs
        A run file whose rows have `measured` figures.

    Returns
    -------
    ValidationReport
        `rows`, and `summary()` with the errors in percent.

    Raises
    ------
    InputError
        If not one row can be read.
    """
    from meshwright.planner.runs.prediction import validation_report

    return validation_report(Path(runs))


def place_experts(
    loads: FilePath,
    *,
    cluster: str,
    gpus: int | None = None,
    slots: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> ExpertPlan:
    """Place experts on GPUs from measured loads: even, with a bound, and with little traffic.

    Parameters
    ----------
    loads
        File of measured loads or routed tokens, by layer and expert.
    cluster
        Catalog name or cluster YAML.
    gpus
        Use the first so many GPUs, whole nodes; all of the cluster's when None.
    slots
        Places for experts in all; more than there are experts are replicas. As many as experts when None.
    progress
        Called with a line when the first placement is found.
    options
        Further fields of `ExpertRequest`, named as the options of `meshwright experts`.

    Returns
    -------
    ExpertPlan
        `placed` maps slots to experts, `document` has balance and bound by layer.

    Raises
    ------
    InputError
        If an argument or a file cannot be used.
    InfeasibleError
        If no placement keeps to the limits.
    """
    from meshwright.planner.experts.request import ExpertRequest
    from meshwright.planner.experts.service import plan_experts

    request = ExpertRequest(loads=Path(loads), cluster=cluster, gpus=gpus, slots=slots, **options)
    return plan_experts(request, progress)


def plan_batch(
    jobs: FilePath,
    output: FilePath,
    *,
    workers: int | None = None,
    engine: str = "local",
    ray_address: str | None = None,
    resume: bool = False,
    strict: bool = False,
    cache: FilePath | None = None,
    no_cache: bool = False,
    formats: Sequence[str] = ("csv", "json"),
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

    options = BatchOptions(
        workers=workers,
        engine=engine,
        ray_address=ray_address,
        resume=resume,
        strict=strict,
        cache=chosen_folder(None if cache is None else Path(cache), no_cache),
        formats=tuple(formats),
    )
    return run_batch(Path(jobs), Path(output), options, listener or SilentListener())


def recommend(
    model: str,
    *,
    cluster: str | Sequence[str],
    gpus: int | None = None,
    global_batch: int,
    seq_len: int,
    step_time_s: float | None = None,
    tokens_per_s: float | None = None,
    precision: str = "bf16",
    optimizer: str = "adam",
    framework: str = "megatron",
    pin: Mapping[str, int | str] | str = "",
    forbid: Sequence[str] = (),
    sizes: Sequence[int] = (),
    reserve_gib: Sequence[float] = (),
    workers: int | None = None,
    cache: FilePath | None = None,
    no_cache: bool = False,
    progress: Progress | None = None,
) -> Recommendation:
    """Find the fewest GPUs, or the cheapest cluster, on which a model reaches a target.

    Parameters
    ----------
    model, precision, optimizer, framework, pin, forbid, global_batch, seq_len
        As for `plan`.
    cluster
        Name or YAML of one cluster, or of several to compare.
    gpus
        At most so many GPUs; all of the cluster's when None.
    step_time_s
        Target: seconds of a step, at most.
    tokens_per_s
        Target: tokens per second, at least. Without a target, a sweep over sizes is made.
    sizes
        GPUs to sweep over.
    reserve_gib
        GiB of HBM to keep free, each value swept over.
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
        sizes=sizes,
        reserves_gib=reserve_gib,
        workers=workers,
        cache=chosen_folder(None if cache is None else Path(cache), no_cache),
        plan={
            "global_batch": global_batch,
            "seq_len": seq_len,
            "precision": precision,
            "optimizer": optimizer,
            "framework": framework,
            "pin": pin,
            "forbid": forbid,
        },
    )
    return plan_sizes(request, progress or (lambda line: None))
