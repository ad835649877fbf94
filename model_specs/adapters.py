"""Low-rank adapters beside frozen weights: which matrices get one, and how many parameters they have.

An adapter of rank r beside a matrix of n outputs and k inputs is a pair of matrices of k by r and r by n:
r (k + n) parameters (LoRA, arXiv 2106.09685, section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field

from meshwright.documents import ClosedDocument, left_out_at
from meshwright.errors import InputError, near_miss, separate_words
from meshwright.model_specs.blocks import LINEAR, LinearAttentionSpec, Mamba1Spec
from meshwright.model_specs.parameters import expert_parameters, of_kinds_apart, parameter_count
from meshwright.model_specs.schema import ModelSpec

MOST_RANK = 8192

AdapterMethod = Literal["lora", "lora-8bit", "qlora", "dora", "dora-8bit", "qdora"]
"""Adapters beside weights of 16 bits, of 8 (LLM.int8(), arXiv 2208.07339) or of 4 (QLoRA, arXiv 2305.14314);
and the same with a magnitude for each output (DoRA, arXiv 2402.09353)."""
EVERY_PARAMETER = "full"
TRAINED = (EVERY_PARAMETER, *get_args(AdapterMethod))
"""Words of `--train`."""
BaseBits = Literal[4, 8, 16]


class _Traits(NamedTuple):
    """What a method is made of."""

    base_bits: BaseBits
    decomposed: bool


_TRAITS: dict[AdapterMethod, _Traits] = {
    "lora": _Traits(16, False),
    "lora-8bit": _Traits(8, False),
    "qlora": _Traits(4, False),
    "dora": _Traits(16, True),
    "dora-8bit": _Traits(8, True),
    "qdora": _Traits(4, True),
}


def adapter_method(base_bits: int, *, decomposed: bool = False) -> AdapterMethod:
    """The word for adapters beside weights of so many bits.

    Parameters
    ----------
    base_bits : int
        Of a frozen weight: 4, 8 or 16.
    decomposed : bool
        Whether each output has a magnitude of its own, as DoRA has it.

    Returns
    -------
    AdapterMethod
        One of `TRAINED`, `full` left out.
    """
    return next(word for word, traits in _TRAITS.items() if traits == (base_bits, decomposed))


NF4, SINGLE_SCALES = "bitsandbytes 4-bit", " without double quantisation"
_INT8 = "bitsandbytes 8-bit"
_DEQUANTISED = {
    "fp8": "load it with FineGrainedFP8Config(dequantize=True)",
    "mxfp8": "load it with FineGrainedFP8Config(dequantize=True)",
    "mxfp4": "load it with Mxfp4Config(dequantize=True)",
    "compressed-tensors": "load it with CompressedTensorsConfig(dequantize=True)",
    "bitsandbytes": "call dequantize() of the loaded model",
}
"""How transformers 5.23 makes 16 bits of them, by method: utils/quantization_config.py, modeling_utils.py."""


def stored_weights_note(stored: str, base_bits: int | None = None) -> str | None:
    """What it means for training that a checkpoint keeps its weights in few bits.

    Parameters
    ----------
    stored : str
        `ModelSpec.stored_as`.
    base_bits : int or None
        Of a weight in training: 16, or 8 and 4 where it is frozen; None where that is not yet asked.

    Returns
    -------
    str or None
        One line, without a full stop; None where training holds what the checkpoint keeps.
    """
    keeps = f"the checkpoint keeps its weights as {stored}"
    keeping, bits = ("lora-8bit", 8) if stored == _INT8 else ("qlora", 4)
    if stored == _INT8 or stored.startswith(NF4):
        if base_bits == bits:
            priced = (
                f"{keeps}, with scales of 32 bits: those of a plan are quantised once more, to 8"
            )
            return priced if stored.endswith(SINGLE_SCALES) else None
        if base_bits is None:
            return f"{keeps}, and so does --train {keeping}; other training dequantises them"
    holder = "training" if base_bits is None else "this plan"
    width = f"{base_bits} bits of bitsandbytes" if base_bits in (4, 8) else "16 bits"
    way = _DEQUANTISED.get(stored.split(maxsplit=1)[0])
    if way is None:
        return f"{keeps}, {holder} at {width}: start from the model's checkpoint of 16 bits"
    return (
        f"{keeps}, {holder} at {width}: {way}{' and save it first' if base_bits in (4, 8) else ''}"
    )


ALL_LINEAR = "all-linear"
"""Every matrix of a layer; the framework says which these are (`resolved`)."""
EXPERTS = "experts"
"""The matrices of routed experts, adapters for each expert."""
ROUTER = "router"
NO_MATRIX = "none"
"""In place of the matrices of disabled adapters."""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_GATES = "g_proj"
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_FUSED = ("qkv_proj", "gate_up_proj")
"""One matrix, and so one adapter, in place of two or three."""
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_INDEXER = ("wq_b", "wk", "weights_proj")
LATENT_DOWN, LATENT_UP = _AROUND_EXPERTS = ("fc1_latent_proj", "fc2_latent_proj")
"""Projections around routed experts, of which a layer has one pair."""
INPUTS_ACROSS, INPUTS_GATE, INPUTS_BACK = _LAYER_INPUTS = (
    "per_layer_model_projection", "per_layer_input_gate", "per_layer_projection",
)  # fmt: skip
"""Of what layers read beside their input: the first for all layers at once, two of each."""
_MIXERS = (
    "in_proj", "in_proj_ba", "in_proj_z", "in_proj_b", "in_proj_a", "x_proj", "dt_proj", "out_proj",
)  # fmt: skip
"""Of Mamba and of linear attention."""
_MEGATRON = {
    "linear_qkv": ("qkv_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_up_proj", EXPERTS),
    "linear_fc2": ("down_proj", EXPERTS),
}
"""Names of Megatron-Bridge's modules (megatron/bridge/peft/lora.py, LoRA.target_modules)."""
_PARTS = {"qkv_proj": _ATTENTION[:3], "gate_up_proj": _FEED_FORWARD[:2]}
TARGETS = (
    ALL_LINEAR,
    *_ATTENTION,
    _HEAD_GATES,
    *_LATENT,
    *_INDEXER,
    *_FUSED,
    *_FEED_FORWARD,
    *_MIXERS,
    *_AROUND_EXPERTS,
    *_LAYER_INPUTS,
    EXPERTS,
    *_MEGATRON,
)
"""Words of `--lora-targets`."""

