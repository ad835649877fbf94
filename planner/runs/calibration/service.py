"""From a user's own measured runs to a stack, and what it learned, as `meshwright calibrate` prints it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from meshwright.costmodel.calibration import (
    DEVICE_FACTORS,
    MOST_SPREADS,
    NAMES,
    PRIORS,
    BandDoc,
    Calibration,
    Factors,
    constants_digest,
    factors_at,
    lowest_coordinates,
)
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.rates import (
    Constants,
    calibrated_constants,
    device_rates,
    fabric_links,
    kernel_rates,
)
from meshwright.costmodel.workload import Workload
from meshwright.errors import InputError
from meshwright.frameworks.catalog import STACK_NAMES, stack_in_words
from meshwright.planner.runs.calibration.evidence import (
    Benchmark,
    Evidence,
    Fitted,
    Floats,
    fit,
    robust_optimum,
)
from meshwright.planner.runs.prediction import predict_run
from meshwright.planner.runs.run_file import Measured, Run
from meshwright.planner.runs.run_terms import ALL_LAYERS


@dataclass(frozen=True, kw_only=True)
class Learned:
    """One constant before and after."""

    name: str
    unit: str
    assumed: float
    value: float
    low: float
    high: float
    """One posterior spread below and above the value."""
    effect_pct: float
    """Mean change of the predicted steps, or peaks of memory, that its move makes."""
    sentence: str


LARGEST_RATIO = 30.0
"""Of predicted and measured, either way; what is further apart is in another unit."""


@dataclass(frozen=True, kw_only=True)
class RowErrors:
    """Predicted over measured of one row, minus 1, in percent."""

    id: str
    what: str
    """step time or memory."""
    measured: float
    """Seconds or GiB."""
    before_pct: float
    after_pct: float
    left_out_pct: float
    """By constants that were calibrated without this row."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A run that would teach most."""

    layout: dict[str, Any]
    """Settings of a run file that differ between suggestions."""
    step_time_s: float
    spread_pct: float
    """One spread of its own predicted step time."""
    spread_before_pct: float
    """Mean spread of the predicted step times of all layouts that were looked at, now."""
    spread_after_pct: float
    """And once this one was measured."""


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """The stack that was made, and how far it can be trusted."""

    calibration: Calibration
    rows: tuple[RowErrors, ...]
    learned: tuple[Learned, ...]
    """Largest effect first."""
    suggestions: tuple[Suggestion, ...]
    benchmarks: tuple[str, ...]
    notes: tuple[str, ...]

    def mean_error_pct(self, what: str, when: str) -> float | None:
        """Mean size of the errors of steps or of memory.

        Parameters
        ----------
        what : str
            step time or memory.
        when : str
            before, after or left_out.

        Returns
        -------
        float or None
            Percent; None without such rows.
        """
        errors = [abs(getattr(row, f"{when}_pct")) for row in self.rows if row.what == what]
        return sum(errors) / len(errors) if errors else None

    def as_document(self) -> dict[str, Any]:
        """What `calibrate --json` prints.

        Returns
        -------
        dict
        """
        whens = ("before", "after", "left_out")
        return {
            "schema": 1,
            "stack": self.calibration.model_dump(mode="json"),
            "errors": {
                what.replace(" ", "_"): {
                    f"{when}_pct": self.mean_error_pct(what, when) for when in whens
                }
                for what in ("step time", "memory")
            },
            "rows": [asdict(row) for row in self.rows],
            "constants": [asdict(constant) for constant in self.learned],
            "measure_next": [asdict(suggestion) for suggestion in self.suggestions],
            "benchmarks": list(self.benchmarks),
            "notes": list(self.notes),
        }


# What a factor means: the rate or the time that the cost model takes, before and after, in a sentence.


Read = Callable[[Workload, Constants], float]


@dataclass(frozen=True)
class Meaning:
    """A quantity of the cost model, and the sentence that its change makes."""

    unit: str
    read: Read
    sentence: str
    """With `after` and `before` to fill in."""


def _of_kernels(name: str, scale: float) -> Read:
    return lambda workload, constants: getattr(kernel_rates(workload, constants), name) / scale


