"""The command line: which commands there are. Each is a thin function in `commands/`."""

from __future__ import annotations

import click

from meshwright.commands.calculators import (
    collective_command,
    compress_command,
    memory_command,
    overlap_command,
    pipeline_command,
    roofline_command,
    volumes_command,
)
from meshwright.commands.catalogs import (
    calibrate_command,
    catalog_command,
    model_command,
    schema_command,
    topology,
)
from meshwright.commands.fabric import experts_command, launch_command, map_, traffic_command
from meshwright.commands.many import batch, fleet_command, recommend_command
from meshwright.commands.planning import (
    compare_command,
    estimate_command,
    explain_command,
    mcp_command,
    plan_command,
    report_command,
    serve_command,
    trace_command,
    validate_command,
    verify_command,
)
from meshwright.commands.terminal import Commands, debug, version_option


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@version_option
@debug
def main() -> None:
    """Plan how to train a large model on a GPU cluster.

    MODEL is a name from `meshwright catalog models`, a model YAML or a Hugging Face config.json. CLUSTER is a
    name from `meshwright catalog clusters` or a cluster YAML.

    Exit codes: 0 done, 1 no plan exists or a check failed, 2 bad usage or input, 3 the time limit came
    before any plan, 130 interrupted.
    """


for command in (
    plan_command,
    estimate_command,
    validate_command,
    calibrate_command,
    catalog_command,
    schema_command,
    model_command,
    launch_command,
    verify_command,
    explain_command,
    compare_command,
    experts_command,
    topology,
    batch,
    fleet_command,
    recommend_command,
    collective_command,
    roofline_command,
    pipeline_command,
    overlap_command,
    volumes_command,
    compress_command,
    memory_command,
    map_,
    traffic_command,
    report_command,
    trace_command,
    serve_command,
    mcp_command,
):
    main.add_command(command)


if __name__ == "__main__":
    main(prog_name="meshwright")
