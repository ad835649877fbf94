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
from typing import TYPE_CHECKING, Any, Literal

from meshwright.documents import path_of
from meshwright.errors import known_keywords

if TYPE_CHECKING:
    from meshwright.cluster_specs.reader import MixedClusterSpec
    from meshwright.cluster_specs.schema import ClusterSpec
    from meshwright.costmodel.calibration import Calibration
    from meshwright.costmodel.execution_names import (
        Dispatcher,
        Method,
        Optimizer,
        PlanObjective,
        Precision,
    )
    from meshwright.frameworks.record import FrameworkName
    from meshwright.model_specs.schema import ModelSpec
    from meshwright.planner.analysis.rank_mapping import MappingOrder
    from meshwright.planner.experts.service import ExpertPlan
    from meshwright.planner.many.batch import BatchListener, BatchReport
    from meshwright.planner.many.fleet import Fleet
    from meshwright.planner.many.recommend import Recommendation
    from meshwright.planner.mapping.instance import MappingObjective
    from meshwright.planner.mixed.service import MixedResult
    from meshwright.planner.plan.document import Plan
    from meshwright.planner.runs.calibration.report import CalibrationReport
    from meshwright.planner.runs.prediction import PricedRun
    from meshwright.planner.runs.run_file import Run
    from meshwright.planner.runs.validation import ValidationReport


# The public functions that make many plans.


