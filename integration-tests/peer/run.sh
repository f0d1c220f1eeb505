#!/usr/bin/env bash
# One denoise step of the same checkpoint in Omni and in PyTorch, alternately, with the same threads.
# Prints one JSON object: the medians, both spreads, and how many times faster Omni is. It measures;
# it is no test.
#   PYTHON=python3 bash integration-tests/peer/run.sh [options of denoise_torch.py, e.g. --compile]
# Environment: THREADS (2), ROUNDS (5), STEPS (100), OMNI (a release build of `omni` by default).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
threads=${THREADS:-2}
rounds=${ROUNDS:-5}
steps=${STEPS:-100}
model=integration-tests/fixtures/golden/model
peer=integration-tests/peer/denoise_torch.py

"$python" -c 'import torch, safetensors, numpy' 2>/dev/null || {
    printf 'error: %s lacks PyTorch: pip install torch safetensors numpy, or set PYTHON\n' "$python" >&2
    exit 1
}
omni=${OMNI:-}
if [ -z "$omni" ]; then
    cargo build --locked --release --package omni
    omni=$(cargo metadata --locked --no-deps --format-version 1 |
        sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')/release/omni
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for round in $(seq "$rounds"); do
    printf 'round %s of %s\n' "$round" "$rounds" >&2
    "$python" "$peer" --threads "$threads" --steps "$steps" --json "$@" >"$scratch/torch.$round.json"
    # The peer's request: two rows, 256x256, 24 tokens before the image.
    "$omni" bench denoise --model "$model" --threads "$threads" --rows 2 --size 256x256 \
        --prefix 24 --steps "$steps" >"$scratch/omni.$round.json"
done

"$python" - "$scratch" <<'PYTHON'
import json, pathlib, statistics, sys

folder = pathlib.Path(sys.argv[1])
runs = {name: [json.loads(p.read_text()) for p in sorted(folder.glob(f"{name}.*.json"))] for name in ("omni", "torch")}
ms = {name: [run["ms_per_step"] for run in of] for name, of in runs.items()}
median = {name: statistics.median(values) for name, values in ms.items()}
print(json.dumps({
    "peer": runs["torch"][0]["peer"],
    "compiled": runs["torch"][0]["compiled"],
    "threads": runs["torch"][0]["threads"],
    "rounds": len(ms["omni"]),
    "omni_ms_per_step": median["omni"],
    "torch_ms_per_step": median["torch"],
    "omni_ms_range": [min(ms["omni"]), max(ms["omni"])],
    "torch_ms_range": [min(ms["torch"]), max(ms["torch"])],
    "times_faster": median["torch"] / median["omni"],
}, indent=2))
PYTHON
