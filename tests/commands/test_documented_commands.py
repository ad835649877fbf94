"""Every command in the documents: its options exist, and it runs as it stands, at a smaller size.

The tutorial, the worked examples and the run files have tests of their own.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from meshwright import cli
from meshwright.commands.options import GROUPS
from tests.places import ROOT

PAGES = (
    *("commands", "baseline", "report", "launch", "importers", "many_models", "model", "faq"),
    *(f"commands/{path.stem}" for path in sorted((ROOT / "docs" / "commands").glob("*.md"))),
)
PLAN = "plan llama-3-8b --cluster dgx-h100 --gpus 16 --global-batch 32 --seq-len 4096"
QUICK = " --pin pp=1,micro_batch=1,recompute=none"
PLACEHOLDERS = {
    "plan MODEL --cluster CLUSTER --gpus N --global-batch B --seq-len S": PLAN + QUICK,
    "plan deepseek-v3 ...": "plan olmoe-1b-7b --cluster dgx-h100 --gpus 8 --global-batch 32 "
    "--seq-len 4096 --pin tp=1,pp=1,micro_batch=1,recompute=none",
    "plan ... --cluster cluster.yaml": PLAN.replace("dgx-h100", "cluster.yaml") + QUICK,
    "plan ...": PLAN + QUICK,
    "recommend MODEL": "recommend llama-3-8b",
    "--cluster CLUSTER": "--cluster dgx-h100",
    "--gpus N": "--gpus 16",
    "--global-batch B": "--global-batch 32",
    "--seq-len S": "--seq-len 4096",
    "DIR/plan.yaml": "run/plan.yaml",
    "FILE... --from FORMAT --node NODE": "topology.conf --from slurm --node dgx-h100",
    "-o CLUSTER.yaml": "-o tree.yaml",
}
"""What stands for something of the reader's."""
SMALLER = {
    "gpus=256:2048:x2": "gpus=8:16:x2",
    "gpus=256:1024:x2": "gpus=8:16:x2",
    "llama-2-70b --cluster dgx-h100 --gpus 64 --global-batch 256": "llama-3-8b --cluster dgx-h100 "
    "--gpus 16 --global-batch 32",
    "llama-3-8b --cluster dgx-h100 --gpus 64 --global-batch 256 --seq-len 8192": "llama-3-8b "
    "--cluster dgx-h100 --gpus 16 --global-batch 32 --seq-len 4096 --pin pp=1,micro_batch=1",
    "--gpus 64 --slots 320": "--gpus 16 --slots 32",
    "--cluster superpod-h100 --gpus 128": "--cluster dgx-h100 --gpus 32",
}


def lines_of(page: str) -> list[str]:
    """The lines of a page's blocks that call us, without comments."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.M | re.S)
    lines = (
        "\n".join(block for kind, block in blocks if kind in ("", "sh"))
        .replace("\\\n", " ")
        .splitlines()
    )
    commands = [line for line in lines if line.startswith("meshwright ")]
    return [re.sub(r"\s+#.*", "", line).removeprefix("meshwright ") for line in commands]


def alternatives(line: str) -> list[str]:
    """`a | b | c` as three commands; what stands in brackets is left out."""
    line = re.sub(r"\s*\[[A-Z-][^\]]*\]", "", line)
    head, *others = [part.strip() for part in line.split(" | ")]
    if not others:
        return [head]
    if head.split()[0] == "catalog":
        return [head, *(f"catalog {other}" for other in others)]
    names = [head, *others]
    return [words for words in EXAMPLES if words.split()[0] in names]


EXAMPLES = [words for group in GROUPS.values() for words in group.values()]


def documented() -> list[str]:
    """Every command of the pages and of `--help`, once, with the reader's own things put in."""
    commands: list[str] = []
    for line in [*(line for page in PAGES for line in lines_of(page)), *EXAMPLES]:
        for words in alternatives(line):
            text = words
            for placeholder, value in PLACEHOLDERS.items():
                text = text.replace(placeholder, value)
            commands.append(text)
    return list(dict.fromkeys(commands))


def test_there_are_many() -> None:
    assert len(documented()) > 50


@pytest.mark.parametrize("line", documented())
def test_its_options_exist(line: str) -> None:
    name, *arguments = shlex.split(line)
    command: click.Command = cli.main.commands[name]
    while isinstance(command, click.Group):
        command = command.commands[arguments.pop(0)]
    with command.make_context(name, arguments) as context:
        assert context.params


