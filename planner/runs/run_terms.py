"""What the words of a run file mean: recomputation, CUDA graphs and pipeline splits.

Each function returns the meaning and, where the words say less than the cost model wants to know, a remark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from math import prod
from typing import Annotated, Any, Literal, cast

import numpy as np
from pydantic import Field

from meshwright.costmodel.activations import offloads_any, offloads_inputs
from meshwright.costmodel.estimate import Stages
from meshwright.costmodel.execution_names import (
    OFFLOADED_INPUTS,
    OFFLOADED_MODULES,
    RecomputeName,
    ScheduleName,
    StateType,
)
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.records import ErrorBand
from meshwright.costmodel.schedules import schedule_name, schedule_named
from meshwright.costmodel.workload import (
    GATHERED,
    HIERARCHICAL,
    AttentionKernel,
    Workload,
    swapping_ranks,
)
from meshwright.documents import ClosedDocument
from meshwright.errors import InputError, refuse_unknown
from meshwright.frameworks.catalog import framework_of_stack, input_offload, planned
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.request.choices import NUMBERS
from meshwright.planner.request.plan_request import Degree, RecomputeModule, Sequences
from meshwright.planner.runs.launches.command_line import Said

# A layout and what the cost model expects of it, as documents carry them.


RECOMPUTED: dict[RecomputeModule, Recompute] = {
    "core_attn": Recompute.CORE_ATTENTION,
    "layernorm": Recompute.LAYERNORM,
    "moe_act": Recompute.MOE_ACTIVATION,
    "mla_up_proj": Recompute.MLA_UP_PROJECTION,
    "mlp": Recompute.MLP,
    "op": Recompute.OPERATORS,
    "moe": Recompute.EXPERTS,
}
"""Modules of selective recomputation, by the names that documents and Megatron's flags use."""

_NUMBERS = (*NUMBERS, "num_micro_batches")
"""Whole numbers that a layout and its document hold under one name."""


class LayoutDoc(ClosedDocument):
    """The chosen layout. `stages[rank][virtual stage]` is a number of transformer layers; chunk v of rank r
    is the (v * pp + r)-th of the model; under zbv and dualpipe-v the second chunk of rank r is the
    (2 pp - 1 - r)-th. The first also holds the embedding, the last MTP and head.
    """

    tp: Degree
    cp: Degree
    pp: Degree
    dp: Degree
    ep: Degree
    etp: Degree
    vpp: Degree
    micro_batch: Sequences
    num_micro_batches: Sequences
    sequence_parallel: bool
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    shard_groups: Degree = 1
    """Groups of replicas that each hold all that ZeRO shards."""
    optimizer_offload: Annotated[int, Field(ge=0, le=100)] = 0
    """Percent of the parameters whose optimizer states lie in the host's memory."""
    recompute: RecomputeName
    recompute_modules: tuple[RecomputeModule, ...] = ()
    """With `selective`."""
    recompute_layers: Annotated[int, Field(ge=0)] = 0
    """With `full`: layers recomputed in each virtual stage (Megatron's block method)."""
    schedule: ScheduleName = "1f1b"
    stages: list[list[int]]

    @property
    def gpus(self) -> int:
        """GPUs in use: tp * cp * pp * dp."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def expert_group(self) -> int:
        """Ranks that hold one replica of a layer's experts: etp * ep."""
        return self.etp * self.ep


class LevelTraffic(ClosedDocument):
    """Bytes that leave a GPU across one fabric level in a step, and how long its share of links is busy."""

    level: str
    bytes_per_step: float
    """Of the mean GPU."""
    busy_s: float
    """Of the GPU that sends most across the level."""
    utilisation: float
    """`busy_s` over the step."""
    most_bytes_per_step: float | None = None
    """Of the GPU that sends most; null in plans of earlier versions, whose `busy_s` is the mean GPU's."""
    mean_busy_s: float | None = None
    """Of the mean GPU."""
    by_axis: dict[str, float] = Field(default_factory=dict)
    """The bytes of the mean GPU by axis."""

    @property
    def mean_s(self) -> float:
        """How long the mean GPU's share of the links is busy."""
        return self.busy_s if self.mean_busy_s is None else self.mean_busy_s


