"""What the words of a run file mean: recomputation, CUDA graphs and pipeline splits.

Each function returns the meaning and, where the words say less than the cost model wants to know, a remark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from meshwright.costmodel.context_groups import GATHERED, HIERARCHICAL
from meshwright.costmodel.layout import Recompute
from meshwright.costmodel.workload import AttentionKernel
from meshwright.planner.runs.pipeline_notation import MOST_CHUNKS, layers_of_layout
from meshwright.planner.runs.predicted import RECOMPUTED

_GATHERS = ("all_gather", "allgather", "all-gather")
_HEADS_FOR_TOKENS = ("a2a", "all-to-all", "alltoall", "ulysses")
ALL_LAYERS = 10**6
"""`Layout.recompute_layers` of a run that recomputes every layer."""

MODULES: dict[str, Recompute] = {
    **{str(name): module for name, module in RECOMPUTED.items()},
    "core attention": Recompute.CORE_ATTENTION,
    "moe": Recompute.MLP,
    "shared_experts": Recompute.NONE,
    "sac": Recompute.OPERATORS,
}
"""Recomputed modules by the names that documents and published sources use for them."""

OPERATOR_LEVEL = ("op", "sac")
"""torchtitan's selective checkpointing by operator."""
EVERY_SECOND_LAYER = "layer"
"""torchtitan's selective checkpointing by layer, with its default of every second layer."""

_ATTENTION_WORDS: tuple[tuple[str, AttentionKernel], ...] = (
    (r"flash\D*1", "flash-1"),
    (r"flash\D*2", "flash-2"),
    (r"flash\D*[34]|cudnn", "flash-3"),
    (r"fused|megatron", "fused-softmax"),
    (r"torch|unfused|eager", "unfused"),
)
"""How sources begin what they call their attention kernels."""
GRADIENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

MODULE_NAMES = (*MODULES, EVERY_SECOND_LAYER)


def cuda_graph_kind(recipe: dict[str, Any]) -> str:
    """`none`, `feed_forward`, `partial` or `full`, from the flags of a published recipe.

    `full_iteration` is an implementation in newer releases and a scope in older ones. Graphs of the
    router (`moe_router`, `moe_preprocess`) or the MLP alone leave attention to the host.
    """
    implementation, scope = recipe.get("cuda_graph_impl"), recipe.get("cuda_graph_scope")
    scopes = scope if isinstance(scope, list) else [scope]
    if implementation == "full_iteration" or "full_iteration" in scopes:
        return "full"
    if implementation not in ("transformer_engine", "local"):
        return "none"
    return "partial" if "attn" in scopes or scopes == [None] else "feed_forward"


def moe_dispatch_kind(recipe: dict[str, Any]) -> str:
    """The dispatcher that a recipe names: `deduplicated` for DeepEP and HybridEP, which it may call by name.

    One that names none runs NCCL's all-to-all, whatever else stands in the file. DeepEP and HybridEP are
    asked for by a flag and a library: Megatron Bridge's providers state `alltoall` themselves
    (src/megatron/bridge/models/, `moe_token_dispatcher_type`), torchtitan's expert parallelism is
    `standard` unless `deepep` is named (torchtitan/config/job_config.py, `expert_parallel_comm_backend`).
    Megatron-LM's own default, `allgather` (megatron/training/arguments.py), is that of its scripts: a script
    that is read back without the flag has it.
    """
    named = recipe.get("moe_dispatcher", "alltoall")
    return named if named in ("alltoall", "allgather") else "deduplicated"


def attention_kernel_kind(words: object) -> AttentionKernel | None:
    """The attention kernel that a source's words name; None for words that name none of ours.

    >>> attention_kernel_kind("flash_attentionv1.0.8")
    'flash-1'
    """
    text = str(words).strip().lower().replace("_", " ").replace("-", " ")
    for pattern, kernel in _ATTENTION_WORDS:
        if re.match(pattern, text):
            return kernel
    return None


def shard_group_size(words: object) -> int:
    """Ranks of an optimizer shard group from a source's words, such as '8 ranks (within a node)'; 0: all."""
    number = re.match(r"\s*(\d{1,7})\b", str(words))
    return int(number[1]) if number else 0


def recipe_switch(recipe: dict[str, Any], name: str) -> bool | None:
    """What a published recipe says of a switch; None where it says nothing."""
    value = recipe.get(name)
    return value if isinstance(value, bool) else None


