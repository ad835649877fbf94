"""Which number formats a device multiplies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.workload import Workload

ARCHITECTURES = {
    "fp16": {"volta", "ampere", "ada", "hopper", "blackwell", "blackwell-rtx", "cdna3", "cdna4"},
    "bf16": {"ampere", "ada", "hopper", "blackwell", "blackwell-rtx", "cdna3", "cdna4"},
    "fp8": {"ada", "hopper", "blackwell", "blackwell-rtx", "cdna3", "cdna4"},
    "mxfp8": {"blackwell"},
    "nvfp4": {"blackwell"},
}
"""By number format: the architectures that multiply it."""


def is_narrow(workload: Workload) -> bool:
    """Whether products take numbers of fewer than 16 bits."""
    return workload.precision not in ("bf16", "fp16")


class PrecisionOnDevice(Rule):
    """bf16 from Ampere on, fp8 on Ada, Hopper, Blackwell, CDNA 3 and 4, mxfp8 and nvfp4 on Blackwell."""

    name = "precision-on-device"
    unit = "formats"
    of_workload = True

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        architecture = table.workload.cluster.device.architecture
        supported = architecture in ARCHITECTURES.get(table.workload.precision, set())
        return as_excess(np.full_like(column(table, "tp"), 0 if supported else 1))

    def check(self, plan: FinishedPlan) -> Finding | None:
        device, wanted = plan.workload.cluster.device, plan.workload.precision
        formats = ["fp16"]
        if device.architecture != "volta":
            formats.append("bf16")
        if device.architecture not in ("volta", "ampere"):
            formats.append("fp8")
        if device.architecture == "blackwell":
            formats += ["mxfp8", "nvfp4"]
        if wanted in formats:
            return None
        return self.finding(
            value=1,
            words=f"{device.name} ({device.architecture}) has no {wanted} matrix units",
            remedy=f"Choose one of {', '.join(formats)}, or another device.",
        )
