"""`map`, `traffic` and plans on irregular allocations, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.cluster_specs.allocation import fabric_levels, is_irregular
from meshwright.cluster_specs.reader import read_cluster
from meshwright.planner.plan.texts import read_plan

FREE = {
    ("leaf-a", "pod-1"): 3,
    ("leaf-b", "pod-1"): 1,
    ("leaf-c", "pod-2"): 2,
    ("leaf-d", "pod-2"): 2,
}


def cluster_file(tmp_path: Path, *, extra: int = 0, half: bool = False) -> Path:
    """Eight nodes and some more on four uneven leaves in two pods; with `half`, the first has 4 free GPUs."""
    lines = [
        "name: uneven",
        "base: dgx-h100",
        "levels:",
        "- {name: leaf, gpus: 32}",
        "- {name: pod, gpus: 128, oversubscription: 2}",
        "- {name: core, gpus: 256, oversubscription: 4}",
        "nodes:",
    ]
    number = 0
    for (leaf, pod), count in FREE.items():
        for _ in range(count + (extra if leaf == "leaf-b" else 0)):
            free = ", free_gpus: 4" if half and number == 0 else ""
            lines.append(f"- {{name: host{number}, leaf: {leaf}, pod: {pod}{free}}}")
            number += 1
    path = tmp_path / "cluster.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    return result.exit_code, result.stdout


def document(*arguments: object) -> dict[str, Any]:
    code, text = run(*arguments, "--json")
    assert code == 0, text
    found: dict[str, Any] = json.loads(text)
    assert found["schema"] == 1
    return found


PLAIN = ("--without", "cuda-graph,tp-overlap")
"""Leaves the plan one execution."""


@pytest.fixture(scope="module")
def regular(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of 64 GPUs, tp 8 in each node and a pipeline of 2."""
    folder = tmp_path_factory.mktemp("plan") / "out"
    pins = "tp=8,pp=2,dp=4,cp=1,vpp=1,micro_batch=1,recompute=none,zero_stage=1"
    code, text = run(
        "plan", "llama-3-8b", "--cluster", "dgx-h100", "--gpus", 64, "--global-batch", 64, "--seq-len", 4096,
        "--pin", pins, *PLAIN, "-o", folder,
    )  # fmt: skip
    assert code == 0, text
    return folder


def test_map_places_every_rank_once(regular: Path, tmp_path: Path) -> None:
    found = document("map", regular, "--cluster", cluster_file(tmp_path), "-o", tmp_path / "out")
    assert sorted(map(tuple, found["ranks"])) == [
        (node, gpu) for node in range(8) for gpu in range(8)
    ]
    assert found["order"] == ["tp", "cp", "ep", "dp", "pp"]
    assert found["status"] == "optimal"
    assert found["lower_bound_s"] <= found["price_s"] * (1 + 1e-6)
    assert found["price_s"] <= found["hostname_order"]["price_s"]
    nodes = [{node for node, _ in found["ranks"][at : at + 8]} for at in range(0, 64, 8)]
    assert all(len(one) == 1 for one in nodes)
    written = read_plan(tmp_path / "out")
    assert written.mapping is not None
    assert [list(place) for place in written.mapping.ranks or []] == found["ranks"]
    assert (tmp_path / "out" / "mapping" / "fabric.svg").is_file()


def test_hostname_order_is_what_map_says_beside_it(regular: Path, tmp_path: Path) -> None:
    cluster = cluster_file(tmp_path)
    best = document("map", regular, "--cluster", cluster)
    plain = document("map", regular, "--cluster", cluster, "--order", "hostname")
    assert plain["price_s"] == pytest.approx(best["hostname_order"]["price_s"])
    assert plain["ranks"] == [[node, gpu] for node in range(8) for gpu in range(8)]


def test_spares_stay_free_or_it_is_said(regular: Path, tmp_path: Path) -> None:
    cluster = cluster_file(tmp_path, extra=2)
    found = document("map", regular, "--cluster", cluster, "--spares", 2)
    assert len(found["idle_nodes"]) == 2
    code, text = run("map", regular, "--cluster", cluster, "--spares", 3, "--json")
    assert code == 1
    assert "spare" in json.loads(text)["error"]["message"]


def test_the_certificate_says_what_it_is_of(regular: Path, tmp_path: Path) -> None:
    whole = " ".join(run("map", regular, "--cluster", cluster_file(tmp_path))[1].split())
    assert "proven least of all ways to lay these slots of 8 GPUs" in whole
    assert "outside this proof" not in whole


