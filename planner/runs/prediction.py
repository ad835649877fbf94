"""What the cost model says of one fully given run, and which rules of its framework the run breaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from meshwright.cluster_specs.allocation import allocated_places
from meshwright.constraints.registry import findings
from meshwright.constraints.rule import Finding, FinishedPlan, spans_of
from meshwright.costmodel.calibration import Calibration
from meshwright.costmodel.estimate import Estimate, Stages, estimate_layout, stage_memory_parts_gib
from meshwright.costmodel.footprint import context_gib, offloaded_gib
from meshwright.costmodel.layout import AXES, Layout, Placement
from meshwright.costmodel.placement import nested_placement, nested_positions
from meshwright.costmodel.rates import peak_flops, peak_memory_band, step_time_band
from meshwright.costmodel.records import fit_probability, with_stragglers
from meshwright.costmodel.recount import recounted_placement
from meshwright.costmodel.workload import Execution, Workload
from meshwright.documents import ClosedDocument, path_text, read_text
from meshwright.errors import InputError
from meshwright.planner.bounds.layer_split import balanced_stages
from meshwright.planner.mapping.cuts import MappingUse, level_table, mapping_use
from meshwright.planner.request.plan_request import PlanInputs, PlanRequest
from meshwright.planner.runs.run_terms import (
    ErrorBandDoc,
    LayoutDoc,
    LevelTraffic,
    Predicted,
    layout_document,
)

# A plan needs the prices of a layout alone, and these rooms take long to load.
if TYPE_CHECKING:
    from meshwright.planner.runs.run_file import Measured, Run
    from meshwright.planner.runs.validation import Prediction, ValidationReport

_LEAST_ROOM_GIB = 1e-3
"""Taken for no room at all, of which there is no logarithm."""


@dataclass(frozen=True, kw_only=True)
class RunPrediction:
    """The prices of one run, with its ranks laid out in Megatron's default order."""

    estimate: Estimate
    stages: Stages
    placement: Placement
    memory_parts_gib: tuple[dict[str, float], ...]
    """Per pipeline rank, by component."""
    context_gib: float
    """What the driver shows besides."""
    offloaded_gib: float
    """What the GPU that offloads most keeps in its host's memory."""

    def mapping_use(
        self, workload: Workload, layout: Layout, places: Sequence[tuple[int, int]]
    ) -> MappingUse:
        """What is sent; `places[r]` is the GPU of rank r in Megatron's default order.

        Parameters
        ----------
        workload
            That the prices are of.
        layout
            In plain integers.
        places
            (node, local GPU) of each rank, in Megatron's default order.
        """
        return mapping_use(
            workload,
            layout,
            self.stages,
            placement=self.placement,
            priced=self.estimate,
            places=places,
        )

    @property
    def memory_gib(self) -> tuple[float, ...]:
        """Peak of one GPU of each pipeline rank."""
        return tuple(sum(parts.values()) for parts in self.memory_parts_gib)

    def fit_probability(self, workload: Workload) -> float:
        """How likely the fullest GPU is to hold its peak beside the context, 0 to 1.

        Parameters
        ----------
        workload
            That the prices are of: its device's memory, what is reserved of it, and the errors of such peaks.
        """
        room_gib = workload.cluster.device.hbm_gib - workload.reserve_gib - self.context_gib
        band = peak_memory_band(workload)
        return fit_probability(max(self.memory_gib), max(room_gib, _LEAST_ROOM_GIB), band)


_REQUESTED = (
    "model", "cluster", "gpus", "global_batch", "seq_len", "precision", "optimizer", "framework",
    "expert_imbalance_by_ep", "expert_copies_by_ep", "reserve_gib", "calibration",
    "memory_risk", "inside_domain", "max_cut_use", "adapters", "loss", "kind", "reference",
    "lengths", "images",
)  # fmt: skip
"""What decides prices, of a plan's inputs."""


def planned_workload(inputs: PlanInputs, execution: Execution | None = None) -> Workload:
    """What a plan's inputs stand for in the cost model, run as its `execution` says.

    Plans that say nothing of it were made before it was chosen: all but the dispatcher was plain. Raises
    InputError for contradicting inputs.

    Parameters
    ----------
    inputs
        Of a plan.
    execution
        How it is run; None where the plan does not say.
    """
    dispatch = inputs.pins.get("moe_dispatch")
    pins = {} if dispatch is None else {"moe_dispatch": dispatch}
    fields = {name: getattr(inputs, name) for name in _REQUESTED}
    return PlanRequest(**fields, pins=pins).workload(execution)


