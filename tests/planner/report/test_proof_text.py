"""The sentences that a reader gets from the fields of a solver report."""

from __future__ import annotations

from meshwright.planner.plan.document import PruningReport, SolverReport, SpaceReport
from meshwright.planner.report.plan_words import pruning_text, space_text


def space(**changes: object) -> SpaceReport:
    fields = {
        "tp": [1, 2, 4, 8],
        "cp": [1],
        "pp": list(range(1, 33)),
        "dp": [1],
        "ep": [1],
        "etp": [1],
        "schedules": ["1f1b", "interleaved-1f1b"],
        "zero_stages": [0, 1],
        "recompute": ["none", "layernorm", "full"],
        "gpus": 16,
        "mapping": "axes-to-levels",
    }
    return SpaceReport.model_validate({**fields, **changes})


def test_the_space_in_one_sentence() -> None:
    text = space_text(space())
    assert text.startswith("tp in {1, 2, 4, 8}, pp in 1..32 (32 values), every micro-batch")
    assert "ZeRO stage in {0, 1}, 3 kinds of recomputation, up to 16 GPUs" in text
    assert "pipeline schedules" not in text
    assert "tp inside the innermost, every split of the layers" in text
    assert text.endswith("may be empty), gradient buckets of the framework's own size")


def test_a_framework_that_deals_layers_out() -> None:
    assert "layers dealt out evenly, as the framework does" in space_text(space(even_stages=True))


def test_what_a_space_has_besides() -> None:
    text = space_text(
        space(
            tp=[1],
            pp=[1],
            etp=[1, 2],
            schedules=["1f1b", "interleaved-1f1b", "zbv"],
            mapping="slots-to-leaves",
            expert_gap=0.03,
        )
    )
    assert text.startswith("etp in {1, 2}, ")
    assert "3 pipeline schedules" in text
    assert "every assignment of slots" in text
    assert text.endswith("its imbalance at most 0.03 above what is possible)")
    assert "the best placement of each degree" in space_text(space(expert_gap=0.0))


def test_the_pruning_in_one_sentence() -> None:
    report = SolverReport(wall_s=None, bound_rounds=1, workers=1, seed=0, version="9")
    assert pruning_text(report) == ""
    pruning = PruningReport(by_bound=7, by_rule={"hbm": 4, "cp-split": 1}, priced=2, fewest_gpus=3)
    pruned = report.model_copy(update={"layouts_considered": 14, "pruning": pruning})
    assert pruning_text(pruned) == (
        "14 layouts: 7 no faster by their bound, 2 priced exactly, ruled out: cp-split 1, hbm 4; "
        "none on fewer than 3 GPUs can be faster"
    )


def test_a_plan_from_before_the_space_had_fields_is_still_read() -> None:
    fields = {"wall_s": 1.0, "bound_rounds": 1, "workers": 1, "seed": 0, "version": "9"}
    assert SolverReport.model_validate({**fields, "space": "tp in {1, 2}"}).space is None
