"""What `verify` finds in plans on mixed clusters, and that none is printed that does not hold."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from meshwright.cli import main
from meshwright.documents import write_files
from meshwright.errors import InputError, InternalError, OutOfTimeError
from meshwright.planner.audit import audit_plan, checked, stated_faults_on_parts
from meshwright.planner.launch.plan_files import mixed_files
from meshwright.planner.mixed import service
from meshwright.planner.mixed.document import MixedPlan, mixed_document, mixed_text, read_mixed_plan
from meshwright.planner.mixed.kernel import MixedPrice
from meshwright.planner.mixed.promising import PromisingRows, promising_rows
from meshwright.planner.mixed.service import MixedOutcome, MixedResult, MixedSearch, make_mixed_plan
from meshwright.planner.mixed.verify import mixed_faults
from meshwright.planner.plan.document import with_digest
from meshwright.planner.plan.texts import read_plan
from tests.planner.audit.damage import leaves, other
from tests.planner.mixed.conftest import PIN, planned
from tests.planner.mixed.test_mixed_optimum import asked, tight
from tests.soaked import some

Document = dict[str, Any]
DECIDING = (
    "status", "objective", "runs_on", "layout", "execution", "predicted", "ranks", "nodes", "alone",
)  # fmt: skip
"""Sections in which any change is one that can be worked out."""


@pytest.fixture
def folder(result: MixedResult, tmp_path: Path) -> Path:
    write_files(tmp_path / "out", mixed_files(result))
    return tmp_path / "out"


def forged(
    plan: MixedPlan,
    change: Callable[[Document], object],
    faults: Callable[[MixedPlan], Iterator[str]] = mixed_faults,
) -> list[str]:
    """What is found after a change whose digest was made to fit."""
    document = copy.deepcopy(mixed_document(plan))
    change(document)
    try:
        changed = with_digest(MixedPlan.model_validate(document))
    except ValidationError as error:
        return [str(error)]
    return list(checked("prices and rules", lambda: faults(changed)).broken or ())


def put(*path: str | int, to: Any) -> Callable[[Document], None]:
    """A change of one field."""

    def change(document: Document) -> None:
        parent: Any = document
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = to

    return change


def verify(*words: str | Path) -> tuple[int, str]:
    run = CliRunner().invoke(main, ["verify", *map(str, words)])
    return run.exit_code, run.output


@pytest.fixture(scope="module")
def asked_about() -> MixedPlan:
    """A pipeline with its choices and changes of its parts, one of which another layout wins."""
    plan = make_mixed_plan(asked(0), choices=True, robustness=True).document
    assert list(stated_faults_on_parts(plan)) == []
    assert plan.choices
    assert plan.robustness is not None
    assert any(scenario.winner for scenario in plan.robustness.scenarios)
    return plan


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("choices", 0, "choice"), "cuda_graph"),
        (("choices", 0, "value"), 74.0),
        (("choices", 0, "status"), "optimal"),
        (("choices", 0, "lower_bound_s_without"), 0.2),
        (("choices", 0, "pairs"), 3),
        (("robustness", "step_time_band"), [0.9, 1.1]),
        (("robustness", "memory_band"), [0.9, 1.1]),
        (("robustness", "same_winner"), True),
        (("robustness", "scenarios", 0, "change"), "compute 9 % slower"),
        (("robustness", "scenarios", 0, "step_time_s"), 0.311),
        (("robustness", "scenarios", 0, "best_step_time_s"), 0.313),
        (("robustness", "scenarios", 0, "loss_at_most"), 0.01),
        (("robustness", "scenarios", 5, "winner", "step_time_s"), 0.25),
        (("robustness", "scenarios", 5, "winner", "slower_pct"), -19.0),
        (("robustness", "scenarios", 5, "winner", "pp"), 3),
        (("robustness", "scenarios", 5, "winner", "stages", 0, 0), 9),
        (("solver", "priced"), 10**6),
        (("alone", 0, "lower_bound_s"), 7.0),
    ],
)
def test_searches_about_a_pipeline_do_not_contradict_themselves(
    asked_about: MixedPlan, path: tuple[str | int, ...], value: Any
) -> None:
    assert forged(asked_about, put(*path, to=value), stated_faults_on_parts)


def test_what_was_planned_holds(result: MixedResult, folder: Path) -> None:
    assert list(mixed_faults(result.document)) == []
    assert read_mixed_plan(folder / "mixed_plan.yaml") == result.document
    for path in (folder, folder / "mixed_plan.yaml"):
        code, text = verify(path, "--json")
        assert code == 0, text
        document = json.loads(text)
        assert document["passed"]
        assert {check["check"]: check["passed"] for check in document["checks"]} == {
            "document": True,
            "versions": True,
            "edits by hand": True,
            "prices and rules": True,
            "launch files": True,
        }


def test_saved_json_output_holds(result: MixedResult, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(mixed_document(result.document)))
    assert audit_plan(path).passed


def test_a_plan_of_a_search_that_ended_before_all_was_counted_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some pipelines are priced first: `verify` refused such a plan as 43 priced of 0."""

    def ends(*args: Any) -> PromisingRows:
        promising_rows(*args)
        raise OutOfTimeError

    monkeypatch.setattr(service, "promising_rows", ends)
    plan = make_mixed_plan(asked(1)).document
    assert plan.layout is not None
    assert plan.solver.priced > 0
    assert list(stated_faults_on_parts(plan)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2])