_NF4_BYTES, _INT8_BYTES, _INT8_SCALE_BYTES = 0.5 + 1.0 / 64.0 + 4.0 / (64.0 * 256.0), 1.0, 4.0
"""Of a weight at 4 bits: a scale of 8 bits for each block of 64, and one of 32 bits for 256 of those (QLoRA,
arXiv 2305.14314, section 3, double quantisation). At 8 bits: itself, and a scale of 32 bits for each output
(bitsandbytes, nn/modules.py, Int8Params: CB and SCB)."""


class AdapterSpec(ClosedDocument):
    """What is trained in place of the model's own parameters."""

    method: AdapterMethod = "lora"
    rank: Annotated[int, Field(ge=1, le=MOST_RANK, strict=True)] = 16
    """Width of the pair of matrices, r."""
    targets: Annotated[tuple[str, ...], Field(min_length=1, max_length=len(TARGETS))] = (
        ALL_LINEAR,
    )
    """Matrices that get an adapter, words of `TARGETS`."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = left_out_at(0.0)
    """Share of an adapter's input that is dropped."""
    wide: bool = left_out_at(False)
    """Whether adapters beside weights of 16 bits multiply at 32: PEFT keeps them so (`autocast_adapter_dtype`
    of `get_peft_model`), and a script that asks for no mixed precision narrows nothing."""
    wide_stream: bool = left_out_at(False)
    """Whether norms beside weights of 4 bits have 32 bits, and so what they return and the sums of residuals
    (`prepare_model_for_kbit_training` of PEFT)."""

    matrices: Annotated[tuple[str, ...], Field(max_length=len(TARGETS) + 1)] = ()
    """What the targets stand for in the framework; taken as they are where this is empty."""

    @property
    def base_bits(self) -> BaseBits:
        """Bits of a frozen weight of a matrix."""
        return _TRAITS[self.method].base_bits

    @property
    def decomposed(self) -> bool:
        """Whether each output of an adapted matrix has a magnitude that is trained too."""
        return _TRAITS[self.method].decomposed

    @property
    def widens_stream(self) -> bool:
        """Whether residuals have 32 bits."""
        return self.wide_stream and self.base_bits == 4

    def disabled(self) -> AdapterSpec:
        """The same frozen weights without an adapter beside any of them.

        Returns
        -------
        AdapterSpec
            Its `matrices` name none of any model.
        """
        return self.model_copy(update={"matrices": (NO_MATRIX,)})

    def has(self, name: str) -> bool:
        """Whether a matrix gets an adapter.

        Parameters
        ----------
        name : str
            A word of `TARGETS` but `all-linear`, or `router`.

        Returns
        -------
        bool
            Whether it is named, or one of Megatron's names stands for it.
        """
        return name in (self.matrices or _expanded(self.targets))