@pytest.mark.slow
def test_spares_are_whole_nodes_where_slots_are_parts_of_them(tmp_path: Path) -> None:
    """Six slots of 4 GPUs on 9 free ones: the three left over must hold a whole node, wherever that is."""
    out = tmp_path / "plan"
    code, text = run(
        "plan", "llama-3-8b", "--cluster", "dgx-h100", "--gpus", 24, "--global-batch", 48, "--seq-len", 4096,
        "--pin", "tp=4,pp=1,dp=6,cp=1,micro_batch=1,recompute=none,zero_stage=1", *PLAIN, "-o", out,
    )  # fmt: skip
    assert code == 0, text
    free = [("a", 4), ("a", 4), ("b", 8), ("b", 8), ("c", 4), ("c", 8)]
    lines = ["base: dgx-h100", "levels:", "- {name: leaf, gpus: 32}"]
    lines += ["- {name: core, gpus: 64, oversubscription: 4}", "nodes:"]
    lines += [
        f"- {{name: n{at}, leaf: {leaf}, free_gpus: {gpus}}}"
        for at, (leaf, gpus) in enumerate(free)
    ]
    path = tmp_path / "halves.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = document("map", out, "--cluster", path, "--spares", 1)
    assert any(free[int(name[1:])][1] == 8 for name in found["idle_nodes"])
    said = " ".join(run("map", out, "--cluster", path, "--spares", 1)[1].split())
    assert "proven least of all ways to lay these slots of 4 GPUs" in said
    assert "Slots are parts of nodes: other cuts of the nodes, and the step, are outside" in said
    for spares, status in ((1, 0), (2, 1)):
        assert run("map", out, "--cluster", path, "--spares", spares, "--json")[0] == status


def test_a_part_filled_node_is_used_in_parts(regular: Path, tmp_path: Path) -> None:
    """tp 8 needs whole nodes: the half-filled one stays idle."""
    found = document("map", regular, "--cluster", cluster_file(tmp_path, extra=1, half=True))
    assert found["idle_nodes"] == ["host0"]


def test_a_kind_of_node_has_none_left_over(regular: Path) -> None:
    assert document("map", regular)["idle_nodes"] == []


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--objective", "latency"], "objective"),
        (["--order", "random"], "order"),
        (["--spares", "-1"], "spares"),
    ],
)
def test_bad_wishes_are_refused(regular: Path, options: list[str], part: str) -> None:
    code, text = run("map", regular, *options, "--json")
    assert code == 2
    assert part in json.loads(text)["error"]["message"]


def test_traffic_adds_up(regular: Path) -> None:
    found = document("traffic", regular)
    for level in found["levels"]:
        assert sum(level["by_axis"].values()) == pytest.approx(level["bytes_per_step"])
    assert found["binding"]["utilisation"] == max(cut["utilisation"] for cut in found["cuts"])
    assert found["axes"]["pp"]["pattern"] == "chain"
    assert not found["broken"]
    code, text = run("traffic", regular)
    assert code == 0
    assert "is used most" in text
    # Columns of many axes were broken in the middle of a word.
    assert len({axis for level in found["levels"] for axis in level["by_axis"]}) > 2
    assert {"fullest", *(level["level"] for level in found["levels"])} <= set(text.split())


@pytest.mark.slow
def test_a_plan_on_an_irregular_allocation_has_a_real_mapping_and_a_proof(tmp_path: Path) -> None:
    path, out = cluster_file(tmp_path), tmp_path / "plan"
    code, text = run(
        "plan", "llama-3-8b", "--cluster", path, "--global-batch", 64, "--seq-len", 4096,
        "--pin", "tp=8,cp=1,micro_batch=1,recompute=none", *PLAIN, "-o", out, "--json",
    )  # fmt: skip
    assert code == 0, text
    found = json.loads(text)
    assert found["status"] == "optimal"
    assert found["objective"]["gap"] == 0
    assert found["mapping"]["matrix"] == {}
    assert len({tuple(place) for place in found["mapping"]["ranks"]}) == 64
    assert any(one["rule"] == "bisection" for one in found["binding"])
    assert found["solver"]["space"]["mapping"] == "slots-to-leaves"
    for command in ("traffic", "map", "explain"):
        assert run(command, out, "--json")[0] == 0


