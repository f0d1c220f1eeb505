#!/usr/bin/env bash
# Compiles every GPU kernel and lints the code behind the feature `cuda`; needs no GPU.
#   bash deploy/cuda/check.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh
find_cargo
CUDA_HOME=$(bash deploy/cuda/toolkit.sh)
export CUDA_HOME
cargo clippy --locked -p kernels -p model -p stage -p dit-worker -p ar-stage -p omni \
    --features kernels/cuda,model/cuda,stage/cuda,dit-worker/cuda,ar-stage/cuda,omni/cuda --all-targets -- -D warnings
