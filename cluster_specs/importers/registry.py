"""Which formats can be imported, and the reader of each."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cluster_specs.importers.facts import FileFacts, SourceText
from meshwright.cluster_specs.importers.ibnetdiscover import read_ibnetdiscover
from meshwright.cluster_specs.importers.nccl_tests import read_nccl_log
from meshwright.cluster_specs.importers.nccl_xml import read_nccl_xml
from meshwright.cluster_specs.importers.nvidia_smi import read_topo_matrix
from meshwright.cluster_specs.importers.slurm_conf import read_conf
from meshwright.cluster_specs.importers.slurm_yaml import read_yaml
from meshwright.cluster_specs.importers.topograph import read_topograph
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InputError, near_miss

FORMATS = ("slurm", "topograph", "nvidia-smi", "ibnetdiscover", "nccl-xml", "nccl-tests")


def read_facts(
    form: str, sources: Sequence[SourceText], node: ClusterSpec, topology: str | None = None
) -> FileFacts:
    """What files in one of `FORMATS` say; only nccl-tests takes several, one log of each level.

    `topology` picks one of a topology.yaml. Raises InputError with file and line.
    """
    if form not in FORMATS:
        near = near_miss(form, FORMATS)
        what = "not a format"
        raise InputError(what, where="--from", value=form, did_you_mean=near, allowed=FORMATS)
    if form == "nccl-tests":
        return _measured(sources, node)
    if len(sources) != 1:
        raise InputError(
            f"--from {form} reads one file, got {len(sources)}; only nccl-tests takes several"
        )
    source = sources[0]
    if form == "slurm":
        return read_yaml(source, topology) if _is_yaml(source) else read_conf(source)
    if form == "topograph":
        return read_topograph(source, topology)
    reader = {
        "nvidia-smi": read_topo_matrix,
        "ibnetdiscover": read_ibnetdiscover,
        "nccl-xml": read_nccl_xml,
    }
    return reader[form](source, node)


def _is_yaml(source: SourceText) -> bool:
    """Whether this is a topology.yaml: a list, which no line of a topology.conf looks like."""
    head = next((line for line in source.text.splitlines() if line.strip() and line[0] != "#"), "")
    return head.startswith(("- ", "---"))


def _measured(sources: Sequence[SourceText], node: ClusterSpec) -> FileFacts:
    """The logs in the order given; a latency found first is used to take apart those of wider levels."""
    with_measured = node
    notes: list[str] = []
    for source in sources:
        facts = read_nccl_log(source, with_measured)
        notes += facts.notes
        with_measured = with_measured.model_copy(
            update={"measured": (*with_measured.measured, *facts.measured)}
        )
    return FileFacts(measured=with_measured.measured[len(node.measured) :], notes=tuple(notes))
