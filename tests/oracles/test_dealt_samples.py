"""Samples are dealt to ranks in the rounds of Megatron's own scheduler, team for team."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from meshwright.costmodel.hybrid_context import deal

pytestmark = pytest.mark.oracle


def test_rounds_are_those_of_megatron() -> None:
    python = os.environ.get("ORACLE_PYTHON")
    assert python, "run `make oracles`: ORACLE_PYTHON names no interpreter"
    rng, cases = random.Random(1), []
    for _ in range(400):
        ranks, rank_tokens = 2 ** rng.randint(0, 6), rng.choice([64, 512, 1000, 4096])
        number, most = rng.choice([1, 2, 5, 20, 100, 400]), ranks * rank_tokens
        kind = rng.randrange(3)
        drawn = [
            (rng.uniform(1, most), rng.lognormvariate(5, 1.5), rng.expovariate(1 / rank_tokens))
            for _ in range(number)
        ]
        lengths = [max(1, min(most, int(values[kind]))) for values in drawn]
        cases.append((ranks, rank_tokens, lengths))
    done = subprocess.run(
        [python, str(Path(__file__).with_name("megatron_rounds.py"))],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
    )
    for case, answer in zip(cases, json.loads(done.stdout), strict=True):
        ranks, rank_tokens, lengths = case
        rounds = deal(lengths, ranks=ranks, rank_tokens=rank_tokens)
        assert [[[team.ranks, team.samples] for team in teams] for teams in rounds] == answer, case
    print(f"{len(cases)} steps are dealt as Megatron deals them")
