"""The fewest GPUs that reach a target, against planning every size; prices; the Pareto front."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.errors import InputError, OutOfTimeError
from meshwright.planner.many.batch import do_job
from meshwright.planner.many.recommend import (
    Recommendation,
    SizedPlan,
    SizeRequest,
    plan_sizes,
    recommendation_document,
)
from meshwright.planner.report.many_view import recommend_view
from meshwright.planner.report.view import line
from meshwright.planner.request.choices import WITHOUT

PINS = "micro_batch=1,cp=1,pp=1,zero_stage=1"
PLAN = {"global_batch": 64, "seq_len": 2048, "pin": PINS, "without": WITHOUT}
"""Few layouts and one execution."""
SIZES = (*range(1, 9), 16, 24)


def quiet(_: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def step_s(kept: Path) -> dict[int, float]:
    """The best step time at every size."""
    found = {}
    for size in SIZES:
        fields = {**PLAN, "name": "x", "model": "llama-3-8b", "cluster": "dgx-h100", "gpus": size}
        found[size] = do_job(fields, str(kept))["row"].get("step_time_s") or float("inf")
    return found


def wish(kept: Path, **fields: Any) -> SizeRequest:
    base: dict[str, Any] = {
        "model": "llama-3-8b",
        "clusters": ("dgx-h100",),
        "plan": PLAN,
        "most_gpus": 24,
    }
    return SizeRequest(**{**base, "workers": 1, "cache": kept, **fields})


def test_more_gpus_are_never_slower(step_s: dict[int, float]) -> None:
    times = [step_s[size] for size in SIZES]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1, 2.5, 6.0])
def test_the_fewest_are_those_of_trying_all(
    kept: Path, step_s: dict[int, float], factor: float
) -> None:
    target_s = step_s[24] * factor
    answer = plan_sizes(wish(kept, step_time_s=target_s), quiet)
    enough = [size for size in SIZES if step_s[size] <= target_s]
    if not enough:
        assert (answer.reached, [point.gpus for point in answer.missed]) == ((), [24])
        return
    (point,) = answer.reached
    assert point.gpus == min(enough)
    assert point.step_time_s <= target_s
    below = answer.smaller["dgx-h100"]
    assert below is not None
    assert below.gpus == SIZES[SIZES.index(point.gpus) - 1]
    assert below.step_time_s > target_s


@pytest.mark.slow
def test_the_fewest_of_which_none_is_idle_are_those_of_trying_all(kept: Path) -> None:
    """12 sequences: 8, 16 and 24 GPUs have no plan, by which smaller ones were said to reach nothing."""
    plan = {**PLAN, "global_batch": 12, "pin": f"{PINS},tp=1", "forbid": "idle-gpus"}
    fields = {**plan, "name": "x", "model": "llama-3.2-1b", "cluster": "dgx-h100"}
    step_s = {
        size: do_job({**fields, "gpus": size}, str(kept))["row"].get("step_time_s") or float("inf")
        for size in SIZES
    }
    assert step_s[8] == step_s[16] == step_s[24] == float("inf")
    for target_s in (step_s[4], step_s[2], 1.01 * step_s[1], 0.9 * step_s[4]):
        answer = plan_sizes(
            wish(kept, plan=plan, model="llama-3.2-1b", step_time_s=target_s), quiet
        )
        fewest = min((size for size in SIZES if step_s[size] <= target_s), default=None)
        assert [each.gpus for each in answer.reached] == ([] if fewest is None else [fewest])
        proven = recommendation_document(answer)["proven_fewest"]
        assert proven == ({} if fewest is None else {"dgx-h100": True})


def test_numbers_of_gpus_that_do_not_divide_a_node_are_tried(kept: Path) -> None:
    """60 sequences: six of a node's GPUs have a plan that four do not reach; eight were recommended."""
    plan = {**PLAN, "global_batch": 60}
    fields = {**plan, "name": "x", "model": "llama-3-8b", "cluster": "dgx-h100"}
    step_s = [do_job({**fields, "gpus": n}, str(kept))["row"]["step_time_s"] for n in range(2, 9)]
    assert step_s == sorted(step_s, reverse=True)
    for target_s in (step_s[4], 1.01 * step_s[3], 0.99 * step_s[2]):
        (point,) = plan_sizes(wish(kept, plan=plan, step_time_s=target_s), quiet).reached
        assert point.gpus == 2 + min(k for k, took_s in enumerate(step_s) if took_s <= target_s)


