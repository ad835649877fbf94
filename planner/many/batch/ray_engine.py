"""The jobs of a batch on a Ray cluster. Needs `pip install meshwright[ray]` on every machine of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from meshwright.errors import InputError
from meshwright.planner.many.batch.engines import MOST_ATTEMPTS, Done, Engine, Task, given_up
from meshwright.planner.many.batch.work import do_job

CONNECT_S = 5.0
AHEAD = 2
"""Jobs handed out for each core of the cluster, so that none waits for the next."""


def ray_engine(address: str | None, cache_folder: str | None) -> Engine:
    """Tasks on the cluster at `address` (`auto`: the one this machine belongs to; None: one of its own).

    A job whose worker or machine is lost is done again elsewhere, up to three times. Answers are cached on
    the machine that finds them. Raises InputError where Ray is missing or the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError:
        raise InputError(
            "Ray is not installed: pip install 'meshwright[ray]'", where="--engine ray"
        ) from None
    _check_address(address)
    # A worker finds this program by its installation, not by a copy of the folder the user stands in.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            include_dashboard=False if address is None else None,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"no Ray cluster there ({error})", where="--ray-address", value=address
        ) from None

    def engine(tasks: Iterable[Task]) -> Iterator[Done]:
        try:
            yield from _run(ray, tasks, cache_folder)
        finally:
            ray.shutdown()

    return engine


def _check_address(address: str | None) -> None:
    """Ray waits for minutes where nobody answers. Raises InputError within seconds."""
    host, colon, port = (address or "").rpartition(":")
    if not colon or "/" in host:
        return
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_S):
            return
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"no Ray cluster there ({error})", where="--ray-address", value=address
        ) from None


def _run(ray: Any, tasks: Iterable[Task], cache_folder: str | None) -> Iterator[Done]:
    remote = ray.remote(num_cpus=1, max_retries=MOST_ATTEMPTS - 1)(do_job)
    waiting = iter(tasks)
    under_way: dict[Any, Task] = {}
    while True:
        limit = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        for task in islice(waiting, max(0, limit - len(under_way))):
            under_way[remote.remote(dict(task[1]), cache_folder)] = task
        if not under_way:
            return
        finished, _ = ray.wait(list(under_way), num_returns=1)
        for reference in finished:
            position, fields = under_way.pop(reference)
            try:
                yield position, ray.get(reference)
            except ray.exceptions.RayError:
                yield position, given_up(fields, MOST_ATTEMPTS)
