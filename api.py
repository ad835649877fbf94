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

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from meshwright.documents import path_of, write_files
from meshwright.errors import (
    InfeasibleError,
    InputError,
    given_path,
    known_keywords,
    refuse_unknown,
    require_number,
    separate_words,
)
from meshwright.planner.request.options import FilePath, PlanOptions, TrainingOptions, takes

if TYPE_CHECKING:
    from meshwright.cluster_specs.importers.document import ImportedCluster
    from meshwright.cluster_specs.reader import MixedClusterSpec
    from meshwright.cluster_specs.schema import ClusterSpec
    from meshwright.costmodel.calibration import Calibration
    from meshwright.costmodel.execution_names import ScheduleName
    from meshwright.model_specs.schema import ModelSpec
    from meshwright.planner.analysis.traffic import MappingOrder
    from meshwright.planner.audit import Audit, Audits
    from meshwright.planner.experts.service import ExpertPlan
    from meshwright.planner.many.batch import BatchListener, BatchReport
    from meshwright.planner.many.fleet import Fleet
    from meshwright.planner.many.recommend import Recommendation
    from meshwright.planner.mapping.slots import MappingObjective
    from meshwright.planner.mixed.document import MixedPlan
    from meshwright.planner.mixed.service import MixedResult
    from meshwright.planner.plan.document import Plan
    from meshwright.planner.runs.calibration.machine import MachineReport
    from meshwright.planner.runs.calibration.service import CalibrationReport
    from meshwright.planner.runs.prediction import PricedRun
    from meshwright.planner.runs.run_file import Run
    from meshwright.planner.runs.validation import ValidationReport


Progress = Callable[[str], None]


# The public functions that make many plans.


@known_keywords
def plan_batch(
    jobs: FilePath,
    output: FilePath,
    *,
    workers: int | None = None,
    engine: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
    resume: bool = False,
    force: bool = False,
    strict: bool = False,
    cache: FilePath | None = None,
    no_cache: bool = False,
    formats: Sequence[str] = ("csv", "json"),
    time_limit_s: float | None = None,
    calibration: FilePath | None = None,
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
    force
        Begin anew where there is a batch in the folder, whose plans are removed.
    strict
        Start nothing while a job has a mistake.
    cache, no_cache
        Folder of answers that are kept between batches, by default in the user's cache folder; or none.
    formats
        Of the results: csv, json, parquet.
    time_limit_s
        Seconds for the search of each job that names none; None searches until the proof.
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
        force=force,
        strict=strict,
        cache=chosen_folder(None if cache is None else path_of(cache, "cache"), no_cache),
        formats=separate_words(formats, "formats"),
        time_limit_s=time_limit_s,
        calibration=None if calibration is None else path_of(calibration, "calibration"),
        budget=Budget(tokens=tokens, days=days, gpu_hour_price=gpu_hour_price),
    )
    return run_batch(
        path_of(jobs, "jobs"), path_of(output, "output"), options, listener or SilentListener()
    )


