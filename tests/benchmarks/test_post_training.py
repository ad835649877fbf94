"""Measured runs that train adapters: how well they are predicted, and the bands that say so."""

from __future__ import annotations

from benchmarks.post_training import BANDS, bands_document, measured_scores, within


def test_measured_runs_are_predicted_and_the_bands_are_theirs() -> None:
    measured = measured_scores()
    assert len(measured.time) >= 30
    assert within(measured.time, 0.2) >= 0.7
    assert within(measured.memory, 0.1) >= 0.7
    assert sum(measured.fits) >= 0.9 * len(measured.fits)
    assert BANDS.read_text(encoding="utf-8") == bands_document(measured)