def _narrow_tflops(workload: Workload, constants: Constants) -> float:
    device = workload.cluster.device
    precision = "fp8" if device.peak_fp8_tflops else "bf16"
    return device_rates(device, precision, constants).gemm_flops / 1e12


def _of_links(name: str, level: int) -> Read:
    """GB/s at a level of the fabric, or at the outermost where there is none so far out."""

    def read(workload: Workload, constants: Constants) -> float:
        rates = np.asarray(getattr(fabric_links(workload, constants), name))
        return float(rates[min(level, len(rates) - 1)]) / 1e9

    return read


def _of_framework(name: str, scale: float = 1.0) -> Read:
    return lambda _, constants: scale * float(getattr(constants.framework, name))


def _of_factors(name: str, neutral: float) -> Read:
    def read(workload: Workload, _: Constants) -> float:
        return neutral if workload.factors is None else float(getattr(workload.factors, name))

    return read


def _bytes_times(what: str, name: str) -> Meaning:
    sentence = f"{what} take {{after}} times the bytes that were counted"
    return Meaning("x", _of_factors(name, 1.0), sentence)


def _assumed(unit: str, read: Read, sentence: str) -> Meaning:
    return Meaning(unit, read, f"{sentence}, {{before}} were assumed")


MEANINGS: dict[str, Meaning] = {
    "gemm": _assumed(
        "TFLOP/s", _of_kernels("gemm_flops", 1e12),
        "your matrix products reach {after} TFLOP/s at their best",
    ),
    "gemm_narrow": _assumed(
        "TFLOP/s", _narrow_tflops, "your FP8 matrix products reach {after} TFLOP/s at their best",
    ),
    "grouped_gemm": _assumed(
        "x", lambda _, constants: constants.shared["grouped_gemm_factor"],
        "grouped products of experts run at {after} of the dense rate",
    ),
    "attention": _assumed(
        "TFLOP/s", _of_kernels("attention_forward_flops", 1e12),
        "your attention runs forward at {after} TFLOP/s",
    ),
    "hbm": _assumed(
        "GB/s", _of_kernels("hbm_bytes_per_s", 1e9),
        "norms, activations and the optimizer stream at {after} GB/s",
    ),
    "scale_up": _assumed(
        "GB/s", _of_links("bytes_per_s", 0), "your GPUs exchange {after} GB/s inside a node",
    ),
    "exchange": _assumed(
        "GB/s", _of_links("all_to_all_bytes_per_s", 0),
        "all-to-alls move {after} GB/s a GPU inside a node",
    ),
    "network": _assumed(
        "GB/s", _of_links("bytes_per_s", 1), "your gradients leave at {after} GB/s a GPU",
    ),
    "launch": _assumed(
        "ms", _of_framework("launch_layer_s", 1e3),
        "your host takes {after} ms to launch a layer's forward pass",
    ),
    "layer_wait_s": _assumed(
        "us", _of_framework("serial_launch_s", 1e6),
        "your GPUs wait {after} us a layer and pass for the host",
    ),
    "collective_wait_s": _assumed(
        "us", _of_framework("collective_wait_s", 1e6),
        "a tensor-parallel collective waits {after} us for the slowest rank",
    ),
    "data_parallel_exposed": _assumed(
        "", _of_framework("dp_interference"),
        "compute pays for {after} of the gradient traffic beside it",
    ),
    "expert_exposed": _assumed(
        "", lambda _, constants: 1.0 - constants.framework.ep_hidden,
        "overlap leaves {after} of the expert all-to-all in sight",
    ),
    "recompute": _assumed(
        "", _of_framework("recompute_fraction"),
        "full recomputation runs {after} of a forward pass again",
    ),
    "step_overhead_s": _assumed(
        "ms", _of_framework("step_overhead_s", 1e3), "a step loses {after} ms beside its layers",
    ),
    "head": Meaning(
        "x", _of_framework("head_factor"),
        "your head and loss take {after} times what was counted",
    ),
    "virtual_stage_s": _assumed(
        "us", _of_framework("virtual_stage_s", 1e6),
        "a micro-batch loses {after} us at each virtual stage",
    ),
    "activation_memory": _bytes_times("saved activations", "activation_memory"),
    "state_memory": _bytes_times("weights, gradients and optimizer states", "state_memory"),
    "loss_memory": _bytes_times("logits and loss", "loss_memory"),
    "fixed_memory_gib": _assumed(
        "GiB", _of_factors("fixed_memory_gib", 0.0),
        "every GPU holds {after} GiB that no tensor explains",
    ),
}  # fmt: skip
"""Of every factor of `NAMES`."""