@lru_cache(maxsize=256)
def _expanded(targets: tuple[str, ...]) -> frozenset[str]:
    """Names of matrices for the words that were given."""
    names = {name for word in targets for name in _MEGATRON.get(word, (word,))}
    if ALL_LINEAR in names:
        names |= {*_ATTENTION, *_LATENT, *_INDEXER, *_FEED_FORWARD, *_MIXERS, *_AROUND_EXPERTS}
        names |= {_HEAD_GATES, *_LAYER_INPUTS}
    return frozenset(names)


def peft_modules(adapters: AdapterSpec) -> str | list[str]:
    """The targets as PEFT's LoraConfig takes them: names of modules, or one word for all of them.

    Parameters
    ----------
    adapters : AdapterSpec
        Without routed experts.

    Returns
    -------
    str or list of str
        `all-linear`, or names in the order of `TARGETS`.
    """
    names = _expanded(adapters.targets)
    return ALL_LINEAR if ALL_LINEAR in names else [name for name in TARGETS if name in names]


def read_adapters(
    train: str, rank: int | None = None, targets: Iterable[str] | str | None = None
) -> AdapterSpec | None:
    """What is trained, as a user says it.

    Parameters
    ----------
    train : str
        One of `TRAINED`.
    rank : int, optional
        Width of the adapters, 1 to 8192; 16 by default.
    targets : str or several, optional
        Words of `TARGETS`, such as `q_proj,v_proj`; `all-linear` by default.

    Returns
    -------
    AdapterSpec or None
        None where every parameter is trained.

    Raises
    ------
    InputError
        For another word or number, and for adapters where every parameter is trained.
    """
    if train not in TRAINED:
        near = near_miss(train, TRAINED)
        raise InputError(
            "is not known", where="train", value=train, allowed=TRAINED, did_you_mean=near
        )
    if train == EVERY_PARAMETER:
        for name, value in (("lora_rank", rank), ("lora_targets", targets)):
            if value is not None:
                raise InputError(
                    "is of adapters: train lora or one of its kind, or leave it out",
                    where=name,
                    value=value,
                )
        return None
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
        raise InputError("must be a whole number", where="lora_rank", value=rank)
    if rank is not None and not 1 <= rank <= MOST_RANK:
        raise InputError(f"must be 1 to {MOST_RANK}", where="lora_rank", value=rank)
    fields: dict[str, Any] = {} if rank is None else {"rank": rank}
    if targets is not None:
        fields["targets"] = _read_targets(targets)
    return AdapterSpec.model_validate({"method": train, **fields})


def _read_targets(texts: Iterable[str] | str) -> tuple[str, ...]:
    """Comma-separated names of matrices, checked and without repeats."""
    words = separate_words(texts, "lora_targets")
    for word in words or ("",):
        if word not in TARGETS:
            raise InputError(
                "is no matrix of a layer", where="lora_targets", value=word, allowed=TARGETS
            )
    return words


class Matrix(NamedTuple):
    """A matrix of a layer: its name, and its width each way."""

    name: str
    inputs: int
    outputs: int


Matrices = tuple[Matrix, ...]


def _attention_matrices(model: ModelSpec) -> Matrices:
    """Of one layer that attends with softmax."""
    queries, hidden, mla = model.heads * model.qk_head_dim, model.hidden, model.attention
    output = Matrix("o_proj", model.heads * model.v_head_dim, hidden)
    gates: Matrices = ()
    if model.attention_head_gates:
        gates = (Matrix(_HEAD_GATES, hidden, model.heads),)
    if mla is None:
        widths = [queries * (2 if model.attention_output_gate else 1)]
        if not model.reuses:
            widths.append(model.kv_heads * model.qk_head_dim)
        if not (model.reuses or model.values_are_keys):
            widths.append(model.kv_heads * model.v_head_dim)
        apart = [
            Matrix(name, hidden, width) for name, width in zip(_ATTENTION[:3], widths, strict=False)
        ]
        return Matrix("qkv_proj", hidden, sum(widths)), *apart, *gates, output
    keys_and_values = model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    down = Matrix("kv_a_proj_with_mqa", hidden, mla.kv_lora_rank + mla.qk_rope_head_dim)
    indexer: Matrices = ()
    if mla.indexer is not None and not model.reuses:
        indexer = (
            Matrix("wq_b", mla.q_lora_rank or hidden, mla.indexer.width),
            Matrix("wk", hidden, mla.indexer.head_dim),
            Matrix("weights_proj", hidden, mla.indexer.heads),
        )
    up = Matrix("kv_b_proj", mla.kv_lora_rank, keys_and_values)
    if mla.q_lora_rank is None:
        return Matrix("q_proj", hidden, queries), down, up, *gates, output, *indexer
    latent = Matrix("q_a_proj", hidden, mla.q_lora_rank)
    of_queries = Matrix("q_b_proj", mla.q_lora_rank, queries)
    return latent, of_queries, down, up, *gates, output, *indexer