def write_files_of_a_reader(path: Path) -> None:
    """What a reader has at hand: a plan, a script, runs, loads, jobs, clusters."""
    shutil.copy(ROOT / "tests/data/hf_configs/llama-3.1-8b.json", path / "config.json")
    shutil.copy(ROOT / "docs/examples/megatron_a100.yaml", path / "runs.yaml")
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("run_files",)}
    (text,) = re.findall(r'^```yaml title="run.yaml"\n(.*?)^```', pages["run_files"], re.M | re.S)
    (path / "run.yaml").write_text(text, encoding="utf-8")
    (path / "runs_llama.yaml").write_text(text, encoding="utf-8")
    for name in ("today.sh", "run.sh", "train.sh", "run_llama.sh"):
        (path / name).write_text(SCRIPT, encoding="utf-8")
    (path / "topology.conf").write_text(
        "SwitchName=leaf0 Nodes=rack0n[00-15]\nSwitchName=leaf1 Nodes=rack1n[00-15]\n"
        "SwitchName=spine Switches=leaf[0-1]\n",
        encoding="utf-8",
    )
    (path / "hostfile").write_text("h[1-8] slots=8\nh9 slots=4\n", encoding="utf-8")
    (path / "jobs.yaml").write_text(JOBS, encoding="utf-8")
    np.savez(path / "loads.npz", load=np.random.default_rng(0).lognormal(0, 1, (4, 16)))
    np.savez(path / "routing.npz", load=np.ones((16, 64)))
    (path / "nccl.log").write_text(NCCL_LOG, encoding="utf-8")
    (path / "train.log").write_text(TRAIN_LOG, encoding="utf-8")


SCRIPT = """\
torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --bf16 \\
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --swiglu \\
    --group-query-attention --num-query-groups 8 --kv-channels 128 \\
    --untie-embeddings-and-output-weights --normalization RMSNorm --disable-bias-linear \\
    --position-embedding-type rope --vocab-size 128256 \\
    --tensor-model-parallel-size 8 --sequence-parallel --use-distributed-optimizer \\
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 32
"""
JOBS = """\
schema: 1
jobs:
  - {name: small, model: llama-3-8b, cluster: dgx-h100, gpus: 8, global_batch: 32, seq_len: 4096,
     pin: "pp=1,micro_batch=1,recompute=none"}
"""
TRAIN_LOG = "".join(
    f" iteration {step:8d}/    500 | elapsed time per iteration (ms): 6300.5 |\n"
    for step in (10, 20, 30)
)
NCCL_LOG = "\n".join(
    [
        "# Collective test starting: all_reduce_perf",
        *(
            f"#  Rank {rank:2d} Group  0 Pid   1 on  node{rank // 8} device  {rank % 8} [0x07] NVIDIA A100"
            for rank in range(32)
        ),
        "  4294967296    1073741824     float     sum      -1   40100.0  107.11  207.52      0",
        "  8589934592    2147483648     float     sum      -1   80000.0  107.37  208.04      0",
    ]
)


@pytest.mark.soak
def test_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files_of_a_reader(tmp_path)
    monkeypatch.chdir(tmp_path)
    prepared = [
        f"{PLAN}{QUICK} -o run",
        "topology import topology.conf --from slurm --node dgx-h100 -o cluster.yaml",
        "topology import topology.conf --from slurm --node dgx-h100 -o nodes.yaml",
        "calibrate runs.yaml -o stack.yaml",
    ]
    troubles = []
    # A page and tools are served until they are ended, a machine is timed with PyTorch: they have tests of
    # their own.
    lines = [
        line
        for line in documented()
        if line.split()[0] not in ("serve", "mcp") and "--measure" not in line
    ]
    for number, line in enumerate([*prepared, *lines]):
        text = line
        for documented_size, size in SMALLER.items():
            text = text.replace(documented_size, size)
        if "--expert-loads" in text:
            text = text.replace("loads.npz", "routing.npz")
        if number >= len(prepared):
            text = re.sub(r"-o ([\w./]+)", rf"-o out{number}/\1", text)
        words = shlex.split(text)
        done = CliRunner().invoke(cli.main, words)
        if done.exit_code != 0:
            troubles.append(f"{text}\n{done.exit_code} {done.output[-400:]} {done.stderr[-400:]}")
    assert not troubles, "\n\n".join(troubles)
