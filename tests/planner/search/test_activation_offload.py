"""Offloading activations as a choice: the best modules are found, where the request allows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.costmodel import activations as offloaded_activations
from meshwright.costmodel.execution_names import OFFLOADED_INPUTS, OFFLOADED_MODULES
from meshwright.costmodel.workload import Execution
from meshwright.errors import InfeasibleError, InputError
from meshwright.frameworks.catalog import framework_named
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.launch.megatron import bridge_overrides
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.launch.writer import legal_launch
from meshwright.planner.plan.make_plan import make_plan
from meshwright.planner.plan.verify import faults
from meshwright.planner.request.choices import ALLOW
from meshwright.planner.request.executions import parse_allow
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.launches.command_line import CommandLine
from meshwright.planner.runs.launches.megatron import from_megatron, from_overrides
from meshwright.planner.runs.run_file import run_from_mapping
from meshwright.planner.search.loop import search_executions
from meshwright.planner.search.pricing import Outcome
from tests.places import DATA
from tests.planner.runs.launches.test_own_launch_read_back import priced, read_back
from tests.planner.search.test_executions import asked
from tests.planner.search.test_planner_optimum import best_of_executions
from tests.plans import make_plan as plan_of
from tests.soaked import some

MODULES = tuple(name for name in OFFLOADED_MODULES if name not in OFFLOADED_INPUTS)
OF_ATTENTION = ("none", "core_attn", "core_attn+attn_proj")
NEXT = str(DATA / "hf_configs" / "qwen3-next-80b-a3b.json")
ALLOWED = ("activation-offload",)


@pytest.fixture
def every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of small models are offloaded too."""
    monkeypatch.setattr(offloaded_activations, "LEAST_ELEMENTS", 1)


def short_of_memory(seed: int, hbm_gib: float) -> PlanRequest:
    """A small problem with few executions but for what is offloaded."""
    request = asked(seed)
    device = request.cluster.device.model_copy(update={"hbm_gib": hbm_gib})
    return replace(
        request,
        cluster=request.cluster.model_copy(update={"device": device}),
        model=request.model.model_copy(update={"layers": 6}),
        seq_len=8192,
        forbids=("optimizer-offload", "full-recompute", "selective-recompute", "interleaving"),
        pins={name: value for name, value in request.pins.items() if name != "recompute"},
        without=("deepep", "hybridep", "ep-overlap", "cp-a2a", "cuda-graph", "allgather"),
        allow=ALLOWED,
    )


def brute_force(request: PlanRequest) -> float | None:
    """The least step time over every set of modules and every layout that its rules allow."""
    sets: Sequence[str] = OF_ATTENTION if request.model.moe is None else MODULES
    plain = request.execution_options.executions()[0]
    return best_of_executions(
        request,
        (replace(plain, offload_modules=modules) for modules in sets),  # type: ignore[arg-type]
    )


def compare(seed: int, hbm_gib: float) -> Outcome:
    request = short_of_memory(seed, hbm_gib)
    outcome, best_s = search_executions(request, CostModelPricing), brute_force(request)
    if best_s is None:
        assert outcome.status == "infeasible"
        return outcome
    assert outcome.status == "optimal"
    assert outcome.best[0].step_time_s == pytest.approx(best_s, rel=1e-9)
    assert outcome.lower_bound_s == pytest.approx(best_s, rel=1e-9)
    return outcome


@pytest.mark.usefixtures("every_tensor")
@pytest.mark.parametrize(
    ("seed", "hbm_gib", "modules"),
    [
        (1, 6.1, "core_attn+attn_proj"),
        pytest.param(8, 5.0, "core_attn+attn_proj+expert_fc1", marks=pytest.mark.soak),
        pytest.param(2, 5.0, OFFLOADED_MODULES[-1], marks=pytest.mark.soak),
        pytest.param(12, 8.0, "none", marks=pytest.mark.soak),
    ],
)
def test_the_modules_are_the_best_of_all(seed: int, hbm_gib: float, modules: str) -> None:
    assert compare(seed, hbm_gib).best[0].execution.offload_modules == modules


