"""What each software stack holds in HBM beside the textbook counts, from `costmodel/data/memory.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from meshwright.costmodel.constants.data_files import data_table


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Facts about one software stack; `memory.yaml` has the source of each."""

    logit_bytes: float
    """Bytes of a logit at the peak of the loss."""
    split_logit_bytes: float
    """The same where tensor-parallel ranks share the vocabulary."""
    placeholder_gradients: bool
    """Whether one 16-bit tensor of every weight's shape stands in for gradients that were added elsewhere."""
    fp8_weight_copies: bool
    fp8_saved_inputs: bool
    keeps_unread_outputs: bool
    """Whether operator-level recomputation stores outputs that no backward pass reads."""
    separate_operators: bool
    """Whether rotary embeddings and gates keep what each of their operators reads."""
    sums_beside_gradients: bool
    """Whether fp32 sums of gradients lie beside the 16-bit gradients of a micro-batch."""
    keeps_stage_outputs: bool
    """Whether a pipeline stage keeps what it sent until the backward pass."""
    stranding: Literal["none", "forward", "step"]
    """What a caching allocator can not use again: `none` (the stack's figures are bytes allocated), `forward`
    (blocks of a layer's forward pass, too small for logits), `step` (contiguous buffers of the optimizer
    step)."""
    step_bytes: float
    """Bytes of a parameter that the optimizer step holds on each data-parallel rank's share (16-bit
    gradients)."""
    bf16_gradient_copies_bytes: float
    """Further bytes of a gradient element that stages 0 to 2 keep in bf16."""
    unsharded_in_pipeline: bool
    """Whether a pipeline keeps fp32 gradients whole for a step under ZeRO 2 and 3, and under ZeRO 3 16-bit
    weights too."""
    whole_while_accumulating: bool
    """Whether ZeRO 2 and 3 keep 16-bit gradients whole until the last micro-batch."""
    bucket_elements: float
    """Elements of the buffer in which gradients are reduced."""
    reuse_elements: float
    """Weights that pass before a gathered one is used again, up to which it stays gathered under stage 3; 0
    where layers are gathered and freed one by one."""
    prefetch_elements: float
    """Weights that are gathered ahead under stage 3, where `reuse_elements` is above 0."""
    offload_buffer_bytes: float
    """Bytes of an element of the largest matrix, in buffers through which stages 1 and 2 offload."""
    offloaded_shard_bytes: float
    """Bytes of a weight, and of its gradient, that stage 3 keeps on the GPU beside an offloaded optimizer."""
    upload_bytes: float
    """Bytes of an offloaded weight on its way from the host to where it is gathered."""
    host_copies_bytes: float
    """Bytes of an offloaded parameter in the host's memory beside its states and its fp32 gradient."""


@cache
def memory_profile(name: str) -> MemoryProfile:
    """The facts about a software profile.

    Parameters
    ----------
    name : str
        As in `frameworks.yaml`.

    Returns
    -------
    MemoryProfile
        From `costmodel/data/memory.yaml`, where each value has its source.

    Raises
    ------
    KeyError
        Where there are none.
    """
    table = data_table("memory.yaml")
    stacks = table["stacks"]
    if name not in stacks:
        raise KeyError(f"no memory profile {name!r}: known are {', '.join(sorted(stacks))}")
    return MemoryProfile(**{**table["defaults"], **stacks[name]})
