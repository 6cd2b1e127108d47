"""Model folders of a hostile stranger: how does each command end?  `python -m benchmarks.hostile_models [NAME ...]`.

Each command runs in a fork of this process, on a copy of a sound tiny model with one change. A command that ends with a
traceback, with several lines, or not within LIMIT_S is marked BAD.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.model import build_model_dir
from rlite import cli

for _module in ("generate", "merge", "plan"):
    importlib.import_module(f"rlite.assembly.commands.{_module}")  # forks need not import them
for _module in ("assembly.evaluate.command", "trainer.grpo", "trainer.sft"):
    importlib.import_module(f"rlite.{_module}")

LIMIT_S = 40.0
DOUBLING = "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}"
NESTED = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
RECURSIVE = '{"a":' * 20_000 + "1" + "}" * 20_000
COMMANDS: dict[str, Sequence[str]] = {
    "plan": ["model_name=model", "num_devices=1"],
    "sft": ["actor.model_name=model", "data.path=rows.jsonl", "data.batch_size=2", "trainer.n_epochs=1"],
    "grpo": [
        *("actor.model_name=model", "train_data.path=prompts.jsonl", "reward.path=reward.py:reward"),
        *(
            "train_data.prompts_per_rollout=2",
            "train_data.responses_per_prompt=2",
            "trainer.total_steps=1",
            "reward.in_process=true",
            "rollout.train_sampling_params.max_new_tokens=4",
        ),
    ],
    "generate": ["model", "hello", "max_new_tokens=4"],
    "eval": [
        "model",
        "data.path=prompts.jsonl",
        "reward.path=reward.py:reward",
        "max_new_tokens=4",
        "reward.in_process=true",
        "out=eval",
    ],
    "merge": ["adapter", "merged", "base_model=model"],
}


@dataclass(frozen=True)
class Ending:
    """End of one command."""

    status: int | None
    """exit status; None if it was killed after LIMIT_S"""
    seconds: float
    output: str

    @property
    def lines(self) -> list[str]:
        """The lines that the command has printed, without the one that announces it."""
        return [line for line in self.output.splitlines() if line.strip() and "loading torch" not in line]

    @property
    def is_bad(self) -> bool:
        """Whether a user would see a hang, a traceback, or more than one line."""
        return self.status is None or "Traceback" in self.output or (self.status != 0 and len(self.lines) > 1)


def edit_json(file: str, **changes: Any) -> Callable[[Path], None]:
    """Return an edit that changes values of a JSON file of the model."""

    def edit(model: Path) -> None:
        content = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps({**content, **changes}))

    return edit


def replace_file(file: str, content: str) -> Callable[[Path], None]:
    """Return an edit that gives a file of the model another content."""
    return lambda model: put(model / file, lambda place: place.write_text(content))


def put(place: Path, make: Callable[[Path], Any]) -> None:
    """Make something else in the place of a file."""
    place.unlink(missing_ok=True)
    make(place)


def index(**files: str) -> Callable[[Path], None]:
    """Return an edit that names the files of all tensors in an index; {} is the sound file."""

    def edit(model: Path) -> None:
        names = load_file(model / "model.safetensors")
        (model / "model.safetensors").rename(model / "part.safetensors")
        weights = {name: files.get("file", "part.safetensors") for name in names}
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights, "metadata": {}}))

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Return an edit that changes the tensors of the model."""

    def edit(model: Path) -> None:
        held = load_file(model / "model.safetensors")
        change(held)
        save_file(held, model / "model.safetensors", metadata={"format": "pt"})

    return edit


