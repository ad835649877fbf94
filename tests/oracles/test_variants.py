"""What our rules refuse cannot start, what they allow can.

One degree of a legal plan is changed. A refused variant is refused by the parser, or fails in the framework's
own code as it builds the model or takes the first step (run_time.py), or breaks a rule of `JUSTIFIED`, which
says why it stands. An allowed variant passes both.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshwright.documents import write_files
from meshwright.errors import InfeasibleError
from meshwright.frameworks.record import FrameworkName
from meshwright.frameworks.torchtitan import TORCHTITAN
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan
from tests.oracles.random_plans import changed, random_plan
from tests.oracles.test_frameworks import PARSERS, ask

pytestmark = pytest.mark.oracle

REFUSED, ALLOWED = 150, 60

DIVIDE = (
    "asserted by Megatron-DeepSpeed (4efb479, megatron/core/utils.py), which is in no package index"
)
GROUPS = "asserted by parallel_state.py as the process groups are made, which takes every rank"
JUSTIFIED: dict[FrameworkName, dict[str, str]] = {
    "megatron": {
        "megatron-zero-needs-pp-1": "choice: Megatron-FSDP would gather weights anew for every micro-batch",
        "megatron-zero-graphs": "the graph is captured in the step, from memory that is taken and freed",
        "megatron-zero-bridge": "choice: it starts, with gradients of 16 bits, as overrides cannot say 32",
        "megatron-zero-fp8-params": "raised as the optimizer copies weights, on a GPU",
        "scale-up-tp": "choice: it starts, slowly; priced by no plan",
        "scale-up-etp": "choice: it starts, slowly; priced by no plan",
        "expert-axes-need-experts": "etp has no effect on a dense model: the plan would not be what runs",
        "replicas-by-shard-groups": GROUPS,
        "megatron-expert-shard-groups": GROUPS,
        "shard-groups-of-several": "choice: one rank shards nothing, as under ZeRO 0",
        "megatron-context-windows": "raised by Transformer Engine's attention, on a GPU",
        "mamba-groups-by-tp-cp": "asserted by mamba_mixer.py, whose kernels need a GPU",
    },
    "torchtitan": {
        "shard-groups-of-several": "choice: one rank shards nothing, as under ZeRO 0",
        "fsdp-offload-zero": "choice: whole weights stay on the GPU under ZeRO 2, which are not priced",
        "fsdp-offload-shards": "choice: one rank shards nothing, which is not priced",
        "fsdp-offload-whole": "a plan's share: the switch has no other",
        "fsdp-offload-adam": "choice: loss scaling and FP8 gathers on the host are not priced",
        "interleaved-micro-batches": "choice: the cost model prices rounds of pp micro-batches",
        "vpp-needs-pp": "no pipeline is built at pp 1: the plan would not be what runs",
        "scale-up-tp": "choice: it starts, slowly; priced by no plan",
        "expert-axes-need-experts": "ep has no effect on a dense model: the plan would not be what runs",
        "experts-by-ep": "token_dispatcher.py gives each rank num_experts // ep experts: some would be lost",
        "torchtitan-expert-tensor": "moe_sharding.py cuts experts by tp where ep is 1, whatever a plan says",
        "torchtitan-context-shards": "weights are sharded over cp anyway: the plan would not be what runs",
        "torchtitan-spread-experts": "experts are sharded over other ranks anyway: not what a plan says",
    },
    "deepspeed": {
        "deepspeed-degrees": "Megatron-DeepSpeed (4efb479) gives its pipeline engine no such degree",
        "expert-axes-need-experts": "no MoE layer is built: the plan would not be what runs",
        "heads-by-tp": DIVIDE,
        "kv-heads-by-tp": DIVIDE,
        "ffn-by-tp": DIVIDE,
        "scale-up-tp": "choice: it starts, slowly; priced by no plan",
        "deepspeed-experts": "choice: experts over tensor ranks or stages are not priced",
    },
    "fsdp2": {
        "fsdp-offload-zero": "choice: whole weights stay on the GPU under ZeRO 2, which are not priced",
        "fsdp-offload-shards": "choice: one rank shards nothing, which is not priced",
        "fsdp-offload-whole": "a plan's share: the switch has no other",
        "fsdp-offload-adam": "choice: loss scaling and FP8 gathers on the host are not priced",
        "fsdp2-context-mask": "accelerate drops masks under cp: another attention would be trained",
        "fsdp2-mamba": "each rank would begin its scan anew: the model would not be what was asked for",
        "fsdp2-whole-delta-net": "each rank would begin its rule anew: not the model that was asked for",
        "sequence-by-cp": "choice: torch 2.13 falls back to unbalanced chunks, which are not priced",
        "scale-up-tp": "choice: it starts, slowly; priced by no plan",
    },
}
"""Rules that nothing asked here triggers, and why they stand; their docstrings say more. Others must."""


def facts_of(plan: Plan) -> dict[str, Any]:
    """A plan's numbers for run_time.py."""
    layout, model = plan.layout, plan.inputs.model
    assert layout is not None
    moe = model.moe
    widths = [model.ffn_hidden] if model.dense_layers else []
    return layout.model_dump() | {
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "layers": model.layers,
        "torch_schedule": TORCHTITAN.schedules[layout.schedule].value,
        "seq_len": plan.inputs.seq_len,
        "widths": widths + ([moe.shared_width] if moe is not None and moe.shared_width else []),
        "expert_width": 0 if moe is None else moe.moe_ffn_hidden,
        "experts": 0 if moe is None else moe.experts,
    }


