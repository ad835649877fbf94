"""What `meshwright verify` passes, and what it finds."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import meshwright
from meshwright import cli
from meshwright.documents import write_files
from meshwright.errors import InputError
from meshwright.planner.audit import (
    ListedRank,
    audit_plan,
    checked,
    file_faults,
    launch_file_faults,
    recount_faults,
    stated_figure_faults,
)
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Mapping, Objective, Plan, with_digest
from meshwright.planner.plan.make_plan import make_plan as planned
from meshwright.planner.plan.texts import plan_text, read_plan
from meshwright.planner.request.choices import WITHOUT
from meshwright.planner.request.reader import read_request
from tests.planner.audit.damage import damaged
from tests.plans import make_plan
from tests.soaked import examples, some

REQUESTS: dict[str, dict[str, Any]] = {
    "dense": {"model": "llama-2-7b", "cluster": "dgx-a100", "gpus": 16, "seq_len": 1024},
    "experts": {"model": "olmoe-1b-7b", "cluster": "dgx-h100", "gpus": 16, "seq_len": 2048},
    "torchtitan": {
        "model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 16, "seq_len": 4096,
        "framework": "torchtitan",
    },
    "deepspeed": {
        "model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 16, "seq_len": 4096,
        "framework": "deepspeed",
    },
    "fsdp2": {
        "model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 16, "seq_len": 4096,
        "framework": "fsdp2",
    },
}  # fmt: skip


def written(folder: Path, name: str, target: str | None = None, **changes: Any) -> Path:
    """The folder of a plan's launch files."""
    asked: dict[str, Any] = {"global_batch": 64, "robustness": False, "without": WITHOUT}
    asked |= REQUESTS[name] | changes
    plan = meshwright.plan(asked.pop("model"), **asked)
    write_files(folder / name, plan_files(plan, target))
    return folder / name


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("plans"), "dense")


@pytest.fixture
def copied(dense: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dense, tmp_path / "copy"))


def verify(*words: str | Path) -> Result:
    return CliRunner().invoke(cli.main, ["verify", *map(str, words)])


def broken(folder: Path) -> dict[str, list[str]]:
    """The faults by check."""
    document = json.loads(verify(folder, "--json").stdout)
    return {check["check"]: check["broken"] for check in document["checks"]}


def replaced(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), encoding="utf-8")


def forged(folder: Path, section: str, **changes: Any) -> None:
    """Changes a section of the plan and makes the digest fit."""
    plan = read_plan(folder)
    part = getattr(plan, section).model_copy(update=changes)
    text = plan_text(with_digest(plan.model_copy(update={section: part})))
    (folder / "plan.yaml").write_text(text, encoding="utf-8")


def test_an_untouched_plan_holds(dense: Path) -> None:
    result = verify(dense)
    assert result.exit_code == 0
    assert "The plan holds." in result.stdout
    assert not any(broken(dense).values())


def test_experts_beside_dense_layers_hold_under_deepspeed(tmp_path: Path) -> None:
    """Megatron-DeepSpeed has one width for all feed-forwards, that of an expert: no fault of the file."""
    made = make_plan("deepseek-v2-lite", dp=8, zero_stage=1)
    made = made.model_copy(
        update={"inputs": made.inputs.model_copy(update={"framework": "deepspeed"})}
    )
    write_files(tmp_path, plan_files(made))
    assert list(launch_file_faults(made, tmp_path / "plan.yaml", tmp_path)) == []
    replaced(tmp_path / "launch.sh", "--ffn-hidden-size 1408", "--ffn-hidden-size 10944")
    faults = " ".join(launch_file_faults(made, tmp_path / "plan.yaml", tmp_path))
    assert "the model's ffn_hidden is 10944, the plan says 1408" in faults


def test_a_plan_without_files_is_checked_alone(dense: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(dense / "plan.yaml", tmp_path))
    assert verify(alone).exit_code == 0
    assert "nothing to check" in verify(alone).stdout
    assert verify(alone, dense).exit_code == 0


