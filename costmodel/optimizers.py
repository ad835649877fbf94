"""What optimizers keep of each parameter, and what their step takes: bytes and seconds.

Adam and its kin work element by element: their step is paced by HBM. Muon orthogonalises the momentum of
every matrix with a Newton-Schulz iteration, which is matrix products (Jordan et al. 2024,
kellerjordan.github.io/posts/muon; arXiv 2502.16982, section 2.1). It takes whole matrices: Megatron deals
them out to the data-parallel ranks one by one, DeepSpeed cuts them from a flat buffer, and PyTorch's own
works on the shards of FSDP2 and communicates in every iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.costmodel.collectives import all_reduce_s, ring_pass_s
from meshwright.costmodel.kernels import Rates, gemm_s
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import Floats, Ints, Layout
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.frameworks.record import OptimizerSetting
from meshwright.model_specs.adapters import (
    LATENT_DOWN,
    LATENT_UP,
    CountedMatrix,
    Matrix,
    counted_matrices,
)
from meshwright.model_specs.parameters import (
    embedding_parameters,
    expert_parameters,
    parameter_count,
)
from meshwright.model_specs.schema import ModelSpec

FP32_BYTES = 4.0
"""Of a master weight, and of a state that is kept in 32 bits."""
_FUSED_BYTES = 14.0
"""Of a parameter that one kernel updates: fp32 weight and gradient read, both weights written."""
_MUON_BYTES = 70.0
"""Of a parameter of a matrix, beside its momentum, one PyTorch operator at a time: weight decay 8, the
gradient into the momentum 4, norm and division 12, to 16 bits and back 12, two scalings 16, the update 12,
the 16-bit weight 6 (Emerging-Optimizers, orthogonalized_optimizer.py, `step`, and muon_utils.py)."""
_ADAFACTOR_BYTES = 78.0
"""Of a parameter, one operator at a time (transformers, optimization.py, Adafactor.step): the gradient's
square 16, its means over rows and columns 8, their product 4 and with the gradient 12, its norm and the
weight's 8, two scalings 16, the update 12, the 16-bit weight 2."""


@dataclass(frozen=True, kw_only=True)
class OptimizerTraits:
    """What one optimizer keeps and moves."""

    moments: int
    """Numbers that it keeps of each parameter."""
    step_bytes: float = _FUSED_BYTES
    """Read and written of a parameter in a step, beside its moments, which are read and written once."""
    narrow: bool = False
    """Whether moments have 8 bits, with an fp32 maximum for each block (`BLOCK`)."""
    factored: bool = False
    """Whether a matrix has a number for each row and each column in place of its second moment (Shazeer and
    Stern 2018, arXiv 1804.04235, section 3)."""
    paged: bool = False
    """Whether moments lie in unified memory, which moves to the host where HBM runs short."""
    orthogonalises: bool = False
    """Whether the momentum of a matrix goes through a Newton-Schulz iteration."""
    beside: str = ""
    """The optimizer of what is no matrix of a layer: token tables, heads, norms, biases. Empty for itself."""


OPTIMIZER_TRAITS: Mapping[str, OptimizerTraits] = {
    "adam": OptimizerTraits(moments=2),
    "sgd": OptimizerTraits(moments=1),
    "lion": OptimizerTraits(moments=1),
    "muon": OptimizerTraits(moments=1, step_bytes=_MUON_BYTES, orthogonalises=True, beside="adam"),
    "adafactor": OptimizerTraits(moments=0, step_bytes=_ADAFACTOR_BYTES, factored=True),
    "adam-8bit": OptimizerTraits(moments=2, narrow=True),
    "paged-adam": OptimizerTraits(moments=2, paged=True),
    "paged-adam-8bit": OptimizerTraits(moments=2, narrow=True, paged=True),
}
"""By the names of `execution_names.OPTIMIZERS`. SGD keeps a momentum, Lion its only moment (arXiv 2302.06675,
program 1)."""

BLOCK = 256
"""Values of a state of 8 bits that share an fp32 maximum: bitsandbytes 0.50, optim/optimizer.py,
Optimizer2State.init_state (2,048 before version 0.44); torchao 0.18, optim/adam.py, `block_size`."""
LEAST_NARROW = 4096
"""Values below which a tensor's state stays in 32 bits: min_8bit_size of bitsandbytes; torchao follows it."""


