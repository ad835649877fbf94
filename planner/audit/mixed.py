"""What `meshwright verify` looks at of a plan on a mixed cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import InfeasibleError
from meshwright.planner.audit.checks import Check, checked, edit_faults, version_faults
from meshwright.planner.audit.launch_files import file_faults, launch_file_faults
from meshwright.planner.audit.stated_figures import stated_figure_faults
from meshwright.planner.launch.mixed_files import pipeline_files, stand_in
from meshwright.planner.mixed.document import MixedPlan
from meshwright.planner.mixed.verify import mixed_faults
from meshwright.planner.plan.texts import read_plan


def mixed_checks(plan: MixedPlan, folder: Path | None) -> Iterator[Check]:
    """One check each of the document, versions, edits by hand, prices and rules, and launch files.

    Parameters
    ----------
    plan
        Of any status.
    folder
        Where its launch files are; None where there are none.
    """
    yield Check(name="document", broken=())
    yield Check(name="versions", broken=tuple(version_faults(plan.solver)))
    yield Check(name="edits by hand", broken=tuple(edit_faults(plan)))
    yield checked("prices and rules", lambda: mixed_faults(plan))
    if folder is None or not plan.runs_on:
        yield Check(name="launch files", broken=None)
    elif plan.layout is not None:
        yield checked("launch files", lambda: _pipeline_file_faults(plan, folder))
    else:
        yield checked("plan of the part alone", lambda: _part_faults(plan, folder / "plan.yaml"))
        yield checked("launch files", lambda: _part_file_faults(folder))


def _pipeline_file_faults(plan: MixedPlan, folder: Path) -> Iterator[str]:
    """Where the files do not start the pipeline, the order of hosts in the template included."""
    try:
        expected = pipeline_files(plan)
    except InfeasibleError as error:
        yield f"these files cannot start the plan: {error}"
        return
    yield from file_faults(stand_in(plan), expected, folder)


def _part_faults(plan: MixedPlan, file: Path) -> Iterator[str]:
    """What is wrong with the plan of the part that is fastest alone, or sets it apart from what is stated."""
    own = read_plan(file)
    yield from edit_faults(own)
    yield from stated_figure_faults(own)
    if own.objective.step_time_s != plan.objective.step_time_s:
        yield (
            f"{file.name}: {own.objective.step_time_s} s a step, the mixed plan says "
            f"{plan.objective.step_time_s} s"
        )
    devices = [each.device for each in plan.alone if each.part in plan.runs_on]
    if [own.inputs.cluster.device.name] != devices:
        yield f"{file.name}: on {own.inputs.cluster.device.name}, the mixed plan says {devices}"


def _part_file_faults(folder: Path) -> Iterator[str]:
    file = folder / "plan.yaml"
    yield from launch_file_faults(read_plan(file), file, folder)
