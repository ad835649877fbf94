"""Plans on mixed clusters as users ask for them: files, documents, launches, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import meshwright
from meshwright.cli import main
from meshwright.cluster_specs.reader import is_mixed_cluster, read_cluster, read_mixed_cluster
from meshwright.documents import write_files
from meshwright.errors import ExitCode, InputError
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.launch.plan_files import mixed_files
from meshwright.planner.mixed.document import MixedPlan, read_mixed_request
from meshwright.planner.mixed.verify import mixed_faults
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.report.mixed_view import mixed_view
from meshwright.planner.report.view import view_text
from meshwright.planner.request.choices import WITHOUT
from meshwright.planner.request.reader import read_request

WORKLOAD = ("--global-batch", "64", "--seq-len", "4096")
FEW = ("--pin", "tp=2,micro_batch=1,zero_stage=1,recompute=none", "--without", ",".join(WITHOUT))
"""Few layouts and one execution: what a command says of a plan, rather than which plan it is."""


def cluster_file(folder: Path, **changes: Any) -> Path:
    """Two nodes of each of two kinds, unless `changes` say otherwise."""
    data: dict[str, Any] = {
        "name": "old-and-new",
        "parts": [{"cluster": "dgx-h100", "gpus": 16}, {"cluster": "dgx-a100", "gpus": 16}],
    }
    path = folder / "mixed.yaml"
    path.write_text(yaml.safe_dump(data | changes))
    return path


def part(cluster: object, gpus: int = 8) -> dict[str, object]:
    return {"cluster": cluster, "gpus": gpus}


def run(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("model", "batch", "seq_len"),
    [
        pytest.param("llama-3-8b", 64, 4096, marks=pytest.mark.soak),
        pytest.param("gpt2-xl", 128, 1024, marks=pytest.mark.slow),
    ],
)
def test_a_plan_is_never_slower_than_on_a_part_alone(
    tmp_path: Path, model: str, batch: int, seq_len: int
) -> None:
    """2 H100 and 2 A100 nodes."""
    result = meshwright.plan_mixed(
        model, cluster=cluster_file(tmp_path), global_batch=batch, seq_len=seq_len, choices=False
    )
    document = result.document
    step_s = document.objective.step_time_s
    assert document.status == "optimal"
    assert step_s is not None
    for cluster in ("dgx-h100", "dgx-a100"):
        asked = read_request(
            model=model, cluster=cluster, gpus=16, global_batch=batch, seq_len=seq_len
        )
        alone = fastest_plan(asked)
        said = next(each for each in document.alone if each.part == cluster)
        assert said.step_time_s == alone.objective.step_time_s
        assert alone.objective.step_time_s is not None
        assert step_s <= alone.objective.step_time_s


def test_parts_of_any_name_have_nodes_that_a_hostfile_can_name(tmp_path: Path) -> None:
    parts = [
        {**part("dgx-h100"), "name": "-a\n$(b)"},
        {**part("dgx-a100"), "name": "-a\n$(b}"},
    ]
    file = tmp_path / "mixed.yaml"
    file.write_text(yaml.safe_dump({"parts": parts}), encoding="utf-8")
    result = meshwright.plan_mixed(
        "llama-2-7b",
        cluster=file,
        global_batch=16,
        seq_len=1024,
        pin="tp=4,pp=4,micro_batch=1",
        choices=False,
    )
    lines = mixed_files(result)["hostfile.template"].splitlines()
    assert [line for line in lines if line[0] != "#"] == [
        "a---b--node-00001",
        "a---b--1-node-00001",
    ]


@pytest.mark.slow
def test_the_command_writes_what_starts_the_pipeline(tmp_path: Path) -> None:
    out = tmp_path / "plan"
    cluster = cluster_file(tmp_path)
    code, text = run("plan", "llama-3-8b", "--cluster", cluster, *WORKLOAD, *FEW, "-o", out)
    assert code == 0, text
    assert "x as fast as dgx-h100 alone" in text
    assert "no pipeline through unlike devices was measured" in " ".join(text.split())
    plan = yaml.safe_load((out / "mixed_plan.yaml").read_text())
    layers = [rank["layers"] for rank in plan["ranks"]]
    assert sum(layers) == 32
    hosts = [
        line for line in (out / "hostfile.template").read_text().splitlines() if line[0] != "#"
    ]
    wanted = [name for name, count in plan["nodes"] for _ in range(count)]
    assert [host.split("-node-")[0] for host in hosts] == wanted
    assert not (out / "hostfile").exists()
    script = (out / "launch.sh").read_text()
    assert "make hostfile of hostfile.template" in script
    assert "SLURM_JOB_NODELIST" not in script
    assert f"--pipeline-model-parallel-size {plan['layout']['pp']}" in script.replace("\\\n", "")
    fast = [rank["layers"] for rank in plan["ranks"] if rank["part"] == "dgx-h100"]
    slow = [rank["layers"] for rank in plan["ranks"] if rank["part"] == "dgx-a100"]
    assert min(fast) > max(slow)


@pytest.mark.slow
def test_a_part_alone_is_the_plan_where_others_do_not_help(tmp_path: Path) -> None:
    """A handful of slow GPUs behind a slow link: the fast part is left alone, with its own plan and files."""
    parts = [{"cluster": "dgx-h100", "gpus": 16}, {"cluster": "dgx-v100", "gpus": 8}]
    cluster = cluster_file(tmp_path, parts=parts, between_gbps_per_gpu=0.1)
    result = meshwright.plan_mixed(
        "gpt2-xl",
        cluster=cluster,
        global_batch=64,
        seq_len=1024,
        precision="fp16",
        pin="micro_batch=1,zero_stage=1",
        without=WITHOUT,
        choices=False,
    )
    assert result.document.runs_on == ["dgx-h100"]
    assert result.document.status == "optimal"
    assert result.alone is not None
    assert {"launch.sh", "plan.yaml", "mixed_plan.yaml"} <= set(mixed_files(result))


@pytest.mark.slow
def test_the_json_document_names_its_kind(tmp_path: Path) -> None:
    args = (*WORKLOAD, *FEW, "--json")
    code, text = run("plan", "llama-3-8b", "--cluster", cluster_file(tmp_path), *args)
    assert code == 0, text
    document = json.loads(text)
    assert document["kind"] == "mixed-plan"
    assert document["schema"] == 1
    total = sum(document["predicted"]["breakdown_s"].values())
    assert total == pytest.approx(document["objective"]["step_time_s"], rel=1e-9)
    for rank in document["ranks"]:
        assert rank["memory_gib"] <= rank["usable_gib"]


@pytest.mark.slow
@pytest.mark.parametrize("pin", ["tp=1,micro_batch=1", "tp=1,pp=2,micro_batch=1,recompute=full"])
def test_torchtitan_runs_through_parts_too(tmp_path: Path, pin: str) -> None:
    """It recomputes all layers or none, however many ranks have."""
    result = meshwright.plan_mixed(
        "llama-3-8b",
        cluster=cluster_file(tmp_path),
        global_batch=64,
        seq_len=4096,
        framework="torchtitan",
        pin=pin,
        choices=False,
    )
    document = result.document
    assert document.status == "optimal"
    assert document.layout is not None
    longest = max(rank.layers for rank in document.ranks)
    assert document.layout.recompute_layers == (longest if "full" in pin else 0)
    assert "launch.sh" in mixed_files(result)


@pytest.mark.slow
def test_where_nothing_fits_the_answer_is_infeasible(tmp_path: Path) -> None:
    least = ("--forbid", "recompute,optimizer-offload")
    cluster = cluster_file(tmp_path)
    code, text = run("plan", "llama-3.1-405b", "--cluster", cluster, *WORKLOAD, *least)
    assert code == ExitCode.NO_ANSWER, text
    assert "no plan fits" in text


@pytest.mark.slow
def test_what_is_claimed_holds_whenever_the_time_ends(tmp_path: Path) -> None:
    """How far a search comes is the machine's affair; what it says of it is not."""
    workload: dict[str, Any] = {"global_batch": 512, "seq_len": 4096, "choices": False}
    workload["cluster"] = cluster_file(tmp_path)
    best_s = meshwright.plan_mixed("mixtral-8x7b", **workload).document.objective.step_time_s
    assert best_s is not None
    for limit_s in (0.001, 0.5, 2.0):
        ended = meshwright.plan_mixed("mixtral-8x7b", **workload, time_limit_s=limit_s).document
        bound_s, step_s = ended.objective.lower_bound_s, ended.objective.step_time_s
        assert ended.status in ("unknown", "feasible", "optimal")
        assert ended.status == "unknown" or limit_s > 0.001
        assert (ended.status == "unknown") == (step_s is None)
        assert step_s is None or step_s >= best_s * (1 - 1e-9)
        assert bound_s is None or bound_s <= best_s * (1 + 1e-9)
        assert ended.status != "optimal" or bound_s == step_s == best_s


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parts": "all"}, "must be a list"),
        ({"parts": [part("dgx-h100")]}, "parts"),
        ({"parts": [part("dgx-h100"), part("nowhere")]}, "nowhere"),
        ({"parts": [part("dgx-h100", 12), part("dgx-a100")]}, "whole number"),
        (
            {"parts": [part("dgx-h100"), part("dgx-a100"), part("dgx-a100")]},
            "'dgx-a100'; give each a name of its own",
        ),
        ({"parts": [part("dgx-h100"), {"cluster": "dgx-a100"}]}, r"parts\[1\].gpus: .* missing"),
        (
            {"parts": [part("dgx-h100") | {"name": str(each)} for each in range(9)]},
            "at most 8 entries",
        ),
        ({"parts": []}, "parts: must have at least 2 entries"),
        ({"parts": [{"base": "dgx-h100"}, part("dgx-a100")]}, "missing.*there is base"),
        ({"parts": [part(7), part("dgx-h100")]}, "catalog name"),
        ({"parts": [part("dgx-h100", -8), part("dgx-a100")]}, "-8"),
        ({"between_gbps_per_gpu": 0}, "between_gbps_per_gpu"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_files_with_mistakes_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        read_mixed_cluster(cluster_file(tmp_path, **changes))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([part("dgx-h100"), part("mi300x")], r"AMD.*#PART \(dgx-h100, mi300x\)"),
        ([part("dgx-h100"), part("gb200-nvl72", 72)], "nodes have 4 and 8"),
        ([{**part("dgx-h100"), "name": f"pool{each}"} for each in range(4)], "3 at most"),
    ],
)
def test_parts_that_no_pipeline_joins_can_be_used_one_by_one(
    tmp_path: Path, parts: list[dict[str, Any]], words: str
) -> None:
    file = cluster_file(tmp_path, parts=parts)
    with pytest.raises(InputError, match=words):
        read_mixed_request(model="llama-3-8b", cluster=file, global_batch=64, seq_len=4096)
    spec = read_mixed_cluster(file)
    alone = read_cluster(f"{file}#{spec.name_of(1)}")
    assert (alone.gpus, alone.elastic) == (spec.parts[1].gpus, False)
    with pytest.raises(InputError, match=r"no such part.*dgx-h100|no such part.*pool0"):
        read_cluster(f"{file}#nowhere")


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("llama-3-8b", ("--framework", "fsdp2"), "which this framework has not"),
        ("llama-3-8b", ("--framework", "deepspeed"), "which this framework has not"),
        ("llama-3-8b", ("--gpus", "64"), "have 32 GPUs together"),
        ("llama-3-8b", ("--hybrid-cp",), "one of its parts"),
        ("llama-3-8b", ("--top", "0"), "--top: 0 is out of range"),
        ("llama-3-8b", ("--forbid", "idle-gpus"), "may leave a part idle"),
        ("llama-3-8b", ("--allow", "activation-offload"), "to offload activations"),
        ("llama-3-8b", ("--pin", "offload_modules=core_attn"), "to offload activations"),
        ("llama-3-8b", ("--baseline", "today.sh"), "no such file"),
        ("llama-3-8b", ("--sweep", "gpus=64+128"), "whose file says what each part has"),
    ],
)
def test_what_cannot_be_asked_is_said(
    tmp_path: Path, model: str, options: tuple[str, ...], words: str
) -> None:
    code, text = run("plan", model, "--cluster", cluster_file(tmp_path), *WORKLOAD, *options)
    assert code == 2, text
    assert words in " ".join(text.split())


