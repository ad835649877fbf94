"""What is known by name, and what is read of a file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from meshwright.commands.options import (
    PATH,
    NearMissChoice,
    choice_option,
    complete_cluster,
    complete_model,
    default_option,
    value_option,
)
from meshwright.commands.terminal import (
    ProgressLine,
    common,
    force_option,
    give,
    print_json,
    say,
    show,
    warn,
)


@click.command("catalog")
@click.argument("kind", type=NearMissChoice(["models", "clusters", "devices"]))
@common
def catalog_command(kind: str, as_json: bool) -> None:
    """List the models, clusters or devices that are known by name."""
    from meshwright.planner.report.catalog_view import catalog_rows, catalog_view

    give(as_json, {kind: catalog_rows(kind)}, partial(catalog_view, kind))


@click.command("schema")
@click.argument("kind", type=NearMissChoice(["model", "cluster", "run", "jobs", "plan"]))
@common
def schema_command(kind: str, as_json: bool) -> None:
    """Print the JSON Schema of a kind of file, for editors and checks."""
    from meshwright.planner.report.catalog_view import json_schema

    document = json_schema(kind)
    if as_json:
        print_json({"kind": kind, "json_schema": document})
    else:
        say(json.dumps(document, indent=2))


@click.command("model")
@click.argument("model", shell_complete=complete_model)
@value_option("--seq-len", click.IntRange(1, 16777216), "S", "Tokens.", default=4096)
@common
def model_command(model: str, seq_len: int, as_json: bool) -> None:
    """Show what is read of MODEL: shape, parameters, FLOP."""
    from meshwright.model_specs.reader import read_model
    from meshwright.planner.report.catalog_view import model_document, model_view

    spec = read_model(model)
    give(as_json, model_document(spec, seq_len), partial(model_view, spec, seq_len))


# A user's own measured runs.


@click.command("calibrate")
@click.argument("runs", type=PATH, nargs=-1, metavar="[RUNS.yaml...] [LOG...]")
@value_option("-o --output", PATH, "STACK.yaml", "The stack to write.", required=True)
@click.option("--name", metavar="NAME", help="Of the stack; by default the runs' framework.")
@click.option("--like", metavar="STACK", help="The known stack to begin from.")
@click.option("--measure", is_flag=True, help="Time this machine's GPUs, with RUNS or alone.")
@default_option(
    "--minutes", click.FloatRange(0.05, 120.0), 10.0, "M", "How long --measure may take."
)
@click.option(
    "--model",
    metavar="MODEL",
    help="Whose shapes --measure times; mixtral-8x7b when absent.",
    shell_complete=complete_model,
)
@click.option(
    "--cluster",
    metavar="CLUSTER",
    help="What the machine is; the catalog's node when absent.",
    shell_complete=complete_cluster,
)
@force_option
@common
def calibrate_command(
    *, runs: tuple[Path, ...], output: Path, force: bool, as_json: bool, **options: Any
) -> None:
    """Learn the constants of your own stack from a few measured runs, or of this machine from itself.

    RUNS are run files whose rows have `measured`: 3 to 20 runs on one kind of device. LOGs
    are logs of nccl-tests. --measure times matrix products, attention, memory, launches and collectives here,
    and needs PyTorch. `--calibration STACK.yaml` then prices with what was learned.
    """
    if not runs and not options["measure"]:
        raise click.UsageError(
            "give RUNS.yaml with measured runs, or --measure on a machine with GPUs."
        )
    with ProgressLine("starting"):
        from meshwright import api
        from meshwright.documents import refuse_taken_file, write_files
        from meshwright.planner.report.run_view import calibration_view, machine_view
        from meshwright.planner.request.reader import calibration_text
        from meshwright.planner.runs.calibration.machine import MachineReport

    refuse_taken_file(output, force)
    with ProgressLine("fitting the constants to the runs") as shown:
        learned = api.calibrate(*runs, progress=shown, **options)
    if learned is None:
        return
    text = calibration_text(learned.calibration)
    write_files(output.parent, {output.name: text}, force)
    if as_json:
        print_json(learned.as_document())
        return
    warn("note", learned.notes)
    show(machine_view(learned) if isinstance(learned, MachineReport) else calibration_view(learned))
    say(f"\nWritten to {output}. Price with it: --calibration {output}")


# Clusters from what other tools say of them.


@click.group()
def topology() -> None:
    """Read what other tools say of a cluster."""


@topology.command("import")
@click.argument("files", type=PATH, nargs=-1, required=True, metavar="FILE...")
@choice_option(
    "--from form", "cluster_specs.importers.document.FORMATS", "Who wrote FILE.", required=True
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
@value_option("-o --output", PATH, "CLUSTER.yaml", "File to write.", required=True)
@force_option
@common
def import_(
    *,
    files: tuple[Path, ...],
    oversubscription: str | None,
    output: Path,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write a cluster YAML from a description in another tool's format.

    slurm: topology.conf or topology.yaml. topograph: its Slurm or graph output. nvidia-smi: `nvidia-smi topo
    -m`. ibnetdiscover: its output. nccl-tests: logs, one of each level, inside out.
    """
    from meshwright import api
    from meshwright.cluster_specs.importers.document import read_ratios
    from meshwright.documents import write_files

    ratios = None if oversubscription is None else read_ratios(oversubscription)
    imported = api.read_topology(files, oversubscription=ratios, **options)
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
    say(f"{output}: {imported.words}")
