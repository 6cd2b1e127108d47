"""GRPO in an environment of several turns: count letters, and if the first number is wrong, try once more.

    python examples/gym_environment.py [STEPS]

The environment has Gymnasium's methods, and nothing of ours: `reset(seed=...)` and `step(action)`. Its puzzles, and
what an answer is worth, are reasoning-gym's (pip install 'rlite[quickstart]').
"""

import re
import sys

import rlite
from rlite.assembly.quickstart.run import build_tiny_qwen3, byte_tokenizer
from rlite.data.reasoning import build_problems, question_of
from rlite.rollout import GymEnvironment, GymWorkflow
from rlite.rollout.rewards.reasoning import verify_exactly
from rlite.trainer.options import SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions


class TwoAttempts:
    """The first digit that the model writes is its answer. A right one is worth 1, at the second attempt 0.5."""

    def __init__(self, problem):
        self.problem, self.worth = problem, 1.0

    def reset(self, seed):
        return question_of(self.problem), {}

    def step(self, action):
        number = re.search(r"\d", action)
        score = verify_exactly("", number.group() if number else "", [], [], **self.problem)
        reward, is_last = self.worth * score, self.worth < 1
        self.worth = 0.5
        return "No. Once more:", reward, score == 1 or is_last, False, {}


def main(steps: int) -> None:
    rlite.init(num_devices=1)
    model = str(build_tiny_qwen3("runs/example-gym/model", seed=0))
    # each step of an environment has a time-out, in a process that can be killed
    environment = GymEnvironment(TwoAttempts, timeout=20)
    sampling = SamplingOptions(max_new_tokens=4)
    workflow = GymWorkflow(environment, sampling.gconfig(), byte_tokenizer(), max_turns=2)
    problems = build_problems("letter_counting", 500, seed=0, max_words=8)
    rows = [{"seed": seed, "env_options": {"problem": problem}} for seed, problem in enumerate(problems)]
    options = PpoConfig(
        actor=ActorOptions(model_name=model, lr=2e-3, entropy_coef=0.02),
        train_data=PromptOptions(prompts_per_rollout=8, responses_per_prompt=8),
        rollout=RolloutOptions(train_sampling_params=sampling, max_turns=2),
        trainer=TrainerOptions(save_dir="runs/example-gym/run", total_steps=steps),
    )
    print(PpoTrainer(options, workflow, rows).fit())
    rlite.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
