"""docs/commands/ has a page a command, with its options and its example as they are.

`python -m tests.commands.test_command_pages` runs every example and fills usage, options and output in; the
sentences around them are written by hand.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import click
import numpy as np
import pytest
from click.testing import CliRunner

from meshwright import cli
from meshwright.commands.options import GROUPS, example_of
from tests.commands.test_documented_commands import SCRIPT, write_files_of_a_reader
from tests.places import ROOT

PAGES = ROOT / "docs" / "commands"
NAMES = [name for examples in GROUPS.values() for name in examples]
ALONE = (
    "collective",
    "roofline",
    "pipeline",
    "overlap",
    "volumes",
    "compress",
    "memory",
    "catalog",
)
"""Commands whose examples need no plan and answer at once: their output is run again by the test."""
ENDLESS = ("serve", "mcp")
"""Commands that answer until they are interrupted: their output is written by hand."""
FILLED = re.compile(
    r"(<!-- (?P<what>usage|example|options)(?P<lines> \d+)? -->\n).*?(<!-- end -->)", re.S
)
COLUMNS = 80
EVERYWHERE = {"--json", "--debug", "--help"}
"""Options of every command, which docs/commands.md explains once."""
TODAY = (
    SCRIPT.replace("--nnodes 2", "--nnodes 8")
    .replace("-size 32\n", "-size 256\n")
    .replace("4096 --micro", "8192 --micro")
)
"""A script of the size of the plan of the examples: 64 GPUs, 256 sequences of 8,192 tokens."""
LEAVES = """\
SwitchName=leaf0 Nodes=n[00,03,06,09,12]
SwitchName=leaf1 Nodes=n[01,04,07,10,13]
SwitchName=leaf2 Nodes=n[02,05,08,11]
SwitchName=spine Switches=leaf[0-2]
"""
JOBS = """\
schema: 1
jobs:
  - {name: small, model: llama-3-8b, cluster: superpod-h100, gpus: 32, global_batch: 128, seq_len: 8192}
  - {name: experts, model: mixtral-8x7b, cluster: superpod-h100, gpus: 64, global_batch: 256, seq_len: 4096}
"""
FILES = {"today.sh": TODAY, "topology.conf": LEAVES, "jobs.yaml": JOBS}
NEEDED = (
    "plan llama-3-8b --cluster dgx-h100 --gpus 64 --global-batch 256 --seq-len 8192 -o run",
    "topology import topology.conf --from slurm --node dgx-h100 --oversubscription 1,2 -o nodes.yaml",
)
"""What the examples find, besides the reader's files."""
REWRITE = "python -m tests.commands.test_command_pages writes it again"


def page(name: str) -> Path:
    return PAGES / f"{name}.md"


def command_of(name: str) -> tuple[str, click.Command]:
    """The command with its words; of a group, the one command in it."""
    command: click.Command = cli.main.commands[name]
    if isinstance(command, click.Group):
        ((inner, command),) = command.commands.items()
        return f"{name} {inner}", command
    return name, command


def usage_of(name: str) -> str:
    words, command = command_of(name)
    pieces = command.collect_usage_pieces(click.Context(command))
    return f"```text\nmeshwright {' '.join([words, *pieces])}\n```\n"


def options_of(name: str) -> str:
    """The table of a command's options, in the order of its help."""
    _, command = command_of(name)
    context = click.Context(command)
    options = [
        option
        for option in command.params
        if isinstance(option, click.Option) and not EVERYWHERE.intersection(option.opts)
    ]
    if not options:
        return "None but those of [every command](../commands.md#options-of-every-command).\n"
    rows = [_row(option, context) for option in options]
    return "\n".join(["| option | value | default | meaning |", "|---|---|---|---|", *rows, ""])


