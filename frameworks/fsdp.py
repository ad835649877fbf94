"""What torchtitan and accelerate have in common: PyTorch's FSDP2."""

from __future__ import annotations

FSDP_OFFLOAD_RULES = (
    "fsdp-offload-zero",
    "fsdp-offload-shards",
    "fsdp-offload-whole",
    "fsdp-offload-adam",
)
"""Rules of parameters, gradients and optimizer states on the host."""
