"""What reads a saved plan on a mixed cluster: launch files, comparisons, what is run today beside it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

import meshwright
from meshwright.cli import main
from meshwright.costmodel.mixed import hand_overs_s, mixed_step
from meshwright.costmodel.rank_load import split_parts
from meshwright.documents import write_files
from meshwright.errors import InputError
from meshwright.planner.analysis.neighbours import layout_changes, parts_choices, parts_neighbours
from meshwright.planner.analysis.timeline import trace_of
from meshwright.planner.launch.plan_files import mixed_files
from meshwright.planner.mixed.document import MixedPlan, Pipeline, mixed_text
from meshwright.planner.mixed.service import MixedResult, make_mixed_plan
from meshwright.planner.mixed.verify import mixed_faults
from meshwright.planner.plan.document import with_digest
from meshwright.planner.runs.run_terms import layout_from_document
from tests.planner.mixed.conftest import PIN
from tests.planner.mixed.plain_oracle import Order, orders, step_times_s
from tests.planner.mixed.test_mixed_optimum import asked, asked_leading

PARTS = {
    "name": "old-and-new",
    "parts": [{"cluster": "dgx-h100", "gpus": 16}, {"cluster": "dgx-a100", "gpus": 16}],
}


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def folder(result: MixedResult, tmp_path: Path) -> Path:
    write_files(tmp_path / "pipeline", mixed_files(result), force=False)
    return tmp_path / "pipeline"


@pytest.fixture
def alone_folder(alone: MixedResult, tmp_path: Path) -> Path:
    write_files(tmp_path / "alone", mixed_files(alone), force=False)
    return tmp_path / "alone"


def run_file(folder: Path, cluster: str, **changes: object) -> Path:
    """A run of the plan's model with a quarter of its tensor groups."""
    fields = {"gpus": 16, "tp": 8, "micro_batch": 1, "global_batch": 64, "seq_len": 4096}
    path = folder / "today.yaml"
    settings = {**fields, "precision": "bf16", **changes}
    path.write_text(yaml.safe_dump({"model": "llama-3-8b", "cluster": cluster, "run": settings}))
    return path


def test_launch_writes_what_plan_wrote(folder: Path, tmp_path: Path) -> None:
    run("launch", folder, "-o", tmp_path / "again")
    names = {path.name for path in folder.iterdir()}
    assert {path.name for path in (tmp_path / "again").iterdir()} == names
    for name in names:
        assert (tmp_path / "again" / name).read_text() == (folder / name).read_text()
    written = meshwright.launch(folder / "mixed_plan.yaml", tmp_path / "python")
    assert {path.name for path in written} == names


def test_launch_of_a_part_alone_is_that_of_its_plan(alone_folder: Path, tmp_path: Path) -> None:
    run("launch", alone_folder / "mixed_plan.yaml", "-o", tmp_path / "again")
    script = (tmp_path / "again" / "launch.sh").read_text()
    assert script == (alone_folder / "launch.sh").read_text()
    (alone_folder / "plan.yaml").unlink()
    words = run("launch", alone_folder / "mixed_plan.yaml", "-o", tmp_path / "third", code=2)
    assert "dgx-h100 alone is fastest: give the plan.yaml" in words


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--target", "slurm", "started by megatron's launch.sh"),
        ("--nodes", "node[1-4]", "lists no nodes to choose from"),
        ("--cluster", "dgx-h100", "placed on a cluster file with parts"),
    ],
)
def test_a_pipeline_through_parts_is_launched_as_it_is(
    folder: Path, tmp_path: Path, option: str, value: str, words: str
) -> None:
    out = run("launch", folder, option, value, "-o", tmp_path / "again", code=2)
    assert words in " ".join(out.split())
    assert len(out.strip().splitlines()) == 1


