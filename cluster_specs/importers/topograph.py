"""What NVIDIA topograph writes: the text of its Slurm engine, or the JSON of its graph engine.

Formats: NVIDIA/topograph pkg/translate (Slurm tree, block and YAML texts; a comment above each switch gives
its real name) and docs/engines/graph.md (`instances` with `network_layers`, closest first).
"""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from meshwright.cluster_specs.importers.facts import (
    MOST_NODES,
    FileFacts,
    PlacedNode,
    SourceText,
    level_names,
)
from meshwright.cluster_specs.importers.slurm_conf import read_conf
from meshwright.cluster_specs.importers.slurm_yaml import read_yaml
from meshwright.documents.reader import compose

DOMAIN = "accelerator.topograph.run/domain"
"""The label of an instance's NVLink domain."""
APART = "fabric"


def read_topograph(source: SourceText, topology: str | None = None) -> FileFacts:
    """The nodes of a topograph output, whichever of its formats it is in."""
    head = next((line for line in source.text.splitlines() if line.strip() and line[0] != "#"), "")
    if head.lstrip().startswith("{"):
        return _graph(source)
    if head.startswith("- "):
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
