"""Names of execution settings and of options of a plan, and what each kind of training step runs.

Importing them costs nothing, so that `--help` can show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Dispatcher = Literal["alltoall", "allgather", "deduplicated", "deepep", "hybridep"]
GraphScope = Literal["none", "feed_forward", "partial", "full"]
ContextExchange = Literal["p2p", "a2a", "a2a+p2p", "all_gather"]
OffloadedModules = Literal[
    "none",
    "layer_inputs",
    "saved_tensors",
    "core_attn",
    "core_attn+attn_proj",
    "expert_fc1",
    "moe_act",
    "expert_fc1+moe_act",
    "core_attn+expert_fc1",
    "core_attn+moe_act",
    "core_attn+expert_fc1+moe_act",
    "core_attn+attn_proj+expert_fc1",
    "core_attn+attn_proj+moe_act",
    "core_attn+attn_proj+expert_fc1+moe_act",
]
"""What waits for the backward pass in the host's memory. Inputs of recomputed layers, by the framework's own
switch or by a trainer's hooks on all saved tensors; or tensors that modules of a layer save: those of
Megatron's `--offload-modules` that are priced, where the attention projection goes with attention only."""
ParameterOffload = Literal["none", "cpu", "nvme"]
"""Where 16-bit shards of parameters lie: on the GPU, in the host's memory, or on the node's drives."""
StateType = Literal["fp32", "bf16"]
DISPATCHERS: tuple[str, ...] = get_args(Dispatcher)
OFFLOADED_MODULES: tuple[str, ...] = get_args(OffloadedModules)
PARAMETER_OFFLOADS: tuple[str, ...] = get_args(ParameterOffload)
OFFLOADED_INPUTS = ("layer_inputs", "saved_tensors")
"""Those that are no modules of a layer."""

Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
Optimizer = Literal[
    "adam",
    "sgd",
    "muon",
    "lion",
    "adafactor",
    "adam-8bit",
    "paged-adam",
    "paged-adam-8bit",
]
MuonMode = Literal["blockwise", "duplicated", "distributed"]
ScheduleName = Literal[
    "1f1b", "interleaved-1f1b", "gpipe", "breadth-first", "zb-h1", "zbv", "dualpipe-v", "dualpipe"
]
RecomputeName = Literal["none", "selective", "full"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
SCHEDULE_NAMES: tuple[str, ...] = get_args(ScheduleName)
"""Pipeline schedules as plans, run files and pins write them."""
RECOMPUTE_NAMES: tuple[str, ...] = get_args(RecomputeName)
Method = Literal["cp-sat", "exhaustive"]
METHODS: tuple[str, ...] = get_args(Method)
DEFAULT_MEMORY_RISK = 0.05
"""Share of measured errors of memory with which a plan may not fit."""
PlanObjective = Literal["nominal", "expected"]
OBJECTIVES: tuple[str, ...] = get_args(PlanObjective)


# Kinds of a training step: how many sequences a sample has, and which forward passes it asks for besides.
#
# Every kind runs its sequences forward and backward through the model that is trained. DPO and KTO also score
# them: forward passes without gradients, of a frozen reference or of the trained model itself, that end in
# log-probabilities of tokens. A further kind is a row of `STEP_KINDS` and a word of `StepKindName`.


StepKindName = Literal["pretrain", "sft", "dpo", "kto", "orpo", "reward"]
"""Words of `--kind`."""
KIND_NAMES: tuple[StepKindName, ...] = get_args(StepKindName)
ReferencePlace = Literal["resident", "offloaded", "precomputed"]
"""Words of `--reference`: beside the trained model in HBM; in the host's memory until it is used; nowhere,
its log-probabilities having been written into the data before training."""
REFERENCE_PLACES: tuple[ReferencePlace, ...] = get_args(ReferencePlace)
PRETRAINING: StepKindName = "pretrain"


@dataclass(frozen=True, kw_only=True)
class StepKind:
    """The passes of one kind.

    >>> dpo = STEP_KINDS["dpo"]
    >>> dpo.sequences, dpo.reference_passes  # chosen and rejected, each scored once
    (2, 1)
    """

    title: str
    """In sentences."""
    source: str
    """Where its passes were read."""
    sequences: int = 1
    """Of a sample, run through the model together, forward and backward."""
    own_passes: int = 0
    """Forward passes without gradients of the trained model, for each of these sequences."""
    reference_passes: int = 0
    """Forward passes of the reference, for each of these sequences."""
    losses: float = 1.0
    """Times that a cross-entropy is taken of each sequence's logits, with gradients; 0 where the head has one
    output, a score, and there are no logits."""
    on_preferences: bool = False
    """Whether it trains on preferences, with a trainer of its own."""

    @property
    def passes(self) -> tuple[float, ...]:
        """What its price depends on."""
        return self.sequences, self.own_passes, self.reference_passes, self.losses

    @property
    def has_vocabulary_head(self) -> bool:
        """Whether the head has an output for each word of the vocabulary."""
        return self.losses > 0

    @property
    def has_pairs(self) -> bool:
        """Whether a sample is a pair of sequences."""
        return self.sequences == 2


STEP_KINDS: Mapping[str, StepKind] = {
    PRETRAINING: StepKind(title="pretraining", source="megatron/training/training.py, train_step"),
    # Prompts are masked in the loss alone: every token runs through every product all the same.
    "sft": StepKind(
        title="supervised fine-tuning", source="trl/trainer/sft_trainer.py, compute_loss"
    ),
    "dpo": StepKind(
        title="direct preference optimisation (DPO, arXiv 2305.18290)",
        on_preferences=True,
        source="trl/trainer/dpo_trainer.py, _compute_loss",
        sequences=2,
        reference_passes=1,
    ),
    # Beside a completion its prompt with that of another sample, which both models score without gradients.
    "kto": StepKind(
        title="Kahneman-Tversky optimisation (KTO, arXiv 2402.01306)",
        on_preferences=True,
        source="trl/trainer/kto_trainer.py, _compute_loss and _compute_kl_logps",
        own_passes=1,
        reference_passes=2,
    ),
    # Of chosen sequences, half of all, the cross-entropy is taken besides.
    "orpo": StepKind(
        title="odds-ratio preference optimisation (ORPO, arXiv 2403.07691)",
        on_preferences=True,
        source="trl/experimental/orpo/orpo_trainer.py, concatenated_forward",
        sequences=2,
        losses=1.5,
    ),
    "reward": StepKind(
        title="a reward model (Bradley-Terry)",
        on_preferences=True,
        source="trl/trainer/reward_trainer.py, compute_loss",
        sequences=2,
        losses=0.0,
    ),
}
"""Read in TRL at f2cd577 (1.10.0.dev0): its trainers put the chosen and the rejected sequences of a
micro-batch into one forward pass, as do Megatron-SWIFT (swift/megatron/trainers/dpo_trainer.py) and NeMo-RL
(examples/configs/dpo.yaml: the model runs twice as many sequences as there are samples)."""
