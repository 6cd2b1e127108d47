"""GRPO on a task of reasoning-gym, with the task's own verifier.

pip install "rlite[quickstart]"
python examples/contracts/reasoning_gym_task.py
"""

import rlite
from rlite.data.reasoning import build_problems
from rlite.rollout.rewards import reasoning_gym_reward

if __name__ == "__main__":
    problems = build_problems("letter_counting", 500, seed=0, max_words=8)  # a task, its number of rows, its options
    rlite.train("grpo", model="Qwen/Qwen3-0.6B", data=problems, reward=reasoning_gym_reward)