@known_keywords
def plan_batch(
    jobs: str | PathLike[str],
    output: str | PathLike[str],
    *,
    workers: int | None = None,
    engine: Literal["local", "ray"] = "local",
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
        Path of the jobs file (`meshwright schema jobs`).
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
        Is told of every job that is done; nobody when None.

    Returns
    -------
    BatchReport
        `rows`, one for each job, and the sums.

    Raises
    ------
    InputError
        If file, folder or options cannot be used. A job that fails is a row, not an error.
    """
    from meshwright.planner.many.batch import BatchOptions, SilentListener, run_batch
    from meshwright.planner.many.jobs import chosen_folder
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


@known_keywords
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
    precision: Precision = "bf16",
    optimizer: Optimizer = "adam",
    framework: FrameworkName = "megatron",
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
        The most GPUs to take, from 1; all of the cluster's when None.
    step_time_s
        Target: seconds of a step at most, above 0 and below 1e18.
    tokens_per_s
        Target: tokens per second at least, above 0 and below 1e18. Without a target, a sweep over sizes is
        made; with two, InputError is raised.
    tokens, days, gpu_hour_price
        As for `plan`. Days are a target: those in which the tokens are to be trained.
    sizes
        Numbers of GPUs to sweep over, from 1.
    reserve_gib
        GiB of HBM to keep free on every GPU, 0 to 10,000, each value swept over.
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
    from meshwright.planner.many.jobs import chosen_folder
    from meshwright.planner.many.recommend import plan_sizes, read_size_request

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


__all__ = [
    "calibrate",
    "estimate",
    "explain",
    "fleet",
    "launch",
    "map",
    "place_experts",
    "plan",
    "plan_batch",
    "recommend",
    "report",
    "save",
    "trace",
    "traffic",
    "validate",
]

FilePath = str | PathLike[str]
Progress = Callable[[str], None]


@known_keywords
def plan(
    model: FilePath | ModelSpec,
    *,
    cluster: FilePath | ClusterSpec | Mapping[str, object],
    gpus: int | None = None,
    global_batch: int,
    seq_len: int | None = None,
    lengths: FilePath | None = None,
    pack_size: int | None = None,
    packing: str | None = None,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adam",
    framework: FrameworkName = "megatron",
    pin: Mapping[str, int | str] | str = "",
    forbid: Iterable[str] | str = (),
    reserve_gib: float = 0.0,
    memory_risk: float = 0.05,
    expert_loads: FilePath | None = None,
    moe_dispatch: Dispatcher | None = None,
    without: Iterable[str] | str = (),
    allow: Iterable[str] | str = (),
    inside_domain: Iterable[str] | str = (),
    max_cut_use: float = 1.0,
    calibration: FilePath | Calibration | None = None,
    objective: PlanObjective = "nominal",
    method: Method = "cp-sat",
    top: int = 1,
    time_limit_s: float | None = None,
    seed: int = 0,
    nodes: str | None = None,
    train: str = "full",
    lora_rank: int | None = None,
    lora_targets: Iterable[str] | str | None = None,
    robustness: bool = True,
    baseline: FilePath | None = None,
    tokens: float | None = None,
    days: float | None = None,
    gpu_hour_price: float | None = None,
    export_model: FilePath | None = None,
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
        Tokens per sequence, 1 to 16,777,216; None with `lengths`.
    lengths
        File of the lengths of training samples, of which each sequence is a pack: JSON lines, an npy array,
        or counts by length as CSV or JSON. `global_batch` counts packs then.
    pack_size
        Tokens of a pack, 1 to 16,777,216; the longest sample, rounded up to a multiple of 128, when None.
    packing
        first-fit (when None), first-fit-decreasing, sequential, or padded: one sample a sequence.
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
    memory_risk
        Share of the measured errors of predicted memory with which the plan may not fit, 1e-6 to 0.5, which
        takes the prediction as it stands.
    expert_loads
        File of measured routing: experts are placed too, and their balance prices the layouts.
    moe_dispatch
        Pins the dispatcher of tokens: alltoall, allgather, deepep, hybridep, or deduplicated for either of
        the latter; None leaves it to the plan.
    without
        Software that is not there, which the plan must not ask for: any of deepep, hybridep, allgather,
        ep-overlap, tp-overlap, cuda-graph, full-graph, cp-a2a and cp-hierarchical.
    allow
        What may change the numbers of the run: any of bf16-grads, bf16-moments, fp8-params, delayed-scaling,
        fp8-attention and te-loss, or all; and activation-offload, which fills the memory of hosts.
    inside_domain
        Axes whose groups must each lie in one NVLink domain (in a node where there is none): any of tp, cp
        and ep, as `"ep,cp"` or a list.
    max_cut_use
        Share of the capacity of every cut of the fabric that this job and others together may use in a phase,
        1e-6 to 1, which limits nothing; below 1 for fabrics whose leaves are alike.
    calibration
        What `calibrate` learned of this stack, or its file.
    objective
        nominal, or expected: the mean step time over the posterior of `calibration`.
    method
        cp-sat, or exhaustive: price every layout.
    top
        How many of the best layouts to prove and list, 1 to 1000.
    time_limit_s
        Seconds for the search, 0 to 31,536,000; None searches until the proof.
    seed
        Seed of the solver, 0 to 2,147,483,647. The same arguments give the same plan.
    nodes
        Slurm host list, or a file of them: only these nodes of the cluster file are used. When None, those
        of the Slurm job that this runs in, if the cluster lists them.
    train, lora_rank, lora_targets
        What is trained: full for every parameter, lora for adapters beside frozen weights, qlora for the same
        beside weights of 4 bits; the width of the adapters, 1 to 8192, 16 when None; and the matrices that
        have one, such as `"q_proj,v_proj"`, all-linear when None.
    robustness
        Whether to search again with the cost model off by its measured error, which takes about as long as
        the search itself.
    baseline
        File of what is run today: a launch script, a run file or a plan. The plan's `baseline` says what it
        brings over that.
    tokens, days, gpu_hour_price
        What the whole training takes, in `cost`: its days, GPU hours, dollars and kWh. Tokens of all steps,
        above 0 to 1e18; days, above 0 to 1e6, are a deadline with tokens, and without how long is trained;
        dollars of a GPU hour, 0 to 1e6, the cluster file's when None.
    export_model
        Where to write the last CP-SAT model of the search, as text that OR-Tools reads; a file that is there
        is replaced. Where the search had none, the plan's `warnings` say so.
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
    from meshwright.planner.plan.training_cost import Budget, with_cost
    from meshwright.planner.solvers.clock import within

    budget = Budget(tokens=tokens, days=days, gpu_hour_price=gpu_hour_price)
    # What reading takes, with the placing of experts, counts as well.
    with within(time_limit_s):
        from meshwright.planner.plan.make_plan import make_plan
        from meshwright.planner.request.reader import read_request

        request = read_request(
            model=model,
            cluster=cluster,
            gpus=gpus,
            global_batch=global_batch,
            seq_len=seq_len,
            lengths=lengths,
            pack_size=pack_size,
            packing=packing,
            precision=precision,
            optimizer=optimizer,
            framework=framework,
            pin=pin,
            forbid=forbid,
            reserve_gib=reserve_gib,
            memory_risk=memory_risk,
            expert_loads=None if expert_loads is None else path_of(expert_loads, "expert_loads"),
            moe_dispatch=moe_dispatch,
            without=without,
            allow=allow,
            inside_domain=inside_domain,
            max_cut_use=max_cut_use,
            calibration=calibration,
            objective=objective,
            method=method,
            top_k=top,
            time_limit_s=time_limit_s,
            seed=seed,
            nodes=nodes,
            train=train,
            lora_rank=lora_rank,
            lora_targets=lora_targets,
        )
        model_file = None if export_model is None else path_of(export_model, "export_model")
        from meshwright.planner.plan.document import with_digest

        if baseline is None:
            found = make_plan(
                request, robustness=robustness, progress=progress, model_file=model_file
            )
            priced = with_cost(found, budget)
            return found if priced is found else with_digest(priced)
        from meshwright.planner.analysis.waterfall import read_baseline
        from meshwright.planner.launch.compare import against

        today = read_baseline(path_of(baseline, "baseline"), request.inputs())
        found = make_plan(request, robustness=robustness, progress=progress, model_file=model_file)
        return with_digest(against(found, today, budget))


@known_keywords
def estimate(
    run: FilePath | Mapping[str, Any], *, calibration: FilePath | Calibration | None = None
) -> tuple[PricedRun, ...]:
    """Price fully given configurations: time, memory, traffic. No search.

    Parameters
    ----------
    run
        A run file, or the mapping that one holds (`meshwright schema run`).
    calibration
        What `calibrate` learned of this stack, or its file.

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
    from meshwright.planner.request.reader import read_calibration
    from meshwright.planner.runs.prediction import price_run, price_runs
    from meshwright.planner.runs.run_file import run_from_mapping

    stack = read_calibration(calibration)
    if isinstance(run, Mapping):
        return (price_run(run_from_mapping(run, where="run", calibration=stack), Path("run")),)
    return tuple(price_runs(path_of(run, "run"), stack))


@known_keywords
def calibrate(
    *runs: FilePath | Run,
    name: str | None = None,
    like: str | None = None,
    measure: bool = False,
) -> CalibrationReport | None:
    """Learn the constants of a stack from its own measured runs.

    Parameters
    ----------
    *runs
        Run files whose rows have `measured`, logs of nccl-tests, and runs that were read before: 3 to 20 runs
        of one framework on one kind of device.
    name
        Of the stack; what the runs call their framework when None.
    like
        The known stack to begin from; the runs' framework, or the nearest one, when None.
    measure
        Whether to run micro-benchmarks on this machine's GPUs too, under torchrun. Needs torch.

    Returns
    -------
    CalibrationReport or None
        `calibration` goes to `plan`, `estimate` and `validate`; errors before and after, what moved, and the
        run to measure next. None on all ranks but the first with `measure`.

    Raises
    ------
    InputError
        If a file cannot be used, or runs are of several frameworks or devices.
    """
    from meshwright.planner.runs.calibration.evidence import read_sources
    from meshwright.planner.runs.calibration.service import calibrate_runs
    from meshwright.planner.runs.run_file import Run

    given = tuple(run for run in runs if isinstance(run, Run))
    paths = [path_of(run, "runs") for run in runs if not isinstance(run, Run)]
    read, benchmarks = read_sources(paths, given)
    if measure:
        from meshwright.planner.runs.calibration.evidence import benchmarks_of, measured_rates

        rates = measured_rates()
        if rates is None:
            return None
        benchmarks += benchmarks_of(rates, read)
    return calibrate_runs(read, name=name, like=like, benchmarks=benchmarks)


@known_keywords
def validate(
    runs: FilePath, *, calibration: FilePath | Calibration | None = None
) -> ValidationReport:
    """Compare predicted with measured steps, row by row and summed up.

    Parameters
    ----------
    runs
        A run file whose rows have `measured` figures.
    calibration
        What `calibrate` learned of this stack, or its file.

    Returns
    -------
    ValidationReport
        `rows`, and `summary()` with the errors in percent.

    Raises
    ------
    InputError
        If not one row can be read.
    """
    from meshwright.planner.request.reader import read_calibration
    from meshwright.planner.runs.prediction import validation_report

    return validation_report(path_of(runs, "runs"), read_calibration(calibration))


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
        Use the first so many GPUs, whole nodes, from 1; all of the cluster's when None.
    slots
        Places for experts in all, at least as many as experts; the rest are replicas. As many as experts when
        None.
    progress
        Called with a line when the first placement is found.
    **options
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
    from meshwright.planner.experts.request import expert_request
    from meshwright.planner.experts.service import plan_experts

    given = {"loads": loads, "cluster": cluster, "gpus": gpus, "slots": slots, **options}
    return plan_experts(expert_request(given), progress)


# The public function that plans on a cluster whose parts differ.


def plan_mixed(
    model: str | PathLike[str] | ModelSpec,
    *,
    cluster: str | PathLike[str] | MixedClusterSpec,
    gpus: int | None = None,
    global_batch: int,
    seq_len: int,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adam",
    framework: FrameworkName = "megatron",
    pin: Mapping[str, int | str] | str = "",
    forbid: Iterable[str] | str = (),
    reserve_gib: float = 0.0,
    memory_risk: float = 0.05,
    moe_dispatch: Dispatcher | None = None,
    without: Iterable[str] | str = (),
    allow: Iterable[str] | str = (),
    calibration: str | PathLike[str] | Calibration | None = None,
    time_limit_s: float | None = None,
    seed: int = 0,
    tokens: float | None = None,
    days: float | None = None,
    gpu_hour_price: float | None = None,
    progress: Callable[[str], None] | None = None,
    **others: object,
) -> MixedResult:
    """Find the fastest plan on a mixed cluster: a pipeline through parts of it, or a plan on one part.

    Parameters
    ----------
    model
        As `plan` takes it; its layers must be alike, but for dense ones in front of those with experts.
    cluster
        A cluster file with `parts`, or what `read_mixed_cluster` made of one.
    gpus
        GPUs in use: all of the cluster's, which None stands for.
    global_batch, seq_len, precision, optimizer, framework, pin, forbid, reserve_gib, memory_risk
        As `plan` takes them.
    moe_dispatch, without, allow, calibration, seed, progress
        As `plan` takes them.
    time_limit_s
        Seconds for the whole search, 0 to 31,536,000; None searches until the proof.
    tokens, days, gpu_hour_price
        As `plan` takes them; GPUs of the parts in use are counted, at each part's power.
    **others
        Further arguments of `plan`, which mixed clusters do not have: only their plain values are accepted.

    Returns
    -------
    MixedResult
        `document` is what `meshwright plan --json` prints; `alone` is the plan of the part that is fastest
        alone, where one is.

    Raises
    ------
    InputError
        If an argument or a file cannot be used.
    """
    from meshwright.planner.mixed.request import read_mixed_request
    from meshwright.planner.mixed.service import make_mixed_plan, with_mixed_cost
    from meshwright.planner.plan.training_cost import Budget

    budget = Budget(tokens=tokens, days=days, gpu_hour_price=gpu_hour_price)
    request = read_mixed_request(
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
        memory_risk=memory_risk,
        moe_dispatch=moe_dispatch,
        without=without,
        allow=allow,
        calibration=calibration,
        time_limit_s=time_limit_s,
        seed=seed,
        **others,
    )
    return with_mixed_cost(make_mixed_plan(request, progress), budget)


# What is made of a plan: its files, its page, its timeline, its traffic, its reasons.


@known_keywords
def save(plan: Plan | FilePath, folder: FilePath, *, force: bool = False) -> list[Path]:
    """Write a plan and the files that start it, as `meshwright plan -o` does.

    Parameters
    ----------
    plan
        A plan with a layout, or its file or folder.
    folder
        Where to; it is made where there is none.
    force
        Whether files that are there already are replaced.

    Returns
    -------
    list of Path
        The files written.

    Raises
    ------
    InputError
        If a file is there already, or cannot be written.
    InfeasibleError
        If the plan has no layout.
    """
    return launch(plan, folder, force=force)


@known_keywords
def launch(
    plan: Plan | FilePath,
    folder: FilePath,
    *,
    target: str | None = None,
    cluster: str | None = None,
    nodes: str | None = None,
    force: bool = False,
) -> list[Path]:
    """Write the files that start a plan in a framework or a scheduler.

    Parameters
    ----------
    plan
        A plan with a layout, or its file or folder.
    folder
        Where to; it is made where there is none.
    target
        As `meshwright launch --target` has them; the plan's own framework when None.
    cluster, nodes
        Place the ranks there first, as `map` does.
    force
        Whether files that are there already are replaced.

    Returns
    -------
    list of Path
        The files written.

    Raises
    ------
    InputError
        If the target is unknown, or a file is there already or cannot be written.
    InfeasibleError
        If the plan has no layout, or one that the target refuses.
    """
    from meshwright.documents import write_files
    from meshwright.planner.launch.plan_files import plan_files

    laid_out = _laid_out(plan)
    if cluster is not None or nodes is not None:
        laid_out = map(laid_out, cluster=cluster, nodes=nodes)
    return list(write_files(path_of(folder, "folder"), plan_files(laid_out, target), force))


@known_keywords
def map(
    plan: Plan | FilePath,
    *,
    cluster: str | None = None,
    nodes: str | None = None,
    objective: MappingObjective = "traffic",
    order: MappingOrder = "best",
    spares: int = 0,
    time_limit_s: float = 30.0,
) -> Plan:
    """Place the ranks of a plan's layout on free nodes, so that its groups reach few up-links.

    Parameters
    ----------
    plan
        A plan with a layout, or its file or folder.
    cluster
        Catalog name or cluster file; the plan's own cluster when None.
    nodes
        Host list, or a file of them, of the nodes that ranks may go to; all when None.
    objective
        traffic or spread.
    order
        best or hostname.
    spares
        Nodes to keep free, at least 0.
    time_limit_s
        Seconds for the search, above 0.

    Returns
    -------
    Plan
        Priced on its new places.

    Raises
    ------
    InputError
        If an argument or a file cannot be used.
    InfeasibleError
        If the layout does not fit, or breaks a rule there.
    """
    from meshwright.planner.analysis.rank_mapping import map_plan, nodes_to_place_on

    laid_out = _laid_out(plan)
    onto = nodes_to_place_on(laid_out, cluster, nodes)
    mapped = map_plan(
        laid_out,
        onto,
        objective=objective,
        order=order,
        spares=spares,
        time_limit_s=time_limit_s,
    )
    return mapped.plan


@known_keywords
def report(plan: Plan | FilePath, *, sweep: str | None = None) -> str:
    """A plan as one HTML page that loads nothing, as `meshwright report` writes it.

    Parameters
    ----------
    plan
        A plan with a layout, or its file or folder.
    sweep
        Other plans behind the page's controls: empty for half and twice of everything, or axes such as
        `gpus=256:2048:x2`; None for no controls.

    Returns
    -------
    str
        The page.

    Raises
    ------
    InputError
        If the file or the sweep cannot be used.
    InfeasibleError
        If the plan has no layout.
    """
    from meshwright.planner.many.sweep import what_if
    from meshwright.planner.report.plan_page import plan_page

    laid_out = _laid_out(plan)
    return plan_page(laid_out, None if sweep is None else what_if(laid_out, sweep or None))


@known_keywords
def trace(plan: Plan | FilePath, *, num_micro_batches: int | None = None) -> dict[str, Any]:
    """A plan's step as a document in Chrome's trace format, which Perfetto opens.

    Parameters
    ----------
    plan
        A plan with a layout, or its file or folder.
    num_micro_batches
        Draw the first so many, from 1; all when None.

    Returns
    -------
    dict
        `traceEvents` and `otherData`.

    Raises
    ------
    InputError
        If the file cannot be used, or there are more passes than a viewer takes.
    InfeasibleError
        If the plan has no layout.
    """
    from meshwright.planner.analysis.timeline import trace_document, trace_of

    return trace_document(trace_of(_laid_out(plan), num_micro_batches))


@known_keywords
def traffic(plan: Plan | FilePath) -> dict[str, Any]:
    """What a plan sends over every level of the fabric, as `meshwright traffic --json` has it.

    Parameters
    ----------
    plan
        A plan with a layout, or its file or folder.

    Returns
    -------
    dict
        `levels`, `axes`, `groups` and `cuts`, in bytes of a step and seconds.

    Raises
    ------
    InputError
        If the file cannot be used.
    InfeasibleError
        If the plan has no layout.
    """
    from meshwright.planner.analysis.traffic import plan_traffic, traffic_document

    return traffic_document(plan_traffic(_laid_out(plan)))


@known_keywords
def explain(plan: Plan | FilePath, *, best: bool = False) -> dict[str, Any]:
    """Why a plan is as it is, and what one change would cost, as `meshwright explain --json` has it.

    Parameters
    ----------
    plan
        A plan with a layout, or its file or folder.
    best
        Whether to search for the best plan with each single choice, which takes a search each.

    Returns
    -------
    dict
        The plan's reasons, and its neighbours with their prices.

    Raises
    ------
    InputError
        If the file cannot be used.
    InfeasibleError
        If the plan has no layout.
    """
    from meshwright.planner.analysis.neighbours import neighbours, single_choices
    from meshwright.planner.report.explain_view import explain_document

    explained = _laid_out(plan)
    changes = neighbours(explained)
    choices = single_choices(explained, changes, lambda _: None) if best else None
    return explain_document(explained, changes, choices)


def fleet(
    jobs: FilePath, *, cluster: str, progress: Progress | None = None, **options: Any
) -> Fleet:
    """Share one cluster among many jobs: how many nodes each gets, which ones, and when.

    Parameters
    ----------
    jobs
        The jobs file.
    cluster
        Catalog name or cluster file.
    progress
        Called with a line when a size is planned.
    **options
        Further fields of `FleetOptions`, named as the options of `meshwright fleet`.

    Returns
    -------
    Fleet
        `jobs` with their sizes and plans, and `without_plan`.

    Raises
    ------
    InputError
        If an argument or a file cannot be used.
    InfeasibleError
        If the jobs that must run do not fit together.
    OutOfTimeError
        If the time limit came before any job had a plan.
    """
    from dataclasses import fields

    from meshwright.errors import InputError, near_miss
    from meshwright.planner.many.fleet import FleetOptions, run_fleet

    known = [field.name for field in fields(FleetOptions)]
    for name, value in options.items():
        if name not in known:
            near = near_miss(name, known)
            raise InputError(
                "is no option", where="fleet", value=name, allowed=known, did_you_mean=near
            )
        if name in ("cache", "calibration") and value is not None:
            options[name] = path_of(value, name)
    say = progress or (lambda _: None)
    chosen = FleetOptions(cluster=cluster, **options)
    return run_fleet(path_of(jobs, "jobs"), chosen, lambda done, of: say(f"{done} of {of} plans"))


def _laid_out(plan: Plan | FilePath) -> Plan:
    """A plan that has a layout, read where it is a file."""
    from meshwright.errors import InfeasibleError
    from meshwright.planner.plan.document import Plan
    from meshwright.planner.plan.texts import read_feasible_plan

    if not isinstance(plan, Plan):
        return read_feasible_plan(plan)
    if plan.layout is None:
        raise InfeasibleError(f"the plan has no layout (status {plan.status})")
    return plan