def test_plans_of_the_brute_force_cases_hold(seed: int) -> None:
    """`make_mixed_plan` verifies by itself, and raises where anything does not hold."""
    assert list(mixed_faults(make_mixed_plan(asked(seed)).document)) == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", some((*range(3, 60), 0, 1)))
def test_plans_of_all_brute_force_cases_hold(seed: int) -> None:
    assert list(mixed_faults(make_mixed_plan(asked(seed)).document)) == []


def move_a_layer(document: Document) -> None:
    document["ranks"][0]["layers"] -= 1
    document["ranks"][1]["layers"] += 1
    document["layout"]["stages"] = [[rank["layers"]] for rank in document["ranks"]]


def say_another_price(document: Document) -> None:
    """Everywhere, and the bound with it."""
    price_s = 0.9 * document["objective"]["step_time_s"]
    document["objective"] |= {"step_time_s": price_s, "lower_bound_s": price_s}
    document["predicted"]["step_time_s"] = price_s


def turn_the_order(document: Document) -> None:
    """The A100s first, with the layers of the H100s."""
    for name in ("runs_on", "nodes"):
        document[name] = document[name][::-1]
    first, second = document["ranks"]
    for key in ("part", "device"):
        first[key], second[key] = second[key], first[key]


def halve_the_nodes(document: Document) -> None:
    for each in document["nodes"]:
        each[1] //= 2


def hide_the_price_alone(document: Document) -> None:
    """A part alone that is faster than the plan."""
    document["alone"][0] |= {"step_time_s": 1.0, "lower_bound_s": 1.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("ranks", 0, "layers", to=24), "hold 31 of 32 layers"),
        (put("ranks", 1, "layers", to=0), "each must have one"),
        (move_a_layer, "priced again"),
        (move_a_layer, "rank 0: memory_gib"),
        (put("layout", "stages", to=[[24], [8]]), "layout.stages"),
        (put("layout", "pp", to=4), "not 0 to 3 in turn"),
        (put("layout", "dp", to=4), "2 nodes have 16"),
        (put("layout", "num_micro_batches", to=4), "the global batch of 64"),
        (put("layout", "recompute", to="selective"), "layout.recompute is selective"),
        (put("layout", "zero_stage", to=0), "rank 0: memory_gib"),
        (put("layout", "micro_batch", to=2), "the global batch of 64"),
        (put("inputs", "pins", to={"tp": 4}), "tp is 2, pinned to 4"),
        (put("inputs", "forbids", to=["pp"]), "pp is forbidden"),
        (put("inputs", "framework", to="fsdp2"), "dgx-h100: "),
        (put("inputs", "gpus", to=8), "inputs.gpus is 8"),
        (say_another_price, "priced again"),
        (put("predicted", "breakdown_s", "gemm", to=0.5), "breakdown_s.gemm"),
        (put("predicted", "mfu", to=0.9), "mfu is 0.9"),
        (put("predicted", "tflops_per_gpu", to=1.0), "tflops_per_gpu is 1.0"),
        (put("predicted", "tokens_per_s_per_gpu", to=1.0), "tokens_per_s_per_gpu is 1.0"),
        (put("predicted", "memory_gib", to=[1.0]), "memory_gib is [1.0]"),
        (put("predicted", "error_band", "low", to=0.99), "error_band"),
        (put("objective", "lower_bound_s", to=9.0), "above the price"),
        (put("objective", "lower_bound_s", to=1.0), "gap"),
        (put("objective", "lower_bound_s", to=None), "called optimal"),
        (put("status", to="feasible"), "called feasible"),
        (put("ranks", 1, "memory_gib", to=5.0), "rank 1: memory_gib is 5.0"),
        (put("ranks", 1, "usable_gib", to=90.0), "rank 1: usable_gib is 90.0"),
        (put("ranks", 1, "device", to="h100-sxm-80gb"), "rank 1 is on h100-sxm-80gb"),
        (put("ranks", 1, "part", to="dgx-h100"), "must be two or more"),
        (turn_the_order, "priced again"),
        (put("runs_on", to=["dgx-a100", "dgx-h100"]), "runs_on"),
        (put("nodes", to=[["dgx-a100", 2], ["dgx-h100", 2]]), "nodes are of"),
        (halve_the_nodes, "1 nodes have 8"),
        (put("cluster", "parts", 1, "gpus", to=8), "the part has 8"),
        (put("cluster", "between_gbps_per_gpu", to=1.0), "priced again"),
        (hide_the_price_alone, "less than the plan's"),
        (put("alone", 0, "lower_bound_s", to=1.0), "does not carry the plan's"),
        (put("alone", 1, "status", to="infeasible"), "status infeasible with a step"),
        (put("execution", "cuda_graph", to="none"), "priced again"),
        (put("layout", to=None), "no layout"),
    ],
)
def test_what_is_forged_is_found(
    result: MixedResult, change: Callable[[Document], object], words: str
) -> None:
    found = forged(result.document, change)
    assert any(words in fault for fault in found), found


