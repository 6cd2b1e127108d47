"""Run the blocks of a page in this process, as they are printed but for the model, the devices and the sizes.

The blocks of a page run in their order, in one folder and with one set of names. The folder holds a tiny model, the
tables and the functions that pages name, and finished runs. What a page takes for granted, such as `engine`, is made
when a block reads it.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser
from transformers import AutoTokenizer

import rlite
from rlite import cli, config
from rlite.assembly.trainers import TRAINERS
from rlite.data.readers import formats
from rlite.errors import RliteError
from rlite.rollout import SingleTurnWorkflow
from rlite.runtime.cluster.session import has_session
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.types import GenerationHyperparameters
from tests import forked_python
from tests.docs.blocks import ROOT, Block, commands

HUB = re.compile(r"\b(?:Qwen|PrimeIntellect)/[\w.-]+\b|\bMODEL\b|path/to/qwen3")
"""names of models, for which the tiny model stands"""
SIZES = {
    r"\btotal_steps=\d+": "total_steps=1",
    r"\bmax_new_tokens=\d+": "max_new_tokens=4",
    r'"max_(new_)?tokens": \d+': r'"max_\1tokens": 4',
    r"\bmax_model_len=\d+": "max_model_len=512",
    r'\b(prompts_per_rollout|responses_per_prompt)": \d+': r'\1": 2',
    r'\bmax_new_tokens": \d+': 'max_new_tokens": 4',
    r'(rlite\.train\(\s*"(?:ppo|grpo)",)(?![^)]*total_steps)': r"\1 total_steps=1,",
    r'(rlite\.train\(\s*"(?:ppo|grpo)",)(?![^)]*(?:max_new_tokens|\*\*options))': (
        r'\1 **{"train_data.prompts_per_rollout": 2, "rollout.train_sampling_params.max_new_tokens": 4},'
    ),
    r"\bgroup_size=\d+": "group_size=2",
}
"""sizes in programs, and what they are here"""
PLACES = re.compile(
    r"(\w+\.)?((ddp|fsdp|tp|ep|sp)_size|num_devices|launcher|executor"
    r"|gpu_memory_utilization|max_head_offpolicyness)=.*"
)
"""options of devices, which are checked but not used for a run"""
ALONE = ["launcher=inprocess", "num_devices=1"]
SUPERVISED = ["data.batch_size=4", "trainer.n_epochs=1", "trainer.overwrite=true"]
REINFORCED = [
    *("train_data.prompts_per_rollout=2", "train_data.responses_per_prompt=2", "trainer.total_steps=1"),
    *("rollout.train_sampling_params.max_new_tokens=4", "rollout.max_model_len=512", "rollout.dynamic_filtering=false"),
    "trainer.overwrite=true",
]
SMALL = dict.fromkeys(("sft", "rm", "dpo", "orpo", "simpo", "cpo", "kto"), SUPERVISED)
SMALL |= dict.fromkeys(("ppo", "grpo", "distill"), REINFORCED)
SMALL |= {"eval": ["max_new_tokens=4", "samples=2", "limit=2"], "generate": ["max_new_tokens=4"]}
"""options that make a command short, by its name"""
MODEL = "actor.model_name=MODEL"
PROMPTS = (MODEL, "train_data.path=prompts.jsonl", "reward.path=my.py:correct")
GIVEN = {
    "sft": (MODEL, "data.path=rows.jsonl"),
    "dpo": (MODEL, "data.path=pairs.jsonl"),
    "rm": ("critic.model_name=MODEL", "data.path=pairs.jsonl"),
    "ppo": PROMPTS,
    "grpo": PROMPTS,
}
"""what `...` stands for, by the name of the command"""
FUNCTIONS = """
def correct(prompt, completions, prompt_ids, completion_ids, **row):
    return float(completions[:1] == row.get("answer", "")[:1])


def brief(prompt, completions, prompt_ids, completion_ids, **row):
    return -float(len(completions))


right = correct


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.startswith(ground_truth))


def varied(prompt, completions, prompt_ids, completion_ids, **row):
    return float(sum(map(ord, completions)) % 7)
"""
"""functions of readers, in files and for programs"""
EVALUATED = ["test_data.path=test.jsonl", "trainer.test_freq=1", "trainer.best_metric=accuracy", "trainer.record=all"]
LORA = ["actor.lora.rank=4"]
RUNS = {"sft": LORA, "rm": [], "grpo": EVALUATED, "ppo": EVALUATED}
"""options of the finished runs that pages name, by the name of the command and of the run"""
CONTRACTS = ROOT / "examples" / "contracts"
WORKFLOW = """
from rlite.rollout import SingleTurnWorkflow
from rlite.rollout.registry import register_workflow


