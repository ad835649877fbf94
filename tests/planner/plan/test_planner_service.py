"""Requests in, plans out: proofs, verification, explanations, limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.cluster_specs.reader import load_cluster
from meshwright.costmodel.layout import Layout
from meshwright.errors import InputError, InternalError
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.plan.assemble import training_warnings
from meshwright.planner.plan.best_plan import BestPlan, search_with_buckets
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan, make_plan
from meshwright.planner.plan.nodes import better_of, decide_on_idle_gpus, idle_document
from meshwright.planner.plan.robustness import Answer, AnsweredAhead
from meshwright.planner.plan.verify import faults, verify
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.pricing import Certificate, Outcome
from meshwright.planner.solvers import processes


def request(**changes: Any) -> PlanRequest:
    given: dict[str, Any] = {
        "model": load_catalog_model("llama-3-8b"),
        "cluster": load_cluster("dgx-h100"),
        "gpus": 16,
        "global_batch": 64,
        "seq_len": 8192,
    }
    return PlanRequest(**{**given, **changes})


@pytest.fixture(scope="module")
def found() -> Plan:
    return fastest_plan(request())


def test_plan_is_proven(found: Plan) -> None:
    assert found.status == "optimal"
    assert found.objective.gap == 0
    assert found.objective.step_time_s == found.objective.lower_bound_s
    assert found.predicted is not None
    assert sum(found.predicted.breakdown_s.values()) == pytest.approx(
        found.predicted.step_time_s, rel=1e-12
    )
    assert found.solver.bound_rounds >= 1
    assert found.solver.layouts_considered > 1000


def test_every_rank_has_its_gpu(found: Plan) -> None:
    assert found.mapping is not None
    assert found.mapping.ranks is not None
    assert sorted(found.mapping.ranks) == [(node, gpu) for node in range(2) for gpu in range(8)]


def test_progress_is_told() -> None:
    heard: list[str] = []
    few = {"tp": 2, "pp": 1, "cp": 1, "micro_batch": 1}
    fastest_plan(request(gpus=8, pins=few), heard.append)
    assert heard
    assert all("s a step" in text for text in heard)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"objective": {"step_time_s": 1.0, "lower_bound_s": 1.0, "gap": 0.0}},
            "is not the predicted",
        ),
        ({"status": "optimal", "objective_bound": 0.5}, "called optimal"),
        ({"layout": {"stages": [[31]]}}, "hold 31 of 32 layers"),
        ({"layout": {"zero_stage": 0, "micro_batch": 16}}, "micro-batches do not make up"),
        ({"predicted": {"breakdown_s": {"gemm": 1.0}}}, "breakdown adds up"),
        ({"mapping": {"ranks": [[0, 0]] * 16}}, "not a permutation"),
        ({"predicted": {"memory_gib": [1.0]}}, "memory of the stages"),
    ],
)
def test_a_tampered_plan_is_caught(found: Plan, change: dict[str, Any], words: str) -> None:
    document = found.model_dump(by_alias=True)
    if "objective_bound" in change:
        document["objective"]["lower_bound_s"] *= change["objective_bound"]
    for part in ("objective", "layout", "predicted", "mapping"):
        document[part].update(change.get(part, {}))
    tampered = Plan.model_validate(document)
    assert any(words in fault for fault in faults(request(), tampered))
    with pytest.raises(InternalError, match=words):
        verify(request(), tampered)


def test_broken_wishes_are_caught(found: Plan) -> None:
    assert found.layout is not None
    other = 1 if found.layout.tp > 1 else 2
    assert any("pinned to" in fault for fault in faults(request(pins={"tp": other}), found))
    assert any(
        "is forbidden" in fault
        for fault in faults(request(forbids=(f"zero-{found.layout.zero_stage}",)), found)
    )


def test_pins_and_bans_are_kept() -> None:
    pins: dict[str, int | str] = {"tp": 4, "pp": 2, "recompute": "full"}
    made = fastest_plan(request(pins=pins, forbids=("interleaving", "zero-0", "cp")))
    assert made.layout is not None
    assert (made.layout.tp, made.layout.pp, made.layout.recompute) == (4, 2, "full")
    assert (made.layout.vpp, made.layout.cp, made.layout.zero_stage) == (1, 1, 1)


@pytest.mark.slow
def test_more_constraints_never_help(found: Plan) -> None:
    bound = fastest_plan(request(forbids=("pp",)))
    assert found.objective.step_time_s is not None
    assert bound.objective.step_time_s is not None
    assert bound.objective.step_time_s >= found.objective.step_time_s


@pytest.mark.slow
def test_odd_gpu_counts_leave_gpus_idle_and_say_so() -> None:
    made = fastest_plan(request(gpus=13, forbids=("pp",)))
    assert made.layout is not None
    assert made.layout.tp * made.layout.cp * made.layout.pp * made.layout.dp < 13
    assert any("stay idle" in text for text in made.warnings)


def test_a_batch_given_in_tokens_is_doubted() -> None:
    asked = request(global_batch=2**22, seq_len=4096, pins={"tp": 1, "cp": 1, "pp": 1, "ep": 1})
    (words,) = [words for words in training_warnings(asked) if "counts sequences" in words]
    assert words.endswith("a batch of 4,194,304 tokens is one of 1,024")
    published = replace(asked, global_batch=15_360)
    assert not any("counts sequences" in words for words in training_warnings(published))


def test_a_checkpoint_of_few_bits_is_said_where_training_holds_others() -> None:
    asked = request(framework="fsdp2")
    narrow = asked.model.model_copy(update={"stored_as": "bitsandbytes 4-bit"})
    words = "keeps its weights as bitsandbytes 4-bit, this plan at 16 bits: call dequantize()"
    for adapters, expected in ((None, 1), (AdapterSpec(), 1), (AdapterSpec(method="qlora"), 0)):
        trained = replace(asked, model=narrow, adapters=adapters)
        assert sum(words in warning for warning in training_warnings(trained)) == expected


@pytest.mark.parametrize(("cluster", "expected"), [("mi355x", 1), ("dgx-h200", 0)])
def test_a_device_without_measured_runs_is_said(cluster: str, expected: int) -> None:
    """A plan for MI355X printed the band of 108 comparable jobs, all on other devices, and no more."""
    pins = {"tp": 1, "cp": 1, "pp": 1, "micro_batch": 1}
    made = fastest_plan(request(pins=pins, cluster=load_cluster(cluster)))
    assert sum("fitted on no step of a" in text for text in made.warnings) == expected


def test_counts_that_no_price_reads_are_said() -> None:
    """A shared expert under another family's name was priced as none, and `model` alone said so."""
    asked = request()
    unread = asked.model.model_copy(
        update={"left_out": ("n_shared_experts 1", "router_jitter 0.01")}
    )
    words = [text for text in training_warnings(replace(asked, model=unread)) if "no price" in text]
    assert len(words) == 1
    assert words[0].startswith("the model's file says n_shared_experts 1, which its family")
    assert not any("no price" in text for text in training_warnings(asked))