# Bytes of states: of a tensor exactly, and of a parameter in the mean of a model's tensors.


def tensor_state_bytes(optimizer: str, shape: tuple[int, ...]) -> int:
    """What an optimizer keeps of one whole tensor beside its weight and gradient, fp32 moments.

    Parameters
    ----------
    optimizer : str
        A name of `OPTIMIZER_TRAITS`; of muon the tensor is taken to be a matrix that it orthogonalises.
    shape : tuple of int
        Of the tensor, each at least 1.

    Returns
    -------
    int
        Bytes. The tables of code values, 1 KiB each and one for all tensors, are left out.

    Raises
    ------
    KeyError
        For an optimizer without traits.
    """
    traits = OPTIMIZER_TRAITS[optimizer]
    values = int(np.prod(shape))
    if traits.factored:
        return 4 * (sum(shape) if len(shape) == 2 else values)
    if traits.narrow and values >= LEAST_NARROW:
        blocks = -(-values // BLOCK)
        return traits.moments * (values + 4 * blocks)
    return 4 * traits.moments * values


_PLAIN = OptimizerSetting(source="transformers/trainer.py", wide_tables=True)
"""Of an optimizer that the framework's record does not name: the Trainer of transformers makes it, tensor by
tensor, and keeps the states of embeddings in 32 bits (`register_module_override`)."""


def _handed(workload: Workload) -> OptimizerSetting:
    """What of the parameters the software hands the optimizer."""
    return framework_of_stack(workload.framework).optimizers.get(workload.optimizer, _PLAIN)


def beside_matrices(workload: Workload) -> str:
    """The optimizer of token tables, heads, norms and biases.

    Muon leaves them to Adam (`OPTIMIZER_TRAITS`), and Megatron does under each of its emerging optimizers
    (megatron/core/optimizer/emerging_optimizers.py, `_default_param_overrides_factory`).

    Parameters
    ----------
    workload : Workload
        Its optimizer and framework.

    Returns
    -------
    str
        A name of `OPTIMIZER_TRAITS`.
    """
    traits = OPTIMIZER_TRAITS[workload.optimizer]
    return _handed(workload).beside or traits.beside or workload.optimizer


class _Means(NamedTuple):
    """Bytes of moments of a parameter, in the mean of tensors of one kind, were they in 32 bits."""

    matrices: float
    experts: float
    vectors: float
    """Of norms and biases of layers."""
    vector_share: float
    """Of a model's layers' parameters beside routed experts, 0 to 1."""


@lru_cache(maxsize=512)
def _means(model: ModelSpec, optimizer: str, beside: str, *, fused: bool, flat: bool) -> _Means:
    """Means over the tensors of a model's layers."""
    traits, others = OPTIMIZER_TRAITS[optimizer], OPTIMIZER_TRAITS[beside]
    counted = counted_matrices(model, fused=fused)
    in_matrices = sum(_values(each) * each.number for each in counted if not each.expert)
    tables = embedding_parameters(model) * (1 if model.tied_embeddings else 2)
    routed = sum(_values(each) * each.number for each in counted if each.expert)
    in_layers = max(parameter_count(model) - tables - routed, in_matrices)
    share = 1.0 - in_matrices / in_layers
    if flat:
        return _Means(_flat_bytes(traits), _flat_bytes(traits), _flat_bytes(others), share)
    vector = tensor_state_bytes(beside, (model.hidden,)) / model.hidden
    dense, experts = (
        _mean_bytes(optimizer, [each for each in counted if each.expert is of_experts])
        for of_experts in (False, True)
    )
    return _Means(dense, experts, vector, share)


def _flat_bytes(traits: OptimizerTraits) -> float:
    """Of a parameter in a flat piece, which is one long vector: nothing to factor, nothing too small."""
    if traits.factored:
        return FP32_BYTES
    return traits.moments * (1.0 + FP32_BYTES / BLOCK if traits.narrow else FP32_BYTES)


def _mean_bytes(optimizer: str, counted: list[CountedMatrix]) -> float:
    values = sum(_values(each) * each.number for each in counted)
    kept = sum(tensor_state_bytes(optimizer, _shape(each.matrix)) * each.number for each in counted)
    return kept / values if values else 0.0


def _shape(matrix: Matrix) -> tuple[int, int]:
    return matrix.outputs, matrix.inputs


def _values(each: CountedMatrix) -> int:
    return each.matrix.inputs * each.matrix.outputs


def moments_bytes(workload: Workload, *, experts: bool = False, tables: bool = False) -> float:
    """What the optimizer keeps of one parameter beside its fp32 weight, in the mean of a model's tensors.

    `OPTIMIZER_TRAITS` and `BLOCK` have the sources (docs/cost_model.md, "Optimizers").

    Parameters
    ----------
    workload : Workload
        Its optimizer, model and software, and the type of moments.
    experts : bool
        Whether it is one of routed experts.
    tables : bool
        Whether it is one of token tables and heads.

    Returns
    -------
    float
        Bytes, at least 0: 8 of Adam.

    Raises
    ------
    KeyError
        For an optimizer without traits.
    """
    traits, beside = OPTIMIZER_TRAITS[workload.optimizer], beside_matrices(workload)
    plain = not (traits.narrow or traits.factored)
    if plain and beside == workload.optimizer:
        return float(traits.moments * workload.moment_bytes)
    model, handed = workload.model, _handed(workload)
    flat, fused = handed.flat, handed.fused_gate
    means = _means(model, workload.optimizer, beside, fused=fused, flat=flat)
    narrower = workload.moment_bytes / FP32_BYTES if plain else 1.0
    if workload.adapters is not None:
        return narrower * means.matrices
    if experts:
        return narrower * means.experts
    if tables:
        if flat:
            return narrower * _flat_bytes(OPTIMIZER_TRAITS[beside])
        return narrower * _table_bytes(model, beside, wide=handed.wide_tables)
    return narrower * (
        (1.0 - means.vector_share) * means.matrices + means.vector_share * means.vectors
    )


def _table_bytes(model: ModelSpec, optimizer: str, *, wide: bool) -> float:
    """Of a token table and a head in their mean; a tied head is the table."""
    shape = (model.vocab, model.hidden)
    narrow = tensor_state_bytes(optimizer, shape) / (model.vocab * model.hidden)
    traits = OPTIMIZER_TRAITS[optimizer]
    if not (wide and traits.narrow):
        return narrow
    of_table = traits.moments * FP32_BYTES
    return of_table if model.tied_embeddings else (of_table + narrow) / 2.0


def keeps_more_of_tables(workload: Workload) -> bool:
    """Whether a parameter of token tables has other states than one of a matrix of a layer.

    Parameters
    ----------
    workload : Workload
        Its optimizer and software.

    Returns
    -------
    bool
        False of Adam, SGD and where adapters are trained in place of the model.
    """
    if workload.adapters is not None:
        return False
    other = moments_bytes(workload, tables=True) != moments_bytes(workload)
    return other or deals_out_matrices(workload)


# Who steps what: whole matrices on single ranks, or shards of all on every one.


def deals_out_matrices(workload: Workload) -> bool:
    """Whether whole matrices are dealt out to data-parallel ranks, where states are sharded.

    Megatron's layer-wise distributed optimizer does, with every optimizer but Adam and SGD
    (megatron/core/optimizer/layer_wise_optimizer.py), and so does torchtitan's DistMuon (distributed/
    flex_shard/dist_muon.py, Owned).

    Parameters
    ----------
    workload : Workload
        Its optimizer and framework.

    Returns
    -------
    bool
        False where each rank steps an equal share of every element.
    """
    return _handed(workload).whole


def stepping_ranks(
    workload: Workload, layout: Layout, shards: Ints, *, experts: bool = False
) -> Floats:
    """Ranks among which the states of a parameter are divided evenly, in effect.

    As many as share them, or where whole matrices are dealt out at most as many as the largest matrix of a
    pipeline rank goes into all of its matrices: the rank with that matrix has no less. Largest first is how
    they are dealt (layer_wise_optimizer.py, `_compute_per_buffer_param_layout`).

    Parameters
    ----------
    workload : Workload
        Its optimizer, model and framework.
    layout : Layout
        One layout, or many of shape [n]; tp, pp, ep and etp are used.
    shards : int or array of int
        Ranks that share the parameter, at least 1.
    experts : bool
        Whether it is one of routed experts.

    Returns
    -------
    float or array
        At least 1, at most `shards`.
    """
    ranks = np.asarray(shards, dtype=np.float64)
    if not deals_out_matrices(workload) or workload.adapters is not None:
        return ranks
    counted = counted_matrices(workload.model, fused=_handed(workload).fused_gate)
    of_kind = [each for each in counted if each.expert is experts]
    if not of_kind:
        return ranks
    split = np.asarray(layout.etp if experts else layout.tp)
    sizes = [_values(each) / np.where(_is_split(each.matrix), split, 1) for each in of_kind]
    spread = np.asarray(layout.pp) * (np.asarray(layout.ep) if experts else 1)
    held = sum(size * each.number for size, each in zip(sizes, of_kind, strict=True)) / spread
    largest = np.maximum.reduce(np.broadcast_arrays(*sizes))
    fewer: Floats = np.minimum(ranks, np.maximum(held / largest, 1.0))
    return fewer


_WHOLE = (
    *("q_a_proj", "kv_a_proj_with_mqa", "router", "wk", "weights_proj"),
    *(LATENT_DOWN, LATENT_UP),
)
"""Matrices that every tensor rank has whole."""
_ROW_PARALLEL = ("o_proj", "down_proj", "out_proj", "x_proj")
"""Those whose inputs are split over the tensor ranks; of the others the outputs are."""


def _is_split(matrix: Matrix) -> bool:
    return matrix.name not in _WHOLE


# Seconds of orthogonalising matrices.


NEWTON_SCHULZ_STEPS = 5
"""Default of every implementation: Megatron's --muon-num-ns-steps, DeepSpeed's original_muon.py, ns_steps of
torch.optim.Muon."""
_ADDED_BYTES = 4.0
"""Of an element of a product that is added to another matrix: read and written at 16 bits."""
_LAUNCHES = 12.0
"""Kernels of a matrix beside those of the iteration: `_MUON_BYTES` counts their bytes."""
_PRODUCTS = 3.0
"""Matrix products of one iteration."""
_LAUNCHES_OF_A_PIECE = 8.0
"""Kernels in `piece_launch_s`: six to ten launches, as its source says."""


def newton_schulz_s(rows: Floats, columns: Floats, rates: Rates, *, gram: bool = False) -> Floats:
    """Seconds of orthogonalising one matrix on one GPU, in 16 bits: 5 (4 m^2 n + 2 m^3) FLOP.

    m is its shorter and n its longer edge. Each iteration squares X, A = X X^T, squares that, and multiplies
    X by the sum (Jordan et al. 2024, "Runtime analysis"). Iterating on the square matrix alone, with one
    restart, takes 8 m^2 n + 28 m^3 in all, where the matrix is no square (DeepSpeed 0.19.8, runtime/zero/
    muon/original_muon.py, zeropower_via_gram_newtonschulz).

    Parameters
    ----------
    rows, columns : float or array
        Edges of the matrix, at least 1.
    rates : Rates
        What the device attains.
    gram : bool
        Whether DeepSpeed's iteration on the square matrix is meant.

    Returns
    -------
    float or array
        Seconds, above 0; `kernels.gemm_s` has the sources.
    """
    m, n = np.minimum(rows, columns), np.maximum(rows, columns)
    square = gemm_s(m, m, m, rates, sixteen_bit=True, output_bytes=_ADDED_BYTES)
    into_square = gemm_s(m, m, n, rates, sixteen_bit=True)
    back = gemm_s(m, n, m, rates, sixteen_bit=True, output_bytes=_ADDED_BYTES)
    plain = NEWTON_SCHULZ_STEPS * (into_square + square + back)
    if not gram:
        return plain
    return np.where(n > m, 2.0 * into_square + 14.0 * square + 2.0 * back, plain)


def _edges(each: CountedMatrix, split: Ints) -> tuple[Floats, Floats]:
    """Rows and columns of a matrix on one tensor rank."""
    rows, columns = each.matrix.outputs, each.matrix.inputs
    if not _is_split(each.matrix):
        return float(rows), float(columns)
    if each.matrix.name in _ROW_PARALLEL:
        return float(rows), columns / np.asarray(split, dtype=np.float64)
    return rows / np.asarray(split, dtype=np.float64), float(columns)


def orthogonalising_s(c: Context, dense_shards: Ints, expert_shards: Ints) -> Floats:
    """Seconds of a step in which matrices are orthogonalised, on the mean pipeline rank.

    Megatron's ranks orthogonalise the matrices that were dealt to them, tensor ranks as `muon_tp_mode` says
    (Emerging-Optimizers, muon_utils.py, `newton_schulz_tp`): each its own piece; or each the whole matrix,
    whose fp32 momentum is gathered; or together, with an all-reduce of the square of the edge that is not
    split in every iteration. Without sharded states every rank does all. DeepSpeed's do those that begin or
    end in their partition, so that one more is done twice (runtime/zero/stage_1_and_2.py,
    `get_flat_partition`). Under FSDP2 torch.optim.Muon runs on shards of rows, of which DTensor makes
    products with collectives: where the rows are the longer edge, two all-reduces of m^2 elements in each
    iteration; else m n elements are gathered twice and m^2 once (counted with CommDebugMode of torch 2.13;
    tests/oracles/test_optimizers.py). The host launches kernels one by one: where they are short, it paces
    the step.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates.
    dense_shards, expert_shards : int or array of int
        Ranks that share the states of dense parameters and of experts, 1 where they are not sharded.

    Returns
    -------
    float or array
        Seconds, at least 0; 0 for optimizers that do without.
    """
    workload, layout = c.workload, c.layout
    if not orthogonalises_matrices(workload):
        return 0.0
    handed = _handed(workload)
    launch_s = c.constants.framework.piece_launch_s / _LAUNCHES_OF_A_PIECE
    launches = _LAUNCHES + NEWTON_SCHULZ_STEPS * _PRODUCTS
    seconds: Floats = np.float64(0.0)
    for each in counted_matrices(workload.model, fused=handed.fused_gate):
        shards, split = dense_shards, layout.tp
        number: Floats = each.number / np.asarray(layout.pp, dtype=np.float64)
        if each.expert:
            shards, split = expert_shards, layout.etp
            number = number / layout.ep
        if handed.on_shards:
            each_s = _on_shards_s(c, *_edges(each, split), shards)
        else:
            each_s = _on_tensor_ranks_s(c, each, gram=handed.gram)
            ranks = stepping_ranks(workload, layout, shards, experts=each.expert)
            cut = float(handed.flat) * np.minimum(ranks - 1.0, 1.0)
            number = number / ranks + cut * each.number / _all_matrices(workload.model)
        seconds = seconds + number * np.maximum(each_s, launches * launch_s)
    return seconds


def orthogonalises_matrices(workload: Workload) -> bool:
    """Whether the optimizer's step orthogonalises matrices; of adapters none does.

    Parameters
    ----------
    workload : Workload
        Its optimizer and what is trained.

    Returns
    -------
    bool
    """
    return OPTIMIZER_TRAITS[workload.optimizer].orthogonalises and workload.adapters is None


def sends_by_shards(workload: Workload) -> bool:
    """Whether the optimizer's step sends more where more ranks share its states (Muon under FSDP2).

    With any other optimizer a step in smaller shard groups is never faster: each rank holds more.

    Parameters
    ----------
    workload : Workload
        Its optimizer and framework.

    Returns
    -------
    bool
    """
    return orthogonalises_matrices(workload) and _handed(workload).on_shards


def _on_tensor_ranks_s(c: Context, each: CountedMatrix, *, gram: bool) -> Floats:
    """One matrix on one tensor rank, with what the ranks that share it send."""
    layout, mode, rates = c.layout, c.workload.muon_tp_mode, c.rates
    split = np.asarray(layout.etp if each.expert else layout.tp)
    group = c.placement.etp if each.expert else c.placement.tp
    pieces_s = newton_schulz_s(*_edges(each, split), rates, gram=gram)
    if mode == "blockwise" or not _is_split(each.matrix):
        return pieces_s
    rows, columns = float(each.matrix.outputs), float(each.matrix.inputs)
    if mode == "duplicated":
        gathered_s = ring_pass_s(FP32_BYTES * rows * columns, group, c.links)
        whole_s = newton_schulz_s(rows, columns, rates, gram=gram) + gathered_s
        return np.where(split > 1, whole_s, pieces_s)
    m, n = (rows, columns) if each.matrix.name in _ROW_PARALLEL else (columns, rows)
    together_s = gemm_s(m, m, n / split, rates, sixteen_bit=True)
    together_s = together_s + gemm_s(m, m, m, rates, sixteen_bit=True, output_bytes=_ADDED_BYTES)
    together_s = together_s + gemm_s(
        m, n / split, m, rates, sixteen_bit=True, output_bytes=_ADDED_BYTES
    )
    together_s = together_s + all_reduce_s(2.0 * m * m, group, c.links)
    return np.where(split > 1, NEWTON_SCHULZ_STEPS * together_s, pieces_s)


@lru_cache(maxsize=256)
def _all_matrices(model: ModelSpec) -> int:
    return sum(each.number for each in counted_matrices(model, fused=False))


def _on_shards_s(c: Context, rows: Floats, columns: Floats, shards: Ints) -> Floats:
    """One matrix of torch.optim.Muon whose rows are sharded, products and collectives of all iterations."""
    ranks = np.asarray(shards, dtype=np.float64)
    members = np.minimum(c.placement.dp_cp, np.asarray(shards)[..., None])
    m, n = np.minimum(rows, columns), np.maximum(rows, columns)
    tall = np.asarray(rows) > columns
    square_s = gemm_s(m, m, m, c.rates, sixteen_bit=True, output_bytes=_ADDED_BYTES)
    long_s = gemm_s(m, m, n / ranks, c.rates, sixteen_bit=True)
    long_s = long_s + gemm_s(m, n / ranks, m, c.rates, sixteen_bit=True, output_bytes=_ADDED_BYTES)
    summed_s = 2.0 * all_reduce_s(2.0 * m * m, members, c.links)
    part_s = gemm_s(m / ranks, m, n, c.rates, sixteen_bit=True)
    part_s = part_s + gemm_s(m / ranks, m, m, c.rates, sixteen_bit=True, output_bytes=_ADDED_BYTES)
    part_s = part_s + gemm_s(m / ranks, n, m, c.rates, sixteen_bit=True, output_bytes=_ADDED_BYTES)
    gathered_s = 2.0 * ring_pass_s(2.0 * m * n, members, c.links)
    gathered_s = gathered_s + ring_pass_s(2.0 * m * m, members, c.links)
    wide_s = part_s + gathered_s
    return NEWTON_SCHULZ_STEPS * np.where(tall, square_s + long_s + summed_s, wide_s)


# What a step streams, and what it pages.


def streamed_bytes(workload: Workload, *, experts: bool = False) -> float:
    """Read and written in HBM as one parameter is updated.

    `OPTIMIZER_TRAITS` has the sources (docs/cost_model.md, "Optimizers").

    Parameters
    ----------
    workload : Workload
        Its optimizer and the type of moments.
    experts : bool
        Whether it is one of routed experts.

    Returns
    -------
    float
        Bytes: 14 and four times those of a moment for Adam. Tables, norms and matrices of a model with Muon
        are taken together in their mean.
    """
    beside = beside_matrices(workload)
    moved = _moved_bytes(workload, workload.optimizer, experts=experts)
    if experts or beside == workload.optimizer or workload.adapters is not None:
        return moved
    share = _matrix_share(workload.model, fused=_handed(workload).fused_gate)
    return share * moved + (1.0 - share) * _moved_bytes(workload, beside)


def _moved_bytes(workload: Workload, optimizer: str, *, experts: bool = False) -> float:
    traits = OPTIMIZER_TRAITS[optimizer]
    own = _handed(workload).step_bytes if optimizer == workload.optimizer else 0.0
    step_bytes = own or traits.step_bytes
    if traits.narrow or traits.factored:
        return step_bytes + 2.0 * moments_bytes(workload, experts=experts)
    return step_bytes + 2.0 * traits.moments * workload.moment_bytes


@lru_cache(maxsize=256)
def _matrix_share(model: ModelSpec, *, fused: bool) -> float:
    """Of parameters beside routed experts, those in matrices of layers."""
    counted = counted_matrices(model, fused=fused)
    inside = sum(_values(each) * each.number for each in counted if not each.expert)
    routed = 0
    if model.moe is not None:
        routed = len(model.expert_layers) * model.moe.experts * expert_parameters(model)
    return min(inside / (parameter_count(model) - routed), 1.0)


def pages_states(workload: Workload) -> bool:
    """Whether moments lie in unified memory.

    They are counted with the host's memory, and a step as one that fetches them and sends them back: what
    happens where HBM is full (bitsandbytes, functional.py, get_paged and prefetch_tensor). Where it is not,
    nothing moves, and the step is as fast as without.

    Parameters
    ----------
    workload : Workload
        Its optimizer.

    Returns
    -------
    bool
        True of the paged optimizers.
    """
    return OPTIMIZER_TRAITS[workload.optimizer].paged