def test_tokens_per_second_are_a_step_time(kept: Path, step_s: dict[int, float]) -> None:
    rate = 64 * 2048 / step_s[16]
    (point,) = plan_sizes(wish(kept, tokens_per_s=rate * 0.999), quiet).reached
    assert point.gpus == 16


def test_part_filled_nodes_have_sizes_between_whole_ones(kept: Path, tmp_path: Path) -> None:
    """12 GPUs are a whole node and half of another; whole nodes alone were tried, and 16 were too many."""
    path = tmp_path / "part.yaml"
    nodes = [{"name": f"n{at}", "free_gpus": free} for at, free in enumerate((8, 4))]
    path.write_text(yaml.safe_dump({"base": "dgx-h100", "nodes": nodes}), encoding="utf-8")
    fields = {**PLAN, "global_batch": 72, "name": "x", "model": "llama-3-8b", "cluster": str(path)}
    twelve_s = do_job({**fields, "gpus": 12}, str(kept))["row"]["step_time_s"]
    eight_s = do_job({**fields, "gpus": 8}, str(kept))["row"]["step_time_s"]
    assert twelve_s < eight_s
    asked = {"plan": {**PLAN, "global_batch": 72}, "clusters": (str(path),), "most_gpus": None}
    (point,) = plan_sizes(wish(kept, step_time_s=twelve_s, **asked), quiet).reached
    assert (point.gpus, point.step_time_s) == (12, twelve_s)


@pytest.mark.soak
def test_prices_decide_where_there_are_any(
    kept: Path, tmp_path: Path, step_s: dict[int, float]
) -> None:
    names = []
    for name, price in (("dear", 9.0), ("cheap", 2.0)):
        path = tmp_path / f"{name}.yaml"
        fields = {"name": name, "base": "dgx-h100" if name == "dear" else "dgx-a100", "gpus": 64}
        path.write_text(yaml.safe_dump({**fields, "usd_per_gpu_hour": price}), encoding="utf-8")
        names.append(str(path))
    asked = wish(kept, clusters=tuple(names), step_time_s=step_s[8] * 1.01, most_gpus=48)
    answer = plan_sizes(asked, quiet)
    assert [Path(point.cluster).stem for point in answer.reached] == ["cheap", "dear"]
    cheap, dear = answer.reached
    assert cheap.gpus > dear.gpus
    assert cheap.usd_per_h == pytest.approx(2.0 * cheap.gpus)
    hours = 1e9 / (64 * 2048) * dear.step_time_s / 3600
    assert dear.usd_per_billion_tokens == pytest.approx(9.0 * dear.gpus * hours)


def point(gpus: int, step_time_s: float | None, headroom_gib: float | None) -> SizedPlan:
    row = {"step_time_s": step_time_s, "status": "optimal" if step_time_s else "infeasible"}
    given: dict[str, Any] = {"cluster": "c", "reserve_gib": 0.0, "usd_per_h": None, "files": {}}
    return SizedPlan(**given, gpus=gpus, row=row, headroom_gib=headroom_gib)


def test_the_front_is_what_nothing_beats(kept: Path) -> None:
    points = (
        point(8, 4.0, 10),
        point(8, 5.0, 9),
        point(8, 5.0, 20),
        point(16, 4.0, 10),
        point(16, 2.0, 10),
        point(4, None, None),
    )
    front = Recommendation(request=wish(kept), sweep=points).front
    assert [points.index(one) for one in front] == [0, 2, 4]