def quantity(name: str, workload: Workload) -> float:
    """What the cost model takes for a workload, in the unit of `MEANINGS`.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    workload : Workload
        With a calibration, or without.

    Returns
    -------
    float
    """
    return MEANINGS[name].read(workload, calibrated_constants(workload))


def three_digits(value: float) -> str:
    """A number to three digits, without an exponent up to a million.

    >>> three_digits(2067.285), three_digits(0.0712345)
    ('2,070', '0.0712')
    """
    return f"{float(f'{value:.3g}'):,g}"


def sentence(name: str, before: float, after: float) -> str:
    """What moved, in words.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    before, after : float
        From `quantity`.

    Returns
    -------
    str
    """
    return MEANINGS[name].sentence.format(before=three_digits(before), after=three_digits(after))


# The fit itself.
#
# The posterior is normal round the most likely factors, with the shipped constants as its prior
# (`constants.calibration.PRIORS`); what is left out of the fit is worked out along its slopes.


# Which run to measure next: the layout that leaves least doubt about all others.
#
# With J the slopes of the log step times of the candidates and C the posterior's covariance, measuring
# candidate i with noise s takes (J C J')[j, i]^2 / (s^2 + (J C J')[i, i]) off the variance of candidate j
# (Gaussian conditioning; MacKay 1992, Neural Computation 4, section 3). The sum over j decides.


MOST_CANDIDATES = 24
SUGGESTED = 3
_SETTINGS = ("tp", "pp", "dp", "micro_batch", "recompute")


def suggestions(
    evidence: Evidence, fitted: Fitted, calibration: Calibration
) -> tuple[Suggestion, ...]:
    """The `SUGGESTED` runs that would teach most, best first.

    Parameters
    ----------
    evidence : Evidence
        The runs that are there; the largest is varied.
    fitted : Fitted
        Their fit.
    calibration : Calibration
        The stack that came of it.

    Returns
    -------
    tuple of Suggestion
        Empty where there is no step to vary, or no further layout that fits.
    """
    if not evidence.steps:
        return ()
    model = max(evidence.steps, key=lambda run: run.workload.gpus)
    measured_keys = {_key(run) for run in evidence.steps}
    varied = [run for run in _varied(model, calibration) if _key(run) not in measured_keys]
    spaced = np.linspace(0, len(varied) - 1, min(len(varied), MOST_CANDIDATES))
    chosen = list(_that_fit([varied[round(position)] for position in spaced]))
    if not chosen:
        return ()
    of_candidates = Evidence(chosen, calibration)
    slopes = of_candidates.slopes(fitted.x)[of_candidates.step_rows] * of_candidates.step_noise
    joint = slopes @ np.array(calibration.covariance) @ slopes.T
    seconds = np.exp(of_candidates.step_logs)
    noise = evidence.step_noise
    # Candidates by the variance that measuring them takes off all.
    taken_off = np.sum(joint**2, axis=0) / (noise**2 + np.diag(joint))
    order = np.argsort(-taken_off, kind="stable")
    best = [int(index) for index in order[:SUGGESTED]]
    return tuple(_suggestion(chosen[i], i, joint, seconds[i], noise) for i in best)


def _suggestion(run: Run, index: int, joint: Floats, seconds: float, noise: float) -> Suggestion:
    variances = np.diag(joint)
    remaining = variances - joint[:, index] ** 2 / (noise**2 + variances[index])
    layout = {name: int(getattr(run.layout, name)) for name in _SETTINGS[:-1]}
    recomputed = bool(run.layout.recomputes_layers)
    return Suggestion(
        layout={**layout, "recompute": "full" if recomputed else "none"},
        step_time_s=float(seconds),
        spread_pct=100.0 * math.sqrt(variances[index]),
        spread_before_pct=100.0 * float(np.sqrt(variances).mean()),
        spread_after_pct=100.0 * float(np.sqrt(np.maximum(remaining, 0.0)).mean()),
    )


