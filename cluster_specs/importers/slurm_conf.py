"""Slurm's `topology.conf`: the tree plugin's switches, or the block plugin's blocks.

Format: topology.conf(5) of Slurm 26.11 (SchedMD/slurm doc/man/man5/topology.conf.5). Keys are
case-insensitive, `#` starts a comment, a backslash at the end joins lines. `LinkSpeed` has no unit in Slurm
and is passed over.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.cluster_specs.importers.blocks import Block, facts_of_blocks
from meshwright.cluster_specs.importers.facts import MOST_NODES, FileFacts, SourceText
from meshwright.cluster_specs.importers.hostlists import expand
from meshwright.cluster_specs.importers.switch_tree import SwitchTree
from meshwright.errors import InputError, suggestion

_KEYS = ("SwitchName", "Switches", "Nodes", "LinkSpeed", "BlockName", "BlockSizes")
_CANONICAL = {key.lower(): key for key in _KEYS}
_TITLE = re.compile(r"#\s*([A-Za-z0-9._-]+)=(\S.*?)\s*")


@dataclass(frozen=True, kw_only=True)
class _Line:
    number: int
    fields: dict[str, str]


def read_conf(source: SourceText, titles: bool = False) -> FileFacts:
    """The nodes of a topology.conf under their switches or blocks.

    With `titles`, a comment `# switch.1.1=leaf-a`, which topograph writes, gives the name to show.
    """
    lines = list(_lines(source))
    if not lines:
        raise source.wrong(1, "expected a line with SwitchName= or BlockName=, the file has none")
    shown_names = _titles(source) if titles else {}
    if any("BlockName" in line.fields or "BlockSizes" in line.fields for line in lines):
        return _blocks(source, lines, shown_names)
    return _tree(source, lines, shown_names)


def _tree(source: SourceText, lines: list[_Line], titles: dict[str, str]) -> FileFacts:
    tree = SwitchTree(source)
    speeds = False
    for line in lines:
        name = line.fields.get("SwitchName")
        if not name:
            raise source.expected(line.number, "SwitchName=NAME", " ".join(line.fields))
        tree.add(name, line.number)
        if "Switches" not in line.fields and "Nodes" not in line.fields:
            raise source.wrong(
                line.number, f"switch {name!r}: expected Switches= or Nodes=, got neither"
            )
        for child in names(source, line.number, line.fields.get("Switches")):
            tree.hang_switch(child, name, line.number)
        for node in names(source, line.number, line.fields.get("Nodes")):
            tree.hang_node(node, name, line.number)
        speeds = speeds or "LinkSpeed" in line.fields
    notes = (
        ("LinkSpeed has no unit in Slurm and is passed over; see --oversubscription",)
        if speeds
        else ()
    )
    return tree.facts(titles, notes)


def _blocks(source: SourceText, lines: list[_Line], titles: dict[str, str]) -> FileFacts:
    blocks: list[Block] = []
    sizes: list[int] = []
    for line in lines:
        if "SwitchName" in line.fields or "Switches" in line.fields:
            raise source.wrong(
                line.number, "a switch among blocks; one file describes either a tree or blocks"
            )
        if "BlockSizes" in line.fields:
            sizes = _sizes(source, line.number, line.fields["BlockSizes"])
        if "BlockName" in line.fields:
            name = line.fields["BlockName"]
            nodes = names(source, line.number, line.fields.get("Nodes"))
            blocks.append(Block(name=titles.get(name, name), nodes=tuple(nodes), line=line.number))
        elif "BlockSizes" not in line.fields:
            raise source.expected(line.number, "BlockName=NAME", " ".join(line.fields))
    return facts_of_blocks(source, blocks, sizes)


def _sizes(source: SourceText, line: int, text: str) -> list[int]:
    parts = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d{0,8}", part) for part in parts):
        raise source.expected(line, "BlockSizes=N,N,... in nodes", text)
    return [int(part) for part in parts]


def names(source: SourceText, line: int, hostlist: str | None) -> list[str]:
    """The names of a host list on a line of a file; none of an absent one."""
    if hostlist is None:
        return []
    try:
        return expand(hostlist, MOST_NODES)
    except InputError as error:
        raise source.wrong(line, str(error)) from None


def _titles(source: SourceText) -> dict[str, str]:
    """Real names by Slurm name; one that stands for several switches tells nothing apart and is left out."""
    matches = (_TITLE.fullmatch(line) for line in source.text.splitlines())
    titles = {match[1]: match[2][:100] for match in matches if match}
    often = Counter(titles.values())
    return {name: title for name, title in titles.items() if often[title] == 1}


def _lines(source: SourceText) -> Iterator[_Line]:
    """The lines with fields, joined where a backslash ends them, comments cut off."""
    start, waiting = 0, ""
    for number, raw in enumerate(source.text.splitlines(), start=1):
        text = raw.split("#", 1)[0].rstrip()
        start = start if waiting else number
        if text.endswith("\\"):
            waiting += text[:-1] + " "
            continue
        words, waiting = (waiting + text).split(), ""
        if words:
            yield _Line(number=start, fields=_fields(source, start, words))
    if waiting.strip():
        raise source.wrong(
            start, "the last line ends with a backslash, the line it goes on with is missing"
        )


def _fields(source: SourceText, line: int, words: list[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise source.expected(line, "KEY=VALUE pairs without spaces around '='", word)
        canonical = _CANONICAL.get(key.lower())
        if canonical is None:
            raise source.wrong(line, f"unknown key {key[:80]!r}{suggestion(key, _KEYS)}")
        if canonical in fields:
            raise source.wrong(line, f"{canonical} is given twice")
        fields[canonical] = value.strip('"')
    return fields
