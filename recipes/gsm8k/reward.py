"""Make the ready scorer of GSM8K known to commands: `--import recipes/gsm8k/reward.py rollout.reward=gsm8k`."""

from rlite.rollout.registry import register_reward
from rlite.rollout.rewards import gsm8k_reward

register_reward("gsm8k")(gsm8k_reward)
