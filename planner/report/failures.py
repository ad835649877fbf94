"""What a user is told of an exception."""

from __future__ import annotations

from meshwright.cluster_specs.errors import ClusterError
from meshwright.documents.output_files import LaunchError
from meshwright.model_specs.errors import SpecError
from meshwright.planner.experts.problem import ExpertError
from meshwright.planner.report.validation_plot import PlotError
from meshwright.planner.request.plan_request import RequestError


def message_of(error: Exception) -> tuple[str, bool]:
    """(what to tell, whether it is a fault of the program and not of the input)."""
    if isinstance(
        error, SpecError | ClusterError | RequestError | LaunchError | ExpertError | PlotError
    ):
        return str(error), False
    if isinstance(error, OSError) and error.strerror:
        return (f"{error.filename}: " if error.filename else "") + error.strerror, False
    words = "This is a fault in meshwright, not in your input; --debug shows where it happened."
    return f"internal error, {type(error).__name__}: {error}. {words}", True
