"""Bytes of the states that optimizers really make, and what they send. Runs in the oracles' environment.

usage: ask_optimizers.py CASES.json
CASES.json is a list of {"make": "module:class", "settings": its arguments, "shapes": of tensors}, or of
{"sends": shape of a weight whose rows 4 ranks share}. One JSON line per case: bytes of states tensor by
tensor, tables of code values and single numbers left out; or the numbers of collectives of one step of
torch.optim.Muon. Of {"names": "module:list"} the words that a framework knows.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

TABLES = ("qmap1", "qmap2")
RANKS = 4
ANSWER = "answer "
"""Before each line: DeepSpeed writes others to the same place."""


def state_bytes(case: dict[str, Any]) -> list[int]:
    """Of each tensor after a step, or where the step wants a GPU, of states as they are made."""
    import torch

    module, name = case["make"].split(":")
    weights = [torch.nn.Parameter(torch.randn(*shape)) for shape in case["shapes"]]
    optimizer = getattr(importlib.import_module(module), name)(weights, **case["settings"])
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    if module == "bitsandbytes.optim":
        for index, weight in enumerate(weights):
            optimizer.init_state(optimizer.param_groups[0], weight, 0, index)
    else:
        if module == "torchao.optim":
            torch._dynamo.config.suppress_errors = (
                True  # No compiler here: the step runs as it stands.
            )
        optimizer.step()
    return [sum(map(held, optimizer.state[weight].items())) for weight in weights]


def held(entry: tuple[str, Any]) -> int:
    """Bytes of a state; counters of steps and norms are none."""
    import torch

    name, value = entry
    if not isinstance(value, torch.Tensor) or name in TABLES or value.dim() == 0:
        return 0
    if type(value) is not torch.Tensor and hasattr(value, "codes"):
        return int(value.codes.nbytes + value.scale.nbytes)
    return int(value.numel() * value.element_size())


def collectives(shape: list[int]) -> dict[str, int]:
    """Of a step of torch.optim.Muon on one weight that FSDP2 shards over four ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    layer = torch.nn.Linear(shape[1], shape[0], bias=False)
    fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
    for weight in layer.parameters():
        weight.grad = torch.full_like(weight, 0.01)
    optimizer = torch.optim.Muon(list(layer.parameters()))
    with CommDebugMode() as counter:
        optimizer.step()
    return {str(name).rsplit(".", 1)[-1]: n for name, n in counter.get_comm_counts().items()}


def names(where: str) -> list[str]:
    """Words of a list or of an enumeration."""
    module, name = where.split(":")
    return [getattr(word, "value", word) for word in getattr(importlib.import_module(module), name)]


def answer_to(case: dict[str, Any]) -> object:
    if "names" in case:
        return names(case["names"])
    return collectives(case["sends"]) if "sends" in case else state_bytes(case)


def main() -> None:
    warnings.simplefilter("ignore")
    for case in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        print(ANSWER + json.dumps(answer_to(case)), flush=True)


if __name__ == "__main__":
    main()
