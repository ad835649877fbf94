"""config.json of published models, and what happens to broken ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwright.errors import InputError
from meshwright.model_specs.adapters import stored_weights_note
from meshwright.model_specs.config_fields import ConfigFields, Part, integer, only, read_fields
from meshwright.model_specs.huggingface import model_from_huggingface
from meshwright.model_specs.huggingface_families import FAMILIES, class_defaults
from meshwright.model_specs.parameters import (
    active_parameter_count,
    attention_parameters,
    embedding_parameters,
    encoder_parameters,
    head_parameters,
    linear_attention_parameters,
    mtp_parameters,
    parameter_count,
)
from meshwright.model_specs.reader import load_catalog_model, read_model
from meshwright.model_specs.schema import ModelSpec
from tests.places import DATA
from tests.soaked import examples

CONFIGS = DATA / "hf_configs"

# Totals that the Hugging Face hub states (safetensors), unless said otherwise. "Built" is the number of
# parameters of the model that transformers 5.23 builds of the file on the meta device, with the routers'
# balance biases, which it holds as buffers; without multi-token prediction.
PUBLISHED = {
    "ling-3.0-flash": 124_414_211_552,  # built
    "flint-40b-a3b": 39_785_287_456,  # built
    "kolibri-1-78b-a4b": 78_103_074_560,  # built
    "mimo-v2-flash": 308_778_780_864,  # built; 309B on the model card
    "step-3.7-flash": 196_956_130_368,  # built, text part; 196B on the card of Step 3.5 Flash
    "a.x-k1-519b": 518_983_063_808,  # built; 519B on the model card
    "bamba-9b": 9_780_235_392,  # built; 9.78B on the model card
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,  # without the MTP module and the FP8 scales
    "deepseek-v3.2": 671_877_944_064,  # built; the 671B of DeepSeek-V3 and its indexers
    "falcon-40b": 41.30e9,  # the 41.8e9 of the hub less the tied head, stored twice there
    "falcon-mamba-7b": 7_272_665_088,  # built; 7.27B on the model card
    "falcon-h1-34b": 33_642_221_312,  # built; 34B in arXiv 2507.22448
    "falcon-7b": 7_217_189_760 - 65_024 * 4_544,  # likewise
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_884e6,  # language part, Gemma 3 report, arXiv 2503.19786, table 1: 675M and 3,209M
    "gemma-4-12b": 11_907_350_272,  # built; 12B on the hub
    "gemma-4-26b-a4b": 25_233_141_760,  # built; 25.2B on the model card
    "gemma-4-e2b": 4_628_569_344,  # built, text alone
    "gemma-4-e4b": 7_463_013_376,  # built, text alone
    "gemma-4-31b": 30_697_345_280,  # built; 30.7B on the model card
    "glm-5": 743_911_218_432,  # built; 744B in its release notes (Z.ai, February 2026)
    "glm-5.2": 743_377_019_904,  # built: 57 layers without an indexer of 9,371,904
    "glm-4.5-air": 106_852_251_264,  # built; 106B in arXiv 2508.06471, table 1
    "gpt-oss-20b": 20_914_757_184,
    "gemma-3-27b": 27_432_406_640 - 423_060_336,  # built, less the encoder counted below
    "gpt2": 124_439_808,
    "granite-4.0-h-small": 32_207_337_984,  # built; 32B on the model card
    "jamba-1.5-large": 398_555_145_696,  # built; 398B in arXiv 2408.12570
    "jamba-v0.1": 51_570_323_328,  # built; 51.6B on the model card
    "kimi-k2": 1_026_408_235_864,
    "laguna-xs.2": 33_442_617_088,  # built; 33B on the model card
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-11b-vision": 9_775_157_248,  # as the Llama of 40 layers that it is beside cross-attention
    "llama-4-maverick": 400_711_848_960,  # built, language part; 402B with the vision tower on the model card
    "llama-4-scout": 107_769_861_120,  # built, language part; 109B with the vision tower on the model card
    "mamba-2.8b": 2_768_345_600,  # built; 2.8B in arXiv 2312.00752, table 3
    "mamba-codestral-7b": 7_285_403_648,  # built, and the authors' total (mistral.ai, July 2024)
    "minimax-m3": 426_174_572_928,  # built, with the indexers of 57 layers
    "minimax-m2.5": 228_689_764_864,  # built; 230B on the model card
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "nemotron-3-nano-30b-a3b": 31_577_940_288,  # built; 31.6B in NVIDIA's report
    "nemotron-3-super-120b-a12b": 120_668_707_840,  # built; 120.6B in NVIDIA's report
    "nemotron-h-8b": 8_100_852_736,  # built; 8B in arXiv 2504.03624
    "olmo-2-13b": 13_716_198_400,  # built; 13.7B on the model card
    "olmo-3-7b": 7_298_011_136,  # built; 7B on the model card
    "olmoe-1b-7b": 6_919_161_856,
    "opt-1.3b": 1_315_758_080,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,  # built; 14.7B on the model card
    "pythia-6.9b": 6_857_302_016,  # Biderman et al. 2023, arXiv 2304.01373, table 1
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-vl-7b": 7_615_616_512,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-vl-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "qwen3-vl-235b-a22b": 235_093_634_560,  # as qwen3-235b-a22b
    "qwen3-vl-30b-a3b": 30_532_122_624,
    "qwen3-vl-8b": 8_190_735_360,
    "qwen3-next-80b-a3b": 79_674_391_296,  # built; 80B on the model card
    "afm-4.5b": 4_619_184_640,  # built
    "cwm-32b": 32_581_097_472,  # built
    "dots.llm1": 142_774_381_696,  # built
    "ernie-4.5-0.3b": 360_748_032,  # built
    "ernie-4.5-21b-a3b": 21_825_437_888,  # built
    "exaone-4.0-32b": 32_003_216_384,  # built
    "gemma-7b": 8_537_680_896,  # built
    "glm-4-9b-0414": 9_400_279_040,  # built
    "glm-4.7-flash": 29_943_393_920,  # built
    "granite-3.1-3b-a800m": 3_298_793_472,  # built
    "granite-3.3-8b": 8_170_864_640,  # built
    "hunyuan-7b": 7_504_568_320,  # built
    "ministral-3-8b": 8_489_553_920,  # built
    "minitron-8b": 7_734_829_056,  # built
    "mistral-4": 118_972_826_624,  # built
    "qwen3.5-35b-a3b": 34_660_610_688,  # built
    "qwen3.5-9b": 8_953_803_264,  # built
    "seed-oss-36b": 36_151_104_512,  # built
    "smollm3-3b": 3_075_098_624,  # built
    "starcoder2-3b": 3_030_371_328,  # built
    "command-a-plus-218b": 218_254_938_112,  # built; 218B on the model card
    "command-r-plus-104b": 103_810_674_688,  # built; 104B on the model card
    "command-r7b": 8_028_033_024,  # built; 8.03B on the hub
    "glm-4-9b-chat": 9_399_951_360,  # built; 9.4B on the hub
    "hunyuan-a13b": 80_393_183_232,  # built; 80B on the model card
    "hy3-295b-a21b": 295_033_543_488,  # built; 295B on the model card
    "k-exaone-236b-a23b": 236_571_156_352,  # built; 236B on the model card
    "phi-2": 2_779_683_840,  # built; 2.7B on the model card, 2.78B on the hub
    "phi-3.5-moe": 41_873_153_344,  # built; 41.9B on the hub
    "sarvam-30b": 32_152_648_064 + 18 * 128,  # built by transformers 5.24, and its routers' biases
    "sarvam-105b": 106_031_763_456 + 31 * 128,  # likewise
    "solar-open-100b": 102_651_799_552,  # built; 102.6B on the model card
    "stablelm-2-12b": 12_143_185_920,  # built; 12.1B on the model card
    "exaone-3.5-7.8b": 7_818_448_896,
    "glm-4.1v-9b": 9_400_279_040,  # built, language part
    "glm-4.5v": 106_852_251_264,  # built, language part; that of GLM-4.5-Air
    "internlm2.5-7b": 7_737_708_544,
    "internlm3-8b": 8_804_241_408,  # built; 8.8B on the hub
    "ling-lite": 16_801_974_272,  # 16.8B on the model card
    "ling-mini-2.0": 16_255_643_392,
    "mimo-7b": 7_833_409_536
    - 210_790_400,  # less the module for multi-token prediction, counted below
    "kimi-linear-48b-a3b": 49_122_681_728,  # built; 49.1B on the hub
    "minimax-m1": 456_089_655_296,  # built of the next but one; 456B on the model card
    "minimax-text-01": 456_089_655_296,  # likewise
    "minimax-text-01-hf": 456_089_655_296,  # built; 456B in arXiv 2501.08313
    "trinity-mini-26b-a3b": 26_123_974_400,  # built; 26B on the model card
    "apertus-8b": 8_053_338_176,  # built, and on the hub
    "bloom-7b1": 7_069_016_064,  # built, and on the hub
    "codegen-16b": 16_032_155_648,  # built; 16.1B in arXiv 2203.13474, table 1
    "flexolmo-7x7b": 33_270_665_216,  # built; 33B on the model card
    "glm-ocr": 373_359_616,  # built, language part
    "gpt-j-6b": 6_050_882_784,  # built, and on the hub
    "granite-4-vision": 6_738_415_616,  # built, language part
    "granite-docling": 386_630_656,  # built, language part
    "granite-moe-shared": 37_441_769_472,  # built
    "granite-moe-swa": 37_039_117_312,  # built
    "granite-swash-2b": 2_144_463_840,  # built
    "helium-2b": 2_172_643_840,  # built
    "hunyuan-vl": 7_667_982_336,  # built, language part
    "hyperclovax": 6_738_677_760,  # built
    "iquest-coder-40b": 39_794_283_520,  # built
    "jais-2-8b": 8_090_401_280,  # built
    "lfm2-1.2b": 1_170_340_608,  # built, and on the hub
    "lfm2-8b-a1b": 8_339_930_560,  # built; 8.3B on the model card
    "mellum2-12b-a2.5b": 12_149_923_072,  # built; 12B in its name
    "minicpm3-4b": 4_073_875_968,  # built; 4B on the model card
    "ministral-8b": 8_019_808_256,  # built, and on the hub
    "nanochat-d32": 1_879_048_192,  # built; 1.9B on the model card
    "olmo-7b": 6_888_095_744,  # built; 6.9B on the model card
    "olmo-hybrid-7b": 7_430_870_688,  # built
    "qwen2.5-omni-7b": 7_615_616_512,  # built, language part; as qwen2.5-7b
    "qwen3-omni-30b-a3b": 30_532_646_912,  # built, language part; qwen3-30b-a3b with 128 words more
    "starcoder-15.5b": 15_517_456_384,  # built; 15.5B in arXiv 2305.06161
    "vaultgemma": 2_614_222_080,  # built
    "youtu-llm-2b": 1_961_560_064,  # built; 1.96B on the model card
    # Language parts as transformers 5.24 builds them inside their wrappers.
    "aria-25b": 24_869_091_840,  # 25B on the model card
    "cosmos3-edge-2b": 1_946_273_792,
    "deepseek-ocr2-3b": 2_934_734_080,
    "muse-glimmer-30b": 27_854_780_928,
    "paddleocr-vl": 360_748_032,  # that of ERNIE-4.5-0.3B
}

# Parameters of language model and image encoder together, as transformers 5.23 builds them.
WITH_ENCODER = {
    "gemma-3-27b": 27_432_406_640,
    "gemma-3-4b": 4_300_079_472,
    "llama-3.2-11b-vision": 10_670_220_835,
    "qwen3.5-35b-a3b": 35_107_181_936,
    "qwen3.5-9b": 9_409_813_744,
    "qwen2-vl-7b": 8_291_375_616,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-vl-235b-a22b": 235_670_022_896,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3-vl-8b": 8_767_123_696,
}

BOTH_WAYS = (
    "ernie-4.5-21b-a3b", "glm-4.7-flash", "glm-5", "granite-4.0-h-small", "llama-4-maverick", "llama-4-scout",
    "qwen3-next-80b-a3b", "qwen3-vl-235b-a22b", "qwen3.5-35b-a3b", "qwen3.5-9b", "seed-oss-36b", "smollm3-3b",
)  # fmt: skip
"""Models of the catalog whose files are here under the same names."""


def config(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return loaded


def read(data: dict[str, Any]) -> ModelSpec:
    return model_from_huggingface(data, "config.json")


def test_every_fixture_is_checked_and_every_family_has_one() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(PUBLISHED)
    configs = [config(name) for name in PUBLISHED]
    parts = [*configs, *(data["text_config"] for data in configs if "text_config" in data)]
    read_types = {part["model_type"] for part in parts if "model_type" in part}
    # Wrappers have the names of their families, and older files of Qwen's no text part.
    assert read_types >= set(FAMILIES) - {"qwen2_vl_text", "qwen2_5_vl_text"}
    wrappers = {"glm4v", "glm4v_moe", "mllama", "qwen3_vl", "qwen3_vl_moe"}
    wrappers |= {"glm_ocr", "granite4_vision", "granite_docling", "hunyuan_vl"}
    wrappers |= {"step3p7", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"}
    wrappers |= {"aria", "cosmos3_edge", "deepseek_ocr2", "muse_glimmer", "paddleocr_vl"}
    assert read_types - set(FAMILIES) <= wrappers


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_counts_match_published_totals(name: str) -> None:
    model = read_model(str(CONFIGS / f"{name}.json"))
    assert model.name == name
    assert parameter_count(model) == pytest.approx(PUBLISHED[name], rel=5e-3)
    if isinstance(PUBLISHED[name], int):
        assert parameter_count(model) == pytest.approx(PUBLISHED[name], rel=1e-8)


@pytest.mark.parametrize("name", sorted(WITH_ENCODER))
def test_image_encoders_make_up_what_published_totals_have_more(name: str) -> None:
    vision = read(config(name)).vision
    assert vision is not None
    assert parameter_count(read(config(name))) + encoder_parameters(vision) == WITH_ENCODER[name]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen2.5-vl-7b", {"depth": 0}, "vision_config.depth: .*from 1"),
        (
            "qwen2.5-vl-7b",
            {"out_hidden_size": 3},
            "vision_config.out_hidden_size: must .* width, 3584, got 3",
        ),
        ("qwen3-vl-8b", {"num_heads": 7}, "multiple of vision.heads 7"),
        ("gemma-3-4b", {"image_size": 100}, "mm_tokens_per_image: .*7 patches a side"),
        ("llama-3.2-11b-vision", {"hidden_size": "wide"}, "vision_config.hidden_size"),
    ],
)
def test_wrong_encoders_are_refused_by_their_field(
    name: str, changes: dict[str, object], words: str
) -> None:
    data = config(name)
    with pytest.raises(InputError, match=words):
        read(data | {"vision_config": data["vision_config"] | changes})


@pytest.mark.parametrize(
    ("fixture", "name"),
    [
        ("llama-3.1-8b", "llama-3-8b"),
        ("mixtral-8x7b", "mixtral-8x7b"),
        ("deepseek-v3", "deepseek-v3"),
        ("kimi-k2", "kimi-k2"),
        ("gpt-oss-20b", "gpt-oss-20b"),
        ("olmoe-1b-7b", "olmoe-1b-7b"),
        ("qwen3-8b", "qwen3-8b"),
        ("qwen3-30b-a3b", "qwen3-30b-a3b"),
        ("nemotron-h-8b", "nemotron-h-8b"),
        ("nemotron-3-nano-30b-a3b", "nemotron-3-nano-30b-a3b"),
        ("mamba-codestral-7b", "mamba-codestral-7b"),
        ("falcon-h1-34b", "falcon-h1-34b"),
        ("qwen2.5-vl-7b", "qwen2.5-vl-7b"),
        ("qwen3-vl-8b", "qwen3-vl-8b"),
        ("qwen3-vl-30b-a3b", "qwen3-vl-30b-a3b"),
        *((name, name) for name in BOTH_WAYS),
    ],
)
def test_config_and_catalog_agree(fixture: str, name: str) -> None:
    apart = {"name", "source", "published_parameters", "head_dim", "left_out", "stored_as"}
    read_here = read(config(fixture))
    if fixture == "llama-3.1-8b":
        assert read_here.rope == load_catalog_model("llama-3.1-405b").rope
        apart.add("rope")
    assert read_here.model_dump(exclude=apart) == load_catalog_model(name).model_dump(exclude=apart)
    assert read_here.qk_head_dim == load_catalog_model(name).qk_head_dim


@pytest.mark.parametrize(
    ("name", "window", "full"),
    [
        ("mistral-7b-v0.1", 4096, 0),
        ("phi-3-mini-4k", 2047, 0),
        ("gemma-2-2b", 4096, 13),
        ("gemma-3-1b", 512, 4),
        ("gemma-3-4b", 1024, 5),
        ("gpt-oss-20b", 128, 12),
        ("llama-4-scout", 8192, 12),
        ("olmo-2-13b", None, 40),
        ("olmo-3-7b", 4096, 8),
        ("qwen2.5-7b", None, 28),
        ("mixtral-8x7b", None, 32),
    ],
)
def test_windows(name: str, window: int | None, full: int) -> None:
    model = read(config(name))
    assert (model.sliding_window, model.full_attention_layers) == (window, full)


def test_layer_types_overrule_the_pattern() -> None:
    data = config("gemma-3-1b")
    data["layer_types"] = ["sliding_attention", "full_attention"] * 13
    assert read(data).full_attention_layers == 13
    data["layer_types"] = ["full_attention"] * 26
    assert read(data).sliding_window is None
    data["layer_types"] = ["sliding_attention"] * 9 + ["full_attention"] * 17
    assert read(data).attention_order == "W" * 9 + "F" * 17
    assert (read(data).full_attention_layers, read(data).windowed_layers) == (17, 9)
    data["layer_types"] = ["chunked_attention"] * 26
    with pytest.raises(InputError, match="got 'chunked_attention'"):
        read(data)
    data["layer_types"] = ["full_attention"]
    with pytest.raises(InputError, match="must name all 26 layers"):
        read(data)


def test_qwen_window_starts_after_the_full_layers() -> None:
    data = config("qwen2.5-7b") | {"use_sliding_window": True, "sliding_window": 4096}
    assert read(data).sliding_window is None
    assert read(data | {"max_window_layers": 14}).full_attention_layers == 14
    assert read(data | {"max_window_layers": 0}).full_attention_layers == 0
    assert read(data | {"max_window_layers": 20}).attention_order == "F" * 20 + "W" * 8
    # Of 28 layers 14 are full: as many as every second one, and other ones.
    assert read(data | {"max_window_layers": 14}).attention_order == "F" * 14 + "W" * 14
    listed = ["full_attention", "sliding_attention"] * 14
    assert read(data | {"layer_types": listed}).attention_order == "FW" * 14
    assert read(data | {"layer_types": listed[::-1]}).attention_order is None
    assert read(data | {"layer_types": listed[::-1]}).full_attention_every == 2
    assert read(data | {"sliding_window": None}).sliding_window is None


@pytest.mark.parametrize(
    ("name", "change", "order", "every"),
    [
        ("qwen1.5-moe-a2.7b", {"use_sliding_window": True}, "WF" * 10 + "WFFF", 1),
        ("qwen3-30b-a3b", {"use_sliding_window": True, "sliding_window": 4096}, None, 0),
        (
            "gpt-oss-20b",
            {"layer_types": ["full_attention", "sliding_attention"] * 12},
            "FW" * 12,
            1,
        ),
        ("gpt-oss-20b", {"layer_types": ["sliding_attention", "full_attention"] * 12}, None, 2),
        ("mistral-7b-v0.1", {}, None, 0),
    ],
)
def test_windowed_layers_in_the_order_of_the_family(
    name: str, change: dict[str, Any], order: str | None, every: int
) -> None:
    """configuration_*.py and modeling_*.py of transformers: each family has an order of its own."""
    model = read(config(name) | change)
    assert (model.attention_order, model.full_attention_every) == (order, every)
    assert model.windowed_layers == model.attention_letters.count("W")


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("mistral-7b-v0.1", {"layer_types": ["full_attention"] * 32}, "layer_types"),
        ("qwen2.5-7b", {"layer_types": ["sliding_attention"] * 28}, "layer_types"),
        ("gpt-oss-20b", {"sliding_window": None}, "layer_types"),
    ],
)
def test_an_order_that_the_family_cannot_have_is_refused(
    name: str, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(InputError, match=field):
        read(config(name) | change)


def test_gpt_oss_turns_by_yarn_where_its_file_is_silent() -> None:
    """configuration_gpt_oss.py: YaRN by 32 from 4,096 positions is the family's default."""
    stated = config("gpt-oss-20b")
    silent = {key: value for key, value in stated.items() if key != "rope_scaling"}
    for data in (silent, silent | {"rope_scaling": None}):
        assert read(data).rope == read(stated).rope
    assert read(silent | {"rope_scaling": {"rope_type": "default"}}).rope.scaling is None
    assert read(stated | {"swiglu_alpha": 1.5}).swiglu_alpha == 1.5