def _feed_forward_matrices(model: ModelSpec, width: int, outside: int | None = None) -> Matrices:
    """Of one feed-forward, gate and up once as one matrix and once apart; `outside` stands for h."""
    hidden = model.hidden if outside is None else outside
    down, up = Matrix("down_proj", width, hidden), Matrix("up_proj", hidden, width)
    if not model.gated:
        return Matrix("gate_up_proj", hidden, width), up, down
    gate = Matrix("gate_proj", hidden, width)
    return Matrix("gate_up_proj", hidden, 2 * width), gate, up, down


def _layer_inputs(model: ModelSpec) -> tuple[Matrices, Matrices]:
    """Of what layers read beside their input: the matrix for all layers, and those of one; or none."""
    hidden, width = model.hidden, model.layer_inputs
    if width is None:
        return (), ()
    of_layer = Matrix(INPUTS_GATE, hidden, width), Matrix(INPUTS_BACK, width, hidden)
    return (Matrix(INPUTS_ACROSS, hidden, model.layers * width),), of_layer


def _latent_projections(model: ModelSpec) -> Matrices:
    """The pair around the routed experts of one layer; none where these read the hidden width."""
    hidden, latent = model.hidden, model.latent_size
    if latent is None:
        return ()
    return Matrix(LATENT_DOWN, hidden, latent), Matrix(LATENT_UP, latent, hidden)


def _mixer_matrices(model: ModelSpec) -> tuple[Matrices, Matrices]:
    """Of one layer with linear attention, and of one with Mamba."""
    hidden, linear, mamba = model.hidden, model.linear_attention, model.state_space
    of_linear: Matrices = ()
    of_mamba: Matrices = ()
    if linear is not None and linear.type == "short_conv":
        of_linear = (
            Matrix("in_proj", hidden, linear.projected_width),
            Matrix("out_proj", linear.value_width, hidden),
        )
    elif linear is not None and linear.type != "gated_delta_net":
        of_linear = _other_linear_matrices(hidden, linear)
    elif linear is not None:
        steps = 2 * linear.value_heads
        projected = linear.projected_width - steps
        of_inputs: Matrices = (
            Matrix("in_proj", hidden, projected),
            Matrix("in_proj_ba", hidden, steps),
        )
        if linear.own_gates:
            of_inputs = (
                Matrix("in_proj", hidden, projected - linear.value_width),
                Matrix("in_proj_z", hidden, linear.value_width),
                Matrix("in_proj_b", hidden, linear.value_heads),
                Matrix("in_proj_a", hidden, linear.value_heads),
            )
        of_linear = (*of_inputs, Matrix("out_proj", linear.value_width, hidden))
    if mamba is not None:
        of_mamba = (
            Matrix("in_proj", hidden, mamba.projected_width),
            Matrix("out_proj", mamba.width, hidden),
        )
    if isinstance(mamba, Mamba1Spec):
        of_mamba = (
            *of_mamba,
            Matrix("x_proj", mamba.channels, mamba.selected_width),
            Matrix("dt_proj", mamba.step_rank, mamba.channels),
        )
    return of_linear, of_mamba


def _other_linear_matrices(hidden: int, linear: LinearAttentionSpec) -> Matrices:
    """Of one layer with Kimi Delta Attention or lightning attention, by names of no target.

    transformers 5.23, models/kimi_linear and models/minimax.
    """
    keys, values, rank = linear.key_width, linear.value_width, linear.gate_rank
    output = Matrix("linear_o_proj", values, hidden)
    if linear.type == "lightning":
        inputs = Matrix("linear_qkv_proj", hidden, 2 * keys + values)
        return inputs, Matrix("output_gate", hidden, values), output
    gates: Matrices = (
        Matrix("f_proj", hidden, keys),
        Matrix("output_gate", hidden, values),
    )
    if rank is not None:
        gates = (
            Matrix("f_a_proj", hidden, rank),
            Matrix("f_b_proj", rank, keys),
            Matrix("g_a_proj", hidden, rank),
            Matrix("g_b_proj", rank, values),
        )
    return (
        Matrix("linear_q_proj", hidden, keys),
        Matrix("linear_k_proj", hidden, keys),
        Matrix("linear_v_proj", hidden, values),
        Matrix("b_proj", hidden, linear.value_heads),
        *gates,
        output,
    )


