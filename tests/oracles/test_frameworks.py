"""Every parser accepts what we write and reads the plan back from it; what our rules refuse, it refuses too.

Runs in `make oracles` only. ORACLE_PYTHON is the interpreter of the environment with the frameworks.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from planner.launch.files import LaunchError, write_files
from planner.plan import Framework, Plan
from planner.plan_files import plan_files
from tests.oracles.random_plans import changed, random_plan

pytestmark = pytest.mark.oracle

PARSERS: dict[Framework, str] = {
    "megatron": "megatron",
    "torchtitan": "torchtitan",
    "deepspeed": "deepspeed",
    "fsdp2": "accelerate",
}
ACCEPTED: dict[Framework, int] = {"megatron": 300, "torchtitan": 300, "deepspeed": 300, "fsdp2": 300}


def ask(target: str, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The parser's answers, in order."""
    python = os.environ.get("ORACLE_PYTHON")
    assert python, "run `make oracles`: ORACLE_PYTHON names no interpreter"
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    script = Path(__file__).with_name("ask.py")
    done = subprocess.run(
        [python, str(script), target, str(folder / "cases.json")],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def differences(plan: Plan, answer: dict[str, Any]) -> list[str]:
    """Fields in which the parser read something else than the plan says."""
    layout = plan.layout
    assert layout is not None
    planned = layout.model_dump()
    if plan.inputs.model.moe is None:
        planned |= {"ep": answer.get("ep"), "etp": answer.get("etp")}
    return [
        f"{name}: plan {planned[name]}, read {value}"
        for name, value in answer.items()
        if name in planned and planned[name] != value
    ]


@pytest.mark.parametrize("framework", list(PARSERS))
def test_the_framework_accepts_and_reads_back_every_plan(framework: Framework, tmp_path: Path) -> None:
    rng, index, refused = random.Random(6), 0, 0
    plans: list[Plan] = []
    cases: list[dict[str, Any]] = []
    while len(plans) < ACCEPTED[framework]:
        index += 1
        drawn = random_plan(rng, framework, index)
        if drawn is None:
            continue
        plan, arch = drawn
        try:
            files = plan_files(plan)
        except LaunchError:
            refused += 1
            assert refused < 50_000
            continue
        folder = tmp_path / str(len(plans))
        write_files(folder, files)
        plans.append(plan)
        cases.append({"dir": str(folder), "world": plan.inputs.gpus, "arch": arch})
    answers = ask(PARSERS[framework], cases, tmp_path)
    assert len(answers) == len(plans)
    wrong = [
        f"{plan.inputs.model.name} {plan.layout}: {answer if not answer['ok'] else differences(plan, answer)}"
        for plan, answer in zip(plans, answers, strict=True)
        if not answer["ok"] or differences(plan, answer)
    ]
    print(
        f"{framework}: {len(plans) - len(wrong)} of {len(plans)} accepted and read back, "
        f"{len({p.inputs.model.name for p in plans})} models, "
        f"{dict(Counter(p.inputs.precision for p in plans))}, "
        f"pp {sorted({p.layout.pp for p in plans if p.layout})}"
    )
    assert not wrong, f"{len(wrong)} of {len(plans)}:\n" + "\n".join(wrong[:10])


RUN_TIME = {
    "scale-up-tp": "TP across the NVLink domain starts, and is out of the planner's space by choice",
    "scale-up-etp": "the same for experts",
    "ffn-by-tp": "the linear layers are split when the model is built",
    "expert-ffn-by-etp": "the same for experts",
    "sequence-by-tp": "the sequence is scattered in the first step",
    "megatron-moe-tp-needs-sp": "raised by the MoE layer in training",
    "kv-heads-by-tp": "heads are split when the model is built",
    "heads-by-tp": "heads are split when the model is built",
    "experts-by-ep": "experts are dealt out when the model is built",
    "sequence-by-cp": "the sequence is cut in the first step",
    "layers-by-stages": "a rank without layers deadlocks or fails to build",
    "deepspeed-experts": "expert groups are made when the model is built",
    "expert-grid": "expert groups are made when the model is built",
    "expert-axes-need-experts": "the degree has no effect on a dense model: the plan would not be what runs",
    "fsdp2-degrees": "accelerate has no such key: the plan would not be what runs",
    "deepspeed-degrees": "DeepSpeed has no such key: the plan would not be what runs",
    "torchtitan-degrees": "torchtitan has no such flag: the plan would not be what runs",
    "deepspeed-pipeline-zero": "raised by the pipeline engine",
    "deepspeed-tensor-zero": "raised by deepspeed.initialize",
    "deepspeed-even-stages": "DeepSpeed splits layers by itself: the plan would not be what runs",
    "megatron-zero-needs-pp-1": "weights gathered anew for every micro-batch: left out by choice",
    "interleaved-micro-batches": "raised by the schedule in the first step",
    "schedule-shape": "raised by the schedule in the first step, or priced for no such shape",
    "torchtitan-1f1b-micro-batches": "raised by the schedule's constructor",
    "torchtitan-split-backward": "raised by the schedule's constructor",
    "torchtitan-zero-bubble-chunks": "torchtitan asks several stages a rank of it: left out by choice",
    "vpp-needs-pp": "the degree has no effect: the plan would not be what runs",
}
"""Rules for what the parsers let through, and where it fails instead."""


@pytest.mark.parametrize("framework", list(PARSERS))
def test_our_rules_refuse_what_the_framework_refuses(
    framework: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, index = random.Random(7), 0
    refusals: list[str] = []
    cases: list[dict[str, Any]] = []
    plans: list[Plan] = []
    while refusals.count("") < 40 or len(refusals) - refusals.count("") < 150:
        index += 1
        drawn = random_plan(rng, framework, index)
        if drawn is None or _refusal(drawn[0]) != "":
            continue
        variant = changed(rng, drawn[0])
        if variant is None:
            continue
        refusal = _refusal(variant)
        if len(refusals) > 400 or (refusal == "" and refusals.count("") >= 40):
            continue
        with monkeypatch.context() as without_rules:
            for module in ("megatron", "torchtitan", "deepspeed", "accelerate"):
                without_rules.setattr(f"planner.launch.{module}.require_legal", lambda plan, *_: plan.layout)
            without_rules.setattr("planner.launch.deepspeed._require_even_stages", lambda *_: None)
            files = plan_files(variant)
        folder = tmp_path / str(len(cases))
        write_files(folder, files)
        refusals.append(refusal)
        plans.append(variant)
        cases.append({"dir": str(folder), "world": variant.inputs.gpus, "arch": drawn[1]})
    answers = ask(PARSERS[framework], cases, tmp_path)
    wrong, by_parser, at_run_time = [], 0, Counter[str]()
    for plan, refusal, answer in zip(plans, refusals, answers, strict=True):
        rules = [line.split(":")[0] for line in refusal.splitlines()[1:]]
        if refusal == "" and not answer["ok"]:
            wrong.append(f"only the framework refuses {plan.inputs.model.name} {plan.layout}: {answer}")
        elif refusal and answer["ok"]:
            late = [rule for rule in rules if rule in RUN_TIME]
            at_run_time.update(late[:1])
            if not late:
                wrong.append(f"only we refuse {plan.inputs.model.name} {plan.layout}: {rules}")
        by_parser += bool(refusal) and not answer["ok"]
    illegal = len(refusals) - refusals.count("")
    print(
        f"{framework}: {illegal} illegal variants, {by_parser} refused by the parser too, "
        f"{dict(at_run_time)} at run time; {refusals.count('')} legal variants"
    )
    assert illegal >= 100
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:12])


def _refusal(plan: Plan) -> str:
    """What our rules say against a plan; empty if nothing."""
    try:
        plan_files(plan)
    except LaunchError as error:
        return str(error)
    return ""
