"""The way back: what people run today, as a run file that `estimate` prices and `plan` can be asked to beat.

Reads a Megatron-LM or Megatron-DeepSpeed command line (a script, or a JSON list of arguments), torchtitan
flags or its TOML file, a DeepSpeed JSON, an accelerate YAML, and configurations and commands of fine-tuning
stacks (`finetuning.py`, `trainers.py`, `recipes.py`, `reinforcement.py`). A flag that is neither read nor
known to have no bearing on the time is listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.calibration import Calibration
from meshwright.documents import parse_document, path_text, read_mapping, read_text
from meshwright.errors import InputError
from meshwright.frameworks.deepspeed import DEEPSPEED, ENGINE
from meshwright.frameworks.fsdp2 import ACCELERATOR, FSDP2
from meshwright.model_specs.adapters import AdapterSpec, peft_modules
from meshwright.model_specs.reader import read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.request.plan_request import PlanInputs
from meshwright.planner.runs.launches import (
    finetuning,
    megatron,
    recipes,
    reinforcement,
    torchtitan,
    trainers,
)
from meshwright.planner.runs.launches.command_line import (
    CommandLine,
    fields_of,
    number_in,
    refuse_adapters,
    unread_words,
    words_of,
)
from meshwright.planner.runs.launches.fields import (
    RECIPE,
    fields_of_line,
    launched_gpus,
    recipe_named,
)
from meshwright.planner.runs.launches.launch_run import (
    LaunchRun,
    on_its_hosts,
    with_global_batch,
    with_hosts_beside,
    with_notes,
    with_optimizer,
)
from meshwright.planner.runs.logs import with_measurement, write_run_file
from meshwright.planner.runs.prediction import PricedRun, price_run
from meshwright.planner.runs.run_file import MAX_FILE_BYTES, Run, run_from_mapping
from meshwright.planner.runs.run_schema import SettingsDoc

# How launch files of plans start what they start.


_ACCUMULATION = re.compile(
    r"^export ACCELERATE_GRADIENT_ACCUMULATION_STEPS=(\d{1,6})$", re.MULTILINE
)
"""In our launch scripts for accelerate, which have their settings in variables and in accelerate.yaml."""
_DEEPSPEED_FILE = "ds_config.json"
_OWN_TRAINER = f'"$TRAIN_SCRIPT" {ENGINE} "$here/{_DEEPSPEED_FILE}"'
"""How launch files of plans start a script on the Trainer: all that it is told lies in that file."""
_TOP_FIELDS = ("model", "cluster")
_FIELDS = (*_TOP_FIELDS, *SettingsDoc.model_fields)
_INTEGERS = frozenset(
    name for name, field in SettingsDoc.model_fields.items() if "int" in str(field.annotation)
)


_PLACES_LOST = (
    "a run file has no field for ranks out of turn: the one that is written is priced as nested in the "
    "cluster's blocks"
)


def price_launch(
    path: Path,
    additions: Sequence[str],
    output: Path | None = None,
    calibration: Calibration | None = None,
    measured: Path | None = None,
) -> Iterator[PricedRun]:
    """Prices the run of a launch file.

    Parameters
    ----------
    path
        The launch file.
    additions
        `name=value` pairs for what the file leaves open.
    output
        Where to write the run file, if anywhere.
    calibration
        What the user's own runs say of the constants.
    measured
        Log of the run, as `read_log` takes it.

    Raises
    ------
    InputError
        A file that cannot be read, or an `output` that exists.
    """
    launch = read_launch(path, _added_model(additions, path))
    mapping = complete(launch, additions, str(path))
    if measured is not None:
        mapping = with_measurement(mapping, measured)
    run = run_from_mapping(
        mapping,
        where=str(path),
        base=path.parent,
        default_id=path.stem,
        calibration=calibration,
    )
    has_images = run.workload.model.encoder is not None
    names = launch.not_read(has_images=has_images)
    unread = [f"{path.name}: {unread_words(name)}" for name in names]
    if not has_images and (launch.images.sizes or run.workload.model.vision is not None):
        unread.append(TEXT_ALONE)
    run = on_its_hosts(run, launch)
    if run.ranks and not launch.places:
        mapping["run"]["hosts"] = list(launch.hosts)
    remarks = run.remarks
    if output is not None:
        write_run_file(output, mapping)
        remarks += (_PLACES_LOST,) if run.ranks and launch.places else ()
    assumed = launch.assumed if mapping["model"] is launch.model else ()
    remarks = (*remarks, *launch.remarks, *assumed, *unread)
    yield price_run(replace(run, remarks=remarks), path)


def _pairs(additions: Sequence[str]) -> list[str]:
    """`name=value` pairs, of which some are joined by commas."""
    return [part for text in additions for part in text.split(",")]


def _added_model(additions: Sequence[str], path: Path) -> str | None:
    """Name or file of the model that the caller adds to a launch file; files may lie beside it."""
    for pair in _pairs(additions):
        name, _, value = pair.partition("=")
        if name == "model" and value:
            beside = path.parent / value
            return str(beside) if beside.is_file() else value
    return None


def read_launch(path: Path, model: ModelSpec | str | None = None) -> LaunchRun:
    """What a launch file says, or a recipe of Megatron-Bridge by its name.

    Raises InputError if it is of no known kind.

    Parameters
    ----------
    path
        Of the file, or the name of a recipe of Megatron-Bridge.
    model
        That overrides of a recipe, and flags without sizes, are of; None where only the file says.
    """
    if megatron.is_recipe_name(path):
        return megatron.recipe_run(str(path))
    launch = launch_of_text(read_text(path, MAX_FILE_BYTES), path, model)
    return with_hosts_beside(finetuning.with_adapters_beside(launch, path), path)


def launch_of_text(text: str, path: Path, model: ModelSpec | str | None = None) -> LaunchRun:
    """What the text of a launch file says. Raises InputError if it is of no known kind.

    Parameters
    ----------
    text
        Of the file.
    path
        Its name tells the kind, and what lies beside it is read with it.
    model
        As `read_launch` takes it.
    """
    where = str(path)
    document = launch_document(path, text)
    if isinstance(document, dict) and not torchtitan.is_toml(text):
        return _from_document(document, path)
    refuse_adapters(fields_of(document), where)
    if isinstance(document, dict):
        return torchtitan.from_toml(document, path)
    line = _command_line(document, text, where)
    if isinstance(document, list) and megatron.are_overrides(document):
        overrides = [word for word in document if word.partition("=")[0] not in megatron.READ_APART]
        refuse_adapters(CommandLine(overrides, where).pairs(), where)
        return megatron.from_overrides(document, model, where)
    return _of_trainer(line, path, model) or _of_line(line, text, path, model)


def _of_line(line: CommandLine, text: str, path: Path, model: ModelSpec | str | None) -> LaunchRun:
    """The run of a command line of torchtitan, of our own scripts for accelerate and the Trainer, or of
    Megatron.
    """
    refuse_adapters(line.pairs(), str(path))
    config = torchtitan.config_file_of(line, path.parent)
    if config is not None or torchtitan.is_torchtitan(line):
        return _torchtitan(line, config, path)
    steps = _ACCUMULATION.search(text)
    if steps is not None:
        run = finetuning.from_accelerate(*_beside(path, "accelerate.yaml"))
        named = line.text(f"--{ACCELERATOR}")
        # Our scripts name the file by their own folder.
        said = {} if named is None else {ACCELERATOR: Path(named).name}
        run = finetuning.with_synced_batches(run, said, path)
        return with_notes(replace(run, micro_batches=int(steps[1])), text)
    if _OWN_TRAINER in text:
        run = with_notes(finetuning.from_deepspeed(*_beside(path, _DEEPSPEED_FILE)), text)
        return with_optimizer(run, {_OPTIM: line.text(f"--{_OPTIM}")}, _OPTIM)
    run = megatron.from_megatron(line, None if model is None else read_model(model))
    if line.has("--deepspeed_config") and (path.parent / _DEEPSPEED_FILE).is_file():
        return with_configuration(run, *_beside(path, _DEEPSPEED_FILE))
    return run


def _of_trainer(line: CommandLine, path: Path, model: ModelSpec | str | None) -> LaunchRun | None:
    """The run of a script that starts a fine-tuning stack; None for other scripts."""
    command = trainers.swift_command(line)
    if command is not None:
        run = trainers.from_swift(command, path, None if model is None else read_model(model))
        return with_optimizer(run, trainers.swift_fields(command, path), _OPTIM)
    program = reinforcement.verl_program(line)
    if program is not None:
        return reinforcement.from_verl(line, program, path)
    fields = fields_of_line(line)
    named = recipe_named(line)
    if named is not None:
        recipe = finetuning.file_beside(named, path, RECIPE)
        fields = read_mapping(recipe, MAX_FILE_BYTES) | fields
    stage, gpus = trainers.trl_stage(line), launched_gpus(line)
    if stage is not None:
        run = trainers.from_trainer(fields, path, gpus, stage)
        return with_optimizer(run, fields, _OPTIM)
    return _of_stack(fields, path, gpus)


_OPTIM = "optim"


def _of_stack(document: dict[str, Any], path: Path, gpus: int | None = None) -> LaunchRun | None:
    """The run of a configuration of a fine-tuning stack; None for other mappings."""
    for is_kind, run_of, optimizer in _STACKS:
        if not is_kind(document):
            continue
        if run_of is trainers.from_trainer:
            return with_optimizer(trainers.from_trainer(document, path, gpus), document, optimizer)
        run = run_of(document, path)
        if optimizer:
            run = with_optimizer(run, document, optimizer)
        return run if gpus is None else run.with_more({"gpus": gpus})
    return None


def _torchtitan(line: CommandLine, config: Path | None, path: Path) -> LaunchRun:
    """torchtitan's run of flags, and of the TOML file that a script names if any; the script's flags win."""
    if config is None:
        return torchtitan.from_torchtitan(line, path.parent)
    document = torchtitan.toml_document(read_text(config, MAX_FILE_BYTES), str(config))
    refuse_adapters(fields_of(document), str(config))
    return torchtitan.from_toml(document, path, line)


def with_configuration(run: LaunchRun, document: dict[str, Any], where: str) -> LaunchRun:
    """A run of Megatron-DeepSpeed's arguments with what only its ds_config.json says.

    Raises InputError for a value of the wrong kind.

    Parameters
    ----------
    run
        Of the arguments alone.
    document
        Of the ds_config.json.
    where
        The file's name, for messages.
    """
    of_file = finetuning.from_deepspeed(document, where).settings
    only_here = (
        "overlap",
        "shard_group",
        "bucket_parameters",
        "optimizer_offload",
        "parameter_offload",
        "optimizer_on_drives",
        "parameters_on_drives",
    )
    return run.with_more({name: of_file[name] for name in only_here if name in of_file})


def _beside(path: Path, name: str) -> tuple[dict[str, Any], str]:
    """A document that lies beside a launch script, and its name. Raises InputError if it is none."""
    beside = path.parent / name
    if not beside.is_file():
        raise InputError(f"is read with {name}, which does not lie beside it", where=str(path))
    document = read_mapping(beside, MAX_FILE_BYTES)
    refuse_adapters(fields_of(document), str(beside))
    return document, str(beside)


_IsKind = Callable[[dict[str, Any]], bool]
_RunOf = Callable[[dict[str, Any], Path], LaunchRun]
_STACKS: tuple[tuple[_IsKind, _RunOf, str], ...] = (
    (finetuning.is_llamafactory, finetuning.from_llamafactory, _OPTIM),
    (finetuning.is_axolotl, finetuning.from_axolotl, "optimizer"),
    (recipes.is_llamafactory_v1, recipes.from_llamafactory_v1, ""),
    (trainers.is_trainer, trainers.from_trainer, _OPTIM),
    (recipes.is_torchtune, recipes.from_torchtune, ""),
    (reinforcement.is_nemo_rl, reinforcement.from_nemo_rl, ""),
    (recipes.is_nanotron, recipes.from_nanotron, ""),
)
"""How a configuration is told, its reader, and its field of the optimizer where that is read by its name."""


def _from_document(document: dict[str, Any], path: Path) -> LaunchRun:
    where = str(path)
    of_stack = _of_stack(document, path)
    if of_stack is not None:
        return of_stack
    refuse_adapters(fields_of(document), where)
    if finetuning.is_accelerate(document):
        return finetuning.from_accelerate(document, where)
    if finetuning.BATCH in document or finetuning.MICRO_BATCH in document:
        return finetuning.from_deepspeed(document, where)
    if "run" in document or "runs" in document:
        raise InputError("this is a run file, no launch file: leave --from-launch out", where=where)
    raise InputError(
        "neither a DeepSpeed configuration (train_batch_size), nor an accelerate one (fsdp_config), nor one "
        "of LLaMA-Factory (model_name_or_path, template), Axolotl (base_model, sequence_len), transformers "
        "(per_device_train_batch_size), torchtune (model._component_), NeMo-RL (policy) or nanotron "
        "(model.model_config); a run file has its settings under `run`",
        where=where,
    )


def _command_line(document: object, text: str, where: str) -> CommandLine:
    """The words of a JSON list, or of a script."""
    if isinstance(document, list):
        return CommandLine(map(str, document), where)
    return words_of(text, where)


def complete(launch: LaunchRun, additions: Sequence[str], where: str) -> dict[str, Any]:
    """The run file's mapping: what the launch says, and what the caller adds.

    Parameters
    ----------
    launch
        What was read.
    additions
        `name=value` pairs, several of them joined by commas.
    where
        The launch file's name.

    Raises
    ------
    InputError
        A pair that no run file has, or a field that is still missing.
    """
    settings = dict(launch.settings)
    top: dict[str, object] = {"model": launch.model, "cluster": launch.cluster}
    for pair in _pairs(additions):
        name, sign, value = pair.partition("=")
        if not sign or name not in _FIELDS:
            raise InputError(
                "must be NAME=VALUE of a run file", where="--with", value=pair, allowed=_FIELDS
            )
        if name in _TOP_FIELDS:
            top[name] = value
        else:
            number = number_in(value) if name in _INTEGERS else None
            settings[name] = value if number is None else number
    if launch.micro_batches is not None and "micro_batch" not in settings:
        settings |= _micro_batch(launch.micro_batches, settings, where)
    settings = with_global_batch(
        launch, settings, _cluster_gpus(top["cluster"], Path(where).parent)
    )
    _say_what_is_frozen(settings, launch)
    missing = [name for name in _TOP_FIELDS if top[name] is None]
    batch = "gpus" if launch.local_batch is not None else "global_batch"
    missing += [name for name in ("seq_len", "global_batch") if name not in settings]
    missing = [batch if name == "global_batch" else name for name in missing]
    if missing:
        hint = " ".join(f"--with {name}=..." for name in missing)
        raise InputError(
            f"a launch file of this kind does not say {', '.join(missing)}: add {hint}", where=where
        )
    said = {name: value for name, value in settings.items() if value is not None}
    return {"id": Path(where).stem, **top, "run": said}


TEXT_ALONE = (
    "what sequences hold of images is for the data to say, and the price is that of text alone: say "
    "--with image_tokens=N, and images_per_sequence"
)


def _say_what_is_frozen(settings: dict[str, Any], launch: LaunchRun) -> None:
    """What a launch trains of an image encoder, where there are images."""
    if settings.get("image_tokens"):
        settings.setdefault("freeze_encoder", launch.images.frozen)


def run_of_inputs(launch: LaunchRun, inputs: PlanInputs, path: Path) -> Run:
    """A launch file's run of a plan's model; what the file leaves open is as the plan's inputs have it.

    Raises InputError where its settings do not fit together or to the plan's cluster.

    Parameters
    ----------
    launch
        What the file says.
    inputs
        Of a plan, which say the rest.
    path
        Of the file, for messages.
    """
    settings: dict[str, Any] = {
        "seq_len": inputs.seq_len,
        "precision": inputs.precision,
        "optimizer": inputs.optimizer,
        **launch.settings,
    }
    if "gpus" not in settings and "dp" not in settings:
        settings["gpus"] = inputs.gpus
    settings = with_global_batch(launch, settings, inputs.gpus)
    settings.setdefault("global_batch", inputs.global_batch)
    if launch.micro_batches is not None and "micro_batch" not in settings:
        settings |= _micro_batch(launch.micro_batches, settings, str(path))
    if settings.get("framework") in (DEEPSPEED.name, FSDP2.name):
        # Their files do not say what is trained; those of fine-tuning stacks do.
        settings.setdefault("adapters", inputs.adapters)
        if launch.base_is_open and _are_alike(settings["adapters"], inputs.adapters):
            settings["adapters"] = inputs.adapters
        if "kind" not in settings:
            passes = {"kind": inputs.kind, "reference": inputs.reference, "loss": inputs.loss}
            settings = passes | settings
    if inputs.images is not None:
        images = inputs.images
        said = {"image_tokens": images.tokens, "images_per_sequence": images.per_sequence}
        settings = said | settings
        _say_what_is_frozen(settings, launch)
    mapping = {"model": inputs.model, "cluster": inputs.cluster, "run": settings}
    run = run_from_mapping(
        mapping,
        where=str(path),
        base=path.parent,
        default_id=path.stem,
        calibration=inputs.calibration,
    )
    return on_its_hosts(run, launch)


def _are_alike(said: Mapping[str, Any], planned: AdapterSpec | None) -> bool:
    """Whether adapters of a file are those of a plan, but for the bits of the frozen weights."""
    of_launch = AdapterSpec.model_validate(said)
    return planned is not None and (
        of_launch.rank,
        of_launch.decomposed,
        peft_modules(of_launch),
    ) == (
        planned.rank,
        planned.decomposed,
        peft_modules(planned),
    )


def _cluster_gpus(cluster: object, folder: Path) -> int | None:
    """GPUs of a machine of one size, which a run takes whole where nothing else is said."""
    if not isinstance(cluster, str):
        return None
    beside = folder / cluster
    try:
        spec = read_cluster(str(beside) if beside.is_file() else cluster)
    except InputError:  # said again, with its place, where the run is read
        return None
    return None if spec.elastic else spec.gpus


def _micro_batch(count: int, settings: dict[str, Any], where: str) -> dict[str, int]:
    """Sequences of one of `count` micro-batches. Raises InputError where they do not divide."""
    batch, replicas = settings.get("global_batch"), settings.get("dp")
    if not isinstance(batch, int) or not replicas:
        return {}
    if count < 1 or batch % (count * replicas):
        words = f"is not a multiple of {count} micro-batches on dp {replicas}"
        raise InputError(words, where=f"{where}: global_batch", value=batch)
    return {"micro_batch": batch // (count * replicas)}


def launch_document(path: Path, text: str) -> object:
    """The file as JSON, YAML or TOML where it is one; None for a script or a command line.

    Parameters
    ----------
    path
        Its ending tells what the file is, where the text does not.
    text
        Of the file.
    """
    if torchtitan.is_toml(text):
        return torchtitan.toml_document(text, str(path))
    if path.suffix in (".json", ".yaml", ".yml") or text.lstrip()[:1] in ("[", "{"):
        return parse_document(text, path_text(path))
    return None