def layer_matrices(model: ModelSpec) -> Matrices:
    """Every matrix that a layer of the model may have beside routers and routed experts.

    Parameters
    ----------
    model : ModelSpec
        Its widths are used.

    Returns
    -------
    tuple of Matrix
        Those that some models keep as one stand whole and in parts.
    """
    of_linear, of_mamba = _mixer_matrices(model)
    attention = _attention_matrices(model)
    shared = 0 if model.moe is None else model.moe.shared_width
    for kind in model.kinds_apart.values():
        attention += _attention_matrices(kind)
    widths = [width for width in (model.ffn_hidden, model.reusing_ffn_hidden, shared) if width]
    blocks = [matrix for width in widths for matrix in _feed_forward_matrices(model, width)]
    across, inputs = _layer_inputs(model)
    beside = *across, *inputs, *_latent_projections(model)
    return (*attention, *of_linear, *of_mamba, *blocks, *beside)


@lru_cache(maxsize=256)
def with_layers_ahead(model: ModelSpec, adapters: AdapterSpec) -> ModelSpec:
    """The model as adapters train it: layers ahead of the first that has one run forward alone.

    Nothing ahead of it has a gradient, so that autograd keeps nothing there and no backward pass reaches it
    (PyTorch, autograd mechanics, "Setting requires_grad").

    Parameters
    ----------
    model : ModelSpec
        Its layers are looked at, in their order.
    adapters : AdapterSpec
        Its targets.

    Returns
    -------
    ModelSpec
        The model itself where its first layer has an adapter, or none of them has.
    """
    attention, (linear, mamba) = _attention_matrices(model), _mixer_matrices(model)
    moe, mixers = model.moe, {"M": mamba, "*": attention}
    beside_all = () if model.hybrid_pattern is not None else mamba
    names_of: dict[str, set[str]] = {}
    for symbols in dict.fromkeys(model.symbols):
        of_mixer = mixers.get(symbols, linear if symbols[0] == LINEAR else attention)
        width, names = model.ffn_hidden, set[str]()
        if symbols[-1] == "E" and moe is not None:
            width = moe.shared_width
            names = {EXPERTS, ROUTER, *(matrix.name for matrix in _latent_projections(model))}
        if symbols[-1] in "-E" and width:
            names |= {matrix.name for matrix in _feed_forward_matrices(model, width)}
        if symbols not in ("-", "E"):
            names |= {matrix.name for matrix in (*of_mixer, *beside_all)}
        names_of[symbols] = names
    adapted = [any(map(adapters.has, names_of[symbols])) for symbols in model.symbols]
    ahead = adapted.index(True) if any(adapted) else 0
    return model.with_layers_ahead(ahead) if ahead else model


class CountedMatrix(NamedTuple):
    """A matrix, and how often the model has it."""

    matrix: Matrix
    number: int
    expert: bool = False
    """Whether it is one of a routed expert."""


@lru_cache(maxsize=256)
def counted_matrices(model: ModelSpec, *, fused: bool) -> tuple[CountedMatrix, ...]:
    """Every matrix of the model's layers, multi-token-prediction modules and routers, each once.

    Queries, keys and values stand apart. Token tables, heads and the join of a prediction module are left
    out.

    Parameters
    ----------
    model : ModelSpec
        Its widths and layers are used.
    fused : bool
        Whether gate and up projection are one tensor, of Megatron's linear_fc1, or two.

    Returns
    -------
    tuple of CountedMatrix
        None twice; numbers are at least 1.
    """
    moe = model.moe
    skipped = (*_FEED_FORWARD[:2], "qkv_proj") if fused else _FUSED

    def separate(matrices: Matrices) -> list[Matrix]:
        return [matrix for matrix in matrices if matrix.name not in skipped]

    of_layers, with_experts, beside = _layer_groups(model, modules=True)
    counted = [
        CountedMatrix(matrix, number)
        for number, matrices in of_layers
        if number > 0
        for matrix in separate(matrices)
    ]
    if moe is None:
        return tuple(counted)
    counted.append(CountedMatrix(Matrix(ROUTER, model.hidden, moe.experts), with_experts))
    counted += [CountedMatrix(matrix, with_experts) for matrix in separate(beside)]
    of_expert = separate(_feed_forward_matrices(model, moe.moe_ffn_hidden, model.routed_width))
    routed = with_experts * moe.experts
    return (*counted, *(CountedMatrix(matrix, routed, expert=True) for matrix in of_expert))


