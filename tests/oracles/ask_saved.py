"""What autograd keeps of a decoder layer of transformers' Llama, with or without PEFT's adapters, on a CPU.

usage: ask_saved.py CASES.json
CASES.json is a list of {"model": dimensions of LlamaConfig, "tokens", "targets": matrices with LoRA or null,
"rank", "dora", "autocast"}. Without autocast all parameters have 16 bits, as FSDP hands them over. A JSON
line per case: bytes of the tensors that the layer saves for its backward pass, without weights and casts.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

ANSWER = "answer "


def built(case: dict[str, Any]) -> tuple[Any, Any]:
    """The model, and its second layer."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(**case["model"], num_hidden_layers=2, vocab_size=512, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    if case["targets"] is None:
        return model, model.model.layers[1]
    lora = peft.LoraConfig(
        r=case["rank"], target_modules=case["targets"], use_dora=case["dora"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, lora)
    if not case["autocast"]:
        model = model.to(torch.bfloat16)
    model.enable_input_require_grads()
    return model, model.base_model.model.model.layers[1]


def saved_bytes(case: dict[str, Any]) -> int:
    """Of storages that the second layer saves and that have an entry for each token."""
    import torch

    model, layer = built(case)
    tokens = case["tokens"]
    within: list[bool] = []
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    held = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if within and tokens in tensor.shape and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    layer.register_forward_pre_hook(lambda *_: within.append(True))
    layer.register_forward_hook(lambda *_: within.clear())
    ids = torch.randint(0, 512, (1, tokens))
    narrow = torch.autocast("cpu", dtype=torch.bfloat16, enabled=case["autocast"])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), narrow:
        model(input_ids=ids, labels=ids)
    return sum(kept.values())


def main() -> None:
    """Answers each case."""
    warnings.filterwarnings("ignore")
    for case in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        print(ANSWER + json.dumps(saved_bytes(case)), flush=True)


if __name__ == "__main__":
    main()