def arrangement(run: Run) -> tuple[Stages, Placement]:
    """The split of a run's layers, and where its groups lie: by its ranks, else by its axes nested in order.

    Raises ValueError where the layers cannot be dealt out to the virtual stages.

    Parameters
    ----------
    run
        Its stages are taken where it has some, its ranks where they are listed.
    """
    workload, layout = run.workload, run.layout
    model = workload.model
    stages = run.stages or balanced_stages(
        model.layers, int(layout.pp), int(layout.vpp), model.stage_begins
    )
    if stages is None:
        raise ValueError(
            f"pp {layout.pp} * vpp {layout.vpp} virtual stages for {model.layers} layers: "
            "some would have none"
        )
    if run.ranks:
        return stages, recounted_placement(workload.cluster, layout, _in_default_order(run))
    return stages, nested_placement(workload.cluster, layout, run.rank_order)


def _in_default_order(run: Run) -> list[tuple[int, int]]:
    """Where ranks run, as Megatron's default order numbers them."""
    layout = run.layout
    sizes = [int(getattr(layout, axis)) for axis in reversed(run.rank_order)]
    numbers = np.arange(int(layout.gpus)).reshape(sizes)
    default = [run.rank_order[::-1].index(axis) for axis in reversed(AXES)]
    return [run.ranks[number] for number in numbers.transpose(default).ravel().tolist()]


def predict_run(run: Run) -> RunPrediction:
    """Prices a run as `arrangement` lays it out. Raises ValueError where that is impossible.

    Parameters
    ----------
    run
        In plain integers; its measurement is not looked at.
    """
    stages, placement = arrangement(run)
    return predict_layout(run.workload, run.layout, stages, placement)


def predict_layout(
    workload: Workload, layout: Layout, stages: Stages, placement: Placement
) -> RunPrediction:
    """Prices one layout under a split of its layers and a placement of its groups.

    Parameters
    ----------
    workload
        What is trained, where and how.
    layout
        In plain integers.
    stages
        Layers of each [pipeline rank][virtual stage].
    placement
        Where the groups of each axis lie.
    """
    return RunPrediction(
        estimate=estimate_layout(workload, layout, placement, stages),
        stages=stages,
        placement=placement,
        memory_parts_gib=memory_of_ranks(workload, layout, stages),
        context_gib=float(np.asarray(context_gib(layout))),
        offloaded_gib=float(np.max(offloaded_gib(workload, layout, stages))),
    )


def memory_of_ranks(
    workload: Workload, layout: Layout, stages: Stages
) -> tuple[dict[str, float], ...]:
    """GiB at the peak of one GPU of each pipeline rank, by component (`stage_memory_parts_gib`).

    Parameters
    ----------
    workload
        What is trained, where and how.
    layout
        In plain integers.
    stages
        Layers of each [pipeline rank][virtual stage].
    """
    parts = stage_memory_parts_gib(workload, layout, stages)
    return tuple(
        {name: float(values[rank]) for name, values in parts.items()} for rank in range(len(stages))
    )


def peak_as_measured(
    parts_gib: Sequence[Mapping[str, float]], context_gib: float, measured: Measured | None
) -> float:
    """GiB of the fullest pipeline rank, counted as the source of a measurement counts them.

    It is the first rank's where only that was measured. Where the driver was read, with the context that it
    shows besides; where the allocator told what it had handed out, without the blocks that it strands.

    Parameters
    ----------
    parts_gib
        By pipeline rank and component, as `memory_of_ranks` has them.
    context_gib
        What the driver shows besides.
    measured
        Which rank and which counter were read; None for the fullest rank with all its components.
    """
    if measured is None:
        return max(sum(parts.values()) for parts in parts_gib)
    left_out = "fragmentation" if measured.allocated else ""
    peaks_gib = [sum(gib for name, gib in parts.items() if name != left_out) for parts in parts_gib]
    peak_gib = peaks_gib[0] if measured.first_rank else max(peaks_gib)
    return peak_gib + context_gib if measured.from_driver else peak_gib


