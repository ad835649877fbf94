"""What a launch file says of a run, whichever framework it is for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from meshwright.cluster_specs.allocation import node_name
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.execution_names import STEP_KINDS
from meshwright.costmodel.layout import AXES
from meshwright.costmodel.losses import ALL_LOGITS
from meshwright.documents import read_text
from meshwright.errors import InputError, shown
from meshwright.frameworks.deepspeed import TRAINER_OPTIMIZERS
from meshwright.frameworks.fsdp2 import OPTIMIZER_CLASSES
from meshwright.planner.runs.launches.command_line import has_no_effect
from meshwright.planner.runs.run_file import MAX_FILE_BYTES, Run, places_on_hosts


@dataclass(frozen=True, kw_only=True)
class ImageFields:
    """What a launch file says of images. How many tokens of a sequence they are is the data's to say."""

    frozen: bool = False
    """Whether encoder and projector are left as they are."""
    parts: tuple[str, ...] = ()
    """Fields by which part of the two is trained, or adapters in them, which has no price."""
    sizes: tuple[str, ...] = ()
    """Fields that bound the size of an image: its tokens are known where somebody says them."""


def image_fields(
    document: Mapping[str, Any],
    frozen: Mapping[str, bool],
    sizes: Collection[str],
    *,
    has_adapters: bool,
) -> ImageFields:
    """What a document of a fine-tuning stack says of images.

    Parameters
    ----------
    document
        Of its fields.
    frozen
        Its switches that leave the encoder and the projector as they are, by their defaults.
    sizes
        Its fields that bound the size of an image.
    has_adapters
        Whether adapters are trained, which parts that are not frozen have too.
    """
    said = {name: document.get(name, usual) is True for name, usual in frozen.items()}
    trained = [name for name, on in said.items() if not on]
    is_part = has_adapters or len(trained) < len(said)
    return ImageFields(
        frozen=not trained,
        parts=tuple(trained) if is_part else (),
        sizes=tuple(name for name in sizes if document.get(name) is not None),
    )


@dataclass(frozen=True, kw_only=True)
class LaunchRun:
    """The parts of a run file that a launch file states."""

    settings: dict[str, Any]
    """The `run` section."""
    model: object = None
    """A mapping, a catalog name, or None where the file does not say."""
    cluster: str | None = None
    """A catalog name, where it says what it runs on."""
    hosts: tuple[str, ...] = ()
    """Where it starts, in the order of the ranks; empty where it does not say."""
    counted_hosts: tuple[str, ...] = ()
    """The same by the numbers of the nodes, where the plan's cluster names none and no `hosts` are known."""
    places: tuple[tuple[int, int], ...] = ()
    """(index into these hosts, local GPU) by rank, where ranks do not run through the hosts in turn."""
    local_batch: int | None = None
    """Sequences of a step on one data-parallel rank, where the global batch is so many times their number."""
    micro_batches: int | None = None
    """Of a step, where the file says so and not how large they are."""
    unread: tuple[str, ...] = ()
    """Flags or keys that were not understood."""
    remarks: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    """What it does not say of its `model`, and what is taken for it."""
    repeats_pipeline: bool = False
    """Whether a pipeline fills and drains several times a step, which the price of a run does not know."""
    images: ImageFields = ImageFields()
    base_is_open: bool = False
    """Whether it does not say of how many bits the frozen weights beside its adapters are."""

    def with_more(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        unread: Iterable[str] = (),
        remarks: Iterable[str] = (),
        **fields: Any,
    ) -> LaunchRun:
        """The run with what else its files say.

        Parameters
        ----------
        settings
            Over its own.
        unread, remarks
            Behind its own.
        fields
            Others, in place of its own.
        """
        return replace(
            self,
            settings=self.settings | dict(settings or {}),
            unread=(*self.unread, *unread),
            remarks=(*self.remarks, *remarks),
            **fields,
        )

    def not_read(self, *, has_images: bool) -> tuple[str, ...]:
        """Fields that were not understood, those of images among them that count in a run with some, or that
        leave open what it holds of them.

        Parameters
        ----------
        has_images
            Whether the run's model has an image encoder that its sequences use.
        """
        return (*self.unread, *(self.images.parts if has_images else self.images.sizes))


