"""What has to be installed beside the framework before a plan can run."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.costmodel.execution import Execution
from meshwright.frameworks.catalog import framework_named
from meshwright.frameworks.layer_needs import layer_needs
from meshwright.frameworks.record import Framework, Setting, TokenDispatcher
from meshwright.planner.plan.document import SoftwareNeed
from meshwright.planner.request.executions import choices_made
from meshwright.planner.request.inputs import PlanInputs
from meshwright.planner.runs.predicted import LayoutDoc


def software_needs(
    inputs: PlanInputs, layout: LayoutDoc, execution: Execution
) -> list[SoftwareNeed]:
    """Software beside the framework that a plan needs, by what needs it, whoever chose it.

    Parameters
    ----------
    inputs
        What was asked for: the framework, the model, the precision and the pins.
    layout, execution
        Of the plan.

    Returns
    -------
    list of SoftwareNeed
        Kinds of layers, the precision, execution choices, then what was allowed to change the numbers.
    """
    framework = framework_named(inputs.framework)
    needs = [
        SoftwareNeed(software=packages, needed_by=kind)
        for kind, packages in layer_needs(framework, inputs.model).items()
    ]
    precision = framework.precisions[inputs.precision].installs
    if precision:
        needs.append(SoftwareNeed(software=precision, needed_by=inputs.precision))
    for choice, value in _values(layout, execution):
        setting = choice_setting(framework, choice, value)
        software = "" if setting is None else _software(setting, inputs, layout)
        if software:
            needs.append(
                SoftwareNeed(
                    software=software,
                    needed_by=f"{choice}={value}",
                    choice=choice,
                    pinned=choice in inputs.pins,
                )
            )
    for name in _numbers_changed(execution):
        if framework.numerics[name].installs:
            needs.append(SoftwareNeed(software=framework.numerics[name].installs, needed_by=name))
    return needs


def _software(setting: Setting, inputs: PlanInputs, layout: LayoutDoc) -> str:
    """What a setting needs: of a dispatcher more, where experts are shared beyond a scale-up domain."""
    beyond = layout.ep * layout.etp > inputs.cluster.nvlink_domain
    if beyond and isinstance(setting, TokenDispatcher) and setting.installs_between:
        return setting.installs_between
    return setting.installs


def choice_setting(framework: Framework, choice: str, value: str) -> Setting | None:
    """What a framework's record says of one value of a choice; None where it says nothing.

    `choice` is a name of `choices_made`, `shard_groups` or `optimizer_offload`; `value` as it is pinned.
    """
    settings: dict[str, Setting | None] = {
        "fp8_recipe": framework.numerics.get("delayed-scaling"),
        "offload_modules": framework.offloads.get("activations"),
        "shard_groups": framework.shard_groups,
        "optimizer_offload": framework.optimizer_offload,
        "compiled": framework.compilation,
    }
    if choice in settings:
        return settings[choice]
    if choice == "moe_dispatch":
        return framework.dispatchers.get(value)
    if choice == "cuda_graph":
        return framework.cuda_graphs[value]
    if choice == "cp_comm":
        return framework.context_exchanges[value]
    return framework.overlaps[choice.removesuffix("_overlap")]


def _values(layout: LayoutDoc, execution: Execution) -> Iterator[tuple[str, str]]:
    """Choices that differ from plain, with their values as they are pinned."""
    for choice, value in choices_made(execution).items():
        yield choice, "on" if value is True else str(value)
    if layout.optimizer_offload > 0:
        yield "optimizer_offload", str(layout.optimizer_offload)


def _numbers_changed(execution: Execution) -> Iterator[str]:
    """Names in `--allow` of the types and kernels that an execution uses."""
    used = {
        "bf16-grads": execution.gradient_dtype == "bf16",
        "bf16-moments": execution.moment_dtype == "bf16",
        "fp8-params": execution.fp8_params,
        "fp8-attention": execution.fp8_attention,
        "te-loss": execution.te_loss is True,
    }
    return (name for name, is_used in used.items() if is_used)