def _key(run: Run) -> tuple[int, ...]:
    layout = run.layout
    return (
        run.workload.gpus,
        *(int(getattr(layout, name)) for name in _SETTINGS),
    )


def _varied(model: Run, calibration: Calibration) -> Iterator[Run]:
    """Runs of the same model, GPUs and batch in other layouts."""
    workload = replace(model.workload, framework=calibration.framework, calibration=calibration)
    for layout in _layouts(model):
        yield replace(model, workload=workload, layout=layout, stages=None)


def _that_fit(runs: Sequence[Run]) -> Iterator[Run]:
    """Those that fit into HBM, with their predicted step as if it were measured."""
    for run in runs:
        try:
            predicted = predict_run(run)
        except (ValueError, ArithmeticError):
            continue
        device = run.workload.cluster.device
        if max(predicted.memory_gib) + predicted.context_gib <= device.hbm_gib:
            seconds = float(predicted.estimate.step_time_s)
            yield replace(run, measured=Measured(step_time_s=seconds))


def _layouts(model: Run) -> Iterator[Layout]:
    """Every tp inside a node, pp, micro-batch and recomputation that divides; other degrees as they are."""
    work, layout = model.workload, model.layout
    for tp in _powers(min(work.cluster.gpus_per_node, work.model.kv_heads)):
        for pp in _powers(min(16, work.model.layers)):
            ranks, rest = divmod(work.gpus, tp * pp * int(layout.cp))
            if rest or not ranks or ranks % int(layout.ep) or work.model.layers % pp:
                continue
            for micro_batch in (1, 2, 4):
                batches, rest = divmod(work.global_batch, ranks * micro_batch)
                if rest or not batches:
                    continue
                for recompute in (Recompute.NONE, Recompute.FULL):
                    yield replace(
                        layout,
                        tp=tp,
                        pp=pp,
                        dp=ranks,
                        vpp=1,
                        schedule=0,
                        micro_batch=micro_batch,
                        num_micro_batches=batches,
                        sequence_parallel=bool(layout.sequence_parallel) and tp > 1,
                        recompute=int(recompute),
                        recompute_layers=ALL_LAYERS if recompute else 0,
                    )


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2


MOST_RUNS = 200
_PRIOR_ERROR = 0.05
"""Relative: what is left of a stack's errors after a calibration, on the sweeps of docs/accuracy.md."""
_PRIOR_RUNS = 3
"""Runs that the prior error counts as."""
_MOST_TO_COMPARE = 6
"""Runs on which software profiles are compared."""
CLEARLY_BETTER = 4.0
"""Of the sum that a fit makes small: what another software profile must gain over the one that the reader
takes for a framework that it does not know, 2 in log likelihood."""
_NEGLIGIBLE_PCT = 0.3
"""Of the predicted steps: constants that move them less are not reported."""