@pytest.mark.slow
def test_no_field_that_decides_can_be_changed(result: MixedResult) -> None:
    """Each value of the deciding sections changed by itself, the digest made to fit."""
    document = mixed_document(result.document)
    rng = random.Random("mixed")
    changed = 0
    for keys in leaves(document):
        # A search that ended early may have met its bound unawares: the digest alone tells.
        if keys[0] not in DECIDING or (keys[0], keys[-1]) == ("alone", "status"):
            continue
        value: Any = document
        for key in keys:
            value = value[key]
        assert forged(result.document, put(*keys, to=other(rng, keys, value))), keys
        changed += 1
    assert changed > 80


def test_a_rank_that_does_not_fit_is_found() -> None:
    """A document that says everything as the cost model does, on a part with less HBM than it takes."""
    document = make_mixed_plan(tight(11.0)).document
    assert list(mixed_faults(document)) == []
    data = mixed_document(document)
    small = data["cluster"]["parts"][1]["cluster"]["device"]
    small["hbm_gib"] = 5.0
    found = list(mixed_faults(MixedPlan.model_validate(data)))
    assert any(fault.startswith("other: hbm: pipeline rank 3 needs") for fault in found), found


def test_an_edit_by_hand_is_found_and_the_exit_code_says_so(folder: Path) -> None:
    path = folder / "mixed_plan.yaml"
    path.write_text(path.read_text().replace("rows: ", "rows: 1", 1))
    code, text = verify(path)
    assert code == 1
    assert "its digest differs" in " ".join(text.split())


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("hostfile.template", "dgx-h100-node-00001", "dgx-a100-node-00009"),
        ("launch.sh", "hostfile", "hosts"),
        ("megatron_args.json", '"--tensor-model-parallel-size", "2"', '"--tensor-model-parallel-size", "4"'),
    ],
)  # fmt: skip
def test_edited_launch_files_are_found(folder: Path, name: str, before: str, after: str) -> None:
    text = (folder / name).read_text()
    if before not in text:
        before, after = "2", "4"
    (folder / name).write_text(text.replace(before, after, 1))
    code, words = verify(folder)
    assert code == 1
    assert name in words


def test_a_lost_launch_file_is_found(folder: Path) -> None:
    (folder / "env.json").unlink()
    code, words = verify(folder)
    assert code == 1
    assert "env.json is missing" in words


def test_a_part_alone_is_checked_with_its_own_plan(alone: MixedResult, tmp_path: Path) -> None:
    assert alone.document.runs_on == ["dgx-h100"]
    out = tmp_path / "out"
    write_files(out, mixed_files(alone))
    code, text = verify(out / "mixed_plan.yaml")
    assert code == 0, text
    assert "plan of the part alone" in text
    faster = alone.document.model_copy(
        update={"objective": alone.document.objective.model_copy(update={"step_time_s": 1.0})}
    )
    assert any("that of dgx-h100 alone" in fault for fault in mixed_faults(faster))
    (out / "plan.yaml").unlink()
    code, text = verify(out / "mixed_plan.yaml")
    assert code == 1
    assert "plan.yaml" in "".join(text.split())  # a long path may be broken