def test_what_no_field_holds_is_named() -> None:
    """A field of the file is read, without effect, as every launch has it anyhow, or named."""
    data = config("qwen2.5-7b")
    assert read(data).left_out == ()
    assert read(data | {"use_cache": True, "initializer_range": 0.02}).left_out == ()
    odd = {"initializer_range": 0.01, "attention_dropout": 0.1, "qkv_scale": [1, 2], "x": False}
    assert read(data | odd).left_out == (
        "initializer_range 0.01",
        "attention_dropout 0.1",
        "qkv_scale [1, 2]",
        "x false",
    )
    scaling = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 64}
    (said,) = read(data | {"rope_scaling": scaling}).left_out
    assert said.startswith("rope_scaling.short_factor [1.0, 1.0")
    assert len(said) < 150


def test_qwen_dense_layers_come_first() -> None:
    data = config("qwen3-30b-a3b")
    moe = read(data | {"mlp_only_layers": [1, 0]}).moe
    assert moe is not None
    assert moe.dense_layers == 2
    assert read(data | {"num_experts": 0}).moe is None
    assert read(data | {"decoder_sparse_step": 100}).moe is None
    every_second = read(data | {"decoder_sparse_step": 2})
    assert every_second.expert_layers == tuple(range(1, 48, 2))
    for broken in ({"mlp_only_layers": [5]}, {"decoder_sparse_step": 7}):
        with pytest.raises(InputError, match="before all layers with experts"):
            read(data | broken)
    with pytest.raises(
        InputError, match=r"mlp_only_layers: must list layer numbers, got a list of 0 items"
    ):
        read(data | {"mlp_only_layers": [[]]})


