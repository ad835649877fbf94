"""What a user may give for MODEL, and the words that a wrong one gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import yaml

from meshwright.documents import (
    MOST_LINES,
    PackagedEntries,
    packaged_document,
    parse_mapping,
    read_text,
)
from meshwright.errors import InputError
from meshwright.model_specs.parameters import parameter_count
from meshwright.model_specs.reader import (
    catalog_names,
    load_catalog_model,
    model_from_mapping,
    read_model,
)
from meshwright.model_specs.schema import ModelSpec
from tests.places import DATA, ROOT

TINY = {"layers": 2, "hidden": 8, "ffn_hidden": 16, "heads": 2, "kv_heads": 2, "vocab": 32}
TINY_YAML = "layers: 2\nhidden: 8\nffn_hidden: 16\nheads: 2\nkv_heads: 2\nvocab: 32\n"


def written(folder: Path, text: str, name: str = "model.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_catalog_name() -> None:
    assert read_model("llama-3-8b") is load_catalog_model("llama-3-8b")


def test_model_yaml_is_named_by_its_file_unless_it_says(tmp_path: Path) -> None:
    model = read_model(written(tmp_path, TINY_YAML, "toy.yaml"))
    assert (model.name, model.layers, model.hidden) == ("toy", 2, 8)
    assert read_model(written(tmp_path, TINY_YAML + "name: other\n")).name == "other"


def test_written_spec_reads_back(tmp_path: Path) -> None:
    for name in ("deepseek-v3", "gpt-oss-20b", "bloom-176b"):
        model = load_catalog_model(name)
        again = read_model(
            written(tmp_path, yaml.safe_dump(model.model_dump(mode="json", exclude_none=True)))
        )
        assert again == model


def test_json_of_our_own_fields_and_flow_yaml(tmp_path: Path) -> None:
    assert (
        read_model(
            written(tmp_path, ModelSpec.model_validate(TINY).model_dump_json(), "m.json")
        ).layers
        == 2
    )
    flow = "{layers: 2, hidden: 8, ffn_hidden: 16, heads: 2, kv_heads: 2, vocab: 32}"
    assert read_model(written(tmp_path, flow)).vocab == 32


def test_config_json_is_told_by_content_and_found_in_its_directory(tmp_path: Path) -> None:
    text = (DATA / "hf_configs" / "gpt2.json").read_text()
    (tmp_path / "my-gpt2").mkdir()
    written(tmp_path / "my-gpt2", text, "config.json")
    model = read_model(str(tmp_path / "my-gpt2"))
    assert (model.name, parameter_count(model)) == ("my-gpt2", 124_439_808)
    assert parameter_count(read_model(written(tmp_path, text, "odd.txt"))) == 124_439_808


def test_what_describes_no_model_is_said_so_at_once(tmp_path: Path) -> None:
    """Every field of our own schema was named as missing, and every one that was there as unknown."""
    adapters = '{"peft_type": "LORA", "r": 16, "base_model_name_or_path": "acme/base"}'
    with pytest.raises(InputError, match=r"adapters: give the config.json of 'acme/base'"):
        read_model(written(tmp_path, adapters, "adapter_config.json"))
    axolotl = "base_model: acme/base\nadapter: lora\nsequence_len: 4096\n"
    with pytest.raises(
        InputError, match=r"give its model, 'acme/base', and the file as --baseline"
    ):
        read_model(written(tmp_path, axolotl, "axolotl.yaml"))
    meta = '{"dim": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 128256}'
    with pytest.raises(InputError) as error:
        read_model(written(tmp_path, meta, "params.json"))
    assert "neither `model_type`" in str(error.value)
    assert "unknown field" not in str(error.value)


def test_a_folder_without_config_json_is_called_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    for typed in ("checkpoint", "./checkpoint", str(tmp_path / "checkpoint")):
        with pytest.raises(InputError, match=r"this folder has no config\.json"):
            read_model(typed)


def test_hub_id_is_told_apart_from_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError, match=r"no file .*`hf download acme-lab/Glow-4.6 config.json"
    ) as error:
        read_model("acme-lab/Glow-4.6")
    assert "give Glow-4.6/config.json" in str(error.value)
    (tmp_path / "models").mkdir()
    for path in ("models/llama", "./acme-lab/Glow-4.6", "a/b/c", "acme-lab/glow.yaml"):
        with pytest.raises(InputError) as error:
            read_model(path)
        assert "hf download" not in str(error.value)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("Qwen3-8B", "qwen3-8b"),
        ("LLAMA-3.1-8B", "llama-3.1-8b"),
        ("Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("llama-3.3-70b", "llama-3.1-70b"),
        ("DeepSeek-R1", "deepseek-v3"),
        ("gemma-3-27b-it", "gemma-3-27b"),
    ],
)
def test_names_as_people_type_them(
    typed: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large letters, and the hub's names without the owner; a file of that name wins."""
    monkeypatch.chdir(tmp_path)
    assert read_model(typed).name == name
    (tmp_path / typed).write_text(yaml.safe_dump(TINY), encoding="utf-8")
    assert read_model(typed).layers == TINY["layers"]