def gradient_bytes_of(words: object) -> int | None:
    """Bytes of a reduced gradient element from a source's words; None where they name no type."""
    for name, size in GRADIENT_BYTES.items():
        if name in str(words).lower():
            return size
    return None


def cp_comm_kind(words: str | None) -> str:
    """`a2a` (heads for tokens), `p2p` (ring), `a2a+p2p` (both) or `all_gather`, from a framework's
    `cp_comm_type`.
    """
    if words is None:
        return "p2p"
    kind = words.strip().lower()
    if kind.startswith(HIERARCHICAL):
        return HIERARCHICAL
    if kind.startswith(_GATHERS):
        return GATHERED
    return "a2a" if kind.startswith(_HEADS_FOR_TOKENS) else "p2p"


def recompute_mask(
    kind: str, modules: Sequence[str], layers: int | None, layers_per_chunk: int
) -> tuple[int, int, list[str]]:
    """`Layout.recompute`, `Layout.recompute_layers` and remarks.

    `kind` is none, selective or full; `layers` the published number of fully recomputed layers of each
    virtual stage; `modules` are of MODULE_NAMES.
    """
    if kind == "none":
        return int(Recompute.NONE), 0, []
    if kind == "full":
        return int(Recompute.FULL), ALL_LAYERS if layers is None else layers, []
    if not modules:
        remark = "recompute_modules absent: core attention recomputed, Megatron's default"
        return int(Recompute.CORE_ATTENTION), 0, [remark]
    mask, recomputed_layers, remarks = Recompute.NONE, 0, []
    for module in modules:
        if module in OPERATOR_LEVEL:
            mask |= Recompute.OPERATORS
            remarks.append(
                f"recompute_modules {module}: every second matrix product is taken as run again"
            )
        elif module == EVERY_SECOND_LAYER:
            mask |= Recompute.FULL
            recomputed_layers = max(1, layers_per_chunk // 2)
            remarks.append(f"recompute_modules {module}: every second layer recomputed in full")
        else:
            mask |= MODULES[module]
            if module in ("moe", "shared_experts"):
                remarks.append(
                    f"recompute_modules {module}: no exact counterpart in the cost model"
                )
    return int(mask), recomputed_layers, remarks


def balanced(total: int, parts: int) -> tuple[int, ...]:
    """`total` in `parts` whole numbers that differ by at most 1, larger ones first."""
    size, larger = divmod(total, parts)
    return tuple(size + (part < larger) for part in range(parts))


def layers_from_words(split: str, layers: int, chunks: int) -> tuple[int, ...] | None:
    """Layers of each pipeline chunk, in model order, from words; None when they are not understood.

    Understood are: 'embedding and LM head each occupy one layer slot' (Megatron's account-for-embedding and
    -loss flags), 'type:transformer|embedding' (DeepSpeed's partition by layer type; unit weights, so
    balanced), a Megatron layout such as 'Et|(tt|)*30mL', and clauses 'N chunks = SPEC; ...' whose SPEC is a
    Megatron layout or a list such as 'E+4,14x4,1+mtp+loss'.
    """
    words = split.strip().lower()
    if words.startswith(("embedding and lm head each occupy", "type:transformer|embedding")):
        return _with_end_slots(layers, chunks)
    counts = layers_of_layout(split) or _clause_for(split, chunks)
    if counts is None or len(counts) != chunks or sum(counts) != layers:
        return None
    return counts


def _with_end_slots(layers: int, chunks: int) -> tuple[int, ...] | None:
    slots = list(balanced(layers + 2, chunks))
    slots[0] -= 1
    slots[-1] -= 1
    return tuple(slots) if min(slots) >= 0 else None


def _clause_for(text: str, chunks: int) -> tuple[int, ...] | None:
    for clause in text.split(";"):
        match = re.search(r"\b(\d{1,5}) chunks = (.+)", clause)
        if match is not None and int(match[1]) == chunks:
            spec = match[2].split(", see ")[0]
            return layers_of_layout(spec) or _counted_list(spec)
    return None


def _counted_list(spec: str) -> tuple[int, ...] | None:
    """'E+8,6x8,5+mtp+loss' is 8, then six times 8, then 5."""
    sizes: list[int] = []
    for item in spec.split(","):
        match = re.fullmatch(r"(?:E\+)?(?:(\d{1,4})x)?(\d{1,4})(?:\+(?:mtp|loss))*", item.strip())
        if match is None or len(sizes) > MOST_CHUNKS:
            return None
        sizes += [int(match[2])] * int(match[1] or 1)
    return tuple(sizes)