def test_deepseek_routing() -> None:
    moe = read(config("deepseek-v3")).moe
    assert moe is not None
    assert (moe.router_groups, moe.router_groups_per_token, moe.router_bias) == (8, 4, True)
    lite = read(config("deepseek-v2-lite"))
    assert lite.moe is not None
    assert (lite.moe.router_groups, lite.moe.router_bias, lite.moe.shared_width) == (
        None,
        False,
        2816,
    )
    assert lite.attention is not None
    assert lite.attention.q_lora_rank is None
    assert read(config("deepseek-v2-lite") | {"n_routed_experts": None}).moe is None
    with pytest.raises(InputError, match="moe_layer_freq: only 1 is supported"):
        read(config("deepseek-v3") | {"moe_layer_freq": 2})


def test_experts_of_glm_and_minimax() -> None:
    glm = read(config("glm-4.5-air"))
    assert glm.moe is not None
    assert (glm.moe.dense_layers, glm.moe.shared_width, glm.moe.router_bias) == (1, 1408, True)
    assert (glm.moe.router_score, glm.rope.fraction) == ("sigmoid", 0.5)
    assert (glm.attention_bias, glm.attention_output_bias, glm.qk_norm) == (True, False, False)
    assert glm.mtp_layers == 1
    # The hub's 110.5B hold the module for multi-token prediction too, with copies of embedding and head.
    copies = embedding_parameters(glm) + head_parameters(glm)
    assert parameter_count(glm) + mtp_parameters(glm) + copies == pytest.approx(110.5e9, rel=1e-3)
    minimax = read(config("minimax-m2.5"))
    assert minimax.rope.fraction == 0.5
    assert (minimax.qk_norm_full_width, minimax.mtp_layers) == (True, 3)
    # 12B (arXiv 2508.06471, table 1) and 10B (model card) activated, without word embeddings and the head.
    for model, activated in ((glm, 12e9), (minimax, 10e9)):
        layers = active_parameter_count(model, input_embedding=False) - head_parameters(model)
        assert layers == pytest.approx(activated, rel=0.025)
    for change in ({"qk_norm_type": "per_head"}, {"shared_intermediate_size": 8}):
        with pytest.raises(InputError, match=r"only .* is supported"):
            read(config("minimax-m2.5") | change)


def test_llama_four() -> None:
    model = read(config("llama-4-scout"))
    assert model.moe is not None
    assert (model.moe.shared_width, model.dense_layers, model.chunked_windows) == (8192, 0, True)
    # Model card: 17B activated.
    assert active_parameter_count(model) == pytest.approx(17e9, rel=0.02)
    text = config("llama-4-scout")["text_config"]
    assert read(text | {"no_rope_layers": [1, 0] * 24}).full_attention_layers == 24
    assert read(text | {"no_rope_layers": [0, 1] * 24}).attention_order == "FW" * 24
    for wrong in (
        {"attention_chunk_size": None},
        {"no_rope_layers": [1] * 48},
        {"no_rope_layers": [0] * 48},
        {"no_rope_layers": [0, 1]},
        {"layer_types": ["chunked_attention"] * 48},
    ):
        with pytest.raises(InputError, match=next(iter(wrong))):
            read(text | wrong)
    for listed in ([1, 3], list(range(0, 48, 2)), [*range(1, 47, 2), 46]):
        with pytest.raises(InputError, match="moe_layers: experts in each n-th of the 48 layers"):
            read(text | {"moe_layers": listed})


def test_layers_with_experts_may_alternate_with_dense_ones() -> None:
    model = read(config("llama-4-maverick"))
    assert model.expert_layers == tuple(range(1, 48, 2))
    assert (model.ffn_hidden, model.expert_layers[:2]) == (16_384, (1, 3))
    # Model card: 17B activated.
    assert active_parameter_count(model) == pytest.approx(17e9, rel=0.02)
    text = config("llama-4-maverick")["text_config"]
    del text["interleave_moe_layer_step"]
    assert read(text | {"moe_layers": list(range(1, 48, 2))}).moe == model.moe
    for change in (
        {"layers": 47},
        {"ffn_hidden": 0},
        {"mtp_layers": 1},
        {"moe": model.model_dump()["moe"] | {"dense_layers": 1}},
    ):
        with pytest.raises(ValidationError, match="every"):
            ModelSpec.model_validate(model.model_dump() | change)


def test_qwen_next_has_linear_attention_in_three_layers_of_four() -> None:
    data = config("qwen3-next-80b-a3b")
    model = read(data)
    assert model.linear_attention is not None
    assert (model.linear_layers, model.full_attention_layers, model.windowed_layers) == (36, 12, 0)
    assert (model.linear_attention.key_width, model.linear_attention.value_width) == (2048, 4096)
    assert (model.attention_output_gate, model.rope.fraction) == (True, 0.25)
    # Model card: 3B activated, without word embeddings and the head.
    layers = active_parameter_count(model, input_embedding=False) - head_parameters(model)
    assert layers == pytest.approx(3.25e9, rel=0.01)
    listed = ["linear_attention"] * 46 + ["full_attention"] * 2
    odd = read(data | {"layer_types": listed})
    assert (odd.attention_order, odd.linear_layers) == ("L" * 46 + "FF", 46)
    with pytest.raises(InputError, match="key_heads 16"):
        read(data | {"linear_num_value_heads": 40})


