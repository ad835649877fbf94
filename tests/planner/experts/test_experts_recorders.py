"""What serving and training systems record, in the form that their own code writes."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.planner.experts.inputs import read_flows, read_routing
from meshwright.planner.experts.problem import SlotShape
from meshwright.planner.experts.recorders import recorded
from tests.planner.experts.safetensors_files import write_safetensors

SLOTS_HOLD = np.array([[0, 1, 2, 0], [0, 1, 2, 3], [3, 1, 2, 0]])
"""SGLang's physical_to_logical_map: three layers of four slots; layer 0 is dense and counted too."""
NOWHERE = Path("dump.pt")


def stat_dump() -> dict[str, Any]:
    """Mode `stat`: every step has a row, layers without experts too."""
    count = np.zeros((2, 3, 4), dtype=np.int32)
    count[0, 1], count[0, 2], count[1, 1], count[1, 2] = (
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [1, 1, 1, 1],
        [0, 0, 0, 9],
    )
    return {"rank": 0, "logical_count": count, "average_utilization_rate_over_window": None}


def pass_record(number: int, rank: int, second: list[int], third: list[int]) -> dict[str, Any]:
    count = np.array([[0] * 4, second, third], dtype=np.int32)
    return {
        "forward_pass_id": number,
        "rank": rank,
        "gatherer_key": "primary",
        "global_physical_count": count,
    }


def token_record(number: int, rank: int, ids: list[list[list[int]]]) -> dict[str, Any]:
    """Mode `per_token`: top-k is padded to 8 with -1; layer 0 is dense."""
    table = np.full((3, len(ids[0]), 8), -1, dtype=np.int32)
    table[1:, :, : len(ids[0][0])] = ids
    return {
        **pass_record(number, rank, [0] * 4, [0] * 4),
        "input_ids": [7] * len(ids[0]),
        "positions": list(range(len(ids[0]))),
        "extend_seq_lens": [len(ids[0])],
        "forward_mode": 1,
        "topk_ids_of_layer": table,
        "misc_objects": [],
    }


def test_sglang_counts() -> None:
    routing = recorded([stat_dump()], NOWHERE, 1)
    assert routing.layer_ids == (1, 2)
    assert routing.loads.tolist() == [[[2, 3, 4, 5], [5, 6, 7, 17]]]
    assert recorded([stat_dump()], NOWHERE, 2).loads[1].tolist() == [[1, 1, 1, 1], [0, 0, 0, 9]]
    # Two dumps follow one another.
    assert recorded([stat_dump(), stat_dump()], NOWHERE, 1).loads.sum() == 2 * routing.loads.sum()


def test_sglang_passes_count_slots_not_experts() -> None:
    dumps = [
        {
            "records": [
                pass_record(5, rank, [1, 0, 0, 2], [4, 0, 0, 1]),
                pass_record(6, rank, [0, 1, 0, 0], [0, 1, 0, 0]),
            ],
            "last_physical_to_logical_map": SLOTS_HOLD,
        }
        for rank in range(2)
    ]
    routing = recorded(dumps, NOWHERE, 2)
    # Slot 0 of layer 2 holds expert 3; the two ranks of a pass are one step.
    assert routing.loads.tolist() == [[[2, 0, 0, 4], [2, 0, 0, 8]], [[0, 2, 0, 0], [0, 2, 0, 0]]]
    assert routing.layer_ids == (1, 2)


def test_sglang_tokens_chose_slots_which_hold_experts() -> None:
    dumps = [
        {
            "records": [token_record(1, rank, [[[0, 3], [1, 2]], [[0, 1], [3, 2]]])],
            "last_physical_to_logical_map": SLOTS_HOLD,
        }
        for rank in (0, 1)
    ]
    dumps[1]["records"] = [token_record(1, 1, [[[3, -1]], [[2, 1]]])]
    routing = recorded(dumps, NOWHERE, 1)
    assert routing.tokens is not None
    assert routing.tokens.tolist() == [[[0, 3], [1, 2], [3, -1]], [[3, 1], [0, 2], [2, 1]]]
    assert routing.layer_ids == (1, 2)
    assert routing.affinity is not None
    assert routing.affinity[0].tolist() == [
        [[1, 1, 1, 1], [0, 0, 0, 1]],
        [[1, 1, 1, 1], [0, 1, 1, 0]],
    ]
    # Ranks that are not the cluster's GPUs say nothing of where tokens come from.
    assert read_flows(routing, None, SlotShape(slots=4, gpus=4, nodes=2)).sources is None
    assert read_flows(routing, None, SlotShape(slots=4, gpus=2, nodes=2)).sources is not None


