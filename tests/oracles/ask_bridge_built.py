"""Parameters of the model that Megatron-Bridge makes of a config.json, on the meta device. Used by ask.py.

Bridge imports Transformer Engine and other packages that a CPU has not: empty modules stand in for them.
Bridge's own conversion gives the configuration, megatron-core builds it of its local layers.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_ABSENT = (
    "causal_conv1d",
    "mamba_ssm",
    "modelopt",
    "multistorageclient",
    "nvidia_resiliency_ext",
    "qwen_vl_utils",
    "timm",
    "transformer_engine",
    "transformer_engine_torch",
)


class _Class(type):
    """A class of which every attribute can be asked."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Class(name, (), {})


class _Empty(types.ModuleType):
    """A module of which every name can be imported: classes in capitals, modules otherwise."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].islower():
            value: Any = _Empty(f"{self.__name__}.{name}")
        else:
            value = _Class(name, (), {"__init__": lambda self, *a, **k: None})
        setattr(self, name, value)
        return value

    def __call__(self, *given: Any, **named: Any) -> Any:
        """As a decorator: leaves the function as it is."""
        return given[0] if given and callable(given[0]) else None


class Stand(MetaPathFinder, Loader):
    """Finds an empty module for each of these packages and what is in them."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] in self.packages:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        del module


def import_bridge_built() -> None:
    # transformers 5.24 lacks modeling_attn_mask_utils, which Megatron-Bridge 0.6.2 imports.
    sys.path.insert(0, str(Path(sys.prefix) / "for_bridge"))
    importlib.import_module("ask_built").import_megatron_built()
    importlib.import_module("ask").pretend_gpu(9)
    sys.meta_path.append(Stand(_ABSENT))
    importlib.import_module("megatron.bridge")


def ask_bridge_built(case: dict[str, Any]) -> dict[str, Any]:
    built = importlib.import_module("ask_built")
    os.environ.update(WORLD_SIZE=str(built.EXPERT_RANKS), RANK="0", LOCAL_RANK="0")
    import torch
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.training.vocab_utils import calculate_padded_vocab_size
    from transformers import AutoConfig

    document = json.loads(Path(case["file"]).read_text(encoding="utf-8"))
    config = AutoConfig.for_model(**document)
    config.architectures = document["architectures"]
    model = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    built.use_local_layers(model)
    model.use_cpu_initialization = True
    ranks = built.EXPERT_RANKS if model.num_moe_experts else 1
    model.expert_model_parallel_size = ranks
    model.finalize()
    importlib.import_module("ask").fake_group(built.EXPERT_RANKS)
    parallel_state.initialize_model_parallel(
        create_gloo_process_groups=False, expert_model_parallel_size=ranks
    )
    layers = specs.get_gpt_decoder_block_spec(
        model, use_transformer_engine=False, normalization=model.normalization
    )
    modules = None
    if model.mtp_num_layers:
        modules = specs.get_gpt_mtp_block_spec(model, layers, use_transformer_engine=False)
    vocab = model.vocab_size
    if model.should_pad_vocab:
        vocab = calculate_padded_vocab_size(vocab, model.make_vocab_size_divisible_by, 1)
    with torch.device("meta"):
        network = GPTModel(
            config=model,
            transformer_layer_spec=layers,
            mtp_block_spec=modules,
            vocab_size=vocab,
            max_sequence_length=model.seq_length,
            share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
            position_embedding_type=model.position_embedding_type,
            rotary_base=model.rotary_base,
        )
    answer: dict[str, Any] = built.counts(network, ranks)
    return answer
