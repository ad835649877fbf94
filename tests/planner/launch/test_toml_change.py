"""The smallest change of a torchtitan TOML file gives the plan's price, and leaves the rest as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.launch.compare import script_diff
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.launches.reader import price_launch, read_launch
from tests.planner.launch.test_script_diff import apply, written

TOML = """\
# ours
[model]
name = "llama3"
flavor = "8B"
converters = []

[training]
local_batch_size = 2   # ran out of memory with 4
seq_len = 4096

[parallelism]
data_parallel_shard_degree = 8
tensor_parallel_degree = 2

[compile]
enable = false
components = ["model", "loss"]
"""
ADDED = ["cluster=dgx-h100,gpus=16"]


def toml_plan(pin: str, precision: str) -> Plan:
    request = read_request(
        model="llama-3-8b",
        cluster="dgx-h100",
        gpus=16,
        global_batch=64,
        seq_len=4096,
        framework="torchtitan",
        precision=precision,
        pin=f"{pin},cp=1,micro_batch=1",
        forbid="shard-groups",
    )
    return fastest_plan(request)


@pytest.mark.parametrize("pin", ["pp=1", "pp=1,tp=4"])
def test_the_patched_file_has_the_plans_price(pin: str, tmp_path: Path) -> None:
    plan = toml_plan(pin, "bf16")
    path = written(tmp_path, TOML, "train.toml")
    diff = script_diff(path, plan)
    assert diff.note == ""
    apply(diff.patch, path)
    assert plan.predicted is not None
    (priced,) = price_launch(path, ADDED)
    assert priced.predicted.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    assert "ran out of memory" in path.read_text(encoding="utf-8")
    assert 'components = ["model", "loss"]' in path.read_text(encoding="utf-8")
    again = script_diff(path, plan)
    assert (again.edits, again.patch) == ([], "")


def test_lists_are_left_to_the_user_and_named(tmp_path: Path) -> None:
    path = written(tmp_path, TOML, "train.toml")
    diff = script_diff(path, toml_plan("pp=2,vpp=2", "fp8"))
    assert "parallelism.module_fqns_per_model_part and model.converters" in diff.note
    apply(diff.patch, path)
    text = path.read_text(encoding="utf-8")
    assert "pipeline_parallel_degree = 2" in text
    assert "converters = []" in text


def test_a_pipeline_that_runs_several_times_a_step_is_said(tmp_path: Path) -> None:
    text = TOML.replace("tensor_parallel", "pipeline_parallel")
    text = text.replace("seq_len", "global_batch_size = 64\nseq_len")
    run = read_launch(written(tmp_path, text, "train.toml"))
    assert run.repeats_pipeline
    assert any("fills and drains" in remark for remark in run.remarks)
    once = read_launch(written(tmp_path, text.replace("= 2   #", "= 8   #"), "train.toml"))
    assert not once.repeats_pipeline


def test_stages_of_a_file_are_read(tmp_path: Path) -> None:
    parts = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["layers.3"], ["norm"]]
    text = TOML.replace("tensor_parallel_degree = 2", "pipeline_parallel_degree = 2")
    text = text.replace("[compile]", f"module_fqns_per_model_part = {parts}\n[compile]")
    settings = read_launch(written(tmp_path, text, "train.toml")).settings
    assert settings["stages"] == [[1, 1], [2, 0]]
    assert settings["vpp"] == 2


def test_a_key_is_changed_however_it_is_written(tmp_path: Path) -> None:
    """A quoted key, and a section behind a part of it; comments stay where they are."""
    text = TOML.replace("local_batch_size = 2", '"local_batch_size" = 2')
    text = text.replace("[training]", "[training.extra]\nkept = 1  # as it was\n\n[training]")
    path = written(tmp_path, text, "train.toml")
    apply(script_diff(path, toml_plan("pp=1,tp=4", "bf16")).patch, path)
    changed = path.read_text(encoding="utf-8")
    assert '"local_batch_size" = 1   # ran out of memory with 4' in changed
    assert "tensor_parallel_degree = 4" in changed
    assert "kept = 1  # as it was" in changed