def test_what_cannot_be_read_is_said(folder: Path, tmp_path: Path) -> None:
    path = folder / "mixed_plan.yaml"
    with pytest.raises(InputError, match="a plan on a mixed cluster"):
        read_plan(path)
    path.write_text(path.read_text().replace("layers: 25", "layers: many"))
    code, text = verify(path)
    assert code == 1
    assert "ranks" in text
    path.write_text("kind: mixed-plan\n")
    code, text = verify(path)
    assert code == 2
    plain = tmp_path / "plain.yaml"
    plain.write_text("kind: other\n")
    with pytest.raises(InputError, match=r"mixed_plan\.yaml"):
        read_mixed_plan(plain)


def test_a_plan_that_does_not_hold_is_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search says another price than the cost model: an internal error, no document."""

    class Cheaper(MixedSearch):
        def run(self) -> MixedOutcome:
            outcome = super().run()
            assert outcome.best is not None
            price = outcome.best.price
            assert isinstance(price, MixedPrice)
            outcome.best.price = replace(price, step_time_s=0.9 * price.step_time_s)
            return outcome

    monkeypatch.setattr(service, "MixedSearch", Cheaper)
    with pytest.raises(InternalError, match="is not the predicted"):
        make_mixed_plan(tight(80.0))


@pytest.mark.slow
def test_it_shares_nothing_with_the_search() -> None:
    """Nor does it load the solver."""
    names = ("kernel", "promising", "service")
    program = (
        "import sys, meshwright.planner.mixed.verify; "
        f"print([n for n in {names!r} if 'meshwright.planner.mixed.' + n in sys.modules], "
        "'ortools' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["[]", "False"]


def test_explain_prints_what_plan_printed(result: MixedResult, folder: Path) -> None:
    run = CliRunner().invoke(main, ["explain", str(folder)])
    assert run.exit_code == 0, run.output
    for words in ("dgx-h100 then dgx-a100", "Parts alone", "Proof"):
        assert words in run.output
    run = CliRunner().invoke(main, ["explain", str(folder / "mixed_plan.yaml"), "--json"])
    document = json.loads(run.output)
    assert document.pop("changes")
    assert document.pop("single_choices") is None
    assert document == {"schema": 1, **mixed_document(result.document)}


def test_report_writes_a_page(folder: Path, alone: MixedResult, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run = CliRunner().invoke(main, ["report", str(folder), "-o", str(page)])
    assert run.exit_code == 0, run.output
    text = page.read_text()
    assert "A pipeline through dgx-h100 then dgx-a100" in text
    assert 'id="chart-breakdown"' in text
    own = tmp_path / "mixed_plan.yaml"
    own.write_text(mixed_text(alone.document))
    run = CliRunner().invoke(main, ["report", str(own), "-o", str(page), "--force"])
    assert run.exit_code == 0, run.output
    assert "Fastest on dgx-h100 alone" in page.read_text()
    run = CliRunner().invoke(main, ["report", str(own), "-o", str(page), "--force", "--sweep"])
    assert run.exit_code == 2
    assert "--sweep" in run.output


def test_without_an_answer_explain_says_so(result: MixedResult, tmp_path: Path) -> None:
    nothing = result.document.model_copy(update={"status": "infeasible", "runs_on": []})
    path = tmp_path / "mixed_plan.yaml"
    path.write_text(mixed_text(nothing))
    run = CliRunner().invoke(main, ["explain", str(path)])
    assert run.exit_code == 1
    assert "status is infeasible" in run.output


@pytest.mark.soak
def test_hosts_that_lack_room_are_found(tmp_path: Path) -> None:
    """The slower part's nodes hold what is offloaded there, and no less is said to do."""
    plan = planned(tmp_path, f"{PIN},optimizer_offload=100").document
    assert plan.layout is not None
    assert plan.predicted is not None
    held_gib = plan.predicted.host_memory_gib
    assert held_gib is not None
    for limit_gib, is_short in ((held_gib + 1, False), (held_gib - 1, True)):
        document = copy.deepcopy(mixed_document(plan))
        for part in (*document["cluster"]["parts"], document["inputs"]):
            part["cluster"]["host_memory_gib"] = limit_gib
        broken = list(mixed_faults(MixedPlan.model_validate(document)))
        assert any("a host lacks 1.0 GiB" in words for words in broken) == is_short
        assert len(broken) == is_short
