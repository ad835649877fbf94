"""Each sentence of an infeasible answer, planned again: the change works, one step less does not.

Numbers are taken from the sentences themselves, as a reader would.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from meshwright.cluster_specs.reader import load_cluster
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.workload import Execution
from meshwright.frameworks.catalog import framework_named
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.plan import infeasible
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.plan_request import PlanRequest
from tests.planner.plan.test_planner_service import request

BIG = load_catalog_model("llama-3-70b")
SMALL, CARD = load_catalog_model("llama-3.1-8b"), load_cluster("rtx-4090-pcie")
PRIME = request(
    model=load_catalog_model("qwen3-8b"), framework="fsdp2", gpus=20, global_batch=61, seq_len=777
)
CASES = {
    "too few GPUs": request(model=BIG, gpus=8, forbids=("optimizer-offload",)),
    "two pins": request(model=BIG, gpus=64, pins={"tp": 1, "pp": 2}),
    "a pin that does not divide": request(pins={"dp": 3}),
    "a reserve": request(gpus=8, reserve_gib=62.0, forbids=("optimizer-offload",)),
    "bans": request(
        model=BIG,
        gpus=16,
        forbids=("recompute", "optimizer-offload"),
        pins={"tp": 8, "pp": 2},
    ),
    "a narrow precision": request(precision="mxfp8", gpus=8),
    "a batch of a prime": PRIME,
    "room in the host's memory": request(
        model=load_catalog_model("llama-2-7b"),
        cluster=CARD,
        gpus=1,
        framework="deepspeed",
        global_batch=8,
        seq_len=512,
    ),
    "adapters of few bits": request(
        model=SMALL, cluster=CARD, gpus=1, framework="fsdp2", global_batch=8, seq_len=2048
    ),
    "two that go together": request(
        model=SMALL, cluster=CARD, gpus=1, framework="fsdp2", global_batch=8, seq_len=16384
    ),
    "long sequences": request(
        model=load_catalog_model("llama-3.2-1b"), framework="fsdp2", gpus=1, seq_len=65536
    ),
    "a framework without its layers": request(
        model=load_catalog_model("mamba2-2.7b"), framework="torchtitan", gpus=8
    ),
    "preferences": request(model=BIG, framework="fsdp2", kind="dpo", gpus=8),
    "a million tokens": request(model=SMALL, gpus=8, global_batch=1, seq_len=1_048_576),
}


def changed(asked: PlanRequest, sentence: str) -> tuple[PlanRequest, list[PlanRequest]]:
    """The request with a sentence obeyed, and requests that go one step less far."""
    if pair := re.match(r"(.+), and (.+)", sentence):
        return changed(changed(asked, pair[1])[0], pair[2])
    number = float(next(iter(re.findall(r"[\d.]+", sentence)), "0"))
    pins = dict(asked.pins)
    less: list[PlanRequest] = []
    if pin := re.match(r"pin (\w+)=(\d+), not (\d+)", sentence):
        name, value, was = pin[1], int(pin[2]), int(pin[3])
        between = range(min(value, was) + 1, max(value, was))
        less = [replace(asked, pins={**pins, name: nearer}) for nearer in between]
        enough = replace(asked, pins={**pins, name: value})
    elif pin := re.match(r"drop the pin (\w+)=", sentence):
        del pins[pin[1]]
        enough = replace(asked, pins=pins)
    elif sentence.startswith("allow "):
        ban = sentence.removeprefix("allow ")
        enough = replace(asked, forbids=tuple(each for each in asked.forbids if each != ban))
    elif permit := re.match(r"permit ([\w-]+) \(--allow \1\)", sentence):
        enough = replace(asked, allow=(permit[1],))
    elif adapters := re.search(r"\(--train ([\w-]+)\)", sentence):
        enough = replace(
            asked, adapters=AdapterSpec.model_validate({"method": adapters[1]}), reference=None
        )
    elif loss := re.search(r"\(--loss ([\w-]+)\)", sentence):
        enough = replace(asked, loss=loss[1])
    elif reference := re.search(r"\(--reference ([\w-]+)\)", sentence):
        enough = replace(asked, reference=reference[1])
    elif precision := re.match(r"train in (\w+),", sentence):
        enough = replace(asked, precision=precision[1])
    elif framework := re.match(r"take --framework (\w+), not (\w+)", sentence):
        assert framework[2] == asked.framework
        enough = replace(asked, framework=framework_named(framework[1]).name)
    elif sentence.startswith("reserve "):
        enough, less = (
            replace(asked, reserve_gib=number),
            [replace(asked, reserve_gib=number + 0.1)],
        )
    elif sentence.startswith("take ") and "sequences a step" in sentence:
        enough = replace(asked, global_batch=int(number))
    elif sentence.startswith("take a memory risk"):
        enough = replace(asked, memory_risk=number)
    elif sentence.startswith("take GPUs with"):
        enough, less = with_hbm(asked, number), [with_hbm(asked, number - 1)]
    else:
        assert re.fullmatch(r"take \d+ GPUs, not \d+", sentence), sentence
        gpus, node = int(number), asked.cluster.gpus_per_node
        fewer = gpus // 2 if gpus <= node else gpus - node
        enough, less = replace(asked, gpus=gpus), [replace(asked, gpus=fewer)]
    return enough, less


def with_hbm(asked: PlanRequest, hbm_gib: float) -> PlanRequest:
    device = asked.cluster.device.model_copy(update={"hbm_gib": hbm_gib})
    return replace(asked, cluster=asked.cluster.model_copy(update={"device": device}))


def has_plan(asked: PlanRequest) -> bool:
    return fastest_plan(asked).layout is not None


def sentences() -> Iterator[tuple[PlanRequest, str]]:
    for asked in CASES.values():
        answer = fastest_plan(asked).infeasible
        assert answer is not None
        assert answer.conflict
        for sentence in answer.smallest_changes:
            yield asked, sentence


def test_a_batch_that_no_ranks_divide_is_named() -> None:
    """Nothing but more memory and more GPUs was offered, where one sequence less will do."""
    answer = fastest_plan(PRIME).infeasible
    assert answer is not None
    batches = [each.value for each in answer.changes if each.change == "global-batch"]
    assert batches == [60, 80]
    assert "take 60 sequences a step, which the GPUs divide, not 61" in answer.smallest_changes
    assert has_plan(replace(PRIME, global_batch=60))


def test_another_framework_is_offered_where_the_rules_of_one_are_broken() -> None:
    """A rule's remedy named one, and nothing was offered."""
    answer = fastest_plan(CASES["a framework without its layers"]).infeasible
    assert answer is not None
    assert [each.value for each in answer.changes] == ["megatron"]


