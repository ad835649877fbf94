"""Megatron-Bridge's own override parser, on the fields that its classes have. Used by ask.py.

The package itself imports Transformer Engine and does not load on a CPU. Its override parser does; the fields
come from the classes of megatron-core where Bridge inherits them, and from Bridge's source, read and not run.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

ZERO_STAGES = {"optim_grads": 2, "optim_grads_params": 3}
PACKAGES = ("bridge", "bridge.training", "bridge.training.utils", "bridge.utils")


def bridge_folder() -> Path:
    megatron = importlib.import_module("megatron")
    return next(
        Path(path) / "bridge" for path in megatron.__path__ if (Path(path) / "bridge").is_dir()
    )


def import_bridge() -> None:
    importlib.import_module("ask").import_megatron()
    importlib.import_module("megatron.training.config")
    for name in PACKAGES:
        package = types.ModuleType(f"megatron.{name}")
        package.__path__ = [str(bridge_folder().parent / name.replace(".", "/"))]
        sys.modules[f"megatron.{name}"] = package
    importlib.import_module("megatron.bridge.training.utils.omegaconf_utils")


def own_fields(file: str, name: str) -> set[str]:
    """Annotated names in the body of a class of Bridge."""
    tree = ast.parse((bridge_folder() / file).read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        line.target.id
        for line in found.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def recipes() -> set[str]:
    """Names under which Bridge registers its mixed precisions."""
    tree = ast.parse((bridge_folder() / "training/mixed_precision.py").read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(one, ast.Name) and one.id == "register" for one in node.decorator_list)
    }


def sections(hybrid: bool) -> dict[str, set[str]]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig
    from megatron.training.config import CheckpointConfig, DistributedInitConfig, TrainingConfig

    inherited = {
        "model": MLATransformerConfig,
        "train": TrainingConfig,
        "ddp": DistributedDataParallelConfig,
        "optimizer": OptimizerConfig,
        "dist": DistributedInitConfig,
        "checkpoint": CheckpointConfig,
    }
    fields = {
        name: {one.name for one in dataclasses.fields(kind)} for name, kind in inherited.items()
    }
    provider = ("models/gpt_provider.py", "GPTModelProvider")
    if hybrid:
        provider = ("models/hybrid/hybrid_provider.py", "HybridModelProvider")
    fields["model"] |= own_fields(*provider)
    fields["dataset"] = own_fields("training/config.py", "GPTDatasetConfig")
    fields["comm_overlap"] = own_fields("training/comm_overlap.py", "CommOverlapConfig")
    container = own_fields("training/config.py", "ConfigContainer")
    missing = {*fields, "mixed_precision"} - container
    if missing:
        raise ValueError(f"ConfigContainer has no {missing}")
    return fields


def ask_bridge(case: dict[str, Any]) -> dict[str, Any]:
    from megatron.bridge.training.utils.omegaconf_utils import parse_hydra_overrides
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from omegaconf import OmegaConf

    overrides = json.loads(
        (Path(case["dir"]) / "bridge_overrides.json").read_text(encoding="utf-8")
    )
    hybrid = any("hybrid_layer_pattern" in override for override in overrides)
    known: dict[str, Any] = {
        section: dict.fromkeys(names) for section, names in sections(hybrid).items()
    }
    by_fields = any(override.startswith("mixed_precision.") for override in overrides)
    named = any(override.startswith("mixed_precision=") for override in overrides)
    precision = own_fields("training/mixed_precision.py", "MixedPrecisionConfig")
    known["mixed_precision"] = dict.fromkeys(precision) if by_fields else None
    # The parser refuses fields that the configuration does not have.
    read = parse_hydra_overrides(OmegaConf.create(known), overrides)
    if named and read.mixed_precision not in recipes():
        raise ValueError(f"{read.mixed_precision} is no mixed precision of Bridge")
    model = read.model
    answer = {
        "tp": model.tensor_model_parallel_size,
        "pp": model.pipeline_model_parallel_size,
        "cp": model.context_parallel_size,
        "ep": model.expert_model_parallel_size or 1,
        "etp": model.expert_tensor_parallel_size or 1,
        "sequence_parallel": model.sequence_parallel,
        "zero_stage": ZERO_STAGES.get(
            read.ddp.data_parallel_sharding_strategy if read.ddp.use_megatron_fsdp else None,
            int(bool(read.ddp.use_distributed_optimizer)),
        ),
        "micro_batch": read.train.micro_batch_size,
    }
    text = model.pipeline_model_parallel_layout
    if text is None:
        return answer | {"vpp": model.virtual_pipeline_model_parallel_size or 1}
    layout = PipelineParallelLayerLayout.from_str(text, answer["pp"])
    chunks = layout.virtual_pipeline_model_parallel_size
    stages = [[chunk.count(LayerType.decoder) for chunk in rank] for rank in layout.layout]
    return answer | {"vpp": chunks, "stages": stages}