def calibrate_runs(
    runs: Sequence[Run],
    *,
    name: str | None = None,
    like: str | None = None,
    benchmarks: Sequence[Benchmark] = (),
    suggest: bool = True,
) -> CalibrationReport:
    """The stack that some measured runs and benchmarks speak of.

    Parameters
    ----------
    runs : sequence of Run
        At most `MOST_RUNS`, on one kind of device; those without a measurement are left out. Where they are
        of several frameworks, the stack is of the one that `like` or `name` names, else of the one with most
        runs; what the others say of device and network is evidence beside them.
    name : str, optional
        Of the stack; what the runs call their framework by default.
    like : str, optional
        The software profile to begin from; by default the runs' framework, or where that is not known the
        profile that explains the runs best.
    benchmarks : sequence of Benchmark
        Rates that were measured beside the runs.
    suggest : bool
        Whether to look for the run to measure next.

    Returns
    -------
    CalibrationReport

    Raises
    ------
    InputError
        Without a measured run, and where runs are of several devices.
    """
    measured = [run for run in runs if run.measured is not None]
    if not 1 <= len(measured) <= MOST_RUNS:
        raise InputError(
            f"needs 1 to {MOST_RUNS} runs with `measured`, got {len(measured)} of {len(runs)}"
        )
    device = _one_device(measured)
    words, measured, by_words = _by_framework(measured, like, name)
    notes = []
    for name_of_others, own_runs in by_words.items():
        marks = _of_device(calibrate_runs(own_runs, suggest=False).calibration, name_of_others)
        benchmarks = (*benchmarks, *marks)
        notes.append(f"runs of {name_of_others} ({len(own_runs)}) tell of device and network alone")
    # The software profile that was asked for, or that the runs name; None where it is not known.
    stack = stack_in_words(like or words)
    if stack is None and like is not None:
        raise InputError("not a known stack", where="--like", value=like, allowed=STACK_NAMES)
    framework = None if stack is None else stack.name
    if framework is None:
        framework = _nearest(measured, words, device)
        notes.append(f"framework {words!r} is not known: the stack begins from {framework}")
    draft = draft_stack(name or words, framework, device)
    evidence, fitted = _fit_with_their_noise(measured, draft, benchmarks)
    rows = _row_errors(evidence, fitted)
    notes += filter(None, map(_slip_of_unit, rows))
    calibration = _finished(evidence, fitted, rows)
    return CalibrationReport(
        calibration=calibration,
        rows=rows,
        learned=_learned(evidence, fitted, calibration),
        suggestions=suggestions(evidence, fitted, calibration) if suggest else (),
        benchmarks=tuple(mark.words for mark in benchmarks),
        notes=tuple(notes),
    )


def _slip_of_unit(row: RowErrors) -> str | None:
    """What is said of a row that no machine explains; None where one might."""
    ratio = 1.0 + row.before_pct / 100.0
    if 1.0 / LARGEST_RATIO <= ratio <= LARGEST_RATIO:
        return None
    predicted, unit = row.measured * ratio, "seconds" if row.what == "step time" else "GiB"
    return (
        f"{row.id}: {row.what} of {row.measured:.4g} where {predicted:.4g} are predicted: measured values "
        f"are {unit}; correct the row or leave it out, it widens the band of every plan"
    )


def _one_device(runs: Sequence[Run]) -> str:
    """The device of all runs. Raises InputError where there are several."""
    devices = sorted({run.workload.cluster.device.name for run in runs})
    if len(devices) > 1:
        what = f"runs of several devices: {', '.join(devices)}; calibrate them one by one"
        raise InputError(what, where="cluster.device")
    return devices[0]


def _by_framework(
    runs: Sequence[Run], like: str | None, name: str | None
) -> tuple[str, list[Run], dict[str, list[Run]]]:
    """What the runs of the stack call their framework, these runs, and those of other frameworks."""
    named: dict[str, list[Run]] = {}
    for run in runs:
        named.setdefault(run.framework_words, []).append(run)
    wanted = [words for words in (like, name) if words is not None]
    profiles = {words: stack_in_words(words) for words in (*named, *wanted)}

    def rank(words: str) -> tuple[bool, int, str]:
        profile = profiles[words]
        is_asked = any(
            words == other or (profile is not None and profile == profiles[other])
            for other in wanted
        )
        return not is_asked, -len(named[words]), words

    chosen = min(named, key=rank)
    return chosen, named.pop(chosen), dict(sorted(named.items()))


_TELLING = 0.9
"""Variance over that of the prior, below which another framework's runs say something of a factor."""


def _of_device(calibration: Calibration, words: str) -> Iterator[Benchmark]:
    """What a calibration says of device and network, without the prior that it shares with the next one.

    Of a normal posterior with mean x and variance v under a unit normal prior, the runs alone have the
    variance 1 / (1 / v - 1) and the mean x / (1 - v) (Gelman et al., Bayesian Data Analysis, section 2.5).
    """
    variances = np.diag(np.array(calibration.covariance))
    for name in DEVICE_FACTORS:
        index, spread = NAMES.index(name), PRIORS[name].spread
        variance = float(variances[index])
        if variance < _TELLING:
            mean = calibration.mean[index] / (1.0 - variance)
            yield Benchmark(
                factors=(name,),
                ratio=math.exp(spread * mean),
                noise=spread * math.sqrt(variance / (1.0 - variance)),
                words=f"{name} by the runs of {words}: {math.exp(spread * mean):.2f} of what is usual",
            )


