"""The shape that every framework's launch has: a program, its arguments, its environment, its own files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.constraints.memory import HbmCapacity
from meshwright.constraints.registry import findings
from meshwright.constraints.rule import FinishedPlan
from meshwright.costmodel.data_parallel import bucket_parameters
from meshwright.costmodel.execution_names import PRETRAINING
from meshwright.costmodel.losses import in_chunks
from meshwright.costmodel.stacks import stack_constants
from meshwright.costmodel.workload import Execution, Workload, swapping_ranks
from meshwright.errors import InfeasibleError
from meshwright.frameworks.catalog import framework_named, planned
from meshwright.frameworks.record import Argument, Framework
from meshwright.model_specs.schema import ModelSpec, stated_fields
from meshwright.planner.drawing import one_line
from meshwright.planner.launch.rank_files import PlacedRanks, placed_ranks, planned_layout
from meshwright.planner.plan.document import Plan
from meshwright.planner.request.choices import ALLOW_PLACED, DEGREES, OF_LAYOUT
from meshwright.planner.request.executions import RunQuestion
from meshwright.planner.request.plan_request import PlanInputs
from meshwright.planner.runs.prediction import planned_workload
from meshwright.planner.runs.run_terms import LayoutDoc, layout_from_document

# The last look before a launch: the plan against every rule of the framework it is launched in.


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A plan that a framework can start, and the places of its ranks in that framework's order."""

    plan: Plan
    layout: LayoutDoc
    execution: Execution
    """Overlaps, dispatcher and graphs that the price assumes, so that the launch files ask for them."""
    placed: PlacedRanks
    bucket_parameters: int
    """Parameters whose gradients are reduced together, the framework's own number included; 0 where buckets
    are not of a set size."""

    context_sizes: tuple[str, str]
    """Ranks that swap heads for tokens, and ranks of the rings that join these groups, in a2a+p2p."""

    @property
    def inputs(self) -> PlanInputs:
        """What was planned: model, cluster, batch, precision."""
        return self.plan.inputs


