"""torchtitan's TOML files are read as the flags that say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.reader import price_launch, read_launch
from meshwright.planner.runs.launches.torchtitan import registry_settings

# After torchtitan v0.2.0, torchtitan/models/llama3/train_configs/llama3_70b.toml.
TOML = """
# torchtitan Config.toml
[job]  # of ours
dump_folder = "./outputs"

[model]
name = "llama3"
flavor = "70B"
converters = []

[training]
local_batch_size = 8
seq_len = 8192
max_norm = 1.0
steps = 1000

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 8
tensor_parallel_degree = 8
enable_async_tensor_parallel = false
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
context_parallel_degree = 1

[compile]
enable = true
components = ["model", "loss"]

[activation_checkpoint]
mode = "full"
"""


def read(folder: Path, text: str) -> LaunchRun:
    path = folder / "train.toml"
    path.write_text(text, encoding="utf-8")
    return read_launch(path)


def test_sections_are_read_as_flags(tmp_path: Path) -> None:
    run = read(tmp_path, TOML)
    assert run.model == "llama-3-70b"
    expected = {
        "tp": 8,
        "pp": 2,
        "vpp": 2,
        "dp": 8,
        "cp": 1,
        "seq_len": 8192,
        "micro_batch": 1,
        "global_batch": 64,
        "recompute": "full",
        "framework": "torchtitan",
        "schedule": "interleaved-1f1b",
    }
    assert expected.items() <= run.settings.items()
    assert run.unread == ()
    assert run.remarks == ()


def test_older_names_converters_and_operators(tmp_path: Path) -> None:
    selective = '"selective"\nselective_ac_option = "op"'
    text = TOML.replace("local_batch_size", "batch_size").replace('"full"', selective)
    run = read(tmp_path, text.replace("[]", '["quantize.linear.float8"]'))
    assert run.settings["global_batch"] == 64
    assert run.settings["precision"] == "fp8"
    assert run.settings["recompute_modules"] == ["op"]


@pytest.mark.parametrize(
    ("section", "recipe"),
    [
        ("[quantize.linear.float8]\nrecipe_name = 'rowwise'\n", "rowwise"),
        ("[float8]\nrecipe_name = 'rowwise_with_gw_hp'\n", "rowwise_with_gw_hp"),
        ("[float8]\nfilter_fqns = ['output']\n", None),
    ],
)
def test_scales_of_float8_are_by_tensor_or_by_row(
    section: str, recipe: str | None, tmp_path: Path
) -> None:
    run = read(tmp_path, TOML.replace("[]", '["float8"]') + section)
    assert run.settings["precision"] == "fp8"
    assert run.settings.get("fp8_recipe") == recipe
    assert run.unread == ()


def test_a_toml_file_has_a_price(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    selective = '"selective"\nselective_ac_option = "op"'
    path.write_text(TOML.replace('"full"', selective), encoding="utf-8")
    (priced,) = price_launch(path, ["cluster=dgx-h100"])
    assert priced.predicted.step_time_s > 0
    assert priced.broken == ()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"full"', '"some"', "activation_checkpoint.mode: is no kind"),
        ("[training]", "[[training]]", "training: must be a section"),
        ("[model]", "[models]", "sections model and parallelism"),
        ("= 8192", "= [", "cannot be read"),
        ("tensor_parallel_degree = 8", "tensor_parallel_degree = 1.5", "tensor-parallel-degree"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, before: str, after: str, words: str) -> None:
    assert before in TOML
    with pytest.raises(InputError, match=words):
        read(tmp_path, TOML.replace(before, after, 1))


@pytest.mark.parametrize(("value", "percent"), [("true", 100), ("false", None)])
def test_what_is_offloaded_is_read(tmp_path: Path, value: str, percent: int | None) -> None:
    """It was taken for a switch that leaves the step as it is."""
    steps = "steps = 1000\n"
    run = read(tmp_path, TOML.replace(steps, f"{steps}enable_cpu_offload = {value}\n"))
    assert run.settings.get("optimizer_offload") == percent
    assert [flag for flag in run.unread if "cpu-offload" in flag] == []


# pytorch/torchtitan, issue 1789: DeepSeek-V3 16B on 8 H100, out of memory at its default local batch of 8.
ISSUE_1789 = """
[model]
name = "deepseek_v3"
flavor = "16B"
[training]
local_batch_size = 4
seq_len = 4096
[parallelism]
data_parallel_shard_degree = -1
expert_parallel_degree = 8
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
"""


def test_a_model_of_its_own_registry_needs_no_name(tmp_path: Path) -> None:
    """It was refused for latent attention, and asked for the global batch that follows from the local one."""
    path = tmp_path / "16b.toml"
    path.write_text(ISSUE_1789, encoding="utf-8")
    (priced,) = price_launch(path, ["cluster=dgx-h100", "gpus=8"])
    model = priced.run.workload.model
    assert (model.layers, model.hidden, model.moe and model.moe.experts) == (27, 2048, 64)
    assert priced.run.workload.global_batch == 32
    assert [rule.rule for rule in priced.broken if rule.rule.startswith("torchtitan")] == []
    with pytest.raises(InputError, match=r"--with gpus="):
        list(price_launch(path, ["cluster=dgx-h100"]))


@pytest.mark.parametrize("given", ["gpus=16", "dp=16"])
def test_the_global_batch_follows_from_the_gpus(given: str, tmp_path: Path) -> None:
    path = tmp_path / "16b.toml"
    for line, batch in (
        ("", 64),
        ("global_batch_size = -1\n", 64),
        ("global_batch_size = 128\n", 128),
    ):
        path.write_text(ISSUE_1789.replace("seq_len", f"{line}seq_len"), encoding="utf-8")
        (priced,) = price_launch(path, ["cluster=dgx-h100", given])
        assert priced.run.workload.global_batch == batch


SCRIPTS = {
    "variable": "CONFIG_FILE={toml} NGPU=8 ./run_train.sh {flags}\n",
    "export": 'export CONFIG_FILE="{toml}"\nexport NGPU=8\n./run_train.sh {flags}\n',
    "default": 'NGPU=${{NGPU:-"8"}}\nCONFIG_FILE=${{CONFIG_FILE:-"{toml}"}}\n'
    "torchrun --nproc_per_node=${{NGPU}} --rdzv_backend c10d -m torchtitan.train "
    "--job.config_file ${{CONFIG_FILE}} {flags}\n",
    "flag": "torchrun --nproc-per-node 8 -m torchtitan.train --job.config_file={toml} {flags}\n",
}


@pytest.mark.parametrize("way", list(SCRIPTS))
def test_the_file_that_a_script_names_is_read(way: str, tmp_path: Path) -> None:
    """`CONFIG_FILE=` was not read: the script's own flags alone were priced."""
    configs = tmp_path / "train_configs"
    configs.mkdir()
    (configs / "16b.toml").write_text(ISSUE_1789, encoding="utf-8")
    folder = tmp_path / "scripts"
    folder.mkdir()
    script = folder / "run.sh"
    for flags, batch in (("", 32), ("--training.local_batch_size 2", 16)):
        text = SCRIPTS[way].format(toml="./train_configs/16b.toml", flags=flags)
        script.write_text(text, encoding="utf-8")
        (priced,) = price_launch(script, ["cluster=dgx-h100"])
        assert priced.run.workload.global_batch == batch
        assert (priced.run.layout.dp, priced.run.layout.ep) == (8, 8)
        assert priced.run.remarks == (
            "recompute_modules op: every second matrix product is taken as run again",
        )


