"""The quickstart: a small language model learns to spell words backwards, by reinforcement learning, on a CPU.

    make quickstart        or        rlite quickstart [steps=60 folder=runs/quickstart seed=0]

    1. a Qwen3 of 0.4 million parameters and a byte tokenizer are made in code
    2. warm start: it imitates a teacher who is right about short words and too impatient for long ones
    3. GRPO: it tries each word several times, reasoning-gym's verifier says which tries are right, it does more of that

If it is stopped, the same command resumes it.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import rlite
from rlite import config
from rlite.assembly.commands.options import QuickstartConfig, QuickstartRunOptions
from rlite.data.prompts import ShuffledOrder
from rlite.data.reasoning import held_out_split
from rlite.data.sft import sft_rows
from rlite.engine.train import RliteTrainEngine
from rlite.errors import ConfigError
from rlite.nn.pretrained import load_tokenizer, quiet_transformers
from rlite.rollout import RewardFunction, SingleTurnWorkflow
from rlite.rollout.rewards.reasoning import verify_exactly
from rlite.services.console.sinks import read_metrics
from rlite.services.console.terminal import ConsoleReporter
from rlite.trainer.losses import SftLoss
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.trainer.options import SamplingOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions


def impatient_demonstrations(
    problems: Sequence[Mapping[str, Any]], seed: int, *, patience: int, impatience: float
) -> list[str]:
    """Demonstrate one answer per problem, as a teacher who is often too impatient to finish.

    Short answers are demonstrated whole. A model that imitates this teacher well fails most long problems, although it
    has seen how they are solved.

    Returns one answer per problem.
    """
    rng = random.Random(seed)
    answers = [problem["answer"] for problem in problems]
    return [answer[:patience] if rng.random() < impatience else answer for answer in answers]


HEAD_DIM = 32
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte of UTF-8 and three tokens of ChatML.

    Ids 0 to 255 follow the order of byte-level BPE's alphabet. It is byte-level BPE without merges, so every text
    survives encoding and decoding, and `AutoTokenizer`, which picks a class by the model's type, reads it back
    unchanged. Turns end with `<|im_end|>`; `<|endoftext|>` is the padding.
    """
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END_OF_TEXT, TURN_START, TURN_END]
    core = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=END_OF_TEXT,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def build_tiny_qwen3(
    path: str | Path,
    *,
    seed: int,
    hidden_size: int = 192,
    intermediate_size: int = 384,
    num_layers: int = 2,
    num_key_value_heads: int = 2,
) -> Path:
    """Write an untrained Qwen3 (float32, tied embeddings) with `byte_tokenizer` to a folder.

    It suits prompts of about a hundred bytes and training from random weights: wide initial weights, and rotary
    frequencies that distinguish such short distances. The same arguments write the same weights; the process's
    random state is left unchanged.
    """
    num_heads, rest = divmod(hidden_size, HEAD_DIM)
    if rest or num_heads % num_key_value_heads:
        raise ConfigError(
            "hidden_size must be head_dim x num_heads, and num_heads a multiple of num_key_value_heads; found "
            f"hidden_size={hidden_size}, head_dim={HEAD_DIM}, num_key_value_heads={num_key_value_heads}"
        )
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    with quiet_transformers():
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)


TASK = "spell_backward"
MAX_NEW_TOKENS = 12
MAX_LENGTH = 128


def main(argv: Sequence[str]) -> None:
    """Run the quickstart, or continue an interrupted one."""
    options = config.load(QuickstartConfig, argv)
    plots = importlib.import_module("rlite.services.console.plots")  # its package is optional, and is missed now
    folder = Path(options.folder)
    train, held_out = problems(options, folder)
    rlite.init(num_devices=1)
    warm = folder / "warm"
    if not warm.exists():
        blank = build_tiny_qwen3(folder / "blank", seed=options.seed, hidden_size=128, intermediate_size=256)
        warm_start(options, blank, folder, train)
    summary = reinforce(options, folder, warm, train, held_out)
    rlite.shutdown()
    (folder / "summary.json").write_text(json.dumps(summary, indent=2))
    curve, title = folder / "learning_curve.png", "Spelling backwards, learned by GRPO"
    plots.plot_learning_curve(folder / "metrics.jsonl", curve, metrics=("accuracy", "reward"), title=title)
    ConsoleReporter().report("quickstart is done", report_rows(folder, summary))


