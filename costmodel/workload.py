"""What is trained on what: everything that a layout does not choose."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster_specs.schema import ClusterSpec
from model_specs.schema import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Which communication the run tries to hide under compute."""

    dp: bool = False
    tp: bool = False
    pp: bool = False
    ep: bool = False


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, a cluster and a batch, and how the software runs them."""

    model: ModelSpec
    cluster: ClusterSpec
    gpus: int
    global_batch: int
    """Sequences per step."""
    seq_len: int
    """Tokens per sequence."""
    precision: str = "bf16"
    """bf16, fp16, fp8, mxfp8 or nvfp4."""
    optimizer: str = "adam"
    framework: str = "megatron"
    """Name of a software profile in `costmodel/data/frameworks.yaml`."""
    overlap: Overlap = field(default_factory=Overlap)
    cuda_graph: str = "none"
    """none, feed_forward (of each layer, or just its router), partial (attention too) or full (the step)."""
    launch_blocking: bool = False
    """CUDA_LAUNCH_BLOCKING=1: every kernel waits for the one before."""
    cp_comm: str = "p2p"
    """How context parallelism moves keys and values: p2p (ring) or a2a (heads for tokens, Ulysses)."""
    moe_dispatch: str = "deduplicated"
    """deduplicated (one copy per destination: DeepEP, HybridEP) or alltoall (one copy per chosen expert)."""
    expert_imbalance: float = 1.0
    """Load of the busiest expert-parallel rank over the mean."""
    reserve_gib: float = 0.0
    """HBM that the plan must leave free."""
