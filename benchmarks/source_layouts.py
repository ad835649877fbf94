"""Layouts that guides to distributed training quote, beside the plan: `python -m benchmarks.source_layouts`.

Each is planned twice: with the guide's degrees pinned, all else free, and with nothing pinned. The table in
docs/source_layouts.md is what this prints.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import meshwright
from meshwright.costmodel.execution_names import Precision
from meshwright.errors import MeshwrightError
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.plan.document import Plan

PAGE = Path(__file__).parent.parent / "docs" / "source_layouts.md"


@dataclass(frozen=True, kw_only=True)
class SourceLayout:
    """One published layout and the run that it is quoted for."""

    name: str
    model: str
    cluster: str
    gpus: int
    global_batch: int
    seq_len: int
    pin: str
    precision: Precision = "bf16"
    wider: tuple[tuple[str, int], ...] = ()
    """Sizes that differ from the catalog model's."""


LLAMA_33B = (
    ("hidden", 6656),
    ("ffn_hidden", 17920),
    ("layers", 60),
    ("heads", 52),
    ("kv_heads", 52),
)
LLAMA_65B = (
    ("hidden", 8192),
    ("ffn_hidden", 22016),
    ("layers", 80),
    ("heads", 64),
    ("kv_heads", 64),
)
"""Touvron et al. 2023, arXiv 2302.13971, table 2."""

CASES = (
    SourceLayout(
        name="GPT-3 175B on 1,024 V100", model="gpt3-175b", cluster="dgx-v100", gpus=1024,
        global_batch=1536, seq_len=2048, precision="fp16", pin="tp=8,pp=8,micro_batch=3",
    ),
    SourceLayout(
        name="LLaMA 7B on 2,048 A100", model="llama-2-7b", cluster="dgx-a100", gpus=2048,
        global_batch=2048, seq_len=2048, pin="tp=1,pp=1",
    ),
    SourceLayout(
        name="LLaMA 13B on 2,048 A100", model="llama-2-13b", cluster="dgx-a100", gpus=2048,
        global_batch=2048, seq_len=2048, pin="tp=2,pp=1",
    ),
    SourceLayout(
        name="LLaMA 33B on 2,048 A100", model="llama-2-7b", cluster="dgx-a100", gpus=2048,
        global_batch=2048, seq_len=2048, pin="tp=4,pp=1", wider=LLAMA_33B,
    ),
    SourceLayout(
        name="LLaMA 65B on 2,048 A100", model="llama-2-7b", cluster="dgx-a100", gpus=2048,
        global_batch=2048, seq_len=2048, pin="tp=8,pp=1", wider=LLAMA_65B,
    ),
    SourceLayout(
        name="LLaMA-2 70B on 2,048 A100", model="llama-2-70b", cluster="dgx-a100", gpus=2048,
        global_batch=1024, seq_len=4096, pin="tp=8,pp=1",
    ),
    SourceLayout(
        name="Mixtral 8x7B on 128 H100", model="mixtral-8x7b", cluster="dgx-h100", gpus=128,
        global_batch=1024, seq_len=4096, pin="ep=8,tp=1",
    ),
    SourceLayout(
        name="Mixtral 8x7B on 128 H100", model="mixtral-8x7b", cluster="dgx-h100", gpus=128,
        global_batch=1024, seq_len=4096, pin="ep=8,tp=2",
    ),
    SourceLayout(
        name="DeepSeek-V2 236B on 2,048 H800", model="deepseek-v2", cluster="hgx-h800", gpus=2048,
        global_batch=8192, seq_len=4096, pin="ep=16,tp=4,pp=1",
    ),
    SourceLayout(
        name="DeepSeek-V2 236B on 2,048 H800", model="deepseek-v2", cluster="hgx-h800", gpus=2048,
        global_batch=8192, seq_len=4096, pin="ep=8,tp=1,pp=1",
    ),
    SourceLayout(
        name="GPT-3 175B on 2,048 H100", model="gpt3-175b", cluster="dgx-h100", gpus=2048,
        global_batch=1536, seq_len=2048, pin="tp=8,pp=8,dp=32",
    ),
)  # fmt: skip


def model_of(case: SourceLayout) -> ModelSpec:
    """The catalog model with the sizes of the case."""
    spec = meshwright.read_model(case.model)
    if not case.wider:
        return spec
    fields = spec.model_dump(exclude_none=True) | dict(case.wider) | {"name": case.name}
    for derived in ("head_dim", "published_parameters", "published_active_parameters"):
        fields.pop(derived, None)
    return ModelSpec.model_validate(fields)


def planned(case: SourceLayout, pin: str) -> Plan | None:
    """The best plan with `pin`; None where no layout fits."""
    try:
        plan = meshwright.plan(
            model_of(case),
            cluster=case.cluster,
            gpus=case.gpus,
            global_batch=case.global_batch,
            seq_len=case.seq_len,
            precision=case.precision,
            pin=pin,
            robustness=False,
            time_limit_s=120.0,
        )
    except MeshwrightError as error:
        raise SystemExit(f"{case.name}: {error}") from None
    return plan if plan.layout is not None else None


def row(case: SourceLayout) -> list[str]:
    """One line of the table."""
    theirs, best = planned(case, case.pin), planned(case, "")
    if best is None:
        return [case.name, case.pin, "does not fit", "does not fit", "", ""]
    best_s = best.objective.step_time_s or 0.0
    layout = best.layout
    assert layout is not None
    words = f"tp {layout.tp}, cp {layout.cp}, pp {layout.pp}, dp {layout.dp}, ep {layout.ep}"
    ours = f"{best_s:.3f} s ({best.status})"
    if theirs is None or theirs.objective.step_time_s is None:
        return [case.name, case.pin, "does not fit", ours, words, ""]
    their_s = theirs.objective.step_time_s
    loss = f"{100 * (their_s / best_s - 1):.1f} %"
    return [case.name, case.pin, f"{their_s:.3f} s", ours, words, loss]


def page(rows: Sequence[Sequence[str]]) -> str:
    """docs/source_layouts.md."""
    head = [
        "case",
        "the guide's degrees",
        "their best step",
        "plan",
        "its degrees",
        "loss of theirs",
    ]
    lines = [
        "# Layouts that guides quote, beside the plan",
        "",
        "`python -m benchmarks.source_layouts` writes this page. Each guide's degrees are pinned and all else",
        "(virtual stages, micro-batch, ZeRO, recomputation, mapping, execution choices) is chosen for them; then",
        "nothing is pinned. Batches are those of the models' papers where they say one. *Loss* is how much slower",
        "the guide's degrees are under our cost model. A layout that does not fit may still have run with other",
        "software, such as offloading.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(cells) + " |" for cells in rows),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    options.output.write_text(page([row(case) for case in CASES]), encoding="utf-8")


if __name__ == "__main__":
    main()