def also(plan: Plan) -> list[str]:
    """Flags for degrees that our files leave out because they are refused before."""
    layout, framework = plan.layout, plan.inputs.framework
    assert layout is not None
    flags: dict[str, int] = {}
    if framework == "megatron":
        if plan.inputs.model.moe is None:
            flags |= {
                "--expert-model-parallel-size": layout.ep,
                "--expert-tensor-parallel-size": layout.etp,
            }
        if layout.pp == 1:
            flags["--num-virtual-stages-per-pipeline-rank"] = layout.vpp
    if framework == "torchtitan":
        flags["--parallelism.expert-tensor-parallel-degree"] = layout.etp
    if framework == "fsdp2":
        flags |= {f"--parallelism_config_{axis}_size": getattr(layout, axis) for axis in _NOT_FSDP2}
    return [word for flag, degree in flags.items() if degree > 1 for word in (flag, str(degree))]


_NOT_FSDP2 = ("pp", "vpp", "ep", "etp")


def refusal(plan: Plan) -> list[str]:
    """The rules that a plan breaks."""
    try:
        plan_files(plan)
    except InfeasibleError as error:
        return [line.split(":")[0] for line in str(error).splitlines()[1:]]
    return []


@pytest.mark.parametrize("framework", list(PARSERS))
def test_refused_is_what_cannot_start(
    framework: FrameworkName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where ranks go is asked in test_topology.py, and means nothing where a grid does not divide.
    monkeypatch.setattr("meshwright.planner.launch.plan_files.mapping_files", lambda *_: {})
    plans, rules, cases = _variants(framework, tmp_path, monkeypatch)
    answers = ask(PARSERS[framework], cases, tmp_path)
    assert len(answers) == len(plans)
    wrong: list[str] = []
    how: Counter[str] = Counter()
    stands: Counter[str] = Counter()
    raised: Counter[str] = Counter()
    for plan, broken, answer in zip(plans, rules, answers, strict=True):
        name = f"{plan.inputs.model.name} seq {plan.inputs.seq_len} {plan.layout}"
        late = answer.get("late")
        if not broken and (late or not answer["ok"]):
            wrong.append(f"only the framework refuses {name}: {late or answer}")
        if not broken:
            continue
        known = [rule for rule in broken if rule in JUSTIFIED[framework]]
        kind = "parser" if not answer["ok"] else "start" if late else "justified" if known else ""
        how[kind] += 1
        stands.update(known if kind == "justified" else [])
        raised.update([late["at"]] if late and kind == "start" else [])
        if not kind:
            wrong.append(f"only we refuse {name}: {broken}")
    print(
        f"{framework}: {len(plans) - rules.count([])} illegal variants, {how['parser']} refused when parsed, "
        f"{how['start']} fail when started {dict(raised)}, {how['justified']} justified {dict(stands)}; "
        f"{rules.count([])} allowed variants"
    )
    assert rules.count([]) >= ALLOWED
    assert len(plans) - rules.count([]) >= REFUSED
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:12])


def _variants(
    framework: FrameworkName, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Plan], list[list[str]], list[dict[str, Any]]]:
    rng, index = random.Random(7), 0
    plans: list[Plan] = []
    rules: list[list[str]] = []
    cases: list[dict[str, Any]] = []
    while rules.count([]) < ALLOWED or len(rules) - rules.count([]) < REFUSED:
        index += 1
        drawn = random_plan(rng, framework, index)
        if drawn is None or refusal(drawn[0]):
            continue
        variant = changed(rng, drawn[0])
        if variant is None:
            continue
        broken = refusal(variant)
        if (
            (rules.count([]) >= ALLOWED)
            if not broken
            else (len(rules) - rules.count([]) >= REFUSED)
        ):
            continue
        with monkeypatch.context() as without_rules:
            without_rules.setattr("meshwright.planner.launch.writer._broken_rules", lambda *_: [])
            without_rules.setattr(
                "meshwright.planner.launch.configurations._require_even_stages", lambda *_: None
            )
            files = plan_files(variant)
        place = folder / str(len(cases))
        write_files(place, files)
        plans.append(variant)
        rules.append(broken)
        case = {"dir": str(place), "world": variant.inputs.gpus, "arch": drawn[1]}
        cases.append(case | {"also": also(variant), "facts": facts_of(variant)})
    return plans, rules, cases
