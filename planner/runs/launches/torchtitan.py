"""Flags of torchtitan's trainer as a run; the model is known for torchtitan's own configurations."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from meshwright.costmodel.schedules import schedule_named, traits
from meshwright.costmodel.workload import Fp8Recipe
from meshwright.documents import read_text
from meshwright.errors import InputError
from meshwright.frameworks.catalog import as_compiled
from meshwright.frameworks.torchtitan import (
    CHECKPOINTING,
    MODEL_PARTS,
    TORCHTITAN,
    TORCHTITAN_ARGUMENTS,
)
from meshwright.model_specs.reader import (
    NamedConfig,
    catalog_names,
    flavor_named,
    flavor_of_config,
    named_config,
)
from meshwright.planner.runs.launches.command_line import CommandLine, Said
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.run_file import MAX_FILE_BYTES
from meshwright.planner.runs.run_terms import EVERY_SECOND_LAYER

# What a registry module that we wrote says of a torchtitan run: stages and precision. It is not run.


_PRECISIONS = {"MXFP8LinearConverter": "mxfp8", "Float8LinearConverter": "fp8"}


def registry_settings(folder: Path, module: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Virtual stages, layers of each stage, and precision; empty where the module is not beside the script.

    Parameters
    ----------
    folder
        Of the launch script.
    module
        Name after `--module`.
    settings
        pp and schedule, as the flags have them.

    Raises
    ------
    InputError
        A module that is too large to read.
    """
    path = folder / f"{module}.py"
    if not re.fullmatch(r"[A-Za-z_]\w{0,99}", module) or not path.is_file():
        return {}
    text = read_text(path, MAX_FILE_BYTES)
    precisions = [name for key, name in _PRECISIONS.items() if f"{key}.Config(" in text]
    converted = {"precision": precisions[-1]} if precisions else {}
    return converted | stages_of_parts(_stage_names(text), settings)