def test_another_framework_is_offered_where_its_layouts_need_less_memory() -> None:
    """LoRA of 30B on four RTX 4090: DeepSpeed was told to take 16, where stages of Megatron hold it."""
    asked = request(
        model=load_catalog_model("qwen3-30b-a3b"),
        cluster=CARD,
        gpus=4,
        framework="deepspeed",
        global_batch=16,
        seq_len=2048,
        adapters=AdapterSpec(method="lora", rank=8),
    )
    answer = fastest_plan(asked).infeasible
    assert answer is not None
    assert answer.smallest_changes[0] == "take --framework megatron, not deepspeed"
    assert has_plan(changed(asked, answer.smallest_changes[0])[0])


@pytest.mark.parametrize(
    ("case", "change", "value", "others_gpus"),
    [
        ("room in the host's memory", "permit", "parameter-offload", 2),
        ("long sequences", "loss", "liger", 2),
        ("adapters of few bits", "train", "qlora", 2),
        ("preferences", "reference", "precomputed", None),
    ],
)
def test_what_makes_room_is_offered_with_what_it_needs(
    case: str, change: str, value: str, others_gpus: int | None
) -> None:
    """More GPUs and larger ones were all that was offered; inside a node a few are enough too."""
    asked = CASES[case]
    answer = fastest_plan(asked).infeasible
    assert answer is not None
    (room,) = (each for each in answer.changes if each.change == change)
    assert room.value == value
    assert room.needs_gib is not None
    assert room.usable_gib is not None
    assert 0 < room.needs_gib <= room.usable_gib
    assert {str(each.change): each.value for each in answer.changes}.get("gpus") == others_gpus
    enough, _ = changed(asked, answer.smallest_changes[answer.changes.index(room)])
    assert has_plan(enough)


def test_two_changes_are_offered_where_no_single_one_keeps_the_machine() -> None:
    asked = CASES["two that go together"]
    answer = fastest_plan(asked).infeasible
    assert answer is not None
    (pair,) = (each for each in answer.changes if each.together_with is not None)
    assert pair == answer.changes[-1]
    assert pair.needs_gib is not None
    assert pair.usable_gib is not None
    assert 0 < pair.needs_gib <= pair.usable_gib
    words = answer.smallest_changes[-1]
    assert "(--loss liger), and train adapters" in words
    enough, _ = changed(asked, words)
    assert (enough.loss, enough.adapters and enough.adapters.method) == ("liger", "qlora")
    assert has_plan(enough)
    for half in words.split(", and "):
        assert not has_plan(changed(asked, half)[0])


@pytest.mark.parametrize("framework", ["megatron", "fsdp2"])
def test_what_makes_room_under_another_framework_is_offered(framework: str) -> None:
    """Under Megatron 32 GPUs or larger ones were all that was offered; FSDP2 has a loss in chunks, and keeps
    inputs of layers on the host. FSDP2 itself was told to take an even chance of running out instead.
    """
    asked = replace(CASES["a million tokens"], framework=framework_named(framework).name)
    answer = fastest_plan(asked).infeasible
    assert answer is not None
    words = answer.smallest_changes[-1]
    here = "" if framework == "fsdp2" else f"take --framework fsdp2, not {framework}, and "
    assert words.startswith(
        f"{here}permit activation-offload (--allow activation-offload), and take"
    )
    enough, _ = changed(asked, words)
    assert enough.loss == "liger"
    plan = fastest_plan(enough)
    assert plan.predicted is not None
    needs_gib = answer.changes[-1].needs_gib
    assert needs_gib is not None
    assert max(plan.predicted.memory_gib) <= needs_gib


