"""The global batch, cut into micro-batches."""

from __future__ import annotations

from meshwright.constraints.kinds import Equals, of

BATCH_SPLIT = Equals(
    name="batch-split",
    sentence="micro_batch dp num_micro_batches = global_batch",
    unit="sequences",
    value=of("micro_batch", "dp", "num_micro_batches"),
    to=of(number=lambda work: work.global_batch),
    words="micro_batch {micro_batch} x dp {dp} x {num_micro_batches} micro-batches = "
    "{value} sequences, not the global batch of {limit}",
    remedy="Choose dp and micro_batch so that their product divides {limit}.",
)