def right(prompt, completions, prompt_ids, completion_ids, **row):
    return float(completions.strip() == "42")


@register_workflow("debate")
def workflow(gconfig, tokenizer):
    return SingleTurnWorkflow(right, gconfig, tokenizer)
"""
ROWS = [{"prompt": f"{a} + 2 =", "answer": str(a + 2), "response": str(a + 2)} for a in range(32)]
CHAT = {"messages": [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": "4"}]}
COUNTDOWN = {"prompt": "Combine 3, 5 and 9 to 17.", "extra_info": {"numbers": [3, 5, 9], "target": 17}}
FILES = {
    "checkpoints": {"prompts.txt": "2 + 2 =\n3 + 3 =\n"},
    "coming-from-rlite-rl2-areal-dlrover": {"data/countdown/train.jsonl": (json.dumps(COUNTDOWN) + "\n") * 4},
    "contracts": {
        "rows.jsonl": '{"target": 3}\n{"target": 4}\n',
        "counter.py": (CONTRACTS / "trl_counter.py").read_text(encoding="utf-8"),
    },
    "environments": {
        "targets.jsonl": '{"target": 3}\n{"target": 4}\n',
        "counter.py": (CONTRACTS / "trl_counter.py").read_text(encoding="utf-8"),
        "game.py": (CONTRACTS / "gym_like.py").read_text(encoding="utf-8"),
        "my.py": WORKFLOW,
    },
    "data": {
        "rows.jsonl": '{"question": "2 + 2 =", "answer": "4", "problem": "2 + 2 =", "solution": "4"}\n' * 4,
        "both.jsonl": "".join(json.dumps(row | CHAT) + "\n" for row in ROWS),
        "chats.jsonl": (json.dumps(CHAT) + "\n") * 8,
    },
    "streaming": {
        "chats.jsonl": (json.dumps(CHAT) + "\n") * 8,
        **{f"shards/{number}.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS) for number in range(2)},
    },
    "own-code": {"my_algorithms.py": "", "my_package/__init__.py": "", "my_package/rewards.py": ""},
}
"""files of pages, beside those that every page has"""
BEFORE = {
    "evaluation": """
