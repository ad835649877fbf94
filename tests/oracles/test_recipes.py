"""What is read of a fine-tuning stack's configuration is what the stack's own parser reads in it.

Runs in `make oracles` only: random configurations of LLaMA-Factory, Axolotl, TRL and verl, which leave some
fields to their defaults, and what is written for these stacks and for ms-swift.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.costmodel.workload import Execution
from meshwright.documents import write_files
from meshwright.errors import InfeasibleError, InputError
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.reader import catalog_names
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.reader import read_launch
from tests.oracles.random_plans import random_plan
from tests.oracles.test_frameworks import ask as parsed
from tests.oracles.test_frameworks import differences
from tests.places import DATA
from tests.plans import make_plan

pytestmark = pytest.mark.oracle

CASES = 25
MODEL = "Qwen/Qwen3-8B"
RESHARDS = {2: (False, "false"), 3: (True, "true")}
"""By stage of ZeRO, how parsers of FSDP2 give that weights are gathered again."""


def ask(stack: str, cases: list[Any], folder: Path) -> list[dict[str, Any]]:
    """The parser's answers, in order."""
    python = os.environ.get("ORACLE_PYTHON")
    assert python, "run `make oracles`: ORACLE_PYTHON names no interpreter"
    asked = folder / "cases.json"
    asked.write_text(
        json.dumps([{"stack": stack, "fields": case} for case in cases]), encoding="utf-8"
    )
    script = Path(__file__).with_name("ask_recipes.py")
    done = subprocess.run(
        [python, str(script), str(asked)], capture_output=True, text=True, timeout=600, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("answer ")]
    assert len(lines) == len(cases), done.stderr[-2000:]
    answers = [json.loads(line.removeprefix("answer ")) for line in lines]
    errors = [answer["error"] for answer in answers if "error" in answer]
    assert not errors, errors[:3]
    return answers


def some(rng: random.Random, **fields: Any) -> dict[str, Any]:
    """Some of these fields, a value of the list each."""
    return {name: rng.choice(values) for name, values in fields.items() if rng.random() < 0.6}


def read(folder: Path, name: str, text: str) -> LaunchRun:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_launch(path)


def targets(run: LaunchRun) -> list[str] | None:
    adapters = run.settings["adapters"]
    return None if adapters is None else adapters["targets"]


def test_llamafactory(tmp_path: Path) -> None:
    rng = random.Random(1)
    must = {"model_name_or_path": MODEL, "stage": "sft", "do_train": True, "bf16": True}
    must |= {"template": "qwen3", "dataset": "ours", "output_dir": "out"}
    cases = [
        must
        | some(
            rng,
            cutoff_len=[512, 4096],
            per_device_train_batch_size=[1, 2, 16],
            gradient_accumulation_steps=[1, 4, 8],
            disable_gradient_checkpointing=[True, False],
            finetuning_type=["lora", "full"],
            lora_rank=[4, 64],
            lora_target=["all", "q_proj,v_proj", "q_proj, gate_proj"],
        )
        for _ in range(CASES)
    ]
    answers = ask("llamafactory", [case | {"bf16": False} for case in cases], tmp_path)
    for case, answer in zip(cases, answers, strict=True):
        run = read(tmp_path, "run.yaml", yaml.safe_dump(case))
        settings, adapters = run.settings, run.settings["adapters"]
        assert settings["seq_len"] == answer["cutoff_len"]
        assert settings["micro_batch"] == answer["per_device_train_batch_size"]
        steps = answer["gradient_accumulation_steps"]
        assert run.local_batch == settings["micro_batch"] * steps
        assert (settings["recompute"] == "full") == answer["checkpoints"]
        assert (adapters is not None) == (answer["finetuning_type"] == "lora")
        if adapters is not None:
            assert adapters["rank"] == answer["lora_rank"]
            named = ["all-linear" if name == "all" else name for name in answer["lora_target"]]
            assert adapters["targets"] == named