def stages_of_parts(parts: object, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Virtual stages and layers of each stage; empty where the parts are no chunks of a pipeline.

    Parameters
    ----------
    parts
        `module_fqns_per_model_part`: a list of the names of its modules for each chunk, in the model's order.
    settings
        pp and schedule, as the flags have them.
    """
    pp = settings["pp"]
    listed = parts if isinstance(parts, list) else []
    if not listed or pp <= 1 or len(listed) % pp or not all(isinstance(x, list) for x in listed):
        return {}
    chunks = [sum(str(name).startswith("layers.") for name in part) for part in listed]
    # Layers of each [rank][virtual stage]; in a V-shaped schedule every second row runs back.
    v_shaped = traits(schedule_named(settings.get("schedule", "1f1b"))).v_shaped
    rows = [chunks[begin : begin + pp] for begin in range(0, len(chunks), pp)]
    ordered = [row[::-1] if v_shaped and index else row for index, row in enumerate(rows)]
    stages = [list(rank) for rank in zip(*ordered, strict=True)]
    return {"vpp": len(chunks) // pp, "stages": stages}


def _stage_names(text: str) -> list[list[str]]:
    """Module names of each chunk, in the model's order; empty where there are none."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.parse(text).body:
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                continue
            if node.targets[0].id == "STAGES":
                value = ast.literal_eval(node.value)
                return value if isinstance(value, list) else []
    return []


CONVERTERS = {
    "float8": "fp8",
    "quantize.linear.float8": "fp8",
    "mx": "mxfp8",
    "quantize.linear.mx": "mxfp8",
}
"""Precision of the run by the name in `converters` of `model`."""
_RECIPES = ("--quantize.linear.float8.recipe-name", "--float8.recipe-name")
"""Whether FP8 scales are by tensor or by row (torchtitan, components/quantization/float8.py)."""
_SCHEDULES = {setting.value.lower(): name for name, setting in TORCHTITAN.schedules.items()}
"""torch reads their names in any case (`get_schedule_class`)."""
_CHECKPOINTS = ("none", "selective", "full", "memory_budget")
_BY_OPERATOR, _EVERY_SECOND = "op", "2"
"""Values of `selective_ac_option`, whose default is the second."""


def is_torchtitan(line: CommandLine) -> bool:
    """Whether a command line has torchtitan's flags."""
    return line.has("--module") or any(word.startswith("--parallelism.") for word in line.words)


def from_torchtitan(command_line: CommandLine, folder: Path) -> LaunchRun:
    """The run of a torchtitan command line, with the stages and the precision of a module of ours beside it.

    A configuration of torchtitan's own sets what no flag says. Raises InputError for a value of the wrong
    kind.

    Parameters
    ----------
    command_line
        With torchtitan's flags.
    folder
        Of the script, in which a registry module of ours may lie.
    """
    line = command_line.with_dashes()
    config = named_config(line.text(TORCHTITAN_ARGUMENTS["configuration"].flag) or "")
    if config is not None:
        line = line.after(config.words)
    said = Said(line, TORCHTITAN_ARGUMENTS)
    model, remarks = _model(said)
    settings: dict[str, Any] = {
        **{word: said[word] for word in ("seq_len", "pp", "tp", "cp", "ep")},
        "overlap": {"dp": True, "pp": True},
        "moe_dispatch": "alltoall",
        "sequence_parallel": said["sequence_parallel"] and said["tp"] > 1,
        "framework": as_compiled(TORCHTITAN.name, compiled=_compiles(said)),
    }
    settings |= _sharding(said) | _batch(said) | _schedule(said)
    settings |= _precision(line, config)
    settings |= registry_settings(folder, said["module"] or "", settings)
    checkpointing, unread = _checkpointing(line)
    settings |= checkpointing
    gpus = line.torchrun_gpus()
    if gpus:
        settings["gpus"] = gpus
    repeated = _repeats_pipeline(said, settings)
    if repeated:
        what = "the pipeline fills and drains for every training.local_batch_size sequences"
        remarks.append(f"{what}, and is priced as filled once a step")
    unknown = [name for name in _converters(line) or [] if name not in CONVERTERS]
    unread += [f"--model.converters {name}" for name in unknown]
    return LaunchRun(
        settings=settings,
        model=model,
        local_batch=said["local_batch"],
        unread=(*line.unread("torchtitan"), *unread),
        remarks=tuple(remarks),
        repeats_pipeline=repeated,
    )


def _compiles(said: Said) -> bool:
    """Whether the model is compiled, and not the loss alone."""
    parts = said.line.several("--compile.components")
    return said["compiled"] and (not parts or "model" in ",".join(parts).split(","))


def _converters(line: CommandLine) -> list[str] | None:
    """Names of the model's converters; None where no flag says."""
    if not line.has("--model.converters"):
        return None
    return [name for text in line.several("--model.converters") for name in text.split(",") if name]


def _precision(line: CommandLine, config: NamedConfig | None) -> dict[str, str]:
    """The precision of the last converter that has one; nothing where none is said."""
    names = _converters(line)
    if names is not None:
        converters = [CONVERTERS[name] for name in names if name in CONVERTERS]
        precision = converters[-1] if converters else "bf16"
        recipe = next(filter(None, map(line.text, _RECIPES)), None)
        if precision == "fp8" and recipe and recipe in get_args(Fp8Recipe):
            return {"precision": precision, "fp8_recipe": recipe}
        return {"precision": precision}
    if config is not None and config.precision is not None:
        return {"precision": config.precision}
    return {}


def _sharding(said: Said) -> dict[str, int]:
    """ZeRO stage; where the flags give them, the data-parallel degree and the groups of replicas.

    Weights are sharded over dp_shard and cp together (torchtitan/distributed/fsdp.py, resolve_fsdp_mesh).
    """
    shards, replicas, reshard = said["shards"], said["replicas"], said["reshard"]
    keeps_parameters = reshard == "never" or (reshard == "default" and said["pp"] > 1)
    settings = {"zero_stage": 2 if keeps_parameters else 3}
    # Experts are sharded over what ep leaves, whatever the shard degree (parallel_dims.py, efsdp).
    one_shard = shards * said["cp"] == 1
    if one_shard and (replicas > 1 or (keeps_parameters and said["ep"] == 1)):
        settings["zero_stage"] = 0
    if shards > 0:
        settings["dp"] = replicas * shards
    if said["offloads"]:
        settings["optimizer_offload"] = 100
    if replicas > 1 and not one_shard:
        settings["shard_groups"] = replicas
    return settings


def _checkpointing(line: CommandLine) -> tuple[dict[str, Any], list[str]]:
    """What is recomputed, and what of it has no price.

    By operator: all but attention and every second product. By layer (`selective_ac_option` of n, up to 0.2):
    every n-th layer in full (torchtitan/distributed/activation_checkpoint.py of v0.2.2, _apply_layer_sac).
    """
    flag, option = "--activation-checkpoint.mode", "--activation-checkpoint.selective-ac-option"
    mode = line.text(flag)
    of_layers = line.text(option)
    early = mode is not None
    for word in line.words:
        if word.startswith(CHECKPOINTING):
            mode, early = word.removeprefix(CHECKPOINTING), False
    if mode is not None and mode not in _CHECKPOINTS:
        raise InputError(
            "is no kind of checkpointing",
            where=f"{line.where}: activation_checkpoint.mode",
            value=mode,
            allowed=_CHECKPOINTS,
        )
    if mode == "memory_budget":
        return {"recompute": "none"}, [f"{flag} memory_budget"]
    if mode != "selective":
        return {"recompute": "full" if mode == "full" else "none"}, []
    every = of_layers or (_EVERY_SECOND if early else _BY_OPERATOR)
    if every == _BY_OPERATOR:
        return {"recompute": "selective", "recompute_modules": [_BY_OPERATOR]}, []
    if every == _EVERY_SECOND:
        return {"recompute": "selective", "recompute_modules": [EVERY_SECOND_LAYER]}, []
    if every == "1":
        return {"recompute": "full"}, []
    return {"recompute": "full"}, [f"{option} {every}"]


def _batch(said: Said) -> dict[str, int]:
    local_batch = said["local_batch"]
    settings = {"micro_batch": said["micro_batch"] if said["pp"] > 1 else local_batch}
    dp = _sharding(said).get("dp")
    if said["global_batch"] > 0:
        settings["global_batch"] = said["global_batch"]
    elif dp is not None:
        settings["global_batch"] = local_batch * dp
    return settings


def _repeats_pipeline(said: Said, settings: Mapping[str, Any]) -> bool:
    """Whether a step is several local batches, one after the other through the pipeline."""
    if settings["pp"] == 1 or "dp" not in settings:
        return False
    return bool(settings.get("global_batch") != said["local_batch"] * settings["dp"])


def _schedule(said: Said) -> dict[str, Any]:
    schedule = _SCHEDULES.get(said["schedule"].lower(), "1f1b")
    if said["pp"] == 1:
        return {}
    if schedule in ("1f1b", "gpipe"):
        return {"schedule": schedule}
    # Two virtual stages are torchtitan's default; the registry module may say otherwise.
    return {"schedule": schedule, "vpp": 2}


def _model(said: Said) -> tuple[object, list[str]]:
    """The model where it is of torchtitan's own registry: a catalog name or its fields, and remarks."""
    family, name = said.line.text("--model.name"), said.line.text("--model.flavor")
    config, module = said["configuration"], said["module"]
    if family is not None:
        flavor = flavor_named(family, name or "debugmodel")
        words = f"{family} {name or 'debugmodel'}"
    else:
        flavor = flavor_of_config(config or "")
        words = f"{said.flag('module')} {module} {said.flag('configuration')} {config}"
    if flavor is None:
        return None, [f"the model of {words} is written in Python: name it yourself"]
    if flavor.model.name in catalog_names():
        return flavor.model.name, []
    return flavor.model.model_dump(exclude_none=True, exclude_defaults=True), []


# A torchtitan job of a TOML file, as torchtitan took them up to 0.2, as a run.
#
# Sections and keys are those of its flags (torchtitan/config/job_config.py of v0.2.0; before v0.1.0
# `batch_size` of `training`), so the file is read as the flags that say the same. A script names such a file
# in `CONFIG_FILE` or `--job.config_file`, and its own flags win over the file's.


_SECTION = re.compile(r"\s*(?:#[^\n]*\n\s*)*\[[A-Za-z_][\w.]*\]\s*(?:#[^\n]*)?(?:\n|$)")
OLD_NAMES = {"training.batch_size": "training.local_batch_size"}
"""Keys before v0.1.0, and what they are called since."""
_CONFIG_FLAGS = ("--job.config_file", "--job.config-file")
_CONFIG_VARIABLE, _GPUS_VARIABLE = "CONFIG_FILE", "NGPU"
"""What torchtitan's run_train.sh takes (v0.2.2)."""
_FOLDERS_ABOVE = 8
"""Above the script in which a file is looked for: scripts name it from the top of their repository."""
_DEEPEST = 6


def is_toml(text: str) -> bool:
    """Whether a text begins with a section of a TOML file, after comments."""
    return _SECTION.match(text) is not None


def toml_document(text: str, where: str) -> dict[str, Any]:
    """The sections of a TOML file. Raises InputError where it cannot be read.

    Parameters
    ----------
    text
        Of the file.
    where
        The file's name, for messages.
    """
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot be read: {str(error)[:200]}", where=where) from None


def config_file_of(line: CommandLine, folder: Path) -> Path | None:
    """The TOML file that a script names; None where it names none.

    Parameters
    ----------
    line
        The script's words.
    folder
        Where the script lies. The file lies as it is named, below that folder or one above it, or beside the
        script.

    Raises
    ------
    InputError
        It is named and lies nowhere.
    """
    flagged = (line.text(flag) for flag in _CONFIG_FLAGS)
    named = [name for name in (*flagged, line.variable(_CONFIG_VARIABLE)) if name]
    named = [name for name in named if name.lower().endswith(".toml")]
    if not named:
        return None
    name = Path(named[0])
    above = islice((folder.resolve(), *folder.resolve().parents), _FOLDERS_ABOVE)
    for place in (*(each / name for each in above), folder / name.name):
        if place.is_file():
            return place
    raise InputError(
        "names its configuration, which does not lie there: put the TOML file beside the script, or give the "
        "TOML file itself",
        where=line.where,
        value=named[0],
    )


def from_toml(
    document: Mapping[str, object], path: Path, script: CommandLine | None = None
) -> LaunchRun:
    """The run of a TOML file's sections, under the flags of a script that names it.

    Raises InputError where they are of another program.

    Parameters
    ----------
    document
        Of the TOML file.
    path
        Of the file.
    script
        That names it, whose flags win; None where there is none.
    """
    where = str(path)
    model, degrees = document.get("model"), document.get("parallelism")
    if not isinstance(model, Mapping) or not isinstance(degrees, Mapping):
        what = "torchtitan's TOML files have sections model and parallelism, this one has not"
        raise InputError(what, where=where)
    words = list(_words(document, where))
    line = CommandLine(words, where)
    if script is not None:
        line = script.after(words)
    run = from_torchtitan(line, path.parent)
    settings = run.settings | stages_of_parts(degrees.get(MODEL_PARTS), run.settings)
    settings.setdefault("precision", "bf16")
    gpus = line.variable(_GPUS_VARIABLE) or ""
    if "gpus" not in settings and re.fullmatch(r"\d{1,6}", gpus):
        settings["gpus"] = int(gpus)
    return replace(run, settings=settings)


def _words(document: Mapping[str, object], where: str) -> Iterator[str]:
    """The flags that say what the sections say."""
    # The default of every release with TOML files, of each second layer.
    yield from ("--activation-checkpoint.mode", "selective")
    for section, settings in document.items():
        if not isinstance(settings, Mapping):
            raise InputError("must be a section", where=f"{where}: {section}", value=settings)
        yield from _section(section, settings)


def _section(name: str, settings: Mapping[str, object], depth: int = 0) -> Iterator[str]:
    for key, value in settings.items():
        place = f"{name}.{key}"
        if isinstance(value, Mapping) and depth < _DEEPEST:
            yield from _section(place, value, depth + 1)
        elif key != MODEL_PARTS:
            yield from _flag(OLD_NAMES.get(place, place), value)


def _flag(name: str, value: object) -> Iterator[str]:
    """A switch for a truth, a flag with its value for all else."""
    section, _, key = name.rpartition(".")
    if isinstance(value, bool):
        yield f"--{name}" if value else f"--{section}.no-{key}"
    elif isinstance(value, list):
        yield from (f"--{name}", ",".join(map(str, value)))
    else:
        yield from (f"--{name}", str(value))