@pytest.mark.parametrize("pin", ["pp=2,vpp=2"])
def test_a_pin_that_no_pipeline_through_parts_keeps_leaves_the_parts_alone(
    tmp_path: Path, pin: str
) -> None:
    result = meshwright.plan_mixed(
        "llama-3-8b",
        cluster=cluster_file(tmp_path),
        global_batch=64,
        seq_len=4096,
        pin=f"tp=2,micro_batch=1,zero_stage=1,{pin}",
        without=WITHOUT,
        choices=False,
    )
    assert result.document.runs_on == ["dgx-h100"]
    assert result.alone is not None
    assert result.alone.layout is not None
    for name, value in (each.split("=") for each in pin.split(",")):
        assert getattr(result.alone.layout, name) == int(value)


@pytest.mark.soak
def test_the_next_best_plans_are_told_with_where_they_run(tmp_path: Path) -> None:
    """Those of a part alone stand among pipelines through both."""
    asked = ("plan", "llama-3-8b", "--cluster", cluster_file(tmp_path), *WORKLOAD, *FEW)
    code, text = run(*asked, "--top", 30, "--json")
    assert code == 0, text
    document = json.loads(text)
    others = document["alternatives"]
    steps_s = [document["objective"]["step_time_s"], *(each["step_time_s"] for each in others)]
    assert len(others) == 29
    assert steps_s == sorted(steps_s)
    assert others[0]["slower_pct"] == pytest.approx(100 * (steps_s[1] / steps_s[0] - 1))
    through = [each for each in others if len(each["runs_on"]) == 2]
    alone = [each for each in others if len(each["runs_on"]) == 1]
    assert through
    assert alone
    assert all(sum(each["ranks_on"]) == each["pp"] for each in through)
    assert alone[0]["step_time_s"] == min(each["step_time_s"] for each in document["alone"])
    plan = MixedPlan.model_validate(document)
    assert list(mixed_faults(plan)) == []
    swapped = plan.model_copy(update={"alternatives": plan.alternatives[::-1]})
    assert any("the one before" in fault for fault in mixed_faults(swapped))
    assert "Alternatives" in view_text(mixed_view(plan))