class _LayerGroups(NamedTuple):
    """Matrices of layers that are alike, and how many layers have them."""

    of_layers: list[tuple[int, Matrices]]
    """All but those beside experts; what some models keep as one stands whole and in parts."""
    with_experts: int
    """Layers with experts."""
    beside_experts: Matrices
    """Of one of these: projections around routed experts, and shared experts."""


def _layer_groups(model: ModelSpec, *, modules: bool) -> _LayerGroups:
    """The matrices of a model's layers, those of multi-token prediction as well where `modules` says so."""
    moe, pattern = model.moe, model.hybrid_pattern
    linear, mamba = _mixer_matrices(model)
    further = modules * model.mtp_weights
    attending, _, dense, with_experts = (further * round(n) for n in model.mtp_kind.blocks)
    dense += model.layers - len(model.expert_layers) if pattern is None else pattern.count("-")
    with_experts += len(model.expert_layers)
    letters = model.attention_letters
    kinds = [(letters.count(letter), kind) for letter, kind in model.kinds_apart.items()]
    plain = model.layers - model.linear_layers - sum(number for number, _ in kinds)
    attending += plain if pattern is None else pattern.count("*")
    groups = [
        (attending, _attention_matrices(model)),
        (model.linear_layers, linear),
        (model.mamba_layers, mamba),
    ]
    groups += [(number, _attention_matrices(kind)) for number, kind in kinds]
    if model.ffn_hidden:
        wide = sum(number for number, kind in kinds if kind.ffn_hidden != model.ffn_hidden)
        groups.append((dense - wide, _feed_forward_matrices(model, model.ffn_hidden)))
        groups.append((wide, _feed_forward_matrices(model, model.widest_feed_forward)))
    groups += zip((1, model.layers), _layer_inputs(model), strict=True)
    beside = _latent_projections(model)
    if moe is not None and moe.shared_width:
        beside += _feed_forward_matrices(model, moe.shared_width)
    return _LayerGroups(groups, with_experts, beside)


def resolved(model: ModelSpec, adapters: AdapterSpec, *, fused: bool) -> AdapterSpec:
    """The adapters with the matrices that their targets stand for in a framework.

    PEFT takes gate, up and down projection of a model with experts for those of its routed experts. Their
    gate and up projection share a tensor, and so an adapter of twice the rank. Dense layers and shared
    experts have none then; under `all-linear` the router has one (peft 0.21, utils/
    transformers_weight_conversion.py, _convert_peft_config_moe). Megatron-Bridge has one adapter for queries,
    keys and values, another for gate and up projection, and finds experts by the same names
    (megatron/bridge/peft/lora.py).

    Parameters
    ----------
    model : ModelSpec
        Whose matrices are named.
    adapters : AdapterSpec
        As they were asked for.
    fused : bool
        Whether the framework is Megatron-Bridge.

    Returns
    -------
    AdapterSpec
        Its `matrices` are filled in; it may have none that the model has.

    Raises
    ------
    InputError
        Where PEFT would refuse them, as it does DoRA beside experts (peft 0.21, tuners/lora/layer.py,
        ParamWrapper).
    """
    linear = model.linear_attention
    if linear is not None and linear.type in ("kda", "lightning"):
        raise InputError(
            f"adapters beside {linear.title} have no price: train every parameter (full)",
            where="train",
            value=adapters.method,
        )
    have = {matrix.name for matrix in layer_matrices(model)} | {EXPERTS}
    names, moe = {*_expanded(adapters.targets)} & have, model.moe
    if fused:
        for combined, parts in _PARTS.items():
            present = set(parts) & have
            if present and names.issuperset(present):
                names = (names - present) | {combined}
        if moe is not None and ALL_LINEAR in adapters.targets:
            names |= {EXPERTS}
    elif moe is not None and _converts_experts(model) and names & {*_FEED_FORWARD}:
        if not names.issuperset({*_FEED_FORWARD} & have):
            raise InputError(
                "PEFT adapts gate, up and down projection of experts together: name all of them or none",
                where="lora_targets",
                value=",".join(adapters.targets),
            )
        if adapters.decomposed:
            raise InputError(
                "names experts, beside which PEFT has no DoRA: leave gate_proj, up_proj and down_proj out",
                where="lora_targets",
                value=",".join(adapters.targets),
            )
        names = (names - {*_FEED_FORWARD}) | {EXPERTS}
        names |= {ROUTER} if ALL_LINEAR in adapters.targets else set()
    elif moe is not None and moe.router_scales and ALL_LINEAR in adapters.targets:
        # PEFT has no conversion for these experts, one tensor each, and takes the router's linear layer.
        names |= {ROUTER}
    in_order = tuple(name for name in (*TARGETS, ROUTER) if name in names)
    return adapters.model_copy(update={"matrices": in_order})


