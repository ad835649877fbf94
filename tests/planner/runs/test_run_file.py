"""Run files: the words of published rows, their pipeline splits, and errors that say what to change."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright
from meshwright.costmodel.layout import Recompute
from meshwright.errors import InputError
from meshwright.frameworks.catalog import nearest_stack
from meshwright.model_specs.reader import read_model
from meshwright.planner.plan.texts import workload_of_plan
from meshwright.planner.runs.prediction import arrangement, predict_run, prediction_of, price_run
from meshwright.planner.runs.run_file import (
    MAX_FILE_BYTES,
    Run,
    UnreadRow,
    read_rows,
    read_runs,
    run_from_mapping,
)
from meshwright.planner.runs.run_schema import RunDoc, SettingsDoc
from meshwright.planner.runs.run_terms import (
    ALL_LAYERS,
    attends_in_fp8,
    balanced,
    copies_of_dealt_experts,
    cuda_graph_kind,
    layers_from_words,
)
from tests.places import DATA
from tests.planner.runs.written_run import run_to_mapping
from tests.published import published_runs
from tests.soaked import examples

PUBLISHED = DATA / "published_runs.yaml"

ROW: dict[str, Any] = {
    "id": "small",
    "model": {
        "name": "GPT-22B",
        "layers": 48,
        "hidden": 6144,
        "ffn_hidden": 24576,
        "heads": 64,
        "kv_heads": 64,
        "vocab": 51200,
        "activation": "gelu",
        "tied_embeddings": True,
    },
    "cluster": {
        "device": "a100-sxm-80gb",
        "gpus": 16,
        "gpus_per_node": 8,
        "nvlink_domain": 8,
        "nic_gbps_per_gpu": 200,
    },
    "run": {"seq_len": 2048, "global_batch": 64, "micro_batch": 2, "tp": 4, "pp": 2, "dp": 2},
}


def row(**run: object) -> dict[str, Any]:
    """The small row, with these keys of its `run` section replaced."""
    changed = copy.deepcopy(ROW)
    changed["run"].update(run)
    return changed


def read(mapping: dict[str, Any]) -> Run:
    return run_from_mapping(mapping, where="file.yaml: small")


def message(mapping: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        read(mapping)
    return str(caught.value)


@pytest.fixture(scope="module")
def published() -> dict[str, Run]:
    return {run.id: run for run in published_runs()}


def test_every_published_row_reads(published: dict[str, Run]) -> None:
    assert len(published) == 458
    assert all(run.measured is not None for run in published.values())
    assert (
        sum(
            run.measured is not None and run.measured.memory_gib is not None
            for run in published.values()
        )
        == 77
    )
    assert sum(run.workload.model.moe is not None for run in published.values()) == 71
    assert (
        sum(run.workload.precision in ("fp8", "mxfp8", "nvfp4") for run in published.values())
        == 131
    )
    assert sum(run.suspect is not None for run in published.values()) == 28
    for run in published.values():
        layout = run.layout
        assert layout.gpus == run.workload.gpus <= run.workload.cluster.gpus
        assert (
            layout.num_micro_batches * layout.micro_batch * layout.dp == run.workload.global_batch
        )
        assert not any(
            "not understood" in remark or "not known" in remark for remark in run.remarks
        )


def test_published_jobs_stand_in_equal_parts_of_racks(published: dict[str, Run]) -> None:
    """Regression: 512 GPUs were seven racks of 72 and 8 GPUs of an eighth, whose one NIC paced the ring."""
    cluster = published["dgxc-v25.05.05-gb200-nemotron4_340b-fp8-512g"].workload.cluster
    assert cluster.gpus == 8 * 72
    assert published["dgxc-v24.11.1-h100-llama3_8b-fp8-8g"].workload.cluster.gpus == 8


def test_published_splits_cover_the_model(published: dict[str, Run]) -> None:
    uneven = [run for run in published.values() if run.stages is not None]
    assert len(uneven) == 88
    for run in uneven:
        assert run.stages is not None
        assert len(run.stages) == run.layout.pp
        assert {len(rank) for rank in run.stages} == {run.layout.vpp}
        assert sum(map(sum, run.stages)) == run.workload.model.layers


def test_published_rows_survive_being_written_and_read(published: dict[str, Run]) -> None:
    for run in published.values():
        again = run_from_mapping(run_to_mapping(run), where="again")
        for name in ("id", "source", "workload", "layout", "stages", "measured", "tags", "suspect"):
            assert getattr(again, name) == getattr(run, name), (run.id, name)


def test_one_row_read_by_hand(published: dict[str, Run]) -> None:
    run = published["mbridge-26.06.01-gb200-dsv3-mxfp8-pt"]
    assert (run.layout.pp, run.layout.vpp, run.layout.dp, run.layout.ep) == (4, 4, 64, 64)
    assert run.layout.num_micro_batches == 64  # 4096 sequences / (1 per micro-batch * 64 replicas)
    assert run.layout.recompute == Recompute.MLA_UP_PROJECTION
    assert run.workload.framework == "megatron-bridge"
    assert run.workload.cuda_graph == "full"
    assert run.workload.ep_overlap
    assert not run.workload.tp_overlap
    assert run.measured is not None
    assert run.measured.step_time_s == 13.2987
    # 16 chunks of 4 layers, but for the last: 1 layer, the MTP module and the loss; it is rank 3's fourth.
    assert run.stages == ((4, 4, 4, 4), (4, 4, 4, 4), (4, 4, 4, 4), (4, 4, 4, 1))


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ({}, "none"),
        ({"cuda_graph_impl": "none"}, "none"),
        ({"cuda_graph_impl": "full_iteration"}, "full"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, "full"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, "full"),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "moe_router"]},
            "partial",
        ),
        ({"cuda_graph_impl": "transformer_engine"}, "partial"),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["moe_router"]},
            "feed_forward",
        ),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "mlp"}, "feed_forward"),
    ],
)
def test_cuda_graph(recipe: dict[str, Any], kind: str) -> None:
    assert cuda_graph_kind(recipe) == kind
    assert read(row(recipe=recipe)).workload.cuda_graph == kind


@pytest.mark.parametrize(
    ("settings", "mask", "layers"),
    [
        ({}, Recompute.NONE, 0),
        ({"recompute": "full"}, Recompute.FULL, ALL_LAYERS),
        ({"recompute": "full", "recompute_layers": 3}, Recompute.FULL, 3),
        ({"recompute": "full", "recompute_layers": "block, 7 of 24"}, Recompute.FULL, 7),
        ({"recompute": "selective"}, Recompute.CORE_ATTENTION, 0),
        (
            {"recompute": "selective", "recompute_modules": "core attention"},
            Recompute.CORE_ATTENTION,
            0,
        ),
        (
            {"recompute": "selective", "recompute_modules": "mla_up_proj, mlp"},
            Recompute.MLA_UP_PROJECTION | Recompute.MLP,
            0,
        ),
        (
            {"recompute": "selective", "recompute_modules": ["layernorm", "moe_act"]},
            Recompute.LAYERNORM | Recompute.MOE_ACTIVATION,
            0,
        ),
        ({"recompute": "selective", "recompute_modules": "op"}, Recompute.OPERATORS, 0),
        ({"recompute": "selective", "recompute_modules": "SAC"}, Recompute.OPERATORS, 0),
        # 48 layers on 2 stages: every second of 24.
        ({"recompute": "selective", "recompute_modules": "layer"}, Recompute.FULL, 12),
    ],
)
def test_recompute(settings: dict[str, Any], mask: Recompute, layers: int) -> None:
    layout = read(row(**settings)).layout
    assert (layout.recompute, layout.recompute_layers) == (int(mask), layers)


def test_what_is_approximated_is_remarked() -> None:
    run = read(
        row(
            recompute="selective", recompute_modules="op", moe_routing="pad_to_capacity, capacity 1"
        )
    )
    assert len(run.remarks) == 2
    assert "every second" in run.remarks[0]
    assert "pad_to_capacity" in run.remarks[1]


@pytest.mark.parametrize(("experts", "chosen", "ep"), [(128, 8, 8), (384, 8, 32), (24, 3, 4)])
def test_experts_that_are_dealt_out_lie_on_few_ranks(experts: int, chosen: int, ep: int) -> None:
    """Tokens written out one by one, each with the experts behind those of the one before."""
    model = read_model("qwen3-30b-a3b")
    assert model.moe is not None
    moe = model.moe.model_copy(update={"experts": experts, "top_k": chosen})
    model = model.model_copy(update={"moe": moe})
    for degree, blocks, copies in copies_of_dealt_experts("fake balanced gate", model, ep):
        touched, dealt = 0, 0
        for _ in range(experts):
            touched += len({(dealt + i) % experts // (experts // blocks) for i in range(chosen)})
            dealt += chosen
        assert degree == ep
        assert copies == pytest.approx(touched / experts)


def moe_run(**settings: object) -> Run:
    """Qwen3-30B-A3B, its experts on the eight H100 of a node."""
    mapping = row(tp=1, pp=1, dp=8, ep=8, **settings)
    return read({**mapping, "model": "qwen3-30b-a3b", "cluster": "dgx-h100"})


def test_dealt_experts_are_reached_with_fewer_copies() -> None:
    """DeepEP sends a token to one rank of eight in place of five; an all-to-all a copy for each expert."""
    seconds = {}
    for dispatch in ("deepep", "alltoall"):
        for routing in ("fake balanced gate", "force-balanced"):
            run = moe_run(moe_routing=routing, moe_dispatch=dispatch)
            seconds[dispatch, routing] = predict_run(run).estimate.breakdown_s["ep_comm"]
    ratio = seconds["deepep", "fake balanced gate"] / seconds["deepep", "force-balanced"]
    assert ratio == pytest.approx(1 / (8 * (1 - (7 / 8) ** 8)), rel=0.05)
    assert seconds["alltoall", "fake balanced gate"] == seconds["alltoall", "force-balanced"]


DEEPSEEK_V3 = (
    "custom uneven layout: 32 chunks = Et|(tt|)*30mL; 16 chunks = E+4,14x4,1+mtp+loss; "
    "8 chunks = E+8,6x8,5+mtp+loss, see Megatron-Bridge"
)
END_SLOTS = "embedding and LM head each occupy one layer slot: 128 slots over 32 chunks"


@pytest.mark.parametrize(
    ("words", "layers", "chunks", "expected"),
    [
        (END_SLOTS, 126, 32, (3, *[4] * 30, 3)),
        (END_SLOTS, 30, 32, (0, *[1] * 30, 0)),
        ("type:transformer|embedding: 72 slots over 12 stages (6 each)", 70, 12, (5, *[6] * 10, 5)),
        # 74 slots over 12 stages: DeepSpeed's partition_balanced gives 7, 7, then ten times 6.
        ("type:transformer|embedding", 72, 12, (6, 7, *[6] * 9, 5)),
        (END_SLOTS, 4, 1, (4,)),
        (DEEPSEEK_V3, 61, 32, (1, *[2] * 30, 0)),
        (DEEPSEEK_V3, 61, 16, (*[4] * 15, 1)),
        (DEEPSEEK_V3, 61, 8, (*[8] * 7, 5)),
        (DEEPSEEK_V3, 61, 4, None),
        (DEEPSEEK_V3, 60, 8, None),
        ("Et*3|(tt|)*29m|L", 61, 32, (3, *[2] * 29, 0, 0)),
        ("Ett|tt|ttL", 6, 3, (2, 2, 2)),
        ("E*9999(t)*9999L", 9999, 1, (9999,)),
        ("something else", 6, 3, None),
    ],
)
def test_layer_split_words(
    words: str, layers: int, chunks: int, expected: tuple[int, ...] | None
) -> None:
    assert layers_from_words(words, layers, chunks) == expected


@given(layers=st.integers(1, 200), chunks=st.integers(1, 80))
def test_end_slots_balance_layers_with_embedding_and_head(layers: int, chunks: int) -> None:
    split = layers_from_words(END_SLOTS, layers, chunks)
    if split is None:
        assert layers + 2 < chunks or (layers + 2) // chunks == 0 or chunks == 1
        return
    slots = list(split)
    slots[0] += 1
    slots[-1] += 1
    assert sum(split) == layers
    assert max(slots) - min(slots) <= 1


def test_layers_that_do_not_divide_are_balanced_larger_first() -> None:
    assert balanced(10, 4) == (3, 3, 2, 2)
    changed = row(vpp=2, global_batch=64)
    changed["model"]["layers"] = 50
    run = read(changed)
    # Chunks of 13, 13, 12, 12; chunk 2 is the second virtual stage of rank 0.
    assert run.stages == ((13, 12), (13, 12))
    assert any("do not divide" in remark for remark in run.remarks)


def test_even_layers_need_no_stages() -> None:
    assert read(row(vpp=2)).stages is None
    unclear = read(row(layer_split="as the authors saw fit"))
    assert unclear.stages is None
    assert any("not understood" in remark for remark in unclear.remarks)


def test_stages_written_out() -> None:
    assert read(row(stages=[[25], [23]])).stages == ((25,), (23,))
    assert read(row(vpp=2, pp_layout=[14, 12, 12, 10])).stages == ((14, 12), (12, 10))
    assert read(row(pp_layout="E" + "t" * 25 + "|" + "t" * 23 + "L")).stages == ((25,), (23,))
    assert "47 layers in all, but the model has 48" in message(row(stages=[[24], [23]]))
    assert "2 ranks (pp) of 1 virtual stages" in message(row(stages=[[24, 24]]))
    assert "2 ranks (pp) of 1 virtual stages" in message(row(pp_layout=[48]))


def test_dp_is_derived_from_the_gpus() -> None:
    changed = row()
    del changed["run"]["dp"]
    assert read(changed).layout.dp == 2
    changed["run"]["gpus"] = 8
    run = read(changed)
    assert (run.layout.dp, run.workload.gpus, run.workload.cluster.gpus) == (1, 8, 16)
    changed["run"]["tp"] = 3
    assert "does not divide 8 GPUs" in message(changed)


def with_images(**run: object) -> dict[str, Any]:
    """A run of Qwen3-VL 8B on eight GPUs."""
    batch = {"seq_len": 4096, "global_batch": 8, "gpus": 8}
    model = str(DATA / "hf_configs" / "qwen3-vl-8b.json")
    return {"model": model, "cluster": "dgx-h100", "run": {"framework": "fsdp2", **batch, **run}}


def test_images_of_a_run_are_those_of_a_plan() -> None:
    """Same encoder, images and shards: the same seconds and bytes."""
    said = {"image_tokens": 2048, "images_per_sequence": 2}
    run = read(with_images(zero_stage=3, recompute="full", overlap={"dp": True}, **said))
    asked = meshwright.plan(
        DATA / "hf_configs" / "qwen3-vl-8b.json",
        cluster="dgx-h100",
        gpus=8,
        global_batch=8,
        seq_len=4096,
        framework="fsdp2",
        pin="zero_stage=3,micro_batch=1,recompute=full,optimizer_offload=0",
        robustness=False,
        image_tokens=2048,
        images_per_sequence=2,
    )
    assert workload_of_plan(asked).model.encoder == run.workload.model.encoder
    assert asked.predicted is not None
    assert prediction_of(run).step_time_s == pytest.approx(asked.predicted.step_time_s)


def test_a_frozen_encoder_is_cheaper_and_no_part_of_a_model_without_a_price() -> None:
    said = {"image_tokens": 1024, "recompute": "full", "zero_stage": 3}
    trained, frozen = (read(with_images(freeze_encoder=on, **said)) for on in (False, True))
    assert prediction_of(frozen).step_time_s < prediction_of(trained).step_time_s


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"image_tokens": 5000}, "image_tokens: .*4096 tokens of a sequence"),
        ({"images_per_sequence": 2}, "images_per_sequence: goes with image_tokens alone"),
        ({"freeze_encoder": True}, "freeze_encoder: goes with image_tokens alone"),
        ({"image_tokens": 1024, "framework": "torchtitan"}, "choose --framework"),
    ],
)
def test_images_that_no_run_can_have_are_refused(run: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(with_images(**run))


def test_catalog_names_and_files_beside_the_run_file(tmp_path: Path) -> None:
    document = row(tp=8, pp=1, dp=2, global_batch=64)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(document["model"]), encoding="utf-8")
    document["model"], document["cluster"] = "tiny.yaml", "superpod-h100"
    del document["id"]
    path = tmp_path / "run-7.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    (run,) = read_runs(path)
    assert run.id == "run-7"
    assert run.workload.model.layers == 48
    assert run.workload.cluster.device.name == "h100-sxm-80gb"
    assert run.workload.gpus == 16
    assert run.measured is None
    path.write_text(yaml.safe_dump(document | {"run": {"seq_len": 1}}), encoding="utf-8")
    with pytest.raises(
        InputError, match=r"run-7\.yaml: run-7: run\.global_batch: this field is required"
    ):
        read_runs(path)


def test_a_kind_of_node_needs_dp_or_gpus() -> None:
    changed = row()
    changed["cluster"] = "dgx-h100"
    assert read(changed).workload.gpus == 16
    del changed["run"]["dp"]
    assert "run.dp: needed" in message(changed)
    changed["run"]["gpus"] = 32
    assert read(changed).layout.dp == 4


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"tp": 0}, ["file.yaml: small: run.tp", "0", "at least 1"]),
        ({"tp": "eight"}, ["run.tp", "'eight'", "integer"]),
        ({"tp": True}, ["run.tp", "integer"]),
        ({"tpp": 4}, ["run.tpp", "did you mean 'tp'"]),
        ({"colour": "blue"}, ["run.colour", "allowed", "micro_batch"]),
        ({"precision": "bf61"}, ["run.precision", "'bf61'", "did you mean 'bf16'", "nvfp4"]),
        ({"recompute": "selectiv"}, ["run.recompute", "did you mean 'selective'"]),
        (
            {"recompute": "selective", "recompute_modules": "core_atn"},
            ["core_atn", "did you mean 'core_attn'"],
        ),
        ({"framework": "megatronn"}, ["run.framework", "did you mean 'megatron'", "torchtitan"]),
        ({"zero_stage": 4}, ["run.zero_stage", "at most 3"]),
        ({"seq_len": 10**30}, ["run.seq_len", "at most 16777216"]),
        ({"overlap": {"ddp": True}}, ["run.overlap.ddp", "did you mean 'dp'"]),
        ({"dp": 1, "micro_batch": 3}, ["run.global_batch", "64", "micro_batch 3 * dp 1 = 3"]),
        ({"dp": 16}, ["run.dp", "128 GPUs", "the cluster has 16"]),
        ({"gpus": 12}, ["run.gpus", "12", "16"]),
        ({"ep": 3}, ["run.ep", "3", "8"]),
        ({"pp": 49, "tp": 1, "dp": 1, "gpus": None}, ["run", "49 GPUs"]),
        ({"vpp": 25}, ["run.pp", "50 chunks", "48 layers"]),
        ({"pp_layout": [-1]}, ["run.pp_layout", "lists of layers"]),
        ({"stages": [[2001]]}, ["run.stages[0][0]", "at most 2000"]),
        ({"train": "qlora"}, ["run.train", "run.adapters", "{method: qlora, rank: 16}", "'qlora'"]),
        ({"lora_rank": 8}, ["run.lora_rank", "run.adapters", "dora-8bit"]),
    ],
)
def test_errors_name_field_value_and_remedy(change: dict[str, Any], parts: list[str]) -> None:
    text = message(row(**change))
    for part in parts:
        assert part in text


def test_errors_of_model_and_cluster_keep_their_place() -> None:
    changed = row()
    changed["model"]["layers"] = 0
    assert "file.yaml: small: model: layers" in message(changed)
    changed = row()
    changed["cluster"]["device"] = "a100-sxm-80"
    assert "file.yaml: small: cluster: device" in message(changed)
    changed["cluster"] = ["dgx-h100"]
    assert "cluster: must be a catalog name, a file name or a mapping" in message(changed)
    changed["cluster"] = "c" * 4000
    assert "cluster: " in message(changed)
    del changed["cluster"]
    assert "cluster: this field is required and missing" in message(changed)


def test_unknown_keys_of_published_rows_are_remarked_but_slips_are_not_forgiven() -> None:
    published_row = row(weather="sunny") | {"measured": {"step_time_s": 2.0}, "curator": "me"}
    remarks = read(published_row).remarks
    assert any("weather" in remark for remark in remarks)
    assert any("curator" in remark for remark in remarks)
    assert "run.micro_batchs" in message(row(micro_batchs=2) | {"measured": {"step_time_s": 2.0}})
    assert "run.weather" in message(row(weather="sunny"))


def test_a_published_row_of_an_unknown_framework_is_priced_in_general() -> None:
    run = read(row(framework="Foo 3", zero_stage=3) | {"measured": {"step_time_s": 2.0}})
    assert run.workload.framework == "fsdp2"
    assert any("Foo 3" in remark for remark in run.remarks)


def test_step_time_from_throughput() -> None:
    measured = {"measured": {"tokens_per_s_per_gpu": 1024.0}}
    run = read(row() | measured)
    assert run.measured is not None
    assert run.measured.step_time_s == 8.0  # 64 * 2048 tokens / (1024 * 16 GPUs)
    assert "needs step_time_s" in message(row() | {"measured": {}})
    assert "measured.step_time_s" in message(row() | {"measured": {"step_time_s": 0.0}})


def test_memory_alone_or_a_run_that_did_not_fit() -> None:
    run = read(row() | {"measured": {"memory_gib": 3.0}})
    assert run.measured is not None
    assert (run.measured.step_time_s, run.measured.memory_gib) == (None, 3.0)
    run = read(row() | {"measured": {"out_of_memory": True}})
    assert run.measured is not None
    assert run.measured.out_of_memory
    both = {"measured": {"out_of_memory": True, "step_time_s": 2.0}}
    assert "neither a step time nor memory" in message(row() | both)


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        ("torch", "unfused"), ("fused", "fused-softmax"), ("flash_attentionv1.0.8", "flash-1"),
        ("flash_attention2", "flash-2"), ("FlashAttention-3", "flash-3"), ("cuDNN", "flash-3"),
        ("cuDNN 9.0", "cudnn-9.0"), ("cudnn 8.9.7", "cudnn-9.0"), ("cuDNN 9.10", "flash-3"),
        ("triton thing", None),
    ],
)  # fmt: skip
def test_attention_kernels_in_words(words: str, kernel: str | None) -> None:
    assert read(row(recipe={"attention_kernel": words})).workload.attention_kernel == kernel
    assert read(row(attention_kernel="flash-1")).workload.attention_kernel == "flash-1"


@pytest.mark.parametrize(
    ("framework", "kernel"),
    [
        ("NeMo 24.01", "cudnn-9.0"), ("NeMo 24.05 container", "cudnn-9.0"), ("NeMo 24.07", None),
        ("NeMo 25.02.01", None), ("NeMo (MLPerf Training v4.0)", "cudnn-9.0"),
        ("NeMo (MLPerf Training v5.0)", None), ("megatron-lm", None),
    ],
)  # fmt: skip
def test_a_release_says_its_attention_kernel_unless_the_run_does(
    framework: str, kernel: str | None
) -> None:
    assert read(row(framework=framework)).workload.attention_kernel == kernel
    said = row(framework=framework, attention_kernel="flash-2")
    assert read(said).workload.attention_kernel == "flash-2"


@pytest.mark.parametrize(
    ("framework", "layout", "said", "checked"),
    [
        ("nanotron", {"tp": 4, "pp": 2, "dp": 2}, {}, True),
        ("nanotron", {"tp": 4, "pp": 1, "dp": 4}, {}, False),
        ("nanotron", {"tp": 4, "pp": 2, "dp": 1}, {}, False),
        ("nanotron", {"tp": 4, "pp": 2, "dp": 2}, {"checked_collectives": False}, False),
        ("megatron", {"tp": 4, "pp": 2, "dp": 2}, {}, False),
        ("megatron", {"tp": 4, "pp": 1, "dp": 4}, {"checked_collectives": True}, True),
    ],
)
def test_collectives_are_checked_as_a_run_or_its_launcher_says(
    framework: str, layout: dict[str, int], said: dict[str, bool], checked: bool
) -> None:
    """nanotron's launcher sets TORCH_DISTRIBUTED_DEBUG=DETAIL for its pipelines over several nodes."""
    mapping = row(framework=framework, **layout, **said)
    mapping["cluster"]["gpus"] = layout["tp"] * layout["pp"] * layout["dp"]
    assert read(mapping).workload.checked_collectives is checked


