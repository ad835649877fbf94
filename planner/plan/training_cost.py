"""What a whole training takes: days, GPU hours, dollars and kWh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InputError
from meshwright.planner.plan.document import CostDoc, Plan, TrainingCost

SECONDS_PER_DAY = 86_400.0
SECONDS_PER_HOUR = 3600.0
FEWEST_TOKENS = 10_000
"""Of a training: fewer are a slip of the unit."""
_MOST = {"tokens": 1e18, "days": 1e6, "gpu_hour_price": 1e6}
COST_FIELDS = ("tokens", "days", "gpu_hour_price")
"""What is asked, by the names of options, jobs and arguments."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What is to be trained, by when and at which price. Raises InputError for an impossible number."""

    tokens: float | None = None
    """Of the whole training."""
    days: float | None = None
    """With tokens the deadline; without, how long is trained."""
    gpu_hour_price: float | None = None
    """Dollars; the cluster file's when None."""

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            least = 0.0 if name == "gpu_hour_price" else 1e-9
            if value is not None and not least <= value <= most:
                what = f"must be {'at least' if least == 0 else 'more than'} 0 and at most {most:g}"
                raise InputError(what, where=f"--{name.replace('_', '-')}", value=value)
        if self.tokens is not None and self.tokens < FEWEST_TOKENS:
            typed = f"{self.tokens:g}"
            what = f"counts single tokens: {typed} T are {typed}e12, {typed} B are {typed}e9"
            raise InputError(what, where="--tokens", value=self.tokens)

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Budget:
        """From options by name; others are left alone.

        Parameters
        ----------
        fields
            Values by name, `COST_FIELDS` among them; one that is not there is not asked for.
        """
        return Budget(**{name: fields.get(name) for name in COST_FIELDS})

    @property
    def unanswered(self) -> str | None:
        """What is missing to a price that was asked for; None where nothing is."""
        if self.gpu_hour_price is None or self.tokens is not None or self.days is not None:
            return None
        return "a price of a GPU hour says nothing by itself: how much is trained? Give --tokens or --days"

    def cost(self, tokens_per_s: float, gpus: int, cluster: ClusterSpec) -> CostDoc | None:
        """What the training takes at a speed.

        Parameters
        ----------
        tokens_per_s
            Of all GPUs together, above 0.
        gpus
            That are paid for.
        cluster
            With the GPUs' board power, and their price where none is given.

        Returns
        -------
        CostDoc or None
            None where neither tokens nor days are asked for.
        """
        tokens = self.tokens
        if tokens is None:
            if self.days is None:
                return None
            tokens = self.days * SECONDS_PER_DAY * tokens_per_s
        price = self.price(cluster)
        plan = training_cost(tokens, tokens_per_s, gpus, cluster, price)
        deadline = self.days if self.tokens is not None else None
        return CostDoc(
            tokens=tokens,
            gpu_hour_price=price,
            days_asked=deadline,
            in_time=None if deadline is None else plan.days <= deadline * (1 + 1e-9),
            gpu_power_w=cluster.device.tdp_w,
            plan=plan,
        )

    def price(self, cluster: ClusterSpec) -> float | None:
        """Dollars of a GPU hour: as given, else as the cluster file says.

        Parameters
        ----------
        cluster
            With `usd_per_gpu_hour`, where it says any.
        """
        return cluster.usd_per_gpu_hour if self.gpu_hour_price is None else self.gpu_hour_price


def training_cost(
    tokens: float, tokens_per_s: float, gpus: int, cluster: ClusterSpec, price: float | None
) -> TrainingCost:
    """Days, GPU hours, dollars and kWh of a training.

    Parameters
    ----------
    tokens, tokens_per_s
        Of the whole training, and of all GPUs together in a second.
    gpus
        That are paid for, whether the layout uses them or not.
    cluster
        Its device's board power (`tdp_w`, of the vendor's datasheet) is what each GPU draws all the time: a
        bound from above for the GPUs; hosts, network and cooling are left out.
    price
        Dollars of a GPU hour; None where that is not known.
    """
    seconds = tokens / tokens_per_s
    gpu_hours = gpus * seconds / SECONDS_PER_HOUR
    return TrainingCost(
        days=seconds / SECONDS_PER_DAY,
        gpu_hours=gpu_hours,
        dollars=None if price is None else gpu_hours * price,
        kwh=gpu_hours * cluster.device.tdp_w / 1000,
    )


def with_cost(plan: Plan, budget: Budget) -> Plan:
    """A plan with what the training takes, or with a warning that this cannot be said; as it is without a
    layout or where nothing is asked.

    Parameters
    ----------
    plan
        Of any status, with its inputs' GPUs and cluster.
    budget
        What was asked.
    """
    if plan.predicted is None:
        return plan
    if budget.unanswered is not None:
        return plan.model_copy(update={"warnings": [*plan.warnings, budget.unanswered]})
    inputs = plan.inputs
    tokens_per_s = inputs.tokens_per_step / plan.predicted.step_time_s
    cost = budget.cost(tokens_per_s, inputs.gpus, inputs.cluster)
    return plan if cost is None else plan.model_copy(update={"cost": cost})


def cost_figures(
    budget: Budget, figures: Mapping[str, Any], cluster: ClusterSpec
) -> dict[str, Any]:
    """The same as columns of a row of results: tokens, days, gpu_hours, dollars, kwh, days_late.

    Parameters
    ----------
    budget
        What was asked.
    figures
        Of a plan, with `tokens_per_s` and `gpus`.
    cluster
        Its own.

    Returns
    -------
    dict
        Empty where there is no plan, or nothing is asked.
    """
    tokens_per_s, gpus = figures.get("tokens_per_s"), figures.get("gpus")
    if not tokens_per_s or not gpus:
        return {}
    cost = budget.cost(tokens_per_s, gpus, cluster)
    if cost is None:
        return {}
    late = None if cost.days_asked is None else max(0.0, cost.plan.days - cost.days_asked)
    return {"tokens": cost.tokens, **cost.plan.model_dump(), "days_late": late}