def test_heads_of_qwen_with_experts_are_as_wide_as_the_hidden_width_leaves() -> None:
    """configuration_qwen3_moe.py, unlike configuration_qwen3.py; 128 was taken for both."""
    experts, dense = config("qwen3-30b-a3b"), config("qwen3-8b")
    for data in (experts, dense):
        del data["head_dim"]
    assert (read(experts).qk_head_dim, read(dense).qk_head_dim) == (2048 // 32, 128)


def test_ministral_has_windows_where_its_file_lists_them() -> None:
    data = config("ministral-8b")
    assert (read(data).attention_order, read(data).sliding_window) == ("FWWW" * 9, 32_768)
    del data["layer_types"]
    assert read(data).full_attention_every == 0
    assert read(data | {"sliding_window": None}).sliding_window is None


def test_norms_without_weights() -> None:
    """OLMo's first generation and nanochat: matrices and token table alone."""
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11_008
    assert parameter_count(read(config("olmo-7b"))) == 2 * 50_304 * 4096 + 32 * layer
    clipped = read(config("olmo-7b") | {"clip_qkv": 8.0})
    assert clipped.left_out == ("clip_qkv 8.0",)
    small = read(config("nanochat-d32"))
    assert (small.qk_norm, small.qk_norm_weights, small.embedding_norm) == (True, False, True)
    layer = 4 * 2048 * 2048 + 2 * 2048 * 8192
    assert parameter_count(small) == 2 * 65_536 * 2048 + 32 * layer


def test_apertus_has_two_numbers_of_its_activation_in_each_layer() -> None:
    model = read(config("apertus-8b"))
    assert (model.activation, model.gated, model.qk_norm) == ("xielu", False, True)
    plain = read(config("apertus-8b") | {"hidden_act": "relu2"})
    assert parameter_count(model) == parameter_count(plain) + 2 * 32
    silent = config("apertus-8b")
    del silent["rope_parameters"]
    assert read(silent).rope == model.rope
    assert model.rope.scaling is not None
    assert (model.rope.base, model.rope.scaling.type) == (12e6, "llama3")


def test_layers_of_granite_turn_by_the_base_of_their_kind() -> None:
    data = config("granite-swash-2b")
    assert (read(data).attention_sinks, read(data).attention_order) == (True, "FWWW" * 6)

    def by_kind(full: float, windowed: float) -> dict[str, Any]:
        return data | {"layer_rope_theta": [full, windowed, windowed, windowed] * 6}

    own = read(by_kind(5e5, 1e4))
    assert (own.rope.base, own.rope.windowed_base, own.position) == (5e5, 1e4, "rope")
    in_windows = read(by_kind(0, 1e4))
    assert (in_windows.rope.base, in_windows.rope_in_windows_alone) == (1e4, True)
    assert read(by_kind(0, 0)).position == "none"
    bases: tuple[list[Any], ...] = (list(range(24)), [[]] * 24, ["1e4"] * 24, [1e4])
    for wrong in (by_kind(1e4, 0), *(data | {"layer_rope_theta": each} for each in bases)):
        with pytest.raises(InputError, match="layer_rope_theta: "):
            read(wrong)
    del data["layer_types"], data["layer_rope_theta"]
    assert read(data).attention_order == "FWWW" * 6
    shared = read(config("granite-moe-shared"))
    assert shared.moe is not None
    assert shared.moe.shared_width == 1024
    without = read(config("granite-moe-shared") | {"shared_intermediate_size": 0})
    assert without.moe is not None
    assert without.moe.shared_width == 0


def test_logits_are_divided_by_more_than_nothing() -> None:
    """A division by zero."""
    assert read(config("granite-3.3-8b") | {"logits_scaling": 4.0}).output_scale == 0.25
    for scaling in (0, -1.0):
        with pytest.raises(InputError, match="logits_scaling: must be above 0"):
            read(config("granite-3.3-8b") | {"logits_scaling": scaling})


def test_sarvam_is_read_by_its_first_names_too() -> None:
    """As the remote code of sarvam-30b and sarvam-105b wrote their files."""
    older = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    for name in ("sarvam-30b", "sarvam-105b"):
        data = config(name)
        assert read(renamed(data, older)) == read(data)
    assert read(
        config("sarvam-30b") | {"attention_bias": None, "use_qkv_bias": True}
    ).attention_bias
    scaling = {"factor": 40, "original_max_position_embeddings": 4096}
    older_rope = read(data | {"rope_scaling": {"type": "deepseek_yarn", **scaling}}).rope
    assert older_rope == read(data | {"rope_scaling": {"type": "yarn", **scaling}}).rope


def test_mellum_lists_its_windows_and_dense_layers() -> None:
    """Two windows of 1,024 and two dense layers, rotary embeddings by kind of layer."""
    data = config("mellum2-12b-a2.5b")
    full, windowed = ["full_attention"], ["sliding_attention"]
    data |= {
        "layer_types": windowed * 2 + full * 26,
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 26,
    }
    model = read(data)
    assert (model.attention_order, model.dense_layers) == ("WW" + "F" * 26, 2)
    assert (model.rope.base, model.rope.windowed_base) == (5e5, 1e4)
    dense = read(data | {"mlp_layer_types": ["dense"] * 28})
    assert dense.moe is None


def test_the_language_model_inside_the_thinker_of_an_omni_model() -> None:
    for name in ("qwen2.5-omni-7b", "qwen3-omni-30b-a3b"):
        thinker = config(name)
        wrapper = {
            "model_type": thinker["model_type"].removesuffix("_thinker"),
            "thinker_config": thinker,
            "talker_config": {},
        }
        model = read(wrapper)
        assert model.source == "config.json, thinker_config.text_config alone"
        assert parameter_count(model) == PUBLISHED[name]
    untyped = config("qwen3-omni-30b-a3b")
    del untyped["text_config"]["model_type"]
    assert read(untyped).moe is not None


def test_short_convolutions_of_lfm2() -> None:
    """Of a layer with one: four times the square of the hidden width, and three numbers of a channel."""
    model = read(config("lfm2-1.2b"))
    linear = model.linear_attention
    assert linear is not None
    assert (linear.type, linear.projected_width, linear.convolved_width) == (
        "short_conv", 3 * 2048, 2048,
    )  # fmt: skip
    assert model.attention_order == "LLFLLFLLFLFLFLFL"
    # Two thirds of 12,288.
    assert (model.ffn_hidden, model.qk_norm, model.tied_embeddings) == (8192, True, True)
    convolution, attention = 4 * 2048**2 + 3 * 2048, 2 * 2048**2 + 2 * 2048 * 512 + 2 * 64
    layers = 10 * convolution + 6 * attention + 16 * (3 * 2048 * 8192 + 2 * 2048)
    assert parameter_count(model) == 65_536 * 2048 + layers + 2048
    older = config("lfm2-1.2b") | {"tie_embedding": False, "block_ff_dim": 9000}
    del older["layer_types"], older["tie_word_embeddings"]
    again = read(older)
    assert (again.attention_order, again.tied_embeddings) == (model.attention_order, False)
    # 6,000 rounded up to a multiple of 256.
    assert again.ffn_hidden == 6144
    assert read(older | {"block_auto_adjust_ff_dim": False}).ffn_hidden == 9000
    assert read(older | {"full_attn_idxs": list(range(16))}).linear_attention is None
    with pytest.raises(InputError, match="conv_bias: biases of short convolutions"):
        read(older | {"conv_bias": True})
    for factor in (float("nan"), float("inf"), -1.0):
        with pytest.raises(InputError, match="block_ffn_dim_multiplier: must be above 0"):
            read(older | {"block_ffn_dim_multiplier": factor})
    experts = read(config("lfm2-8b-a1b"))
    assert experts.moe is not None
    assert (experts.dense_layers, experts.linear_layers, experts.moe.router_bias) == (2, 18, True)
    # Model card: 1.5B activated.
    assert active_parameter_count(experts) == pytest.approx(1.5e9, rel=0.04)
    assert read(config("lfm2-8b-a1b") | {"num_dense_layers": 24}).moe is None


def test_names_that_newer_transformers_write_for_exaone_and_bloom() -> None:
    """transformers 5.24 saves EXAONE 3 as a Llama names its fields; older files of BLOOM say n_embed."""
    names = {
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    }
    assert read(renamed(config("exaone-3.5-7.8b"), names)) == read(config("exaone-3.5-7.8b"))
    bloom = config("bloom-7b1")
    older = renamed(bloom, {"hidden_size": "n_embed", "n_head": "num_attention_heads"})
    assert read(older) == read(bloom)
    starcoder = read(config("starcoder-15.5b"))
    assert (starcoder.kv_heads, starcoder.position) == (1, "learned")
    assert read(config("starcoder-15.5b") | {"multi_query": False}).kv_heads == 48
    # 64 of 256 and of 96 elements of a head turn.
    assert read(config("gpt-j-6b")).rope.fraction == pytest.approx(64 / 256)
    assert read(config("codegen-16b")).rope.fraction == pytest.approx(64 / 256)


def test_cohere_has_one_norm_without_shift_for_both_blocks() -> None:
    """Of a layer: four matrices of attention, three of the feed-forward, 4,096 scales."""
    model = read(config("command-r7b"))
    assert (model.norm, model.norm_bias, model.norms_per_layer) == ("layernorm", False, 1)
    assert (model.parallel_block, model.tied_embeddings, model.output_scale) == (True, True, 0.25)
    assert (model.sliding_window, model.full_attention_every) == (4096, 4)
    assert model.rope_in_windows_alone
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    layer = attention + 3 * 4096 * 14_336 + 4096
    assert parameter_count(model) == 256_000 * 4096 + 32 * layer + 4096
    plus = read(config("command-r-plus-104b"))
    assert (plus.qk_norm, plus.qk_norm_full_width, plus.sliding_window) == (True, True, None)
    # Command A is Command R7B in the widths of Command R+, with a wider feed-forward: 111B.
    wide = {"hidden_size": 12_288, "intermediate_size": 36_864, "num_hidden_layers": 64}
    command_a = read(config("command-r7b") | wide | {"num_attention_heads": 96})
    assert parameter_count(command_a) == 111_057_580_032
    # Command A+: 25B activated, of four shared experts as wide as eight routed ones.
    experts = read(config("command-a-plus-218b"))
    assert experts.moe is not None
    assert (experts.moe.shared_width, experts.moe.router_normalized) == (4 * 4096, True)
    assert active_parameter_count(experts) == pytest.approx(25e9, rel=2e-3)
    assert (experts.parallel_block, experts.windowed_layers) == (True, 24)
    normed = read(config("command-a-plus-218b") | {"rms_norm_eps": 1e-6})
    assert (normed.norm, normed.norm_bias, normed.norm_epsilon) == ("rmsnorm", True, 1e-6)
    with pytest.raises(InputError, match="first_k_dense_replace: dense layers beside"):
        read(config("command-a-plus-218b") | {"first_k_dense_replace": 1})
    with pytest.raises(InputError, match=r"use_parallel_block: only blocks side by side"):
        read(config("command-r7b") | {"use_parallel_block": False})


def test_experts_of_phi_hunyuan_solar_exaone_and_trinity() -> None:
    phi = read(config("phi-3.5-moe"))
    assert phi.moe is not None
    assert (phi.moe.router_score, phi.moe.router_normalized) == ("sparsemixer", False)
    assert (phi.norm, phi.norm_bias, phi.output_bias, phi.attention_bias) == (
        "layernorm", True, True, True,
    )  # fmt: skip
    # Model card: 6.6B activated.
    assert active_parameter_count(phi) == pytest.approx(6.6e9, rel=0.01)
    hunyuan = read(config("hunyuan-a13b"))
    assert hunyuan.moe is not None
    assert (hunyuan.moe.experts, hunyuan.moe.top_k, hunyuan.moe.shared_width) == (64, 8, 3072)
    # Model card: 13B activated.
    assert active_parameter_count(hunyuan) == pytest.approx(13e9, rel=0.02)
    solar = read(config("solar-open-100b"))
    assert solar.moe is not None
    assert (solar.dense_layers, solar.moe.router_score, solar.moe.shared_width) == (
        0, "sigmoid", 1280,
    )  # fmt: skip
    # Model card: 12B activated.
    assert active_parameter_count(solar) == pytest.approx(12e9, rel=0.01)
    exaone = read(config("k-exaone-236b-a23b"))
    assert (exaone.dense_layers, exaone.windowed_layers, exaone.sliding_window) == (1, 36, 128)
    assert (exaone.norms_after_blocks, exaone.rope_in_windows_alone) == (False, True)
    # Model card: 23B activated.
    assert active_parameter_count(exaone) == pytest.approx(23e9, rel=0.03)
    hy3 = read(config("hy3-295b-a21b"))
    assert (hy3.dense_layers, hy3.ffn_hidden) == (1, 13_312)
    # Model card: 21B activated.
    assert active_parameter_count(hy3) == pytest.approx(21e9, rel=0.02)
    trinity = read(config("trinity-mini-26b-a3b"))
    assert (trinity.attention_output_gate, trinity.norms_per_layer) == (True, 4)
    assert (trinity.dense_layers, trinity.windowed_layers) == (2, 24)
    # Model card: 3B activated.
    layers = active_parameter_count(trinity, input_embedding=False) - head_parameters(trinity)
    assert layers == pytest.approx(2.65e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("hunyuan-a13b", {"moe_topk": [8] * 31 + [4]}, "moe_topk: only one number for all 32"),
        ("hunyuan-a13b", {"moe_topk": [8] * 31}, "moe_topk: only one number for all 32"),
        ("hunyuan-a13b", {"moe_topk": ["8"] * 32}, "moe_topk: must list integers, got '8'"),
        ("hunyuan-a13b", {"num_shared_expert": 2}, "num_shared_expert: only 1 is supported"),
        ("hunyuan-a13b", {"moe_intermediate_size": 64}, "moe_intermediate_size: only 3072"),
        ("hunyuan-a13b", {"use_cla": True}, "use_cla: .*layers share"),
        ("phi-3.5-moe", {"num_experts_per_tok": 4}, "sparsemixer needs top_k 2, not 4"),
        ("solar-open-100b", {"first_k_dense_replace": 2}, "first_k_dense_replace: only 0"),
        ("solar-open-100b", {"use_qk_norm": True}, "use_qk_norm: norms on queries and keys"),
        ("k-exaone-236b-a23b", {"scoring_func": "softmax"}, "scoring_func: only sigmoid"),
        ("trinity-mini-26b-a3b", {"route_norm": False}, "route_norm: only true is supported"),
        ("phi-2", {"qk_layernorm": True}, "qk_layernorm: norms on queries and keys"),
        ("hy3-295b-a21b", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types: must name dense"),
        (
            "glm-5",
            {"mlp_layer_types": ["sparse"] * 77 + ["dense"]},
            "mlp_layer_types: must name dense, then sparse, for each of 78 layers",
        ),
    ],
)
def test_what_the_code_of_a_family_does_not_read_is_refused_by_its_field(
    name: str, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        read(config(name) | change)


def test_stablelm_has_blocks_side_by_side_in_the_larger_model() -> None:
    """StableLM 2 1.6B: two norms a layer, biases of queries, keys and values, 1.64B on the hub."""
    larger = read(config("stablelm-2-12b"))
    assert (larger.parallel_block, larger.norms_per_layer, larger.qk_norm) == (True, 1, True)
    small = {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_key_value_heads": 32,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "use_qkv_bias": True,
    }
    assert parameter_count(read(config("stablelm-2-12b") | small)) == 1_644_515_328


def test_ling_routes_by_softmax_and_its_second_generation_by_sigmoid() -> None:
    first, second = read(config("ling-lite")), read(config("ling-mini-2.0"))
    assert first.moe is not None
    assert second.moe is not None
    assert (first.moe.router_score, first.dense_layers, first.moe.shared_width) == (
        "softmax", 0, 2816,
    )  # fmt: skip
    assert (second.moe.router_score, second.moe.router_bias) == ("sigmoid", True)
    assert (second.moe.router_groups, second.moe.router_groups_per_token) == (8, 4)
    assert (second.qk_norm, second.rope.fraction, second.dense_layers) == (True, 0.5, 1)
    # Model cards: 2.75B and 1.4B activated.
    assert active_parameter_count(first) == pytest.approx(2.75e9, rel=0.01)
    assert active_parameter_count(second) == pytest.approx(1.43e9, rel=0.01)
    with pytest.raises(InputError, match="norm_head: a head whose columns are normed"):
        read(config("ling-lite") | {"norm_head": True})


def test_mimo_is_a_qwen_with_a_module_for_multi_token_prediction() -> None:
    """The hub's 7,833,409,536 hold a layer more, a projection of twice the width and three norms."""
    model = read(config("mimo-7b"))
    assert (model.mtp_layers, model.attention_bias, model.sliding_window) == (1, True, None)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 6144 + 3 * 4096 * 11_008 + 2 * 4096
    assert mtp_parameters(model) == layer + 2 * 4096 * 4096 + 3 * 4096
    assert parameter_count(model) + mtp_parameters(model) == 7_833_409_536


def test_minimax_has_lightning_attention_in_seven_layers_of_eight() -> None:
    for name in ("minimax-text-01", "minimax-m1", "minimax-text-01-hf"):
        model = read(config(name))
        linear = model.linear_attention
        assert linear is not None
        assert (linear.type, linear.value_width, linear.block) == ("lightning", 8192, 256)
        assert (model.linear_layers, model.full_attention_every, model.kv_heads) == (70, 8, 8)
        assert model.rope.fraction == 0.5
        # arXiv 2501.08313: 45.9B activated, without word embeddings and the head.
        layers = active_parameter_count(model, input_embedding=False) - head_parameters(model)
        assert layers == pytest.approx(45.9e9, rel=1e-2)
    # Factors on residuals are in no field of a model: launches name them.
    assert "layernorm_mlp_beta 1.0" in read(config("minimax-m1")).left_out
    silent = config("minimax-text-01-hf")
    del silent["layer_types"]
    assert read(silent).attention_letters == "FL" * 40
    for change, words in (
        (
            {"attn_type_list": [0, 1]},
            "attn_type_list: must list 0 .linear. or 1 .full. for each of 80",
        ),
        ({"attn_type_list": [0] * 79 + [2]}, "attn_type_list: must list 0"),
        ({"postnorm": False}, "postnorm: only true is supported"),
    ):
        with pytest.raises(InputError, match=words):
            read(config("minimax-m1") | change)


def test_kimi_linear_has_delta_attention_in_three_layers_of_four() -> None:
    model = read(config("kimi-linear-48b-a3b"))
    linear = model.linear_attention
    assert linear is not None
    assert model.attention is not None
    assert model.moe is not None
    assert (linear.type, linear.key_width, linear.gate_rank) == ("kda", 4096, 128)
    assert model.attention_letters == "LLLF" * 6 + "LLF"
    assert (model.position, model.attention.q_lora_rank, model.kv_heads) == ("none", None, 32)
    assert (model.moe.dense_layers, model.moe.router_score, model.moe.top_k) == (1, "sigmoid", 8)
    # Model card: 3B activated.
    layers = active_parameter_count(model, input_embedding=False) - head_parameters(model)
    assert layers == pytest.approx(2.73e9, rel=0.01)
    # The same under the names of transformers 5.
    newer = config("kimi-linear-48b-a3b")
    sizes = newer.pop("linear_attn_config")
    kinds = ["linear_attention", "full_attention"]
    newer |= {
        "layer_types": [kinds[n in sizes["full_attn_layers"]] for n in range(1, 28)],
        "mlp_layer_types": ["dense"] + ["sparse"] * 26,
        "num_local_experts": newer.pop("num_experts"),
        "num_experts_per_tok": newer.pop("num_experts_per_token"),
        "norm_topk_prob": newer.pop("moe_renormalize"),
    }
    assert read(newer) == model
    broken = config("kimi-linear-48b-a3b")["linear_attn_config"]
    for change, words in (
        ({"mla_use_nope": False}, "mla_use_nope: only true is supported"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate: a gate on latent attention"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers: .*set it to 0"),
        ({"linear_attn_config": broken | {"use_full_rank_gate": True}}, "use_full_rank_gate: only"),
        ({"linear_attn_config": broken | {"kda_layers": [1, 2]}}, "kda_layers: .* layers 1 to 27"),
    ):
        with pytest.raises(InputError, match=words):
            read(config("kimi-linear-48b-a3b") | change)


def test_mimo_has_narrower_values_and_sinks_under_its_window_alone() -> None:
    published = read(config("mimo-v2-flash"))
    assert published.window_heads is not None
    assert (published.window_heads.kv_heads, published.window_heads.sinks) == (8, True)
    assert (published.attention_sinks, published.in_windows.attention_sinks) == (False, True)
    assert (published.qk_head_dim, published.v_head_dim, published.sliding_window) == (
        192,
        128,
        129,
    )
    # Attention of a layer by hand: queries, keys, values, output, and sinks under the window.
    of_full = 4096 * (64 * 192 + 4 * (192 + 128) + 64 * 128)
    of_windowed = 4096 * (64 * 192 + 8 * (192 + 128) + 64 * 128) + 64
    assert attention_parameters(published) == of_full
    assert attention_parameters(published.in_windows) == of_windowed
    silent = {"hybrid_layer_pattern", "moe_layer_freq", "swa_num_key_value_heads"}
    rest = {key: value for key, value in config("mimo-v2-flash").items() if key not in silent}
    assert parameter_count(read(rest)) == parameter_count(published)


def test_chosen_blocks_of_minimax_m3_are_left_out_of_training() -> None:
    published = config("minimax-m3")
    model = read(published)
    assert model.block_selection is not None
    assert model.block_selection.model_dump() == {
        "layers": 57,
        "heads": 4,
        "head_dim": 128,
        "block": 128,
        "top_k": 16,
    }
    assert model.moe is not None
    assert (model.moe.dense_layers, model.ffn_hidden, model.moe.shared_width) == (3, 12_288, 3072)
    # 426.17B with indexers; without, what Megatron-Core builds, as Megatron-Bridge leaves them frozen.
    indexers = 57 * 128 * (6144 * 5 + 2)
    plain = model.model_copy(update={"block_selection": None})
    assert parameter_count(model) - parameter_count(plain) == indexers
    assert parameter_count(plain) == 425_950_425_216
    # As transformers 5 saves it: flat fields, and names of layers' kinds.
    saved = {key: value for key, value in published.items() if key != "sparse_attention_config"}
    saved |= {
        "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
        "moe_layer_freq": None,
    }
    assert read(saved) == model
    with pytest.raises(InputError, match="moe_layer_freq: must be 0, then 1"):
        read(published | {"moe_layer_freq": [1] * 57 + [0] * 3})


def test_last_layers_of_small_gemma_4_reuse_keys_and_values() -> None:
    model = read(config("gemma-4-e2b"))
    assert model.attention_order == "WWWWF" * 3 + "wwwwf" * 4
    assert (model.ffn_hidden, model.reusing_ffn_hidden, model.layer_inputs) == (6144, 12_288, 256)
    assert model.layer_kinds[13:17] == (
        "windowed attention and feed-forward",
        "full attention and feed-forward",
        "reusing windowed attention and feed-forward",
        "reusing windowed attention and feed-forward",
    )
    # Queries and the output of 8 heads; keys and values of one, with two norms or one of queries alone.
    of_layer = {
        letter: attention_parameters(model.kinds_apart[letter]) for letter in ("F", "W", "f", "w")
    }
    assert of_layer == {
        "F": 1536 * (2 * 8 + 2) * 512 + 2 * 512,
        "W": 1536 * (2 * 8 + 2) * 256 + 2 * 256,
        "f": 1536 * 2 * 8 * 512 + 512,
        "w": 1536 * 2 * 8 * 256 + 256,
    }
    numbers = {"F": 3, "W": 12, "f": 4, "w": 16}
    attention = sum(numbers[letter] * of_layer[letter] for letter in numbers)
    feed_forward = 3 * 1536 * (15 * 6144 + 20 * 12_288)
    inputs = 35 * (262_144 * 256 + 3 * 1536 * 256) + 256
    around = 262_144 * 1536 + 1536 + 35 * 5 * 1536
    assert parameter_count(model) == attention + feed_forward + inputs + around
    # Two billion effective parameters (ai.google.dev/gemma/docs/core): those without the tables of layers.
    assert active_parameter_count(model, input_embedding=False) == 2_279_758_848
    narrow = read(config("gemma-4-e4b"))
    assert (narrow.reusing_ffn_hidden, narrow.widest_feed_forward) == (None, 10_240)
    assert narrow.attention_order == "WWWWWF" * 4 + "wwwwwf" * 3


@pytest.mark.parametrize(
    "says",
    [
        {"indexer_types": None},
        {"indexer_types": None, "index_topk_pattern": "FFF" + "SSSF" * 18 + "SSS"},
    ],
)
def test_indexers_that_layers_share_are_read_wherever_they_are_said(says: dict[str, Any]) -> None:
    listed = read(config("glm-5.2"))
    assert listed.attention_order == "FFF" + "fffF" * 18 + "fff"
    assert listed.indexing_layers == 21
    assert read(config("glm-5.2") | says) == listed
    every = read(config("glm-5.2") | {"indexer_types": ["full"] * 78})
    assert every.attention_order is None
    indexer = 2048 * 32 * 128 + 6144 * (128 + 32) + 2 * 128
    assert parameter_count(every) - parameter_count(listed) == 57 * indexer


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("minimax-m2.5", {"attn_type_list": [1, 0]}, "attn_type_list: only 1 is supported"),
        (
            "qwen3-next-80b-a3b",
            {"attn_output_gate": False},
            "attn_output_gate: only true is supported",
        ),
        (
            "glm-5.2",
            {"indexer_types": ["full"] * 77},
            "indexer_types: must say full or shared for each of 78 layers",
        ),
        (
            "gemma-4-e2b",
            {"text_config": config("gemma-4-e2b")["text_config"] | {"num_kv_shared_layers": 35}},
            "num_kv_shared_layers: must leave a layer of each kind that makes keys and values",
        ),
        (
            "gemma-4-e2b",
            {
                "text_config": config("gemma-4-e2b")["text_config"]
                | {"vocab_size_per_layer_input": 128}
            },
            "vocab_size_per_layer_input: only vocab_size 262144 is supported",
        ),
    ],
)
def test_switches_that_would_make_another_network_are_refused(
    name: str, change: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        read(config(name) | change)


def test_flint_and_kolibri_know_positions_under_windows_alone() -> None:
    flint, kolibri = read(config("flint-40b-a3b")), read(config("kolibri-1-78b-a4b"))
    silent = {"layer_types", "mlp_only_layers", "sliding_window", "norm_topk_prob"}
    for name, published in (("flint-40b-a3b", flint), ("kolibri-1-78b-a4b", kolibri)):
        rest = {key: value for key, value in config(name).items() if key not in silent}
        assert read(rest).model_dump() == published.model_dump()
        assert published.rope_in_windows_alone
        assert published.sliding_window == 513
    assert flint.attention_order == "FF" + "WWWF" * 11 + "WWF"
    assert (flint.attention_sinks, kolibri.norms_per_layer) == (True, 4)
    assert flint.moe is not None
    assert kolibri.moe is not None
    assert (flint.moe.dense_layers, flint.moe.router_bias) == (2, False)
    assert (kolibri.moe.router_bias, kolibri.moe.router_normalized) == (True, False)
    with pytest.raises(InputError, match="mlp_only_layers: must list the first layers"):
        read(config("flint-40b-a3b") | {"mlp_only_layers": [0, 2]})


def test_step_has_more_heads_under_its_window_and_a_gate_on_each() -> None:
    published = read(config("step-3.7-flash"))
    assert published.window_heads is not None
    assert (published.heads, published.in_windows.heads, published.most_heads) == (64, 96, 96)
    # By hand: queries, keys and values, output, gates, and two norms as wide as a head.
    for kind, heads in ((published, 64), (published.in_windows, 96)):
        assert attention_parameters(kind) == 4096 * (heads * 257 + 2 * 8 * 128) + 2 * 128
    assert published.attention_order == ("FWWW" * 12)[:45]
    assert published.moe is not None
    assert (published.moe.dense_layers, published.moe.router_scaling_factor) == (3, 3.0)
    assert (published.rope.base, published.rope.windowed_base) == (5e6, 1e4)
    assert published.mtp_layers == 0
    assert "multi-token prediction is left out" in str(published.attention_note)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "mimo-v2-flash",
            {"swa_v_head_dim": 64},
            "swa_v_head_dim: only that of layers in full, .*64",
        ),
        (
            "mimo-v2-flash",
            {"hybrid_layer_pattern": [0, 2]},
            "hybrid_layer_pattern: must list 0 .full",
        ),
        (
            "mimo-v2-flash",
            {"moe_layer_freq": [1] * 47 + [0]},
            "moe_layer_freq: must put layers without",
        ),
        (
            "mimo-v2-flash",
            {"swa_num_key_value_heads": 7},
            "must be a multiple of window_heads.kv_heads 7",
        ),
        ("laguna-xs.2", {"gating": "per-element"}, "gating: only true, or per-head, is supported"),
        (
            "laguna-xs.2",
            {"num_attention_heads_per_layer": [48] * 39 + [64]},
            "num_attention_heads_per_layer: must give layers of a kind as many heads each",
        ),
        ("laguna-xs.2", {"moe_router_logit_softcapping": 30.0}, "softcapping: only 0 is supported"),
    ],
)
def test_heads_that_layers_of_a_kind_do_not_share_are_refused(
    name: str, change: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        read(config(name) | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"moe_layers_enum": "2,4"}, "moe_layers_enum: must put layers without experts first"),
        ({"rope_theta": ["a"] * 48}, "rope_theta: must list a number for each layer"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate: only true is supported"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types: must name all 45 layers"),
    ],
)
def test_what_step_cannot_have_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(config("step-3.7-flash")["text_config"] | change)