@known_keywords
@takes(TrainingOptions)
def recommend(
    model: str,
    *,
    cluster: FilePath | Sequence[FilePath],
    gpus: int | None = None,
    global_batch: int,
    seq_len: int,
    step_time_s: float | None = None,
    tokens_per_s: float | None = None,
    tokens: float | None = None,
    days: float | None = None,
    gpu_hour_price: float | None = None,
    sizes: Sequence[int] = (),
    reserve_gib: Sequence[float] = (),
    calibration: FilePath | None = None,
    workers: int | None = None,
    cache: FilePath | None = None,
    no_cache: bool = False,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
    **options: Unpack[TrainingOptions],
) -> Recommendation:
    """Find the fewest GPUs, or the cheapest cluster, on which a model reaches a target.

    Parameters
    ----------
    model, precision, optimizer, framework, pin, forbid, global_batch, seq_len, memory_risk, train, lora_rank
        As for `plan`.
    lora_targets, loss, kind, reference
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
    time_limit_s
        Seconds for the search at each number of GPUs, from 0; none when None. Where it ends one, that fewer
        GPUs miss the target may be left unproven.
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
    from meshwright.planner.many.recommend import SizeRequest, plan_sizes

    several = cluster if isinstance(cluster, list | tuple) else (cluster,)
    if not several:
        raise InputError("needs one, or several to compare", where="cluster")
    request = SizeRequest(
        model=model,
        clusters=tuple(given_path(each, "cluster") for each in several),
        most_gpus=gpus,
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
            "tokens": tokens,
            "days": days,
            "gpu_hour_price": gpu_hour_price,
            "calibration": None if calibration is None else str(calibration),
            "time_limit": time_limit_s,
            **options,
        },
    )
    return plan_sizes(request, progress or (lambda line: None))


@known_keywords
@takes(PlanOptions)
def plan(
    model: FilePath | ModelSpec,
    *,
    cluster: FilePath | ClusterSpec | Mapping[str, object],
    global_batch: int,
    robustness: bool = True,
    baseline: FilePath | None = None,
    tokens: float | None = None,
    days: float | None = None,
    gpu_hour_price: float | None = None,
    export_model: FilePath | None = None,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
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
    hybrid_cp
        Whether the samples of packs are dealt to ranks one by one, each to as many as it needs (hybrid
        context parallelism): a sample fills a pack on cp ranks.
    precision
        bf16 (by default), fp16, fp8, mxfp8 or nvfp4.
    optimizer
        adam (by default), sgd, muon, lion, adafactor, adam-8bit, paged-adam or paged-adam-8bit: what the
        framework has of them.
    framework
        megatron (by default), torchtitan, deepspeed or fsdp2: decides what a layout may use, and its
        launch files.
    pin
        Choices that are fixed: `{"tp": 8, "recompute": "none"}` or `"tp=8,recompute=none"`.
    forbid
        Choices that are excluded, such as `["full-recompute", "cp"]`.
    reserve_gib
        HBM to leave free on every GPU, GiB, 0 (by default) to 10,000.
    memory_risk
        Share of the measured errors of predicted memory with which the plan may not fit, 1e-6 to 0.5, which
        takes the prediction as it stands; 0.05 by default.
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
        fp8-attention and te-loss, or all; and activation-offload and parameter-offload, which fill the memory
        of hosts.
    inside_domain
        Axes whose groups must each lie in one NVLink domain (in a node where there is none): any of tp, cp
        and ep, as `"ep,cp"` or a list.
    max_cut_use
        Share of the capacity of every cut of the fabric that this job and others together may use in a phase,
        1e-6 to 1, which limits nothing and is the default; below 1 for fabrics whose leaves are alike.
    calibration
        What `calibrate` learned of this stack, or its file.
    objective
        nominal (by default), or expected: the mean step time over the posterior of `calibration`; without
        one, the step time multiplied by what measured pairs of runs correct of the plan's settings.
    method
        cp-sat (by default), or exhaustive: price every layout.
    top
        How many of the best layouts to prove and list, 1 (by default) to 1000.
    time_limit_s
        Seconds for the search, 0 to 31,536,000; None searches until the proof.
    seed
        Seed of the solver, 0 (by default) to 2,147,483,647. The same arguments give the same plan.
    nodes
        Slurm host list, a file of them, or names: only these nodes of the cluster file are used. When None,
        those of the Slurm job that this runs in, if the cluster lists them.
    train, lora_rank, lora_targets
        What is trained: full (by default) for every parameter, lora for adapters beside frozen weights, qlora
        for the same beside weights of 4 bits; the width of the adapters, 1 to 8192, 16 when None; and the
        matrices that have one, such as `"q_proj,v_proj"`, all-linear when None.
    image_tokens, images_per_sequence, freeze_encoder
        Tokens of a sequence that are of images, as the language model reads them, 0 for text alone without
        the encoder; the images that share them, 1 or more, one or as many as a fixed size makes when None;
        and whether encoder and projector are left as they are, as they are beside adapters.
    loss
        How the head and its cross-entropy run: liger, chunked (TRL up to 1.14) or fused-head (TRL from 1.15
        on), chunk by chunk of tokens; all-logits, or as the framework does when None: on the logits of all
        tokens, but for dpo and kto, whose trainers of TRL run as fused-head.
    kind
        What a step does with a sample: pretrain (by default), sft, dpo, kto, orpo or reward. `global_batch`
        counts pairs of a chosen and a rejected sequence in dpo, orpo and reward, and `seq_len` is of each.
    reference
        Where the reference model of dpo and kto is: resident (when None), offloaded to the host's memory, or
        precomputed, its log-probabilities being in the data. Adapters have their frozen base as reference.
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
    with within(options.get("time_limit_s")):
        from meshwright.planner.plan.make_plan import make_plan
        from meshwright.planner.request.reader import read_request

        best = options.pop("top", 1)
        request = read_request(
            model=model, cluster=cluster, global_batch=global_batch, top_k=best, **options
        )
        model_file = None if export_model is None else path_of(export_model, "export_model")
        from meshwright.planner.plan.document import with_digest

        today = None
        if baseline is not None:
            from meshwright.planner.analysis.waterfall import read_baseline

            today = read_baseline(path_of(baseline, "baseline"), request.inputs())
        planned = make_plan(
            request, robustness=robustness, progress=progress, model_file=model_file
        )
        if today is not None:
            from meshwright.planner.launch.compare import against

            return with_digest(against(planned, today, budget))
        priced = with_cost(planned, budget)
        return planned if priced is planned else with_digest(priced)


@known_keywords
def estimate(
    run: FilePath | Mapping[str, Any],
    *,
    from_launch: bool = False,
    settings: Sequence[str] = (),
    measured: FilePath | None = None,
    calibration: FilePath | Calibration | None = None,
) -> tuple[PricedRun, ...]:
    """Price fully given configurations: time, memory, traffic. No search.

    Parameters
    ----------
    run
        A run file, or the mapping that one holds (`meshwright schema run`).
    from_launch, settings
        Whether it is a launch file of a framework, and what that leaves open: `["cluster=dgx-h100"]`.
    measured
        What the one run logged: text of Megatron or torchtitan, a history of Weights & Biases (`.csv`,
        `.json`, `.jsonl`), TensorBoard's event files, or MLflow's folder of a run.
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

    if settings and not from_launch:
        _refuse_beside("a run file, which says all itself", settings=settings)
    stack = read_calibration(calibration)
    log = None if measured is None else path_of(measured, "measured")
    if from_launch and not isinstance(run, Mapping):
        from meshwright.planner.runs.launches.reader import price_launch

        return tuple(price_launch(path_of(run, "run"), settings, None, stack, log))
    if log is not None:
        from meshwright.planner.runs.logs import price_logged, with_measurement

        if not isinstance(run, Mapping):
            return (price_logged(path_of(run, "run"), log, None, stack),)
        run = with_measurement(run, log)
    if isinstance(run, Mapping):
        return (price_run(run_from_mapping(run, where="run", calibration=stack), Path("run")),)
    return tuple(price_runs(path_of(run, "run"), stack))


