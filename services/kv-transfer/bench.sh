#!/usr/bin/env bash
# Every figure of BENCH.md in one run, of a release build, with `ucx_perftest` beside ours: JSON, then a table.
# Run it on a machine that does nothing else. PROFILE=dev measures the build that is there already; MIB, ROUNDS
# and PERFTEST change what is measured.
set -euo pipefail
cd "$(dirname "$0")/../.."
profile=${PROFILE:-release}
perftest=${PERFTEST:-$(command -v ucx_perftest || true)}
cargo build --quiet --profile "$profile" -p omni --bin omni
binary=$(cargo metadata --no-deps --format-version 1 | python3 -c 'import json,sys; print(json.load(sys.stdin)["target_directory"])')
binary=$binary/${profile/#dev/debug}/omni
uptime
out=$(mktemp)
trap 'rm -f "$out"' EXIT
"$binary" bench transfer --mib "${MIB:-0.0625,1,16,64,512}" --rounds "${ROUNDS:-5}" \
    ${perftest:+--perftest "$perftest"} | tee "$out"
uptime
python3 - "$out" <<'PY'
import json, sys

results = json.load(open(sys.argv[1]))["results"]
print("\nway  MiB     publish  hand over/fetch  copy out  perftest  ratio  digest  layer  ready  8 read  heads")
for r in results:
    shm = r["transport"] == "shm"
    perf = max((v for v in r.get("ucx_perftest_gb_s", {}).values() if v), default=0)
    # Of the time that the receiver needs: beyond a plain copy where there is one, else of the transfer, most of
    # which the checks run beside.
    digest = (r["copy_out_ms"] - r["copy_alone_ms"]) / r["copy_out_ms"] if shm else r["checks_ms"] / r["fetch_ms"]
    layers = r["layers"]
    print(f'{r["transport"]:4} {r["bytes"] / 2**20:<7g} {r["publish_gb_s"]:7.2f}  {r["fetch_ms"]:13.2f} ms '
          f'{r["copy_out_gb_s"]:9.2f}  {perf:8.2f}  {r.get("of_the_better") or 0:5.2f}  {digest:6.1%} '
          f'{layers["layer_write_ms"]:6.2f} {layers["ready_after_begin_of_last_layer_ms"]:6.2f} '
          f'{r["fan_out"]["ms"]:7.0f}  {r["reshard"][0]["of_payload"]:.2f}')
print("GB/s but for hand over, layer, ready and 8 read, which are ms; heads: bytes of 4 receivers : payload")
PY