def test_a_pipeline_is_compared_with_the_plan_of_a_part(
    result: MixedResult, folder: Path, tmp_path: Path
) -> None:
    """The step of the part alone over that of the pipeline is the speed-up: both train the same tokens."""
    plan = meshwright.plan(
        "llama-3-8b", cluster="dgx-h100", gpus=16, global_batch=64, seq_len=4096, pin=PIN,
        robustness=False,
    )  # fmt: skip
    meshwright.save(plan, tmp_path / "one")
    document = json.loads(run("compare", tmp_path / "one", folder, "--json"))
    alone_s, step_s = plan.objective.step_time_s, result.document.objective.step_time_s
    assert alone_s is not None
    assert step_s is not None
    ratio = document["second_over_first"]
    assert ratio["tokens_per_s"] == pytest.approx(alone_s / step_s)
    assert ratio["tokens_per_s_per_gpu"] == pytest.approx(alone_s / step_s / 2)
    assert document["differing_inputs"] == ["cluster", "gpus"]
    assert document["plans"][1]["runs_on"] == ["dgx-h100", "dgx-a100"]
    shown = run("compare", tmp_path / "one", folder)
    assert "the plans answer different questions: cluster, gpus differ\n" in shown
    assert f"the second is {alone_s / step_s:.2f} x as fast" in shown
    assert "ranks 0" in shown


def test_figures_of_a_pipeline_are_those_of_its_document(result: MixedResult) -> None:
    """MFU is of the peaks of all GPUs in use: so many TFLOP/s of their mean peak."""
    plan = result.document
    assert plan.predicted is not None
    figures = plan.figures()
    assert figures["gpus"] == 32
    assert figures["tokens_per_s"] == pytest.approx(64 * 4096 / plan.predicted.step_time_s)
    assert figures["tflops_per_gpu"] == pytest.approx(plan.predicted.mfu * (989 + 312) / 2)
    assert figures["peak_memory_gib"] == max(rank.memory_gib for rank in plan.ranks)


def test_two_pipelines_are_compared(result: MixedResult, folder: Path, tmp_path: Path) -> None:
    plan = result.document
    assert plan.predicted is not None
    slow = plan.predicted.model_copy(update={"step_time_s": 2 * plan.predicted.step_time_s})
    path = tmp_path / "slow.yaml"
    path.write_text(mixed_text(plan.model_copy(update={"predicted": slow})))
    shown = run("compare", folder, path)
    assert "answer different questions" not in shown
    assert "runs on" not in shown


@pytest.mark.parametrize("cluster", ["dgx-h100", "dgx-a100"])
def test_what_is_run_on_a_part_is_compared(
    result: MixedResult, folder: Path, tmp_path: Path, cluster: str
) -> None:
    """The way leads over the best plan on today's part; its steps add up to the difference."""
    today = run_file(tmp_path, cluster)
    priced = next(iter(meshwright.estimate(today)))
    now_s = float(priced.prediction.estimate.step_time_s)
    compared = meshwright.compare(folder, today)
    assert isinstance(compared, MixedPlan)
    baseline, step_s = compared.baseline, result.document.objective.step_time_s
    assert baseline is not None
    assert step_s is not None
    assert baseline.part == cluster
    assert baseline.step_time_s == pytest.approx(now_s)
    assert baseline.speed_up == pytest.approx(now_s / step_s)
    alone_s = {each.part: each.step_time_s for each in result.document.alone}
    assert [bar.step_time_s for bar in baseline.waterfall] == [alone_s[cluster], step_s]
    assert sum(bar.in_turn_s for bar in baseline.waterfall) == pytest.approx(step_s - now_s)
    assert f"the best plan on {cluster} alone" in run("compare", folder, today)


def test_a_script_runs_on_the_part_where_it_is_fastest(folder: Path, alone_folder: Path) -> None:
    compared = meshwright.compare(folder, alone_folder / "launch.sh")
    assert compared.baseline is not None
    assert compared.baseline.gpus == 16
    remark = next(each for each in compared.baseline.remarks if "names no devices" in each)
    assert "priced on dgx-h100" in remark
    assert "on dgx-a100 it would take" in remark
    assert compared.baseline.diff is not None
    assert "hostfile has the plan's order" in compared.baseline.diff.note


