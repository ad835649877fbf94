"""Published pairs of runs that differ in one setting, each as its source states it.

A pair is priced where the source says model, device, GPUs, tokens, batch, every degree, the micro-batch and
the precision. What it says elsewhere, in another table or in a configuration file of the release that it
names, stands once for all of its pairs in `data/pair_sources.yaml`, and is a remark of the run. Any other
pair is counted with what is not said, and never guessed. Settings outside the layout that a source leaves
out are those of a run file that leaves them out, alike on both sides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from meshwright.cluster_specs.reader import cluster_names
from meshwright.costmodel.layout import AXES
from meshwright.documents import ClosedDocument, parse_mapping, read_text, validated
from meshwright.errors import InputError
from meshwright.frameworks.fsdp2 import FSDP2
from meshwright.frameworks.torchtitan import TORCHTITAN
from meshwright.model_specs.reader import (
    catalog_names,
    flavors,
    load_catalog_model,
    model_from_mapping,
    read_model,
)
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.runs.run_file import MAX_FILE_BYTES, Run, run_from_mapping
from meshwright.planner.runs.run_schema import Positive, Words

MAX_PAIRS = 10_000
UNSTATED_SHARDING = "zero_stage is not stated; 0 is taken on both sides"
"""The one setting of a layout that few sources state, and that both runs of a pair share."""
MICRO_BATCHES = "microbatches"
"""Of a layout, how many a rank has in a step, where a source counts them in the place of sequences."""
_SHARDED = ("fsdp", FSDP2.name, "FSDP FULL_SHARD")
"""Words of sources for ZeRO 3."""


class StatedPairDoc(BaseModel):
    """One pair as its source states it; `ratio` is the time of `to` over that of `from`."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    id: Annotated[str, Field(min_length=1, max_length=300)]
    source: Words
    knob: Annotated[str, Field(min_length=1, max_length=300)]
    from_: Words | dict[str, Any] = Field(alias="from")
    """Words of the source, or settings of a run file."""
    to: Words | dict[str, Any]
    ratio: Positive
    model: Words | dict[str, Any] | None = None
    """A name, or the sizes."""
    device: Words | dict[str, Any] | None = None
    """A word of sources for one device, or a cluster as a run file has it: its name, or its fields."""
    gpus: Any = None
    seq_len: Any = None
    global_batch: Any = None
    precision: Words | None = None
    framework: Words | None = None
    layout: dict[str, Any] | None = None
    also_changes: Any = None
    note: Any = None


class SourceFact(ClosedDocument):
    """What a source says of some of its pairs outside their own entries."""

    source: str
    """How the source of a pair begins."""
    of: dict[str, Any] = Field(default_factory=dict)
    """Fields that the pair has."""
    noted: str = ""
    """Words in its note."""
    stated_in: str = ""
    states: dict[str, Any] = Field(default_factory=dict)
    """Fields that a pair may lack; those under `of` are said more exactly."""
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """What words of `from` and `to` are in a run file."""
    no_price: str | None = None
    """Why such a pair is counted only."""

    def is_of(self, doc: StatedPairDoc) -> bool:
        """Whether it is about a pair.

        Parameters
        ----------
        doc
            A pair as its file has it: by source, fields and words of its note.
        """
        has_fields = all(getattr(doc, name) == value for name, value in self.of.items())
        return doc.source.startswith(self.source) and has_fields and self.noted in str(doc.note)

    def completed(self, doc: StatedPairDoc) -> StatedPairDoc:
        """The pair with the fields that it lacks, or that it says less exactly.

        Parameters
        ----------
        doc
            A pair that this fact is about (`is_of`).
        """
        states = dict(self.states)
        layout = {**states.pop("layout", {}), **(doc.layout or {})}
        new = {
            name: value
            for name, value in states.items()
            if getattr(doc, name) is None or name in self.of
        }
        return doc.model_copy(update={**new, "layout": layout or None})


class SourceWords(ClosedDocument):
    """What words of sources mean, whichever source they stand in."""

    devices: dict[str, str]
    """Nodes of the catalog by words that name one device and no other."""
    settings: dict[str, dict[str, dict[str, Any]]]
    """Settings of a run file by what a pair changes, and by the words of one side."""
    facts: tuple[SourceFact, ...]
    """What sources say of their pairs outside these."""


@cache
def source_words() -> SourceWords:
    """The words that are known, of the file that comes with the package."""
    path = Path(__file__).parent / "data" / "pair_sources.yaml"
    return SourceWords.model_validate(parse_mapping(read_text(path, MAX_FILE_BYTES), str(path)))


@dataclass(frozen=True, kw_only=True)
class StatedPair:
    """A pair whose two runs can be said; `ratio` is measured: seconds of the second over the first."""

    id: str
    source: str
    knob: str
    ratio: float
    first: Run
    second: Run


@dataclass(frozen=True, kw_only=True)
class UnpricedPair:
    """A pair that is only counted, and what its source does not say, or what has no price."""

    id: str
    knob: str
    reason: str


