"""Clusters from what other tools say of them."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.commands.parameters import ChoiceIn
from meshwright.commands.terminal import PATH, common, force_option, print_json, warn


@click.group()
def topology() -> None:
    """Read what other tools say of a cluster."""


@topology.command("import")
@click.argument("files", type=PATH, nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--from",
    "form",
    type=ChoiceIn("cluster_specs.importers.registry", "FORMATS"),
    required=True,
    help="Who wrote FILE.",
)
@click.option(
    "--node", required=True, metavar="NODE", help="Catalog name, or a cluster YAML to add to."
)
@click.option(
    "--oversubscription", metavar="X,...", help="One for each switch level, inside out: 1,3,7."
)
@click.option("--topology", "chosen", metavar="NAME", help="One of those in a topology.yaml.")
@click.option(
    "--name", metavar="NAME", help="What to call the cluster; the file's name when absent."
)
@click.option(
    "-o", "--output", type=PATH, required=True, metavar="CLUSTER.yaml", help="File to write."
)
@force_option
@common
def import_(
    *,
    files: tuple[Path, ...],
    form: str,
    node: str,
    oversubscription: str | None,
    chosen: str | None,
    name: str | None,
    output: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Write a cluster YAML from a description in another tool's format.

    slurm: topology.conf or topology.yaml. topograph: its Slurm or graph output. nvidia-smi: `nvidia-smi topo
    -m`. nccl-xml: what NCCL_TOPO_DUMP_FILE writes. nccl-tests: logs, one of each level, inside out.
    """
    from meshwright.cluster_specs.importers.document import import_topology, read_ratios
    from meshwright.documents.output_files import write_files

    ratios = None if oversubscription is None else read_ratios(oversubscription)
    imported = import_topology(
        form, files, node, oversubscription=ratios, name=name, topology=chosen
    )
    write_files(output.parent, {output.name: imported.text}, force)
    cluster = imported.cluster
    if as_json:
        print_json(
            {
                "cluster": str(output),
                "gpus": cluster.gpus,
                "nodes": len(cluster.nodes),
                "levels": [level.model_dump() for level in cluster.levels],
                "measured": [entry.model_dump() for entry in cluster.measured],
                "notes": list(imported.notes),
            }
        )
        return
    warn("note", imported.notes)
    click.echo(f"{output}: {imported.words}")
