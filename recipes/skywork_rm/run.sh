#!/bin/sh
# A reward model from Skywork's preferences. Not yet run at full size.
#   python -m recipes.skywork_rm.prepare && recipes/skywork_rm/run.sh [key=value ...]
set -eu
cd "$(dirname "$0")/../.."
exec torchrun --standalone --nproc_per_node="${NUM_GPUS:-8}" -m rlite.trainer.rm \
    critic.model_name="${MODEL:-meta-llama/Llama-3.1-8B-Instruct}" \
    critic.lr=2e-6 \
    data.path=data/skywork_rm/train.jsonl \
    test_data.path=data/skywork_rm/test.jsonl \
    data.max_length=4096 \
    data.batch_size=128 \
    trainer.n_epochs=2 \
    trainer.save_dir=runs/skywork_rm \
    "$@"
