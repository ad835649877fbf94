"""What the NVLinks of a node say of it: the scale-up domain and its bandwidth."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.cluster_specs.schema import Architecture, ClusterSpec

LINK_GB_PER_S: dict[Architecture, float] = {
    "volta": 25.0,
    "ampere": 25.0,
    "ada": 25.0,
    "hopper": 25.0,
    "blackwell": 50.0,
}
"""One NVLink in one direction: 25 GB/s from NVLink 2 to 4, 50 GB/s with NVLink 5 (NVIDIA product briefs)."""
MOST_LINKS: dict[Architecture, int] = {
    "volta": 6,
    "ampere": 12,
    "ada": 0,
    "hopper": 18,
    "blackwell": 18,
}
"""NVLinks of one GPU: V100 6, A100 12, H100 and B200 18 (NVIDIA product briefs)."""


def link_fields(
    links: Mapping[str, Mapping[str, int]], node: ClusterSpec
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Fields of a cluster from each GPU's NVLinks to each other GPU, and notes on them.

    A GPU with more links to its peers in all than it has ports reaches them through a switch, with all of
    its links. The domain is the largest set of GPUs that links join; sets of different sizes count as the
    smallest, as a group must fit any of them.
    """
    sizes = sorted(_domain_sizes(links))
    gpus, domain = len(links), sizes[0]
    notes = []
    if sizes[0] != sizes[-1]:
        notes.append(
            f"NVLink joins groups of {', '.join(map(str, sizes))} GPUs; the smallest counts"
        )
    if gpus % domain:
        notes.append(f"NVLink groups of {domain} do not divide {gpus} GPUs; NVLink is left out")
        domain = 1
    outside = node.nvlink_domain > node.gpus_per_node == gpus == domain
    fields: dict[str, object] = {"gpus_per_node": gpus}
    # A rack-wide domain (NVL72) is more than one node can see.
    fields["nvlink_domain"] = node.nvlink_domain if outside else domain
    rate = _rate_gb_per_s(links, node)
    if domain > 1 and rate is not None:
        fields["nvlink_gb_per_s"] = rate
    return fields, tuple(notes)


def _rate_gb_per_s(links: Mapping[str, Mapping[str, int]], node: ClusterSpec) -> float | None:
    architecture = node.device.architecture
    if architecture not in LINK_GB_PER_S:
        return None
    counts = []
    for peers in links.values():
        total = sum(peers.values())
        through_a_switch = total > MOST_LINKS[architecture]
        counts.append(max(peers.values(), default=0) if through_a_switch else total)
    count = min(counts)
    return count * LINK_GB_PER_S[architecture] if count else None


def _domain_sizes(links: Mapping[str, Mapping[str, int]]) -> list[int]:
    unvisited = dict.fromkeys(links)
    sizes = []
    while unvisited:
        gpu, _ = unvisited.popitem()
        edge = [gpu]
        size = 0
        while edge:
            gpu = edge.pop()
            size += 1
            for peer in links[gpu]:
                if peer in unvisited:
                    del unvisited[peer]
                    edge.append(peer)
        sizes.append(size)
    return sizes
