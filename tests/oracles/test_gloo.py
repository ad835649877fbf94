"""Really started: degrees, groups and rank places of a plan, with PyTorch on gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshwright.cluster_specs.reader import load_cluster
from meshwright.frameworks.torchtitan import TORCHTITAN
from meshwright.model_specs.blocks import MoeSpec
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.launch.rank_files import placed_ranks
from meshwright.planner.plan.document import Mapping, Plan
from tests.plans import make_plan

pytestmark = pytest.mark.oracle

LLAMA = ModelSpec(name="tiny", layers=6, hidden=64, ffn_hidden=128, heads=8, kv_heads=4, vocab=96)
MOE = LLAMA.model_copy(update={"layers": 4, "moe": MoeSpec(experts=8, top_k=2, moe_ffn_hidden=128)})
SHUFFLED = [(1, 3), (0, 0), (1, 0), (0, 2), (0, 1), (1, 1), (0, 3), (1, 2)]


def plan_of(model: ModelSpec, ranks: list[tuple[int, int]] | None = None, **degrees: Any) -> Plan:
    mapping = None if ranks is None else Mapping(order=[], levels=[], matrix={}, ranks=ranks)
    plan = make_plan(model, seq_len=16, mapping=mapping, **degrees)
    cluster = load_cluster("dgx-h100").model_copy(update={"gpus_per_node": 4, "nvlink_domain": 4})
    return plan.model_copy(update={"inputs": plan.inputs.model_copy(update={"cluster": cluster})})


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(LLAMA, dp=4, zero_stage=3, num_micro_batches=2),
        plan_of(LLAMA, tp=2, dp=2, zero_stage=2, micro_batch=2),
        plan_of(LLAMA, pp=4, num_micro_batches=4, stages=[[1], [2], [2], [1]]),
        plan_of(LLAMA, tp=2, pp=2, dp=2, num_micro_batches=4, zero_stage=2, stages=[[4], [2]]),
        plan_of(
            LLAMA,
            SHUFFLED,
            tp=2,
            pp=2,
            dp=2,
            vpp=2,
            num_micro_batches=4,
            schedule="interleaved-1f1b",
        ),
        plan_of(
            LLAMA,
            pp=2,
            dp=2,
            vpp=4,
            num_micro_batches=4,
            schedule="interleaved-1f1b",
            stages=[[0, 1, 1, 1], [1, 1, 1, 0]],
        ),
        plan_of(MOE, dp=4, ep=4, zero_stage=3, num_micro_batches=2),
        plan_of(MOE, dp=4, ep=2, zero_stage=2, tp=2),
        plan_of(MOE, SHUFFLED, pp=2, dp=4, ep=2, num_micro_batches=4),
    ],
    ids=[
        "fsdp",
        "tp-fsdp",
        "pp-uneven",
        "tp-pp-fsdp",
        "vpp-shuffled",
        "empty-ends",
        "moe-ep",
        "moe-tp-edp",
        "moe-pp-shuffled",
    ],
)
def test_the_loss_is_that_of_one_process(plan: Plan, tmp_path: Path) -> None:
    layout = plan.layout
    assert layout is not None
    moe = plan.inputs.model.moe
    document = layout.model_dump() | {"experts": 0 if moe is None else moe.experts}
    (tmp_path / "plan.json").write_text(json.dumps(document), encoding="utf-8")
    alone = start(tmp_path, [(0, 0)])["losses"]
    placed = placed_ranks(plan, TORCHTITAN)
    ranks = start(tmp_path, list(placed.places))["ranks"]
    last = [one["losses"] for one in ranks if one["losses"]]
    assert len(last) == layout.tp * layout.dp
    # Each replica has its own part of the batch: the mean over replicas is the loss of the whole batch.
    mean = [sum(step) / len(last) for step in zip(*last, strict=True)]
    assert mean == pytest.approx(alone, rel=2e-4)
    assert alone[-1] < alone[0]
    for rank, one in enumerate(ranks):
        assert tuple(one["place"]) == placed.places[rank]
        tensor, data = rank // layout.tp * layout.tp, layout.tp * layout.dp
        assert one["axes"]["tp"] == list(range(tensor, tensor + layout.tp))
        assert one["axes"]["pp"] == list(range(rank % data, layout.pp * data, data))
        first = rank - rank // layout.tp % layout.ep * layout.tp
        assert one["axes"]["ep"] == [first + layout.tp * i for i in range(layout.ep)]
    print(f"{plan.inputs.model.name} {len(ranks)} processes: {mean} against {alone}")


def start(folder: Path, places: list[tuple[int, int]]) -> dict[str, Any]:
    """Starts a process per rank on loopback, rank r with the node and GPU that the plan gives it."""
    python = os.environ.get("ORACLE_PYTHON")
    assert python, "run `make oracles`: ORACLE_PYTHON names no interpreter"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = str(Path(__file__).with_name("gloo_run.py"))
    processes = []
    for rank, (node, gpu) in enumerate(places):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(len(places)), "NODE": str(node)}
        env |= {"LOCAL_RANK": str(gpu), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(
                [python, script, str(folder / "plan.json")],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    errors = [
        f"rank {rank}: {err[-1500:]}"
        for rank, (_, err) in enumerate(outputs)
        if processes[rank].returncode
    ]
    assert not errors, "\n".join(errors[:3])
    found: dict[str, Any] = json.loads(outputs[0][0].splitlines()[-1])
    return found