def is_pair_list(text: str) -> bool:
    """Whether a document is a list of pairs: its root has `pairs`, or is a list of no runs.

    Parameters
    ----------
    text
        Of the whole file; it need not be valid YAML.
    """
    roots = [line for line in text.splitlines() if re.match(r"[^\s#]", line)]
    return any(line.startswith("pairs:") for line in roots) or (
        bool(roots)
        and roots[0].startswith("- ")
        and re.search(r"\b(run|measured)\s*:", text) is None
    )


def read_pairs(path: Path) -> Iterator[StatedPair | UnpricedPair]:
    """The pairs of a file, in its order.

    Parameters
    ----------
    path : Path
        A list of pairs, or a mapping with such a list as `pairs`.

    Yields
    ------
    StatedPair or UnpricedPair

    Raises
    ------
    InputError
        If the file is no such list, or an entry lacks `id`, `source`, `knob`, `from`, `to` or `ratio`.
    """
    text = read_text(path, MAX_FILE_BYTES)
    rooted = re.search(r"^pairs:", text, re.MULTILINE) is not None
    document = parse_mapping(text if rooted else f"pairs:\n{text}", str(path))
    rows = document["pairs"]
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_PAIRS:
        raise InputError(
            f"must be a list of 1 to {MAX_PAIRS} pairs", where=f"{path}: pairs", value=rows
        )
    for index, row in enumerate(rows):
        where = f"{path}: pairs[{index}]"
        yield _pair(validated(StatedPairDoc, row, where), where)


def _pair(entry: StatedPairDoc, where: str) -> StatedPair | UnpricedPair:
    facts = [fact for fact in source_words().facts if fact.is_of(entry)]
    doc = entry
    for fact in facts:
        doc = fact.completed(doc)
    if doc.global_batch is None:
        doc = doc.model_copy(update={"global_batch": _counted_batch(doc.layout or {})})
    faults = [fact.no_price for fact in facts if fact.no_price]
    try:
        if faults:
            raise _NotSaidError(faults[0])
        base = _base(doc)
        first, second = (_change(doc.knob, words, facts) for words in (doc.from_, doc.to))
        if first == second:
            raise _NotSaidError("both sides are one setting to the cost model")
        runs = [_run(doc, _changed(base, change), where) for change in (first, second)]
    except _NotSaidError as error:
        return UnpricedPair(id=doc.id, knob=doc.knob, reason=str(error))
    except InputError as error:
        return UnpricedPair(
            id=doc.id, knob=doc.knob, reason=f"no run: {str(error).split(': ', 2)[-1]}"
        )
    remarks = tuple(f"with what stands in {fact.stated_in}" for fact in facts)
    first_run, second_run = (replace(run, remarks=(*run.remarks, *remarks)) for run in runs)
    return StatedPair(
        id=doc.id,
        source=doc.source,
        knob=doc.knob,
        ratio=doc.ratio,
        first=first_run,
        second=second_run,
    )


