"""What pydantic finds wrong, in words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BaseModel, Field, ValidationError

from meshwright.documents import (
    DEEPEST,
    field_path,
    parse_mapping,
    read_mapping,
    read_text,
    validation_message,
)
from meshwright.errors import InputError


class Level(BaseModel):
    model_config = {"extra": "forbid"}
    gpus: Annotated[int, Field(ge=1)]


class Cluster(BaseModel):
    model_config = {"extra": "forbid"}
    levels: Annotated[tuple[Level, ...], Field(min_length=1, max_length=2)] | None = None
    name: Annotated[str, Field(min_length=1, max_length=4)] = "a"


def test_messages_serve_other_documents() -> None:
    with pytest.raises(ValidationError) as error:
        Cluster.model_validate({"levels": [{"gpus": 1}, {"gpu": 2}], "level": 1})
    told = validation_message(error.value, "c.yaml", Cluster)
    assert "c.yaml: levels[1].gpus: this field is required and missing" in told
    assert "c.yaml: levels[1].gpu: unknown field (did you mean 'gpus'?); allowed: gpus" in told
    assert "c.yaml: level: unknown field (did you mean 'levels'?)" in told
    told = validation_message(error.value, "c.yaml", Cluster, ["base"])
    assert "did you mean 'levels'?); allowed: base, levels, name" in told


class Node(BaseModel):
    model_config = {"extra": "forbid"}
    name: str = ""
    level: Level | None = None


def test_a_field_in_the_wrong_place_is_told_its_place() -> None:
    with pytest.raises(ValidationError) as error:
        Node.model_validate(
            {"gpus": 8, "deep": {"gpus": 8}, "odd": {}, "level": {"in": {"gpus": 8}}}
        )
    assert validation_message(error.value, "n.yaml", Node).splitlines() == [
        "n.yaml: level.gpus: this field is required and missing",
        "n.yaml: in: leave it out, and write what it holds under `level`",
        "n.yaml: gpus: must stand under `level`",
        "n.yaml: deep: write what it holds under `level`",
        "n.yaml: odd: unknown field; allowed: level, name",
    ]


def test_field_paths() -> None:
    assert field_path(("levels", 0, "gpus")) == "levels[0].gpus"
    assert field_path(("a\x1b[31m",)) == r"'a\x1b[31m'"
    assert field_path(()) == ""


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"levels": [{"gpus": 1}] * 3}, "levels: must have at most 2 entries, got a list of 3"),
        ({"levels": []}, "levels: must have at least 1 entries"),
        ({"name": "abcde"}, "name: must have at most 4 characters, got 'abcde'"),
        ({"name": ""}, "name: must have at least 1 characters"),
    ],
)
def test_lengths_are_told_without_the_words_of_a_library(
    document: dict[str, object], words: str
) -> None:
    with pytest.raises(ValidationError) as error:
        Cluster.model_validate(document)
    told = validation_message(error.value, "c.yaml", Cluster)
    assert words in told
    assert "validation" not in told


def test_a_pipe_is_not_told_to_be_missing(tmp_path: Path) -> None:
    """`meshwright model <(cat config.json)` gives one; reading it could wait for ever."""
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(InputError, match="a pipe or a device, not a file"):
            read_text(path)
    with pytest.raises(InputError, match="no such file"):
        read_text(tmp_path / "none.json")
    with pytest.raises(InputError, match="a directory"):
        read_text(tmp_path)


def test_a_comma_too_many_in_a_json_file_is_named(tmp_path: Path) -> None:
    """YAML takes it, and would read 1e-06 as a text, of which alone was spoken."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "rms_norm_eps": 1e-06,}')
    with pytest.raises(InputError, match=r"not valid JSON: .* at line 1, column 4[67]"):
        read_mapping(path)


@pytest.mark.parametrize("levels", [1, 100, 900, 4000, 200_000])
def test_json_is_as_deep_as_yaml_whatever_python_reads(levels: int) -> None:
    """Python 3.11 reads 900 lists inside one another, 3.13 some 9,000."""
    lists = DEEPEST - 1
    for written in ('{"a": ', "a: "):
        end = "}" if written.startswith("{") else ""
        assert parse_mapping(f"{written}{'[' * lists}{']' * lists}{end}", "x")
        deeper = lists + levels
        with pytest.raises(InputError, match=f"nested more than {DEEPEST} levels deep"):
            parse_mapping(f"{written}{'[' * deeper}{']' * deeper}{end}", "x")