@pytest.mark.slow
def test_exhaustive_agrees() -> None:
    small = request(
        gpus=4,
        global_batch=4,
        pins={"cp": 1, "zero_stage": 1, "micro_batch": 1, "recompute": "none"},
        forbids=("optimizer-offload", "shard-groups"),
        seq_len=4096,
    )
    quick, slow = fastest_plan(small), fastest_plan(replace(small, method="exhaustive"))
    assert quick.status == slow.status == "optimal"
    assert quick.objective.step_time_s == pytest.approx(slow.objective.step_time_s, rel=1e-12)
    assert slow.solver.method == "exhaustive"


def test_exhaustive_refuses_a_large_space() -> None:
    with pytest.raises(InputError, match="use --method cp-sat"):
        fastest_plan(request(gpus=512, global_batch=512, method="exhaustive"))


@pytest.mark.slow
def test_alternatives_are_sorted_and_legal() -> None:
    made = fastest_plan(request(gpus=8, top_k=4))
    times = [float(str(one["step_time_s"])) for one in made.alternatives]
    assert len(times) == 3
    assert times == sorted(times)
    assert made.objective.step_time_s is not None
    assert times[0] >= made.objective.step_time_s


def test_no_room_is_explained() -> None:
    made = fastest_plan(request(model=load_catalog_model("llama-3-70b"), gpus=4))
    assert made.status == "infeasible"
    assert made.layout is None
    assert made.infeasible is not None
    assert [text.split(":")[0] for text in made.infeasible.conflict] == ["hbm"]
    assert any(
        text.startswith("take ") and text.endswith("GPUs, not 4")
        for text in made.infeasible.smallest_changes
    )


