"""Parameters of the model that a framework's own builder makes of launch files, on the meta device.

Used by ask.py. No memory is taken: every weight is a shape. GPU streams are pretended, Transformer Engine is
not there: Megatron builds of its local layers, which hold the same weights. Experts are counted on one of
`EXPERT_RANKS` ranks and multiplied.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

EXPERT_RANKS = 8
_NO_STREAM = type("NoStream", (), {"__init__": lambda self, *a, **k: None})
_NOT_LOCAL = (
    "persist_layer_norm",
    "apply_rope_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "layernorm_zero_centered_gamma",
    "masked_softmax_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "perform_initialization",
)
"""Kernels that Megatron's local layers do without; none has weights of its own."""


def import_megatron_built() -> None:
    ask = importlib.import_module("ask")
    ask.import_megatron()
    import torch

    torch.cuda.Stream = _NO_STREAM
    torch.cuda.current_device = lambda: "meta"
    # Layers with Gated DeltaNet ask for its kernels as they are made.
    net = "megatron.core.ssm.gated_delta_net"
    importlib.import_module(f"{net}.common").HAVE_FLA = True
    importlib.import_module(f"{net}.gdn").chunk_gated_delta_rule = len
    folder = "megatron.core.models.gpt"
    variants = importlib.import_module(f"{folder}.experimental_attention_variant_module_specs")
    variants._get_backend_spec_provider = _local_modules
    specs = importlib.import_module(f"{folder}.gpt_layer_specs")

    def local_spec(**named: Any) -> Any:
        """The layer of the mixed models that attends in full."""
        known = ("num_experts", "moe_grouped_gemm", "qk_layernorm", "multi_latent_attention")
        settings = {name: named[name] for name in known}
        return specs.get_gpt_layer_local_spec(**settings, normalization="RMSNorm")

    specs.get_gpt_layer_with_transformer_engine_spec = local_spec
    attention = importlib.import_module("megatron.core.transformer.dot_product_attention")
    unfused = attention.DotProductAttention
    make = unfused.__init__

    def init(self: Any, *more: Any, k_channels: int = 0, v_channels: int = 0, **named: Any) -> None:
        """Attention without weights, whose widths only Transformer Engine's kernel takes."""
        del k_channels, v_channels
        make(self, *more, **named)

    unfused.__init__ = init


def _local_modules(config: Any) -> Any:
    """Megatron's local modules; its norm fused into a product is a product with a norm's weight."""
    del config
    import torch
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class NormedLinear(ColumnParallelLinear):
        def __init__(self, input_size: int, *more: Any, **named: Any) -> None:
            super().__init__(input_size, *more, **named)
            self.layer_norm_weight = torch.nn.Parameter(torch.empty(input_size))

    class WholeLinear(torch.nn.Module):
        """Transformer Engine's product that every tensor rank holds whole."""

        def __init__(self, input_size: int, output_size: int, **named: Any) -> None:
            super().__init__()
            del named
            self.weight = torch.nn.Parameter(torch.empty(output_size, input_size))

    variants = "megatron.core.transformer.experimental_attention_variant"
    importlib.import_module(f"{variants}.absorbed_mla").TELinear = WholeLinear

    class Modules(LocalSpecProvider):
        def linear(self) -> type:
            return WholeLinear

        def column_parallel_layer_norm_linear(self) -> type:
            return NormedLinear

    return Modules()


def ask_megatron_built(case: dict[str, Any]) -> dict[str, Any]:
    ask = importlib.import_module("ask")
    ask.pretend_gpu(case["arch"])
    os.environ.update(WORLD_SIZE=str(EXPERT_RANKS), RANK="0", LOCAL_RANK="0", NO_VCS_VERSION="1")
    import torch
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import argument_utils, arguments
    from megatron.training.models import GPTModelBuilder

    flags = ask.read(case, "megatron_args.json")
    ranks = EXPERT_RANKS if "--num-experts" in flags else 1
    more = ["--use-cpu-initialization", "--expert-model-parallel-size", str(ranks)]
    sys.argv = ["pretrain_gpt.py", *flags, *more]
    args = arguments.parse_args()
    arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    ask.fake_group(EXPERT_RANKS)
    parallel_state.initialize_model_parallel(
        create_gloo_process_groups=False, expert_model_parallel_size=ranks
    )
    config = argument_utils.core_transformer_config_from_args(args)
    use_local_layers(config)
    builder = GPTModelBuilder(argument_utils.gpt_config_from_args(args, config))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with torch.device("meta"):
        model = builder.build_model(groups, pre_process=True, post_process=True)
    return counts(model, ranks)