def small_deepseek(dense_layers: int) -> ModelSpec:
    """DeepSeek-V3 with fewer layers and experts."""
    model = meshwright.read_model("deepseek-v3")
    assert model.moe is not None
    moe = model.moe.model_copy(update={"dense_layers": dense_layers, "experts": 32})
    return model.model_copy(update={"layers": 12, "moe": moe})


@pytest.mark.slow
def test_dense_layers_in_front_go_through_parts_too(tmp_path: Path) -> None:
    """More GPUs than a part has are pinned."""
    result = meshwright.plan_mixed(
        small_deepseek(3),
        cluster=cluster_file(tmp_path),
        global_batch=64,
        seq_len=4096,
        pin="tp=1,cp=1,ep=8,dp=8,etp=1,micro_batch=1,recompute=none",
        without=WITHOUT,
        choices=False,
    )
    document = result.document
    assert document.status == "optimal"
    assert len(document.runs_on) == 2
    assert sum(rank.dense_layers for rank in document.ranks) == 3
    assert document.ranks[0].dense_layers == min(3, document.ranks[0].layers)
    files = mixed_files(result)
    assert "--moe-layer-freq '([0]*3+[1]*9)'" in files["launch.sh"]
    stages = "|".join("t" * rank.layers for rank in document.ranks)
    flag = files["launch.sh"].split("--pipeline-model-parallel-layout ")[1].split("'")[1]
    assert _written_out(flag) == f"E{stages}mL"
    write_files(tmp_path / "out", files)
    code, text = run("verify", tmp_path / "out")
    assert code == 0, text
    code, text = run("explain", tmp_path / "out" / "mixed_plan.yaml")
    assert code == 0
    assert "dense" in text
    first = document.ranks[0].model_copy(update={"dense_layers": 0})
    changed = document.model_copy(update={"ranks": [first, *document.ranks[1:]]})
    assert any("dense_layers" in fault for fault in mixed_faults(changed))