@pytest.mark.slow
def test_a_change_that_is_offered_helps() -> None:
    tight = request(
        model=load_catalog_model("llama-3-70b"),
        gpus=64,
        pins={"tp": 1, "pp": 2},
        without=("cuda-graph", "cp-a2a", "tp-overlap"),
    )
    made = fastest_plan(tight)
    assert made.infeasible is not None
    assert set(made.infeasible.conflict[1:]) == {"pin tp=1", "pin pp=2"}
    assert "drop the pin tp=1" in made.infeasible.smallest_changes
    hbm, *pins = made.infeasible.rules
    assert (hbm.kind, hbm.rule, hbm.unit) == ("rule", "hbm", "GiB")
    assert hbm.missed_by is not None
    assert hbm.missed_by > 0
    assert {(rule.kind, rule.rule, rule.pinned) for rule in pins} == {
        ("pin", "tp", 1),
        ("pin", "pp", 2),
    }
    drops = [change for change in made.infeasible.changes if change.change == "drop-pin"]
    assert ("tp", 1) in {(change.field, change.asked) for change in drops}
    assert fastest_plan(replace(tight, pins={"pp": 2}, time_limit_s=20)).status in (
        "optimal",
        "feasible",
    )


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        pytest.param({"pins": {"dp": 5}}, "batch-split", marks=pytest.mark.slow),
        pytest.param({"pins": {"tp": 3}}, "heads-by-tp", marks=pytest.mark.slow),
        pytest.param({"pins": {"tp": 8, "pp": 4}}, "gpu-budget", marks=pytest.mark.soak),
        pytest.param({"pins": {"pp": 2, "vpp": 18}}, "layers-by-stages", marks=pytest.mark.slow),
        ({"precision": "mxfp8"}, "precision-on-device"),
    ],
)
def test_the_rule_that_forbids_is_named(changes: dict[str, Any], rule: str) -> None:
    made = fastest_plan(request(**changes))
    assert made.status == "infeasible"
    assert made.infeasible is not None
    assert any(text.startswith(rule) for text in made.infeasible.conflict)


def test_no_time_no_plan() -> None:
    made = fastest_plan(request(time_limit_s=0.0))
    assert made.status == "unknown"
    assert made.layout is None
    assert made.objective.gap is None


@pytest.mark.parametrize("framework", ["torchtitan", "deepspeed", "fsdp2"])
def test_other_frameworks_get_legal_plans(framework: str) -> None:
    made = fastest_plan(request(gpus=8, framework=framework))
    assert (
        made.status == "optimal"
    )  # and every rule of the framework was checked by the verification


def test_experts_are_planned() -> None:
    made = fastest_plan(request(model=load_catalog_model("olmoe-1b-7b"), gpus=8, seq_len=4096))
    assert made.status == "optimal"
    assert made.layout is not None
    assert 64 % made.layout.ep == 0


@pytest.mark.slow
def test_gpus_stay_idle_only_where_every_full_layout_is_proven_slower() -> None:
    """13 sequences on 14 GPUs: one replica per sequence leaves one idle, all 14 need tp or pp."""
    asked = request(
        gpus=14, global_batch=13, pins={"cp": 1, "micro_batch": 1}, forbids=("full-recompute",)
    )
    made = fastest_plan(asked)
    assert made.layout is not None
    assert made.idle is not None
    full = fastest_plan(replace(asked, forbids=("full-recompute", "idle-gpus")))
    if full.layout is None:
        assert made.idle.full_step_time_s is None
        assert "no layout in this space uses all 14" in made.idle.reason
    else:
        assert made.idle.full_step_time_s == pytest.approx(full.objective.step_time_s)
        assert made.objective.step_time_s is not None
        assert made.idle.full_step_time_s is not None
        assert made.idle.full_step_time_s > made.objective.step_time_s
    assert made.idle.gpus == 14 - made.layout.tp * made.layout.pp * made.layout.dp


def priced(gpus: int, seconds: float) -> Priced:
    return Priced(layout=Layout(dp=gpus), matrix={}, stages=((1,),), step_time_s=seconds)


