"""`nvidia-smi topo -m`: how the GPUs and NICs of one node are joined.

Cells (the command's own legend): X itself, NV# that many NVLinks, PIX one PCIe bridge, PXB several, PHB the
host bridge, NODE within a NUMA node, SYS across sockets.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat

from meshwright.cluster_specs.importers.facts import FileFacts, SourceText, link_fields
from meshwright.cluster_specs.schema import Architecture, ClusterSpec
from meshwright.errors import InputError, shown

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CELL = re.compile(r"X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS")
_NEARNESS = ("PIX", "PXB", "PHB", "NODE", "SYS")
MOST_DEVICES = 1024
_LEGEND = "X, NV#, PIX, PXB, PHB, NODE or SYS"


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    cells: dict[tuple[str, str], str]


def read_topo_matrix(source: SourceText, node: ClusterSpec) -> FileFacts:
    """GPUs of the node, those that NVLink joins, and the NICs at their side.

    Raises InputError with the line that is not part of such a matrix, or whose cells contradict another.
    """
    matrix = _matrix(source)
    links: dict[str, dict[str, int]] = {gpu: {} for gpu in matrix.gpus}
    for gpu, peer in itertools.product(matrix.gpus, repeat=2):
        cell = matrix.cells[gpu, peer]
        if cell.startswith("NV"):
            links[gpu][peer] = int(cell[2:])
    fields, notes = link_fields(links, node)
    near = {gpu: _nearest(matrix, gpu) for gpu in matrix.gpus if matrix.nics}
    if near:
        words = ", ".join(f"{gpu} {' '.join(nics)} ({how})" for gpu, (how, nics) in near.items())
        used = {nic for how, nics in near.values() if how in ("PIX", "PXB", "PHB") for nic in nics}
        far = [nic for nic in matrix.nics if nic not in used]
        notes = (*notes, f"nearest NICs: {words}")
        if used and far:
            far_words = f"NICs at no GPU's side, taken as storage or management: {', '.join(far)}"
            notes = (*notes, far_words)
    return FileFacts(node_fields=fields, notes=notes)


def _matrix(source: SourceText) -> _Matrix:
    columns: list[str] = []
    cells: dict[tuple[str, str], str] = {}
    lines: dict[str, int] = {}
    for number, raw in enumerate(source.text.splitlines(), start=1):
        words = _ANSI.sub("", raw).split()
        if not words:
            continue
        if not columns:
            columns = _header(source, number, words)
            continue
        if words[0] not in columns:
            if re.fullmatch(r"(GPU|NIC)\d+", words[0]):
                raise source.expected(
                    number, f"a row of one of {columns[0]} to {columns[-1]}", words[0]
                )
            continue
        if words[0] in lines:
            raise source.wrong(
                number, f"a second row of {words[0]}, first on line {lines[words[0]]}"
            )
        if len(words) <= len(columns):
            raise source.wrong(
                number, f"row {words[0]}: expected {len(columns)} cells, got {len(words) - 1}"
            )
        lines[words[0]] = number
        for column, cell in zip(columns, words[1:], strict=False):
            if not _CELL.fullmatch(cell) or (cell == "X") != (column == words[0]):
                raise source.expected(number, f"row {words[0]}, column {column}: {_LEGEND}", cell)
            cells[words[0], column] = cell
    if not columns:
        raise source.wrong(
            1, "expected the matrix of `nvidia-smi topo -m`, whose first row starts with GPU0"
        )
    gpus = tuple(name for name in columns if name.startswith("GPU"))
    for gpu in gpus:
        if gpu not in lines:
            raise source.wrong(
                max(lines.values(), default=1), f"expected a row of {gpu}, the file has none"
            )
    _check_mirror(source, gpus, cells, lines)
    return _Matrix(gpus=gpus, nics=tuple(columns[len(gpus) :]), cells=cells)


def _header(source: SourceText, number: int, words: list[str]) -> list[str]:
    """The columns up to the affinities; empty while the line is not the header."""
    if words[0] != "GPU0":
        return []
    if any(_CELL.fullmatch(word) for word in words):
        raise source.wrong(number, "a row of GPU0 before the header that names the columns")
    end = next((k for k, word in enumerate(words) if word in ("CPU", "NUMA")), len(words))
    columns = words[:end]
    if len(set(columns)) != len(columns) or len(columns) > MOST_DEVICES:
        raise source.wrong(number, f"expected up to {MOST_DEVICES} different devices in the header")
    gpus = [word for word in columns if re.fullmatch(r"GPU\d+", word)]
    if columns[: len(gpus)] != gpus:
        raise source.wrong(number, "expected the GPUs before the NICs in the header")
    return columns


def _check_mirror(
    source: SourceText,
    gpus: tuple[str, ...],
    cells: dict[tuple[str, str], str],
    lines: dict[str, int],
) -> None:
    for gpu in gpus:
        for peer in gpus:
            if cells[gpu, peer] != cells[peer, gpu]:
                raise source.wrong(
                    lines[gpu],
                    f"{gpu} to {peer} is {cells[gpu, peer]}, but {peer} to {gpu} on line {lines[peer]} "
                    f"is {cells[peer, gpu]}",
                )


def _nearest(matrix: _Matrix, gpu: str) -> tuple[str, list[str]]:
    how = min((matrix.cells[gpu, nic] for nic in matrix.nics), key=_rank)
    return how, [nic for nic in matrix.nics if matrix.cells[gpu, nic] == how]


def _rank(cell: str) -> int:
    return _NEARNESS.index(cell) if cell in _NEARNESS else len(_NEARNESS)


# NCCL's topology of one node: what NCCL_TOPO_DUMP_FILE writes and NCCL_TOPO_FILE reads.
#
# Format: NVIDIA/nccl src/graph/xml.cc and topo.cc: system > cpu > pci > gpu > nvlink, and pci > nic > net
# with `speed` in Mb/s. A file made by hand may stop at the PCI functions; then their class says what they
# are. RCCL writes the same with xgmi links. Document types, the way into XML's attacks, are refused.


DEEPEST, MOST_ELEMENTS = 32, 100_000
ARCHITECTURE_OF_SM: Mapping[int, Architecture] = {
    70: "volta",
    80: "ampere",
    89: "ada",
    90: "hopper",
    100: "blackwell",
    103: "blackwell",
}
"""Compute capability times ten (NVIDIA CUDA GPU table)."""
_SWITCH_CLASS = "0x0680"
"""PCI class of a bridge of another kind: an NVSwitch."""
_GPU_CLASSES = ("0x0302", "0x0300", "0x1200")
_NIC_CLASSES = ("0x0200", "0x0207")


@dataclass
class _Gpu:
    busid: str
    sm: int | None
    line: int
    links: list[tuple[str, int, bool]] = field(default_factory=list)
    """(target, links, whether it is a switch)."""


@dataclass
class _System:
    gpus: list[_Gpu] = field(default_factory=list)
    nets: dict[tuple[str, str], tuple[float, bool]] = field(default_factory=dict)
    """(Gb/s, whether GPUs reach it directly) by name and port."""
    pci_gpus: list[str] = field(default_factory=list)
    pci_nics: list[str] = field(default_factory=list)
    other_hosts: int = 0


def read_nccl_xml(source: SourceText, node: ClusterSpec) -> FileFacts:
    """GPUs, NVLink domain and NIC rate of a node.

    Raises InputError with the line where the XML cannot be read, or where a GPU is not the kind of `node`.
    """
    system = _Reader(source).read()
    notes: list[str] = []
    if system.other_hosts:
        notes.append(f"{system.other_hosts} GPUs of further hosts in the file are left out")
    fields: dict[str, object] = {}
    if system.gpus:
        _check_architecture(source, system.gpus, node)
        fields, link_notes = link_fields(_peers(system.gpus), node)
        notes += link_notes
        to_itself = sum(target == gpu.busid for gpu in system.gpus for target, _, _ in gpu.links)
        if to_itself:
            notes.append(f"{to_itself} links of a GPU to itself are passed over")
    elif system.pci_gpus:
        fields["gpus_per_node"] = len(system.pci_gpus)
        notes.append(
            f"the file has PCI functions only: NVLink and NIC speeds stay those of {node.name}"
        )
    else:
        raise source.wrong(1, "expected gpu elements, or pci elements of a GPU's class; found none")
    direct = {key: gbps for key, (gbps, gdr) in system.nets.items() if gdr}
    used = direct or {key: gbps for key, (gbps, _) in system.nets.items()}
    if used:
        count = len(system.gpus) or len(system.pci_gpus)
        fields["nic_gbps_per_gpu"] = sum(used.values()) / count
        listed = ", ".join(f"{name} {gbps:g} Gb/s" for (name, _), gbps in used.items())
        notes.append(f"NICs of the node: {listed}")
    return FileFacts(node_fields=fields, notes=tuple(notes))


def _check_architecture(source: SourceText, gpus: list[_Gpu], node: ClusterSpec) -> None:
    for gpu in gpus:
        architecture = ARCHITECTURE_OF_SM.get(gpu.sm or 0)
        if architecture is not None and architecture != node.device.architecture:
            device = node.device
            raise source.wrong(
                gpu.line,
                f"a GPU with sm {gpu.sm} is {architecture}, but the node {node.name} has {device.name}, "
                f"which is {device.architecture}; choose the kind of node that this is",
            )


def _peers(gpus: list[_Gpu]) -> dict[str, dict[str, int]]:
    """Links to each peer; through a switch every GPU that is on it gets all of them."""
    on_switch = {gpu.busid: sum(n for _, n, switch in gpu.links if switch) for gpu in gpus}
    peers: dict[str, dict[str, int]] = {gpu.busid: {} for gpu in gpus}
    for gpu in gpus:
        for target, count, switch in gpu.links:
            if not switch and target in peers and target != gpu.busid:
                peers[gpu.busid][target] = peers[gpu.busid].get(target, 0) + count
        if on_switch[gpu.busid]:
            peers[gpu.busid] |= {
                peer: on_switch[gpu.busid]
                for peer, n in on_switch.items()
                if n and peer != gpu.busid
            }
    return peers


class _Reader:
    """Walks the elements with expat, which knows their lines."""

    def __init__(self, source: SourceText) -> None:
        self._source = source
        self._system = _System()
        self._open: list[tuple[str, dict[str, str]]] = []
        self._count = 0
        self._host: str | None = None
        self._foreign = False
        self._parser = expat.ParserCreate()
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.StartDoctypeDeclHandler = self._refuse
        self._parser.EntityDeclHandler = self._refuse

    def read(self) -> _System:
        try:
            self._parser.Parse(self._source.text, True)
        except expat.ExpatError as error:
            reason = expat.ErrorString(error.code)
            raise self._source.wrong(error.lineno, f"not valid XML: {reason}") from None
        except UnicodeEncodeError:
            raise InputError(
                f"{self._source.name}: not valid XML: a character that UTF-8 lacks"
            ) from None
        return self._system

    def _refuse(self, *details: Any) -> None:
        del details
        raise self._source.wrong(
            self._line, "a document type or entity; NCCL writes none, so none is read"
        )

    @property
    def _line(self) -> int:
        return int(self._parser.CurrentLineNumber)

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._count += 1
        if len(self._open) >= DEEPEST or self._count > MOST_ELEMENTS:
            raise self._source.wrong(
                self._line, f"more than {MOST_ELEMENTS} elements or nested deeper than {DEEPEST}"
            )
        if not self._open and name != "system":
            raise self._source.expected(self._line, "the root element system", name)
        if name == "cpu":
            self._host = self._host or attributes.get("host_hash")
            self._foreign = attributes.get("host_hash") not in (None, self._host)
        self._open.append((name, attributes))
        reader = {
            "gpu": self._gpu,
            "nvlink": self._link,
            "xgmi": self._link,
            "net": self._net,
            "pci": self._pci,
        }
        if self._foreign:
            self._system.other_hosts += name == "gpu"
        elif name in reader:
            reader[name](attributes)

    def _end(self, name: str) -> None:
        del name
        self._open.pop()

    def _gpu(self, attributes: dict[str, str]) -> None:
        above = next((fields for name, fields in reversed(self._open[:-1]) if name == "pci"), {})
        sm = self._number(attributes, "sm") if "sm" in attributes else None
        busid = above.get("busid", f"gpu{len(self._system.gpus)}")
        self._system.gpus.append(_Gpu(busid=busid, sm=sm, line=self._line))

    def _link(self, attributes: dict[str, str]) -> None:
        if not any(name == "gpu" for name, _ in self._open) or not self._system.gpus:
            raise self._source.wrong(self._line, "a link outside of a gpu element")
        target, count = attributes.get("target", ""), self._number(attributes, "count")
        switch = attributes.get("tclass", "").startswith(_SWITCH_CLASS)
        self._system.gpus[-1].links.append((target, count, switch))

    def _net(self, attributes: dict[str, str]) -> None:
        speed = self._number(attributes, "speed")
        if speed <= 0:
            return
        key = (attributes.get("name", str(len(self._system.nets))), attributes.get("port", ""))
        self._system.nets[key] = (speed / 1000, attributes.get("gdr") == "1")

    def _pci(self, attributes: dict[str, str]) -> None:
        kind = attributes.get("class", "")
        if kind.startswith(_GPU_CLASSES):
            self._system.pci_gpus.append(attributes.get("busid", ""))
        elif kind.startswith(_NIC_CLASSES):
            self._system.pci_nics.append(attributes.get("busid", ""))

    def _number(self, attributes: dict[str, str], key: str) -> int:
        text = attributes.get(key, "")
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 9):
            raise self._source.wrong(
                self._line, f"{key}: expected a whole number, got {shown(text)}"
            )
        return int(text)
