"""From what a user gives to a request: names and files are read, pins and forbidden choices taken apart."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from meshwright.cluster_specs.allocation import allocated_gpus, lies_alike, of_nodes, only_nodes
from meshwright.cluster_specs.importers.facts import MOST_NODES, expand
from meshwright.cluster_specs.reader import cluster_names, read_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import free_by_name
from meshwright.costmodel.calibration import Calibration, constants_digest
from meshwright.documents import (
    LARGE_FILE_BYTES,
    is_file,
    path_of,
    path_text,
    read_mapping,
    read_text,
    validated,
)
from meshwright.errors import InputError, refuse_unknown, shown, texts_of
from meshwright.model_specs.adapters import EVERY_PARAMETER, read_adapters
from meshwright.model_specs.blocks import ImageInput
from meshwright.model_specs.reader import read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.request.executions import parse_allow, parse_without
from meshwright.planner.request.plan_request import (
    PlanRequest,
    parse_forbids,
    parse_inside_domain,
    parse_pins,
)

# The stack file that `meshwright calibrate` writes and `--calibration` reads.


MOST_BYTES = 256 * 2**10
_HEAD = """# What measured runs say of the constants of the cost model, as factors on the shipped ones.
# Written by `meshwright calibrate`, read by `--calibration`.
"""


def read_calibration(given: str | PathLike[str] | Calibration | None) -> Calibration | None:
    """A stack file as it was written.

    Parameters
    ----------
    given
        Path of the file, or what was read before.

    Returns
    -------
    Calibration or None
        None where nothing was given.

    Raises
    ------
    InputError
        If the file cannot be used, or goes with other constants than those of this version.
    """
    if given is None or isinstance(given, Calibration):
        return given
    path = path_of(given, "calibration")
    where = path_text(path)
    document = dict(read_mapping(path, MOST_BYTES))
    if document.pop("schema", None) != 1:
        raise InputError("must be 1: not a stack file of this version", where=f"{where}: schema")
    calibration = validated(Calibration, document, where)
    if calibration.constants != constants_digest():
        raise InputError(
            "was calibrated against other constants than this version ships; "
            "run `meshwright calibrate` again on the same runs",
            where=f"{where}: constants",
        )
    return calibration


def calibration_text(calibration: Calibration) -> str:
    """The text of a stack file.

    Parameters
    ----------
    calibration
        The stack.

    Returns
    -------
    str
        YAML.
    """
    document: dict[str, Any] = {"schema": 1, **calibration.model_dump(mode="json")}
    flat = yaml.safe_dump(document, sort_keys=False, width=120, default_flow_style=None)
    return f"{_HEAD}{flat}"


def read_request(
    *,
    model: str | PathLike[str] | ModelSpec,
    cluster: str | PathLike[str] | ClusterSpec | Mapping[str, object],
    gpus: int | None = None,
    pin: Mapping[str, int | str] | str = "",
    forbid: Iterable[str] | str = (),
    without: Iterable[str] | str = (),
    allow: Iterable[str] | str = (),
    inside_domain: Iterable[str] | str = (),
    moe_dispatch: str | None = None,
    expert_loads: str | PathLike[str] | None = None,
    calibration: str | PathLike[str] | Calibration | None = None,
    nodes: str | Collection[str] | None = None,
    train: str = EVERY_PARAMETER,
    lora_rank: int | None = None,
    lora_targets: Iterable[str] | str | None = None,
    image_tokens: int = 0,
    images_per_sequence: int | None = None,
    freeze_encoder: bool = False,
    seq_len: int | None = None,
    lengths: str | PathLike[str] | None = None,
    pack_size: int | None = None,
    packing: str | None = None,
    hybrid_cp: bool = False,
    **options: Any,
) -> PlanRequest:
    """The request for a model and a cluster, each a name, a file or a spec.

    Parameters
    ----------
    gpus
        The first so many GPUs of the cluster; all of them when None.
    pin
        `tp=8,pp=4`, or a mapping.
    forbid
        `cp,full-recompute`, or several such texts.
    without
        `deepep,cuda-graph`, or several such texts: software that is not there.
    allow
        `bf16-grads,fp8-params`, `all`, or several such texts: what may change the numbers of the run.
    inside_domain
        `tp,cp`, or several such texts: axes whose groups each lie in one NVLink domain.
    moe_dispatch
        The dispatcher, as a pin; chosen when None.
    expert_loads
        File of measured routing.
    calibration
        A stack file, or what one holds.
    nodes
        Host list, a file of them, or names, that the choice of nodes is limited to (`limited_to_nodes`).
    train, lora_rank, lora_targets
        What is trained (`read_adapters`).
    image_tokens, images_per_sequence, freeze_encoder
        What sequences hold of images (`read_images`).
    seq_len
        Tokens per sequence; None with `lengths`.
    lengths
        File of the lengths of training samples (`read_lengths`), which sequences are packs of.
    pack_size, packing
        Tokens of a pack, and how packs are filled, as `read_packed` has them; None for its default, and
        for first-fit.
    hybrid_cp
        Whether hybrid context parallelism deals the samples of packs to ranks one by one.
    options
        Further fields of PlanRequest.

    Raises
    ------
    InputError
        If a name, a file or a field cannot be used.
    """
    check_options(options)
    if isinstance(model, str) and model in cluster_names():
        raise InputError("is a cluster: say it behind --cluster", where="model", value=model)
    cluster_spec = limited_to_nodes(read_cluster(cluster, gpus), nodes)
    model_spec = read_model(model)
    gpu_count = allocated_gpus(cluster_spec, gpus)
    dealt_on = gpu_count if hybrid_cp else 0
    sequences = _sequences(model_spec, seq_len, lengths, pack_size, packing, dealt_on=dealt_on)
    measured = None
    if expert_loads is not None:
        from meshwright.planner.experts.training import read_expert_loads

        path = path_of(expert_loads, "expert_loads")
        measured = read_expert_loads(path, model_spec, gpu_count)
    if not isinstance(pin, str | Mapping):
        raise InputError("must be a text such as tp=8,pp=4, or a mapping", where="pin", value=pin)
    pins = parse_pins(pin) if isinstance(pin, str) else dict(pin)
    if moe_dispatch is not None:
        pins["moe_dispatch"] = moe_dispatch
    return PlanRequest(
        model=model_spec,
        cluster=cluster_spec,
        gpus=gpu_count,
        expert_loads=measured,
        calibration=read_calibration(calibration),
        adapters=read_adapters(train, lora_rank, lora_targets),
        images=read_images(image_tokens, images_per_sequence, frozen=freeze_encoder),
        pins=pins,
        without=parse_without(without),
        allow=parse_allow(allow),
        forbids=parse_forbids(forbid),
        inside_domain=parse_inside_domain(inside_domain),
        **sequences,
        **options,
    )


_WITHOUT_DEFAULT = ("global_batch",)
_MADE_HERE = ("pins", "forbids", "execution_options")
"""Fields of a request that its reader makes of arguments under other names."""


def check_options(options: Collection[str], *others: str) -> None:
    """Raises InputError for a name that is no option of a plan, and where one that has no default is missing.

    Parameters
    ----------
    options
        Names, or a mapping with them, beside the model.
    others
        Further names that are allowed.
    """
    code = read_request.__code__
    of_request = [each.name for each in fields(PlanRequest) if each.name not in _MADE_HERE]
    names = dict.fromkeys([*code.co_varnames[: code.co_kwonlyargcount], *of_request, *others])
    refuse_unknown(options, names, where="options of a plan")
    for name in _WITHOUT_DEFAULT:
        if name not in options:
            raise InputError("is missing: give a whole number", where=name)


def read_images(
    tokens: int, per_sequence: int | None = None, *, frozen: bool = False
) -> ImageInput | None:
    """What sequences hold of images.

    Parameters
    ----------
    tokens
        Of all images of a sequence, as the language model reads them; 0 for text alone.
    per_sequence
        Images that share them evenly, at least 1; None for one, or for as many as a fixed size makes.
    frozen
        Whether the encoder and its projector are left as they are.

    Returns
    -------
    ImageInput or None
        None for text alone.

    Raises
    ------
    InputError
        Out of range, and where more is said of images that there are none of.
    """
    if tokens == 0 and not isinstance(tokens, bool):
        for name, value in (
            ("images_per_sequence", per_sequence),
            ("freeze_encoder", frozen or None),
        ):
            if value is not None:
                raise InputError("goes with image_tokens alone", where=name, value=value)
        return None
    fields = {"tokens": tokens, "per_sequence": per_sequence, "frozen": frozen}
    return validated(ImageInput, fields, "images")


def _sequences(
    model: ModelSpec,
    seq_len: int | None,
    lengths: str | PathLike[str] | None,
    pack_size: int | None,
    packing: str | None,
    *,
    dealt_on: int,
) -> dict[str, Any]:
    """What sequences are: of one length, or packs of samples; as fields of PlanRequest."""
    if lengths is None:
        options = ("pack-size", pack_size), ("packing", packing), ("hybrid-cp", dealt_on or None)
        for name, value in options:
            if value is not None:
                raise InputError("goes with --lengths alone", where=name, value=value)
        if seq_len is None:
            what = "give the tokens of a sequence, or the lengths of samples with --lengths"
            raise InputError(what, where="seq-len")
        return {"seq_len": seq_len}
    if seq_len is not None:
        what = "does not go with --lengths, which packs samples: give --pack-size"
        raise InputError(what, where="seq-len", value=seq_len)
    from meshwright.planner.request.length_file import read_packed

    path = path_of(lengths, "lengths")
    packing = packing or "first-fit"
    size, packed, other_packings = read_packed(path, model, pack_size, packing, dealt_on)
    return {"seq_len": size, "lengths": packed, "other_packings": other_packings}


def limited_to_nodes(cluster: ClusterSpec, nodes: str | Collection[str] | None) -> ClusterSpec:
    """The cluster with only some of its listed nodes free.

    A kind of node in any number, all of whose nodes lie alike, becomes the nodes that are named.

    Parameters
    ----------
    cluster
        The machine.
    nodes
        As `named_nodes` takes them, or the names themselves.

    Raises
    ------
    InputError
        If the text is no host list, or names a node that the cluster does not list.
    """
    names = None if nodes is None or isinstance(nodes, str) else texts_of(nodes, "nodes")
    if nodes is not None and lies_alike(cluster):
        free = dict.fromkeys(names or (), cluster.gpus_per_node)
        if isinstance(nodes, str):
            free = {
                name: gpus
                for host in _hosts(nodes)
                for name, gpus in _slots_of(host, cluster.gpus_per_node)
            }
        if not any(name.isdecimal() for name in free):
            return of_nodes(cluster, free)
    if nodes is None or isinstance(nodes, str):
        names = named_nodes(nodes, free_by_name(cluster))
    return cluster if names is None else only_nodes(cluster, names)


def named_nodes(nodes: str | None, listed_gpus: Mapping[str, int]) -> list[str] | None:
    """The names of a host list.

    Parameters
    ----------
    nodes
        A Slurm host list such as `rack[0-1]n[00-15]`, or a file with one or several a line; `slots=N` behind
        a host, as DeepSpeed and Open MPI read it, must be its free GPUs. When None, the nodes of the Slurm
        job that this runs in ($SLURM_JOB_NODELIST), where any nodes are listed.
    listed_gpus
        The nodes that there are, with their free GPUs.

    Returns
    -------
    list of str or None
        None where nothing says which nodes.

    Raises
    ------
    InputError
        If the text is no host list, a host has other slots than free GPUs, or the Slurm job has a node that
        is not listed.
    """
    if nodes is None:
        job = os.environ.get("SLURM_JOB_NODELIST")
        if not job or not listed_gpus:
            return None
        names = _expanded(job, "SLURM_JOB_NODELIST")
        missing = [name for name in names if name not in listed_gpus]
        if missing:
            and_more = f" (nor {len(missing) - 1} of its other nodes)" if missing[1:] else ""
            raise InputError(
                f"the cluster lists no node {shown(missing[0])} of this Slurm job{and_more}: add it to the "
                "cluster's nodes, name nodes with --nodes, or unset this variable to plan on all of them",
                where="SLURM_JOB_NODELIST",
                value=job,
            )
        return names
    return _expanded(",".join(_without_slots(host, listed_gpus) for host in _hosts(nodes)), "nodes")


def _hosts(nodes: str) -> list[str]:
    """The lines of a host file, or the host list itself."""
    if not is_file(nodes):
        return [nodes]
    lines = read_text(Path(nodes), LARGE_FILE_BYTES).splitlines()
    hosts = [line.split("#")[0].strip() for line in lines]
    return [host for host in hosts if host]


def _slots_of(host: str, most: int) -> list[tuple[str, int]]:
    """The names of a line of a host file, each with its slots, or all GPUs of a node where none are said."""
    said = _SLOTS.fullmatch(host)
    names = _expanded(host if said is None else said[1], "nodes")
    slots = most if said is None else int(said[2])
    if slots > most:
        raise InputError(f"a node has {most} GPUs, not {slots}", where="nodes", value=host)
    return [(name, slots) for name in names]


_SLOTS = re.compile(r"(\S+)\s+slots=(\d{1,6})(?:\s+max[-_]slots=\d+)?")


def _without_slots(host: str, listed_gpus: Mapping[str, int]) -> str:
    """A line of a host file without the `slots=N` behind its name."""
    said = _SLOTS.fullmatch(host)
    if said is None:
        return host
    name, slots = said[1], int(said[2])
    gpus = listed_gpus.get(name, slots)
    if slots != gpus:
        what = f"{name} has {gpus} free GPUs, not {slots}: say its `free_gpus` in the cluster file"
        raise InputError(what, where="nodes", value=host)
    return name


def _expanded(text: str, where: str) -> list[str]:
    """The names of a host list that `where` gives."""
    try:
        return expand(text, MOST_NODES)
    except InputError as error:
        raise InputError(f"no host list: {error}", where=where) from None
