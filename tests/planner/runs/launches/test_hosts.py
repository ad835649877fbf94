"""Ranks of a launch lie on the hosts beside its script, in their order."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import yaml

from meshwright.api import plan as planned_for
from meshwright.errors import InputError
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.choices import WITHOUT
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.launches.reader import price_launch
from meshwright.planner.runs.prediction import PricedRun, price_runs
from tests.scattered import scattered_cluster

MODEL = {
    "layers": 8, "hidden": 2048, "ffn_hidden": 8192, "heads": 16, "kv_heads": 16, "vocab": 32_000,
}  # fmt: skip


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    """A plan on 8 scattered nodes, and a folder with its files."""
    folder = tmp_path_factory.mktemp("planned")
    cluster = scattered_cluster(random.Random(3), leaves=4, per_leaf=4, free=8)
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster.model_dump(mode="json")))
    (folder / "model.json").write_text(json.dumps(MODEL))
    request = read_request(
        model=str(folder / "model.json"),
        cluster=str(folder / "cluster.yaml"),
        gpus=64,
        global_batch=16,
        seq_len=1024,
        pin="pp=2,tp=4,vpp=1,micro_batch=1,zero_stage=1",
        without=WITHOUT,
    )
    plan = fastest_plan(request)
    for name, text in plan_files(plan).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return plan, folder


@pytest.fixture
def folder(planned: tuple[Plan, Path], tmp_path: Path) -> Path:
    return shutil.copytree(planned[1], tmp_path / "plan")


def priced(folder: Path, *, output: Path | None = None) -> PricedRun:
    given = [f"cluster={folder / 'cluster.yaml'}", f"model={folder / 'model.json'}"]
    (run,) = price_launch(folder / "launch.sh", given, output)
    return run


def test_a_scattered_plan_is_read_back_to_the_digit(
    planned: tuple[Plan, Path], folder: Path
) -> None:
    plan, _ = planned
    assert plan.predicted is not None
    again = priced(folder, output=folder / "run.yaml")
    assert again.predicted.step_time_s == plan.predicted.step_time_s
    assert not [remark for remark in again.run.remarks if "nested" in remark]
    (kept,) = price_runs(folder / "run.yaml")
    assert kept.predicted.step_time_s == plan.predicted.step_time_s


def test_the_order_of_hosts_decides(folder: Path) -> None:
    """Stages that lie in both pods send their gradients between the pods."""
    hosts = (folder / "hostfile").read_text().split()
    best_s = priced(folder).predicted.step_time_s
    orders = [random.Random(seed).sample(hosts, len(hosts)) for seed in range(4)]
    seconds = []
    for order in orders:
        (folder / "hostfile").write_text("".join(f"{host} slots=8\n" for host in order))
        seconds.append(priced(folder).predicted.step_time_s)
    assert min(seconds) >= best_s
    assert max(seconds) > best_s


def test_a_rankfile_decides_before_the_hosts(folder: Path) -> None:
    """The ranks of a node turned round, so that every rank keeps its node: the price stays."""
    own_s = priced(folder).predicted.step_time_s
    lines = [f"{rank} {rank // 8} {7 - rank % 8}" for rank in range(64)]
    (folder / "rankfile").write_text("\n".join(lines))
    assert priced(folder).predicted.step_time_s == own_s
    lines = [f"{rank} {rank % 8} {rank // 8}" for rank in range(64)]
    (folder / "rankfile").write_text("\n".join(lines))
    assert priced(folder).predicted.step_time_s > own_s


@pytest.mark.parametrize(
    ("hostfile", "words"),
    [
        (None, "no hostfile lies beside the script"),
        ("elsewhere\n", "hostfile has 'elsewhere', which the cluster has not"),
        ("first\n", "hostfile has 1 hosts, too few for 64 ranks"),
    ],
)
def test_what_is_not_known_of_the_hosts_is_said(
    hostfile: str | None, words: str, planned: tuple[Plan, Path], folder: Path
) -> None:
    plan, _ = planned
    if hostfile is None:
        (folder / "hostfile").unlink()
    else:
        name = plan.inputs.cluster.nodes[0].name
        (folder / "hostfile").write_text(hostfile.replace("first", name))
    (remark,) = [remark for remark in priced(folder).run.remarks if "nested" in remark]
    assert remark.startswith(words)


@pytest.mark.parametrize("spare", ["more hosts", "a host twice", "a GPU that no node has"])
def test_ranks_that_no_host_has_are_not_placed(
    spare: str, planned: tuple[Plan, Path], folder: Path
) -> None:
    """Eight nodes are free: half of the ranks on all of them would not be what the script starts."""
    hosts = (folder / "hostfile").read_text().split()
    if spare == "more hosts":
        script = (folder / "launch.sh").read_text()
        (folder / "launch.sh").write_text(script.replace("--nnodes=8", "--nnodes=4"))
    elif spare == "a host twice":
        (folder / "hostfile").write_text("\n".join([*hosts[:-1], hosts[0]]))
    else:
        lines = [f"{rank} {rank // 8} {1 + rank % 8}" for rank in range(64)]
        (folder / "rankfile").write_text("\n".join(lines))
    assert [remark for remark in priced(folder).run.remarks if "nested" in remark]


def test_ranks_out_of_turn_lie_on_nodes_that_have_no_names(tmp_path: Path) -> None:
    """A catalog cluster names no hosts: the template beside the script counts its nodes."""
    made = planned_for(
        "llama-3-8b",
        cluster="l40s-pcie",
        gpus=16,
        global_batch=256,
        seq_len=4096,
        framework="torchtitan",
        pin={"pp": 4, "dp": 4, "tp": 1, "cp": 1, "micro_batch": 1},
        robustness=False,
    )
    for name, text in plan_files(made).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    given = ["cluster=l40s-pcie", "model=llama-3-8b"]
    lines = (tmp_path / "rankfile").read_text()
    template = (tmp_path / "hostfile.template").read_text()
    assert made.predicted is not None
    (out_of_turn,) = price_launch(tmp_path / "launch.sh", given, tmp_path / "run.yaml")
    assert out_of_turn.predicted.step_time_s == made.predicted.step_time_s
    assert any("no field for ranks out of turn" in remark for remark in out_of_turn.run.remarks)
    own = template.replace("node-00001", "gpu-a").replace("node-00002", "gpu-b")
    (tmp_path / "hostfile").write_text(own)
    (named,) = price_launch(tmp_path / "launch.sh", given)
    assert named.predicted.step_time_s == made.predicted.step_time_s
    in_turn = "".join(f"{rank} {rank // 8} {rank % 8}\n" for rank in range(16))
    (tmp_path / "rankfile").write_text(in_turn)
    (nested,) = price_launch(tmp_path / "launch.sh", given)
    assert nested.predicted.step_time_s > made.predicted.step_time_s
    (tmp_path / "rankfile").write_text(lines.replace("15 1 7", "15 1 8"))
    (other,) = price_launch(tmp_path / "launch.sh", given)
    assert other.predicted.step_time_s == nested.predicted.step_time_s
    assert any("rankfile has other ranks or GPUs" in remark for remark in other.run.remarks)


@pytest.mark.parametrize(
    ("rankfile", "message"),
    [
        ("0 0 x\n", "rank, line of hostfile and local GPU"),
        ("0 99 0\n", "on one of 8 hosts"),
        ("0 0 0\n0 0 1\n", "each rank once"),
        ("1 0 0\n", "a line for every rank"),
    ],
)
def test_a_broken_rankfile_is_an_input_error(rankfile: str, message: str, folder: Path) -> None:
    (folder / "rankfile").write_text(rankfile)
    with pytest.raises(InputError, match=message):
        priced(folder)


@pytest.mark.parametrize("hosts", [["nowhere"], ["n0-00"], []])
def test_hosts_of_a_run_file_are_checked(hosts: list[str], folder: Path) -> None:
    priced(folder, output=folder / "run.yaml")
    document = yaml.safe_load((folder / "run.yaml").read_text())
    document["run"]["hosts"] = hosts
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(InputError, match="hosts"):
        list(price_runs(folder / "run.yaml"))


def test_a_vocabulary_that_is_assumed_is_said(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nproc-per-node 8 --nnodes 1 pretrain_gpt.py --num-layers 4 --hidden-size 1024 "
        "--num-attention-heads 8 --seq-length 1024 --micro-batch-size 1 --global-batch-size 8 --bf16"
    )
    (run,) = price_launch(script, ["cluster=dgx-h100"])
    assert [remark for remark in run.run.remarks if "50,257 tokens are assumed" in remark]
    script.write_text(script.read_text() + " --vocab-size 32000")
    (run,) = price_launch(script, ["cluster=dgx-h100"])
    assert not [remark for remark in run.run.remarks if "assumed" in remark]
