"""docs/rules.md lists every rule. `python -m tests.constraints.test_rules_page` writes it anew."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.constraints.registry import GENERAL, rules_of, sentence_of
from meshwright.constraints.rule import Rule
from meshwright.frameworks.catalog import RECORDS
from tests.places import ROOT

PAGE = ROOT / "docs" / "rules.md"

HEAD = """\
# Rules

What a plan may not do, by the name that a refusal, `verify` and `estimate` give. `constraints/` has each one
with its source; a framework's rules bind plans for it, and runs of the software stacks that its record names.
"""


def rules_page() -> str:
    """The text of docs/rules.md."""
    parts = [HEAD, "## Every framework\n", _table(GENERAL)]
    for record in RECORDS:
        parts += [
            f"## {record.title} ({record.package} {record.version})\n",
            _table(rules_of(record)),
        ]
    return "\n".join(parts)


def _table(rules: Iterable[Rule]) -> str:
    lines = ["| rule | what it says | excess in |", "|---|---|---|"]
    lines += [f"| {rule.name} | {sentence_of(rule)} | {rule.unit} |" for rule in rules]
    return "\n".join(lines) + "\n"


def test_the_page_of_rules_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == rules_page()


if __name__ == "__main__":
    PAGE.write_text(rules_page(), encoding="utf-8")
