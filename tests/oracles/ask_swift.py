"""What ms-swift's `megatron` commands make of swift.yaml: Megatron-Core's configurations. Used by ask.py.

mcore-bridge, which makes that of the model, imports Transformer Engine: empty modules stand in for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def import_swift() -> None:
    importlib.import_module("ask").pretend_gpu(9)
    sys.argv = ["swift"]
    stand = importlib.import_module("ask_bridge_built").Stand
    sys.meta_path.insert(0, stand(("transformer_engine", "transformer_engine_torch")))
    engine = importlib.import_module("transformer_engine.pytorch.optimizers")
    vars(importlib.import_module("transformer_engine"))["__version__"] = "2.14.0"
    vars(engine)["FusedAdam"] = _Adam
    importlib.import_module("swift.megatron.arguments")
    importlib.import_module("swift.cli.main")


class _Adam:
    """What Megatron-Core asks of Transformer Engine's Adam before moments may be narrow."""

    def __init__(
        self,
        params: Any,
        master_weight_dtype: Any = None,
        exp_avg_dtype: Any = None,
        exp_avg_sq_dtype: Any = None,
        use_decoupled_grad: bool = False,
    ) -> None: ...


def ask_swift(case: dict[str, Any]) -> dict[str, Any]:
    """The layout and execution that Megatron-Core is told; of `kinds`, files, whether it has such a model."""
    if "kinds" in case:
        bridge = importlib.import_module("mcore_bridge.model")
        kinds = [json.loads(Path(file).read_text())["model_type"] for file in case["kinds"]]
        return {"built": [bridge.get_mcore_model_type(kind) is not None for kind in kinds]}
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import AdamOptimizerConfig
    from megatron.core.transformer.enums import LayerType
    from swift.megatron.model.utils import get_mcore_model_config

    read = _read(case)
    hf = importlib.import_module("transformers").AutoConfig.from_pretrained(case["model"])
    bridge = importlib.import_module("mcore_bridge.model")
    read.megatron_model_meta = bridge.get_model_meta(bridge.get_mcore_model_type(hf.model_type))
    importlib.import_module("ask").fake_group(case["world"])
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=read.tensor_model_parallel_size,
        pipeline_model_parallel_size=read.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=read.virtual_pipeline_model_parallel_size,
        context_parallel_size=read.context_parallel_size,
        expert_model_parallel_size=read.expert_model_parallel_size,
        expert_tensor_parallel_size=read.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    config = get_mcore_model_config(read, hf)
    # As wrap_model and get_optimizer_and_scheduler do it, by the names of the fields.
    ddp, optimizer = (
        kind(
            **{
                f.name: getattr(read, f.name)
                for f in dataclasses.fields(kind)
                if hasattr(read, f.name)
            }
        )
        for kind in (DistributedDataParallelConfig, AdamOptimizerConfig)
    )
    pp, layout = config.pipeline_model_parallel_size, config.pipeline_model_parallel_layout
    stages = (
        [[chunk.count(LayerType.decoder) for chunk in rank] for rank in layout.layout]
        if layout
        else None
    )
    dp = parallel_state.get_data_parallel_world_size()
    selective = config.recompute_granularity == "selective"
    return {
        "tp": config.tensor_model_parallel_size,
        "pp": pp,
        "vpp": config.virtual_pipeline_model_parallel_size or 1,
        "cp": config.context_parallel_size,
        "dp": dp,
        "ep": config.expert_model_parallel_size,
        "etp": config.expert_tensor_parallel_size,
        **({} if stages is None else {"stages": stages}),
        "sequence_parallel": config.sequence_parallel,
        "zero_stage": int(ddp.use_distributed_optimizer),
        "micro_batch": read.micro_batch_size,
        "num_micro_batches": read.global_batch_size // (read.micro_batch_size * dp),
        "optimizer_offload": round(100 * optimizer.optimizer_offload_fraction)
        if optimizer.optimizer_cpu_offload
        else 0,
        "recompute": config.recompute_granularity or "none",
        "execution": {
            "modules": sorted(config.recompute_modules) if selective else [],
            "dp_overlap": ddp.overlap_grad_reduce,
            "tp_overlap": config.tp_comm_overlap,
            "ep_overlap": config.overlap_moe_expert_parallel_comm,
            "pp_overlap": config.overlap_p2p_comm,
            "cuda_graph": config.cuda_graph_impl,
            "fp8_params": bool(ddp.fp8_param_gather or ddp.fp4_param_gather),
            "moment_dtype": str(optimizer.exp_avg_dtype).removeprefix("torch."),
            "gradients_at_32_bits": read.accumulate_allreduce_grads_in_fp32,
            "dispatch": [
                config.moe_token_dispatcher_type,
                config.moe_token_dispatcher_type == "flex"
                and config.moe_flex_dispatcher_backend == "deepep",
            ],
            "precision": config.fp8_recipe if config.fp8 else config.fp4 and config.fp4_recipe,
            "seq_len": read.max_length,
            "optimizer": optimizer.optimizer,
            "fusions": [
                config.cross_entropy_loss_fusion,
                config.apply_rope_fusion,
                config.moe_permute_fusion or not config.num_moe_experts,
            ],
        },
    }


def _read(case: dict[str, Any]) -> Any:
    """swift.yaml by the command's own parser, finished as its class does beside the look for the model."""
    kinds = importlib.import_module("swift.megatron.arguments")
    kind = {
        "pt": kinds.MegatronPretrainArguments,
        "sft": kinds.MegatronSftArguments,
        "rlhf": kinds.MegatronRLHFArguments,
    }[case["command"]]
    words = [str(Path(case["dir"]) / "swift.yaml")]
    importlib.import_module("swift.cli.main").parse_yaml_args(words)
    parser = importlib.import_module("transformers").HfArgumentParser(kind)
    read = argparse.ArgumentParser.parse_args(parser, words)
    os.environ["WORLD_SIZE"] = str(case["world"])
    if read.recompute_granularity == "none":
        read.recompute_granularity = None
    read.fp8, read.fp4 = read.fp8_format, read.fp4_format
    if read.megatron_extra_kwargs:
        read.megatron_extra_kwargs = json.loads(read.megatron_extra_kwargs)
    read.task_type = read.task_type or "causal_lm"
    for step in ("_init_vpp_size", "_map_dtype", "_init_attention_backend", "_check_megatron_fsdp"):
        getattr(kind, step)(read)
    return read