@known_keywords
def calibrate(
    *runs: FilePath | Run,
    name: str | None = None,
    like: str | None = None,
    measure: bool = False,
    minutes: float = 10.0,
    model: FilePath | ModelSpec | None = None,
    cluster: FilePath | ClusterSpec | Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> CalibrationReport | MachineReport | None:
    """Learn the constants of a stack from its own measured runs, or of this machine from what it times.

    Parameters
    ----------
    *runs
        Run files whose rows have `measured`, logs of nccl-tests, and runs that were read before: 3 to 20 runs
        on one kind of device. None of them with `measure`, where the machine alone speaks.
    name
        Of the stack; what the runs call their framework when None.
    like
        The known stack to begin from; the runs' framework, or the nearest one, when None.
    measure
        Whether to time matrix products, attention, memory, launches and collectives on this machine's GPUs,
        or on its CPU where there are none. Needs torch.
    minutes
        How long that may take, 0.05 to 120.
    model
        Whose shapes are timed; that of the largest run, or mixtral-8x7b, when None.
    cluster
        What the machine is set against; the runs' cluster, or the catalog's node with the GPUs found here,
        when None.
    progress
        Called with a line now and then.

    Returns
    -------
    CalibrationReport, MachineReport or None
        `calibration` goes to `plan`, `estimate` and `validate`. With runs: errors before and after, what
        moved, and the run to measure next. Of the machine alone: how each class of operations moved. None on
        all ranks but the first of a torchrun.

    Raises
    ------
    InputError
        If a file cannot be used, runs are of several devices, torch is not installed, or the
        GPUs are none of the catalog's and `cluster` is None.
    """
    from meshwright.planner.runs.calibration.evidence import read_sources
    from meshwright.planner.runs.calibration.service import calibrate_runs
    from meshwright.planner.runs.run_file import Run

    read_before = tuple(run for run in runs if isinstance(run, Run))
    paths = [path_of(run, "runs") for run in runs if not isinstance(run, Run)]
    if not measure:
        read, benchmarks = read_sources(paths, read_before)
        return calibrate_runs(read, name=name, like=like, benchmarks=benchmarks)
    from dataclasses import replace

    from meshwright.cluster_specs.reader import read_cluster
    from meshwright.model_specs.reader import read_model
    from meshwright.planner.runs.calibration.torch_timer import machine_word

    read, benchmarks = read_sources(paths, read_before) if runs else ((), ())
    machine = machine_word(
        read,
        name=name,
        like=like,
        minutes=minutes,
        model=None if model is None else read_model(model),
        cluster=None if cluster is None else read_cluster(cluster),
        progress=progress,
    )
    if machine is None or not read:
        return machine
    benchmarks += machine.benchmarks
    learned = calibrate_runs(read, name=name, like=like, benchmarks=benchmarks)
    provenance = {"measured": machine.calibration.measured}
    return replace(
        learned,
        calibration=learned.calibration.model_copy(update=provenance),
        notes=(*learned.notes, *machine.notes),
    )


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
    from meshwright.planner.experts.service import expert_request, plan_experts

    fields = {"loads": loads, "cluster": cluster, "gpus": gpus, "slots": slots, **options}
    return plan_experts(expert_request(fields), progress)


# The public function that plans on a cluster whose parts differ.


@known_keywords
@takes(PlanOptions)
def plan_mixed(
    model: FilePath | ModelSpec,
    *,
    cluster: FilePath | MixedClusterSpec,
    global_batch: int,
    choices: bool = True,
    robustness: bool = False,
    baseline: FilePath | None = None,
    tokens: float | None = None,
    days: float | None = None,
    gpu_hour_price: float | None = None,
    export_model: FilePath | None = None,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
) -> MixedResult:
    """Find the fastest plan on a mixed cluster: a pipeline through parts of it, or a plan on one part.

    Parameters
    ----------
    model
        As `plan` takes it.
    cluster
        A cluster file with `parts`, or what `read_mixed_cluster` made of one.
    gpus
        GPUs in use: all of the cluster's, which None stands for.
    global_batch, seq_len, precision, optimizer, framework, pin, forbid, reserve_gib, memory_risk
        As `plan` takes them.
    moe_dispatch, without, allow, inside_domain, max_cut_use, calibration, objective, method, top, seed
        As `plan` takes them.
    train, lora_rank, lora_targets, kind, reference, loss, lengths, pack_size, packing, expert_loads, nodes
        As `plan` takes them; nodes are of all parts.
    image_tokens, images_per_sequence, freeze_encoder, progress
        As `plan` takes them.
    hybrid_cp
        False: mixed clusters do not have it.
    time_limit_s
        Seconds for the whole search, 0 to 31,536,000; None searches until the proof.
    choices
        Whether to search for the best plan without each execution choice of a pipeline through parts.
    robustness
        Whether to search again under each error of the cost model, which takes a search each.
    baseline
        What is run today, as `plan` takes it: priced on the cluster that it names, else on the part where it
        runs fastest.
    tokens, days, gpu_hour_price
        As `plan` takes them; GPUs of the parts in use are counted, at each part's power.
    export_model
        Where to write all that was priced, on parts alone and through several, as one CP-SAT model; as `plan`
        takes it.

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
    from meshwright.planner.mixed.document import read_mixed_request
    from meshwright.planner.mixed.service import make_mixed_plan, with_mixed_cost
    from meshwright.planner.plan.training_cost import Budget

    budget = Budget(tokens=tokens, days=days, gpu_hour_price=gpu_hour_price)
    request = read_mixed_request(model=model, cluster=cluster, global_batch=global_batch, **options)
    searched = partial(
        make_mixed_plan,
        request,
        progress,
        choices=choices,
        robustness=robustness,
        model_file=None if export_model is None else path_of(export_model, "export_model"),
    )
    if baseline is None:
        return with_mixed_cost(searched(), budget)
    from meshwright.planner.analysis.waterfall import read_baseline_on_parts
    from meshwright.planner.launch.compare import result_against

    inputs = {request.name_of(part): each.inputs() for part, each in enumerate(request.parts)}
    today = read_baseline_on_parts(path_of(baseline, "baseline"), inputs)
    return result_against(with_mixed_cost(searched(), budget), today, budget)


# What is made of a plan: its files, its page, its timeline, its traffic, its reasons.


@known_keywords
def save(plan: Plan | MixedPlan | FilePath, folder: FilePath, *, force: bool = False) -> list[Path]:
    """Write a plan and the files that start it, as `meshwright plan -o` does.

    Parameters
    ----------
    plan
        A plan with a layout, on a mixed cluster too, or its file or folder.
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
    plan: Plan | MixedPlan | FilePath,
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
        A plan with a layout, on a mixed cluster too, or its file or folder.
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
    from meshwright.planner.analysis.traffic import moved
    from meshwright.planner.launch.plan_files import plan_files

    laid_out = moved(_laid_out_anywhere(plan), cluster, nodes)
    return list(write_files(path_of(folder, "folder"), plan_files(laid_out, target), force))


@known_keywords
def map(
    plan: Plan | FilePath,
    *,
    cluster: str | None = None,
    nodes: str | None = None,
    objective: MappingObjective = "traffic",
    order: MappingOrder = "best",
    dp_weight: float = 0.5,
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
    dp_weight
        Of the objective spread, 0 to 1: what a data-parallel group's reach counts; a pipeline's the rest.
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
    from meshwright.planner.analysis.traffic import map_plan, nodes_to_place_on
    from meshwright.planner.mapping.spread_build import ReachWeights

    laid_out = _laid_out(plan)
    onto = nodes_to_place_on(laid_out, cluster, nodes)
    mapped = map_plan(
        laid_out,
        onto,
        objective=objective,
        order=order,
        spares=spares,
        weights=ReachWeights.of(dp_weight),
        time_limit_s=time_limit_s,
    )
    return mapped.plan


@known_keywords
def report(
    plan: Plan | FilePath,
    *,
    sweep: str | None = None,
    calibration: FilePath | Calibration | None = None,
) -> str:
    """A plan as one HTML page that loads nothing, as `meshwright report` writes it.

    Parameters
    ----------
    plan
        A plan with a layout, or its file or folder.
    sweep
        Other plans behind the page's controls: empty for half and twice of everything, or axes such as
        `gpus=256:2048:x2`; None for no controls.
    calibration
        What `calibrate` learned of this stack, or its file: the plan is priced anew with it.

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
    from meshwright.planner.plan.make_plan import repriced
    from meshwright.planner.report.plan_page import plan_page
    from meshwright.planner.request.reader import read_calibration

    laid_out = repriced(_laid_out(plan), read_calibration(calibration))
    return plan_page(laid_out, None if sweep is None else what_if(laid_out, sweep or None))


@known_keywords
def trace(
    plan: Plan | MixedPlan | FilePath, *, num_micro_batches: int | None = None
) -> dict[str, Any]:
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

    return trace_document(trace_of(_laid_out_anywhere(plan), num_micro_batches))


@known_keywords
def traffic(plan: Plan | MixedPlan | FilePath) -> dict[str, Any]:
    """What a plan sends over every level of the fabric, as `meshwright traffic --json` has it.

    Parameters
    ----------
    plan
        A plan with a layout, or its file or folder.

    Returns
    -------
    dict
        `levels`, `axes`, `groups` and `cuts`, in bytes of a step and seconds; of a plan on a mixed cluster
        these under each of its `parts`, and what is sent `between` them.

    Raises
    ------
    InputError
        If the file cannot be used.
    InfeasibleError
        If the plan has no layout.
    """
    from meshwright.planner.analysis.traffic import traffic_of

    return traffic_of(_laid_out_anywhere(plan)).document()


@known_keywords
def explain(plan: Plan | MixedPlan | FilePath, *, best: bool = False) -> dict[str, Any]:
    """Why a plan is as it is, and what one change would cost, as `meshwright explain --json` has it.

    Parameters
    ----------
    plan
        A plan with a layout, on a mixed cluster too, or its file or folder; or a term of the glossary or the
        name of a rule, whose `meaning` is given.
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
    from meshwright.planner.analysis.neighbours import (
        neighbours,
        parts_choices,
        parts_neighbours,
        single_choices,
    )
    from meshwright.planner.mixed.document import MixedPlan
    from meshwright.planner.report.explain_view import explain_document
    from meshwright.planner.report.mixed_view import explain_parts_document

    if isinstance(plan, str) and not Path(plan).exists():
        from meshwright.planner.report.plan_words import explained_term

        term = explained_term(plan)
        if term is not None:
            return term
    explained = _laid_out_anywhere(plan)
    if isinstance(explained, MixedPlan):
        near = parts_neighbours(explained)
        rivals = parts_choices(explained, near, lambda _: None) if best else None
        return explain_parts_document(explained, near, rivals)
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

    from meshwright.planner.many.fleet import FleetOptions, run_fleet

    names = [field.name for field in fields(FleetOptions)]
    refuse_unknown(options, names, where="fleet", what="is no option")
    for name, value in options.items():
        if name in ("cache", "calibration") and value is not None:
            options[name] = path_of(value, name)
    say = progress or (lambda _: None)
    chosen = FleetOptions(cluster=cluster, **options)
    return run_fleet(path_of(jobs, "jobs"), chosen, lambda done, of: say(f"{done} of {of} plans"))


# What commands check and list, and what they read of other tools.


@known_keywords
def verify_plan(plan: FilePath, directory: FilePath | None = None) -> Audit:
    """Check a plan and its files again, without the solver.

    Parameters
    ----------
    plan
        A plan's file or folder, of a mixed cluster too.
    directory
        The folder of its launch files; the plan's own when None.

    Returns
    -------
    Audit
        `checks` with what is broken of each, and `passed`.

    Raises
    ------
    InputError
        If there is no such plan or folder.
    """
    from meshwright.planner.audit import audit_plan

    folder = None if directory is None else path_of(directory, "directory")
    return audit_plan(path_of(plan, "plan"), folder)


@known_keywords
def verify_plans(*plans: FilePath) -> Audits:
    """Check plans, and all plans below folders, again: what `meshwright verify --all` does.

    Parameters
    ----------
    *plans
        Plans, folders of plans, or folders below which plans lie; each with the launch files beside it.

    Returns
    -------
    Audits
        `audits`, one for each plan, and `passed`.

    Raises
    ------
    InputError
        If a path is not there, or no plan is below a folder.
    """
    from meshwright.planner.audit import audit_plans

    if not plans:
        raise InputError("give plans, or folders below which plans lie", where="plans")
    return audit_plans([path_of(plan, "plans") for plan in plans])


@known_keywords
def model(model: FilePath | ModelSpec, *, seq_len: int = 4096) -> dict[str, Any]:
    """What is read of a model: shape, parameters, FLOP, as `meshwright model --json` has it.

    Parameters
    ----------
    model
        Catalog name, file, or a spec from `read_model`.
    seq_len
        Tokens per sequence, 1 to 16,777,216, of which the FLOP of attention depend.

    Returns
    -------
    dict
        The fields of the spec, `parameters`, `active_parameters` and FLOP of a token.

    Raises
    ------
    InputError
        If the model cannot be read.
    """
    from meshwright.costmodel.lengths import LONGEST
    from meshwright.model_specs.reader import read_model
    from meshwright.planner.report.catalog_view import model_document

    if not 1 <= seq_len <= LONGEST:
        raise InputError(f"must be from 1 to {LONGEST}", where="seq_len", value=seq_len)
    return model_document(read_model(model), seq_len)


@known_keywords
def catalog(kind: Literal["models", "clusters", "devices"]) -> list[dict[str, Any]]:
    """The models, clusters or devices that are known by name.

    Parameters
    ----------
    kind
        models, clusters or devices.

    Returns
    -------
    list of dict
        A row for each, with its `name` and its figures.

    Raises
    ------
    InputError
        If there is no such kind.
    """
    from meshwright.planner.report.catalog_view import CATALOGS, catalog_rows

    refuse_unknown([kind], CATALOGS, where="kind", what="is no catalog")
    return [dict(row) for row in catalog_rows(kind)]


@known_keywords
def schema(kind: Literal["model", "cluster", "run", "jobs", "plan"]) -> dict[str, Any]:
    """The JSON Schema of a kind of file, for editors and checks.

    Parameters
    ----------
    kind
        model, cluster, run, jobs or plan.

    Returns
    -------
    dict
        Draft 2020-12.

    Raises
    ------
    InputError
        If there is no such kind.
    """
    from meshwright.planner.report.catalog_view import json_schema

    return json_schema(kind)


@known_keywords
def read_topology(
    files: Sequence[FilePath],
    *,
    form: str,
    node: str,
    oversubscription: Sequence[float] | None = None,
    chosen: str | None = None,
    name: str | None = None,
) -> ImportedCluster:
    """A cluster from its description in another tool's format, as `meshwright topology import` reads it.

    Parameters
    ----------
    files
        Of one format, from 1.
    form
        Who wrote them: slurm, topograph, nvidia-smi, ibnetdiscover or nccl-tests.
    node
        Catalog name, or a cluster YAML to add to.
    oversubscription
        One for each switch level, inside out, 1 to 1000.
    chosen
        One of the topologies in a `topology.yaml`.
    name
        What to call the cluster; the first file's name when None.

    Returns
    -------
    ImportedCluster
        `cluster`, the `text` of its YAML, and `notes`.

    Raises
    ------
    InputError
        If a file cannot be read.
    """
    from meshwright.cluster_specs.importers.document import import_topology

    paths = [path_of(file, "files") for file in files]
    return import_topology(
        form, paths, node, oversubscription=oversubscription, name=name, topology=chosen
    )


# Single formulas. An amount is a number of bytes, seconds or bytes a second, or a text such as `1GiB`, `5us`
# or `50GB/s`.


Amount = float | str


def _amount(kind: Literal["bytes", "seconds", "rate"], value: Amount, where: str) -> float:
    """An amount as a number: of bytes and of a rate above 0, of seconds at least 0."""
    from meshwright.planner.calculators import formulas

    if isinstance(value, str):
        return formulas.AMOUNT_READERS[kind](value, where)
    require_number(where, value)
    if kind == "seconds" and not 0 <= value < inf:
        raise InputError("must be at least 0", where=where, value=value)
    if kind != "seconds" and not 0 < value < inf:
        raise InputError("must be above 0", where=where, value=value)
    return float(value)


def _amount_given(
    kind: Literal["bytes", "seconds", "rate"], value: Amount | None, where: str
) -> float | None:
    return None if value is None else _amount(kind, value, where)


def _refuse_beside(what: str, **options: object) -> None:
    """Raises InputError for the first option that is said, where it says nothing."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise InputError(f"says nothing beside {what}: leave it out", where=name)


@known_keywords
def collective(
    operation: str | None = None,
    size: Amount | None = None,
    *,
    ranks: int | None = None,
    end: Amount | None = None,
    factor: float = 2.0,
    log: FilePath | None = None,
    cluster: str | None = None,
    link: str | None = None,
    alpha: Amount | None = None,
    beta: Amount | None = None,
    gamma: Amount | None = None,
    per_node: int = 1,
    inside_alpha: Amount = 1e-6,
    inside_beta: Amount = 450e9,
    in_switch: bool = False,
    nccl: bool = False,
    calibration: FilePath | Calibration | None = None,
) -> dict[str, Any]:
    """Time one collective alone, by algorithm: on a cluster, or on a link of your own.

    Parameters
    ----------
    operation
        Such as all-reduce; with `size` and `ranks`, or instead of them `log`.
    size, end
        Full buffer, bytes; with `end` a sweep up to it.
    factor
        From one size of the sweep to the next, 1.1 to 1024.
    ranks
        Members, packed tightly, from 1.
    log
        A log of nccl-tests: alpha and beta are fitted to it.
    cluster
        Catalog name or cluster YAML; or give `link`, or `alpha` and `beta`.
    link
        A link by its name.
    alpha, inside_alpha
        Start-up of a message, seconds, at least 0; inside a node.
    beta, inside_beta, gamma
        Bytes a second, above 0: of the link, inside a node, and of reduction, which is free when None.
    per_node
        Ranks of a node, which share the link, from 1.
    in_switch
        Whether the link's switches reduce.
    nccl
        Whether an all-to-all is NCCL's, not DeepEP's kernels.
    calibration
        What `calibrate` learned of this stack, or its file.

    Returns
    -------
    dict
        What `meshwright collective --json` prints.

    Raises
    ------
    InputError
        If what is given does not make a question, or cannot be read.
    """
    from meshwright.planner.calculators import collective as documents
    from meshwright.planner.calculators.formulas import sizes_between

    own_link = {"alpha": alpha, "gamma": gamma, "in_switch": in_switch}
    if log is not None:
        asked = {
            "operation": operation,
            "size": size,
            "end": end,
            "ranks": ranks,
            "cluster": cluster,
        }
        what = "--from, which reads operation, sizes and ranks from the log"
        _refuse_beside(what, **asked, link=link, beta=beta, **own_link)
        return documents.fitted_document(documents.log_text(path_of(log, "log")))
    if operation is None or size is None or ranks is None:
        raise InputError("give --op, --bytes and --ranks; or --from with a log of nccl-tests")
    if not 1.1 <= factor <= 1024:
        raise InputError("must be from 1.1 to 1024", where="factor", value=factor)
    sizes_bytes = sizes_between(
        _amount("bytes", size, "size"), _amount_given("bytes", end, "end"), factor
    )
    if (cluster is None) == (link is None and beta is None):
        raise InputError("give either --cluster, or --link or --alpha and --beta")
    if cluster is not None:
        from meshwright.planner.request.reader import read_calibration

        _refuse_beside("a cluster", **own_link, per_node=None if per_node == 1 else per_node)
        return documents.collective_document(
            operation,
            sizes_bytes,
            ranks,
            cluster,
            deduplicated=not nccl,
            calibration=read_calibration(calibration),
        )
    _refuse_beside("a link of your own", nccl=nccl, calibration=calibration)
    wires = documents.own_network(
        link=link,
        alpha=_amount_given("seconds", alpha, "alpha"),
        beta=_amount_given("rate", beta, "beta"),
        gamma=_amount_given("rate", gamma, "gamma"),
        inside_alpha=_amount("seconds", inside_alpha, "inside_alpha"),
        inside_beta=_amount("rate", inside_beta, "inside_beta"),
        per_node=per_node,
        in_switch=in_switch,
    )
    return documents.textbook_document(operation, sizes_bytes, ranks, wires)


@known_keywords
def roofline(
    plan: Plan | FilePath | None = None,
    *,
    device: str | None = None,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    precision: str = "bf16",
    cluster: str | None = None,
    beta: Amount | None = None,
    peak_tflops: float | None = None,
    seq_len: int = 2048,
    batches: Sequence[float] = (1, 4, 16, 64, 256),
    gradient_bytes: float = 2.0,
    efficiency: float = 0.9,
) -> dict[str, Any]:
    """Place a matrix product and data parallelism under the roofs of compute, memory and network.

    Parameters
    ----------
    plan
        A plan, or its file or folder: the products and gradients of it.
    device, m, n, k
        A catalog device, and rows, columns and depth of a product, from 1.
    precision
        Of the product.
    cluster
        Catalog name or cluster YAML: the ridge at each of its levels.
    beta
        A network of your own, bytes a second, above 0.
    peak_tflops
        Instead of a device's, above 0.
    seq_len, batches
        Tokens of a sequence, and sequences of a rank and step, from 1.
    gradient_bytes
        Of a parameter's gradient, above 0.
    efficiency
        The batch that reaches it is said, above 0 to 1.

    Returns
    -------
    dict
        What `meshwright roofline --json` prints.

    Raises
    ------
    InputError
        If what is given does not make a question, or cannot be read.
    """
    from meshwright.planner.analysis.roofline import (
        network_roofline,
        peak_and_rates,
        roofline_document,
    )

    document: dict[str, Any] = {}
    sizes = (m, n, k)
    if any(size is None for size in sizes) and any(size is not None for size in sizes):
        raise InputError("a matrix product needs --m, --n and --k")
    if plan is not None:
        from meshwright.planner.analysis.roofline import plan_roofline

        _refuse_beside("a plan", m=m)
        document["plan"] = plan_roofline(_laid_out(plan))
    elif m is not None and n is not None and k is not None:
        if device is None:
            raise InputError("a matrix product needs --device")
        document = roofline_document(device, m, n, k, precision)
    elif cluster is None and beta is None:
        raise InputError("give a plan, --m, --n and --k, or a network: --cluster or --beta")
    if cluster is None and beta is None:
        return document
    peak = None if peak_tflops is None else peak_tflops * 1e12
    rates: dict[str, float] = {}
    # Catalogs take longer to read than numbers of one's own to answer.
    if cluster is not None or (peak is None and device is not None):
        nominal_peak, rates = peak_and_rates(device, cluster, precision)
        peak = peak or nominal_peak
    if beta is not None:
        rates["network"] = _amount("rate", beta, "beta")
    if peak is None:
        raise InputError("give --device, --cluster or --peak-tflops")
    document["network"] = network_roofline(
        peak,
        rates,
        seq_len=seq_len,
        batches=tuple(batches),
        gradient_bytes=gradient_bytes,
        efficiency=efficiency,
    )
    return document


@known_keywords
def pipeline(
    *,
    pp: int,
    micro_batches: int,
    vpp: int = 1,
    schedule: ScheduleName = "1f1b",
    forward_ms: float = 1.0,
    backward_ms: float = 2.0,
    compute_ms: float | None = None,
    boundary_bytes: Amount | None = None,
    layers: int | None = None,
) -> dict[str, Any]:
    """Play one pipeline schedule: step, bubble, activations in flight, speed needed between stages.

    Parameters
    ----------
    pp, vpp, micro_batches
        Pipeline ranks, virtual stages of a rank, micro-batches of a step, from 1.
    schedule
        As pins write it.
    forward_ms, backward_ms
        Milliseconds of a rank and micro-batch, above 0.
    compute_ms
        Instead of both, above 0: milliseconds of a step, a third of it forward.
    boundary_bytes
        Activations of a micro-batch between stages, bytes.
    layers
        Of the model, from 1: the layers of each stage are said too.

    Returns
    -------
    dict
        What `meshwright pipeline --json` prints.

    Raises
    ------
    InputError
        If the schedule does not take these sizes.
    """
    from meshwright.planner.calculators.pipeline import pipeline_document

    if compute_ms is not None:
        forward_ms = compute_ms / max(micro_batches, 1) / 3.0
        backward_ms = 2.0 * forward_ms
    return pipeline_document(
        schedule,
        pp,
        vpp,
        micro_batches,
        forward_s=forward_ms / 1e3,
        backward_s=backward_ms / 1e3,
        boundary_bytes=_amount_given("bytes", boundary_bytes, "boundary_bytes"),
        layers=layers,
    )


@known_keywords
def memory(run: FilePath) -> list[dict[str, Any]]:
    """The memory of fully given configurations, by stage and component.

    Parameters
    ----------
    run
        A run file.

    Returns
    -------
    list of dict
        One for each run of the file, GiB.

    Raises
    ------
    InputError
        If a run cannot be read or priced.
    """
    from meshwright.planner.calculators.volumes import memory_document
    from meshwright.planner.runs.prediction import price_runs

    return [
        memory_document(
            priced.run.id,
            priced.run.workload,
            priced.prediction.memory_parts_gib,
            priced.prediction.context_gib,
        )
        for priced in price_runs(path_of(run, "run"))
    ]


@known_keywords
def overlap(
    plan: Plan | FilePath | None = None,
    *,
    compute_s: Amount | None = None,
    comm_s: Amount | None = None,
    sync_s: Amount = 0.0,
    size: Amount | None = None,
    alpha: Amount = 5e-6,
    beta: Amount | None = None,
    chunks: int | None = None,
    passes: Literal[1, 2] = 2,
    seq_len: int | None = None,
    cp: int = 1,
    width: int | None = None,
    element_bytes: float = 2.0,
) -> dict[str, Any]:
    """What communication hides beside compute, in how many chunks, and in which buffers.

    Parameters
    ----------
    plan
        A plan, or its file or folder: every axis of it.
    compute_s, comm_s, sync_s
        Seconds of a step, each at least 0: compute, communication that may run beside it, and what can run
        beside nothing.
    size, alpha, beta
        Gradients of a rank, bytes, sent in chunks; start-up of a chunk, seconds, above 0; bytes a second of
        the link, above 0.
    chunks
        How many, from 1; the best count when None.
    passes
        2 for an all-reduce, 1 for a reduce-scatter.
    seq_len, cp, width, element_bytes
        Ring attention: tokens of a sequence, ranks, width of keys, each at least 1; bytes of an element,
        above 0.

    Returns
    -------
    dict
        What `meshwright overlap --json` prints.

    Raises
    ------
    InputError
        If what is given does not make a question, or cannot be read.
    """
    from meshwright.costmodel.textbook import Link
    from meshwright.planner.calculators import volumes as documents

    document: dict[str, Any] = {}
    if passes not in (1, 2):
        raise InputError("must be 1 or 2", where="passes", value=passes)
    beside_s = _amount_given("seconds", compute_s, "compute_s")
    moved_s, rate = _amount_given("seconds", comm_s, "comm_s"), _amount_given("rate", beta, "beta")
    if size is not None and rate is None:
        raise InputError("needs --beta", where="size")
    if moved_s is not None and beside_s is None:
        raise InputError("needs --compute", where="comm_s")
    if (seq_len is None) != (width is None):
        raise InputError("ring attention needs --seq-len and --width")
    if plan is not None:
        from meshwright.planner.analysis.roofline import plan_overlap

        document["plan"] = plan_overlap(_laid_out(plan))
    if beside_s is not None and moved_s is not None:
        alone_s = _amount("seconds", sync_s, "sync_s")
        document["step"] = documents.overlap_document(beside_s, moved_s, alone_s)
    if size is not None and rate is not None:
        link = Link(alpha_s=_amount("seconds", alpha, "alpha"), bytes_per_s=rate)
        document["chunks"] = documents.chunks_document(
            _amount("bytes", size, "size"), link, chunks=chunks, passes=passes, beside_s=beside_s
        )
    if seq_len is not None and width is not None:
        document["ring_attention"] = documents.ring_attention_document(
            seq_len, cp, width, element_bytes, compute_s=beside_s or 0.0, bytes_per_s=rate
        )
    if not document:
        raise InputError(
            "give a plan, --compute and --comm, --bytes and --beta, or --seq-len, --cp and --width"
        )
    return document


@known_keywords
def volumes(
    *,
    params: float = 0.0,
    layers: int = 1,
    hidden: int = 0,
    heads: int = 0,
    seq_len: int = 2048,
    micro_batch: int = 1,
    dp: int = 1,
    shard_group: int = 1,
    gradient_bytes: float = 2.0,
    gpu_memory_bytes: Amount = 80e9,
    tp: int = 1,
    ep: int = 1,
    top_k: int = 1,
) -> dict[str, Any]:
    """Count by the textbook what a GPU holds, and what each kind of parallelism makes it send.

    Parameters
    ----------
    params, layers, hidden, heads
        Of the model; a size of 0 leaves out what needs it.
    seq_len, micro_batch
        Tokens of a sequence, and sequences of a micro-batch, from 1.
    dp, shard_group, tp, ep
        Ranks that ZeRO shards over, of a group of hybrid sharding, of tensor and of expert parallelism, from
        1.
    gradient_bytes
        Of a gradient as it is added up and sent, 0.5 to 8.
    gpu_memory_bytes
        How many GPUs of this size the states fill, bytes, above 0.
    top_k
        Experts of a token, from 1.

    Returns
    -------
    dict
        What `meshwright volumes --json` prints.

    Raises
    ------
    InputError
        If a size cannot be.
    """
    from meshwright.planner.calculators.volumes import TransformerShape, volumes_document

    shape = TransformerShape(
        params=params,
        layers=layers,
        hidden=hidden,
        heads=heads,
        seq_len=seq_len,
        micro_batch=micro_batch,
        dp=dp,
        tp=tp,
        ep=ep,
        top_k=top_k,
        shard_group=shard_group,
        gradient_bytes=gradient_bytes,
        gpu_memory_bytes=_amount("bytes", gpu_memory_bytes, "gpu_memory_bytes"),
    )
    return volumes_document(shape)


@known_keywords
def compress(
    size: Amount,
    *,
    ranks: int,
    beta: Amount,
    alpha: Amount = 5e-6,
    codec: Amount = 500e9,
    keep: float = 0.01,
    rank: int = 4,
    width: int = 4096,
) -> dict[str, Any]:
    """When compressed gradients are exchanged sooner: 8 and 4 bits, top-k, PowerSGD.

    Parameters
    ----------
    size
        16-bit gradients of a rank, bytes, above 0.
    ranks
        Data-parallel ranks, from 2.
    beta, alpha
        Bytes a second between members, above 0; start-up of a message, seconds.
    codec
        Bytes a second of packing and unpacking, above 0.
    keep
        Share that top-k sends, above 0 to 1.
    rank, width
        Of PowerSGD's factors, and the edge of a gradient, from 1.

    Returns
    -------
    dict
        What `meshwright compress --json` prints.

    Raises
    ------
    InputError
        If a size cannot be.
    """
    from meshwright.costmodel.textbook import Link
    from meshwright.planner.calculators.volumes import compression_document

    link = Link(
        alpha_s=_amount("seconds", alpha, "alpha"), bytes_per_s=_amount("rate", beta, "beta")
    )
    return compression_document(
        _amount("bytes", size, "size"),
        ranks,
        link,
        codec_bytes_per_s=_amount("rate", codec, "codec"),
        keep=keep,
        rank=rank,
        width=width,
    )


def _laid_out(plan: Plan | FilePath) -> Plan:
    """A plan that has a layout, read where it is a file."""
    from meshwright.planner.plan.document import Plan
    from meshwright.planner.plan.texts import read_feasible_plan

    if not isinstance(plan, Plan):
        return read_feasible_plan(plan)
    if plan.layout is None:
        raise InfeasibleError(f"the plan has no layout (status {plan.status})")
    return plan


def _laid_out_anywhere(plan: Plan | MixedPlan | FilePath) -> Plan | MixedPlan:
    """The same of a plan on a mixed cluster too."""
    from meshwright.planner.mixed.document import MixedPlan, Pipeline, read_any_plan
    from meshwright.planner.plan.document import Plan

    if isinstance(plan, MixedPlan):
        return Pipeline.of(plan).plan
    return _laid_out(plan) if isinstance(plan, Plan) else read_any_plan(plan)
