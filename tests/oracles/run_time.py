"""What fails after the parser: pieces of each framework's own start, with a plan's numbers, on a CPU.

Imported by ask.py, in the oracles' environment. `start_*` raises what the framework would raise while it
builds the model or takes the first step; it returns where the framework would go on. Process groups are
torch's fake ones, so no tensor is larger than it must be and nothing is sent.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

Facts = dict[str, Any]
"""Fields of the layout and torch's name of its schedule; seq_len; of the model: heads, kv_heads, widths of
feed-forward blocks, expert_width and experts (0 without), layers."""


class Passed(Exception):
    """The framework got past the checks that are asked here."""


class GoesOn:
    """Stands in for an object; whoever asks more of it than it was given has passed the checks."""

    def __init__(self, **known: Any) -> None:
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        raise Passed(name)


def unless_refused(call: Callable[[], Any]) -> None:
    try:
        call()
    except Passed:
        return


def start_megatron(facts: Facts) -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
    from megatron.core.transformer.moe.moe_layer import MoELayer

    group = parallel_state.get_tensor_model_parallel_group()
    config = ModelParallelConfig(
        tensor_model_parallel_size=facts["tp"],
        pipeline_model_parallel_size=facts["pp"],
        virtual_pipeline_model_parallel_size=facts["vpp"] if facts["vpp"] > 1 else None,
        expert_model_parallel_size=facts["ep"],
        expert_tensor_parallel_size=facts["etp"],
        sequence_parallel=facts["sequence_parallel"],
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    layer = {"config": config, "init_method": lambda weight: weight, "bias": False}
    for width in facts["widths"]:
        ColumnParallelLinear(1, width, tp_group=group, **layer)
    if facts["expert_width"]:
        experts = parallel_state.get_expert_tensor_parallel_group()
        ColumnParallelLinear(1, facts["expert_width"], tp_group=experts, is_expert=True, **layer)
        stand_in = GoesOn(training=True, attn_tp_group=group, config=config)
        unless_refused(lambda: MoELayer.forward(stand_in, torch.empty(1)))
    if facts["sequence_parallel"]:
        scatter_to_sequence_parallel_region(
            torch.empty(facts["seq_len"] // facts["cp"], 1, 1), group=group
        )
    if facts["vpp"] > 1:
        unless_refused(lambda: _megatron_interleaved_schedule(facts, config))


def _megatron_interleaved_schedule(facts: Facts, config: Any) -> None:
    import torch
    from megatron.core.pipeline_parallel import schedules

    class Chunk(torch.nn.Module):
        @property
        def model_type(self) -> Any:
            raise Passed

    chunk, zeros = Chunk(), torch.zeros
    chunk.config = config
    config.microbatch_group_size_per_vp_stage = facts["pp"]

    def on_cpu(*size: Any, device: object = None, **more: Any) -> Any:
        del device
        return zeros(*size, **more)

    with mock.patch("torch.zeros", on_cpu):
        schedules.forward_backward_pipelining_with_interleaving(
            forward_step_func=None,
            data_iterator=[None] * facts["vpp"],
            model=[chunk] * facts["vpp"],
            num_microbatches=facts["num_micro_batches"],
            seq_length=facts["seq_len"],
            micro_batch_size=facts["micro_batch"],
        )


def start_torchtitan(facts: Facts) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed.pipeline_parallel import (
        _build_pipeline_schedule,
        _get_pp_rank_to_stage_indices_mapping,
    )

    _split_feed_forward(facts)
    if facts["pp"] == 1:
        return
    world = facts["pp"] * facts["dp"] * facts["cp"] * facts["tp"]
    mesh = init_device_mesh(
        "cpu", (facts["pp"], world // facts["pp"]), mesh_dim_names=("pp", "rest")
    )
    total, group, name = facts["pp"] * facts["vpp"], mesh["pp"].get_group(), facts["torch_schedule"]
    stages = [
        PipelineStage(torch.nn.Linear(1, 1), index, total, torch.device("cpu"), group=group)
        for index in _get_pp_rank_to_stage_indices_mapping(0, facts["pp"], name, total)
    ]
    _build_pipeline_schedule(
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=facts["pp"],
            pipeline_parallel_schedule=name,
            pipeline_parallel_microbatch_size=facts["micro_batch"],
        ),
        local_batch_size=facts["micro_batch"] * facts["num_micro_batches"],
        stages=stages,
        loss_fn=lambda *_: (torch.zeros(()), None),
    )


def _split_feed_forward(facts: Facts) -> None:
    """A feed-forward block split as torchtitan and transformers split it, and one step through it."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    if facts["tp"] == 1:
        return
    world = facts["pp"] * facts["dp"] * facts["cp"] * facts["tp"]
    mesh = init_device_mesh(
        "cpu", (world // facts["tp"], facts["tp"]), mesh_dim_names=("rest", "tp")
    )
    for width in facts["widths"]:
        block = torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Linear(width, 1))
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        block(torch.zeros(1, 1)).sum()