def _converts_experts(model: ModelSpec) -> bool:
    """Whether PEFT knows the model's experts: not those of gpt-oss, Gemma 4, A.X K1, MiMo-V2, Step 3.5 and
    Laguna, nor beside Mamba."""
    if model.moe is None or model.state_space is not None:
        return False
    if model.value_head_dim is not None or model.attention_head_gates:
        return False
    return not (model.moe.expert_bias or model.moe.router_scales or model.moe.output_norm)


def expert_adapters(model: ModelSpec, adapters: AdapterSpec) -> tuple[tuple[int, int, int], ...]:
    """Rank, inputs and outputs of each adapter beside one routed expert.

    Parameters
    ----------
    model : ModelSpec
        With experts.
    adapters : AdapterSpec
        With `matrices` as `resolved` fills them in.

    Returns
    -------
    tuple of (int, int, int)
        None where experts have no adapter.
    """
    if model.moe is None or not adapters.has(EXPERTS):
        return ()
    outside, width, rank = model.routed_width, model.moe.moe_ffn_hidden, adapters.rank
    down = (rank, width, outside)
    if not model.gated:
        return (rank, outside, width), down
    both = rank if adapters.has("gate_up_proj") else 2 * rank
    return (both, outside, 2 * width), down


@lru_cache(maxsize=256)
def adapted_matrices(model: ModelSpec, adapters: AdapterSpec) -> frozenset[str]:
    """Names of the matrices of a model that have an adapter, routed experts left out.

    Parameters
    ----------
    model : ModelSpec
        Its layers are looked at.
    adapters : AdapterSpec
        Its targets.

    Returns
    -------
    frozenset of str
        Words of `TARGETS`.
    """
    return frozenset(m.name for m in layer_matrices(model) if adapters.has(m.name))


def _parameters(adapters: AdapterSpec, matrices: Matrices) -> int:
    """Of the adapters beside matrices: r (k + n), and n magnitudes of DoRA."""
    adapted = [matrix for matrix in matrices if adapters.has(matrix.name)]
    pairs = adapters.rank * sum(matrix.inputs + matrix.outputs for matrix in adapted)
    return pairs + adapters.decomposed * sum(matrix.outputs for matrix in adapted)


class AdaptedOutputs(NamedTuple):
    """Outputs of the adapted matrices of one block of each kind, added up."""

    attention: int
    mamba: int
    feed_forward: int
    beside_experts: int
    """Of shared experts, and of the projections around routed ones."""


@lru_cache(maxsize=256)
def adapted_outputs_of_blocks(model: ModelSpec, adapters: AdapterSpec) -> AdaptedOutputs:
    """How wide the outputs are of the matrices that have an adapter.

    Parameters
    ----------
    model : ModelSpec
        Its widths are used; where layers with linear attention stand beside others, the mean of both.
    adapters : AdapterSpec
        Its targets.

    Returns
    -------
    AdaptedOutputs
        Elements a token, at least 0.
    """

    def outputs(matrices: Matrices) -> int:
        return sum(matrix.outputs for matrix in matrices if adapters.has(matrix.name))

    linear, mamba = (outputs(each) for each in _mixer_matrices(model))
    attention = outputs(_attention_matrices(model))
    if model.linear_layers:
        softmax = model.layers - model.linear_layers
        attention = (softmax * attention + model.linear_layers * linear) // model.layers
    if model.kinds_apart:
        apart = of_kinds_apart(model, lambda kind: outputs(_attention_matrices(kind)))
        attention += apart // model.layers
    shared = 0 if model.moe is None else model.moe.shared_width
    blocks = (model.ffn_hidden, shared)
    dense, of_shared = (outputs(_feed_forward_matrices(model, n)) if n else 0 for n in blocks)
    return AdaptedOutputs(attention, mamba, dense, of_shared + outputs(_latent_projections(model)))


