"""Every parser accepts what we write and reads the plan back from it.

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

from meshwright.costmodel.workload import Execution
from meshwright.documents import write_files
from meshwright.errors import InfeasibleError, InputError
from meshwright.frameworks.record import FrameworkName
from meshwright.planner.launch import compare
from meshwright.planner.launch.megatron import bridge_files
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan
from tests.oracles.random_plans import random_plan
from tests.soaked import SHARE

pytestmark = pytest.mark.oracle

PARSERS: dict[FrameworkName, str] = {
    "megatron": "megatron",
    "torchtitan": "torchtitan",
    "deepspeed": "deepspeed",
    "fsdp2": "accelerate",
}
ACCEPTED = 300 if SHARE == 1 else 120
"""Plans that each parser reads."""


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


def test_bridge_accepts_and_reads_back_every_override(tmp_path: Path) -> None:
    rng, index = random.Random(8), 0
    plans: list[Plan] = []
    cases: list[dict[str, Any]] = []
    while len(plans) < ACCEPTED:
        index += 1
        drawn = random_plan(rng, "megatron", index)
        if drawn is None:
            continue
        try:
            text = bridge_files(drawn[0])
        except InfeasibleError:
            continue
        write_files(tmp_path / str(len(plans)), text)
        cases.append({"dir": str(tmp_path / str(len(plans)))})
        plans.append(drawn[0])
    misspelt = json.loads(text["bridge_overrides.json"])
    for wrong in (
        "model.tensor_parallel_size=2",
        "train.global_batch=8",
        "mixed_precision=16_mixed",
    ):
        write_files(tmp_path / wrong, {"bridge_overrides.json": json.dumps([*misspelt, wrong])})
        cases.append({"dir": str(tmp_path / wrong)})
    answers = ask("bridge", cases, tmp_path)
    assert [one["ok"] for one in answers[ACCEPTED:]] == [False] * 3
    bad = [
        f"{plan.layout}: {one if not one['ok'] else differences(plan, one)}"
        for plan, one in zip(plans, answers, strict=False)
        if not one["ok"] or differences(plan, one)
    ]
    print(f"bridge: {len(plans) - len(bad)} of {len(plans)} accepted and read back")
    assert not bad, f"{len(bad)} of {len(plans)}:\n" + "\n".join(bad[:10])


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
def test_the_framework_accepts_and_reads_back_every_plan(
    framework: FrameworkName, tmp_path: Path
) -> None:
    rng, index, refused = random.Random(6), 0, 0
    plans: list[Plan] = []
    cases: list[dict[str, Any]] = []
    while len(plans) < ACCEPTED:
        index += 1
        drawn = random_plan(rng, framework, index)
        if drawn is None:
            continue
        plan, arch = drawn
        if framework == "fsdp2" and index % 2:
            plan = plan.model_copy(update={"execution": Execution(sync_each_batch=True)})
        try:
            files = plan_files(plan)
        except InfeasibleError:
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
    syncs = [plan.execution is not None and plan.execution.sync_each_batch for plan in plans]
    assert framework != "fsdp2" or min(syncs.count(on) for on in (True, False)) >= 10
    print(
        f"{framework}: {len(plans) - len(wrong)} of {len(plans)} accepted and read back, "
        f"{len({p.inputs.model.name for p in plans})} models, "
        f"{dict(Counter(p.inputs.precision for p in plans))}, "
        f"pp {sorted({p.layout.pp for p in plans if p.layout})}"
    )
    assert not wrong, f"{len(wrong)} of {len(plans)}:\n" + "\n".join(wrong[:10])


EDITED = 80 if SHARE == 1 else 40
"""Edits of one plan's arguments to another's that each parser reads."""


_OF_PEOPLE = (
    "--recompute-activations",
    "--num-layers-per-virtual-pipeline-stage 2",
    "--decoder-first-pipeline-num-layers 4",
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    "--overlap-grad-reduce --overlap-param-gather",
    "--use-torch-fsdp2 --no-gradient-accumulation-fusion",
    "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-precision-aware-optimizer",
    "--enable-cuda-graph",
    "--cuda-graph-impl transformer_engine --cuda-graph-scope attn",
    "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
    "--defer-embedding-wgrad-compute",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--distribute-saved-activations",
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    "--overlap-param-gather-with-optimizer-step --overlap-param-gather --overlap-grad-reduce",
)
"""Flags that no plan writes so, in place of those of today."""


@pytest.mark.parametrize(
    ("framework", "others"), [("megatron", ()), ("megatron", _OF_PEOPLE), ("torchtitan", ())]
)
def test_the_framework_accepts_arguments_edited_to_another_plan(
    framework: FrameworkName,
    others: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What `compare` makes of a script of one layout starts another layout of the same request."""
    monkeypatch.setattr(compare.ScriptChange, "_result", lambda self, edits, text, note: text)
    rng, index, name = random.Random(11), 0, f"{framework}_args.json"
    today: dict[tuple[object, ...], str] = {}
    plans: list[Plan] = []
    cases: list[dict[str, Any]] = []
    while len(plans) < EDITED:
        index += 1
        drawn = random_plan(rng, framework, index, ["llama-3-8b", "llama-2-13b", "mixtral-8x7b"])
        plan = drawn and _of_a_request(rng, drawn[0])
        if drawn is None or plan is None:
            continue
        try:
            files = plan_files(plan)
        except InfeasibleError:
            continue
        inputs = plan.inputs
        request = (inputs.model.name, inputs.cluster.name, inputs.precision, inputs.gpus)
        if request not in today:
            today[request] = files[name]
            continue
        path, script = tmp_path / "today.json", today.pop(request)
        if others:
            flags = compare._flags(json.loads(script)) | compare._flags(rng.choice(others).split())
            script = json.dumps(compare._words(flags))
        try:
            change = compare.ScriptChange(path, script, plan, json.loads(files[name]))
        except InputError:
            assert others, "what a plan writes is read"
            continue
        folder = tmp_path / str(len(plans))
        write_files(folder, {**files, name: str(change.diff())})
        plans.append(plan)
        cases.append({"dir": str(folder), "world": inputs.gpus, "arch": drawn[1]})
    answers = ask(PARSERS[framework], cases, tmp_path)
    wrong = [
        f"{plan.inputs.model.name} {plan.layout}: {answer if not answer['ok'] else differences(plan, answer)}"
        for plan, answer in zip(plans, answers, strict=True)
        if not answer["ok"] or differences(plan, answer)
    ]
    assert not wrong, f"{len(wrong)} of {len(plans)}:\n" + "\n".join(wrong[:10])


def _of_a_request(rng: random.Random, plan: Plan) -> Plan | None:
    """The plan with a batch that many draws share, and a drawn execution; None on other numbers of GPUs."""
    layout, inputs, batch = plan.layout, plan.inputs, 96
    assert layout is not None
    if inputs.gpus not in (16, 32) or batch % (layout.micro_batch * layout.dp):
        return None
    count = batch // (layout.micro_batch * layout.dp)
    if inputs.framework == "megatron":
        execution = Execution(
            cuda_graph=rng.choice(["none", "full", "partial"]),
            tp_overlap=layout.sequence_parallel and rng.random() < 0.5,
            dp_overlap=rng.random() < 0.7,
            gradient_dtype=rng.choice(["fp32", "bf16"]),
            moe_dispatch=rng.choice(["alltoall", "deepep"]) if inputs.model.moe else "alltoall",
        )
    else:
        execution = Execution(dp_overlap=rng.random() < 0.7)
    return plan.model_copy(
        update={
            "layout": layout.model_copy(update={"num_micro_batches": count}),
            "inputs": inputs.model_copy(
                update={"global_batch": batch, "seq_len": 4096, "optimizer": "adam"}
            ),
            "execution": execution,
        }
    )
