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

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api.many import plan_batch, recommend
from meshwright.documents.reader import path_of

if TYPE_CHECKING:
    from meshwright.cluster_specs.schema import ClusterSpec
    from meshwright.costmodel.constants.calibration import Calibration
    from meshwright.model_specs.schema import ModelSpec
    from meshwright.planner.experts.service import ExpertPlan
    from meshwright.planner.plan.document import Plan
    from meshwright.planner.runs.calibration.report import CalibrationReport
    from meshwright.planner.runs.prediction import PricedRun
    from meshwright.planner.runs.run_file import Run
    from meshwright.planner.runs.validation import ValidationReport

__all__ = [
    "calibrate",
    "estimate",
    "place_experts",
    "plan",
    "plan_batch",
    "recommend",
    "validate",
]

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
    memory_risk: float = 0.05,
    expert_loads: FilePath | None = None,
    moe_dispatch: str | None = None,
    without: Iterable[str] | str = (),
    allow: Iterable[str] | str = (),
    inside_domain: Iterable[str] | str = (),
    max_cut_use: float = 1.0,
    calibration: FilePath | Calibration | None = None,
    objective: str = "nominal",
    method: str = "cp-sat",
    top: int = 1,
    time_limit_s: float | None = None,
    seed: int = 0,
    nodes: str | None = None,
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
    memory_risk
        Share of the measured errors of predicted memory with which the plan may not fit, up to 0.5, which
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
        above 0 to 1, which limits nothing; below 1 for fabrics whose leaves are alike.
    calibration
        What `calibrate` learned of this stack, or its file.
    objective
        nominal, or expected: the mean step time over the posterior of `calibration`.
    method
        cp-sat, or exhaustive: price every layout.
    top
        How many of the best layouts to prove and list, 1 to 1000.
    time_limit_s
        Seconds for the search; None searches until the proof.
    seed
        Seed of the solver, from 0. The same arguments give the same plan.
    nodes
        Slurm host list, or a file of them: only these nodes of the cluster file are used. When None, those
        of the Slurm job that this runs in, if the cluster lists them.
    robustness
        Whether to search again with the cost model off by its measured error, which takes about as long as
        the search itself.
    baseline
        File of what is run today: a launch script, a run file or a plan. The plan's `baseline` says what it
        brings over that.
    tokens, days, gpu_hour_price
        What the whole training takes, in `cost`: its days, GPU hours, dollars (at this price, or the cluster
        file's) and kWh. With tokens, days are a deadline; without, how long is trained.
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
        )
        model_file = None if export_model is None else path_of(export_model, "export_model")
        from meshwright.planner.plan.digest import with_digest

        if baseline is None:
            found = make_plan(
                request, robustness=robustness, progress=progress, model_file=model_file
            )
            priced = with_cost(found, budget)
            return found if priced is found else with_digest(priced)
        from meshwright.planner.analysis.baseline import read_baseline
        from meshwright.planner.launch.compare import against

        today = read_baseline(path_of(baseline, "baseline"), request.inputs())
        found = make_plan(request, robustness=robustness, progress=progress, model_file=model_file)
        return with_digest(against(found, today, budget))


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
    from meshwright.planner.request.calibration_file import read_calibration
    from meshwright.planner.runs.prediction import price_run, price_runs
    from meshwright.planner.runs.run_file import run_from_mapping

    stack = read_calibration(calibration)
    if isinstance(run, Mapping):
        return (price_run(run_from_mapping(run, where="run", calibration=stack), Path("run")),)
    return tuple(price_runs(path_of(run, "run"), stack))


def calibrate(
    *runs: FilePath | Run,
    name: str | None = None,
    like: str | None = None,
    measure: bool = False,
) -> CalibrationReport | None:
    """Learn the constants of a stack from its own measured runs.

    Parameters
    ----------
    runs
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
    from meshwright.planner.runs.calibration.service import calibrate_runs
    from meshwright.planner.runs.calibration.sources import read_sources
    from meshwright.planner.runs.run_file import Run

    given = tuple(run for run in runs if isinstance(run, Run))
    paths = [path_of(run, "runs") for run in runs if not isinstance(run, Run)]
    read, benchmarks = read_sources(paths, given)
    if measure:
        from meshwright.planner.runs.calibration.measure import benchmarks_of, measured_rates

        rates = measured_rates()
        if rates is None:
            return None
        benchmarks += benchmarks_of(rates, read)
    return calibrate_runs(read, name=name, like=like, benchmarks=benchmarks)


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
    from meshwright.planner.request.calibration_file import read_calibration
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
    from meshwright.planner.experts.request import expert_request
    from meshwright.planner.experts.service import plan_experts

    given = {"loads": loads, "cluster": cluster, "gpus": gpus, "slots": slots, **options}
    return plan_experts(expert_request(given), progress)