class ErrorBandDoc(ClosedDocument):
    """Where 90 % of measured steps lay, over predicted ones, on runs whose source was not fitted on."""

    low: float
    high: float
    rows: int
    basis: str = "the device's class"
    """Whose runs these are: a device class and a framework, or the wider group that stands in for them."""

    @classmethod
    def of(cls, band: ErrorBand) -> ErrorBandDoc:
        """The document of a band.

        Parameters
        ----------
        band
            Of runs or of plans.
        """
        return cls(low=band.low, high=band.high, rows=band.rows, basis=band.basis)


class Predicted(ClosedDocument):
    """What the cost model expects of the plan."""

    step_time_s: float
    tflops_per_gpu: float
    mfu: float
    tokens_per_s_per_gpu: float
    breakdown_s: dict[str, float]
    """Named parts that add up to `step_time_s`."""
    memory_gib: list[float]
    """Per pipeline stage, the peak on one GPU."""
    memory_parts_gib: list[dict[str, float]] = Field(default_factory=list)
    """Per pipeline stage: weights, gradients, optimizer, activations, logits, work (one layer's way back),
    buffers, fragmentation and workspace, which add up to `memory_gib`."""
    host_memory_gib: float | None = None
    """What a node's host holds of offloaded activations, and of optimizer states with their gradients; null
    where nothing is offloaded."""
    memory_context_gib: float | None = None
    """CUDA context and NCCL buffers, which the driver shows besides."""
    level_traffic: list[LevelTraffic]
    error_band: ErrorBandDoc
    band_of: Literal["measured runs", "own runs", "optima"] = "measured runs"
    """What `error_band` is of: published runs, whoever picked them; the runs that the user calibrated on; or
    the fastest published step of a piece of work, over the plan for it."""


def layout_document(layout: Layout, stages: Stages) -> LayoutDoc:
    """The `layout` part of a document.

    Parameters
    ----------
    layout
        One layout, in plain numbers.
    stages
        Transformer layers of each [pipeline rank][virtual stage].
    """
    mask = Recompute(int(layout.recompute))
    kind, modules, layers = recompute_words(mask, int(layout.recompute_layers))
    longest = max(max(rank) for rank in stages)
    return LayoutDoc(
        **{name: int(getattr(layout, name)) for name in _NUMBERS},
        sequence_parallel=bool(layout.sequence_parallel),
        recompute=kind,
        recompute_modules=modules,
        recompute_layers=min(layers, longest),
        schedule=cast("ScheduleName", schedule_name(int(layout.schedule), int(layout.vpp))),
        stages=[list(rank) for rank in stages],
    )


def recompute_words(
    mask: Recompute, layers: int
) -> tuple[RecomputeName, tuple[RecomputeModule, ...], int]:
    """How documents write a recomputation: kind, modules (selective), layers of a virtual stage (full).

    Parameters
    ----------
    mask
        Of a layout.
    layers
        `Layout.recompute_layers`, fully recomputed layers of each virtual stage.
    """
    if Recompute.FULL in mask:
        return "full", (), layers
    modules = tuple(name for name, flag in RECOMPUTED.items() if flag in mask)
    return ("selective" if mask else "none"), modules, 0


def layout_from_document(document: LayoutDoc) -> Layout:
    """The layout that a document describes, in plain numbers; its stages are not part of a `Layout`.

    Parameters
    ----------
    document
        Of a plan or of a run, with words for recomputation and schedule.
    """
    mask = Recompute.FULL if document.recompute == "full" else Recompute.NONE
    for module in document.recompute_modules:
        mask |= RECOMPUTED[module]
    return Layout(
        **{name: getattr(document, name) for name in _NUMBERS},
        sequence_parallel=document.sequence_parallel,
        recompute=int(mask),
        recompute_layers=document.recompute_layers,
        schedule=int(schedule_named(document.schedule)),
    )


# The pipeline split in Megatron's own notation (`--pipeline-model-parallel-layout`), written and read.
#
# E is the embedding, t a layer, m a multi-token-prediction module, L the head and loss, | the border of two
# chunks; x*n is x n times, (x|)*n is n chunks x. Chunk v of rank r is the (v * pp + r)-th from the front.


