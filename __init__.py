"""Plans how to train a large model on a GPU cluster, proven optimal within a stated cost model.

>>> import meshwright
>>> meshwright.read_model("llama-3-8b").layers
32

docs/api.md shows the rest. The names below are imported when they are first used, so that `import meshwright`
costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.api import (
        calibrate,
        catalog,
        collective,
        compress,
        estimate,
        explain,
        fleet,
        launch,
        map,
        memory,
        model,
        overlap,
        pipeline,
        place_experts,
        plan,
        plan_batch,
        plan_mixed,
        read_topology,
        recommend,
        report,
        roofline,
        save,
        schema,
        trace,
        traffic,
        validate,
        verify_plan,
        verify_plans,
        volumes,
    )
    from meshwright.cluster_specs.reader import read_cluster
    from meshwright.cluster_specs.schema import ClusterSpec
    from meshwright.errors import InfeasibleError, InputError, MeshwrightError
    from meshwright.model_specs.reader import read_model
    from meshwright.model_specs.schema import ModelSpec
    from meshwright.planner.launch.compare import compare
    from meshwright.planner.many.sweep import sweep
    from meshwright.planner.plan.document import Plan
    from meshwright.planner.plan.make_plan import make_plan
    from meshwright.planner.plan.texts import read_plan
    from meshwright.planner.request.plan_request import PlanRequest

    __version__: str

__all__ = [
    "ClusterSpec",
    "InfeasibleError",
    "InputError",
    "MeshwrightError",
    "ModelSpec",
    "Plan",
    "PlanRequest",
    "__version__",
    "calibrate",
    "catalog",
    "collective",
    "compare",
    "compress",
    "estimate",
    "explain",
    "fleet",
    "launch",
    "make_plan",
    "map",
    "memory",
    "model",
    "overlap",
    "pipeline",
    "place_experts",
    "plan",
    "plan_batch",
    "plan_mixed",
    "read_cluster",
    "read_model",
    "read_plan",
    "read_topology",
    "recommend",
    "report",
    "roofline",
    "save",
    "schema",
    "sweep",
    "trace",
    "traffic",
    "validate",
    "verify_plan",
    "verify_plans",
    "volumes",
]

_OUTSIDE_API = {
    "ClusterSpec": "cluster_specs.schema",
    "InfeasibleError": "errors",
    "InputError": "errors",
    "MeshwrightError": "errors",
    "ModelSpec": "model_specs.schema",
    "Plan": "planner.plan.document",
    "PlanRequest": "planner.request.plan_request",
    "compare": "planner.launch.compare",
    "make_plan": "planner.plan.make_plan",
    "read_cluster": "cluster_specs.reader",
    "read_model": "model_specs.reader",
    "read_plan": "planner.plan.texts",
    "sweep": "planner.many.sweep",
}
"""Modules of the names that `meshwright.api` does not have."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in __all__:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    module = import_module(f"meshwright.{_OUTSIDE_API.get(name, 'api')}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("meshwright")
    except metadata.PackageNotFoundError:
        return "not installed as a package"
