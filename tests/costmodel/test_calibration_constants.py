"""The records of costmodel/data: few free constants, each physical, with a source and near its prior."""

from __future__ import annotations

import math
import re
from importlib import resources

import pytest
import yaml

from benchmarks.accuracy import free_counts
from benchmarks.calibrate import with_provenance, with_values
from meshwright.cluster_specs.reader import device_names, load_device
from meshwright.costmodel.kernels import gemm_s
from meshwright.costmodel.rates import (
    device_constants,
    device_prefixes,
    device_rates,
    named_constants,
)
from meshwright.costmodel.records import (
    FILES,
    constant_records,
    effective_paths,
    layered_values,
    names_in,
)
from meshwright.costmodel.stacks import framework_constants, framework_names, framework_prefixes
from tests.places import DATA

RUNS = DATA / "published_runs.yaml"


def text_of(file: str) -> str:
    return (
        resources.files("meshwright.costmodel").joinpath("data", file).read_text(encoding="utf-8")
    )


def test_every_constant_has_a_source_and_every_free_one_a_prior_and_a_spread() -> None:
    records = constant_records().values()
    assert len(records) > 100
    assert [r.path for r in records if len(r.source) < 8] == []
    assert [r.path for r in records if r.free and not (r.spread and 0 < r.spread <= 1)] == []


def test_free_constants_lie_within_three_spreads_of_the_prior() -> None:
    spreads = {
        r.path: math.log(r.value / r.prior) / r.spread
        for r in constant_records().values()
        if r.prior is not None and r.spread is not None and r.value is not None
    }
    assert spreads
    assert {path: away for path, away in spreads.items() if abs(away) > 3.05} == {}


def test_an_alias_takes_the_value_of_its_holder_and_follows_an_override() -> None:
    assert (
        device_constants("b300-sxm", "blackwell").attention_forward_fraction
        == device_constants("gb300", "blackwell").attention_forward_fraction
    )
    moved = {
        "devices.gb300.attention_forward_fraction": 0.9,
        "frameworks.llm-foundry.dp_interference": 0.5,
    }
    assert device_constants("b300-sxm", "blackwell", moved).attention_forward_fraction == 0.9
    assert layered_values(*framework_prefixes("fsdp2"), overrides=moved)["dp_interference"] == 0.5
    assert framework_constants("fsdp2").dp_interference != 0.5, "an override must not stay"
    assert (
        effective_paths("frameworks.fsdp2")["dp_interference"]
        == "frameworks.llm-foundry.dp_interference"
    )


def test_nanotron_s_tensor_parallelism_takes_another_constant_of_the_defaults() -> None:
    """It runs collectives beside products as Megatron does, gradients' buckets as PyTorch does."""
    moved = {"framework_defaults.dp_interference": 0.3}
    prefixes = framework_prefixes("nanotron")
    known, other = (layered_values(*prefixes, overrides=each) for each in (None, moved))
    assert other["tp_interference"] == 0.3
    assert other["dp_interference"] == known["dp_interference"]
    assert framework_constants("megatron").tp_interference == known["tp_interference"]


def test_a_later_layer_wins() -> None:
    assert device_constants("b300-sxm", "blackwell").half_k == 47
    assert device_constants("unheard-of", "unheard-of").half_k == 73
    assert "megatron" in names_in("frameworks")


@pytest.mark.parametrize("file", FILES)
def test_rewriting_changes_values_and_nothing_else(file: str) -> None:
    text = text_of(file)
    records = {r.path: r for r in constant_records().values() if r.file == file and r.free}
    same = with_values(text, {path: float(r.value or 0) for path, r in records.items()})
    assert same == text
    path, record = next(iter(records.items()))
    assert record.value is not None
    moved = with_values(text, {path: 0.00001234})
    changed = [(a, b) for a, b in zip(text.split("\n"), moved.split("\n"), strict=True) if a != b]
    assert len(changed) == 1
    assert "0.00001234" in changed[0][1]
    node = yaml.safe_load(moved)
    for name in path.split("."):
        node = node[name]
    assert node == {
        "value": 1.234e-05, "prior": record.prior, "spread": record.spread, "source": record.source,
    }  # fmt: skip
    with pytest.raises(KeyError, match="no_such"):
        with_values(text, {"shared.no_such": 1.0})


def test_provenance_is_written_once() -> None:
    once = with_provenance("# Title\n\nshared:\n  a: 1\n", {"rows": 3})
    assert once == "# Title\n\ncalibration: {rows: 3}\nshared:\n  a: 1\n"
    assert with_provenance(once, {"rows": 4}) == once.replace("3", "4")


def free_paths(*prefixes: str) -> set[str]:
    free = {path for path, record in constant_records().items() if record.free}
    return free & set(effective_paths(*prefixes).values())


@pytest.mark.parametrize("name", device_names())
def test_at_most_12_free_constants_act_on_a_device(name: str) -> None:
    """Its own, its architecture's, the defaults, and every shared one, at work there or not."""
    found = free_paths("shared", *device_prefixes(name, load_device(name).architecture))
    assert len(found) <= 12, sorted(found)


