"""The bash script that starts a Megatron-LM run, under Slurm or by hand on every node."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

_HEADER = """\
#!/usr/bin/env bash
# Starts Megatron-LM for {title}.
#{notes}
# In a Slurm allocation of the nodes in hostfile:  bash launch.sh slurm [more arguments of pretrain_gpt.py]
# By hand, on each of those nodes:                 bash launch.sh node [more arguments of pretrain_gpt.py]
#
# Set MEGATRON_ENTRY to Megatron-LM's pretrain_gpt.py, and
#   DATA_PATH          prefix of the tokenized data; several prefixes and weights are separated by spaces
#   TOKENIZER_MODEL    with TOKENIZER_TYPE, HuggingFaceTokenizer unless set
#   TRAIN_ITERS, LR    steps and peak learning rate
# or, for a trial without data, MOCK_DATA=1 (then 50 steps unless TRAIN_ITERS is set).
# The folder of this script must be visible on all nodes. MASTER_PORT is 29500 unless set. The node's place in
# hostfile is NODE_RANK, else its place in the Slurm job step, else where its host name stands.
set -euo pipefail

here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
mapfile -t hosts < "$here/hostfile"
"""

CHECK_HOSTS = """\
if [ "${{#hosts[@]}}" -ne {hosts} ]; then
  echo "launch.sh: hostfile has ${{#hosts[@]}} lines, the plan needs {hosts} nodes" >&2
  exit 2
fi
"""

SLURM = """\
mode=${{1:-}}
if [ "$#" -gt 0 ]; then shift; fi
case "$mode" in
  slurm)
    # One task per line of hostfile, in its order; --nodelist would sort the names.
    SLURM_HOSTFILE="$here/hostfile" exec srun --distribution=arbitrary --nodes={hosts} --ntasks={hosts} \\
      --kill-on-bad-exit=1 bash "$here/launch.sh" node "$@"
    ;;
  node) ;;
  *)
    echo "launch.sh: say 'slurm' or 'node' (see the top of this file)" >&2
    exit 2
    ;;
esac
"""

_DATA = """\
: "${MEGATRON_ENTRY:?set it to the path of Megatron-LM pretrain_gpt.py}"
if [ "${MOCK_DATA:-0}" = 1 ]; then
  data=(--mock-data --tokenizer-type NullTokenizer)
  train=(--train-iters "${TRAIN_ITERS:-50}" --lr "${LR:-1e-4}")
else
  : "${DATA_PATH:?set it to the prefix of the tokenized data, or MOCK_DATA=1 for a trial}"
  : "${TOKENIZER_MODEL:?set it to the tokenizer, or MOCK_DATA=1 for a trial}"
  : "${TRAIN_ITERS:?set it to the number of steps}"
  : "${LR:?set it to the peak learning rate}"
  read -r -a prefixes <<< "$DATA_PATH"
  data=(--data-path "${prefixes[@]}" --tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}"
    --tokenizer-model "$TOKENIZER_MODEL")
  train=(--train-iters "$TRAIN_ITERS" --lr "$LR")
fi
"""

NODE_RANK = """\
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
  "$MEGATRON_ENTRY" "${{args[@]}}" "${{data[@]}}" "${{train[@]}}" "$@"
"""

_PROCESSES = """\
# The plan's ranks do not run through the nodes in turn, so each process is told its own.
# rankfile: rank, line of hostfile from 0, local GPU.
export WORLD_SIZE={world}
pids=()
trap 'kill "${{pids[@]}}" 2>/dev/null || true' EXIT
while read -r rank host gpu; do
  if [ "$host" -ne "$node_rank" ]; then continue; fi
  RANK=$rank LOCAL_RANK=$gpu "${{PYTHON:-python3}}" "$MEGATRON_ENTRY" \\
    "${{args[@]}}" "${{data[@]}}" "${{train[@]}}" "$@" < /dev/null &
  pids+=("$!")
done < "$here/rankfile"
for _ in "${{pids[@]}}"; do wait -n; done
"""


def start_script(
    *,
    title: str,
    notes: Sequence[str],
    args: Sequence[str],
    env: Mapping[str, str],
    hosts: int,
    gpus_per_host: int | None,
    world: int,
) -> str:
    """The text of launch.sh.

    `title` and `notes` are single lines. With `gpus_per_host` the nodes run torchrun with a static rendezvous
    (its c10d rendezvous sorts the nodes); without, every rank of `rankfile` is started by itself.
    """
    remarks = "".join(f"\n# Note: {note}" for note in notes)
    lines = [
        _HEADER.format(title=title, notes=remarks),
        CHECK_HOSTS.format(hosts=hosts),
        SLURM.format(hosts=hosts),
    ]
    lines.append(_DATA)
    lines += [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(env.items())]
    lines.append("args=(\n" + "".join(f"  {line}\n" for line in argument_lines(args)) + ")\n")
    lines.append(NODE_RANK)
    if gpus_per_host is None:
        lines.append(_PROCESSES.format(world=world))
    else:
        lines.append(_TORCHRUN.format(hosts=hosts, gpus=gpus_per_host))
    return "".join(lines)


def argument_lines(args: Sequence[str]) -> list[str]:
    """One flag with its values per line, quoted for the shell."""
    lines: list[list[str]] = []
    for arg in args:
        if arg.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(shlex.quote(arg))
    return [" ".join(line) for line in lines]