def outcome(one: Priced | None, status: str, bound: float | None) -> Outcome:
    best = () if one is None else (one,)
    return Outcome(status=status, best=best, lower_bound_s=bound, certificate=Certificate())


@pytest.mark.parametrize(
    ("full", "gpus", "status", "bound"),
    [
        (outcome(priced(16, 1.2), "optimal", 1.2), 12, "optimal", 1.0),
        (
            outcome(priced(16, 1.2), "feasible", 1.1),
            12,
            "optimal",
            1.0,
        ),  # proven by the bound alone
        (
            outcome(priced(16, 1.2), "feasible", 0.9),
            12,
            "optimal",
            1.0,
        ),  # its bound proves nothing, and it is slower than what is known
        (outcome(priced(16, 1.0), "optimal", 1.0), 16, "optimal", 1.0),  # a tie
        (outcome(None, "infeasible", None), 12, "optimal", 1.0),
        (outcome(None, "unknown", 0.5), 12, "optimal", 1.0),
    ],
)
def test_the_full_layout_is_planned_where_it_is_not_slower(
    full: Outcome, gpus: int, status: str, bound: float
) -> None:
    answers = iter([outcome(priced(12, 1.0), "optimal", 1.0), full])
    settled = decide_on_idle_gpus(request(gpus=16), lambda _, **_begin: next(answers))
    assert (settled.outcome.best[0].layout.gpus, settled.outcome.status) == (gpus, status)
    assert settled.outcome.lower_bound_s == bound


@pytest.mark.parametrize(
    ("gpus", "batch", "words"),
    [
        (12, 64, "a global batch of 64 must divide among them; 60 or 72 would, and every"),
        (12, 5, "a global batch of 5 must divide among them; 12 would, and every"),
        (16, 64, "a global batch of 64 must divide among them, and every"),
    ],
)
def test_idle_gpus_are_told_which_batches_all_of_them_divide(
    gpus: int, batch: int, words: str
) -> None:
    nothing = outcome(None, "infeasible", None)
    asked = request(gpus=gpus, global_batch=batch)
    document = idle_document(asked, priced(8, 1.0), nothing)
    assert document is not None
    assert words in document.reason


def test_the_search_on_all_gpus_begins_with_the_fastest_that_is_known() -> None:
    known = Layout(dp=16, recompute=32, recompute_layers=3)
    first = replace(outcome(priced(12, 1.0), "optimal", 1.0), on_all_gpus=known)
    begun: list[Layout | None] = []

    def searched(
        asked: PlanRequest, /, *, begin_with: Layout | None = None, **_how: object
    ) -> Outcome:
        begun.append(begin_with)
        return outcome(priced(16, 1.2), "optimal", 1.2) if len(begun) == 2 else first

    decide_on_idle_gpus(request(gpus=16), searched)
    assert begun == [None, replace(known, recompute_layers=0)]


def test_a_step_alone_is_asked_of_one_search() -> None:
    answers = iter([outcome(priced(12, 1.0), "optimal", 1.0)])
    settled = decide_on_idle_gpus(
        request(gpus=16), lambda _, **_begin: next(answers), compares=False
    )
    assert (settled.outcome.best[0].layout.gpus, settled.full) == (12, None)


def test_the_search_on_all_gpus_can_be_left_for_later() -> None:
    """The caller runs it by another search, and the plan stays unless one on all GPUs is as fast."""
    first, tie = outcome(priced(12, 1.0), "optimal", 1.0), outcome(priced(16, 1.0), "optimal", 1.0)
    slower = outcome(priced(16, 1.2), "optimal", 1.2)
    asked: list[PlanRequest] = []

    def later(every: PlanRequest, /, **_how: object) -> Outcome:
        asked.append(every)
        return slower

    settled = decide_on_idle_gpus(request(gpus=16), lambda _, **_how: first, later=later)
    assert (settled.outcome, settled.full, asked) == (first, None, [])
    assert settled.comparison is not None
    assert settled.comparison() is slower
    assert [each.forbids for each in asked] == [("idle-gpus",)]
    assert better_of(first, slower) is first
    assert better_of(first, tie).best[0].layout.gpus == 16
    full = decide_on_idle_gpus(request(gpus=16), lambda _, **_how: tie, later=later)
    assert full.comparison is None


