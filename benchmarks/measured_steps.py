"""Measures the steps of a run file on this machine's GPU: PyTorch, transformers and PEFT, one GPU, random weights.

`python -m benchmarks.measured_steps RUNS.yaml -o MEASURED.yaml` runs each row as it stands and writes the same rows
with `measured`: the median step and the peak that PyTorch's allocator handed out. Adapters are trained by
transformers' Trainer; full training by FSDP2 as torchtitan wraps it, a unit and a compiled graph for each layer, or
by DeepSpeed. Needs a GPU, torch, transformers, accelerate and peft; bitsandbytes for qlora, liger-kernel and trl for
their losses, torchao for FP8, deepspeed for its rows.
Speed and memory of a step do not depend on the values of dense weights, so none are downloaded.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from meshwright.frameworks.deepspeed import DEEPSPEED
from meshwright.frameworks.torchtitan import TORCHTITAN
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.runs.run_file import Run, read_runs

WARM_UPS = 2
STEPS = 4
GIB = 2.0**30


@contextmanager
def _timed_steps(torch: Any, times: list[float]) -> Iterator[Callable[[], None]]:
    """A function to call after each optimizer step; seconds between the calls are added to `times`."""
    began = [time.perf_counter()]

    def done() -> None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        times.append(now - began[0])
        began[0] = now

    yield done


def llama_of(model: ModelSpec) -> Any:
    """The configuration of transformers' Llama with a dense model's dimensions.

    Raises
    ------
    ValueError
        For a model that Llama's architecture cannot say.
    """
    from transformers import LlamaConfig

    if model.moe or model.activation != "swiglu" or model.position != "rope":
        raise ValueError(f"{model.name}: only dense models of Llama's architecture are measured")
    return LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.ffn_hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim or model.hidden // model.heads,
        vocab_size=model.vocab,
        tie_word_embeddings=model.tied_embeddings,
        attention_bias=model.attention_bias,
        max_position_embeddings=2**18,
        use_cache=False,
    )


def built(torch: Any, model: ModelSpec, dtype: Any) -> Any:
    """The model with random weights on the GPU, attention by PyTorch's own kernels."""
    from transformers import AutoModelForCausalLM

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            return AutoModelForCausalLM.from_config(llama_of(model), attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)


def quantised(torch: Any, model: Any) -> Any:
    """Every linear layer but the head in NF4 with double quantisation, as QLoRA has them."""
    import bitsandbytes

    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear) or name.endswith("lm_head"):
            continue
        narrow = bitsandbytes.nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compute_dtype=torch.bfloat16,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        narrow.weight = bitsandbytes.nn.Params4bit(
            module.weight.data.cpu(), requires_grad=False, quant_type="nf4"
        )
        narrow.bias = module.bias
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, narrow.to("cuda"))
        module.weight = None
    model.is_loaded_in_4bit = True
    return model


def adapted(torch: Any, run: Run, settings: dict[str, Any]) -> Any:
    """The model of a run with its adapters, by PEFT."""
    import peft

    adapters = run.workload.adapters
    assert adapters is not None
    model = built(torch, run.workload.model, torch.bfloat16)
    if adapters.method.startswith("q"):
        model = quantised(torch, model)
    wanted = [target for target in settings["adapters"]["targets"] if target != "all-linear"]
    config = peft.LoraConfig(
        r=adapters.rank,
        lora_alpha=2 * adapters.rank,
        target_modules=wanted or "all-linear",
        use_dora="dora" in adapters.method,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def trained_adapters(torch: Any, run: Run, settings: dict[str, Any]) -> list[float]:
    """Seconds of each step of transformers' Trainer over random tokens."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    if settings.get("loss") == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(
            rope=False,
            rms_norm=False,
            swiglu=False,
            cross_entropy=False,
            fused_linear_cross_entropy=True,
        )
    workload, layout = run.workload, run.layout
    model = adapted(torch, run, settings)
    recomputed = settings.get("recompute") == "full"
    if recomputed:
        model.enable_input_require_grads()
    passes = layout.num_micro_batches
    samples = layout.micro_batch * passes * (WARM_UPS + STEPS)
    tokens = torch.randint(0, workload.model.vocab, (samples, workload.seq_len))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    times: list[float] = []
    with _timed_steps(torch, times) as done, tempfile.TemporaryDirectory() as folder:

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                torch.cuda.reset_peak_memory_stats()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                done()

        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=layout.micro_batch,
            gradient_accumulation_steps=passes,
            max_steps=WARM_UPS + STEPS,
            bf16=True,
            gradient_checkpointing=recomputed,
            gradient_checkpointing_kwargs={"use_reentrant": False} if recomputed else None,
            optim="adamw_torch_fused",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Clock()]).train()
    return times


def _loss_of(
    torch: Any, model: Any, settings: dict[str, Any], compiled: bool
) -> Callable[[Any], Any]:
    """The loss of a micro-batch of tokens: on all logits in FP32, or by TRL's head in tiles."""
    if settings.get("loss") == "fused-head":
        from trl.kernels import ChunkedLogProbFunction

        def in_tiles(input_ids: Any) -> Any:
            hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
            # 32,768 entries of the vocabulary at once, as trl/trainer/utils.py has it.
            scored = hidden.flatten(0, 1), model.lm_head.weight, None, input_ids.flatten()
            return -ChunkedLogProbFunction.apply(*scored, 1.0, 2**15, None, 1.0, ())[0].mean()

        # FSDP gathers what is around the layers when the model itself is called.
        model.forward = in_tiles
        return lambda tokens: model(input_ids=tokens)

    def cross_entropy(logits: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    if compiled:
        cross_entropy = torch.compile(cross_entropy)

    def on_logits(tokens: Any) -> Any:
        return cross_entropy(model(input_ids=tokens).logits, tokens)

    return on_logits


def _narrowed(torch: Any, layer: Any, settings: dict[str, Any]) -> None:
    """The linear layers in FP8 by torchao, where a row asks for it."""
    if settings.get("precision") != "fp8":
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = settings.get("fp8_recipe", "tensorwise").replace("-", "_")
    convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe))


