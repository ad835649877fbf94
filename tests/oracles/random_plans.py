"""Random plans over the catalog: legal or not, as a planner or a hand might write them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from meshwright.cluster_specs.reader import load_cluster
from meshwright.costmodel.execution_names import ScheduleName
from meshwright.frameworks.record import FrameworkName
from meshwright.model_specs.reader import catalog_names, load_catalog_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.plan.document import Mapping, Objective, Plan, SolverReport
from meshwright.planner.request.plan_request import PlanInputs
from meshwright.planner.runs.run_terms import LayoutDoc

CLUSTERS = {"dgx-a100": 8, "dgx-h100": 9, "dgx-b200": 10, "gb200-nvl72": 10}
"""Catalog cluster and compute capability."""
PRECISIONS = {
    8: ["bf16", "fp16"],
    9: ["bf16", "bf16", "fp8", "fp16"],
    10: ["bf16", "fp8", "mxfp8", "nvfp4"],
}
MOST_GPUS = 1024


def random_plan(
    rng: random.Random,
    framework: FrameworkName,
    index: int,
    names: Sequence[str] | None = None,
) -> tuple[Plan, int] | None:
    """A plan of a model of some names, by default the catalog's, and the compute capability of its GPUs; None
    where the draw has no meaning at all.
    """
    names = names or catalog_names()
    model = load_catalog_model(names[index % len(names)])
    cluster = rng.choice(list(CLUSTERS))
    fields = _degrees(rng, framework, model)
    chunks = fields["pp"] * fields["vpp"]
    world = fields["tp"] * fields["cp"] * fields["pp"] * fields["dp"]
    if chunks > model.layers or world > MOST_GPUS:
        return None
    counts = _split(rng, model.layers, chunks, even=framework == "deepspeed" or rng.random() < 0.4)
    fields["stages"] = [counts[rank :: fields["pp"]] for rank in range(fields["pp"])]
    fields |= _recompute(rng, framework, model)
    return plan_of(
        model,
        cluster,
        framework,
        fields,
        seq_len=rng.choice([1024, 2048, 4096, 8192]),
        precision=rng.choice(PRECISIONS[CLUSTERS[cluster]]),
        optimizer=rng.choice(["adam"] * 6 + ["sgd", "muon"]) if framework == "megatron" else "adam",
        mapping=_mapping(rng, world) if rng.random() < 0.2 else None,
    ), CLUSTERS[cluster]


def plan_of(
    model: ModelSpec, cluster: str, framework: FrameworkName, fields: dict[str, Any], **inputs: Any
) -> Plan:
    """A plan of these layout fields."""
    layout = LayoutDoc(**fields)
    mapping = inputs.pop("mapping", None)
    return Plan(
        status="feasible",
        objective=Objective(step_time_s=1.0, lower_bound_s=None, gap=None),
        layout=layout,
        predicted=None,
        mapping=mapping,
        solver=SolverReport(wall_s=0, bound_rounds=0, workers=1, seed=0, version="test"),
        inputs=PlanInputs(
            model=model,
            cluster=load_cluster(cluster),
            gpus=layout.tp * layout.cp * layout.pp * layout.dp,
            global_batch=layout.micro_batch * layout.num_micro_batches * layout.dp,
            framework=framework,
            **inputs,
        ),
    )


def changed(rng: random.Random, plan: Plan) -> Plan | None:
    """The plan with one degree replaced, and what follows from it counted anew (GPUs, batch, stages)."""
    layout = plan.layout
    assert layout is not None
    axis = rng.choice(["tp", "cp", "pp", "dp", "ep", "etp", "vpp", "num_micro_batches"])
    value = rng.choice(
        [n for n in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32) if n != getattr(layout, axis)]
    )
    fields = layout.model_dump() | {axis: value}
    chunks, layers = fields["pp"] * fields["vpp"], plan.inputs.model.layers
    if chunks > layers or fields["tp"] * fields["cp"] * fields["pp"] * fields["dp"] > MOST_GPUS:
        return None
    counts = [layers // chunks + (i < layers % chunks) for i in range(chunks)]
    fields["stages"] = [counts[rank :: fields["pp"]] for rank in range(fields["pp"])]
    if fields["tp"] == 1:
        fields["sequence_parallel"] = False
    fields["schedule"] = "interleaved-1f1b" if fields["vpp"] > 1 else "1f1b"
    inputs = plan.inputs
    return plan_of(
        inputs.model,
        inputs.cluster.name,
        inputs.framework,
        fields,
        seq_len=inputs.seq_len,
        precision=inputs.precision,
        optimizer=inputs.optimizer,
    )


def _degrees(rng: random.Random, framework: FrameworkName, model: ModelSpec) -> dict[str, Any]:
    tp, pp = rng.choice([1, 1, 2, 4, 8]), rng.choice([1, 2, 3, 4, 6, 8, 12, 16])
    cp, dp = rng.choice([1, 1, 2, 4]), rng.choice([1, 2, 4, 8])
    vpp, ep, etp = rng.choice([1, 1, 2, 3]), 1, 1
    zero = rng.choice([0, 1, 1, 1]) if rng.random() < 0.8 else rng.choice([2, 3])
    if framework == "torchtitan":
        zero = rng.choice([0, 2, 3])
    if framework == "fsdp2":
        pp, zero = 1, rng.choice([2, 3])
    if framework == "deepspeed":
        cp, vpp, pp = 1, 1, rng.choice([1, 1, 2, 4, 8])
        zero = rng.choice([0, 1]) if pp > 1 else rng.choice([0, 1, 2, 3])
    if framework == "megatron" and zero >= 2:
        pp = 1
    vpp = vpp if pp > 1 else 1
    if model.moe is not None and framework != "fsdp2":
        ep = rng.choice([1, 2, 4, 8, 16])
        etp = rng.choice([1, 1, tp]) if framework == "megatron" else 1
    return {
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "dp": dp,
        "ep": ep,
        "etp": etp,
        "vpp": vpp,
        "micro_batch": rng.choice([1, 2]),
        "num_micro_batches": rng.choice([1, 2, 4])
        * (pp if vpp > 1 or framework == "torchtitan" else 1),
        "sequence_parallel": framework in ("megatron", "torchtitan")
        and tp > 1
        and (rng.random() < 0.7 or model.moe is not None),
        "zero_stage": zero,
        "shard_groups": _shard_groups(framework, dp, zero, seed=(tp, cp, pp, ep, vpp)),
        "optimizer_offload": _offloaded(framework, zero, seed=(tp, cp, pp, dp, ep, vpp)),
        "schedule": _schedule(rng, framework, pp, vpp),
    }


def _shard_groups(framework: FrameworkName, dp: int, zero: int, seed: tuple[int, ...]) -> int:
    """Of a generator of its own, so that the other draws stay what they are."""
    if zero == 0 or framework == "deepspeed":
        return 1
    return random.Random(repr((dp, zero, seed))).choice([1, 1, 2, 4])


def _offloaded(framework: FrameworkName, zero: int, seed: tuple[int, ...]) -> int:
    """Percent of the optimizer, of a generator of its own."""
    if framework == "deepspeed" and zero > 0:
        return random.Random(repr((seed, zero))).choice([0, 0, 100])
    if framework in ("torchtitan", "fsdp2") and zero == 3:
        return random.Random(repr((seed, zero))).choice([0, 0, 100]) if seed[3] > 1 else 0
    if zero != 1 or framework != "megatron":
        return 0
    return random.Random(repr((seed, zero))).choice([0, 0, 0, 25, 100])


def _schedule(rng: random.Random, framework: FrameworkName, pp: int, vpp: int) -> ScheduleName:
    if framework != "torchtitan" or pp == 1:
        return "interleaved-1f1b" if vpp > 1 else "1f1b"
    names: list[ScheduleName] = ["1f1b", "gpipe"]
    if vpp > 1:
        names = ["interleaved-1f1b", "breadth-first", "zb-h1", "zbv", "dualpipe-v"]
    return rng.choice(names if vpp < 3 else names[:3])


def _split(rng: random.Random, layers: int, chunks: int, *, even: bool) -> list[int]:
    counts = [layers // chunks + (index < layers % chunks) for index in range(chunks)]
    for _ in range(0 if even else rng.randint(0, 4)):
        source, sink = rng.randrange(chunks), rng.randrange(chunks)
        if counts[source] > 1:
            counts[source] -= 1
            counts[sink] += 1
    return counts


def _recompute(rng: random.Random, framework: FrameworkName, model: ModelSpec) -> dict[str, Any]:
    kind = rng.choice(
        ["none", "selective", "full"] if framework == "megatron" else ["none", "full"]
    )
    if kind == "full":
        return {"recompute": "full", "recompute_layers": 10**6}
    if kind == "none":
        return {"recompute": "none"}
    modules = ["core_attn", "layernorm", "mlp"]
    modules += ["moe_act", "moe"] * (model.moe is not None)
    modules += ["mla_up_proj"] * (model.attention is not None)
    chosen = rng.sample(modules, rng.randint(1, len(modules)))
    return {"recompute": "selective", "recompute_modules": tuple(chosen)}


def _mapping(rng: random.Random, world: int) -> Mapping:
    """Ranks on nodes of eight GPUs in any order."""
    places = [(rank // 8, rank % 8) for rank in range(world)]
    rng.shuffle(places)
    return Mapping(order=[], levels=[], matrix={}, ranks=places)