def _row(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{word}`" for word in [*option.opts, *option.secondary_opts])
    repeated = "May be given several times." if option.multiple else ""
    meaning = " ".join(filter(None, [option.help, _range(option.type), repeated]))
    cells = [names, _value(option), _default(option, context), meaning]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _value(option: click.Option) -> str:
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return ", ".join(f"`{choice}`" for choice in option.type.choices)
    return option.metavar or option.type.name.split()[0].upper()


def _default(option: click.Option, context: click.Context) -> str:
    if option.required:
        return "required"
    default = option.to_info_dict()["default"]
    if option.is_flag or option.multiple or default is None:
        return ""
    return str(option.get_default(context))


def _range(kind: click.ParamType[object]) -> str:
    """Which numbers are allowed, as a sentence."""
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return ""
    above = "" if kind.min is None else f"{'above' if kind.min_open else 'from'} {kind.min:g}"
    below = "" if kind.max is None else f"{'below' if kind.max_open else 'to'} {kind.max:.8g}"
    return f"{above} {below}".strip().capitalize() + "."


def command_line(name: str) -> str:
    """The example that --help shows, without its indent."""
    return "\n".join(line.removeprefix("  ") for line in example_of(name).splitlines())


def output_of(name: str, lines: int) -> str:
    """What the example prints, its first lines."""
    words = shlex.split(command_line(name).replace("\\\n", " "))
    with patch.dict(os.environ, {"COLUMNS": str(COLUMNS)}):
        done = CliRunner().invoke(cli.main, words[1:])
    assert done.exit_code == 0, f"{words}\n{done.output}"
    printed = done.stdout.replace(f"{Path.cwd()}/", "").rstrip().splitlines()
    cut = ["..."] if len(printed) > lines else []
    return "\n".join(line.rstrip() for line in [*printed[:lines], *cut])


def shown_example(name: str, lines: int) -> str:
    return f"```sh\n{command_line(name)}\n```\n\n```text\n{output_of(name, lines)}\n```\n"


def filled(name: str, text: str, with_example: bool) -> str:
    """A page with what its markers ask for."""

    def fill(match: re.Match[str]) -> str:
        match match["what"]:
            case "usage":
                inside = usage_of(name)
            case "options":
                inside = options_of(name)
            case _ if with_example and name not in ENDLESS:
                inside = shown_example(name, int(match["lines"]))
            case _:
                return match[0]
        return f"{match[1]}\n{inside}\n{match[4]}"

    return FILLED.sub(fill, text)


def test_every_command_has_a_page_and_stands_in_the_overview() -> None:
    assert sorted(path.stem for path in PAGES.glob("*.md")) == sorted(NAMES)
    overview = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    linked = re.findall(r"^\| \[(\w+)\]\(commands/(\w+)\.md\) \|", overview, re.M)
    assert linked == [(name, name) for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_the_options_that_there_are(name: str) -> None:
    text = page(name).read_text(encoding="utf-8")
    assert [match["what"] for match in FILLED.finditer(text)] == ["usage", "example", "options"]
    assert filled(name, text, with_example=False) == text, REWRITE
    assert f"```sh\n{command_line(name)}\n```" in text, REWRITE


@pytest.mark.parametrize("name", ALONE)
def test_an_example_prints_what_its_page_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files_of_a_reader(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = page(name).read_text(encoding="utf-8")
    assert filled(name, text, with_example=True) == text, REWRITE


def test_an_option_that_a_page_lacks_is_noticed() -> None:
    text = page("pipeline").read_text(encoding="utf-8")
    lacking = re.sub(r"^\| `--vpp`.*\n", "", text, flags=re.M)
    assert lacking != text
    assert filled("pipeline", lacking, with_example=False) == text


def write_pages(names: list[str]) -> None:
    """Fills the pages again, in a folder where their commands run one after the other."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as place, patch.dict(os.environ, {"XDG_CACHE_HOME": place}):
        folder = Path(place) / "llama-3.1-8b"
        folder.mkdir()
        write_files_of_a_reader(folder)
        for file, text in FILES.items():
            (folder / file).write_text(text, encoding="utf-8")
        np.savez(folder / "loads.npz", load=np.random.default_rng(0).lognormal(0, 1, (4, 256)))
        os.chdir(folder)
        for words in NEEDED:
            assert CliRunner().invoke(cli.main, shlex.split(words)).exit_code == 0, words
        for name in names:
            if name == "plan":
                shutil.rmtree("run")
            text = filled(name, page(name).read_text(encoding="utf-8"), with_example=True)
            page(name).write_text(text, encoding="utf-8")
        os.chdir(before)


if __name__ == "__main__":
    write_pages(sys.argv[1:] or NAMES)
