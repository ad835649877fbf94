"""The proof, attacked: nothing that is drawn at random is below what a plan says is the least.

`make attack` runs it for MESHWRIGHT_ATTACK_S seconds in all (1,200); MESHWRIGHT_ATTACK_SEED begins elsewhere.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import MeshwrightError
from meshwright.planner.analysis.waterfall import setup_of_plan
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import make_plan
from meshwright.planner.plan.texts import read_plan
from meshwright.planner.request.choices import ALLOW, ALLOW_HOST, ALLOW_UNMEASURED
from meshwright.planner.request.plan_request import PlanRequest
from tests.attack.draws import candidates, random_request, seconds
from tests.places import ROOT

ATTACK_S = float(os.environ.get("MESHWRIGHT_ATTACK_S", "30"))
SEED = int(os.environ.get("MESHWRIGHT_ATTACK_SEED", "0"))
SAMPLES = 400
"""Layouts drawn for each request."""
FEWEST = 5
"""Requests, however short the time."""
ROUNDING = 1e-9
PLAN_S = 30.0
"""A plan that takes longer is judged by its bound."""

pytestmark = pytest.mark.soak


def words(request: PlanRequest) -> str:
    """A command that asks for the same."""
    pins = ",".join(f"{name}={value}" for name, value in request.pins.items())
    return (
        f"meshwright plan {request.model.name} --cluster {request.cluster.name} --gpus {request.gpus} "
        f"--global-batch {request.global_batch} --seq-len {request.seq_len} "
        f"--framework {request.framework} --precision {request.precision} "
        f"--optimizer {request.optimizer} --reserve-gib {request.reserve_gib}"
        + (f" --pin {pins}" if pins else "")
    )


def planned(request: PlanRequest) -> Plan:
    return make_plan(replace(request, time_limit_s=PLAN_S), robustness=False, choices=False)


def least_s(plan: Plan) -> float:
    """What the plan says that nothing is below."""
    if plan.status == "infeasible":
        return float("inf")
    return plan.objective.lower_bound_s or 0.0


def requests(
    share: float, seed: int, most_gpus: int = 64
) -> Iterator[tuple[random.Random, PlanRequest]]:
    """Requests until a share of the time is over; each has its own source of chance."""
    end_s = time.monotonic() + share * ATTACK_S
    number = seed
    while time.monotonic() < end_s or number < seed + FEWEST:
        number += 1
        chance = random.Random(number)
        yield chance, random_request(chance, most_gpus)


def test_no_drawn_layout_is_below_the_bound() -> None:
    made = priced = 0
    violations = []
    for chance, request in requests(0.5, SEED):
        plan = planned(request)
        if plan.layout is None:
            continue
        made += 1
        bound_s = least_s(plan)
        for candidate in candidates(chance, request, plan, SAMPLES):
            step_s = seconds(request, candidate)
            priced += step_s is not None
            if step_s is not None and step_s < bound_s * (1 - ROUNDING):
                violations.append(f"{words(request)}: bound {bound_s}, {step_s}: {candidate}")
                break
    print(f"{made} plans, {priced} legal layouts priced, {len(violations)} below the bound")
    assert not violations, "\n".join(violations)
    assert made


@dataclass(frozen=True)
class Relation:
    """A change of a request that can only help, or only hurt."""

    name: str
    change: Callable[[random.Random, PlanRequest, Plan], PlanRequest | None]
    sign: int
    """-1: the least step may only fall; 1: only rise; 0: it stays."""


def _cluster(request: PlanRequest, **changes: Any) -> PlanRequest:
    return replace(request, cluster=request.cluster.model_copy(update=changes))


def _more_bandwidth(chance: random.Random, request: PlanRequest, plan: Plan) -> PlanRequest | None:
    del plan
    cluster = request.cluster
    if cluster.measured:
        return None
    return _cluster(
        request, nic_gbps_per_gpu=cluster.nic_gbps_per_gpu * chance.choice((1.01, 1.5, 4.0))
    )


def _more_hbm(chance: random.Random, request: PlanRequest, plan: Plan) -> PlanRequest:
    del plan
    device = request.cluster.device
    more = device.model_copy(update={"hbm_gib": device.hbm_gib * chance.choice((1.001, 1.1, 2.0))})
    return _cluster(request, device=more)


def _more_gpus(chance: random.Random, request: PlanRequest, plan: Plan) -> PlanRequest | None:
    del plan
    per_node = request.cluster.gpus_per_node
    gpus = request.gpus * 2
    if gpus > per_node:
        gpus = -(-gpus // per_node) * per_node
    cluster = request.cluster
    if gpus > cluster.gpus and not cluster.elastic:
        return None
    del chance
    return replace(request, gpus=gpus, cluster=_grown(cluster, gpus))


def _grown(cluster: ClusterSpec, gpus: int) -> ClusterSpec:
    return cluster if cluster.gpus >= gpus else cluster.model_copy(update={"gpus": gpus})


def _own_choices(chance: random.Random, request: PlanRequest, plan: Plan) -> PlanRequest | None:
    """Some of the plan's own choices, pinned."""
    assert plan.layout is not None
    if plan.status != "optimal":
        return None
    names = chance.sample(["tp", "cp", "pp", "dp", "ep", "micro_batch"], chance.randint(1, 4))
    return replace(request, pins={name: getattr(plan.layout, name) for name in names})