def problems(options: QuickstartConfig, folder: Path) -> tuple[list[Any], list[Any]]:
    """Return training and held-out problems, and write them to the run's folder for you to read."""
    split = held_out_split(TASK, options.num_train, options.num_held_out, options.seed)
    train, held_out = ([shortened(row) for row in rows] for rows in split)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("held_out", held_out)):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return train, held_out


def shortened(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with a question of a few bytes; an untrained model needs no long instruction."""
    return {**row, "messages": [{"role": "user", "content": f"reverse {row['metadata']['word']}"}]}


def warm_start(options: QuickstartConfig, blank: Path, folder: Path, train: Sequence[Any]) -> None:
    """Teach the format and short words by imitation; writes `folder/warm`."""
    answers = impatient_demonstrations(train, options.seed, patience=4, impatience=0.6)
    turns = ({"role": "assistant", "content": answer} for answer in answers)
    chats = [{"messages": [*row["messages"], turn]} for row, turn in zip(train, turns, strict=True)]
    rows = sft_rows(chats, load_tokenizer(blank), MAX_LENGTH)
    optimizer = OptimizerOptions(
        lr=2e-3, weight_decay=0.0, scheduler="cosine", warmup_steps=10, total_steps=options.warm_steps
    )
    engine = RliteTrainEngine(policy_module(blank, optimizer))
    engine.build()
    console = ConsoleReporter(options.warm_steps, metrics=("loss",))
    console.report("1/2 warm start", {"imitate": f"{len(rows)} demonstrations, {options.warm_steps} steps of 64"})
    order, loss = ShuffledOrder(len(rows), options.seed), SftLoss()
    for step in range(options.warm_steps):
        stats = engine.train_batch(rows.batch(order.take(64)), loss, loss.weight)
        engine.step_lr_scheduler()
        if (step + 1) % 25 == 0:
            console.log(step + 1, stats)
    console.close()
    engine.save(folder / "warm")
    engine.release()


def reinforce(
    options: QuickstartConfig, folder: Path, warm: Path, train: Sequence[Any], held_out: Sequence[Any]
) -> dict[str, float]:
    """Train with GRPO from the warm start.

    Returns held-out accuracy before and after.
    """
    run = PpoConfig(
        actor=ActorOptions(model_name=str(warm), lr=5e-4, weight_decay=0.0, gradient_checkpointing=False),
        train_data=PromptOptions(prompts_per_rollout=32, responses_per_prompt=8),
        rollout=RolloutOptions(
            train_sampling_params=SamplingOptions(max_new_tokens=MAX_NEW_TOKENS),
            executor=options.executor,
            max_model_len=MAX_LENGTH,
            dynamic_filtering=False,
        ),
        trainer=QuickstartRunOptions(
            save_dir=str(folder),
            total_steps=options.steps,
            save_freq=20,
            test_freq=20,
            load_ckpt_from="latest",
            sinks=["jsonl", "tensorboard"],
            experiment_name="quickstart",
            seed=options.seed,
        ),
    )
    sampling = run.rollout.train_sampling_params.gconfig()
    workflow = SingleTurnWorkflow(RewardFunction(verify_exactly), sampling, load_tokenizer(warm))
    PpoTrainer(run, workflow, train, held_out).fit()
    logged = read_metrics(folder / "metrics.jsonl")
    accuracies = [row["accuracy"] for row in logged if "accuracy" in row]
    return {"accuracy_before": accuracies[0], "accuracy_after": accuracies[-1], "steps": logged[-1]["step"]}


def report_rows(folder: Path, summary: dict[str, float]) -> dict[str, str]:
    """Return the table shown at the end: results, where they are, and next steps."""
    return {
        "held-out accuracy": f"{summary['accuracy_before']:.2f} after the warm start, "
        f"{summary['accuracy_after']:.2f} after {summary['steps']:.0f} GRPO steps",
        "curve": f"{folder}/learning_curve.png",
        "rollouts": f"{folder}/record: what the model tried, and what it got for it",
        "metrics": f"{folder}/metrics.jsonl, or: tensorboard --logdir {folder}",
        "model": f"{folder}/latest, opens with transformers",
        "next": "examples/grpo.py configures this run for your own model and reward; "
        "examples/grpo_from_engines.py writes the loop itself",
        "look": f"rlite view {folder} opens its rollouts, curves and lost work in the browser",
    }
