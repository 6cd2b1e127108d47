"""Make an archive of small runs in `tests/data`, with the version of rlite that is in the working directory.

    git worktree add ../before REVISION
    cd ../before && PYTHONPATH=. python ../rlite/tests/data/make.py VERSION-REVISION

The archive holds runs that were killed after a checkpoint, and below `resumed` what the same version made of a copy of
each of them. `commands.json` holds the commands, with relative paths. Where a file of a run holds an absolute path, the
archive has `@FOLDER@` in place of the folder: whoever unpacks the archive puts in the new place. The program uses the
commands of rlite, but for the digests of checkpoints. It takes five minutes. An archive that is there is never
replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed import checkpoint as dcp
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from rlite.runtime.storage.sharded import JsonReader, PlainLoadPlanner

PLACE = b"@FOLDER@"
TEXTS = (".json", ".jsonl", ".yaml")
ALPHABET = [chr(code) for code in (*range(32, 127), *range(192, 202))]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<e>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '=' }}{% endif %}{% endfor %}"
)
TEMPLATE_ENDS = TEMPLATE.replace(
    "{{ message.content + '<e>' }}{% endgeneration %}", "{{ message.content }}{% endgeneration %}<e>"
)
"""the end of an answer is not marked as the answer's"""
OWN_CODE = '''
"""Own code of the runs: a reward, and a callback that kills its run after the third step."""

import os
import time
from pathlib import Path

from rlite.trainer.callbacks import Callback, register_callback

calls = []


def digits(completions, **row):
    calls.append(row)
    if len(calls) == 8 and (kill := Path("kill")).exists():
        while Path(kill.read_text()).read_bytes().count(b"\\n") < 4:
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    return [sum(letter.isdigit() for letter in text) / 8 for text in completions]


@register_callback("kill")
class Kill(Callback):
    def on_step(self, run, metrics):
        if run.step == 3:
            os.kill(os.getpid(), 9)
'''
JOB = """
name: small
device_per_node: 1
device_type: CPU
trainer: job_program
store: jobs
"""
JOB_PROGRAM = """
"Program of the job: it keeps a copy of the job's record after its second step."
import shutil
import time
from pathlib import Path

from rlite.services.recovery.record import report_step

for step in (1, 2, 3):
    report_step(step, 3)
    if step == 2:
        while '"step":2' not in Path("jobs/small.json").read_text():
            time.sleep(0.01)
        shutil.copy("jobs/small.json", "jobs/under-way.json")
"""
TRAINER = ("trainer.save_freq=2", "trainer.keep=1", "trainer.save_async=false")
SUPERVISED = (
    *("actor.model_name=model", "actor.lr=0.01", "data.batch_size=2", "data.max_length=32"),
    *("trainer.n_epochs=2", "trainer.test_freq=2", *TRAINER),
)
ROLLOUTS = (
    *("actor.model_name=model", "actor.lr=0.01", "train_data.path=prompts.jsonl"),
    *("train_data.prompts_per_rollout=2", "train_data.responses_per_prompt=3"),
    *("reward.path=own_code.py:digits", "reward.in_process=true", "rollout.train_sampling_params.max_new_tokens=6"),
    *("rollout.max_num_seqs=4", "rollout.max_model_len=32", "rollout.dynamic_filtering=false"),
    *("trainer.total_steps=6", "trainer.record=all", *TRAINER),
)
EVALUATION = (
    *("eval", "model", "data.path=prompts.jsonl", "reward.path=own_code.py:digits", "reward.in_process=true"),
    *("samples=2", "max_new_tokens=6", "max_num_seqs=4", "deterministic=true", "name=model"),
)
RUNS: dict[str, tuple[str, ...]] = {
    "sft": ("sft", "data.path=chats.jsonl", "test_data.path=chats.jsonl", *SUPERVISED),
    "ends": ("sft", "data.path=chats.jsonl", *(option.replace("=model", "=model-ends") for option in SUPERVISED)),
    "lora": ("sft", "actor.lora.rank=2", "data.path=chats.jsonl", *SUPERVISED),
    "dpo": ("dpo", "data.path=pairs.jsonl", "test_data.path=pairs.jsonl", *SUPERVISED),
    "kto": ("kto", "data.path=labels.jsonl", "test_data.path=labels.jsonl", *SUPERVISED),
    "grpo": (
        *("grpo", *ROLLOUTS, "rollout.deterministic=true"),
        *("test_data.path=prompts.jsonl", "test_data.limit=2", "trainer.test_freq=2", "trainer.trace=true"),
    ),
    "critic": ("ppo", *ROLLOUTS, "adv.estimator=gae", "critic.lr=0.01", "rollout.deterministic=true"),
    "ahead": ("grpo", *ROLLOUTS, "rollout.max_head_offpolicyness=1"),
}
"""trainers and options of the runs, by the names of their folders"""
RANKS = {"ahead": 2}
"""ranks of torchrun; other runs have one process"""
KILL = ("--import", "own_code.py", "trainer.callbacks=[kill]")


