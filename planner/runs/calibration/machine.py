"""A machine's own word: `calibrate --measure` times what steps are made of, and fits the constants to that.

A timer runs operations and says how long they took: PyTorch on GPUs or on a CPU (`torch_timer.py`), or a
device of a test whose constants are known. Each operation has a time that the shipped constants expect of it
alone; a factor on a class of operations is what brings its times to the measured ones. Products, attention
and copies run alone faster than in a step, where power and other kernels hold them back: what is usual alone
stands for what steps attain as shipped, so that a factor says how this machine differs from others like it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any, Literal, Protocol

import numpy as np

from meshwright.cluster_specs.schema import ClusterSpec, DeviceSpec
from meshwright.costmodel.calibration import (
    MOST,
    NAMES,
    PRIORS,
    Calibration,
    Factors,
    MeasuredMachine,
    MeasuredPoint,
    factors_at,
)
from meshwright.costmodel.collectives import collective_time, isolated_fabric
from meshwright.costmodel.kernels import Rates, attention_pair_flops, gemm_s
from meshwright.costmodel.rates import (
    Constants,
    attention_keys,
    calibrated,
    device_constants,
    device_rates,
    named_constants,
    peak_flops,
)
from meshwright.costmodel.textbook import Operation
from meshwright.costmodel.workload import Workload
from meshwright.errors import InputError
from meshwright.frameworks.catalog import STACK_NAMES, stack_in_words
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.runs.calibration.evidence import Benchmark, Fitted, Floats, Goal, fit
from meshwright.planner.runs.calibration.service import MEANINGS, draft_stack, quantity, sentence

Kind = Literal[
    "gemm", "grouped-gemm", "attention", "attention-backward", "copy", "launch", "all-reduce",
    "all-gather", "all-to-all",
]  # fmt: skip
COLLECTIVES: tuple[Kind, ...] = ("all-reduce", "all-gather", "all-to-all")
DEFAULT_MODEL = "mixtral-8x7b"
"""Of the catalog: it has dense matrices, attention with shared keys, and experts."""
DEFAULT_STACK = "megatron-lm"
DEFAULT_MINUTES = 10.0
MOST_MINUTES = 120.0
MOST_POINTS = 600
_FOR_COLLECTIVES = 0.3
"""Of the time, where there are several GPUs."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation to time."""

    kind: Kind
    precision: str = ""
    sizes: tuple[int, ...]
    """gemm: rows, columns, depth. grouped-gemm: the same of each, and how many. attention: sequences, tokens,
    heads, heads of keys and values, width of queries, width of values. copy: bytes. launch: launches. A
    collective: bytes as `collective_time` counts them, and ranks."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long an operation took."""

    seconds: float
    """Median of one."""
    repeats: int
    kernel: str = ""
    """What ran it, where the cost model knows several."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a device can time within seconds."""

    tokens: tuple[int, ...] = (4096, 8192)
    """Rows of matrix products."""
    sequence: tuple[int, ...] = (4096, 8192)
    """Tokens that attend to each other."""
    copies: tuple[int, ...] = (2**28, 2**30)
    messages: tuple[int, ...] = (2**20, 2**24, 2**27, 2**30)


class Timer(Protocol):
    """What runs operations: a device with its software."""

    device: str
    """What its driver calls it."""
    software: str
    gpus: int
    """That it may use together; 0 on a CPU."""
    sizes: Sizes

    def seconds(self, case: Case, limit_s: float) -> Timing | None:
        """Times one operation on one device for at most about so many seconds; None where it cannot run.

        Parameters
        ----------
        case
            The operation and its sizes.
        limit_s
            Seconds that warming up and repeating may take in all.
        """
        ...

    def collectives(self, cases: Sequence[Case], limit_s: float) -> Sequence[Timing | None]:
        """Times operations of several devices within so many seconds, in their order.

        Parameters
        ----------
        cases
            The operations and their sizes.
        limit_s
            Seconds that all of them may take together.
        """
        ...


# What is timed.