@pytest.mark.slow
def test_the_command_writes_table_picture_and_plan(kept: Path, tmp_path: Path) -> None:
    line = [
        "recommend",
        "llama-3-8b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "48",
        "--global-batch",
        "64",
    ]
    line += ["--seq-len", "2048", "--step-time", "3", "--sizes", "8,16", "--reserve-gib", "30"]
    line += ["--memory-risk", "0.5", "--pin", PINS]
    out = tmp_path / "out"
    done = CliRunner().invoke(
        main, [*line, "--workers", "1", "--cache", str(kept), "-o", str(out), "--json"]
    )
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document == json.loads((out / "recommend.json").read_text(encoding="utf-8"))
    assert (
        document["recommended"]["step_time_s"]
        <= 3
        < document["next_smaller"]["dgx-h100"]["step_time_s"]
    )
    with (out / "sweep.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["gpus"], row["reserve_gib"]) for row in rows] == [
        ("8", "0.0"),
        ("8", "30.0"),
        ("16", "0.0"),
        ("16", "30.0"),
    ]
    assert all(
        float(row["headroom_gib"]) >= float(row["reserve_gib"])
        for row in rows
        if row["headroom_gib"]
    )
    ElementTree.fromstring((out / "sweep.svg").read_text(encoding="utf-8"))
    plan = yaml.safe_load((out / "plan/plan.yaml").read_text(encoding="utf-8"))
    assert plan["objective"]["step_time_s"] == document["recommended"]["step_time_s"]


@pytest.mark.parametrize(
    ("more", "code", "part"),
    [
        (["--gpus", "16", "--step-time", "0.001"], 1, "misses"),
        (["--step-time", "1"], 2, "--gpus"),
        (["--gpus", "16", "--step-time", "1", "--tokens-per-s", "1"], 2, "one target"),
        (["--gpus", "16", "--step-time", "0"], 2, "more than 0"),
        (["--gpus", "16", "--tokens-per-s", "1e30"], 2, "below 1e18"),
        (["--gpus", "16", "--step-time", "9", "--time-limit", "nan"], 2, "time_limit: "),
        (["--gpus", "16", "--step-time", "9", "--seq-len", "0"], 2, "seq_len: "),
        (["--gpus", "16", "--step-time", "9", "--time-limit", "0", "--no-cache"], 3, "came before"),
        (["--gpus", "16", "--time-limit", "0", "--no-cache"], 0, "the time limit came first"),
        (["--gpus", "16", "--sizes", "8,x"], 2, "'x'"),
        (["--gpus", "16", "--sizes", "0"], 2, "choose 1 to"),
        (["--gpus", "16", "--pin", "tq=1", "--step-time", "9"], 2, "'tq' is not known"),
    ],
)
def test_what_cannot_be_answered_says_so(kept: Path, more: list[str], code: int, part: str) -> None:
    line = [
        "recommend",
        "llama-3-8b",
        "--cluster",
        "dgx-h100",
        "--global-batch",
        "64",
        "--seq-len",
        "2048",
    ]
    done = CliRunner().invoke(main, [*line, "--cache", str(kept), "--workers", "1", *more])
    assert done.exit_code == code, done.output
    assert part in done.output