def _other_choice(chance: random.Random, request: PlanRequest, plan: Plan) -> PlanRequest:
    del plan
    name = chance.choice(["tp", "cp", "pp", "dp", "micro_batch"])
    return replace(request, pins={name: chance.choice((1, 2, 4, 8))})


def _more_room(chance: random.Random, request: PlanRequest, plan: Plan) -> PlanRequest:
    del plan
    return replace(request, reserve_gib=request.reserve_gib + chance.choice((0.5, 4.0, 12.0)))


def _more_allowed(chance: random.Random, request: PlanRequest, plan: Plan) -> PlanRequest:
    del plan
    words = (*ALLOW, *ALLOW_HOST, *ALLOW_UNMEASURED)
    return replace(request, allow=(*request.allow, *chance.sample(words, 2)))


def _another_name(chance: random.Random, request: PlanRequest, plan: Plan) -> PlanRequest:
    del chance, plan
    return _cluster(request, name="other", node_name_pattern="z{:05d}")


RELATIONS = (
    Relation("more bandwidth", _more_bandwidth, -1),
    Relation("more HBM", _more_hbm, -1),
    Relation("more GPUs", _more_gpus, -1),
    Relation("its own choices pinned", _own_choices, 0),
    Relation("another choice pinned", _other_choice, 1),
    Relation("less HBM free", _more_room, 1),
    Relation("more allowed", _more_allowed, -1),
    Relation("another name", _another_name, 0),
)


def broken(relation: Relation, before: Plan, after: Plan) -> bool:
    """Whether the two plans contradict each other, by what each of them has proven."""
    known = before.objective.step_time_s or float("inf")
    known_after = after.objective.step_time_s or float("inf")
    falls = known_after < least_s(before) * (1 - ROUNDING)
    rises = known < least_s(after) * (1 - ROUNDING)
    return (falls and relation.sign >= 0) or (rises and relation.sign <= 0)


def test_changes_that_can_only_help_or_hurt_do() -> None:
    counts = dict.fromkeys((relation.name for relation in RELATIONS), 0)
    violations = []
    for chance, request in requests(0.45, SEED + 1_000_000, 16):
        try:
            before = planned(request)
        except MeshwrightError:
            continue
        if before.layout is None:
            continue
        for relation in chance.sample(RELATIONS, 3):
            try:
                changed = relation.change(chance, request, before)
                after = None if changed is None else planned(changed)
            except MeshwrightError:
                continue
            if changed is None or after is None:
                continue
            counts[relation.name] += 1
            if broken(relation, before, after):
                one, two = before.objective, after.objective
                violations.append(
                    f"{relation.name}: {words(request)}: {before.status} {one}; "
                    f"{words(changed)}: {after.status} {two}"
                )
    print(counts, f"{len(violations)} broken")
    assert not violations, "\n".join(violations)
    assert sum(counts.values())


def test_a_plans_own_document_is_priced_alike_to_the_last_digit(tmp_path: Path) -> None:
    compared = 0
    for number, (_, request) in enumerate(requests(0.05, SEED + 2_000_000, 8)):
        plan = planned(request)
        if plan.layout is None:
            continue
        path = tmp_path / f"{number}.yaml"
        path.write_text(plan_files(plan)["plan.yaml"], encoding="utf-8")
        priced_s = setup_of_plan(read_plan(path)).step_time_s
        assert plan.predicted is not None
        assert priced_s == plan.predicted.step_time_s == plan.objective.step_time_s, words(request)
        compared += 1
    print(f"{compared} documents")
    assert compared


def test_the_same_seed_gives_the_same_bytes_on_one_core_and_on_two() -> None:
    command = "plan olmoe-1b-7b --cluster dgx-h100 --gpus 8 --global-batch 32 --seq-len 2048"
    texts = []
    for cores in ({0}, {0, 1}, {0}):
        usable = cores & os.sched_getaffinity(0) or os.sched_getaffinity(0)
        done = subprocess.run(
            [sys.executable, "cli.py", *command.split(), "--json"],
            check=True,
            cwd=ROOT,
            capture_output=True,
            text=True,
            preexec_fn=lambda usable=usable: os.sched_setaffinity(0, usable),  # type: ignore[misc]
        )
        document = json.loads(done.stdout)
        document["solver"]["wall_s"] = None
        texts.append(json.dumps(document))
    assert len(set(texts)) == 1