def draft_stack(name: str, framework: str, device: str) -> Calibration:
    """A stack of which no run was measured yet: every factor leaves things as they are.

    Parameters
    ----------
    name, framework, device : str
        As in a `Calibration`.

    Returns
    -------
    Calibration
    """
    size = len(NAMES)
    return Calibration(
        name=name,
        framework=framework,
        device=device,
        constants=constants_digest(),
        factors=Factors(),
        mean=(0.0,) * size,
        covariance=tuple(tuple(row) for row in np.eye(size).tolist()),
        step_time=BandDoc(low=1.0, high=1.0, rows=0),
    )


def _nearest(runs: Sequence[Run], words: str, device: str) -> str:
    """The reader's own software profile, or the one whose linearised fit is clearly better than its."""
    sample = [
        runs[round(i)] for i in np.linspace(0, len(runs) - 1, min(len(runs), _MOST_TO_COMPARE))
    ]
    zero = np.zeros(len(NAMES))
    values = {}
    for framework in STACK_NAMES:
        goal = Evidence(sample, draft_stack(words, framework, device)).goal()
        errors, slopes = goal.errors(zero), goal.slopes(zero)
        x = robust_optimum(errors, slopes, zero, goal.low, goal.high)
        values[framework] = goal.value(errors + slopes @ x, x)
    values[runs[0].workload.framework] -= CLEARLY_BETTER
    return min(values, key=lambda framework: values[framework])


def _fit_with_their_noise(
    runs: Sequence[Run], draft: Calibration, benchmarks: Sequence[Benchmark]
) -> tuple[Evidence, Fitted]:
    """The fit, again with more noise where runs that it leaves out are further off than is usual.

    Such runs differ in what no constant explains, and must not move the constants as if they did not.
    """
    evidence = Evidence(runs, draft, benchmarks)
    fitted = fit(evidence.goal(), np.zeros(len(NAMES)))
    off = _left_out(fitted) * evidence.noise
    step_noise = _noise_of(off[evidence.step_rows], evidence.step_noise)
    memory_noise = _noise_of(off[evidence.peak_rows], evidence.memory_noise)
    if (step_noise, memory_noise) == (evidence.step_noise, evidence.memory_noise):
        return evidence, fitted
    evidence = Evidence(runs, draft, benchmarks, step_noise=step_noise, memory_noise=memory_noise)
    return evidence, fit(evidence.goal(), fitted.x)


def _noise_of(left_out: Floats, usual: float) -> float:
    """One standard deviation of errors, with a scaled inverse chi-square prior; at least the usual."""
    count = len(left_out) + _PRIOR_RUNS
    variance = (_PRIOR_RUNS * usual**2 + float(left_out @ left_out)) / count
    return max(usual, math.sqrt(variance))


def _row_errors(evidence: Evidence, fitted: Fitted) -> tuple[RowErrors, ...]:
    """Errors of every step and peak with the shipped constants, with the fitted, and left out."""
    noise = evidence.noise
    before = evidence.errors(np.zeros(len(NAMES))) * noise
    after = fitted.errors * noise
    left_out = _left_out(fitted) * noise
    rows = []
    parts = (
        ("step time", evidence.steps, evidence.step_rows),
        ("memory", evidence.peaks, evidence.peak_rows),
    )
    for what, runs, span in parts:
        for index, run in zip(range(span.start, span.stop), runs, strict=True):
            assert run.measured is not None
            figures = {"step time": run.measured.step_time_s, "memory": run.measured.memory_gib}
            rows.append(
                RowErrors(
                    id=run.id,
                    what=what,
                    measured=float(figures[what] or math.nan),
                    before_pct=_percent(before[index]),
                    after_pct=_percent(after[index]),
                    left_out_pct=_percent(left_out[index]),
                )
            )
    return tuple(rows)


def _percent(log_error: float) -> float:
    return 100.0 * math.expm1(float(log_error))