def _written_out(layout: str) -> str:
    """A layout of pipeline ranks without its repetitions, as in `(tt|)*2t*3`."""
    layout = re.sub(r"\(([^)]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), layout)
    return re.sub(r"(\w)\*(\d+)", lambda m: m[1] * int(m[2]), layout)


def test_many_dense_layers_in_front_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="up to 6 dense layers"):
        meshwright.plan_mixed(
            small_deepseek(7),
            cluster=cluster_file(tmp_path),
            global_batch=64,
            seq_len=4096,
            choices=False,
        )


def test_shard_groups_that_are_pinned_are_kept_through_parts(tmp_path: Path) -> None:
    """More GPUs than a part has are pinned, so that no part alone has such a plan."""
    result = meshwright.plan_mixed(
        "llama-3-8b",
        cluster=cluster_file(tmp_path),
        global_batch=64,
        seq_len=4096,
        pin="tp=2,dp=4,cp=1,micro_batch=1,zero_stage=1,recompute=none,shard_groups=2",
        without=WITHOUT,
        choices=False,
    )
    layout = result.document.layout
    assert layout is not None
    assert (layout.shard_groups, len(result.document.runs_on)) == (2, 2)
    files = mixed_files(result)
    assert "--num-distributed-optimizer-instances 2" in files["launch.sh"]
    write_files(tmp_path / "out", files)
    code, text = run("verify", tmp_path / "out")
    assert code == 0, text
    code, text = run("explain", tmp_path / "out" / "mixed_plan.yaml")
    assert "ZeRO 1 in 2 groups of 2" in " ".join(text.split())
    assert "edited after it was written" not in text
    file = tmp_path / "out" / "mixed_plan.yaml"
    stated = file.read_text(encoding="utf-8")
    file.write_text(stated.replace("status: optimal", "status: feasible", 1), encoding="utf-8")
    for words in (("explain", file), ("report", file, "-o", tmp_path / "page.html")):
        assert "edited after it was written" in run(*words)[1], words
    fewer = layout.model_copy(update={"shard_groups": 1})
    changed = result.document.model_copy(update={"layout": fewer})
    assert any("optimizer" in fault for fault in mixed_faults(changed))


