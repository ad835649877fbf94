"""The order of passes that torch's own pipeline schedules give a rank.

usage: torch_orders.py < CASES.json; CASES.json is a list of [schedule, rank, pp, chunks of a rank, count].
Prints the orders for `count` micro-batches, each a list of [chunk, micro-batch, F B I or W, paired with the
next]. Needs torch.
"""

from __future__ import annotations

import json
import sys

from torch.distributed.pipelining.schedules import get_schedule_class

WORK = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def order(
    name: str, rank: int, pp: int, chunks: int, count: int
) -> list[tuple[int, int, str, bool]]:
    kind = get_schedule_class(name)
    # The constructor wants process groups and stages; the order needs these fields only.
    one = object.__new__(kind)
    one.pp_group_size, one.rank, one.n_local_stages = pp, rank, chunks
    one._n_microbatches, one._num_stages, one.num_stages = count, pp * chunks, pp * chunks
    one._stages = [None] * chunks
    one.number_of_rounds = max(1, count // pp)
    one.microbatches_per_round = count // one.number_of_rounds
    found = []
    for action in one._calculate_single_rank_operations(rank):
        parts = () if action is None else (action.sub_actions or (action,))
        for at, part in enumerate(parts):
            work = WORK[part.computation_type.name]
            found.append(
                (part.stage_index, part.microbatch_index, work, len(parts) > 1 and at == 0)
            )
    return found


if __name__ == "__main__":
    print(json.dumps([order(*case) for case in json.load(sys.stdin)]))