@pytest.mark.slow
def test_a_plan_that_its_framework_has_no_scripts_for_holds(tmp_path: Path) -> None:
    """Its folder has the mapping alone, which was held against launch files of another framework."""
    nodes = [{"name": f"n{number}", "leaf": "a"} for number in range(2)]
    levels = [{"name": "leaf", "gpus": 16}, {"name": "core", "gpus": 64}]
    plan = meshwright.plan(
        "smollm3-3b",
        cluster={"name": "two", "base": "dgx-h100", "levels": levels, "nodes": nodes},
        global_batch=16,
        seq_len=512,
        kind="dpo",
        pin="tp=1,cp=1,pp=1,micro_batch=1,zero_stage=1,recompute=none",
        without=WITHOUT,
        robustness=False,
    )
    names = {path.name for path in meshwright.save(plan, tmp_path)}
    assert "ranks.csv" in names
    assert "launch.sh" not in names
    assert audit_plan(tmp_path).passed
    (tmp_path / "mapping" / "nodes.csv").unlink()
    assert not audit_plan(tmp_path).passed


def test_all_plans_below_a_folder_are_checked(dense: Path, tmp_path: Path) -> None:
    """Each with its own files, not in hidden folders; what only has the name of a plan is left out."""
    top = tmp_path / "repository"
    for place in ("a", "deep/er/b", ".git/hidden"):
        shutil.copytree(dense, top / place)
    (top / "other").mkdir()
    (top / "other" / "plan.yaml").write_text("steps: [sow, reap]\n", encoding="utf-8")
    result = verify("--all", top)
    assert result.exit_code == 0, result.output
    assert "2 of 2 plans hold." in result.stdout
    document = json.loads(verify("--all", top, "--json").stdout)
    plans = [Path(plan["plan"]) for plan in document["plans"]]
    assert plans == [top / "a" / "plan.yaml", top / "deep" / "er" / "b" / "plan.yaml"]
    assert document["skipped"] == [str(top / "other" / "plan.yaml")]
    assert all(plan["directory"] for plan in document["plans"])
    (top / "a" / "launch.sh").write_text("echo\n", encoding="utf-8")
    broken_one = verify("--all", top)
    assert broken_one.exit_code == 1
    assert "1 of 2 plans holds." in broken_one.stdout
    assert "launch.sh" in broken_one.stdout
    twice = meshwright.verify_plans(top / "a", top / "a" / "plan.yaml", top / "deep")
    assert [audit.passed for audit in twice.audits] == [False, True]


def test_named_files_that_are_no_plans_are_broken(dense: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "plan.yaml"
    wrong.write_text("steps: [sow, reap]\n", encoding="utf-8")
    result = verify("--all", dense, wrong)
    assert result.exit_code == 1
    assert "this is not a plan; give the plan.yaml" in " ".join(result.stdout.split())
    for words, reason in (
        ((tmp_path,), "nothing below is a plan"),
        ((tmp_path / "no",), "no such file"),
        ((dense / "mapping",), "no plan.yaml or mixed_plan.yaml"),
    ):
        refused = verify("--all", *words)
        assert refused.exit_code == 2
        assert reason in refused.output
    three = verify(dense, dense, dense)
    assert three.exit_code == 2
    assert "--all" in three.output


@pytest.mark.slow
def test_a_degree_edited_by_hand_is_named(copied: Path) -> None:
    replaced(copied / "plan.yaml", "zero_stage: 1", "zero_stage: 0")
    faults = broken(copied)
    assert "digest" in faults["edits by hand"][0]
    assert any("memory" in fault for fault in faults["prices and rules"])
    assert verify(copied).exit_code == 1


def test_a_forged_price_is_worked_out_again(copied: Path) -> None:
    step_time_s = read_plan(copied).objective.step_time_s
    assert step_time_s is not None
    forged(copied, "objective", step_time_s=step_time_s / 2, lower_bound_s=step_time_s / 2)
    faults = broken(copied)
    assert not faults["edits by hand"]
    assert any("objective" in fault for fault in faults["prices and rules"])


def test_contradicting_fields_are_a_fault_of_the_plan(copied: Path) -> None:
    replaced(copied / "plan.yaml", "global_batch: 64", "global_batch: 63")
    result = verify(copied)
    assert result.exit_code == 1
    assert "num_micro_batches" in result.stdout


@pytest.fixture(scope="module")
def told() -> Plan:
    """A plan with choices, changes of the cluster and next best plans."""
    asked = read_request(
        model="olmoe-1b-7b",
        cluster="dgx-h100",
        gpus=16,
        global_batch=64,
        seq_len=2048,
        top_k=3,
        pin="tp=1,cp=1,pp=1,etp=1,dp=16",
    )
    plan = planned(asked)
    assert list(stated_figure_faults(plan)) == []
    assert plan.choices
    assert len(plan.alternatives) == 2
    return plan


def refound(plan: Plan, path: str, value: Any) -> list[str]:
    """What is found where one value of a plan is another one, and its digest fits."""
    document = json.loads(plan.model_dump_json(by_alias=True))
    *parents, last = (int(key) if key.isdecimal() else key for key in path.split("."))
    parent = document
    for key in parents:
        parent = parent[key]
    assert parent[last] != value
    parent[last] = value
    changed = with_digest(Plan.model_validate(document))
    return list(checked("prices and rules", lambda: stated_figure_faults(changed)).broken or ())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("choices.0.choice", "dp_overlap"),
        ("choices.0.value", "hybridep"),
        ("choices.0.step_time_s_without", 0.26),
        ("choices.0.lower_bound_s_without", 0.24),
        ("choices.0.proven", False),
        ("choices.0.status", "infeasible"),
        ("choices.0.pin", "moe_dispatch=hybridep"),
        ("choices.0.measured_gain", 0.3),
        ("choices.0.pairs", 99),
        ("installs.0.software", "DeepEP 2"),
        ("installs.0.pinned", True),
        ("grades.0.value", 0.5),
        ("grades.0.target", 0.1),
        ("evidence.gain", 0.1),
        ("evidence.nearest_run.step_time_s", 9.0),
        ("alternatives.0.step_time_s", 0.2327),
        ("alternatives.0.tp", 2),
        ("alternatives.0.dp", 8),
        ("alternatives.0.cuda_graph", "none"),
        ("alternatives.0.zero_stage", 0),
        ("alternatives.1.stages.0.0", 15),
        ("alternatives.1.moe_dispatch", "alltoall"),
        ("memory_risk.cost", 0.1),
        ("memory_risk.step_time_s_without", 0.2),
        ("robustness.same_winner", False),
        ("robustness.scenarios.0.best_step_time_s", 0.2),
        ("robustness.scenarios.0.loss_at_most", 0.01),
        ("robustness.scenarios.0.status", "feasible"),
        ("robustness.scenarios.0.proven", False),
        ("solver.space.tp.0", 3),
        ("solver.space.executions.1.cp_comm", "a2a+p2p"),
        ("solver.proof.left_out_bound_s", 0.3),
        ("solver.proof.rounds", 40),
        ("execution.fp8_params", True),
    ],
)
def test_what_a_plan_says_of_itself_is_worked_out_again(told: Plan, path: str, value: Any) -> None:
    assert refound(told, path, value)