def legal_launch(plan: Plan, framework: Framework, *, own_steps: bool = False) -> Launch:
    """The plan as a framework starts it.

    Memory is not judged again: that takes a cost model.

    Parameters
    ----------
    plan
        A plan, of this framework or of another.
    framework
        The one that shall start it.
    own_steps
        Whether a stack starts it that has every kind of step of the framework, whose own scripts do not.

    Raises
    ------
    InfeasibleError
        The plan has no layout or no place for a rank, or it breaks rules of the framework: every one of them
        with its remedy.
    """
    layout = planned_layout(plan)
    kind, vision = plan.inputs.kind, plan.inputs.model.encoder
    if kind != PRETRAINING and kind not in framework.step_kinds:
        raise InfeasibleError(f"{framework.title} has no {kind}: nothing to launch.")
    if vision is not None and vision.kind not in framework.image_encoders:
        raise InfeasibleError(f"{framework.title} runs no image encoder of {vision.kind}.")
    deals = plan.inputs.lengths is not None and bool(plan.inputs.lengths.dealt)
    if deals and framework.hybrid_context is None:
        raise InfeasibleError(f"{framework.title} has no hybrid context parallelism.")
    for what, why in _unlaunched(plan.inputs, framework).items():
        if own_steps and what == kind:
            continue
        raise InfeasibleError(f"No launch files for {what}: {why}.")
    adapters = plan.inputs.adapters
    if adapters is not None and adapters.method not in planned(framework.adapters):
        raise InfeasibleError(
            f"{framework.title} has no launch files for {adapters.method}: they would train every parameter."
        )
    place, loss = plan.inputs.reference, in_chunks(plan.inputs.loss)
    if place is not None and place not in framework.references:
        raise InfeasibleError(f"{framework.title} keeps no reference that is {place}.")
    if loss is not None and loss not in framework.losses:
        raise InfeasibleError(f"{framework.title} has no {loss} loss.")
    execution = _execution(plan, framework)
    workload = execution.applied(replace(planned_workload(plan.inputs), framework=framework.name))
    broken = _broken_rules(workload, layout)
    if broken:
        raise InfeasibleError(f"{framework.name} cannot start this plan.\n" + "\n".join(broken))
    degrees = layout_from_document(layout)
    bucket = bucket_parameters(workload, stack_constants(workload), degrees)
    neighbours = int(swapping_ranks(workload, degrees))
    return Launch(
        plan=plan,
        layout=layout,
        execution=execution,
        placed=placed_ranks(plan, framework),
        bucket_parameters=round(float(np.asarray(bucket))),
        context_sizes=(str(neighbours), str(layout.cp // neighbours)),
    )


def unlaunched(inputs: PlanInputs) -> str:
    """Why scripts of the plan's framework have no such step or model; empty where they have it.

    Parameters
    ----------
    inputs
        Of a plan; the kind of step and the images are looked at.
    """
    return next(iter(_unlaunched(inputs, framework_named(inputs.framework)).values()), "")


def _unlaunched(inputs: PlanInputs, framework: Framework) -> dict[str, str]:
    """What of a plan no launch file carries, and why."""
    vision, kind = inputs.model.encoder, framework.step_kinds.get(inputs.kind)
    encoder = None if vision is None else framework.image_encoders.get(vision.kind)
    reasons: dict[str, str] = {inputs.kind: "" if kind is None else kind.in_launch}
    reasons["images"] = "" if encoder is None else encoder.in_launch
    return {what: why for what, why in reasons.items() if why}


def _execution(plan: Plan, framework: Framework) -> Execution:
    """The plan's own; the plainest of the framework where it was made for another, or says nothing."""
    execution = plan.execution
    inputs = plan.inputs
    if execution is not None and inputs.framework == framework.name:
        return execution
    pins = {"moe_dispatch": inputs.pins["moe_dispatch"]} if "moe_dispatch" in inputs.pins else {}
    pins = pins if inputs.framework == framework.name else {}
    question = RunQuestion(
        framework=framework,
        model=inputs.model,
        cluster=inputs.cluster,
        pins=pins,
        precision=inputs.precision,
    )
    layout = layout_from_document(planned_layout(plan))
    return question.options().executions()[0].of_layout(layout)


def _broken_rules(workload: Workload, layout: LayoutDoc) -> list[str]:
    finished = FinishedPlan(
        workload=workload,
        layout=layout_from_document(layout),
        stages=tuple(tuple(rank) for rank in layout.stages),
    )
    return [finding.line for finding in findings(finished, without=(HbmCapacity.name,))]


# launch.sh, which starts a run on every node: in a Slurm allocation, or by hand.


_HEADER = """\
#!/usr/bin/env bash
# Starts {framework} for {title}.
#{notes}
# In a Slurm allocation of the plan's nodes:       bash launch.sh slurm [{more}]
# By hand, on each of those nodes:                 bash launch.sh node [{more}]
#
# {usage}
# The folder of this script must be visible on all nodes. MASTER_PORT is 29500 unless set. The node's place in
# hostfile is NODE_RANK, else its place in the Slurm job step, else where its host name stands.
set -euo pipefail

here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
"""

LISTED_HOSTS = 'mapfile -t hosts < "$here/hostfile"\n'
"""Shell line that fills `hosts` where the plan names them."""

_JOB_HOSTS = """\
# The plan's cluster names no hosts. They are those of hostfile, if you make one of hostfile.template; else
# the job's, in the scheduler's order, and the planned nodes of every block stay next to each other.
hosts=()
if [ -s "$here/hostfile" ]; then
  mapfile -t hosts < "$here/hostfile"
else
  allocated=()
  if [ -n "${{SLURM_JOB_NODELIST:-}}" ]; then
    mapfile -t allocated < <({hostnames})
  elif [ -n "${{PBS_NODEFILE:-}}" ]; then
    mapfile -t allocated < <(awk '!seen[$0]++' "$PBS_NODEFILE")
  fi
  {turns}
  if [ "${{#allocated[@]}}" -eq 0 ] && [ "${{#turns[@]}}" -eq 1 ]; then allocated=("$(hostname)"); fi
  if [ "${{#allocated[@]}}" -gt 0 ] && [ "${{#allocated[@]}}" -ne "${{#turns[@]}}" ]; then
    echo "the job has ${{#allocated[@]}} nodes, the plan needs ${{#turns[@]}}" >&2
    exit 2
  fi
  if [ "${{#allocated[@]}}" -gt 0 ]; then
    for turn in "${{turns[@]}}"; do hosts+=("${{allocated[$turn]}}"); done
  fi
fi
"""
"""Shell lines that fill `hosts`, with the command that prints those of a Slurm job, and their turns."""

_CHECK_JOB_HOSTS = """\
if [ "${{#hosts[@]}}" -eq 0 ] && {{ [ -z "${{NODE_RANK:-}}" ] || [ -z "${{MASTER_ADDR:-}}" ]; }}; then
  echo "launch.sh: which hosts? Start inside a job, or make hostfile of hostfile.template," \\
    "or set NODE_RANK and MASTER_ADDR on every node" >&2
  exit 2
fi
if [ "${{#hosts[@]}}" -ne 0 ] && [ "${{#hosts[@]}}" -ne {hosts} ]; then
  echo "launch.sh: there are ${{#hosts[@]}} hosts, the plan needs {hosts} nodes" >&2
  exit 2
fi
"""

_CHECK_HOSTS = """\
if [ "${{#hosts[@]}}" -ne {hosts} ]; then
  echo "launch.sh: hostfile has ${{#hosts[@]}} lines, the plan needs {hosts} nodes" >&2
  exit 2
fi
"""

_SLURM = """\
mode=${{1:-}}
if [ "$#" -gt 0 ]; then shift; fi
case "$mode" in
  slurm)
{parts}    # One task per host, in their order; --nodelist would sort the names.
    ordered=$(mktemp)
    printf '%s\\n' "${{hosts[@]}}" > "$ordered"
    SLURM_HOSTFILE="$ordered" exec srun --distribution=arbitrary --nodes={hosts} --ntasks={hosts} \\
      --kill-on-bad-exit=1 bash "$here/launch.sh" node "$@"
    ;;
  node) ;;
  *)
    echo "launch.sh: say 'slurm' or 'node' (see the top of this file)" >&2
    exit 2
    ;;
esac
"""

_SRUN_PARTS = """\
    # job.sbatch asks for nodes by their number of GPUs: a part of the job for each number, and one step for
    # all parts, in which a node finds its place by its name.
    if [ "${{SLURM_HET_SIZE:-1}}" -gt 1 ]; then
      exec srun \\
{parts}        bash "$here/launch.sh" node "$@"
    fi
"""

_NODE_RANK_OF_PARTS = """\
if [ -z "${NODE_RANK:-}" ] && [ "${SLURM_HET_SIZE:-1}" -gt 1 ]; then
  for i in "${!hosts[@]}"; do
    if [ "${hosts[$i]}" = "${SLURMD_NODENAME:-$(hostname)}" ]; then NODE_RANK=$i; fi
  done
fi
"""
"""Tasks of a job of parts are numbered part by part, so SLURM_PROCID is no place in `hosts`."""

_NODE_RANK = """\
node_rank=${NODE_RANK:-${SLURM_PROCID:-}}
if [ -z "$node_rank" ]; then
  me=$(hostname)
  for i in "${!hosts[@]}"; do
    if [ "${hosts[$i]}" = "$me" ]; then node_rank=$i; fi
  done
  for i in "${!hosts[@]}"; do
    if [ -z "$node_rank" ] && [ "${hosts[$i]%%.*}" = "${me%%.*}" ]; then node_rank=$i; fi
  done
  if [ -z "$node_rank" ]; then
    echo "launch.sh: $me is not in hostfile; set NODE_RANK to the line it stands for, from 0" >&2
    exit 2
  fi
fi
export MASTER_ADDR="${MASTER_ADDR:-${hosts[0]}}" MASTER_PORT="${MASTER_PORT:-29500}"
"""

_TORCHRUN = """\
exec torchrun --nnodes={hosts} --nproc-per-node={gpus} --node-rank="$node_rank" \\
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \\
  {command} {arguments} "$@"
"""

_PROCESSES = """\
# The plan's ranks do not run through the nodes in turn, so each process is told its own.
# rankfile: rank, line of hostfile from 0, local GPU.
export WORLD_SIZE={world}
pids=()
trap 'kill "${{pids[@]}}" 2>/dev/null || true' EXIT
while read -r rank host gpu; do
  if [ "$host" -ne "$node_rank" ]; then continue; fi
  RANK=$rank LOCAL_RANK=$gpu "${{PYTHON:-python3}}" {command}{space}{arguments} "$@" < /dev/null &
  pids+=("$!")
done < "$here/rankfile"
for _ in "${{pids[@]}}"; do wait -n; done
"""

FABRIC_NOTE = (
    "NCCL_IB_HCA (order of the adapters), NCCL_IB_SL and NCCL_IB_TC (service level, traffic class) depend on "
    "your fabric and are left to you."
)


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the processes of a framework run."""

    framework: str
    """As the script's first line names it."""
    command: str
    """Shell words after torchrun's own, already quoted."""
    usage: str
    """Comment: what to set before the start."""
    variant: str = ""
    """What tells the model that is trained from others of its name."""
    notes: tuple[str, ...] = ()
    """Single lines, printed at the start: where the run is another than the plan's, for want of a switch."""
    checks: str = ""
    """Shell lines ahead of the environment: they see to what the user must set."""
    data_arguments: str = ""
    """Shell words after the planned arguments, from variables that `checks` sets."""
    takes: str = "more arguments"
    """What may follow on the command line, for the usage."""
    before: str = ""
    """Shell lines ahead of the start, with `$node_rank`, `$MASTER_ADDR` and `$here` set."""


def launch_script(
    launch: Launch, program: Program, args: Sequence[str], env: Mapping[str, str]
) -> str:
    """The text of launch.sh.

    Where ranks run through the nodes in turn the nodes start torchrun with a static rendezvous (its c10d
    rendezvous sorts the nodes), elsewhere every rank of `rankfile` by itself.

    Parameters
    ----------
    launch
        The plan and the places of its ranks.
    program
        What a process runs.
    args
        The program's arguments, not yet quoted.
    env
        Environment variables by name.
    """
    hosts, own_notes = len(launch.placed.hosts), [one_line(note) for note in program.notes]
    notes = "".join(f"\n# Note: {note}" for note in (*own_notes, FABRIC_NOTE))
    header = _HEADER.format(
        framework=program.framework,
        title=_title(launch, program.variant),
        notes=notes,
        more=program.takes,
        usage=program.usage,
    )
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(env.items())]
    arguments = "".join(f"  {line}\n" for line in _argument_lines(args))
    parts = [
        header,
        *_hosts(launch.placed),
        _SLURM.format(hosts=hosts, parts=_srun_parts(launch.placed)),
        program.checks,
        *exports,
        f"args=(\n{arguments})\n",
        _NODE_RANK_OF_PARTS if len(launch.placed.alike) > 1 else "",
        _NODE_RANK,
        _spoken(own_notes),
        program.before,
        _start(launch, program),
    ]
    return "".join(parts)


def _hosts(placed: PlacedRanks) -> tuple[str, str]:
    """Shell lines that fill `hosts`, and that check their number."""
    count = len(placed.hosts)
    if placed.names_known:
        return LISTED_HOSTS, _CHECK_HOSTS.format(hosts=count)
    return (
        job_hosts(placed),
        _CHECK_JOB_HOSTS.format(hosts=count),
    )


def job_hosts(placed: PlacedRanks) -> str:
    """Shell lines that fill `hosts` where the plan names none.

    Parameters
    ----------
    placed
        Hosts that only count the nodes; of unlike numbers of GPUs, a job may have a part for each number.
    """
    turns, hostnames = _turns_text(placed.turns), 'scontrol show hostnames "$SLURM_JOB_NODELIST"'
    groups = [f"SLURM_JOB_NODELIST_HET_GROUP_{part}" for part in range(len(placed.alike))]
    if len(groups) > 1:
        lists = " ".join(f'"${{{group}:-}}"' for group in groups)
        each = f'for list in {lists}; do scontrol show hostnames "$list"; done'
        hostnames = f'if [ "${{SLURM_HET_SIZE:-1}}" -gt 1 ]; then {each}; else {hostnames}; fi'
    if placed.turns_by_gpus != placed.turns:
        by_gpus = _turns_text(placed.turns_by_gpus)
        turns += f'\n  if [ "${{SLURM_HET_SIZE:-1}}" -gt 1 ]; then {by_gpus}; fi'
    return _JOB_HOSTS.format(hostnames=hostnames, turns=turns)


def _turns_text(turns: list[int]) -> str:
    """A shell line: the place of every planned node among the nodes of a job, in the order of ranks."""
    if turns == list(range(len(turns))):
        return f"mapfile -t turns < <(seq 0 {len(turns) - 1})"
    return f"turns=({' '.join(map(str, turns))})"


def _srun_parts(placed: PlacedRanks) -> str:
    """Shell lines that start the step of a job that has a part for each number of GPUs; none for one."""
    if len(placed.alike) == 1:
        return ""
    parts = [
        f"        --kill-on-bad-exit=1 --nodes={len(hosts)} --ntasks={len(hosts)} --gpus-per-node={gpus} "
        for gpus, hosts in placed.alike
    ]
    return _SRUN_PARTS.format(parts=": \\\n".join(parts) + "\\\n")


def _spoken(notes: Sequence[str]) -> str:
    """Shell lines that print the notes once, on the first node."""
    if not notes:
        return ""
    sentences = " \\\n".join(f"    {shlex.quote(note)}" for note in notes)
    return f"""\
if [ "$node_rank" = 0 ]; then
  printf 'launch.sh: note: %s\\n' \\
{sentences} >&2
fi
"""


def _title(launch: Launch, variant: str) -> str:
    """The plan on one line; a name may hold anything, as JSON it holds no line break."""
    layout = launch.layout
    name = json.dumps(launch.inputs.model.name)
    degrees = " ".join(f"{axis} {getattr(layout, axis)}" for axis in (*DEGREES, "vpp"))
    batch = f"{layout.num_micro_batches} micro-batches of {layout.micro_batch}"
    return f"{name}{variant}: {degrees}, {batch}"


def _start(launch: Launch, program: Program) -> str:
    placed = launch.placed
    arguments = f'"${{args[@]}}" {program.data_arguments}'.rstrip()
    if placed.gpus_per_host is not None:
        return _TORCHRUN.format(
            hosts=len(placed.hosts),
            gpus=placed.gpus_per_host,
            command=program.command,
            arguments=arguments,
        )
    return _PROCESSES.format(
        world=len(placed.places),
        command=program.command,
        space=" \\\n    " if program.data_arguments else " ",
        arguments=arguments,
    )


def _argument_lines(args: Sequence[str]) -> list[str]:
    """One flag with its values per line, quoted for the shell."""
    lines: list[list[str]] = []
    for arg in args:
        if arg.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(shlex.quote(arg))
    return [" ".join(line) for line in lines]


_NVLS_DEVICES = ("hopper", "blackwell")
"""Architectures whose NVLink switch can reduce."""
_LEAST_NVLS_TP = 4
_DEALT_IN_ORDER = "it deals them out in their own order, whose step is the plan's (in_order)"
"""What frameworks do with experts whose placement they cannot be told."""
_PERMUTED = (
    "the plan's step is that of experts as expert_placement puts them: start from a checkpoint whose experts "
    "and router rows are permuted so"
)
"""What a plan with `--allow expert-placement` assumes."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a framework's processes are started with."""

    program: Program
    args: list[str]
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables beside NCCL's, which are the same for all frameworks."""
    files: dict[str, str] = field(default_factory=dict)
    """The framework's own files: texts by name."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    """How the launch files of one framework are made from a legal plan."""

    framework: Framework
    start: Callable[[Launch], Start]
    """Raises InfeasibleError for what no rule of the framework says."""

    def files(self, plan: Plan) -> dict[str, str]:
        """Texts by file name: the framework's own, env.json, hostfile (or its template), launch.sh.

        Where ranks do not run through the nodes in turn there is a rankfile too. Raises InfeasibleError if
        the framework would refuse the plan.

        Parameters
        ----------
        plan
            With a layout.
        """
        launch = legal_launch(plan, self.framework)
        start = self.start(launch)
        env = start.env | nccl_env(launch)
        program = start.program
        if plan.expert_placement is not None:
            how = _PERMUTED if set(ALLOW_PLACED) <= set(plan.inputs.allow) else _DEALT_IN_ORDER
            note = f"{self.framework.title} takes no placement of experts: {how}."
            program = replace(program, notes=(*program.notes, note))
        files = start.files | {
            "env.json": json_file(dict(sorted(env.items()))),
            **launch.placed.hostfile(),
            "launch.sh": launch_script(launch, program, start.args, env),
        }
        if launch.placed.gpus_per_host is None:
            files["rankfile"] = launch.placed.rankfile()
        return files


def json_file(document: Mapping[str, object] | list[str]) -> str:
    """The text of a JSON file for people to read."""
    return json.dumps(document, indent=1) + "\n"


def nccl_env(launch: Launch) -> dict[str, str]:
    """NCCL settings that the plan's use of the scale-up domain asks for.

    A domain of several nodes (GB200 NVL72) needs multi-node NVLink. Reductions in the NVLink switch (NVLS)
    are there from Hopper on; they are asked for where tensor parallelism would use them.

    Parameters
    ----------
    launch
        For tp, the scale-up domain and the architecture of the GPUs.
    """
    cluster = launch.inputs.cluster
    env = {}
    if cluster.nvlink_domain > cluster.gpus_per_node:
        env["NCCL_MNNVL_ENABLE"] = "1"
    if launch.layout.tp >= _LEAST_NVLS_TP and cluster.device.architecture in _NVLS_DEVICES:
        env["NCCL_NVLS_ENABLE"] = "1"
    return env


# Flags and their values as the words of a command line.


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """The words of a command line, in the order of `flags`.

    Parameters
    ----------
    flags
        Values by flag. True stands for the flag alone, a tuple for several values; a flag of None or False
        is left out.

    >>> flag_words({"--num-layers": 32, "--swiglu": True, "--qk-layernorm": False})
    ['--num-layers', '32', '--swiglu']
    """
    words: list[str] = []
    for flag, value in flags.items():
        if value is None or value is False:
            continue
        words.append(flag)
        if isinstance(value, tuple):
            words += [str(part) for part in value]
        elif value is not True:
            words.append(str(value))
    return words


def flags_of(arguments: Iterable[Argument], said: Mapping[str, object]) -> dict[str, object]:
    """Values by flag, as `flag_words` writes them, in the order of the arguments.

    Parameters
    ----------
    arguments
        Of the framework's record.
    said
        Values by the arguments' words. None is left out, and what no argument is called.

    >>> flags_of([Argument("layers", "--num-layers"), Argument("qk_norm", "--qk-layernorm", "switch")],
    ...          {"layers": 32, "qk_norm": True})
    {'--num-layers': 32, '--qk-layernorm': True}
    """
    flags: dict[str, object] = {}
    for argument in arguments:
        value = said.get(argument.word)
        if value is None or (argument.optional and value == argument.default):
            continue
        is_switch = argument.kind == "switch"
        flags[argument.flag] = value != bool(argument.default) if is_switch else value
    return flags


def said_of_degrees(layout: LayoutDoc, *, experts: bool) -> dict[str, object]:
    """Degrees and the micro-batch by their names, as arguments call them too; those of experts if wanted.

    Parameters
    ----------
    layout
        Of a plan.
    experts
        Whether the degrees of experts are said too.
    """
    return {
        choice.name: getattr(layout, choice.name)
        for choice in OF_LAYOUT
        if choice.decided == "degrees" and (experts or choice.shown_for != "experts")
    }


def model_fields(arguments: Iterable[Argument], model: ModelSpec) -> dict[str, object]:
    """What a model says by the words of arguments that are fields of it, such as `rope.base`.

    Parameters
    ----------
    arguments
        Of the framework's record; those whose word is no field of a model are passed over.
    model
        The model to be trained; fields of None are left out.
    """
    fields: dict[str, object] = {}
    for argument in arguments:
        value: object = model
        for name in argument.word.split("."):
            value = getattr(value, name, None)
        if value is not None:
            fields[argument.word] = value
    return fields


# Notes on what a framework's launch trains otherwise than the model's specification says.


Shortfalls = Mapping[str, str]
"""Sentences on what a launch file cannot say, by the model's field that it concerns."""


def notes_of(model: ModelSpec, said: Collection[str], shortfalls: Shortfalls) -> tuple[str, ...]:
    """The notes of a launch: nothing that a specification states is dropped without one.

    Parameters
    ----------
    model
        The model to be trained.
    said
        Its fields, by dotted name, that the framework's launch files carry.
    shortfalls
        What is known to differ.
    """
    silent = [
        f"{name}: {value} is not part of the launch."
        for name, value in stated_fields(model).items()
        if name not in said and name not in shortfalls
    ]
    return (*shortfalls.values(), *silent, *file_notes(model))


def file_notes(model: ModelSpec) -> tuple[str, ...]:
    """What the model's file says and no launch can know, as the description does not hold it.

    Parameters
    ----------
    model
        With the fields of its config.json that were left out.
    """
    if not model.left_out:
        return ()
    named = ", ".join(model.left_out)
    return (f"Of the model's config.json this is not part of the launch: {named}.",)
