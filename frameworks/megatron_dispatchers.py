"""How Megatron-LM sends tokens to their experts, and what DeepEP and HybridEP need for it."""

from __future__ import annotations

from meshwright.frameworks.record import TokenDispatcher

TRANSFORMER = "megatron/core/transformer/transformer_config.py"


def _flex(
    backend: str,
    since: str,
    *,
    planned: bool,
    installs: str,
    architectures: tuple[str, ...] = ("ampere", "hopper", "blackwell"),
    not_on: tuple[str, ...] = (),
    installs_between: str = "",
    group_sizes: tuple[int, ...] = (),
    domain_gpus: int = 0,
) -> TokenDispatcher:
    return TokenDispatcher(
        flag="--moe-flex-dispatcher-backend",
        value=backend,
        since=since,
        source=TRANSFORMER,
        planned=planned,
        installs=installs,
        installs_between=installs_between,
        deduplicates=True,
        architectures=architectures,
        not_on=not_on,
        between=("hopper", "blackwell"),
        group_sizes=group_sizes,
        domain_gpus=domain_gpus,
        rules=(
            "megatron-flex-dispatcher",
            "megatron-dispatcher-device",
            "megatron-dispatcher-reach",
            "megatron-dispatcher-ranks",
        ),
    )


DISPATCHERS = {
    "alltoall": TokenDispatcher(
        flag="--moe-token-dispatcher-type",
        value="alltoall",
        since="0.8.0",
        source=TRANSFORMER,
    ),
    "allgather": TokenDispatcher(
        flag="--moe-token-dispatcher-type",
        value="allgather",
        since="0.8.0",
        source=TRANSFORMER,
        rules=("megatron-allgather-dispatcher",),
    ),
    # Devices as in megatron/bridge/training/flex_dispatcher_backend.py of megatron-bridge 0.6.2. Group
    # sizes: DeepEP, deep_ep/buffers/legacy.py, get_dispatch_config, which fused_a2a.py asks.
    "deepep": _flex(
        "deepep",
        "0.12.0",
        planned=True,
        installs="DeepEP",
        installs_between="DeepEP built with NVSHMEM_DIR, for groups between nodes (RDMA by IBGDA)",
        not_on=("gb200", "gb300"),
        group_sizes=(2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160),
        domain_gpus=8,
    ),
    # Its kernels copy by TMA, which Hopper brought (DeepEP's branch hybrid-ep, docs/README_Hybrid-EP.md
    # and hybrid_ep_backend.cuh). A build of one node ends with "rebuild with HYBRID_EP_MULTINODE flag".
    "hybridep": _flex(
        "hybridep",
        "0.16.0",
        planned=True,
        installs="HybridEP",
        installs_between="HybridEP built with HYBRID_EP_MULTINODE=1 and rdma-core 60 or USE_NIXL=1, "
        "for groups beyond one NVLink domain",
        architectures=("hopper", "blackwell"),
    ),
    "ncclep": _flex("ncclep", "", planned=False, installs="Transformer Engine with NCCL EP"),
}
"""By the plan's word for each."""