def _left_out(fitted: Fitted) -> Floats:
    """Errors of every row by a fit without it, along the slopes of the fit with all."""
    low, high = lowest_coordinates(), np.full(len(NAMES), MOST_SPREADS)
    errors = np.empty_like(fitted.errors)
    for row in range(len(errors)):
        rest = np.arange(len(errors)) != row
        x = robust_optimum(fitted.errors[rest], fitted.slopes[rest], fitted.x, low, high)
        errors[row] = fitted.errors[row] + fitted.slopes[row] @ (x - fitted.x)
    return errors


def _finished(evidence: Evidence, fitted: Fitted, rows: Sequence[RowErrors]) -> Calibration:
    steps = [row.left_out_pct for row in rows if row.what == "step time"]
    peaks = [row.left_out_pct for row in rows if row.what == "memory"]
    covariance = fitted.covariance()
    symmetric = (covariance + covariance.T) / 2.0
    learned = {
        "factors": factors_at(fitted.x),
        "mean": tuple(float(x) for x in fitted.x),
        "covariance": tuple(tuple(row) for row in symmetric.tolist()),
        "step_time": error_band_of(steps),
        "memory": error_band_of(peaks) if peaks else None,
    }
    return Calibration.model_validate({**dict(evidence.draft), **learned})


def error_band_of(left_out_pct: Sequence[float]) -> BandDoc:
    """The 5th and 95th percentile of measured over predicted that a few left-out errors allow.

    Their variance has a scaled inverse chi-square prior of `_PRIOR_RUNS` runs that are `_PRIOR_ERROR` off, so
    that the next run follows Student's t (Gelman et al., Bayesian Data Analysis, section 2.6).

    Parameters
    ----------
    left_out_pct : sequence of float
        Predicted over measured minus 1, percent.

    Returns
    -------
    BandDoc
    """
    errors = np.log1p(np.array(left_out_pct) / 100.0)
    count = len(errors) + _PRIOR_RUNS
    variance = (_PRIOR_RUNS * _PRIOR_ERROR**2 + float(errors @ errors)) / count
    half = _student_95(count) * math.sqrt(variance)
    return BandDoc(low=math.exp(-half), high=math.exp(half), rows=len(errors))


def _student_95(freedom: int) -> float:
    """The 95th percentile of Student's t (Abramowitz and Stegun 1964, 26.7.5), freedom at least 3."""
    z = 1.6449
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _learned(evidence: Evidence, fitted: Fitted, calibration: Calibration) -> tuple[Learned, ...]:
    """Every constant that moves a prediction, the largest effect first."""
    run = max((*evidence.steps, *evidence.peaks), key=lambda run: run.workload.gpus, default=None)
    if run is None:
        return ()
    shipped = replace(run.workload, framework=calibration.framework)
    spreads = np.sqrt(np.diag(np.array(calibration.covariance)))
    effects = _effects_pct(evidence, fitted)
    learned = []
    for index, name in enumerate(NAMES):
        if abs(effects[index]) < _NEGLIGIBLE_PCT:
            continue
        values = []
        for shift in (0.0, -spreads[index], spreads[index]):
            moved = fitted.x.copy()
            moved[index] += shift
            tried = replace(shipped, calibration=evidence.calibration_at(moved))
            values.append(quantity(name, tried))
        assumed = quantity(name, shipped)
        learned.append(
            Learned(
                name=name,
                unit=MEANINGS[name].unit,
                assumed=assumed,
                value=values[0],
                low=min(values),
                high=max(values),
                effect_pct=effects[index],
                sentence=sentence(name, assumed, values[0]),
            )
        )
    return tuple(sorted(learned, key=lambda constant: -abs(constant.effect_pct)))


def _effects_pct(evidence: Evidence, fitted: Fitted) -> list[float]:
    """Mean change of the steps, or of the peaks of memory, that the move of each constant makes."""
    changes = 100.0 * fitted.slopes * fitted.x * evidence.noise[:, None]
    effects = []
    for index in range(len(NAMES)):
        of_steps = changes[evidence.step_rows, index]
        of_peaks = changes[evidence.peak_rows, index]
        means = [float(part.mean()) for part in (of_steps, of_peaks) if len(part)]
        effects.append(max(means, key=abs, default=0.0))
    return effects
