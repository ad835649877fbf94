"""Random allocations as schedulers hand them out: nodes here and there, some of them part-filled.

A case is a cluster as its YAML file would have it, and a request. Beside it stand the requests that it must
not be slower than: the same GPUs unlisted, where they form a regular shape, and parts of them alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshwright.cluster_specs.reader import cluster_from_mapping
from meshwright.errors import InputError
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request

NODE_COUNTS = (2, 2, 2, 3, 3, 4, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
BASES = (
    "dgx-h100", "dgx-h100", "dgx-a100", "dgx-a100-40gb", "dgx-v100", "dgx-b200", "mi300x",
    "l40s-pcie", "rtx-pro-6000-pcie", "a100-pcie",
)  # fmt: skip
RACKS = "gb200-nvl72"
FRAMEWORKS = ("megatron", "megatron", "torchtitan", "deepspeed", "fsdp2")
SMALL = ("gpt2-xl", "llama-3-8b", "qwen3-8b", "llama-2-7b", "gpt-oss-20b", "olmoe-1b-7b")
LARGE = ("qwen3-30b-a3b", "mixtral-8x7b", "llama-2-70b", "qwen3-32b", "llama-2-13b")
SHAPES = ("scattered", "one part", "one part", "several parts", "front", "front part", "unlabelled")


@dataclass(frozen=True, kw_only=True)
class Case:
    """An allocation and what is asked of it."""

    number: int
    shape: str
    cluster: dict[str, Any]
    """What the YAML file of the cluster holds."""
    options: dict[str, Any]
    """Of `read_request`, but for the cluster."""
    leaf_gpus: int
    """Of a whole leaf."""

    def request(self) -> PlanRequest:
        """Raises InputError where it cannot be asked."""
        return read_request(cluster=cluster_from_mapping(self.cluster), **self.options)

    @property
    def words(self) -> str:
        """The command that asks it of `case_N.yaml`."""
        options = {name: value for name, value in self.options.items() if name != "model"}
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
        return f"plan {self.options['model']} --cluster case_{self.number}.yaml {flags}"

    def without_list(self) -> Case | None:
        """The same GPUs unlisted: neighbours on one leaf that is filled from the front, or on whole leaves
        and pods. None where they are no such shape, or some of them are not asked for.
        """
        if self.shape not in ("front", "front part") or self.options["gpus"] != self.free_gpus:
            return None
        nodes, levels = self.cluster["nodes"], self.cluster["levels"]
        blocks: dict[Any, int] = {}
        for node in nodes:
            for key in {(node.get("pod"), node["leaf"]), (node.get("pod"), None)}:
                blocks[key] = blocks.get(key, 0) + node["free_gpus"]
        leaves = [free for (_, leaf), free in blocks.items() if leaf is not None]
        pods = [free for (_, leaf), free in blocks.items() if leaf is None]
        if len(leaves) > 1 and set(leaves) != {self.leaf_gpus}:
            return None
        if len(pods) > 1 and set(pods) != {levels[-2]["gpus"]}:
            return None
        rest = {key: value for key, value in self.cluster.items() if key != "nodes"}
        return replace(self, cluster=rest | {"gpus": levels[-1]["gpus"]})

    @property
    def free_gpus(self) -> int:
        """Of all nodes."""
        return sum(node["free_gpus"] for node in self.cluster["nodes"])

    @property
    def per_node(self) -> int:
        """GPUs of a node."""
        return 4 if self.cluster["base"] == RACKS else 8

    def parts(self) -> Iterator[tuple[str, Case]]:
        """The allocation with fewer GPUs: its whole nodes, a power of two of them, its fullest leaf.

        A plan may leave GPUs idle, so none of them can be faster.
        """
        nodes = self.cluster["nodes"]
        whole = [index for index, node in enumerate(nodes) if node["free_gpus"] == self.per_node]
        whole = whole[: self.options["gpus"] // self.per_node]
        if whole and len(whole) * self.per_node < self.options["gpus"]:
            yield "whole nodes", self._on(whole)
        power = 1 << (len(whole).bit_length() - 1) if whole else 0
        if 0 < power < len(whole):
            yield f"{power} whole nodes", self._on(whole[:power])
        leaves: dict[Any, list[int]] = {}
        for index, node in enumerate(nodes):
            leaves.setdefault((node.get("pod"), node.get("leaf")), []).append(index)
        fullest = max(leaves.values(), key=lambda own: sum(nodes[i]["free_gpus"] for i in own))
        if len(leaves) > 1 and sum(nodes[i]["free_gpus"] for i in fullest) < self.options["gpus"]:
            yield "fullest leaf", self._on(fullest)

    def _on(self, kept: list[int]) -> Case:
        """With only some nodes free; the others stay in the list, so that links stay as they are."""
        own = set(kept)
        nodes = [
            node if index in own else node | {"free_gpus": 0}
            for index, node in enumerate(self.cluster["nodes"])
        ]
        free = sum(node["free_gpus"] for node in nodes)
        return replace(
            self,
            cluster=self.cluster | {"nodes": nodes},
            options=self.options | {"gpus": free},
        )


def random_case(number: int, most_nodes: int = 64) -> Case:
    """The case of a number, always the same one; it can be read."""
    chance = random.Random(number)
    while True:
        case = _drawn(chance, number, most_nodes)
        try:
            case.request().workload()
        except InputError:
            continue
        return case


def _drawn(chance: random.Random, number: int, most_nodes: int) -> Case:
    base = RACKS if chance.random() < 0.06 else chance.choice(BASES)
    shape = chance.choice(SHAPES)
    if base == RACKS and shape == "unlabelled":
        shape = "one part"
    per_node = 4 if base == RACKS else 8
    count = min(chance.choice(NODE_COUNTS), most_nodes)
    leaf_nodes = 18 if base == RACKS else chance.choice((2, 4, 4, 8, 16))
    pod_leaves = chance.choice((0, 0, 2, 4))
    nodes = _nodes(chance, shape, count, leaf_nodes, pod_leaves)
    _fill(chance, shape, nodes, per_node)
    levels = _levels(chance, leaf_nodes * per_node, pod_leaves, per_node * most_nodes * 16)
    if base == RACKS:
        levels = levels[1:]
    free = sum(node["free_gpus"] for node in nodes)
    gpus = free if chance.random() < 0.65 else chance.randint(max(2, free // 2), free)
    cluster = {"name": f"case-{number}", "base": base, "levels": levels, "nodes": nodes}
    return Case(
        number=number,
        shape=shape,
        cluster=cluster,
        options=_options(chance, gpus, nodes, per_node),
        leaf_gpus=leaf_nodes * per_node,
    )


def _nodes(
    chance: random.Random, shape: str, count: int, leaf_nodes: int, pod_leaves: int
) -> list[dict[str, Any]]:
    """Names with their leaves and pods: neighbours from the front, or drawn from a larger machine."""
    room = count if shape.startswith("front") else count * chance.choice((1, 2, 3))
    slots = sorted(chance.sample(range(room), count))
    nodes = []
    for slot in slots:
        node: dict[str, Any] = {"name": f"n{slot:03d}"}
        if shape != "unlabelled":
            leaf = slot // leaf_nodes
            node["leaf"] = f"l{leaf}"
            if pod_leaves:
                node["pod"] = f"p{leaf // pod_leaves}"
        nodes.append(node)
    return nodes


def _fill(chance: random.Random, shape: str, nodes: list[dict[str, Any]], per_node: int) -> None:
    for node in nodes:
        node["free_gpus"] = per_node
    if shape == "front part":
        nodes[-1]["free_gpus"] = chance.randint(1, per_node - 1)
    elif shape in ("one part", "unlabelled"):
        chance.choice(nodes)["free_gpus"] = chance.randint(1, per_node - 1)
    elif shape == "several parts":
        for node in nodes:
            if chance.random() < 0.6:
                node["free_gpus"] = chance.randint(1, per_node - 1)


def _levels(
    chance: random.Random, leaf_gpus: int, pod_leaves: int, enough: int
) -> list[dict[str, Any]]:
    levels: list[dict[str, Any]] = [{"name": "leaf", "gpus": leaf_gpus}]
    block = leaf_gpus
    if pod_leaves:
        block *= pod_leaves
        levels.append({"name": "pod", "gpus": block, "oversubscription": chance.choice((1, 2, 4))})
    block *= -(-enough // block)
    return [*levels, {"name": "core", "gpus": block, "oversubscription": chance.choice((1, 2, 4))}]


def _options(
    chance: random.Random, gpus: int, nodes: list[dict[str, Any]], per_node: int
) -> dict[str, Any]:
    whole = sum(node["free_gpus"] == per_node for node in nodes) * per_node or gpus
    models = SMALL if gpus < 32 or chance.random() < 0.4 else LARGE
    return {
        "model": chance.choice(models),
        "gpus": gpus,
        "global_batch": chance.choice((gpus, gpus, whole, gpus * per_node))
        * chance.choice((1, 2, 3, 4)),
        "seq_len": chance.choice((1024, 2048, 4096, 8192)),
        "framework": chance.choice(FRAMEWORKS),
        "precision": "bf16",
    }
