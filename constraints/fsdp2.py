"""What accelerate with PyTorch FSDP2 has settings for (read in accelerate 1.15.0)."""

from __future__ import annotations

from constraints.pipeline_schedules import AllowedSchedules
from constraints.rule import Rule
from constraints.unsupported import AllowedPrecisions, AllowedValues, WholeModelRecompute

RULES: tuple[Rule, ...] = (
    AllowedSchedules("fsdp2"),
    AllowedValues(
        "fsdp2-degrees",
        "fsdp2",
        {
            "pp": (1,),
            "vpp": (1,),
            "ep": (1,),
            "etp": (1,),
            "zero_stage": (2, 3),
            "sequence_parallel": (0,),
        },
        "Keep pp, vpp, ep and etp at 1 and sequence parallelism off; shard with fsdp_reshard_after_forward "
        "false (2) or true (3).",
    ),
    AllowedPrecisions("fsdp2", ("bf16", "fp16", "fp8")),
    WholeModelRecompute("fsdp2"),
)