@pytest.mark.parametrize(
    ("name", "recipe", "narrow"),
    [
        ("QWEN3_30B_A3B_PRETRAIN_CONFIG_GB300_FP8_MX_V1", {}, True),
        ("DEEPSEEK_V3_PRETRAIN_CONFIG_GB300_FP8_MX_V2", {}, True),
        ("DEEPSEEK_V3_PRETRAIN_CONFIG_GB200_FP8_MX_V2", {}, False),
        ("QWEN3_30B_A3B_PRETRAIN_CONFIG_GB300_FP8_MX_V1", {"tag": "v0.4.2"}, False),
        ("QWEN3_30B_A3B_PRETRAIN_CONFIG_GB300_FP8_MX_V1", {"cuda_graph_impl": "none"}, False),
        ("QWEN3_30B_A3B_PRETRAIN_CONFIG_GB300_FP8_MX_V1", {"fp8_attention": False}, False),
        ("another", {"fp8_attention": True}, True),
    ],
)
def test_a_recipe_says_whether_it_attends_in_fp8(
    name: str, recipe: dict[str, Any], *, narrow: bool
) -> None:
    """Megatron-Bridge, scripts/performance/configs: fp8_dot_product_attention of v0.5.0."""
    said = {"tag": "v0.5.0", "name": name, "cuda_graph_impl": "full_iteration"} | recipe
    assert attends_in_fp8(said) is narrow