@pytest.mark.soak
@pytest.mark.usefixtures("every_tensor")
@pytest.mark.parametrize(
    ("seed", "hbm_gib"), some((seed, hbm) for hbm in (4.0, 5.0, 6.5) for seed in range(11))
)
def test_the_modules_are_always_the_best_of_all(seed: int, hbm_gib: float) -> None:
    compare(seed, hbm_gib)


def request(**changes: Any) -> PlanRequest:
    """Sequences of which every layer keeps much, on eight H100."""
    options: dict[str, Any] = {
        "model": "llama-3-8b",
        "cluster": "dgx-h100",
        "gpus": 8,
        "global_batch": 64,
        "seq_len": 32_768,
    }
    return read_request(**options | changes)


def offered(asked_for: PlanRequest) -> tuple[str, ...]:
    return tuple(asked_for.execution_options.values["offload_modules"])


def test_modules_are_offloaded_only_where_that_is_allowed() -> None:
    both = {"model": "mixtral-8x7b", "allow": "activation-offload"}
    assert offered(request()) == ("none",)
    assert offered(request(allow="all")) == ("none",)
    assert offered(request(allow="activation-offload")) == OF_ATTENTION
    assert offered(request(**both)) == MODULES
    of_experts = ("none", "expert_fc1", "moe_act", "expert_fc1+moe_act")
    assert offered(request(model=NEXT, allow="activation-offload")) == of_experts
    assert offered(request(**both, framework="torchtitan")) == ("none",)
    pinned = request(model="mixtral-8x7b", pin={"offload_modules": "moe_act"})
    assert offered(pinned) == ("moe_act",)
    assert offered(replace(pinned, allow=ALLOWED)) == ("moe_act",)
    assert offered(request(**both, pin={"offload_modules": "none"})) == ("none",)
    assert parse_allow(["all,activation-offload"]) == (*ALLOW, "activation-offload")
    assert parse_allow(["all"]) == ALLOW
    with pytest.raises(InputError, match="did you mean 'activation-offload'"):
        parse_allow(["activations-offload"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pin": {"offload_modules": "moe_act"}}, "cannot be had.*allowed: none"),
        ({"pin": {"offload_modules": "attn_proj"}}, "core_attn"),
        ({"model": NEXT, "pin": {"offload_modules": "core_attn"}}, "cannot be had.*allowed: none"),
        (
            {"framework": "torchtitan", "pin": {"offload_modules": "core_attn"}},
            "cannot be had.*allowed: none",
        ),
    ],
)
def test_what_cannot_be_offloaded_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        request(**changes)


@pytest.mark.slow
def test_a_plan_says_what_offloading_brings_and_what_the_host_holds() -> None:
    without_graphs = "cuda-graph,cp-a2a,tp-overlap"
    asked_for = request(allow="activation-offload", without=without_graphs)
    plan = make_plan(asked_for, robustness=False)
    assert plan.execution is not None
    assert plan.predicted is not None
    assert plan.execution.offload_modules.startswith("core_attn")
    assert list(faults(asked_for, plan)) == []
    assert plan.choices is not None
    choice = next(choice for choice in plan.choices if choice.choice == "offload_modules")
    without = search_executions(request(without=without_graphs), CostModelPricing)
    without_s = without.best[0].step_time_s
    assert choice.step_time_s_without == pytest.approx(without_s, rel=1e-9)
    assert without_s > plan.predicted.step_time_s
    assert choice.proven
    assert choice.installs == "cuda-python and pynvml"
    assert (plan.predicted.host_memory_gib or 0) > 0


def offloading(modules: str, **changes: Any) -> Any:
    plan = plan_of(
        "mixtral-8x7b", tp=2, dp=8, ep=8, sequence_parallel=True, num_micro_batches=4, **changes
    )
    settings: dict[str, Any] = {"offload_modules": modules}
    execution = Execution(dp_overlap=True, pp_overlap=True, **settings)
    return plan.model_copy(update={"execution": execution})


