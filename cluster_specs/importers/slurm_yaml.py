"""Slurm's `topology.yaml` (from 25.05): a list of named topologies, each a tree, blocks or flat.

Format: topology.yaml(5) (SchedMD/slurm doc/man/man5/topology.yaml.5).
"""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from meshwright.cluster_specs.importers.blocks import Block, facts_of_blocks
from meshwright.cluster_specs.importers.facts import FileFacts, SourceText
from meshwright.cluster_specs.importers.slurm_conf import names
from meshwright.cluster_specs.importers.switch_tree import SwitchTree
from meshwright.documents.reader import compose
from meshwright.errors import InputError, shown, suggestion

Fields = Mapping[str, yaml.Node]
_KINDS = ("tree", "block", "flat")


def read_yaml(source: SourceText, topology: str | None = None) -> FileFacts:
    """The nodes of one topology: the one asked for, else the cluster's default, else the first.

    Raises InputError, with the line, if there is no such topology or if it is flat.
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
        return FileFacts(
            nodes=facts.nodes, level_names=facts.level_names, notes=(*facts.notes, note)
        )
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