@pytest.mark.parametrize(
    ("dump", "part"),
    [
        ({}, "no logical_count and no records"),
        ({"records": []}, "no logical_count and no records"),
        ({"records": ["x"]}, "no logical_count and no records"),
        ({"records": [{"rank": 0}], "last_physical_to_logical_map": SLOTS_HOLD}, "records without"),
        ({"records": [pass_record(1, 0, [0] * 4, [1] * 4)]}, "last_physical_to_logical_map"),
        (
            {
                "records": [pass_record(1, 0, [0] * 4, [1] * 4)],
                "last_physical_to_logical_map": SLOTS_HOLD[:2],
            },
            r"shape [2, 4]",
        ),
        (
            {
                "records": [token_record(1, 0, [[[0, 4]], [[0, 1]]])],
                "last_physical_to_logical_map": SLOTS_HOLD,
            },
            "slots must be from 0 to 3",
        ),
        ({"logical_count": np.zeros((2, 3, 4))}, "nothing was routed"),
        ({"logical_count": np.zeros(3)}, "[steps, layers, experts]"),
    ],
)
def test_sglang_dumps_that_do_not_fit_are_refused(dump: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError) as caught:
        recorded([dump], NOWHERE, 1)
    assert part in str(caught.value)


def test_torch_files_are_read_without_running_code(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch, to write what SGLang writes")

    def tensors(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value.copy())
        if isinstance(value, dict):
            return {key: tensors(item) for key, item in value.items()}
        return [tensors(item) for item in value] if isinstance(value, list) else value

    path = tmp_path / "expert_distribution_recorder_1.pt"
    torch.save(tensors(stat_dump()), path)
    assert read_routing(path).loads.tolist() == [[[2, 3, 4, 5], [5, 6, 7, 17]]]
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in range(2):
        dump = {
            "records": [token_record(1, rank, [[[0, 3], [1, 2]], [[0, 1], [3, 2]]])],
            "last_physical_to_logical_map": SLOTS_HOLD,
        }
        torch.save(tensors(dump), folder / f"expert_distribution_recorder_1.0_{rank}.pt")
    tokens = read_routing(folder).tokens
    assert tokens is not None
    assert tokens.shape == (2, 4, 2)

    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.write_text, (tmp_path / "ran", "x"))

    torch.save({"logical_count": Runs()}, path)
    with pytest.raises(InputError, match="refused"):
        read_routing(path)
    assert not (tmp_path / "ran").exists()