rlite eval runs/sft --data test.jsonl --reward my.py:correct --out runs/eval-sft
rlite eval runs/grpo --data test.jsonl --reward my.py:correct --out runs/eval-grpo
"""
}
"""commands before the first block of a page"""


class World:
    """The folder and the names of one page.

    Args:
        page: name of the page without its ending.
        model: folder of the tiny model.
        patch: undoes, at the end of the page, what blocks change of the process.
    """

    def __init__(self, page: str, model: Path, patch: pytest.MonkeyPatch) -> None:
        self.page = page
        self.model = model
        self.patch = patch
        self.names: dict[str, Any] = {"__name__": "page"}

    def prepare(self, blocks: Sequence[Block]) -> None:
        """Make what blocks name and none of them makes: files, finished runs, and evaluations of these."""
        text = "".join(block.text for block in blocks)
        for name, written in FILES.get(self.page, {}).items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(written, encoding="utf-8")
        for name, options in RUNS.items():
            if f"runs/{name}" in text and f"save_dir=runs/{name}" not in text:
                self.rlite(name, ["...", f"trainer.save_dir=runs/{name}", *options])
        for command in commands(BEFORE.get(self.page, "")):
            self.run_command(shlex.split(command))

    def run(self, block: Block) -> None:
        """Run a block; what fails is raised."""
        text = HUB.sub(str(self.model), block.text).replace("ADAPTER", "runs/sft/latest/adapter")
        {
            "python": self.run_program,
            "bash": self.run_commands,
            "yaml": self.check_options,
            "json": check_rows,
        }[block.language](text)

    def run_program(self, text: str) -> None:
        """Run a program. One that begins with the name of a file is written there, too."""
        for size, small in SIZES.items():
            text = re.sub(size, small, text)
        for folder in re.findall(r'\bsave_dir="([\w/-]+)"', text):
            shutil.rmtree(folder, ignore_errors=True)  # a run of an earlier block
        if re.search(r"rlite\.train\(|Trainer\(", text):
            for name in TRAINERS:
                if f"runs/{name}" not in text:
                    shutil.rmtree(f"runs/{name}", ignore_errors=True)
        if file := re.match(r"# ([\w/]+\.py)\b", text):
            Path(file[1]).write_text(text, encoding="utf-8")
            if "@register_" in text:  # the command that imports the file registers its names
                return
        tree = ast.parse(text)
        if "rollout_options = " in text:  # they are set before the first rollout
            self.close()
        if re.search(r"rlite\.(init|session|train|evaluate)\(|Engine\(", text):
            self.close()
            if re.search(r"Engine\(", text) and not re.search(r"rlite\.(init|session)\(", text):
                rlite.init("cpu", 1)
        self.provide(tree)
        code = compile(tree, file[1] if file else "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        made = eval(code, self.names)
        if asyncio.iscoroutine(made):
            asyncio.run(made)

    def provide(self, tree: ast.Module) -> None:
        """Make the names that a program reads and neither it nor an earlier block of the page has made."""
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        made = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
        for name in {node.id for node in nodes} - made:
            if name in PROVIDED or (self.page, name) in PROVIDED:
                self.get(name)

    def get(self, name: str) -> Any:
        """Return a name that the page takes for granted."""
        if name not in self.names:
            make = PROVIDED.get((self.page, name)) or PROVIDED[name]
            self.names[name] = make(self)
        return self.names[name]

    def beside(self) -> dict[str, Any]:
        """Return the keyword that builds an engine on the device of an earlier one."""
        engines = [value for name, value in self.names.items() if name.endswith("engine")]
        return {"colocate_with": engines} if engines else {}

    def close(self) -> None:
        """End the session, and forget its engines."""
        rlite.shutdown()
        self.names = {name: value for name, value in self.names.items() if not name.endswith("engine")}

    def run_commands(self, text: str) -> None:
        """Run each command of a block."""
        for command in commands(text):
            words = shlex.split(command, comments=True)
            end = next((place for place, word in enumerate(words) if word in ("|", ">")), len(words))
            self.run_command(words[:end])  # what another program does with the output is its own

    def run_command(self, words: list[str]) -> None:
        """Run one command.

        Raises:
            LookupError: nothing here runs such a command.
        """
        match words:
            case ["torchrun", *rest]:
                parsed = get_args_parser().parse_args(rest)
                assert parsed.module
                self.run_command(["python", "-m", parsed.training_script, *parsed.training_script_args])
            case ["python", "-m", module, *rest] if module.startswith("rlite.trainer."):
                self.rlite(module.rpartition(".")[2], rest)
            case ["python", "-c", program]:
                exec(program, {})
            case ["python", file]:
                runpy.run_path(file, run_name="__main__")
            case ["rlite", name, *rest]:
                self.rlite(name, rest)
            case ["cd", folder]:
                self.patch.chdir(folder)
            case _:
                raise LookupError(f"{shlex.join(words)}: nothing runs it here; put a marker before the block")

    def check_options(self, text: str) -> None:
        """Check that a block of yaml holds options of a trainer, or a job."""
        Path("options.yaml").write_text(text, encoding="utf-8")
        refused = {}
        for name in (*TRAINERS, "launch"):
            options = cli.COMMANDS[name].find_options()
            given = [word.replace("MODEL", str(self.model)) for word in GIVEN.get(name, (MODEL,))]
            try:
                with config.quick_checks():
                    config.load(
                        options,
                        [*(given if name != "launch" else ()), "--config", "options.yaml"],
                        aliases=getattr(options, "aliases", {}),
                    )
                return
            except RliteError as error:
                refused[name] = error
        raise AssertionError(refused)

    def rlite(self, name: str, arguments: Sequence[str]) -> None:
        """Check the options of a command as they are printed, and run it with small ones."""
        self.close()
        given = [word.replace("MODEL", str(self.model)) for word in GIVEN.get(name, ())]
        own = [word for word in arguments if word != "..."]
        if len(own) < len(arguments):
            own = [*(word for word in given if not holds(own, word)), *own]
        if name in TRAINERS:
            options = cli.COMMANDS[name].find_options()
            with config.quick_checks():
                config.load(options, options.arguments(own), aliases=options.aliases)
            own = [word for word in own if not PLACES.fullmatch(word)]
        if "tiny.yaml" not in own and (name != "eval" or holds(own, "--data") or holds(own, "data.path")):
            own += SMALL.get(name, [])  # others are small already
        if holds(own, "data.streaming"):
            own = [*(word for word in own if not word.startswith("trainer.n_epochs")), "trainer.total_steps=1"]
        if name == "plan":  # its stand-ins of process groups stay in their process
            program = [forked_python.python(), "-c", "from rlite.cli import main; main()", name, *own]
            done = subprocess.run(program, capture_output=True, text=True, timeout=250)
            assert done.returncode == 0, done.stderr
            return
        self.patch.setattr(sys, "argv", ["rlite", name, *own, *(ALONE if name in TRAINERS else ())])
        try:
            cli.main()
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise AssertionError(f"{shlex.join(sys.argv)}: {ended.code}") from ended


def holds(words: Sequence[str], word: str) -> bool:
    """Return whether words set what a word sets: the same key, or another reward or mixture of the same group."""
    key = word.partition("=")[0]
    begin = "reward." if key == "reward.path" else key
    return any(each.partition("=")[0].startswith(begin) for each in words)


def check_rows(text: str) -> None:
    """Check that each line of a block of JSON is a row of a known format."""
    for line in text.splitlines():
        row = json.loads(line)
        kinds = ("demonstrations", "preferences", "unpaired", "prompts")
        assert any(formats.format_of(row, kind) for kind in kinds), line


def engine_of(world: World) -> rlite.RliteInferenceEngine:
    """Return a small engine of the tiny model."""
    if not has_session():
        rlite.init("cpu", 1)
    engine = rlite.RliteInferenceEngine(str(world.model))
    engine.build(max_model_len=512, max_num_seqs=8, **world.beside())
    return engine


def workflow_of(world: World) -> SingleTurnWorkflow:
    return SingleTurnWorkflow(world.get("reward_fn"), world.get("gconfig"), world.get("tokenizer"))


def own(name: str) -> Callable[[World], Any]:
    """Return how to make a function of readers, which travels to other processes by value."""

    def make(world: World) -> Any:
        names: dict[str, Any] = {"__name__": "functions_of_readers"}
        exec(FUNCTIONS, names)
        return names[name]

    return make


def train_engine_of(world: World) -> rlite.RliteTrainEngine:
    """Return a train engine of the tiny model."""
    if not has_session():
        rlite.init("cpu", 1)
    engine = rlite.RliteTrainEngine(policy_module(world.model, OPTIMIZER))
    engine.build(**world.beside())
    return engine


OPTIMIZER = OptimizerOptions(lr=1e-3, weight_decay=0.0, scheduler="constant", warmup_steps=0, total_steps=1)


class Actor:
    """Stands for an engine whose module has a method of the reader's own."""

    def train_step(self, sequences: Any) -> list[float]:
        return [0.0]


IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
BATCH = {
    "input_ids": IDS,
    "attention_mask": torch.ones_like(IDS, dtype=torch.bool),
    "loss_mask": torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1]], dtype=torch.bool),
    "logprobs": torch.full((2, 4), -5.0),
    "rewards": torch.tensor([1.0, 0.0]),
    "group_ids": torch.tensor([0, 0]),
}
PROVIDED: Mapping[str | tuple[str, str], Callable[[World], Any]] = {
    ("own-algorithms", "engine"): train_engine_of,
    ("own-algorithms", "batch"): lambda world: BATCH,
    ("rewards", "rows"): lambda world: [
        {**row, "completions": "4", "prompt_ids": [1], "completion_ids": [2]} for row in ROWS
    ],
    "engine": engine_of,
    "tokenizer": lambda world: AutoTokenizer.from_pretrained(world.model),
    "gconfig": lambda world: GenerationHyperparameters(max_new_tokens=4),
    "workflow": workflow_of,
    "reward_fn": own("varied"),
    "correct": own("correct"),
    "right": own("right"),
    "rows": lambda world: ROWS,
    "my_rows": lambda world: ROWS,
    "items": lambda world: ROWS[:2],
    "loader": lambda world: [ROWS[:2]] * 4,
    "num_steps": lambda world: 1,
    "train": lambda world: lambda batch: None,
    "train_engine": train_engine_of,
    "actor": lambda world: Actor(),
    "batch": lambda world: [[1, 2], [3, 4]],
    "mask": lambda world: torch.tensor([True, False]),
    "kl": lambda world: torch.tensor([0.1, 0.0]),
    "lr": lambda world: 1e-6,
    "ask": lambda world: lambda question: asyncio.sleep(0),
    "verify": own("correct"),
    "f": lambda world: lambda completions, **columns: [0.0 for _ in completions],
    "brief": lambda world: lambda completions, **columns: [-float(len(each)) for each in completions],
    "compute_score": lambda world: lambda data_source, solution_str, ground_truth, extra_info: 0.0,
}
"""names that pages take for granted, or that a page does"""
