"""docs/frameworks.md shows every record. `python -m tests.frameworks.test_frameworks_page` writes it anew."""

from __future__ import annotations

from meshwright.frameworks.catalog import RECORDS
from meshwright.frameworks.record import Framework, Setting
from tests.frameworks.test_records import settings_of
from tests.places import ROOT

PAGE = ROOT / "docs" / "frameworks.md"

HEAD = """\
# Frameworks

What each framework can be told, as `frameworks/` records it: the flag or key, the file of the framework in
which it was read, and the oldest version that had it (of those read; empty where only this version was read).
*In plans* says whether plans choose the value today; what goes together is a matter of the [rules](rules.md).
"""
COLUMNS = "| choice | flag or key | source | since | in plans | rules, needs |\n|---|---|---|---|---|---|\n"


def frameworks_page() -> str:
    """The text of docs/frameworks.md."""
    return "\n".join([HEAD, *map(_section, RECORDS)])


def _section(record: Framework) -> str:
    title = f"## {record.title} ({record.package} {record.version})"
    stacks = ", ".join(stack.name for stack in record.stacks)
    rows = "".join(_row(choice, setting) for choice, setting in settings_of(record))
    return f"{title}\n\nMeasured stacks and plans: {stacks}.\n\n{COLUMNS}{rows}"


def _row(choice: str, setting: Setting) -> str:
    flag = f"`{setting.flag} {setting.value}`".replace(" `", "`") if setting.flag else ""
    chosen = (
        f"with `--allow {setting.allow}`" if setting.allow else "yes" if setting.planned else ""
    )
    limits = ", ".join([*setting.rules, setting.installs]).strip(", ")
    cells = [choice, flag, setting.source, setting.since, chosen, limits]
    return f"| {' | '.join(cells)} |\n"


def test_the_page_of_frameworks_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == frameworks_page()


if __name__ == "__main__":
    PAGE.write_text(frameworks_page(), encoding="utf-8")