def test_axolotl(tmp_path: Path) -> None:
    rng = random.Random(2)
    must: dict[str, Any] = {"base_model": MODEL, "bf16": True, "learning_rate": 1e-4}
    must |= {"datasets": [{"path": "ours", "type": "alpaca"}], "micro_batch_size": 2}
    cases = []
    for _ in range(CASES):
        case = must | some(
            rng,
            sequence_len=[512, 8192],
            gradient_accumulation_steps=[1, 4],
            gradient_checkpointing=[True, False],
        )
        if rng.random() < 0.7:
            narrow = rng.random() < 0.5
            case |= {"adapter": "qlora" if narrow else "lora", "load_in_4bit": narrow}
            case |= {"lora_r": rng.choice([8, 32]), "lora_target_modules": ["q_proj", "o_proj"]}
            case |= some(rng, lora_target_linear=[True, False])
        cases.append(case)
    for case, answer in zip(cases, ask("axolotl", cases, tmp_path), strict=True):
        run = read(tmp_path, "run.yaml", yaml.safe_dump(case))
        settings, adapters = run.settings, run.settings["adapters"]
        assert settings["seq_len"] == answer["sequence_len"]
        assert settings["micro_batch"] == answer["micro_batch_size"]
        assert run.local_batch == 2 * (answer["gradient_accumulation_steps"] or 1)
        assert (settings["recompute"] == "full") == bool(answer["gradient_checkpointing"])
        assert (adapters is None) == (answer["adapter"] is None)
        if adapters is not None:
            assert adapters["rank"] == answer["lora_r"]
            assert (adapters["method"] == "qlora") == answer["load_in_4bit"]
            linear = ["all-linear"] if answer["lora_target_linear"] else []
            assert adapters["targets"] == [*linear, *answer["lora_target_modules"]]


