"""What a user's own measured runs say of the constants, as factors on the shipped ones.

A factor goes with what it belongs to: those of device and network with GPUs of that name, those of the
software and of memory with the framework that was measured.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from meshwright.costmodel.records import FILES, ErrorBand
from meshwright.documents import ClosedDocument
from meshwright.frameworks.catalog import STACK_NAMES, framework_of_stack

MOST = 20.0
"""A factor lies between 1 / MOST and MOST."""
Factor = Annotated[float, Field(ge=1 / MOST, le=MOST, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)]
Gib = Annotated[float, Field(ge=0, le=512, allow_inf_nan=False)]


class Factors(ClosedDocument):
    """Factors on shipped constants; 1 and 0 leave them as they are."""

    gemm: Factor = 1.0
    """Rate of matrix products, at every precision."""
    gemm_narrow: Factor = 1.0
    """Rate of matrix products below 16 bits, over that at 16 bits."""
    grouped_gemm: Factor = 1.0
    """Rate of the grouped products of experts, over that of dense ones."""
    attention: Factor = 1.0
    """Rate of attention."""
    hbm: Factor = 1.0
    """Bytes per second of kernels that stream through HBM: norms, activations, optimizer."""
    scale_up: Factor = 1.0
    """Bytes per second between GPUs of a node."""
    exchange: Factor = 1.0
    """Bytes per second of all-to-alls between GPUs of a node, over those of rings."""
    network: Factor = 1.0
    """Bytes per second that leave a node."""
    launch: Factor = 1.0
    """Host time of launches."""
    layer_wait_s: Seconds = 0.0
    """Further time of a layer and pass that the GPU waits for the host."""
    collective_wait_s: Seconds = 0.0
    """Further wait at a blocking tensor-parallel collective."""
    data_parallel_exposed: Factor = 1.0
    """Share of the gradients' and parameters' traffic that compute pays for."""
    expert_exposed: Factor = 1.0
    """Share of the expert all-to-all that overlap leaves in sight."""
    recompute: Factor = 1.0
    """Share of a layer's forward pass that full recomputation runs again."""
    step_overhead_s: Seconds = 0.0
    """Further time of a step for data, logging and the host."""
    head: Factor = 1.0
    """Time of the last norm, the LM head and the loss."""
    virtual_stage_s: Seconds = 0.0
    """Further time that a micro-batch loses at each virtual stage of a pipeline rank."""
    activation_memory: Factor = 1.0
    """Bytes of saved activations and of one layer's way back."""
    state_memory: Factor = 1.0
    """Bytes of weights, gradients and optimizer states."""
    loss_memory: Factor = 1.0
    """Bytes of logits and loss."""
    fixed_memory_gib: Gib = 0.0
    """Further memory of every GPU."""


Kind = Literal["factor", "further"]


class Prior(ClosedDocument):
    """How far a factor may lie from the shipped constants, before a run was measured."""

    kind: Kind
    """A factor, whose logarithm is normal; or something further, at least 0, a half normal."""
    spread: float
    """One standard deviation: of the logarithm, or in the unit of what comes on top."""
    source: str

    def at(self, x: float) -> float:
        """The factor so many spreads away from the shipped constants: exp(spread x), or spread x.

        Parameters
        ----------
        x : float
            Spreads, without unit, -3 to 3.

        Returns
        -------
        float
            A factor, at most `MOST` and at least one over it; of something further an amount in its own unit,
            at least 0.
        """
        if self.kind == "factor":
            return float(np.clip(np.exp(self.spread * x), 1.0 / MOST, MOST))
        return max(0.0, self.spread * x)


def _factor(spread: float, source: str) -> Prior:
    return Prior(kind="factor", spread=spread, source=source)


def _further(spread: float, source: str) -> Prior:
    return Prior(kind="further", spread=spread, source=source)