@pytest.mark.parametrize("modules", [name for name in MODULES if name != "none"])
def test_launch_files_offload_and_are_read_back(modules: str, tmp_path: Path) -> None:
    plan = offloading(modules)
    own, again = priced(plan), read_back(plan, tmp_path)
    assert again.estimate.step_time_s == own.estimate.step_time_s
    assert again.memory_gib == own.memory_gib
    assert again.offloaded_gib == own.offloaded_gib > 0
    words = json.loads((tmp_path / "megatron_args.json").read_text(encoding="utf-8"))
    names, at = modules.split("+"), words.index("--offload-modules")
    assert "--fine-grained-activation-offloading" in words
    assert words[at + 1 : at + 1 + len(names)] == names
    script = (tmp_path / "launch.sh").read_text(encoding="utf-8")
    assert "NVTE_CPU_OFFLOAD_V1=1" in script
    assert "Offloading needs cuda-python and pynvml." in script


def test_overrides_of_a_recipe_offload_and_are_read_back() -> None:
    plan = offloading("expert_fc1+moe_act")
    words = bridge_overrides(plan)
    assert "model.fine_grained_activation_offloading=true" in words
    assert "model.offload_modules=[expert_fc1,moe_act]" in words
    run = from_overrides(words, "mixtral-8x7b", "overrides.json")
    assert run.settings["offload_modules"] == ["expert_fc1", "moe_act"]


def test_nothing_is_written_without() -> None:
    texts = "".join(plan_files(offloading("none")).values())
    assert "fine-grained" not in texts
    assert "NVTE_CPU_OFFLOAD" not in texts


def test_rules_hold_for_launch_files() -> None:
    refused = offloading("core_attn", recompute="full", recompute_layers=32)
    with pytest.raises(InfeasibleError, match="recomputed in full"):
        legal_launch(refused, framework_named("megatron"))


SIZES = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 2048"


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        ("--fine-grained-activation-offloading --offload-modules core_attn", ["core_attn"]),
        (
            "--fine-grained-activation-offloading --offload-modules attn_proj core_attn",
            ["core_attn", "attn_proj"],
        ),
        ("--offload-modules core_attn", None),
        ("", None),
    ],
)
def test_flags_are_read(flags: str, modules: list[str] | None) -> None:
    run = from_megatron(CommandLine(f"{SIZES} {flags}".split(), "a.sh"))
    assert run.settings.get("offload_modules") == modules
    assert not [flag for flag in run.unread if "offload" in flag]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--offload-modules mlp_norm", "not a module whose offloading has a price.*mlp_norm"),
        ("--offload-modules attn_proj", "attn_proj goes with core_attn only"),
        (
            "--offload-modules core_attn --activation-offload-fraction 0.5",
            "activation-offload-fraction.*has no price",
        ),
    ],
)
def test_flags_without_a_price_are_refused(flags: str, words: str) -> None:
    line = f"{SIZES} --fine-grained-activation-offloading {flags}".split()
    with pytest.raises(InputError, match=words):
        from_megatron(CommandLine(line, "a.sh"))


def run_of(**settings: Any) -> Any:
    run = {"seq_len": 4096, "global_batch": 8, "dp": 8, **settings}
    mapping = {"schema": 1, "model": "llama-3-8b", "cluster": "dgx-h100", "run": run}
    return run_from_mapping(mapping, where="run.yaml", base=None)


def test_run_files_name_modules() -> None:
    named = run_of(offload_modules=["attn_proj", "core_attn"])
    assert named.workload.offload_modules == "core_attn+attn_proj"
    assert run_of().workload.offload_modules == "none"
    with pytest.raises(InputError, match="did you mean 'core_attn'"):
        run_of(offload_modules=["core_attention"])
    with pytest.raises(InputError, match="with Megatron only"):
        run_of(offload_modules=["core_attn"], framework="torchtitan")