IDLE: dict[str, Any] = {
    "gpus": 14,
    "global_batch": 13,
    "pins": {"cp": 1, "micro_batch": 1, "zero_stage": 1, "tp": 1},
    "forbids": ("full-recompute", "selective-recompute"),
}
"""The best plan leaves a GPU idle."""


def test_idle_gpus_are_compared_beside_the_questions() -> None:
    """A plan with questions says the same of its idle GPUs as one without."""
    alone, asked = fastest_plan(request(**IDLE)), make_plan(request(**IDLE), robustness=False)
    assert alone.idle is not None
    assert alone.idle.full_step_time_s is not None
    assert asked.idle == alone.idle
    assert asked.layout == alone.layout
    assert asked.choices


def test_a_layout_on_all_gpus_that_is_as_fast_is_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def as_fast(ended: BestPlan, full: Outcome) -> BestPlan:
        return replace(ended, outcome=full, full=full, comparison=None)

    monkeypatch.setattr("meshwright.planner.plan.make_plan.beside_all_gpus", as_fast)
    # In truth it is slower, and plans without a choice of it are faster.
    monkeypatch.setattr("meshwright.planner.plan.make_plan.plan_to_adopt", lambda *_: None)
    plan = make_plan(request(**IDLE), robustness=False)
    assert plan.layout is not None
    assert plan.layout.tp * plan.layout.cp * plan.layout.pp * plan.layout.dp == 14
    assert plan.idle is None
    assert plan.choices


def test_a_layout_is_first_priced_as_it_is_likely_run() -> None:
    asked = request(gpus=8, pins={"tp": 2, "pp": 1, "cp": 1, "micro_batch": 1})
    best = search_with_buckets(asked).best[0]
    likely = replace(best.layout, recompute_layers=0)
    of_one_rank = (each for each in asked.execution_options.executions() if each.cp_comm == "p2p")
    for run_as in of_one_rank:
        once = search_with_buckets(asked, begin_with=likely, run_as=run_as, most_priced=1)
        assert [replace(each.execution, bucket_mb=None) for each in once.best] == [run_as]
        whole = search_with_buckets(asked, begin_with=likely, run_as=run_as)
        assert whole.best[0].step_time_s == best.step_time_s


@pytest.mark.slow
def test_a_search_names_its_fastest_layout_on_all_gpus() -> None:
    asked = request(
        gpus=14, global_batch=13, pins={"cp": 1, "micro_batch": 1}, forbids=("full-recompute",)
    )
    found = search_with_buckets(replace(asked, top_k=12))
    full = [each for each in found.best if int(each.layout.gpus) == 14]
    assert int(found.best[0].layout.gpus) < 14
    assert found.on_all_gpus is not None
    assert int(found.on_all_gpus.gpus) == 14
    if full:
        assert replace(found.on_all_gpus, recompute_layers=0) == replace(
            full[0].layout, recompute_layers=0
        )


@pytest.mark.slow
def test_choices_asked_while_the_search_runs_get_the_answers_that_they_get_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first price of a large space begins the searches without its choices on a second core."""
    ahead: list[set[str]] = []

    def noted(asked: AnsweredAhead, plan: Plan) -> dict[str, Answer]:
        answers = answers_of(asked, plan)
        ahead.append(set(answers))
        return answers

    answers_of = AnsweredAhead.answers
    monkeypatch.setattr(AnsweredAhead, "answers", noted)
    monkeypatch.setattr(processes, "usable_cores", lambda: 2)
    asked = request(gpus=1024, global_batch=1024, model=load_catalog_model("llama-3.1-405b"))
    plans = [make_plan(asked, robustness=False)]
    with processes.on_processes(2):
        plans.append(make_plan(asked, robustness=False))
    assert ahead[0] == set()
    assert ahead[1] & {choice.choice for choice in plans[0].choices or ()}
    apart = {"solver": plans[0].solver, "digest": ""}
    one, other = (plan.model_copy(update=apart) for plan in plans)
    assert plans[0].choices
    assert one == other


def test_the_largest_batch_has_a_plan_document() -> None:
    """A prime of ten million sequences is as many micro-batches, and ended in an internal error."""
    plan = fastest_plan(request(gpus=8, global_batch=9_999_991, seq_len=512))
    assert plan.layout is not None
    assert plan.layout.num_micro_batches == 9_999_991
