"""Times operations with PyTorch, on GPUs or on a CPU; imported and run only where `calibrate --measure` asks.

Collectives run in a process a device. On one node they are started here (`python -m` this module, which finds
its operations as JSON in a folder and leaves its times there); under torchrun the processes are there
already, and all of them call `collectives`.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.cluster_specs.reader import device_names, load_cluster, load_device, node_kind_of
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InputError
from meshwright.model_specs.reader import load_catalog_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.runs.calibration.machine import (
    COLLECTIVES,
    DEFAULT_MINUTES,
    DEFAULT_MODEL,
    Case,
    MachineReport,
    Sizes,
    Timing,
    cases_of,
    machine_report,
)
from meshwright.planner.runs.run_file import Run

_ON_CPU = Sizes(
    tokens=(64, 256), sequence=(128, 256), copies=(2**22, 2**24), messages=(2**14, 2**18, 2**22)
)
_LEAST_S = 0.2
"""Of the repeats of one operation on a GPU, so that clocks settle at the power that it draws."""
_MOST_REPEATS = 200
_WARM_UPS = 2
_MEMORY_SHARE = 0.4
"""Of free memory that one operation may take."""
_SAME_MEMORY = 0.06
"""Relative difference of memory up to which a device may be one of the catalog."""
_FORM = re.compile(r"sxm|pcie|\d+gb|\d+w")
"""Words of a device's name that say its form, memory or power, not its product."""
_CAPABILITY_OF_FP8 = (8, 9)
"""Ada, the first whose tensor cores multiply FP8 (CUDA C++ programming guide, compute capabilities)."""


def imported_torch() -> Any:
    """The module torch.

    Raises
    ------
    InputError
        Where it is not installed, with what to install.
    """
    try:
        import torch
    except ImportError:
        what = (
            "needs PyTorch, which is not installed in this environment: `pip install torch` with the "
            "CUDA or ROCm build for these GPUs (https://pytorch.org/get-started/locally)"
        )
        raise InputError(what, where="--measure") from None
    return torch


