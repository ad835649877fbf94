"""The interleaved schedule: when it exists, and which micro-batch counts it takes."""

from __future__ import annotations

from meshwright.constraints.kinds import AtMost, Divides, When, of
from meshwright.costmodel.pipeline.schedules import Schedule, traits

IN_GROUPS = tuple(int(schedule) for schedule in Schedule if traits(schedule).in_groups)
"""Schedules whose micro-batches go round in groups of pp."""

INTERLEAVING_NEEDS_PIPELINE = AtMost(
    name="vpp-needs-pp",
    sentence="vpp <= 1 where pp = 1",
    unit="virtual stages",
    when=(When("pp", most=1),),
    value=of("vpp"),
    words="vpp {vpp} with a single pipeline stage",
    remedy="Set vpp to 1, or raise pp to 2 or more.",
)
"""Megatron (core 0.19.2, training/arguments.py) refuses it. torchtitan and DeepSpeed build no pipeline at
pp 1, so the plan would not be what runs."""

INTERLEAVED_MICRO_BATCHES = Divides(
    name="interleaved-micro-batches",
    sentence="num_micro_batches mod pp = 0 where vpp > 1, for interleaved 1F1B and ZB-H1",
    unit="micro-batches left over",
    when=(When("vpp", least=2), When("schedule", among=IN_GROUPS)),
    number=of("num_micro_batches"),
    by=of("pp"),
    words="the interleaved schedule cannot run {number} micro-batches on {pp} stages",
    remedy="Make the micro-batches a multiple of {pp} (change dp or micro_batch), or set vpp to 1.",
)
"""Micro-batches go round in groups; a last, smaller group must still fill the pipeline. With groups of pp,
the default, that leaves multiples of pp only (`forward_backward_pipelining_with_interleaving` in
megatron-core 0.19, schedules.py). PyTorch's ScheduleInterleaved1F1B, which torchtitan uses, also takes
larger rounds of equal size (6 on 4 stages; torch 2.13, distributed/pipelining/schedules.py): left out by
choice, the cost model prices rounds of pp."""