def test_ranks_are_compared_one_by_one(copied: Path) -> None:
    path = copied / "mapping" / "ranks.csv"
    lines = path.read_text(encoding="utf-8").splitlines()
    first, other = lines[1].split(","), lines[9].split(",")
    first[1], other[1] = other[1], first[1]
    lines[1], lines[9] = ",".join(first), ",".join(other)
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    assert any("rank 0 is on" in fault for fault in broken(copied)["ranks"])


def test_damaged_lists_and_pins_are_faults_in_words(copied: Path) -> None:
    """A field too long for any CSV and pins that are none ended in exceptions of Python's own."""
    ranks = copied / "mapping" / "ranks.csv"
    ranks.write_text(f'{ranks.read_text(encoding="utf-8")}"{"x" * 200_000}', encoding="utf-8")
    assert "is no CSV" in broken(copied)["ranks"][0]
    replaced(copied / "plan.yaml", "  pins: {}", "  pins: [1]\n  moe_dispatch: alltoall")
    assert "inputs.pins: must be a mapping" in broken(copied)["document"][0]


def test_flags_are_read_back(copied: Path) -> None:
    replaced(copied / "launch.sh", "--seq-length 1024", "--seq-length 2048")
    faults = broken(copied)["launch files"]
    assert "launch.sh: seq_len is 2048, the plan says 1024" in faults


def test_every_choice_that_flags_say_is_read_back(copied: Path) -> None:
    """Shard groups, offload and schedule were left to the comparison of lines, which does not name them."""
    groups = "--num-distributed-optimizer-instances 8"
    replaced(copied / "launch.sh", "--seq-length 1024", f"--seq-length 1024 {groups}")
    faults = broken(copied)["launch files"]
    assert any(fault.startswith("launch.sh: shard_groups is 8, the plan says") for fault in faults)


def test_tensor_parallelism_of_a_deepspeed_script_is_not_sought_in_its_configuration(
    tmp_path: Path,
) -> None:
    plan = make_plan(tp=4, dp=2, zero_stage=2)
    plan = plan.model_copy(
        update={"inputs": plan.inputs.model_copy(update={"framework": "deepspeed"})}
    )
    files = plan_files(plan)
    write_files(tmp_path, files)
    assert list(file_faults(plan, files, tmp_path)) == []
    replaced(tmp_path / "ds_config.json", '"stage": 2', '"stage": 1')
    assert any("zero_stage is 1" in fault for fault in file_faults(plan, files, tmp_path))


