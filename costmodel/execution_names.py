"""Names of execution settings. Importing them costs nothing, so that `--help` can show them."""

from __future__ import annotations

from typing import Literal, get_args

Dispatcher = Literal["alltoall", "allgather", "deduplicated", "deepep", "hybridep"]
GraphScope = Literal["none", "feed_forward", "partial", "full"]
ContextExchange = Literal["p2p", "a2a", "a2a+p2p"]
StateType = Literal["fp32", "bf16"]
DISPATCHERS: tuple[str, ...] = get_args(Dispatcher)