def test_inline_mapping() -> None:
    assert model_from_mapping(dict(TINY), "run.yaml: model").heads == 2
    assert model_from_mapping({"model_type": "gpt2"} | _gpt2(), "run.yaml: model").layers == 12
    with pytest.raises(InputError, match=r"^run\.yaml: model: layers: must be at least 1, got 0$"):
        model_from_mapping(TINY | {"layers": 0}, "run.yaml: model")


def _gpt2() -> dict[str, object]:
    return parse_mapping((DATA / "hf_configs" / "gpt2.json").read_text(), "gpt2.json")


@pytest.mark.slow
def test_model_blocks_of_the_published_runs_are_valid() -> None:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = (DATA / "published_runs.yaml").read_text(encoding="utf-8")
    blocks = [run["model"] for run in yaml.load(text, Loader=loader)["runs"]]  # noqa: S506
    assert len(blocks) > 100
    for block in {repr(block): block for block in blocks}.values():
        assert parameter_count(model_from_mapping(block, "runs")) > 1e6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("llama3-8b", "got 'llama3-8b' .did you mean 'llama-3-8b'"),
        ("gpt2", "did you mean 'gpt2-xl'"),
        ("phi-3", "did you mean 'phi-3-mini-4k'"),
        ("Deepseek_V3", "did you mean 'deepseek-v3'"),
        ("zzz", "neither a model of the catalog nor a file, got 'zzz'; allowed: a model YAML"),
        ("", "neither a model of the catalog nor a file"),
        ("missing/model.yaml", "missing/model.yaml: no such file"),
        ("a\0b", "neither a model of the catalog nor a file"),
        ("a\0b.yaml", r"^'a\\x00b\.yaml': no such file$"),
        ("x" * 5000, "neither a model"),
        ("x" * 5000 + ".yaml", "cannot be read|no such file"),
    ],
    ids=count(),
)
def test_unknown_models(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_model(text)


def test_catalog_error_lists_names() -> None:
    with pytest.raises(InputError, match=r"did you mean 'grok-1'.*allowed: gpt2-xl") as error:
        load_catalog_model("grok1")
    assert error.value.did_you_mean == "grok-1"
    assert error.value.allowed == catalog_names()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the document is empty"),
        ("- 1\n", "must be a mapping of fields, got a list of 1 items"),
        ("layers: [1\n", "not valid YAML: .* at line 2"),
        ("1: 2\n", "field names must be texts, got 1"),
        (TINY_YAML + "layers: 3\n", "line 7: field 'layers' is given twice"),
        ("moe: {experts: 1, experts: 2}", "line 1: field 'experts' is given twice"),
        ("a: &x [1]\nb: *x\n", r"line 2: YAML aliases"),
        ("a: " + "[" * 5000, "nested more than 32 levels"),
        ('{"a": ' + "[" * 200_000, "not valid JSON|nested more than"),
        ('{"model_type": "gpt2", "model_type": "opt"}', "field 'model_type' is given twice"),
        ('{"layers": 2,, }', "not valid JSON: .* at line 1, column 14"),
        ('{"layers": ' + "9" * 5000 + "}", "too many digits"),
        ("layers: " + "9" * 5000, "number or date cannot be read|too many digits"),
        ("when: 2024-13-45\n", "number or date cannot be read"),
        (
            "a: !!python/object/apply:os.system [ls]\n",
            "not valid YAML: could not determine a constructor",
        ),
        ("a: \x07\n", "not valid YAML"),
    ],
    ids=count(),
)
def test_broken_documents(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_model(written(tmp_path, text))


def test_bytes_that_are_not_text_or_too_many(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(InputError, match=r"not UTF-8 text \(byte 6\)"):
        read_model(str(path))
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(InputError, match="larger than 1048576 bytes"):
        read_model(str(path))
    with pytest.raises(InputError, match="larger than 3 bytes"):
        read_text(path, 3)


def test_directories_and_pipes_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this folder has no config"):
        read_model(f"{tmp_path}/")
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="this is a pipe or a device"):
        read_model(str(pipe))


def test_every_mistake_gets_a_line_with_its_remedy(tmp_path: Path) -> None:
    text = TINY_YAML.replace("layers: 2", "layer: 2").replace("heads: 2\nkv", "heads: many\nkv")
    text += "activation: swigl\nmoe: {experts: 4, topk: 2, moe_ffn_hidden: 1.5}\n"
    path = written(tmp_path, text)
    with pytest.raises(InputError) as error:
        read_model(path)
    lines = str(error.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    ends = "\n".join(line.removeprefix(f"{path}: ") for line in lines)
    assert "layers: this field is required and missing" in ends
    assert "layer: unknown field (did you mean 'layers'?); allowed: activation, attention" in ends
    assert "heads: must be an integer, got 'many'" in ends
    assert "activation: not a value of this field, got 'swigl' (did you mean 'swiglu'?)" in ends
    assert "moe.topk: unknown field (did you mean 'top_k'?); allowed: dense_layers" in ends
    assert "moe.moe_ffn_hidden: must be an integer, got 1.5" in ends
    assert "moe.top_k: this field is required and missing" in ends


def test_rules_between_fields_are_told() -> None:
    with pytest.raises(InputError, match=r"^here: heads 2 must be a multiple of kv_heads 3$"):
        model_from_mapping(TINY | {"kv_heads": 3}, "here")
    moe = {"experts": 2, "top_k": 3, "moe_ffn_hidden": 4}
    with pytest.raises(InputError, match=r"^here: moe: top_k 3 is more than the 2 experts$"):
        model_from_mapping(TINY | {"moe": moe}, "here")


def test_many_mistakes_are_cut_short() -> None:
    with pytest.raises(InputError) as error:
        model_from_mapping(TINY | {f"x{number}": 1 for number in range(100)}, "here")
    lines = str(error.value).splitlines()
    assert len(lines) == MOST_LINES + 1
    assert lines[-1] == f"here: and {100 - MOST_LINES} more mistakes"


def test_importing_reads_no_catalog() -> None:
    code = (
        "import sys\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else None)\n"
        "import meshwright.model_specs.reader\n"
        "print(sum(name.endswith('.yaml') for name in opened))\n"
        "meshwright.model_specs.reader.read_model('gpt2-xl')\n"
        "print(sum(name.endswith('.yaml') for name in opened))\n"
    )
    root = ROOT
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "1"]


def test_a_toml_file_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text('# of torchtitan\n[model]\nname = "llama3"\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"a TOML file, where YAML or JSON is read \(launch files"):
        read_model(str(path))


@pytest.mark.parametrize(
    ("hub_id", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("deepseek-ai/deepseek-r1", "deepseek-v3"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("zai-org/GLM-4.5", "glm-4.5"),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", "smollm2-360m"),
        ("allenai/OLMo-2-0325-32B", "olmo-2-32b"),
        ("MiniMaxAI/MiniMax-M2", "minimax-m2.5"),
        ("microsoft/Phi-4-mini-instruct", "phi-4-mini"),
    ],
)
def test_a_hub_id_of_a_catalog_model_is_that_model(hub_id: str, name: str) -> None:
    assert read_model(hub_id) is load_catalog_model(name)


@pytest.mark.parametrize(
    "file",
    [
        "model_specs/data/catalog.yaml",
        *(f"cluster_specs/data/{name}.yaml" for name in ("devices", "nodes", "clusters")),
    ],
)
def test_entries_that_are_read_one_by_one_are_those_of_the_whole_file(file: str) -> None:
    room, _, path = file.partition("/")
    package = f"meshwright.{room}"
    entries, document = PackagedEntries(package, path), packaged_document(package, path)
    assert list(entries) == list(document)
    assert dict(entries) == document
    assert next(iter(document)) in entries
    assert "sources" not in entries
    assert len(entries) == len(document)


def test_every_hub_id_names_one_model_of_the_catalog() -> None:
    table = packaged_document("meshwright.model_specs", "data/hub_ids.yaml")
    assert set(table) <= set(catalog_names())
    ids = [hub_id.lower() for hub_ids in table.values() for hub_id in hub_ids]
    assert len(ids) == len(set(ids)) > 120


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("Qwen/Qwen3-8b-instruct", "Qwen/Qwen3-8B"),
        ("google/gemma-3-27b", "google/gemma-3-27b-"),
        ("meta-llama/Llama-3.1-8", "meta-llama/Llama-3.1-8B"),
        ("llama3.1-8b", "llama-3.1-8b"),
        ("gemma3-27b", "gemma-3-27b"),
    ],
)
def test_a_near_miss_of_a_model_is_named(typed: str, meant: str) -> None:
    with pytest.raises(InputError, match=f"did you mean '{meant}"):
        read_model(typed)


FAMILIES = {
    "llama-3.1", "llama-3.2", "qwen2.5", "qwen3-", "mistral", "mixtral", "gemma-2", "gemma-3",
    "glm-4", "phi-", "gpt-oss", "deepseek-v3", "kimi", "minimax", "nemotron", "olmo", "smollm",
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_families_that_are_trained_most_have_hub_ids(family: str) -> None:
    """Each has a model of the catalog that the hub's own name finds."""
    table = packaged_document("meshwright.model_specs", "data/hub_ids.yaml")
    names = [name for name in table if name.startswith(family)]
    assert names
    assert all(read_model(table[name][0]).name == name for name in names)


def test_a_folder_of_a_hub_id_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    config |= {"num_attention_heads": 4, "intermediate_size": 128}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert read_model("Qwen/Qwen3-8B").layers == 2