def test_two_pins_that_are_both_wrong_are_dropped_together() -> None:
    asked = request(model=BIG, gpus=64, pins={"tp": 3, "cp": 5})
    answer = fastest_plan(asked).infeasible
    assert answer is not None
    assert answer.smallest_changes[0].startswith("drop the pin tp=3, and drop the pin cp=5: ")
    enough, _ = changed(asked, answer.smallest_changes[0].split(": ", maxsplit=1)[0])
    assert enough.pins == {}
    assert has_plan(enough)


@pytest.mark.soak
def test_every_sentence_is_true() -> None:
    kinds = set()
    checked = list(sentences())
    for asked, sentence in checked:
        kinds.add(re.match(r"[a-z]+( [a-z]+)?( GPUs)?", sentence)[0])  # type: ignore[index]
        enough, less = changed(asked, sentence)
        assert has_plan(enough), sentence
        for short in less:
            assert not has_plan(short), sentence
    print(f"{len(checked)} sentences planned again, of {len(kinds)} kinds: {sorted(kinds)}")
    assert len(checked) >= 10


@pytest.mark.slow
def test_a_change_that_another_request_tried_is_not_tried_again() -> None:
    """In a batch, jobs that differ in their GPUs ask of the same larger numbers."""
    pins = {"tp": 8, "pp": 1, "optimizer_offload": 0}
    without = ("cuda-graph", "cp-a2a", "tp-overlap")
    too_few = [request(model=BIG, gpus=gpus, pins=pins, without=without) for gpus in (8, 16)]
    alone = []
    for each in too_few:
        infeasible._answer_kept.cache_clear()
        alone.append(fastest_plan(each).infeasible)
    infeasible._answer_kept.cache_clear()
    assert [fastest_plan(each).infeasible for each in too_few] == alone
    assert None not in alone
    assert infeasible._answer_kept.cache_info().hits


def test_a_trial_with_any_gpus_left_out_has_an_answer_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No document says so of a cluster, but its layouts are mapped otherwise."""
    monkeypatch.setattr(infeasible, "_found_gib", lambda asked: float(asked.cluster.takes_any_gpus))
    whole = request(gpus=8)
    any_gpus = replace(whole, cluster=whole.cluster.with_any_gpus())
    infeasible._answer_kept.cache_clear()
    assert [infeasible._fullest_gib(each) for each in (whole, any_gpus)] == [0.0, 1.0]
    infeasible._answer_kept.cache_clear()


def test_where_nothing_is_usable_only_what_leaves_some_is_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reserve above the HBM: other frameworks, permissions and losses cannot help."""
    searched: list[float] = []
    kept = infeasible._found_run_so_gib

    def found(asked: PlanRequest, execution: Execution | None) -> float | None:
        searched.append(usable_hbm_gib(asked.workload()))
        return kept(asked, execution)

    monkeypatch.setattr(infeasible, "_found_run_so_gib", found)
    asked = request(gpus=8, reserve_gib=95.0)
    assert usable_hbm_gib(asked.workload()) < 0
    plan = fastest_plan(asked)
    assert plan.infeasible is not None
    reserve = next(each for each in plan.infeasible.changes if each.change == "reserve-gib")
    assert min(searched) > 0
    assert len(searched) < 20
    assert isinstance(reserve.value, float)
    assert fastest_plan(replace(asked, reserve_gib=reserve.value)).layout is not None


def test_what_the_leanest_layout_needs_is_no_more_than_a_plan_needs() -> None:
    """It said that 70B needs 8.8 GiB, of which a plan takes 8.2: every second pp alone was looked at."""
    tight = request(model=BIG, gpus=64, global_batch=256, seq_len=8192, reserve_gib=64.4)
    fullest_gib = infeasible._fullest_gib(tight)
    assert fullest_gib is not None
    conflict = infeasible.conflict_of(replace(tight, reserve_gib=75.0))
    tried = {int(pp) for table in conflict.candidates for pp in np.unique(table.layouts.pp)}
    assert {1, 2, 4, 8, 16, 32, 64} <= tried
    least_gib = min(float(table.memory_gib.min()) for table in conflict.candidates)
    assert least_gib <= fullest_gib <= usable_hbm_gib(tight.workload())


@pytest.mark.parametrize(
    ("values", "gpus", "left"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], 8, [1, 2, 3, 4, 6, 8]),
        ([1, 2, 3, 4, 8], 8, [1, 2, 4, 8]),
        ([1, 2, 4, 8], 8, [1, 4, 8]),
        ([1, 2, 4, 61], 8, [1, 4, 61]),
        ([0, 1, 2, 3], 0, [0, 2, 3]),
    ],
)
def test_degrees_that_divide_the_gpus_are_left_out_last(
    values: list[int], gpus: int, left: list[int]
) -> None:
    assert infeasible._thinned(values, gpus) == left
