"""What is known by name, and what is read of a file."""

from __future__ import annotations

import json

import click

from meshwright.commands.parameters import NearMissChoice
from meshwright.commands.terminal import common, print_json, show


@click.command()
@click.argument("kind", type=NearMissChoice(["models", "clusters", "devices"]))
@common
def catalog(kind: str, as_json: bool) -> None:
    """List the models, clusters or devices that are known by name."""
    from meshwright.planner.report.catalog_view import catalog_rows, catalog_view

    if as_json:
        print_json({kind: catalog_rows(kind)})
    else:
        show(catalog_view(kind))


@click.command()
@click.argument("kind", type=NearMissChoice(["model", "cluster", "run", "jobs", "plan"]))
@common
def schema(kind: str, as_json: bool) -> None:
    """Print the JSON Schema of a kind of file, for editors and checks."""
    from meshwright.commands.file_schemas import json_schema

    if as_json:
        print_json({"kind": kind, "json_schema": json_schema(kind)})
    else:
        click.echo(json.dumps(json_schema(kind), indent=2))


@click.command()
@click.argument("model")
@click.option(
    "--seq-len", type=click.IntRange(1, 16_777_216), default=4096, metavar="S", help="Tokens."
)
@common
def model(model: str, seq_len: int, as_json: bool) -> None:
    """Show what is read of MODEL: shape, parameters, FLOP."""
    from meshwright.model_specs.reader import read_model
    from meshwright.planner.report.catalog_view import model_document, model_view

    spec = read_model(model)
    if as_json:
        print_json(model_document(spec, seq_len))
    else:
        show(model_view(spec, seq_len))
