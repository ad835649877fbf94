"""Lengths of samples from files: what is read, what is refused and by which words, and plans made of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshwright
from meshwright.errors import InputError
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.plan.document import LengthsDoc, Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.texts import plan_document, plan_text, read_plan
from meshwright.planner.plan.verify import faults
from meshwright.planner.report.plan_view import lengths_text
from meshwright.planner.request import length_file
from meshwright.planner.request.choices import WITHOUT
from meshwright.planner.request.length_file import read_lengths, read_packed
from meshwright.planner.request.reader import read_request

ASKED: dict[str, Any] = {"cluster": "dgx-h100", "gpus": 8, "global_batch": 32, "robustness": False}


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", "7\n9\n\n7\n", {7: 2, 9: 1}),
        ("a.ndjson", '{"length": 7}\n{"length": 9, "id": "x"}\n', {7: 1, 9: 1}),
        ("a.jsonl", '{"input_ids": [1, 2, 3]}\n{"tokens": [5]}\n', {3: 1, 1: 1}),
        ("a.npy", npy(np.array([3, 3, 8], dtype=np.uint16)), {3: 2, 8: 1}),
        ("a.npy", npy(np.array([[3, 4], [3, 5]])), {3: 2, 4: 1, 5: 1}),
        ("a.csv", "length,count\n512, 3\n 1024,1\n512,1\n", {512: 4, 1024: 1}),
        ("a.txt", "7\n9\n7\n", {7: 2, 9: 1}),
        ("a.json", "[7, 9, 7]", {7: 2, 9: 1}),
        ("A.JSON", '{"512": 3, "1024": 1}', {512: 3, 1024: 1}),
    ],
)
def test_files_that_are_read(
    tmp_path: Path, name: str, content: str | bytes, expected: dict[int, int]
) -> None:
    assert read_lengths(written(tmp_path, name, content)) == expected


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.log", "7", "a file with .log is not read; allowed: .jsonl or .txt (a length a line)"),
        ("a.jsonl", "", "holds no sample"),
        ("a.jsonl", "7\n0\n", "line 2: must be a whole number, 1 to 16777216, got 0"),
        ("a.jsonl", "7\n16777217\n", "line 2: must be a whole number"),
        ("a.jsonl", "true\n", "line 1: must be a whole number"),
        ("a.jsonl", "7.5\n", "line 1: must be a whole number"),
        ("a.jsonl", "7\n{\n", "line 2: is not JSON"),
        ("a.jsonl", "[" * 100_000, "line 1: is not JSON"),
        ("a.jsonl", b"\xff\xfe\n", "line 1: is not JSON"),
        ("a.jsonl", '{"size": 3}\n', "a mapping with one of length, input_ids, tokens"),
        ("a.jsonl", '{"input_ids": 3}\n', "input_ids: must be a list of tokens"),
        ("a.jsonl", '{"tokens": []}\n', "tokens of tokens: must be a whole number"),
        (
            "a.npy",
            npy(np.array([1.5])),
            "must be an array of whole numbers of tokens, got 'float64'",
        ),
        ("a.npy", npy(np.array([-1, 5])), "must be a whole number, 1 to 16777216, got -1"),
        ("a.npy", npy(np.array([{}], dtype=object)), "pickles are refused"),
        ("a.npy", npy(np.arange(9))[:-20], "not a numpy array"),
        ("a.npy", npy(np.zeros(0, dtype=np.int64)), "holds no sample"),
        ("a.csv", "512,3\n", "the first line must name the columns: length,count"),
        ("a.csv", "length,count\n512\n", "line 2: must be length,count"),
        ("a.csv", "length,count\n512,many\n", "line 2: count: must be a whole number"),
        ("a.csv", "length,count\n-5,1\n", "line 2: length: must be a whole number"),
        (
            "a.csv",
            "length,count\n5,9999999999999999\n",
            "count: must be a whole number, 1 to 1000000000000",
        ),
        ("a.json", "512", "must be a list of lengths, or a mapping from length to count"),
        ("a.json", "[512, 1.5]", "[1]: must be a whole number, 1 to 16777216, got 1.5"),
        ("a.json", "[[512]]", "[0]: must be a whole number"),
        ("a.json", '{"512": 1.5}', "512: count: must be a whole number"),
        ("a.json", '{"long": 1}', "long: length: must be a whole number"),
        ("a.json", "{", "is not JSON"),
    ],
)
def test_files_that_are_refused_by_field(
    tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    with pytest.raises(InputError) as refused:
        read_lengths(written(tmp_path, name, content))
    assert words in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_no_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_lengths(tmp_path / "a.log")
    (tmp_path / "b.jsonl").mkdir()
    with pytest.raises(InputError, match="directory"):
        read_lengths(tmp_path / "b.jsonl")


def test_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_file, "MOST_LINE_BYTES", 100)
    with pytest.raises(InputError, match="line 2: is longer than 100 bytes"):
        read_lengths(written(tmp_path, "a.jsonl", "7\n[" + "1," * 200))
    monkeypatch.setattr(length_file, "MOST_FILE_BYTES", 100)
    with pytest.raises(InputError, match="larger than 100 bytes"):
        read_lengths(written(tmp_path, "a.jsonl", "7\n" * 60))
    monkeypatch.setattr(length_file, "MOST_SAMPLES", 5)
    with pytest.raises(InputError, match="more than 5 samples"):
        read_lengths(written(tmp_path, "a.json", '{"7": 6}'))


def test_packs_without_a_size_hold_the_longest_sample(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", '{"300": 900, "1000": 100}')
    size, packed, others = read_packed(path, load_catalog_model("llama-3-8b"), None, "sequential")
    assert size == 1024
    assert packed.packing == "sequential"
    assert [other.packing for other in others] == ["first-fit", "first-fit-decreasing"]
    assert all(other.fill >= packed.fill for other in others)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "seq-len: give the tokens of a sequence, or the lengths"),
        ({"seq_len": 512, "pack_size": 512}, "pack-size: goes with --lengths alone"),
        ({"seq_len": 512, "packing": "padded"}, "packing: goes with --lengths alone"),
        ({"lengths": "FILE", "seq_len": 512}, "seq-len: does not go with --lengths"),
        ({"lengths": "FILE", "packing": "firstfit"}, "did you mean 'first-fit'"),
        ({"lengths": "FILE", "pack_size": 0}, "pack-size: must be a whole number of tokens"),
        ({"lengths": "FILE", "model": "deepseek-v3.2"}, "chooses the positions"),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    path = written(tmp_path, "a.json", '{"300": 9}')
    given = {name: path if value == "FILE" else value for name, value in options.items()}
    asked: dict[str, Any] = {
        "model": "llama-3-8b",
        "cluster": "dgx-h100",
        "gpus": 8,
        "global_batch": 8,
    }
    with pytest.raises(InputError) as refused:
        read_request(**asked | given)
    assert words in str(refused.value)


def test_no_baseline_is_compared_with_packs(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", '{"300": 9}')
    with pytest.raises(InputError, match="packs of samples"):
        meshwright.plan("llama-3-8b", lengths=path, baseline=path, **ASKED)


@pytest.mark.parametrize(
    "model",
    [
        "mixtral-8x7b",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-3-8b", "gpt-oss-20b")),
    ],
)
def test_constant_lengths_are_sequences_to_the_digit(tmp_path: Path, model: str) -> None:
    path = written(tmp_path, "a.json", '{"4096": 777}')
    pin = {"cp": 1, "micro_batch": 1, "zero_stage": 1, "recompute": "none"}
    asked = ASKED | {"pin": pin, "without": WITHOUT}
    sequences = plan_document(meshwright.plan(model, seq_len=4096, **asked))
    packed = plan_document(meshwright.plan(model, lengths=path, **asked))
    for document in (sequences, packed):
        document["inputs"].pop("lengths", None)
        document["solver"].pop("wall_s")
        document.pop("digest")
        # Published runs have one length: a plan of packs is not held against them.
        document.pop("evidence", None)
    report = packed.pop("lengths")
    assert "lengths" not in sequences
    assert report["planned"]["imbalance_s"] == 0.0
    assert report["planned"]["step_time_s"] == packed["objective"]["step_time_s"]
    packed["warnings"] = [text for text in packed["warnings"] if "pack of samples" not in text]
    assert packed == sequences


@pytest.mark.slow
def test_a_plan_says_what_packs_hold_and_cost(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6, 1.1, 9000), 16, 8192).astype(int)
    path = written(tmp_path, "a.npy", npy(lengths))
    plan = meshwright.plan("llama-3-8b", lengths=path, packing="sequential", **ASKED)
    report = plan.lengths
    assert plan.status == "optimal"
    assert plan.inputs.seq_len == 8192
    assert plan.predicted is not None
    assert report is not None
    planned, best = report.planned, report.others[0]
    assert planned.step_time_s == pytest.approx(plan.predicted.step_time_s)
    assert planned.imbalance_s == plan.predicted.breakdown_s["length_imbalance"] > 0
    tokens = 32 * 8192 * planned.fill
    assert report.tokens_per_step == pytest.approx(tokens)
    assert report.samples_per_step == pytest.approx(tokens / lengths.mean())
    assert plan.predicted.tokens_per_s_per_gpu * 8 == pytest.approx(planned.tokens_per_s)
    assert best.fill > planned.fill
    assert best.tokens_per_s > planned.tokens_per_s
    words = lengths_text(report)
    assert "sequential" in words
    assert f"{best.packing}: " in words
    assert "unlike packs cost" in words


def test_what_a_plan_says_of_packs_is_verified(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", json.dumps({str(n): 10 for n in range(16, 4096, 8)}))
    request = read_request(
        model="llama-3-8b", cluster="dgx-h100", gpus=8, global_batch=16, lengths=path
    )
    plan = fastest_plan(request)
    assert plan.lengths is not None
    assert list(faults(request, plan)) == []
    for name, value in (("tokens_per_step", 1.0), ("pack_size", 1), ("cut_samples", 3)):
        changed = plan.lengths.model_copy(update={name: value})
        assert any(name in fault for fault in faults(request, with_lengths(plan, changed)))
    for name in ("fill", "step_time_s", "imbalance_s", "tokens_per_s"):
        planned = plan.lengths.planned.model_copy(update={name: 0.5})
        changed = plan.lengths.model_copy(update={"planned": planned})
        assert any(name in fault for fault in faults(request, with_lengths(plan, changed)))
    without = plan.inputs.model_copy(update={"lengths": None})
    told = faults(request, plan.model_copy(update={"inputs": without}))
    assert any("the inputs have none" in fault for fault in told)


def with_lengths(plan: Plan, lengths: LengthsDoc) -> Plan:
    return plan.model_copy(update={"lengths": lengths})


@pytest.mark.slow
def test_a_plan_read_back_has_the_same_price(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", json.dumps({str(n): 10 for n in range(16, 4096, 8)}))
    pin = {"cp": 1, "micro_batch": 1, "zero_stage": 1}
    plan = meshwright.plan("gpt-oss-20b", lengths=path, pin=pin, without=WITHOUT, **ASKED)
    again = read_plan(written(tmp_path, "plan.yaml", plan_text(plan)))
    assert again == plan
    assert again.inputs.lengths == plan.inputs.lengths
