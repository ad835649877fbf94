"""Slurm's `topology.conf`: the tree plugin's switches, or the block plugin's blocks.

Format: topology.conf(5) of Slurm 26.11 (SchedMD/slurm doc/man/man5/topology.conf.5). Keys are
case-insensitive, `#` starts a comment, a backslash at the end joins lines. `LinkSpeed` has no unit in Slurm
and is passed over. `scontrol show topology` prints the same lines with a `Level` or `BlockIndex`, and behind
a switch of switches all nodes below it (`_print_topo_record` of SchedMD/slurm src/plugins/topology).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import yaml

from meshwright.cluster_specs.importers.facts import (
    MOST_NODES,
    Block,
    FileFacts,
    PlacedNode,
    SourceText,
    SwitchTree,
    expand,
    facts_of_blocks,
    level_names,
)
from meshwright.documents import compose
from meshwright.errors import InputError, shown, suggestion

_KEYS = ("SwitchName", "Switches", "Nodes", "LinkSpeed", "BlockName", "BlockSizes")
_PRINTED = ("Level", "BlockIndex")
"""What `scontrol show topology` adds; neither says more than the names."""
_CANONICAL = {key.lower(): key for key in (*_KEYS, *_PRINTED)}
_TITLE = re.compile(r"#\s*([A-Za-z0-9._-]+)=(\S(?:.*\S)?)\s*")


@dataclass(frozen=True, kw_only=True)
class _Line:
    number: int
    fields: dict[str, str]


def read_conf(source: SourceText, titles: bool = False) -> FileFacts:
    """The nodes of a topology.conf under their switches or blocks.

    With `titles`, a comment `# switch.1.1=leaf-a`, which topograph writes, gives the name to show.

    Parameters
    ----------
    source
        The file.
    titles
        Whether comments are read for names.
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
        if "Level" in line.fields and "Switches" in line.fields:
            continue
        for node in names(source, line.number, line.fields.get("Nodes")):
            tree.hang_node(node, name, line.number)
    speeds = any("LinkSpeed" in line.fields for line in lines)
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
    """The names of a host list on a line of a file; none of an absent one.

    Parameters
    ----------
    source
        The file, for messages.
    line
        Its number, from 1.
    hostlist
        As Slurm writes it; None where there is none.
    """
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


# Slurm's `topology.yaml` (from 25.05): a list of named topologies, each a tree, blocks or flat.
#
# Format: topology.yaml(5) (SchedMD/slurm doc/man/man5/topology.yaml.5).


Fields = Mapping[str, yaml.Node]
_KINDS = ("tree", "block", "flat")


def read_yaml(source: SourceText, topology: str | None = None) -> FileFacts:
    """The nodes of one topology: the one asked for, else the cluster's default, else the first.

    Raises InputError, with the line, if there is no such topology or if it is flat.

    Parameters
    ----------
    source
        The file, a list of topologies.
    topology
        The name of one; None for the default.
    """
    entries = {}
    for node in _items(source, compose(source.text, source.name), "a list of topologies"):
        fields = _yaml_fields(source, node, ("topology", "cluster_default", *_KINDS))
        entries[_text(source, fields, "topology", node)] = (node, fields)
    if topology is not None and topology not in entries:
        raise InputError(
            f"{source.name}: no topology {shown(topology)} in this file{suggestion(topology, entries)}"
        )
    default = next((name for name, (_, fields) in entries.items() if _is_default(fields)), None)
    chosen = topology or default or next(iter(entries), None)
    if chosen is None:
        raise source.wrong(1, "expected at least one topology, the list is empty")
    node, fields = entries[chosen]
    facts = _topology(source, node, fields)
    if len(entries) > 1:
        other_names = ", ".join(name for name in entries if name != chosen)
        note = f"topology {chosen!r} of {len(entries)}; --topology takes one of the others: {other_names}"
        return replace(facts, notes=(*facts.notes, note))
    return facts


def _topology(source: SourceText, node: yaml.Node, fields: Fields) -> FileFacts:
    kinds = [kind for kind in _KINDS if kind in fields]
    if len(kinds) != 1:
        raise source.expected(_line(node), "exactly one of tree, block, flat", ", ".join(kinds))
    if kinds[0] == "flat":
        raise source.wrong(
            _line(node), "a flat topology names no switches; choose another with --topology"
        )
    if kinds[0] == "tree":
        return _yaml_tree(source, fields["tree"])
    return _yaml_blocks(source, fields["block"])


def _yaml_tree(source: SourceText, node: yaml.Node) -> FileFacts:
    tree = SwitchTree(source)
    for entry in _items(
        source, _yaml_fields(source, node, ("switches",)).get("switches"), "switches: a list"
    ):
        fields = _yaml_fields(source, entry, ("switch", "children", "nodes"))
        name, line = _text(source, fields, "switch", entry), _line(entry)
        tree.add(name, line)
        for child in names(source, line, _optional(source, fields, "children")):
            tree.hang_switch(child, name, line)
        for host in names(source, line, _optional(source, fields, "nodes")):
            tree.hang_node(host, name, line)
    return tree.facts()


def _yaml_blocks(source: SourceText, node: yaml.Node) -> FileFacts:
    fields = _yaml_fields(source, node, ("block_sizes", "blocks"))
    sizes = []
    for entry in (
        _items(source, fields["block_sizes"], "a list of sizes") if "block_sizes" in fields else ()
    ):
        text = entry.value if isinstance(entry, yaml.ScalarNode) else ""
        if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0):
            raise source.expected(_line(entry), "a block size in nodes", text)
        sizes.append(int(text))
    blocks = []
    for entry in _items(source, fields.get("blocks"), "blocks: a list"):
        inner = _yaml_fields(source, entry, ("block", "nodes"))
        line = _line(entry)
        hosts = names(source, line, _optional(source, inner, "nodes"))
        blocks.append(
            Block(name=_text(source, inner, "block", entry), nodes=tuple(hosts), line=line)
        )
    return facts_of_blocks(source, blocks, sizes)


