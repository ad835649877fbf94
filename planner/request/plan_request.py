"""What is asked: the request, checked at birth, and the workload that it means."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from meshwright.cluster_specs.allocation import is_irregular
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.constraints.fabric import INSIDE_DOMAIN, DomainAxis
from meshwright.costmodel.calibration import Calibration
from meshwright.costmodel.execution_names import (
    DEFAULT_MEMORY_RISK,
    KIND_NAMES,
    METHODS,
    OBJECTIVES,
    OPTIMIZERS,
    PRECISIONS,
    PRETRAINING,
    REFERENCE_PLACES,
    STEP_KINDS,
    Optimizer,
    Precision,
    ReferencePlace,
    StepKindName,
)
from meshwright.costmodel.lengths import PackedLengths
from meshwright.costmodel.losses import ALL_LOGITS, LOSS_NAMES, LossName, in_chunks
from meshwright.costmodel.optimizers import OPTIMIZER_TRAITS
from meshwright.costmodel.rates import peak_memory_band
from meshwright.costmodel.records import POINT_ESTIMATE, memory_margin
from meshwright.costmodel.workload import Execution, Workload
from meshwright.documents import ClosedDocument, left_out_at
from meshwright.errors import (
    InputError,
    check_choice,
    listed,
    near_miss,
    refuse_unknown,
    require_number,
    require_whole,
    separate_words,
    shown,
)
from meshwright.frameworks.catalog import (
    DEFAULT_FRAMEWORK,
    FRAMEWORK_NAMES,
    framework_named,
    planned,
)
from meshwright.frameworks.record import Framework, FrameworkName, Setting
from meshwright.model_specs.adapters import AdapterSpec, adapter_counts, resolved
from meshwright.model_specs.blocks import EncoderUse, ImageInput
from meshwright.model_specs.huggingface import AND_ENCODER
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.request.choices import (
    ALLOW_PLACED,
    BY_NAME,
    FORBIDS,
    PERMISSIONS,
    PINS,
    WITHOUT,
    degree_meant,
)
from meshwright.planner.request.executions import ExecutionOptions, RunQuestion, with_shardings

if TYPE_CHECKING:
    from meshwright.planner.experts.training import ExpertLoads


# The part of a request that decides its plan, as documents carry it, and the names that it is written in.


Degree = Annotated[int, Field(ge=1, le=1_048_576)]
Sequences = Annotated[int, Field(ge=1, le=10_000_000)]
Tokens = Annotated[int, Field(ge=1, le=16_777_216)]
Gibibytes = Annotated[float, Field(ge=0, le=10_000)]
MemoryRiskShare = Annotated[float, Field(ge=1e-6, le=POINT_ESTIMATE)]
CutUse = Annotated[float, Field(gt=0, le=1)]
RecomputeModule = Literal["core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "op", "moe"]

_NOT_DEALT = ("tp-overlap", "cuda-graph", "cp-a2a")
"""Words of `--without` that hybrid context parallelism implies (`MEGATRON_DEALT_RULES`)."""


class PlanInputs(ClosedDocument):
    """Everything that decided the plan; the same inputs give the same plan."""

    model: ModelSpec
    cluster: ClusterSpec
    gpus: Degree
    global_batch: Sequences
    """Sequences, or pairs of them in kinds of steps that have pairs."""
    seq_len: Tokens
    """Tokens of a sequence."""
    precision: Precision = "bf16"
    optimizer: Optimizer = "adam"
    framework: FrameworkName = DEFAULT_FRAMEWORK
    reserve_gib: Gibibytes = 0.0
    memory_risk: MemoryRiskShare = POINT_ESTIMATE
    """Share of measured errors of memory with which the plan may not fit; plans that do not say took the
    prediction as it stands."""
    inside_domain: tuple[DomainAxis, ...] = ()
    """Axes whose groups each lie in one NVLink domain, as was asked."""
    max_cut_use: CutUse = 1.0
    """Share of the capacity of every cut that may be used in a phase, as was asked."""
    pins: dict[str, int | str] = Field(default_factory=dict)
    forbids: tuple[str, ...] = ()
    expert_imbalance_by_ep: tuple[tuple[Degree, Annotated[float, Field(ge=1, le=1e6)]], ...] = ()
    """Measured load of the busiest rank over the mean, by expert-parallel degree."""
    expert_copies_by_ep: tuple[
        tuple[Degree, Degree, Annotated[float, Field(ge=0, le=1e6)]], ...
    ] = ()
    """Measured blocks that a token touches: degree, equal blocks of the expert group, of them touched."""
    without: tuple[str, ...] = ()
    """Software that is not there, or not wanted."""
    allow: tuple[str, ...] = ()
    """What may change the numbers of the run."""
    calibration: Calibration | None = None
    """What the user's own runs say of the constants; None for the shipped ones."""
    objective: Literal["nominal", "expected"] = "nominal"
    adapters: AdapterSpec | None = left_out_at(None)
    """What is trained beside frozen weights; None where every parameter is trained."""
    loss: LossName | None = left_out_at(None)
    """How the head and its cross-entropy run; None for what the framework does."""
    images: ImageInput | None = left_out_at(None)
    """What sequences hold of images; None where text alone is trained on."""
    kind: StepKindName = left_out_at(PRETRAINING)
    """What a step does with a sample."""
    reference: ReferencePlace | None = left_out_at(None)
    """Where a reference model of its own is; None where a step has none."""

    lengths: PackedLengths | None = left_out_at(None)
    """What sequences hold where they are packs of unlike samples; `seq_len` is the size of a pack then."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a step that are trained on, without the padding of packs."""
        tokens = self.global_batch * STEP_KINDS[self.kind].sequences * self.seq_len
        return tokens if self.lengths is None else tokens * self.lengths.fill

    @model_validator(mode="before")
    @classmethod
    def _dispatch_is_pinned(cls, data: Any) -> Any:
        """Plans written before dispatchers were chosen carried the one that was given."""
        if not isinstance(data, dict) or "moe_dispatch" not in data:
            return data
        rest, pins = dict(data), data.get("pins") or {}
        dispatch = {"moe_dispatch": rest.pop("moe_dispatch")}
        return {**rest, "pins": pins | dispatch if isinstance(pins, dict) else pins}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A model, a cluster and a batch, and how to search. Raises InputError where a field is out of
    range.
    """

    model: ModelSpec
    cluster: ClusterSpec
    gpus: int
    """The first so many GPUs of the cluster, 1 to all of them."""
    global_batch: int
    """Sequences per step, 1 to 10,000,000."""
    seq_len: int
    """Tokens per sequence, 1 to 16,777,216."""
    precision: str = "bf16"
    """Any of `PRECISIONS`."""
    optimizer: str = "adam"
    """Any of `OPTIMIZERS`."""
    framework: str = DEFAULT_FRAMEWORK
    """Any of `FRAMEWORK_NAMES`."""
    pins: Mapping[str, int | str] = field(default_factory=dict)
    """Choices that are given: any of `choices.PINS`."""
    forbids: tuple[str, ...] = ()
    """Choices that are excluded: any of `choices.FORBIDS`."""
    reserve_gib: float = 0.0
    """HBM that the plan must leave free on every GPU, GiB, 0 to 10,000."""
    memory_risk: float = DEFAULT_MEMORY_RISK
    """Share of measured errors of memory with which the plan may not fit, 1e-6 to 0.5, which takes the
    prediction as it stands."""
    inside_domain: tuple[str, ...] = ()
    """Axes whose groups must each lie in one NVLink domain: any of `INSIDE_DOMAIN`."""
    max_cut_use: float = 1.0
    """Share of the capacity of every cut of the fabric that may be used in a phase, 1e-6 to 1, which limits
    nothing."""
    expert_loads: ExpertLoads | None = None
    """Measured loads, with placements for every expert-parallel degree. What layouts are priced with is the
    balance of experts in their own order, which frameworks run, or of the placements where those are allowed.
    """
    expert_imbalance_by_ep: tuple[tuple[int, float], ...] = ()
    """What `expert_loads` makes of each degree; given alone when a plan is read back."""
    expert_copies_by_ep: tuple[tuple[int, int, float], ...] = ()
    """Blocks that a token touches by degree and blocks of the expert group, where a trace was given."""
    without: tuple[str, ...] = ()
    """Software that is not there, or not wanted: any of `choices.WITHOUT`."""
    allow: tuple[str, ...] = ()
    """What may change the numbers of the run, any of `choices.ALLOW`, or fill the hosts' memory, any of
    `choices.ALLOW_HOST`, or assume experts placed by their loads, `choices.ALLOW_PLACED`."""
    calibration: Calibration | None = None
    """What the user's own runs say of the constants."""
    adapters: AdapterSpec | None = None
    """What is trained beside frozen weights; None where every parameter is trained."""
    loss: str | None = None
    """How the head and its cross-entropy run, any of `LOSS_NAMES`; None for what the framework does, or the
    trainer of the kind of step."""
    images: ImageInput | None = None
    """What sequences hold of images; None for text alone, to which the model has no encoder then."""
    kind: str = PRETRAINING
    """What a step does with a sample: any of `execution_names.KIND_NAMES`."""
    reference: str | None = None
    """Where a reference model of its own is, any of `execution_names.REFERENCE_PLACES`; None for `resident`
    where the kind of step has one, and the base beside adapters is not it."""
    objective: str = "nominal"
    """The step time with the nominal constants, or expected: its mean over the posterior of a calibration;
    without one, its product with what measured pairs of runs correct of the plan's settings."""
    lengths: PackedLengths | None = None
    """What sequences hold where they are packs of unlike samples; `seq_len` is the size of a pack then."""
    other_packings: tuple[PackedLengths, ...] = ()
    """The same samples packed in other ways, to compare the plan with."""
    method: str = "cp-sat"
    """Any of `METHODS`."""
    top_k: int = 1
    """How many of the best layouts to prove and report, the plan included, 1 to 1,000."""
    time_limit_s: float | None = None
    """Seconds for the search, 0 to 31,536,000; None searches until the proof."""
    seed: int = 0
    """Of the solver, 0 to 2^31 - 1."""

    def __post_init__(self) -> None:
        for name in ("gpus", "global_batch", "seq_len", "top_k", "seed"):
            require_whole(name, getattr(self, name))
        _within(
            "gpus",
            self.gpus,
            1,
            self.cluster.gpus,
            f"cluster {self.cluster.name!r} has {self.cluster.gpus}",
        )
        _within("global_batch", self.global_batch, 1, 10_000_000, "sequences per step")
        _within("seq_len", self.seq_len, 1, 16_777_216, "tokens per sequence")
        self._check_dealt()
        if self.lengths is not None and self.model.indexer is not None:
            what = f"{self.model.name} chooses the positions it attends to: not priced for packs"
            raise InputError(what, where="lengths")
        _within("reserve_gib", self.reserve_gib, 0, 10_000, "GiB")
        _within("memory_risk", self.memory_risk, 1e-6, POINT_ESTIMATE, "share of runs")
        _within("max_cut_use", self.max_cut_use, 1e-6, 1, "share of a cut's capacity")
        _within("top_k", self.top_k, 1, 1000, "layouts")
        _within("seed", self.seed, 0, 2**31 - 1, "the solver's random seed")
        if self.time_limit_s is not None:
            _within("time_limit_s", self.time_limit_s, 0, 31_536_000, "seconds")
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("framework", self.framework, FRAMEWORK_NAMES)
        _one_of("method", self.method, METHODS)
        _one_of("objective", self.objective, OBJECTIVES)
        if self.max_cut_use < 1 and (is_irregular(self.cluster) or self.objective == "expected"):
            what = "below 1 it takes a fabric whose leaves are alike, and the nominal objective"
            raise InputError(what, where="max_cut_use", value=self.max_cut_use)
        if self.expert_loads is not None:
            by_ep, copies = self.expert_loads.priced(placed=self.places_experts)
            object.__setattr__(self, "expert_imbalance_by_ep", by_ep)
            object.__setattr__(self, "expert_copies_by_ep", copies)
        for name in self.forbids:
            _one_of("forbid", name, FORBIDS)
        for axis in self.inside_domain:
            _one_of("inside_domain", axis, INSIDE_DOMAIN)
        if self.adapters is not None:
            object.__setattr__(self, "adapters", self._checked_adapters(self.adapters))
            check_step_of_adapters(self.framework, self.optimizer)
        object.__setattr__(self, "model", self._with_encoder())
        _one_of("kind", self.kind, KIND_NAMES)
        object.__setattr__(self, "reference", self._checked_reference())
        other_work = self.adapters or self.lengths or STEP_KINDS[self.kind].on_preferences
        if self.objective == "expected" and self.calibration is None and other_work:
            what = (
                "without --calibration it leans on pairs of runs that train every parameter on whole "
                "sequences; none is of adapters, packed samples or preferences: calibrate on own runs"
            )
            raise InputError(what, where="objective", value=self.objective)
        object.__setattr__(self, "loss", self._checked_loss())
        refuse_unknown(self.without, WITHOUT, where="without", what="is not known")
        refuse_unknown(self.allow, PERMISSIONS, where="allow", what="is not known")
        object.__setattr__(
            self, "pins", {name: _pin(name, value) for name, value in self.pins.items()}
        )
        object.__setattr__(self, "execution_options", self._execution_options())

    @property
    def deals_samples(self) -> bool:
        """Whether hybrid context parallelism deals samples to ranks one by one."""
        return self.lengths is not None and bool(self.lengths.dealt)

    execution_options: ExecutionOptions = field(init=False, repr=False, compare=False)
    """What the plan may choose beside its layout."""

    def _execution_options(self) -> ExecutionOptions:
        question = RunQuestion(
            framework=framework_named(self.framework),
            model=self.model,
            cluster=self.cluster,
            pins=self.pins,
            without=(*self.without, *_NOT_DEALT) if self.deals_samples else self.without,
            allow=self.allow,
            precision=self.precision,
            optimizer=self.optimizer,
            trains_alone=self.adapters is None and self.images is None and self.reference is None,
        )
        return with_shardings(question.options(), self.shardings, self.workload)

    @property
    def zero_stages(self) -> tuple[int, ...]:
        """Stages of ZeRO that a plan may have."""
        settings, pin = framework_named(self.framework).zero_stages, self.pins.get("zero_stage")
        return tuple(
            stage
            for stage in planned(settings)
            if f"zero-{stage}" not in self.forbids
            and (pin == stage or (pin is None and settings[stage].allow in ("", *self.allow)))
        )

    @property
    def shardings(self) -> tuple[tuple[int, int], ...]:
        """Every ZeRO stage with each share of the optimizer's states that may lie in the host's memory."""
        record = framework_named(self.framework).optimizer_offload
        share, shares = self.pins.get("optimizer_offload"), [0]
        if record is not None and "optimizer-offload" not in self.forbids:
            tried = record.percents if share is None else (int(share),)
            shares += [each for each in tried if each > 0]
        hosted = record.zero_stages if record is not None else ()
        return tuple(
            (stage, each)
            for stage in self.zero_stages
            for each in shares
            if (each == 0 or stage in hosted) and (share is None or each == share)
        )

    def _check_dealt(self) -> None:
        """Raises InputError where samples cannot be dealt to ranks one by one."""
        if not self.deals_samples:
            return
        framework = framework_named(self.framework)
        if framework.hybrid_context is None:
            able = [name for name in FRAMEWORK_NAMES if framework_named(name).hybrid_context]
            what = (
                f"{framework.title} has no hybrid context parallelism; allowed: {', '.join(able)}"
            )
            raise InputError(what, where="hybrid-cp")
        if self.adapters is not None or self.images is not None:
            what = "is not priced beside adapters and images: train every parameter on text"
            raise InputError(what, where="hybrid-cp")

    def _checked_adapters(self, adapters: AdapterSpec) -> AdapterSpec:
        """As the framework has them. Raises InputError where it has none, or they stand beside nothing."""
        _require_planned("train", adapters.method, self.framework, lambda record: record.adapters)
        setting = framework_named(self.framework).adapters[adapters.method]
        adapters = resolved(self.model, adapters, fused=setting.fused)
        if not adapters.matrices or adapter_counts(self.model, adapters).total == 0:
            raise InputError(
                f"is no matrix of {self.model.name}",
                where="lora_targets",
                value=",".join(adapters.targets),
            )
        return adapters

    def _checked_loss(self) -> str | None:
        """How the loss runs. Raises InputError for what the framework does not have or is not priced."""
        check_model(self.model, self.kind, self.loss)
        if self.loss is None and not self.model.mtp_layers:
            return loss_of_trainer(self.framework, self.kind, self.reference)
        check_loss(self.framework, self.kind, self.loss, self.reference)
        return self.loss

    def _checked_reference(self) -> str | None:
        """Where the reference is. Raises InputError for what the framework does not have or is not priced."""
        is_frozen = self.adapters is not None
        place = checked_reference(self.framework, self.kind, self.reference, is_frozen=is_frozen)
        if STEP_KINDS[self.kind].on_preferences and self.lengths is not None:
            what = "packs are not priced in preference training: give --seq-len, the most of a sequence"
            raise InputError(what, where="lengths")
        return place

    def _with_encoder(self) -> ModelSpec:
        """The model with what a run makes of its image encoder; without one for text alone."""
        if self.images is None:
            return self.model if self.model.vision is None else without_encoder(self.model)
        has_adapters = self.adapters is not None
        return with_images(
            self.model, self.images, self.framework, self.seq_len, has_adapters=has_adapters
        )

    @property
    def layout_pins(self) -> dict[str, int | str]:
        """The pins that bind the layout, not its execution."""
        return {name: pin for name, pin in self.pins.items() if BY_NAME[name].of == "layout"}

    @property
    def places_experts(self) -> bool:
        """Whether prices assume experts where measured loads want them, which no framework's launch does."""
        return self.expert_loads is not None and set(ALLOW_PLACED) <= set(self.allow)

    @property
    def plainest(self) -> Execution:
        """The execution that asks least of the software; none allows more layouts, but for offloading."""
        return self.execution_options.executions()[0]

    def workload(self, execution: Execution | None = None) -> Workload:
        """What the cost model prices, on all GPUs, run as `execution` says or as plainly as can be.

        Parameters
        ----------
        execution
            How it is run; the plainest that the request allows when None.
        """
        settings = {name: getattr(self, name) for name in _OF_WORKLOAD}
        workload = Workload(**settings | {"loss": in_chunks(self.loss)})
        margin = memory_margin(self.memory_risk, peak_memory_band(workload))
        workload = replace(workload, memory_margin=margin)
        return (execution or self.plainest).applied(workload)

    @staticmethod
    def of_inputs(inputs: PlanInputs, **changes: Any) -> PlanRequest:
        """The request that a plan's inputs were written from, with other fields where `changes` says so.

        Raises InputError where they contradict.

        Parameters
        ----------
        inputs
            Of a plan's document.
        **changes
            Fields of the request by name, those that documents say nothing of included.
        """
        fields = {name: getattr(inputs, name) for name in PlanInputs.model_fields}
        return PlanRequest(**{**fields, **changes})

    def inputs(self) -> PlanInputs:
        """The part of the request that decides the plan, as the plan document carries it."""
        values = {name: getattr(self, name) for name in PlanInputs.model_fields}
        return PlanInputs.model_validate(values)