def inputs(folder: Path) -> None:
    """Write a model of one layer with a tokenizer of characters, the tables of all trainers, and the own code."""
    pieces = ["<e>", "<p>", *ALPHABET]
    core = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<e>", pad_token="<p>")
    tokenizer.chat_template = TEMPLATE
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    sums = [(f"{a}+{b}", str(a + b)) for a, b in ((1, 2), (30, 4), (5, 66), (7, 8), (19, 1), (222, 3))]
    asked = [[{"role": "user", "content": question}] for question, _ in sums]
    answered = [[{"role": "assistant", "content": answer}] for _, answer in sums]
    tables: dict[str, list[dict[str, Any]]] = {
        "prompts": [{"id": f"sum-{n}", "prompt": f"{question}="} for n, (question, _) in enumerate(sums)],
        "chats": [{"messages": [*q, *a]} for q, a in zip(asked, answered, strict=True)],
        "pairs": [
            {"prompt": q, "chosen": a, "rejected": [{"role": "assistant", "content": "no"}]}
            for q, a in zip(asked, answered, strict=True)
        ],
        "labels": [
            {"prompt": q, "completion": a, "label": n % 2 == 0}
            for n, (q, a) in enumerate(zip(asked, answered, strict=True))
        ],
    }
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = {"own_code.py": OWN_CODE, "job.yaml": JOB, "job_program.py": JOB_PROGRAM}
    for name, text in texts.items():
        (folder / name).write_text(text.lstrip())
    for file in (folder / "model").iterdir():
        os.utime(file, (0, 0))  # evaluations know a model again by the times of its files
    shutil.copytree(folder / "model", folder / "model-ends")
    (folder / "model-ends" / "chat_template.jinja").write_text(TEMPLATE_ENDS)


def run(folder: Path, program: Sequence[str], statuses: Sequence[int] = (0,)) -> None:
    """Run a module in a folder, and expect one of some exit statuses."""
    paths = os.pathsep.join([os.getcwd(), str(folder)])
    done = subprocess.run(
        [sys.executable, "-m", *program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in statuses:
        sys.exit(f"{' '.join(program)}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")


def programs() -> dict[str, list[str]]:
    """Return the command that makes, or continues, each folder."""
    found = {"evaluation": ["rlite.cli", *EVALUATION, "out=evaluation"]}
    found["evaluation-killed"] = ["rlite.cli", *EVALUATION, "out=evaluation-killed"]
    for name, (trainer, *options) in RUNS.items():
        launcher = ["torch.distributed.run", f"--nproc_per_node={RANKS[name]}", "-m"] if name in RANKS else []
        found[name] = [*launcher, f"rlite.trainer.{trainer}", *options, f"trainer.save_dir={name}"]
    return found


def digests(checkpoint: Path) -> dict[str, str]:
    """Return a digest of every tensor of a checkpoint."""
    entries = JsonReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if hasattr(entry, "size")
    }
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is one process
        dcp.load(tensors, storage_reader=JsonReader(checkpoint), planner=PlainLoadPlanner(), no_dist=True)
    return {
        name: f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(tensor.numpy().tobytes()).hexdigest()}"
        for name, tensor in sorted(tensors.items())
    }


def make(folder: Path) -> None:
    """Make all runs, and resume copies of them."""
    inputs(folder)
    made = programs()
    for name in RUNS:
        run(folder, [*made[name], *KILL], [1] if name in RANKS else [-signal.SIGKILL])
    run(folder, ["rlite.cli", "merge", "lora/latest/adapter", "merged"])
    run(folder, made["evaluation"])
    (folder / "kill").write_text("evaluation-killed/samples/model.jsonl")
    run(folder, made["evaluation-killed"], [-signal.SIGKILL])
    (folder / "kill").unlink()
    run(folder, ["rlite.cli", "launch", "job.yaml"])
    (folder / "commands.json").write_text(json.dumps(made, indent=1))
    sums = {name: digests(folder / name / "state/step-2") for name in RUNS}
    with tempfile.TemporaryDirectory() as temporary:
        copy = shutil.copytree(folder, Path(temporary) / "moved")
        replace(copy, os.fsencode(folder), os.fsencode(copy))
        (folder / "checkpoints.json").write_text(json.dumps(sums, indent=1))
        for name in (*RUNS, "evaluation-killed"):
            run(copy, made[name])
            kept = folder / "resumed" / name
            kept.mkdir(parents=True)
            for file in ("metrics.jsonl", "latest/model.safetensors", "results.json", "record"):
                if (found := copy / name / file).is_dir():
                    shutil.copytree(found, kept / file)
                elif found.exists():
                    shutil.copy(found, kept)
        shutil.copytree(copy / "lora/latest/adapter", folder / "resumed/lora/adapter")
        replace(folder, os.fsencode(copy), PLACE)
    replace(folder, os.fsencode(folder), PLACE)


def replace(folder: Path, before: bytes, after: bytes) -> None:
    """Replace a path in the text files of a folder."""
    for file in folder.rglob("*"):
        if file.suffix in TEXTS and before in (content := file.read_bytes()):
            file.write_bytes(content.replace(before, after))


def main() -> None:
    """Make the archive that the command line names."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / sys.argv[1]
        folder.mkdir()
        make(folder)
        with tarfile.open(Path(__file__).with_name(f"{folder.name}.tar.xz"), "x:xz") as archive:
            archive.add(folder, folder.name, filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return None if "__pycache__" in member.name else member


if __name__ == "__main__":
    main()
