"""GRPO on an environment class for TRL's `environment_factory`, unmodified.

python examples/contracts/trl_counter.py
"""

import rlite


class Counter:
    def reset(self, target, **row):
        self.value, self.target = 0, target
        return f" Bring the counter to {target}."

    def add(self, number: int) -> str:
        """Add a number to the counter.

        Args:
            number: what to add
        """
        self.value += number
        return f"The counter is at {self.value}."

    def get_reward(self) -> float:
        return float(self.value == self.target)


if __name__ == "__main__":
    rows = [{"prompt": [{"role": "user", "content": "Use the tool."}], "target": number} for number in range(1, 50)]
    rollout = {"env_path": f"trl:{__file__}:Counter", "max_turns": 4}
    rlite.train("grpo", model="Qwen/Qwen3-0.6B", data=rows, rollout=rollout)
