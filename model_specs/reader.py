"""Turns what a user gives for MODEL into a ModelSpec: a catalog name, a model YAML, or a config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from pydantic import ValidationError

from meshwright.documents.reader import is_file, path_text, read_mapping
from meshwright.documents.validation import validation_message
from meshwright.errors import InputError, given_path, near_miss
from meshwright.model_specs.catalog import catalog_names, load_catalog_model
from meshwright.model_specs.huggingface import is_huggingface_config, model_from_huggingface
from meshwright.model_specs.schema import ModelSpec

_SUFFIXES = (".yaml", ".yml", ".json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
"""What the Hugging Face hub calls a model: its owner and its name."""


def read_model(model: str | PathLike[str] | ModelSpec) -> ModelSpec:
    """The model of a catalog name or a file.

    Parameters
    ----------
    model
        Catalog name, path of a model YAML or of a Hugging Face config.json or of its folder, or a spec, which
        is returned as it is. A catalog name wins over a file of the same name; write `./NAME` for the file.

    Returns
    -------
    ModelSpec
        Layers, widths, experts and what else prices need.

    Raises
    ------
    InputError
        If there is no such model, or the file cannot be used.

    Examples
    --------
    >>> read_model("llama-3-8b").hidden
    4096
    """
    if isinstance(model, ModelSpec):
        return model
    text = given_path(model, "model")
    if text in catalog_names():
        return load_catalog_model(text)
    path = Path(text)
    if text and is_file(f"{text}/config.json"):
        path = path / "config.json"
    _refuse_hub_id(text)
    looks_like_path = text.lower().endswith(_SUFFIXES) or "/" in text
    if not text or not (looks_like_path or is_file(str(path))):
        raise InputError(
            "neither a model of the catalog nor a file",
            where="model",
            value=text,
            did_you_mean=near_miss(text, catalog_names()),
            allowed=("a model YAML", "a Hugging Face config.json", *catalog_names()),
        )
    return model_from_mapping(read_mapping(path), path_text(path), name=_file_name(path))


def model_from_mapping(
    data: Mapping[str, object], where: str, name: str | None = None
) -> ModelSpec:
    """The model that a mapping describes: fields of ModelSpec, or those of a config.json.

    `where` names the mapping in errors (a file, and a path inside it); `name` is the model's where the
    mapping itself gives none. Raises InputError.
    """
    if not isinstance(data, Mapping):
        raise InputError("must be a mapping of fields", where=where, value=data)
    if is_huggingface_config(data):
        return model_from_huggingface(data, where, name)
    named = {"name": name} if name and "name" not in data else {}
    try:
        return ModelSpec.model_validate({**named, **data})
    except ValidationError as error:
        raise InputError(validation_message(error, where, ModelSpec)) from None


def _refuse_hub_id(text: str) -> None:
    """Raises InputError for the name of a model on the Hugging Face hub, whose files are not here."""
    if not _HUB_ID.fullmatch(text) or text.lower().endswith(_SUFFIXES):
        return
    owner, name = text.split("/")
    if Path(owner).is_dir():
        return
    raise InputError(
        f"no file or folder of this name, and nothing is fetched from the Hugging Face hub; if it is a model "
        f"there, download its config.json with `hf download {text} config.json --local-dir {name}` "
        f"and give {name}/config.json",
        where="model",
        value=text,
    )


def _file_name(path: Path) -> str:
    """What to call a model by its file; a config.json is called by its directory."""
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return name[:200] or "model"