MOST_CHUNKS = 4096
_MOST_LETTERS = 16 * MOST_CHUNKS
_LONGEST_TEXT = 10_000
_GROUP_REPEATED = re.compile(r"\(([^()]+)\)\*(\d{1,4})")
_LETTER_REPEATED = re.compile(r"([EtmL|])\*(\d{1,4})")


def layout_string(stages: Sequence[Sequence[int]], mtp_layers: int = 0) -> str:
    """A pipeline split in Megatron's notation.

    Parameters
    ----------
    stages
        Layers of each [rank][virtual stage]. The first chunk also holds E, the last also m and L.
    mtp_layers
        Multi-token-prediction modules.

    >>> layout_string([[3, 2], [2, 2], [2, 1]])
    'Et*3|(tt|)*4tL'
    """
    counts = [rank[chunk] for chunk in range(len(stages[0])) for rank in stages]
    first = counts[0]
    inner = counts[1:-1]
    last = counts[1:][-1:]
    front = "E" + _repeat("t", first)
    if last:
        runs = ((layers, len(list(run))) for layers, run in groupby(inner))
        middle = "".join(_chunks(layers, number) for layers, number in runs)
        front += f"|{middle}{_repeat('t', last[0])}"
    return front + _repeat("m", mtp_layers) + "L"


def pattern_chunks(pattern: str, stages: Sequence[Sequence[int]]) -> str:
    """A hybrid pattern with | between the chunks of a pipeline split, in the order of the model.

    Parameters
    ----------
    pattern
        The block of each layer, a character each.
    stages
        Layers of each [rank][virtual stage]; they add up to the pattern's.

    >>> pattern_chunks("M-M*M-", [[1, 2], [2, 1]])
    'M|-M|*M|-'
    """
    counts = [rank[chunk] for chunk in range(len(stages[0])) for rank in stages]
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    return "|".join(pattern[end - count : end] for end, count in zip(ends, counts, strict=True))


def layers_of_layout(text: str) -> tuple[int, ...] | None:
    """Layers of each chunk, in model order, of a layout in Megatron's notation; None for anything else.

    Parameters
    ----------
    text
        With E, t, m, L and |, repeated by *n; commas and spaces do not count.

    >>> layers_of_layout("Et*3|(tt|)*4tL")
    (3, 2, 2, 2, 2, 1)
    """
    letters = text.replace(",", "").replace(" ", "")
    if len(letters) > _LONGEST_TEXT:
        return None
    for repeated in (_GROUP_REPEATED, _LETTER_REPEATED):
        letters = repeated.sub(_written_out, letters)
        if len(letters) > _MOST_LETTERS:
            return None
    letters = letters.replace("(", "").replace(")", "")
    if "E" not in letters or not set(letters) <= set("EtmL|"):
        return None
    return tuple(chunk.count("t") for chunk in letters.split("|"))


def _written_out(repeated: re.Match[str]) -> str:
    return repeated[1] * int(repeated[2])


def _chunks(layers: int, number: int) -> str:
    chunk = _repeat("t", layers) + "|"
    return chunk if number == 1 else f"({chunk})*{number}"


def _repeat(letter: str, count: int) -> str:
    return letter * count if count <= 2 else f"{letter}*{count}"


_GATHERS = ("all_gather", "allgather", "all-gather")
_HEADS_FOR_TOKENS = ("a2a", "all-to-all", "alltoall", "ulysses")
ALL_LAYERS = 10**6
"""`Layout.recompute_layers` of a run that recomputes every layer."""