def test_widths_and_gates_of_heads_stand_in_plain_attention_alone() -> None:
    plain = read(config("qwen3-8b")).model_dump(exclude_unset=True)
    assert ModelSpec.model_validate(plain | {"value_head_dim": 64}).v_head_dim == 64
    for field in ({"value_head_dim": 64}, {"attention_head_gates": True}):
        with pytest.raises(ValidationError, match=f"{next(iter(field))} with mtp_layers"):
            ModelSpec.model_validate(plain | {"mtp_layers": 1} | field)


def test_ling_three_has_whole_gates_in_delta_attention_and_one_a_head_beside() -> None:
    published = read(config("ling-3.0-flash"))
    linear = published.linear_attention
    assert linear is not None
    assert (linear.type, linear.gate_rank, linear.key_head_dim) == ("kda", None, 128)
    assert (published.full_attention_layers, published.linear_layers) == (7, 35)
    # By hand: queries, keys, values, both gates and output; steps; convolution; decays, steps, norm.
    of_delta = 2560 * (6 * 4096 + 32) + 4 * 3 * 4096 + 32 + 4096 + 128
    assert linear_attention_parameters(published) == of_delta
    # Queries, latent and the key's rotated part, keys and values, output, gates, norm of the latent.
    of_latent = 2560 * (32 * 192 + 576) + 512 * 32 * 256 + 4096 * 2560 + 2560 * 32 + 512
    assert attention_parameters(published) == of_latent
    assert read({"model_type": "bailing_hybrid"} | SILENT_LING).layers == 42
    with pytest.raises(InputError, match=r"q_lora_rank: only layers of Ling 3\.0"):
        read(config("ling-3.0-flash") | {"q_lora_rank": 1536})