def _stepped(
    torch: Any, run: Run, run_pass: Callable[[Any], None], update: Callable[[], None]
) -> list[float]:
    """Seconds of each step over random tokens: a pass of every micro-batch, then the update."""
    workload, layout = run.workload, run.layout
    shape = (layout.micro_batch, workload.seq_len)
    times: list[float] = []
    with _timed_steps(torch, times) as done:
        for _ in range(WARM_UPS + STEPS):
            for _ in range(layout.num_micro_batches):
                run_pass(torch.randint(0, workload.model.vocab, shape, device="cuda"))
            update()
            done()
    return times


def _group_of_one(torch: Any) -> None:
    """Makes this process a job of one rank."""
    if torch.distributed.is_initialized():
        return
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in {**alone, "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)


def trained_by_deepspeed(torch: Any, run: Run, settings: dict[str, Any]) -> list[float]:
    """Seconds of each step of full training under DeepSpeed: BF16 with FP32 masters, PyTorch's AdamW."""
    import deepspeed

    _group_of_one(torch)
    workload, layout = run.workload, run.layout
    model = built(torch, workload.model, torch.bfloat16)
    model.train()
    if settings.get("recompute") == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    zero: dict[str, Any] = {"stage": settings["zero_stage"], "overlap_comm": True}
    if settings.get("parameter_offload"):
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.num_micro_batches,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=True)
    torch.cuda.reset_peak_memory_stats()
    loss_of = _loss_of(torch, engine.module, settings, False)

    def run_pass(tokens: Any) -> None:
        engine.backward(loss_of(tokens))
        engine.step()

    times = _stepped(torch, run, run_pass, lambda: None)
    engine.destroy()
    return times


def trained_whole(torch: Any, run: Run, settings: dict[str, Any]) -> list[float]:
    """Seconds of each step of full training under FSDP2: weights in FP32, products in BF16, AdamW fused."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _group_of_one(torch)
    mesh = init_device_mesh("cuda", (1,))
    model = built(torch, run.workload.model, torch.float32)
    model.train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compiled = settings["framework"].startswith(TORCHTITAN.name)
    layers = model.model.layers
    for index, layer in enumerate(layers):
        _narrowed(torch, layer, settings)
        wrapped = checkpoint_wrapper(layer) if settings.get("recompute") == "full" else layer
        if compiled:
            wrapped.compile(fullgraph=False)
        layers[index] = wrapped
        fully_shard(wrapped, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    torch.cuda.reset_peak_memory_stats()
    loss_of = _loss_of(torch, model, settings, compiled)

    def run_pass(tokens: Any) -> None:
        loss_of(tokens).backward()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return _stepped(torch, run, run_pass, update)


def measured(torch: Any, run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    """The section `measured` of a row."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    train = trained_whole
    if run.workload.adapters:
        train = trained_adapters
    elif settings["framework"] == DEEPSPEED.name:
        train = trained_by_deepspeed
    try:
        times = train(torch, run, settings)
    except torch.cuda.OutOfMemoryError:
        return {"out_of_memory": True}
    statistic = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    print(
        f"{run.id}: steps {[round(t, 4) for t in times]}, reserved at most "
        f"{statistic['reserved_bytes.all.peak'] / GIB:.2f}, device in use {(total - free) / GIB:.2f} GiB",
        flush=True,
    )
    return {
        "step_time_s": round(statistics.median(times[WARM_UPS:]), 4),
        "memory_gib": round(statistic["allocated_bytes.all.peak"] / GIB, 2),
        "memory_note": "peak allocated by PyTorch",
    }


def main() -> None:
    """Reads the rows, runs each, writes them with what was measured after every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60.0, help="no row begins after so many")
    arguments = parser.parse_args()
    import torch

    ends = time.monotonic() + 60.0 * arguments.minutes
    document = yaml.safe_load(arguments.runs.read_text(encoding="utf-8"))
    rows = {row["id"]: row for row in document["runs"]}
    for run in read_runs(arguments.runs):
        if time.monotonic() > ends:
            print(f"{run.id}: not begun, the time is over", flush=True)
            continue
        began = time.monotonic()
        try:
            rows[run.id]["measured"] = measured(torch, run, rows[run.id]["run"])
        except (RuntimeError, ValueError, TypeError, ImportError, AttributeError):
            # A row that cannot run must not lose the others.
            traceback.print_exc(limit=6, file=sys.stdout)
            torch._dynamo.reset()
            continue
        print(
            f"{run.id}: {rows[run.id]['measured']} in {time.monotonic() - began:.1f} s", flush=True
        )
        arguments.output.write_text(
            yaml.safe_dump(document, sort_keys=False, width=200), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
