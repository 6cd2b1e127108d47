#!/bin/sh
# Dr. GRPO with advantages divided by the group's deviation, on GSM8K with the ready scorer. Not yet run at full size.
#   python -m recipes.gsm8k.prepare && recipes/gsm8k/run.sh [key=value ...]
set -eu
cd "$(dirname "$0")/../.."
exec torchrun --standalone --nproc_per_node="${NUM_GPUS:-8}" -m rlite.trainer.ppo \
    actor.model_name="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" \
    actor.lr=1e-6 \
    train_data.path=data/gsm8k/train.jsonl \
    test_data.path=data/gsm8k/test.jsonl \
    train_data.prompts_per_rollout=128 \
    train_data.responses_per_prompt=8 \
    reward.path=rlite.rollout.rewards.gsm8k:gsm8k_reward \
    rollout.train_sampling_params.max_new_tokens=512 \
    adv.norm_var=true \
    trainer.total_steps=200 \
    trainer.save_dir=runs/gsm8k \
    "$@"