@dataclass(frozen=True, kw_only=True)
class PricedRun:
    """A run with its prices, and the rules that it breaks."""

    run: Run
    prediction: RunPrediction
    broken: tuple[Finding, ...]

    @property
    def predicted(self) -> Predicted:
        """Time, memory and traffic, as in the document of a plan."""
        run = self.run
        workload, places = run.workload, places_of_run(run)
        use = self.prediction.mapping_use(workload, run.layout, places)
        return predicted_document(workload, self.prediction, use)

    @property
    def warnings(self) -> list[str]:
        """The broken rules in words: value, limit, remedy."""
        return [finding.line for finding in self.broken]


def price_runs(path: Path, calibration: Calibration | None = None) -> Iterator[PricedRun]:
    """Prices the runs of a file one by one. Raises InputError for one that cannot be read or priced.

    Parameters
    ----------
    path
        A run file.
    calibration
        What the user's own runs say of the constants; None for the shipped ones.
    """
    from meshwright.planner.runs.run_file import read_runs

    for run in read_runs(path, calibration):
        yield price_run(run, path)


def price_run(run: Run, path: Path) -> PricedRun:
    """Prices one run that was read from `path`. Raises InputError where that is impossible.

    Parameters
    ----------
    run
        As it was read.
    path
        Of its file, for messages.
    """
    try:
        prediction = predict_run(run)
    except (ValueError, ArithmeticError) as error:
        where = f"{path_text(path)}: {run.id}"
        raise InputError(f"cannot be priced: {error}", where=where) from error
    return PricedRun(run=run, prediction=prediction, broken=tuple(broken_rules(run, prediction)))


def validation_report(path: Path, calibration: Calibration | None = None) -> ValidationReport:
    """Predicted against measured for the rows of a file, or for its pairs.

    Raises InputError if not one row can be read.

    Parameters
    ----------
    path
        A run file whose rows have `measured`, or a list of pairs.
    calibration
        What the user's own runs say of the constants; None for the shipped ones.
    """
    from meshwright.planner.runs.run_file import MAX_FILE_BYTES, UnreadRow, read_rows
    from meshwright.planner.runs.stated_pairs import is_pair_list, read_pairs
    from meshwright.planner.runs.validation import score, score_pairs

    if is_pair_list(read_text(path, MAX_FILE_BYTES)):
        return score_pairs(read_pairs(path), prediction_of)
    rows = list(read_rows(path, calibration))
    reasons = [row.reason for row in rows if isinstance(row, UnreadRow)]
    if len(reasons) < len(rows):
        return score(rows, prediction_of)
    message = reasons[0]
    if len(rows) > 1:
        message += f"\nand {len(rows) - 1} more rows, none of which can be read"
    raise InputError(message)


def prediction_of(run: Run) -> Prediction:
    """What `validate` compares: seconds of a step, the peak of memory as it was measured, and the chance to
    fit.

    Parameters
    ----------
    run
        Its measurement says which rank's peak is compared, and by which counter.
    """
    from meshwright.planner.runs.validation import Prediction

    prediction = predict_run(run)
    return Prediction(
        step_time_s=float(prediction.estimate.step_time_s),
        memory_gib=peak_as_measured(
            prediction.memory_parts_gib, prediction.context_gib, run.measured
        ),
        fit_probability=prediction.fit_probability(run.workload),
    )


def broken_rules(run: Run, prediction: RunPrediction) -> list[Finding]:
    """Every rule of arithmetic, hardware and framework that the run breaks.

    Parameters
    ----------
    run
        As it was read.
    prediction
        Its prices, with what is held in memory.
    """
    finished = FinishedPlan(
        workload=run.workload,
        layout=run.layout,
        stages=prediction.stages,
        memory_gib=prediction.memory_gib,
        spans=spans_of(prediction.placement),
    )
    return list(findings(finished))


def places_of_run(run: Run) -> list[tuple[int, int]]:
    """Where ranks run, as Megatron's default order numbers them.

    Parameters
    ----------
    run
        With listed ranks, or nested in the blocks of its cluster in its own order of axes.
    """
    if run.ranks:
        return _in_default_order(run)
    places = allocated_places(run.workload.cluster, int(run.layout.gpus))
    return [places[position] for position in nested_positions(run.layout, run.rank_order).tolist()]