def test_hosts_are_compared(copied: Path) -> None:
    replaced(copied / "hostfile.template", "node-00002", "node-00007")
    assert any(
        fault.startswith("hostfile.template: line 4") for fault in broken(copied)["launch files"]
    )


def test_another_version_is_named(copied: Path) -> None:
    forged(copied, "solver", program="meshwright 0.0.1", version="OR-Tools 8.0")
    faults = broken(copied)["versions"]
    assert "meshwright 0.0.1" in faults[0]
    assert "OR-Tools 8.0" in faults[1]


def test_a_group_wider_than_priced_is_counted() -> None:
    """Two ranks of a tensor group on two nodes, where the price has them in one."""
    matrix = {"tp": [2, 1], "cp": [1, 1], "dp": [4, 2], "pp": [1, 1]}
    mapping = Mapping(
        order=["tp", "cp", "ep", "dp", "pp"], levels=["nvlink", "network"], matrix=matrix
    )
    plan = make_plan(tp=2, dp=8, mapping=mapping)

    def faults(nodes: list[int]) -> list[str]:
        listed = [
            ListedRank(
                rank=rank,
                place=(nodes[rank], rank % 8),
                coordinates={"tp": rank % 2, "cp": 0, "dp": rank // 2, "pp": 0},
            )
            for rank in range(16)
        ]
        return list(recount_faults(plan, listed))

    whole = [rank // 8 for rank in range(16)]
    assert not faults(whole)
    (fault,) = faults([1, *whole[1:8], 0, *whole[9:]])
    assert fault.startswith("a group of tp has 1 of its ranks")


def test_what_is_no_plan_is_bad_input(dense: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("a: 1\n", encoding="utf-8")
    assert verify(other).exit_code == 2
    assert verify(tmp_path / "none").exit_code == 2
    assert verify(dense, tmp_path / "none").exit_code == 2


def damage_is_caught(folder: Path, scratch: Path, seeds: Iterable[int]) -> None:
    """Damages a copy of a folder again and again; every damage must be seen."""
    missed = []
    for seed in seeds:
        copy = Path(shutil.copytree(folder, scratch / f"{folder.name} {seed}"))
        words = damaged(random.Random(f"{folder.name} {seed}"), copy)
        try:
            if audit_plan(copy).passed:
                missed.append(words)
        except InputError:
            pass
        shutil.rmtree(copy)
    assert not missed


def test_damaged_plans_are_caught(dense: Path, tmp_path: Path) -> None:
    damage_is_caught(dense, tmp_path, range(3))


@pytest.mark.slow
def test_twenty_damaged_plans_are_caught(dense: Path, tmp_path: Path) -> None:
    damage_is_caught(dense, tmp_path, range(3, 3 + examples(20)))


@pytest.mark.soak
@pytest.mark.parametrize("name", REQUESTS)
def test_sixty_damaged_plans_of_each_framework_are_caught(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path, name, robustness=True, top=2)
    assert audit_plan(folder).passed
    damage_is_caught(folder, tmp_path, some(range(100, 160)))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["slurm", "openmpi", "kubernetes", "bridge"])
def test_the_files_of_other_targets_hold(target: str, dense: Path, tmp_path: Path) -> None:
    folder = tmp_path / target
    write_files(folder, plan_files(read_plan(dense), target))
    assert audit_plan(folder).passed
    (own, *_) = sorted({path.name for path in folder.iterdir()} - set(os.listdir(dense)))
    replaced(folder / own, "\n", "\n#\n")
    assert f"{own}: line 2" in str(broken(folder)["launch files"])


def test_infeasible_plans_are_checked_too(tmp_path: Path) -> None:
    nothing = Objective(step_time_s=None, lower_bound_s=None, gap=None)
    plan = make_plan().model_copy(
        update={"status": "infeasible", "layout": None, "objective": nothing}
    )
    (tmp_path / "plan.yaml").write_text(plan_text(plan), encoding="utf-8")
    assert not broken(tmp_path)["prices and rules"]
    contradicting = plan.model_copy(update={"status": "optimal"})
    (tmp_path / "plan.yaml").write_text(plan_text(contradicting), encoding="utf-8")
    assert broken(tmp_path)["prices and rules"]
