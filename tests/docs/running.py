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
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

import rlite
from rlite import cli, config
from rlite.assembly.trainers import TRAINERS
from rlite.data.readers import formats
from rlite.errors import RliteError
from rlite.rollout import SingleTurnWorkflow
from rlite.runtime.cluster.session import has_session
from rlite.trainer.model.modules import policy_module
from rlite.types import GenerationHyperparameters
from tests.docs.blocks import Block, commands

HUB = re.compile(r"\b(?:Qwen|PrimeIntellect)/[\w.-]+\b|\bMODEL\b|path/to/qwen3")
"""names of models, for which the tiny model stands"""
SIZES = {
    r"\btotal_steps=\d+": "total_steps=1",
    r"\bmax_new_tokens=\d+": "max_new_tokens=4",
    r'"max_(new_)?tokens": \d+': r'"max_\1tokens": 4',
    r"\bmax_model_len=\d+": "max_model_len=128",
    r'\bprompts_per_rollout": \d+': 'prompts_per_rollout": 2',
    r"\bgroup_size=\d+": "group_size=2",
}
"""sizes in programs, and what they are here"""
PLACES = re.compile(r"(\w+\.)?((ddp|fsdp|tp|ep|sp)_size|num_devices|launcher|executor|gpu_memory_utilization)=.*")
"""options of devices, which are checked but not used for a run"""
ALONE = ["launcher=inprocess", "num_devices=1"]
SUPERVISED = ["data.batch_size=4", "trainer.n_epochs=1", "trainer.overwrite=true"]
REINFORCED = [
    *("train_data.prompts_per_rollout=2", "train_data.responses_per_prompt=2", "trainer.total_steps=1"),
    *("rollout.train_sampling_params.max_new_tokens=4", "rollout.max_model_len=128", "rollout.dynamic_filtering=false"),
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
EVALUATED = ["test_data.path=test.jsonl", "trainer.test_freq=1", "trainer.best_metric=accuracy", "trainer.record=all"]
RUNS = {"sft": [], "rm": [], "grpo": EVALUATED, "ppo": EVALUATED}
"""options of the finished runs that pages name, by the name of the command and of the run"""


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
        """Make the finished runs that blocks name and none of them makes."""
        text = "".join(block.text for block in blocks)
        for name, options in RUNS.items():
            if f"runs/{name}" in text and f"save_dir=runs/{name}" not in text:
                self.rlite(name, ["...", f"trainer.save_dir=runs/{name}", *options])

    def run(self, block: Block) -> None:
        """Run a block; what fails is raised."""
        text = HUB.sub(str(self.model), block.text)
        {
            "python": self.run_program,
            "bash": self.run_commands,
            "yaml": check_options,
            "json": check_rows,
        }[block.language](text)

    def run_program(self, text: str) -> None:
        """Run a program. One that begins with the name of a file is written there, too."""
        for size, small in SIZES.items():
            text = re.sub(size, small, text)
        if file := re.match(r"# ([\w/]+\.py)\b", text):
            Path(file[1]).write_text(text, encoding="utf-8")
            if "@register_" in text:  # the command that imports the file registers its names
                return
        tree = ast.parse(text)
        if re.search(r"rlite\.(init|session|train|evaluate)\(", text):
            self.close()
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
            self.run_command(shlex.split(command, comments=True))

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
        if "tiny.yaml" not in own:  # a run of seconds already
            own += SMALL.get(name, [])
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


def check_options(text: str) -> None:
    """Check that a block of yaml holds options of a trainer."""
    Path("options.yaml").write_text(text, encoding="utf-8")
    refused = {}
    for name in TRAINERS:
        options = cli.COMMANDS[name].find_options()
        try:
            with config.quick_checks():
                config.load(options, ["--config", "options.yaml"], aliases=options.aliases)
        except RliteError as error:
            refused[name] = error
    assert len(refused) < len(TRAINERS), refused


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
    engine.build(max_model_len=128, max_num_seqs=8, **world.beside())
    return engine


def workflow_of(world: World) -> SingleTurnWorkflow:
    return SingleTurnWorkflow(world.get("reward_fn"), world.get("gconfig"), world.get("tokenizer"))


def correct(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **row: Any) -> float:
    """Grade an answer."""
    return float(completions.strip() == answer)


def train_engine_of(world: World) -> rlite.RliteTrainEngine:
    """Return a train engine of the tiny model."""
    if not has_session():
        rlite.init("cpu", 1)
    engine = rlite.RliteTrainEngine(policy_module(world.model))
    engine.build(**world.beside())
    return engine


class Actor:
    """Stands for an engine whose module has a method of the reader's own."""

    def train_step(self, sequences: Any) -> list[float]:
        return [0.0]


ROWS = [{"prompt": f"{a} + 2 =", "answer": str(a + 2)} for a in range(4)]
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
    "engine": engine_of,
    "tokenizer": lambda world: world.get("engine").tokenizer,
    "gconfig": lambda world: GenerationHyperparameters(max_new_tokens=4),
    "workflow": workflow_of,
    "reward_fn": lambda world: correct,
    "correct": lambda world: correct,
    "right": lambda world: correct,
    "rows": lambda world: ROWS,
    "my_rows": lambda world: [{"prompt": row["prompt"], "response": row["answer"]} for row in ROWS],
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
    "ask": lambda world: lambda: asyncio.sleep(0),
    "verify": lambda world: correct,
    "f": lambda world: lambda completions, **columns: [0.0 for _ in completions],
    "brief": lambda world: lambda completions, **columns: [-float(len(each)) for each in completions],
    "compute_score": lambda world: lambda data_source, solution_str, ground_truth, extra_info: 0.0,
}
"""names that pages take for granted, or that a page does"""
