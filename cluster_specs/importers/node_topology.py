"""`nvidia-smi topo -m`: how the GPUs and NICs of one node are joined.

Cells (the command's own legend): X itself, NV# that many NVLinks, PIX one PCIe bridge, PXB several, PHB the
host bridge, NODE within a NUMA node, SYS across sockets.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from meshwright.cluster_specs.importers.facts import FileFacts, SourceText, link_fields
from meshwright.cluster_specs.schema import ClusterSpec

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