def test_fused_attention_needs_a_device_of_its_time() -> None:
    run = {"gpus": 8, "seq_len": 2048, "global_batch": 8, "precision": "fp16"}
    for kernel in ("flash-2", "cudnn-9.0"):
        mapping = {"model": "llama-2-7b", "cluster": "dgx-v100"}
        with pytest.raises(InputError, match=r"run.attention_kernel: .*volta.*memory-efficient"):
            run_from_mapping(mapping | {"run": run | {"attention_kernel": kernel}}, where="run")


@pytest.mark.parametrize(
    ("framework", "first"),
    [
        ("NeMo 25.02.01 (recipe v25.04)", True), ("NeMo 25.05-era", True), ("NeMo 25.07", False),
        ("NeMo (MLPerf Training v5.0)", True), ("NeMo (MLPerf Training v5.1)", False),
        ("Megatron-Bridge / NeMo 26.06 container", False), ("megatron-lm", False),
    ],
)  # fmt: skip
def test_a_release_says_its_fp8_kernels_unless_the_run_does(framework: str, first: bool) -> None:
    assert read(row(framework=framework)).workload.first_fp8_kernels is first
    said = read(row(framework=framework, first_fp8_kernels=not first))
    assert said.workload.first_fp8_kernels is not first


@pytest.mark.parametrize(
    ("words", "zero_stage", "stack"),
    [
        ("AMD Primus (Megatron-LM, ROCm)", 3, "megatron"), ("AMD Primus (Megatron-LM, ROCm)", 1, "megatron"),
        ("a trainer of ours", 3, "fsdp2"), ("a trainer of ours", 1, "pytorch"),
    ],
)  # fmt: skip
def test_descendants_of_megatron_run_its_kernels_whoever_shards(
    words: str, zero_stage: int, stack: str
) -> None:
    assert nearest_stack(words, zero_stage).name == stack