def test_trl(tmp_path: Path) -> None:
    """A recipe, and a command that names it and has the last word."""
    rng = random.Random(3)
    recipe = tmp_path / "recipe.yaml"
    must: dict[str, Any] = {"model_name_or_path": MODEL, "output_dir": "out"}
    for _ in range(5):
        said = must | some(
            rng,
            max_length=[512, 8192],
            per_device_train_batch_size=[1, 4],
            packing=[True, False],
            use_peft=[True],
            lora_r=[8, 128],
            lora_target_modules=[["q_proj", "k_proj"]],
        )
        if "use_peft" not in said:
            said = {name: value for name, value in said.items() if not name.startswith("lora")}
        recipe.write_text(yaml.safe_dump(said), encoding="utf-8")
        commands = [
            [
                word
                for name, value in some(
                    rng,
                    gradient_accumulation_steps=[2, 8],
                    gradient_checkpointing=["True", "False"],
                    per_device_train_batch_size=[2, 16],
                ).items()
                for word in (f"--{name}", str(value))
            ]
            for _ in range(CASES // 5)
        ]
        named = ["--config", str(recipe)]
        answers = ask("trl", [[*named, *words] for words in commands], tmp_path)
        for words, answer in zip(commands, answers, strict=True):
            run = read(tmp_path, "run.sh", " ".join(["trl sft", "--config recipe.yaml", *words]))
            settings, adapters = run.settings, run.settings["adapters"]
            assert settings["seq_len"] == answer["max_length"]
            assert settings["micro_batch"] == answer["per_device_train_batch_size"]
            steps = answer["gradient_accumulation_steps"]
            assert run.local_batch == settings["micro_batch"] * steps
            assert (settings["recompute"] == "full") == answer["checkpoints"]
            assert (adapters is not None) == answer["use_peft"]
            if adapters is not None:
                assert adapters["rank"] == answer["lora_r"]
                # None is what PEFT takes for the family.
                assert targets(run) == (answer["lora_target_modules"] or ["q_proj", "v_proj"])


def test_verl(tmp_path: Path) -> None:
    rng = random.Random(4)
    section, model = "actor_rollout_ref.actor", "actor_rollout_ref.model"
    cases = []
    for _ in range(CASES):
        values = {f"{section}.ppo_micro_batch_size_per_gpu": 1, f"{model}.path": MODEL}
        values |= some(
            rng,
            **{
                "data.max_prompt_length": [256, 2048],
                "data.max_response_length": [1024],
                f"{section}.ppo_mini_batch_size": [64, 512],
                f"{section}.ulysses_sequence_parallel_size": [1, 2],
                f"{section}.fsdp_config.reshard_after_forward": [True, False],
                f"{model}.enable_gradient_checkpointing": [True, False],
                f"{model}.lora_rank": [0, 32],
                "actor_rollout_ref.rollout.n": [1, 8],
                "trainer.nnodes": [1, 2, 4],
            },
        )
        cases.append([f"{name}={value}" for name, value in values.items()])
    for words, answer in zip(cases, ask("verl", cases, tmp_path), strict=True):
        command = ["python3 -m verl.trainer.main_ppo", *words]
        run = read(tmp_path, "run.sh", " ".join(command))
        settings, adapters = run.settings, run.settings["adapters"]
        for name in ("seq_len", "micro_batch", "gpus"):
            assert settings[name] == answer[name]
        assert settings["global_batch"] == answer["mini_batch"]
        assert settings.get("cp", 1) == answer["cp"]
        assert (settings["recompute"] == "full") == answer["checkpoints"]
        assert (settings["zero_stage"] == 3) == answer["reshards"]
        assert (adapters["rank"] if adapters else 0) == answer["lora_rank"]


@pytest.mark.parametrize("stack", ["llamafactory", "axolotl"])
def test_what_is_written_is_accepted(stack: str, tmp_path: Path) -> None:
    """Random layouts under DeepSpeed, Axolotl's under FSDP2 too, with adapters and without."""
    rng = random.Random(5)
    target, name = ("llama-factory", "llama_factory.yaml")
    added: dict[str, Any] = {"template": "qwen3", "dataset": "ours"}
    if stack == "axolotl":
        target, name = ("axolotl", "axolotl.yaml")
        added = {"datasets": [{"path": "ours", "type": "alpaca"}]}
    made, cases = [], []
    for _ in range(100):
        recomputed = rng.choice([0, 36])
        plan = make_plan(
            "qwen3-8b",
            dp=rng.choice([1, 2, 4, 8]),
            micro_batch=rng.choice([1, 2, 8]),
            num_micro_batches=rng.choice([1, 4, 16]),
            zero_stage=rng.choice([1, 2, 3]),
            recompute="full" if recomputed else "none",
            recompute_layers=recomputed,
            seq_len=rng.choice([512, 4096]),
        )
        changes: dict[str, Any] = {"framework": "deepspeed"}
        assert plan.layout is not None
        if stack == "axolotl" and plan.layout.dp > 1 and plan.layout.zero_stage > 1:
            changes["framework"] = rng.choice(["deepspeed", "fsdp2"])
        if rng.random() < 0.5:
            changes["adapters"] = AdapterSpec(
                method=rng.choice(["lora", "qlora"]),
                rank=rng.choice([4, 64]),
                targets=rng.choice([("all-linear",), ("q_proj", "down_proj")]),
            )
        if rng.random() < 0.3:
            changes |= {"kind": "sft", "loss": "liger"}
        plan = plan.model_copy(update={"inputs": plan.inputs.model_copy(update=changes)})
        fields: dict[str, Any] = yaml.safe_load(plan_files(plan, target)[name])
        # The parsers would ask for a GPU that has bf16, and for DeepSpeed's launcher.
        kept = {key: value for key, value in fields.items() if key != "deepspeed"}
        if stack == "llamafactory":
            kept["bf16"] = False
        made.append(plan)
        cases.append(kept | added | {"learning_rate": 1e-4})
    for plan, answer in zip(made, ask(stack, cases, tmp_path), strict=True):
        assert plan.layout is not None
        assert answer["gradient_accumulation_steps"] == plan.layout.num_micro_batches
        if plan.inputs.framework == "fsdp2":
            assert answer["sizes"] == [1, plan.layout.dp, 1, 1]
            assert answer["fsdp"]["reshard_after_forward"] == (plan.layout.zero_stage == 3)
        batch = answer.get("per_device_train_batch_size", answer.get("micro_batch_size"))
        assert batch == plan.layout.micro_batch
        assert answer["liger"] == (plan.inputs.loss == "liger")
        assert not answer.get("liger_layers")
        # LLaMA-Factory leaves a place of a pack for its padding (hparams/data_args.py, __post_init__).
        padding = 1 if stack == "llamafactory" else 0
        length = answer["cutoff_len" if padding else "sequence_len"]
        assert length + padding == plan.inputs.seq_len
        if plan.inputs.adapters is not None:
            assert answer.get("lora_rank", answer.get("lora_r")) == plan.inputs.adapters.rank


PUBLISHED = (
    "deepseek-v3",
    "gpt-oss-20b",
    "llama-3.1-8b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "qwen3-8b",
)
"""Models of the catalog whose configurations are in the tests' data under the same name."""
SWIFT_COMMANDS = {"pretrain": "pt", "sft": "sft", "dpo": "rlhf"}


def test_megatron_commands_of_ms_swift_tell_megatron_core_the_plan(tmp_path: Path) -> None:
    """Random plans, through its parser and mcore-bridge into the configurations of Megatron-Core."""
    rng, index, refused = random.Random(7), 0, 0
    made: list[Plan] = []
    cases: list[dict[str, Any]] = []
    while len(made) < 80:
        index += 1
        drawn = random_plan(rng, "megatron", index, PUBLISHED)
        if drawn is None or drawn[0].inputs.optimizer == "sgd":
            continue
        plan, narrow = drawn[0], drawn[0].inputs.precision not in ("bf16", "fp16")
        assert plan.layout is not None
        sharded, several = plan.layout.zero_stage == 1, plan.layout.vpp > 1
        kind = rng.choice(list(SWIFT_COMMANDS))
        changes: dict[str, Any] = {"kind": kind, "reference": "resident" if kind == "dpo" else None}
        if kind == "dpo" or (not narrow and rng.random() < 0.3):
            changes |= {"adapters": AdapterSpec(method="lora"), "reference": None}
        execution = Execution(
            dp_overlap=rng.random() < 0.7,
            pp_overlap=several and rng.random() < 0.6,
            tp_overlap=plan.layout.sequence_parallel and rng.random() < 0.05,
            moe_dispatch=rng.choice(["alltoall", "alltoall", "deepep", "allgather"]),
            moment_dtype=rng.choice(["fp32", "bf16"]) if sharded else "fp32",
            fp8_params=narrow and sharded and rng.random() < 0.4,
        )
        inputs = plan.inputs.model_copy(update=changes)
        plan = plan.model_copy(update={"inputs": inputs, "execution": execution})
        folder = tmp_path / str(len(made))
        try:
            write_files(folder, plan_files(plan, "ms-swift"))
        except (InfeasibleError, InputError):
            refused += 1
            assert refused < 50_000
            continue
        case = {"dir": str(folder), "world": plan.inputs.gpus, "command": SWIFT_COMMANDS[kind]}
        cases.append(case | {"model": str(DATA / "hf_configs" / f"{plan.inputs.model.name}.json")})
        made.append(plan)
    wrong = [
        f"{plan.inputs.model.name} {plan.layout} {plan.execution}: {faults}"
        for plan, answer in zip(made, parsed("swift", cases, tmp_path), strict=True)
        if (faults := swift_faults(plan, answer))
    ]
    assert not wrong, f"{len(wrong)} of {len(made)}:\n" + "\n".join(wrong[:5])


def test_models_that_megatron_commands_of_ms_swift_do_not_build_are_refused(tmp_path: Path) -> None:
    plans = {}
    for name in catalog_names():
        published = DATA / "hf_configs" / f"{name}.json"
        if published.exists():
            plan = make_plan(name, zero_stage=1, dp=8, seq_len=1024)
            changes: dict[str, Any] = {"framework": "megatron", "kind": "sft"}
            inputs = plan.inputs.model_copy(update=changes)
            plans[str(published)] = plan.model_copy(update={"inputs": inputs})
    (answer,) = parsed("swift", [{"kinds": list(plans)}], tmp_path)
    for plan, built in zip(plans.values(), answer["built"], strict=True):
        why = ""
        try:
            plan_files(plan, "ms-swift")
        except InfeasibleError as error:
            why = str(error)
        assert ("of Megatron-Core" not in why) if built else why, plan.inputs.model.name


def swift_faults(plan: Plan, answer: dict[str, Any]) -> list[str]:
    """Where Megatron-Core was told something else than the plan says, or its error."""
    if not answer["ok"]:
        return [str(answer)]
    layout, execution, inputs = plan.layout, plan.execution, plan.inputs
    assert layout is not None
    assert execution is not None
    flex = execution.moe_dispatch == "deepep"
    wanted: dict[str, Any] = {
        "modules": sorted(layout.recompute_modules or ())
        if layout.recompute == "selective"
        else [],
        "dp_overlap": execution.dp_overlap,
        "tp_overlap": False,
        "ep_overlap": False,
        "cuda_graph": "none",
        "fp8_params": execution.fp8_params,
        "moment_dtype": "bfloat16" if execution.moment_dtype == "bf16" else "float32",
        "gradients_at_32_bits": inputs.precision != "fp16",
        "precision": {"fp8": "tensorwise", "bf16": None, "fp16": None}.get(
            inputs.precision, inputs.precision
        ),
        "seq_len": inputs.seq_len,
        "optimizer": inputs.optimizer,
        "fusions": [True, True, True],
    }
    if layout.vpp > 1:
        # Two stages have to overlap (megatron/training/arguments.py).
        wanted["pp_overlap"] = execution.pp_overlap or layout.pp == 2
    if inputs.model.moe is not None:
        wanted["dispatch"] = ["flex" if flex else "alltoall", flex]
    told = answer["execution"]
    return differences(plan, answer) + [
        f"{name}: plan {value}, told {told[name]}"
        for name, value in wanted.items()
        if told[name] != value
    ]


@pytest.mark.parametrize(
    ("target", "name", "stack"), [("trl", "trl", "trl_script"), ("ms-swift", "swift", "swift")]
)
def test_what_scripts_start_is_the_plan(target: str, name: str, stack: str, tmp_path: Path) -> None:
    """Random plans of both frameworks, by the parsers that TRL's and ms-swift's own commands ask."""
    rng, made, cases = random.Random(6), [], []
    commands = ["sft", "dpo", "kto"]
    for number in range(24):
        recomputed, kind = rng.choice([0, 36]), rng.choice(commands)
        plan = make_plan(
            "qwen3-8b",
            dp=rng.choice([8, 16]),
            micro_batch=rng.choice([2, 8]),
            num_micro_batches=rng.choice([1, 4, 16]),
            zero_stage=rng.choice([2, 3]),
            recompute="full" if recomputed else "none",
            recompute_layers=recomputed,
            seq_len=rng.choice([512, 4096]),
        )
        loss = "fused-head" if target == "trl" else "all-logits"
        if target == "ms-swift" and kind == "sft" and rng.random() < 0.5:
            loss = "liger"
        changes: dict[str, Any] = {"framework": rng.choice(["deepspeed", "fsdp2"])}
        changes |= {"kind": kind, "loss": loss}
        changes["reference"] = None if kind == "sft" else "resident"
        if rng.random() < 0.5:
            changes["adapters"] = AdapterSpec(
                method=rng.choice(["lora", "qlora"]),
                rank=rng.choice([4, 64]),
                targets=("q_proj", "down_proj"),
            )
            changes["reference"] = None
        plan = plan.model_copy(update={"inputs": plan.inputs.model_copy(update=changes)})
        assert plan.layout is not None
        if changes["framework"] == "fsdp2" and plan.layout.num_micro_batches > 1:
            syncs = Execution(sync_each_batch=rng.random() < 0.5, dp_overlap=True)
            plan = plan.model_copy(update={"execution": syncs})
        folder = tmp_path / str(number)
        folder.mkdir()
        for file, text in plan_files(plan, target).items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8")
        script = (folder / f"{name}.sh").read_text(encoding="utf-8")
        # The shell says what the script runs, in the folder that it goes to itself.
        said = script.replace(f"exec {name} ", "printf '%s\\n' ")
        done = subprocess.run(
            ["bash", "-c", said, str(folder / "x.sh")], capture_output=True, text=True, check=True
        )
        words = done.stdout.split()
        for file in ("trl.yaml", "swift.yaml", "accelerate.yaml"):
            words = [str(folder / file) if word == file else word for word in words]
        made.append(plan)
        cases.append({"folder": str(folder), "words": words})
    for plan, answer in zip(made, ask(stack, cases, tmp_path), strict=True):
        layout, adapters = plan.layout, plan.inputs.adapters
        assert layout is not None
        assert answer["length"] == plan.inputs.seq_len
        assert answer["micro_batch"] == layout.micro_batch
        assert answer["steps"] == layout.num_micro_batches
        assert answer["checkpoints"] == (layout.recompute == "full")
        assert answer["rank"] == (None if adapters is None else adapters.rank)
        assert bool(answer.get("liger")) == (plan.inputs.loss == "liger")
        wanted = plan.execution is not None and plan.execution.sync_each_batch
        assert bool(answer["syncs"]) == wanted
        by_deepspeed = plan.inputs.framework == "deepspeed"
        assert answer["stage"] == (layout.zero_stage if by_deepspeed else None)
        assert answer["reshards"] in ((None,) if by_deepspeed else RESHARDS[layout.zero_stage])
        if adapters is not None:
            assert answer["targets"] == ["q_proj", "down_proj"]
            assert answer["bits"] == (4 if adapters.method == "qlora" else 16)
        if "processes" in answer:
            assert (answer["processes"], answer["nodes"]) == (layout.dp, layout.dp // 8)