MODULES: dict[str, Recompute] = {
    **{str(name): module for name, module in RECOMPUTED.items()},
    "core attention": Recompute.CORE_ATTENTION,
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
    (r"cudnn\D*([1-8]|9\.?0)\b", "cudnn-9.0"),
    (r"flash\D*[34]|cudnn", "flash-3"),
    (r"fused|megatron", "fused-softmax"),
    (r"torch|unfused|eager", "unfused"),
)
"""How sources begin what they call their attention kernels."""
_ATTENTION_RELEASES: tuple[tuple[str, AttentionKernel], ...] = (
    (r"nemo (23\.\d\d|24\.0[1-5])\b", "cudnn-9.0"),
    (r"nemo \(mlperf training v(3\.\d|4\.0)\)", "cudnn-9.0"),
)
"""Releases by the attention that they ran on Hopper. NeMo 24.05 stands on PyTorch 24.02 with Transformer
Engine 1.6, NeMo 24.07 has Transformer Engine 1.8 (NeMo Framework user guide 24.09, Software Component
Versions); MLPerf 4.0 was submitted with a container of April 2024."""
_FIRST_FP8_RELEASES = r"nemo (25\.0[1-5]\b|\(mlperf training v5\.0\))"
"""Releases with the first FP8 kernels for Blackwell: MLPerf 5.0 was submitted with NeMo 25.04, on which the
recipes of dgxc-benchmarking v25.04 to v25.05 stand too (their launch.sh, FW_VERSION)."""
_FP8_ATTENTION_RECIPES = r"(?!DEEPSEEK_V3_PRETRAIN_CONFIG_GB200)\w+_FP8_MX_"
"""Recipes of Megatron-Bridge 0.5 that attend in FP8: those with experts in graphs of the whole step, but for
this one (v0.5.0 and v0.5.1, scripts/performance/configs, fp8_dot_product_attention)."""
_DEALT_EXPERTS = "fake balanced gate"
"""What sources call routing that deals experts out to tokens in turn."""
_GRADIENT_TYPES: dict[str, StateType] = {"fp32": "fp32", "bf16": "bf16", "fp16": "bf16"}
"""By what sources call them, types as wide that gradients are priced in."""

MODULE_NAMES = (*MODULES, EVERY_SECOND_LAYER)


def cuda_graph_kind(recipe: dict[str, Any]) -> str:
    """`none`, `feed_forward`, `partial` or `full`, from the flags of a published recipe.

    `full_iteration` is an implementation in newer releases and a scope in older ones. Graphs of the
    router (`moe_router`, `moe_preprocess`) or the MLP alone leave attention to the host.

    Parameters
    ----------
    recipe
        Flags by name: `cuda_graph_impl`, and `cuda_graph_scope` as one scope or a list of them.
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

    Parameters
    ----------
    recipe
        Flags by name, of which `moe_dispatcher` is read.
    """
    named = recipe.get("moe_dispatcher", "alltoall")
    return named if named in ("alltoall", "allgather") else "deduplicated"


def copies_of_dealt_experts(
    routing: str | None, model: ModelSpec, ep: int
) -> tuple[tuple[int, int, float], ...]:
    """Where a token's experts lie if a source's routing deals experts out in turn; empty for other routing.

    NeMo AutoModel's fake balanced gate gives token t the k experts k t to k t + k - 1 of E, modulo E
    (components/moe/layers.py, FakeBalancedGate), so that they lie on one or two ranks of the expert group.

    Parameters
    ----------
    routing
        The words of the source.
    model
        Its experts, in order on the ranks.
    ep
        Ranks of the expert group.

    Returns
    -------
    tuple
        (ep, blocks, copies) for each number of equal blocks that the group can be cut into: how many of them
        a token's experts lie in, in the mean.
    """
    if model.moe is None or _DEALT_EXPERTS not in (routing or ""):
        return ()
    experts, chosen = model.moe.experts, model.moe.top_k
    tokens = np.arange(experts)[:, None]
    dealt = np.sort((chosen * tokens + np.arange(chosen)) % experts, axis=1)
    by_blocks = {
        blocks: dealt * blocks // experts for blocks in range(1, ep + 1) if ep % blocks == 0
    }
    return tuple(
        (ep, blocks, float(1.0 + (np.diff(of_token, axis=1) > 0).sum(axis=1).mean()))
        for blocks, of_token in by_blocks.items()
    )


def attention_kernel_kind(words: object) -> AttentionKernel | None:
    """The attention kernel that a source's words name; None for words that name none of ours.

    Parameters
    ----------
    words
        Name and version, in any case of letters: FlashAttention 2, cuDNN 9.1.

    >>> attention_kernel_kind("flash_attentionv1.0.8")
    'flash-1'
    """
    text = str(words).strip().lower().replace("_", " ").replace("-", " ")
    for pattern, kernel in _ATTENTION_WORDS:
        if re.match(pattern, text):
            return kernel
    return None