@pytest.mark.slow
def test_an_offload_that_is_pinned_is_kept_through_parts(tmp_path: Path) -> None:
    result = meshwright.plan_mixed(
        "llama-3-8b",
        cluster=cluster_file(tmp_path),
        global_batch=64,
        seq_len=4096,
        pin="tp=2,micro_batch=1,zero_stage=1,recompute=none,optimizer_offload=50",
        without=WITHOUT,
        choices=False,
    )
    layout = result.document.layout
    assert layout is not None
    assert (layout.optimizer_offload, len(result.document.runs_on)) == (50, 2)
    assert "--optimizer-cpu-offload" in mixed_files(result)["launch.sh"]
    predicted = result.document.predicted
    assert predicted is not None
    assert predicted.host_memory_gib is not None
    without = predicted.model_copy(update={"host_memory_gib": None})
    changed = result.document.model_copy(update={"predicted": without})
    assert any("host_memory_gib" in fault for fault in mixed_faults(changed))


@pytest.mark.slow
def test_every_pipeline_may_be_priced_by_itself(tmp_path: Path) -> None:
    asked = ("plan", "llama-3-8b", "--cluster", cluster_file(tmp_path), *WORKLOAD)
    few = (FEW[0], f"{FEW[1]},cp=1,dp=8,shard_groups=1,optimizer_offload=0", *FEW[2:])
    out = tmp_path / "out"
    code, text = run(*asked, *few, "--method", "exhaustive", "-o", out, "--json")
    assert code == 0, text
    document = json.loads(text)
    assert document["solver"]["method"] == "exhaustive"
    assert "rounds" not in document["solver"]
    searched = json.loads(run(*asked, *few, "--json")[1])
    assert "method" not in searched["solver"]
    for name in ("status", "objective", "ranks", "layout", "alone"):
        assert document[name] == searched[name]
    code, text = run("verify", out)
    assert code == 0, text
    assert "every one of them priced" in " ".join(run("explain", out)[1].split())
    code, text = run(*asked, "--method", "exhaustive")
    assert code == 2
    assert "at most" in text


