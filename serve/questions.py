"""What the page may ask, checked before anything is planned, and the names that it offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from meshwright.cluster_specs.reader import (
    cluster_names,
    is_mixed_cluster,
    load_cluster,
    not_in_catalog,
    read_cluster,
)
from meshwright.constraints.fabric import INSIDE_DOMAIN
from meshwright.costmodel.execution_names import OPTIMIZERS, PRECISIONS
from meshwright.documents import validation_message
from meshwright.errors import InputError, near_miss
from meshwright.frameworks.catalog import FRAMEWORK_NAMES
from meshwright.model_specs.adapters import EVERY_PARAMETER, TRAINED
from meshwright.model_specs.reader import catalog_names, hub_names, read_model
from meshwright.planner.launch.plan_files import TARGETS
from meshwright.planner.many.jobs import JobDoc
from meshwright.planner.request.choices import (
    CHOICES,
    FORBIDS,
    PERMISSIONS,
    WITHOUT,
)

LONGEST_S = 60.0
"""Seconds that one search may be asked to take."""
USUAL_S = 30.0
MOST_SIZES = 12
"""Numbers of GPUs in one picture."""


class PlanQuestion(JobDoc):
    """A job without files: the options of `meshwright plan` by their names."""

    name: None = None
    calibration: None = None
    """A file of this machine, which a page cannot name."""
    time_limit: Annotated[float, Field(ge=1, le=LONGEST_S)] = USUAL_S
    top: Annotated[int, Field(ge=1, le=20)] = 5
    train: str = EVERY_PARAMETER
    lora_rank: int | None = None
    lora_targets: Annotated[str, Field(max_length=400)] | None = None
    robustness: bool = True
    """Whether the plan is searched again with the cost model off by its measured error."""


class SizesQuestion(PlanQuestion):
    """A plan at each of some numbers of GPUs."""

    sizes: Annotated[
        tuple[Annotated[int, Field(ge=1, le=1_048_576)], ...], Field(max_length=MOST_SIZES)
    ] = ()
    """From an eighth of `gpus` to four times as many when empty."""

    @model_validator(mode="after")
    def _has_a_size(self) -> Self:
        if self.gpus is None and not self.sizes:
            raise ValueError("give gpus or sizes: around which numbers of GPUs?")
        return self


class FewestQuestion(PlanQuestion):
    """The fewest GPUs, at most `gpus`, that reach a target."""

    step_time_s: Annotated[float, Field(gt=0, lt=1e18)] | None = None
    tokens_per_s: Annotated[float, Field(gt=0, lt=1e18)] | None = None
    by_days: bool = False
    """Whether `days` are the target: those in which `tokens` are to be trained."""

    @model_validator(mode="after")
    def _has_a_target(self) -> Self:
        if self.train != EVERY_PARAMETER:
            raise ValueError("train: the fewest GPUs are searched with every parameter trained")
        if self.by_days and self.days is None:
            raise ValueError("give days: in how many are the tokens to be trained?")
        if not self.by_days and self.step_time_s is None and self.tokens_per_s is None:
            raise ValueError("give a target: step_time_s, tokens_per_s, or by_days with days")
        return self


class FilesQuestion(BaseModel):
    """What is made of a plan that was found before."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: Annotated[str, Field(max_length=32)]
    """What the answer with the plan is called."""
    target: Annotated[str, Field(max_length=32)] = ""
    """As `meshwright launch --target`; the plan's own framework when empty."""


class CompareQuestion(BaseModel):
    """Two plans that were found before."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: Annotated[str, Field(max_length=32)]
    second: Annotated[str, Field(max_length=32)]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Models and clusters that may be asked about: those of the catalog, and files named at the start."""

    models: Mapping[str, str]
    """By name, what `read_model` takes for it."""
    clusters: Mapping[str, str]
    """By name, what `read_cluster` takes for it."""

    @staticmethod
    def of_files(models: Sequence[Path] = (), clusters: Sequence[Path] = ()) -> Offer:
        """The catalog, and models and clusters of files before it. Raises InputError for a bad file."""
        for cluster in clusters:
            if is_mixed_cluster(cluster):
                what = "a cluster with parts is planned by `meshwright plan` alone"
                raise InputError(what, where="--cluster", value=str(cluster))
        own_models = {read_model(path).name: str(path.absolute()) for path in models}
        own_clusters = {read_cluster(path).name: str(path.absolute()) for path in clusters}
        names = (*catalog_names(), *hub_names())
        return Offer(
            models={**own_models, **{name: name for name in names if name not in own_models}},
            clusters={
                **own_clusters,
                **{name: name for name in cluster_names() if name not in own_clusters},
            },
        )

    def resolved(self, question: PlanQuestion) -> dict[str, Any]:
        """The fields of a question with what its names stand for.

        Raises
        ------
        InputError
            For a name that is not offered: a path of this machine is none.
        """
        if question.model not in self.models:
            raise InputError(
                "neither in the catalog nor named at the start (--model FILE)",
                where="model",
                value=question.model,
                did_you_mean=near_miss(question.model, self.models),
            )
        if question.cluster not in self.clusters:
            raise not_in_catalog("cluster", question.cluster, tuple(self.clusters))
        named = {
            "model": self.models[question.model],
            "cluster": self.clusters[question.cluster],
        }
        return {**question.model_dump(), **named}

    def document(self) -> dict[str, Any]:
        """Everything that the page's controls offer."""
        return {
            "models": list(self.models),
            "clusters": [self._cluster(name) for name in self.clusters],
            "frameworks": list(FRAMEWORK_NAMES),
            "precisions": list(PRECISIONS),
            "optimizers": list(OPTIMIZERS),
            "train": list(TRAINED),
            "targets": list(TARGETS),
            "pins": [
                {
                    "name": choice.name,
                    "title": choice.title,
                    "of": choice.of,
                    "words": list(choice.words),
                    "low": choice.low,
                    "high": choice.high,
                }
                for choice in CHOICES
                if choice.is_pinned
            ],
            "words": {
                "forbid": list(FORBIDS),
                "without": list(WITHOUT),
                "allow": list(PERMISSIONS),
                "inside_domain": list(INSIDE_DOMAIN),
            },
            "limits": {"time_limit": LONGEST_S, "usual_s": USUAL_S, "sizes": MOST_SIZES},
        }

    def _cluster(self, name: str) -> dict[str, Any]:
        own = self.clusters[name]
        cluster = load_cluster(name) if own == name else read_cluster(own)
        return {
            "name": name,
            "device": cluster.device.name,
            "gpus": cluster.gpus,
            "any_size": cluster.elastic,
            "gpus_per_node": cluster.gpus_per_node,
        }


Kind = TypeVar("Kind", bound=BaseModel)


def read_question(kind: type[Kind], fields: Mapping[str, object]) -> Kind:
    """A question as the page sends it. Raises InputError, a line for each mistake."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise InputError(validation_message(error, "question", kind)) from None
