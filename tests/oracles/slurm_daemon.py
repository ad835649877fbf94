"""A slurmctld on loopback whose nodes exist in its tables only."""

from __future__ import annotations

import getpass
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

SLURM_CONF = """\
ClusterName=oracle
SlurmctldHost=localhost
SlurmUser={user}
SlurmctldPort={port}
SlurmdPort={slurmd_port}
AuthType=auth/none
CryptoType=crypto/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/cons_tres
TopologyPlugin=topology/tree
GresTypes=gpu
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=600
NodeName={nodes} NodeAddr=127.0.0.1 Sockets=2 CoresPerSocket=32 RealMemory=1000 Gres=gpu:8 State=CLOUD
PartitionName=p Nodes=ALL Default=YES State=UP
"""


def need(*tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(
            f"{', '.join(missing)} not installed (apt-get install slurm-wlm openmpi-bin shellcheck)"
        )


@contextmanager
def slurm_daemon(folder: Path, nodes: str, topology: str) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands ask a controller with these nodes and this topology.conf."""
    need("slurmctld", "sbatch", "scontrol")
    port = _first_port()
    conf = SLURM_CONF.format(
        folder=folder, port=port, slurmd_port=port + 1, user=getpass.getuser(), nodes=nodes
    )
    with _controller(folder, conf, topology) as env:
        yield env


@contextmanager
def slurm_machines(
    folder: Path, names: Sequence[str], gpus: Sequence[int] = ()
) -> Iterator[dict[str, str]]:
    """The same with a slurmd for each node, all on this machine, so that job steps run.

    With `gpus` each node has so many, which are copies of /dev/null, and jobs may have unlike parts, which
    only Slurm's backfill scheduler starts.
    """
    need("slurmctld", "slurmd", "srun")
    port = _first_port()
    fields = {
        "folder": folder,
        "port": port,
        "slurmd_port": port + 1,
        "user": getpass.getuser(),
        "nodes": "x",
    }
    without = ("GresTypes", "Suspend", "Resume", "NodeName", "PartitionName", "SchedulerType")
    lines = [
        text for text in SLURM_CONF.format(**fields).splitlines() if not text.startswith(without)
    ]
    lines = [f"SlurmdSpoolDir={folder}/spool/%n" if "SpoolDir" in text else text for text in lines]
    lines += [
        f"SlurmdPidFile={folder}/%n.pid",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
    ]
    lines += [
        f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port + 2 + index} CPUs=8"
        + (f" Gres=gpu:{gpus[index]}" if gpus else "")
        for index, name in enumerate(names)
    ]
    lines += ["SchedulerType=sched/backfill", "SchedulerParameters=bf_interval=1,sched_interval=1"]
    if gpus:
        lines.append("GresTypes=gpu")
    lines.append("PartitionName=p Nodes=ALL Default=YES State=UP\n")
    counted = "".join(
        f"NodeName={name} Name=gpu File={_gpu_files(folder, name, count)}\n"
        for name, count in zip(names, gpus, strict=bool(gpus))
    )
    switch = f"SwitchName=s Nodes={','.join(names)}\n"
    with _controller(folder, "\n".join(lines), switch, counted) as env:
        for name in names:
            (folder / "spool" / name).mkdir()
        command = ["slurmd", "-D", "-N"]
        null = subprocess.DEVNULL
        daemons = [
            subprocess.Popen([*command, name], env=env, stdout=null, stderr=null) for name in names
        ]
        try:
            yield env
        finally:
            for daemon in daemons:
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(timeout=30)


def _first_port() -> int:
    """The first of 32 ports that no test in another process takes, below those that the system gives out."""
    return 12_000 + os.getpid() % 600 * 32


def _gpu_files(folder: Path, name: str, count: int) -> str:
    """Devices that slurmd takes for a node's GPUs; the test is skipped where none can be made."""
    for gpu in range(count):
        try:
            os.mknod(folder / f"{name}-gpu{gpu}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root can make device files")
    return f"{folder}/{name}-gpu[0-{count - 1}]"


@contextmanager
def _controller(folder: Path, conf: str, topology: str, gres: str = "") -> Iterator[dict[str, str]]:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(conf, encoding="utf-8")
    (folder / "topology.conf").write_text(topology, encoding="utf-8")
    (folder / "gres.conf").write_text(gres, encoding="utf-8")
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    daemon = subprocess.Popen(
        ["slurmctld", "-D", "-c"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(60):
            ready = subprocess.run(
                ["scontrol", "ping"], env=env, capture_output=True, text=True, check=False
            )
            if "is UP" in ready.stdout:
                break
            time.sleep(0.5)
        else:
            pytest.fail((folder / "slurmctld.log").read_text(encoding="utf-8")[-2000:])
        yield env
    finally:
        daemon.terminate()
        daemon.wait(timeout=30)