@pytest.mark.slow
def test_groups_that_are_too_large_for_a_domain_are_left_out_where_that_is_asked(
    tmp_path: Path,
) -> None:
    """Sixteen ranks of tp and cp do not fit into nodes of eight."""
    asked = ("plan", "llama-3-8b", "--cluster", cluster_file(tmp_path), "--global-batch", 64)
    pin = "tp=2,cp=8,dp=1,micro_batch=1,zero_stage=1,recompute=none"
    work = ("--seq-len", 32768, "--pin", pin, *FEW[2:])
    code, text = run(*asked, *work, "--json")
    assert code == 0, text
    assert len(json.loads(text)["runs_on"]) == 2
    code, text = run(*asked, *work, "--inside-domain", "cp", "--json")
    assert code == ExitCode.NO_ANSWER
    code, text = run(*asked, *work, "--inside-domain", "tp", "-o", tmp_path / "out")
    assert code == 0, text
    assert "inside one NVLink domain tp" in " ".join(text.split())
    code, text = run("verify", tmp_path / "out")
    assert code == 0, text
    plan = MixedPlan.model_validate(yaml.safe_load((tmp_path / "out/mixed_plan.yaml").read_text()))
    inputs = plan.inputs.model_copy(update={"inside_domain": ("cp",)})
    changed = plan.model_copy(update={"inputs": inputs})
    assert any("nvlink-domain" in fault for fault in mixed_faults(changed))


LISTED: dict[str, Any] = {
    "name": "listed",
    "parts": [
        {"name": "new", "cluster": {"base": "dgx-h100", "nodes": [{"name": "h[1-4]"}]}},
        {"name": "old", "cluster": {"base": "dgx-a100", "nodes": [{"name": "a[1-4]"}]}},
    ],
}
SHORT = ("--global-batch", "120", "--seq-len", "4096", *FEW)


def test_a_plan_keeps_to_the_nodes_that_are_named(tmp_path: Path) -> None:
    """It is the plan on parts of as many nodes, and its hosts are these, in the order of its ranks."""
    out, cluster = tmp_path / "out", cluster_file(tmp_path, **LISTED)
    asked = ("plan", "llama-3-8b", "--cluster", cluster, *SHORT, "--nodes", "h[2-4],a[1,3-4]")
    code, text = run(*asked, "-o", out)
    assert code == 0, text
    assert "hostfile.template" not in text
    plan = yaml.safe_load((out / "mixed_plan.yaml").read_text())
    assert sorted(plan["nodes"]) == [["new", 3], ["old", 3]]
    hosts = {"new": ["h2", "h3", "h4"], "old": ["a1", "a3", "a4"]}
    in_order = [host for name, _ in plan["nodes"] for host in hosts[name]]
    assert (out / "hostfile").read_text().split() == in_order
    assert not (out / "hostfile.template").exists()
    assert "hostfile.template" not in (out / "launch.sh").read_text()
    code, text = run("verify", out)
    assert code == 0, text
    in_order[:2] = in_order[1::-1]
    (out / "hostfile").write_text("".join(f"{host}\n" for host in in_order))
    assert run("verify", out)[0] == ExitCode.NO_ANSWER
    parts = [part("dgx-h100", 24) | {"name": "new"}, part("dgx-a100", 24) | {"name": "old"}]
    cluster = cluster_file(tmp_path, parts=parts)
    code, text = run("plan", "llama-3-8b", "--cluster", cluster, *SHORT, "--json")
    assert code == 0, text
    counted = json.loads(text)
    assert counted["objective"] == plan["objective"]
    assert counted["ranks"] == plan["ranks"]


