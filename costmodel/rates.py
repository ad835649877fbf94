"""Calibrated constants with their provenance, read from `costmodel/data`, and the rates they give."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from meshwright.cluster_specs.allocation import FabricLevels, fabric_levels
from meshwright.cluster_specs.schema import DeviceSpec
from meshwright.costmodel.calibration import Factors
from meshwright.costmodel.collectives import SCALE_UP_MEDIA, Links
from meshwright.costmodel.kernels import OPERAND_BYTES, Rates
from meshwright.costmodel.records import (
    ErrorBand,
    Overrides,
    adapters_band,
    device_class,
    error_band,
    layered_values,
    memory_band,
)
from meshwright.costmodel.stacks import (
    OF_FIRST_KERNELS,
    OF_WIDE_HEADS,
    FrameworkConstants,
    generation_on,
    named_framework_constants,
    of_run,
)
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.schema import ModelSpec


@dataclass(frozen=True, kw_only=True)
class DeviceConstants:
    """Fractions of nominal peaks that one device attains; see `devices.yaml` for the source of each."""

    gemm_fraction_16bit: float
    gemm_fraction_fp8: float
    gemm_fraction_mxfp8: float
    gemm_fraction_fp4: float
    attention_forward_fraction: float
    """Of the 16-bit peak, by the causal half of the FLOP."""
    attention_flash1_fraction: float
    """As `attention_forward_fraction`, for FlashAttention's port to Triton of early 2023."""
    attention_flash2_fraction: float
    """As `attention_forward_fraction`, for FlashAttention-2 and its like, written for Ampere (arXiv
    2407.08608: 35 % on H100)."""
    attention_cudnn9_fraction: float
    """As `attention_forward_fraction`, for cuDNN up to 9.0 (Transformer Engine 1.2 to 1.6)."""
    attention_memory_efficient_gflops_per_sm: float
    """Of an SM in PyTorch's memory-efficient kernel of Ampere's instructions, forward and backward together;
    by all FLOP of a pass under a mask, and by the causal half of it without."""
    attention_backward_ratio: float
    """Backward rate over forward rate (the backward pass has 2.5 times the FLOP)."""
    attention_forward_keys: float
    """As `Rates.attention_forward_keys`, of kernels that came after FlashAttention-2."""
    attention_backward_keys: float
    """The same, backward."""
    hbm_fraction: float
    scale_up_fraction: float
    exchange_factor: float
    """Rate of DeepEP's kernels in a scale-up domain over what `all_to_all_scale_up_fraction` makes of its
    links."""
    half_k: float
    half_edge: float
    grouped_half_edge: float
    wave_weight: float
    host_factor: float
    """Host time of a launch over that of the x86 hosts that the stacks were measured on."""
    narrow_head_factor: float
    """Attention time of heads of 64 or narrower over that of 128 at equal FLOP: exponentials set the pace."""
    two_node_tree_gb_per_s: float
    """The most that NCCL's tree all-reduce moves through a node's links where two nodes take part."""
    tdp_exponent: float
    """Power of board power over that of a GB200 that the tensor rate follows."""
    tile: int


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Everything calibrated that one workload needs."""

    device: DeviceConstants
    framework: FrameworkConstants
    shared: dict[str, float]
    """Constants that neither device nor framework changes, by name (`shared` in `devices.yaml`)."""


_HOPPER_GAINS = (1.49, 0.72)
_BLACKWELL_GAINS = {
    ("fp8", False, False): (1.29, 1.06),
    ("fp8", False, True): (1.52, 1.18),
    ("fp8", True, False): (1.50, 1.62),
    ("fp8", True, True): (1.73, 1.76),
    ("mxfp8", False, False): (1.20, 0.94),
    ("mxfp8", False, True): (1.36, 0.95),
    ("mxfp8", True, False): (1.38, 1.27),
    ("mxfp8", True, True): (1.57, 1.35),
}
"""Rates of attention in FP8 under a causal mask over those at 16 bits, forward and backward; on Blackwell by
recipe, by queries wider than values (192 and 128, latent attention) and by twice the exponentials (Ultra).

