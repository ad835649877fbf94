"""One cluster, many models: the solver against enumeration, the leaves, the files."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations, product
from math import ceil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.cluster_specs.reader import cluster_from_mapping, read_cluster
from meshwright.cluster_specs.schema import NodeSpec
from meshwright.costmodel.layout import Layout
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.many.batch import AS_SEARCHED, CLUSTER_SPEC, LIKELY, do_job, request_of
from meshwright.planner.many.fleet import LeafRoom, deal_out, place_jobs
from meshwright.planner.many.jobs import JobDoc
from meshwright.planner.many.sharing import (
    Allocation,
    FleetJobDoc,
    FleetParams,
    FreeUnits,
    JobSize,
    SizedJob,
    Unit,
    UnplannedJob,
    candidate_units,
    durations,
    faster_sizes,
    free_units,
    list_schedule,
    read_fleet,
    scaled_value,
    share_over_time,
    share_throughput,
    sized_job,
    timed_jobs,
)
from meshwright.planner.plan.best_plan import likely_as
from meshwright.planner.request.choices import WITHOUT

PARAMS = FleetParams(deterministic_s=10)


def job(name: str, sizes: dict[int, float], **fields: Any) -> SizedJob:
    """A job with its tokens/s by units."""
    document = FleetJobDoc(name=name, model="llama-3-8b", global_batch=8, seq_len=8, **fields)
    options = [JobSize(units=units, tokens_per_s=rate, result={}) for units, rate in sizes.items()]
    return SizedJob(job=document, sizes=faster_sizes(options))


def random_jobs(chance: random.Random, count: int, **extra: Any) -> list[SizedJob]:
    jobs = []
    for at in range(count):
        rates, rate = {}, 0.0
        for units in sorted(chance.sample(range(1, 7), chance.randint(1, 3))):
            rate += chance.uniform(1, 50)
            rates[units] = rate
        drawn = {
            "weight": chance.choice([0.5, 1, 2]),
            "priority": chance.choice([0, 0, 1]),
            "may_wait": chance.random() < 0.6,
        }
        jobs.append(job(f"j{at}", rates, **{**drawn, **{k: f(chance) for k, f in extra.items()}}))
    return jobs


def on_parts(chance: random.Random, jobs: list[SizedJob], parts: int) -> list[SizedJob]:
    """The same jobs with some of their sizes on further parts too, faster or slower there."""
    placed = []
    for one in jobs:
        sizes = list(one.sizes)
        for part in range(1, parts):
            speed = chance.uniform(0.3, 1.5)
            sizes += [
                replace(size, part=part, tokens_per_s=speed * size.tokens_per_s)
                for size in one.sizes
                if chance.random() < 0.8
            ]
        if chance.random() < 0.2 and len(sizes) > len(one.sizes):
            sizes = sizes[len(one.sizes) :]
        placed.append(SizedJob(job=one.job, sizes=faster_sizes(sizes)))
    return placed


def best_by_enumeration(jobs: list[SizedJob], units: tuple[int, ...]) -> tuple[int, ...] | None:
    """The lexicographic best of the classes' values over every combination of sizes."""
    classes = sorted({one.job.priority for one in jobs}, reverse=True)
    found: list[tuple[int, ...]] = []
    for choice in product(*[[None, *range(len(one.sizes))] for one in jobs]):
        if any(k is None and not one.job.may_wait for k, one in zip(choice, jobs, strict=True)):
            continue
        sizes = [one.sizes[k] for k, one in zip(choice, jobs, strict=True) if k is not None]
        used = [sum(size.units for size in sizes if size.part == p) for p in range(len(units))]
        if any(map(int.__gt__, used, units)):
            continue
        values = [
            0 if k is None else scaled_value(one, k, PARAMS)
            for k, one in zip(choice, jobs, strict=True)
        ]
        pairs = list(zip(values, jobs, strict=True))
        found.append(tuple(sum(v for v, one in pairs if one.job.priority == c) for c in classes))
    return max(found, default=None)