_OF_WORKLOAD = {f.name for f in fields(PlanRequest)} & {f.name for f in fields(Workload)}
"""What a workload takes from a request as it is."""


def _require_planned(
    where: str,
    value: str,
    framework: str,
    of: Callable[[Framework], Mapping[str, Setting]],
    subject: str = "",
) -> None:
    """Raises InputError, with the frameworks that do, where plans of one may not take a value. `subject` says
    what the value is of, where its field does not.
    """
    if value not in planned(of(framework_named(framework))):
        has = [name for name in FRAMEWORK_NAMES if value in planned(of(framework_named(name)))]
        title = framework_named(framework).title
        what = f"{subject}is not planned with {title}; choose --framework {' or '.join(has)}"
        raise InputError(what, where=where, value=value)


def checked_reference(
    framework: str, kind: str, reference: str | None, *, is_frozen: bool
) -> str | None:
    """Where the reference model of a kind of step is.

    Parameters
    ----------
    framework
        Any of `FRAMEWORK_NAMES`.
    kind
        Any of `execution_names.KIND_NAMES`.
    reference
        As was asked, any of `execution_names.REFERENCE_PLACES`; None for what the framework does by itself.
    is_frozen
        Whether adapters are trained beside frozen weights, which then are the reference.

    Returns
    -------
    str or None
        None where a step has no reference of its own.

    Raises
    ------
    InputError
        For a kind or a place that the framework does not have, and for a place without a reference.
    """
    record = framework_named(framework)
    if kind != PRETRAINING:
        _require_planned("kind", kind, framework, lambda record: record.step_kinds)
    scored = STEP_KINDS[kind].reference_passes > 0
    if reference is None:
        return "resident" if scored and not is_frozen else None
    _one_of("reference", reference, REFERENCE_PLACES)
    if not scored:
        what = f"is of kinds with a reference model, and {kind} has none: leave it out"
        raise InputError(what, where="reference", value=reference)
    if is_frozen and reference != "precomputed":
        what = "is of a second model, and the frozen base beside adapters is the reference: leave it out"
        raise InputError(what, where="reference", value=reference)
    places = [
        place
        for place, setting in record.references.items()
        if setting.planned and kind in (setting.kinds or (kind,))
    ]
    what = f"is not planned with {record.title} and {kind}"
    check_choice(reference, places, "reference", what)
    return reference


