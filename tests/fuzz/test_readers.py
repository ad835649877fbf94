"""No file, however hostile, ends a reader in anything but an answer or a sentence, in time and in bounds.

`make fuzz` runs 10,000 cases a reader; MESHWRIGHT_FUZZ_CASES sets another number.
"""

from __future__ import annotations

import os
import random
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from meshwright.errors import ExitCode, InputError, MeshwrightError
from tests.fuzz.hostile import NASTY_VALUES, hostile
from tests.fuzz.readers import READERS, Reader
from tests.soaked import examples

CASES = int(os.environ.get("MESHWRIGHT_FUZZ_CASES", examples(100)))
LONGEST_S = 10.0
"""Processor seconds, so that a busy machine fails no file."""
MOST_KIB = 2**20
LONGEST_MESSAGE = 20_000

values = st.recursive(
    st.sampled_from(NASTY_VALUES) | st.integers() | st.floats() | st.text(max_size=30),
    lambda parts: (
        st.lists(parts, max_size=4) | st.dictionaries(st.text(max_size=8), parts, max_size=4)
    ),
    max_leaves=12,
)
FIXTURE_IS_SAFE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def check(reader: Reader, seed: int, value: Any, folder: Path) -> None:
    """Reads one damaged file."""
    rng = random.Random(seed)
    name, data = rng.choice(reader.seeds)
    path = folder / name
    path.write_bytes(hostile(rng, data, value))
    before = set(os.listdir(folder))
    began_s = time.process_time()
    refusal = None
    try:
        reader.read(path)
    except MeshwrightError as error:
        refusal = error
    if refusal is not None:
        assert refusal.exit_code in (ExitCode.BAD_INPUT, ExitCode.NO_ANSWER)
        assert 0 < len(str(refusal)) < LONGEST_MESSAGE
    assert time.process_time() - began_s < LONGEST_S
    assert set(os.listdir(folder)) == before
    assert not Path("fuzzed").exists()


def fuzzed(reader: Reader, folder: Path, cases: int, *, repeatable: bool) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=repeatable,
        phases=(Phase.generate,),
        suppress_health_check=FIXTURE_IS_SAFE,
    )
    @given(seed=st.integers(0, 2**48), value=values)
    def run(seed: int, value: Any) -> None:
        check(reader, seed, value, folder)

    run()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KIB


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_hostile_files_are_answered_in_words(reader: Reader, tmp_path: Path) -> None:
    fuzzed(reader, tmp_path, 4, repeatable=True)


@pytest.mark.soak
@pytest.mark.hypothesis
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_many_hostile_files_are_answered_in_words(reader: Reader, tmp_path: Path) -> None:
    fuzzed(reader, tmp_path, CASES, repeatable="MESHWRIGHT_FUZZ_CASES" not in os.environ)


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [("layout", {"stages": []}, "layout.stages"), ("ranks", [], "ranks")],
)
def test_a_pipeline_through_parts_that_contradicts_itself_is_refused(
    tmp_path: Path, part: str, value: Any, words: str
) -> None:
    reader = next(each for each in READERS if each.name == "mixed plan")
    name, data = reader.seeds[0]
    document = yaml.safe_load(data)
    document[part] = {**document[part], **value} if isinstance(value, dict) else value
    path = tmp_path / name
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    with pytest.raises(InputError, match=words):
        reader.read(path)
