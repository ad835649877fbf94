"""What a framework of one version can do, written down once.

A record names, for every choice of a plan, the values that the framework takes, and for each value a
`Setting`: the flag that asks for it, the oldest version it was read in, the file it was read in, and the
rules that limit it. The space, the request, the rules, the launch files and their readers ask the record; no
other module knows a framework by its name.

A new choice is one new field of `Framework`; a new value of a choice is one new `Setting`.

>>> from meshwright.frameworks.catalog import framework_named, planned
>>> planned(framework_named("torchtitan").zero_stages)
(0, 2, 3)
>>> framework_named("megatron").recompute_modules["moe_act"].flag
'--recompute-modules'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from meshwright.model_specs.schema import ModelSpec

FrameworkName = Literal["megatron", "torchtitan", "deepspeed", "fsdp2"]
"""Frameworks that plans are made for, by the name in `--framework`."""
Axis = Literal["tp", "cp", "pp", "vpp", "dp", "ep", "etp"]
DEGREES_OF_FRAMEWORKS: tuple[Axis, ...] = get_args(Axis)


ArgumentKind = Literal["integer", "count", "number", "text", "several", "switch", "toggle"]
"""How the value of a flag is read. A count is a whole number of one or more; a switch has no value; a toggle
is torchtitan's, which `--section.no-name` and a value turn off."""


class Argument(NamedTuple):
    """A flag of a command line and the word for what it says, for what writes it and what reads it."""

    word: str
    """A field of the model, with the field of it that it lies in, or of the run."""
    flag: str
    kind: ArgumentKind = "integer"
    default: int | float | str | bool | None = None
    """What the framework does without the flag. A switch turns it round: one that is True by default says
    no."""
    also: tuple[str, ...] = ()
    """Other names that are read: of Megatron-DeepSpeed, or of older versions."""
    optional: bool = False
    """Whether it is left out where it has its default; a switch always is."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One value of a choice: how a launch file asks for it, and where that was read."""

    source: str
    """The framework's file or page in which it was read, at the version of the record.

    Flag and value may stand in two files: both, with ` and ` between them.
    """
    flag: str = ""
    """The flag or key of the launch file; empty where there is none."""
    value: str = ""
    """What follows the flag or stands at the key; empty for a switch and for a number."""
    since: str = ""
    """Oldest version that it was read in; empty where only the record's own version was read."""
    default: bool = False
    """Whether the framework does it where a launch file says nothing; the flag is then not written."""
    planned: bool = True
    """Whether a plan may choose it. False where its price or its rules are not known yet."""
    allow: str = ""
    """Word of `--allow` without which a plan chooses it only where it is pinned: no measured run stands
    behind its price."""
    rules: tuple[str, ...] = ()
    """Names of the rules in `constraints/` that say with what it goes together."""
    installs: str = ""
    """What has to be installed beside the framework."""


@dataclass(frozen=True, kw_only=True)
class TokenDispatcher(Setting):
    """How tokens reach their experts."""

    deduplicates: bool = False
    """Whether a token travels once to each rank that holds some of its experts, not once for each expert."""
    architectures: tuple[str, ...] = ()
    """Of the devices that it runs on; empty where it runs on all."""
    not_on: tuple[str, ...] = ()
    """How the names of devices start that it does not run on."""
    between: tuple[str, ...] = ()
    """Architectures on which it goes beyond one scale-up domain; empty where it does on all."""
    group_sizes: tuple[int, ...] = ()
    """Numbers of ranks that share the experts for which it has settings; empty for any."""
    domain_gpus: int = 0
    """GPUs of a domain that it counts on in groups beyond one; 0 where it asks the devices."""
    installs_between: str = ""
    """What has to be installed, and how it is built, for groups beyond one domain."""

    def runs_on(self, architecture: str, device: str) -> bool:
        """Whether a device of this architecture and name can run it.

        Parameters
        ----------
        architecture
            Of the device, as `DeviceSpec.architecture`.
        device
            Its catalog name, in any case of letters.
        """
        known = not self.architectures or architecture in self.architectures
        return known and not device.lower().startswith(self.not_on or ("\0",))

    def joins(self, ranks: NDArray[np.int64], domain_gpus: int) -> NDArray[np.bool_]:
        """Which numbers of ranks that share the experts it has settings for, on scale-up domains of so many
        GPUs, [n]; beyond one domain they fill domains whole.

        Parameters
        ----------
        ranks
            Ranks that share the experts, each at least 1, [n].
        domain_gpus
            GPUs of the devices' scale-up domain, at least 1.
        """
        counted = self.domain_gpus or domain_gpus
        fills = (ranks % counted == 0) & (domain_gpus % counted == 0)
        is_set = np.isin(ranks, self.group_sizes) if self.group_sizes else ranks > 0
        return np.asarray((is_set | (ranks == 1)) & (fills | (ranks <= domain_gpus)))