@pytest.mark.parametrize("name", framework_names())
def test_at_most_8_free_constants_act_on_a_framework(name: str) -> None:
    found = free_paths(*framework_prefixes(name))
    assert len(found) <= 8, sorted(found)


def test_the_document_counts_as_these_tests_do() -> None:
    devices, frameworks = free_counts()
    assert set(devices) == set(device_names())
    assert set(frameworks) == set(framework_names())
    for name, count in devices.items():
        assert count == len(
            free_paths("shared", *device_prefixes(name, load_device(name).architecture))
        )
    assert max(devices.values()) > 5


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{3,}", text.lower()))


def test_no_constant_is_named_after_a_model_a_source_or_a_row() -> None:
    runs = yaml.load(RUNS.read_text(encoding="utf-8"), yaml.CSafeLoader)["runs"]
    known = {"device", "devices", "framework", "frameworks", *names_in("architectures")}
    for name in (*framework_names(), *device_names()):
        known |= words(name)
    models = set().union(*(words(run["model"]["name"]) for run in runs))
    models |= {
        "llama",
        "gpt",
        "bloom",
        "mpt",
        "qwen",
        "deepseek",
        "mixtral",
        "nemotron",
        "gemma",
        "mistral",
    }
    sources = set().union(*(words(run["source"].split(";")[0]) for run in runs))
    everyday = {
        "and",
        "data",
        "performance",
        "large",
        "recomputation",
        "activation",
        "single",
        "node",
        "layer",
        "batch",
        "each",
        "micro",
        "per",
        "rank",
    }
    taken = (models | sources) - known - everyday
    rows = {run["id"].lower() for run in runs}
    assert {"llama", "simumax", "korthikanti", "mosaicml"} <= taken
    for path in constant_records():
        assert not (words(path) & taken), path
        assert not any(part in rows for part in path.lower().split(".")), path


def test_a_part_that_issue_holds_back_attains_more_of_its_peak_but_is_no_faster() -> None:
    """An H20 has a quarter of an H100's tensor rate by SM: attention waits as long for exponentials as there.

    1 / (1 / 0.92 + x / 4) with x from 1 / 0.7335 = 1 / 0.803 + x of an H100, whose GEMMs reach 0.803 at best.
    """
    whole, cut = (load_device(name) for name in ("h100-sxm-80gb", "h20-sxm-96gb"))
    of_whole, of_cut = (device_constants(part.name, part.architecture) for part in (whole, cut))
    by_sm = [(part.peak_bf16_tflops or 0.0) / part.sms for part in (whole, cut)]
    assert by_sm[0] / by_sm[1] == pytest.approx(4.0, abs=0.1)
    waits = 1 / of_whole.attention_forward_fraction - 1 / 0.803
    attained = 1 / (1 / of_cut.gemm_fraction_16bit + waits / 4)
    assert of_cut.attention_forward_fraction == pytest.approx(attained, abs=0.01)
    for name in ("flash1", "flash2", "cudnn9"):
        rates = [
            getattr(constants, f"attention_{name}_fraction") * rate
            for constants, rate in zip((of_whole, of_cut), by_sm, strict=True)
        ]
        assert rates[1] <= rates[0] * 1.001, name


_STEPS_OF_KERNELS = 0.908
"""What steps attain of kernels measured alone: A100 0.946, H100 0.864 and 0.967, B200 0.855."""


@pytest.mark.parametrize(
    ("precision", "name", "measured_ms"),
    [
        ("fp8", "gemm_fraction_fp8", 6.812),
        ("mxfp8", "gemm_fraction_mxfp8", 7.161),
        ("nvfp4", "gemm_fraction_fp4", 3.764),
    ],
)
def test_narrow_products_of_blackwell_are_expected_as_transformer_engine_measures_them(
    precision: str, name: str, measured_ms: float
) -> None:
    """Twelve products of a layer on a B300, 15,872 tokens, pre-quantized (docs/examples/gemm_profiling)."""
    tokens, section = 15_872, "architectures.blackwell"
    prior = constant_records()[f"{section}.{name}"].prior
    assert prior is not None
    alone = {
        f"{section}.gemm_fraction_16bit": 0.72,
        f"{section}.{name}": prior / _STEPS_OF_KERNELS,
    }
    spec = load_device("b300-sxm")
    constants = named_constants(spec.name, spec.architecture, "megatron-bridge", alone)
    rates = device_rates(spec, precision, constants)
    weights = [(12_288, 4_096), (4_096, 4_096), (16_384, 4_096), (4_096, 16_384)]
    shapes = [
        shape for n, k in weights for shape in ((tokens, n, k), (tokens, k, n), (n, k, tokens))
    ]
    seconds = sum(float(gemm_s(m, n, k, rates)) for m, n, k in shapes)
    assert 1e3 * seconds == pytest.approx(measured_ms, rel=0.03)
