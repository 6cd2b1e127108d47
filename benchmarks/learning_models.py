"""The quickstart with three kinds of models: dense, with layers that carry a state, and with experts.

    python -m benchmarks.learning_models [--kinds dense hybrid mixture] [--seeds 0 1 2]

Each run is the quickstart in a process of its own, on one thread: the same words, the same warm start by imitation, the
same 60 steps of GRPO with the same options, and another model from random weights. All models have two layers of width
128 and a vocabulary of bytes:

    dense     Qwen3, MLPs of width 256
    hybrid    Qwen3.5, whose first layer is a gated delta net; MLPs of width 256
    mixture   Qwen3-MoE, 8 experts of width 128 in each layer, of which a token chooses 2; replay of the engine's choice

Printed and written to `docs/learning/models.md` and `models.png` are the held-out accuracy before and after GRPO and
the CPU seconds of the whole run with its warm start. The exit status is 0 if each hybrid and mixture gains at least 0.3
within three times the mean CPU time of the dense runs.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import rlite

# rlite before torch: it sets how idle threads wait, which torch reads once
import torch  # isort: skip
from matplotlib.figure import Figure
from transformers import AutoConfig, AutoModelForCausalLM

from rlite.assembly.commands.options import QuickstartConfig
from rlite.assembly.quickstart.run import build_tiny_qwen3, byte_tokenizer, problems, reinforce, warm_start
from rlite.nn.pretrained import quiet_transformers
from rlite.services.console.sinks import read_metrics

LEAST_GAIN, MOST_TIME = 0.3, 3.0
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "hybrid": {
        "model_type": "qwen3_5_text",
        "intermediate_size": 256,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
    "mixture": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
}
"""fields of a config beside the common sizes; the dense model is the quickstart's"""
COLORS = {"dense": "#4b5563", "hybrid": "#2563eb", "mixture": "#ea580c"}


def build_blank(kind: str, folder: Path, seed: int) -> Path:
    """Write an untrained model of a kind, with its tokenizer."""
    if kind == "dense":
        return build_tiny_qwen3(folder, seed=seed, hidden_size=128, intermediate_size=256)
    tokenizer = byte_tokenizer()
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(**SIZES, **KINDS[kind], **tokens, vocab_size=len(tokenizer))
    torch.manual_seed(seed)
    with quiet_transformers():
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def learn(kind: str, seed: int, folder: Path) -> None:
    """Run the quickstart with a model of a kind, and write the CPU seconds of this process and of its children."""
    options = QuickstartConfig(folder=str(folder), seed=seed)
    train, held_out = problems(options, folder)
    rlite.init(num_devices=1, num_threads=1)
    blank = build_blank(kind, folder / "blank", seed)
    warm_start(options, blank, folder, train)
    reinforce(options, folder, folder / "warm", train, held_out)
    rlite.shutdown()
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    (folder / "cpu.json").write_text(json.dumps(sum(usage.ru_utime + usage.ru_stime for usage in usages)))


def run_in_a_process(kind: str, seed: int, folder: Path) -> None:
    """Run `learn` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.learning_models", "--run", kind, str(seed), "--folder", str(folder)]
    subprocess.run(command, check=True)


def curve(folder: Path) -> tuple[list[float], list[float]]:
    """Return steps, and held-out accuracies at them."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "accuracy" in row]
    return [row["step"] for row in rows], [row["accuracy"] for row in rows]


def draw(folders: dict[tuple[str, int], Path], picture: Path) -> None:
    """Draw the held-out accuracy of all runs over the steps of GRPO."""
    figure = Figure(figsize=(6.4, 3.6), dpi=160, layout="constrained")
    panel = figure.subplots()
    for (kind, seed), folder in folders.items():
        label = kind if seed == min(seeds for each, seeds in folders if each == kind) else None
        panel.plot(*curve(folder), color=COLORS[kind], marker="o", markersize=3, label=label)
    panel.set(xlabel="step of GRPO", ylabel="held-out accuracy", ylim=(0, 1))
    panel.grid(color="#e5e7eb", linewidth=0.8)
    panel.legend(frameon=False)
    figure.savefig(picture)


def report(folders: dict[tuple[str, int], Path], out: Path) -> bool:
    """Write the table and the picture, and return True if every gain and time is as required."""
    seconds = {run: json.loads((folder / "cpu.json").read_text()) for run, folder in folders.items()}
    dense = [each for (kind, _), each in seconds.items() if kind == "dense"]
    lines = [
        "| model | seed | before GRPO | after | gain | CPU seconds of the whole run | of the dense runs' mean |",
        "|---|---|---|---|---|---|---|",
    ]
    is_met = True
    for (kind, seed), folder in folders.items():
        _, accuracies = curve(folder)
        gain, share = accuracies[-1] - accuracies[0], seconds[kind, seed] / statistics.mean(dense or [float("nan")])
        is_met &= kind == "dense" or (gain >= LEAST_GAIN and share <= MOST_TIME)
        accuracy = f"{accuracies[0]:.2f} | {accuracies[-1]:.2f} | {gain:+.2f}"
        lines.append(f"| {kind} | {seed} | {accuracy} | {seconds[kind, seed]:.0f} | {share:.2f} |")
    print("\n".join(lines))
    draw(folders, out / "models.png")
    text = [
        "# Dense models, hybrids and mixtures of experts learn the same task",
        "",
        "`python -m benchmarks.learning_models` writes this page. Each run is the quickstart on one thread with",
        "another model from random weights: Qwen3 (dense), Qwen3.5 (hybrid), Qwen3-MoE (mixture). All options are",
        "the quickstart's. The accuracy is on 256 held-out words.",
        "",
        *lines,
        "",
        "![Held-out accuracy of dense models, hybrids and mixtures](models.png)",
        "",
    ]
    (out / "models.md").write_text("\n".join(text), encoding="utf-8")
    return is_met


def main() -> None:
    """Make the runs that are missing in the folder, then report them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/learning_models"))
    parser.add_argument("--out", type=Path, default=Path("docs/learning"), help="folder of the table and the picture")
    parser.add_argument("--run", nargs=2, metavar=("KIND", "SEED"), help="one run, in this process")
    asked = parser.parse_args()
    if asked.run:
        learn(asked.run[0], int(asked.run[1]), asked.folder)
        return
    folders = {(kind, seed): asked.folder / f"{kind}-{seed}" for seed in asked.seeds for kind in asked.kinds}
    for (kind, seed), folder in folders.items():
        if not (folder / "cpu.json").exists():
            run_in_a_process(kind, seed, folder)
    sys.exit(0 if report(dict(sorted(folders.items())), asked.out) else 1)


if __name__ == "__main__":
    main()
