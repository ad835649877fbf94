"""Buffers of a rank beside its tensors: in which weights are gathered, gradients reduced or sent to the host.

Bytes, or elements, shaped like the layout.
"""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.constants.stacks import stack_constants
from meshwright.costmodel.layout import Bools, Floats, Layout
from meshwright.costmodel.memory.profile import MemoryProfile
from meshwright.costmodel.memory.states import (
    layer_parameters_on_gpu,
    optimizer_shards,
    table_parameters,
)
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.schema import ModelSpec


def shards_weights(layout: Layout) -> Bools:
    """Whether weights are gathered before use.

    Parameters
    ----------
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    array of bool
        Shaped like the layout.
    """
    ranks = np.asarray(layout.dp) * layout.cp
    sharded: Bools = (np.asarray(layout.zero_stage) == 3) & (ranks > 1)
    return sharded


def widest_columns(model: ModelSpec) -> float:
    """Outputs of the widest product ahead of an activation function or a scan.

    Parameters
    ----------
    model : ModelSpec
        Widths and number of layers.

    Returns
    -------
    float
        Above 0; on all tensor ranks together.
    """
    matrices = 2.0 if model.gated else 1.0
    projected = 0 if model.state_space is None else model.state_space.projected_width
    return max(matrices * model.ffn_hidden, float(projected))


def layers_of_a_rank(model: ModelSpec, layout: Layout) -> Floats:
    """Parameters of a rank's layers, where each stage has as many.

    Parameters
    ----------
    model : ModelSpec
        Widths and number of layers.
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    float or array
        Without shards, shaped like the layout.
    """
    dense, rest, experts = layer_parameters_on_gpu(model, layout)
    layers = model.dense_layers * dense + model.moe_layers * (rest + experts)
    return layers / layout.pp


def gathered_ahead(
    model: ModelSpec, layout: Layout, profile: MemoryProfile, largest_layer: Floats
) -> Floats:
    """Weights that DeepSpeed's ZeRO 3 holds gathered, in elements.

    What is used again within the reuse distance stays: at the end of the forward pass the last layers, which
    the distance meets twice, so that they are at most half of it. Beside them are the matrix in use and the
    weights that were gathered ahead, up to a bucket and the matrix that fills it; these also in the buffer
    that they came in, from which each is copied. Its limit of live weights stops gathering ahead alone, and
    is twice what stays (DeepSpeed 0.19.8, partitioned_param_coordinator.py, __params_to_release and
    _fetch_sub_module_impl; partition_parameters.py, AllGatherCoalescedHandle).

    Parameters
    ----------
    model : ModelSpec
        Widths and number of layers.
    layout : Layout
        One layout, or many of shape [n].
    profile : MemoryProfile
        Of the software.
    largest_layer : float or array
        Parameters of the largest layer on a GPU, at least 0.

    Returns
    -------
    float or array
        Elements on one GPU, shaped like the layout.
    """
    widest = widest_columns(model) * model.hidden / np.asarray(layout.tp)
    in_use = np.minimum(widest, largest_layer)
    whole = layers_of_a_rank(model, layout)
    ahead = np.minimum(profile.prefetch_elements + in_use, whole)
    at_hand: Floats = np.minimum(profile.reuse_elements / 2.0 + in_use + ahead, whole) + ahead
    return at_hand


def reduction_buffers(workload: Workload, layout: Layout, profile: MemoryProfile) -> Floats:
    """What gradients are collected in to be reduced together.

    Under ZeRO 3 a 16-bit bucket, and beside it what it holds once more, in the order of the ranks that get it
    (DeepSpeed 0.19.8, stage3.py, IPGBucketZ3; coalesced_collectives.py, reduce_scatter_coalesced).

    Parameters
    ----------
    workload : Workload
        Model, precision, software and size of its buckets.
    layout : Layout
        One layout, or many of shape [n].
    profile : MemoryProfile
        Of the software.

    Returns
    -------
    float or array
        Bytes on one GPU, shaped like the layout.
    """
    elements = profile.bucket_elements
    if elements and workload.bucket_mb is not None:
        elements = stack_constants(workload).gradients_in(workload.bucket_mb)
    model = workload.model
    whole = layers_of_a_rank(model, layout) + np.asarray(table_parameters(model, layout))
    copied = np.where(shards_weights(layout), np.minimum(elements, whole), 0.0)
    element = 4.0 if workload.precision == "bf16" else 2.0
    unsharded = np.asarray(layout.zero_stage) < 3
    return np.where(unsharded, element * elements, 2.0 * (elements + copied))


_UPLOADED_WEIGHT_BYTES = 2.0
"""Of a shard that `offload_param` keeps on the host, on its way to where it is gathered."""


def offload_buffers(workload: Workload, layout: Layout, profile: MemoryProfile) -> Floats:
    """What an offloaded optimizer's gradients and weights pass through between the GPU and the host.

    Gradients: as much as the largest matrix (DeepSpeed). Weights under FSDP2: the shards of two layers, or of
    a token table, one being gathered and the next one's copied ahead (torch 2.13, `_fsdp_param_group.py`).

    Parameters
    ----------
    workload : Workload
        Model, precision, software and size of its buckets.
    layout : Layout
        One layout, or many of shape [n].
    profile : MemoryProfile
        Of the software.

    Returns
    -------
    float or array
        Bytes on one GPU, shaped like the layout.
    """
    model = workload.model
    widest = widest_columns(model) * model.hidden / np.asarray(layout.tp)
    largest = np.maximum(np.asarray(table_parameters(model, layout)), widest)
    offloads, stage = np.asarray(layout.optimizer_offload) > 0, np.asarray(layout.zero_stage)
    layer = layers_of_a_rank(model, layout) * layout.pp / model.layers
    of_dense, _ = optimizer_shards(layout)
    uploaded = np.maximum(2.0 * layer, np.asarray(table_parameters(model, layout))) / of_dense
    # Two layers' shards in 16 bits, one in use and one on its way.
    parameters = _UPLOADED_WEIGHT_BYTES * uploaded if workload.offload_parameters else 0.0
    return np.where(
        offloads & (stage < 3),
        profile.offload_buffer_bytes * largest,
        np.where(offloads, profile.upload_bytes * uploaded, 0.0) + parameters,
    )
