"""The band of an optimum: how far the fastest measured steps lie from plans, by how near measured runs are.

A search picks the layout that the cost model flatters most (Smith and Winkler 2006, "The optimizer's curse",
Management Science 52(3)), so that the band of measured runs, which nobody picked by this model, is too narrow
for it. `costmodel/data/optimum_bands.yaml` has plans against the fastest measured step of the same work;
docs/recipes.md explains it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from meshwright.costmodel.layout import AXES, Layout, Recompute
from meshwright.costmodel.records import ErrorBand, data_table, device_class
from meshwright.costmodel.workload import Workload

TABLE = "optimum_bands.yaml"
Support = Literal["together", "apart", "unmeasured"]
"""Whether the settings of a plan were measured in one run, each in some run, or not all of them."""
ENOUGH_RUNS = 3
"""Measured runs that make a setting, or several together, count as measured."""
SUPPORT_WORDS: dict[Support, str] = {
    "together": "settings measured together",
    "apart": "settings measured, but not together",
    "unmeasured": "with a setting that was not measured there",
}
KINDS_OF_MODEL = {"dense": "without experts", "experts": "with experts"}
OTHER_CLASS = "other"
"""Devices that nobody has published runs of."""


def priced_settings(workload: Workload, layout: Layout) -> frozenset[str]:
    """What of a run beside the sizes of its groups has a price, in words.

    Parameters
    ----------
    workload : Workload
        Precision and execution choices.
    layout : Layout
        One layout.

    Returns
    -------
    frozenset of str
        Axes in use, recomputation, precision, CUDA graphs, dispatcher, overlaps, sharding and offload, and
        the optimizer where it is not Adam.
    """
    return frozenset(_words(workload, layout))


def _words(workload: Workload, layout: Layout) -> Iterator[str]:
    yield f"precision {workload.precision}"
    recompute = int(layout.recompute)
    full = bool(recompute & Recompute.FULL)
    yield f"recompute {'full' if full else 'selective' if recompute else 'none'}"
    for axis in (*AXES, "vpp"):
        if axis != "dp" and int(getattr(layout, axis)) > 1:
            yield axis
    if workload.cuda_graph != "none":
        yield f"cuda_graph {workload.cuda_graph}"
    if int(layout.ep) > 1:
        named = workload.moe_dispatch in ("alltoall", "allgather")
        # Sources rarely say which of DeepEP and HybridEP they ran.
        yield f"moe_dispatch {workload.moe_dispatch if named else 'deduplicated'}"
        if workload.ep_overlap:
            yield "ep_overlap"
    if int(layout.tp) > 1 and workload.tp_overlap:
        yield "tp_overlap"
    if int(layout.zero_stage) > 1:
        yield f"zero_stage {int(layout.zero_stage)}"
    if workload.optimizer != "adam":
        yield f"optimizer {workload.optimizer}"
    on_host = workload.offload_modules != "none" or workload.offload_parameters
    if int(layout.optimizer_offload) or on_host:
        yield "offload"


def support_of(
    settings: frozenset[str], measured: Iterable[tuple[frozenset[str], int]]
) -> tuple[Support, int]:
    """How near measured runs lie to a run with some settings.

    Parameters
    ----------
    settings : frozenset of str
        `priced_settings` of the run.
    measured : iterable of (frozenset of str, int)
        Settings of runs on this class of device with this kind of model, and how many runs had them.

    Returns
    -------
    tuple of (str, int)
        The support, and the number of runs that had all of the settings.
    """
    runs = list(measured)
    together = sum(count for own, count in runs if settings <= own)
    if together >= ENOUGH_RUNS:
        return "together", together
    each = (sum(count for own, count in runs if word in own) for word in settings)
    return ("apart" if all(count >= ENOUGH_RUNS for count in each) else "unmeasured"), together


def measured_settings(device: str | None, kind: str) -> list[tuple[frozenset[str], int]]:
    """Settings of published runs on a class of devices with a kind of model.

    Parameters
    ----------
    device : str or None
        As `device_class` gives it; None has no runs.
    kind : str
        `model_kind` of the model.

    Returns
    -------
    list of (frozenset of str, int)
        Settings, and how many runs had them.
    """
    rows = data_table(TABLE)["measured"].get(device, {}).get(kind, [])
    return [(frozenset(row["settings"]), int(row["runs"])) for row in rows]


def model_kind(workload: Workload) -> str:
    """Whether a model has experts, as the tables name it.

    Parameters
    ----------
    workload : Workload
        Its model is used.

    Returns
    -------
    str
        dense or experts.
    """
    return "dense" if workload.model.moe is None else "experts"


def optimum_band(workload: Workload, layout: Layout, of_runs: ErrorBand) -> ErrorBand:
    """How far the fastest measured step may lie from a plan that a search picked.

    Parameters
    ----------
    workload : Workload
        Run as the plan is.
    layout : Layout
        The plan's.
    of_runs : ErrorBand
        Of measured runs of this device class and framework, whoever picked them.

    Returns
    -------
    ErrorBand
        Measured over predicted: the lower of both lower ends and the larger of both upper ends, of measured
        runs and of plans with as much support.
    """
    device, kind = device_class(workload.cluster.device.name), model_kind(workload)
    settings = priced_settings(workload, layout)
    support, _ = support_of(settings, measured_settings(device, kind))
    record = data_table(TABLE)["bands"][device or OTHER_CLASS][kind][support]
    return ErrorBand(
        low=min(of_runs.low, record["low"]),
        high=max(of_runs.high, record["high"]),
        rows=record["groups"],
        basis=f"the fastest measured steps over plans of {record['groups']} groups: {record['basis']}",
    )