PRIORS: dict[str, Prior] = {
    "gemm": _factor(0.1, "power limits and clocks: 400 to 700 W parts of one name differ by 10 %"),
    "gemm_narrow": _factor(
        0.1, "kernels and recipes of FP8: 1.2 to 1.5 times BF16 in published steps"
    ),
    "grouped_gemm": _factor(0.15, "libraries and numbers of rows an expert"),
    "attention": _factor(0.25, "fused kernels of one generation differ by a quarter"),
    "hbm": _factor(0.25, "fused and unfused norms, activations and optimizers"),
    "scale_up": _factor(0.15, "nccl-tests of nodes of one kind"),
    "exchange": _factor(0.2, "0.6 to 0.8 of the link, by NCCL and by kernels of their own"),
    "network": _factor(0.3, "nccl-tests of clusters with the same adapters; congestion"),
    "launch": _factor(0.4, "hosts and interpreters"),
    "layer_wait_s": _further(1e-4, "a few kernel launches of 10 to 20 microseconds"),
    "collective_wait_s": _further(1e-4, "skew of ranks and two stream hand-overs, vTrain rows"),
    "data_parallel_exposed": _factor(0.4, "0.12 to 0.92 among the stacks that were fitted"),
    "expert_exposed": _factor(0.4, "dispatchers of one kind"),
    "recompute": _factor(0.15, "checkpointing that stops early, and such that does not"),
    "step_overhead_s": _further(0.1, "data loading and logging: 2 to 73 ms among fitted stacks"),
    "head": _factor(0.15, "losses fused or not, in 16 or 32 bits"),
    "virtual_stage_s": _further(5e-5, "launches and hand-overs of a few kernels at each border"),
    "activation_memory": _factor(0.15, "operators fused or not"),
    "state_memory": _factor(0.1, "16 or 18 bytes a parameter"),
    "loss_memory": _factor(0.4, "2 to 18 bytes a logit among the stacks"),
    "fixed_memory_gib": _further(1.5, "workspaces, buffers and fragments"),
}
"""Of every factor, in the order of a posterior's coordinates."""
NAMES = tuple(PRIORS)
MOST_SPREADS = 3.0


def factors_at(coordinates: NDArray[np.float64]) -> Factors:
    """Factors from coordinates in spreads.

    Parameters
    ----------
    coordinates : array of float, shape [len(NAMES)]
        Distance of each factor from the shipped constants in spreads of its prior, without unit, -3 to 3.

    Returns
    -------
    Factors
        1 and 0 at coordinates of 0.

    Raises
    ------
    ValueError
        Where there are not as many coordinates as `NAMES`.
    """
    named = zip(PRIORS.items(), coordinates, strict=True)
    return Factors(**{name: prior.at(float(x)) for (name, prior), x in named})


def lowest_coordinates() -> NDArray[np.float64]:
    """The least of every coordinate: what comes on top is never negative.

    Returns
    -------
    array of float, shape [len(NAMES)]
        Spreads of the priors: -3 of a factor, 0 of something further.
    """
    lowest = [-MOST_SPREADS if prior.kind == "factor" else 0.0 for prior in PRIORS.values()]
    return np.array(lowest)


MEMORY_FACTORS = ("activation_memory", "state_memory", "loss_memory", "fixed_memory_gib")
DEVICE_FACTORS = (
    *("gemm", "gemm_narrow", "grouped_gemm", "attention", "hbm", "scale_up", "exchange", "network"),
)


@cache
def constants_digest() -> str:
    """Fingerprint of the shipped constants, by which a calibration knows which ones it goes with.

    Returns
    -------
    str
        SHA-256 of the files of `costmodel/data`, in hexadecimal.
    """
    folder = files("meshwright.costmodel").joinpath("data")
    texts = [folder.joinpath(name).read_bytes() for name in (*FILES, "memory.yaml")]
    return sha256(b"".join(texts)).hexdigest()


MOST_MEASURED_SPREADS = 40.0
"""Of a coordinate that was measured by itself, which no prior holds back: what `MOST` is of the narrowest."""
Coordinate = Annotated[
    float, Field(ge=-MOST_MEASURED_SPREADS, le=MOST_MEASURED_SPREADS, allow_inf_nan=False)
]
Covariance = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
_COUNT = len(NAMES)


class BandDoc(ClosedDocument):
    """Measured over predicted: 5th and 95th percentile."""

    low: Annotated[float, Field(gt=0, le=1)]
    high: Annotated[float, Field(ge=1, le=1e3)]
    rows: Annotated[int, Field(ge=0, le=20_000)]


