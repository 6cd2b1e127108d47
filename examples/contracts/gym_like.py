"""GRPO in an environment with Gymnasium's methods, whose observations and actions are texts.

python examples/contracts/gym_like.py
"""

import random


class Guess:
    def reset(self, seed=None):
        self.secret = random.Random(seed).randint(0, 9)
        return "Guess a number from 0 to 9. Write the number alone.", {}

    def step(self, action):
        guess = int(action) if action.strip().isdecimal() else -1
        told = "It is greater." if guess < self.secret else "It is less."
        return told, float(guess == self.secret), guess == self.secret, False, {}


def make():  # a new environment for each episode
    return Guess()


if __name__ == "__main__":
    import rlite

    rollout = {"env_path": __file__, "max_turns": 6}
    rlite.train("grpo", model="Qwen/Qwen3-0.6B", data=[{"seed": seed} for seed in range(1000)], rollout=rollout)