def attention_kernel_of_release(words: str) -> AttentionKernel | None:
    """The attention kernel of a release of a framework; None where it is its stack's own.

    Parameters
    ----------
    words
        Name and version of the framework, such as `NeMo 24.05`, with more behind it or not.

    >>> attention_kernel_of_release("NeMo 24.03.01 container")
    'cudnn-9.0'
    """
    text = words.strip().lower()
    return next(
        (kernel for pattern, kernel in _ATTENTION_RELEASES if re.match(pattern, text)), None
    )


def fused_loss_in_words(words: str) -> bool | None:
    """True where a source says, with the release, that cross entropy is fused; None where it says nothing.

    Parameters
    ----------
    words
        What a file calls its framework.

    >>> fused_loss_in_words("Megatron-LM 23e00ed0, TE 2.11, cross-entropy fusion")
    True
    """
    return True if "cross-entropy fusion" in words.lower() else None


def attends_in_fp8(recipe: dict[str, Any]) -> bool:
    """Whether a recipe has its attention in FP8: by its own flag, or by its name and release.

    Parameters
    ----------
    recipe
        Flags by name, with the recipe's own `name` and the `tag` of its release.

    >>> attends_in_fp8({"tag": "v0.5.0", "name": "QWEN3_30B_A3B_PRETRAIN_CONFIG_GB300_FP8_MX_V1",
    ...                 "cuda_graph_impl": "full_iteration"})
    True
    """
    if "fp8_attention" in recipe:
        return recipe_switch(recipe, "fp8_attention") is True
    graph, tag = recipe.get("cuda_graph_impl"), str(recipe.get("tag", ""))
    named = re.match(_FP8_ATTENTION_RECIPES, str(recipe.get("name", "")))
    return graph == "full_iteration" and tag.startswith("v0.5.") and named is not None


def has_first_fp8_kernels(words: str) -> bool:
    """Whether a release of a framework has the first FP8 kernels for Blackwell.

    Parameters
    ----------
    words
        Name and version of the framework, with more behind it or not.

    >>> has_first_fp8_kernels("NeMo (MLPerf Training v5.0)")
    True
    """
    return re.match(_FIRST_FP8_RELEASES, words.strip().lower()) is not None


def shard_group_size(words: object) -> int:
    """Ranks of an optimizer shard group from a source's words, such as '8 ranks (within a node)'; 0: all.

    Parameters
    ----------
    words
        That begin with the number of ranks; any others stand for all.
    """
    number = re.match(r"\s*(\d{1,7})\b", str(words))
    return int(number[1]) if number else 0


def recipe_switch(recipe: dict[str, Any], name: str) -> bool | None:
    """What a published recipe says of a switch; None where it says nothing.

    Parameters
    ----------
    recipe
        Flags of a published run.
    name
        Of the switch.
    """
    value = recipe.get(name)
    return value if isinstance(value, bool) else None


def gradient_type_of(words: object) -> StateType | None:
    """The type that gradients are reduced in from a source's words; None where they name none.

    Parameters
    ----------
    words
        That name fp32, bf16 or fp16 somewhere.
    """
    named = (kind for name, kind in _GRADIENT_TYPES.items() if name in str(words).lower())
    return next(named, None)