def test_nodes_of_a_slurm_job_are_taken_and_must_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_file(tmp_path, **LISTED)
    asked: dict[str, Any] = {
        "model": "llama-3-8b", "cluster": cluster, "global_batch": 64, "seq_len": 4096,
    }  # fmt: skip
    monkeypatch.setenv("SLURM_JOB_NODELIST", "h[1-2],a[2-4]")
    assert [each.gpus for each in read_mixed_request(**asked).parts] == [16, 24]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "h[1-2],a[2-5]")
    with pytest.raises(
        InputError, match=r"^SLURM_JOB_NODELIST: .* no node 'a5' of this Slurm job: "
    ):
        read_mixed_request(**asked)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "h[1-2]")
    assert [each.gpus for each in read_mixed_request(**asked, nodes="h3,a1").parts] == [8, 8]


@pytest.mark.parametrize(
    ("parts", "nodes", "words"),
    [
        (LISTED["parts"], "h[1-2],b1", "has a node 'b1'"),
        (LISTED["parts"], "h[1-4]", "all of one part"),
        (LISTED["parts"], "h[1-", "no host list"),
        ([*LISTED["parts"][:1], part("dgx-a100")], "h1", "'dgx-a100' of listed lists no nodes"),
    ],
)
def test_nodes_that_make_no_mixed_cluster_are_refused(
    tmp_path: Path, parts: list[object], nodes: str, words: str
) -> None:
    cluster = cluster_file(tmp_path, **(LISTED | {"parts": parts}))
    code, text = run("plan", "llama-3-8b", "--cluster", cluster, *WORKLOAD, "--nodes", nodes)
    assert code == 2
    assert words in " ".join(text.split())


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([{"name": "h[1-4]", "free_gpus": 4}], "has whole nodes"),
        ([{"name": "a1"}, {"name": "h2"}], "a node is of one part"),
        ([{"name": "h[1-2]", "leaf": "l1"}, {"name": "h3", "leaf": "l2"}], "as many on each leaf"),
    ],
)
def test_parts_whose_listed_nodes_are_not_whole_or_not_alike_are_refused(
    tmp_path: Path, nodes: list[dict[str, object]], words: str
) -> None:
    new = {"name": "new", "cluster": {"base": "dgx-h100", "nodes": nodes}}
    cluster = cluster_file(tmp_path, **(LISTED | {"parts": [new, *LISTED["parts"][1:]]}))
    code, text = run("plan", "llama-3-8b", "--cluster", cluster, *WORKLOAD)
    assert code == 2
    assert words in " ".join(text.split())


def test_other_commands_say_that_the_file_has_parts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="mixed cluster"):
        meshwright.read_cluster(cluster_file(tmp_path))
    named = [{"cluster": "dgx-h100", "gpus": 64}, {"cluster": "dgx-a100", "gpus": 32}]
    words = "--cluster dgx-h100 --gpus 64, or --cluster dgx-a100 --gpus 32"
    with pytest.raises(InputError, match=f"give one of its parts here: {words}"):
        meshwright.read_cluster(cluster_file(tmp_path, parts=named))
    with pytest.raises(InputError, match=r"give one of its parts here$"):
        meshwright.read_cluster(cluster_file(tmp_path, parts=7))


def test_parts_may_be_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "new.yaml").write_text(
        yaml.safe_dump({"name": "new", "device": "h200-sxm-141gb", "gpus": 64, "gpus_per_node": 8})
    )
    parts = [{"cluster": "new.yaml"}, {"cluster": "dgx-a100", "gpus": 64}]
    cluster = cluster_file(tmp_path, parts=parts)
    assert is_mixed_cluster(str(cluster))
    spec = read_mixed_cluster(cluster)
    assert [spec.name_of(index) for index in range(2)] == ["new", "dgx-a100"]
    assert spec.gpus == 128
    assert not is_mixed_cluster("dgx-h100")
