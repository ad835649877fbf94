"""Every reader of users' files, with real files that its fuzzing begins from."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import yaml

import meshwright
from meshwright.cluster_specs.importers.document import import_topology
from meshwright.cluster_specs.reader import (
    MixedClusterSpec,
    PartSpec,
    load_cluster,
    read_cluster,
    read_mixed_cluster,
)
from meshwright.costmodel.calibration import Factors
from meshwright.model_specs.reader import read_model
from meshwright.planner.audit import audit_plan, read_rank_list
from meshwright.planner.experts.inputs import read_routing
from meshwright.planner.experts.placements import read_placement
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.many.jobs import read_jobs
from meshwright.planner.many.sharing import read_fleet
from meshwright.planner.mixed.document import mixed_text, read_mixed_plan
from meshwright.planner.plan.texts import read_plan
from meshwright.planner.report.mixed_view import mixed_page
from meshwright.planner.request.reader import calibration_text, read_calibration
from meshwright.planner.runs.launches.reader import price_launch
from meshwright.planner.runs.logs import measured_fields, read_log
from meshwright.planner.runs.prediction import price_runs
from tests.places import DATA, ROOT
from tests.planner.runs.calibration.own_runs import stack
from tests.plans import make_plan

Seed = tuple[str, bytes]
"""The end of the file's name, and what is in it."""


@dataclass(frozen=True)
class Reader:
    """A reader, and the files that are damaged for it."""

    name: str
    read: Callable[[Path], object]
    make_seeds: Callable[[], Sequence[Seed]]

    @cached_property
    def seeds(self) -> Sequence[Seed]:
        """Made once, when they are first needed."""
        return self.make_seeds()


def _files(folder: str, pattern: str, longest: int = 40_000) -> list[Seed]:
    paths = sorted((DATA / folder).glob(pattern))
    return [(path.name, path.read_bytes()) for path in paths if path.stat().st_size < longest]


def _model() -> list[Seed]:
    text = (ROOT / "model_specs" / "data" / "catalog.yaml").read_text(encoding="utf-8")
    models = yaml.safe_load(text)
    entries = models.get("models", models)
    named = entries.items() if isinstance(entries, dict) else ((e["name"], e) for e in entries)
    chosen = [(name, entry) for name, entry in named if name in ("llama-3-8b", "deepseek-v3")]
    return [("m.yaml", yaml.safe_dump({"name": name, **entry}).encode()) for name, entry in chosen]


def _run() -> list[Seed]:
    run = {"seq_len": 2048, "global_batch": 64, "micro_batch": 1, "tp": 2, "pp": 2, "dp": 2}
    document = {
        "model": "llama-2-7b",
        "cluster": {"device": "h100-sxm-80gb", "gpus": 8},
        "run": run,
    }
    return [("r.yaml", yaml.safe_dump(document).encode()), *_files("more_runs", "*.yaml", 6000)]


def _jobs() -> list[Seed]:
    job = {"name": "a", "model": "llama-2-7b", "cluster": "dgx-a100", "gpus": 8}
    job |= {"global_batch": 64, "seq_len": 2048, "pin": "tp=2", "forbid": "cp"}
    matrix = {"model": ["llama-2-7b", "llama-3-8b"], "cluster": ["dgx-a100"], "gpus": [8, 16]}
    matrix |= {"global_batch": [64], "seq_len": [2048]}
    return [("j.yaml", yaml.safe_dump({"jobs": [job], "matrix": matrix}).encode())]


def _fleet() -> list[Seed]:
    job = {"name": "a", "model": "llama-2-7b", "global_batch": 64, "seq_len": 2048, "weight": 2.0}
    job |= {"min_gpus": 8, "max_gpus": 16, "tokens": 1e9, "deadline_h": 5.0, "priority": 1}
    return [("f.yaml", yaml.safe_dump({"jobs": [job]}).encode())]


def _loads() -> list[Seed]:
    counts = np.arange(1, 33, dtype=np.int64).reshape(2, 16)
    packed, plain = io.BytesIO(), io.BytesIO()
    np.savez(packed, loads=counts)
    np.save(plain, counts)
    rows = ["layer,expert,load"]
    rows += [
        f"{layer},{expert},{counts[layer, expert]}" for layer in (0, 1) for expert in range(16)
    ]
    return [
        ("l.npz", packed.getvalue()),
        ("l.npy", plain.getvalue()),
        ("l.json", json.dumps({"loads": counts.tolist()}).encode()),
        ("l.csv", "\n".join(rows).encode()),
        *_files("plans", "olmoe_loads.json"),
    ]


def _mixed() -> list[Seed]:
    parts = [
        {"cluster": "dgx-h100", "gpus": 64},
        {"cluster": "dgx-a100", "gpus": 64, "name": "old"},
    ]
    own = {"device": "h200-sxm-141gb", "gpus": 16, "gpus_per_node": 8}
    inline = [{"cluster": own, "gpus": 16}, {"cluster": "dgx-h100", "gpus": 8}]
    documents = [
        {"name": "mixed", "parts": parts, "between_gbps_per_gpu": 100.0},
        {"parts": inline},
    ]
    return [("x.yaml", yaml.safe_dump(document).encode()) for document in documents]


def _mixed_plan() -> list[Seed]:
    parts = [PartSpec(cluster=load_cluster(n), gpus=8) for n in ("dgx-h100", "dgx-a100")]
    result = meshwright.plan_mixed(
        "gpt2-xl",
        cluster=MixedClusterSpec(parts=tuple(parts)),
        global_batch=64,
        seq_len=1024,
        pin="tp=1,micro_batch=1",
    )
    assert len(result.document.runs_on) == len(parts)
    return [("mixed_plan.yaml", mixed_text(result.document).encode())]


