"""Logs as those who write them write them: torchtitan's line, TensorBoard's files, Megatron's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.test_schedulers import asked_of_oracles
from tests.places import ROOT

pytestmark = pytest.mark.oracle

READ = """
import json, sys
from pathlib import Path
from meshwright.planner.runs.logs import measured_fields, read_log
"""
EVENTS = """
from torch.utils.tensorboard import SummaryWriter

folder, scalars = json.load(sys.stdin)
writer = SummaryWriter(folder)
for name, step, value in scalars:
    writer.add_scalar(name, value, step)
writer.add_text("args", "x" * 1000)
writer.close()
(file,) = Path(folder).glob("events.out.tfevents*")
read = [measured_fields(read_log(path), 1, "x")["measured"] for path in (Path(folder), file)]
file.write_bytes(file.read_bytes()[:30] + b"damaged" * 100)
try:
    read.append(measured_fields(read_log(file), 1, "x")["measured"])
except Exception as error:
    read.append(type(error).__name__)
print(json.dumps(read))
"""
TITAN = """
import logging
from types import SimpleNamespace
from torchtitan.components import metrics as titan
from torchtitan.tools import utils

path = json.load(sys.stdin)
handler = logging.FileHandler(path)
titan.logger.addHandler(handler)
titan.logger.setLevel(logging.INFO)
processor = titan.MetricsProcessor.__new__(titan.MetricsProcessor)
stats = titan.DeviceMemStats(40.0, 50.0, 41.25, 52.0, 0, 0)
processor.__dict__.update(
    time_last_log=0.0, ntokens_since_last_log=0, data_loading_times=[0.1], has_quantization=False,
    parallel_dims=SimpleNamespace(non_data_parallel_size=2), config=SimpleNamespace(log_freq=10),
    num_flops_per_token=1, gpu_peak_flops=1.0, logger=titan.BaseLogger(), color=utils.Color(),
    device_memory_monitor=SimpleNamespace(
        get_peak_stats=lambda: stats, reset_peak_stats=lambda: None
    ),
)
clock = iter(range(0, 10**6, 10))
titan.time = SimpleNamespace(perf_counter=lambda: next(clock))
processor.time_last_log = titan.time.perf_counter()
for step in (1, 10, 20, 30):
    processor.ntokens_since_last_log, processor.data_loading_times = 160_000, [0.1]
    processor.log(step, 8.0, 8.1, 1.0)
handler.close()
print(json.dumps(measured_fields(read_log(Path(path)), 1, "x")["measured"]))
"""
SOURCES = """
import importlib.util
spec = importlib.util.find_spec("megatron.core")
top = Path(spec.origin).parents[1]
names = json.load(sys.stdin)
print(json.dumps({name: (top / name).read_text() for name in names}))
"""


def asked(code: str, question: object, folder: Path) -> Any:
    """What code that reads logs prints in the environment of the oracles."""
    (folder / "meshwright").symlink_to(ROOT)
    return json.loads(asked_of_oracles(READ + code, question, PYTHONPATH=str(folder)))


def test_tensorboards_files_are_read_by_its_own_package(tmp_path: Path) -> None:
    times = {10: 5.0, 20: 1.0, 30: 1.25, 40: 1.125}
    scalars = [("iteration-time", step, seconds) for step, seconds in times.items()]
    scalars += [("mem-max-allocated-bytes", 10, 2.0**34), ("lm loss", 10, 3.0)]
    folder, file, damaged = asked(EVENTS, [str(tmp_path / "tb"), scalars], tmp_path)
    assert folder == file
    assert folder == {
        "step_time_s": 1.125,
        "memory_gib": 16.0,
        "memory_note": "peak allocated, one rank",
    }
    assert damaged == "InputError"


def test_torchtitans_own_line_is_read(tmp_path: Path) -> None:
    """160,000 tokens of a data-parallel rank in intervals of 10 s, on two GPUs that share them."""
    measured = asked(TITAN, str(tmp_path / "titan.log"), tmp_path)
    assert measured == {
        "tokens_per_s_per_gpu": 8000.0,
        "memory_gib": 41.25,
        "memory_note": "peak reserved, rank 0",
    }


def test_megatron_still_says_it_in_these_words(tmp_path: Path) -> None:
    of_lm = ("training/training.py", "training/utils/common_utils.py")
    of_bridge = "bridge/training/utils/train_utils.py"
    sources: dict[str, str] = asked(SOURCES, [*of_lm, of_bridge], tmp_path)
    for name in (of_lm[0], of_bridge):
        for words in (
            "iteration {:8d}/{:8d} |",
            "elapsed time per iteration (ms): {:.1f} |",
            "iteration-time",
        ):
            assert words in sources[name], (name, words)
    assert "mem-max-allocated-bytes" in sources[of_lm[0]]
    assert "' memory (MB)'" in sources[of_lm[1]]
    assert "| max allocated: {" in sources[of_lm[1]]
    assert "mega_bytes = 1024.0 * 1024.0" in sources[of_lm[1]]
    assert "memory (GB)" in sources[of_bridge]
    assert 'name.replace("bytes", "gigabytes")' in sources[of_bridge]
    assert "/ 1.0e9" in sources[of_bridge]