def test_a_small_torch_file_fills_no_memory(tmp_path: Path) -> None:
    """One number repeated as a view, a deflated archive, and lists that hold one list many times."""
    torch = pytest.importorskip("torch", reason="needs torch, to write such files")
    path = tmp_path / "x.pt"
    view = torch.ones(1, dtype=torch.int64).as_strided((100, 60, 1_000_000), (0, 0, 0))
    nested: Any = [1] * 1000
    for _ in range(4):
        nested = [nested] * 1000
    record = {"topk_ids_of_layer": view}
    mapping = torch.zeros((100, 8), dtype=torch.int64)
    for dump, words in (
        ({"logical_count": view}, "6000000000 counts, more than the 50000000"),
        ({"logical_count": nested}, "must be tensors"),
        ({"records": [record], "last_physical_to_logical_map": view}, "slots, more than"),
        ({"records": [record], "last_physical_to_logical_map": mapping}, "choices, more than"),
    ):
        torch.save(dump, path)
        with pytest.raises(InputError, match=words):
            read_routing(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data/0", bytes(600 * 2**20))
    with pytest.raises(InputError, match="unpacks to more than"):
        read_routing(path)


def test_torch_files_that_are_plain_pickles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    path.write_bytes(pickle.dumps({"logical_count": [[1, 2]]}))
    with pytest.raises(InputError, match="torch"):
        read_routing(path)


def statistics(folder: Path) -> Path:
    """As TensorRT-LLM writes them: a file of counts for each rank, tensors named ITERATION_LAYER."""
    folder.mkdir()
    meta = {"num_experts": 3, "num_experts_per_token": 2, "model_type": "x"}
    (folder / "meta_info.json").write_text(json.dumps(meta), encoding="utf-8")
    for rank in range(2):
        counts = {
            f"{step}_{layer}": np.array([step, layer, rank], dtype=np.int32)
            for step in (10, 11)
            for layer in (3, 4)
        }
        (folder / f"rank{rank}.safetensors").write_bytes(write_safetensors(counts))
    return folder


def test_tensorrt_llm_counts_and_where_tokens_came_from(tmp_path: Path) -> None:
    folder = statistics(tmp_path / "stats")
    routing = read_routing(folder)
    assert routing.layer_ids == (3, 4)
    assert routing.loads.tolist() == [[[42, 12, 2], [42, 16, 2]]]
    assert read_routing(folder, split=2).loads[0].tolist() == [[20, 6, 1], [20, 8, 1]]
    assert routing.affinity is not None
    assert routing.affinity[0, 1].tolist() == [[21, 8, 0], [21, 8, 2]]
    by_step = read_routing(folder, split=2).affinity
    assert by_step is not None
    assert by_step[:, 1].tolist() == [[[10, 4, 0], [10, 4, 1]], [[11, 4, 0], [11, 4, 1]]]


def test_tensorrt_llm_raw_choices_are_a_trace_and_no_counts(tmp_path: Path) -> None:
    folder = statistics(tmp_path / "stats")
    for rank in range(2):
        raw = {
            f"{step}_{layer}": np.array([[step - 10, 2], [rank, layer - 3]], dtype=np.int32)
            for step in (10, 11)
            for layer in (3, 4)
        }
        (folder / f"rank{rank}_raw.safetensors").write_bytes(write_safetensors(raw))
    routing = read_routing(folder)
    assert routing.loads.tolist() == [[[42, 12, 2], [42, 16, 2]]]
    assert routing.tokens is not None
    assert routing.tokens[1].tolist() == [
        [0, 2],
        [0, 1],
        [0, 2],
        [1, 1],
        [1, 2],
        [0, 1],
        [1, 2],
        [1, 1],
    ]
    assert routing.token_ranks is not None
    assert routing.token_ranks.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    for rank in range(2):
        (folder / f"rank{rank}.safetensors").unlink()
    alone = read_routing(folder)
    assert alone.layer_ids == (3, 4)
    assert alone.loads[0].sum() == 2 * 8 * 2


def test_tensorrt_llm_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = statistics(tmp_path / "stats")
    (folder / "rank_old.safetensors").write_bytes(
        write_safetensors({"10_3": np.zeros(3, dtype=np.int32)})
    )
    with pytest.raises(InputError, match=r"rank0\.safetensors"):
        read_routing(folder)
    (folder / "rank_old.safetensors").write_bytes(
        write_safetensors({"x": np.zeros(3, dtype=np.int32)})
    )
    with pytest.raises(InputError, match="ITERATION_LAYER"):
        read_routing(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"meta_info\.json"):
        read_routing(tmp_path / "empty")


def test_vllm_load_windows_are_of_slots(tmp_path: Path) -> None:
    path = tmp_path / "window.npz"
    window = np.arange(24).reshape(2, 3, 4)
    np.savez(path, expert_load_window=window, physical_to_logical_map=SLOTS_HOLD)
    read = read_routing(path, split=2).loads
    assert read[0].tolist() == [[0 + 3, 1, 2, 0], [4, 5, 6, 7], [11, 9, 10, 8]]
    np.savez(path, expert_load_window=window, physical_to_logical_map=SLOTS_HOLD[:, :3])
    with pytest.raises(InputError, match=r"\[3, 4\], got \[3, 3\]"):
        read_routing(path)


def test_megatron_lines_of_layers_or_of_all_layers(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    lines = [{"iteration": 3, "layer_number": 2, "tokens_per_expert": [4, 5]}]
    lines += [{"iteration": 3, "layer_number": 2, "tokens_per_expert": [1, 1]}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    # Ranks that log the same layer of an iteration are summed.
    assert read_routing(path).loads.tolist() == [[[5, 6]]]
    whole = [{"step": i, "tokens_per_expert": [[i, 1], [2, i]]} for i in (1, 2)]
    path.write_text("\n".join(map(json.dumps, whole)), encoding="utf-8")
    assert read_routing(path, split=2).loads.tolist() == [[[1, 1], [2, 1]], [[2, 1], [2, 2]]]
    path.write_text(
        '{"tokens_per_expert": [1, 2]}\n{"tokens_per_expert": [1, 2, 3]}', encoding="utf-8"
    )
    with pytest.raises(InputError, match="line 2"):
        read_routing(path)


def test_a_rank_without_tokens_of_a_layer_routed_nothing_there(tmp_path: Path) -> None:
    folder = statistics(tmp_path / "stats")
    few = {"10_3": np.array([1, 2, 3], dtype=np.int32)}
    (folder / "rank2.safetensors").write_bytes(write_safetensors(few))
    affinity = read_routing(folder).affinity
    assert affinity is not None
    assert affinity[0, :, 2].tolist() == [[1, 2, 3], [0, 0, 0]]


@pytest.mark.parametrize(
    "arrays",
    [
        {"logical_count": np.array([[["a", "b"]]])},
        {"logical_count": np.zeros((0, 2, 4))},
        {"load": np.ones((2, 4)), "affinity": np.array([[["a", "b"]]])},
        {
            "expert_load_window": np.ones((1, 2, 4)),
            "physical_to_logical_map": np.zeros((0, 0), dtype=int),
        },
    ],
)
def test_arrays_of_no_numbers_are_named(tmp_path: Path, arrays: dict[str, Any]) -> None:
    np.savez(tmp_path / "loads.npz", **arrays)
    with pytest.raises(InputError, match=r"loads\.npz.*(numbers|nothing|integers)"):
        read_routing(tmp_path / "loads.npz")


def test_layers_beyond_any_model_are_refused(tmp_path: Path) -> None:
    """A file of SGLang has a row for every layer up to the last: one of a billion would not end."""
    path = tmp_path / "run.jsonl"
    for layer in (-1, 10**9):
        path.write_text(json.dumps({"tokens_per_expert": [1, 2], "layer": layer}), encoding="utf-8")
        with pytest.raises(InputError, match="layer must be from 0"):
            read_routing(path)
    folder = statistics(tmp_path / "stats")
    for name in ("10_100000", "1_" + "9" * 5000):
        tensors = {name: np.array([1, 2, 3], dtype=np.int32)}
        (folder / "rank1.safetensors").write_bytes(write_safetensors(tensors))
        with pytest.raises(InputError, match="ITERATION_LAYER"):
            read_routing(folder)
