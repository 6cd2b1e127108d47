#!/bin/sh
# Countdown with the settings of TinyZero's 3B run. Not yet run at full size.
#   python -m recipes.countdown.prepare && recipes/countdown/run.sh [key=value ...]
set -eu
cd "$(dirname "$0")/../.."
exec torchrun --standalone --nproc_per_node="${NUM_GPUS:-8}" -m rlite.trainer.ppo \
    actor.model_name="${MODEL:-Qwen/Qwen2.5-3B}" \
    actor.lr=1e-6 \
    actor.update_per_rollout=2 \
    train_data.path=data/countdown/train.jsonl \
    test_data.path="train[:256]@data/countdown/test.jsonl" \
    train_data.prompts_per_rollout=64 \
    train_data.responses_per_prompt=8 \
    rollout.env_path=examples/environments/countdown.py \
    rollout.train_sampling_params.max_new_tokens=1024 \
    kl.type=loss \
    kl.coef=0.001 \
    trainer.total_steps=300 \
    trainer.save_dir=runs/countdown \
    "$@"
