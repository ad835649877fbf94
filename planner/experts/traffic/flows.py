"""What is known of the ways that tokens take: which experts go together, and where tokens come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.planner.experts.files.inputs import read_arrays, read_routing
from meshwright.planner.experts.files.routing import Routing
from meshwright.planner.experts.params import TRAFFIC
from meshwright.planner.experts.problem import Loads, SlotShape
from meshwright.planner.experts.traffic.affinity import check_affinity


@dataclass(frozen=True, kw_only=True)
class Flows:
    """What is known of the tokens' ways, of all layers."""

    tokens: NDArray[np.int32] | None = None
    """Experts that each token chose, [layers, tokens, top-k]; -1 for a choice that was dropped."""
    pairs: Loads | None = None
    """Co-activation, [layers, experts, experts]; counts where there are no tokens."""
    sources: Loads | None = None
    """Tokens from each GPU to each expert, [layers, gpus, experts]."""

    @property
    def known(self) -> bool:
        """Whether there is anything to place by."""
        return any(x is not None for x in (self.tokens, self.pairs, self.sources))

    @property
    def by_token(self) -> bool:
        """Whether it is known which experts go together."""
        return self.tokens is not None or self.pairs is not None

    def layer(self, index: int) -> Flows:
        """One layer's, thinned."""
        tokens = self.tokens
        if tokens is not None:
            tokens = tokens[index : index + 1, :: -(-tokens.shape[1] // TRAFFIC.most_tokens)]
        pairs = self.pairs[index : index + 1] if self.pairs is not None else None
        sources = self.sources[index : index + 1] if self.sources is not None else None
        return Flows(tokens=tokens, pairs=pairs, sources=sources)


def read_flows(routing: Routing, co_activation: Path | None, shape: SlotShape) -> Flows:
    """Of the loads' own file, or of `co_activation`: a token trace, or counts of pairs of experts.

    Pairs count where there is no trace. Raises InputError for another shape than the loads.
    """
    _, layers, experts = routing.loads.shape
    where = "co-activation" if co_activation is None else str(co_activation)
    sources = routing.affinity
    if routing.affinity_recorded and sources is not None and sources.shape[1] != shape.gpus:
        sources = None
    if sources is not None:
        check_affinity(sources, layers, experts, shape)
    tokens, pairs = routing.tokens, routing.co_activation
    if co_activation is not None:
        tokens, pairs = _read_together(co_activation)
    if tokens is not None and (len(tokens) != layers or tokens.max() >= experts):
        raise InputError(
            f"{where}: a trace of {len(tokens)} layers and experts up to {tokens.max()}; the loads have "
            f"{layers} layers of {experts} experts"
        )
    if co_activation is not None and tokens is None and pairs is None:
        raise InputError(f"{where}: no topk_ids and no co_activation in it")
    if pairs is not None:
        pairs = _checked_pairs(pairs, layers, experts, where)
    return Flows(tokens=tokens, pairs=None if tokens is not None else pairs, sources=sources)


def _read_together(path: Path) -> tuple[NDArray[np.int32] | None, Loads | None]:
    """A trace, or else pair counts [layers, experts, experts], one matrix standing for one layer."""
    arrays = read_arrays(path)
    if arrays is None or "topk_ids" in arrays:
        routing = read_routing(path)
        if (
            routing.tokens is None
            and routing.co_activation is None
            and path.suffix.lower() == ".csv"
        ):
            return None, routing.loads
        return routing.tokens, routing.co_activation
    names = [name for name in ("co_activation", "load") if name in arrays] or list(arrays)[:1]
    if not names or arrays[names[0]].dtype.kind not in "iuf" or arrays[names[0]].ndim not in (2, 3):
        raise InputError(f"{path}: must hold topk_ids, or co_activation [layers, experts, experts]")
    pairs = np.asarray(arrays[names[0]], dtype=np.float64)
    return None, pairs if pairs.ndim == 3 else pairs[None]


def _checked_pairs(pairs: Loads, layers: int, experts: int, where: str) -> Loads:
    """Symmetric with a zero diagonal."""
    if pairs.shape != (layers, experts, experts):
        raise InputError(
            f"{where}: co-activation must have the shape [layers, experts, experts], "
            f"{[layers, experts, experts]}; got {list(pairs.shape)}"
        )
    if not np.isfinite(pairs).all() or pairs.min() < 0:
        raise InputError(f"{where}: co-activation must be finite and not negative")
    both = np.asarray((pairs + np.swapaxes(pairs, 1, 2)) / 2)
    both[:, np.arange(experts), np.arange(experts)] = 0.0
    return both
