"""`--help`: every command stands in a group, no word is cut, every example parses."""

from __future__ import annotations

import shlex

import click
import pytest
from click.testing import CliRunner

from meshwright import cli
from meshwright.commands.options import GROUPS, example_of

EXAMPLES = {name: words for examples in GROUPS.values() for name, words in examples.items()}


def test_every_command_is_in_one_group() -> None:
    assert sorted(EXAMPLES) == sorted(cli.main.commands)
    assert sum(map(len, GROUPS.values())) == len(EXAMPLES)


def test_the_list_of_commands_cuts_no_word() -> None:
    shown = CliRunner().invoke(cli.main, ["--help"], terminal_width=80).stdout
    assert "..." not in shown.partition("Plan:")[2]
    assert max(map(len, shown.splitlines())) <= 80
    for name in EXAMPLES:
        assert f"  {name} " in shown


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_parses_and_is_shown(name: str) -> None:
    words = shlex.split(example_of(name).replace("\\\n", " "))
    assert words[:2] == ["meshwright", name]
    command: click.Command = cli.main.commands[name]
    arguments = words[2:]
    while isinstance(command, click.Group):
        command = command.commands[arguments.pop(0)]
    with command.make_context(name, arguments) as context:
        assert context.params
    shown = CliRunner().invoke(cli.main, [name, "--help"], terminal_width=100).stdout
    assert example_of(name).splitlines()[0].strip() in shown


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--seq-len", "4k", "'4k' is not a whole number: write 4000 or 4096."),
        ("--seq-len", "0x100", "'0x100' is not a whole number: write 256."),
        ("--gpu-hour-price", "$2.50", "'$2.50' is not a number: write 2.50."),
        ("--global-batch", "1e3", "'1e3' is not a whole number: write 1000."),
        ("--time-limit", "5m", "'5m' is not a number: write 300, in seconds."),
        ("--time-limit", "90ms", "'90ms' is not a number: write seconds, in digits alone."),
        (
            "--gpus",
            "8xH100",
            "'8xH100' is not a whole number: write 8, and the kind of GPU in --cluster.",
        ),
        (
            "--gpus",
            "H100:8",
            "'H100:8' is not a whole number: write 8, and the kind of GPU in --cluster.",
        ),
        ("--gpus", "64.0", "'64.0' is not a whole number: write 64."),
        ("--tokens", "15T", "'15T' is not a number: write 15e12."),
        ("--reserve-gib", "5GB", "'5GB' is not a number: write its digits alone, without a unit."),
        ("--reserve-gib", "5G", "'5G' is not a number: write its digits alone, without a unit."),
        ("--gpus", "2x8", "'2x8' is not a whole number: write 16."),
        ("--seq-len", "131,072", "'131,072' is not a whole number: write 131072."),
        ("--seq-len", "1,2", "'1,2' is not a valid integer."),
        ("--gpus", "many", "'many' is not a valid integer."),
    ],
)
def test_a_number_with_a_unit_is_told_in_digits(option: str, value: str, words: str) -> None:
    asked = ["plan", "qwen3-8b", "--cluster", "dgx-h100", "--global-batch", "8", option, value]
    result = CliRunner().invoke(cli.main, asked)
    assert result.exit_code == 2
    assert f"Error: Invalid value for '{option}': {words}" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch-size 64", "No such option '--batch-size'. Write --global-batch."),
        ("--max_seq_length 64", "No such option '--max_seq_length'. Write --seq-len."),
        ("--tp 2", "No such option '--tp'. Write --pin tp=N."),
        ("--tensor-model-parallel-size 2", "Write --pin tp=N."),
        ("--expert-parallel 2", "Write --pin ep=N."),
        ("--pp-size 2", "Write --pin pp=N."),
        ("--gpu 8", "No such option '--gpu'. Did you mean '--gpus'?"),
        ("--lora", "No such option '--lora'. Write --train lora."),
        ("--model qwen3-8b", "No such option '--model'. Write it without --model, as MODEL."),
        ("--train sft", "'sft' is a kind of step: --kind; allowed"),
        ("--kind lora", "'lora' is what is trained: --train; allowed"),
        ("--sweep gpus=8,16", "values of one option are joined by +, as in gpus=8+16, got '16'"),
        ("--zero-stage 3", "No such option '--zero-stage'. Write --pin zero_stage=N."),
        (
            "--lora-alpha 32",
            "No such option '--lora-alpha'. It changes no price: leave it out here.",
        ),
        ("--warp 9", "No such option '--warp'. Did you mean '--sweep'?"),
        ("--framework trl", "plan with one of them, then `launch --target trl`"),
        ("--framework LLaMAFactory", "then `launch --target llama-factory`"),
        ("--framework accelerate", "'accelerate' is planned as --framework fsdp2"),
        ("--framework nemo", "'nemo' is planned as --framework megatron"),
        ("--framework verl", "'verl' trains the actor with one of these frameworks"),
        ("--framework jax", "'jax' is not known; allowed: deepspeed, fsdp2, megatron, torchtitan"),
        ("--kind grpo", "'grpo' is no kind of step"),
        ("--nodes 2", "and launch.sh takes those of the job; 2 whole nodes are --gpus 16"),
    ],
)
def test_words_of_other_programs_are_told_what_to_write(words: str, message: str) -> None:
    """`--batch-size` was asked whether `--pack-size` was meant."""
    asked = "plan qwen3-8b --cluster dgx-h100 --gpus 8 --global-batch 8 --seq-len 512"
    result = CliRunner().invoke(cli.main, [*asked.split(), *words.split()])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("clusters", "No such command 'clusters'. Did you mean 'catalog clusters'?"),
        ("models", "Did you mean 'catalog models'?"),
        ("version", "Did you mean '--version'?"),
        ("help plan", "Did you mean '--help'?"),
        ("train", "Did you mean 'plan'?"),
        ("sweep", "Did you mean 'plan --sweep'?"),
        ("whatif run", "Did you mean 'explain'?"),
        ("fit llama-3-8b", "Did you mean 'plan'?"),
        ("rent", "Did you mean 'recommend'?"),
        ("recommend qwen3-8b --budget 20000", "Write --gpu-hour-price P with --tokens T"),
        (
            "plan qwen3-8b --cluster dgx-h100 --gpus 8 --global-batch 8 --seq-len 512 "
            "--pin tensor_model_parallel_size=2",
            "'tensor_model_parallel_size' is not known; did you mean 'tp'?",
        ),
        ("launch run --target slime", "'slime' trains the actor with one of these frameworks"),
        ("launch run --target megatron-bridge", "is written as --target bridge"),
        ("launch run --target pbs", "runs launch.sh of a framework's target on each node"),
        (
            "plan dgx-h100 --cluster qwen3-8b --global-batch 8 --seq-len 512",
            "model: is a cluster: say it behind --cluster, got 'dgx-h100'",
        ),
        ("plann", "Did you mean 'plan'?"),
        ("plan qwen3-8b --gpus 8", "Missing option '--cluster'. `catalog clusters` lists names"),
        ("memory qwen3-8b", "no such file; for a model, `plan qwen3-8b --cluster ...` says step"),
        ("plan qwen3-8b --precision fp8-blockwise", "that is priced in runs alone (`fp8_recipe`"),
        ("plan qwen3-8b --precision int4", "weights that are frozen at few bits are --train qlora"),
        ("verify -", "-: standard input is not read: write it to a file first"),
    ],
)
def test_what_is_asked_of_no_command_is_told_where_to_ask(words: str, message: str) -> None:
    """`version` was asked whether `verify` was meant, `models` whether `model`."""
    result = CliRunner().invoke(cli.main, words.split())
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize("words", ["memory x.yaml --tp 2", "estimate qwen3-8b --cluster dgx-h100"])
def test_an_option_that_a_command_lacks_is_not_suggested(words: str) -> None:
    result = CliRunner().invoke(cli.main, words.split())
    assert result.exit_code == 2
    assert "--pin" not in result.stderr
    assert "Its run file says that: `schema run` explains" in " ".join(result.stderr.split())
    near = CliRunner().invoke(cli.main, ["estimate", "--from-lanch", "x"])
    assert "Did you mean '--from-launch'?" in near.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--top 0", "--top: 0 is out of range"),
        ("--memory-risk 2", "--memory-risk: 2.0 is out of range"),
        ("--lora-rank 0 --train lora", "--lora-rank: must be 1 to 8192, got 0"),
        ("--image-tokens -1", "--image-tokens: must be at least 1, got -1"),
        ("--pin tp=0", "--pin tp: 0 is out of range"),
        ("--forbid foo", "--forbid: 'foo' is not known"),
        ("--lengths lengths.txt", "--seq-len: does not go with --lengths"),
    ],
)
def test_a_refused_value_is_told_by_the_option_that_was_typed(words: str, message: str) -> None:
    asked = "plan qwen3-8b --cluster dgx-h100 --gpus 8 --global-batch 8 --seq-len 512"
    result = CliRunner().invoke(cli.main, [*asked.split(), *words.split()])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {message}")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("plan m --nnodes 2", "Write --gpus N, with the GPUs of all nodes."),
        ("plan m --packing", "requires an argument. Choose from first-fit, "),
        ("plan m --optimizer adamw", "'adamw' is adam: weight decay changes no price; allowed: adam"),
        ("plan m --cluster c", "'--global-batch'. Sequences of one optimizer step, on all GPUs"),
        ("explain run --pin tp=4", "A plan keeps what it was made for: ask `plan` again with this"),
        ("estimate a.sh --from-launch --cluster c", "Beside a launch file, --with says what it leaves open."),
        ("estimate run.yaml --with tp=4", "--with: goes with --from-launch: a run file says all itself"),
        ("topology import a --from slurm", "'--node'. The kind of all nodes: `catalog clusters` lists"),
    ],
)  # fmt: skip
def test_a_usage_error_says_what_to_type(typed: str, message: str) -> None:
    result = CliRunner().invoke(cli.main, typed.split())
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
