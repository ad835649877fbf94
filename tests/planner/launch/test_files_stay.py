"""Launch files stay byte for byte what they are for a plan, and are read back as the same run.

The digests were taken before the writers were brought into one shape. Where a file is meant to change, take
them again: `python -m tests.planner.launch.test_files_stay`.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright.cluster_specs.importers.document import import_topology
from meshwright.errors import InfeasibleError, InputError
from meshwright.frameworks.record import FrameworkName
from meshwright.model_specs.reader import catalog_names
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Mapping, Plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.launches.reader import read_launch
from meshwright.planner.runs.run_terms import layout_from_document
from tests.oracles.random_plans import random_plan
from tests.places import DATA
from tests.plans import make_plan

DIGESTS = DATA / "launch_digests.json"
FRAMEWORKS: tuple[FrameworkName, ...] = ("megatron", "torchtitan", "deepspeed", "fsdp2")
SCHEDULERS = ("slurm", "openmpi", "kubernetes")
PLANS_EACH = 10
RECORDED_MODELS = catalog_names()[:35]
"""Those of the catalog when the digests were made: models that came later draw no other plans."""
OWN_ROOMS = ("plan.yaml", "mapping/fabric.svg")
"""Written by other rooms, which have their own tests."""
READ_BACK = (
    "launch.sh",
    "megatron_args.json",
    "torchtitan_args.json",
    "ds_config.json",
    "accelerate.yaml",
)


def drawn_plans(frameworks: Sequence[FrameworkName]) -> Iterator[tuple[str, Plan]]:
    """Legal random plans of frameworks, by name."""
    for framework in frameworks:
        rng = random.Random(f"launch {framework}")
        index, legal = 0, 0
        while legal < PLANS_EACH:
            index += 1
            drawn = random_plan(rng, framework, index, RECORDED_MODELS)
            if drawn is None:
                continue
            plan = with_tensor_overlap(drawn[0])
            try:
                plan_files(plan)
            except InfeasibleError:
                continue
            legal += 1
            yield f"{framework} {index} {plan.inputs.model.name}", plan


def with_tensor_overlap(plan: Plan) -> Plan:
    """The plan with tensor parallelism's overlap where its framework has one: files have flags of it too."""
    assert plan.layout is not None
    layout = layout_from_document(plan.layout)
    executions = PlanRequest.of_inputs(plan.inputs).execution_options.executions()
    overlapped = (execution.of_layout(layout) for execution in executions if execution.tp_overlap)
    return plan.model_copy(update={"execution": next(overlapped, None)})


def placed_plans() -> Iterator[tuple[str, Plan]]:
    """Plans on nodes with names, leaves and pods, in an order of their own."""
    cluster = import_topology(
        "slurm", [DATA / "topologies" / "slurm-tree.conf"], "dgx-h100"
    ).cluster
    shuffled = [(node, 7 - gpu) for node in (10, 0, 8) for gpu in range(8)]
    whole = [(node, gpu) for node in (4, 2) for gpu in range(8)]
    cases: tuple[tuple[str, list[tuple[int, int]], dict[str, Any]], ...] = (
        ("shuffled", shuffled, {"tp": 8, "dp": 3}),
        ("whole nodes", whole, {"tp": 8, "dp": 2}),
        ("stages inside", [(d, p * 4 + t) for p in range(2) for d in range(2) for t in range(4)],
         {"tp": 4, "dp": 2, "pp": 2}),
    )  # fmt: skip
    for name, ranks, degrees in cases:
        plan = make_plan(**degrees)
        inputs = plan.inputs.model_copy(update={"cluster": cluster})
        mapping = Mapping(order=["tp"], levels=[], matrix={}, ranks=ranks)
        yield name, plan.model_copy(update={"inputs": inputs, "mapping": mapping})
    yield "domains", make_plan("deepseek-v3", "gb200-nvl72", dp=64, ep=64, pp=2)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def digests_of(plan: Plan) -> dict[str, str]:
    """A digest of every file that the plan has on any target, and of what is read back from it."""
    files = plan_files(plan)
    for target in (*SCHEDULERS, "bridge"):
        try:
            files |= plan_files(plan, target)
        except InfeasibleError:
            files[target] = "refused"
    digests = {name: digest(text) for name, text in files.items() if name not in OWN_ROOMS}
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted(set(READ_BACK) & set(files)):
            path = Path(folder) / name
            path.write_text(files[name], encoding="utf-8")
            digests[f"read back {name}"] = digest(read_back(path))
    return dict(sorted(digests.items()))


def read_back(path: Path) -> str:
    try:
        run = read_launch(path)
    except InputError as error:
        return str(error).replace(str(path), path.name)
    parts = [run.settings, run.model, run.unread, run.remarks]
    return json.dumps(parts, sort_keys=True, default=list)


def every_plan(frameworks: Sequence[FrameworkName] = FRAMEWORKS) -> dict[str, Plan]:
    placed = [each for each in placed_plans() if each[1].inputs.framework in frameworks]
    return dict([*drawn_plans(frameworks), *placed])


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(name, marks=() if name == "deepspeed" else pytest.mark.slow)
        for name in FRAMEWORKS
    ],
)
def test_files_are_what_they_were(framework: FrameworkName) -> None:
    stored = json.loads(DIGESTS.read_text(encoding="utf-8"))
    plans = every_plan((framework,))
    assert set(plans) == {name for name in stored if stored[name]["framework"] == framework}
    for name, plan in plans.items():
        assert digests_of(plan) | {"framework": framework} == stored[name], name


if __name__ == "__main__":
    taken = {
        name: {"framework": plan.inputs.framework} | digests_of(plan)
        for name, plan in every_plan().items()
    }
    lines = [f"{json.dumps(name)}: {json.dumps(taken[name])}" for name in taken]
    DIGESTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
