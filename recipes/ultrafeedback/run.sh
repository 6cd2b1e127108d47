#!/bin/sh
# DPO on UltraFeedback. Not yet run at full size.
#   python -m recipes.ultrafeedback.prepare && recipes/ultrafeedback/run.sh [key=value ...]
set -eu
cd "$(dirname "$0")/../.."
exec torchrun --standalone --nproc_per_node="${NUM_GPUS:-8}" -m rlite.trainer.dpo \
    actor.model_name="${MODEL:-allenai/Llama-3.1-Tulu-3-8B-SFT}" \
    actor.lr=5e-7 \
    actor.beta=0.1 \
    data.path=data/ultrafeedback/train.jsonl \
    test_data.path=data/ultrafeedback/test.jsonl \
    data.max_length=2048 \
    data.batch_size=128 \
    trainer.n_epochs=1 \
    trainer.save_dir=runs/ultrafeedback \
    "$@"