SILENT_LING = {
    "num_hidden_layers": 42,
    "hidden_size": 2560,
    "intermediate_size": 6144,
    "vocab_size": 157_184,
}


def test_olmo_three_has_a_full_layer_in_four_unless_it_says() -> None:
    data = config("olmo-3-7b")
    del data["layer_types"]
    assert read(data).full_attention_layers == 8


def test_muse_glimmer_turns_under_windows_alone_and_counts_its_layers_from_the_last() -> None:
    data = config("muse-glimmer-30b")
    model = read(data)
    assert (model.attention_letters[:8], model.rope_in_windows_alone) == ("WWWFWWWF", True)
    assert model.attention_scale == pytest.approx(3.87 / 128**0.5)
    text = data["text_config"]
    unsaid = {name: text[name] for name in text if name not in ("layer_types", "layer_rope_theta")}
    for layers in (52, 51):
        fewer = read(data | {"text_config": unsaid | {"num_hidden_layers": layers}})
        assert fewer.attention_letters == model.attention_letters[-layers:]
        assert (fewer.rope, fewer.rope_in_windows_alone) == (model.rope, True)
    wrong = text | {"layer_rope_theta": [10000.0] * 51 + [0]}
    with pytest.raises(InputError, match="layer_rope_theta: must give all layers with a window"):
        read(data | {"text_config": wrong})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "is_encoder_decoder: encoder-decoder"),
        ({"model_type": "mamba3", "state_size": 16}, "state_size: state-space layers"),
        ({"model_type": "zamba2", "mamba_d_state": 16}, "mamba_d_state: state-space layers"),
        (
            {"model_type": "minimax_vl_01_text", "attn_type_list": [0, 1]},
            "attn_type_list: layers with linear attention",
        ),
        (
            {"model_type": "diffusion_gemma_text", "global_head_dim": 512, "head_dim": 256},
            "global_head_dim: layers whose attention differs in heads or widths",
        ),
        (
            {"model_type": "gemma3n_text", "hidden_size_per_layer_input": 256},
            "hidden_size_per_layer_input: residuals in several streams beside a token table for each",
        ),
        (
            {"model_type": "inkling_text", "swa_num_key_value_heads": 8},
            "swa_num_key_value_heads: layers whose attention differs in heads or widths",
        ),
        (
            {"model_type": "mimo_v3", "attention_value_scale": 0.707, "v_head_dim": 128},
            "attention_value_scale: values of another width than keys",
        ),
        (
            {"model_type": "step4pro", "attention_other_setting": {"num_attention_heads": 96}},
            "attention_other_setting: layers whose attention differs in heads or widths",
        ),
        (
            {"model_type": "deepseek_v4", "compress_ratios": [0, 4, 128], "index_topk": 512},
            "compress_ratios: attention to compressed keys and values",
        ),
        (
            {"model_type": "muse_spark_text", "residual_gate_temperature": 0.3},
            "residual_gate_temperature: gates on residuals",
        ),
        (
            {"model_type": "molmo2_text", "additional_vocab_size": 128},
            "additional_vocab_size: a token table with more rows than the head",
        ),
        (
            {"model_type": "minimax_m3", "sparse_attention_config": {}},
            "sparse_attention_config: attention to chosen blocks",
        ),
        (
            {"model_type": "nemotron-nas", "block_configs": [{}]},
            "block_configs: layers that each have widths of their own",
        ),
        (
            {"model_type": "longcat_flash", "zero_expert_num": 256},
            "zero_expert_num: experts that compute nothing",
        ),
        ({"model_type": "glm5_next_text", "hc_mult": 4}, "hc_mult: residuals in several streams"),
        (
            {"model_type": "lfm3", "conv_L_cache": 7},
            "conv_L_cache: layers with a short convolution",
        ),
        (
            {"model_type": "glm5_next_text", "kda_lower_bound": -5.0},
            "kda_lower_bound: layers with linear attention",
        ),
        (
            {"model_type": "kimi_k3", "linear_attn_config": {"num_heads": 96}},
            "linear_attn_config: layers with linear attention",
        ),
        ({"model_type": "lara_mini", "linear_num_value_heads": 32}, "heads: .*linear attention"),
        ({"model_type": "deepseek_v4", "index_topk": 512}, "index_topk: .*an indexer chooses"),
        ({"model_type": "vit", "image_size": 224}, "image_size: vision towers"),
        ({"model_type": "other_vl", "vision_config": {}}, "vision_config: vision towers"),
        (
            {"model_type": "other_vl", "text_config": {"cross_attention_layers": [3]}},
            "text_config.cross_attention_layers: layers that attend to another model",
        ),
    ],
)
def test_other_kinds_of_models_are_refused_by_the_field_that_says_so(
    data: dict[str, object], words: str
) -> None:
    inner = data.get("text_config")
    if isinstance(inner, dict):
        inner["model_type"] = "some_text_model"
    with pytest.raises(InputError, match=words):
        read(data)