def predicted_document(workload: Workload, prediction: RunPrediction, use: MappingUse) -> Predicted:
    """The `predicted` part of a document, of a prediction with what it sends.

    MFU counts model FLOP, with those of passes that score, over the peak of the run's precision. `error_band`
    is measured over predicted step time on GPUs of this class with this framework, or with the group named
    in `basis`: 5th and 95th percentile, and above it the chance of slow nodes.

    Parameters
    ----------
    workload
        What is trained, where and how.
    prediction
        Its prices.
    use
        What it sends across each level of the fabric.
    """
    estimated = prediction.estimate
    step_time_s = float(estimated.step_time_s)
    tokens_per_s_per_gpu = workload.tokens_per_step / step_time_s / workload.gpus
    flops_per_s = tokens_per_s_per_gpu * workload.model_flops_per_token
    on_a_node = min(workload.gpus, workload.cluster.gpus_per_node)
    band = with_stragglers(step_time_band(workload), workload.nodes)
    return Predicted(
        step_time_s=step_time_s,
        tflops_per_gpu=flops_per_s / 1e12,
        mfu=flops_per_s / peak_flops(workload.cluster.device, workload.precision),
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
        breakdown_s={name: float(seconds) for name, seconds in estimated.breakdown_s.items()},
        memory_gib=list(prediction.memory_gib),
        memory_parts_gib=list(prediction.memory_parts_gib),
        host_memory_gib=prediction.offloaded_gib * on_a_node or None,
        memory_context_gib=prediction.context_gib,
        level_traffic=[LevelTraffic(**vars(level)) for level in level_table(use, step_time_s)],
        error_band=ErrorBandDoc.of(band),
        band_of="own runs" if band.of_own_runs else "measured runs",
    )


def run_document(priced: PricedRun) -> dict[str, Any]:
    """What `estimate --json` prints of one run, without `schema`."""
    run, predicted = priced.run, priced.predicted
    measured = run.measured
    error_pct = None
    if measured is not None and measured.step_time_s is not None:
        error_pct = 100.0 * (predicted.step_time_s / measured.step_time_s - 1.0)
    return {
        "id": run.id,
        "layout": layout_document(run.layout, priced.prediction.stages).model_dump(mode="json"),
        "predicted": predicted.model_dump(mode="json"),
        "measured": None if measured is None else dict(vars(measured)),
        "error_pct": error_pct,
        "fit_probability": priced.prediction.fit_probability(run.workload),
        "broken_rules": [dict(vars(finding)) for finding in priced.broken],
        "remarks": list(run.remarks),
    }


# A plan against the targets that guides to distributed training set.


Mark = Literal["excellent", "good", "below target"]


class Grade(ClosedDocument):
    """One figure of a plan beside its target."""

    what: str
    value: float
    target: float
    is_share: bool
    """Whether the figure is a fraction of 1, or else a ratio."""
    mark: Mark


TARGETS = {
    "MFU": 0.40,
    "pipeline bubble": 0.10,
    "micro-batches a stage": 4.0,
    "communication hidden": 0.80,
}
"""Least of each figure, of the bubble the most (guides that docs/worked_examples.md checks)."""
EXCELLENT_MFU = 0.50


def grades(layout: LayoutDoc, predicted: Predicted) -> list[Grade]:
    """Figures of a layout beside their targets.

    Parameters
    ----------
    layout, predicted
        A layout, and what the cost model expects of it.

    Returns
    -------
    list of Grade
        MFU; of a pipeline the bubble over the step, and micro-batches a stage; where anything is sent,
        1 - exposed communication / time that links are busy, over all levels.
    """
    parts, figures = predicted.breakdown_s, {"MFU": predicted.mfu}
    if layout.pp > 1:
        bubble_s = parts.get("pipeline_bubble", 0.0)
        figures["pipeline bubble"] = bubble_s / predicted.step_time_s
        figures["micro-batches a stage"] = layout.num_micro_batches / layout.pp
    busy_s = sum(level.mean_s for level in predicted.level_traffic)
    if busy_s > 0:
        exposed_s = sum(seconds for name, seconds in parts.items() if name.endswith("_comm"))
        figures["communication hidden"] = 1.0 - min(exposed_s / busy_s, 1.0)
    return [_graded(what, value) for what, value in figures.items()]


def _graded(what: str, value: float) -> Grade:
    target = TARGETS[what]
    is_met = value < target if what == "pipeline bubble" else value >= target
    mark: Mark = "good" if is_met else "below target"
    if what == "MFU" and value >= EXCELLENT_MFU:
        mark = "excellent"
    is_share = what != "micro-batches a stage"
    return Grade(what=what, value=value, target=target, is_share=is_share, mark=mark)