def _read_mixed_plan(path: Path) -> None:
    """As `verify` and `report` do."""
    plan = read_mixed_plan(path)
    audit_plan(path)
    mixed_page(plan)


def _trace() -> list[Seed]:
    tokens = np.random.default_rng(0).integers(0, 8, (2, 20, 2))
    packed = io.BytesIO()
    np.savez(packed, tokens=tokens, num_experts=8)
    return [
        ("t.npz", packed.getvalue()),
        ("t.json", json.dumps({"tokens": tokens.tolist()}).encode()),
    ]


def _placement() -> list[Seed]:
    table = [[0, 1, 2, 3, 0, 1, 2, 3], [3, 2, 1, 0, 0, 1, 2, 3]]
    own = {"schema": 1, "physical_to_logical_map": table}
    return [("p.json", json.dumps(own).encode()), ("q.json", json.dumps(table).encode())]


def _plan() -> tuple[Seed, ...]:
    plan = meshwright.plan(
        "llama-2-7b", cluster="dgx-a100", gpus=8, global_batch=8, seq_len=1024, robustness=False,
        pin="tp=2,pp=1", framework="torchtitan",
    )  # fmt: skip
    return (("plan.yaml", plan_files(plan)["plan.yaml"].encode()),)


def _calibration() -> list[Seed]:
    factors = Factors(gemm=0.5, network=0.8, activation_memory=1.1)
    return [("s.yaml", calibration_text(stack(factors)).encode())]


def _ranks() -> list[Seed]:
    head = "rank,host,gpu,tp,cp,dp,pp,etp,ep,edp"
    rows = [
        f"{rank},node-0000{rank // 8 + 1},{rank % 8},0,0,{rank},0,0,0,{rank}" for rank in range(16)
    ]
    return [("ranks.csv", "\n".join([head, *rows]).encode())]


def _log() -> list[Seed]:
    megatron = (
        " [2025-08-01 07:19:37] iteration {0:8d}/    500 | elapsed time per iteration (ms): 1000.5 |\n"
        "[Rank 0] (after {0} iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0 |\n"
    )
    titan = (
        "[rank0]: step: {:2}  loss:  8.1  grad_norm: 1.0  memory: 40.1GiB(50.0%)  tps: 6,100  x\n"
    )
    rows = [{"_step": step, "iteration-time": 1.5, "lm loss": 3.0} for step in (10, 20, 30)]
    table = "Step,a - iteration-time\n10,1.5\n20,1.5\n"
    return [
        ("train.log", "".join(megatron.format(step) for step in (10, 20, 30)).encode()),
        ("titan.log", "".join(titan.format(step) for step in (10, 20, 30)).encode()),
        ("history.json", json.dumps(rows).encode()),
        ("history.jsonl", "\n".join(map(json.dumps, rows)).encode()),
        ("export.csv", table.encode()),
    ]


def _launch(framework: str) -> list[Seed]:
    zero_stage = {"megatron": 1, "deepspeed": 1, "torchtitan": 3, "fsdp2": 3}[framework]
    plan = make_plan(tp=1, dp=8, zero_stage=zero_stage)
    inputs = plan.inputs.model_copy(update={"framework": framework})
    files = plan_files(plan.model_copy(update={"inputs": inputs}))
    kept = ("launch.sh", "megatron_args.json", "torchtitan_args.json", "ds_config.json")
    return [(n, t.encode()) for n, t in files.items() if n in (*kept, "accelerate.yaml")]


def _priced_launch(path: Path) -> object:
    wanted = ["cluster=dgx-h100", "model=llama-3-8b", "seq_len=4096", "global_batch=4", "gpus=8"]
    return list(price_launch(path, wanted))


def _topology(form: str, path: Path) -> object:
    return import_topology(form, [path], "dgx-h100")


_TOPOLOGIES = {
    "slurm": "slurm*", "topograph": "topograph*", "nvidia-smi": "nvidia-smi*",
    "ibnetdiscover": "ibnetdiscover*", "nccl-tests": "nccl-tests*",
}  # fmt: skip
READERS = (
    Reader("model", read_model, _model),
    Reader("config.json", read_model, lambda: _files("hf_configs", "*.json")),
    Reader("cluster", read_cluster, lambda: _files("plans", "*.yaml")),
    Reader("mixed cluster", read_mixed_cluster, _mixed),
    Reader("run", lambda path: list(price_runs(path)), _run),
    Reader("jobs", read_jobs, _jobs),
    Reader("fleet", lambda path: read_fleet(path, "dgx-a100"), _fleet),
    Reader("loads", read_routing, _loads),
    Reader("trace", read_routing, _trace),
    Reader("placement", lambda path: read_placement(path, layers=2, experts=4, gpus=4), _placement),
    Reader("plan", read_plan, _plan),
    Reader("mixed plan", _read_mixed_plan, _mixed_plan),
    Reader("calibration", read_calibration, _calibration),
    Reader("log", lambda path: measured_fields(read_log(path), 1, "log"), _log),
    Reader("ranks", partial(read_rank_list, load_cluster("dgx-h100")), _ranks),
    *(
        Reader(f"{framework} launch", _priced_launch, partial(_launch, framework))
        for framework in ("megatron", "torchtitan", "deepspeed", "fsdp2")
    ),
    *(
        Reader(f"{form} topology", partial(_topology, form), partial(_files, "topologies", pattern))
        for form, pattern in _TOPOLOGIES.items()
    ),
)
