"""Seconds that the optimizer takes in a step, on the GPU and on the host."""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.layers.activation_copies import COPY_SHARE
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layout import Floats
from meshwright.costmodel.memory.profile import memory_profile
from meshwright.costmodel.memory.states import optimizer_shards

_ADAM_BYTES = 14.0
"""Adam on fp32 parameters: reads parameter and gradient, writes the parameter and the 2-byte weight."""
_WEIGHT_BYTES = 2.0
"""Of a 16-bit weight."""
_MOMENT_PASSES = 4.0
"""Two moments, read and written."""
_HOST_BYTES_PER_S = 18.2e9
"""What the update of one rank streams on the host: one thread's work, as torchrun sets OMP_NUM_THREADS to 1.

Qwen3-30B-A3B on 16 H100 with all states offloaded takes 2.88 s more a step than with none, for 1.908e9
parameters a rank (Megatron-Bridge, skills/perf-techniques/cpu-offloading/card.yaml: 996 and 3,877 ms), which
are 18.5e9 bytes a second; Qwen3-0.6B on one H100 takes 0.926 s more for 0.596e9 (NVIDIA-NeMo/RL, pull
request 3628: 0.752 and 1.678 s), which are 18.0e9. Both ran PyTorch's fused Adam, one vectorised pass over
the states, as DeepSpeedCPUAdam is (csrc/includes/cpu_adam.h, Step_AVX)."""
_PCIE_SHARE = COPY_SHARE / 2.0
"""Of PCIe's nominal rate, while all GPUs copy at once: half of what one attains is assumed, as two of them
share the uplink of a switch in DGX A100."""


def optimizer_s(c: Context, dense: Floats, expert: Floats) -> Floats:
    """Streaming of the optimizer's states, sharded from ZeRO 1 on.

    The GPU updates its share of them while the host updates what is offloaded (hybrid_optimizer.py of
    megatron-core, `step`: GPU kernels are launched first); the transfers of one parameter hide under the
    updates of others. DeepSpeed copies gradients down as they are reduced, updates, and copies weights up
    (deepspeed/runtime/zero/stage_1_and_2.py, `step`). Its transfers are priced as hidden under nothing,
    though `overlap_comm` puts those of gradients beside the backward pass. So are those of FSDP2, which
    uploads fp32 shards ahead of each gather and adds up gradients on the host: its uploads run beside other
    layers, its downloads do not where micro-batches accumulate (torch 2.13, `_fsdp_collectives.py`,
    `foreach_reduce`). Under torch's pipelines gradients come down once.

    docs/cost_model.md, "The step", has the sources.

    Parameters
    ----------
    c : Context
        Workload, layouts and rates.
    dense, expert : float or array
        Parameters on one GPU before data-parallel sharding, at least 0.

    Returns
    -------
    float or array
        Seconds of a step.
    """
    layout = c.layout
    sharded = np.asarray(layout.zero_stage) >= 1
    of_dense, of_expert = optimizer_shards(layout)
    parameters = dense / np.where(sharded, of_dense, 1) + expert / np.where(sharded, of_expert, 1)
    moved = _ADAM_BYTES + _MOMENT_PASSES * c.workload.moment_bytes
    offloaded = np.asarray(layout.optimizer_offload) / 100.0
    on_gpu_s = (1.0 - offloaded) * moved * parameters / c.rates.hbm_bytes_per_s
    on_host_s = offloaded * _host_s(c, parameters)
    states_s: Floats = np.maximum(on_gpu_s, on_host_s)
    return states_s + _uploads_s(c, parameters) if c.workload.offload_parameters else states_s


def _host_s(c: Context, parameters: Floats) -> Floats:
    """Seconds of updating parameters on the host, and of the transfers that the step waits for."""
    framework = c.constants.framework
    update_s = framework.host_update_bytes * np.asarray(parameters) / _HOST_BYTES_PER_S
    layout, stage = c.layout, np.asarray(c.layout.zero_stage)
    micro_batches = np.asarray(layout.num_micro_batches)
    whole = memory_profile(c.workload.framework).unsharded_in_pipeline & (np.asarray(layout.pp) > 1)
    reduced = np.where(whole, 1, micro_batches)
    moved = (
        framework.host_transfer_bytes
        + framework.host_accumulation_bytes * np.where(stage >= 2, reduced, 0)
        + framework.host_gather_bytes * np.where(stage == 3, micro_batches, 0)
    )
    pcie_bytes_per_s = 1e9 * _PCIE_SHARE * c.workload.cluster.device.pcie_gb_per_s
    sums_s = framework.host_sum_bytes * (reduced - 1) * parameters / _HOST_BYTES_PER_S
    seconds: Floats = update_s + sums_s + moved * parameters / pcie_bytes_per_s
    return seconds


def _uploads_s(c: Context, parameters: Floats) -> Floats:
    """Seconds of the copies that 16-bit shards on the host cost a step, priced as hidden under nothing.

    They go up ahead of the forward and of the backward pass of every micro-batch (DeepSpeed 0.19.8,
    deepspeed/runtime/zero/partition_parameters.py, _all_gather_dtype). What the optimizer updates on the GPU
    comes down once; where it is the host's, its own upload of new weights falls away (stage3.py, step).
    """
    micro_batches = np.asarray(c.layout.num_micro_batches)
    on_host = np.asarray(c.layout.optimizer_offload) / 100.0
    after_step = 1.0 - 2.0 * on_host
    moved = _WEIGHT_BYTES * (2.0 * micro_batches + after_step)
    rate = 1e9 * _PCIE_SHARE * c.workload.cluster.device.pcie_gb_per_s
    seconds: Floats = moved * np.asarray(parameters) / rate
    return seconds
