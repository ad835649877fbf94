"""DeepSpeed's `offload_param`: read, priced by hand, and refused where nothing is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.model_specs.parameters import parameter_count
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.analysis.waterfall import read_baseline, with_baseline
from meshwright.planner.runs.launches.reader import price_launch, read_launch
from meshwright.planner.runs.prediction import PricedRun, price_run
from meshwright.planner.runs.run_file import run_from_mapping
from tests.priced_plans import priced_plan

GIB = 2**30
GIVEN = ["model=llama-3-8b", "cluster=dgx-a100", "seq_len=4096", "gpus=8"]
# Shards of a rank over half of PCIe's attained rate: 31.5 GB/s of an A100, as in costmodel/step_time.py.
HOST: dict[str, Any] = {"device": "cpu", "pin_memory": True}


def config(steps: int = 2, stage: int = 3, **zero: object) -> str:
    return json.dumps(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": steps,
            "train_batch_size": 8 * steps,
            "zero_optimization": {"stage": stage, "overlap_comm": True, **zero},
        }
    )


def priced(folder: Path, text: str) -> PricedRun:
    path = folder / "ds.json"
    path.write_text(text, encoding="utf-8")
    (run,) = price_launch(path, GIVEN)
    return run


@pytest.mark.parametrize("states", [{}, {"offload_optimizer": HOST}])
@pytest.mark.parametrize("steps", [1, 4])
def test_shards_leave_the_gpu_and_come_up_twice_a_micro_batch(
    states: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    """The key was listed as not read, and priced as if it were not there."""
    plain = priced(tmp_path, config(steps, **states)).predicted
    run = priced(tmp_path, config(steps, offload_param=HOST, **states))
    moved = run.predicted
    shard = 2 * parameter_count(load_catalog_model("llama-3-8b")) / 8
    assert run.run.remarks == ()
    parts, before = moved.memory_parts_gib[0], plain.memory_parts_gib[0]
    assert before["weights"] - parts["weights"] == pytest.approx(shard / GIB, rel=1e-3)
    assert 0 < parts["buffers"] - before["buffers"] < shard / GIB / 4
    more_gib = (moved.host_memory_gib or 0.0) - (plain.host_memory_gib or 0.0)
    assert more_gib == pytest.approx(8 * shard / GIB, rel=1e-3)
    more_s = moved.breakdown_s["optimizer"] - plain.breakdown_s["optimizer"]
    passes = 2 * steps + (-1 if states else 1)
    pcie = run.run.workload.cluster.device.pcie_gb_per_s * 1e9
    assert passes * shard / pcie < more_s < 4 * passes * shard / pcie
    once = priced(tmp_path, config(1, offload_param=HOST, **states)).predicted.breakdown_s[
        "optimizer"
    ]
    once -= priced(tmp_path, config(1, **states)).predicted.breakdown_s["optimizer"]
    assert more_s / once == pytest.approx(passes / (2 + (-1 if states else 1)), rel=1e-3)


def test_drives_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    for device, words in (("nvme", "the rate of the drives is not known"), ("tape", "none or cpu")):
        path.write_text(config(offload_param={"device": device}), encoding="utf-8")
        with pytest.raises(InputError, match=f"offload_param.device: .*{words}"):
            read_launch(path)


@pytest.mark.parametrize(
    ("stage", "zero", "offloads"),
    [
        (3, {"offload_param": {"device": "none"}}, False),
        (2, {"offload_param": HOST}, False),
        (3, {"cpu_offload_param": True}, True),
    ],
)
def test_where_nothing_moves(
    stage: int, zero: dict[str, Any], offloads: bool, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(config(stage=stage, **zero), encoding="utf-8")
    found = read_launch(path)
    assert found.settings.get("parameter_offload", False) == offloads
    assert found.unread == ()


@pytest.mark.parametrize(
    "changes", [{"framework": "megatron"}, {"framework": "fsdp2"}, {"zero_stage": 2}]
)
def test_run_files_say_it_of_deepspeed_alone(changes: dict[str, object]) -> None:
    run: dict[str, object] = {"gpus": 8, "seq_len": 4096, "global_batch": 8, "zero_stage": 3}
    run |= {"framework": "deepspeed", "parameter_offload": True}
    row = {"model": "llama-3-8b", "cluster": "dgx-a100", "run": run}
    assert price_run(run_from_mapping(row, where="run"), Path("run")).predicted.step_time_s > 0
    with pytest.raises(InputError, match=r"run.parameter_offload: .*ZeRO 3 only"):
        run_from_mapping(row | {"run": run | changes}, where="run")


def test_it_is_a_change_of_the_waterfall(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(config(8, offload_param=HOST), encoding="utf-8")
    plan = priced_plan(tp=2, dp=4, num_micro_batches=16, sequence_parallel=True)
    document = with_baseline(plan, read_baseline(path, plan.inputs)).baseline
    assert document is not None
    (change,) = [bar for bar in document.waterfall if "offload parameters" in bar.change]
    assert change.alone_s is not None
    assert change.alone_s < 0
    in_turn = sum(bar.in_turn_s for bar in document.waterfall)
    assert in_turn == pytest.approx(document.difference_s)