class TorchTimer:
    """This process' device: the GPU of its local rank, or the CPU where there is none."""

    def __init__(self) -> None:
        torch = imported_torch()
        self._torch = torch
        self.on_gpu = bool(torch.cuda.is_available())
        self._device = torch.device("cpu")
        self.device, self.gpus, self.sizes = _cpu_name(), 0, _ON_CPU
        self.software = f"torch {torch.__version__}"
        if self.on_gpu:
            number = int(os.environ.get("LOCAL_RANK", "0"))
            self._device = torch.device("cuda", number)
            torch.cuda.set_device(self._device)
            self.device = str(torch.cuda.get_device_name(number))
            self.gpus, self.sizes = int(torch.cuda.device_count()), Sizes()
            runtime = torch.version.cuda or torch.version.hip
            self.software += f", {'CUDA' if torch.version.cuda else 'ROCm'} {runtime}"
        if _world() > 1:
            self.gpus = _world()

    @property
    def is_first(self) -> bool:
        """Whether this process reports: rank 0 of torchrun, or the only one."""
        return int(os.environ.get("RANK", "0")) == 0

    def catalog_device(self) -> str:
        """The device of the catalog that this GPU is, by name, processors and memory.

        Returns
        -------
        str

        Raises
        ------
        InputError
            On a CPU, and where no device, or more than one, goes with it: `--cluster` then says which.
        """
        if not self.on_gpu:
            raise InputError(
                "no GPU is visible: name the cluster that this machine is set against",
                where="--cluster",
            )
        properties = self._torch.cuda.get_device_properties(self._device)
        near = devices_like(
            self.device, properties.total_memory / 2**30, int(properties.multi_processor_count)
        )
        if len(near) != 1:
            raise InputError(
                f"{self.device!r} is {'several devices' if near else 'no device'} of the catalog: "
                "name a cluster with it",
                where="--cluster",
                allowed=near or device_names(),
            )
        return near[0]

    def seconds(self, case: Case, limit_s: float) -> Timing | None:
        """Times one operation on one device; None where it cannot run.

        Parameters
        ----------
        case : Case
        limit_s : float
            What it may take, warm-up aside.

        Returns
        -------
        Timing or None
        """
        if self.on_gpu and _bytes_of(case) > _MEMORY_SHARE * self._free_bytes():
            return None
        try:
            with self._torch.no_grad() if case.kind != "attention-backward" else nullcontext():
                return self._timed(case, limit_s)
        except (RuntimeError, AttributeError, TypeError, NotImplementedError):
            # Kernels that this build, this device or these shapes do not have.
            return None

    def _timed(self, case: Case, limit_s: float) -> Timing | None:
        if case.kind == "launch":
            return self._launches(case, limit_s)
        if case.kind in ("attention", "attention-backward"):
            return self._attention(case, limit_s)
        makers: Mapping[str, Callable[[Case], Callable[[], object]]] = {
            "gemm": self._gemm,
            "grouped-gemm": self._grouped_gemm,
            "copy": self._copy,
        }
        return self._repeated(makers[case.kind](case), limit_s)

    def _free_bytes(self) -> float:
        return float(self._torch.cuda.mem_get_info(self._device)[0])

    def _synchronise(self) -> None:
        if self.on_gpu:
            self._torch.cuda.synchronize(self._device)

    def _repeated(self, work: Callable[[], object], limit_s: float, kernel: str = "") -> Timing:
        """The median of batches of calls, each batch long enough for the clock and the host's launches."""
        for _ in range(_WARM_UPS if self.on_gpu else 1):
            work()
        self._synchronise()
        began = time.perf_counter()
        work()
        self._synchronise()
        once_s = max(time.perf_counter() - began, 1e-7)
        wanted = min(_MOST_REPEATS, max(5, math.ceil(_LEAST_S / once_s)))
        repeats = max(1, min(wanted, int(limit_s / once_s)))
        batches = min(5, repeats)
        calls = repeats // batches
        times = []
        for _ in range(batches):
            began = time.perf_counter()
            for _ in range(calls):
                work()
            self._synchronise()
            times.append((time.perf_counter() - began) / calls)
        return Timing(seconds=float(np.median(times)), repeats=batches * calls, kernel=kernel)

    def _random(self, *shape: int, precision: str) -> Any:
        """Normal numbers: how much power a product draws depends on its operands."""
        torch = self._torch
        kind = torch.float16 if precision == "fp16" else torch.bfloat16
        values = torch.randn(*shape, device=self._device, dtype=kind)
        return values.to(torch.float8_e4m3fn) if precision == "fp8" else values

    def _gemm(self, case: Case) -> Callable[[], object]:
        torch = self._torch
        m, n, k = case.sizes
        a = self._random(m, k, precision=case.precision)
        right = self._random(n, k, precision=case.precision)
        if case.precision != "fp8":
            return lambda: a @ right.t()
        if not self.on_gpu or torch.cuda.get_device_capability(self._device) < _CAPABILITY_OF_FP8:
            raise NotImplementedError
        one = torch.ones((), device=self._device)
        return lambda: torch._scaled_mm(
            a, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def _grouped_gemm(self, case: Case) -> Callable[[], object]:
        torch = self._torch
        m, n, k, groups = case.sizes
        right = self._random(groups, n, k, precision=case.precision).transpose(1, 2)
        if self.on_gpu and hasattr(torch, "_grouped_mm"):
            a = self._random(groups * m, k, precision=case.precision)
            ends = torch.arange(m, groups * m + 1, m, device=self._device, dtype=torch.int32)
            try:
                torch._grouped_mm(a, right, offs=ends)
                return lambda: torch._grouped_mm(a, right, offs=ends)
            except RuntimeError:
                pass
        batched = self._random(groups, m, k, precision=case.precision)
        return lambda: torch.bmm(batched, right)

    def _attention(self, case: Case, limit_s: float) -> Timing | None:
        """The fastest of the fused kernels that PyTorch has here."""
        timings = []
        for kernel, backend in self._backends():
            try:
                work = self._attended(case, backend)
                timings.append(self._repeated(work, limit_s / 2.0, kernel))
            except RuntimeError:
                continue
        return min(timings, key=lambda timing: timing.seconds, default=None)

    def _backends(self) -> Iterator[tuple[str, Any]]:
        if not self.on_gpu:
            yield "", None
            return
        kinds = self._torch.nn.attention.SDPBackend
        yield "flash-2", kinds.FLASH_ATTENTION
        if hasattr(kinds, "CUDNN_ATTENTION") and self._torch.version.cuda:
            yield "cudnn", kinds.CUDNN_ATTENTION

    def _attended(self, case: Case, backend: Any) -> Callable[[], object]:
        torch = self._torch
        sequences, tokens, heads, kv_heads, width, value_width = case.sizes
        backward = case.kind == "attention-backward"
        # Heads of keys are repeated beforehand: not every kernel takes fewer of them.
        shapes = ((heads, width), (kv_heads, width), (kv_heads, value_width))
        tensors = [
            self._random(sequences, number, tokens, size, precision=case.precision)
            .repeat_interleave(heads // number, dim=1)
            .requires_grad_(backward)
            for number, size in shapes
        ]
        attend = torch.nn.functional.scaled_dot_product_attention

        def forward() -> Any:
            chosen = nullcontext() if backend is None else torch.nn.attention.sdpa_kernel(backend)
            with chosen:
                return attend(*tensors, is_causal=True)

        output = forward()
        if not backward:
            return forward
        gradient = torch.randn_like(output)
        return lambda: torch.autograd.grad(output, tensors, gradient, retain_graph=True)

    def _copy(self, case: Case) -> Callable[[], object]:
        torch = self._torch
        source = torch.zeros(case.sizes[0], device=self._device, dtype=torch.uint8)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def _launches(self, case: Case, limit_s: float) -> Timing:
        """The host's time of a launch: many of a kernel that the GPU ends sooner than the next one comes."""
        count = case.sizes[0]
        value = self._torch.zeros(1, device=self._device)
        times: list[float] = []
        end = time.perf_counter() + limit_s
        while len(times) < 2 or (len(times) < 10 and time.perf_counter() < end):
            self._synchronise()
            began = time.perf_counter()
            for _ in range(count):
                value.add_(1.0)
            times.append((time.perf_counter() - began) / count)
        self._synchronise()
        return Timing(seconds=float(np.median(times)), repeats=count * len(times))

    def collectives(self, cases: Sequence[Case], limit_s: float) -> list[Timing | None]:
        """Times operations of several devices: in processes of their own, or in those of torchrun.

        Parameters
        ----------
        cases : sequence of Case
        limit_s : float
            After which processes are ended; what they had not said by then is None.

        Returns
        -------
        list of Timing or None
        """
        if _world() > 1:
            return self.collectives_of_ranks(cases, limit_s, "env://")
        return collectives_of_processes(cases, max(self.gpus, 2), limit_s)

    def collectives_of_ranks(
        self, cases: Sequence[Case], limit_s: float, init_method: str
    ) -> list[Timing | None]:
        """What each process of a group does: all join in every operation that has their rank.

        Parameters
        ----------
        cases : sequence of Case
        limit_s : float
            For one operation of the group.
        init_method : str
            Where processes meet, as `torch.distributed.init_process_group` takes it.

        Returns
        -------
        list of Timing or None
            As this process saw it; None where it had no part.
        """
        dist, world = self._torch.distributed, _world()
        dist.init_process_group(
            "nccl" if self.on_gpu else "gloo",
            init_method=init_method,
            rank=int(os.environ.get("RANK", "0")),
            world_size=world,
            timeout=timedelta(seconds=max(limit_s, 10.0)),
        )
        try:
            groups = {
                ranks: dist.new_group(list(range(ranks)))
                for ranks in sorted({case.sizes[1] for case in cases})
                if ranks <= world
            }
            return [self._collective(case, groups.get(case.sizes[1])) for case in cases]
        finally:
            dist.destroy_process_group()

    def _collective(self, case: Case, group: Any) -> Timing | None:
        torch, dist = self._torch, self._torch.distributed
        size_bytes, ranks = case.sizes
        if group is None or dist.get_rank() >= ranks:
            return None
        elements = max(size_bytes // 2 // ranks, 1) * ranks
        buffer = torch.ones(elements, device=self._device, dtype=torch.bfloat16)
        part = torch.ones(elements // ranks, device=self._device, dtype=torch.bfloat16)
        sent = torch.ones_like(buffer)
        works: Mapping[str, Callable[[], object]] = {
            "all-reduce": lambda: dist.all_reduce(buffer, group=group),
            "all-gather": lambda: dist.all_gather_into_tensor(buffer, part, group=group),
            "all-to-all": lambda: dist.all_to_all_single(buffer, sent, group=group),
        }
        work = works[case.kind]
        try:
            for _ in range(_WARM_UPS):
                work()
            self._synchronise()
            times = []
            for _ in range(10):
                dist.barrier(group=group)
                self._synchronise()
                began = time.perf_counter()
                work()
                self._synchronise()
                times.append(time.perf_counter() - began)
        except (RuntimeError, NotImplementedError):
            return None
        return Timing(seconds=float(np.median(times)), repeats=len(times))


def devices_like(name: str, memory_gib: float, processors: int) -> list[str]:
    """Devices of the catalog that a driver may mean.

    Parameters
    ----------
    name : str
        As the driver says it, such as `NVIDIA H100 80GB HBM3`.
    memory_gib : float
        In all.
    processors : int
        Streaming multiprocessors, or compute units.

    Returns
    -------
    list of str
        Whose product name stands in it, with as many processors and the nearest memory, within 6 %.
    """
    words = "".join(letter if letter.isalnum() else " " for letter in name.lower()).split()
    near: dict[str, float] = {}
    for device in device_names():
        spec = load_device(device)
        parts = device.split("-")
        product = {word for word in parts if not _FORM.fullmatch(word)}
        is_card = "pcie" in words or "nvl" in words
        other_form = ("sxm" in parts and is_card) or ("pcie" in parts and "pcie" not in words)
        off = abs(spec.hbm_gib / memory_gib - 1.0)
        alike = spec.sms == processors and off <= _SAME_MEMORY and not other_form
        if alike and product <= set(words):
            near[device] = off
    nearest = min(near.values(), default=0.0)
    return [device for device, off in near.items() if off <= nearest + 1e-9]


def _bytes_of(case: Case) -> float:
    """What an operation keeps in memory, about."""
    sizes = case.sizes
    if case.kind in ("gemm", "grouped-gemm"):
        m, n, k = sizes[:3]
        groups = sizes[3] if len(sizes) > 3 else 1
        return 2.0 * groups * (2 * m * k + 2 * n * k + m * n)
    if case.kind in ("attention", "attention-backward"):
        sequences, tokens, heads, _, width, value_width = sizes
        return 2.0 * 8.0 * sequences * tokens * heads * (width + value_width)
    return 2.0 * sizes[0] if case.kind == "copy" else 0.0


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _cpu_name() -> str:
    import platform

    return platform.processor() or platform.machine() or "CPU"


def machine_word(
    runs: Sequence[Run] = (),
    *,
    name: str | None = None,
    like: str | None = None,
    minutes: float = DEFAULT_MINUTES,
    model: ModelSpec | None = None,
    cluster: ClusterSpec | None = None,
    progress: Callable[[str], None] | None = None,
) -> MachineReport | None:
    """What this machine says of itself, timed with PyTorch.

    Parameters
    ----------
    runs : sequence of Run, optional
        Measured on a machine like this one: the largest gives the model and the cluster by default.
    name, like, minutes, progress
        As `machine.machine_report` has them.
    model : ModelSpec, optional
        Whose shapes are timed; `DEFAULT_MODEL` by default.
    cluster : ClusterSpec, optional
        What the machine is set against; the node of the catalog with the GPUs found here by default.

    Returns
    -------
    MachineReport or None
        None on all ranks but the first of a torchrun.

    Raises
    ------
    InputError
        Without torch, for GPUs that are not in the catalog, and as `machine_report` does.
    """
    timer = TorchTimer()
    largest = max(runs, key=lambda run: run.workload.gpus, default=None)
    if largest is not None:
        model, cluster = model or largest.workload.model, cluster or largest.workload.cluster
    if model is None:
        model = load_catalog_model(DEFAULT_MODEL)
    if cluster is None:
        device = timer.catalog_device()
        node = node_kind_of(device)
        if node is None:
            raise InputError(f"the catalog has no node with {device}", where="--cluster")
        cluster = load_cluster(node)
    if not timer.is_first:
        cases = cases_of(model, cluster, timer.sizes, timer.gpus)
        together = [case for case in cases if case.kind in COLLECTIVES]
        timer.collectives(together, 60.0 * minutes)
        return None
    return machine_report(
        timer, model, cluster, name=name, like=like, minutes=minutes, progress=progress
    )


# Processes of one node.


_CASES, _TIMES = "cases.json", "times.json"
"""Files of the folder where they meet: what is asked of all, and what the first of them says."""


def collectives_of_processes(
    cases: Sequence[Case], ranks: int, limit_s: float
) -> list[Timing | None]:
    """Times operations in a process for each device of this node.

    Parameters
    ----------
    cases : sequence of Case
    ranks : int
        Processes, at least 2.
    limit_s : float
        After which all of them are ended.

    Returns
    -------
    list of Timing or None
        As the first process saw it; None for all where it did not end in time, or failed.
    """
    question = {"limit_s": limit_s, "cases": [asdict(case) for case in cases]}
    with tempfile.TemporaryDirectory(prefix="meshwright-") as place, _ended() as processes:
        folder = Path(place)
        (folder / _CASES).write_text(json.dumps(question), encoding="utf-8")
        for rank in range(ranks):
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            command = [sys.executable, "-m", __name__, place]
            quiet = subprocess.DEVNULL
            started = subprocess.Popen(
                command, env=os.environ | variables, stdout=quiet, stderr=quiet
            )
            processes.append(started)
        try:
            processes[0].wait(timeout=limit_s)
            rows = json.loads((folder / _TIMES).read_text(encoding="utf-8"))
        except (subprocess.TimeoutExpired, OSError, ValueError):
            return [None] * len(cases)
    return [None if row is None else Timing(**row) for row in rows]


@contextmanager
def _ended() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are ended with the block, whatever ends it."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def rank_main() -> None:
    """One process of `collectives_of_processes`."""
    folder = Path(sys.argv[1])
    question = json.loads((folder / _CASES).read_text(encoding="utf-8"))
    cases = [Case(**{**case, "sizes": tuple(case["sizes"])}) for case in question["cases"]]
    timer = TorchTimer()
    meet = (folder / "meet").as_uri()
    timings = timer.collectives_of_ranks(cases, question["limit_s"], meet)
    if timer.is_first:
        rows = [None if timing is None else asdict(timing) for timing in timings]
        (folder / _TIMES).write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    rank_main()