@dataclass(frozen=True, kw_only=True)
class ContextExchange(Setting):
    """How context parallelism moves keys and values."""

    gathers: bool = False
    """Whether a ring's keys and values come by a collective, which shares the links of all ranks of a node,
    not each from the rank before."""


@dataclass(frozen=True, kw_only=True)
class GradientBuckets(Setting):
    """How many parameters' gradients are reduced together, beside the passes that make the next ones."""

    zero_stages: tuple[int, ...] = ()
    """Stages under which the number counts."""
    reserved: bool = False
    """Whether a buffer of that size is kept in HBM, so that larger buckets take memory."""


@dataclass(frozen=True, kw_only=True)
class QueuedSharding(Setting):
    """ZeRO 2 or 3 of a framework that gathers weights ahead, and reduces gradients later, by a queue."""

    queue_elements: int
    """Gradients of whole buckets that may wait for their reduction before the next bucket is filled; half as
    many weights are gathered ahead."""


@dataclass(frozen=True, kw_only=True)
class ShardGroups(Setting):
    """Replicas that shard among themselves alone, in groups that repeat each other."""

    zero_stages: tuple[int, ...] = ()
    """Stages under which there are such groups."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOffload(Setting):
    """Optimizer states in the host's memory, which its CPU updates."""

    percents: tuple[int, ...] = ()
    """Shares of the parameters that a plan may offload, each in percent above 0."""
    zero_stages: tuple[int, ...] = ()
    """Stages under which it can be had."""
    measured: bool = True
    """Whether a run that was measured stands behind its price."""


@dataclass(frozen=True, kw_only=True)
class InputOffload(Setting):
    """Inputs of fully recomputed layers in the host's memory until the layer's backward pass."""

    hides: bool = False
    """Whether copies run on a stream of their own, beside the passes of layers."""
    layers_at_hand: float = 1.0
    """Layers whose inputs are in HBM at a time, those on their way to the host among them."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSetting(Setting):
    """An optimizer, and what of the parameters it is handed."""

    beside: str = ""
    """The optimizer that the framework gives what is no matrix of a layer; empty where it has no say."""
    whole: bool = False
    """Whether whole matrices are dealt out to the ranks that share states, not an equal share of each."""
    flat: bool = False
    """Whether it steps flat pieces of all parameters, which have no rows and columns and are never small."""
    on_shards: bool = False
    """Whether it makes products of matrices whose rows are sharded, and communicates in each."""
    gram: bool = False
    """Whether matrices are orthogonalised by way of their square."""
    fused_gate: bool = False
    """Whether gate and up projection are one matrix."""
    step_bytes: float = 0.0
    """Read and written of a parameter in a step, beside its moments; 0 where it runs as it does elsewhere."""
    wide_tables: bool = False
    """Whether states of the token table stay in 32 bits where others have 8."""


@dataclass(frozen=True, kw_only=True)
class AdapterSetting(Setting):
    """Low-rank adapters beside frozen weights."""

    fused: bool = False
    """Whether queries, keys and values share one adapter, and gate and up projection another."""


@dataclass(frozen=True, kw_only=True)
class EncoderSetting(Setting):
    """An image encoder in front of the language model, on the first pipeline stage."""

    tensor_parallel: bool = False
    """Whether tensor ranks share its matrices; without, each of them runs the whole encoder."""
    context_parallel: bool = False
    """Whether it runs beside context parallelism."""
    recomputed: bool = False
    """Whether full recomputation of layers recomputes those of the encoder too."""
    freezes: str = ""
    """What of a training script's settings leaves encoder and projector as they are."""
    in_launch: str = ""
    """Why launch files cannot carry it; empty where the training script is the user's."""


@dataclass(frozen=True, kw_only=True)
class StepKindSetting(Setting):
    """One kind of training step."""

    loss: str = ""
    """What its trainer takes in place of all logits, of `losses`; empty where it takes all."""
    in_launch: str = ""
    """Why launch files of the framework's own scripts cannot carry it; empty where they do, or where the
    training script is the user's."""


