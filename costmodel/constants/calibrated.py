"""The constants of a workload with what the user's own runs say of them."""

from __future__ import annotations

from dataclasses import replace

from meshwright.costmodel.constants.calibration import Factors
from meshwright.costmodel.constants.measured import ErrorBand, error_band, memory_band
from meshwright.costmodel.constants.rates import (
    Constants,
    DeviceConstants,
    constants_for,
)
from meshwright.costmodel.constants.stacks import FrameworkConstants
from meshwright.costmodel.workload import Workload

_GEMM = ("gemm_fraction_16bit", "gemm_fraction_fp8", "gemm_fraction_mxfp8", "gemm_fraction_fp4")
_ATTENTION = (
    "attention_forward_fraction",
    "attention_flash1_fraction",
    "attention_flash2_fraction",
)
_LAUNCHES = ("launch_layer_s", "launch_moe_layer_s", "piece_launch_s", "moe_sync_s")
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
        Of the user's own runs where they are of this device and framework.
    """
    device, calibration = workload.cluster.device.name, workload.calibration
    own = None
    if calibration is not None and calibration.covers(device, workload.framework):
        own = calibration.band("step_time")
    return own or error_band(device, workload.framework)


def peak_memory_band(workload: Workload) -> ErrorBand:
    """How far measured peaks of memory lie from predicted ones.

    Parameters
    ----------
    workload : Workload
        Its framework and its calibration are used.

    Returns
    -------
    ErrorBand
        Of the user's own runs where they are of this framework and say how much memory they took.
    """
    calibration = workload.calibration
    own = None
    if calibration is not None and calibration.runs_as(workload.framework):
        own = calibration.band("memory")
    return own or memory_band()


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
    changes = {name: getattr(device, name) * factors.gemm for name in _GEMM}
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
    changes["step_overhead_s"] = framework.step_overhead_s + factors.step_overhead_s
    return replace(framework, **changes)


def _shared(shared: dict[str, float], factors: Factors) -> dict[str, float]:
    changes = {}
    for medium in _NETWORKS:
        name = f"{medium}_fraction"
        changes[name] = shared[name] * factors.network
    name = "all_to_all_scale_up_fraction"
    changes[name] = shared[name] * factors.scale_up
    return shared | changes
