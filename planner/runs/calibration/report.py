"""What a calibration learned, as its command prints it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.costmodel.constants.calibration import Calibration


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
