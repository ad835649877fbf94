"""The hosts that a launch script starts on, in the order of their ranks, as they lie beside it.

`hostfile` has a host a line (DeepSpeed's and OpenMPI's may say slots behind it); `rankfile`, which our
scripts have where ranks do not run through the hosts in turn, has lines `rank, line of hostfile from 0, local
GPU`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.documents.reader import read_text
from meshwright.errors import InputError, shown
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.run_file import MAX_FILE_BYTES, Run
from meshwright.planner.runs.run_settings import places_on_hosts

HOSTFILE, RANKFILE = "hostfile", "rankfile"


def with_hosts_beside(launch: LaunchRun, path: Path) -> LaunchRun:
    """A launch with the hosts of the files that lie beside it, if there are such.

    Raises InputError for a rankfile that cannot be read.
    """
    lines = _lines(path.parent / HOSTFILE)
    hosts = tuple(line.split()[0] for line in lines)
    if not hosts:
        return launch
    return replace(launch, hosts=hosts, places=_places(path.parent / RANKFILE, len(hosts)))


def on_its_hosts(run: Run, launch: LaunchRun) -> Run:
    """A run whose ranks lie on the launch's hosts, where its cluster names them; else a remark why not."""
    cluster = run.workload.cluster
    if not cluster.nodes or run.ranks:
        return run
    words = _obstacle(cluster, launch, int(run.layout.gpus))
    if words is not None:
        remark = f"{words}: its ranks are priced as nested in the blocks of {cluster.name}"
        return replace(run, remarks=(*run.remarks, remark))
    numbers = {node.name: number for number, node in enumerate(cluster.nodes)}
    if launch.places:
        ranks = tuple((numbers[launch.hosts[host]], gpu) for host, gpu in launch.places)
    else:
        ranks = places_on_hosts(cluster, launch.hosts, int(run.layout.gpus))
    return replace(run, ranks=ranks)


def _obstacle(cluster: ClusterSpec, launch: LaunchRun, gpus: int) -> str | None:
    """Why the ranks of a launch cannot be placed on a cluster, in words."""
    if not launch.hosts:
        return f"no {HOSTFILE} lies beside the script"
    nodes = {node.name: node for node in cluster.nodes}
    unknown = sorted(set(launch.hosts) - nodes.keys())
    if unknown:
        return f"{HOSTFILE} has {shown(unknown[0])}, which the cluster has not"
    if launch.places:
        fits = all(0 <= gpu < cluster.gpus_per_node for _, gpu in launch.places)
        is_whole = fits and len(launch.places) == gpus
        return None if is_whole else f"{RANKFILE} has other ranks or GPUs than the launch's {gpus}"
    free = [nodes[name].free_gpus for name in launch.hosts]
    held = [cluster.gpus_per_node if count is None else count for count in free]
    if sum(held) < gpus:
        return f"{HOSTFILE} has {len(held)} hosts, too few for {gpus} ranks"
    in_turn = sum(held) == gpus and len(set(held)) == 1 and len(set(launch.hosts)) == len(held)
    return None if in_turn else f"{HOSTFILE} has other hosts than {gpus} ranks fill in turn"


def _places(path: Path, hosts: int) -> tuple[tuple[int, int], ...]:
    """(line of the hostfile, local GPU) by rank; empty where there is no such file."""
    places: dict[int, tuple[int, int]] = {}
    for line in _lines(path):
        try:
            rank, host, gpu = map(int, line.split())
        except ValueError:
            what = "must be rank, line of hostfile and local GPU"
            raise InputError(what, where=str(path), value=line) from None
        if not 0 <= host < hosts or rank in places:
            raise InputError(
                f"must name each rank once, on one of {hosts} hosts", where=str(path), value=line
            )
        places[rank] = (host, gpu)
    if sorted(places) != list(range(len(places))):
        raise InputError("must have a line for every rank", where=str(path), value=len(places))
    return tuple(places[rank] for rank in range(len(places)))


def _lines(path: Path) -> list[str]:
    """What the lines of a file say, without comments; nothing where there is no such file."""
    if not path.is_file():
        return []
    said = (line.partition("#")[0].strip() for line in read_text(path, MAX_FILE_BYTES).splitlines())
    return [line for line in said if line]
