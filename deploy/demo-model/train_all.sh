#!/usr/bin/env bash
# The whole training on one GPU: autoencoder, transformer, export, scores. About 20 minutes on an H200.
#   bash train_all.sh [RUN folder]      VAE_MINUTES and JOINT_MINUTES set the two budgets
# The exported checkpoint lands in RUN/checkpoint, its scores and pictures in RUN/scores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
run=${1:-run}
mkdir -p "$run"
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
python3 train.py vae --out "$run" --minutes "${VAE_MINUTES:-3.9}" --workers 4 --log-every 500
python3 train.py joint --out "$run" --minutes "${JOINT_MINUTES:-13.5}" --log-every 200
python3 train.py export --out "$run" --checkpoint "$run/checkpoint"
python3 evaluate.py "$run/checkpoint" --out "$run/scores"
