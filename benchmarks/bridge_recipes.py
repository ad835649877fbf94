"""Megatron-Bridge's performance recipes as a data file, from a checkout: `python -m benchmarks.bridge_recipes CHECKOUT`.

The recipes are functions that set fields of a configuration. They are run on recorders that keep what is set, in
place of the packages that they need; what they set is written as Megatron's flags.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshwright.model_specs.reader import load_catalog_model

TARGET = Path(__file__).parent.parent / "planner" / "runs" / "launches" / "bridge_recipes.yaml"
RUN = ("megatron.bridge.perf_recipes", "megatron.bridge.recipes")
RECORDED = frozenset(
    ["torch", "transformers", "megatron", "nemo", "huggingface_hub", "omegaconf", "modelopt"]
)
MODELS = {
    "llama3_8b": "llama-3-8b",
    "llama3_70b": "llama-3-70b",
    "llama31_405b": "llama-3.1-405b",
    "deepseek_v3": "deepseek-v3",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "qwen3_235b_a22b": "qwen3-235b-a22b",
    "kimi_k2": "kimi-k2",
    "gpt_oss_20b": "gpt-oss-20b",
    "gpt_oss_120b": "gpt-oss-120b",
}
CLUSTERS = {
    "h100": "dgx-h100",
    "b200": "dgx-b200",
    "b300": "dgx-b300",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
}
PRECISIONS = {
    "bf16": "",
    "fp8cs": "--fp8-format hybrid --fp8-recipe tensorwise",
    "fp8ds": "--fp8-format hybrid --fp8-recipe delayed",
    "fp8sc": "--fp8-format hybrid --fp8-recipe blockwise",
    "fp8mx": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1 --fp4-recipe nvfp4",
}
KEPT = {"fp8cs": True, "fp8ds": True, "fp8sc": False, "fp8mx": True, "nvfp4": True}
"""Whether parameters are kept narrow by default (megatron/bridge/training/mixed_precision.py)."""
_NAME = re.compile(
    r"(?P<model>\w+)_pretrain_(?P<gpus>\d+)gpu_(?P<device>[a-z]+\d+)_(?P<rest>\w+)_config"
)
_VALUES = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "seq_length": "--seq-length",
    "recompute_granularity": "--recompute-granularity",
    "recompute_modules": "--recompute-modules",
    "recompute_method": "--recompute-method",
    "recompute_num_layers": "--recompute-num-layers",
    "cuda_graph_impl": "--cuda-graph-impl",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type",
    "moe_flex_dispatcher_backend": "--moe-flex-dispatcher-backend",
    "cp_comm_type": "--cp-comm-type",
}


class Recorder:
    """Stands for anything: keeps the attributes that are set, and the keywords that it is called with."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Recorder()
        self.__dict__[name] = value
        return value

    def __call__(self, *_: Any, **fields: Any) -> Recorder:
        return Recorder(**fields)

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, _: Any) -> Recorder:
        return Recorder()

    def __or__(self, _: Any) -> Recorder:
        return self

    __ror__ = __or__


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name if name in ("bfloat16", "float32", "float16") else Recorder()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Recipes from the checkout, recorders for the packages that they import."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] not in RECORDED:
            return None
        place = self._source / name.replace(".", "/")
        if name.startswith(RUN):
            if place.is_dir():
                init, folders = place / "__init__.py", [str(place)]
                return importlib.util.spec_from_file_location(
                    name, init, submodule_search_locations=folders
                )
            return importlib.util.spec_from_file_location(name, place.with_suffix(".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def recipes(source: Path) -> Iterator[tuple[str, Recorder]]:
    """Name and configuration of every pretraining recipe of a catalog model."""
    sys.meta_path.insert(0, _Finder(source))
    for path in sorted((source / "megatron/bridge/perf_recipes").rglob("*.py")):
        if path.name == "__init__.py":
            continue
        name = ".".join(path.relative_to(source).with_suffix("").parts)
        module = importlib.import_module(name)
        for recipe, function in vars(module).items():
            if _NAME.fullmatch(recipe) and getattr(function, "__module__", None) == name:
                yield recipe, function()


def row(name: str, config: Recorder) -> dict[str, Any] | None:
    """A recipe as Megatron's flags; None where its model, device or precision is none of ours."""
    match = _NAME.fullmatch(name)
    assert match is not None
    precision = match["rest"].split("_")[0]
    model, cluster = MODELS.get(match["model"]), CLUSTERS.get(match["device"])
    if model is None or cluster is None or precision not in PRECISIONS:
        return None
    words = [*_flags(config, precision), *_stages(config.model, load_catalog_model(model).layers)]
    flags = " ".join(filter(None, words))
    return {"model": model, "cluster": cluster, "gpus": int(match["gpus"]), "flags": flags}


def _set(value: Any) -> Any:
    """What was set; None where nothing was."""
    return None if isinstance(value, Recorder) else value


def _flags(config: Recorder, precision: str) -> Iterator[str]:
    model, ddp, overlap = config.model, config.ddp, config.comm_overlap
    for field, flag in _VALUES.items():
        value = _set(getattr(model, field))
        if value not in (None, []):
            yield f"{flag} {' '.join(map(str, value)) if isinstance(value, list) else value}"
    scope = _set(model.cuda_graph_scope)
    if scope:
        yield f"--cuda-graph-modules {' '.join(map(str, scope))}"
    experts = _set(model.expert_tensor_parallel_size)
    if experts is not None:
        yield f"--expert-tensor-parallel-size {experts}"
    yield f"--micro-batch-size {config.train.micro_batch_size}"
    yield f"--global-batch-size {config.train.global_batch_size}"
    if _set(model.sequence_parallel) and _set(model.tensor_model_parallel_size) != 1:
        yield "--sequence-parallel"
    yield PRECISIONS[precision]
    kept = _set(config.mixed_precision.fp8_param_gather)
    if KEPT.get(precision) if kept is None else kept:
        yield "--fp4-param-gather" if precision == "nvfp4" else "--fp8-param-gather"
    if not _set(ddp.grad_reduce_in_fp32):
        yield "--grad-reduce-in-bf16"
    if _set(ddp.use_distributed_optimizer):
        yield "--use-distributed-optimizer"
    if _set(config.optimizer.exp_avg_dtype) == "bfloat16":
        yield "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    if _set(ddp.use_megatron_fsdp):
        strategy = _set(ddp.data_parallel_sharding_strategy)
        yield f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy}"
    yield from _overlaps(ddp, overlap)


def _overlaps(ddp: Recorder, overlap: Recorder | None) -> Iterator[str]:
    reduced = None if overlap is None else _set(overlap.overlap_grad_reduce)
    if _set(ddp.overlap_grad_reduce) if reduced is None else reduced:
        yield "--overlap-grad-reduce --overlap-param-gather"
    if overlap is not None and _set(overlap.tp_comm_overlap):
        yield "--tp-comm-overlap"
    if overlap is not None and _set(overlap.overlap_moe_expert_parallel_comm):
        yield "--overlap-moe-expert-parallel-comm"


def _stages(model: Recorder, layers: int) -> Iterator[str]:
    """The layers of every virtual stage, written out where they are not even."""
    layout = _set(model.pipeline_model_parallel_layout)
    pp = _set(model.pipeline_model_parallel_size) or 1
    vpp = _set(model.virtual_pipeline_model_parallel_size) or 1
    ends = [
        bool(_set(getattr(model, f"account_for_{end}_in_pipeline_split")))
        for end in ("embedding", "loss")
    ]
    if isinstance(layout, str):
        yield f"--pipeline-model-parallel-layout {layout}"
    elif pp > 1 and any(ends):
        size = (layers + sum(ends)) // (pp * vpp)
        chunks = ["t" * size] * (pp * vpp)
        chunks[0] = f"E{'t' * (size - ends[0])}"
        chunks[-1] = f"{'t' * (size - ends[1])}L"
        yield f"--pipeline-model-parallel-layout {'|'.join(chunks)}"
    elif vpp > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {vpp}"


def main() -> None:
    """Writes the data file."""
    checkout = Path(sys.argv[1])
    rows = {name: row(name, config) for name, config in recipes(checkout / "src")}
    known = {name: each for name, each in sorted(rows.items()) if each is not None}
    head = (
        "# Performance recipes of NVIDIA-NeMo/Megatron-Bridge (src/megatron/bridge/perf_recipes, commit 067f987,\n"
        "# Apache-2.0), as Megatron's flags. Written by `python -m benchmarks.bridge_recipes CHECKOUT`.\n"
    )
    text = yaml.safe_dump(known, sort_keys=False, width=10_000)
    TARGET.write_text(head + text, encoding="utf-8")
    print(f"{len(known)} of {len(rows)} recipes")


if __name__ == "__main__":
    main()