@dataclass(frozen=True, kw_only=True)
class ReferenceSetting(Setting):
    """One place of a frozen reference model that runs forward in every step."""

    kinds: tuple[str, ...] = ()
    """Kinds of step that can have it there; empty for all that have a reference."""
    is_sharded: bool = False
    """Whether ZeRO 3 shards it as the trained model."""
    shard_bytes: float = 0.0
    """Of a weight in a shard."""
    gathers_whole: bool = False
    """Whether all its weights are gathered at once, ahead of its pass."""
    uploads_shards: bool = False
    """Whether shards come from the host for every pass; without, a model in the host's memory takes the
    trained one's place once a step."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A software stack whose runs were measured, or that plans are made for.

    `costmodel/data/frameworks.yaml` and `memory.yaml` hold its constants under the same name.
    """

    name: str
    written: str = ""
    """Regular expression of how a source's lower-case text starts; empty where only the name is read."""
    bound: bool = True
    """Whether the rules of the record bind it. False for forks that left before the version of the record."""
    maker: str = ""
    """Who releases it, where several stacks share kernels and habits."""
    compiled: bool = False
    """Whether its layers run under torch.compile."""
    checks_pipelines_across_nodes: bool = False
    """Whether its launcher sets TORCH_DISTRIBUTED_DEBUG=DETAIL, as its pipelines over several nodes show."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Framework:
    """One framework in one version. Mappings run from the plan's word for a value to its setting.

    What it does not have is left out.
    """

    name: FrameworkName
    title: str
    """As its makers write it."""
    package: str
    """Of the Python package index."""
    version: str
    """The version that was read, and that the launch files are tested with."""
    stacks: tuple[Stack, ...]
    """The first has the framework's own name: plans are priced with its constants."""
    measured_as: tuple[str, ...]
    """Stacks whose measured runs say how far the predictions of plans lie off."""

    axes: Mapping[Axis, Setting]
    """Degrees that can be more than 1."""
    sequence_parallel: Setting | None = None
    """How it is switched, on or off; None where there is none beside tensor parallelism."""
    zero_stages: Mapping[int, Setting]
    """0 replicated; 1 optimizer states, 2 also gradients, 3 also parameters sharded."""
    schedules: Mapping[str, Setting]
    """Pipeline schedules. Without a pipeline every framework runs `1f1b` on its single stage."""
    full_recompute: Setting
    """Recomputes whole layers."""
    recompute_amount: Setting | None = None
    """How many layers of a stage are recomputed in full; None where it is all or none."""
    recompute_modules: Mapping[str, Setting] = field(default_factory=dict)
    """Modules of a layer that can be recomputed alone."""
    precisions: Mapping[str, Setting]
    optimizers: Mapping[str, OptimizerSetting]
    """By the names of `--optimizer`. One that is not planned is read and priced, not launched."""
    dispatchers: Mapping[str, TokenDispatcher]
    overlaps: Mapping[str, Setting]
    """Communication by axis (dp, tp, pp, ep) that can hide under compute.

    Planned ones are what the launch files turn on, and so what prices assume.
    """
    gradient_buckets: GradientBuckets | None = None
    """How their size is set; None where each layer, or each module, is a bucket."""
    context_exchanges: Mapping[str, ContextExchange]
    """How context parallelism moves keys and values: p2p (ring), a2a (heads for tokens), all_gather, ..."""
    cuda_graphs: Mapping[str, Setting]
    offloads: Mapping[str, Setting] = field(default_factory=dict)
    """What else can lie in the host's memory: parameters; activations of single modules; layer_inputs, and
    saved_tensors that a trainer's hooks move, where layers are recomputed."""
    optimizer_offload: OptimizerOffload | None
    """Optimizer states in the host's memory; None where they go with the parameters or not at all."""
    shard_groups: ShardGroups | None
    """Sharding within groups of replicas smaller than dp (HSDP, partial distributed optimizer)."""
    numerics: Mapping[str, Setting] = field(default_factory=dict)
    """What changes the numbers of a run, by the name in `--allow`: chosen only where it is allowed."""
    compilation: Setting | None = None
    batch_sync: Setting | None = None
    """Reduces the gradients of each micro-batch by themselves; None where ZeRO 2 and 3 do so anyway."""
    autocasts_whole_weights: bool = False
    """Whether weights that nothing shards stay at 32 bits and autocast narrows them at each use."""
    eager_stack: str = ""
    """Stack with whose constants runs are priced that are not compiled; empty where none can be."""
    attention: Mapping[str, Setting] = field(default_factory=dict)
    """Attention kernels that can be asked for by name."""
    linear_attention: Mapping[str, Setting] = field(default_factory=dict)
    """Layers with linear attention in place of attention, by `LinearAttentionSpec.type`; a model with one of
    another kind is refused."""
    sparse_attention: Setting | None = None
    """Attention to positions that an indexer chooses; None where a model with it is refused."""
    hybrid_layers: Setting | None = None
    """Layers of one block each by a pattern, Mamba-2 among them; None where a model with them is refused."""
    latent_experts: Setting | None = None
    """Routed experts on a projection of the hidden width; None where a model with them is refused."""
    rank_orders: Mapping[str, Setting]
    """Orders in which ranks are counted over the axes, innermost first."""

    window_heads: Setting | None = None
    """Layers with a window whose heads are others than those of full attention, that reuse keys and values or
    read a token table of their own; None where a model with them is refused."""
    adapters: Mapping[str, AdapterSetting] = field(default_factory=dict)
    """Low-rank adapters beside frozen weights that can be trained in place of every parameter."""
    hybrid_context: Setting | None = None
    """Samples of unlike lengths dealt to ranks one by one, each to as many as it needs; None where ranks run
    whole packs."""
    losses: Mapping[str, Setting] = field(default_factory=dict)
    """Losses that never hold all logits, which a run can say; others than the framework's own."""
    step_kinds: Mapping[str, StepKindSetting] = field(default_factory=dict)
    """What a step can do with its samples beside pretraining."""
    image_encoders: Mapping[str, EncoderSetting] = field(default_factory=dict)
    """Image encoders that run in front of a language model, by `VisionSpec.kind`."""
    references: Mapping[str, ReferenceSetting] = field(default_factory=dict)
    """Where a reference model of preference training can be."""
    unfused_rope: tuple[str, ...] = ()
    """Kinds of rotary scaling under which rotary embeddings never run as one kernel."""
    slides_chunks: bool = False
    """Whether attention that a model cuts into chunks runs under sliding windows as long."""
    scan_positions: int | None = None
    """Positions that scans of Mamba-2 work on at once; as the model says by default."""
    uneven_stages: bool = True
    """Whether launch files can say how many layers each pipeline stage has."""
    experts_follow_tp: bool = False
    """Whether tp cuts experts that ep does not spread, and no others, so that etp is tp or 1."""
    own_rules: tuple[str, ...] = ()
    """Names of the rules in `constraints/` that bind it beside those of its settings."""
    degrees_remedy: str = ""
    """What to do about a degree or a ZeRO stage that is not above, in the framework's own terms."""

    @property
    def rules(self) -> frozenset[str]:
        """Names of the rules in `constraints/` that bind it, those of its settings among them."""
        values = [getattr(self, each.name) for each in fields(self)]
        settings = [value for value in values if isinstance(value, Setting)]
        settings += [
            each for value in values if isinstance(value, Mapping) for each in value.values()
        ]
        return frozenset(self.own_rules).union(*(setting.rules for setting in settings))

    @property
    def reorders_ranks(self) -> bool:
        """Whether ranks can be counted in another order than the default."""
        return len(self.rank_orders) > 1


# What the layers of a model need installed beside a framework.


def layer_needs(framework: Framework, model: ModelSpec) -> dict[str, str]:
    """Packages by the kind of layer that needs them; of kinds that the framework has.

    Parameters
    ----------
    framework
        With the packages of its settings.
    model
        Whose layers are looked at.

    >>> from meshwright.frameworks.catalog import framework_named
    >>> from meshwright.model_specs.reader import load_catalog_model
    >>> layer_needs(framework_named("fsdp2"), load_catalog_model("mamba2-2.7b"))
    {'Mamba-2': 'mamba-ssm and causal-conv1d'}
    """
    kinds: dict[str, Setting | None] = {}
    if model.linear_attention is not None:
        linear = model.linear_attention
        kinds[linear.title] = framework.linear_attention.get(linear.type)
    if model.indexer is not None:
        kinds["sparse attention"] = framework.sparse_attention
    if model.state_space is not None:
        kinds[model.state_space.title] = framework.hybrid_layers
    settings = {kind: setting for kind, setting in kinds.items() if setting is not None}
    return {kind: setting.installs for kind, setting in settings.items() if setting.installs}