def gemm_shapes_of(model: ModelSpec) -> list[tuple[int, int]]:
    """Columns and depth of the matrices of a layer and of the head, the largest first.

    Parameters
    ----------
    model : ModelSpec

    Returns
    -------
    list of (int, int)
        Those of the experts left out.
    """
    gates = 2 if model.gated else 1
    shapes = {(model.vocab, model.hidden)}
    for kind in (model, model.in_windows):
        of_head = kind.qk_head_dim + (0 if kind.values_are_keys else kind.v_head_dim)
        projected = kind.heads * kind.qk_head_dim + kind.kv_heads * of_head
        shapes |= {(projected, model.hidden), (model.hidden, kind.heads * kind.v_head_dim)}
    if model.ffn_hidden:
        shapes |= {(gates * model.ffn_hidden, model.hidden), (model.hidden, model.ffn_hidden)}
    if model.routed_width != model.hidden:
        shapes |= {(model.routed_width, model.hidden), (model.hidden, model.routed_width)}
    return sorted(shapes, key=lambda shape: (-math.prod(shape), shape))


def cases_of(model: ModelSpec, cluster: ClusterSpec, sizes: Sizes, gpus: int) -> list[Case]:
    """Every operation that is worth a time on one node, class by class, each from small to large.

    Parameters
    ----------
    model : ModelSpec
        Whose shapes are taken: forward, and the products of both gradients, whole and cut by 4.
    cluster : ClusterSpec
        Its device says which precisions there are.
    sizes : Sizes
        What the timer can take.
    gpus : int
        That can be timed together; collectives need two.

    Returns
    -------
    list of Case
    """
    device = cluster.device
    precisions = ["bf16" if device.peak_bf16_tflops else "fp16"]
    precisions += ["fp8"] if device.peak_fp8_tflops else []
    gated = 2 if model.gated else 1
    shapes = set()
    for (columns, depth), cut, rows in product(gemm_shapes_of(model), (1, 4), sizes.tokens):
        if columns % (16 * cut) == 0 and depth % 16 == 0:
            part = columns // cut
            shapes |= {(rows, part, depth), (rows, depth, part), (part, depth, rows)}
    ordered = sorted(shapes, key=lambda shape: (math.prod(shape), shape))
    cases = [
        Case(kind="gemm", precision=precision, sizes=shape)
        for precision, shape in product(precisions, ordered)
    ]
    if model.moe is not None:
        moe = model.moe
        outside = model.routed_width
        widths = ((gated * moe.moe_ffn_hidden, outside), (outside, moe.moe_ffn_hidden))
        groups = sorted({moe.experts, max(2, moe.experts // 4)} - {1})
        grouped = {
            (max(rows * moe.top_k // count, 1), columns, depth, count)
            for (columns, depth), count, rows in product(widths, groups, sizes.tokens)
        }
        cases += [
            Case(kind="grouped-gemm", precision=precisions[0], sizes=shape)
            for shape in sorted(grouped, key=lambda shape: (math.prod(shape), shape))
        ]
    kinds: tuple[Kind, ...] = ("attention", "attention-backward")
    heads = [
        (kind.heads, kind.kv_heads, kind.qk_head_dim, kind.v_head_dim)
        for kind in (model, model.in_windows)
    ]
    cases += [
        Case(kind=kind, precision=precisions[0], sizes=(1, tokens, *each))
        for each, tokens, kind in product(dict.fromkeys(heads), sizes.sequence, kinds)
    ]
    cases += [Case(kind="copy", sizes=(size,)) for size in sizes.copies]
    cases.append(Case(kind="launch", sizes=(1000,)))
    in_node = min(gpus, cluster.gpus_per_node)
    for ranks in sorted({2, in_node, gpus} - {1}) if gpus > 1 else ():
        cases += [
            Case(kind=kind, sizes=(size, ranks))
            for size, kind in product(sizes.messages, COLLECTIVES)
        ]
    return cases


# What the constants expect of it.


_ALONE_GEMM = {"ampere": 0.869, "hopper": 0.803, "blackwell": 0.533, "cdna3": 0.514}
"""Of the 16-bit peak, the best shape of a matrix product alone: the search of stas00/ml-engineering
(compute/accelerator, MAMF), on Blackwell SimuMax' tables of kernels (b200_bf16_ceperm.json)."""
_ALONE_ATTENTION = {
    ("hopper", "flash-2"): 0.34,
    ("hopper", "cudnn"): 0.70,
    ("ampere", "flash-2"): 0.55,
}
"""Of the 16-bit peak, causal attention with heads of 128 over long sequences, forward, alone.

FlashAttention-3, arXiv 2407.08608, figure 5: 335 of 989 TFLOP/s at 16k tokens. cuDNN 9.19 on an H200: 688 at
32k (NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results/h200_919_only_cudnn). FlashAttention-2,
arXiv 2307.08691, figure 5.
"""
_ALONE_COPY = 0.9
"""Of the nominal HBM rate that a large copy attains: assumed."""
_LAUNCHES_OF_A_PIECE = 8
"""Kernel launches that the constant `piece_launch_s` stands for: six to ten (`frameworks.yaml`)."""
_LAUNCH_STACK = "megatron-bridge"
"""Whose `piece_launch_s` was fitted."""


@lru_cache(maxsize=64)
def _of_device(name: str, architecture: str, factors: Factors) -> Constants:
    return calibrated(named_constants(name, architecture, _LAUNCH_STACK, {}), factors)


@dataclass(frozen=True)
class AloneTimes:
    """What operations take alone on a device of the catalog, under factors on its constants."""

    cluster: ClusterSpec

    def seconds(self, point: Case, kernel: str, factors: Factors) -> float:
        """Seconds of one operation.

        Parameters
        ----------
        point : Case
        kernel : str
            What ran it, as its `Timing` says.
        factors : Factors
            On the shipped constants.

        Returns
        -------
        float
            Above 0.
        """
        match point.kind:
            case "gemm" | "grouped-gemm":
                return self._gemm_s(point, factors)
            case "attention" | "attention-backward":
                return self._attention_s(point, kernel, factors)
            case "copy":
                return 2.0 * point.sizes[0] / (self._copy_bytes_per_s * factors.hbm)
            case "launch":
                return self._launch_s * factors.launch
        operation: Operation = point.kind
        size, ranks = point.sizes
        fabric = isolated_fabric(self.cluster, ranks, deduplicated=False, factors=factors)
        return collective_time(operation, float(size), fabric).seconds

    @property
    def _device(self) -> DeviceSpec:
        return self.cluster.device

    @property
    def _copy_bytes_per_s(self) -> float:
        return self._device.hbm_gb_per_s * 1e9 * _ALONE_COPY

    @property
    def _launch_s(self) -> float:
        constants = self._constants(Factors())
        return (
            constants.framework.piece_launch_s * constants.device.host_factor / _LAUNCHES_OF_A_PIECE
        )

    def _constants(self, factors: Factors) -> Constants:
        return _of_device(self._device.name, self._device.architecture, factors)

    def _gemm_s(self, point: Case, factors: Factors) -> float:
        constants = self._constants(factors)
        rates = self._alone(device_rates(self._device, point.precision, constants))
        # Operands of a product alone stream as fast as a copy.
        rates = replace(rates, hbm_bytes_per_s=self._copy_bytes_per_s * factors.hbm)
        m, n, k = (float(size) for size in point.sizes[:3])
        groups = float(point.sizes[3]) if point.kind == "grouped-gemm" else 1.0
        return float(np.asarray(gemm_s(m, n, k, rates, groups=groups)))

    def _alone(self, rates: Rates) -> Rates:
        """Rates of products that have the device to themselves, where it is known what these reach."""
        device = self._device
        usual = _ALONE_GEMM.get(device.architecture)
        if usual is None:
            return rates
        of_steps = device_constants(device.name, device.architecture).gemm_fraction_16bit
        gain = max(1.0, usual / of_steps)
        return replace(
            rates,
            gemm_flops=rates.gemm_flops * gain,
            head_gemm_flops=rates.head_gemm_flops * gain,
        )

    def _attention_s(self, point: Case, kernel: str, factors: Factors) -> float:
        sequences, tokens, heads, _, width, value_width = point.sizes
        constants = self._constants(Factors()).device
        device = self._device
        usual = constants.attention_flash2_fraction
        if kernel == "cudnn":
            usual = constants.attention_forward_fraction
        usual = _ALONE_ATTENTION.get((device.architecture, kernel), usual)
        rate = peak_flops(device, "bf16") * usual * factors.attention
        flops = 0.5 * float(
            np.asarray(attention_pair_flops(tokens, tokens, heads, width, value_width))
        )
        narrow = constants.narrow_head_factor if width <= 64 else 1.0
        keys, backward_keys = attention_keys(constants, is_flash_2=kernel != "cudnn")
        if point.kind == "attention-backward":
            flops, rate, keys = (
                2.5 * flops,
                rate * constants.attention_backward_ratio,
                backward_keys,
            )
        return sequences * narrow * flops / rate * (1.0 + keys / tokens)


# Timing within a time.


def measured_points(
    timer: Timer,
    cases: Sequence[Case],
    alone: AloneTimes,
    minutes: float,
    progress: Callable[[str], None] | None = None,
) -> tuple[list[MeasuredPoint], list[str]]:
    """Times operations for at most about so many minutes, a class after the other in turn.

    Parameters
    ----------
    timer : Timer
    cases : sequence of Case
        In each class from small to large: a class stops where the next one would take too long.
    alone : AloneTimes
        Of the device that the timer's is taken for.
    minutes : float
        Above 0.
    progress : callable, optional
        Called with a line for each class that begins.

    Returns
    -------
    tuple of points and of remarks on what could not be timed
    """
    end = time.monotonic() + 60.0 * minutes
    say = progress or (lambda line: None)
    together = [case for case in cases if case.kind in COLLECTIVES]
    alone_end = end - (60.0 * minutes * _FOR_COLLECTIVES if together else 0.0)
    classes: dict[tuple[str, str], _Class] = {}
    for case in cases:
        if case.kind not in COLLECTIVES:
            name = case.kind, case.precision
            classes.setdefault(name, _Class(name)).waiting.append(case)
    points: list[MeasuredPoint] = []
    waiting = list(classes.values())
    while waiting:
        for kind in waiting:
            share_s = (alone_end - time.monotonic()) / len(waiting)
            points += kind.timed_next(timer, alone, share_s, say)
        waiting = [kind for kind in waiting if kind.waiting]
    if together:
        say("timing collectives")
        timings = timer.collectives(together, max(end - time.monotonic(), 1.0))
        points += [
            _point(case, timing, alone)
            for case, timing in zip(together, timings, strict=True)
            if timing is not None
        ]
    of_classes = (kind.remark() for kind in classes.values())
    return points[:MOST_POINTS], [*filter(None, of_classes), *_untimed(together, points)]


@dataclass
class _Class:
    """Operations of one kind and precision that wait for their time, and how it went so far."""

    name: tuple[str, str]
    waiting: list[Case] = field(default_factory=list)
    timed: int = 0
    failed: int = 0
    left_out: int = 0
    slowness: float = 1.0
    """Measured over expected, of the last one."""

    @property
    def words(self) -> str:
        return " ".join(filter(None, self.name))

    def timed_next(
        self,
        timer: Timer,
        alone: AloneTimes,
        share_s: float,
        say: Callable[[str], None],
    ) -> list[MeasuredPoint]:
        """The next one's time, if it can be had within a share of the time."""
        if not self.timed + self.failed:
            say(f"timing {self.words}")
        case = self.waiting.pop(0)
        expected_s = alone.seconds(case, "", Factors())
        # Once to warm up, once to be timed.
        if share_s <= 0 or 2.0 * expected_s * self.slowness > share_s:
            self.left_out, self.waiting = 1 + len(self.waiting), []
            return []
        timing = timer.seconds(case, share_s / (1 + len(self.waiting)))
        if timing is None:
            self.failed += 1
            return []
        self.timed += 1
        self.slowness = timing.seconds / expected_s
        return [_point(case, timing, alone)]

    def remark(self) -> str:
        """What a reader should know of it, or nothing."""
        if self.failed and not self.timed:
            return (
                f"{self.words} cannot be run by this software on this device: nothing is said of it"
            )
        if self.left_out:
            every = self.timed + self.failed + self.left_out
            return f"{self.words}: {self.timed} of {every} shapes within the time; --minutes gives more"
        return ""


def _point(case: Case, timing: Timing, alone: AloneTimes) -> MeasuredPoint:
    return MeasuredPoint(
        kind=case.kind,
        precision=case.precision,
        sizes=case.sizes,
        kernel=timing.kernel,
        seconds=timing.seconds,
        repeats=timing.repeats,
        usual_s=alone.seconds(case, timing.kernel, Factors()),
    )


def _untimed(together: Sequence[Case], points: Sequence[MeasuredPoint]) -> Iterator[str]:
    kinds = [case.kind for case in together]
    for kind in dict.fromkeys(kinds):
        timed = sum(point.kind == kind for point in points)
        if timed < kinds.count(kind):
            yield f"{kind}: {timed} of {kinds.count(kind)} sizes were timed"


# From times to factors.


MEASURED_BY: dict[str, tuple[Kind, float]] = {
    "gemm": ("gemm", 0.05),
    "gemm_narrow": ("gemm", 0.1),
    "grouped_gemm": ("grouped-gemm", 0.1),
    "attention": ("attention", 0.15),
    "hbm": ("copy", 0.1),
    "launch": ("launch", 0.3),
    "scale_up": ("all-reduce", 0.1),
    "exchange": ("all-to-all", 0.15),
    "network": ("all-reduce", 0.15),
}
"""Factors that a machine's times say something of, with the kind that does, and how far a step may lie from
what operations alone say: relative, assumed."""
_NOISE, _LEAST_NOISE = 0.05, 0.02
"""Relative, of a time beside the formula of its class, before and after its scatter was seen."""
_MOST_NOISE = 0.3
_STEP = 0.01
"""Difference of a slope, in logarithms."""
_TOUCHED = 1e-3
"""Slope from which on a time says something of a factor."""


@dataclass(frozen=True, kw_only=True)
class MovedClass:
    """How one class of operations lies beside the shipped constants."""

    name: str
    """One of `NAMES`."""
    unit: str
    assumed: float
    value: float
    moved_pct: float
    """Rate over the assumed one, minus 1; of launches their time."""
    points: int
    """Times that it rests on."""
    scatter_pct: float
    """Median size of what is left between measured and fitted times."""
    sentence: str


@dataclass(frozen=True, kw_only=True)
class MachineReport:
    """What a machine said of itself."""

    calibration: Calibration
    moved: tuple[MovedClass, ...]
    notes: tuple[str, ...]

    @property
    def benchmarks(self) -> tuple[Benchmark, ...]:
        """The same as evidence beside measured runs."""
        factors = self.calibration.factors
        return tuple(
            Benchmark(
                factors=(each.name,),
                ratio=float(getattr(factors, each.name)),
                noise=MEASURED_BY[each.name][1],
                words=each.sentence,
            )
            for each in self.moved
        )

    def as_document(self) -> dict[str, Any]:
        """What `calibrate --measure --json` prints.

        Returns
        -------
        dict
        """
        return {
            "schema": 1,
            "stack": self.calibration.model_dump(mode="json"),
            "moved": [dict(vars(each)) for each in self.moved],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True)
class FittedMachine:
    """Factors that were fitted to times."""

    names: tuple[str, ...]
    """Of the factors that some time speaks of."""
    logs: Floats
    """Of the factors, in that order."""
    covariance: Floats
    """Of the logs."""
    rests: tuple[tuple[int, ...], ...]
    """Numbers of the points that each rests on."""


def fitted_machine(points: Sequence[MeasuredPoint], alone: AloneTimes) -> FittedMachine:
    """The factors that bring expected times to the measured ones.

    Robust least squares of log ratios over all classes at once, as for runs (`evidence.fit`), twice: the
    second time with the scatter that each class showed. The logarithms have a prior of spread 1, which says
    next to nothing: a machine is believed what it says of itself.

    Parameters
    ----------
    points : sequence of MeasuredPoint
        At least one.
    alone : AloneTimes
        Of the device that they are set against.

    Returns
    -------
    FittedMachine
    """
    kinds = {point.kind for point in points}
    names = tuple(name for name, (kind, _) in MEASURED_BY.items() if kind in kinds)
    cases = [_case(point) for point in points]
    logs = np.log([point.seconds for point in points])

    def off(z: Floats) -> Floats:
        factors = Factors.model_construct(**dict(zip(names, np.exp(z).tolist(), strict=True)))
        expected = [
            alone.seconds(case, point.kernel, factors)
            for case, point in zip(cases, points, strict=True)
        ]
        return np.asarray(np.log(expected) - logs, dtype=np.float64)

    def slopes(z: Floats) -> Floats:
        now = off(z)
        return np.stack([(off(z + step) - now) / _STEP for step in _STEP * np.eye(len(z))], axis=1)

    largest = np.full(len(names), math.log(MOST))
    guesses = _first_guesses(points)
    z = np.clip([guesses[name] for name in names], -largest, largest)
    noise = np.full(len(points), _NOISE)
    fitted = Fitted(z, off(z), slopes(z))
    for _ in range(2):
        errors, along = _scaled(off, noise), _scaled(slopes, noise[:, None])
        fitted = fit(Goal(errors=errors, slopes=along, low=-largest, high=largest), fitted.x)
        residuals = fitted.errors * noise
        for members in _classes(points):
            # The median size of a normal error is 0.67 of its spread.
            scatter = (
                float(np.median(np.abs(residuals[members] - np.median(residuals[members])))) / 0.67
            )
            noise[members] = min(max(_LEAST_NOISE, scatter), _MOST_NOISE)
    touched = np.abs(slopes(fitted.x)) > _TOUCHED
    touched_columns = [number for number, column in enumerate(touched.T) if column.any()]
    return FittedMachine(
        names=tuple(names[number] for number in touched_columns),
        logs=fitted.x[touched_columns],
        covariance=fitted.covariance()[np.ix_(touched_columns, touched_columns)],
        rests=tuple(
            tuple(np.flatnonzero(touched[:, number]).tolist()) for number in touched_columns
        ),
    )


def _classes(points: Sequence[MeasuredPoint]) -> Iterator[list[int]]:
    """Numbers of the points of one kind and precision."""
    names = [(point.kind, point.precision) for point in points]
    for name in dict.fromkeys(names):
        yield [number for number, each in enumerate(names) if each == name]


def _first_guesses(points: Sequence[MeasuredPoint]) -> dict[str, float]:
    """Logarithms of factors by the median of each class alone: a fit may have far to go."""
    logs: dict[str, list[float]] = {}
    for point in points:
        narrow = " narrow" if point.precision == "fp8" else ""
        logs.setdefault(point.kind + narrow, []).append(math.log(point.usual_s / point.seconds))
    rates = {kind: float(np.median(of_kind)) for kind, of_kind in logs.items()}
    gemm, ring = rates.get("gemm", 0.0), rates.get("all-reduce", 0.0)
    return {
        "gemm": gemm,
        "gemm_narrow": rates.get("gemm narrow", gemm) - gemm,
        "grouped_gemm": rates.get("grouped-gemm", gemm) - gemm,
        "attention": rates.get("attention", 0.0),
        "hbm": rates.get("copy", 0.0),
        "launch": -rates.get("launch", 0.0),
        "scale_up": ring,
        "exchange": rates.get("all-to-all", ring) - ring,
        "network": 0.0,
    }


def _scaled(of: Callable[[Floats], Floats], noise: Floats) -> Callable[[Floats], Floats]:
    scaled = noise.copy()
    return lambda x: of(x) / scaled


def _case(point: MeasuredPoint) -> Case:
    kind: Any = point.kind
    return Case(kind=kind, precision=point.precision, sizes=point.sizes)


def _calibrated(
    draft: Calibration, fitted: FittedMachine, measured: MeasuredMachine
) -> Calibration:
    """A stack with the fitted factors, and what they were fitted to."""
    x = np.zeros(len(NAMES))
    for factor, log in zip(fitted.names, fitted.logs, strict=True):
        x[NAMES.index(factor)] = log / PRIORS[factor].spread
    update = {
        "factors": factors_at(x),
        "mean": tuple(float(value) for value in x),
        "covariance": tuple(tuple(row) for row in _covariance(fitted).tolist()),
        "measured": measured,
    }
    return Calibration.model_validate({**dict(draft), **update})


def _covariance(fitted: FittedMachine) -> Floats:
    """Of the coordinates, with what a step may lie from operations alone; of the rest their priors."""
    covariance = np.eye(len(NAMES))
    places = [NAMES.index(name) for name in fitted.names]
    spreads = np.array([PRIORS[name].spread for name in fitted.names])
    of_steps = np.diag([MEASURED_BY[name][1] ** 2 for name in fitted.names])
    joint = (fitted.covariance + of_steps) / np.outer(spreads, spreads)
    # No wider than before anything was measured.
    shrunk = np.minimum(1.0, 1.0 / np.sqrt(np.diag(joint)))
    joint = joint * np.outer(shrunk, shrunk)
    covariance[np.ix_(places, places)] = (joint + joint.T) / 2.0
    return covariance


_EDGE = 0.99 * math.log(MOST)
"""Of the logarithm of a factor: it lies where a stack file ends, and what was timed beyond."""
_BEYOND = "; what was timed lies further off than a stack file holds"


def _moved(
    name: str, own: Sequence[int], calibration: Calibration, workload: Workload
) -> MovedClass:
    shipped = replace(workload, framework=calibration.framework, calibration=None)
    measured = replace(shipped, calibration=calibration)
    assumed, value = quantity(name, shipped), quantity(name, measured)
    points = calibration.measured.points if calibration.measured is not None else ()
    scatter = [abs(_log_left(points[number], calibration, workload)) for number in own]
    factor = float(getattr(calibration.factors, name))
    is_edge = abs(math.log(factor)) > _EDGE
    return MovedClass(
        name=name,
        unit=MEANINGS[name].unit,
        assumed=assumed,
        value=value,
        moved_pct=100.0 * (factor - 1.0),
        points=len(own),
        scatter_pct=100.0 * float(np.median(scatter)),
        sentence=sentence(name, assumed, value) + is_edge * _BEYOND,
    )


def _log_left(point: MeasuredPoint, calibration: Calibration, workload: Workload) -> float:
    expected = AloneTimes(workload.cluster).seconds(_case(point), point.kernel, calibration.factors)
    return math.log(expected / point.seconds)


def machine_report(
    timer: Timer,
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    name: str | None = None,
    like: str | None = None,
    minutes: float = DEFAULT_MINUTES,
    progress: Callable[[str], None] | None = None,
) -> MachineReport:
    """A stack that says of a device of the catalog what this machine said of itself.

    Parameters
    ----------
    timer : Timer
    model : ModelSpec
        Whose shapes are timed.
    cluster : ClusterSpec
        What the machine is set against.
    name : str, optional
        Of the stack; that of the device by default.
    like : str, optional
        The known stack to begin from, `DEFAULT_STACK` by default: the host's launches are told of it alone.
    minutes : float
        0.05 to 120.
    progress : callable, optional
        Called with a line now and then.

    Returns
    -------
    MachineReport

    Raises
    ------
    InputError
        For an unknown stack, for minutes out of range, and where nothing could be timed.
    """
    if not 0.05 <= minutes <= MOST_MINUTES:
        raise InputError(f"must be from 0.05 to {MOST_MINUTES:g}", where="--minutes", value=minutes)
    stack = stack_in_words(like or DEFAULT_STACK)
    if stack is None:
        raise InputError("not a known stack", where="--like", value=like, allowed=STACK_NAMES)
    device = cluster.device.name
    draft = draft_stack(name or f"measured {device}", stack.name, device)
    workload = Workload(
        model=model,
        cluster=cluster,
        gpus=max(1, min(timer.gpus, cluster.gpus)),
        seq_len=timer.sizes.sequence[-1],
        global_batch=1,
        framework=stack.name,
    )
    began = time.monotonic()
    alone = AloneTimes(cluster)
    cases = cases_of(model, cluster, timer.sizes, timer.gpus)
    points, notes = measured_points(timer, cases, alone, minutes, progress)
    if not points:
        raise InputError(
            "nothing could be timed; give it more time, or a smaller --model", where="--minutes"
        )
    measured = MeasuredMachine(
        device=timer.device[:200],
        software=timer.software[:200],
        gpus=timer.gpus,
        model=workload.model.name,
        wall_s=time.monotonic() - began,
        points=tuple(points),
    )
    fitted = fitted_machine(points, alone)
    calibration = _calibrated(draft, fitted, measured)
    rests = zip(fitted.names, fitted.rests, strict=True)
    moved = [_moved(factor, members, calibration, workload) for factor, members in rests]
    at_the_edge = np.abs(fitted.logs) > _EDGE
    far = [factor for factor, edge in zip(fitted.names, at_the_edge, strict=True) if edge]
    if far:
        notes.append(
            f"{', '.join(far)}: off by a factor of {MOST:g}, the most that a stack file holds; is --cluster "
            "the machine that was timed?"
        )
    return MachineReport(calibration=calibration, moved=tuple(moved), notes=tuple(notes))
