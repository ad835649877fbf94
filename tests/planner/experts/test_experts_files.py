"""Placement files: what other systems read, and back again; tables and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cli import main
from meshwright.errors import InputError
from meshwright.planner.experts.placements import (
    PLACEMENT_FORMATS,
    PlacementFile,
    placement_text,
    read_placement,
)
from tests.soaked import examples


def written(form: str, experts: int = 4) -> str:
    slots = np.array([[[0, 1], [2, 3]], [[3, 1], [2, 0]]])
    placed = PlacementFile(slots=slots, experts=experts, nodes=1, layer_ids=(1, 2), summary={})
    return placement_text(placed, form)


def test_formats_hold_the_placement(tmp_path: Path) -> None:
    assert json.loads(written("sglang")) == {
        "physical_to_logical_map": [[0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 2, 0]]
    }
    assert yaml.safe_load(written("trtllm")) == {
        "num_slots": 4,
        "initial_global_assignments": {1: [0, 1, 2, 3], 2: [3, 1, 2, 0]},
        "layer_updates_per_iter": 0,
    }
    ascend = json.loads(written("vllm"))
    assert ascend["moe_layer_count"] == 2
    assert ascend["layer_list"][1]["device_list"][0] == {"device_id": 0, "device_expert": [3, 1]}
    assert json.loads(written("megatron"))["inverse"]["2"] == [3, 1, 2, 0]
    path = tmp_path / "own.json"
    path.write_text(written("json"), encoding="utf-8")
    back = read_placement(path, layers=2, gpus=2, experts=4)
    assert back.tolist() == [[[0, 1], [2, 3]], [[3, 1], [2, 0]]]


ENDINGS = {"trtllm": ".yaml"}


@settings(max_examples=examples(30), deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(PLACEMENT_FORMATS),
    st.sampled_from([(2, 3), (1, 4), (3, 2)]),
)
def test_every_format_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, seed: int, form: str, sizes: tuple[int, int]
) -> None:
    gpus, per_gpu = sizes
    chance = np.random.default_rng(seed)
    experts = gpus * per_gpu if form == "megatron" else gpus * per_gpu - min(gpus - 1, 1)
    rows = [np.arange(gpus * per_gpu) % experts for _ in range(3)]
    slots = np.stack([chance.permutation(row) for row in rows]).reshape(3, gpus, per_gpu)
    ids = tuple(sorted(chance.choice(9, 3, replace=False).tolist()))
    placed = PlacementFile(slots=slots, experts=experts, nodes=1, layer_ids=ids, summary={})
    path = tmp_path_factory.mktemp("files") / f"placement{ENDINGS.get(form, '.json')}"
    path.write_text(placement_text(placed, form), encoding="utf-8")
    back = read_placement(path, layers=3, gpus=gpus, experts=experts, layer_ids=ids)
    assert back.tolist() == slots.tolist()


def test_sglang_counts_dense_layers_wherever_they_are(tmp_path: Path) -> None:
    slots = np.array([[[1, 0]], [[0, 1]]])
    placed = PlacementFile(slots=slots, experts=2, nodes=1, layer_ids=(1, 3), summary={})
    path = tmp_path / "placement.json"
    path.write_text(placement_text(placed, "sglang"), encoding="utf-8")
    table = json.loads(path.read_text(encoding="utf-8"))["physical_to_logical_map"]
    assert table == [[0, 1], [1, 0], [0, 1], [0, 1]]
    assert (
        read_placement(path, layers=2, gpus=1, experts=2, layer_ids=(1, 3)).tolist()
        == slots.tolist()
    )


def test_the_megatron_permutation_puts_every_expert_at_its_position() -> None:
    document = json.loads(written("megatron"))
    old, new = (np.array(document[name]["2"]) for name in ("permutation", "inverse"))
    weights = np.array([10, 11, 12, 13])
    assert weights[old].tolist() == [13, 11, 12, 10]
    assert weights[old][new].tolist() == weights.tolist()
    with pytest.raises(InputError, match="use --slots 3"):
        written("megatron", experts=3)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.json", "{}", "no physical_to_logical_map"),
        ("a.json", '{"permutation": {"x": [0, 1]}}', "numbers of layers"),
        ("a.json", '{"layer_list": [{"layer_id": 0}]}', "device_list"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.yaml", "initial_global_assignments: {0: [0, 1], 1: [0]}", "different lengths"),
        ("a.yaml", "initial_global_assignments: {0: [0, 0]}", "expert 1 is in no slot"),
        ("a.yaml", "initial_global_assignments: {0: [0, 7]}", "from 0 to 1"),
        ("a.yaml", "!!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_placements_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, text: str, part: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_placement(path, layers=1, gpus=1, experts=2)
    assert part in str(caught.value)


@pytest.mark.parametrize("form", PLACEMENT_FORMATS)
def test_the_command_writes_what_it_reads_back(tmp_path: Path, form: str) -> None:
    np.save(tmp_path / "load.npy", np.random.default_rng(0).lognormal(0, 1, (2, 16)))
    out = tmp_path / f"out{ENDINGS.get(form, '.json')}"
    asked = [
        "experts",
        str(tmp_path / "load.npy"),
        "--cluster",
        "dgx-h100",
        "--gpus",
        "8",
        "--slots",
        "16",
    ]
    asked += ["--time-limit", "0.2", "--json"]
    told = CliRunner().invoke(main, [*asked, "--format", form, "-o", str(out)])
    assert told.exit_code == 0, told.output
    again = CliRunner().invoke(main, [*asked, "--from", str(out), "--max-moves", "0"])
    first, second = json.loads(told.stdout), json.loads(again.stdout)
    assert second["from"]["moves"] == 0
    assert second["balance_mean"] == pytest.approx(first["balance_mean"])


FIGURES = (
    "balance",
    "bound",
    "gap",
    "nodes_per_token",
    "cross_node_bytes",
    "all_to_all_s",
    "all_to_all_deduplicated_s",
    "permutation_density",
    "duplicates",
)


@pytest.mark.slow
def test_every_figure_of_a_layer_is_reported(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    tokens = np.argsort(chance.random((32, 300, 8)), axis=2)[:, :, :2]
    np.savez(tmp_path / "trace.npz", topk_ids=tokens)
    asked = ["experts", str(tmp_path / "trace.npz"), "--cluster", "dgx-h100", "--gpus", "16"]
    asked += ["--model", "mixtral-8x7b", "--slots", "16", "--time-limit", "0.05"]
    told = json.loads(CliRunner().invoke(main, [*asked, "--json"]).stdout)
    for row in told["layers"]:
        assert all(row[name] is not None for name in FIGURES), row
        assert row["duplicates"] == 0
        assert 1 <= row["nodes_per_token"] <= 2
        assert row["bound"] <= row["balance"] * (1 + 1e-12)
        # A copy for each node that a token touches is never more than one for each expert.
        assert row["all_to_all_deduplicated_s"] <= row["all_to_all_s"]
    text = CliRunner().invoke(main, asked).stdout
    assert "all-to-all" in text
    assert "nodes per token" in text


def test_a_heat_map_has_a_box_for_each_run_of_equal_loads() -> None:
    from meshwright.planner.report.traffic_view import heat_map_svg

    root = ElementTree.fromstring(
        heat_map_svg(np.array([[1.0, 1.0, 0.9, 1.1], [1.1, 1.1, 1.1, 0.7]]))
    )
    boxes = [shape.attrib for shape in root.iter("{http://www.w3.org/2000/svg}rect")][1:6]
    assert [float(box["width"]) for box in boxes] == [320, 160, 160, 480, 160]
    assert boxes[0]["fill"] == "#ffffff", "the mean is white"
    red, blue = boxes[2]["fill"], boxes[4]["fill"]
    assert red[1:3] > red[5:7]
    assert blue[1:3] < blue[5:7]