def test_what_no_part_can_run_is_said(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "large.sh"
    script.write_text(
        "torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 "
        "--micro-batch-size 1 --global-batch-size 64 --seq-length 4096 --bf16\n"
    )
    with pytest.raises(InputError, match="asks for 64 GPUs, no part of the cluster has as many"):
        meshwright.compare(folder, script)


@pytest.mark.slow
def test_a_plan_is_made_against_what_is_run_today(result: MixedResult, tmp_path: Path) -> None:
    """The same answer as without; what it brings stands in front, and in the document."""
    clusters = tmp_path / "mixed.yaml"
    clusters.write_text(yaml.safe_dump(PARTS))
    today = run_file(tmp_path, "dgx-a100")
    asked = ("llama-3-8b", "--cluster", clusters, "--global-batch", 64, "--seq-len", 4096)
    pin = ("--pin", PIN)
    shown = run("plan", *asked, *pin, "--baseline", today, "-o", tmp_path / "out")
    plan = MixedPlan.model_validate(yaml.safe_load((tmp_path / "out/mixed_plan.yaml").read_text()))
    assert plan.objective == result.document.objective
    assert plan.baseline is not None
    assert f"today: {plan.baseline.speed_up:.2f} x" in shown.splitlines()[0]
    assert "Against today" in shown
    assert list(mixed_faults(plan)) == []
    assert with_digest(plan).digest == plan.digest
    run("verify", tmp_path / "out")
    assert "Against today" in run("explain", tmp_path / "out")


def test_a_trace_plays_each_rank_on_its_own_device(
    result: MixedResult, folder: Path, tmp_path: Path
) -> None:
    """Every rank is busy at its own pace, and for what it sends; the step played is the price."""
    plan = result.document
    assert plan.predicted is not None
    assert plan.layout is not None
    played = trace_of(plan)
    m = plan.layout.num_micro_batches
    loads = []
    segments = Pipeline.of(plan).segments
    for segment in segments:
        stages = tuple((rank.layers,) for rank in plan.ranks)
        parts = split_parts(segment.part.context, segment.part.times, stages)
        loads += list(
            np.sum([np.broadcast_to(row, 2) for row in parts.values()], axis=0)[segment.own]
        )
    busy_s = np.array(loads) + hand_overs_s(segments).sum(axis=0)
    assert list(played.timeline.busy_s) == pytest.approx(list(m * busy_s))
    assert played.seconds == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    run("trace", folder, "-o", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    sent = [event for event in events if event["name"] == "activations to rank 1"]
    assert len(sent) == m
    assert {event["pid"] for event in sent} == {1000}
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["pipeline rank 0 on dgx-h100", "pipeline rank 1 on dgx-a100"]
    static_gib, activations_gib = played.memory_gib[0]
    assert static_gib + activations_gib == pytest.approx(plan.ranks[0].memory_gib)


def test_what_parts_hand_to_each_other_is_counted(
    result: MixedResult, folder: Path, tmp_path: Path
) -> None:
    """m T h elements of 2 bytes, half of them from each tensor rank; A100 nodes have the slower NICs."""
    plan = result.document
    assert plan.layout is not None
    document = json.loads(run("traffic", folder, "--matrix", tmp_path / "m.csv", "--json"))
    (sent,) = document["between"]
    tokens_per_replica = 64 * 4096 / plan.layout.dp
    assert (sent["from"], sent["to"], sent["gpus"]) == ("dgx-h100", "dgx-a100", 16)
    assert sent["bytes_per_gpu"] == 2 * tokens_per_replica * 4096 / plan.layout.tp
    assert sent["bytes_per_step"] == 16 * sent["bytes_per_gpu"]
    assert sent["gb_per_s"] < 200 / 8
    rows = [line.split(",") for line in (tmp_path / "m.csv").read_text().splitlines()[1:]]
    crossing = [row for row in rows if (int(row[0]) < 16) != (int(row[1]) < 16)]
    assert sum(float(row[2]) for row in crossing) == 2 * sent["bytes_per_step"]
    assert all(abs(int(row[0]) - int(row[1])) == 16 for row in crossing)


def test_each_part_sends_the_gradients_of_its_own_layers(result: MixedResult) -> None:
    """A ring passes (n - 1) / n of a rank's gradients and weights: of its own layers, and of one end's table.

    Llama-3 8B: 218,112,000 parameters a layer, 525,336,576 of a table; tensor parallelism halves them.
    """
    plan = result.document
    assert plan.layout is not None
    tp, dp = plan.layout.tp, plan.layout.dp
    sent = meshwright.traffic(plan)["parts"]
    element_bytes = 4 + 2
    for rank in plan.ranks:
        held = (rank.layers * 218_112_000 + 525_336_576) / tp
        passed = held * element_bytes * (dp - 1) / dp
        assert sent[rank.part]["groups_bytes_per_gpu"]["gradients"] == pytest.approx(
            passed, rel=1e-3
        )


@pytest.mark.slow
def test_choices_bring_what_plans_without_them_lose(result: MixedResult, tmp_path: Path) -> None:
    """Each figure is that of a plan with the plain value pinned, found by a search of its own."""
    plan = result.document
    step_s = plan.objective.step_time_s
    assert plan.choices
    assert step_s is not None
    for choice in plan.choices:
        path = tmp_path / "mixed.yaml"
        path.write_text(yaml.safe_dump(PARTS))
        without = meshwright.plan_mixed(
            "llama-3-8b", cluster=path, global_batch=64, seq_len=4096, choices=False,
            pin=f"{PIN},{choice.pin}",
        )  # fmt: skip
        assert choice.status == "optimal"
        assert choice.proven
        objective = without.document.objective
        assert choice.step_time_s_without == pytest.approx(objective.step_time_s, rel=1e-9)
        assert choice.lower_bound_s_without == pytest.approx(objective.lower_bound_s, rel=1e-9)
        assert (choice.step_time_s_without or 0.0) >= step_s
    gains = [choice.step_time_s_without or 0.0 for choice in plan.choices]
    assert gains == sorted(gains, reverse=True)


def test_choices_are_printed_and_left_out_of_other_documents(
    result: MixedResult, alone: MixedResult, folder: Path
) -> None:
    assert "What each choice brings" in run("explain", folder)
    assert "choices" not in yaml.safe_load(mixed_text(alone.document))


@pytest.mark.parametrize(
    "command", [("memory",), ("estimate",), ("validate",), ("overlap",), ("roofline",)]
)
def test_what_takes_no_plan_of_parts_says_so_in_a_sentence(
    folder: Path, command: tuple[str, ...]
) -> None:
    out = run(*command, folder / "mixed_plan.yaml", code=2)
    assert "this is a plan" in out
    assert "unknown field" not in out
    assert len(out.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_sweep_has_the_plans_of_its_combinations(result: MixedResult, tmp_path: Path) -> None:
    """A row is the plan that `plan` makes; FSDP2 alone has no pipelines, which its row says."""
    path = tmp_path / "mixed.yaml"
    path.write_text(yaml.safe_dump(PARTS))
    asked = ("llama-3-8b", "--cluster", path, "--global-batch", 64, "--seq-len", 4096)
    pin = ("--pin", PIN, "--sweep", "framework=megatron+fsdp2", "--tokens", 1e12)
    document = json.loads(run("plan", *asked, *pin, "-o", tmp_path / "out", "--json"))
    planned, failed = document["rows"]
    plan = result.document
    assert planned["step_time_s"] == plan.objective.step_time_s
    assert planned["status"] == "optimal"
    assert planned["runs_on"] == "dgx-h100 then dgx-a100"
    assert planned["cluster"] == "old-and-new"
    assert planned["gpu_hours"] == pytest.approx(planned["days"] * 24 * 32)
    assert failed["status"] == "failed"
    assert "which this framework has not" in failed["message"]
    assert "dgx-h100 then dgx-a100" in (tmp_path / "out" / "sweep.csv").read_text()


def named_orders(plan: MixedPlan, ranks_on: dict[str, int]) -> Order:
    """Ranks on the parts in the order of a document, by the places of the parts in the cluster."""
    places = {plan.cluster.name_of(part): part for part in range(len(plan.cluster.parts))}
    return tuple((places[name], ranks) for name, ranks in ranks_on.items())


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.slow if seed in (2, 3, 4) else pytest.mark.soak)
        for seed in range(24)
    ],
)
def test_single_changes_cost_what_brute_force_finds(seed: int) -> None:
    """With the best ranks on the parts in their order and the best split of the layers."""
    request = (asked, asked_leading)[seed % 2](seed)
    request = replace(
        request, cluster=request.cluster.model_copy(update={"between_gbps_per_gpu": None})
    )
    plan = make_mixed_plan(request).document
    if plan.layout is None or plan.predicted is None:
        assert parts_neighbours(plan) == []
        return
    parts = list(request.parts)
    base, own = layout_from_document(plan.layout), dict(Counter(each.part for each in plan.ranks))
    order = named_orders(plan, own)
    changed = {
        words.removesuffix(", every layer"): layout
        for words, layout in layout_changes(base, parts[0].workload())
    }
    seen = 0
    for each in parts_neighbours(plan):
        if each.change.startswith("as many"):
            continue
        layout = replace(changed.get(each.change, base), recompute_layers=0)
        ways = list(orders(parts, layout)) if int(layout.pp) > 1 else []
        ways = [way for way in ways if [part for part, _ in way] == [part for part, _ in order]]
        if "order" in each.change:
            ways = [order[::-1]]
        elif each.change.startswith("a rank"):
            ways = [named_orders(plan, each.ranks_on)] if each.ranks_on else []
        prices_s = [step_s for way in ways for step_s in step_times_s(parts, layout, way)]
        if each.step_time_s is None:
            assert each.broken
            assert prices_s == [] or each.change.startswith("a rank")
            continue
        assert each.step_time_s == pytest.approx(min(prices_s), rel=1e-9)
        assert each.slower_pct == pytest.approx(
            100 * (each.step_time_s / plan.predicted.step_time_s - 1), abs=1e-6
        )
        if plan.status == "optimal" and each.outside is None:
            assert each.step_time_s >= plan.predicted.step_time_s * (1 - 1e-9)
        assert sum(each.layers) == request.layers
        assert len(each.layers) == sum(each.ranks_on.values()) == int(layout.pp)
        seen += 1
    assert seen