def test_a_named_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPTS["flag"].format(toml="x/16b.toml", flags=""), encoding="utf-8")
    with pytest.raises(InputError, match="put the TOML file beside the script"):
        read_launch(script)
    (tmp_path / "16b.toml").write_text(ISSUE_1789, encoding="utf-8")
    assert read_launch(script).settings["ep"] == 8


@pytest.mark.parametrize(
    ("section", "unread"),
    [
        ("[metrics]\nlog_freq = 10\n", ()),
        ("[optimizer]\nlr = 1e-4\nname = 'AdamW'\n", ()),
        ("[optimizer]\nname = 'Adam'\nearly_step_in_backward = true\n", 2),
        ("[fault_tolerance]\nenable = true\n", 1),
        ("[quantize.grouped_mm.float8]\nfqns = ['experts']\n", 1),
        ("[some_new_section]\nx = 1\n", 1),
    ],
)
def test_other_sections_are_looked_through(
    section: str, unread: int | tuple[str, ...], tmp_path: Path
) -> None:
    """Sections beside training, parallelism and compile were passed over without a word."""
    found = read(tmp_path, ISSUE_1789 + section).unread
    assert len(found) == (unread if isinstance(unread, int) else len(unread)), found


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ('mode = "selective"\nselective_ac_option = "2"', ("selective", ["layer"])),
        ('mode = "selective"', ("selective", ["layer"])),
        ('mode = "full"', ("full", None)),
        ('mode = "none"', ("none", None)),
    ],
)
def test_kinds_of_checkpointing(
    lines: str, expected: tuple[str, list[str] | None], tmp_path: Path
) -> None:
    both = 'mode = "selective"\nselective_ac_option = "op"'
    settings = read(tmp_path, ISSUE_1789.replace(both, lines)).settings
    assert (settings["recompute"], settings.get("recompute_modules")) == expected


def test_a_loss_that_alone_is_compiled_is_an_eager_model(tmp_path: Path) -> None:
    for parts, framework in (('["loss"]', "torchtitan-eager"), ('["model", "loss"]', "torchtitan")):
        text = ISSUE_1789.replace("enable = true", f"enable = true\ncomponents = {parts}")
        assert read(tmp_path, text).settings["framework"] == framework


def test_a_configuration_of_its_own_sets_what_no_flag_says(tmp_path: Path) -> None:
    """torchtitan 0.3.0, models/deepseek_v3/config_registry.py: 4 sequences of 4,096 tokens, ep 8."""
    script = tmp_path / "run.sh"
    start = "torchrun --nproc-per-node 8 -m torchtitan.train --module deepseek_v3"
    script.write_text(
        f"{start} --config deepseek_v3_16b --training.seq-len 2048\n", encoding="utf-8"
    )
    found = read_launch(script)
    expected = {"seq_len": 2048, "micro_batch": 4, "ep": 8, "recompute_modules": ["op"], "gpus": 8}
    assert expected.items() <= found.settings.items()
    assert isinstance(found.model, dict)
    assert found.model["layers"] == 27


@pytest.mark.parametrize("stages", ["made()", "-" * 5000 + "1", "-" * 100_000 + "1", "[1]", "["])
def test_a_module_whose_stages_are_no_lists_of_names_has_none(tmp_path: Path, stages: str) -> None:
    (tmp_path / "registry.py").write_text(f"STAGES = {stages}\n", encoding="utf-8")
    assert registry_settings(tmp_path, "registry", {"pp": 2}) == {}
    (tmp_path / "registry.py").write_text("STAGES = [['layers.0'], ['layers.1']]\n")
    assert registry_settings(tmp_path, "registry", {"pp": 2})["stages"] == [[1], [1]]