@pytest.mark.slow
def test_a_plan_says_which_nodes_stay_idle_and_what_using_them_would_cost(tmp_path: Path) -> None:
    """Nine nodes for 64 sequences: eight take a power of two of replicas, nine need a pipeline of nine."""
    path = cluster_file(tmp_path, extra=1)
    asked = [
        "plan", "llama-3-8b", "--cluster", path, "--global-batch", 64, "--seq-len", 4096,
        "--pin", "tp=8,cp=1,micro_batch=1,recompute=none", *PLAIN,
    ]  # fmt: skip
    found = document(*asked)
    full = document(*asked, "--forbid", "idle-gpus")
    assert found["idle"]["gpus"] == 8
    assert len(found["idle"]["nodes"]) == 1
    used = {node for node, _ in found["mapping"]["ranks"]}
    assert found["idle"]["nodes"] == [f"host{node}" for node in range(9) if node not in used]
    assert found["idle"]["full_step_time_s"] == pytest.approx(full["objective"]["step_time_s"])
    assert full["objective"]["step_time_s"] > found["objective"]["step_time_s"]
    assert full["idle"] is None
    assert any(
        "stay idle: the best layout on all 72 GPUs takes" in text for text in found["warnings"]
    )


def test_levels_of_an_irregular_allocation_are_those_of_the_fullest_blocks(tmp_path: Path) -> None:
    cluster = read_cluster(str(cluster_file(tmp_path)))
    assert is_irregular(cluster)
    assert fabric_levels(cluster, 64).blocks.tolist() == [8, 24, 32, 64]
    assert fabric_levels(cluster, 64).names == ("nvlink", "leaf", "pod", "core")


def test_spread_is_minimised_beside_hostname_order(regular: Path, tmp_path: Path) -> None:
    """Two stages of four nodes on two pods of 4: a stage in each pod, or each replica inside one."""
    cluster = cluster_file(tmp_path)
    found = document("map", regular, "--cluster", cluster, "--objective", "spread")
    certificate = found["spread_certificate"]
    assert found["objective"] == "spread"
    assert certificate["pods"]["found"] == [1, 2]
    assert certificate["pods"]["status"] == certificate["leaves"]["status"] == "optimal"
    for level in ("pods", "leaves"):
        reach = found["spread"][level]
        assert certificate[level]["found"] == [reach["data_parallel_max"], reach["pipeline_max"]]
        before = found["hostname_order"]["spread"][level]
        assert max(certificate[level]["found"]) <= max(
            before["data_parallel_max"], before["pipeline_max"]
        )
    pipelines = document(
        "map", regular, "--cluster", cluster, "--objective", "spread", "--dp-weight", 0
    )
    assert pipelines["spread_certificate"]["pods"]["found"] == [2, 1]
    assert document("map", regular, "--cluster", cluster)["spread_certificate"] is None
    code, text = run("map", regular, "--cluster", cluster, "--objective", "spread")
    assert code == 0
    assert "touched at most" in text


def test_hostname_order_has_no_bound_of_its_spread(regular: Path, tmp_path: Path) -> None:
    path = cluster_file(tmp_path)
    plain = document(
        "map", regular, "--cluster", path, "--order", "hostname", "--objective", "spread"
    )
    assert plain["spread"] == plain["hostname_order"]["spread"]
    assert plain["price_s"] == plain["uplinks_busy_s"]


