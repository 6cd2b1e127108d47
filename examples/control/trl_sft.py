"""TRL's SFTTrainer under the control plane: if its process fails, another one resumes from TRL's own checkpoint.

    python examples/control/trl_sft.py FOLDER [STEPS]

The example needs TRL (pip install trl) and runs on CPU, with a tiny model of random weights. `train` knows nothing of
rlite: it is what your own script would do.
"""

import os
import sys
from pathlib import Path

import datasets
import torch
import transformers
import trl

import rlite
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.control import BaseTrainer, BaseWorkload, RLJobBuilder

SAVE_FREQ = 5
TEXTS = [f"{a} + {b} = {a + b}" for a in range(20) for b in range(20)]


def tiny_model(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.Qwen3ForCausalLM(config)


def newest_checkpoint(folder: Path) -> str | None:
    """Return TRL's newest complete checkpoint. A killed process may leave a part of one; this file is written last."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(complete, key=lambda path: int(path.name.split("-")[1]))) if complete else None


def train(folder: Path, steps: int) -> None:
    tokenizer, checkpoint = byte_tokenizer(), newest_checkpoint(folder)
    print(f"process {os.getpid()}: from {checkpoint}", flush=True)
    options = trl.SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        max_length=64,
        save_steps=SAVE_FREQ,
        save_total_limit=2,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    data, model = datasets.Dataset.from_dict({"text": TEXTS}), tiny_model(tokenizer)
    trainer = trl.SFTTrainer(model, options, train_dataset=data, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(folder / "final"))


class Sft(BaseWorkload):
    def train(self) -> None:
        train(Path(self.config.folder), self.config.steps)


class Trainer(BaseTrainer):
    def init(self) -> None: ...

    def fit(self) -> None:
        self.RG_ACTOR.train()


def main(folder: Path, steps: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    job = RLJobBuilder().device_per_node(1).device_type("CPU").trainer(Trainer)
    job = job.config({"folder": str(folder.resolve()), "steps": steps})
    job = job.actor(Sft).total(1).per_node(1).end()
    print(job.build().submit(job_name="trl-sft"))
    rlite.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int((sys.argv[2:] or ["50"])[0]))