def test_layers_dealt_evenly_cost_what_the_formula_says(result: MixedResult) -> None:
    plan = result.document
    even = next(each for each in parts_neighbours(plan) if each.change.startswith("as many"))
    assert plan.layout is not None
    pp = plan.layout.pp
    assert even.layers == [32 // pp] * pp
    stages = [[32 // pp]] * pp
    ranks = [each.model_copy(update={"layers": 32 // pp}) for each in plan.ranks]
    layout = plan.layout.model_copy(update={"stages": stages})
    pipeline = Pipeline.of(plan.model_copy(update={"layout": layout, "ranks": ranks}))
    step_s = float(np.asarray(mixed_step(pipeline.segments, pipeline.stages).seconds))
    assert even.step_time_s == pytest.approx(step_s, rel=1e-12)


def test_explain_says_what_one_change_would_cost(result: MixedResult, folder: Path) -> None:
    document = json.loads(run("explain", folder, "--json"))
    assert document["kind"] == "mixed-plan"
    assert document["single_choices"] is None
    changes = parts_neighbours(result.document)
    assert [each["change"] for each in document["changes"]] == [each.change for each in changes]
    assert meshwright.explain(folder)["changes"] == document["changes"]
    text = " ".join(run("explain", folder).split())
    assert "What one change would cost" in text
    assert "the parts in the other order" in text
    assert "explain --best searches" in text


@pytest.mark.soak
def test_the_best_plan_with_a_choice_is_the_one_that_the_pin_brings(
    result: MixedResult, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text(yaml.safe_dump(PARTS))
    plan = result.document
    choices = parts_choices(plan, parts_neighbours(plan))
    assert {each.choice.split()[0] for each in choices} == {"cp", "dp", "pp"}
    step_s = plan.objective.step_time_s or 0.0
    for each in choices:
        name, value = each.choice.split()
        pinned = meshwright.plan_mixed(
            "llama-3-8b", cluster=path, global_batch=64, seq_len=4096, choices=False,
            pin=f"{PIN},{name}={value}",
        ).document  # fmt: skip
        assert each.proven
        assert list(each.runs_on) == pinned.runs_on
        found_s = pinned.objective.step_time_s
        if each.best_pct is None or found_s is None:
            assert (each.best_pct, found_s, each.status) == (None, None, "infeasible")
        else:
            assert each.best_pct == pytest.approx(100 * (found_s / step_s - 1), abs=1e-6)
    text = " ".join(run("explain", folder, "--best").split())
    assert "the best plan with it" in text