def _changed(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """The shared settings with one changed; overlap of another axis stays."""
    if "overlap" not in change:
        return {**base, **change}
    return {**base, **change, "overlap": {**base.get("overlap", {}), **change["overlap"]}}


class _NotSaidError(Exception):
    """What keeps a pair from being priced."""


def _run(doc: StatedPairDoc, settings: Mapping[str, Any], where: str) -> Run:
    row = {
        "id": doc.id,
        "source": doc.source,
        "model": _model(doc),
        "cluster": _cluster(doc.device),
        "run": dict(settings),
    }
    run = run_from_mapping(row, where=where)
    if "zero_stage" in settings:
        return run
    return replace(run, remarks=(*run.remarks, UNSTATED_SHARDING))


def _base(doc: StatedPairDoc) -> dict[str, Any]:
    """The settings that both runs share, by the words of a run file."""
    if doc.also_changes:
        raise _NotSaidError("another setting changes too")
    if "memory-budget AC" in str(doc.note):
        raise _NotSaidError("recomputation by a memory budget has no price")
    for name in ("model", "device", "gpus", "seq_len", "global_batch", "layout"):
        if getattr(doc, name) is None:
            raise _NotSaidError(f"{name} not stated")
    _cluster(doc.device)
    model = _model(doc)
    layout = {name: value for name, value in (doc.layout or {}).items() if name != MICRO_BATCHES}
    sharding = layout.pop("zero_stage", None)
    if sharding in _SHARDED:
        sharding = 3
    elif sharding is not None and sharding not in range(4):
        raise _NotSaidError("sharding in words that are not known")
    degrees = {name: layout.get(name) for name in AXES if name != "dp"}
    if _in_all(layout) == doc.gpus:
        degrees = {name: degree or 1 for name, degree in degrees.items()}
    missing = [name for name, degree in degrees.items() if degree is None]
    missing += [] if layout.get("micro_batch") else ["micro_batch"]
    missing += ["vpp"] if (degrees["pp"] or 1) > 1 and layout.get("vpp") is None else []
    missing += ["ep"] if read_model(model).moe is not None and layout.get("ep") is None else []
    if missing:
        raise _NotSaidError(f"layout: {missing[0]} not stated")
    shared = {
        "gpus": doc.gpus,
        "seq_len": doc.seq_len,
        "global_batch": doc.global_batch,
        **({} if doc.framework is None else {"framework": _framework(doc.framework)}),
        **layout,
        **degrees,
    }
    if sharding is not None:
        shared["zero_stage"] = sharding
    if doc.knob not in _OF_PRECISION:
        shared |= _precision((doc.precision or "").strip())
    return shared


def _cluster(device: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """The cluster of a run file."""
    if isinstance(device, dict) or device in cluster_names():
        return device
    if device not in source_words().devices:
        raise _NotSaidError("device named by no node of the catalog")
    return source_words().devices[device]


def _counted_batch(layout: Mapping[str, Any]) -> int | None:
    """Sequences of a step where a source counts the micro-batches of a rank; None where it does not."""
    names = (MICRO_BATCHES, "micro_batch", "dp")
    counts = [count for name in names if isinstance(count := layout.get(name), int)]
    return math.prod(counts) if len(counts) == len(names) else None


def _in_all(layout: Mapping[str, Any]) -> int:
    """GPUs that the stated degrees make, where the data-parallel one is among them; 0 where it is not."""
    stated = [layout.get(name) or 1 for name in AXES if name != "ep"]
    if layout.get("dp") is None or not all(isinstance(degree, int) for degree in stated):
        return 0
    return math.prod(stated)


def _model(doc: StatedPairDoc) -> str | ModelSpec:
    """The catalog's model of this name, without what brackets say of its size, or that all of its parameters
    are fine-tuned, which is a step of pretraining; torchtitan's own of a torchtitan run.

    A name may leave out how many parameters are active, and brackets that no module predicts several tokens.
    """
    if isinstance(doc.model, dict):
        return model_from_mapping(doc.model, "model")
    words = re.sub(r"\((\d+B|SFT|\d+ layers: .*)\)", "", doc.model or "")
    plain = _letters(words.replace("(no MTP)", ""))
    named = re.compile(re.escape(plain) + r"(a\d+b)?")
    for name in catalog_names():
        if named.fullmatch(_letters(name)):
            model = load_catalog_model(name)
            return model.model_copy(update={"mtp_layers": 0}) if "(no MTP)" in words else name
    if (doc.framework or "").startswith(TORCHTITAN.name):
        for flavor in flavors():
            if _letters(flavor.family + flavor.name) == plain:
                return flavor.model
    raise _NotSaidError("model in no catalog under this name")


def _framework(words: str) -> str:
    """The stack in the words of run files, which write Megatron-Bridge in one word."""
    return words.replace("Megatron Bridge", "Megatron-Bridge").replace(
        "Megatron Core", "Megatron-Core"
    )


def _without_brackets(words: str) -> str:
    """Words without what stands in brackets behind them."""
    return re.sub(r"\s*\(.*\)$", "", words)


def _letters(words: str) -> str:
    return re.sub(r"[\s_-]+", "", words.lower())


def _precision(words: str) -> dict[str, Any]:
    settings = source_words().settings["precision"].get(_without_brackets(words))
    if settings is None:
        raise _NotSaidError(f"precision '{words or 'not stated'}' is no precision with a price")
    return settings


def _recompute(words: str) -> dict[str, Any] | None:
    """Modules that are named one by one."""
    modules = re.fullmatch(r"selective modules \[(.*)\]", words)
    if modules is None:
        return None
    if not modules[1]:
        return {"recompute": "none"}
    return {"recompute": "selective", "recompute_modules": modules[1]}


def _shards(words: str) -> dict[str, Any] | None:
    """Groups by how many ranks: FSDP 64, HSDP 8x8."""
    groups = re.fullmatch(r"HSDP (\d+)x\d+|FSDP \d+", words)
    return None if groups is None else {"shard_groups": int(groups[1] or 1)}


_OF_PRECISION = ("precision", "fp8_recipe")
_WITH_NUMBERS = {"recompute": _recompute, "shard_group": _shards}
"""Readers of words that no list holds, by what a pair changes; None for others than theirs."""


def _change(knob: str, words: str | dict[str, Any], facts: list[SourceFact]) -> dict[str, Any]:
    """The settings of one side: in the words of its source where these are known, else in anybody's."""
    if isinstance(words, dict):
        return words
    plain = _without_brackets(words)
    for fact in facts:
        if plain in fact.settings:
            return fact.settings[plain]
    if knob in _OF_PRECISION:
        return _precision(words)
    listed, read = source_words().settings.get(knob), _WITH_NUMBERS.get(knob)
    if listed is None and read is None:
        raise _NotSaidError("no setting of a run file")
    settings = (read and read(words)) or (listed or {}).get(plain)
    if settings is None:
        raise _NotSaidError(f"'{words[:60]}' is no setting with a price")
    return settings
