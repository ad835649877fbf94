"""Names that options of a plan take. Importing them costs nothing, so that `--help` can show them."""

from __future__ import annotations

PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
OPTIMIZERS = ("adam", "sgd", "muon")
METHODS = ("cp-sat", "exhaustive")
DEFAULT_MEMORY_RISK = 0.05
"""Share of measured errors of memory with which a plan may not fit."""
OBJECTIVES = ("nominal", "expected")