def many_added_tokens(model: Path) -> None:
    """Add 200,000 tokens to the tokenizer."""
    added = [
        {"id": 300 + i, "content": f"<t{i}>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        for i in range(200_000)
    ]
    content = json.loads((model / "tokenizer.json").read_text())
    content["added_tokens"] += [{**token, "normalized": False} for token in added]
    (model / "tokenizer.json").write_text(json.dumps(content))


def adapter_pattern(pattern: str) -> Callable[[Path], None]:
    """Return an edit of the adapter beside the model."""
    return lambda model: edit_json("adapter_config.json", target_modules=pattern)(model.parent / "adapter")


EDITS: dict[str, Callable[[Path], None]] = {
    "sound": lambda model: None,
    "template doubles a string": replace_file("chat_template.jinja", DOUBLING),
    "template loops": replace_file("chat_template.jinja", NESTED),
    "template with a power": replace_file("chat_template.jinja", "{{ 9 ** 9 ** 9 }}"),
    "template repeats a string": replace_file("chat_template.jinja", "{{ 'a' * 20000000000 }}"),
    "template broken": replace_file("chat_template.jinja", "{% for %}"),
    "template nested": replace_file("chat_template.jinja", "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}"),
    "added tokens": many_added_tokens,
    "adapter pattern": adapter_pattern(r"(([a-z0-9_.])+)+X|.*q_proj"),
    **{
        f"{what} as {file}": lambda model, file=file, make=make: put(model / file, make)  # type: ignore[misc]
        for file in ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json")
        for what, make in {
            "pipe": os.mkfifo,
            "folder": Path.mkdir,
            "device": lambda place: place.symlink_to("/dev/zero"),
            "loop": lambda place: place.symlink_to(place.name),
            "broken JSON": lambda place: place.write_text("{"),
            "nested JSON": lambda place: place.write_text(RECURSIVE),
            "list": lambda place: place.write_text("[1, 2]"),
            "binary": lambda place: place.write_bytes(b"\xff\xfe\x00" * 100),
            "empty": lambda place: place.write_bytes(b""),
        }.items()
    },
    "config of wrong types": edit_json("config.json", hidden_size="wide", num_hidden_layers=[1]),
    "config with negative sizes": edit_json("config.json", hidden_size=-64),
    "config without heads": edit_json("config.json", num_attention_heads=0),
    "config with huge sizes": edit_json("config.json", hidden_size=10**15, vocab_size=10**15),
    "config with many layers": edit_json("config.json", num_hidden_layers=10**9, layer_types=None),
    "config with a huge vocabulary": edit_json("config.json", vocab_size=2 * 10**9),
    "config with an unknown type": edit_json("config.json", model_type="unheard_of"),
    "config without a type": edit_json("config.json", model_type=None),
    "config with code": edit_json("config.json", model_type="new", auto_map={"AutoConfig": "code.C"}),
    "config with kernels": edit_json("config.json", attn_implementation="kernels-community/flash-attn"),
    "config with an unknown rope": edit_json("config.json", rope_parameters={"rope_type": "new", "rope_theta": 1.0}),
    "config with an unknown dtype": edit_json("config.json", dtype="float3"),
    "config with an unknown activation": edit_json("config.json", hidden_act="new"),
    "config quantised": edit_json("config.json", quantization_config={"quant_method": "fp8"}),
    "index outside": index(file="../../part.safetensors"),
    "index of a missing file": index(file="gone.safetensors"),
    "index sound": index(),
    "index of wrong types": replace_file("model.safetensors.index.json", '{"weight_map": [1]}'),
    "weights cut": lambda model: os.truncate(model / "model.safetensors", 5000),
    "weights of fp8": tensors(lambda held: held.update({n: t.to(torch.float8_e4m3fn) for n, t in held.items()})),
    "weights missing": tensors(lambda held: held.pop("model.norm.weight")),
    "weights more": tensors(lambda held: held.update({"model.layers.9.mlp.up_proj.weight": torch.ones(2, 2)})),
    "tokenizer config of wrong types": edit_json("tokenizer_config.json", eos_token=[1], chat_template=3),
    "tokenizer with code": edit_json("tokenizer_config.json", auto_map={"AutoTokenizer": ["code.T", None]}),
    "tokenizer of an unknown class": edit_json("tokenizer_config.json", tokenizer_class="NoSuchTokenizer"),
}


def prepare(folder: Path) -> None:
    """Write a sound model, an adapter, rows and a reward into a folder."""
    model = build_model_dir(folder / "model", hidden=32)
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    adapted.save_pretrained(str(folder / "adapter"))
    rows = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "yes"}]} for n in (1, 2)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n}?"}) for n in (1, 2)))
    (folder / "reward.py").write_text(
        "def reward(prompt, completions, prompt_ids, completion_ids, **row):\n    return float(len(completions))\n"
    )


def run(command: str, folder: Path) -> Ending:
    """Run a command in a fork of this process, inside a folder."""
    began, log = time.monotonic(), folder / f"{command}.log"
    if (child := os.fork()) == 0:
        os.chdir(folder)
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        sys.stdin.close()
        sys.argv = ["rlite", command, *COMMANDS[command]]
        status = 0
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
        except BaseException:
            status = 1
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    while True:
        ended, code = os.waitpid(child, os.WNOHANG)
        seconds = time.monotonic() - began
        if ended or seconds > LIMIT_S:
            break
        time.sleep(0.05)
    if not ended:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return Ending(os.waitstatus_to_exitcode(code) if ended else None, seconds, log.read_text(errors="replace"))


def main(names: Sequence[str]) -> None:
    """Print how the commands end, for the edits whose names begin like one of `names`; all without names."""
    with tempfile.TemporaryDirectory() as temporary:
        sound = Path(temporary) / "sound"
        prepare(sound)
        for name, edit in EDITS.items():
            if names and not name.startswith(tuple(names)):
                continue
            for command in COMMANDS:
                folder = Path(temporary) / "case"
                shutil.copytree(sound, folder)
                edit(folder / "model")
                ending = run(command, folder)
                shutil.rmtree(folder)
                told = f"{name:40} {command:9} {'killed' if ending.status is None else ending.status:>6}"
                last = " | ".join(line[:150] for line in (ending.lines if ending.is_bad else ending.lines[-1:]))
                print(f"{told} {ending.seconds:5.1f} s {'BAD ' if ending.is_bad else ''}{last}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
