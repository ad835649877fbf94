"""Our orders of passes are those of torch's schedules, pass for pass."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from meshwright.costmodel.schedules import Schedule
from meshwright.costmodel.simulator import pass_order

pytestmark = pytest.mark.oracle

SCHEDULES = (
    ("Interleaved1F1B", Schedule.ONE_F_ONE_B, (2, 3)),
    ("LoopedBFS", Schedule.BREADTH_FIRST, (2, 3)),
    ("InterleavedZeroBubble", Schedule.ZB_H1, (1, 2, 3)),
    ("ZBVZeroBubble", Schedule.ZBV, (2,)),
    ("DualPipeV", Schedule.DUALPIPE_V, (2,)),
)


def test_orders_are_those_of_torch() -> None:
    python = os.environ.get("ORACLE_PYTHON")
    assert python, "run `make oracles`: ORACLE_PYTHON names no interpreter"
    cases = [
        (name, rank, pp, chunks, turns * pp, schedule)
        for name, schedule, sizes in SCHEDULES
        for chunks in sizes
        for pp in (2, 3, 4, 8)
        for turns in (2, 4)
        for rank in range(pp)
    ]
    script = Path(__file__).with_name("torch_orders.py")
    done = subprocess.run(
        [python, str(script)],
        input=json.dumps([case[:5] for case in cases]),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = json.loads(done.stdout)
    for (name, rank, pp, chunks, count, schedule), answer in zip(cases, answers, strict=True):
        ours = [
            [one.chunk, one.micro_batch, str(one.work), one.paired]
            for one in pass_order(rank, pp, chunks, count, schedule)
        ]
        assert ours == answer, (
            f"{name}, rank {rank} of {pp}, {chunks} chunks, {count} micro-batches"
        )
    print(f"{len(cases)} orders are torch's")