class AdapterCounts(NamedTuple):
    """Parameters of the adapters of a whole model."""

    dense: int
    """Beside attention, feed-forward, shared experts, mixers and the projections around routed experts."""
    experts: int
    """Beside routed experts."""

    @property
    def total(self) -> int:
        """All that is trained."""
        return self.dense + self.experts


def adapter_counts(model: ModelSpec, adapters: AdapterSpec) -> AdapterCounts:
    """Parameters of the adapters of all layers: r (k + n) beside each matrix, and n more under DoRA.

    Source: LoRA, arXiv 2106.09685, section 4.1; DoRA, arXiv 2402.09353, equation 5, and peft 0.21,
    tuners/lora/dora.py, DoraLinearLayer.update_layer. Multi-token-prediction modules have none.

    Parameters
    ----------
    model : ModelSpec
        Its widths and layers are used.
    adapters : AdapterSpec
        Rank and targets.

    Returns
    -------
    AdapterCounts
        At least 0; 0 where no target is a matrix of the model.
    """
    moe, (of_layers, with_experts, matrices) = model.moe, _layer_groups(model, modules=False)
    dense = sum(number * _parameters(adapters, each) for number, each in of_layers)
    if moe is None:
        return AdapterCounts(dense, 0)
    beside = _parameters(adapters, matrices)
    if adapters.has(ROUTER):
        beside += adapters.rank * (model.hidden + moe.experts)
    if moe.shared_width and moe.shared_expert_gate and ALL_LINEAR in adapters.targets:
        beside += adapters.rank * (model.hidden + 1)
    of_expert = expert_adapters(model, adapters)
    experts = sum(rank * (inputs + outputs) for rank, inputs, outputs in of_expert)
    return AdapterCounts(dense + with_experts * beside, with_experts * moe.experts * experts)


class FrozenParameters(NamedTuple):
    """What holds of a frozen parameter of the model in the mean: of dense ones, and of routed experts."""

    trained: tuple[float, float]
    """Parameters of adapters beside it."""
    weight_bytes: tuple[float, float]
    """That it takes in HBM."""


@lru_cache(maxsize=256)
def frozen_parameters(model: ModelSpec, adapters: AdapterSpec) -> FrozenParameters:
    """Adapters beside a frozen parameter, and its bytes.

    Beside weights of 4 or 8 bits the matrices of layers have so many, and token tables, head and norms 16:
    linear layers alone are replaced (QLoRA, arXiv 2305.14314, section 3; transformers,
    integrations/bitsandbytes.py, replace_with_bnb_linear).

    Parameters
    ----------
    model : ModelSpec
        The frozen model.
    adapters : AdapterSpec
        Method, rank and targets.

    Returns
    -------
    FrozenParameters
        Each the mean over all dense parameters, and over all of routed experts.
    """
    counts, moe = adapter_counts(model, adapters), model.moe
    with_experts = len(model.expert_layers)
    experts = 0 if moe is None else with_experts * moe.experts * expert_parameters(model)
    dense = parameter_count(model) - experts
    trained = (counts.dense / dense, counts.experts / experts if experts else 0.0)
    if adapters.base_bits == 16:
        return FrozenParameters(trained, (2.0, 2.0))
    matrices = _dense_matrices(model)
    of_dense = of_expert = _NF4_BYTES
    if adapters.base_bits == 8:
        of_dense, of_expert = (_eight_bit_bytes(model, expert=expert) for expert in (False, True))
    dense_bytes = (of_dense * matrices + 2.0 * (dense - matrices)) / dense
    return FrozenParameters(trained, (dense_bytes, of_expert))


def _eight_bit_bytes(model: ModelSpec, *, expert: bool) -> float:
    """Of a weight with its share of the scales of its matrix, in the mean."""
    counted = [
        (each.matrix, each.number)
        for each in counted_matrices(model, fused=False)
        if each.expert == expert and each.matrix.name != ROUTER
    ]
    weights = sum(number * matrix.inputs * matrix.outputs for matrix, number in counted)
    scales = sum(number * matrix.outputs for matrix, number in counted)
    return _INT8_BYTES + _INT8_SCALE_BYTES * (scales / weights if weights else 0.0)


def _dense_matrices(model: ModelSpec) -> int:
    """Elements of the matrices of all layers but routers and routed experts."""
    of_layers, with_experts, beside = _layer_groups(model, modules=False)
    return sum(
        number * matrix.inputs * matrix.outputs
        for number, matrices in (*of_layers, (with_experts, beside))
        for matrix in matrices
        if matrix.name not in _FUSED
    )