def test_error_for_an_unknown_family_shows_the_yaml_that_would_do() -> None:
    for name in ("llama-3.1-8b", "qwen3-30b-a3b"):
        with pytest.raises(InputError, match="a model YAML would do") as error:
            read(config(name) | {"model_type": "unheard_of"})
        shown = str(error.value).split("give it as MODEL:\n")[1]
        model = ModelSpec.model_validate(yaml.safe_load(shown))
        assert model.name == "unheard_of"
        # Norms on queries and keys are no common field.
        assert parameter_count(model) == pytest.approx(PUBLISHED[name], rel=1e-6)
    with pytest.raises(InputError, match=r"\nffn_hidden: \.\.\.  # fill this in\n"):
        read({"model_type": "unheard_of", "num_hidden_layers": 10**6000})


def test_falcon_forms() -> None:
    seven, forty = read(config("falcon-7b")), read(config("falcon-40b"))
    assert (seven.kv_heads, seven.norms_per_layer, seven.parallel_block) == (1, 1, True)
    assert (forty.kv_heads, forty.norms_per_layer, forty.parallel_block) == (8, 2, True)
    rw = {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True}
    old = read(config("falcon-7b") | rw)
    assert (old.kv_heads, old.norms_per_layer, old.position, old.mlp_bias) == (71, 2, "alibi", True)


def test_shared_expert_of_qwen2_moe_is_active() -> None:
    # Model card: 2.7B activated.
    assert active_parameter_count(read(config("qwen1.5-moe-a2.7b"))) == pytest.approx(
        2.7e9, rel=0.01
    )


def test_text_part_of_a_wrapper() -> None:
    inner = config("qwen3-8b")
    wrapper = {"model_type": "some_vision_thing", "text_config": inner, "vision_config": {}}
    assert parameter_count(read(wrapper)) == PUBLISHED["qwen3-8b"]
    assert read(wrapper).source == "config.json, text_config alone"
    del inner["tie_word_embeddings"]
    assert read(wrapper | {"tie_word_embeddings": True}).tied_embeddings
    twice = {"model_type": "outer", "llm_config": {"model_type": "inner", "text_config": inner}}
    assert read(twice).layers == 36
    untyped = config("llama-3.1-8b")
    del untyped["model_type"], untyped["architectures"]
    assert read({"model_type": "llava", "text_config": untyped}).layers == 32


def test_model_type_is_told_by_the_architecture() -> None:
    data = config("llama-3.1-8b")
    del data["model_type"]
    assert parameter_count(read(data)) == PUBLISHED["llama-3.1-8b"]


def test_gpt2_without_inner_width_takes_four_times_hidden() -> None:
    assert read(config("gpt2") | {"n_inner": None}).ffn_hidden == 3072
    assert read(config("gpt2") | {"n_inner": 5}).ffn_hidden == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model_type": "qwen4"},
            r"model_type: this model family is not supported, got 'qwen4' .did you mean 'qwen",
        ),
        ({"model_type": 7}, "model_type: must be a text, got 7"),
        ({"hidden_size": None}, "hidden_size: this field is required and null"),
        ({"hidden_size": "4096"}, "hidden_size: must be an integer, got '4096'"),
        ({"hidden_size": True}, "hidden_size: must be an integer, got true"),
        ({"hidden_size": 4096.0}, r"hidden_size: must be an integer, got 4096\.0"),
        ({"hidden_size": float("nan")}, "hidden_size: must be an integer, got nan"),
        ({"hidden_size": -1}, "hidden_size: must be from 1 to 10000000, got -1"),
        (
            {"hidden_size": 10**6000},
            "hidden_size: must be from 1 to 10000000, got an integer of 19932 bits",
        ),
        ({"hidden_size": {"a": {}}}, "hidden_size: must be an integer, got a mapping of 1 keys"),
        ({"num_hidden_layers": 2001}, "num_hidden_layers: must be from 1 to 2000"),
        ({"hidden_act": "swisch"}, "hidden_act: not an activation of this family"),
        ({"hidden_act": []}, "hidden_act: must be a text"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: must be true or false, got 'no'"),
        ({"num_attention_heads": 5}, "hidden 4096 is not a multiple of heads 5"),
        ({"text_config": []}, "text_config: must be a mapping of fields"),
    ],
)
def test_broken_fields_name_file_field_and_value(change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        read(config("llama-3.1-8b") | change)
    assert str(error.value).startswith("config.json: ")


def test_missing_field_names_a_near_miss() -> None:
    data = config("llama-3.1-8b")
    data["num_hidden_layer"] = data.pop("num_hidden_layers")
    with pytest.raises(InputError, match=r"num_hidden_layers: .*did you mean 'num_hidden_layer'"):
        read(data)
    data["num_hidden_layers"] = None
    with pytest.raises(InputError, match=r"num_hidden_layers: this field is required and null$"):
        read(data)


def test_nested_field_has_its_whole_path() -> None:
    data = config("gemma-3-4b")
    del data["text_config"]["hidden_size"]
    with pytest.raises(InputError, match=r"config\.json: text_config\.hidden_size: .*missing"):
        read(data)


def test_endless_nesting_of_text_parts_is_refused() -> None:
    data: dict[str, Any] = {"model_type": "llama"}
    for _ in range(2000):
        data = {"text_config": data}
    with pytest.raises(InputError, match="nested more than"):
        read(data)


def quantised(**fields: object) -> dict[str, object]:
    llama = json.loads((CONFIGS / "llama-3.1-8b.json").read_text(encoding="utf-8"))
    return {**llama, "quantization_config": fields}


@pytest.mark.parametrize(
    ("fields", "stored", "note"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3"}, "fp8", "FineGrainedFP8Config(dequantize=True)"),
        ({"quant_method": "mxfp4"}, "mxfp4", "load it with Mxfp4Config(dequantize=True)"),
        (
            {"quant_method": "awq", "bits": 4},
            "awq 4-bit",
            "start from the model's checkpoint of 16",
        ),
        ({"quant_algo": "NVFP4"}, "modelopt NVFP4", "start from the model's checkpoint of 16 bits"),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            "bitsandbytes 8-bit",
            "so does --train lora-8bit",
        ),
        (
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_use_double_quant": True,
            },
            "bitsandbytes 4-bit",
            "so does --train qlora",
        ),
        (
            {"quant_method": "bitsandbytes", "_load_in_4bit": True},
            "bitsandbytes 4-bit without double quantisation",
            "so does --train qlora",
        ),
    ],
)
def test_weights_of_few_bits_are_said_and_change_no_count(
    fields: dict[str, object], stored: str, note: str
) -> None:
    model = model_from_huggingface(quantised(**fields), "config.json")
    assert model.stored_as == stored
    assert note in str(stored_weights_note(stored))
    assert parameter_count(model) == PUBLISHED["llama-3.1-8b"]


def test_weights_that_training_keeps_need_no_note() -> None:
    assert stored_weights_note("bitsandbytes 4-bit", 4) is None
    assert stored_weights_note("bitsandbytes 8-bit", 8) is None
    single = stored_weights_note("bitsandbytes 4-bit without double quantisation", 4)
    assert "scales of 32 bits" in str(single)
    anew = str(stored_weights_note("fp8", 4))
    assert anew.endswith("(dequantize=True) and save it first")
    assert "this plan at 16 bits" in str(stored_weights_note("bitsandbytes 8-bit", 16))


def test_a_text_part_says_how_its_weights_are_stored() -> None:
    inner = {**quantised(quant_method="compressed-tensors"), "model_type": "llama"}
    model = model_from_huggingface({"model_type": "llava", "text_config": inner}, "config.json")
    assert model.stored_as == "compressed-tensors"
    assert model_from_huggingface(quantised(), "config.json").stored_as is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quant_method": "bitnet"}, "quantization_config.quant_method: layers of ternary weights"),
        ({"bits": 4}, "quantization_config.quant_method: must name how the checkpoint keeps"),
        ({"quant_method": "gptq", "bits": "4"}, "quantization_config.bits: must be an integer"),
    ],
)
def test_weights_that_cannot_be_trained_are_refused_by_their_field(
    fields: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError) as caught:
        model_from_huggingface(quantised(**fields), "config.json")
    assert words in str(caught.value)