def start_deepspeed(facts: Facts) -> None:
    import numpy as np
    import torch
    from deepspeed.moe.layer import MoE
    from deepspeed.runtime.utils import partition_balanced
    from deepspeed.utils import groups

    if facts["experts"]:
        MoE(1, torch.nn.Linear(1, 1), num_experts=facts["experts"], ep_size=facts["ep"])
        world = facts["dp"] * facts["tp"] * facts["pp"]
        told = types.SimpleNamespace(
            is_initialized=lambda: True,
            get_world_size=lambda *_: world,
            get_rank=lambda *_: 0,
            new_group=lambda ranks: None,
        )
        with mock.patch.object(groups, "dist", told), mock.patch.object(groups, "log_dist"):
            groups._create_expert_and_data_parallel(facts["ep"], pp_size=facts["pp"])
    if facts["pp"] > 1:
        unless_refused(lambda: _deepspeed_pipeline_engine(facts))
        # As PipelineModule with partition_method type:transformer: weight 1 for layers, 0 for all else.
        weights = [0, 0, *[1] * facts["layers"], 0, 0, 0]
        bounds = partition_balanced(weights, facts["pp"])
        split = [int(np.sum(weights[a:b])) for a, b in itertools.pairwise(bounds)]
        if split != [sum(rank) for rank in facts["stages"]]:
            raise ValueError(f"DeepSpeed splits the layers {split}, the plan {facts['stages']}")


def _deepspeed_pipeline_engine(facts: Facts) -> None:
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.pipe.module import PipelineModule

    class Module(PipelineModule):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    class Engine(PipelineEngine):
        def zero_optimization_stage(self) -> int:
            return int(facts["zero_stage"])

        def train_micro_batch_size_per_gpu(self) -> int:
            raise Passed

    def without_the_rest(self: Any, *_: Any, **__: Any) -> None:
        torch.nn.Module.__init__(self)
        self.module = Module()
        self.optimizer = None

    with mock.patch.object(DeepSpeedEngine, "__init__", without_the_rest):
        Engine()


def start_accelerate(facts: Facts) -> None:
    import torch
    from accelerate.parallelism_config import ParallelismConfig
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    sizes = {f"{axis}_size": facts[axis] for axis in ("tp", "cp")}
    world = facts["tp"] * facts["cp"] * facts["dp"]
    accelerator = GoesOn(
        multi_device=world > 1,
        num_processes=world,
        is_fsdp2=True,
        distributed_type="FSDP",
        state=None,
    )
    groups = facts["shard_groups"]
    config = ParallelismConfig(
        dp_replicate_size=groups, dp_shard_size=facts["dp"] // groups, **sizes
    )
    unless_refused(lambda: config._validate_accelerator(accelerator))
    _split_feed_forward(facts)
    shape = (facts["dp"], facts["cp"], facts["tp"])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp"))
    if facts["tp"] > 1:
        _split_transformers_attention(facts, mesh["tp"])
    if facts["cp"] > 1:
        tokens = torch.zeros(1, facts["seq_len"])
        with context_parallel(mesh["cp"], buffers=[tokens], buffer_seq_dims=[1]):
            pass


def _split_transformers_attention(facts: Facts, mesh: Any) -> None:
    """Llama's attention in transformers, split by its own plan, with the model's numbers of heads."""
    import torch
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    config = LlamaConfig(
        hidden_size=facts["heads"],
        num_attention_heads=facts["heads"],
        num_key_value_heads=facts["kv_heads"],
        head_dim=8,
        attn_implementation="eager",
    )
    whole = torch.nn.Module()
    whole.self_attn = LlamaAttention(config, 0)
    styles = {f"self_attn.{name}_proj": "colwise" for name in "qkv"} | {
        "self_attn.o_proj": "rowwise"
    }
    # Weights are sharded as they are loaded, by the same styles; here there is nothing to load.
    plan = {f"{name}.weight": style for name, style in styles.items()} | styles
    apply_tensor_parallelism(whole, mesh, plan)
    turn = (torch.ones(1, 2, 8), torch.zeros(1, 2, 8))
    whole.self_attn(
        torch.zeros(1, 2, facts["heads"]), position_embeddings=turn, attention_mask=None
    )
