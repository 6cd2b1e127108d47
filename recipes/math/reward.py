"""Make math-verify's scorer known to commands: `--import recipes/math/reward.py rollout.reward=math_verify`."""

from rlite.rollout.registry import register_reward
from rlite.rollout.rewards import math_verify_reward

register_reward("math_verify")(math_verify_reward)