def _is_default(fields: Fields) -> bool:
    node = fields.get("cluster_default")
    return isinstance(node, yaml.ScalarNode) and node.value.lower() in ("true", "yes", "on")


def _items(source: SourceText, node: yaml.Node | None, what: str) -> list[yaml.Node]:
    if not isinstance(node, yaml.SequenceNode):
        raise source.expected(_line(node), what, getattr(node, "value", None))
    return list(node.value)


def _yaml_fields(source: SourceText, node: yaml.Node, allowed: tuple[str, ...]) -> Fields:
    if not isinstance(node, yaml.MappingNode):
        raise source.expected(_line(node), f"a mapping with {', '.join(allowed)}", node.value)
    fields = {}
    for key, value in node.value:
        if key.value not in allowed:
            raise source.wrong(
                _line(key), f"unknown key {shown(key.value)}{suggestion(key.value, allowed)}"
            )
        fields[str(key.value)] = value
    return fields


def _text(source: SourceText, fields: Fields, key: str, node: yaml.Node) -> str:
    text = _optional(source, fields, key)
    if not text:
        raise source.wrong(_line(node), f"expected {key}: NAME, got none")
    return text


def _optional(source: SourceText, fields: Fields, key: str) -> str | None:
    node = fields.get(key)
    if node is None:
        return None
    if not isinstance(node, yaml.ScalarNode):
        raise source.expected(_line(node), f"{key}: one text", node.value)
    return str(node.value)


def _line(node: yaml.Node | None) -> int:
    return node.start_mark.line + 1 if node is not None and node.start_mark else 1


# What NVIDIA topograph writes: the text of its Slurm engine, or the JSON of its graph engine.
#
# Formats: NVIDIA/topograph pkg/translate (Slurm tree, block and YAML texts; a comment above each switch gives
# its real name) and docs/engines/graph.md (`instances` with `network_layers`, closest first).


DOMAIN = "accelerator.topograph.run/domain"
"""The label of an instance's NVLink domain."""
APART = "fabric"


def read_topograph(source: SourceText, topology: str | None = None) -> FileFacts:
    """The nodes of a topograph output, whichever of its formats it is in.

    Parameters
    ----------
    source
        The output: a graph in JSON, YAML or a topology.conf.
    topology
        The name of one of several, where it is YAML; None for the default.
    """
    if source.head.lstrip().startswith("{"):
        return _graph(source)
    if source.head.startswith("- "):
        return read_yaml(source, topology)
    return read_conf(source, titles=True)


def _graph(source: SourceText) -> FileFacts:
    root = compose(source.text, source.name)
    instances = _get(root, "instances")
    if not isinstance(instances, yaml.SequenceNode):
        raise source.wrong(1, "expected an object with a list of 'instances'")
    if len(instances.value) > MOST_NODES:
        raise source.wrong(1, f"more than {MOST_NODES} instances")
    paths: dict[str, tuple[str, ...]] = {}
    domains: dict[str, str] = {}
    for entry in instances.value:
        line = entry.start_mark.line + 1
        identity = _get(entry, "id")
        if not isinstance(identity, yaml.ScalarNode) or not identity.value:
            raise source.wrong(line, "an instance: expected an 'id'")
        name = str(identity.value)
        if name in paths:
            raise source.wrong(line, f"instance {name!r} is listed twice")
        paths[name] = _layers(source, entry, name, line)
        domain = _get(_get(entry, "labels"), DOMAIN)
        if isinstance(domain, yaml.ScalarNode):
            domains[name] = str(domain.value)
    return _placed(source, paths, domains)


def _placed(
    source: SourceText, paths: Mapping[str, tuple[str, ...]], domains: Mapping[str, str]
) -> FileFacts:
    notes = []
    if not paths:
        raise source.wrong(1, "expected at least one instance, the list is empty")
    without = sum(not path for path in paths.values())
    if without and domains.keys() == paths.keys():
        paths = {name: (domains[name], *path) for name, path in paths.items()}
        notes.append(
            "some instances have no network layers: the accelerator domain stands for the leaf"
        )
    elif without:
        raise source.wrong(
            1, f"{without} instances have neither network_layers nor the label {DOMAIN}"
        )
    tops = {path[-1] for path in paths.values()}
    if len(tops) > 1:
        paths = {name: (*path, APART) for name, path in paths.items()}
    depth = max(map(len, paths.values()))
    nodes = tuple(
        PlacedNode(name=name, blocks=(*(path[0] for _ in range(depth - len(path))), *path))
        for name, path in paths.items()
    )
    return FileFacts(nodes=nodes, level_names=level_names(depth), notes=tuple(notes))


def _layers(source: SourceText, entry: yaml.Node, name: str, line: int) -> tuple[str, ...]:
    layers = _get(entry, "network_layers")
    if layers is None:
        return ()
    if not isinstance(layers, yaml.SequenceNode) or len(layers.value) > 8:
        raise source.wrong(
            line, f"instance {name!r}: expected network_layers, a list of at most 8 switches"
        )
    if not all(isinstance(layer, yaml.ScalarNode) and layer.value for layer in layers.value):
        raise source.wrong(
            line, f"instance {name!r}: expected the names of switches in network_layers"
        )
    return tuple(str(layer.value)[:100] for layer in layers.value)


def _get(node: yaml.Node | None, key: str) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)