@pytest.fixture(scope="module")
def part_filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a plan of 11 GPUs on two of four nodes, the cluster file with all four): two have 3 GPUs free."""
    folder = tmp_path_factory.mktemp("part")
    cluster = folder / "cluster.yaml"
    cluster.write_text(
        "name: four\nbase: dgx-h100\n"
        "levels:\n- {name: leaf, gpus: 32}\n- {name: core, gpus: 256, oversubscription: 4}\n"
        "nodes:\n- {name: a0, leaf: l0}\n- {name: a1, leaf: l0, free_gpus: 3}\n"
        "- {name: b0, leaf: l1}\n- {name: c0, leaf: l2, free_gpus: 3}\n",
        encoding="utf-8",
    )
    code, text = run(
        "plan", "gpt2-xl", "--cluster", cluster, "--nodes", "a[0-1]", "--global-batch", 22, "--seq-len", 2048,
        "--pin", "tp=1,pp=1,dp=11", "--framework", "fsdp2", "-o", folder / "plan",
    )  # fmt: skip
    assert code == 0, text
    return folder / "plan", cluster


@pytest.mark.parametrize("command", ["map", "launch"])
def test_a_plan_is_placed_on_other_nodes_and_priced_there(
    command: str, part_filled: tuple[Path, Path], tmp_path: Path
) -> None:
    plan, cluster = part_filled
    before = read_plan(plan)
    (tmp_path / "hosts").write_text("b0\nc0\n", encoding="utf-8")
    nodes = tmp_path / "hosts" if command == "map" else "b0,c0"
    code, text = run(command, plan, "--cluster", cluster, "--nodes", nodes, "-o", tmp_path / "out")
    assert code == 0, text
    after = read_plan(tmp_path / "out")
    assert after.mapping is not None
    assert {node for node, _ in after.mapping.ranks or []} == {2, 3}
    assert after.layout == before.layout
    assert after.execution == before.execution
    hosts = (tmp_path / "out" / "hostfile").read_text(encoding="utf-8").split()
    assert sorted(hosts) == ["b0", "c0"]
    # Two leaves at a quarter of the rate in place of one: slower, and said to be unproven.
    assert before.objective.step_time_s is not None
    assert after.objective.step_time_s is not None
    assert after.objective.step_time_s > before.objective.step_time_s * 1.01
    assert (after.status, after.objective.lower_bound_s) == ("feasible", None)
    code, text = run("verify", tmp_path / "out")
    assert code == 0, text


def test_a_plan_with_limited_cuts_is_placed(tmp_path: Path) -> None:
    """Cuts are counted from the ranks, where a placed plan has no matrix."""
    pins = "tp=8,pp=2,dp=2,cp=1,vpp=1,micro_batch=1,recompute=none,zero_stage=1"
    code, text = run(
        "plan", "llama-3-8b", "--cluster", "dgx-h100", "--gpus", 32, "--global-batch", 64, "--seq-len", 4096,
        "--pin", pins, *PLAIN, "--max-cut-use", 0.5, "-o", tmp_path / "plan",
    )  # fmt: skip
    assert code == 0, text
    code, text = run("map", tmp_path / "plan", "-o", tmp_path / "out")
    assert code == 0, text
    code, text = run("verify", tmp_path / "out")
    assert code == 0, text


def test_what_a_plan_says_of_packs_and_of_its_training_goes_along(
    part_filled: tuple[Path, Path], tmp_path: Path
) -> None:
    """Days, packs and their tokens a second are of the step on the other nodes."""
    _, cluster = part_filled
    lengths, out = tmp_path / "lengths.csv", tmp_path / "out"
    lengths.write_text("length,count\n100,50\n500,100\n900,20\n", encoding="utf-8")
    code, text = run(
        "plan", "gpt2-xl", "--cluster", cluster, "--nodes", "a[0-1]", "--global-batch", 22,
        "--lengths", lengths, "--pin", "tp=1,pp=1,dp=11,micro_batch=1", "--framework", "fsdp2",
        "--tokens", 1e10, "--days", 1e3, "-o", tmp_path / "plan",
    )  # fmt: skip
    assert code == 0, text
    code, text = run(
        "launch", tmp_path / "plan", "--cluster", cluster, "--nodes", "b0,c0", "-o", out
    )
    assert code == 0, text
    before, after = read_plan(tmp_path / "plan"), read_plan(out)
    for plan in (before, after):
        assert plan.predicted is not None
        assert plan.lengths is not None
        assert plan.cost is not None
        assert plan.lengths.planned.step_time_s == pytest.approx(plan.predicted.step_time_s)
        steps = 1e10 / plan.inputs.tokens_per_step
        assert plan.cost.plan.days == pytest.approx(steps * plan.predicted.step_time_s / 86_400)
    code, text = run("verify", out)
    assert code == 0, text


def test_nodes_that_cannot_hold_the_plan_are_refused(
    part_filled: tuple[Path, Path], tmp_path: Path
) -> None:
    plan, cluster = part_filled
    for command in ("map", "launch"):
        more = ["-o", str(tmp_path / command), "--json"]
        code, text = run(command, plan, "--cluster", cluster, "--nodes", "b0", *more)
        assert code == 1
        assert "needs 11 GPUs" in json.loads(text)["error"]["message"]
        code, text = run(command, plan, "--cluster", cluster, "--nodes", "b1", *more)
        assert code == 2
        message = json.loads(text)["error"]["message"]
        asked = ("plan", "gpt2-xl", "--cluster", cluster, "--nodes", "b1", "--global-batch", 22)
        refused = run(*asked, "--seq-len", 2048, "--json")
        assert message == json.loads(refused[1])["error"]["message"]
        # The plan's own cluster has only its nodes free.
        code, text = run(command, plan, "--nodes", "a0,b0", *more)
        assert code == 1
        assert "--cluster" in json.loads(text)["error"]["message"]
        assert not (tmp_path / command).exists()


def test_a_placed_plan_must_keep_the_rules_there(tmp_path: Path, regular: Path) -> None:
    """What one device can run is not placed on another."""
    small = cluster_file(tmp_path)
    small.write_text(
        small.read_text("utf-8").replace("base: dgx-h100", "base: dgx-v100"), encoding="utf-8"
    )
    code, text = run("map", regular, "--cluster", small, "--json")
    assert code == 1
    assert "bf16" in json.loads(text)["error"]["message"]
