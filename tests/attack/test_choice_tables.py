"""Tables of choices of random small plans: each row is what `plan` says with the choice pinned or withheld.

`make attack` takes a tenth of MESHWRIGHT_ATTACK_S for them, at least three; `python -m tests.one_search
--tables 100 --seed 0` counts them by number.
"""

from __future__ import annotations

import os
import time

import pytest

from meshwright.planner.request.reader import read_request
from tests.one_search import differences, request_of

ATTACK_S = float(os.environ.get("MESHWRIGHT_ATTACK_S", "30"))
SEED = int(os.environ.get("MESHWRIGHT_ATTACK_SEED", "0"))
FEWEST = 3


def test_a_small_table_is_given_back_row_by_row() -> None:
    """Three rows, each pinned and two withheld."""
    asked = read_request(
        model="llama-3-8b", cluster="dgx-h100", gpus=2, global_batch=8, seq_len=2048
    )
    plan, found = differences(asked)
    rows = {choice.choice: choice.proven for choice in plan.choices or []}
    assert rows == {"optimizer_offload": True, "cuda_graph": True, "tp_overlap": True}
    assert found == []


@pytest.mark.soak
def test_no_random_table_of_choices_differs_from_plans_again() -> None:
    end_s, seed = time.monotonic() + ATTACK_S / 10, 1000 + SEED
    rows: list[int] = []
    found: list[str] = []
    while time.monotonic() < end_s or len(rows) < FEWEST:
        plan, differing = differences(request_of(seed))
        if plan.choices:
            rows.append(len(plan.choices))
            found += differing
        seed += 1
    print(f"{len(rows)} tables, {sum(rows)} rows, {len(found)} differ")
    assert not found, "\n".join(found)