def with_global_batch(launch: LaunchRun, settings: dict[str, Any], gpus: object) -> dict[str, Any]:
    """Settings with the global batch that a launch's local one comes to on some GPUs.

    Parameters
    ----------
    launch
        With its local batch, or none.
    settings
        Of the run, what a caller adds included.
    gpus
        Of the cluster, where the settings do not say; None if they may be any number.
    """
    if launch.local_batch is None or "global_batch" in settings:
        return settings
    degrees = [settings.get(name, 1) for name in AXES if name != "dp"]
    replicas, gpus = settings.get("dp"), settings.get("gpus", gpus)
    if replicas is None and isinstance(gpus, int) and all(isinstance(n, int) for n in degrees):
        replicas = gpus // prod(degrees)
    if not isinstance(replicas, int) or replicas < 1:
        return settings
    return {**settings, "global_batch": launch.local_batch * replicas}


def section_of(document: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """A mapping inside a document, empty where it is absent. Raises InputError for anything else.

    Parameters
    ----------
    document
        Of the file.
    key
        Of the mapping.
    where
        The file's name, for messages.
    """
    value = document.get(key) or {}
    if not isinstance(value, dict):
        raise InputError("must be a mapping", where=f"{where}: {key}", value=value)
    return value


def whole_number(document: Mapping[str, Any], key: str, where: str) -> int | None:
    """A whole number of a document; None where it is absent or `auto`. Raises InputError otherwise.

    Parameters
    ----------
    document
        Of the file.
    key
        Of the number.
    where
        The file's name, for messages.
    """
    value = document.get(key)
    if value is None or value == "auto":
        return None
    if type(value) is not int:
        raise InputError("must be a whole number", where=f"{where}: {key}", value=value)
    return value


def unread_keys(
    document: Mapping[str, Any], kind: str, read: Collection[str], section: str = ""
) -> list[str]:
    """Keys of a document that no reader takes and that may change the price, as `section.key`.

    Parameters
    ----------
    document
        A mapping, of the whole file or of one section.
    kind
        The program whose configuration it is.
    read
        Keys that a reader takes.
    section
        Where it stands in the file; empty for the whole.
    """
    place = f"{section}." if section else ""
    named = {
        f"{place}{key}": _word(value) for key, value in document.items() if str(key) not in read
    }
    return [name for name, word in named.items() if not is_harmless(kind, name, word)]


def is_harmless(kind: str, name: str, word: str) -> bool:
    """Whether a field, or the launcher's flag of that name, leaves the price as it is.

    Parameters
    ----------
    kind
        The program, by its section of flag_effects.yaml.
    name
        Of the field.
    word
        Its value in words.
    """
    return has_no_effect(kind, name, word) or has_no_effect(kind, f"--{name}", word)


def with_optimizer(run: LaunchRun, document: Mapping[str, Any], key: str) -> LaunchRun:
    """A run with the optimizer that a configuration of a fine-tuning stack names.

    One that DeepSpeed's own configuration names goes before (transformers/integrations/deepspeed.py,
    deepspeed_optim_sched).

    Parameters
    ----------
    run
        As it is read without.
    document
        The configuration.
    key
        Where it has the name; a name that is not known stays among what is not read.
    """
    if document.get(_MUON) is True:
        key, name = _MUON, "muon"
    else:
        name = TRAINER_OPTIMIZERS.get(str(document.get(key)), "")
    if not name or "optimizer" in run.settings:
        return run
    unread = tuple(word for word in run.unread if word != key)
    return replace(run, settings=run.settings | {"optimizer": name}, unread=unread)


_NOTES = {
    "optimizer": re.compile(r"^The script makes ([\w.]+\w)"),
    "kind": re.compile(r"^The script's trainer is of (.+), such as that of TRL\.$"),
    "loss": re.compile(r"^Its loss is ([\w-]+):"),
    "reference": re.compile(r"^Its reference model is ([\w-]+)"),
    "micro_batch": re.compile(r"^The script's own batch size per process is (\d{1,9})"),
    "seq_len": re.compile(r", its sequence length (\d{1,9})\.$"),
    "offload_modules": re.compile(r"^Its trainer moves (saved) tensors to the host:"),
    "image_tokens": re.compile(r"^Its model reads images .*, (\d{1,9}) tokens of each sequence"),
    "images_per_sequence": re.compile(r" tokens of each sequence in (\d{1,9}) of them\.$"),
}
"""What notes of our own scripts say of the training script, by the field of a run file."""
_ALL_LOGITS_NOTE, _FROZEN_NOTE = "Its loss takes all logits", "It freezes the image encoder:"
_NOTED_AS: dict[str, Mapping[str, str]] = {
    "optimizer": {made: name for name, made in OPTIMIZER_CLASSES.items()},
    "kind": {kind.title: name for name, kind in STEP_KINDS.items()},
    "offload_modules": {"saved": "saved_tensors"},
}


def with_notes(run: LaunchRun, text: str) -> LaunchRun:
    """A run with what the notes of our own script say of the training script, which no file of it says.

    Parameters
    ----------
    run
        As its files say; what they say goes before.
    text
        Of the script.
    """
    notes = re.findall(r"^# Note: (.+)$", text, re.MULTILINE)
    noted: dict[str, Any] = {}
    for name, pattern in _NOTES.items():
        word = next((match[1] for note in notes if (match := pattern.search(note))), "")
        value = _NOTED_AS[name].get(word) if name in _NOTED_AS else word
        if value:
            noted[name] = int(value) if value.isdigit() else value
    if any(note.startswith(_ALL_LOGITS_NOTE) for note in notes):
        noted.setdefault("loss", ALL_LOGITS)
    noted = {name: value for name, value in noted.items() if name not in run.settings}
    if not noted:
        return run
    words = ", ".join(f"{name} {value}" for name, value in noted.items())
    local_batch = run.local_batch
    if local_batch is None and run.micro_batches is not None and "micro_batch" in noted:
        local_batch = run.micro_batches * noted["micro_batch"]
    is_frozen = any(note.startswith(_FROZEN_NOTE) for note in notes)
    remark = f"of the training script, its notes say: {words}"
    images = ImageFields(frozen=is_frozen)
    return run.with_more(noted, remarks=[remark], local_batch=local_batch, images=images)


_MUON = "use_muon"
"""LLaMA-Factory's switch (hparams/finetuning_args.py)."""


def _word(value: object) -> str:
    """A value as a command line would have it; a section that is off or empty is `none`."""
    if value is None or value in ({}, []):
        return "none"
    if isinstance(value, dict):
        return "none" if value.get("enabled") is False else "true"
    return str(value)


# The hosts that a launch script starts on, in the order of their ranks, as they lie beside it.
#
# `hostfile` has a host a line (DeepSpeed's and OpenMPI's may say slots behind it); `rankfile`, which our
# scripts have where ranks do not run through the hosts in turn, has lines `rank, line of hostfile from 0,
# local GPU`.


HOSTFILE, RANKFILE = "hostfile", "rankfile"


def with_hosts_beside(launch: LaunchRun, path: Path) -> LaunchRun:
    """A launch with the hosts of the files that lie beside it, if there are such.

    Raises InputError for a rankfile that cannot be read.

    Parameters
    ----------
    launch
        As it is read without.
    path
        Of the launch file.
    """
    hosts, counted = (
        tuple(line.split()[0] for line in _lines(path.parent / name))
        for name in (HOSTFILE, f"{HOSTFILE}.template")
    )
    if not hosts and not counted:
        return launch
    places = _places(path.parent / RANKFILE, len(hosts or counted))
    counted = () if hosts else counted
    return replace(launch, hosts=hosts, counted_hosts=counted, places=places)


def on_its_hosts(run: Run, launch: LaunchRun) -> Run:
    """A run whose ranks lie on the launch's hosts, where its cluster names them; else a remark why not.

    On a cluster that names none, ranks out of turn lie on its nodes by their numbers.

    Parameters
    ----------
    run
        That the launch is of, on its cluster.
    launch
        With names or numbers of hosts, or none.
    """
    cluster = run.workload.cluster
    if run.ranks:
        return run
    if not cluster.nodes:
        return _on_counted_nodes(run, launch) if launch.places else run
    words = _obstacle(cluster, launch, int(run.layout.gpus))
    if words is not None:
        remark = f"{words}: its ranks are priced as nested in the blocks of {cluster.name}"
        return replace(run, remarks=(*run.remarks, remark))
    numbers = {node.name: number for number, node in enumerate(cluster.nodes)}
    if launch.places:
        ranks = tuple((numbers[launch.hosts[host]], gpu) for host, gpu in launch.places)
    else:
        ranks = places_on_hosts(cluster, launch.hosts, int(run.layout.gpus))
    return replace(run, ranks=ranks)


def _on_counted_nodes(run: Run, launch: LaunchRun) -> Run:
    """A run on a cluster without names, whose ranks lie on nodes by the numbers of the launch.

    Hosts of the user's own are taken in the order of their lines.
    """
    cluster, gpus = run.workload.cluster, int(run.layout.gpus)
    count = -(-cluster.gpus // cluster.gpus_per_node)
    used = 1 + max(host for host, _ in launch.places)
    by_name = {node_name(cluster, number): number for number in range(count)}
    hosts = launch.hosts or launch.counted_hosts
    numbers = [by_name.get(name, line) for line, name in enumerate(hosts)]
    fits = used <= count and all(0 <= gpu < cluster.gpus_per_node for _, gpu in launch.places)
    ranks = tuple((numbers[host], gpu) for host, gpu in launch.places)
    if not fits or len(ranks) != gpus or len(set(ranks)) < gpus:
        remark = (
            f"{RANKFILE} has other ranks or GPUs than the launch's {gpus} on {count} nodes: its ranks are "
            f"priced as nested in the blocks of {cluster.name}"
        )
        return replace(run, remarks=(*run.remarks, remark))
    return replace(run, ranks=ranks)


def _obstacle(cluster: ClusterSpec, launch: LaunchRun, gpus: int) -> str | None:
    """Why the ranks of a launch cannot be placed on a cluster, in words."""
    if not launch.hosts:
        return f"no {HOSTFILE} lies beside the script"
    nodes = {node.name: node for node in cluster.nodes}
    unknown = sorted(set(launch.hosts) - nodes.keys())
    if unknown:
        return f"{HOSTFILE} has {shown(unknown[0])}, which the cluster has not"
    if launch.places:
        fits = all(0 <= gpu < cluster.gpus_per_node for _, gpu in launch.places)
        is_whole = fits and len(launch.places) == gpus
        return None if is_whole else f"{RANKFILE} has other ranks or GPUs than the launch's {gpus}"
    free = [nodes[name].free_gpus for name in launch.hosts]
    gpus_of_hosts = [cluster.gpus_per_node if count is None else count for count in free]
    if sum(gpus_of_hosts) < gpus:
        return f"{HOSTFILE} has {len(gpus_of_hosts)} hosts, too few for {gpus} ranks"
    in_turn = (
        sum(gpus_of_hosts) == gpus
        and len(set(gpus_of_hosts)) == 1
        and len(set(launch.hosts)) == len(gpus_of_hosts)
    )
    return None if in_turn else f"{HOSTFILE} has other hosts than {gpus} ranks fill in turn"


def _places(path: Path, hosts: int) -> tuple[tuple[int, int], ...]:
    """(line of the hostfile, local GPU) by rank; empty where there is no such file."""
    places: dict[int, tuple[int, int]] = {}
    for line in _lines(path):
        try:
            rank, host, gpu = map(int, line.split())
        except ValueError:
            what = "must be rank, line of hostfile and local GPU"
            raise InputError(what, where=str(path), value=line) from None
        if not 0 <= host < hosts or rank in places:
            raise InputError(
                f"must name each rank once, on one of {hosts} hosts", where=str(path), value=line
            )
        places[rank] = (host, gpu)
    if sorted(places) != list(range(len(places))):
        raise InputError("must have a line for every rank", where=str(path), value=len(places))
    return tuple(places[rank] for rank in range(len(places)))


def _lines(path: Path) -> list[str]:
    """What the lines of a file say, without comments; nothing where there is no such file."""
    if not path.is_file():
        return []
    said = (line.partition("#")[0].strip() for line in read_text(path, MAX_FILE_BYTES).splitlines())
    return [line for line in said if line]
