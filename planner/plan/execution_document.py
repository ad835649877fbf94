"""The execution of a plan in its document: the settings, and what each choice brings."""

from __future__ import annotations

from dataclasses import asdict

from pydantic import BaseModel, ConfigDict

from meshwright.costmodel.execution import Execution
from meshwright.costmodel.execution_names import (
    ContextExchange,
    Dispatcher,
    GraphScope,
    StateType,
)

_DOC = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ExecutionDoc(BaseModel):
    """How the plan is run; `meshwright.costmodel.execution.Execution` has the meanings."""

    model_config = _DOC

    moe_dispatch: Dispatcher = "alltoall"
    ep_overlap: bool = False
    tp_overlap: bool = False
    dp_overlap: bool = False
    pp_overlap: bool = False
    cuda_graph: GraphScope = "none"
    cp_comm: ContextExchange = "p2p"
    compiled: bool = False
    gradient_dtype: StateType | None = None
    moment_dtype: StateType = "fp32"
    fp8_params: bool = False
    fp8_attention: bool = False
    te_loss: bool | None = None


class ExecutionChoice(BaseModel):
    """One choice that differs from plain, and the best plan without it."""

    model_config = _DOC

    choice: str
    value: str | bool
    step_time_s_without: float | None
    """Of the fastest plan with the plain value of this choice; null where none was found."""
    proven: bool
    """Whether no plan without it is faster than that."""
    installs: str = ""
    """What has to be installed beside the framework."""


def execution_document(execution: Execution) -> ExecutionDoc:
    """The settings as a document."""
    return ExecutionDoc(**asdict(execution))


def execution_of(document: ExecutionDoc | None) -> Execution | None:
    """The settings of a document; None where it has none."""
    return None if document is None else Execution(**document.model_dump())
