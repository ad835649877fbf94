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


def test_other_places_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    for name in ("offload_param", "offload_optimizer"):
        sections: dict[str, Any] = {name: {"device": "tape"}}
        path.write_text(config(**sections), encoding="utf-8")
        with pytest.raises(InputError, match=f"{name}.device: only none, cpu and nvme"):
            read_launch(path)


DRIVES: dict[str, Any] = {"device": "nvme", "nvme_path": "/local"}


def on_drives(folder: Path, text: str, rate: float | None = 16.0) -> PricedRun:
    """On a node whose eight GPUs share drives of 16 GB/s, 2 GB/s each."""
    cluster = "base: dgx-a100\n" + ("" if rate is None else f"nvme_gb_per_s: {rate}\n")
    (folder / "drives.yaml").write_text(cluster, encoding="utf-8")
    (folder / "ds.json").write_text(text, encoding="utf-8")
    given = [*GIVEN[:1], f"cluster={folder / 'drives.yaml'}", *GIVEN[2:]]
    (run,) = price_launch(folder / "ds.json", given)
    return run


def test_drives_are_priced_by_their_rate(tmp_path: Path) -> None:
    """A rank has 1.004e9 parameters: 32 bytes of each pass the drives for its states in a step, and of its
    weights 2 in both passes of two micro-batches and once new.
    """
    own = parameter_count(load_catalog_model("llama-3-8b")) / 8
    host = config(offload_param=HOST, offload_optimizer=HOST)
    on_host = on_drives(tmp_path, host).predicted
    states = on_drives(tmp_path, config(offload_param=HOST, offload_optimizer=DRIVES))
    both = on_drives(tmp_path, config(offload_param=DRIVES, offload_optimizer=DRIVES)).predicted
    assert states.run.remarks == ()
    seconds = [p.breakdown_s["optimizer"] for p in (on_host, states.predicted, both)]
    assert seconds[1] - seconds[0] == pytest.approx(32 * own / 2e9, rel=1e-3)
    assert seconds[2] - seconds[1] == pytest.approx(2 * 5 * own / 2e9, rel=1e-3)
    held = [p.host_memory_gib or 0.0 for p in (on_host, states.predicted, both)]
    # Buffers of 1e9 parameters for states, and of 5e8 weights.
    assert held[0] - held[1] == pytest.approx(8 * 16 * (own - min(own, 1e9)) / GIB, abs=0.5)
    assert held[1] - held[2] == pytest.approx(8 * (2 * own - 1e9) / GIB, rel=1e-3)
    gpu = [p.memory_gib[0] for p in (on_host, both)]
    assert gpu[0] == gpu[1]


def test_drives_need_a_rate_and_what_lies_on_them(tmp_path: Path) -> None:
    text = config(offload_param=DRIVES, offload_optimizer=DRIVES)
    with pytest.raises(InputError, match="nvme_gb_per_s: needs the rate"):
        on_drives(tmp_path, text, rate=None)
    run: dict[str, object] = {"gpus": 8, "seq_len": 4096, "global_batch": 8, "zero_stage": 3}
    run |= {"framework": "deepspeed"}
    row = {"model": "llama-3-8b", "cluster": "dgx-a100"}
    for name, beside in (
        ("optimizer_on_drives", "optimizer_offload: 100"),
        ("parameters_on_drives", "parameter_offload: true"),
    ):
        with pytest.raises(InputError, match=f"run.{name}: is DeepSpeed's, beside {beside}"):
            run_from_mapping(row | {"run": run | {name: True}}, where="run")


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
    (change,) = [bar for bar in document.waterfall if "parameter offload" in bar.change]
    assert change.alone_s is not None
    assert change.alone_s < 0
    in_turn = sum(bar.in_turn_s for bar in document.waterfall)
    assert in_turn == pytest.approx(document.difference_s)
