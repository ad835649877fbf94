"""torchtitan's TOML files are read as the flags that say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.reader import price_launch, read_launch

# After torchtitan v0.2.0, torchtitan/models/llama3/train_configs/llama3_70b.toml.
TOML = """
# torchtitan Config.toml
[job]  # of ours
dump_folder = "./outputs"

[model]
name = "llama3"
flavor = "70B"
converters = []

[training]
local_batch_size = 8
seq_len = 8192
max_norm = 1.0
steps = 1000

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 8
tensor_parallel_degree = 8
enable_async_tensor_parallel = false
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
context_parallel_degree = 1

[compile]
enable = true
components = ["model", "loss"]

[activation_checkpoint]
mode = "full"
"""


def read(folder: Path, text: str) -> LaunchRun:
    path = folder / "train.toml"
    path.write_text(text, encoding="utf-8")
    return read_launch(path)


def test_sections_are_read_as_flags(tmp_path: Path) -> None:
    run = read(tmp_path, TOML)
    assert run.model == "llama-3-70b"
    expected = {
        "tp": 8,
        "pp": 2,
        "vpp": 2,
        "dp": 8,
        "cp": 1,
        "seq_len": 8192,
        "micro_batch": 1,
        "global_batch": 64,
        "recompute": "full",
        "framework": "torchtitan",
        "schedule": "interleaved-1f1b",
    }
    assert expected.items() <= run.settings.items()
    assert run.unread == ()
    assert run.remarks == ()


def test_older_names_converters_and_operators(tmp_path: Path) -> None:
    selective = '"selective"\nselective_ac_option = "op"'
    text = TOML.replace("local_batch_size", "batch_size").replace('"full"', selective)
    run = read(tmp_path, text.replace("[]", '["quantize.linear.float8"]'))
    assert run.settings["global_batch"] == 64
    assert run.settings["precision"] == "fp8"
    assert run.settings["recompute_modules"] == ["op"]


def test_a_toml_file_has_a_price(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    selective = '"selective"\nselective_ac_option = "op"'
    path.write_text(TOML.replace('"full"', selective), encoding="utf-8")
    (priced,) = price_launch(path, ["cluster=dgx-h100"])
    assert priced.predicted.step_time_s > 0
    assert priced.broken == ()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"full"', '"some"', "activation_checkpoint.mode: is no kind"),
        ("[training]", "[[training]]", "training: must be a section"),
        ("[model]", "[models]", "sections model and parallelism"),
        ("= 8192", "= [", "cannot be read"),
        ("tensor_parallel_degree = 8", "tensor_parallel_degree = 1.5", "tensor-parallel-degree"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, before: str, after: str, words: str) -> None:
    assert before in TOML
    with pytest.raises(InputError, match=words):
        read(tmp_path, TOML.replace(before, after, 1))


@pytest.mark.parametrize(("value", "percent"), [("true", 100), ("false", None)])
def test_what_is_offloaded_is_read(tmp_path: Path, value: str, percent: int | None) -> None:
    """It was taken for a switch that leaves the step as it is."""
    steps = "steps = 1000\n"
    run = read(tmp_path, TOML.replace(steps, f"{steps}enable_cpu_offload = {value}\n"))
    assert run.settings.get("optimizer_offload") == percent
    assert [flag for flag in run.unread if "cpu-offload" in flag] == []
