"""Every flag of a framework's record stands in the file of the framework that the record names.

Runs in `make oracles` only. ORACLE_PYTHON is the interpreter of the environment with the frameworks.
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

from meshwright.frameworks.catalog import FRAMEWORK_NAMES, RECORDS
from meshwright.frameworks.record import Framework, Setting
from tests.frameworks.test_records import settings_of

pytestmark = pytest.mark.oracle

ELSEWHERE = ("Megatron-DeepSpeed ", "nemo_rl/")
"""Sources that no package index has begin with one of these."""
WORDS_OF_VALUES = ("true", "false")


@cache
def packages() -> Path:
    """Where the frameworks are installed."""
    python = os.environ.get("ORACLE_PYTHON")
    assert python, "run `make oracles`: ORACLE_PYTHON names no interpreter"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


@cache
def source_text(root: Path, source: str) -> str:
    """The text of files, or of all files of a folder, with underscores for hyphens."""
    files: list[Path] = []
    for name in source.split(" and "):
        path = root / name
        files += [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files, f"{source} is no file"
    return "\n".join(file.read_text(encoding="utf-8") for file in files).replace("-", "_")


def missing(root: Path, setting: Setting) -> list[str]:
    """The flag and the value of a setting, where its source does not have them."""
    if setting.source.startswith(ELSEWHERE):
        return []
    text = source_text(root, setting.source)
    words = [setting.flag.removeprefix("--").split(":")[0]]
    if not setting.value.isdigit() and setting.value not in WORDS_OF_VALUES:
        words.append(setting.value)
    # A file is named whole, a field by its last part.
    last = [word if word.endswith(".json") else word.split(".")[-1] for word in words]
    keys = [word.replace("-", "_") for word in last]
    # A switch is also turned off by its name after "no-".
    return [key for key in keys if key not in text and key.removeprefix("no_") not in text]


@pytest.mark.parametrize("record", RECORDS, ids=FRAMEWORK_NAMES)
def test_every_flag_stands_in_its_source(record: Framework) -> None:
    wrong = [
        f"{words}: {key} is not in {setting.source}"
        for words, setting in settings_of(record)
        for key in missing(packages(), setting)
    ]
    assert wrong == []
