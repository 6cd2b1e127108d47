"""Mathematics in two attempts: math-verify judges an answer, and a wrong one may be corrected once.

    rlite ppo actor.model_name=MODEL rollout.env_path=examples/environments/mathematics.py rollout.max_turns=2 \\
        train_data.path=rows.jsonl

A row has a seed and the arguments of `make`: {"seed": 0, "env_options": {"problem": "...", "answer": "1/2"}}. A right
answer is worth 1 at the first attempt and 0.5 at the second (pip install 'rlite[math]').
"""

from rlite.rollout.rewards import math_verify_reward

INSTRUCTION = r"Think step by step, and put the final answer in \boxed{}."
WORTH = (1.0, 0.5)


class TwoAttempts:
    def __init__(self, problem, answer):
        self.problem, self.answer = problem, answer
        self.num_attempts = 0

    def reset(self, seed):
        return f"{self.problem} {INSTRUCTION}", {}

    def step(self, action):
        is_right = math_verify_reward("", action, [], [], answer=self.answer) == 1
        reward = WORTH[self.num_attempts] if is_right else 0.0
        self.num_attempts += 1
        is_over = is_right or self.num_attempts == len(WORTH)
        return "That is not correct. Look for the mistake, and answer again.", reward, is_over, False, {}


def make(problem, answer):
    return TwoAttempts(problem, answer)