class MeasuredPoint(ClosedDocument):
    """One shape that `calibrate --measure` timed."""

    kind: Annotated[str, Field(min_length=1, max_length=40)]
    """Kind of operation: gemm, grouped-gemm, attention, attention-backward, copy, launch, or a collective."""
    precision: Annotated[str, Field(max_length=20)] = ""
    sizes: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(max_length=6)]
    """As the kind counts them; docs/commands/calibrate.md lists them."""
    kernel: Annotated[str, Field(max_length=80)] = ""
    """What ran it, where that makes a difference."""
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Median."""
    repeats: Annotated[int, Field(ge=1)]
    usual_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """What the shipped constants expect of it alone."""


class MeasuredMachine(ClosedDocument):
    """What `calibrate --measure` ran on, and every time that it took."""

    device: Annotated[str, Field(max_length=200)]
    """What the driver calls it."""
    software: Annotated[str, Field(max_length=200)]
    gpus: Annotated[int, Field(ge=0, le=1024)]
    """That were measured together; 0 on a CPU."""
    model: Annotated[str, Field(max_length=200)]
    """Whose shapes were timed."""
    wall_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    points: Annotated[tuple[MeasuredPoint, ...], Field(max_length=600)]


class Calibration(ClosedDocument):
    """A stack of the user's: a software profile on a device, and what measured runs say of it."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    """What run files call the stack."""
    framework: str
    """The software profile that it begins from."""
    device: Annotated[str, Field(min_length=1, max_length=200)]
    constants: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Digest of the shipped constants that the factors go with."""
    factors: Factors
    mean: Annotated[tuple[Coordinate, ...], Field(min_length=_COUNT, max_length=_COUNT)]
    """The factors in spreads of their priors, in the order of `NAMES`."""
    covariance: Annotated[
        tuple[tuple[Covariance, ...], ...], Field(min_length=_COUNT, max_length=_COUNT)
    ]
    step_time: BandDoc
    memory: BandDoc | None = None
    """None where no run says how much memory it took."""
    measured: MeasuredMachine | None = None
    """Where the factors come from, with `calibrate --measure`."""

    @field_validator("framework")
    @classmethod
    def _known(cls, framework: str) -> str:
        if framework not in STACK_NAMES:
            raise ValueError(f"must be one of {', '.join(STACK_NAMES)}")
        return framework

    @model_validator(mode="after")
    def _covariance_is_one(self) -> Self:
        if any(len(row) != _COUNT for row in self.covariance):
            raise ValueError(f"covariance: must have {_COUNT} columns")
        matrix = np.array(self.covariance)
        if np.abs(matrix - matrix.T).max() > 1e-6 or np.linalg.eigvalsh(matrix).min() < -1e-6:
            raise ValueError("covariance: must be symmetric and positive semidefinite")
        return self

    def scenarios(self, count: int, seed: int) -> tuple[Calibration, ...]:
        """Samples of the posterior of time; memory stays as it is, so that the same plans fit.

        Parameters
        ----------
        count : int
            Even, at least 2: samples come in pairs that mirror each other about the mean.
        seed : int
            At least 0; the same seed gives the same samples.

        Returns
        -------
        tuple of Calibration
            Within the bounds of the priors.
        """
        values, vectors = np.linalg.eigh(np.array(self.covariance))
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        draws = np.random.default_rng(seed).standard_normal((count // 2, len(NAMES))) @ root.T
        timed = np.array([name not in MEMORY_FACTORS for name in NAMES])
        mean = np.array(self.mean)
        # What was measured by itself may lie beyond the bounds of a fit to runs: samples may lie round it.
        low = np.minimum(lowest_coordinates(), mean + lowest_coordinates())
        high = np.maximum(MOST_SPREADS, mean + MOST_SPREADS)
        samples = []
        for draw in np.concatenate([draws, -draws]):
            x = np.clip(mean + draw * timed, low, high)
            samples.append(self.model_copy(update={"factors": factors_at(x)}))
        return tuple(samples)

    def covers(self, device: str, framework: str) -> bool:
        """Whether the runs were made on this device with this framework.

        Parameters
        ----------
        device, framework : str
            Names of the device catalog and of a software profile.

        Returns
        -------
        bool
            True where both were measured.
        """
        return device == self.device and self.runs_as(framework)

    def runs_as(self, framework: str) -> bool:
        """Whether a framework is the one that was measured, in another version or not.

        Parameters
        ----------
        framework : str
            A software profile.

        Returns
        -------
        bool
            True also for another profile of the same framework.
        """
        return framework_of_stack(framework) is framework_of_stack(self.framework)

    def factors_on(self, device: str, framework: str) -> Factors:
        """The factors that hold for a device and a framework.

        Parameters
        ----------
        device, framework : str
            Names of the device catalog and of a software profile.

        Returns
        -------
        Factors
            Those of device and network where the device was measured, the others where the framework was;
            what was not measured stays as shipped (1, or 0 for what comes on top). Launches that a machine
            timed by itself, without a run, are its host's, whatever the framework.
        """
        names: set[str] = set()
        if device == self.device:
            names |= set(DEVICE_FACTORS)
            if self.measured is not None and not self.step_time.rows:
                names.add("launch")
        if self.runs_as(framework):
            names |= set(NAMES) - set(DEVICE_FACTORS)
        return Factors(**{name: getattr(self.factors, name) for name in names})

    def band(self, basis_of: Literal["step_time", "memory"]) -> ErrorBand | None:
        """Measured over predicted, with the stack's own runs as its basis.

        Parameters
        ----------
        basis_of : str
            step_time or memory.

        Returns
        -------
        ErrorBand or None
            None where no run was measured.
        """
        band: BandDoc | None = getattr(self, basis_of)
        if band is None or not band.rows:
            return None
        runs = "run" if band.rows == 1 else "runs"
        basis = f"{band.rows} own {runs} of {self.name}"
        return ErrorBand(**band.model_dump(), basis=basis, of_own_runs=True)