def test_what_shards_and_reduces() -> None:
    group = {"zero1_group": "2 ranks (of a node), replicated across"}
    wide = {"dp": 8, "tp": 1}
    assert read(row(recipe=group, **wide)).layout.shard_groups == 4
    everyone = {"zero1_group": "all data-parallel ranks"}
    assert read(row(recipe=everyone, **wide)).layout.shard_groups == 1
    assert read(row(shard_group=2, **wide)).layout.shard_groups == 4
    assert "does not divide" in message(row(shard_group=3))
    synced = {"gradient_sync": "DDP, fp32 all-reduce overlapped with the last backward"}
    assert read(row(recipe=synced)).workload.gradient_bytes == 4
    assert read(row(gradient_dtype="bf16")).workload.gradient_bytes == 2
    assert read(row()).workload.gradient_bytes is None
    assert read(row(flushes=4)).workload.flushes == 4


def test_a_bad_row_does_not_hide_the_others(tmp_path: Path) -> None:
    bad = row(tp=0) | {"id": "bad", "measured": {"step_time_s": 3.0}}
    path = tmp_path / "runs.yaml"
    path.write_text(
        yaml.safe_dump({"schema": 1, "runs": [ROW, bad, 7, row()]}, sort_keys=False),
        encoding="utf-8",
    )
    first, second, third, fourth = read_rows(path)
    assert isinstance(first, Run)
    assert isinstance(fourth, Run)
    assert isinstance(second, UnreadRow)
    assert second.measured is not None
    assert second.measured.step_time_s == 3.0
    assert isinstance(third, UnreadRow)
    assert third.id == "runs[2]"
    with pytest.raises(InputError, match=r"runs\.yaml: bad: run\.tp"):
        read_runs(path)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty"),
        ("- 1\n", "list under `runs`"),
        ("runs: []\n", "list of 1 to"),
        ("runs: 3\n", "list of 1 to"),
        ("schema: 2\nruns: [{}]\n", "schema: must be 1"),
        ("rows: 3\nruns: [{}]\n", "rows: unknown field"),
        ("runs: [{\n", "not valid YAML"),
        ("a: &a [1]\nb: *a\n", "aliases"),
        ("a: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
        ("[" * 5000 + "]" * 5000, "nested"),
    ],
)
def test_files_that_are_no_run_files(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "runs.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_runs(path)
    assert str(path) in str(caught.value)
    assert part in str(caught.value)


def test_missing_and_oversized_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_runs(tmp_path / "absent.yaml")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(InputError, match="larger than"):
        read_runs(large)


def reads_or_says_where(mapping: dict[str, Any]) -> None:
    """Any other exception fails the test."""
    said = ""
    try:
        read(mapping)
    except InputError as error:
        said = str(error)
    assert not said or said.startswith("file.yaml: small: ")


def test_the_format_is_a_json_schema() -> None:
    schema = RunDoc.model_json_schema()
    assert {"model", "cluster", "run"} == set(schema["required"])
    assert schema["additionalProperties"] is False
    settings = schema["$defs"][SettingsDoc.__name__]["properties"]
    assert settings["tp"] == {
        "default": 1,
        "maximum": 1_048_576,
        "minimum": 1,
        "title": "Tp",
        "type": "integer",
    }
    assert settings["precision"]["enum"] == ["bf16", "fp16", "fp8", "mxfp8", "nvfp4"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(
    section=st.sampled_from(["id", "model", "cluster", "run", "measured", "suspect", "tags"]),
    value=JSON,
)
def test_hostile_values_raise_run_file_errors_only(section: str, value: object) -> None:
    reads_or_says_where({**copy.deepcopy(ROW), section: value})


@given(
    key=st.sampled_from(
        sorted({*ROW["run"], "vpp", "cp", "ep", "etp", "recipe", "overlap", "stages"})
    ),
    value=JSON,
)
def test_hostile_settings_raise_run_file_errors_only(key: str, value: object) -> None:
    reads_or_says_where(row(**{key: value}))


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_attention_in_fp8_is_a_setting(precision: str) -> None:
    """Only a recipe's flags could say so: a run file with the field was refused."""
    plain = {"gpus": 8, "seq_len": 4096, "global_batch": 8, "precision": precision}
    steps = []
    for extra in ({}, {"fp8_attention": False}, {"fp8_attention": True}):
        mapping = {"model": "llama-3-8b", "cluster": "dgx-b200", "run": plain | extra}
        steps.append(
            price_run(run_from_mapping(mapping, where="run"), Path("run")).predicted.step_time_s
        )
    recipe = {
        "model": "llama-3-8b",
        "cluster": "dgx-b200",
        "run": plain | {"recipe": {"fp8_attention": True}},
    }
    assert steps[0] == steps[1]
    assert (steps[1] > steps[2]) is (precision == "fp8"), "heads of 128 gain nothing in MXFP8"
    priced = price_run(run_from_mapping(recipe, where="run"), Path("run"))
    assert priced.predicted.step_time_s == steps[2]


@pytest.mark.parametrize(
    ("cluster", "precision", "words"),
    [("dgx-h100", "bf16", "below 16 bits"), ("l40s-pcie", "fp8", "has no kernel")],
)
def test_attention_in_fp8_needs_a_kernel(cluster: str, precision: str, words: str) -> None:
    run = {
        "gpus": 8,
        "seq_len": 4096,
        "global_batch": 8,
        "precision": precision,
        "fp8_attention": True,
    }
    with pytest.raises(InputError, match=f"run.fp8_attention: .*{words}"):
        run_from_mapping({"model": "llama-3-8b", "cluster": cluster, "run": run}, where="run")


def test_flash_attention_3_needs_a_device_of_its_time() -> None:
    run = {"gpus": 8, "seq_len": 4096, "global_batch": 8, "attention_kernel": "flash-3"}
    for cluster in ("dgx-h100", "dgx-b200"):
        run_from_mapping({"model": "llama-3-8b", "cluster": cluster, "run": run}, where="run")
    for cluster, architecture in (("dgx-a100", "ampere"), ("l40s-pcie", "ada")):
        words = f"run.attention_kernel: .*whose architecture is {architecture}.*flash-2"
        with pytest.raises(InputError, match=words):
            run_from_mapping({"model": "llama-3-8b", "cluster": cluster, "run": run}, where="run")


SILENT: dict[str, list[object]] = {
    "measured": [
        {"step_time_s": 20},
        {"tokens_per_s_per_gpu": 5000},
        {"memory_gib": 61},
        {"memory_gib": 61, "memory_note": "rank 0, nvidia-smi"},
        {"out_of_memory": True},
    ],
    "source": ["a thread", "arXiv 2205.05198"],
    "id": ["a", "deepep-hybridep"],
    "note": ["ran with DeepEP"],
    "tflops_convention": ["causal attention in half"],
    "suspect": ["slower than its neighbour"],
    "tags": [["moe", "deepep"]],
}
"""Fields of a run file that decide nothing, with things that they may say."""

MIXTURE = {
    "layers": 32, "hidden": 2048, "ffn_hidden": 6144, "heads": 32, "kv_heads": 4, "head_dim": 128,
    "vocab": 151936, "activation": "swiglu", "tied_embeddings": False,
    "moe": {"experts": 64, "top_k": 8, "moe_ffn_hidden": 768},
}  # fmt: skip
RACKS = {
    "device": "gb200", "gpus": 512, "gpus_per_node": 4, "nvlink_domain": 72, "nic_gbps_per_gpu": 400,
}  # fmt: skip
TWIN = {
    "layers": 36, "hidden": 4096, "ffn_hidden": 12288, "heads": 32, "kv_heads": 8, "head_dim": 128,
    "vocab": 151936, "activation": "swiglu", "tied_embeddings": False,
}  # fmt: skip
"""The widths of qwen3-8b, without its norms on queries and keys."""


def priced(document: dict[str, Any]) -> tuple[object, ...]:
    """Everything that the cost model says of a run file."""
    prediction = predict_run(run_from_mapping(document, where="run"))
    estimate = prediction.estimate
    return estimate.step_time_s, estimate.breakdown_s, prediction.memory_parts_gib


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_only_the_run_decides_the_price(data: st.DataObject) -> None:
    """With and without what was measured, whoever wrote it down: the same seconds and bytes, to the digit."""
    model = data.draw(st.sampled_from(["qwen3-30b-a3b", "llama-3-8b", MIXTURE, TWIN]))
    cluster = data.draw(st.sampled_from(["dgx-h100", "gb200-nvl72", "a100-pcie", RACKS]))
    experts = model in ("qwen3-30b-a3b", MIXTURE)
    gpus = 512 if cluster is RACKS else data.draw(st.sampled_from([16, 32, 64]))
    run: dict[str, Any] = {"gpus": gpus, "seq_len": 4096, "global_batch": 1024}
    run |= {
        "pp": data.draw(st.sampled_from([1, 2])),
        "tp": data.draw(st.sampled_from([1, 2])),
        "ep": data.draw(st.sampled_from([1, 4, 8])) if experts else 1,
        "zero_stage": data.draw(st.sampled_from([0, 1, 3])),
        "framework": data.draw(st.sampled_from(["megatron", "torchtitan", "deepspeed", "fsdp2"])),
        "recompute": data.draw(st.sampled_from(["none", "full"])),
    }
    if data.draw(st.booleans()):
        run["recipe"] = data.draw(
            st.sampled_from([{"moe_dispatcher": "hybridep"}, {"moe_dispatcher": "alltoall"}, {}])
        )
    plain = {"model": model, "cluster": cluster, "run": run}
    names = data.draw(st.sets(st.sampled_from(sorted(SILENT)), min_size=1))
    said = {name: data.draw(st.sampled_from(SILENT[name])) for name in names}
    assert priced(plain | said) == priced(plain)


def test_a_run_that_names_no_dispatcher_has_nccls() -> None:
    run = {"gpus": 16, "seq_len": 4096, "global_batch": 512, "pp": 2, "ep": 8, "zero_stage": 1}
    document: dict[str, Any] = {"model": "qwen3-30b-a3b", "cluster": "dgx-h100", "run": run}
    for said, expected in (
        ({}, "alltoall"),
        ({"recipe": {"moe_dispatcher": "hybridep"}}, "deduplicated"),
        ({"recipe": {"moe_dispatcher": "allgather"}}, "allgather"),
        ({"moe_dispatch": "deepep"}, "deepep"),
    ):
        read = run_from_mapping(document | {"run": run | said}, where="run")
        assert read.workload.moe_dispatch == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sh", "torchrun train.py --tp 2\n", "this is text, not a run file; `estimate FILE --from-launch"),
        ("a.log", "iteration 1/ 9 | elapsed: 2900.1 | a: 1\n", "--measured LOG` reads the log of a run"),
        ("a.yaml", "- {id: a, model: llama-3-8b}\n", "several runs as a list under `runs`"),
        ("a.json", '{"model": "m", "cluster": "c", "gpus": 8, "tp": 2}', "gpus, tp: must stand under `run`"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_told_what_reads_it(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as error:
        read_runs(path)
    assert message in str(error.value)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_stages_that_nobody_states_begin_where_they_may(pp: int) -> None:
    """Layers of GLM-5.2 reuse what an indexer chose; 78 layers over 4 or 8 ranks were split amidst them."""
    settings = {"seq_len": 4096, "global_batch": 512, "pp": pp, "gpus": 512, "ep": 8}
    run = run_from_mapping({"model": "glm-5.2", "cluster": "dgx-h200", "run": settings}, where="t")
    stages, _ = arrangement(run)
    ends = [sum(map(sum, stages[:rank])) for rank in range(1, pp)]
    assert set(ends) <= set(run.workload.model.stage_begins)
    assert sum(map(sum, stages)) == 78