@pytest.mark.parametrize("change", [{"word_embed_proj_dim": 512}, {"do_layer_norm_before": False}])
def test_opt_350m_is_refused_in_words(change: dict[str, object]) -> None:
    with pytest.raises(InputError, match="supported"):
        read(config("opt-1.3b") | change)


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 50)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["silu", "gelu", "full_attention"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_hostile_values_give_a_model_or_a_spec_error(data: st.DataObject) -> None:
    hostile = config(data.draw(st.sampled_from(sorted(PUBLISHED))))
    for field in data.draw(st.lists(st.sampled_from(sorted(hostile)), min_size=1, max_size=3)):
        hostile[field] = data.draw(junk)
    try:
        model = read(hostile)
    except InputError as error:
        assert str(error).startswith("config.json: ")  # noqa: PT017
    else:
        assert parameter_count(model) > 0


def test_gemma_says_its_scales_and_caps() -> None:
    gemma2 = read(config("gemma-2-2b"))
    assert (gemma2.attention_logit_cap, gemma2.final_logit_cap) == (50, 30)
    assert gemma2.embedding_scale == pytest.approx(2304**0.5)
    assert gemma2.norm_zero_centered
    gemma3 = read(config("gemma-3-1b"))
    assert (gemma3.rope.base, gemma3.rope.windowed_base) == (1e6, 1e4)
    assert gemma3.activation == "geglu"


def test_rope_parameters_of_newer_files() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 2e6, "factor": 4.0, "beta_fast": 16}
    new = config("qwen3-8b") | {"rope_parameters": rope, "max_position_embeddings": 32_768}
    read_here = read(new).rope
    assert (read_here.base, read_here.scaling and read_here.scaling.beta_fast) == (2e6, 16)
    assert read_here.scaling is not None
    assert read_here.scaling.original_positions == 32_768
    layers = {"full_attention": rope, "sliding_attention": {"rope_theta": 1e4}}
    assert read(new | {"rope_parameters": layers}).rope.windowed_base == 1e4
    with pytest.raises(InputError, match="not a rope scaling"):
        read(new | {"rope_parameters": rope | {"rope_type": "unheard_of"}})


def renamed(data: dict[str, object], names: dict[str, str]) -> dict[str, object]:
    return {names.get(name, name): value for name, value in data.items()}


def test_experts_are_counted_by_each_of_their_names() -> None:
    """transformers 5 saves Qwen3's as num_local_experts, and its Granite's mamba as linear_attention."""
    qwen = config("qwen3-30b-a3b")
    assert read(renamed(qwen, {"num_experts": "num_local_experts"})) == read(qwen)
    with pytest.raises(InputError, match="num_local_experts: must be from 0 to"):
        read(renamed(qwen, {"num_experts": "num_local_experts"}) | {"num_local_experts": -1})
    deepseek = config("deepseek-v3")
    other = {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"}
    assert read(renamed(deepseek, other)) == read(deepseek)
    granite = config("granite-4.0-h-small")
    kinds = {"mamba": "linear_attention", "attention": "full_attention"}
    listed = granite["layer_types"]
    assert isinstance(listed, list)
    assert read(granite | {"layer_types": [kinds[kind] for kind in listed]}) == read(granite)
    with pytest.raises(InputError, match="must name mamba or attention for every layer"):
        read(granite | {"layer_types": ["mlp"] * len(listed)})


def test_heads_of_gemma_four_layer_by_layer() -> None:
    """transformers 5.2x saves `per_layer_config` in place of the fields of global heads."""
    published = config("gemma-4-31b")
    text = published["text_config"]
    assert isinstance(text, dict)
    heads = {"head_dim": text["global_head_dim"], "num_key_value_heads": 4}
    assert text["num_global_key_value_heads"] == 4
    saved = {name: value for name, value in text.items() if "global" not in name}

    def read_layers(layers: object) -> ModelSpec:
        return read(published | {"text_config": saved | {"per_layer_config": layers}})

    assert read_layers({f"{layer:02}": heads for layer in range(5, 60, 6)}) == read(published)
    for unlike in (
        {f"{layer:02}": heads for layer in range(0, 60, 6)},
        {f"{layer:02}": heads | {"head_dim": 256 + layer} for layer in range(5, 60, 6)},
        {},
    ):
        with pytest.raises(InputError, match="per_layer_config: must give all layers that attend"):
            read_layers(unlike)
    with pytest.raises(InputError, match="must be a mapping of fields"):
        read_layers({"05": None})


def test_a_wrapper_says_whether_its_head_is_tied() -> None:
    """transformers 5 saves a default beside it, true in the text part of Qwen3-VL."""
    wrapper = config("qwen3-vl-30b-a3b")
    inner = wrapper["text_config"]
    assert isinstance(inner, dict)
    said = wrapper | {"text_config": inner | {"tie_word_embeddings": True}}
    assert said["tie_word_embeddings"] is False
    assert read(said) == read(wrapper)


def test_the_last_of_several_parts_counts_and_every_part_is_read() -> None:
    """A record over a record: 8 heads of 2 key heads; what only the first part asks for counts as read."""
    config = ConfigFields({"n": 8, "groups": 2, "old": 3, "extra": 1}, "toy.json")
    parts: list[Part] = [
        {"kv_heads": integer("old"), "moe": {"experts": integer("number", 16)}},
        {"heads": integer("n"), "kv_heads": integer("groups", integer("n"))},
        lambda _: {"position": "none"},
    ]
    assert read_fields(config, *parts) == {
        "heads": 8,
        "kv_heads": 2,
        "moe": {"experts": 16},
        "position": "none",
    }
    assert list(config.unread()) == [("extra", 1)]


def test_a_file_is_refused_where_a_key_says_something_else() -> None:
    config = ConfigFields({"use_bias": True, "steps": 2}, "toy.json")
    assert read_fields(config, only("absent", "plain", "no other")) == {}
    with pytest.raises(InputError, match=r"toy\.json: use_bias: no biases, got true"):
        read_fields(config, only("use_bias", False, "no biases"))
    with pytest.raises(InputError, match=r"toy\.json: steps: only 1$"):
        read_fields(config, only("steps", 1, "only 1", shows_value=False))


@pytest.mark.parametrize(
    ("name", "field", "default"),
    [
        ("mixtral-8x7b", "num_key_value_heads", 8),
        ("qwen3-30b-a3b", "num_key_value_heads", 4),
        ("deepseek-v3", "q_lora_rank", 1536),
        ("deepseek-v3", "first_k_dense_replace", 3),
        ("deepseek-v3.2", "n_routed_experts", 256),
        ("glm-5", "n_shared_experts", 1),
        ("glm-5.2", "index_n_heads", 32),
        ("granite-swash-2b", "tie_word_embeddings", True),
    ],
)
def test_fields_at_the_default_of_their_class_may_be_left_out(
    name: str, field: str, default: object
) -> None:
    """transformers saves none that is, and once read none as if it were null: 4 x as many key-value heads."""
    data = config(name)
    assert data.pop(field) == default
    assert read(data) == read(config(name))


def test_null_is_not_the_default_of_the_class() -> None:
    assert read(config("mixtral-8x7b") | {"num_key_value_heads": None}).kv_heads == 32
    latent = read(config("deepseek-v3") | {"q_lora_rank": None}).attention
    assert latent is not None
    assert latent.q_lora_rank is None
    assert {name for name in FAMILIES if class_defaults(name)} >= {"mistral", "kimi_k2", "youtu"}


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("deepseek-v3", "first_k_dense_replace"),
        ("ling-mini-2.0", "first_k_dense_replace"),
        ("k-exaone-236b-a23b", "first_k_dense_replace"),
        ("lfm2-8b-a1b", "num_dense_layers"),
        ("trinity-mini-26b-a3b", "num_dense_layers"),
        ("ernie-4.5-21b-a3b", "moe_layer_start_index"),
    ],
)
def test_more_dense_layers_than_there_are_is_a_mistake(name: str, field: str) -> None:
    """Once read as a dense model, whose experts were gone without a word."""
    data = config(name)
    data.pop("mlp_layer_types", None)
    layers = data["num_hidden_layers"]
    assert read(data | {field: layers}).moe is None
    with pytest.raises(InputError, match=f"{field}: must be at most the {layers} layers"):
        read(data | {field: layers + 1})
    # A short model of the family is dense throughout where the file says nothing.
    if name == "deepseek-v3":
        del data["first_k_dense_replace"]
        assert read(data | {"num_hidden_layers": 2}).moe is None


def test_widths_that_transformers_builds_otherwise_are_read_or_refused() -> None:
    command = config("command-r7b")
    wider = read(command | {"head_dim": 2 * command["head_dim"]})
    more = read(command).hidden * (2 * wider.heads + 2 * wider.kv_heads) * command["head_dim"]
    assert parameter_count(wider) - parameter_count(read(command)) == wider.layers * more
    with pytest.raises(InputError, match="head_dim: heads must together be as wide"):
        read(config("helium-2b") | {"head_dim": 64})
    unified = config("gemma-4-12b")
    unified["text_config"]["hidden_size_per_layer_input"] = 256
    with pytest.raises(InputError, match="hidden_size_per_layer_input: only 0 is supported"):
        read(unified)


@pytest.mark.parametrize(
    ("model_type", "field", "words"),
    [
        ("deepseek_v4", "compress_ratios", "attention to compressed keys and values"),
        ("hy_v4", "hc_mult", "residuals in several streams"),
        ("gemma3n_text", "hidden_size_per_layer_input", "residuals in several streams"),
        ("longcat_flash", "zero_expert_num", "experts that compute nothing"),
    ],
)
def test_families_are_refused_for_the_same_reason_without_the_field(
    model_type: str, field: str, words: str
) -> None:
    """No model YAML is offered that would pass for one of their layers."""
    plain = {"model_type": model_type, "hidden_size": 4096, "num_hidden_layers": 43}
    for data, where in ((plain | {field: 4}, field), (plain, "model_type")):
        with pytest.raises(InputError, match=f"config.json: {where}: {words}") as refused:
            read(data)
        assert "plans the nearest model with a price" in str(refused.value)
        assert "fill this in" not in str(refused.value)
