"""How a sequence is cut: by context parallelism, and again by sequence parallelism."""

from __future__ import annotations

from meshwright.constraints.kinds import Divides, Requires, When, of

SEQUENCE_BY_CONTEXT = Divides(
    name="sequence-by-cp",
    sentence="seq_len mod 2 cp = 0 where cp > 1",
    unit="tokens left over",
    when=(When("cp", least=2),),
    number=of(number=lambda work: work.seq_len),
    by=of("cp", number=2),
    words="{number} tokens do not divide into the {divisor} chunks of cp {cp}",
    remedy="Take a cp of which twice divides {number}, or pad the sequences.",
)
"""Each rank takes one chunk from the front and one from the back, which evens out the causal mask. Megatron
and torchtitan refuse anything else. PyTorch (2.13, experimental/_context_parallel/_load_balancer.py), which
accelerate uses, silently falls back to plain chunks, of unequal length where cp does not divide the
sequence: left out by choice, the cost model prices equal work."""

SEQUENCE_BY_TENSOR = Divides(
    name="sequence-by-tp",
    sentence="seq_len mod (tp cp) = 0 under sequence parallelism",
    unit="tokens left over",
    when=(When("sequence_parallel", least=1),),
    number=of(number=lambda work: work.seq_len),
    by=of("tp", "cp"),
    words="{number} tokens do not divide by tp {tp} x cp {cp} under sequence parallelism",
    remedy="Take tp and cp whose product divides {number}, or turn sequence parallelism off.",
)

SEQUENCE_PARALLEL_NEEDS_TENSOR = Requires(
    name="sequence-parallel-needs-tp",
    sentence="tp > 1 where sequence parallelism is on: tp = 1 has nothing to share",
    unit="switches",
    when=(When("sequence_parallel", least=1),),
    needs=When("tp", least=2),
    words="sequence parallelism is on at tp 1, where it does nothing",
    remedy="Turn it off, or raise tp to 2 or more.",
)