def use_local_layers(config: Any) -> None:
    """Makes a configuration of Megatron's ask for layers that a CPU can build."""
    config.transformer_impl = "local"
    for name in _NOT_LOCAL:
        setattr(config, name, False)


def import_torchtitan_built() -> None:
    importlib.import_module("ask").import_torchtitan()


def ask_torchtitan_built(case: dict[str, Any]) -> dict[str, Any]:
    ask = importlib.import_module("ask")
    ask.pretend_gpu(case["arch"])
    import torch
    from torchtitan.config.manager import ConfigManager

    sys.path.insert(0, case["dir"])
    os.environ["WORLD_SIZE"] = str(case["world"])
    *flags, subcommand = ask.read(case, "torchtitan_args.json")
    config = ConfigManager().parse_args([*flags, subcommand])
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    return counts(model, 1)


def import_transformers_built() -> None:
    importlib.import_module("transformers")


def ask_transformers_built(case: dict[str, Any]) -> dict[str, Any]:
    """What a training script builds of a config.json: its language part, alone or `inside` what reads
    images, or the `whole` of the latter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    document = json.loads(Path(case["file"]).read_text(encoding="utf-8"))
    config = AutoConfig.for_model(**document)
    inside = case.get("inside", False)
    with torch.device("meta"):
        if inside or case.get("whole", False):
            model = AutoModelForImageTextToText.from_config(config)
        else:
            model = AutoModelForCausalLM.from_config(config.get_text_config())
    if inside:
        # Of one tensor under two names, such as a tied head, parameters() has the first alone.
        inner = model.model
        text = getattr(inner, "language_model", None) or inner.text_model
        model = torch.nn.ModuleList([text, model.lm_head])
    return counts(model, 1)


def import_transformers_saved() -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("llama").to_json_string()


def ask_transformers_saved(case: dict[str, Any]) -> dict[str, Any]:
    """A config.json as `save_pretrained` writes it once transformers has read it."""
    from transformers import AutoConfig

    path = Path(case["file"])
    config = AutoConfig.for_model(**json.loads(path.read_text(encoding="utf-8")))
    saved = path.with_name(f"saved-{path.name}")
    saved.write_text(config.to_json_string(use_diff=True), encoding="utf-8")
    return {"file": str(saved)}


def counts(model: Any, expert_ranks: int) -> dict[str, Any]:
    """Weights, and the routers' balance biases, which the frameworks keep among the buffers."""
    weights = sum(
        weight.numel() * (1 if getattr(weight, "allreduce", True) else expert_ranks)
        for weight in model.parameters()
    )
    biases = sum(
        buffer.numel()
        for name, buffer in model.named_buffers()
        if name.endswith(("expert_bias", "e_score_correction_bias", "expert_bias_E"))
    )
    return {"weights": weights, "balance_biases": biases}


def import_peft_built() -> None:
    importlib.import_module("peft")


def ask_peft_built(case: dict[str, Any]) -> dict[str, Any]:
    """Parameters that PEFT trains beside what transformers builds of a config.json."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    document = json.loads(Path(case["file"]).read_text(encoding="utf-8"))
    config = AutoConfig.for_model(**document).get_text_config()
    with torch.device("meta"):
        model = get_peft_model(
            AutoModelForCausalLM.from_config(config),
            LoraConfig(
                r=case["rank"],
                target_modules=case["targets"],
                task_type="CAUSAL_LM",
                use_dora=case.get("decomposed", False),
            ),
        )
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return {
        "trained": sum(weight.numel() for weight in trained.values()),
        "matrices": sorted({name.split(".lora_")[0].split(".")[-1] for name in trained}),
    }
