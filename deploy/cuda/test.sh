#!/usr/bin/env bash
# Builds and runs the tests that need a GPU, on a machine with an H100 or H200 and a driver of CUDA 13.
#   bash deploy/cuda/test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh
install_packages
find_cargo
command -v nvidia-smi >/dev/null && nvidia-smi -L || die "there is no GPU: nvidia-smi finds none"
CUDA_HOME=$(bash deploy/cuda/toolkit.sh)
export CUDA_HOME
# One at a time: every test takes the GPU for itself.
cargo test --locked -p kernels -p model --features kernels/cuda,model/cuda --no-fail-fast -- --ignored --test-threads 1
cargo test --locked -p integration-tests --features cuda --test gpu -- --ignored --test-threads 1
