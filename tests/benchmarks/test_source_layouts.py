"""The quoted layouts: their models are those of the papers, and the page holds every case."""

from __future__ import annotations

import pytest

from benchmarks.source_layouts import CASES, PAGE, SourceLayout, model_of
from meshwright.model_specs.parameters import parameter_count

PUBLISHED = {"LLaMA 33B on 2,048 A100": 32.5e9, "LLaMA 65B on 2,048 A100": 65.2e9}
"""Touvron et al. 2023, arXiv 2302.13971, table 2."""


@pytest.mark.parametrize("case", [case for case in CASES if case.wider], ids=lambda case: case.name)
def test_a_resized_model_has_the_parameters_of_its_paper(case: SourceLayout) -> None:
    assert parameter_count(model_of(case)) == pytest.approx(PUBLISHED[case.name], rel=5e-3)


def test_pins_name_degrees() -> None:
    for case in CASES:
        names = {part.split("=")[0] for part in case.pin.split(",")}
        assert names <= {"tp", "pp", "dp", "ep", "micro_batch"}


def test_the_page_has_a_row_of_every_case() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for case in CASES:
        assert f"| {case.name} | {case.pin} |" in text
