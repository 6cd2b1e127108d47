#!/bin/sh
# Dr. GRPO on MATH, with math-verify as the reward. Not yet run at full size.
#   python -m recipes.math.prepare && recipes/math/run.sh [key=value ...]
set -eu
cd "$(dirname "$0")/../.."
exec torchrun --standalone --nproc_per_node="${NUM_GPUS:-8}" -m rlite.trainer.ppo \
    actor.model_name="${MODEL:-Qwen/Qwen2.5-Math-1.5B}" \
    actor.lr=1e-6 \
    train_data.path=data/math/train.jsonl \
    test_data.path="train[:500]@data/math/test.jsonl" \
    train_data.prompts_per_rollout=64 \
    train_data.responses_per_prompt=8 \
    reward.path=rlite.rollout.rewards.math:math_verify_reward \
    reward.timeout=10 \
    rollout.train_sampling_params.max_new_tokens=3072 \
    trainer.total_steps=300 \
    trainer.save_dir=runs/math \
    "$@"