def with_images(
    model: ModelSpec, images: ImageInput, framework: str, seq_len: int, *, has_adapters: bool
) -> ModelSpec:
    """A model with what a run makes of its image encoder.

    Parameters
    ----------
    model
        With an image encoder.
    images
        What sequences hold.
    framework
        Any of `FRAMEWORK_NAMES`.
    seq_len
        Tokens of a sequence, at least 1.
    has_adapters
        Whether adapters are trained, beside which the encoder is frozen.

    Raises
    ------
    InputError
        A model without an encoder, one that the framework does not run, more tokens than a sequence has, or
        images that do not share theirs evenly.
    """
    where, vision = "image_tokens", model.vision
    if vision is None:
        what = f"{model.name} has no image encoder: give a config.json with vision_config"
        raise InputError(what, where=where, value=images.tokens)
    encoder = f"the image encoder of {model.name} ({vision.kind}) "
    _require_planned(where, vision.kind, framework, lambda record: record.image_encoders, encoder)
    setting = framework_named(framework).image_encoders[vision.kind]
    if not vision.crosses and images.tokens > seq_len:
        what = f"are among the {seq_len} tokens of a sequence: give no more of them"
        raise InputError(what, where=where, value=images.tokens)
    usual = 1 if vision.image_tokens is None else max(images.tokens // vision.image_tokens, 1)
    number = images.per_sequence or usual
    of_image = vision.image_tokens or max(images.tokens // number, 1)
    if images.tokens != number * of_image:
        what = f"must be {number} images of {of_image} tokens each: {number * of_image}"
        raise InputError(what, where=where, value=images.tokens)
    use = EncoderUse(
        tokens=images.tokens,
        images=number,
        trained=not images.frozen and not has_adapters,
        tensor_parallel=setting.tensor_parallel,
        context_parallel=setting.context_parallel,
        recomputed=setting.recomputed,
    )
    return model.model_copy(update={"vision": vision.model_copy(update={"use": use})})


def without_encoder(model: ModelSpec) -> ModelSpec:
    """The language model alone, of a model with an image encoder.

    Parameters
    ----------
    model
        With an image encoder or without.
    """
    source = model.source
    if source is not None and source.endswith(AND_ENCODER):
        source = f"{source.removesuffix(AND_ENCODER)} alone"
    return model.model_copy(update={"vision": None, "source": source})


def check_step_of_adapters(framework: str, optimizer: str) -> None:
    """Raises InputError for an optimizer whose step on adapters has no price.

    Parameters
    ----------
    framework
        Any of `FRAMEWORK_NAMES`.
    optimizer
        Any of `OPTIMIZERS`.
    """
    setting = framework_named(framework).optimizers.get(optimizer)
    if OPTIMIZER_TRAITS[optimizer].orthogonalises or (setting and setting.whole):
        what = (
            "steps whole matrices, which is not priced of adapters: choose another, or train full"
        )
        raise InputError(what, where="optimizer", value=optimizer)


def check_model(model: ModelSpec, kind: str, loss: str | None) -> None:
    """Raises InputError for a model whose steps of a kind, or with a loss, have no price.

    Parameters
    ----------
    model
        As was asked.
    kind
        Any of `execution_names.KIND_NAMES`.
    loss
        Any of `losses.LOSS_NAMES`; None for what the framework does.
    """
    step = STEP_KINDS[kind]
    if model.mtp_layers and not step.has_vocabulary_head:
        what = f"is not priced for {model.name}, which predicts several tokens"
        raise InputError(what, where="kind", value=kind)
    if model.mtp_layers and in_chunks(loss) is not None:
        what = f"{model.name} has multi-token prediction, whose loss is not priced so"
        raise InputError(what, where="loss", value=loss)
    if model.indexer is not None and step.on_preferences:
        what = f"{model.name} chooses the positions it attends to: only pretrain and sft are priced"
        raise InputError(what, where="kind", value=kind)


def loss_of_trainer(framework: str, kind: str, reference: str | None) -> str | None:
    """What the trainer of a kind of step takes by itself in place of all logits; None where it takes them.

    Parameters
    ----------
    framework
        Any of `FRAMEWORK_NAMES`.
    kind
        Any of `step_kinds.KIND_NAMES`.
    reference
        Where its reference model is, by `checked_reference`.
    """
    record = framework_named(framework)
    setting, place = record.step_kinds.get(kind), record.references.get(reference or "")
    # A place that one trainer alone has comes with that trainer.
    if setting is None or (place is not None and place.installs):
        return None
    return setting.loss or None


def check_loss(framework: str, kind: str, loss: str | None, reference: str | None = None) -> None:
    """Raises InputError for a loss that a framework does not have, or that is not of a kind of step.

    Parameters
    ----------
    framework
        Any of `FRAMEWORK_NAMES`.
    kind
        Any of `execution_names.KIND_NAMES`.
    loss
        As was asked; None for what the framework does.
    reference
        Where the reference model of the kind is, by `checked_reference`.
    """
    if loss is None:
        return
    _one_of("loss", loss, LOSS_NAMES)
    step = STEP_KINDS[kind]
    if loss == ALL_LOGITS:
        if not step.has_vocabulary_head:
            what = f"is of a head over the vocabulary, and {kind} has a score: leave it out"
            raise InputError(what, where="loss", value=loss)
        return
    _require_planned("loss", loss, framework, lambda record: record.losses)
    if step.on_preferences and loss != loss_of_trainer(framework, kind, reference):
        what = f"is not what trainers of {kind} take with {framework}: leave it out"
        raise InputError(what, where="loss", value=loss)


def parse_pins(text: str) -> dict[str, int | str]:
    """`tp=8,pp=4,recompute=full` as a mapping. Raises InputError naming the part that cannot be read.

    Parameters
    ----------
    text
        May be empty.
    """
    pins: dict[str, int | str] = {}
    for part in (piece.strip() for piece in text.split(",")):
        if not part:
            continue
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise InputError(f"pin: {shown(part)} is not NAME=VALUE, as in tp=8,pp=4")
        if name in pins:
            raise InputError(f"pin: {name} is given twice; give it once")
        pins[name] = _pin(
            name, int(value) if value.isascii() and value.isdigit() and len(value) < 10 else value
        )
    return pins


def parse_forbids(texts: Iterable[str] | str) -> tuple[str, ...]:
    """Comma-separated names to forbid, checked and without repeats.

    Parameters
    ----------
    texts
        A text such as `cp,full-recompute`, or several.
    """
    return _parsed("forbid", texts, FORBIDS)


def parse_inside_domain(texts: Iterable[str] | str) -> tuple[str, ...]:
    """Comma-separated axes that stay inside a domain, checked and without repeats.

    Parameters
    ----------
    texts
        A text such as `tp,cp`, or several.
    """
    return _parsed("inside_domain", texts, INSIDE_DOMAIN)


def _parsed(name: str, texts: Iterable[str] | str, allowed: Collection[str]) -> tuple[str, ...]:
    words = separate_words(texts, name)
    for word in words:
        _one_of(name, word, allowed)
    return words


def _pin(name: str, value: int | str) -> int | str:
    _one_of("pin", name, PINS)
    choice = BY_NAME[name]
    if choice.words:
        _one_of(f"pin {name}", value, choice.words)
        return value
    low, high = choice.low, choice.high
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"pin {name}: {shown(value)} is not a whole number; give {low} to {high}")
    _within(f"pin {name}", value, low, high, "a whole number")
    return value


def _within(name: str, value: object, low: float, high: float, meaning: str) -> None:
    require_number(name, value)
    if not low <= cast("float", value) <= high:
        raise InputError(
            f"{name}: {shown(value)} is out of range ({meaning}); allowed: {_plain(low)} to {_plain(high)}"
        )


def _plain(number: float) -> str:
    """A limit as a user would type it: 16777216, not 1.67772e+07."""
    return f"{number:.0f}" if number == round(number) else f"{number:g}"


def _one_of(name: str, value: object, allowed: Collection[str]) -> None:
    if value in allowed:
        return
    meant = degree_meant(value) if isinstance(value, str) else None
    near = meant if meant in allowed else near_miss(value, allowed)
    hint = f"; did you mean {near!r}?" if near else ""
    raise InputError(
        f"{name}: {shown(value)} is not known{hint} Allowed: {listed(allowed)}"
        if hint
        else f"{name}: {shown(value)} is not known; allowed: {listed(allowed)}"
    )