def test_jobs_that_do_not_fit_are_told_what_each_takes() -> None:
    jobs = [job("a", {4: 1.0}), job("b", {3: 1.0, 5: 2.0}), job("c", {2: 1.0}, may_wait=True)]
    with pytest.raises(InfeasibleError, match=r"a 4, b 3, in all 7 of 6 free blocks.*max_gpus"):
        share_throughput(jobs, (6,), PARAMS)
    assert share_throughput(jobs, (7,), PARAMS).proven


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_throughput_equals_enumeration(parts: int) -> None:
    chance = random.Random(5)
    answered = 0
    for _ in range(150):
        jobs = random_jobs(chance, chance.randint(1, 5))
        units = tuple(chance.randint(1, 12 // parts) for _ in range(parts))
        jobs = on_parts(chance, jobs, parts) if parts > 1 else jobs
        best = best_by_enumeration(jobs, units)
        if best is None:
            with pytest.raises(InfeasibleError, match="do not fit"):
                share_throughput(jobs, units, PARAMS)
            continue
        answered += 1
        found = share_throughput(jobs, units, PARAMS)
        assert found.proven
        assert found.value == pytest.approx(sum(best) / PARAMS.value_scale, abs=1e-9)
        sizes = [
            one.sizes[s.size]
            for one, s in zip(jobs, found.allocations, strict=True)
            if s.size is not None
        ]
        for part, most in enumerate(units):
            assert sum(size.units for size in sizes if size.part == part) <= most
    assert answered >= 90


def lateness(jobs: list[SizedJob], runs: Mapping[int, tuple[float, float, int]]) -> list[float]:
    """Weighted ticks past the deadlines of each priority that has any, from the highest on."""
    tick_s, ticks = durations(jobs, PARAMS)
    horizon = sum(map(max, ticks))
    totals: dict[int, float] = {}
    for at, one in enumerate(jobs):
        if one.job.deadline_h is not None:
            due = min(int(one.job.deadline_h * 3600 / tick_s), horizon)
            late = max(0, runs[at][1] - due) * round(PARAMS.lateness_scale * one.job.weight)
            totals[one.job.priority] = totals.get(one.job.priority, 0) + late
    return [totals[priority] for priority in sorted(totals, reverse=True)]


def best_schedule(
    jobs: list[SizedJob],
    units: tuple[int, ...],
    lengths: Sequence[Sequence[float]],
    with_due: bool = False,
) -> tuple[float, ...]:
    """Lateness where it counts, and the last end: a list schedule in some order is optimal."""
    best: tuple[float, ...] = (1e15,)
    for sizes in product(*[range(len(one.sizes)) for one in jobs]):
        chosen = [jobs[at].sizes[k] for at, k in enumerate(sizes)]
        demand, place = [size.units for size in chosen], [size.part for size in chosen]
        if any(size.units > units[size.part] for size in chosen):
            continue
        for order in permutations(range(len(jobs))):
            runs: dict[int, tuple[float, float, int]] = {}
            for at in order:
                length = lengths[at][sizes[at]]
                for start in sorted({0, *(end for _, end, _ in runs.values())}):
                    moments = [
                        start,
                        *(s for s, _, _ in runs.values() if start < s < start + length),
                    ]
                    if all(
                        sum(
                            d
                            for other, (s, e, d) in runs.items()
                            if s <= m < e and place[other] == place[at]
                        )
                        + demand[at]
                        <= units[place[at]]
                        for m in moments
                    ):
                        runs[at] = (start, start + length, demand[at])
                        break
            late = lateness(jobs, runs) if with_due else []
            best = min(best, (*late, max(end for _, end, _ in runs.values())))
    return best


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("objective", ["makespan", "deadlines"])
def test_schedules_equal_enumeration(objective: str, parts: int) -> None:
    chance = random.Random(6)
    for _ in range(60 // parts):
        jobs = random_jobs(
            chance,
            chance.randint(1, 3),
            tokens=lambda c: c.uniform(10, 1000),
            deadline_h=lambda c: c.choice([None, c.uniform(0.0001, 0.01)]),
        )
        jobs = on_parts(chance, jobs, parts) if parts > 1 else jobs
        fewest = max(one.sizes[0].units for one in jobs)
        units = tuple(max(chance.randint(2, 8), fewest) for _ in range(parts))
        found = share_over_time(jobs, units, objective, PARAMS)
        tick_s, ticks = durations(jobs, PARAMS)
        best = best_schedule(jobs, units, ticks, objective == "deadlines")
        assert found.proven
        assert best[-1] * tick_s * (1 + 1e-9) >= found.value > (best[-1] - len(jobs)) * tick_s
        runs = {
            at: (0, ceil((a.end_s or 0) / tick_s - 1e-3), 0)
            for at, a in enumerate(found.allocations)
        }
        assert objective == "makespan" or tuple(lateness(jobs, runs)) <= best[:-1]
        exact_s = [[one.train_s(size) for size in range(len(one.sizes))] for one in jobs]
        if objective == "makespan":
            least_s = best_schedule(jobs, units, exact_s)[-1]
            assert found.bound <= least_s * (1 + 1e-9) <= found.value * (1 + 2e-9)


def test_a_bound_of_a_makespan_holds_without_the_rounding_of_durations() -> None:
    """Of a hundred jobs on one block each lasts up to a tick less than it is scheduled for."""
    chance = random.Random(5)
    jobs = [job(str(at), {1: 1.0}, tokens=chance.uniform(1, 100)) for at in range(100)]
    found = share_over_time(jobs, (1,), "makespan", PARAMS)
    assert found.value == pytest.approx(sum(one.train_s(0) for one in jobs), rel=1e-8)
    assert found.bound == found.value


@pytest.mark.parametrize("parts", [1, 2])
def test_a_schedule_keeps_to_the_units_and_to_its_bounds(parts: int) -> None:
    chance = random.Random(8)
    for _ in range(20):
        jobs = random_jobs(
            chance,
            12,
            tokens=lambda c: c.uniform(10, 1000),
            deadline_h=lambda c: c.choice([None, c.uniform(0.0001, 0.01)]),
        )
        jobs = on_parts(chance, jobs, parts) if parts > 1 else jobs
        _, timed = timed_jobs(jobs, PARAMS, with_due=True)
        found = list_schedule(timed, (8,) * parts, seed=0, most_runs=500)
        pairs = list(zip(timed, found.runs, strict=True))
        for moment in (run.start for run in found.runs):
            running = [(job, r.size) for job, r in pairs if r.start <= moment < r.end]
            for part in range(parts):
                assert sum(job.demands[k] for job, k in running if job.parts[k] == part) <= 8
        assert all(run.end - run.start == job.ticks[run.size] for job, run in pairs)
        assert all(map(int.__le__, found.bounds, found.values))


def test_leaves_are_dealt_within_what_is_free() -> None:
    chance = random.Random(9)
    pod_of = {f"l{k}": f"p{k // 3}" for k in range(6)}
    for _ in range(30):
        ground = LeafRoom(capacity={leaf: chance.randint(1, 6) for leaf in pod_of}, pod_of=pod_of)
        wanted = [chance.randint(0, 5) for _ in range(8)]
        together = [sorted(chance.sample(range(8), 4)) for _ in range(3)]
        together.append([job for job in range(8) if not any(job in row for row in together)])
        dealt = deal_out(wanted, together, ground, pod_weight=100, least=0, seed=0, most_deals=400)
        if dealt is None:
            continue
        assert [sum(row.values()) for row in dealt.per_leaf] == wanted
        for running in together:
            for leaf, units in ground.capacity.items():
                assert sum(dealt.per_leaf[job].get(leaf, 0) for job in running) <= units
        fewest = sum(ground.fewest_leaves(size) + 100 * ground.fewest_pods(size) for size in wanted)
        assert dealt.cost >= fewest


def test_deadlines_come_before_the_makespan() -> None:
    due, free = job("due", {1: 1.0}, tokens=3600, deadline_h=1), job("free", {2: 1.0}, tokens=7200)
    found = share_over_time([free, due], (2,), "deadlines", PARAMS)
    assert found.allocations[1].end_s == pytest.approx(3600, rel=1e-3)
    assert found.allocations[0].start_s == pytest.approx(3600, rel=1e-3)
    late = job("late", {1: 1.0}, tokens=7200, deadline_h=1)
    assert share_over_time([late], (2,), "deadlines", PARAMS).value == pytest.approx(7200, rel=1e-3)


def test_a_higher_priority_takes_all_it_can_use() -> None:
    jobs = [
        job("low", {1: 10, 2: 20, 4: 40}, may_wait=True),
        job("high", {1: 10, 3: 12}, priority=1),
    ]
    shares = share_throughput(jobs, (4,), PARAMS).allocations
    assert [
        one.sizes[s.size].units for one, s in zip(jobs, shares, strict=True) if s.size is not None
    ] == [1, 3]


def test_more_room_is_never_worse() -> None:
    chance = random.Random(7)
    for _ in range(20):
        jobs = random_jobs(chance, 4)
        jobs = [
            SizedJob(
                job=one.job.model_copy(update={"may_wait": True, "priority": 0}),
                sizes=one.sizes,
            )
            for one in jobs
        ]
        values = [share_throughput(jobs, (units,), PARAMS).value for units in (3, 6, 12)]
        assert values == sorted(values)


def free_leaves(*leaves: int, per_pod: int = 2) -> FreeUnits:
    units = [
        Unit(nodes=(f"n{leaf}-{k}",), leaf=f"leaf{leaf}", pod=f"pod{leaf // per_pod}")
        for leaf, size in enumerate(leaves)
        for k in range(size)
    ]
    return FreeUnits(gpus_per_unit=8, units=tuple(units))


def test_leaves_are_kept_together() -> None:
    jobs = [job("a", {4: 1.0}), job("b", {3: 1.0}), job("c", {4: 1.0}), job("d", {1: 1.0})]
    shares = [Allocation(size=0)] * 4
    ground = free_leaves(4, 4, 4)
    found = place_jobs(jobs, shares, ground, PARAMS)
    assert found.leaves_touched == found.least_leaves == 4
    assert sorted(unit for row in found.units for unit in row) == list(range(12))
    assert [len({ground.units[unit].leaf for unit in row}) for row in found.units] == [1, 1, 1, 1]


def test_jobs_that_follow_each_other_share_nodes() -> None:
    jobs = [job("a", {3: 1.0}), job("b", {3: 1.0}), job("c", {1: 1.0})]
    shares = [
        Allocation(size=0, start_s=0, end_s=5),
        Allocation(size=0, start_s=5, end_s=9),
        Allocation(size=0, start_s=2, end_s=7),
    ]
    found = place_jobs(jobs, shares, free_leaves(4), PARAMS)
    first, second, beside = (set(row) for row in found.units)
    assert not beside & (first | second)
    assert len(first) == len(second) == 3


def test_a_pod_is_left_only_where_it_must_be() -> None:
    ground = free_leaves(2, 2, 2, 2)
    found = place_jobs(
        [job("wide", {4: 1.0}), job("other", {3: 1.0})], [Allocation(size=0)] * 2, ground, PARAMS
    )
    for row in found.units:
        assert len({ground.units[unit].pod for unit in row}) == 1


def test_fewest_leaves() -> None:
    pod_of = {"a": "x", "b": "x", "c": "y"}
    ground = LeafRoom(capacity={"a": 4, "b": 2, "c": 3}, pod_of=pod_of)
    sizes = (0, 1, 4, 5, 7, 8, 9)
    assert [ground.fewest_leaves(size) for size in sizes] == [0, 1, 1, 2, 2, 3, 3]
    assert [ground.fewest_pods(size) for size in sizes] == [0, 1, 1, 1, 2, 2, 2]


def test_sizes_keep_the_limits() -> None:
    document = FleetJobDoc(
        name="x", model="m", global_batch=8, seq_len=8, min_gpus=20, max_gpus=200
    )
    assert candidate_units(document, 8, 64) == (3, 4, 6, 8, 12, 16, 24, 25)
    assert candidate_units(document, 8, 10) == (3, 4, 6, 8, 10)
    assert candidate_units(document, 8, 2) == ()


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_gpus": 4}, "at most max_gpus 4"),
        ({"min_gpus": 12, "max_gpus": 12}, "least min_gpus 12"),
    ],
)
def test_a_job_that_no_whole_block_suits_says_which_limits(
    limits: dict[str, int], words: str
) -> None:
    """Nodes of 8: there are enough of them, but no number of them is within the limits."""
    document = FleetJobDoc(name="x", model="m", global_batch=8, seq_len=8, **limits)  # type: ignore[arg-type]
    assert candidate_units(document, 8, 64) == ()
    left_out = sized_job(document, [], 0)
    assert isinstance(left_out, UnplannedJob)
    assert words in left_out.reason


def test_a_used_node_does_not_shift_the_domains_behind_it() -> None:
    """Domains of two nodes: where the first is in use in part, its neighbour is none with the third."""
    nodes = tuple(NodeSpec(name=f"n{k}", free_gpus=2 if k == 0 else None) for k in range(6))
    racks = read_cluster("gb200-nvl72").model_copy(
        update={"gpus": 24, "nvlink_domain": 8, "elastic": False, "levels": (), "nodes": nodes}
    )
    units = free_units(racks, 24).units
    assert [unit.nodes for unit in units] == [("n2", "n3"), ("n4", "n5")]


def test_units_are_whole_domains() -> None:
    assert free_units(read_cluster("dgx-h100"), 64).gpus_per_unit == 8
    racks = free_units(read_cluster("gb200-nvl72"), 288)
    assert (racks.gpus_per_unit, len(racks.units), len(racks.units[0].nodes)) == (72, 4, 18)
    assert len(free_units(read_cluster("gb200-nvl72"), 288, racks.units[1].nodes[:1]).units) == 3
    nodes = [
        {"name": f"n{k}", "leaf": f"l{k // 2}", "free_gpus": 3 if k == 1 else 8} for k in range(4)
    ]
    mine = cluster_from_mapping({"base": "dgx-h100", "nodes": nodes})
    assert [unit.nodes for unit in free_units(mine, mine.gpus).units] == [("n0",), ("n2",), ("n3",)]
    with pytest.raises(InputError, match=r"--busy.*did you mean 'n3'"):
        free_units(mine, mine.gpus, ["n33"])


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"cluster": "dgx-a100"}, ["x.cluster", "'dgx-a100'"]),
        ({"gpus": 8, "min_gpus": 8}, ["x.gpus", "min_gpus"]),
        ({"min_gpus": 16, "max_gpus": 8}, ["x.min_gpus", "16", "8"]),
        ({"weight": 0}, ["jobs[0] (x): weight", "more than 0"]),
        ({"wieght": 1}, ["wieght", "did you mean 'weight'"]),
    ],
)
def test_a_bad_job_is_named(tmp_path: Path, fields: dict[str, Any], parts: list[str]) -> None:
    path = tmp_path / "fleet.yaml"
    one = {"name": "x", "model": "llama-3-8b", "global_batch": 64, "seq_len": 2048, **fields}
    path.write_text(yaml.safe_dump({"jobs": [one]}), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_fleet(path, "dgx-h100")
    for part in parts:
        assert part in str(caught.value)


FLEET: dict[str, Any] = {
    "defaults": {
        "seq_len": 2048,
        "global_batch": 64,
        "tokens": 1e9,
        "pin": "micro_batch=1,cp=1,zero_stage=1",
        "without": ",".join(WITHOUT),
    },
    "jobs": [
        {"name": "large", "model": "llama-3-8b", "weight": 2, "cluster": "superpod-h100"},
        {"name": "fixed", "model": "qwen3-8b", "gpus": 8, "deadline_h": 1},
    ],
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of jobs, which the fleets below share."""
    return tmp_path_factory.mktemp("kept")


def run(tmp_path: Path, kept: Path, *more: str) -> Any:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(FLEET, sort_keys=False), encoding="utf-8")
    line = ["fleet", str(path), "--cluster", "superpod-h100", "--gpus", "32", "--workers", "1"]
    return CliRunner().invoke(main, [*line, "--cache", str(kept), *more])


def test_from_the_file_to_plans_on_named_nodes(tmp_path: Path, kept: Path) -> None:
    done = run(tmp_path, kept, "-o", str(tmp_path / "out"), "--busy", "node-0000[2]", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "out/fleet.json").read_text(encoding="utf-8"))
    large, fixed = document["jobs"]
    assert (large["gpus"], fixed["gpus"]) == (16, 8)
    assert document["objective"]["status"] == "optimal"
    assert sorted(large["nodes"] + fixed["nodes"]) == ["node-00001", "node-00003", "node-00004"]
    hosts = (tmp_path / "out/plans/large/hostfile").read_text(encoding="utf-8")
    assert all(name in hosts for name in large["nodes"])
    assert not any(name in hosts for name in fixed["nodes"])
    with (tmp_path / "out/fleet.csv").open(encoding="utf-8") as stream:
        assert [row["name"] for row in csv.DictReader(stream)] == ["large", "fixed"]
    picture = ElementTree.fromstring((tmp_path / "out/nodes.svg").read_text(encoding="utf-8"))
    squares = picture.findall(
        ".//{http://www.w3.org/2000/svg}rect/{http://www.w3.org/2000/svg}title"
    )
    assert len(squares) == 3


def uneven_job(nodes: int, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a job on the first nodes of a list with leaves of 3, 2 and 1 free nodes."""
    listed = [{"name": f"n{index}", "leaf": leaf} for index, leaf in enumerate("aaabbc")]
    cluster = cluster_from_mapping({"base": "h100-leaf-3to1", "nodes": listed[:nodes]})
    return {"name": "x", "gpus": 8 * nodes, **fields, CLUSTER_SPEC: cluster}


@pytest.mark.parametrize("model", ["llama-3-8b", "olmoe-1b-7b"])
def test_sizes_that_begin_with_smaller_ones_are_planned_alike(model: str) -> None:
    fields = {"model": model, "cluster": "h100-leaf-3to1", "global_batch": 48, "seq_len": 4096}
    ran: list[dict[str, Any]] = []
    for nodes in (1, 2, 3, 6):
        asked = uneven_job(nodes, fields)
        alone = do_job(asked, None)
        begun = do_job({**asked, LIKELY: ran[-2:], AS_SEARCHED: True}, None)
        assert begun["row"]["status"] == alone["row"]["status"]
        for name in ("step_time_s", "lower_bound_s"):
            assert begun["row"][name] == pytest.approx(alone["row"][name], rel=1e-9), (nodes, name)
        ran.append(begun["ran"])


def test_layouts_like_those_of_other_sizes_take_what_is_there() -> None:
    request = request_of(
        JobDoc(
            name="x", model="llama-3-8b", cluster="dgx-h100", gpus=48, global_batch=48, seq_len=2048
        )
    )
    smaller = Layout(tp=2, pp=2, dp=4, vpp=2, micro_batch=2, num_micro_batches=6)
    likely = likely_as(request, [(smaller, None), (Layout(dp=48), None)])
    assert likely is not None
    layouts = [likely.layouts.scalar(row) for row in range(np.size(likely.layouts.tp))]
    degrees = [(one.tp, one.cp, one.pp, one.dp, one.vpp, one.num_micro_batches) for one in layouts]
    # Three times as many replicas, stages (no two chunks of six stages are as long) or context ranks.
    assert degrees == [
        (2, 1, 2, 12, 2, 2),
        (2, 1, 6, 4, 1, 6),
        (2, 3, 2, 4, 2, 6),
        (1, 1, 1, 48, 1, 1),
    ]
    assert likely_as(request, [(Layout(dp=7), None)]) is None


@pytest.mark.slow
def test_a_schedule_has_times_and_a_chart(tmp_path: Path, kept: Path) -> None:
    done = run(tmp_path, kept, "--objective", "deadlines", "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "out/fleet.json").read_text(encoding="utf-8"))
    for one in document["jobs"]:
        assert one["end_s"] > one["start_s"] >= 0
    ElementTree.fromstring((tmp_path / "out/gantt.svg").read_text(encoding="utf-8"))


def test_what_cannot_be_shared_says_so(tmp_path: Path, kept: Path) -> None:
    FLEET["jobs"][0]["min_gpus"] = 32
    try:
        done = run(tmp_path, kept)
        assert done.exit_code == 1
        assert "do not fit" in done.stderr
    finally:
        del FLEET["jobs"][0]["min_gpus"]
    done = run(tmp_path, kept, "--objective", "speed")
    assert done.exit_code == 2
    assert "throughput" in done.stderr


@pytest.mark.slow
def test_a_job_without_a_plan_does_not_stop_the_others(tmp_path: Path, kept: Path) -> None:
    """Where it is too large for its memory at every size, and where the cluster is too small for it."""
    bad = [
        {"name": "hopeless", "model": "llama-3.1-405b", "max_gpus": 8},
        {"name": "greedy", "model": "qwen3-8b", "min_gpus": 64},
    ]
    FLEET["jobs"][1:1] = bad
    try:
        done = run(tmp_path, kept, "-o", str(tmp_path / "out"), "--json")
        shown = run(tmp_path, kept, "--objective", "makespan", "-o", str(tmp_path / "later"))
    finally:
        del FLEET["jobs"][1:3]
    assert done.exit_code == 1, done.output
    document = json.loads(done.stdout)
    rows = {row["name"]: row for row in document["jobs"]}
    assert [rows[name]["status"] for name in ("large", "fixed")] == ["runs", "runs"]
    assert rows["hopeless"]["status"] == rows["greedy"]["status"] == "infeasible"
    assert "GiB" in rows["hopeless"]["reason"]
    assert "min_gpus" in rows["greedy"]["reason"]
    written = sorted(path.name for path in (tmp_path / "out/plans").iterdir())
    assert written == ["fixed", "large"]
    with (tmp_path / "out/fleet.csv").open(encoding="utf-8") as stream:
        assert len(list(csv.DictReader(stream))) == 4
    assert shown.exit_code == 1
    assert "hopeless (infeasible)" in shown.stdout
    assert "2 jobs on" in shown.stdout
    ElementTree.fromstring((tmp_path / "later/gantt.svg").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_on_a_mixed_cluster_each_job_is_on_one_part(tmp_path: Path, kept: Path) -> None:
    """GB200 and H100 nodes have unlike numbers of GPUs, so no pipeline runs through both."""
    parts = [
        {"cluster": {"base": "dgx-h100", "nodes": [{"name": "h[1-2]"}]}, "name": "old"},
        {"cluster": "gb200-nvl72", "gpus": 72, "name": "new"},
    ]
    pools = tmp_path / "pools.yaml"
    pools.write_text(yaml.safe_dump({"name": "pools", "parts": parts}), encoding="utf-8")
    path = tmp_path / "fleet.yaml"
    jobs = [{**one, "cluster": "pools.yaml"} for one in FLEET["jobs"]]
    defaults = {**FLEET["defaults"], "pin": "micro_batch=1,cp=1,zero_stage=1,tp=1"}
    path.write_text(yaml.safe_dump({"defaults": defaults, "jobs": jobs}), encoding="utf-8")
    line = ["fleet", str(path), "--cluster", str(pools), "--workers", "1", "--cache", str(kept)]
    done = CliRunner().invoke(main, [*line, "--json", "--busy", "h1", "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    large, fixed = document["jobs"]
    assert (large["part"], large["gpus"]) == ("new", 72)
    assert (fixed["part"], fixed["nodes"]) == ("old", ["h2"])
    assert document["parts"] == [
        {"name": "old", "gpus_per_unit": 8, "units": 1, "units_used": 1},
        {"name": "new", "gpus_per_unit": 72, "units": 1, "units_used": 1},
    ]
    assert document["gpus_per_unit"] is None
    plan = yaml.safe_load((tmp_path / "out/plans/fixed/plan.yaml").read_text(encoding="utf-8"))
    assert [node["name"] for node in plan["inputs"]["cluster"]["nodes"]] == ["h2"]
    picture = (tmp_path / "out/nodes.svg").read_text(encoding="utf-8")
    assert "8 or 72 GPUs a square" in picture
    shown = CliRunner().invoke(main, line).stdout
    assert "pipelines through several parts are not looked at" in shown
    for option, value in (("--busy", "h3"), ("--gpus", "8")):
        assert CliRunner().invoke(main, [*line, option, value]).exit_code == 2


@pytest.mark.slow
def test_a_fleet_of_jobs_without_plans_is_written_too(tmp_path: Path, kept: Path) -> None:
    jobs = FLEET["jobs"]
    FLEET["jobs"] = [{"name": "hopeless", "model": "llama-3.1-405b", "max_gpus": 8}]
    try:
        done = run(tmp_path, kept, "-o", str(tmp_path / "out"))
    finally:
        FLEET["jobs"] = jobs
    assert done.exit_code == 1, done.output
    document = json.loads((tmp_path / "out/fleet.json").read_text(encoding="utf-8"))
    assert document["jobs"][0]["status"] == "infeasible"
    assert "0 jobs on" in done.stdout


@pytest.mark.slow
def test_plans_on_listed_nodes_hold_where_one_is_part_filled(tmp_path: Path) -> None:
    """Sizes were planned on any GPUs of the list, part-filled nodes among them: files then failed."""
    nodes = [{"name": f"n{index}", "leaf": "l0"} for index in range(4)]
    nodes[0]["free_gpus"] = 5  # type: ignore[assignment]
    cluster, jobs = tmp_path / "cluster.yaml", tmp_path / "jobs.yaml"
    levels = [{"name": "leaf", "gpus": 32}]
    cluster.write_text(
        yaml.safe_dump({"name": "c", "base": "dgx-h100", "levels": levels, "nodes": nodes})
    )
    wishes = [{"name": "a", "gpus": 16}, {"name": "b", "gpus": 8}]
    asked = {"model": "llama-3-8b", "global_batch": 64, "seq_len": 4096}
    jobs.write_text(yaml.safe_dump({"jobs": [{**asked, **wish} for wish in wishes]}))
    line = ["fleet", str(jobs), "--cluster", str(cluster), "--workers", "1", "--no-cache"]
    done = CliRunner().invoke(main, [*line, "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    hosts = [(tmp_path / f"out/plans/{name}/hostfile").read_text().split() for name in "ab"]
    assert [len(each) for each in hosts] == [2, 1]
    assert sorted(hosts[0] + hosts[1]) == ["n1", "n2", "n3"]
    for name in "ab":
        held = CliRunner().invoke(main, ["verify", str(tmp_path / f"out/plans/{name}")])
        assert held.exit_code == 0, held.output


def random_cluster(chance: random.Random) -> dict[str, Any]:
    """A cluster file: listed nodes, some part-filled, slower or behind busy links; with or without leaves."""
    per_leaf, leaves_per_pod = chance.choice([2, 4]), chance.choice([1, 2, 3])
    leaves = chance.randint(2, 6)
    size = 8 * per_leaf
    levels: list[dict[str, Any]] = [
        {"name": "leaf", "gpus": size},
        {"name": "pod", "gpus": size * leaves_per_pod, "oversubscription": chance.choice([1, 3])},
        {"name": "core", "gpus": size * leaves_per_pod * leaves, "oversubscription": 3},
    ]
    if leaves_per_pod == 1:
        del levels[1]
    nodes: list[dict[str, Any]] = []
    has_leaves = chance.random() < 0.8
    for index in range(per_leaf * leaves):
        node: dict[str, Any] = {"name": f"n{index}"}
        if has_leaves:
            node["leaf"] = f"l{index // per_leaf}"
            if len(levels) == 3:
                node["pod"] = f"p{index // per_leaf // leaves_per_pod}"
        if chance.random() < 0.15:
            node["free_gpus"] = chance.choice([0, 3, 4])
        if chance.random() < 0.05:
            node["nic_gbps_per_gpu"] = 200
        nodes.append(node)
    if chance.random() < 0.25:
        levels[0]["background"] = 0.3
    if has_leaves:
        chance.shuffle(nodes)
    return {"name": "c", "base": "dgx-h100", "levels": levels, "nodes": nodes}


CATALOG = {
    "superpod-h100": 640, "superpod-a100": 480, "llama3-24k": 96, "h100-leaf-3to1": 640,
    "dragonfly-4096": 192, "gb200-nvl72": 288, "dgx-h100": 96, "mi300x": 64, "l40s-pcie": 32,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 40))]
)
def test_every_plan_that_a_fleet_writes_holds(seed: int, tmp_path: Path, kept: Path) -> None:
    """Plans were made on as many GPUs of an empty cluster, and written with the nodes that jobs got: prices,
    levels and idle nodes were those of others, and several levels ended in an internal error.
    """
    chance = random.Random(seed)
    cluster, gpus = str(tmp_path / "cluster.yaml"), None
    if seed % 2:
        cluster = chance.choice(list(CATALOG))
        gpus = CATALOG[cluster]
    else:
        Path(cluster).write_text(yaml.safe_dump(random_cluster(chance)), encoding="utf-8")
    blocks = [1, 2, 3, 5] if cluster != "gb200-nvl72" else [9]
    jobs: list[dict[str, Any]] = [
        {
            "name": name,
            "model": chance.choice(["llama-3-8b", "qwen3-8b", "gpt-oss-20b"]),
            "gpus": 8 * chance.choice(blocks),
            "may_wait": True,
        }
        for name in "abc"
    ]
    jobs[0] |= {"min_gpus": jobs[0]["gpus"], "max_gpus": 12 * jobs[0].pop("gpus")}
    defaults = {**FLEET["defaults"], "pin": "micro_batch=1,cp=1", "tokens": 1e9}
    path = tmp_path / "jobs.yaml"
    path.write_text(yaml.safe_dump({"defaults": defaults, "jobs": jobs}), encoding="utf-8")
    line = ["fleet", str(path), "--cluster", cluster, "--workers", "1", "--cache", str(kept)]
    line += ["--gpus", str(gpus)] if gpus else []
    line += ["--objective", chance.choice(["throughput", "makespan"]), "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(main, [*line, "--json"])
    assert done.exit_code in (0, 1), done.output
    document = json.loads(done.stdout)
    running = [row for row in document["jobs"] if row["nodes"]]
    assert running
    for row in running:
        folder = tmp_path / "out/plans" / row["name"]
        held = CliRunner().invoke(main, ["verify", str(folder)])
        assert held.exit_code == 0, (seed, cluster, row["name"], held.output)
        plan = yaml.safe_load((folder / "plan.yaml").read_text(encoding="utf-8"))
        step_s = plan["objective"]["step_time_s"]
        assert step_s == pytest.approx(row["step_time_s"], rel=1e-12)
        hosts = (folder / "hostfile").read_text(encoding="utf-8").split()
        listed_nodes = plan["inputs"]["cluster"]["nodes"]
        left_out = {node["name"] for node in listed_nodes if node.get("free_gpus") == 0}
        idle = set((plan["idle"] or {"nodes": []})["nodes"])
        used = {name for name in row["nodes"] if name in hosts}
        assert used | idle | left_out & set(row["nodes"]) == set(row["nodes"])
        assert not used & (idle | left_out)
    ends: dict[str, float] = {}
    for row in sorted(running, key=lambda row: row["start_s"] or 0.0):
        for node in row["nodes"] if row["end_s"] else ():
            assert row["start_s"] >= ends.get(node, 0.0)
            ends[node] = row["end_s"]