def test_racks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of NVL72 one orders racks, not GPUs."""

    def planned(fields: dict[str, Any], _: str | None) -> dict[str, Any]:
        figures = {"lower_bound_s": 1e3 / fields["gpus"], "tokens_per_s": 1e5, "mfu": 0.1}
        row = {"status": "optimal", "step_time_s": 1e3 / fields["gpus"], "tp": 8, "pp": 1, "dp": 4}
        return {"row": {**row, **figures, "message": ""}, "files": {}}

    monkeypatch.setattr("meshwright.planner.many.recommend.do_job", planned)
    for cluster, words in (("gb200-nvl72", " in 2 NVLink domains of 72: "), ("dgx-h100", ": ")):
        request = SizeRequest(
            model="llama-3-8b", clusters=(cluster,), plan=PLAN, most_gpus=288, step_time_s=1e3 / 104
        )
        (first, *_) = recommend_view(plan_sizes(request, quiet))
        assert f"104 GPUs of {cluster}{words}" in str(first)


def test_a_kind_of_node_needs_a_limit(kept: Path) -> None:
    with pytest.raises(InputError, match="the most that may be taken"):
        plan_sizes(wish(kept, most_gpus=None), quiet)


def mixed(folder: Path, **prices: float) -> str:
    parts = [
        {"cluster": {"base": name, "gpus": 8, "usd_per_gpu_hour": price}, "gpus": 8, "name": name}
        for name, price in prices.items()
    ]
    path = folder / "mixed.yaml"
    path.write_text(yaml.safe_dump({"name": "both", "parts": parts}), encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_parts_of_a_mixed_cluster_are_taken_alone_first(kept: Path, tmp_path: Path) -> None:
    """8 GPUs at 2 dollars and 8 at 1, beside another cluster: all 16 were taken where one was enough."""
    path = mixed(tmp_path, **{"dgx-h100": 2.0, "dgx-a100": 1.0})
    pin = "micro_batch=1,tp=1,cp=1,zero_stage=1,recompute=none"
    plan = {"global_batch": 64, "seq_len": 2048, "without": WITHOUT, "pin": pin}
    fields = {**plan, "name": "x", "model": "llama-3.2-1b", "cluster": path}
    row = do_job(fields, None)["row"]
    assert " then " in row["runs_on"]
    clusters = (path, "dgx-v100")
    asked = wish(
        kept,
        model="llama-3.2-1b",
        clusters=clusters,
        plan=plan,
        most_gpus=16,
        step_time_s=row["step_time_s"] * 1.001,
    )
    answer = plan_sizes(asked, quiet)
    (both,) = [each for each in answer.reached if each.cluster.startswith(path)]
    assert (both.cluster, both.gpus, both.usd_per_h) == (path, 16, 8 * 2.0 + 8 * 1.0)
    assert both.step_time_s == pytest.approx(row["step_time_s"])
    assert both.row["runs_on"] == row["runs_on"]
    assert both.headroom_gib is not None
    document = recommendation_document(answer)
    assert document["proven_fewest"][path] is False
    names = [f"{path}#dgx-h100", f"{path}#dgx-a100", "dgx-v100"]
    assert [each.cluster for each in answer.missed] == names
    four_s = do_job({**fields, "cluster": f"{path}#dgx-a100", "gpus": 4}, str(kept))["row"]
    few = replace(asked, clusters=(path,), step_time_s=four_s["step_time_s"])
    reached = {each.cluster: each.gpus for each in plan_sizes(few, quiet).reached}
    assert reached[f"{path}#dgx-a100"] == 4
    assert path not in reached
    sweep = plan_sizes(replace(few, step_time_s=None, most_gpus=4), quiet).sweep
    assert {each.gpus for each in sweep} == {1, 2, 4}
    for wrong in ({"most_gpus": 17}, {"sizes": (24,)}):
        with pytest.raises(InputError, match="the parts of both have 16 GPUs together"):
            plan_sizes(replace(asked, **wrong), quiet)


@pytest.mark.slow
def test_the_verdict_names_the_parts(kept: Path, tmp_path: Path) -> None:
    path = mixed(tmp_path, **{"dgx-h100": 2.0, "dgx-a100": 1.0})
    pin = "micro_batch=1,tp=1,cp=1,zero_stage=1,recompute=none"
    fields = {"global_batch": 64, "seq_len": 2048, "pin": pin, "name": "x", "model": "llama-3.2-1b"}
    step_s = do_job({**fields, "cluster": path}, None)["row"]["step_time_s"] * 1.001
    line = f"recommend llama-3.2-1b --cluster {path} --global-batch 64 --seq-len 2048 --pin {pin} --step-time"
    more = ["--cache", str(kept), "--workers", "1"]
    done = CliRunner().invoke(main, [*line.split(), str(step_s), *more])
    assert done.exit_code == 0, done.output
    said = "".join(done.stdout.split())  # long paths are broken anywhere
    assert said.startswith(f"16GPUsof{path},ondgx-h100thendgx-a100")
    assert "Nopartalonereachesit" in said
    done = CliRunner().invoke(main, [*line.split(), "60", *more])
    assert "".join(done.stdout.split()).startswith(f"1GPUof{path}#dgx-a100")


@pytest.mark.slow
def test_adapters_and_kinds_of_a_step_have_sizes_too(kept: Path) -> None:
    """As `plan` counts them on the size that is recommended."""
    line = (
        "recommend llama-3.2-1b --cluster dgx-h100 --gpus 4 --global-batch 16 --seq-len 1024 "
        "--framework fsdp2 --step-time 60 --train lora --lora-rank 8 --lora-targets q_proj,v_proj "
        "--kind dpo --pin micro_batch=1 --json"
    )
    done = CliRunner().invoke(main, [*line.split(), "--cache", str(kept), "--workers", "1"])
    assert done.exit_code == 0, done.output
    (reached,) = json.loads(done.stdout)["reached"]
    asked = {"global_batch": 16, "seq_len": 1024, "framework": "fsdp2", "kind": "dpo"}
    adapters = {"train": "lora", "lora_rank": 8, "lora_targets": "q_proj,v_proj"}
    fields = {**asked, **adapters, "pin": "micro_batch=1", "name": "x", "model": "llama-3.2-1b"}
    row = do_job({**fields, "cluster": "dgx-h100", "gpus": reached["gpus"]}, None)["row"]
    assert reached["step_time_s"] == pytest.approx(row["step_time_s"])
    wrong = [*line.replace("--lora-rank 8", "--lora-rank 0").split(), "--no-cache"]
    refused = CliRunner().invoke(main, [*wrong, "--workers", "1"])
    assert refused.exit_code == 2
    assert "lora_rank: must be 1 to 8192" in refused.output


@pytest.mark.parametrize("exponent", [1.0, 0.5, 0.05])
def test_few_sizes_are_planned(monkeypatch: pytest.MonkeyPatch, exponent: float) -> None:
    """Of 1,031 sizes, whose steps fall with so high a power of the GPUs: halving plans twelve."""
    asked = []

    def planned(fields: dict[str, Any], _: str | None) -> dict[str, Any]:
        asked.append(fields["gpus"])
        step_s = 1000.0 * fields["gpus"] ** -exponent
        return {"row": {"status": "optimal", "step_time_s": step_s}, "files": {}}

    monkeypatch.setattr("meshwright.planner.many.recommend.do_job", planned)
    for fewest in (8192, 4096, 1000, 64, 5):
        asked.clear()
        target_s = 1000.0 * fewest**-exponent * (1 + 1e-9)
        request = SizeRequest(
            model="llama-3-8b",
            clusters=("dgx-h100",),
            plan=PLAN,
            most_gpus=8192,
            step_time_s=target_s,
        )
        answer = plan_sizes(request, quiet)
        assert [each.gpus for each in answer.reached] == [fewest]
        smaller = answer.smaller["dgx-h100"]
        assert smaller is not None
        assert smaller.gpus == (fewest - 8 if fewest > 8 else fewest - 1)
        assert len(asked) == len(set(asked))
        assert len(asked) <= {1.0: 4, 0.5: 8, 0.05: 15}[exponent]


def test_a_size_without_a_plan_in_time_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below 32 GPUs the limit comes first: 32 reach the target, and that fewer cannot is not proven."""

    figures = {"lower_bound_s": 0.1, "tokens_per_s": 1e5, "mfu": 0.1, "tp": 8, "pp": 1, "dp": 4}

    def planned(fields: dict[str, Any], _: str | None) -> dict[str, Any]:
        assert fields["time_limit"] == 7
        row: dict[str, Any] = {"status": "unknown"}
        if fields["gpus"] >= enough:
            row = {"status": "feasible", "step_time_s": 1.0, **figures}
        return {"row": {**row, "message": ""}, "files": {}}

    monkeypatch.setattr("meshwright.planner.many.recommend.do_job", planned)
    plan = {**PLAN, "time_limit": 7}
    request = SizeRequest(
        model="llama-3-8b", clusters=("dgx-h100",), plan=plan, most_gpus=64, step_time_s=2.0
    )
    enough = 32
    answer = plan_sizes(request, quiet)
    document = recommendation_document(answer)
    assert (document["recommended"]["gpus"], document["proven_fewest"]) == (32, {"dgx-h100": False})
    assert document["next_smaller"]["dgx-h100"]["status"] == "unknown"
    words = "Not proven to be the fewest: on 24 GPUs there is no plan (the time limit came first)."
    assert recommend_view(answer)[-1] == line(words)
    enough = 65
    with pytest.raises(
        OutOfTimeError, match="dgx-h100, 64 GPUs: the time limit came before any plan"
    ):
        plan_sizes(request, quiet)
