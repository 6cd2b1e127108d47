"""GRPO with the ready trainer: your model, your prompts, your reward.

    python examples/grpo.py [STEPS]

Its pair, `grpo_from_engines.py`, writes the same loop out.
"""

import sys

import rlite
from rlite.assembly.quickstart.run import build_tiny_qwen3, byte_tokenizer
from rlite.rollout import RewardFunction, SingleTurnWorkflow
from rlite.trainer.options import TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions
from rlite.types import GenerationHyperparameters


def digits(prompt, completions, prompt_ids, completion_ids, **row):
    """Share of digits in the completion; `row` holds the rest of the data's row."""
    return sum(character.isdigit() for character in completions) / max(len(completions), 1)


def main(steps: int) -> None:
    rlite.init(num_devices=1)
    model = str(build_tiny_qwen3("runs/example-grpo/model", seed=0))
    rows = [{"messages": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(10) for b in range(10)]
    workflow = SingleTurnWorkflow(
        RewardFunction(digits), GenerationHyperparameters(max_new_tokens=12), byte_tokenizer()
    )
    options = PpoConfig(
        actor=ActorOptions(model_name=model, lr=3e-3),
        train_data=PromptOptions(prompts_per_rollout=8, responses_per_prompt=8),
        trainer=TrainerOptions(save_dir="runs/example-grpo/run", total_steps=steps),
    )
    print(PpoTrainer(options, workflow, rows).fit())
    rlite.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