def cp_comm_kind(words: str | None) -> str:
    """`a2a` (heads for tokens), `p2p` (ring), `a2a+p2p` (both) or `all_gather`, from a framework's
    `cp_comm_type`.

    Parameters
    ----------
    words
        As Megatron or a source has it, in any case of letters; None is the ring, Megatron's default.
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

    Parameters
    ----------
    kind
        none, selective or full.
    modules
        Of `MODULE_NAMES`, where selective.
    layers
        Fully recomputed ones of each virtual stage; all when None.
    layers_per_chunk
        Of a virtual stage, on average.
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
            if module == "shared_experts":
                remarks.append(
                    f"recompute_modules {module}: no exact counterpart in the cost model"
                )
    return int(mask), recomputed_layers, remarks


def balanced(total: int, parts: int) -> tuple[int, ...]:
    """`total` in `parts` whole numbers that differ by at most 1, larger ones first.

    Parameters
    ----------
    total
        What is shared out, from 0.
    parts
        Number of shares, from 1.
    """
    size, larger = divmod(total, parts)
    return tuple(size + (part < larger) for part in range(parts))


def layers_from_words(split: str, layers: int, chunks: int) -> tuple[int, ...] | None:
    """Layers of each pipeline chunk, in model order, from words; None when they are not understood.

    Understood are: 'embedding and LM head each occupy one layer slot' (Megatron's account-for-embedding and
    -loss flags), 'type:transformer|embedding' (DeepSpeed's partition by layer type; unit weights, so
    balanced), a Megatron layout such as 'Et|(tt|)*30mL', and clauses 'N chunks = SPEC; ...' whose SPEC is a
    Megatron layout or a list such as 'E+4,14x4,1+mtp+loss'.

    Parameters
    ----------
    split
        As the source has it.
    layers
        Of the model, to which they must add up.
    chunks
        Virtual stages of all ranks.
    """
    words = split.strip().lower()
    if words.startswith(("embedding and lm head each occupy", "type:transformer|embedding")):
        slots = list(balanced(layers + 2, chunks))
        slots[0] -= 1
        slots[-1] -= 1
        return tuple(slots) if min(slots) >= 0 else None
    counts = layers_of_layout(split) or _clause_for(split, chunks)
    if counts is None or len(counts) != chunks or sum(counts) != layers:
        return None
    return counts


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


# Sizes of hierarchical context parallelism that a run file or a launch script gives.


def check_context_groups(workload: Workload, layout: Layout) -> None:
    """Raises InputError for a number of neighbours that a run of plain degrees cannot have.

    Parameters
    ----------
    workload
        With `cp_comm` and, where it is said, `cp_inner`.
    layout
        In plain integers.
    """
    model, inner = workload.model, workload.cp_inner
    tp, cp = int(layout.tp), int(layout.cp)
    if workload.cp_comm != HIERARCHICAL:
        if inner is not None:
            raise InputError(f"run.cp_inner: goes with cp_comm {HIERARCHICAL} only")
        return
    if inner is None:
        if cp > 1 and int(swapping_ranks(workload, layout)) == 1:
            raise InputError(
                f"run.cp_inner: is needed: with tp {tp} and cp {cp} no group of two or more neighbours lies "
                "in a scale-up domain, divides the heads and leaves a ring"
            )
        return
    if cp % inner:
        raise InputError(f"run.cp_inner: {inner} does not divide cp {cp}")
    heads = {"attention heads": model.heads, "key-value heads": model.kv_heads}
    for name, number in heads.items():
        if inner > 1 and number % (tp * inner):
            raise InputError(
                f"run.cp_inner: {number} {name} do not divide by tp {tp} x {inner} ranks that swap them"
            )


def megatron_exchange(said: Said, cp: int) -> dict[str, Any]:
    """`cp_comm` and `cp_inner` of Megatron's flags. Raises InputError for what it would not start.

    Parameters
    ----------
    said
        The command line.
    cp
        Context-parallel ranks, to which sizes must multiply.
    """
    kinds = dict.fromkeys(said["cp_comm"] or ())
    sizes = said["context_sizes"] or []
    if len(kinds) > 1:
        raise said.error("cp_comm", "differs from layer to layer, which has no price here")
    kind = next(iter(kinds), "p2p")
    if kind != HIERARCHICAL:
        named = cp_comm_kind(kind)
        return {} if named == "p2p" else {"cp_comm": named}
    if len(sizes) != 2 or not all(size.isdecimal() and len(size) < 8 for size in sizes):
        what = f"has to be two whole numbers where {said.flag('cp_comm')} is {HIERARCHICAL}"
        raise said.error("context_sizes", what, " ".join(sizes))
    degrees = [int(size) for size in sizes]
    if prod(degrees) != cp:
        what = f"must multiply to the context-parallel size {cp}"
        raise said.error("context_sizes", what, " ".join(sizes))
    return {"cp_comm": HIERARCHICAL, "cp_inner": degrees[0]}


# Modules whose activations are offloaded, as run files and launch scripts name them.


_OFFLOADED = tuple(OFFLOADED_MODULES[-1].split("+"))
"""Every module that is priced."""
_NOT_PRICED = (
    "--activation-offload-fraction",
    "--delta-offload-bytes-across-pp-ranks",
    "--min-offloaded-tensor-size",
    "--fine-grained-offloading-max-inflight-offloads",
)
"""Flags that change what is offloaded, or when."""


def offloaded_set(modules: Sequence[str], where: str = "run.offload_modules") -> str:
    """How the cost model calls some modules together.

    Parameters
    ----------
    modules
        Names of Megatron's flag in any order, or one of `OFFLOADED_INPUTS` alone.
    where
        File and field, for messages.

    >>> offloaded_set(["moe_act", "expert_fc1"])
    'expert_fc1+moe_act'

    Raises
    ------
    InputError
        For a module that has no price, and for attn_proj without core_attn, which Megatron refuses.
    """
    if len(modules) == 1 and modules[0] in OFFLOADED_INPUTS:
        return modules[0]
    names = (*OFFLOADED_INPUTS, *_OFFLOADED)
    what = "is not a module whose offloading has a price"
    refuse_unknown(modules, names, where=where, what=what)
    if set(modules) & {*OFFLOADED_INPUTS}:
        raise InputError("goes alone", where=where, value="+".join(modules))
    name = "+".join(module for module in _OFFLOADED if module in modules) or "none"
    if name not in OFFLOADED_MODULES:
        raise InputError("attn_proj goes with core_attn only: name both", where=where, value=name)
    return name


def check_offload(workload: Workload, layout: Layout) -> None:
    """Raises InputError where a run offloads and its framework is not planned to, or cannot.

    Parameters
    ----------
    workload
        With what is offloaded.
    layout
        In plain integers.
    """
    record = framework_of_stack(workload.framework)
    if workload.offload_parameters and (
        "parameters" not in record.offloads or layout.zero_stage != 3
    ):
        raise InputError(
            "is DeepSpeed's under ZeRO 3 only (offload_param); FSDP2's CPU offload is optimizer_offload: 100",
            where="run.parameter_offload",
            value=f"{record.name}, zero_stage {layout.zero_stage}",
        )
    _check_drives(workload, layout)
    modules, where = workload.offload_modules, "run.offload_modules"
    if offloads_inputs(workload):
        if input_offload(workload.framework, modules) is None:
            raise InputError(f"has no price with {record.name}", where=where, value=modules)
        if not layout.recomputes_layers:
            raise InputError(
                "has a price beside full recomputation alone", where=where, value=modules
            )
    elif offloads_any(workload) and "activations" not in planned(record.offloads):
        raise InputError("has a price with Megatron only", where=where, value=modules)


def _check_drives(workload: Workload, layout: Layout) -> None:
    """Raises InputError where drives keep what is not offloaded, or their rate is not known."""
    needed = {
        "optimizer_on_drives": (
            workload.optimizer_on_drives,
            "optimizer_offload: 100 and zero_stage: 3",
            int(layout.optimizer_offload) == 100 and int(layout.zero_stage) == 3,
        ),
        "parameters_on_drives": (workload.parameters_on_drives, "parameter_offload: true", True),
    }
    record = framework_of_stack(workload.framework)
    for name, (is_asked, beside, is_there) in needed.items():
        if not is_asked:
            continue
        if "parameters" not in record.offloads or not is_there:
            what = f"is DeepSpeed's, beside {beside}"
            raise InputError(what, where=f"run.{name}", value=record.name)
        if workload.cluster.nvme_gb_per_s is None:
            what = "needs the rate of a node's drives: set it in the cluster file, in GB/s"
            raise InputError(what, where=f"{workload.cluster.name}: nvme_gb_per_s", value=None)


def offloaded_modules(said: Said) -> dict[str, Any]:
    """`offload_modules` of Megatron's flags; nothing without the switch. Raises InputError for what has no
    price.
    """
    modules = said["offload_modules"]
    if not said["offloads_activations"]:
        return {}
    for flag in _NOT_PRICED:
        if said.line.has(flag):
            what = (
                f"has no price beside {said.flag('offloads_activations')}: leave it at its default"
            )
            raise InputError(what, where=f"{said.line.where}: {flag}")
    where = f"{said.line.where}: {said.flag('offload_modules')}"
    return {"offload_modules": offloaded_set(modules, where).split("+")} if modules else {}