Training takes cuDNN (Transformer Engine, attention/dot_product_attention/utils.py: "Disabling FlashAttention
3 for FP8 training"), in MXFP8 where that is the recipe (the same, pull request 2719). On Hopper its backward
kernel takes as long under a mask as without one: 0.63 to 0.99 of its rate at 16 bits on an H200, heads of
128, 4,096 to 16,384 tokens, forward 1.42 to 1.57 (means of cuDNN 9.19 and 9.27, NVIDIA/cudnn-frontend,
benchmark/sdpa_benchmark_training/results/h200_919_only_cudnn and attention_training/results/llama3.1/h200).
On Blackwell, means of 4,096 and 8,192 tokens on GB200 and GB300, cuDNN 9.22 (the first of these folders,
llama3.1 and dsv3, April 2026).
"""
_MOST_WORK_BACKWARD = 2.5 / 0.8
"""Time of the backward pass over the forward one at 16 bits: FLOP over rates (arXiv 2307.08691, section 4.1,
figures 4 to 6)."""
_LEAST_GAIN = 0.95
"""Of the time at 16 bits, what attention in FP8 may take for a plan to ask for it: its casts come on top."""
_SLOWER_THAN_FLASH_2 = 2.0
"""Time of flash-attn 1 (1.0.9) over that of 2, on A100 ("around 2x", Dao 2023, arXiv 2307.08691, section 4.1;
the version: Dao-AILab/flash-attention, issue 505)."""
_KEYS_OF_FLASH_2 = (250.0, 560.0)
"""`Rates.attention_forward_keys` and `attention_backward_keys` of FlashAttention-2, and assumed of the first.

Published times of it with as many tokens in all at each length, heads of 64. Without a mask, 512 to 8,192
tokens, the backward pass needs 280 keys on an RTX A5000 (gpu-mode/ring-attention, issue 10) and 310 on an
H100 (Dao-AILab/flash-attention, pull request 2688), the forward pass none and 60. A causal mask doubles
that, as a query has half the keys, and computes blocks on the diagonal whole, 128 keys more: 130 to 250
forward, 690 to 750 backward. Under one, from 4,096 to 8,192 tokens, it was 290 and 420 (the same, issue 416).
"""
_BLACKWELL_REFERENCE_W = 1200.0
"""Board power of a GB200, the middle of the family, against which `tdp_exponent` was fitted."""


def device_prefixes(name: str, architecture: str) -> tuple[str, ...]:
    """Where a device's constants stand: the defaults, then its architecture's entry, then its own.

    Parameters
    ----------
    name, architecture : str
        As in the device catalog.

    Returns
    -------
    tuple of str
        Paths for `records.layered_values`, in which later ones win.
    """
    return "device_defaults", f"architectures.{architecture}", f"devices.{name}"


def device_constants(
    name: str, architecture: str, overrides: Overrides | None = None
) -> DeviceConstants:
    """Constants of a device.

    Parameters
    ----------
    name, architecture : str
        As in the device catalog; the defaults where `devices.yaml` has neither.
    overrides : mapping of str to float, optional
        Other values, by the path of the record.

    Returns
    -------
    DeviceConstants
        Fractions of nominal peaks; `costmodel/data/devices.yaml` has the source of each.
    """
    values = layered_values(*device_prefixes(name, architecture), overrides=overrides)
    return DeviceConstants(**values)


def constants_for(workload: Workload) -> Constants:
    """The calibrated constants of a workload's device and framework.

    Parameters
    ----------
    workload : Workload
        Its device and framework are used.

    Returns
    -------
    Constants
        `costmodel/data` has the source of each.
    """
    device = workload.cluster.device
    return as_run(_constants(device.name, device.architecture, workload.framework), workload)


def as_run(of_stack: Constants, workload: Workload) -> Constants:
    """The constants of a software stack with what the run itself says of its kernels and gradients.

    Parameters
    ----------
    of_stack : Constants
        Of the workload's device and framework.
    workload : Workload
        Its attention kernel and gradient bytes are used.

    Returns
    -------
    Constants
        Those of the stack where the run says nothing.
    """
    framework = of_run(of_stack.framework, workload)
    if framework is of_stack.framework:
        return of_stack
    return replace(of_stack, framework=framework)


@cache
def _constants(device: str, architecture: str, framework: str) -> Constants:
    return named_constants(device, architecture, framework, {})


def named_constants(
    device: str, architecture: str, framework: str, overrides: Overrides
) -> Constants:
    """The constants of a device and of a software profile, by name; not cached.

    Parameters
    ----------
    device, architecture : str
        As in the device catalog.
    framework : str
        One of `framework_names()`.
    overrides : mapping of str to float
        Other values, by the path of the record.

    Returns
    -------
    Constants
        `costmodel/data` has the source of each.

    Raises
    ------
    KeyError
        For a framework of another name.
    """
    return Constants(
        device=device_constants(device, architecture, overrides),
        framework=named_framework_constants(framework, overrides),
        shared=layered_values("shared", overrides=overrides),
    )


def peak_flops(device: DeviceSpec, precision: str) -> float:
    """Dense peak of GEMMs at a precision; at 16 bits where the device lacks the narrower one.

    Parameters
    ----------
    device : DeviceSpec
        With the maker's peaks, without sparsity, from `cluster_specs/data/devices.yaml` with their sources.
    precision : str
        bf16, fp16, fp8, mxfp8 or nvfp4.

    Returns
    -------
    float
        FLOP/s, above 0.
    """
    sixteen = device.peak_bf16_tflops or device.peak_fp16_tflops
    if precision == "fp16":
        sixteen = device.peak_fp16_tflops
    narrow = {
        "fp8": device.peak_fp8_tflops,
        "mxfp8": device.peak_fp8_tflops,
        "nvfp4": device.peak_fp4_tflops,
    }
    return (narrow.get(precision) or sixteen) * 1e12


def kernel_rates(workload: Workload, constants: Constants) -> Rates:
    """Attained kernel rates of the workload's device at its precision.

    `device_rates`, and attention in FP8 as `fp8_attention_gains` says. The first FP8 kernels for Blackwell
    reach no more of their peak than those at 16 bits (docs/cost_model.md, "Constants").

    Parameters
    ----------
    workload : Workload
        Its device, precision and release of kernels are used.
    constants : Constants
        Fractions of nominal peaks.

    Returns
    -------
    Rates
        FLOP/s, bytes per second and the shape constants of `kernels.gemm_s`.
    """
    if workload.first_fp8_kernels and workload.cluster.device.architecture == "blackwell":
        device = constants.device
        share = min(device.gemm_fraction_fp8, device.gemm_fraction_16bit)
        constants = replace(constants, device=replace(device, gemm_fraction_fp8=share))
    rates = device_rates(workload.cluster.device, workload.precision, constants)
    if not workload.fp8_attention:
        return rates
    forward, backward = fp8_attention_gains(
        workload.cluster.device, workload.model, workload.precision
    )
    return replace(
        rates,
        attention_forward_flops=rates.attention_forward_flops * forward,
        attention_backward_flops=rates.attention_backward_flops * backward,
    )


def fp8_attention_gains(
    device: DeviceSpec, model: ModelSpec, precision: str
) -> tuple[float, float]:
    """How much faster attention is in FP8 than at 16 bits, its casts left out.

    Parameters
    ----------
    device : DeviceSpec
        Of Hopper or Blackwell.
    model : ModelSpec
        Its heads are used.
    precision : str
        fp8, mxfp8 or nvfp4, beside which attention is in FP8.

    Returns
    -------
    tuple of float
        Ratios of rates, forward and backward; measured with cuDNN (`_BLACKWELL_GAINS` has the source).
    """
    if device.architecture == "hopper":
        return _HOPPER_GAINS
    recipe = "mxfp8" if precision == "mxfp8" else "fp8"
    ultra = device_class(device.name) == "b300"
    return _BLACKWELL_GAINS[recipe, model.qk_head_dim > model.v_head_dim, ultra]


def attends_faster_in_fp8(device: DeviceSpec, model: ModelSpec, precision: str) -> bool:
    """Whether both passes of attention together take less time in FP8 than at 16 bits.

    Not under windows, whose backward kernel in FP8 computes every score: 41 to 57 TFLOP/s of what a window of
    128 in 4,096 tokens asks for, 182 and 191 at 16 bits (the source of `_BLACKWELL_GAINS`, gpt_oss).

    Parameters
    ----------
    device : DeviceSpec
        Of Hopper or Blackwell.
    model : ModelSpec
        Its heads are used.
    precision : str
        fp8, mxfp8 or nvfp4.

    Returns
    -------
    bool
        By `fp8_attention_gains`, with room for its casts.
    """
    forward, backward = fp8_attention_gains(device, model, precision)
    if model.sliding_window is not None:
        return False
    in_fp8 = 1.0 / forward + _MOST_WORK_BACKWARD / backward
    return in_fp8 < _LEAST_GAIN * (1.0 + _MOST_WORK_BACKWARD)


def device_rates(spec: DeviceSpec, precision: str, constants: Constants) -> Rates:
    """Attained kernel rates of a device: nominal peaks times the fractions that kernels attain.

    `costmodel/data/devices.yaml` has the source of each fraction.

    Parameters
    ----------
    spec : DeviceSpec
        With the maker's peaks.
    precision : str
        bf16, fp16, fp8, mxfp8 or nvfp4.
    constants : Constants
        Fractions of nominal peaks.

    Returns
    -------
    Rates
        FLOP/s, bytes per second and the shape constants of `kernels.gemm_s`.
    """
    device = constants.device
    fraction = {
        "fp8": device.gemm_fraction_fp8,
        "mxfp8": device.gemm_fraction_mxfp8,
        "nvfp4": device.gemm_fraction_fp4,
    }.get(precision, device.gemm_fraction_16bit)
    sixteen = peak_flops(spec, "bf16")
    by_generation = {
        OF_FIRST_KERNELS: device.attention_flash2_fraction / _SLOWER_THAN_FLASH_2,
        1: device.attention_flash1_fraction,
        2: device.attention_flash2_fraction,
        2.5: device.attention_cudnn9_fraction,
        3: device.attention_forward_fraction,
    }
    # What is measured is the rate of both passes together.
    wide_heads = (1.0 + 2.5 / device.attention_backward_ratio) / 3.5
    wide_heads *= device.attention_memory_efficient_gflops_per_sm * 1e9 * spec.sms / sixteen
    by_generation[OF_WIDE_HEADS] = wide_heads
    # Power-limited clocks: tensor cores run at a rate that follows the board's power limit.
    power = 1.0
    if device.tdp_exponent:
        power = (spec.tdp_w / _BLACKWELL_REFERENCE_W) ** device.tdp_exponent
    # Attention waits for exponentials more than for tensor cores, and draws less.
    generation = generation_on(spec.architecture, constants.framework.flash_generation)
    forward = sixteen * by_generation[generation]
    keys = attention_keys(device, is_flash_2=generation in (OF_FIRST_KERNELS, 1, 2))
    return Rates(
        gemm_flops=peak_flops(spec, precision) * fraction * power,
        head_gemm_flops=sixteen * device.gemm_fraction_16bit * power,
        attention_forward_flops=forward,
        attention_backward_flops=forward * device.attention_backward_ratio,
        attention_forward_keys=keys[0],
        attention_backward_keys=keys[1],
        hbm_bytes_per_s=spec.hbm_gb_per_s * 1e9 * device.hbm_fraction,
        operand_bytes=OPERAND_BYTES.get(precision, 2.0),
        weight_gradient_bytes=constants.framework.weight_gradient_bytes,
        sms=spec.sms,
        gemm_half_k=device.half_k,
        gemm_half_edge=device.half_edge,
        grouped_half_edge=device.grouped_half_edge,
        tile=device.tile,
        wave_weight=device.wave_weight,
        grouped_factor=constants.shared["grouped_gemm_factor"],
    )


def attention_keys(device: DeviceConstants, *, is_flash_2: bool) -> tuple[float, float]:
    """Keys that stand for what fused attention does beside its keys, forward and backward.

    Parameters
    ----------
    device : DeviceConstants
        Of the device that runs it.
    is_flash_2 : bool
        Whether the kernels are FlashAttention-2, or the first.

    Returns
    -------
    tuple of two floats
        `Rates.attention_forward_keys` and `Rates.attention_backward_keys`, at least 0.
    """
    forward, backward = device.attention_forward_keys, device.attention_backward_keys
    if not is_flash_2:
        return forward, backward
    return min(forward, _KEYS_OF_FLASH_2[0]), min(backward, _KEYS_OF_FLASH_2[1])


def fabric_links(workload: Workload, constants: Constants) -> Links:
    """Attained rates of every fabric level of the workload's allocation.

    Parameters
    ----------
    workload : Workload
        Its cluster and number of GPUs are used.
    constants : Constants
        Fractions of nominal rates.

    Returns
    -------
    Links
        Arrays of shape [levels].
    """
    return links_of(fabric_levels(workload.cluster, workload.gpus), constants)


def links_of(levels: FabricLevels, constants: Constants) -> Links:
    """Attained rates of fabric levels: nominal rates times the fractions that collectives attain in a step.

    What was measured on this very machine goes before what machines of the kind usually attain;
    `costmodel/data/devices.yaml` has the source of each fraction.

    Parameters
    ----------
    levels : FabricLevels
        Nominal rates, latencies and measured fractions, inside out.
    constants : Constants
        Fractions of nominal rates.

    Returns
    -------
    Links
        Arrays of shape [levels].
    """
    scale_up = np.array([medium in SCALE_UP_MEDIA for medium in levels.media])
    shared = constants.shared
    # The curve of rings against size was measured on links between GPUs; a bus takes its pieces as NICs do.
    of_links = scale_up & np.array([medium != "pcie" for medium in levels.media])
    network = np.array([shared.get(f"{medium}_fraction", 1.0) for medium in levels.media])
    usual = np.where(scale_up, constants.device.scale_up_fraction, network)
    usual = usual * levels.neighbour_share * levels.host_share
    ring = np.where(np.isnan(levels.attained), usual, levels.attained)
    usual_to_all = np.where(scale_up, shared["all_to_all_scale_up_fraction"], network)
    usual_to_all = usual_to_all * levels.host_share_of_exchanges
    unmeasured = np.isnan(levels.all_to_all_attained)
    to_all = np.where(unmeasured, usual_to_all, levels.all_to_all_attained)
    of_kernels = np.where(scale_up & unmeasured, constants.device.exchange_factor, 1.0)
    nominal = levels.gb_per_s * 1e9
    railed = bool(np.any(levels.rails > 1))
    attained, moving = nominal * ring, None
    # Level by level: behind a thin fabric a NIC moves no more, however fast it is.
    of_measured_runs = network * shared["moving_nic_gb_per_s"] * 1e9
    if np.any(~scale_up & (attained < of_measured_runs)):
        # What a NIC moves passes the bus of its node: there it goes no faster than in a ring inside.
        rates = np.where(scale_up, attained, np.maximum(attained, of_measured_runs))
        moving = np.maximum(np.minimum.accumulate(rates), attained)
    return Links(
        bytes_per_s=attained,
        all_to_all_bytes_per_s=nominal * to_all,
        latency_s=levels.latency_s,
        half_bytes=np.where(of_links, shared["half_bytes_scale_up"], 0.0),
        fill_s=np.where(of_links, 0.0, shared["ring_fill_network_s"]),
        rails=levels.rails if railed else None,
        cross_rail_bytes_per_s=levels.cross_rail_gb_per_s * 1e9 * to_all if railed else None,
        moving_bytes_per_s=moving,
        exchange_half_bytes=np.where(
            scale_up, shared["exchange_half_bytes_scale_up"], shared["exchange_half_bytes_network"]
        ),
        tree_bytes_per_s=constants.device.two_node_tree_gb_per_s * 1e9,
        dispatched_bytes_per_s=nominal * to_all * of_kernels,
    )


# The constants of a workload with what the user's own runs say of them.


_NARROW_GEMM = ("gemm_fraction_fp8", "gemm_fraction_mxfp8", "gemm_fraction_fp4")
_ATTENTION = (
    "attention_forward_fraction",
    "attention_flash1_fraction",
    "attention_flash2_fraction",
    "attention_cudnn9_fraction",
    "attention_memory_efficient_gflops_per_sm",
)
_LAUNCHES = (
    "launch_layer_s",
    "launch_moe_layer_s",
    "piece_launch_s",
    "collective_launch_s",
    "moe_sync_s",
)
_NETWORKS = ("infiniband", "roce", "efa", "slingshot", "omnipath")


def calibrated_constants(workload: Workload) -> Constants:
    """The constants that price a workload.

    Parameters
    ----------
    workload : Workload
        Its device, its framework and the factors of its calibration are used.

    Returns
    -------
    Constants
        The shipped ones where it has no calibration.
    """
    constants = constants_for(workload)
    if workload.factors is None:
        return constants
    return calibrated(constants, workload.factors)


def step_time_band(workload: Workload) -> ErrorBand:
    """How far measured steps lie from predicted ones.

    Parameters
    ----------
    workload : Workload
        Its device, its framework and its calibration are used.

    Returns
    -------
    ErrorBand
        Measured over predicted seconds, without unit: of the user's own runs where they are of this device
        and framework, else of published ones.
    """
    device, calibration = workload.cluster.device.name, workload.calibration
    band = None
    if calibration is not None and calibration.covers(device, workload.framework):
        band = calibration.band("step_time")
    if band is None and workload.adapters is not None:
        return adapters_band("step_time")
    return band or error_band(device, workload.framework)


def peak_memory_band(workload: Workload) -> ErrorBand:
    """How far measured peaks of memory lie from predicted ones.

    Parameters
    ----------
    workload : Workload
        Its framework and its calibration are used.

    Returns
    -------
    ErrorBand
        Measured over predicted GiB, without unit: of the user's own runs where they are of this framework and
        say how much memory they took, else of published ones.
    """
    calibration = workload.calibration
    band = None
    if calibration is not None and calibration.runs_as(workload.framework):
        band = calibration.band("memory")
    if band is None and workload.adapters is not None:
        return adapters_band("memory")
    return band or memory_band()


def calibrated(constants: Constants, factors: Factors) -> Constants:
    """The constants with factors applied.

    Parameters
    ----------
    constants : Constants
        As shipped.
    factors : Factors
        Of a calibration.

    Returns
    -------
    Constants
        Shares stay between 0 and 1.
    """
    return Constants(
        device=_device(constants.device, factors),
        framework=_framework(constants.framework, factors),
        shared=_shared(constants.shared, factors),
    )


def _device(device: DeviceConstants, factors: Factors) -> DeviceConstants:
    narrow = factors.gemm * factors.gemm_narrow
    changes = {name: getattr(device, name) * narrow for name in _NARROW_GEMM}
    changes["gemm_fraction_16bit"] = device.gemm_fraction_16bit * factors.gemm
    changes |= {name: getattr(device, name) * factors.attention for name in _ATTENTION}
    changes["hbm_fraction"] = device.hbm_fraction * factors.hbm
    changes["scale_up_fraction"] = device.scale_up_fraction * factors.scale_up
    return replace(device, **changes)


def _framework(framework: FrameworkConstants, factors: Factors) -> FrameworkConstants:
    changes = {name: getattr(framework, name) * factors.launch for name in _LAUNCHES}
    interference = framework.dp_interference * factors.data_parallel_exposed
    changes["dp_interference"] = min(1.0, interference)
    exposed = (1.0 - framework.ep_hidden) * factors.expert_exposed
    changes["ep_hidden"] = 1.0 - min(1.0, exposed)
    changes["serial_launch_s"] = framework.serial_launch_s + factors.layer_wait_s
    changes["collective_wait_s"] = framework.collective_wait_s + factors.collective_wait_s
    changes["recompute_fraction"] = framework.recompute_fraction * factors.recompute
    changes["head_factor"] = framework.head_factor * factors.head
    changes["virtual_stage_s"] = framework.virtual_stage_s + factors.virtual_stage_s
    changes["step_overhead_s"] = framework.step_overhead_s + factors.step_overhead_s
    return replace(framework, **changes)


def _shared(shared: dict[str, float], factors: Factors) -> dict[str, float]:
    changes = {}
    for medium in _NETWORKS:
        name = f"{medium}_fraction"
        changes[name] = shared[name] * factors.network
    name = "all_to_all_scale_up_fraction"
    changes[name] = shared[name] * factors.scale_up * factors.exchange
    changes["grouped_gemm_factor"] = shared["grouped_gemm_factor"] * factors.grouped_gemm
    return shared | changes
